"""The two pictures that the demo leaves behind, composed from plain tensors."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from PIL import Image
from torch import Tensor

from posthoc_uq.likelihoods.metrics import calibration_bins, expected_calibration_error, ood_auroc

FLOOR = 1e-5
"""Smaller scores are drawn here."""

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
GREY = "#595959"
KIND_COLOURS = {"photo": "#0072B2", "new photo": "#009E73", "texture": "#D55E00", "noise": "#D55E00"}
"""Frames of the pictures by kind; every other kind has the last colour of the foreign ones."""


class Example(NamedTuple):
    """One small image of the digits picture: what the network says of it, and how sure the posterior is."""

    image: Tensor
    caption: str
    scores: Mapping[str, float]
    group: str


class Tile(NamedTuple):
    """One image of the photos picture with its most probable classes, (name, probability), and its scores."""

    image: Image.Image
    name: str
    kind: str
    top: Sequence[tuple[str, float]]
    scores: Mapping[str, float]


def digits_figure(
    calibration: Mapping[str, tuple[Tensor, Tensor]],
    scores: Mapping[str, Mapping[str, Tensor]],
    examples: Sequence[Example],
) -> Figure:
    """Reliability diagram, one histogram panel for each score, and a row of examples.

    Args:
        calibration: by model, its probs (inputs, classes) and the labels (inputs,).
        scores: by panel, by data set (the familiar one first), scores (inputs,).
        examples: in the order in which they are shown; neighbours of one group share a heading.
    """
    figure = _figure(15, 7.2)
    upper, lower = np.asarray(figure.subfigures(2, 1, height_ratios=(2.3, 1)))
    panels = upper.subplots(1, 1 + len(scores))
    _reliability(panels[0], calibration)
    for axes, (title, sets) in zip(panels[1:], scores.items(), strict=True):
        _histogram(axes, title, sets)
    tiles = lower.subplots(1, len(examples))
    last_group = ""
    for axes, example in zip(tiles, examples, strict=True):
        axes.imshow(example.image.squeeze(0).numpy(), cmap="gray_r", vmin=0, vmax=1)
        heading = "" if example.group == last_group else example.group
        last_group = example.group
        axes.set_title(heading, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel("\n".join([example.caption, *_numbers(example.scores)]), fontsize=8)
        _bare(axes, "#BBBBBB")
    return figure


def photos_figure(tiles: Sequence[Tile], columns: int = 6) -> Figure:
    """A grid of images, each over its three most probable classes and its scores."""
    rows = -(-len(tiles) // columns)
    figure = _figure(2.45 * columns, 3.75 * rows)
    grid = figure.subplots(2 * rows, columns, height_ratios=(2.6, 1) * rows, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, columns)
        above, below = grid[2 * row, column], grid[2 * row + 1, column]
        above.set_visible(True)
        below.set_visible(True)
        above.imshow(np.asarray(tile.image))
        _bare(above, KIND_COLOURS.get(tile.kind, COLOURS[3]))
        above.set_title(f"{tile.name} ({tile.kind})", fontsize=10, fontweight="bold")
        above.set_xlabel("\n".join(_numbers(tile.scores)), fontsize=9)
        _bars(below, tile.top)
    return figure


def _numbers(scores: Mapping[str, float]) -> list[str]:
    """One line per score."""
    return [f"{name} {value:.2g}" for name, value in scores.items()]


def _reliability(axes: Axes, calibration: Mapping[str, tuple[Tensor, Tensor]], bins: int = 10) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    for index, (name, (probs, labels)) in enumerate(calibration.items()):
        confidence, accuracy, count = calibration_bins(probs, labels, bins)
        filled = count >= 5  # with fewer inputs a bin's accuracy means little
        axes.plot(
            confidence[filled].numpy(),
            accuracy[filled].numpy(),
            color=COLOURS[index % len(COLOURS)],
            marker="os^D"[index % 4],
            markersize=5,
            label=f"{name}: ECE {expected_calibration_error(probs, labels):.3f}",
        )
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    axes.set_title("Calibration on test digits", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    _clean(axes)


def _histogram(axes: Axes, title: str, sets: Mapping[str, Tensor]) -> None:
    """Shares of the inputs on a logarithmic axis: the first set filled, the others with their AUROC."""
    familiar = next(iter(sets.values()))
    logs = {name: np.log10(values.double().clamp(min=FLOOR).numpy()) for name, values in sets.items()}
    edges = np.linspace(min(v.min() for v in logs.values()), max(v.max() for v in logs.values()) + 1e-9, 31)
    for index, (name, values) in enumerate(logs.items()):
        share = np.histogram(values, edges)[0] / len(values)
        label = name if index == 0 else f"{name}: AUROC {ood_auroc(familiar, sets[name]):.3f}"
        colour = COLOURS[(index + 1) % len(COLOURS)]
        axes.stairs(share, 10.0**edges, color=colour, linewidth=1.6, label=label)
        if index == 0:
            axes.stairs(share, 10.0**edges, color=colour, fill=True, alpha=0.25)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="score", ylabel="share of images", ylim=(0, None))
    axes.set_title(title, fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.35)
    _clean(axes)


def _bars(axes: Axes, top: Sequence[tuple[str, float]]) -> None:
    """Classes and probabilities as text on bars, the most probable one on top."""
    heights = list(range(len(top)))[::-1]
    axes.barh(heights, [1.0] * len(top), color="#F0F0F0", height=0.86)
    axes.barh(heights, [probability for _, probability in top], color="#9CC9E8", height=0.86)
    for height, (name, probability) in zip(heights, top, strict=True):
        short = name if len(name) <= 21 else f"{name[:20]}…"
        axes.text(0.02, height, short, va="center", fontsize=9)
        axes.text(0.99, height, f"{probability:.2f}", va="center", ha="right", fontsize=9)
    axes.set(xlim=(0, 1), ylim=(-0.6, len(top) - 0.4))
    axes.axis("off")


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _bare(axes: Axes, frame: str) -> None:
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=frame, linewidth=2)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
