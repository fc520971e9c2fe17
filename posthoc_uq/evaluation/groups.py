"""Where promises fail: coverage by groups of inputs, and in one number the excess risk of the target coverage (ERT).

A promise is an average over all inputs. It may hold there and fail for some, such as those with a large entropy, at the
cost of sets that are too large for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import Count, check_option, check_probability

_FOLDS, _STEPS, _RATE, _RIDGE, _TENTHS = 5, 20, 0.2, 2.0, 10  # of the estimate that ERT goes by
_FIFTHS, _MAX_VALUES = 5, 6  # groups of a score; different values up to which each is a group
_Z = 1.96
SURE = 2.0
"""Standard errors above zero from which on an ERT says that a promise fails: by chance it does in 2 of 100 draws."""


class ExcessRisk(NamedTuple):
    """How much coverage some inputs miss, at least.

    Attributes:
        value: mean over inputs, a lower bound but for chance; about 0 where none are missed.
        error: its standard error.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        covered = torch.rand(100) < 0.9
        known = {"novelty": torch.rand(100)}
        risk = metrics.coverage_excess_risk(covered, 0.9, known)
        print(risk.value, risk.error, risk.fails)
        ```
    """

    value: float
    error: float

    @property
    def fails(self) -> bool:
        """Whether it is more than two standard errors above zero."""
        return self.value > SURE * self.error


class CoverageGroup(NamedTuple):
    """Coverage of a group of test inputs.

    Attributes:
        by: what the group is of: a score, ``"class"``, ``"set_size"``, ...
        name: its values in words, ``"0.31 to 0.55"``.
        inputs: how many there are; of several labels, how many labels that apply.
        coverage: share of right answers inside.
        low, high: its 95 % interval (Wilson), given so few inputs.
    """

    by: str
    name: str
    inputs: int
    coverage: float
    low: float
    high: float


@dataclass(frozen=True)
class GroupedCoverage:
    """Coverage of promises of one level by groups.

    Attributes:
        level: of the promises.
        missing: the excess risk of the target coverage; None with too few inputs.
        groups: by score, class and size, those of one score one after the other and in its order.
    """

    level: float
    missing: ExcessRisk | None
    groups: list[CoverageGroup]

    def least_covered(self, most: int) -> list[CoverageGroup]:
        """So many of the groups, those first whose interval ends lowest; where that is below the level, a group is
        covered too little.
        """
        return sorted(self.groups, key=lambda group: group.high)[:most]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        missing = None if self.missing is None else self.missing._asdict() | {"fails": self.missing.fails}
        groups = [group._asdict() for group in self.groups]
        return {"level": self.level, "ert": missing, "groups": groups}


MIN_INPUTS = 50
"""Fewest inputs that an excess risk is estimated of."""


def coverage_excess_risk(
    covered: Tensor,
    level: float,
    features: Mapping[str, Tensor],
    *,
    held_out: int | None = None,
    inputs: Tensor | None = None,
) -> ExcessRisk:
    """Excess risk of the target coverage (ERT; Braun, Holzmüller, Jordan, Bach, "Conditional coverage diagnostics for
    conformal prediction", 2025), of coverage that is missing: a lower bound of ``E max(0, level - P(covered |
    features))``.

    A classifier that is fitted on four fifths of the inputs tells which of the last fifth are covered with a
    probability below the level; the value is the mean of ``level - covered`` over these, and 0 for all others. Whatever
    the classifier says, that is at most the coverage that is missing on average, and 0 on average where it is the
    level everywhere. This classifier adds up effects of tenths of each feature, or of its whole numbers, by boosting.

    Args:
        covered: (entries,), 1 or True where the right answer is in its set; shares are taken, too.
        level: that was promised, in (0, 1).
        features: by name (entries,), of what is known without the right answer; integers are categories.
        held_out: scores that the promise came from. Few of them leave coverage up to chance for all inputs at once,
            which then is in the error.
        inputs: (entries,), the number of the input of each entry, where inputs have several; by default one each.

    Raises:
        PosthocUQError: lengths that differ, less than 50 inputs, or no features.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        covered = torch.rand(100) < 0.9
        known = {"novelty": torch.rand(100)}
        risk = metrics.coverage_excess_risk(covered, 0.9, known)
        print(risk.value, risk.error, risk.fails)
        ```
    """
    held_out = check_option("held_out", held_out, Count | None)
    check_probability("level", level)
    sizes = {name: tuple(values.shape) for name, values in features.items()}
    if not sizes or any(size != tuple(covered.shape) for size in sizes.values()) or covered.ndim != 1:
        raise PosthocUQError(
            f"coverage_excess_risk needs one number an entry of each feature, like covered, "
            f"{tuple(covered.shape)}, not {sizes}."
        )
    z = as_double(covered).cpu()
    if not bool(z.isfinite().all()):
        raise NonFiniteError("covered holds numbers that are not finite.")
    of_input = torch.arange(len(z), device="cpu") if inputs is None else inputs.cpu()
    if len(of_input.unique()) < MIN_INPUTS:
        raise PosthocUQError(f"coverage_excess_risk needs at least {MIN_INPUTS} inputs.")
    columns = [values.detach().cpu() for values in features.values()]
    return excess_risk(
        z, level, columns, of_input, [] if held_out is None else [(torch.ones_like(z), held_out)]
    )


def excess_risk(
    z: Tensor, level: float, columns: list[Tensor], of_input: Tensor, held_out: list[tuple[Tensor, int]]
) -> ExcessRisk:
    """See `coverage_excess_risk`.

    Args:
        z: (entries,), float64.
        level: of the promise.
        columns: features, (entries,) each.
        of_input: (entries,), the number of the input of each entry.
        held_out: the entries that share a threshold, (entries,) of 1 and 0, and how many scores it came from.
    """
    of_input = torch.unique(of_input, return_inverse=True)[1]
    bins = [torch.zeros_like(of_input), *(_bins(column, _TENTHS) for column in columns)]
    fold = _folds(as_double(columns[0]), of_input)
    flagged = torch.zeros(len(z), dtype=torch.bool, device="cpu")
    for place in range(_FOLDS):
        inside = fold == place
        flagged[inside] = _below(bins, z, ~inside, level)[inside]
    missed = torch.where(flagged, level - z, 0.0)
    by_input = torch.bincount(of_input, weights=missed)
    chance = len(by_input) * float(by_input.var()) / len(z) ** 2
    for members, count in held_out:
        share = float((members * flagged).mean())
        chance += (
            share**2 * level * (1 - level) / (count + 2)
        )  # the variance of a coverage, which is beta distributed
    return ExcessRisk(float(missed.mean()), chance**0.5)


def _bins(values: Tensor, most: int) -> Tensor:
    """The group of each entry from 0 on: its own for every whole number, else at most so many of equal size."""
    if values.is_floating_point():
        ordered = as_double(values).sort().values
        places = torch.arange(1, most, device="cpu") * len(values) // most
        values = torch.searchsorted(ordered[places], as_double(values), right=True)
    return torch.unique(values, return_inverse=True)[1]


def _folds(feature: Tensor, of_input: Tensor) -> Tensor:
    """The fold of each entry, all of an input in the same one: by the rank of the feature, whatever the order."""
    inputs = int(of_input.max()) + 1
    own = torch.zeros(inputs, dtype=torch.float64, device="cpu").index_copy_(0, of_input, feature)
    folds = torch.empty(inputs, dtype=torch.int64, device="cpu")
    folds[own.argsort(stable=True)] = torch.arange(inputs, device="cpu") % _FOLDS
    return folds[of_input]


def _below(bins: list[Tensor], z: Tensor, fitted: Tensor, level: float) -> Tensor:
    """Which entries have a probability below the level, (entries,), by a logistic model that begins at the level for
    all, and of which each step moves the groups of the one feature by which the labels speak most against it.
    """
    sizes = torch.tensor([int(each.max()) + 1 for each in bins], device="cpu")
    codes = torch.stack(bins, 1) + (sizes.cumsum(0) - sizes)  # (entries, features)
    feature, groups = torch.arange(len(bins), device="cpu").repeat_interleave(sizes), int(sizes.sum())
    seen, labels = codes[fitted], z[fitted]
    logits = torch.full_like(z, log(level / (1 - level)))

    def sums(numbers: Tensor) -> Tensor:
        return torch.bincount(seen.flatten(), weights=numbers.repeat_interleave(len(bins)), minlength=groups)

    for _ in range(_STEPS):
        p = logits[fitted].sigmoid()
        gradient, curvature = sums(labels - p), sums(p * (1 - p))
        step = gradient / (curvature + _RIDGE)
        best = int(torch.bincount(feature, weights=gradient * step).argmax())
        logits = logits + _RATE * step[codes[:, best]]
    return logits.sigmoid() < level


def groups_of(
    by: str, values: Tensor, covered: Tensor, names: Mapping[int, str] | None
) -> list[CoverageGroup]:
    """Coverage by the values of a score, size or class: by each value where there are few, else by fifths.

    Args:
        by: what the values are.
        values: (entries,).
        covered: (entries,), float64.
        names: of the values, which are then groups of their own, however many.
    """
    distinct = values.unique()
    whole = names is not None or len(distinct) <= _MAX_VALUES
    place = torch.searchsorted(distinct, values) if whole else _bins(values, _FIFTHS)
    found: list[CoverageGroup] = []
    for group in range(int(place.max()) + 1):
        inside = place == group
        count, share = int(inside.sum()), float(covered[inside].mean())
        lowest, highest = values[inside].min().item(), values[inside].max().item()
        ends = f"{lowest:.3g} to {highest:.3g}"
        name = names[int(lowest)] if names is not None else f"{lowest:.3g}" if lowest == highest else ends
        low, high = wilson(np.asarray([share]), np.asarray([count]))
        found.append(CoverageGroup(by, name, count, share, float(low[0]), float(high[0])))
    return found


def wilson(
    share: NDArray[np.float64], count: NDArray[np.int64] | NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """95 % interval of a proportion (Wilson, "Probable inference", JASA 1927); valid at 0 and 1 too."""
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * np.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return centre - half, centre + half
