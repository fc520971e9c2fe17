"""Loaders that write to the model which a call reads, in the ways that torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.3)


def _through_data(tensor: Tensor) -> None:
    tensor.data.add_(0.3)


def _through_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] += 0.3


def _fused(tensor: Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.Adam([tensor], lr=0.3, fused=True).step()
    tensor.grad = None


WRITES: dict[str, tuple[str, Callable[[Tensor], None]]] = {
    "in place": ("0.weight", in_place),
    "through .data": ("3.weight", _through_data),
    "through NumPy": ("0.bias", _through_numpy),
    "a fused optimizer": ("3.bias", _fused),
    "statistics": ("1.running_mean", in_place),
}
"""What is written to and how, by name, in a network of a linear layer, a batch norm, a ReLU and a linear layer."""


class Writing:
    """A loader that writes to a model at one of its batches, and may give the numbers back two batches later."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], write: str, at: int = 2, given_back: bool = True
    ) -> None:
        name, self._write = WRITES[write]
        self._tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
        self._old, self._given_back = self._tensor.detach().clone(), given_back
        self._loader, self._at, self._batches = batches, at, 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._batches += 1
            if self._batches == self._at:
                self._write(self._tensor)
            if self._given_back and self._batches == self._at + 2:
                self._tensor.data.copy_(self._old)
            yield batch
