"""The recipe's tables: three out of the R package modeldata, read without R, and made ones whose law is known.

| name | rows | target | foreign group |
| --- | --- | --- | --- |
| counts | 13,626 packages of R | files of R code | packages with compiled code |
| labels | 5,594 developers (Stack Overflow 2017) | which of 13 kinds of work they do | those in India |
| values | 2,930 houses in Ames | price in units of 100,000 dollars | those built before 1930 |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.uci.data import MODELDATA, lazy_load

KINDS = ("counts", "labels", "values")
DISPERSION = 0.7
"""Of the made counts."""

_COUNTS = (
    "authors imports suggests depends Roxygen gh descr ns_import ns_export s3_methods s4_methods doc_count data_count "
    "testthat_count"
).split()
_ABOUT_DEVELOPERS = "Salary YearsCodedJob OpenSource Hobby CompanySizeNumber CareerSatisfaction".split()
_SKEWED = 20.0  # a column whose largest value is so many times its mean is taken as log(1 + x)
_OLD = 1930


class Rows(NamedTuple):
    """Inputs (rows, columns), standardised, and targets (rows,) or (rows, labels); float32."""

    inputs: Tensor
    targets: Tensor


class Split(NamedTuple):
    """One random split of a table.

    Attributes:
        train: on which the network is trained and the posterior fitted.
        held_out: for early stopping, the noise and the tuning.
        test: for all figures.
        foreign: inputs by name.
        names: of the labels, where targets are labels.
    """

    train: Rows
    held_out: Rows
    test: Rows
    foreign: dict[str, Tensor]
    names: tuple[str, ...] = ()


class Table(NamedTuple):
    """Inputs and targets as they are in the file, and the inputs of the group that is left out; float64 arrays."""

    inputs: np.ndarray
    targets: np.ndarray
    group: np.ndarray
    group_name: str
    names: tuple[str, ...] = ()


def load(kind: str, modeldata: Path = MODELDATA) -> Table:
    """One of modeldata's tables.

    Raises:
        FileNotFoundError: the package's data base is not there.
    """
    if not (modeldata / "Rdata.rdx").exists():
        raise FileNotFoundError(
            f"There is no data base of the R package modeldata in {modeldata}: install Debian's r-cran-modeldata, or "
            f"say with --data where its folder data is."
        )
    return {"counts": _packages, "labels": _developers, "values": _houses}[kind](modeldata)


def _numbers(frame: Any, columns: list[str]) -> np.ndarray:
    return frame[columns].to_numpy(dtype=np.float64)


def _packages(modeldata: Path) -> Table:
    frame = lazy_load(modeldata, "check_times")
    compiled = _numbers(frame, ["src_count"])[:, 0] > 0
    inputs, counts = _numbers(frame, _COUNTS), _numbers(frame, ["r_count"])[:, 0]
    return Table(inputs[~compiled], counts[~compiled], inputs[compiled], "with compiled code")


def _developers(modeldata: Path) -> Table:
    frame = lazy_load(modeldata, "stackoverflow")
    kinds = [
        str(name) for name in frame.columns if str(name) not in (*_ABOUT_DEVELOPERS, "Country", "Remote")
    ]
    inputs = np.column_stack(
        [_numbers(frame, list(_ABOUT_DEVELOPERS)), frame["Remote"].astype(str).to_numpy() == "Remote"]
    ).astype(np.float64)
    india = frame["Country"].astype(str).to_numpy() == "India"
    labels = _numbers(frame, kinds)
    return Table(inputs[~india], labels[~india], inputs[india], "in India", tuple(kinds))


def _houses(modeldata: Path) -> Table:
    frame = lazy_load(modeldata, "ames")
    columns = [str(name) for name in frame.select_dtypes("number").columns if name != "Sale_Price"]
    inputs, price = _numbers(frame, columns), _numbers(frame, ["Sale_Price"])[:, 0] / 1e5
    old = _numbers(frame, ["Year_Built"])[:, 0] < _OLD
    return Table(inputs[~old], price[~old], inputs[old], f"built before {_OLD}")


def made(kind: str, rows: int, seed: int = 0) -> Table:
    """A table whose law is known: counts of a negative binomial distribution, labels of independent logits, values
    whose noise depends on the second column. The group is far away.
    """
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6))
    if kind == "counts":
        mean = np.exp(0.5 + 0.6 * x[:, 0] - 0.4 * x[:, 1])
        y = random.poisson(random.gamma(1 / DISPERSION, DISPERSION * mean)).astype(np.float64)
        names: tuple[str, ...] = ()
    elif kind == "labels":
        logits = 1.5 * x[:, :4] - 0.5
        y = (random.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float64)
        names = ("a", "b", "c", "d")
    else:
        y = x[:, 0] + 0.5 * np.sin(2 * x[:, 2]) + random.normal(size=rows) * np.exp(x[:, 1] - 1)
        names = ()
    return Table(x, y, 5 + random.normal(size=(rows // 4, 6)), "far away", names)


def split(table: Table, seed: int) -> Split:
    """A random split, 70 % for training, 10 % held out, 20 % for the test; standardised by the training rows.

    Foreign are the group that is left out, and the test rows with every column shuffled by itself: each value is
    familiar, their combination is not.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(table.targets))
    first, second = int(0.7 * len(order)), int(0.8 * len(order))
    parts = order[:first], order[first:second], order[second:]
    raw = table.inputs[parts[0]]
    skewed = (raw.min(0) >= 0) & (raw.max(0) > _SKEWED * np.abs(raw.mean(0)))

    def prepared(inputs: np.ndarray) -> np.ndarray:
        return np.where(skewed, np.log1p(np.maximum(inputs, 0)), inputs)

    centre, spread = prepared(raw).mean(0), prepared(raw).std(0)
    spread = np.where(spread > 1e-9 * (1 + np.abs(centre)), spread, 1.0)

    def inputs_of(inputs: np.ndarray) -> Tensor:
        return torch.from_numpy((prepared(inputs) - centre) / spread).float()

    train, held_out, test = (
        Rows(inputs_of(table.inputs[part]), torch.from_numpy(table.targets[part]).float()) for part in parts
    )
    columns = [column[torch.from_numpy(random.permutation(len(column)))] for column in test.inputs.T]
    foreign = {table.group_name: inputs_of(table.group), "columns shuffled": torch.stack(columns, 1)}
    return Split(train, held_out, test, foreign, table.names)
