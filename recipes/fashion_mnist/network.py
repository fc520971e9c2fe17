"""The CNN of Rudner et al. (2022), appendix D.2, and its plain training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import trange

from posthoc_uq.files.atomic import checked_target, write
from recipes.common import in_random_order, train
from recipes.fashion_mnist.data import Labelled
from recipes.fashion_mnist.drawn import with_dropout


def cnn(filters: int = 32) -> nn.Sequential:
    """Two 3 x 3 convolutions, the second with twice the filters, with ReLU and max-pooling, and 128 hidden units."""
    return nn.Sequential(
        nn.Conv2d(1, filters, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(filters, 2 * filters, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * filters * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def check_kept(folder: Path, seeds: Iterable[int], filters: int = 32) -> None:
    """Read the networks that a folder has of these seeds, and see that more can be kept in it.

    Raises:
        PosthocUQError: nothing can be written there.
        ValueError: a file is no network of this kind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checked_target(folder / "network.pt")
    for path in (folder / f"cnn-seed{seed}.pt" for seed in seeds):
        if path.exists():
            try:
                cnn(filters).load_state_dict(torch.load(path, weights_only=True))
            except Exception as error:
                raise ValueError(f"'{path}' is no network of this recipe with {filters} filters.") from error


def trained(
    data: Labelled,
    seed: int,
    folder: Path,
    epochs: int,
    learning_rate: float,
    filters: int = 32,
    dropout: float = 0.0,
) -> nn.Sequential:
    """The network of a seed: from `folder`, which belongs to these settings, or trained and kept there.

    SGD with batches of 128, momentum 0.9 and a cosine schedule down to 5 % of the rate, as in appendix D.2 (whose 30
    epochs at 0.005 are 15 at 0.01 by default), without weight decay; with `dropout` as `with_dropout` puts it.
    """
    path = folder / f"cnn{f'-dropout-{dropout:g}' if dropout else ''}-seed{seed}.pt"
    torch.manual_seed(seed)
    model = cnn(filters)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    model = model.to(memory_format=torch.channels_last)  # a third faster on CPUs
    optimiser = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    fit_plainly(with_dropout(model, dropout) if dropout else model, data, optimiser, epochs, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(memory_format=torch.contiguous_format)
    _keep(model, path)
    return model.eval()


def trained_on(model: nn.Sequential, data: Labelled, path: Path, seed: int, epochs: int) -> nn.Sequential:
    """A copy after further plain training: Adam at 1e-3 with the betas that function-space inference has, from the same
    weights on; kept at `path`.
    """
    longer = copy.deepcopy(model)
    if path.exists():
        longer.load_state_dict(torch.load(path, weights_only=True))
        return longer.eval()
    optimiser = torch.optim.Adam(longer.parameters(), 1e-3, betas=(0.9, 0.99))
    fit_plainly(longer, data, optimiser, epochs, seed)
    _keep(longer, path)
    return longer.eval()


def _keep(model: nn.Module, path: Path) -> None:
    image = BytesIO()
    torch.save(model.state_dict(), image)
    write(path, image)


def fit_plainly(
    model: nn.Module, data: Labelled, optimiser: torch.optim.Optimizer, epochs: int, seed: int
) -> None:
    """Cross-entropy on batches of 128, with a cosine schedule down to 5 % of the rate."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(data.labels) / 128)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    for _ in trange(epochs, desc=f"training, seed {seed}", unit=" epochs", leave=False):
        batches = in_random_order(*data, 128, generator)
        train(model, batches, nn.functional.cross_entropy, optimiser, schedule)
