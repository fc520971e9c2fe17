"""The Gram of a convolution's patches by correlation, against plain unfolding in float64."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posthoc_uq.layers.operands import add_patch_gram, correlation_cost

# samples, channels, spatial sizes (padding included), kernel, dilation
CASES = {
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
LIMITS = {"one row at a time": 1, "parts": 3000, "at once": 2**24}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def patches(x: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Rows ``(samples * positions, channels * kernel)``, by the definition, one number of a patch at a time."""
    grid = [size - d * (k - 1) for size, k, d in zip(x.shape[2:], kernel, dilation, strict=True)]
    columns = []
    for channel in range(x.shape[1]):
        for offset in product(*map(range, kernel)):
            window = [slice(o * d, o * d + g) for o, d, g in zip(offset, dilation, grid, strict=True)]
            columns.append(x[(slice(None), channel, *window)].reshape(-1))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gram_is_that_of_unfolded_patches(
    case: tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], limit: int
) -> None:
    samples, channels, spatial, kernel, dilation = case
    x = torch.randn(samples, channels, *spatial, dtype=torch.float64)
    rows = patches(x, kernel, dilation)
    before = torch.randn(rows.shape[1], rows.shape[1], dtype=torch.float64)

    total = before.clone()
    add_patch_gram(total, x, kernel, dilation, limit)

    expected = rows.T @ rows
    assert (total - before - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_inputs_need_not_be_contiguous_and_the_total_may_be_part_of_a_larger_one() -> None:
    x = torch.randn(7, 6, 3, 4, dtype=torch.float64).permute(3, 2, 0, 1)  # 4 samples of 3 channels, 7 x 6
    rows = patches(x, (3, 3), (1, 1))
    larger = torch.zeros(28, 28, dtype=torch.float64)

    add_patch_gram(larger[:27, :27], x, (3, 3), (1, 1), 2**24)

    torch.testing.assert_close(larger[:27, :27], rows.T @ rows, rtol=1e-12, atol=1e-12)
    assert not larger[27].any()
    assert not larger[:, 27].any()


def test_large_values_at_the_border_do_not_spoil_the_blocks_that_leave_them_out() -> None:
    x = torch.randn(2, 2, 9, 9)
    x[:, :, 0] = x[:, :, :, 0] = 1e6  # in the windows of the kernel's first row and first column alone
    rows = patches(x.double(), (3, 3), (1, 1))

    total = torch.zeros(18, 18)
    add_patch_gram(total, x, (3, 3), (1, 1), 2**24)

    inner = [c * 9 + k for c in range(2) for k in (4, 5, 7, 8)]
    expected = (rows.T @ rows)[inner][:, inner]
    torch.testing.assert_close(total[inner][:, inner].double(), expected, rtol=1e-4, atol=1e-4)


class Largest(TorchDispatchMode):
    """Remembers the largest memory, in bytes, behind any result but those of `known`."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self.bytes = max(self.bytes, storage.nbytes())
        return result


@pytest.mark.parametrize("limit", [2**16, 2**20])
@pytest.mark.parametrize("spatial", [(20, 10), (9, 6, 5)])
def test_temporaries_stay_within_the_limit(spatial: tuple[int, ...], limit: int) -> None:
    kernel, dilation = ((3, 3), (1, 1)) if len(spatial) == 2 else ((2, 2, 2), (1, 1, 1))
    size = 16 * prod(kernel)
    x, total = torch.randn(5, 16, *spatial), torch.zeros(size, size)
    with Largest(x, total) as largest:
        add_patch_gram(total, x, kernel, dilation, limit)
    assert limit / 8 < largest.bytes <= limit


@pytest.mark.parametrize("case", [case for case in CASES.values() if prod(case[3]) > 1])
def test_the_total_is_symmetric(
    case: tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    samples, channels, spatial, kernel, dilation = case
    size = channels * prod(kernel)
    x, total = (
        torch.randn(shape, dtype=torch.float64) for shape in ((samples, channels, *spatial), (size, size))
    )
    total = total + total.T
    add_patch_gram(total, x, kernel, dilation, 2**24)
    torch.testing.assert_close(total, total.T)


def test_the_cost_is_far_below_that_of_unfolding_for_large_maps_alone() -> None:
    n = 64 * 9
    assert correlation_cost(64, (3, 3), (1, 1), (58, 58)) < n**2 * 56**2 / 4
    assert correlation_cost(64, (3, 3), (1, 1), (3, 3)) > n**2 / 4


def test_the_cost_counts_multiply_adds() -> None:
    """Counted by hand; the channels are so many that copies do not count."""
    channels = 10**9
    # 4 outputs: at no shift 2 rows of the core and 3 x 2 of the rims, at shift 1 3 + 2 x 1, at shift 2 4.
    assert correlation_cost(channels, (3,), (1,), (6,)) == pytest.approx(channels**2 * (8 + 5 + 4), rel=1e-6)
    # One output along an axis without a core: 3 x 3 blocks, half of them (and the diagonal) where rows do not shift.
    assert correlation_cost(channels, (1, 3), (1, 1), (5, 3)) == pytest.approx(channels**2 * 5 * 6, rel=1e-6)
