"""References whose networks are drawn: masks of dropout, and weights along the path of SGD (SWAG)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from posthoc_uq.files.atomic import write
from recipes.common import in_random_order, train
from recipes.fashion_mnist.data import Labelled

DEVIATIONS = 20
"""How many of the last ones are kept, as in Maddox et al. (2019)."""


def with_dropout(model: nn.Sequential, rate: float) -> nn.Sequential:
    """The same layers, with dropout before each that has weights, but the first."""
    layers: list[nn.Module] = []
    for layer in model:
        if layers and any(True for _ in layer.parameters()):
            layers.append(nn.Dropout(rate))
        layers.append(layer)
    return nn.Sequential(*layers)


class SWAG(NamedTuple):
    """A Gaussian of all weights, ``N(mean, (diag(variance) + D^T D / (K - 1)) / 2)`` (Maddox et al., 2019).

    Attributes:
        mean: (weights,), of the weights that were collected.
        variance: (weights,), their second moment less the mean's square.
        deviations: ``D`` (K, weights), of the last K from the mean as it was then.
    """

    mean: Tensor
    variance: Tensor
    deviations: Tensor

    def draws(self, count: int, seed: int) -> Iterator[Tensor]:
        """So many weights, (weights,) each; the same ones for a seed."""
        generator = torch.Generator().manual_seed(seed)
        kept = len(self.deviations)
        for _ in range(count):
            one, other = (torch.randn(size, generator=generator) for size in (len(self.mean), kept))
            spread = self.variance.sqrt() * one + other @ self.deviations / max(kept - 1, 1) ** 0.5
            yield self.mean + spread / 2**0.5


def collected(
    model: nn.Module, data: Labelled, seed: int, epochs: int, rate: float, times: int = 7, batch: int = 128
) -> SWAG:
    """SGD goes on from a trained network with momentum 0.9 at a constant rate, and leaves its weights on the way.

    Args:
        model: where it begins; stays as it is.
        data: training data.
        seed: of the order.
        epochs: how many more.
        rate: of SGD.
        times: an epoch, that weights are collected.
        batch: samples of a step.
    """
    moving = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(moving.parameters(), rate, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    steps = -(-len(data.labels) // batch)
    first = parameters_to_vector(moving.parameters()).detach().double()
    count, mean, square = 0, torch.zeros_like(first), torch.zeros_like(first)
    deviations: deque[Tensor] = deque(maxlen=DEVIATIONS)
    for _ in range(epochs):
        batches = in_random_order(*data, batch, generator)
        while part := list(islice(batches, -(-steps // times))):
            train(moving, part, nn.functional.cross_entropy, optimiser)
            weights = parameters_to_vector(moving.parameters()).detach().double()
            count += 1
            mean = mean + (weights - mean) / count
            square = square + (weights.square() - square) / count
            deviations.append(weights - mean)
    variance = (square - mean.square()).clamp(min=0)
    return SWAG(mean.float(), variance.float(), torch.stack(list(deviations)).float())


def swag(model: nn.Module, data: Labelled, path: Path, seed: int, epochs: int, rate: float) -> SWAG:
    """What is kept at `path`, or is collected and then kept there."""
    if not path.exists():
        image = BytesIO()
        torch.save(collected(model, data, seed, epochs, rate)._asdict(), image)
        write(path, image)
    return SWAG(**torch.load(path, weights_only=True))
