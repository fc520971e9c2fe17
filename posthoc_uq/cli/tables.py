"""Tables in CSV files, read by pandas: which columns are inputs and targets, and which class a label is."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from posthoc_uq.cli.labels import read_map
from posthoc_uq.cli.models import TrainedModel
from posthoc_uq.cli.options import Data
from posthoc_uq.cli.posterior_file import CLASSES, COLUMNS, TARGETS, DatasetInfo
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.paths import check_regular

ENDINGS = (".csv", ".tsv")
_SAYS_MISSING = "? NA Na na N/A n/a #N/A #NA <NA> NaN nan None none NULL Null null".split()
_SHOWN = 6  # names that a message lists


class TableRows(Dataset[Any]):
    """Rows of a table: inputs, with targets or without; a batch is cut out at once.

    Attributes:
        inputs: (rows, columns), float32.
        targets: (rows,) class indices, (rows, columns) numbers, or None.
    """

    def __init__(self, inputs: Tensor, targets: Tensor | None) -> None:
        self.inputs, self.targets = inputs, targets

    def part(self, numbers: Sequence[int]) -> TableRows:
        """Some of the rows."""
        picked = self.__getitems__(numbers)
        return TableRows(picked, None) if self.targets is None else TableRows(*picked)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] if self.targets is None else (self.inputs[index], self.targets[index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        picked = torch.as_tensor(indices, device=self.inputs.device)
        return self.inputs[picked] if self.targets is None else (self.inputs[picked], self.targets[picked])


def as_it_is(batch: Any) -> Any:
    """The collating of batches that `TableRows` has cut out."""
    return batch


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
    reader = _Reader(path, fixed=COLUMNS in info.kept)
    inputs, targets = _columns(reader, reading, info.kept, labels)
    wanted = targets if labels else []
    label = wanted[0] if info.labels and len(wanted) == 1 else None
    frame = reader.read(label)
    kept: dict[str, Any] = {COLUMNS: inputs} | ({TARGETS: targets} if targets else {})
    x = reader.numbers(frame, inputs)
    model.run(x[0], "a row", _advice(model.model, inputs, reader.fixed))
    if label is not None:
        y, names = _labels(reader, frame, label, model.outputs(x[0]).shape[-1], reading.class_map, info)
        return Table(TableRows(x, y), names, kept if names is None else kept | {CLASSES: names})
    named = info.likelihood.name == "multilabel" or (info.labels and len(targets) > 1)
    names = targets if named else cast("list[str] | None", info.kept.get(CLASSES))
    return Table(TableRows(x, reader.numbers(frame, wanted) if wanted else None), names, kept)


def _advice(model: nn.Module, inputs: Sequence[str], fixed: bool) -> str:
    """What to do if the model does not take the columns."""
    width = next((layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)), None)
    takes = "" if width is None else f", and its first linear layer takes {width}"
    columns = f"{len(inputs)} column{'s' if len(inputs) > 1 else ''}: {_listed(inputs)}"
    return f"the row has {columns}{takes}; {'those of the fit' if fixed else '--columns chooses those that it takes'}"


def _columns(
    reader: _Reader, reading: Data, kept: Mapping[str, Any], labels: bool
) -> tuple[list[str], list[str]]:
    """The input columns and the target columns, by name: as given, else as in the fit, else all that are no target."""
    header, path = reader.header, reader.path
    targets = _names(reading.target, header) or list(kept.get(TARGETS, []))
    chosen = _names(reading.columns, header)
    if labels and not targets:
        raise PosthocUQError(
            f"Which column of '{path}' is the target? Give --target COLUMN; it has {_listed(header)}."
        )
    fitted = list(kept.get(COLUMNS, []))
    if fitted and chosen and chosen != fitted:
        raise PosthocUQError(
            f"The posterior was fitted on {len(fitted)} columns ({_listed(fitted)}) and finds them by name: leave out "
            f"--columns, which names others, or these in another order."
        )
    inputs = chosen or fitted or [name for name in header if name not in targets]
    if "" in inputs:
        raise PosthocUQError(
            f"Column {header.index('') + 1} of '{path}' has no name (is it an index?); give it one, or say with "
            f"--columns which columns are inputs."
        )
    for name in [*inputs, *(targets if labels else [])]:
        if name not in header:
            raise PosthocUQError(
                f"'{path}' has no column '{name}'; it has {_listed(header)}.{did_you_mean(name, header)}"
            )
    twice = next((name for name in inputs if name in targets or inputs.count(name) > 1), None)
    if twice is not None or not inputs:
        reason = (
            "no column is left for the inputs" if twice is None else f"the column '{twice}' is named twice"
        )
        raise PosthocUQError(f"Of '{path}', {reason}; see --target and --columns.")
    return inputs, targets


def _names(given: Sequence[str], header: Sequence[str]) -> list[str]:
    """The columns that texts name: each a name, or several with commas."""
    split = ([text] if text in header else [part.strip() for part in text.split(",")] for text in given)
    return [name for names in split for name in names]


class _Reader:
    """A table's file.

    Attributes:
        path: of the file.
        header: names of the columns.
        fixed: whether the columns are those of a fit, so that none can be left out.
    """

    def __init__(self, path: str, fixed: bool) -> None:
        check_regular(path, "The table")
        self.path, self.fixed = path, fixed
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                first = file.readline()
                if not first.strip():
                    raise PosthocUQError(f"'{path}' is empty; a table has a line of column names first.")
                usual = "\t" if path.lower().endswith(".tsv") else ","
                # a comma unless there is none
                self._separator = next((mark for mark in ";\t" if mark in first and "," not in first), usual)
                file.seek(0)
                self._scan(csv.reader(file, delimiter=self._separator, skipinitialspace=True))
        except OSError as error:
            raise PosthocUQError(f"The table '{path}' cannot be read: {error.strerror or error}.") from None
        except UnicodeDecodeError:
            raise PosthocUQError(f"The table '{path}' is not text in UTF-8.") from None
        except csv.Error as error:
            raise PosthocUQError(f"The table '{path}' is no CSV: {error}.") from None

    def _scan(self, rows: Any) -> None:
        """Find the header and where each row begins; pandas would fill short rows, and number them without lines."""
        self.header = [name.strip() for name in next(rows)]
        twice = next((name for name in self.header if self.header.count(name) > 1), None)
        if twice is not None:
            raise PosthocUQError(f"'{self.path}' has two columns '{twice}'; give them different names.")
        width, line = len(self.header), rows.line_num + 1
        self._lines: list[int] = []  # 0 for a blank line
        for row in rows:
            blank = not row or (len(row) == 1 < width and not row[0].strip())
            if not blank and len(row) != width:
                raise PosthocUQError(
                    f"'{self.path}', line {line} has {len(row)} cell{'s' if len(row) > 1 else ''}, and the header "
                    f"{width}; leave the cell of a missing value empty, and put text with a {self._separator!r} in "
                    f"double quotes."
                )
            self._lines.append(0 if blank else line)
            line = rows.line_num + 1

    def read(self, label: str | None) -> Any:
        """All rows, as a frame of pandas whose index are their lines; the column `label` as text."""
        try:
            import pandas
        except ImportError:
            raise PosthocUQError(
                "Tables are read by pandas; install the extra: pip install 'posthoc-uq[tables]'."
            ) from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pandas.errors.DtypeWarning)
            try:
                frame = cast(Any, pandas).read_csv(
                    self.path,
                    sep=self._separator,
                    encoding="utf-8-sig",
                    skipinitialspace=True,
                    skip_blank_lines=False,  # so that rows know their lines
                    keep_default_na=False,
                    na_values={name: ["", *_SAYS_MISSING] for name in self.header if name != label},
                    index_col=False,
                    header=0,
                    names=self.header,
                    dtype={} if label is None else {label: str},
                )
            except pandas.errors.ParserError as error:
                reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
                raise PosthocUQError(f"The table '{self.path}' is no CSV: {reason.rstrip('.')}.") from None
        frame.index = self._lines
        frame = frame.drop(index=0, errors="ignore")
        if not len(frame):
            raise PosthocUQError(f"'{self.path}' has no rows below its header.")
        return frame

    def numbers(self, frame: Any, names: Sequence[str]) -> Tensor:
        """Columns of numbers, (rows, columns), float32."""
        import pandas

        columns: list[Any] = []
        for name in names:
            with np.errstate(over="ignore"):
                numbers: Any = pandas.to_numeric(frame[name], errors="coerce")
                if frame[name].dtype.kind in "bO":  # pandas reads the text True as a truth
                    numbers = numbers.mask(frame[name].map(_is_truth), np.nan)
                values = np.asarray(numbers, dtype=np.float64).astype(np.float32)
            wrong = np.flatnonzero(~np.isfinite(values))
            if len(wrong):
                self._refuse(frame, name, int(wrong[0]))
            columns.append(values)
        return torch.from_numpy(np.stack(columns, axis=1))

    def line(self, frame: Any, row: int) -> str:
        """Where a row stands."""
        return f"'{self.path}', line {frame.index[row]}"

    def _refuse(self, frame: Any, name: str, row: int) -> NoReturn:
        """Name a cell that is no finite number."""
        cell = frame[name].iloc[row]
        cell = str(cell) if _is_truth(cell) else cell
        if isinstance(cell, str) and not _is_number(cell):
            way_out = "" if self.fixed else ", or leave the column out with --columns"
            raise PosthocUQError(
                f"{self.line(frame, row)}: the column '{name}' has the text {_cut(cell)!r}, and a model takes numbers; "
                f"write it as numbers{way_out}."
            )
        way_out = "" if self.fixed else ", or the column with --columns"
        raise PosthocUQError(
            f"{self.line(frame, row)}: the column '{name}' has no value, or none that is finite in float32; fill it "
            f"in, or leave out the row{way_out}."
        )


def _labels(
    reader: _Reader, frame: Any, label: str, outputs: int, class_map: str | None, info: DatasetInfo
) -> tuple[Tensor, list[str] | None]:
    """The class index of every label, and the names of the classes where labels are no indices."""
    known = cast("list[str] | None", info.kept.get(CLASSES))
    words = [word.strip() if isinstance(word, str) else "" for word in frame[label]]
    index_of = {} if class_map is None else read_map(class_map)
    missing = {"", *_SAYS_MISSING}.difference(index_of, known or [])
    lost = next((row for row, word in enumerate(words) if word in missing), None)
    if lost is not None:
        way_out = f" ({words[lost]!r}); if that is a class, name it in --class_map" if words[lost] else ""
        raise PosthocUQError(f"{reader.line(frame, lost)}: the label is missing{way_out}.")
    if class_map is not None:
        names = sorted(index_of, key=lambda name: index_of[name])
        names = names if [index_of[name] for name in names] == list(range(len(names))) else None
    elif known is not None or not all(map(_is_whole, set(words))):
        names = list(known or _sorted_names(sorted(set(words)), outputs, info, reader))
        index_of = {name: index for index, name in enumerate(names)}
    else:
        index_of, names = {word: int(float(word)) for word in set(words)}, None
    classes = max(2, info.likelihood.classes(outputs))  # of fewer, the library says more
    for row, word in enumerate(words):
        if word not in index_of:
            raise PosthocUQError(
                f"{reader.line(frame, row)}: the label {_cut(word)!r} is none of the classes {_listed(list(index_of))}."
            )
        if not 0 <= index_of[word] < classes:
            raise PosthocUQError(
                f"{reader.line(frame, row)}: the label has the index {_cut(str(index_of[word]))}, and the model the "
                f"classes 0 to {classes - 1}; if the target is a number, say so with --likelihood regression."
            )
    return torch.tensor([index_of[word] for word in words], dtype=torch.int64, device="cpu"), names


def _sorted_names(found: list[str], outputs: int, info: DatasetInfo, reader: _Reader) -> list[str]:
    """The names of all classes, in the order of the outputs."""
    classes = info.likelihood.classes(outputs)
    labels = f"'{reader.path}' has {len(found)} different labels ({_listed(found)})"
    if info.likelihood.name == "ordinal":
        raise PosthocUQError(
            f"{labels}, whose order is not known; write it, one label a line, into a file for --class_map, or give the "
            f"labels as numbers from 0 on."
        )
    if len(found) > classes:
        raise PosthocUQError(
            f"{labels}, more than the model's {classes} classes; if the target is a number, say so with --likelihood "
            f"regression."
        )
    if len(found) < classes:
        raise PosthocUQError(
            f"{labels} and the model {classes} classes; say which is which with --class_map FILE."
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


def _is_whole(word: str) -> bool:
    return _is_number(word) and float(word).is_integer()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > _SHOWN else "")


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
