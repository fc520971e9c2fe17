"""What is measured of a prediction: names and numbers, by `posthoc_uq.metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from posthoc_uq import metrics
from posthoc_uq.heads.prediction import ClassPrediction, Prediction, RegressionPrediction
from posthoc_uq.heads.scores import uncertainty_scores

LARGER_IS_BETTER = ("accuracy", "top-5 accuracy", "log density", "AUROC", "AUPR", "AUC at")
"""How the names of such measures start; of the others but coverage and mean entropy, smaller is better."""
NEUTRAL = ("coverage", "sharpness", "mean entropy", "referred", "by ")


def quality(prediction: Prediction, targets: Tensor, bins: int) -> dict[str, float]:
    """How good a prediction is on data like those of the training, by name."""
    if isinstance(prediction, RegressionPrediction):
        return _value_quality(prediction, targets)
    probs = prediction.probs
    found = {"accuracy": metrics.accuracy(probs, targets)}
    if probs.shape[1] > 5:
        found["top-5 accuracy"] = metrics.top_k_accuracy(probs, targets, 5)
    found["NLL"] = -float(prediction.log_prob(targets).double().mean())
    found["Brier"] = metrics.brier_score(probs, targets)
    found["ECE"] = metrics.expected_calibration_error(probs, targets, bins)
    found["ECE (equal mass)"] = metrics.expected_calibration_error(probs, targets, bins, binning="equal_mass")
    found["classwise ECE"] = metrics.classwise_calibration_error(probs, targets, bins)
    found["mean entropy"] = float(prediction.entropy().double().mean())
    return found


def _value_quality(prediction: RegressionPrediction, targets: Tensor) -> dict[str, float]:
    found = {"RMSE": metrics.rmse(prediction.mean, targets)}
    if bool((prediction.variance > 0).all()):
        lower, upper = prediction.interval(0.95)
        half = prediction.interval(0.5)
        found["log density"] = metrics.gaussian_log_density(prediction.mean, prediction.variance, targets)
        found["CRPS"] = metrics.crps_gaussian(prediction.mean, prediction.variance, targets)
        found["coverage of 50 %"] = metrics.interval_coverage(*half, targets)
        found["coverage of 95 %"] = metrics.interval_coverage(lower, upper, targets)
        found["sharpness of 95 %"] = metrics.interval_sharpness(lower, upper)
    return found


def foreignness(
    familiar: Prediction, foreign: Prediction, joint: Sequence[Sequence[str]] = ()
) -> dict[str, dict[str, float]]:
    """By score, and by each joint group of scores if all are known, how well it tells foreign inputs from familiar."""
    inside, outside = uncertainty_scores(familiar), uncertainty_scores(foreign)
    for names in joint:
        if all(name in inside and name in outside for name in names):
            known = {name: inside[name] for name in names}
            title = " and ".join(names)
            inside[title] = metrics.joint_tail(known, known)
            outside[title] = metrics.joint_tail(known, {name: outside[name] for name in names})
    return {
        name: {
            "AUROC": metrics.ood_auroc(inside[name], outside[name]),
            "AUPR": metrics.ood_aupr(inside[name], outside[name]),
            "FPR95": metrics.ood_fpr(inside[name], outside[name]),
        }
        for name in inside
        if name in outside and _varies(inside[name], outside[name])
    }


def selection(prediction: Prediction, targets: Tensor, rates: Sequence[float]) -> dict[str, dict[str, float]]:
    """By score, how much better the inputs are predicted that are not referred."""
    losses = losses_of(prediction, targets)
    found: dict[str, dict[str, float]] = {}
    for name, scores in uncertainty_scores(prediction).items():
        if not _varies(scores):
            continue
        curve = metrics.risk_coverage(scores, losses)
        measures = {"AURC": curve.area}
        if isinstance(prediction, ClassPrediction):
            kept = metrics.selective_accuracy(scores, prediction.probs, targets, rates)
            measures |= {f"accuracy at {rate:g}": float(a) for rate, a in zip(rates, kept, strict=True)}
            if prediction.probs.shape[1] == 2:
                areas = metrics.selective_auc(scores, prediction.probs, targets, rates)
                measures |= {f"AUC at {rate:g}": float(a) for rate, a in zip(rates, areas, strict=True)}
        else:
            kept = metrics.retained(rates, len(losses))
            measures |= {
                f"RMSE at {rate:g}": float(curve.risk[count - 1].sqrt())
                for rate, count in zip(rates, kept, strict=True)
            }
        found[name] = measures
    return found


def referred_shares(reasons: Mapping[str, Tensor]) -> dict[str, float]:
    """The share of the inputs that any score refers, and that each does, from booleans (inputs,) by score."""
    own = {f"by {score}": float(flags.double().mean()) for score, flags in reasons.items()}
    return {"referred": float(torch.stack(list(reasons.values())).any(dim=0).double().mean()), **own}


def losses_of(prediction: Prediction, targets: Tensor) -> Tensor:
    """Per input ``(inputs,)``: 1 where the predicted class is wrong; for values the squared error, mean of outputs."""
    if isinstance(prediction, ClassPrediction):
        return (prediction.predicted() != targets).double()
    squares = (prediction.mean.double() - targets.double()).square()
    return squares if squares.ndim == 1 else squares.mean(dim=-1)


def better(measure: str) -> int:
    """1 where more is better, -1 where less is, 0 where neither is."""
    if measure.startswith(NEUTRAL):
        return 0
    return 1 if measure.startswith(LARGER_IS_BETTER) else -1


def _varies(*scores: Tensor) -> bool:
    """Whether a score says anything: a plain model's functional variance is 0 everywhere."""
    joined = torch.cat(scores)
    return joined.numel() > 0 and bool((joined != joined[0]).any())
