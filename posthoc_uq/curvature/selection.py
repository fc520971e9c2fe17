"""Which layers the user asked for: all, the last, by name, prefix or shell pattern, or by a function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.values import shown

Selection = str | Sequence[str] | Callable[[str, nn.Module], bool]


def check_selection(selection: Selection) -> None:
    """Refuse what names no layers.

    Raises:
        PosthocUQError: it is neither a text, nor several, nor a function.
    """
    given: Any = selection
    several = isinstance(given, Collection) and not isinstance(given, Tensor)
    if not callable(given) and not (several and all(isinstance(name, str) for name in given)):
        raise PosthocUQError(
            f"layers must be 'all', 'last', a list of names or patterns, or a function (name, module) -> bool; not "
            f"{shown(selection)}."
        )


def matches(want: str, name: str) -> bool:
    """Whether a dotted name, or one of its leading parts, is the name or fits the shell pattern asked for."""
    parts = accumulate(name.split("."), lambda before, part: f"{before}.{part}")
    return any(part == want or fnmatchcase(part, want) for part in parts)


def wanted_names(selection: Selection) -> list[str] | None:
    """Names and patterns that were asked for; None where it was done otherwise."""
    if callable(selection) or selection in ("all", "last"):
        return None
    return [selection] if isinstance(selection, str) else list(selection)


def asked_by_name(wanted: Iterable[str], names: Iterable[str]) -> bool:
    """Whether something with several names is asked for by one of them."""
    known = list(names)
    return any(matches(want, name) for want in wanted for name in known)


def no_such_layer(want: str, names: list[str]) -> PosthocUQError:
    """What to raise for a name or pattern that fits no layer."""
    near = difflib.get_close_matches(want, names, n=3, cutoff=0.3)
    known = f"the nearest are {near}" if near else f"there are {names[:5]}"
    more = ", ..." if not near and len(names) > 5 else ""
    return PosthocUQError(f"There is no weighted layer '{want}' in the forward pass; {known}{more}.")
