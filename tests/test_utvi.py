"""Variational inference by propagated moments: its terms against independent computations, its optimum where that is
known, its gradients, its options.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import batches, cnn, inputs_of, mlp, outputs_for, steady, targets_of
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import posthoc_uq as uq
from posthoc_uq.core import Batch, DeferredChecks, replicate
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import LIKELIHOODS, Likelihood, resolve_likelihood
from posthoc_uq.moments import InverseCDF
from posthoc_uq.trained import MeanField, Step
from posthoc_uq.trained.mean_field import gaussian_divergence
from posthoc_uq.trained.utvi import MomentObjective, certain_parameters

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def fit(model: nn.Module, data: Any, method: uq.UTVI, **options: Any) -> uq.Posterior:
    return uq.fit(model, data, method, progress=False, **{"divergence": None} | options)


def objective_of(
    model: nn.Module, likelihood: Likelihood, log_variance: float = -3.0, samples: int = 50, **options: Any
) -> MomentObjective:
    """The objective of a model all of whose layers are uncertain."""
    x = inputs_of(*INPUTS[type(model).__name__], dtype=next(model.parameters()).dtype)
    posterior = uq.fit(
        model, [(x, targets_of(model, x, likelihood.name))], "diag", likelihood=likelihood, prior_precision=1.0,
        progress=False,
    )  # fmt: skip
    return objective_for(model, posterior.layers, likelihood, log_variance, samples, **options)


def objective_for(
    model: nn.Module,
    layers: dict[str, Layer],
    likelihood: Likelihood,
    log_variance: float,
    samples: int,
    **options: Any,
) -> MomentObjective:
    names = [name for layer in layers.values() for name in layer.parameter_names]
    means = {name: p.detach().clone() for name, p in model.named_parameters() if name in names}
    generator = torch.Generator().manual_seed(4)
    logs = {
        name: log_variance + torch.rand(mean.shape, generator=generator, dtype=mean.dtype)
        for name, mean in means.items()
    }
    method = uq.UTVI(prior_precision=2.0, **options)
    field = MeanField(means, logs, True)
    return MomentObjective(method, replicate(model), layers, field, likelihood, samples, prior_means={})


INPUTS = {"Sequential": (4,), "ConvNet": (1, 4, 4)}


def loss_of(objective: MomentObjective, batch: Batch, epoch: int = 1) -> dict[str, Tensor]:
    for tensor in objective.tensors().values():
        tensor.grad = None
    return objective.backward(batch, Step(0, epoch), DeferredChecks())


# Terms


def test_the_divergence_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    means, logs, priors = (
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in (("a", (3, 2)), ("b", (4,)))}
        for _ in range(3)
    )
    variances = {n: v.exp() for n, v in logs.items()}
    for trained_mean in ({}, priors, {"a": priors["a"]}):
        expected = sum(
            kl_divergence(
                Normal(means[n], variances[n].sqrt()),
                Normal(trained_mean.get(n, torch.zeros_like(means[n])), 0.4**0.5),
            ).sum()
            for n in means
        )
        torch.testing.assert_close(gaussian_divergence(means, logs, variances, trained_mean, 2.5), expected)
    certain = {"scale": torch.ones(2, dtype=torch.float64)}  # without a variance, and so without a prior
    torch.testing.assert_close(
        gaussian_divergence(means | certain, logs, variances, {}, 2.5),
        gaussian_divergence(means, logs, variances, {}, 2.5),
    )


def test_the_loss_is_the_sum_of_its_terms() -> None:
    """The divergence counts ``2^(M - l) / 2^(M - 1)`` in the epochs ``l = 1 ... M``, and no less than the floor."""
    model, likelihood = mlp(dtype=torch.float64), uq.Categorical()
    x, y = inputs_of(4, dtype=torch.float64), torch.arange(24) % 3
    for choice, score in (
        ("expected", likelihood.expected_log_prob),
        ("predictive", likelihood.predictive_log_prob),
    ):
        for floor, epoch, share in ((0.0, 0, 1.0), (0.0, 2, 2.0**3 / 2.0**5), (0.2, 5, 0.2), (1.0, 9, 1.0)):
            objective = objective_of(model, likelihood, objective=choice, kl_floor=floor)
            terms = loss_of(objective, Batch((x,), y), epoch=epoch)
            variances = {n: v.exp() for n, v in objective.field.log_variances.items()}
            with torch.no_grad():
                mean, variance = objective.moments(Batch((x,), y), variances)
                fit = score(mean, variance, y, 64).mean()
            torch.testing.assert_close(terms["log likelihood"], fit)
            torch.testing.assert_close(terms["loss"], terms["KL"] * 0.1 * share / 50 - fit)


@pytest.mark.parametrize(
    ("epochs", "shares"), [(None, [1.0, 1.0, 0.5, 0.5, 0.25]), (20, [1.0, 0.5, 0.25, 0.125, 0.0625])]
)
def test_without_given_epochs_the_divergence_is_halved_ten_times(
    epochs: int | None, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 20 short epochs as over 10 long ones; with given epochs in each of them, as ever."""
    monkeypatch.setattr("posthoc_uq.trained.training.MIN_STEPS", 40)
    model, x = mlp(), inputs_of(4, samples=16)
    still = uq.UTVI(epochs=epochs, lr=1e-30, log_variance_lr=1e-30, train_rest=False)
    fit_notes = fit(model, batches(x, targets_of(model, x, "classification")), still).history.fit
    assert fit_notes["epochs"] == 20
    loss, kl, told = (fit_notes[name] for name in ("loss", "KL", "log likelihood"))
    found = [(loss[i] + told[i]) * 16 / (0.1 * kl[i]) for i in range(5)]
    assert found == pytest.approx(shares, rel=1e-3)


def test_moments_in_training_are_those_of_the_head() -> None:
    model, x = cnn(), inputs_of(1, 4, 4)
    data = batches(x, targets_of(model, x, "classification"))
    posterior = fit(model, data, uq.UTVI(epochs=1))
    objective = objective_for(model, posterior.layers, uq.Categorical(), 0.0, 24)
    field = MeanField(
        {n: m.clone() for n, m in posterior.mean.items()},
        {n: v.log() for n, v in posterior.variance().items()},
        True,
    )
    objective.field = field
    with torch.no_grad():
        found = objective.moments(Batch((x,)), {n: v.exp() for n, v in field.log_variances.items()})
    mean, variance, _ = uq.wrap(model, posterior).propagate(x)  # type: ignore[operator]
    torch.testing.assert_close(found, (mean, variance))


# The kappa of the unscented transform


def test_each_layers_kappa_is_that_of_the_functions_after_it() -> None:
    """Moments of two hidden layers by the published points, in NumPy; gradients by finite differences."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    objective = objective_of(model, uq.Categorical(), kappa="learned")
    leaves = [objective.tensors()[f"kappa after {name}"] for name in ("0", "2", "4")]
    with torch.no_grad():
        for leaf, value in zip(leaves, (-1.0, 0.3, 5.0), strict=True):
            leaf.fill_(value)
    kappas = objective.learned_kappas()
    assert list(kappas.values()) == pytest.approx([np.log1p(np.exp(value)) for value in (-1.0, 0.3, 5.0)])
    means, x = objective.field.means, inputs_of(4, dtype=torch.float64)
    variances = {name: value.exp().detach() for name, value in objective.field.log_variances.items()}
    m, v = x.numpy(), np.zeros(x.shape)
    for name, function in (("0", np.tanh), ("2", lambda a: np.maximum(a, 0)), ("4", None)):
        weight, spread = means[f"{name}.weight"].detach().numpy(), variances[f"{name}.weight"].numpy()
        bias, spread_of_bias = means[f"{name}.bias"].detach().numpy(), variances[f"{name}.bias"].numpy()
        m, v = m @ weight.T + bias, v @ (weight**2).T + (m**2 + v) @ spread.T + spread_of_bias
        if function is not None:
            reach = kappas[name] + 1
            step = np.sqrt(reach * v)
            values = np.stack([function(m), function(m - step), function(m + step)])
            weights = np.array([kappas[name] / reach, 0.5 / reach, 0.5 / reach]).reshape(3, 1, 1)
            m = (weights * values).sum(0)
            v = (weights * (values - m) ** 2).sum(0)
    batch = Batch((x,), torch.arange(24) % 3)
    with torch.no_grad():
        found = objective.moments(batch, variances)
    torch.testing.assert_close(found, (torch.from_numpy(m), torch.from_numpy(v)))

    loss_of(objective, batch)
    gradients = [leaf.grad for leaf in leaves]
    assert gradients[2] is None  # no function comes after the last layer
    for leaf, gradient in zip(leaves[:2], gradients[:2], strict=True):
        losses: list[float] = []
        for step in (1e-6, -2e-6):
            leaf.data += step
            losses.append(float(loss_of(objective, batch)["loss"]))
        assert float(gradient) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)  # type: ignore[arg-type]


def test_a_kappa_goes_with_the_posterior(tmp_path: Path) -> None:
    """The head takes the one of the training from the file too; where the file says nothing it is 2."""
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    posteriors = {
        kappa: fit(model, data, uq.UTVI(epochs=2, kappa=kappa, log_variance_lr=0.1))
        for kappa in (2.0, 0.5, "learned")
    }
    learned = posteriors["learned"].history.fit["kappa"]
    assert learned.keys() == posteriors["learned"].layers.keys() and min(learned.values()) > 0
    assert len(set(learned.values())) > 1
    for kappa, posterior in posteriors.items():
        uq.save(posterior, tmp_path / "p.h5")
        loaded = uq.load(tmp_path / "p.h5", model, untrusted=True)
        found = [uq.wrap(model, p).propagate(x)[1] for p in (posterior, loaded)]  # type: ignore[operator]
        assert torch.equal(*found)
        head = uq.wrap(model, loaded)
        assert head.settings().get("kappa", 2.0) == kappa  # type: ignore[operator]
        other = uq.wrap(model, loaded, kappa=2.0)
        assert torch.equal(other.propagate(x)[1], found[0]) == (kappa == 2.0)  # type: ignore[operator]
        assert "kappa" not in other.settings()  # type: ignore[operator]
    before = dict(posteriors[0.5].history.fit)
    del before["kappa"]
    old = posteriors[0.5].replaced(history=replace(posteriors[0.5].history, fit=before))
    new = uq.wrap(model, posteriors[0.5], kappa=2.0)
    assert torch.equal(uq.wrap(model, old).propagate(x)[1], new.propagate(x)[1])  # type: ignore[operator]


# Gradients


class Pooled(nn.Module):
    """Units that are certain zeros, maxima over a padded window, an average: where roots of zero variances are."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body = nn.Sequential(
                nn.Conv2d(1, 3, 3),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, padding=1),
                nn.ReLU6(),
                nn.AdaptiveAvgPool2d(1),
            )
            self.last = nn.Linear(3, 3)
        with torch.no_grad():
            self.body[0].bias[0] = -50.0  # type: ignore[index]
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x).flatten(1))


INPUTS["Pooled"] = (1, 6, 6)


@pytest.mark.parametrize("relu", ["unscented", "exact"])
@pytest.mark.parametrize("make", [lambda: mlp(dtype=torch.float64), lambda: cnn(dtype=torch.float64), Pooled])
@pytest.mark.covering(1)
def test_gradients_are_those_of_finite_differences(make: Any, relu: str) -> None:
    model = make()
    x = inputs_of(*INPUTS[type(model).__name__], dtype=torch.float64)
    batch = Batch((x,), torch.arange(24) % 3)
    objective = objective_of(model, uq.Categorical(), relu=relu)
    loss_of(objective, batch)
    gradients = {
        name: tensor.grad.clone() for name, tensor in objective.tensors().items() if tensor.grad is not None
    }
    assert gradients.keys() == objective.tensors().keys()
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
    generator, step = torch.Generator().manual_seed(0), 1e-6
    directions = {
        name: torch.randn(g.shape, generator=generator, dtype=torch.float64) for name, g in gradients.items()
    }
    for name, direction in directions.items():
        values = []
        for sign in (1, -1):
            tensor = objective.tensors()[name]
            with torch.no_grad():
                tensor += sign * step * direction
            values.append(float(loss_of(objective, batch)["loss"]))
            with torch.no_grad():
                tensor -= sign * step * direction
        slope = (values[0] - values[1]) / (2 * step)
        assert float((gradients[name] * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("relu", ["unscented", "exact"])
def test_gradients_are_finite_in_single_precision(relu: str) -> None:
    """Where a unit is certain, and at a large distance from every kink."""
    model = Pooled().float()
    x = inputs_of(1, 6, 6)
    for scale in (1.0, 1e4):
        objective = objective_of(model, uq.Categorical(), log_variance=-30.0, relu=relu)
        loss_of(objective, Batch((scale * x,), torch.arange(24) % 3))
        for name, tensor in objective.tensors().items():
            assert tensor.grad is not None and bool(torch.isfinite(tensor.grad).all()), (name, scale)


# Where the optimum is known


def test_the_optimum_of_a_linear_model_is_the_best_mean_field() -> None:
    """With the divergence at its full weight: the ridge solution, and the inverse of the precision's diagonal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3 * torch.randn(
        40, 1, generator=generator, dtype=torch.float64
    )
    model = nn.Sequential(nn.Linear(3, 1, bias=False)).double().eval()
    noise, precision = 0.2, 3.0
    posterior = fit(
        model,
        [(x, y)],
        uq.UTVI(
            epochs=500, lr=0.05, log_variance_lr=0.1, kl_weight=1.0, kl_floor=1.0, weight_decay=0.0, clip=None
        ),
        likelihood="regression",
        noise_variance=noise,
        prior_precision=precision,
    )
    exact = x.T @ x / noise + precision * torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.solve(exact, x.T @ y / noise).T
    torch.testing.assert_close(posterior.mean["0.weight"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        posterior.variance()["0.weight"], 1 / exact.diagonal()[None], rtol=1e-3, atol=0
    )


@pytest.mark.only("unscented")
@pytest.mark.parametrize("relu", ["unscented", "exact"])
def test_noise_that_depends_on_the_input(relu: Any) -> None:
    """The propagated variance as the predictive one, by three points as by the closed form."""
    generator = torch.Generator().manual_seed(0)

    def data(count: int) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(count, 1, generator=generator) - 1
        return x, x + (0.1 + 0.9 * (x > 0)) * torch.randn(count, 1, generator=generator)

    x, y = data(1500)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 1)
    ).eval()
    held_out = data(4000)
    method = uq.UTVI(
        epochs=30,
        lr=0.01,
        log_variance_lr=0.02,
        start="random",
        objective="predictive",
        noise="none",
        relu=relu,
    )
    posterior = uq.fit(
        model, batches(x, y, 100), method, likelihood="regression", noise_variance=1.0, progress=False
    )
    assert posterior.scale == 1500  # not narrowed: the variance is what was trained
    prediction = uq.wrap(model, posterior, relu=relu)(held_out[0])
    score = -float(prediction.log_prob(held_out[1]).mean())
    deviation = prediction.variance.sqrt()
    ratio = float(deviation[held_out[0] > 0.3].mean() / deviation[held_out[0] < -0.3].mean())
    assert 1.5 < ratio < 10
    alike = (
        0.5 * torch.tensor(2 * torch.pi * torch.e * (0.01 + 1.0) / 2).log()
    )  # at best, with one variance for all
    assert score < float(alike) - 0.1


# Options


def test_what_it_starts_from() -> None:
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    still: dict[str, Any] = {"epochs": 1, "lr": 1e-12, "log_variance_lr": 1e-12, "weight_decay": 0.0}
    trained = fit(model, data, uq.UTVI(**still))
    for name, mean in trained.mean.items():
        torch.testing.assert_close(mean, dict(model.named_parameters())[name].detach())
        torch.testing.assert_close(
            trained.variance()[name], torch.full_like(mean, -10.0).exp(), rtol=1e-4, atol=0
        )
    random = fit(model, data, uq.UTVI(**still, start="random"))
    assert not torch.allclose(random.mean["0.weight"], trained.mean["0.weight"], atol=0.01)
    other = fit(model, data, uq.UTVI(**still, start="random"), seed=1)
    assert not torch.allclose(random.mean["0.weight"], other.mean["0.weight"], atol=0.01)
    laplace = uq.fit(model, data, "diag", prior_precision=4.0, progress=False)
    begun = fit(model, data, uq.UTVI(**still, initial=laplace))
    torch.testing.assert_close(begun.variance(), laplace.variance(), rtol=1e-4, atol=0)


def test_frozen_means() -> None:
    model, x = mlp(), inputs_of(4)
    posterior = fit(
        model, batches(x, targets_of(model, x, "classification")), uq.UTVI(epochs=2, train_mean=False)
    )
    assert not posterior.trained_mean
    assert torch.equal(posterior.mean["0.weight"], model[0].weight.detach())
    assert float(posterior.variance()["2.weight"].min()) != float(posterior.variance()["2.weight"].max())


def test_the_noise_of_a_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(400, 1, generator=generator)
    model = nn.Sequential(nn.Linear(2, 1)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0), model[0].bias.zero_()
    method = uq.UTVI(epochs=20, noise="learned", schedule=steady)
    posterior = fit(model, batches(x, y, 50), method, likelihood="regression", noise_variance=1.0)
    assert posterior.likelihood.noise_variance is not None
    assert float(posterior.likelihood.noise_variance) == pytest.approx(0.25, rel=0.25)


def test_held_out_data_choose_the_epoch() -> None:
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    posterior = fit(model, data, uq.UTVI(epochs=4, lr=0.3), val_loader=data)
    losses = posterior.history.fit["validation NLL"]
    assert posterior.history.fit["epoch taken"] == losses.index(min(losses)) + 1 and len(losses) == 4
    mean, variance, _ = uq.wrap(model, posterior).propagate(x)  # type: ignore[operator]
    loss = -uq.Categorical().predictive_log_prob(mean, variance, torch.cat([y for _, y in data])).mean()
    assert float(loss) == pytest.approx(min(losses), rel=1e-4)


def test_a_layer_that_moments_do_not_reach() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.special.i0(self.first(x)))

    model, x = Strange().eval(), inputs_of(4)
    posterior = fit(model, [(x, torch.arange(24) % 3)], uq.UTVI(epochs=1, unknown="unscented"))
    assert bool((posterior.variance()["first.weight"] > 0).all())


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_outputs_that_are_certain_have_finite_gradients(name: str) -> None:
    """A variance of 0, as of an input of zeros without a bias: the root has no derivative there."""
    likelihood = resolve_likelihood(name)
    mean = torch.zeros(4, outputs_for(likelihood), requires_grad=True)
    variance = torch.zeros_like(mean).requires_grad_()
    targets = likelihood.draw(mean.detach(), torch.arange(4), 0)
    likelihood.expected_log_prob(mean, variance, targets).sum().backward()
    for tensor in (mean, variance):
        assert tensor.grad is not None and bool(torch.isfinite(tensor.grad).all())


def test_a_training_goes_through_an_input_of_zeros() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False)
    x = inputs_of(4)
    x[0] = 0
    posterior = fit(model, batches(x, torch.arange(24) % 3), uq.UTVI(epochs=2))
    assert bool(torch.isfinite(posterior.variance()["weight"]).all())


# Nearly certain outputs without a noise


def test_gradients_without_a_noise_are_bounded() -> None:
    """By the definition, for a residual of one at a variance of zero, where they would be 1e10 and 5e19; and exact
    where residuals are below ten deviations.
    """
    likelihood = uq.Gaussian(torch.tensor([1e-10], dtype=torch.float64))
    objective = objective_of(mlp(1, dtype=torch.float64), likelihood, objective="predictive", noise="none")
    for variance, bounded in ((0.0, True), (0.25, False)):
        mean = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
        spread = torch.full((2, 1), variance, dtype=torch.float64, requires_grad=True)
        objective._bound_gradients(mean, spread, None)  # pyright: ignore[reportPrivateUsage]
        y = torch.ones(2, 1, dtype=torch.float64)
        likelihood.predictive_log_prob(mean, spread, y).mean().backward()
        total = variance + 1e-10
        by_mean = 10 / total**0.5 if bounded else 1 / total
        by_variance = 101 / (2 * total) if bounded else (1 / total - 1) / (2 * total)
        assert mean.grad is not None and spread.grad is not None
        torch.testing.assert_close(mean.grad, torch.full_like(mean, by_mean / 2))
        torch.testing.assert_close(spread.grad, torch.full_like(mean, by_variance / 2))


@pytest.mark.parametrize("start", [-40.0, pytest.param(-20.0, marks=pytest.mark.study)])
def test_a_training_without_a_noise_leaves_a_start_of_no_variance(start: float) -> None:
    """Also without `clip`: AdamW's second moments stay small enough for its entries to move on. Unbounded gradients
    ended with an NLL of 6e5 and of 113.
    """
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(1000, 1, generator=generator) - 1
    y = x + (0.1 + 0.9 * (x > 0)) * torch.randn(1000, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(1, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 1)]
    model = nn.Sequential(*layers).eval()
    method = uq.UTVI(
        epochs=40, lr=0.01, log_variance_lr=0.2, initial_log_variance=start, clip=None, noise="none",
        objective="predictive", start="random",
    )  # fmt: skip
    posterior = fit(model, batches(x, y, 100), method, likelihood="regression", noise_variance=1.0)
    assert -float(uq.wrap(model, posterior)(x).log_prob(y).mean()) < 1.5


# What has no uncertainty: scales of activations and normalisations


class Net(nn.Module):
    """Normalisations before and after the first layer, one parameter of the module itself, and a prior's activation."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.early, self.first = nn.LayerNorm(4), nn.Linear(4, 8)
            self.norm, self.middle = nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.late, self.last = nn.LayerNorm(8), nn.Linear(8, 2)
        self.gain = nn.Parameter(torch.ones(8))
        self.prior = InverseCDF(deviation=2.0)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(self.early(x))))
        hidden = self.late(self.middle(hidden)).relu() * self.gain
        return self.prior(self.last(hidden))


REST = {"norm.weight", "norm.bias", "late.weight", "late.bias", "gain", "prior.log_scale"}


def data_of_net() -> list[tuple[Tensor, Tensor]]:
    x = inputs_of(4, samples=64)
    return batches(x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1), 16)


def fit_net(model: nn.Module, **options: Any) -> uq.Posterior:
    more = {name: options.pop(name) for name in ("layers", "checkpoint") if name in options}
    given: dict[str, Any] = {"epochs": 3, "lr": 0.02} | options
    method = uq.UTVI(**given)
    return uq.fit(
        model, data_of_net(), method, likelihood="regression", divergence=None, progress=False, **more
    )


def test_what_is_trained_beside_the_layers() -> None:
    """By names: what comes after the first chosen weight, and no affine layer that was left out."""
    model, batch = Net(), Batch((inputs_of(4),))
    for chosen, expected in (
        (["first.weight", "first.bias"], REST),
        (["middle.weight"], REST - {"norm.weight", "norm.bias"}),
        (["last.weight", "last.bias"], {"prior.log_scale"}),
    ):
        assert set(certain_parameters(replicate(model), chosen, batch)) == expected
    assert certain_parameters(replicate(model.half().float()), ["last.weight"], batch) == ["prior.log_scale"]


def test_it_moves_them_and_the_posterior_carries_them(tmp_path: Path) -> None:
    """The model stays; file, copy and every head predict with the trained numbers."""
    model, x = Net(), inputs_of(4)
    before = copy.deepcopy(model.state_dict())
    posterior = fit_net(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    covered = {name for layer in posterior.layers.values() for name in layer.parameter_names}
    assert set(posterior.trained_mean) == covered | REST and set(posterior.sample(1)) == covered
    assert set(posterior.history.fit["trained without uncertainty"]) == REST
    for name in REST:
        assert not torch.equal(posterior.trained_mean[name], before[name]), name
    uq.save(posterior, tmp_path / "p.h5")
    for untrusted in (False, True):
        loaded = uq.load(tmp_path / "p.h5", model, untrusted=untrusted)
        assert all(
            torch.equal(tensor, loaded.trained_mean[name]) for name, tensor in posterior.trained_mean.items()
        )
        for head in ("moments", "sampling", "linearized"):
            first, second = (uq.wrap(model, p, head)(x) for p in (posterior, loaded))
            assert torch.equal(first.mean, second.mean)  # type: ignore[attr-defined]
    assert set(uq.inspect(tmp_path / "p.h5")["trained_mean"]) == covered | REST
    # the mean of the sampling head's draws, with no spread, is the network with the trained mean's numbers
    for block in posterior.blocks.values():
        block.variances.zero_()  # type: ignore[attr-defined]
    expected = torch.func.functional_call(model, {**before, **posterior.trained_mean}, (x,))
    for head in ("moments", "sampling"):
        torch.testing.assert_close(uq.wrap(model, posterior, head)(x).mean, expected, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


def test_it_begins_there_and_can_be_left_alone(tmp_path: Path) -> None:
    model = Net()
    for options in ({"train_rest": False}, {"train_mean": False}):
        posterior = fit_net(model, **options)
        assert not set(posterior.original) & REST and not posterior.history.fit["trained without uncertainty"]
    first = fit_net(model)
    again = fit_net(model, initial=first, lr=1e-12, log_variance_lr=1e-12, weight_decay=0.0)
    for name in REST:
        torch.testing.assert_close(again.trained_mean[name], first.trained_mean[name])
    last = fit_net(model, layers="last")
    assert set(last.trained_mean) == {"last.weight", "last.bias", "prior.log_scale"}
    fresh = fit_net(model, start="random", lr=1e-12, weight_decay=0.0)
    assert float(fresh.trained_mean["prior.log_scale"]) == pytest.approx(float(model.prior.log_scale))


def test_a_model_with_other_numbers_is_refused(tmp_path: Path) -> None:
    model = Net()
    uq.save(fit_net(model), tmp_path / "p.h5")
    other = Net()
    with torch.no_grad():
        other.prior.log_scale.add_(1.0)
    with pytest.raises(uq.PosteriorMismatchError, match="names and shapes agree, the numbers"):
        uq.load(tmp_path / "p.h5", other)
    with pytest.raises(uq.PosteriorMismatchError, match=r"'prior.log_scale'"):
        uq.wrap(other, fit_net(model))
    other.gain = nn.Parameter(torch.ones(3))
    with pytest.raises(
        uq.PosteriorMismatchError, match=r"'gain' of shape \(8,\), which the model has in shape"
    ):
        uq.load(tmp_path / "p.h5", other)
    del other.gain
    with pytest.raises(uq.PosteriorMismatchError, match=r"'gain' of shape \(8,\), which the model lacks"):
        uq.load(tmp_path / "p.h5", other)


def test_gradients_of_them_are_those_of_finite_differences() -> None:
    """In float64, through the whole loss: every certain parameter by central differences."""
    model = Net().double()
    x = inputs_of(4, dtype=torch.float64)
    batch = Batch((x,), x[:, :2] * 0.3)
    posterior = uq.fit(
        model, [(x, x[:, :2])], "diag", likelihood="regression", prior_precision=1.0, progress=False
    )
    names = [name for layer in posterior.layers.values() for name in layer.parameter_names]
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    field = MeanField(
        {name: parameters[name] for name in [*names, *sorted(REST)]},
        {name: torch.full_like(parameters[name], -3.0) for name in names},
        True,
    )
    given = uq.UTVI(), replicate(model), posterior.layers, field, uq.Gaussian(0.1), 24
    objective = MomentObjective(*given, prior_means={})
    loss_of(objective, batch)
    gradients = {name: field.means[name].grad.clone() for name in REST}
    groups = objective.groups()
    assert [group["name"] for group in groups] == ["means", "log variances", "certain"]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0, 0.0]
    for name, gradient in gradients.items():
        flat, entry, step = field.means[name].data.view(-1), int(gradient.abs().argmax()), 1e-5
        value, losses = float(flat[entry]), list[float]()
        for sign in (1, -1):
            flat[entry] = value + sign * step
            losses.append(float(loss_of(objective, batch)["loss"]))
        flat[entry] = value
        slope = (losses[0] - losses[1]) / (2 * step)
        assert float(gradient.view(-1)[entry]) == pytest.approx(slope, rel=1e-5, abs=1e-8)
