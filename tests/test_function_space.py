"""Function space: divergences and gradients against dense matrices written from the definitions; and what a fit
gives.
"""

from __future__ import annotations

import copy
import random
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Choice
from torch.distributions import MixtureSameFamily, MultivariateNormal, Normal, kl_divergence
from torch.func import functional_call, jacrev

import posthoc_uq as uq
from posthoc_uq import NonFiniteError
from posthoc_uq.core import Batch, DeferredChecks, replicate
from posthoc_uq.layers import describe
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posthoc_uq.trained import MeanField, Step, function_space_kl
from posthoc_uq.trained.contexts import Context, UniformBox
from posthoc_uq.trained.function_space import (
    FeatureNetwork,
    FunctionSpaceObjective,
    gaussian_kl,
    last_layer_covariance,
    marginal_kl,
    relative_function_noise,
)

F64 = torch.float64


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def dense_kl(mean: Any, covariance: Any, prior_mean: Any, prior_covariance: Any) -> float:
    """``KL(N(m, C) || N(m_p, C_p))`` by inverses and determinants."""
    m, c, mp, cp = (
        np.asarray(part, dtype=np.float64) for part in (mean, covariance, prior_mean, prior_covariance)
    )
    inverse = np.linalg.inv(cp)
    d = mp - m
    logs = np.linalg.slogdet(cp)[1] - np.linalg.slogdet(c)[1]
    return 0.5 * (np.trace(inverse @ c) - len(m) + logs + d @ inverse @ d)


def random_net(*sizes: int, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for first, second in pairwise(sizes):
            layers += [nn.Linear(first, second), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).double().eval()


def layers_of(net: nn.Module) -> dict[str, Any]:
    found = {}
    for name, module in net.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            bias = None if module.bias is None else (f"{name}.bias", module.bias)
            kind = "linear" if isinstance(module, nn.Linear) else "conv2d"
            found[name] = describe(name, kind, (f"{name}.weight", module.weight), bias, 1)
    return found


class Fixed(Context):
    """The same points every time, set by set."""

    def __init__(self, *sets: Tensor) -> None:
        self._sets, self._next = sets, 0

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        found = self._sets[self._next % len(self._sets)]
        self._next += 1
        return found


def objective_of(
    net: nn.Module,
    points: Tensor,
    *,
    last_log: float = -3.0,
    likelihood: Likelihood | None = None,
    samples: int = 40,
    context: Context | None = None,
    **options: Any,
) -> tuple[FunctionSpaceObjective, MeanField]:
    """The objective over all layers of a net, with means that have left the trained weights and log variances that
    differ within each tensor.
    """
    network = FeatureNetwork(replicate(net), layers_of(net), Batch((points,)))
    method = uq.FunctionSpace(**({"n_context": len(points)} | options))
    trained = {name: p.detach().clone() for name, p in net.named_parameters()}
    last = network.last.parameter_names
    logs = {
        name: 0.3 * normals(*mean.shape, seed=9) + (last_log if name in last else -6)
        for name, mean in trained.items()
        if method.body != "certain" or name in last
    }
    means = {name: mean + 0.05 * normals(*mean.shape, seed=8) for name, mean in trained.items()}
    field = MeanField(means, logs, method.train_mean)
    given = likelihood or Categorical(), samples, context or Fixed(points)
    return FunctionSpaceObjective(method, network, field, *given, trained), field


def drawn(objective: FunctionSpaceObjective, seed: int = 7) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Standard normals of the body, and the deviations that they give, by autograd."""
    field, last = objective.field, objective.feature_network.last.parameter_names
    generator = torch.Generator().manual_seed(seed)
    found = {n: torch.randn(m.shape, generator=generator, dtype=F64) for n, m in field.means.items()}
    body = {n: e for n, e in found.items() if n not in last and n in field.log_variances}
    return body, {n: (0.5 * field.log_variances[n]).exp() * e for n, e in body.items()}


# Divergences


@pytest.mark.parametrize("outputs", [2, 9])
@pytest.mark.parametrize("biased", [True, False])
def test_last_layer_covariance_of_few_and_of_many_outputs(outputs: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(outputs)
    features = torch.randn(2, 3, 4, generator=generator, dtype=F64, requires_grad=True)
    weights = torch.rand(outputs, 4, generator=generator, dtype=F64, requires_grad=True)
    bias = torch.rand(outputs, generator=generator, dtype=F64, requires_grad=True) if biased else None
    found = last_layer_covariance(features, weights, bias)
    assert found.shape == (2, outputs, 3, 3)
    for s in range(2):
        for q in range(outputs):
            for k in range(3):
                for l in range(3):
                    expected = sum(features[s, k, h] * weights[q, h] * features[s, l, h] for h in range(4))
                    expected = expected + (0 if bias is None else bias[q])
                    assert abs(float(found[s, q, k, l] - expected)) < 1e-13
    inputs = (features, weights) if bias is None else (features, weights, bias)
    assert torch.autograd.gradcheck(last_layer_covariance, inputs)


@pytest.mark.parametrize("sets", [1, 3])
def test_many_sets_and_priors_of_their_own(sets: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    mean, prior_mean = draw(sets, 2, 4), draw(sets, 2, 4)
    roots = draw(2, sets, 2, 4, 6)
    covariance, prior = (r @ r.transpose(-1, -2) for r in roots)
    found = gaussian_kl(mean, covariance, prior_mean, prior, 0.0)
    assert found.total.shape == (sets,)
    for index in range(sets):
        expected = sum(
            dense_kl(mean[index, q], covariance[index, q], prior_mean[index, q], prior[index, q])
            for q in range(2)
        )
        assert float(found.total[index]) == pytest.approx(expected, rel=1e-8)
        precision = torch.linalg.inv(prior[index])
        distance = (mean - prior_mean)[index]
        parts = 0.5 * torch.einsum("qi,qij,qj->", distance, precision, distance)
        assert float(found.mean_part[index]) == pytest.approx(float(parts), rel=1e-8)


def test_noise_grows_until_there_is_a_factor() -> None:
    ones = torch.ones(1, 20, 20, dtype=F64)
    indefinite = ones - 3e-5 * torch.eye(20, dtype=F64)  # not positive definite at 1e-6 nor 1e-5
    mean = torch.zeros(1, 20, dtype=F64)
    found = gaussian_kl(mean, indefinite, mean, ones, 1e-6)
    assert float(found.function_noise) == pytest.approx(1e-4)
    with pytest.raises(NonFiniteError, match="larger function_noise"):
        gaussian_kl(mean, ones - 3 * torch.eye(20, dtype=F64), mean, ones, 1e-6)
    with pytest.raises(NonFiniteError, match="is not finite"):
        gaussian_kl(mean, ones * float("nan"), mean, ones, 1e-6)
    prior = torch.stack([torch.diag(torch.tensor([1.0, 3.0])), torch.diag(torch.tensor([10.0, 30.0]))])
    assert relative_function_noise(prior[:, None], 0.1).flatten().tolist() == pytest.approx([0.2, 2.0])


def test_gradient_of_the_divergence() -> None:
    means, features, weights, bias = normals(2, 3), normals(3, 2), normals(2, 2).exp(), normals(2).exp()
    prior = last_layer_covariance(features, torch.ones(1, 2, dtype=F64), torch.ones(1, dtype=F64))

    def divergence(mean: Tensor, features: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        covariance = last_layer_covariance(features, weights, bias)
        return gaussian_kl(mean, covariance, torch.zeros_like(mean), prior, 1e-3).total

    inputs = tuple(t.clone().requires_grad_() for t in (means, features, weights, bias))
    assert torch.autograd.gradcheck(divergence, inputs)


def test_the_divergence_of_independent_values() -> None:
    """By the formula; values that no weight moves, as of a black image, have a large one and no gradient."""
    mean, prior_mean, variances = normals(2, 4, 3, seed=1), normals(2, 4, 3, seed=2), normals(2, 4, 3).exp()
    found, ratio = marginal_kl(mean, variances, prior_mean, 10.0), variances / 10
    torch.testing.assert_close(found.mean_part, ((mean - prior_mean).square() / 20).sum((1, 2)))
    torch.testing.assert_close(found.covariance_part, ((ratio - 1 - ratio.log()) / 2).sum((1, 2)))
    still = torch.tensor([0.0, 4.0], dtype=F64).reshape(1, 2, 1).expand(1, 2, 3).clone().requires_grad_()
    zero = torch.zeros(1, 2, 3, dtype=F64)
    divergence = marginal_kl(zero, still, zero, 10.0).total.sum()
    divergence.backward()
    assert 30 < float(divergence.detach()) < 1e3 and still.grad is not None
    assert bool((still.grad[0, 0] == 0).all()) and bool((still.grad[0, 1] < 0).all())


def test_a_mixture_of_draws_by_its_density() -> None:
    """Equation 14: the divergence of the mixture by torch's densities; the estimate's mean is that, and it is exact in
    its own values.
    """
    sets, components, outputs, inputs = 4000, 3, 2, 2
    means = 0.6 * normals(components, outputs, inputs, seed=1)
    covariance, prior = torch.eye(2, dtype=F64) * 0.3 + 0.1, torch.eye(2, dtype=F64) * 1.5 + 0.4
    noise = 0.05 * torch.eye(2, dtype=F64)
    values = normals(components, sets, outputs, inputs, seed=2)
    found = gaussian_kl(
        means.unsqueeze(1).expand(-1, sets, -1, -1),
        covariance.expand(sets, outputs, 2, 2),
        torch.zeros(sets, outputs, inputs, dtype=F64),
        prior.expand(sets, 1, 2, 2),
        0.05,
        values,
    )
    whole = [torch.block_diag(*[each + noise] * outputs) for each in (covariance, prior)]
    parts = MultivariateNormal(means.flatten(1), whole[0])
    mixture = MixtureSameFamily(Choice(torch.ones(components, dtype=F64)), parts)
    p = MultivariateNormal(torch.zeros(4, dtype=F64), whole[1])
    apart = kl_divergence(parts, p).mean()
    drawn_values = means.flatten(1).unsqueeze(1) + values.flatten(2) @ torch.linalg.cholesky(whole[0]).T
    own = MultivariateNormal(means.flatten(1).unsqueeze(1), whole[0]).log_prob(drawn_values)
    information = (own - mixture.log_prob(drawn_values)).mean(0)
    torch.testing.assert_close(found.total, apart - information)
    torch.manual_seed(0)
    points = mixture.sample((100_000,))
    by_density = (mixture.log_prob(points) - p.log_prob(points)).mean()
    assert float(found.total.mean()) == pytest.approx(float(by_density), abs=0.02)
    assert float(by_density) < float(apart) - 0.2

    flat = [each.permute(0, 1, 3, 2) for each in (means.unsqueeze(1).expand(-1, sets, -1, -1), values)]
    single = marginal_kl(flat[0], torch.full((sets, 2, 2), 0.4, dtype=F64), 0 * flat[0][0], 1.9, flat[1])
    expected = 0.0
    for value in means.flatten(1).T:  # every function value is a mixture of its own
        one = Normal(value, 0.4**0.5)
        mixed, grid = (
            MixtureSameFamily(Choice(torch.ones(3, dtype=F64)), one),
            torch.linspace(-9, 9, 9001, dtype=F64),
        )
        log_q, log_p = mixed.log_prob(grid), Normal(0.0, 1.9**0.5).log_prob(grid)
        expected += float(torch.trapezoid(log_q.exp() * (log_q - log_p), grid))
    assert float(single.total.mean()) == pytest.approx(expected, abs=0.02)


# The objective


def test_divergence_against_dense_jacobians() -> None:
    """Mean and covariance of both sides from the Jacobian of the whole network, and the dense divergence of all outputs
    together, with the body's draw put in by hand.
    """
    net = random_net(3, 6, 5, 4)
    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    objective, field = objective_of(net, points, prior_precision=0.7)
    normals, deviations = drawn(objective)
    found, _ = objective.divergence(Batch((points,)), deviations)

    def jacobian(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = {name: w.detach() for name, w in weights.items()}
        return jacrev(lambda w: functional_call(net, w, (points,)).flatten())(plain)

    at_mean, at_prior = jacobian(field.means), jacobian(dict(net.named_parameters()))
    shift = sum(
        at_mean[n].flatten(1) @ ((0.5 * field.log_variances[n]).exp() * normals[n]).detach().flatten()
        for n in normals
    )
    at_means = {name: mean.detach() for name, mean in field.means.items()}
    mean = functional_call(net, at_means, (points,)).flatten() + shift
    covariance, prior = torch.zeros(20, 20, dtype=F64), torch.zeros(20, 20, dtype=F64)
    for name in ("4.weight", "4.bias"):
        rows = at_mean[name].flatten(1)
        covariance += rows @ field.log_variances[name].detach().exp().flatten().diag() @ rows.T
        rows = at_prior[name].flatten(1)
        prior += rows @ rows.T / 0.7
    # Rows are (point, output): different outputs do not covary.
    blocks = covariance.reshape(5, 4, 5, 4)
    for q in range(4):
        for r in range(4):
            assert q == r or float(blocks[:, q, :, r].abs().max()) == 0.0
    noise = 1e-6 * float(prior.diagonal().mean()) * torch.eye(20, dtype=F64)
    expected = dense_kl(mean, covariance + noise, torch.zeros(20), prior + noise)
    assert float(found.total) == pytest.approx(expected, rel=1e-8)


def test_divergence_of_several_draws_by_jacobians() -> None:
    """Each draw moves the mean by its own ``J_body (sigma o e)``; the values of the mixture are those of the seed."""
    net, points = random_net(3, 5, 2), normals(4, 3, seed=2)
    objective, field = objective_of(net, points, n_body_draws=3, function_noise=1e-2)
    draws = [drawn(objective, seed=s)[1] for s in (7, 8, 9)]
    found, _ = objective.divergence(Batch((points,)), *draws, generator=torch.Generator().manual_seed(3))
    single = [objective.divergence(Batch((points,)), draw)[0] for draw in draws]
    at_means = {name: mean.detach() for name, mean in field.means.items()}
    jacobian = jacrev(lambda w: functional_call(net, w, (points,)).flatten())(at_means)
    means = torch.stack(
        [
            functional_call(net, at_means, (points,)).flatten()
            + sum(jacobian[n].flatten(1) @ d.detach().flatten() for n, d in draw.items())
            for draw in draws
        ]
    )
    covariance = torch.zeros(8, 8, dtype=F64)
    for name in objective.feature_network.last.parameter_names:
        rows = jacobian[name].flatten(1)
        covariance += rows @ field.log_variances[name].detach().exp().flatten().diag() @ rows.T
    covariance += float(found.function_noise) * torch.eye(8, dtype=F64)
    order = torch.arange(8).reshape(4, 2).T.flatten()  # one output after the other
    means, covariance = means[:, order], covariance[order][:, order]
    values = (
        torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(3), dtype=F64).transpose(1, 2).flatten(1)
    )
    values = means + values @ torch.linalg.cholesky(covariance).T
    parts = MultivariateNormal(means, covariance)
    mixture = MixtureSameFamily(Choice(torch.ones(3, dtype=F64)), parts)
    information = (parts.log_prob(values) - mixture.log_prob(values)).mean()
    expected = sum(float(each.total) for each in single) / 3 - float(information)
    assert float(found.total) == pytest.approx(expected, rel=1e-8)
    assert 0.01 < float(information) < np.log(3)


@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_divergence_from_an_independent_prior_by_jacobians(prior_mean: str) -> None:
    net, points = random_net(2, 4, 3), normals(5, 2, seed=3)
    options: dict[str, Any] = {"prior": "independent", "prior_variance": 2.5, "prior_mean": prior_mean}
    objective, field = objective_of(net, points, **options)
    body = {name: 0.1 * normals(*field.means[name].shape, seed=4) for name in ("0.weight", "0.bias")}
    found, chosen = objective.divergence(Batch((points,)), body)
    weights = {name: mean.detach() for name, mean in field.means.items()}
    jacobian = jacrev(lambda w: functional_call(net, w, (points,)))(weights)
    mean = functional_call(net, weights, (points,))
    for name, deviation in body.items():
        mean = mean + jacobian[name].flatten(2) @ deviation.flatten()
    variance = torch.zeros(5, 3, dtype=F64)
    for name in ("2.weight", "2.bias"):
        variance += jacobian[name].flatten(2).square() @ field.log_variances[name].detach().exp().flatten()
    with torch.no_grad():
        trained_mean = net(points) if prior_mean == "pretrained" else torch.zeros(5, 3, dtype=F64)
    expected = kl_divergence(Normal(mean, variance.sqrt()), Normal(trained_mean, 2.5**0.5)).sum()
    assert float(found.total.detach()) == pytest.approx(float(expected), rel=1e-12) and int(chosen) == 0


@pytest.mark.parametrize("body", ["linearized", "sample"])
@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_gradient_of_the_whole_divergence(body: str, prior_mean: str) -> None:
    net = random_net(2, 4, 3)
    points = torch.randn(4, 2, generator=torch.Generator().manual_seed(5), dtype=F64)
    objective, field = objective_of(net, points, body=body, prior_mean=prior_mean, function_noise=1e-3)
    names = list(field.means)
    own = field.means, field.log_variances

    def divergence(*values: Tensor) -> Tensor:
        field.means = dict(zip(names, values[: len(names)], strict=True))
        field.log_variances = dict(zip(names, values[len(names) :], strict=True))
        return objective.divergence(Batch((points,)), drawn(objective)[1])[0].total[0]

    values = [t.detach().clone().requires_grad_() for part in own for t in part.values()]
    assert torch.autograd.gradcheck(divergence, values, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"n_draws": 2},
        {"n_draws": 2, "train_mean": False, "body": "sample"},
        {"n_body_draws": 3},
        {"prior": "independent", "divergence_weight": 7.5, "n_body_draws": 2},
        {"prior": "independent", "divergence_weight": 1.0, "body": "certain"},
    ],
)
def test_the_step_adds_up(options: dict[str, Any]) -> None:
    """Gradients of a step are those of ``-log p / B / M + w KL / N``, by autograd through it all at once."""
    net, points = random_net(2, 4, 3), normals(4, 2, seed=5)
    x, y = normals(6, 2, seed=6), torch.tensor([0, 1, 2, 0, 1, 2])
    objective, field = objective_of(net, points, **options)
    terms = objective.backward(Batch((x,), y), Step(4), DeferredChecks())
    found = {name: t.grad.clone() for name, t in objective.tensors().items()}
    generator, draws = objective.generator(4, 1), options.get("n_draws", 1)
    fit, deviations = 0.0, dict[str, Tensor]()
    for _ in range(draws):
        for name, value in field.log_variances.items():
            deviations[name] = torch.randn(value.shape, generator=generator, dtype=F64) * (0.5 * value).exp()
        weights = {name: mean + deviations.get(name, 0.0) for name, mean in field.means.items()}
        fit = fit - nn.functional.cross_entropy(functional_call(net, weights, (x,)), y) / draws
    last = objective.feature_network.last.parameter_names
    bodies = [{name: d for name, d in deviations.items() if name not in last}]
    for _ in range(options.get("n_body_draws", 1) - 1):
        more = {
            name: torch.randn(value.shape, generator=generator, dtype=F64) * (0.5 * value).exp()
            for name, value in field.log_variances.items()
        }
        bodies.append({name: d for name, d in more.items() if name not in last})
    divergence = objective.divergence(Batch((points,)), *bodies, generator=objective.generator(4, 4))[0]
    loss = divergence.total[0] * options.get("divergence_weight", 1.0) / 40 - fit
    expected = torch.autograd.grad(loss, list(objective.tensors().values()))
    assert any(name.startswith("mean") for name in found) == objective.method.train_mean
    assert len(found) == (6 if options.get("body") == "certain" else 8 if objective.method.train_mean else 4)
    for gradient, own in zip(expected, found.values(), strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-10, atol=1e-13)
    assert float(terms["loss"]) == pytest.approx(float(loss), rel=1e-10)
    assert float(terms["log likelihood"]) == pytest.approx(float(fit), rel=1e-10)
    total = float(terms["KL mean part"] + terms["KL covariance part"])
    assert total == pytest.approx(float(divergence.total[0]), rel=1e-10)


def test_the_largest_of_several_sets_counts() -> None:
    net = random_net(2, 5, 2)
    sets = [
        torch.randn(3, 2, generator=torch.Generator().manual_seed(s), dtype=F64) * (1 + s) for s in range(3)
    ]
    joined = torch.cat(sets)
    several, field = objective_of(net, joined, n_sets=3, n_context=3, context=Fixed(*sets))
    deviations = field.deviations(several.generator(2, 1))
    body = {name: d for name, d in deviations.items() if not name.startswith("2")}
    found, chosen = several.divergence(Batch((joined,)), body)
    alone = []
    for points in sets:
        single, own = objective_of(net, points)
        own.means, own.log_variances = field.means, field.log_variances
        alone.append(float(single.divergence(Batch((points,)), body)[0].total[0]))
    assert found.total.tolist() == pytest.approx(alone, rel=1e-9)
    assert chosen == int(np.argmax(alone))
    x, y = joined[:4], torch.tensor([0, 1, 0, 1])
    terms = several.backward(Batch((x,), y), Step(2), DeferredChecks())
    assert float(terms["KL mean part"] + terms["KL covariance part"]) == pytest.approx(max(alone), rel=1e-9)


def test_every_tensor_has_noise_of_its_own() -> None:
    """Tensors of one shape do not share their draw, and neither do two draws."""
    field = MeanField(
        {name: torch.zeros(50, dtype=F64) for name in "ab"},
        {name: torch.zeros(50, dtype=F64) for name in "ab"},
        True,
    )
    generator = torch.Generator().manual_seed(0)
    first, second = field.sample(generator), field.sample(generator)
    draws = torch.stack([first["a"], first["b"], second["a"], second["b"]]).detach()
    correlations = torch.corrcoef(draws) - torch.eye(4, dtype=F64)
    assert float(correlations.abs().max()) < 0.5


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(Categorical(), 3), (Bernoulli(), 1), (Gaussian(0.3), 2), (Gaussian([0.3, 0.6]), 2)],
)
def test_predictive_of_held_out_data(likelihood: Likelihood, outputs: int) -> None:
    """``log mean_s p(y | x, w_s)`` with the draws made by hand."""
    net = random_net(2, 4, outputs)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(8), dtype=F64)
    y = (
        torch.randn(5, outputs, dtype=F64)
        if isinstance(likelihood, Gaussian)
        else torch.randint(0, min(outputs + 1, 2), (5,))
    )
    objective, field = objective_of(net, x, likelihood=likelihood, last_log=-1.0)
    found = objective.log_predictive(Batch((x,), y), 4)
    probabilities = []
    for draw in range(4):
        weights = field.sample(objective.generator(0, 3, draw))
        made = functional_call(net, weights, (x,)).detach()
        if isinstance(likelihood, Categorical):
            own = torch.distributions.Categorical(logits=made).log_prob(y)
        elif isinstance(likelihood, Bernoulli):
            own = torch.distributions.Bernoulli(logits=made[:, 0]).log_prob(y.double())
        else:
            own = torch.distributions.Normal(made, likelihood.noise_variance.sqrt()).log_prob(y).sum(1)
        probabilities.append(own.exp())
    torch.testing.assert_close(
        found.detach(), torch.stack(probabilities).mean(0).log(), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("train_mean", [True, False])
def test_a_backward_pass_carries_gradients_over_and_lets_go(train_mean: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random() -> dict[str, Tensor]:
        return {n: torch.randn(3, 2, generator=generator, dtype=torch.float64) for n in ("a", "b", "unused")}

    means, logs = random(), random()
    field = MeanField(
        {n: t.clone() for n, t in means.items()}, {n: t.clone() for n, t in logs.items()}, train_mean
    )
    deviations = field.deviations(generator)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return (weights["a"] ** 3 * weights["b"]).sum() + weights["a"].sin().sum()

    weights = {n: (mean + deviations[n]).requires_grad_() for n, mean in means.items()}
    kept = dict(weights)
    field.on_backward(weights, deviations, mean=True)
    loss(weights).backward()
    assert list(weights) == ["unused"] and {n: t.numel() for n, t in kept.items()} == {
        "a": 0,
        "b": 0,
        "unused": 6,
    }
    normals = {n: deviation / (0.5 * logs[n]).exp() for n, deviation in deviations.items()}
    leaves = [t.requires_grad_() for pair in (means, logs) for t in (pair["a"], pair["b"])]
    loss({n: means[n] + (0.5 * logs[n]).exp() * normals[n] for n in means}).backward()
    found = [t for pair in (field.means, field.log_variances) for t in (pair["a"], pair["b"])]
    for index, (own, expected) in enumerate(zip(found, leaves, strict=True)):
        if index < 2 and not train_mean:
            assert own.grad is None
        else:
            torch.testing.assert_close(own.grad, expected.grad, rtol=1e-12, atol=1e-14)


# Which layer is the last


class Head(nn.Module):
    """A network of images with one of several heads."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.body, self.kind = nn.Conv2d(1, 4, 3), head
        self.head = nn.Conv2d(4, 3, 1) if head == "conv" else nn.Linear(4, 3, bias=head != "no bias")

    def forward(self, x: Tensor) -> Any:
        pooled = self.body(x).relu().mean((2, 3))
        if self.kind == "conv":
            return self.head(pooled[:, :, None, None]).flatten(1)
        outputs = self.head(pooled)
        if self.kind == "softmax":
            return outputs.log_softmax(1)
        return {"logits": outputs} if self.kind == "dict" else outputs


@pytest.mark.parametrize("head", ["plain", "no bias", "conv", "dict"])
def test_last_layer_is_found(head: str) -> None:
    torch.manual_seed(0)
    net = Head(head).eval()
    x = torch.randn(3, 1, 6, 6)
    network = FeatureNetwork(replicate(net), layers_of(net), Batch((x,)))
    outputs, features = network(dict(net.named_parameters()), Batch((x,)))
    assert network.last.name == "head" and features.shape == (3, 4)
    torch.testing.assert_close(
        outputs, features @ net.head.weight.flatten(1).T + (0 if net.head.bias is None else net.head.bias)
    )


# The diagnostic of any posterior


@pytest.mark.parametrize("method", ["diag", "full"])
@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_diagnostic_against_dense_jacobians(method: str, prior_mean: str) -> None:
    net, y = random_net(2, 2, 2), torch.tensor([0, 1, 0])
    points = normals(3, 2, seed=1)
    posterior = uq.fit(net, [(points, y)], method=method, fisher="exact", prior_precision=0.8, progress=False)
    found = function_space_kl(posterior, points[:2], prior_mean=prior_mean, prior_precision=0.5)
    jacobians = jacrev(lambda w: functional_call(net, w, (points[:2],)).flatten())(
        {n: p.detach() for n, p in net.named_parameters()}
    )
    rows, by_layer = [], {}
    for name, layer in posterior.layers.items():
        matrix = layer.to_matrix(jacobians[layer.weight], jacobians[layer.bias])
        by_layer[name] = matrix
        rows.append(matrix.flatten(1))
    covariance = posterior.quadratic(by_layer).double()
    jacobian = torch.cat(rows, dim=1)
    prior = jacobian @ jacobian.T / 0.5
    outputs = net(points[:2]).detach().flatten()
    noise = 1e-6 * float(prior.diagonal().mean()) * torch.eye(4, dtype=F64)
    trained_mean = outputs if prior_mean == "pretrained" else torch.zeros(4, dtype=F64)
    expected = dense_kl(outputs, covariance + noise, trained_mean, prior + noise)
    assert float(found.total) == pytest.approx(expected, rel=1e-5)


# Fits


def net(outputs: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten()]
        found = nn.Sequential(
            *layers, nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, outputs)
        ).to(dtype)
        found.train()
        found(torch.randn(30, 1, 6, 6, dtype=dtype))  # running statistics
    return found.eval()


def batches(targets: str = "classes", samples: int = 32, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 1, 6, 6, generator=generator, dtype=dtype)
    y = {
        "classes": torch.randint(0, 3, (samples,), generator=generator),
        "binary": torch.randint(0, 2, (samples,), generator=generator),
        "numbers": torch.randn(samples, 2, generator=generator, dtype=dtype),
    }[targets]
    return list(zip(x.split(8), y.split(8), strict=True))


def fitted(model: nn.Module, **given: Any) -> uq.Posterior:
    settings: dict[str, Any] = {"epochs": 2, "n_context": 6, "lr": 1e-2, "log_variance_lr": 0.1}
    settings |= {"initial_body_log_variance": -6.0, "progress": False}
    data = given.pop("loader", None) or batches()
    return uq.fit(model, data, method="function_space", **(settings | given))


def probe(samples: int = 5) -> Tensor:
    return torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(9))


def test_variances_stay_as_they_were_trained_where_no_faithful_posterior_is_asked_for() -> None:
    """A larger scale is a colder posterior."""
    model = net()
    trained, narrowed = fitted(model, divergence=None), fitted(model, divergence=1e-6)
    assert (trained.scale, trained.temperature) == (32, 1.0)
    assert narrowed.scale > 10 * trained.scale
    for name, variance in trained.variance().items():
        torch.testing.assert_close(variance, narrowed.variance()[name] * (narrowed.scale / 32))
    assert trained.history.head.name == "sampling" and not trained.history.faithful


def test_frozen_mean_leaves_predictions_at_the_mean_untouched() -> None:
    model = net()
    posterior = fitted(model, train_mean=False)
    assert not posterior.trained_mean and posterior.report().summary["mean"] == "frozen"
    own = dict(model.named_parameters())
    assert all(mean.data_ptr() == own[name].data_ptr() for name, mean in posterior.mean.items())
    head = uq.wrap(model, posterior, "linearized")
    assert torch.equal(head.functional_mean(probe()), model(probe()))
    start = {f"{layer}.weight": value for layer, value in (("0", -6.0), ("5", -6.0), ("8", -5.0))}
    moved = posterior.variance()
    assert all(float((moved[n].log() - s).abs().max()) > 0.1 for n, s in start.items())


@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_a_prior_at_the_means_is_that_of_a_pass_of_its_own(prior_mean: str) -> None:
    """With a frozen mean the prior's outputs and features are taken from the posterior's pass."""
    net, points = random_net(2, 4, 3), normals(4, 2, seed=5)
    found = []
    for train_mean in (False, True):
        objective, field = objective_of(net, points, train_mean=train_mean, prior_mean=prior_mean)
        field.means = {name: p.detach() for name, p in net.named_parameters()}
        found.append(objective.divergence(Batch((points,)), drawn(objective)[1])[0].total)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_context_of_the_users_touches_nothing(fails: bool) -> None:
    """The model's numbers and flags, and the global random states, also where the context raises."""
    model = net()
    model.train()
    model[1].eval()
    state, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]

    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    def context(n: int, generator: torch.Generator) -> Tensor:
        torch.rand(3), random.random(), np.random.rand()
        if fails:
            raise KeyError("a context of the user's")
        return torch.randn(n, 1, 6, 6, generator=generator)

    before = states()
    if fails:
        with pytest.raises(KeyError):
            fitted(model, context=context)
    else:
        fitted(model, context=context)
    assert states() == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_every_head_predicts_around_the_trained_mean() -> None:
    """Means and variances of the heads against the trained parameters put into the model by hand."""
    model = net(dtype=torch.float64)
    x = probe().double()
    posterior = fitted(model, loader=batches(dtype=torch.float64))
    assert any(not torch.equal(mean, posterior.original[name]) for name, mean in posterior.mean.items())
    moved = functional_call(copy.deepcopy(model), posterior.mean, (x,)).detach()
    assert float((moved - model(x).detach()).abs().max()) > 1e-3
    linearized = uq.wrap(model, posterior, "linearized")
    torch.testing.assert_close(linearized.functional_mean(x), moved)
    jacobians = jacrev(lambda w: functional_call(model, w, (x,)))(posterior.mean)
    variances = posterior.variance()
    expected = sum((j.square() * variances[n]).flatten(2).sum(2) for n, j in jacobians.items())
    torch.testing.assert_close(linearized.functional_variance(x), expected.detach())
    probes = uq.wrap(model, posterior, "linearized", engine="jvp", n_probes=4)
    torch.testing.assert_close(probes.functional_mean(x), moved)
    draws = posterior.sample(3, torch.Generator().manual_seed(0))
    sampling = uq.wrap(model, posterior, n_samples=3)
    by_hand = torch.stack(
        [functional_call(model, {n: d[i] for n, d in draws.items()}, (x,)) for i in range(3)]
    )
    torch.testing.assert_close(sampling.outputs(x), by_hand)
    quiet = copy.deepcopy(posterior)
    for block in quiet.blocks.values():
        block.variances.zero_()
    torch.testing.assert_close(uq.wrap(model, quiet, "moments").functional_mean(x), moved)
    torch.testing.assert_close(uq.wrap(model, quiet).outputs(x)[0], moved)


def test_its_prior_precision_is_that_of_the_training() -> None:
    posterior = fitted(net(), prior_precision=2.0)
    assert posterior.prior_precision == 2.0
    posterior.with_settings(prior_precision=2.0)  # what it is already


@pytest.mark.parametrize("layers", ["last", ["5", "8"]])
def test_chosen_layers_alone_are_variational(layers: Any) -> None:
    model = net()
    posterior = fitted(model, layers=layers)
    chosen = ["8"] if layers == "last" else layers
    assert list(posterior.layers) == chosen
    assert set(posterior.trained_mean) == {f"{name}.{part}" for name in chosen for part in ("weight", "bias")}
    head = uq.wrap(model, posterior, "linearized", engine="auto" if layers == "last" else "exact")
    assert bool((head.functional_variance(probe()) > 0).all())


@pytest.mark.filterwarnings("ignore:At the prior precision")
@pytest.mark.parametrize("method", ["inf", "kfac", "function_space"])
def test_initial_variances_of_a_fitted_posterior(method: str) -> None:
    """Without a step that matters, the variances are those that the training began from."""
    model = net()
    if method == "function_space":
        start = fitted(model, divergence=None)
    else:
        start = uq.fit(model, batches(), method=method, prior_precision="evidence", progress=False)
    found = fitted(model, initial=start, epochs=1, lr=1e-9, log_variance_lr=1e-9, divergence=None)
    for name, variance in found.variance().items():
        torch.testing.assert_close(variance, start.variance()[name], rtol=1e-4, atol=0)
        torch.testing.assert_close(found.mean[name], start.mean[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"prior_mean": "random_init", "body": "sample", "n_sets": 2},
        {"prior_mean": "pretrained", "n_draws": 2},
        {"prior": "independent", "prior_mean": "random_init"},
    ],
)
def test_priors_and_bodies_train(options: dict[str, Any]) -> None:
    posterior = fitted(net(), **options)
    assert all(bool((v > 0).all()) for v in posterior.variance().values())


@pytest.mark.parametrize("prior", ["features", "independent"])
def test_a_certain_body_is_trained_and_has_no_variance(prior: str) -> None:
    model = net()
    certain = {"body": "certain", "initial_body_log_variance": -20.0, "divergence": None}
    posterior = fitted(model, prior=prior, **certain)
    for name, variance in posterior.variance().items():
        assert bool((variance > 0).all()) if name.startswith("8") else not bool(variance.any())
    original = dict(model.named_parameters())
    assert all(not torch.equal(mean, original[name]) for name, mean in posterior.trained_mean.items())
    for head in ("sampling", "linearized", "moments"):
        assert bool(torch.isfinite(uq.wrap(model, posterior, head)(probe()).probs).all())
    still = fitted(model, initial=posterior, lr=1e-9, log_variance_lr=1e-9, **certain)
    torch.testing.assert_close(still.variance(), posterior.variance(), rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore:A prior by features at")
@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 1 / 32),
        ({"divergence_weight": 3}, 3 / 32),
        ({"divergence_weight": "minibatch"}, 1 / 8),
        ({"prior": "independent"}, 1 / 8),
        ({"prior": "independent", "divergence_weight": 0.5}, 0.5 / 32),
        ({"prior": "independent", "divergence_weight": "minibatch", "prior_variance": 2}, 1 / 8),
    ],
)
def test_the_divergence_enters_the_loss_with_its_weight(given: dict[str, Any], share: float) -> None:
    told = fitted(net(), n_context=4, **given).history.fit
    for loss, fit, mean, covariance in zip(
        *(told[name] for name in ("loss", "log likelihood", "KL mean part", "KL covariance part")),
        strict=True,
    ):
        assert loss == pytest.approx(-fit + share * (mean + covariance), rel=1e-5)
    assert told["divergence weight"] == pytest.approx(share * 32)
    if "prior" in given:
        assert told["prior variance"] == given.get("prior_variance", 10.0) and "function noise" not in told


def test_combinations_that_are_known_to_fail_warn() -> None:
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))
    many = list(zip(x[:12].split(1), y[:12].split(1), strict=True))
    with pytest.warns(UserWarning, match=r"An independent prior at divergence_weight=1 says next to nothing"):
        fitted(net(), loader=many, prior="independent", divergence_weight=1, epochs=1)
    for weight in ("minibatch", 12.0):
        with pytest.warns(
            UserWarning, match=r"A prior by features at divergence_weight=12 and function_noise=1e-06"
        ):
            fitted(net(), loader=many, divergence_weight=weight, n_context=4, epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="An? (independent )?prior")
        fitted(net(), loader=many, prior="independent", epochs=1)
        fitted(net(), loader=many, n_context=4, epochs=1)
        fitted(net(), loader=many, n_context=4, epochs=1, divergence_weight="minibatch", function_noise=0.1)
        fitted(net(), prior="independent", divergence_weight=1, epochs=1)  # no more than four batches


@pytest.mark.parametrize(
    ("given", "points"),
    [
        ({"n_context": None}, 9),  # 8 features and a bias, where 32 is the default otherwise
        ({"n_context": None, "prior": "independent"}, 16),
        ({"n_context": None, "context": [(1, "batch"), (4, "corrupted")]}, 5),
        ({"context": [(1, "batch"), (4, "corrupted")]}, 6),
        ({"n_context": None, "context": [(0.5, "batch"), (0.5, "corrupted")]}, 9),
        ({"n_context": None, "prior": "independent", "context": [(2, "batch"), (20, "corrupted")]}, 22),
    ],
)
def test_the_number_of_context_points(given: dict[str, Any], points: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="n_context")
        assert fitted(net(), epochs=1, **given).history.fit["n_context"] == points


def test_more_points_than_dimensions_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"n_context=10 is more than the 9 dimensions"):
        fitted(net(), n_context=10, epochs=1)


def test_a_training_of_too_few_steps_says_so() -> None:
    for schedule, reach in ((None, "0.0042"), (lambda progress: 1.0, "0.008")):
        with pytest.warns(
            UserWarning, match=f"8 steps at log_variance_lr=0.001 move a log variance by {reach} at most"
        ):
            fitted(net(), log_variance_lr=1e-3, schedule=schedule)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*steps at log_variance_lr")
        fitted(net(), log_variance_lr=0.1)


def test_more_noise_than_was_asked_for_is_said_once() -> None:
    alike = torch.ones(5, 1, 6, 6)
    with pytest.warns(UserWarning, match="no Cholesky factor at function_noise=3e-17") as caught:
        fitted(
            net(dtype=torch.float64),
            loader=batches(dtype=torch.float64),
            context=alike,
            function_noise=3e-17,
            n_context=5,
        )
    assert sum("no Cholesky factor" in str(one.message) for one in caught) == 1


def regression_data(samples: int = 200) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 2, generator=generator)
    y = torch.stack([x[:, 0], x[:, 1]], 1) + torch.tensor([0.1, 0.5]) * torch.randn(
        samples, 2, generator=generator
    )
    return list(zip(x.split(20), y.split(20), strict=True))


def test_the_noise_can_be_learned() -> None:
    """From ten times too much it comes close to the residuals' variance, output by output."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    data = regression_data()
    residuals = torch.cat([model(x) - y for x, y in data]).square().mean(0).detach()
    settings: dict[str, Any] = {"loader": data, "likelihood": "regression", "n_context": 3, "epochs": 20}
    learned = fitted(model, noise_variance=residuals * 10, learn_noise=True, layers="last", **settings)
    torch.testing.assert_close(learned.noise_variance.float(), residuals, rtol=0.3, atol=0)
    assert learned.history.tuning["noise variance"] == "learned with the posterior"
    before = learned.variance()
    learned = learned.with_settings(noise_scale=4.0)  # of the predictive alone
    assert all(torch.equal(v, before[n]) for n, v in learned.variance().items())


def test_uncertainty_grows_where_the_context_is() -> None:
    """Two clouds of points, and a box far around them: entropy rises there, and decisions on the data stay."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(160) % 2
    x = torch.randn(160, 2, generator=generator) * 0.5 + torch.stack([2.0 * y - 1, 0.0 * y], 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        optimiser = torch.optim.Adam(model.parameters(), 2e-2)
        for _ in range(200):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    posterior = uq.fit(
        model.eval(),
        list(zip(x.split(40), y.split(40), strict=True)),
        method="function_space",
        context=UniformBox(-8.0, 8.0),
        n_context=16,
        epochs=60,
        lr=1e-2,
        log_variance_lr=3e-2,
        progress=False,
    )
    far = torch.tensor([[6, 6], [-6, 6], [-6, -6], [6, -6], [0, 8], [0, -8.0]])
    head = uq.wrap(model, posterior)

    def entropy(probs: Tensor) -> float:
        return float(torch.distributions.Categorical(probs=probs).entropy().mean().detach())

    assert entropy(head(far).probs) > 5 * entropy(model(far).softmax(1))
    assert entropy(head(far).probs) > 2 * entropy(head(x).probs)
    assert torch.equal(head(x).probs.argmax(1), model(x).argmax(1))


def test_a_vision_transformer() -> None:
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    data = [(x[:2], torch.tensor([0, 1])), (x[2:], torch.tensor([2, 3]))]
    posterior = fitted(model, loader=data, epochs=1, n_context=4, divergence=None)
    assert all(bool(torch.isfinite(v).all()) for v in posterior.variance().values())
    assert all(not torch.equal(mean, posterior.original[n]) for n, mean in posterior.mean.items())
    assert bool(torch.isfinite(uq.wrap(model, posterior, n_samples=2)(x).probs).all())


def test_inputs_of_several_parts_by_a_callable() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(2, 8), nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.out((self.first(a) + self.second(b)).tanh())

    torch.manual_seed(0)
    model = Two().eval()
    data = [
        {"a": torch.randn(6, 2), "b": torch.randn(6, 3), "labels": torch.randint(0, 2, (6,))}
        for _ in range(3)
    ]

    def context(n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"a": torch.randn(n, 2, generator=generator), "b": torch.randn(n, 3, generator=generator)}

    posterior = fitted(model, loader=data, context=context, n_sets=2)
    assert list(posterior.layers) == ["first", "second", "out"]
