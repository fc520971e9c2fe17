"""Options: what a user may pass, and how it is checked.

The type of an option is its declaration: Python, the command line and files check values by it, and errors describe it.
Numbers may be Python's, NumPy's or torch's; they must be finite, and True and False are none.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import signature
from numbers import Real
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from posthoc_uq.core.errors import PosthocUQError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
AnyOptions = TypeVar("AnyOptions", bound="Options")
Made = TypeVar("Made")

LARGEST = 1e30
"""No number of a statistic, no hyperparameter and no inverse of one is larger: float32 can still compute with it."""

Positive = Annotated[float, Gt(0)]
Magnitude = Annotated[float, Ge(1 / LARGEST), Le(LARGEST)]  # of a hyperparameter or a noise variance
Temperature = Annotated[float, Ge(1e-12), Le(1e12)]
NotNegative = Annotated[float, Ge(0)]
Unit = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
Kappa = Annotated[float, Ge(0), Le(1e6)]  # of an unscented transform; at most 1,000 deviations
LogVariance = Annotated[float, Ge(-80), Le(20)]
Count = Annotated[int, Ge(1), Lt(2**63)]
Natural = Annotated[int, Ge(0), Lt(2**63)]
Seed = Annotated[int, Ge(-(2**63)), Lt(2**64)]

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_MAX_USUAL_BOUND = 2**53  # larger bounds are those of a machine's words, and named only for numbers as large


def check_option(name: str, value: Any, kind: Any) -> Any:
    """The value as the declared type has it, with numbers of Python.

    Args:
        name: of the option, for the error.
        value: as it was passed.
        kind: a type, such as `Count`, ``Share | Literal["auto"]`` or ``Callable[..., Any] | None``.

    Raises:
        PosthocUQError: it is of another type, or out of bounds.
    """
    adapter = _adapter(kind)
    for reading in _readings(value):
        try:
            return adapter.validate_python(reading)
        except ValidationError:
            continue
    close = did_you_mean(value, (name for name in _literals(kind) if isinstance(name, str)))
    raise PosthocUQError(f"{name} must be {_in_words(kind, value)}, not {shown(value)}.{close}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A dataclass whose fields are checked by their names and types when it is made. A subclass that compares its
    fields does so in a ``__post_init__`` that calls this one first.
    """

    def __new__(cls: type[AnyOptions], *args: Any, **options: Any) -> AnyOptions:
        # of other names `__init__` would raise a TypeError
        check_names(cls.__name__, options, [option.name for option in fields(cls)])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in _declared(type(self)).items():
            value = getattr(self, name)
            plain = check_option(name, value, kind)
            if plain is not value:
                object.__setattr__(self, name, plain)  # a frozen dataclass is still being made


def made_of(kind: type[Made], values: Mapping[str, Any]) -> Made:
    """A dataclass of values that somebody else may have written, checked by the types of its fields.

    Raises:
        PosthocUQError: a value is of another type, or out of bounds.
        TypeError: it has other fields.
    """
    declared = _declared(kind)
    return kind(
        **{
            name: check_option(name, value, declared[name]) if name in declared else value
            for name, value in values.items()
        }
    )


@cache
def _declared(options: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields; nothing for a class inside of a function, whose types cannot be looked up."""
    try:
        kinds = get_type_hints(options, include_extras=True)
    except NameError:
        return {}
    return {option.name: kinds[option.name] for option in fields(options)}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=_STRICT)


def _readings(value: Any) -> Iterator[Any]:
    """What a value may be meant as: one number of any library, a whole number that was written as a float, itself."""
    number = value
    if hasattr(value, "shape") and hasattr(value, "item"):
        with suppress(TypeError, ValueError, RuntimeError):  # several numbers, or none
            number = value.item()
    elif isinstance(value, Real) and not isinstance(value, (int, float)):
        number = float(value)
    yield number
    if isinstance(number, float) and number.is_integer():
        yield int(number)
    if number is not value:
        yield value


def _literals(kind: Any) -> Iterator[Any]:
    """The values among which a type lets one choose."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) in (Union, types.UnionType):
        for alternative in get_args(kind):
            yield from _literals(alternative)


_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "None",
}
_BY_NAME = {
    "Callable": "a function",
    "dtype": "a torch.dtype",
}  # without torch, which takes seconds to import
_BOUNDS = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt"), Le: ("<=", "le")}


def _in_words(kind: Any, value: Any) -> str:
    """A type, to follow "must be"; `value` does not have it."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_in_words(alternative, value) for alternative in get_args(kind)))
    if get_origin(kind) is Literal:
        names = ", ".join(map(repr, get_args(kind)))
        return names if len(get_args(kind)) == 1 else f"one of {names}"
    if get_origin(kind) is Annotated:
        base, *metadata = get_args(kind)
        limits = [
            (_BOUNDS[type(bound)][0], getattr(bound, _BOUNDS[type(bound)][1]))
            for bound in metadata
            if type(bound) in _BOUNDS
        ]
        large = isinstance(value, (int, float)) and abs(value) >= _MAX_USUAL_BOUND
        bounds = [
            f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
            for sign, limit in limits
            if large or abs(limit) < _MAX_USUAL_BOUND
        ]
        return " ".join([_in_words(base, value), " and ".join(bounds)]).rstrip()
    if get_origin(kind) is list:
        return f"a list, of which each entry is {_in_words(get_args(kind)[0], None)}"
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    return _WORDS.get(kind) or _BY_NAME.get(name, f"a {name}")


def one_of(name: str, value: Any, allowed: Collection[str]) -> str:
    """Check that a value is one of the allowed words.

    Raises:
        PosthocUQError: it is something else.
    """
    return check_option(name, value, Literal[tuple(allowed)])


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


LAPLACE_NAMES = {
    "subset_of_weights": "layers='last' or layers='all' in uq.fit",
    "hessian_structure": "method='kfac', 'diag' or 'full' in uq.fit",
    "pred_type": "head='linearized' or head='sampling' in uq.wrap",
    "link_approx": "link='probit' or link='mc' in uq.wrap",
}
"""Arguments of laplace-torch, and what they are here."""


def laplace_names(names: Iterable[str]) -> str:
    """What arguments of laplace-torch are here, to follow an error; or nothing."""
    return "".join(f" {name} is {LAPLACE_NAMES[name]}." for name in names if name in LAPLACE_NAMES)


def check_names(what: str, given: Iterable[str], known: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse names of options that `what` does not take; `others` are more names that may have been meant.

    Raises:
        PosthocUQError: names the strays, and the one that may have been meant, or else all that there are.
    """
    names = list(known)
    stray = [name for name in given if name not in names]
    if stray:
        close = laplace_names(stray) or did_you_mean(stray, [*names, *others])
        raise PosthocUQError(f"{what} does not take {stray}{'' if close else f'; it takes {names}'}.{close}")


def known_arguments(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a function answer an argument that it does not have with the one that may have been meant."""
    names = list(signature(call).parameters)

    @wraps(call)
    def named(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        check_names(call.__name__, kwargs, names)
        return call(*args, **kwargs)

    return named


def shown(value: Any) -> str:
    """A value in a few words for an error."""
    if hasattr(value, "shape") and tuple(value.shape):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)[:80]


def check_probability(name: str, value: float) -> float:
    """The level of an interval or of a set, or of a quantile.

    Raises:
        PosthocUQError: it is not strictly between 0 and 1.
    """
    if not 0 < value < 1:
        percent = f"; for {value:g} % give {value / 100:g}" if 1 < value < 100 else ""
        raise PosthocUQError(f"{name} must be strictly between 0 and 1, not {value}{percent}.")
    return value
