"""The measures of a prediction by name, from `posthoc_uq.metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from posthoc_uq import metrics
from posthoc_uq.predictions.base import Prediction

LARGER_IS_BETTER = (
    "accuracy",
    "top-5 accuracy",
    "log density",
    "AUROC",
    "AUPR",
    "AUC at",
    "mAP",
    "F1",
    "quadratic kappa",
)
"""How the names of measures start whose larger values are better; of others, but for `NEUTRAL`, smaller is better."""
NEUTRAL = ("coverage", "sharpness", "mean entropy", "referred", "by ")


def foreignness(
    familiar: Prediction, foreign: Prediction, joint: Sequence[Sequence[str]] = ()
) -> dict[str, dict[str, float]]:
    """By score, and by each joint group whose scores are all known, how well it detects foreign inputs."""
    inside, outside = familiar.scores(), foreign.scores()
    for names in joint:
        if all(name in inside and name in outside for name in names):
            familiar_group = {name: inside[name] for name in names}
            title = " and ".join(names)
            inside[title] = metrics.joint_tail(familiar_group, familiar_group)
            outside[title] = metrics.joint_tail(familiar_group, {name: outside[name] for name in names})
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
    """By score, the quality on the inputs that are not referred."""
    losses = prediction.losses(targets)
    return {
        name: {
            "AURC": metrics.risk_coverage(scores, losses).area,
            **prediction.retained_quality(scores, targets, rates),
        }
        for name, scores in prediction.scores().items()
        if _varies(scores)
    }


def referred_shares(reasons: Mapping[str, Tensor]) -> dict[str, float]:
    """The share of the inputs that any score refers, and that each score refers, from booleans (inputs,) by score."""
    by_score = {f"by {score}": float(flags.double().mean()) for score, flags in reasons.items()}
    return {"referred": float(torch.stack(list(reasons.values())).any(dim=0).double().mean()), **by_score}


def better(measure: str) -> int:
    """1 for a measure of which larger values are better, -1 where smaller ones are, 0 where neither."""
    if measure.startswith(NEUTRAL):
        return 0
    return 1 if measure.startswith(LARGER_IS_BETTER) else -1


def _varies(*scores: Tensor) -> bool:
    """Whether a score varies between inputs: a plain model's functional variance is 0 everywhere."""
    joined = torch.cat(scores)
    return joined.numel() > 0 and bool((joined != joined[0]).any())
