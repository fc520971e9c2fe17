"""Weighted layers as matrices: the weights of a layer, and its inputs and output gradients as rows.

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

# Where the samples are in a linear layer's input: in the first dimension (the rows of a sample together), in the second
# one, or in the first one with the samples varying fastest, as in the flattened (tokens, samples) rows of multi-head
# attention.
BATCH_AXES = (0, 1, INTERLEAVED := -1)

# Number of dimensions of the weight, by the kind of the layer.
KINDS = {"linear": 2, "matmul": 2, "conv1d": 3, "conv2d": 4, "conv3d": 5}

WEIGHTED_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Layer:
    """One weighted layer: its parameters by name, and the shape of its matrix view.

    Attributes:
        name: dotted module name, or the parameter's name where a module holds several weights.
        kind: ``"linear"``, ``"matmul"`` (``x @ W``, a linear layer whose weight has its inputs first), ``"conv1d"``,
            ``"conv2d"`` or ``"conv3d"``.
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
    def convolutional(self) -> bool:
        """Whether the weight is a convolution's."""
        return self.kind.startswith("conv")

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
        if self.kind == "matmul":
            weight = weight.transpose(-2, -1)
        matrix = weight.reshape(*lead, self.groups, self.outputs, -1)
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.reshape(*lead, self.groups, self.outputs, 1)], dim=-1)

    def to_parameters(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `to_matrix`, by parameter name."""
        lead = matrix.shape[:-3]
        weight = matrix if self.bias is None else matrix[..., :-1]
        if self.kind == "matmul":
            weight = weight.transpose(-2, -1).contiguous()
        parameters = {self.weight: weight.reshape(*lead, *self.weight_shape)}
        if self.bias is not None:
            parameters[self.bias] = matrix[..., -1].reshape(*lead, self.groups * self.outputs)
        return parameters

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
    """The `Layer` of a weight ``(outputs * groups, inputs / groups, *kernel)``, or ``(inputs, outputs)`` of the kind
    ``"matmul"``, and its bias.
    """
    weight_name, tensor = weight
    outputs, inputs = matrix_sides(kind, tuple(tensor.shape))
    return Layer(
        name=name,
        kind=kind,
        weight=weight_name,
        bias=bias[0] if bias is not None else None,
        groups=groups,
        outputs=outputs // groups,
        inputs=inputs + (bias is not None),
        weight_shape=tuple(tensor.shape),
    )


def matrix_sides(kind: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Outputs of all groups, and inputs of one without the bias, of a weight of this shape."""
    return (shape[1], shape[0]) if kind == "matmul" else (shape[0], prod(shape[1:]))


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
