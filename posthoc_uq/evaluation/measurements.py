"""Predictions of several data sets by several predictors, and the numbers measured on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.evaluation.gallery import Example
from posthoc_uq.evaluation.measures import foreignness, selection
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import (
    referral_applies,
    referral_reasons,
    referral_scores,
    set_referral,
)
from posthoc_uq.metrics import referral_threshold
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.scores import CLASS_SCORES, score_of
from posthoc_uq.values import meant

FAMILIAR = "test"
"""The name of the first loader's data."""


@dataclass(frozen=True, eq=False, repr=False)
class Measurements:
    """Predictions of several data sets by several predictors, and the numbers measured on them.

    Attributes:
        predictions: by row (a compared model), by data set: ``"test"`` and the foreign ones.
        targets: of the test data: labels (inputs,), or values shaped like the mean.
        predictors: by row, those that have a posterior.
        galleries: images worth a look, by title.
        score: the uncertainty that `threshold` and the figures use if none is named.
        joint: groups of scores by which foreign data are detected, beside each score alone.
        referral_rates: shares of referred inputs.
        bins: of calibration errors.
        class_names: by index, or None.
        display: input image to colours, or None.
        hyperparameters: by row, those of its posterior when it predicted; without them no threshold can be kept.
    """

    predictions: Mapping[str, Mapping[str, Prediction]]
    targets: Tensor
    predictors: Mapping[str, Predictor | None]
    galleries: Mapping[str, Sequence[Example]]
    score: str | None
    referral_rates: tuple[float, ...]
    bins: int
    class_names: Sequence[str] | None = None
    display: Callable[[Tensor], Tensor] | None = None
    hyperparameters: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: dict[str, Any]())
    joint: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, by_set in self.predictions.items():
            for data, prediction in by_set.items():
                scores = next(iter(prediction.scores().values()))
                if bool(scores.isnan().any()):
                    raise NonFiniteError(
                        f"{int(scores.isnan().sum())} of {len(scores)} predictions of {name!r} on {data!r} are NaN; "
                        f"look at the inputs, or at the model in this number format."
                    )

    @cached_property
    def metrics(self) -> dict[str, dict[str, float]]:
        """By row: accuracy, NLL, calibration errors on the test data; or RMSE, log density, CRPS, coverage. Of outputs
        with positions they are means over all positions whose label counts.
        """
        return {
            row: by_set[FAMILIAR].quality(self.targets, self.bins) for row, by_set in self.predictions.items()
        }

    @cached_property
    def foreign(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """By row, foreign data set and score: AUROC, AUPR and FPR95 of detecting them among the test data."""
        return {
            row: {
                data: foreignness(by_set[FAMILIAR], prediction, self.joint)
                for data, prediction in by_set.items()
                if data != FAMILIAR
            }
            for row, by_set in self.predictions.items()
        }

    @cached_property
    def selective(self) -> dict[str, dict[str, dict[str, float]]]:
        """By row and score: the area under the risk-coverage curve, and the accuracy on the inputs not referred."""
        return {
            row: selection(by_set[FAMILIAR], self.targets, self.referral_rates)
            for row, by_set in self.predictions.items()
        }

    @property
    def names(self) -> list[str]:
        """The names of the rows."""
        return list(self.predictions)

    @property
    def foreign_names(self) -> list[str]:
        """The names of the foreign data sets."""
        return [name for name in next(iter(self.predictions.values())) if name != FAMILIAR]

    @property
    def classification(self) -> bool:
        """Whether classes were predicted, or values."""
        return self._first.classes is not None

    def threshold(self, rate: float, score: str | None = None, name: str | None = None) -> float:
        """The value of a score above which at most a share `rate` of the test inputs lies.

        Args:
            rate: in [0, 1).
            score: one of `posthoc_uq.predictions.scores.SCORES`; by default the one of `evaluate`, or entropy (standard
                deviation for values).
            name: the row; by default the last.

        Raises:
            PosthocUQError: an unknown row or score, or a rate out of range.
        """
        return referral_threshold(score_of(self._test(name), score or self.default_score), rate)

    @overload
    def set_referral(  # pyright: ignore[reportOverlappingOverload] a text is a sequence of texts, too
        self, rate: float, score: str, name: str | None = None
    ) -> float: ...

    @overload
    def set_referral(
        self, rate: float, score: Sequence[str] | None = None, name: str | None = None
    ) -> dict[str, float]: ...

    def set_referral(
        self, rate: float, score: str | Sequence[str] | None = None, name: str | None = None
    ) -> float | dict[str, float]:
        """Keep the thresholds for referring a share `rate` in the posterior of a row, for `refer` and the command line.

        Args:
            rate: in [0, 1), of all scores together.
            score: one score, or several, which have a threshold each, by the smallest of an input's tail probabilities
                (`posthoc_uq.set_referral`). By default the one of `evaluate`, or entropy (standard deviation for
                values), and novelty where the row knows it.
            name: the row; by default the last.

        Returns:
            The threshold of each score by name, or of one score that is given by its name that number. Save the
            posterior afterwards.

        Raises:
            PosthocUQError: as `threshold`, or the row has no posterior, or its posterior was tuned since.
        """
        predictor = self.predictors.get(self._row(name))
        if predictor is None:
            raise PosthocUQError(f"{self._row(name)!r} has no posterior to keep a threshold in.")
        if predictor.hyperparameters() != self.hyperparameters.get(self._row(name)):
            raise PosthocUQError(
                "The posterior's hyperparameters changed after these predictions were made; evaluate again."
            )
        prediction = self._test(name)
        scores = referral_scores(prediction, self.score) if score is None else score
        return set_referral(predictor, prediction, rate, scores)

    def referral_reasons(self, name: str | None = None) -> dict[str, dict[str, Tensor]]:
        """By data set and score, (inputs,) of booleans: which the score refers by the thresholds in a row's posterior.

        Args:
            name: the row; by default the last.

        Returns:
            Empty where the row has no posterior, or its posterior no thresholds that hold for these predictions.
        """
        row = self._row(name)
        predictor = self.predictors.get(row)
        if predictor is None or not referral_applies(predictor):
            return {}
        if predictor.hyperparameters() != self.hyperparameters.get(row):
            return {}
        return {data: referral_reasons(predictor, p) for data, p in self.predictions[row].items()}

    @property
    def default_score(self) -> str:
        """The name of the score used where none is named."""
        return self.score or self._first.default_score

    def losses(self, name: str | None = None) -> Tensor:
        """Per test input ``(inputs,)``: 1 for a wrong class, the squared error for values."""
        return self._test(name).losses(self.targets)

    @property
    def _first(self) -> Prediction:
        """The first row's prediction of the test data."""
        return next(iter(self.predictions.values()))[FAMILIAR]

    def _row(self, name: str | None) -> str:
        if name is not None and name not in self.predictions:
            raise PosthocUQError(
                f"There is no row {name!r}; there are {self.names}.{meant(name, self.names)}"
            )
        return self.names[-1] if name is None else name

    def _test(self, name: str | None) -> Prediction:
        return self.predictions[self._row(name)][FAMILIAR]

    def shown_scores(self, name: str) -> list[str]:
        """The scores of a row that vary between inputs."""
        known = self.selective[name]
        return [score for score in CLASS_SCORES if score in known] if self.classification else list(known)
