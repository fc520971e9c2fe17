"""The JSON of a description: limited in size, and read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.files.hdf5 import STATE_BYTES

MOST_VALUES = 500_000  # keys and values of a description; a layer takes about twenty


def read_plain(text: bytes) -> dict[str, Any]:
    """The object that a description holds.

    Raises:
        CorruptPosteriorError: it is no JSON object, has too many values, or a key twice.
    """
    if count_values(text) > MOST_VALUES:
        raise CorruptPosteriorError(f"its description has more than {MOST_VALUES} values")
    try:
        description = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        raise CorruptPosteriorError("its description is not valid JSON") from None
    if not isinstance(description, dict):
        raise CorruptPosteriorError("its description is no JSON object")
    return description  # pyright: ignore[reportUnknownVariableType]


def written(state: Mapping[str, Any]) -> bytes:
    """A description as JSON.

    Raises:
        PosthocUQError: it is too long, or has too many values, to be read again.
        TypeError, ValueError: JSON cannot hold it.
    """
    text = json.dumps(state, ensure_ascii=True).encode()
    if len(text) > STATE_BYTES or count_values(text) > MOST_VALUES:
        raise PosthocUQError(
            f"the description takes {len(text)} bytes and {count_values(text)} values; a file holds {STATE_BYTES} and "
            f"{MOST_VALUES}"
        )
    return text


def count_values(text: bytes) -> int:
    """An upper bound on the number of keys and values, by their separators, without parsing."""
    return sum(text.count(mark) for mark in (b",", b":", b"[", b"{")) + 1


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise CorruptPosteriorError("its description has a key twice")
    return values
