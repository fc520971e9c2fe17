"""What a fit finds beside its posterior: the prior, the noise, and what it warns of."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.likelihoods import Categorical

Data = tuple[Tensor, Tensor]


@cache
def classifier() -> tuple[nn.Module, list[Data]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, model = torch.randn(60, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, [(x, torch.arange(60) % 3)]


def fit(**options: Any) -> uq.Posterior:
    model, loader = classifier()
    return uq.fit(model, loader, progress=False, **options)


def regression(samples: int) -> tuple[nn.Module, list[Data]]:
    """Least squares of 8 inputs on so many samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(samples, 1, generator=generator)
    model = nn.Linear(8, 1)
    solved = torch.linalg.lstsq(torch.cat([x, torch.ones(samples, 1)], 1), y).solution
    with torch.no_grad():
        model.weight.copy_(solved[:8].T), model.bias.copy_(solved[8])
    return model, [(x, y)]


def test_a_fit_calibrates_at_once() -> None:
    held_out = [(x + 0.1, y) for x, y in classifier()[1]]
    one, two = (
        fit(val_loader=held_out, divergence=0.003),
        fit(divergence=0.003),
    )  # by which nothing is left out
    two = uq.calibrate(two, held_out, progress=False)
    assert one.settings == two.settings and one.history.tuning == two.history.tuning
    assert one.history.promises == two.history.promises is not None
    assert one.history.head.criterion == "likelihood"


@pytest.mark.parametrize(("shape", "dtype"), [((60,), torch.float32), ((60, 1), torch.int64)])
def test_binary_labels_of_every_form(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = [(x, (x[:, 0] > 0).to(dtype).reshape(shape))]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    posterior = uq.fit(model, data, val_loader=data, likelihood="binary", progress=False)
    assert posterior.history.head.criterion == "likelihood" and posterior.temperature > 0


def test_a_regression_without_targets_warns_that_its_noise_is_one() -> None:
    model, ((x, y),) = regression(60)
    options: dict[str, Any] = {"likelihood": "regression", "prior_precision": 1.0, "progress": False}
    with pytest.warns(UserWarning, match="taken as 1") as caught:
        posterior = uq.fit(model, [x], **options)
    assert [w.filename for w in caught] == [__file__]
    assert posterior.noise_variance.tolist() == [1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert uq.fit(model, [x], noise_variance=0.02, **options).noise_variance.item() == pytest.approx(0.02)
        found = uq.fit(model, [(x, y)], **options)
    residual = (model(x) - y).detach().square().mean()
    torch.testing.assert_close(found.noise_variance[0], residual.double(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("method", ["full", "inf", "kfac", "diag", "subnetwork"])
def test_a_regression_warns_where_its_training_residuals_mean_nothing(method: str) -> None:
    """Nine parameters and ten rows, and nine and three hundred."""
    options: dict[str, Any] = {"method": method, "likelihood": "regression", "progress": False}
    options |= {"prior_precision": 1.0}  # so that nothing is left out
    options |= {"subnetwork": {"n": 9}}.get(method, {})
    memorised, few = regression(10)
    honest, many = regression(300)
    if method != "diag":  # whose limit is as many parameters as targets
        with pytest.warns(UserWarning, match=r"about [89] effective parameters for 10 training targets"):
            uq.fit(memorised, few, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.fit(honest, many, **options)
        uq.fit(memorised, few, noise_variance=0.25, **options)
        uq.fit(memorised, few, val_loader=many, **options)


def test_a_network_that_reproduces_its_targets_is_warned_of() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(30, 4)
        y = torch.sin(x.sum(1, keepdim=True)) + 0.5 * torch.randn(30, 1)
        model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(600):
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            optimiser.step()
    for options in ({}, {"method": "diag"}, {"layers": "last"}):
        with pytest.warns(UserWarning, match="effective parameters for 30 training targets"):
            uq.fit(model, [(x, y)], likelihood="regression", prior_precision=1.0, progress=False, **options)


def test_evidence_that_gives_noise_is_warned_of() -> None:
    """Thirty inputs for a thousand weights: models drawn at the evidence forget what the network learnt."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(30, 10)
        y = (x[:, 0] > 0).long()
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(200):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    with pytest.warns(UserWarning, match="few data for its weights"):
        uq.fit(model, [(x, y)], prior_precision="evidence", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.fit(model, [(x, y)], prior_precision=1e4, progress=False)


class NoDivergence(Categorical):
    name = "own"
    divergence = uq.Likelihood.divergence


def test_a_likelihood_without_a_divergence_takes_the_evidence() -> None:
    posterior = fit(likelihood=NoDivergence(), head="sampling")
    assert posterior.history.head.criterion == "evidence" and not posterior.history.faithful
    with pytest.raises(uq.PosthocUQError, match="divergence"):
        posterior = uq.tune(posterior, classifier()[1], criterion="faithful", progress=False)


def test_a_training_takes_a_number_as_its_own_prior_precision() -> None:
    options: dict[str, Any] = {"method": "function_space", "epochs": 1, "divergence": None}
    posterior = fit(prior_precision=3.0, **options)
    assert posterior.prior_precision == 3.0 and posterior.history.head.criterion == "given"
    assert fit(**options).scale == posterior.scale  # divergence=None leaves the variances
