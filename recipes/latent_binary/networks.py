"""The networks of the paper's tables, their plain training, and what a user would do instead: pruning by magnitude."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from recipes import common
from recipes.fashion_mnist.data import Labelled

BATCH = 100


def dense() -> nn.Module:
    """784-400-600-10 with ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 600), nn.ReLU(), nn.Linear(600, 10)
    )


def lenet() -> nn.Module:
    """LeNet-5 with 32 and 48 filters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 48, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1200, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


NETWORKS = {"dense": dense, "lenet": lenet}


class Batches:
    """Batches of images and labels in memory, in another order every time: of torch's own generator, or of a seed."""

    def __init__(self, part: Labelled, seed: int | None = None, size: int = BATCH) -> None:
        self.part, self.size = part, size
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.part.labels) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return common.in_random_order(*self.part, self.size, self._generator)


def new(name: str, seed: int) -> nn.Module:
    """A network with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return NETWORKS[name]()


def train(
    model: nn.Module, part: Labelled, epochs: int, rate: float, seed: int, batch_size: int = BATCH
) -> None:
    """Plain training in place: Adam, with a cosine schedule."""
    optimiser = torch.optim.Adam(model.parameters(), rate)
    loader = Batches(part, size=batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, epochs * len(loader)))
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(epochs):
            common.train(model, loader, nn.functional.cross_entropy, optimiser, schedule)
    model.eval()


def pruned(
    model: nn.Module, density: float, part: Labelled, epochs: int, rate: float, seed: int
) -> nn.Module:
    """The share of all weights that is largest, trained on; biases stay, as they do in latent binary networks."""
    twin = copy.deepcopy(model)
    weights = [(m, "weight") for m in twin.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    prune.global_unstructured(weights, pruning_method=prune.L1Unstructured, amount=1 - density)
    train(twin, part, epochs, rate, seed)
    for module, name in weights:
        prune.remove(module, name)
    return twin
