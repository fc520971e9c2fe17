"""Every rule: affine ones against ``(J o J) v`` with a dense Jacobian, the others against Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.moments import MomentTensor, Pass, Rules, moments_of
from posthoc_uq.moments.unscented import unscented

Function = Callable[[Tensor], Any]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(function: Callable[..., Any], *pairs: tuple[Tensor, Tensor], **rules: Any) -> Any:
    with Pass(Rules(**rules), {}):
        return function(*(MomentTensor(m, v) for m, v in pairs))


def delta_variance(function: Function, mean: Tensor, variance: Tensor) -> Tensor:
    jacobian = torch.func.jacrev(function)(mean)
    return jacobian.square().flatten(jacobian.ndim - mean.ndim) @ variance.flatten()


def monte_carlo(
    function: Callable[..., Tensor], *pairs: tuple[Tensor, Tensor], draws: int = 100_000
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = [
        m + v.sqrt() * torch.randn(draws, *m.shape, generator=generator, dtype=m.dtype) for m, v in pairs
    ]
    outputs = torch.func.vmap(function, chunk_size=20_000)(*inputs)
    return outputs.mean(0), outputs.var(0)


def pair(*shape: int, spread: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    variance = spread**2 * (
        0.2 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    )
    return randn(*shape, seed=seed), variance


W = randn(4, 6, seed=11)
K2 = randn(4, 3, 3, 2, seed=12)
GROUPS = torch.tensor([0, 1, 0, 2, 1]).unsqueeze(1).expand(5, 3)
LINEAR: dict[str, tuple[tuple[int, ...], Function]] = {
    "linear": ((2, 6), lambda x: F.linear(x, W, randn(4))),
    "linear, keywords": ((2, 6), lambda x: F.linear(input=x, weight=W)),
    "linear on tokens": ((2, 3, 6), lambda x: F.linear(x, W)),
    "conv1d": ((2, 3, 7), lambda x: F.conv1d(x, randn(4, 3, 3), randn(4), stride=2, padding=1)),
    "conv2d": ((2, 3, 5, 6), lambda x: F.conv2d(x, K2, randn(4), padding=1)),
    "conv2d, same": ((2, 3, 5, 6), lambda x: F.conv2d(x, K2, padding="same", dilation=2)),
    "conv2d, groups": ((2, 4, 5, 6), lambda x: F.conv2d(x, randn(6, 2, 3, 3), groups=2, stride=2)),
    "conv3d": ((1, 2, 4, 4, 4), lambda x: F.conv3d(x, randn(3, 2, 2, 2, 2))),
    "conv_transpose1d": (
        (2, 3, 5),
        lambda x: F.conv_transpose1d(x, randn(3, 2, 3), stride=2, output_padding=1),
    ),
    "conv_transpose2d": (
        (2, 4, 4, 3),
        lambda x: F.conv_transpose2d(x, randn(4, 2, 3, 3), randn(4), 2, 1, 1, 2),
    ),
    "conv_transpose3d": ((1, 2, 3, 3, 2), lambda x: F.conv_transpose3d(x, randn(2, 2, 2, 2, 2))),
    "batch_norm": (
        (3, 4, 2, 2),
        lambda x: F.batch_norm(
            x, running_mean=randn(4), running_var=randn(4).exp(), weight=randn(4), bias=randn(4)
        ),
    ),
    "add a constant": ((2, 3), lambda x: 2.0 + x + randn(3)),
    "add, broadcast": ((2, 1), lambda x: x + randn(2, 3)),
    "add, alpha": ((2, 3), lambda x: torch.add(randn(2, 3), x, alpha=-2.5)),
    "x + x": ((2, 3), lambda x: x + x),
    "x - x": ((2, 3), lambda x: x - x),
    "sub": ((2, 3), lambda x: 1.0 - x),
    "rsub": ((2, 3), lambda x: torch.rsub(x, randn(3))),
    "mul": ((2, 3), lambda x: x * randn(3) * 2),
    "div": ((2, 3), lambda x: x / randn(3) / 3),
    "neg": ((2, 3), lambda x: -x),
    "lerp": ((2, 3), lambda x: torch.lerp(x, randn(2, 3), 0.3)),
    "addcmul": ((2, 3), lambda x: torch.addcmul(randn(2, 3), x, randn(2, 3), value=0.5)),
    "in place": ((2, 3), lambda x: (x * 1.0).add_(1.0).mul_(randn(3)).sub_(2.0).div_(3.0).neg_()),
    "+=": ((2, 3), lambda x: _augmented(x)),
    "matmul": ((2, 3, 4), lambda x: x @ randn(4, 5)),
    "rmatmul": ((4, 2), lambda x: randn(3, 4) @ x),
    "bmm": ((2, 3, 4), lambda x: torch.bmm(randn(2, 5, 3), x)),
    "einsum": ((2, 3, 4), lambda x: torch.einsum("bij,jk->bki", x, randn(4, 5))),
    "addmm": ((2, 3), lambda x: torch.addmm(randn(4), x, randn(3, 4), beta=0.5, alpha=2.0)),
    "mean": ((2, 3, 4, 5), lambda x: x.mean((2, 3), keepdim=True)),
    "mean of all": ((2, 3), lambda x: x.mean()),
    "sum": ((2, 3, 4), lambda x: torch.sum(x, 1)),
    "cumsum": ((2, 5), lambda x: x.cumsum(1)),
    "avg_pool1d": ((2, 3, 8), lambda x: F.avg_pool1d(x, 3, 2, 1)),
    "avg_pool2d": ((1, 2, 7, 6), lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "avg_pool2d, counted": ((1, 2, 7, 6), lambda x: F.avg_pool2d(x, 3, 2, 1, True, False)),
    "avg_pool2d, divisor": ((1, 2, 7, 6), lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
    "avg_pool3d": ((1, 2, 4, 4, 4), lambda x: F.avg_pool3d(x, 2)),
    "adaptive, uneven": ((1, 2, 7, 5), lambda x: F.adaptive_avg_pool2d(x, (3, 2))),
    "adaptive 1d": ((1, 2, 7), lambda x: F.adaptive_avg_pool1d(x, 3)),
    "adaptive 3d": ((1, 2, 4, 5, 3), lambda x: F.adaptive_avg_pool3d(x, 2)),
    "bilinear": ((1, 2, 4, 5), lambda x: F.interpolate(x, (7, 8), mode="bilinear", align_corners=False)),
    "bilinear, factor": ((1, 2, 4, 5), lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear")),
    "bicubic": ((1, 1, 4, 5), lambda x: F.interpolate(x, (9, 3), mode="bicubic", align_corners=True)),
    "linear interpolation": ((1, 2, 5), lambda x: F.interpolate(x, 8, mode="linear")),
    "trilinear": ((1, 1, 3, 2, 4), lambda x: F.interpolate(x, (5, 4, 6), mode="trilinear")),
    "bilinear, antialias": (
        (1, 1, 4, 6),
        lambda x: F.interpolate(x, (5, 9), mode="bilinear", antialias=True),
    ),
    "bicubic, antialias": ((1, 1, 6, 7), lambda x: F.interpolate(x, (3, 3), mode="bicubic", antialias=True)),
    "masked_fill_": ((2, 3), lambda x: _filled(x)),
    "constant_pad_nd": ((1, 2, 3), lambda x: torch.constant_pad_nd(x, (1, 2), 5.0)),
    "nearest": ((1, 2, 3, 3), lambda x: F.interpolate(x, scale_factor=2)),
    "flatten": ((2, 3, 4), lambda x: torch.flatten(x, 1)),
    "reshape, permute": (
        (2, 3, 4),
        lambda x: x.reshape(2, 12).view(4, 6).t().permute(1, 0).transpose(0, 1).contiguous(),
    ),
    "getitem": ((4, 3, 5), lambda x: x[:, 0][..., 1:4:2]),
    "getitem by tensor": ((4, 3), lambda x: x[torch.tensor([0, 2])]),
    "unbind, stack": ((3, 2, 4), lambda x: torch.stack(x.unbind(0)[::-1], dim=1)),
    "iterate": ((3, 2), lambda x: torch.stack([row * 2 for row in x])),
    "cat": ((2, 3), lambda x: torch.cat([x, randn(2, 2), x[:, :1]], dim=1)),
    "split, chunk": ((2, 6), lambda x: x.split([2, 4], 1)[1].chunk(2, dim=1)[0]),
    "squeeze, expand": ((2, 1, 3), lambda x: x.squeeze(1).unsqueeze(0).expand(4, 2, 3)),
    "repeat, flip, roll": ((2, 3), lambda x: x.repeat(2, 1).flip(0).roll(1, 1)),
    "narrow, select": ((4, 3), lambda x: x.narrow(0, 1, 2).select(1, 0)),
    "T": ((2, 3), lambda x: x.T.mT),
    "pad": ((1, 2, 3), lambda x: F.pad(x, (1, 2), value=3.0)),
    "pad, reflect": ((1, 2, 4), lambda x: F.pad(x, (1, 2), mode="reflect")),
    "where": ((2, 3), lambda x: torch.where(randn(2, 3) > 0, x, 1.0 * randn(2, 3))),
    "masked_fill": ((2, 3), lambda x: x.masked_fill(randn(2, 3) > 0, -5.0)),
    "pixel_shuffle": ((1, 8, 2, 2), lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)),
    "unfold": ((1, 2, 4, 4), lambda x: F.unfold(x, 2, stride=2)),
    "swapaxes, movedim": ((2, 3, 4), lambda x: x.swapaxes(0, 1).movedim(-1, 0)),
    "dropout in eval": ((2, 3), lambda x: F.dropout(x, 0.5, training=False)),
    "to": ((2, 3), lambda x: x.to(torch.float64).type_as(x)),
    "clone": ((2, 3), lambda x: x.clone()),
    "scatter_add": ((5, 3), lambda x: x.new_zeros(3, 3).scatter_add_(0, GROUPS, x)),
    "scatter_reduce, mean": (
        (5, 3),
        lambda x: x.new_zeros(3, 3).scatter_reduce(0, GROUPS, x, "mean", include_self=False),
    ),
    "index_add": ((5, 3), lambda x: randn(3, 3).index_add(0, GROUPS[:, 0], x, alpha=-2.0)),
    "index_copy": ((2, 3), lambda x: randn(4, 3).index_copy(0, torch.tensor([3, 1]), x)),
    "scatter": ((2, 3), lambda x: randn(4, 3).scatter(0, torch.tensor([[0, 1, 2], [3, 0, 1]]), x)),
}


def _filled(x: Tensor) -> Tensor:
    y = x * 2.0
    y.masked_fill_(torch.tensor([True, False, True]), -3.0)
    return y


def _augmented(x: Tensor) -> Tensor:
    y = x * 3.0
    y += 1.0
    y *= randn(3)
    return y


@pytest.mark.parametrize("name", LINEAR)
def test_linear_rules_are_exact(name: str) -> None:
    shape, function = LINEAR[name]
    mean, variance = pair(*shape)
    found = run(function, (mean, variance))
    torch.testing.assert_close(found.moment_mean, function(mean), rtol=1e-10, atol=1e-12)
    expected = delta_variance(function, mean, variance)
    torch.testing.assert_close(
        found.moment_variance, expected.reshape(found.moment_mean.shape), rtol=1e-9, atol=1e-12
    )


DELTA: dict[str, tuple[tuple[int, ...], Function]] = {
    "softmax": ((3, 5), lambda x: x.softmax(1)),
    "softmax of the first": ((3, 5), lambda x: F.softmax(x, dim=0)),
    "log_softmax": ((3, 5), lambda x: F.log_softmax(x, dim=-1)),
    "logsumexp": ((3, 5), lambda x: x.logsumexp(1)),
    "x / sum": ((3, 5), lambda x: (y := x + 10.0) / (y.sum(1)[:, None] + 1e-16)),
}


OTHER, PLACES = randn(3, 6, seed=9), torch.tensor([0, 1, 0, 2, 1])
ROOTS: dict[str, tuple[tuple[int, ...], Function]] = {
    "norm": ((3, 6), lambda x: x.norm(dim=1)),
    "norm of all": ((3, 6), lambda x: torch.norm(x)),
    "vector_norm": ((3, 6), lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "linalg.norm": ((3, 6), lambda x: torch.linalg.norm(x, dim=1)),
    "norm by sizes": ((3, 6), lambda x: x.norm(p=1, dim=1)),
    "x / norm": ((3, 6), lambda x: x / x.norm(dim=1, keepdim=True)),
    "x / norm, another form": ((3, 6), lambda x: x / (x.norm(dim=1) + 1e-6)[:, None]),
    "x / vector_norm of all": ((2, 4), lambda x: x / torch.linalg.vector_norm(x)),
    "normalize": ((3, 6), lambda x: F.normalize(x, dim=1)),
    "var": ((3, 6), lambda x: x.var(1)),
    "var, biased": ((3, 6), lambda x: x.var(1, unbiased=False, keepdim=True)),
    "std": ((3, 6), lambda x: x.std(1)),
    "std of several": ((3, 4, 2), lambda x: torch.std(x, dim=(1, 2), correction=0)),
    "var_mean": ((3, 6), lambda x: torch.cat(torch.var_mean(x, 1))),
    "prod": ((3, 4), lambda x: x.prod(1)),
    "cosine_similarity": ((3, 6), lambda x: F.cosine_similarity(x, OTHER, dim=1)),
    "cdist": ((4, 6), lambda x: torch.cdist(x, OTHER)),
    "pairwise_distance": ((3, 6), lambda x: F.pairwise_distance(x, OTHER)),
}


@pytest.mark.parametrize(("spread", "near"), [(0.3, 0.03), (1.5, 0.08)])
@pytest.mark.parametrize("name", ROOTS)
def test_norms_and_spreads_against_monte_carlo(name: str, spread: float, near: float) -> None:
    shape, function = ROOTS[name]
    mean, variance = pair(*shape, spread=spread)
    found = run(function, (mean, variance))
    assert found.moment_mean.shape == function(mean).shape
    drawn = monte_carlo(function, (mean, variance), draws=40_000)
    assert ((found.moment_mean - drawn[0]).abs() / drawn[1].sqrt()).mean().item() < 0.05
    assert (found.moment_variance / drawn[1]).mean().item() == pytest.approx(1, abs=near)
    certain = run(function, (mean, torch.zeros_like(mean)))
    torch.testing.assert_close(certain.moment_mean, function(mean))
    assert certain.moment_variance.abs().max() == 0


def test_extremes_along_a_dimension_have_moments_and_the_indices_of_the_means() -> None:
    mean, variance = pair(3, 6)
    for function, reduced in ((torch.max, torch.amax), (torch.min, torch.amin)):
        values, indices = run(lambda x, f=function: f(x, dim=1), (mean, variance))
        expected = run(lambda x, f=reduced: f(x, 1), (mean, variance))
        torch.testing.assert_close(values.moment_variance, expected.moment_variance)
        assert torch.equal(indices, function(mean, dim=1).indices)
        torch.testing.assert_close(
            run(function, (mean, variance)).moment_mean,
            run(lambda x, f=reduced: f(x, (0, 1)), (mean, variance)).moment_mean,
        )


def softmax_by_groups(x: Tensor) -> Tensor:
    """As torch_geometric writes it."""
    index = PLACES.unsqueeze(1).expand(x.shape)
    zeros = torch.zeros(3, x.shape[1], dtype=x.dtype)
    largest = zeros.scatter_reduce(0, index, x.detach(), "amax", include_self=False)
    shares = (x - largest.index_select(0, PLACES)).exp()
    total = torch.zeros(3, x.shape[1], dtype=x.dtype).scatter_add_(0, index, shares) + 1e-16
    return shares / total.index_select(0, PLACES)


def test_a_softmax_by_groups_varies_like_a_softmax() -> None:
    mean, variance = pair(5, 4, spread=0.3)
    found = run(softmax_by_groups, (mean, variance))
    for places in ([0, 2], [1, 4]):
        alone = run(lambda x: x.softmax(0), (mean[places], variance[places]))
        torch.testing.assert_close(found.moment_mean[places], alone.moment_mean, rtol=0.05, atol=0)
        torch.testing.assert_close(found.moment_variance[places], alone.moment_variance, rtol=0.3, atol=0)


def written(x: Tensor) -> Tensor:
    total = torch.zeros(3, 4, dtype=x.dtype)
    result = total.index_add_(0, PLACES, x)
    assert result.shape == (3, 4)
    return total + 1.0  # the tensor itself, not what the function returned


def test_what_an_activation_was_written_into_is_uncertain_from_then_on() -> None:
    mean, variance = pair(5, 4)
    found = run(written, (mean, variance))
    torch.testing.assert_close(found.moment_mean, written(mean))
    expected = delta_variance(written, mean, variance).reshape(3, 4)
    torch.testing.assert_close(found.moment_variance, expected)


@pytest.mark.parametrize("name", DELTA)
def test_delta_rules_have_the_full_jacobian(name: str) -> None:
    shape, function = DELTA[name]
    mean, variance = pair(*shape)
    found = run(function, (mean, variance))
    torch.testing.assert_close(found.moment_mean, function(mean))
    expected = delta_variance(function, mean, variance)
    torch.testing.assert_close(
        found.moment_variance, expected.reshape(found.moment_mean.shape), rtol=1e-9, atol=1e-12
    )
    drawn = monte_carlo(function, (mean, variance))
    assert (found.moment_variance / drawn[1]).mean().item() == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("affine", [True, False])
def test_normalisations_against_the_delta_method(affine: bool) -> None:
    scale, shift = (randn(8, seed=3), randn(8, seed=4)) if affine else (None, None)
    mean = randn(4, 8)
    variance = 0.05 * torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def check(function: Callable[[Tensor, float], Tensor], groups: int, m: Tensor, v: Tensor) -> None:
        found = run(lambda x: function(x, 1e-5), (m, v))
        for sample in range(
            m.shape[0]
        ):  # each sample (and group) has an epsilon of its own: the mean variance
            jacobian_variance, one = [], m[sample : sample + 1]
            for group in range(groups):
                share = v[sample].reshape(groups, -1)[group].mean().item()
                full = delta_variance(lambda x, s=share: function(x, 1e-5 + s), one, v[sample : sample + 1])
                jacobian_variance.append(full.reshape(groups, -1)[group])
            torch.testing.assert_close(
                found.moment_variance[sample].flatten(), torch.cat(jacobian_variance), rtol=1e-8, atol=1e-12
            )

    check(lambda x, eps: F.layer_norm(x, (8,), scale, shift, eps), 1, mean, variance)
    check(lambda x, eps: F.group_norm(x, 2, scale, shift, eps), 2, mean.reshape(4, 8), variance)
    images, spread = mean.reshape(1, 8, 2, 2), variance.reshape(1, 8, 2, 2)
    check(lambda x, eps: F.group_norm(x, 4, scale, shift, eps), 4, images, spread)
    check(lambda x, eps: F.instance_norm(x, weight=scale, bias=shift, eps=eps), 8, images, spread)
    if hasattr(F, "rms_norm"):
        check(lambda x, eps: F.rms_norm(x, (8,), scale, eps), 1, mean, variance)


def test_layer_norm_and_softmax_of_the_published_case() -> None:
    m, v = torch.tensor([[1.0, 0.0, -1.0]]).double(), torch.tensor([[0.1, 0.2, 0.3]]).double()
    found = run(lambda x: x.softmax(1), (m, v)).moment_variance
    assert found[0].tolist() == pytest.approx([0.011336, 0.009629, 0.002469], abs=1e-6)
    normed = run(lambda x: F.layer_norm(x, (3,)), (m, v))
    assert normed.moment_mean[0].tolist() == pytest.approx([1.074166, 0, -1.074166], abs=1e-6)
    assert normed.moment_variance[0].tolist() == pytest.approx([0.035730, 0.153844, 0.053482], abs=1e-6)


@pytest.mark.parametrize(("spread", "ratio"), [(0.05, 0.999), (0.3, 0.986), (1.0, 0.89)])
def test_layer_norm_against_monte_carlo(spread: float, ratio: float) -> None:
    m = randn(40, 8)
    v = torch.full_like(m, spread**2)
    found = run(lambda x: F.layer_norm(x, (8,)), (m, v))
    _, drawn = monte_carlo(lambda x: F.layer_norm(x, (8,)), (m, v), draws=20_000)
    assert (found.moment_variance / drawn).mean().item() == pytest.approx(ratio, abs=0.05)


ELEMENTWISE: list[tuple[str, Function]] = [
    (name, getattr(F, name, None) or getattr(torch, name))
    for name in [
        "relu",
        "relu6",
        "leaky_relu",
        "elu",
        "celu",
        "selu",
        "gelu",
        "silu",
        "mish",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "softplus",
        "sigmoid",
        "tanh",
        "exp",
        "erf",
        "sin",
        "cos",
        "square",
        "softsign",
        "tanhshrink",
        "logsigmoid",
        "expm1",
        "atan",
    ]
]


@pytest.mark.parametrize(("name", "function"), ELEMENTWISE)
def test_elementwise_functions_against_monte_carlo(name: str, function: Function) -> None:
    mean, variance = pair(6, 10, spread=0.4)
    found = run(function, (mean, variance))
    drawn = monte_carlo(function, (mean, variance), draws=20_000)
    scale = drawn[1].sqrt().mean()
    assert ((found.moment_mean - drawn[0]).abs() / scale).mean() < 0.04
    assert (found.moment_variance / drawn[1].clamp(min=1e-12)).median().item() == pytest.approx(1, abs=0.15)
    torch.testing.assert_close(run(function, (mean, torch.zeros_like(mean))).moment_mean, function(mean))


def test_methods_in_place_and_keywords_reach_the_same_rules() -> None:
    mean, variance = pair(2, 3)
    expected = run(torch.relu, (mean, variance))
    for function in (
        lambda x: x.relu(),
        lambda x: x.clone().relu_(),
        lambda x: F.relu(x, inplace=True),
        lambda x: nn.ReLU(inplace=True)(x),
        lambda x: x.clamp(min=0),
        lambda x: F.hardtanh(x, min_val=0.0, max_val=1e9),
        lambda x: torch.clamp_min(x, 0),
        lambda x: F.leaky_relu(x, negative_slope=0.0),
        lambda x: F.prelu(x, torch.zeros(1, dtype=x.dtype)),
    ):
        found = run(function, (mean, variance))
        torch.testing.assert_close(found.moment_mean, expected.moment_mean)
        torch.testing.assert_close(found.moment_variance, expected.moment_variance)


def test_exact_rectifiers_on_request() -> None:
    mean, variance = pair(5, 20, spread=1.0)
    forms: tuple[tuple[Function, ...], ...] = (
        (F.relu, nn.ReLU(), lambda x: torch.relu_(x * 1.0)),
        (lambda x: F.leaky_relu(x, 0.2), nn.LeakyReLU(0.2), lambda x: F.leaky_relu_(x * 1.0, 0.2)),
    )
    for function, *same in forms:
        found = run(function, (mean, variance), relu="exact")
        drawn = monte_carlo(function, (mean, variance))
        torch.testing.assert_close(found.moment_variance, drawn[1], rtol=0.05, atol=0.005)
        torch.testing.assert_close(found.moment_mean, drawn[0], rtol=0.02, atol=0.01)
        for other in same:
            again = run(other, (mean, variance), relu="exact")
            assert torch.equal(again.moment_mean, found.moment_mean)
            assert torch.equal(again.moment_variance, found.moment_variance)


def test_a_dropped_result_of_an_operation_in_place_still_counts() -> None:
    mean, variance = pair(2, 3)

    def dropped(x: Tensor) -> Tensor:
        y = x * 1.0
        y.relu_()
        F.relu(y, inplace=True)
        y.mul_(2.0)
        return y

    expected = run(lambda x: torch.relu(torch.relu(x)) * 2.0, (mean, variance))
    torch.testing.assert_close(run(dropped, (mean, variance)).moment_variance, expected.moment_variance)


def test_products_of_independent_tensors() -> None:
    first, second = pair(4, 3, spread=0.7), pair(4, 3, spread=0.5, seed=7)
    found = run(lambda a, b: a * b, first, second)
    case = run(
        lambda a, b: a * b, (randn(1) * 0 + 2, randn(1) * 0 + 0.5), (randn(1) * 0 - 1, randn(1) * 0 + 0.3)
    )
    assert [case.moment_mean.item(), case.moment_variance.item()] == pytest.approx([-2.0, 1.85])
    drawn = monte_carlo(lambda a, b: a * b, first, second)
    torch.testing.assert_close(found.moment_variance, drawn[1], rtol=0.05, atol=1e-3)
    for function, shapes in (
        (lambda a, b: a @ b, ((2, 3, 4), (2, 4, 5))),
        (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 3, 4), (2, 5, 4))),
    ):
        one, two = pair(*shapes[0], spread=0.5), pair(*shapes[1], spread=0.5, seed=9)
        found, drawn = run(function, one, two), monte_carlo(function, one, two, draws=40_000)
        torch.testing.assert_close(found.moment_variance, drawn[1], rtol=0.08, atol=1e-3)
    squared = run(lambda a: a * a, first)
    torch.testing.assert_close(squared.moment_variance, 2 * first[1] ** 2 + 4 * first[0] ** 2 * first[1])
    torch.testing.assert_close(run(lambda a: a**2, first).moment_variance, squared.moment_variance)


def test_a_skip_connection_counts_both_branches_as_independent() -> None:
    x = torch.zeros(1).double(), torch.ones(1).double()
    assert run(lambda a: a + torch.relu(a), x).moment_variance.item() == pytest.approx(1.416667, abs=1e-6)
    assert run(lambda a: a + torch.relu(a), x, relu="exact").moment_variance.item() == pytest.approx(
        1.340845, abs=1e-6
    )


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
    return F.dropout(weights, 0.1, training=False) @ v


@pytest.mark.parametrize(("spread", "ratio"), [(0.05, 1.04), (0.3, 0.98), (1.0, 1.03)])
def test_attention_against_monte_carlo(spread: float, ratio: float) -> None:
    inputs = [pair(2, 5, 8, spread=spread, seed=s) for s in (0, 10, 20)]
    found, parts = run(_attention, *inputs), run(_by_hand, *inputs)
    torch.testing.assert_close(
        parts.moment_variance, found.moment_variance
    )  # softmax and product apart, as in swin
    drawn = monte_carlo(lambda *a: _attention(*(x.unsqueeze(0) for x in a)).squeeze(0), *inputs, draws=20_000)
    assert (found.moment_variance / drawn[1]).mean().item() == pytest.approx(ratio, abs=0.12)


def test_masks_of_attention() -> None:
    inputs = [pair(2, 4, 8, seed=s) for s in (0, 10, 20)]
    allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    additive = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    forms: list[dict[str, Any]] = [{"is_causal": True}, {"attn_mask": allowed}, {"attn_mask": additive}]
    found = [run(lambda q, k, v, f=f: F.scaled_dot_product_attention(q, k, v, **f), *inputs) for f in forms]
    expected = F.scaled_dot_product_attention(*(m for m, _ in inputs), is_causal=True)
    for one in found:
        torch.testing.assert_close(one.moment_mean, expected)
        torch.testing.assert_close(one.moment_variance, found[0].moment_variance)
    # the first query sees the first value alone
    torch.testing.assert_close(found[0].moment_variance[:, 0], inputs[2][1][:, 0])


def test_maxima() -> None:
    x = pair(2, 3, 6, 6, spread=0.3)
    for function in (
        lambda a: F.max_pool2d(a, 2),
        lambda a: F.adaptive_max_pool2d(a, 3),
        lambda a: nn.MaxPool2d(3, 2, 1)(a),
    ):
        found = run(function, x)
        m, v = monte_carlo(function, x, draws=20_000)
        assert (found.moment_variance / v).mean().item() == pytest.approx(1, abs=0.05)
        fast = run(function, x, max_pool="argmax")
        torch.testing.assert_close(fast.moment_mean, function(x[0]))
        assert (fast.moment_mean - m).abs().mean() > (found.moment_mean - m).abs().mean()
    wide = run(lambda a: a.amax((2, 3)), x)
    assert (
        wide.moment_variance / monte_carlo(lambda a: a.amax((2, 3)), x, draws=20_000)[1]
    ).mean().item() == pytest.approx(1, abs=0.15)
    line = run(lambda a: F.max_pool1d(a.flatten(2), 3, 2), x)
    assert line.moment_mean.shape == (2, 3, 17)
    largest = run(lambda a: torch.maximum(a, torch.zeros(1).double()), x)
    torch.testing.assert_close(
        largest.moment_variance, run(F.relu, x, relu="exact").moment_variance, rtol=1e-6, atol=1e-9
    )


def test_averages_of_correlated_cells() -> None:
    m, v = pair(1, 2, 4, 4)
    full = run(lambda a: F.avg_pool2d(a, 2), (m, v), pool_rho=1.0)
    torch.testing.assert_close(full.moment_variance, F.avg_pool2d(v.sqrt(), 2).square())
    half = run(lambda a: a.mean((2, 3)), (m, v), pool_rho=0.5)
    torch.testing.assert_close(
        half.moment_variance, 0.5 * v.mean((2, 3)) / 16 + 0.5 * v.sqrt().mean((2, 3)).square()
    )


def test_what_is_certain_stays_plain() -> None:
    def function(x: Tensor) -> Tensor:
        assert x.shape == (2, 3) and x.ndim == 2 and x.size(0) == len(x) == 2 and x.is_floating_point()
        for plain in (
            x.new_zeros(3),
            torch.zeros_like(x),
            x > 0,
            x.argmax(1),
            torch.ones_like(x, dtype=torch.bool),
        ):
            assert not isinstance(plain, MomentTensor)
        assert isinstance(hash(x), int) and x.dtype == torch.float64 and str(x.device) == "cpu"
        return x + x.new_zeros(3)

    assert isinstance(run(function, pair(2, 3)), MomentTensor)


def test_functions_without_a_rule() -> None:
    x = pair(30, 4, spread=0.1)

    trained_mean = randn(4)

    def function(a: Tensor) -> Tensor:
        return torch.linalg.vector_norm(a - trained_mean, dim=-1)

    found = run(function, x, unknown="unscented")
    assert isinstance(found, MomentTensor)
    again = run(function, x, unknown="unscented")
    torch.testing.assert_close(again.moment_variance, found.moment_variance, rtol=0, atol=0)
    drawn = monte_carlo(function, x, draws=5000)
    torch.testing.assert_close(found.moment_mean, drawn[0], rtol=0.05, atol=0.05)
    # 32 directions that all samples share: a relative error of sqrt(2 / 32) or so
    assert (found.moment_variance / drawn[1]).mean().item() == pytest.approx(1, abs=0.4)
    order = torch.arange(29, -1, -1)
    turned = run(function, (x[0][order], x[1][order]), unknown="unscented")
    torch.testing.assert_close(turned.moment_variance[order], found.moment_variance)


def test_an_element_wise_function_without_a_rule_gets_the_unscented_rule() -> None:
    x = pair(5, 4)
    found = run(torch.special.i0, x, unknown="unscented")
    expected = unscented(torch.special.i0, x[0], x[1])
    assert isinstance(found, MomentTensor)
    torch.testing.assert_close(found.moment_mean, expected[0])
    torch.testing.assert_close(found.moment_variance, expected[1])


def test_several_outputs_of_a_function_without_a_rule() -> None:
    x = pair(30, 4, spread=0.1)
    values = run(lambda a: torch.linalg.qr(a)[1], x, unknown="unscented")
    assert isinstance(values, MomentTensor)


def test_half_precision_keeps_variances_in_float32() -> None:
    m = randn(2, 6).to(torch.bfloat16)
    v = torch.full((2, 6), 1e-10)
    found = run(lambda x: F.gelu(F.linear(x, W.to(torch.bfloat16))), (m, v))
    assert found.moment_mean.dtype == torch.bfloat16 and found.moment_variance.dtype == torch.float32
    assert (found.moment_variance > 0).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = run(lambda x: F.linear(x, W.float()), (m.float(), v))
    assert mixed.moment_variance.dtype == torch.float32 and mixed.moment_mean.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.moment_variance, F.linear(v, W.float().square()))


def test_moments_of_numbers_are_certain() -> None:
    assert moments_of(2.0)[1].item() == 0


def test_what_is_masked_or_outside_never_is_the_maximum() -> None:
    mean, variance = pair(2, 4, spread=0.5)
    mask = torch.tensor([False, True, True, False])
    masked = run(lambda x: x.masked_fill(mask, float("-inf")).amax(1), (mean, variance))
    kept = run(lambda x: torch.maximum(x[:, 0], x[:, 3]), (mean, variance))
    torch.testing.assert_close(masked.moment_mean, kept.moment_mean)
    torch.testing.assert_close(masked.moment_variance, kept.moment_variance)
    for scale in (1e-2, 1e5):  # padding costs no digits, and loses against anything
        low = -scale * torch.rand(1, 1, 7, 7)
        found = run(lambda x: F.max_pool2d(x, 3, 1, 1), (low, torch.zeros_like(low)))
        torch.testing.assert_close(found.moment_mean, F.max_pool2d(low, 3, 1, 1), rtol=1e-6, atol=0)
        assert not found.moment_variance.any()
    same = run(lambda x: torch.maximum(x, x), (mean, variance))
    torch.testing.assert_close(same.moment_mean, mean)


def test_a_query_that_may_look_at_nothing_gets_zero() -> None:
    inputs = [pair(1, 3, 4, seed=s) for s in (0, 10, 20)]
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    found = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), *inputs)
    assert not found.moment_mean[0, 1].any() and not found.moment_variance[0, 1].any()
    assert bool(torch.isfinite(found.moment_variance).all()) and bool((found.moment_variance[0, 0] > 0).all())


def test_one_sided_functions_at_their_edge() -> None:
    zero, small = torch.zeros(1).double(), torch.full((1,), 1e-4).double()
    assert run(torch.log1p, (zero, small)).moment_variance.item() == pytest.approx(1e-4, rel=1e-3)
    assert run(torch.sqrt, (zero, small)).moment_variance.item() > 0


def test_types_are_kept() -> None:
    over = run(lambda x: x.mean(axis=1), pair(2, 3))
    torch.testing.assert_close(over.moment_variance, pair(2, 3)[1].mean(1) / 3)
    half = torch.randn(2, 3).bfloat16(), torch.rand(2, 3)
    assert (
        run(lambda x: torch.maximum(x, torch.zeros(3).bfloat16()), half).moment_mean.dtype == torch.bfloat16
    )
    assert run(lambda x: x.mean() + 1.0, (torch.randn(3), torch.rand(3))).moment_mean.dtype == torch.float32
    wide = run(lambda x: x + torch.zeros(3).double(), (torch.randn(3), torch.rand(3)))
    assert wide.moment_mean.dtype == wide.moment_variance.dtype == torch.float64
    divided = run(lambda x: x / 3, half)
    torch.testing.assert_close(divided.moment_variance, half[1] / 9)
    images = torch.randn(1, 1, 17, 17), torch.rand(1, 1, 17, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = run(lambda x: F.avg_pool2d(x, 17), images)
        grown = run(lambda x: F.interpolate(x, 20, mode="bilinear"), images)
    torch.testing.assert_close(pooled.moment_variance.item(), images[1].mean().item() / 289)
    assert grown.moment_variance.dtype == torch.float32
    torch.testing.assert_close(
        grown.moment_variance, run(lambda x: F.interpolate(x, 20, mode="bilinear"), images).moment_variance
    )


def test_gradients_flow_through_factors_that_depend_on_the_input() -> None:
    m, v = randn(3), torch.rand(3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        with Pass(Rules(), {}):
            found = MomentTensor(x, v) * torch.sin(x) @ torch.cos(x).unsqueeze(1)
        return found.moment_variance.sum() + found.moment_mean.sum()

    assert torch.autograd.gradcheck(loss, (m.requires_grad_(),))


def test_a_loss_beside_the_outputs_is_that_of_the_mean() -> None:
    logits, labels = pair(4, 3), torch.tensor([0, 2, 1, 0])
    loss = run(lambda x: F.cross_entropy(x, labels), logits)
    torch.testing.assert_close(loss, F.cross_entropy(logits[0], labels))
