"""Normalising flows of gated steps over a vector, as plain tensors.

A step takes ``z`` to ``k * z + (1 - k) * m`` with ``k = sigmoid(s)`` and ``(m, s) = g(z)`` (Kingma et al. 2016,
"Improving variational inference with inverse autoregressive flow", eq. 13 and 14). Where a coordinate's ``m`` and ``s``
depend on none of its own and later coordinates, the Jacobian is triangular, and its log-determinant is ``sum log k``.
``g`` is a network of two hidden layers whose weights are masked so (Germain et al. 2015, "MADE"). The order of the
coordinates turns round from step to step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import log, pi
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Literal["autoregressive", "coupling"]

KEEPS = 2.0
"""The bias of ``s`` at the start: a step begins by keeping 0.88 of its input."""


@dataclass(frozen=True)
class Flow:
    """What tells one flow from another; its tensors are given to `forward`.

    Attributes:
        size: of the vector, I.
        hidden: units in each of the two hidden layers of a step, H.
        steps: K.
        form: ``"autoregressive"``, or ``"coupling"``: every step moves one half of the coordinates by the other half
            (Dinh, Sohl-Dickstein, Bengio 2017, "Density estimation using Real NVP").
    """

    size: int
    hidden: int
    steps: int = 2
    form: Form = "autoregressive"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors by name."""
        sizes = [self.size, self.hidden, self.hidden, 2 * self.size]
        shapes: dict[str, tuple[int, ...]] = {}
        for step in range(self.steps):
            for layer in range(3):
                shapes[f"step{step}_weight{layer}"] = (sizes[layer + 1], sizes[layer])
                shapes[f"step{step}_bias{layer}"] = (sizes[layer + 1],)
        return shapes

    def masks(self, step: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For the three weights of a step, 1 where an entry may differ from zero; and 1 for the coordinates that the
        step moves, ``(I,)``.
        """
        return _masks(self, step, str(device))

    def initial(
        self, generator: torch.Generator, like: Tensor, *, shift: float | None = None
    ) -> dict[str, Tensor]:
        """Tensors to begin a training with: uniform as those of `torch.nn.Linear`.

        Args:
            generator: of the CPU.
            like: has their number format and device.
            shift: what every ``m`` is at the start, whatever ``z`` is: the output weights are zero then.
        """
        tensors: dict[str, Tensor] = {}
        for name, shape in self.shapes().items():
            inputs = shape[-1] if len(shape) == 2 else tensors[name.replace("bias", "weight")].shape[-1]
            tensors[name] = (torch.rand(shape, generator=generator, device="cpu") * 2 - 1) / inputs**0.5
        for step in range(self.steps):
            weight, bias = tensors[f"step{step}_weight2"], tensors[f"step{step}_bias2"]
            bias[self.size :] = KEEPS
            if shift is not None:
                bias[: self.size] = shift
                weight.zero_()
        return {name: tensor.to(like) for name, tensor in tensors.items()}

    def forward(self, z: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """``z_K``, ``(..., I)``, and ``log |det dz_K / dz|``, ``(...)``.

        Args:
            z: ``(..., I)``.
            tensors: of the flow, by name.
        """
        total = z.new_zeros(z.shape[:-1])
        for step in range(self.steps):
            *masks, moved = self.masks(step, z.device)
            kept = z if self.form == "autoregressive" else z * (1 - moved).to(z)
            for layer, mask in enumerate(masks):
                weight = tensors[f"step{step}_weight{layer}"]
                weight = weight if self.form == "coupling" else weight * mask
                kept = F.linear(kept, weight, tensors[f"step{step}_bias{layer}"])
                kept = F.leaky_relu(kept, 0.2) if layer < 2 else kept
            m, s = kept.split(self.size, dim=-1)
            z, determinant = gated_step(z, m, s, None if self.form == "autoregressive" else moved.to(z))
            total = total + determinant
        return z, total


def gated_step(z: Tensor, m: Tensor, s: Tensor, moved: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``k z + (1 - k) m`` with ``k = sigmoid(s)``, and ``sum log k``: the log-determinant where ``m`` and ``s`` of a
    coordinate depend on none of its own and later ones.

    Args:
        z: ``(..., I)``.
        m: likewise.
        s: likewise.
        moved: 1 for the coordinates that move, ``(I,)``; None for all.
    """
    gate = torch.sigmoid(s)
    moving, logs = m + gate * (z - m), F.logsigmoid(s)
    if moved is None:
        return moving, logs.sum(-1)
    return torch.where(moved > 0, moving, z), (logs * moved).sum(-1)


@functools.lru_cache(maxsize=64)
def _masks(flow: Flow, step: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size, hidden = flow.size, flow.hidden
    degrees = torch.arange(1, size + 1, device=device)
    if flow.form == "coupling":
        moved = (degrees <= size // 2) == bool(step % 2) if size > 1 else degrees > 0
        every = torch.ones(1, 1, device=device)
        return every, every, every, moved.float()
    if step % 2:
        degrees = degrees.flip(0)
    units = torch.arange(hidden, device=device)
    if hidden < size - 1:  # spread, so that the first coordinates are not the only ones that others depend on
        units = units * (size - 1) // hidden + 1
    else:
        units = units % max(size - 1, 1) + 1
    first = units.unsqueeze(1) >= degrees
    second = units.unsqueeze(1) >= units
    last = degrees.unsqueeze(1) > units
    # as truth values, since the masks of the last flows are kept
    return first, second, torch.cat([last, last]), torch.ones(size, device=device)


def log_normal(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """``log N(x; mean, diag exp(log_variance))``, summed over the last dimension."""
    squares = (x - mean).square() * (-log_variance).exp()
    return -0.5 * (_LOG_2PI + log_variance + squares).sum(-1)


_LOG_2PI = log(2 * pi)
