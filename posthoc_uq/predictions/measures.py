"""Measures of how good predictions are, by name: `Prediction.quality` and `retained_quality`, from plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from posthoc_uq import metrics


def class_quality(
    probs: Tensor, log_prob: Callable[[Tensor], Tensor], entropy: Tensor, targets: Tensor, bins: int
) -> dict[str, float]:
    """Measures of class probabilities ``(batch, classes)``.

    Args:
        probs: of the classes.
        log_prob: from targets to their log probabilities, ``(batch,)``.
        entropy: of the predictions, ``(batch,)``, in nats.
        targets: labels ``(batch,)``.
        bins: of the calibration errors.
    """
    measures = {"accuracy": metrics.accuracy(probs, targets)}
    if probs.shape[1] > 5:
        measures["top-5 accuracy"] = metrics.top_k_accuracy(probs, targets, 5)
    measures["NLL"] = -float(log_prob(targets).double().mean())
    measures["Brier"] = metrics.brier_score(probs, targets)
    measures["ECE"] = metrics.expected_calibration_error(probs, targets, bins)
    measures["ECE (equal mass)"] = metrics.expected_calibration_error(
        probs, targets, bins, binning="equal_mass"
    )
    measures["classwise ECE"] = metrics.classwise_calibration_error(probs, targets, bins)
    measures["mean entropy"] = float(entropy.double().mean())
    return measures


LEVELS = (0.5, 0.9, 0.95)
"""Of the intervals whose coverage is measured."""


def interval_quality(interval: Callable[[float], tuple[Tensor, Tensor]], targets: Tensor) -> dict[str, float]:
    """Measures of prediction intervals: how often they contain the target, and how wide they are.

    Args:
        interval: from a level, one of `LEVELS`, to lower and upper bounds.
        targets: of the shape of the bounds.
    """
    bounds = {level: interval(level) for level in LEVELS}
    coverages = {
        f"coverage of {100 * level:g} %": metrics.interval_coverage(*pair, targets)
        for level, pair in bounds.items()
    }
    return coverages | {
        f"sharpness of {100 * LEVELS[-1]:g} %": metrics.interval_sharpness(*bounds[LEVELS[-1]])
    }


def retained_classes(
    scores: Tensor, probs: Tensor, targets: Tensor, rates: Sequence[float]
) -> dict[str, float]:
    """The accuracy, and for two classes the area under the ROC curve, on inputs that are not referred."""
    accuracies = metrics.selective_accuracy(scores, probs, targets, rates)
    measures = {f"accuracy at {rate:g}": float(a) for rate, a in zip(rates, accuracies, strict=True)}
    if probs.shape[1] == 2:
        areas = metrics.selective_auc(scores, probs, targets, rates)
        measures |= {f"AUC at {rate:g}": float(a) for rate, a in zip(rates, areas, strict=True)}
    return measures


def retained_losses(
    name: str, scores: Tensor, losses: Tensor, rates: Sequence[float], *, root: bool = False
) -> dict[str, float]:
    """The mean loss, or its square root, on inputs that are not referred."""
    risk = metrics.risk_coverage(scores, losses).risk
    counts = metrics.retained(rates, len(losses))
    risks = {rate: risk[count - 1] for rate, count in zip(rates, counts, strict=True)}
    return {
        f"{name} at {rate:g}": float(mean_loss.sqrt() if root else mean_loss)
        for rate, mean_loss in risks.items()
    }


def squared_errors(mean: Tensor, targets: Tensor) -> Tensor:
    """``(batch,)``, float64: the squared error, mean over outputs."""
    squares = (mean.double() - targets.double()).square()
    return squares if squares.ndim == 1 else squares.flatten(1).mean(dim=-1)
