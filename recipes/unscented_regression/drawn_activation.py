"""A leaky ReLU whose moments are those of random draws: how section 4 of Schodt (2024) compares the unscented transform
with Monte Carlo.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from posthoc_uq.moments.tensor import MomentTensor, Pass, rule

SLOPE = 0.01
"""Of the leaky ReLU below zero, torch's default."""


def by_draws(x: Tensor, draws: int) -> Tensor:
    """A leaky ReLU whose mean and variance, where moments are carried, are those of so many random draws."""
    if has_torch_function((x,)):
        return handle_torch_function(by_draws, (x,), x, draws)
    return F.leaky_relu(x, SLOPE)


@rule(by_draws)
def moments_by_draws(state: Pass, x: MomentTensor, draws: int) -> MomentTensor:
    """Sample mean and variance of the activation at ``draws`` Gaussian inputs."""
    mean, variance = x.moment_mean, x.moment_variance
    normal = torch.randn(draws, *mean.shape, dtype=mean.dtype, device=mean.device)
    values = F.leaky_relu(mean + variance.clamp(min=1e-20).sqrt() * normal, SLOPE)
    return MomentTensor(values.mean(0), values.var(0))


class Drawn(nn.Module):
    """`by_draws` as a module."""

    def __init__(self, draws: int) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        return by_draws(x, self.draws)
