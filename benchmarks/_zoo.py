"""Pairs of network and data on which the defaults are judged: which choose, which are reported alone; their training.

Every network is trained here, on one core, from a seed that settles its weights and the order of its data, and kept in
a folder that git ignores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _kinds import built
from _sets import Labelled, Split, split_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEEDS = (0, 1, 2)
OUTPUT = Path(__file__).resolve().parent / "output" / "defaults"


@dataclass(frozen=True)
class Pair:
    """A network kind and the data that it is trained on.

    Attributes:
        kind: of network, as `built` takes it.
        data: name of the data set.
        chooses: whether defaults were chosen by it; others are reported alone.
        steps: of training.
        rate: largest learning rate.
        train: how many training samples; None for all.
        decay: weight decay.
        batch: of training.
        options: of `uq.fit` that this network cannot do without.
    """

    kind: str
    data: str
    chooses: bool
    steps: int
    rate: float = 3e-3
    train: int | None = None
    decay: float = 0.0
    batch: int = 64
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())

    @property
    def name(self) -> str:
        """Of the pair, in tables and file names."""
        return f"{self.data}{'' if self.train is None else f' {self.train}'}, {self.kind}"

    def split(self, seed: int) -> Split:
        """Its data."""
        return split_of(self.data, seed, self.train)


LAST = {"layers": "head"}
"""An LSTM's own weights cannot be covered, so its head is named."""

CLASSIFIERS = (
    Pair("mlp relu", "digits", True, 1000),
    Pair("mlp gelu layer 64 64", "digits", True, 1000),
    Pair("mlp relu 32 32", "wine", True, 400),
    Pair("mlp gelu layer 32 32", "wine", True, 400),
    Pair("mlp relu 32 32", "cancer", True, 600),
    Pair("mlp gelu layer 32 32", "cancer", True, 600, decay=0.1),
    Pair("mlp relu 32 32", "iris", True, 600),
    Pair("mlp gelu layer 32", "iris", True, 400, decay=0.1),
    Pair("lenet", "digits 28", True, 500),
    Pair("strided", "digits 28", True, 500),
    Pair("cnn", "fashion", True, 150, train=100),
    Pair("cnn", "fashion", True, 300, train=300),
    Pair("cnn", "fashion", True, 500, train=1000),
    Pair("cnn", "fashion", True, 800, train=3000),
    Pair("cnn", "fashion", True, 1000, train=10_000),
    Pair("mlp relu 128 128", "fashion", True, 600, train=1000),
    Pair("resnet", "fashion", True, 500, train=3000),
    Pair("vit", "fashion", True, 600, rate=1e-3, train=3000),
    Pair("mlp tanh 64 64", "digits", False, 1000),
    Pair("mlp relu 64 64", "penguins", False, 400),
    Pair("mlp gelu layer 32 32", "penguins", False, 400),
    Pair("mlp relu 128 64", "cells", False, 800),
    Pair("mlp tanh 64", "cells", False, 800),
    Pair("mlp gelu layer 64 64", "jobs", False, 1200),
    Pair("mlp relu 64 64", "jobs", False, 1200),
    Pair("mlp relu 64 64", "churn", False, 1200),
    Pair("mlp tanh 64 64", "churn", False, 800, decay=0.1),
    Pair("mlp relu 64", "attrition", False, 300),
    Pair("mlp gelu layer 32 32", "credit", False, 600),
    Pair("mlp tanh 32 32", "two classes", False, 800),
    Pair("mlp relu 32 32", "moons", False, 800),
    Pair("mlp gelu layer 64 64", "mixture", False, 600),
    Pair("lenet", "fashion", False, 700, train=3000),
    Pair("recipe cnn", "fashion", False, 400, train=1000),
    Pair("recipe cnn", "fashion", False, 700, train=10_000),
    Pair("strided", "fashion", False, 400, train=300),
    Pair("mlp tanh batch 128 64", "digits 28", False, 600),
    Pair("resnet", "digits 28", False, 300),
    Pair("vit", "digits 28", False, 600, rate=1e-3),
    Pair("lstm 8", "digits", False, 800, options=LAST),
    Pair("lstm 28", "digits 28", False, 700, options=LAST),
    Pair("encoder", "reviews", False, 300, rate=1e-3),
    Pair("bert", "reviews", False, 300, rate=1e-3),
)
"""Chosen by: scikit-learn's four tables with ReLU and with GELU and LayerNorm, LeNet and the network of strides on
digits, the CNN, a perceptron, the ResNet and the ViT on FashionMNIST. Reported alone: every table of modeldata and the
generated ones, tanh, the LSTM, both text encoders, the recipe's CNN, and the other combinations."""

REGRESSORS = (
    Pair("mlp relu 32 32", "diabetes", True, 200),
    Pair("mlp relu 64 64", "concrete", True, 1000),
    Pair("mlp gelu layer 32 32", "boston", True, 400),
    Pair("mlp tanh 32", "diabetes", False, 200),
    Pair("mlp gelu layer 64 64", "concrete", False, 800),
    Pair("mlp relu 64", "ames", False, 300),
    Pair("mlp tanh 64 64", "cars", False, 600),
)
"""Networks of values, with the same division."""


class Shelf:
    """Where trained networks are kept."""

    folder = OUTPUT / "networks"


def trained(pair: Pair, seed: int) -> nn.Module:
    """The network of a pair and a seed: from the shelf, or trained and put there.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    split = pair.split(seed)
    inputs = math.prod(split.train.inputs.shape[1:])
    path = Shelf.folder / f"{pair.name.replace(' ', '-').replace(',', '')}-seed{seed}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = built(pair.kind, inputs, split.classes)
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
            return model.eval()
        train(model, split.train, pair)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def train(model: nn.Module, data: Labelled, pair: Pair) -> None:
    """AdamW with a cosine schedule; cross-entropy, or squared error for values. Leaves the network in eval mode."""
    loss = nn.functional.mse_loss if data.targets.is_floating_point() else nn.functional.cross_entropy
    optimiser = torch.optim.AdamW(model.parameters(), pair.rate, weight_decay=pair.decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, pair.steps, pair.rate / 50)
    model.train()
    order = torch.empty(0, dtype=torch.long)
    for _ in range(pair.steps):
        if len(order) < min(pair.batch, len(data.targets)):
            order = torch.randperm(len(data.targets))
        batch, order = order[: pair.batch], order[pair.batch :]
        optimiser.zero_grad()
        loss(model(data.inputs[batch]), data.targets[batch]).backward()
        optimiser.step()
        schedule.step()
    model.zero_grad()
    model.eval()


def loader(data: Labelled, batch: int = 256) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches in order."""
    return DataLoader(TensorDataset(data.inputs, data.targets), batch_size=batch)


def pairs_named(names: Sequence[str] | None, among: Sequence[Pair]) -> list[Pair]:
    """Those pairs whose name has one of these texts in it; all without texts."""
    return [pair for pair in among if names is None or any(name in pair.name for name in names)]
