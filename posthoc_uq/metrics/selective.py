"""Selective prediction: the errors that remain when the most uncertain inputs are referred to someone else.

Inputs are retained in the order of an uncertainty, the smallest first. Where scores tie, every number here is the mean
over all orders of the tied inputs (for `selective_auc`, tied inputs at the border are retained in part), so that the
order of the inputs never matters.

A referral rate leaves `floor(rate * inputs)` inputs to the expert, as in the protocol of Rudner et al. ("Tractable
Function-Space Variational Inference in Bayesian Neural Networks", NeurIPS 2022, appendix D.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.metrics.checks import classified, row


class RiskCoverage(NamedTuple):
    """A risk-coverage curve; every tensor is (inputs,), float64, from the first input retained to all of them.

    Attributes:
        coverage: share of inputs retained, k / inputs for k = 1, ..., inputs.
        risk: mean loss of the retained inputs, in units of the loss.
        thresholds: the scores in ascending order: inputs with score <= threshold are retained; of those whose
            score equals it, as many as the coverage needs.
    """

    coverage: Tensor
    risk: Tensor
    thresholds: Tensor

    @property
    def area(self) -> float:
        """AURC: the mean of the risk over all coverages 1 / n, ..., 1 (Geifman, Uziel and El-Yaniv,
        "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers", ICLR 2019); smaller is better."""
        return self.risk.mean().item()


def risk_coverage(scores: Tensor, losses: Tensor) -> RiskCoverage:
    """Mean loss of the k inputs with the smallest scores, for every k.

    Geifman and El-Yaniv, "Selective Classification for Deep Neural Networks", NeurIPS 2017. The risk within a
    run of equal scores is its mean over the orders of that run, and so is the area.

    Args:
        scores: (inputs,), an uncertainty: higher is referred sooner; may be infinite.
        losses: (inputs,), the loss of each input's prediction, for instance 1 where the class is wrong.

    Raises:
        PosthocUQError: no inputs, or shapes that are not (inputs,) for both.
        NonFiniteError: a score or a loss is NaN.
    """
    scores = row("scores", scores)
    losses = row("losses", losses, len(scores))
    thresholds, order = scores.sort(stable=True)
    group = torch.unique_consecutive(thresholds, return_inverse=True)[1]
    mean = torch.bincount(group, weights=losses[order]) / torch.bincount(group)
    retained_counts = torch.arange(1, len(scores) + 1, dtype=torch.float64, device="cpu")
    return RiskCoverage(retained_counts / len(scores), mean[group].cumsum(0) / retained_counts, thresholds)


def selective_accuracy(
    scores: Tensor, probs: Tensor, labels: Tensor, rates: Sequence[float] | Tensor
) -> Tensor:
    """Accuracy on the inputs that remain when a share of them, the most uncertain, is referred.

    Args:
        scores: (inputs,), an uncertainty: higher is referred sooner.
        probs: (inputs, classes).
        labels: (inputs,), integers.
        rates: (rates,), shares referred, each in [0, 1).

    Returns:
        (rates,), float64.

    Raises:
        PosthocUQError: shapes, labels or probabilities that do not fit, or a rate outside [0, 1).
        NonFiniteError: a score or a probability is NaN.
    """
    probs, labels = classified(probs, labels)
    curve = _miss_curve(scores, probs, labels)
    return 1 - curve.risk[[count - 1 for count in retained(rates, len(labels))]]


def selective_accuracy_area(scores: Tensor, probs: Tensor, labels: Tensor) -> float:
    """Area under the curve of `selective_accuracy` over the referral rate; larger is better.

    The mean over the rates 0, 1 / n, ..., (n - 1) / n at which the curve changes, which is its integral over
    [0, 1): 1 - AURC of the 0/1 loss. Arguments and errors as in `selective_accuracy`.
    """
    return 1 - _miss_curve(scores, *classified(probs, labels)).area


def selective_auc(scores: Tensor, probs: Tensor, labels: Tensor, rates: Sequence[float] | Tensor) -> Tensor:
    """ROC AUC of the class probabilities on the inputs that remain, for each referral rate.

    With two classes this is the area under the ROC curve of P(class 1). With more it is the plain mean over
    classes of the AUC of that class against the rest (macro, one versus rest), over the classes that some but
    not all of the retained inputs have. Where there is no such class, the entry is NaN.

    Inputs that tie at the border are retained in part: the weight of each in the AUC is the share of them that the
    rate leaves.

    Args, Raises: as `selective_accuracy`.

    Returns:
        (rates,), float64, NaN where all retained inputs are of one class.
    """
    probs, labels = classified(probs, labels)
    scores = row("scores", scores, len(labels))
    ascending = scores.sort().values
    values: list[float] = []
    for count in retained(rates, len(labels)):
        border = ascending[count - 1]
        inside, tied = scores < border, scores == border
        weights = inside.double() + tied * ((count - inside.sum()) / tied.sum().double())
        used = weights > 0
        values.append(_macro_auc(probs[used], labels[used], weights[used]))
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def referral_threshold(scores: Tensor, rate: float) -> float:
    """The smallest threshold that refers at most a share `rate`, when score > threshold is referred.

    It is the score that ranks `floor(rate * inputs) + 1` from above. Inputs whose score
    equals it are all retained, so with ties fewer than `rate` may be referred. `rate = 1` gives minus infinity.

    Args:
        scores: (inputs,), for instance of validation inputs.
        rate: in [0, 1].

    Raises:
        PosthocUQError: no scores, not (inputs,), or a rate outside [0, 1].
        NonFiniteError: a score is NaN.
    """
    scores = row("scores", scores)
    if not 0 <= rate <= 1:
        raise PosthocUQError(f"referral_threshold needs a rate between 0 and 1, not {rate}.")
    referred = referred_count(rate, len(scores))
    return -math.inf if referred == len(scores) else scores.sort(descending=True).values[referred].item()


def _miss_curve(scores: Tensor, probs: Tensor, labels: Tensor) -> RiskCoverage:
    return risk_coverage(row("scores", scores, len(labels)), (probs.argmax(dim=-1) != labels).double())


def retained(rates: Sequence[float] | Tensor, inputs: int) -> list[int]:
    """The number of inputs that each rate retains, at least one."""
    values = [float(rate) for rate in rates]
    if not values or not all(0 <= rate < 1 for rate in values):
        raise PosthocUQError(
            f"rates must be numbers from 0 to below 1 (at 1 nothing is retained), not {values}."
        )
    return [max(1, inputs - referred_count(rate, inputs)) for rate in values]


def referred_count(rate: float, inputs: int) -> int:
    """The largest number of inputs that a rate refers."""
    # a rate in float32 may be up to 6e-8 too small, and 0.7 of 10 must be 7
    return math.floor(rate * inputs + min(1e-7 * inputs, 0.1))


def _macro_auc(probs: Tensor, labels: Tensor, weights: Tensor) -> float:
    classes = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    areas = [_weighted_auc(probs[:, c], labels == c, weights) for c in classes]
    known = [area for area in areas if not math.isnan(area)]
    return sum(known) / len(known) if known else math.nan


def _weighted_auc(values: Tensor, positive: Tensor, weights: Tensor) -> float:
    """Weighted share of (positive, negative) pairs in the right order, ties counting half; NaN without pairs."""
    rank = torch.unique(values, return_inverse=True)[1]
    size = int(rank.max()) + 1
    up = torch.bincount(rank, weights=weights * positive, minlength=size)
    down = torch.bincount(rank, weights=weights * ~positive, minlength=size)
    pairs = up.sum() * down.sum()
    return ((up * (down.cumsum(0) - down / 2)).sum() / pairs).item() if pairs > 0 else math.nan
