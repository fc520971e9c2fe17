"""The unscented transform of element-wise functions, and the exact moments that exist in closed form.

Three points ``mu, mu +- sqrt(kappa + 1) sigma`` with weights ``kappa / (kappa + 1)`` and twice ``1 / (2 (kappa + 1))``
(Julier, Uhlmann 1997; Schodt 2024, equation 5). With kappa = 2 that is three-point Gauss-Hermite quadrature: exact
means up to polynomials of degree 5, exact variances up to degree 2. With any other kappa means are exact up to degree
3, and variances up to degree 1. Below 0 the middle point has a negative weight, by which a variance can be negative; 0
leaves the two outer points.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import torch
from torch import Tensor

KAPPA: float = 2.0
"""The kappa that is meant where none is given."""

Function = Callable[[Tensor], Tensor]
MeanAndVariance = tuple[Tensor, Tensor]

GRAIN = 2**15  # numbers in a block for each thread
_SMALLEST = 1e-15  # spread below which a slope is taken as a derivative
_MIN_VARIANCE = 1e-20  # below which a root has no gradient


def root(variance: Tensor) -> Tensor:
    """``sqrt(v)``, whose gradient at zero, where autograd records it, is zero in place of infinite."""
    if torch.is_grad_enabled() and variance.requires_grad:
        variance = variance.clamp(min=_MIN_VARIANCE)
    return variance.sqrt()


def unscented(
    function: Function, mean: Tensor, variance: Tensor, kappa: float | Tensor = KAPPA
) -> MeanAndVariance:
    """Mean and variance of ``f(x)``, ``x ~ N(mean, variance)`` element by element.

    With ``u``, ``c``, ``l`` the upper, central and lower value, and ``r = kappa + 1``: ``c + (u + l - 2 c) / 2 r`` and
    ``(u - l)^2 / 4 r + kappa (u + l - 2 c)^2 / 4 r^2``, in which only differences of the values cancel.

    Args:
        function: of a tensor, entry by entry.
        mean: of x.
        variance: of x.
        kappa: a number, or a tensor without dimensions, which gradients reach.
    """
    spread = root(variance * (kappa + 1))
    centre, up, down = function(mean), function(mean + spread), function(mean - spread)
    difference = up - down
    bend = torch.sub(up + down, centre, alpha=2.0)
    along = difference.square() * (1 / (4 * (kappa + 1)))
    if isinstance(kappa, Tensor):
        return centre + bend / (2 * (kappa + 1)), along + bend.square() * (kappa / (4 * (kappa + 1) ** 2))
    moment_variance = torch.addcmul(along, bend, bend, value=kappa / (4 * (kappa + 1) ** 2))
    return torch.add(centre, bend, alpha=1 / (2 * (kappa + 1))), moment_variance


def unscented_positive(
    function: Function, mean: Tensor, variance: Tensor, edge: float = 0.0, kappa: float | Tensor = KAPPA
) -> MeanAndVariance:
    """`unscented` for functions that exist above an edge only (log, sqrt, powers): outer points that would cross
    it are moved inside, and second differences replace derivatives there.
    """
    reach = kappa + 1
    spread = root(reach * variance)
    room = (mean - edge).abs()
    step = torch.minimum(spread, 0.9 * room)
    # At the edge itself only a step up is possible; it counts twice.
    step = torch.where(room == 0, spread, step)
    lower = torch.where(room == 0, mean, mean - step)
    centre, up, down = function(mean), function(mean + step), function(lower)
    up, down = up - centre, down - centre
    widen = reach * variance / step.square().clamp(min=torch.finfo(mean.dtype).tiny)
    widen = torch.where(step > 0, widen, torch.ones_like(widen))
    weight = 2 * reach  # its inverse
    shift = (up + down) / weight * widen
    inside = (up.square() + down.square()) / weight - ((up + down) / weight).square()
    slope = (up - down).square() / (2 * weight) * widen  # ((f(+h) - f(-h)) / 2 h)^2 v
    return centre + shift, torch.where((step < spread) & (room > 0), slope, inside).clamp(min=0)


def slope(function: Function, mean: Tensor, variance: Tensor, kappa: float | Tensor = KAPPA) -> Tensor:
    """``Cov(x, f(x)) / variance`` by the same three points: the slope of statistical linearisation."""
    spread = (kappa + 1) ** 0.5 * variance.sqrt().clamp(min=_SMALLEST)
    floor = torch.finfo(mean.dtype).eps ** (1 / 3) * (1 + mean.abs())  # a smaller step is lost in rounding
    step = torch.maximum(spread, floor)
    return (function(mean + step) - function(mean - step)) / (2 * step)


def rectified(mean: Tensor, variance: Tensor, negative_slope: float = 0.0) -> MeanAndVariance:
    """Exact moments of ReLU, and of LeakyReLU, of a Gaussian (Schodt 2024, appendix; Frey, Hinton 1999).

    ``E = sigma (z Phi(z) + phi(z))`` and ``E^2 = sigma^2 ((1 + z^2) Phi(z) + z phi(z))`` of the positive part, the
    negative part by symmetry.
    """
    deviation = root(variance)
    z = mean / deviation.clamp(min=torch.finfo(mean.dtype).tiny)
    z = torch.where(deviation > 0, z, torch.where(mean >= 0, 40.0, -40.0).to(z)).clamp(-40.0, 40.0)
    density = torch.exp(-0.5 * z.square()) / sqrt(2 * pi)
    above, below = torch.special.ndtr(z), torch.special.ndtr(-z)
    positive = deviation * density + mean * above
    negative = mean * below - deviation * density
    # Far below the kink the two terms cancel; the sum is asymptotically sigma phi(z) / z^2.
    positive = torch.where(z < -5, deviation * _tail(z), positive)
    negative = torch.where(z > 5, -deviation * _tail(-z), negative)
    second = variance + mean.square()
    positive_second = second * above + mean * deviation * density
    positive_second = torch.where(z < -5, variance * _second_tail(z), positive_second)
    negative_second = second * below - mean * deviation * density
    negative_second = torch.where(z > 5, variance * _second_tail(-z), negative_second)
    expected = positive + negative_slope * negative
    # Var = E2 - E^2, about the linear piece on the far side of the kink where that cancels less.
    spread = positive_second + negative_slope**2 * negative_second - expected.square()
    linear = variance - (1 - negative_slope**2) * negative_second
    excess = (expected - mean).square() + 2 * mean * (expected - mean)
    spread = torch.where(z > 5, linear - excess, spread)
    return expected, spread.clamp(min=0)


def _tail(z: Tensor) -> Tensor:
    """``phi(z) + z Phi(z)`` for very negative z, through the scaled complementary error function."""
    a = _far_below(z) / sqrt(2.0)
    return torch.exp(-a.square()) * (1 / sqrt(2 * pi) - a / sqrt(2.0) * torch.special.erfcx(a)).clamp(min=0)


def _second_tail(z: Tensor) -> Tensor:
    """``(1 + z^2) Phi(z) + z phi(z)`` for very negative z."""
    a = _far_below(z) / sqrt(2.0)
    scaled = (0.5 + a.square()) * torch.special.erfcx(a) - a / sqrt(pi)
    return torch.exp(-a.square()) * scaled.clamp(min=0)


def _far_below(z: Tensor) -> Tensor:
    """``-z`` where the tails are asked for; elsewhere a number at which they are finite, so that the gradient of what
    is not taken is zero.
    """
    return torch.where(z < -5, -z, 5.0)


def blockwise(
    rule: Callable[[Tensor, Tensor], MeanAndVariance], mean: Tensor, variance: Tensor
) -> MeanAndVariance:
    """Apply an element-wise rule block by block, where its temporaries would not stay in the cache; the result is the
    same.
    """
    block = block_size()
    if is_recorded(mean, variance) or mean.numel() <= block:
        return rule(mean, variance)
    parts = zip(mean.reshape(-1).split(block), variance.reshape(-1).split(block), strict=True)
    means, variances = zip(*(rule(m, v) for m, v in parts), strict=True)
    return torch.cat(means).view(mean.shape), torch.cat(variances).view(mean.shape)


def block_size() -> int:
    """Numbers in one block: its temporaries stay in the caches of the threads that share it."""
    return GRAIN * max(2, torch.get_num_threads())


def is_recorded(mean: Tensor, variance: Tensor) -> bool:
    """Whether autograd, a tracer or a compiler records the operations, or the numbers are not in the CPU's memory."""
    if type(mean) is not Tensor or type(variance) is not Tensor or mean.device.type != "cpu":
        return True
    recorded = torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)
    return recorded or torch.compiler.is_compiling()


def unscented_joint(
    function: Callable[..., Tensor], means: list[Tensor], variances: list[Tensor | None]
) -> MeanAndVariance:
    """Mean and variance of ``f(x_1, ..., x_d)`` place by place, for independent Gaussians, by ``2 d + 1`` points: all
    at their means, and one at a time ``sqrt(d + kappa)`` deviations up or down, ``kappa = max(3 - d, 0)``, whatever
    kappa functions of one entry have.

    Args:
        function: of as many tensors of one shape; the same shape comes out.
        means: of one shape.
        variances: None for a certain argument, which is no dimension.
    """
    uncertain = [(i, v) for i, v in enumerate(variances) if v is not None]
    size = len(uncertain)
    reach = max(size, 3)
    centre = function(*means)
    moved: list[Tensor] = []
    for i, variance in uncertain:
        step = (reach**0.5 * root(variance)).to(means[i])
        moved += [function(*means[:i], means[i] + s, *means[i + 1 :]) for s in (step, -step)]
    points = torch.stack(moved)
    weight = 1 / (2 * reach)
    shift = weight * (points - centre).sum(0)
    about = weight * (points - centre - shift).square().sum(0) + (1 - size / reach) * shift.square()
    return centre + shift, about
