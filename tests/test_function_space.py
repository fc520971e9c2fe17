"""Divergences and covariances over functions, against dense matrices written from the definitions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import posthoc_uq as uq
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.model import replicate
from posthoc_uq.heads import function_space_kl
from posthoc_uq.layers.layer import describe
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posthoc_uq.methods.contexts import Context
from posthoc_uq.methods.function_objective import (
    FunctionPrior,
    FunctionSpaceObjective,
    FunctionSpaceOptions,
    gaussian_kl,
    last_layer_covariance,
    relative_function_noise,
)
from posthoc_uq.methods.mean_field import FeatureNetwork, MeanField
from posthoc_uq.methods.training import Step

F64 = torch.float64
FEATURES = torch.tensor([[1, 0.5], [-0.5, 2], [0.3, -1]], dtype=F64)
WEIGHT_VARIANCES = torch.tensor([[0.1, 0.2], [0.05, 0.3]], dtype=F64)
BIAS_VARIANCES = torch.tensor([0.02, 0.04], dtype=F64)
MEANS = torch.tensor([[0.2, -0.1, 0.4], [0.5, 0, -0.3]], dtype=F64)
POINTS = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.0, -1.0]], dtype=F64)


def dense_kl(mean: Any, covariance: Any, prior_mean: Any, prior_covariance: Any) -> float:
    """``KL(N(m, C) || N(m_p, C_p))`` by inverses and determinants."""
    m, c, mp, cp = (
        np.asarray(part, dtype=np.float64) for part in (mean, covariance, prior_mean, prior_covariance)
    )
    inverse = np.linalg.inv(cp)
    d = mp - m
    logs = np.linalg.slogdet(cp)[1] - np.linalg.slogdet(c)[1]
    return 0.5 * (np.trace(inverse @ c) - len(m) + logs + d @ inverse @ d)


def tiny_net(dtype: torch.dtype = F64) -> nn.Sequential:
    """The 2-2-2 tanh network whose numbers are tabulated."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(dtype)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.5, -1], [1.5, 0.25]]))
        net[0].bias.copy_(torch.tensor([0.1, -0.2]))
        net[2].weight.copy_(torch.tensor([[1, -0.5], [0.2, 0.8]]))
        net[2].bias.copy_(torch.tensor([0.3, 0.0]))
    return net.eval()


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
    body_log: float = -6.0,
    likelihood: Likelihood | None = None,
    precision: float = 1.0,
    samples: int = 10,
    train_mean: bool = True,
    context: Context | None = None,
    **options: Any,
) -> tuple[FunctionSpaceObjective, MeanField, FeatureNetwork]:
    """The objective over all layers of a net, with log variances that differ within each tensor."""
    network = FeatureNetwork(replicate(net), layers_of(net), Batch((points,)))
    means = {name: p.detach().clone() for name, p in net.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    names = network.last.parameter_names
    logs = {
        name: torch.full_like(p, last_log if name in names else body_log)
        + 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in means.items()
    }
    field = MeanField(means, logs, train_mean)
    chosen = FunctionSpaceOptions(**({"n_context": len(points)} | options))
    prior = FunctionPrior(
        network,
        {name: p.detach().clone() for name, p in net.named_parameters()},
        chosen.prior_mean,
        precision,
        chosen.prior_body_variance,
        chosen.noise_share,
    )
    found = FunctionSpaceObjective(
        network, field, prior, likelihood or Categorical(), context or Fixed(points), samples, chosen, False
    )
    return found, field, network


def drawn(
    field: MeanField, network: FeatureNetwork, seed: int = 7
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Standard normals of all parameters, and the deviations of the body that they give, by autograd."""
    generator = torch.Generator().manual_seed(seed)
    normals = {n: torch.randn(m.shape, generator=generator, dtype=F64) for n, m in field.means.items()}
    last = network.last.parameter_names
    return normals, {n: (0.5 * field.log_variances[n]).exp() * e for n, e in normals.items() if n not in last}


# Covariances and divergences in numbers


@pytest.mark.parametrize("outputs", [2, 3, 4, 9])
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


def test_last_layer_covariance_in_numbers() -> None:
    found = last_layer_covariance(FEATURES, WEIGHT_VARIANCES, BIAS_VARIANCES)
    expected = torch.tensor(
        [
            [[0.17, 0.17, -0.05], [0.17, 0.845, -0.395], [-0.05, -0.395, 0.229]],
            [[0.165, 0.315, -0.095], [0.315, 1.2525, -0.5675], [-0.095, -0.5675, 0.3445]],
        ],
        dtype=F64,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("points", "noise", "total", "parts"),
    [
        (3, 1e-6, 5.248013, (2.611848, 2.636165)),
        (3, 1e-4, 5.244236, (2.609907, 2.634328)),
        (3, 1e-3, 5.210422, (2.592546, 2.617876)),
        (2, 0.0, 2.802341, None),
        (1, 0.0, 1.736702, None),
    ],
)
def test_divergence_in_numbers(
    points: int, noise: float, total: float, parts: tuple[float, float] | None
) -> None:
    features, means = FEATURES[:points], MEANS[:, :points]
    covariance = last_layer_covariance(features, WEIGHT_VARIANCES, BIAS_VARIANCES)
    prior = last_layer_covariance(features, torch.ones(1, 2, dtype=F64), torch.ones(1, dtype=F64))
    found = gaussian_kl(means, covariance, torch.zeros_like(means), prior, noise)
    assert float(found.total) == pytest.approx(total, abs=1e-6)
    eye = noise * np.eye(points)
    by_output = [
        dense_kl(m, c.numpy() + eye, np.zeros(points), prior[0].numpy() + eye)
        for m, c in zip(means, covariance, strict=True)
    ]
    assert float(found.total) == pytest.approx(sum(by_output), rel=1e-9)
    if parts is not None:
        assert by_output == pytest.approx(parts, abs=1e-6)


def test_parts_are_those_of_mean_and_covariance() -> None:
    covariance = last_layer_covariance(FEATURES, WEIGHT_VARIANCES, BIAS_VARIANCES)
    prior = last_layer_covariance(FEATURES, torch.ones(1, 2, dtype=F64), torch.ones(1, dtype=F64))
    whole = gaussian_kl(MEANS, covariance, torch.zeros_like(MEANS), prior, 1e-6)
    centred = gaussian_kl(MEANS, covariance, MEANS, prior, 1e-6)
    assert float(centred.mean_part) == 0.0
    assert float(whole.covariance_part) == float(centred.covariance_part)
    noisy = prior[0].numpy() + 1e-6 * np.eye(3)
    expected = 0.5 * sum(m @ np.linalg.inv(noisy) @ m for m in MEANS.numpy())
    assert float(whole.mean_part) == pytest.approx(expected, rel=1e-9)
    assert "mean part" in str(whole)


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


@pytest.mark.parametrize(("points", "offset"), [(3, False), (5, False), (10, True), (50, True)])
def test_what_the_noise_does_beyond_the_rank(points: int, offset: bool) -> None:
    """With more points than dimensions the covariance part stays, and a mean outside costs d^2 / 2 noise."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(points, 2, generator=generator, dtype=F64)
    prior = last_layer_covariance(features, torch.ones(1, 2, dtype=F64), torch.ones(1, dtype=F64))
    shift = (
        0.01 * torch.randn(1, points, generator=generator, dtype=F64)
        if offset
        else torch.zeros(1, points, dtype=F64)
    )
    expected = 3 / 2 * (0.05 - 1 - np.log(0.05))  # of the three dimensions there are
    for noise in (1e-6, 1e-4):
        found = gaussian_kl(shift, 0.05 * prior, torch.zeros_like(shift), prior, noise)
        # What the noise adds to 0.05 C_p is not 0.05 of what it adds to C_p: the loss is of the noise's own size.
        assert float(found.covariance_part) == pytest.approx(expected, abs=20 * noise)
        if offset:
            columns = torch.cat([features, torch.ones(points, 1, dtype=F64)], 1)
            outside = shift[0] - columns @ torch.linalg.lstsq(columns, shift[0][:, None]).solution[:, 0]
            assert float(found.mean_part) == pytest.approx(
                float(outside.square().sum()) / 2 / noise, rel=0.05
            )
    if not offset and points == 3:
        exact = gaussian_kl(shift, 0.05 * prior, shift, prior, 0.0)
        assert float(exact.total) == pytest.approx(3.068598, abs=1e-6)


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


def test_noise_is_relative_to_the_prior() -> None:
    prior = torch.stack([torch.diag(torch.tensor([1.0, 3.0])), torch.diag(torch.tensor([10.0, 30.0]))])[
        :, None
    ]
    assert relative_function_noise(prior, 0.1).flatten().tolist() == pytest.approx([0.2, 2.0])


def test_gradient_of_the_divergence() -> None:
    prior = last_layer_covariance(FEATURES, torch.ones(1, 2, dtype=F64), torch.ones(1, dtype=F64))

    def divergence(mean: Tensor, features: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        covariance = last_layer_covariance(features, weights, bias)
        return gaussian_kl(mean, covariance, torch.zeros_like(mean), prior, 1e-3).total

    inputs = tuple(t.clone().requires_grad_() for t in (MEANS, FEATURES, WEIGHT_VARIANCES, BIAS_VARIANCES))
    assert torch.autograd.gradcheck(divergence, inputs)


# The linearised network


def test_features_and_outputs_of_the_tabulated_net() -> None:
    net = tiny_net()
    network = FeatureNetwork(replicate(net), layers_of(net), Batch((POINTS,)))
    outputs, features = network(dict(net.named_parameters()), Batch((POINTS,)))
    expected = [[-0.885352, 0.946806], [-0.716298, -0.917817], [0.800499, -0.421899]]
    torch.testing.assert_close(features, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-6)
    expected = [[-1.058755, 0.580374], [0.042611, -0.877514], [1.311449, -0.177419]]
    torch.testing.assert_close(outputs, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-6)
    assert network.last.name == "2"


@pytest.mark.parametrize(("prior_mean", "expected"), [("zero", 7.147166), ("pretrained", 6.137167)])
def test_divergence_of_the_tabulated_net(prior_mean: str, expected: float) -> None:
    # The noise is absolute in the table and relative in the objective.
    share = 1e-6 / float(
        (
            1
            + torch.tensor([[-0.885352, 0.946806], [-0.716298, -0.917817], [0.800499, -0.421899]])
            .square()
            .sum(1)
        ).mean()
    )
    objective, field, network = objective_of(tiny_net(), POINTS, prior_mean=prior_mean, function_noise=share)
    with torch.no_grad():
        for name, value in field.log_variances.items():
            value.fill_(np.log(0.05) if name.startswith("2") else -60.0)
    found, chosen = objective.divergence(Batch((POINTS,)), drawn(field, network)[1])
    assert chosen == 0 and float(found.total.detach()) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("prior_body_variance", [0.0, 0.02])
def test_divergence_against_dense_jacobians(prior_body_variance: float) -> None:
    """Mean and covariance of both sides from the Jacobian of the whole network, and the dense divergence of all outputs
    together, with the body's draw put in by hand.
    """
    net = random_net(3, 6, 5, 4)
    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    objective, field, network = objective_of(
        net, points, prior_body_variance=prior_body_variance, precision=0.7
    )
    with torch.no_grad():  # the mean has left the trained weights
        for index, mean in enumerate(field.means.values()):
            mean.add_(
                0.05 * torch.randn(mean.shape, generator=torch.Generator().manual_seed(index), dtype=F64)
            )
    everything, deviations = drawn(field, network)
    normals = {name: everything[name] for name in deviations}
    found, _ = objective.divergence(Batch((points,)), deviations)

    outputs, _, moved = objective._draw(Batch((points,)), deviations)

    def jacobian(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = {name: w.detach() for name, w in weights.items()}
        return jacrev(lambda w: functional_call(net, w, (points,)).flatten())(plain)

    at_mean, at_prior = jacobian(field.means), jacobian(dict(net.named_parameters()))
    shift = sum(
        at_mean[n].flatten(1) @ ((0.5 * field.log_variances[n]).exp() * normals[n]).detach().flatten()
        for n in normals
    )
    torch.testing.assert_close(moved.detach().flatten(), shift, rtol=1e-10, atol=1e-12)
    mean = outputs.detach().flatten() + shift
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
    prior_mean = prior_body_variance**0.5 * sum(
        at_prior[n].flatten(1) @ normals[n].flatten() for n in normals
    ) + torch.zeros(20, dtype=F64)
    noise = 1e-6 * float(prior.diagonal().mean()) * torch.eye(20, dtype=F64)
    expected = dense_kl(mean, covariance + noise, prior_mean, prior + noise)
    assert float(found.total) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("body", ["linearized", "sample"])
@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_gradient_of_the_whole_divergence(body: str, prior_mean: str) -> None:
    net = random_net(2, 4, 3)
    points = torch.randn(4, 2, generator=torch.Generator().manual_seed(5), dtype=F64)
    objective, field, network = objective_of(
        net, points, body=body, prior_mean=prior_mean, function_noise=1e-3
    )
    names = list(field.means)
    own = field.means, field.log_variances

    def divergence(*values: Tensor) -> Tensor:
        field.means = dict(zip(names, values[: len(names)], strict=True))
        field.log_variances = dict(zip(names, values[len(names) :], strict=True))
        return objective.divergence(Batch((points,)), drawn(field, network)[1])[0].total[0]

    values = [t.detach().clone().requires_grad_() for part in own for t in part.values()]
    assert torch.autograd.gradcheck(divergence, values, atol=1e-5)


@pytest.mark.parametrize("body_kind", ["linearized", "sample"])
@pytest.mark.parametrize("train_mean", [True, False])
def test_the_step_adds_up(train_mean: bool, body_kind: str) -> None:
    """Gradients of a step are those of ``-log p / B / M + KL / N``, by autograd through it all at once."""
    net = random_net(2, 4, 3)
    points = torch.randn(4, 2, generator=torch.Generator().manual_seed(5), dtype=F64)
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(6), dtype=F64)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    objective, field, network = objective_of(
        net, points, n_draws=2, samples=40, train_mean=train_mean, body=body_kind
    )
    terms = objective.backward(Batch((x,), y), Step(4), DeferredChecks())
    found = {name: t.grad.clone() for name, t in objective.tensors().items()}
    generator = objective._generator(4, 1)
    fit = 0.0
    for _ in range(2):
        deviations = {}
        for name, value in field.log_variances.items():
            deviations[name] = torch.randn(value.shape, generator=generator, dtype=F64) * (0.5 * value).exp()
        weights = {name: mean + deviations[name] for name, mean in field.means.items()}
        fit = fit - nn.functional.cross_entropy(functional_call(net, weights, (x,)), y) / 2
    body = {name: d for name, d in deviations.items() if name not in network.last.parameter_names}
    divergence = objective.divergence(Batch((points,)), body)[0]
    loss = divergence.total[0] / 40 - fit
    expected = torch.autograd.grad(loss, list(objective.tensors().values()))
    assert train_mean == any(name.startswith("mean") for name in found)
    for gradient, own in zip(expected, found.values(), strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-10, atol=1e-14)
    assert float(terms["loss"]) == pytest.approx(float(loss), rel=1e-10)
    assert float(terms["log likelihood"]) == pytest.approx(float(fit), rel=1e-10)
    total = float(terms["KL mean part"] + terms["KL covariance part"])
    assert total == pytest.approx(float(divergence.total[0]), rel=1e-10)


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


def test_the_largest_of_several_sets_counts() -> None:
    net = random_net(2, 5, 2)
    sets = [
        torch.randn(3, 2, generator=torch.Generator().manual_seed(s), dtype=F64) * (1 + s) for s in range(3)
    ]
    joined = torch.cat(sets)
    several, field, network = objective_of(net, joined, n_sets=3, n_context=3, context=Fixed(*sets))
    deviations = field.deviations(several._generator(2, 1))
    body = {name: d for name, d in deviations.items() if name not in network.last.parameter_names}
    found, chosen = several.divergence(Batch((joined,)), body)
    alone = []
    for points in sets:
        single, own, _ = objective_of(net, points)
        own.means, own.log_variances = field.means, field.log_variances
        alone.append(float(single.divergence(Batch((points,)), body)[0].total[0]))
    assert found.total.tolist() == pytest.approx(alone, rel=1e-9)
    assert chosen == int(np.argmax(alone))
    x, y = joined[:4], torch.tensor([0, 1, 0, 1])
    terms = several.backward(Batch((x,), y), Step(2), DeferredChecks())
    assert float(terms["KL mean part"] + terms["KL covariance part"]) == pytest.approx(max(alone), rel=1e-9)


def test_data_processing_inequality() -> None:
    """Without a draw of the body, a divergence over functions is at most that over the last layer's weights, equal to
    it at H + 1 points, and grows with the points.
    """
    size, outputs = 3, 2
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(size + 1, size, generator=generator, dtype=F64)
    delta = 0.3 * torch.randn(outputs, size + 1, generator=generator, dtype=F64)  # of weights and bias
    variances = torch.rand(outputs, size + 1, generator=generator, dtype=F64) * 0.2 + 0.01
    columns = torch.cat([features, torch.ones(size + 1, 1, dtype=F64)], dim=1)
    prior = last_layer_covariance(features, torch.ones(1, size, dtype=F64), torch.ones(1, dtype=F64))
    covariance = last_layer_covariance(features, variances[:, :size], variances[:, size])
    weights = sum(
        dense_kl(delta[q], variances[q].diag(), np.zeros(size + 1), np.eye(size + 1)) for q in range(outputs)
    )
    means = delta @ columns.T
    found = []
    for points in range(1, size + 2):
        part = gaussian_kl(
            means[:, :points],
            covariance[:, :points, :points],
            torch.zeros(outputs, points, dtype=F64),
            prior[:, :points, :points],
            0.0,
        )
        found.append(float(part.total))
    assert found == sorted(found) and found[0] < found[-1]
    assert found[-1] == pytest.approx(weights, rel=1e-8)
    assert all(value <= weights * (1 + 1e-9) for value in found)


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


def test_outputs_that_no_layer_gives_are_refused() -> None:
    net = Head("softmax").eval()
    with pytest.raises(PosthocUQError, match="the last layer exactly"):
        FeatureNetwork(replicate(net), layers_of(net), Batch((torch.randn(3, 1, 6, 6),)))


# The diagnostic


@pytest.mark.parametrize("method", ["diag", "kfac", "inf", "full"])
@pytest.mark.parametrize("prior_mean", ["zero", "pretrained"])
def test_diagnostic_against_dense_jacobians(method: str, prior_mean: str) -> None:
    net, y = tiny_net(), torch.tensor([0, 1, 0])
    posterior = uq.fit(net, [(POINTS, y)], method=method, fisher="exact", prior_precision=0.8, progress=False)
    found = function_space_kl(posterior, POINTS[:2], prior_mean=prior_mean, prior_precision=0.5)
    jacobians = jacrev(lambda w: functional_call(net, w, (POINTS[:2],)).flatten())(
        {n: p.detach() for n, p in net.named_parameters()}
    )
    size = sum(layer.parameters for layer in posterior.layers.values())
    draws = torch.eye(size, dtype=F64)
    rows, start, by_layer = [], 0, {}
    for name, layer in posterior.layers.items():
        matrix = layer.to_matrix(jacobians[layer.weight], jacobians[layer.bias])
        by_layer[name] = matrix
        rows.append(matrix.flatten(1))
        start += layer.parameters
    covariance = posterior.quadratic(by_layer).double()
    jacobian = torch.cat(rows, dim=1)
    prior = jacobian @ draws @ jacobian.T / 0.5
    outputs = net(POINTS[:2]).detach().flatten()
    noise = 1e-6 * float(prior.diagonal().mean()) * torch.eye(4, dtype=F64)
    trained_mean = outputs if prior_mean == "pretrained" else torch.zeros(4, dtype=F64)
    expected = dense_kl(outputs, covariance + noise, trained_mean, prior + noise)
    assert float(found.total) == pytest.approx(expected, rel=1e-5)
    # Only the covariances are linear maps of weights here; their divergence is below that of the weights' own.
    dense = torch.zeros(size, size, dtype=F64)
    basis: dict[str, Tensor] = {}
    start = 0
    for name, layer in posterior.layers.items():
        unit = torch.zeros(size, layer.parameters, dtype=F64)
        unit[start : start + layer.parameters] = torch.eye(layer.parameters, dtype=F64)
        basis[name] = unit.reshape(size, *layer.matrix_shape)
        start += layer.parameters
    dense = posterior.quadratic(basis).double()
    weights = dense_kl(np.zeros(size), dense, np.zeros(size), np.eye(size) / 0.5)
    assert float(found.covariance_part) <= weights * (1 + 1e-6)


def test_diagnostic_refuses_what_it_cannot_use() -> None:
    posterior = uq.fit(
        tiny_net(), [(POINTS, torch.tensor([0, 1, 0]))], method="diag", progress=False, prior_precision=1.0
    )
    with pytest.raises(PosthocUQError, match="prior_mean must be"):
        function_space_kl(posterior, POINTS, prior_mean="random")
    with pytest.raises(PosthocUQError, match="function_noise must be"):
        function_space_kl(posterior, POINTS, function_noise=0.0)
    with pytest.raises(PosthocUQError, match="prior_precision must be"):
        function_space_kl(posterior, POINTS, prior_precision=-1.0)
    posterior.model = None
    with pytest.raises(PosthocUQError, match="lost its model"):
        function_space_kl(posterior, POINTS)


# Likelihoods


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
    objective, field, _ = objective_of(net, x, likelihood=likelihood, last_log=-1.0)
    found = objective.log_predictive(Batch((x,), y), 4)
    probabilities = []
    for draw in range(4):
        weights = field.sample(objective._generator(0, 3, draw))
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
