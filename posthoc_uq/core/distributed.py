"""Several processes that share a fit: the part of each, and how their sums are added up.

Without a process group of `torch.distributed` there is one process, and nothing to exchange. In a group, every meeting
carries its purpose and whether this process has failed, so that nobody waits for one that will not come.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from posthoc_uq.core.devices import on_device
from posthoc_uq.core.errors import PosthocUQError

Result = TypeVar("Result")

_broken_off = 0
"""How many meetings of this process ended in an error that all the others have heard of, or cannot hear of."""


def world() -> int:
    """Number of processes of the default group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, 0 without a group."""
    return dist.get_rank() if world() > 1 else 0


def sampler_of(loader: Iterable[Any]) -> Any:
    """The sampler that gives a loader its indices, or None."""
    holder = getattr(loader, "batch_sampler", None)
    return getattr(holder, "sampler", None) or getattr(loader, "sampler", None)


def own_samples(loader: Iterable[Any]) -> int | None:
    """How many samples of a loader belong to this process.

    `DistributedSampler` gives every rank the same number by repeating some of the first samples at the end; these
    copies belong to another rank, and do not count. None where there is no such padding.
    """
    sampler = sampler_of(loader)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    size = len(cast(Any, sampler.dataset))
    if size % sampler.num_replicas == 0:
        return None
    return len(range(sampler.rank, size, sampler.num_replicas))


def check_items(loader: Iterable[Any], samples: int) -> None:
    """Refuse a padded loader that makes several samples of an item, since its padding cannot be recognised.

    Raises:
        PosthocUQError: the batch has more samples than the loader puts items in one.
    """
    items = getattr(loader, "batch_size", None)
    if items is not None and samples > items:
        raise PosthocUQError(
            f"The loader makes {samples} samples of a batch of {items} items, so the padding of its DistributedSampler "
            f"cannot be told apart; give the sampler drop_last=True, or a number of items that the processes divide."
        )


def is_divided(loader: Iterable[Any]) -> bool:
    """Whether a loader gives each process another part of the data."""
    sampler = sampler_of(loader)
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1


@contextmanager
def on_all_ranks(doing: str) -> Generator[None]:
    """A context of work that every process does; if one fails in it, all raise.

    Such contexts may be nested. A process that fails between the meetings of an inner work goes to that of the outer
    one, and the others hear of it at their next.

    Raises:
        PosthocUQError: another process failed, or did not come; names it.
    """
    before = _broken_off
    try:
        yield
    except Exception as failure:
        if _broken_off == before:  # else an inner meeting failed, after which nobody comes to this one
            gather(None, doing, failure)
        raise
    gather(None, doing)


def gather(value: Any, doing: str, error: Exception | None = None) -> list[Any]:
    """A plain value of every process, in the order of their ranks; all must meet for the same.

    Args:
        value: of this process.
        doing: what they meet for.
        error: why this process failed, where it did: the others hear of it, and it is raised.

    Raises:
        PosthocUQError: another process failed, did not come, or is at another point; names it.
    """
    global _broken_off
    if world() == 1:
        if error is not None:
            raise error
        return [value]
    answers: list[Any] = [None] * world()
    with _waiting(doing):
        dist.all_gather_object(
            answers, (doing, None if error is None else f"{type(error).__name__}: {error}", value)
        )
    for number, (place, failure, _) in enumerate(answers):
        if failure is not None:
            _broken_off += 1
            raise error or PosthocUQError(f"Rank {number} failed in {place}: {failure}")
    for number, (place, _, _) in enumerate(answers):
        if place != answers[0][0]:
            _broken_off += 1
            raise PosthocUQError(
                f"Rank {number} came to {place} while rank 0 came to {answers[0][0]}; all processes must make the same "
                f"calls in the same order."
            )
    return [answer for _, _, answer in answers]


def all_reduce_sum(sums: Mapping[Any, Tensor], doing: str) -> None:
    """Replace every tensor by its sum over the processes.

    Raises:
        PosthocUQError: another process failed, or did not come, or its tensors have other shapes.
    """
    if world() == 1:
        return
    shapes = gather({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sums.items()}, doing)
    for number, other in enumerate(shapes):
        if other != shapes[0]:
            raise PosthocUQError(
                f"In {doing}, rank {number} has sums of other shapes than rank 0; all processes must hold the same "
                f"model and ask for the same fit."
            )
    device = _device()
    with _waiting(doing):
        for tensor in sums.values():
            # The group may serve one kind of device only (NCCL), and counters are on the CPU.
            moved = tensor if device is None or tensor.device.type == device.type else tensor.to(device)
            dist.all_reduce(moved)
            if moved is not tensor:
                tensor.copy_(moved)


def broadcast(
    tensors: dict[str, dict[str, Tensor]] | None, source: int, device: torch.device, doing: str
) -> Any:
    """Copy the named tensors of one process, `source`, to all of them, on `device`.

    Raises:
        PosthocUQError: another process failed, or did not come.
    """
    if world() == 1:
        return tensors
    group_device = _device()
    shapes_here = {
        a: {b: (tuple(t.shape), t.dtype) for b, t in group.items()} for a, group in (tensors or {}).items()
    }
    shapes = gather(shapes_here if rank() == source else None, doing)[source]
    received: dict[str, dict[str, Tensor]] = {}
    with _waiting(doing):
        for outer, group in shapes.items():
            received[outer] = {}
            for inner, (shape, dtype) in group.items():
                tensor = (
                    tensors[outer][inner].contiguous() if tensors is not None and rank() == source else None
                )
                place = group_device or (tensor.device if tensor is not None else device)
                buffer = torch.empty(shape, dtype=dtype, device=place) if tensor is None else tensor.to(place)
                dist.broadcast(buffer, source)
                received[outer][inner] = on_device(buffer, device)
    return received


@contextmanager
def _waiting(doing: str) -> Generator[None]:
    """Note in the group's store that this process has come, and turn a wait that ended in an error into one that names
    who has not. How long torch waits is the group's timeout.
    """
    global _broken_off
    try:
        store = _store()
        store.add(_came(rank()), 1)
        store.set(f"{_came(rank())}/to", doing)
        yield
    except RuntimeError as error:
        _broken_off += 1
        raise PosthocUQError(_missing(doing, error)) from error


def _missing(doing: str, error: RuntimeError) -> str:
    """Who has not come, in words, and where they were last."""
    reason = re.sub(r"^\[[^\]]*\] ", "", str(error).strip().split("\n")[0]).split(". ")[0].rstrip(".")
    try:
        store = _store()
        meetings = store.add(_came(rank()), 0)
        absent: list[str] = []
        for number in range(world()):
            if store.add(_came(number), 0) < meetings:
                key = f"{_came(number)}/to"
                last = f"last at {store.get(key).decode()}" if store.check([key]) else "never at any meeting"
                absent.append(f"rank {number} ({last})")
    except RuntimeError:
        return (
            f"The exchange in {doing} broke off ({reason}), and the process that keeps the group's store, rank 0 or "
            f"torchrun, has ended; look at what it says."
        )
    if not absent:
        return (
            f"The exchange in {doing} broke off ({reason}): another process has ended, or has waited too long for this "
            f"one; look at what the others say."
        )
    return (
        f"Not all processes came to {doing} ({reason}); missing: {', '.join(absent)}. Look at what they say; how long "
        f"to wait for them is the timeout of torch.distributed.init_process_group."
    )


def _came(number: int) -> str:
    """The key under which the group's store counts the meetings that a process has come to."""
    return f"posthoc_uq/{number}"


def _store() -> Any:
    """The default group's store; torch has no public name for it."""
    return cast(Any, dist.distributed_c10d)._get_default_store()


def _device() -> torch.device | None:
    """The device on which the group's tensors must be, or None if any will do."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if dist.get_backend() == "gloo" else None
