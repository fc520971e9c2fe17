"""Which inputs to hand to a person: thresholds on scores, set on familiar data and kept with the posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods.metrics import (
    QUANTILES,
    Tail,
    referral_threshold,
    referral_thresholds,
    tail_of,
    tail_probability,
)
from posthoc_uq.likelihoods.prediction import Prediction, score_of
from posthoc_uq.posteriors.referral import thresholds_of


@overload
def set_referral(  # pyright: ignore[reportOverlappingOverload] a text is a sequence of texts, too
    predictor: Predictor, prediction: Prediction, rate: float, score: str
) -> float: ...


@overload
def set_referral(
    predictor: Predictor, prediction: Prediction, rate: float, score: Sequence[str] | None = None
) -> dict[str, float]: ...


def set_referral(
    predictor: Predictor, prediction: Prediction, rate: float, score: str | Sequence[str] | None = None
) -> float | dict[str, float]:
    """Choose the thresholds above which an input is referred, and keep them in the posterior's history.

    With several scores, an input is judged by the smallest of its tail probabilities, each the share of familiar inputs
    whose score is at least as large; `metrics.referral_thresholds` has the rule. So the scores share the
    rate: together they refer at most that share of the familiar inputs. Quantiles are kept too, for `referral_tail`.
    All of it is saved with the posterior, together with the head and the hyperparameters that it belongs to.

    Args:
        predictor: made the prediction, with the posterior's present hyperparameters.
        prediction: of inputs like those in production (held-out data); foreign ones would raise the threshold.
        rate: the share of such inputs to refer, in [0, 1).
        score: one of `prediction.SCORES`, or several. By default entropy, or of values the standard
            deviation, and novelty where the prediction knows it: the first finds inputs that are hard, the second such
            as are foreign.

    Returns:
        The threshold of each score by name, or of one score that is given by its name that number: at most a share
        `rate` of the prediction's inputs has any score above its threshold.

    Raises:
        PosthocUQError: a rate out of range, a score that does not exist or that this head does not know, or a score
            twice; or the arguments are not a predictor and its prediction.
        NonFiniteError: a score is NaN, or one of several is infinite.
    """
    _check_kinds(predictor, prediction)
    score = referral_scores(prediction) if score is None else score
    if isinstance(score, str):
        threshold = referral_threshold(_numbers(prediction, score), rate)
        rule: dict[str, Any] = {"score": score, "rate": float(rate), "threshold": threshold}
        thresholds: float | dict[str, float] = threshold
    else:
        if len(set(score)) < max(1, len(score)):
            raise PosthocUQError(f"Referral goes by one score or by several different ones, not {score!r}.")
        scores_by_name = {name: _numbers(prediction, name) for name in score}
        thresholds = referral_thresholds(scores_by_name, rate)
        tails = {name: tail_of(scores, QUANTILES) for name, scores in scores_by_name.items()}
        rule = {
            "scores": {
                name: {"threshold": thresholds[name], "quantiles": tail.values.tolist()}
                for name, tail in tails.items()
            },
            "shares": next(iter(tails.values())).shares.tolist(),
            "rate": float(rate),
        }
    predictor.posterior.history.referral = {
        **rule,
        "inputs": len(prediction),
        "head": dict(predictor.identity()),
        "posterior": predictor.hyperparameters(),
    }
    return thresholds


def referral_scores(prediction: Prediction, hard: str | None = None) -> tuple[str, ...]:
    """The scores that a referral goes by where none are named: one that finds hard inputs, and novelty if the
    prediction knows it.

    Args:
        prediction: of any inputs.
        hard: the first of them; by default entropy, or of values the standard deviation.
    """
    known = prediction.scores()
    hard = hard or prediction.default_score
    return (hard, "novelty") if "novelty" in known and hard != "novelty" else (hard,)


def refer(predictor: Predictor, prediction: Prediction) -> Tensor:
    """Which inputs to hand to a person, ``(batch,)`` of booleans; an input with a score that is NaN is always one.

    Args:
        predictor: made the prediction, with the head for which the threshold was set.
        prediction: of any inputs.

    Raises:
        PosthocUQError: no threshold was set, or it was set for another head, or the posterior was tuned since; or the
            arguments are not a predictor and its prediction.
    """
    return torch.stack(list(referral_reasons(predictor, prediction).values())).any(dim=0)


def referral_reasons(predictor: Predictor, prediction: Prediction) -> dict[str, Tensor]:
    """For each score, by name, the inputs it refers, ``(batch,)`` of booleans: where it is above its threshold, or NaN.

    Args, Raises: as `refer`, which refers an input that any of them does.
    """
    _check_kinds(predictor, prediction)
    _check_applies(predictor)
    referral = predictor.posterior.history.referral
    return {
        name: ~(score_of(prediction, name) <= threshold)
        for name, threshold in thresholds_of(referral).items()
    }


def referral_tail(predictor: Predictor, prediction: Prediction) -> Tensor:
    """How extreme inputs are among the familiar ones, so that a person may begin with the most extreme.

    For each input the smallest share, over the scores, of familiar inputs whose score is at least as large: 0 beyond
    the largest familiar one. It is interpolated linearly between the kept quantiles.

    Args: as `refer`.

    Returns:
        (batch,), float64 in [0, 1], on the CPU; NaN where a score is.

    Raises:
        PosthocUQError: as `refer`; or the threshold was set on one score by its name, which keeps no quantiles.
    """
    _check_kinds(predictor, prediction)
    _check_applies(predictor)
    referral = predictor.posterior.history.referral
    if "scores" not in referral:
        raise PosthocUQError(
            f"Quantiles are kept with several scores; set the referral by a tuple, ({referral['score']!r},) for one."
        )
    shares = torch.tensor(referral["shares"], dtype=torch.float64, device="cpu")
    tails = {
        name: Tail(torch.tensor(entry["quantiles"], dtype=torch.float64, device="cpu"), shares)
        for name, entry in referral["scores"].items()
    }
    tail_shares = [tail_probability(tail, score_of(prediction, name)) for name, tail in tails.items()]
    return torch.stack(tail_shares).amin(dim=0)


def referral_applies(predictor: Predictor) -> bool:
    """Whether the posterior has thresholds that were set for this head and these hyperparameters."""
    return _trouble(predictor) is None


def _check_kinds(predictor: Any, prediction: Any) -> None:
    if not isinstance(predictor, Predictor):
        raise PosthocUQError(
            f"The first argument is a predictor from uq.wrap(model, posterior), not a {type(predictor).__name__}."
        )
    if not isinstance(prediction, Prediction):
        raise PosthocUQError(
            f"The second argument is what the predictor returned for the inputs, predictor(x) or "
            f"predictor.predict(loader), not a {type(prediction).__name__}."
        )


def _check_applies(predictor: Predictor) -> None:
    trouble = _trouble(predictor)
    if trouble is not None:
        raise PosthocUQError(trouble)


def _trouble(predictor: Predictor) -> str | None:
    """Why no threshold applies, as an error message, or None."""
    referral = predictor.posterior.history.referral
    if not referral:
        return "No referral threshold was set; call evaluate(...).set_referral(rate) on held-out data."
    if referral["head"] != predictor.identity():
        return (
            f"The referral threshold was set for {_shown(referral['head'])}, and this predictor is "
            f"{_shown(predictor.identity())}; set it again for this one."
        )
    if referral["posterior"] != predictor.hyperparameters():
        return "The posterior's hyperparameters changed after the referral threshold was set; set it again."
    return None


def _numbers(prediction: Prediction, score: str) -> Tensor:
    """A score of every input of a prediction; refuses NaN."""
    scores = score_of(prediction, score)
    if bool(scores.isnan().any()):
        raise NonFiniteError(
            f"{int(scores.isnan().sum())} of {len(scores)} inputs have the {score} NaN; a threshold needs predictions "
            f"that are numbers."
        )
    return scores


def _shown(identity: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in identity.items())
