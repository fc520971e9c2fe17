"""What a pass over the data has read, as numbers that tell it from other data."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.devices import Checks
from posthoc_uq.loaders import Batch
from posthoc_uq.randomness import mix, mixed_seed, sample_keys

WORD = 1 << 64
_SIMPLE = (bool, int, float, complex, str, type(None))


def contents(batch: Batch, keys: Tensor) -> Tensor:
    """A hash of each sample, its inputs together with its target, ``(samples,)`` int64.

    Their sum does not depend on how the samples are put into batches, or in which order.

    Args:
        batch: the samples.
        keys: hashes of their inputs, ``(samples,)`` int64.
    """
    samples = keys.shape[0]
    parts = [keys, *(sample_keys([v], samples, 0) for v in _inner(batch) if _counts(v, samples))]
    if batch.targets is not None and _counts(batch.targets, samples):
        parts.append(sample_keys([batch.targets], samples, 0))
    found = parts[0]
    for part in parts[1:]:
        found = mix(found * 31 + part.to(found.device))
    return found


def frame(batch: Batch, samples: int) -> Tensor:
    """A hash of what a batch is beside its samples, an int64 scalar: shapes, number formats, what its samples share."""
    leaves, form = tree_flatten((batch.args, batch.kwargs, batch.targets))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    said = [_said(leaf) for leaf in leaves]
    digest = sha256(repr((str(form), samples, said)).encode()).digest()
    found = torch.tensor(int.from_bytes(digest[:7], "little"), dtype=torch.int64, device="cpu")
    for tensor in tensors:
        if not _counts(tensor, samples) and tensor.numel():
            found = mix(found.to(tensor.device) * 31 + sample_keys([tensor.reshape(1, -1)], 1, 0)[0])
    return found


def batch_hash(batch: Batch) -> int:
    """Of all that a batch holds, its samples in any order."""
    samples = count_samples(batch)
    own = contents(batch, sample_keys(batch.tensors(), samples, 0)).sum()
    return mixed_seed(int(own) % WORD, int(frame(batch, samples)) % WORD)


class Content:
    """The sum of the hashes of all samples of a pass, and the number of its batches. An `Observer` of a sweep.

    Attributes:
        total: the sum, modulo 2^64.
        batches: that were seen.
    """

    def __init__(self) -> None:
        self.total = 0
        self.batches = 0

    def see(
        self,
        batch: Batch,
        keys: Tensor,
        recording: Recording | None = None,
        checks: Checks | None = None,
    ) -> None:
        """Look at a batch, or without `checks` do so at once; see `Observer`."""
        own = Checks() if checks is None else checks
        own.later(contents(batch, keys).sum(), self._add)
        if checks is None:
            own.look()

    def _add(self, total: Tensor) -> None:
        self.total = (self.total + int(total)) % WORD
        self.batches += 1


def _inner(batch: Batch) -> list[Tensor]:
    """Tensors of the inputs that are inside of another value; the others are in the keys."""
    outer = {id(tensor) for tensor in batch.tensors()}
    leaves = tree_flatten((batch.args, batch.kwargs))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in outer]


def _counts(tensor: Tensor, samples: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == samples


def _said(leaf: Any) -> Any:
    """What is known of a value without looking at a device, and equal in every process."""
    if isinstance(leaf, Tensor):
        return str(leaf.dtype), tuple(leaf.shape)
    return leaf if isinstance(leaf, _SIMPLE) else type(leaf).__qualname__
