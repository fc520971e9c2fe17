"""Figures of predictions; every function returns a matplotlib `Figure` with `savefig`.

The figures are built without pyplot, so nothing is registered globally, no window opens and the caller's
backend, style and open figures stay as they are. Colours are those of Okabe and Ito ("Color Universal
Design", 2008), which colour-blind readers can tell apart; lines differ by marker or dash as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.prediction import RegressionPrediction
from posthoc_uq.metrics import calibration_bins, expected_calibration_error, ood_auroc

__all__ = ["regression_band", "reliability_diagram", "score_histograms"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")
_GREY = "#595959"


def reliability_diagram(predictions: Mapping[str, tuple[Tensor, Tensor]], *, bins: int = 15) -> Figure:
    """Accuracy over confidence, one line per model, and below how many inputs fall into each bin.

    Points sit at the mean confidence of their bin; a vertical bar is the 95 % Wilson interval of the
    accuracy, wide where a bin holds few inputs. The legend gives the expected calibration error.

    Args:
        predictions: by model, its probs (inputs, classes) and the integer labels (inputs,).
        bins: equal-width bins of confidence, as in `metrics.expected_calibration_error`.

    Raises:
        PosthocUQError: nothing to draw, or probs and labels that do not fit.
    """
    if not predictions:
        raise PosthocUQError("reliability_diagram needs the predictions of at least one model.")
    figure = _figure(5.6, 6.2 + 0.22 * len(predictions))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle=(0, (4, 3)), label="perfectly calibrated")
    edges = np.linspace(0, 1, bins + 1)
    for index, (name, (probs, labels)) in enumerate(predictions.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        confidence, accuracy, count = (t.numpy() for t in calibration_bins(probs, labels, bins))
        error = expected_calibration_error(probs, labels, bins)
        filled = count > 0
        low, high = _wilson(accuracy[filled], count[filled])
        upper.vlines(confidence[filled], low, high, color=colour, alpha=0.35, linewidth=2)
        upper.plot(
            confidence[filled],
            accuracy[filled],
            color=colour,
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=1.6,
            linestyle=_DASHES[index % len(_DASHES)],
            label=f"{name} (ECE {error:.3f})",
        )
        lower.stairs(
            count / count.sum(),
            edges,
            color=colour,
            linewidth=1.6,
            linestyle=_DASHES[index % len(_DASHES)],
        )
        lower.stairs(count / count.sum(), edges, color=colour, fill=True, alpha=0.15)
    upper.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="accuracy")
    # above the axes, because a badly calibrated line can pass through any corner
    upper.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2)
    lower.set(xlabel="confidence (largest probability)", ylabel="share of inputs", ylim=(0, None))
    lower.yaxis.set_major_formatter(FuncFormatter(_percent))
    for axes in (upper, lower):
        _clean(axes)
    figure.align_ylabels()
    return figure


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
            `epistemic()`); what is not positive is drawn at the smallest positive score.

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
    figure = _figure(0.6 + 4.2 * columns, 3.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, sets) in zip(panels.flat, scores.items(), strict=False):
        _histogram_panel(axes, title, sets, bins, title in log)
    for axes in list(panels.flat)[len(scores) :]:
        axes.remove()
    for row in panels:
        row[0].set_ylabel("share of inputs")
    return figure


def regression_band(
    x: Tensor, prediction: RegressionPrediction, x_train: Tensor, y_train: Tensor, *, level: float = 0.95
) -> Figure:
    """A one-dimensional regression: mean, the band of the weights, the band with noise, training data.

    Args:
        x: (inputs,) or (inputs, 1), in any order.
        prediction: at `x`, with one output.
        x_train, y_train: (points,) or (points, 1).
        level: probability that either band covers.

    Raises:
        PosthocUQError: more than one input or output dimension, sizes that differ, level outside (0, 1).
    """
    positions = _column("x", x)
    mean = _column("prediction.mean", prediction.mean)
    if len(mean) != len(positions):
        raise PosthocUQError(f"x has {len(positions)} inputs but the prediction has {len(mean)}.")
    points_x, points_y = _column("x_train", x_train), _column("y_train", y_train)
    if len(points_x) != len(points_y):
        raise PosthocUQError(f"x_train has {len(points_x)} points but y_train has {len(points_y)}.")
    order = np.argsort(positions, kind="stable")
    weights_only = RegressionPrediction(prediction.mean, prediction.epistemic_variance, 0.0)
    total_low, total_high = (_column("interval", t)[order] for t in prediction.interval(level))
    low, high = (_column("interval", t)[order] for t in weights_only.interval(level))
    positions, mean = positions[order], mean[order]

    figure = _figure(7.2, 4.4)
    axes = figure.subplots()
    colour = _COLOURS[0]
    axes.fill_between(
        positions,
        total_low,
        total_high,
        color=colour,
        alpha=0.15,
        linewidth=0,
        label=f"{level * 100:g} % with noise",
    )
    axes.fill_between(
        positions,
        low,
        high,
        color=colour,
        alpha=0.35,
        linewidth=0,
        label=f"{level * 100:g} % from the weights",
    )
    axes.plot(positions, mean, color=colour, linewidth=1.8, label="mean")
    axes.plot(
        points_x,
        points_y,
        linestyle="none",
        marker="o",
        markersize=4,
        color=_COLOURS[1],
        markeredgecolor="white",
        markeredgewidth=0.5,
        label="training data",
    )
    axes.set(xlabel="input", ylabel="output")
    axes.margins(x=0.01)
    # outside, because a band that opens up can reach any corner
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    _clean(axes)
    return figure


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


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
        edges = np.geomspace(*_range(smallest, pooled.max(), smallest * 0.01), bins + 1)
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
        edges = np.linspace(*_range(pooled.min(), pooled.max(), 0.5), bins + 1)
    # geomspace may round the outer edges inwards, past the extreme scores
    edges[0], edges[-1] = min(edges[0], pooled.min()), max(edges[-1], pooled.max())
    first = next(iter(values))
    for index, (name, array) in enumerate(values.items()):
        share = np.histogram(array, edges)[0] / array.size
        colour = _COLOURS[index % len(_COLOURS)]
        if name == first:
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.35, label=name)
            axes.stairs(share, edges, color=colour, linewidth=1.2)
        else:
            axes.stairs(
                share,
                edges,
                color=colour,
                linewidth=1.7,
                linestyle=_DASHES[(index - 1) % len(_DASHES)],
                label=f"{name} (AUROC {ood_auroc(sets[first], sets[name]):.3f})",
            )
    axes.set(xlabel=title, ylim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    _clean(axes)
    # above the panel, because histograms can peak anywhere
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2)


def _percent(share: float, position: int | None) -> str:
    return f"{100 * share:.3g} %"


def _range(low: float, high: float, pad: float) -> tuple[float, float]:
    """The range itself, or one of width `2 pad` around it when it is a single number."""
    return (low, high) if high > low else (low - pad, high + pad)


def _column(name: str, tensor: Tensor) -> NDArray[np.float64]:
    if tensor.ndim not in (1, 2) or tensor.shape[1:].numel() != 1:
        raise PosthocUQError(
            f"regression_band draws one dimension: {name} must be (n,) or (n, 1), not {tuple(tensor.shape)}."
        )
    return tensor.detach().cpu().double().flatten().numpy()


def _wilson(
    share: NDArray[np.float64], count: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """95 % interval of a proportion (Wilson, "Probable inference", JASA 1927); sane at 0 and 1."""
    z = 1.96
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return centre - half, centre + half
