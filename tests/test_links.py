"""From Gaussian logits to probabilities: numbers of the literature's formulas, quadrature, limits."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.heads.links import LINKS, check_link, from_gaussian
from posthoc_uq.heads.prediction import cat


def posterior(likelihood: str, temperature: float = 1.0, **options: Any) -> uq.Posterior:
    """A posterior that only lends its likelihood."""
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0]))]
    if likelihood == "regression":
        data = [(data[0][0], data[0][1].double().unsqueeze(1))]
    if likelihood != "classification":
        data = [(data[0][0], data[0][1].reshape(4, 1).float())]
    net = torch.nn.Linear(3, 2 if likelihood == "classification" else 1)
    found = uq.fit(
        net, data, method="diag", likelihood=likelihood, prior_precision=1.0, progress=False, **options
    )
    found.temperature = temperature
    return found


def numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_probit_bridge_and_draws_of_three_classes() -> None:
    mean, variance = numbers(1, 0, -1), numbers(1, 0.5, 2)
    own = posterior("classification")

    def probs(link: str, **more: Any) -> list[float]:
        return from_gaussian(mean, variance, own, link=link, **more).probs[0].tolist()  # type: ignore[union-attr]

    assert probs("probit") == pytest.approx([0.613010, 0.262700, 0.124290], abs=2e-6)
    assert probs("bridge") == pytest.approx([0.475470, 0.398050, 0.126479], abs=2e-6)
    assert probs("mc", n_draws=100_000) == pytest.approx([0.5902, 0.2608, 0.1490], abs=2e-3)


def test_one_logit_against_quadrature() -> None:
    own = posterior("binary")
    for mean, variance, expected in ((1.0, 2.0, 0.678829), (-2.0, 0.5, 0.138414)):
        found = from_gaussian(numbers(mean), numbers(variance), own)
        assert found.probs[0, 1].item() == pytest.approx(expected, abs=1e-6)  # type: ignore[union-attr]
        exact, _ = quad(lambda z, m=mean, v=variance: norm.pdf(z, m, sqrt(v)) * expit(z), -30, 30)
        drawn = from_gaussian(numbers(mean), numbers(variance), own, link="mc", n_draws=50_000)
        assert drawn.probs[0, 1].item() == pytest.approx(exact, abs=3e-3)  # type: ignore[union-attr]


def test_two_classes_use_the_variance_of_their_difference() -> None:
    mean = numbers(-1.058755, 0.580374)
    covariance = torch.tensor([[[2.280005, 0.667668], [0.667668, 2.149537]]], dtype=torch.float64)
    own = posterior("classification")
    variance = covariance.diagonal(dim1=1, dim2=2)
    with_covariance = from_gaussian(mean, variance, own, covariance=covariance)
    assert with_covariance.probs[0, 0].item() == pytest.approx(0.249491, abs=2e-6)  # type: ignore[union-attr]
    assert from_gaussian(mean, variance, own).probs[0, 0].item() == pytest.approx(0.232112, abs=2e-6)  # type: ignore[union-attr]
    # One logit with the difference's moments is the same prediction.
    difference = from_gaussian(numbers(1.639129), numbers(3.094205), posterior("binary"))
    assert difference.probs[0, 0].item() == pytest.approx(0.249491, abs=2e-6)  # type: ignore[union-attr]


def test_draws_follow_the_covariance() -> None:
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)  # of lower rank than classes
    covariance = root @ root.transpose(1, 2)
    mean = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    variance = covariance.diagonal(dim1=1, dim2=2)
    own = posterior("classification")
    found = from_gaussian(mean, variance, own, covariance=covariance, link="mc", n_draws=40_000)
    normals = torch.randn(40_000, 4, 2, generator=generator, dtype=torch.float64)
    reference = (mean + torch.einsum("bci,sbi->sbc", root, normals)).softmax(-1)
    torch.testing.assert_close(found.probs, reference.mean(0), atol=0.01, rtol=0)  # type: ignore[union-attr]
    expected = -(reference * reference.log()).sum(-1).mean(0)
    torch.testing.assert_close(found.expected_entropy(), expected, atol=0.01, rtol=0)  # type: ignore[union-attr]
    assert (found.mutual_information() >= 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("link", LINKS)
def test_extreme_logits_stay_finite_and_certain_ones_are_softmax(link: str) -> None:
    own = posterior("classification")
    mean = torch.tensor([[200.0, 0.0, -200.0], [1.0, 0.0, -1.0]])
    for variance in (torch.zeros(2, 3), torch.full((2, 3), 1e8)):
        found = from_gaussian(mean, variance, own, link=link)
        assert torch.isfinite(found.probs).all()  # type: ignore[union-attr]
        torch.testing.assert_close(found.probs.sum(1), torch.ones(2))  # type: ignore[union-attr]
    if link != "bridge":
        torch.testing.assert_close(
            from_gaussian(mean, torch.zeros(2, 3), own, link=link).probs, mean.softmax(1)
        )  # type: ignore[union-attr]


@pytest.mark.parametrize("link", LINKS)
def test_a_prediction_does_not_depend_on_its_batch(link: str) -> None:
    own = posterior("classification", temperature=1.7)
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(6, 4, generator=generator)
    variance = torch.rand(6, 4, generator=generator)
    whole = from_gaussian(mean, variance, own, link=link)
    parts = cat(
        [from_gaussian(m, v, own, link=link) for m, v in zip(mean.split(2), variance.split(2), strict=True)]
    )
    torch.testing.assert_close(whole.probs, parts.probs)  # type: ignore[union-attr]
    torch.testing.assert_close(whole.logits_mean, mean / 1.7)  # type: ignore[union-attr]
    torch.testing.assert_close(whole.logits_variance, variance / 1.7**2)  # type: ignore[union-attr]


def test_a_regression_adds_the_noise() -> None:
    own = posterior("regression", noise_variance=0.25)
    found = from_gaussian(numbers(1.0), numbers(2.0), own)
    assert found.variance.item() == pytest.approx(2.25)  # type: ignore[union-attr]


def test_unknown_links_are_refused() -> None:
    with pytest.raises(uq.PosthocUQError, match="link must be one of"):
        check_link("logit", 10)
    with pytest.raises(uq.PosthocUQError, match="at least one draw"):
        check_link("mc", 0)
