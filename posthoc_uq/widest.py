"""Where a divergence that falls with the prior precision meets its budget, in few evaluations.

Near the trained weights a divergence grows at most as the square of the variances, so that its logarithm falls by at
most 2 for each decade of the prior precision. A step that assumes this slope never passes the budget there; later steps
take the slope that was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, log10

TOLERANCE = 0.05  # decades of the prior precision
_SLOPES = (0.3, 2.0)  # decades of divergence for each decade of prior precision that a step may assume
_AIM = 0.4 * TOLERANCE  # decades by which a step ends above the place where the budget should be met
_LEAST = 1e-9  # nats below which a divergence may be rounding
_NEAR = 1.0  # decades: a slope seen across more says little of its end

Divergence = Callable[[float], float]


def widest_within(
    divergence: Divergence,
    budget: float,
    start: float,
    low: float,
    high: float,
    *,
    slope: float | None = None,
    upwards: float = 1.0,
) -> tuple[float, float | None]:
    """The lowest decade, to `TOLERANCE`, down to which the divergence stays within the budget; and the slope of the
    last step that ended within it, None where it was longer than a decade.

    Args:
        divergence: in nats, of a decade; it remembers its values.
        budget: the largest divergence allowed.
        start: the decade that is tried first; where it is outside the budget, those above it follow.
        low: the lowest decade that is tried.
        high: the decade at which the search upwards gives up, and which is returned although it is outside.
        slope: decades by which the divergence is known to fall for each decade, near `start`.
        upwards: the first step upwards, in decades; the following ones are longer.
    """

    def logarithm(decade: float) -> float:
        return log10(max(divergence(decade), min(_LEAST, budget / 10)) / budget)

    def between(below: float, above: float) -> float:
        """Decades by which the divergence falls for each decade; infinite where it is so below."""
        return (logarithm(below) - logarithm(above)) / (above - below) if isfinite(below) else inf

    flat, steep = (0.0, _SLOPES[1]) if slope is None else (slope, _usable(slope))
    inside, outside = start, -inf
    while not divergence(inside) <= budget:
        if inside >= high:
            return inside, slope
        step = max(upwards, min(logarithm(inside) / steep + _AIM, 1.0))
        inside, outside, upwards = min(high, inside + step), inside, 2 * upwards
    tried = 0
    while inside > low and inside - outside > TOLERANCE:
        left, across = -logarithm(inside), between(outside, inside)
        if left <= TOLERANCE * min(flat, across):
            break
        if not isfinite(outside):
            # where it hardly grows, a whole decade
            least = 1.0 if flat < _SLOPES[0] else TOLERANCE / 2
            point = max(low, inside - max(left / steep - _AIM, least))
        elif tried % 3 == 2:
            point = (inside + outside) / 2
        else:
            point = _crossing(left / across, outside, inside)
        if divergence(point) <= budget:
            flat, slope = between(point, inside), None
            steep = _usable(flat)
            if inside - point <= _NEAR:
                slope = flat
            inside = point
        else:
            outside = point
        tried += isfinite(outside)
    return inside, slope


def _usable(slope: float) -> float:
    """A slope that a step may assume."""
    return min(max(slope, _SLOPES[0]), _SLOPES[1])


def _crossing(step: float, outside: float, inside: float) -> float:
    """A point a step below `inside` and a little nearer to it, but not near either end; the middle without a step."""
    width = inside - outside
    if step <= 0:
        return (inside + outside) / 2
    return min(max(inside - step + _AIM, outside + 0.1 * width), inside - 0.1 * width)
