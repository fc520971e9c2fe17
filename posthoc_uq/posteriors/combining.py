"""Statistics of two parts of the data added up, or those of one part taken out again.

Blocks keep means over the samples. With N samples before and n that come in or go out, the new mean is
``N / (N + n) kept + n / (N + n) part``, or ``N / (N - n) kept - n / (N - n) part``; both are weighted sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError

_SLACK = 1e3
"""Rounding errors of a sum over a data set, in units of its number format's precision, relative to its size."""


_LOST = 1e-2
"""The share of what was known before that rounding may take when data come in, relative to its largest number."""


def check_forgettable(kept: float, part: float, weights: Weights, precision: float, what: str) -> None:
    """Refuse data beside which all that is known already would be lost to rounding, so that they could never go out
    again.

    Args:
        kept: the largest number of a mean over all data so far; nothing is lost of a zero.
        part: the same of the data that come in.
        weights: of the two means.
        precision: of the numbers, relative.
        what: whose statistic it is, in words.

    Raises:
        PosthocUQError: more than 1 % of `kept` would be lost.
    """
    share = min(1.0, weights.part / weights.kept)
    if kept > 0 and not max(precision, weights.precision) * share * part <= _LOST * kept:
        raise PosthocUQError(
            f"These data cannot come in: what they say of {what} is {part / kept:.2g} times as large as what all data "
            f"before said, which would be lost to rounding, so that uq.forget could not take them out again. Look for "
            f"inputs or targets that are out of range, or fit again where the model was certain of all data before."
        )


class NotContainedError(PosthocUQError):
    """Data were to be taken out that cannot all have been in; its text is the statistic that shows it."""


@dataclass(frozen=True)
class Weights:
    """The weights of a sum of means.

    Attributes:
        kept: of the mean that is kept.
        part: of the mean of the data that come in, or go out: then it is negative.
        precision: the relative precision in which gradients were computed, however wide the sums are: two passes over
            the same sample agree to it.
    """

    kept: float
    part: float
    precision: float

    @staticmethod
    def of(samples: float, change: float, precision: float) -> Weights:
        """For `samples` before, the sum of their weights, and a `change` of it: negative for those that go out."""
        return Weights(samples / (samples + change), change / (samples + change), precision)


def combined(kept: Tensor, part: Tensor, weights: Weights, what: str) -> Tensor:
    """The weighted sum of two means that have no negative number, in the number format of `kept`.

    Args:
        kept: the mean over all data so far.
        part: over those that come in or go out; of the same shape.
        weights: of the two.
        what: the statistic in words, for the error.

    Raises:
        NotContainedError: a number would become negative by more than rounding.
    """
    before = as_double(kept)
    total = weights.kept * before + weights.part * as_double(part).to(before.device)
    if (
        weights.part < 0
        and total.numel()
        and bool(total.min() < -_rounding(kept, float(kept.abs().max()), weights))
    ):
        raise NotContainedError(what)
    return total.clamp(min=0).to(kept)


def combined_matrices(kept: Tensor, part: Tensor, weights: Weights, what: str) -> Tensor:
    """The weighted sum of two means ``(..., n, n)`` that are positive semidefinite; otherwise as `combined`.

    Raises:
        NotContainedError: an eigenvalue would become negative by more than rounding.
    """
    before = as_double(kept)
    total = weights.kept * before + weights.part * as_double(part).to(before.device)
    total = (total + total.transpose(-1, -2)) / 2
    if weights.part < 0 and total.numel():
        norm = float(before.abs().sum(-1).max())  # at least the largest eigenvalue
        shifted = total.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(_rounding(kept, norm, weights))
        if bool(torch.linalg.cholesky_ex(shifted).info.any()):
            raise NotContainedError(what)
        total.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
    return total.to(kept)


def _rounding(kept: Tensor, size: float, weights: Weights) -> float:
    """What may be rounding in a weighted sum, for a `kept` of this size: more where nearly all data go out, since it
    then counts many times.
    """
    smallest = torch.finfo(torch.float64).tiny  # so that an empty statistic stays one
    precision = max(weights.precision, torch.finfo(kept.dtype).eps)
    return _SLACK * precision * weights.kept * size + smallest
