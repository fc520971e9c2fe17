"""A sequential network as stages, and one pass of messages through them.

Messages between stages are ``(K, N, ...)``: K networks, N examples, and features or channels, height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError, UnsupportedLayerError
from posthoc_uq.core.outputs import chosen_in
from posthoc_uq.layers.layer import Layer
from posthoc_uq.methods.message_passing import messages as factors
from posthoc_uq.methods.message_passing.messages import (
    MIN_PRECISION,
    Message,
    clamped,
    damped,
    divided,
    from_moments,
    multiplied,
    select,
    sum_backward,
    sum_forward,
    uniform_like,
    winning_shares,
)

# Convolutions as linear layers over patches, and pooling. Images are ``(B, C, H, W)``.

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Which patches of an image a convolution sees.

    Attributes:
        kernel: height and width.
        stride: in both directions.
        padding: zeros on each side, which are known: zero mean, zero variance, and no message goes to them.
        dilation: distance of a patch's cells.
        groups: of channels that do not mix.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def size(self, height: int, width: int) -> Pair:
        """Height and width of the output."""
        sides = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        down, across = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
        return down, across

    def unfolded(self, image: Tensor) -> Tensor:
        """Patches as rows, ``(B, G, P, I)``."""
        columns = F.unfold(image, self.kernel, self.dilation, self.padding, self.stride)
        return columns.unflatten(1, (self.groups, -1)).transpose(2, 3)

    def folded(self, rows: Tensor, height: int, width: int) -> Tensor:
        """Rows added up where patches overlap, ``(B, C, height, width)``; what belongs to the padding is dropped."""
        columns = rows.transpose(2, 3).flatten(1, 2)
        return F.fold(columns, (height, width), self.kernel, self.dilation, self.padding, self.stride)


def _cells(image: Message, windows: Windows, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """What the cells of every pooling window are weighted with, their means and their variances, each ``(B, C, P,
    cells)``.
    """

    def cut(part: Tensor) -> Tensor:
        rows = windows.unfolded(part)  # (B, 1, P, C cells)
        return rows.squeeze(1).unflatten(2, (part.shape[1], -1)).transpose(1, 2)

    mean, variance = cut(image.mean), cut(image.variance)
    average = torch.full_like(mean, 1 / mean.shape[-1])
    return average if kind == "average" else winning_shares(mean, variance), mean, variance


def pool_forward(image: Message, windows: Windows, kind: str) -> Message:
    """Average pooling, or a soft selection of the largest, with weights by `winning_shares`.

    The mean of the selection is not the mean of the maximum: it is a weighted mean of the cells.

    Args:
        image: ``(B, C, H, W)``.
        windows: that do not overlap; rows and columns that fill no window are dropped.
        kind: ``"average"`` or ``"max"``.
    """
    size = (*image.rho.shape[:2], *windows.size(*image.rho.shape[-2:]))
    mean, variance = sum_forward(*_cells(image, windows, kind))
    return clamped(from_moments(mean.reshape(size), variance.reshape(size)))


def pool_backward(image: Message, back: Message, windows: Windows, kind: str) -> Message:
    """Messages to the image, where `back` is to the outputs; cells without a window get a precision of 1e-8."""
    flat = Message(*(part.flatten(2) for part in back))
    to_cells = sum_backward(*_cells(image, windows, kind), flat)
    rows = (part.transpose(1, 2).flatten(2, 3).unsqueeze(1) for part in to_cells)
    return clamped(Message(*(windows.folded(part, *image.rho.shape[-2:]) for part in rows)))


# Stages


@dataclass(frozen=True, eq=False)
class Weighted:
    """A linear layer or a convolution.

    Attributes:
        name: for errors.
        inputs: of a group, those of a patch for a convolution; without the bias.
        outputs: of a group.
        windows: of a convolution; None for a linear layer.
        bias: whether it has a random bias.
        offset: constants that are added to the outputs, ``(groups * outputs,)``, or None.
    """

    name: str
    inputs: int
    outputs: int
    windows: Windows | None = None
    bias: bool = True
    offset: Tensor | None = None

    @property
    def groups(self) -> int:
        """Of channels that do not mix."""
        return 1 if self.windows is None else self.windows.groups

    def rows(self, x: Tensor) -> Tensor:
        """Inputs ``(K, N, ...)`` as rows ``(K G, N, P, I)``."""
        if self.windows is None:
            return x.unsqueeze(2)
        rows = self.windows.unfolded(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return rows.transpose(1, 2).flatten(0, 1)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The same back, ``(K, N, ...)`` of the shape of the inputs; what overlaps is added up."""
        if self.windows is None:
            return rows.squeeze(2)
        blocks = rows.unflatten(0, (shape[0], self.groups)).transpose(1, 2).flatten(0, 1)
        return self.windows.folded(blocks, *shape[-2:]).reshape(shape)

    def outputs_of(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Rows of outputs ``(K G, N, P, J)`` as ``(K, N, ...)``, for inputs of this shape."""
        if self.windows is None:
            return rows.squeeze(2)
        sides = self.windows.size(*shape[-2:])
        channels = rows.unflatten(0, (shape[0], self.groups)).permute(0, 2, 1, 4, 3).flatten(2, 3)
        return channels.unflatten(3, sides)

    def output_rows(self, outputs: Tensor) -> Tensor:
        """Outputs ``(K, N, ...)`` as rows ``(K G, N, P, J)``."""
        if self.windows is None:
            return outputs.unsqueeze(2)
        channels = outputs.flatten(3).unflatten(2, (self.groups, self.outputs))
        return channels.permute(0, 2, 1, 4, 3).flatten(0, 1)

    def offset_rows(self, networks: int) -> Tensor | float:
        """The constants, to be added to rows of outputs."""
        if self.offset is None:
            return 0.0
        return self.offset.reshape(1, self.groups, 1, 1, -1).expand(networks, -1, -1, -1, -1).flatten(0, 1)


@dataclass(frozen=True)
class Activation:
    """A LeakyReLU.

    Attributes:
        slope: of the negative side; 0 for a ReLU.
    """

    slope: float


@dataclass(frozen=True)
class Pool:
    """Average or maximum over windows.

    Attributes:
        kind: ``"average"`` or ``"max"``.
        windows: None for one over the whole image.
    """

    kind: str
    windows: Windows | None = None

    def over(self, shape: Sequence[int]) -> Windows:
        """The windows in images of this shape."""
        side = (shape[-2], shape[-1])
        return Windows(side, side) if self.windows is None else self.windows


@dataclass(frozen=True)
class Flat:
    """All numbers of an example in one row."""


Stage = Weighted | Activation | Pool | Flat
"""A stage of a network."""


class LayerMessage(NamedTuple):
    """Messages to the weights of a layer.

    Attributes:
        weights: ``(K G, I, J)``.
        bias: ``(K G, J)``; of a layer without a bias the tensors have no element.
    """

    weights: Message
    bias: Message


def product(a: LayerMessage, b: LayerMessage) -> LayerMessage:
    """Of densities."""
    return LayerMessage(multiplied(a.weights, b.weights), multiplied(a.bias, b.bias))


def quotient(a: LayerMessage, b: LayerMessage) -> LayerMessage:
    """Of densities."""
    return LayerMessage(divided(a.weights, b.weights), divided(a.bias, b.bias))


def uniform_message(like: LayerMessage) -> LayerMessage:
    """Messages without information, in the shapes of others."""
    return LayerMessage(uniform_like(like.weights.rho), uniform_like(like.bias.rho))


def damped_message(old: LayerMessage, new: LayerMessage, share: float) -> LayerMessage:
    """``(1 - share) old + share new`` in natural parameters."""
    return LayerMessage(damped(old.weights, new.weights, share), damped(old.bias, new.bias, share))


# A sequential model as a chain of stages for message passing; BatchNorm is folded into the layer before it.

_SUPPORTED = (
    "Linear, Conv2d, ReLU, LeakyReLU, MaxPool2d (stride = kernel, no padding), AvgPool2d (no padding), "
    "AdaptiveAvgPool2d(1), Flatten, Dropout, Identity, BatchNorm after a Linear or Conv2d"
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)


@dataclass(frozen=True)
class Fold:
    """How a layer's weights become those with the BatchNorm after it: ``W' = factor W``, ``b' = factor b + offset``.

    Attributes:
        factor: ``(outputs,)`` in float64.
        offset: likewise; of a layer without a bias it is a constant of the network.
    """

    factor: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Chain:
    """A model as stages.

    Attributes:
        stages: in their order.
        layers: by stage, the layer of the model.
        folds: by stage, where a BatchNorm follows.
    """

    stages: list[Stage]
    layers: dict[int, Layer]
    folds: dict[int, Fold]


def chain_of(model: nn.Module, layers: Mapping[str, Layer]) -> Chain:
    """The stages of a model.

    Args:
        model: `torch.nn.Sequential`, which may hold others.
        layers: those with a posterior, which must be all.

    Raises:
        UnsupportedLayerError: the model is no chain, or has modules that messages cannot pass; names all of them.
        PosthocUQError: a weighted layer is to have no posterior.
    """
    if type(model) is not nn.Sequential:
        raise UnsupportedLayerError(
            f"layers='all' of method='message_passing' needs a torch.nn.Sequential, not a {type(model).__name__}; "
            f"write the model as one, or take layers='last'."
        )
    if chosen_in(model) is not None:
        raise UnsupportedLayerError(
            f"layers='all' of method='message_passing' cannot pass output={chosen_in(model)}, which is applied to what "
            f"the model returns; take layers='last'."
        )
    chain, faults = Chain([], {}, {}), list[str]()
    for path, module in _flattened(model):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            fault = _add_layer(chain, path, module, layers)
        elif isinstance(module, _NORMS):
            fault = _fold(chain, module)
        else:
            fault = _add(chain, module)
        faults += [f"'{path}' ({type(module).__name__}{fault})"] if fault is not None else []
    if faults:
        raise UnsupportedLayerError(
            f"Messages cannot pass {', '.join(faults)}; they pass {_SUPPORTED}. Take layers='last' for a posterior of "
            f"the last layer alone."
        )
    left = sorted(set(layers) - {layer.name for layer in chain.layers.values()})
    if left or not chain.layers:
        raise PosthocUQError(
            f"layers='all' of method='message_passing' treats every weighted layer once, which leaves out {left}; use "
            f"each module once, and select none of them."
        )
    return chain


def _flattened(model: nn.Sequential, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in model._modules.items():  # pyright: ignore[reportPrivateUsage]  # also one that is used twice
        here = f"{path}.{name}" if path else name
        if type(module) is nn.Sequential:
            yield from _flattened(module, here)
        elif module is not None:
            yield here, module


def _add_layer(
    chain: Chain, path: str, module: nn.Linear | nn.Conv2d, layers: Mapping[str, Layer]
) -> str | None:
    """Add a weighted layer; returns what is wrong with it, as a part of a sentence."""
    layer = layers.get(path)
    if type(module) not in (nn.Linear, nn.Conv2d):
        return ", a subclass of a known layer"
    if layer is None:
        return ", which gets no posterior; select all layers"
    if any(other.name == layer.name for other in chain.layers.values()):
        return ", which is used twice"
    windows = None
    if isinstance(module, nn.Conv2d):
        padding: Any = module.padding
        if isinstance(padding, str) or module.padding_mode != "zeros":
            return f" with padding={padding!r}, padding_mode={module.padding_mode!r}"
        windows = Windows(
            _pair(module.kernel_size),
            _pair(module.stride),
            _pair(padding),
            _pair(module.dilation),
            module.groups,
        )
    place = len(chain.stages)
    inputs = layer.inputs - (layer.bias is not None)
    chain.stages.append(Weighted(path, inputs, layer.outputs, windows, bias=layer.bias is not None))
    chain.layers[place] = layer
    return None


def _fold(chain: Chain, module: nn.BatchNorm1d | nn.BatchNorm2d) -> str | None:
    place = len(chain.stages) - 1
    stage = chain.stages[place] if chain.stages else None
    if not isinstance(stage, Weighted) or place in chain.folds:
        return ", not directly after a Linear or Conv2d"
    mean, variance = module.running_mean, module.running_var
    if mean is None or variance is None:
        return " without running statistics"
    factor = (as_double(variance) + module.eps).rsqrt()
    if module.weight is not None:
        factor = factor * as_double(module.weight.detach())
    offset = -as_double(mean) * factor
    if module.bias is not None:
        offset = offset + as_double(module.bias.detach())
    if not bool((factor.abs() > 1e-12).all()):
        return " with a weight of 0"
    chain.folds[place] = Fold(factor, offset)
    if not stage.bias:
        chain.stages[place] = Weighted(
            stage.name, stage.inputs, stage.outputs, stage.windows, bias=False, offset=offset
        )
    return None


def _add(chain: Chain, module: nn.Module) -> str | None:
    """Add a stage without weights; returns what is wrong with it, as a part of a sentence."""
    stage: Stage
    if isinstance(module, (nn.Identity, *_DROPOUTS)):
        return None
    if isinstance(module, nn.Flatten):
        if (module.start_dim, module.end_dim) != (1, -1):
            return f" from {module.start_dim} to {module.end_dim}"
        chain.stages.append(Flat())
        return None
    if type(module) is nn.ReLU:
        stage = Activation(0.0)
    elif type(module) is nn.LeakyReLU:
        if not 0 <= module.negative_slope <= 1:
            return f" with the slope {module.negative_slope}"
        stage = Activation(float(module.negative_slope))
    else:
        pool = _pool(module)
        if isinstance(pool, str):
            return pool
        stage = pool
    if not chain.layers:
        return ", before the first weighted layer"
    chain.stages.append(stage)
    return None


def _pool(module: nn.Module) -> Pool | str:
    if isinstance(module, nn.AdaptiveAvgPool2d):
        return Pool("average") if _pair(module.output_size) == (1, 1) else f" of size {module.output_size}"
    if not isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)):
        return ""
    kernel, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
    if padding != (0, 0) or module.ceil_mode:
        return " with padding or ceil_mode"
    if isinstance(module, nn.AvgPool2d):
        if module.divisor_override is not None:
            return " with divisor_override"
        return Pool("average", Windows(kernel, stride))
    if stride != kernel or _pair(module.dilation) != (1, 1):
        return " whose windows overlap or are dilated"
    return Pool("max", Windows(kernel, stride))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def output_counts(stages: list[Stage], shape: tuple[int, ...]) -> dict[int, int]:
    """Outputs of every weighted stage with all their positions, for inputs ``(...)`` of this shape.

    Raises:
        PosthocUQError: a layer gets inputs that it cannot take.
    """
    counts: dict[int, int] = {}
    for index, stage in enumerate(stages):
        if isinstance(stage, Weighted):
            spatial = stage.windows is not None
            if len(shape) != (3 if spatial else 1):
                raise PosthocUQError(
                    f"Layer '{stage.name}' gets inputs of shape {shape} in message passing; a Linear takes one row a "
                    f"sample (put a Flatten before it), a Conv2d images of channels, height and width."
                )
            sides = () if stage.windows is None else stage.windows.size(shape[1], shape[2])
            shape = (stage.groups * stage.outputs, *sides)
            counts[index] = prod(shape) // stage.groups
        elif isinstance(stage, Pool):
            shape = (shape[0], *stage.over(shape).size(shape[1], shape[2]))
        elif isinstance(stage, Flat):
            shape = tuple([prod(shape)])
    if len(shape) != 1:
        raise PosthocUQError(
            f"The model gives outputs of shape {shape} for a sample; message passing needs one row, so end it with a "
            f"Flatten or a Linear."
        )
    return counts


def folded_parameters(
    layer: Layer, fold: Fold | None, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """A layer's trained weights ``(G, I, J)`` and biases ``(G, J)`` with what is folded into them, in float64."""
    weight = as_double(parameters[layer.weight].detach())
    bias = None if layer.bias is None else as_double(parameters[layer.bias].detach())
    matrix = layer.to_matrix(weight, None).transpose(1, 2)
    biases = None if bias is None else bias.reshape(layer.groups, layer.outputs)
    if fold is not None:
        factor, offset = (part.reshape(layer.groups, layer.outputs) for part in (fold.factor, fold.offset))
        matrix = matrix * factor.unsqueeze(1)
        biases = None if biases is None else biases * factor + offset
    return matrix, biases


def unfolding(layer: Layer, fold: Fold | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """By what folded weights are multiplied to become the layer's, and what is added to them then, ``(G, J, 1)`` and
    ``(G, J)`` (the latter to biases alone).
    """
    shape = layer.groups, layer.outputs
    if fold is None:
        one = as_double(torch.ones(shape, device=device))
        return one.unsqueeze(2), torch.zeros_like(one)
    factor = fold.factor.reciprocal()
    return factor.reshape(*shape, 1), (-fold.offset * factor).reshape(shape)


# One pass of messages through the stages, forward and back.


@dataclass
class Memory:
    """What an example keeps from one pass to the next.

    Attributes:
        weights: by stage, its present messages to the weights.
        back: by stage, the last message back: to its inputs (a layer), or to its outputs (an activation).
    """

    weights: dict[int, LayerMessage] = field(default_factory=lambda: dict[int, LayerMessage]())
    back: dict[int, Message] = field(default_factory=lambda: dict[int, Message]())


@dataclass
class _Trace:
    """What the way forward leaves for the way back, of a stage.

    Attributes:
        shape: of the inputs.
        message: to the inputs; None where they are constant.
        layer: what the outputs of a layer over uncertain inputs were computed from.
        inputs: of a layer over constant ones, as rows.
        weights: the cavities of that layer's weights.
        bias: mean and variance of the biases' cavities.
        outputs: mean and variance of a layer's rows of outputs.
    """

    shape: torch.Size
    message: Message | None
    layer: factors.Hidden | None = None
    inputs: Tensor | None = None
    weights: Message | None = None
    bias: tuple[Tensor, Tensor] | None = None
    outputs: tuple[Tensor, Tensor] | None = None


class Pass:
    """One pass; `forward` and then, for a single example, `backward` stage by stage.

    Args:
        stages: of the network.
        marginals: of the weights, by stage.
        memory: of the example; changed by `backward`.
    """

    def __init__(
        self, stages: Sequence[Stage], marginals: Mapping[int, LayerMessage], memory: Memory
    ) -> None:
        self._stages, self._marginals, self._memory = stages, marginals, memory
        self._traces: list[_Trace] = []
        self.least_precision: Tensor | None = None

    def forward(self, x: Tensor) -> Message:
        """Messages to the outputs, ``(K, N, J)``, for constant inputs ``(K, N, ...)``."""
        constant: Tensor | None = x
        message: Message | None = None
        for index, stage in enumerate(self._stages):
            shape = x.shape if message is None else message.rho.shape
            trace = _Trace(shape, message)
            self._traces.append(trace)
            if constant is not None:
                if isinstance(stage, Weighted):
                    message = self._first(index, stage, constant, trace)
                    constant = None
                else:  # only a flattening comes before the first layer
                    constant = x = constant.flatten(2)
                continue
            assert message is not None
            if isinstance(stage, Weighted):
                message = self._hidden(index, stage, message, trace)
            elif isinstance(stage, Activation):
                after = self._memory.back.get(index)
                if after is None:
                    message = factors.direct_forward(message, stage.slope)
                else:
                    message = factors.activation_forward(message, after, stage.slope)
            elif isinstance(stage, Pool):
                images, windows = _merged(message), stage.over(shape)
                message = _split(pool_forward(images, windows, stage.kind), shape)
            else:
                message = Message(*(part.flatten(2) for part in message))
        assert message is not None
        return message

    def _first(self, index: int, stage: Weighted, x: Tensor, trace: _Trace) -> Message:
        rows = stage.rows(x)
        weights, sent = _by_example(self._marginals[index].weights), self._memory.weights.get(index)
        if sent is not None:
            weights = divided(weights, _by_example(sent.weights))
        weights = self._cavity(weights)
        trace.inputs, trace.weights = rows, weights
        trace.bias = self._bias_cavity(index, stage, x.shape[0], rows)
        trace.outputs = factors.first_forward(rows, weights, *trace.bias)
        return from_moments(*(stage.outputs_of(part, trace.shape) for part in trace.outputs))

    def _hidden(self, index: int, stage: Weighted, message: Message, trace: _Trace) -> Message:
        back = self._memory.back.get(index)  # this layer's last message to its inputs
        inputs = clamped(message if back is None else multiplied(message, back))
        weights = self._marginals[index].weights
        mean, variance = stage.rows(inputs.mean), stage.rows(inputs.variance)
        trace.bias = self._bias_cavity(index, stage, message.rho.shape[0], mean)
        trace.layer = factors.Hidden(mean, variance, weights.mean, weights.variance, *trace.bias)
        trace.outputs = factors.hidden_forward(trace.layer)
        return from_moments(*(stage.outputs_of(part, trace.shape) for part in trace.outputs))

    def _bias_cavity(self, index: int, stage: Weighted, networks: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the biases without this example, with the constants that are added."""
        offset = stage.offset_rows(networks)
        if not stage.bias:
            return torch.as_tensor(offset, dtype=like.dtype, device=like.device), like.new_zeros(())
        cavity, sent = self._marginals[index].bias, self._memory.weights.get(index)
        cavity = self._cavity(_by_example(cavity if sent is None else divided(cavity, sent.bias)))
        return cavity.mean.unsqueeze(2) + offset, cavity.variance.unsqueeze(2)

    def _cavity(self, cavity: Message) -> Message:
        """The cavity with a precision of 1e-8 at least; the least is noted."""
        smallest = cavity.rho.min()
        so_far = self.least_precision
        self.least_precision = smallest if so_far is None else torch.minimum(so_far, smallest)
        return clamped(cavity)

    def backward(self, index: int, back: Message) -> tuple[Message | None, LayerMessage | None]:
        """The message before a stage, and the one to its weights, where it has any.

        Args:
            index: of the stage; stages are called from the last to the first.
            back: the message to its outputs.
        """
        stage, trace = self._stages[index], self._traces[index]
        if isinstance(stage, Weighted):
            return self._weighted_backward(index, stage, trace, back)
        if trace.message is None:
            return None, None
        if isinstance(stage, Activation):
            self._memory.back[index] = back
            return factors.activation_backward(trace.message, back, stage.slope), None
        if isinstance(stage, Pool):
            windows = stage.over(trace.shape)
            message = pool_backward(_merged(trace.message), _merged(back), windows, stage.kind)
            return _split(message, trace.shape), None
        return Message(*(part.reshape(trace.shape) for part in back)), None

    def _weighted_backward(
        self, index: int, stage: Weighted, trace: _Trace, back: Message
    ) -> tuple[Message | None, LayerMessage]:
        assert trace.outputs is not None and trace.bias is not None
        rows = Message(*(stage.output_rows(part) for part in back))
        to_bias = factors.bias_backward(*trace.bias, *trace.outputs, rows)
        if trace.layer is None:
            assert trace.inputs is not None and trace.weights is not None
            to_weights = factors.first_backward(trace.inputs, trace.weights, *trace.outputs, rows)
            return None, _of_layer(stage, to_weights, to_bias)
        to_rows, to_weights = factors.hidden_backward(trace.layer, *trace.outputs, rows)
        informed = (trace.outputs[1].reciprocal() > 2 * MIN_PRECISION) | (rows.rho > 2 * MIN_PRECISION)
        to_rows = select(informed.any(-1, keepdim=True), to_rows, uniform_like(to_rows.rho))
        to_inputs = clamped(Message(*(stage.from_rows(part, trace.shape) for part in to_rows)))
        self._memory.back[index] = to_inputs
        return to_inputs, _of_layer(stage, to_weights, to_bias)


def _of_layer(stage: Weighted, to_weights: Message, to_bias: Message) -> LayerMessage:
    """Messages by example as those of all examples; without numbers for the bias of a layer that has none."""
    weights = Message(*(part.sum(1) for part in to_weights))
    bias = Message(*(part.sum(1)[..., : None if stage.bias else 0] for part in to_bias))
    return LayerMessage(weights, bias)


def _by_example(message: Message) -> Message:
    """With a dimension for examples after the first."""
    return Message(message.tau.unsqueeze(1), message.rho.unsqueeze(1))


def _merged(message: Message) -> Message:
    return Message(*(part.flatten(0, 1) for part in message))


def _split(message: Message, shape: torch.Size) -> Message:
    return Message(*(part.unflatten(0, shape[:2]) for part in message))


def networks_of(stages: Sequence[Stage], weights: Mapping[int, LayerMessage]) -> int:
    """The number of networks that messages to weights belong to."""
    first = min(weights)
    stage = stages[first]
    assert isinstance(stage, Weighted)
    return weights[first].weights.rho.shape[0] // stage.groups


def outputs_of(
    stages: Sequence[Stage], posterior: Mapping[int, LayerMessage], inputs: Tensor, *, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs, ``(K, N, J)``, for inputs ``(N, ...)``: messages forward alone.

    Args:
        stages: of the network.
        posterior: of the weights, by stage.
        inputs: in float64.
        chunk: examples that pass at the same time.
    """
    networks = networks_of(stages, posterior)
    found = [
        Pass(stages, posterior, Memory()).forward(part.unsqueeze(0).expand(networks, *part.shape))
        for part in inputs.split(chunk)
    ]
    return torch.cat([m.mean for m in found], 1), torch.cat([m.variance for m in found], 1)
