"""Posteriors of the CNN that are trained, not computed: fitted once and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import posthoc_uq as uq
from posthoc_uq.trained.contexts import Mixture
from recipes.fashion_mnist.data import Labelled

OPTIONS: dict[str, Any] = {
    "prior_mean": "random_init",
    "initial_body_log_variance": -8.0,
    "lr": 1e-3,
    "log_variance_lr": 1e-3,
}
"""Of every fit; the rest are defaults, 32 context points among them."""


CORRUPTED = [(2, "batch"), (14, "corrupted")]
PUBLISHED: dict[str, Any] = {"prior": "independent", "divergence_weight": "minibatch", "body": "certain"}
INDEPENDENT: dict[str, Any] = PUBLISHED | {"context": CORRUPTED, "lr": 1e-3, "log_variance_lr": 1e-2}
"""The published objective, with rates and context points that letters chose (recipes/function_space/objectives.py)."""

TRAINED: dict[str, dict[str, Any]] = {
    "function space, independent prior": {"method": "function_space", "divergence": None} | INDEPENDENT,
    "latent binary": {"method": "latent_binary"},
    "UTVI": {"method": "utvi"},
}
"""Options of `uq.fit` by name; all else but the number of epochs is its default."""


def shuffled(*tensors: Tensor, seed: int, batch_size: int = 128) -> DataLoader[tuple[Tensor, ...]]:
    """Batches in an order that is new in every epoch, cut out of whole tensors at once."""
    data = TensorDataset(*tensors)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    return DataLoader(data, sampler=BatchSampler(order, batch_size, drop_last=False), batch_size=None)


def context(foreign: Tensor | None, seed: int) -> Mixture:
    """Half training images, half foreign ones; monochrome ones where none are given."""
    other = "monochrome" if foreign is None else shuffled(foreign, seed=seed)
    return Mixture([(0.5, "batch"), (0.5, other)])


def function_space(
    model: nn.Module,
    train: Labelled,
    path: Path,
    *,
    seed: int,
    epochs: int,
    foreign: Tensor | None = None,
    **options: Any,
) -> uq.Posterior:
    """The posterior that is kept at `path`, or a new one that is then kept there.

    Args:
        model: where it starts.
        train: training data.
        path: ends in ``.h5``.
        seed: of order and draws.
        epochs: of variational training.
        foreign: context images (images, 1, 28, 28) in place of monochrome ones.
        options: others than `OPTIONS`, for `uq.fit`.
    """
    if path.exists():
        return uq.load(path, model)
    posterior = uq.fit(
        model,
        shuffled(*train, seed=seed),
        method="function_space",
        context=context(foreign, seed),
        epochs=epochs,
        seed=seed,
        **{**OPTIONS, **options},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    uq.save(posterior, path)
    return posterior


def posterior_of(
    name: str, model: nn.Module, train: Labelled, path: Path, *, seed: int, epochs: int
) -> uq.Posterior:
    """That of `TRAINED` which is kept at `path`, or a new one that is then kept there."""
    if not path.exists():
        loader = shuffled(*train, seed=seed)
        uq.save(uq.fit(model, loader, epochs=epochs, seed=seed, **TRAINED[name]), path)
    return uq.load(path, model)
