"""Unscented-transform training of what has no uncertainty: scales of activations and normalisations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import batches, cnn, inputs_of, targets_of
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.model import replicate
from posthoc_uq.methods.mean_field import MeanField, gaussian_divergence
from posthoc_uq.methods.trained import certain_parameters
from posthoc_uq.methods.training import Step
from posthoc_uq.methods.utvi import MomentObjective, MomentOptions
from posthoc_uq.moments import InverseCDF

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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


def data() -> list[tuple[Tensor, Tensor]]:
    x = inputs_of(4, samples=64)
    return batches(x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1), 16)


def fit(model: nn.Module, **options: Any) -> uq.Posterior:
    more = {name: options.pop(name) for name in ("layers", "checkpoint") if name in options}
    given: dict[str, Any] = {"epochs": 3, "lr": 0.02} | options
    method = uq.UTVI(**given)
    return uq.fit(model, data(), method, likelihood="regression", divergence=None, progress=False, **more)


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
    posterior = fit(model)
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
        posterior = fit(model, **options)
        assert not set(posterior.original) & REST and not posterior.history.fit["trained without uncertainty"]
    first = fit(model)
    again = fit(model, initial=first, lr=1e-12, log_variance_lr=1e-12, weight_decay=0.0)
    for name in REST:
        torch.testing.assert_close(again.trained_mean[name], first.trained_mean[name])
    last = fit(model, layers="last")
    assert set(last.trained_mean) == {"last.weight", "last.bias", "prior.log_scale"}
    fresh = fit(model, start="random", lr=1e-12, weight_decay=0.0)
    assert float(fresh.trained_mean["prior.log_scale"]) == pytest.approx(float(model.prior.log_scale))


def test_a_model_with_other_numbers_is_refused(tmp_path: Path) -> None:
    model = Net()
    uq.save(fit(model), tmp_path / "p.h5")
    other = Net()
    with torch.no_grad():
        other.prior.log_scale.add_(1.0)
    with pytest.raises(uq.PosteriorMismatchError, match="names and shapes agree, the numbers"):
        uq.load(tmp_path / "p.h5", other)
    with pytest.raises(uq.PosteriorMismatchError, match=r"'prior.log_scale'"):
        uq.wrap(other, fit(model))
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
    objective = MomentObjective(
        replicate(model), posterior.layers, field, {}, 1.0, uq.Gaussian(0.1), 24, MomentOptions()
    )
    objective.backward(batch, Step(0), DeferredChecks())
    gradients = {name: field.means[name].grad for name in REST}
    assert [group["name"] for group in objective.groups()] == ["means", "log variances", "certain"]
    assert [group["weight_decay"] for group in objective.groups()] == [0.01, 0.0, 0.0]

    def loss() -> float:
        for tensor in objective.tensors().values():
            tensor.grad = None
        return float(objective.backward(batch, Step(0), DeferredChecks())["loss"])

    for name, gradient in gradients.items():
        assert gradient is not None
        flat, entry = field.means[name].data.view(-1), int(gradient.abs().argmax())
        value, step = float(flat[entry]), 1e-5
        flat[entry] = value + step
        above = loss()
        flat[entry] = value - step
        below = loss()
        flat[entry] = value
        assert float(gradient.view(-1)[entry]) == pytest.approx(
            (above - below) / (2 * step), rel=1e-5, abs=1e-8
        )


def test_they_have_no_prior() -> None:
    means = {"w": torch.randn(3, generator=torch.Generator().manual_seed(0)), "scale": torch.ones(2)}
    logs = {"w": torch.zeros(3)}
    variances = {"w": torch.ones(3)}
    both = gaussian_divergence(means, logs, variances, {}, 2.0)
    assert torch.equal(both, gaussian_divergence({"w": means["w"]}, logs, variances, {}, 2.0))


def test_latent_binary_networks_keep_their_normalisation() -> None:
    model, x = cnn(), inputs_of(1, 4, 4)
    posterior = uq.fit(
        model, batches(x, targets_of(model, x, "classification")), uq.LatentBinary(epochs=1), progress=False
    )
    assert all("bn" not in name and "norm" not in name for name in posterior.trained_mean)
    covered = {name for layer in posterior.layers.values() for name in layer.parameter_names}
    assert set(posterior.trained_mean) == covered
