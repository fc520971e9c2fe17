"""What two fits must have in common for one to go on where the other stopped."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import chain
from typing import Any

import torch
from torch import nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.distributed import world
from posthoc_uq.inference.options import FunctionSpaceOptions
from posthoc_uq.inference.run import Run
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.randomness import sample_keys
from posthoc_uq.storage.schema import fingerprint


def batch_hash(batch: Batch) -> int:
    """Of the inputs and targets of a batch."""
    tensors = [*batch.tensors(), *([] if batch.targets is None else [batch.targets])]
    return int(sample_keys(tensors, count_samples(batch), 0).sum())


def identity(
    method: str, run: Run, model: nn.Module, training: FunctionSpaceOptions | None = None
) -> dict[str, Any]:
    """Plain values by name: method, options, seed, layers, and digests of the model's numbers."""
    settings, kind = run.settings, run.device.type
    options = asdict(run.options)
    del options["memory_budget"]
    if training is not None:
        options = {field.name: _plain(getattr(training, field.name)) for field in fields(training)}
    return {
        "method": method,
        "likelihood": settings.likelihood.attributes(),
        "fisher": settings.fisher,
        "n_samples": settings.n_samples,
        "seed": settings.seed,
        "dtype": str(settings.dtype),
        "options": options,
        "layers": {name: list(layer.matrix_shape) for name, layer in run.layers.items()},
        "model": fingerprint({name: p for name, p in chain(model.named_parameters(), model.named_buffers())}),
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off",
        "processes": world(),
    }


def _plain(value: Any) -> Any:
    """An option's value as far as it can be compared between processes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return (
        f"{type(value).__name__} {value.fingerprint}"
        if isinstance(value, Posterior)
        else type(value).__name__
    )
