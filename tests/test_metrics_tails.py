"""Tail probabilities of several scores: against counting, one input at a time."""

from __future__ import annotations

import math

import pytest
import torch

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.metrics import QUANTILES


def scores_of(inputs: int, ties: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Three scores of other scales and shapes, two of them correlated."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, inputs, generator=generator, dtype=torch.float64)
    normal[1] += normal[0]
    if ties:
        normal = (2 * normal).round() / 2
    return {"a": normal[0], "b": (3 * normal[1]).exp(), "c": 1e-3 * normal[2]}


def counted_share(familiar: torch.Tensor, value: float) -> float:
    return sum(v >= value for v in familiar.tolist()) / len(familiar)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("inputs", [1, 2, 17, 60])
def test_thresholds_are_the_rule_counted_by_hand(inputs: int, ties: bool) -> None:
    scores = scores_of(inputs, ties, seed=inputs)
    smallest = [
        min(counted_share(values, float(values[i])) for values in scores.values()) for i in range(inputs)
    ]
    for rate in (0.0, 0.01, 0.05, 0.3, 0.5, 0.99):
        allowed = math.floor(rate * inputs + 1e-9)
        border = sorted(smallest)[allowed]
        expected = [share < border for share in smallest]
        thresholds = metrics.referral_thresholds(scores, rate)
        found = [
            any(float(values[i]) > thresholds[name] for name, values in scores.items()) for i in range(inputs)
        ]
        assert found == expected and sum(found) <= allowed
        if not ties:
            assert sum(found) >= allowed - 2, "three scores share a rank at most"
        for name, values in scores.items():
            above = values > thresholds[name]
            shares = torch.tensor([counted_share(values, float(v)) for v in values])
            assert torch.equal(above, shares < border), "a threshold is the border on its own score"


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_holds_on_many_inputs_with_ties_of_all_sizes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = (0.0, 0.01, 1.0, 5.0)
    scores: dict[str, torch.Tensor] = {}
    for name, step in zip("abcd", steps, strict=True):
        values = torch.randn(5000, generator=generator)
        scores[name] = values if step == 0 else (values / step).round() * step
    for rate in (0.001, 0.01, 0.1):
        thresholds = metrics.referral_thresholds(scores, rate)
        flags = torch.stack([values > thresholds[name] for name, values in scores.items()])
        assert int(flags.any(0).sum()) <= rate * 5000
    free = {name: scores[name] for name in "a"} | {"e": torch.rand(5000, generator=generator)}
    thresholds = metrics.referral_thresholds(free, 0.01)
    flags = torch.stack([values > thresholds[name] for name, values in free.items()])
    assert 49 <= int(flags.any(0).sum()) <= 50, "at small rates as close as ranks allow"


@pytest.mark.parametrize("ties", [False, True])
def test_of_one_score_it_is_the_single_threshold(ties: bool) -> None:
    values = scores_of(50, ties)["b"]
    for rate in (0.0, 0.05, 0.29, 0.5, 0.98):
        assert metrics.referral_thresholds({"b": values}, rate) == {
            "b": metrics.referral_threshold(values, rate)
        }


@pytest.mark.parametrize("ties", [False, True])
def test_the_tail_of_all_inputs_counts_them(ties: bool) -> None:
    values = scores_of(60, ties)["b"]
    tail = metrics.tail_of(values)
    found = metrics.tail_probability(tail, values)
    expected = [counted_share(values, float(v)) for v in values]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    between = torch.rand(100, dtype=torch.float64) * (values.max() - values.min()) + values.min()
    for share, value in zip(metrics.tail_probability(tail, between).tolist(), between.tolist(), strict=True):
        above = sum(v > value for v in values.tolist())
        assert above / 60 - 1e-12 <= share <= (above + 1) / 60 + 1e-12, "on the line between two counts"


def test_linear_interpolation_and_the_ends() -> None:
    tail = metrics.tail_of(torch.tensor([4.0, 0.0, 1.0, 1.0]))
    assert tail.values.tolist() == [4.0, 1.0, 1.0, 0.0] and tail.shares.tolist() == [0.25, 0.5, 0.75, 1.0]
    scores = torch.tensor([math.inf, 4.1, 4.0, 2.5, 1.0, 0.5, 0.0, -9.0, -math.inf, math.nan])
    found = metrics.tail_probability(tail, scores).tolist()
    assert found[:-1] == pytest.approx([0, 0, 0.25, 0.375, 0.75, 0.875, 1, 1, 1]) and math.isnan(found[-1])


@pytest.mark.parametrize("inputs", [3, 200, 201, 250, 1000, 100_000])
def test_kept_quantiles_are_exact_at_the_top_and_close_below(inputs: int) -> None:
    values = torch.randn(inputs, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tail = metrics.tail_of(values, QUANTILES)
    points = min(inputs, QUANTILES)
    assert len(tail.values) == len(tail.shares) == points
    assert bool((tail.shares.diff() > 0).all()) and tail.shares[-1] == 1
    assert torch.equal(
        tail.values, values.sort(descending=True).values[(tail.shares * inputs).round().long() - 1]
    )
    exact = metrics.tail_probability(metrics.tail_of(values), values)
    found = metrics.tail_probability(tail, values)
    top = exact <= 100 / inputs
    assert torch.allclose(found[top], exact[top], atol=1e-12, rtol=0)
    # a step from rank 100 skips at most 7, whose places on the line vary by about sqrt(7) / 2
    assert torch.allclose(found, exact, rtol=0.04, atol=0), "relatively, however small the share"


@pytest.mark.parametrize("ties", [False, True])
def test_the_joint_score_by_hand(ties: bool) -> None:
    familiar = scores_of(40, ties, seed=3)
    joint = metrics.joint_tail(familiar, familiar)
    for i in range(40):
        smallest = min(counted_share(values, float(values[i])) for values in familiar.values())
        assert float(joint[i]) == pytest.approx(-math.log(smallest), abs=1e-12)


def test_beyond_the_familiar_the_joint_score_goes_on_as_a_line() -> None:
    values = torch.arange(100, dtype=torch.float64)  # the largest is 99; ten are 90 or more
    slope = math.log(10) / 9
    scores = torch.tensor([99.0, 99.0 + 1e-13, 100.0, 150.0, 1e30, math.inf], dtype=torch.float64)
    found = metrics.joint_tail({"a": values}, {"a": scores}).tolist()
    expected = [math.log(100) + slope * (float(score) - 99) for score in scores]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found == sorted(found) and len(set(found)) == 6, "every step upwards counts"
    other = metrics.joint_tail({"a": 5 * values - 3}, {"a": 5 * scores - 3})
    assert other.tolist() == pytest.approx(found, rel=1e-9), "the units do not matter"


def test_beyond_familiar_scores_that_are_all_the_same() -> None:
    same = torch.ones(7)
    found = metrics.joint_tail({"a": same}, {"a": torch.tensor([0.5, 1.0, 1.5])})
    assert found.tolist() == [0.0, 0.0, math.inf]
    one_high = torch.tensor([0.0, 0.0, 0.0, 2.0])
    found = metrics.joint_tail({"a": one_high}, {"a": torch.tensor([3.0, 5.0])})
    assert found[0] < found[1] < math.inf


def test_two_scores_find_what_either_misses() -> None:
    generator = torch.Generator().manual_seed(5)
    familiar = torch.randn(2, 2000, generator=generator)
    foreign = torch.randn(2, 400, generator=generator)
    foreign[0, :200] += 5
    foreign[1, 200:] += 5
    inside = {"a": familiar[0], "b": familiar[1]}
    outside = {"a": foreign[0], "b": foreign[1]}
    joint = metrics.ood_auroc(metrics.joint_tail(inside, inside), metrics.joint_tail(inside, outside))
    alone = [metrics.ood_auroc(inside[name], outside[name]) for name in inside]
    assert joint > 0.99 and max(alone) < 0.8


def test_a_joint_score_of_one_ranks_as_it_does() -> None:
    familiar = scores_of(300, False)["b"]
    foreign = familiar[:100] * 1.7
    joint = [metrics.joint_tail({"b": familiar}, {"b": scores}) for scores in (familiar, foreign)]
    assert metrics.ood_auroc(*joint) == pytest.approx(metrics.ood_auroc(familiar, foreign), abs=1e-3)


def test_wrong_input_is_one_clear_error() -> None:
    good, short = torch.arange(4.0), torch.arange(3.0)
    wrong = torch.tensor([0.0, math.nan, 1.0, 2.0])
    endless = torch.tensor([0.0, math.inf, 1.0, 2.0])
    for call, message in (
        (lambda: metrics.referral_thresholds({}, 0.1), "at least one score"),
        (
            lambda: metrics.referral_thresholds({"a": good, "b": short}, 0.1),
            "b must hold one number for each of 4",
        ),
        (lambda: metrics.referral_thresholds({"a": good}, 1.0), "below 1, not 1.0"),
        (lambda: metrics.referral_thresholds({"a": good}, math.nan), "below 1, not nan"),
        (lambda: metrics.joint_tail({"a": good}, {"b": good}), "same scores on both sides"),
        (lambda: metrics.tail_of(torch.zeros(0)), "at least one input"),
    ):
        with pytest.raises(PosthocUQError, match=message):
            call()
    for call, message in (
        (lambda: metrics.referral_thresholds({"a": wrong}, 0.1), "a holds 1 NaN"),
        (lambda: metrics.referral_thresholds({"a": endless}, 0.1), "a holds 1 infinite"),
        (lambda: metrics.joint_tail({"a": endless}, {"a": good}), "1 infinite"),
        (lambda: metrics.joint_tail({"a": good}, {"a": wrong}), "a holds 1 NaN"),
    ):
        with pytest.raises(NonFiniteError, match=message):
            call()
