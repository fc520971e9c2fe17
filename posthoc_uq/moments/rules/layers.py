"""Layers: linear ones and convolutions with the posterior of their weights, normalisations, softmax, matrix products,
attention.

``m_y = W m + b`` and ``v_y = (W o W) v + S (m^2 + v)`` for weights of variance S (element by element), the bias a
column with input 1. Fused: ``(W o W + S) v + S m^2``, two products more than the layer itself. Normalisations and
softmax go by the delta method with the full Jacobian, in linear time.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.layers import RULES as LAYER_RULES
from posthoc_uq.layers import AffineCall
from posthoc_uq.layers.rules import Lookup, Offset, Scale
from posthoc_uq.moments.rules.elementwise import add, times
from posthoc_uq.moments.tensor import (
    RULES,
    MomentTensor,
    Pass,
    WeightPosterior,
    full_precision,
    mean_of,
    moments_of,
    named,
    rule,
)


@rule(AffineCall)
def affine(state: Pass, call: AffineCall) -> MomentTensor:
    """The outputs of a layer, whatever its kind."""
    if isinstance(call.weight, MomentTensor) or isinstance(call.bias, MomentTensor):
        raise state.refusal(
            "a layer's weight is itself uncertain, being computed from another layer's output",
            "leave the layer that it comes from out of the fit with layers=...",
        )
    kind, posterior = LAYER_RULES[call.kind], state.posteriors.get(id(call.parameter))
    uncertain = isinstance(call.input, MomentTensor)
    m, v = (call.input.moment_mean, call.input.moment_variance) if uncertain else (call.input, None)
    if isinstance(kind, Lookup):
        return _lookup(call, posterior)
    if isinstance(kind, Offset):
        assert posterior is not None  # others are plain sums
        certain = torch.zeros_like(m, dtype=posterior.variances.dtype) if v is None else v
        return MomentTensor(call.applied(m, call.parameter, None), certain + posterior.variances)
    if isinstance(kind, Scale):
        return _convolution(call, m, v, posterior)
    if not kind.convolutional:
        return _linear(state, call, m, v, kind.to_matrix(call.parameter, 1).squeeze(0), posterior)
    if m.ndim == kind.dimensions - 1:
        raise state.refusal("a convolution was called on an input without a batch dimension", "add one")
    return _convolution(call, m, v, posterior)


def _linear(
    state: Pass,
    call: AffineCall,
    m: Tensor,
    v: Tensor | None,
    weight: Tensor,
    posterior: WeightPosterior | None,
) -> MomentTensor:
    mean = F.linear(m, weight, call.bias)
    with full_precision(m):
        if state.rules.cov == "full" and m.ndim == 2:
            return _full(call.input, mean, m, v, weight, posterior)
        wide = m.to(posterior.variances.dtype) if posterior is not None else m
        if posterior is None:
            assert v is not None
            variance = F.linear(v, weight.to(v).square())
        elif posterior.row and m.ndim == 2:
            variance = posterior.row_variance(wide, v)
            if v is not None:
                variance = variance + F.linear(v, weight.to(v).square())
        elif v is None:
            variance = F.linear(wide.square(), posterior.variances, posterior.bias_variances)
        else:
            variance = F.linear(v, posterior.summed, posterior.bias_variances)
            rows = variance.reshape(-1, variance.shape[-1])
            rows = torch.addmm(rows, wide.square().reshape(-1, wide.shape[-1]), posterior.variances.T)
            variance = rows.reshape(variance.shape)
    return MomentTensor(mean, variance)


def _full(
    input: Any, mean: Tensor, m: Tensor, v: Tensor | None, weight: Tensor, posterior: WeightPosterior | None
) -> MomentTensor:
    """Linear layers on ``(batch, inputs)`` with covariances: ``W C W^T`` plus the covariance by the weights."""
    covariance = input.moment_covariance if isinstance(input, MomentTensor) else None
    wide = weight.to(v if v is not None else m)
    total: Tensor | None = None
    if covariance is not None:
        total = wide @ covariance @ wide.T
    elif v is not None:
        total = (wide * v.unsqueeze(1)) @ wide.T
    if posterior is not None:
        kind = posterior.variances.dtype
        if covariance is None and v is not None:
            covariance = torch.diag_embed(v)
        by_weights = posterior.covariance(m.to(kind), None if covariance is None else covariance.to(kind))
        total = by_weights if total is None else total + by_weights
    assert total is not None
    return MomentTensor(mean, total.diagonal(dim1=1, dim2=2).clamp(min=0), total)


def _lookup(call: AffineCall, posterior: WeightPosterior | None) -> MomentTensor:
    """Rows of an embedding: their own means and variances."""
    assert posterior is not None  # numbers of rows are certain
    variances = call.applied(call.input, posterior.variances, None)
    return MomentTensor(call.applied(call.input, call.parameter, None), variances)


def _convolution(
    call: AffineCall, m: Tensor, v: Tensor | None, posterior: WeightPosterior | None
) -> MomentTensor:
    weight = call.parameter
    mean = call.applied(m, weight, call.bias)
    with full_precision(m):
        if posterior is None:
            assert v is not None
            return MomentTensor(mean, call.applied(v, weight.to(v).square(), None))
        wide = m.to(posterior.variances.dtype)
        if v is None:
            variance = call.applied(wide.square(), posterior.variances, posterior.bias_variances)
        elif call.groups == 1:
            variance = call.applied(
                torch.cat([v, wide.square()], dim=1), posterior.summed, posterior.bias_variances
            )
        else:
            variance = call.applied(v, posterior.summed, posterior.bias_variances)
            variance = variance + call.applied(wide.square(), posterior.variances, None)
    return MomentTensor(mean, variance)


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    state: Pass,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> MomentTensor:
    if training or running_mean is None:
        raise PosthocUQError(
            "BatchNorm without running statistics (training mode, or track_running_stats=False) mixes the samples of "
            "a batch, so that no moments belong to one of them; predict with head='sampling'."
        )
    (m, v), kind = moments_of(input), input.moment_variance.dtype
    with full_precision(m):
        scale = (running_var.to(kind) + eps).rsqrt()
        if weight is not None:
            scale = scale * weight.to(kind)
        shift = -running_mean.to(kind) * scale
        if bias is not None:
            shift = shift + bias.to(kind)
    covariance = input.moment_covariance
    if covariance is not None:
        covariance = covariance * scale.unsqueeze(1) * scale.unsqueeze(0)
    scale, shift = _channel(scale, m.ndim), _channel(shift, m.ndim)
    scaled = torch.addcmul(shift, m.to(scale), scale).to(m.dtype)
    return MomentTensor(scaled, v * scale.to(v).square(), covariance)


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


class AttentionWeights(NamedTuple):
    """What is known of attention weights: the softmax, and the variances of its arguments."""

    probabilities: Tensor
    score_variances: Tensor


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
        result.moment_note = AttentionWeights(p, v)  # for attention's product with the values
    return result


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


def products(state: Pass, function: Any, first: Any, second: Any) -> MomentTensor:
    """A bilinear function, such as a matrix product: ``v = v_A (m_B^2) + (m_A^2 + v_A) v_B``."""
    (m1, v1), (m2, v2) = moments_of(first), moments_of(second)
    mean = function(m1, m2)
    with full_precision(mean):
        kind = v1.dtype if isinstance(first, MomentTensor) else v2.dtype
        s1, s2 = m1.to(kind).square(), m2.to(kind).square()
        if not isinstance(second, MomentTensor):
            variance = function(v1, s2)
        elif not isinstance(first, MomentTensor):
            variance = function(s1, v2)
        else:
            variance = function(v1, s2) + function(s1 + v1, v2)
    return MomentTensor(mean, variance)


@rule(torch.einsum)
def einsum(state: Pass, equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])  # type: ignore[assignment]
    if len(operands) != 2:
        return state.unknown(torch.einsum, (equation, *operands), {})
    return products(state, lambda a, b: torch.einsum(equation, a, b), operands[0], operands[1])


def _bilinear(function: Any, state: Pass, *args: Any, **kwargs: Any) -> MomentTensor:
    first, second = (*args, *kwargs.values())
    return products(state, function, first, second)


for _function in named("mm", "mv", "dot", "inner", "outer"):
    RULES[_function] = partial(_bilinear, _function)


@rule(*named("baddbmm", "addmm"))
def added_product(
    state: Pass, input: Any, first: Any, second: Any, *, beta: float = 1, alpha: float = 1
) -> Any:
    uncertain = isinstance(first, MomentTensor) or isinstance(second, MomentTensor)
    product = products(state, torch.matmul, first, second) if uncertain else torch.matmul(first, second)
    scaled = times(state, product, torch.tensor(float(alpha), device="cpu"))
    return add(state, scaled, times(state, input, torch.tensor(float(beta), device="cpu")))


def attended(
    probabilities: Tensor, score_variances: Tensor, values: Tensor, value_variances: Tensor
) -> Tensor:
    """Variance of ``sum_j p_j V_j`` with ``p`` the softmax of scores of these variances.

    ``sum_j p_j^2 v_sj (V_j - o)^2 + p_j^2 v_Vj``: the delta method for softmax and product together, since weights
    that sum to one are not independent.
    """
    squares = probabilities.square()
    g = squares * score_variances
    output = probabilities @ values
    # only differences of values matter; about their mean fewer digits cancel
    shifted = values - values.mean(-2, keepdim=True)
    centred = output - values.mean(-2, keepdim=True)
    both = g @ torch.cat([shifted.square(), shifted], dim=-1)
    squared, plain = both.split(shifted.shape[-1], dim=-1)
    spread = squared - centred * (2 * plain - centred * g.sum(-1, keepdim=True))
    return spread.clamp(min=0) + squares @ value_variances


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    state: Pass,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> MomentTensor:
    if dropout_p > 0:
        raise state.refusal("attention has active dropout", "use dropout only in training")
    (mq, vq), (mk, vk), (mv, vv) = moments_of(query), moments_of(key), moments_of(value)
    with full_precision(mq):
        wide = next(x.moment_variance.dtype for x in (query, key, value) if isinstance(x, MomentTensor))
        q, k, values = mq.to(wide), mk.to(wide), mv.to(wide)
        vq, vk, vv = vq.to(wide), vk.to(wide), vv.to(wide)
        if enable_gqa and q.shape[-3] != k.shape[-3]:
            repeats = q.shape[-3] // k.shape[-3]
            k, vk = k.repeat_interleave(repeats, -3), vk.repeat_interleave(repeats, -3)
            values, vv = values.repeat_interleave(repeats, -3), vv.repeat_interleave(repeats, -3)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        scores = (q * factor) @ k.transpose(-1, -2)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, float("-inf"))
        if isinstance(attn_mask, Tensor):
            masked = attn_mask.dtype == torch.bool
            scores = (
                scores.masked_fill(~attn_mask, float("-inf"))
                if masked
                else scores + mean_of(attn_mask).to(wide)
            )
        queries = torch.cat([vq, q.square() + vq], dim=-1) * factor**2
        spread = queries @ torch.cat([k.square(), vk], dim=-1).transpose(-1, -2)
        if isinstance(attn_mask, MomentTensor):
            spread = spread + attn_mask.moment_variance
        p = scores.softmax(-1)
        if is_causal or attn_mask is not None:  # a query with every key masked gets zero, as in torch
            p = p.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
        return MomentTensor((p @ values).to(mv.dtype), attended(p, spread, values, vv))


@rule(*named("matmul", "bmm"), Tensor.__matmul__)
def matmul(state: Pass, input: Any, other: Any) -> MomentTensor:
    note = input.moment_note if isinstance(input, MomentTensor) else None
    if not isinstance(note, AttentionWeights) or mean_of(other).ndim < 2:
        return products(state, torch.matmul, input, other)
    (m, v), wide = moments_of(other), note.probabilities.dtype
    with full_precision(m):
        values, spread = m.to(wide), v.to(wide).expand(m.shape)
        variance = attended(note.probabilities, note.score_variances, values, spread)
    return MomentTensor(torch.matmul(input.moment_mean, m), variance)


@rule(Tensor.__rmatmul__)
def matmul_reversed(state: Pass, input: Any, other: Any) -> MomentTensor:
    return matmul(state, other, input)
