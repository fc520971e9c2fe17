"""Products with a layer's activations against patches cut out one by one."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posthoc_uq.curvature import statistics
from posthoc_uq.curvature.statistics import Plan, Shape, add_squares, plan
from posthoc_uq.layers import Geometry, Layer, Operand, Patches, Rows, describe, operands
from posthoc_uq.layers.operands import ConcatenatedRows, add_patch_gram, chunks

TIGHT = {"rtol": 1e-11, "atol": 1e-11}
SAMPLES = 3

# channels, outputs, kernel, stride, padding, dilation, groups, bias, spatial
CASES: dict[str, tuple] = {
    "1d": (2, 3, (3,), (1,), (1,), (1,), 1, True, (7,)),
    "1d strided, dilated, groups": (4, 6, (2,), (2,), (1,), (2,), 2, False, (9,)),
    "2d": (2, 3, (3, 3), (1, 1), (1, 1), (1, 1), 1, False, (5, 6)),
    "2d bias": (2, 3, (3, 2), (1, 2), (1, 0), (1, 1), 1, True, (6, 5)),
    "2d dilated": (3, 2, (2, 3), (1, 1), (2, 1), (2, 1), 1, True, (5, 5)),
    "2d same": (2, 2, (2, 4), (1, 1), "same", (1, 1), 1, True, (4, 5)),
    "2d groups": (4, 6, (3, 3), (2, 1), (1, 1), (1, 1), 2, True, (5, 4)),
    "depthwise": (4, 4, (3, 3), (1, 1), (1, 1), (1, 1), 4, False, (5, 5)),
    "depthwise multiplied, bias": (3, 6, (3, 3), (2, 2), (1, 1), (1, 1), 3, True, (6, 5)),
    "3d": (2, 3, (2, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 1, True, (3, 4, 4)),
}


def _case(name: str) -> tuple[Layer, Geometry, Tensor, Tensor]:
    """A layer, how it is called, its activations cut out one by one, and its input."""
    channels, outputs, kernel, stride, padding, dilation, groups, bias, spatial = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    weight = torch.randn(outputs, channels // groups, *kernel, generator=generator, dtype=torch.float64)
    own_bias = ("b", torch.randn(outputs, generator=generator, dtype=torch.float64)) if bias else None
    layer = describe("layer", f"conv{len(kernel)}d", ("w", weight), own_bias, groups)
    x = torch.randn(SAMPLES, channels, *spatial, generator=generator, dtype=torch.float64)
    if padding == "same":  # torch puts the odd one behind
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in padding]
    padded = F.pad(x, [side for pair in reversed(sides) for side in pair])
    return layer, Geometry(stride, padding, dilation), _cut(padded, layer, kernel, stride, dilation), x


def _cut(padded: Tensor, layer: Layer, kernel: tuple, stride: tuple, dilation: tuple) -> Tensor:
    """``(samples, groups, positions, inputs)``, by the definition."""
    sizes = padded.shape[2:]
    counts = [
        (n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(sizes, dilation, kernel, stride, strict=True)
    ]
    rows = []
    for position in product(*map(range, counts)):
        values = []
        for offset in product(*map(range, kernel)):
            place = [p * s + o * d for p, s, o, d in zip(position, stride, offset, dilation, strict=True)]
            values.append(padded[(slice(None), slice(None), *place)])
        patch = torch.stack(values, dim=2).reshape(padded.shape[0], layer.groups, -1)
        if layer.bias is not None:
            patch = torch.cat([patch, torch.ones_like(patch[..., :1])], dim=2)
        rows.append(patch)
    return torch.stack(rows, dim=2)


def _patches(x: Tensor, layer: Layer, geometry: Geometry) -> Patches:
    return Patches(x, layer.kernel, geometry, groups=layer.groups, bias=layer.bias is not None)


def _gradients(rows: Tensor, outputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    samples, groups, positions, _ = rows.shape
    # As a convolution's are: the positions are the last dimension in memory.
    found = torch.randn(samples, groups, outputs, positions, generator=generator, dtype=torch.float64)
    return found.transpose(2, 3)


def _per_sample(rows: Tensor, gradients: Tensor) -> Tensor:
    found = torch.zeros(*rows.shape[:2], gradients.shape[3], rows.shape[3], dtype=torch.float64)
    for s, g, t in product(*map(range, rows.shape[:3])):
        found[s, g] += torch.outer(gradients[s, g, t], rows[s, g, t])
    return found


def _operands(name: str) -> list[tuple[Operand, Tensor, int]]:
    """Every kind of operand with these activations, and the layer's outputs."""
    layer, geometry, rows, x = _case(name)
    columns = rows.transpose(2, 3).contiguous().transpose(2, 3)
    found: list[tuple[Operand, Tensor, int]] = [
        (_patches(x, layer, geometry), rows, layer.outputs),
        (Rows(rows), rows, layer.outputs),
        (Rows(columns), rows, layer.outputs),
    ]
    twice = ConcatenatedRows([_patches(x, layer, geometry), Rows(0.5 * rows[:, :, :2])])
    return [*found, (twice, torch.cat([rows, 0.5 * rows[:, :, :2]], dim=2), layer.outputs)]


@pytest.mark.parametrize("limit", [1, 4000, 2**24])
@pytest.mark.parametrize("case", CASES)
def test_sums_over_activations(case: str, limit: int) -> None:
    for operand, rows, _ in _operands(case):
        torch.testing.assert_close(operand.rows(), rows, **TIGHT)
        torch.testing.assert_close(operand.part(slice(1, 3)).rows(), rows[1:3], **TIGHT)
        assert (operand.samples, operand.positions) == (rows.shape[0], rows.shape[2])
        _, groups, _, inputs = rows.shape
        test_matrix = torch.randn(
            groups, inputs, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        )
        gram = torch.einsum("sgti,sgtj->gij", rows, rows)
        torch.testing.assert_close(operand.project(test_matrix), rows @ test_matrix, **TIGHT)
        total = torch.ones_like(gram)  # adds to what is there
        operand.add_gram(total, limit)
        torch.testing.assert_close(total - 1, gram, **TIGHT)
        sketch = torch.ones_like(test_matrix)
        operand.add_sketch(sketch, test_matrix, limit)
        torch.testing.assert_close(sketch - 1, gram @ test_matrix, **TIGHT)


@pytest.mark.parametrize("bias", [False, True])
def test_a_large_map_is_correlated_and_a_small_one_unfolded(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []

    def noted(total: Tensor, x: Tensor, *rest: Any) -> None:
        calls.append(tuple(x.shape))
        add_patch_gram(total, x, *rest)

    monkeypatch.setattr(operands, "add_patch_gram", noted)
    generator = torch.Generator().manual_seed(0)
    for size, correlated in ((5, False), (40, True)):
        weight = torch.randn(4, 24, 3, 3, generator=generator, dtype=torch.float64)
        layer = describe("layer", "conv2d", ("w", weight), ("b", weight[:, 0, 0, 0]) if bias else None, 1)
        x = torch.randn(3, 24, size, size, generator=generator, dtype=torch.float64)
        operand = _patches(x, layer, Geometry((1, 1), (1, 1), (1, 1)))
        total = torch.zeros(1, layer.inputs, layer.inputs, dtype=torch.float64)
        operand.add_gram(total, 2**24)
        torch.testing.assert_close(
            total[0], torch.einsum("sgti,sgtj->ij", operand.rows(), operand.rows()), **TIGHT
        )
        assert bool(calls) == correlated
    assert calls == [(3, 24, 42, 42)]


@pytest.mark.parametrize("price", [-(10**12), 10**12])  # by one convolution a sample, and by unfolding
@pytest.mark.parametrize("case", CASES)
def test_per_sample_gradients(case: str, price: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "CALL_COST", price)
    for operand, rows, outputs in _operands(case):
        gradients = _gradients(rows, outputs)
        torch.testing.assert_close(operand.gradients(gradients, 2**12), _per_sample(rows, gradients), **TIGHT)
        some = gradients[..., :1]  # a part of the outputs
        torch.testing.assert_close(operand.gradients(some, 2**24), _per_sample(rows, some), **TIGHT)


@pytest.mark.parametrize("by_pairs", [False, True])
@pytest.mark.parametrize("rotate_gradients", [False, True])
@pytest.mark.parametrize("budget", [1, 2000, 2**24])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.covering(2)
def test_every_route_to_the_squares(
    case: str, by_pairs: bool, rotate_gradients: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced(shape: Shape, diagonal: bool, rotated: bool, whole: bool = True) -> Plan:
        return Plan(by_pairs, rotate_gradients and rotated and whole, 0.0)

    monkeypatch.setattr(statistics, "plan", forced)
    for operand, rows, outputs in _operands(case):
        gradients, (_, groups, _, inputs) = _gradients(rows, outputs), rows.shape
        generator = torch.Generator().manual_seed(3)
        bases = (
            torch.randn(groups, inputs, 3, generator=generator, dtype=torch.float64),
            torch.randn(groups, outputs, 2, generator=generator, dtype=torch.float64),
        )
        per_sample = _per_sample(rows, gradients)
        turned = torch.einsum("gop,sgoi,giq->sgpq", bases[1], per_sample, bases[0])
        diagonal = torch.ones(groups, outputs, inputs, dtype=torch.float64)
        rotated = torch.ones(groups, 2, 3, dtype=torch.float64)
        add_squares(operand, gradients, budget, diagonal, rotated, bases)
        torch.testing.assert_close(diagonal - 1, per_sample.square().sum(0), **TIGHT)
        torch.testing.assert_close(rotated - 1, turned.square().sum(0), **TIGHT)
        alone = torch.zeros_like(rotated)
        add_squares(operand, gradients, budget, None, alone, bases)
        torch.testing.assert_close(alone, turned.square().sum(0), **TIGHT)


def test_the_plan_follows_the_cost() -> None:
    one = Shape(1, 512, 512, 1, 100, 100)
    assert plan(one, True, True)[:2] == (True, False)  # one position: a product of squares, and rotated rows
    many = Shape(1, 64, 576, 3136, 64, 100)
    assert plan(many, True, True)[:2] == (
        False,
        True,
    )  # a large map: form the gradients once, and rotate them
    wide = Shape(1, 512, 4608, 49, 100, 100)
    assert plan(wide, True, True)[:2] == (False, False)  # wide and few positions: rotate the rows
    assert not plan(many, True, True, fits=False).rotate_gradients
    costs = [plan(Shape(1, 64, 64, t, 30, 30), True, True).cost for t in (1, 2, 4, 9, 30, 100)]
    assert costs == sorted(costs)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        known = {
            value.untyped_storage().data_ptr() for value in given
        }  # views and results in place are not new
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return found


@pytest.mark.parametrize("kind", ["many positions", "wide", "few positions", "large map"])
def test_no_temporary_is_larger_than_the_budget(kind: str) -> None:
    budget = 2**18
    torch.manual_seed(0)
    if kind == "large map":  # one sample unfolded takes 1 MiB
        plain = Geometry((1, 1), (1, 1), (1, 1))
        operand: Operand = Patches(torch.randn(2, 8, 60, 60), (3, 3), plain)
        groups, positions, inputs, outputs = 1, 3600, 72, 8
    else:
        positions, inputs, outputs = {"many positions": (40, 300, 200), "wide": (15, 900, 300)}.get(
            kind, (3, 200, 900)
        )
        groups = 1
        operand = Rows(torch.randn(9, 1, positions, inputs))
    gradients = torch.randn(operand.samples, groups, outputs, positions).transpose(2, 3)
    bases = torch.randn(groups, inputs, 10), torch.randn(groups, outputs, 8)
    diagonal, rotated = torch.zeros(groups, outputs, inputs), torch.zeros(groups, 8, 10)
    gram, sketch = torch.zeros(groups, inputs, inputs), torch.zeros(groups, inputs, 5)
    with _Largest() as largest:
        add_squares(operand, gradients, budget, diagonal, rotated, bases)
        operand.add_gram(gram, budget)
        operand.add_sketch(sketch, torch.randn(groups, inputs, 5), budget)
    # The results themselves and the caller's data do not count; what is made on the way does.
    assert 0 < largest.bytes <= budget


def test_chunks_cover_all_samples_within_the_limit() -> None:
    for samples, numbers, limit in [(1, 10, 1), (7, 3, 24), (100, 5, 10**6)]:
        parts = list(chunks(samples, numbers, 4, limit))
        assert [s for part in parts for s in range(samples)[part]] == list(range(samples))
        assert all(
            len(range(samples)[part]) == 1 or 4 * numbers * len(range(samples)[part]) <= limit
            for part in parts
        )


# samples, channels, spatial sizes (padding included), kernel, dilation
STRIDE_ONE: dict[str, tuple] = {
    "1d": (3, 3, (9,), (3,), (1,)),
    "1d, dilated": (2, 2, (11,), (3,), (2,)),
    "1d, kernel as large as the input": (1, 2, (5,), (5,), (1,)),
    "2d": (3, 4, (9, 8), (3, 3), (1, 1)),
    "2d, one sample": (1, 3, (7, 7), (3, 3), (1, 1)),
    "2d, one channel": (3, 1, (6, 7), (3, 3), (1, 1)),
    "2d, even and uneven sizes": (2, 3, (8, 9), (2, 5), (1, 1)),
    "2d, 5 x 5": (2, 2, (12, 11), (5, 5), (1, 1)),
    "2d, dilated": (2, 2, (10, 12), (3, 3), (2, 3)),
    "2d, dilated, fewer outputs than the kernel reaches": (2, 2, (8, 9), (3, 3), (3, 3)),
    "2d, kernel as large as the input": (2, 3, (5, 4), (5, 4), (1, 1)),
    "2d, kernel as large as the input along one axis": (2, 3, (9, 3), (3, 3), (1, 1)),
    "2d, one output row": (2, 3, (3, 9), (3, 3), (1, 1)),
    "2d, as many outputs as the kernel reaches": (2, 3, (4, 4), (3, 3), (1, 1)),
    "2d, along rows only": (2, 3, (6, 7), (1, 3), (1, 2)),
    "2d, along columns only": (2, 3, (6, 7), (3, 1), (2, 1)),
    "2d, pointwise": (2, 3, (4, 5), (1, 1), (1, 1)),
    "3d": (2, 2, (6, 7, 5), (3, 3, 3), (1, 1, 1)),
    "3d, uneven and dilated": (2, 2, (6, 8, 7), (2, 3, 3), (1, 1, 2)),
    "3d, kernel as large as the input": (1, 2, (3, 2, 3), (3, 2, 3), (1, 1, 1)),
}


def _all_patches(x: Tensor, kernel: tuple, dilation: tuple) -> Tensor:
    """``(samples * positions, channels * kernel)``, by the definition."""
    weight = torch.ones(1, x.shape[1], *kernel)
    layer = describe("layer", f"conv{len(kernel)}d", ("w", weight), None, 1)
    return _cut(x, layer, kernel, (1,) * len(kernel), dilation).flatten(0, 2)


@pytest.mark.parametrize("limit", [1, 3000, 2**24], ids=["one row at a time", "parts", "at once"])
@pytest.mark.parametrize("case", STRIDE_ONE)
@pytest.mark.covering(1)
def test_the_gram_by_correlation_is_that_of_patches(case: str, limit: int) -> None:
    samples, channels, spatial, kernel, dilation = STRIDE_ONE[case]
    x = torch.randn(
        samples, channels, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    rows = _all_patches(x, kernel, dilation)
    before = torch.randn(rows.shape[1], rows.shape[1], dtype=torch.float64)
    total = before.clone()
    add_patch_gram(total, x, kernel, dilation, limit)
    expected = rows.T @ rows
    assert (total - before - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_inputs_need_not_be_contiguous_and_the_total_may_be_part_of_a_larger_one() -> None:
    x = torch.randn(7, 6, 3, 4, dtype=torch.float64).permute(3, 2, 0, 1)  # 4 samples of 3 channels, 7 x 6
    rows = _all_patches(x, (3, 3), (1, 1))
    larger = torch.zeros(28, 28, dtype=torch.float64)
    add_patch_gram(larger[:27, :27], x, (3, 3), (1, 1), 2**24)
    torch.testing.assert_close(larger[:27, :27], rows.T @ rows, rtol=1e-12, atol=1e-12)
    assert not larger[27].any() and not larger[:, 27].any()


def test_large_values_at_the_border_do_not_spoil_the_blocks_that_leave_them_out() -> None:
    x = torch.randn(2, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] = x[:, :, :, 0] = 1e6  # in the windows of the kernel's first row and first column alone
    rows = _all_patches(x.double(), (3, 3), (1, 1))
    total = torch.zeros(18, 18)
    add_patch_gram(total, x, (3, 3), (1, 1), 2**24)
    inner = [c * 9 + k for c in range(2) for k in (4, 5, 7, 8)]
    expected = (rows.T @ rows)[inner][:, inner]
    torch.testing.assert_close(total[inner][:, inner].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [2**16, 2**20])
@pytest.mark.parametrize("spatial", [(20, 10), (9, 6, 5)])
def test_temporaries_of_a_correlation_stay_within_the_limit(spatial: tuple[int, ...], limit: int) -> None:
    kernel, dilation = ((3, 3), (1, 1)) if len(spatial) == 2 else ((2, 2, 2), (1, 1, 1))
    size = 16 * prod(kernel)
    x, total = torch.randn(5, 16, *spatial), torch.zeros(size, size)
    with _Largest() as largest:
        add_patch_gram(total, x, kernel, dilation, limit)
    assert limit / 8 < largest.bytes <= limit
