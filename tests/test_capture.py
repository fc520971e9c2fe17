"""Which engine serves which layer, that what is caught is right, and that nothing is missed in silence."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import timm.layers
import torch
from brute_force import class_losses, class_probabilities, matrix, per_sample, watch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import UnsupportedLayerError
from posthoc_uq.core import Batch
from posthoc_uq.curvature import find_features
from posthoc_uq.layers import CallWatcher, prepare
from posthoc_uq.layers.proof import Exactly, Prepared

SAMPLES = 5
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def _x(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _prepare(model: nn.Module, x: Tensor, selection: Any = "all", **options: Any) -> Prepared:
    return prepare(model.double().eval(), Batch((x,)), selection, **options)


def _engines(model: nn.Module, x: Tensor) -> dict[str, str]:
    return {name: t.engine for name, t in _prepare(model, x).capture.tracked.items()}


def _fit(model: nn.Module, x: Any, method: str = "diag", **options: Any) -> uq.Posterior:
    options = {"dtype": torch.float64, "prior_precision": 1.0, "progress": False, "fisher": "exact"} | options
    return uq.fit(model, x if isinstance(x, (list, tuple)) else [x], method=method, **options)


def _diagonals(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Exact Fisher diagonals by parameter, from autograd on one sample at a time; leaves no mark on the
    model.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    probs = class_probabilities(model, x)
    totals = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for s in range(x.shape[0]):
        for k, loss in enumerate(class_losses(model(x[s : s + 1]), s)):
            found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
            for name, g in zip(parameters, found, strict=True):
                if g is not None:
                    totals[name] += probs[s, k] * g**2 / x.shape[0]
    return totals


def _check_diagonals(model: nn.Module, x: Tensor, *, covered: int) -> uq.Posterior:
    """Every covered layer's diagonal against brute force, and how many parameters are covered."""
    model.double().eval()
    expected, posterior = _diagonals(model, x), _fit(model, x.split(2))
    seen = 0
    for name, layer in posterior.layers.items():
        for parameter, found in layer.to_parameters(posterior.blocks[name].diagonal).items():
            torch.testing.assert_close(found, expected[parameter], **TIGHT)
            seen += 1
    assert seen == covered
    return posterior


class Block(nn.Module):
    """A residual block as torchvision writes it, in-place ReLUs and all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def test_a_residual_network_goes_through_backpack() -> None:
    model, x = _resnet(), _x(3, 6, 6)
    engines = _engines(model, x)
    assert engines.pop("0") == "hooks"  # its input needs no gradient, so BackPACK has nothing to hang on to
    assert engines == {"3.conv1": "backpack", "3.conv2": "backpack", "6": "backpack"}
    posterior = _check_diagonals(model, x, covered=6)
    assert all("BatchNorm2d" in why for name, why in posterior.report().deterministic.items() if "bn" in name)
    assert {"3.bn1.weight", "1.bias"} <= set(posterior.report().deterministic)


def test_an_inplace_activation_right_after_the_layer_is_served_by_hooks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(True),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(True),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.ReLU(True),
        nn.Linear(5, 3),
    )
    x = _x(3, 6, 6)
    assert _engines(model, x) == {"0": "hooks", "2": "hooks", "5": "hooks", "7": "backpack"}
    _check_diagonals(model, x, covered=8)


class ChangedInput(nn.Module):
    """Changes a frozen layer's input in place after the layer has used it, which autograd allows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.readout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out = self.layer(hidden)
        hidden.mul_(0.5).add_(1.0)
        return self.readout(torch.tanh(out) + hidden)


def test_an_input_changed_in_place_after_use_is_copied_in_time() -> None:
    torch.manual_seed(0)
    model, x = ChangedInput().double(), _x(4)
    posterior = _fit(model, x.split(2))
    inputs = model.first(x).detach()
    jacobian = torch.stack(
        [(1 - torch.tanh(model.layer(row)) ** 2) * model.readout.weight for row in inputs]
    ).detach()
    probs = class_probabilities(model, x)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for s in range(SAMPLES):
        for k in range(3):
            gradient = (probs[s] - torch.eye(3, dtype=torch.float64)[k]) @ jacobian[s]
            expected += probs[s, k] * torch.outer(gradient, inputs[s]) ** 2 / SAMPLES
    torch.testing.assert_close(posterior.blocks["layer"].diagonal[0, :, :-1], expected, **TIGHT)


def test_batch_norm_and_dropout_are_in_eval_mode() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)),
        _x(4),
    )
    model.double()
    with torch.no_grad():
        model[1].running_mean.add_(0.3)
        model[1].running_var.mul_(2.0)
    expected = _diagonals(model.eval(), x)
    found = _fit(model.train(), [x]).blocks["0"].diagonal
    torch.testing.assert_close(found[0, :, :-1], expected["0.weight"], **TIGHT)


def test_frozen_parameters_are_covered() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), _x(4)
    expected = _diagonals(model, x)
    model.requires_grad_(False)
    posterior = _fit(model, [x])
    for name in ("0", "2"):
        torch.testing.assert_close(
            posterior.blocks[name].diagonal[0, :, :-1], expected[f"{name}.weight"], **TIGHT
        )
    assert not any(p.requires_grad for p in model.parameters())


def test_timm_convolution_with_tensorflow_padding() -> None:
    torch.manual_seed(0)
    conv = timm.layers.Conv2dSame(3, 4, 3, stride=2)
    _check_diagonals(nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)), _x(3, 5, 6), covered=4)


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.batch_first = nn.Linear(4, 4), batch_first
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.readout = nn.Linear(4, 3)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.readout(x.mean(1 if self.batch_first else 0))


@pytest.mark.parametrize("tokens", [3, SAMPLES])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(batch_first: bool, tokens: int) -> None:
    torch.manual_seed(0)
    posterior = _check_diagonals(Attention(batch_first), _x(tokens, 4), covered=8)
    assert {"attention.in_proj_weight", "attention.out_proj"} <= set(posterior.layers)


@pytest.mark.parametrize("first", [1, 2])
def test_a_small_first_batch_does_not_hide_where_the_samples_are(first: int) -> None:
    torch.manual_seed(0)
    model, x = Attention(batch_first=False).double().eval(), _x(4, 4)
    whole = _fit(model, [x])
    parts = _fit(model, [x[:first], x[first:]])
    for name, block in whole.blocks.items():
        torch.testing.assert_close(parts.blocks[name].diagonal, block.diagonal, **TIGHT)


def test_a_model_that_takes_one_sample_at_a_time() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.reshape(1, 4))

    torch.manual_seed(0)
    model, x = Single().double(), _x(4)
    posterior = _fit(model, x.split(1))
    torch.testing.assert_close(
        posterior.blocks["layer"].diagonal[0, :, :-1], _diagonals_of_single(model, x), **TIGHT
    )


def _diagonals_of_single(model: nn.Module, x: Tensor) -> Tensor:
    found = [_diagonals(model, row[None])["layer.weight"] for row in x]
    return torch.stack(found).mean(0)


def test_a_transformer_encoder_layer_in_eval_mode() -> None:
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.readout = (
                nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
                nn.Linear(4, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.readout(self.encoder(x).mean(1))

    posterior = _check_diagonals(Encoder(), _x(3, 4), covered=10)
    assert "LayerNorm" in posterior.report().deterministic["encoder.norm1.weight"]


class Windows(nn.Module):
    """Swin-like: cut into windows that go to the leading dimension, sample by sample, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        windows = x.reshape(batch, 2, 2, 2, 2, 4).transpose(2, 3).reshape(batch * 4, 4, 4)
        return self.readout(torch.tanh(self.layer(windows)).reshape(batch, -1, 4).mean(1))


def test_windows_in_the_leading_dimension() -> None:
    torch.manual_seed(0)
    _check_diagonals(Windows(), _x(4, 4, 4), covered=4)


class WindowsFirst(Windows):
    """Windows first, samples second: in the leading dimension the samples vary fastest."""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        windows = x.reshape(batch, 4, 4, 4).transpose(0, 1).reshape(4 * batch, 4, 4)
        return self.readout(torch.tanh(self.layer(windows)).reshape(4, batch, 4, 4).mean((0, 2)))


def test_windows_before_samples_in_the_leading_dimension() -> None:
    torch.manual_seed(0)
    _check_diagonals(WindowsFirst(), _x(4, 4, 4), covered=4)


class Mixed(Windows):
    """Windows of all samples in an order without pattern."""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        order = torch.randperm(4 * batch, generator=torch.Generator().manual_seed(0))
        windows = torch.empty(4 * batch, 4, 4, dtype=x.dtype)
        windows[order] = x.reshape(4 * batch, 4, 4)
        return self.readout(torch.tanh(self.layer(windows))[order].reshape(batch, -1, 4).mean(1))


def test_samples_that_cannot_be_told_apart_are_an_error_and_not_a_wrong_number() -> None:
    torch.manual_seed(0)
    x = _x(4, 4, 4)
    y = torch.arange(len(x)) % 3
    with pytest.raises(UnsupportedLayerError, match="'layer'"):
        uq.fit(Mixed().double(), [(x, y)], method="utvi", epochs=1, unsupported="raise", progress=False)
    with pytest.warns(UserWarning, match="Not caught: 'layer': "):
        posterior = uq.fit(Mixed().double(), [(x, y)], method="utvi", epochs=1, progress=False)
    assert list(posterior.layers) == ["readout"]
    assert "skipped" in posterior.report().deterministic["layer.weight"]
    assert _check_diagonals(Mixed(), x, covered=4).layers["layer"].kind == "parameter2d"


def test_autocast_is_served_by_hooks_and_close_to_float32() -> None:
    model, x = _resnet().float().eval(), _x(3, 6, 6).float()
    plain = _fit(model, [x], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = _fit(model, [x], dtype=torch.float32)
    assert cast.report().summary["layers caught by BackPACK"] == 0
    assert plain.report().summary["layers caught by BackPACK"] > 0
    for name, block in plain.blocks.items():
        assert cast.blocks[name].diagonal.dtype == torch.float32
        error = torch.linalg.vector_norm(cast.blocks[name].diagonal - block.diagonal)
        assert 0 < error < 0.05 * torch.linalg.vector_norm(block.diagonal)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_layer_that_is_never_called_is_listed_and_not_an_error() -> None:
    torch.manual_seed(0)
    posterior = _check_diagonals(Unused(), _x(4), covered=2)
    assert "not used" in posterior.report().deterministic["spare.weight"]
    assert "spare" in str(posterior.report())


class ByElements(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return (input.unsqueeze(1) * self.weight).sum(-1) + self.bias


class Summed(nn.Module):
    """Two layers without biases, as sums over named dimensions or as products."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.sums = (
            nn.Parameter(torch.randn(4, 5)),
            nn.Parameter(torch.randn(3, 5)),
            sums,
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.sums:
            return nn.functional.linear(torch.tanh(x @ self.first), self.second)
        hidden = torch.einsum("bi,io->ob", x, self.first)
        return torch.einsum("oi,ib->bo", self.second, torch.tanh(hidden))


class Embedded(nn.Module):
    """An output layer that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.readout = (
            nn.Embedding(3, 4),
            nn.Linear(4, 3, bias=False),
            nn.Linear(4, 4),
        )
        self.layer.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.readout(self.embedding(tokens).mean(1))))


def _tokens() -> Tensor:
    return torch.randint(0, 3, (SAMPLES, 4), generator=torch.Generator().manual_seed(0))


def test_weights_that_cannot_be_followed_are_named_or_skipped() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), ByElements(4, 3)).double(), _x(4)
    data: dict[str, Any] = {"method": "utvi", "epochs": 1, "progress": False}
    with pytest.raises(UnsupportedLayerError, match=r"'2'.*unsupported='skip'"):
        uq.fit(net, [(x, torch.arange(len(x)) % 3)], unsupported="raise", **data)
    posterior = uq.fit(net, [(x, torch.arange(len(x)) % 3)], **data)
    assert len(posterior.layers) == 1
    skipped = {name for name, why in posterior.report().deterministic.items() if "skipped" in why}
    covered = {name for layer in posterior.layers.values() for name in layer.parameter_names}
    assert skipped and not skipped & covered
    assert _check_diagonals(net, x, covered=4).layers["2"].kind == "parameter2d"


def test_sums_with_a_matrix_are_products() -> None:
    x, terms = _x(2, 4), ("bti,io->bto", "...i,oi->...o", "bti,oi->obt", "bti,oi->bto")
    for equation in (*terms, "bti,bti->b", "bti,io->b", "bti,io->btio"):
        matrix = nn.Parameter(_x(4)[:4] if "oi" not in equation else _x(4)[:3])
        matrix = nn.Parameter(x) if equation.startswith("bti,bti") else matrix
        seen: list[Any] = []
        with CallWatcher(None, lambda call, output, seen=seen: seen.append(call), anchored=False):
            found = torch.einsum(equation, x, matrix)
        torch.testing.assert_close(found, torch.einsum(equation, x, matrix))
        assert len(seen) == (equation in terms)
    sums, products = (Summed(each).double() for each in (True, False))
    posteriors = [_fit(model, [_x(4)]) for model in (sums, products)]
    for name in ("first", "second"):
        torch.testing.assert_close(posteriors[0].variance()[name], posteriors[1].variance()[name])


def _four() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        nn.Tanh(),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
    ).double()


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("all", ["0.0", "0.2", "2.0", "2.1"]),
        ("last", ["2.1"]),
        (["0.2", "2.0"], ["0.2", "2.0"]),
        ("0", ["0.0", "0.2"]),
        (["2"], ["2.0", "2.1"]),
        ("?.0", ["0.0", "2.0"]),
        (["*.2", "2*"], ["0.2", "2.0", "2.1"]),
        (lambda name, module: name.endswith("0") and isinstance(module, nn.Linear), ["0.0", "2.0"]),
    ],
)
def test_selection(selection: Any, expected: list[str]) -> None:
    posterior = _fit(_four(), [_x(4)], layers=selection)
    assert list(posterior.layers) == expected
    left = {f"{name}.weight" for name in ("0.0", "0.2", "2.0", "2.1")} - set(posterior.mean)
    assert left == {n for n in posterior.report().deterministic if n.endswith("weight")}
    truth = per_sample(
        posterior.model, watch(posterior.model.get_submodule(expected[0])), _x(4), class_losses
    )
    diagonal = truth.diagonal(class_probabilities(posterior.model, _x(4)))
    torch.testing.assert_close(posterior.blocks[expected[0]].diagonal, diagonal, **TIGHT)


def test_the_layer_view_goes_there_and_back() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (2, 3), groups=2).double()
    layer = _fit(nn.Sequential(conv, nn.Flatten(), nn.Linear(36, 3)).double(), [_x(4, 3, 5)]).layers["0"]
    view = layer.to_matrix(conv.weight, conv.bias)
    torch.testing.assert_close(view, matrix(watch(conv), conv.weight, conv.bias), rtol=0, atol=0)
    back = layer.to_parameters(torch.stack([view, 2 * view]))
    assert torch.equal(back["0.weight"], torch.stack([conv.weight, 2 * conv.weight]))
    assert torch.equal(back["0.bias"][1], 2 * conv.bias)


def test_a_fit_forgets_each_batch_when_it_is_done() -> None:
    # The graph of a batch, its hooks and what they hold form a circle that the garbage collector cannot see.
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 4))
    alive: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            for index in range(6):
                gc.collect()
                alive.append(sum(isinstance(found, Tensor) and found.ndim == 4 for found in gc.get_objects()))
                yield torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(index))

    gc.collect()
    gc.freeze()  # what was there before is not looked at
    try:
        uq.fit(net, Loader(), method="diag", prior_precision=1.0, progress=False)
    finally:
        gc.unfreeze()
    sweep = alive[-6:]
    assert sweep[5] <= sweep[2]


class _Hidden(nn.Module):
    """Two layers with something between them, or before them, or after."""

    def __init__(self, between: Any = torch.relu, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(4, 6), nn.Linear(6, 3)
        self.between, self.before, self.after = between, before, after

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lower(x if self.before is None else self.before(x))
        outputs = self.upper(self.between(hidden))
        return outputs if self.after is None else self.after(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [1, 2, 5])
def test_rounding_is_no_dependence(dtype: torch.dtype, samples: int) -> None:
    """Outputs that are small differences of large numbers are rounded otherwise in a batch of another size."""
    model = _Hidden(after=lambda outputs: (outputs + 3e3 - 3e3).squeeze()).to(dtype).eval()
    prepare(model, Batch((_x(4)[:samples].to(dtype),)))
    wide = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 1)).to(dtype).eval()
    with torch.no_grad():
        wide[2].bias -= wide(_x(4)[:1].to(dtype)).squeeze()  # nearly nothing is left of the first output
    prepare(wide, Batch((_x(4)[:samples].to(dtype),)))


@pytest.mark.parametrize("method", ["diag", "kfac", "inf", "utvi"])
def test_a_model_that_changes_its_inputs_in_place(method: str) -> None:
    """It runs on copies: the posterior is that of the same function, and the data stay."""
    data = [(_x(4).clone(), torch.arange(SAMPLES) % 3) for _ in range(2)]
    before, found = [x.clone() for x, _ in data], list[uq.Posterior]()
    for change in (lambda x: x.add_(0.5), lambda x: x + 0.5):
        torch.manual_seed(0)
        model = _Hidden(before=change).double().eval()
        options: dict[str, Any] = {"epochs": 1} if method == "utvi" else {"prior_precision": 1.0}
        found.append(uq.fit(model, data, method, progress=False, **options))
    assert all(torch.equal(x, kept) for (x, _), kept in zip(data, before, strict=True))
    for name, variance in found[0].variance().items():
        assert torch.equal(variance, found[1].variance()[name])


def test_what_the_dry_run_costs() -> None:
    """Two forward passes of one sample, and one of the first batch, more than finding the layers and proving them; of a
    model that was fitted none of these. What it finds is not looked for again.
    """
    rows = list[int]()

    def counted(x: Tensor) -> Tensor:
        rows.append(len(x))
        return x

    model, batch = _Hidden(before=counted).double().eval(), Batch((_x(4),))
    prepared = prepare(model, batch)
    assert sorted(rows) == [1, 1, 2, 2, 2, SAMPLES]
    rows.clear()
    features = find_features(prepared, batch)
    assert features is not None and sorted(rows) == [1, 1, 2]
    rows.clear()
    known = prepare(model, batch, Exactly(prepared.layers), independent=True)
    assert known.layers == prepared.layers and rows == [2, 2, 2]


def test_gradients_are_caught_without_a_first_layer_that_cannot_be_followed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x) + self.first.weight.square().sum(1))
            return self.third(torch.tanh(self.second(hidden)))

    x, caught = _x(4), list[str]()
    prepared = _prepare(Twice(), x, unsupported="skip", by_gradients=False)
    recording = prepared.capture.run(Batch((x,)), SAMPLES)
    pull = torch.ones_like(recording.outputs)
    recording.pull_back(pull, lambda of_layer: caught.append(of_layer.layer.name), last=True)
    assert sorted(caught) == ["second", "third"] == list(prepared.layers)


def test_a_dry_run_keeps_no_gradients() -> None:
    """They take as much memory as the model."""
    model = nn.Sequential(nn.Linear(4, 37), nn.Tanh(), nn.Linear(37, 2)).eval()
    prepared, own = prepare(model, Batch((_x(4).float(),))), model[0].weight.data_ptr()
    kept = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (37, 4) and t.data_ptr() != own]
    assert prepared.layers and not kept


def test_one_dry_run_serves_a_fit_and_its_first_prediction() -> None:
    """The head that searches a prior, and that of a prediction, take what the fit proved; of inputs of another form, or
    of a model that was changed, it is proved again.
    """
    rows = list[int]()

    def counted(x: Tensor) -> Tensor:
        rows.append(len(x))
        return x.flatten(1)

    model, x = _Hidden(before=counted).double().eval(), _x(4)
    posterior = uq.fit(model, [(x, torch.arange(SAMPLES) % 3)], "kfac", prior_precision=1.0, progress=False)

    def passes(x: Tensor) -> list[int]:
        predictor = uq.wrap(model, posterior)
        rows.clear()
        predictor(x)
        return rows

    assert passes(_x(4)[:3]) == [3]
    assert passes(_x(4)[:3].unsqueeze(1)) == [2, 2, 2, 3]
    model.register_forward_hook(lambda module, args, outputs: outputs)
    assert passes(_x(4)[:3]) == [2, 2, 2, 3]
