"""Attention: a softmax of products of uncertain queries and keys, times uncertain values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.moments.rules.arithmetic import products
from posthoc_uq.moments.rules.normalisation import Weights
from posthoc_uq.moments.tensor import MomentTensor, Pass, full_precision, mean_of, moments_of, named, rule


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
                else scores + _mean(attn_mask).to(wide)
            )
        queries = torch.cat([vq, q.square() + vq], dim=-1) * factor**2
        spread = queries @ torch.cat([k.square(), vk], dim=-1).transpose(-1, -2)
        if isinstance(attn_mask, MomentTensor):
            spread = spread + attn_mask.moment_variance
        p = scores.softmax(-1)
        if is_causal or attn_mask is not None:  # a query with every key masked gets zero, as in torch
            p = p.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
        return MomentTensor((p @ values).to(mv.dtype), attended(p, spread, values, vv))


def _mean(mask: Tensor) -> Tensor:
    return mask.moment_mean if isinstance(mask, MomentTensor) else mask


@rule(*named("matmul", "bmm"), Tensor.__matmul__)
def matmul(state: Pass, input: Any, other: Any) -> MomentTensor:
    note = input.moment_note if isinstance(input, MomentTensor) else None
    if not isinstance(note, Weights) or mean_of(other).ndim < 2:
        return products(state, torch.matmul, input, other)
    (m, v), wide = moments_of(other), note.probabilities.dtype
    with full_precision(m):
        values, spread = m.to(wide), v.to(wide).expand(m.shape)
        variance = attended(note.probabilities, note.score_variances, values, spread)
    return MomentTensor(torch.matmul(input.moment_mean, m), variance)


@rule(Tensor.__rmatmul__)
def matmul_reversed(state: Pass, input: Any, other: Any) -> MomentTensor:
    return matmul(state, other, input)
