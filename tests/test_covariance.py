"""Every covariance of weights, as an operator, against a dense matrix in float64 written from the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from posterior_helpers import SCALE, TAU, build, dense_fisher, random_gradients, statistics
from torch import Tensor

from posthoc_uq.layers import Layer, Rows
from posthoc_uq.posteriors import (
    Covariance,
    EigenvalueCorrectedBlock,
    InformationBlock,
    KroneckerBlock,
    LayerRows,
    MeanFieldBlock,
    Mode,
    PrecisionSettings,
    SubnetworkBlock,
    WideEigenvalueCorrectedBlock,
    WideKroneckerBlock,
    packed,
    precise_values,
)

OUTPUTS, INPUTS, SAMPLES, FUNCTIONS = 4, 5, 3, 2
DOUBLE = torch.float64
OMEGA = 0.7
CLOSE = {"rtol": 1e-8, "atol": 1e-11}


class Hidden(Covariance):
    """One that is known by its quadratic forms alone."""

    def __init__(self, inner: Covariance) -> None:
        self._inner = inner

    def quadratic(self, jacobians: Tensor) -> Tensor:
        return self._inner.quadratic(jacobians)


def of_block(kind: str, groups: int) -> tuple[Covariance, Tensor]:
    """A covariance, and the dense matrix ``(weights, weights)``."""
    stats = statistics(random_gradients(groups, OUTPUTS, INPUTS))
    settings = PrecisionSettings(SCALE, TAU, OMEGA)
    weights = groups * OUTPUTS * INPUTS
    if kind == "mean_field":
        variances = stats["d"] + 0.1
        block = MeanFieldBlock(variances, 10)
        return block.covariance(PrecisionSettings(20.0, 1.0)), (variances / 2).flatten().diag()
    if kind == "subnetwork":
        chosen = torch.arange(weights) % 3 == 0
        fisher = torch.block_diag(*stats["fisher"])[chosen][:, chosen]
        sigma = torch.zeros(weights, weights, dtype=DOUBLE)
        places = chosen.nonzero().flatten()
        sigma[places.unsqueeze(1), places] = torch.linalg.inv(
            SCALE * fisher + TAU * torch.eye(len(fisher), dtype=DOUBLE)
        )
        return SubnetworkBlock(fisher, packed(chosen), weights).covariance(settings), sigma
    if kind == "kfac_wide":  # two of the outputs' directions, and one eigenvalue for the others
        bases = [
            torch.linalg.qr(normals(groups, size, kept, seed=size)).Q
            for size, kept in ((INPUTS, 5), (OUTPUTS, 2))
        ]
        values = [normals(groups, kept, seed=kept).square() for kept in (5, 2)]
        rest = torch.tensor([0.3, 0.0], dtype=DOUBLE)[:groups]
        block = WideKroneckerBlock(*bases, *values, rest)
        factors = [
            basis @ torch.diag_embed(each) @ basis.mT for basis, each in zip(bases, values, strict=True)
        ]
        outside = torch.eye(OUTPUTS, dtype=DOUBLE) - bases[1] @ bases[1].mT
        factors[1] = factors[1] + rest[:, None, None] * outside
        fisher = torch.block_diag(
            *(torch.kron(of_outputs, of_inputs) for of_inputs, of_outputs in zip(*factors, strict=True))
        )
        torch.testing.assert_close(torch.block_diag(*block.dense()), fisher)
        return block.covariance(settings), torch.linalg.inv(
            SCALE * fisher + TAU * torch.eye(weights, dtype=DOUBLE)
        )
    if kind == "efb_wide":
        bases = [
            torch.linalg.qr(normals(groups, size, kept, seed=size)).Q
            for size, kept in ((INPUTS, INPUTS), (OUTPUTS, 2))
        ]
        values, rest = normals(groups, 2, INPUTS).square(), normals(groups, INPUTS, seed=1).square()
        block = WideEigenvalueCorrectedBlock(*bases, values, rest)
        vectors = torch.einsum("gop,giq->goipq", bases[1], bases[0]).flatten(1, 2).flatten(2)
        outside = torch.eye(OUTPUTS, dtype=DOUBLE) - bases[1] @ bases[1].mT
        others = bases[0] @ torch.diag_embed(rest) @ bases[0].mT
        fisher = torch.block_diag(
            *(
                own * of_own.flatten() @ own.mT + torch.kron(of_outputs, of_inputs)
                for own, of_own, of_outputs, of_inputs in zip(vectors, values, outside, others, strict=True)
            )
        )
        torch.testing.assert_close(torch.block_diag(*block.dense()), fisher)
        return block.covariance(settings), torch.linalg.inv(
            SCALE * fisher + TAU * torch.eye(weights, dtype=DOUBLE)
        )
    name, *choices = kind.split()
    correction, rank = choices or ("rescale", 12)
    block = build(name, stats, int(rank), correction)
    fisher = torch.block_diag(*dense_fisher(name, block, stats, OMEGA))
    sigma = torch.linalg.inv(SCALE * fisher + TAU * torch.eye(weights, dtype=DOUBLE))
    return block.covariance(settings), sigma


CASES: dict[str, Callable[[int], tuple[Covariance, Tensor]]] = {
    kind: lambda groups, kind=kind: of_block(kind, groups)
    for kind in (
        "diagonal",
        "kfac",
        "kfac_wide",
        "efb",
        "efb_wide",
        "inf rescale 1",
        "inf rescale 12",
        "inf clamp 12",
        "inf none 12",
        "inf rescale 126",
        "dense",
        "mean_field",
        "subnetwork",
    )
}


def hidden(groups: int) -> tuple[Covariance, Tensor]:
    covariance, sigma = of_block("efb", groups)
    return Hidden(covariance), sigma


CASES["quadratic forms"] = hidden


def made(case: str, groups: int) -> tuple[Covariance, Tensor, Layer, tuple[int, int, int]]:
    """A covariance ready for float64, the dense matrix, the layer, and the shape of the block."""
    covariance, sigma = CASES[case](groups)
    layer = Layer("layer", "conv2d", "w", None, groups, OUTPUTS, INPUTS, (groups * OUTPUTS, INPUTS, 1, 1))
    whole = (1, 1, layer.parameters) if case in ("dense", "subnetwork") else layer.matrix_shape
    return covariance.prepared(DOUBLE, torch.device("cpu"), 2000), sigma, layer, whole


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_the_weights(case: str, groups: int) -> None:
    covariance, sigma, layer, whole = made(case, groups)
    jacobians = normals(6, *whole)
    expected = jacobians.flatten(1) @ sigma @ jacobians.flatten(1).T
    torch.testing.assert_close(covariance.quadratic(jacobians), expected, **CLOSE)
    whitened = covariance.whiten(jacobians)
    torch.testing.assert_close(whitened @ whitened.T, expected, **CLOSE)
    if case == "quadratic forms":
        return
    torch.testing.assert_close(covariance.variance().flatten(), sigma.diagonal(), **CLOSE)
    drawn = covariance.transform(torch.eye(layer.parameters, dtype=DOUBLE).reshape(-1, *whole)).flatten(1)
    torch.testing.assert_close(drawn.T @ drawn, sigma, **CLOSE)
    like, seeds = torch.empty(whole, dtype=DOUBLE), [130, 3, 5, 4, *range(64, 128), 131]
    many = covariance.draws(seeds, like)
    for place in (0, 1, 2, 10, 68):  # whole groups, parts of them, and in another order
        assert torch.equal(covariance.draws(seeds[place : place + 1], like)[0], many[place])
    assert len(many.flatten(1).unique(dim=0)) == len(seeds) or not sigma.any()
    uncertain = sigma.diagonal() > 0
    expected = -torch.logdet(sigma[uncertain][:, uncertain])
    torch.testing.assert_close(covariance.log_determinant(), expected, **CLOSE)


@pytest.mark.parametrize("mode", ["variance", "covariance", "joint"])
@pytest.mark.parametrize("positions", [1, 2, 40])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.covering(2)
def test_contractions_of_jacobians(case: str, groups: int, positions: int, mode: Mode) -> None:
    """Of one position, by pairs of a few, and by the Jacobian of many; and beside a prior."""
    covariance, sigma, layer, _ = made(case, groups)
    activations = normals(SAMPLES, groups, positions, INPUTS, seed=1)
    gradients = normals(SAMPLES, groups, FUNCTIONS, OUTPUTS, positions, seed=2)
    jacobian = torch.einsum("sgkot,sgti->skgoi", gradients, activations).flatten(2)
    rows = {"layer": LayerRows(Rows(activations), gradients)}
    (found,) = precise_values([covariance.contract([layer], rows, mode)])
    pairs = torch.einsum("skp,pq,tlq->sktl", jacobian, sigma, jacobian)
    own = torch.stack([pairs[s, :, s] for s in range(SAMPLES)])
    expected = {
        "variance": own.diagonal(dim1=1, dim2=2),
        "covariance": own,
        "joint": pairs.reshape(SAMPLES * FUNCTIONS, -1),
    }
    torch.testing.assert_close(found, expected[mode], **CLOSE)
    if mode == "variance":
        sums = covariance.against_prior([layer], rows, {"layer": 3.0}, False)
        torch.testing.assert_close(sums[0], expected[mode].sum(1), **CLOSE)
        torch.testing.assert_close(sums[1], 3 * jacobian.square().sum((1, 2)), **CLOSE)


@pytest.mark.parametrize(("positions", "samples"), [(1, 9), (1, 400), (3, 9), (40, 9)])
def test_a_low_rank_of_any_size_in_float32(positions: int, samples: int) -> None:
    """Eigenvalues from those that leave 1e-5 of a variance to those that change no digit of it, which are left out;
    many samples of one position by the covariance of the layer's weights.
    """
    outputs, inputs = 6, 7
    bases = [torch.linalg.qr(normals(1, size, 5, seed=size)).Q for size in (inputs, outputs)]
    eigenvalues = torch.logspace(5, -16, 25, dtype=DOUBLE).reshape(1, 5, 5)
    vectors = torch.einsum("oq,ip->oiqp", bases[1][0], bases[0][0])
    low_rank = (vectors.square() * eigenvalues[0]).sum((2, 3))
    exact = InformationBlock(bases[0], bases[1], eigenvalues, low_rank.unsqueeze(0) * 1.1, "rescale")
    tensors = (tensor.float() for tensor in exact.tensors().values())
    block = InformationBlock(*tensors, correction="rescale")
    sigma = torch.linalg.inv(exact.dense(2.0)[0] + 0.5 * torch.eye(outputs * inputs, dtype=DOUBLE))
    activations = normals(samples, 1, positions, inputs)
    gradients = normals(samples, 1, 2, outputs, positions, seed=1)
    jacobian = torch.einsum("sgkot,sgti->skgoi", gradients, activations).flatten(2)
    layer = Layer("layer", "linear", "w", None, 1, outputs, inputs, (outputs, inputs))
    covariance = block.covariance(PrecisionSettings(2.0, 0.5)).prepared(
        torch.float32, torch.device("cpu"), 2**20
    )
    rows = {"layer": LayerRows(Rows(activations.float()), gradients.float())}
    (found,) = precise_values([covariance.contract([layer], rows, "covariance")])
    expected = jacobian @ sigma @ jacobian.mT
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    relative = (found - expected) / (scale.unsqueeze(2) * scale.unsqueeze(1))
    assert relative.abs().max() < 2e-5


def kronecker(smallest: float, table: bool = False) -> Any:
    """KFAC of 48 outputs and 64 inputs, in float32: variances are from `smallest` times the largest on. A `table` has
    an eigenvalue of its own for every pair of directions, as EFB has.
    """
    values = [torch.logspace(0, -6, size) for size in (64, 48)]
    bases = [torch.linalg.qr(normals(1, size, size, seed=size)).Q.float() for size in (64, 48)]
    largest = torch.ones(()) / smallest - 1
    if table:
        block: KroneckerBlock | EigenvalueCorrectedBlock = EigenvalueCorrectedBlock(
            *bases, largest * normals(1, 48, 64).square().float()
        )
    else:
        block = KroneckerBlock(*bases, values[0].unsqueeze(0), largest * values[1].unsqueeze(0))
    covariance = block.covariance(PrecisionSettings(1.0, 1.0))
    return covariance.prepared(torch.float32, torch.device("cpu"), 2**20)


@pytest.mark.parametrize("mode", ["variance", "covariance"])
def test_positions_by_grams_of_few_terms(mode: Mode) -> None:
    """Gradients and activations along the directions of the least variance are among them."""
    covariance = kronecker(1e-2)
    activations, gradients = normals(16, 1, 12, 64), normals(16, 1, 2, 48, 12, seed=1)
    bases = [torch.linalg.qr(normals(1, size, size, seed=size)).Q[0, :, :3] for size in (64, 48)]
    activations[8:] = activations[8:] @ bases[0] @ bases[0].T
    gradients[8:] = bases[1] @ bases[1].T @ gradients[8:]
    layer = Layer("layer", "linear", "w", None, 1, 48, 64, (48, 64))
    rows = {"layer": LayerRows(Rows(activations.float()), gradients.float())}
    terms = covariance.terms
    assert terms is not None and len(terms[1]) < 20
    (found,) = precise_values([covariance.contract([layer], rows, mode)])
    jacobian = torch.einsum("sgkot,sgti->skoi", gradients, activations).unsqueeze(2)
    expected = torch.stack([covariance.quadratic(own) for own in jacobian])
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    if mode == "variance":
        assert (found / scale.square() - 1).abs().max() < 5e-6
    else:
        assert ((found - expected) / (scale.unsqueeze(2) * scale.unsqueeze(1))).abs().max() < 5e-6


@pytest.mark.parametrize(("smallest", "table"), [(1e-8, False), (1e-2, True)])
def test_a_table_of_many_terms_is_none_of_few(smallest: float, table: bool) -> None:
    assert kronecker(smallest, table).terms is None


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("subnetwork", "quadratic forms")])
def test_variances_of_a_layers_outputs(case: str, groups: int) -> None:
    covariance, sigma, layer, whole = made(case, groups)
    of_layer = covariance.of_layer(0, layer.matrix_shape, whole).prepared(DOUBLE, torch.device("cpu"), 2000)
    mean, variance = normals(7, groups, INPUTS), normals(7, groups, INPUTS, seed=3).square()
    square = sigma.reshape(*layer.matrix_shape, *layer.matrix_shape)
    own = torch.einsum("goigoj->goij", square)
    by_mean = torch.einsum("rgi,goij,rgj->rgo", mean, own, mean)
    torch.testing.assert_close(of_layer.output_variance(mean), by_mean, **CLOSE)
    by_both = by_mean + torch.einsum("goii,rgi->rgo", own, variance)
    torch.testing.assert_close(of_layer.output_variance(mean, variance), by_both, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_covariances_of_a_layers_outputs(case: str) -> None:
    covariance, sigma, layer, whole = made(case, 1)
    of_layer = covariance.of_layer(0, layer.matrix_shape, whole).prepared(DOUBLE, torch.device("cpu"), 2000)
    mean, root = normals(30, INPUTS), normals(30, INPUTS, INPUTS, seed=3)
    square = sigma.reshape(OUTPUTS, INPUTS, OUTPUTS, INPUTS)
    pairs = torch.einsum("ri,oipj,tj->rotp", mean, square, mean)
    own = torch.stack([pairs[r, :, r] for r in range(30)])
    torch.testing.assert_close(of_layer.output_covariance(mean), own, **CLOSE)
    torch.testing.assert_close(of_layer.output_covariance(mean, joint=True), pairs.reshape(30 * OUTPUTS, -1))
    torch.testing.assert_close(of_layer.variances_of(mean), own.diagonal(dim1=1, dim2=2), **CLOSE)
    vectors, chosen = normals(30, 2, OUTPUTS, seed=4), torch.tensor([[0, OUTPUTS - 1]]).expand(30, 2)
    products, like = of_layer.output_products(mean), mean.new_empty(30, OUTPUTS)
    torch.testing.assert_close(products.times(vectors), vectors @ own, **CLOSE)
    torch.testing.assert_close(products.with_sum(like), own.sum(2), **CLOSE)
    centred = own[:, [0, OUTPUTS - 1]] - own.mean(1, keepdim=True)
    torch.testing.assert_close(products.with_centred(chosen, like), centred, **CLOSE)
    if case not in ("subnetwork", "quadratic forms"):
        inputs = root @ root.mT
        expected = own + torch.einsum("oipj,rij->rop", square, inputs)
        torch.testing.assert_close(of_layer.output_covariance(mean, inputs), expected, **CLOSE)
