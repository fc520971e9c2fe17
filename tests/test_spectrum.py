"""Outputs at every prior precision from one set of backward passes, beside the head at each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import posthoc_uq as uq
from posthoc_uq.heads.spectrum import ROUNDING
from posthoc_uq.layers import Rows
from posthoc_uq.posteriors import jacobian_gram


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, outputs)).double()


def convolutions(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.Flatten(),
        nn.Linear(24, outputs),
    ).double()


@pytest.mark.parametrize(
    ("network", "inputs", "outputs", "options"),
    [
        (perceptron, (6,), 3, {"method": "inf", "correction": "none"}),
        (convolutions, (1, 7, 7), 3, {"method": "inf", "correction": "none"}),
        (perceptron, (6,), 3, {"method": "kfac"}),
        (convolutions, (1, 7, 7), 3, {"method": "efb"}),
        (perceptron, (6,), 1, {"method": "kfac", "likelihood": "regression", "noise_variance": 0.1}),
    ],
    ids=["inf", "inf, convolutions", "kfac", "efb, convolutions", "regression"],
)
def test_covariances_are_those_of_the_head(
    network: Any, inputs: tuple[int, ...], outputs: int, options: dict[str, Any]
) -> None:
    """Nothing is left out of these posteriors, so that only the grid of eigenvalues differs."""
    torch.manual_seed(0)
    model, x = network(outputs), torch.randn(40, *inputs, dtype=torch.float64)
    y = torch.randn(40, 1).double() if outputs == 1 else torch.randint(outputs, (40,))
    posterior = uq.fit(model, [(x, y)], prior_precision=1.0, progress=False, **options)
    predictor = uq.wrap(model, posterior, head="linearized")
    few = torch.randn(5, *inputs, dtype=torch.float64)
    found = predictor.at_every_prior(few)
    for prior in (1e-2, 1.0, 30.0, 1e4):
        posterior = posterior.with_settings(prior_precision=prior)
        exact = predictor.with_posterior(posterior).functional_covariance(few)
        size = exact.diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
        distribution = found.at(prior)
        variance = distribution.variance.reshape(5, -1)
        assert ((variance - exact.diagonal(dim1=1, dim2=2)).abs() <= ROUNDING * size[:, :, 0]).all()
        if outputs > 1:
            assert ((distribution.covariance - exact).abs() <= ROUNDING * size).all()


@pytest.mark.parametrize("positions", [1, 3, 200], ids=["one", "pairs of positions", "by J"])
def test_inner_products_of_jacobians(positions: int) -> None:
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(5, 2, positions, 6, generator=generator, dtype=torch.float64)
    gradients = torch.randn(5, 2, 3, 4, positions, generator=generator, dtype=torch.float64)
    jacobian = torch.einsum("sgti,sgfot->sfgoi", activations, gradients).flatten(2)
    for limit in (2**20, 1):
        found = jacobian_gram(Rows(activations), gradients, 6, limit)
        torch.testing.assert_close(found, jacobian @ jacobian.transpose(1, 2))


def test_priors_of_layers_keep_their_ratios() -> None:
    torch.manual_seed(0)
    model, x = perceptron(3), torch.randn(40, 6, dtype=torch.float64)
    posterior = uq.fit(model, [(x, torch.randint(3, (40,)))], "kfac", prior_precision=1.0, progress=False)
    posterior = posterior.with_settings(prior_precision={"0": 4.0, "2": 9.0})
    predictor = uq.wrap(model, posterior, head="linearized")
    found = predictor.at_every_prior(x[:4])
    posterior = posterior.with_settings(prior_precision={"0": 40.0, "2": 90.0})
    exact = predictor.with_posterior(posterior).functional_variance(x[:4])
    torch.testing.assert_close(found.at(60.0).variance, exact, rtol=2 * ROUNDING, atol=0)


def test_top_classes_of_many() -> None:
    """Variances of the top classes are the head's; the others have their mean."""
    torch.manual_seed(0)
    model, x = perceptron(30), torch.randn(40, 6, dtype=torch.float64)
    posterior = uq.fit(model, [(x, torch.randint(30, (40,)))], "kfac", prior_precision=5.0, progress=False)
    predictor = uq.wrap(model, posterior, head="linearized", outputs=4)
    top = model(x[:4]).topk(4).indices
    exact = predictor.functional_variance(x[:4]).gather(1, top)
    variance = predictor.at_every_prior(x[:4]).at(5.0).variance
    torch.testing.assert_close(variance.gather(1, top), exact, rtol=ROUNDING, atol=0)
    others = torch.ones_like(variance, dtype=torch.bool).scatter(1, top, False)
    torch.testing.assert_close(variance[others].reshape(4, -1)[:, 0], variance.gather(1, top).mean(1))


@pytest.mark.parametrize("options", [{"method": "diag"}, {"layers": "last"}], ids=["diag", "last layer"])
def test_there_is_none_without_a_low_rank_or_with_a_closed_form(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = perceptron(3), torch.randn(40, 6, dtype=torch.float64)
    posterior = uq.fit(model, [(x, torch.randint(3, (40,)))], prior_precision=1.0, progress=False, **options)
    assert uq.wrap(model, posterior, head="linearized").at_every_prior(x) is None
