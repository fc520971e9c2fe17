"""Sums, products and linear layers.

A linear layer is seen as ``(L, N, P, I) x (L, I, J) -> (L, N, P, J)``: L networks (times groups of a convolution), N
examples, P positions of an example (1 but for convolutions), I inputs, J outputs. All weights are independent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.methods.message_passing.gaussian import Message


def sum_forward(coefficients: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``sum_i c_i v_i`` over the last dimension."""
    return (coefficients * mean).sum(-1), (coefficients.square() * variance).sum(-1)


def sum_backward(coefficients: Tensor, mean: Tensor, variance: Tensor, back: Message) -> Message:
    """Messages from a sum to its parts, ``(..., parts)``; `back`, ``(...)``, is the message to the sum.

    Neither the inverse of the precision of `back` nor that of a coefficient is formed, so both may be 0.
    """
    whole_mean, whole_variance = sum_forward(coefficients, mean, variance)
    others = whole_mean.unsqueeze(-1) - coefficients * mean
    spread = whole_variance.unsqueeze(-1) - coefficients.square() * variance
    tau, rho = back.tau.unsqueeze(-1), back.rho.unsqueeze(-1)
    scale = 1 + rho * spread
    return Message(coefficients * (tau - rho * others) / scale, coefficients.square() * rho / scale)


def product_forward(
    a_mean: Tensor, a_variance: Tensor, b_mean: Tensor, b_variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``a b`` of independent factors."""
    second = b_variance + b_mean.square()
    return a_mean * b_mean, a_variance * second + a_mean.square() * b_variance


def product_backward(mean: Tensor, variance: Tensor, back: Message) -> Message:
    """The variational message from ``c = a b`` to one factor.

    Args:
        mean: of the other factor's marginal.
        variance: of the other factor's marginal.
        back: the message to ``c``.
    """
    return Message(back.tau * mean, back.rho * (variance + mean.square()))


class Hidden(NamedTuple):
    """What a linear layer over uncertain inputs works with.

    Attributes:
        input_mean: of the input marginals, ``(L, N, P, I)``.
        input_variance: likewise.
        weight_mean: of the weight marginals, ``(L, I, J)``.
        weight_variance: likewise.
        bias_mean: of the bias cavities, broadcasting against ``(L, N, P, J)``.
        bias_variance: likewise.
    """

    input_mean: Tensor
    input_variance: Tensor
    weight_mean: Tensor
    weight_variance: Tensor
    bias_mean: Tensor
    bias_variance: Tensor

    @property
    def weight_second(self) -> Tensor:
        """Second moments of the weights."""
        return self.weight_variance + self.weight_mean.square()

    @property
    def input_second(self) -> Tensor:
        """Second moments of the inputs."""
        return self.input_variance + self.input_mean.square()


class Backward(NamedTuple):
    """Messages of a linear layer.

    Attributes:
        to_inputs: ``(L, N, P, I)``, not clamped; None where they were not asked for.
        to_weights: summed over positions, ``(L, N, I, J)``; or over examples too, ``(L, 1, I, J)``.
        to_bias: summed over positions, ``(L, N, J)``.
    """

    to_inputs: Message | None
    to_weights: Message
    to_bias: Message


def hidden_forward(layer: Hidden) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs, ``(L, N, P, J)``."""
    weight_mean, weight_variance = layer.weight_mean.unsqueeze(1), layer.weight_variance.unsqueeze(1)
    mean = layer.input_mean @ weight_mean + layer.bias_mean
    variance = layer.input_variance @ (weight_variance + weight_mean.square())
    return mean, variance + layer.input_mean.square() @ weight_variance + layer.bias_variance


def bias_backward(
    bias_mean: Tensor, bias_variance: Tensor, mean: Tensor, variance: Tensor, back: Message
) -> Message:
    """Messages to the biases, ``(L, N, J)``: a bias is a part of the sum."""
    scale = 1 + back.rho * (variance - bias_variance)
    tau = (back.tau - back.rho * (mean - bias_mean)) / scale
    return Message(tau.sum(2), (back.rho / scale).sum(2))


def hidden_backward(
    layer: Hidden, mean: Tensor, variance: Tensor, back: Message, *, per_example: bool, numbers: int = 2**24
) -> Backward:
    """The messages of the exact form.

    Args:
        layer: as in the forward pass.
        mean: of the outputs, from `hidden_forward`.
        variance: likewise.
        back: the messages to the outputs, ``(L, N, P, J)``.
        per_example: whether messages to the weights are kept by example, or summed.
        numbers: that a temporary ``(L, examples, P, I, J)`` may have.
    """
    each = mean[:, :1].numel() * layer.input_mean.shape[-1]
    step = max(1, numbers // max(1, each))
    inputs: list[Message] = []
    weights: list[Message] = []
    for start in range(0, mean.shape[1], step):
        part = slice(start, start + step)
        to_inputs, to_weights = _exact_part(layer, mean, variance, back, part)
        inputs.append(to_inputs)
        weights.append(to_weights if per_example else _summed(to_weights))
    to_weights = joined(weights) if per_example else _summed(joined(weights))
    to_bias = bias_backward(layer.bias_mean, layer.bias_variance, mean, variance, back)
    return Backward(joined(inputs), to_weights, to_bias)


def _exact_part(
    layer: Hidden, mean: Tensor, variance: Tensor, back: Message, part: slice
) -> tuple[Message, Message]:
    """Messages to the inputs ``(L, n, P, I)`` and to the weights by example ``(L, n, I, J)`` of some examples."""
    a_mean, a_variance = (t[:, part].unsqueeze(-1) for t in (layer.input_mean, layer.input_variance))
    w_mean, w_variance = (t[:, None, None] for t in (layer.weight_mean, layer.weight_variance))
    w_second = w_variance + w_mean.square()
    tau, rho = (t[:, part].unsqueeze(-2) for t in back)
    own = a_variance * w_second + a_mean.square() * w_variance
    scale = 1 + rho * (variance[:, part].unsqueeze(-2) - own)
    precision = rho / scale
    field = (tau - rho * (mean[:, part].unsqueeze(-2) - a_mean * w_mean)) / scale
    to_inputs = Message((w_mean * field).sum(-1), (w_second * precision).sum(-1))
    a_second = a_variance + a_mean.square()
    return to_inputs, Message((a_mean * field).sum(2), (a_second * precision).sum(2))


def hidden_backward_matmul(layer: Hidden, mean: Tensor, variance: Tensor, back: Message) -> Backward:
    """The messages by matrix products alone, with those to the weights summed over examples.

    It leaves out that an input's own part of the variance is not in its cavity: relative errors are of the order of one
    over the number of inputs.
    """
    scale = 1 + back.rho * variance
    precision = back.rho / scale
    field = (back.tau - back.rho * mean) / scale
    w_mean, w_second = layer.weight_mean.unsqueeze(1), layer.weight_second.unsqueeze(1)
    w_variance, transposed = layer.weight_variance.unsqueeze(1), (-2, -1)
    a_mean, square = layer.input_mean, layer.input_mean.square()
    tau = field @ w_mean.transpose(*transposed)
    tau = tau + a_mean * (precision @ w_mean.square().transpose(*transposed))
    rho = precision @ w_second.transpose(*transposed)
    squares = precision.square()
    rho = rho + layer.input_variance * (squares @ w_second.square().transpose(*transposed))
    rho = rho + square * (squares @ (w_second * w_variance).transpose(*transposed))
    rows, fields, precisions = (t.flatten(1, 2) for t in (a_mean, field, precision))
    to_tau = rows.transpose(1, 2) @ fields
    to_tau = to_tau + layer.weight_mean * (rows.square().transpose(1, 2) @ precisions)
    to_rho = layer.input_second.flatten(1, 2).transpose(1, 2) @ precisions
    to_bias = bias_backward(layer.bias_mean, layer.bias_variance, mean, variance, back)
    return Backward(Message(tau, rho), Message(to_tau.unsqueeze(1), to_rho.unsqueeze(1)), to_bias)


def first_forward(
    inputs: Tensor, weights: Message, bias_mean: Tensor, bias_variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance ``(L, N, P, J)`` of a linear layer over constant inputs ``(L, N, P, I)``.

    Args:
        inputs: the constants.
        weights: cavities by example ``(L, N, I, J)``, or ``(L, 1, I, J)`` for all examples.
        bias_mean: of the bias cavities, broadcasting against ``(L, N, P, J)``.
        bias_variance: likewise.
    """
    mean = inputs @ weights.mean + bias_mean
    return mean, inputs.square() @ weights.variance + bias_variance


def first_backward(
    inputs: Tensor,
    weights: Message,
    mean: Tensor,
    variance: Tensor,
    back: Message,
    *,
    per_example: bool,
    numbers: int = 2**24,
) -> Message:
    """Messages to the weights of a layer over constant inputs, summed over positions, ``(L, N, I, J)``; or over
    examples too, ``(L, 1, I, J)``.
    """
    each = mean[:, :1].numel() * inputs.shape[-1]
    step = max(1, numbers // max(1, each))
    shared, parts = weights.rho.shape[1] == 1, list[Message]()
    own_mean, own_variance = weights.mean, weights.variance
    for start in range(0, mean.shape[1], step):
        part = slice(start, start + step)
        cavity = slice(None) if shared else part
        x = inputs[:, part].unsqueeze(-1)
        tau, rho = (t[:, part].unsqueeze(-2) for t in back)
        spread = variance[:, part].unsqueeze(-2) - x.square() * own_variance[:, cavity].unsqueeze(2)
        others = mean[:, part].unsqueeze(-2) - x * own_mean[:, cavity].unsqueeze(2)
        scale = 1 + rho * spread
        message = Message((x * (tau - rho * others) / scale).sum(2), (x.square() * rho / scale).sum(2))
        parts.append(message if per_example else _summed(message))
    return joined(parts) if per_example else _summed(joined(parts))


def first_backward_matmul(
    inputs: Tensor, weights: Message, mean: Tensor, variance: Tensor, back: Message
) -> Message:
    """The same by matrix products alone, for cavities that all examples share, summed over examples."""
    scale = 1 + back.rho * variance
    precision = (back.rho / scale).flatten(1, 2)
    field = ((back.tau - back.rho * mean) / scale).flatten(1, 2)
    rows = inputs.flatten(1, 2).transpose(1, 2)
    rho = rows.square() @ precision
    return Message((rows @ field + weights.mean[:, 0] * rho).unsqueeze(1), rho.unsqueeze(1))


def joined(messages: list[Message]) -> Message:
    """Messages of several parts of the examples, one after the other."""
    return Message(torch.cat([m.tau for m in messages], 1), torch.cat([m.rho for m in messages], 1))


def _summed(message: Message) -> Message:
    return Message(message.tau.sum(1, keepdim=True), message.rho.sum(1, keepdim=True))
