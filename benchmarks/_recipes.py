"""Modules of the recipes that a benchmark shares: their data and networks."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@cache
def recipe(folder: str, name: str) -> ModuleType:
    """One module of a recipe.

    Modules of different recipes bear the same names, so what the import leaves in `sys.modules` is taken out again.

    Args:
        folder: of the recipe, below ``recipes``.
        name: of the module.
    """
    path = str(RECIPES / folder)
    own = {file.stem for file in Path(path).glob("*.py")}
    hidden = {other: sys.modules.pop(other) for other in own & sys.modules.keys()}
    sys.path.insert(0, path)
    try:
        return import_module(name)
    finally:
        sys.path.remove(path)
        for other in own & sys.modules.keys():
            del sys.modules[other]
        sys.modules.update(hidden)
