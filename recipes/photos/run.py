"""Photos: an ImageNet classifier as it is, and what it does not know about pictures of all kinds.

python recipes/photos/run.py            EfficientNet-Lite0 on 96 crops; a few minutes
python recipes/photos/run.py --smoke    8 crops

The posterior is over the last layer. One over all fifty layers needs a backward pass for each leading class of every
picture, at every prior precision that the fit tries. All else is the library's default.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from efficientnet import class_names, efficientnet_lite0
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pictures import FIT_PHOTOS, Picture, centre_crop, photo, pictures, preprocess, random_crops
from torch import nn

import posthoc_uq as uq
from posthoc_uq.core.tables import text_table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked, stamped

OUTPUT = Path(__file__).resolve().parents[1] / "output" / "photos"
SCORES = {"entropy": "entropy", "mutual_information": "mutual inf.", "novelty": "novelty"}
"""Scores that are shown, with what they are called."""
KIND_COLOURS = {"photo": "#0072B2", "new photo": "#009E73", "texture": "#D55E00", "noise": "#D55E00"}
"""Frames of the pictures by kind; drawings have `OTHER_COLOUR`."""
OTHER_COLOUR = "#CC79A7"


class Result(NamedTuple):
    """Predictions for the pictures shown, and the network's own probability of espresso for the coffee."""

    shown: list[Picture]
    prediction: uq.ClassPrediction
    espresso: float


def espresso_probability(model: nn.Module, names: list[str]) -> float:
    """The probability of espresso that the network alone gives to the coffee photo: about 0.95 if all is well."""
    with torch.no_grad():
        probs = model(preprocess([photo("coffee.png")])).softmax(dim=-1)
    return float(probs[0, names.index("espresso")])


def run(output: Path, seed: int = 0, crops: int = 96, smoke: bool = False) -> Result:
    """Fit, predict, and leave a table, a picture and the posterior in ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    model, names = efficientnet_lite0(), class_names()
    espresso = espresso_probability(model, names)
    images = random_crops([photo(name) for name in FIT_PHOTOS], crops, seed)
    posterior = uq.fit(model, images.split(16), layers="last", seed=seed, progress=False)
    uq.save(posterior, output / "photos.inf.h5")
    shown = pictures(seed)
    prediction = uq.wrap(model, posterior)(preprocess([picture.image for picture in shown]))
    table = marked(f"The network alone calls the coffee an espresso: {espresso:.3f}\n\n", smoke)
    table += tables(shown, prediction, names)
    (output / "photos.txt").write_text(table + "\n")
    print(table)
    stamped(figure(shown, prediction, names), smoke).savefig(output / "photos.png")
    return Result(shown, prediction, espresso)


def tables(shown: list[Picture], prediction: uq.ClassPrediction, names: list[str]) -> str:
    """What the network says of each picture and how unsure it is, and means by kind."""
    known = prediction.scores()
    scores = {title: known[name] for name, title in SCORES.items()}
    rows = [
        [
            picture.name,
            picture.kind,
            *(float(score[index]) for score in scores.values()),
            ", ".join(f"{name} {probability:.2f}" for name, probability in top(prediction, index, names)),
        ]
        for index, picture in enumerate(shown)
    ]
    kinds = list(dict.fromkeys(picture.kind for picture in shown))
    members = {kind: torch.tensor([picture.kind == kind for picture in shown]) for kind in kinds}
    means = [[kind, *(float(score[members[kind]].mean()) for score in scores.values())] for kind in kinds]
    each = text_table(["picture", "kind", *scores, "most probable"], rows, digits=3)
    return f"{each}\n\nMeans by kind\n\n{text_table(['kind', *scores], means, digits=3)}"


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
    drawn = Figure(figsize=(2.45 * columns, 3.75 * rows), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(drawn)
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


def main(arguments: list[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="8 crops: shows that the recipe runs")
    options = parser.parse_args(arguments)
    run(options.output, options.seed, 8 if options.smoke else 96, options.smoke)


if __name__ == "__main__":
    main()
