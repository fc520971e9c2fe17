"""Helpers of all figures: colours, frames, legends, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
GREY = "#595959"
REFERENCE = (0, (4, 3))
"""The dashes of reference lines."""


def new_figure(width: float, height: float) -> Figure:
    """A white figure of that many inches with its own canvas."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def clean(axes: Axes) -> None:
    """Light grid behind, no frame above and at the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def legend_above(axes: Axes, handles: Sequence[Artist] | None = None) -> None:
    """A legend above the axes, because lines and bars can pass through any corner inside."""
    options: dict[str, Any] = {} if handles is None else {"handles": handles}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2, **options)


def line_style(index: int) -> dict[str, Any]:
    """Colour and dash of the line at `index`, as keywords."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linewidth": 1.6,
        "linestyle": DASHES[index % len(DASHES)],
    }


def percent(share: float, position: int | None) -> str:
    """A tick label."""
    return f"{100 * share:.3g} %"


def value_range(low: float, high: float, pad: float) -> tuple[float, float]:
    """The range itself, or one of width `2 pad` around it when it is a single number."""
    return (low, high) if high > low else (low - pad, high + pad)


def wilson(
    share: NDArray[np.float64], count: NDArray[np.int64] | NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """95 % interval of a proportion (Wilson, "Probable inference", JASA 1927); valid at 0 and 1 too."""
    z = 1.96
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return centre - half, centre + half
