"""Tables of refusals: a room's file `test_refusals_ROOM.py` has one table, and one test that holds it.

ROWS = {"no layer": Row(lambda: fit(nn.BatchNorm1d(4)), "no Linear or convolution layer")}

@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from torch import nn
from watching import Watch

import posthoc_uq as uq
from posthoc_uq import PosthocUQError

CALLS = ("fit", "wrap", "load", "evaluate", "calibrate", "tune", "update", "export")
"""Functions of `uq` that may be given a model."""


class Row(NamedTuple):
    """A call that is refused."""

    call: Callable[..., Any]
    words: str  # a regular expression that its message holds: what is wrong, and the way out
    kind: type[PosthocUQError] = PosthocUQError
    cause: type[BaseException] | None = None  # what it is raised from, where that matters


def _watching(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which must leave the models that it is given and the global random state as they are."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with ExitStack() as watches:
            for given in (*args, *options.values()):
                if isinstance(given, nn.Module):
                    watches.enter_context(Watch(given))
            return function(*args, **options)

    return call


def hold(row: Row) -> None:
    """The call is refused by an error of the row's class, in one to three sentences, and leaves no trace in a model."""
    with ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(patch.object(uq, name, _watching(getattr(uq, name))))
        with pytest.raises(row.kind, match=row.words) as caught:
            row.call()
    text = str(caught.value)
    assert type(caught.value) is row.kind
    assert 20 < len(text) < 500 and text[-1] in ".?" and len(re.findall(r"[.:] [A-Z]", text)) <= 3, text
    assert row.cause is None or type(caught.value.__cause__) is row.cause
