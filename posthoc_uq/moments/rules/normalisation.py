"""Layer, group, instance and root-mean-square normalisation, softmax and its logarithms: the delta method with the full
Jacobian, in linear time.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.moments.tensor import RULES, MomentTensor, Pass, full_precision, moments_of, named, rule


def _standardised(mean: Tensor, variance: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    """``h = (m - mean(m)) / s`` with ``s^2 = var(m) + mean(v) + eps`` over some dimensions, and its variance

    ``v_i / s^2 (1 - 2 (1 + h_i^2) / D) + (V_0 + 2 h_i V_1 + h_i^2 V_2) / (D^2 s^2)`` with ``V_k = sum_j v_j h_j^k``.
    """
    size = prod(mean.shape[d] for d in dims)
    centred = mean - mean.mean(dims, keepdim=True)
    inverse = (centred.square().mean(dims, keepdim=True) + variance.mean(dims, keepdim=True) + eps).rsqrt()
    h = centred * inverse
    weighted = variance * h
    v0, v1 = variance.sum(dims, keepdim=True), weighted.sum(dims, keepdim=True)
    v2 = (weighted * h).sum(dims, keepdim=True)
    shared = torch.addcmul(v0, torch.addcmul(2 * v1, h, v2), h)
    own_weight = (1 - 2 / size) - h.square() * (2 / size)
    spread = torch.addcmul(shared * (1 / size**2), variance, own_weight)
    return h, (spread * inverse.square()).clamp(min=0)


def _scaled(h: Tensor, variance: Tensor, weight: Any, bias: Any, kind: torch.dtype) -> MomentTensor:
    if weight is not None:
        wide = weight.to(variance)
        h, variance = h * weight, variance * wide.square()
    if bias is not None:
        h = h + bias
    return MomentTensor(h.to(kind), variance)


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    state: Pass,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> MomentTensor:
    m, v = moments_of(input)
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    dims = tuple(range(m.ndim - count, m.ndim))
    with full_precision(m):
        h, variance = _standardised(m.to(v.dtype), v, dims, eps)
        return _scaled(h, variance, weight, bias, m.dtype)


@rule(F.group_norm, torch.group_norm)
def group_norm(
    state: Pass, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> MomentTensor:
    m, v = moments_of(input)
    shape = (m.shape[0], num_groups, m.shape[1] // num_groups, *m.shape[2:])
    with full_precision(m):
        wide = m.to(v.dtype).reshape(shape)
        h, variance = _standardised(wide, v.reshape(shape), tuple(range(2, len(shape))), eps)
        return _scaled(
            h.reshape(m.shape),
            variance.reshape(m.shape),
            _channel(weight, m.ndim),
            _channel(bias, m.ndim),
            m.dtype,
        )


def _channel(tensor: Any, ndim: int) -> Any:
    return None if tensor is None else tensor.reshape(1, -1, *[1] * (ndim - 2))


@rule(F.instance_norm, torch.instance_norm)
def instance_norm(
    state: Pass,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> MomentTensor:
    if not use_input_stats:
        return RULES[F.batch_norm](
            state, input, running_mean, running_var, weight, bias, False, momentum, eps
        )  # type: ignore[no-any-return]
    m, v = moments_of(input)
    with full_precision(m):
        h, variance = _standardised(m.to(v.dtype), v, tuple(range(2, m.ndim)), eps)
        return _scaled(h, variance, _channel(weight, m.ndim), _channel(bias, m.ndim), m.dtype)


@rule(*named("rms_norm"))
def rms_norm(
    state: Pass, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> MomentTensor:
    """``h = m / s`` with ``s^2 = mean(m^2 + v) + eps``; ``(v_i (1 - 2 h_i^2 / D) + h_i^2 V_2 / D^2) / s^2``."""
    m, v = moments_of(input)
    dims = tuple(range(m.ndim - len(normalized_shape), m.ndim))
    eps = torch.finfo(m.dtype).eps if eps is None else eps
    with full_precision(m):
        wide = m.to(v.dtype)
        inverse = ((wide.square() + v).mean(dims, keepdim=True) + eps).rsqrt()
        h = wide * inverse
        size, squares = prod(m.shape[d] for d in dims), h.square()
        shared = (v * squares).sum(dims, keepdim=True) / size**2
        variance = (v * (1 - 2 * squares / size) + squares * shared) * inverse.square()
        return _scaled(h, variance.clamp(min=0), weight, None, m.dtype)


@rule(F.normalize)
def normalize(
    state: Pass, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> MomentTensor:
    if p != 2.0 or out is not None:
        return state.unknown(F.normalize, (input, p, dim, eps), {})  # type: ignore[no-any-return]
    m, v = moments_of(input)
    wide = m.to(v.dtype)
    inverse = wide.square().sum(dim, keepdim=True).sqrt().clamp(min=eps).reciprocal()
    h = wide * inverse
    squares = h.square()
    shared = (v * squares).sum(dim, keepdim=True)
    variance = (v * (1 - 2 * squares) + squares * shared) * inverse.square()
    return MomentTensor(h.to(m.dtype), variance.clamp(min=0))


@rule(*named("softmax"))
def softmax(
    state: Pass, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> MomentTensor:
    """``v_i = p_i^2 (v_i (1 - 2 p_i) + sum_j p_j^2 v_j)``."""
    m, v = moments_of(input)
    dim = (0 if m.ndim in (0, 1, 3) else 1) if dim is None else dim  # torch's default
    mean = m.softmax(dim, dtype=dtype)
    p = mean.to(v.dtype)
    squares = p.square()
    variance = squares * (v * (1 - 2 * p) + (squares * v).sum(dim, keepdim=True))
    result = MomentTensor(mean, variance.clamp(min=0))
    if dim in (-1, m.ndim - 1):
        result.moment_note = Weights(p, v)  # for attention's product with the values
    return result


class Weights:
    """What is known of attention weights: the softmax, and the variances of its arguments."""

    def __init__(self, probabilities: Tensor, score_variances: Tensor) -> None:
        self.probabilities = probabilities
        self.score_variances = score_variances


@rule(*named("log_softmax"))
def log_softmax(
    state: Pass, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> MomentTensor:
    """``v_i (1 - 2 p_i) + sum_j p_j^2 v_j``."""
    m, v = moments_of(input)
    dim = (0 if m.ndim in (0, 1, 3) else 1) if dim is None else dim
    mean = m.log_softmax(dim, dtype=dtype)
    p = mean.to(v.dtype).exp()
    return MomentTensor(mean, (v * (1 - 2 * p) + (p.square() * v).sum(dim, keepdim=True)).clamp(min=0))


@rule(*named("logsumexp"), torch.special.logsumexp)
def logsumexp(state: Pass, input: Any, dim: Any, keepdim: bool = False) -> MomentTensor:
    """``sum_j p_j^2 v_j``."""
    m, v = moments_of(input)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    p = (m.to(v.dtype) - m.to(v.dtype).logsumexp(dims, keepdim=True)).exp()
    return MomentTensor(m.logsumexp(dims, keepdim), (p.square() * v).sum(dims, keepdim=keepdim))
