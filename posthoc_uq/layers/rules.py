"""The kinds of layers: linear, products with a matrix, convolutions and transposed convolutions.

A kind settles what a weight is as matrices ``(groups, outputs, inputs)`` and which rows of activations they multiply.
`LayerGradients` makes of what a backward pass caught of a layer these rows and those of its output gradients: what the
accumulators of `curvature.statistics` sum, and blocks of posteriors are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.core.errors import UnsupportedLayerError
from posthoc_uq.core.numerics import CONVOLUTIONS
from posthoc_uq.layers.layer import INTERLEAVED, RULES, Call, Layer, LayerRule
from posthoc_uq.layers.opened import add_offset, bilinear_products, scale_features
from posthoc_uq.layers.operands import Geometry, OneHotRows, Operand, Patches, Rows, concatenated


class Linear(LayerRule):
    """``linear(x, W, b)`` with a weight ``(outputs, inputs)``."""

    kind = "linear"
    dimensions = 2
    modules = (nn.Linear,)

    def __init__(self) -> None:
        self.functions = {F.linear: {name: name for name in ("input", "weight", "bias")}}

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        return weight.unsqueeze(-3)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        return F.linear(input, weight, bias)

    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        return Rows((F.pad(x, (0, 1), value=1.0) if layer.bias is not None else x).unsqueeze(1))


class Product(Linear):
    """``x @ W`` with a weight ``(inputs, outputs)``, in any of torch's ways to write it; transformers' ``Conv1D``."""

    kind = "matmul"
    modules = ()
    input_axis = 0

    def __init__(self) -> None:
        as_method, as_mm = {"input": "input", "other": "weight"}, {"input": "input", "mat2": "weight"}
        added = {"input": "bias", "mat1": "input", "mat2": "weight"}
        self.functions = {
            torch.matmul: as_method,
            Tensor.matmul: as_method,
            Tensor.__matmul__: as_method,
            Tensor.__rmatmul__: {"self": "weight", "other": "input"},
            torch.mm: as_mm,
            Tensor.mm: as_mm,
            torch.addmm: added,
            Tensor.addmm: added,
        }

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        return weight.transpose(-2, -1).unsqueeze(-3)

    def to_weight(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        return matrix.transpose(-2, -1).contiguous().reshape(*matrix.shape[:-3], *shape)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        return F.linear(input, weight.t(), bias)


class Convolution(LayerRule):
    """A convolution with a weight ``(outputs, inputs / groups, *kernel)``."""

    convolutional: ClassVar[bool] = True
    _names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial
        self.kind = f"conv{spatial}d"
        self.dimensions = 2 + spatial
        self.modules = ({1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[spatial],)
        self.function = CONVOLUTIONS[spatial]
        self.functions = {self.function: {name: name for name in self._names}}

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        lead = weight.shape[: weight.ndim - self.dimensions]
        return weight.reshape(*lead, groups, weight.shape[len(lead)] // groups, -1)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        return self.function(input, weight, bias, **options)

    def geometry(self, options: Mapping[str, Any]) -> Geometry:
        padding = options.get("padding", 0)
        return Geometry(
            stride=self._each_axis(options.get("stride", 1)),
            padding=padding if isinstance(padding, str) else self._each_axis(padding),
            dilation=self._each_axis(options.get("dilation", 1)),
            output_padding=self._each_axis(options.get("output_padding", 0)),
        )

    def _each_axis(self, value: Any) -> tuple[int, ...]:
        if isinstance(value, int):
            return (value,) * self.spatial
        values = tuple(int(v) for v in value)
        return values * self.spatial if len(values) == 1 else values

    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        bias, padding = layer.bias is not None, geometry.padding
        if prod(layer.kernel) > 1 or isinstance(padding, str) or any(padding):
            return Patches(x, layer.kernel, geometry, groups=layer.groups, bias=bias)
        for axis, stride in enumerate(geometry.stride):
            if stride > 1:
                x = x[(slice(None),) * (axis + 2) + (slice(None, None, stride),)]
        columns = x.reshape(x.shape[0], layer.groups, x.shape[1] // layer.groups, -1)
        if bias:
            ones = columns.new_ones(1, 1, 1, 1).expand(*columns.shape[:2], 1, columns.shape[3])
            columns = torch.cat((columns, ones), 2)
        return Rows(columns.transpose(2, 3))

    def unfold(self, x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
        return self.activations(x, replace(layer, bias=None), geometry).rows()

    def output_rows(self, outputs: Tensor, layer: Layer) -> Tensor:
        return outputs.reshape(len(outputs), layer.groups, layer.outputs, -1).transpose(2, 3)

    def outputs_of_rows(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        return rows.transpose(2, 3).reshape(len(rows), *shape)


class TransposedConvolution(Convolution):
    """A transposed convolution with a weight ``(inputs, outputs / groups, *kernel)``.

    It is the convolution, with stride 1 and the kernel reversed, of its input with ``stride - 1`` zeros between the
    entries and ``dilation (kernel - 1) - padding`` zeros around them (Dumoulin and Visin, 2016, "A guide to convolution
    arithmetic for deep learning", relationship 14). The matrix is that of this convolution.
    """

    input_axis = 0
    _names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

    def __init__(self, spatial: int) -> None:
        super().__init__(spatial)
        self.kind = f"conv_transpose{spatial}d"
        self.modules = ({1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[spatial],)
        self.function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[spatial]
        self.functions = {self.function: {name: name for name in self._names}}

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        lead = weight.shape[: weight.ndim - self.dimensions]
        inputs, outputs, *kernel = weight.shape[len(lead) :]
        matrices = weight.reshape(*lead, groups, inputs // groups, outputs, *kernel)
        matrices = matrices.transpose(len(lead) + 1, len(lead) + 2).flip(self._kernel_axes)
        return matrices.reshape(*lead, groups, outputs, -1)

    def to_weight(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        lead, groups = matrix.shape[:-3], matrix.shape[-3]
        inputs, outputs, *kernel = shape
        matrices = matrix.reshape(*lead, groups, outputs, inputs // groups, *kernel)
        matrices = matrices.transpose(len(lead) + 1, len(lead) + 2).flip(self._kernel_axes)
        return matrices.reshape(*lead, *shape)

    @property
    def _kernel_axes(self) -> tuple[int, ...]:
        return tuple(range(-self.spatial, 0))

    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        assert not isinstance(geometry.padding, str)
        sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], geometry.stride, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        spread[(..., *(slice(None, None, step) for step in geometry.stride))] = x
        reach = [d * (k - 1) for d, k in zip(geometry.dilation, layer.kernel, strict=True)]
        sides = [
            (r - p, r - p + more)
            for r, p, more in zip(reach, geometry.padding, geometry.output_padding, strict=True)
        ]
        padded = F.pad(spread, [side for pair in reversed(sides) for side in pair])
        ones = (1,) * self.spatial
        plain = Geometry(ones, (0,) * self.spatial, geometry.dilation)
        return Patches(padded, layer.kernel, plain, groups=layer.groups, bias=layer.bias is not None)


class Bilinear(Linear):
    """``sum_ij W_oij x_i y_j + b_o`` with a weight ``(outputs, i, j)``, linear in the products ``x_i y_j``."""

    kind = "bilinear"
    dimensions = 3
    modules = ()

    def __init__(self) -> None:
        self.functions = {bilinear_products: {name: name for name in ("input", "weight", "bias")}}

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        return weight.flatten(-2).unsqueeze(-3)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        return bilinear_products(input, weight, bias)


class Scale(LayerRule):
    """``x w + b`` with a weight ``(features,)``, as after a normalisation: each feature is a group of one output."""

    kind = "scale"
    dimensions = 1
    matrices: ClassVar[bool] = False

    def __init__(self) -> None:
        self.functions = {scale_features: {name: name for name in ("input", "weight", "bias")}}

    def groups(self, weight: Tensor, options: Mapping[str, Any]) -> int:
        return weight.shape[0]

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        return weight.reshape(*weight.shape[:-1], groups, 1, 1)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        return scale_features(input, weight, bias)

    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        rows = self.output_rows(x, layer)
        return Rows(F.pad(rows, (0, 1), value=1.0) if layer.bias is not None else rows)

    def unfold(self, x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
        return self.output_rows(x, layer)

    def output_rows(self, outputs: Tensor, layer: Layer) -> Tensor:
        return outputs.reshape(len(outputs), -1, outputs.shape[-1]).transpose(1, 2).unsqueeze(3)

    def outputs_of_rows(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        return rows.squeeze(3).transpose(1, 2).reshape(len(rows), *shape)


class Offset(LayerRule):
    """``x + b`` with a weight in the shape of the last dimensions: each number is a group, whose activation is 1."""

    matrices: ClassVar[bool] = False

    def __init__(self, dimensions: int) -> None:
        self.kind, self.dimensions = f"offset{dimensions}d", dimensions
        self.functions = {add_offset: {name: name for name in ("input", "weight")}}

    def groups(self, weight: Tensor, options: Mapping[str, Any]) -> int:
        return weight.numel()

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        return weight.reshape(*weight.shape[: weight.ndim - self.dimensions], groups, 1, 1)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        return add_offset(input, weight)

    def squared(self, input: Tensor, like: Tensor) -> Tensor:
        return torch.zeros_like(input, dtype=like.dtype)

    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        return Rows(x.new_ones(len(x), layer.groups, 1, 1))

    def unfold(self, x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
        return self.activations(x, layer, geometry).rows()

    def output_rows(self, outputs: Tensor, layer: Layer) -> Tensor:
        return outputs.reshape(len(outputs), -1, layer.groups).sum(1)[..., None, None]


class Lookup(Product):
    """The rows of a weight ``(rows, outputs)`` by their numbers: ``x @ W`` with rows of zeros and a 1."""

    kind = "embedding"
    matrices: ClassVar[bool] = False

    def __init__(self) -> None:
        self.functions = {F.embedding: {"input": "input", "weight": "weight", "padding_idx": "padding_idx"}}

    def features(self, input: Tensor) -> Tensor:
        return input.unsqueeze(-1)

    def squared(self, input: Tensor, like: Tensor) -> Tensor:
        return input  # ones

    def input_norm(self, input: Tensor) -> float:
        return input.numel() ** 0.5

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        return F.embedding(input, weight)

    def geometry(self, options: Mapping[str, Any]) -> Geometry:
        return Geometry(without_gradient=options.get("padding_idx"))

    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        return OneHotRows(x[..., 0].long(), layer.inputs, geometry.without_gradient, x.dtype)

    def unfold(self, x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
        return self.activations(x, layer, geometry).rows()


_BY_FUNCTION: dict[Any, LayerRule] = {}


def register(rule: LayerRule) -> LayerRule:
    """Let the library know a kind of layer."""
    RULES[rule.kind] = rule
    _BY_FUNCTION.update(dict.fromkeys(rule.functions, rule))
    return rule


register(Linear())
_PRODUCT = register(Product())
register(Bilinear())
register(Scale())
for _dimensions in (1, 2, 3):
    register(Offset(_dimensions))
_LOOKUP = register(Lookup())
for _spatial in (1, 2, 3):
    register(Convolution(_spatial))
    register(TransposedConvolution(_spatial))

WEIGHTED_MODULES: tuple[type[nn.Module], ...] = tuple(
    module for rule in RULES.values() for module in rule.modules
)
_NEUTRAL = {"beta": 1, "alpha": 1, "out": None}  # values of a product's other arguments


@dataclass(frozen=True)
class AffineCall:
    """A call that applies a weight to an input.

    Attributes:
        kind: of the layer.
        input: the tensor that the weight is applied to.
        weight: as it was given.
        parameter: the weight itself, or the tensor of which it is the transpose.
        bias: or None.
        product: whether it was a product of matrices rather than a layer's function.
        options: a convolution's other arguments.
    """

    kind: str
    input: Any
    weight: Tensor
    parameter: Tensor
    bias: Any
    product: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def geometry(self) -> Geometry:
        """How the call moved its kernel."""
        return RULES[self.kind].geometry(self.options)

    @property
    def groups(self) -> int:
        """The number of matrices in the weight."""
        return RULES[self.kind].groups(self.parameter, self.options)

    def squared_input(self, like: Tensor) -> Tensor:
        """`LayerRule.squared` of the input."""
        return RULES[self.kind].squared(self.input, like)

    def applied(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The call with another input, another weight in the parameter's shape, and another bias."""
        return RULES[self.kind].apply(input, weight, bias, self.options)


def affine_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AffineCall | None:
    """A call of a torch function as an `AffineCall`; None where it is no such call."""
    rule = _BY_FUNCTION.get(func)
    if rule is None:
        return None
    roles = rule.functions[func]
    arguments = dict(zip(roles.values(), args, strict=False))
    arguments |= {roles.get(name, name): value for name, value in kwargs.items()}
    input, weight, bias = (arguments.pop(role, None) for role in ("input", "weight", "bias"))
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        return None
    if isinstance(rule, Offset):
        return AffineCall(f"offset{weight.ndim}d", input, weight, weight, None)
    if rule.convolutional or rule.kind in (Scale.kind, Bilinear.kind):
        return AffineCall(rule.kind, input, weight, weight, bias, options=arguments)
    if rule is _LOOKUP:
        # `max_norm` changes the weight, and other arguments its gradient
        plain = set(arguments) <= {"padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"}
        if not plain or arguments.get("max_norm") is not None or arguments.get("scale_grad_by_freq"):
            return None
        padding = arguments.get("padding_idx")
        options = {"padding_idx": padding if padding is None else padding % len(weight)}  # -1 is the last row
        return AffineCall(rule.kind, input, weight, weight, None, options=options)
    parameter = _transposed_of(weight)
    if rule is not _PRODUCT:
        if parameter is None:
            return AffineCall(rule.kind, input, weight, weight, bias)
        return AffineCall(_PRODUCT.kind, input, weight, parameter, bias, product=True)
    if any(arguments[name] != _NEUTRAL.get(name) for name in arguments):
        return None
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        if input.ndim < 2 or weight.ndim != 2:
            return None
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[1:]):
            return None  # the product is added to something that is no bias
    if parameter is not None:  # ``x @ W.T``
        return AffineCall("linear", input, weight, parameter, bias, product=True)
    return AffineCall(_PRODUCT.kind, input, weight, weight, bias, product=True)


def _transposed_of(weight: Tensor) -> Tensor | None:
    """The matrix that `weight` is the transpose of, if it is a view of one."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        base = weight._base
        if base is None or base.ndim != 2 or weight.ndim != 2:
            return None
        transposed = weight.shape == base.shape[::-1] and weight.stride() == base.stride()[::-1]
        return base if transposed and weight.storage_offset() == base.storage_offset() else None


@dataclass
class LayerGradients:
    """All uses of one layer in one backward pass."""

    layer: Layer
    calls: list[Call]
    samples: int
    batch_axis: int

    def several(self, activations: Operand) -> bool:
        """Whether a sample may have several rows: with an axis of positions, even where it has one of them here, or in
        several calls.
        """
        x = self.calls[0].input
        one = not self.layer.convolutional and self.layer.rule.features(x).ndim <= 2
        return activations.positions > 1 or not one

    def gradients(self, dtype: torch.dtype) -> Tensor:
        """Output gradients ``(samples, groups, positions, outputs)`` in `dtype`. Further calls of a layer count as
        further positions: their weight gradients add up within a sample.

        Raises:
            UnsupportedLayerError: the calls do not fit together.
        """
        layer, gradients = self.layer, list[Tensor]()
        for call in self.calls:
            assert call.output_gradient is not None
            gradient = call.output_gradient.detach().to(dtype)
            if not layer.convolutional and not layer.rule.by_gradients:
                gradient = self._by_sample(gradient)
            gradients.append(layer.rule.output_rows(gradient, layer))
        if len(gradients) == 1:
            return gradients[0]
        if any(g.shape[1::2] != gradients[0].shape[1::2] for g in gradients):
            raise UnsupportedLayerError(
                f"Layer '{self.layer.name}' uses its weight both as it is and transposed."
            )
        return torch.cat(gradients, dim=2)

    def room(self, functions: int, dtype: torch.dtype) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """Zeros for the output gradients of several functions, side by side so that reading them as rows finds them in
        the order of memory: a tensor for each call, and for each call the place of every function in it.
        """
        dim = 1 if self.layer.convolutional or self.layer.rule.by_gradients else -2
        room = list[Tensor]()
        for call in self.calls:
            if call.output_gradient is not None:
                shape = list(call.output_gradient.shape)
                shape.insert(1 if dim == 1 else len(shape) - 1, functions)
                room.append(call.output_gradient.new_zeros(shape, dtype=dtype))
        return room, [of_call.unbind(dim) for of_call in room]

    def stacked(self, room: Sequence[Tensor]) -> Tensor:
        """The output gradients in `room` as ``(samples, G, functions, m, T)``.

        Raises:
            UnsupportedLayerError: the samples cannot be told apart.
        """
        rows = [self._rows_of_functions(of_call) for of_call in room]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=4)

    def _rows_of_functions(self, stacked: Tensor) -> Tensor:
        """Of one call."""
        layer = self.layer
        if not (layer.convolutional or layer.rule.by_gradients):  # (samples, T, functions, features)
            rows = self._by_sample(stacked.flatten(-2)).unflatten(-1, stacked.shape[-2:])
            if type(layer.rule).output_rows is LayerRule.output_rows:
                return rows.permute(0, 2, 3, 1).unsqueeze(1)
            stacked = rows.transpose(1, 2)
        functions = stacked.shape[1]
        rows = layer.rule.output_rows(stacked.flatten(0, 1), layer)
        return rows.unflatten(0, (-1, functions)).permute(0, 2, 1, 4, 3)

    def activations(self, dtype: torch.dtype) -> Operand:
        """Activations in `dtype`, of all calls.

        Raises:
            UnsupportedLayerError: the samples cannot be told apart in the layer's input.
        """
        layer, found = self.layer, list[Operand]()
        for call in self.calls:
            x = call.input.detach()
            if not layer.convolutional and not layer.rule.by_gradients:
                x = self._by_sample(layer.rule.features(x))
            elif x.shape[0] != self.samples:
                raise UnsupportedLayerError(
                    f"Layer '{layer.name}' got an input of shape {tuple(x.shape)} for a batch of {self.samples} "
                    f"samples; leave it out with layers=... or unsupported='skip'."
                )
            found.append(layer.rule.activations(x.to(dtype), layer, call.geometry))
        return concatenated(found)

    def _by_sample(self, tensor: Tensor) -> Tensor:
        """A linear layer's ``(..., features)`` tensor as ``(samples, positions, features)``."""
        features, axis, samples = tensor.shape[-1], self.batch_axis, self.samples
        if samples == 1:
            return tensor.reshape(1, -1, features)
        if (
            tensor.ndim > 1
            and axis in (0, INTERLEAVED)
            and tensor.shape[0]
            and tensor.shape[0] % samples == 0
        ):
            if axis == 0:
                return tensor.reshape(samples, -1, features)
            return tensor.reshape(-1, samples, *tensor.shape[1:]).movedim(1, 0).reshape(samples, -1, features)
        if 0 < axis < tensor.ndim - 1 and tensor.shape[axis] == samples:
            return tensor.movedim(axis, 0).reshape(samples, -1, features)
        raise UnsupportedLayerError(
            f"Layer '{self.layer.name}' got an input of shape {tuple(tensor.shape)}, in which the {samples} "
            f"samples of the batch cannot be told apart; leave it out with layers=... or unsupported='skip'."
        )
