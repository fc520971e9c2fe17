"""Convolutions as linear layers over patches, pooling, and flattening. Images are ``(B, C, H, W)``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.methods.message_passing.gaussian import FLOOR, Message, clamped
from posthoc_uq.methods.message_passing.linear import sum_backward, sum_forward
from posthoc_uq.methods.message_passing.signals import NOISE_VARIANCE, winning_shares

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Which patches of an image a convolution sees.

    Attributes:
        kernel: height and width.
        stride: in both directions.
        padding: zeros on each side, which are known: zero mean, zero variance, and no message goes to them.
        dilation: distance of a patch's cells.
        groups: of channels that do not mix.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def size(self, height: int, width: int) -> Pair:
        """Height and width of the output."""
        sides = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        down, across = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
        return down, across

    def unfolded(self, image: Tensor) -> Tensor:
        """Patches as rows, ``(B, G, P, I)``."""
        columns = F.unfold(image, self.kernel, self.dilation, self.padding, self.stride)
        return columns.unflatten(1, (self.groups, -1)).transpose(2, 3)

    def folded(self, rows: Tensor, height: int, width: int) -> Tensor:
        """Rows added up where patches overlap, ``(B, C, height, width)``; what belongs to the padding is dropped."""
        columns = rows.transpose(2, 3).flatten(1, 2)
        return F.fold(columns, (height, width), self.kernel, self.dilation, self.padding, self.stride)

    def fold_messages(self, messages: Message, height: int, width: int) -> Message:
        """Messages to the cells of an image: those to the patches it is in are multiplied."""
        return Message(*(self.folded(part, height, width) for part in messages))


def _cut(image: Tensor, windows: Windows) -> Tensor:
    """The cells of every pooling window, ``(B, C, P, cells)``."""
    rows = windows.unfolded(image)  # (B, 1, P, C cells)
    return rows.squeeze(1).unflatten(2, (image.shape[1], -1)).transpose(1, 2)


def _cuts(image: Message, windows: Windows) -> tuple[Tensor, Tensor]:
    return _cut(image.mean, windows), _cut(image.variance, windows)


def _image(values: Tensor, windows: Windows, height: int, width: int) -> Tensor:
    down, across = windows.size(height, width)
    return values.reshape(*values.shape[:2], down, across)


def _returned(cells: Message, image: Message, windows: Windows) -> Message:
    """Messages ``(B, C, P, cells)`` to the cells of windows as messages to the image, of precision 1e-8 at least."""
    rows = Message(*(part.transpose(1, 2).flatten(2, 3).unsqueeze(1) for part in cells))
    return clamped(windows.fold_messages(rows, *image.rho.shape[-2:]), FLOOR)


def _coefficients(image: Message, windows: Windows, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """What the cells of a window are weighted with, and their means and variances, each ``(B, C, P, cells)``."""
    mean, variance = _cuts(image, windows)
    if kind == "average":
        weights = torch.full_like(mean, 1 / mean.shape[-1])
    else:
        weights = winning_shares(mean, variance, NOISE_VARIANCE)
    return weights, mean, variance


def pool_forward(image: Message, windows: Windows, kind: str) -> Message:
    """Average pooling, or a soft selection of the largest, with weights by `winning_shares`.

    The mean of the selection is not the mean of the maximum: it is a weighted mean of the cells.

    Args:
        image: ``(B, C, H, W)``.
        windows: that do not overlap; rows and columns that fill no window are dropped.
        kind: ``"average"`` or ``"max"``.
    """
    weights, mean, variance = _coefficients(image, windows, kind)
    shape = image.rho.shape[-2:]
    outputs = (_image(part, windows, *shape) for part in sum_forward(weights, mean, variance))
    pooled_mean, pooled_variance = outputs
    return clamped(Message(pooled_mean / pooled_variance, pooled_variance.reciprocal()), FLOOR)


def pool_backward(image: Message, back: Message, windows: Windows, kind: str) -> Message:
    """Messages to the image, where `back` is to the outputs; cells without a window get a precision of 1e-8."""
    weights, mean, variance = _coefficients(image, windows, kind)
    to_cells = sum_backward(weights, mean, variance, Message(*(part.flatten(2) for part in back)))
    return _returned(to_cells, image, windows)
