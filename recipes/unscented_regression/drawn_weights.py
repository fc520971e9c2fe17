"""Variational inference with moments of the outputs from drawn weights: section 2.1.1 of Schodt (2024), trained as the
others are.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.unscented_regression.problem import SLOPE, FreshData, network, sample

START = -10.0
"""Of the log variances, as in posthoc_uq."""
SMALLEST = 1e-10
"""Least variance of a density, as in posthoc_uq's training without noise."""


class DrawnWeights(nn.Module):
    """Independent Gaussians over the weights of the recipe's network.

    Args:
        seed: of the means' initialisation.
        draws: of the weights, for the mean and the variance of an output.
    """

    def __init__(self, seed: int, draws: int) -> None:
        super().__init__()
        self.draws = draws
        parameters = [p.detach() for p in network(seed).parameters()]  # weight and bias by turns
        self.means = nn.ParameterList(nn.Parameter(p.clone()) for p in parameters)
        self.log_variances = nn.ParameterList(nn.Parameter(torch.full_like(p, START)) for p in parameters)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sample mean and variance of the outputs of so many drawn networks, ``(samples, 1)`` each."""
        drawn = [
            mean + (0.5 * log).exp() * torch.randn(self.draws, *mean.shape)
            for mean, log in zip(self.means, self.log_variances, strict=True)
        ]
        hidden = x.expand(self.draws, *x.shape)
        for layer in range(0, len(drawn), 2):
            hidden = hidden if layer == 0 else F.leaky_relu(hidden, SLOPE)
            hidden = torch.baddbmm(drawn[layer + 1].unsqueeze(1), hidden, drawn[layer].transpose(1, 2))
        return hidden.mean(0), hidden.var(0).clamp(min=SMALLEST)

    def divergence(self) -> Tensor:
        """``KL(q || N(0, I))`` in nats."""
        pairs = zip(self.means, self.log_variances, strict=True)
        return 0.5 * torch.stack([(log.exp() + mean.square() - 1 - log).sum() for mean, log in pairs]).sum()


def density(model: DrawnWeights, data: tuple[Tensor, Tensor]) -> float:
    """Mean negative log density of held-out targets, in nats, with as many draws as in training."""
    with torch.no_grad():
        parts = [model.moments(x) for x in data[0].split(1024)]
        mean, variance = (torch.cat(part) for part in zip(*parts, strict=True))
    return -float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(data[1]).mean())


class Drawn(NamedTuple):
    """A trained model, the validation NLL of every epoch, and the seconds of the training."""

    model: DrawnWeights
    curve: list[float]
    seconds: float


def train_drawn(draws: int, seed: int, epochs: int, batches: int, size: int, validation: int) -> Drawn:
    """AdamW at the rates of `compare.method`, the divergence halved every epoch, the best epoch by held-out data."""
    torch.manual_seed(seed)
    model, data = DrawnWeights(seed, draws), FreshData(batches, size)
    held_out = sample(validation, torch.Generator().manual_seed(1_000_000))
    optimiser = torch.optim.AdamW(
        [
            {"params": list(model.means), "lr": 0.01, "weight_decay": 0.01},
            {"params": list(model.log_variances), "lr": 0.02, "weight_decay": 0.0},
        ]
    )
    curve: list[float] = []
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    begun = time.perf_counter()
    for epoch in range(epochs):
        for x, y in data:
            optimiser.zero_grad()
            mean, variance = model.moments(x)
            fit = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean()
            (2.0**-epoch / (batches * size) * model.divergence() - fit).backward()
            optimiser.step()
        score = density(model, held_out)
        if score < min(curve, default=float("inf")):
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        curve.append(score)
    seconds = time.perf_counter() - begun
    model.load_state_dict(kept)
    return Drawn(model, curve, seconds)
