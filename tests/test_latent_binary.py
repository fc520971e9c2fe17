"""Latent binary networks: the numbers of the specification, and what a training does to a network."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Stops, batches, cnn, inputs_of, mlp, targets_of
from torch import Tensor, nn
from torch.func import functional_call

import posthoc_uq as uq
from posthoc_uq.core import Batch, DeferredChecks
from posthoc_uq.layers import describe
from posthoc_uq.likelihoods import Categorical
from posthoc_uq.trained import Flow, Step, latent_binary
from posthoc_uq.trained.latent_binary import (
    LatentLayer,
    LatentObjective,
    SlabPrior,
    SpikeMoments,
    begun_layer,
)
from posthoc_uq.trained.mean_field import gaussian_divergence
from posthoc_uq.trained.variational import gated_step, log_normal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def wide(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# The common values of the specification's numeric tests
O = wide(0.5, -1, 2)
MU = wide([0.3, -0.7, 0.2], [1.1, 0.4, -0.5])
SIGMA = wide([0.1, 0.3, 0.2], [0.05, 0.4, 0.25])
ALPHA = wide([0.9, 0.2, 0.6], [0.5, 0.99, 0.05])
BIAS, BIAS_SIGMA = wide(0.1, -0.3), wide(0.2, 0.1)
Z = wide(1.2, 0.7, -0.5)
E, D1, D2 = wide(0.5, -0.2, 0.8), wide(0.4, 1, -0.6), wide(-0.3, 0.2, 0.5)


def close(value: Any, *expected: Any, digits: float = 1e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(value), wide(*expected).squeeze(0), rtol=0, atol=digits)


def bias_divergence(mean: Tensor, logs: Tensor) -> Tensor:
    return gaussian_divergence({"": mean}, {"": logs}, {"": logs.exp()}, {}, 1.0)


def linear_layer(**more: Tensor) -> LatentLayer:
    """The common layer; with the auxiliary distribution's tensors where they are given."""
    layer = describe("0", "linear", ("0.weight", MU), ("0.bias", BIAS), 1)
    tensors = {"mean": MU, "log variance": 2 * SIGMA.log(), "logit": torch.logit(ALPHA)}
    tensors |= {"bias mean": BIAS, "bias log variance": 2 * BIAS_SIGMA.log()} | more
    flow = Flow(3, 2, 1) if more else None
    return LatentLayer(layer, {k: t.clone() for k, t in tensors.items()}, SlabPrior(0.1), 1.0, flow)


@pytest.mark.parametrize(
    ("z", "means", "variances"),
    [
        (None, (0.615, -0.471), (0.275075, 0.305922)),
        (Z, (0.24, -0.2222), (0.207182, 0.302764)),
    ],
    ids=["L1", "L2"],
)
def test_moments_of_a_linear_layer(z: Tensor | None, means: Any, variances: Any) -> None:
    """By the formula, by the layer's own forward pass, and by draws of the weights."""
    mean, variance, _, _ = SpikeMoments.apply(MU, 2 * SIGMA.log(), torch.logit(ALPHA), z, SlabPrior(0.1))
    close(mean @ O + BIAS, means)
    close(variance @ O.square() + BIAS_SIGMA.square(), variances)
    count, generator = 200_000, torch.Generator().manual_seed(0)
    normal = torch.randn(count, 2, 3, generator=generator, dtype=torch.float64)
    slab = MU * (1.0 if z is None else z) + SIGMA * normal
    on = torch.rand(count, 2, 3, generator=generator, dtype=torch.float64) < ALPHA
    bias = BIAS + BIAS_SIGMA * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    outputs = (slab * on) @ O + bias
    close(outputs.mean(0), means, digits=5 * (0.31 / count) ** 0.5)
    close(outputs.var(0), variances, digits=0.006)


@pytest.mark.parametrize(
    ("z", "prior", "total"),
    [
        (None, SlabPrior(0.1), 10.034440),
        (Z, SlabPrior(0.1), 10.106290),
        (Z, SlabPrior(0.25, 0.5), 7.399483),
    ],
    ids=["L3", "L4", "L5"],
)
def test_divergence_of_the_weights(z: Tensor | None, prior: SlabPrior, total: float) -> None:
    found = SpikeMoments.apply(MU, 2 * SIGMA.log(), torch.logit(ALPHA), z, prior)[2]
    close(found, total)
    count, generator = 100_000, torch.Generator().manual_seed(1)
    on = torch.rand(count, 2, 3, generator=generator, dtype=torch.float64) < ALPHA
    slab = torch.distributions.Normal(MU * (1.0 if z is None else z), SIGMA)
    wanted = torch.distributions.Normal(0.0, prior.deviation)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        weights = slab.sample((count,))
    ratios = slab.log_prob(weights) - wanted.log_prob(weights) + (ALPHA / prior.inclusion).log()
    drawn = torch.where(on, ratios, ((1 - ALPHA) / (1 - prior.inclusion)).log()).sum((1, 2))
    assert abs(float(drawn.mean()) - total) < 5 * float(drawn.std()) / count**0.5


def test_divergence_of_the_biases() -> None:
    """L6."""
    logs = 2 * BIAS_SIGMA.log()
    close(bias_divergence(BIAS, logs), 2.987023)
    close(bias_divergence(BIAS[:1], logs[:1]), 1.134438)


def test_no_divergence_where_the_posterior_is_the_prior() -> None:
    prior = SlabPrior(0.3, 0.7)
    same = torch.full((4, 5), 1.0, dtype=torch.float64)
    logs, logits = same * 2 * torch.log(wide(0.7)), same * torch.logit(wide(0.3))
    close(SpikeMoments.apply(0.0 * same, logs, logits, None, prior)[2], 0.0, digits=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_moments_and_divergence(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in several, with inclusions near 0 and 1, against finite differences."""
    z = (wide(0.7, 1.3) if axis == 0 else Z).reshape([-1, 1] if axis == 0 else [1, -1])
    logits = torch.logit(ALPHA)
    logits[0, 0], logits[1, 2] = 12.0, -12.0
    arguments = [t.clone().requires_grad_() for t in (MU, 2 * SIGMA.log(), logits, z)]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return SpikeMoments.apply(*tensors, SlabPrior(0.25, 0.5))[:3]  # type: ignore[no-any-return]

    for piece in (latent_binary._PIECE, 3):
        monkeypatch.setattr(latent_binary, "_PIECE", piece)
        assert torch.autograd.gradcheck(run, arguments)
        (by_logit,) = torch.autograd.grad(run(*arguments)[2], arguments[2])
        assert bool((by_logit != 0).all()) and bool(torch.isfinite(by_logit).all())
        # the same by autograd, written from the definition
        a, v, c = torch.sigmoid(arguments[2]), arguments[1].exp(), arguments[0] * arguments[3]
        gaussian = 0.5 * (v + c.square()) / 0.25 - 0.5 + torch.log(wide(0.5)) - 0.5 * arguments[1]
        total = a * (gaussian + (a / 0.25).log()) + (1 - a) * ((1 - a) / 0.75).log()
        for index, (one, other) in enumerate(
            zip(
                torch.autograd.grad(total.sum(), arguments),
                torch.autograd.grad(run(*arguments)[2], arguments),
                strict=True,
            )
        ):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8, msg=f"argument {index}")


def test_gradients_reach_weights_that_are_nearly_certain_in_float32() -> None:
    """Where ``1 - a`` has no digits left: against float64."""
    logits = torch.tensor([[-40.0, -17.0, 16.0, 17.0, 40.0]])
    gradients: list[Tensor] = []
    for dtype in (torch.float32, torch.float64):
        logit = logits.to(dtype, copy=True).requires_grad_()
        mean, logs = torch.full_like(logit, 0.3), torch.full_like(logit, -2.0)
        SpikeMoments.apply(mean.detach(), logs.detach(), logit, None, SlabPrior(0.1))[2].backward()
        gradients.append(logit.grad.double())  # type: ignore[union-attr]
    assert bool((gradients[0] != 0).all())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=0)


# Flows


def affine(z: Tensor) -> tuple[Tensor, Tensor]:
    a = wide([0, 0, 0], [0.5, 0, 0], [-0.3, 0.8, 0])
    b = wide([0, 0, 0], [1.0, 0, 0], [0.4, -0.6, 0])
    return a @ z + wide(0.1, -0.2, 0.3), b @ z + wide(1.5, 0.5, -0.4)


def test_autoregressive_steps() -> None:
    """L7 and L7b: the second step sees the coordinates in reversed order."""
    z = wide(0.7, -1.1, 0.4)
    first, one = gated_step(z, *affine(z))
    close(first, (0.590545, -0.810656, -0.038143))
    close(one, -0.923858)
    turned = first.flip(0)
    second, two = gated_step(turned, *affine(turned))
    close(second, (-0.012942, -0.581982, 0.143221))
    close(one + two, -2.272132)


def test_a_coupling_step() -> None:
    """L8."""
    z, kept = wide(0.7, -1.1, 0.4), wide(1, 0, 0)
    mix = wide([0.3, 0.2, 0.1], [0.5, -0.4, 0.2], [-0.6, 0.1, 0.7])
    seen = kept * z
    moved, determinant = gated_step(z, mix @ seen, 2 * mix.T @ seen + 1, 1 - kept)
    close(moved, (0.7, -0.784552, 0.201297))
    close(determinant, -0.522820)


@pytest.mark.parametrize("form", ["autoregressive", "coupling"])
@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_determinants_of_whole_flows(form: Any, size: int) -> None:
    """Against the Jacobian by autograd, of which a step of the autoregressive form sees one side alone."""
    flow = Flow(size, 7, 3, form)
    like = torch.zeros(1, dtype=torch.float64)
    tensors = flow.initial(torch.Generator().manual_seed(3), like)
    tensors = {
        name: t + 0.3 * torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(4))
        for name, t in tensors.items()
    }
    z = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    jacobian = torch.autograd.functional.jacobian(lambda x: flow.forward(x, tensors)[0], z)
    torch.testing.assert_close(flow.forward(z, tensors)[1], torch.linalg.slogdet(jacobian)[1])
    if form == "autoregressive":
        single = Flow(size, 7, 1)
        jacobian = torch.autograd.functional.jacobian(lambda x: single.forward(x, tensors)[0], z)
        assert bool((jacobian.triu(1) == 0).all())
        below = jacobian.tril(-1) != 0
        assert size < 3 or bool(below[:, size // 2 :].any())  # later coordinates move others too
    many = torch.randn(4, 2, size, dtype=torch.float64)
    both = flow.forward(many, tensors)
    torch.testing.assert_close(both[0][3, 1], flow.forward(many[3, 1], tensors)[0])
    assert both[1].shape == (4, 2)


def test_the_density_of_the_start() -> None:
    """L9."""
    close(log_normal(wide(0.8, 1.5, 1.05), wide(1, 0.9, 1.1), wide(-2, -1, -3)), -0.418994)


def test_the_bound_with_a_random_factor() -> None:
    """L10, by quadrature over ``z``: the divergence of one weight, and its bound where ``r = q(z)``."""
    mu, sigma, alpha, prior, deviation = 0.8, 0.3, 0.7, 0.25, 0.25**0.5
    z = torch.linspace(1 - 10 * deviation, 1 + 10 * deviation, 4001, dtype=torch.float64)
    weight = torch.distributions.Normal(1.0, deviation).log_prob(z.float()).double().exp() * (z[1] - z[0])
    each = [
        SpikeMoments.apply(
            wide([mu]),
            2 * wide([sigma]).log(),
            torch.logit(wide([alpha])),
            one.reshape(1, 1),
            SlabPrior(prior),
        )[2]
        for one in z[::40]
    ]
    bound = (torch.stack(each) * weight[::40] * 40).sum()
    close(bound, 1.250127, digits=1e-5)
    marginal = torch.distributions.Normal(wide(mu), (sigma**2 + mu**2 * 0.25) ** 0.5)
    gaussian = torch.distributions.kl_divergence(marginal, torch.distributions.Normal(wide(0.0), wide(1.0)))
    chances = alpha * torch.log(wide(alpha / prior)) + (1 - alpha) * torch.log(
        wide((1 - alpha) / (1 - prior))
    )
    close((alpha * gaussian + chances).squeeze(), 0.892549)


def auxiliary(size: int = 3) -> dict[str, Tensor]:
    """Tensors of a flow that keeps all and of the auxiliary distribution."""
    flow = Flow(size, 2, 1)
    still = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in flow.shapes().items()}
    still["step0_bias2"][size:] = 60.0  # sigmoid(60) is 1
    tensors = {f"flow_{name}": t for name, t in still.items()} | {f"reverse_{n}": t for n, t in still.items()}
    tensors |= {"start_mean": Z, "start_log_variance": wide(-2, -1, -3)}
    return tensors | {"along": E, "reverse mean": D1, "reverse log variance": D2}


def test_the_auxiliary_distribution() -> None:
    """L11 for realised weights, and L12: the moments by which ``u`` is drawn."""
    layer = linear_layer(**auxiliary())
    realised = wide([0.3, 0, 0.2], [1.1, 0.4, 0])
    close(realised @ E, (0.31, 0.47))
    close(layer.log_reverse_of(wide(0.2, -0.1, 0.6), realised @ E).detach(), -3.233110)
    mean, variance, _, _ = SpikeMoments.apply(MU, 2 * SIGMA.log(), torch.logit(ALPHA), Z, SlabPrior(0.1))
    close(mean @ E, (0.133600, 0.284560))
    close(variance @ E.square(), (0.024319, 0.119480))


def test_the_divergence_of_a_layer_with_a_flow_adds_up() -> None:
    """``KL_w(z) + log q(z) - log r(z | W) + KL_b`` for the step's own ``z``."""
    layer = linear_layer(**auxiliary())
    draw = layer.draw(torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    z, log_q = layer.draw_z(generator)
    assert z is not None and log_q is not None
    torch.testing.assert_close(log_q, log_normal(z, Z, wide(-2, -1, -3)))  # the flow keeps all
    mean, variance, weights, _ = SpikeMoments.apply(
        MU, 2 * SIGMA.log(), torch.logit(ALPHA), z, SlabPrior(0.1)
    )
    u = mean @ E + (variance @ E.square()).sqrt() * torch.randn(2, generator=generator, dtype=torch.float64)
    shared = u.clamp(-1, 1).mean()
    log_r = log_normal(z, D1 * shared, D2 * shared)
    expected = weights + log_q - log_r + bias_divergence(BIAS, 2 * BIAS_SIGMA.log())
    torch.testing.assert_close(draw.divergence, expected)


def test_a_convolution() -> None:
    """L13; and the rows of the auxiliary distribution, with output channels last."""
    images = torch.arange(16, dtype=torch.float64).reshape(1, 1, 4, 4) / 10
    kernel = wide([[[0.2, -0.1], [0.3, 0.5]]])
    layer = describe("c", "conv2d", ("c.weight", kernel), ("c.bias", wide(0.1)), 1)
    logs = 2 * torch.log(torch.full_like(kernel, 0.2))
    tensors = {"mean": kernel, "log variance": logs, "logit": torch.logit(wide([[[0.9, 0.3], [0.6, 0.8]]]))}
    tensors |= {"bias mean": wide(0.1), "bias log variance": 2 * torch.log(wide(0.1))}
    latent = LatentLayer(
        layer, {n: t.clone() for n, t in tensors.items()}, SlabPrior(0.1), 1.0, Flow(1, 2, 1)
    )
    mean, variance, _, _ = SpikeMoments.apply(
        kernel, logs, tensors["logit"], latent.along_weights(wide(1.5)), SlabPrior(0.1)
    )
    outputs = torch.nn.functional.conv2d(images, mean, wide(0.1)).flatten()[:3]
    close(outputs, (0.503500, 0.613000, 0.722500))
    spread = torch.nn.functional.conv2d(images.square(), variance, wide(0.01)).flatten()[:3]
    close(spread, (0.052283, 0.073180, 0.099185))


def test_the_auxiliary_distribution_of_a_convolution() -> None:
    """Rows are input channels and places of the kernel, with the output channels last; no hard tanh."""
    weights = torch.randn(3, 2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = describe("c", "conv2d", ("c.weight", weights), None, 1)
    tensors = {"mean": weights, "log variance": torch.zeros_like(weights), "logit": torch.zeros_like(weights)}
    tensors |= auxiliary()
    latent = LatentLayer(
        layer, {n: t.clone() for n, t in tensors.items()}, SlabPrior(0.1), 1.0, Flow(3, 2, 1)
    )
    rows = [
        sum(float(weights[out, into, i, j]) * float(E[out]) for out in range(3))
        for into in range(2)
        for i in range(2)
        for j in range(2)
    ]
    shared = sum(rows) / 8
    z = wide(0.2, -0.1, 0.6)
    expected = sum(
        -0.5 * (math.log(2 * math.pi) + float(D2[k]) * shared)
        - (float(z[k]) - float(D1[k]) * shared) ** 2 / (2 * math.exp(float(D2[k]) * shared))
        for k in range(3)
    )
    certain = torch.zeros_like(weights)
    found = latent.log_reverse(z, weights, certain, torch.Generator().manual_seed(0)).detach()
    close(found, expected)


# The whole objective


def objective_of(model: nn.Module, samples: int = 24, **options: Any) -> LatentObjective:
    method = uq.LatentBinary(**options)
    layers: dict[str, LatentLayer] = {}
    for index, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear):
            bias = (f"{name}.bias", module.bias)
            layer = describe(name, "linear", (f"{name}.weight", module.weight), bias, 1)
            layers[name] = begun_layer(method, layer, module.weight.detach(), module.bias.detach(), index)
    return LatentObjective(method, copy.deepcopy(model), layers, Categorical(), samples)


@pytest.mark.parametrize("flow", [False, True])
def test_losses_of_the_batches_add_up_to_that_of_all_data(flow: bool) -> None:
    """For the same noise; the sum over the batches, the mean over the samples and the whole agree to a factor."""
    model, x = mlp(dtype=torch.float64), inputs_of(4, dtype=torch.float64)
    y = targets_of(model, x, "classification")
    objective = objective_of(model, flow=flow, flow_units=5, warm_up=0.0)
    for tensor in (t for name, t in objective.tensors().items() if "log variance" in name):
        tensor.data.fill_(-80.0)  # so that outputs hardly depend on what is drawn for them
    for tensor in (t for name, t in objective.tensors().items() if name.startswith("logit")):
        tensor.data.fill_(60.0)

    def terms(first: int, last: int) -> dict[str, Tensor]:
        return objective.backward(Batch((x[first:last],), y[first:last]), Step(7), DeferredChecks())

    whole = terms(0, 24)
    parts = [terms(0, 8), terms(8, 16), terms(16, 24)]
    torch.testing.assert_close(torch.stack([part["KL"] for part in parts]).mean(), whole["KL"])
    fits = torch.stack([part["log likelihood"] for part in parts])
    torch.testing.assert_close(fits.mean(), whole["log likelihood"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(whole["loss"], 0.07 * whole["KL"] - whole["log likelihood"])


def test_the_divergence_warms_up() -> None:
    model, x = mlp(), inputs_of(4)
    y = targets_of(model, x, "classification")
    objective = objective_of(model, warm_up=0.5, kl_weight=2.0)
    assert [objective.weight_of(Step(0, progress=p)) for p in (0.0, 0.25, 0.5, 0.9)] == [0.0, 1.0, 2.0, 2.0]
    objective.backward(Batch((x,), y), Step(0, progress=0.0), DeferredChecks())
    at_start = {name: t.grad.clone() for name, t in objective.tensors().items() if t.grad is not None}
    for tensor in objective.tensors().values():
        tensor.grad = None
    objective.backward(Batch((x,), y), Step(0, progress=0.6), DeferredChecks())
    logits = [name for name in at_start if name.startswith("logit")]
    assert all(not torch.equal(at_start[name], objective.tensors()[name].grad) for name in logits)  # type: ignore[arg-type]


def test_a_start_at_the_trained_weights_predicts_what_the_network_predicts() -> None:
    """As inclusions go to 1 and deviations to 0; and the mean weights are the trained ones from the start."""
    for model, x in ((mlp(dtype=torch.float64), inputs_of(4, dtype=torch.float64)),):
        for flow in (False, True):
            objective = objective_of(model, flow=flow, flow_units=5)
            for name, tensor in objective.tensors().items():
                if name.startswith("mean ") and name.endswith(".weight"):
                    weight = dict(model.named_parameters())[name.removeprefix("mean ")]
                    logit = objective.tensors()[name.replace("mean ", "logit ")]
                    torch.testing.assert_close(tensor * logit.sigmoid(), weight)
                    tensor.data.copy_(weight)
                    logit.data.fill_(40.0)
                if "start_log_variance" in name or name.startswith("log variance"):
                    tensor.data.fill_(-60.0)
            y = targets_of(model, x, "classification")
            expected = torch.log_softmax(model(x), -1).gather(1, y.unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                torch.testing.assert_close(
                    objective.log_predictive(Batch((x,), y), 3), expected, rtol=0, atol=1e-5
                )


def test_gradients_reach_everything_that_is_trained() -> None:
    model, x = mlp(), inputs_of(4)
    y = targets_of(model, x, "classification")
    objective = objective_of(model, flow=True, flow_units=5, start="random")
    for seed in (1, 2):  # a unit of a flow may be asleep in one step
        objective.backward(Batch((x,), y), Step(seed, progress=0.9), DeferredChecks())
    for name, tensor in objective.tensors().items():
        assert tensor.grad is not None and bool(torch.isfinite(tensor.grad).all()), name
        assert "flow" in name or "reverse" in name or bool((tensor.grad != 0).any()), name


# Fits


@pytest.mark.parametrize("flow", [False, True])
def test_a_fit_with_every_kind_of_layer(flow: bool, tmp_path: Path) -> None:
    """A convolution, batch normalisation that keeps its statistics, linear layers; saved, loaded, copied, resumed."""
    model, x = cnn(), inputs_of(1, 4, 4)
    before = copy.deepcopy(model.state_dict())
    data = batches(x, targets_of(model, x, "classification"))
    method = uq.LatentBinary(flow=flow, flow_units=5, epochs=2, checkpoint_every=1)
    posterior = uq.fit(model, data, method, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    covered = {name for layer in posterior.layers.values() for name in layer.parameter_names}
    assert set(posterior.trained_mean) == covered  # normalisations keep their numbers
    with pytest.raises(RuntimeError, match="stopped"):
        uq.fit(model, Stops(data, 8), method, progress=False, checkpoint=tmp_path / "c.h5")
    resumed = uq.fit(model, data, method, progress=False, checkpoint=tmp_path / "c.h5")
    uq.save(posterior, tmp_path / "p.h5")
    for other in (resumed, uq.load(tmp_path / "p.h5", model), copy.deepcopy(posterior)):
        for name, block in posterior.blocks.items():
            for key, tensor in block.tensors().items():
                assert torch.equal(other.blocks[name].tensors()[key], tensor), (name, key)
        assert torch.equal(uq.wrap(model, other)(x).probs, uq.wrap(model, posterior)(x).probs)
    for head in ("moments", "linearized"):
        assert bool(torch.isfinite(uq.wrap(model, posterior, head)(x).probs).all())


@pytest.mark.parametrize("flow", [False, True])
@pytest.mark.only("False")
def test_draws_have_the_mean_and_the_variance_that_the_block_says(flow: bool) -> None:
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    method = uq.LatentBinary(flow=flow, flow_units=5, epochs=2, initial_inclusion="balanced")
    posterior = uq.fit(model, data, method, progress=False)
    if flow:  # make the factor vary
        for block in posterior.blocks.values():
            block.scale.tensors["start_log_variance"].fill_(-1.0)  # type: ignore[attr-defined]
            scale = block.scale  # type: ignore[attr-defined]
            block.scale = type(scale).of(scale.along, scale.bias, scale.flow, scale.tensors, 0)  # type: ignore[attr-defined]
    count = 4000
    draws, variances = posterior.sample(count, torch.Generator().manual_seed(0)), posterior.variance()
    for index, (name, layer) in enumerate(posterior.layers.items()):
        means = layer.to_parameters(posterior.blocks[name].stored_mean())  # type: ignore[arg-type]
        for parameter in layer.parameter_names:
            draw, variance = draws[parameter], variances[parameter]
            error = 5 * (variance / count).sqrt() + 0.03 * flow * means[parameter].abs()
            assert bool(((draw.mean(0) - means[parameter]).abs() < error).all()), (index, parameter)
            centred = draw - draw.mean(0)
            tails = centred.pow(4).mean(0) / centred.square().mean(0).square()
            share = (draw.var(0) / variance - 1).abs()
            assert bool((share < 6 * ((tails - 1) / count).sqrt() + 0.1 * flow).all()), parameter


def test_moments_of_a_layers_outputs_are_exact() -> None:
    """A single layer without a flow: the moments head against the formula, with what its draws say beside it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
    x, y = inputs_of(4), inputs_of(2, seed=5)
    method = uq.LatentBinary(epochs=1, initial_inclusion="balanced")
    posterior = uq.fit(model, batches(x, y), method, likelihood="regression", progress=False)
    block: Any = posterior.blocks[""] if "" in posterior.blocks else next(iter(posterior.blocks.values()))
    with_one = torch.cat([x, torch.ones(24, 1)], 1)
    mean = with_one @ (block.inclusion * block.means)[0].T
    spread = block.inclusion * (block.variances + (1 - block.inclusion) * block.means.square())
    head = uq.wrap(model, posterior, "moments")(x)
    torch.testing.assert_close(head.mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.epistemic_variance, with_one.square() @ spread[0].T, rtol=1e-4, atol=1e-6)


def test_it_finds_the_inputs_that_matter() -> None:
    """Of ten inputs two say the class; the others end with a probability below one half."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 10, generator=generator)
    y = (x[:, 2] - 1.5 * x[:, 7] + 0.3 * torch.randn(400, generator=generator) > 0).float().unsqueeze(1)
    model = nn.Linear(10, 1)
    method = uq.LatentBinary(start="random", epochs=60, lr=0.05, inclusion_lr=0.1, prior_inclusion=0.25)
    posterior = uq.fit(model, batches(x, y, 100), method, likelihood="binary", progress=False)
    inclusion: Any = next(iter(posterior.blocks.values())).inclusion  # type: ignore[attr-defined]
    assert (inclusion[0, 0, :10] > 0.5).nonzero().flatten().tolist() == [2, 7]


def test_a_training_too_short_to_drop_a_weight_warns() -> None:
    model, x = mlp(), inputs_of(4)
    data = batches(x, targets_of(model, x, "classification"))
    with pytest.warns(
        UserWarning, match=r"3 steps at inclusion_lr=0\.02 move .* 0\.0\d+ at most, and all begin at 5"
    ):
        uq.fit(model, data, uq.LatentBinary(epochs=1), progress=False)
    for options in ({"inclusion_lr": 5.0}, {"start": "random"}, {"initial_inclusion": "balanced"}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            uq.fit(model, data, uq.LatentBinary(epochs=1, **options), progress=False)


@pytest.mark.slow
@pytest.mark.study
def test_by_default_a_small_table_loses_weights_and_no_accuracy() -> None:
    """Inputs beside those that decide are noise; after ten epochs alone every weight would still be on."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 10, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:200]), y[:200]).backward()
        optimiser.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*steps at inclusion_lr")
        posterior = uq.fit(model, batches(x[:200], y[:200], 20), "latent_binary", progress=False)
    assert posterior.history.fit["density of the median model"] < 0.5
    assert posterior.history.fit["inclusions between 0.1 and 0.9"] < 0.2
    with torch.no_grad():
        own = (model(x[200:]).argmax(1) == y[200:]).double().mean()
    median = uq.wrap(model, uq.sparse.median(posterior))(x[200:]).probs
    assert (median.argmax(1) == y[200:]).double().mean() > own - 0.03


def test_functional_weights_and_attention_are_latent_too() -> None:
    """A transformer's layer: its projections are found inside of attention, and change with the noise."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3)).eval()
    x = inputs_of(3, 8)
    posterior = uq.fit(model, batches(x, torch.arange(24) % 3), uq.LatentBinary(epochs=1), progress=False)
    assert len(posterior.layers) == 5
    drawn = posterior.sample(1, torch.Generator().manual_seed(0))
    assert functional_call(model, {n: t[0] for n, t in drawn.items()}, (x,)).shape == (24, 3)


def test_weights_in_pieces_train_like_weights_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of more than 65,536 weights are worked on piece by piece, with the factors of a flow, too."""
    model, x = cnn(), inputs_of(1, 4, 4)
    data = batches(x, targets_of(model, x, "classification"))
    method = uq.LatentBinary(epochs=2, flow=True, flow_units=5)
    found = []
    for size in (latent_binary._PIECE, 20):
        monkeypatch.setattr(latent_binary, "_PIECE", size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(uq.fit(model, data, method, progress=False))
    for name, block in found[0].blocks.items():
        for key, tensor in block.tensors().items():
            torch.testing.assert_close(found[1].blocks[name].tensors()[key], tensor, rtol=1e-4, atol=1e-6)


def test_a_transposed_convolution_is_the_convolution_that_it_equals() -> None:
    """The factors ``z`` and the rows of the auxiliary distribution, with groups."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=generator)
    up = describe("c", "conv_transpose2d", ("c.weight", weight), None, 2)
    plain = up.to_matrix(weight, None).reshape(6, 2, 2, 2)
    down = describe("c", "conv2d", ("c.weight", plain), None, 2)
    z = torch.randn(6, dtype=torch.float64, generator=generator)
    of_both = []
    for layer, mean in ((up, weight), (down, plain)):
        tensors = {"mean": mean, "along": z, "reverse mean": z, "reverse log variance": z}
        latent = LatentLayer(layer, tensors, SlabPrior(0.1), 1.0, Flow(6, 2, 1))
        scaled = layer.to_matrix(mean * latent.along_weights(z), None)
        latent.tensors |= {
            f"reverse_{n}": t for n, t in Flow(6, 2, 1).initial(torch.Generator().manual_seed(1), z).items()
        }
        seed = torch.Generator().manual_seed(2)
        of_both.append((scaled, latent.log_reverse(z, mean, mean.square(), seed)))
    for found, expected in zip(*of_both, strict=True):
        torch.testing.assert_close(found, expected)
