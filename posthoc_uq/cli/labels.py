"""Files that say which output of a model is which class."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
        if path.lower().endswith(".json"):
            return json.loads(text)
    except FileNotFoundError:
        raise PosthocUQError(f"{option}: there is no file '{path}'.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PosthocUQError(f"{option}: '{path}' cannot be read as text: {error}") from None
    except ValueError as error:
        raise PosthocUQError(f"{option}: '{path}' is not valid JSON: {error}") from None
    return [line.strip() for line in text.rstrip().splitlines()]


def read_names(path: str) -> list[str]:
    """Names of the outputs in their order: the class folders of a folder; the lines of a file; or as JSON a list, or an
    object from index to name (or to a list that ends with the name, as in ImageNet's class index).

    Raises:
        PosthocUQError: the file is missing or of another form.
    """
    if Path(path).is_dir():
        folders = sorted(item.name for item in Path(path).iterdir() if item.is_dir() and item.name[0] != ".")
        if not folders:
            raise PosthocUQError(f"--class_names: the folder '{path}' has no class folders.")
        return folders
    content = _content(path, "--class_names")
    if isinstance(content, Mapping):
        entries = cast(Mapping[str, Any], content)
        missing = next((index for index in range(len(entries)) if str(index) not in entries), None)
        if missing is not None:
            raise PosthocUQError(
                f"--class_names: '{path}' must name every index from 0 to {len(entries) - 1}; '{missing}' is missing."
            )
        content = [entries[str(index)] for index in range(len(entries))]
    items = cast("list[Any]", content) if isinstance(content, list) else []
    names = [item[-1] if isinstance(item, list) and item else item for item in items]
    if not names or not all(isinstance(name, str) for name in names):
        raise PosthocUQError(f"--class_names: '{path}' must hold one name for each output.")
    return cast("list[str]", names)


def read_map(path: str) -> dict[str, int]:
    """Class folder to output index: the folders' names in the order of the outputs, one per line, or the first word
    of each; or as JSON a list of them, an object from name to index, or one from index to name or names.

    Raises:
        PosthocUQError: the file is missing or of another form.
    """
    content = _content(path, "--class_map")
    lines = not path.lower().endswith(".json")
    words = {str(line).split()[0]: index for index, line in enumerate(content) if line} if lines else {}
    if len(words) < sum(map(bool, content)):  # two lines begin with the same word
        words = {}
    index_of: dict[str, int] = {}
    for name, index in _entries(content):
        if not isinstance(name, str) or type(index) is not int or index < 0:
            raise PosthocUQError(
                f"--class_map: '{path}' must map names of folders to output indices from 0 on."
            )
        if index_of.get(name, index) != index and not words:
            raise PosthocUQError(
                f"--class_map: '{path}' gives the name '{name}' to the outputs {index_of[name]} and {index}; names "
                f"must differ (wnids do)."
            )
        if name:
            index_of[name] = index
    return words | index_of  # whole lines win over first words


def _entries(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every name in a class map with its index."""
    if not isinstance(content, Mapping):
        yield from ((name, index) for index, name in enumerate(cast("list[Any]", content)))
        return
    entries = cast(Mapping[str, Any], content)
    by_name = all(isinstance(value, int) for value in entries.values())
    for key, value in entries.items():
        if by_name:
            yield key, value
        else:
            index = int(key) if key.isdigit() else None
            yield from ((name, index) for name in (value if isinstance(value, list) else [value]))


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
                f"--class_map FILE."
            )
        return {name: index for index, name in enumerate(classes)}
    mapped = read_map(path)
    missing = [name for name in classes if name not in mapped]
    if missing:
        raise PosthocUQError(
            f"--class_map: '{path}' lacks {len(missing)} of the class folders of '{folder}': "
            f"{', '.join(missing[:_SHOWN])}{', ...' if len(missing) > _SHOWN else ''}."
        )
    index_of = {name: mapped[name] for name in classes}
    beyond = next((name for name, index in index_of.items() if index >= outputs), None)
    if beyond is not None:
        raise PosthocUQError(
            f"--class_map: '{path}' gives '{beyond}' the index {index_of[beyond]}, and the model has {outputs} "
            f"outputs, from 0 on."
        )
    return index_of
