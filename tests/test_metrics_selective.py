"""Selective prediction against loops over the inputs, all orders of ties, and scikit-learn."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import metrics


def _classified(inputs: int, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores without ties, probs, labels."""
    generator = torch.Generator().manual_seed(10 * inputs + classes)
    probs = (2 * torch.randn(inputs, classes, dtype=torch.float64, generator=generator)).softmax(dim=-1)
    labels = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    entropy = -(probs * probs.log()).sum(dim=-1)
    return entropy + 0.2 * torch.randn(inputs, dtype=torch.float64, generator=generator), probs, labels


def _curve(scores: list[float], losses: list[float]) -> list[float]:
    """Risks by retaining the inputs one after the other, in the order they come among equals."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    return [sum(losses[i] for i in order[:k]) / k for k in range(1, len(scores) + 1)]


def test_risk_coverage_without_ties() -> None:
    scores, probs, labels = _classified(60, 4)
    losses = -probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
    curve = metrics.risk_coverage(scores, losses)
    expected = _curve(scores.tolist(), losses.tolist())
    np.testing.assert_allclose(curve.risk, expected, atol=1e-12)
    np.testing.assert_allclose(curve.coverage, np.arange(1, 61) / 60)
    assert curve.thresholds.tolist() == sorted(scores.tolist())
    assert curve.area == pytest.approx(sum(expected) / 60)
    assert curve.area < losses.mean()


def test_risk_coverage_with_ties_is_the_mean_over_all_orders() -> None:
    scores, losses = [1.0, 1.0, 0.0, 2.0, 1.0, 2.0], [1.0, 0.0, 0.5, 0.0, 2.0, 1.0]
    curves = []
    for order in itertools.permutations(range(6)):
        curves.append(_curve([scores[i] for i in order], [losses[i] for i in order]))
    curve = metrics.risk_coverage(torch.tensor(scores), torch.tensor(losses))
    np.testing.assert_allclose(curve.risk, np.mean(curves, axis=0), atol=1e-12)
    assert curve.area == pytest.approx(np.mean(curves))
    # some orders are luckier: the mean is no accident of one of them
    assert min(map(np.mean, curves)) < curve.area - 0.05
    back = metrics.risk_coverage(torch.tensor(scores[::-1]), torch.tensor(losses[::-1]))
    np.testing.assert_allclose(back.risk, curve.risk, atol=1e-12)


def test_risk_coverage_edges() -> None:
    assert metrics.risk_coverage(torch.zeros(5), torch.arange(5.0)).risk.tolist() == [2.0] * 5
    infinite = metrics.risk_coverage(torch.tensor([math.inf, 0.0, -math.inf]), torch.tensor([3.0, 0.0, 0.0]))
    assert infinite.risk.tolist() == [0, 0, 1]
    assert metrics.risk_coverage(torch.zeros(1), torch.ones(1)).area == 1
    lost = metrics.risk_coverage(torch.tensor([0.0, 1.0]), torch.tensor([0.5, math.inf]))
    assert lost.risk.tolist() == [0.5, math.inf]


def test_area_by_hand() -> None:
    # wrong, right, right, wrong in order: risks 1, 1/2, 1/3, 1/2
    scores, losses = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert metrics.risk_coverage(scores, losses).area == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    probs, labels = torch.tensor([[0.9, 0.1]] * 4), torch.tensor([1, 0, 0, 1])
    assert metrics.selective_accuracy_area(scores, probs, labels) == pytest.approx(1 - 7 / 12)


def test_selective_accuracy_on_what_remains() -> None:
    scores, probs, labels = _classified(40, 3)
    rates = [0.0, 0.1, 0.33, 0.5, 0.975, 0.99]
    hits = (probs.argmax(-1) == labels).tolist()
    order = sorted(range(40), key=scores.tolist().__getitem__)
    expected = [np.mean([hits[i] for i in order[:kept]]) for kept in (40, 36, 27, 20, 1, 1)]
    np.testing.assert_allclose(metrics.selective_accuracy(scores, probs, labels, rates), expected, atol=1e-12)
    every = metrics.selective_accuracy(scores, probs, labels, [k / 40 for k in range(40)])
    assert every.shape == (40,)
    assert metrics.selective_accuracy_area(scores, probs, labels) == pytest.approx(every.mean().item())
    assert every[0] == pytest.approx(metrics.accuracy(probs, labels))


def test_rates_that_went_through_float32_mean_what_they_say() -> None:
    probs = torch.tensor([[0.9, 0.1]]).repeat(1000, 1)
    scores, labels = torch.arange(1000.0), (torch.arange(1000) >= 300).long()
    # 0.7 in float32 is 0.69999999: still 700 of the 1000 go, and the 300 that are right remain
    assert metrics.selective_accuracy(scores, probs, labels, torch.tensor([0.7])).tolist() == [1.0]
    assert metrics.selective_accuracy(scores, probs, labels, [0.29 + 0.41]).tolist() == [1.0]


def test_selective_auc_of_two_classes() -> None:
    scores, probs, labels = _classified(200, 2)
    order = scores.argsort()
    rates = [0.0, 0.25, 0.5, 0.9]
    expected = [roc_auc_score(labels[order[:kept]], probs[order[:kept], 1]) for kept in (200, 150, 100, 20)]
    np.testing.assert_allclose(metrics.selective_auc(scores, probs, labels, rates), expected, atol=1e-12)
    assert 0.6 < min(expected) < max(expected)


def test_selective_auc_retains_ties_at_the_border_in_part() -> None:
    scores, probs, labels = _classified(120, 2)
    scores, probs = scores.round(decimals=0), probs.round(decimals=1)  # the probabilities tie as well
    value = metrics.selective_auc(scores, probs, labels, [0.5]).item()
    border = scores.sort().values[59]
    weight = torch.where(scores < border, 1.0, 0.0)
    weight[scores == border] = ((60 - weight.sum()) / (scores == border).sum()).item()
    assert 0 < weight[scores == border][0] < 1
    assert value == pytest.approx(roc_auc_score(labels, probs[:, 1], sample_weight=weight), abs=1e-6)
    assert metrics.selective_auc(scores.flip(0), probs.flip(0), labels.flip(0), [0.5]).item() == value


def test_selective_auc_of_many_classes_is_the_mean_over_the_classes_left() -> None:
    scores, probs, labels = _classified(200, 4)
    scores[labels == 3] += 100  # referred first
    kept = scores.argsort()[:100]
    assert set(labels[kept].tolist()) == {0, 1, 2}
    whole, half = metrics.selective_auc(scores, probs, labels, [0.0, 0.5]).tolist()
    assert whole == pytest.approx(roc_auc_score(labels, probs, multi_class="ovr"), abs=1e-12)
    left = [roc_auc_score(labels[kept] == c, probs[kept, c]) for c in range(3)]
    assert half == pytest.approx(np.mean(left), abs=1e-12)


def test_selective_auc_of_one_class_is_not_a_number() -> None:
    probs = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    values = metrics.selective_auc(torch.arange(3.0), probs, torch.tensor([1, 1, 0]), [0.0, 0.4])
    assert values[0] == 0.5
    assert math.isnan(values[1])


@pytest.mark.parametrize("ties", [False, True])
def test_referral_threshold_is_the_smallest_that_keeps_the_rate(ties: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    scores = torch.randn(50, generator=generator)
    if ties:
        scores = (2 * scores).round()
    for rate in (0.0, 0.05, 0.1, 0.29, 0.5, 0.98):
        threshold = metrics.referral_threshold(scores, rate)
        # the share changes at scores only, so the smallest threshold is one of them
        fitting = [t for t in scores.tolist() if sum(s > t for s in scores.tolist()) <= rate * 50 + 1e-9]
        assert threshold == min(fitting)
        if not ties:
            assert (scores > threshold).sum() == math.floor(rate * 50 + 1e-9)
    assert metrics.referral_threshold(scores, 1.0) == -math.inf
    assert metrics.referral_threshold(torch.tensor([0.0, math.inf]), 0.2) == math.inf


def test_wrong_input_is_one_clear_error() -> None:
    scores, probs, labels = torch.zeros(3), torch.full((3, 2), 0.5), torch.zeros(3).long()
    nan = scores * math.nan
    cases = [
        (lambda: metrics.risk_coverage(torch.zeros(0), torch.zeros(0)), "scores must be"),
        (lambda: metrics.risk_coverage(probs, scores), r"scores must be \(inputs,\)"),
        (
            lambda: metrics.risk_coverage(scores, scores[:2]),
            "losses must hold one number for each of 3 inputs",
        ),
        (lambda: metrics.selective_accuracy(scores[:2], probs, labels, [0.1]), "scores must hold one number"),
        (lambda: metrics.selective_accuracy(scores, probs, labels, []), "rates must be numbers"),
        (lambda: metrics.selective_accuracy(scores, probs, labels, [1.0]), "at 1 nothing is retained"),
        (lambda: metrics.selective_auc(scores, probs, labels, [-0.1]), "rates must be numbers"),
        (lambda: metrics.selective_auc(scores[:2], probs, labels, [0.1]), "scores must hold one number"),
        (lambda: metrics.selective_auc(scores, 3 * probs, labels, [0.1]), "take softmax"),
        (lambda: metrics.selective_accuracy_area(scores, probs, labels[:2]), "labels must be 3 integers"),
        (lambda: metrics.referral_threshold(scores, 1.5), "between 0 and 1, not 1.5"),
        (lambda: metrics.referral_threshold(scores, math.nan), "between 0 and 1, not nan"),
    ]
    for call, message in cases:
        with pytest.raises(PosthocUQError, match=message):
            call()
    for call in (
        lambda: metrics.risk_coverage(nan, scores),
        lambda: metrics.selective_accuracy(nan, probs, labels, [0.1]),
        lambda: metrics.selective_auc(nan, probs, labels, [0.1]),
        lambda: metrics.referral_threshold(nan, 0.1),
    ):
        with pytest.raises(NonFiniteError, match="scores holds 3 NaN"):
            call()
    with pytest.raises(NonFiniteError, match="losses holds 3 NaN"):
        metrics.risk_coverage(scores, nan)
