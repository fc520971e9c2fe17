"""Weights that enter as a factor of a product: transposed linear layers, and ``x @ W``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from brute_force import class_losses, class_probabilities
from networks import without_training
from torch import Tensor, nn

import posthoc_uq as uq

TIGHT = {"rtol": 1e-9, "atol": 1e-12}
INPUTS = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
OPTIONS: dict[str, Any] = {
    "dtype": torch.float64,
    "prior_precision": 1.0,
    "progress": False,
    "fisher": "exact",
}


class Conv1D(nn.Module):
    """A linear layer whose weight has its inputs first, as GPT-2's has; applied to all positions as rows."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        size = x.size()[:-1] + (self.weight.shape[1],)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Product(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TurnedProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight.T) + self.bias


class TurnedLinear(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.t(), self.bias)


class Net(nn.Module):
    """Two layers of a kind around a ReLU, a mean over the positions, and a plain linear layer."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.readout = make(5, 4), make(3, 5), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.second(torch.relu(self.first(x))).mean(1))


def _net(make: Any) -> Net:
    return Net(make).double().eval()


def _plain(net: Net) -> Net:
    """The same function with `nn.Linear` in place of every `Conv1D`."""
    plain = _net(lambda outputs, inputs: nn.Linear(inputs, outputs))
    with torch.no_grad():
        for name in ("first", "second"):
            plain.get_submodule(name).weight.copy_(net.get_submodule(name).weight.T)
            plain.get_submodule(name).bias.copy_(net.get_submodule(name).bias)
        plain.readout.load_state_dict(net.readout.state_dict())
    return plain


def _fit(net: nn.Module, method: str = "diag", **options: Any) -> uq.Posterior:
    return uq.fit(net, INPUTS.split(2), method=method, **(OPTIONS | options))


def _dense_fisher(net: nn.Module, names: list[str]) -> Tensor:
    """The exact Fisher of these parameters, as the model holds them, by autograd on one sample at a time."""
    parameters = dict(net.named_parameters())
    chosen, probs = [parameters[name] for name in names], class_probabilities(net, INPUTS)
    total = torch.zeros(1, dtype=torch.float64)
    for s in range(len(INPUTS)):
        for k, loss in enumerate(class_losses(net(INPUTS[s : s + 1]), s)):
            found = torch.autograd.grad(loss, chosen, retain_graph=True)
            row = torch.cat([g.flatten() for g in found])
            total = total + probs[s, k] * torch.outer(row, row) / len(INPUTS)
    return total


@pytest.mark.parametrize(
    ("make", "bias"),
    [
        (Conv1D, True),
        (Product, False),
        (lambda outputs, inputs: TurnedProduct(inputs, outputs), False),
        (TurnedLinear, True),
    ],
    ids=["addmm", "matmul", "matmul with the transpose", "linear with the transpose"],
)
def test_a_product_with_a_weight_has_the_curvature_of_a_dense_computation(make: Any, bias: bool) -> None:
    net = _net(make)
    posterior = _fit(net, "full", layers=["second"])
    layer = posterior.layers["second"]
    assert layer.parameter_names == ["second.weight", "second.bias"][: 1 + bias]
    dense = _dense_fisher(net, layer.parameter_names)
    covariance = torch.linalg.inv(dense * posterior.scale + torch.eye(len(dense)))
    variance = torch.cat([posterior.variance()[name].flatten() for name in layer.parameter_names])
    torch.testing.assert_close(variance, covariance.diagonal(), rtol=1e-6, atol=1e-9)
    diagonal = layer.to_parameters(_fit(net, layers=["second"]).blocks["second"].diagonal)
    found = torch.cat([diagonal[name].flatten() for name in layer.parameter_names])
    torch.testing.assert_close(found, dense.diagonal(), **TIGHT)


@pytest.mark.parametrize("method", without_training())
def test_a_transposed_layer_predicts_as_the_linear_layer_that_it_is(method: str, tmp_path: Path) -> None:
    net = _net(Conv1D)
    plain = _plain(net)
    posterior, expected = _fit(net, method), _fit(plain, method)
    assert list(posterior.layers) == ["first", "second", "readout"]
    assert [layer.kind for layer in posterior.layers.values()] == ["matmul", "matmul", "linear"]
    for name, variance in posterior.variance().items():
        other = expected.variance()[name]
        turned = other.T if name in ("first.weight", "second.weight") else other
        torch.testing.assert_close(variance, turned, rtol=1e-6, atol=1e-9)
    uq.save(posterior, tmp_path / "p.h5")
    posterior = uq.load(tmp_path / "p.h5", net)
    heads: list[tuple[str, dict[str, Any]]] = [
        ("linearized", {}),
        ("moments", {"weights": "marginal"}),  # by rows only for inputs without positions, which addmm gets
    ]
    if method not in ("kfac", "efb"):  # whose draws depend on a basis that rounding turns
        heads += [("linearized", {"engine": "jvp", "n_probes": 4}), ("sampling", {"n_samples": 4})]
    for head, options in heads:
        found = uq.wrap(net, posterior, head, **options)(INPUTS)
        same = uq.wrap(plain, expected, head, **options)(INPUTS)
        torch.testing.assert_close(found.probs, same.probs, rtol=1e-5, atol=1e-7)
