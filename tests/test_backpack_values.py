"""Diagonal, dense and Kronecker blocks against BackPACK's own extensions, which know nothing of our sweep.

How BackPACK's values relate to ours, with a loss that sums over the samples and N samples:

* `SumGradSquared` and `DiagGGNExact` are sums over samples, ours are means: theirs divided by N.
* `BatchGrad` has a sample's gradient, of weight and bias apart; ours is one matrix with the bias as its last column.
* `KFLR` and `KFAC` of a linear layer: the factor of outputs is a sum over samples, that of inputs a mean; ours are
  means.
* Of a convolution theirs is the "expand" form, a product of Grams over all positions. Ours is of the whole gradient
  ``J`` of a sample: ``A = n E[J^T J] / tr`` and ``G = E[J J^T] / n`` with n inputs. It is compared with `BatchGrad`.
"""

from __future__ import annotations

import pytest
import torch
from backpack import backpack, extend
from backpack.extensions import KFAC, KFLR, BatchGrad, DiagGGNExact, DiagGGNMC, SumGradSquared
from torch import Tensor, nn

import posthoc_uq as uq

TIGHT = {"rtol": 1e-9, "atol": 1e-12}
SAMPLES, CLASSES, DRAWS = 9, 3, 4_000
LAYERS = {"perceptron": ("0", "2"), "convolutions": ("0", "3", "6")}


def _network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "perceptron":
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2, stride=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    ).double()


def _data(kind: str) -> tuple[Tensor, Tensor]:
    shape = (5,) if kind == "perceptron" else (2, 4, 4)
    torch.manual_seed(1)
    return torch.randn(SAMPLES, *shape, dtype=torch.float64), torch.randint(CLASSES, (SAMPLES,))


def _fit(kind: str, method: uq.Method) -> uq.Posterior:
    x, y = _data(kind)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    return uq.fit(_network(kind), batches, method, prior_precision=1.0, progress=False)


def _extended(kind: str, *extensions: object) -> nn.Sequential:
    """The network after a backward pass with BackPACK's extensions."""
    (x, y), network, loss = _data(kind), extend(_network(kind)), extend(nn.CrossEntropyLoss(reduction="sum"))
    torch.manual_seed(2)
    with backpack(*extensions):
        loss(network(x.requires_grad_()), y).backward()
    return network


def _matrix(layer: nn.Module, value: str, leading: int = 0) -> Tensor:
    """What an extension left at weight and bias as one matrix, the bias as the last column."""
    weight, bias = getattr(layer.weight, value), getattr(layer.bias, value)
    return torch.cat([weight.flatten(leading + 1), bias.unsqueeze(-1)], -1)


@pytest.mark.parametrize("kind", LAYERS)
def test_diagonals(kind: str) -> None:
    network = _extended(kind, SumGradSquared(), DiagGGNExact(), DiagGGNMC(mc_samples=DRAWS))
    empirical, exact = (
        _fit(kind, uq.Diagonal(fisher=fisher, dtype=torch.float64)) for fisher in ("empirical", "exact")
    )
    drawn = _fit(kind, uq.Diagonal(fisher="mc", n_samples=300, dtype=torch.float64))
    for name in LAYERS[kind]:
        layer = network[int(name)]
        squares, diagonal = (
            _matrix(layer, value) / SAMPLES for value in ("sum_grad_squared", "diag_ggn_exact")
        )
        torch.testing.assert_close(empirical.blocks[name].diagonal[0], squares, **TIGHT)
        torch.testing.assert_close(exact.blocks[name].diagonal[0], diagonal, **TIGHT)
        # the mean of our draws is within a few percent of the expectation, and of the mean of theirs
        for mean in (diagonal, _matrix(layer, "diag_ggn_mc") / SAMPLES):
            assert (drawn.blocks[name].diagonal[0] - mean).norm() < 0.05 * mean.norm()


@pytest.mark.parametrize("kind", LAYERS)
def test_dense_and_whole_gradient_factors(kind: str) -> None:
    network = _extended(kind, BatchGrad())
    kronecker = _fit(kind, uq.KFAC(fisher="empirical", keep_grams=True, dtype=torch.float64))
    rows = list[Tensor]()
    for name in LAYERS[kind]:
        gradients = _matrix(network[int(name)], "grad_batch", leading=1)
        rows.append(gradients.flatten(1))
        block = kronecker.blocks[name]
        if block.factors_of == "gradients":
            inputs = gradients.shape[-1]
            of_inputs = torch.einsum("bmi,bmj->ij", gradients, gradients) / SAMPLES
            of_outputs = torch.einsum("bmi,bni->mn", gradients, gradients) / SAMPLES
            expected = torch.kron(of_outputs / inputs, of_inputs * inputs / of_inputs.trace())
            torch.testing.assert_close(block.dense()[0], expected, **TIGHT)
    dense = _fit(kind, uq.Dense(fisher="empirical", dtype=torch.float64))
    (joint,) = dense.blocks.values()
    flat = torch.cat(rows, 1)
    torch.testing.assert_close(joint.dense()[0], flat.T @ flat / SAMPLES, **TIGHT)
    forms = {"perceptron": ("rows", "rows"), "convolutions": ("gradients", "gradients", "rows")}[kind]
    assert tuple(kronecker.blocks[name].factors_of for name in LAYERS[kind]) == forms


@pytest.mark.parametrize("kind", LAYERS)
def test_factors_of_linear_layers(kind: str) -> None:
    network = _extended(kind, KFLR(), KFAC(mc_samples=DRAWS))
    posterior = _fit(kind, uq.KFAC(fisher="exact", keep_grams=True, dtype=torch.float64))
    drawn = _fit(kind, uq.KFAC(fisher="mc", n_samples=300, keep_grams=True, dtype=torch.float64))
    for name in LAYERS[kind]:
        layer, block = network[int(name)], posterior.blocks[name]
        if not isinstance(layer, nn.Linear):
            continue
        outputs, inputs = layer.weight.kflr
        width = layer.in_features
        torch.testing.assert_close(block.output_gram[0], outputs / SAMPLES, **TIGHT)
        torch.testing.assert_close(block.input_gram[0, :width, :width], inputs, **TIGHT)
        torch.testing.assert_close(layer.bias.kflr[0], outputs, **TIGHT)
        size = layer.out_features * width
        ours = block.dense()[0].unflatten(0, (layer.out_features, -1)).unflatten(-1, (layer.out_features, -1))
        ours = ours[:, :width, :, :width].reshape(size, size)
        torch.testing.assert_close(ours, torch.kron(outputs / SAMPLES, inputs), **TIGHT)
        theirs = layer.weight.kfac[0] / SAMPLES
        assert (drawn.blocks[name].output_gram[0] - theirs).norm() < 0.05 * theirs.norm()
