"""LeakyReLU and ReLU, ``a = z`` for positive ``z`` and ``a = slope z`` for negative; a ReLU has the slope 0.

``before`` is the message that comes from the side of the input, to ``z``; ``after`` is the one from the side of the
output, to ``a``.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from posthoc_uq.methods.message_passing.gaussian import (
    FLOOR,
    Message,
    chosen,
    clamped,
    divided,
    from_moments,
    log_normal,
    log_overlap,
    multiplied,
    nothing,
)
from posthoc_uq.methods.message_passing.truncation import Branch, above_zero, below_zero, log_ndtr, mixed

LEAST_MASS = 1e-8
"""The integral below which the paper takes the direct forward message."""
_LEAST_VARIANCE = (
    1e-12  # of a match, as a share of the input's: where all mass is at an atom the variance vanishes
)
_LEAST = 1e-300  # in place of a precision of 0, whose results are not used


def moments_of_output(mean: Tensor, variance: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of the output for an input ``N(mean, variance)``: the direct forward message."""
    upper = above_zero(mean, variance)
    if slope == 0:
        lower = _atom(log_ndtr(-mean / variance.sqrt()))
    else:
        lower = below_zero(mean, variance)
        lower = Branch(slope * lower.mean, slope**2 * lower.variance, lower.log_weight)
    match = mixed(upper, lower)
    return match.mean, torch.maximum(match.variance, _LEAST_VARIANCE * variance)


def direct_forward(before: Message, slope: float) -> Message:
    """The message to the output that matches the moments of the output itself."""
    return from_moments(*moments_of_output(before.mean, before.variance, slope))


def forward_match(before: Message, after: Message, slope: float) -> Branch:
    """Mean, variance and log mass of the output's marginal."""
    upper = above_zero(*_moments(multiplied(before, after)), log_overlap(before, after))
    if slope == 0:
        at_zero = log_normal(torch.zeros_like(after.tau), after.mean, after.variance)
        return mixed(upper, _atom(at_zero + log_ndtr(-before.mean * before.rho.sqrt())))
    steep = Message(before.tau / slope, before.rho / slope**2)
    return mixed(upper, below_zero(*_moments(multiplied(steep, after)), log_overlap(steep, after)))


def backward_match(before: Message, after: Message, slope: float) -> Branch:
    """Mean, variance and log mass of the input's marginal; the mass is that of the output's."""
    upper = above_zero(*_moments(multiplied(before, after)), log_overlap(before, after))
    if slope == 0:
        at_zero = log_normal(torch.zeros_like(after.tau), after.mean, after.variance)
        return mixed(upper, below_zero(before.mean, before.variance, at_zero))
    flat = Message(slope * after.tau, slope**2 * after.rho)
    steep = Message(before.tau / slope, before.rho / slope**2)
    return mixed(upper, below_zero(*_moments(multiplied(before, flat)), log_overlap(steep, after)))


def forward(before: Message, after: Message, slope: float, *, least_mass: float = LEAST_MASS) -> Message:
    """The message to the output: the marginal one, or the direct one where that is not safe.

    Args:
        before: the message to the input; its precision is positive.
        after: the last message from the side of the output; nothing at the start of a batch.
        slope: of the negative side, 0 for a ReLU.
        least_mass: the direct message is taken where the integral is below it (it is a density, so that it depends on
            the scale of the data); 0 to leave that out.
    """
    silent = after.rho <= 0
    partner = Message(after.tau, after.rho.clamp(min=_LEAST))
    match = forward_match(before, partner, slope)
    message = divided(_message(match, before), after)
    unsafe = silent | ~message.finite | (message.rho < before.rho)
    if least_mass > 0:
        unsafe = unsafe | ~(match.log_weight >= log(least_mass))
    return chosen(unsafe, direct_forward(before, slope), _without_nan(message))


def backward(before: Message, after: Message, slope: float) -> Message:
    """The message to the input, with a precision of 1e-8 at least.

    Args:
        before: the message to the input; its precision is positive.
        after: the message from the side of the output.
        slope: of the negative side, 0 for a ReLU.
    """
    partner = Message(after.tau, after.rho.clamp(min=_LEAST))
    match = backward_match(before, partner, slope)
    rho = torch.maximum(before.rho + FLOOR, match.variance.reciprocal())
    message = divided(Message(match.mean * rho, rho), before)
    silent = (after.rho <= 0) | ((after.tau < 0) & (after.rho < 2 * FLOOR)) | ~message.finite
    return clamped(chosen(silent, nothing(before.tau), _without_nan(message)))


def backward_direct(after: Message, slope: float) -> Branch:
    """Mean, variance and log mass of the message to the input itself, for a positive slope.

    That is the measure ``N(a(z); mu, v) dz``: its integral is not 1.
    """
    mean, variance = _moments(after)
    lower = below_zero(mean / slope, variance / slope**2, -log(slope))
    return mixed(above_zero(mean, variance), lower)


def _moments(message: Message) -> tuple[Tensor, Tensor]:
    return message.mean, message.variance


def _atom(log_weight: Tensor) -> Branch:
    zero = torch.zeros_like(log_weight)
    return Branch(zero, zero, log_weight)


def _message(match: Branch, before: Message) -> Message:
    """The match as a message; a match that is almost an atom keeps a variance of its own."""
    return from_moments(match.mean, torch.maximum(match.variance, _LEAST_VARIANCE * before.variance))


def _without_nan(message: Message) -> Message:
    """Numbers that are not finite replaced, so that they cannot spoil what is chosen in their place."""
    return Message(*(torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0) for part in message))
