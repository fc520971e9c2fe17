"""Which inputs to hand to a person: `Referral`, by the held-out scores that `posthoc_uq.calibrate` stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option, one_of
from posthoc_uq.likelihoods.conformal import JOINT, ConformalScores, applying, rounded_down
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.likelihoods.selective import SCORES

Inside = Annotated[float, Gt(0), Lt(1)]


class Referral:
    """Refers inputs to a person, by how extreme their scores are among the held-out ones of `posthoc_uq.calibrate`.

    ```python
    posterior = uq.calibrate(posterior, val_loader)  # once; its file keeps it
    prediction = uq.wrap(model, posterior)(images)
    referral = uq.Referral(rate=0.05)
    referral(prediction)  # True for the inputs that a person should see
    referral.reasons(prediction)  # for each score, the inputs that it refers
    referral.tail(prediction)  # p-values; begin with the smallest
    ```

    With a `rate`, inputs whose p-value is at most that are referred: of new inputs like the held-out ones at most this
    share on average, whatever the model (`Prediction.familiarity` has the formula).

    With an `accuracy`, of classes, as few as possible are referred so that the rest is right with this accuracy: of the
    n held-out inputs in ascending order of the score the largest number k is kept for which ``(errors among them + 1) /
    (k + 1) <= 1 - accuracy``, and new inputs beyond the k-th are referred. k is chosen by the same inputs that it is
    judged on, so this holds approximately and on average, for inputs like the held-out ones; the more of them there
    are, the better. Inputs beyond all held-out ones are always referred. With a `confidence` the accuracy is reached
    with this probability over draws of the held-out inputs (Learn then Test, Angelopoulos et al. 2021), which refers
    more: of those inputs with scores up to a threshold so few must be wrong that a binomial test speaks for it.

    With `exactly` a rate is no longer "at most": of the inputs of a call the `round(rate * inputs)` with the largest
    scores are referred, NaN first, and of inputs that tie the earlier ones. So call it with the predictions of a whole
    day, not one by one: what is referred depends on the other inputs of the call.

    Args:
        rate: the share of inputs like the held-out ones to refer, in (0, 1); by default 0.05.
        accuracy: of the rest, in (0, 1), in place of a rate.
        exactly: refer just this share of every call's inputs, by rank.
        confidence: that the accuracy is reached, in (0, 1), such as 0.9; None for on average.
        score: ``"joint"``, the more surprising of two scores: entropy, or of values the standard deviation, which finds
            inputs that are hard, and novelty, which finds foreign ones; or one of the two by its name. If no input is
            foreign, ``"entropy"`` alone finds more errors.

    Raises:
        PosthocUQError: a number out of range, both a rate and an accuracy, or no score; `exactly` without a rate, or a
            `confidence` without an accuracy.
    """

    def __init__(
        self,
        rate: float | None = None,
        *,
        accuracy: float | None = None,
        score: str = JOINT,
        exactly: bool = False,
        confidence: float | None = None,
    ) -> None:
        if rate is not None and accuracy is not None:
            raise PosthocUQError("Referral goes by a rate or by an accuracy; give one of the two.")
        self.exactly = check_option("exactly", exactly, bool)
        self.confidence = check_option("confidence", confidence, Inside | None)
        if exactly and accuracy is not None:
            raise PosthocUQError("exactly=True refers just a share of the inputs; give a rate, no accuracy.")
        if confidence is not None and accuracy is None:
            raise PosthocUQError("A confidence is that of an accuracy; give one, as accuracy=0.98.")
        rate = 0.05 if rate is None and accuracy is None else rate
        self.rate = check_option("rate", rate, Inside | None)
        self.accuracy = check_option("accuracy", accuracy, Inside | None)
        self.score = one_of("score", score, (JOINT, *SCORES))

    def __call__(self, prediction: Prediction) -> Tensor:
        """Which inputs to hand to a person, ``(batch,)`` of booleans, on the CPU; one whose score is NaN always is.

        Args:
            prediction: of any inputs, by a predictor whose posterior is calibrated.

        Raises:
            PosthocUQError: the prediction has no held-out scores that apply, or not the score; or they are too few for
                the rate, or do not reach the accuracy; or a single input is to be ranked.
        """
        return torch.stack(list(self.reasons(prediction).values())).any(dim=0)

    def reasons(self, prediction: Prediction) -> dict[str, Tensor]:
        """For each score, by name, the inputs it refers, ``(batch,)`` of booleans. An input is referred if any score
        refers it.
        """
        promises, scores = _promises_of(prediction), prediction.at_promises().scores()
        if self.exactly:
            return self.highest(self.ranked(prediction))
        border = self.border(promises)
        return {name: ~(p > border) for name, p in promises.single_p_values(scores, self.score).items()}

    def tail(self, prediction: Prediction) -> Tensor:
        """How extreme inputs are among the held-out ones, so that a person may begin with the most extreme: the p-value
        of the score.

        Returns:
            (batch,), float64 in (0, 1], on the CPU; NaN where a score is.
        """
        return _promises_of(prediction).p_values(prediction.at_promises().scores(), self.score)

    def ranked(self, prediction: Prediction) -> dict[str, Tensor]:
        """For each score, the numbers ``(batch,)`` by whose largest inputs are referred exactly: those of several
        batches may be joined, for `highest`.
        """
        return _promises_of(prediction).input_scores(prediction.at_promises().scores(), self.score)

    def highest(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For each score, by name, the inputs among those to refer exactly whose number is as large as the smallest
        that is referred, ``(inputs,)`` of booleans.

        Args:
            scores: of all inputs, as `ranked` gives them.

        Raises:
            PosthocUQError: a single input is to be ranked.
        """
        largest = torch.stack(list(scores.values())).amax(0)  # NaN where any is
        inputs = len(largest)
        if inputs == 1:
            raise PosthocUQError(
                "exactly=True ranks the inputs of a call, and here is a single one; call the referral with the "
                "predictions of many, such as those of a day, or leave exactly out."
            )
        order = largest.nan_to_num(nan=torch.inf).argsort(descending=True, stable=True)
        order = torch.cat((order[largest[order].isnan()], order[~largest[order].isnan()]))
        chosen = torch.zeros(inputs, dtype=torch.bool, device="cpu")
        chosen[order[: round(cast(float, self.rate) * inputs)]] = True
        border = largest[chosen].nan_to_num(nan=torch.inf).amin() if bool(chosen.any()) else torch.inf
        return {name: chosen & ~(values < border) for name, values in scores.items()}

    def check(self, promises: ConformalScores | str | None) -> None:
        """Refuse held-out scores by which inputs cannot be referred so.

        Args:
            promises: of a prediction, or of a predictor.

        Raises:
            PosthocUQError: as a call.
        """
        if self.exactly:
            one_of("score", self.score, tuple(applying(promises).inputs))
        else:
            self.border(promises)

    def border(self, promises: ConformalScores | str | None) -> float:
        """The p-value up to which inputs are referred.

        Args:
            promises: of a prediction, or of a predictor.

        Raises:
            PosthocUQError: as a call; or ranks decide, so that there is none.
        """
        held_out = applying(promises)
        score = one_of("score", self.score, tuple(held_out.inputs))
        if self.exactly:
            raise PosthocUQError(
                "exactly=True goes by the ranks of a call's inputs, and has no border that one input could be "
                "compared with; leave exactly out where inputs are judged one by one."
            )
        if self.accuracy is not None and self.confidence is not None:
            return held_out.surest_rate_for(self.accuracy, self.confidence, score)
        if self.accuracy is not None:
            return held_out.rate_for(self.accuracy, score)
        rate, lowest = cast(float, self.rate), held_out.inputs[score].lowest_rate
        if rate < lowest:
            raise PosthocUQError(
                f"A rate of {rate:g} needs more held-out samples than the {held_out.inputs[score].count:,} that were "
                f"kept; give a rate of at least {1 - rounded_down(1 - lowest):g}, or calibrate with more."
            )
        return rate

    def __repr__(self) -> str:
        aim = f"rate={self.rate:g}" if self.accuracy is None else f"accuracy={self.accuracy:g}"
        aim += ", exactly=True" if self.exactly else ""
        aim += "" if self.confidence is None else f", confidence={self.confidence:g}"
        return f"Referral({aim}, score={self.score!r})"


def _promises_of(prediction: Any) -> ConformalScores:
    if not isinstance(prediction, Prediction):
        raise PosthocUQError(
            f"A referral takes what a predictor returned for the inputs, predictor(x) or predictor.predict(loader), "
            f"not a {type(prediction).__name__}."
        )
    return prediction.known_promises()
