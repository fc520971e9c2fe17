"""The toy problem of figure 4, its network, and the log posterior that all methods approximate."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

HIDDEN = 7
NOISE = 3.0
"""Standard deviation of the observations, known to all methods."""
EDGE = 4.0
"""Inputs are uniform between -EDGE and EDGE."""


class Problem(NamedTuple):
    """Training data in the network's units, float64.

    Attributes:
        inputs: (samples, 1), divided by the standard deviation of the uniform distribution that they come from.
        targets: (samples, 1), divided by `scale`.
        scale: root mean square of the observations.
        noise: variance of the targets in the network's units.
        prior_precision: of every weight and bias, a Gaussian of mean 0.
    """

    inputs: Tensor
    targets: Tensor
    scale: float
    noise: float
    prior_precision: float


def problem(seed: int, samples: int = 100, prior_precision: float = 1.0) -> Problem:
    """`samples` points ``x ~ U(-4, 4)``, ``y ~ N(x^3, 3^2)``."""
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.rand(samples, 1, generator=generator, dtype=torch.float64) - 1) * EDGE
    y = x**3 + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    scale = float(y.square().mean().sqrt())
    return Problem(standardised(x), y / scale, scale, (NOISE / scale) ** 2, prior_precision)


def held_out(task: Problem, samples: int = 50, seed: int = 1_000_003) -> Problem:
    """New points of the same problem, in the units of `task`."""
    other = problem(seed, samples)
    return task._replace(inputs=other.inputs, targets=other.targets * (other.scale / task.scale))


def standardised(x: Tensor) -> Tensor:
    """Inputs in the network's units, (points, 1)."""
    return x.reshape(-1, 1) * math.sqrt(3) / EDGE


def network() -> nn.Sequential:
    """One input, 7 tanh units, one output."""
    return nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()


def outputs(weights: Tensor, inputs: Tensor) -> Tensor:
    """The network's outputs (..., points) for flat weights (..., 22), in the order of its parameters."""
    first, bias, second, last = weights.split([HIDDEN, HIDDEN, HIDDEN, 1], dim=-1)
    hidden = torch.tanh(inputs * first.unsqueeze(-2) + bias.unsqueeze(-2))
    return (hidden * second.unsqueeze(-2)).sum(-1) + last


def potential(weights: Tensor, task: Problem) -> Tensor:
    """Minus the log posterior of flat weights, up to a constant."""
    residuals = outputs(weights, task.inputs) - task.targets.squeeze(1)
    return residuals.square().sum() / (2 * task.noise) + task.prior_precision / 2 * weights.square().sum()


def maxima(task: Problem, starts: int, seed: int) -> list[tuple[float, Tensor]]:
    """Local maxima of the log posterior from `starts` draws of the prior, by L-BFGS; the best first.

    Returns:
        Potential and flat weights of each.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[float, Tensor]] = []
    for _ in range(starts):
        weights = torch.randn(3 * HIDDEN + 1, generator=generator, dtype=torch.float64)
        weights = (weights / task.prior_precision**0.5).requires_grad_()
        optimiser = torch.optim.LBFGS(
            [weights],
            max_iter=2000,
            tolerance_grad=1e-7,
            tolerance_change=1e-12,
            history_size=30,
            line_search_fn="strong_wolfe",
        )

        def closure(weights: Tensor = weights, optimiser: torch.optim.Optimizer = optimiser) -> Tensor:
            optimiser.zero_grad()
            loss = potential(weights, task)
            loss.backward()
            return loss

        optimiser.step(closure)
        found.append((float(potential(weights, task).detach()), weights.detach()))
    return sorted(found, key=lambda pair: pair[0])


def as_network(weights: Tensor) -> nn.Sequential:
    """The network with these flat weights."""
    model = network()
    nn.utils.vector_to_parameters(weights, model.parameters())
    return model.requires_grad_(True).eval()
