"""The recipes unscented_regression and localization: their smoke modes as scripts, and their parts against numbers that
are known and independent computations.
"""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from recipe_helpers import recipe_modules, smoke

from posthoc_uq.moments.unscented import rectified


@pytest.fixture(scope="module")
def regression() -> Namespace:
    return recipe_modules("unscented_regression", ["problem", "drawn_weights"])


@pytest.fixture(scope="module")
def localization() -> Namespace:
    return recipe_modules("localization", ["problem", "run"])


def test_draws_at_an_activation_are_its_moments(regression: Namespace) -> None:
    from posthoc_uq.moments import MomentTensor, Pass, Rules

    mean = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 0.1], dtype=torch.float64)
    torch.manual_seed(0)
    with Pass(Rules(), {}):
        drawn = regression.problem.Drawn(200_000)(MomentTensor(mean, variance))
    exact = rectified(mean, variance, 0.01)
    torch.testing.assert_close((drawn.moment_mean, drawn.moment_variance), exact, rtol=0.02, atol=0.005)


@pytest.mark.parametrize("gradients", [True, False])
def test_draws_carry_gradients_where_they_should(regression: Namespace, gradients: bool) -> None:
    from posthoc_uq.moments import MomentTensor, Pass, Rules

    mean = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    with Pass(Rules(), {}):
        drawn = regression.problem.Drawn(50, gradients)(MomentTensor(mean, torch.ones(3)))
    assert drawn.moment_mean.requires_grad == gradients == drawn.moment_variance.requires_grad


def test_drawn_weights_have_the_divergence_of_torch(regression: Namespace) -> None:
    model = regression.drawn_weights.DrawnWeights(0, 5)
    pairs = zip(model.means, model.log_variances, strict=True)
    normal = torch.distributions.Normal
    expected = sum(
        torch.distributions.kl_divergence(normal(m, (0.5 * v).exp()), normal(0.0, 1.0)).sum()
        for m, v in pairs
    )
    torch.testing.assert_close(model.divergence(), expected)
    with torch.no_grad():
        for log in model.log_variances:
            log.fill_(-80.0)
        x = torch.linspace(-1, 1, 9).unsqueeze(1)
        torch.testing.assert_close(model.moments(x)[0], regression.problem.network(0)(x))


def test_the_least_nll(regression: Namespace) -> None:
    """Of draws from the truth itself."""
    x, y = regression.problem.sample(400_000, torch.Generator().manual_seed(0))
    score = -torch.distributions.Normal(x, regression.problem.deviation(x)).log_prob(y).mean()
    assert regression.problem.least_nll() == pytest.approx(float(score), abs=0.005)


@pytest.mark.study
def test_the_regression(tmp_path: Path) -> None:
    smoke("unscented_regression.compare", "--output", tmp_path)
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["NLL"].keys() >= {"SMP", "UTVI"} and len(content["NLL"]) == 6
    assert all(value > 0 for value in content["seconds a batch"].values())
    assert (tmp_path / "figure1.png").exists() and (tmp_path / "figure2.png").exists()


@pytest.mark.skipif(importlib.util.find_spec("fastbnns") is None, reason="fastbnns is not installed")
def test_beside_fastbnns(tmp_path: Path) -> None:
    smoke("unscented_regression.beside_fastbnns", "--output", tmp_path)


# Localisation

PLACES = torch.tensor([[0, 0], [2, 0], [3.5, 0], [4, 0], [3.5, 3.5], [4, 4]], dtype=torch.float64)


def test_photons_and_bounds_are_the_known_numbers(localization: Namespace) -> None:
    problem = localization.problem
    photons = problem.expected_photons(PLACES[:, 0], PLACES[:, 1])[0]
    known = torch.tensor([99.972155, 97.145920, 68.293556, 49.993038, 46.653088, 25.0], dtype=torch.float64)
    torch.testing.assert_close(photons, known, rtol=0, atol=1e-6)
    torch.testing.assert_close(problem.expected_image(PLACES).sum((1, 2)), known, rtol=0, atol=1e-6)
    simple = torch.tensor([0.011028, 0.011349, 0.016144, 0.022053, 0.023632, 0.044100], dtype=torch.float64)
    torch.testing.assert_close(problem.simple_bound(PLACES), simple, rtol=0, atol=1e-6)
    exact = torch.tensor([0.011889, 0.014153, 0.023720, 0.023720, 0.041319, 0.089305], dtype=torch.float64)
    torch.testing.assert_close(problem.exact_bound(PLACES)[:, 0], exact, rtol=0, atol=1e-6)
    positions = problem.emitters(200_000, torch.Generator().manual_seed(0))
    assert float((positions.abs() < 4).all(1).float().mean()) == pytest.approx(0.9115, abs=0.002)
    mean = problem.expected_photons(positions[:, 0], positions[:, 1])[0].mean()
    assert float(mean) == pytest.approx(85.3, abs=0.2)


def test_the_exact_bound_is_the_information_by_autograd(localization: Namespace) -> None:
    problem = localization.problem
    for place in PLACES:
        image = problem.expected_image(place.unsqueeze(0)).flatten()
        slopes = torch.autograd.functional.jacobian(
            lambda r: problem.expected_image(r.unsqueeze(0)).flatten(), place
        )
        information = slopes.T @ (slopes / image.unsqueeze(1))
        bound = torch.linalg.inv(information).diagonal()
        torch.testing.assert_close(problem.exact_bound(place.unsqueeze(0))[0], bound, rtol=1e-6, atol=0)


def test_maps_are_over_the_pixels_they_name(localization: Namespace) -> None:
    positions = localization.run.pixels(50)
    assert positions.shape == (8, 8, 50, 2)
    assert bool((positions[0, 7, :, 0] > 3).all()) and bool((positions[0, 7, :, 1] < -3).all())
    maps = localization.run.bounds(positions)
    measured = localization.run.compared(maps["exact"], maps["exact"], maps)
    assert measured["correlation, exact"] == pytest.approx(1.0)
    assert measured["share of pixels at or above the bound with the prior"] == 1.0


@pytest.mark.study
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_localisation(tmp_path: Path) -> None:
    smoke("localization.run", "--output", tmp_path)
    content = json.loads((tmp_path / "localization.json").read_text())
    assert len(content) == 4 and (tmp_path / "figure3.png").exists()
