"""Which positions of its outputs the linearised head uses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError

Positions = int | Sequence[int] | Tensor | None


def checked_positions(positions: Any) -> Tensor | None:
    """Positions as a tensor: booleans ``(*positions)``, or whole numbers ``(k,)`` or ``(k, dimensions)``.

    Raises:
        PosthocUQError: they are none of these.
    """
    if positions is None:
        return None
    try:
        tensor = torch.as_tensor(positions, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros((), device="cpu")
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        raise PosthocUQError(
            f"positions must be a whole number, several of them, a tensor of indices (k, dimensions) or a mask of "
            f"booleans, and not empty; not {positions!r:.100}."
        )
    tensor = tensor.detach().cpu()
    return (
        tensor
        if tensor.dtype == torch.bool
        else tensor.long().reshape(-1)
        if tensor.ndim < 2
        else tensor.long()
    )


def picked_positions(chosen: Tensor | None, positions: tuple[int, ...]) -> Tensor | None:
    """The chosen positions as indices into a sample's rows, ``(k,)``; None for all.

    Args:
        chosen: from `checked_positions`.
        positions: the sizes of the dimensions that count positions.

    Raises:
        PosthocUQError: there are no such positions.
    """
    if chosen is None:
        return None
    if chosen.dtype == torch.bool:
        if tuple(chosen.shape) != positions:
            raise PosthocUQError(
                f"positions is a mask of shape {tuple(chosen.shape)}, and the outputs have the positions {positions}."
            )
        found = chosen.flatten().nonzero().flatten()
        if not len(found):
            raise PosthocUQError("positions is a mask of no position; make at least one true.")
        return found
    sizes = torch.tensor(positions if chosen.ndim == 2 else (prod(positions),), device="cpu")
    indices = chosen if chosen.ndim == 2 else chosen.unsqueeze(1)
    if indices.shape[1] != len(sizes):
        raise PosthocUQError(
            f"positions has {indices.shape[1]} numbers each, and the outputs have the positions {positions}."
        )
    if bool(((indices < -sizes) | (indices >= sizes)).any()):
        raise PosthocUQError(
            f"positions go beyond the outputs, which have the positions {positions}: "
            f"{indices[((indices < -sizes) | (indices >= sizes)).any(1)][0].tolist()} is none of them."
        )
    indices = torch.where(indices < 0, indices + sizes, indices)
    strides = torch.tensor([prod(sizes[place + 1 :].tolist()) for place in range(len(sizes))], device="cpu")
    return (indices * strides).sum(1)
