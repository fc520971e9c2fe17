"""`uq.MessagePassing`: exact answers through a fit, the algebra of its blocks, whole networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.layers import Geometry, describe
from posthoc_uq.posteriors import PrecisionSettings
from posthoc_uq.trained import (
    Argmax,
    JointMessagesBlock,
    Message,
    MessagesBlock,
    Regression,
    Signal,
    Softargmax,
    Trainer,
    Weighted,
)
from posthoc_uq.trained.message_passing import fit as message_fit
from posthoc_uq.trained.message_passing.train import group_message

D = torch.float64


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def network(*modules: nn.Module, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in modules:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        return nn.Sequential(*modules).double().eval()


def features_of(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model[:-1](x)


def fit(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: Any = "classification", **options: Any
) -> uq.Posterior:
    data = list(zip(x.split(16), y.split(16), strict=True))
    given = {name: options.pop(name) for name in ("seed", "layers_fitted") if name in options}
    method = uq.MessagePassing(**options)
    return uq.fit(model, data, method, likelihood=likelihood, progress=False, **given)


def dense(posterior: uq.Posterior, layer: str) -> tuple[Tensor, Tensor]:
    """Means ``(J, n)`` and covariances ``(J, n, n)`` of a last layer, by quadratic forms."""
    own = posterior.layers[layer]
    matrix = own.to_matrix(
        posterior.mean[own.weight], None if own.bias is None else posterior.mean[own.bias]
    )[0]
    units = torch.eye(own.parameters, dtype=D).reshape(-1, *own.matrix_shape)
    whole = posterior.quadratic({layer: units})
    blocks = [
        whole[j * own.inputs : (j + 1) * own.inputs, j * own.inputs : (j + 1) * own.inputs]
        for j in range(own.outputs)
    ]
    return matrix, torch.stack(blocks)


# A last layer


@pytest.mark.parametrize("bias", [True, False])
def test_the_full_posterior_of_a_regression_is_exact(bias: bool) -> None:
    model = network(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2, bias=bias))
    x = normals(50, 3)
    y = 5 + 20 * normals(50, 2, seed=2)
    noise = torch.tensor([0.3, 2.0], dtype=D)
    options: dict[str, Any] = {"posterior": "full", "dtype": D, "prior_precision": 0.7}
    posterior = fit(model, x, y, uq.Gaussian(noise), **options)
    mean, covariance = dense(posterior, "2")
    f = features_of(model, x)
    shift, value = f.mean(0), y.mean(0)
    for j in range(2):
        if bias:  # the prior is on the weights and on the bias over centred features, around the mean target
            rows = torch.cat([f - shift, torch.ones(50, 1, dtype=D)], 1)
            start = torch.cat([torch.zeros(6, dtype=D), value[j : j + 1]])
        else:
            rows, start = f, torch.zeros(6, dtype=D)
        own = torch.linalg.inv(0.7 * torch.eye(rows.shape[1], dtype=D) + rows.T @ rows / noise[j])
        exact = own @ (0.7 * start + rows.T @ y[:, j] / noise[j])
        if bias:  # b = b' - W shift
            back = torch.eye(7, dtype=D)
            back[6, :6] = -shift
            own, exact = back @ own @ back.T, back @ exact
        torch.testing.assert_close(mean[j], exact, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(covariance[j], own, rtol=1e-8, atol=1e-8)
    new = normals(9, 3, seed=5)
    predictor = uq.wrap(model, posterior)
    prediction = predictor(new)
    row = features_of(model, new)
    row = torch.cat([row, torch.ones(9, 1, dtype=D)], 1) if bias else row
    torch.testing.assert_close(prediction.mean, row @ mean.T, rtol=1e-6, atol=1e-6)
    spread = torch.einsum("ni,jik,nk->nj", row, covariance, row)
    torch.testing.assert_close(prediction.variance, spread + noise, rtol=1e-6, atol=1e-6)
    for head, options in (("moments", {}), ("sampling", {"n_samples": 1000})):
        other = uq.wrap(model, posterior, head, **options)(new)
        torch.testing.assert_close(other.mean, prediction.mean, rtol=0.05, atol=0.5)
        torch.testing.assert_close(other.variance, prediction.variance, rtol=0.3, atol=0.1)


def test_the_full_posterior_of_two_classes_against_a_grid() -> None:
    """One logit without a bias, probit with a noise of variance 0.3, on a grid of 401 x 401 weights."""
    model, x = network(nn.Linear(2, 1, bias=False)), normals(40, 2)
    y = (x @ torch.tensor([1.0, -0.5], dtype=D) + 0.5 * normals(40, seed=3) > 0).long()
    options: dict[str, Any] = {"posterior": "full", "signal": "argmax", "dtype": D, "prior_precision": 2.0}
    mean, covariance = dense(fit(model, x, y, "binary", **options), "0")
    steps = torch.linspace(-2, 3, 401, dtype=D)
    weights = torch.cartesian_prod(steps, steps - 1)
    logs = -0.5 * 2.0 * weights.square().sum(1)
    for row, sign in zip(x, 2 * y - 1, strict=True):
        logs = logs + torch.special.log_ndtr(sign * (weights @ row) / 0.3**0.5)
    weight = (logs - logs.max()).exp()
    weight = weight / weight.sum()
    truth = weight @ weights
    spread = torch.einsum("n,ni,nj->ij", weight, weights - truth, weights - truth)
    assert (
        float(weight[(weights[:, 0] > 2.9) | (weights[:, 1] < -2.9)].sum()) < 1e-6
    )  # the grid is wide enough
    torch.testing.assert_close(mean[0], truth, rtol=0.01, atol=0)
    torch.testing.assert_close(covariance[0], spread, rtol=0, atol=0.1 * float(spread.diagonal().max()))


@pytest.mark.parametrize("signal", [Regression(0.25), Softargmax(), Argmax()])
def test_a_group_of_one_sends_the_messages_of_the_paper(signal: Signal) -> None:
    x = normals(1, 4)
    values = normals(1, 3, seed=1)
    y = values if isinstance(signal, Regression) else values.argmax(1)
    weight = torch.empty(3, 4)
    for bias in (True, False):
        layer = describe("", "linear", ("w", weight), ("b", weight[:, 0]) if bias else None, 1)
        cavity = Message(normals(3, 4 + bias, seed=2), torch.full((3, 4 + bias), 2.0, dtype=D))
        stages = [Weighted(layer, Geometry(), (4,), (3,), torch.device("cpu"))]
        prior = {0: Message(*(part[None, None] for part in cavity))}
        single = Trainer(stages, prior, [(x, y)], signal, iterations=1).run()[0]
        rows = torch.cat([x, torch.ones(1, int(bias), dtype=D)], 1)
        group = Trainer(None, {0: cavity}, [(rows, y)], signal, iterations=1).run()[0]
        torch.testing.assert_close(single.tau[0, 0], group.tau, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(single.rho[0, 0], group.rho, rtol=1e-8, atol=1e-8)


def test_a_group_of_a_regression_is_exact() -> None:
    rows, y = normals(9, 5), normals(9, 2, seed=1)
    cavity = Message(normals(2, 5, seed=2), 1 + normals(2, 5, seed=3).square())
    told = group_message(rows, y, cavity, Regression(0.25), 1)
    for j in range(2):
        covariance = torch.linalg.inv(cavity.rho[j].diag() + rows.T @ rows / 0.25)
        mean, variance = covariance @ (cavity.tau[j] + rows.T @ y[:, j] / 0.25), covariance.diagonal()
        torch.testing.assert_close(1 / (cavity.rho + told.rho)[j], variance, rtol=1e-10, atol=0)
        after = (cavity.tau + told.tau)[j] / (cavity.rho + told.rho)[j]
        torch.testing.assert_close(after, mean, rtol=1e-9, atol=1e-10)


def classes(samples: int = 120) -> tuple[nn.Sequential, Tensor, Tensor]:
    model = network(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    x = 2 * normals(samples, 2)
    return model, x, ((x[:, 0] > 0.5).long() + (x[:, 1] > 0).long()).clamp(max=2)


@pytest.mark.parametrize("signal", ["softargmax", "argmax"])
@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_classes_are_learned(form: str, signal: str) -> None:
    model, x, y = classes()
    posterior = fit(model, x, y, posterior=form, signal=signal)
    assert posterior.dtype == torch.float32 or posterior.dtype == D
    predictor = uq.wrap(model, posterior)
    prediction = predictor(x)
    assert float((prediction.probs.argmax(1) == y).double().mean()) > 0.85
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(120, dtype=prediction.probs.dtype))
    far = predictor(100 * x)
    assert float(far.mutual_information().mean()) > float(prediction.mutual_information().mean())
    assert (posterior.temperature < 0.4) == (signal == "argmax")


def test_two_classes_by_one_logit() -> None:
    model = network(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    x = normals(80, 2)
    y = (x.sum(1) > 0).long()
    for options in ({}, {"posterior": "full"}, {"signal": "argmax"}):
        posterior = fit(model, x, y, "binary", **options)
        probs = uq.wrap(model, posterior)(x).probs
        assert float(((probs[:, 1] > 0.5).long() == y).double().mean()) > 0.9


def test_novelty_goes_by_the_inputs_of_the_last_layer_and_the_classes_of_the_network() -> None:
    model, x = network(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), normals(90, 4)
    posterior = fit(model, x, (x @ normals(4, 3, seed=4)).argmax(1), dtype=D)
    features = posterior.features
    rows = torch.cat([features_of(model, x), torch.ones(90, 1, dtype=D)], 1)
    found = model(x).argmax(1)
    assert features is not None and features.samples == 90
    counts = found.bincount(minlength=3)
    rare = bool(((counts > 0) & (counts < 10)).any())  # classes of few samples are taken together
    assert features.classes == int((counts >= 10).sum()) + rare
    # as where the fit of another method saw the same features and classes
    other = uq.fit(model, [(x, found)], "diag", layers="last", prior_precision=1.0, dtype=D, progress=False)
    assert other.features is not None
    torch.testing.assert_close(features.novelty(rows), other.features.novelty(rows))


def test_pretrained_means_warn_and_hold() -> None:
    model, x, y = classes(6)
    with pytest.warns(UserWarning, match="must not be those that the model was trained on"):
        posterior = fit(model, x, y, prior="pretrained", prior_precision=1e10, dtype=D)
    for name, mean in posterior.mean.items():
        torch.testing.assert_close(mean, posterior.original[name], rtol=0, atol=1e-4)


def test_features_that_never_change() -> None:
    model = network(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].weight[0] = 0.0
        model[0].bias[0] = -1.0  # its unit is always off
    x = normals(40, 2)
    for form in ("diagonal", "full"):
        posterior = fit(model, x, (x[:, 0] > 0).long(), posterior=form)
        assert all(bool(torch.isfinite(mean).all()) for mean in posterior.mean.values())
        assert float((uq.wrap(model, posterior)(x).probs.argmax(1) == (x[:, 0] > 0)).double().mean()) > 0.75


# Its blocks


def blocks(form: str) -> tuple[MessagesBlock, Tensor, Tensor]:
    """A block, and its mean and covariance ``(m n, m n)`` written out."""
    m, n = 2, 4
    prior_mean, prior_precision = normals(1, m, n), 1 + normals(1, m, n, seed=1).square()
    field, shift = normals(1, m, n, seed=2), torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=D)
    back = torch.eye(n, dtype=D)
    back[-1] -= shift
    if form == "diagonal":
        precision = normals(1, m, n, seed=3).square()
        matrices = torch.diag_embed(precision + prior_precision)[0]
        block: MessagesBlock = MessagesBlock(prior_mean, prior_precision, field, precision, shift, 10)
    else:
        root = normals(1, m, n, n, seed=3)
        precision = root @ root.transpose(-1, -2)
        matrices = (precision + torch.diag_embed(prior_precision))[0]
        block = JointMessagesBlock(prior_mean, prior_precision, field, precision, shift, 10)
    covariances = torch.linalg.inv(matrices)
    pull = (prior_mean * prior_precision + field)[0].unsqueeze(2)
    mean = (back @ covariances @ pull).squeeze(2)
    return block, mean, torch.block_diag(*(back @ covariances @ back.T))


@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_a_block_against_dense_matrices(form: str) -> None:
    block, mean, covariance = blocks(form)
    torch.testing.assert_close(block.stored_mean()[0], mean)
    found = block.covariance(PrecisionSettings(10.0, 1.0))
    torch.testing.assert_close(found.variance().flatten(), covariance.diagonal())
    jacobians = normals(5, 1, 2, 4, seed=6)
    expected = jacobians.flatten(1) @ covariance @ jacobians.flatten(1).T
    torch.testing.assert_close(found.quadratic(jacobians), expected)
    whitened = found.whiten(jacobians)
    torch.testing.assert_close(whitened @ whitened.T, expected)
    torch.testing.assert_close(found.log_determinant(), -torch.linalg.slogdet(covariance).logabsdet)
    identity = torch.eye(8, dtype=D).reshape(8, 1, 2, 4)
    linear = found.transform(identity).flatten(1)
    torch.testing.assert_close(linear.T @ linear, covariance)
    torch.testing.assert_close(
        block.covariance(PrecisionSettings(20.0, 1.0)).variance(), found.variance() / 2
    )  # twice the scale, half the variance
    rows = found.of_layer(0, (1, 2, 4), (1, 2, 4)).prepared(D, covariance.device, 2**20)
    inputs, spread = normals(6, 1, 4, seed=7), normals(6, 1, 4, seed=8).square()
    inputs[..., -1], spread[..., -1] = 1.0, 0.0
    own = torch.stack([covariance[:4, :4], covariance[4:, 4:]])
    by_mean = torch.einsum("rgi,oij,rgj->rgo", inputs, own, inputs)
    torch.testing.assert_close(rows.output_variance(inputs), by_mean)
    by_both = by_mean + torch.einsum("oii,rgi->rgo", own, spread)
    torch.testing.assert_close(rows.output_variance(inputs, spread), by_both)
    matrices = torch.diag_embed(spread[:, 0])
    of_outputs = rows.output_covariance(inputs[:, 0], matrices)
    torch.testing.assert_close(of_outputs, torch.diag_embed(by_both[:, 0]))
    torch.testing.assert_close(rows.output_covariance(inputs[:, 0]), torch.diag_embed(by_mean[:, 0]))


# Whole networks


def test_a_whole_network_is_what_the_messages_say() -> None:
    x = normals(24, 2)
    y = (x[:, :1] - x[:, 1:] ** 2) / 2
    model = network(nn.Linear(2, 8), nn.LeakyReLU(0.1), nn.Dropout(0.2), nn.Linear(8, 1))
    for prior in ("spectral", "pretrained"):
        options: dict[str, Any] = {"epochs": 6, "prior": prior}
        if prior == "pretrained":
            with pytest.warns(UserWarning, match="held-out"):
                posterior = fit(model, x, y, uq.Gaussian(0.01), layers="all", **options)
        else:
            posterior = fit(model, x, y, uq.Gaussian(0.01), layers="all", **options)
        assert set(posterior.layers) == {"0", "3"}
        prediction = uq.wrap(model, posterior)(x)
        assert posterior.history.head.name == "moments"
        assert float((prediction.mean - y).square().mean()) < 0.3 * float(y.var())
        assert bool((uq.wrap(model, posterior)(x + 50).variance > prediction.variance).all())


def test_batch_norm_is_folded() -> None:
    """With BatchNorm and without, where that does nothing but scale: the same posterior in the layer's own units."""
    view = nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    last = nn.Linear(12, 2), nn.BatchNorm1d(2), nn.Identity()
    model = network(*view, *last)
    with torch.no_grad():
        for norm in (model[1], model[6]):
            norm.running_mean.copy_(normals(len(norm.running_mean), seed=1))
            norm.running_var.copy_(1 + normals(len(norm.running_var), seed=2).square())
            norm.weight.copy_(1 + 0.3 * normals(len(norm.weight), seed=3))
            norm.bias.copy_(normals(len(norm.bias), seed=4))
    x = normals(24, 1, 5, 5)
    y = (x.mean((1, 2, 3)) > 0).long()
    with pytest.warns(UserWarning, match="held-out"):
        posterior = fit(
            model, x, y, layers="all", prior="pretrained", prior_precision=1e10, epochs=1, dtype=D
        )
    for name, mean in posterior.mean.items():  # hardly moved, so that folding and unfolding must be inverse
        torch.testing.assert_close(mean, posterior.original[name], rtol=0, atol=1e-4)
    posterior = fit(model, x, y, layers="all", epochs=2, batch_size=12)
    probs = uq.wrap(model, posterior)(x).probs
    assert bool(torch.isfinite(probs).all())
    assert all(bool((variance > 0).all()) for variance in posterior.variance().values())


def test_layers_of_every_kind_that_are_the_same_layer_have_the_same_posterior() -> None:
    """Another kind for the same products: convolutions over one axis and over two, transposed or not, or pointwise; and
    what comes before the first layer, which runs as it is.
    """
    x = normals(24, 2, 6)
    y = (x.mean((1, 2)) > 0).long()

    def end(inputs: int) -> list[nn.Module]:
        return [nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(inputs, 2)]

    models = {
        "conv1d": (nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv1d(4, 2, 2, padding=1), *end(10)),
        "transposed": (
            nn.Conv1d(2, 4, 3, groups=2),
            nn.ReLU(),
            nn.ConvTranspose1d(4, 2, 2),  # of stride 1, so that only the order of its weights differs
            *end(10),
        ),
        "conv2d": (
            nn.Unflatten(1, (2, 1)),
            nn.Conv2d(2, 4, (1, 3), groups=2),
            nn.ReLU(),
            nn.Conv2d(4, 2, (1, 2), padding=(0, 1)),
            *end(10),
        ),
    }
    found = []
    for modules in models.values():
        posterior = fit(network(*modules), x, y, layers="all", epochs=2, batch_size=12, dtype=D)
        layers = posterior.layers.values()
        named = [(posterior.mean, posterior.variance())[k] for k in (0, 1)]
        found.append(
            [
                layer.to_matrix(values[layer.weight], values[layer.bias])
                for values in named
                for layer in layers
            ]
        )
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-9)


# What it refuses


def test_layers_of_the_fit_and_of_the_method() -> None:
    """By name the fit's layers are the method's; the default is the method's."""
    model, x, y = classes(20)
    options: dict[str, Any] = {"epochs": 1, "progress": False}
    for layers, wanted in (("all", {"0", "2"}), ("last", {"2"}), (None, {"2"})):
        assert uq.fit(model, [(x, y)], "message_passing", layers=layers, **options).layers.keys() == wanted
    whole = uq.fit(model, [(x, y)], uq.MessagePassing(layers="all", epochs=1), progress=False)
    assert whole.layers.keys() == {"0", "2"}


def digits_network(trained: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network trained on so many digits, and all of them."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16, dtype=D)[order], torch.tensor(labels)[order]
    model = network(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(200):
        part = torch.arange(100) + 100 * (step % (trained // 100))
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimiser.step()
    return model, x, y


@pytest.mark.parametrize("form", ["diagonal", "full"])
@pytest.mark.only("diagonal")
def test_by_default_a_last_layer_does_no_harm_on_digits(form: str) -> None:
    """Held-out accuracy and log likelihood beside the network's own; without the matched temperature far worse.
    Independent messages are narrowed too: at their own width no temperature gives the network's predictions.
    """
    model, x, y = digits_network(600)
    with torch.no_grad():
        on_held_out, on_data = model(x[600:1200]).softmax(1), model(x[:600]).softmax(1)
    loss, accuracy = score(on_held_out, y[600:1200])
    posterior = fit(model, x[:600], y[:600], posterior=form)

    def divergence(posterior: uq.Posterior) -> float:
        probs = uq.wrap(model, posterior)(x[:600]).probs
        return float((on_data * (on_data / probs).log()).sum(1).mean())

    matched_loss, matched_accuracy = score(uq.wrap(model, posterior)(x[600:1200]).probs, y[600:1200])
    matched = divergence(posterior)
    assert (
        matched_loss < loss + (0.02 if form == "diagonal" else 0.04) and matched_accuracy > accuracy - 0.015
    )
    assert "network's" in posterior.history.tuning["temperature"] and 0.03 < posterior.temperature < 0.9
    if form == "diagonal":
        assert "network's" in posterior.history.tuning["scale"] and 600 < posterior.scale < 60_000
        posterior, least = posterior.with_settings(scale=600.0), 1.0
        for decade in range(11):
            posterior = posterior.with_settings(temperature=10 ** (-0.1 * decade))
            least = min(least, divergence(posterior))
        assert matched < least - 0.001
    posterior = posterior.with_settings(temperature=1.0)
    assert score(uq.wrap(model, posterior)(x[600:1200]).probs, y[600:1200])[0] > loss + 0.04


def score(probabilities: Tensor, labels: Tensor) -> tuple[float, float]:
    loss = nn.functional.nll_loss(probabilities.log(), labels)
    return float(loss), float((probabilities.argmax(1) == labels).double().mean())


def test_limits_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_fit, "LARGEST_BYTES", 1000)
    monkeypatch.setattr(message_fit, "_GROUP_SIZE", 4)
    model, x, y = classes(40)
    for options, word in (({"posterior": "full"}, "posterior='diagonal'"), ({}, "epochs=1")):
        with pytest.raises(uq.PosthocUQError, match=word):
            fit(model, x, y, **options)
    fit(model, x, y, epochs=1)


# Data in, data out


def test_data_come_in_and_go_out() -> None:
    model = network(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = normals(90, 3), normals(90, 2, seed=2)
    options = dict[str, Any](posterior="full", dtype=D)
    for likelihood, targets, tolerance in (
        (uq.Gaussian(0.5), y, 1e-8),
        ("classification", y.argmax(1), 0.15),
    ):
        first = fit(model, x[:60], targets[:60], likelihood, **options)
        new = [(x[60:], targets[60:])]
        both = uq.update(first, new, progress=False)
        assert both.evidence.samples == 90 and first.evidence.samples == 60
        assert both.scale == pytest.approx(1.5 * first.scale)  # N, or what matching the network made of it
        again = uq.update(both, new, remove=True, progress=False)
        assert again.evidence.samples == 60
        for name in first.mean:
            spread = first.variance()[name].sqrt()
            assert float(((again.mean[name] - first.mean[name]) / spread).abs().max()) < tolerance
            assert float((again.variance()[name] / first.variance()[name]).log().abs().max()) < tolerance
            assert bool((both.variance()[name] < first.variance()[name] * 1.01).all())
        with pytest.raises(uq.PosthocUQError, match="leaves none"):
            uq.update(first, [(x, targets)], remove=True, progress=False)
    foreign = 50 * normals(30, 3, seed=8), normals(30, 2, seed=9)
    first = fit(model, x[:31], y[:31], uq.Gaussian(1e-3), **options)
    with pytest.raises(uq.PosthocUQError, match=r"negative|must be positive"):
        uq.update(first, [foreign], remove=True, progress=False)


def test_features_that_go_out_altogether_leave_no_negative_precision() -> None:
    """Fifteen features are 0 in the first fit: what comes in and goes out leaves rounding of both signs."""
    model = network(nn.Linear(20, 20, bias=False), nn.ReLU(), nn.Linear(20, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(20))
    x, y = normals(200, 20).abs(), normals(200, 3, seed=2).argmax(1)
    x[:100, 5:] *= -1
    first = fit(model, x[:100], y[:100], posterior="full")
    new = [(x[100:], y[100:])]
    again = uq.update(uq.update(first, new, progress=False), new, remove=True, progress=False)
    (block,) = again.blocks.values()
    assert float(block.precision.diagonal(dim1=-2, dim2=-1).min()) >= 0
    assert float((again.mean["2.weight"] - first.mean["2.weight"]).abs().max()) < 1e-4


@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_features_that_never_change_keep_a_prior_of_unit_inputs(form: str) -> None:
    model = network(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.abs_()
    x, y = -normals(80, 4).abs(), normals(80, 3, seed=2).argmax(1)
    posterior = fit(model, x, y, posterior=form)
    assert float(posterior.mean["2.weight"].abs().max()) < 1e-12
    torch.testing.assert_close(posterior.variance()["2.weight"], torch.full((3, 6), 1.5 / 6).double())


@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_features_that_never_change_have_the_units_of_those_that_do(form: str) -> None:
    """One of five features changes, and one hardly, by less than a thousandth of the first one's deviation."""
    model = network(nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([1.0, 3e-4, 1, 1, 1])))
    x, y = normals(80, 5).abs(), normals(80, 3, seed=2).argmax(1)
    x[:, 2:] *= -1
    features = model[:2](x).double()
    variance = fit(model, x, y, posterior=form).variance()["2.weight"]
    usual = (features[:, 0].var(correction=0) + features[:, 1].var(correction=0)) / 2
    torch.testing.assert_close(variance[:, 2:], (1.5 / 5 / usual).expand(3, 3))
    assert bool((variance[:, 1] > 1e4 * variance[:, 2]).all())  # its own small units


def test_independent_weights_take_no_other_data() -> None:
    model, x, y = classes(40)
    small = network(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    for posterior in (fit(model, x, y), fit(small, x, y, layers="all", epochs=1)):
        for remove in (False, True):
            with pytest.raises(uq.PosthocUQError, match="posterior='full'"):
                uq.update(posterior, [(x, y)], remove=remove, progress=False)


def test_a_regression_has_the_exact_means_however_inputs_correlate() -> None:
    model = network(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 2, bias=False))
    x, y = normals(300, 6), normals(300, 2, seed=2)
    posterior = fit(model, x, y, uq.Gaussian(0.5), dtype=D, prior_precision=2.0)
    features = features_of(model, x)
    system = 2.0 * torch.eye(20, dtype=D) + features.T @ features / 0.5
    exact = torch.linalg.solve(system, features.T @ y.double() / 0.5).T
    torch.testing.assert_close(posterior.mean["2.weight"].double(), exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_inputs_of_zeros_say_nothing_without_a_bias(form: str) -> None:
    model, x = network(nn.Linear(4, 3, bias=False)), normals(60, 4)
    y = (x @ normals(4, 3, seed=4)).argmax(1)
    with_zeros = (
        torch.cat([x, torch.zeros(5, 4, dtype=x.dtype)]),
        torch.cat([y, torch.zeros(5, dtype=y.dtype)]),
    )
    posterior = fit(model, *with_zeros, posterior=form, dtype=D)
    plain = fit(model, x, y, posterior=form, dtype=D)
    assert posterior.evidence.samples == 60
    torch.testing.assert_close(posterior.mean["0.weight"], plain.mean["0.weight"])


def test_an_update_of_an_exact_posterior_is_the_fit_on_all() -> None:
    """With one prior for both fits: data of the same means and sizes, so that the units are the same."""
    model = network(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))
    x, y = normals(60, 3), normals(60, 2, seed=2)
    options: dict[str, Any] = {"posterior": "full", "dtype": D, "prior_precision": 2.0}
    first = fit(model, x[:40], y[:40], uq.Gaussian(0.5), **options)
    both = uq.update(first, [(x[40:], y[40:])], progress=False)
    whole = fit(model, x, y, uq.Gaussian(0.5), **options)
    for name, mean in whole.mean.items():
        torch.testing.assert_close(both.mean[name], mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(both.variance()[name], whole.variance()[name], rtol=1e-9, atol=1e-9)


def test_a_faithful_scale_is_found_where_it_is_asked_for() -> None:
    model, x, y = classes(60)
    plain = uq.fit(model, [(x, y)], uq.MessagePassing(), progress=False)
    asked = uq.fit(model, [(x, y)], uq.MessagePassing(), prior_precision="faithful", progress=False)
    assert plain.history.head.criterion == "given" and asked.history.head.criterion == "faithful"
    assert asked.scale > plain.scale
