"""Calls that apply a weight to an input (``linear``, convolutions, matrix products), recognised by their arguments.

In ``x @ W`` the weight ``(inputs, outputs)`` is that of a linear layer, transposed: kind ``"matmul"``. ``x @ W.T`` is
the same as ``linear``.
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

# For every function: the names of its parameters in order, each with its role in an affine map.
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
        input: the tensor that the weight is applied to.
        weight: as it was given.
        parameter: the weight itself, or the tensor of which it is the transpose.
        bias: or None.
        product: whether it was a product of matrices rather than a layer's own function.
        options: a convolution's other arguments.
    """

    kind: str
    input: Any
    weight: Tensor
    parameter: Tensor
    bias: Any
    product: bool
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())

    @property
    def matrix(self) -> Tensor:
        """The parameter as ``linear`` takes a weight, outputs first."""
        return self.parameter.t() if self.kind == "matmul" else self.parameter


def affine_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AffineCall | None:
    """A call of a torch function as an `AffineCall`; None where it is no such call."""
    known = _CALLS.get(func)
    if known is None:
        return None
    kind, roles = known
    arguments = dict(zip(roles.values(), args, strict=False))
    arguments |= {roles.get(name, name): value for name, value in kwargs.items()}
    input, weight, bias = (
        arguments.pop("input", None),
        arguments.pop("weight", None),
        arguments.pop("bias", None),
    )
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        return None
    if kind.startswith("conv"):
        return AffineCall(kind, input, weight, weight, bias, False, arguments)
    if kind == "linear":
        parameter = _transposed_of(weight)
        if parameter is not None:
            return AffineCall("matmul", input, weight, parameter, bias, True)
        return AffineCall("linear", input, weight, weight, bias, False)
    if any(arguments[name] != _NEUTRAL.get(name) for name in arguments):
        return None
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        if input.ndim < 2 or weight.ndim != 2:
            return None
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[1:]):
            return None  # the product is added to something that is no bias
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
        transposed = weight.shape == base.shape[::-1] and weight.stride() == base.stride()[::-1]
        return base if transposed and weight.storage_offset() == base.storage_offset() else None
