"""A few hundred of the training inputs, kept on the way through the data for what is settled after the sweeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.distributed import gather
from posthoc_uq.layers import Layer
from posthoc_uq.loaders import Bar, Batch, BatchReader, batches
from posthoc_uq.randomness import sample_keys

KEPT = 256  # inputs, where the memory budget allows that many
_LARGE = (
    2_000_000  # weights with a posterior from which on a quarter of that is kept: each is predicted ten times
)
_AT_ONCE = 64  # inputs of one batch that they are handed out in


def wanted_for(layers: Iterable[Layer]) -> int:
    """How many inputs to keep for a posterior over these layers."""
    return KEPT if sum(layer.parameters for layer in layers) <= _LARGE else KEPT // 4


class KeptInputs:
    """The inputs with the smallest hashes: the same ones for every batch size, order, device and number of processes.

    An input that occurs several times is kept once. An `Observer` of a sweep.

    Args:
        memory_budget: bytes that they may take; fewer are kept where they are large.
        wanted: how many to keep at most.
    """

    def __init__(self, memory_budget: int, wanted: int = KEPT) -> None:
        self._budget, self._wanted = memory_budget, wanted
        self._samples: dict[int, Batch] = {}

    def see(self, batch: Batch, keys: Tensor, recording: Recording | None = None) -> None:
        """Look at a batch; see `Observer`."""
        samples, before = keys.shape[0], len(self._samples)
        bound = max(self._samples) if len(self._samples) >= self._wanted else None
        for index, key in enumerate(keys.tolist()):
            if key not in self._samples and (bound is None or key < bound):
                self._samples[key] = _one(batch, index, samples)
        if len(self._samples) > before:
            self._drop()

    def read(self, loader: Iterable[Any], reader: BatchReader, seed: int, progress: bool) -> None:
        """Look at every batch of a loader, without running a model."""
        with Bar(loader, "reading inputs", progress) as bar:
            for batch in batches(loader, reader):
                samples = count_samples(batch)
                self.see(batch, sample_keys(batch.tensors(), samples, seed))
                bar.advance(samples)

    def _drop(self) -> None:
        """Let go of all but the smallest hashes."""
        largest = max(_bytes(sample) for sample in self._samples.values())
        self._wanted = max(1, min(self._wanted, self._budget // max(1, largest)))
        kept = sorted(self._samples)[: self._wanted]
        self._samples = {key: self._samples[key] for key in kept}

    def batches(self, device: torch.device) -> list[Batch]:
        """The inputs of all processes in the order of their hashes, on `device`, as batches of inputs that are alike in
        shape.
        """
        wanted = min(gather(self._wanted))
        chosen = set(sorted({key for keys in gather(sorted(self._samples)) for key in keys})[:wanted])
        parts = gather({key: sample for key, sample in self._samples.items() if key in chosen})
        found = {key: sample for part in parts for key, sample in part.items()}
        groups: dict[Any, list[Batch]] = {}
        for key in sorted(found):
            groups.setdefault(_form(found[key]), []).append(found[key])
        return [
            _joined(group[start : start + _AT_ONCE], device)
            for group in groups.values()
            for start in range(0, len(group), _AT_ONCE)
        ]


def _leaves(batch: Batch) -> tuple[list[Any], Any]:
    return tree_flatten((batch.args, batch.kwargs))


def _one(batch: Batch, index: int, samples: int) -> Batch:
    """One sample, on the CPU, in memory of its own."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        counted = value.ndim > 0 and value.shape[0] == samples
        return (value[index : index + 1] if counted else value).detach().to("cpu", copy=True)

    leaves, form = _leaves(batch)
    args, kwargs = tree_unflatten([cut(value) for value in leaves], form)
    return Batch(args, None, kwargs)


def _bytes(batch: Batch) -> int:
    return sum(v.numel() * v.element_size() for v in _leaves(batch)[0] if isinstance(v, Tensor))


def _form(batch: Batch) -> Any:
    """Equal for samples that can stand in one batch."""
    leaves, form = _leaves(batch)
    return str(form), tuple(
        (tuple(v.shape), v.dtype) if isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == 1 else repr(v)
        for v in leaves
    )


def _joined(samples: list[Batch], device: torch.device) -> Batch:
    rows = [_leaves(sample) for sample in samples]
    leaves: list[Any] = []
    for values in zip(*(row[0] for row in rows), strict=True):
        first = values[0]
        if isinstance(first, Tensor):
            counted = first.ndim > 0 and first.shape[0] == 1
            first = (torch.cat(list(values)) if counted else first).to(device)
        leaves.append(first)
    args, kwargs = tree_unflatten(leaves, rows[0][1])
    return Batch(args, None, kwargs)
