"""Memory: how much a fit's temporaries may take, and giving back what it has freed."""

from __future__ import annotations

import ctypes
import time
from functools import lru_cache

import psutil
import torch

SHARE = 1 / 8  # of the free memory that one temporary may take by default
MOST = 256 * 2**20  # bytes at most: larger temporaries are not faster
LEAST = 2**20


@lru_cache(maxsize=1)
def _available(second: int) -> int:
    """Free bytes of the machine, asked for once a second: to ask takes as long as a small network's forward pass."""
    return int(psutil.virtual_memory().available)


def default_budget(device: torch.device) -> int:
    """Bytes for one temporary of the statistics: a share of what is free on the device, at most 256 MiB.

    It decides the order of sums, and so their rounding. As a power of two it rarely differs between two fits on one
    machine.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = _available(int(time.monotonic()))
    share = max(LEAST, min(MOST, int(SHARE * free)))
    return 1 << (share.bit_length() - 1)


def kept_budget() -> int:
    """Bytes of what may be computed again and is kept for the next use: a share of the machine's free memory."""
    return int(SHARE * _available(int(time.monotonic())))


def return_freed_memory() -> None:
    """Make the C library return its free heap pages to the system.

    glibc keeps them: some hundred MiB after a fit, or after drawing an ensemble of a ResNet. Does nothing where the C
    library has no such call.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
