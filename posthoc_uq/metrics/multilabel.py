"""Scores of the probabilities of several labels that an input may have together.

`probs` and `labels` are (inputs, labels), the latter 0 and 1; what does not fit raises `PosthocUQError`, a NaN
`NonFiniteError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.metrics.checks import same_shape


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
