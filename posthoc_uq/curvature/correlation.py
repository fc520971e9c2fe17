"""The input Gram of a convolution of stride 1 from shifted copies of its input, without unfolding.

The Gram is ``A = sum_{s,t} a_st a_st^T`` over the patches ``a_st``. With output positions ``t`` in a grid O and the
dilation ``d``, its block (channels x channels) of the kernel's positions ``k`` and ``k'`` is

    A_kk' = sum_s sum_{t in O} x_s(t + k d) x_s(t + k' d)^T = sum_s sum_{p in O + k d} x_s(p) x_s(p + (k' - k) d)^T,

a correlation of the input with itself at the shift ``k' - k``. Blocks of one shift differ only in their windows
``O + k d``, so only at the border. Along an axis of ``w`` outputs and a kernel of size ``K``, the positions
``(K - 1) d <= p < w`` (the core) are in every window and are summed once a shift; the other positions of each window
(its rim) are summed once a block. Nothing is subtracted, so nothing cancels. Blocks of ``k > k'`` are transposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Sizes = tuple[int, ...]  # along the spatial axes

_COPY_COST = 50  # of one number, in multiply-adds; measured on two x86 cores


def add_patch_gram(total: Tensor, x: Tensor, kernel: Sizes, dilation: Sizes, limit: int) -> None:
    """``total += sum_{s,t} a_st a_st^T`` over the patches of a convolution of stride 1.

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
    """The cost of `add_patch_gram` for a sample in multiply-adds, copies included.

    A call adds about ``500 n^2 + 2e8`` (1e9 for three axes). Unfolding takes ``n^2 T + 100 n T`` a sample.
    """
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
    return float(channels) ** 2 * products + _COPY_COST * channels * rows * every


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
            for row in reversed(range(k - shift)):
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


class _Along(NamedTuple):
    """Shifts along one axis of the core, or of the rim of one window."""

    shifts: int  # their number; the shifts are `dilation` apart
    zero: int  # index of the shift 0
    gap: tuple[int, int]  # positions left out of the window: the core, if this is a rim
    uses: list[tuple[int, slice]]  # the kernel's positions k, each with the shifts that lead to a position k'


def _along(length: int, k: int, d: int) -> list[_Along]:
    reach = d * (k - 1)
    core = _Along(2 * k - 1, k - 1, (0, 0), [(i, slice(k - 1 - i, 2 * k - 1 - i)) for i in range(k)])
    rims = [_Along(k, i, (reach - i * d, length - reach - i * d), [(i, slice(k))]) for i in range(k) if k > 1]
    return [core, *rims] if length > 2 * reach else rims


def _stacks(image: Tensor, kernel: Sizes, dilation: Sizes) -> Iterator[tuple[Tensor, tuple[_Along, ...]]]:
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
