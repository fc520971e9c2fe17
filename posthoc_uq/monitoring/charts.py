"""Charts as inline SVG, which follows the page's colours and its width."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

_WIDTH, _HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 22, 10, 38
_BINS = 24

STYLE = """
svg.chart { width: 100%; height: auto; display: block; }
.chart text { font: 12px system-ui, sans-serif; fill: var(--dim); }
.chart .grid { stroke: var(--line); stroke-width: 1; } .chart .axis { stroke: var(--strong); stroke-width: 1; }
.chart .known { fill: var(--known); fill-opacity: .35; stroke: none; }
.chart .new { fill: none; stroke: var(--new); stroke-width: 1.8; }
.chart .dots { fill: var(--new); } .chart .level { stroke: var(--known); stroke-width: 1.6; stroke-dasharray: 5 4; }
"""

Numbers = NDArray[np.float64]


def histograms(label: str, known: Numbers, new: Numbers) -> str:
    """Shares of the held-out inputs (filled) and of those that came in (outlined), over a score; on a logarithmic axis
    where the scores spread over more than two decades. `label` stands at the axis.
    """
    known, new = known[np.isfinite(known)], new[np.isfinite(new)]
    pooled = np.concatenate([known, new])
    if not len(pooled):
        return '<p class="note">No finite scores.</p>'
    positive = pooled[pooled > 0]
    logarithmic = len(positive) > 0.5 * len(pooled) and positive.max() > 100 * positive.min()
    if logarithmic:
        smallest = float(positive.min())
        known, new, pooled = (np.log10(np.maximum(part, smallest)) for part in (known, new, pooled))
    low, high = float(pooled.min()), float(pooled.max())
    if high <= low:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, _BINS + 1)
    shares = [np.histogram(part, edges)[0] / max(1, len(part)) for part in (known, new)]
    top = max(float(share.max()) for share in shares) or 1.0
    ticks = _log_ticks(low, high) if logarithmic else [(v, f"{v:g}") for v in _ticks(low, high)]
    x = _Scale(low, high, _LEFT, _WIDTH - _RIGHT)
    y = _Scale(0.0, top * 1.05, _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x, y, ticks, label)]
    for share, kind in zip(shares, ("known", "new"), strict=True):
        parts.append(f'<path class="{kind}" d="{_steps(share, edges, x, y)}"/>')
    return _svg(f"Histograms of held-out inputs and of those that came in, over {label}", parts)


def share_over_time(shares: Sequence[float], labels: Sequence[str], known: float | None) -> str:
    """The share referred, window by window, with that of the held-out data as a dashed line."""
    top = max([*shares, known or 0.0, 0.01])
    x = _Scale(0.5, len(shares) + 0.5, _LEFT, _WIDTH - _RIGHT)
    y = _Scale(0.0, min(1.0, top * 1.15), _HEIGHT - _BOTTOM, _TOP)
    points = [(x(place + 1.0), y(share)) for place, share in enumerate(shares)]
    parts = [_frame(x, y, [], "")]
    if known is not None:
        parts.append(
            f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(known)}" y2="{y(known)}"/>'
        )
    parts.append(f'<polyline class="new" points="{" ".join(f"{a},{b}" for a, b in points)}"/>')
    parts += [f'<circle class="dots" cx="{a}" cy="{b}" r="3"/>' for a, b in points]
    ends = [(labels[0], _LEFT, "start"), (labels[-1], _WIDTH - _RIGHT, "end")]
    if len(labels) == 1:
        ends = [(labels[0], points[0][0], "middle")]
    parts += [
        f'<text x="{place}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="{anchor}">{escape(label)}</text>'
        for label, place, anchor in ends
    ]
    return _svg("Share of inputs referred, over time", parts)


class _Scale:
    """A number to a place in the picture."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.high, self._start = low, high, start
        self._slope = (stop - start) / (high - low)

    def __call__(self, value: float) -> float:
        return round(self._start + (value - self.low) * self._slope, 1)


def _frame(x: _Scale, y: _Scale, ticks: Sequence[tuple[float, str]], label: str) -> str:
    bottom = _HEIGHT - _BOTTOM
    parts: list[str] = []
    for value in _ticks(0.0, y.high):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{100 * value:.3g} %</text>'
        )
    for value, text in ticks:
        parts.append(f'<line class="axis" x1="{x(value)}" x2="{x(value)}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x(value)}" y="{bottom + 17}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(label)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    span = high - low
    values = MaxNLocator(5).tick_values(low, high)
    return [float(round(v, 12)) for v in values if low - 1e-9 * span <= v <= high + 1e-9 * span]


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten, at most six of them, for an axis of base-10 logarithms."""
    first, last = int(np.ceil(low - 1e-9)), int(np.floor(high + 1e-9))
    step = max(1, -(-(last - first + 1) // 6))
    return [(float(power), _power_of_ten(power)) for power in range(first, last + 1, step)]


def _power_of_ten(power: int) -> str:
    if -4 <= power <= 5:
        return f"{10.0**power:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _steps(shares: Numbers, edges: Numbers, x: _Scale, y: _Scale) -> str:
    """The outline of a histogram, from the axis to the axis."""
    path = [f"M{x(float(edges[0]))},{y(0.0)}"]
    for share, edge in zip(shares, edges[1:], strict=True):
        path.append(f"V{y(float(share))}H{x(float(edge))}")
    return "".join([*path, f"V{y(0.0)}"])


def _svg(label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
