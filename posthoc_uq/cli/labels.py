"""Files that say which output of a model is which class."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.paths import check_regular

_SHOWN = 3


def _content(path: str, option: str) -> Any:
    """The value in a JSON file, or the lines of a text file without empty ones at its end."""
    check_regular(path, f"{option}:")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PosthocUQError(f"{option}: there is no file '{path}'.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PosthocUQError(f"{option}: '{path}' cannot be read as text: {error}") from None
    if path.lower().endswith(".json"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise PosthocUQError(f"{option}: '{path}' is not valid JSON: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def read_names(path: str) -> list[str]:
    """Names of the outputs in their order: the class folders of a folder; the lines of a file; or as JSON a list, or an
    object from index to name (or to a list that ends with the name, as in ImageNet's class index).

    Raises:
        PosthocUQError: the file is missing or of another form.
    """
    if Path(path).is_dir():
        return _class_folders(path)
    content = _content(path, "--class-names")
    if isinstance(content, Mapping):
        entries = cast(Mapping[str, Any], content)
        try:
            content = [entries[str(index)] for index in range(len(entries))]
        except KeyError as error:
            raise PosthocUQError(
                f"--class-names: '{path}' must name every index from 0 to {len(entries) - 1}; {error} is missing."
            ) from None
    names = [item[-1] if isinstance(item, list) and item else item for item in cast(list[Any], content)]
    if not names or not all(isinstance(name, str) for name in names):
        raise PosthocUQError(f"--class-names: '{path}' must hold one name for each output.")
    return cast(list[str], names)


def _class_folders(path: str) -> list[str]:
    names = sorted(item.name for item in Path(path).iterdir() if item.is_dir() and item.name[0] != ".")
    if not names:
        raise PosthocUQError(f"--class-names: the folder '{path}' has no class folders.")
    return names


def read_map(path: str) -> dict[str, int]:
    """Class folder to output index: the folders' names in the order of the outputs, one per line, or the first word
    of each; or as JSON a list of them, an object from name to index, or one from index to name or names.

    Raises:
        PosthocUQError: the file is missing or of another form.
    """
    content = _content(path, "--class-map")
    pairs: list[tuple[Any, Any]]
    first_words: list[tuple[str, int]] = []
    if isinstance(content, Mapping):
        pairs = list(cast(Mapping[str, Any], content).items())
        if not all(isinstance(value, int) for _, value in pairs):
            pairs = [(value, int(key) if key.isdigit() else None) for key, value in pairs]
    else:
        pairs = [(name, index) for index, name in enumerate(cast(list[Any], content))]
        if not path.lower().endswith(".json"):
            first_words = [(str(name).split()[0], index) for name, index in pairs if str(name).split()]
            if len({word for word, _ in first_words}) < len(first_words):
                first_words = []
            pairs = first_words + pairs  # whole lines win over first words
    index_of: dict[str, int] = {}
    words = {word for word, _ in first_words}
    for names, index in pairs:
        for name in cast(list[Any], names if isinstance(names, list) else [names]):
            if (
                not isinstance(name, str)
                or not isinstance(index, int)
                or isinstance(index, bool)
                or index < 0
            ):
                raise PosthocUQError(
                    f"--class-map: '{path}' must map names of folders to output indices from 0 on."
                )
            if index_of.get(name, index) != index and name not in words:
                raise PosthocUQError(
                    f"--class-map: '{path}' gives the name '{name}' to the outputs {index_of[name]} and {index}; "
                    f"names must differ (wnids do)."
                )
            if name:
                index_of[name] = index
    return index_of


def folder_labels(classes: Sequence[str], outputs: int, path: str | None, folder: str) -> dict[str, int]:
    """Class folder to output index: in their order where there are as many as outputs, or by a class map.

    Raises:
        PosthocUQError: the class folders cannot be matched to the outputs.
    """
    if len(classes) > outputs:
        raise PosthocUQError(
            f"'{folder}' has {len(classes)} class folders, more than the model's {outputs} outputs; is it the right "
            f"model, or folder?"
        )
    if path is None:
        if len(classes) < outputs:
            raise PosthocUQError(
                f"'{folder}' has {len(classes)} class folders and the model {outputs} outputs; say which is which with "
                f"--class-map FILE."
            )
        return {name: index for index, name in enumerate(classes)}
    mapped = read_map(path)
    missing = [name for name in classes if name not in mapped]
    if missing:
        raise PosthocUQError(
            f"--class-map: '{path}' lacks {len(missing)} of the class folders of '{folder}': "
            f"{', '.join(missing[:_SHOWN])}{', ...' if len(missing) > _SHOWN else ''}."
        )
    index_of = {name: mapped[name] for name in classes}
    beyond = [name for name, index in index_of.items() if index >= outputs]
    if beyond:
        raise PosthocUQError(
            f"--class-map: '{path}' gives '{beyond[0]}' the index {index_of[beyond[0]]}, and the model has {outputs} "
            f"outputs, from 0 on."
        )
    return index_of
