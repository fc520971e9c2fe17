"""Figures of selective prediction: the errors that remain when the most uncertain inputs are referred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.evaluation.plots.style import (
    COLOURS,
    GREY,
    REFERENCE,
    clean,
    legend_above,
    line_style,
    new_figure,
    percent,
    wilson,
)
from posthoc_uq.likelihoods.metrics import (
    RiskCoverage,
    risk_coverage,
    selective_accuracy,
    selective_accuracy_area,
    selective_auc,
)

_POINTS = 1000
"""The points of a curve that are drawn; more could not be seen."""


def risk_coverage_plot(
    scores: Mapping[str, tuple[Tensor, Tensor]], *, risk_label: str = "risk (mean loss of the retained)"
) -> Figure:
    """Mean loss of the retained inputs over the share that is retained, one line per score or model.

    Two references: the ideal order (by the loss itself), and a random one, whose risk is the mean loss at any
    coverage. Where all entries have the same losses they are drawn once, in grey; otherwise for each entry in
    its colour. The legend gives the area under each curve (AURC, smaller is better). The vertical axis spans
    the risks from a coverage of 5 % on.

    Args:
        scores: by name, an uncertainty (inputs,), higher is referred sooner, and the losses (inputs,) of the
            prediction it belongs to, for instance 1 where the class is wrong.
        risk_label: of the vertical axis, with the unit of the loss.

    Raises:
        PosthocUQError: nothing to draw, or sizes that differ.
        NonFiniteError: a score is NaN, or a loss is not finite.
    """
    if not scores:
        raise PosthocUQError("risk_coverage_plot needs the scores and losses of at least one model.")
    curves = {name: risk_coverage(*pair) for name, pair in scores.items()}
    for name, (_, losses) in scores.items():
        if not bool(losses.isfinite().all()):
            raise NonFiniteError(f"The losses of {name!r} must be finite to be drawn.")
    all_losses = [losses.detach().cpu().double() for _, losses in scores.values()]
    shared = all(torch.equal(losses, all_losses[0]) for losses in all_losses)
    figure = new_figure(6.2, 4.2 + 0.22 * (len(scores) + 2))
    axes = figure.subplots()
    for index, losses in enumerate(all_losses[:1] if shared else all_losses):
        colour = GREY if shared else COLOURS[index % len(COLOURS)]
        mean = losses.mean().item()
        axes.plot([0, 1], [mean, mean], color=colour, linewidth=1, linestyle=REFERENCE, alpha=0.8)
        axes.plot(*_points(risk_coverage(losses, losses)), color=colour, linewidth=1.2, linestyle=":")
    handles = [
        axes.plot(*_points(curve), label=f"{name} (AURC {curve.area:#.3g})", **line_style(index))[0]
        for index, (name, curve) in enumerate(curves.items())
    ]
    references = [
        Line2D([], [], color=GREY, linewidth=1, linestyle=REFERENCE, label="random order"),
        Line2D([], [], color=GREY, linewidth=1.2, linestyle=":", label="ideal order"),
    ]
    axes.set(xlim=(0, 1), xlabel="coverage (share of inputs retained)", ylabel=risk_label)
    if min(float(losses.min()) for losses in all_losses) >= 0:
        # the risk of the first few inputs can be anything, and would compress the rest of the figure
        steady = [curve.risk[curve.coverage >= 0.05].max().item() for curve in curves.values()]
        top = 1.06 * max(steady) or 1.0
        axes.set_ylim(-0.01 * top, top)
    axes.xaxis.set_major_formatter(FuncFormatter(percent))
    legend_above(axes, [*handles, *references])
    clean(axes)
    return figure


def referral_plot(
    predictions: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    *,
    metric: Literal["accuracy", "auc"] = "accuracy",
    rates: Sequence[float] | None = None,
) -> Figure:
    """Quality of the retained predictions over the share of inputs referred, one line per model.

    A good uncertainty makes the line rise: it refers the inputs that would have been wrong. With "accuracy" a
    shaded band is the 95 % Wilson interval of the inputs that remain, and the legend gives the area under the
    curve over all rates (larger is better). With "auc" the line ends where the inputs that remain are all of one class.

    Args:
        predictions: by model, an uncertainty (inputs,), higher is referred sooner, its probs (inputs, classes)
            and the labels (inputs,).
        metric: "accuracy", or "auc" for the ROC AUC as in `metrics.selective_auc`.
        rates: shares referred, each in [0, 1); without them 0, 0.01, ..., 0.95.

    Raises:
        PosthocUQError: nothing to draw, an unknown metric, inputs that do not fit, a rate outside [0, 1).
        NonFiniteError: a score or a probability is NaN.
    """
    if not predictions:
        raise PosthocUQError("referral_plot needs the predictions of at least one model.")
    if metric not in ("accuracy", "auc"):
        raise PosthocUQError(f"metric must be 'accuracy' or 'auc', not {metric!r}.")
    chosen = [k / 100 for k in range(96)] if rates is None else sorted(float(rate) for rate in rates)
    figure = new_figure(6.2, 4.2 + 0.22 * len(predictions))
    axes = figure.subplots()
    x = np.asarray(chosen)
    for index, (name, (scores, probs, labels)) in enumerate(predictions.items()):
        if metric == "accuracy":
            values = selective_accuracy(scores, probs, labels, chosen).numpy()
            label = f"{name} (area {selective_accuracy_area(scores, probs, labels):.3f})"
            low, high = wilson(values, np.maximum((1 - x) * len(labels), 1))
            axes.fill_between(x, low, high, color=COLOURS[index % len(COLOURS)], alpha=0.12, linewidth=0)
        else:
            values, label = selective_auc(scores, probs, labels, chosen).numpy(), name
        axes.plot(x, values, label=label, **line_style(index))
    axes.set(
        xlim=(0, max(chosen) or 1),
        xlabel="share of inputs referred, most uncertain first",
        ylabel=f"{'accuracy' if metric == 'accuracy' else 'ROC AUC'} on the retained inputs",
    )
    axes.xaxis.set_major_formatter(FuncFormatter(percent))
    legend_above(axes)
    clean(axes)
    return figure


def _points(curve: RiskCoverage) -> tuple[np.ndarray, np.ndarray]:
    """The curve, with evenly chosen points where it has more than `_POINTS`."""
    size = len(curve.coverage)
    index = np.arange(size) if size <= _POINTS else np.unique(np.linspace(0, size - 1, _POINTS).astype(int))
    return curve.coverage.numpy()[index], curve.risk.numpy()[index]
