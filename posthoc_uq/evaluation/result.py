"""`Evaluation`: what `evaluate` found, as tables, files and figures."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.evaluation.gallery import Example
from posthoc_uq.evaluation.measures import foreignness, selection
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import referral_applies, referral_reasons, set_referral
from posthoc_uq.metrics import referral_threshold
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.scores import CLASS_SCORES, score_of
from posthoc_uq.storage.atomic import checked_target, write
from posthoc_uq.tables import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAMILIAR = "test"
"""The name of the first loader's data."""


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Predictions of several data sets by several predictors, and what they are worth; `str` gives tables.

    Attributes:
        predictions: by row (one of what was compared), by data set: ``"test"`` and the foreign ones.
        targets: of the test data: labels (inputs,), or values shaped like the mean.
        predictors: by row, those that have a posterior.
        galleries: images worth a look, by title.
        score: the uncertainty that `threshold` and the figures take if none is named.
        joint: groups of scores by which foreign data are told, beside each score alone.
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
        """By row: accuracy, NLL, calibration errors on the test data; or RMSE, log density, CRPS, coverage."""
        return {
            row: by_set[FAMILIAR].quality(self.targets, self.bins) for row, by_set in self.predictions.items()
        }

    @cached_property
    def foreign(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """By row, foreign data set and score: AUROC, AUPR and FPR95 of telling them from the test data."""
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
        """By row and score: the area under the risk-coverage curve, and the accuracy of what is not referred."""
        return {
            row: selection(by_set[FAMILIAR], self.targets, self.referral_rates)
            for row, by_set in self.predictions.items()
        }

    @property
    def names(self) -> list[str]:
        """The rows."""
        return list(self.predictions)

    @property
    def foreign_names(self) -> list[str]:
        """The foreign data sets."""
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
    def set_referral(self, rate: float, score: str | None = None, name: str | None = None) -> float: ...

    @overload
    def set_referral(
        self, rate: float, score: Sequence[str], name: str | None = None
    ) -> dict[str, float]: ...

    def set_referral(
        self, rate: float, score: str | Sequence[str] | None = None, name: str | None = None
    ) -> float | dict[str, float]:
        """Keep the threshold for referring a share `rate` in the posterior of a row, for `refer` and the command line.

        Args: as `threshold`; several scores, ``("entropy", "mutual_information")``, give a threshold each, by the
            smallest of an input's tail probabilities (`posthoc_uq.set_referral`). Save the posterior afterwards.

        Returns:
            The threshold, or that of each score by name.

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
        return set_referral(predictor, self._test(name), rate, score or self.default_score)

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
        """The score that is meant where none is named."""
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
            raise PosthocUQError(f"There is no row {name!r}; there are {self.names}.")
        return self.names[-1] if name is None else name

    def _test(self, name: str | None) -> Prediction:
        return self.predictions[self._row(name)][FAMILIAR]

    def rows(self) -> list[dict[str, Any]]:
        """Every number, one dictionary each: ``model, data, score, measure, value``; score is empty for quality."""
        found: list[dict[str, Any]] = []

        def add(model: str, data: str, score: str, values: Mapping[str, float]) -> None:
            for measure, value in values.items():
                found.append(
                    {"model": model, "data": data, "score": score, "measure": measure, "value": value}
                )

        for model in self.names:
            add(model, FAMILIAR, "", self.metrics[model])
            for score, values in self.selective[model].items():
                add(model, FAMILIAR, score, values)
            for data, by_score in self.foreign[model].items():
                for score, values in by_score.items():
                    add(model, data, score, values)
        return found

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `rows` as a table of five columns.

        Raises:
            PosthocUQError: the file cannot be written; one that stood there before is left as it was.
        """
        text = StringIO(newline="")
        writer = csv.DictWriter(text, ["model", "data", "score", "measure", "value"])
        writer.writeheader()
        writer.writerows(self.rows())
        _put(path, text.getvalue())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON; what is not finite is None."""
        sizes = {data: len(p) for data, p in next(iter(self.predictions.values())).items()}
        return cast(
            dict[str, Any],
            _finite(
                {
                    "inputs": sizes,
                    "quality": self.metrics,
                    "selective": self.selective,
                    "foreign": self.foreign,
                    "thresholds": {
                        name: {
                            score: {
                                f"{rate:g}": self.threshold(rate, score, name) for rate in self.referral_rates
                            }
                            for score in self.selective[name]
                        }
                        for name in self.names
                    },
                }
            ),
        )

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict`.

        Raises:
            PosthocUQError: the file cannot be written; one that stood there before is left as it was.
        """
        _put(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def tables(self) -> dict[str, tuple[list[str], list[list[Any]]]]:
        """By title, a header and rows of cells: quality, foreign data, selective prediction, what was referred."""
        from posthoc_uq.evaluation.listings import tables

        return tables(self)

    def __str__(self) -> str:
        parts = [
            f"{title}\n\n{text_table(header, rows, digits=4, indent='  ')}"
            for title, (header, rows) in self.tables().items()
        ]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return f"Evaluation(models={self.names}, foreign={self.foreign_names}, inputs={len(self.targets)})"

    def figures(self) -> dict[str, Figure]:
        """Figures by name: reliability or coverage, scores on familiar and foreign data, risk over coverage."""
        from posthoc_uq.evaluation.figures import figures

        return figures(self)

    def report(self, path: str | os.PathLike[str], *, title: str = "How far to trust this model") -> Path:
        """Write one HTML file that needs nothing else: tables, figures, and the images worth a look.

        Args:
            path: of the file.
            title: its heading.

        Returns:
            The path.

        Raises:
            PosthocUQError: the file cannot be written; one that stood there before is left as it was.
        """
        from posthoc_uq.evaluation.report import html

        _put(path, html(self, title))
        return Path(path)

    def shown_scores(self, name: str) -> list[str]:
        """The scores of a row that say anything."""
        known = self.selective[name]
        return [score for score in CLASS_SCORES if score in known] if self.classification else list(known)


def _put(path: str | os.PathLike[str], text: str) -> None:
    write(checked_target(path), BytesIO(text.encode()))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in cast(Mapping[Any, Any], value).items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
