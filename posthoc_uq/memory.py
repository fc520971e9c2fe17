"""Memory that a fit has freed, given back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Ask the C library for its free heap pages back.

    glibc keeps them: some hundred MiB after a fit or after drawing an ensemble of a ResNet.
    Does nothing where the C library has no such call.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
