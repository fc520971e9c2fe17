"""Training signals: what a target says of the outputs, as messages to them, and predictions from Gaussian outputs.

Outputs are ``(..., J)``; labels ``(...)`` broadcast against all but the last dimension.
"""

from __future__ import annotations

from math import ceil, pi

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.methods.message_passing.gaussian import (
    Message,
    chosen,
    divided,
    from_moments,
    multiplied,
    nothing,
)
from posthoc_uq.methods.message_passing.truncation import hazard, log_ndtr, positive_part

NOISE_VARIANCE = 0.3
"""Of the noise in the comparison of two outputs (argmax) or in that of one with zero."""
_WIDTH = 8.0  # standard deviations to each side of the match that the quadrature covers
_FARTHEST = 7.0  # standard deviations that a match whose integral is heard is moved at most
_SPACING = 0.4  # of the nodes, in deviations of the output and in units of it; closer ones change nothing
_WIDEST = 1e4  # deviation of an output, from which on its nodes are farther apart
_NUMBERS = 2**17  # in a temporary of the quadrature: what a processor's cache holds
_LEAST_MASS = 1e-12
_LEAST_PRECISION = -0.1


def regression(targets: Tensor, noise_variance: Tensor | float) -> Message:
    """``N(target, noise_variance)`` for every output."""
    rho = torch.ones_like(targets) / noise_variance
    return Message(targets * rho, rho)


def truncation_message(before: Message) -> Message:
    """The message of ``d > 0`` to ``d``: the match of the cut Gaussian, divided by the message from ``d``."""
    root = before.rho.sqrt()
    t = before.tau / root
    ratio, (mean, left) = hazard(t), positive_part(t, torch.ones_like(t))
    lost = torch.where(t < 0, 1 - left, ratio * (ratio + t))
    # mean / left - t; for positive t, where both are large, without their difference
    field = torch.where(t < 0, mean / left - t, (t * lost + ratio) / left)
    return Message(root * field, before.rho * lost / left)


def argmax(
    before: Message,
    labels: Tensor,
    *,
    noise_variance: float = NOISE_VARIANCE,
    scale_losers: bool = True,
    regularize: bool = False,
) -> Message:
    """The label's output, with noise, is larger than each other one.

    Args:
        before: messages to the outputs, ``(..., J)``.
        labels: ``(...)``, int64.
        noise_variance: of the noise in every comparison.
        scale_losers: multiply what is said to another output by the probability that the label already wins.
        regularize: draw the label's output to 1 and the others to -1, with a precision of 10.
    """
    mean, variance = before.mean, before.variance
    target = F.one_hot(labels, mean.shape[-1]).bool().expand(mean.shape)
    index = labels.unsqueeze(-1).expand(*mean.shape[:-1], 1)
    top_mean, top_variance = mean.gather(-1, index), variance.gather(-1, index)
    gap, spread = top_mean - mean, top_variance + variance + noise_variance
    back = truncation_message(from_moments(gap, spread))
    to_top = _from_sum(back, gap - top_mean, spread - top_variance)
    winner = Message(*(part.masked_fill(target, 0.0).sum(-1, keepdim=True) for part in to_top))
    to_other = _from_sum(back, gap + mean, spread - variance)
    share = torch.special.ndtr(gap / spread.sqrt()) if scale_losers else torch.ones_like(gap)
    message = chosen(target, winner, Message(-to_other.tau * share, to_other.rho * share))
    if regularize:
        drawn = torch.where(target, 1.0, -1.0).to(mean)
        message = multiplied(message, from_moments(drawn, torch.full_like(drawn, 0.1)))
    return message


def _from_sum(back: Message, others: Tensor, spread: Tensor) -> Message:
    """The message from a sum, of which `others` and `spread` are the mean and the variance without the part in
    question, whose coefficient is 1.
    """
    scale = 1 + back.rho * spread
    return Message((back.tau - back.rho * others) / scale, back.rho / scale)


def threshold(before: Message, labels: Tensor, *, noise_variance: float = NOISE_VARIANCE) -> Message:
    """A single output, with noise, is above zero for the label 1 and below for the label 0 (probit)."""
    sign = 2.0 * labels.to(before.tau).unsqueeze(-1) - 1
    mean, variance = sign * before.mean, before.variance
    back = truncation_message(from_moments(mean, variance + noise_variance))
    message = _from_sum(back, torch.zeros_like(mean), torch.full_like(mean, noise_variance))
    return Message(sign * message.tau, message.rho)


def winning_shares(mean: Tensor, variance: Tensor, noise_variance: float = NOISE_VARIANCE) -> Tensor:
    """Soft selection over the last dimension: the normalised products of the pairwise probabilities of being larger."""
    gap = mean.unsqueeze(-1) - mean.unsqueeze(-2)
    spread = variance.unsqueeze(-1) + variance.unsqueeze(-2) + noise_variance
    logs = log_ndtr(gap / spread.sqrt())
    own = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
    return logs.masked_fill(own, 0.0).sum(-1).softmax(-1)


def softened(mean: Tensor, variance: Tensor) -> Tensor:
    """``mean / sqrt(1 + pi / 8 variance)``, whose softmax approximates the mean of the softmax."""
    return mean / (1 + pi / 8 * variance).sqrt()


def softargmax(before: Message, labels: Tensor) -> Message:
    """A label drawn by the softmax of the outputs; the others are fixed at `softened` for each output.

    Args:
        before: messages to the outputs, ``(..., J)``.
        labels: ``(...)``, int64.

    Raises:
        PosthocUQError: a message has a clearly negative precision.
    """
    mean, variance = before.mean, before.variance
    soft = softened(mean, variance)
    target = F.one_hot(labels, mean.shape[-1]).bool().expand(mean.shape)
    own = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
    spread = soft.unsqueeze(-2).expand(*soft.shape, soft.shape[-1])
    rest = spread.masked_fill(own, -torch.inf).logsumexp(-1)  # of all but each
    top = soft.gather(-1, labels.unsqueeze(-1).expand(*mean.shape[:-1], 1))
    return _by_quadrature(before, rest, torch.where(target, torch.zeros_like(soft), top), target)


def logistic(before: Message, labels: Tensor) -> Message:
    """The label of a single output, by its sigmoid: `softargmax` against an output that is 0.

    Raises:
        PosthocUQError: a message has a clearly negative precision.
    """
    zero, positive = torch.zeros_like(before.tau), labels.bool().unsqueeze(-1).expand(before.tau.shape)
    return _by_quadrature(before, zero, zero, positive)


def _by_quadrature(before: Message, rest: Tensor, top: Tensor, target: Tensor) -> Message:
    """The marginal message of ``L(z) = e^z / (e^z + e^rest)`` where `target` holds, and elsewhere of ``e^top / (e^z +
    e^rest)``, by the trapezoid rule.
    """
    mean, deviation = before.mean, before.variance.sqrt()
    # both are e^gain sigmoid(sign (z - rest)); where the sigmoid underflows the integral is below what is heard
    sign = torch.where(target, 1.0, -1.0).to(mean)
    gain = torch.where(target, torch.zeros_like(mean), top - rest).exp()
    mass, shift, width = _sigmoid_moments(sign * (mean - rest), sign * deviation)
    message = divided(from_moments(mean + deviation * shift, deviation.square() * width), before)
    heard = (gain * mass >= _LEAST_MASS) & message.finite
    message = chosen(heard, message, nothing(mean))
    if bool((message.rho < _LEAST_PRECISION).any()):
        raise PosthocUQError(
            f"A label gives an output a message of precision {float(message.rho.min()):.3g}, which must not be "
            f"negative; bring the features to about unit size, or use signal='argmax'."
        )
    return Message(message.tau, message.rho.clamp(min=0))


def _sigmoid_moments(center: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The integral of ``sigmoid(center + slope x) N(x; 0, 1)``, and mean and variance of x under it."""
    flat = [part.reshape(-1) for part in (center, slope)]
    step = max(1, _NUMBERS // _grid(slope)[1])
    pieces = zip(*(part.split(step) for part in flat), strict=True)
    found = [_moments_of_piece(*piece) for piece in pieces] or [(flat[0],) * 3]
    mass, mean, variance = (torch.cat(parts).reshape(center.shape) for parts in zip(*found, strict=True))
    return mass, mean, variance


def _moments_of_piece(center: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width, nodes = _grid(slope)
    x = torch.linspace(-width, width, nodes, dtype=center.dtype, device=center.device)
    weights = (slope.unsqueeze(1) * x).add_(center.unsqueeze(1)).sigmoid_().mul_((-0.5 * x.square()).exp())
    total, first = (weights @ torch.stack([torch.ones_like(x), x], 1)).unbind(1)
    mean = first / total
    variance = (x - mean.unsqueeze(1)).square_().mul_(weights).sum(1) / total
    return total * (x[1] - x[0]) / (2 * pi) ** 0.5, mean, variance


def _grid(slope: Tensor) -> tuple[float, int]:
    """Half the length of the trapezoid rule and its nodes, an odd number, for the widest output: a sigmoid moves the
    mean by its deviation at most.
    """
    widest = float(slope.abs().max()) if slope.numel() else 1.0
    widest = min(widest, _WIDEST) if widest == widest else 1.0
    width = _WIDTH + min(widest, _FARTHEST)
    return width, 2 * ceil(width * max(widest, 1.0) / _SPACING) + 1


def softargmax_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    """Probabilities of the classes for Gaussian outputs."""
    return softened(mean, variance).softmax(-1)
