"""Outputs of layers drawn by local reparametrisation, wherever their weights are used (Kingma, Salimans, Welling 2015,
"Variational dropout and the local reparameterization trick").

For independent weights with means M and variances V the outputs of an affine map are drawn from
``N(M o + E[b], V o^2 + Var[b])``, independently for every sample, output and position. Mean and variance are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posthoc_uq.affine import AffineCall, affine_call
from posthoc_uq.attention import open_attention

LEAST_VARIANCE = 1e-16
"""Below it the variance of an output is not taken to its root, whose gradient is infinite at 0."""

_CONVOLUTIONS = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}


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
    if call.kind in _CONVOLUTIONS:
        return _CONVOLUTIONS[call.kind](input, weight, bias, **call.options)
    return F.linear(input, weight.t() if call.kind == "matmul" else weight, bias)
