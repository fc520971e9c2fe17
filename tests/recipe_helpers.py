"""What the tests of the recipes share: running a script, importing its parts, data in FashionMNIST's format."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import struct
import warnings
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from sklearn.datasets import load_digits

from recipes.common import NOTE

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def smoke(script: str, *arguments: object) -> str:
    """What a script such as ``uci.predictions`` prints in its smoke mode, run in this process: a new one loads torch
    again. What it sets for its process is taken back: environment, random numbers, threads, warnings.
    """
    printed, numbers, threads = io.StringIO(), np.random.get_state(), torch.get_num_threads()
    with (
        mock.patch.dict(os.environ),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
    ):
        warnings.simplefilter("ignore")  # smoke runs are too short for most trainings, which say so
        try:
            import_module(f"recipes.{script}").main(["--smoke", *map(str, arguments)])
        finally:
            torch.set_num_threads(threads)
            np.random.set_state(numbers)
    assert NOTE in printed.getvalue()
    return printed.getvalue()


def recipe_modules(folder: str, names: Sequence[str]) -> Namespace:
    """Modules of a recipe, by name."""
    return Namespace(**{name: import_module(f"recipes.{folder}.{name}") for name in names})


def write_fashion_mnist(target: Path) -> Path:
    """scikit-learn's digits in the four files of FashionMNIST, as Debian ships them."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.kron(pixels.reshape(-1, 8, 8), np.ones((3, 3)))  # 24 x 24
    images = np.pad(images * (255 / 16), ((0, 0), (2, 2), (2, 2))).round().astype(np.uint8)
    for name, part in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        chosen = images[part]
        header = struct.pack(">IIII", 0x803, len(chosen), 28, 28)
        (target / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + chosen.tobytes()))
        header = struct.pack(">II", 0x801, len(chosen))
        numbers = labels[part].astype(np.uint8).tobytes()
        (target / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + numbers))
    return target
