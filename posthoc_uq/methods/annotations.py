"""The check that a method's options have the types that its fields declare."""

from __future__ import annotations

import types
from dataclasses import fields
from math import isfinite
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.values import as_float, as_integer, shown

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "None",
    torch.dtype: "a torch.dtype",
}


class _WrongType(Exception):
    pass


def check_types(options: Any) -> None:
    """Refuse fields of a dataclass whose values do not have the declared types. Numbers may be Python's, NumPy's or
    torch's; they must be finite, and are replaced by Python's own.

    Raises:
        PosthocUQError: names the first such field, what it takes and its value.
    """
    try:
        declared = get_type_hints(type(options))
    except NameError:  # a class inside of a function, whose types cannot be looked up
        return
    for field in fields(options):
        value, kind = getattr(options, field.name), declared[field.name]
        try:
            plain = _plain(value, kind)
        except _WrongType:
            raise PosthocUQError(f"{field.name} must be {_words(kind)}, not {shown(value)}.") from None
        if plain is not value:
            object.__setattr__(options, field.name, plain)  # a frozen dataclass is still being made


def _plain(value: Any, kind: Any) -> Any:
    """The value in the declared type; `_WrongType` if it cannot have that type."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for alternative in get_args(kind):
            try:
                return _plain(value, alternative)
            except _WrongType:
                continue
        raise _WrongType
    if origin is Literal:
        if any(type(value) is type(alternative) and value == alternative for alternative in get_args(kind)):
            return value
        raise _WrongType
    if kind in (int, float):
        number = as_integer(value) if kind is int else as_float(value)
        if number is None or not isfinite(number):
            raise _WrongType
        return number
    kind = kind if origin is None else origin
    if isinstance(kind, type) and not isinstance(value, kind):
        raise _WrongType
    return value


def _words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(alternative) for alternative in get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {get_args(kind)}"
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    return _WORDS.get(kind, "callable" if name == "Callable" else f"a {name}")
