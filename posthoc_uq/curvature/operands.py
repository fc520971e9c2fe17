"""A layer's activations as the statistics need them: products with them, without forming them where that is dear.

The rows are the layer's inputs, one a position: ``(samples, groups, positions, inputs)``. A linear layer's input
is those rows already; a convolution's would be its unfolded patches, ``prod(kernel)`` times as large as its
input. Products with patches are themselves convolutions, and the per-sample weight gradient is one too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.nn.grad as convolution_gradients
from torch import Tensor

from posthoc_uq.layers import Geometry, Layer, pad_input

# A fresh block of memory larger than this is mapped anew by the C library at every use, page by page, which on
# a CPU costs more than the arithmetic that fills it.
CPU_TEMPORARY = 16 * 2**20

# Numbers up to which a product for every sample is made at once and summed, rather than added up one by one.
SMALL = 2**19

# A convolution's weight gradient for one sample has a fixed price, in numbers unfolded at the same cost, and one
# for each number of the weight; measured on two x86 cores.
_CALL_PRICE, _WEIGHT_PRICE = 250_000, 2

_CONVOLUTIONS: dict[int, tuple[Any, Any]] = {
    1: (F.conv1d, convolution_gradients.conv1d_weight),
    2: (F.conv2d, convolution_gradients.conv2d_weight),
    3: (F.conv3d, convolution_gradients.conv3d_weight),
}


class Operand(Protocol):
    """Activations of one layer in one batch."""

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        ...

    @property
    def positions(self) -> int:
        """Positions of a sample."""
        ...

    def part(self, samples: slice) -> Operand:
        """Some of the samples."""
        ...

    def rows(self) -> Tensor:
        """The activations themselves, ``(samples, groups, positions, inputs)``."""
        ...

    def project(self, basis: Tensor) -> Tensor:
        """``a^T U`` for ``U`` ``(groups, inputs, width)``: ``(samples, groups, positions, width)``."""
        ...

    def add_gram(self, total: Tensor, limit: int) -> None:
        """``total += sum a a^T``, ``(groups, inputs, inputs)``, with temporaries of at most `limit` bytes."""
        ...

    def add_sketch(self, total: Tensor, test_matrix: Tensor, limit: int) -> None:
        """``total += sum a (a^T Omega)``, ``(groups, inputs, width)``."""
        ...

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        """Per-sample weight gradients ``sum_t g a^T``, ``(samples, groups, outputs, inputs)``, from output gradients
        ``(samples, groups, positions, outputs)``; `limit` bytes bound what is needed beside them.
        """
        ...


def chunks(samples: int, numbers: int, element_size: int, limit: int) -> Iterator[slice]:
    """Slices of the samples, each with at most `limit` bytes at `numbers` numbers a sample, or one sample."""
    step = max(1, min(samples, limit // max(1, numbers * element_size)))
    for start in range(0, samples, step):
        yield slice(start, min(samples, start + step))


def temporary_limit(budget: int, device: torch.device) -> int:
    """Bytes that one temporary should take: `budget`, or less where less is faster."""
    return min(budget, CPU_TEMPORARY) if device.type == "cpu" else budget


def add_products(total: Tensor, left: Tensor, right: Tensor, limit: int) -> None:
    """``total += sum_{s,t} l r^T`` for rows ``(samples, groups, positions, size)``; total ``(groups, p, q)``."""
    groups, p, q = total.shape
    positions = left.shape[2]
    numbers = total.numel() * left.shape[0]
    if groups > 1 or (positions > 1 and numbers <= min(SMALL, limit // total.element_size())):
        total += torch.matmul(left.transpose(2, 3), right).sum(0)
        return
    # One product over all rows reads and writes the total once; a product per sample needs no copy of rows whose
    # positions are the last dimension in memory.
    flat = left.stride(3) == 1 and right.stride(3) == 1
    if flat or positions * (p + q) < p * q:
        total[0].addmm_(left.reshape(-1, p).T, right.reshape(-1, q))
    else:
        total[0].addbmm_(left[:, 0].transpose(1, 2), right[:, 0])


class Rows:
    """Activations that are rows already: of a linear layer, a pointwise convolution, or output gradients."""

    def __init__(self, tensor: Tensor) -> None:
        self._rows = tensor

    @property
    def samples(self) -> int:
        return self._rows.shape[0]

    @property
    def positions(self) -> int:
        return self._rows.shape[2]

    def part(self, samples: slice) -> Rows:
        return Rows(self._rows[samples])

    def rows(self) -> Tensor:
        return self._rows

    def project(self, basis: Tensor) -> Tensor:
        rows = self._rows
        if basis.shape[0] > 1:
            return torch.matmul(rows, basis)
        if rows.stride(3) == 1:
            samples, _, positions, size = rows.shape
            return (rows.reshape(-1, size) @ basis[0]).reshape(samples, 1, positions, -1)
        return torch.matmul(basis[0].T, rows[:, 0].transpose(1, 2)).transpose(1, 2).unsqueeze(1)

    def add_gram(self, total: Tensor, limit: int) -> None:
        for part in chunks(self.samples, self._numbers(total), self._rows.element_size(), limit):
            add_products(total, self._rows[part], self._rows[part], limit)

    def add_sketch(self, total: Tensor, test_matrix: Tensor, limit: int) -> None:
        width = test_matrix.shape[-1] * self.positions * test_matrix.shape[0]
        numbers = max(width, self._numbers(total))
        for part in chunks(self.samples, numbers, self._rows.element_size(), limit):
            own = self.part(part)
            add_products(total, own.rows(), own.project(test_matrix), limit)

    def _numbers(self, total: Tensor) -> int:
        """Most numbers a sample that `add_products` makes."""
        return total.numel() if total.shape[0] > 1 else self._rows[0].numel()

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        return torch.matmul(output_gradients.transpose(2, 3), self._rows)


class Patches:
    """Activations that a convolution would unfold.

    Args:
        x: the convolution's input, ``(samples, channels, *spatial)``, in the statistics' precision.
        layer: the convolution.
        geometry: how it was called.
    """

    def __init__(self, x: Tensor, layer: Layer, geometry: Geometry) -> None:
        padding = geometry.padding
        if isinstance(padding, str):
            x, padding = pad_input(x, layer, geometry), (0,) * len(geometry.stride)
        self._x = x
        self._layer = layer
        self._padding = padding
        self._stride, self._dilation = geometry.stride, geometry.dilation
        self._kernel = layer.weight_shape[2:]
        self._convolve, self._weight_gradient = _CONVOLUTIONS[len(self._kernel)]
        reach = [d * (k - 1) + 1 for d, k in zip(self._dilation, self._kernel, strict=True)]
        padded = [size + 2 * p for size, p in zip(x.shape[2:], padding, strict=True)]
        self._grid = [(size - r) // s + 1 for size, r, s in zip(padded, reach, self._stride, strict=True)]
        self._fan_in = layer.weight_shape[1] * prod(self._kernel)

    @property
    def samples(self) -> int:
        return self._x.shape[0]

    @property
    def positions(self) -> int:
        return prod(self._grid)

    def _with(self, x: Tensor, padding: tuple[int, ...]) -> Patches:
        return Patches(x, self._layer, Geometry(self._stride, padding, self._dilation))

    def part(self, samples: slice) -> Patches:
        return self._with(self._x[samples], self._padding)

    def rows(self) -> Tensor:
        columns = self._columns()
        if self._layer.bias is not None:
            columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
        return columns.transpose(2, 3)

    def _columns(self) -> Tensor:
        """Unfolded patches without the bias, ``(samples, groups, fan-in, positions)``."""
        x, padding, dilation, stride, kernel = (
            self._x,
            self._padding,
            self._dilation,
            self._stride,
            self._kernel,
        )
        if len(kernel) == 1:  # unfold knows images only
            x, padding, dilation = x.unsqueeze(2), (0, *padding), (1, *dilation)
            stride, kernel = (1, *stride), (1, *kernel)
        if len(kernel) == 2:
            columns = F.unfold(x, kernel, dilation, padding, stride)
        else:
            columns = _unfold(pad_input(x, self._layer, self._geometry()), kernel, stride, dilation)
        return columns.reshape(self.samples, self._layer.groups, self._fan_in, -1)

    def _geometry(self) -> Geometry:
        return Geometry(self._stride, self._padding, self._dilation)

    def _arguments(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
        return self._stride, self._padding, self._dilation, self._layer.groups

    def project(self, basis: Tensor) -> Tensor:
        groups, _, width = basis.shape
        filters = basis[:, : self._fan_in].transpose(1, 2)
        filters = filters.reshape(groups * width, self._layer.weight_shape[1], *self._kernel)
        bias = basis[:, self._fan_in].reshape(-1) if self._layer.bias is not None else None
        projected = self._convolve(self._x, filters, bias, *self._arguments())
        return projected.reshape(self.samples, groups, width, -1).transpose(2, 3)

    def add_sketch(self, total: Tensor, test_matrix: Tensor, limit: int) -> None:
        groups, _, width = test_matrix.shape
        for part in chunks(self.samples, self.positions * groups * width, self._x.element_size(), limit):
            own = self.part(part)
            own.add_correlation(total, own.project(test_matrix))

    def add_correlation(self, total: Tensor, rows: Tensor) -> None:
        """``total += sum_{s,t} a z^T`` for rows ``z`` ``(samples, groups, positions, width)``."""
        groups, width = rows.shape[1], rows.shape[3]
        image = rows.transpose(2, 3).reshape(rows.shape[0], groups * width, *self._grid)
        shape = (groups * width, self._layer.weight_shape[1], *self._kernel)
        found = self._weight_gradient(self._x, shape, image, *self._arguments())
        total[:, : self._fan_in] += found.reshape(groups, width, -1).transpose(1, 2)
        if self._layer.bias is not None:
            total[:, self._fan_in] += rows.sum((0, 2))

    def add_gram(self, total: Tensor, limit: int) -> None:
        numbers = self._fan_in * self._layer.groups * self.positions
        size, item = self._fan_in, self._x.element_size()
        if item * numbers > limit and self._grid[0] > 1:  # one sample alone would take too much
            for band in self._bands(-(-item * numbers // limit)):
                band.add_gram(total, limit)
            return
        for part in chunks(self.samples, max(numbers, total.numel() * (total.shape[0] > 1)), item, limit):
            rows = self.part(part)._columns().transpose(2, 3)
            add_products(total[:, :size, :size], rows, rows, limit)
        if self._layer.bias is not None:
            self._add_bias_gram(total)

    def _add_bias_gram(self, total: Tensor) -> None:
        ones = self._x.new_ones(self.samples, self._layer.groups, self.positions, 1)
        sums = total.new_zeros(*total.shape[:2], 1)
        self.add_correlation(sums, ones)
        total[:, :, self._fan_in] += sums[:, :, 0]
        total[:, self._fan_in, : self._fan_in] += sums[:, : self._fan_in, 0]

    def _bands(self, count: int) -> Iterator[Patches]:
        """The same patches in bands along the first spatial dimension."""
        x, none = pad_input(self._x, self._layer, self._geometry()), (0,) * len(self._kernel)
        step = max(1, self._grid[0] // count)
        reach = self._dilation[0] * (self._kernel[0] - 1) + 1
        for start in range(0, self._grid[0], step):
            stop = min(self._grid[0], start + step)
            first, last = start * self._stride[0], (stop - 1) * self._stride[0] + reach
            yield self._with(x[:, :, first:last], none)

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        samples, groups, _, outputs = output_gradients.shape
        columns = output_gradients.transpose(2, 3)
        if self._layer.weight_shape[1] == 1 and groups > 1:
            found = self._depthwise(columns)
        elif self._by_convolution(outputs, limit):
            found = self._one_by_one(columns)
        else:
            found = columns.new_empty(samples, groups, outputs, self._fan_in)
            numbers = groups * self._fan_in * self.positions
            for part in chunks(samples, numbers, found.element_size(), limit):
                torch.matmul(columns[part], self.part(part)._columns().transpose(2, 3), out=found[part])
        found = found.reshape(samples, groups, outputs, self._fan_in)
        if self._layer.bias is None:
            return found
        return torch.cat([found, columns.sum(3, keepdim=True)], dim=3)

    def _by_convolution(self, outputs: int, limit: int) -> bool:
        """Whether a convolution call per sample costs less than unfolding: it does for large maps."""
        unfolded = self._layer.groups * self._fan_in * self.positions
        if unfolded * self._x.element_size() > limit:
            return True
        dear = _CALL_PRICE + _WEIGHT_PRICE * self._layer.groups * self._fan_in * outputs
        return self._x.device.type == "cpu" and unfolded > dear

    def _one_by_one(self, columns: Tensor) -> Tensor:
        image = columns.reshape(self.samples, -1, *self._grid)
        shape = (image.shape[1], *self._layer.weight_shape[1:])
        return torch.stack(
            [
                self._weight_gradient(self._x[s : s + 1], shape, image[s : s + 1], *self._arguments())
                for s in range(self.samples)
            ]
        )

    def _depthwise(self, columns: Tensor) -> Tensor:
        """One call for all samples, whose channels are each a group of their own."""
        samples, groups, outputs, _ = columns.shape
        x = self._x.reshape(1, -1, *self._x.shape[2:])
        image = columns.reshape(1, -1, *self._grid)
        shape = (samples * groups * outputs, 1, *self._kernel)
        stride, padding, dilation, _ = self._arguments()
        return self._weight_gradient(x, shape, image, stride, padding, dilation, samples * groups)


class Several:
    """Activations of a layer used more than once: further positions, whose gradients add up within a sample."""

    def __init__(self, operands: list[Operand]) -> None:
        self._operands = operands

    @property
    def samples(self) -> int:
        return self._operands[0].samples

    @property
    def positions(self) -> int:
        return sum(operand.positions for operand in self._operands)

    def part(self, samples: slice) -> Several:
        return Several([operand.part(samples) for operand in self._operands])

    def rows(self) -> Tensor:
        return torch.cat([operand.rows() for operand in self._operands], dim=2)

    def project(self, basis: Tensor) -> Tensor:
        return torch.cat([operand.project(basis) for operand in self._operands], dim=2)

    def add_gram(self, total: Tensor, limit: int) -> None:
        for operand in self._operands:
            operand.add_gram(total, limit)

    def add_sketch(self, total: Tensor, test_matrix: Tensor, limit: int) -> None:
        for operand in self._operands:
            operand.add_sketch(total, test_matrix, limit)

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        parts = output_gradients.split([operand.positions for operand in self._operands], dim=2)
        found = self._operands[0].gradients(parts[0], limit)
        for operand, part in zip(self._operands[1:], parts[1:], strict=True):
            found += operand.gradients(part, limit)
        return found


def _unfold(padded: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Patches ``(samples, channels * kernel, positions)`` of any number of spatial dimensions."""
    windows, dims = padded, len(kernel)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        windows = windows.unfold(axis + 2, d * (k - 1) + 1, s)[..., ::d]
    # (samples, channels, *positions, *kernel): the kernel comes before the positions
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    return windows.permute(order).reshape(padded.shape[0], padded.shape[1] * prod(kernel), -1)
