"""What the recipes of active learning share: data, trainings, and pictures of what was chosen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.common import NOTE, Batch, save_figure

NOISE, DECAY = 1e-3, 0.01
"""Variance of the standardised values, and precision of the weights, that a regression is trained with."""


def spirals(samples: int, seed: int) -> Batch:
    """Points of three arms, with the arm as label; most of them lie near the centre, where arms are close."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.arange(samples) % 3
    turn = torch.rand(samples, generator=generator)
    angle = 4.5 * turn + 2 * torch.pi / 3 * arm + 0.15 * torch.randn(samples, generator=generator)
    radius = 0.3 + 2 * turn
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm


def trained_classifier(inputs: Tensor, labels: Tensor, seed: int = 0, steps: int = 300) -> nn.Sequential:
    """A network of two layers of 32 units."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    optimiser.zero_grad()
    return model.eval()


def forrester(x: Tensor) -> Tensor:
    """Forrester, Sobester, Keane (2008): two valleys, the deeper one narrow."""
    return (6 * x - 2) ** 2 * torch.sin(12 * x - 4)


def trained_regressor(x: Tensor, y: Tensor, seed: int = 0) -> nn.Sequential:
    """A network at the maximum of its posterior, of 50 units."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=150, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        squares = torch.stack([weight.square().sum() for weight in model.parameters()]).sum()
        value = (model(x) - y).square().sum() / (2 * NOISE) + DECAY / 2 * squares
        value.backward()
        return value

    optimiser.step(loss)
    optimiser.zero_grad()
    return model


def batch_picture(pool: Tensor, labels: Tensor, known: Sequence[int], batch: Sequence[int]) -> Figure:
    """The pool, what is labelled, and the batch that was chosen last."""
    figure = Figure(figsize=(4.5, 4), layout="constrained")
    panel = figure.subplots()
    panel.scatter(*pool.T, color="#BBBBBB", s=8)
    panel.scatter(*pool[known].T, c=labels[known], s=30, cmap="Set1", edgecolor="black")
    panel.scatter(*pool[batch].T, s=90, facecolor="none", edgecolor="#0072B2", linewidth=2)
    panel.set(title=f"{len(known)} labels, and the last batch", xticks=[], yticks=[])
    return figure


def search_picture(
    x: Tensor, y: Tensor, known: Sequence[int], prediction: uq.RegressionPrediction, gain: Tensor
) -> Figure:
    """The function, the network with two deviations in its standardised values, and the expected improvement."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": [3, 1]})
    values, mean = (y - y[known].mean()) / y[known].std(), prediction.mean[:, 0]
    deviation = prediction.epistemic_variance[:, 0].sqrt()
    above.fill_between(x[:, 0], mean - 2 * deviation, mean + 2 * deviation, color="#0072B2", alpha=0.2)
    above.plot(x, mean, color="#0072B2", label="network, 2 sd")
    above.plot(x, values, color="#595959", linestyle="--", label="function")
    above.scatter(x[known], values[known], color="black", s=14, label="evaluated")
    above.legend(fontsize=7, frameon=False)
    below.plot(x, gain, color="#D55E00")
    below.set(xlabel="x", yticks=[], ylabel="improvement")
    return figure


def save_picture(figure: Figure, options: argparse.Namespace) -> None:
    """Into the output folder, and say where, and whether the run was a smoke run."""
    save_figure(figure, options.output / "chosen.png", options.smoke)
    print(f"Written: {options.output / 'chosen.png'}. {NOTE if options.smoke else ''}")
