"""Scores of inputs in the order in which they came, from a CSV file of ``predict`` or ``serve``."""

from __future__ import annotations

import csv
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.files import check_regular
from posthoc_uq.storage.atomic import checked_target
from posthoc_uq.tables import csv_text, text_of_csv

SCORES = ("entropy", "mutual_information", "novelty", "standard_deviation")
"""The scores that are watched, by the names of their columns."""

COLUMNS = (
    "time",
    "file",
    "label_1",
    "probability_1",
    "mean",
    *SCORES,
    "flag",
    "reason",
    "tail",
)
"""Columns of the file that ``serve`` writes; those that a kind of prediction does not have stay empty."""

_OUTPUT = re.compile(r"_\d+$")

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Records:
    """Inputs with their scores.

    Attributes:
        scores: by name, (inputs,); NaN where an input has none. Only those that some input has.
        referred: (inputs,), 1 and 0; NaN where there was no threshold.
        times: when each came, as text; empty where that is not known.
        labels: what was predicted, in a few words.
        files: the input's file, or the thumbnail that was kept of it; empty where there is none.
    """

    scores: dict[str, Numbers]
    referred: Numbers
    times: list[str]
    labels: list[str]
    files: list[str]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def novelty_score(self) -> str | None:
        """The score by which inputs are called novel: the novelty, or another where it is not known."""
        ordered = ("novelty", "mutual_information", "standard_deviation", "entropy")
        return next((name for name in ordered if name in self.scores), None)

    @property
    def share_referred(self) -> float | None:
        """Of those inputs for which that was decided."""
        known = self.referred[~np.isnan(self.referred)]
        return float(known.mean()) if len(known) else None

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], name: str = "the rows") -> Records:
        """From rows with columns as in `COLUMNS`, or as ``predict`` writes them; other columns are left aside.

        Raises:
            PosthocUQError: a score is no number.
        """
        groups: dict[str, list[str]] = {}
        for column in rows[0] if rows else ():
            score = _OUTPUT.sub("", column) if column.startswith("standard_deviation_") else column
            if score in SCORES:
                groups.setdefault(score, []).append(column)
        scores: dict[str, Numbers] = {}
        for score, columns in groups.items():
            # of several outputs, the mean over them, as `Prediction.scores` has it
            values = np.mean([_numbers(rows, column, name) for column in columns], axis=0)
            if not np.isnan(values).all():
                scores[score] = values
        known = bool(rows) and "flag" in rows[0]
        referred = _numbers(rows, "flag", name) if known else np.full(len(rows), np.nan)
        return cls(
            scores,
            referred,
            [str(row.get("time") or "") for row in rows],
            [_label(row) for row in rows],
            [str(row.get("file") or "") for row in rows],
        )

    @classmethod
    def read(cls, path: str, what: str, last: int | None = None) -> Records:
        """From a CSV file.

        Args:
            path: of the file.
            what: it is, in words, for errors.
            last: rows to take, from the end; None for all.

        Raises:
            PosthocUQError: it cannot be read, or has none of the scores.
        """
        check_regular(path, "The table")
        try:
            with open(path, encoding="utf-8", newline="") as file:
                rows = list(deque(csv.DictReader(file), maxlen=last))
        except OSError as error:
            raise PosthocUQError(f"'{path}' cannot be read: {error.strerror}.") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise PosthocUQError(f"'{path}' is no CSV file in UTF-8: {error}.") from error
        if not rows:
            raise PosthocUQError(f"'{path}' has no rows; {what} are needed.")
        for row in rows:
            row |= {name: text_of_csv(row[name]) for name in ("file", "label_1") if row.get(name)}
        found = cls.of(rows, f"'{path}'")
        if not found.scores:
            raise PosthocUQError(
                f"'{path}' has none of the columns {', '.join(SCORES)}; it must be a CSV of posthoc-uq predict or "
                f"of posthoc-uq serve --log."
            )
        return found


def _numbers(rows: Sequence[Mapping[str, Any]], column: str, name: str) -> Numbers:
    values = np.full(len(rows), np.nan)
    for place, row in enumerate(rows):
        text = row.get(column)
        if text is None or text == "":
            continue
        try:
            values[place] = float(text)
        except (TypeError, ValueError):
            raise PosthocUQError(
                f"Row {place + 1} of {name} has {str(text)[:40]!r} as {column}; that must be a number."
            ) from None
    return values


def _label(row: Mapping[str, Any]) -> str:
    if row.get("label_1"):
        probability = row.get("probability_1")
        return f"{row['label_1']}" + (
            "" if probability in (None, "") else f" ({float(str(probability)):.2f})"
        )
    mean = row.get("mean", row.get("mean_1"))
    return "" if mean in (None, "") else str(mean)


class ScoreLog:
    """The CSV file to which a server adds one row for each input. Only the user may read it (mode 0600).

    Raises:
        PosthocUQError: it cannot be written, or there is a file with other columns.
    """

    def __init__(self, path: str) -> None:
        target = checked_target(path)
        header = ",".join(COLUMNS)
        try:
            self._file = os.fdopen(
                os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600),
                "r+",
                encoding="utf-8",
                newline="",
            )
            first = self._file.readline().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PosthocUQError(f"'{path}' cannot be written: {error}.") from error
        if first and first != header:
            self._file.close()
            raise PosthocUQError(f"'{path}' is there already, with other columns; give the log another name.")
        self._lock = Lock()
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        if not first:
            self._writer.writeheader()
            self._file.flush()

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows, and hand them to the operating system."""
        with self._lock:
            self._writer.writerows([{name: _cell(row.get(name)) for name in COLUMNS} for row in rows])
            self._file.flush()

    def close(self) -> None:
        """No more rows."""
        self._file.close()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        return csv_text(value)
    return f"{value:.6g}" if isinstance(value, float) else value
