"""The rows of a table of predictions: which columns a kind of prediction has, and its numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.tables import csv_text
from posthoc_uq.likelihoods.class_prediction import ClassPrediction, MultilabelPrediction
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.likelihoods.value_prediction import RegressionPrediction
from posthoc_uq.posteriors.referral import thresholds_of

_SHOWN = ("entropy", "mutual_information")


class Flags(NamedTuple):
    """For each input, the scores that refer it, and how extreme it is among familiar ones (with several scores)."""

    reasons: list[list[str]]
    tails: list[float] | None


def _ranked(prediction: Prediction) -> int | None:
    """How many classes, or labels, have a probability; None where values are predicted."""
    return prediction.probs.shape[1] if isinstance(prediction, MultilabelPrediction) else prediction.classes


def _by_input(prediction: PositionPrediction) -> Tensor:
    """The predicted class of every position, (inputs, positions)."""
    return prediction.predicted().flatten(1)


class PredictionTable:
    """The columns of one kind of prediction."""

    def __init__(
        self,
        prediction: Prediction,
        referral: Mapping[str, Any],
        names: Sequence[str] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._names, self._level = names, options["level"]
        self._largest: list[str] = []
        self._scores: list[str] = []
        classes = _ranked(prediction)
        if classes is not None:
            if names is not None and len(names) != classes:
                raise PosthocUQError(
                    f"There are {len(names)} class names, and the model has {classes} outputs."
                )
            self._k = min(options["top_k"], classes)
            positions = isinstance(prediction, PositionPrediction)
            number = "share" if positions else "probability"
            columns = [f"{what}_{i}" for i in range(1, self._k + 1) for what in ("label", number)]
            # the scores that decide the flag are shown
            self._scores = [*_SHOWN, *(score for score in thresholds_of(referral) if score not in _SHOWN)]
            if prediction.novelty_ratio is not None and "novelty" not in self._scores:
                self._scores.append("novelty")
            columns += self._scores
            if isinstance(prediction, PositionPrediction):
                known = prediction.scores_by_position()
                self._largest = [name for name in self._scores if name in known]
                columns += [f"largest_{name}" for name in self._largest]
        else:
            mean = cast(RegressionPrediction, prediction).mean
            outputs = 1 if mean.ndim == 1 else mean.shape[1]
            kinds = ("mean", "standard_deviation", "epistemic_sd", "lower", "upper")
            columns = [
                kind if outputs == 1 else f"{kind}_{i}" for i in range(1, outputs + 1) for kind in kinds
            ]
            self._scores = [] if prediction.novelty_ratio is None else ["novelty"]
            columns += self._scores
        self._several = "scores" in referral
        self.header = ["file", *columns, "flag", *(["reason", "tail"] if self._several else [])]

    def rows(self, prediction: Prediction, files: Sequence[str], flags: Flags | None) -> list[list[str]]:
        """The rows of one batch."""
        if isinstance(prediction, PositionPrediction):
            middle = self._maps(prediction)
        elif isinstance(prediction, (ClassPrediction, MultilabelPrediction)):
            middle = self._classes(prediction)
        else:
            middle = self._values(cast(RegressionPrediction, prediction))
        return [
            [csv_text(file), *cells, *end]
            for file, cells, end in zip(files, middle, self._ends(flags, len(files)), strict=True)
        ]

    def _ends(self, flags: Flags | None, count: int) -> list[list[str]]:
        """The last columns: flag, and with several scores reason and tail."""
        if flags is None:
            return [["", "", ""] if self._several else [""]] * count
        ends = [[str(int(bool(names)))] for names in flags.reasons]
        if flags.tails is None:
            return ends
        return [
            [*end, "+".join(names), f"{tail:.6g}"]
            for end, names, tail in zip(ends, flags.reasons, flags.tails, strict=True)
        ]

    def _classes(self, prediction: ClassPrediction | MultilabelPrediction) -> list[list[str]]:
        top = prediction.top_k(self._k)
        return self._ranked(top.labels, top.probabilities, self._known(prediction.scores()))

    def _maps(self, prediction: PositionPrediction) -> list[list[str]]:
        """The classes that most positions of an input have, with their shares; means of the scores, and the largest."""
        counts = torch.stack([row.bincount(minlength=prediction.classes) for row in _by_input(prediction)])
        shares, labels = (counts / counts.sum(1, keepdim=True)).topk(self._k)
        largest = [prediction.per_input(name, "largest").tolist() for name in self._largest]
        return self._ranked(labels, shares, [*self._known(prediction.scores()), *largest])

    def _known(self, scores: Mapping[str, Tensor]) -> list[list[float] | None]:
        """The columns of scores; None where the head does not know one."""
        return [scores[name].tolist() if name in scores else None for name in self._scores]

    def _ranked(
        self, labels: Tensor, values: Tensor, scores: Sequence[Sequence[float] | None]
    ) -> list[list[str]]:
        """A row an input: its labels (inputs, k) with their values, and its scores."""
        rows: list[list[str]] = []
        for i, (own_labels, own_values) in enumerate(zip(labels.tolist(), values.tolist(), strict=True)):
            row: list[str] = []
            for label, value in zip(own_labels, own_values, strict=True):
                name = str(label) if self._names is None else csv_text(str(self._names[label]))
                row += [name, f"{value:.6g}"]
            rows.append(row + ["" if score is None else f"{score[i]:.6g}" for score in scores])
        return rows

    def _values(self, prediction: RegressionPrediction) -> list[list[str]]:
        lower, upper = prediction.interval(self._level)
        deviation = prediction.standard_deviation
        spread = prediction.epistemic_variance.sqrt()
        columns = torch.stack([prediction.mean, deviation, spread, lower, upper], dim=-1)
        columns = columns.reshape(len(prediction), -1)
        if prediction.novelty_ratio is not None:
            columns = torch.cat([columns, prediction.novelty_ratio.to(columns).unsqueeze(1)], dim=1)
        return [[f"{value:.6g}" for value in row] for row in columns.tolist()]
