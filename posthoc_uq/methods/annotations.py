"""Options of the wrong type, found by the types that the fields of a method are declared with."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from posthoc_uq.errors import PosthocUQError

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "None",
    torch.dtype: "a torch.dtype",
}


def check_types(options: Any) -> None:
    """Refuse fields of a dataclass whose values are not of the declared types; numbers must be finite as well.

    Raises:
        PosthocUQError: names the first such field, what it takes and what was given.
    """
    try:
        declared = get_type_hints(type(options))
    except NameError:  # a class inside of a function, whose types no module knows
        return
    for field in fields(options):
        value, kind = getattr(options, field.name), declared[field.name]
        if not _suits(value, kind):
            raise PosthocUQError(f"{field.name} must be {_words(kind)}, not {value!r:.200}.")


def _suits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_suits(value, own) for own in get_args(kind))
    if origin is Literal:
        return any(type(value) is type(own) and value == own for own in get_args(kind))
    if kind is float:
        return _is_number(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    kind = kind if origin is None else origin
    return isinstance(value, kind) if isinstance(kind, type) else True


def _is_number(value: Any) -> bool:
    """Whether it is one finite number of any kind: Python's, NumPy's, a tensor of one."""
    if isinstance(value, (bool, str, bytes)):
        return False
    try:
        return abs(float(value)) < float("inf")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def _words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(own) for own in get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {get_args(kind)}"
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    return _WORDS.get(kind, "callable" if name == "Callable" else f"a {name}")
