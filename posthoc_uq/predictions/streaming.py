"""Predictions from draws that come one after another and are not kept.

Sums over draws are in float64 (float32 on MPS, which has no float64), so the order and the grouping of the draws make
no difference beyond the rounding of the result. Memory is a few tensors of the size of one draw's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from posthoc_uq.devices import widest
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.regression import RegressionPrediction, placed_noise_variance
from posthoc_uq.predictions.samples import (
    at_least_float32,
    class_votes,
    entropy_from,
    log_probabilities,
    smallest_counts,
)

BLOCK_BYTES = 2**17  # outputs summed at once, so that they stay in the cache (a single draw may be larger)


class Moments:
    """Mean and unbiased variance over draws, from blocks ``(draws, ...)``.

    Sums of ``x - c`` and of its square with the first draw as ``c``, which avoids the cancellation of
    ``sum x^2 - (sum x)^2 / S`` (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance"). Minus
    infinity in any draw makes the mean minus infinity and the variance 0: a masked class is certain. A NaN stays
    in its element.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, block: Tensor) -> None:
        """Add a block ``(draws, ...)``."""
        masked = torch.isneginf(block)
        values = _wide(block).masked_fill(masked, 0.0)
        if self._parts is None:
            zeros = torch.zeros_like(values[0])
            # a copy: a view would keep the whole block alive
            self._parts = values[0].clone(), zeros, zeros, torch.zeros_like(masked[0])
        shift, total, squares, was_masked = self._parts
        centred = values - shift
        self._parts = (
            shift,
            total + centred.sum(dim=0),
            squares + centred.square().sum(dim=0),
            was_masked | masked.any(dim=0),
        )
        self.count += block.shape[0]

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, in the precision of the sums; variance 0 for a single draw.

        Raises:
            PosthocUQError: no draw was added.
        """
        if self._parts is None or self.count == 0:
            raise PosthocUQError("A prediction needs at least one weight sample.")
        shift, total, squares, masked = self._parts
        mean = shift + total / self.count
        variance = torch.zeros_like(mean)
        if self.count > 1:
            variance = ((squares - total.square() / self.count) / (self.count - 1)).clamp(min=0)
        masked = masked & ~mean.isnan()
        return mean.masked_fill(masked, -math.inf), variance.masked_fill(masked, 0.0)


class ClassStatistics:
    """The sums that a `ClassPrediction` needs of draws of the logits; same numbers as `ClassPrediction.from_logits`.

    Args:
        binary: the model has one Bernoulli logit.
    """

    def __init__(self, binary: bool = False) -> None:
        self._binary = binary
        self._logits, self._probs = Moments(), Moments()
        self._dtype = torch.float32
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, logits: Tensor) -> None:
        """Add logits ``(draws, batch, classes)``; with `binary` ``(draws, batch)`` or ``(draws, batch, 1)``.

        Raises:
            PosthocUQError: another number of dimensions, fewer than two classes, or no floating-point numbers.
        """
        logits, log_probs = log_probabilities(logits, self._binary)
        probs = log_probs.exp()
        self._dtype = probs.dtype
        self._logits.add(logits)
        self._probs.add(probs)
        log_sum = _wide(torch.logsumexp(log_probs, dim=0))
        entropy = _wide(entropy_from(probs, log_probs)).sum(dim=0)
        votes = class_votes(log_probs)
        if self._sums is not None:
            previous = self._sums
            log_sum, entropy = torch.logaddexp(previous[0], log_sum), previous[1] + entropy
            votes = previous[2] + votes
        self._sums = log_sum, entropy, votes

    def prediction(self) -> ClassPrediction:
        """The prediction of all draws so far.

        Raises:
            PosthocUQError: no draw was added.
        """
        mean, variance = self._logits.result()
        probs, probs_variance = self._probs.result()
        assert self._sums is not None
        log_sum, entropy, votes = self._sums
        count, dtype = self._logits.count, self._dtype
        return ClassPrediction(
            probs=probs.to(dtype),
            logits_mean=mean.to(dtype),
            logits_variance=variance.to(dtype),
            sample_entropy=(entropy / count).to(dtype),
            log_probs=(log_sum - math.log(count)).to(dtype),
            probs_variance=probs_variance.to(dtype),
            votes=smallest_counts(votes, count),
        )


def classes_of_draws(blocks: Iterable[Tensor], *, binary: bool = False) -> ClassPrediction:
    """The prediction from blocks ``(draws, batch, ...)`` of logits.

    Raises:
        PosthocUQError: there is no draw, or the logits do not fit.
    """
    classes = ClassStatistics(binary)
    for block in gathered(blocks):
        classes.add(block)
    return classes.prediction()


def values_of_draws(blocks: Iterable[Tensor], noise_variance: Tensor) -> RegressionPrediction:
    """The prediction from blocks ``(draws, batch, ...)`` of means.

    Raises:
        PosthocUQError: there is no draw, or the means or the noise variances do not fit.
    """
    values, dtype = Moments(), torch.float32
    for block in gathered(blocks):
        block = at_least_float32(block)
        dtype = block.dtype
        values.add(block)
    mean, variance = (moment.to(dtype) for moment in values.result())
    return RegressionPrediction(mean, variance, placed_noise_variance(noise_variance, mean.device))


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float64, where the device has it."""
    return tensor.to(widest(tensor.device))


def gathered(blocks: Iterable[Tensor], limit: int = BLOCK_BYTES) -> Iterator[Tensor]:
    """Small blocks ``(draws, ...)`` joined up to `limit` bytes, so that fewer, larger operations sum them."""
    waiting: list[Tensor] = []
    waiting_bytes = 0
    for block in blocks:
        size = block.numel() * block.element_size()
        if waiting and waiting_bytes + size > limit:
            yield torch.cat(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append(block)
        waiting_bytes += size
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
