"""Hashes of the data that a pass has read, to recognise the same data again."""

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


def sample_hashes(batch: Batch, keys: Tensor) -> Tensor:
    """A hash of each sample: inputs, target and weight together, ``(samples,)`` int64.

    The sum of the hashes does not depend on the batches or the order of the samples.

    Args:
        batch: the samples.
        keys: hashes of their inputs, ``(samples,)`` int64.
    """
    samples = keys.shape[0]
    parts = [keys, *(sample_keys([v], samples, 0) for v in _nested(batch) if _has_sample_axis(v, samples))]
    if batch.targets is not None and _has_sample_axis(batch.targets, samples):
        parts.append(sample_keys([batch.targets], samples, 0))
    if batch.weights is not None and _has_sample_axis(batch.weights, samples):
        parts.append(sample_keys([batch.weights], samples, 1))
    hashes = parts[0]
    for part in parts[1:]:
        hashes = mix(hashes * 31 + part.to(hashes.device))
    return hashes


def shared_hash(batch: Batch, samples: int) -> Tensor:
    """A hash of all else in a batch, an int64 scalar: shapes, number formats, and values that its samples share."""
    weights = (
        () if batch.weights is None else (batch.weights,)
    )  # without any the hash is that of older checkpoints
    leaves, form = tree_flatten((batch.args, batch.kwargs, batch.targets, *weights))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    descriptions = [_described(leaf) for leaf in leaves]
    digest = sha256(repr((str(form), samples, descriptions)).encode()).digest()
    shared = torch.tensor(int.from_bytes(digest[:7], "little"), dtype=torch.int64, device="cpu")
    for tensor in tensors:
        if not _has_sample_axis(tensor, samples) and tensor.numel():
            shared = mix(shared.to(tensor.device) * 31 + sample_keys([tensor.reshape(1, -1)], 1, 0)[0])
    return shared


def batch_hash(batch: Batch) -> int:
    """A hash of all that a batch holds, whatever the order of its samples."""
    samples = count_samples(batch)
    total = sample_hashes(batch, sample_keys(batch.tensors(), samples, 0)).sum()
    return mixed_seed(int(total) % WORD, int(shared_hash(batch, samples)) % WORD)


class Content:
    """The sum of the hashes of all samples of a pass, and the number of its batches. An `Observer` of a sweep.

    Attributes:
        total: the sum, modulo 2^64.
        batches: their number.
        samples: their number.
    """

    def __init__(self) -> None:
        self.total = 0
        self.batches = 0
        self.samples = 0

    def see(
        self,
        batch: Batch,
        keys: Tensor,
        recording: Recording | None = None,
        checks: Checks | None = None,
    ) -> None:
        """See `Observer`; without `checks` the batch is looked at straight away."""
        pending = Checks() if checks is None else checks
        self.samples += keys.shape[0]
        pending.later(sample_hashes(batch, keys).sum(), self._add)
        if checks is None:
            pending.look()

    def _add(self, total: Tensor) -> None:
        self.total = (self.total + int(total)) % WORD
        self.batches += 1


def _nested(batch: Batch) -> list[Tensor]:
    """Tensors inside of other values among the inputs; the keys cover all other tensors."""
    outer = {id(tensor) for tensor in batch.tensors()}
    leaves = tree_flatten((batch.args, batch.kwargs))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in outer]


def _has_sample_axis(tensor: Tensor, samples: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == samples


def _described(leaf: Any) -> Any:
    """What is known of a value without a wait for the device; equal in every process."""
    if isinstance(leaf, Tensor):
        return str(leaf.dtype), tuple(leaf.shape)
    return leaf if isinstance(leaf, _SIMPLE) else type(leaf).__qualname__
