"""Quantile networks: the pinball loss and its sandwich by the definitions, predictions by the quantile function on a
fine grid, conformalised quantile regression by hand in NumPy and by MAPIE 1.6.0, whose figures are kept here.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from cli_helpers import run
from networks import inputs_of, mlp
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.likelihoods import OutputGaussian, QuantilePrediction

LEVELS = [0.05, 0.3, 0.5, 0.8, 0.95]
TAU = 2.0
POINTS = [NormalDist().inv_cdf(level) for level in LEVELS]


def network(samples: int = 40) -> tuple[nn.Module, Tensor, Tensor]:
    """A perceptron whose quantiles ascend, and targets about them."""
    model, x = mlp(5, dtype=torch.float64), inputs_of(4, samples=samples, dtype=torch.float64)
    with torch.no_grad():
        model[2].bias.copy_(3 * torch.tensor(POINTS))
    y = model(x).detach()[:, 2:3] + 2.5 * inputs_of(1, samples=samples, seed=5, dtype=torch.float64)
    return model, x, y


def slopes(quantiles: np.ndarray) -> np.ndarray:
    """Of the quantile function by z at every level: the one beside it, or across both neighbours."""
    z = np.array(POINTS)
    quantiles = np.asarray(quantiles)
    inner = (quantiles[2:] - quantiles[:-2]) / (z[2:] - z[:-2])
    first, last = (
        (quantiles[1] - quantiles[0]) / (z[1] - z[0]),
        (quantiles[-1] - quantiles[-2]) / (z[-1] - z[-2]),
    )
    return np.concatenate([[first], inner, [last]])


def sandwich(quantiles: np.ndarray) -> np.ndarray:
    """``H S^-1 H`` of the pinball losses."""
    density = np.diag(scipy.stats.norm.pdf(POINTS) / slopes(quantiles))
    levels = np.array(LEVELS)
    covariance = np.minimum.outer(levels, levels) - np.outer(levels, levels)
    return density @ np.linalg.inv(covariance) @ density


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """``(samples, outputs, weights)``, each layer's bias as its last column."""
    outputs, rows = model(x), []
    for output in outputs.flatten():
        own = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        pairs = zip(own[::2], own[1::2], strict=True)
        rows.append(torch.cat([torch.cat([w, b[:, None]], 1).flatten() for w, b in pairs]))
    return torch.stack(rows).reshape(*outputs.shape, -1)


def pinball(outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    levels = np.array(LEVELS)
    return np.where(y > outputs, levels * (y - outputs), (1 - levels) * (outputs - y))


# The likelihood


def test_it_is_the_pinball_loss() -> None:
    model, x, y = network()
    likelihood, outputs = uq.Quantiles(LEVELS), model(x).detach()
    scale = np.stack([np.array(LEVELS) * (1 - np.array(LEVELS)) * slopes(f) for f in outputs.numpy()])
    scale /= scipy.stats.norm.pdf(POINTS)
    height = np.log(np.array(LEVELS) * (1 - np.array(LEVELS)) / scale)
    expected = (height - pinball(outputs.numpy(), y.numpy()) / scale).sum(1)
    torch.testing.assert_close(likelihood.log_prob(outputs, y), torch.from_numpy(expected), rtol=1e-9, atol=0)
    gradient = np.where(y.numpy() > outputs.numpy(), -np.array(LEVELS), 1 - np.array(LEVELS)) / scale
    torch.testing.assert_close(likelihood.score(outputs, y.squeeze(1)), torch.from_numpy(gradient))
    # each term is a density whose height at the quantile is that of the targets there
    grid = torch.linspace(-400, 400, 80_001, dtype=torch.float64).unsqueeze(1)
    mass = (likelihood.log_terms(outputs[:1], grid).exp() * 1e-2).sum(0)
    torch.testing.assert_close(mass, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-4)
    at = likelihood.log_terms(outputs[:1], outputs[:1]).exp().numpy()[0]
    np.testing.assert_allclose(at, scipy.stats.norm.pdf(POINTS) / slopes(outputs.numpy()[0]))


def test_the_fisher_is_the_sandwich() -> None:
    model, x, y = network()
    likelihood, own = uq.Quantiles(LEVELS), jacobian(model, x)
    inner = torch.from_numpy(np.stack([sandwich(f) for f in model(x).detach().numpy()]))
    truth = torch.einsum("nkp,nkl,nlq->pq", own, inner, own) / len(x)
    options: dict[str, Any] = {"likelihood": likelihood, "prior_precision": TAU, "progress": False}
    exact = uq.fit(model, [(x[:25], y[:25]), (x[25:], y[25:])], "full", fisher="exact", **options)
    torch.testing.assert_close(exact.blocks["joint"].fisher, truth, rtol=1e-8, atol=1e-10)
    diagonal = uq.fit(model, [(x, y)], "diag", fisher="exact", **options).blocks
    parts = torch.cat([diagonal[layer].diagonal.flatten() for layer in ("0", "2")])
    torch.testing.assert_close(parts, truth.diagonal(), rtol=1e-8, atol=1e-10)
    drawn = uq.fit(model, [(x, y)], "full", fisher="mc", n_samples=200, **options)
    assert 0 < float((drawn.blocks["joint"].fisher - truth).norm() / truth.norm()) < 0.1
    # the empirical one has the observed gradients of the losses between the two factors of the sandwich
    losses = torch.where(y < model(x), 1.0, 0.0) - torch.tensor(LEVELS, dtype=torch.float64)
    levels = np.array(LEVELS)
    inverse = torch.from_numpy(np.linalg.inv(np.minimum.outer(levels, levels) - np.outer(levels, levels)))
    density = torch.from_numpy(
        np.stack([scipy.stats.norm.pdf(POINTS) / slopes(f) for f in model(x).detach()])
    )
    gradients = torch.einsum("nk,nkp->np", density * (losses @ inverse), own)
    empirical = uq.fit(model, [(x, y)], "full", fisher="empirical", **options).blocks["joint"].fisher
    torch.testing.assert_close(empirical, gradients.T @ gradients / len(x), rtol=1e-8, atol=1e-10)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    precision = len(x) * truth + TAU * torch.eye(len(weights), dtype=torch.float64)
    evidence = likelihood.log_prob(model(x).detach(), y).sum() - 0.5 * (
        precision.logdet() - len(weights) * math.log(TAU) + TAU * weights.square().sum()
    )
    assert float(exact.log_marginal_likelihood()) == pytest.approx(float(evidence), abs=1e-6)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_the_sandwich_by_monte_carlo(fisher: Any) -> None:
    """Of Gaussian targets: curvature by differences of the mean loss, the covariance of the losses' gradients."""
    samples, deviation, likelihood = 50_000, 1.7, uq.Quantiles(LEVELS)
    quantiles = torch.tensor([POINTS], dtype=torch.float64) * deviation - 0.4
    drawn = likelihood.draw(quantiles.expand(samples, -1), torch.arange(samples), 1)
    assert scipy.stats.kstest(drawn[:, 0].numpy(), "norm", args=(-0.4, deviation)).pvalue > 0.001
    even = scipy.stats.norm.ppf((np.arange(samples) + 0.5) / samples) * deviation - 0.4
    y = torch.from_numpy(even).unsqueeze(1)
    below = (y < quantiles).double() - torch.tensor(LEVELS, dtype=torch.float64)
    step, f = 0.02, quantiles.numpy()[0]
    loss = [pinball(f + shift, y.numpy()).mean(0) for shift in (-step, 0.0, step)]
    curvature = torch.diag(torch.from_numpy((loss[0] - 2 * loss[1] + loss[2]) / step**2))
    expected = curvature @ torch.linalg.inv(torch.cov(below.T)) @ curvature
    outputs, keys = quantiles.expand(1 if fisher == "exact" else samples, -1), torch.arange(samples)
    factors = torch.cat(list(likelihood.gradients(outputs, y, keys, fisher)))
    found = factors.T @ factors / len(outputs)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_linear_quantile_regression_has_the_variances_of_koenker_and_bassett() -> None:
    """Theorem 4.2: ``Omega / n * x^T (X^T X / n)^-1 x``, with ``Omega_kl = (min(k, l) - k l) / (p_k p_l)``."""
    x = inputs_of(2, samples=60, dtype=torch.float64)
    model = nn.Linear(2, 5).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.7, -0.2]]).expand(5, 2))
        model.bias.copy_(1.3 * torch.tensor(POINTS))
    posterior = uq.fit(
        model,
        [(x, model(x).detach()[:, 2])],
        "full",
        likelihood=uq.Quantiles(LEVELS),
        prior_precision=1e-9,
        progress=False,
    )
    found = uq.wrap(model, posterior).functional_covariance(x[:3])
    design = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], 1)
    leverage = torch.einsum("np,pq,nq->n", design[:3], torch.linalg.inv(design.T @ design), design[:3])
    omega = torch.from_numpy(np.linalg.inv(sandwich(1.3 * np.array(POINTS))))
    torch.testing.assert_close(found, leverage.reshape(-1, 1, 1) * omega, rtol=1e-5, atol=1e-8)


def test_expectations_over_gaussian_outputs() -> None:
    model, x, y = network(2)
    likelihood, mean, draws = uq.Quantiles(LEVELS), model(x).detach(), 50_000
    variance = torch.linspace(0.05, 3.0, 10, dtype=torch.float64).reshape(2, 5)
    scales = likelihood.scales(mean)
    generator = torch.Generator().manual_seed(0)
    outputs = mean + variance.sqrt() * torch.randn(draws, 2, 5, generator=generator, dtype=torch.float64)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    logs = (levels * (1 - levels) / scales).log() - torch.from_numpy(
        pinball(outputs.numpy(), y.numpy())
    ) / scales
    found = likelihood.expected_log_prob(mean, variance, y)
    assert bool(((found - logs.sum(2).mean(0)).abs() < 5 * logs.sum(2).std(0) / draws**0.5).all())
    found, densities = likelihood.predictive_log_prob(mean, variance, y), logs.exp()
    error = (densities.std(0) / densities.mean(0) / draws**0.5).sum(1)
    assert bool(((found - densities.mean(0).log().sum(1)).abs() < 5 * error).all())
    certain = likelihood.predictive_log_prob(mean, torch.zeros_like(mean), y)
    torch.testing.assert_close(certain, likelihood.log_prob(mean, y), rtol=1e-6, atol=1e-6)


# Predictions


def grid_of(quantiles: np.ndarray) -> np.ndarray:
    """The quantile function at many even levels, ``(levels, batch)``: linear in z, beyond the ends too."""
    z = scipy.stats.norm.ppf((np.arange(50_000) + 0.5) / 50_000)
    inside = np.stack([np.interp(z, POINTS, row) for row in quantiles], 1)
    first = (quantiles[:, 1] - quantiles[:, 0]) / (POINTS[1] - POINTS[0])
    last = (quantiles[:, -1] - quantiles[:, -2]) / (POINTS[-1] - POINTS[-2])
    return (
        inside + np.minimum(z - POINTS[0], 0)[:, None] * first + np.maximum(z - POINTS[-1], 0)[:, None] * last
    )


def test_predictions_by_the_quantile_function() -> None:
    likelihood = uq.Quantiles(LEVELS)
    quantiles = np.array([[-2.0, -0.5, 0.1, 1.0, 4.0], [0.0, 0.1, 0.2, 0.25, 3.0], POINTS])
    values = grid_of(quantiles)
    prediction = likelihood.from_draws(torch.from_numpy(quantiles).unsqueeze(0))
    assert isinstance(prediction, QuantilePrediction) and prediction.mean.shape == (3, 1)
    np.testing.assert_allclose(prediction.mean[:, 0], values.mean(0), atol=1e-4)
    np.testing.assert_allclose(prediction.variance[:, 0], values.var(0), rtol=2e-3)
    # a Gaussian's quantiles are a Gaussian
    np.testing.assert_allclose(prediction.variance[2], 1.0, rtol=1e-12)
    np.testing.assert_allclose(prediction.quantiles, quantiles, rtol=1e-12, atol=1e-12)
    assert torch.equal(prediction.epistemic_variance, torch.zeros(3, 1, dtype=torch.float64))
    for q in (0.01, 0.05, 0.37, 0.8, 0.99):
        np.testing.assert_allclose(prediction.quantile(q)[:, 0], np.quantile(values, q, axis=0), atol=3e-3)
        torch.testing.assert_close(
            prediction.cdf(prediction.quantile(q)), torch.full((3, 1), q, dtype=torch.float64)
        )
    assert torch.equal(prediction.median(), prediction.quantile(0.5))
    low, high = prediction.interval(0.9)
    np.testing.assert_allclose(torch.cat([low, high], 1), quantiles[:, [0, 4]], rtol=1e-12, atol=1e-12)
    # the density is the derivative of the distribution function
    y, step = torch.tensor([[0.6], [1.5], [-2.2]], dtype=torch.float64), 1e-5
    slope = (prediction.cdf(y + step) - prediction.cdf(y - step)) / (2 * step)
    torch.testing.assert_close(prediction.log_prob(y), slope.log().squeeze(1), rtol=1e-6, atol=1e-6)
    drawn = prediction.sample(20_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000, 3, 1)
    assert scipy.stats.ks_2samp(drawn[:, 1, 0].numpy(), values[::5, 1]).pvalue > 0.001
    quality = prediction.quality(prediction.fitting(y[:, 0]))
    assert quality["pinball_loss"] == pytest.approx(pinball(quantiles, y.numpy()).mean())
    columns = prediction.value_columns(0.9)
    assert [*columns][-5:] == [f"quantile_{level:g}" for level in LEVELS]
    # crossing quantiles are sorted, whatever goes with them
    order = torch.tensor([3, 0, 4, 1, 2])
    mean, variance = torch.from_numpy(quantiles), torch.rand(3, 5, dtype=torch.float64)
    root = torch.rand(3, 5, 5, dtype=torch.float64)
    covariance = root @ root.transpose(1, 2)
    straight = likelihood.from_gaussian(OutputGaussian(mean, variance, covariance))
    crossed = likelihood.from_gaussian(
        OutputGaussian(mean[:, order], variance[:, order], covariance[:, order][:, :, order])
    )
    for name, tensor in straight.to_dict().items():
        torch.testing.assert_close(crossed.to_dict()[name], tensor, msg=name)
    assert torch.equal(likelihood.densities(mean[:, order]), likelihood.densities(mean))


@pytest.mark.parametrize("head", ["sampling", "linearized"])
def test_mean_and_variance_are_those_of_the_mixture_over_the_weights(head: str, tmp_path: Path) -> None:
    model, x, y = network()
    posterior = uq.fit(
        model, [(x, y)], "full", likelihood=uq.Quantiles(LEVELS), prior_precision=TAU, progress=False
    )
    uq.save(posterior, tmp_path / "p.h5")
    read = uq.load(tmp_path / "p.h5", model)
    assert read.likelihood.attributes() == {"name": "quantiles", "levels": LEVELS}
    predictor = uq.wrap(model, read, head, **({"n_samples": 40} if head == "sampling" else {}))
    prediction = predictor(x[:4])
    if head == "sampling":
        draws = read.sample(40, torch.Generator().manual_seed(0))
        outputs = torch.stack(
            [
                torch.func.functional_call(model, {n: d[i] for n, d in draws.items()}, (x[:4],))
                for i in range(40)
            ]
        ).detach()
    else:
        mean, covariance = predictor.functional_mean(x[:4]), predictor.functional_covariance(x[:4])
        noise = torch.randn(10_000, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        outputs = mean + torch.einsum("nkl,snl->snk", torch.linalg.cholesky(covariance), noise)
    each = uq.Quantiles(LEVELS).from_draws(outputs.flatten(0, 1).unsqueeze(0))
    means, noises = (part.reshape(len(outputs), 4, 1) for part in (each.mean, each.noise_variance))
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if head == "sampling" else {"rtol": 0.04, "atol": 0.02}
    torch.testing.assert_close(prediction.mean, means.mean(0), **tolerance)
    torch.testing.assert_close(prediction.epistemic_variance, means.var(0), **tolerance)
    torch.testing.assert_close(prediction.noise_variance, noises.mean(0), **tolerance)
    ordered = outputs.sort(2).values if head == "sampling" else outputs
    torch.testing.assert_close(prediction.quantiles_variance, ordered.var(0), **tolerance)
    # stretched about the mean to the variance of the mixture
    stretched = uq.Quantiles(LEVELS).from_draws(prediction.quantiles.unsqueeze(0))
    torch.testing.assert_close(stretched.variance, prediction.variance)
    torch.testing.assert_close(stretched.mean, prediction.mean)


def test_a_mixture_of_networks() -> None:
    model, x, y = network()
    other = mlp(5, dtype=torch.float64)
    with torch.no_grad():
        other[0].weight.mul_(-1.0), other[2].bias.copy_(2 * torch.tensor(POINTS) + 1)
    data: dict[str, Any] = {"likelihood": uq.Quantiles(LEVELS), "prior_precision": TAU, "progress": False}
    posterior = uq.fit(model, [(x, y)], "kfac", **data)
    found, alone = uq.wrap([model, other], [posterior, None])(x[:4]), uq.wrap(model, posterior)(x[:4])
    pair = torch.stack([alone.quantiles_mean, other(x[:4]).detach().sort(1).values])
    torch.testing.assert_close(found.quantiles_mean, pair.mean(0))
    variance = alone.quantiles_variance / 2 + pair.var(0, correction=0)
    torch.testing.assert_close(found.quantiles_variance, variance)
    means = uq.Quantiles(LEVELS).mean(pair)
    torch.testing.assert_close(
        found.epistemic_variance, alone.epistemic_variance / 2 + means.var(0, correction=0)
    )
    certain = uq.Quantiles(LEVELS).from_draws(other(x[:4]).detach().unsqueeze(0))
    for level, values in zip(LEVELS, found.quantiles.unsqueeze(2).unbind(1), strict=True):
        share = (alone.cdf(values) + certain.cdf(values)) / 2
        torch.testing.assert_close(share, torch.full((4, 1), level, dtype=torch.float64))
    low, high = found.interval(0.6)
    torch.testing.assert_close(found.cdf(high) - found.cdf(low), torch.full((4, 1), 0.6, dtype=torch.float64))
    drawn = found.sample(20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.mean(0), found.mean, rtol=0.05, atol=0.05)
    assert bool(((drawn < high).double().mean(0) - 0.8).abs().max() < 0.02)


# Conformalised quantile regression


class Linear(nn.Module):
    """Quantiles that are linear in x and its magnitude, in float64."""

    def __init__(self, levels: list[float]) -> None:
        super().__init__()
        self.last = nn.Linear(2, len(levels)).double()
        z = torch.tensor([NormalDist().inv_cdf(level) for level in levels], dtype=torch.float64)
        with torch.no_grad():  # a little too wide
            self.last.weight.copy_(torch.stack([torch.full_like(z, 0.5), 0.4 * z], 1))
            self.last.bias.copy_(0.07 * z)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([x, x.abs()], 1))


def noisy(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise that is small at 0, and large far away from it."""
    rng = np.random.RandomState(seed)
    x = rng.uniform(-2, 2, (samples, 1)).round(4)
    y = (0.5 * x + (0.05 + 0.4 * np.abs(x)) * rng.standard_normal((samples, 1))).round(5)
    return torch.from_numpy(x), torch.from_numpy(y)


def fitted(levels: list[float]) -> tuple[nn.Module, uq.Posterior]:
    model = Linear(levels)
    data = [noisy(300, 0)]
    return model, uq.fit(
        model, data, "kfac", likelihood=uq.Quantiles(levels), prior_precision=1e9, progress=False
    )


# lower and upper bounds of MAPIE's ConformalizedQuantileRegressor (prefit, with symmetric_correction=True) at the first
# three test inputs, and its coverage and mean width on all of them
MAPIE = (
    [
        [-0.4040486000523226, 0.14804860005232245],
        [-2.303419961767723, 0.407119961767722],
        [-0.13898276077751684, 0.3375827607775167],
    ],
    0.9075,
    1.5322088934402602,
)


def test_intervals_are_those_of_conformalised_quantile_regression(tmp_path: Path) -> None:
    levels = [0.05, 0.5, 0.95]
    model, posterior = fitted(levels)
    (x, y), (new, truth) = noisy(400, 1), noisy(2000, 2)
    options: dict[str, Any] = {"share": None, "progress": False}
    posterior = uq.calibrate(posterior.with_settings(scale=1e16), [(x, y)], **options)
    assert "intervals by 'quantiles' up to a level of 0.9975" in str(posterior.report())
    uq.save(posterior, tmp_path / "p.h5")
    predictor = uq.wrap(model, uq.load(tmp_path / "p.h5", model))
    low, high = predictor(new).interval(0.9)
    q, of_new = model(x).detach().numpy(), model(new).detach().numpy()
    scores = np.sort(np.maximum(q[:, 0] - y.numpy()[:, 0], y.numpy()[:, 0] - q[:, 2]))
    reach = scores[math.ceil(401 * 0.9) - 1]
    assert reach < 0  # the network's quantiles are too wide
    np.testing.assert_allclose(low[:, 0], of_new[:, 0] - reach, atol=1e-6)
    np.testing.assert_allclose(high[:, 0], of_new[:, 2] + reach, atol=1e-6)
    inside = ((low <= truth) & (truth <= high))[:, 0]
    bounds, share, width = MAPIE
    np.testing.assert_allclose(torch.cat([low, high], 1)[:3], bounds, atol=1e-6)
    assert float(inside.double().mean()) == share and float((high - low).mean()) == pytest.approx(
        width, abs=1e-6
    )
    # where the noise is small as well as large, where one width for all fails
    near, far = new.abs()[:, 0] < 0.3, new.abs()[:, 0] > 1.7
    of_median = uq.fit(
        model, [noisy(300, 0)], "kfac", likelihood="regression", output=lambda f: f[:, 1:2], progress=False
    )
    of_median = uq.calibrate(of_median, [(x, y)], progress=False)
    lower, upper = uq.wrap(model, of_median)(new).interval(0.9)
    constant = ((lower <= truth) & (truth <= upper))[:, 0]
    covered = [[float(each[where].double().mean()) for where in (near, far)] for each in (inside, constant)]
    assert min(covered[0]) > 0.86 and covered[1][0] > 0.99 and covered[1][1] < 0.72
    assert float((upper - lower).mean()) > float((high - low).mean())
    # levels between are those of the network's quantile function
    for level in (0.5, 0.8, 0.95, 0.97):
        bounds_of = predictor(new).interval(level)
        rate = float(((bounds_of[0] <= truth) & (truth <= bounds_of[1])).double().mean())
        assert rate == pytest.approx(level, abs=0.05)
    found = uq.evaluate(predictor, [(new, truth[:, 0])], progress=False)
    assert found.promised["linearized"]["observed_coverage_90"] == share
    assert found.metrics["linearized"]["coverage_90"] > share


def test_half_of_the_samples_promise_and_the_rest_choose_the_width() -> None:
    model, posterior = fitted([0.05, 0.5, 0.95])
    calibrated = uq.calibrate(posterior, [noisy(300, 1)], jointly=True, progress=False)
    assert calibrated.history.promises.samples == 150 and calibrated.history.trials is not None
    new, truth = noisy(2000, 2)
    low, high = uq.wrap(model, calibrated)(new).interval(0.9)
    assert float(((low <= truth) & (truth <= high)).double().mean()) == pytest.approx(0.9, abs=0.05)


def test_bounds_that_would_cross_meet() -> None:
    model, posterior = fitted([0.05, 0.95])
    x, _ = noisy(200, 1)
    exactly = model(x).detach().mean(1)  # in the middle of each interval, whatever its width
    calibrated = uq.calibrate(posterior, [(x, exactly)], share=None, progress=False)
    low, high = uq.wrap(model, calibrated)(torch.tensor([[0.0], [2.0]], dtype=torch.float64)).interval(0.9)
    assert float(high[0] - low[0]) == pytest.approx(0, abs=1e-9) and bool((low <= high).all())


# The command line


def test_a_table_of_quantiles(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n    torch.manual_seed(0)\n    return nn.Linear(1, 2)\n"
    )
    x, y = noisy(60, 3)
    rows = torch.cat([x, y], 1).tolist()
    (tmp_path / "t.csv").write_text("a,y\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n")
    model = ["--model", f"{tmp_path / 'nets.py'}:net"]
    own = ["--target y --likelihood quantiles --levels 0.1,0.9 --method kfac --prior-precision 2"]
    run("fit", tmp_path / "t.csv", *model, "-o", tmp_path / "p.h5", *own)
    run("calibrate", tmp_path / "p.h5", tmp_path / "t.csv", *model, "-o", tmp_path / "c.h5")
    torch.manual_seed(0)
    network = nn.Linear(1, 2)
    posterior = uq.load(tmp_path / "c.h5", network)
    assert posterior.likelihood.attributes()["levels"] == [0.1, 0.9]
    prediction = uq.wrap(network, posterior)(x.float())
    run("predict", tmp_path / "c.h5", tmp_path / "t.csv", *model, "--level 0.8 -o", tmp_path / "out.csv")
    header, first = (tmp_path / "out.csv").read_text().splitlines()[:2]
    columns = dict(zip(header.split(","), first.split(","), strict=True))
    lower, upper = prediction.interval(0.8)
    expected = {"lower": lower, "upper": upper, "quantile_0.1": prediction.quantiles[:, :1]}
    for name, values in expected.items():
        assert float(columns[name]) == pytest.approx(float(values[0]), rel=1e-4)
