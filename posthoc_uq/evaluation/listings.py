"""The tables of an evaluation: a header and rows of cells, for text and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from posthoc_uq.evaluation.measurements import Measurements
from posthoc_uq.evaluation.measures import referred_shares
from posthoc_uq.tables import decimals

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
