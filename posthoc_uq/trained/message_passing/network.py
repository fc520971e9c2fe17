"""A sequential network as stages, and passes of messages through them.

Messages between stages are ``(K, N, ...)``: K networks, N examples, and the shape of an example; messages to the
weights of a layer have the shape of its matrices, ``(K, groups, outputs, inputs)``, the bias as the last column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError, UnsupportedLayerError
from posthoc_uq.core.model import replicate
from posthoc_uq.core.outputs import chosen_in
from posthoc_uq.layers import WEIGHTED_MODULES, AffineCall, Geometry, Layer
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.operands import Patches, Unfolding
from posthoc_uq.trained.message_passing.messages import (
    MIN_PRECISION,
    Message,
    Products,
    activation_backward,
    activation_forward,
    clamp,
    direct_forward,
    divide,
    from_moments,
    multiply,
    select,
    sum_backward,
    sum_forward,
    uniform_like,
    winning_shares,
)

Backward = Callable[[Message], tuple[Message | None, Message | None]]
"""From the message to a stage's outputs to that to its inputs (None for constants), and that to its weights, if any."""


@dataclass
class StageMemory:
    """What an example keeps of a stage from one pass to the next.

    Attributes:
        to_weights: its present message to the weights, ``(K, G, J, I)``.
        back: its last message back: to the inputs of a layer, or to the outputs of an activation.
        least_precision: of a weight without this example, in the last pass.
    """

    to_weights: Message | None = None
    back: Message | None = None
    least_precision: Tensor | None = None


class Weighted:
    """A layer with weights: rows of its inputs times matrices, as the rule of its kind has them.

    Args:
        layer: the layer.
        geometry: how its kernel moves.
        inputs: shape of an example's inputs.
        outputs: shape of an example's outputs.
        device: of the messages.
    """

    def __init__(
        self,
        layer: Layer,
        geometry: Geometry,
        inputs: Sequence[int],
        outputs: Sequence[int],
        device: torch.device,
    ) -> None:
        self.layer, self.outputs = layer, tuple(outputs)
        self._unfolding = Unfolding(lambda x: layer.rule.unfold(x, layer, geometry), inputs, device)

    def forward(
        self, inputs: Message | Tensor, marginal: Message, kept: StageMemory
    ) -> tuple[Message, Backward]:
        """Messages to the outputs, and the way back.

        Args:
            inputs: messages ``(K, N, ...)`` to them, or constants.
            marginal: of the weights.
            kept: of one example, or empty; the way back changes it.
        """
        weights, sent = marginal, kept.to_weights
        if isinstance(inputs, Tensor):
            mean, variance = self._rows(inputs, 1.0), None
            weights = weights if sent is None else divide(weights, sent)
        else:
            clear = clamp(inputs if kept.back is None else multiply(inputs, kept.back))
            mean, variance = self._rows(clear.mean, 1.0), self._rows(clear.variance, 0.0)
            if sent is not None and self.layer.bias is not None:  # only its input is a constant
                weights = Message(*(part.clone() for part in weights))
                for part, own in zip(weights, sent, strict=True):
                    part[..., -1] -= own[..., -1]
        kept.least_precision = weights.rho.min()
        weight_variance = weights.rho.clamp(min=MIN_PRECISION).reciprocal()
        products = Products(mean, variance, weights.mean.unsqueeze(1), weight_variance.unsqueeze(1))
        outputs = products.forward()

        def backward(back: Message) -> tuple[Message | None, Message | None]:
            rows = Message(*(self._output_rows(part) for part in back))
            to_rows, to_weights = products.backward(*outputs, rows)
            to_weights = Message(*(part.sum(1) for part in to_weights))
            if to_rows is None:
                return None, to_weights
            informed = (outputs[1].reciprocal() > 2 * MIN_PRECISION) | (rows.rho > 2 * MIN_PRECISION)
            to_rows = select(informed.any(-1, keepdim=True), to_rows, uniform_like(to_rows.rho))
            kept.back = clamp(Message(*(self._folded(part) for part in to_rows)))
            return kept.back, to_weights

        return from_moments(*(self._from_output_rows(part) for part in outputs)), backward

    @property
    def _inputs(self) -> int:
        """Of a row, the bias not counted."""
        return self.layer.inputs - (self.layer.bias is not None)

    def _rows(self, x: Tensor, of_bias: float) -> Tensor:
        """Inputs ``(K, N, ...)`` as rows ``(K, N, G, P, I)``, with that number for the bias's input."""
        rows = self._unfolding.rows(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return rows if self.layer.bias is None else F.pad(rows, (0, 1), value=of_bias)

    def _folded(self, rows: Tensor) -> Tensor:
        folded = self._unfolding.fold(rows[..., : self._inputs].flatten(0, 1))
        return folded.unflatten(0, rows.shape[:2])

    def _output_rows(self, outputs: Tensor) -> Tensor:
        rows = self.layer.rule.output_rows(outputs.flatten(0, 1), self.layer)
        return rows.unflatten(0, outputs.shape[:2])

    def _from_output_rows(self, rows: Tensor) -> Tensor:
        outputs = self.layer.rule.outputs_of_rows(rows.flatten(0, 1), self.outputs)
        return outputs.unflatten(0, rows.shape[:2])


class Stage(Protocol):
    """A stage without weights."""

    def forward(self, inputs: Message, kept: StageMemory) -> tuple[Message, Backward]:
        """As `Weighted.forward`."""
        ...


@dataclass(frozen=True)
class Activation:
    """A LeakyReLU.

    Attributes:
        slope: of the negative side; 0 for a ReLU.
    """

    slope: float

    def forward(self, inputs: Message, kept: StageMemory) -> tuple[Message, Backward]:
        def backward(back: Message) -> tuple[Message, None]:
            kept.back = back
            return activation_backward(inputs, back, self.slope), None

        if kept.back is None:
            return direct_forward(inputs, self.slope), backward
        return activation_forward(inputs, kept.back, self.slope), backward


@dataclass(frozen=True, eq=False)
class BatchNormStage:
    """A BatchNorm: every channel times a factor, plus an offset; both ``(channels, 1, ...)`` in float64."""

    factor: Tensor
    offset: Tensor

    def forward(self, inputs: Message, kept: StageMemory) -> tuple[Message, Backward]:
        def backward(back: Message) -> tuple[Message, None]:
            tau = self.factor * (back.tau - self.offset * back.rho)
            return Message(tau, self.factor.square() * back.rho), None

        rho = inputs.rho / self.factor.square()
        return Message(inputs.tau / self.factor + self.offset * rho, rho), backward


class PoolingStage:
    """Average pooling, or a soft selection of the largest, with weights by `winning_shares`.

    The mean of the selection is not the mean of the maximum: it is a weighted mean of the cells. Cells without a window
    get messages of precision 1e-8.

    Args:
        maximum: whether it selects.
        kernel: of the windows.
        stride: of the windows.
        inputs: shape of an example's inputs.
        device: of the messages.
    """

    def __init__(
        self,
        maximum: bool,
        kernel: Sequence[int],
        stride: Sequence[int],
        inputs: Sequence[int],
        device: torch.device,
    ) -> None:
        none, ones = (0,) * len(kernel), (1,) * len(kernel)
        geometry = Geometry(tuple(stride), none, ones)
        self._maximum, self._channels = maximum, inputs[0]
        self._outputs = (
            inputs[0],
            *((n - k) // s + 1 for n, k, s in zip(inputs[1:], kernel, stride, strict=True)),
        )
        self._unfolding = Unfolding(
            lambda x: Patches(x, kernel, geometry, groups=inputs[0]).rows(), inputs, device
        )

    def forward(self, inputs: Message, kept: StageMemory) -> tuple[Message, Backward]:
        lead = inputs.rho.shape[:2]
        mean, variance = (self._unfolding.rows(part.flatten(0, 1)) for part in (inputs.mean, inputs.variance))
        shares = (
            winning_shares(mean, variance) if self._maximum else torch.full_like(mean, 1 / mean.shape[-1])
        )

        def backward(back: Message) -> tuple[Message, None]:
            to_cells = sum_backward(
                shares, mean, variance, Message(*(p.flatten(3).flatten(0, 1) for p in back))
            )
            to_inputs = Message(*(self._unfolding.fold(part).unflatten(0, lead) for part in to_cells))
            return clamp(to_inputs), None

        found = from_moments(*sum_forward(shares, mean, variance))
        return clamp(Message(*(part.reshape(*lead, *self._outputs) for part in found))), backward


@dataclass(frozen=True)
class Reshape:
    """The numbers of an example in another shape."""

    outputs: tuple[int, ...]

    def forward(self, inputs: Message, kept: StageMemory) -> tuple[Message, Backward]:
        shape = inputs.rho.shape

        def backward(back: Message) -> tuple[Message, None]:
            return Message(*(part.reshape(shape) for part in back)), None

        return Message(*(part.reshape(*shape[:2], *self.outputs) for part in inputs)), backward


Stages = Sequence[Weighted | Stage]
ByStage = dict[int, Message]
"""Messages to weights, by the place of the stage in the network."""


def pass_messages(
    stages: Stages, marginals: Mapping[int, Message], memory: Sequence[StageMemory], x: Tensor
) -> tuple[Message, list[Backward]]:
    """Messages to the outputs, ``(K, N, J)``, and by stage the way back, which begins with the last.

    Args:
        stages: of the network; the first has weights.
        marginals: of the weights, by stage.
        memory: of the example, by stage.
        x: constant inputs ``(K, N, ...)``.
    """
    message: Message | Tensor = x
    ways_back: list[Backward] = []
    for index, (stage, kept) in enumerate(zip(stages, memory, strict=True)):
        if isinstance(stage, Weighted):
            message, back = stage.forward(message, marginals[index], kept)
        else:
            assert isinstance(message, Message)
            message, back = stage.forward(message, kept)
        ways_back.append(back)
    assert isinstance(message, Message)
    return message, ways_back


def outputs_of(
    stages: Stages, posterior: Mapping[int, Message], inputs: Tensor, *, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs, ``(K, N, J)``, for inputs ``(N, ...)`` of the first layer.

    Args:
        stages: of the network.
        posterior: of the weights, by stage.
        inputs: in float64.
        chunk: examples that pass at the same time.
    """
    networks = len(posterior[0].rho)
    found = [
        pass_messages(stages, posterior, [StageMemory() for _ in stages], part.expand(networks, *part.shape))[
            0
        ]
        for part in inputs.split(chunk)
    ]
    return torch.cat([m.mean for m in found], 1), torch.cat([m.variance for m in found], 1)


# A sequential model as stages.

_SUPPORTED = (
    "layers with weights that the library knows, ReLU, LeakyReLU, max pooling (stride = kernel, no padding), average "
    "pooling (no padding; adaptive to size 1), Flatten, Unflatten, Dropout, Identity, BatchNorm, and anything before "
    "the first layer with weights"
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_WHOLE_AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_MAX_ERROR = 1e-2  # of a layer's outputs by its matrices, relative to the largest of them


def stages_of(model: nn.Module, layers: Mapping[str, Layer], x: Tensor) -> list[Weighted | Stage]:
    """The stages of a model from its first layer with weights on; what comes before gives that layer constants.

    Args:
        model: `torch.nn.Sequential`, which may hold others.
        layers: those with a posterior, which must be all.
        x: inputs of one example, ``(1, ...)``.

    Raises:
        UnsupportedLayerError: the model is no chain, or has modules that messages cannot pass; names all of them.
        PosthocUQError: a weighted layer is to have no posterior, or the outputs are more than one row.
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
    stages, faults, left = list[Weighted | Stage](), list[str](), dict(layers)
    twin = replicate(model)
    held = {name: as_double(parameter) for name, parameter in twin.named_parameters()}
    with torch.no_grad():
        for path, module in _flattened(twin):
            inputs, x = x, module(x)
            stage: Weighted | Stage | str | None
            if path in layers:
                layer = left.pop(path, None)
                stage = ", which is used twice" if layer is None else _weighted(layer, module, inputs, held)
            elif isinstance(module, WEIGHTED_MODULES):
                stage = ", which gets no posterior; select all layers"
            else:
                stage = _unweighted(module, inputs, x) if stages else None
            if isinstance(stage, str):
                faults.append(f"'{path}' ({type(module).__name__}{stage})")
            elif stage is not None:
                stages.append(stage)
    if faults:
        raise UnsupportedLayerError(
            f"Messages cannot pass {', '.join(faults)}; they pass {_SUPPORTED}. Take layers='last' for a posterior of "
            f"the last layer alone."
        )
    if left or not stages:
        raise PosthocUQError(
            f"layers='all' of method='message_passing' treats every weighted layer once, which leaves out "
            f"{sorted(left)}; use each module once, and select none of them."
        )
    if x.ndim != 2:
        raise PosthocUQError(
            f"The model gives outputs of shape {tuple(x.shape[1:])} for a sample; message passing needs one row, so "
            f"end it with a Flatten or a Linear."
        )
    return stages


def _flattened(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in model._modules.items():  # pyright: ignore[reportPrivateUsage]  # also one that is used twice
        here = f"{path}.{name}" if path else name
        if type(module) is nn.Sequential:
            yield from _flattened(module, here)
        elif module is not None:
            yield here, module


def _weighted(layer: Layer, module: nn.Module, inputs: Tensor, held: Mapping[str, Tensor]) -> Weighted | str:
    """The stage of a layer, or what is wrong with it, as a part of a sentence: random inputs show whether the module is
    the layer's matrices alone.
    """
    calls: list[AffineCall] = []
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(inputs.shape, generator=generator, device="cpu").to(inputs)
    with CallWatcher(
        {id(p) for p in module.parameters()}, lambda call, _: calls.append(call), anchored=False
    ):
        outputs = as_double(module(probe))
    if len(calls) != 1 or calls[0].kind != layer.kind:
        return ", which is not one use of its weight"
    if len(inputs) != 1 or len(outputs) != 1:
        return ", whose inputs or outputs do not count the samples"
    more = ", which does more than to apply its weight (padding with other numbers than 0, for instance)"
    if calls[0].input.numel() != probe.numel():
        return more
    stage = Weighted(layer, calls[0].geometry, inputs.shape[1:], outputs.shape[1:], outputs.device)
    bias = None if layer.bias is None else held[layer.bias]
    matrix = layer.to_matrix(held[layer.weight], bias).unsqueeze(0)
    certain = Message(matrix, torch.ones_like(matrix))  # means do not depend on the precision
    found = stage.forward(as_double(probe).unsqueeze(0), certain, StageMemory())[0].mean
    if not float((found[0] - outputs).abs().max()) <= _MAX_ERROR * float(outputs.abs().max()):
        return more
    return stage


def _unweighted(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Stage | str | None:
    """The stage of a module without weights, None where it does nothing, or what is wrong with it."""
    axes = inputs.ndim - 2
    if isinstance(module, _IDENTITIES):
        return None
    if isinstance(module, (nn.Flatten, nn.Unflatten)) and len(outputs) == 1:
        return Reshape(tuple(outputs.shape[1:]))
    if type(module) is nn.ReLU:
        return Activation(0.0)
    if type(module) is nn.LeakyReLU:
        slope = float(module.negative_slope)
        return Activation(slope) if 0 <= slope <= 1 else f" with the slope {slope}"
    if isinstance(module, _NORMS):
        return _scale(module, axes)
    device = as_double(outputs).device
    if isinstance(module, _WHOLE_AVERAGES):
        if outputs[0, 0].numel() != 1:
            return f" of size {module.output_size}"
        return PoolingStage(False, inputs.shape[2:], inputs.shape[2:], inputs.shape[1:], device)
    if not isinstance(module, (*_MAXIMA, *_AVERAGES)):
        return ""
    kernel, stride = _each_axis(module.kernel_size, axes), _each_axis(module.stride, axes)
    if any(_each_axis(module.padding, axes)) or module.ceil_mode:
        return " with padding or ceil_mode"
    if isinstance(module, _AVERAGES):
        if getattr(module, "divisor_override", None) is not None:
            return " with divisor_override"
    elif stride != kernel or _each_axis(module.dilation, axes) != (1,) * axes:
        return " whose windows overlap or are dilated"
    return PoolingStage(isinstance(module, _MAXIMA), kernel, stride, inputs.shape[1:], device)


def _scale(module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, axes: int) -> BatchNormStage | str:
    mean, variance = module.running_mean, module.running_var
    if mean is None or variance is None:
        return " without running statistics"
    factor = (as_double(variance) + module.eps).rsqrt()
    if module.weight is not None:
        factor = factor * as_double(module.weight)
    offset = -as_double(mean) * factor
    if module.bias is not None:
        offset = offset + as_double(module.bias)
    if not bool((factor.abs() > 1e-12).all()):
        return " with a weight of 0"
    return BatchNormStage(factor.reshape(-1, *[1] * axes), offset.reshape(-1, *[1] * axes))


def _each_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values
