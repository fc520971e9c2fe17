"""The dry run: from a model and a loader to a task whose layers are known."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from posthoc_uq import interrupts
from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.attempts import check_refused
from posthoc_uq.curvature.dryrun import PROBE_SAMPLES, count_samples, prepare
from posthoc_uq.curvature.features import find_features
from posthoc_uq.curvature.selection import Selection
from posthoc_uq.curvature.sweep import SweepSettings
from posthoc_uq.distributed import together
from posthoc_uq.inference.task import Task
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Batch, BatchReader, items_of, no_sample
from posthoc_uq.memory import default_budget
from posthoc_uq.methods import Method
from posthoc_uq.outputs import Choice, Output, chosen_in, guessed_choice, with_choice
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
    output: Output | None = None,
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
        output: which part of what the model returns its outputs are; None to find it, or for that of a view.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        PosthocUQError: there is no sample, or the model cannot be run on the first ones.
    """
    device = reader.device
    autocast = torch.is_autocast_enabled(device.type)
    budget = default_budget(device) if method.memory_budget is None else method.memory_budget

    def dry_run() -> Task:
        with isolated_random_state(seed):
            first, all_batches = _first_batch(loader, reader)
            batch = first.copied()  # which is run several times
            with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
                view = with_choice(model, _choice(model, batch, output))
                prepared = prepare(
                    view,
                    batch,
                    method.selection(layers),
                    unsupported=method.unsupported,
                    autocast=autocast,
                    prove=method.proves_gradients,
                )
                features = find_features(prepared.model, batch, autocast, likelihood)
            pointwise = None if features is None or not features.pointwise else features.layer.name
            settings = SweepSettings(
                reader, likelihood, seed=seed, dtype=dtype, progress=progress, by_position=pointwise
            )
            return Task(prepared.model, prepared, all_batches, batch, settings, device, budget, features)

    return together(dry_run, "the dry run")


def _choice(model: nn.Module, batch: Batch, output: Output | None) -> Choice | None:
    """Which part of what the model returns its outputs are, by a run on the first samples where nobody says so.

    Raises:
        PosthocUQError: no part can be the outputs, or several can.
    """
    if chosen_in(model) is not None:
        return chosen_in(model)
    if output is not None:
        return Choice(output)
    samples = count_samples(batch)
    few = min(samples, PROBE_SAMPLES)

    def run(part: Batch) -> Any:
        with torch.no_grad():
            return part.copied().call_any(replicate(model))

    first = batch.narrow(0, few, samples)
    try:
        returned = run(first)
    except Exception as error:  # a model that takes whole batches only, or none: then that says more
        check_refused(error, lambda: run(first), lambda: run(batch))
        few, returned = samples, run(batch)
    return guessed_choice(returned, few)


def _first_batch(loader: Iterable[Any], reader: BatchReader) -> tuple[Batch, Iterable[Any]]:
    """The first batch with samples, and a loader that still yields all batches."""
    iterator = interrupts.at_once(iter, loader)
    for first in items_of(iterator):
        batch = reader.read(first)
        if not batch.empty:
            return batch, (chain([first], iterator) if iterator is loader else loader)
    raise no_sample()
