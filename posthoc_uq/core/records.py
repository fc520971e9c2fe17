"""Records: plain values that a file may hold, each declared once as a pydantic model; one sentence for what is wrong.

A record is a JSON object with exactly the declared keys. Types are strict (``1.9`` is no whole number, ``true`` is no
number), and numbers are finite unless a field says otherwise. Types of numbers are those of `posthoc_uq.core.options`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import isfinite
from typing import Annotated, Any, TypeVar, cast

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema
from torch import Tensor

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.core.options import shown

AnyRecord = TypeVar("AnyRecord", bound="Record")

Name = Annotated[str, Field(max_length=4096)]
MAX_DEPTH = 6  # levels of nested values that are kept unread


def check_plain(value: Any, finite: bool, depth: int = MAX_DEPTH) -> Any:
    """A value that JSON can hold, nested at most so deep, or a ValueError."""
    if depth == 0:
        raise ValueError(f"must be nested at most {MAX_DEPTH} deep")
    if isinstance(value, (dict, list)):
        for entry in cast("list[Any]", [*value, *value.values()] if isinstance(value, dict) else value):
            check_plain(entry, finite, depth - 1)
    elif finite and isinstance(value, float) and not isfinite(value):
        raise ValueError(f"must be finite, not {value}")
    return value


def check_simple(value: Any) -> Any:
    """A value of `Simple`, or a ValueError."""
    if isinstance(value, (dict, list)) or value is None or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"must be a finite number, a text, true or false, not {value!r:.60}")
    return value


Plain = Annotated[Any, AfterValidator(lambda value: check_plain(value, finite=True))]
"""Kept for people to read: nothing is computed from it."""
Simple = Annotated[Any, AfterValidator(check_simple)]
"""A finite number, a text, true or false."""
Sum = Annotated[float, Field(ge=-1e300, le=1e300)]
SumOfSquares = Annotated[float, Field(ge=0, le=1e300)]


class Listed:
    """For a field that is a tensor on the CPU, and a list of numbers in a file."""

    def __init__(self, entries: Any, dtype: torch.dtype) -> None:
        """
        Args:
            entries: the type of the list.
            dtype: of the tensor.
        """
        self._entries, self._dtype = entries, dtype

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_wrap_validator_function(
            self._tensor,
            handler.generate_schema(self._entries),
            serialization=core_schema.plain_serializer_function_ser_schema(Tensor.tolist),
        )

    def _tensor(self, value: Any, check: Callable[[Any], Any]) -> Tensor:
        return (
            value
            if isinstance(value, Tensor)
            else torch.tensor(check(value), dtype=self._dtype, device="cpu")
        )


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Record(BaseModel):
    """A JSON object with exactly the declared keys. A validator of a subclass raises a `ValueError` whose text goes on
    after the name of the record: ``"must name every layer once"``.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def __eq__(self, other: object) -> bool:  # a field may be a tensor
        return type(self) is type(other) and self.model_dump() == cast("Record", other).model_dump()

    def plain(self) -> dict[str, Any]:
        """The values that it was made of, for JSON; an optional field that is None is left out."""
        return self.model_dump(exclude_unset=True, exclude_none=True, by_alias=True)

    def changed(self: AnyRecord, **values: Any) -> AnyRecord:
        """This record with other values of some fields, which are not checked."""
        return self.model_copy(update=values)


def validate_record(kind: type[AnyRecord], values: Any, where: str) -> AnyRecord:
    """The record of these values, which JSON gave; `where` says in the message what they are.

    Raises:
        CorruptPosteriorError: names the first field that is missing, unknown, of another type or out of range.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise CorruptPosteriorError(fault_of(error, where)) from None


def among(names: Collection[str]) -> AfterValidator:
    """For a text that must be one of these names, looked up when a value is checked."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {tuple(names)}, not {shown(value)}")
        return value

    return AfterValidator(check)


def fault_of(error: ValidationError, where: str) -> str:
    """The first fault that pydantic found, in the words of this package: ``its description, scale must be ...``."""
    fault: Any = error.errors(include_url=False)[0]
    # parts in angle brackets are the names of alternatives, not of fields
    parts = [part for part in fault["loc"] if not str(part).startswith("<") and part != "[key]"]
    kind, context, value = fault["type"], fault.get("ctx", {}), shown(fault["input"])
    if kind in ("missing", "extra_forbidden"):
        *parts, name = parts
        place = _place(where, parts)
        return (
            f"{place} has no '{name}'"
            if kind == "missing"
            else f"{place} has {shown(name)}, which does not belong there"
        )
    place = _place(where, parts)
    if kind == "value_error":
        inner = context["error"]
        return fault_of(inner, place) if isinstance(inner, ValidationError) else f"{place} {inner}"
    wanted = _WANTED.get(kind, "another value").format(**context)
    return f"{place} must be {wanted}, not {value}"


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "string_unicode": "a text in Unicode",
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "literal_error": "one of {expected}",
    "list_type": "a list",
    "too_short": "of at least {min_length} entries",
    "too_long": "of at most {max_length} entries",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
}


def _place(where: str, parts: list[Any]) -> str:
    for part in parts:
        plain = isinstance(part, str) and part.replace("_", "").replace(" ", "").isalnum()
        where += f"[{part}]" if isinstance(part, int) else f", {part if plain else shown(part)}"
    return where
