"""Fingerprint of a fit, to validate its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from posthoc_uq.core.batches import Batch, BatchReader, batches
from posthoc_uq.core.distributed import world
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.labels import own_samples_of
from posthoc_uq.curvature.sweep import batch_hash
from posthoc_uq.files import fingerprint
from posthoc_uq.methods.checkpoint import identified
from posthoc_uq.methods.task import Task
from posthoc_uq.version import __version__


def data_identity(loader: Iterable[Any], reader: BatchReader, first: Batch) -> dict[str, Any]:
    """The number of samples of a loader, where it has a length, and a hash of its first batch."""
    samples = own_samples_of(loader, reader, first)
    return {"first batch": batch_hash(first)} | ({} if samples is None else {"number of samples": samples})


def fit_identity(arguments: dict[str, Any], task: Task, chooses_epoch: bool) -> dict[str, str]:
    """All that can change the result of a fit but its training data, as texts by name.

    Args:
        arguments: of the fit, by name, as far as they change its result; but for the model and the data, whose contents
            are compared.
        task: the fit.
        chooses_epoch: whether held-out data choose the epoch of a training.
    """
    values, model, kind = dict(arguments), task.model, task.device.type
    values["held-out data"] = _held_out(task) if chooses_epoch else task.val_loader is not None
    values["library version"] = __version__
    values["layers"] = {name: list(layer.matrix_shape) for name, layer in task.layers.items()}
    values["model"] = fingerprint(dict(chain(model.named_parameters(), model.named_buffers())))
    values["autocast"] = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
    values["processes"] = world()
    return identified(values)


def _held_out(task: Task) -> Any:
    if task.val_loader is None:
        return None
    with isolated_random_state(task.settings.seed):
        first = next(iter(batches(task.val_loader, task.settings.reader)), None)
    return None if first is None else data_identity(task.val_loader, task.settings.reader, first)
