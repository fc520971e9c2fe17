"""The first picture of the README: what a classifier says of three pictures, and a regression with a gap.

python -m recipes.photos.first_picture            both fits; a minute
python -m recipes.photos.first_picture --smoke    few crops

The classifier is that of the recipe. No label is at hand, so a crop's label is what the network says of its whole
photograph. Half of the crops are held out: sets and familiarity come from them.
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
from recipes.photos.pictures import FIT_PHOTOS, centre_crop, photo, preprocess, random_crops

SHOWN = {
    "coffee.png": "a photo of coffee",
    "chelsea.png": "a photo of a cat",
    "microaneurysms.png": "part of a retina",
}
"""By file what it shows: an answer, one of three, and what is no class of ImageNet."""
BLUE, RED, GREY = "#0072B2", "#D55E00", "#595959"


def classified(crops: int, seed: int) -> tuple[uq.ClassPrediction, list[str]]:
    """The prediction of the shown pictures, and the names of the classes."""
    with looked_at():
        model = efficientnet_lite0()
    photos = [photo(name) for name in FIT_PHOTOS]
    with torch.no_grad():
        answers = model(preprocess(photos)).argmax(dim=-1)
    posterior = uq.fit(
        model, random_crops(photos, crops, seed).split(16), layers="last", seed=seed, progress=False
    )
    held_out, labels = random_crops(photos, crops, seed + 1), answers.repeat(crops // len(photos))
    loader = list(zip(held_out.split(16), labels.split(16), strict=True))
    posterior = uq.calibrate(posterior, loader, share=None, progress=False)
    prediction: Any = uq.wrap(model, posterior)(preprocess([photo(name) for name in SHOWN]))
    return prediction, class_names()


def gap(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy values of a curve, at places left and right of a gap."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)]).unsqueeze(1)
    return x, curve(x) + 0.1 * torch.randn(x.shape, generator=generator)


def curve(x: torch.Tensor) -> torch.Tensor:
    """The mean of the values."""
    return (1.6 * x).sin() + 0.2 * x


def regressed(x: torch.Tensor, y: torch.Tensor, seed: int) -> nn.Module:
    """A trained network."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1500):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def draw_photo(axes: Axes, name: str, index: int, prediction: uq.ClassPrediction, names: list[str]) -> None:
    """A picture with its set of classes and its familiarity below."""
    chosen, familiarity = prediction.set(0.9)[index], float(prediction.familiarity()[index])
    probs = prediction.probs[index]
    best = [int(c) for c in probs.argsort(descending=True) if chosen[c]]
    known = familiarity > 0.05
    colour = BLUE if known else RED
    axes.imshow(np.asarray(centre_crop(photo(name))))
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=colour, linewidth=4)
    words = [f"{names[c]}  {100 * float(probs[c]):.0f} %" for c in best[:3]]
    place = {"transform": axes.transAxes, "ha": "center", "va": "top"}
    axes.text(0.5, -0.05, "\n".join(words), fontsize=13, linespacing=1.35, **place)
    verdict = "familiar" if known else "foreign: do not trust"
    axes.set_title(verdict, color=colour, fontsize=15, fontweight="bold", pad=9)
    text = f"{familiarity:.2f}" if familiarity >= 0.01 else "below 0.01"
    axes.text(0.5, -0.40, f"{SHOWN[name]}\nfamiliarity {text}", fontsize=11, color=GREY, **place)


def draw_band(axes: Axes, seed: int) -> None:
    """The data, the network, and its interval, which is wide where there are no data."""
    x, y = gap(seed)
    model = regressed(x, y, seed)
    posterior = uq.fit(model, [(x, y)], "full", likelihood="regression", prior_precision=0.5, progress=False)
    grid = torch.linspace(-3.6, 3.6, 200).unsqueeze(1)
    prediction: Any = uq.wrap(model, posterior)(grid)
    low, high = (bound.flatten().numpy() for bound in prediction.interval(0.9))
    places = grid.flatten().numpy()
    axes.fill_between(places, low, high, color=BLUE, alpha=0.22, linewidth=0)
    axes.plot(places, prediction.mean.flatten().numpy(), color=BLUE, linewidth=2.2)
    axes.plot(x.flatten().numpy(), y.flatten().numpy(), "o", color="black", markersize=3.5)
    axes.set(xticks=[], yticks=[], xlim=(-3.6, 3.6), ylim=(-3.4, 3.4))
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set_title("no data, wide interval", color=BLUE, fontsize=15, fontweight="bold", pad=9)


def picture(prediction: uq.ClassPrediction, names: list[str], seed: int) -> Figure:
    """The whole picture: three photographs, and the regression."""
    figure = Figure(figsize=(11.8, 3.9), dpi=100, facecolor="white")
    for index, name in enumerate(SHOWN):
        draw_photo(figure.add_axes((0.01 + 0.205 * index, 0.33, 0.185, 0.56)), name, index, prediction, names)
    draw_band(figure.add_axes((0.66, 0.08, 0.33, 0.81)), seed)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, and leave the picture in the output folder."""
    command = parser(__doc__, "photos", "few crops: shows that the script runs")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(crops=120)
    options = parsed(command, arguments, crops=24)
    prediction, names = classified(options.crops, options.seed)
    drawn = picture(prediction, names, options.seed)
    save_figure(drawn, options.output / "first_picture.png", options.smoke)
    sets = [[names[c] for c in chosen.nonzero().flatten().tolist()] for chosen in prediction.set(0.9)]
    familiarity = prediction.familiarity().tolist()
    rows = [["picture", "set", "familiarity"]]
    for name, chosen, known in zip(SHOWN, sets, familiarity, strict=True):
        rows.append([name, ", ".join(chosen), f"{known:.3f}"])
    report(options, "first_picture", markdown(rows), {"sets": sets, "familiarity": familiarity})


if __name__ == "__main__":
    main()
