"""The regression of section 4.2 of Schodt (2024): noise that depends on the input, and a small network."""

from __future__ import annotations

from collections.abc import Iterator
from math import e, pi

import torch
from drawn_activation import SLOPE, Drawn
from torch import Tensor, nn

WIDTH = 128
EDGE = 1.0
"""Inputs are uniform between -EDGE and EDGE; the paper does not say where its are."""


def deviation(x: Tensor) -> Tensor:
    """Standard deviation of the noise, ``0.1 + 0.2 sin^2(2 pi x - pi / 2)``."""
    return 0.1 + 0.2 * torch.sin(2 * pi * x - pi / 2).square()


def sample(count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``y = x + noise``, ``(count, 1)`` each."""
    x = (2 * torch.rand(count, 1, generator=generator) - 1) * EDGE
    return x, x + deviation(x) * torch.randn(count, 1, generator=generator)


def least_nll() -> float:
    """The negative log-likelihood of the truth, in nats: nothing can be better on average."""
    x = torch.linspace(-EDGE, EDGE, 100_001, dtype=torch.float64)
    return float((0.5 * (2 * pi * e * deviation(x).square()).log()).mean())


class FreshData:
    """A loader of data made on the fly: every pass gives other samples, from torch's global random numbers, which a
    training seeds anew for every epoch.

    Args:
        batches: of a pass.
        size: of a batch.
    """

    def __init__(self, batches: int, size: int) -> None:
        self.batches, self.size = batches, size

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.batches):
            yield sample(self.size)


def network(seed: int, draws: int | None = None) -> nn.Sequential:
    """Two hidden layers of 128 leaky ReLUs; with `draws`, their moments are taken from random draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)

        def activation() -> nn.Module:
            return nn.LeakyReLU(SLOPE) if draws is None else Drawn(draws)

        return nn.Sequential(
            nn.Linear(1, WIDTH),
            activation(),
            nn.Linear(WIDTH, WIDTH),
            activation(),
            nn.Linear(WIDTH, 1),
        ).eval()
