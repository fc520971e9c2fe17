"""Foreign images of 28 x 28 pixels that need no download: crops of photographs, letters in many typefaces, and
distorted training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import skimage.data
import torch
from PIL import Image, ImageDraw, ImageFont
from skimage.color import rgb2gray
from torch import Tensor
from torchvision.transforms import v2

PHOTOS = ("astronaut", "camera", "coffee", "chelsea", "coins", "moon", "rocket", "brick", "grass", "gravel")
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmmi10"),
)
"""Typefaces that come with matplotlib."""


def photos(number: int, seed: int = 0, names: Sequence[str] = PHOTOS) -> Tensor:
    """Square crops, of 28 to 112 pixels, of scikit-image's photographs: (number, 28, 28), grey from 0 to 255."""
    generator = np.random.default_rng(seed)
    pictures = [rgb2gray(p) * 255 if p.ndim == 3 else p for p in (getattr(skimage.data, n)() for n in names)]
    crops = np.empty((number, 28, 28), dtype=np.uint8)
    for crop in crops:
        picture = pictures[generator.integers(len(pictures))]
        side = int(generator.integers(28, 113))
        top, left = (int(generator.integers(size - side + 1)) for size in picture.shape)
        part = Image.fromarray(picture[top : top + side, left : left + side].astype(np.uint8))
        crop[:] = np.asarray(part.resize((28, 28), Image.Resampling.BOX))
    return torch.from_numpy(crops)


def letters(number: int, seed: int = 0) -> Tensor:
    """Capitals A to J in matplotlib's typefaces, white on black, after NotMNIST (Bulatov 2011): (number, 28, 28)."""
    generator = np.random.default_rng(seed)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    images = np.empty((number, 28, 28), dtype=np.uint8)
    for image in images:
        size = int(generator.integers(20, 29))
        font = ImageFont.truetype(str(folder / f"{FONTS[generator.integers(len(FONTS))]}.ttf"), size)
        canvas = Image.new("L", (28, 28))
        x, y = 14 + generator.integers(-2, 3), 14 + generator.integers(-2, 3)
        letter = "ABCDEFGHIJ"[generator.integers(10)]
        ImageDraw.Draw(canvas).text((float(x), float(y)), letter, fill=255, font=font, anchor="mm")
        image[:] = np.asarray(canvas)
    return torch.from_numpy(images)


def augmented(images: Tensor, number: int, seed: int = 0) -> Tensor:
    """Some of these images cropped, flipped, in other tones, blurred, solarised: (number, 28, 28), bytes as they are
    given, (samples, 28, 28). The published configurations of Rudner et al. (2022) have such a context.
    """
    distort = v2.Compose(
        [
            v2.RandomResizedCrop(28, scale=(0.2, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(brightness=0.8, contrast=0.8),
            v2.RandomApply([v2.GaussianBlur(3)]),
            v2.RandomSolarize(128.0),
        ]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = images[torch.randperm(len(images))[:number]]
        return torch.cat([distort(image.unsqueeze(0)) for image in chosen])
