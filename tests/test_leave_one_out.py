"""Leave-one-out by the tangent kernel, against gradients by autograd and against regressions fitted again and again."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import Batch
from posthoc_uq.curvature import tangent_kernel as kernels
from posthoc_uq.curvature import untrained, with_state
from posthoc_uq.fitting.leave_one_out import (
    RIDGES,
    LeaveOneOut,
    leave_one_out,
    likeliest_temperature,
    temperature_for,
)
from posthoc_uq.layers import prepare


def trained(outputs: int, x: Tensor, loss: Any, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(epochs):
        optimiser.zero_grad()
        loss(model(x)).backward()
        optimiser.step()
    return model.eval()


Data = list[tuple[Tensor, Tensor]]


@functools.cache
def regression_network() -> tuple[nn.Module, Data, tuple[Tensor, Tensor]]:
    """A network that has memorised 150 points of a smooth function with a noise variance of .25."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(550, 4, generator=generator)
    y = torch.sin(x[:, :1]) + x[:, 1:2] + 0.5 * torch.randn(550, 1, generator=generator)
    model = trained(1, x[:150], lambda outputs: nn.functional.mse_loss(outputs, y[:150]), 600)
    return model, [(x[:150], y[:150])], (x[150:], y[150:])


def memorised_regression() -> tuple[uq.Posterior, Data, tuple[Tensor, Tensor]]:
    model, data, new = regression_network()
    options: dict[str, Any] = {"likelihood": "regression", "layers": "last", "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of residuals that underestimate the noise
        return uq.fit(model, data, "diag", **options), data, new


@functools.cache
def class_network() -> tuple[nn.Module, Data, tuple[Tensor, Tensor]]:
    """A network that has memorised 150 points of three classes that overlap."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (650,), generator=generator)
    x = torch.randn(650, 6, generator=generator) + 1.2 * nn.functional.one_hot(y, 6)
    model = trained(3, x[:150], lambda outputs: nn.functional.cross_entropy(outputs, y[:150]), 200)
    return model, [(x[:150], y[:150])], (x[150:], y[150:])


def memorised_classes() -> tuple[uq.Posterior, Data, tuple[Tensor, Tensor]]:
    model, data, new = class_network()
    return uq.fit(model, data, "diag", layers="last", progress=False), data, new


def tuned(posterior: uq.Posterior, data: Any, **options: Any) -> tuple[uq.Posterior, LeaveOneOut]:
    """The posterior, and what was estimated."""
    found = uq.tune(posterior, data, criterion="leave_one_out", progress=False, **options)
    assert found.history.leave_one_out is not None
    return found, found.history.leave_one_out


def estimated(posterior: uq.Posterior, data: Any, **options: Any) -> LeaveOneOut:
    return tuned(posterior, data, **options)[1]


def coverage(bounds: tuple[Tensor, Tensor], targets: Tensor) -> float:
    return float(((targets >= bounds[0]) & (targets <= bounds[1])).double().mean())


def batches_of(inputs: Tensor, size: int = 7) -> list[Batch]:
    return [Batch((part,)) for part in inputs.split(size)]


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    image = torch.randn(9, 2, 6, 6, dtype=torch.float64)
    convolutional = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    perceptron = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    shared = nn.Linear(5, 5)
    return {
        "perceptron": (perceptron.double(), torch.randn(15, 5, dtype=torch.float64)),
        "convolutions with groups": (convolutional.double(), image),
        "a layer used twice": (
            nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(5, 1), nn.Flatten(0)).double(),
            torch.randn(11, 5, dtype=torch.float64),
        ),
        "tokens": (
            nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double(),
            torch.randn(8, 3, 5, dtype=torch.float64),
        ),
    }


def tangent_kernel(
    network: nn.Module, batches: list[Batch], seed: int, weights: set[str] | None = None
) -> Tensor:
    layers = prepare(network, batches[0]).proof.tracked.values()
    return kernels.tangent_kernel(network, batches, seed, layers, weights)


class Steps(nn.Module):
    """A layer that is called once for every step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.readout = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = torch.tanh(self.step(state + step))
        return self.readout(state)


@pytest.mark.parametrize("name", [*networks(), "sequences of one step, of two and of one"])
def test_kernel_is_that_of_autograds_gradients(name: str) -> None:
    if name in networks():
        network, inputs = networks()[name]
        batches = batches_of(inputs)
    else:
        torch.manual_seed(0)
        network = Steps().double()
        batches = [Batch((torch.randn(4, steps, 3, dtype=torch.float64),)) for steps in (1, 2, 1)]
    network.eval()
    kernel = tangent_kernel(network, batches, seed=3)
    outputs = torch.cat([network(*batch.args) for batch in batches])
    generator = torch.Generator().manual_seed(3)
    direction = (
        torch.randn(outputs.shape[1:], generator=generator, dtype=torch.float64) / outputs[0].numel() ** 0.5
    )
    rows = []
    for output in outputs:
        gradients = torch.autograd.grad(
            (output * direction).sum(), list(network.parameters()), retain_graph=True
        )
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    jacobian = torch.stack(rows)
    torch.testing.assert_close(kernel, jacobian @ jacobian.T, rtol=1e-10, atol=1e-12)


def test_frozen_weights_are_not_in_the_kernel() -> None:
    """That of a network whose first layer was frozen is that of the rest alone; all zero gradients are an error."""
    network, inputs = networks()["perceptron"]
    names = {name for name, _ in network.named_parameters() if not name.startswith("0.")}
    rest, hidden = network[1:], network[0](inputs)
    found = tangent_kernel(network, batches_of(inputs), 3, names)
    torch.testing.assert_close(found, tangent_kernel(rest, batches_of(hidden), 3), rtol=1e-10, atol=1e-12)
    with pytest.raises(uq.NonFiniteError, match="says nothing"):
        tangent_kernel(nn.Linear(4, 2, bias=False), batches_of(torch.zeros(5, 4)), 0)


@pytest.mark.parametrize("columns", [2, 40])  # fewer than samples, and more: other products find the ridge
@pytest.mark.parametrize("grouped", [False, True])
def test_predictions_are_those_of_regressions_fitted_without_the_samples(grouped: bool, columns: int) -> None:
    torch.manual_seed(1)
    features = torch.cat((torch.randn(24, 6), torch.ones(24, 1)), 1).double()
    targets = torch.randn(24, columns, dtype=torch.float64) + features[:, :1]
    groups = torch.arange(24) // 3 if grouped else None
    kernel = features @ features.T
    found = leave_one_out(kernel, targets, groups)
    scaled, centre = kernel / kernel.diagonal().mean(), targets.mean(0)
    for left in torch.arange(24).split(3 if grouped else 1):
        rest = torch.tensor([n for n in range(24) if n not in left.tolist()])
        solved = torch.linalg.solve(
            scaled[rest][:, rest] + found.ridge * torch.eye(len(rest), dtype=torch.float64),
            targets[rest] - centre,
        )
        torch.testing.assert_close(
            found.predictions[left], centre + scaled[left][:, rest] @ solved, rtol=1e-10, atol=1e-10
        )
    errors = []
    for ridge in RIDGES:  # the ridge is the best of all of them, by the same definition
        inverse = torch.linalg.inv(scaled + ridge * torch.eye(24, dtype=torch.float64))
        if groups is None:
            residual = inverse @ (targets - centre) / inverse.diagonal().unsqueeze(1)
            errors.append(float(residual.square().mean()))
    if errors:
        assert RIDGES[min(range(len(errors)), key=errors.__getitem__)] == found.ridge


@pytest.mark.parametrize(("independent", "error"), [(0.05, 1e-4), (0.0, 1e-8)])
def test_many_rows_are_decomposed_in_float32_where_that_is_exact_enough(
    independent: float, error: float
) -> None:
    """A kernel of low rank is not."""
    torch.manual_seed(1)
    features = torch.randn(600, 40, dtype=torch.float64)
    targets = features[:, :3] + 0.3 * torch.randn(600, 3, dtype=torch.float64)
    kernel = features @ features.T / 40
    kernel.diagonal().add_(independent)
    found, errors = leave_one_out(kernel, targets), []
    best = RIDGES.index(found.ridge)
    for ridge in RIDGES[best - 1 : best + 2]:
        inverse = torch.linalg.inv(kernel / kernel.diagonal().mean() + ridge * torch.eye(600).double())
        residuals = inverse @ (targets - targets.mean(0)) / inverse.diagonal().unsqueeze(1)
        errors.append(float(residuals.square().mean()))
        if ridge == found.ridge:
            torch.testing.assert_close(found.predictions, targets - residuals, rtol=error, atol=error)
    assert min(errors) >= float(found.squared_error.mean()) * (1 - error)


def test_the_temperature_gives_the_confidence_and_never_sharpens() -> None:
    torch.manual_seed(2)
    logits = 6 * torch.randn(200, 4)
    temperature = temperature_for(logits, 0.6)
    assert temperature > 1
    assert float((logits / temperature).softmax(1).amax(1).mean()) == pytest.approx(0.6, abs=1e-4)
    assert temperature_for(logits / 10, 0.99) == 1.0
    two = torch.randn(100) * 9
    binary = temperature_for(two, 0.7)
    probability = torch.sigmoid(two.double() / binary)
    assert float(torch.maximum(probability, 1 - probability).mean()) == pytest.approx(0.7, abs=1e-4)


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.token)


def test_an_untrained_copy_has_new_weights_and_the_model_keeps_its_own() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    inputs = 3 + 2 * torch.randn(40, 4)
    before, state = {n: p.clone() for n, p in model.state_dict().items()}, torch.get_rng_state()
    twin = untrained(model, batches_of(inputs, 40), seed=5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert not torch.equal(twin[0].weight, model[0].weight)  # type: ignore[union-attr]
    hidden = inputs @ twin[0].weight.T + twin[0].bias  # type: ignore[union-attr,operator]
    torch.testing.assert_close(twin[1].running_mean, hidden.mean(0))  # type: ignore[union-attr]
    torch.testing.assert_close(twin[1].running_var, hidden.var(0))  # type: ignore[union-attr]
    assert torch.equal(untrained(model, batches_of(inputs, 40), seed=5)[0].weight, twin[0].weight)  # type: ignore[index]


def test_a_trained_parameter_that_nothing_initialises_needs_the_initial_state() -> None:
    model = WithToken()
    with pytest.raises(uq.PosthocUQError, match="initial="):
        untrained(model, [], seed=0)
    model.token.requires_grad_(False)  # was never trained
    assert torch.equal(untrained(model, [], seed=0).token, model.token)  # type: ignore[arg-type]
    started = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    assert all(bool((value == 0.5).all()) for value in with_state(model, started).state_dict().values())
    with pytest.raises(uq.PosthocUQError, match="does not fit"):
        with_state(model, {"token": torch.zeros(4)})


def test_weights_that_were_frozen_in_the_training_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    twin = untrained(model, [], seed=0)
    kept = [torch.equal(twin.get_parameter(name), value) for name, value in model.named_parameters()]
    assert kept == [True, True, False, False]
    model.requires_grad_(False)  # after the training
    assert not torch.equal(untrained(model, [], seed=0).get_parameter("0.weight"), model[0].weight)


def test_a_memorised_regression_gets_the_noise_of_new_data() -> None:
    posterior, data, (x, y) = memorised_regression()
    posterior = posterior.with_settings(noise_scale=1.0)  # that of the residuals
    assert posterior.history.tuning["noise variance"] == "given"
    before = uq.wrap(posterior.model, posterior)(x).interval(0.9)
    assert coverage(before, y) < 0.3
    posterior, found = tuned(posterior, data)
    assert found.noise_variance is not None and found.temperature is None
    assert 0.6 < float(found.noise_variance) / 0.25 < 1.8  # the noise that the data were made with, and more
    assert 0.7 < coverage(uq.wrap(posterior.model, posterior)(x).interval(0.9), y) < 0.99
    # the noise and the mean of the weights' variance on training inputs are that together
    total = uq.wrap(posterior.model, posterior)(data[0][0]).variance.mean()
    assert float(total) == pytest.approx(float(found.noise_variance), rel=1e-4)
    assert 0.3 * found.noise_scale < posterior.noise_scale < found.noise_scale
    assert posterior.history.left_out.plain() == {"temperature": 1.0, "noise_scale": posterior.noise_scale}
    assert (
        posterior.history.faithful.settings.noise_scale == posterior.noise_scale
    )  # the prior is found again
    assert "leave-one-out" in posterior.history.tuning["noise variance"]
    # batches and their order change nothing; another seed changes little
    inputs, targets = data[0]
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(4))
    parts = list(zip(inputs[order].split(13), targets[order].split(13), strict=True))
    again = estimated(posterior, parts)
    torch.testing.assert_close(again.noise_variance, found.noise_variance, rtol=1e-5, atol=0)
    other = estimated(posterior, data, seed=9)
    torch.testing.assert_close(other.noise_variance, found.noise_variance, rtol=0.2, atol=0)


def test_memorised_classes_get_the_confidence_of_new_data() -> None:
    posterior, data, (x, y) = memorised_classes()
    network = posterior.model
    assert network is not None
    with torch.no_grad():
        alone = float(nn.functional.cross_entropy(network(x), y))
        certainty = float(network(data[0][0]).softmax(1).amax(1).mean())
    posterior, found = tuned(posterior, data)
    true = float((uq.wrap(network, posterior)(x).probs.argmax(1) == y).double().mean())
    assert certainty > 0.97 and abs(found.accuracy - true) < 0.08
    assert float(-uq.wrap(network, posterior)(x).log_prob(y).mean()) < 0.7 * alone
    with torch.no_grad():
        tempered = (network(data[0][0]) / posterior.temperature).softmax(1).amax(1).mean()
    largest = found.accuracy + 2 * (found.accuracy * (1 - found.accuracy) / found.samples) ** 0.5
    assert float(tempered) == pytest.approx(largest, abs=0.05)  # the left-out margins have a say, too


def test_left_out_predictions_choose_the_temperature_at_which_labels_are_likeliest() -> None:
    """As logits in the network's units: margins of the fit are scaled to those of the network."""
    torch.manual_seed(4)
    labels = torch.randint(0, 3, (80,))
    targets = nn.functional.one_hot(labels, 3).double()
    predictions = targets + 0.6 * torch.randn(80, 3, dtype=torch.float64)
    some = leave_one_out(torch.eye(3, dtype=torch.float64), torch.eye(3))

    def left_out(predictions: Tensor, fitted: Tensor) -> Any:
        return replace(some, predictions=predictions, fitted=fitted, targets=fitted)

    found = likeliest_temperature(20 * targets, left_out(predictions, targets))
    losses = [
        float(nn.functional.cross_entropy(20 * predictions / temperature, labels))
        for temperature in (0.98 * found, found, 1.02 * found)
    ]
    assert found > 2 and losses[1] < min(losses[0], losses[2])
    assert likeliest_temperature(20 * targets, left_out(targets, targets)) == 1.0
    # one column is the second class
    column, of_targets = predictions[:, 1:2], targets[:, 1:2]
    both = left_out(torch.cat((1 - column, column), 1), torch.cat((1 - of_targets, of_targets), 1))
    own = 20 * (2 * targets[:, 1] - 1)
    expected = likeliest_temperature(torch.stack((torch.zeros(80), own), 1), both)
    again = likeliest_temperature(own, left_out(column, of_targets))
    assert again == pytest.approx(expected, rel=1e-3) and expected > 1.0


def test_classes_that_no_sample_has_are_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    labels = 7 * (x[:, :2] + torch.randn(60, 2, generator=generator) > 0).sum(1)
    targets = nn.functional.one_hot(labels, 40).double()
    whole = leave_one_out(x @ x.T, targets)
    part = replace(leave_one_out(x @ x.T, targets[:, [0, 1, 2, 7, 14]]), absent=35)
    found, expected = (likeliest_temperature(30 * whole.fitted, each) for each in (part, whole))
    assert found == pytest.approx(expected, rel=1e-9) and found > 1
    assert (part.accuracy, part.ridge) == (whole.accuracy, whole.ridge)


def test_many_samples_are_estimated_by_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ones depends on neither order nor batches; errors are taken to fall on as they fell from a quarter."""
    for kind, memorised in (("regression", memorised_regression), ("classification", memorised_classes)):
        posterior, data, _ = memorised()
        full = estimated(posterior, data)
        with monkeypatch.context() as patch:
            patch.setattr("posthoc_uq.fitting.leave_one_out.MAX_ROWS", 100)
            found = estimated(posterior, data)
            assert (found.rows, found.samples, full.rows) == (100, 150, 150)
            inputs, targets = data[0]
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(4))
            parts = list(zip(inputs[order].split(13), targets[order].split(13), strict=True))
            again = estimated(posterior, parts)
            groups = [f"patient {row // 2}" for row in range(150)]
            assert estimated(posterior, data, groups=groups).rows == 100
            fitted = uq.fit(posterior.model, parts, likelihood=kind, progress=False)
            assert "100 of 150 samples" in str(fitted.report())
        if kind == "regression":
            assert found.noise_scale == pytest.approx(again.noise_scale, rel=1e-5)
            assert found.noise_scale == pytest.approx(full.noise_scale, rel=0.3)
        else:
            assert (found.accuracy, found.temperature) == pytest.approx((again.accuracy, again.temperature))
            assert found.accuracy == pytest.approx(full.accuracy, abs=0.1)
            assert found.temperature == pytest.approx(full.temperature, rel=0.4)


def test_nearly_right_confidence_gains_too() -> None:
    """A network that is 1.00 confident where .95 is right: hardly a gap, and twice the likelihood's loss."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (1200,), generator=generator)
    x = torch.randn(1200, 6, generator=generator) + 2.2 * nn.functional.one_hot(y, 6)
    model = trained(2, x[:200], lambda outputs: nn.functional.cross_entropy(outputs, y[:200]), 200)
    posterior = uq.fit(model, [(x[:200], y[:200])], "diag", layers="last", progress=False)
    found = posterior.history.leave_one_out
    assert found is not None and found.accuracy > 0.89 and posterior.temperature > 1.3
    with torch.no_grad():
        logits = model(x[200:])
    loss = nn.functional.cross_entropy
    alone, tempered = loss(logits, y[200:]), loss(logits / posterior.temperature, y[200:])
    best = min(float(loss(logits / t, y[200:])) for t in torch.logspace(0, 1, 30))
    assert float(alone - tempered) > 0.8 * (float(alone) - best)


def test_groups_are_left_out_together_and_the_initial_network_is_taken() -> None:
    posterior, data, _ = memorised_classes()
    twice = [(torch.cat((x, x)), torch.cat((y, y))) for x, y in data]
    assert estimated(posterior, twice).accuracy > 0.97  # every sample is predicted by its copy
    groups = torch.arange(len(data[0][0])).repeat(2)
    grouped = estimated(posterior, twice, groups=groups)
    assert grouped.accuracy < 0.9
    single = estimated(posterior, data)
    assert grouped.temperature == pytest.approx(single.temperature, rel=0.2)  # copies are no more evidence
    assert estimated(posterior, twice, groups=lambda _: groups).accuracy == grouped.accuracy
    start = untrained(posterior.model, batches_of(data[0][0]), seed=1)  # type: ignore[arg-type]
    found = estimated(posterior, data, initial=start)
    assert found.initialisations == 1 and "the given network" in str(found)
    with pytest.raises(uq.PosthocUQError, match="has the trained weights"):
        estimated(posterior, data, initial=posterior.model)
    assert estimated(posterior, data, initial=[start.state_dict()]).accuracy == found.accuracy


def memorised_fit(likelihood: str = "regression", **options: Any) -> uq.Posterior:
    fitted, data, _ = memorised_regression() if likelihood == "regression" else memorised_classes()
    assert fitted.model is not None
    return uq.fit(fitted.model, data, likelihood=likelihood, progress=False, **options)


def test_a_fit_of_a_perceptron_leaves_out_unasked() -> None:
    """The same numbers as by a call, for those who give nothing but data, method and likelihood."""
    posterior, data, (x, y) = memorised_regression()
    assert posterior.noise_scale > 10 and "untrained networks" in str(posterior.report())
    assert 0.7 < coverage(uq.wrap(posterior.model, posterior)(x).interval(0.9), y) < 0.99
    asked = estimated(memorised_fit(prior_precision=1.0), data)
    total = uq.wrap(posterior.model, posterior)(data[0][0]).variance.mean()
    assert float(asked.noise_variance) == pytest.approx(float(total), rel=1e-4)
    classes, data, _ = memorised_classes()
    temperature = estimated(classes, data).temperature
    assert memorised_fit("classification").temperature == temperature and temperature > 1.5


@pytest.mark.filterwarnings("ignore:The network has about")
def test_a_fit_leaves_out_nothing_where_something_is_given() -> None:
    _, data, _ = memorised_regression()
    for options in ({"noise_variance": 0.25}, {"prior_precision": 1.0}, {"divergence": 0.1}):
        assert memorised_fit(**options).noise_scale == 1.0
    _, data, _ = memorised_classes()
    assert "leave-one-out" not in str(memorised_fit("classification", val_loader=data).history.tuning)


@pytest.mark.filterwarnings("ignore:The network has about")
@pytest.mark.parametrize("change", ["frozen", "embedding", "convolution", "positions", "rows", "one layer"])
def test_a_fit_leaves_out_nothing_for_other_networks(change: str) -> None:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    data = [(x, x[:, :1].square())]
    model: nn.Module = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    if change == "frozen":
        model[0].requires_grad_(False)  # type: ignore[index]
    elif change == "embedding":
        model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))
        data = [((4 + x).long().clamp(0, 8), x[:, :1])]
    elif change == "convolution":
        model = nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)
        )
    elif change == "positions":
        model = nn.Sequential(
            nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)
        )
    elif change == "rows":  # of one sample, as if they were samples
        parts = (nn.Unflatten(1, (3, 2)), nn.Flatten(0, 1), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        model = nn.Sequential(*parts, nn.Unflatten(0, (-1, 3)), nn.Flatten(1))
        data = [(x, x[:, :3])]
    else:
        model = nn.Linear(6, 1)
    posterior = uq.fit(model, data, likelihood="regression", progress=False)
    assert posterior.noise_scale == 1.0


def test_normalisation_takes_batches_by_their_samples() -> None:
    """The means are those of all rows that have company; the last batch has one row, which has no variance."""
    x = torch.randn(41, 3, generator=torch.Generator().manual_seed(0))
    alone = nn.Sequential(nn.BatchNorm1d(3)).eval()
    uneven = [*batches_of(x[:10], 10), *batches_of(x[10:40], 30), *batches_of(x[40:])]
    found: Any = untrained(alone, uneven, seed=0)
    (found,) = found
    torch.testing.assert_close(found.running_mean, x[:40].mean(0))
    variances = (10 * x[:10].var(0) + 30 * x[10:40].var(0)) / 40
    torch.testing.assert_close(found.running_var, variances)
    batches = list(zip(x.split(10), x[:, :1].square().split(10), strict=True))
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).eval()
    assert uq.fit(model, batches, likelihood="regression", progress=False).history.left_out
    with pytest.raises(uq.PosthocUQError, match="more than one sample"):
        posterior = uq.fit(model, batches, likelihood="regression", prior_precision=1.0, progress=False)
        estimated(posterior, list(zip(x.split(1), x[:, :1].split(1), strict=True)))


def test_a_fit_with_weights_leaves_nothing_out() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    data = [(x, x[:, :1], torch.full((30,), 2.0))]
    parts: dict[str, Any] = {
        "batch_to_inputs": lambda batch: batch[0],
        "batch_to_targets": lambda batch: batch[1],
    }
    weights: dict[str, Any] = {"batch_to_weights": lambda batch: batch[2]}
    posterior = uq.fit(model, data, likelihood="regression", progress=False, **parts, **weights)
    assert not posterior.history.left_out
