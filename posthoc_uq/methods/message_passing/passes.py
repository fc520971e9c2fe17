"""One chunk of examples forward and back, and outputs by messages forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.methods.message_passing import activations, linear
from posthoc_uq.methods.message_passing.gaussian import FLOOR, Message, chosen, clamped, divided, from_moments
from posthoc_uq.methods.message_passing.network import (
    Activation,
    Belief,
    Pool,
    Stage,
    Weighted,
    input_marginal,
    spread,
)
from posthoc_uq.methods.message_passing.windows import pool_backward, pool_forward

# One pass of messages through a chain of stages, forward and back, for a chunk of examples.

MATMUL_FROM = 128
"""Inputs of a layer from which its messages may be made by matrix products alone."""


@dataclass(frozen=True)
class Forms:
    """How the messages of layers are computed.

    Attributes:
        grouped: all messages of a batch together, for a network of one linear layer
            (`posthoc_uq.methods.message_passing.fit.groups`).
        matmul: by matrix products alone where a layer has `MATMUL_FROM` inputs, which leaves out terms of about one
            over their number.
        least_mass: see `posthoc_uq.methods.message_passing.fit.activations.forward`.
        numbers: that a temporary may have.
    """

    grouped: bool = False
    matmul: bool = False
    least_mass: float = activations.LEAST_MASS
    numbers: int = 2**22

    def by_products(self, layer: Weighted) -> bool:
        """Whether a layer's messages are made by matrix products alone."""
        return self.matmul and layer.inputs >= MATMUL_FROM


class Told(NamedTuple):
    """What a chunk of examples told a layer.

    Attributes:
        weights: to the weights, by example ``(L, n, I, J)`` or summed ``(L, 1, I, J)``.
        bias: to the bias by example, ``(L, n, J)``.
    """

    weights: Message
    bias: Message

    def damped(self, old: Told | None, share: float) -> Told:
        """``(1 - share) old + share self``."""
        if old is None:
            return self if share == 1 else Told(*(Message(*(share * part for part in m)) for m in self))
        return Told(
            *(
                Message(*(x.lerp(y, share) for x, y in zip(before, after, strict=True)))
                for before, after in zip(old, self, strict=True)
            )
        )

    def total(self) -> Belief:
        """Of all examples."""
        return Belief(*(Message(*(part.sum(1) for part in message)) for message in self))


@dataclass
class Memory:
    """What a chunk of examples keeps from one iteration to the next.

    Attributes:
        told: by stage, its present messages to weights.
        back: by stage, the last message back: to its inputs (a layer), or to its outputs (an activation).
    """

    told: dict[int, Told] = field(default_factory=lambda: dict[int, Told]())
    back: dict[int, Message] = field(default_factory=lambda: dict[int, Message]())


@dataclass
class _Trace:
    """What the way forward leaves for the way back, of one stage."""

    shape: torch.Size
    message: Message | None
    inputs: Tensor | None = None
    weights: Message | None = None
    hidden: linear.Hidden | None = None
    bias_mean: Tensor | None = None
    bias_variance: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None


class Pass:
    """One chunk's pass; `forward` and then `backward` stage by stage.

    Args:
        stages: of the network.
        beliefs: the weights' marginals by stage.
        memory: of the chunk; changed by `backward`.
        forms: how messages are computed.
        detailed: whether the first layer's messages are kept by example, and its cavities made of them; else the
            marginal stands for the cavity, as it is in the first iteration.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        beliefs: dict[int, Belief],
        memory: Memory,
        forms: Forms,
        *,
        detailed: bool,
    ) -> None:
        self._stages, self._beliefs, self._memory = stages, beliefs, memory
        self._forms, self._detailed = forms, detailed
        self._traces: list[_Trace] = []
        self.least_precision: Tensor | None = None

    def forward(self, x: Tensor) -> Message:
        """Messages to the outputs, ``(K, n, J)``, for constant inputs ``(K, n, ...)``."""
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
                    message = activations.direct_forward(message, stage.slope)
                else:
                    message = activations.forward(
                        message, after, stage.slope, least_mass=self._forms.least_mass
                    )
            elif isinstance(stage, Pool):
                images, windows = _merged(message), stage.over(shape)
                message = _split(pool_forward(images, windows, stage.kind), shape)
            else:
                message = Message(*(part.flatten(2) for part in message))
        assert message is not None
        return message

    def _bias_cavity(
        self, index: int, stage: Weighted, networks: int
    ) -> tuple[Tensor | float, Tensor | float]:
        offset = stage.offset_rows(networks)
        if not stage.bias:
            return offset, 0.0
        cavity, told = spread(self._beliefs[index].bias), self._memory.told.get(index)
        cavity = self._checked(cavity if told is None else divided(cavity, told.bias))
        return cavity.mean.unsqueeze(2) + offset, cavity.variance.unsqueeze(2)

    def _checked(self, cavity: Message) -> Message:
        """The cavity with a precision of 1e-8 at least; the least is noted."""
        least = cavity.rho.min()
        known = self.least_precision
        self.least_precision = least if known is None else torch.minimum(known, least)
        return clamped(cavity)

    def _first(self, index: int, stage: Weighted, x: Tensor, trace: _Trace) -> Message:
        rows = stage.rows(x)
        weights, told = spread(self._beliefs[index].weights), self._memory.told.get(index)
        if told is not None and self._detailed:
            weights = divided(weights, told.weights)
        weights = self._checked(weights)
        bias_mean, bias_variance = self._bias_cavity(index, stage, x.shape[0])
        mean, variance = linear.first_forward(rows, weights, _as(bias_mean, rows), _as(bias_variance, rows))
        trace.inputs, trace.weights, trace.mean, trace.variance = rows, weights, mean, variance
        trace.bias_mean, trace.bias_variance = _as(bias_mean, rows), _as(bias_variance, rows)
        return self._outputs(stage, mean, variance, trace)

    def _hidden(self, index: int, stage: Weighted, message: Message, trace: _Trace) -> Message:
        marginal = input_marginal(message, self._memory.back.get(index))
        belief = self._beliefs[index].weights
        bias_mean, bias_variance = self._bias_cavity(index, stage, message.rho.shape[0])
        rows = stage.rows(marginal.mean), stage.rows(marginal.variance)
        layer = linear.Hidden(
            *rows, belief.mean, belief.variance, _as(bias_mean, rows[0]), _as(bias_variance, rows[0])
        )
        trace.hidden = layer
        trace.mean, trace.variance = linear.hidden_forward(layer)
        trace.bias_mean, trace.bias_variance = layer.bias_mean, layer.bias_variance
        return self._outputs(stage, trace.mean, trace.variance, trace)

    def _outputs(self, stage: Weighted, mean: Tensor, variance: Tensor, trace: _Trace) -> Message:
        outputs = (stage.outputs_of(part, trace.shape) for part in (mean, variance))
        return from_moments(*outputs)

    def backward(self, index: int, back: Message) -> tuple[Message | None, Told | None]:
        """The message before a stage, and what the stage tells its weights, where it has any.

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
            return activations.backward(trace.message, back, stage.slope), None
        if isinstance(stage, Pool):
            windows = stage.over(trace.shape)
            message = pool_backward(_merged(trace.message), _merged(back), windows, stage.kind)
            return _split(message, trace.shape), None
        return Message(*(part.reshape(trace.shape) for part in back)), None

    def _weighted_backward(
        self, index: int, stage: Weighted, trace: _Trace, back: Message
    ) -> tuple[Message | None, Told]:
        rows = Message(*(stage.output_rows(part) for part in back))
        mean, variance = trace.mean, trace.variance
        assert mean is not None and variance is not None
        products = self._forms.by_products(stage)
        if trace.hidden is None:
            assert trace.inputs is not None and trace.weights is not None
            assert trace.bias_mean is not None and trace.bias_variance is not None
            given = trace.inputs, trace.weights, mean, variance, rows
            if products and not self._detailed:
                weights = linear.first_backward_matmul(*given)
            else:
                weights = linear.first_backward(
                    *given, per_example=self._detailed, numbers=self._forms.numbers
                )
            to_bias = linear.bias_backward(trace.bias_mean, trace.bias_variance, mean, variance, rows)
            return None, Told(weights, _kept(stage, to_bias))
        if products:
            told = linear.hidden_backward_matmul(trace.hidden, mean, variance, rows)
        else:
            told = linear.hidden_backward(
                trace.hidden, mean, variance, rows, per_example=False, numbers=self._forms.numbers
            )
        assert told.to_inputs is not None
        heard = (variance.reciprocal() > 2 * FLOOR) | (rows.rho > 2 * FLOOR)
        zero = Message(*(torch.zeros_like(part) for part in told.to_inputs))
        to_rows = chosen(heard.any(-1, keepdim=True), told.to_inputs, zero)
        to_inputs = clamped(Message(*(stage.from_rows(part, trace.shape) for part in to_rows)))
        self._memory.back[index] = to_inputs
        return to_inputs, Told(told.to_weights, _kept(stage, told.to_bias))


def _as(value: Tensor | float, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.new_full((), value)


def _kept(stage: Weighted, to_bias: Message) -> Message:
    """Nothing for a layer without a bias."""
    return to_bias if stage.bias else Message(*(part[..., :0] for part in to_bias))


def _merged(message: Message) -> Message:
    return Message(*(part.flatten(0, 1) for part in message))


def _split(message: Message, shape: torch.Size) -> Message:
    return Message(*(part.unflatten(0, shape[:2]) for part in message))


# Predictions of a network whose weights have Gaussian marginals: messages forward alone.


def outputs_of(
    stages: Sequence[Stage], posterior: Mapping[int, Belief], inputs: Tensor, *, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs, ``(K, N, J)``, for inputs ``(N, ...)``.

    Args:
        stages: of the network.
        posterior: of the weights, by stage.
        inputs: in float64.
        chunk: examples that pass at the same time.
    """
    networks = 1
    means: list[Tensor] = []
    variances: list[Tensor] = []
    first = min(posterior)
    groups = getattr(stages[first], "groups", 1)
    networks = posterior[first].weights.rho.shape[0] // groups
    for part in inputs.split(chunk):
        own = part.unsqueeze(0).expand(networks, -1, *part.shape[1:])
        message = Pass(stages, dict(posterior), Memory(), Forms(), detailed=False).forward(own)
        means.append(message.mean)
        variances.append(message.variance)
    return torch.cat(means, 1), torch.cat(variances, 1)
