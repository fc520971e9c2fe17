"""Several processes that share a fit: the part of each, and how their sums are added up.

Without a process group of `torch.distributed` there is one process, and nothing to exchange.
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


def check_items(loader: Iterable[Any], own_count: int | None, samples: int) -> None:
    """Refuse a padded loader that makes several samples of an item, since its padding cannot be recognised.

    Raises:
        PosthocUQError: the batch has more samples than the loader puts items in one.
    """
    items = getattr(loader, "batch_size", None)
    if own_count is not None and items is not None and samples > items:
        raise PosthocUQError(
            f"The loader makes {samples} samples of a batch of {items} items, so the padding of its DistributedSampler "
            f"cannot be told apart; give the sampler drop_last=True, or a number of items that the processes divide."
        )


def is_divided(loader: Iterable[Any]) -> bool:
    """Whether a loader gives each process another part of the data."""
    sampler = sampler_of(loader)
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1


def together(work: Callable[[], Result], doing: str) -> Result:
    """Do the same work in every process; if one fails, all raise.

    Raises:
        PosthocUQError: another process failed; names it.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as failure:
        error = failure
    agree(error, doing)
    return cast(Result, result)


def agree(error: Exception | None, doing: str) -> None:
    """Let all processes go on, or none: if one of them failed, all raise.

    Raises:
        PosthocUQError: another process failed; names it.
    """
    if world() == 1:
        if error is not None:
            raise error
        return
    messages = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for number, message in enumerate(messages):
        if message is not None:
            raise PosthocUQError(f"Rank {number} failed in {doing}: {message}")


def gather(value: Any) -> list[Any]:
    """A plain value of every process, in the order of their ranks."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


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


def hand_out(tensors: dict[str, dict[str, Tensor]] | None, source: int, device: torch.device) -> Any:
    """Copy the named tensors of one process, `source`, to all of them, on `device`."""
    if world() == 1:
        return tensors
    group_device = _device()
    shapes = [
        {a: {b: (tuple(t.shape), t.dtype) for b, t in group.items()} for a, group in (tensors or {}).items()}
    ]
    dist.broadcast_object_list(shapes, source)
    received: dict[str, dict[str, Tensor]] = {}
    for outer, group in shapes[0].items():
        received[outer] = {}
        for inner, (shape, dtype) in group.items():
            tensor = tensors[outer][inner].contiguous() if tensors is not None and rank() == source else None
            place = group_device or (tensor.device if tensor is not None else device)
            buffer = torch.empty(shape, dtype=dtype, device=place) if tensor is None else tensor.to(place)
            dist.broadcast(buffer, source)
            received[outer][inner] = placed(buffer, device)
    return received


def _device() -> torch.device | None:
    """The device on which the group's tensors must be, or None if any will do."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if dist.get_backend() == "gloo" else None
