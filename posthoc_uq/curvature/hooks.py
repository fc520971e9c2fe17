"""Catching uses of a weight wherever they happen: ``linear``, ``conv`` and products with tracked parameters.

This is the other engine beside BackPACK. It follows the parameter, not the module, so it also sees shared modules, tied
weights, autocast, weights used through `torch.nn.functional`, and layers whose output is changed in place afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posthoc_uq.affine import AffineCall, affine_call
from posthoc_uq.attention import open_attention
from posthoc_uq.layers import Geometry


@dataclass
class Use:
    """One call of ``linear`` or ``conv`` on a tracked weight, or a product with it.

    Attributes:
        weight: the parameter itself.
        product: whether it was a product of matrices.
    """

    kind: str
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    groups: int
    product: bool = False


UseHandler = Callable[[Use, Tensor], None]


class CallInterceptor(TorchFunctionMode):
    """Reports every ``linear``, ``conv`` or product whose weight is tracked to `handler`, with the call's output.

    Args:
        tracked: identities of the parameters to look for.
        handler: called with the use and its output while the forward pass runs.
        anchored: whether a backward pass will follow: then only calls with gradients enabled count, and their outputs
            are made part of the graph.
    """

    def __init__(self, tracked: set[int], handler: UseHandler, *, anchored: bool = True) -> None:
        super().__init__()
        self._tracked = tracked
        self._handler = handler
        self._anchored = anchored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return open_attention(*args, **kwargs)
        output = func(*args, **kwargs)
        if self._anchored and not torch.is_grad_enabled():
            return output
        call = affine_call(func, args, kwargs)
        if call is not None and id(call.parameter) in self._tracked:
            use = _use(call)
            if self._anchored and not output.requires_grad:
                output = _anchor(output)  # the first layer: nothing before it needs a gradient
            self._handler(use, output)
        return output


class _Anchor(torch.autograd.Function):
    """Makes a tensor part of the graph, but no leaf, since the model could not change a leaf in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, needs_gradient: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _anchor(tensor: Tensor) -> Tensor:
    return _Anchor.apply(tensor, torch.empty((), device=tensor.device, requires_grad=True))  # type: ignore[no-any-return]


def _use(call: AffineCall) -> Use:
    options, geometry = call.options, Geometry()
    if call.kind.startswith("conv"):
        dims, padding = call.parameter.ndim - 2, options.get("padding", 0)
        geometry = Geometry(
            stride=_tuple(options.get("stride", 1), dims),
            padding=padding if isinstance(padding, str) else _tuple(padding, dims),
            dilation=_tuple(options.get("dilation", 1), dims),
        )
    groups = int(options.get("groups", 1))
    return Use(call.kind, call.input, call.parameter, call.bias, geometry, groups, call.product)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    values = tuple(int(v) for v in value)
    return values * dims if len(values) == 1 else values
