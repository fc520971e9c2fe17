"""The trainer of message passing: exact answers where there are some, no double counting, divergence that is caught."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.methods.message_passing import joint, network, train
from posthoc_uq.methods.message_passing.messages import (
    Argmax,
    Message,
    Regression,
    Signal,
    Softargmax,
    from_moments,
    sum_backward,
)
from posthoc_uq.methods.message_passing.network import (
    Activation,
    Flat,
    LayerMessage,
    Memory,
    Pass,
    Pool,
    Stage,
    Weighted,
    Windows,
    outputs_of,
)
from posthoc_uq.methods.message_passing.train import ByStage, Trainer, batch_damping

D = torch.float64
ROWS = torch.tensor([[1, 0.5, -0.3], [0.2, -1, 0.4], [-0.6, 0.3, 1], [0.8, 0.7, 0.2]], dtype=D)
VALUES = torch.tensor([[0.9], [-0.4], [0.3], [1.1]], dtype=D)
PROBIT_ROWS = torch.tensor([[1, 0.5], [0.2, -1], [-0.6, 0.3], [0.8, 0.7], [-1, 0.4]], dtype=D)
SIGNS = torch.tensor([1, 0, 1, 1, 0])


def near(found: Tensor, expected: object, tolerance: float = 1.5e-6) -> None:
    wanted = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=D)
    torch.testing.assert_close(found.flatten(), wanted.flatten(), rtol=0, atol=tolerance)


def belief(mean: Tensor, variance: float, outputs: int, bias: bool) -> LayerMessage:
    """A prior of weights ``(L, I, J)`` and a bias of variance 0.5."""
    own = torch.zeros(len(mean), outputs if bias else 0, dtype=D)
    return LayerMessage(
        from_moments(mean, torch.full_like(mean, variance)), from_moments(own, torch.full_like(own, 0.5))
    )


def one_layer(
    inputs: int, outputs: int = 1, *, bias: bool = False, networks: int = 1
) -> tuple[list[Stage], ByStage]:
    mean = torch.zeros(networks, inputs, outputs, dtype=D)
    return [Weighted("last", inputs, outputs, bias=bias)], {0: belief(mean, 1.0, outputs, bias)}


def perceptron(
    widths: Sequence[int], networks: int = 1, seed: int = 0, slope: float = 0.1
) -> tuple[list[Stage], ByStage]:
    generator, stages, prior = torch.Generator().manual_seed(seed), list[Stage](), ByStage()
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        if number:
            stages.append(Activation(slope))
        shape = (networks, inputs, outputs)
        means = train.drawn_means(shape, inputs, outputs, generator, torch.device("cpu"))
        prior[len(stages)] = belief(
            means, train.weight_variance(inputs, outputs, first=number == 0), outputs, True
        )
        stages.append(Weighted(str(number), inputs, outputs))
    return stages, prior


def sine(samples: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(samples, 1, generator=generator, dtype=D) - 0.5
    truth = 0.5 * x + 0.2 * torch.sin(2 * torch.pi * x) + 0.3 * torch.sin(4 * torch.pi * x)
    return x, truth, truth + 0.05 * torch.randn(samples, 1, generator=generator, dtype=D)


def moments(trainer: Trainer, index: int = 0) -> tuple[Tensor, Tensor]:
    weights = trainer.posterior[index].weights
    return weights.mean, weights.variance


def assert_assembled(trainer: Trainer) -> None:
    """``Q = prior * prod G_b``."""
    parts = trainer.assembled()
    for index, own in trainer.posterior.items():
        for found, expected in zip(own, parts[index], strict=True):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


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
        near(moments(trainer)[0][0, :, j], exact[:3], 1e-12)
        near(moments(trainer)[1][0, :, j], covariance.diagonal()[:3], 1e-12)
        near(trainer.posterior[0].bias.mean[0, j], exact[3], 1e-12)


def test_t21_joint_posterior_of_a_probit() -> None:
    prior = joint.independent(torch.zeros(1, 2, dtype=D), torch.ones(1, 2, dtype=D))
    _, told = joint.fit_sites(PROBIT_ROWS, SIGNS, Argmax(), prior)
    mean, covariance = joint.plus(prior, told).moments()
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
    prior = joint.independent(torch.zeros(3, 4, dtype=D), torch.ones(3, 4, dtype=D))
    sites, told = joint.fit_sites(x, labels, signal, prior)
    posterior = joint.plus(prior, told)
    found = joint.sites_within(x[:20], labels[:20], signal, posterior)
    part = joint.site_to_weight_messages(x[:20], found)
    own = joint.site_to_weight_messages(x[:20], Message(sites.tau[:20], sites.rho[:20]))
    near(part.precision, own.precision, 5e-3), near(part.field, own.field, 5e-3)
    cavity = joint.Joint(posterior.field - part.field, posterior.precision - part.precision)
    _, again = joint.fit_sites(x[:20], labels[:20], signal, cavity)
    near(joint.plus(cavity, again).precision, posterior.precision, 5e-3)


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
        assert all(bool((part.weights.rho >= 0).all()) for part in message.values())


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
        own = {
            index: LayerMessage(*(Message(*(part[k : k + 1] for part in message)) for message in each))
            for index, each in prior.items()
        }
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
        own: list[Stage] = [Activation(slope) if isinstance(s, Activation) else s for s in stages]
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


# Convolutions


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_cell_by_cell(groups: int) -> None:
    """Stride, padding and groups, against loops over patches with the plain sum and product factors."""
    generator = torch.Generator().manual_seed(1)
    view = Windows((3, 2), (2, 1), (1, 0), (1, 2), groups)
    size, outputs = 4 // groups * 6, 2
    prior = {1: belief(torch.randn(groups, size, outputs, generator=generator, dtype=D), 0.3, outputs, False)}
    message = from_moments(
        torch.randn(1, 2, 4, 5, 4, generator=generator, dtype=D),
        torch.rand(1, 2, 4, 5, 4, generator=generator, dtype=D) + 0.2,
    )
    stage = Weighted("b", size, outputs, view, bias=False)
    step = Pass([Flat(), stage], prior, Memory())
    step._traces.append(None)  # type: ignore[arg-type]
    trace = network._Trace(message.rho.shape, message)
    step._traces.append(trace)
    out = step._hidden(1, stage, message, trace)
    back = Message(*(torch.rand(out.rho.shape, generator=generator, dtype=D) for _ in range(2)))
    to_inputs, told = step.backward(1, back)
    assert to_inputs is not None and told is not None
    tau, rho = torch.zeros(2, 4, 5, 4, dtype=D), torch.zeros(2, 4, 5, 4, dtype=D)
    to_w = torch.zeros(groups, 2, size, outputs, dtype=D)
    mean, variance = message.mean[0], message.variance[0]
    for n, g, row, col in torch.cartesian_prod(*map(torch.arange, (2, groups, *out.rho.shape[-2:]))).tolist():
        places = [
            (c, 2 * row + dy - 1, col + 2 * dx, index)
            for index, (c, dy, dx) in enumerate(
                torch.cartesian_prod(torch.arange(4 // groups), torch.arange(3), torch.arange(2)).tolist()
            )
            if 0 <= 2 * row + dy - 1 < 5
        ]
        cells = [(g * (4 // groups) + c, y, x) for c, y, x, _ in places]
        picked = [index for *_, index in places]
        a = torch.stack([mean[n][cell] for cell in cells]), torch.stack([variance[n][cell] for cell in cells])
        for j in range(outputs):
            w = prior[1].weights.mean[g, picked, j], prior[1].weights.variance[g, picked, j]
            second = w[1] + w[0].square()
            parts = a[0] * w[0], a[1] * second + a[0].square() * w[1]
            ones = torch.ones(len(cells), dtype=D)
            channel = g * outputs + j
            near(out.mean[0, n, channel, row, col], parts[0].sum(), 1e-12)
            near(out.variance[0, n, channel, row, col], parts[1].sum(), 1e-12)
            own = Message(*(part[0, n, channel, row, col] for part in back))
            to_parts = sum_backward(ones, *parts, own)
            to_a, to_weight = (Message(to_parts.tau * m, to_parts.rho * (v + m.square())) for m, v in (w, a))
            to_w[g, n, picked, j] += to_weight.tau  # once summed, below
            for cell, own_tau, own_rho in zip(cells, to_a.tau, to_a.rho, strict=True):
                tau[n][cell] += own_tau
                rho[n][cell] += own_rho
    heard = rho > 1e-8
    near(to_inputs.tau[0][heard], tau[heard], 1e-10), near(to_inputs.rho[0], rho.clamp(min=1e-8), 1e-10)
    near(told.weights.tau, to_w.sum(1), 1e-10)


def test_a_small_convolutional_network_learns() -> None:
    """Left or right: which half of an image is bright; one image is one message to the weights."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    x = 0.3 * torch.randn(40, 1, 7, 6, generator=generator, dtype=D)
    x[labels == 0, :, :, :3] += 1.0
    x[labels == 1, :, :, 3:] += 1.0
    view = Windows((2, 3))
    stages: list[Stage] = [
        Weighted("a", 6, 4, view),
        Activation(0.1),
        Pool("max", Windows((2, 2), (2, 2))),
        Weighted("b", 16, 3, Windows((2, 2))),
        Activation(0.1),
        Pool("average"),
        Flat(),
        Weighted("c", 3, 2),
    ]
    prior = ByStage()
    for index, (inputs, outputs) in {0: (6, 4), 3: (16, 3), 7: (3, 2)}.items():
        means = train.drawn_means((2, inputs, outputs), inputs, 12 * outputs, generator, torch.device("cpu"))
        prior[index] = belief(
            means, train.weight_variance(inputs, 12 * outputs, first=index == 0), outputs, True
        )
    data = [(x[:20], labels[:20]), (x[20:], labels[20:])]
    trainer = Trainer(stages, prior, data, Argmax(), epochs=3, iterations=3)
    trainer.run(lambda: assert_assembled(trainer))
    mean, variance = outputs_of(stages, trainer.posterior, x)
    assert mean.shape == (2, 40, 2) and bool((variance > 0).all())
    assert float((mean.argmax(-1) == labels).double().mean()) > 0.9


def test_constants_that_are_added() -> None:
    """A layer without a bias whose outputs are moved by known numbers is that layer over moved targets."""
    x, y = random_rows(12, 3, 2)
    offset = torch.tensor([0.7, -2.0], dtype=D)
    _, prior = one_layer(3, 2)
    found: list[Tensor] = []
    for own, targets in ((None, y), (offset, y + offset)):
        stages: list[Stage] = [Weighted("last", 3, 2, bias=False, offset=own)]
        trainer = Trainer(stages, prior, [(x, targets)], Regression(0.25), iterations=3)
        trainer.run()
        found.append(moments(trainer)[0])
    near(found[1], found[0], 1e-10)
