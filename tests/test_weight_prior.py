"""Prior precisions and means of single weights, against dense float64 computations by the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import inputs_of, mlp
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.posteriors import WeightPrior
from posthoc_uq.trained import function_space_kl

OWN = {
    "diag": uq.Diagonal(dtype=torch.float64),
    "full": uq.Dense(dtype=torch.float64),
    "subnetwork": uq.Subnetwork(n=11, dtype=torch.float64),
    "subnetwork, diagonal": uq.Subnetwork(n=11, structure="diag", dtype=torch.float64),
    "inf": uq.INF(rank=12, dtype=torch.float64),
}
MEANS = OWN | {"kfac": uq.KFAC(dtype=torch.float64), "efb": uq.EFB(dtype=torch.float64)}


def net() -> nn.Sequential:
    """A grouped convolution and a linear layer, 19 weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 2, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(2, 3)]
    return nn.Sequential(*layers).double().eval()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 2, 2, 2, generator=generator, dtype=torch.float64)
    return list(zip(x.split(8), torch.randint(0, 3, (20,), generator=generator).split(8), strict=True))


def tensors(model: nn.Module, seed: int, low: float, high: float) -> dict[str, Tensor]:
    """Random numbers in the shapes of all parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: low + (high - low) * torch.rand(p.shape, generator=generator, dtype=torch.float64)
        for name, p in model.named_parameters()
    }


def fit(model: nn.Module, method: Any, **options: Any) -> uq.Posterior:
    return uq.fit(model, data(), method, progress=False, **options)


def flat(posterior: uq.Posterior, named: Any) -> Tensor:
    """Parameters by name in the order of the posterior's blocks: each layer's rows with the bias last."""
    parts = [layer.to_matrix(named[layer.weight], named[layer.bias]) for layer in posterior.layers.values()]
    return torch.cat([part.detach().flatten() for part in parts])


def fisher(posterior: uq.Posterior) -> Tensor:
    """The precision that the data gave, over all weights, by the definition of the method's approximation."""
    parts = [
        block.dense(posterior.scale, posterior.residual_weight).double()
        for block in posterior.blocks.values()
    ]
    return torch.block_diag(*(matrix for part in parts for matrix in part))


def chosen(posterior: uq.Posterior) -> Tensor:
    own = [block.uncertain() for block in posterior.blocks.values()]
    if own[0] is None:
        return torch.ones(19, dtype=torch.bool)
    return torch.cat([mask.flatten() for mask in own if mask is not None])


@pytest.mark.parametrize("method", OWN)
def test_the_covariance_and_the_evidence(method: str) -> None:
    model = net()
    precision, mean = tensors(model, 2, 0.1, 5.0), tensors(model, 3, -1.0, 1.0)
    posterior = fit(model, OWN[method], prior_precision=precision, prior_mean=mean)
    assert posterior.prior_precision == 1.0
    own, information = chosen(posterior), fisher(posterior)
    r, mu, theta = (flat(posterior, named) for named in (precision, mean, dict(model.named_parameters())))
    r, mu, theta, information = r[own], mu[own], theta[own], information[own][:, own]
    outputs = torch.cat([model(x) for x, _ in data()]).log_softmax(1)
    labels = torch.cat([y for _, y in data()])
    log_likelihood = outputs[torch.arange(20), labels].sum().detach()
    for tau in (1.0, 0.3):
        posterior = posterior.with_settings(prior_precision=tau)
        matrix = information + tau * r.diag()
        variance = flat(posterior, posterior.variance())
        torch.testing.assert_close(variance[own], torch.linalg.inv(matrix).diagonal(), rtol=1e-8, atol=0)
        assert not variance[~own].any()
        moved = theta - mu
        occam = torch.logdet(matrix) - (tau * r).log().sum() + tau * (r * moved) @ moved
        evidence = posterior.log_marginal_likelihood()
        torch.testing.assert_close(evidence, log_likelihood - occam / 2, rtol=1e-9, atol=0)
        number = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(posterior.log_marginal_likelihood(number), number)
        trace = torch.linalg.solve(matrix, r.diag()).trace()
        wanted = -(trace - len(r) / tau + (r * moved) @ moved) / 2
        torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=0)


@pytest.mark.parametrize("method", MEANS)
@pytest.mark.parametrize("mean", [0.4, {"3.weight": torch.full((3, 2), 0.7), "3.bias": -1.0}])
@pytest.mark.covering(1)
def test_a_prior_mean_enters_the_evidence_alone(method: str, mean: Any) -> None:
    model = net()
    plain = fit(model, MEANS[method], prior_precision=2.0)
    found = fit(model, MEANS[method], prior_precision=2.0, prior_mean=mean)
    for name, variance in plain.variance().items():
        assert torch.equal(found.variance()[name], variance)
    own = chosen(plain)
    theta = flat(plain, dict(model.named_parameters()))[own]
    named = mean if isinstance(mean, dict) else dict.fromkeys(dict(model.named_parameters()), mean)
    whole = {
        name: torch.zeros_like(p) + torch.as_tensor(named.get(name, 0.0), dtype=torch.float64)
        for name, p in model.named_parameters()
    }
    mu = flat(plain, whole)[own]
    for tau in (2.0, {"0": 0.5, "3": 4.0}):
        taus = (
            torch.cat([torch.full((10,), tau["0"]), torch.full((9,), tau["3"])])
            if isinstance(tau, dict)
            else 2.0
        )
        taus = torch.as_tensor(taus, dtype=torch.float64).expand(len(chosen(plain)))[own]
        moved = (taus * ((theta - mu).square() - theta.square())).sum() / 2
        difference = plain.log_marginal_likelihood(tau) - found.log_marginal_likelihood(tau)
        torch.testing.assert_close(difference, moved, rtol=1e-8, atol=1e-9)


@pytest.mark.filterwarnings("ignore:At the prior precision of the log marginal likelihood")
def test_the_search_by_evidence_knows_both() -> None:
    model = net()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = fit(model, "full", prior_precision="evidence")
    moved = {name: p + 0.1 * tensors(model, 4, -1.0, 1.0)[name] for name, p in weights.items()}
    near = fit(model, "full", prior_precision="evidence", prior_mean=moved)
    assert near.prior_precision > 5 * plain.prior_precision  # the prior is nearly right about the weights
    posterior = fit(model, "full", prior_precision=tensors(model, 2, 0.5, 2.0), prior_mean=moved)
    posterior = uq.tune(posterior)
    best = posterior.log_marginal_likelihood()
    for factor in (0.8, 1.25):
        assert posterior.log_marginal_likelihood(posterior.prior_precision * factor) < best
    assert (
        posterior.report().to_dict()["summary"]["prior of each weight"] == "given, times the prior precision"
    )


def test_heads_draws_and_data_that_come_in() -> None:
    model = net()
    precision = tensors(model, 2, 0.5, 30.0)
    posterior = fit(model, OWN["full"], prior_precision=precision, prior_mean=0.1)
    x = data()[0][0][:3]
    found = uq.wrap(model, posterior, head="linearized").functional_covariance(x, joint=True)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(o, list(model.parameters()), retain_graph=True)])
        for o in model(x).flatten()
    ]
    names = [name for name, _ in model.named_parameters()]
    shapes = dict(model.named_parameters())

    def placed(row: Tensor) -> Tensor:
        parts = row.split([shapes[name].numel() for name in names])
        return flat(
            posterior, {n: part.reshape(shapes[n].shape) for n, part in zip(names, parts, strict=True)}
        )

    jacobian = torch.stack([placed(row) for row in rows])
    covariance = torch.linalg.inv(fisher(posterior) + flat(posterior, precision).diag())
    torch.testing.assert_close(found, jacobian @ covariance @ jacobian.T, rtol=1e-7, atol=1e-10)
    draws = posterior.sample(4000, torch.Generator().manual_seed(0))
    for name, variance in posterior.variance().items():
        torch.testing.assert_close(draws[name].var(0), variance, rtol=0.15, atol=0)
    novelty = uq.wrap(model, posterior, head="linearized").novelty(x, of="top")
    plain = fit(model, OWN["full"], prior_precision=1.0)
    torch.testing.assert_close(novelty, uq.wrap(model, plain, head="linearized").novelty(x, of="top"))
    before = posterior.variance()
    posterior = uq.update(posterior, data(), progress=False)
    assert posterior.weight_prior.precision.keys() == precision.keys()
    posterior = uq.update(posterior, data(), remove=True, progress=False)
    for name, variance in posterior.variance().items():
        torch.testing.assert_close(variance, before[name], rtol=1e-6, atol=0)
    assert float(function_space_kl(posterior, x).total) != pytest.approx(
        float(function_space_kl(plain, x).total), rel=1e-3
    )


@pytest.mark.parametrize("untrusted", [False, True])
@pytest.mark.parametrize("method", ["diag", "inf", "full", "kfac"])
@pytest.mark.covering(1)
def test_files_keep_what_is_needed(method: str, untrusted: bool, tmp_path: Path) -> None:
    model, path = net(), tmp_path / "posterior.h5"
    options: dict[str, Any] = {"prior_mean": tensors(model, 3, -1.0, 1.0)}
    options |= {"prior_precision": 1.5 if method == "kfac" else tensors(model, 2, 0.1, 5.0)}
    posterior = fit(model, MEANS[method], **options)
    uq.save(posterior, path)
    again = uq.load(path, model, untrusted=untrusted)
    assert torch.equal(again.log_marginal_likelihood(0.7), posterior.log_marginal_likelihood(0.7))
    for name, variance in posterior.variance().items():
        assert torch.equal(again.variance()[name], variance)
    bytes_of = path.read_bytes()
    uq.save(again, path)
    assert path.read_bytes() == bytes_of
    simple = fit(model, MEANS[method], prior_precision=1.5, prior_mean=0.25)
    uq.save(simple, path)
    assert uq.load(path, model).weight_prior.mean == 0.25
    assert len(path.read_bytes()) < len(bytes_of)


def test_a_training_keeps_its_own_option_of_that_name() -> None:
    model = net().float()
    loader = [(x.float(), y) for x, y in data()]
    posterior = uq.fit(model, loader, "utvi", prior_mean="trained", epochs=1, progress=False)
    assert posterior.history.fit["prior mean"] == "trained"


def test_a_kept_factor_belongs_to_its_prior() -> None:
    model, x = mlp(), inputs_of(4)
    posterior = uq.fit(model, [x], "diag", prior_precision=1.0, progress=False)
    for ratio in (2, 3):
        names = [name for layer in posterior.layers.values() for name in layer.parameter_names]
        precision = {name: torch.full_like(posterior.mean[name], float(ratio)) for name in names}
        posterior = posterior.replaced(weight_prior=WeightPrior(precision))
        for name, variance in posterior.variance().items():
            assert float(variance.max()) <= 1 / ratio + 1e-6, (name, ratio)


@pytest.mark.parametrize("method", OWN)
def test_a_fitted_posterior_takes_a_vector_of_prior_precisions(method: str) -> None:
    """By weight, as a vector in the order of the model's parameters or by name: that of a fit with them."""
    model = net()
    precision = tensors(model, 2, 0.1, 5.0)
    wanted = fit(model, OWN[method], prior_precision=precision)
    plain = fit(model, OWN[method], prior_precision=2.0)
    assert plain.parameter_names == [name for name, _ in model.named_parameters()]
    vector = torch.cat([precision[name].flatten() for name in plain.parameter_names])
    for given in (vector, vector.tolist(), precision):
        found = plain.with_settings(prior_precision=given)
        assert found.prior_precision == 1.0 and plain.prior_precision == 2.0
        for name, variance in wanted.variance().items():
            torch.testing.assert_close(found.variance()[name], variance, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.log_marginal_likelihood(), wanted.log_marginal_likelihood())
    for name, variance in found.with_settings(prior_precision=3.0).variance().items():
        torch.testing.assert_close(variance, wanted.with_settings(prior_precision=3.0).variance()[name])
    report = found.report().to_dict()["summary"]
    assert report["prior of each weight"] == "given, times the prior precision"


@pytest.mark.parametrize("method", MEANS)
def test_a_fitted_posterior_takes_a_vector_by_layer(method: str) -> None:
    posterior = fit(net(), MEANS[method], prior_precision=2.0)
    for given in (torch.tensor([0.5, 4.0]), [0.5, 4.0], {"0": torch.tensor(0.5), "3": 4}):
        assert posterior.with_settings(prior_precision=given).prior_precision == {"0": 0.5, "3": 4.0}
    assert posterior.with_settings(prior_precision=torch.tensor([7.0])).prior_precision == 7.0


def test_promises_do_not_outlive_a_prior_of_each_weight(tmp_path: Path) -> None:
    model = net()
    posterior = uq.calibrate(fit(model, "diag", prior_precision=2.0), data(), progress=False)
    with pytest.warns(UserWarning, match="no longer hold"):
        found = posterior.with_settings(prior_precision=torch.full((19,), 2.0))
    assert found.history.promises is None and posterior.history.promises is not None
    uq.save(found, tmp_path / "p.h5")
    again = uq.load(tmp_path / "p.h5", model)
    for name, variance in found.variance().items():
        assert torch.equal(again.variance()[name], variance)


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("kfac", torch.ones(19), "cannot enter blocks of the kind 'kfac'; give one number a layer"),
        ("diag", torch.ones(5), "has 5 numbers; give one, 2 for the layers, or 19 for the weights"),
        ("diag", "wide", "prior_precision must be a number, a vector .*, not a str"),
        ("diag", {"3.weight": torch.ones(3, 2)}, r"none for \['0.weight'"),
        ("diag", -torch.ones(19), "must be positive everywhere"),
        ("diag", {"4": 1.0, "0": 1.0}, "per layer must name every layer once"),
    ],
)
def test_prior_precisions_that_do_not_fit(method: str, given: Any, said: str) -> None:
    with pytest.raises(uq.PosthocUQError, match=said):
        fit(net(), method, prior_precision=1.0).with_settings(prior_precision=given)
