"""Which layers the user asked for: all, the last, by name, prefix or shell pattern, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.values import meant, shown

Selection = str | Sequence[str] | Callable[[str, nn.Module], bool]


def check_selection(selection: Selection) -> None:
    """Refuse a value that cannot select layers.

    Raises:
        PosthocUQError: it is neither a string, nor several strings, nor a function.
    """
    value: Any = selection
    several = isinstance(value, Collection) and not isinstance(value, Tensor)
    if not callable(value) and not (several and all(isinstance(name, str) for name in value)):
        raise PosthocUQError(
            f"layers must be 'all', 'last', a list of names or patterns, or a function (name, module) -> bool; not "
            f"{shown(selection)}."
        )


def matches(want: str, name: str) -> bool:
    """Whether a dotted name, or one of its leading parts, equals `want` or fits it as a shell pattern."""
    parts = accumulate(name.split("."), lambda prefix, part: f"{prefix}.{part}")
    return any(part == want or fnmatchcase(part, want) for part in parts)


def wanted_names(selection: Selection) -> list[str] | None:
    """The names and patterns of a selection; None for ``"all"``, ``"last"`` and functions."""
    if callable(selection) or selection in ("all", "last"):
        return None
    return [selection] if isinstance(selection, str) else list(selection)


def asked_by_name(wanted: Iterable[str], names: Iterable[str]) -> bool:
    """Whether any of several names of one thing matches any of those wanted."""
    known = list(names)
    return any(matches(want, name) for want in wanted for name in known)


def no_such_layer(want: str, names: list[str]) -> PosthocUQError:
    """The error for a name or pattern that fits no layer."""
    more = ", ..." if len(names) > 5 else ""
    close = meant(want, [*names, "last", "all"])
    return PosthocUQError(
        f"There is no weighted layer '{want}' in the forward pass; there are {names[:5]}{more}.{close}"
    )
