"""The predictions of several data sets by several predictors, the numbers measured on them, and tables of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.tables import decimals
from posthoc_uq.evaluation import metrics
from posthoc_uq.evaluation.groups import GroupedCoverage
from posthoc_uq.evaluation.promised import (
    ERT,
    ERT_ERROR,
    OBSERVED,
    coverage_by_group,
    coverages,
    promised,
    promised_by_class,
)
from posthoc_uq.heads.referral import Referral
from posthoc_uq.likelihoods.conformal import Coverage
from posthoc_uq.likelihoods.prediction import Prediction, score_of

FAMILIAR = "test"
"""The name of the first loader's data."""

# In a sentence each, for readers who have not seen the library.
SCORE_MEANINGS = {
    "entropy": "How undecided the predicted probabilities are, in nats; 0 is certain.",
    "mutual_information": "The part of the entropy that comes from not knowing the weights, in nats.",
    "max_probability": "1 minus the largest probability.",
    "epistemic_variance": "How far the prediction varies because the weights are not known, mean over outputs: of "
    "values the part of the variance that more data lower, of classes the variance of the logits. That also grows with "
    "the size of the features, and may rank foreign inputs below familiar ones: compare it with novelty.",
    "variation_ratio": "The share of the drawn networks that vote for another class.",
    "novelty": "How unlike the training data an input is: the share of the prior's uncertainty that the data left "
    "there. Between 0 and 1; compare it with held-out inputs, not with a fixed number.",
    "standard_deviation": "How far the target may be from the prediction, noise included, in the target's units.",
}

SCORE_USES = {
    "entropy": "an error is likely",
    "max_probability": "an error is likely",
    "variation_ratio": "an error is likely",
    "mutual_information": "more labels would help",
    "novelty": "an input is foreign, or data drift",
    "standard_deviation": "a large error is likely",
    "epistemic_variance": "more labels would help",
}
"""What each score is for, in the words of a table's column ``"large_where"``: of all of them large values are bad."""


class Measure(NamedTuple):
    """How a measure is printed, what it means, and whether larger values are better; None where neither larger nor
    smaller ones are.
    """

    title: str
    meaning: str
    larger_is_better: bool | None


MEASURES = {
    "accuracy": Measure("accuracy", "Share of predictions that are right.", True),
    "top5_accuracy": Measure(
        "top-5 accuracy", "Share of inputs whose right class is among the five most probable.", True
    ),
    "nll": Measure(
        "NLL",
        "Mean of the negative log probability (or density) of the right answer. Smaller is better; it "
        "punishes confident mistakes.",
        False,
    ),
    "brier": Measure(
        "Brier",
        "Squared distance between the probabilities and the right answer. Smaller is better.",
        False,
    ),
    "ece": Measure(
        "ECE",
        "Expected calibration error: mean gap between how sure the predictions are and how often they are"
        " right. Smaller is better.",
        False,
    ),
    "ece_equal_mass": Measure("ECE (equal mass)", "The same, in groups of equally many predictions.", False),
    "ece_classwise": Measure(
        "classwise ECE", "The same for the probability of each class, and then their mean.", False
    ),
    "mean_entropy": Measure(
        "mean entropy",
        "How undecided the predictions are on average, in nats. Neither large nor small is better.",
        None,
    ),
    "rmse": Measure(
        "RMSE", "Root of the mean squared error, in the target's units. Smaller is better.", False
    ),
    "log_density": Measure(
        "log density",
        "Mean log density that the prediction gives to the target. Larger is better.",
        True,
    ),
    "pinball_loss": Measure(
        "pinball loss",
        "Loss of predicted quantiles, mean over their levels, in the target's units. Smaller is better.",
        False,
    ),
    "crps": Measure(
        "CRPS",
        "Mean distance of the predicted distribution from the target, in its units. Smaller is better.",
        False,
    ),
    "coverage": Measure(
        "coverage",
        "Share of targets inside the central intervals of a level. Best where it is the level itself.",
        None,
    ),
    "sharpness": Measure("sharpness", "Mean width of those intervals, in the target's units.", None),
    OBSERVED: Measure(
        "observed coverage",
        "Share of right answers inside promised sets or intervals. On average at least the level.",
        None,
    ),
    ERT: Measure(
        "ERT",
        "Excess risk of the target coverage: how much coverage is missing among inputs with similar scores, sizes and "
        "predictions. It is a mean over all inputs, and the true number may be larger. About 0: the promise holds for "
        "all of them. More than two standard errors above 0: it fails for some.",
        False,
    ),
    ERT_ERROR: Measure("ERT standard error", "How far off by chance that is.", None),
    "at_least": Measure(
        "at least", "The lower end of the 95 % interval of a coverage, given so few inputs.", None
    ),
    "at_most": Measure(
        "at most", "The upper end. Where it is below the level, the group is covered too little.", None
    ),
    "set_size": Measure("set size", "Mean number of classes in those sets.", None),
    "interval_width": Measure(
        "interval width", "Mean width of those intervals, in the target's units.", None
    ),
    "mean_deviance": Measure(
        "mean deviance",
        "Mean deviance of a target from its predicted mean. Smaller is better; 0 is perfect.",
        False,
    ),
    "mean_average_precision": Measure(
        "mAP",
        "Average precision of finding a label's inputs, mean over labels. Larger is better.",
        True,
    ),
    "f1_macro": Measure(
        "F1 (macro)", "Balance of precision and recall, mean over labels. Larger is better.", True
    ),
    "f1_micro": Measure("F1 (micro)", "The same over all labels together.", True),
    "hamming_loss": Measure("Hamming loss", "Share of labels that are decided wrongly.", False),
    "rps": Measure(
        "RPS",
        "Squared distance between the cumulative probabilities of ordered classes and the right answer. "
        "Smaller is better.",
        False,
    ),
    "mae": Measure(
        "MAE",
        "Mean distance of the median class from the right one, in classes. Smaller is better.",
        False,
    ),
    "quadratic_kappa": Measure(
        "quadratic kappa",
        "Agreement with the right classes beyond chance; far misses count more. 1 is perfect.",
        True,
    ),
    "auroc": Measure(
        "AUROC",
        "How often a foreign input has a larger score than a familiar one: 1 is perfect, 0.5 is chance.",
        True,
    ),
    "aupr": Measure(
        "AUPR", "Mean precision of finding the foreign inputs by the score. Larger is better.", True
    ),
    "fpr95": Measure(
        "FPR95",
        "Share of the familiar inputs that are flagged when 95 % of the foreign ones are. Smaller is better.",
        False,
    ),
    "aurc": Measure(
        "AURC",
        "Mean loss over all shares of inputs that could be kept (area under the risk-coverage curve). "
        "Smaller is better.",
        False,
    ),
    "auc": Measure("AUC", "Area under the ROC curve of the two classes. Larger is better.", True),
    "concordance": Measure(
        "concordance", "Share of pairs of inputs whose order of events is predicted.", True
    ),
}
"""By name, without a level or a share of referred inputs."""
_AT_LEVEL = re.compile(r"^(.+?)_(\d+(?:_\d+)?)$")
_REFERRED = re.compile(r"^(.+)_referred_(\d+(?:_\d+)?)$")


def title_of(name: str) -> str:
    """A score's or measure's name as it is printed: of ``"rmse_referred_5"`` ``"RMSE, 5 % referred"``."""
    if found := _REFERRED.match(name):
        return f"{title_of(found[1])}, {_number(found[2])} % referred"
    if (found := _AT_LEVEL.match(name)) and found[1] in MEASURES:
        return f"{title_of(found[1])} of {_number(found[2])} %"
    if name.endswith(_OF_REST):
        return f"{title_of(name.removesuffix(_OF_REST))} of the rest"
    return MEASURES[name].title if name in MEASURES else name.replace("_", " ")


def _number(digits: str) -> str:
    return digits.replace("_", ".")


def measure_of(name: str) -> Measure | None:
    """The measure behind a name with a level or a share of referred inputs; None for one of the user's."""
    return MEASURES.get(_plain(name))


def meanings(names: Iterable[str]) -> dict[str, str]:
    """By name as it is written, without levels and shares, what it means; names that are not known are left out."""
    known = SCORE_MEANINGS | {name: measure.meaning for name, measure in MEASURES.items()}
    return {title_of(name): known[name] for name in map(_plain, names) if name in known}


def _plain(name: str) -> str:
    if found := _REFERRED.match(name):
        return found[1]
    found = _AT_LEVEL.match(name)
    return found[1] if found and found[1] in MEASURES else name


def foreignness(
    familiar: Prediction, foreign: Prediction, joint: Sequence[Sequence[str]] = ()
) -> dict[str, dict[str, float]]:
    """By score, and by each joint group whose scores are all known, how well it detects foreign inputs."""
    inside, outside = dict(familiar.scores()), dict(foreign.scores())
    for names in joint:
        if all(name in inside and name in outside for name in names):
            familiar_group = {name: inside[name] for name in names}
            title = "_and_".join(names)
            inside[title] = metrics.joint_tail(familiar_group, familiar_group)
            outside[title] = metrics.joint_tail(familiar_group, {name: outside[name] for name in names})
    return {
        name: {
            "auroc": metrics.ood_auroc(inside[name], outside[name]),
            "aupr": metrics.ood_aupr(inside[name], outside[name]),
            "fpr95": metrics.ood_fpr(inside[name], outside[name]),
        }
        for name in inside
        if name in outside and varies(inside[name], outside[name])
    }


def _selection(
    prediction: Prediction, targets: Tensor, rates: Sequence[float]
) -> dict[str, dict[str, float]]:
    """By score, the quality on the inputs that are not referred."""
    losses = prediction.losses(targets)
    return {
        name: {
            "aurc": metrics.risk_coverage(scores, losses).area,
            **prediction.retained_quality(scores, targets, rates),
        }
        for name, scores in prediction.scores().items()
        if varies(scores)
    }


def varies(*scores: Tensor) -> bool:
    """Whether a score varies between inputs: a plain model's epistemic variance is 0 everywhere."""
    joined = torch.cat(scores)
    return joined.numel() > 0 and bool((joined != joined[0]).any())


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


_MAX_CLASSES, _MAX_GROUPS = 10, 6  # in a table
_OF_OTHERS = ("novelty", "epistemic_variance")
"""Scores of foreign inputs, and of classes of the outputs' spread: an input with a large one may be predicted right."""
LARGE_WHERE = "large_where"
_OF_REST = "_of_rest"
ReportTable = tuple[list[str], list[list[Any]]]
"""A header and rows of cells."""


@dataclass(frozen=True, eq=False, repr=False)
class Measurements:
    """What the tables, the figures and the page of an `Evaluation` show.

    Attributes:
        predictions: by row (a compared model), by data set: ``"test"`` and the foreign ones.
        targets: of the test data: labels (inputs,), or values shaped like the mean.
        galleries: images worth a look, by title.
        score: the uncertainty that `threshold` and the figures use if none is named.
        referral_rates: shares of referred inputs.
        bins: of calibration errors.
        class_names: by index, or None.
        display: input image to colours, or None.
        joint: groups of scores by which foreign data are detected, beside each score alone.
        referral: by which `referred` are counted; None for a rate of 0.05 where held-out scores allow it.
    """

    predictions: Mapping[str, Mapping[str, Prediction]]
    targets: Tensor
    galleries: Mapping[str, Sequence[Example]]
    score: str | None
    referral_rates: tuple[float, ...]
    bins: int
    class_names: Sequence[str] | None = None
    display: Callable[[Tensor], Tensor] | None = None
    joint: tuple[tuple[str, ...], ...] = ()
    referral: Referral | None = None

    def __post_init__(self) -> None:
        for name, by_set in self.predictions.items():
            for data, prediction in by_set.items():
                scores = next(iter(prediction.scores().values()))
                if bool(scores.isnan().any()):
                    raise NonFiniteError(
                        f"{int(scores.isnan().sum())} of {len(scores)} predictions of {name!r} on {data!r} are NaN; "
                        f"look at the inputs, or at the model in this number format."
                    )
        if self.referral is not None:
            for name in self.names:
                self.referral_reasons(name)

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
            row: _selection(by_set[FAMILIAR], self.targets, self.referral_rates)
            for row, by_set in self.predictions.items()
        }

    @cached_property
    def promised(self) -> dict[str, dict[str, float]]:
        """By row with held-out scores: coverage and mean size of the sets, or width of the intervals, that it promises,
        at the levels of 80, 90 and 95 % that there are enough scores for; and of `coverage_by_group` the excess risk.
        """
        grouped = self.coverage_by_group
        return {row: promised(found, grouped.get(row)) for row, found in self._coverages.items() if found}

    @cached_property
    def promised_by_class(self) -> dict[str, dict[str, dict[str, float]]]:
        """By row with held-out scores, and class: `promised` of its inputs."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for row, kept in self._coverages.items():
            by_class = promised_by_class(kept)
            if by_class:
                found[row] = {self.class_name(own): values for own, values in by_class.items()}
        return found

    @cached_property
    def coverage_by_group(self) -> dict[str, GroupedCoverage]:
        """By row with held-out scores: where its promise of 90 %, or of 80 % where those are too few, fails."""
        grouped = {
            row: coverage_by_group(self._test(row), kept, self.class_names)
            for row, kept in self._coverages.items()
        }
        return {row: found for row, found in grouped.items() if found is not None}

    @cached_property
    def _coverages(self) -> dict[str, dict[float, Coverage]]:
        """By row and level, what is kept of promises."""
        return {row: coverages(by_set[FAMILIAR], self.targets) for row, by_set in self.predictions.items()}

    def class_name(self, index: int) -> str:
        """What a class is called."""
        names = self.class_names
        return str(names[index]) if names is not None and index < len(names) else f"class {index}"

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
        return self._test(self.names[0]).classes is not None

    @property
    def default_score(self) -> str:
        """The name of the score used where none is named."""
        return self.score or self._test(self.names[0]).default_score

    def losses(self, name: str | None = None) -> Tensor:
        """Per test input ``(inputs,)``: 1 for a wrong class, the squared error for values."""
        return self._test(name).losses(self.targets)

    def threshold(self, rate: float, score: str | None = None, name: str | None = None) -> float:
        """The value of a score above which at most a share `rate` of the test inputs lies.

        Args:
            rate: in [0, 1).
            score: one of `posthoc_uq.likelihoods.SCORES`; by default the one of `evaluate`, or entropy (standard
                deviation for values).
            name: the row; by default the last.

        Raises:
            PosthocUQError: an unknown row or score, or a rate out of range.
        """
        return metrics.referral_threshold(score_of(self._test(name), score or self.default_score), rate)

    def referral_reasons(self, name: str | None = None) -> dict[str, dict[str, Tensor]]:
        """By data set and score, (inputs,) of booleans: which the score refers by the held-out scores in the posterior
        of a row.

        Args:
            name: the row; by default the last.

        Returns:
            Empty where the row has no held-out scores.

        Raises:
            PosthocUQError: it has some, and they do not allow the `referral` of `evaluate`.
        """
        predictions, referral = self.predictions[self._row(name)], self.referral or Referral()
        if self._test(name).promises is None:
            return {}
        try:
            return {data: referral.reasons(prediction) for data, prediction in predictions.items()}
        except PosthocUQError:
            if self.referral is not None:
                raise
            return {}

    @cached_property
    def referred(self) -> list[dict[str, Any]]:
        """By row and data set: the share of inputs that is referred, in all and by each score; of the test inputs also
        how good the rest is, and of classes the share of the mistakes that is referred.
        """
        found: list[dict[str, Any]] = []
        for row in self.names:
            for data, reasons in self.referral_reasons(row).items():
                flags = torch.stack(list(reasons.values())).any(dim=0)
                shares = {f"by_{score}": float(f.double().mean()) for score, f in reasons.items()}
                found.append({"model": row, "data": data, "referred": float(flags.double().mean()), **shares})
                if data == FAMILIAR:
                    prediction, losses = self._test(row), self.losses(row)
                    if not bool(flags.all()):
                        rest = prediction.shown_loss(float(losses[~flags].mean()))
                        found[-1][f"{prediction.loss_name}{_OF_REST}"] = rest
                    if prediction.loss_name == "accuracy" and bool((losses > 0).any()):
                        found[-1]["mistakes_referred"] = float(losses[flags].sum() / losses.sum())
        return found

    def tables(self) -> dict[str, ReportTable]:
        """By title, a header of names (`title_of` prints them) and rows of cells: quality, promises, foreign data,
        selective prediction, referral.
        """
        columns = _distinct(measure for values in self.metrics.values() for measure in values)
        quality = [
            [name, *(values.get(column) for column in columns)] for name, values in self.metrics.items()
        ]
        by_title: dict[str, ReportTable] = {
            f"Quality on {len(self.targets)} test inputs": (["model", *columns], quality)
        }
        for data in self.foreign_names:
            rows: list[list[Any]] = [
                [name, score, _use_of(score), *values.values()]
                for name in self.names
                for score, values in self.foreign[name][data].items()
            ]
            by_title[f"Telling {data} from the test inputs"] = (
                ["model", "score", LARGE_WHERE, "auroc", "aupr", "fpr95"],
                rows,
            )
        by_title["Promised sets and intervals"] = _table(
            {row: {"": each} for row, each in self.promised.items()}, ""
        )
        by_title["Promised sets by class, the least covered first"] = _table(
            {row: _least_covered(by_class) for row, by_class in self.promised_by_class.items()}, "class"
        )
        by_title["Coverage of promises by group, the least covered first"] = self._groups_table()
        columns, rows = _table(self._by_scores_of_errors(), "score")
        by_title["Leaving the least certain inputs to a person"] = (
            [*columns[:2], LARGE_WHERE, *columns[2:]],
            [[*row[:2], _use_of(row[1]), *row[2:]] for row in rows],
        )
        by_title[f"Referred by the held-out scores, {self.referral or Referral()}"] = self._referred_table()
        return {title: table for title, table in by_title.items() if table[1]}

    def _groups_table(self) -> ReportTable:
        rows: list[list[Any]] = [
            [row, f"{100 * found.level:g} %", f"{title_of(by)} {name}", inputs, coverage, low, high]
            for row, found in self.coverage_by_group.items()
            for by, name, inputs, coverage, low, high in found.least_covered(_MAX_GROUPS)
        ]
        return ["model", "level", "group", "inputs", OBSERVED, "at_least", "at_most"], rows

    def _by_scores_of_errors(self) -> dict[str, dict[str, dict[str, float]]]:
        """`selective` without the scores that do not tell where errors are, unless one was asked for."""
        others = _OF_OTHERS if self.classification else _OF_OTHERS[:1]
        return {
            row: {
                score: values
                for score, values in by_score.items()
                if score not in others or score == self.default_score
            }
            for row, by_score in self.selective.items()
        }

    def _referred_table(self) -> ReportTable:
        columns = _distinct(column for row in self.referred for column in row)
        return columns, [[row.get(column) for column in columns] for row in self.referred]

    def _row(self, name: str | None) -> str:
        if name is not None and name not in self.predictions:
            raise PosthocUQError(
                f"There is no row {name!r}; there are {self.names}.{did_you_mean(name, self.names)}"
            )
        return self.names[-1] if name is None else name

    def _test(self, name: str | None) -> Prediction:
        return self.predictions[self._row(name)][FAMILIAR]


def _use_of(score: str) -> str:
    """What a score is for; of several that are used together, to detect foreign inputs."""
    return SCORE_USES.get(score, "an input is foreign")


def _table(by_row: Mapping[str, Mapping[str, Mapping[str, float]]], second: str) -> ReportTable:
    """Numbers by row and by what is called `second`, which has no column where it is empty, as a table."""
    measures = _distinct(m for by in by_row.values() for values in by.values() for m in values)
    rows: list[list[Any]] = [
        [row, *([own] if second else []), *(values.get(measure) for measure in measures)]
        for row, by in by_row.items()
        for own, values in by.items()
    ]
    return ["model", *([second] if second else []), *measures], rows


def _least_covered(by_class: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """The classes with the smallest coverage at the highest level, of which a table has room for some."""

    def coverage(item: tuple[str, Mapping[str, float]]) -> float:
        return [value for name, value in item[1].items() if name.startswith(OBSERVED)][-1]

    return dict(sorted(by_class.items(), key=coverage)[:_MAX_CLASSES])


def at_one_level(table: ReportTable) -> ReportTable:
    """A table of promises at 90 %, or at the highest level below it, without the columns of other levels; any other
    table as it is."""
    header, rows = table
    levels = [column.removeprefix(f"{OBSERVED}_") for column in header if column.startswith(f"{OBSERVED}_")]
    if len(levels) < 2:
        return table
    shown = max((level for level in levels if float(level) <= 90), key=float)
    others = tuple(f"_{level}" for level in levels if level != shown)
    kept = [i for i, column in enumerate(header) if not column.endswith(others)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def column_meanings(header: Sequence[str]) -> list[str]:
    """What the columns of promises mean, a line each."""
    known = {*map(_plain, header)}
    return [
        f"{MEASURES[name].title}: {MEASURES[name].meaning}"
        for name in (OBSERVED, ERT, "at_least", "at_most")
        if name in known
    ]


def column_decimals(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[int]:
    """How many decimals each column is shown with."""
    return [decimals([row[i] for row in rows]) for i in range(len(header))]


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
