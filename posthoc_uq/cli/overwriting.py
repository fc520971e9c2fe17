"""What a command may write: never over something that it reads, and over another file only with ``--force``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.paths import IMAGE_ENDINGS, folder_files
from posthoc_uq.files.atomic import checked_target

OUTPUTS = {"output": "--output", "report": "--report", "csv_path": "--csv", "json_file": "--json-file"}
"""Parameters of commands that name a file to write, and how they are spelt."""

KEPT = {"checkpoint": "--checkpoint", "log": "--log"}
"""Those that name a file from which a fit goes on, or to which a server adds: it may be there, and is refused where it
is opened if it is another kind of file.
"""

INPUTS = ("file", "data", "val_data", "ood", "weights", "class_map", "class_names", "reference", "images")
"""Parameters that name files or folders to read."""

CODE = ("model", "transform", "data", "val_data", "ood")
"""Parameters that may name code."""

_Identity = tuple[int, int]


def check_outputs(parameters: Mapping[str, Any]) -> None:
    """Refuse a command that would write over one of its inputs, twice into one file, or without ``--force`` over a file
    that is there. A posterior that a command changes is no output: it is written again where no other file is named.

    Args:
        parameters: of the command, by name.

    Raises:
        PosthocUQError: it would, or a file cannot be written.
    """
    _check(_named(parameters), parameters)


def check_files(flag: str, paths: Iterable[str | os.PathLike[str]], parameters: Mapping[str, Any]) -> None:
    """As `check_outputs`, with the files that a command writes into the folder that the option `flag` names."""
    _check([*_named(parameters), *((flag, os.fspath(path)) for path in paths)], parameters)


def _named(parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options that name files to write, with the files."""
    flags = {**OUTPUTS, **KEPT}
    return [(flag, parameters[name]) for name, flag in flags.items() if parameters.get(name) is not None]


def _check(written: Sequence[tuple[str, str]], parameters: Mapping[str, Any]) -> None:
    names: dict[str, str] = {}
    there: dict[_Identity, tuple[str, str]] = {}
    for flag, path in written:
        target = checked_target(path)
        # Names that differ in capital letters alone are one file on some systems, which cannot be asked about a file
        # that is not there yet.
        owners = {names.setdefault(str(target).casefold(), flag)}
        identity = _identity(target)
        if identity is not None:
            owners.add(there.setdefault(identity, (flag, path))[0])
        if owners != {flag}:
            raise PosthocUQError(
                f"{' and '.join(sorted({*owners, flag}))} name the same file, '{path}'; give them different names."
            )
    if not there:
        return
    for identity, spec in _inputs(parameters):
        if identity in there:
            flag, path = there[identity]
            raise PosthocUQError(
                f"{flag}: '{path}' is an input of this command ('{spec}'), and no command writes over its inputs; give "
                f"another name."
            )
    for flag, path in there.values():
        if not parameters.get("force") and flag not in KEPT.values():
            raise PosthocUQError(
                f"{flag}: '{path}' is there already; give another name, or --force to write over it."
            )


def _identity(path: str | os.PathLike[str]) -> _Identity | None:
    """Which file a path leads to, under whatever name: as `os.path.samefile` compares them; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _inputs(parameters: Mapping[str, Any]) -> Iterator[tuple[_Identity, str]]:
    """Every file that a command reads, with what the user called it."""
    for path, spec in _input_paths(parameters):
        identity = _identity(path)
        if identity is not None:
            yield identity, spec


def _input_paths(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for spec in _specs(parameters, INPUTS):
        if os.path.isdir(spec):
            yield from ((path, spec) for path in _files_in(spec, IMAGE_ENDINGS))
        elif spec.startswith("torchvision:"):
            root = parameters.get("data_root") or "data"
            yield from ((path, root) for path in _files_in(root))
        else:
            yield spec, spec
    for spec in _specs(parameters, CODE):
        module, colon, _ = spec.rpartition(":")
        if colon:
            yield from ((path, spec) for path in _code_files(module))
    if (
        "pictures" in parameters and parameters.get("images") is None
    ):  # of monitor, which looks beside its table
        folder = os.path.dirname(parameters["file"]) or "."
        yield from ((path, folder) for path in _files_in(folder, IMAGE_ENDINGS))


def _specs(parameters: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        value = parameters.get(name)
        values: Iterable[Any] = [value] if isinstance(value, str) else value or ()
        for item in values:  # --ood has pairs of a name and data
            yield str(item[1]) if isinstance(item, tuple) else str(item)


def _files_in(folder: str, endings: tuple[str, ...] = ("",)) -> Iterator[str]:
    return (os.path.join(folder, file) for file in folder_files(folder) if file.lower().endswith(endings))


def _code_files(module: str) -> Iterator[str]:
    """The files that importing a module reads: its own, and those of the packages that it is in."""
    if module.endswith(".py"):
        yield module
        return
    parts = module.split(".")
    for folder in (os.getcwd(), *sys.path):
        for length in range(1, len(parts) + 1):
            place = os.path.join(folder, *parts[:length])
            yield from (f"{place}.py", os.path.join(place, "__init__.py"))
