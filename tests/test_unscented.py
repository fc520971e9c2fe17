"""The unscented transform, closed forms and maxima: published numbers, quadrature, Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor

from posthoc_uq.moments.rules.pooling import larger, largest, pooled
from posthoc_uq.moments.unscented import (
    block_size,
    blockwise,
    rectified,
    slope,
    unscented,
    unscented_positive,
)


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def moments(function: Callable[[float], float], mean: float, deviation: float) -> tuple[float, float]:
    """Mean and variance of f(x), x Gaussian, by quadrature with a break at zero."""
    low, high = mean - 12 * deviation, mean + 12 * deviation
    points = [p for p in (0.0, mean) if low < p < high]

    def integral(power: int, trained_mean: float = 0.0) -> float:
        value, _ = quad(
            lambda x: (function(x) - trained_mean) ** power * norm.pdf(x, mean, deviation),
            low,
            high,
            points=points,
            limit=400,
            epsabs=1e-14,
            epsrel=1e-12,
        )
        return value

    first = integral(1)
    return first, integral(2, first)


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "relu": (torch.relu, lambda x: np.maximum(x, 0)),
    "tanh": (torch.tanh, np.tanh),
    "exp": (torch.exp, np.exp),
    "cubic": (lambda x: x**3 - 2 * x**2, lambda x: x**3 - 2 * x**2),
}


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 2.0, 3.0, 40.0])
def test_the_points_of_equation_5(kappa: float) -> None:
    """Mean, variance and slope by the published points and weights; a kappa that gradients reach gives the same."""
    generator = np.random.default_rng(0)
    mean, deviation = generator.normal(size=50), generator.uniform(0.05, 2.0, 50)
    points = mean + deviation * np.sqrt(kappa + 1) * np.array([[0.0], [-1.0], [1.0]])
    weights = np.array([[kappa / (kappa + 1)], [0.5 / (kappa + 1)], [0.5 / (kappa + 1)]])
    m, v = torch.from_numpy(mean), torch.from_numpy(deviation**2)
    leaf = torch.tensor(kappa, dtype=torch.float64, requires_grad=True)
    for function, definition in FUNCTIONS.values():
        values = definition(points)
        expected = (weights * values).sum(0)
        centred = values - expected
        moments_by_points = expected, (weights * centred**2).sum(0)
        for given in (kappa, leaf):
            found = unscented(function, m, v, given)
            for one, other in zip(found, moments_by_points, strict=True):
                np.testing.assert_allclose(one.detach().numpy(), other, rtol=1e-9, atol=1e-12)
        by_points = (weights * (points - mean) * centred).sum(0) / deviation**2
        np.testing.assert_allclose(slope(function, m, v, kappa).numpy(), by_points, rtol=1e-9, atol=1e-12)
    # far from its edge a function that has one goes by the same points
    far, narrow = m + 10.0, v * 1e-3
    inside = unscented_positive(torch.log, far, narrow, 0.0, kappa)
    torch.testing.assert_close(inside, unscented(torch.log, far, narrow, kappa), rtol=1e-7, atol=1e-12)
    if kappa > 0:
        assert torch.autograd.gradcheck(lambda x: unscented(torch.exp, m, v, x), leaf)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_the_degrees_up_to_which_a_kappa_is_exact(kappa: float) -> None:
    """Means up to degree 5 with kappa = 2, and 3 with any other; variances up to degree 2, and 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    mean, deviation, generator = 0.7, 1.3, np.random.default_rng(1)
    exact_to = {"mean": 0, "variance": 0}
    for degree in range(1, 7):
        factors = generator.normal(size=degree + 1)

        def polynomial(x: Any, factors: Any = factors) -> Any:
            return sum(float(factor) * x**power for power, factor in enumerate(factors))

        values = polynomial(mean + deviation * nodes)
        first = (weights * values).sum()
        expected = {"mean": first, "variance": (weights * (values - first) ** 2).sum()}
        found = unscented(polynomial, number(mean), number(deviation**2), kappa)
        for name, value in zip(expected, found, strict=True):
            if exact_to[name] == degree - 1 and value.item() == pytest.approx(expected[name], rel=1e-9):
                exact_to[name] = degree
    assert exact_to == ({"mean": 5, "variance": 2} if kappa == 2 else {"mean": 3, "variance": 1})


RELU_TABLE = [  # mean / sd, exact mean, unscented mean, exact variance, unscented variance
    (-3, 0.000382, 0, 0.000203, 0),
    (-2, 0.008491, 0, 0.005697, 0),
    (-1.5, 0.029307, 0.038675, 0.021988, 0.007479),
    (-1, 0.083315, 0.122008, 0.068398, 0.074430),
    (-0.5, 0.197797, 0.205342, 0.170516, 0.210826),
    (0, 0.398942, 0.288675, 0.340845, 0.416667),
    (0.25, 0.536345, 0.497008, 0.445127, 0.449403),
    (0.5, 0.697797, 0.705342, 0.553441, 0.499501),
    (1, 1.083315, 1.122008, 0.751088, 0.651781),
    (1.5, 1.529307, 1.538675, 0.888374, 0.873504),
    (sqrt(3), 1.748958, 1.732051, 0.928798, 1.0),
    (2, 2.008491, 2.0, 0.960196, 1.0),
    (3, 3.000382, 3.0, 0.997503, 1.0),
]


@pytest.mark.parametrize(("ratio", "mean", "mean_ut", "variance", "variance_ut"), RELU_TABLE)
def test_relu_of_the_table(
    ratio: float, mean: float, mean_ut: float, variance: float, variance_ut: float
) -> None:
    for scale in (1.0, 1e-3, 50.0):  # ReLU is scale invariant
        m, v = number(ratio * scale), number(scale**2)
        exact, approximate = rectified(m, v), unscented(torch.relu, m, v)
        assert exact[0].item() / scale == pytest.approx(mean, abs=1e-6)
        assert exact[1].item() / scale**2 == pytest.approx(variance, abs=1e-6)
        assert approximate[0].item() / scale == pytest.approx(mean_ut, abs=1e-6)
        assert approximate[1].item() / scale**2 == pytest.approx(variance_ut, abs=1e-6)


@pytest.mark.parametrize("negative", [0.0, 0.01, 0.3])
@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.5, 1.3), (-2.0, 0.7), (3.0, 0.5), (-4.0, 1.0), (0.0, 2.0), (6.0, 1.0)]
)
def test_rectifiers_against_quadrature(mean: float, deviation: float, negative: float) -> None:
    expected = moments(lambda x: x if x > 0 else negative * x, mean, deviation)
    found = rectified(number(mean), number(deviation**2), negative)
    assert found[0].item() == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert found[1].item() == pytest.approx(expected[1], rel=1e-9, abs=1e-12)


def test_rectifier_of_the_published_case_and_far_from_the_kink() -> None:
    assert rectified(number(0.5), number(1.69))[0].item() == pytest.approx(0.806519, abs=1e-6)
    assert rectified(number(0.5), number(1.69))[1].item() == pytest.approx(0.850845, abs=1e-6)
    leaky = rectified(number(0.5), number(1.69), 0.01)
    assert [leaky[0].item(), leaky[1].item()] == pytest.approx([0.803454, 0.855824], abs=1e-6)
    for mean in (-8.0, 8.0):
        expected = moments(lambda x: max(x, 0.0), mean, 1.0)
        found = rectified(number(mean), number(1.0))
        assert found[0].item() == pytest.approx(expected[0], rel=1e-8)
        assert found[1].item() == pytest.approx(expected[1], rel=1e-6)
    certain = rectified(torch.tensor([-1.0, 0.0, 2.0]), torch.zeros(3), 0.1)
    torch.testing.assert_close(certain[0], torch.tensor([-0.1, 0.0, 2.0]))
    assert (certain[1] == 0).all()


SMOOTH: list[
    tuple[Any, list[float]]
] = [  # relative errors of the variance at sd .3, 1, 3 around 0, in percent
    (F.gelu, [0.7, 12.9, 18.8]),
    (F.silu, [0.2, 5.9, 16.8]),
    (F.hardswish, [0.0, 0.5, 15.0]),
    (torch.sigmoid, [-0.1, -6.0, -39.7]),
    (torch.tanh, [-1.3, -25.4, -55.3]),
]


@pytest.mark.parametrize(("function", "errors"), SMOOTH)
def test_errors_of_smooth_functions_are_the_known_ones(function: Any, errors: list[float]) -> None:
    for deviation, error in zip((0.3, 1.0, 3.0), errors, strict=True):
        _, exact = moments(lambda x: function(torch.tensor(x, dtype=torch.float64)).item(), 0.0, deviation)
        _, found = unscented(function, number(0.0), number(deviation**2))
        assert 100 * (found.item() / exact - 1) == pytest.approx(error, abs=0.2)


def test_polynomials_are_exact_and_small_spreads_keep_their_digits() -> None:
    m, v = number(0.7), number(0.4)
    assert unscented(torch.square, m, v)[1].item() == pytest.approx(2 * 0.16 + 4 * 0.49 * 0.4, rel=1e-12)
    cubic = unscented(lambda x: x**5 - x**3, m, v)[0].item()
    assert cubic == pytest.approx(moments(lambda x: x**5 - x**3, 0.7, sqrt(0.4))[0], rel=1e-10)
    tiny = unscented(torch.exp, torch.tensor([3.0]), torch.tensor([1e-6]))
    assert tiny[1].item() == pytest.approx(np.exp(6.0) * 1e-6, rel=1e-3)
    assert unscented(torch.tanh, number(1.0), number(0.0))[1].item() == 0.0


def test_slopes_are_those_of_statistical_linearisation() -> None:
    assert slope(torch.square, number(0.5), number(2.0)).item() == pytest.approx(1.0)
    assert slope(torch.tanh, number(0.3), number(0.0)).item() == pytest.approx(
        1 - np.tanh(0.3) ** 2, rel=1e-6
    )


def test_one_sided_functions_stay_on_their_side() -> None:
    m, v = number(1.0), number(0.01)
    for function in (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal):
        expected = moments(lambda x, f=function: f(torch.tensor(x, dtype=torch.float64)).item(), 1.0, 0.05)
        found = unscented_positive(function, m, number(0.0025))
        assert found[0].item() == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
        assert found[1].item() == pytest.approx(expected[1], rel=0.02)
        wide = unscented_positive(function, m, number(4.0))
        assert torch.isfinite(wide[0]).all() and torch.isfinite(wide[1]).all()
    assert unscented_positive(torch.sqrt, m, v)[1].item() == pytest.approx(
        unscented(torch.sqrt, m, v)[1].item()
    )


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "expanded"])
def test_blocks_change_nothing(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(2, 8, 96, 96, generator=generator)
    v = torch.rand(2, 8, 96, 96, generator=generator)
    assert m.numel() > block_size()
    if layout == "channels_last":
        m, v = m.to(memory_format=torch.channels_last), v.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        m = m.transpose(2, 3)
    elif layout == "expanded":
        v = v[:, :, :1].expand(2, 8, 96, 96)
    found = blockwise(lambda a, b: unscented(torch.relu, a, b), m, v)
    expected = unscented(torch.relu, m, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_larger_of_two_and_of_many() -> None:
    found = larger((number(0.0), number(1.0)), (number(0.5), number(0.25)))
    assert [found[0].item(), found[1].item()] == pytest.approx([0.739905, 0.318013], abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    same = larger((number(2.0), number(0.0)), (number(2.0), number(0.0)))
    assert [same[0].item(), same[1].item()] == pytest.approx([2.0, 0.0])
    apart = larger((torch.tensor([1e4]), torch.tensor([1e-4])), (torch.tensor([-1e4]), torch.tensor([1.0])))
    assert apart[0].item() == 1e4 and apart[1].item() == pytest.approx(1e-4)
    m, v = torch.zeros(1, 4, dtype=torch.float64), torch.full((1, 4), 0.7, dtype=torch.float64)
    many = largest(list(zip(m.unbind(1), v.unbind(1), strict=True)))
    best = (torch.randn(1_000_000, 4, generator=generator, dtype=torch.float64) * sqrt(0.7)).amax(1)
    assert many[0].item() == pytest.approx(best.mean().item(), abs=5e-3)
    assert many[1].item() == pytest.approx(best.var().item(), rel=0.08)  # maxima are not Gaussian


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [
        (2, 2, 0, 1, False),
        (3, 2, 1, 1, False),
        (3, 2, 0, 1, True),
        (2, 1, 1, 2, False),
        (3, 2, 1, 2, True),
        (3, 3, 1, 1, True),
    ],
)
def test_pooling_windows_are_torchs_own(
    kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> None:
    m = torch.randn(2, 3, 11, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    two = (kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2
    mean, variance = pooled(m, torch.zeros_like(m), *two, ceil)
    torch.testing.assert_close(mean, F.max_pool2d(m, kernel, stride, padding, dilation, ceil))
    assert variance.abs().max() == 0


@pytest.mark.parametrize(("spread", "ratio"), [(0.05, 1.0), (0.3, 0.98), (1.0, 0.95)])
def test_pooled_variance_against_monte_carlo(spread: float, ratio: float) -> None:
    generator = torch.Generator().manual_seed(1)
    m = torch.randn(1, 1, 40, 40, generator=generator, dtype=torch.float64)
    mean, variance = pooled(m, torch.full_like(m, spread**2), (2, 2), (2, 2), (0, 0), (1, 1), False)
    draws = torch.stack(
        [
            F.max_pool2d(m + spread * torch.randn(m.shape, generator=generator, dtype=m.dtype), 2)
            for _ in range(2000)
        ]
    )
    assert (variance / draws.var(0)).mean().item() == pytest.approx(ratio, abs=0.02)
    assert ((mean - draws.mean(0)).abs() / draws.std(0)).mean().item() < 0.03
