"""Text whose background says how novel every character was."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor


def coloured_text(lines: Mapping[str, tuple[str, Tensor]]) -> Figure:
    """A picture of some lines of text.

    Args:
        lines: name to a text and a positive number a character; the number at a character belongs to the prediction of
            the next one, and colours that one.
    """
    longest = max(len(text) for text, _ in lines.values())
    figure = Figure(figsize=(0.16 * longest + 1.8, 0.45 * len(lines) + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    values = [value for _, numbers in lines.values() for value in numbers.tolist()]
    norm, colours = LogNorm(min(values), max(values)), matplotlib.colormaps["Oranges"]
    for line, (name, (text, numbers)) in enumerate(lines.items()):
        axes.text(-1, -line, name, ha="right", va="center", fontsize=9)
        for place, letter in enumerate(text):
            colour = colours(norm(numbers[place - 1].item())) if place else (1.0, 1.0, 1.0, 1.0)
            axes.text(
                place, -line, letter if letter != "\n" else " ", family="monospace", ha="center", va="center",
                fontsize=10, bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.6},
            )  # fmt: skip
    axes.set(xlim=(-9, longest), ylim=(-len(lines) + 0.4, 0.6))
    axes.axis("off")
    figure.colorbar(
        matplotlib.cm.ScalarMappable(norm, colours), ax=axes, label="novelty", fraction=0.03, pad=0.01
    )
    return figure
