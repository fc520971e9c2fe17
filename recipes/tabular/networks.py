"""Small networks for tables, trained with the likelihood that the posterior then takes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tables import Rows
from torch import Tensor, nn

HIDDEN = 64


def network(columns: int, outputs: int, seed: int) -> nn.Sequential:
    """Two hidden layers of 64 units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(columns, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, outputs),
        )


Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean negative log-likelihood of targets (rows, outputs) given outputs."""


def poisson_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of counts by the logarithms of rates."""
    return F.poisson_nll_loss(outputs, targets, log_input=True, full=False)


class NegativeBinomialLoss(nn.Module):
    """Of counts by the logarithms of means, with a dispersion that is trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.log_dispersion = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        law = torch.distributions.NegativeBinomial(
            (-self.log_dispersion).exp(), logits=outputs + self.log_dispersion, validate_args=False
        )
        return -law.log_prob(targets).mean()


def own_noise_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of values by their means and the logarithms of their noise variances."""
    mean, log_variance = outputs.chunk(2, dim=1)
    return 0.5 * (log_variance + (targets - mean).square() * (-log_variance).exp()).mean()


def trained(
    model: nn.Sequential, loss: Loss, train: Rows, held_out: Rows, epochs: int, seed: int, batch: int = 128
) -> nn.Sequential:
    """Train by AdamW; the weights of the epoch with the best loss on the held-out rows stay, and of a loss with
    parameters those, too.
    """
    extra = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    optimiser = torch.optim.AdamW(
        [{"params": list(model.parameters()), "weight_decay": 1e-2}, {"params": extra, "weight_decay": 0.0}],
        lr=2e-3,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    generator = torch.Generator().manual_seed(seed)
    parts: list[nn.Module] = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    best, kept = float("inf"), [copy.deepcopy(part.state_dict()) for part in parts]
    for _ in range(epochs):
        for rows in torch.randperm(len(train.inputs), generator=generator).split(batch):
            optimiser.zero_grad()
            loss(model(train.inputs[rows]), shaped(train.targets[rows])).backward()
            optimiser.step()
        schedule.step()
        with torch.no_grad():
            value = float(loss(model(held_out.inputs), shaped(held_out.targets)))
        if value < best:
            best, kept = value, [copy.deepcopy(part.state_dict()) for part in parts]
    for part, state in zip(parts, kept, strict=True):
        part.load_state_dict(state)
    return model.eval()


def shaped(targets: Tensor) -> Tensor:
    """Targets as (rows, outputs)."""
    return targets.reshape(len(targets), -1)
