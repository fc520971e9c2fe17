"""What every method promises: its fit, its posterior, its file, a fit that goes on.

The tests run for every row of the registry of methods, and what differs between methods they read from the method: a
new one is tested from the day that it is registered. What a posterior can do is read from its capabilities, and that it
refuses the rest is tested in its place. Heads are in ``test_conformance_heads.py``, what is refused is in
``test_conformance_faults.py``.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import (
    LIKELIHOODS,
    SHORT,
    Counted,
    Stops,
    batches,
    can,
    cnn,
    fitted_layers,
    heads_of,
    inputs_of,
    mlp,
    outputs_for,
    short,
    short_options,
    takes_likelihood,
    targets_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from watching import Watch

import posthoc_uq as uq
from posthoc_uq.files.records import description_of
from posthoc_uq.files.tensors import size_limit
from posthoc_uq.fitting.tune import PARAMETERS
from posthoc_uq.heads import HEADS
from posthoc_uq.likelihoods import resolve_likelihood
from posthoc_uq.methods import METHODS, Method, fit_identity
from posthoc_uq.posteriors import BLOCKS, CRITERIA, LOG_DETERMINANT, QUADRATIC, VARIANCES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of trainings that are too short to settle

METHOD = pytest.mark.parametrize("name", METHODS)
PRIOR = 4.0


def fit(name: str | Method, model: nn.Module, loader: Any, **options: Any) -> uq.Posterior:
    """A fit with a given prior precision, or of a training with the variances that it found."""
    method = short(name) if isinstance(name, str) else name
    settled: dict[str, Any] = {"divergence": None} if method.trains else {}
    return uq.fit(model, loader, method, progress=False, **{"prior_precision": PRIOR} | settled | options)


def fitted(
    name: str | Method, likelihood: str = "classification", dtype: torch.dtype = torch.float32, **options: Any
) -> uq.Posterior:
    """A fit of the small perceptron, whose posterior knows its model."""
    model = mlp(outputs_for(resolve_likelihood(likelihood)), dtype=dtype)
    x = inputs_of(4, dtype=dtype)
    loader = batches(x, targets_of(model, x, likelihood))
    return fit(name, model, loader, likelihood=likelihood, **options)


kept = functools.cache(fitted)
"""A fit for tests that do not change it."""


def refuses(name: str, likelihood: str) -> bool:
    """Whether the method does not know the likelihood; then a fit says so."""
    if takes_likelihood(name, likelihood):
        return False
    with pytest.raises(uq.PosthocUQError, match=f"not those of likelihood='{likelihood}'"):
        fitted(name, likelihood)
    return True


def numbers(posterior: uq.Posterior) -> dict[str, Tensor]:
    """All that a posterior keeps, by name."""
    found = {f"{b}/{t}": x for b, own in posterior.blocks.items() for t, x in own.tensors().items()}
    return found | {f"mean/{name}": x for name, x in posterior.mean.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: Any = "") -> None:
    """To the bit."""
    assert found.keys() == expected.keys(), where
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (where, name)


class _ByName(nn.Module):
    """A module that is called with its input by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(input=x)


@METHOD
def test_layers_may_be_called_by_keyword(name: str) -> None:
    """The default fit and its predictions are those of the same calls by place."""
    x, found = inputs_of(4), list[list[Tensor]]()
    for wraps in (False, True):
        model = mlp()
        if wraps:
            for place, module in enumerate(model):
                model[place] = _ByName(module) if isinstance(module, nn.Linear) else module
        if name == "message_passing":  # takes the modules of a Sequential, or a last layer
            model = nn.Sequential(model)
        posterior = uq.fit(
            model, batches(x, targets_of(model, x, "classification")), short(name), progress=False
        )
        drawn = posterior.sample(3, torch.Generator().manual_seed(0))
        tensors = posterior.variance() if can(posterior, VARIANCES) else drawn
        found.append([tensors[name] for name in posterior.mean])
    for plain, named in zip(*found, strict=True):
        torch.testing.assert_close(named, plain, rtol=1e-4, atol=1e-6)


# What a method says of itself


@METHOD
def test_a_row_of_the_registry(name: str) -> None:
    kind, method = METHODS[name], short(name)
    assert is_dataclass(kind) and kind.name == name and method == short(name)
    with pytest.raises(AttributeError):
        method.dtype = torch.float64  # type: ignore[misc]
    assert kind.__doc__ and "(self" not in kind.__doc__  # its own, not what a dataclass writes
    explained = "\n".join(base.__doc__ or "" for base in kind.__mro__)
    for field in fields(kind):
        assert f"\n        {field.name}: " in explained, f"the option {field.name} is explained nowhere"
    assert method.head in HEADS and method.passes() >= 1
    assert kind.block_kinds and set(kind.block_kinds) <= BLOCKS.keys()
    assert kind.tunable <= {"scale", "prior_precision", "residual_weight", "noise_scale", "temperature"}
    model = mlp()
    said = fit_identity({}, method, model, {})
    assert json.loads(json.dumps(said)) == said and json.loads(said["method"]) == name
    with_effect = {field.name for field in fields(kind) if not field.metadata.get("without effect")}
    assert said.keys() >= {"method"} | with_effect and "checkpoint_every" not in said
    for option in with_effect & SHORT.keys():
        if isinstance(SHORT[option], int):
            assert fit_identity({}, short(name, **{option: SHORT[option] + 1}), model, {}) != said, option


# The fit


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@METHOD
@pytest.mark.covering(1)
def test_a_fit(name: str, likelihood: str) -> None:
    if refuses(name, likelihood):
        return
    posterior = kept(name, likelihood)
    assert posterior.method == name and posterior.likelihood.name == likelihood
    assert {block.kind for block in posterior.blocks.values()} <= set(METHODS[name].block_kinds)
    assert sorted(layer for inner in posterior.members.values() for layer in inner) == fitted_layers(
        name, "0", "2"
    )
    assert posterior.scale == posterior.evidence.samples == 24
    assert posterior.has_free_prior_precision == ("prior_precision" in METHODS[name].tunable)
    assert not posterior.has_free_prior_precision or posterior.prior_precision == PRIOR
    assert f"method: {name}" in str(posterior.report())
    model = posterior.model
    assert model is not None
    tensors = dict(model.named_parameters())
    assert (posterior.original.keys() == tensors.keys()) == (fitted_layers(name, "0", "2") == ["0", "2"])
    for parameter, own in posterior.original.items():
        assert own.data_ptr() == tensors[parameter].data_ptr()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in numbers(posterior).values())


@METHOD
def test_a_method_by_its_name_is_the_object(name: str) -> None:
    by_object = kept(name)
    model, x = mlp(), inputs_of(4)
    options = short_options(name) | ({"divergence": None} if short(name).trains else {})
    data = batches(x, targets_of(model, x, "classification"))
    by_name = uq.fit(model, data, name, prior_precision=PRIOR, progress=False, **options)
    assert_same(numbers(by_name), numbers(by_object))


@METHOD
def test_it_reads_the_data_as_often_as_it_says(name: str) -> None:
    model, x, method = mlp(), inputs_of(4), short(name)
    data = batches(x, targets_of(model, x, "classification"))
    loader = Counted(data)
    fit(method, model, loader)
    assert loader.passes == method.passes()
    if method.passes() > 1:
        with pytest.raises(uq.PosthocUQError, match=r"iterator that can be read only once.*DataLoader"):
            fit(method, model, iter(data))
    else:
        assert_same(numbers(fit(method, model, iter(data))), numbers(kept(name)))


@METHOD
def test_neither_the_size_nor_the_order_of_batches_matters(name: str) -> None:
    """A training takes its steps batch by batch; of it, only batches without samples make no difference."""
    model, x = mlp(dtype=torch.float64), inputs_of(4, dtype=torch.float64)
    y = targets_of(model, x, "classification")
    data = batches(x, y)
    empty = (x[:0], y[:0])
    expected = fit(name, model, data)
    assert_same(numbers(fit(name, model, [empty, data[0], empty, *data[1:], empty])), numbers(expected))
    if short(name).trains:
        return
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    for size in (5, 24):
        other = fit(name, model, batches(x[order], y[order], size))
        if can(expected, VARIANCES):
            torch.testing.assert_close(other.variance(), expected.variance(), rtol=1e-6, atol=1e-9)
        else:
            torch.testing.assert_close(numbers(other), numbers(expected), rtol=1e-6, atol=1e-9)
        if can(expected, LOG_DETERMINANT):
            torch.testing.assert_close(other.log_determinant(), expected.log_determinant(), rtol=1e-9, atol=0)
        assert other.evidence.log_likelihood == pytest.approx(expected.evidence.log_likelihood, rel=1e-9)


# The posterior


@METHOD
def test_draws(name: str) -> None:
    posterior = kept(name)
    draws = posterior.sample(6, torch.Generator().manual_seed(1))
    assert draws.keys() == posterior.mean.keys()
    assert all(draw.shape == (6, *posterior.mean[own].shape) for own, draw in draws.items())
    assert_same(posterior.sample(6, torch.Generator().manual_seed(1)), draws)
    few = posterior.sample(2, torch.Generator().manual_seed(1))
    assert_same(few, {own: draw[:2] for own, draw in draws.items()}, "the i-th draw is the same among more")
    other = posterior.sample(6, torch.Generator().manual_seed(2))
    assert not any(torch.equal(other[own], draw) for own, draw in draws.items())


@METHOD
def test_draws_have_the_moments_that_the_posterior_says(name: str) -> None:
    posterior, count = kept(name), 2000
    if not can(posterior, VARIANCES):
        with pytest.raises(
            uq.PosthocUQError, match=f"variance.* needs variances.*method={name!r} do not have"
        ):
            posterior.variance()
        return
    variance = posterior.variance()
    for own, draw in posterior.sample(count, torch.Generator().manual_seed(0)).items():
        deviations = draw - draw.mean(0)
        tails = deviations.pow(4).mean(0) / deviations.square().mean(0).square()  # 3 for a Gaussian
        sd = variance[own].sqrt()
        assert bool(((draw.mean(0) - posterior.mean[own]).abs() < 5 * sd / count**0.5).all()), own
        assert bool(((draw.var(0) / variance[own] - 1).abs() < 6 * ((tails - 1) / count).sqrt()).all()), own


@METHOD
def test_variances_are_those_of_the_quadratic_form(name: str) -> None:
    posterior = kept(name, dtype=torch.float64)
    if can(posterior, LOG_DETERMINANT):
        assert bool(torch.isfinite(posterior.log_determinant()))
    if not can(posterior, VARIANCES, QUADRATIC):
        first, layer = next(iter(posterior.layers.items()))
        with pytest.raises(uq.PosthocUQError, match=f"needs quadratic forms.*method={name!r} do not have"):
            posterior.quadratic({first: torch.zeros(1, *layer.matrix_shape)})
        return
    variance = posterior.variance()
    assert variance.keys() == posterior.mean.keys()
    for own, layer in posterior.layers.items():
        size, shape = layer.parameters, layer.matrix_shape
        units = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
        covariance = posterior.quadratic({own: units})
        torch.testing.assert_close(covariance, covariance.T)
        matrix = covariance.diagonal().reshape(shape)
        for parameter, expected in layer.to_parameters(matrix).items():
            torch.testing.assert_close(variance[parameter], expected, rtol=1e-7, atol=1e-12)
            assert bool((expected > 0).all())


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@METHOD
def test_copies_of_a_posterior(name: str) -> None:
    posterior = kept(name)
    draws = posterior.sample(3, torch.Generator().manual_seed(1))
    for way, copied in COPIES.items():
        twin = copied(posterior)
        assert_same(numbers(twin), numbers(posterior), way)
        changed = twin.tunable - {"residual_weight"}
        own_settings = {each: (3.0,) if each.startswith("class") else 3.0 for each in changed}
        twin = twin.with_settings(**own_settings)
        if twin.tunable & {"scale", "prior_precision"}:
            again = twin.sample(3, torch.Generator().manual_seed(1))
            own = next(iter(draws))
            assert not torch.equal(again[own], draws[own])
    assert posterior.temperature == 1.0
    assert_same(posterior.sample(3, torch.Generator().manual_seed(1)), draws)


# Tuning


@pytest.mark.parametrize("criterion", [each for each in CRITERIA if each != "leave_one_out"])
@METHOD
@pytest.mark.covering(1)
def test_tuning(name: str, criterion: str) -> None:
    posterior = fitted(name)
    model = posterior.model
    assert model is not None
    x = inputs_of(4, samples=16, seed=5)
    data = None if criterion == "evidence" else batches(x, targets_of(model, x, "classification"))
    before = posterior.settings.plain()
    refused = None
    if criterion == "evidence" and not posterior.has_free_prior_precision:
        refused = "log marginal likelihood.*held-out data"
    elif criterion == "faithful" and posterior.width_parameter is None:
        refused = "neither a prior precision nor a scale.*by criterion='likelihood'"

    def tune() -> uq.Posterior:
        own = {"n_samples": 3} if short(name).head == "sampling" and criterion != "evidence" else {}
        return uq.tune(posterior, data, criterion=criterion, progress=False, **own)

    with Watch(model):
        if refused is not None:
            with pytest.raises(uq.PosthocUQError, match=refused):
                tune()
            assert posterior.settings.plain() == before
            return
        given, posterior = posterior, tune()
    assert given.settings.plain() == before and posterior.history.head.criterion == criterion
    assert bool(posterior.history.faithful) == (
        criterion == "faithful" and posterior.width_parameter is not None
    )
    assert posterior.settings.plain() != before or not posterior.has_free_prior_precision
    assert all(0 < value < float("inf") for value in posterior.settings.plain().values())


@pytest.mark.parametrize("parameter", PARAMETERS)
@METHOD
@pytest.mark.covering(1)
def test_what_can_be_tuned_is_what_the_method_says(name: str, parameter: str) -> None:
    posterior = fitted(name, "regression")
    assert posterior.model is not None
    x = inputs_of(4, samples=16, seed=5)
    data = batches(x, targets_of(posterior.model, x, "regression"))
    tunable = {"noise": "noise_scale"}.get(parameter, parameter) in METHODS[name].tunable

    def tune() -> uq.Posterior:
        head = "linearized" if "linearized" in heads_of(posterior) else heads_of(posterior)[0]
        options: dict[str, Any] = {"head": head, "max_evaluations": 2, "progress": False}
        return uq.tune(posterior, data, parameters=(parameter,), **options)

    before = posterior.settings.plain()
    if tunable:
        tune()
        return
    with pytest.raises(uq.PosthocUQError, match=f"parameters must be among .* not .*{parameter}"):
        tune()
    assert posterior.settings.plain() == before


# Files


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@METHOD
@pytest.mark.covering(1)
def test_a_file(name: str, likelihood: str, tmp_path: Path) -> None:
    if refuses(name, likelihood):
        return
    posterior = kept(name, likelihood)
    model = posterior.model
    assert model is not None
    path, again = tmp_path / "p.h5", tmp_path / "again.h5"
    uq.save(posterior, path)
    loaded = uq.load(path, model)
    assert_same(numbers(loaded), numbers(posterior))
    draws = [own.sample(3, torch.Generator().manual_seed(5)) for own in (loaded, posterior)]
    assert_same(*draws)
    assert description_of(loaded) == description_of(posterior)
    uq.save(loaded, again)
    assert again.read_bytes() == path.read_bytes()
    assert path.stat().st_size <= size_limit(name, model)
    if likelihood == "classification":  # in a process of its own, which takes a while
        assert_same(numbers(uq.load(path, model, untrusted=True)), numbers(posterior))
        said = uq.inspect(path)
        assert said["method"] == name and said["parameters"] == sum(
            p.numel() for p in posterior.original.values()
        )
        assert str(loaded.report()) == str(posterior.report())


# Interruptions


@METHOD
def test_a_fit_that_goes_on_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Stopped at every batch of all its passes, once each."""
    expected, method = kept(name), short(name, checkpoint_every=1)
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    path = tmp_path / "fit.h5"
    for after in range(1, method.passes() * len(data)):
        with pytest.raises(RuntimeError, match="stopped"):
            fit(method, model, Stops(data, after), checkpoint=path)
        resumed = fit(method, model, data, checkpoint=path)
        assert not path.exists()
        assert_same(numbers(resumed), numbers(expected), after)
        assert resumed.features is not None and expected.features is not None
        assert_same(resumed.features.tensors(), expected.features.tensors(), after)
        assert resumed.evidence == expected.evidence and resumed.settings == expected.settings


# The model


def _hook(*_: Any) -> None:
    pass


@METHOD
def test_the_model_is_as_it_was(name: str, tmp_path: Path) -> None:
    model = cnn()
    model(inputs_of(1, 4, 4)).sum().backward()  # gradients to keep
    model.train()
    model.body[1].eval()  # flags that differ between modules
    model.last.weight.requires_grad_(False)
    model.body[0].register_forward_hook(_hook)
    x = inputs_of(1, 4, 4)
    loader = DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=7, shuffle=True)
    with Watch(model):
        posterior = fit(name, model, loader)
        posterior.report()
        posterior.sample(2)
        if can(posterior, VARIANCES):
            posterior.variance()
        uq.save(posterior, tmp_path / "p.h5")
        uq.load(tmp_path / "p.h5", model)
        for head in heads_of(posterior):
            predictor = uq.wrap(model, posterior, head)
            predictor(x)
            predictor.predict(loader, progress=False)
            for of in ("class", "top", "all") if can(posterior, QUADRATIC) else ("class",):
                predictor.novelty(x, of=of)


@pytest.mark.device
@METHOD
def test_another_device(name: str, device: torch.device, tmp_path: Path) -> None:
    """What is summed up is the same as on the CPU; what is trained can be moved there and back."""
    model, x = mlp().to(device), inputs_of(4)
    data = batches(x, targets_of(mlp(), x, "classification"))
    far, near = fit(name, model, data), kept(name)
    assert {tensor.device.type for tensor in numbers(far).values()} == {device.type}
    if not short(name).trains and can(near, VARIANCES):
        for own, variance in near.variance().items():
            torch.testing.assert_close(far.variance()[own].cpu(), variance, rtol=1e-2, atol=1e-4)
    uq.save(far, tmp_path / "p.h5")
    for place, own in (("cpu", mlp()), (device.type, model)):
        loaded = uq.load(tmp_path / "p.h5", own, device=place)
        assert_same(
            {n: t.cpu() for n, t in numbers(loaded).items()}, {n: t.cpu() for n, t in numbers(far).items()}
        )
