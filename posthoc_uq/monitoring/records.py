"""Scores of inputs in the order in which they came, from a CSV file of ``predict`` or ``serve``."""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import StringIO
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

_HEADER = (",".join(COLUMNS) + "\n").encode()
_OUTPUT = re.compile(r"_\d+$")
_BREAK = re.compile(r"[\r\n\0]+")
_LINES = 50  # that a value in quotes may run over
_BLOCK = 2**16  # bytes that are searched at once for the end of a row

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
        left_out: rows of the file that are torn or garbled.
    """

    scores: dict[str, Numbers]
    referred: Numbers
    times: list[str]
    labels: list[str]
    files: list[str]
    left_out: int = 0

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
        columns = rows[0] if rows else ()
        groups: dict[str, list[str]] = {}
        for column in columns:
            if (score := _score(column)) is not None:
                groups.setdefault(score, []).append(column)
        scores: dict[str, Numbers] = {}
        for score, outputs in groups.items():
            # of several outputs, the mean over them, as `Prediction.scores` has it
            values = np.mean([_numbers(rows, column, name) for column in outputs], axis=0)
            if not np.isnan(values).all():
                scores[score] = values
        referred, probabilities = (
            _numbers(rows, column, name) if column in columns else np.full(len(rows), np.nan)
            for column in ("flag", "probability_1")
        )
        return cls(
            scores,
            referred,
            [str(row.get("time") or "") for row in rows],
            [_label(row, value) for row, value in zip(rows, probabilities.tolist(), strict=True)],
            [str(row.get("file") or "") for row in rows],
        )

    @classmethod
    def read(cls, path: str, what: str, last: int | None = None) -> Records:
        """From a CSV file. Rows that are torn or garbled, as a power cut or a full disk leaves them, are left out, with
        a warning that says how many there are, and where.

        Args:
            path: of the file.
            what: it is, in words, for errors.
            last: rows to take, from the end; None for all.

        Raises:
            PosthocUQError: it cannot be read, or has none of the scores, or no whole row.
        """
        check_regular(path, "The table")
        try:
            with open(path, encoding="utf-8", errors="replace", newline="") as file:
                lines = _lines(file)
                header = next((values for _, values in lines), [])
                if header is None or any("\ufffd" in column for column in header):
                    raise PosthocUQError(f"'{path}' is no CSV file in UTF-8.")
                rows = deque(lines, maxlen=last)
        except OSError as error:
            raise PosthocUQError(f"'{path}' cannot be read: {error.strerror}.") from error
        if not rows:
            raise PosthocUQError(f"'{path}' has no rows; {what} are needed.")
        found = list(_rows(rows, header))
        faults = [(line, fault) for line, _, fault in found if fault]
        if len(faults) == len(found):
            raise PosthocUQError(f"Row 1 of '{path}' {faults[0][1]}, and no other row is in order.")
        if faults:
            line, fault = faults[0]
            many = f"{len(faults):,} rows of '{path}' are" if len(faults) > 1 else f"A row of '{path}' is"
            warnings.warn(
                f"{many} left out: line {line:,} {fault}{', and so on' if len(faults) > 1 else ''}.",
                stacklevel=2,
            )
        whole = [row for _, row, fault in found if not fault]
        for row in whole:
            row |= {name: text_of_csv(row[name]) for name in ("file", "label_1") if row.get(name)}
        records = cls.of(whole, f"'{path}'")
        if not records.scores:
            raise PosthocUQError(
                f"'{path}' has none of the columns {', '.join(SCORES)}; it must be a CSV of posthoc-uq predict or "
                f"of posthoc-uq serve --log."
            )
        return replace(records, left_out=len(faults))


def _lines(file: Iterator[str]) -> Iterator[tuple[int, list[str] | None]]:
    """The number of the line where each row of a CSV begins, and its values; None for a row that cannot be parsed.

    A quote that is not closed makes csv's own reader swallow the rows after it. Here a row begins anew with every line,
    unless the next few lines close the quote and give as many values as the first row, the header, has.
    """
    ahead: deque[str] = deque()
    number, columns = 1, 0
    while (line := ahead.popleft() if ahead else next(file, None)) is not None:
        values, several = _values([line]), [line]
        while values is None and len(several) <= _LINES:
            if len(several) > len(ahead):
                more = next(file, None)
                if more is None:
                    break
                ahead.append(more)
            several.append(ahead[len(several) - 1])
            values = _values(several)
            if values is not None and len(values) != (columns or len(values)):
                values = None
        count = len(several) if values is not None else 1
        for _ in range(count - 1):
            ahead.popleft()
        if values != []:
            yield number, values
            columns = columns or len(values or ())
        number += count


def _values(lines: Sequence[str]) -> list[str] | None:
    """The values of one row, none for a blank line; None where it cannot be parsed."""
    text = lines[0] if len(lines) == 1 else "".join(lines)
    if "\0" in text:
        return None
    if '"' not in text:  # by far the most, and four times as fast
        plain = text.rstrip("\r\n")
        return plain.split(",") if plain else []
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error:
        return None
    return rows[0] if rows else []


def _rows(
    lines: Iterable[tuple[int, list[str] | None]], header: Sequence[str]
) -> Iterator[tuple[int, dict[str, str], str]]:
    """For each row its line, its values by column, and what is wrong with it, in words, or nothing."""
    numeric = [
        place
        for place, name in enumerate(header)
        if _score(name) is not None or name in ("flag", "probability_1")
    ]
    for number, values in lines:
        fault = ""
        if values is None:
            fault = "is torn or garbled"
        elif len(values) != len(header):
            fault = f"has not {len(header)} values, but {len(values)}"
        else:
            wrong = next((place for place in numeric if not _is_number(values[place])), None)
            if wrong is not None:
                fault = f"has {values[wrong][:40]!r} as {header[wrong]}, which must be a number"
        yield number, {} if fault or values is None else dict(zip(header, values, strict=True)), fault


def _is_number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def _score(column: str) -> str | None:
    """The score that a column has; of several outputs, each has a column of its own."""
    score = _OUTPUT.sub("", column) if column.startswith("standard_deviation_") else column
    return score if score in SCORES else None


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


def _label(row: Mapping[str, Any], probability: float) -> str:
    if row.get("label_1"):
        return f"{row['label_1']}" + ("" if np.isnan(probability) else f" ({probability:.2f})")
    mean = row.get("mean", row.get("mean_1"))
    return "" if mean in (None, "") else str(mean)


class ScoreLog:
    """The CSV file to which a server adds one row for each input, a line each. Only the user may read it (mode 0600).

    Rows never run together: what a full disk or a power cut left of a row, or of the header, is cut off.

    Raises:
        PosthocUQError: it cannot be written, or there is a file with other columns.
    """

    def __init__(self, path: str) -> None:
        target = checked_target(path)
        self._lock = Lock()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            # without a buffer: a row that could not be written is not tried again later, in part
            self._file = os.fdopen(os.open(target, flags, 0o600), "r+b", buffering=0)
            try:
                torn = self._begin() if _is_log(self._file.read(len(_HEADER) + 1)) else None
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            raise PosthocUQError(f"'{path}' cannot be written: {error.strerror}.") from error
        if torn is None:
            self._file.close()
            raise PosthocUQError(f"'{path}' is there already, with other columns; give the log another name.")
        if torn:
            warnings.warn(
                f"'{path}' ended in the middle of a row, as after a power cut or on a full disk; these {torn:,} bytes "
                f"were cut off.",
                stacklevel=2,
            )

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows, and hand them to the operating system. Where that fails, none of them is in the file."""
        text = StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writerows([{name: _cell(row.get(name)) for name in COLUMNS} for row in rows])
        with self._lock:
            self._begin()
            self._write(text.getvalue().encode("utf-8", "replace"))

    def close(self) -> None:
        """No more rows."""
        self._file.close()

    def _begin(self) -> int:
        """Cut off what follows the last whole line, and write the header where there is none; the bytes that went."""
        size = place = self._file.seek(0, os.SEEK_END)
        end, step = 0, 1  # the last byte ends a line, unless something is torn
        while place and not end:
            first = max(0, place - step)
            self._file.seek(first)
            found = self._file.read(place - first).rfind(b"\n")
            end = first + found + 1 if found >= 0 else 0
            place, step = first, _BLOCK
        if end < size:
            self._file.truncate(end)
        if not end:
            self._write(_HEADER)
        return size - end if end else 0

    def _write(self, content: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(size)
            raise


def _is_log(head: bytes) -> bool:
    """Whether a file that begins so is a log, or the part of its header that a power cut left, perhaps with zeros."""
    line, ended, _ = head.partition(b"\n")
    return line.rstrip(b"\r") == _HEADER.rstrip() if ended else _HEADER.startswith(head.rstrip(b"\r\0"))


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        return csv_text(_BREAK.sub(" ", value))  # a row is a line
    return f"{value:.6g}" if isinstance(value, float) else value
