"""Linear layers and convolutions, with the posterior of their weights, and BatchNorm.

``m_y = W m + b`` and ``v_y = (W o W) v + S (m^2 + v)`` for weights of variance S (element by element), the bias a
column with input 1. Fused: ``(W o W + S) v + S m^2``, two products more than the layer itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.layers import RULES, AffineCall, LayerRule
from posthoc_uq.moments.tensor import MomentTensor, Pass, WeightPosterior, full_precision, moments_of, rule
from posthoc_uq.moments.unscented import is_recorded


def _refuse_uncertain(state: Pass, weight: Any, bias: Any) -> None:
    if isinstance(weight, MomentTensor) or isinstance(bias, MomentTensor):
        raise state.refusal(
            "a layer's weight is itself uncertain, being computed from another layer's output",
            "leave the layer that it comes from out of the fit with layers=...",
        )


@rule(AffineCall)
def affine(state: Pass, call: AffineCall) -> MomentTensor:
    """The outputs of a layer, whatever its kind."""
    _refuse_uncertain(state, call.weight, call.bias)
    kind, posterior = RULES[call.kind], state.posteriors.of(call.parameter)
    uncertain = isinstance(call.input, MomentTensor)
    m, v = (call.input.moment_mean, call.input.moment_variance) if uncertain else (call.input, None)
    if not kind.convolutional:
        return _linear(state, call, m, v, kind.to_matrix(call.parameter, 1).squeeze(0), posterior)
    if m.ndim == kind.dimensions - 1:
        raise state.refusal("a convolution was called on an input without a batch dimension", "add one")
    return _convolution(call, kind, m, v, posterior)


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
            variance = F.linear(v, _summed(posterior, weight), posterior.bias_variances)
            rows = variance.reshape(-1, variance.shape[-1])
            rows = torch.addmm(
                rows, wide.square().reshape(-1, wide.shape[-1]), posterior.variances.T, out=_reused(rows)
            )
            variance = rows.reshape(variance.shape)
    return MomentTensor(mean, variance)


def _reused(tensor: Tensor) -> Tensor | None:
    """The tensor itself, to be overwritten by a result, or None where that would be recorded."""
    return None if is_recorded(tensor, tensor) else tensor


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


def _summed(posterior: WeightPosterior, weight: Tensor) -> Tensor:
    """``W o W + S``, prepared or computed now."""
    prepared = posterior.summed
    return posterior.variances + weight.square() if prepared is None else prepared


def _convolution(
    call: AffineCall, kind: LayerRule, m: Tensor, v: Tensor | None, posterior: WeightPosterior | None
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
            joined = posterior.joined
            if joined is None:
                parts = [_summed(posterior, weight), posterior.variances]
                joined = torch.cat(parts, dim=kind.input_axis)
            variance = call.applied(_beside(v, wide), joined, posterior.bias_variances)
        else:
            variance = call.applied(v, _summed(posterior, weight), posterior.bias_variances)
            by_weights = call.applied(wide.square(), posterior.variances, None)
            variance = torch.add(variance, by_weights, out=_reused(variance))
    return MomentTensor(mean, variance)


def _beside(variance: Tensor, mean: Tensor) -> Tensor:
    """Variances and squared means as channels of one tensor, for one convolution instead of two and a sum."""
    if is_recorded(mean, variance):
        return torch.cat([variance, mean.square()], dim=1)
    channels = mean.shape[1]
    joined = variance.new_empty(mean.shape[0], 2 * channels, *mean.shape[2:])
    joined[:, :channels] = variance
    torch.mul(mean, mean, out=joined[:, channels:])
    return joined


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
    result = MomentTensor(m, v, covariance)
    result.moment_scaling = scale, shift
    return result
