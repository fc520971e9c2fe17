"""Shorter ways that not every model can take, told from errors that its user must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Only accelerators have an error type for it; torch's allocators of the CPU and of MPS raise a RuntimeError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def check_refused(error: Exception, again: Callable[[], Any], plainly: Callable[[], Any]) -> None:
    """Return if a model cannot take a shorter way: the plain way works on the same inputs, and the shorter one fails
    once more.

    Args:
        error: with which the shorter way failed.
        again: takes the shorter way.
        plainly: takes the plain one.

    Raises:
        Exception: `error`, where memory ran out or the second attempt succeeds; or that of the plain way.
    """
    if out_of_memory(error):
        raise error
    plainly()
    try:
        again()
    except Exception as second:
        if out_of_memory(second):
            raise
        return
    raise error
