"""The tables of an evaluation: a header and rows of cells, for text and for the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from posthoc_uq.evaluation.measurements import Measurements
from posthoc_uq.evaluation.measures import referred_shares

Table = tuple[list[str], list[list[Any]]]


def tables(evaluation: Measurements) -> dict[str, Table]:
    """By title, those that have rows: quality, foreign data, selective prediction, what was referred."""
    columns = _distinct(measure for values in evaluation.metrics.values() for measure in values)
    quality_rows = [
        [name, *(values.get(column) for column in columns)] for name, values in evaluation.metrics.items()
    ]
    found: dict[str, Table] = {
        f"Quality on {len(evaluation.targets)} test inputs": (["model", *columns], quality_rows)
    }
    for data in evaluation.foreign_names:
        rows = [
            [name, score, *values.values()]
            for name in evaluation.names
            for score, values in evaluation.foreign[name][data].items()
        ]
        found[f"Telling {data} from the test inputs"] = (["model", "score", "AUROC", "AUPR", "FPR95"], rows)
    found["Leaving the least certain inputs to a person"] = _selective(evaluation)
    found["Referred by the thresholds of the posterior"] = _referred(evaluation)
    return {title: table for title, table in found.items() if table[1]}


def _selective(evaluation: Measurements) -> Table:
    """By row and score, how well what remains is predicted."""
    by_row = evaluation.selective
    measures = _distinct(m for by in by_row.values() for values in by.values() for m in values)
    rows = [
        [name, score, *(values.get(measure) for measure in measures)]
        for name in evaluation.names
        for score, values in by_row[name].items()
    ]
    return ["model", "score", *measures], rows


def _referred(evaluation: Measurements) -> Table:
    """By row and data set, the share of inputs that the posterior's thresholds refer, and that each score does."""
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
