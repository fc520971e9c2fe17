"""Every metric of regressions against loops in float64 written from its definition, or quadrature."""

import math
from statistics import NormalDist

import pytest
import torch
from scipy.integrate import quad

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import metrics


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
    absolute = sum(abs(m - y) for m, _, y in flat) / len(flat)
    assert metrics.mae(mean, targets) == pytest.approx(absolute, abs=1e-9)
    assert metrics.interval_sharpness(mean - variance, mean + variance) == pytest.approx(
        2 * sum(v for _, v, _ in flat) / len(flat), abs=1e-12
    )
    assert metrics.gaussian_log_density(mean, variance, targets) == pytest.approx(density, abs=1e-9)
    assert metrics.interval_coverage(mean - variance, mean + variance, targets) == pytest.approx(covered)


def test_crps_is_the_integral_over_squared_distribution_functions() -> None:
    cases = [(0.3, 2.0, 1.1), (-1.0, 0.04, -3.0), (5.0, 9.0, 5.0), (0.0, 1.0, 9.0)]
    integrals = []
    for mean, variance, target in cases:
        normal = NormalDist(mean, math.sqrt(variance))
        below = quad(lambda x, n=normal: n.cdf(x) ** 2, -60, target, points=[mean], limit=200)[0]
        above = quad(lambda x, n=normal: (1 - n.cdf(x)) ** 2, target, 60, points=[mean], limit=200)[0]
        integrals.append(below + above)
        single = metrics.crps_gaussian(
            *(torch.tensor([v], dtype=torch.float64) for v in cases[len(integrals) - 1])
        )
        assert single == pytest.approx(integrals[-1], abs=1e-7)
    columns = torch.tensor(cases, dtype=torch.float64).T.reshape(3, 2, 2)
    assert metrics.crps_gaussian(*columns) == pytest.approx(sum(integrals) / 4, abs=1e-7)


def test_crps_without_variance_is_the_absolute_error() -> None:
    mean, target = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.0, 0.0])
    assert metrics.crps_gaussian(mean, torch.zeros(3), target) == pytest.approx(3.5 / 3)
    # and nearly so with hardly any
    assert metrics.crps_gaussian(mean, torch.full((3,), 1e-30), target) == pytest.approx(3.5 / 3)


@pytest.mark.parametrize("shape", [(400,), (200, 2)])
def test_coverage_curves_count_targets_within_the_quantiles(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(7)
    mean, noise = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    variance = torch.rand(shape, dtype=torch.float64, generator=generator) + 0.2
    targets = mean + 0.3 + 1.4 * variance.sqrt() * noise
    flat = list(zip(*(t.flatten().tolist() for t in (mean, variance, targets)), strict=True))
    levels = [0.9, 0.05, 0.5]
    standard = NormalDist()
    inside = metrics.coverage_curve(mean, variance, targets, levels)
    below = metrics.coverage_curve(mean, variance, targets, torch.tensor(levels), kind="quantile")
    for k, level in enumerate(levels):
        half = standard.inv_cdf((1 + level) / 2)
        expected = sum(abs(y - m) <= half * math.sqrt(v) for m, v, y in flat) / 400
        assert inside.observed[k].item() == pytest.approx(expected, abs=1e-12)
        expected = sum(y <= m + standard.inv_cdf(level) * math.sqrt(v) for m, v, y in flat) / 400
        assert below.observed[k].item() == pytest.approx(expected, abs=1e-12)
    assert inside.nominal.tolist() == levels
    gaps = [abs(o - n) for o, n in zip(inside.observed.tolist(), levels, strict=True)]
    assert inside.error == pytest.approx(sum(gaps) / 3)
    assert inside.error > 0.03


def test_coverage_of_a_certain_prediction_and_of_the_usual_levels() -> None:
    curve = metrics.coverage_curve(torch.zeros(4), torch.zeros(4), torch.tensor([0.0, 0.0, 1.0, -1.0]))
    assert curve.nominal.tolist() == pytest.approx([0.05 * k for k in range(1, 20)])
    assert curve.observed.tolist() == [0.5] * 19
    below = metrics.coverage_curve(
        torch.zeros(4), torch.zeros(4), torch.tensor([0.0, 0.0, 1.0, -1.0]), [0.2, 0.5], kind="quantile"
    )
    assert below.observed.tolist() == [0.25, 0.75]


def test_interval_bounds_count_as_covered() -> None:
    bounds = torch.tensor([1.0, 2.0, 3.0])
    assert metrics.interval_coverage(bounds, bounds, torch.tensor([1.0, 2.0, 4.0])) == pytest.approx(2 / 3)


def test_wrong_input_is_one_clear_error() -> None:
    column = torch.zeros(3, 1)
    with pytest.raises(PosthocUQError, match=r"mean \(3, 1\), targets \(3,\)"):
        metrics.rmse(column, column[:, 0])
    with pytest.raises(PosthocUQError, match="at least one target"):
        metrics.rmse(column[:0], column[:0])
    with pytest.raises(PosthocUQError, match="positive variance"):
        metrics.gaussian_log_density(column, column, column)
    with pytest.raises(PosthocUQError, match="same"):
        metrics.interval_coverage(column, column, column.T)
    with pytest.raises(NonFiniteError, match="targets holds 3 NaN"):
        metrics.interval_coverage(column, column, column * math.nan)
    with pytest.raises(PosthocUQError, match="lower end is above"):
        metrics.interval_sharpness(column, column - 1)
    for score in (metrics.crps_gaussian, metrics.coverage_curve):
        with pytest.raises(PosthocUQError, match="nowhere negative"):
            score(column, column - 1, column)
    for levels in ([], [0.5, 1.0], [0.0], [95]):
        with pytest.raises(PosthocUQError, match="strictly between 0 and 1"):
            metrics.coverage_curve(column, column, column, levels)
    with pytest.raises(PosthocUQError, match="'interval' or 'quantile', not 'central'"):
        metrics.coverage_curve(column, column, column, kind="central")  # pyright: ignore[reportArgumentType]
