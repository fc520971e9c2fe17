"""Weighted layers as matrices, and what the library knows of a kind of layer.

A layer is ``groups`` matrices of shape ``(outputs, inputs)``; the bias is the last input column, whose activation is
the constant 1 (Lee et al. 2020, section 2.1). Sample ``s`` at position ``t`` has activations ``a`` of length ``inputs``
and output gradients ``g`` of length ``outputs``; the per-sample weight gradient is the sum of ``g a^T`` over the
positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posthoc_uq.layers.operands import Geometry, Operand

# Where the samples are in a linear layer's input: in the first dimension (the rows of a sample together), in the second
# one, or in the first one with the samples varying fastest, as in the flattened (tokens, samples) rows of multi-head
# attention.
BATCH_AXES = (0, 1, INTERLEAVED := -1)


class LayerRule(ABC):
    """All that the library knows of a kind of layer. `RULES` has one for each kind; a new kind is one more.

    Attributes:
        kind: its name, also in files.
        dimensions: of the weight.
        input_axis: dimension of the weight along which its input features lie.
        modules: classes whose own forward pass is one call of the rule's function; BackPACK may serve them.
        functions: torch functions that apply such a weight, each with its parameters' names in order and their roles:
            ``"input"``, ``"weight"``, ``"bias"``, or the option's name.
        convolutional: whether the layer's inputs are ``(samples, channels, *spatial)``.
        matrices: whether weights are matrices; others get a posterior where they are asked for alone.
        by_gradients: whether no call of such a weight is known, only gradients by it (`layers.sample_gradients`).
    """

    kind: str
    dimensions: int
    input_axis: int = 1
    modules: tuple[type[nn.Module], ...] = ()
    functions: Mapping[Any, Mapping[str, str]]
    convolutional: ClassVar[bool] = False
    matrices: ClassVar[bool] = True
    by_gradients: ClassVar[bool] = False

    @abstractmethod
    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        """Weights ``(*lead, *shape)`` as ``(*lead, groups, outputs, inputs)``."""

    def to_weight(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The inverse of `to_matrix`."""
        return matrix.reshape((*matrix.shape[:-3], *shape))

    def groups(self, weight: Tensor, options: Mapping[str, Any]) -> int:
        """The number of matrices in a weight, for a call with these options."""
        return int(options.get("groups", 1))

    def features(self, input: Tensor) -> Tensor:
        """A call's input with its features as the last dimension."""
        return input

    def squared(self, input: Tensor, like: Tensor) -> Tensor:
        """A call's input by which the variances of independent weights are applied: its squares, in the number format
        of `like`.
        """
        return input.to(like).square()

    def input_norm(self, input: Tensor) -> float:
        """A bound of the norm of all activations, without the bias's 1."""
        return float(torch.linalg.vector_norm(input.float()))

    @abstractmethod
    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        """The layer's outputs; `options` are a call's other arguments."""

    def geometry(self, options: Mapping[str, Any]) -> Geometry:
        """How a call with these options moves its kernel; empty for a linear layer."""
        return Geometry()

    @abstractmethod
    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        """The rows that the matrices multiply, of a layer's input: ``(samples, channels, *spatial)`` of a convolution,
        ``(samples, positions, features)`` elsewhere.
        """

    def unfold(self, x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
        """The rows that the layer's matrices multiply, without the bias's 1: ``(samples, groups, positions, inputs)``
        from inputs ``(samples, ...)``. Each number is one of the inputs or 0, so that `Unfolding` goes back.
        """
        return x.reshape(len(x), 1, -1, x.shape[-1])

    def output_rows(self, outputs: Tensor, layer: Layer) -> Tensor:
        """Outputs ``(samples, ...)`` as rows ``(samples, groups, positions, outputs)``."""
        return outputs.reshape(len(outputs), 1, -1, outputs.shape[-1])

    def outputs_of_rows(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `output_rows`, for outputs of this shape a sample."""
        return rows.reshape(len(rows), *shape)


RULES: dict[str, LayerRule] = {}
"""The rules by kind; `posthoc_uq.layers.rules` fills it."""


@dataclass(frozen=True)
class Layer:
    """One weighted layer: its parameters by name, and the shape of its matrix view.

    Attributes:
        name: dotted module name, or the parameter's name where a module holds several weights.
        kind: the name of its `LayerRule`: ``"linear"``, ``"matmul"`` (``x @ W``, a linear layer whose weight has its
            inputs first), ``"bilinear"``, ``"conv1d"`` to ``"conv3d"``, ``"conv_transpose1d"`` to
            ``"conv_transpose3d"``; those that are no matrices: ``"scale"``, ``"offset1d"`` to ``"offset3d"``,
            ``"embedding"``; and ``"parameter0d"`` to ``"parameter6d"``, whose calls are not known.
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
    def rule(self) -> LayerRule:
        """What the library knows of this kind of layer."""
        return RULES[self.kind]

    @property
    def convolutional(self) -> bool:
        """Whether the weight is a convolution's, transposed or not."""
        return self.rule.convolutional

    @property
    def kernel(self) -> tuple[int, ...]:
        """Sizes of a convolution's kernel; empty for other layers."""
        return self.weight_shape[2:] if self.convolutional else ()

    @property
    def channels(self) -> int:
        """Input features of one group at one position of the kernel, without the bias."""
        return (self.inputs - (self.bias is not None)) // prod(self.kernel)

    @property
    def pointwise(self) -> bool:
        """Whether an output position sees one input position alone: a linear layer, or a convolution of kernel 1."""
        return "transpose" not in self.kind and prod(self.kernel) == 1

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
        matrix = self.rule.to_matrix(weight, self.groups)
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.reshape(*matrix.shape[:-1], 1)], dim=-1)

    def to_parameters(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `to_matrix`, by parameter name."""
        weight = matrix if self.bias is None else matrix[..., :-1]
        parameters = {self.weight: self.rule.to_weight(weight, self.weight_shape)}
        if self.bias is not None:
            parameters[self.bias] = matrix[..., -1].flatten(-2)
        return parameters

    def attributes(self) -> dict[str, Any]:
        """Plain values from which `from_attributes` rebuilds the layer."""
        values = asdict(self) | {"bias": self.bias or "", "weight_shape": list(self.weight_shape)}
        del values["name"]
        return values

    @classmethod
    def from_attributes(cls, name: str, attributes: Mapping[str, Any]) -> Layer:
        """The layer that `attributes` described."""
        values: dict[str, Any] = {**attributes, "name": name, "bias": attributes["bias"] or None}
        values["weight_shape"] = tuple(attributes["weight_shape"])
        return cls(**values)


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
    """The `Layer` of a named weight, in the shape that its kind has, and its bias."""
    weight_name, tensor = weight
    _, outputs, inputs = _matrix_shape(kind, tuple(tensor.shape), groups)
    return Layer(
        name=name,
        kind=kind,
        weight=weight_name,
        bias=bias[0] if bias is not None else None,
        groups=groups,
        outputs=outputs,
        inputs=inputs + (bias is not None),
        weight_shape=tuple(tensor.shape),
    )


def fits(kind: str, shape: Sequence[int], groups: int, outputs: int, inputs: int) -> bool:
    """Whether a weight of this kind and shape is `groups` matrices ``(outputs, inputs)``, the bias not counted."""
    if len(shape) != RULES[kind].dimensions:
        return False
    try:
        return _matrix_shape(kind, tuple(shape), groups) == (groups, outputs, inputs)
    except RuntimeError:  # the groups do not divide it
        return False


def _matrix_shape(kind: str, shape: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Shape ``(groups, outputs, inputs)`` of a weight as matrices, without the bias."""
    return tuple(RULES[kind].to_matrix(torch.empty(shape, device="meta"), groups).shape)
