"""Averages, sums and maxima over windows or dimensions.

The maximum of two independent Gaussians is taken as a Gaussian of its exact mean and variance (Clark 1961, "The
greatest of a finite set of random variables"), and that of several by a tree of pairs.
"""

from __future__ import annotations

from functools import partial
from math import ceil, pi, prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.numerics import CONVOLUTIONS
from posthoc_uq.moments.tensor import (
    DETACHED,
    RULES,
    MomentTensor,
    Pass,
    full_precision,
    moments_of,
    named,
    rule,
)
from posthoc_uq.moments.unscented import MeanAndVariance, block_size, is_recorded, root

OUTSIDE = float("-inf")  # mean of padding, which is never the maximum


def larger(first: MeanAndVariance, second: MeanAndVariance) -> MeanAndVariance:
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
    result nor, where it is recorded, its gradient overflows. Without a gradient a clamp gives the same numbers; the
    other form makes the moments of a small CNN an eighth dearer.
    """
    if is_recorded(difference, spread):
        far = difference.abs() >= 12.0 * spread
        inside = torch.where(far, 0.0, difference) / torch.where(far, 1.0, spread)
        return torch.where(far, 12.0 * difference.sign(), inside)
    return (difference / spread.clamp(min=torch.finfo(spread.dtype).tiny)).clamp(-12.0, 12.0)


def largest(parts: list[MeanAndVariance]) -> MeanAndVariance:
    """The largest of several, by a tree of pairs."""
    while len(parts) > 1:
        paired = [larger(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = paired + parts[len(paired) * 2 :]
    return parts[0]


def pooled(
    mean: Tensor,
    variance: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> MeanAndVariance:
    """Max-pooling of ``(..., *spatial)``, one dimension after the other: a maximum of maxima. Where no gradient is
    recorded, a few planes at a time, so that temporaries stay in the cache.
    """
    dims = len(kernel)

    def pool(m: Tensor, v: Tensor) -> MeanAndVariance:
        for axis in range(dims):
            dim = axis - dims
            m, v = _pool_dim(m, v, dim, kernel[axis], stride[axis], padding[axis], dilation[axis], ceil_mode)
        return m, v

    if is_recorded(mean, variance) or mean.numel() <= block_size():
        return pool(mean, variance)
    lead, plane = mean.shape[: mean.ndim - dims], mean.shape[mean.ndim - dims :]
    means, variances = mean.reshape(-1, *plane), variance.reshape(-1, *plane)
    step = max(1, block_size() // prod(plane))
    parts = [pool(means[i : i + step], variances[i : i + step]) for i in range(0, means.shape[0], step)]
    m, v = torch.cat([m for m, _ in parts]), torch.cat([v for _, v in parts])
    return m.reshape(*lead, *m.shape[1:]), v.reshape(*lead, *v.shape[1:])


def _pool_dim(
    mean: Tensor,
    variance: Tensor,
    dim: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    ceil_mode: bool,
) -> MeanAndVariance:
    size, reach = mean.shape[dim], dilation * (kernel - 1) + 1
    steps = (size + 2 * padding - reach) / stride
    outputs = (ceil(steps) if ceil_mode else int(steps)) + 1
    if ceil_mode and (outputs - 1) * stride >= size + padding:
        outputs -= 1  # a window must begin inside the input or its left padding
    right = max(0, (outputs - 1) * stride + reach - size - padding)
    if padding or right:
        pads = [0] * (2 * (-dim - 1)) + [padding, right]
        mean, variance = F.pad(mean, pads, value=OUTSIDE), F.pad(variance, pads)
    parts: list[MeanAndVariance] = []
    for offset in range(kernel):
        taken = [slice(None)] * mean.ndim
        taken[dim] = slice(offset * dilation, offset * dilation + (outputs - 1) * stride + 1, stride)
        parts.append((mean[tuple(taken)], variance[tuple(taken)]))
    return largest(parts)


_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
_MAXIMA = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}
_INDEXED = {1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices}
_ADAPTIVE_MAXIMA = {
    1: (torch.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices),
    2: (F.adaptive_max_pool2d, F.adaptive_max_pool2d_with_indices),
    3: (F.adaptive_max_pool3d, F.adaptive_max_pool3d_with_indices),
}


def _averaged(state: Pass, mean: Tensor, variance: Tensor, pool: Any, cells: Any) -> MomentTensor:
    """``(1 - rho) pool(v) / n + rho pool(sqrt v)^2`` for a mean over n cells of common correlation rho."""
    rho = state.rules.pool_rho
    with full_precision(mean):
        averaged = pool(variance) / (cells() if callable(cells) else cells)
        if rho > 0:
            averaged = (1 - rho) * averaged + rho * pool(root(variance)).square()
    return MomentTensor(mean, averaged)


def avg_pool(
    dims: int,
    state: Pass,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> MomentTensor:
    mean, variance = moments_of(input)
    extra = {} if dims == 1 else {"divisor_override": divisor_override}
    stride = kernel_size if stride is None or stride == () else stride

    def pool(x: Tensor) -> Tensor:
        return _AVERAGES[dims](x, kernel_size, stride, padding, ceil_mode, count_include_pad, **extra)

    def cells() -> Tensor:
        ones = torch.ones(
            (1, 1, *mean.shape[mean.ndim - dims :]), dtype=variance.dtype, device=variance.device
        )
        window, strides, pads = (_tuple(value, dims) for value in (kernel_size, stride, padding))
        return _divisors(ones, pool(ones), window, strides, pads)

    return _averaged(state, pool(mean), variance, pool, cells)


def _divisors(
    ones: Tensor, averaged: Tensor, window: tuple[int, ...], strides: tuple[int, ...], pads: tuple[int, ...]
) -> Tensor:
    """The divisor of each window's average: the sum of ones in the window, divided by their average."""
    kernel = torch.ones((1, 1, *window), dtype=ones.dtype, device=ones.device)
    sides = [side for pad, width in zip(pads, window, strict=True) for side in (pad + width, pad)]
    counted = CONVOLUTIONS[len(window)](F.pad(ones, sides[::-1]), kernel, stride=strides)
    counted = counted[(..., *[slice(0, size) for size in averaged.shape[2:]])]
    return (counted / averaged).reshape(averaged.shape[2:])


def adaptive_avg_pool(dims: int, state: Pass, input: Any, output_size: Any) -> MomentTensor:
    m, v = moments_of(input)
    mean = _ADAPTIVE[dims](m, output_size)
    cells: Any = torch.ones((), dtype=v.dtype, device=v.device)
    for axis in range(dims):
        size, steps = m.shape[m.ndim - dims + axis], mean.shape[mean.ndim - dims + axis]
        index = torch.arange(steps, device=v.device)
        count = ((index + 1) * size + steps - 1) // steps - index * size // steps
        cells = cells * count.to(v.dtype).reshape(-1, *[1] * (dims - 1 - axis))
    return _averaged(state, mean, v, lambda x: _ADAPTIVE[dims](x, output_size), cells)


def max_pool(
    dims: int,
    state: Pass,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> MomentTensor:
    _refuse_indices(state, return_indices)
    m, v = moments_of(input)
    stride = kernel_size if stride is None or stride == () or stride == [] else stride
    if state.rules.max_pool == "argmax":
        mean, where = _INDEXED[dims](m, kernel_size, stride, padding, dilation, ceil_mode, True)
        return _taken(mean, v, where, dims)
    sizes = _tuple(kernel_size, dims), _tuple(stride, dims), _tuple(padding, dims), _tuple(dilation, dims)
    mean, variance = pooled(m.to(v.dtype), v, *sizes, ceil_mode)
    return MomentTensor(mean.to(m.dtype), variance)


def adaptive_max_pool(
    dims: int, state: Pass, input: Any, output_size: Any, return_indices: bool = False
) -> MomentTensor:
    _refuse_indices(state, return_indices)
    m, v = moments_of(input)
    spatial = m.shape[m.ndim - dims :]
    target = tuple(o if o is not None else s for o, s in zip(_tuple(output_size, dims), spatial, strict=True))
    if all(s % o == 0 for s, o in zip(spatial, target, strict=True)):
        window = tuple(s // o for s, o in zip(spatial, target, strict=True))
        return max_pool(dims, state, input, window)
    pool: Any = _ADAPTIVE_MAXIMA[dims][1]
    mean, where = pool(m, target)  # windows differ in size: the variance of the largest mean
    return _taken(mean, v, where, dims)


def _refuse_indices(state: Pass, return_indices: bool) -> None:
    if return_indices:
        raise state.refusal(
            "max-pooling returns indices", "which are uncertain themselves: pool without them"
        )


for _dims in (1, 2, 3):
    _maxima = named(f"max_pool{_dims}d", f"_max_pool{_dims}d", places=(F,))
    _adaptive_maxima = named(f"adaptive_max_pool{_dims}d", f"_adaptive_max_pool{_dims}d", places=(F,))
    rule(_AVERAGES[_dims])(partial(avg_pool, _dims))
    rule(_ADAPTIVE[_dims])(partial(adaptive_avg_pool, _dims))
    rule(_MAXIMA[_dims], _INDEXED[_dims], *_maxima)(partial(max_pool, _dims))
    rule(*_ADAPTIVE_MAXIMA[_dims], *_adaptive_maxima)(partial(adaptive_max_pool, _dims))


def _taken(mean: Tensor, variance: Tensor, where: Tensor, dims: int) -> MomentTensor:
    """The variances at indices into the flattened spatial dimensions."""
    lead = mean.ndim - dims
    return MomentTensor(mean, variance.flatten(lead).gather(-1, where.flatten(lead)).reshape(mean.shape))


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(value) * dims if len(value) == 1 else tuple(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return (value,) * dims


def dimensions(x: Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == () or dim == []:
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


@rule(*named("mean"))
def mean(
    state: Pass, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None
) -> MomentTensor:
    m, v = moments_of(input)
    dims = dimensions(m, dim if axis is None else axis)
    averaged = m.mean(dims, keepdim, dtype=dtype)
    return _averaged(state, averaged, v, lambda x: x.mean(dims, keepdim), prod(m.shape[d] for d in dims))


@rule(*named("sum"))
def total(
    state: Pass, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None
) -> MomentTensor:
    m, v = moments_of(input)
    dims, rho = dimensions(m, dim if axis is None else axis), state.rules.pool_rho
    variance = v.sum(dims, keepdim)
    if rho > 0:
        variance = (1 - rho) * variance + rho * root(v).sum(dims, keepdim).square()
    return MomentTensor(m.sum(dims, keepdim, dtype=dtype), variance)


@rule(*named("cumsum"))
def cumsum(state: Pass, input: Any, dim: int, *, dtype: Any = None) -> MomentTensor:
    m, v = moments_of(input)
    return MomentTensor(m.cumsum(dim, dtype=dtype), v.cumsum(dim))


@rule(*named("amax"))
def amax(state: Pass, input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    m, v = moments_of(input)
    if input.moment_note == DETACHED:
        return m.amax(dimensions(m, dim), keepdim)
    mean, variance, kind = m.to(v.dtype), v, m.dtype
    for d in sorted(dimensions(m, dim), reverse=True):
        if state.rules.max_pool == "argmax":
            where = mean.argmax(d, keepdim=True)
            mean, variance = mean.gather(d, where).squeeze(d), variance.gather(d, where).squeeze(d)
        else:
            mean, variance = largest(list(zip(mean.unbind(d), variance.unbind(d), strict=True)))
        if keepdim:
            mean, variance = mean.unsqueeze(d), variance.unsqueeze(d)
    return MomentTensor(mean.to(kind), variance)


@rule(*named("amin"))
def amin(state: Pass, input: Any, dim: Any = (), keepdim: bool = False) -> MomentTensor:
    largest = amax(state, MomentTensor(-input.moment_mean, input.moment_variance), dim, keepdim)
    return MomentTensor(-largest.moment_mean, largest.moment_variance)


@rule(*named("maximum"))
def pairwise_maximum(state: Pass, input: Any, other: Any) -> MomentTensor:
    if input is other:
        return input
    (m1, v1), (m2, v2) = moments_of(input), moments_of(other)
    kind = v1.dtype if isinstance(input, MomentTensor) else v2.dtype
    mean, variance = larger((m1.to(kind), v1.to(kind)), (m2.to(kind), v2.to(kind)))
    return MomentTensor(mean.to(torch.result_type(m1, m2)), variance)


@rule(*named("minimum"))
def pairwise_minimum(state: Pass, input: Any, other: Any) -> MomentTensor:
    if input is other:
        return input
    negated = [
        MomentTensor(-x.moment_mean, x.moment_variance) if isinstance(x, MomentTensor) else -x
        for x in (input, other)
    ]
    largest = pairwise_maximum(state, *negated)
    return MomentTensor(-largest.moment_mean, largest.moment_variance)


def _of_dimension(extreme: Any, function: Any, state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.max` and `torch.min`: of all numbers, along one dimension with the indices of the means, or of two."""
    names = ("other",) if args and isinstance(args[0], Tensor) else ("dim", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    if "other" in given:
        pairwise = pairwise_maximum if extreme is amax else pairwise_minimum
        return pairwise(state, input, given["other"])
    if "dim" not in given:
        return extreme(state, input)
    dim, keepdim = given["dim"], given.get("keepdim", False)
    indices = function(input.moment_mean, dim, keepdim).indices
    return getattr(torch.return_types, function.__name__)((extreme(state, input, dim, keepdim), indices))


for _name, _extreme in {"max": amax, "min": amin}.items():
    for _function in named(_name):
        RULES[_function] = partial(_of_dimension, _extreme, getattr(torch, _name))


@rule(*named("prod"))
def product(
    state: Pass, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> MomentTensor:
    """``prod(m^2 + v) - prod(m^2)``, exact for independent numbers."""
    m, v = moments_of(input)
    mean = m.prod(dtype=dtype) if dim is None else m.prod(dim, keepdim, dtype=dtype)
    wide = m.to(v.dtype)
    flat, axis = (wide.flatten(), 0) if dim is None else (wide, dim)
    spread, squares = v.reshape(flat.shape), flat.square()
    keep = keepdim and dim is not None
    zero = (squares == 0).any(axis, keepdim=keep)
    relative = (spread / squares.clamp(min=torch.finfo(spread.dtype).tiny)).log1p().sum(axis, keepdim=keep)
    near = squares.prod(axis, keepdim=keep) * relative.expm1()
    return MomentTensor(mean, torch.where(zero, (squares + spread).prod(axis, keepdim=keep), near))
