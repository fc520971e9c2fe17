"""How good predictions are: scores against observed targets, as Python floats, and named tuples of tensors for curves.

torchmetrics computes what it has. It is imported inside the functions, since it takes seconds to load, which a program
that only predicts should not wait for. Everything is computed on the CPU in float64, without random numbers.

All functions raise a `PosthocUQError` for shapes or values that do not fit, and a `NonFiniteError` for a NaN, which is
neither a wrong answer nor a right one. Users find them, and those of `posthoc_uq.likelihoods.selective`, in
`posthoc_uq.evaluation.metrics`. Arguments of one name have the same shapes everywhere:

* `probs` (inputs, classes) and `labels` (inputs,), integers; the Brier score and calibration errors also take soft
  labels (inputs, classes), of which each class counts by its share. Of several labels at once (names with "multilabel",
  mAP, F1) both (inputs, labels), the labels 0 and 1, or for the calibration error between them; `there`, of the same
  shape, says which labels are known, by default all.
* `mean`, `variance` (the total one), `lower`, `upper` and `targets` (inputs,) or (inputs, outputs), all of exactly one
  shape, so that nothing broadcasts by accident.
* `scores_in` and `scores_out`: a score of inputs like the training data, and of foreign ones; larger means stranger.
  Only the order counts, so scores may be infinite and of any scale.
* `bins`: how many. Bins of equal width are [k / bins, (k + 1) / bins), the last one closed. Bins of equal mass hold the
  same number of inputs, up to one; inputs of equal confidence share the bin of the first of them in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributions import Normal

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import one_of
from posthoc_uq.likelihoods.labels import are_soft, are_whole, checked_soft

_MAX_PAIRS = 2**22  # of inputs that are compared at once


def plain(tensor: Tensor) -> Tensor:
    """The values in float64 on the CPU, without a graph."""
    return tensor.detach().cpu().double()


def refuse_nan(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        wrong = int(tensor.isnan().sum())
        if wrong:
            raise NonFiniteError(f"{name} holds {wrong} NaN among {tensor.numel()} numbers; leave them out.")


def row(name: str, tensor: Tensor, inputs: int | None = None) -> Tensor:
    """One number per input, in float64; `inputs` of them where that is given."""
    if tensor.ndim != 1 or tensor.numel() == 0:
        raise PosthocUQError(f"{name} must be (inputs,) with at least one input, not {tuple(tensor.shape)}.")
    if inputs is not None and len(tensor) != inputs:
        raise PosthocUQError(f"{name} must hold one number for each of {inputs} inputs, not {len(tensor)}.")
    values = plain(tensor)
    refuse_nan(**{name: values})
    return values


def same_shape(**tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64, after making sure that nothing would broadcast."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise PosthocUQError(f"The shapes must be the same: {listed}.")
    if 0 in next(iter(shapes.values())):
        raise PosthocUQError("A metric needs at least one target.")
    values = {name: plain(tensor) for name, tensor in tensors.items()}
    refuse_nan(**values)
    return tuple(values.values())


def classified(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`probs` (inputs, classes) in float64 and `labels` (inputs,) in int64."""
    if probs.ndim != 2 or probs.shape[0] == 0 or probs.shape[1] == 0:
        raise PosthocUQError(
            f"probs must be (inputs, classes) with at least one input, not {tuple(probs.shape)}."
        )
    if labels.shape != probs.shape[:1] or labels.is_floating_point() or labels.is_complex():
        raise PosthocUQError(
            f"labels must be {probs.shape[0]} integers of shape ({probs.shape[0]},), "
            f"not {labels.dtype} of shape {tuple(labels.shape)}."
        )
    labels = labels.detach().cpu().long()
    if int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        raise PosthocUQError(
            f"labels must lie between 0 and {probs.shape[1] - 1}, "
            f"but range from {int(labels.min())} to {int(labels.max())}."
        )
    probs = plain(probs)
    refuse_nan(probs=probs)
    _check_probabilities(probs, "softmax(dim=-1)")
    return probs, labels


def _rated(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`classified`, or soft labels (inputs, classes) in float64."""
    if not are_soft(labels, probs):
        return classified(probs, labels)
    probs, _ = classified(probs, labels.argmax(-1))
    return probs, checked_soft(plain(labels))


def _shares(labels: Tensor, classes: Tensor | int) -> Tensor:
    """How far the label is a class, or each input's own, (inputs,) float64: 1 or 0, or its share."""
    if labels.ndim == 1:
        return (labels == classes).double()
    if isinstance(classes, int):
        return labels[:, classes]
    return labels.gather(1, classes.unsqueeze(1)).squeeze(1)


def _check_probabilities(probs: Tensor, function: str) -> None:
    # half precision rounds by less than 0.01
    if float(probs.min()) < -0.01 or float(probs.max()) > 1.01:
        raise PosthocUQError(
            f"probs must lie between 0 and 1, but range from {float(probs.min()):.3g} to "
            f"{float(probs.max()):.3g}; of logits, take {function} first."
        )


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of inputs whose most probable class is the label.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = prediction.probs
        print(metrics.accuracy(probs, labels))
        ```
    """
    from torchmetrics.functional.classification import multiclass_accuracy

    probs, labels = classified(probs, labels)
    with probs.device:  # torchmetrics before 1.9 makes a tensor on torch's default device
        return multiclass_accuracy(
            probs.argmax(dim=-1), labels, num_classes=probs.shape[1], average="micro"
        ).item()


def top_k_accuracy(probs: Tensor, labels: Tensor, k: int = 5) -> float:
    """Share of inputs whose label is among the `k` most probable classes; of equal ones the lower index comes first.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = prediction.probs
        print(metrics.top_k_accuracy(probs, labels, k=3))
        ```
    """
    probs, labels = classified(probs, labels)
    if not 1 <= k <= probs.shape[1]:
        raise PosthocUQError(f"top_k_accuracy needs k between 1 and the {probs.shape[1]} classes, not {k}.")
    # not torchmetrics: among equal probabilities (often zeros) its choice is up to torch.topk
    of_label = probs.gather(-1, labels.unsqueeze(-1))
    earlier = torch.arange(probs.shape[1], device="cpu") < labels.unsqueeze(-1)
    ahead = ((probs > of_label) | ((probs == of_label) & earlier)).sum(dim=-1)
    return (ahead < k).double().mean().item()


def brier_score(probs: Tensor, labels: Tensor) -> float:
    """Squared distance of the probabilities to the one-hot label, summed over classes, mean over inputs: between 0 and
    2 (Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather Review, 1950).

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = prediction.probs
        print(metrics.brier_score(probs, labels))
        ```
    """
    probs, labels = _rated(probs, labels)
    shares = labels if labels.ndim == 2 else torch.nn.functional.one_hot(labels, probs.shape[1])
    return (probs - shares).square().sum(dim=-1).mean().item()


def ranked_probability_score(probs: Tensor, labels: Tensor) -> float:
    """``1 / (C - 1) sum_k (P(class <= k) - 1[label <= k])^2`` of ordered classes, mean over inputs, in [0, 1] (Epstein,
    "A Scoring System for Probability Forecasts of Ranked Categories", 1969).

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = prediction.probs
        print(metrics.ranked_probability_score(probs, labels))
        ```
    """
    probs, labels = classified(probs, labels)
    reached = labels.unsqueeze(1) <= torch.arange(probs.shape[1], device="cpu")
    gaps = (probs.cumsum(1) - reached.double())[:, :-1]
    return gaps.square().mean().item()


def quadratic_kappa(predicted: Tensor, labels: Tensor, classes: int) -> float:
    """Cohen's kappa of predicted and right classes, both (inputs,), with weights by the squared distance between
    classes: 1 where all are right, 0 for chance, NaN where either has one class alone.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        predicted = prediction.predicted()
        print(metrics.quadratic_kappa(predicted, labels, classes=5))
        ```
    """
    from torchmetrics.functional.classification import multiclass_cohen_kappa

    if predicted.shape != labels.shape or predicted.ndim != 1 or len(predicted) == 0:
        raise PosthocUQError(
            f"predicted and labels must be (inputs,) with at least one input, not {tuple(predicted.shape)} and "
            f"{tuple(labels.shape)}."
        )
    predicted, labels = predicted.cpu(), labels.cpu()
    return float(multiclass_cohen_kappa(predicted, labels, num_classes=classes, weights="quadratic"))


Binning = Literal["equal_width", "equal_mass"]
"""How confidences are cut into bins."""
BINNINGS: tuple[str, ...] = get_args(Binning)


class CalibrationBins(NamedTuple):
    """Per bin, each (bins,): mean confidence and accuracy (NaN where the bin is empty), and counts.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        bins = metrics.calibration_bins(prediction.probs, labels, bins=5)
        print(bins.confidence, bins.accuracy, bins.counts)
        ```
    """

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def expected_calibration_error(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> float:
    """Mean gap between confidence and accuracy over bins of confidence, weighted by the share of inputs.

    `sum_b n_b / n |accuracy_b - confidence_b|`, the confidence being the largest probability (Guo et al.,
    "On Calibration of Modern Neural Networks", ICML 2017). Where most confidences are near 1, bins of equal
    width leave most bins nearly empty; those of equal mass do not (Nixon et al., "Measuring Calibration in
    Deep Learning", CVPR workshops 2019).

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = prediction.probs
        print(metrics.expected_calibration_error(probs, labels, bins=10))
        ```
    """
    return _gap(calibration_bins(probs, labels, bins, binning))


def calibration_bins(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> CalibrationBins:
    """The bins behind `expected_calibration_error`, for reliability diagrams.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = prediction.probs
        print(metrics.calibration_bins(probs, labels, bins=5))
        ```
    """
    probs, labels = _rated(probs, labels)
    _check_bins(bins, binning)
    confidence, predicted = probs.max(dim=-1)
    return _binned(confidence, _shares(labels, predicted), bins, binning)


def classwise_calibration_error(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> float:
    """How far every class's probability is from the class's frequency, not only the largest one's.

    `1 / C sum_c sum_b n_cb / n |frequency_cb - probability_cb|`, where the bins of class c are over the
    probabilities of class c of all n inputs: the static calibration error of Nixon et al. (2019), the
    classwise-ECE of Kull et al. ("Beyond temperature scaling", NeurIPS 2019); with bins of equal mass Nixon's
    adaptive calibration error. With many classes it is small because most probabilities are small: compare
    models on the same data only.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = prediction.probs
        print(metrics.classwise_calibration_error(probs, labels))
        ```
    """
    probs, labels = _rated(probs, labels)
    _check_bins(bins, binning)
    columns = probs.T.contiguous()
    gaps = [_gap(_binned(column, _shares(labels, c), bins, binning)) for c, column in enumerate(columns)]
    return sum(gaps) / len(gaps)


def _binned(confidence: Tensor, hits: Tensor, bins: int, binning: Binning) -> CalibrationBins:
    """Means of `confidence` and of `hits`, both (inputs,) float64, in each bin."""
    if binning == "equal_width":
        edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device="cpu")
        index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)
    else:
        smaller = torch.searchsorted(confidence.sort().values, confidence)
        index = smaller * bins // len(confidence)
    counts = torch.bincount(index, minlength=bins)
    mean_confidence = torch.bincount(index, weights=confidence, minlength=bins) / counts
    mean_accuracy = torch.bincount(index, weights=hits, minlength=bins) / counts
    return CalibrationBins(mean_confidence, mean_accuracy, counts)


def _gap(parts: CalibrationBins) -> float:
    gaps = (parts.accuracy - parts.confidence).abs().nan_to_num()
    return (gaps * parts.counts).sum().item() / int(parts.counts.sum())


def _check_bins(bins: int, binning: str = "equal_width") -> None:
    if bins < 1:
        raise PosthocUQError(f"A calibration needs at least one bin, not {bins}.")
    one_of("binning", binning, BINNINGS)


_NOT_THERE = -1  # for torchmetrics


def _multilabel(
    probs: Tensor, labels: Tensor, there: Tensor | None, soft: bool = False
) -> tuple[Tensor, Tensor]:
    """Both in float64, labels as integers unless they are soft; a label that is not there is -1."""
    if there is not None:
        known = there.to(labels.device)
        if known.shape != labels.shape or known.dtype != torch.bool or not bool(known.any()):
            raise PosthocUQError(
                f"there must be booleans shaped like the labels, {tuple(labels.shape)}, some of them true."
            )
        probs, found = _multilabel(probs, labels.masked_fill(~known, 0), None, soft)
        return probs, found.masked_fill(~known.cpu(), _NOT_THERE)
    probs, labels = same_shape(probs=probs, labels=labels)
    if probs.ndim != 2:
        raise PosthocUQError(f"probs must be (inputs, labels), not {tuple(probs.shape)}.")
    if bool(((labels < 0) | (labels > 1)).any()) or not (soft or are_whole(labels)):
        raise PosthocUQError("labels must be 0 or 1.")
    _check_probabilities(probs, "sigmoid()")
    return probs.clamp(0, 1), labels if soft else labels.long()


def mean_average_precision(probs: Tensor, labels: Tensor, there: Tensor | None = None) -> float:
    """The mean over labels of the average precision of ranking the inputs by the label's probability (mAP). Labels that
    no input has are left out; NaN if there are no others.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = torch.rand(6, 3)
        applies = torch.tensor([[1, 0, 1], [0, 1, 0]] * 3)
        print(metrics.mean_average_precision(probs, applies))
        ```
    """
    from torchmetrics.functional.classification import binary_average_precision

    probs, labels = _multilabel(probs, labels, there)
    found = list[Tensor]()
    for of_label, own in zip(probs.T, labels.T, strict=True):
        known = own != _NOT_THERE
        if bool((own == 1).any()):
            found.append(binary_average_precision(of_label[known], own[known]))
    return float(torch.stack(found).mean()) if found else math.nan


def f1_score(
    probs: Tensor,
    labels: Tensor,
    average: Literal["macro", "micro"] = "macro",
    there: Tensor | None = None,
) -> float:
    """The harmonic mean of precision and recall of the labels more probable than not: the mean over labels
    (``"macro"``), or of all decisions together (``"micro"``).

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = torch.rand(6, 3)
        applies = torch.tensor([[1, 0, 1], [0, 1, 0]] * 3)
        print(metrics.f1_score(probs, applies))
        ```
    """
    from torchmetrics.functional.classification import multilabel_f1_score

    probs, labels = _multilabel(probs, labels, there)
    one_of("average", average, ("macro", "micro"))
    left_out = None if there is None else _NOT_THERE
    return float(
        multilabel_f1_score(probs, labels, num_labels=probs.shape[1], average=average, ignore_index=left_out)
    )


def multilabel_calibration_error(
    probs: Tensor, labels: Tensor, bins: int = 15, there: Tensor | None = None
) -> float:
    """The expected calibration error of all labels' probabilities together, in bins of equal width: the gap between the
    mean probability in a bin and how often these labels are there.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        probs = torch.rand(6, 3)
        applies = torch.tensor([[1, 0, 1], [0, 1, 0]] * 3)
        print(metrics.multilabel_calibration_error(probs, applies))
        ```
    """
    probs, labels = _multilabel(probs, labels, there, soft=True)
    _check_bins(bins)
    known = labels != _NOT_THERE
    return _gap(_binned(probs[known], labels[known], bins, "equal_width"))


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Root of the mean squared error over all inputs and outputs, in units of the output.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        mean, variance = torch.zeros(4), torch.ones(4)
        targets = torch.randn(4)
        print(metrics.rmse(mean, targets))
        ```
    """
    from torchmetrics.functional.regression import mean_squared_error

    mean, targets = same_shape(mean=mean, targets=targets)
    return mean_squared_error(mean.flatten(), targets.flatten(), squared=False).item()


def pinball_loss(quantiles: Tensor, targets: Tensor, levels: Sequence[float]) -> float:
    """The pinball loss of predicted quantiles f, ``max(q (y - f), (q - 1) (y - f))``, mean over inputs and levels q, in
    units of the target.

    Args:
        quantiles: (inputs, levels).
        targets: (inputs,) or (inputs, 1).
        levels: of the quantiles, each in (0, 1).

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        levels = [0.1, 0.5, 0.9]
        quantiles = torch.tensor([[-1.0, 0.0, 1.0]] * 4)
        print(metrics.pinball_loss(quantiles, torch.randn(4), levels))
        ```
    """
    quantiles, targets = same_shape(
        quantiles=quantiles, targets=targets.reshape(-1, 1).expand(-1, len(levels))
    )
    own, rest = torch.tensor(levels, dtype=torch.float64, device="cpu"), targets - quantiles
    return float(torch.maximum(own * rest, (own - 1) * rest).mean())


def concordance(predicted: Tensor, lower: Tensor, upper: Tensor) -> float:
    """Of pairs of inputs of which one had its event before the other for sure, how often the predicted time of the
    first is the smaller one, ties counting half: Harrell's C ("Evaluating the yield of medical tests", JAMA 1982); NaN
    without such pairs.

    Args:
        predicted: (inputs,), times, or any number that is larger where the event comes later.
        lower: (inputs,), before which the event did not happen.
        upper: (inputs,), until which it did: of an event that was seen the same, infinity where it is not known.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        predicted = torch.tensor([1.0, 2.0, 4.0])
        times = torch.tensor([1.5, 1.0, 3.0])
        print(metrics.concordance(predicted, times, times))  # 2 / 3
        ```
    """
    predicted, lower, upper = same_shape(predicted=predicted, lower=lower, upper=upper)
    pairs, right = 0, 0.0
    for rows in torch.arange(len(predicted), device="cpu").split(max(1, _MAX_PAIRS // len(predicted))):
        own, end = predicted[rows, None], upper[rows, None]
        before = (end < lower) | ((end == lower) & (lower < upper))
        pairs += int(before.sum())
        right += float((before & (own < predicted)).sum() + (before & (own == predicted)).sum() / 2)
    return right / pairs if pairs else math.nan


def gaussian_log_density(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Log density of the targets in nats, log N(y; mean, variance), summed over outputs, mean over inputs.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        mean, variance = torch.zeros(4), torch.ones(4)
        targets = torch.randn(4)
        print(metrics.gaussian_log_density(mean, variance, targets))
        ```
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    if bool((variance <= 0).any()):
        raise PosthocUQError("gaussian_log_density needs a positive variance everywhere.")
    return Normal(mean, variance.sqrt()).log_prob(targets).reshape(len(mean), -1).sum(dim=-1).mean().item()


def crps_gaussian(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Continuous ranked probability score of N(mean, variance), mean over inputs and outputs; smaller is better.

    `integral (F(x) - 1[x >= y])^2 dx = s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))` with `s^2` the variance and
    `z = (y - mean) / s`, in units of the output (Gneiting and Raftery, "Strictly Proper Scoring Rules, Prediction,
    and Estimation", JASA 2007, section 4.2, with the sign turned). Where the variance is 0 it is the absolute error.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        mean, variance = torch.zeros(4), torch.ones(4)
        targets = torch.randn(4)
        print(metrics.crps_gaussian(mean, variance, targets))
        ```
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    z = _standardised("crps_gaussian", mean, variance, targets)
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    from_spread = variance.sqrt() * (2 * density - 1 / math.sqrt(math.pi))
    return ((targets - mean) * torch.special.erf(z / math.sqrt(2)) + from_spread).mean().item()


def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> float:
    """Share of targets with lower <= target <= upper, over all inputs and outputs.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        lower, upper = -2 * torch.ones(4), 2 * torch.ones(4)
        print(metrics.interval_coverage(lower, upper, torch.randn(4)))
        ```
    """
    lower, upper, targets = same_shape(lower=lower, upper=upper, targets=targets)
    return ((lower <= targets) & (targets <= upper)).double().mean().item()


def interval_sharpness(lower: Tensor, upper: Tensor) -> float:
    """Mean width of the intervals over all inputs and outputs, in units of the output.

    Of models whose intervals cover equally often, the one with narrower intervals is better (Gneiting,
    Balabdaoui and Raftery, "Probabilistic forecasts, calibration and sharpness", JRSS B 2007).

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        lower, upper = -2 * torch.ones(4), 2 * torch.ones(4)
        print(metrics.interval_sharpness(lower, upper))  # 4.0
        ```
    """
    lower, upper = same_shape(lower=lower, upper=upper)
    if bool((lower > upper).any()):
        raise PosthocUQError("interval_sharpness got intervals whose lower end is above the upper one.")
    return (upper - lower).mean().item()


class CoverageCurve(NamedTuple):
    """Nominal and observed coverage, each (levels,), float64.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        mean, variance = torch.zeros(4), torch.ones(4)
        targets = torch.randn(4)
        curve = metrics.coverage_curve(mean, variance, targets)
        print(curve.nominal, curve.observed, curve.error)
        ```
    """

    nominal: Tensor
    observed: Tensor

    @property
    def error(self) -> float:
        """Mean over the levels of |observed - nominal|; 0 for a calibrated model, up to chance."""
        return (self.observed - self.nominal).abs().mean().item()


def coverage_curve(
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    levels: Sequence[float] | Tensor | None = None,
    *,
    kind: Literal["interval", "quantile"] = "interval",
) -> CoverageCurve:
    """The observed coverage of N(mean, variance) at each nominal level.

    With "interval": the share of targets inside the central interval of that probability,
    `|y - mean| <= Phi^-1((1 + level) / 2) s`. With "quantile": the share at or below the quantile of that level,
    `y <= mean + Phi^-1(level) s` (Kuleshov et al., "Accurate Uncertainties for Deep Learning Using Calibrated
    Regression", ICML 2018), which shows a bias of the mean as well. A calibrated model has observed = nominal.

    `levels` are strictly between 0 and 1; without them 0.05, 0.10, ..., 0.95.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        mean, variance = torch.zeros(4), torch.ones(4)
        targets = torch.randn(4)
        curve = metrics.coverage_curve(mean, variance, targets, [0.5, 0.9])
        print(curve.nominal, curve.observed, curve.error)
        ```
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    values = [k / 20 for k in range(1, 20)] if levels is None else [float(level) for level in levels]
    if not values or not all(0 < level < 1 for level in values):
        raise PosthocUQError(f"levels must be numbers strictly between 0 and 1, not {values}.")
    one_of("kind", kind, ("interval", "quantile"))
    z = _standardised("coverage_curve", mean, variance, targets).flatten()
    needed_level = torch.special.erf(z.abs() / math.sqrt(2)) if kind == "interval" else torch.special.ndtr(z)
    nominal = torch.tensor(values, dtype=torch.float64, device="cpu")
    covered = torch.searchsorted(needed_level.sort().values, nominal, right=True)
    return CoverageCurve(nominal, covered.double() / len(needed_level))


def _standardised(name: str, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """(targets - mean) / s. Where s is 0: infinite with the sign of the error, or 0 without an error."""
    if bool((variance < 0).any()):
        raise PosthocUQError(f"{name} needs a variance that is nowhere negative.")
    z = (targets - mean) / variance.sqrt()
    return z.masked_fill(targets == mean, 0)


def ood_auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Probability that a foreign input scores higher than a familiar one, ties counting half.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        foreign = predictor(torch.randn(20, 1, 6, 6)).entropy()
        print(metrics.ood_auroc(prediction.entropy(), foreign))
        ```
    """
    from torchmetrics.functional.classification import binary_auroc

    return binary_auroc(*_ranked("ood_auroc", scores_in, scores_out)).item()


def ood_aupr(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the precision-recall curve of finding the foreign inputs: their average precision.

    `sum_k (recall_k - recall_(k-1)) precision_k` over the distinct scores as thresholds, in descending order
    (no interpolation). Its value for a useless score is the share of foreign inputs among all, so it compares
    scores on the same two data sets only (Davis and Goadrich, ICML 2006).

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        foreign = predictor(torch.randn(20, 1, 6, 6)).entropy()
        print(metrics.ood_aupr(prediction.entropy(), foreign))
        ```
    """
    from torchmetrics.functional.classification import binary_average_precision

    return binary_average_precision(*_ranked("ood_aupr", scores_in, scores_out)).item()


def ood_fpr(scores_in: Tensor, scores_out: Tensor, tpr: float = 0.95) -> float:
    """Share of familiar inputs flagged when the threshold catches a share `tpr`, in (0, 1], of the foreign ones.

    An input is flagged where score >= threshold, and the threshold is the largest one that flags at least
    `tpr` of the foreign inputs; equal scores are flagged together. Smaller is better. Some of the
    literature (Hendrycks and Gimpel 2017; Liang et al. 2018) quotes as FPR95 the share of foreign inputs
    accepted when 95 % of the familiar ones are; to get that, swap the two and negate the scores.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        foreign = predictor(torch.randn(20, 1, 6, 6)).entropy()
        print(metrics.ood_fpr(prediction.entropy(), foreign, tpr=0.95))
        ```
    """
    scores_in, scores_out = _both("ood_fpr", scores_in, scores_out)
    if not 0 < tpr <= 1:
        raise PosthocUQError(f"ood_fpr needs a tpr above 0 and at most 1, not {tpr}.")
    # the subtraction undoes rounding such as 0.07 * 100 = 7.000000000000001
    caught = max(1, math.ceil(tpr * len(scores_out) - 1e-9))
    threshold = scores_out.sort(descending=True).values[caught - 1]
    return (scores_in >= threshold).double().mean().item()


def _both(name: str, scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    if scores_in.numel() == 0 or scores_out.numel() == 0:
        raise PosthocUQError(f"{name} needs at least one score on either side.")
    familiar, foreign = plain(scores_in).flatten(), plain(scores_out).flatten()
    if bool(familiar.isnan().any()) or bool(foreign.isnan().any()):
        raise NonFiniteError(f"{name} got scores that are NaN.")
    return familiar, foreign


def _ranked(name: str, scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks in (0, 1), and 1 for foreign: torchmetrics squeezes scores outside [0, 1] through a sigmoid, where
    large ones tie.
    """
    familiar, foreign = _both(name, scores_in, scores_out)
    scores = torch.cat([familiar, foreign])
    ranks = torch.unique(scores, return_inverse=True)[1].double() / len(scores)
    return ranks, (torch.arange(len(scores), device="cpu") >= len(familiar)).long()
