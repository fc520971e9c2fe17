"""The errors that the package raises, warnings that point at the user's line, and routes that a model cannot take."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped, but for those to keep: a terminal would act on them, and names from
    files may hold them.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class PosthocUQError(ValueError):
    """Base of every error that the package raises on purpose; also a `ValueError`, as other libraries raise them."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class UnsupportedLayerError(PosthocUQError):
    """A layer was asked for that the chosen method cannot treat, or whose weights it cannot follow."""


class PosteriorMismatchError(PosthocUQError):
    """A posterior and a model do not belong together: names, shapes or parameters differ."""


class CorruptPosteriorError(PosthocUQError):
    """A posterior file is damaged, incomplete, foreign, or of a format this version cannot read."""


class NonFiniteError(PosthocUQError):
    """A NaN or an infinity appeared where only finite numbers make sense."""


# packages whose frames may lie between a warning and the user's code
_LIBRARY_FRAMES = ("posthoc_uq", "contextlib", "torch")


def warn_user(message: str) -> None:
    """A `UserWarning` at the line outside of this package (and of torch's calls of modules) that led here."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARY_FRAMES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


# Only accelerators have an error type for it; torch's allocators of the CPU and of MPS raise a RuntimeError.
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "out of memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    torch = sys.modules.get("torch")  # errors are imported before torch, which help does without
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def in_one_line(error: Exception) -> str:
    """An error with its type, in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def check_refused(error: Exception, again: Callable[[], Any], plainly: Callable[[], Any]) -> None:
    """Return if a model cannot take a shorter way, and raise an error that its user must see: the plain way must work
    on the same inputs, and the shorter one, which failed with `error`, fail again.

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
