"""The network of one hidden layer, trained for many splits at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from recipes.uci.data import Table


def network(inputs: int, hidden: int) -> nn.Sequential:
    """Inputs, ReLU units, one output."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def trained(
    inputs: Tensor,
    targets: Tensor,
    hidden: int,
    *,
    seed: int = 0,
    steps: int = 1000,
    learning_rate: float = 0.01,
    noise: float = 1.0,
    prior_precision: float = 0.0,
    batch: int = 2000,
) -> list[nn.Sequential]:
    """One network for each of many training sets of the same size, all of them in one loop.

    Every network minimises the mean of ``(y - f(x))^2 / (2 noise)`` plus ``prior_precision / (2 N) |weights|^2``,
    which is its negative log posterior over N: Adam, cosine schedule, whole data up to `batch` rows and random rows of
    that number beyond. Initial weights are uniform within torch's own bounds of the layers, and depend on the seed and
    on the network's place.

    Args:
        inputs: (networks, samples, columns).
        targets: (networks, samples).
        hidden: units of the hidden layer.
        seed: of initial weights and batches.
        steps: of Adam.
        learning_rate: at the start.
        noise: variance of the targets given the network.
        prior_precision: of every weight and bias.
        batch: rows of a step.
    """
    count, samples, columns = inputs.shape
    generator = torch.Generator().manual_seed(seed)
    bounds = (columns**-0.5, columns**-0.5, hidden**-0.5, hidden**-0.5)
    shapes = ((count, columns, hidden), (count, 1, hidden), (count, hidden, 1), (count, 1, 1))
    weights = [
        ((2 * torch.rand(shape, generator=generator) - 1) * bound).requires_grad_()
        for shape, bound in zip(shapes, bounds, strict=True)
    ]
    first, first_bias, second, second_bias = weights
    optimiser = torch.optim.Adam(weights, learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    x, y = inputs, targets
    for _ in range(steps):
        if samples > batch:
            rows = torch.randint(samples, (batch,), generator=generator)
            x, y = inputs[:, rows], targets[:, rows]
        optimiser.zero_grad()
        outputs = torch.baddbmm(second_bias, torch.baddbmm(first_bias, x, first).relu(), second)
        loss = (outputs.squeeze(2) - y).square().mean(1).sum() / (2 * noise)
        squares = sum((weight.square().sum() for weight in weights), start=torch.zeros(()))
        (loss + prior_precision / (2 * samples) * squares).backward()
        optimiser.step()
        schedule.step()
    networks: list[nn.Sequential] = []
    with torch.no_grad():
        for index in range(count):
            model = network(columns, hidden).to(inputs.dtype)
            values = (first[index].T, first_bias[index, 0], second[index].T, second_bias[index, 0])
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
            networks.append(model.eval())
    return networks


def trained_on_each(tables: Sequence[Table], hidden: int, **options: float) -> Iterator[nn.Sequential]:
    """`trained` for many training sets of the same size, as many at once as fit into memory."""
    group = max(1, 4_000_000 // len(tables[0].targets) // hidden)
    for start in range(0, len(tables), group):
        inputs, targets = (torch.stack(part) for part in zip(*tables[start : start + group], strict=True))
        yield from trained(inputs, targets, hidden, seed=start, **options)  # type: ignore[arg-type]
