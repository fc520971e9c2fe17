"""Predictions of the same batches again and again, by predictors that differ in the posterior's settings alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc_uq.heads.prediction import Prediction
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.replay import Features, ReplayError
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import default_budget
from posthoc_uq.randomness import sample_keys

_BUDGETS = 4  # default memory budgets that the features of all batches may take


@dataclass
class _Kept:
    features: Features
    targets: Tensor
    key: int


class FeatureCache:
    """What enters the part of a model that has a posterior, kept for some batches: the rest of the model runs once for
    each of them, however many predictors are tried.

    Batches that do not fit into memory, and those of models without such a part, are read and run anew every time.

    Args:
        read: gives all batches with their targets, in the same order at every call.
        budget: bytes that the features of all batches may take; by default up to a gibibyte, by what is free.
    """

    def __init__(self, read: Callable[[], Iterator[tuple[Batch, Tensor]]], budget: int | None = None) -> None:
        self._read = read
        self._budget = budget
        self._kept: dict[int, _Kept] = {}
        self._batches: int | None = None
        self._tried: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all features that are kept."""
        return sum(kept.features.nbytes for kept in self._kept.values())

    def predictions(self, predictor: Predictor) -> Iterator[tuple[Prediction, Tensor]]:
        """The predictions of all batches, in order, with their targets.

        Args:
            predictor: of the same head and options, on the same model, at every call.
        """
        done = 0
        if self._batches is not None and len(self._kept) == self._batches:
            for index in range(self._batches):
                kept = self._kept[index]
                found = self._from(predictor, index, kept.features)
                if found is None:
                    break
                yield found, kept.targets
                done += 1
            if done == self._batches:
                return
        index = -1
        for index, (batch, targets) in enumerate(self._read()):
            if index >= done:
                yield self._predicted(predictor, index, batch, targets), targets
        self._batches = index + 1

    def outputs(self) -> Iterator[tuple[Tensor | None, Batch | None, Tensor]]:
        """The trained network's outputs for all batches, in order: ``(outputs, batch, targets)``.

        Where the outputs are not kept they are None, and the batch is there to run the network on.
        """
        if self._batches is not None and len(self._kept) == self._batches:
            kept = [self._kept[index] for index in range(self._batches)]
            if all(one.features.outputs is not None for one in kept):
                yield from ((one.features.outputs, None, one.targets) for one in kept)
                return
        for index, (batch, targets) in enumerate(self._read()):
            kept = self._kept.get(index)
            same = kept is not None and kept.key == _key(batch)
            outputs = kept.features.outputs if kept is not None and same else None
            yield outputs, (batch if outputs is None else None), targets

    def _predicted(self, predictor: Predictor, index: int, batch: Batch, targets: Tensor) -> Prediction:
        kept = self._kept.get(index)
        if kept is not None and kept.key != _key(batch):  # the loader gives another order than before
            del self._kept[index]
            kept = None
        features = kept.features if kept is not None else None
        if features is None and index not in self._tried:
            self._tried.add(index)
            features = predictor.features(*batch.args, **batch.kwargs)
            if features is not None and self.nbytes + features.nbytes <= self._limit(predictor):
                self._kept[index] = _Kept(features, targets, _key(batch))
        found = None if features is None else self._from(predictor, index, features)
        return predictor(*batch.args, **batch.kwargs) if found is None else found

    def _from(self, predictor: Predictor, index: int, features: Features) -> Prediction | None:
        try:
            return predictor.from_features(features)
        except ReplayError:
            self._kept.pop(index, None)
            return None

    def _limit(self, predictor: Predictor) -> int:
        return _BUDGETS * default_budget(predictor.device) if self._budget is None else self._budget


def _key(batch: Batch) -> int:
    tensors = batch.tensors()
    samples = next((tensor.shape[0] for tensor in tensors if tensor.ndim > 0), 0)
    return hash((samples, *torch.atleast_1d(sample_keys(tensors, samples, 0)).tolist()))
