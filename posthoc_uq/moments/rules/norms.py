"""Norms, spreads and distances: roots of sums of squares.

The mean and the variance of a sum of squares of independent Gaussians are exact, and its root is that of a gamma
variable with these two, which a chi-squared one is.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.moments.rules.elementwise import div, sub
from posthoc_uq.moments.rules.pooling import amax, dimensions
from posthoc_uq.moments.rules.shape import getitem
from posthoc_uq.moments.tensor import RULES, MomentTensor, Pass, SumOf, mean_of, moments_of, named, rule
from posthoc_uq.moments.unscented import MeanAndVariance, rectified

_SERIES = 0.02  # squared relative deviations up to which the root of a gamma variable goes by its series


def root_of_gamma(mean: Tensor, variance: Tensor) -> MeanAndVariance:
    """Moments of the root of a gamma variable: ``E = sqrt(mean / k) Gamma(k + 1/2) / Gamma(k)`` with ``k = mean^2 /
    variance``, and ``mean - E^2``.
    """
    tiny = torch.finfo(mean.dtype).tiny
    ratio = variance / mean.square().clamp(min=tiny)  # 1 / k
    shape = 1 / ratio.clamp(min=_SERIES)
    factor = torch.exp(torch.lgamma(shape + 0.5) - torch.lgamma(shape)) * shape.rsqrt()
    near = 1 - ratio / 8 * (1 - ratio / 16)
    few = ratio < _SERIES
    factor = torch.where(few, near, factor)
    share = torch.where(few, ratio / 4 * (1 - ratio / 8), 1 - factor.square())
    return mean.clamp(min=0).sqrt() * factor, (mean * share).clamp(min=0)


def _norm_of(mean: Tensor, variance: Tensor, dims: tuple[int, ...], keepdim: bool) -> MeanAndVariance:
    squares = mean.square()
    return root_of_gamma(
        (squares + variance).sum(dims, keepdim),
        (2 * variance * (variance + 2 * squares)).sum(dims, keepdim),
    )


class NormOf(NamedTuple):
    """What is known of a norm: of which tensor it is.

    Attributes:
        source: that tensor.
        dims: over which it runs.
    """

    source: MomentTensor
    dims: tuple[int, ...]


def _vector_norm(
    state: Pass, input: Any, order: Any, dim: Any, keepdim: bool, again: tuple[Any, Any, Any]
) -> Any:
    """The norm of the numbers along some dimensions; `again` is the call, for orders without a rule."""
    if not isinstance(input, MomentTensor) or order not in (1, 2, float("inf")):
        return state.unknown(*again)
    m, v = input.moment_mean, input.moment_variance
    dims, wide = dimensions(m, dim), m.to(v.dtype)
    if order == 2:
        mean, variance = _norm_of(wide, v, dims, keepdim)
        result = MomentTensor(mean.to(m.dtype), variance)
        result.moment_note = NormOf(input, dims)
        return result
    size, spread = rectified(wide, v, -1.0)
    if order == 1:
        return MomentTensor(size.sum(dims, keepdim).to(m.dtype), spread.sum(dims, keepdim))
    return amax(state, MomentTensor(size.to(m.dtype), spread), dims, keepdim)


@rule(torch.linalg.vector_norm)
def vector_norm(
    state: Pass, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    again = torch.linalg.vector_norm, (x, ord, dim, keepdim), {"dtype": dtype}
    return state.unknown(*again) if dtype is not None else _vector_norm(state, x, ord, dim, keepdim, again)


@rule(torch.norm, Tensor.norm)
def norm(
    state: Pass,
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    again = torch.norm, (input, p, dim, keepdim), {"dtype": dtype}
    order = 2 if p in ("fro", None) else p
    return (
        state.unknown(*again) if dtype is not None else _vector_norm(state, input, order, dim, keepdim, again)
    )


@rule(torch.linalg.norm, torch.linalg.matrix_norm)
def any_norm(
    state: Pass, A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    again = torch.linalg.norm, (A, ord, dim, keepdim), {"dtype": dtype}
    vectors = isinstance(dim, int) or (dim is None and mean_of(A).ndim == 1)
    if dtype is not None or not (ord in (None, "fro") or vectors):
        return state.unknown(*again)
    return _vector_norm(state, A, 2 if ord in (None, "fro") else ord, dim, keepdim, again)


def _by_own_part(state: Pass, input: Any, other: Any, **options: Any) -> Any:
    """``x / |x|`` and ``x / sum(x)``: numerator and divisor vary together."""
    note = other.moment_note if isinstance(other, MomentTensor) else None
    if options or not isinstance(note, (NormOf, SumOf)) or note.source is not input:
        return div(state, input, other, **options)
    if isinstance(note, SumOf):
        return _shares(input, other.moment_mean, note)
    kept = tuple(1 if d in note.dims else size for d, size in enumerate(input.moment_mean.shape))
    if other.moment_mean.numel() != 1 and tuple(other.moment_mean.shape) != kept:
        return div(state, input, other)
    length = other.moment_mean.to(input.moment_variance.dtype)
    return _divided(input, length.reshape(kept), note.dims)


def _divided(x: MomentTensor, length: Tensor, dims: tuple[int, ...]) -> MomentTensor:
    """``x / |x|`` with the mean length: ``h = m / E|x|``, ``(v_i (1 - 2 h_i^2) + h_i^2 sum_j v_j h_j^2) / E|x|^2``."""
    v = x.moment_variance
    h = x.moment_mean.to(v.dtype) / length
    squares = h.square()
    shared = (v * squares).sum(dims, keepdim=True)
    variance = (v * (1 - 2 * squares) + squares * shared) / length.square()
    return MomentTensor(h.to(x.moment_mean.dtype), variance.clamp(min=0))


def _length(m: Tensor, v: Tensor, dim: int, eps: float) -> Tensor:
    return _norm_of(m, v, (dim,), True)[0].clamp(min=eps)


@rule(F.normalize)
def normalize(
    state: Pass, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    if p != 2.0:
        return state.unknown(F.normalize, (input, p, dim, eps), {})
    m, v = moments_of(input)
    return _divided(input, _length(m.to(v.dtype), v, dim, eps), (dim,))


for _function in (*named("div", "divide", "true_divide"), Tensor.__truediv__):
    RULES[_function] = _by_own_part


def _shares(x: MomentTensor, total: Tensor, note: SumOf) -> Any:
    """``r = x / S`` with ``S`` the sum over x: ``(v_i (1 - 2 r_i) + r_i^2 sum_j v_j) / S^2``, by the delta method."""
    v = x.moment_variance
    wide = total.to(v.dtype)
    r = x.moment_mean.to(v.dtype) / wide
    variance = (v * (1 - 2 * r) + r.square() * note.total(v)) / wide.square()
    return MomentTensor(r.to(x.moment_mean.dtype), variance.clamp(min=0))


def _keeping_note(inner: Any, moves: bool, state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that changes the form of a norm or a sum, if it `moves`, or adds a small number to it."""
    result = inner(state, input, *args, **kwargs)
    note = input.moment_note if isinstance(input, MomentTensor) else None
    certain = not any(isinstance(x, MomentTensor) for x in (*args, *kwargs.values()))
    if not certain or not isinstance(result, MomentTensor):
        return result
    if isinstance(note, NormOf) and result.moment_mean.numel() == input.moment_mean.numel():
        result.moment_note = note
    elif isinstance(note, SumOf) and moves:
        result.moment_note = SumOf(
            note.source,
            lambda y: inner(state, MomentTensor(note.total(y), note.total(y)), *args, **kwargs).moment_mean,
        )
    elif isinstance(note, SumOf) and result.moment_mean.shape == input.moment_mean.shape:
        result.moment_note = note
    return result


for _function in named(
    "unsqueeze", "squeeze", "reshape", "view", "expand", "index_select", "gather", "repeat_interleave"
):
    RULES[_function] = partial(_keeping_note, RULES[_function], True)
RULES[Tensor.__getitem__] = partial(_keeping_note, getitem, True)
for _function in (*named("add", "clamp", "clamp_min"), Tensor.__add__, Tensor.__radd__):
    RULES[_function] = partial(_keeping_note, RULES[_function], False)


def _noting_sum(inner: Any, state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
    result = inner(state, input, *args, **kwargs)
    if isinstance(input, MomentTensor):
        result.moment_note = SumOf(input, lambda y: y.sum(*args, **kwargs))
    return result


for _function in named("sum"):
    RULES[_function] = partial(_noting_sum, RULES[_function])


def _variance_of(input: MomentTensor, dim: Any, keepdim: bool, correction: float) -> MeanAndVariance:
    """Moments of ``sum_i (x_i - mean(x))^2 / (D - correction)``, exact for independent Gaussians."""
    m, v = input.moment_mean, input.moment_variance
    dims = dimensions(m, dim)
    size, wide = prod(m.shape[d] for d in dims), m.to(v.dtype)
    squares = (wide - wide.mean(dims, keepdim=True)).square()
    mean = (squares + v * (1 - 1 / size)).sum(dims, keepdim)
    own = (2 * v.square() * (1 - 2 / size) + 4 * squares * v).sum(dims, keepdim)
    variance = own + 2 * v.sum(dims, keepdim).square() / size**2
    divisor = max(0.0, size - correction)
    return mean / divisor, variance.clamp(min=0) / divisor**2


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float, bool]:
    """Dimensions, correction and `keepdim` of the forms of `torch.var`."""
    names = ("unbiased",) if args and isinstance(args[0], bool) else ("dim", "unbiased", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    correction = given.get("correction")
    if correction is None:
        correction = 1.0 if given.get("unbiased", True) else 0.0
    return given.get("dim", given.get("axis")), float(correction), bool(given.get("keepdim", False))


@rule(*named("var"))
def var(state: Pass, input: Any, *args: Any, **kwargs: Any) -> MomentTensor:
    dim, correction, keepdim = _arguments(args, kwargs)
    mean, variance = _variance_of(input, dim, keepdim, correction)
    return MomentTensor(mean.to(input.moment_mean.dtype), variance)


@rule(*named("std"))
def std(state: Pass, input: Any, *args: Any, **kwargs: Any) -> MomentTensor:
    dim, correction, keepdim = _arguments(args, kwargs)
    mean, variance = root_of_gamma(*_variance_of(input, dim, keepdim, correction))
    return MomentTensor(mean.to(input.moment_mean.dtype), variance)


def _with_mean(spread: Any, function: Any, state: Pass, input: Any, *args: Any, **kwargs: Any) -> Any:
    dim, _, keepdim = _arguments(args, kwargs)
    return spread(state, input, *args, **kwargs), function(state, input, dim, keepdim)


for _name, _spread in {"var_mean": var, "std_mean": std}.items():
    RULES[getattr(torch, _name)] = partial(_with_mean, _spread, RULES[torch.mean])


@rule(F.cosine_similarity)
def cosine_similarity(state: Pass, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> MomentTensor:
    """``c = sum_i h_i h'_i`` of the two divided by their mean lengths, and ``sum_i v_i ((h'_i - c h_i) / E|x|)^2`` for
    each of the two.
    """
    wide = next(x.moment_variance.dtype for x in (x1, x2) if isinstance(x, MomentTensor))
    pairs = [(m.to(wide), v.to(wide)) for m, v in map(moments_of, (x1, x2))]
    lengths = [_length(m, v, dim, eps) for m, v in pairs]
    units = [m / length for (m, _), length in zip(pairs, lengths, strict=True)]
    cosine = (units[0] * units[1]).sum(dim, keepdim=True)
    total = torch.zeros_like(cosine)
    for (_, v), own, other, length in zip(pairs, units, units[::-1], lengths, strict=True):
        total = total + (v * ((other - cosine * own) / length).square()).sum(dim, keepdim=True)
    return MomentTensor(cosine.squeeze(dim).to(mean_of(x1).dtype), total.squeeze(dim))


@rule(torch.cdist)
def cdist(state: Pass, x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    if p != 2.0:
        return state.unknown(torch.cdist, (x1, x2, p), {})
    parts = [
        MomentTensor(x.moment_mean.unsqueeze(d), x.moment_variance.unsqueeze(d))
        if isinstance(x, MomentTensor)
        else x.unsqueeze(d)
        for x, d in ((x1, -2), (x2, -3))
    ]
    return vector_norm(state, sub(state, *parts), dim=-1)


@rule(F.pairwise_distance)
def pairwise_distance(
    state: Pass, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    difference = sub(state, x1, x2)
    shifted = MomentTensor(difference.moment_mean + eps, difference.moment_variance)
    return vector_norm(state, shifted, p, -1, keepdim)
