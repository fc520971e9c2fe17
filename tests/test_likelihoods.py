"""Likelihoods against the definitions: torch's distributions, sums over all targets, dense matrices, quadrature.

Networks have a few dozen weights and run in float64.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from networks import batches, inputs_of, mlp
from torch import Tensor, nn
from torch import distributions as td

import posthoc_uq as uq
from posthoc_uq.likelihoods import (
    LIKELIHOODS,
    Likelihood,
    OrdinalPrediction,
    OutputGaussian,
    cat,
    resolve_likelihood,
)

SAMPLES, TAU, DRAWS = 24, 3.0, 10**5
THRESHOLDS = (-0.7, 0.2, 1.1)


def conditional(outputs: Tensor) -> td.Distribution:
    """P(y = k) = prod_(j < k) s_j (1 - s_k), by loops."""
    steps, remaining, probs = outputs.sigmoid(), torch.ones_like(outputs[..., 0]), []
    for k in range(outputs.shape[-1]):
        probs.append(remaining * (1 - steps[..., k]))
        remaining = remaining * steps[..., k]
    return td.Categorical(probs=torch.stack([*probs, remaining], -1))


def cumulative(at_most: Tensor) -> td.Distribution:
    """From ``P(y <= k)``, but for the last class."""
    ones = torch.ones_like(at_most[..., :1])
    return td.Categorical(probs=torch.cat([at_most, ones], -1) - torch.cat([0 * ones, at_most], -1))


def noisy(outputs: Tensor) -> td.Distribution:
    half = outputs.shape[-1] // 2
    return td.Independent(td.Normal(outputs[..., :half], outputs[..., half:].exp().sqrt()), 1)


@dataclass
class Case:
    """A likelihood with its definition.

    Attributes:
        likelihood: as the library has it.
        outputs: of the network.
        distribution: of the target, by outputs ``(..., outputs)``.
        support: targets and weights whose weighted sums are expectations of the score's products, by outputs
            ``(outputs,)``: all targets, or the points of a Gaussian quadrature.
    """

    likelihood: Likelihood
    outputs: int
    distribution: Callable[[Tensor], td.Distribution]
    support: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def targets_and_weights(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.support is not None:
            return self.support(outputs)
        own = self.distribution(outputs)
        targets = own.enumerate_support() if isinstance(own, td.Categorical) else counts(len(outputs))
        return targets, own.log_prob(targets).exp()


def counts(outputs: int, most: int = 50) -> Tensor:
    return torch.tensor(list(itertools.product(range(most), repeat=outputs)), dtype=torch.float64)


def all_labels(outputs: Tensor) -> tuple[Tensor, Tensor]:
    labels = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(outputs))), dtype=torch.float64)
    return labels, td.Independent(td.Bernoulli(logits=outputs), 1).log_prob(labels).exp()


def gamma_points(outputs: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = scipy.special.roots_genlaguerre(20, 2.5 - 1)  # of y shape / mean
    targets = torch.from_numpy(nodes).unsqueeze(1) * outputs.exp() / 2.5
    return targets, torch.from_numpy(weights / weights.sum())


def normal_points(outputs: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    half = len(outputs) // 2
    grid = torch.tensor(list(itertools.product(nodes, repeat=half)))
    shares = torch.tensor(list(itertools.product(weights / weights.sum(), repeat=half))).prod(1)
    return outputs[:half] + (outputs[half:] / 2).exp() * grid, shares


CASES = {
    "multilabel": Case(uq.Multilabel(), 3, lambda f: td.Independent(td.Bernoulli(logits=f), 1), all_labels),
    "ordinal": Case(uq.Ordinal(), 3, conditional),
    "ordinal, thresholds": Case(
        uq.Ordinal(THRESHOLDS),
        1,
        lambda f: cumulative((torch.tensor(THRESHOLDS, dtype=torch.float64) - f).sigmoid()),
    ),
    "ordinal, cumulative": Case(
        uq.Ordinal(cumulative=True), 2, lambda f: cumulative(1 - f.cummin(-1).values.sigmoid())
    ),
    "poisson": Case(uq.Poisson(), 2, lambda f: td.Independent(td.Poisson(f.exp()), 1)),
    "negative_binomial": Case(
        uq.NegativeBinomial(0.4),
        1,
        lambda f: td.Independent(
            td.NegativeBinomial(1 / 0.4, 0.4 * f.exp() / (1 + 0.4 * f.exp()), validate_args=False), 1
        ),
    ),
    "gamma": Case(uq.Gamma(2.5), 1, lambda f: td.Independent(td.Gamma(2.5, 2.5 / f.exp()), 1), gamma_points),
    "heteroscedastic": Case(uq.Heteroscedastic(), 4, noisy, normal_points),
}
CASE = pytest.mark.parametrize("name", CASES)


def network(name: str) -> nn.Sequential:
    """A perceptron; the two cumulative logits of one are made to decrease."""
    model = mlp(CASES[name].outputs, dtype=torch.float64)
    if name == "ordinal, cumulative":
        with torch.no_grad():
            model[2].weight[1] = model[2].weight[0]
            model[2].bias.copy_(torch.tensor([0.5, -0.8]))
    return model


def data(name: str, model: nn.Module, samples: int = SAMPLES, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets drawn from the definition."""
    x = inputs_of(4, samples=samples, seed=seed, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return x, CASES[name].distribution(model(x)).sample()


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """``(samples, outputs, weights)``, each layer's bias as its last column."""
    outputs = model(x)
    rows = []
    for sample, output in itertools.product(*map(range, outputs.shape)):
        own = torch.autograd.grad(outputs[sample, output], list(model.parameters()), retain_graph=True)
        pairs = zip(own[::2], own[1::2], strict=True)
        rows.append(torch.cat([torch.cat([w, b[:, None]], 1).flatten() for w, b in pairs]))
    return torch.stack(rows).reshape(*outputs.shape, -1)


def scores(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Gradients of ``-log p`` by copies of one sample's outputs, ``(targets, outputs)``, by autograd."""
    copies = outputs.detach().expand(len(targets), -1).clone().requires_grad_()
    logs = CASES[name].distribution(copies).log_prob(targets)
    return torch.autograd.grad(-logs.sum(), copies)[0]


def output_fisher(name: str, outputs: Tensor) -> Tensor:
    """``E_y[score score^T]`` of one sample, ``(outputs, outputs)``."""
    targets, weights = CASES[name].targets_and_weights(outputs.detach())
    own = scores(name, outputs, targets)
    return (own * weights.unsqueeze(1)).T @ own


def dense_fisher(name: str, model: nn.Module, x: Tensor) -> Tensor:
    inner = torch.stack([output_fisher(name, outputs) for outputs in model(x)])
    own = jacobian(model, x)
    return torch.einsum("nkp,nkl,nlq->pq", own, inner, own) / len(x)


def fit(name: str, model: nn.Module, method: str = "full", **options: Any) -> uq.Posterior:
    x, y = data(name, model)
    options = {"likelihood": CASES[name].likelihood, "prior_precision": TAU, "progress": False} | options
    return uq.fit(model, batches(x, y), method, **options)


@pytest.fixture(scope="module")
def fitted() -> Callable[[str], tuple[nn.Module, uq.Posterior]]:
    """One exact dense fit of each case, which no test changes."""
    kept: dict[str, tuple[nn.Module, uq.Posterior]] = {}

    def get(name: str) -> tuple[nn.Module, uq.Posterior]:
        if name not in kept:
            model = network(name)
            kept[name] = model, fit(name, model, fisher="exact")
        return kept[name]

    return get


def test_every_likelihood_of_the_package_has_a_case_or_tests_elsewhere() -> None:
    assert {case.likelihood.name for case in CASES.values()} | {
        "classification",
        "binary",
        "quantiles",
        "regression",
        "survival",
    } == set(LIKELIHOODS)


# Density, score, draws


@CASE
def test_density_score_and_draws_are_those_of_the_definition(name: str) -> None:
    case, model = CASES[name], network(name)
    x, y = data(name, model)
    outputs = model(x).detach()
    case.likelihood.check(outputs, y)
    expected = case.distribution(outputs).log_prob(y)
    torch.testing.assert_close(case.likelihood.log_prob(outputs, y), expected, rtol=1e-9, atol=1e-9)
    by_autograd = torch.cat(
        [scores(name, f, target.unsqueeze(0)) for f, target in zip(outputs, y, strict=True)]
    )
    torch.testing.assert_close(case.likelihood.score(outputs, y), by_autograd, rtol=1e-8, atol=1e-8)
    one = outputs[:1].expand(20_000, -1)
    drawn = case.likelihood.draw(one, torch.arange(20_000), 3)
    case.likelihood.check(one, drawn)
    own = case.likelihood.score(one, drawn)
    truth = output_fisher(name, outputs[0])
    assert float((own.T @ own / len(own) - truth).norm() / truth.norm()) < 0.05
    if case.likelihood.defines("variance"):
        values = drawn.double().reshape(len(drawn), -1)
        mean, variance = (
            part(outputs[:1]).flatten() for part in (case.likelihood.mean, case.likelihood.variance)
        )
        error = (variance / len(values)).sqrt()
        assert bool(((values.mean(0) - mean).abs() < 4 * error).all())
        torch.testing.assert_close(values.var(0), variance, rtol=0.1, atol=0)
    if case.likelihood.defines("entropy"):
        targets, weights = case.targets_and_weights(outputs[0])
        logs = case.distribution(outputs[0]).log_prob(targets)
        torch.testing.assert_close(case.likelihood.entropy(outputs)[0], -(weights * logs).sum())


@pytest.mark.parametrize("name", ["poisson", "negative_binomial", "gamma"])
def test_extreme_means_have_draws_and_densities(name: str) -> None:
    likelihood = CASES[name].likelihood
    outputs = torch.tensor([[-30.0], [0.0], [12.0], [30.0]]).expand(4, CASES[name].outputs)
    drawn = likelihood.draw(outputs, torch.arange(4), 0)
    likelihood.check(outputs, drawn)
    assert bool(torch.isfinite(likelihood.log_prob(outputs, drawn)).all())
    ratio = drawn.double() / outputs.double().exp()
    assert bool((ratio[2:] < 20).all()) and bool((ratio[2:] > 1e-3).all())


@CASE
def test_expectations_over_gaussian_outputs(name: str) -> None:
    """`expected_log_prob` and `predictive_log_prob`, by many draws."""
    case, model = CASES[name], network(name)
    x, y = data(name, model)
    mean = model(x[:2]).detach()
    if name == "ordinal, cumulative":  # so far apart that draws do not cross
        mean = torch.tensor([[3.0, -3.0], [2.0, -4.0]]).double()
    variance = torch.linspace(0.1, 0.5, mean.numel(), dtype=torch.float64).reshape(mean.shape)
    generator = torch.Generator().manual_seed(0)
    draws = mean + variance.sqrt() * torch.randn(DRAWS, *mean.shape, generator=generator, dtype=torch.float64)
    logs = case.distribution(draws).log_prob(y[:2])
    expected, found = logs.mean(0), case.likelihood.expected_log_prob(mean, variance, y[:2], 4096)
    error = 5 * logs.std(0) / DRAWS**0.5 + 2e-3
    assert bool(((found - expected).abs() < error).all())
    found = case.likelihood.predictive_log_prob(mean, variance, y[:2], 4096)
    error = 5 * logs.exp().std(0) / DRAWS**0.5 / logs.exp().mean(0) + 2e-3
    assert bool(((found - logs.exp().mean(0).log()).abs() < error).all())


# The Fisher and the evidence


@CASE
@pytest.mark.only("negative_binomial", "ordinal", "heteroscedastic", "multilabel")
def test_the_fisher_of_three_kinds(name: str, fitted: Any) -> None:
    model, posterior = fitted(name)
    x, y = data(name, model)
    truth = dense_fisher(name, model, x)
    torch.testing.assert_close(posterior.blocks["joint"].fisher, truth, rtol=1e-6, atol=1e-9)
    diagonal = fit(name, model, "diag", fisher="exact").blocks
    own = torch.cat([diagonal[layer].diagonal.flatten() for layer in ("0", "2")])
    torch.testing.assert_close(own, truth.diagonal(), rtol=1e-6, atol=1e-9)
    drawn = fit(name, model, fisher="mc", n_samples=80).blocks["joint"].fisher
    assert 0 < float((drawn - truth).norm() / truth.norm()) < 0.2
    gradients = torch.einsum(
        "nk,nkp->np",
        torch.cat([scores(name, f, t.unsqueeze(0)) for f, t in zip(model(x), y, strict=True)]),
        jacobian(model, x),
    )
    empirical = fit(name, model, fisher="empirical").blocks["joint"].fisher
    torch.testing.assert_close(empirical, gradients.T @ gradients / SAMPLES, rtol=1e-6, atol=1e-9)


@CASE
def test_the_evidence_of_the_definition(name: str, fitted: Any) -> None:
    model, posterior = fitted(name)
    x, y = data(name, model)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    precision = SAMPLES * dense_fisher(name, model, x) + TAU * torch.eye(len(weights), dtype=torch.float64)
    truth = CASES[name].distribution(model(x).detach()).log_prob(y).sum() - 0.5 * (
        precision.logdet() - len(weights) * math.log(TAU) + TAU * weights.square().sum()
    )
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(float(truth), abs=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name != "ordinal, cumulative"])
def test_the_evidence_by_quadrature(name: str) -> None:
    """The integral over one or two weights, on a grid; Laplace's approximation is off by the order of 1 / samples."""
    case, samples = CASES[name], 200
    outputs = min(case.outputs, 2)
    model = nn.Linear(1, outputs, bias=False).double()
    x = inputs_of(1, samples=samples, dtype=torch.float64)

    def log_joint(weights: Tensor) -> Tensor:  # (points, outputs)
        logs = case.distribution(weights.unsqueeze(1) * x).log_prob(y).sum(1)
        prior = -0.5 * TAU * weights.square() + 0.5 * math.log(TAU / (2 * math.pi))
        return logs + prior.sum(1)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y = case.distribution(x * torch.linspace(0.3, 0.6, outputs, dtype=torch.float64)).sample()
    mode = torch.zeros(1, outputs, dtype=torch.float64)
    for _ in range(30):  # Newton's steps to the most probable weights
        at = mode.clone().requires_grad_()
        gradient = torch.autograd.grad(log_joint(at).sum(), at)[0]
        hessian = torch.autograd.functional.hessian(lambda w: log_joint(w.unsqueeze(0)).sum(), mode[0])
        mode = mode - torch.linalg.solve(hessian, gradient[0]).unsqueeze(0)
    with torch.no_grad():
        model.weight.copy_(mode.T)
    widths = (-hessian).inverse().diagonal().sqrt()
    axes = [torch.linspace(-7, 7, 71, dtype=torch.float64) * width for width in widths]
    grid = torch.cartesian_prod(*axes).reshape(-1, outputs) + mode
    cell = math.log(math.prod(float(axis[1] - axis[0]) for axis in axes))
    parts = torch.cat([log_joint(part) for part in grid.split(2000)])
    truth = float(torch.logsumexp(parts, 0)) + cell
    options = {"fisher": "exact", "prior_precision": TAU, "progress": False}
    posterior = uq.fit(model, [(x, y)], "full", likelihood=case.likelihood, **options)
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(truth, abs=0.1)


# Predictions


def drawn_outputs(predictor: Any, x: Tensor, head: str) -> Tensor:
    """`DRAWS` draws of the head's Gaussian outputs, pseudo-random."""
    mean, variance = predictor.functional_mean(x), predictor.functional_variance(x)
    generator = torch.Generator().manual_seed(4)
    normals = torch.randn(DRAWS, *mean.shape, generator=generator, dtype=torch.float64)
    if head == "moments":
        return mean + variance.sqrt() * normals
    root = torch.linalg.cholesky(predictor.functional_covariance(x) + 1e-12 * torch.eye(mean.shape[1]))
    return mean + torch.einsum("nkl,snl->snk", root, normals)


def assert_predicts(name: str, found: Any, outputs: Tensor, y: Tensor, rough: float = 1.0) -> None:
    """A prediction against outputs of many draws ``(draws, batch, outputs)``; `rough` multiplies the tolerances."""
    own = CASES[name].distribution(outputs)
    logs = own.log_prob(y)
    if name == "multilabel":
        probs = outputs.sigmoid()
        entropies = -(probs * probs.log() + (1 - probs) * (1 - probs).log())
        mean = probs.mean(0)
        total = -(mean * mean.log() + (1 - mean) * (1 - mean).log())
        torch.testing.assert_close(found.probs, mean, rtol=0, atol=4e-3 * rough)
        torch.testing.assert_close(found.label_entropy(), total, rtol=0, atol=4e-3 * rough)
        torch.testing.assert_close(found.sample_entropy, entropies.mean(0), rtol=0, atol=4e-3 * rough)
        information = found.label_mutual_information()
        torch.testing.assert_close(information, total - entropies.mean(0), rtol=0, atol=2e-3 * rough)
        torch.testing.assert_close(found.mutual_information(), information.sum(1))
        each = torch.where(y.bool(), mean, 1 - mean).log().sum(1)
        torch.testing.assert_close(found.log_prob(y), each, rtol=0, atol=1e-2 * rough)
        return
    if name == "heteroscedastic":
        means, noises = outputs.chunk(2, -1)[0], outputs.chunk(2, -1)[1].exp()
        torch.testing.assert_close(found.mean, means.mean(0), rtol=0, atol=1e-2 * rough)
        torch.testing.assert_close(found.epistemic_variance, means.var(0), rtol=3e-2 * rough, atol=0)
        torch.testing.assert_close(found.noise_variance, noises.mean(0), rtol=3e-2 * rough, atol=0)
        spread = found.log_noise_variance
        torch.testing.assert_close(spread, noises.log().var(0), rtol=3e-2 * rough, atol=0)
        # a Gaussian of the mixture's mean and variance
        gaussian = td.Normal(means.mean(0), (means.var(0) + noises.mean(0)).sqrt())
        expected = gaussian.log_prob(y).sum(1)
        torch.testing.assert_close(found.log_prob(y), expected, rtol=0, atol=4e-2 * rough)
        return
    mixture = torch.logsumexp(logs, 0) - math.log(len(outputs))
    torch.testing.assert_close(found.log_prob(y), mixture, rtol=0, atol=2e-2 * rough)
    if name.startswith("ordinal"):
        torch.testing.assert_close(found.probs, own.probs.mean(0), rtol=0, atol=4e-3 * rough)
        entropy = own.entropy().mean(0)
        torch.testing.assert_close(found.expected_entropy(), entropy, rtol=0, atol=6e-3 * rough)
        ranks = torch.arange(own.probs.shape[-1])
        torch.testing.assert_close(found.mean, (own.probs * ranks).sum(-1).mean(0), rtol=0, atol=1e-2 * rough)
        return
    torch.testing.assert_close(found.mean, own.mean.mean(0), rtol=2e-2 * rough, atol=0)
    torch.testing.assert_close(
        found.epistemic_variance, own.mean.var(0), rtol=0.12 * rough, atol=0
    )  # heavy tails
    torch.testing.assert_close(found.noise_variance, own.variance.mean(0), rtol=6e-2 * rough, atol=0)


@pytest.mark.parametrize("head", ["linearized", "moments"])
@CASE
@pytest.mark.covering(1)
def test_gaussian_outputs_against_many_draws(name: str, head: str, fitted: Any) -> None:
    model, posterior = fitted(name)
    x, y = data(name, model, 4, seed=2)
    closed = name == "heteroscedastic"
    predictor = uq.wrap(model, posterior, head, **({} if closed else {"n_draws": 2048}))
    outputs = drawn_outputs(predictor, x, head)
    assert_predicts(name, predictor(x), outputs, y, 3.0 if name == "ordinal, cumulative" else 1.0)


@CASE
def test_drawn_weights_by_the_definition(name: str, fitted: Any) -> None:
    model, posterior = fitted(name)
    x, y = data(name, model, 4, seed=2)
    predictor = uq.wrap(model, posterior, "sampling", n_samples=30)
    weights = posterior.sample(30, torch.Generator().manual_seed(0))
    outputs = torch.stack(
        [
            torch.func.functional_call(model, {own: draws[i] for own, draws in weights.items()}, (x,))
            for i in range(30)
        ]
    ).detach()
    assert_predicts(name, predictor(x), outputs, y, 0.5 if name == "ordinal, cumulative" else 1e-5)


@CASE
@pytest.mark.only("negative_binomial", "ordinal", "heteroscedastic", "multilabel")
def test_the_faithful_prior_is_the_default(name: str) -> None:
    model = network(name)
    posterior = fit(name, model, "kfac", prior_precision=None, divergence=0.005)
    assert posterior.history.head.criterion == "faithful"
    assert 0 < posterior.history.faithful.divergence <= 0.005
    x = data(name, model)[0]
    prediction, outputs = uq.wrap(model, posterior)(x), model(x).detach()
    found = CASES[name].likelihood.divergence(outputs, prediction)
    truth = torch.stack([divergence_of(name, f, prediction, row) for row, f in enumerate(outputs)])
    assert float(found.mean()) == pytest.approx(float(truth.mean()), rel=0.3)


def divergence_of(name: str, outputs: Tensor, prediction: Any, row: int) -> Tensor:
    """``sum_y p(y) log (p(y) / q(y))`` over all targets, the mean over outputs or labels."""
    case = CASES[name]
    targets, weights = case.targets_and_weights(outputs)
    if name in ("gamma", "poisson"):  # q has no Gaussian quadrature, and two outputs have many counts
        draws = 3_000
        with torch.random.fork_rng():
            torch.manual_seed(row)
            targets = case.distribution(outputs.expand(draws, -1)).sample()
        weights = torch.full((draws,), 1 / draws)
    logs = case.distribution(outputs).log_prob(targets)
    copies = cat([prediction_row(prediction, row)] * len(targets))
    each = (weights * (logs - copies.log_prob(copies.fitting(targets)))).sum()
    number = {"multilabel": 3, "poisson": 2, "heteroscedastic": 2}.get(name, 1)
    return each / number


def prediction_row(prediction: Any, row: int) -> Any:
    values = {
        field.name: value[row : row + 1] if isinstance(value, Tensor) else value
        for field in fields(prediction)
        for value in [getattr(prediction, field.name)]
    }
    return type(prediction)(**values)


# Files, tuning, evaluation


@pytest.mark.parametrize("name", ["ordinal, thresholds", "ordinal, cumulative", "negative_binomial", "gamma"])
def test_a_file_keeps_the_attributes(name: str, fitted: Any, tmp_path: Path) -> None:
    model, posterior = fitted(name)
    path = tmp_path / "p.h5"
    uq.save(posterior, path)
    loaded = uq.load(path, model)
    assert type(loaded.likelihood) is type(posterior.likelihood)
    assert loaded.likelihood.attributes() == posterior.likelihood.attributes()
    x, y = data(name, model, 5, seed=2)
    found, before = uq.wrap(model, loaded)(x), uq.wrap(model, posterior)(x)
    assert torch.equal(found.log_prob(y), before.log_prob(y))
    assert posterior.likelihood.name in str(uq.inspect(path))


@CASE
@pytest.mark.only("gamma", "ordinal", "heteroscedastic", "multilabel")
def test_evaluate_and_tune(name: str, fitted: Any) -> None:
    model, posterior = fitted(name)
    x, y = data(name, model, 24, seed=3)
    found = uq.evaluate(
        {"network": model, "posterior": uq.wrap(model, posterior)},
        batches(x, y, 16),
        ood_loaders=[5 * x],
        progress=False,
    )
    own = found.metrics["posterior"]
    prediction = uq.wrap(model, posterior)(x)
    nll = "log_density" if name == "heteroscedastic" else "nll"
    sign = 1 if name == "heteroscedastic" else -1
    each = float(prediction.log_prob(prediction.fitting(y)).mean())
    assert own[nll] == pytest.approx(sign * each, rel=1e-4)
    assert name != "multilabel" or found.figures()
    assert str(found) and found.foreign["posterior"]["foreign"]
    tuned = fit(name, model, "diag", fisher="exact")
    trials = uq.tune(tuned, [(x, y)], max_evaluations=3, noise=False, progress=False).history.trials
    assert trials.model_alone == pytest.approx(
        -float(CASES[name].distribution(model(x).detach()).log_prob(y).mean()), rel=1e-6
    )


def test_names_make_the_defaults() -> None:
    for name in LIKELIHOODS:
        assert type(resolve_likelihood(name)) is LIKELIHOODS[name]
        assert resolve_likelihood(name).attributes() == LIKELIHOODS[name]().attributes()


# Soft labels and label smoothing


def soft_data(samples: int = SAMPLES) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = mlp(3, dtype=torch.float64), inputs_of(4, samples=samples, dtype=torch.float64)
    return model, x, (2 * inputs_of(3, samples=samples, seed=8, dtype=torch.float64)).softmax(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_soft_and_smoothed_labels_by_the_definition(smoothing: float) -> None:
    model, x, soft = soft_data()
    likelihood, outputs = uq.Categorical(label_smoothing=smoothing), model(x).detach()
    for targets in (soft, soft.argmax(1)):
        loss = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="none")
        torch.testing.assert_close(likelihood.log_prob(outputs, targets), -loss(outputs, targets))
        by_autograd = Likelihood.score(likelihood, outputs, targets)
        torch.testing.assert_close(likelihood.score(outputs, targets), by_autograd)
        options = {"likelihood": likelihood, "prior_precision": TAU, "progress": False}
        empirical = uq.fit(model, [(x, targets)], "full", fisher="empirical", **options)
        gradients = torch.einsum("nk,nkp->np", by_autograd, jacobian(model, x))
        fisher = gradients.T @ gradients / SAMPLES
        torch.testing.assert_close(empirical.blocks["joint"].fisher, fisher, rtol=1e-6, atol=1e-9)
        assert empirical.evidence.log_likelihood == pytest.approx(-float(loss(outputs, targets).sum()))
        plain = uq.fit(model, [(x, soft.argmax(1))], "full", fisher="mc", progress=False, prior_precision=TAU)
        drawn = uq.fit(model, [(x, targets)], "full", fisher="mc", **options)
        assert torch.equal(drawn.blocks["joint"].fisher, plain.blocks["joint"].fisher)


def test_soft_labels_are_rated_by_their_mean(tmp_path: Path) -> None:
    model, x, soft = soft_data()
    likelihood = uq.Categorical(label_smoothing=0.1)
    posterior = uq.fit(model, [(x, soft)], "kfac", likelihood=likelihood, progress=False)
    predictor = uq.wrap(model, posterior)
    prediction = predictor(x)
    expected = (soft * prediction.log_probs).sum(1)
    torch.testing.assert_close(prediction.log_prob(soft), expected)
    found = uq.evaluate(predictor, [(x[:9], soft[:9]), (x[9:], soft[9:])], progress=False)
    quality, hard = found.metrics["linearized"], prediction.quality(soft.argmax(1))
    assert quality["nll"] == pytest.approx(-float(expected.mean()))
    assert quality["accuracy"] == hard["accuracy"]
    assert quality["brier"] == pytest.approx(float((prediction.probs - soft).square().sum(1).mean()))
    assert found.figures() and found.selective["linearized"]["entropy"]
    posterior = uq.tune(posterior, [(x, soft)], max_evaluations=3, progress=False)
    trials = posterior.history.trials
    network = -float(
        (soft * model(x).detach().log_softmax(1)).sum(1).mean()
    )  # held-out data are not smoothed
    assert trials.model_alone == pytest.approx(network)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model).likelihood
    assert isinstance(loaded, uq.Categorical) and loaded.label_smoothing == 0.1
    plain = uq.fit(model, [(x, soft)], "diag", progress=False)
    uq.save(plain, tmp_path / "plain.h5")
    assert uq.inspect(tmp_path / "plain.h5")["likelihood"] == {"name": "classification"}


# What the predictions say


@pytest.mark.parametrize("name", ["poisson", "negative_binomial", "gamma"])
def test_probabilities_quantiles_and_intervals_of_a_mixture(name: str, fitted: Any) -> None:
    model, posterior = fitted(name)
    x, _ = data(name, model, 5, seed=2)
    prediction = uq.wrap(model, posterior, n_draws=512)(x)
    means, case = prediction.outputs.exp().numpy(), CASES[name]
    by_name = {
        "poisson": lambda mean: scipy.stats.poisson(mean),
        "negative_binomial": lambda mean: scipy.stats.nbinom(1 / 0.4, 1 / (1 + 0.4 * mean)),
        "gamma": lambda mean: scipy.stats.gamma(2.5, scale=mean / 2.5),
    }
    mixture, counts_only = by_name[name](means), case.likelihood.counts
    for value in (1.0, 3.0):
        density = (mixture.pmf if counts_only else mixture.pdf)(value).mean(1)
        torch.testing.assert_close(prediction.probability(value), torch.from_numpy(density))
        torch.testing.assert_close(prediction.cdf(value), torch.from_numpy(mixture.cdf(value).mean(1)))
    assert prediction.probability(torch.ones(5, case.outputs)).shape == (5, case.outputs)
    for q in (0.1, 0.5, 0.8):
        found = prediction.quantile(q)
        assert bool((prediction.cdf(found) > q - 0.03).all())
        below = found - 1 if counts_only else found
        assert bool((prediction.cdf(below) < q + 0.03).all())
    lower, upper = prediction.interval(0.8)
    assert torch.equal(lower, prediction.quantile(0.1)) and torch.equal(upper, prediction.quantile(0.9))
    with pytest.raises(uq.PosthocUQError, match="strictly between 0 and 1"):
        prediction.quantile(1.0)


def test_what_an_ordinal_prediction_says(fitted: Any) -> None:
    model, posterior = fitted("ordinal")
    x, y = data("ordinal", model, 30, seed=2)
    found = uq.wrap(model, posterior)(x)
    torch.testing.assert_close(found.cdf()[:, 1], found.probs[:, :2].sum(1))
    ranks = torch.arange(4)
    mean = (found.probs * ranks).sum(1)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.variance, (found.probs * ranks**2).sum(1) - mean**2)
    lower, upper = found.interval(0.5)
    for row in range(30):
        cdf = found.probs[row].cumsum(0).tolist()
        assert int(lower[row]) == next(k for k in range(4) if k == 3 or cdf[k] >= 0.25)
        assert int(upper[row]) == next(k for k in range(4) if k == 3 or cdf[k] >= 0.75)
    quality = found.quality(y)
    reached = (y.unsqueeze(1) <= ranks).double()
    expected = ((found.probs.cumsum(1) - reached) ** 2)[:, :3].mean()
    assert quality["rps"] == pytest.approx(float(expected))
    predicted, squares = found.predicted(), (ranks.unsqueeze(1) - ranks) ** 2
    table = torch.zeros(4, 4)
    for row, column in zip(y, predicted, strict=True):
        table[row, column] += 1
    chance = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / 30
    kappa = 1 - float((squares * table).sum() / (squares * chance).sum())
    assert quality["quadratic_kappa"] == pytest.approx(kappa, abs=1e-5)
    assert found.of_one_network().votes is None and type(found.to("cpu")) is OrdinalPrediction
    assert "mean" in found.to_dict() and "OrdinalPrediction" in repr(found)


def test_what_a_multilabel_prediction_says(fitted: Any) -> None:
    model, posterior = fitted("multilabel")
    x, y = data("multilabel", model, 30, seed=2)
    found = uq.wrap(model, posterior)(x)
    right = torch.where(y.bool(), found.probs, 1 - found.probs)
    torch.testing.assert_close(found.log_prob(y), right.log().sum(1))
    most = torch.maximum(found.probs, 1 - found.probs).prod(1)
    torch.testing.assert_close(found.max_probability(), most)
    torch.testing.assert_close(found.entropy(), found.label_entropy().sum(1))
    quality, decided = found.quality(y), found.probs > 0.5
    assert quality["hamming_loss"] == pytest.approx(float((decided != y.bool()).double().mean()), abs=1e-6)
    assert quality["brier"] == pytest.approx(float((found.probs - y).square().mean()))
    hits, guesses, truths = (part.sum(0).double() for part in (decided & y.bool(), decided, y))
    assert quality["f1_macro"] == pytest.approx(float((2 * hits / (guesses + truths)).mean()), abs=1e-5)
    precisions = []
    for label in range(3):
        order = y[found.probs[:, label].argsort(descending=True), label]
        ranked = order.cumsum(0) / torch.arange(1, 31)
        precisions.append(float((ranked * order).sum() / order.sum()))
    assert quality["mean_average_precision"] == pytest.approx(np.mean(precisions), abs=1e-4)
    torch.testing.assert_close(found.losses(y.long()), (decided != y.bool()).double().mean(1))
    assert found.top_k(2).labels.shape == (30, 2) and "MultilabelPrediction" in repr(found)
    assert "mutual_information" in uq.wrap(model, posterior)(x).scores()
    plain = found.of_one_network()
    assert plain.sample_entropy is None and "mutual_information" not in plain.scores()
    with pytest.raises(uq.PosthocUQError, match="link="):
        plain.mutual_information()
    probit = uq.wrap(model, posterior, link="probit")(x)
    assert float((probit.probs - found.probs).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("name", "head"), [("multilabel", "moments"), ("ordinal", "sampling"), ("heteroscedastic", "sampling")]
)
def test_exported(name: str, head: str) -> None:
    model = mlp(CASES[name].outputs)
    x, y = inputs_of(4), data(name, network(name))[1]
    posterior = uq.fit(
        model, [(x, y)], "kfac", likelihood=CASES[name].likelihood, prior_precision=TAU, progress=False
    )
    few = {"n_draws": 16} if head == "moments" else {"n_samples": 4}
    predictor = uq.wrap(model, posterior, head, **few)
    found, expected = uq.export(predictor, x[:4]).module()(x[:9]), predictor(x[:9]).tensors()
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


# What is refused


def test_cumulative_logits_are_an_option() -> None:
    model, labels = network("ordinal, cumulative"), torch.arange(SAMPLES) % 3
    x = data("ordinal, cumulative", model)[0]
    # the same model by its latent output
    latent = nn.Sequential(model[0], model[1], nn.Linear(5, 1, bias=False).double())
    with torch.no_grad():
        latent[2].weight.copy_(model[2].weight[:1])
    own = uq.Ordinal(-model[2].bias.detach())
    expected = uq.Ordinal(cumulative=True).log_prob(model(x), labels)
    torch.testing.assert_close(own.log_prob(latent(x), labels), expected)
    assert not own.logits and uq.Ordinal().logits


@pytest.mark.parametrize(
    ("name", "drawn", "said"),
    [
        ("gamma", lambda mean: scipy.stats.gamma(6.0, scale=mean / 6.0), "shape"),
        ("negative_binomial", lambda mean: scipy.stats.nbinom(1 / 0.3, 1 / (1 + 0.3 * mean)), "dispersion"),
    ],
)
def test_another_dispersion_than_the_default_is_said_aloud(name: str, drawn: Any, said: str) -> None:
    model = nn.Linear(2, 1)
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2]]))
        model.bias.fill_(math.log(5.0))
        mean = model(x).exp().double().numpy()
    y = torch.tensor(drawn(mean).rvs(random_state=0), dtype=torch.float32)
    options: dict[str, Any] = {"method": "diag", "prior_precision": 1.0, "progress": False}
    wanted = {"shape": 6.0, "dispersion": 0.3}[said]
    with pytest.warns(UserWarning, match=f"stands for uq.* suggest {said}=") as caught:
        uq.fit(model, [(x, y)], likelihood=name, **options)
    (message,) = (str(w.message) for w in caught if "suggest" in str(w.message))
    estimate = float(message.split(f"suggest {said}=")[1].split(";")[0])
    assert abs(estimate / wanted - 1) < 0.15  # of 2,000 targets
    kind = uq.Gamma if name == "gamma" else uq.NegativeBinomial
    like_default = torch.tensor(scipy.stats.gamma(1.0, scale=mean).rvs(random_state=1), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq.fit(model, [(x, y)], likelihood=kind(wanted), **options)
        if name == "gamma":
            uq.fit(model, [(x, like_default)], likelihood=name, **options)


@pytest.mark.parametrize("likelihood", [uq.Bernoulli(), uq.Multilabel(), uq.Heteroscedastic(), uq.Poisson()])
def test_no_samples_have_no_densities(likelihood: Any) -> None:
    outputs = torch.zeros(0, 2)
    targets = torch.zeros(0, 1 if isinstance(likelihood, uq.Heteroscedastic) else 2)
    if isinstance(likelihood, uq.Bernoulli):
        outputs, targets = outputs[:, :1], targets[:, :1]
    assert likelihood.log_prob(outputs, targets).shape == (0,)


def test_noise_beyond_float32_has_a_finite_density_and_score() -> None:
    """exp(90) is no number of float32; the density and its gradient are, by the logarithm of the noise variance."""
    outputs, targets = torch.tensor([[0.3, 90.0]]), torch.tensor([[0.5]])
    likelihood = uq.Heteroscedastic()
    expected = -0.5 * (0.04 * math.exp(-90) + 90 + math.log(2 * math.pi))
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), torch.tensor([expected]))
    torch.testing.assert_close(likelihood.score(outputs, targets), torch.tensor([[0.0, 0.5]]))


@pytest.mark.parametrize(
    ("own", "shape", "shift"),
    [
        (uq.Categorical(), (9, 3), 0.0),
        (uq.Categorical(), (9, 3, 4), 0.0),
        (uq.Categorical(class_dim=-1), (9, 4, 3), 0.0),
        (uq.Bernoulli(), (9,), 0.0),
        (uq.Multilabel(), (9, 4), 0.0),
        (uq.Ordinal(), (9, 2), 0.0),
        (uq.Gaussian(0.5), (9,), 2.0),
        (uq.Heteroscedastic(), (9, 2), 5.0),
        (uq.Poisson(), (9, 1), 5.0),
    ],
)
def test_drawn_models_that_decide_otherwise(own: uq.Likelihood, shape: tuple[int, ...], shift: float) -> None:
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert own.decisions_agree(outputs, outputs + 1e-3 * torch.randn(5, *shape))
    assert not own.decisions_agree(outputs, (shift - outputs) * torch.ones(5, *shape))


@pytest.mark.parametrize("name", ["poisson", "gamma", "negative_binomial"])
def test_a_drawn_divergence_hardly_moves_with_the_rounding_of_outputs(name: str) -> None:
    """Batches of other sizes and other devices round otherwise, and the faithful prior is found by it."""
    likelihood = resolve_likelihood(name)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(40, 2 if name == "negative_binomial" else 1, generator=generator)
    try:
        likelihood.check(outputs, None)
    except uq.PosthocUQError:
        outputs = outputs[:, :1]
    found = []
    for scale in (1.0, 1 + 3e-7):
        rounded = outputs * scale
        prediction = likelihood.from_gaussian(OutputGaussian(rounded, torch.full_like(rounded, 0.05)))
        found.append(likelihood.divergence(rounded, prediction))
    assert float(found[0].mean()) > 1e-4
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-7)
