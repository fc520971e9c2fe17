"""Messages: one-dimensional Gaussians without their scale, in natural parameters.

A message of mean ``mu`` and variance ``v`` is kept as ``tau = mu / v`` and the precision ``rho = 1 / v``. A message
with ``rho = 0`` and ``tau = 0`` says nothing; its mean is defined as 0. Tensors hold one message an element.
"""

from __future__ import annotations

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 1e-8
"""The least precision of a message that is passed on."""


class Message(NamedTuple):
    """Gaussian messages of one shape.

    Attributes:
        tau: mean times precision.
        rho: precision.
    """

    tau: Tensor
    rho: Tensor

    @property
    def mean(self) -> Tensor:
        """``tau / rho``; 0 where the precision is 0."""
        return torch.where(self.rho == 0, torch.zeros_like(self.tau), self.tau / self.rho)

    @property
    def variance(self) -> Tensor:
        """``1 / rho``."""
        return self.rho.reciprocal()

    @property
    def finite(self) -> Tensor:
        """Where both numbers are finite."""
        return torch.isfinite(self.tau) & torch.isfinite(self.rho)


def from_moments(mean: Tensor, variance: Tensor) -> Message:
    """The message of this mean and this variance."""
    return Message(mean / variance, variance.reciprocal())


def nothing(like: Tensor) -> Message:
    """Messages that say nothing, in the shape of a tensor."""
    return Message(torch.zeros_like(like), torch.zeros_like(like))


def multiplied(a: Message, b: Message) -> Message:
    """The product of densities."""
    return Message(a.tau + b.tau, a.rho + b.rho)


def divided(a: Message, b: Message) -> Message:
    """The quotient of densities; a Gaussian where the precision of `a` is at least that of `b`."""
    return Message(a.tau - b.tau, a.rho - b.rho)


def scaled(message: Message, c: float | Tensor) -> Message:
    """The message to ``c X`` where this one is to ``X``; `c` is not 0."""
    return Message(message.tau / c, message.rho / c**2)


def shifted(message: Message, c: float | Tensor) -> Message:
    """The message to ``X + c`` where this one is to ``X``."""
    return Message(message.tau + c * message.rho, message.rho)


def clamped(message: Message, floor: float = FLOOR) -> Message:
    """Precisions below `floor` raised to it, with the same means."""
    low = message.rho < floor
    return Message(torch.where(low, message.mean * floor, message.tau), message.rho.clamp(min=floor))


def damped(old: Message, new: Message, share: float) -> Message:
    """``(1 - share) old + share new`` in natural parameters."""
    if share == 1:
        return new
    return Message(old.tau.lerp(new.tau, share), old.rho.lerp(new.rho, share))


def chosen(condition: Tensor, a: Message, b: Message) -> Message:
    """`a` where the condition holds, else `b`."""
    return Message(torch.where(condition, a.tau, b.tau), torch.where(condition, a.rho, b.rho))


def log_normal(x: Tensor, mean: Tensor | float, variance: Tensor) -> Tensor:
    """The log density of ``N(mean, variance)``."""
    return -0.5 * ((x - mean).square() / variance + variance.log() + log(2 * pi))


def log_overlap(a: Message, b: Message) -> Tensor:
    """The logarithm of the integral of the product of two densities, ``N(mu_a; mu_b, v_a + v_b)``."""
    return log_normal(a.mean, b.mean, a.variance + b.variance)
