"""Torch operations, float64 among them, and host reads of fits and predictions of small networks.

Bounds as in `test_way.py`: a little above what was counted when they were written; who raises one says why in the
same commit. What a line counts is in `benchmarks/operations.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# operations, of float64, host reads
BOUNDS = {
    "mlp": {
        "prediction, last": (134, 24, 2),
        "prediction, all": (428, 32, 4),
        "sweep's batch, last": (178, 10, 5),
        "sweep's batch, all": (268, 10, 5),
        "search's trial, last": (480, 160, 3),
        "search's trial, all": (152, 32, 3),
        "calibrate, all": (11_200, 3_000, 320),
    },
    "lenet": {
        "prediction, last": (171, 24, 2),
        "prediction, all": (715, 38, 4),
        "sweep's batch, last": (218, 10, 5),
        "sweep's batch, all": (438, 10, 5),
        "search's trial, last": (472, 160, 3),
        "search's trial, all": (172, 42, 3),
        "calibrate, all": (16_700, 4_420, 500),
    },
}


@pytest.mark.parametrize("name", list(BOUNDS))
def test_no_more_operations_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import operations

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few samples
        rows = {row["what"]: row for row in operations.measure(name)}
    # earlier versions of torch make some of their own functions of more operations
    share = 1.0 if _TORCH >= (2, 7) else 1.08
    found = {
        what: tuple(rows[what][column] for column in ("operations", "float64", "reads"))
        for what in BOUNDS[name]
    }
    above = {
        what: (counts, BOUNDS[name][what])
        for what, counts in found.items()
        if any(count > share * bound for count, bound in zip(counts, BOUNDS[name][what], strict=True))
    }
    assert not above
