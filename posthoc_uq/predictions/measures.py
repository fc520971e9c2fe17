"""How good predictions are, by name: what `Prediction.quality` and `retained_quality` give, from plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from posthoc_uq import metrics


def class_quality(
    probs: Tensor, log_prob: Callable[[Tensor], Tensor], entropy: Tensor, targets: Tensor, bins: int
) -> dict[str, float]:
    """Of class probabilities ``(batch, classes)``.

    Args:
        probs: of the classes.
        log_prob: from targets to their log probabilities, ``(batch,)``.
        entropy: of the predictions, ``(batch,)``, in nats.
        targets: labels ``(batch,)``.
        bins: of the calibration errors.
    """
    found = {"accuracy": metrics.accuracy(probs, targets)}
    if probs.shape[1] > 5:
        found["top-5 accuracy"] = metrics.top_k_accuracy(probs, targets, 5)
    found["NLL"] = -float(log_prob(targets).double().mean())
    found["Brier"] = metrics.brier_score(probs, targets)
    found["ECE"] = metrics.expected_calibration_error(probs, targets, bins)
    found["ECE (equal mass)"] = metrics.expected_calibration_error(probs, targets, bins, binning="equal_mass")
    found["classwise ECE"] = metrics.classwise_calibration_error(probs, targets, bins)
    found["mean entropy"] = float(entropy.double().mean())
    return found


def interval_quality(interval: Callable[[float], tuple[Tensor, Tensor]], targets: Tensor) -> dict[str, float]:
    """Of intervals of observations, by their level: how often they hold the target, and how wide they are."""
    lower, upper = interval(0.95)
    return {
        "coverage of 50 %": metrics.interval_coverage(*interval(0.5), targets),
        "coverage of 95 %": metrics.interval_coverage(lower, upper, targets),
        "sharpness of 95 %": metrics.interval_sharpness(lower, upper),
    }


def retained_classes(
    scores: Tensor, probs: Tensor, targets: Tensor, rates: Sequence[float]
) -> dict[str, float]:
    """The accuracy, and of two classes the area under the curve, of what is not referred."""
    kept = metrics.selective_accuracy(scores, probs, targets, rates)
    found = {f"accuracy at {rate:g}": float(a) for rate, a in zip(rates, kept, strict=True)}
    if probs.shape[1] == 2:
        areas = metrics.selective_auc(scores, probs, targets, rates)
        found |= {f"AUC at {rate:g}": float(a) for rate, a in zip(rates, areas, strict=True)}
    return found


def retained_losses(
    name: str, scores: Tensor, losses: Tensor, rates: Sequence[float], *, root: bool = False
) -> dict[str, float]:
    """The mean loss, or its square root, of what is not referred."""
    risk = metrics.risk_coverage(scores, losses).risk
    kept = metrics.retained(rates, len(losses))
    found = {rate: risk[count - 1] for rate, count in zip(rates, kept, strict=True)}
    return {f"{name} at {rate:g}": float(own.sqrt() if root else own) for rate, own in found.items()}


def squared_errors(mean: Tensor, targets: Tensor) -> Tensor:
    """``(batch,)``, float64: the squared error, mean over outputs."""
    squares = (mean.double() - targets.double()).square()
    return squares if squares.ndim == 1 else squares.flatten(1).mean(dim=-1)
