"""Tables in CSV files: read once, as numbers; which columns are inputs and targets, and which class a label is."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from posthoc_uq.cli.labels import read_map
from posthoc_uq.cli.meaning import CLASSES, COLUMNS, TARGETS, Meaning
from posthoc_uq.cli.models import Source, count_outputs, run_on
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.paths import check_regular

ENDINGS = (".csv", ".tsv")
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
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
        picked = torch.as_tensor(numbers, device=self.inputs.device)
        return TableRows(self.inputs[picked], None if self.targets is None else self.targets[picked])

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] if self.targets is None else (self.inputs[index], self.targets[index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        picked = torch.as_tensor(indices, device=self.inputs.device)
        inputs = self.inputs[picked]
        return inputs if self.targets is None else (inputs, self.targets[picked])


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


def read_table(
    path: str, source: Source, options: Mapping[str, Any], meaning: Meaning, *, labels: bool
) -> Table:
    """The rows of a table, with targets if `labels` are wanted.

    Raises:
        PosthocUQError: no such columns, or a row with something else than finite numbers.
    """
    reader = _Reader(path)
    inputs, targets = _columns(reader, options, meaning.kept, labels)
    reader.fixed = COLUMNS in meaning.kept
    wanted = targets if labels else []
    texts = labels and meaning.labels and len(targets) == 1
    numbers, words = reader.read(inputs, [] if texts else wanted, targets[0] if texts else None)
    kept: dict[str, Any] = {COLUMNS: inputs} | ({TARGETS: targets} if targets else {})
    values = torch.from_numpy(numbers)
    x = values[:, : len(inputs)].contiguous()
    run_on(source.model, x[0], "a row", _advice(source.model, inputs, reader.fixed))
    known = cast("list[str] | None", meaning.kept.get(CLASSES))
    if not texts:
        y = values[:, len(inputs) :].contiguous() if wanted else None
        return Table(TableRows(x, y), targets if _names_outputs(meaning, targets) else known, kept)
    outputs = count_outputs(source.model, x[0])
    indices, names = _indices(words, outputs, known, options["class_map"], meaning, reader)
    kept |= {} if names is None else {CLASSES: names}
    y = torch.tensor(indices, dtype=torch.int64, device="cpu")
    return Table(TableRows(x, y), names, kept)


def _names_outputs(meaning: Meaning, targets: Sequence[str]) -> bool:
    """Whether every target column stands for one label, or one class with its probability."""
    return meaning.likelihood.name == "multilabel" or (meaning.labels and len(targets) > 1)


def _advice(model: nn.Module, inputs: Sequence[str], fixed: bool) -> str:
    """What to do if the model does not take the columns."""
    width = next((layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)), None)
    takes = "" if width is None else f", and its first linear layer takes {width}"
    columns = f"{len(inputs)} column{'s' if len(inputs) > 1 else ''}: {_listed(inputs)}"
    way_out = "those of the fit" if fixed else "--columns chooses those that it takes"
    return f"the row has {columns}{takes}; {way_out}"


def _columns(
    reader: _Reader, options: Mapping[str, Any], kept: Mapping[str, Any], labels: bool
) -> tuple[list[str], list[str]]:
    """The input columns and the target columns, by name: as given, else as in the fit, else all that are no target."""
    header, path = reader.header, reader.path
    targets = list(options["target"]) or list(kept.get(TARGETS, []))
    if labels and not targets:
        raise PosthocUQError(
            f"Which column of '{path}' is the target? Give --target COLUMN; it has {_listed(header)}."
        )
    given = [name for text in options["columns"] for name in ([text] if text in header else text.split(","))]
    given, fitted = [name.strip() for name in given], list(kept.get(COLUMNS, []))
    if fitted and given and given != fitted:
        raise PosthocUQError(
            f"The posterior was fitted on {len(fitted)} columns ({_listed(fitted)}) and finds them by name: leave out "
            f"--columns, which names others, or these in another order."
        )
    inputs = given or fitted
    if not inputs:
        inputs = [name for name in header if name not in targets]
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


class _Reader:
    """One pass over a table.

    Attributes:
        path: of the file.
        header: names of the columns.
        lines: of the file, by row; the header is in line 1.
        fixed: whether the columns are those of a fit, so that none can be left out.
    """

    def __init__(self, path: str) -> None:
        check_regular(path, "The table")
        self.path, self.lines, self.fixed = path, array("q"), False
        self._separator = "\t" if path.lower().endswith(".tsv") else ","
        self.header = [name.strip() for name in next(self._parsed(guess=True), (1, []))[1]]
        if not self.header:
            raise PosthocUQError(f"'{path}' is empty; a table has a line of column names first.")
        twice = next((name for name in self.header if self.header.count(name) > 1), None)
        if twice is not None:
            raise PosthocUQError(f"'{path}' has two columns '{twice}'; give them different names.")

    def _parsed(self, guess: bool = False) -> Iterator[tuple[int, list[str]]]:
        """The line and the cells of every row that is not empty, the header first."""
        try:
            with open(self.path, newline="", encoding="utf-8-sig") as file:
                if guess:
                    first = file.readline()
                    file.seek(0)
                    # a comma unless there is none
                    others = [mark for mark in ";\t" if mark in first and "," not in first]
                    self._separator = others[0] if others else self._separator
                rows = csv.reader(file, delimiter=self._separator, skipinitialspace=True)
                for row in rows:
                    if row:
                        yield rows.line_num, row
        except OSError as error:
            raise PosthocUQError(
                f"The table '{self.path}' cannot be read: {error.strerror or error}."
            ) from None
        except UnicodeDecodeError:
            raise PosthocUQError(f"The table '{self.path}' is not text in UTF-8.") from None
        except csv.Error as error:
            raise PosthocUQError(f"The table '{self.path}' is no CSV: {error}.") from None

    def read(
        self, inputs: Sequence[str], targets: Sequence[str], text: str | None
    ) -> tuple[np.ndarray[Any, Any], list[str]]:
        """Columns of numbers, (rows, inputs and targets), float32, and the texts of one more column."""
        names = [*inputs, *targets]
        places, width = [self.header.index(name) for name in names], len(self.header)
        label = None if text is None else self.header.index(text)
        numbers, words = array("f"), list[str]()
        for line, row in self._body():
            if len(row) != width:
                raise PosthocUQError(
                    f"'{self.path}', line {line} has {len(row)} cells, and the header {width}."
                )
            try:
                numbers.extend([float(row[place]) for place in places])
            except ValueError:
                self._refuse(line, row, names)
            if label is not None:
                words.append(row[label].strip())
            self.lines.append(line)
        if not self.lines:
            raise PosthocUQError(f"'{self.path}' has no rows below its header.")
        values = np.frombuffer(numbers, dtype=np.float32).reshape(len(self.lines), len(names))
        faults = np.argwhere(~np.isfinite(values))
        if len(faults):
            self._refuse_number(self.lines[int(faults[0, 0])], names[int(faults[0, 1])])
        return values, words

    def _body(self) -> Iterator[tuple[int, list[str]]]:
        rows = self._parsed()
        next(rows, None)
        return rows

    def _refuse(self, line: int, row: Sequence[str], names: Sequence[str]) -> NoReturn:
        """Name the first cell of a row that is no number."""
        for name in names:
            cell = row[self.header.index(name)].strip()
            try:
                float(cell)
            except ValueError:
                if cell.lower() in _MISSING:
                    self._refuse_number(line, name)
                way_out = "" if self.fixed else ", or leave the column out with --columns"
                raise PosthocUQError(
                    f"'{self.path}', line {line}: the column '{name}' has the text {_cut(cell)!r}, and a model takes "
                    f"numbers; write it as numbers{way_out}."
                ) from None
        raise AssertionError

    def _refuse_number(self, line: int, name: str) -> NoReturn:
        way_out = "" if self.fixed else ", or the column with --columns"
        raise PosthocUQError(
            f"'{self.path}', line {line}: the column '{name}' has no value, or none that is finite in float32; fill it "
            f"in, or leave out the row{way_out}."
        )


def _indices(
    words: Sequence[str],
    outputs: int,
    known: Sequence[str] | None,
    class_map: str | None,
    meaning: Meaning,
    reader: _Reader,
) -> tuple[list[int], list[str] | None]:
    """The class index of every label, and the names of the classes where labels are no indices."""
    if class_map is not None:
        index_of = read_map(class_map)
        names = _by_index(index_of)
    elif known is not None:
        index_of, names = {name: index for index, name in enumerate(known)}, list(known)
    else:
        found = _distinct(words, reader)
        if all(map(_whole, found)):
            return _checked([int(float(word)) for word in words], outputs, meaning, reader), None
        names = _sorted_names(found, meaning.likelihood.classes(outputs), meaning, reader)
        index_of = {name: index for index, name in enumerate(names)}
    for line, word in zip(reader.lines, words, strict=True):
        if word not in index_of:
            raise PosthocUQError(
                f"'{reader.path}', line {line}: the label {_cut(word)!r} is none of the classes "
                f"{_listed(list(index_of))}."
            )
    return _checked([index_of[word] for word in words], outputs, meaning, reader), names


def _checked(indices: list[int], outputs: int, meaning: Meaning, reader: _Reader) -> list[int]:
    """Class indices, of which each is one of the model's."""
    classes = max(2, meaning.likelihood.classes(outputs))  # of fewer, the library says more
    for line, index in zip(reader.lines, indices, strict=True):
        if not 0 <= index < classes:
            raise PosthocUQError(
                f"'{reader.path}', line {line}: the label has the index {_cut(str(index))}, and the model the classes "
                f"0 to {classes - 1}; if the target is a number, say so with --likelihood regression."
            )
    return indices


def _distinct(words: Sequence[str], reader: _Reader) -> set[str]:
    found = set(words)
    missing = next((word for word in found if word.lower() in _MISSING), None)
    if missing is not None:
        line = reader.lines[list(words).index(missing)]
        raise PosthocUQError(f"'{reader.path}', line {line}: the label is missing.")
    return found


def _sorted_names(found: set[str], classes: int, meaning: Meaning, reader: _Reader) -> list[str]:
    """The names of all classes, in the order of the outputs."""
    names = sorted(found)
    labels = f"'{reader.path}' has {len(names)} different labels ({_listed(names)})"
    if meaning.likelihood.name == "ordinal":
        raise PosthocUQError(
            f"{labels}, whose order is not known; write it, one label a line, into a file for --class-map, or give the "
            f"labels as numbers from 0 on."
        )
    if len(names) > classes:
        raise PosthocUQError(
            f"{labels}, more than the model's {classes} classes; if the target is a number, say so with --likelihood "
            f"regression."
        )
    if len(names) < classes:
        raise PosthocUQError(
            f"{labels} and the model {classes} classes; say which is which with --class-map FILE."
        )
    return names


def _by_index(index_of: Mapping[str, int]) -> list[str] | None:
    """The names in the order of the outputs, if every output has one name."""
    names = sorted(index_of, key=lambda name: index_of[name])
    return names if [index_of[name] for name in names] == list(range(len(names))) else None


def _whole(word: str) -> bool:
    try:
        return float(word).is_integer()
    except (ValueError, OverflowError):
        return False


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > _SHOWN else "")


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
