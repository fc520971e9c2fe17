"""The kinds of values in a file's description, each with its check.

A description is a JSON value. Kinds are strict: ``1.9`` is no whole number, ``true`` is no number, and an object has
exactly the keys that its table names.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from reprlib import Repr
from typing import Any, cast

from posthoc_uq.errors import CorruptPosteriorError

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
class Number(Field):
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


def number_or_named(number: Number) -> Field:
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
