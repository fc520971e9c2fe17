"""What two fits must have in common for one to go on where the other stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from itertools import chain
from typing import Any

import torch
from torch import nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.distributed import world
from posthoc_uq.inference.options import FunctionSpaceOptions
from posthoc_uq.inference.plain import plain
from posthoc_uq.inference.run import Run
from posthoc_uq.loaders import Batch, BatchReader, batches
from posthoc_uq.randomness import isolated_random_state, sample_keys
from posthoc_uq.storage.schema import fingerprint

# Arguments of a fit whose values are no part of its identity: the result is the same with others ...
_WITHOUT_EFFECT = ("progress", "checkpoint", "checkpoint_every", "memory_budget")
# ... or what they give is compared: the model's numbers, and every batch as it is read.
_BY_CONTENT = ("model", "loader", "val_loader", "batch_to_inputs", "batch_to_targets", "options")


def batch_hash(batch: Batch) -> int:
    """Of the inputs and targets of a batch."""
    tensors = [*batch.tensors(), *([] if batch.targets is None else [batch.targets])]
    return int(sample_keys(tensors, count_samples(batch), 0).sum())


def data_hash(loader: Iterable[Any], reader: BatchReader, seed: int) -> int:
    """Of all inputs and targets of a loader, in any order."""
    with isolated_random_state(seed):
        return sum(batch_hash(batch) for batch in batches(loader, reader)) % (1 << 64)


def identity(
    arguments: Mapping[str, Any], run: Run, model: nn.Module, training: FunctionSpaceOptions | None = None
) -> dict[str, Any]:
    """Plain values by name: everything that a fit was asked for, but for what cannot change its result, and digests of
    the model's numbers.

    Args:
        arguments: of the fit, all of them, by name.
        run: the fit, with the options that its method takes.
        model: the model.
        training: options of a training.
    """
    settings, kind = run.settings, run.device.type
    options = asdict(run.options)
    if training is not None:
        options |= {field.name: getattr(training, field.name) for field in fields(training)}
    asked = {name: value for name, value in arguments.items() if name not in _BY_CONTENT} | options
    found = {name: plain(value) for name, value in asked.items() if name not in _WITHOUT_EFFECT}
    validation = arguments.get("val_loader")
    if validation is not None and training is not None and training.epochs > 0:  # it chooses the epoch
        found["held-out data"] = data_hash(validation, settings.reader, settings.seed)
    else:
        found["held-out data"] = validation is not None
    return found | {
        "labels": [settings.fisher, settings.n_samples],
        "layers": {name: list(layer.matrix_shape) for name, layer in run.layers.items()},
        "model": fingerprint({name: p for name, p in chain(model.named_parameters(), model.named_buffers())}),
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off",
        "processes": world(),
    }
