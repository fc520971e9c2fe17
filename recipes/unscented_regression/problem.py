"""The regression of section 4.2 of Schodt (2024): noise that depends on the input, and a small network.

Its activations can take their moments from random draws, as the paper compares the unscented transform with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import e, pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from posthoc_uq.moments.tensor import MomentTensor, Pass, rule

WIDTH = 128
SLOPE = 0.01
"""Of the leaky ReLU below zero, torch's default."""
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


def by_draws(x: Tensor, draws: int, gradients: bool) -> Tensor:
    """A leaky ReLU whose mean and variance, where moments are carried, are those of so many random draws."""
    if has_torch_function((x,)):
        return handle_torch_function(by_draws, (x,), x, draws, gradients)
    return F.leaky_relu(x, SLOPE)


@rule(by_draws)
def moments_by_draws(state: Pass, x: MomentTensor, draws: int, gradients: bool) -> MomentTensor:
    """Sample mean and variance of the activation at ``draws`` Gaussian inputs."""
    mean, variance = x.moment_mean, x.moment_variance
    if not gradients:
        mean, variance = mean.detach(), variance.detach()
    normal = torch.randn(draws, *mean.shape, dtype=mean.dtype, device=mean.device)
    values = F.leaky_relu(mean + variance.clamp(min=1e-20).sqrt() * normal, SLOPE)
    return MomentTensor(values.mean(0), values.var(0))


class Drawn(nn.Module):
    """`by_draws` as a module.

    Args:
        draws: of every activation's input.
        gradients: whether they carry gradients to the mean and the variance that they are drawn with. The layers before
            learn nothing of the data where they do not.
    """

    def __init__(self, draws: int, gradients: bool = True) -> None:
        super().__init__()
        self.draws, self.gradients = draws, gradients

    def forward(self, x: Tensor) -> Tensor:
        return by_draws(x, self.draws, self.gradients)


def network(seed: int, draws: int | None = None, gradients: bool = True) -> nn.Sequential:
    """Two hidden layers of 128 leaky ReLUs; with `draws`, their moments are taken from random draws, see `Drawn`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)

        def activation() -> nn.Module:
            return nn.LeakyReLU(SLOPE) if draws is None else Drawn(draws, gradients)

        return nn.Sequential(
            nn.Linear(1, WIDTH),
            activation(),
            nn.Linear(WIDTH, WIDTH),
            activation(),
            nn.Linear(WIDTH, 1),
        ).eval()
