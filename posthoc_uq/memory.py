"""Memory that a fit has freed, given back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Ask the C library for its free heap pages back.

    glibc keeps them after a fit: some hundred MiB beside a ResNet, which a deployed ensemble would rather have.
    Does nothing where the C library has no such call.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
