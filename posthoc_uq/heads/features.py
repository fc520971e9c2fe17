"""A cache of features, for predicting the same batches again and again under changing settings of the posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posthoc_uq.core import interrupts
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import TEMPORARY_BYTES
from posthoc_uq.core.randomness import sample_keys
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.layers.frozen import Features

CACHE_BUDGETS = 4  # the features of all batches may take this many times the default memory budget

Read = Callable[[], Iterator[tuple[Batch, Any]]]


@dataclass
class _CachedBatch:
    features: Features
    partner: Any
    key: int


class FeatureCache:
    """Keeps what enters the part of a model that has a posterior, so that the part before it runs once for each batch.

    Batches whose features do not fit into memory, and models without such a part, are read and run anew every time.

    Args:
        predictor: whose features they are.
        read: gives all batches, in the same order at every call, each with a partner, such as its targets.
        budget: bytes that the features of all batches may take; by default a gibibyte.
    """

    def __init__(self, predictor: Predictor, read: Read, budget: int | None = None) -> None:
        self._predictor, self._read = predictor, read
        self._budget = CACHE_BUDGETS * TEMPORARY_BYTES if budget is None else budget
        self._cached: dict[int, _CachedBatch] = {}
        self._tried = 0
        self._batches: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all features that are kept."""
        return sum(cached.features.nbytes for cached in self._cached.values())

    def distributions(self, predictor: Predictor) -> Iterator[tuple[Any, Any]]:
        """The `distribution` of every batch by the predictor, or by that of another value of its posterior, in order,
        each with its partner.
        """
        for cached, batch, partner in self._all():
            if cached is not None:
                distribution = predictor.distribution_from(cached.features)
            else:
                assert batch is not None
                with predictor.explaining(batch):
                    distribution = predictor.distribution(batch)
            yield distribution, partner

    def outputs(self, run: Callable[[Batch], Tensor]) -> Iterator[tuple[Tensor, Any]]:
        """The model's outputs at the posterior's mean for every batch, in order, each with its partner.

        Args:
            run: gives the outputs of a batch that is not cached.
        """
        for cached, batch, partner in self._all():
            if cached is not None:
                outputs = cached.features.outputs
            else:
                assert batch is not None
                with self._predictor.explaining(batch):
                    outputs = run(batch)
            yield outputs, partner

    def _all(self) -> Iterator[tuple[_CachedBatch | None, Batch | None, Any]]:
        """Every batch, cached, read or both, with its partner."""
        if self._batches is not None and len(self._cached) == self._batches:
            for index in range(self._batches):
                interrupts.check()
                cached = self._cached[index]
                yield cached, None, cached.partner
            return
        count = 0
        for count, (batch, partner) in enumerate(self._read(), 1):
            interrupts.check()
            yield self._made(count - 1, batch, partner), batch, partner
        self._batches = count

    def _made(self, index: int, batch: Batch, partner: Any) -> _CachedBatch | None:
        """The features of a batch, or None; made, and kept where there is room, when it is read for the first time."""
        cached = self._cached.get(index)
        if cached is not None and cached.key != _key(batch):  # the order of the batches changed
            del self._cached[index]
            return None
        if index >= self._tried:
            self._tried = index + 1
            with self._predictor.explaining(batch):
                features = self._predictor.features(batch)
            if features is not None:
                cached = _CachedBatch(features, partner, _key(batch))
                if self.nbytes + features.nbytes <= self._budget:
                    self._cached[index] = cached
        return cached


def _key(batch: Batch) -> int:
    samples = batch.rows or 0
    return hash((samples, *sample_keys(batch.tensors, samples, 0).tolist()))
