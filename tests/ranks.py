"""Two processes of a group, and a fault in one of them at every exchange: does the other end, soon, and say why?

    python tests/ranks.py                # every exchange of a fit, an update and the ImageNet recipe
    python tests/ranks.py --smoke        # a few of them, under a minute

Rank 1 fails before an exchange (and lives on, as a notebook does), has one broken, is killed before it, or comes
later than the group's timeout. Rank 0 must end with an error of the library that says where to look, and without
waiting for the timeout where rank 1 was killed or has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import posthoc_uq as uq  # noqa: E402
from posthoc_uq.core.distributed import run_on_all_ranks  # noqa: E402
from recipes.imagenet import evaluating, fitting, search  # noqa: E402

TIMEOUT, HANG = 3.0, 60.0
"""Seconds: of the group, and after which a process counts as hanging."""
EXCHANGES = ("all_gather_object", "all_reduce", "broadcast", "broadcast_object_list")
FAULTS = ("none", "raises", "broken", "killed", "late")


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


def part(samples: int = 16, seed: int = 1, readers: int = 0) -> DataLoader[Any]:
    """This process's share."""
    return DataLoader(images(samples, seed + dist.get_rank()), batch_size=8, num_workers=readers)


def fits(folder: Path) -> None:
    """A fit with everything that it may exchange."""
    options: dict[str, Any] = {"checkpoint": folder / "fit.h5", "checkpoint_every": 1, "progress": False}
    uq.fit(network(), part(), rank=4, **options)


def fits_regression(folder: Path) -> None:
    """A regression, whose noise has a sweep of its own, with readers that were forked."""
    x, y = images(16, 1 + dist.get_rank()).tensors
    data = DataLoader(TensorDataset(x, nn.functional.one_hot(y, 3).float()), batch_size=8, num_workers=1)
    uq.fit(network(), data, "efb", likelihood="regression", progress=False)


def updates(folder: Path) -> None:
    """Data that come in, to a posterior that each process has loaded."""
    posterior = uq.load(folder.parent / "fitted.h5", network())
    uq.update(posterior, part(seed=5), progress=False)


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


def recipe(folder: Path) -> None:
    """The ImageNet recipe's fit, search and evaluation."""
    options = Namespace(methods=["diag"], layers="all", rank=4, seed=0, checkpoint_every=1, progress=False)
    vars(options).update(search_samples=2, samples=2, bins=5, select="NLL", budget=2)
    vars(options).update(scales=(10.0, 20.0), priors=(10.0, 20.0), batch_size=8, workers=0)
    vars(options).update({name: folder / name for name in ("posteriors", "trials", "evaluations")})
    source: Any = SimpleNamespace(model=network(), spec="small", transform=SimpleNamespace(text="none"))
    val: Any = Pictures(12, 9)

    def work() -> None:
        fitting.fit_all(source, part(), options)  # type: ignore[arg-type]
        search.search_all(source, val.loader(range(6), 8, 0), torch.tensor(val.labels[:6]), options)
        evaluating.evaluate_all(source, val, range(6, 12), {}, options)

    run_on_all_ranks(work, "the recipe")


Job = Callable[[int, Path, dict[str, Any]], None]
WORKS: dict[str, Callable[[Path], None]] = {
    "fit": fits,
    "regression": fits_regression,
    "update": updates,
    "recipe": recipe,
}


def inject(fault: str, at: int, count: list[int]) -> None:
    """Let the exchange of this number have a fault in this process, and count all of them."""

    def faulty(name: str, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            now = count[0] == at
            if now and fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if now and fault == "late":
                time.sleep(1.5 * TIMEOUT)
            if now and fault == "broken":
                raise RuntimeError("injected: the network is gone")
            if (
                now and fault == "raises" and name == "all_gather_object"
            ):  # which all do before they share tensors
                raise ValueError("injected: this process has failed")
            return exchange(*args, **kwargs)

        return call

    for name in EXCHANGES:
        setattr(dist, name, faulty(name, getattr(dist, name)))


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


def tried(work: str, fault: str, at: int, folder: Path) -> list[dict[str, Any] | None]:
    """What each process said of a work with a fault at the exchange of this number."""

    def job(rank: int, folder: Path, said: dict[str, Any]) -> None:
        count = [0]
        inject(fault if rank else "none", at, count)
        try:
            WORKS[work](folder)
        finally:
            said["exchanges"] = count[0]

    return two(job, folder, {0} if fault in ("raises", "broken", "killed") else {0, 1})


def outcome(fault: str, said: dict[str, Any] | None) -> str:
    """How rank 0 ended: "well", or what is bad about it."""
    if said is None:
        return "hangs"
    if said["error"] is None:
        return "well"  # the last exchange was over, and rank 0 is done
    if not said["known"] or ("ank 1" not in said["text"] and "another process" not in said["text"]):
        return "unclear"
    if fault in ("raises", "killed") and "imed out" in said["text"]:
        return "waited"
    return "well"


def main() -> int:
    """All attacks; 1 if any had a bad outcome."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--smoke", action="store_true", help="a few exchanges of two works")
    command.add_argument("--every", type=int, default=1, help="only every so manyeth exchange")
    options = command.parse_args()
    torch.set_num_threads(1)
    bad, rows = 0, list[list[str]]()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        uq.save(uq.fit(network(), [images(32, 0).tensors], progress=False), root / "fitted.h5")
        for work in ("fit", "update") if options.smoke else WORKS:
            whole = tried(work, "none", 0, root / work)
            if any(said is None or said["error"] is not None for said in whole):
                print(f"{work} fails without a fault: {whole}", file=sys.stderr)
                return 1
            assert whole[1] is not None
            exchanges: int = whole[1]["exchanges"]
            step = max(options.every, exchanges // 3 if options.smoke else 1)
            for fault in FAULTS[1:]:
                found: dict[str, int] = dict.fromkeys(("hangs", "unclear", "waited", "well"), 0)
                for at in range(
                    1, exchanges + (fault != "raises"), step
                ):  # a failure is told in a later exchange
                    said = tried(work, fault, at, root / f"{work}-{fault}-{at}")
                    how = outcome(fault, said[0])
                    if (
                        fault == "late"
                        and how == "well"
                        and (said[1] is None or not said[1].get("known", True))
                    ):
                        how = "hangs" if said[1] is None else "unclear"
                    found[how] += 1
                    if how != "well":
                        print(f"{work}, {fault} at {at}: {how}: {said[0]}", file=sys.stderr)
                bad += found["hangs"] + found["unclear"] + found["waited"]
                rows.append(
                    [f"{work}: {fault}", str(sum(found.values())), *(str(found[k]) for k in list(found)[:3])]
                )
    print(
        "| attack | tries | hangs | unclear errors | waited for the timeout |\n| --- | --- | --- | --- | --- |"
    )
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
