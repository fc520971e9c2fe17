"""Weighted layers as matrices: which weights a layer has, and its inputs and output gradients as rows.

A Linear or convolution layer is ``groups`` matrices of shape ``(outputs, inputs)``; the bias is the last
input column, whose activation is the constant 1 (Lee et al. 2020, section 2.1). Sample ``s`` at position
``t`` has activations ``a`` of length ``inputs`` and output gradients ``g`` of length ``outputs``; the
per-sample weight gradient is the sum of ``g a^T`` over the positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.errors import UnsupportedLayerError

# Where the samples are in a linear layer's input: in the leading dimension (one sample's rows together), in
# the second one, or in
# the leading one with the samples varying fastest, as in the flattened (tokens, samples) rows of multi-head
# attention.
BATCH_AXES = (0, 1, INTERLEAVED := -1)

WEIGHTED_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Layer:
    """One weighted layer: its parameters by name, and the shape of its matrix view.

    Attributes:
        name: dotted module name, or the parameter's name where a module holds several weights.
        kind: ``"linear"``, ``"conv1d"``, ``"conv2d"`` or ``"conv3d"``.
        weight: name of the weight in ``model.named_parameters()``.
        bias: name of the bias, or None.
        groups: number of blocks; 1 except for grouped convolutions.
        outputs: outputs of one group (m).
        inputs: inputs of one group, the bias column included (n).
        weight_shape: shape of the weight as the model holds it.
    """

    name: str
    kind: str
    weight: str
    bias: str | None
    groups: int
    outputs: int
    inputs: int
    weight_shape: tuple[int, ...]

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Shape ``(groups, outputs, inputs)`` of the matrix view."""
        return self.groups, self.outputs, self.inputs

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return prod(self.matrix_shape)

    @property
    def parameter_names(self) -> list[str]:
        """Names of the layer's parameters, the weight first."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weights ``(*lead, *weight_shape)`` and biases ``(*lead, outputs)`` as ``(*lead, groups, outputs,
        inputs)``.
        """
        lead = weight.shape[: weight.ndim - len(self.weight_shape)]
        matrix = weight.reshape(*lead, self.groups, self.outputs, -1)
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.reshape(*lead, self.groups, self.outputs, 1)], dim=-1)

    def to_parameters(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `to_matrix`, by parameter name."""
        lead = matrix.shape[:-3]
        if self.bias is None:
            return {self.weight: matrix.reshape(*lead, *self.weight_shape)}
        return {
            self.weight: matrix[..., :-1].reshape(*lead, *self.weight_shape),
            self.bias: matrix[..., -1].reshape(*lead, self.groups * self.outputs),
        }

    def attributes(self) -> dict[str, Any]:
        """Plain values from which `from_attributes` rebuilds the layer."""
        return {
            "kind": self.kind,
            "weight": self.weight,
            "bias": self.bias or "",
            "groups": self.groups,
            "outputs": self.outputs,
            "inputs": self.inputs,
            "weight_shape": list(self.weight_shape),
        }

    @classmethod
    def from_attributes(cls, name: str, attributes: Mapping[str, Any]) -> Layer:
        """The layer that `attributes` described."""
        return cls(
            name=name,
            kind=str(attributes["kind"]),
            weight=str(attributes["weight"]),
            bias=str(attributes["bias"]) or None,
            groups=int(attributes["groups"]),
            outputs=int(attributes["outputs"]),
            inputs=int(attributes["inputs"]),
            weight_shape=tuple(int(size) for size in attributes["weight_shape"]),
        )


@dataclass(frozen=True)
class Geometry:
    """How a call used its weight: the arguments of the convolution; empty for a linear layer."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()


@dataclass
class Call:
    """One use of a layer's weight: its input, how it was used, and the gradient at its output."""

    layer: Layer
    input: Tensor
    geometry: Geometry
    output_gradient: Tensor | None = None


def describe(
    name: str, kind: str, weight: tuple[str, Tensor], bias: tuple[str, Tensor] | None, groups: int
) -> Layer:
    """The `Layer` of a weight ``(outputs * groups, inputs / groups, *kernel)`` and its bias."""
    weight_name, tensor = weight
    return Layer(
        name=name,
        kind=kind,
        weight=weight_name,
        bias=bias[0] if bias is not None else None,
        groups=groups,
        outputs=tensor.shape[0] // groups,
        inputs=prod(tensor.shape[1:]) + (bias is not None),
        weight_shape=tuple(tensor.shape),
    )


def as_matrices(
    calls: list[Call], samples: int, dtype: torch.dtype, batch_axis: int = 0
) -> tuple[Tensor, Tensor]:
    """Activations ``(samples, groups, positions, inputs)`` and output gradients ``(samples, groups,
    positions, outputs)``.

    Several calls of one layer are further positions: their weight gradients add up within a sample.

    Raises:
        UnsupportedLayerError: the samples cannot be told apart in the layer's input.
    """
    pairs = [
        (_activations(call, samples, dtype, batch_axis), _gradients(call, samples, dtype, batch_axis))
        for call in calls
    ]
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([a for a, _ in pairs], dim=2), torch.cat([g for _, g in pairs], dim=2)


def _rows(layer: Layer, tensor: Tensor, samples: int, batch_axis: int) -> Tensor:
    """A linear layer's ``(..., features)`` tensor as ``(samples, positions, features)``."""
    features = tensor.shape[-1]
    if (
        tensor.ndim > 1
        and batch_axis in (0, INTERLEAVED)
        and tensor.shape[0]
        and tensor.shape[0] % samples == 0
    ):
        if batch_axis == 0:
            return tensor.reshape(samples, -1, features)
        return tensor.reshape(-1, samples, *tensor.shape[1:]).movedim(1, 0).reshape(samples, -1, features)
    if 0 < batch_axis < tensor.ndim - 1 and tensor.shape[batch_axis] == samples:
        return tensor.movedim(batch_axis, 0).reshape(samples, -1, features)
    raise UnsupportedLayerError(
        f"Layer '{layer.name}' got an input of shape {tuple(tensor.shape)}, in which the {samples} samples "
        f"of the batch "
        f"cannot be told apart; leave it out with layers=... or unsupported='skip'."
    )


def _activations(call: Call, samples: int, dtype: torch.dtype, batch_axis: int) -> Tensor:
    layer, x = call.layer, call.input.detach()
    if layer.kind == "linear":
        rows = _rows(layer, x, samples, batch_axis).to(dtype)
        if layer.bias is not None:
            rows = F.pad(rows, (0, 1), value=1.0)
        return rows.unsqueeze(1)
    if x.shape[0] != samples:
        raise UnsupportedLayerError(
            f"Layer '{layer.name}' got an input of shape {tuple(x.shape)} for a batch of {samples} samples; "
            f"leave it out with layers=... or unsupported='skip'."
        )
    patches = convolution_patches(x.to(dtype), layer, call.geometry)
    return patches


def _gradients(call: Call, samples: int, dtype: torch.dtype, batch_axis: int) -> Tensor:
    layer, gradient = call.layer, call.output_gradient
    assert gradient is not None
    gradient = gradient.detach().to(dtype)
    if layer.kind == "linear":
        return _rows(layer, gradient, samples, batch_axis).unsqueeze(1)
    return gradient.reshape(samples, layer.groups, layer.outputs, -1).transpose(2, 3)


def pad_input(x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
    """A convolution's input with its zero padding made explicit."""
    kernel = layer.weight_shape[2:]
    if isinstance(geometry.padding, str):
        totals = [
            d * (k - 1) if geometry.padding == "same" else 0
            for d, k in zip(geometry.dilation, kernel, strict=True)
        ]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(p, p) for p in geometry.padding]
    if not any(a or b for a, b in pads):
        return x
    return F.pad(x, [side for pair in reversed(pads) for side in pair])


def convolution_patches(x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
    """The input patch under each output position: ``(samples, groups, positions, inputs)``.

    Works for any number of spatial dimensions. The patch runs over channels first, then the kernel, as the
    weight does.
    """
    kernel = layer.weight_shape[2:]
    windows = pad_input(x, layer, geometry)
    for axis, (size, stride, dilation) in enumerate(
        zip(kernel, geometry.stride, geometry.dilation, strict=True)
    ):
        windows = windows.unfold(axis + 2, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # (samples, channels, *positions, *kernel) -> (samples, groups, positions, channels / groups, kernel)
    samples, dims = x.shape[0], len(kernel)
    positions = windows.shape[2 : 2 + dims]
    channels = x.shape[1] // layer.groups
    windows = windows.reshape(samples, layer.groups, channels, *positions, *kernel)
    windows = windows.movedim(2, 2 + dims)
    patches = x.new_empty(samples, layer.groups, prod(positions), layer.inputs)
    fan_in = channels * prod(kernel)
    patches[..., :fan_in].view(samples, layer.groups, *positions, channels, *kernel).copy_(windows)
    if layer.bias is not None:
        patches[..., fan_in] = 1.0
    return patches
