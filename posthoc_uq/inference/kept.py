"""A few hundred of the training inputs, kept on the way through the data for what is settled after the sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.devices import Checks, on_host
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


@dataclass(frozen=True)
class _Sample:
    """One input, on the CPU, in memory of its own.

    Attributes:
        leaves: the tensors and other values of the model's arguments; a tensor with samples has one of them.
        form: how the arguments are made of them.
        counted: which leaves are tensors with samples.
        bytes: that it takes.
    """

    leaves: list[Any]
    form: Any
    counted: tuple[bool, ...]
    bytes: int

    def kind(self) -> Any:
        """Equal for samples that can stand in one batch."""
        return str(self.form), tuple(
            (tuple(leaf.shape), leaf.dtype) if counted else _print_of(leaf)
            for leaf, counted in zip(self.leaves, self.counted, strict=True)
        )


class KeptInputs:
    """The inputs with the smallest hashes: the same ones for every batch size, order, device and number of processes.

    An input that occurs several times is kept once. An `Observer` of a sweep.

    Args:
        memory_budget: bytes that they may take; fewer are kept where they are large, but one at least.
        wanted: how many to keep at most.
    """

    def __init__(self, memory_budget: int, wanted: int = KEPT) -> None:
        self._budget, self._wanted = memory_budget, wanted
        self._samples: dict[int, _Sample] = {}

    def see(
        self,
        batch: Batch,
        keys: Tensor,
        recording: Recording | None = None,
        checks: Checks | None = None,
    ) -> None:
        """Look at a batch, or without `checks` do so at once; see `Observer`."""
        own = Checks() if checks is None else checks
        own.later(keys, lambda found: self._take(batch, found))
        if checks is None:
            own.look()

    def _take(self, batch: Batch, keys: Tensor) -> None:
        samples = keys.shape[0]
        index = {key: place for place, key in reversed(list(enumerate(keys.tolist())))}
        new = sorted(index.keys() - self._samples.keys())[: self._wanted]
        if len(self._samples) >= self._wanted:
            bound = max(self._samples)
            new = [key for key in new if key < bound]
        if new:
            found = _some(batch, [index[key] for key in new], samples)
            self._samples |= dict(zip(new, found, strict=True))
            sizes = {key: sample.bytes for key, sample in self._samples.items()}
            kept = self._within(sizes, self._budget)
            self._samples = {key: self._samples[key] for key in kept}

    def read(self, loader: Iterable[Any], reader: BatchReader, seed: int, progress: bool) -> None:
        """Look at every batch of a loader, without running a model."""
        with Bar(loader, "reading inputs", progress) as bar:
            for batch in batches(loader, reader):
                samples = count_samples(batch)
                self.see(batch, sample_keys(batch.tensors(), samples, seed))
                bar.advance(samples)

    def _within(self, sizes: Mapping[int, int], budget: int) -> list[int]:
        """The smallest hashes whose inputs fit into the budget together. What is dropped once would never come back:
        more data only put more before it.
        """
        kept: list[int] = []
        total = 0
        for key in sorted(sizes)[: self._wanted]:
            total += sizes[key]
            if kept and total > budget:
                break
            kept.append(key)
        return kept

    def batches(self, device: torch.device) -> list[Batch]:
        """The inputs of all processes in the order of their hashes, on `device`, as batches of inputs that are alike in
        shape.
        """
        sizes, budgets = zip(
            *gather(({key: sample.bytes for key, sample in self._samples.items()}, self._budget)), strict=True
        )
        # All processes must choose the same, and by the least budget each of them still holds what is its own of it.
        chosen = self._within({key: size for part in sizes for key, size in part.items()}, min(budgets))
        parts = gather({key: self._samples[key] for key in chosen if key in self._samples})
        found = {key: sample for part in parts for key, sample in part.items()}
        groups: dict[Any, list[_Sample]] = {}
        for key in chosen:
            groups.setdefault(found[key].kind(), []).append(found[key])
        return [
            _joined(group[start : start + _AT_ONCE], device)
            for group in groups.values()
            for start in range(0, len(group), _AT_ONCE)
        ]


def _some(batch: Batch, indices: Sequence[int], samples: int) -> list[_Sample]:
    """Some of a batch's samples, which come to the CPU together."""
    leaves, form = tree_flatten((batch.args, batch.kwargs))
    counted = tuple(isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == samples for v in leaves)
    places = [place for place, value in enumerate(leaves) if isinstance(value, Tensor)]
    rows = [
        torch.stack([leaves[place].detach()[index] for index in indices])
        if counted[place]
        else leaves[place].detach()
        for place in places
    ]
    here = dict(zip(places, on_host(*rows), strict=True))
    found: list[_Sample] = []
    for row in range(len(indices)):
        own = list(leaves)
        for place, value in here.items():
            own[place] = (value[row : row + 1] if counted[place] else value).clone()
        size = sum(own[place].numel() * own[place].element_size() for place in places)
        found.append(_Sample(own, form, counted, size))
    return found


def _print_of(value: Any) -> Any:
    """Equal for equal values that all samples of a batch share."""
    if not isinstance(value, Tensor):
        return repr(value)
    numbers = sample_keys([value.reshape(1, -1)], 1, 0) if value.numel() else None
    return tuple(value.shape), value.dtype, None if numbers is None else int(numbers)


def _joined(samples: list[_Sample], device: torch.device) -> Batch:
    first = samples[0]
    leaves: list[Any] = []
    for place, (value, counted) in enumerate(zip(first.leaves, first.counted, strict=True)):
        joined = torch.cat([sample.leaves[place] for sample in samples]) if counted else value
        leaves.append(joined.to(device) if isinstance(joined, Tensor) else joined)
    args, kwargs = tree_unflatten(leaves, first.form)
    return Batch(args, None, kwargs)
