"""Images for the digits part: scikit-learn's handwritten digits, and images that are none.

scikit-learn's digits are 32 x 32 bitmaps of handwriting whose inked pixels were counted in blocks of 4 x 4,
which gives 8 x 8 counts from 0 to 16. Letters are made the same way from the fonts that matplotlib carries,
so that nothing but their shape tells them from digits. All images come divided by 16, as (samples, 1, 8, 8).
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

ROTATION_KEEPS = (0, 1, 8)
"""Digits left out of the rotated ones: 0 and 8 may still pass for digits, 1 is a bare stroke."""

LETTERS = "ACEFGHJKLMNPRTUVWXYadefhkmnprtuwxy"
"""Letters that cannot be read as a digit: without B, D, I, O, Q, S, Z, b, c, g, i, j, l, o, q, s, v and z."""


class Labelled(NamedTuple):
    """Images (samples, 1, 8, 8) and their labels (samples,)."""

    images: Tensor
    labels: Tensor


class DigitsData(NamedTuple):
    """The digits in three disjoint parts."""

    train: Labelled
    validation: Labelled
    test: Labelled


def load_digits(seed: int, train: int = 200, validation: int = 250) -> DigitsData:
    """Split scikit-learn's 1,797 digits at random; what training and validation leave is for the test."""
    from sklearn.datasets import load_digits as load

    pixels, targets = load(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(targets))
    images = torch.tensor(pixels[order], dtype=torch.float32, device="cpu").reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets[order], dtype=torch.int64, device="cpu")
    bounds = (0, train, train + validation, len(labels))
    return DigitsData(*(Labelled(images[a:b], labels[a:b]) for a, b in pairwise(bounds)))


def augmented(data: Labelled, copies: int, seed: int) -> Labelled:
    """Every image ``copies`` times, each shifted, scaled, sheared and turned a little, with some noise.

    Turns stay below 15 degrees, shifts below 0.8 pixels, scales within 15 %; the noise's deviation is 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    images = data.images.repeat(copies, 1, 1, 1)

    def uniform(bound: float, *shape: int) -> Tensor:
        return bound * (2 * torch.rand(len(images), *shape, generator=generator, device="cpu") - 1)

    angle, scale, shear = uniform(0.26), 1 + uniform(0.15, 2), uniform(0.2)
    first = torch.stack([angle.cos() * scale[:, 0], shear - angle.sin()], dim=-1)
    second = torch.stack([angle.sin(), angle.cos() * scale[:, 1]], dim=-1)
    maps = torch.cat([torch.stack([first, second], dim=1), uniform(0.2, 2, 1)], dim=2)
    grid = nn.functional.affine_grid(maps, list(images.shape), align_corners=False)
    moved = nn.functional.grid_sample(images, grid, align_corners=False)
    pixel_noise = 0.1 * torch.randn(moved.shape, generator=generator, device="cpu")
    return Labelled((moved + pixel_noise).clamp(0, 1), data.labels.repeat(copies))


def rotated_digits(data: Labelled) -> Tensor:
    """Digits turned by 90 degrees to the left, without those of `ROTATION_KEEPS`."""
    foreign = ~torch.isin(data.labels, torch.tensor(ROTATION_KEEPS, device="cpu"))
    return torch.rot90(data.images[foreign], 1, dims=(2, 3))


def rendered_letters() -> Tensor:
    """Every letter of `LETTERS` in twelve cuts of the DejaVu font family that ships with matplotlib."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [
        path
        for family in ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif")
        for path in sorted(folder.glob(f"{family}.ttf")) + sorted(folder.glob(f"{family}-*.ttf"))
    ]
    images = [_letter(letter, path) for path in fonts for letter in LETTERS]
    return torch.from_numpy(np.stack(images)).unsqueeze(1) / 16


def _letter(letter: str, font_path: Path) -> np.ndarray:
    """One letter as the digits were made: fit into 32 x 32, ink counted in blocks of 4 x 4."""
    font = ImageFont.truetype(str(font_path), 96)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(letter))
    glyph = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(glyph).text((-left, -top), letter, font=font, fill=255)
    shrink = 32 / max(glyph.size)
    width, height = (max(4, round(side * shrink)) for side in glyph.size)
    bitmap = np.zeros((32, 32), dtype=bool)
    x, y = (32 - width) // 2, (32 - height) // 2
    bitmap[y : y + height, x : x + width] = np.asarray(glyph.resize((width, height))) > 127
    return bitmap.reshape(8, 4, 8, 4).sum(axis=(1, 3)).astype(np.float32)
