"""All predictions and the numbers measured on them, as tables, and the images worth a look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast, overload

import torch
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.tables import decimals
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import referral_applies, referral_reasons, referral_scores, set_referral
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.metrics import referral_threshold
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import CLASS_SCORES, Prediction, score_of

# The measures of a prediction by name, from `posthoc_uq.metrics`.

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


# The few images worth a look, kept while the batches pass, so that no data set is kept in memory.


@dataclass(frozen=True)
class Example:
    """One image and what was predicted for it.

    Attributes:
        image: (channels, height, width), the model's input.
        data: the name of its data set.
        index: its place in the loader's order.
        score: its value of the gallery's uncertainty score.
        predicted: the most probable class.
        probability: of that class.
        label: the right class, where there is one.
    """

    image: Tensor
    data: str
    index: int
    score: float
    predicted: int
    probability: float
    label: int | None


@dataclass
class Gallery:
    """The `size` offered images of a data set with the largest (or smallest) score."""

    size: int
    score: str
    data: str
    largest: bool = True
    mistakes_only: bool = False
    examples: list[Example] = field(default_factory=lambda: list[Example]())

    def offer(
        self, images: Tensor | None, prediction: Prediction, targets: Tensor | None, start: int
    ) -> None:
        """Look at one batch, whose first input is number `start`; of predictions with one class an input."""
        one_class = prediction.classes is not None and not isinstance(prediction, PositionPrediction)
        if images is None or not one_class or self.size < 1:
            return
        prediction = cast(ClassPrediction, prediction)
        if self.mistakes_only and targets is None:
            return
        scores = score_of(prediction, self.score).cpu()
        order = torch.nan_to_num(scores, nan=torch.inf) * (1.0 if self.largest else -1.0)
        if self.mistakes_only and targets is not None:
            order = order.masked_fill(prediction.predicted().cpu() == targets.cpu(), -torch.inf)
        probability, predicted = prediction.probs.max(dim=-1)
        picked: list[tuple[float, Example]] = []
        for index in order.topk(min(self.size, len(order))).indices.tolist():
            if order[index] == -torch.inf:
                continue
            example = Example(
                images[index],
                self.data,
                start + index,
                float(scores[index]),
                int(predicted[index]),
                float(probability[index]),
                None if targets is None else int(targets[index]),
            )
            picked.append((float(order[index]), example))
        sign = 1.0 if self.largest else -1.0
        picked += [(sign * example.score, example) for example in self.examples]
        self.examples = [example for _, example in sorted(picked, key=lambda pair: -pair[0])[: self.size]]
        new = [place for place, example in enumerate(self.examples) if example.index >= start]
        if new:
            copies = torch.stack([self.examples[place].image.detach().float() for place in new]).cpu()
            for place, image in zip(new, copies, strict=True):
                self.examples[place] = replace(self.examples[place], image=image.clone())


def images_of(inputs: list[Tensor]) -> Tensor | None:
    """The images among a batch's inputs: the first tensor, if it has one, three or four channels in four dimensions."""
    if inputs and inputs[0].ndim == 4 and inputs[0].shape[1] in (1, 3, 4):
        return inputs[0]
    return None


# Predictions of several data sets by several predictors, and the numbers measured on them.

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
            score: one of `prediction.SCORES`; by default the one of `evaluate`, or entropy (standard
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
                f"There is no row {name!r}; there are {self.names}.{did_you_mean(name, self.names)}"
            )
        return self.names[-1] if name is None else name

    def _test(self, name: str | None) -> Prediction:
        return self.predictions[self._row(name)][FAMILIAR]

    def shown_scores(self, name: str) -> list[str]:
        """The scores of a row that vary between inputs."""
        known = self.selective[name]
        return [score for score in CLASS_SCORES if score in known] if self.classification else list(known)


# The tables of an evaluation: a header and rows of cells, for text and for the page.

Table = tuple[list[str], list[list[Any]]]


def tables(evaluation: Measurements) -> dict[str, Table]:
    """Tables with at least one row, by title: quality, foreign data, selective prediction, referred shares."""
    columns = _distinct(measure for values in evaluation.metrics.values() for measure in values)
    quality_rows = [
        [name, *(values.get(column) for column in columns)] for name, values in evaluation.metrics.items()
    ]
    by_title: dict[str, Table] = {
        f"Quality on {len(evaluation.targets)} test inputs": (["model", *columns], quality_rows)
    }
    for data in evaluation.foreign_names:
        rows = [
            [name, score, *values.values()]
            for name in evaluation.names
            for score, values in evaluation.foreign[name][data].items()
        ]
        by_title[f"Telling {data} from the test inputs"] = (
            ["model", "score", "AUROC", "AUPR", "FPR95"],
            rows,
        )
    by_title["Leaving the least certain inputs to a person"] = _selective(evaluation)
    by_title["Referred by the thresholds of the posterior"] = _referred(evaluation)
    return {title: table for title, table in by_title.items() if table[1]}


def column_decimals(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[int]:
    """How many decimals each column is shown with."""
    return [decimals([row[i] for row in rows]) for i in range(len(header))]


def _selective(evaluation: Measurements) -> Table:
    """By row and score, the quality on the inputs that are not referred."""
    by_row = evaluation.selective
    measures = _distinct(m for by in by_row.values() for values in by.values() for m in values)
    rows = [
        [name, score, *(values.get(measure) for measure in measures)]
        for name in evaluation.names
        for score, values in by_row[name].items()
    ]
    return ["model", "score", *measures], rows


def _referred(evaluation: Measurements) -> Table:
    """By row and data set, the share of inputs that the posterior's thresholds refer, in all and by each score."""
    shares = [
        (row, data, referred_shares(reasons))
        for row in evaluation.names
        for data, reasons in evaluation.referral_reasons(row).items()
    ]
    columns = _distinct(column for _, _, values in shares for column in values)
    return ["model", "data", *columns], [
        [row, data, *(values.get(column) for column in columns)] for row, data, values in shares
    ]


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
