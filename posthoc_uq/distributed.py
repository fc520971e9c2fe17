"""Several processes that share a fit: what belongs to each, and how their sums become one.

Without a process group of `torch.distributed` all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from posthoc_uq.devices import placed
from posthoc_uq.errors import PosthocUQError

Result = TypeVar("Result")


def world() -> int:
    """Number of processes of the default group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, 0 without a group."""
    return dist.get_rank() if world() > 1 else 0


def sampler_of(loader: Iterable[Any]) -> Any:
    """What gives a loader its indices, or None."""
    holder = getattr(loader, "batch_sampler", None)
    return getattr(holder, "sampler", None) or getattr(loader, "sampler", None)


def own_samples(loader: Iterable[Any]) -> int | None:
    """How many samples of a loader are this process's own.

    `DistributedSampler` gives every rank the same number by repeating some of the first samples at the end; these
    copies are another rank's, and not counted. None where the loader says nothing of that kind.
    """
    sampler = sampler_of(loader)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    size = len(cast(Any, sampler.dataset))
    if size % sampler.num_replicas == 0:
        return None
    return len(range(sampler.rank, size, sampler.num_replicas))


def check_items(loader: Iterable[Any], own: int | None, samples: int) -> None:
    """Refuse a padded loader that makes several samples of an item: its padding cannot be told from data.

    Raises:
        PosthocUQError: the batch has more samples than the loader puts items in one.
    """
    items = getattr(loader, "batch_size", None)
    if own is not None and items is not None and samples > items:
        raise PosthocUQError(
            f"The loader makes {samples} samples of a batch of {items} items, so the padding of its DistributedSampler "
            f"cannot be told apart; give the sampler drop_last=True, or a number of items that the processes divide."
        )


def is_divided(loader: Iterable[Any]) -> bool:
    """Whether a loader gives each process a part of its own."""
    sampler = sampler_of(loader)
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1


def together(work: Callable[[], Result], doing: str) -> Result:
    """Do something in every process; where one fails, all raise.

    Raises:
        PosthocUQError: another process failed; names it.
    """
    found, error = None, None
    try:
        found = work()
    except Exception as caught:
        error = caught
    agree(error, doing)
    return cast(Result, found)


def agree(error: Exception | None, doing: str) -> None:
    """Let all processes go on, or none: where one of them failed, all raise.

    Raises:
        PosthocUQError: another process failed; names it.
    """
    if world() == 1:
        if error is not None:
            raise error
        return
    found = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for number, message in enumerate(found):
        if message is not None:
            raise PosthocUQError(f"Rank {number} failed in {doing}: {message}")


def gather(value: Any) -> list[Any]:
    """A plain value of every process, in the order of their ranks."""
    if world() == 1:
        return [value]
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, value)
    return found


def add_up(sums: Mapping[Any, Tensor]) -> None:
    """Replace every tensor by its sum over the processes."""
    if world() == 1:
        return
    device = _device()
    for tensor in sums.values():
        # The group may know one kind of device only (NCCL), and counters are on the CPU.
        moved = tensor if device is None or tensor.device.type == device.type else tensor.to(device)
        dist.all_reduce(moved)
        if moved is not tensor:
            tensor.copy_(moved)


def hand_out(tensors: dict[str, dict[str, Tensor]] | None, source: int, own: torch.device) -> Any:
    """Named tensors of one process, in all of them."""
    if world() == 1:
        return tensors
    device = _device()
    shapes = [
        {a: {b: (tuple(t.shape), t.dtype) for b, t in group.items()} for a, group in (tensors or {}).items()}
    ]
    dist.broadcast_object_list(shapes, source)
    found: dict[str, dict[str, Tensor]] = {}
    for outer, group in shapes[0].items():
        found[outer] = {}
        for inner, (shape, dtype) in group.items():
            tensor = tensors[outer][inner].contiguous() if tensors is not None and rank() == source else None
            place = device or (tensor.device if tensor is not None else own)
            moved = torch.empty(shape, dtype=dtype, device=place) if tensor is None else tensor.to(place)
            dist.broadcast(moved, source)
            found[outer][inner] = placed(moved, own)
    return found


def _device() -> torch.device | None:
    """Where the group's tensors must be, or None where it takes any."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if dist.get_backend() == "gloo" else None
