"""Forward-mode derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch


def jvp(function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """`torch.func.jvp`: what a function gives, and its derivative along the tangents."""
    _prepare()
    return cast(Any, torch.func.jvp(function, primals, tangents))  # pyright: ignore[reportPrivateImportUsage]


@cache
def _prepare() -> None:
    """Load torch's own rules before the first derivative does so: they are scripts, and some versions of torch
    then warn that scripts are deprecated.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit", category=Warning)
        try:
            import torch._decomp.decompositions_for_jvp  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:  # a version of torch that keeps them elsewhere
            return
