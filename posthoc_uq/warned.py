"""Warnings that point at the user's own line, however deep in the package they arise."""

from __future__ import annotations

import inspect
import warnings

# packages whose frames lie between a warning and the user's code
_BETWEEN = ("posthoc_uq", "contextlib", "torch")


def warn_user(message: str) -> None:
    """A `UserWarning` at the line outside of this package (and of torch's calls of modules) that led here."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
