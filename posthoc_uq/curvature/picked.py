"""The samples that a sweep over a share of the data takes, put together in batches as large as the loader's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from posthoc_uq.loaders import Batch
from posthoc_uq.randomness import share_of

Part = tuple[Batch, Tensor, str]
"""A batch to sweep over, the hashes of its samples, and the batches of the loader that they are from, in words."""


@dataclass
class Picked:
    """Picks samples by a hash of their inputs, so that neither their order nor the size of batches matters.

    A tenth of a small batch would cost nearly as much as the whole of it; what is picked therefore waits until it makes
    a batch.

    Args:
        share: of the samples, in (0, 1].
    """

    share: float
    _waiting: list[_Picks] = field(default_factory=lambda: list[_Picks](), init=False)

    @property
    def waiting(self) -> bool:
        """Whether something was picked that has not been handed out."""
        return bool(self._waiting)

    def add(self, batch: Batch, keys: Tensor, index: int) -> Iterator[Part]:
        """Take the batch `index` of the loader with the hashes of its samples, ``(samples,)``; gives the batches that
        are ready, none larger than the largest of the loader.
        """
        if self.share >= 1:
            yield batch, keys, str(index)
            return
        samples = keys.shape[0]
        places = share_of(keys, self.share).nonzero().flatten()
        if not places.shape[0]:
            return
        picks = _Picks.of(batch, samples, places, keys[places], index)
        if self._waiting and (self._count() + len(picks.keys) > samples or not self._waiting[0].joins(picks)):
            yield from self.rest()
        self._waiting.append(picks)
        if self._count() + self.share * samples > samples:
            yield from self.rest()

    def rest(self) -> Iterator[Part]:
        """All that waits, as one batch."""
        if self._waiting:
            together, self._waiting = self._waiting, []
            yield _joined(together)

    def _count(self) -> int:
        return sum(len(picks.keys) for picks in self._waiting)


@dataclass
class _Picks:
    """Samples of one batch.

    Attributes:
        leaves: all that the batch holds, cut to these samples.
        spec: how that is nested.
        counted: which of the leaves belong to the samples; the others, such as a mask for all, are shared.
        keys: hashes of these samples.
        index: the number of the batch.
    """

    leaves: list[Any]
    spec: TreeSpec
    counted: list[bool]
    keys: Tensor
    index: int

    @staticmethod
    def of(batch: Batch, samples: int, places: Tensor, keys: Tensor, index: int) -> _Picks:
        """The samples at `places` of a batch of `samples`."""
        leaves, spec = tree_flatten((batch.args, batch.kwargs, batch.targets, batch.weights))
        counted = [isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == samples for v in leaves]
        cut = [v[places.to(v.device)] if c else v for v, c in zip(leaves, counted, strict=True)]
        return _Picks(cut, spec, counted, keys, index)

    def joins(self, other: _Picks) -> bool:
        """Whether one batch can hold both: samples of one shape, and all else the same."""
        if self.spec != other.spec or self.counted != other.counted:
            return False
        return all(map(_alike, self.counted, self.leaves, other.leaves))


def _alike(counted: bool, first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and first == second
    if counted:
        return first.shape[1:] == second.shape[1:] and first.dtype == second.dtype
    return first.dtype == second.dtype and torch.equal(first, second)


def _joined(parts: Sequence[_Picks]) -> Part:
    first, last = parts[0], parts[-1]
    columns = zip(first.counted, *(picks.leaves for picks in parts), strict=True)
    leaves = [torch.cat(values) if counted else values[0] for counted, *values in columns]
    args, kwargs, targets, weights = tree_unflatten(leaves, first.spec)
    place = str(first.index) if first is last else f"{first.index} to {last.index}"
    return Batch(args, targets, kwargs, weights), torch.cat([picks.keys for picks in parts]), place
