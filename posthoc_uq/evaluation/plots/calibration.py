"""Figures of calibration: classes by confidence, regressions by their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.evaluation.plots.style import (
    COLOURS,
    GREY,
    MARKERS,
    REFERENCE,
    clean,
    legend_above,
    line_style,
    new_figure,
    percent,
)
from posthoc_uq.evaluation.plots.style import wilson as wilson_interval
from posthoc_uq.likelihoods.metrics import (
    Binning,
    calibration_bins,
    coverage_curve,
    expected_calibration_error,
)


def reliability_diagram(
    predictions: Mapping[str, tuple[Tensor, Tensor]], *, bins: int = 15, binning: Binning = "equal_width"
) -> Figure:
    """Accuracy over confidence, one line per model, and below it the distribution of the confidences.

    Points sit at the mean confidence of their bin; a vertical bar is the 95 % Wilson interval of the
    accuracy, wide where a bin holds few inputs. The legend gives the expected calibration error. The lower
    panel always has bins of equal width, since bins of equal mass would all have the same height.

    Args:
        predictions: by model, its probs (inputs, classes) and the integer labels (inputs,).
        bins: number of bins of confidence, as in `metrics.expected_calibration_error`.
        binning: "equal_width", or "equal_mass" for bins that hold equally many inputs.

    Raises:
        PosthocUQError: nothing to draw, probs and labels that do not fit, or an unknown binning.
        NonFiniteError: a probability is NaN.
    """
    if not predictions:
        raise PosthocUQError("reliability_diagram needs the predictions of at least one model.")
    figure = new_figure(5.6, 6.2 + 0.22 * len(predictions))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=REFERENCE, label="perfectly calibrated")
    for index, (name, (probs, labels)) in enumerate(predictions.items()):
        colour = COLOURS[index % len(COLOURS)]
        confidence, accuracy, count = (t.numpy() for t in calibration_bins(probs, labels, bins, binning))
        error = expected_calibration_error(probs, labels, bins, binning)
        filled = count > 0
        low, high = wilson_interval(accuracy[filled], count[filled])
        upper.vlines(confidence[filled], low, high, color=colour, alpha=0.35, linewidth=2)
        upper.plot(
            confidence[filled],
            accuracy[filled],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            label=f"{name} (ECE {error:.3f})",
            **line_style(index),
        )
        widths = calibration_bins(probs, labels, bins).counts.numpy()
        share, edges = widths / widths.sum(), np.linspace(0, 1, bins + 1)
        lower.stairs(share, edges, **line_style(index))
        lower.stairs(share, edges, color=colour, fill=True, alpha=0.15)
    upper.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="accuracy")
    legend_above(upper)
    lower.set(xlabel="confidence (largest probability)", ylabel="share of inputs", ylim=(0, None))
    lower.yaxis.set_major_formatter(FuncFormatter(percent))
    for axes in (upper, lower):
        clean(axes)
    figure.align_ylabels()
    return figure


def coverage_plot(
    predictions: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    *,
    levels: Sequence[float] | None = None,
    kind: Literal["interval", "quantile"] = "interval",
) -> Figure:
    """Observed over nominal coverage of a regression, one line per model.

    Below the diagonal of "interval" a model is over-confident: its intervals hold fewer targets than they
    should. The grey band holds, at each level, 95 % of the coverages that a calibrated model shows by chance on
    as many independent targets as the smallest data set here has. The legend gives the mean gap.

    Args:
        predictions: by model, its mean, total variance and the targets, each (inputs,) or (inputs, outputs).
        levels: probabilities strictly between 0 and 1; without them 0.05, 0.10, ..., 0.95.
        kind: "interval" for central intervals, "quantile" for the share below each quantile.

    Raises:
        PosthocUQError: nothing to draw, shapes that differ, a negative variance, levels outside (0, 1).
        NonFiniteError: a number is NaN.
    """
    from scipy.stats import binom

    if not predictions:
        raise PosthocUQError("coverage_plot needs the predictions of at least one model.")
    curves = {name: coverage_curve(*parts, levels, kind=kind) for name, parts in predictions.items()}
    targets = min(parts[2].numel() for parts in predictions.values())
    figure = new_figure(5.6, 5.3 + 0.22 * len(predictions))
    axes = figure.subplots()
    grid = np.linspace(0, 1, 201)
    low, high = (binom.ppf(tail, targets, grid) / targets for tail in (0.025, 0.975))
    # at 0 and 1 scipy's quantiles of a certain count are -1 and n
    axes.fill_between(grid, np.maximum(low, 0), high, color="#DDDDDD", linewidth=0, label="chance, 95 %")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=REFERENCE, label="perfectly calibrated")
    for index, (name, curve) in enumerate(curves.items()):
        order = curve.nominal.argsort()
        axes.plot(
            curve.nominal[order].numpy(),
            curve.observed[order].numpy(),
            marker=MARKERS[index % len(MARKERS)],
            markersize=4.5,
            label=f"{name} (mean gap {curve.error:.3f})",
            **line_style(index),
        )
    interval = kind == "interval"
    axes.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
        xlabel="nominal coverage of the central interval" if interval else "level of the quantile",
        ylabel="share of targets inside" if interval else "share of targets below",
        aspect="equal",
    )
    legend_above(axes)
    clean(axes)
    return figure
