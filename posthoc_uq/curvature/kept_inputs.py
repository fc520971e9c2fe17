"""A few hundred training inputs, kept during a sweep for what is decided after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from posthoc_uq.core.batches import Bar, Batch, BatchReader, batches, holds_samples
from posthoc_uq.core.devices import DeferredChecks, on_host
from posthoc_uq.core.distributed import gather
from posthoc_uq.core.randomness import sample_keys
from posthoc_uq.layers.capture import Recording
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import counts

MAX_KEPT = 256  # inputs, where the memory budget allows that many
_MANY_WEIGHTS = 2_000_000  # with more weights a quarter of that: every prediction of them is long
_CHOOSING = "choosing the inputs of the faithful prior"
_BATCH_SIZE = 64  # kept inputs in one batch


def inputs_to_keep(layers: Iterable[Layer]) -> int:
    """How many inputs to keep for a posterior over these layers."""
    return MAX_KEPT if sum(layer.parameters for layer in layers) <= _MANY_WEIGHTS else MAX_KEPT // 4


@dataclass(frozen=True)
class _Sample:
    """One input, on the CPU, in memory of its own.

    Attributes:
        leaves: the tensors and other values of the model's arguments; tensors with one row a sample have one row.
        form: the tree that makes the arguments from the leaves.
        counted: which leaves are tensors with one row a sample.
        bytes: memory that it takes.
        counts: whether it counts, ``(1,)`` of booleans, or which of its positions, ``(1, *positions)``; None where
            all do.
    """

    leaves: list[Any]
    form: Any
    counted: tuple[bool, ...]
    bytes: int
    counts: Tensor | None = None

    def kind(self) -> Any:
        """Equal for samples that fit into one batch."""
        shape = None if self.counts is None else tuple(self.counts.shape)
        return (
            str(self.form),
            shape,
            tuple(
                (tuple(leaf.shape), leaf.dtype) if counted else _fingerprint(leaf)
                for leaf, counted in zip(self.leaves, self.counted, strict=True)
            ),
        )

    def united(self, twin: _Sample | None) -> _Sample:
        """The same input where it occurs twice, with the positions that count in either."""
        if twin is None or self.counts is None or twin.counts is None or self.kind() != twin.kind():
            return self
        return replace(self, counts=self.counts | twin.counts)


class KeptInputs:
    """The inputs with the smallest hashes: the same for every batch size, order, device and number of processes.

    An input that occurs several times is kept once, one that does not count never. An `Observer` of a sweep.

    Args:
        memory_budget: bytes that the inputs may take; fewer large ones are kept, but at least one.
        likelihood: determines which labels are ignored.
        wanted: how many to keep at most.
    """

    def __init__(self, memory_budget: int, likelihood: Likelihood, wanted: int = MAX_KEPT) -> None:
        self._budget, self._likelihood, self._wanted = memory_budget, likelihood, wanted
        self._samples: dict[int, _Sample] = {}

    def see(
        self,
        batch: Batch,
        keys: Tensor,
        recording: Recording | None = None,
        checks: DeferredChecks | None = None,
    ) -> None:
        """See `Observer`; without `checks` the batch is looked at straight away."""
        pending = DeferredChecks() if checks is None else checks
        counted = counts(self._likelihood, batch)
        if counted is None:
            pending.add(keys, lambda host_keys: self._take(batch, host_keys, None))
        else:
            held = list[Tensor]()
            pending.add(counted, held.append)
            pending.add(keys, lambda host_keys: self._take(batch, host_keys, held[0]))
        if checks is None:
            pending.run()

    def _take(self, batch: Batch, keys: Tensor, counted: Tensor | None) -> None:
        """Keep those of a batch that belong among the kept ones; `counted` as `counts` gives it, on the CPU."""
        samples, places = keys.shape[0], dict[int, list[int]]()
        counting = [True] * samples if counted is None else counted.reshape(samples, -1).any(1).tolist()
        for place, key in enumerate(keys.tolist()):
            if counting[place]:
                places.setdefault(key, []).append(place)
        chosen = sorted(places)[: self._wanted]
        if len(self._samples) >= self._wanted:
            bound = max(self._samples)
            chosen = [key for key in chosen if key <= bound]
        if counted is None:
            chosen = [key for key in chosen if key not in self._samples]
        if chosen:
            of_key = None if counted is None else [counted[places[key]].any(0) for key in chosen]
            picked = _samples_at(batch, [places[key][0] for key in chosen], samples, of_key)
            for key, sample in zip(chosen, picked, strict=True):
                self._samples[key] = sample.united(self._samples.get(key))
            sizes = {key: sample.bytes for key, sample in self._samples.items()}
            fitting = self._within(sizes, self._budget)
            self._samples = {key: self._samples[key] for key in fitting}

    def read(self, loader: Iterable[Any], reader: BatchReader, seed: int, progress: bool) -> None:
        """Look at every batch of a loader, without running a model."""
        with Bar(loader, "reading inputs", progress) as bar:
            for batch in batches(loader, reader):
                samples = count_samples(batch)
                self.see(batch, sample_keys(batch.tensors(), samples, seed))
                bar.advance(samples)

    def _within(self, sizes: Mapping[int, int], budget: int) -> list[int]:
        """The smallest hashes whose inputs fit into the budget together. An input that was dropped never comes back:
        more data only bring more small hashes.
        """
        fitting: list[int] = []
        total = 0
        for key in sorted(sizes)[: self._wanted]:
            total += sizes[key]
            if fitting and total > budget:
                break
            fitting.append(key)
        return fitting

    def batches(self, device: torch.device) -> list[Batch]:
        """The inputs of all processes on `device`, in the order of their hashes, in batches of equal shapes."""
        sizes, budgets = zip(
            *gather(({key: sample.bytes for key, sample in self._samples.items()}, self._budget), _CHOOSING),
            strict=True,
        )
        # All processes must choose the same inputs; with the least budget, none chosen was dropped by its process.
        chosen = self._within({key: size for part in sizes for key, size in part.items()}, min(budgets))
        parts = gather({key: self._samples[key] for key in chosen if key in self._samples}, _CHOOSING)
        samples: dict[int, _Sample] = {}
        for part in parts:
            samples |= {key: sample.united(samples.get(key)) for key, sample in part.items()}
        groups: dict[Any, list[_Sample]] = {}
        for key in chosen:
            groups.setdefault(samples[key].kind(), []).append(samples[key])
        return [
            _joined(group[start : start + _BATCH_SIZE], device)
            for group in groups.values()
            for start in range(0, len(group), _BATCH_SIZE)
        ]


def _samples_at(
    batch: Batch, indices: Sequence[int], samples: int, of_sample: Sequence[Tensor] | None
) -> list[_Sample]:
    """The samples of a batch at these indices, copied to the CPU together, with what counts of each."""
    leaves, form = tree_flatten((batch.args, batch.kwargs))
    counted = tuple(holds_samples(value, samples) for value in leaves)
    positions = [position for position, value in enumerate(leaves) if isinstance(value, Tensor)]
    rows = [
        torch.stack([leaves[position].detach()[index] for index in indices])
        if counted[position]
        else leaves[position].detach()
        for position in positions
    ]
    on_cpu = dict(zip(positions, on_host(*rows), strict=True))
    picked: list[_Sample] = []
    for row in range(len(indices)):
        sample = list(leaves)
        for position, value in on_cpu.items():
            sample[position] = (value[row : row + 1] if counted[position] else value).clone()
        size = sum(sample[position].numel() * sample[position].element_size() for position in positions)
        own = None if of_sample is None else of_sample[row].unsqueeze(0)
        picked.append(_Sample(sample, form, counted, size, own))
    return picked


def _fingerprint(value: Any) -> Any:
    """Equal for equal values; for values that all samples of a batch share."""
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
    own = [sample.counts for sample in samples if sample.counts is not None]
    return Batch(args, None, kwargs, torch.cat(own).double() if own else None)
