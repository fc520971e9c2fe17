"""A convolution's activations, the patches of its input; products with them are convolutions themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.grad as convolution_gradients
from torch import Tensor

from posthoc_uq.curvature.correlation import add_patch_gram, correlation_cost
from posthoc_uq.curvature.operands import add_products, chunks, weighted
from posthoc_uq.layers import Geometry, Layer, pad_input

# The cost of a convolution's weight gradient for one sample, fixed and for each number of the weight, in numbers that
# could be unfolded in the same time; measured on two x86 cores.
_CALL_COST, _WEIGHT_COST = 800_000, 5

_CONVOLUTIONS: dict[int, tuple[Any, Any]] = {
    1: (F.conv1d, convolution_gradients.conv1d_weight),
    2: (F.conv2d, convolution_gradients.conv2d_weight),
    3: (F.conv3d, convolution_gradients.conv3d_weight),
}


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

    def part(self, samples: slice | Tensor) -> Patches:
        return self._with(self._x[samples], self._padding)

    def rows(self) -> Tensor:
        columns = self._columns()
        if self._layer.bias is not None:
            columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
        return columns.transpose(2, 3)

    def _columns(self) -> Tensor:
        """Unfolded patches without the bias, ``(samples, groups, fan-in, positions)``."""
        padded = pad_input(self._x, self._layer, self._geometry())
        columns = _unfold(padded, self._kernel, self._stride, self._dilation)
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

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        groups, _, width = test_matrix.shape
        for part in chunks(self.samples, self.positions * groups * width, self._x.element_size(), limit):
            patches = self.part(part)
            patches.add_correlation(total, weighted(patches.project(test_matrix), weights, part))

    def add_correlation(self, total: Tensor, rows: Tensor) -> None:
        """``total += sum_{s,t} a z^T`` for rows ``z`` ``(samples, groups, positions, width)``."""
        groups, width = rows.shape[1], rows.shape[3]
        image = rows.transpose(2, 3).reshape(rows.shape[0], groups * width, *self._grid)
        shape = (groups * width, self._layer.weight_shape[1], *self._kernel)
        correlation = self._weight_gradient(self._x, shape, image, *self._arguments())
        total[:, : self._fan_in] += correlation.reshape(groups, width, -1).transpose(1, 2)
        if self._layer.bias is not None:
            total[:, self._fan_in] += rows.sum((0, 2))

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        if self._layer.bias is not None:
            self._add_bias_gram(total, weights)
        roots = None if weights is None else weights.sqrt()
        self._with(weighted(self._x, roots), self._padding)._add_patch_gram(total, limit)

    def _add_patch_gram(self, total: Tensor, limit: int) -> None:
        """The part of the Gram without the bias."""
        size = self._fan_in
        if self._correlates():
            x = pad_input(self._x, self._layer, self._geometry())
            add_patch_gram(total[0, :size, :size], x, self._kernel, self._dilation, limit)
        else:
            self._add_unfolded(total[:, :size, :size], limit)

    def _correlates(self) -> bool:
        """Whether correlating the input with itself costs less than unfolding; see `correlation_cost`."""
        dims, channels = len(self._kernel), self._x.shape[1]
        if self._layer.groups > 1 or max(self._stride) > 1 or (dims == 3 and channels < 32):
            return False
        padded = tuple(size + 2 * p for size, p in zip(self._x.shape[2:], self._padding, strict=True))
        square = self._fan_in**2
        cost = self.samples * correlation_cost(channels, self._kernel, self._dilation, padded)
        cost += 500 * square + (1e9 if dims == 3 else 2e8)
        return cost < self.samples * self.positions * (square + 100 * self._fan_in)

    def _add_unfolded(self, total: Tensor, limit: int) -> None:
        numbers = self._fan_in * self._layer.groups * self.positions
        item = self._x.element_size()
        if item * numbers > limit and self._grid[0] > 1:  # one sample alone takes too much memory
            for band in self._bands(-(-item * numbers // limit)):
                band._add_unfolded(total, limit)
            return
        for part in chunks(self.samples, max(numbers, total.numel() * (total.shape[0] > 1)), item, limit):
            rows = self.part(part)._columns().transpose(2, 3)
            add_products(total, rows, rows)

    def _add_bias_gram(self, total: Tensor, weights: Tensor | None) -> None:
        ones = self._x.new_ones(self.samples, self._layer.groups, self.positions, 1)
        sums = total.new_zeros(*total.shape[:2], 1)
        self.add_correlation(sums, weighted(ones, weights))
        total[:, :, self._fan_in] += sums[:, :, 0]
        total[:, self._fan_in, : self._fan_in] += sums[:, : self._fan_in, 0]

    def _bands(self, count: int) -> Iterator[Patches]:
        """The same patches in bands along the first spatial dimension."""
        x, no_padding = pad_input(self._x, self._layer, self._geometry()), (0,) * len(self._kernel)
        step = max(1, self._grid[0] // count)
        reach = self._dilation[0] * (self._kernel[0] - 1) + 1
        for start in range(0, self._grid[0], step):
            stop = min(self._grid[0], start + step)
            first, last = start * self._stride[0], (stop - 1) * self._stride[0] + reach
            yield self._with(x[:, :, first:last], no_padding)

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        samples, groups, _, outputs = output_gradients.shape
        columns = output_gradients.transpose(2, 3)
        if self._layer.weight_shape[1] == 1 and groups > 1:
            gradients = self._depthwise(columns)
        elif self._by_convolution(outputs, limit):
            gradients = self._one_by_one(columns)
        else:
            gradients = columns.new_empty(samples, groups, outputs, self._fan_in)
            numbers = groups * self._fan_in * self.positions
            for part in chunks(samples, numbers, gradients.element_size(), limit):
                torch.matmul(columns[part], self.part(part)._columns().transpose(2, 3), out=gradients[part])
        gradients = gradients.reshape(samples, groups, outputs, self._fan_in)
        if self._layer.bias is None:
            return gradients
        return torch.cat([gradients, columns.sum(3, keepdim=True)], dim=3)

    def _by_convolution(self, outputs: int, limit: int) -> bool:
        """Whether a convolution call per sample costs less than unfolding, as it does for large maps."""
        unfolded = self._layer.groups * self._fan_in * self.positions
        if unfolded * self._x.element_size() > limit:
            return True
        cost = _CALL_COST + _WEIGHT_COST * self._layer.groups * self._fan_in * outputs
        return self._x.device.type == "cpu" and unfolded > cost

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
        """One call for all samples, with every channel of every sample as a group."""
        samples, groups, outputs, _ = columns.shape
        x = self._x.reshape(1, -1, *self._x.shape[2:])
        image = columns.reshape(1, -1, *self._grid)
        shape = (samples * groups * outputs, 1, *self._kernel)
        stride, padding, dilation, _ = self._arguments()
        return self._weight_gradient(x, shape, image, stride, padding, dilation, samples * groups)


def _unfold(padded: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Patches ``(samples, channels * kernel, positions)`` of any number of spatial dimensions.

    A strided view, copied once; faster than `F.unfold`, five times so for few channels.
    """
    windows, dims = padded, len(kernel)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        windows = windows.unfold(axis + 2, d * (k - 1) + 1, s)[..., ::d]
    # (samples, channels, *positions, *kernel): the kernel comes before the positions
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    return windows.permute(order).reshape(padded.shape[0], padded.shape[1] * prod(kernel), -1)
