"""Which inputs to hand to a person: a threshold on a score, set on familiar data and kept with the posterior."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.heads.prediction import Prediction
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.scores import score_of
from posthoc_uq.metrics import referral_threshold


def set_referral(predictor: Predictor, prediction: Prediction, rate: float, score: str = "entropy") -> float:
    """Choose the threshold above which an input is referred, and keep it in the posterior's record.

    It is saved with the posterior, together with the head and the hyperparameters that it belongs to.

    Args:
        predictor: made the prediction, with the posterior's present hyperparameters.
        prediction: of inputs like those in production (held-out data); foreign ones would raise the threshold.
        rate: the share of such inputs to refer, in [0, 1).
        score: one of `posthoc_uq.heads.scores.SCORES`.

    Returns:
        The threshold: at most a share `rate` of the prediction's scores lies above it.

    Raises:
        PosthocUQError: a rate or a score that does not exist or that this head does not know.
        NonFiniteError: a score is NaN.
    """
    scores = score_of(prediction, score)
    if bool(scores.isnan().any()):
        raise NonFiniteError(
            f"{int(scores.isnan().sum())} of {len(scores)} inputs have the {score} NaN; a threshold needs predictions "
            f"that are numbers."
        )
    threshold = referral_threshold(scores, rate)
    predictor.posterior.record.referral = {
        "score": score,
        "rate": float(rate),
        "threshold": threshold,
        "inputs": len(prediction),
        "head": dict(predictor.identity()),
        "posterior": predictor.hyperparameters(),
    }
    return threshold


def refer(predictor: Predictor, prediction: Prediction) -> Tensor:
    """Which inputs to hand to a person, ``(batch,)`` of booleans; an input whose score is NaN is always one of them.

    Args:
        predictor: made the prediction, with the head for which the threshold was set.
        prediction: of any inputs.

    Raises:
        PosthocUQError: no threshold was set, or for another head, or before the posterior was tuned again.
    """
    kept = predictor.posterior.record.referral
    if not kept:
        raise PosthocUQError(
            "No referral threshold was set; call evaluate(...).set_referral(rate) on held-out data."
        )
    if kept["head"] != predictor.identity():
        raise PosthocUQError(
            f"The referral threshold was set for {_shown(kept['head'])}, and this predictor is "
            f"{_shown(predictor.identity())}; set it again for this one."
        )
    if kept["posterior"] != predictor.hyperparameters():
        raise PosthocUQError(
            "The posterior's hyperparameters changed after the referral threshold was set; set it again."
        )
    return ~(score_of(prediction, kept["score"]) <= kept["threshold"])


def _shown(identity: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in identity.items())
