"""The processes of distributed fits; run as a script by ``test_distributed.py``, with a folder for each number of them.

They are forked from one that has loaded torch, with the environment that torchrun gives them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy.random  # noqa: F401  # as the next: loaded with the first gradient or search; here once for all children
import scipy.optimize  # noqa: F401
import sympy  # noqa: F401
import torch
import torch.distributed as dist
from networks import without_training
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.core import BatchReader
from posthoc_uq.curvature import KeptInputs, own_samples_of, samples_in_all

SAMPLES, BATCH = 34, 5
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in without_training()},
    "inf": {"rank": 15},
    "inf, sketch": {"rank": 4, "basis": "sketch", "basis_fraction": 0.7, "fisher": "mc"},
    "efb": {"method": "efb", "fisher": "exact"},
    "kfac": {"method": "kfac", "fisher": "mc"},
    "diag": {"method": "diag", "n_samples": 3},
    "full": {"method": "full", "layers": "last"},
    "regression": {"method": "diag", "likelihood": "regression"},
    "weights": {"method": "kfac", "batch_to_weights": lambda batch: weights(batch[0])},
    "regression with weights": {
        "method": "full",
        "layers": "last",
        "likelihood": "regression",
        "batch_to_weights": lambda batch: weights(batch[0]),
    },
}

UNEVEN = ("inf", "kfac", "full", "regression", "regression with weights")
"""Cases that are fitted on parts of other sizes, too."""

BAD: dict[str, Any] = {"fisher": "all", "prior_precision": -1.0, "head": "tail", "likelihood": "guess"}


def model() -> nn.Module:
    """A small convolutional net with fixed weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 6, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(54, 3)).eval()


def data(regression: bool) -> TensorDataset:
    """Images with labels or targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 1, 7, 7, generator=generator)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    return TensorDataset(x, nn.functional.one_hot(labels, 3).float() if regression else labels)


def weights(x: Tensor) -> Tensor:
    """Weights of images; some are 0."""
    return (x[:, 0, 0, 0] * 2).clamp(min=0)


def fit(loader: Any, case: str, **options: Any) -> uq.Posterior:
    """A fit of one case; two of them search the prior precision."""
    if case not in ("inf", "regression"):
        options = {"prior_precision": 1.0} | options
    return uq.fit(model(), loader, progress=True, **CASES[case], **options)


def more(first: int, last: int) -> list[tuple[Tensor, ...]]:
    """Images that come in after a fit, these of them, in batches."""
    x, y = (tensor[first:last] for tensor in data(False).tensors)
    return list(zip((1.3 * x).split(3), y.split(3), strict=True)) if last > first else []


def changed(loader: Any, case: str, came: Any, went: Any) -> uq.Posterior:
    """A fit with data that came in later, some of which went out again."""
    posterior = uq.fit(
        model(), loader, progress=False, dtype=torch.float64, prior_precision=1.0, **CASES[case]
    )
    posterior = uq.update(posterior, came, progress=False)
    return uq.update(posterior, went, remove=True, progress=False)


def sampled(case: str, shuffle: bool = False) -> DataLoader:
    """This process's part, padded by the sampler so that all parts are equally long."""
    dataset = data(CASES[case].get("likelihood") == "regression")
    return DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=shuffle))


def uneven(case: str) -> list[tuple[Tensor, ...]]:
    """This process's part, of another size in every process."""
    x, y = data(CASES[case].get("likelihood") == "regression").tensors
    ends = [0, 4, 21, SAMPLES] if dist.get_world_size() == 3 else [0, 9, SAMPLES]
    part = slice(ends[dist.get_rank()], ends[dist.get_rank() + 1])
    return list(zip(x[part].split(BATCH), y[part].split(BATCH), strict=True))


class Broken:
    """A loader that fails in one process, with the batch of a given number in all its passes."""

    def __init__(self, loader: Any, rank: int, after: int) -> None:
        self._loader, self._rank, self._left = loader, rank, after
        self.sampler = loader.sampler  # tells what is padding

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._left -= 1
            if dist.get_rank() == self._rank and self._left < 0:
                raise RuntimeError("the disk is gone")
            yield batch


class Wide:
    """A loader that gives inputs of float64 in one process, from the batch of a given number on."""

    def __init__(self, loader: Any, rank: int, after: int) -> None:
        self._loader, self._own, self._after = loader, dist.get_rank() == rank, after
        self.sampler = loader.sampler

    def __iter__(self) -> Iterator[Any]:
        for index, (x, y) in enumerate(self._loader):
            yield (x.double() if self._own and index >= self._after else x), y


def kept() -> list[int]:
    """How many inputs each process takes for the faithful prior, where they have room for other numbers of them."""
    inputs = KeptInputs(2000 + 1500 * dist.get_rank(), uq.Categorical())  # of 196 bytes each
    inputs.read(sampled("inf"), BatchReader(torch.device("cpu")), 0, False)
    return [len(batch.args[0]) for batch in inputs.batches(torch.device("cpu"))]


def counted(loader: Any) -> int | None:
    """Samples of all processes, before they are read."""
    reader = BatchReader(torch.device("cpu"))
    return samples_in_all(own_samples_of(loader, reader, reader.read(next(iter(loader)))))


def message(loader: Any, case: str, **options: Any) -> str:
    """What a fit that fails says."""
    try:
        fit(loader, case, **options)
    except (PosthocUQError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def interrupted(folder: Path) -> str:
    """A fit that breaks off in its second sweep, and goes on although one process has lost its checkpoint."""
    path = folder / "checkpoint.h5"
    batches = len(sampled("inf"))
    said = message(Broken(sampled("inf"), 1, batches + 2), "inf", checkpoint=path, checkpoint_every=1)
    own = folder / f"checkpoint.rank{dist.get_rank()}of{dist.get_world_size()}.h5"
    assert own.exists()
    dist.barrier()
    if dist.get_rank() == 0:
        own.unlink()
    uq.save(fit(sampled("inf"), "inf", checkpoint=path, checkpoint_every=1), folder / "resumed.h5")
    assert not own.exists()
    return said


def work(folder: Path) -> None:
    """All cases; rank 0 saves the posteriors, and every rank writes what it was told."""
    dist.init_process_group("gloo")
    said: dict[str, Any] = {}
    for case in CASES:
        posterior = fit(sampled(case), case)
        uq.save(posterior, folder / f"{case}.h5")
        said[case] = [posterior.scale, float(posterior.prior_precision)]
        if case in UNEVEN:
            uq.save(fit(uneven(case), case, prior_precision=1.0), folder / f"{case}, uneven.h5")
    uq.save(fit(sampled("inf", shuffle=True), "inf", prior_precision=1.0), folder / "shuffled.h5")
    for case in ("diag", "inf"):  # every process has a part of what comes in and goes out, of another size
        rank, world = dist.get_rank(), dist.get_world_size()
        came = more(4 * rank, SAMPLES if rank == world - 1 else 4 * rank + 4)
        posterior = changed(sampled(case), case, came, more(4 * rank, 4 * rank + 2 + rank))
        uq.save(posterior, folder / f"{case}, changed.h5")
        said[f"{case}, changed"] = posterior.history.changes.plain()
    said["samples"] = [counted(sampled("inf")), counted(uneven("inf"))]
    said["samples"] += [samples_in_all(None if dist.get_rank() else 5)]
    everything = DataLoader(data(False), batch_size=BATCH)
    said["same data"] = message(everything, "inf")
    said["broken"] = message(Broken(sampled("inf"), 1, 1), "inf")
    last = "all" if dist.get_rank() == 0 else "last"
    said["wide"] = [message(Wide(sampled("inf"), 1, after), "inf") for after in (0, 1)]
    said["narrow"] = message(sampled("inf"), "inf", dtype=torch.float16 if dist.get_rank() == 1 else None)
    said["kept"] = kept()
    said["other layers"] = message(sampled("inf"), "inf", layers=last)
    said["other seed"] = message(sampled("inf"), "inf", seed=dist.get_rank())
    said["divided validation"] = message(sampled("inf"), "inf", val_loader=sampled("inf"))
    first = dist.get_rank() == 0
    said["bad options"] = [
        message(sampled("inf"), "inf", **({name: value} if first else {})) for name, value in BAD.items()
    ]
    said["other options"] = [
        message(sampled("inf"), "inf", **({name: value} if first else {}))
        for name, value in (("prior_precision", 2.0), ("head", "sampling"), ("checkpoint", folder / "one.h5"))
    ]
    said["interrupted"] = interrupted(folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def child(rank: int, world: int, port: int, folder: Path) -> NoReturn:
    """A process of its own, which writes what it shows into the folder."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.dup2(os.open(folder / f"shown{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600), sys.stderr.fileno())
    code = 1
    try:
        work(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """As many processes at once as each folder is named after."""
    torch.set_num_threads(1)
    for folder in map(Path, sys.argv[1:]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = int(folder.name)
        children = [os.fork() or child(rank, world, port, folder) for rank in range(world)]
        while children:
            left, status = os.wait()
            children.remove(left)
            if status:
                for other in children:  # which would wait for the one that failed
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"a process of {world} failed, see {folder}")


if __name__ == "__main__":
    main()
