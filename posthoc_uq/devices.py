"""What a device can hold, and numbers that are the host's whatever torch's default device is.

Everything that the library makes itself says where it lies: random numbers and small tables on the CPU, all else beside
the tensor that it belongs to.
"""

from __future__ import annotations

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
