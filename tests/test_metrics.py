"""Metrics of classes and of foreign inputs against loops in float64 written from the definitions, or scikit-learn."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_curve, top_k_accuracy_score

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import metrics


@pytest.fixture
def classified() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    probs = (2 * torch.randn(200, 5, dtype=torch.float64, generator=generator)).softmax(dim=-1)
    return probs, torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def test_classification_scores_match_the_definitions(classified: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows, labels = classified[0].tolist(), classified[1].tolist()
    hits = [row.index(max(row)) == label for row, label in zip(rows, labels, strict=True)]
    nll = [-math.log(row[label]) for row, label in zip(rows, labels, strict=True)]
    brier = [
        sum((p - (c == label)) ** 2 for c, p in enumerate(row))
        for row, label in zip(rows, labels, strict=True)
    ]
    assert metrics.accuracy(*classified) == pytest.approx(sum(hits) / 200, abs=1e-6)
    assert metrics.negative_log_likelihood(*classified) == pytest.approx(sum(nll) / 200, abs=1e-12)
    assert metrics.brier_score(*classified) == pytest.approx(sum(brier) / 200, abs=1e-12)


def _ece(rows: list[list[float]], labels: list[int], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        inside = [
            (max(row), row.index(max(row)) == label)
            for row, label in zip(rows, labels, strict=True)
            if b / bins <= max(row) < (b + 1) / bins or (b == bins - 1 and max(row) >= 1)
        ]
        if inside:
            total += abs(sum(c for c, _ in inside) - sum(hit for _, hit in inside)) / len(rows)
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_and_its_bins(classified: tuple[torch.Tensor, torch.Tensor], bins: int) -> None:
    probs, labels = classified
    expected = _ece(probs.tolist(), labels.tolist(), bins)
    assert metrics.expected_calibration_error(probs, labels, bins) == pytest.approx(expected, abs=1e-6)
    parts = metrics.calibration_bins(probs, labels, bins)
    gaps = (parts.accuracy - parts.confidence).abs().nan_to_num() * parts.counts / 200
    assert gaps.sum().item() == pytest.approx(expected, abs=1e-12)
    assert parts.counts.sum() == 200


def test_confidence_of_one_belongs_to_the_last_bin() -> None:
    # one input at 1 and wrong, one at 0.97 and right: |(1 + 0.97) / 2 - 1 / 2| together, 0.515 if parted
    probs = torch.tensor([[1.0, 0.0], [0.97, 0.03]])
    assert metrics.expected_calibration_error(probs, torch.tensor([1, 0])) == pytest.approx(0.485, abs=1e-6)
    assert metrics.calibration_bins(probs, torch.tensor([1, 0])).counts[-1] == 2


def test_confidence_on_an_edge_belongs_to_the_bin_above() -> None:
    # the wrong 0.5 shares a bin with the right 0.75; in the bin below it would add 0.25 + 0.125
    probs, labels = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]]), torch.tensor([1, 0])
    assert metrics.calibration_bins(probs, labels, 2).counts.tolist() == [0, 2]
    assert metrics.expected_calibration_error(probs, labels, 2) == pytest.approx(0.125, abs=1e-6)


def test_probabilities_a_rounding_above_one_are_still_probabilities() -> None:
    probs = torch.tensor([[1.0 + 2e-7, 0.0], [1.0, 0.0]])
    assert metrics.expected_calibration_error(probs, torch.tensor([0, 0])) == pytest.approx(0, abs=1e-6)


def _equal_mass(values: list[float], hits: list[float], bins: int) -> float:
    """Bins filled one after the other; an input that ties with the one before it joins that one's bin."""
    order = sorted(range(len(values)), key=values.__getitem__)
    filled: dict[int, list[int]] = {}
    current = 0
    for place, i in enumerate(order):
        if place == 0 or values[i] > values[order[place - 1]]:
            current = math.floor(bins * place / len(values))
        filled.setdefault(current, []).append(i)
    return sum(abs(sum(hits[i] - values[i] for i in inside)) for inside in filled.values()) / len(values)


@pytest.mark.parametrize("bins", [1, 7, 15, 300])
@pytest.mark.parametrize("digits", [1, 12])
def test_bins_of_equal_mass(classified: tuple[torch.Tensor, torch.Tensor], bins: int, digits: int) -> None:
    probs, labels = classified[0].round(decimals=digits), classified[1]
    confidence, hits = probs.max(-1).values.tolist(), (probs.argmax(-1) == labels).double().tolist()
    expected = _equal_mass(confidence, hits, bins)
    measured = metrics.expected_calibration_error(probs, labels, bins, "equal_mass")
    assert measured == pytest.approx(expected, abs=1e-12)
    counts = metrics.calibration_bins(probs, labels, bins, binning="equal_mass").counts
    assert counts.shape == (bins,)
    assert counts.sum() == 200
    if digits == 12:
        assert counts.max() - counts.min() <= 1
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    again = metrics.expected_calibration_error(probs[shuffled], labels[shuffled], bins, "equal_mass")
    assert again == pytest.approx(measured, abs=1e-12)


@pytest.mark.parametrize("binning", ["equal_width", "equal_mass"])
def test_classwise_calibration_error(classified: tuple[torch.Tensor, torch.Tensor], binning) -> None:
    probs, labels = classified
    expected = 0.0
    for c in range(5):
        values, hits = probs[:, c].tolist(), (labels == c).double().tolist()
        if binning == "equal_mass":
            expected += _equal_mass(values, hits, 10) / 5
        else:
            for b in range(10):
                inside = [(v, h) for v, h in zip(values, hits, strict=True) if b / 10 <= v < (b + 1) / 10]
                expected += abs(sum(h - v for v, h in inside)) / 200 / 5
    measured = metrics.classwise_calibration_error(probs, labels, 10, binning=binning)
    assert expected > 0.01
    assert measured == pytest.approx(expected, abs=1e-12)


def test_classwise_error_sees_what_the_largest_probability_hides() -> None:
    # always right with 0.6, but the rest is put on a class that never comes
    probs, labels = torch.tensor([[0.6, 0.4, 0.0]] * 3 + [[0.6, 0.0, 0.4]] * 2), torch.tensor([0, 0, 0, 2, 2])
    assert metrics.expected_calibration_error(probs, labels) == pytest.approx(0, abs=1e-6)
    # class 0: 0; class 1: 0.4 on three of five; class 2: in two of five 1 instead of 0.4
    assert metrics.classwise_calibration_error(probs, labels) == pytest.approx((0.24 + 0.24) / 3, abs=1e-7)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_accuracy(classified: tuple[torch.Tensor, torch.Tensor], k: int) -> None:
    probs, labels = classified
    expected = top_k_accuracy_score(labels.numpy(), probs.numpy(), k=k, labels=range(5))
    assert metrics.top_k_accuracy(probs, labels, k) == pytest.approx(expected, abs=1e-12)
    if k == 1:
        assert metrics.top_k_accuracy(probs, labels, 1) == pytest.approx(metrics.accuracy(probs, labels))


def test_top_k_of_equal_probabilities_takes_the_first_classes() -> None:
    probs = torch.tensor([[0.7, 0.3, 0.0, 0.0]]).repeat(4, 1)
    assert [metrics.top_k_accuracy(probs, torch.arange(4), k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1]
    assert metrics.top_k_accuracy(probs, torch.tensor([2, 2, 3, 3]), 3) == 0.5
    with pytest.raises(PosthocUQError, match="k between 1 and the 4 classes, not 5"):
        metrics.top_k_accuracy(probs, torch.arange(4))


def test_edge_probabilities() -> None:
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    assert metrics.negative_log_likelihood(sure, right) == 0
    assert metrics.negative_log_likelihood(sure, wrong) == math.inf
    assert (metrics.brier_score(sure, right), metrics.brier_score(sure, wrong)) == (0, 2)
    assert metrics.brier_score(sure[:1].half(), right[:1]) == 0


def _auroc(scores_in: list[float], scores_out: list[float]) -> float:
    wins = sum((o > i) + 0.5 * (o == i) for i in scores_in for o in scores_out)
    return wins / (len(scores_in) * len(scores_out))


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e6])
def test_ood_auroc_counts_pairs_at_any_scale_with_ties(scale: float) -> None:
    generator = torch.Generator().manual_seed(2)
    inside = torch.randint(0, 20, (40,), generator=generator) * scale
    outside = torch.randint(8, 30, (30,), generator=generator) * scale
    expected = _auroc(inside.tolist(), outside.tolist())
    assert 0.6 < expected < 0.95
    assert metrics.ood_auroc(inside, outside) == pytest.approx(expected, abs=1e-6)


def test_ood_auroc_edges() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0, math.inf])
    assert metrics.ood_auroc(one, two) == 1
    assert metrics.ood_auroc(two, one) == 0
    assert metrics.ood_auroc(one, one) == 0.5
    with pytest.raises(NonFiniteError):
        metrics.ood_auroc(one, torch.tensor([math.nan]))
    with pytest.raises(PosthocUQError, match="at least one score"):
        metrics.ood_auroc(one, torch.tensor([]))


@pytest.mark.parametrize("scale", [0.1, 1e6])
@pytest.mark.parametrize("size", [30, 300])
def test_aupr_and_fpr_match_scikit_learn(scale: float, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    inside = torch.randint(0, 20, (400,), generator=generator) * scale
    outside = torch.randint(8, 30, (size,), generator=generator) * scale
    outside[0] = math.inf
    scores = torch.cat([inside, outside]).clamp(max=1e9).numpy()
    foreign = np.arange(len(scores)) >= 400
    expected = average_precision_score(foreign, scores)
    assert metrics.ood_aupr(inside, outside) == pytest.approx(expected, abs=1e-6)
    false, true, _ = roc_curve(foreign, scores, drop_intermediate=False)
    for tpr in (0.5, 0.8, 0.9, 0.95, 1.0):
        assert metrics.ood_fpr(inside, outside, tpr) == pytest.approx(false[true >= tpr - 1e-12].min())
    assert 0.1 < metrics.ood_fpr(inside, outside) < 0.9


def test_ood_fpr_by_hand() -> None:
    familiar, foreign = torch.arange(10.0), torch.arange(20.0) + 5
    # of 20, 19 must be caught: the threshold is 6, which also flags 6, 7, 8 and 9
    assert metrics.ood_fpr(familiar, foreign) == pytest.approx(0.4)
    assert metrics.ood_fpr(familiar, foreign, 1) == pytest.approx(0.5)
    # 0.07 of 100 is 7.000000000000001 in floating point: seven have to be caught, not eight
    assert metrics.ood_fpr(torch.tensor([93.0, 92.0]), torch.arange(100.0), 0.07) == 0.5
    # scores that all tie are flagged together
    assert metrics.ood_fpr(torch.ones(3), torch.ones(5)) == 1
    assert metrics.ood_fpr(torch.tensor([-math.inf, math.inf]), torch.ones(5)) == 0.5


@pytest.mark.parametrize("name", ["ood_aupr", "ood_fpr"])
def test_ood_scores_refuse_what_has_no_order(name: str) -> None:
    one = torch.tensor([1.0])
    with pytest.raises(NonFiniteError, match=f"{name} got scores that are NaN"):
        getattr(metrics, name)(torch.tensor([math.nan]), one)
    with pytest.raises(PosthocUQError, match=f"{name} needs at least one score"):
        getattr(metrics, name)(one[:0], one)
    for tpr in (0, 1.5, math.nan):
        with pytest.raises(PosthocUQError, match="tpr above 0"):
            metrics.ood_fpr(one, one, tpr)


def test_wrong_input_is_one_clear_error() -> None:
    probs, labels = torch.full((3, 2), 0.5), torch.zeros(3).long()
    scores = (
        metrics.accuracy,
        metrics.negative_log_likelihood,
        metrics.brier_score,
        metrics.expected_calibration_error,
        metrics.calibration_bins,
        metrics.classwise_calibration_error,
        lambda probs, labels: metrics.top_k_accuracy(probs, labels, 1),
    )
    for score in scores:
        with pytest.raises(NonFiniteError, match="probs holds 2 NaN among 6 numbers"):
            score(torch.tensor([[0.5, 0.5], [math.nan, math.nan], [1, 0]]), labels)
        for bad_probs, bad_labels, message in (
            (probs[0], labels, "probs must be"),
            (probs[:0], labels[:0], "at least one input"),
            (probs, labels[:2], "labels must be 3 integers"),
            (probs, labels.float(), "labels must be 3 integers"),
            (probs, labels + 2, "between 0 and 1, but range from 2 to 2"),
            (probs, labels - 1, "between 0 and 1"),
            (4 * probs, labels, r"from 2 to 2; of logits, take softmax"),
        ):
            with pytest.raises(PosthocUQError, match=message):
                score(bad_probs, bad_labels)
    with pytest.raises(PosthocUQError, match="at least one bin"):
        metrics.expected_calibration_error(probs, labels, 0)
    for score in scores[3:6]:
        with pytest.raises(
            PosthocUQError, match=r"binning must be one of .*'equal_width', 'equal_mass'.*, not 'mass'"
        ):
            score(probs, labels, binning="mass")


def test_global_random_state_is_untouched(classified: tuple[torch.Tensor, torch.Tensor]) -> None:
    before = torch.get_rng_state()
    for score in (metrics.accuracy, metrics.brier_score, metrics.expected_calibration_error):
        score(*classified)
    metrics.ood_auroc(classified[0][:, 0], classified[0][:, 1])
    metrics.rmse(classified[0], classified[0])
    assert torch.equal(before, torch.get_rng_state())


def test_torchmetrics_is_loaded_when_a_metric_needs_it_and_every_name_is_public() -> None:
    code = (
        "import sys, posthoc_uq.likelihoods.metrics\n"
        "from posthoc_uq.evaluation import plots; plots.coverage_plot;"
        "sys.exit('torchmetrics' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert metrics.__all__ == sorted(metrics.__all__)
    assert all(hasattr(metrics, name) for name in metrics.__all__)
