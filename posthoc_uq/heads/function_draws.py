"""Draws of the linearised model's function: ``J (theta_r - theta)`` by forward-mode differentiation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from posthoc_uq.curvature.hooks import CallInterceptor
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.forward import jvp
from posthoc_uq.loaders import Batch, output_tensor

# `functional_call` puts the weights into the module for as long as it runs: calls in several threads take turns.
_SWAPPING = threading.RLock()


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
    """Replaces fused attention, which `vmap` and forward differentiation have no rule for; the interceptor opens
    multi-head attention.
    """

    def __init__(self) -> None:
        super().__init__(set(), lambda use, output: None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def function_draws(model: nn.Module, batch: Batch, deviations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs, and their derivatives along some deviations of the weights.

    Args:
        model: in eval mode; nothing else may run it meanwhile.
        batch: its inputs.
        deviations: parameter name to ``(draws, *shape)``.

    Returns:
        Outputs ``(samples, ...)`` and derivatives ``(draws, samples, ...)``.

    Raises:
        PosthocUQError: some operation of the model has no forward derivative.
    """
    parameters = dict(model.named_parameters())
    centre = {name: parameters[name].detach() for name in deviations}
    draws = len(next(iter(deviations.values())))

    def run(weights: dict[str, Tensor]) -> Tensor:
        return output_tensor(
            batch.copied().call_any(lambda *args, **kwargs: functional_call(model, weights, args, kwargs))
        )

    outputs, found = None, list[Tensor]()
    with _SWAPPING, torch.no_grad(), PlainAttention():
        for draw in range(draws):
            tangent = {name: deviation[draw] for name, deviation in deviations.items()}
            try:
                found_pair = jvp(run, (centre,), (tangent,))
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                if not any(word in reason for word in ("forward AD", "forward mode", "autograd.Function")):
                    raise
                raise PosthocUQError(
                    f"engine='jvp' needs forward derivatives, and the model has an operation without one ({reason}); "
                    f"use engine='exact'."
                ) from error
            outputs, derivative = found_pair[0], found_pair[1]
            found.append(derivative)
    assert outputs is not None
    return outputs, torch.stack(found)
