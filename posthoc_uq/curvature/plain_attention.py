"""Attention by plain operations, for transforms that torch's fused kernels do not support."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.curvature.hooks import CallInterceptor


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` without dropout, from operations that have forward derivatives."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


class PlainAttention(CallInterceptor):
    """Replaces fused attention, which does not support `vmap` and forward differentiation, by plain operations; the
    base class opens multi-head attention.
    """

    def __init__(self) -> None:
        super().__init__(set(), lambda use, output: None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
