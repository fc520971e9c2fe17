"""Pairs of processes, one of which fails in a part of its work, and what both said; run as a script by
``test_distributed_faults.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy.random  # noqa: F401  # as the next: loaded with the first gradient or search; here once for all children
import scipy.optimize  # noqa: F401
import sympy  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


import posthoc_uq as uq  # noqa: E402
from posthoc_uq.core import on_all_ranks  # noqa: E402
from recipes.imagenet import evaluating  # noqa: E402

updating = import_module("posthoc_uq.fitting.update")

TIMEOUT, HANG = 3.0, 60.0
"""Seconds: of the group, and after which a process counts as hanging."""
Fault = Callable[[], None]
Batches = list[tuple[Tensor, Tensor]]
Job = Callable[[int, Path, dict[str, Any]], None]


def network() -> nn.Module:
    """A small convolutional network with fixed weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)]
    return nn.Sequential(*layers).eval()


def images(samples: int, seed: int) -> TensorDataset:
    """Images and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


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
    x, y = images(16, 1 + rank).tensors
    targets = nn.functional.one_hot(y, 3).float() if regression else y
    return list(zip(x.split(4), targets.split(4), strict=True))


def read(at: int) -> Callable[[int, Fault], None]:
    """A fit whose loader has the fault at this batch: 4 in each sweep, and 1 in the dry run."""

    def work(rank: int, fault: Fault) -> None:
        uq.fit(network(), Faulty(data(rank), at, fault), rank=4, progress=False)

    return work


def noise(rank: int, fault: Fault) -> None:
    """The sweep for a regression's noise."""
    loader = Faulty(data(rank, True), 3, fault)
    uq.fit(network(), loader, "diag", likelihood="regression", progress=False)


def tuning(rank: int, fault: Fault) -> None:
    """The last part of a fit, which nobody shares: the search on held-out data."""
    held_out = Faulty(data(7), 2, fault)
    uq.fit(network(), data(rank), "diag", val_loader=held_out, progress=False)


def update(at: int) -> Callable[[int, Fault], None]:
    """An update whose loader has the fault at this batch."""

    def work(rank: int, fault: Fault) -> None:
        posterior = uq.fit(network(), data(rank), "diag", prior_precision=1.0, progress=False)
        uq.update(posterior, Faulty(data(rank + 4), at, fault), progress=False)

    return work


def checked(rank: int, fault: Fault) -> None:
    """The checks of an update, before any batch is read."""
    posterior = uq.fit(network(), data(rank), "diag", prior_precision=1.0, progress=False)

    whole = updating.check_loader

    def faulty(loader: Any) -> None:
        fault()
        whole(loader)

    updating.check_loader = faulty
    uq.update(posterior, data(rank + 4), progress=False)


class Pictures:
    """Images as the recipe holds them."""

    def __init__(self, samples: int, seed: int) -> None:
        self.data = images(samples, seed)
        self.labels: list[int] = self.data.tensors[1].tolist()
        self.dataset = self

    files = ("none",)

    def __len__(self) -> int:
        return len(self.labels)

    def loader(
        self, indices: Sequence[int], batch_size: int, workers: int, **_: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """Batches of the images of these numbers."""
        x, y = (tensor[list(indices)] for tensor in self.data.tensors)
        return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def evaluated(part: str) -> Callable[[int, Fault], None]:
    """The evaluation of the ImageNet recipe: in predictions, or in what rank 0 alone makes of them."""

    def work(rank: int, fault: Fault) -> None:
        options = Namespace(methods=[], batch_size=8, workers=0, progress=False, bins=5)
        options.evaluations = Path(os.environ["FOLDER"])
        pictures: Any = Pictures(12, 9)
        whole = getattr(evaluating, part)

        def faulty(*given: Any) -> Any:
            fault()
            return whole(*given)

        setattr(evaluating, part, faulty)
        source: Any = Namespace(model=network())
        with on_all_ranks("the recipe"):
            evaluating.evaluate_all(source, pictures, range(12), {}, options)

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
KILLED = ("dry run", "second sweep", "update, sweep")
"""Stages in which a rank is killed."""
LATE = ("first sweep",)
"""Stages in which a rank is late: each waits for the group's timeout."""


def raises() -> None:
    raise OSError("the disk is gone")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def late() -> None:
    time.sleep(1.5 * TIMEOUT)


FAULTS: dict[str, Fault] = {"raises": raises, "killed": killed, "late": late}


def child(rank: int, port: int, folder: Path, job: Job) -> NoReturn:
    """One process: it does its job, writes down how that ended, and lives on, as a notebook does."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, sys.stderr.fileno())
    os.dup2(quiet, sys.stdout.fileno())
    said: dict[str, Any] = {"error": None, "text": "", "known": True}
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        job(rank, folder, said)
    except Exception as error:
        said |= {
            "error": type(error).__name__,
            "text": str(error),
            "known": isinstance(error, uq.PosthocUQError),
        }
    (folder / f"{rank}.part").write_text(json.dumps(said))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    time.sleep(HANG)  # it is ended when the other has written, too
    os._exit(0)


def two(job: Job, folder: Path, waiting: set[int]) -> list[dict[str, Any] | None]:
    """What each of two processes said, None for one that was killed or hangs; no process is left.

    Args:
        job: takes the rank, the folder and what will be said.
        folder: a new one.
        waiting: the ranks that are waited for.
    """
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    children = [os.fork() or child(rank, port, folder, job) for rank in range(2)]
    end = time.monotonic() + HANG
    while waiting and time.monotonic() < end:
        waiting = {rank for rank in waiting if not (folder / f"{rank}.json").exists()}
        time.sleep(0.02)
    for process in children:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    files = [folder / f"{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


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

    found = two(job, folder, {1 - faulty} if fault == "killed" else {0, 1})
    return [found[faulty], found[1 - faulty]]


def main() -> None:
    """All stages and faults; prints what the faulty process and the other said."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = {
            f"{stage}: {fault}": said(stage, fault, Path(place) / f"{number}{fault}")
            for number, stage in enumerate(STAGES)
            for fault in FAULTS
            if fault == "raises" or stage in {"late": LATE, "killed": KILLED}[fault]
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
