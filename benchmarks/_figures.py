"""Pictures of the cost benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _fits import METHODS
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

OURS, THEIRS = "#0072B2", "#D55E00"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
Row = Mapping[str, Any]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    return figure


def short(note: str) -> str:
    """A note with each of its errors cut to some words."""
    return "; ".join(part if len(part) <= 50 else part[:47] + "..." for part in note.split("; "))


def cost_bars(rows: Sequence[Row]) -> Figure:
    """One panel a network, a bar for each method and peer: the fit in multiples of the plain pass.

    A mark in our bars shows what of it are sweeps. A peer that failed has its error in place of a bar.
    """
    cases = list(dict.fromkeys(row["case"] for row in rows))
    panels = {case: [row for row in rows if row["case"] == case] for case in cases}
    heights = [0.22 * len(panel) + 0.9 for panel in panels.values()]
    figure = _figure(8, sum(heights))
    axes = figure.subplots(len(cases), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    largest = max((row["fit"] for row in rows if row["fit"] is not None), default=1.0)
    for axis, (case, panel) in zip(axes[:, 0], panels.items(), strict=True):
        for place, row in enumerate(panel):
            value, own = row["fit"], row["method"] in METHODS
            if value is None:
                axis.text(0.55, place, short(row["note"]), va="center", fontsize=7, color="0.4")
                continue
            axis.barh(place, value, color=OURS if own else THEIRS)
            if own:
                axis.plot(row["sweeps"], place, "|", color="white", markersize=8, markeredgewidth=1.5)
            axis.text(1.05 * value, place, f"{value:.3g}", va="center", fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(
            xscale="log", xlim=(0.5, 3 * max(largest, 10)), title=f"{case}, {panel[0]['samples']} images"
        )
        axis.set_yticks(range(len(panel)), [row["method"] for row in panel], fontsize=7)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.margins(y=0.01)
        axis.invert_yaxis()
        axis.grid(axis="x", linewidth=0.3)
    axes[-1, 0].set_xlabel("time of a fit, in plain forward-backward passes over the same data")
    handles = [Patch(color=OURS, label="ours (white mark: sweeps)"), Patch(color=THEIRS, label="peers")]
    figure.legend(handles=handles, fontsize=8, loc="outside upper right", ncols=2)
    return figure


def cost_lines(rows: Sequence[Row]) -> Figure:
    """One panel a study: seconds over what grows; full lines are the sweeps, dashed ones the fit."""
    studies = list(dict.fromkeys((row["study"], row["net"]) for row in rows))
    measured = [key for key in studies if any("peak + MiB" in row for row in _of(rows, key))]
    figure = _figure(3.6 * len(studies), 3.4 * (2 if measured else 1))
    axes = figure.subplots(2 if measured else 1, len(studies), squeeze=False)
    for column, key in enumerate(studies):
        panel, upper = _of(rows, key), axes[0, column]
        methods = list(dict.fromkeys(row["method"] for row in panel))
        colours = dict(zip(methods, LINES, strict=False))
        for method, colour in colours.items():
            own = [row for row in panel if row["method"] == method]
            places = [row["value"] for row in own]
            upper.plot(places, [row["sweeps, s"] for row in own], color=colour, marker="o", label=method)
            upper.plot(places, [row["fit, s"] for row in own], color=colour, linestyle="--")
            if key in measured:
                peaks = [row.get("peak + MiB") for row in own]
                axes[1, column].plot(places, peaks, color=colour, marker="o")
        own = [row for row in panel if row["method"] == methods[0]]
        values = [row["value"] for row in own]
        upper.plot(values, [row["plain, s"] for row in own], color="0.6", linestyle=":", label="plain pass")
        upper.set(yscale="log", title=f"{key[1]}: {key[0]}")
        for formatted in (upper.yaxis.set_major_formatter, upper.yaxis.set_minor_formatter):
            formatted(FuncFormatter(lambda value, _: f"{value:g}"))
        upper.legend(fontsize=7)
        for axis in axes[:, column]:
            axis.set(xscale="log", xlabel=key[0])
            axis.set_xticks(values, [str(value) for value in values])
            axis.xaxis.set_minor_locator(NullLocator())
        if key in measured:
            axes[1, column].margins(y=0.2)
            axes[1, column].set_ylim(0, None)
        elif measured:
            axes[1, column].set_axis_off()
    axes[0, 0].set_ylabel("seconds (full: sweeps, dashed: fit)")
    if measured:
        axes[1, studies.index(measured[0])].set_ylabel("peak memory of a fit, MiB")
    return figure


def _of(rows: Sequence[Row], key: tuple[str, str]) -> list[Row]:
    return [row for row in rows if (row["study"], row["net"]) == key]
