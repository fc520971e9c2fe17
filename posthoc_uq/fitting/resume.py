"""What two fits must have in common for one to go on where the other stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from posthoc_uq.core.batches import BatchReader, batches
from posthoc_uq.core.distributed import world
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.sweep import WORD, batch_hash
from posthoc_uq.files import fingerprint
from posthoc_uq.methods.resume import as_plain, code_digest
from posthoc_uq.methods.task import Task
from posthoc_uq.version import __version__

# Arguments of a fit whose values are no part of its identity: those that do not change the result,
_WITHOUT_EFFECT = ("progress", "checkpoint")
# those whose contents are compared instead (the model's numbers, every batch that is read),
_BY_CONTENT = (
    *("model", "loader", "val_loader", "options"),
    *("batch_to_inputs", "batch_to_targets", "batch_to_weights"),
)
# and those that the request describes more fully.
_IN_REQUEST = ("method", "likelihood", "prior_precision", "head", "seed")


def data_hash(loader: Iterable[Any], reader: BatchReader, seed: int) -> int:
    """A hash of all inputs and targets of a loader, whatever their order."""
    with isolated_random_state(seed):
        return sum(batch_hash(batch) for batch in batches(loader, reader)) % WORD


def fit_identity(
    arguments: Mapping[str, Any], request: Mapping[str, Any], task: Task, chooses_epoch: bool
) -> dict[str, Any]:
    """Plain values by name: every argument of a fit that can change its result, and digests of the model's numbers.

    Args:
        arguments: all arguments of the fit, by name.
        request: how its method, prior and head describe themselves.
        task: the fit.
        chooses_epoch: whether held-out data choose the epoch of a training.
    """
    settings, kind, model = task.settings, task.device.type, task.model
    compared = {name: value for name, value in arguments.items() if name not in (*_BY_CONTENT, *_IN_REQUEST)}
    identity = {
        name: as_plain(value) for name, value in compared.items() if name not in _WITHOUT_EFFECT
    } | dict(request)
    identity["held-out data"] = (
        data_hash(task.val_loader, replace(settings.reader, batch_to_weights=None), settings.seed)
        if chooses_epoch and task.val_loader is not None
        else task.val_loader is not None
    )
    return identity | {
        "library version": __version__,
        "layers": {name: list(layer.matrix_shape) for name, layer in task.layers.items()},
        "model": fingerprint({name: p for name, p in chain(model.named_parameters(), model.named_buffers())}),
        "architecture": _architecture(model),
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off",
        "processes": world(),
    }


def _architecture(model: nn.Module) -> str:
    """A digest of what a model does with its numbers: the classes of its modules, the settings of torch's own modules,
    and the code of the forward passes of all others.
    """
    modules: list[Any] = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("torch.nn.modules."):
            attributes = vars(module).items()
            behaviour: Any = {
                key: as_plain(value) for key, value in attributes if key[0] != "_" and _is_setting(key, value)
            }
        else:
            code = getattr(kind.forward, "__code__", None)
            behaviour = None if code is None else code_digest(code)
        modules.append([name, kind.__qualname__, behaviour])
    return sha256(json.dumps(modules, sort_keys=True).encode()).hexdigest()


def _is_setting(name: str, value: Any) -> bool:
    numbers = (bool, int, float, str, type(None))
    many = isinstance(value, tuple) and all(isinstance(v, numbers) for v in cast("tuple[Any, ...]", value))
    return name != "training" and (many or isinstance(value, numbers))
