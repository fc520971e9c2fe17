"""Averages, sums and maxima over windows or dimensions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.numerics import CONVOLUTIONS
from posthoc_uq.moments import maximum
from posthoc_uq.moments.tensor import MomentTensor, Pass, full_precision, moments_of, named, rule
from posthoc_uq.moments.unscented import root

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
    mean, variance = maximum.pooled(m.to(v.dtype), v, *sizes, ceil_mode)
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


def _dimensions(x: Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == () or dim == []:
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


@rule(*named("mean"))
def mean(
    state: Pass, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None
) -> MomentTensor:
    m, v = moments_of(input)
    dims = _dimensions(m, dim if axis is None else axis)
    cells = 1
    for d in dims:
        cells *= m.shape[d]
    averaged = m.mean(dims, keepdim, dtype=dtype)
    return _averaged(state, averaged, v, lambda x: x.mean(dims, keepdim), cells)


@rule(*named("sum"))
def total(
    state: Pass, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None
) -> MomentTensor:
    m, v = moments_of(input)
    dims, rho = _dimensions(m, dim if axis is None else axis), state.rules.pool_rho
    variance = v.sum(dims, keepdim)
    if rho > 0:
        variance = (1 - rho) * variance + rho * root(v).sum(dims, keepdim).square()
    return MomentTensor(m.sum(dims, keepdim, dtype=dtype), variance)


@rule(*named("cumsum"))
def cumsum(state: Pass, input: Any, dim: int, *, dtype: Any = None) -> MomentTensor:
    m, v = moments_of(input)
    return MomentTensor(m.cumsum(dim, dtype=dtype), v.cumsum(dim))


@rule(*named("amax"))
def amax(state: Pass, input: Any, dim: Any = (), keepdim: bool = False) -> MomentTensor:
    m, v = moments_of(input)
    mean, variance, kind = m.to(v.dtype), v, m.dtype
    for d in sorted(_dimensions(m, dim), reverse=True):
        if state.rules.max_pool == "argmax":
            where = mean.argmax(d, keepdim=True)
            mean, variance = mean.gather(d, where).squeeze(d), variance.gather(d, where).squeeze(d)
        else:
            mean, variance = maximum.along(mean, variance, d)
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
    mean, variance = maximum.larger((m1.to(kind), v1.to(kind)), (m2.to(kind), v2.to(kind)))
    return MomentTensor(mean.to(torch.result_type(m1, m2)), variance)


@rule(*named("minimum"))
def pairwise_minimum(state: Pass, input: Any, other: Any) -> MomentTensor:
    if input is other:
        return input
    (m1, v1), (m2, v2) = moments_of(input), moments_of(other)
    kind = v1.dtype if isinstance(input, MomentTensor) else v2.dtype
    mean, variance = maximum.larger((-m1.to(kind), v1.to(kind)), (-m2.to(kind), v2.to(kind)))
    return MomentTensor(-mean.to(torch.result_type(m1, m2)), variance)
