"""Settings that a user passes, in whatever type they come: numbers, names, functions, yes or no."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from numbers import Integral
from typing import Any

import numpy as np

from posthoc_uq.errors import PosthocUQError


@dataclass(frozen=True)
class Number:
    """A kind of finite number, of Python, NumPy or torch; True and False are none.

    Attributes:
        text: the kind in words, which go on "must be".
        least: the smallest that is allowed.
        most: the largest.
        above: what it must be larger than.
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
            value: what was passed.

        Raises:
            PosthocUQError: it is something else, or outside of the bounds.
        """
        number = _integer(value) if self.whole else _float(value)
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
COUNT = Number("a whole number, at least 1", least=1, most=2**63 - 1, whole=True)
NATURAL = Number("a whole number, 0 or more", least=0, most=2**63 - 1, whole=True)
SEED = Number("a whole number from -2^63 to 2^64 - 1", least=-(2**63), most=2**64 - 1, whole=True)


def numbers(given: Mapping[str, Any], kinds: Mapping[str, Number]) -> dict[str, Any]:
    """The settings that `kinds` names, each checked.

    Raises:
        PosthocUQError: one is no number of its kind.
    """
    return {name: kind(name, given[name]) for name, kind in kinds.items()}


def put_numbers(options: Any, kinds: Mapping[str, Number]) -> None:
    """Check the fields of a dataclass that `kinds` names, and put plain numbers in their places; None stays where the
    field's type has it.

    Raises:
        PosthocUQError: one is no number of its kind.
    """
    may_be_none = {field.name for field in fields(options) if "None" in str(field.type)}
    for name, kind in kinds.items():
        value = getattr(options, name)
        if value is not None or name not in may_be_none:
            object.__setattr__(options, name, kind(name, value))  # a frozen dataclass is still being made


def one_of(name: str, value: Any, allowed: Collection[str]) -> str:
    """One of some words.

    Raises:
        PosthocUQError: it is something else.
    """
    if not isinstance(value, str) or value not in allowed:
        raise PosthocUQError(f"{name} must be one of {tuple(allowed)}, not {shown(value)}.")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False, also as 1 or 0.

    Raises:
        PosthocUQError: it is something else.
    """
    if not isinstance(value, (bool, np.bool_, Integral)) or value not in (0, 1):
        raise PosthocUQError(f"{name} must be True or False, not {shown(value)}.")
    return bool(value)


def check_function(name: str, value: Any, what: str) -> None:
    """Refuse what is neither None nor can be called.

    Args:
        name: of the setting.
        value: what was passed.
        what: it takes and gives, in words that go on "a function".

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
    """The one number in a tensor or array; None in place of what is no number."""
    if hasattr(value, "shape") and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # of several numbers, or none
            return None
    return None if isinstance(value, (bool, np.bool_, str, bytes, bytearray)) else value


def _float(value: Any) -> float | None:
    try:
        return float(_single(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _integer(value: Any) -> int | None:
    single = _single(value)
    if isinstance(single, Integral):
        return int(single)
    number = _float(single)
    return int(number) if number is not None and number.is_integer() else None
