"""Whether scores of what comes in are distributed as those of held-out data, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.monitoring.records import Records

LEVEL = 0.01
"""How probable a false alarm is at most, over all tests of a page together."""

FEWEST = 20  # inputs, of either side, without which no test is made
_EXACT = 250_000  # product of the two counts up to which the p-value is exact


@dataclass(frozen=True)
class Drift:
    """A two-sample Kolmogorov-Smirnov test of one window against the held-out data.

    Attributes:
        score: the name of what is compared.
        first: number of the window's first input, from 0 on.
        last: number after its last.
        statistic: the largest distance between the two distribution functions, in [0, 1].
        p_value: how probable such a distance is, or a larger one, where both have the same distribution.
        alarm: whether `p_value` is below `LEVEL`, divided by the number of tests (Bonferroni).
    """

    score: str
    first: int
    last: int
    statistic: float
    p_value: float
    alarm: bool


def windows(count: int, size: int) -> list[tuple[int, int]]:
    """Windows of `size` inputs, counted from the newest back, oldest first; all inputs as one where they are fewer.
    Left-over inputs at the beginning are in none.
    """
    if count <= size:
        return [(0, count)] if count else []
    return [(end - size, end) for end in range(count, size - 1, -size)][::-1]


def drifts(incoming: Records, reference: Records, size: int) -> list[Drift]:
    """The tests of all windows, for every score that both sides have; oldest window first.

    The inputs of a window are taken as independent: frames of one film are not, and give alarms too early.

    Args:
        incoming: in their order of coming.
        reference: held-out inputs that are like those of the training.
        size: of a window, in inputs.

    Raises:
        PosthocUQError: the window is smaller than `FEWEST`.
    """
    if size < FEWEST:
        raise PosthocUQError(f"A window of {size} inputs tells too little; take {FEWEST} or more.")
    raw: list[tuple[str, int, int, float, float]] = []
    for score in shared_scores(incoming, reference):
        known = _finite(reference.scores[score])
        for first, last in windows(len(incoming), size):
            values = _finite(incoming.scores[score][first:last])
            if min(len(values), len(known)) >= FEWEST:
                raw.append((score, first, last, *_test(values, known)))
    limit = LEVEL / max(1, len(raw))
    return [Drift(*entry, alarm=entry[-1] < limit) for entry in raw]


def shared_scores(incoming: Records, reference: Records) -> list[str]:
    """The scores that both sides know."""
    return [score for score in incoming.scores if score in reference.scores]


def newest(found: Sequence[Drift]) -> list[Drift]:
    """The tests of the newest window."""
    last = max((test.last for test in found), default=0)
    return [test for test in found if test.last == last]


def _finite(values: Any) -> Any:
    return values[np.isfinite(values)]


def _test(values: Any, known: Any) -> tuple[float, float]:
    from scipy.stats import ks_2samp

    method = "exact" if len(values) * len(known) <= _EXACT else "asymp"
    result: Any = ks_2samp(values, known, method=method)
    return float(result.statistic), float(result.pvalue)
