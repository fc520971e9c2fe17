"""Calls that apply a weight to an input, attention opened up, outputs drawn by local reparametrisation."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posthoc_uq.core.numerics import CONVOLUTIONS

# Calls that apply a weight to an input (``linear``, convolutions, matrix products), recognised by their
# arguments.
#
# In ``x @ W`` the weight ``(inputs, outputs)`` is that of a linear layer, transposed: kind ``"matmul"``. ``x
# @ W.T`` is the same as ``linear``.

_LINEAR = {name: name for name in ("input", "weight", "bias")}
_CONVOLUTION = {name: name for name in (*_LINEAR, "stride", "padding", "dilation", "groups")}
_MATMUL = {"input": "input", "other": "weight"}
_MM = {"input": "input", "mat2": "weight"}
_ADDMM = {"input": "bias", "mat1": "input", "mat2": "weight"}

# For every function: the names of its parameters in order, each with its role in an affine map.
_CALLS: dict[Any, tuple[str, dict[str, str]]] = {
    F.linear: ("linear", _LINEAR),
    **{function: (f"conv{dims}d", _CONVOLUTION) for dims, function in CONVOLUTIONS.items()},
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


# Multi-head attention whose inner calls a function mode can see: projections, products, a softmax.


def _opened() -> Callable[..., Any]:
    """`F.multi_head_attention_forward` with visible inner calls.

    Torch's own function would show itself to a function mode as one opaque call, again and again.
    """
    function = F.multi_head_attention_forward
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    opened = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


open_attention: Callable[..., Any] = _opened()


# Outputs of layers drawn by local reparametrisation, wherever their weights are used (Kingma, Salimans,
# Welling 2015, "Variational dropout and the local reparameterization trick").
#
# For independent weights with means M and variances V the outputs of an affine map are drawn from ``N(M o +
# E[b], V o^2 + Var[b])``, independently for every sample, output and position. Mean and variance are exact.

LEAST_VARIANCE = 1e-16
"""Below it the variance of an output is not taken to its root, whose gradient is infinite at 0."""

_BY_KIND = {f"conv{dims}d": function for dims, function in CONVOLUTIONS.items()}


@dataclass(frozen=True)
class WeightMoments:
    """Means and variances of a layer's independent weights, in the shapes of its parameters.

    Attributes:
        mean: of the weights.
        variance: likewise.
        bias_mean: None for the bias of the call.
        bias_variance: None for a certain bias.
    """

    mean: Tensor
    variance: Tensor
    bias_mean: Tensor | None = None
    bias_variance: Tensor | None = None


class AffineCalls(TorchFunctionMode):
    """Has given functions compute the outputs of layers, wherever a weight is used.

    Args:
        outputs: by the identity of the weight that the running network holds; from a call to its outputs.

    Attributes:
        used: the identities of the weights that were used, once for each use.
    """

    def __init__(self, outputs: Mapping[int, Callable[[AffineCall], Tensor]]) -> None:
        super().__init__()
        self._outputs = outputs
        self.used: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return open_attention(*args, **kwargs)
        call = affine_call(func, args, kwargs)
        if call is None or id(call.parameter) not in self._outputs:
            return func(*args, **kwargs)
        self.used.append(id(call.parameter))
        return self._outputs[id(call.parameter)](call)


def drawn_outputs(call: AffineCall, weights: WeightMoments, generator: torch.Generator) -> Tensor:
    """A draw of a layer's outputs for given inputs.

    Args:
        call: the use of the layer's weight.
        weights: what is drawn in its place.
        generator: on the device of the outputs.
    """
    bias = call.bias if weights.bias_mean is None else weights.bias_mean
    mean = _applied(call, call.input, weights.mean, bias)
    with torch.autocast(mean.device.type, enabled=False):  # squares leave the range of half precision
        squares = call.input.to(weights.variance).square()
        variance = _applied(call, squares, weights.variance, weights.bias_variance).clamp(min=LEAST_VARIANCE)
    return mean + (variance.sqrt_() * normal(variance, generator)).to(mean)


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normals in the shape and the number format of a tensor, on its device."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _applied(call: AffineCall, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The call with another input, weight and bias."""
    if call.kind in _BY_KIND:
        return _BY_KIND[call.kind](input, weight, bias, **call.options)
    return F.linear(input, weight.t() if call.kind == "matmul" else weight, bias)
