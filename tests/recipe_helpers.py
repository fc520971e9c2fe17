"""What the tests of the recipes share: running a script, importing its parts, data in FashionMNIST's format."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import os
import runpy
import struct
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
NO_RESULTS = "These numbers are not results."
"""What every page of a smoke run says."""


def _purged(names: set[str]) -> dict[str, ModuleType]:
    """Modules of these names, taken out of those that are imported."""
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}


@contextlib.contextmanager
def _own_modules(names: set[str], folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Scripts of a folder are imported by these names; modules of the same names elsewhere are kept apart."""
    before = _purged(names)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            # folders of other recipes that a script put there would come before those that this one adds
            sys.path[:] = [p for p in sys.path if Path(p).parent != RECIPES or Path(p) == folder]
            yield patch
    finally:
        _purged(names)
        sys.modules.update(before)


def run_recipe(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script of the recipes' folder as `python script` runs it, but in this process: a new one loads torch again.

    What it sets for its process is taken back: arguments, path, environment, random numbers, threads, warnings.
    """
    path = RECIPES / script
    command = [str(path), *map(str, arguments)]
    names = {file.stem for file in RECIPES.rglob("*.py")}
    out, err, numbers, threads, code = (
        io.StringIO(),
        io.StringIO(),
        np.random.get_state(),
        torch.get_num_threads(),
        0,
    )
    with (
        _own_modules(names, path.parent) as patch,
        mock.patch.dict(os.environ),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", command)
        warnings.simplefilter("ignore")  # smoke runs are too short for most trainings, which say so
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        finally:
            torch.set_num_threads(threads)
            np.random.set_state(numbers)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def recipe_modules(folder: str, names: Sequence[str], others: Sequence[str] = ()) -> Namespace:
    """Modules of a recipe, imported as its scripts do; modules of the same names elsewhere are kept apart.

    Args:
        folder: of the recipe.
        names: of the modules.
        others: recipes whose modules these use.
    """
    own = {path.stem for recipe in (folder, *others) for path in (RECIPES / recipe).glob("*.py")}
    with _own_modules(own, RECIPES / folder):
        return Namespace(**{name: importlib.import_module(name) for name in names})


def help_of(module: ModuleType) -> str:
    """What a script prints for ``--help``, in this process: a new one would load torch again."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [f"{module.__name__}.py", "--help"])
        with pytest.raises(SystemExit) as left:
            module.main()
    assert not left.value.code
    return printed.getvalue()


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
