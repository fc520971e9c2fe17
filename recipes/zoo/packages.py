"""Parts of installed packages, where importing the whole package would need more packages than its network does."""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def folder_of(package: str) -> Path:
    """Where an installed package lies."""
    place = find_spec(package)
    if place is None or place.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed; see requirements.txt beside this recipe.")
    return Path(place.origin).parent


def module_of(name: str, stand_ins: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """A module without its package's own ``__init__``; the program's table of modules is as it was.

    Args:
        name: such as ``"torchcrepe.model"``.
        stand_ins: what takes the place of modules that it imports and does not need, by name; the package's own name
            has what its ``__init__`` would define.
    """
    package = name.partition(".")[0]
    folder, given = folder_of(package), dict(stand_ins or {})
    before = dict(sys.modules)
    for loaded in [key for key in before if key.partition(".")[0] == package]:
        del sys.modules[loaded]
    for key in sorted({package, *given}):  # a package before its modules
        module = ModuleType(key)
        vars(module).update(given.get(key, {}))
        sys.modules[key] = module
        parent, _, leaf = key.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], leaf, module)
    sys.modules[package].__path__ = [str(folder)]
    try:
        return import_module(name)
    finally:
        ours = {package, *(key.partition(".")[0] for key in given)}
        for key in [key for key in sys.modules if key.partition(".")[0] in ours]:
            del sys.modules[key]
        sys.modules.update(before)


def weights_of(package: str, *path: str) -> dict[str, Any]:
    """What a package's file of weights has: a dictionary of tensors, or of such ones."""
    found: dict[str, Tensor] = torch.load(
        folder_of(package).joinpath(*path), map_location="cpu", weights_only=True
    )
    return found
