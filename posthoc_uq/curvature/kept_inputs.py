"""Samples that a sweep picks by hashes of their inputs: a share of all to sweep over, and a few hundred training inputs
that are kept for what is decided after it. Neither depends on the order of the samples or the size of batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from posthoc_uq.core.batches import Bar, Batch, BatchReader, batches, count_samples, holds_samples
from posthoc_uq.core.devices import DeferredChecks, on_host
from posthoc_uq.core.distributed import gather
from posthoc_uq.core.randomness import sample_keys, share_of
from posthoc_uq.layers.capture import Recording
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import counts

MAX_KEPT = 256  # inputs, where the memory budget allows that many
_MANY_WEIGHTS = 2_000_000  # with more weights a quarter of that: every prediction of them is long
_CHOOSING = "choosing the inputs of the faithful prior"
_BATCH_SIZE = 64  # kept inputs in one batch
_MAX_JOINED = 512, 2**16  # samples, and numbers in their inputs, of batches that are joined
_WIDTH = 64  # numbers that a token becomes


def inputs_to_keep(layers: Iterable[Layer]) -> int:
    """How many inputs to keep for a posterior over these layers."""
    return MAX_KEPT if sum(layer.parameters for layer in layers) <= _MANY_WEIGHTS else MAX_KEPT // 4


@dataclass(frozen=True)
class _Samples:
    """Samples cut out of a batch.

    Attributes:
        leaves: arguments, targets and weights of the batch, cut to these samples.
        form: the tree that they are leaves of.
        counted: which of the leaves have one row a sample; the others, such as a mask for all, are shared.
        whole: as in `Batch`.
    """

    leaves: list[Any]
    form: TreeSpec
    counted: list[bool]
    whole: bool

    @staticmethod
    def of(batch: Batch, samples: int, places: Tensor | None = None) -> _Samples:
        """Copies of the samples at `places` of a batch of `samples`, or of all."""
        batch = batch.kept() if batch.whole or places is None else batch
        leaves, form = tree_flatten((batch.args, batch.kwargs, batch.targets, batch.weights))
        counted = [holds_samples(value, samples) for value in leaves]
        if places is not None:
            leaves = [
                v[places.to(v.device)] if c else v.clone() if isinstance(v, Tensor) else v
                for v, c in zip(leaves, counted, strict=True)
            ]
        return _Samples(leaves, form, counted, batch.whole)

    def joins(self, other: _Samples) -> bool:
        """Whether one batch can hold both: samples of one shape, and all else the same."""
        if self.whole or other.whole or self.form != other.form or self.counted != other.counted:
            return False
        return all(map(_alike, self.counted, self.leaves, other.leaves))

    @staticmethod
    def joined(parts: Sequence[_Samples], device: torch.device | None = None) -> Batch:
        """One batch of several parts that join, its tensors but the weights on `device` if that is given."""
        columns = zip(parts[0].counted, *(part.leaves for part in parts), strict=True)
        leaves = [torch.cat(values) if counted else values[0] for counted, *values in columns]
        if device is not None:
            leaves[:-1] = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves[:-1]]
        args, kwargs, targets, weights = tree_unflatten(leaves, parts[0].form)
        return Batch(args, targets, kwargs, weights, parts[0].whole)


def _alike(counted: bool, first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and repr(first) == repr(second)
    if counted:
        return first.shape[1:] == second.shape[1:] and first.dtype == second.dtype
    return first.dtype == second.dtype and torch.equal(first, second)


def joined(loaded: Iterable[Batch]) -> Iterator[Batch]:
    """Batches in their order, several of few samples and numbers as one: a small network takes as long for a few rows
    as for many.
    """
    waiting, size = list[_Samples](), (0, 0)
    for batch in loaded:
        own = (
            count_samples(batch),
            sum(tensor.numel() * (1 if tensor.is_floating_point() else _WIDTH) for tensor in batch.tensors),
        )
        small = all(2 * number <= most for number, most in zip(own, _MAX_JOINED, strict=True))
        small = small and not batch.whole and batch.weights is None
        small = small and (batch.targets is None or holds_samples(batch.targets, own[0]))
        samples = _Samples.of(batch, own[0]) if small else None
        size = size[0] + own[0], size[1] + own[1]
        if waiting and (
            samples is None or not (all(map(le, size, _MAX_JOINED)) and waiting[0].joins(samples))
        ):
            yield _Samples.joined(waiting)
            waiting, size = [], own
        if samples is None:
            yield batch
            size = 0, 0
        else:
            waiting.append(samples)
    if waiting:
        yield _Samples.joined(waiting)


Part = tuple[Batch, Tensor, str]
"""A batch to sweep over, the hashes of its samples, and the batches of the loader that they are from, in words."""


@dataclass
class Picked:
    """Picks samples by a hash of their inputs, so that neither their order nor the size of batches matters.

    A tenth of a small batch would cost nearly as much as the whole of it; what is picked therefore waits until it makes
    a batch.

    Args:
        share: of the samples, in (0, 1].

    Attributes:
        waiting: what was picked and not handed out: samples, their hashes, and the number of their batch.
    """

    share: float
    waiting: list[tuple[_Samples, Tensor, int]] = field(
        default_factory=list[tuple[_Samples, Tensor, int]], init=False
    )

    def add(self, batch: Batch, keys: Tensor, index: int) -> Iterator[Part]:
        """Take the batch `index` of the loader with the hashes of its samples, ``(samples,)``; gives the batches that
        are ready, none larger than the largest of the loader.
        """
        samples = keys.shape[0]
        places = share_of(keys, self.share).nonzero().flatten()
        if not places.shape[0]:
            return
        picks = _Samples.of(batch, samples, places)
        if self.waiting and (self._count() + len(places) > samples or not self.waiting[0][0].joins(picks)):
            yield from self.rest()
        self.waiting.append((picks, keys[places], index))
        if self._count() + self.share * samples > samples:
            yield from self.rest()

    def rest(self) -> Iterator[Part]:
        """All that waits, as one batch."""
        if self.waiting:
            (parts, keys, numbers), self.waiting = zip(*self.waiting, strict=True), []
            place = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            yield _Samples.joined(parts), torch.cat(keys), place

    def _count(self) -> int:
        return sum(len(keys) for _, keys, _ in self.waiting)


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
        self._samples: dict[
            int, _Samples
        ] = {}  # each of one sample, by its hash; its weights are what counts of it
        self._bytes: dict[int, int] = {}

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
        able = torch.ones_like(keys, dtype=torch.bool)
        if counted is not None:
            able &= counted.reshape(samples, -1).any(1)
        if len(self._samples) >= self._wanted:
            able &= keys <= max(self._samples)  # most samples of a long sweep end here
        for place in able.nonzero().flatten().tolist():
            places.setdefault(int(keys[place]), []).append(place)
        chosen = sorted(places)[: self._wanted]
        if counted is None:
            chosen = [key for key in chosen if key not in self._samples]
        if chosen:
            first = torch.tensor([places[key][0] for key in chosen], device="cpu")
            picks = _Samples.of(replace(batch, targets=None, weights=None), samples, first)
            tensors = [place for place, value in enumerate(picks.leaves) if isinstance(value, Tensor)]
            on_cpu = dict(
                zip(tensors, on_host(*(picks.leaves[place].detach() for place in tensors)), strict=True)
            )
            for row, key in enumerate(chosen):
                leaves, counted_leaves = list(picks.leaves), list(picks.counted)
                for place, value in on_cpu.items():  # in memory of its own
                    leaves[place] = (value[row : row + 1] if picks.counted[place] else value).clone()
                tensors_of_sample = batch.tensors if batch.whole else [leaves[place] for place in tensors]
                self._bytes[key] = sum(tensor.nbytes for tensor in tensors_of_sample)
                if counted is not None:
                    leaves[-1], counted_leaves[-1] = counted[places[key]].any(0).unsqueeze(0), True
                sample = _Samples(leaves, picks.form, counted_leaves, batch.whole)
                self._samples[key] = _united(sample, self._samples.get(key))
            fitting = self._within(self._bytes, self._budget)
            self._samples = {key: self._samples[key] for key in fitting}
            self._bytes = {key: self._bytes[key] for key in fitting}

    def read(self, loader: Iterable[Any], reader: BatchReader, seed: int, progress: bool) -> None:
        """Look at every batch of a loader, without running a model."""
        with Bar(loader, "reading inputs", progress) as bar:
            for batch in batches(loader, reader):
                samples = count_samples(batch)
                self.see(batch, sample_keys(batch.tensors, samples, seed))
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
        sizes, budgets = zip(*gather((self._bytes, self._budget), _CHOOSING), strict=True)
        # All processes must choose the same inputs; with the least budget, none chosen was dropped by its process.
        chosen = self._within({key: size for part in sizes for key, size in part.items()}, min(budgets))
        samples: dict[int, _Samples] = {}
        for part in gather({key: self._samples[key] for key in chosen if key in self._samples}, _CHOOSING):
            samples |= {key: _united(sample, samples.get(key)) for key, sample in part.items()}
        groups: list[list[_Samples]] = []
        for sample in (samples[key] for key in chosen):
            group = next((group for group in groups if group[0].joins(sample)), None)
            if group is None:
                groups.append([sample])
            else:
                group.append(sample)
        found = [
            _Samples.joined(group[start : start + _BATCH_SIZE], device)
            for group in groups
            for start in range(0, len(group), _BATCH_SIZE)
        ]
        return [
            batch if batch.weights is None else replace(batch, weights=batch.weights.double())
            for batch in found
        ]


def _united(sample: _Samples, twin: _Samples | None) -> _Samples:
    """The same input where it occurs twice, with the positions that count in either."""
    if twin is None or sample.leaves[-1] is None or twin.leaves[-1] is None or not sample.joins(twin):
        return sample
    return replace(sample, leaves=[*sample.leaves[:-1], sample.leaves[-1] | twin.leaves[-1]])
