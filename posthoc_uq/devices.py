"""What a device can hold, numbers that are the host's whatever torch's default device is, and looks at a device.

Everything that the library makes itself says where it lies: random numbers and small tables on the CPU, all else beside
the tensor that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_WITHOUT_DOUBLE = ("mps",)


def has_double(device: torch.device) -> bool:
    """Whether the device knows float64."""
    return device.type not in _WITHOUT_DOUBLE


def widest(device: torch.device) -> torch.dtype:
    """The most exact floating type of a device."""
    return torch.float64 if has_double(device) else torch.float32


def as_double(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU where its device has none."""
    return (tensor if has_double(tensor.device) else tensor.cpu()).double()


def host_double(value: Any) -> Tensor:
    """A number, a list of numbers or a tensor of any device, in float64 on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu().double()
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; float64 stays on the CPU, or comes to it, where the device has none."""
    if tensor.dtype == torch.float64 and not has_double(device):
        return tensor.cpu()
    return tensor.to(device)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU, those of one device in one copy: the host waits for the device once."""
    found = list(tensors)
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            places.setdefault(tensor.device, []).append(index)
    for indices in places.values():
        if any(tensors[index].requires_grad for index in indices):  # a copy that keeps the graph
            found = [
                tensor.cpu() if index in indices else found[index] for index, tensor in enumerate(tensors)
            ]
            continue
        flat = [tensors[index].contiguous().reshape(-1).view(torch.uint8) for index in indices]
        parts = torch.cat(flat).cpu().split([len(part) for part in flat])
        for index, part in zip(
            indices, parts, strict=True
        ):  # copied: memory of its own, aligned for its type
            own = tensors[index]
            found[index] = part.clone().view(own.dtype).reshape(own.shape)
    return found


def moved(tensors: Iterable[Tensor], device: torch.device | str) -> list[Tensor]:
    """All of them on a device; to the CPU in one copy."""
    if torch.device(device).type == "cpu":
        return on_host(*tensors)
    return [tensor.to(device) for tensor in tensors]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # a transfer from pageable memory makes the host wait
    return tensor.to(device, non_blocking=True)


class Checks:
    """What the host wants to know of a batch, gathered on the device and read at once when the batch is done: every
    look makes the host wait for the device.
    """

    def __init__(self) -> None:
        self._wanted: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def later(self, value: Tensor, use: Callable[[Tensor], None]) -> None:
        """Have `use` called with the value on the CPU; it may raise an error."""
        self._wanted.append((value.detach(), use))

    def look(self) -> None:
        """Read all values, and use them in the order in which they were asked for."""
        wanted, self._wanted = self._wanted, []
        for value, (_, use) in zip(on_host(*(value for value, _ in wanted)), wanted, strict=True):
            use(value)
