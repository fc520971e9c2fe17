"""Calls that apply a weight to an input: ``linear``, convolutions and products with it, told from their arguments.

A weight of shape ``(inputs, outputs)`` in ``x @ W`` is a linear layer's, transposed: kind ``"matmul"``. ``x @ W.T`` is
what ``linear`` computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LINEAR = {name: name for name in ("input", "weight", "bias")}
_CONVOLUTION = {name: name for name in (*_LINEAR, "stride", "padding", "dilation", "groups")}
_MATMUL = {"input": "input", "other": "weight"}
_MM = {"input": "input", "mat2": "weight"}
_ADDMM = {"input": "bias", "mat1": "input", "mat2": "weight"}

# Public names of a function's parameters, in their order, to what they are in an affine map.
_CALLS: dict[Any, tuple[str, dict[str, str]]] = {
    F.linear: ("linear", _LINEAR),
    F.conv1d: ("conv1d", _CONVOLUTION),
    F.conv2d: ("conv2d", _CONVOLUTION),
    F.conv3d: ("conv3d", _CONVOLUTION),
    torch.matmul: ("product", _MATMUL),
    Tensor.matmul: ("product", _MATMUL),
    Tensor.__matmul__: ("product", _MATMUL),
    Tensor.__rmatmul__: ("product", {"self": "weight", "other": "input"}),
    torch.mm: ("product", _MM),
    Tensor.mm: ("product", _MM),
    torch.addmm: ("product", _ADDMM),
    Tensor.addmm: ("product", _ADDMM),
}
_NEUTRAL = {"beta": 1, "alpha": 1, "out": None}


@dataclass(frozen=True)
class AffineCall:
    """One call.

    Attributes:
        kind: of the layer: ``"linear"``, ``"matmul"`` or a convolution's.
        input: what the weight is applied to.
        weight: as it was given.
        parameter: the tensor that the weight is, or is the transpose of.
        bias: or None.
        product: whether it was a product of matrices rather than a layer's own function.
        rest: a convolution's other arguments.
    """

    kind: str
    input: Any
    weight: Tensor
    parameter: Tensor
    bias: Any
    product: bool
    rest: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())

    @property
    def matrix(self) -> Tensor:
        """The parameter as ``linear`` takes a weight, outputs first."""
        return self.parameter.t() if self.kind == "matmul" else self.parameter


def affine_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AffineCall | None:
    """What a call of a torch function applies to what; None where it is no such call."""
    found = _CALLS.get(func)
    if found is None:
        return None
    kind, roles = found
    given = dict(zip(roles.values(), args, strict=False))
    given |= {roles.get(name, name): value for name, value in kwargs.items()}
    input, weight, bias = given.pop("input", None), given.pop("weight", None), given.pop("bias", None)
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        return None
    if kind.startswith("conv"):
        return AffineCall(kind, input, weight, weight, bias, False, given)
    if kind == "linear":
        parameter = _transposed_of(weight)
        if parameter is not None:
            return AffineCall("matmul", input, weight, parameter, bias, True)
        return AffineCall("linear", input, weight, weight, bias, False)
    if any(given[name] != _NEUTRAL.get(name) for name in given):
        return None
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        if input.ndim < 2 or weight.ndim != 2:
            return None
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[1:]):
            return None  # not a bias, but something else that the product is added to
    parameter = _transposed_of(weight)
    if parameter is not None:
        return AffineCall("linear", input, weight, parameter, bias, True)
    return AffineCall("matmul", input, weight, weight, bias, True)


def _transposed_of(weight: Tensor) -> Tensor | None:
    """The matrix that `weight` is the transpose of, if it is a view of one."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        base = weight._base
        if base is None or base.ndim != 2 or weight.ndim != 2:
            return None
        turned = weight.shape == base.shape[::-1] and weight.stride() == base.stride()[::-1]
        return base if turned and weight.storage_offset() == base.storage_offset() else None
