"""Draws of functions and of what they predict, and gradients of predictions by the inputs, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from networks import mlp
from torch import Tensor, nn
from torch.func import functional_call, jacrev  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._python_dispatch import TorchDispatchMode
from watching import Watch

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.heads import HEADS, LinearizedPredictor

DOUBLE = torch.float64


def _x(n: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)).to(DOUBLE)


def _fitted(method: str = "full", likelihood: str = "classification") -> tuple[nn.Module, uq.Posterior]:
    outputs = 3 if likelihood == "classification" else 2
    model = mlp(outputs, dtype=DOUBLE)
    x = _x(20)
    targets = torch.arange(20) % 3 if likelihood == "classification" else x[:, :2] * 2
    options: dict[str, Any] = {} if likelihood == "classification" else {"noise_variance": 0.3}
    posterior = uq.fit(
        model, [(x, targets)], method, likelihood=likelihood, prior_precision=3.0, progress=False, **options
    )
    return model, posterior


def _seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _dense(model: nn.Module, posterior: uq.Posterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Jacobians ``(batch, outputs, weights)`` by autograd, and the covariance of the same weights, by unit vectors."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    jacobian: dict[str, Tensor] = jacrev(lambda w: functional_call(model, w, (x,)))(weights)
    parts, columns = [], []
    for layer in posterior.layers.values():
        assert layer.bias is not None
        own = torch.cat([jacobian[layer.weight], jacobian[layer.bias].unsqueeze(-1)], -1)
        parts.append(own.flatten(2))
        columns.append(own[0, 0].numel())
    units = torch.eye(sum(columns), dtype=DOUBLE).split(columns, dim=1)
    by_layer = {
        name: unit.reshape(-1, *layer.matrix_shape)
        for (name, layer), unit in zip(posterior.layers.items(), units, strict=True)
    }
    return torch.cat(parts, 2), posterior.quadratic(by_layer)


@pytest.mark.parametrize("head", HEADS)
def test_shapes_seeds_and_the_model_as_it_was(head: str) -> None:
    for likelihood, outputs in (("classification", 3), ("regression", 2)):
        model, posterior = _fitted("kfac", likelihood)
        predictor, x = uq.wrap(model, posterior, head), _x()
        with Watch(model):
            drawn = predictor.functional_samples(x, n_samples=4, generator=_seeded())
            again = predictor.functional_samples(x, n_samples=4, generator=_seeded())
            other = predictor.functional_samples(x, n_samples=4)
            means = predictor.predictive_samples(x, n_samples=4, generator=_seeded())
            targets = predictor.predictive_samples(x, n_samples=4, generator=_seeded(), targets=True)
        assert drawn.shape == other.shape == means.shape == (4, 3, outputs) and drawn.dtype == DOUBLE
        assert torch.equal(drawn, again) and not torch.equal(drawn, other)
        if likelihood == "classification":
            torch.testing.assert_close(means, drawn.softmax(-1))
            assert targets.shape == (4, 3) and targets.dtype == torch.int64
            warm = predictor.with_posterior(posterior.with_settings(temperature=2.0))
            means = warm.predictive_samples(x, n_samples=4, generator=_seeded())
            torch.testing.assert_close(means, (drawn / 2).softmax(-1))
        else:
            assert torch.equal(means, drawn) and targets.shape == drawn.shape
            assert not torch.equal(targets, drawn)
    with pytest.raises(PosthocUQError, match="n_samples must be"):
        predictor.functional_samples(x, n_samples=0)


def test_drawn_weights_are_those_of_the_posterior() -> None:
    """Of the sampling head ``f(x; theta_s)``, of the linearised one ``f + J (theta_s - theta)``, at all inputs."""
    model, posterior = _fitted()
    x, n = _x(5), 6
    weights = posterior.sample(n, _seeded())
    expected = torch.stack(
        [functional_call(model, {k: w[s] for k, w in weights.items()}, (x,)) for s in range(n)]
    ).detach()
    found = uq.wrap(model, posterior, "sampling").functional_samples(x, n_samples=n, generator=_seeded())
    torch.testing.assert_close(found, expected)
    trained_mean = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(model, w, (x,)))(trained_mean)
    line = model(x).detach().expand(n, -1, -1).clone()
    for name, draws in weights.items():
        line += torch.einsum(
            "bop,sp->sbo", jacobian[name].flatten(2), (draws - trained_mean[name]).flatten(1)
        )
    predictor = uq.wrap(model, posterior, "linearized")
    found = predictor.functional_samples(x, n_samples=n, generator=_seeded())
    torch.testing.assert_close(found, line)
    part = predictor.functional_samples(x[2:4], n_samples=n, generator=_seeded())
    torch.testing.assert_close(part, found[:, 2:4])  # one function, whatever is asked of it


class Operations(TorchDispatchMode):
    """Counts how often a tanh is computed."""

    tanh = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tanh += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["full", "kfac", "inf"])
@pytest.mark.parametrize("layers", ["last", "all"])
def test_joint_draws_over_candidates(method: str, layers: str) -> None:
    """Against the dense covariance of all candidates; one seed is one function, however the candidates are divided and
    however little memory there is.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = _x(20)
    posterior = uq.fit(
        model,
        [(x, x[:, :2] * 2)],
        method,
        layers=layers,
        likelihood="regression",
        noise_variance=0.3,
        prior_precision=3.0,
        progress=False,
    )
    candidates, n = _x(10, seed=3), 600
    predictor = uq.wrap(model, posterior, "linearized")
    drawn = predictor.functional_samples(candidates, n_samples=n, generator=_seeded())
    small = uq.wrap(model, posterior, "linearized", memory_budget=1024)  # two or more draws at once
    for part, same in zip(candidates.split(4), drawn[:20].split(4, dim=1), strict=True):
        torch.testing.assert_close(small.functional_samples(part, n_samples=20, generator=_seeded()), same)
    jacobian, covariance = _dense(model, posterior, candidates)
    joint = torch.einsum("biw,wv,cjv->bicj", jacobian, covariance, jacobian).reshape(20, 20)
    found = (drawn - model(candidates).detach()).reshape(n, 20)
    found = found.T @ found / n
    deviation = joint.diagonal().sqrt()
    error = (found - joint) / (deviation.unsqueeze(1) * deviation)
    assert (
        error.square().mean().sqrt() < 1.6 / n**0.5
    )  # that of an empirical correlation is at most sqrt(2 / n)
    assert error.abs().max() < 8 / n**0.5


def test_what_comes_before_the_drawn_weights_runs_once() -> None:
    passes = dict[int, int]()
    for n in (3, 30):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        posterior = uq.fit(
            model,
            [(_x(20), torch.arange(20) % 2)],
            "kfac",
            layers="last",
            prior_precision=1.0,
            progress=False,
        )
        predictor = uq.wrap(model, posterior, "linearized")
        with Operations() as watched:
            predictor.functional_samples(_x(), n_samples=n)
        passes[n] = watched.tanh
    assert passes[3] == passes[30] > 0


def test_moments_of_many_draws() -> None:
    model, posterior = _fitted("diag", "regression")
    predictor: Any = uq.wrap(model, posterior, "moments")
    x = _x(2)
    drawn = predictor.functional_samples(x, n_samples=4000, generator=_seeded())
    distribution = predictor.distribution(x)
    deviation = distribution.variance.sqrt()
    torch.testing.assert_close(
        (drawn.mean(0) - distribution.mean) / deviation, torch.zeros_like(deviation), rtol=0, atol=0.08
    )
    torch.testing.assert_close(
        drawn.var(0) / distribution.variance, torch.ones_like(deviation), rtol=0, atol=0.1
    )
    with_noise = predictor.predictive_samples(x, n_samples=4000, generator=_seeded(), targets=True)
    torch.testing.assert_close(
        with_noise.var(0) / (distribution.variance + 0.3), torch.ones_like(deviation), rtol=0, atol=0.1
    )


def test_an_operation_without_a_forward_derivative() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return Backward.apply(self.net(x))  # type: ignore[return-value]

    posterior = uq.fit(Net(), [(_x(), torch.arange(3))], prior_precision=1.0, progress=False)
    assert posterior.model is not None
    with pytest.raises(PosthocUQError, match="draw functions with head='sampling'"):
        uq.wrap(posterior.model, posterior, "linearized").functional_samples(_x(), n_samples=2)


# Gradients by the inputs


def _against_differences(answer: Any, x: Tensor, relative: float = 1e-5) -> None:
    """Autograd's gradient of a number by the inputs is that of central differences."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(answer(x), x)
    found, step = torch.zeros_like(x).detach(), 1e-5
    for place in range(x.numel()):
        unit = torch.zeros(x.numel(), dtype=x.dtype)
        unit[place] = step
        unit = unit.reshape(x.shape)
        found.view(-1)[place] = (answer(x.detach() + unit) - answer(x.detach() - unit)) / (2 * step)
    assert float(found.abs().max()) > 1e-4
    torch.testing.assert_close(gradient, found, rtol=relative, atol=relative * float(found.abs().max()))


OPTIONS: dict[str, dict[str, Any]] = {
    "sampling": {"n_samples": 4},
    "linearized": {"backpropagate": True},
    "moments": {},
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", ["full", "inf", "kfac", "diag"])
@pytest.mark.covering(1)
def test_gradients_of_predictions_by_the_inputs(head: str, method: str) -> None:
    model, posterior = _fitted(method)
    predictor = uq.wrap(model, posterior, head, **OPTIONS[head])
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)
    with Watch(model):
        _against_differences(lambda x: (predictor(x).probs * weights).sum(), _x(2))
        _against_differences(lambda x: predictor(x).entropy().sum(), _x(2))
    model, posterior = _fitted(method, "regression")
    predictor = uq.wrap(model, posterior, head, **OPTIONS[head])
    _against_differences(lambda x: (predictor(x).mean + 2 * predictor(x).variance).sum(), _x(2))


@pytest.mark.parametrize("link", ["mc", "probit", "bridge"])
def test_every_link_of_the_linearised_head(link: str) -> None:
    model, posterior = _fitted("kfac")
    predictor = uq.wrap(model, posterior, "linearized", link=link, backpropagate=True)
    _against_differences(lambda x: predictor(x).probs[:, 0].sum(), _x(2))


def test_the_covariance_and_its_gradient_are_those_of_the_definition() -> None:
    for likelihood in ("classification", "regression"):
        model, posterior = _fitted("full", likelihood)
        predictor, x = uq.wrap(model, posterior, "linearized", backpropagate=True), _x(3)
        plain = uq.wrap(model, posterior, "linearized")
        assert isinstance(predictor, LinearizedPredictor) and isinstance(plain, LinearizedPredictor)
        jacobian, covariance = _dense(model, posterior, x)
        expected = jacobian @ covariance @ jacobian.transpose(1, 2)
        found = predictor.functional_covariance(x.clone().requires_grad_())
        assert found.requires_grad
        torch.testing.assert_close(found.detach(), expected)
        torch.testing.assert_close(plain.functional_covariance(x), expected)
        flat = jacobian.flatten(0, 1)
        joint = predictor.functional_covariance(x, joint=True)
        torch.testing.assert_close(joint.detach(), flat @ covariance @ flat.T)
        mean = predictor.functional_mean(x.clone().requires_grad_())
        assert mean.requires_grad
        torch.testing.assert_close(
            predictor.functional_variance(x).detach(), expected.diagonal(dim1=1, dim2=2)
        )
        joint_covariance = partial(predictor.functional_covariance, joint=True)
        _against_differences(lambda x, answer=joint_covariance: answer(x).square().sum(), x)
        with torch.no_grad():  # the engine that forms no Jacobian
            assert not predictor.functional_variance(x.clone().requires_grad_()).requires_grad


class Stubborn(nn.Module):
    """Takes another path by a number in its input, which vmap cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.net(x)
        return outputs * 2 if float(x.abs().sum()) > 0 else outputs


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Conv2d(1, 2, 2, groups=1),
                nn.BatchNorm2d(2),
                nn.SiLU(inplace=True),
                nn.Conv2d(2, 4, 2, groups=2),
            )
            self.last = nn.Parameter(torch.randn(4, 2))  # a product: its inputs come first
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.reshape(-1, 1, 4, 4)).mean((2, 3)) @ self.last


@pytest.mark.parametrize("kind", [Stubborn, Image])
def test_models_that_vmap_cannot_run_and_convolutions(kind: type[nn.Module]) -> None:
    model = kind()
    x = torch.randn(6, 4 if kind is Stubborn else 16, generator=_seeded()).to(DOUBLE)
    posterior = uq.fit(
        model,
        [(x, torch.zeros(6, 2).to(DOUBLE))],
        "inf",
        layers="all" if kind is Stubborn else ["net", "last"],
        likelihood="regression",
        prior_precision=1.0,
        noise_variance=0.1,
        progress=False,
    )
    predictor = uq.wrap(model, posterior, "linearized", backpropagate=True)
    with Watch(model):
        differentiable = predictor(x[:2])
        with torch.no_grad():
            plain = predictor(x[:2])
        torch.testing.assert_close(differentiable.variance.detach(), plain.variance)
        _against_differences(lambda x: predictor(x).variance.sum(), x[:2])


def test_what_backpropagate_leaves_alone() -> None:
    model, posterior = _fitted()
    assert uq.wrap(model, posterior, backpropagate=True).head == "linearized"
    plain: Any = uq.wrap(model, posterior, "linearized")(_x().requires_grad_())
    assert not plain.probs.requires_grad
    predictor = uq.wrap(model, posterior, "linearized", backpropagate=True)
    predicted: Any = predictor.predict([_x()])
    assert predicted.probs.requires_grad is False
