"""Messages and their factors: the paper's numbers, and quadrature or draws from the definitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.trained import (
    Argmax,
    Message,
    Regression,
    Signal,
    Softargmax,
    divide,
    from_moments,
    multiply,
    uniform_like,
    weight_variance,
)
from posthoc_uq.trained.message_passing import messages, network, train

D = torch.float64


def t(*values: object) -> Tensor:
    value = values[0] if len(values) == 1 else values
    return value.to(D) if isinstance(value, Tensor) else torch.tensor(value, dtype=D)


def near(found: Tensor, *expected: object, tolerance: float = 1.5e-6) -> None:
    torch.testing.assert_close(found.flatten(), t(*expected).flatten(), rtol=0, atol=tolerance)


def is_message(found: Message, tau: object, rho: object, tolerance: float = 1.5e-6) -> None:
    near(found.tau, tau, tolerance=tolerance)
    near(found.rho, rho, tolerance=tolerance)


def pair(mean: object, variance: object) -> Message:
    return from_moments(t(mean), t(variance))


def integral_moments(
    density: Callable[[Tensor], Tensor], low: float, high: float
) -> tuple[float, float, float]:
    """Mass, mean and variance of a density by the trapezoid rule, on both sides of zero."""
    sums = [0.0, 0.0, 0.0]
    for a, b in ((low, 0.0), (0.0, high)):
        x = torch.linspace(a, b, 400_001, dtype=D)
        inside = x.clone()
        inside[0 if a == 0 else -1] = 1e-300 if a == 0 else -1e-300  # which side of zero it is
        values = density(inside)
        for k in range(3):
            sums[k] += float(torch.trapezoid(values * x**k, x))
    mean = sums[1] / sums[0]
    return sums[0], mean, sums[2] / sums[0] - mean**2


def normal(x: Tensor, mean: float, variance: float) -> Tensor:
    return torch.exp(-0.5 * (x - mean) ** 2 / variance) / (2 * torch.pi * variance) ** 0.5


def leaky(z: Tensor, slope: float) -> Tensor:
    return torch.where(z > 0, z, slope * z)


def product_forward(
    a_mean: Tensor, a_variance: Tensor, b_mean: Tensor, b_variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``a b`` of independent factors."""
    second = b_variance + b_mean.square()
    return a_mean * b_mean, a_variance * second + a_mean.square() * b_variance


def product_backward(mean: Tensor, variance: Tensor, back: Message) -> Message:
    """The variational message from ``c = a b`` to one factor, by mean and variance of the other."""
    return Message(back.tau * mean, back.rho * (variance + mean.square()))


# Gaussian algebra


def test_t1_and_t2_products_and_quotients() -> None:
    a, b = pair(1.2, 0.5), pair(-0.3, 2.0)
    product = multiply(a, b)
    is_message(product, 2.25, 2.5)
    near(torch.stack([product.mean, product.variance]), 0.9, 0.4)
    near(messages.log_overlap(a, b).exp(), 0.160882)
    is_message(divide(pair(0.9, 0.4), b), 2.4, 2.0)


# Truncation


def test_t19_truncation() -> None:
    for mean, variance, expected, message in (
        (0.5, 1.3, (1.117125, 0.610595), (1.444953, 0.868517)),
        (-6.0, 1.0, (0.158483, 0.023988), (12.606845, 40.688142)),
    ):
        cut = messages.above_zero(t(mean), t(variance))
        near(torch.stack([cut.mean, cut.variance]), *expected)
        is_message(messages.truncation_message(pair(mean, variance)), *message)
        exact = integral_moments(lambda x, m=mean, v=variance: normal(x, m, v) * (x > 0), -20, 20)
        near(torch.stack([cut.log_weight.exp(), cut.mean, cut.variance]), *exact, tolerance=1e-8)
        mirrored = messages.below_zero(t(-mean), t(variance))
        near(torch.stack([mirrored.mean, mirrored.variance]), -expected[0], expected[1])


@pytest.mark.parametrize("x", [-25.0, -39.9, -40.1, -1e4])
def test_moments_far_in_the_tail(x: float) -> None:
    """With ``z = s / |x|`` the density is ``exp(-s - s^2 / (2 x^2))``, which any quadrature can do."""
    s = torch.linspace(0, 60, 600_001, dtype=D)
    weight = torch.exp(-s - s**2 / (2 * x**2))
    total = torch.trapezoid(weight, s)
    mean = torch.trapezoid(weight * s, s) / total
    variance = torch.trapezoid(weight * (s - mean) ** 2, s) / total
    found = messages.truncated_moments(t(2 * x), t(2.0))
    near(found[0] * abs(x) / 2, mean, tolerance=3e-7)
    near(found[1] * x**2 / 4, variance, tolerance=3e-6)
    message = messages.truncation_message(pair(x, 1.0))
    assert bool(message.finite)
    near(multiply(message, pair(x, 1.0)).mean * abs(x), mean, tolerance=1e-6)


# Linear factors


def test_t3_weighted_sum() -> None:
    c, mean, variance = t(0.5, -1.2, 2.0), t(0.4, -0.7, 0.1), t(0.3, 0.8, 0.05)
    near(torch.stack(messages.sum_forward(c, mean, variance)), 1.24, 1.427)
    back = pair(1.5, 0.4)
    is_message(
        messages.sum_backward(c, mean, variance, back),
        (0.131279, -1.955556, 0.565458),
        (0.142694, 2.133333, 2.458513),
    )
    for i in range(3):  # the marginal of a part is that of the joint Gaussian
        joint = (1 / variance).diag() + back.rho * torch.outer(c, c)
        exact = torch.linalg.inv(joint)
        means = exact @ (mean / variance + back.tau * c)
        found = multiply(from_moments(mean, variance), messages.sum_backward(c, mean, variance, back))
        near(torch.stack([found.mean[i], found.variance[i]]), means[i], exact[i, i], tolerance=1e-12)
    quiet = messages.sum_backward(t(0.0, 1.0), t(1.0, 2.0), t(1.0, 1.0), Message(t(0.0), t(0.0)))
    is_message(quiet, (0.0, 0.0), (0.0, 0.0), 0)


# one network, example, group and position; two inputs and a bias, two outputs
PRODUCTS = messages.Products(
    t([0.5, -1.0, 1.0]).reshape(1, 1, 1, 1, 3),
    t([0.2, 0.6, 0.0]).reshape(1, 1, 1, 1, 3),
    t([[0.3, 0.8, 0.1], [-0.5, 0.1, -0.2]]).reshape(1, 1, 1, 2, 3),
    t([[0.1, 0.3, 0.5], [0.2, 0.05, 0.4]]).reshape(1, 1, 1, 2, 3),
)
OUTPUTS = Message(*(part.reshape(1, 1, 1, 1, 2) for part in pair([1.0, -0.3], [0.4, 0.25])))


def test_t5_and_t6_hidden_layer() -> None:
    mean, variance = PRODUCTS.forward()
    near(mean, -0.55, -0.55), near(variance, 1.427, 0.626)
    to_inputs, to_weights = PRODUCTS.backward(mean, variance, OUTPUTS)
    assert to_inputs is not None
    is_message(
        to_weights,
        (0.481859, -0.778816, 1.243406, 0.0, -0.189873, 0.105042),
        (0.255102, 1.661475, 0.753580, 0.611413, 2.025316, 2.100840),
    )
    is_message(Message(*(p[..., :2] for p in to_inputs)), (0.289116, 0.642040), (0.719123, 1.052066))


def random_products(positions: int, seed: int) -> tuple[messages.Products, Message]:
    """Two networks, three examples, two groups, four inputs and a bias, two outputs."""
    g = torch.Generator().manual_seed(seed)

    def normals(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=D)

    rows, weights, outputs = (2, 3, 2, positions, 5), (2, 1, 2, 2, 5), (2, 3, 2, positions, 2)
    mean, variance = normals(*rows), normals(*rows).exp()
    mean[..., -1], variance[..., -1] = 1.0, 0.0
    layer = messages.Products(mean, variance, normals(*weights) / 2, normals(*weights).exp() / 4)
    return layer, Message(normals(*outputs), normals(*outputs).exp())


def test_a_layer_is_products_and_a_sum() -> None:
    """Element by element, with the factors of sections 3.1 and 3.2 one by one."""
    layer, back = random_products(2, 0)
    mean, variance = layer.forward()
    to_inputs, to_weights = layer.backward(mean, variance, back)
    assert to_inputs is not None
    ones = torch.ones(5, dtype=D)
    for k, n, g in torch.cartesian_prod(*map(torch.arange, (2, 3, 2))).tolist():
        to_w = Message(*(torch.zeros(2, 5, dtype=D) for _ in range(2)))
        for p in range(2):
            a = layer.input_mean[k, n, g, p], layer.input_variance[k, n, g, p]
            to_a = uniform_like(a[0])
            for j in range(2):
                w = layer.weight_mean[k, 0, g, j], layer.weight_variance[k, 0, g, j]
                parts = product_forward(*a, *w)
                near(mean[k, n, g, p, j], messages.sum_forward(ones, *parts)[0], tolerance=1e-12)
                near(variance[k, n, g, p, j], messages.sum_forward(ones, *parts)[1], tolerance=1e-12)
                own = Message(back.tau[k, n, g, p, j], back.rho[k, n, g, p, j])
                to_parts = messages.sum_backward(ones, *parts, own)
                for total, part in zip(to_w, product_backward(*a, to_parts), strict=True):
                    total[j] += part
                to_a = multiply(to_a, product_backward(*w, to_parts))
            is_message(Message(*(part[k, n, g, p] for part in to_inputs)), *to_a, tolerance=1e-12)
        is_message(Message(*(part[k, n, g] for part in to_weights)), *to_w, tolerance=1e-12)


@pytest.mark.parametrize("constants", [False, True])
def test_blocks_of_outputs_change_nothing(monkeypatch: pytest.MonkeyPatch, constants: bool) -> None:
    layer, back = random_products(3, 1)
    layer = layer._replace(input_variance=None) if constants else layer
    whole = layer.backward(*layer.forward(), back)
    monkeypatch.setattr(messages, "_MAX_NUMBERS", 1)  # an output at a time
    for found, expected in zip(layer.backward(*layer.forward(), back), whole, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_t7_constant_inputs() -> None:
    x = t(0.7, -1.5, 1.0).reshape(1, 1, 1, 1, 3)
    layer = PRODUCTS._replace(input_mean=x, input_variance=None)
    mean, variance = layer.forward()
    near(mean, -0.89, -0.70), near(variance, 1.224, 0.6105)
    to_inputs, told = layer.backward(mean, variance, OUTPUTS)
    assert to_inputs is None
    of_weights = Message(*(part[..., :2] for part in told))
    is_message(
        of_weights, (0.933333, -1.090622, 0.045902, -0.501337), (0.311111, 2.370917, 0.642623, 3.008021)
    )
    posterior = multiply(from_moments(layer.weight_mean, layer.weight_variance), told)
    near(posterior.mean[0, 0, 0, 0, :2], 0.381466, 0.276293)
    near(posterior.variance[0, 0, 0, 0, :2], 0.096983, 0.175308)
    row = x.flatten()
    for j in range(2):  # the exact conjugate update of both weights and the bias
        start, before = layer.weight_mean[0, 0, 0, j], layer.weight_variance[0, 0, 0, j]
        tau, rho = OUTPUTS.tau[0, 0, 0, 0, j], OUTPUTS.rho[0, 0, 0, 0, j]
        covariance = torch.linalg.inv((1 / before).diag() + rho * torch.outer(row, row))
        near(posterior.mean[0, 0, 0, j], covariance @ (start / before + tau * row), tolerance=1e-12)
        near(posterior.variance[0, 0, 0, j], covariance.diagonal(), tolerance=1e-12)


# Activations


def test_t8_leaky_relu_forward_direct() -> None:
    near(torch.stack(messages.moments_of_output(t(0.3), t(0.8), 0.1)), 0.504039, 0.411300)
    z = torch.linspace(-12, 12, 2_000_001, dtype=D)
    weight, a = normal(z, 0.3, 0.8), leaky(z, 0.1)
    mean = torch.trapezoid(weight * a, z)
    near(mean, 0.504039), near(torch.trapezoid(weight * (a - mean) ** 2, z), 0.411300)


@pytest.mark.parametrize(
    ("slope", "mass", "match", "message"),
    [
        (0.1, 0.283989, (0.479454, 0.331936), (0.977749, 2.345962)),
        (0.3, None, (0.455407, 0.381948), (0.725662, 1.951493)),
        (0.0, 0.287045, (0.495121, 0.308640), (1.137535, 2.573354)),
    ],
)
def test_t9_and_t12_forward_marginal(
    slope: float, mass: float | None, match: tuple[float, float], message: tuple[float, float]
) -> None:
    z, a = pair(0.3, 0.8), pair(0.7, 1.5)
    found = messages.match_of(z, a, slope, output=True)
    if mass is not None:
        near(found.log_weight.exp(), mass)
    near(torch.stack([found.mean, found.variance]), *match)
    is_message(messages.activation_forward(z, a, slope), *message)
    x = torch.linspace(-12, 12, 2_000_001, dtype=D)  # by the input, so that an atom is no difficulty
    weight = normal(x, 0.3, 0.8) * normal(leaky(x, slope), 0.7, 1.5)
    total = torch.trapezoid(weight, x)
    mean = torch.trapezoid(weight * leaky(x, slope), x) / total
    near(found.log_weight.exp(), total), near(found.mean, mean)
    near(found.variance, torch.trapezoid(weight * (leaky(x, slope) - mean) ** 2, x) / total)


@pytest.mark.parametrize(
    ("z", "a", "slope", "match", "message"),
    [
        ((0.3, 0.8), (0.7, 1.5), 0.1, (0.290495, 0.682124), (0.050869, 0.216009)),
        ((-0.6, 1.2), (0.4, 0.9), 0.1, None, (-0.098366, 0.140432)),
        ((0.3, 0.8), (0.7, 1.5), 0.0, (0.276621, 0.695960), (0.022467, 0.186863)),
    ],
)
def test_t11_and_t12_backward_marginal(
    z: tuple[float, float],
    a: tuple[float, float],
    slope: float,
    match: tuple[float, float] | None,
    message: tuple[float, float],
) -> None:
    found = messages.match_of(pair(*z), pair(*a), slope, output=False)
    if match is not None:
        near(torch.stack([found.mean, found.variance]), *match)
    is_message(messages.activation_backward(pair(*z), pair(*a), slope), *message)
    mass, mean, variance = integral_moments(lambda x: normal(x, *z) * normal(leaky(x, slope), *a), -15, 15)
    near(torch.stack([found.log_weight.exp(), found.mean, found.variance]), mass, mean, variance)


def test_t22_guardrails() -> None:
    z, a = pair(-2.0, 4.0), pair(3.0, 1.0)
    match = messages.match_of(z, a, 0.1, output=True)
    near(match.log_weight.exp(), 0.016317), near(1 / match.variance, 0.866782)
    is_message(messages.activation_forward(z, a, 0.1), -0.133120, 2.660690)
    z, a = pair(-8.0, 0.04), pair(8.0, 0.04)
    is_message(messages.activation_forward(z, a, 0.1), -2000.0, 2500.0, 1e-6)
    assert float(messages.match_of(z, a, 0.1, output=True).log_weight.exp()) < 1e-200
    for slope in (0.1, 0.0):
        z = Message(*(part.repeat(4) for part in pair(-3.0, 0.5)))
        a = Message(t(0.0, -1e-9, 1e3, -1e4), t(0.0, 1e-8, 1e3, 1e3))
        for message in (messages.activation_forward(z, a, slope), messages.activation_backward(z, a, slope)):
            assert bool(message.finite.all()) and bool((message.rho >= 1e-8).all())
        is_message(
            Message(*(p[:2] for p in messages.activation_backward(z, a, slope))), (0.0, 0.0), (1e-8, 1e-8), 0
        )
        direct = messages.direct_forward(z, slope)
        near(messages.activation_forward(z, a, slope).tau[0], direct.tau[0], tolerance=0)


@pytest.mark.parametrize("slope", [0.1, 0.0])
def test_activations_never_give_numbers_that_are_not_finite(slope: float) -> None:
    sizes = t(-1e6, -300.0, -10.0, -0.1, 0.0, 0.1, 10.0, 300.0, 1e6)
    precisions = t(0.0, 1e-8, 1e-3, 1.0, 1e4, 1e8)
    grid = torch.cartesian_prod(sizes, precisions[1:], sizes, precisions)
    z = Message(grid[:, 0] * grid[:, 1], grid[:, 1])
    a = Message(grid[:, 2] * grid[:, 3], grid[:, 3])
    for message in (messages.activation_forward(z, a, slope), messages.activation_backward(z, a, slope)):
        assert bool(message.finite.all()) and bool((message.rho > 0).all())


# Training signals

LOGITS = pair([0.5, 1.2, -0.3], [0.4, 0.6, 0.2])
LABEL = torch.tensor(0)


def test_t13_argmax() -> None:
    is_message(
        Argmax().message(LOGITS, LABEL), (2.507248, -0.157892, -0.447223), (1.317125, 0.237610, 0.408230)
    )
    is_message(
        Argmax(regularize=True).message(LOGITS, LABEL),
        (12.507248, -10.157892, -10.447223),
        (11.317125, 10.237610, 10.408230),
    )
    two = Message(*(part[:2] for part in LOGITS))
    found = multiply(two, Argmax().message(two, LABEL))
    near(torch.stack([found.mean[0], found.variance[0]]), 0.929919, 0.307768)
    # exact for the winner of two: the moments of its logit given that it wins, on a grid
    x = torch.linspace(-7, 8, 3001, dtype=D)
    joint = normal(x, 0.5, 0.4)[:, None] * normal(x, 1.2, 0.6)
    own = (joint * torch.special.ndtr((x[:, None] - x) / 0.3**0.5)).sum(1)
    own = own / own.sum()
    mean = (own * x).sum()
    near(torch.stack([mean, (own * (x - mean) ** 2).sum()]), 0.929919, 0.307768)


def test_t14_softargmax_forward() -> None:
    near(messages.soften(LOGITS.mean, LOGITS.variance), 0.464824, 1.079540, -0.288870)
    found = messages.soften(LOGITS.mean, LOGITS.variance).softmax(-1)
    near(found, 0.301227, 0.557008, 0.141765), near(found.sum(), 1.0)
    normals = torch.randn(1_000_000, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    truth = (LOGITS.mean + LOGITS.variance.sqrt() * normals).softmax(-1).mean(0)
    near(truth, 0.3049, 0.5570, 0.1381, tolerance=1e-3)


def test_t15_softargmax_backward() -> None:
    found = Softargmax().message(LOGITS, LABEL)
    is_message(found, (0.787999, -0.310172, -0.184943), (0.216575, 0.223195, 0.120962))
    near(multiply(found, LOGITS).mean, 0.750209, 0.894154, -0.329029)
    soft = messages.soften(LOGITS.mean, LOGITS.variance).exp()
    for d in range(3):
        rest = float(soft.sum() - soft[d])
        top = None if d == 0 else float(soft[0])

        def density(z: Tensor, d: int = d, rest: float = rest, top: float | None = top) -> Tensor:
            over = z.exp() + rest
            mass = z.exp() / over if top is None else top / over
            return mass * normal(z, float(LOGITS.mean[d]), float(LOGITS.variance[d]))

        _, mean, variance = integral_moments(density, -9, 9)
        own = multiply(found, LOGITS)
        near(torch.stack([own.mean[d], own.variance[d]]), mean, variance)


def test_softargmax_over_wide_logits_and_many_at_once() -> None:
    g = torch.Generator().manual_seed(0)
    before = from_moments(
        5 * torch.randn(2, 7, 4, generator=g, dtype=D), torch.rand(2, 7, 4, generator=g, dtype=D) * 400
    )
    labels = torch.randint(0, 4, (7,), generator=g)
    found = Softargmax().message(before, labels)
    assert bool(found.finite.all()) and bool((found.rho >= 0).all())
    for k, n in ((0, 3), (1, 6)):
        one = Softargmax().message(Message(before.tau[k, n], before.rho[k, n]), labels[n])
        torch.testing.assert_close(one.tau, found.tau[k, n], rtol=1e-6, atol=1e-9)
    certain = Softargmax().message(pair([900.0, -900.0], [1.0, 1.0]), torch.tensor(1))
    is_message(certain, (0.0, 0.0), (0.0, 0.0), 0)  # a label of no weight at all


@pytest.mark.parametrize("deviation", [0.3, 3.0, 30.0])
def test_softargmax_of_outputs_far_from_their_label(deviation: float) -> None:
    """Where the label is unlikely, the match is far out; by a sum over many nodes of a wide interval."""
    mean = torch.tensor([[0.0, 4.0 * deviation, -2.0]], dtype=D)
    variance = torch.full_like(mean, deviation**2)
    found = Softargmax().message(from_moments(mean, variance), torch.tensor([0]))
    soft = (mean / (1 + torch.pi / 8 * variance).sqrt())[0]
    z = torch.linspace(-24, 24, 200_001, dtype=D) * deviation
    same = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-10)
    for d in range(3):
        others = soft[[j for j in range(3) if j != d]].logsumexp(0)
        logs = (z + mean[0, d] if d == 0 else soft[0]) - torch.logaddexp(z + mean[0, d], others)
        weight = (logs - 0.5 * (z / deviation).square()).exp()
        weight = weight / weight.sum()
        shift = weight @ z
        spread = weight @ (z - shift).square()
        same(found.rho[0, d] + 1 / deviation**2, 1 / spread)
        same(found.tau[0, d] + mean[0, d] / deviation**2, (mean[0, d] + shift) / spread)


@pytest.mark.parametrize("signal", [Argmax(), Softargmax()])
def test_a_single_logit_by_quadrature(signal: Signal) -> None:
    """By its sigmoid, or by whether it is above zero with a noise of variance 0.3: both are exact."""
    before = pair([0.4], [0.9])
    for label in (0, 1):
        found = multiply(before, signal.message(before, torch.tensor(label)))

        def density(x: Tensor, sign: int = 2 * label - 1) -> Tensor:
            chance = (
                torch.special.ndtr(sign * x / 0.3**0.5)
                if isinstance(signal, Argmax)
                else (sign * x).sigmoid()
            )
            return normal(x, 0.4, 0.9) * chance

        _, mean, variance = integral_moments(density, -12, 12)
        near(torch.stack([found.mean, found.variance]), mean, variance)


def test_regression_signal() -> None:
    is_message(Regression(0.25).message(uniform_like(t(0.5, -2.0)), t(0.5, -2.0)), (2.0, -8.0), (4.0, 4.0))


# Pooling

WINDOW = pair([[[[[0.2, 1.0], [-0.4, 0.8]]]]], [[[[[0.3, 0.5], [0.2, 0.1]]]]])
BACK = pair([[[[[1.3]]]]], [[[[[0.4]]]]])


def pool(maximum: bool, *inputs: int) -> network.PoolingStage:
    return network.PoolingStage(maximum, (2, 2), (2, 2), inputs, torch.device("cpu"))


def test_t16_and_t17_max_pool() -> None:
    near(messages.winning_shares(LOGITS.mean, LOGITS.variance), 0.238303, 0.744880, 0.016817)
    near(
        messages.winning_shares(WINDOW.mean.flatten(), WINDOW.variance.flatten()),
        (0.052208, 0.551235, 0.001627, 0.394929),
    )
    found, back = pool(True, 1, 2, 2).forward(WINDOW, network.StageMemory())
    near(torch.cat([found.mean, found.variance]), 0.876969, 0.168345)
    to_inputs = back(BACK)[0]
    assert to_inputs is not None
    is_message(to_inputs, (0.039876, 1.289697, 0.001209, 0.527985), (0.004803, 0.729704, 0.000005, 0.282171))


def test_t18_average_pool() -> None:
    found, back = pool(False, 1, 2, 2).forward(WINDOW, network.StageMemory())
    near(torch.cat([found.mean, found.variance]), 0.4, 0.06875)
    to_inputs = back(BACK)[0]
    assert to_inputs is not None
    is_message(to_inputs, (0.527778, 0.657143, 0.438356, 0.594595), (0.138889, 0.142857, 0.136986, 0.135135))


def test_rows_and_columns_without_a_window() -> None:
    g = torch.Generator().manual_seed(1)
    image = from_moments(
        torch.randn(1, 2, 3, 5, 4, generator=g, dtype=D),
        torch.rand(1, 2, 3, 5, 4, generator=g, dtype=D) + 0.1,
    )
    for maximum in (True, False):
        found, back = pool(maximum, 3, 5, 4).forward(image, network.StageMemory())
        assert found.rho.shape == (1, 2, 3, 2, 2)
        to_image = back(found)[0]
        assert to_image is not None
        edge = torch.zeros(2, 3, 4, dtype=D)
        is_message(Message(*(p[0, :, :, 4] for p in to_image)), edge, edge + 1e-8, 0)
        window = Message(*(part[:, 1:, 2:, 2:4, 2:] for part in image))
        one, back = pool(maximum, 1, 2, 2).forward(window, network.StageMemory())
        near(found.tau[0, 1, 2, 1, 1], one.tau, tolerance=1e-12)
        own = back(Message(*(p[:, 1:, 2:, 1:, 1:] for p in found)))[0]
        assert own is not None
        near(to_image.tau[0, 1, 2, 2:4, 2:], own.tau, tolerance=1e-12)


# Priors


@pytest.mark.parametrize(
    ("inputs", "outputs", "deviation", "variance"),
    [
        (16, 16, 0.25, 0.087021),
        (32, 1, 0.03125, 0.097090),
        (1600, 512, 0.014142, 0.001726),
        (512, 10, 0.006176, 0.006426),
    ],
)
def test_t23_priors(inputs: int, outputs: int, deviation: float, variance: float) -> None:
    near(t(train.mean_deviation(inputs, outputs)), deviation)
    near(t(weight_variance(inputs, outputs)), variance)
    assert weight_variance(inputs, outputs, first=True) == 1.5 / inputs


# Quiet outputs


def test_no_precision_behind_gives_no_message() -> None:
    layer, back = random_products(2, 5)
    for message in layer.backward(*layer.forward(), uniform_like(back.tau)):
        assert message is not None and not bool(message.tau.any()) and not bool(message.rho.any())
    for slope in (0.1, 0.0):
        is_message(messages.activation_backward(pair(0.3, 0.8), uniform_like(t(0.0)), slope), 0.0, 1e-8, 0)
    for maximum in (True, False):
        told = pool(maximum, 1, 2, 2).forward(WINDOW, network.StageMemory())[1](uniform_like(BACK.tau))[0]
        assert told is not None and not bool(told.tau.any()) and bool((told.rho == 1e-8).all())


def test_a_clearly_negative_precision_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_NEGATIVE_BY_ROUNDING", 1.0)
    with pytest.raises(uq.PosthocUQError, match="must not be negative"):
        Softargmax().message(LOGITS, LABEL)
