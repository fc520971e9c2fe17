"""The same batches predicted again and again, at one setting of the posterior after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posthoc_uq.heads.interception import ReplayError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.replay import Features
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import default_budget
from posthoc_uq.randomness import sample_keys

_BUDGETS = 4  # default memory budgets that the features of all batches may take

Read = Callable[[], Iterator[tuple[Batch, Any]]]


@dataclass
class _Kept:
    features: Features
    partner: Any
    key: int


class FeatureCache:
    """Keeps what enters the part of a model that has a posterior, so that the rest of it runs once for each batch.

    Batches that do not fit into memory, and those of models without such a part, are read and run anew every time.

    Args:
        predictor: whose features they are; its posterior's settings may change.
        read: gives all batches, in the same order at every call, each with something that belongs to it.
        budget: bytes that the features of all batches may take; by default up to a gibibyte, by what is free.
    """

    def __init__(self, predictor: Predictor, read: Read, budget: int | None = None) -> None:
        self._predictor, self._read = predictor, read
        self._budget = _BUDGETS * default_budget(predictor.device) if budget is None else budget
        self._kept: dict[int, _Kept] = {}
        self._tried = 0
        self._batches: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all features that are kept."""
        return sum(kept.features.nbytes for kept in self._kept.values())

    def distributions(self) -> Iterator[tuple[Any, Any]]:
        """The predictor's `distribution` of every batch at the posterior's present settings, in order, with what
        belongs to the batch.
        """
        for kept, batch, partner in self._all():
            found = None
            if kept is not None:
                try:
                    found = self._predictor.distribution_from(kept.features)
                except ReplayError:
                    batch = self._let_go(kept)
            if found is None:
                assert batch is not None
                with self._predictor.explaining(batch):
                    found = self._predictor.distribution(*batch.args, **batch.kwargs)
            yield found, partner

    def outputs(self, run: Callable[[Batch], Tensor]) -> Iterator[tuple[Tensor, Any]]:
        """The model's outputs at the posterior's mean for every batch, in order, with what belongs to the batch.

        Args:
            run: gives those of a batch that none are kept of.
        """
        for kept, batch, partner in self._all():
            outputs = None if kept is None else kept.features.outputs
            if outputs is None and kept is not None:
                batch = self._of(kept)
            if outputs is None:
                assert batch is not None
                with self._predictor.explaining(batch):
                    outputs = run(batch)
            yield outputs, partner

    def _all(self) -> Iterator[tuple[_Kept | None, Batch | None, Any]]:
        """Every batch, as what is kept of it or as it is read."""
        if self._batches is not None and len(self._kept) == self._batches:
            for index in range(self._batches):
                kept = self._kept[index]
                yield kept, None, kept.partner
            return
        count = 0
        for count, (batch, partner) in enumerate(self._read(), 1):
            yield self._made(count - 1, batch, partner), batch, partner
        self._batches = count

    def _made(self, index: int, batch: Batch, partner: Any) -> _Kept | None:
        """What is kept of a batch, which is settled when it is read for the first time."""
        kept = self._kept.get(index)
        if kept is not None and kept.key != _key(batch):  # the order is another one than before
            del self._kept[index]
            return None
        if index >= self._tried:
            self._tried = index + 1
            with self._predictor.explaining(batch):
                features = self._predictor.features(*batch.args, **batch.kwargs)
            if features is not None:
                kept = _Kept(features, partner, _key(batch))
                if self.nbytes + features.nbytes <= self._budget:
                    self._kept[index] = kept
        return kept

    def _let_go(self, kept: _Kept) -> Batch:
        """The batch of features that are of no use, which are kept no longer."""
        batch = self._of(kept)
        self._kept = {index: other for index, other in self._kept.items() if other is not kept}
        return batch

    def _of(self, kept: _Kept) -> Batch:
        return next(batch for batch, _ in self._read() if _key(batch) == kept.key)


def _key(batch: Batch) -> int:
    tensors = batch.tensors()
    samples = next((tensor.shape[0] for tensor in tensors if tensor.ndim > 0), 0)
    return hash((samples, *sample_keys(tensors, samples, 0).tolist()))
