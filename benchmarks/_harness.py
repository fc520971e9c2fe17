"""What all benchmarks share: interleaved times, peak memory, tables, CSV and JSON files, a few words on the machine."""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # the recipes, whose data and networks benchmarks share

Row = Mapping[str, Any]


def table(rows: Sequence[Row], digits: int = 3) -> str:
    """Rows of equal keys as an aligned table; numbers stand to the right.

    Args:
        rows: column name to value; None is printed as a dash.
        digits: significant digits of floats.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_text(row.get(column), digits) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    right = [all(not isinstance(row.get(column), str) for row in rows) for column in columns]

    def line(values: Sequence[str]) -> str:
        aligned = (
            value.rjust(width) if to_right else value.ljust(width)
            for value, width, to_right in zip(values, widths, right, strict=True)
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(columns), rule, *map(line, cells)])


def _text(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if abs(value) >= 10 ** (digits - 1):
            return f"{value:,.0f}"
        return f"{value:#.{digits}g}" if abs(value) >= 1e-3 else f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers."""
    return exp(sum(log(value) for value in values) / len(values))


def output_file(text: str) -> Path:
    """The type of an option that names a file, which is written at the end of the work."""
    from posthoc_uq.core.errors import PosthocUQError  # which the peers' environment does not have
    from posthoc_uq.files.atomic import checked_target

    try:
        return checked_target(text)
    except PosthocUQError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_folder(text: str) -> Path:
    """The type of an option that names the folder of all results."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error.strerror}") from None
    return output_file(f"{text}/results").parent


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """A result of plain values as a JSON file."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def write_csv(path: Path, rows: Sequence[Row], form: str = "") -> None:
    """Rows as a CSV file, with the columns of all of them.

    Args:
        form: of floats, such as ``".4g"``; by default all their digits.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: format(value, form) if isinstance(value, float) else value for key, value in row.items()}
            for row in rows
        )


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread for torch: matrices this small gain nothing by more, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, Any]:
    """What a time depends on: processor, threads, torch, and how loaded the machine is."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load average, 1 min": None if load is None else round(load, 2),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# Times


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long some work took, and what it returned."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def processor_seconds(work: Callable[[], Any]) -> float:
    """Processor time of this process, which other work on the machine moves little."""
    start = time.process_time()
    work()
    return time.process_time() - start


def multiple(unit: Callable[[], Any], run: Callable[[], Any], repeats: int) -> float:
    """The processor time of some work in units of other work, which is done before and after it; the median."""

    def taken(work: Callable[[], Any], least: float = 0.0) -> float:
        start, calls = time.process_time(), 0
        while calls == 0 or time.process_time() - start < least:
            work()
            calls += 1
        return (time.process_time() - start) / calls

    unit(), run()  # the first calls pay for allocations and for what is prepared once
    found: list[float] = []
    for _ in range(repeats):
        before, own, after = taken(unit, 0.05), taken(run), taken(unit, 0.05)
        found.append(2 * own / (before + after))
    return median(found)


def interleaved(
    plain: Callable[[], Any], work: Callable[[], Any], repeats: int, least: float = 0.0
) -> dict[str, float]:
    """The time of some work in plain passes, which run before and after it in every repeat.

    Args:
        least: seconds that plain passes are repeated for, so that a short one can be timed.
    """

    def unit() -> float:
        taken, calls = 0.0, 0
        while calls == 0 or taken < least:
            taken += seconds(plain)[0]
            calls += 1
        return taken / calls

    plain(), work()  # the first calls pay for allocations and for what is prepared once
    found: list[tuple[float, float]] = []
    for _ in range(repeats):
        before, (taken, _), after = unit(), seconds(work), unit()
        found.append(((before + after) / 2, 2 * taken / (before + after)))
    multiples = sorted(multiple for _, multiple in found)
    return {
        "plain, ms": 1e3 * median(plain for plain, _ in found),
        "multiple": median(multiples),
        "least": multiples[0],
        "most": multiples[-1],
    }


# Peak memory, measured in processes of their own

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


def fresh_process(command: Sequence[str], **environment: str) -> dict[str, Any]:
    """What a script prints as JSON in its last line.

    Args:
        command: of the script.
        environment: variables beside those of this process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    own = os.environ | environment
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=own)
    return json.loads(finished.stdout.splitlines()[-1])


def least(measure: Callable[[], dict[str, Any]], key: str, repeats: int) -> dict[str, Any]:
    """The least of some repeats: now and then the allocator holds on to much more than is used."""
    return min((measure() for _ in range(repeats)), key=lambda found: found[key])
