"""What two fits must have in common for one to go on where the other stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from posthoc_uq.curvature.content import WORD, batch_hash
from posthoc_uq.distributed import world
from posthoc_uq.inference.plain import code_digest, plain
from posthoc_uq.inference.task import Task
from posthoc_uq.loaders import BatchReader, batches
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.storage.schema import fingerprint
from posthoc_uq.version import __version__

# Arguments of a fit whose values are no part of its identity: the result is the same with others ...
_WITHOUT_EFFECT = ("progress", "checkpoint")
# ... or what they give is compared: the model's numbers, and every batch as it is read.
_BY_CONTENT = ("model", "loader", "val_loader", "batch_to_inputs", "batch_to_targets", "options")
# ... or the request says more of them.
_SAID = ("method", "likelihood", "prior_precision", "head", "seed")


def data_hash(loader: Iterable[Any], reader: BatchReader, seed: int) -> int:
    """Of all inputs and targets of a loader, in any order."""
    with isolated_random_state(seed):
        return sum(batch_hash(batch) for batch in batches(loader, reader)) % WORD


def fit_identity(
    arguments: Mapping[str, Any], request: Mapping[str, Any], task: Task, chooses_epoch: bool
) -> dict[str, Any]:
    """Plain values by name: everything that a fit was asked for, but for what cannot change its result, and digests of
    the model's numbers.

    Args:
        arguments: of the fit, all of them, by name.
        request: what its method, prior and head say of themselves.
        task: the fit.
        chooses_epoch: whether held-out data choose the epoch of a training.
    """
    settings, kind, model = task.settings, task.device.type, task.model
    asked = {name: value for name, value in arguments.items() if name not in (*_BY_CONTENT, *_SAID)}
    found = {name: plain(value) for name, value in asked.items() if name not in _WITHOUT_EFFECT} | dict(
        request
    )
    found["held-out data"] = (
        data_hash(task.val_loader, settings.reader, settings.seed)
        if chooses_epoch and task.val_loader is not None
        else task.val_loader is not None
    )
    return found | {
        "library version": __version__,
        "layers": {name: list(layer.matrix_shape) for name, layer in task.layers.items()},
        "model": fingerprint({name: p for name, p in chain(model.named_parameters(), model.named_buffers())}),
        "architecture": _architecture(model),
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off",
        "processes": world(),
    }


def _architecture(model: nn.Module) -> str:
    """A digest of what a model does with its numbers, as far as that is the same in every process: the classes of its
    modules, the settings of those of torch, and the code of the others' forward passes.
    """
    found: list[Any] = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("torch.nn.modules."):
            held = vars(module).items()
            own: Any = {key: plain(value) for key, value in held if key[0] != "_" and _is_setting(key, value)}
        else:
            code = getattr(kind.forward, "__code__", None)
            own = None if code is None else code_digest(code)
        found.append([name, kind.__qualname__, own])
    return sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _is_setting(name: str, value: Any) -> bool:
    numbers = (bool, int, float, str, type(None))
    many = isinstance(value, tuple) and all(isinstance(v, numbers) for v in cast("tuple[Any, ...]", value))
    return name != "training" and (many or isinstance(value, numbers))
