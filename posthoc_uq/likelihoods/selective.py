"""Referring the most uncertain inputs to a person: what remains then, thresholds, and how extreme an input is.

A score is an uncertainty, (inputs,): inputs with higher ones are referred sooner. Where scores tie, every number here
is the mean over all orders of the tied inputs (for `selective_auc`, tied inputs at the border are retained in part), so
that the order of the inputs never matters. A referral rate leaves `floor(rate * inputs)` inputs to the expert, as in
the protocol of Rudner et al. ("Tractable Function-Space Variational Inference in Bayesian Neural Networks", NeurIPS
2022, appendix D.4). What does not fit raises a `PosthocUQError`, a NaN a `NonFiniteError`. `probs` is (inputs,
classes), `labels` (inputs,) integers, `rates` (rates,) shares referred, each in [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import Unit
from posthoc_uq.core.records import Listed, Record, Sum
from posthoc_uq.likelihoods.metrics import classified, plain, row


class RiskCoverage(NamedTuple):
    """A risk-coverage curve; every tensor is (inputs,), float64, from the first input retained to all of them.

    Attributes:
        coverage: share of inputs retained, k / inputs for k = 1, ..., inputs.
        risk: mean loss of the retained inputs, in units of the loss.
        thresholds: the scores in ascending order: inputs with score <= threshold are retained; of those whose
            score equals it, as many as the coverage needs.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        wrong = (prediction.predicted() != labels).double()
        curve = metrics.risk_coverage(prediction.entropy(), wrong)
        print(curve.risk[-1], curve.area)  # of all inputs; AURC
        ```
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
    """Mean loss of the k inputs with the smallest scores, for every k (Geifman and El-Yaniv, "Selective Classification
    for Deep Neural Networks", NeurIPS 2017).

    Args:
        scores: (inputs,), may be infinite.
        losses: (inputs,), the loss of each input's prediction, for instance 1 where the class is wrong.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        wrong = (prediction.predicted() != labels).double()
        curve = metrics.risk_coverage(prediction.entropy(), wrong)
        print(curve.coverage, curve.risk, curve.area)
        ```
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
    """(rates,), float64: accuracy on the inputs that remain when a share of them, the most uncertain, is referred.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        scores, probs = prediction.entropy(), prediction.probs
        print(metrics.selective_accuracy(scores, probs, labels, [0.0, 0.2]))
        ```
    """
    probs, labels = classified(probs, labels)
    risk = risk_coverage(scores, (probs.argmax(dim=-1) != labels).double()).risk
    return 1 - risk[[count - 1 for count in retained(rates, len(labels))]]


def selective_accuracy_area(scores: Tensor, probs: Tensor, labels: Tensor) -> float:
    """Area under the curve of `selective_accuracy` over the referral rate; larger is better.

    The mean over the rates 0, 1 / n, ..., (n - 1) / n at which the curve changes, which is its integral over
    [0, 1): 1 - AURC of the 0/1 loss.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        scores, probs = prediction.entropy(), prediction.probs
        print(metrics.selective_accuracy_area(scores, probs, labels))
        ```
    """
    probs, labels = classified(probs, labels)
    return 1 - risk_coverage(scores, (probs.argmax(dim=-1) != labels).double()).area


def selective_auc(scores: Tensor, probs: Tensor, labels: Tensor, rates: Sequence[float] | Tensor) -> Tensor:
    """(rates,), float64: ROC AUC of the class probabilities on the inputs that remain.

    With two classes this is the area under the ROC curve of P(class 1). With more it is the plain mean over
    classes of the AUC of that class against the rest (macro, one versus rest), over the classes that some but
    not all of the retained inputs have. Where there is no such class, the entry is NaN.

    Inputs that tie at the border are retained in part: the weight of each in the AUC is the share of them that the
    rate leaves.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        scores, probs = prediction.entropy(), prediction.probs
        print(metrics.selective_auc(scores, probs, labels, [0.0, 0.2]))
        ```
    """
    probs, labels = classified(probs, labels)
    scores = row("scores", scores, len(labels))
    ascending, classes = scores.sort().values, range(probs.shape[1]) if probs.shape[1] > 2 else [1]
    values: list[float] = []
    for count in retained(rates, len(labels)):
        border = ascending[count - 1]
        inside, tied = scores < border, scores == border
        weights = inside.double() + tied * ((count - inside.sum()) / tied.sum().double())
        used = weights > 0
        areas = [_weighted_auc(probs[used, c], labels[used] == c, weights[used]) for c in classes]
        known = [area for area in areas if not math.isnan(area)]
        values.append(sum(known) / len(known) if known else math.nan)
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def retained(rates: Sequence[float] | Tensor, inputs: int) -> list[int]:
    """The number of inputs that each rate retains, at least one.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        print(metrics.retained([0.0, 0.2, 0.5], 10))  # [10, 8, 5]
        ```
    """
    values = [float(rate) for rate in rates]
    if not values or not all(0 <= rate < 1 for rate in values):
        raise PosthocUQError(
            f"rates must be numbers from 0 to below 1 (at 1 nothing is retained), not {values}."
        )
    return [max(1, inputs - _referred_count(rate, inputs)) for rate in values]


def _referred_count(rate: float, inputs: int) -> int:
    # a rate in float32 may be up to 6e-8 too small, and 0.7 of 10 must be 7
    return math.floor(rate * inputs + min(1e-7 * inputs, 0.1))


def _weighted_auc(values: Tensor, positive: Tensor, weights: Tensor) -> float:
    """Weighted share of (positive, negative) pairs in the right order, ties counting half; NaN without pairs."""
    rank = torch.unique(values, return_inverse=True)[1]
    size = int(rank.max()) + 1
    up = torch.bincount(rank, weights=weights * positive, minlength=size)
    down = torch.bincount(rank, weights=weights * ~positive, minlength=size)
    pairs = up.sum() * down.sum()
    return ((up * (down.cumsum(0) - down / 2)).sum() / pairs).item() if pairs > 0 else math.nan


CLASS_SCORES = (
    "entropy",
    "mutual_information",
    "max_probability",
    "epistemic_variance",
    "variation_ratio",
    "novelty",
)
VALUE_SCORES = ("standard_deviation", "epistemic_variance", "novelty")
SCORES = tuple(dict.fromkeys((*CLASS_SCORES, *VALUE_SCORES)))
"""Every score. Of all kinds: the epistemic variance, the mean over outputs of the variance over the weights of what is
predicted on average (of classes the logits), and the novelty, the share of the prior's uncertainty that the data left
(`Predictor.novelty`). Of classes: the entropy of the mean probabilities, mutual information (both in nats), 1 - the
largest probability, the share of draws that vote otherwise. Of values: the total standard deviation, mean over outputs,
in the outputs' units."""

FORMER_SCORES = {"functional_variance": "epistemic_variance"}
"""Names that files of earlier versions have for scores."""

QUANTILES = 200
"""The number of points of a tail that are kept at most."""
_LINE_FROM = 0.1  # the tail is extrapolated from this share of familiar inputs with the largest scores


class Tail(Record):
    """Points of the tail probability of one score: the share of familiar inputs whose score is at least as large.

    It has no units, so those of different scores can be compared. An input is judged by the smallest of its tail
    probabilities, that is, by the score that finds it most extreme. Both are (points,), float64.

    Attributes:
        values: scores in descending order, the largest familiar one first, the smallest last.
        shares: for each, its rank from above over the number of familiar inputs; ascending, the last is 1.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        tail = metrics.tail_of(torch.randn(100), points=20)
        print(tail.values, tail.shares)
        ```
    """

    values: Annotated[
        Tensor, Listed(Annotated[list[Sum], Field(min_length=1, max_length=QUANTILES)], torch.float64)
    ]
    shares: Annotated[Tensor, Listed(list[Unit], torch.float64)]
    _known_ascending: Tensor = PrivateAttr()
    _known_line: tuple[Tensor, Tensor] = PrivateAttr()

    @property
    def ascending(self) -> Tensor:
        """The values in ascending order."""
        return self._known_ascending

    @property
    def line(self) -> tuple[Tensor, Tensor]:
        """``-log`` of the tail probability at the largest familiar score, and the slope of the straight line by which
        it goes on beyond: see `joint_tail`.
        """
        return self._known_line

    @model_validator(mode="after")
    def _check_order(self) -> Tail:
        if len(self.shares) != len(self.values) or bool((self.values.diff() > 0).any()):
            raise ValueError("must have as many descending values as shares")
        if not float(self.shares[0]) > 0 or bool((self.shares.diff() <= 0).any()) or self.shares[-1] != 1:
            raise ValueError("has shares that do not ascend from above 0 to 1")
        # what follows from them is not made later, when an export may trace
        largest, start = self.values[0], -self.shares[0].log()
        beside = (self.shares >= _LINE_FROM) & (self.values < largest)
        slope = torch.tensor(torch.inf, dtype=torch.float64, device="cpu")
        if bool(beside.any()):
            first = int(beside.int().argmax())
            slope = (self.shares[first] / self.shares[0]).log() / (largest - self.values[first])
        self._known_line, self._known_ascending = (start, slope), self.values.flip(0)
        return self


def tail_of(scores: Tensor, points: int | None = None) -> Tail:
    """The tail of the scores of familiar inputs.

    Args:
        scores: (inputs,), finite.
        points: how many to keep at most, an even number; all if None. With more inputs than points, half of the points
            are the largest scores, one by one, and the ranks of the others form a geometric sequence. So small shares
            are resolved for any number of inputs.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        familiar = predictor.predict(val_loader).entropy()
        tail = metrics.tail_of(familiar)
        print(metrics.tail_probability(tail, prediction.entropy()))
        ```
    """
    values = _refuse_infinite("scores", scores).sort(descending=True).values
    count = len(values)
    ranks = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    if points is not None and count > points:
        dense = points // 2
        step = torch.arange(1, points - dense + 1, dtype=torch.float64, device="cpu")
        geometric = (dense * (count / dense) ** (step / (points - dense))).round()
        ranks = torch.cat([ranks[:dense], torch.maximum(dense + step, geometric)])
    return Tail(values=values[ranks.long() - 1], shares=ranks / count)


def tail_probability(tail: Tail, scores: Tensor) -> Tensor:
    """The share of familiar inputs whose score is at least as large, in [0, 1], by linear interpolation.

    It is 0 above the largest familiar score, 1 at the smallest and below, and never grows with the score. At a score
    shared by several points it is the largest of their shares.

    Args:
        tail: from `tail_of`.
        scores: (inputs,), of any inputs; may be infinite.

    Returns:
        (inputs,), float64, on the CPU; NaN where the score is.

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        familiar = predictor.predict(val_loader).entropy()
        tail = metrics.tail_of(familiar)
        print(metrics.tail_probability(tail, prediction.entropy()))
        ```
    """
    values = plain(scores)
    points = len(tail.values)
    at_least = points - torch.searchsorted(tail.ascending, values)
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

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        def two(prediction):
            return {"a": prediction.entropy(), "b": prediction.novelty()}

        familiar = two(predictor.predict(val_loader))
        print(metrics.joint_tail(familiar, two(prediction)))
        ```
    """
    if set(familiar) != set(scores):
        raise PosthocUQError(
            f"joint_tail needs the same scores on both sides, not {sorted(familiar)} and {sorted(scores)}."
        )
    familiar_columns, columns = _check_scores(familiar), _check_scores(scores)
    return joint_surprise({name: tail_of(values) for name, values in familiar_columns.items()}, columns)


def joint_surprise(tails: Mapping[str, Tail], scores: Mapping[str, Tensor]) -> Tensor:
    """`joint_tail` by tails that are known: the largest of the surprises of single scores, (inputs,)."""
    return torch.stack([_surprise(tail, plain(scores[name])) for name, tail in tails.items()]).amax(0)


def _surprise(tail: Tail, scores: Tensor) -> Tensor:
    """``-log`` of the tail probability; beyond the largest familiar score, the straight line that continues it."""
    largest, (start, slope) = tail.values[0], tail.line
    beyond = scores > largest
    excess = torch.where(beyond, scores - largest, 1.0)
    # a step lost in rounding still counts as beyond
    outside = torch.maximum(start + slope * excess, start.nextafter(start + 1))
    return torch.where(beyond, outside, -tail_probability(tail, scores).log())


def referral_threshold(scores: Tensor, rate: float) -> float:
    """The smallest threshold that refers at most a share `rate`, when score > threshold is referred.

    It is the score that ranks `floor(rate * inputs) + 1` from above. Inputs whose score
    equals it are all retained, so with ties fewer than `rate` may be referred. `rate = 1` gives minus infinity.

    Args:
        scores: (inputs,), for instance of validation inputs.
        rate: in [0, 1].

    Example:
        ```python
        from posthoc_uq.evaluation import metrics

        familiar = predictor.predict(val_loader).entropy()
        threshold = metrics.referral_threshold(familiar, 0.05)
        print(prediction.entropy() > threshold)
        ```
    """
    scores = row("scores", scores)
    if not 0 <= rate <= 1:
        raise PosthocUQError(f"referral_threshold needs a rate between 0 and 1, not {rate}.")
    referred = _referred_count(rate, len(scores))
    return -math.inf if referred == len(scores) else scores.sort(descending=True).values[referred].item()


def binomial_p_value(errors: int, trials: int, share: float) -> float:
    """The probability of at most so many errors in independent trials that err with this share: small where the errors
    speak for a smaller share.

    Args:
        errors: that were made.
        trials: how many there were.
        share: in (0, 1).
    """
    counts = torch.arange(min(errors, trials) + 1, dtype=torch.float64, device="cpu")
    rest = trials - counts
    ways = math.lgamma(trials + 1) - (counts + 1).lgamma() - (rest + 1).lgamma()
    logs = ways + counts * math.log(share) + rest * math.log1p(-share)
    return min(1.0, float(logs.logsumexp(0).exp()))


def _check_scores(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not scores:
        raise PosthocUQError("There must be at least one score.")
    count = next(iter(scores.values())).numel()
    return {name: row(name, values, count) for name, values in scores.items()}


def _refuse_infinite(name: str, scores: Tensor) -> Tensor:
    values = row(name, scores)
    wrong = int(values.isinf().sum())
    if wrong:
        raise NonFiniteError(f"{name} holds {wrong} infinite numbers among {len(values)}; leave them out.")
    return values
