"""Predictions of a folder as a CSV file, batch by batch."""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.cli.atomic_text import atomic_text_file
from posthoc_uq.cli.data import Data, data_of
from posthoc_uq.cli.maps import make_folder, write_maps
from posthoc_uq.cli.meaning import meaning_of
from posthoc_uq.cli.posterior_files import check_posterior_file, model_and_posterior, output_names
from posthoc_uq.cli.prediction_table import Flags, PredictionTable
from posthoc_uq.cli.predictors import predictor_of
from posthoc_uq.core.batches import Bar, BatchReader, batches
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import refer, referral_reasons, referral_tail
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction

_SHOWN = ("entropy", "mutual_information")


def predict_to_csv(
    path: str, spec: str, output: str, options: Mapping[str, Any], progress: bool
) -> dict[str, Any]:
    """Predict everything and write the file; the facts that the command prints, as plain values."""
    check_posterior_file(path)
    source, posterior = model_and_posterior(path, options)
    data = data_of(
        spec,
        source,
        options,
        meaning_of(posterior),
        labels=False,
        split="test",
        numbered=True,
        skip=options["skip_unreadable"],
    )
    if options["maps"] is not None:
        make_folder(options["maps"], data.files, {**options, "file": path, "data": spec, "output": output})
    predictor = predictor_of(source, posterior, options)
    names = output_names(source, posterior, options["class_names"], data)
    start = time.perf_counter()
    rows = flagged = 0
    applies = False
    table: PredictionTable | None = None
    with atomic_text_file(output) as file:
        writer = csv.writer(file)
        with torch.no_grad(), isolated_random_state(), Bar(data.loader, "predict", progress) as bar:
            for batch in batches(data.loader, BatchReader(source.device)):
                prediction = predictor(*batch.args, **batch.kwargs).to("cpu")
                if table is None:
                    applies = _applies(predictor, prediction)
                    table = PredictionTable(prediction, posterior.history.referral, names, options)
                    writer.writerow(table.header)
                numbers = batch.targets if data.numbered else None
                flags = _flags(predictor, prediction) if applies else None
                names_of_rows = _files(data, numbers, rows, len(prediction))
                writer.writerows(table.rows(prediction, names_of_rows, flags))
                if options["maps"] is not None:
                    write_maps(options["maps"], names_of_rows, _pixels(prediction))
                rows += len(prediction)
                flagged += 0 if flags is None else sum(bool(names) for names in flags.reasons)
                bar.advance(len(prediction))
    return {
        "output": output,
        "maps": options["maps"],
        "rows": rows,
        "flagged": flagged if applies else None,
        "skipped": [trouble.name for trouble in data.skipped],
        "seconds": time.perf_counter() - start,
        "head": predictor.identity(),
    }


def _pixels(prediction: Prediction) -> PositionPrediction:
    if not isinstance(prediction, PositionPrediction):
        raise PosthocUQError(
            "--maps is for models that predict the class of every pixel, and this one does not."
        )
    return prediction


def _flags(predictor: Predictor, prediction: Prediction) -> Flags:
    by_score = referral_reasons(predictor, prediction)
    flags = zip(*(flag.tolist() for flag in by_score.values()), strict=True)
    reasons = [[name for name, flag in zip(by_score, row, strict=True) if flag] for row in flags]
    several = "scores" in predictor.posterior.history.referral
    return Flags(reasons, referral_tail(predictor, prediction).tolist() if several else None)


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
