"""Targets that are not there (`missing="ignore"`), against sums over what is there, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import log, nan, pi
from typing import Any

import pytest
import torch
from networks import inputs_of, mlp
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import posthoc_uq as uq

NOISE, TAU, TARGETS, ROWS = 0.3, 2.0, 2, 30
X = inputs_of(4, samples=ROWS, dtype=torch.float64)
NEW = inputs_of(4, samples=7, seed=5, dtype=torch.float64)


def holes(seed: int = 0) -> Tensor:
    """Which targets are there: rows with both, one, and, the last five, none."""
    there = torch.rand(ROWS, TARGETS, generator=torch.Generator().manual_seed(seed)) < 0.6
    there[:-5, 0] |= ~there[:-5].any(1)
    there[-5:] = False
    return there


THERE = holes()


def with_holes(targets: Tensor, there: Tensor = THERE) -> Tensor:
    return torch.where(there, targets.double(), nan)


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """Of the outputs by all weights, ``(rows, outputs, weights)``."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(jacrev(lambda w, row: functional_call(model, w, (row[None],))[0]), (None, 0))(weights, x)
    return torch.cat([each.flatten(2) for each in found.values()], 2)


def normal(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The Fisher's diagonal and the log density of each target."""
    logs = -0.5 * ((outputs - targets).square() / NOISE + log(2 * pi * NOISE))
    return torch.full_like(outputs, 1 / NOISE), logs


def own_noise(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    means, logs = outputs.chunk(2, 1)
    densities = -0.5 * ((means - targets).square() * (-logs).exp() + logs + log(2 * pi))
    return torch.cat([(-logs).exp(), torch.full_like(logs, 0.5)], 1), densities


def poisson(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.exp(), targets * outputs - outputs.exp() - torch.lgamma(targets + 1)


def labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    probs = outputs.sigmoid()
    return probs * (1 - probs), targets * probs.log() + (1 - targets) * (1 - probs).log()


def gamma(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    law = torch.distributions.Gamma(2.0, 2.0 * (-outputs).exp(), validate_args=False)
    return torch.full_like(outputs, 2.0), law.log_prob(targets)


VALUES = torch.randn(ROWS, TARGETS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
COUNTS = (VALUES.abs() * 2).floor()
CASES: dict[str, tuple[uq.Likelihood, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]] = {
    "regression": (uq.Gaussian(NOISE, missing="ignore"), normal, VALUES),
    "heteroscedastic": (uq.Heteroscedastic(missing="ignore"), own_noise, VALUES),
    "poisson": (uq.Poisson(missing="ignore"), poisson, COUNTS),
    "gamma": (uq.Gamma(2.0, missing="ignore"), gamma, VALUES.abs() + 0.1),
    "multilabel": (uq.Multilabel(missing="ignore"), labels, (VALUES > 0).double()),
}
CASE = pytest.mark.parametrize("case", CASES)


def model_of(case: str) -> nn.Module:
    return mlp(2 * TARGETS if case == "heteroscedastic" else TARGETS, dtype=torch.float64)


def in_batches(targets: Tensor, x: Tensor = X, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), targets.split(size), strict=True))


def fitted(model: nn.Module, data: Any, likelihood: Any, **options: Any) -> uq.Posterior:
    options = {"method": "full", "fisher": "exact", "prior_precision": TAU, "progress": False} | options
    return uq.fit(model, data, likelihood=likelihood, **options)


def variance(model: nn.Module, posterior: uq.Posterior) -> Tensor:
    return uq.wrap(model, posterior).functional_variance(NEW)


@CASE
def test_exact_fisher_and_log_likelihood(case: str) -> None:
    likelihood, written, targets = CASES[case]
    model = model_of(case)
    posterior = fitted(model, in_batches(with_holes(targets)), likelihood)
    fisher, logs = written(model(X).detach(), targets)
    kept = torch.cat([THERE, THERE], 1) if case == "heteroscedastic" else THERE
    jac, new = jacobians(model, X)[kept], jacobians(model, NEW)
    precision = (jac.T * fisher[kept]) @ jac + TAU * torch.eye(jac.shape[1], dtype=torch.float64)
    expected = torch.einsum("nkp,pq,nkq->nk", new, torch.linalg.inv(precision), new)
    torch.testing.assert_close(variance(model, posterior), expected)
    assert posterior.evidence.samples == ROWS - 5
    assert posterior.evidence.log_likelihood == pytest.approx(float(logs[THERE].sum()), rel=1e-10)


@CASE
def test_scores_and_drawn_labels(case: str) -> None:
    likelihood, written, targets = CASES[case]
    model = model_of(case)
    outputs = model(X[:-5]).detach().requires_grad_()
    gone = with_holes(targets)[:-5]
    written(outputs, targets[:-5])[1][THERE[:-5]].sum().backward()
    torch.testing.assert_close(likelihood.score(outputs.detach(), gone), -outputs.grad)
    keys = torch.arange(len(gone))
    for fisher in ("mc", "empirical"):
        (drawn,) = likelihood.gradients(outputs, gone, keys, fisher)
        kept = likelihood.by_output(THERE[:-5], outputs)
        assert bool((drawn[~kept] == 0).all()) and bool((drawn[kept] != 0).all())


@CASE
def test_expected_and_predictive_densities(case: str) -> None:
    """What is there counts as it does alone."""
    likelihood, _, targets = CASES[case]
    outputs = model_of(case)(X).detach()
    variances = 0.1 + outputs.square()
    for rule in (likelihood.expected_log_prob, likelihood.predictive_log_prob):
        gone = rule(outputs, variances, with_holes(targets))
        each = [rule(outputs, variances, with_holes(targets, torch.eye(2).bool()[[k]])) for k in range(2)]
        torch.testing.assert_close(gone, (torch.stack(each, 1) * THERE).sum(1))
        torch.testing.assert_close(sum(each), rule(outputs, variances, targets))


@pytest.mark.parametrize("method", ["diag", "kfac", "efb", "inf"])
def test_a_row_without_targets_is_no_sample(method: str) -> None:
    model, likelihood = model_of("regression"), CASES["regression"][0]
    targets = with_holes(VALUES)
    options: dict[str, Any] = {"method": method, "fisher": "exact"}
    whole = fitted(model, in_batches(targets), likelihood, **options)
    part = fitted(model, in_batches(targets[:-5], X[:-5]), likelihood, **options)
    torch.testing.assert_close(variance(model, whole), variance(model, part))
    assert whole.scale == part.scale == ROWS - 5 and whole.evidence == part.evidence


def test_two_outputs_without_a_row_in_common_are_two_fits() -> None:
    """By an update: the first rows have the first output, the others the second."""
    model, likelihood = model_of("regression"), CASES["regression"][0]
    first = torch.arange(ROWS)[:, None] < 18
    targets = torch.where(torch.cat([first, ~first], 1), VALUES, nan)
    both = fitted(model, in_batches(targets, size=6), likelihood)
    one = fitted(model, in_batches(targets[:18], X[:18]), likelihood)
    joined = uq.update(one, in_batches(targets[18:], X[18:]), progress=False)
    torch.testing.assert_close(variance(model, joined), variance(model, both))
    assert joined.evidence.present == both.evidence.present == ROWS
    assert joined.log_marginal_likelihood() == pytest.approx(float(both.log_marginal_likelihood()), rel=1e-10)


def test_noise_and_evidence_are_by_output() -> None:
    model, likelihood = model_of("regression"), uq.Gaussian(missing="ignore")
    targets = with_holes(VALUES)
    posterior = fitted(model, in_batches(targets), likelihood)
    squares = (model(X).detach() - targets).square()
    torch.testing.assert_close(posterior.noise_variance, squares.nanmean(0))
    found = posterior.evidence
    assert found.present == THERE.sum() and found.squared_residuals == pytest.approx(float(THERE.sum()))
    twice = posterior.with_settings(noise_scale=2.0)
    law = torch.distributions.Normal(model(X).detach(), (2 * squares.nanmean(0)).sqrt())
    expected = law.log_prob(targets.nan_to_num())[THERE].sum()
    assert twice.evidence.at_noise(2.0) == pytest.approx(float(expected))


def test_without_the_option_nan_is_an_error_that_names_it() -> None:
    for case, name in (("regression", "Gaussian"), ("multilabel", "Multilabel"), ("poisson", "Poisson")):
        with pytest.raises(uq.PosthocUQError, match=rf"likelihood=uq.{name}\(missing='ignore'\)"):
            fitted(model_of(case), in_batches(with_holes(CASES[case][2])), case)
    with pytest.raises(uq.PosthocUQError, match="not finite"):
        fitted(model_of("regression"), in_batches(VALUES / 0), uq.Gaussian(1.0, missing="ignore"))
    with pytest.raises(uq.PosthocUQError, match="All targets of output 1"):
        alone = with_holes(VALUES, torch.tensor([[True, False]]))
        fitted(model_of("regression"), in_batches(alone), uq.Gaussian(missing="ignore"))


class Together(uq.Likelihood):
    """Two values whose noise is correlated."""

    missing = "ignore"
    _covariance = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = []
        for output, target in zip(outputs, targets, strict=True):
            kept = ~target.isnan()
            law = torch.distributions.MultivariateNormal(output[kept], self._covariance[kept][:, kept])
            found.append(law.log_prob(target[kept]))
        return torch.stack(found)

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Any:
        precision = torch.zeros(len(outputs), 2, 2, dtype=outputs.dtype)
        for row, own in enumerate(torch.ones_like(outputs).bool() if there is None else there):
            kept = own.nonzero()
            precision[row, kept, kept.T] = torch.linalg.inv(self._covariance[kept, kept.T])
        return iter(torch.linalg.cholesky(precision + 1e-300 * torch.eye(2, dtype=outputs.dtype)).unbind(2))


def test_an_own_likelihood_is_told_what_is_there() -> None:
    model, there = model_of("regression"), THERE[:-5]
    likelihood, targets = Together(), with_holes(VALUES)
    jac, new = jacobians(model, X[:-5]), jacobians(model, NEW)
    precision = TAU * torch.eye(jac.shape[2], dtype=torch.float64)
    for own, rows in zip(there, jac, strict=True):
        kept = own.nonzero()
        precision += rows[own].T @ torch.linalg.inv(likelihood._covariance[kept, kept.T]) @ rows[own]
    expected = torch.einsum("nkp,pq,nkq->nk", new, torch.linalg.inv(precision), new)
    posterior = fitted(model, in_batches(targets), likelihood)
    torch.testing.assert_close(variance(model, posterior), expected)

    class NotTold(Together):
        def exact_factors(self, outputs: Tensor) -> Any:  # type: ignore[override]
            return super().exact_factors(outputs)

    with pytest.raises(uq.PosthocUQError, match=r"give it exact_factors\(outputs, there\)"):
        fitted(model, in_batches(targets), NotTold())
