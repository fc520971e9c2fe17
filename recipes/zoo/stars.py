"""A mask of cosmic rays as it is installed: deepCR's U-Net (Zhang, Bloom 2020) for Hubble's WFC3, on drawn skies.

python -m recipes.zoo.stars            five kinds of sky; minutes on one core
python -m recipes.zoo.stars --smoke    two skies of each; seconds
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from skimage import data
from torch import Tensor, nn

from recipes.common import in_order
from recipes.zoo.packages import folder_of, module_of
from recipes.zoo.study import Kind, classes, options_of, study

BATCH, SIZE = 2, 64


class Mask(nn.Module):
    """The network without its last sigmoid: two logits a pixel, the second of a cosmic ray."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """From images ``(samples, 1, height, width)`` of mean 0 and variance 1 to ``(samples, 2, height, width)``."""
        inner: Any = self.network
        first = inner.inc(images)
        logit = inner.outc(inner.up8(inner.down1(first), first))
        return torch.cat([torch.zeros_like(logit), logit], 1)


def mask() -> Mask:
    """The network with its weights, which its convolutions compute by `weight_norm`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has another weight_norm since
        network: nn.Module = module_of("deepCR.unet").UNet2Sigmoid(1, 1, 32)
    path = folder_of("deepCR").parent / "learned_models" / "mask" / "WFC3-UVIS.pth"
    weights = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    return Mask(network).eval()


def standardised(images: Tensor) -> Tensor:
    """Of mean 0 and variance 1, as the package does it."""
    return (images - images.mean((2, 3), keepdim=True)) / images.std((2, 3), keepdim=True)


def skies(samples: int, seed: int, noise: float = 5.0, trail: bool = False) -> tuple[Tensor, Tensor]:
    """Stars of a width of a pixel and tracks of cosmic rays on a noisy sky, in electrons: ``(samples, 1, 64, 64)``, and
    1 for a pixel of a track. `trail` adds a satellite's, which is neither.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    rows, columns = torch.meshgrid(torch.arange(SIZE) + 0.0, torch.arange(SIZE) + 0.0, indexing="ij")
    images, labels = torch.zeros(samples, 1, SIZE, SIZE), torch.zeros(samples, SIZE, SIZE).long()
    for image, label in zip(images[:, 0], labels, strict=True):
        for _ in range(12):
            distance = (rows - uniform(0, SIZE)).square() + (columns - uniform(0, SIZE)).square()
            image += 10 ** uniform(1.5, 3.5) * torch.exp(-distance / 2)
        for _ in range(6):
            angle, length, charge = uniform(0, 2 * torch.pi), uniform(1, 12), 10 ** uniform(2, 3)
            steps = torch.linspace(0, length, 40)
            cosine, sine = torch.tensor([angle]).cos(), torch.tensor([angle]).sin()
            down = (uniform(4, SIZE - 4) + steps * cosine).long().clamp(0, SIZE - 1)
            right = (uniform(4, SIZE - 4) + steps * sine).long().clamp(0, SIZE - 1)
            hit = torch.zeros_like(label).bool()
            hit[down, right] = True
            image += charge * hit
            label |= hit.long()
        if trail:
            along = (rows - uniform(20, 44) - 0.5 * (columns - 32)).square()
            image += 200 * torch.exp(-along / 8)
        image += noise * torch.randn(SIZE, SIZE, generator=generator)
    return images, labels


def hubble(samples: int) -> Tensor:
    """Crops of scikit-image's picture of the deep field, in grey, which has been processed for the eye."""
    picture = torch.as_tensor(data.hubble_deep_field()).float().mean(2)
    generator = torch.Generator().manual_seed(8)
    crops: list[Tensor] = []
    for _ in range(samples):
        top, left = torch.randint(0, 800, (2,), generator=generator).tolist()
        crops.append(picture[top : top + SIZE, left : left + SIZE])
    return torch.stack(crops).unsqueeze(1)


def kinds_of_sky(samples: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Images by their kind, with the mask where it is known; familiar ones first."""
    field = hubble(samples)
    return {
        "drawn skies": skies(samples, 1),
        "noise of 20 dB more": skies(samples, 2, noise=50),
        "a satellite's trail": skies(samples, 3, trail=True),
        "Hubble's deep field": (field, torch.zeros(samples, SIZE, SIZE).long()),
        "a photograph of bricks": (
            torch.as_tensor(data.brick()).float()[:SIZE, :SIZE].expand(1, 1, -1, -1),
            None,
        ),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, save, load, and print a table of scores by kind of sky."""
    options = options_of(__doc__, arguments, 12, 2)
    kinds = {
        kind: Kind(
            in_order(standardised(images), torch.zeros(len(images)) if labels is None else labels, BATCH),
            labels,
        )
        for kind, (images, labels) in kinds_of_sky(options.samples).items()
    }
    images, labels = skies(options.samples, 0)
    study(options, "stars", mask(), in_order(standardised(images), labels, BATCH), kinds, classes())


if __name__ == "__main__":
    main()
