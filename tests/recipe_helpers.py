"""What the tests of the recipes share: running a script, importing its parts, data in FashionMNIST's format."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import os
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sklearn.datasets import load_digits

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
NO_RESULTS = "These numbers are not results."
"""What every page of a smoke run says."""


def run_recipe(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script of the recipes' folder in a process of its own, on one thread."""
    return subprocess.run(
        [sys.executable, str(RECIPES / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def recipe_modules(folder: str, names: Sequence[str], others: Sequence[str] = ()) -> Namespace:
    """Modules of a recipe, imported as its scripts do; modules of the same names elsewhere are kept apart.

    Args:
        folder: of the recipe.
        names: of the modules.
        others: recipes whose modules these use.
    """
    own = {path.stem for recipe in (folder, *others) for path in (RECIPES / recipe).glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(RECIPES / folder))
            return Namespace(**{name: importlib.import_module(name) for name in names})
    finally:
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(before)


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
