"""Kinds of layers: matrices, rows and gradients against torch's own functions, in float64; and a kind from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inner_kind import inner_known
from networks import batches, short
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.layers import RULES, AffineCall, Layer, Unfolding, affine_call, describe
from posthoc_uq.methods import METHODS

TIGHT = {"rtol": 1e-10, "atol": 1e-11}
SAMPLES = 3

# kind, shape of the weight, of one input, groups, bias, options
CASES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], int, bool, dict[str, Any]]] = {
    "linear": ("linear", (3, 4), (4,), 1, True, {}),
    "linear, positions": ("linear", (3, 4), (5, 4), 1, False, {}),
    "product": ("matmul", (4, 3), (4,), 1, True, {}),
    "1d": ("conv1d", (3, 2, 3), (2, 7), 1, True, {"padding": 1}),
    "1d groups": ("conv1d", (6, 2, 2), (4, 9), 2, False, {"stride": 2, "dilation": 2}),
    "2d same": ("conv2d", (3, 2, 2, 3), (2, 4, 5), 1, True, {"padding": "same"}),
    "2d pointwise": ("conv2d", (3, 2, 1, 1), (2, 4, 5), 1, True, {"stride": (2, 1)}),
    "3d": ("conv3d", (3, 2, 2, 2, 3), (2, 3, 4, 4), 1, True, {"stride": (1, 2, 1), "padding": (1, 0, 1)}),
    "transposed 1d": ("conv_transpose1d", (2, 3, 3), (2, 5), 1, True, {}),
    "transposed 1d strided": (
        "conv_transpose1d",
        (4, 3, 2),
        (4, 5),
        2,
        True,
        {"stride": 3, "padding": 1, "output_padding": 2, "dilation": 2},
    ),
    "transposed 2d up": ("conv_transpose2d", (3, 2, 2, 2), (3, 3, 4), 1, True, {"stride": 2}),
    "transposed 2d groups": (
        "conv_transpose2d",
        (4, 3, 3, 2),
        (4, 4, 3),
        2,
        False,
        {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0)},
    ),
    "transposed 2d cut": ("conv_transpose2d", (2, 2, 1, 1), (2, 4, 4), 1, True, {"padding": 1}),
    "transposed 3d": (
        "conv_transpose3d",
        (2, 3, 2, 1, 2),
        (2, 2, 3, 2),
        1,
        True,
        {"stride": (2, 1, 2), "padding": (0, 0, 1)},
    ),
}
CASE = pytest.mark.parametrize("case", CASES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(case: str) -> tuple[Layer, AffineCall]:
    """The layer, and one call of it."""
    kind, shape, input, groups, bias, options = CASES[case]
    weight, x = normal(*shape), normal(SAMPLES, *input, seed=1)
    outputs = torch.empty(RULES[kind].to_matrix(torch.empty(shape), groups).shape[:2]).numel()
    offset = normal(outputs, seed=2) if bias else None
    layer = describe("layer", kind, ("w", weight), None if offset is None else ("b", offset), groups)
    if RULES[kind].convolutional:
        options = {**options, "groups": groups}
    return layer, AffineCall(kind, x, weight, weight, offset, options=options)


def rows_of(layer: Layer, call: AffineCall) -> Tensor:
    """``(samples, groups, positions, inputs)``; of linear layers by hand."""
    if layer.convolutional:
        return layer.rule.activations(call.input, layer, call.geometry).rows()
    rows = call.input.reshape(SAMPLES, 1, -1, call.input.shape[-1])
    return rows if call.bias is None else F.pad(rows, (0, 1), value=1.0)


def as_rows(layer: Layer, outputs: Tensor) -> Tensor:
    """Outputs of torch's function as ``(samples, groups, positions, outputs)``."""
    if layer.convolutional:
        return outputs.reshape(SAMPLES, layer.groups, layer.outputs, -1).transpose(2, 3)
    return outputs.reshape(SAMPLES, 1, -1, layer.outputs)


@CASE
def test_outputs_are_rows_times_the_matrix(case: str) -> None:
    layer, call = built(case)
    outputs = call.applied(call.input, call.parameter, call.bias)
    matrix = layer.to_matrix(call.parameter, call.bias)
    assert matrix.shape == layer.matrix_shape
    product = torch.einsum("sgti,goi->sgto", rows_of(layer, call), matrix)
    torch.testing.assert_close(product, as_rows(layer, outputs), **TIGHT)


@CASE
def test_rows_and_outputs_go_back(case: str) -> None:
    """Rows without the bias, their transpose by autograd, and rows of outputs there and back."""
    layer, call = built(case)
    rule = layer.rule
    x = call.input.clone().requires_grad_()
    rows = rule.unfold(x, layer, call.geometry)
    assert torch.equal(rows, rows_of(layer, call)[..., : rows.shape[-1]])
    unfolding = Unfolding(lambda x: rule.unfold(x, layer, call.geometry), x.shape[1:], x.device)
    assert torch.equal(unfolding.rows(call.input), rows)
    back = normal(*rows.shape, seed=7)
    torch.testing.assert_close(unfolding.fold(back), torch.autograd.grad(rows, x, back)[0], **TIGHT)
    outputs = call.applied(call.input, call.parameter, call.bias)
    output_rows = rule.output_rows(outputs, layer)
    assert torch.equal(output_rows, as_rows(layer, outputs))
    assert torch.equal(rule.outputs_of_rows(output_rows, outputs.shape[1:]), outputs)


@CASE
def test_parameters_come_back_from_matrices(case: str) -> None:
    layer, call = built(case)
    weights = normal(2, 5, *call.parameter.shape, seed=3)
    biases = None if call.bias is None else normal(2, 5, *call.bias.shape, seed=4)
    matrices = layer.to_matrix(weights, biases)
    assert matrices.shape == (2, 5, *layer.matrix_shape)
    found = layer.to_parameters(matrices)
    assert torch.equal(found["w"], weights)
    assert biases is None or torch.equal(found["b"], biases)
    alone = layer.to_matrix(weights[1, 2], None if biases is None else biases[1, 2])
    assert torch.equal(alone, matrices[1, 2])


@CASE
def test_per_sample_gradients_are_those_of_autograd(case: str) -> None:
    layer, call = built(case)
    weight = call.parameter.clone().requires_grad_()
    bias = None if call.bias is None else call.bias.clone().requires_grad_()
    rows = rows_of(layer, call)
    for sample in range(SAMPLES):
        outputs = call.applied(call.input[sample : sample + 1], weight, bias)
        upstream = normal(*outputs.shape, seed=5)
        wanted = torch.autograd.grad(outputs, [weight] if bias is None else [weight, bias], upstream)
        g = upstream.reshape(1, layer.groups, layer.outputs, -1).transpose(2, 3)
        if not layer.convolutional:
            g = upstream.reshape(1, 1, -1, layer.outputs)
        found = layer.to_parameters(torch.einsum("gto,gti->goi", g[0], rows[sample]))
        for name, expected in zip(layer.parameter_names, wanted, strict=True):
            torch.testing.assert_close(found[name], expected, **TIGHT)


@CASE
def test_torch_s_functions_are_recognised(case: str) -> None:
    _, call = built(case)
    rule = RULES[call.kind]
    for function, roles in rule.functions.items():
        values = {"input": call.input, "weight": call.weight, "bias": call.bias, **call.options}
        if call.kind == "matmul" and ("bias" in roles.values()) != (call.bias is not None):
            continue
        given = {name: values[role] for name, role in roles.items() if role in values}
        positional = next(iter(given)) == next(iter(roles)) and list(given) == list(roles)[: len(given)]
        found = affine_call(
            function, tuple(given.values()) if positional else (), {} if positional else given
        )
        assert found is not None and found.kind == call.kind and found.parameter is call.parameter
        assert found.geometry == call.geometry and found.groups == call.groups


class UNet(nn.Module):
    """Down, up by a transposed convolution, and beside what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.end = nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.cat([x, self.up(torch.tanh(self.down(x)))], dim=1))


@pytest.fixture(scope="module")
def segmented() -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    model, x = UNet().double().eval(), normal(6, 1, 6, 8, seed=6)
    return model, x, batches(x, (x[:, 0] > 0).long())


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """``(outputs, weights)`` of one input, by autograd."""
    outputs, parameters = model(x[None]).flatten(), list(model.parameters())
    grads = [torch.autograd.grad(value, parameters, retain_graph=True) for value in outputs]
    return torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads])


def test_a_transposed_convolution_has_the_fisher_of_the_definition(segmented: Any) -> None:
    model, x, loader = segmented
    posterior = uq.fit(model, loader, "diag", prior_precision=2.0, fisher="exact", progress=False)
    assert set(posterior.layers) == {"down", "up", "end"}
    fisher = 0.0
    for sample in x:
        jac, p = jacobian(model, sample), model(sample[None]).softmax(1)[0].flatten(1)
        jac = jac.reshape(2, -1, jac.shape[-1])  # classes, positions
        # a sample's gradient is the sum over its positions, whose labels are independent
        mean = torch.einsum("ct,ctw->tw", p, jac)
        fisher = fisher + (torch.einsum("ct,ctw->w", p, jac.square()) - mean.square().sum(0))
    variance = torch.cat([posterior.variance()[name].flatten() for name, _ in model.named_parameters()])
    torch.testing.assert_close(variance, 1 / (fisher + 2.0), rtol=1e-8, atol=0)


# function_space and message_passing take a model whose outputs are those of its last linear layer
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"function_space", "message_passing"}))
@pytest.mark.filterwarnings("ignore::UserWarning")  # of trainings that are too short
def test_every_method_and_head_takes_a_transposed_convolution(
    segmented: Any, method: str, tmp_path: Any
) -> None:
    model, x, loader = segmented
    posterior = uq.fit(model, loader, short(method), prior_precision=2.0, progress=False)
    uq.save(posterior, tmp_path / "u.h5")
    loaded = uq.load(tmp_path / "u.h5", model)
    for head in ("linearized", "sampling", "moments"):
        one = uq.wrap(model, posterior, head=head)(x[:2])
        again = uq.wrap(model, loaded, head=head)(x[:2])
        assert one.probs.shape == (2, 2, 6, 8) and torch.equal(one.probs, again.probs)


# A kind from outside of the package


class InnerNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.inner(torch.tanh(self.first(x)), self.last)


@pytest.fixture
def inner() -> Iterator[None]:
    with inner_known():
        yield


def test_a_new_kind_is_one_class(inner: None, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = InnerNetwork().double(), normal(8, 3)
    loader = batches(x, (x.sum(1) > 0).long())
    twin = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()
    twin.load_state_dict(dict(zip(twin.state_dict(), [*model.first.parameters(), model.last], strict=True)))
    for method in ("kfac", "inf", "diag"):
        posterior = uq.fit(model, loader, method, prior_precision=1.0, progress=False)
        same = uq.fit(twin, loader, method, prior_precision=1.0, progress=False)
        assert posterior.layers["last"].kind == "inner"
        uq.save(posterior, tmp_path / "inner.h5")
        posterior = uq.load(tmp_path / "inner.h5", model)
        for head in ("linearized", "moments"):
            found, expected = uq.wrap(model, posterior, head=head)(x), uq.wrap(twin, same, head=head)(x)
            torch.testing.assert_close(found.probs, expected.probs, **TIGHT)
