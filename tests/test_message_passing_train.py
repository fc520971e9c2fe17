"""The trainer of message passing: exact answers where there are some, no double counting, divergence that is caught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

import pytest
import torch
import torch.nn.functional as F
from inner_kind import inner_known
from torch import Tensor, nn
from torch.func import functional_call

import posthoc_uq as uq
from posthoc_uq.layers import RULES, Geometry, Layer, describe
from posthoc_uq.trained import (
    Activation,
    Argmax,
    Message,
    Regression,
    Signal,
    Softargmax,
    Trainer,
    Weighted,
    divide,
    drawn_means,
    from_moments,
    multiply,
    outputs_of,
    uniform_like,
    weight_variance,
)
from posthoc_uq.trained.message_passing import train
from posthoc_uq.trained.message_passing.messages import sum_backward
from posthoc_uq.trained.message_passing.network import (
    BatchNormStage,
    ByStage,
    Stage,
    StageMemory,
    pass_messages,
    stages_of,
)
from posthoc_uq.trained.message_passing.train import batch_damping

D = torch.float64
ROWS = torch.tensor([[1, 0.5, -0.3], [0.2, -1, 0.4], [-0.6, 0.3, 1], [0.8, 0.7, 0.2]], dtype=D)
VALUES = torch.tensor([[0.9], [-0.4], [0.3], [1.1]], dtype=D)
PROBIT_ROWS = torch.tensor([[1, 0.5], [0.2, -1], [-0.6, 0.3], [0.8, 0.7], [-1, 0.4]], dtype=D)
SIGNS = torch.tensor([1, 0, 1, 1, 0])


def near(found: Tensor, expected: object, tolerance: float = 1.5e-6) -> None:
    wanted = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=D)
    torch.testing.assert_close(found.flatten(), wanted.flatten(), rtol=0, atol=tolerance)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def linear(inputs: int, outputs: int, bias: bool = True) -> Weighted:
    weight = torch.empty(outputs, inputs)
    layer = describe("", "linear", ("w", weight), ("b", weight[:, 0]) if bias else None, 1)
    return Weighted(layer, Geometry(), (inputs,), (outputs,), torch.device("cpu"))


def belief(mean: Tensor, variance: float, bias: bool) -> Message:
    """A prior of weights ``(K, J, I)`` of one group, and of a bias around 0 with a variance of 0.5."""
    variances = torch.full_like(mean, variance)
    if bias:
        mean, variances = F.pad(mean, (0, 1)), F.pad(variances, (0, 1), value=0.5)
    return from_moments(mean.unsqueeze(1), variances.unsqueeze(1))


def one_layer(inputs: int, outputs: int = 1, *, bias: bool = False) -> tuple[list[Weighted | Stage], ByStage]:
    return [linear(inputs, outputs, bias)], {0: belief(torch.zeros(1, outputs, inputs, dtype=D), 1.0, bias)}


def perceptron(
    widths: Sequence[int], networks: int = 1, slope: float = 0.1
) -> tuple[list[Weighted | Stage], ByStage]:
    generator, stages, prior = torch.Generator().manual_seed(0), list[Weighted | Stage](), ByStage()
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        if number:
            stages.append(Activation(slope))
        means = drawn_means(networks, outputs, inputs, outputs, generator, torch.device("cpu"))
        variance = weight_variance(inputs, outputs, first=number == 0)
        prior[len(stages)] = belief(means, variance, True)
        stages.append(linear(inputs, outputs))
    return stages, prior


def sine(samples: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(samples, 1, generator=generator, dtype=D) - 0.5
    truth = 0.5 * x + 0.2 * torch.sin(2 * torch.pi * x) + 0.3 * torch.sin(4 * torch.pi * x)
    return x, truth, truth + 0.05 * torch.randn(samples, 1, generator=generator, dtype=D)


def moments(trainer: Trainer, index: int = 0) -> tuple[Tensor, Tensor]:
    weights = trainer.posterior[index]
    return weights.mean, weights.variance


def assert_assembled(trainer: Trainer) -> None:
    """``Q = prior * prod G_b``."""
    parts = trainer.assembled()
    for index, own in trainer.posterior.items():
        for found, expected in zip(own, parts[index], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# Exact answers


def test_t20_linear_regression() -> None:
    stages, prior = one_layer(3)
    often = Trainer(stages, prior, [(ROWS, VALUES)], Regression(0.25), iterations=60)
    often.run()
    near(moments(often)[0], (0.570250, 0.654174, 0.349561))
    near(moments(often)[1], (0.155819, 0.162196, 0.218744))
    covariance = torch.linalg.inv(torch.eye(3, dtype=D) + ROWS.T @ ROWS / 0.25)
    near(moments(often)[0], covariance @ ROWS.T @ VALUES / 0.25, 1e-9)
    near(covariance.diagonal(), (0.137828, 0.133504, 0.185757))


def test_a_single_observation_is_exact() -> None:
    stages, prior = one_layer(3, 2, bias=True)
    y = torch.tensor([[0.4, -1.0]], dtype=D)
    trainer = Trainer(stages, prior, [(ROWS[:1], y)], Regression(0.25))
    trainer.run()
    row = torch.cat([ROWS[0], torch.ones(1, dtype=D)])
    precision = torch.diag(torch.tensor([1.0, 1, 1, 2], dtype=D)) + torch.outer(row, row) / 0.25
    covariance = torch.linalg.inv(precision)
    for j in range(2):
        exact = covariance @ (row * y[0, j] / 0.25)
        near(moments(trainer)[0][0, 0, j], exact, 1e-12)
        near(moments(trainer)[1][0, 0, j], covariance.diagonal(), 1e-12)


def test_t21_joint_posterior_of_a_probit() -> None:
    prior = Message(torch.zeros(1, 2, dtype=D), torch.eye(2, dtype=D).unsqueeze(0))
    _, told = train.fit_sites(PROBIT_ROWS, SIGNS, Argmax(), prior)
    mean, covariance = train.joint_moments(multiply(prior, told))
    near(mean, (0.601863, 0.915609))
    near(covariance, (0.234925, 0.052648, 0.052648, 0.376380))
    stages, own = one_layer(2)
    trainer = Trainer(stages, own, [(PROBIT_ROWS, SIGNS)], Argmax(), iterations=100)
    trainer.run()
    near(moments(trainer)[0], (0.585904, 0.903565))
    near(moments(trainer)[1], (0.243468, 0.389804))
    # the truth, on a grid of both weights
    x = torch.linspace(-5, 6, 401, dtype=D)
    w = torch.cartesian_prod(x, x)
    logs = -0.5 * w.square().sum(1)
    for row, sign in zip(PROBIT_ROWS, 2 * SIGNS - 1, strict=True):
        logs = logs + torch.special.log_ndtr(sign * (w @ row) / 0.3**0.5)
    weight = (logs - logs.max()).exp()
    weight = weight / weight.sum()
    truth = weight @ w
    near(truth, (0.602177, 0.916974))
    near(weight @ (w - truth).square(), (0.241701, 0.391941))
    near(mean, truth, 2e-3), near(covariance[0].diagonal(), weight @ (w - truth).square(), 2e-2)


def random_rows(samples: int, inputs: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator, dtype=D)
    weights = torch.randn(inputs, outputs, generator=generator, dtype=D)
    return x, x @ weights + 0.5 * torch.randn(samples, outputs, generator=generator, dtype=D)


@pytest.mark.parametrize("signal", [Softargmax(), Argmax()])
def test_joint_sites_of_classes_can_be_found_again(signal: Signal) -> None:
    """The targets' sites are those that hold under the posterior of all, by which data can be taken out."""
    x, y = random_rows(60, 4, 3)
    labels = y.argmax(1)
    prior = Message(torch.zeros(3, 4, dtype=D), torch.eye(4, dtype=D).expand(3, 4, 4))
    sites, told = train.fit_sites(x, labels, signal, prior)
    posterior = multiply(prior, told)
    found = train.sites_within(x[:20], labels[:20], signal, posterior)
    part = train.site_to_weight_messages(x[:20], found)
    own = train.site_to_weight_messages(x[:20], Message(sites.tau[:20], sites.rho[:20]))
    near(part.rho, own.rho, 5e-3), near(part.tau, own.tau, 5e-3)
    cavity = divide(posterior, part)
    _, again = train.fit_sites(x[:20], labels[:20], signal, cavity)
    near(multiply(cavity, again).rho, posterior.rho, 5e-3)


# No double counting


def test_nothing_is_counted_twice() -> None:
    x, y = random_rows(24, 4, 2)
    stages, prior = perceptron((4, 5, 2), networks=2)
    data = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    trainer = Trainer(stages, prior, data, Regression(0.25), epochs=4)
    seen: list[int] = []

    def after_visit() -> None:
        assert_assembled(trainer)
        seen.append(1)

    trainer.run(after_visit)
    assert len(seen) == 12
    for message in trainer.evidence:
        assert all(bool((part.rho >= 0).all()) for part in message.values())


def test_the_fixed_point_stays() -> None:
    """More epochs over Gaussian data give neither another mean nor smaller variances."""
    x, y = random_rows(8, 3, 1)
    stages, prior = one_layer(3)
    data = [(x[:4], y[:4]), (x[4:], y[4:])]
    found: list[tuple[Tensor, Tensor]] = []
    for epochs in (16, 20):
        trainer = Trainer(stages, prior, data, Regression(0.25), epochs=epochs, iterations=8)
        trainer.run()
        found.append(moments(trainer))
    near(found[1][0], found[0][0], 1e-6), near(found[1][1], found[0][1], 1e-6)
    exact = torch.linalg.inv(torch.eye(3, dtype=D) + x.T @ x / 0.25)
    near(found[1][0], exact @ x.T @ y / 0.25, 1e-6)


def test_the_damping_of_batches() -> None:
    assert batch_damping(1) == 1.0 and batch_damping(60) == pytest.approx(0.9, abs=1e-6)


# Parallel chunks, several networks


def test_several_networks_at_once_are_each_alone() -> None:
    x, _, y = sine(10)
    stages, prior = perceptron((1, 5, 1), networks=3)
    together = Trainer(stages, prior, [(x, y)], Regression(0.01), iterations=3)
    together.run()
    for k in range(3):
        own = {index: Message(*(part[k : k + 1] for part in each)) for index, each in prior.items()}
        alone = Trainer(stages, own, [(x, y)], Regression(0.01), iterations=3)
        alone.run()
        for index in own:
            near(moments(alone, index)[0], moments(together, index)[0][k], 1e-10)
        near(
            outputs_of(stages, alone.posterior, x)[1][0],
            outputs_of(stages, together.posterior, x)[1][k],
            1e-10,
        )


def test_a_sine_is_learned() -> None:
    x, truth, y = sine(60)
    stages, prior = perceptron((1, 16, 16, 1), networks=2)
    for slope in (0.1, 0.0):
        own = [Activation(slope) if isinstance(s, Activation) else s for s in stages]
        trainer = Trainer(own, prior, [(x, y)], Regression(0.0025), iterations=4)
        trainer.run()
        mean, variance = outputs_of(own, trainer.posterior, x)
        assert float((mean - truth).square().mean().sqrt()) < 0.6 * float(truth.std())
        far = outputs_of(own, trainer.posterior, x + 5)[1]
        assert bool((far.mean(1) > 20 * variance.mean(1)).all())


# Divergence


def test_a_visit_that_diverges_begins_anew_with_half_of_a_new_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = random_rows(6, 3, 1)
    stages, prior = one_layer(3)
    checks: list[int] = []

    def check(trainer: Trainer, *_: object) -> None:
        checks.append(1)
        if len(checks) < limit:
            raise train.Diverged("for a test")

    monkeypatch.setattr(Trainer, "_check", check)
    limit = 3
    trainer = Trainer(stages, prior, [(x, y)], Regression(0.25))
    trainer.run()
    assert (trainer.restarts, trainer.share) == (2, 0.25)
    limit = 100
    with pytest.raises(uq.PosthocUQError, match="diverge: for a test"):
        Trainer(stages, prior, [(x, y)], Regression(0.25)).run()


def test_divergence_is_seen() -> None:
    x, y = random_rows(6, 3, 1)
    stages, prior = one_layer(3)
    trainer = Trainer(stages, prior, [(x, y)], Regression(0.25))
    trainer.run()
    fine, error = torch.ones(()), torch.ones(1)
    trainer._check([(error, fine)], y)
    for bad in ((1e6 * error, fine), (error / 0, fine), (error, 0 * fine)):
        with pytest.raises(train.Diverged):
            trainer._check([bad], y)


# Kinds of layers


class Factor(nn.Module):
    """As transformers' ``Conv1D``, and ``torch.inner(x, W)`` where the library knows that."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.inner, shape = inner, (3, 4) if inner else (4, 3)
        self.weight = nn.Parameter(torch.empty(shape))
        if not inner:
            self.bias = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.inner(x, self.weight) if self.inner else torch.addmm(self.bias, x, self.weight)


@pytest.fixture
def inner() -> Iterator[None]:
    with inner_known():
        yield


KINDS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {  # with the shape of an input, and groups
    "linear": (nn.Linear(4, 3), (2, 4), 1),
    "matmul": (Factor(), (4,), 1),
    "inner": (Factor(inner=True), (4,), 1),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 5), 2),
    "conv2d": (nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0), (1, 2), bias=False), (2, 4, 4), 1),
    "conv3d": (nn.Conv3d(1, 2, 2, stride=(1, 2, 1), padding=(0, 1, 0)), (1, 2, 2, 3), 1),
    "conv_transpose1d": (nn.ConvTranspose1d(2, 3, 3, padding=1, bias=False), (2, 4), 1),
    "conv_transpose2d": (
        nn.ConvTranspose2d(4, 4, (3, 2), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2),
        (4, 2, 2),
        2,
    ),
}


@pytest.mark.usefixtures("inner")
@pytest.mark.parametrize("constant", [False, True], ids=["uncertain inputs", "constants"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_layer_edge_by_edge(kind: str, constant: bool) -> None:
    """Which products make an output, torch's own function shows for one input and one weight at a time; then the plain
    factors of products and sums for each output.
    """
    module, shape, groups = KINDS[kind]
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normals(*parameter.shape, seed=seed))
    parameters = dict(module.double().named_parameters())
    bias = ("0.bias", parameters["bias"]) if parameters.get("bias") is not None else None
    layer = describe("0", kind, ("0.weight", parameters["weight"]), bias, groups)
    model = nn.Sequential(module, nn.Flatten())
    stage = stages_of(model, {"0": layer}, normals(1, *shape))[0]
    assert isinstance(stage, Weighted)
    # of torch's function: (outputs, inputs, weights), 1 where the product of the two is in the output
    zero = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    places, weights = torch.eye(prod(shape), dtype=D), torch.eye(zero["weight"].numel(), dtype=D)
    with torch.no_grad():
        edges = torch.stack(
            [
                functional_call(
                    module,
                    zero | {"weight": weight.reshape(zero["weight"].shape)},
                    places.reshape(-1, *shape),
                )
                for weight in weights
            ],
            -1,
        )
    outputs, edges = edges.shape[1:-1], edges.flatten(1, -2).movedim(1, 0)
    assert bool(((edges == 0) | (edges == 1)).all())
    marginal = from_moments(
        normals(1, *layer.matrix_shape, seed=2), normals(1, *layer.matrix_shape, seed=3).exp()
    )
    sent = Message(0.1 * normals(1, *layer.matrix_shape, seed=8), 0.1 * marginal.rho)
    mean, variance = normals(*shape, seed=4), normals(*shape, seed=5).exp()
    back = Message(normals(1, 1, *outputs, seed=6), normals(1, 1, *outputs, seed=7).exp())
    inputs = mean[None, None] if constant else from_moments(mean[None, None], variance[None, None])
    found, way_back = stage.forward(inputs, marginal, StageMemory(sent))
    to_inputs, to_weights = way_back(back)
    assert to_weights is not None
    # the weights of uncertain inputs enter by their marginals, those of constants, as biases are, by their cavities
    cavity = divide(marginal, sent)
    of_weights = cavity if constant else marginal
    w = [
        layer.to_parameters(part[0])["0.weight"].flatten() for part in (of_weights.mean, of_weights.variance)
    ]
    a = [mean.flatten(), torch.zeros_like(mean).flatten() if constant else variance.flatten()]
    to_a, to_w = uniform_like(a[0]), uniform_like(w[0])
    to_b = uniform_like(torch.zeros(layer.groups * layer.outputs, dtype=D))
    after = len(outputs) - 1 if layer.convolutional else 0  # axes after the channels
    channels = torch.arange(len(to_b.rho)).reshape(-1, *[1] * after).expand(outputs)
    for place, channel in enumerate(channels.flatten().tolist()):
        i, k = edges[place].nonzero().T
        parts = [a[0][i] * w[0][k], a[1][i] * (w[1][k] + w[0][k].square()) + a[0][i].square() * w[1][k]]
        if layer.bias is not None:
            own = [part[..., -1].flatten()[channel : channel + 1] for part in (cavity.mean, cavity.variance)]
            parts = [torch.cat(pair) for pair in zip(parts, own, strict=True)]
        near(found.mean.flatten()[place], parts[0].sum(), 1e-12)
        near(found.variance.flatten()[place], parts[1].sum(), 1e-12)
        message = Message(*(part.flatten()[place] for part in back))
        to_parts = sum_backward(torch.ones_like(parts[0]), *parts, message)
        for total, index, other in ((to_a, i, [m[k] for m in w]), (to_w, k, [m[i] for m in a])):
            total.tau.index_add_(0, index, to_parts.tau[: len(i)] * other[0])
            total.rho.index_add_(0, index, to_parts.rho[: len(i)] * (other[1] + other[0].square()))
        if layer.bias is not None:
            to_b.tau[channel] += to_parts.tau[-1]
            to_b.rho[channel] += to_parts.rho[-1]
    for part, of_w, of_b in zip(to_weights, to_w, to_b, strict=True):
        by_name = layer.to_parameters(part[0])
        near(by_name["0.weight"], of_w, 1e-10)
        if layer.bias is not None:
            near(by_name["0.bias"], of_b, 1e-10)
    if constant:
        assert to_inputs is None
    else:
        assert to_inputs is not None
        heard = to_a.rho > 1e-8
        near(to_inputs.tau.flatten()[heard], to_a.tau[heard], 1e-10)
        near(to_inputs.rho, to_a.rho.clamp(min=1e-8), 1e-10)


def layers_of(model: nn.Module) -> dict[str, Layer]:
    kinds = {module: rule.kind for rule in RULES.values() for module in rule.modules}
    return {
        name: describe(
            name,
            kinds[type(module)],
            (f"{name}.weight", module.weight),
            (f"{name}.bias", module.bias),
            1,
        )
        for name, module in model.named_modules()
        if type(module) in kinds
    }


@pytest.mark.study
def test_a_small_convolutional_network_learns() -> None:
    """Left or right: which half of an image is bright; one image is one message to the weights."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    x = 0.3 * torch.randn(40, 1, 7, 6, generator=generator, dtype=D)
    x[labels == 0, :, :, :3] += 1.0
    x[labels == 1, :, :, 3:] += 1.0
    model = nn.Sequential(
        nn.Conv2d(1, 4, (2, 3)),
        nn.LeakyReLU(0.1),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 2),
        nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 2),
    ).double()
    stages, prior = stages_of(model, layers_of(model), x[:1]), ByStage()
    for index, stage in enumerate(stages):
        if isinstance(stage, Weighted):
            _, outputs, inputs = stage.layer.matrix_shape
            means = drawn_means(2, outputs, inputs - 1, 12 * outputs, generator, torch.device("cpu"))
            variance = weight_variance(inputs - 1, 12 * outputs, first=index == 0)
            prior[index] = belief(means, variance, True)
    data = [(x[:20], labels[:20]), (x[20:], labels[20:])]
    trainer = Trainer(stages, prior, data, Argmax(), epochs=3, iterations=3)
    trainer.run(lambda: assert_assembled(trainer))
    mean, variance = outputs_of(stages, trainer.posterior, x)
    assert mean.shape == (2, 40, 2) and bool((variance > 0).all())
    assert float((mean.argmax(-1) == labels).double().mean()) > 0.9


def test_outputs_that_are_scaled_and_moved() -> None:
    """As BatchNorm does: the same layer over targets that are moved and scaled back."""
    x, y = random_rows(12, 3, 2)
    factor, offset = torch.tensor([0.5, -3.0], dtype=D), torch.tensor([0.7, -2.0], dtype=D)
    stages, prior = one_layer(3, 2)
    scaled = [*stages, BatchNormStage(factor, offset)]
    found: list[Tensor] = []
    for own, targets, noise in (
        (stages, y, torch.full((2,), 0.25, dtype=D)),
        (scaled, factor * y + offset, 0.25 * factor.square()),
    ):
        trainer = Trainer(own, prior, [(x, targets)], Regression(noise), iterations=3)
        trainer.run()
        found.append(moments(trainer)[0])
    near(found[1], found[0], 1e-10)
    outputs = [
        pass_messages(own, trainer.posterior, [StageMemory() for _ in own], x[None])[0]
        for own in (stages, scaled)
    ]
    near(outputs[1].mean, factor * outputs[0].mean + offset, 1e-10)
    near(outputs[1].variance, factor.square() * outputs[0].variance, 1e-10)


def test_labels_that_drift_away_are_refused_before_the_last_sweep() -> None:
    """Argmax signals of many labels that no weights explain: nothing bounds the outputs but `regularize`."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(600, 20, generator=generator, dtype=torch.float64)
    labels = features[:, :5].argmax(1)
    labels = torch.where(torch.rand(600, generator=generator) < 0.05, (labels + 1) % 5, labels)
    prior = Message(features.new_zeros(5, 20), torch.eye(20, dtype=torch.float64).expand(5, -1, -1))
    with pytest.raises(uq.PosthocUQError, match=r"do not settle: sweep \d\d still .* regularize=True"):
        train.fit_sites(features, labels, Argmax(), prior)
    train.fit_sites(features, labels, Argmax(regularize=True), prior)
