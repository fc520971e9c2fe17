"""Photos: an ImageNet classifier as it is, and what it does not know about pictures of all kinds.

python -m recipes.photos.run            EfficientNet-Lite0 on 96 crops; a few minutes
python -m recipes.photos.run --smoke    8 crops

The posterior is over the last layer. One over all fifty layers needs a backward pass for each leading class of every
picture, at every prior precision that the fit tries. All else is the library's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import posthoc_uq as uq
from recipes.common import looked_at, markdown, parsed, parser, report, save_figure
from recipes.photos.efficientnet import class_names, efficientnet_lite0
from recipes.photos.pictures import (
    FIT_PHOTOS,
    Picture,
    centre_crop,
    photo,
    pictures,
    preprocess,
    random_crops,
)

SCORES = {"entropy": "entropy", "mutual_information": "mutual inf.", "novelty": "novelty"}
"""Scores that are shown, with what they are called."""
KIND_COLOURS = {"photo": "#0072B2", "new photo": "#009E73", "texture": "#D55E00", "noise": "#D55E00"}
"""Frames of the pictures by kind; drawings have `OTHER_COLOUR`."""
OTHER_COLOUR = "#CC79A7"


def espresso_probability(model: nn.Module, names: list[str]) -> float:
    """The probability of espresso that the network alone gives to the coffee photo: about 0.95 if all is well."""
    with torch.no_grad():
        probs = model(preprocess([photo("coffee.png")])).softmax(dim=-1)
    return float(probs[0, names.index("espresso")])


def tables(shown: list[Picture], prediction: uq.ClassPrediction, names: list[str]) -> str:
    """What the network says of each picture and how unsure it is, and means by kind."""
    scores = {title: prediction.scores()[name] for name, title in SCORES.items()}
    rows = [["picture", "kind", *scores, "most probable"]]
    for index, picture in enumerate(shown):
        best = ", ".join(f"{name} {probability:.2f}" for name, probability in top(prediction, index, names))
        numbers = [f"{float(score[index]):.3f}" for score in scores.values()]
        rows.append([picture.name, picture.kind, *numbers, best])
    means = [["kind", *scores]]
    for kind in dict.fromkeys(picture.kind for picture in shown):
        members = torch.tensor([picture.kind == kind for picture in shown])
        means.append([kind, *(f"{float(score[members].mean()):.3f}" for score in scores.values())])
    return f"{markdown(rows)}\n\nMeans by kind:\n\n{markdown(means)}"


def top(prediction: uq.ClassPrediction, index: int, names: list[str]) -> list[tuple[str, float]]:
    """The three most probable classes of one picture."""
    best = prediction.top_k(3)
    pairs = zip(best.labels[index].tolist(), best.probabilities[index].tolist(), strict=True)
    return [(names[label], probability) for label, probability in pairs]


def figure(
    shown: list[Picture], prediction: uq.ClassPrediction, names: list[str], columns: int = 6
) -> Figure:
    """A grid of images, each over its scores and its three most probable classes."""
    known = prediction.scores()
    rows = -(-len(shown) // columns)
    drawn = Figure(figsize=(2.45 * columns, 3.75 * rows), layout="constrained")
    grid = drawn.subplots(2 * rows, columns, height_ratios=(2.6, 1) * rows, squeeze=False)
    for index, picture in enumerate(shown):
        row, column = divmod(index, columns)
        above, below = grid[2 * row, column], grid[2 * row + 1, column]
        above.imshow(np.asarray(centre_crop(picture.image)))
        above.set(xticks=[], yticks=[])
        for spine in above.spines.values():
            spine.set(color=KIND_COLOURS.get(picture.kind, OTHER_COLOUR), linewidth=2)
        above.set_title(f"{picture.name} ({picture.kind})", fontsize=10, fontweight="bold")
        lines = [f"{title} {float(known[name][index]):.2g}" for name, title in SCORES.items()]
        above.set_xlabel("\n".join(lines), fontsize=9)
        bars(below, top(prediction, index, names))
    return drawn


def bars(axes: Axes, best: list[tuple[str, float]]) -> None:
    """Classes and probabilities as text on bars, the most probable one on top."""
    heights = list(range(len(best)))[::-1]
    axes.barh(heights, [1.0] * len(best), color="#F0F0F0", height=0.86)
    axes.barh(heights, [probability for _, probability in best], color="#9CC9E8", height=0.86)
    for height, (name, probability) in zip(heights, best, strict=True):
        short = name if len(name) <= 21 else f"{name[:20]}…"
        axes.text(0.02, height, short, va="center", fontsize=9)
        axes.text(0.99, height, f"{probability:.2f}", va="center", ha="right", fontsize=9)
    axes.set(xlim=(0, 1), ylim=(-0.6, len(best) - 0.4))
    axes.axis("off")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, and leave a table, a picture and the posterior in the output folder."""
    command = parser(__doc__, "photos", "8 crops: shows that the recipe runs")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(crops=96)
    options = parsed(command, arguments, crops=8)
    with looked_at():
        model, names = efficientnet_lite0(), class_names()
        shown = pictures(options.seed)
    espresso = espresso_probability(model, names)
    images = random_crops([photo(name) for name in FIT_PHOTOS], options.crops, options.seed)
    posterior = uq.fit(model, images.split(16), layers="last", seed=options.seed, progress=False)
    uq.save(posterior, options.output / "photos.inf.h5")
    prediction: Any = uq.wrap(model, posterior)(preprocess([picture.image for picture in shown]))
    save_figure(figure(shown, prediction, names), options.output / "photos.png", options.smoke)
    page = f"The network alone calls the coffee an espresso: {espresso:.3f}\n\n"
    scores = {name: prediction.scores()[name].tolist() for name in SCORES}
    report(options, "photos", page + tables(shown, prediction, names), scores | {"espresso": espresso})


if __name__ == "__main__":
    main()
