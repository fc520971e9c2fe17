"""Help texts out of docstrings: the first line of a class, and what is said of each of its options."""

from __future__ import annotations

import inspect
import re
from typing import Any

_ENTRY = re.compile(r"\*{0,2}(\w+)(?: \([^)]*\))?: (.*)")
_SETTING = re.compile(r"(\w+)=\"?([\w.]+)\"?")
_MARKS = re.compile(r"``\"([^`\"]*)\"``|``([^`]*)``|`([^`]*)`|\*\*")


def summary(kind: type) -> str:
    """The first line of a class's docstring, without its full stop; nothing where there is no docstring."""
    lines = _written(kind).splitlines()
    return _without_marks(lines[0]).rstrip(".") if lines else ""


def described(kind: Any, section: str) -> dict[str, str]:
    """What the docstring of a class or function says of each name in a section, such as ``"Attributes"``. For a class,
    the docstrings of its bases count too, and its own comes first.
    """
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__) if isinstance(kind, type) else [kind]:
        texts |= _entries(_written(owner), section)
    return texts


def _written(owner: Any) -> str:
    """The docstring that somebody wrote; not the one that `dataclass` makes, nor one that is inherited."""
    text = vars(owner).get("__doc__") if isinstance(owner, type) else owner.__doc__
    if not text or (isinstance(owner, type) and text.startswith(f"{owner.__name__}(")):
        return ""
    return inspect.cleandoc(text)


def _entries(text: str, section: str) -> dict[str, str]:
    lines = text.splitlines()
    if f"{section}:" not in lines:
        return {}
    entries: dict[str, str] = {}
    name = ""
    for line in lines[lines.index(f"{section}:") + 1 :]:
        depth = len(line) - len(line.lstrip())
        if line and depth == 0:
            break
        entry = _ENTRY.fullmatch(line.strip()) if depth == 4 else None
        if entry is not None:
            name = entry[1]
            entries[name] = entry[2]
        elif name and line:
            entries[name] += " " + line.strip()
    return {name: _capitalised(_without_marks(entry), entry) for name, entry in entries.items()}


def _capitalised(text: str, written: str) -> str:
    """With a capital letter, unless it begins with something from the code."""
    return text[:1].upper() + text[1:] if written[:1].isalpha() else text


def _without_marks(text: str) -> str:
    """Without the marks of code; an option and its value are as on the command line: ``fisher="mc"`` is --fisher mc."""
    return _MARKS.sub(_unmarked, text)


def _unmarked(match: re.Match[str]) -> str:
    code = next((part for part in match.groups() if part is not None), "")
    option = _SETTING.fullmatch(code)
    return code if option is None else f"--{option[1].replace('_', '-')} {option[2]}"
