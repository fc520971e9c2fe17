"""Gaussians cut at zero, in a form that is exact far out in the tails, and mixtures of two of them."""

from __future__ import annotations

from math import pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

_TAIL = -40.0  # below it the variance by the closed form loses digits, and a series has all of them


class Branch(NamedTuple):
    """One part of a mixture.

    Attributes:
        mean: of the part.
        variance: of the part.
        log_weight: the logarithm of its mass.
    """

    mean: Tensor
    variance: Tensor
    log_weight: Tensor


def log_ndtr(x: Tensor) -> Tensor:
    """The logarithm of the standard normal distribution function."""
    return torch.special.log_ndtr(x)


def hazard(x: Tensor) -> Tensor:
    """``phi(x) / Phi(x)``, the density over the distribution function of a standard normal variable."""
    return sqrt(2 / pi) / torch.special.erfcx(-x / sqrt(2))


def positive_part(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``N(mean, deviation^2)`` restricted to ``(0, inf)``."""
    x = mean / deviation
    ratio = hazard(x)
    far = x < _TAIL
    inverse = (-x.clamp(max=_TAIL)).reciprocal()
    square = inverse.square()
    first = torch.where(far, inverse * (1 - 2 * square + 10 * square.square()), x + ratio)
    second = torch.where(far, square * (1 - 6 * square + 50 * square.square()), 1 - ratio * (ratio + x))
    return deviation * first, deviation.square() * second


def above_zero(mean: Tensor, variance: Tensor, log_prefactor: Tensor | float = 0.0) -> Branch:
    """``N(mean, variance)`` restricted to ``(0, inf)``, with the log of its mass on top of `log_prefactor`."""
    deviation = variance.sqrt()
    return Branch(*positive_part(mean, deviation), log_ndtr(mean / deviation) + log_prefactor)


def below_zero(mean: Tensor, variance: Tensor, log_prefactor: Tensor | float = 0.0) -> Branch:
    """The same for ``(-inf, 0)``."""
    mirrored = above_zero(-mean, variance, log_prefactor)
    return Branch(-mirrored.mean, mirrored.variance, mirrored.log_weight)


def mixed(a: Branch, b: Branch) -> Branch:
    """Mean, variance and log mass of two parts together."""
    total = torch.logaddexp(a.log_weight, b.log_weight)
    share_a, share_b = (a.log_weight - total).exp(), (b.log_weight - total).exp()
    mean = share_a * a.mean + share_b * b.mean
    variance = share_a * (a.variance + (a.mean - mean).square())
    variance = variance + share_b * (b.variance + (b.mean - mean).square())
    return Branch(mean, variance, total)


def rectified_moments(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``R_k``, the integrals of ``z^k N(z; mean, deviation^2)`` over ``z > 0`` for k = 0, 1, 2."""
    x = mean / deviation
    density = (-0.5 * x.square()).exp() / sqrt(2 * pi)
    mass = torch.special.ndtr(x)
    first = deviation * density + mean * mass
    second = deviation * mean * density + (deviation.square() + mean.square()) * mass
    return mass, first, second
