"""Peak memory, measured in processes of their own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MIB = 2**20


def _status(field: str) -> int | None:
    """A field of Linux's account of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    return None


def peak_memory() -> int:
    """Most memory that this process has held so far, in bytes.

    ``ru_maxrss`` of a fresh process may start at what its parent held, so Linux is asked for its own
    high-water mark.
    """
    found = _status("VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def held_memory() -> int:
    """Memory that this process holds now, in bytes (where the system does not say: its peak so far)."""
    return _status("VmRSS") or peak_memory()


def release() -> None:
    """Collect garbage, and give freed memory back to the system where the C library can."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Begin the high-water mark anew at what the process holds now, where the system can (Linux)."""
    release()
    control = Path("/proc/self/clear_refs")
    if control.exists():
        with suppress(OSError):
            control.write_text("5")


def available_memory() -> int | None:
    """Memory that new processes may take before the system runs short, in bytes; None where it does not say."""
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def limit_memory(limit: int | None) -> None:
    """Let allocations of this process beyond a limit fail, rather than the machine."""
    if limit is not None and hasattr(resource, "RLIMIT_DATA"):
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def fresh_process(command: Sequence[str], limit: float | None = None, exact: bool = False) -> dict[str, Any]:
    """What a script prints as JSON in its last line.

    Args:
        command: of the script.
        limit: in seconds.
        exact: let the GNU C library give back every larger block at once, so that a peak has none of its slack.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took longer than the limit in seconds.
    """
    own = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if exact else {})
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=limit, env=own)
    return json.loads(finished.stdout.splitlines()[-1])


def least(measure: Callable[[], dict[str, Any]], key: str, repeats: int) -> dict[str, Any]:
    """The least of some repeats: now and then the allocator holds on to much more than is used."""
    return min((measure() for _ in range(repeats)), key=lambda found: found[key])
