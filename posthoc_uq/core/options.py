"""Options: what a user may pass, and how it is checked."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Integral
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch

from posthoc_uq.core.errors import PosthocUQError

# Checks of settings that a user passes in any type: numbers, names, functions, flags.


@dataclass(frozen=True)
class Number:
    """A kind of finite number of Python, NumPy or torch; True and False do not count as numbers.

    Attributes:
        text: the kind in words, to follow "must be".
        least: the smallest allowed value.
        most: the largest allowed value.
        above: a bound that the value must exceed.
        whole: whether it must be a whole number.
    """

    text: str
    least: float = -inf
    most: float = inf
    above: float = -inf
    whole: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        """The value as a float, or as an int where it must be whole.

        Args:
            name: of the setting, for the error.
            value: the value that was passed.

        Raises:
            PosthocUQError: it is no such number, or out of bounds.
        """
        number = as_integer(value) if self.whole else as_float(value)
        if number is None:
            raise PosthocUQError(
                f"{name} must be {'' if self.whole else 'one number, '}{self.text}; not {shown(value)}."
            )
        finite = self.whole or isfinite(number)
        if not (finite and self.least <= number <= self.most and number > self.above):
            raise PosthocUQError(f"{name} must be {self.text}, not {value}.")
        return number


POSITIVE = Number("positive and finite", above=0)
NOT_NEGATIVE = Number("finite and not negative", least=0)
UNIT = Number("in [0, 1]", least=0, most=1)
SHARE = Number("in (0, 1]", above=0, most=1)
SHARE_OR_AUTO = Number("in (0, 1], or 'auto'", above=0, most=1)
COUNT = Number("a whole number, at least 1", least=1, most=2**63 - 1, whole=True)
NATURAL = Number("a whole number, 0 or more", least=0, most=2**63 - 1, whole=True)
SEED = Number("a whole number from -2^63 to 2^64 - 1", least=-(2**63), most=2**64 - 1, whole=True)


def numbers(settings: Mapping[str, Any], kinds: Mapping[str, Number]) -> dict[str, Any]:
    """The settings named in `kinds`, each checked.

    Raises:
        PosthocUQError: one is no number of its kind.
    """
    return {name: kind(name, settings[name]) for name, kind in kinds.items()}


def put_numbers(options: Any, kinds: Mapping[str, Number]) -> None:
    """Check the fields of a dataclass named in `kinds`, and replace them by plain numbers; None stays.

    Raises:
        PosthocUQError: one is no number of its kind.
    """
    for name, kind in kinds.items():
        value = getattr(options, name)
        if value is not None:
            object.__setattr__(options, name, kind(name, value))  # a frozen dataclass is still being made


def one_of(name: str, value: Any, allowed: Collection[str]) -> str:
    """Check that a value is one of the allowed words.

    Raises:
        PosthocUQError: it is something else.
    """
    if not isinstance(value, str) or value not in allowed:
        raise PosthocUQError(
            f"{name} must be one of {tuple(allowed)}, not {shown(value)}.{meant(value, allowed)}"
        )
    return value


def meant(value: Any, known: Iterable[str]) -> str:
    """`` Did you mean 'rank'?`` for a mistyped name, or one in other letters, to follow an error; or nothing.

    Args:
        value: what was given; several names are looked at one by one.
        known: the names that there are.
    """
    names = {name.lower(): name for name in known}
    given = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else []
    close = [
        names[near]
        for text in cast("list[Any]", given)
        if isinstance(text, str)
        for near in get_close_matches(text.lower(), names, n=3 if len(given) == 1 else 1)
    ]
    *others, last = map(repr, dict.fromkeys(close)) if close else ("",)
    return f" Did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if close else ""


def flag(name: str, value: Any) -> bool:
    """True or False, also as 1 or 0.

    Raises:
        PosthocUQError: it is something else.
    """
    if not isinstance(value, (bool, np.bool_, Integral)) or value not in (0, 1):
        raise PosthocUQError(f"{name} must be True or False, not {shown(value)}.")
    return bool(value)


def check_function(name: str, value: Any, what: str) -> None:
    """Refuse a value that is neither None nor callable.

    Args:
        name: of the setting.
        value: the value that was passed.
        what: from what to what it goes, in words to follow "a function".

    Raises:
        PosthocUQError: it cannot be called.
    """
    if value is not None and not callable(value):
        raise PosthocUQError(f"{name} must be a function {what}, not {shown(value)}.")


def shown(value: Any) -> str:
    """A value in a few words for an error."""
    if hasattr(value, "shape") and tuple(value.shape):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)[:80]


def _single(value: Any) -> Any:
    """The single number of a tensor or array, other values as they are; None for values that are no numbers."""
    if hasattr(value, "shape") and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # several numbers, or none
            return None
    return None if isinstance(value, (bool, np.bool_, str, bytes, bytearray)) else value


def as_float(value: Any) -> float | None:
    """A number of any library as a float, or None if the value is no single number."""
    try:
        return float(_single(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def as_integer(value: Any) -> int | None:
    """A whole number of any library as an int, or None if the value is no single whole number."""
    single = _single(value)
    if isinstance(single, Integral):
        return int(single)
    number = as_float(single)
    return int(number) if number is not None and number.is_integer() else None


# The check that a method's options have the types that its fields declare.

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
    for option in fields(options):
        value, kind = getattr(options, option.name), declared[option.name]
        try:
            plain = _plain(value, kind)
        except _WrongType:
            raise PosthocUQError(f"{option.name} must be {_words(kind)}, not {shown(value)}.") from None
        if plain is not value:
            object.__setattr__(options, option.name, plain)  # a frozen dataclass is still being made


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
