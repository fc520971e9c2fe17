"""Options of a command from the fields of a dataclass or the arguments of a function: their names, types, defaults and
docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click

from posthoc_uq.cli.docstrings import described

_BYTES = ("memory_budget",)  # given in MiB on the command line
_TRUTHS = {"true": True, "false": False}

NONE = object()
"""The value of an option that is given as ``none``; to click, None is an option that is not given."""


@dataclasses.dataclass(frozen=True)
class Field:
    """Something that can be chosen.

    Attributes:
        name: as in Python.
        annotation: its type, evaluated.
        default: its value where none is given.
        text: what the docstring says of it.
    """

    name: str
    annotation: Any
    default: Any
    text: str


def fields_of(kind: type) -> list[Field]:
    """The fields of a dataclass whose values can be given as text."""
    texts, annotations = described(kind, "Attributes"), _annotations(kind)
    fields = [
        Field(field.name, annotations.get(field.name), field.default, texts.get(field.name, ""))
        for field in dataclasses.fields(kind)
        if field.init
    ]
    return [field for field in fields if textual(field.annotation)]


def arguments_of(function: Callable[..., Any]) -> list[Field]:
    """The arguments of a function, or of a class, that have a default and whose values can be given as text."""
    texts = described(function, "Args")
    plain = function.__init__ if isinstance(function, type) else function
    scope = vars(sys.modules[plain.__module__])
    fields = [
        Field(name, _evaluated(argument.annotation, scope), argument.default, texts.get(name, ""))
        for name, argument in inspect.signature(function).parameters.items()
        if argument.default is not argument.empty
    ]
    return [field for field in fields if textual(field.annotation)]


def _annotations(kind: type) -> dict[str, Any]:
    annotations: dict[str, Any] = {}
    for owner in reversed(kind.__mro__):
        scope = vars(sys.modules[owner.__module__])
        annotations |= {name: _evaluated(a, scope) for name, a in inspect.get_annotations(owner).items()}
    return annotations


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    """An annotation, evaluated if it is text; None if it uses names that its module lacks."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, scope)
    except (NameError, AttributeError):
        return None


def textual(annotation: Any) -> bool:
    """Whether values of a type, or some of them, can be given as text."""
    return bool(_alternatives(annotation))


def _alternatives(annotation: Any) -> list[Any]:
    """The parts of a type whose values can be given as text: `int`, `float`, `str`, `bool`, `torch.dtype`, and the
    single values of a `Literal`.
    """
    if get_origin(annotation) is Annotated:  # the bounds are the option's own to check
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [alternative for part in get_args(annotation) for alternative in _alternatives(part)]
    if get_origin(annotation) is Literal:
        return [_Value(value) for value in get_args(annotation)]
    if annotation is Any:  # text is a value, too
        return [str]
    return [annotation] if annotation in (int, float, str, bool) or _is_dtype(annotation) else []


@dataclasses.dataclass(frozen=True)
class _Value:
    """A single value that a type allows."""

    value: Any


def literal(*values: Any) -> list[Any]:
    """Single values, for `OneOf`."""
    return [_Value(value) for value in values]


def _is_dtype(annotation: Any) -> bool:
    return getattr(annotation, "__module__", None) == "torch" and annotation.__name__ == "dtype"


class OneOf(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A value of one of several types: a type, or a single value of a `Literal`, whichever fits the text first."""

    def __init__(self, alternatives: Sequence[Any]) -> None:
        # The strictest type is tried first: 3 is read as a whole number, else as a number, else as text.
        ranks = {bool: 1, int: 2, float: 3, str: 5}
        unique = dict.fromkeys(alternatives)
        self._alternatives = sorted(
            unique,
            key=lambda alternative: 0 if isinstance(alternative, _Value) else ranks.get(alternative, 4),
        )
        values = [
            str(alternative.value).lower()
            for alternative in self._alternatives
            if isinstance(alternative, _Value)
        ]
        truths = list(_TRUTHS) if bool in self._alternatives else []
        number = (
            ["number"] if float in self._alternatives else ["integer"] if int in self._alternatives else []
        )
        self.words = [*values, *truths]
        self.name = "|".join([*number, *self.words, *(["text"] if str in self._alternatives else [])])
        if any(_is_dtype(alternative) for alternative in self._alternatives):
            self.name = "|".join(part for part in (self.name, "dtype") if part)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        for alternative in self._alternatives:
            try:
                return _converted(value, alternative)
            except ValueError:
                continue
        self.fail(self._complaint(value), param, ctx)

    def _complaint(self, value: str) -> str:
        if any(_is_dtype(alternative) for alternative in self._alternatives):
            return f"{value!r} is no number format of torch, such as float32."
        kind = (
            "a number"
            if float in self._alternatives
            else "a whole number"
            if int in self._alternatives
            else None
        )
        if kind is None:
            return f"{value!r} is not one of {', '.join(self.words)}."
        return f"{value!r} is not {kind}{''.join(f', nor {word!r}' for word in self.words)}."


def _converted(text: str, alternative: Any) -> Any:
    """A text as a value of a type.

    Raises:
        ValueError: the text is no such value.
    """
    if isinstance(alternative, _Value):
        if text.lower() != str(alternative.value).lower():
            raise ValueError(text)
        return NONE if alternative.value is None else alternative.value
    if alternative is bool:
        if text.lower() not in _TRUTHS:
            raise ValueError(text)
        return _TRUTHS[text.lower()]
    return dtype_named(text) if _is_dtype(alternative) else alternative(text)


def dtype_named(text: str) -> Any:
    """The `torch.dtype` of a name, with or without ``torch.`` before it.

    Raises:
        ValueError: there is none.
    """
    import torch

    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(text)
    return dtype


class _Mebibytes(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A whole number of MiB, as bytes."""

    name = "MiB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return click.IntRange(1).convert(value, param, ctx) * 2**20


def parameter_type(annotations: Sequence[Any], default: Any = None) -> click.ParamType | None:  # pyright: ignore[reportMissingTypeArgument]
    """The click type that reads a value of one of these types; None where the option is a pair of flags. The text
    ``none`` is allowed where the types include None and the default is something else.
    """
    alternatives = list(dict.fromkeys(one for annotation in annotations for one in _alternatives(annotation)))
    if default is not None and any(type(None) in get_args(annotation) for annotation in annotations):
        alternatives.append(_Value(None))
    if alternatives == [bool]:
        return None
    values = [alternative.value for alternative in alternatives if isinstance(alternative, _Value)]
    if len(values) == len(alternatives) and all(isinstance(value, str) for value in values):
        return click.Choice(values)
    simple = {int: click.INT, float: click.FLOAT, str: click.STRING}
    return (
        simple[alternatives[0]]
        if len(alternatives) == 1 and alternatives[0] in simple
        else OneOf(alternatives)
    )


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How an option differs on the command line from the field it is made of.

    Attributes:
        names: its names, where they are not the field's.
        destination: its name among the command's parameters, where it is not the field's.
        type: its type, where text needs more than the field's.
        text: its help, where the docstring speaks of Python alone.
        metavar: what stands for its value in the help.
    """

    names: tuple[str, ...] = ()
    destination: str | None = None
    type: Any = None
    text: str = ""
    metavar: str | None = None


def make_option(
    field: Field,
    spelling: Spelling | None = None,
    *,
    destination: str | None = None,
    annotations: Sequence[Any] = (),
    defaults: str | None = None,
    default: Any = None,
) -> click.Option:
    """An option for a field.

    Args:
        field: name, type and help.
        spelling: what is different on the command line.
        destination: its name among the command's parameters; by default the field's.
        annotations: all types that its value may have; by default the field's.
        defaults: its default in words; by default the field's, if it says something.
        default: its value where it is not given.
    """
    spelling = spelling or Spelling()
    destination = spelling.destination or destination or field.name
    flag = "--" + destination.replace("_", "-")
    kind: Any = spelling.type or parameter_type(annotations or (field.annotation,), field.default)
    text = spelling.text or field.text
    if field.name in _BYTES:
        kind, text = _Mebibytes(), re.sub("(?i)bytes", "MiB", text, count=1)
    names = list(spelling.names or (flag,))
    if kind is None:
        names = [f"{name}/--no-{name[2:]}" for name in names]
    defaults = shown(field.default) if defaults is None else defaults
    help_text = " ".join(part for part in (text, defaults and f"[default: {defaults}]") if part)
    typed: dict[str, Any] = {} if kind is None else {"type": kind, "metavar": spelling.metavar}
    return click.Option([destination, *names], help=help_text, default=default, **typed)


def shown(default: Any) -> str:
    """A default in words; nothing where it says nothing by itself."""
    if default is None or isinstance(default, (list, tuple)) or default is dataclasses.MISSING:
        return ""
    return ("yes" if default else "no") if isinstance(default, bool) else str(default)


def argument_options(
    function: Callable[..., Any], spellings: Mapping[str, Spelling], leave_out: Collection[str]
) -> list[click.Option]:
    """An option for every argument of a function that can be given as text, with the argument's default."""
    return [
        make_option(field, spellings.get(field.name), default=field.default)
        for field in arguments_of(function)
        if field.name not in leave_out
    ]
