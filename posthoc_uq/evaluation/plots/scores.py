"""How scores are distributed on familiar and on foreign inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.evaluation.plots.style import (
    COLOURS,
    DASHES,
    clean,
    legend_above,
    new_figure,
    percent,
    value_range,
)
from posthoc_uq.likelihoods.metrics import ood_auroc


def score_histograms(
    scores: Mapping[str, Mapping[str, Tensor]], *, bins: int = 30, log: Collection[str] = ()
) -> Figure:
    """One panel per score: how it is distributed on familiar and on foreign inputs.

    Each panel's first entry is the familiar (in-distribution) one, drawn filled; the others are outlines,
    with the AUROC of telling them apart from the first in the legend. Bars are shares of the inputs.

    Args:
        scores: by panel, for instance "entropy of INF", by data set, for instance "in" and "letters": scores
            (inputs,), higher meaning stranger.
        bins: number of bins over the common range of a panel.
        log: the panels with a logarithmic axis, for scores that spread over orders of magnitude (such as
            `epistemic()`); scores that are not positive are drawn at the smallest positive one.

    Raises:
        PosthocUQError: nothing to draw, an empty data set, a name in `log` that is no panel, or scores that
            are not finite.
    """
    if not scores or not all(scores.values()):
        raise PosthocUQError("score_histograms needs at least one panel, each with at least one data set.")
    unknown = sorted(set(log) - set(scores))
    if unknown:
        raise PosthocUQError(f"log names panels that do not exist: {', '.join(unknown)}.")
    columns = min(len(scores), 3)
    rows = -(-len(scores) // columns)
    figure = new_figure(0.6 + 4.2 * columns, 3.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, sets) in zip(panels.flat, scores.items(), strict=False):
        _histogram_panel(axes, title, sets, bins, title in log)
    for axes in list(panels.flat)[len(scores) :]:
        axes.remove()
    for row in panels:
        row[0].set_ylabel("share of inputs")
    return figure


def _histogram_panel(
    axes: Axes, title: str, sets: Mapping[str, Tensor], bins: int, logarithmic: bool
) -> None:
    values = {name: tensor.detach().cpu().double().flatten().numpy() for name, tensor in sets.items()}
    for name, array in values.items():
        if array.size == 0 or not np.isfinite(array).all():
            raise PosthocUQError(f"The scores of {name!r} in {title!r} must be finite and not empty.")
    pooled = np.concatenate(list(values.values()))
    if logarithmic:
        if not (pooled > 0).any():
            raise PosthocUQError(f"{title!r} has no positive score, so its axis cannot be logarithmic.")
        smallest = pooled[pooled > 0].min()
        values = {name: np.maximum(array, smallest) for name, array in values.items()}
        pooled = np.maximum(pooled, smallest)
        edges = np.geomspace(*value_range(smallest, pooled.max(), smallest * 0.01), bins + 1)
        axes.set_xscale("log")
        if edges[-1] < 100 * edges[0]:  # few decades: plain numbers between the powers of ten too
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
        edges = np.linspace(*value_range(pooled.min(), pooled.max(), 0.5), bins + 1)
    # geomspace may round the outer edges inwards, past the extreme scores
    edges[0], edges[-1] = min(edges[0], pooled.min()), max(edges[-1], pooled.max())
    first = next(iter(values))
    for index, (name, array) in enumerate(values.items()):
        share = np.histogram(array, edges)[0] / array.size
        colour = COLOURS[index % len(COLOURS)]
        if name == first:
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.35, label=name)
            axes.stairs(share, edges, color=colour, linewidth=1.2)
        else:
            axes.stairs(
                share,
                edges,
                color=colour,
                linewidth=1.7,
                linestyle=DASHES[(index - 1) % len(DASHES)],
                label=f"{name} (AUROC {ood_auroc(sets[first], sets[name]):.3f})",
            )
    axes.set(xlabel=title, ylim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    clean(axes)
    legend_above(axes)
