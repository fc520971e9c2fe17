"""Numbers that a user passes, in whatever type they come."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posthoc_uq.errors import PosthocUQError


def positive_number(name: str, value: Any) -> float:
    """A positive, finite number of Python, NumPy or torch as a float.

    Args:
        name: of the setting, for the error.
        value: what was passed.

    Raises:
        PosthocUQError: it is something else.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # of text, lists, tensors of several numbers
        given = f"a {type(value).__name__} of shape {tuple(value.shape)}" if _is_array(value) else repr(value)
        raise PosthocUQError(f"{name} must be one number, positive and finite; not {given[:80]}.") from None
    if not 0.0 < number < float("inf"):
        raise PosthocUQError(f"{name} must be positive and finite, not {value}.")
    return number


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "shape")
