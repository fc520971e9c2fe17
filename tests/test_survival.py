"""Survival: densities, information and predictions against torch's and SciPy's distributions, autograd and quadrature,
and what lifelines 0.30.3 found on the same data, whose figures are kept here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch
from cli_helpers import run, run_json
from networks import inputs_of, mlp
from torch import Tensor, nn
from torch import distributions as td

import posthoc_uq as uq
from posthoc_uq.evaluation import metrics
from posthoc_uq.likelihoods import SurvivalPrediction

FAMILIES = ("weibull", "log_normal")
FAMILY = pytest.mark.parametrize("family", FAMILIES)
TAU = 2.0


def law(family: str, outputs: Tensor) -> td.Distribution:
    """The distribution of times, by the definition."""
    first, second = outputs.unbind(-1)
    if family == "weibull":
        return td.Weibull(first.exp(), second.exp(), validate_args=False)
    return td.LogNormal(first, second.exp(), validate_args=False)


def outputs_of(samples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.6 * torch.randn(samples, 2, generator=generator, dtype=torch.float64)


def ranges(times: Tensor) -> Tensor:
    """Each fifth seen, censored from the right, from the left, between two times, and between two wide ones."""
    kind = torch.arange(len(times)) % 5
    lower = torch.where(
        kind == 2, 0.0, torch.where(kind == 3, 0.8 * times, torch.where(kind == 4, 0.1 * times, times))
    )
    upper = torch.where(kind == 1, math.inf, torch.where(kind == 0, times, times * (1 + 0.3 * kind)))
    return torch.stack([lower, upper], 1)


def data(family: str, censoring: str, samples: int = 40) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = mlp(2, dtype=torch.float64), inputs_of(4, samples=samples, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        times = law(family, model(x).detach()).sample()
        ends = 1.5 * torch.rand(samples, dtype=torch.float64) + 0.1
    if censoring == "interval":
        return model, x, ranges(times)
    return model, x, torch.stack([torch.minimum(times, ends), (times <= ends).double()], 1)


def log_likelihood(family: str, outputs: Tensor, targets: Tensor, censoring: str) -> Tensor:
    """By the distribution function, sample by sample."""
    found = []
    for row, (first, second) in zip(outputs, targets.tolist(), strict=True):
        own = law(family, row)
        at = lambda t, own=own: own.cdf(torch.tensor(t, dtype=torch.float64))  # noqa: E731
        if second == (1.0 if censoring == "right" else first):
            found.append(own.log_prob(torch.tensor(first, dtype=torch.float64)))
        elif censoring == "right" or second == math.inf:
            found.append((1 - at(first)).log())
        else:
            found.append((at(second) - (at(first) if first else 0.0)).log())
    return torch.stack(found)


@FAMILY
@pytest.mark.parametrize("censoring", ["right", "interval"])
def test_density_and_score_by_the_definition(family: str, censoring: str) -> None:
    likelihood = uq.Survival(family, censoring)
    _, _, targets = data(family, censoring)
    outputs = outputs_of(40).requires_grad_()
    expected = log_likelihood(family, outputs, targets, censoring)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), expected, rtol=1e-9, atol=1e-9)
    by_autograd = -torch.autograd.grad(expected.sum(), outputs)[0]
    torch.testing.assert_close(likelihood.score(outputs, targets), by_autograd, rtol=1e-7, atol=1e-8)
    # far out, and in float32, nothing is NaN
    far = torch.cartesian_prod(torch.linspace(-8, 8, 9), torch.linspace(-2, 2, 5))
    for given in (targets[:5], 50 * targets[:5]):
        pairs = given.float().repeat_interleave(len(far), 0)
        if censoring == "right":
            pairs[:, 1] = (pairs[:, 1] > 0).float()
        assert not bool(likelihood.log_prob(far.repeat(5, 1), pairs).isnan().any())
    drawn = likelihood.draw(outputs.detach()[:1].expand(20_000, -1), torch.arange(20_000), 2)
    likelihood.check(torch.zeros(20_000, 2), drawn)
    share = law(family, outputs.detach()[0]).cdf(drawn[:, 0])
    assert scipy.stats.kstest(share.numpy(), "uniform").pvalue > 0.001


def dense_information(family: str, row: Tensor, lower: float, upper: float) -> Tensor:
    """By autograd: ``int_0^t h (d log h)(d log h)^T`` on a fine grid of log times, or the sum over looks of the Fisher
    of whether the event is there, given that it was not at the look before.
    """
    row = row.detach().clone().requires_grad_()
    if lower == upper or upper == math.inf:
        nodes, weights = np.polynomial.legendre.leggauss(600)
        end = math.log(lower)
        start = end - 45 * math.exp(float(row[1].detach()) * (-1 if family == "weibull" else 1))
        logs = torch.from_numpy((end + start) / 2 + (end - start) / 2 * nodes)
        copies = row.expand(600, 2)
        own, times = law(family, copies), logs.exp()
        log_survival = (
            -((times / copies[:, 0].exp()) ** copies[:, 1].exp())
            if family == "weibull"
            else torch.special.log_ndtr(-(logs - copies[:, 0]) / copies[:, 1].exp())
        )
        log_hazard = own.log_prob(times) - log_survival
        slopes = torch.autograd.grad(log_hazard.sum(), copies)[0]
        mass = log_hazard.detach().exp() * times * torch.from_numpy(weights) * (end - start) / 2
        return (slopes * mass.unsqueeze(1)).T @ slopes
    count = min(max(round(lower / (upper - lower)), 1), 64) if lower else 0
    looks = [lower * number / count for number in range(1, count + 1)] + [upper]
    left, total = torch.ones((), dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for look in looks:
        after = 1 - law(family, row).cdf(torch.tensor(look, dtype=torch.float64))
        there = 1 - after / left
        (slope,) = torch.autograd.grad(there, row, retain_graph=True)
        total += torch.outer(slope, slope) / (there * (1 - there)).detach()
        left = after
    return total


@FAMILY
@pytest.mark.parametrize("censoring", ["right", "interval"])
def test_the_fisher_is_the_information_of_what_was_watched(family: str, censoring: str) -> None:
    model, x, targets = data(family, censoring)
    likelihood = uq.Survival(family, censoring)
    options = {"likelihood": likelihood, "prior_precision": TAU, "progress": False}
    exact = uq.fit(model, [(x[:25], targets[:25]), (x[25:], targets[25:])], "full", fisher="exact", **options)
    bounds = targets if censoring == "interval" else torch.stack(likelihood.bounds(targets), 1)
    rows, parameters = [], list(model.parameters())
    for row in model(x):
        own = [torch.autograd.grad(output, parameters, retain_graph=True) for output in row]
        rows.append(
            torch.stack(
                [
                    torch.cat(
                        [
                            torch.cat([w, b[:, None]], 1).flatten()
                            for w, b in zip(g[::2], g[1::2], strict=True)
                        ]
                    )
                    for g in own
                ]
            )
        )
    jacobian = torch.stack(rows)
    inner = torch.stack(
        [dense_information(family, row, *pair) for row, pair in zip(model(x), bounds.tolist(), strict=True)]
    )
    assert bool((torch.linalg.eigvalsh(inner) > -1e-12).all())
    truth = torch.einsum("nkp,nkl,nlq->pq", jacobian, inner, jacobian) / len(x)
    torch.testing.assert_close(exact.blocks["joint"].fisher, truth, rtol=1e-6, atol=1e-9)
    logs = log_likelihood(family, model(x).detach(), targets, censoring).sum()
    assert exact.evidence.log_likelihood == pytest.approx(float(logs), rel=1e-9)
    weights = torch.cat([p.detach().flatten() for p in parameters])
    precision = len(x) * truth + TAU * torch.eye(len(weights), dtype=torch.float64)
    evidence = logs - 0.5 * (precision.logdet() - len(weights) * math.log(TAU) + TAU * weights.square().sum())
    assert float(exact.log_marginal_likelihood()) == pytest.approx(float(evidence), abs=1e-5)
    drawn = uq.fit(model, [(x, targets)], "full", fisher="mc", n_samples=200, **options)
    assert float((drawn.blocks["joint"].fisher - truth).norm() / truth.norm()) < 0.1


@pytest.mark.parametrize("family", ["weibull", pytest.param("log_normal", marks=pytest.mark.study)])
def test_the_information_is_that_of_scores_under_any_censoring(family: str) -> None:
    samples, likelihood = 100_000, uq.Survival(family)
    outputs = torch.tensor([[0.3, 0.4]], dtype=torch.float64).expand(samples, 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        times, ends = law(family, outputs).sample(), torch.rand(samples, dtype=torch.float64) * 2 + 0.2
    targets = torch.stack([torch.minimum(times, ends), (times <= ends).double()], 1)
    assert 0.4 < float(targets[:, 1].mean()) < 0.7
    factors = torch.stack(list(likelihood.gradients(outputs, targets, torch.arange(samples), "exact")))
    found = torch.einsum("fnk,fnl->kl", factors, factors) / samples
    scores = likelihood.score(outputs, targets)
    products = torch.einsum("nk,nl->nkl", scores, scores)
    error = products.flatten(1).std(0).reshape(2, 2) / samples**0.5
    assert bool(((found - products.mean(0)).abs() < 5 * error).all())
    # looks at even distances
    ends = 0.25 * (times / 0.25).ceil()
    targets, likelihood = torch.stack([ends - 0.25, ends], 1), uq.Survival(family, "interval")
    factors = torch.stack(list(likelihood.gradients(outputs, targets, torch.arange(samples), "exact")))
    found, scores = (
        torch.einsum("fnk,fnl->kl", factors, factors) / samples,
        likelihood.score(outputs, targets),
    )
    products = torch.einsum("nk,nl->nkl", scores, scores)
    error = products.flatten(1).std(0).reshape(2, 2) / samples**0.5
    assert bool(((found - products.mean(0)).abs() < 5 * error).all())
    # and without censoring, by the expectation over times
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    likelihood = uq.Survival(family)
    every = torch.stack([likelihood.log_quantile(outputs[:1], u).exp(), torch.ones_like(u)], 1)
    scores = likelihood.score(outputs[:1].expand(len(u), 2), every)
    factors = torch.stack(list(likelihood.exact_factors(outputs[:1])))[:, 0]
    torch.testing.assert_close(factors.T @ factors, scores.T @ scores / len(u), rtol=2e-3, atol=2e-3)


# Predictions


def mixture(family: str, outputs: Tensor) -> Any:
    first, second = outputs.numpy()[..., 0], np.exp(outputs.numpy()[..., 1])
    if family == "weibull":
        return scipy.stats.weibull_min(second, scale=np.exp(first))
    return scipy.stats.lognorm(second, scale=np.exp(first))


@FAMILY
def test_predictions_are_mixtures_over_the_weights(family: str, tmp_path: Path) -> None:
    model, x, targets = data(family, "right")
    posterior = uq.fit(
        model, [(x, targets)], "full", likelihood=uq.Survival(family), prior_precision=TAU, progress=False
    )
    uq.save(posterior, tmp_path / "p.h5")
    read = uq.load(tmp_path / "p.h5", model)
    assert read.likelihood.attributes() == {"name": "survival", "family": family, "censoring": "right"}
    prediction = uq.wrap(model, read, "sampling", n_samples=30)(x[:5])
    draws = posterior.sample(30, torch.Generator().manual_seed(0))
    outputs = torch.stack(
        [torch.func.functional_call(model, {n: d[i] for n, d in draws.items()}, (x[:5],)) for i in range(30)]
    ).detach()
    own = mixture(family, outputs)
    times = torch.tensor([0.2, 1.0, 4.0], dtype=torch.float64)
    curves = np.stack([own.sf(t) for t in times.tolist()], 2)
    torch.testing.assert_close(prediction.survival(times), torch.from_numpy(curves.mean(0)))
    torch.testing.assert_close(prediction.survival(1.0), torch.from_numpy(curves.mean(0)[:, 1]))
    for found, share in zip(prediction.survival_interval(times, 0.8), (0.1, 0.9), strict=True):
        torch.testing.assert_close(found, torch.from_numpy(np.quantile(curves, share, axis=0)))
    for q, found in (
        (0.5, prediction.median()),
        (0.05, prediction.interval(0.9)[0]),
        (0.95, prediction.interval(0.9)[1]),
    ):
        torch.testing.assert_close(
            torch.from_numpy(own.cdf(found.numpy()).mean(0)), torch.full((5,), q, dtype=torch.float64)
        )
    logs = np.where(
        targets[:5, 1].numpy() > 0, own.pdf(targets[:5, 0].numpy()), own.sf(targets[:5, 0].numpy())
    )
    torch.testing.assert_close(prediction.log_prob(targets[:5]), torch.from_numpy(np.log(logs.mean(0))))
    if family == "log_normal":
        deviations = outputs[..., 1].exp().square().mean(0) + outputs[..., 0].var(0)
        torch.testing.assert_close(prediction.standard_deviation.square(), deviations)
    # the linearised head, by many draws of its Gaussian outputs
    linearized = uq.wrap(model, posterior, n_draws=4096)
    mean, covariance = linearized.functional_mean(x[:5]), linearized.functional_covariance(x[:5])
    noise = torch.randn(50_000, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gaussian = mean + torch.einsum("nkl,snl->snk", torch.linalg.cholesky(covariance), noise)
    wide = mixture(family, gaussian)
    expected = torch.from_numpy(np.stack([wide.sf(t).mean(0) for t in times.tolist()], 1))
    torch.testing.assert_close(linearized(x[:5]).survival(times), expected, rtol=0, atol=4e-3)
    answer = linearized(x[:5]).answers(level=0.9)[0]
    assert [*answer] == ["median", "lower", "upper", "level"] and answer["lower"] < answer["median"] < answer[
        "upper"
    ]


@FAMILY
def test_it_is_tuned_calibrated_and_evaluated(family: str) -> None:
    model, x, targets = data(family, "right", 60)
    posterior = uq.fit(model, [(x, targets)], "kfac", likelihood=uq.Survival(family), progress=False)
    assert posterior.history.head.criterion == "faithful" and posterior.history.faithful.divergence > 0
    posterior = uq.calibrate(posterior, [(x, targets)], progress=False)
    trials = posterior.history.trials
    logs = uq.Survival(family).log_prob(model(x).detach(), targets)
    assert trials is not None and trials.criterion == "likelihood"
    predictor = uq.wrap(model, posterior)
    prediction = predictor(x)
    assert bool((prediction.familiarity() > 0).all())
    found = uq.evaluate(
        {"network": model, "posterior": predictor}, [(x, targets)], referral_rates=[0.5], progress=False
    )
    measured = found.metrics["posterior"]
    assert measured["nll"] == pytest.approx(-float(prediction.log_prob(targets).mean()))
    assert found.metrics["network"]["nll"] == pytest.approx(-float(logs.mean()))
    medians, pairs, right = prediction.median().tolist(), 0, 0.0
    for i, (first, seen) in enumerate(targets.tolist()):
        for j, (second, _) in enumerate(targets.tolist()):
            if seen and first < second:
                pairs += 1
                right += medians[i] < medians[j]
    assert measured["concordance"] == pytest.approx(right / pairs)
    kept = prediction.standard_deviation.argsort()[:30]
    half = -float(prediction.log_prob(targets)[kept].mean())
    assert found.selective["posterior"]["standard_deviation"]["nll_referred_50"] == pytest.approx(half)
    tied = torch.tensor([1.0, 1.0, 2.0])
    assert metrics.concordance(tied, torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, math.inf, 3.0])) == 0.5


# lifelines


class Fitted(NamedTuple):
    """What lifelines found by maximum likelihood, with ``ancillary=True``: of both outputs the weights of two
    covariates and the intercept, their standard errors, the log-likelihood, survival of three samples at .5, 2 and 6,
    their medians.
    For ``censoring="interval"`` a first time of 0 was passed as 1e-9, and infinity as 1e9, which its gradients need.
    """

    weights: list[float]
    errors: list[float]
    log_likelihood: float
    survival: list[list[float]]
    medians: list[float]


LIFELINES = {
    "weibull, right": Fitted(
        [0.425476001, -0.281522506, 1.073924937, 0.2439274, 0.02781062, 0.242254856],
        [0.0485162, 0.0480995, 0.051135, 0.0505552, 0.0456771, 0.0483418],
        -490.5911616,
        [
            [0.99151111, 0.87556055, 0.30988471],
            [0.93329365, 0.47189966, 0.00688511],
            [0.99610979, 0.94305382, 0.60501772],
        ],
        [4.6036311, 1.9090295, 7.0727331],
    ),
    "weibull, interval": Fitted(
        [0.409247719, -0.278932659, 1.086678931, 0.203523292, 0.035322679, 0.274143781],
        [0.0484255, 0.0482489, 0.0498569, 0.0580669, 0.0508329, 0.0538991],
        -496.7051993,
        [
            [0.98965603, 0.86335114, 0.3016642],
            [0.93515581, 0.47448033, 0.00654405],
            [0.99468555, 0.93233476, 0.5829036],
        ],
        [4.5048433, 1.9178698, 6.8645649],
    ),
    "log_normal, right": Fitted(
        [0.522764471, -0.30045943, 0.664796788, -0.225373035, -0.036683165, 0.11420226],
        [0.0652943, 0.063477, 0.0661396, 0.046356, 0.0424506, 0.0449739],
        -514.3515886,
        [
            [0.99819238, 0.85135103, 0.33074739],
            [0.9257053, 0.40925784, 0.05984722],
            [0.99971489, 0.94822123, 0.57435529],
        ],
        [4.3351739, 1.6538846, 6.9223182],
    ),
    "log_normal, interval": Fitted(
        [0.477149902, -0.278336176, 0.704044668, -0.163007235, -0.048396367, -0.054359676],
        [0.0573567, 0.0559484, 0.0570894, 0.0541072, 0.0485025, 0.0529338],
        -508.7126206,
        [
            [0.99886869, 0.85629537, 0.30401689],
            [0.95657725, 0.42022758, 0.04291703],
            [0.9997639, 0.94554482, 0.54101638],
        ],
        [4.1971036, 1.7285929, 6.4700755],
    ),
}
CONCORDANCE = {"weibull": 0.6837976845324384, "log_normal": 0.6830827888873444}


def lifelines_data() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, right-censored targets, and the same times as seen, or as ranges between whole numbers."""
    rng = np.random.RandomState(0)
    x = rng.standard_normal((400, 2)).round(4)
    z = np.log(-np.log1p(-rng.uniform(size=400)))
    times = np.exp(1 + 0.5 * x[:, 0] - 0.3 * x[:, 1] + z * np.exp(-0.3 - 0.2 * x[:, 0])).round(5) + 1e-4
    ends = (rng.exponential(5.0, 400) + 0.05).round(5)
    seen = times <= ends
    right = np.stack([np.minimum(times, ends), seen], 1)
    exact = seen & (np.arange(400) % 5 == 0)
    lower = np.where(exact, times, np.where(seen, np.floor(times), ends))
    upper = np.where(exact, times, np.where(seen, np.floor(times) + 1, np.inf))
    return torch.from_numpy(x), torch.from_numpy(right), torch.from_numpy(np.stack([lower, upper], 1))


@pytest.mark.parametrize("case", LIFELINES)
def test_a_linear_model_is_that_of_lifelines(case: str) -> None:
    (family, censoring), known = case.split(", "), LIFELINES[case]
    x, right, within = lifelines_data()
    targets, likelihood = right if censoring == "right" else within, uq.Survival(family, censoring)
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        weights = torch.tensor(known.weights, dtype=torch.float64).reshape(2, 3)
        model.weight.copy_(weights[:, :2]), model.bias.copy_(weights[:, 2])
    design = torch.cat([x, torch.ones(400, 1, dtype=torch.float64)], 1)

    def log_prob(flat: Tensor) -> Tensor:
        return likelihood.log_prob(design @ flat.reshape(2, 3).T, targets).sum()

    flat = weights.flatten()
    assert float(log_prob(flat)) == pytest.approx(known.log_likelihood, rel=1e-7)
    hessian = torch.autograd.functional.hessian(log_prob, flat)
    gradient = torch.autograd.functional.jacobian(log_prob, flat)
    assert float(torch.linalg.solve(hessian, gradient).abs().max()) < 1e-3  # it is the maximum
    errors = torch.tensor(known.errors, dtype=torch.float64)
    torch.testing.assert_close((-hessian).inverse().diagonal().sqrt(), errors, rtol=1e-3, atol=0)
    # the posterior has the expected information, lifelines the observed one
    options = {"likelihood": likelihood, "progress": False}
    posterior = uq.fit(model, [(x, targets)], "full", fisher="exact", prior_precision=1e-6, **options)
    own = (400 * posterior.blocks["joint"].fisher).inverse().diagonal().sqrt()
    assert float((own / errors - 1).abs().max()) < 0.12
    surely = uq.wrap(model, posterior.with_settings(prior_precision=1e12))(x)
    assert isinstance(surely, SurvivalPrediction)
    times = torch.tensor([0.5, 2.0, 6.0], dtype=torch.float64)
    expected = torch.tensor(known.survival, dtype=torch.float64)
    torch.testing.assert_close(surely.picked(slice(0, 3)).survival(times), expected, rtol=0, atol=2e-6)
    medians = torch.tensor(known.medians, dtype=torch.float64)
    torch.testing.assert_close(surely.median()[:3], medians, rtol=1e-5, atol=0)
    if censoring == "right":
        assert surely.quality(targets)["concordance"] == pytest.approx(CONCORDANCE[family], abs=1e-12)


# The command line


def test_a_table_of_times(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n    torch.manual_seed(0)\n    return nn.Linear(2, 2)\n"
    )
    x, right, _ = lifelines_data()
    rows = torch.cat([x, right], 1)[:60].tolist()
    (tmp_path / "t.csv").write_text(
        "a,b,time,seen\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    )
    model = ["--model", f"{tmp_path / 'nets.py'}:net"]
    own = ["--target time,seen --likelihood survival --family log_normal --method kfac --prior-precision 2"]
    run("fit", tmp_path / "t.csv", *model, "-o", tmp_path / "p.h5", *own)
    said = run_json("evaluate", tmp_path / "p.h5", tmp_path / "t.csv", *model)
    torch.manual_seed(0)
    network = nn.Linear(2, 2)
    posterior = uq.load(tmp_path / "p.h5", network)
    assert posterior.likelihood.attributes()["family"] == "log_normal"
    prediction = uq.wrap(network, posterior)(x[:60].float())
    quality = said["quality"]["kfac, linearized"]
    assert quality["nll"] == pytest.approx(-float(prediction.log_prob(right[:60].float()).mean()), rel=1e-4)
    assert quality["concordance"] == pytest.approx(prediction.quality(right[:60].float())["concordance"])
    run("predict", tmp_path / "p.h5", tmp_path / "t.csv", *model, "--level 0.8 -o", tmp_path / "out.csv")
    header, first = (tmp_path / "out.csv").read_text().splitlines()[:2]
    columns = dict(zip(header.split(","), first.split(","), strict=True))
    lower, upper = prediction.interval(0.8)
    for name, values in (("median", prediction.median()), ("lower", lower), ("upper", upper)):
        assert float(columns[name]) == pytest.approx(float(values[0]), rel=1e-4)


@pytest.mark.parametrize(
    ("family", "outputs", "targets"),
    [
        ("weibull", (0.0, 1.6), (0.5, 1e9)),
        ("log_normal", (5.0, -0.1), (0.0, 0.001)),
        ("log_normal", (11.0, -0.5), (1.0, 2.0)),
        ("log_normal", (0.0, 3.0), (1e6, 1e6 + 1)),
    ],
)
def test_ranges_far_from_what_is_predicted_keep_their_gradient(
    family: Any, outputs: tuple[float, float], targets: tuple[float, float]
) -> None:
    likelihood, found = uq.Survival(family, censoring="interval"), []
    for dtype in (torch.float32, torch.float64):
        at = torch.tensor([outputs], dtype=torch.float32).to(dtype).requires_grad_()
        logs = likelihood.log_prob(at, torch.tensor([targets], dtype=torch.float64))
        assert logs.dtype == dtype
        found.append((logs.detach().double(), torch.autograd.grad(logs.sum(), at)[0].double()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[0][1].abs().min() > 0
