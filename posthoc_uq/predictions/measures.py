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


def interval_quality(interval: Callable[[float], tuple[Tensor, Tensor]], targets: Tensor) -> dict[str, float]:
    """Measures of prediction intervals: how often they contain the target, and how wide they are.

    Args:
        interval: from a level to lower and upper bounds.
        targets: of the shape of the bounds.
    """
    lower, upper = interval(0.95)
    return {
        "coverage of 50 %": metrics.interval_coverage(*interval(0.5), targets),
        "coverage of 95 %": metrics.interval_coverage(lower, upper, targets),
        "sharpness of 95 %": metrics.interval_sharpness(lower, upper),
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
