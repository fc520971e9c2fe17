"""Pairs of processes, one of which fails in a part of its work, and what both said; run as a script by
``test_distributed_faults.py``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ranks  # noqa: E402

import posthoc_uq as uq  # noqa: E402
from posthoc_uq.core.distributed import run_on_all_ranks  # noqa: E402
from recipes.imagenet import evaluating  # noqa: E402

updating = import_module("posthoc_uq.fitting.update")

Fault = Callable[[], None]
Batches = list[tuple[Tensor, Tensor]]


class Faulty:
    """A loader with a fault at the batch of this number of all its passes."""

    def __init__(self, batches: Batches, at: int, fault: Fault) -> None:
        self._batches, self._left, self._fault = batches, at, fault

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._batches:
            if self._left == 0:
                self._fault()
            self._left -= 1
            yield batch


def data(rank: int, regression: bool = False) -> Batches:
    """This process's part."""
    x, y = ranks.images(16, 1 + rank).tensors
    targets = nn.functional.one_hot(y, 3).float() if regression else y
    return list(zip(x.split(4), targets.split(4), strict=True))


def read(at: int) -> Callable[[int, Fault], None]:
    """A fit whose loader has the fault at this batch: 4 in each sweep, and 1 in the dry run."""

    def work(rank: int, fault: Fault) -> None:
        uq.fit(ranks.network(), Faulty(data(rank), at, fault), rank=4, progress=False)

    return work


def noise(rank: int, fault: Fault) -> None:
    """The sweep for a regression's noise."""
    loader = Faulty(data(rank, True), 3, fault)
    uq.fit(ranks.network(), loader, "diag", likelihood="regression", progress=False)


def tuning(rank: int, fault: Fault) -> None:
    """The last part of a fit, which nobody shares: the search on held-out data."""
    held_out = Faulty(data(7), 2, fault)
    uq.fit(ranks.network(), data(rank), "diag", val_loader=held_out, progress=False)


def update(at: int) -> Callable[[int, Fault], None]:
    """An update whose loader has the fault at this batch."""

    def work(rank: int, fault: Fault) -> None:
        posterior = uq.fit(ranks.network(), data(rank), "diag", prior_precision=1.0, progress=False)
        uq.update(posterior, Faulty(data(rank + 4), at, fault), progress=False)

    return work


def checked(rank: int, fault: Fault) -> None:
    """The checks of an update, before any batch is read."""
    posterior = uq.fit(ranks.network(), data(rank), "diag", prior_precision=1.0, progress=False)

    whole = updating.check_loader

    def faulty(loader: Any) -> None:
        fault()
        whole(loader)

    updating.check_loader = faulty
    uq.update(posterior, data(rank + 4), progress=False)


def evaluated(part: str) -> Callable[[int, Fault], None]:
    """The evaluation of the ImageNet recipe: in predictions, or in what rank 0 alone makes of them."""

    def work(rank: int, fault: Fault) -> None:
        options = Namespace(methods=[], batch_size=8, workers=0, progress=False, bins=5)
        options.evaluations = Path(os.environ["FOLDER"])
        pictures: Any = ranks.Pictures(12, 9)
        whole = getattr(evaluating, part)

        def faulty(*given: Any) -> Any:
            fault()
            return whole(*given)

        setattr(evaluating, part, faulty)
        source: Any = Namespace(model=ranks.network())
        run_on_all_ranks(
            lambda: evaluating.evaluate_all(source, pictures, range(12), {}, options), "the recipe"
        )

    return work


STAGES: dict[str, tuple[Callable[[int, Fault], None], int]] = {
    "dry run": (read(0), 1),
    "first sweep": (read(3), 1),
    "second sweep": (read(7), 1),
    "noise": (noise, 1),
    "tuning": (tuning, 1),
    "update, checks": (checked, 1),
    "update, dry run": (update(0), 1),
    "update, sweep": (update(3), 0),
    "evaluation, predictions": (evaluated("_predict"), 1),
    "evaluation, summary": (evaluated("summary"), 0),
}
"""What is done, and which rank has the fault."""
LATE = ("first sweep", "update, sweep", "evaluation, predictions")
"""Stages in which a rank is late: each waits for the group's timeout."""


def raises() -> None:
    raise OSError("the disk is gone")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def late() -> None:
    time.sleep(1.5 * ranks.TIMEOUT)


FAULTS: dict[str, Fault] = {"raises": raises, "killed": killed, "late": late}


def said(stage: str, fault: str, folder: Path) -> list[dict[str, Any] | None]:
    """What both processes said of a stage with a fault in one of them, and how long each took."""
    work, faulty = STAGES[stage]

    def job(rank: int, folder: Path, said: dict[str, Any]) -> None:
        os.environ["FOLDER"] = str(folder / "kept")
        began = time.monotonic()
        try:
            work(rank, FAULTS[fault] if rank == faulty else lambda: None)
        finally:
            said["seconds"] = time.monotonic() - began

    found = ranks.two(job, folder, {1 - faulty} if fault == "killed" else {0, 1})
    return [found[faulty], found[1 - faulty]]


def main() -> None:
    """All stages and faults; prints what the faulty process and the other said."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = {
            f"{stage}: {fault}": said(stage, fault, Path(place) / f"{number}{fault}")
            for number, stage in enumerate(STAGES)
            for fault in FAULTS
            if fault != "late" or stage in LATE
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
