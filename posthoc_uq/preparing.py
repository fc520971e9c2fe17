"""The dry run: from a model and a loader to a task whose layers are known."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.curvature.dryrun import prepare
from posthoc_uq.curvature.selection import Selection
from posthoc_uq.curvature.sweep import SweepSettings
from posthoc_uq.distributed import together
from posthoc_uq.inference.task import Task
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Batch, BatchReader, no_sample
from posthoc_uq.memory import default_budget
from posthoc_uq.methods import Method
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate


def prepared_task(
    model: nn.Module,
    loader: Iterable[Any],
    layers: Selection | None,
    *,
    method: Method,
    likelihood: Likelihood,
    reader: BatchReader,
    seed: int,
    dtype: torch.dtype,
    progress: bool,
) -> Task:
    """The task of a method, after a dry run on the first batch.

    Args:
        model: the user's model.
        loader: the data of this process.
        layers: which layers are asked for; None for those that the method is for.
        method: whose work it will be.
        likelihood: of the targets.
        reader: of the batches.
        seed: of all random numbers.
        dtype: of the statistics.
        progress: whether sweeps show a bar.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        PosthocUQError: there is no sample, or the model cannot be run on the first ones.
    """
    device = reader.device
    budget = default_budget(device) if method.memory_budget is None else method.memory_budget

    def dry_run() -> Task:
        with isolated_random_state(seed):
            first, all_batches = _first_batch(loader, reader)
            batch = first.copied()  # which is run several times
            with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
                prepared = prepare(
                    model,
                    batch,
                    method.selection(layers),
                    unsupported=method.unsupported,
                    autocast=torch.is_autocast_enabled(device.type),
                    prove=method.proves_gradients,
                )
            settings = SweepSettings(reader, likelihood, seed=seed, dtype=dtype, progress=progress)
            return Task(model, prepared, all_batches, batch, settings, device, budget)

    return together(dry_run, "the dry run")


def _first_batch(loader: Iterable[Any], reader: BatchReader) -> tuple[Batch, Iterable[Any]]:
    """The first batch with samples, and a loader that still yields all batches."""
    iterator = iter(loader)
    for first in iterator:
        batch = reader.read(first)
        if not batch.empty:
            return batch, (cast(Iterable[Any], chain([first], iterator)) if iterator is loader else loader)
    raise no_sample()
