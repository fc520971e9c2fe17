"""Maxima of independent Gaussians (Clark, "The greatest of a finite set of random variables", 1961)."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, pi, prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.moments.unscented import Moments, block_size, is_recorded, root

OUTSIDE = float("-inf")  # mean of padding, which is never the maximum


def larger(first: Moments, second: Moments) -> Moments:
    """Moments of the larger of two independent Gaussians, element by element.

    With ``d = m1 - m2``, ``a^2 = v1 + v2``, ``alpha = d / a``, ``P = Phi(alpha)``: ``E max = m2 + d P + a phi(alpha)``
    and ``Var max = v1 P + v2 (1 - P) + d^2 P (1 - P) + d a phi (1 - 2 P) - a^2 phi^2``. The mean is computed
    as the larger mean plus a gain, so that it keeps its digits where the other is far below, or minus infinity.
    """
    (mean1, variance1), (mean2, variance2) = first, second
    spread = root(variance1 + variance2)
    difference = torch.where(mean1 == mean2, torch.zeros_like(spread), mean1 - mean2)
    ratio = _in_deviations(difference, spread)
    half = 0.5 * torch.erf(ratio * sqrt(0.5))
    above, below = 0.5 + half, 0.5 - half
    density = torch.exp(-0.5 * ratio.square()) * (1 / sqrt(2 * pi))
    gain = spread * (density - ratio.abs() * torch.minimum(above, below))
    shape = ratio * (ratio * above * below - 2 * density * half) - density.square()
    variance = variance1 * above + variance2 * below + spread.square() * shape
    return torch.maximum(mean1, mean2) + gain.clamp(min=0), variance.clamp(min=0)


def _in_deviations(difference: Tensor, spread: Tensor) -> Tensor:
    """A difference over its deviation, at most 12 in size, where the smaller one has no effect any more: so neither the
    result nor its gradient overflows.
    """
    if is_recorded(difference, spread):
        far = difference.abs() >= 12.0 * spread
        inside = torch.where(far, 0.0, difference) / torch.where(far, 1.0, spread)
        return torch.where(far, 12.0 * difference.sign(), inside)
    return (difference / spread.clamp(min=torch.finfo(spread.dtype).tiny)).clamp(-12.0, 12.0)


def largest(parts: list[Moments]) -> Moments:
    """The largest of several, by a tree of pairs."""
    while len(parts) > 1:
        paired = [larger(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = paired + parts[len(paired) * 2 :]
    return parts[0]


def along(mean: Tensor, variance: Tensor, dim: int) -> Moments:
    """The largest along a dimension, which is removed."""
    return largest(list(zip(mean.unbind(dim), variance.unbind(dim), strict=True)))


def pooled(
    mean: Tensor,
    variance: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> Moments:
    """Max-pooling of ``(..., *spatial)``, one dimension after the other: a maximum of maxima."""

    def pool(m: Tensor, v: Tensor) -> Moments:
        for axis in range(len(kernel)):
            dim = axis - len(kernel)
            m, v = _pool_dim(m, v, dim, kernel[axis], stride[axis], padding[axis], dilation[axis], ceil_mode)
        return m, v

    return by_planes(pool, mean, variance, len(kernel))


def _pool_dim(
    mean: Tensor,
    variance: Tensor,
    dim: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    ceil_mode: bool,
) -> Moments:
    size, reach = mean.shape[dim], dilation * (kernel - 1) + 1
    steps = (size + 2 * padding - reach) / stride
    outputs = (ceil(steps) if ceil_mode else int(steps)) + 1
    if ceil_mode and (outputs - 1) * stride >= size + padding:
        outputs -= 1  # a window must begin inside the input or its left padding
    right = max(0, (outputs - 1) * stride + reach - size - padding)
    if padding or right:
        pads = [0] * (2 * (-dim - 1)) + [padding, right]
        mean, variance = F.pad(mean, pads, value=OUTSIDE), F.pad(variance, pads)
    parts: list[Moments] = []
    for offset in range(kernel):
        taken = [slice(None)] * mean.ndim
        taken[dim] = slice(offset * dilation, offset * dilation + (outputs - 1) * stride + 1, stride)
        parts.append((mean[tuple(taken)], variance[tuple(taken)]))
    return largest(parts)


def by_planes(
    rule: Callable[[Tensor, Tensor], Moments], mean: Tensor, variance: Tensor, dims: int
) -> Moments:
    """Apply a rule of the last `dims` dimensions, a few planes at a time where no gradient is recorded, so that its
    temporaries stay in the cache.
    """
    lead, plane = mean.shape[: mean.ndim - dims], mean.shape[mean.ndim - dims :]
    if is_recorded(mean, variance) or mean.numel() <= block_size():
        return rule(mean, variance)
    means, variances = mean.reshape(-1, *plane), variance.reshape(-1, *plane)
    step = max(1, block_size() // prod(plane))
    parts = [rule(means[i : i + step], variances[i : i + step]) for i in range(0, means.shape[0], step)]
    moments = torch.cat([m for m, _ in parts]), torch.cat([v for _, v in parts])
    return moments[0].reshape(*lead, *moments[0].shape[1:]), moments[1].reshape(*lead, *moments[1].shape[1:])
