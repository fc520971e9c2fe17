"""Which inputs to hand to a person: `Referral`, thresholds on scores that are set on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import check_option
from posthoc_uq.likelihoods.prediction import Prediction, score_of
from posthoc_uq.likelihoods.selective import (
    QUANTILES,
    Tail,
    referral_thresholds,
    tail_of,
    tail_probability,
)
from posthoc_uq.posteriors import Posterior
from posthoc_uq.posteriors.report import rule_of, thresholds_of

Rate = Annotated[float, Ge(0), Lt(1)]


@runtime_checkable
class _Predictor(Protocol):
    """What a referral needs of a `Predictor`, which imports this module."""

    @property
    def posterior(self) -> Posterior: ...

    def predict(self, loader: Iterable[Any], *, progress: bool = True) -> Prediction: ...

    def identity(self) -> dict[str, Any]: ...

    def hyperparameters(self) -> dict[str, Any]: ...


class Referral:
    """Refers inputs to a person whose scores lie above thresholds, which are set on held-out data and stored with the
    posterior.

    ```python
    referral = uq.Referral(rate=0.05).fit(predictor, val_loader)
    uq.save(predictor.posterior, "model.h5")
    referral(prediction)  # True for the inputs that a person should see
    referral.reasons(prediction)  # for each score, the inputs that it refers
    referral.tail(prediction)  # how extreme an input is; begin with the smallest
    predictor.referral(prediction)  # the same of a posterior that was loaded
    ```

    With several scores, an input is judged by the smallest of its tail probabilities, each the share of the held-out
    inputs whose score is at least as large; `posthoc_uq.evaluation.metrics.referral_thresholds` has the rule. So the
    scores share the rate: together they refer at most that share of the held-out inputs. Thresholds hold for the head
    and the hyperparameters that they were set with, and are refused for others.

    Args:
        rate: the share of inputs like the held-out ones to refer, in [0, 1).
        score: one of `posthoc_uq.likelihoods.SCORES`, or several. By default entropy, or of values the standard
            deviation, and novelty where the predictions know it: the first finds inputs that are hard, the second those
            that are foreign.
    """

    def __init__(self, rate: float = 0.05, score: str | Sequence[str] | None = None) -> None:
        scores = None if score is None else (score,) if isinstance(score, str) else tuple(score)
        if scores is not None and len(set(scores)) < max(1, len(scores)):
            raise PosthocUQError(f"Referral goes by one score or by several different ones, not {score!r}.")
        self.rate = check_option("rate", rate, Rate)
        self._scores = scores
        self._predictor: _Predictor | None = None
        self._record: Mapping[str, Any] = {}

    @classmethod
    def stored(cls, predictor: _Predictor) -> Referral:
        """The referral that a predictor's posterior stores, as `Predictor.referral`; one without thresholds if none was
        set.
        """
        record = _checked(predictor).posterior.history.referral
        referral = cls(record["rate"], tuple(record["scores"])) if record else cls()
        referral._predictor, referral._record = predictor, record
        return referral

    def fit(self, predictor: _Predictor, data: Prediction | Iterable[Any]) -> Referral:
        """Set the thresholds and store them with the predictor's posterior; save it afterwards.

        Args:
            predictor: with the head, options and hyperparameters that will predict.
            data: held-out data like those in production, as a loader whose targets are ignored, or the predictor's
                prediction of them. Foreign inputs would raise the thresholds.

        Returns:
            The referral itself.

        Raises:
            PosthocUQError: the rate is out of range, or the predictions do not know a score.
            NonFiniteError: a score is NaN or infinite.
        """
        predictor = _checked(predictor)
        prediction = data if isinstance(data, Prediction) else predictor.predict(data, progress=False)
        scores = {
            name: _numbers(prediction, name) for name in self._scores or default_referral_scores(prediction)
        }
        thresholds = referral_thresholds(scores, self.rate)
        tails = {name: tail_of(values, QUANTILES) for name, values in scores.items()}
        record = {
            "scores": {
                name: {"threshold": thresholds[name], "quantiles": tail.values.tolist()}
                for name, tail in tails.items()
            },
            "shares": next(iter(tails.values())).shares.tolist(),
            "rate": self.rate,
            "inputs": len(prediction),
            "head": dict(predictor.identity()),
            "posterior": predictor.hyperparameters(),
        }
        self._predictor, self._record = predictor, record
        predictor.posterior.history.referral = record
        return self

    @property
    def thresholds(self) -> dict[str, float]:
        """The threshold of each score by name; empty before `fit`."""
        return thresholds_of(self._record)

    @property
    def applies(self) -> bool:
        """Whether the predictor still has the hyperparameters and the head that the thresholds were set with."""
        return self._trouble() is None

    def __call__(self, prediction: Prediction) -> Tensor:
        """Which inputs to hand to a person, ``(batch,)`` of booleans; an input with a score that is NaN is always one.

        Args:
            prediction: of any inputs by the predictor.

        Raises:
            PosthocUQError: no threshold was set, or the posterior was tuned since, or the predictor has another head.
        """
        return torch.stack(list(self.reasons(prediction).values())).any(dim=0)

    def reasons(self, prediction: Prediction) -> dict[str, Tensor]:
        """For each score, by name, the inputs it refers, ``(batch,)`` of booleans: where it is above its threshold, or
        NaN. An input is referred if any score refers it.
        """
        self._check(prediction)
        return {
            name: ~(score_of(prediction, name) <= threshold) for name, threshold in self.thresholds.items()
        }

    def tail(self, prediction: Prediction) -> Tensor:
        """How extreme inputs are among the held-out ones, so that a person may begin with the most extreme.

        For each input the smallest share, over the scores, of held-out inputs whose score is at least as large: 0
        beyond the largest one. It is interpolated linearly between the stored quantiles.

        Returns:
            (batch,), float64 in [0, 1], on the CPU; NaN where a score is.
        """
        self._check(prediction)
        tails: list[Tensor] = []
        for name, stored in self._record["scores"].items():
            values, shares = (
                torch.tensor(numbers, dtype=torch.float64, device="cpu")
                for numbers in (stored["quantiles"], self._record["shares"])
            )
            tails.append(tail_probability(Tail(values, shares), score_of(prediction, name)))
        return torch.stack(tails).amin(dim=0)

    def __repr__(self) -> str:
        scores = f", score={self._scores!r}" if self._scores else ""
        rule = f": {rule_of(self._record, 4)}" if self._record else ""
        return f"Referral(rate={self.rate:g}{scores}){rule}"

    def _check(self, prediction: Any) -> None:
        if not isinstance(prediction, Prediction):
            raise PosthocUQError(
                f"A referral takes what the predictor returned for the inputs, predictor(x) or "
                f"predictor.predict(loader), not a {type(prediction).__name__}."
            )
        trouble = self._trouble()
        if trouble is not None:
            raise PosthocUQError(trouble)

    def _trouble(self) -> str | None:
        """Why no threshold applies, as an error message, or None."""
        if self._predictor is None or not self._record:
            return "No referral threshold was set; set one with uq.Referral(rate).fit(predictor, held_out_loader)."
        if self._record["head"] != self._predictor.identity():
            return (
                f"The referral threshold was set for {shown_identity(self._record['head'])}, and this predictor is "
                f"{shown_identity(self._predictor.identity())}; set it again for this one."
            )
        if self._record["posterior"] != self._predictor.hyperparameters():
            return (
                "The posterior's hyperparameters changed after the referral threshold was set; set it again."
            )
        return None


def default_referral_scores(prediction: Prediction, hard: str | None = None) -> tuple[str, ...]:
    """The scores of a referral where none are named: one that finds hard inputs, and novelty where it is known.

    Args:
        prediction: of any inputs.
        hard: the first of them; by default entropy, or of values the standard deviation.
    """
    hard = hard or prediction.default_score
    return (hard, "novelty") if "novelty" in prediction.scores() and hard != "novelty" else (hard,)


def _checked(predictor: Any) -> _Predictor:
    if not isinstance(predictor, _Predictor):
        raise PosthocUQError(
            f"A referral needs a predictor from uq.wrap(model, posterior), not a {type(predictor).__name__}."
        )
    return predictor


def _numbers(prediction: Prediction, score: str) -> Tensor:
    """A score of every input of a prediction; refuses NaN."""
    scores = score_of(prediction, score)
    if bool(scores.isnan().any()):
        raise NonFiniteError(
            f"{int(scores.isnan().sum())} of {len(scores)} inputs have the {score} NaN; a threshold needs predictions "
            f"that are numbers."
        )
    return scores


def shown_identity(identity: Mapping[str, Any]) -> str:
    """The identity of a predictor in words: the head and its options."""
    return ", ".join(f"{name}={value!r}" for name, value in identity.items())
