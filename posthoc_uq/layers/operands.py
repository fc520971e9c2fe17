"""Products with the activations of a layer: explicit rows, and patches that are unfolded only where that is cheap.

The activations are rows, the layer's inputs at each position: ``(samples, groups, positions, inputs)``. A linear
layer's input has this form already. A convolution's rows are its patches, ``prod(kernel)`` times as large as its input;
but products with patches are themselves convolutions, and so is the per-sample weight gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.nn.grad as convolution_gradients
from torch import Tensor

from posthoc_uq.core.numerics import CONVOLUTIONS

# The C library maps a new block of memory larger than this page by page at every use; on a CPU that costs more than
# the arithmetic that fills it.
CPU_TEMPORARY = 16 * 2**20

_USED_AT_ONCE = 4096  # positions of rows with a 1 that are taken together, so that few places occur in them

_NARROW = 3  # columns of a map of which a strided copy takes twice as long as torch's own unfolding

MAX_CACHED_BYTES = 4 * 2**20  # up to which a copy stays in the cache

# Of two ways to the same sums the cheaper one is taken. The cost is counted in multiply-adds of a matrix product, and
# every choice of the library but one (draws one by one or together, `posthoc_uq.heads.sampling`) uses these two prices,
# measured on x86 cores.
TOUCH_COST = 50  # of a number that is written and read again
CALL_COST = 1e8  # of a call of a convolution, with all that it sets up


@dataclass(frozen=True)
class Geometry:
    """How a call moved its kernel: the arguments of the convolution; empty for a linear layer.

    Attributes:
        stride: along each spatial axis, as the others are.
        padding: zeros on both sides, or ``"same"`` or ``"valid"``.
        dilation: distances of the kernel's positions.
        output_padding: rows that a transposed convolution adds at the end of each axis.
        without_gradient: the row of an embedding that gets none.
    """

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    without_gradient: int | None = None


def pad_input(x: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """A convolution's input with its zero padding made explicit."""
    if isinstance(geometry.padding, str):
        totals = [
            d * (k - 1) if geometry.padding == "same" else 0
            for d, k in zip(geometry.dilation, kernel, strict=True)
        ]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(p, p) for p in geometry.padding]
    if not any(a or b for a, b in pads):
        return x
    return F.pad(x, [side for pair in reversed(pads) for side in pair])


class Operand(ABC):
    """Activations of one layer in one batch.

    Attributes:
        samples: of the batch.
        positions: of a sample.
    """

    samples: int
    positions: int

    @abstractmethod
    def part(self, samples: slice | Tensor) -> Operand:
        """Some of the samples, by a slice or by their indices."""

    @abstractmethod
    def rows(self) -> Tensor:
        """The activations themselves, ``(samples, groups, positions, inputs)``."""

    @abstractmethod
    def project(self, basis: Tensor) -> Tensor:
        """``a^T U`` for ``U`` ``(groups, inputs, width)``: ``(samples, groups, positions, width)``."""

    @abstractmethod
    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        """``total += sum w a a^T``, ``(groups, inputs, inputs)``, with temporaries of at most `limit` bytes; with
        weights of the samples, ``(samples,)`` on the device, or 1.
        """

    @abstractmethod
    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        """``total += sum w a (a^T Omega)``, ``(groups, inputs, width)``."""

    @abstractmethod
    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        """Per-sample weight gradients ``sum_t g a^T``, ``(samples, groups, outputs, inputs)``, from output gradients
        ``(samples, groups, positions, outputs)``; temporaries beside them take at most `limit` bytes.
        """


def chunks(samples: int, numbers: int, element_size: int, limit: int) -> Iterator[slice]:
    """Slices of the samples, each of at most `limit` bytes at `numbers` numbers a sample, or of one sample."""
    step = max(1, min(samples, limit // max(1, numbers * element_size)))
    for start in range(0, samples, step):
        yield slice(start, min(samples, start + step))


def weighted(rows: Tensor, weights: Tensor | None, part: slice = slice(None)) -> Tensor:
    """Rows ``(samples, ...)`` times the weights of these samples, ``(samples,)``; as they are without weights."""
    if weights is None:
        return rows
    return rows * weights[part].to(rows).reshape(-1, *[1] * (rows.ndim - 1))


def temporary_limit(budget: int, device: torch.device) -> int:
    """Bytes that one temporary should take: `budget`, or on a CPU less, which is faster."""
    return min(budget, CPU_TEMPORARY) if device.type == "cpu" else budget


def add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += sum_{s,t} l r^T`` for rows ``(samples, groups, positions, size)``; total ``(groups, p, q)``."""
    groups, p, q = total.shape
    if groups > 1 and left.shape[2] * (p + q) <= p * q:
        # fewer numbers are copied than one product for each sample would write
        left, right = (rows.transpose(0, 1).flatten(1, 2) for rows in (left, right))
        total.baddbmm_(left.transpose(1, 2), right)
    elif groups > 1:
        total += torch.matmul(left.transpose(2, 3), right).sum(0)
    elif left.stride(3) == 1 and right.stride(3) == 1:
        total[0].addmm_(left.reshape(-1, p).T, right.reshape(-1, q))
    elif _copying_pays(left, p, q):
        total[0].addmm_(
            left[:, 0].permute(2, 0, 1).reshape(p, -1), right[:, 0].permute(2, 0, 1).reshape(q, -1).T
        )
    else:
        total[0].addbmm_(left[:, 0].transpose(1, 2), right[:, 0])


def _copying_pays(rows: Tensor, p: int, q: int) -> bool:
    """Whether to copy rows whose positions are the last dimension in memory, for one product over all samples.

    That pays if the copy stays in the cache, or if one product a sample would touch a large total too often.
    """
    samples, _, positions, _ = rows.shape
    copied = positions * (p + q)
    return samples * copied * rows.element_size() <= MAX_CACHED_BYTES or 8 * copied < p * q


def separate_positions(rows: Tensor) -> Tensor:
    """Rows ``(samples, groups, positions, size)`` with every position as a sample,
    ``(samples * positions, groups, 1, size)``.
    """
    return rows.transpose(1, 2).flatten(0, 1).contiguous().unsqueeze(2)


class Rows(Operand):
    """Activations that have the form of rows already (linear layer, pointwise convolution), or output gradients."""

    def __init__(self, tensor: Tensor) -> None:
        self._rows = tensor
        self.samples, self.positions = tensor.shape[0], tensor.shape[2]

    def part(self, samples: slice | Tensor) -> Rows:
        return Rows(self._rows[samples])

    def rows(self) -> Tensor:
        return self._rows

    def project(self, basis: Tensor) -> Tensor:
        rows = self._rows
        if basis.shape[0] > 1:
            return torch.matmul(rows, basis)
        samples, _, positions, size = rows.shape
        # one product, for which few rows are copied
        if rows.stride(3) == 1 or samples * positions < basis.shape[2]:
            return (rows.reshape(-1, size) @ basis[0]).reshape(samples, 1, positions, -1)
        return torch.matmul(basis[0].T, rows[:, 0].transpose(1, 2)).transpose(1, 2).unsqueeze(1)

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        roots = None if weights is None else weights.sqrt()
        for part in chunks(self.samples, self._numbers(total), self._rows.element_size(), limit):
            rows = weighted(self._rows[part], roots, part)
            add_products(total, rows, rows)

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        width = test_matrix.shape[-1] * self.positions * test_matrix.shape[0]
        numbers = max(width, self._numbers(total))
        for part in chunks(self.samples, numbers, self._rows.element_size(), limit):
            chunk = self.part(part)
            add_products(total, chunk.rows(), weighted(chunk.project(test_matrix), weights, part))

    def _numbers(self, total: Tensor) -> int:
        """The most numbers a sample that `add_products` allocates."""
        return total.numel() if total.shape[0] > 1 else self._rows[0].numel()

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        return torch.matmul(output_gradients.transpose(2, 3), self._rows)


class OneHotRows(Operand):
    """Rows of zeros with a 1 at one place each, as the numbers of these places.

    Args:
        places: ``(samples, positions)``, int64.
        size: of a row.
        without: the place of rows that are zero everywhere; None for no such row.
        dtype: of the rows.
    """

    def __init__(self, places: Tensor, size: int, without: int | None, dtype: torch.dtype) -> None:
        self._places, self._size, self._without, self._dtype = places, size, without, dtype
        self.samples, self.positions = places.shape

    def part(self, samples: slice | Tensor) -> OneHotRows:
        return OneHotRows(self._places[samples], self._size, self._without, self._dtype)

    def used(self) -> tuple[Tensor, OneHotRows]:
        """The places that occur, in order, and the rows with these places alone."""
        found, places = self._places.unique(return_inverse=True)
        without = (found == self._without).nonzero().flatten().tolist() if self._without is not None else []
        return found, OneHotRows(places, len(found), without[0] if without else None, self._dtype)

    def parts_by_use(self, together: bool = False) -> Iterator[slice]:
        """Slices of the samples in which few places occur, or all samples `together`."""
        step = self.samples if together else max(1, _USED_AT_ONCE // max(1, self.positions))
        for start in range(0, self.samples, step):
            yield slice(start, min(self.samples, start + step))

    def rows(self) -> Tensor:
        return self._masked(F.one_hot(self._places, self._size).to(self._dtype)).unsqueeze(1)

    def project(self, basis: Tensor) -> Tensor:
        return self._masked(basis[0][self._places]).unsqueeze(1)

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        total[0].diagonal().add_(self._counts(total, weights))

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        total[0] += self._counts(total, weights).unsqueeze(1) * test_matrix[0]

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        columns = self._masked(output_gradients[:, 0]).transpose(1, 2)
        found = columns.new_zeros(self.samples, columns.shape[1], self._size)
        return found.scatter_add_(2, self._places.unsqueeze(1).expand_as(columns), columns).unsqueeze(1)

    def _masked(self, values: Tensor) -> Tensor:
        """Values ``(samples, positions, size)``, zero at the rows that are."""
        if self._without is None:
            return values
        return values.masked_fill((self._places == self._without).unsqueeze(-1), 0)

    def _counts(self, like: Tensor, weights: Tensor | None) -> Tensor:
        """How often each place occurs, weighted, ``(size,)``."""
        ones = self._masked(like.new_ones(*self._places.shape, 1)).squeeze(-1)
        counts = weighted(ones, weights).flatten()
        return like.new_zeros(self._size).index_add_(0, self._places.flatten(), counts)


class IdentityRows(Operand):
    """The rows of unit matrices: what makes the columns of a gradient ``(outputs, inputs)``, as gradients at outputs,
    the gradient again. They say nothing of the data; see `curvature.statistics`.

    Args:
        samples: of the batch.
        groups: of the layer.
        size: of a row.
        like: a tensor of the rows' number format and device.
    """

    def __init__(self, samples: int, groups: int, size: int, like: Tensor) -> None:
        self.samples, self.positions = samples, size
        self._groups, self._like = groups, like.new_empty(0)

    def part(self, samples: slice | Tensor) -> IdentityRows:
        places = torch.empty(self.samples, device="meta")[
            samples if isinstance(samples, slice) else samples.to("meta")
        ]
        return IdentityRows(len(places), self._groups, self.positions, self._like)

    def rows(self) -> Tensor:
        unit = torch.eye(self.positions, dtype=self._like.dtype, device=self._like.device)
        return unit.expand(self.samples, self._groups, -1, -1)

    def project(self, basis: Tensor) -> Tensor:
        return basis.expand(self.samples, -1, -1, -1)

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        total.diagonal(dim1=1, dim2=2).add_(self._count(weights))

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        total.add_(test_matrix * self._count(weights))

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        return output_gradients.transpose(2, 3)

    def _count(self, weights: Tensor | None) -> float | Tensor:
        return self.samples if weights is None else weights.sum()


def concatenated(operands: list[Operand]) -> Operand:
    """Activations of a layer used several times; each use adds positions, whose gradients add up within a sample."""
    if len(operands) == 1:
        return operands[0]
    if all(isinstance(operand, Rows) for operand in operands):  # a product for all uses, not one for each
        return Rows(torch.cat([operand.rows() for operand in operands], dim=2))
    return ConcatenatedRows(operands)


class ConcatenatedRows(Operand):
    """See `concatenated`."""

    def __init__(self, operands: list[Operand]) -> None:
        self._operands = operands
        self.samples = operands[0].samples
        self.positions = sum(operand.positions for operand in operands)

    def part(self, samples: slice | Tensor) -> ConcatenatedRows:
        return ConcatenatedRows([operand.part(samples) for operand in self._operands])

    def rows(self) -> Tensor:
        return torch.cat([operand.rows() for operand in self._operands], dim=2)

    def project(self, basis: Tensor) -> Tensor:
        return torch.cat([operand.project(basis) for operand in self._operands], dim=2)

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        for operand in self._operands:
            operand.add_gram(total, limit, weights)

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        for operand in self._operands:
            operand.add_sketch(total, test_matrix, limit, weights)

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        parts = output_gradients.split([operand.positions for operand in self._operands], dim=2)
        total = self._operands[0].gradients(parts[0], limit)
        for operand, part in zip(self._operands[1:], parts[1:], strict=True):
            total += operand.gradients(part, limit)
        return total


Sizes = tuple[int, ...]  # along the spatial axes


def add_patch_gram(total: Tensor, x: Tensor, kernel: Sizes, dilation: Sizes, limit: int) -> None:
    """``total += sum_{s,t} a_st a_st^T`` over the patches of a convolution of stride 1, from shifted copies of its
    input, without unfolding.

    With output positions ``t`` in a grid O and the dilation ``d``, the block (channels x channels) of the kernel's
    positions ``k`` and ``k'`` is

        A_kk' = sum_s sum_{t in O} x_s(t + k d) x_s(t + k' d)^T = sum_s sum_{p in O + k d} x_s(p) x_s(p + (k' - k) d)^T,

    a correlation of the input with itself at the shift ``k' - k``. Blocks of one shift differ only in their windows
    ``O + k d``, so only at the border. Along an axis of ``w`` outputs and a kernel of size ``K``, the positions
    ``(K - 1) d <= p < w`` (the core) are in every window and are summed once a shift; the other positions of each
    window (its rim) are summed once a block. Nothing is subtracted, so nothing cancels. Blocks of ``k > k'`` are
    transposes.

    Args:
        total: ``(n, n)`` with ``n = channels * prod(kernel)``, the kernel's positions varying fastest.
        x: ``(samples, channels, *spatial)``, padded.
        kernel: size of the kernel along each spatial axis.
        dilation: its dilation along each spatial axis.
        limit: bytes of one temporary; one channel's products, or as many rows as a kernel has, may take more.
    """
    channels, size, most = x.shape[1], prod(kernel), limit // x.element_size()
    step = -(-channels // -(-channels // max(1, most // (channels * size**2))))  # parts of about one size
    buffer = x.new_empty(*kernel, *kernel, step, channels)
    for start in range(0, channels, step):
        part = slice(start, min(channels, start + step))
        gram = buffer[..., : part.stop - start, :].zero_()
        for image in _parts(x, kernel, dilation, most):
            _add_upper(gram, image, kernel, dilation, part)
        _add_blocks(total.view(channels, size, channels, size), gram.view(size, size, -1, channels), part)


def correlation_cost(channels: int, kernel: Sizes, dilation: Sizes, spatial_padded: Sizes) -> float:
    """The multiply-adds of `add_patch_gram` for a sample, copies included."""
    (rows, *lengths), (height, *widths), (spacing, *spacings) = spatial_padded, kernel, dilation
    every = unshifted = 1  # products over all axes but the first: at all shifts, and at shift zero
    for length, k, d in zip(lengths, widths, spacings, strict=True):
        outputs, reach = length - d * (k - 1), d * (k - 1)
        core, rim = max(0, outputs - reach), k * min(outputs, reach)
        every, unshifted = every * (core * (2 * k - 1) + rim * k), unshifted * (core + rim)
    outputs = rows - spacing * (height - 1)
    # Rows of the core and the rims for each shift along the rows, from the greatest shift down to none.
    used = [max(0, outputs - spacing * i) + (i + 1) * min(outputs, spacing * i) for i in range(height)]
    products = used.pop() * (every + unshifted) / 2 + sum(used) * every
    return float(channels) ** 2 * products + TOUCH_COST * channels * rows * every


def _parts(x: Tensor, kernel: Sizes, dilation: Sizes, most: int) -> Iterator[Tensor]:
    """Parts ``(rows, samples, *other axes, channels)`` of the input, whose `_stacks` have at most `most` numbers."""
    samples, channels, rows = x.shape[:3]
    reaches = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    row = channels  # numbers of one row in the largest stack
    for length, k, reach in zip(x.shape[3:], kernel[1:], reaches[1:], strict=True):
        row *= max((2 * k - 1) * (length - 2 * reach), k * min(length - reach, reach))
    # Bands overlap at their ends, so rows are split only where one sample has too many.
    band = max(1, min(rows, most // row) - reaches[0])
    count = max(1, min(samples, most // (row * rows)))
    for first in range(0, rows - reaches[0], band):
        for part in x[:, :, first : first + band + reaches[0]].split(count):
            yield part.permute(2, 0, *range(3, x.ndim), 1).contiguous()


def _add_upper(gram: Tensor, image: Tensor, kernel: Sizes, dilation: Sizes, part: slice) -> None:
    """Add to the blocks ``(*kernel, *kernel, part of the channels, channels)`` with ``k <= k'`` in row-major order."""
    # The block of two positions of the kernel sums products of the image with itself, shifted by their distance, over
    # the window of the outputs. Blocks of one shift differ only at the rims of that window, so that the products of its
    # core are summed once for all of them.
    k, d, channels = kernel[0], dilation[0], image.shape[-1]
    outputs = image.shape[0] - d * (k - 1)
    for stack, along in _stacks(image, kernel[1:], dilation[1:]):
        sizes = [axis.shifts for axis in along]
        zero = channels * sum(axis.zero * prod(sizes[i + 1 :]) for i, axis in enumerate(along))
        left = stack[..., zero + part.start : zero + part.stop]
        for shift in range(k):  # along the rows, where k' - k is not negative
            first = 0 if shift else zero
            right = stack[shift * d :, :, first:]
            low = d * (k - 1 - shift)  # the core of this shift is the rows from here to `outputs`
            core = stack.new_zeros(left.shape[-1], stack.shape[-1])
            _add_rows(core[:, first:], left, right, low, outputs)
            for row in reversed(range(k - shift)):  # the core, and the two rims of this position
                block, start, stop = core.clone() if row else core, row * d, row * d + outputs
                _add_rows(block[:, first:], left, right, start, min(low, stop))
                _add_rows(block[:, first:], left, right, max(low, outputs), stop)
                by_shift = block.view(-1, *sizes, channels).movedim(0, -2)
                for uses in product(*(axis.uses for axis in along)):
                    others, shifts = [use[0] for use in uses], tuple(use[1] for use in uses)
                    gram[(row, *others, row + shift)] += by_shift[shifts]


def _add_rows(total: Tensor, left: Tensor, right: Tensor, start: int, stop: int) -> None:
    """``total += sum l r^T`` over the rows from `start` to `stop`, if any."""
    if start < stop:
        l, r = left[start:stop], right[start:stop]
        total.addmm_(l.reshape(-1, l.shape[-1]).T, r.reshape(-1, r.shape[-1]))


class _Shifts(NamedTuple):
    """Shifts along one axis of the core, or of the rim of one window."""

    shifts: int  # their number; the shifts are `dilation` apart
    zero: int  # index of the shift 0
    gap: tuple[int, int]  # positions left out of the window: the core, if this is a rim
    uses: list[tuple[int, slice]]  # the kernel's positions k, each with the shifts that lead to a position k'


def _along(length: int, k: int, d: int) -> list[_Shifts]:
    reach = d * (k - 1)
    core = _Shifts(2 * k - 1, k - 1, (0, 0), [(i, slice(k - 1 - i, 2 * k - 1 - i)) for i in range(k)])
    rims = [
        _Shifts(k, i, (reach - i * d, length - reach - i * d), [(i, slice(k))]) for i in range(k) if k > 1
    ]
    return [core, *rims] if length > 2 * reach else rims


def _stacks(image: Tensor, kernel: Sizes, dilation: Sizes) -> Iterator[tuple[Tensor, tuple[_Shifts, ...]]]:
    """Shifted copies ``(rows, positions, shifts * channels)`` of ``(rows, samples, *axes, channels)``."""
    last = 2 + len(kernel)  # the channels' axis
    order = [0, 1, *range(last + 1, last + 1 + len(kernel)), *range(2, last + 1)]
    for chosen in product(*map(_along, image.shape[2:last], kernel, dilation)):
        view = image
        for axis, (shifts, _, (low, high), _) in enumerate(chosen, 2):
            d = dilation[axis - 2]
            view = view.unfold(axis, image.shape[axis] - d * (shifts - 1), d)  # shifts here, positions last
            if low < high:
                view = torch.cat([view[..., :low], view[..., high:]], -1)
        yield view.permute(order).reshape(image.shape[0], -1, prod(view.shape[2 : last + 1])), chosen


def _add_blocks(total: Tensor, gram: Tensor, part: slice) -> None:
    """Add blocks ``(k, k', part of the channels, channels)``, and their mirror, to ``(channels, k, channels, k')``."""
    for k in range(gram.shape[0]):
        total[part, k, :, k:] += gram[k, k:].permute(1, 2, 0)
        if k > 0:  # copied first: reading both transposed and in pieces is slow
            total[:, k, part, :k] += gram[:k, k].transpose(1, 2).contiguous().permute(1, 2, 0)


_WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {
    1: convolution_gradients.conv1d_weight,
    2: convolution_gradients.conv2d_weight,
    3: convolution_gradients.conv3d_weight,
}


class Patches(Operand):
    """Activations that a convolution would unfold.

    Args:
        x: the convolution's input, ``(samples, channels, *spatial)``, in the statistics' precision.
        kernel: its sizes.
        geometry: how the convolution was called.
        groups: of its channels.
        bias: whether patches end with the constant 1.
    """

    def __init__(
        self, x: Tensor, kernel: Sequence[int], geometry: Geometry, *, groups: int = 1, bias: bool = False
    ) -> None:
        padding = geometry.padding
        if isinstance(padding, str):
            x, padding = pad_input(x, kernel, geometry), (0,) * len(geometry.stride)
        self._x = x
        self._groups, self._bias = groups, bias
        self._padding, self._stride, self._dilation = padding, geometry.stride, geometry.dilation
        self._geometry = Geometry(geometry.stride, padding, geometry.dilation)
        self._arguments = geometry.stride, padding, geometry.dilation, groups
        self._kernel = tuple(kernel)
        self._convolve = CONVOLUTIONS[len(self._kernel)]
        self._weight_gradient = _WEIGHT_GRADIENTS[len(self._kernel)]
        reach = [d * (k - 1) + 1 for d, k in zip(self._dilation, self._kernel, strict=True)]
        padded = [size + 2 * p for size, p in zip(x.shape[2:], padding, strict=True)]
        self._grid = [(size - r) // s + 1 for size, r, s in zip(padded, reach, self._stride, strict=True)]
        self.samples, self.positions = x.shape[0], prod(self._grid)
        self._channels = x.shape[1] // groups
        self._fan_in = self._channels * prod(self._kernel)

    def _with(self, x: Tensor, padding: tuple[int, ...]) -> Patches:
        geometry = Geometry(self._stride, padding, self._dilation)
        return Patches(x, self._kernel, geometry, groups=self._groups, bias=self._bias)

    @cached_property
    def _unfolded(self) -> Rows | None:
        """All patches of a depthwise convolution, where they are few. Its products are so small that a call of a
        convolution for one of them takes longer than unfolding for all.
        """
        numbers = self.samples * self._groups * self._fan_in * self.positions
        few = numbers * self._x.element_size() <= CPU_TEMPORARY
        return Rows(self._patches()) if few and self._groups > self._channels == 1 else None

    def part(self, samples: slice | Tensor) -> Operand:
        return self._part(samples) if self._unfolded is None else self._unfolded.part(samples)

    def _part(self, samples: slice | Tensor) -> Patches:
        return self._with(self._x[samples], self._padding)

    def rows(self) -> Tensor:
        return self._patches() if self._unfolded is None else self._unfolded.rows()

    def _patches(self) -> Tensor:
        columns = self._unfold_patches()
        if self._bias:
            columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
        return columns.transpose(2, 3)

    def _unfold_patches(self) -> Tensor:
        """Unfolded patches without the bias, ``(samples, groups, fan-in, positions)``."""
        padded = pad_input(self._x, self._kernel, self._geometry)
        columns = _unfold(padded, self._kernel, self._stride, self._dilation)
        return columns.reshape(self.samples, self._groups, self._fan_in, -1)

    def project(self, basis: Tensor) -> Tensor:
        groups, _, width = basis.shape
        if self._unfolded is not None:
            return self._unfolded.project(basis)
        # a convolution would copy more numbers of U than there are in rows
        if self.samples * self.positions < width:
            return Rows(self.rows()).project(basis)
        filters = basis[:, : self._fan_in].transpose(1, 2)
        filters = filters.reshape(groups * width, self._channels, *self._kernel)
        bias = basis[:, self._fan_in].reshape(-1) if self._bias else None
        projected = self._convolve(self._x, filters, bias, *self._arguments)
        return projected.reshape(self.samples, groups, width, -1).transpose(2, 3)

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        groups, _, width = test_matrix.shape
        for part in chunks(self.samples, self.positions * groups * width, self._x.element_size(), limit):
            patches = self._part(part)
            patches.add_correlation(total, weighted(patches.project(test_matrix), weights, part))

    def add_correlation(self, total: Tensor, rows: Tensor) -> None:
        """``total += sum_{s,t} a z^T`` for rows ``z`` ``(samples, groups, positions, width)``."""
        groups, width = rows.shape[1], rows.shape[3]
        image = rows.transpose(2, 3).reshape(rows.shape[0], groups * width, *self._grid)
        shape = (groups * width, self._channels, *self._kernel)
        correlation = self._weight_gradient(self._x, shape, image, *self._arguments)
        total[:, : self._fan_in] += correlation.reshape(groups, width, -1).transpose(1, 2)
        if self._bias:
            total[:, self._fan_in] += rows.sum((0, 2))

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        if self._unfolded is not None:
            self._unfolded.add_gram(total, limit, weights)
            return
        if self._bias:
            self._add_bias_gram(total, weights)
        roots = None if weights is None else weights.sqrt()
        self._with(weighted(self._x, roots), self._padding)._add_patch_gram(total, limit)

    def _add_patch_gram(self, total: Tensor, limit: int) -> None:
        """The part of the Gram without the bias."""
        size = self._fan_in
        if self._correlates():
            x = pad_input(self._x, self._kernel, self._geometry)
            add_patch_gram(total[0, :size, :size], x, self._kernel, self._dilation, limit)
        else:
            self._add_unfolded(total[:, :size, :size], limit)

    def _correlates(self) -> bool:
        """Whether correlating the input with itself costs less than unfolding."""
        dims, channels = len(self._kernel), self._x.shape[1]
        if self._groups > 1 or max(self._stride) > 1:
            return False
        padded = tuple(size + 2 * p for size, p in zip(self._x.shape[2:], self._padding, strict=True))
        square = self._fan_in**2
        cost = self.samples * correlation_cost(channels, self._kernel, self._dilation, padded)
        cost += 10 * TOUCH_COST * square + (10 if dims == 3 else 2) * CALL_COST
        return cost < self.samples * self.positions * (square + 2 * TOUCH_COST * self._fan_in)

    def _add_unfolded(self, total: Tensor, limit: int) -> None:
        numbers = self._fan_in * self._groups * self.positions
        item = self._x.element_size()
        if item * numbers > limit and self._grid[0] > 1:  # one sample alone takes too much memory
            for band in self._bands(-(-item * numbers // limit)):
                band._add_unfolded(total, limit)
            return
        for part in chunks(self.samples, max(numbers, total.numel() * (total.shape[0] > 1)), item, limit):
            rows = self._part(part)._unfold_patches().transpose(2, 3)
            add_products(total, rows, rows)

    def _add_bias_gram(self, total: Tensor, weights: Tensor | None) -> None:
        ones = self._x.new_ones(self.samples, self._groups, self.positions, 1)
        sums = total.new_zeros(*total.shape[:2], 1)
        self.add_correlation(sums, weighted(ones, weights))
        total[:, :, self._fan_in] += sums[:, :, 0]
        total[:, self._fan_in, : self._fan_in] += sums[:, : self._fan_in, 0]

    def _bands(self, count: int) -> Iterator[Patches]:
        """The same patches in bands along the first spatial dimension."""
        x, no_padding = pad_input(self._x, self._kernel, self._geometry), (0,) * len(self._kernel)
        step = max(1, self._grid[0] // count)
        reach = self._dilation[0] * (self._kernel[0] - 1) + 1
        for start in range(0, self._grid[0], step):
            stop = min(self._grid[0], start + step)
            first, last = start * self._stride[0], (stop - 1) * self._stride[0] + reach
            yield self._with(x[:, :, first:last], no_padding)

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        if self._unfolded is not None:
            return self._unfolded.gradients(output_gradients, limit)
        samples, groups, _, outputs = output_gradients.shape
        columns = output_gradients.transpose(2, 3)
        if self._channels == 1 and groups > 1:
            gradients = self._depthwise(columns)
        elif self._by_convolution(outputs, limit):
            gradients = self._one_by_one(columns)
        else:
            gradients = columns.new_empty(samples, groups, outputs, self._fan_in)
            numbers = groups * self._fan_in * self.positions
            for part in chunks(samples, numbers, gradients.element_size(), limit):
                torch.matmul(
                    columns[part], self._part(part)._unfold_patches().transpose(2, 3), out=gradients[part]
                )
        gradients = gradients.reshape(samples, groups, outputs, self._fan_in)
        if not self._bias:
            return gradients
        return torch.cat([gradients, columns.sum(3, keepdim=True)], dim=3)

    def _by_convolution(self, outputs: int, limit: int) -> bool:
        """Whether a convolution call per sample costs less than unfolding, as it does for large maps."""
        unfolded = self._groups * self._fan_in * self.positions
        if unfolded * self._x.element_size() > limit:
            return True
        cost = CALL_COST + 10 * TOUCH_COST * self._groups * self._fan_in * outputs
        return self._x.device.type == "cpu" and 2 * TOUCH_COST * unfolded > cost

    def _one_by_one(self, columns: Tensor) -> Tensor:
        image = columns.reshape(self.samples, -1, *self._grid)
        shape = (image.shape[1], self._channels, *self._kernel)
        return torch.stack(
            [
                self._weight_gradient(self._x[s : s + 1], shape, image[s : s + 1], *self._arguments)
                for s in range(self.samples)
            ]
        )

    def _depthwise(self, columns: Tensor) -> Tensor:
        """One call for all samples, with every channel of every sample as a group."""
        samples, groups, outputs, _ = columns.shape
        x = self._x.reshape(1, -1, *self._x.shape[2:])
        image = columns.reshape(1, -1, *self._grid)
        shape = (samples * groups * outputs, 1, *self._kernel)
        stride, padding, dilation, _ = self._arguments
        return self._weight_gradient(x, shape, image, stride, padding, dilation, samples * groups)


def rotate_output_gradients(gradients: Tensor, basis: Tensor) -> Tensor:
    """``U^T g`` for output gradients ``(samples, G, functions, m, T)`` and ``U`` ``(G, m, width)``:
    ``(samples, G, functions, width, T)``.
    """
    functions, outputs, positions = gradients.shape[2:]
    if positions >= outputs:
        return torch.matmul(basis.transpose(-1, -2).unsqueeze(1), gradients)
    # one product, not one for each function, which would copy U
    rows = gradients.transpose(3, 4).flatten(2, 3)
    return Rows(rows).project(basis).unflatten(2, (functions, positions)).transpose(3, 4)


def _unfold(padded: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Patches ``(samples, channels * kernel, positions)`` of any number of spatial dimensions.

    A strided view, copied once; faster than `F.unfold`, five times so for few channels, but for the narrowest maps.
    """
    windows, dims = padded, len(kernel)
    if (
        padded.is_floating_point()
        and dims == 2
        and padded.shape[3] - dilation[1] * (kernel[1] - 1) <= _NARROW * stride[1]
    ):
        return F.unfold(padded, tuple(kernel), tuple(dilation), 0, tuple(stride))
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        windows = windows.unfold(axis + 2, d * (k - 1) + 1, s)[..., ::d]
    # (samples, channels, *positions, *kernel): the kernel comes before the positions
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    return windows.permute(order).reshape(padded.shape[0], padded.shape[1] * prod(kernel), -1)


class Unfolding:
    """Inputs of one shape as rows, and rows added up into inputs, where every number of a row is an input or 0.

    Args:
        unfold: inputs ``(samples, *shape)`` as rows ``(samples, ...)``, as in `LayerRule.unfold`.
        shape: of one sample's input.
        device: of the inputs.
    """

    def __init__(
        self, unfold: Callable[[Tensor], Tensor], shape: Sequence[int], device: torch.device
    ) -> None:
        self._shape, self._size = tuple(shape), prod(shape)
        numbers = torch.arange(1, self._size + 1, device=device)  # 0 is what is not an input, such as padding
        rows = unfold(numbers.reshape(1, *self._shape))[0]
        self._row_shape, self._source = rows.shape, rows.flatten()
        self._same_order = torch.equal(self._source, numbers)

    def rows(self, x: Tensor) -> Tensor:
        """The rows of inputs ``(samples, *shape)``."""
        if self._same_order:
            return x.reshape(len(x), *self._row_shape)
        flat = F.pad(x.flatten(1), (1, 0))
        return flat.index_select(1, self._source).unflatten(1, self._row_shape)

    def fold(self, rows: Tensor) -> Tensor:
        """The transpose of `rows`: what belongs to one input is added up, what belongs to none is dropped."""
        if self._same_order:
            return rows.reshape(len(rows), *self._shape)
        flat = rows.flatten(1)
        total = flat.new_zeros(len(flat), self._size + 1)
        return total.scatter_add_(1, self._source.expand_as(flat), flat)[:, 1:].unflatten(1, self._shape)
