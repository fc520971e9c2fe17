"""Figures of predictions and posteriors; every function returns a matplotlib `Figure` with `savefig`.

The figures are built without pyplot, so nothing is registered globally, no window opens and the caller's
backend, style and open figures stay as they are. Colours are those of Okabe and Ito ("Color Universal
Design", 2008), which colour-blind readers can tell apart; lines differ by marker or dash as well.

A figure of models takes a prediction and its targets, ``reliability_diagram(prediction, labels)``, or several of these
by name, ``reliability_diagram({"INF": (prediction, labels), "KFAC": (other, labels)})``. Predictions are those of
predictors; probabilities from elsewhere become one by ``ClassPrediction.from_logits(probs.log().unsqueeze(0))``, means
and variances by ``RegressionPrediction(mean, variance, 0.0)``.

All functions raise a `PosthocUQError` for nothing to draw or inputs that do not fit, and a `NonFiniteError` for numbers
that cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import one_of
from posthoc_uq.evaluation import metrics
from posthoc_uq.evaluation.groups import GroupedCoverage, wilson
from posthoc_uq.evaluation.measurements import FAMILIAR, title_of, varies
from posthoc_uq.evaluation.promised import coverage_by_group, coverages
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.gaussian import RegressionPrediction
from posthoc_uq.likelihoods.maps import MapPrediction
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction, score_of
from posthoc_uq.likelihoods.selective import CLASS_SCORES

__all__ = [
    "class_uncertainty_map",
    "coverage_plot",
    "group_coverage_plot",
    "prediction_maps",
    "referral_plot",
    "regression_band",
    "reliability_diagram",
    "risk_coverage_plot",
    "score_histograms",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
GREY = "#595959"
_MAX_DRAWN = 16  # inputs of one figure
_Numbers = NDArray[np.float64]
_MARK = 0.025  # of an axis from 0 to 1
_IN_A_BIN = 20  # inputs, at least, for an accuracy that says something
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


def line_style(index: int, marker_size: float = 0.0) -> dict[str, Any]:
    """Colour and dash of the line at `index`, and its marker where that has a size, as keywords."""
    marker = {"marker": MARKERS[index % len(MARKERS)], "markersize": marker_size} if marker_size else {}
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linewidth": 1.6,
        "linestyle": DASHES[index % len(DASHES)],
        **marker,
    }


def _draw_diagonal(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=REFERENCE, label="perfectly calibrated")


def percent(share: float, position: int | None) -> str:
    """A tick label."""
    return f"{100 * share:.3g} %"


Models = Prediction | Mapping[str, tuple[Prediction, Any]]
"""One prediction, or several with what belongs to each, by name."""
ScoreOrName = str | Callable[[Any], Tensor]
"""The name of a score, or a function from a prediction to scores (inputs,), higher for more uncertain inputs."""


def _pairs(figure: str, prediction: Models, other: Any, what: str = "targets") -> dict[str, tuple[Any, Any]]:
    """The arguments of a figure as a mapping; one prediction has an empty name."""
    if isinstance(prediction, Prediction):
        pairs: dict[str, Any] = {"": (prediction, other)} if other is not None else {"": ()}
    else:
        pairs = dict(prediction) if other is None else {"": ()}
    if not pairs:
        raise PosthocUQError(f"{figure} needs the prediction of at least one model.")
    for pair in pairs.values():
        if not (isinstance(pair, tuple) and len(cast(Any, pair)) == 2 and isinstance(pair[0], Prediction)):
            raise PosthocUQError(
                f"{figure} takes a prediction and its {what}, or a mapping from names to such pairs."
            )
    return pairs


def _with_targets(figure: str, prediction: Models, targets: Any) -> dict[str, tuple[Any, Tensor]]:
    pairs = _pairs(figure, prediction, targets)
    return {name: (each, each.fitting(own)) for name, (each, own) in pairs.items()}


def _of_classes(figure: str, prediction: Models, labels: Any) -> dict[str, tuple[ClassPrediction, Tensor]]:
    """By name, a prediction with one class a row and the targets; of positions those that count are the rows."""
    pairs = _with_targets(figure, prediction, labels)
    for each, _ in pairs.values():
        if not isinstance(each, (ClassPrediction, PositionPrediction)):
            raise PosthocUQError(f"{figure} draws predictions of classes, not a {type(each).__name__}.")
    return {name: each.counted(own) for name, (each, own) in pairs.items()}


def _label(name: str, measured: str) -> str:
    """An entry of a legend; a single prediction has no name."""
    return f"{name} ({measured})" if name else measured


# Calibration: classes by confidence, regressions by their intervals.


def reliability_diagram(prediction: Models, labels: Tensor | None = None, *, bins: int = 15) -> Figure:
    """Accuracy over confidence, a panel for each model, and below it the distribution of the confidences.

    Points are bins of 20 inputs at their mean confidence; those whose marks would lie on each other are merged. On the
    dashed diagonal accuracy and confidence agree; below it predictions are too sure. A vertical bar is the 95 % Wilson
    interval of the accuracy. Titles give the expected calibration error in bins of equal width.

    Args:
        prediction: of classes, or by name a prediction and its labels.
        labels: (inputs,) integers, or soft labels in the shape of the probabilities.
        bins: of the error and of the distribution, as in `metrics.expected_calibration_error`.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        figure = plots.reliability_diagram(prediction, labels)
        rows = {"INF": (prediction, labels)}  # several by name
        figure = plots.reliability_diagram(rows, bins=10)
        figure.savefig("reliability.png")
        ```
    """
    pairs = _of_classes("reliability_diagram", prediction, labels)
    columns = min(len(pairs), 3)
    rows = -(-len(pairs) // columns)
    figure = new_figure(0.8 + 3.2 * columns, 0.5 + 4.3 * rows)
    grid = figure.subplots(2 * rows, columns, squeeze=False, sharex=True, height_ratios=(3, 1) * rows)
    for index, (name, (found, own)) in enumerate(pairs.items()):
        row, column = divmod(index, columns)
        upper, lower = grid[2 * row, column], grid[2 * row + 1, column]
        _draw_diagonal(upper)
        points = max(1, len(own) // _IN_A_BIN)
        parts = metrics.calibration_bins(found.probs, own, points, "equal_mass")
        confidence, accuracy, count = _apart(*(tensor[parts.counts > 0].numpy() for tensor in parts))
        upper.vlines(confidence, *wilson(accuracy, count), color=COLOURS[0], alpha=0.35, linewidth=2)
        upper.plot(confidence, accuracy, **line_style(0, marker_size=5))
        error = metrics.expected_calibration_error(found.probs, own, bins)
        title = f"{name}\nECE {error:.3f}" if name else f"ECE {error:.3f}"
        upper.set_title(title, loc="left", fontsize="medium")
        upper.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        of_width = metrics.calibration_bins(found.probs, own, bins).counts.numpy()
        edges = np.linspace(0, 1, bins + 1)
        lower.stairs(of_width / of_width.sum(), edges, color=COLOURS[0], fill=True, alpha=0.35)
        lower.set(ylim=(0, None), xlabel="confidence")
        lower.yaxis.set_major_formatter(FuncFormatter(percent))
        if column == 0:
            upper.set_ylabel("accuracy")
            lower.set_ylabel("inputs")
        for axes in (upper, lower):
            clean(axes)
            axes.tick_params(labelbottom=axes is lower)
    for axes in grid.reshape(rows, 2, columns)[-1, :, len(pairs) - (rows - 1) * columns :].flat:
        axes.remove()
    figure.align_ylabels()
    return figure


def _apart(confidence: _Numbers, accuracy: _Numbers, count: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Bins, those merged whose marks would lie on each other."""
    sums: list[_Numbers] = []  # over the inputs of each bin: confidences, right answers, inputs
    for one in np.stack([confidence * count, accuracy * count, count], axis=1):
        if sums and one[0] / one[2] - sums[-1][0] / sums[-1][2] < _MARK:
            sums[-1] = sums[-1] + one
        else:
            sums.append(one)
    confidences, right, inputs = np.array(sums).T
    return confidences / inputs, right / inputs, inputs


def coverage_plot(
    prediction: Models,
    targets: Tensor | None = None,
    *,
    levels: Sequence[float] | None = None,
    kind: Literal["interval", "quantile"] = "interval",
) -> Figure:
    """Observed over nominal coverage of a regression, one line per model.

    Below the diagonal of "interval" a model is over-confident: its intervals hold fewer targets than they
    should. The grey band holds, at each level, 95 % of the coverages that a calibrated model shows by chance on
    as many independent targets as the smallest data set here has. The legend gives the mean gap.

    Args:
        prediction: of values with positive variances, or by name a prediction and its targets.
        targets: shaped like the mean; NaN where there is none.
        levels: probabilities strictly between 0 and 1; without them 0.05, 0.10, ..., 0.95.
        kind: "interval" for central intervals, "quantile" for the share below each quantile.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        x, y = next(iter(regression_loader))
        predictor = uq.wrap(regressor, regression_posterior)
        prediction = predictor(x)
        plots.coverage_plot(prediction, y).savefig("coverage.png")
        ```
    """
    pairs = _with_targets("coverage_plot", prediction, targets)
    parts = {name: _values_there(each, own) for name, (each, own) in pairs.items()}
    curves = {name: metrics.coverage_curve(*each, levels, kind=kind) for name, each in parts.items()}
    interval = kind == "interval"
    return coverage_lines(
        curves,
        min(each[2].numel() for each in parts.values()),
        "nominal coverage of the central interval" if interval else "level of the quantile",
        "share of targets inside" if interval else "share of targets below",
    )


def _values_there(prediction: Any, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, total variance and targets of all values whose target is there."""
    if isinstance(prediction, MapPrediction):
        prediction, targets = prediction.counted(targets)
    if prediction.kind != "values":
        raise PosthocUQError(f"coverage_plot draws predictions of values, not a {type(prediction).__name__}.")
    parts, there = (prediction.mean, prediction.variance, targets), prediction.there(targets)
    return parts if there is None else (parts[0][there], parts[1][there], parts[2][there])


def coverage_lines(
    curves: Mapping[str, metrics.CoverageCurve], targets: int, nominal: str, observed: str
) -> Figure:
    """Observed over nominal coverage with a band of chance.

    Args:
        curves: by model.
        targets: independent ones that each stands for, at least.
        nominal: label of the horizontal axis.
        observed: label of the vertical axis.
    """
    from scipy.stats import binom

    figure = new_figure(5.6, 5.3 + 0.22 * len(curves))
    axes = figure.subplots()
    grid = np.linspace(0, 1, 201)
    low, high = (binom.ppf(tail, targets, grid) / targets for tail in (0.025, 0.975))
    # at 0 and 1 scipy's quantiles of a certain count are -1 and n
    axes.fill_between(grid, np.maximum(low, 0), high, color="#DDDDDD", linewidth=0, label="chance, 95 %")
    _draw_diagonal(axes)
    for index, (name, curve) in enumerate(curves.items()):
        order = curve.nominal.argsort()
        axes.plot(
            curve.nominal[order].numpy(),
            curve.observed[order].numpy(),
            label=_label(name, f"mean gap {curve.error:.3f}"),
            **line_style(index, marker_size=4.5),
        )
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=nominal, ylabel=observed, aspect="equal")
    legend_above(axes)
    clean(axes)
    return figure


_MAX_GROUPS = 12  # in a panel: the least covered


def group_coverage_plot(
    prediction: Models, targets: Tensor | None = None, *, class_names: Sequence[str] | None = None
) -> Figure:
    """Coverage of promises by groups of inputs: a panel for each score, the size of the set or width of the interval,
    and the class. The level is 90 %, or the highest below it that the held-out scores allow.

    Vertical bars are 95 % intervals (Wilson), wide where there are few inputs; the dashed line is the promised level.
    The legend gives the excess risk of the target coverage (ERT, `metrics.coverage_excess_risk`) and twice its standard
    error. Of more than twelve classes the least covered are drawn.

    Args:
        prediction: with held-out scores, or by name a prediction and its targets.
        targets: its labels or values.
        class_names: by index.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        calibrated = uq.calibrate(posterior, val_loader)
        prediction = uq.wrap(model, calibrated)(images)
        figure = plots.group_coverage_plot(prediction, labels)
        figure.savefig("groups.png")
        ```
    """
    pairs = _with_targets("group_coverage_plot", prediction, targets)
    found = {
        name: coverage_by_group(each, coverages(each, own), class_names)
        for name, (each, own) in pairs.items()
    }
    return group_panels({name: groups for name, groups in found.items() if groups is not None})


def group_panels(groups: Mapping[str, GroupedCoverage]) -> Figure:
    """`group_coverage_plot` of what `evaluate` found: ``evaluation.coverage_by_group``."""
    panels = [
        (name, by) for name, found in groups.items() for by in dict.fromkeys(g.by for g in found.groups)
    ]
    if not panels:
        raise PosthocUQError(
            "group_coverage_plot draws promises, and no prediction has held-out scores for a level of 80 %; see "
            "posthoc_uq.calibrate."
        )
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = new_figure(0.6 + 4.6 * columns, 0.3 * len(groups) + 3.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    drawn: dict[str, Artist] = {}
    for axes, (name, by) in zip(grid.flat, panels, strict=False):
        found, index = groups[name], list(groups).index(name)
        own = [group for group in found.groups if group.by == by]
        if len(own) > _MAX_GROUPS:
            own = sorted(own, key=lambda group: group.coverage)[:_MAX_GROUPS]
        places = np.arange(len(own))
        style = line_style(index, marker_size=5) | {"linestyle": "none"}
        low, high = [group.low for group in own], [group.high for group in own]
        axes.vlines(places, low, high, color=style["color"], alpha=0.35, linewidth=2)
        risk = found.missing
        label = name if risk is None else _label(name, f"ERT {risk.value:.3f} ± {2 * risk.error:.3f}")
        (drawn[label],) = axes.plot(places, [group.coverage for group in own], label=label, **style)
        axes.axhline(found.level, color=GREY, linewidth=1, linestyle=REFERENCE)
        axes.set_xticks(places, [group.name for group in own], rotation=30, ha="right")
        axes.set(xlabel=by.replace("_", " ") + (f", {name}" if len(groups) > 1 else ""))
        axes.yaxis.set_major_formatter(FuncFormatter(percent))
        clean(axes)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    for row in grid:
        row[0].set_ylabel("share of right answers inside")
    if any(drawn):
        figure.legend(drawn.values(), drawn.keys(), loc="outside upper left", frameon=False)
    return figure


# Scores on familiar and on foreign inputs.


_LOGARITHMIC = ("epistemic_variance", "mutual_information")
_LIKE_ANOTHER = ("max_probability", "variation_ratio", "standard_deviation")  # nearly the entropy's picture


def score_histograms(
    prediction: Models,
    foreign: Prediction | Mapping[str, Prediction] | None = None,
    *,
    scores: Sequence[str] | None = None,
    bins: int = 30,
) -> Figure:
    """One panel per score: how it is distributed on familiar and on foreign inputs.

    The familiar (in-distribution) inputs are drawn filled; the foreign ones are outlines, with the AUROC of telling
    them apart from the familiar ones in the legend. Bars are shares of the inputs. Variances and mutual information,
    which spread over orders of magnitude, have a logarithmic axis; there, scores that are not positive are drawn at
    the smallest positive one.

    Args:
        prediction: of familiar inputs, or by name a prediction and that of foreign inputs.
        foreign: the prediction of foreign inputs, or several by the name of their data set.
        scores: names of scores; without them those that vary, but for some that look like the entropy.
        bins: number of bins over the common range of a panel.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        foreign = predictor(torch.randn(20, 1, 6, 6))
        figure = plots.score_histograms(prediction, {"noise": foreign})
        figure.savefig("scores.png")
        ```
    """
    panels: dict[str, dict[str, Tensor]] = {}
    log: list[str] = []
    for name, (familiar, others) in _pairs("score_histograms", prediction, foreign, "foreign ones").items():
        sets: dict[str, Prediction] = {FAMILIAR: familiar} | (
            {"foreign": others} if isinstance(others, Prediction) else dict(others)
        )
        chosen = scores if scores is not None else histogram_scores(familiar)
        for score in chosen:
            title = ", ".join(filter(None, (title_of(score), name)))
            panels[title] = {data: score_of(each, score) for data, each in sets.items()}
            log += [title] if is_logarithmic(score) else []
    return histogram_panels(panels, bins=bins, log=log)


def histogram_scores(prediction: Prediction) -> list[str]:
    """The scores that vary between inputs and do not look like another one."""
    return [
        name for name, values in prediction.scores().items() if name not in _LIKE_ANOTHER and varies(values)
    ]


def is_logarithmic(score: str) -> bool:
    """Whether a score spreads over orders of magnitude."""
    return score in _LOGARITHMIC


def histogram_panels(
    scores: Mapping[str, Mapping[str, Tensor]], *, bins: int = 30, log: Collection[str] = ()
) -> Figure:
    """`score_histograms` of tensors.

    Args:
        scores: by panel, by data set, scores (inputs,); the first data set is the familiar one.
        bins: number of bins over the common range of a panel.
        log: the panels with a logarithmic axis.
    """
    if not scores or not all(scores.values()):
        raise PosthocUQError("score_histograms needs at least one panel, each with at least one data set.")
    columns = min(len(scores), 3)
    rows = -(-len(scores) // columns)
    figure = new_figure(0.6 + 4.2 * columns, 3.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, sets) in zip(panels.flat, scores.items(), strict=False):
        (first, familiar), *others = sets.items()
        labels = [
            first,
            *(f"{name} (AUROC {metrics.ood_auroc(familiar, foreign):.3f})" for name, foreign in others),
        ]
        labelled = dict(zip(labels, sets.values(), strict=True))
        histogram_panel(axes, title, labelled, bins, title in log)
    for axes in list(panels.flat)[len(scores) :]:
        axes.remove()
    for row in panels:
        row[0].set_ylabel("share of inputs")
    return figure


def histogram_panel(axes: Axes, title: str, sets: Mapping[str, Tensor], bins: int, logarithmic: bool) -> None:
    """Draw how one score is distributed on each data set; the first is filled, the others are outlines."""
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
        edges = np.geomspace(*_value_range(smallest, pooled.max(), smallest * 0.01), bins + 1)
        axes.set_xscale("log")
        if edges[-1] < 100 * edges[0]:  # few decades: plain numbers between the powers of ten too
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
        edges = np.linspace(*_value_range(pooled.min(), pooled.max(), 0.5), bins + 1)
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
                label=name,
            )
    axes.set(xlabel=title, ylim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    clean(axes)
    legend_above(axes)


def _value_range(low: float, high: float, pad: float) -> tuple[float, float]:
    """The range itself, or one of width `2 pad` around it when it is a single number."""
    return (low, high) if high > low else (low - pad, high + pad)


# Selective prediction: the errors that remain when the most uncertain inputs are referred.

_MAX_POINTS = 1000  # of a curve that are drawn; more could not be seen


def _scored(
    pairs: Mapping[str, tuple[Any, Tensor]], score: ScoreOrName | Sequence[ScoreOrName] | None
) -> Iterator[tuple[str, Tensor, Any, Tensor]]:
    """The lines of a figure: the name, the scores, the prediction and its targets."""
    several = isinstance(score, Sequence) and not isinstance(score, str)
    for name, (prediction, targets) in pairs.items():
        chosen: Any = prediction.default_score if score is None else score
        for each in chosen if several else [chosen]:
            named = isinstance(each, str)
            values = score_of(prediction, each) if named else each(prediction)
            title = title_of(each) if named else getattr(each, "__name__", "score")
            shown = [name, title] if several or not name else [name]
            yield ", ".join(filter(None, shown)), values, prediction, targets


def risk_coverage_plot(
    prediction: Models,
    targets: Tensor | None = None,
    *,
    score: ScoreOrName | Sequence[ScoreOrName] | None = None,
    risk_label: str = "risk (mean loss of the retained)",
) -> Figure:
    """Mean loss of the retained inputs over the share that is retained, one line per model and score.

    Two references: the ideal order (by the loss itself), and a random one, whose risk is the mean loss at any
    coverage. Where all entries have the same losses they are drawn once, in grey; otherwise for each entry in
    its colour. The legend gives the area under each curve (AURC, smaller is better). The vertical axis spans
    the risks from a coverage of 5 % on.

    Args:
        prediction: of any kind, or by name a prediction and its targets.
        targets: its labels or values.
        score: by which inputs are referred, higher ones sooner: a name, a function of the prediction, or several of
            these; by default the prediction's `default_score`.
        risk_label: of the vertical axis, with the unit of the loss: 1 for a wrong class, the squared error of values.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        scores = ["entropy", "novelty"]
        figure = plots.risk_coverage_plot(prediction, labels, score=scores)
        figure.savefig("risk.png")
        ```
    """
    pairs = _with_targets("risk_coverage_plot", prediction, targets)
    scores = {name: (values, each.losses(own)) for name, values, each, own in _scored(pairs, score)}
    curves = {name: metrics.risk_coverage(*pair) for name, pair in scores.items()}
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
        ideal = _thinned(metrics.risk_coverage(losses, losses))
        axes.plot(*ideal, color=colour, linewidth=1.2, linestyle=":")
    handles = [
        axes.plot(*_thinned(curve), label=f"{name} (AURC {curve.area:#.3g})", **line_style(index))[0]
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


def _thinned(curve: metrics.RiskCoverage) -> tuple[np.ndarray, np.ndarray]:
    """The curve, with evenly chosen points where it has more than `_MAX_POINTS`."""
    size = len(curve.coverage)
    index = (
        np.arange(size)
        if size <= _MAX_POINTS
        else np.unique(np.linspace(0, size - 1, _MAX_POINTS).astype(int))
    )
    return curve.coverage.numpy()[index], curve.risk.numpy()[index]


def referral_plot(
    prediction: Models,
    labels: Tensor | None = None,
    *,
    score: ScoreOrName | Sequence[ScoreOrName] | None = None,
    metric: Literal["accuracy", "auc"] = "accuracy",
    rates: Sequence[float] | None = None,
) -> Figure:
    """Quality of the retained predictions over the share of inputs referred, one line per model and score.

    A good uncertainty makes the line rise: it refers the inputs that would have been wrong. With "accuracy" a
    shaded band is the 95 % Wilson interval of the inputs that remain, and the legend gives the area under the
    curve over all rates (larger is better). With "auc" the line ends where the inputs that remain are all of one class.

    Args:
        prediction: with one class an input, or by name a prediction and its labels.
        labels: (inputs,) integers.
        score: by which inputs are referred, as in `risk_coverage_plot`.
        metric: "accuracy", or "auc" for the ROC AUC as in `metrics.selective_auc`.
        rates: shares referred, each in [0, 1); without them 0, 0.01, ..., 0.95.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        rates = [0.0, 0.1, 0.5]
        figure = plots.referral_plot(prediction, labels, rates=rates)
        figure.savefig("referral.png")
        ```
    """
    lines = list(_scored(_of_classes("referral_plot", prediction, labels), score))
    one_of("metric", metric, ("accuracy", "auc"))
    chosen = [k / 100 for k in range(96)] if rates is None else sorted(float(rate) for rate in rates)
    figure = new_figure(6.2, 4.2 + 0.22 * len(lines))
    axes = figure.subplots()
    x = np.asarray(chosen)
    for index, (name, scores, each, targets) in enumerate(lines):
        probs, own = each.probs, each.labels(targets)
        if metric == "accuracy":
            values = metrics.selective_accuracy(scores, probs, own, chosen).numpy()
            label = _label(name, f"area {metrics.selective_accuracy_area(scores, probs, own):.3f}")
            low, high = wilson(values, np.maximum((1 - x) * len(own), 1))
            axes.fill_between(x, low, high, color=COLOURS[index % len(COLOURS)], alpha=0.12, linewidth=0)
        else:
            values, label = metrics.selective_auc(scores, probs, own, chosen).numpy(), name
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


# Regressions over their input.


def regression_band(
    x: Tensor, prediction: RegressionPrediction, x_train: Tensor, y_train: Tensor, *, level: float = 0.95
) -> Figure:
    """A one-dimensional regression: mean, the band by the weights, the band with observation noise, training data.

    Args:
        x: (inputs,) or (inputs, 1), in any order.
        prediction: at `x`, with one output.
        x_train: inputs of the training data, (points,) or (points, 1).
        y_train: their targets.
        level: probability that either band covers.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        x, y = next(iter(regression_loader))
        predictor = uq.wrap(regressor, regression_posterior)
        prediction = predictor(x)
        plots.regression_band(x, prediction, x, y).savefig("band.png")
        ```
    """
    positions = _column("x", x)
    mean = _column("prediction.mean", prediction.mean)
    if len(mean) != len(positions):
        raise PosthocUQError(f"x has {len(positions)} inputs but the prediction has {len(mean)}.")
    points_x, points_y = _column("x_train", x_train), _column("y_train", y_train)
    if len(points_x) != len(points_y):
        raise PosthocUQError(f"x_train has {len(points_x)} points but y_train has {len(points_y)}.")
    order = np.argsort(positions, kind="stable")
    positions, mean = positions[order], mean[order]
    weights_only = RegressionPrediction(prediction.mean, prediction.epistemic_variance, 0.0)

    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    for shown, opacity, what in ((prediction, 0.15, "with noise"), (weights_only, 0.35, "from the weights")):
        low, high = (_column("interval", bound)[order] for bound in shown.interval(level))
        label = f"{level * 100:g} % {what}"
        axes.fill_between(positions, low, high, color=COLOURS[0], alpha=opacity, linewidth=0, label=label)
    axes.plot(positions, mean, color=COLOURS[0], linewidth=1.8, label="mean")
    axes.plot(
        points_x,
        points_y,
        linestyle="none",
        marker="o",
        markersize=4,
        color=COLOURS[1],
        markeredgecolor="white",
        markeredgewidth=0.5,
        label="training data",
    )
    axes.set(xlabel="input", ylabel="output")
    axes.margins(x=0.01)
    # outside, because a wide band can reach any corner
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    clean(axes)
    return figure


def prediction_maps(
    prediction: MapPrediction, targets: Tensor | None = None, *, channel: int = 0, level: float = 0.9
) -> Figure:
    """What is predicted at the positions of some inputs, a row each. Of pixels pictures of targets, mean, standard
    deviation and novelty; of sequences the mean within its interval, with the targets, and the deviation and novelty.

    Args:
        prediction: of values at positions of one or two dimensions, of 16 inputs at most.
        targets: in the layout of the outputs; NaN where there is none.
        channel: that is drawn.
        level: of the intervals of sequences.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        net, x = nn.Conv2d(1, 1, 3, padding=1), torch.randn(8, 1, 6, 6)
        posterior = uq.fit(net, [(x, x)], likelihood="regression")
        prediction = uq.wrap(net, posterior)(x[:2])
        plots.prediction_maps(prediction, x[:2]).savefig("maps.png")
        ```
    """
    size, channels = len(prediction), prediction.layout.classes(prediction.mean)
    if not isinstance(cast(Any, prediction), MapPrediction) or len(prediction.positions) > 2:
        raise PosthocUQError("prediction_maps draws values at positions of one or two dimensions.")
    if not 0 < size <= _MAX_DRAWN:
        raise PosthocUQError(
            f"prediction_maps draws 1 to {_MAX_DRAWN} inputs, not {size}; give some: prediction.picked(slice(4))."
        )
    if not 0 <= channel < channels:
        raise PosthocUQError(f"channel must be below {channels}, not {channel}.")
    if targets is not None and targets.shape != prediction.mean.shape:
        raise PosthocUQError(
            f"targets must have the shape of the mean, {tuple(prediction.mean.shape)}, not {tuple(targets.shape)}."
        )

    def drawn(values: Tensor) -> NDArray[np.float64]:
        return as_double(values.detach()).cpu().select(prediction.layout.class_dim, channel).numpy()

    columns = {} if targets is None else {"target": drawn(targets)}
    columns |= {"mean": drawn(prediction.mean), "deviation": drawn(prediction.standard_deviation)}
    ratio = prediction.novelty_ratio
    if ratio is not None and ratio.ndim > 1:
        columns["novelty"] = as_double(ratio.detach()).cpu().numpy()
    if len(prediction.positions) == 1:
        bounds = tuple(map(drawn, prediction.interval(level)))
        return _drawn_sequences(columns, bounds, level)
    figure = new_figure(2.4 * len(columns), 2.2 * size)
    panels = np.asarray(figure.subplots(size, len(columns), squeeze=False))
    alike = [columns[name] for name in ("target", "mean") if name in columns]
    of_values = min(map(np.nanmin, alike)), max(map(np.nanmax, alike))
    for place, (name, values) in enumerate(columns.items()):
        pictures = list[AxesImage]()
        low, high = of_values if name in ("target", "mean") else (np.nanmin(values), np.nanmax(values))
        colours = "viridis" if name in ("target", "mean") else "magma"
        for row, axes in enumerate(panels[:, place]):
            options: dict[str, Any] = {"vmin": low, "vmax": high, "cmap": colours}
            pictures.append(axes.imshow(values[row], interpolation="nearest", **options))
            axes.set(xticks=[], yticks=[], title=name if row == 0 else "")
        figure.colorbar(pictures[-1], ax=list(panels[:, place]), shrink=0.8)
    return figure


def _drawn_sequences(
    columns: Mapping[str, NDArray[np.float64]], bounds: Sequence[NDArray[np.float64]], level: float
) -> Figure:
    size = len(columns["mean"])
    below = [name for name in ("deviation", "novelty") if name in columns]
    figure = new_figure(3.6 * (1 + len(below)), 2.2 * size)
    panels = np.asarray(figure.subplots(size, 1 + len(below), squeeze=False))
    steps = np.arange(columns["mean"].shape[1])
    for row in range(size):
        axes = panels[row, 0]
        low, high = (bound[row] for bound in bounds)
        axes.fill_between(
            steps, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label=f"{level * 100:g} %"
        )
        axes.plot(steps, columns["mean"][row], color=COLOURS[0], linewidth=1.6, label="mean")
        if "target" in columns:
            axes.plot(steps, columns["target"][row], "o", color=COLOURS[1], markersize=3, label="target")
        for place, name in enumerate(below, start=1):
            panels[row, place].plot(steps, columns[name][row], color=COLOURS[place + 1], linewidth=1.6)
            panels[row, place].set(title=name if row == 0 else "", xlabel="position")
        axes.set(xlabel="position")
        for each in panels[row]:
            clean(each)
    legend_above(panels[0, 0])
    return figure


def _column(name: str, tensor: Tensor) -> NDArray[np.float64]:
    if tensor.ndim not in (1, 2) or tensor.shape[1:].numel() != 1:
        raise PosthocUQError(
            f"regression_band draws one dimension: {name} must be (n,) or (n, 1), not {tuple(tensor.shape)}."
        )
    return tensor.detach().cpu().double().flatten().numpy()


# Class probabilities and their uncertainty over a plane of inputs.

_SCORE_LABELS = {
    "entropy": "entropy in nats",
    "mutual_information": "mutual information in nats",
    "max_probability": "1 − largest probability",
    "epistemic_variance": "variance of the logits",
    "variation_ratio": "variation ratio",
}
_MAX_BATCH = 4096  # points of the plane
_STRENGTH = 0.6  # of the colours, paler than the points, so that these stand out
_PALE = [tuple(1 - _STRENGTH * (1 - part) for part in to_rgb(colour)) for colour in COLOURS[:2]]
_TWO_CLASSES = LinearSegmentedColormap.from_list("two classes", [_PALE[0], "white", _PALE[1]])
_SHADES = LinearSegmentedColormap.from_list("shades", ["white", "#C4C4C4", "#5A5A5A"])


class _Plane(NamedTuple):
    """Coordinates (resolution,) along either axis, probs (rows, columns, classes), score (rows, columns)."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    probs: NDArray[np.float64]
    score: NDArray[np.float64]

    @property
    def extent(self) -> tuple[float, float, float, float]:
        half_x, half_y = (self.x[1] - self.x[0]) / 2, (self.y[1] - self.y[0]) / 2
        return self.x[0] - half_x, self.x[-1] + half_x, self.y[0] - half_y, self.y[-1] + half_y


def class_uncertainty_map(
    predict: Callable[[Tensor], ClassPrediction],
    x_train: Tensor,
    y_train: Tensor,
    *,
    score: str | Callable[[ClassPrediction], Tensor] = "entropy",
    resolution: int = 150,
    margin: float = 0.5,
    log: bool = False,
) -> Figure:
    """A classifier of two inputs: left what it predicts, right how uncertain it is, with the training points.

    With two classes the left panel is the probability of class 1; with more it is the colour of the most probable
    class, paler where it is less probable. Lines are the decision boundaries. More than seven classes share
    colours, and their numbers stand at their training points.

    Args:
        predict: from inputs (batch, 2), in the dtype and on the device of `x_train`, to their prediction; a
            wrapped model is one. It is called on at most 4096 points at a time, without gradients.
        x_train: (points, 2).
        y_train: (points,), integer labels.
        score: the name of a score of classes ("entropy", "mutual_information", "max_probability",
            "epistemic_variance", "variation_ratio"), or a function from a prediction to (batch,), higher meaning more
            uncertain, such as `ClassPrediction.expected_entropy`.
        resolution: points along either axis.
        margin: how far the map goes beyond the points, as a share of their range on either side.
        log: a logarithmic colour scale, for scores over orders of magnitude; scores that are not positive are drawn at
            the smallest positive one.

    Example:
        ```python
        from posthoc_uq.evaluation import plots

        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        x = torch.randn(40, 2)
        y = (x[:, 0] > 0).long()
        predictor = uq.wrap(net, uq.fit(net, [(x, y)]))
        figure = plots.class_uncertainty_map(predictor, x, y)
        ```
    """
    points, labels = _training(x_train, y_train)
    if isinstance(score, str):
        one_of("score", score, CLASS_SCORES)
    if resolution < 2 or margin < 0:
        raise PosthocUQError(
            f"class_uncertainty_map needs a resolution of at least 2 and a margin that is not negative, "
            f"not {resolution} and {margin}."
        )
    plane = _evaluated(predict, x_train, points, score, resolution, margin)
    classes = plane.probs.shape[-1]
    if labels.max() >= classes:
        raise PosthocUQError(f"y_train holds class {labels.max()}, but predict knows {classes} classes only.")
    shown, norm = plane.score, None
    if log:
        if not (shown > 0).any():
            raise PosthocUQError("The map has no positive score, so its scale cannot be logarithmic.")
        shown = np.maximum(shown, shown[shown > 0].min())
        norm = LogNorm(shown.min(), shown.max() if shown.max() > shown.min() else 2 * shown.min())

    figure = new_figure(11.2, 4.7)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    drawn: dict[str, Any] = {
        "extent": plane.extent,
        "origin": "lower",
        "aspect": "auto",
        "interpolation": "bilinear",
    }
    if classes == 2:
        image = left.imshow(plane.probs[..., 1], cmap=_TWO_CLASSES, vmin=0, vmax=1, **drawn)
        figure.colorbar(image, ax=left, label="probability of class 1")
    else:
        left.imshow(_blend(plane.probs), **drawn)
    name = _SCORE_LABELS.get(score, score) if isinstance(score, str) else getattr(score, "__name__", "score")
    figure.colorbar(right.imshow(shown, cmap=_SHADES, norm=norm, **drawn), ax=right, label=name)
    for axes in (left, right):
        _boundaries(axes, plane)
        _training_points(axes, points, labels, classes)
        axes.set(xlabel="first input", xlim=plane.extent[:2], ylim=plane.extent[2:])
    left.set_ylabel("second input")
    left.set_title("prediction", loc="left", fontsize="medium")
    right.set_title("uncertainty", loc="left", fontsize="medium")
    if classes <= len(COLOURS):
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    return figure


def _training(x_train: Tensor, y_train: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    if x_train.ndim != 2 or x_train.shape[1] != 2 or len(x_train) == 0:
        raise PosthocUQError(
            f"class_uncertainty_map draws two inputs: x_train must be (points, 2), not {tuple(x_train.shape)}."
        )
    if y_train.shape != x_train.shape[:1] or y_train.is_floating_point() or y_train.is_complex():
        raise PosthocUQError(
            f"y_train must be {len(x_train)} integers of shape ({len(x_train)},), "
            f"not {y_train.dtype} of shape {tuple(y_train.shape)}."
        )
    points, labels = x_train.detach().cpu().double().numpy(), y_train.detach().cpu().long().numpy()
    if not np.isfinite(points).all():
        raise NonFiniteError("x_train holds numbers that are not finite.")
    if labels.min() < 0:
        raise PosthocUQError(f"y_train must hold classes from 0 on, not {labels.min()}.")
    return points, labels


def _evaluated(
    predict: Callable[[Tensor], ClassPrediction],
    x_train: Tensor,
    points: NDArray[np.float64],
    score: str | Callable[[ClassPrediction], Tensor],
    resolution: int,
    margin: float,
) -> _Plane:
    low, high = points.min(axis=0), points.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    # a range of no width still needs some to be drawn
    pad = np.where(high > low, margin * span, max(margin, 0.5))
    x, y = (np.linspace(low[i] - pad[i], high[i] + pad[i], resolution) for i in range(2))
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)).to(x_train)
    probs: list[Tensor] = []
    scores: list[Tensor] = []
    with torch.no_grad():
        for batch in grid.split(_MAX_BATCH):
            prediction = predict(batch)
            if not isinstance(prediction, ClassPrediction):
                raise PosthocUQError(
                    f"predict must return a ClassPrediction, not {type(prediction).__name__}."
                )
            values = score_of(prediction, score) if isinstance(score, str) else score(prediction)
            if values.shape != (len(batch),) or len(prediction) != len(batch):
                raise PosthocUQError(
                    f"For {len(batch)} inputs there are {len(prediction)} predictions and scores of shape "
                    f"{tuple(values.shape)}; there must be one of each per input."
                )
            probs.append(prediction.probs.detach().cpu().double())
            scores.append(values.detach().cpu().double())
    every_prob, every_score = torch.cat(probs), torch.cat(scores)
    if not bool(every_prob.isfinite().all()) or not bool(every_score.isfinite().all()):
        raise NonFiniteError(
            "The map holds probabilities or scores that are not finite; try a smaller margin."
        )
    shape = (resolution, resolution)
    return _Plane(x, y, every_prob.reshape(*shape, -1).numpy(), every_score.reshape(shape).numpy())


def _blend(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """RGB (rows, columns, 3): the colour of the most probable class, white where all are equally probable."""
    classes = probs.shape[-1]
    palette = np.array([to_rgb(COLOURS[c % len(COLOURS)]) for c in range(classes)])
    surplus = (probs.max(axis=-1, keepdims=True) - 1 / classes) / (1 - 1 / classes)
    strength = 0.08 + (_STRENGTH - 0.08) * surplus
    return 1 - strength * (1 - palette[probs.argmax(axis=-1)])


def _boundaries(axes: Axes, plane: _Plane) -> None:
    classes = plane.probs.shape[-1]
    for c in range(1 if classes == 2 else classes):
        ahead = plane.probs[..., c] - np.delete(plane.probs, c, axis=-1).max(axis=-1)
        if ahead.min() < 0 < ahead.max():
            axes.contour(plane.x, plane.y, ahead, levels=[0.0], colors="black", linewidths=1)


def _training_points(
    axes: Axes, points: NDArray[np.float64], labels: NDArray[np.int64], classes: int
) -> None:
    for c in np.unique(labels).tolist():
        of_class = points[labels == c]
        axes.plot(
            *of_class.T,
            linestyle="none",
            marker=MARKERS[(c + c // len(COLOURS)) % len(MARKERS)],
            markersize=5 if len(points) <= 500 else 3,
            color=COLOURS[c % len(COLOURS)],
            markeredgecolor="white",
            markeredgewidth=0.7,
            label=f"class {c}",
        )
        if classes > len(COLOURS):
            text = axes.annotate(
                str(c),
                (float(np.median(of_class[:, 0])), float(np.median(of_class[:, 1]))),
                ha="center",
                va="center",
                fontweight="bold",
                zorder=5,
            )
            text.set_path_effects([patheffects.withStroke(linewidth=3, foreground="white")])
