"""Scores of real-valued predictions and of the intervals around them.

`mean`, `variance`, `lower`, `upper` and `targets` are (inputs,) or (inputs, outputs), all of exactly one shape, so
that nothing broadcasts by accident. What does not fit raises `PosthocUQError`, a NaN `NonFiniteError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.metrics.checks import same_shape


class CoverageCurve(NamedTuple):
    """Nominal and observed coverage, each (levels,), float64."""

    nominal: Tensor
    observed: Tensor

    @property
    def error(self) -> float:
        """Mean over the levels of |observed - nominal|; 0 for a calibrated model, up to chance."""
        return (self.observed - self.nominal).abs().mean().item()


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Root of the mean squared error over all inputs and outputs, in units of the output.

    Args:
        mean: (inputs,) or (inputs, outputs).
        targets: exactly the same shape.

    Raises:
        PosthocUQError: nothing to average, or shapes that differ (so do all functions of targets here).
        NonFiniteError: a number is NaN (likewise).
    """
    from torchmetrics.functional.regression import mean_squared_error

    mean, targets = same_shape(mean=mean, targets=targets)
    return mean_squared_error(mean.flatten(), targets.flatten(), squared=False).item()


def mae(mean: Tensor, targets: Tensor) -> float:
    """Mean absolute error over all inputs and outputs, in units of the output; arguments as in `rmse`."""
    from torchmetrics.functional.regression import mean_absolute_error

    mean, targets = same_shape(mean=mean, targets=targets)
    return mean_absolute_error(mean.flatten(), targets.flatten()).item()


def gaussian_log_density(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Log density of the targets in nats, log N(y; mean, variance), summed over outputs, mean over inputs.

    Args:
        mean: (inputs,) or (inputs, outputs).
        variance: the total variance, of the same shape.
        targets: of the same shape.

    Raises:
        PosthocUQError: shapes that differ, nothing to average, or a variance that is not positive.
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    if bool((variance <= 0).any()):
        raise PosthocUQError("gaussian_log_density needs a positive variance everywhere.")
    density = -0.5 * ((targets - mean).square() / variance + variance.log() + math.log(2 * math.pi))
    return density.reshape(len(density), -1).sum(dim=-1).mean().item()


def crps_gaussian(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Continuous ranked probability score of N(mean, variance), mean over inputs and outputs; smaller is better.

    `integral (F(x) - 1[x >= y])^2 dx = s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))` with `s^2` the variance and
    `z = (y - mean) / s`, in units of the output (Gneiting and Raftery, "Strictly Proper Scoring Rules, Prediction,
    and Estimation", JASA 2007, section 4.2, with the sign turned). Where the variance is 0 it is the absolute error.

    Args:
        mean: (inputs,) or (inputs, outputs).
        variance: the total variance, of the same shape.
        targets: of the same shape.

    Raises:
        PosthocUQError: shapes that differ, nothing to average, or a variance that is negative.
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    z = _standardised("crps_gaussian", mean, variance, targets)
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    from_spread = variance.sqrt() * (2 * density - 1 / math.sqrt(math.pi))
    return ((targets - mean) * torch.special.erf(z / math.sqrt(2)) + from_spread).mean().item()


def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> float:
    """Share of targets with lower <= target <= upper, over all inputs and outputs."""
    lower, upper, targets = same_shape(lower=lower, upper=upper, targets=targets)
    return ((lower <= targets) & (targets <= upper)).double().mean().item()


def interval_sharpness(lower: Tensor, upper: Tensor) -> float:
    """Mean width of the intervals over all inputs and outputs, in units of the output.

    Of models whose intervals cover equally often, the one with narrower intervals is better (Gneiting,
    Balabdaoui and Raftery, "Probabilistic forecasts, calibration and sharpness", JRSS B 2007).

    Raises:
        PosthocUQError: shapes that differ, no interval, or a lower end above its upper end.
    """
    lower, upper = same_shape(lower=lower, upper=upper)
    if bool((lower > upper).any()):
        raise PosthocUQError("interval_sharpness got intervals whose lower end is above the upper one.")
    return (upper - lower).mean().item()


def coverage_curve(
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    levels: Sequence[float] | Tensor | None = None,
    *,
    kind: Literal["interval", "quantile"] = "interval",
) -> CoverageCurve:
    """The observed coverage of N(mean, variance) at each nominal level.

    With "interval": the share of targets inside the central interval of that probability,
    `|y - mean| <= Phi^-1((1 + level) / 2) s`. With "quantile": the share at or below the quantile of that level,
    `y <= mean + Phi^-1(level) s` (Kuleshov et al., "Accurate Uncertainties for Deep Learning Using Calibrated
    Regression", ICML 2018), which shows a bias of the mean as well. A calibrated model has observed = nominal.

    Args:
        mean: (inputs,) or (inputs, outputs).
        variance: the total variance, of the same shape.
        targets: of the same shape.
        levels: (levels,), each strictly between 0 and 1; without them 0.05, 0.10, ..., 0.95.
        kind: "interval" or "quantile".

    Raises:
        PosthocUQError: shapes that differ, nothing to average, a negative variance, a level outside (0, 1), or
            an unknown kind.
    """
    mean, variance, targets = same_shape(mean=mean, variance=variance, targets=targets)
    values = [k / 20 for k in range(1, 20)] if levels is None else [float(level) for level in levels]
    if not values or not all(0 < level < 1 for level in values):
        raise PosthocUQError(f"levels must be numbers strictly between 0 and 1, not {values}.")
    z = _standardised("coverage_curve", mean, variance, targets).flatten()
    if kind == "interval":
        needed_level = torch.special.erf(z.abs() / math.sqrt(2))
    elif kind == "quantile":
        needed_level = torch.special.ndtr(z)
    else:
        raise PosthocUQError(f"kind must be 'interval' or 'quantile', not {kind!r}.")
    nominal = torch.tensor(values, dtype=torch.float64, device="cpu")
    covered = torch.searchsorted(needed_level.sort().values, nominal, right=True)
    return CoverageCurve(nominal, covered.double() / len(needed_level))


def _standardised(name: str, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """(targets - mean) / s. Where s is 0: infinite with the sign of the error, or 0 without an error."""
    if bool((variance < 0).any()):
        raise PosthocUQError(f"{name} needs a variance that is nowhere negative.")
    z = (targets - mean) / variance.sqrt()
    return z.masked_fill(targets == mean, 0)
