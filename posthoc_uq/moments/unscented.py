"""The unscented transform of element-wise functions, and the exact moments that exist in closed form.

Three points ``mu, mu +- sqrt(3) sigma`` with weights 2/3, 1/6, 1/6 (Julier, Uhlmann 1997, with kappa = 2, which is
three-point Gauss-Hermite quadrature): exact means up to polynomials of degree 5, exact variances up to degree 2
(Schodt 2024, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Moments = tuple[Tensor, Tensor]

ROOT3 = sqrt(3.0)
BLOCK = 2**16  # numbers that are worked on at once: what a block needs stays in the cache
_SMALLEST = 1e-15  # spread below which a slope is taken as a derivative


def unscented(function: Function, mean: Tensor, variance: Tensor) -> Moments:
    """Mean and variance of ``f(x)``, ``x ~ N(mean, variance)`` element by element."""
    spread = (3.0 * variance).sqrt()
    centre, up, down = function(mean), function(mean + spread), function(mean - spread)
    up, down = up - centre, down - centre
    shift = (up + down) / 6.0
    # sum w (f - mean f)^2, about the centre's value: nothing cancels where the spread is small.
    return centre + shift, ((up.square() + down.square()) / 6.0 - shift.square()).clamp(min=0)


def unscented_positive(function: Function, mean: Tensor, variance: Tensor) -> Moments:
    """`unscented` for functions that exist on one side of zero only (log, sqrt, powers): the outer points are drawn in
    where they would cross it, and second differences stand for derivatives there.
    """
    spread = (3.0 * variance).sqrt()
    step = torch.minimum(spread, 0.9 * mean.abs())
    centre, up, down = function(mean), function(mean + step), function(mean - step)
    up, down = up - centre, down - centre
    widen = 3.0 * variance / step.square().clamp(min=torch.finfo(mean.dtype).tiny)
    widen = torch.where(step > 0, widen, torch.ones_like(widen))
    shift = (up + down) / 6.0 * widen
    inside = (up.square() + down.square()) / 6.0 - ((up + down) / 6.0).square()
    slope = (up - down).square() / 12.0 * widen  # ((f(+h) - f(-h)) / 2 h)^2 v
    return centre + shift, torch.where(step < spread, slope, inside).clamp(min=0)


def slope(function: Function, mean: Tensor, variance: Tensor) -> Tensor:
    """``Cov(x, f(x)) / variance`` by the same three points: the slope of statistical linearisation."""
    spread = ROOT3 * variance.sqrt().clamp(min=_SMALLEST)
    floor = torch.finfo(mean.dtype).eps ** (1 / 3) * (1 + mean.abs())  # a difference needs a step that shows
    step = torch.maximum(spread, floor)
    return (function(mean + step) - function(mean - step)) / (2 * step)


def rectified(mean: Tensor, variance: Tensor, negative_slope: float = 0.0) -> Moments:
    """Exact moments of ReLU, and of LeakyReLU, of a Gaussian (Schodt 2024, appendix; Frey, Hinton 1999).

    ``E = sigma (z Phi(z) + phi(z))`` and ``E^2 = sigma^2 ((1 + z^2) Phi(z) + z phi(z))`` of the positive part, the
    negative part by symmetry.
    """
    deviation = variance.sqrt()
    z = mean / deviation.clamp(min=torch.finfo(mean.dtype).tiny)
    z = torch.where(deviation > 0, z, torch.where(mean >= 0, 40.0, -40.0).to(z)).clamp(-40.0, 40.0)
    density = torch.exp(-0.5 * z.square()) / sqrt(2 * pi)
    above, below = torch.special.ndtr(z), torch.special.ndtr(-z)
    positive = deviation * density + mean * above
    negative = mean * below - deviation * density
    # Far below the kink the two terms cancel; what is left is asymptotic: sigma phi(z) / z^2.
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
    a = -z / sqrt(2.0)
    return torch.exp(-a.square()) * (1 / sqrt(2 * pi) + z / 2 * torch.special.erfcx(a)).clamp(min=0)


def _second_tail(z: Tensor) -> Tensor:
    """``(1 + z^2) Phi(z) + z phi(z)`` for very negative z."""
    a = -z / sqrt(2.0)
    return torch.exp(-a.square()) * ((1 + z.square()) / 2 * torch.special.erfcx(a) + z / sqrt(2 * pi)).clamp(
        min=0
    )


def blockwise(rule: Callable[[Tensor, Tensor], Moments], mean: Tensor, variance: Tensor) -> Moments:
    """An element-wise rule, block by block where the whole would go through memory again and again.

    Only where no gradient is recorded and nothing traces; a rule's result does not depend on it.
    """
    if is_recorded(mean, variance) or mean.numel() <= BLOCK or mean.dtype != variance.dtype:
        return rule(mean, variance)
    flat_mean, flat_variance = _flat(mean), _flat(variance)
    if flat_mean is None or flat_variance is None or mean.stride() != variance.stride():
        mean, variance = mean.contiguous(), variance.contiguous()
        flat_mean, flat_variance = mean.view(-1), variance.view(-1)
    out_mean, out_variance = torch.empty_like(flat_mean), torch.empty_like(flat_variance)
    for start in range(0, flat_mean.numel(), BLOCK):
        part = slice(start, start + BLOCK)
        out_mean[part], out_variance[part] = rule(flat_mean[part], flat_variance[part])
    size, stride = mean.shape, mean.stride()
    return out_mean.as_strided(size, stride), out_variance.as_strided(size, stride)


def is_recorded(mean: Tensor, variance: Tensor) -> bool:
    """Whether something looks on - autograd, a tracer, a compiler - or the numbers are not in the CPU's memory."""
    if type(mean) is not Tensor or type(variance) is not Tensor or mean.device.type != "cpu":
        return True
    recorded = torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)
    return recorded or torch.compiler.is_compiling()


def _flat(tensor: Tensor) -> Tensor | None:
    """The numbers in the order of memory, or None where they do not lie together once each."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def unscented_map(function: Function, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of ``h(f)``, ``f ~ N(mean, covariance)``, for a map of d dimensions by ``2 d + 1`` points.

    Points ``f +- sqrt(d + kappa) chol(C)_i`` with ``kappa = max(3 - d, 0)``, so that no weight is negative.

    Args:
        function: maps ``(points, d)`` to ``(points, outputs)``.
        mean: ``(batch, d)``.
        covariance: ``(batch, d, d)``; may be singular.

    Returns:
        Mean ``(batch, outputs)`` and covariance ``(batch, outputs, outputs)``.
    """
    batch, size = mean.shape
    kappa = max(3.0 - size, 0.0)
    values, vectors = torch.linalg.eigh(covariance)
    # Any root will do for the points, but a triangular one is what the transform names; qr gives it without
    # needing a positive definite matrix.
    root = torch.linalg.qr(
        (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).transpose(-1, -2)
    ).R.transpose(-1, -2)
    steps = (size + kappa) ** 0.5 * root.transpose(-1, -2)  # rows are points
    points = torch.cat([mean.unsqueeze(1), mean.unsqueeze(1) + steps, mean.unsqueeze(1) - steps], dim=1)
    images = function(points.reshape(-1, size)).reshape(batch, 2 * size + 1, -1)
    weights = images.new_full((2 * size + 1,), 1 / (2 * (size + kappa)))
    weights[0] = kappa / (size + kappa)
    expected = torch.einsum("p,bpo->bo", weights, images)
    centred = images - expected.unsqueeze(1)
    return expected, torch.einsum("p,bpo,bpq->boq", weights, centred, centred)
