"""Scores of inputs in CSV files: what ``posthoc-uq predict`` writes, and the log that a server keeps (`ScoreLog`)."""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from mmap import ACCESS_READ, mmap
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posthoc_uq.app.paths import check_regular
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.tables import csv_text
from posthoc_uq.files.atomic import checked_target

SCORES = ("entropy", "mutual_information", "novelty", "standard_deviation")
"""The scores that are watched, by the names of their columns."""

_COLUMNS = ("time", "label_1", "probability_1", "mean", *SCORES, "flag", "reason", "tail")
_HEADER = (",".join(_COLUMNS) + "\n").encode()
_OUTPUT = re.compile(r"^(standard_deviation)_\d+$")
_BREAK = re.compile(r"[\r\n\0]+")

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Scores of inputs, in the order in which these came.

    Attributes:
        values: by name, (inputs,); NaN where an input has none. Only those that some input has.
        referred: (inputs,), 1 and 0; NaN where there was no threshold.
        left_out: rows of the file that are torn or garbled.
    """

    values: Mapping[str, Numbers]
    referred: Numbers
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.referred)

    @property
    def share_referred(self) -> float | None:
        """Of those inputs for which that was decided."""
        known = self.referred[~np.isnan(self.referred)]
        return float(known.mean()) if len(known) else None


def read_scores(path: str) -> Scores:
    """The scores in a CSV file with a row a line. Rows that are torn or garbled, as a power cut or a full disk leaves
    them, are left out, with a warning that says how many there are, and where.

    Raises:
        PosthocUQError: it cannot be read, or has none of the scores, or no whole row.
    """
    check_regular(path, "The table")
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            header = _cells(next(file, ""))
            rows = list(enumerate(file, 2))
    except OSError as error:
        raise PosthocUQError(f"'{path}' cannot be read: {error.strerror}.") from error
    except csv.Error:
        header, rows = ["\ufffd"], []
    if any("\ufffd" in column for column in header):
        raise PosthocUQError(f"'{path}' is no CSV file in UTF-8.")
    names = [_OUTPUT.sub(r"\1", column) for column in header]
    watched = {place: name for place, name in enumerate(names) if name in (*SCORES, "flag")}
    found: list[list[float]] = []
    faults: list[int] = []
    for number, line in rows:
        try:
            cells = _cells(line)
            if cells and len(cells) != len(header):
                raise ValueError(line)
            if cells:
                found.append([float(cells[place] or "nan") for place in watched])
        except (ValueError, csv.Error):
            faults.append(number)
    if not found:
        raise PosthocUQError(f"'{path}' has no whole row of scores.")

    def mean_of(column: str) -> Numbers:
        """Of several outputs, the mean over them, as `Prediction.scores` has it."""
        columns = [index for index, name in enumerate(watched.values()) if name == column]
        return np.array(found)[:, columns].mean(1) if columns else np.full(len(found), np.nan)

    values = {score: mean for score in SCORES if not np.isnan(mean := mean_of(score)).all()}
    if not values:
        raise PosthocUQError(
            f"'{path}' has none of the columns {', '.join(SCORES)}; it must be a CSV of posthoc-uq predict or serve."
        )
    if faults:
        warnings.warn(
            f"'{path}' has {len(faults):,} torn or garbled rows, which are left out; the first is line {faults[0]:,}.",
            stacklevel=2,
        )
    return Scores(values, mean_of("flag"), len(faults))


def _cells(line: str) -> list[str]:
    return next(csv.reader([line], strict=True))


def finite_entries(values: Numbers) -> Numbers:
    """Those that are numbers."""
    return values[np.isfinite(values)]


class ScoreLog:
    """The CSV file to which a server adds one row for each input, a line each. Only the user may read it (mode 0600).

    Rows never run together: what a full disk or a power cut left of a row, or of the header, is cut off. Where another
    program moved the file or deleted it, the next rows begin a new one of its name.

    Raises:
        PosthocUQError: it cannot be written, or there is a file with other columns.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._target = os.path.abspath(checked_target(path))  # also after a change of the working folder
        self._lock = RLock()  # a signal may come while one is handled
        self._file = self._opened()

    def _opened(self) -> Any:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        path = self._path
        try:
            # without a buffer: a row that could not be written is not tried again later, in part
            file = os.fdopen(os.open(self._target, flags, 0o600), "r+b", buffering=0)
            first, ended, _ = file.read(len(_HEADER) + 1).partition(b"\n")
        except OSError as error:
            raise PosthocUQError(f"'{path}' cannot be written: {error.strerror}.") from error
        # a power cut may leave a part of the header, perhaps with zeros
        if not (first.rstrip(b"\r") == _HEADER[:-1] if ended else _HEADER.startswith(first.rstrip(b"\r\0"))):
            file.close()
            raise PosthocUQError(f"'{path}' is there already, with other columns; give the log another name.")
        if (torn := _cut(file)) and ended:
            warnings.warn(
                f"'{path}' ended in the middle of a row, as after a power cut; these {torn:,} bytes were cut off.",
                stacklevel=3,
            )
        return file

    def reopen(self) -> None:
        """Open the file of this name anew, as a program that moves logs asks for (SIGHUP).

        Raises:
            PosthocUQError: it cannot be written, or has other columns; the rows go on into the old one.
        """
        with self._lock:
            self._reopen()

    def _reopen(self) -> None:
        file = self._opened()
        self._file.close()
        self._file = file

    @property
    def _moved(self) -> bool:
        """Whether the file of this name is another one by now, or none."""
        try:
            there, own = os.stat(self._target), os.fstat(self._file.fileno())
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows, and hand them to the operating system.

        Raises:
            OSError: that fails; then none of them is in the file.
            PosthocUQError: the file was moved or deleted, and no new one can be opened.
        """
        text = StringIO()
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        writer.writerows([{name: _cell(row.get(name)) for name in _COLUMNS} for row in rows])
        content = text.getvalue().encode("utf-8", "replace")
        with self._lock:
            if self._moved:
                self._reopen()
            _cut(self._file)
            size = self._file.seek(0, os.SEEK_END)
            content = content if size else _HEADER + content
            try:
                while content:
                    content = content[self._file.write(content) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(size)
                raise

    def close(self) -> None:
        """No more rows."""
        self._file.close()


def _cut(file: Any) -> int:
    """Cut off what follows the last whole line of a file; how many bytes that were."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return 0
    with mmap(file.fileno(), size, access=ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
    if end < size:
        file.truncate(end)
    return size - end


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        return csv_text(_BREAK.sub(" ", value))  # a row is a line
    return f"{value:.6g}" if isinstance(value, float) else value
