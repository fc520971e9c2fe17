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
_AIM = 0.4 * TOLERANCE  # decades inside the budget where a step should end, so that this end is found near it
_LEAST = 1e-9  # nats below which a divergence may be rounding

Divergence = Callable[[float], float]


def widest(
    divergence: Divergence, budget: float, start: float, low: float, high: float, slope: float | None = None
) -> tuple[float, float]:
    """The lowest decade, to `TOLERANCE`, down to which the divergence stays within the budget; and its slope there.

    Args:
        divergence: in nats, of a decade; it remembers its values.
        budget: the largest divergence allowed.
        start: the decade that is tried first; where it is outside the budget, those above it follow.
        low: the lowest decade that is tried.
        high: the decade at which the search upwards gives up, and which is returned although it is outside.
        slope: decades by which the divergence is known to fall for each decade, near `start`.
    """
    flat, steep = _SLOPES if slope is None else (slope, _within_slopes(slope))
    inside, outside = start, -inf
    least = 1.0 if slope is None else TOLERANCE
    while divergence(inside) > budget:
        if inside >= high:
            return inside, flat
        step = max(least, min(log10(divergence(inside) / budget) / steep + _AIM, 1.0))
        inside, outside, least = min(high, inside + step), inside, 2 * least
    tried = 0
    while inside > low and inside - outside > TOLERANCE:
        left = log10(budget / max(divergence(inside), _LEAST))  # decades of divergence
        across = _slope(divergence, outside, inside)
        if left <= TOLERANCE * min(flat, across):
            break
        if not isfinite(outside):
            least = TOLERANCE / 2 if flat >= _SLOPES[0] else 1.0  # where it hardly grows, a whole decade
            point = max(low, inside - max(left / steep - _AIM, least))
        elif tried % 3 == 2:
            point = (inside + outside) / 2
        else:
            point = _crossing(left / across, outside, inside)
        if divergence(point) <= budget:
            flat = _slope(divergence, point, inside)
            steep, inside = _within_slopes(flat), point
        else:
            outside = point
        tried += isfinite(outside)
    return inside, flat


def _within_slopes(slope: float) -> float:
    return min(max(slope, _SLOPES[0]), _SLOPES[1])


def _slope(divergence: Divergence, below: float, above: float) -> float:
    """Decades by which the divergence falls for each decade between two; infinite where it is so below."""
    if not isfinite(below):
        return inf
    lower, upper = (max(divergence(decade), _LEAST) for decade in (below, above))
    return log10(lower / upper) / (above - below) if isfinite(lower) else inf


def _crossing(step: float, outside: float, inside: float) -> float:
    """A point a step below `inside` and a little nearer to it, but not near either end; the middle without a step."""
    width = inside - outside
    if step <= 0:
        return (inside + outside) / 2
    return min(max(inside - step + _AIM, outside + 0.1 * width), inside - 0.1 * width)
