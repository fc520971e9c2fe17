"""Leave-one-out predictions by the tangent kernel of the untrained network: accuracy and noise without held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError

RIDGES = tuple(10.0 ** (0.25 * step) for step in range(-24, 9))  # 1e-6 to 1e2
MAX_SAMPLES = 4096  # the kernel has a number for every pair, and its eigenvectors take some seconds at 4,000


@dataclass(frozen=True)
class LeftOut:
    """Predictions of every sample by all others.

    Attributes:
        predictions: ``(samples, columns)``, float64.
        targets: of the same shape.
        ridge: the one of `RIDGES` with the least mean squared error.
    """

    predictions: Tensor
    targets: Tensor
    ridge: float

    @property
    def accuracy(self) -> float:
        """The share of samples whose largest prediction is their class; of one column, that is on the side of 1/2 of
        their target.
        """
        if self.targets.shape[1] == 1:
            return float(((self.predictions > 0.5) == (self.targets > 0.5)).double().mean())
        return float((self.predictions.argmax(1) == self.targets.argmax(1)).double().mean())

    @property
    def squared_error(self) -> Tensor:
        """The mean squared error of each column, ``(columns,)``."""
        return (self.predictions - self.targets).square().mean(0)


def leave_one_out(kernel: Tensor, targets: Tensor, groups: Tensor | None = None) -> LeftOut:
    """The predictions of kernel ridge regression for every sample by all others.

    With ``A = K / mean(diag K) + ridge I`` and centred targets, the prediction of sample n is
    ``Y_n - [A^-1 (Y - mean Y)]_n / [A^-1]_nn`` (of a group G, ``Y_G - ([A^-1]_GG)^-1 [A^-1 (Y - mean Y)]_G``): what a
    regression fitted without it predicts there. One eigendecomposition serves every ridge.

    Args:
        kernel: ``(samples, samples)``, float64.
        targets: ``(samples, columns)``.
        groups: ``(samples,)`` integers; samples with the same one are left out together.

    Raises:
        PosthocUQError: fewer than three samples or than two groups.
    """
    samples = len(targets)
    if samples < 3:
        raise PosthocUQError(f"Leave-one-out needs at least 3 samples, not {samples}.")
    members = None
    if groups is not None:
        members = [(groups == each).nonzero().flatten() for each in groups.unique()]
        if len(members) < 2:
            raise PosthocUQError("groups= puts all samples into one group, which leaves none to predict it by.")
    targets = targets.double()
    values, vectors = torch.linalg.eigh(kernel / kernel.diagonal().mean())
    values = values.clamp(min=0)
    rotated = vectors.T @ (targets - targets.mean(0))
    best: LeftOut | None = None
    for ridge in RIDGES:
        inverse_values = 1 / (values + ridge)
        solved = vectors @ (inverse_values.unsqueeze(1) * rotated)
        if members is None:
            residuals = solved / (vectors.square() @ inverse_values).unsqueeze(1)
        else:
            residuals = torch.empty_like(solved)
            for member in members:
                part = vectors[member]
                residuals[member] = torch.linalg.solve((part * inverse_values) @ part.T, solved[member])
        found = LeftOut(targets - residuals, targets, ridge)
        if best is None or float(found.squared_error.sum()) < float(best.squared_error.sum()):
            best = found
    return cast(LeftOut, best)


def temperature_for(logits: Tensor, confidence: float, binary: bool = False) -> float:
    """The temperature, at least 1, at which the mean of the largest probability is `confidence`.

    Args:
        logits: ``(samples, classes)``, or ``(samples,)`` of two classes with `binary`.
        confidence: in (0, 1).
        binary: whether a logit is that of the second of two classes.
    """
    from scipy.optimize import brentq

    wide = logits.double()
    if binary:
        wide = torch.stack((torch.zeros_like(wide), wide), -1)

    def excess(decade: float) -> float:
        return float((wide / 10.0**decade).softmax(-1).amax(-1).mean()) - confidence

    if excess(0.0) <= 0:
        return 1.0
    if excess(4.0) >= 0:  # no more confident than chance: probabilities become equal
        return 1e4
    return 10.0 ** float(brentq(excess, 0.0, 4.0, xtol=1e-6))
