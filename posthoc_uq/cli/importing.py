"""Objects by an import path: ``package.module:name`` or ``file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean


def is_import_path(text: str) -> bool:
    """Whether a text has the form of an import path."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module) and all(part.isidentifier() for part in name.split("."))


def import_object(path: str) -> Any:
    """The object that an import path names; the current folder is looked in as well.

    Raises:
        PosthocUQError: there is no such module or name, or importing it fails.
    """
    where, _, names = path.rpartition(":")
    if not is_import_path(path):
        raise PosthocUQError(f"'{path}' is not of the form package.module:name or file.py:name.")
    module = _from_file(where) if where.endswith(".py") else _by_name(where)
    value: Any = module
    for name in names.split("."):
        if not hasattr(value, name):
            close = did_you_mean(
                name, [attribute for attribute in dir(value) if not attribute.startswith("_")]
            )
            raise PosthocUQError(f"'{where}' has no '{name}'.{close}")
        value = getattr(value, name)
    return value


def call_imported(path: str) -> Any:
    """What the function that an import path names returns, called without arguments.

    Raises:
        PosthocUQError: there is none, or it cannot be called so.
    """
    function = import_object(path)
    if not callable(function):
        raise PosthocUQError(
            f"'{path}' is a {type(function).__name__}; it must be a function without arguments."
        )
    if needs_arguments(function):
        raise PosthocUQError(f"'{path}' needs arguments; it must be a function that is called without any.")
    return function()


def needs_arguments(function: Any) -> bool:
    """Whether a callable has parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind not in variable for p in parameters)


def _by_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise PosthocUQError(f"'{name}' is not the name of a Python module.")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise PosthocUQError(
                f"There is no Python module '{name}' in the current folder or the environment."
            ) from None
        raise _failed(name, error) from error
    except Exception as error:
        raise _failed(name, error) from error


def _from_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    if not path.is_file():
        raise PosthocUQError(f"There is no file '{name}'.")
    # A worker process that starts afresh finds the module by its name.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PosthocUQError(f"'{name}' cannot be imported as Python code.")
    module = importlib.util.module_from_spec(spec)
    if known is None:
        sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise _failed(name, error) from error
    return module


def _failed(name: str, error: Exception) -> PosthocUQError:
    return PosthocUQError(
        f"'{name}' could not be imported: {type(error).__name__}: {error} (--debug shows where.)"
    )
