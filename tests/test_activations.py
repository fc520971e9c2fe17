"""Activations that moments pass through: numbers, against quadrature and many draws, under the head and in training."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.moments import ConditionalInverseCDF, InverseCDF, MomentTensor, Pass, Rules
from posthoc_uq.moments.activations import elementwise, jointly, normal_quantile_of_sigmoid
from posthoc_uq.moments.unscented import unscented

BLOB, FIELD, PHOTONS = 1.05, 8.0, 100.0


def photons(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the number of photons, given the position."""

    def inside(r: Tensor) -> Tensor:
        return torch.special.ndtr((FIELD / 2 - r) / BLOB) - torch.special.ndtr((-FIELD / 2 - r) / BLOB)

    mean = PHOTONS * inside(x) * inside(y)
    return mean, mean.sqrt()


def moments(module: nn.Module, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance after a module, of pairs ``(mean, variance)`` stacked along the first dimension."""
    with Pass(Rules(), {}):
        found = module(*(MomentTensor(x[0], x[1]) for x in inputs))
    return found.moment_mean, found.moment_variance


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (1.0, (-17.185351, -3.340684, -0.623893, 0.0)),
        (1 / 1.702, (-22.754667, -5.021498, -1.053272, 0.0)),
    ],
)
def test_values_of_the_normal_prior(scale: float, expected: tuple[float, ...]) -> None:
    module = InverseCDF(deviation=2.0, scale=scale).double()
    x = double(-40.0, -3.0, -0.5, 0.0)
    torch.testing.assert_close(module(x), double(*expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(module(-x), -module(x))
    single = InverseCDF(deviation=2.0, scale=scale)
    assert bool(torch.isfinite(single(torch.tensor([40.0, 80.0, -80.0]))).all())


def test_its_derivatives() -> None:
    """The slope at 0 among them, where the formula changes sides."""
    x = double(-3.0, 0.0, 0.4, 5.0).requires_grad_()
    assert torch.autograd.gradcheck(normal_quantile_of_sigmoid, x)
    module = InverseCDF(1.5, 2.0).double()
    (module(x).sum()).backward()
    assert module.log_scale.grad is not None and float(module.log_scale.grad) != 0


def test_a_prior_by_its_quantiles() -> None:
    module = InverseCDF(
        quantile=lambda p: -(1 - p).log() / 3.0
    ).double()  # an exponential distribution of rate 3
    u = torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = module((u / (1 - u)).log() / 1.702)  # so that the sigmoid is uniform
    assert float(values.mean()) == pytest.approx(1 / 3, rel=0.03)
    assert float(values.var()) == pytest.approx(1 / 9, rel=0.06)


def test_moments_of_the_normal_prior_are_those_of_three_points_of_the_whole() -> None:
    module = InverseCDF(1.0, 2.0, scale=0.7).double()
    mean, variance = double(-1.0, 0.2, 6.0), double(0.3, 2.0, 0.1)
    found = moments(module, torch.stack([mean, variance]))
    expected = unscented(lambda x: 1.0 + 2.0 * normal_quantile_of_sigmoid(x / 0.7), mean, variance)
    torch.testing.assert_close(found, expected)


def test_the_number_of_photons_given_the_position() -> None:
    """By seven points in three dimensions."""
    x, others = torch.stack([double(0.5), double(0.16)]), torch.stack([double(3.0, 1.0), double(0.09, 0.09)])
    others = others.unsqueeze(1)
    module = ConditionalInverseCDF(photons, scale=1.0).double()
    found = moments(module, x, others)
    torch.testing.assert_close(torch.cat(found), double(84.558234, 60.287746), rtol=0, atol=1e-5)
    draws = np.random.default_rng(0).normal((0.5, 3.0, 1.0), (0.4, 0.3, 0.3), (400_000, 3))
    drawn = module(torch.tensor(draws[:, 0]), torch.tensor(draws[:, 1:]))
    assert float(drawn.mean()) == pytest.approx(84.54, abs=0.1)
    assert float(drawn.var()) == pytest.approx(59.97, rel=0.02)
    assert float(photons(double(0.0), double(0.0))[0]) == pytest.approx(99.972155, abs=1e-6)
    assert float(photons(double(4.0), double(4.0))[0]) == pytest.approx(25.0, abs=1e-6)
    assert ndtr(0.0) == 0.5


def test_a_certain_argument_is_no_dimension() -> None:
    """Three points where one of many arguments is uncertain, whatever their number."""
    x = torch.stack([double(0.3, -1.0), double(0.5, 0.2)])
    sure = [double(1.0, 2.0)] * 5

    class Together(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return jointly(lambda a, *others: a.square() * sum(others), x, *sure)

    found = moments(Together(), x)
    expected = unscented(lambda a: a.square() * sum(sure), *x)
    torch.testing.assert_close(found, expected)


def test_outside_of_a_pass_they_are_plain_modules() -> None:
    x = torch.linspace(-2, 2, 7)
    assert torch.equal(elementwise(torch.tanh, x), x.tanh())
    module = nn.Sequential(nn.Linear(1, 3), InverseCDF(0.5, 2.0)).eval()
    x = x.unsqueeze(1)
    expected = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), expected)
    stacked = torch.func.vmap(module)(x.unsqueeze(0).expand(2, -1, -1))
    torch.testing.assert_close(stacked[1], expected)


def test_a_posterior_behind_it_predicts_through_every_head() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), InverseCDF(0.0, 2.0)).eval()
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    posterior = uq.fit(
        model, [(x, model(x).detach())], "diag", likelihood="regression", noise_variance=0.1, progress=False
    )
    for head in ("moments", "linearized", "sampling"):
        prediction = uq.wrap(model, posterior, head)(x)
        assert bool((prediction.epistemic_variance > 0).all())


def test_values_and_gradients_stay_finite_far_out() -> None:
    """In float32, with large upstream gradients; against float64 within its range, and the tail's own equation."""
    t = torch.tensor([-300.0, -87.0, -59.9, -20.0, 0.1, 0.5, 30.0, 60.1, 86.0, 87.0, 150.0, 300.0])
    near, far = t.clone().requires_grad_(), t.double().requires_grad_()
    value, wide = normal_quantile_of_sigmoid(near), normal_quantile_of_sigmoid(far)
    torch.testing.assert_close(value.double(), wide, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(
        torch.special.log_ndtr(-wide.abs()), torch.nn.functional.logsigmoid(-far.abs()), rtol=1e-6, atol=1e-6
    )
    (slope,) = torch.autograd.grad((1e10 * value).sum(), near)
    (exact,) = torch.autograd.grad(torch.special.ndtri(torch.sigmoid(-far.abs())).sum(), far)
    assert bool(torch.isfinite(slope).all()) and bool((slope > 0).all())
    inside = t.abs() < 80
    torch.testing.assert_close(slope[inside].double() / 1e10, exact[inside].abs(), rtol=1e-4, atol=1e-6)
