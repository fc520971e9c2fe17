"""Predictions of a folder as a CSV file, batch by batch."""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from posthoc_uq.cli.atomic_text import atomic_text_file
from posthoc_uq.cli.data import Data, data_of
from posthoc_uq.cli.models import source_of
from posthoc_uq.cli.posterior_files import (
    check_output,
    check_posterior_file,
    output_names,
    posterior_of,
)
from posthoc_uq.cli.predictors import predictor_of
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import refer, referral_reasons, referral_tail
from posthoc_uq.loaders import Bar, BatchReader, batches
from posthoc_uq.posteriors.referral import thresholds_of
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.multilabel import MultilabelPrediction
from posthoc_uq.predictions.regression import RegressionPrediction
from posthoc_uq.randomness import isolated_random_state

_SHOWN = ("entropy", "mutual_information")


def predict_to_csv(
    path: str, spec: str, output: str, options: Mapping[str, Any], progress: bool
) -> dict[str, Any]:
    """Predict everything and write the file; the facts that the command prints, as plain values."""
    check_posterior_file(path)
    check_output(output)
    source = source_of(options)
    posterior = posterior_of(path, source)
    data = data_of(
        spec, source, options, labels=False, split="test", numbered=True, skip=options["skip_unreadable"]
    )
    predictor = predictor_of(source, posterior, options)
    names = output_names(source, data, options["class_names"])
    start = time.perf_counter()
    rows = flagged = 0
    applies = False
    table: _Table | None = None
    with atomic_text_file(output) as file:
        writer = csv.writer(file)
        with torch.no_grad(), isolated_random_state(), Bar(data.loader, "predict", progress) as bar:
            for batch in batches(data.loader, BatchReader(source.device)):
                prediction = predictor(*batch.args, **batch.kwargs).to("cpu")
                if table is None:
                    applies = _applies(predictor, prediction)
                    table = _Table(prediction, posterior.history.referral, names, options)
                    writer.writerow(table.header)
                numbers = batch.targets if data.numbered else None
                flags = _flags(predictor, prediction) if applies else None
                writer.writerows(table.rows(prediction, _files(data, numbers, rows, len(prediction)), flags))
                rows += len(prediction)
                flagged += 0 if flags is None else sum(bool(names) for names in flags.reasons)
                bar.advance(len(prediction))
    return {
        "output": output,
        "rows": rows,
        "flagged": flagged if applies else None,
        "skipped": [trouble.name for trouble in data.skipped],
        "seconds": time.perf_counter() - start,
        "head": predictor.identity(),
    }


class _Flags(NamedTuple):
    """For each input, the scores that refer it, and how extreme it is among familiar ones (with several scores)."""

    reasons: list[list[str]]
    tails: list[float] | None


def _flags(predictor: Predictor, prediction: Prediction) -> _Flags:
    by_score = referral_reasons(predictor, prediction)
    flags = zip(*(flag.tolist() for flag in by_score.values()), strict=True)
    reasons = [[name for name, flag in zip(by_score, row, strict=True) if flag] for row in flags]
    several = "scores" in predictor.posterior.history.referral
    return _Flags(reasons, referral_tail(predictor, prediction).tolist() if several else None)


def _applies(predictor: Predictor, prediction: Prediction) -> bool:
    """Whether there is a threshold to flag by; warns where the file has one that does not apply."""
    if not predictor.posterior.history.referral:
        return False
    try:
        refer(predictor, prediction)
    except PosthocUQError as error:
        warnings.warn(f"The column flag stays empty. {error}", stacklevel=2)
        return False
    return True


def _files(data: Data, numbers: Tensor | None, start: int, count: int) -> Sequence[str]:
    item_numbers: Sequence[int] = range(start, start + count) if numbers is None else numbers.tolist()
    if numbers is None and data.rows is not None:
        item_numbers = data.rows[start : start + count]
    return (
        [str(number) for number in item_numbers]
        if data.files is None
        else [data.files[number] for number in item_numbers]
    )


def _ranked(prediction: Prediction) -> int | None:
    """How many classes, or labels, have a probability; None where values are predicted."""
    return prediction.probs.shape[1] if isinstance(prediction, MultilabelPrediction) else prediction.classes


class _Table:
    """The columns of one kind of prediction."""

    def __init__(
        self,
        prediction: Prediction,
        referral: Mapping[str, Any],
        names: Sequence[str] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._names, self._level = names, options["level"]
        self._scores: list[str] = []
        classes = _ranked(prediction)
        if classes is not None:
            if names is not None and len(names) != classes:
                raise PosthocUQError(
                    f"There are {len(names)} class names, and the model has {classes} outputs."
                )
            self._k = min(options["top_k"], classes)
            columns = [f"{what}_{i}" for i in range(1, self._k + 1) for what in ("label", "probability")]
            # the scores that decide the flag are shown
            self._scores = [*_SHOWN, *(score for score in thresholds_of(referral) if score not in _SHOWN)]
            if prediction.novelty_ratio is not None and "novelty" not in self._scores:
                self._scores.append("novelty")
            columns += self._scores
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

    def rows(self, prediction: Prediction, files: Sequence[str], flags: _Flags | None) -> list[list[str]]:
        """The rows of one batch."""
        if isinstance(prediction, (ClassPrediction, MultilabelPrediction)):
            middle = self._classes(prediction)
        else:
            middle = self._values(cast(RegressionPrediction, prediction))
        return [
            [file, *cells, *end]
            for file, cells, end in zip(files, middle, self._ends(flags, len(files)), strict=True)
        ]

    def _ends(self, flags: _Flags | None, count: int) -> list[list[str]]:
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
        known = prediction.scores()
        scores = [known[name].tolist() if name in known else None for name in self._scores]
        rows: list[list[str]] = []
        for i, (labels, values) in enumerate(
            zip(top.labels.tolist(), top.probabilities.tolist(), strict=True)
        ):
            row: list[str] = []
            for label, value in zip(labels, values, strict=True):
                name = str(label) if self._names is None else str(self._names[label])
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
