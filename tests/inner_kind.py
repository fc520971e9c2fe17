"""A kind of layer from outside of the package: the lines that a new kind takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posthoc_uq.layers import RULES, register, rules


class Inner(rules.Linear):
    """``torch.inner(x, W)``, which is ``x W^T``."""

    kind = "inner"
    modules = ()

    def __init__(self) -> None:
        self.functions = {torch.inner: {"input": "input", "other": "weight"}}


@contextmanager
def inner_known() -> Iterator[None]:
    """The package knows the kind."""
    register(Inner())
    yield
    del RULES["inner"], rules._BY_FUNCTION[torch.inner]
