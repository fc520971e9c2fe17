"""Options: what a user may pass, how it is checked, and what a file may hold of it."""

from __future__ import annotations

import re
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Integral
from reprlib import Repr
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch

from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError

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
            f"{name} must be one of {tuple(allowed)}, not {shown(value)}.{did_you_mean(value, allowed)}"
        )
    return value


def did_you_mean(value: Any, known: Iterable[str]) -> str:
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


# The kinds of values in a file's description, each with its check.
#
# A description is a JSON value. Kinds are strict: ``1.9`` is no whole number, ``true`` is no number, and an
# object has exactly the keys that its table names.

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_LONGEST = 4096  # characters of a name
_DEPTH = 6  # levels of nested values that are kept unread


class Field(ABC):
    """A kind of value."""

    @abstractmethod
    def check(self, value: Any, where: str) -> None:
        """Refuse a value that is not of this kind.

        Args:
            value: as JSON gives it.
            where: its place, for the message.

        Raises:
            CorruptPosteriorError: it is another kind of value, or out of range.
        """


def refuse(where: str, wanted: str, value: Any) -> CorruptPosteriorError:
    """The error that says which value should be at a place, and which one is."""
    return CorruptPosteriorError(f"{where} must be {wanted}, not {_SHORT.repr(value)}")


@dataclass(frozen=True)
class Whole(Field):
    """A whole number in a range."""

    low: int
    high: int = 2**62

    def check(self, value: Any, where: str) -> None:
        if type(value) is not int or not self.low <= value <= self.high:
            raise refuse(where, f"a whole number in {self.low}..{self.high}", value)


@dataclass(frozen=True)
class NumberField(Field):
    """A number in a range; NaN is never in it, and infinity only if the range ends there."""

    low: float
    high: float

    def check(self, value: Any, where: str) -> None:
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            raise refuse(where, f"a number in {self.low:g}..{self.high:g}", value)


class AnyNumber(Field):
    """A number, NaN and infinity included."""

    def check(self, value: Any, where: str) -> None:
        if type(value) not in (int, float):
            raise refuse(where, "a number", value)


class Simple(Field):
    """A finite number, a text, true or false."""

    def check(self, value: Any, where: str) -> None:
        if isinstance(value, str):
            Text().check(value, where)
        elif not isinstance(value, (bool, int, float)) or (isinstance(value, float) and not isfinite(value)):
            raise refuse(where, "a finite number, a text, true or false", value)


@dataclass(frozen=True)
class Text(Field):
    """A text: one of several, one that matches a pattern, or any that is not too long."""

    among: Collection[str] = ()
    pattern: str | None = None
    longest: int = _LONGEST

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, str) or len(value) > self.longest:
            raise refuse(where, f"a text of at most {self.longest} characters", value)
        if self.among and value not in self.among:
            raise refuse(where, f"one of {tuple(self.among)}", value)
        if self.pattern is not None and re.fullmatch(self.pattern, value) is None:
            raise refuse(where, f"a text of the form {self.pattern}", value)


class Flag(Field):
    """True or false."""

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, bool):
            raise refuse(where, "true or false", value)


@dataclass(frozen=True)
class Items(Field):
    """A list of one kind of values."""

    item: Field
    least: int = 0
    most: int = 2**31

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, list) or not self.least <= len(cast(list[Any], value)) <= self.most:
            raise refuse(where, f"a list of {self.least} to {self.most} values", value)
        for index, item in enumerate(cast(list[Any], value)):
            self.item.check(item, f"{where}[{index}]")


@dataclass(frozen=True)
class Record(Field):
    """An object with these keys; those in `optional` may be absent."""

    required: Mapping[str, Field]
    optional: Mapping[str, Field] = field(default_factory=lambda: dict[str, Field]())

    def check(self, value: Any, where: str) -> None:
        known = {**self.required, **self.optional}
        if not isinstance(value, dict):
            raise refuse(where, f"an object with {sorted(known)}", value)
        entries = cast(dict[str, Any], value)
        stray = next((name for name in entries if name not in known), None)
        missing = next((name for name in self.required if name not in entries), None)
        if stray is not None:
            raise CorruptPosteriorError(f"{where} has {_SHORT.repr(stray)}, which does not belong there")
        if missing is not None:
            raise CorruptPosteriorError(f"{where} has no '{missing}'")
        for name, entry in entries.items():
            known[name].check(entry, f"{where}, {name}")


@dataclass(frozen=True)
class Named(Field):
    """An object with any keys and values of one kind, but for those of the `special` keys."""

    item: Field
    special: Mapping[str, Field] = field(default_factory=lambda: dict[str, Field]())

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise refuse(where, "an object", value)
        for name, entry in cast(dict[str, Any], value).items():
            if len(name) > _LONGEST:
                raise refuse(f"a name in {where}", f"at most {_LONGEST} characters long", name)
            self.special.get(name, self.item).check(entry, f"{where}, {_SHORT.repr(name)}")


@dataclass(frozen=True)
class OneOf(Field):
    """One of several kinds; `which` gives the number of the kind that a value claims to be."""

    which: Callable[[Any], int]
    kinds: Sequence[Field]

    def check(self, value: Any, where: str) -> None:
        self.kinds[self.which(value)].check(value, where)


def maybe(kind: Field) -> Field:
    """A kind, or null."""
    return OneOf(lambda value: value is not None, (_Nothing(), kind))


def or_empty(kind: Field) -> Field:
    """A kind of object, or an empty one."""
    return OneOf(lambda value: value != {}, (Record({}), kind))


def number_or_named(number: NumberField) -> Field:
    """A number, or an object with one number a name."""
    return OneOf(lambda value: isinstance(value, dict), (number, Named(number)))


@dataclass(frozen=True)
class ByName(Field):
    """An object whose other keys depend on the text at one of its keys."""

    key: str
    kinds: Mapping[str, Field]

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, dict) or self.key not in value:
            raise refuse(where, f"an object with '{self.key}'", value)
        name: Any = cast(dict[str, Any], value)[self.key]
        Text(tuple(self.kinds)).check(name, f"{where}, {self.key}")
        self.kinds[name].check(value, where)


class _Nothing(Field):
    def check(self, value: Any, where: str) -> None:
        if value is not None:
            raise refuse(where, "null", value)


@dataclass(frozen=True)
class Plain(Field):
    """Any plain value, kept as it is for people to read: nothing is computed from it."""

    finite: bool = True
    depth: int = _DEPTH

    def check(self, value: Any, where: str) -> None:
        self._check(value, where, self.depth)

    def _check(self, value: Any, where: str, depth: int) -> None:
        if depth == 0:
            raise refuse(where, f"nested at most {self.depth} deep", value)
        if isinstance(value, dict):
            for name, entry in cast(dict[str, Any], value).items():
                self._check(entry, where, depth - 1)
                if len(name) > _LONGEST:
                    raise refuse(f"a name in {where}", f"at most {_LONGEST} characters long", name)
        elif isinstance(value, list):
            for entry in cast(list[Any], value):
                self._check(entry, where, depth - 1)
        elif self.finite and isinstance(value, float) and not isfinite(value):
            raise refuse(where, "finite", value)


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
