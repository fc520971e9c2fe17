"""Scores of predictions against what was observed, each one Python float.

Thin on purpose: torchmetrics computes wherever it has the metric. Everything is evaluated in float64 on the
CPU, and no function draws random numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError

# torchmetrics is imported where it is used: it takes seconds to load, which a program that only predicts
# should not have to wait for.

__all__ = [
    "CalibrationBins",
    "accuracy",
    "brier_score",
    "calibration_bins",
    "expected_calibration_error",
    "gaussian_log_density",
    "interval_coverage",
    "negative_log_likelihood",
    "ood_auroc",
    "rmse",
]


class CalibrationBins(NamedTuple):
    """Per bin, each (bins,): mean confidence and accuracy (NaN where the bin is empty), and counts."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of inputs whose most probable class is the label.

    Args:
        probs: (inputs, classes).
        labels: (inputs,), integers.

    Raises:
        PosthocUQError: shapes or labels that do not fit (so do all functions of probs and labels here).
    """
    from torchmetrics.functional.classification import multiclass_accuracy

    probs, labels = _classification(probs, labels)
    return multiclass_accuracy(
        probs.argmax(dim=-1), labels, num_classes=probs.shape[1], average="micro"
    ).item()


def negative_log_likelihood(probs: Tensor, labels: Tensor) -> float:
    """Mean of -log p(label) in nats; infinite as soon as one label has probability 0.

    Where probabilities underflow, the `log_prob` of a prediction object stays finite.
    """
    probs, labels = _classification(probs, labels)
    return -probs.gather(-1, labels.unsqueeze(-1)).log().mean().item()


def brier_score(probs: Tensor, labels: Tensor) -> float:
    """Squared distance of the probabilities to the one-hot label, summed over classes, mean over inputs.

    This is Brier's original convention ("Verification of forecasts expressed in terms of probability",
    Monthly Weather Review, 1950): between 0 and 2, and for two classes twice the one-column version.
    """
    probs, labels = _classification(probs, labels)
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return (probs - one_hot).square().sum(dim=-1).mean().item()


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by the share of inputs.

    `sum_b n_b / n |accuracy_b - confidence_b|`, the confidence being the largest probability (Guo et al.,
    "On Calibration of Modern Neural Networks", ICML 2017). Bins are [k/bins, (k+1)/bins), the last closed.
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    probs, labels = _classification(probs, labels)
    _check_bins(bins)
    # torchmetrics puts a confidence of exactly 1 into a bin of its own and takes anything above 1, be it by
    # rounding, for a sign that these are logits
    below_one = 1 - torch.finfo(torch.float32).eps / 2
    return multiclass_calibration_error(
        probs.clamp(0, below_one), labels, num_classes=probs.shape[1], n_bins=bins, norm="l1"
    ).item()


def calibration_bins(probs: Tensor, labels: Tensor, bins: int = 15) -> CalibrationBins:
    """The bins behind `expected_calibration_error`, for reliability diagrams."""
    probs, labels = _classification(probs, labels)
    _check_bins(bins)
    confidence, predicted = probs.max(dim=-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=probs.dtype)
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)
    counts = torch.bincount(index, minlength=bins)
    mean_confidence = torch.bincount(index, weights=confidence, minlength=bins) / counts
    mean_accuracy = torch.bincount(index, weights=(predicted == labels).double(), minlength=bins) / counts
    return CalibrationBins(mean_confidence, mean_accuracy, counts)


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

    if scores_in.numel() == 0 or scores_out.numel() == 0:
        raise PosthocUQError("ood_auroc needs at least one score on either side.")
    scores = torch.cat([_plain(scores_in).flatten(), _plain(scores_out).flatten()])
    if bool(scores.isnan().any()):
        raise NonFiniteError("ood_auroc got scores that are NaN.")
    foreign = torch.arange(scores.numel()) >= scores_in.numel()
    # Ranks, because torchmetrics squeezes scores outside [0, 1] through a sigmoid, where large ones tie.
    ranks = torch.unique(scores, return_inverse=True)[1].double() / scores.numel()
    return binary_auroc(ranks, foreign.long()).item()


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Root of the mean squared error over all inputs and outputs, in units of the output.

    Args:
        mean: (inputs,) or (inputs, outputs).
        targets: exactly the same shape.

    Raises:
        PosthocUQError: nothing to average, or shapes that differ (so do all functions of targets here).
    """
    from torchmetrics.functional.regression import mean_squared_error

    _same_shape(mean=mean, targets=targets)
    return mean_squared_error(_plain(mean).flatten(), _plain(targets).flatten(), squared=False).item()


def gaussian_log_density(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Log density of the targets in nats, log N(y; mean, variance), summed over outputs, mean over inputs.

    Args:
        mean, variance, targets: (inputs,) or (inputs, outputs), all of one shape; the total variance.

    Raises:
        PosthocUQError: shapes that differ, nothing to average, or a variance that is not positive.
    """
    _same_shape(mean=mean, variance=variance, targets=targets)
    mean, variance, targets = _plain(mean), _plain(variance), _plain(targets)
    if bool((variance <= 0).any()):
        raise PosthocUQError("gaussian_log_density needs a positive variance everywhere.")
    density = -0.5 * ((targets - mean).square() / variance + variance.log() + math.log(2 * math.pi))
    return density.reshape(len(density), -1).sum(dim=-1).mean().item()


def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> float:
    """Share of targets with lower <= target <= upper, over all inputs and outputs."""
    _same_shape(lower=lower, upper=upper, targets=targets)
    lower, upper, targets = _plain(lower), _plain(upper), _plain(targets)
    return ((lower <= targets) & (targets <= upper)).double().mean().item()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _classification(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if probs.ndim != 2 or probs.shape[0] == 0:
        raise PosthocUQError(
            f"probs must be (inputs, classes) with at least one input, not {tuple(probs.shape)}."
        )
    if labels.shape != probs.shape[:1] or labels.is_floating_point():
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
    return _plain(probs), labels


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise PosthocUQError(f"A calibration needs at least one bin, not {bins}.")


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise PosthocUQError(f"The shapes must be the same: {listed}.")
    if 0 in next(iter(shapes.values())):
        raise PosthocUQError("A metric needs at least one target.")
