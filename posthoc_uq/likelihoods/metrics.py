"""Scores of predictions against observed targets: Python floats, and named tuples of tensors for curves.

torchmetrics computes every metric that it has. It is imported inside the functions: it takes seconds to load,
which a program that only predicts should not wait for. Everything is evaluated on
the CPU, from float64 values, and no function draws random numbers. A NaN is refused with a `NonFiniteError`
rather than counted as a wrong answer, or a right one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import one_of

__all__ = [
    "BINNINGS",
    "Binning",
    "CalibrationBins",
    "CoverageCurve",
    "RiskCoverage",
    "Tail",
    "accuracy",
    "brier_score",
    "calibration_bins",
    "classwise_calibration_error",
    "coverage_curve",
    "crps_gaussian",
    "expected_calibration_error",
    "f1_score",
    "gaussian_log_density",
    "hamming_loss",
    "interval_coverage",
    "interval_sharpness",
    "joint_tail",
    "mae",
    "mean_average_precision",
    "multilabel_brier_score",
    "multilabel_calibration_error",
    "negative_log_likelihood",
    "ood_aupr",
    "ood_auroc",
    "ood_fpr",
    "quadratic_kappa",
    "ranked_probability_score",
    "referral_threshold",
    "referral_thresholds",
    "retained",
    "risk_coverage",
    "rmse",
    "selective_accuracy",
    "selective_accuracy_area",
    "selective_auc",
    "tail_of",
    "tail_probability",
    "top_k_accuracy",
]


# Checks of the inputs of metrics, and their conversion to float64 on the CPU.


def plain(tensor: Tensor) -> Tensor:
    """The values in float64 on the CPU, without a graph."""
    return tensor.detach().cpu().double()


def classified(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`probs` (inputs, classes) in float64 and `labels` (inputs,) in int64.

    Raises:
        PosthocUQError: shapes that do not fit, values that are no probabilities, labels that are no classes.
        NonFiniteError: a probability is NaN.
    """
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
    # half precision rounds by less than 0.01
    if float(probs.min()) < -0.01 or float(probs.max()) > 1.01:
        raise PosthocUQError(
            f"probs must lie between 0 and 1, but range from {float(probs.min()):.3g} to "
            f"{float(probs.max()):.3g}; of logits, take softmax(dim=-1) first."
        )
    return probs, labels


def row(name: str, tensor: Tensor, inputs: int | None = None) -> Tensor:
    """One number per input, in float64.

    Raises:
        PosthocUQError: not one-dimensional, empty, or not of `inputs` entries.
        NonFiniteError: an entry is NaN.
    """
    if tensor.ndim != 1 or tensor.numel() == 0:
        raise PosthocUQError(f"{name} must be (inputs,) with at least one input, not {tuple(tensor.shape)}.")
    if inputs is not None and len(tensor) != inputs:
        raise PosthocUQError(f"{name} must hold one number for each of {inputs} inputs, not {len(tensor)}.")
    values = plain(tensor)
    refuse_nan(**{name: values})
    return values


def same_shape(**tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64, after making sure that nothing would broadcast.

    Raises:
        PosthocUQError: shapes that differ, or nothing in them.
        NonFiniteError: an entry is NaN.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise PosthocUQError(f"The shapes must be the same: {listed}.")
    if 0 in next(iter(shapes.values())):
        raise PosthocUQError("A metric needs at least one target.")
    values = {name: plain(tensor) for name, tensor in tensors.items()}
    refuse_nan(**values)
    return tuple(values.values())


def refuse_nan(**tensors: Tensor) -> None:
    """Refuse NaN.

    Raises:
        NonFiniteError: one of the tensors holds a NaN.
    """
    for name, tensor in tensors.items():
        wrong = int(tensor.isnan().sum())
        if wrong:
            raise NonFiniteError(f"{name} holds {wrong} NaN among {tensor.numel()} numbers; leave them out.")


# Calibration errors of class probabilities, in bins of equal width or of equal mass.
#
# Bins of equal width are [k / bins, (k + 1) / bins), the last one closed. Bins of equal mass hold the same
# number of inputs, up to one; inputs of equal confidence always share the bin of the first of them in
# ascending order, so that the order of the inputs does not matter.

Binning = Literal["equal_width", "equal_mass"]
"""How confidences are cut into bins."""
BINNINGS: tuple[str, ...] = get_args(Binning)


class CalibrationBins(NamedTuple):
    """Per bin, each (bins,): mean confidence and accuracy (NaN where the bin is empty), and counts."""

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

    Args:
        probs: (inputs, classes).
        labels: (inputs,), integers.
        bins: number of bins.
        binning: "equal_width" or "equal_mass".

    Raises:
        PosthocUQError: probs and labels that do not fit, fewer than one bin, an unknown binning.
        NonFiniteError: a probability is NaN.
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    probs, labels = classified(probs, labels)
    _check_bins(bins, binning)
    if binning == "equal_mass":
        confidence, predicted = probs.max(dim=-1)
        return _gap(_binned(confidence, predicted == labels, bins, binning))
    # torchmetrics puts a confidence of exactly 1 into a separate bin, and treats numbers as logits if one is above 1,
    # be it by rounding
    below_one = 1 - torch.finfo(torch.float32).eps / 2
    return multiclass_calibration_error(
        probs.clamp(0, below_one), labels, num_classes=probs.shape[1], n_bins=bins, norm="l1"
    ).item()


def calibration_bins(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> CalibrationBins:
    """The bins behind `expected_calibration_error`, for reliability diagrams; same arguments, same errors."""
    probs, labels = classified(probs, labels)
    _check_bins(bins, binning)
    confidence, predicted = probs.max(dim=-1)
    return _binned(confidence, predicted == labels, bins, binning)


def classwise_calibration_error(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> float:
    """How far every class's probability is from the class's frequency, not only the largest one's.

    `1 / C sum_c sum_b n_cb / n |frequency_cb - probability_cb|`, where the bins of class c are over the
    probabilities of class c of all n inputs: the static calibration error of Nixon et al. ("Measuring
    Calibration in Deep Learning", CVPR workshops 2019), the classwise-ECE of Kull et al. ("Beyond temperature
    scaling", NeurIPS 2019); with bins of equal mass Nixon's adaptive calibration error. With many classes it is
    small because most probabilities are small: compare models on the same data only.

    Args, Raises: as `expected_calibration_error`.
    """
    probs, labels = classified(probs, labels)
    _check_bins(bins, binning)
    columns = probs.T.contiguous()
    gaps = [_gap(_binned(column, labels == c, bins, binning)) for c, column in enumerate(columns)]
    return sum(gaps) / len(gaps)


def _binned(confidence: Tensor, hits: Tensor, bins: int, binning: Binning) -> CalibrationBins:
    """Means of `confidence` and of `hits`, both (inputs,), in each bin."""
    if binning == "equal_width":
        edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device="cpu")
        index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)
    else:
        smaller = torch.searchsorted(confidence.sort().values, confidence)
        index = smaller * bins // len(confidence)
    counts = torch.bincount(index, minlength=bins)
    mean_confidence = torch.bincount(index, weights=confidence, minlength=bins) / counts
    mean_accuracy = torch.bincount(index, weights=hits.double(), minlength=bins) / counts
    return CalibrationBins(mean_confidence, mean_accuracy, counts)


def _gap(parts: CalibrationBins) -> float:
    gaps = (parts.accuracy - parts.confidence).abs().nan_to_num()
    return (gaps * parts.counts).sum().item() / int(parts.counts.sum())


def _check_bins(bins: int, binning: str) -> None:
    if bins < 1:
        raise PosthocUQError(f"A calibration needs at least one bin, not {bins}.")
    one_of("binning", binning, BINNINGS)


# Accuracy and proper scores of class probabilities.
#
# `probs` is always (inputs, classes) and `labels` (inputs,), integers; what does not fit raises
# `PosthocUQError`, a NaN among the probabilities `NonFiniteError`.


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of inputs whose most probable class is the label.

    Args:
        probs: (inputs, classes).
        labels: (inputs,), integers.

    Raises:
        PosthocUQError: shapes, labels or probabilities that do not fit (so do all functions of probs and
            labels here).
        NonFiniteError: a probability is NaN (likewise).
    """
    from torchmetrics.functional.classification import multiclass_accuracy

    probs, labels = classified(probs, labels)
    with probs.device:  # torchmetrics before 1.9 makes a tensor on torch's default device
        return multiclass_accuracy(
            probs.argmax(dim=-1), labels, num_classes=probs.shape[1], average="micro"
        ).item()


def top_k_accuracy(probs: Tensor, labels: Tensor, k: int = 5) -> float:
    """Share of inputs whose label is among the `k` most probable classes.

    Of classes with equal probabilities the lower index comes first, as in `argmax`, so that `k = 1` is
    `accuracy`.

    Raises:
        PosthocUQError: `k` is below 1 or above the number of classes.
    """
    probs, labels = classified(probs, labels)
    if not 1 <= k <= probs.shape[1]:
        raise PosthocUQError(f"top_k_accuracy needs k between 1 and the {probs.shape[1]} classes, not {k}.")
    # not torchmetrics: among equal probabilities (often zeros) its choice is up to torch.topk
    of_label = probs.gather(-1, labels.unsqueeze(-1))
    earlier = torch.arange(probs.shape[1], device="cpu") < labels.unsqueeze(-1)
    ahead = ((probs > of_label) | ((probs == of_label) & earlier)).sum(dim=-1)
    return (ahead < k).double().mean().item()


def negative_log_likelihood(probs: Tensor, labels: Tensor) -> float:
    """Mean of -log p(label) in nats; infinite as soon as one label has probability 0.

    Where probabilities underflow, the `log_prob` of a prediction object stays finite.
    """
    probs, labels = classified(probs, labels)
    return -probs.gather(-1, labels.unsqueeze(-1)).log().mean().item()


def brier_score(probs: Tensor, labels: Tensor) -> float:
    """Squared distance of the probabilities to the one-hot label, summed over classes, mean over inputs.

    This is Brier's original convention ("Verification of forecasts expressed in terms of probability",
    Monthly Weather Review, 1950): between 0 and 2, and for two classes twice the one-column version.
    """
    probs, labels = classified(probs, labels)
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return (probs - one_hot).square().sum(dim=-1).mean().item()


# Scores of the probabilities of several labels that an input may have together.
#
# `probs` and `labels` are (inputs, labels), the latter 0 and 1; what does not fit raises `PosthocUQError`, a
# NaN `NonFiniteError`.


def _checked(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    probs, labels = same_shape(probs=probs, labels=labels)
    if probs.ndim != 2:
        raise PosthocUQError(f"probs must be (inputs, labels), not {tuple(probs.shape)}.")
    if bool(((labels != 0) & (labels != 1)).any()):
        raise PosthocUQError("labels must be 0 or 1.")
    if float(probs.min()) < -0.01 or float(probs.max()) > 1.01:  # half precision rounds by less
        raise PosthocUQError(
            f"probs must lie between 0 and 1, but range from {float(probs.min()):.3g} to "
            f"{float(probs.max()):.3g}; of logits, take sigmoid() first."
        )
    return probs.clamp(0, 1), labels.long()


def mean_average_precision(probs: Tensor, labels: Tensor) -> float:
    """The mean over labels of the average precision of ranking the inputs by the label's probability (mAP). Labels that
    no input has are left out; NaN if there are no others.

    Args:
        probs: (inputs, labels).
        labels: (inputs, labels), 0 or 1.

    Raises:
        PosthocUQError: shapes or values that do not fit (so do all functions here).
        NonFiniteError: a probability is NaN (likewise).
    """
    from torchmetrics.functional.classification import multilabel_average_precision

    probs, labels = _checked(probs, labels)
    present = labels.any(dim=0)
    if not bool(present.any()):
        return float("nan")
    probs, labels = probs[:, present], labels[:, present]
    return float(multilabel_average_precision(probs, labels, num_labels=probs.shape[1], average="macro"))


def f1_score(probs: Tensor, labels: Tensor, average: str = "macro") -> float:
    """The harmonic mean of precision and recall of the labels more probable than not.

    Args:
        probs: (inputs, labels).
        labels: (inputs, labels), 0 or 1.
        average: ``"macro"``, the mean over labels, or ``"micro"``, of all decisions together.
    """
    from torchmetrics.functional.classification import multilabel_f1_score

    probs, labels = _checked(probs, labels)
    if average not in ("macro", "micro"):
        raise PosthocUQError(f"average must be 'macro' or 'micro', not {average!r}.")
    return float(multilabel_f1_score(probs, labels, num_labels=probs.shape[1], average=average))


def hamming_loss(probs: Tensor, labels: Tensor) -> float:
    """The share of decisions, label by label, that are wrong."""
    from torchmetrics.functional.classification import multilabel_hamming_distance

    probs, labels = _checked(probs, labels)
    return float(multilabel_hamming_distance(probs, labels, num_labels=probs.shape[1], average="micro"))


def multilabel_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error of all labels' probabilities together, in bins of equal width: the gap between the
    mean probability in a bin and how often these labels are there.
    """
    from torchmetrics.functional.classification import binary_calibration_error

    probs, labels = _checked(probs, labels)
    if bins < 1:
        raise PosthocUQError(f"A calibration needs at least one bin, not {bins}.")
    below_one = 1 - torch.finfo(torch.float32).eps / 2  # torchmetrics puts 1 into a bin of its own
    return float(
        binary_calibration_error(
            probs.clamp(0, below_one).flatten(), labels.flatten(), n_bins=bins, norm="l1"
        )
    )


def multilabel_brier_score(probs: Tensor, labels: Tensor) -> float:
    """Squared distance of a label's probability to 0 or 1, mean over labels and inputs."""
    probs, labels = _checked(probs, labels)
    return (probs - labels).square().mean().item()


# How well a score tells foreign (out-of-distribution) inputs from familiar ones.
#
# Any score whose larger values mean stranger inputs can be used: only its order counts, so it may be infinite
# and of any scale. The foreign inputs are always the positive class.


def ood_auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Probability that a foreign input scores higher than a familiar one, ties counting half.

    Args:
        scores_in: (inputs,), an uncertainty (higher is stranger) of inputs like the training data.
        scores_out: (foreign inputs,), the same score of out-of-distribution inputs.

    Raises:
        PosthocUQError: one of them is empty.
        NonFiniteError: a score is NaN.
    """
    from torchmetrics.functional.classification import binary_auroc

    return binary_auroc(*_ranked("ood_auroc", scores_in, scores_out)).item()


def ood_aupr(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the precision-recall curve of finding the foreign inputs: their average precision.

    `sum_k (recall_k - recall_(k-1)) precision_k` over the distinct scores as thresholds, in descending order
    (no interpolation). Its value for a useless score is the share of foreign inputs among all, so it compares
    scores on the same two data sets only (Davis and Goadrich, ICML 2006).

    Args, Raises: as `ood_auroc`.
    """
    from torchmetrics.functional.classification import binary_average_precision

    return binary_average_precision(*_ranked("ood_aupr", scores_in, scores_out)).item()


def ood_fpr(scores_in: Tensor, scores_out: Tensor, tpr: float = 0.95) -> float:
    """Share of familiar inputs flagged when the threshold is set to catch a share `tpr` of the foreign ones.

    An input is flagged where score >= threshold, and the threshold is the largest one that flags at least
    `tpr` of the foreign inputs; equal scores are flagged together. Smaller is better. Some of the
    literature (Hendrycks and Gimpel 2017; Liang et al. 2018) quotes as FPR95 the share of foreign inputs
    accepted when 95 % of the familiar ones are; to get that, swap the two and negate the scores.

    Args:
        scores_in: as in `ood_auroc`.
        scores_out: likewise.
        tpr: in (0, 1].

    Raises:
        PosthocUQError: one of them is empty, or `tpr` is outside (0, 1].
        NonFiniteError: a score is NaN.
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
    large ones tie."""
    familiar, foreign = _both(name, scores_in, scores_out)
    scores = torch.cat([familiar, foreign])
    ranks = torch.unique(scores, return_inverse=True)[1].double() / scores.numel()
    return ranks, (torch.arange(scores.numel(), device="cpu") >= familiar.numel()).long()


# Scores of the probabilities of classes that have an order.


def ranked_probability_score(probs: Tensor, labels: Tensor) -> float:
    """``1 / (C - 1) sum_k (P(class <= k) - 1[label <= k])^2``, mean over inputs, in [0, 1] (Epstein, "A Scoring System
    for Probability Forecasts of Ranked Categories", 1969).

    Args:
        probs: (inputs, classes).
        labels: (inputs,), integers.

    Raises:
        PosthocUQError: shapes, labels or probabilities that do not fit.
        NonFiniteError: a probability is NaN.
    """
    probs, labels = classified(probs, labels)
    reached = labels.unsqueeze(1) <= torch.arange(probs.shape[1], device="cpu")
    gaps = (probs.cumsum(1) - reached.double())[:, :-1]
    return gaps.square().mean().item()


def quadratic_kappa(predicted: Tensor, labels: Tensor, classes: int) -> float:
    """Cohen's kappa of predicted and right classes, with weights by the squared distance between classes: 1 where all
    are right, 0 for chance; NaN where either has one class alone.

    Args:
        predicted: (inputs,), integers.
        labels: (inputs,), integers.
        classes: how many there are.

    Raises:
        PosthocUQError: the shapes differ, or there is no input.
    """
    from torchmetrics.functional.classification import multiclass_cohen_kappa

    if predicted.shape != labels.shape or predicted.ndim != 1 or len(predicted) == 0:
        raise PosthocUQError(
            f"predicted and labels must be (inputs,) with at least one input, not {tuple(predicted.shape)} and "
            f"{tuple(labels.shape)}."
        )
    predicted, labels = predicted.cpu(), labels.cpu()
    return float(multiclass_cohen_kappa(predicted, labels, num_classes=classes, weights="quadratic"))


# Scores of real-valued predictions and of the intervals around them.
#
# `mean`, `variance`, `lower`, `upper` and `targets` are (inputs,) or (inputs, outputs), all of exactly one
# shape, so that nothing broadcasts by accident. What does not fit raises `PosthocUQError`, a NaN
# `NonFiniteError`.


class CoverageCurve(NamedTuple):
    """Nominal and observed coverage, each (levels,), float64."""

    nominal: Tensor
    observed: Tensor

    @property
    def error(self) -> float:
        """Mean over the levels of |observed - nominal|; 0 for a calibrated model, up to chance."""
        return (self.observed - self.nominal).abs().mean().item()


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Root of the mean squared error over all inputs and outputs, in units of the output.

    Args:
        mean: (inputs,) or (inputs, outputs).
        targets: exactly the same shape.

    Raises:
        PosthocUQError: nothing to average, or shapes that differ (so do all functions of targets here).
        NonFiniteError: a number is NaN (likewise).
    """
    from torchmetrics.functional.regression import mean_squared_error

    mean, targets = same_shape(mean=mean, targets=targets)
    return mean_squared_error(mean.flatten(), targets.flatten(), squared=False).item()


def mae(mean: Tensor, targets: Tensor) -> float:
    """Mean absolute error over all inputs and outputs, in units of the output; arguments as in `rmse`."""
    from torchmetrics.functional.regression import mean_absolute_error

    mean, targets = same_shape(mean=mean, targets=targets)
    return mean_absolute_error(mean.flatten(), targets.flatten()).item()


def gaussian_log_density(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Log density of the targets in nats, log N(y; mean, variance), summed over outputs, mean over inputs.

    Args:
        mean: (inputs,) or (inputs, outputs).
        variance: the total variance, of the same shape.
        targets: of the same shape.

    Raises:
        PosthocUQError: shapes that differ, nothing to average, or a variance that is not positive.
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    if bool((variance <= 0).any()):
        raise PosthocUQError("gaussian_log_density needs a positive variance everywhere.")
    density = -0.5 * ((targets - mean).square() / variance + variance.log() + math.log(2 * math.pi))
    return density.reshape(len(density), -1).sum(dim=-1).mean().item()


def crps_gaussian(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Continuous ranked probability score of N(mean, variance), mean over inputs and outputs; smaller is better.

    `integral (F(x) - 1[x >= y])^2 dx = s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))` with `s^2` the variance and
    `z = (y - mean) / s`, in units of the output (Gneiting and Raftery, "Strictly Proper Scoring Rules, Prediction,
    and Estimation", JASA 2007, section 4.2, with the sign turned). Where the variance is 0 it is the absolute error.

    Args:
        mean: (inputs,) or (inputs, outputs).
        variance: the total variance, of the same shape.
        targets: of the same shape.

    Raises:
        PosthocUQError: shapes that differ, nothing to average, or a variance that is negative.
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    z = _standardised("crps_gaussian", mean, variance, targets)
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    from_spread = variance.sqrt() * (2 * density - 1 / math.sqrt(math.pi))
    return ((targets - mean) * torch.special.erf(z / math.sqrt(2)) + from_spread).mean().item()


def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> float:
    """Share of targets with lower <= target <= upper, over all inputs and outputs."""
    lower, upper, targets = same_shape(lower=lower, upper=upper, targets=targets)
    return ((lower <= targets) & (targets <= upper)).double().mean().item()


def interval_sharpness(lower: Tensor, upper: Tensor) -> float:
    """Mean width of the intervals over all inputs and outputs, in units of the output.

    Of models whose intervals cover equally often, the one with narrower intervals is better (Gneiting,
    Balabdaoui and Raftery, "Probabilistic forecasts, calibration and sharpness", JRSS B 2007).

    Raises:
        PosthocUQError: shapes that differ, no interval, or a lower end above its upper end.
    """
    lower, upper = same_shape(lower=lower, upper=upper)
    if bool((lower > upper).any()):
        raise PosthocUQError("interval_sharpness got intervals whose lower end is above the upper one.")
    return (upper - lower).mean().item()


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

    Args:
        mean: (inputs,) or (inputs, outputs).
        variance: the total variance, of the same shape.
        targets: of the same shape.
        levels: (levels,), each strictly between 0 and 1; without them 0.05, 0.10, ..., 0.95.
        kind: "interval" or "quantile".

    Raises:
        PosthocUQError: shapes that differ, nothing to average, a negative variance, a level outside (0, 1), or
            an unknown kind.
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    values = [k / 20 for k in range(1, 20)] if levels is None else [float(level) for level in levels]
    if not values or not all(0 < level < 1 for level in values):
        raise PosthocUQError(f"levels must be numbers strictly between 0 and 1, not {values}.")
    z = _standardised("coverage_curve", mean, variance, targets).flatten()
    if kind == "interval":
        needed_level = torch.special.erf(z.abs() / math.sqrt(2))
    elif kind == "quantile":
        needed_level = torch.special.ndtr(z)
    else:
        raise PosthocUQError(f"kind must be 'interval' or 'quantile', not {kind!r}.")
    nominal = torch.tensor(values, dtype=torch.float64, device="cpu")
    covered = torch.searchsorted(needed_level.sort().values, nominal, right=True)
    return CoverageCurve(nominal, covered.double() / len(needed_level))


def _standardised(name: str, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """(targets - mean) / s. Where s is 0: infinite with the sign of the error, or 0 without an error."""
    if bool((variance < 0).any()):
        raise PosthocUQError(f"{name} needs a variance that is nowhere negative.")
    z = (targets - mean) / variance.sqrt()
    return z.masked_fill(targets == mean, 0)


# Selective prediction: the errors that remain when the most uncertain inputs are referred to someone else.
#
# Inputs are retained in the order of an uncertainty, the smallest first. Where scores tie, every number here
# is the mean over all orders of the tied inputs (for `selective_auc`, tied inputs at the border are retained
# in part), so that the order of the inputs never matters.
#
# A referral rate leaves `floor(rate * inputs)` inputs to the expert, as in the protocol of Rudner et al.
# ("Tractable Function-Space Variational Inference in Bayesian Neural Networks", NeurIPS 2022, appendix D.4).


class RiskCoverage(NamedTuple):
    """A risk-coverage curve; every tensor is (inputs,), float64, from the first input retained to all of them.

    Attributes:
        coverage: share of inputs retained, k / inputs for k = 1, ..., inputs.
        risk: mean loss of the retained inputs, in units of the loss.
        thresholds: the scores in ascending order: inputs with score <= threshold are retained; of those whose
            score equals it, as many as the coverage needs.
    """

    coverage: Tensor
    risk: Tensor
    thresholds: Tensor

    @property
    def area(self) -> float:
        """AURC: the mean of the risk over all coverages 1 / n, ..., 1 (Geifman, Uziel and El-Yaniv,
        "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers", ICLR 2019); smaller is better."""
        return self.risk.mean().item()


def risk_coverage(scores: Tensor, losses: Tensor) -> RiskCoverage:
    """Mean loss of the k inputs with the smallest scores, for every k.

    Geifman and El-Yaniv, "Selective Classification for Deep Neural Networks", NeurIPS 2017. The risk within a
    run of equal scores is its mean over the orders of that run, and so is the area.

    Args:
        scores: (inputs,), an uncertainty: higher is referred sooner; may be infinite.
        losses: (inputs,), the loss of each input's prediction, for instance 1 where the class is wrong.

    Raises:
        PosthocUQError: no inputs, or shapes that are not (inputs,) for both.
        NonFiniteError: a score or a loss is NaN.
    """
    scores = row("scores", scores)
    losses = row("losses", losses, len(scores))
    thresholds, order = scores.sort(stable=True)
    group = torch.unique_consecutive(thresholds, return_inverse=True)[1]
    mean = torch.bincount(group, weights=losses[order]) / torch.bincount(group)
    retained_counts = torch.arange(1, len(scores) + 1, dtype=torch.float64, device="cpu")
    return RiskCoverage(retained_counts / len(scores), mean[group].cumsum(0) / retained_counts, thresholds)


def selective_accuracy(
    scores: Tensor, probs: Tensor, labels: Tensor, rates: Sequence[float] | Tensor
) -> Tensor:
    """Accuracy on the inputs that remain when a share of them, the most uncertain, is referred.

    Args:
        scores: (inputs,), an uncertainty: higher is referred sooner.
        probs: (inputs, classes).
        labels: (inputs,), integers.
        rates: (rates,), shares referred, each in [0, 1).

    Returns:
        (rates,), float64.

    Raises:
        PosthocUQError: shapes, labels or probabilities that do not fit, or a rate outside [0, 1).
        NonFiniteError: a score or a probability is NaN.
    """
    probs, labels = classified(probs, labels)
    curve = _miss_curve(scores, probs, labels)
    return 1 - curve.risk[[count - 1 for count in retained(rates, len(labels))]]


def selective_accuracy_area(scores: Tensor, probs: Tensor, labels: Tensor) -> float:
    """Area under the curve of `selective_accuracy` over the referral rate; larger is better.

    The mean over the rates 0, 1 / n, ..., (n - 1) / n at which the curve changes, which is its integral over
    [0, 1): 1 - AURC of the 0/1 loss. Arguments and errors as in `selective_accuracy`.
    """
    return 1 - _miss_curve(scores, *classified(probs, labels)).area


def selective_auc(scores: Tensor, probs: Tensor, labels: Tensor, rates: Sequence[float] | Tensor) -> Tensor:
    """ROC AUC of the class probabilities on the inputs that remain, for each referral rate.

    With two classes this is the area under the ROC curve of P(class 1). With more it is the plain mean over
    classes of the AUC of that class against the rest (macro, one versus rest), over the classes that some but
    not all of the retained inputs have. Where there is no such class, the entry is NaN.

    Inputs that tie at the border are retained in part: the weight of each in the AUC is the share of them that the
    rate leaves.

    Args, Raises: as `selective_accuracy`.

    Returns:
        (rates,), float64, NaN where all retained inputs are of one class.
    """
    probs, labels = classified(probs, labels)
    scores = row("scores", scores, len(labels))
    ascending = scores.sort().values
    values: list[float] = []
    for count in retained(rates, len(labels)):
        border = ascending[count - 1]
        inside, tied = scores < border, scores == border
        weights = inside.double() + tied * ((count - inside.sum()) / tied.sum().double())
        used = weights > 0
        values.append(_macro_auc(probs[used], labels[used], weights[used]))
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def referral_threshold(scores: Tensor, rate: float) -> float:
    """The smallest threshold that refers at most a share `rate`, when score > threshold is referred.

    It is the score that ranks `floor(rate * inputs) + 1` from above. Inputs whose score
    equals it are all retained, so with ties fewer than `rate` may be referred. `rate = 1` gives minus infinity.

    Args:
        scores: (inputs,), for instance of validation inputs.
        rate: in [0, 1].

    Raises:
        PosthocUQError: no scores, not (inputs,), or a rate outside [0, 1].
        NonFiniteError: a score is NaN.
    """
    scores = row("scores", scores)
    if not 0 <= rate <= 1:
        raise PosthocUQError(f"referral_threshold needs a rate between 0 and 1, not {rate}.")
    referred = referred_count(rate, len(scores))
    return -math.inf if referred == len(scores) else scores.sort(descending=True).values[referred].item()


def _miss_curve(scores: Tensor, probs: Tensor, labels: Tensor) -> RiskCoverage:
    return risk_coverage(row("scores", scores, len(labels)), (probs.argmax(dim=-1) != labels).double())


def retained(rates: Sequence[float] | Tensor, inputs: int) -> list[int]:
    """The number of inputs that each rate retains, at least one."""
    values = [float(rate) for rate in rates]
    if not values or not all(0 <= rate < 1 for rate in values):
        raise PosthocUQError(
            f"rates must be numbers from 0 to below 1 (at 1 nothing is retained), not {values}."
        )
    return [max(1, inputs - referred_count(rate, inputs)) for rate in values]


def referred_count(rate: float, inputs: int) -> int:
    """The largest number of inputs that a rate refers."""
    # a rate in float32 may be up to 6e-8 too small, and 0.7 of 10 must be 7
    return math.floor(rate * inputs + min(1e-7 * inputs, 0.1))


def _macro_auc(probs: Tensor, labels: Tensor, weights: Tensor) -> float:
    classes = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    areas = [_weighted_auc(probs[:, c], labels == c, weights) for c in classes]
    known = [area for area in areas if not math.isnan(area)]
    return sum(known) / len(known) if known else math.nan


def _weighted_auc(values: Tensor, positive: Tensor, weights: Tensor) -> float:
    """Weighted share of (positive, negative) pairs in the right order, ties counting half; NaN without pairs."""
    rank = torch.unique(values, return_inverse=True)[1]
    size = int(rank.max()) + 1
    up = torch.bincount(rank, weights=weights * positive, minlength=size)
    down = torch.bincount(rank, weights=weights * ~positive, minlength=size)
    pairs = up.sum() * down.sum()
    return ((up * (down.cumsum(0) - down / 2)).sum() / pairs).item() if pairs > 0 else math.nan


# How extreme an input is among familiar ones, by several scores at once.
#
# The tail probability of a score is the share of familiar inputs whose score is at least as large. It has no
# units, so those of different scores can be compared. An input is judged by the smallest of its tail
# probabilities, that is, by the score that finds it most extreme.

QUANTILES = 200
"""The number of points of a tail that are kept at most."""
_LINE_FROM = 0.1  # the tail is extrapolated from this share of familiar inputs with the largest scores


class Tail(NamedTuple):
    """Points of the tail probability of one score; both are (points,), float64.

    Attributes:
        values: scores in descending order, the largest familiar one first, the smallest last.
        shares: for each, its rank from above over the number of familiar inputs; ascending, the last is 1.
    """

    values: Tensor
    shares: Tensor


def tail_of(scores: Tensor, points: int | None = None) -> Tail:
    """The tail of the scores of familiar inputs.

    Args:
        scores: (inputs,), finite.
        points: how many to keep at most, an even number; all if None. With more inputs than points, half of the points
            are the largest scores, one by one, and the ranks of the others form a geometric sequence. So small shares
            are resolved for any number of inputs.

    Raises:
        PosthocUQError: no scores, or not (inputs,).
        NonFiniteError: a score is NaN or infinite.
    """
    values = _finite("scores", scores).sort(descending=True).values
    count = len(values)
    ranks = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    if points is not None and count > points:
        dense = points // 2
        step = torch.arange(1, points - dense + 1, dtype=torch.float64, device="cpu")
        geometric = (dense * (count / dense) ** (step / (points - dense))).round()
        ranks = torch.cat([ranks[:dense], torch.maximum(dense + step, geometric)])
    return Tail(values[ranks.long() - 1], ranks / count)


def tail_probability(tail: Tail, scores: Tensor) -> Tensor:
    """The share of familiar inputs whose score is at least as large, in [0, 1], by linear interpolation.

    It is 0 above the largest familiar score, 1 at the smallest and below, and never grows with the score. At a score
    shared by several points it is the largest of their shares.

    Args:
        tail: from `tail_of`.
        scores: (inputs,), of any inputs; may be infinite.

    Returns:
        (inputs,), float64, on the CPU; NaN where the score is.
    """
    values = plain(scores)
    points = len(tail.values)
    at_least = points - torch.searchsorted(tail.values.flip(0), values)
    left = (at_least - 1).clamp(0, points - 1)
    right = (left + 1).clamp(max=points - 1)
    width = tail.values[left] - tail.values[right]
    part = torch.where(width > 0, (tail.values[left] - values) / width, 0.0).clamp(0, 1)
    shares = tail.shares[left] + part * (tail.shares[right] - tail.shares[left])
    shares = torch.where(at_least == 0, 0.0, torch.where(at_least == points, 1.0, shares))
    return torch.where(values.isnan(), torch.nan, shares)


def joint_tail(familiar: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> Tensor:
    """One score from several: ``-log min_s p_s(x)``, with the tail probabilities `p_s` among familiar inputs.

    Beyond the largest familiar score of `s`, where the share is 0, ``-log p_s`` continues as a straight line, so that
    very foreign inputs do not tie. It starts at ``log(inputs)`` and has the slope of the line between the point where
    a tenth of the familiar inputs lie above and the largest of them: an exponential tail. Where the familiar scores
    are all the same there is no slope, and any larger score gives infinity.

    Args:
        familiar: by name, (familiar inputs,), finite: held-out inputs like those of the training.
        scores: by the same names, (inputs,): of the inputs to judge. They may be the familiar ones themselves.

    Returns:
        (inputs,), float64, on the CPU, not negative; higher is stranger. Fit for `ood_auroc` and the like.

    Raises:
        PosthocUQError: no scores, other names on either side, or shapes that are not (inputs,) for all.
        NonFiniteError: a familiar score is NaN or infinite, or another is NaN.
    """
    if set(familiar) != set(scores):
        raise PosthocUQError(
            f"joint_tail needs the same scores on both sides, not {sorted(familiar)} and {sorted(scores)}."
        )
    familiar_columns, columns = _columns(familiar), _columns(scores)
    return torch.stack(
        [_surprise(tail_of(familiar_columns[name]), columns[name]) for name in familiar_columns]
    ).amax(0)


def referral_thresholds(scores: Mapping[str, Tensor], rate: float) -> dict[str, float]:
    """Thresholds of several scores that together refer at most a share `rate`; any score above its own refers an input.

    Every input gets the smallest of its tail probabilities among these very inputs (ties count in full: inputs whose
    score is equal or larger). With ``k = floor(rate * inputs)``, the border is the one that ranks ``k + 1`` from below,
    and inputs strictly below it are referred, at most `k`. The threshold of a score is its largest value whose tail
    probability is not below the border. With `S` scores up to `S` inputs share a rank, so up to ``S - 1`` fewer than
    `k` are referred even where no score has ties. Of one score it is `referral_threshold`.

    Args:
        scores: by name, (inputs,), for instance of validation inputs.
        rate: in [0, 1).

    Raises:
        PosthocUQError: no scores, shapes that are not (inputs,) for all, or a rate outside [0, 1).
        NonFiniteError: a score is NaN or infinite.
    """
    if not 0 <= rate < 1:
        raise PosthocUQError(f"A rate of several scores must be from 0 to below 1, not {rate}.")
    columns = {name: _finite(name, values) for name, values in _columns(scores).items()}
    count = len(next(iter(columns.values())))
    ranks = {
        name: count - torch.searchsorted(values.sort().values, values) for name, values in columns.items()
    }
    smallest = torch.stack(list(ranks.values())).amin(0).sort().values
    border = smallest[min(referred_count(rate, count), count - 1)]
    return {name: values[ranks[name] >= border].max().item() for name, values in columns.items()}


def _surprise(tail: Tail, scores: Tensor) -> Tensor:
    """``-log`` of the tail probability; beyond the largest familiar score, the straight line that continues it."""
    largest, start = tail.values[0], -tail.shares[0].log()
    line = (tail.shares >= _LINE_FROM) & (tail.values < largest)
    slope = torch.tensor(torch.inf, dtype=torch.float64, device="cpu")
    if bool(line.any()):
        first = int(line.int().argmax())
        slope = (tail.shares[first] / tail.shares[0]).log() / (largest - tail.values[first])
    beyond = scores > largest
    excess = torch.where(beyond, scores - largest, 1.0)
    # a step lost in rounding still counts as beyond
    outside = torch.maximum(start + slope * excess, start.nextafter(start + 1))
    return torch.where(beyond, outside, -tail_probability(tail, scores).log())


def _columns(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not scores:
        raise PosthocUQError("There must be at least one score.")
    count = next(iter(scores.values())).numel()
    return {name: row(name, values, count) for name, values in scores.items()}


def _finite(name: str, scores: Tensor) -> Tensor:
    values = row(name, scores)
    wrong = int(values.isinf().sum())
    if wrong:
        raise NonFiniteError(f"{name} holds {wrong} infinite numbers among {len(values)}; leave them out.")
    return values
