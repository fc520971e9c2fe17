"""Foreign inputs for networks of 28 x 28 grey pixels, and for tables."""

from __future__ import annotations

from functools import cache

import torch
from _sets import split_of
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from recipes.fashion_mnist import data as files
from recipes.function_space import foreign as drawn

KINDS = ("other", "turned", "noise", "blur", "dark", "letters", "photos", "textures")
TEXTURES = ("brick", "grass", "gravel")
OTHER = {"digits 28": "fashion", "fashion": "digits 28"}


@cache
def foreign_pictures(data: str, number: int, seed: int = 0) -> dict[str, Tensor]:
    """Inputs by kind, each (number, 1, 28, 28): pictures of the other data set, test pictures turned by 90 degrees,
    blurred (Gaussian, deviation 2) and at a fifth of their contrast, uniform noise, letters in many typefaces, crops of
    photographs and of textures.

    Args:
        data: that the network was trained on, ``"digits 28"`` or ``"fashion"``.
        number: of every kind.
        seed: of what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    test = files.pixels(split_of(data, 0).test.inputs[:number])
    photos = tuple(name for name in drawn.PHOTOS if name not in TEXTURES)
    raw = {
        "other": files.pixels(split_of(OTHER[data], 0).test.inputs[:number]),
        "turned": test.rot90(1, (1, 2)),
        "noise": torch.randint(256, test.shape, generator=generator),
        "blur": gaussian_blur(test.unsqueeze(1).float(), [9, 9], [2.0, 2.0]).squeeze(1),
        "dark": test.float() / 5,
        "letters": drawn.letters(number, seed),
        "photos": drawn.photos(number, seed, photos),
        "textures": drawn.photos(number, seed, TEXTURES),
    }
    return {kind: files.normalised(raw[kind]) for kind in KINDS}


def far_rows(inputs: Tensor, number: int, seed: int = 0) -> dict[str, Tensor]:
    """For tables: independent normal columns with three times the deviation of the data (number, columns)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(number, inputs.shape[1], generator=generator)
    return {"far": inputs.mean(0) + 3 * inputs.std(0) * noise}
