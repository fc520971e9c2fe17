"""Training images that are shifted, mirrored, partly inverted and in other tones."""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.contexts.base import Context
from posthoc_uq.contexts.from_data import TrainingBatch
from posthoc_uq.devices import sent
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch
from posthoc_uq.values import NATURAL, UNIT


class Corrupted(Context):
    """Images of the present minibatch that are no longer of the data, as in the published configurations of Rudner et
    al. (2022) for FashionMNIST. Each is, in turn and by chance of its own:

    * shifted by at most `padding` pixels in either direction; what comes in is as dark as can be;
    * mirrored left to right, with probability 1/2;
    * solarised with probability `solarised`: values from half of the range on are inverted, so that black stays;
    * given another brightness, a factor in ``1 +- brightness`` (then cut off at the ends of the range);
    * given another contrast: differences from the image's mean by a factor in ``1 +- contrast``, cut off likewise.

    The range of each channel is that of the training images as the loader gives them, so they may be normalised. (The
    configurations also blur, with a deviation of a tenth of a pixel, which changes nothing.)

    Args:
        padding: of the crop, in pixels.
        solarised: share of the images that are.
        brightness: largest relative change.
        contrast: likewise.
    """

    needs_data = True

    def __init__(
        self,
        padding: int = 4,
        solarised: float = 0.5,
        brightness: float = 0.5,
        contrast: float = 0.5,
    ) -> None:
        self._padding: int = NATURAL("padding", padding)
        self._solarised: float = UNIT("solarised", solarised)
        self._brightness: float = UNIT("brightness", brightness)
        self._contrast: float = UNIT("contrast", contrast)
        self._range: tuple[Tensor, Tensor] | None = None

    def fresh(self) -> Context:
        return Corrupted(self._padding, self._solarised, self._brightness, self._contrast)

    def observe(self, inputs: Tensor, generator: torch.Generator) -> None:
        if inputs.ndim != 4:
            raise PosthocUQError(
                f"context='corrupted' is for images (samples, channels, height, width), not for inputs of shape "
                f"{tuple(inputs.shape)}; use context='uniform', a loader of inputs, or a callable (n, generator)."
            )
        low, high = (extreme(inputs.detach(), dim=(0, 2, 3)).cpu() for extreme in (torch.amin, torch.amax))
        if self._range is not None:
            low, high = torch.minimum(low, self._range[0]), torch.maximum(high, self._range[1])
        self._range = low, high

    def draw(self, n: int, batch: Batch, generator: torch.Generator) -> Tensor:
        if self._range is None:
            raise PosthocUQError(
                "A corrupted context takes the range of the training images, and has seen none."
            )
        images = TrainingBatch().draw(n, batch, generator)
        low, high = (sent(bound.to(images.dtype), images.device)[:, None, None] for bound in self._range)
        width = torch.where(high > low, high - low, torch.ones_like(high))
        unit = ((images - low) / width).clamp(0, 1)
        corrupted = self._tones(self._moved(unit, generator), generator)
        return low + (high - low) * corrupted

    def _moved(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Crops of the padded images, some of them mirrored."""
        n, channels, height, width = images.shape
        offsets = torch.randint(2 * self._padding + 1, (2, n, 1), generator=generator, device="cpu")
        mirrored = torch.rand(n, 1, generator=generator, device="cpu") < 0.5
        rows, columns = torch.arange(height, device="cpu"), torch.arange(width, device="cpu")
        columns = torch.where(mirrored, columns.flip(0), columns)
        down, across = (sent(offset, images.device) for offset in (rows + offsets[0], columns + offsets[1]))
        padded = torch.nn.functional.pad(images, [self._padding] * 4)
        sample = torch.arange(n, device=images.device)[:, None, None, None]
        channel = torch.arange(channels, device=images.device)[:, None, None]
        return padded[sample, channel, down[:, None, :, None], across[:, None, None, :]]

    def _tones(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Some solarised, all of another brightness and contrast; values from 0 to 1."""
        chances = torch.rand(3, len(images), 1, 1, 1, generator=generator, dtype=torch.float64, device="cpu")
        inverted = sent(chances[0] < self._solarised, images.device)
        brightness, contrast = (
            sent((1 + change * (2 * chance - 1)).to(images.dtype), images.device)
            for change, chance in ((self._brightness, chances[1]), (self._contrast, chances[2]))
        )
        images = torch.where(inverted & (images >= 0.5), 1 - images, images)
        images = (images * brightness).clamp(0, 1)
        middle = images.mean(dim=(1, 2, 3), keepdim=True)
        return (middle + contrast * (images - middle)).clamp(0, 1)
