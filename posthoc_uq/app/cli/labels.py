"""Files that say which output of a model is which class.

Class folders sorted by name are the outputs from 0 on. With fewer folders than outputs, ``--class-map FILE`` has the
folders' names in the order of the outputs: one a line (or as the first word of each, as in ImageNet's
``LOC_synset_mapping.txt``), or JSON, a list, ``{"n01440764": 0}`` or ``{"0": ["n01440764", "tench"]}``.

Names in a CSV and a report are those of ``--class-names`` (one a line, JSON, or the folder of the training images);
else, in `evaluate`, of the class folders; else those of the fit; else torchvision's categories with ``--pretrained``;
else numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posthoc_uq.app.paths import check_regular
from posthoc_uq.core.errors import PosthocUQError

_MAX_NAMED = 3  # class folders that an error names


def _entries(path: str, option: str) -> list[tuple[int, list[str]]]:
    """Index and names of every output that a file names: one a line; or as JSON a list, an object from name to index,
    or one from index to a name or several.
    """
    check_regular(path, f"{option}:")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content: Any = json.loads(text) if path.lower().endswith(".json") else text.rstrip().splitlines()
        if not isinstance(content, dict):
            return [(index, [line.strip()]) for index, line in enumerate(content)]
        if all(type(index) is int and index >= 0 for index in content.values()):
            return [(index, [name]) for name, index in content.items()]
        if not all(content.values()):
            raise ValueError("an output without a name")
        named = {int(index): [names] if isinstance(names, str) else names for index, names in content.items()}
        return [(index, [name.strip() for name in names]) for index, names in named.items()]
    except OSError as error:
        raise PosthocUQError(f"{option}: '{path}' cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise PosthocUQError(f"{option}: '{path}' is not text in UTF-8.") from None
    except json.JSONDecodeError as error:
        raise PosthocUQError(f"{option}: '{path}' is not valid JSON: {error}.") from None
    except (AttributeError, LookupError, TypeError, ValueError):
        raise PosthocUQError(
            f"{option}: '{path}' must give a name for each output, or map names to the indices of outputs, from 0 on."
        ) from None


def read_names(path: str) -> list[str]:
    """Names of the outputs in their order: the class folders of a folder, or those in a file, of several for one output
    the last, as in ImageNet's class index.

    Raises:
        PosthocUQError: the file is missing, of another form, or leaves an output out.
    """
    if Path(path).is_dir():
        names = sorted(item.name for item in Path(path).iterdir() if item.is_dir() and item.name[0] != ".")
    else:
        name_of = {index: names[-1] for index, names in _entries(path, "--class-names")}
        missing = next((index for index in range(len(name_of)) if index not in name_of), None)
        if missing is not None:
            raise PosthocUQError(f"--class-names: '{path}' must name every output, and {missing} is missing.")
        names = [name_of[index] for index in range(len(name_of))]
    if not names:
        raise PosthocUQError(f"--class-names: '{path}' has no names, or no class folders.")
    return names


def read_map(path: str) -> dict[str, int]:
    """Class folder to output index, by the names in a file; of lines also by their first words, if these differ.

    Raises:
        PosthocUQError: the file is missing or of another form, or gives one name to two outputs.
    """
    entries = [(index, name) for index, names in _entries(path, "--class-map") for name in names if name]
    words = {} if path.lower().endswith(".json") else {name.split()[0]: index for index, name in entries}
    if len(words) < len(entries):
        words = {}
    index_of: dict[str, int] = {}
    for index, name in entries:
        if index_of.setdefault(name, index) != index and not words:
            raise PosthocUQError(
                f"--class-map: '{path}' gives the name '{name}' to the outputs {index_of[name]} and {index}; names "
                f"must differ (wnids do)."
            )
    return words | index_of


def folder_labels(classes: Sequence[str], outputs: int, path: str | None, folder: str) -> dict[str, int]:
    """Class folder to output index: in their order where there are as many as outputs, or by a class map.

    Raises:
        PosthocUQError: the class folders cannot be matched to the outputs.
    """
    found = f"'{folder}' has {len(classes)} class folders"
    if len(classes) > outputs:
        raise PosthocUQError(
            f"{found}, more than the model's {outputs} outputs; is it the right model, or folder?"
        )
    if path is None:
        if len(classes) < outputs:
            raise PosthocUQError(
                f"{found} and the model {outputs} outputs; say which is which with --class-map FILE."
            )
        return {name: index for index, name in enumerate(classes)}
    mapped = read_map(path)
    missing = [name for name in classes if name not in mapped]
    if missing:
        raise PosthocUQError(
            f"--class-map: '{path}' lacks {len(missing)} of the class folders of '{folder}': "
            f"{', '.join(missing[:_MAX_NAMED])}{', ...' if len(missing) > _MAX_NAMED else ''}."
        )
    beyond = next((name for name in classes if mapped[name] >= outputs), None)
    if beyond is not None:
        raise PosthocUQError(
            f"--class-map: '{path}' gives '{beyond}' the index {mapped[beyond]}, and the model has {outputs} outputs, "
            f"from 0 on."
        )
    return {name: mapped[name] for name in classes}
