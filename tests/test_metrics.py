"""Every metric against loops in float64 written from its definition."""

import math
from statistics import NormalDist

import pytest
import torch

from posthoc_uq import metrics
from posthoc_uq.errors import NonFiniteError, PosthocUQError


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


@pytest.mark.parametrize("shape", [(30,), (30, 3)])
def test_regression_scores_match_the_definitions(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    mean, targets = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    variance = torch.rand(shape, dtype=torch.float64, generator=generator) + 0.2
    flat = list(
        zip(mean.flatten().tolist(), variance.flatten().tolist(), targets.flatten().tolist(), strict=True)
    )
    squared = sum((m - y) ** 2 for m, _, y in flat) / len(flat)
    density = sum(math.log(NormalDist(m, math.sqrt(v)).pdf(y)) for m, v, y in flat) / 30
    covered = sum(m - v <= y <= m + v for m, v, y in flat) / len(flat)
    assert metrics.rmse(mean, targets) == pytest.approx(math.sqrt(squared), abs=1e-9)
    assert metrics.gaussian_log_density(mean, variance, targets) == pytest.approx(density, abs=1e-9)
    assert metrics.interval_coverage(mean - variance, mean + variance, targets) == pytest.approx(covered)


def test_interval_bounds_count_as_covered() -> None:
    bounds = torch.tensor([1.0, 2.0, 3.0])
    assert metrics.interval_coverage(bounds, bounds, torch.tensor([1.0, 2.0, 4.0])) == pytest.approx(2 / 3)


def test_wrong_input_is_one_clear_error() -> None:
    probs, labels, column = torch.full((3, 2), 0.5), torch.zeros(3).long(), torch.zeros(3, 1)
    scores = (
        metrics.accuracy,
        metrics.negative_log_likelihood,
        metrics.brier_score,
        metrics.expected_calibration_error,
        metrics.calibration_bins,
    )
    for score in scores:
        for bad_probs, bad_labels, message in (
            (probs[0], labels, "probs must be"),
            (probs[:0], labels[:0], "at least one input"),
            (probs, labels[:2], "labels must be 3 integers"),
            (probs, labels.float(), "labels must be 3 integers"),
            (probs, labels + 2, "between 0 and 1, but range from 2 to 2"),
            (probs, labels - 1, "between 0 and 1"),
        ):
            with pytest.raises(PosthocUQError, match=message):
                score(bad_probs, bad_labels)
    with pytest.raises(PosthocUQError, match="at least one bin"):
        metrics.expected_calibration_error(probs, labels, 0)
    with pytest.raises(PosthocUQError, match=r"mean \(3, 1\), targets \(3,\)"):
        metrics.rmse(column, column[:, 0])
    with pytest.raises(PosthocUQError, match="at least one target"):
        metrics.rmse(column[:0], column[:0])
    with pytest.raises(PosthocUQError, match="positive variance"):
        metrics.gaussian_log_density(column, column, column)
    with pytest.raises(PosthocUQError, match="same"):
        metrics.interval_coverage(column, column, column.T)


def test_global_random_state_is_untouched(classified: tuple[torch.Tensor, torch.Tensor]) -> None:
    before = torch.get_rng_state()
    for score in (metrics.accuracy, metrics.brier_score, metrics.expected_calibration_error):
        score(*classified)
    metrics.ood_auroc(classified[0][:, 0], classified[0][:, 1])
    metrics.rmse(classified[0], classified[0])
    assert torch.equal(before, torch.get_rng_state())
