"""How extreme an input is among familiar ones, by several scores at once.

The tail probability of a score is the share of familiar inputs whose score is at least as large. It has no units, so
those of different scores can be compared. An input is judged by the smallest of its tail probabilities, that is, by the
score that finds it most extreme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.metrics.checks import plain, row
from posthoc_uq.metrics.selective import referred_count

QUANTILES = 200
"""The number of points of a tail that are kept at most."""
_LINE_FROM = 0.1  # the tail is extrapolated from this share of familiar inputs with the largest scores


class Tail(NamedTuple):
    """Points of the tail probability of one score; both are (points,), float64.

    Attributes:
        values: scores in descending order, the largest familiar one first, the smallest last.
        shares: for each, its rank from above over the number of familiar inputs; ascending, the last is 1.
    """

    values: Tensor
    shares: Tensor


def tail_of(scores: Tensor, points: int | None = None) -> Tail:
    """The tail of the scores of familiar inputs.

    Args:
        scores: (inputs,), finite.
        points: how many to keep at most, an even number; all if None. With more inputs than points, half of the points
            are the largest scores, one by one, and the ranks of the others form a geometric sequence. So small shares
            are resolved for any number of inputs.

    Raises:
        PosthocUQError: no scores, or not (inputs,).
        NonFiniteError: a score is NaN or infinite.
    """
    values = _finite("scores", scores).sort(descending=True).values
    count = len(values)
    ranks = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    if points is not None and count > points:
        dense = points // 2
        step = torch.arange(1, points - dense + 1, dtype=torch.float64, device="cpu")
        geometric = (dense * (count / dense) ** (step / (points - dense))).round()
        ranks = torch.cat([ranks[:dense], torch.maximum(dense + step, geometric)])
    return Tail(values[ranks.long() - 1], ranks / count)


def tail_probability(tail: Tail, scores: Tensor) -> Tensor:
    """The share of familiar inputs whose score is at least as large, in [0, 1], by linear interpolation.

    It is 0 above the largest familiar score, 1 at the smallest and below, and never grows with the score. At a score
    shared by several points it is the largest of their shares.

    Args:
        tail: from `tail_of`.
        scores: (inputs,), of any inputs; may be infinite.

    Returns:
        (inputs,), float64, on the CPU; NaN where the score is.
    """
    values = plain(scores)
    points = len(tail.values)
    at_least = points - torch.searchsorted(tail.values.flip(0), values)
    left = (at_least - 1).clamp(0, points - 1)
    right = (left + 1).clamp(max=points - 1)
    width = tail.values[left] - tail.values[right]
    part = torch.where(width > 0, (tail.values[left] - values) / width, 0.0).clamp(0, 1)
    shares = tail.shares[left] + part * (tail.shares[right] - tail.shares[left])
    shares = torch.where(at_least == 0, 0.0, torch.where(at_least == points, 1.0, shares))
    return torch.where(values.isnan(), torch.nan, shares)


def joint_tail(familiar: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> Tensor:
    """One score from several: ``-log min_s p_s(x)``, with the tail probabilities `p_s` among familiar inputs.

    Beyond the largest familiar score of `s`, where the share is 0, ``-log p_s`` continues as a straight line, so that
    very foreign inputs do not tie. It starts at ``log(inputs)`` and has the slope of the line between the point where
    a tenth of the familiar inputs lie above and the largest of them: an exponential tail. Where the familiar scores
    are all the same there is no slope, and any larger score gives infinity.

    Args:
        familiar: by name, (familiar inputs,), finite: held-out inputs like those of the training.
        scores: by the same names, (inputs,): of the inputs to judge. They may be the familiar ones themselves.

    Returns:
        (inputs,), float64, on the CPU, not negative; higher is stranger. Fit for `ood_auroc` and the like.

    Raises:
        PosthocUQError: no scores, other names on either side, or shapes that are not (inputs,) for all.
        NonFiniteError: a familiar score is NaN or infinite, or another is NaN.
    """
    if set(familiar) != set(scores):
        raise PosthocUQError(
            f"joint_tail needs the same scores on both sides, not {sorted(familiar)} and {sorted(scores)}."
        )
    familiar_columns, columns = _columns(familiar), _columns(scores)
    return torch.stack(
        [_surprise(tail_of(familiar_columns[name]), columns[name]) for name in familiar_columns]
    ).amax(0)


def referral_thresholds(scores: Mapping[str, Tensor], rate: float) -> dict[str, float]:
    """Thresholds of several scores that together refer at most a share `rate`; any score above its own refers an input.

    Every input gets the smallest of its tail probabilities among these very inputs (ties count in full: inputs whose
    score is equal or larger). With ``k = floor(rate * inputs)``, the border is the one that ranks ``k + 1`` from below,
    and inputs strictly below it are referred, at most `k`. The threshold of a score is its largest value whose tail
    probability is not below the border. With `S` scores up to `S` inputs share a rank, so up to ``S - 1`` fewer than
    `k` are referred even where no score has ties. Of one score it is `referral_threshold`.

    Args:
        scores: by name, (inputs,), for instance of validation inputs.
        rate: in [0, 1).

    Raises:
        PosthocUQError: no scores, shapes that are not (inputs,) for all, or a rate outside [0, 1).
        NonFiniteError: a score is NaN or infinite.
    """
    if not 0 <= rate < 1:
        raise PosthocUQError(f"A rate of several scores must be from 0 to below 1, not {rate}.")
    columns = {name: _finite(name, values) for name, values in _columns(scores).items()}
    count = len(next(iter(columns.values())))
    ranks = {
        name: count - torch.searchsorted(values.sort().values, values) for name, values in columns.items()
    }
    smallest = torch.stack(list(ranks.values())).amin(0).sort().values
    border = smallest[min(referred_count(rate, count), count - 1)]
    return {name: values[ranks[name] >= border].max().item() for name, values in columns.items()}


def _surprise(tail: Tail, scores: Tensor) -> Tensor:
    """``-log`` of the tail probability; beyond the largest familiar score, the straight line that continues it."""
    largest, start = tail.values[0], -tail.shares[0].log()
    line = (tail.shares >= _LINE_FROM) & (tail.values < largest)
    slope = torch.tensor(torch.inf, dtype=torch.float64, device="cpu")
    if bool(line.any()):
        first = int(line.int().argmax())
        slope = (tail.shares[first] / tail.shares[0]).log() / (largest - tail.values[first])
    beyond = scores > largest
    excess = torch.where(beyond, scores - largest, 1.0)
    # a step lost in rounding still counts as beyond
    outside = torch.maximum(start + slope * excess, start.nextafter(start + 1))
    return torch.where(beyond, outside, -tail_probability(tail, scores).log())


def _columns(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not scores:
        raise PosthocUQError("There must be at least one score.")
    count = next(iter(scores.values())).numel()
    return {name: row(name, values, count) for name, values in scores.items()}


def _finite(name: str, scores: Tensor) -> Tensor:
    values = row(name, scores)
    wrong = int(values.isinf().sum())
    if wrong:
        raise NonFiniteError(f"{name} holds {wrong} infinite numbers among {len(values)}; leave them out.")
    return values
