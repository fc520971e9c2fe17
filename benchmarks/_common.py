"""What the benchmarks share: tables on the console, CSV and JSON files, and a few words on the machine."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import exp, log
from pathlib import Path
from typing import Any

import torch

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


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Rows as a CSV file with one column per key."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """A result of plain values as a JSON file."""
    path.write_text(json.dumps(result, indent=1) + "\n")


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
