"""Tables in CSV files, read by pandas: which columns are inputs and targets, and which class a label is.

A table is UTF-8, a line of column names, then a row a line. Columns are separated by commas; by semicolons or tabs if
the header has no comma; by tabs in a ``.tsv``. Inputs are all columns but the targets, or ``--columns``, in that
order. The posterior's file keeps their names: other commands need neither ``--columns`` nor ``--target``.

Inputs are numbers: text (``True``, too), a missing value, one that is not finite, or a row with more or fewer cells
than the header is an error that names the line. Blank lines are left out. Nothing is standardised or filled in: of a
network that was trained on standardised targets give ``--likelihood.mean data --likelihood.std data``, or numbers.
Empty cells of targets are left out with ``--missing ignore``.

``--target`` names, by the likelihood,

* classification, binary, ordinal: one column. Whole numbers are indices of classes; other labels are text, and sorted
  by name the first is output 0. With fewer labels than classes, or for ordered classes, ``--class-map`` has their
  order. A label such as ``none`` or ``NA`` is missing, unless ``--class-map`` names it;
* classification: several columns with the probabilities of the classes; binary: one with those of class 1;
* multilabel: a column of 0 and 1, or of probabilities, for each label;
* quantiles: one column, of which the outputs are quantiles;
* survival: two columns, time and event (1 seen, 0 not yet), or two times with ``--censoring interval``;
* all others: a column of numbers for each output.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from posthoc_uq.app.cli.labels import read_map
from posthoc_uq.app.cli.models import TrainedModel
from posthoc_uq.app.cli.options import Data, check_extra
from posthoc_uq.app.cli.posterior_file import CLASSES, COLUMNS, TARGETS, DatasetInfo
from posthoc_uq.app.paths import check_regular
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean

ENDINGS = (".csv", ".tsv")
_MISSING = "? NA Na na N/A n/a #N/A #NA <NA> NaN nan None none NULL Null null".split()
_MAX_NAMED = 6  # names that a message lists


class TableRows(Dataset[Any]):
    """Rows of a table: inputs, with targets or without; a batch is cut out at once.

    Attributes:
        inputs: (rows, columns), float32.
        targets: (rows,) class indices, (rows, columns) numbers, or None.
    """

    def __init__(self, inputs: Tensor, targets: Tensor | None) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Any) -> Any:
        return self.inputs[rows] if self.targets is None else (self.inputs[rows], self.targets[rows])

    def __getitems__(self, rows: Sequence[int]) -> Any:
        return self[torch.as_tensor(rows, device=self.inputs.device)]


@dataclass(frozen=True)
class Table:
    """A table as a command uses it.

    Attributes:
        rows: inputs and targets.
        names: of the outputs, where labels or columns name them.
        kept: facts for the posterior's file.
    """

    rows: TableRows
    names: Sequence[str] | None
    kept: Mapping[str, Any]


def is_table(spec: str) -> bool:
    """Whether a path is that of a table."""
    return spec.lower().endswith(ENDINGS)


def read_table(path: str, model: TrainedModel, labels: bool, reading: Data, info: DatasetInfo) -> Table:
    """The rows of a table, with targets if `labels` are wanted.

    Raises:
        PosthocUQError: no such columns, or a row with something else than finite numbers.
    """
    header, separator = _header(path)
    inputs, targets = _choose_columns(path, header, reading, info.kept, labels)
    wanted = targets if labels else []
    label = wanted[0] if info.labels and len(wanted) == 1 else None
    frame = _frame(path, header, separator, label)
    if label is not None and info.likelihood.name == "binary" and _are_shares(frame[label].tolist()):
        label = None  # soft labels are numbers like those of several columns
    last = frame[header[-1]]
    if bool((last.isna() | (last == "")).any()):
        for line, cells in _rows(path, separator):
            if len(cells) < len(header):  # which pandas fills
                raise PosthocUQError(
                    f"'{path}', line {line} has {len(cells)} cell{'s' if len(cells) > 1 else ''}, and the header "
                    f"{len(header)}; leave the cell of a missing value empty."
                )

    def place(row: int) -> str:
        line, _ = next(islice(_rows(path, separator), row + 1, None))
        return f"'{path}', line {line}"

    fixed = COLUMNS in info.kept
    way_out = "" if fixed else ", or leave the column out with --columns"
    gaps = info.likelihood.missing == "ignore"
    numbers = {name: _numbers(frame, name, place, way_out) for name in inputs}
    if label is None:
        way_out = ", or say --missing ignore" if "missing" in info.likelihood.fields.model_fields else ""
        numbers |= {name: _numbers(frame, name, place, way_out, gaps) for name in wanted}
    x = torch.from_numpy(np.stack([numbers[name] for name in inputs], axis=1))
    model.run(x[0], "a row", _advice(model.model, inputs, fixed))
    kept: dict[str, Any] = {COLUMNS: inputs} | ({TARGETS: targets} if targets else {})
    if label is not None:
        classes = model.outputs(x[0]).shape[-1]
        y, names = _labels(frame[label].tolist(), path, place, classes, reading.class_map, info)
        return Table(TableRows(x, y), names, kept if names is None else kept | {CLASSES: names})
    y = torch.from_numpy(np.stack([numbers[name] for name in wanted], axis=1)) if wanted else None
    named = info.likelihood.name == "multilabel" or (info.labels and len(targets) > 1)
    return Table(TableRows(x, y), targets if named else info.kept.get(CLASSES), kept)


def _advice(model: nn.Module, inputs: Sequence[str], fixed: bool) -> str:
    """What to do if the model does not take the columns."""
    width = next((layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)), None)
    takes = "" if width is None else f", and its first linear layer takes {width}"
    columns = f"{len(inputs)} column{'s' if len(inputs) > 1 else ''}: {_listed(inputs)}"
    return f"the row has {columns}{takes}; {'those of the fit' if fixed else '--columns chooses those that it takes'}"


def _header(path: str) -> tuple[list[str], str]:
    """The names of the columns, and what stands between them: commas unless the header has none."""
    check_regular(path, "The table")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            usual = "\t" if path.lower().endswith(".tsv") else ","
            separator = next((mark for mark in ";\t" if mark in first and "," not in first), usual)
            file.seek(0)
            header = [name.strip() for name in next(_records(file, separator), [])]
    except OSError as error:
        raise PosthocUQError(f"The table '{path}' cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise PosthocUQError(f"The table '{path}' is not text in UTF-8.") from None
    except csv.Error as error:
        raise PosthocUQError(f"The table '{path}' is no CSV: {error}.") from None
    if not any(header):
        raise PosthocUQError(f"'{path}' is empty; a table has a line of column names first.")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise PosthocUQError(f"'{path}' has two columns '{twice}'; give them different names.")
    return header, separator


def _records(file: Any, separator: str) -> Any:
    return csv.reader(file, delimiter=separator, skipinitialspace=True)


def _choose_columns(
    path: str, header: Sequence[str], reading: Data, kept: Mapping[str, Any], labels: bool
) -> tuple[list[str], list[str]]:
    """The input columns and the target columns, by name: as given, else as in the fit, else all that are no target."""
    targets = _names(reading.target, header) or list(kept.get(TARGETS, []))
    chosen, fitted = _names(reading.columns, header), list(kept.get(COLUMNS, []))
    if labels and not targets:
        raise PosthocUQError(
            f"Which column of '{path}' is the target? Give --target; it has {_listed(header)}."
        )
    if fitted and chosen and chosen != fitted:
        raise PosthocUQError(
            f"The posterior was fitted on {len(fitted)} columns ({_listed(fitted)}) and finds them by name; leave out "
            f"--columns."
        )
    inputs = chosen or fitted or [name for name in header if name not in targets]
    if "" in inputs:
        raise PosthocUQError(
            f"Column {header.index('') + 1} of '{path}' has no name (is it an index?); say with --columns which are "
            f"inputs."
        )
    for name in [*inputs, *(targets if labels else [])]:
        if name not in header:
            raise PosthocUQError(
                f"'{path}' has no column '{name}'; it has {_listed(header)}.{did_you_mean(name, header)}"
            )
    twice = next((name for name in inputs if name in targets or inputs.count(name) > 1), None)
    if twice is not None or not inputs:
        reason = "no column is left for the inputs" if twice is None else f"'{twice}' is named twice"
        raise PosthocUQError(f"Of '{path}', {reason}; see --target and --columns.")
    return inputs, targets


def _names(given: Sequence[str], header: Sequence[str]) -> list[str]:
    """The columns that texts name: each a name, or several with commas."""
    split = ([text] if text in header else [part.strip() for part in text.split(",")] for text in given)
    return [name for names in split for name in names]


def _frame(path: str, header: Sequence[str], separator: str, label: str | None) -> Any:
    """All rows, as a frame of pandas; the column `label` as text."""
    check_extra("tables", "pandas")
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pandas.errors.DtypeWarning)
        warnings.simplefilter("error", pandas.errors.ParserWarning)  # cells that the header has no column for
        try:
            frame: Any = cast(Any, pandas).read_csv(
                path,
                sep=separator,
                encoding="utf-8-sig",
                skipinitialspace=True,
                keep_default_na=False,
                na_values={name: ["", *_MISSING] for name in header if name != label},
                index_col=False,
                header=0,
                names=header,
                dtype={} if label is None else {label: str},
            )
        except UnicodeDecodeError:
            raise PosthocUQError(f"The table '{path}' is not text in UTF-8.") from None
        except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
            reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
            raise PosthocUQError(
                f"The table '{path}' cannot be read: {reason.rstrip('.')}; put text with a {separator!r} in double "
                f"quotes."
            ) from None
    if not len(frame):
        raise PosthocUQError(f"'{path}' has no rows below its header.")
    return frame


def _numbers(frame: Any, name: str, place: Any, way_out: str, gaps: bool = False) -> Any:
    """A column of numbers, (rows,), float32; with `gaps` NaN where a cell is empty."""
    import pandas

    cells: Any = frame[name]
    with np.errstate(over="ignore"):
        numbers: Any = pandas.to_numeric(cells, errors="coerce")
        if cells.dtype.kind in "bO":  # pandas reads the text True as a truth
            numbers = numbers.astype(float).mask(cells.map(_is_truth), np.nan)
        values = np.asarray(numbers, dtype=np.float64).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(values) & ~(gaps & np.asarray(cells.isna())))
    if len(wrong):
        cell = cells.iloc[int(wrong[0])]
        reason = "no value, or none that is finite in float32"
        if _is_truth(cell) or (isinstance(cell, str) and not _is_number(cell)):
            reason = f"the text {_cut(str(cell))!r}, and a model takes numbers"
        raise PosthocUQError(f"{place(int(wrong[0]))}: the column '{name}' has {reason}; change it{way_out}.")
    return values


def _rows(path: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Every row that is not blank, with the line that it begins in; pandas counts without lines."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        records, line = _records(file, separator), 1
        for cells in records:
            if len(cells) > 1 or (cells and cells[0].strip()):
                yield line, cells
            line = records.line_num + 1


def _labels(
    words: Sequence[Any], path: str, place: Any, outputs: int, class_map: str | None, info: DatasetInfo
) -> tuple[Tensor, list[str] | None]:
    """The class index of every label, and the names of the classes where labels are no indices."""
    known: list[str] | None = info.kept.get(CLASSES)
    words = [word.strip() if isinstance(word, str) else "" for word in words]
    index_of = {} if class_map is None else read_map(class_map)
    missing = {"", *_MISSING}.difference(index_of, known or [])
    lost = next((row for row, word in enumerate(words) if word in missing), None)
    if lost is not None:
        way_out = f" ({words[lost]!r}); if that is a class, name it in --class-map" if words[lost] else ""
        raise PosthocUQError(f"{place(lost)}: the label is missing{way_out}.")
    names = None
    if class_map is not None:
        ordered = sorted(index_of, key=lambda name: index_of[name])
        names = ordered if [index_of[name] for name in ordered] == list(range(len(ordered))) else None
    elif known is not None or not all(_is_number(word) and float(word).is_integer() for word in set(words)):
        names = list(known or _sorted_names(sorted(set(words)), outputs, path, info))
        index_of = {name: index for index, name in enumerate(names)}
    else:
        index_of = {word: int(float(word)) for word in set(words)}
    classes = max(2, info.likelihood.classes(outputs))  # of fewer, the library says more
    for row, word in enumerate(words):
        if word not in index_of:
            raise PosthocUQError(
                f"{place(row)}: the label {_cut(word)!r} is none of the classes {_listed(list(index_of))}."
            )
        if not 0 <= index_of[word] < classes:
            raise PosthocUQError(
                f"{place(row)}: the label has the index {_cut(str(index_of[word]))}, and the model the classes 0 to "
                f"{classes - 1}; if the target is a number, say so with --likelihood regression."
            )
    return torch.tensor([index_of[word] for word in words], dtype=torch.int64, device="cpu"), names


def _are_shares(words: Sequence[Any]) -> bool:
    """Whether labels are numbers from 0 to 1, and not all whole."""
    numbers = [float(word) for word in words if isinstance(word, str) and _is_number(word.strip())]
    whole = all(number.is_integer() for number in numbers)
    return len(numbers) == len(words) and all(0 <= number <= 1 for number in numbers) and not whole


def _sorted_names(found: list[str], outputs: int, path: str, info: DatasetInfo) -> list[str]:
    """The names of all classes, in the order of the outputs."""
    classes = info.likelihood.classes(outputs)
    labels = f"'{path}' has {len(found)} different labels ({_listed(found)})"
    if info.likelihood.name == "ordinal":
        raise PosthocUQError(f"{labels}, whose order is not known; give it with --class-map FILE.")
    if len(found) > classes:
        raise PosthocUQError(
            f"{labels}, more than the model's {classes} classes; if the target is a number, say so with --likelihood "
            f"regression."
        )
    if len(found) < classes:
        raise PosthocUQError(
            f"{labels} and the model {classes} classes; say which is which with --class-map FILE."
        )
    return found


def _is_truth(cell: Any) -> bool:
    return isinstance(cell, (bool, np.bool_))


def _is_number(word: str) -> bool:
    if "_" in word or not word.isascii():  # which Python reads and pandas does not
        return False
    try:
        float(word)
    except ValueError:
        return False
    return True


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else "")


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
