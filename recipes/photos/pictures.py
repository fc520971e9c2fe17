"""Pictures: photographs that ship with scikit-image and scikit-learn, and foreign ones.

Nothing is downloaded: only files inside the two packages are read, the rest is drawn.
"""

from collections.abc import Sequence
from importlib.resources import files
from math import cos, pi, sin
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter
from torch import Tensor

from posthoc_uq.app.paths import IMAGE_FORMATS

MEAN, STD, SIZE, RESIZE = 0.498, 0.502, 224, 256
"""Preprocessing of the EfficientNet-Lite weights: one mean and standard deviation for all channels."""

FIT_PHOTOS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
"""The everyday photographs inside the scikit-image package; the posterior is fitted on crops of these."""


class Picture(NamedTuple):
    """An image in RGB with its caption and kind ("photo", "new photo", "texture", "noise" or "drawing")."""

    name: str
    kind: str
    image: Image.Image


def pictures(seed: int) -> list[Picture]:
    """What the recipe shows: photographs first, then textures and noise, then drawings; six of each."""
    return [
        Picture("coffee", "photo", _skimage("coffee.png")),
        Picture("Chelsea the cat", "photo", _skimage("chelsea.png")),
        Picture("motorcycle", "photo", _skimage("motorcycle_left.png")),
        Picture("rocket", "photo", _skimage("rocket.jpg")),
        Picture("flower", "new photo", _sklearn("flower.jpg")),
        Picture("temple", "new photo", _sklearn("china.jpg")),
        Picture("brick", "texture", _skimage("brick.png")),
        Picture("grass", "texture", _skimage("grass.png")),
        Picture("gravel", "texture", _skimage("gravel.png")),
        Picture("white noise", "noise", _noise_image(seed, blur=0)),
        Picture("coarse noise", "noise", _noise_image(seed + 1, blur=6)),
        Picture("clouds", "noise", _noise_image(seed + 2, blur=24)),
        Picture("horse", "drawing", _skimage("horse.png")),
        Picture("house", "drawing", _house()),
        Picture("face", "drawing", _face()),
        Picture("star", "drawing", _star()),
        Picture("spiral", "drawing", _spiral()),
        Picture("rings", "drawing", _rings()),
    ]


def photo(name: str) -> Image.Image:
    """One of the photographs inside the scikit-image package, by file name."""
    return _skimage(name)


def preprocess(images: Sequence[Image.Image]) -> Tensor:
    """Shorter side to 256, centre crop of 224, normalised: (images, 3, 224, 224)."""
    return normalise([centre_crop(image) for image in images])


def centre_crop(image: Image.Image) -> Image.Image:
    """The 224 x 224 pixels that the network sees."""
    scale = RESIZE / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    return resized.crop((left, top, left + SIZE, top + SIZE))


def random_crops(images: Sequence[Image.Image], count: int, seed: int) -> Tensor:
    """Square crops of 35 to 100 % of the shorter side, half of them mirrored: (count, 3, 224, 224)."""
    generator = np.random.default_rng(seed)
    crops: list[Image.Image] = []
    for index in range(count):
        image = images[index % len(images)]
        side = int(min(image.size) * generator.uniform(0.35, 1.0))
        left, top = (int(generator.integers(0, edge - side + 1)) for edge in image.size)
        crop = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
        if generator.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        crops.append(crop)
    return normalise(crops)


def normalise(images: Sequence[Image.Image]) -> Tensor:
    """RGB images of one size as a normalised batch (images, 3, height, width)."""
    pixels = np.stack([np.asarray(image, dtype=np.float32) for image in images]) / 255
    return torch.from_numpy((pixels - MEAN) / STD).permute(0, 3, 1, 2).contiguous()


def _skimage(name: str) -> Image.Image:
    return _rgb(_folder("skimage") / "data" / name)


def _sklearn(name: str) -> Image.Image:
    return _rgb(_folder("sklearn") / "datasets" / "images" / name)


def _folder(package: str) -> Path:
    """Where an installed package lies."""
    return Path(str(files(package)))


def _rgb(path: Path) -> Image.Image:
    """The image without its transparency, which is put on white paper."""
    with Image.open(path, formats=IMAGE_FORMATS) as image:
        rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _noise_image(seed: int, blur: float) -> Image.Image:
    """Uniform noise, smoothed over ``blur`` pixels and stretched back to the full range."""
    pixels = np.random.default_rng(seed).random((RESIZE, RESIZE, 3))
    if blur:
        pixels = gaussian_filter(pixels, sigma=(blur, blur, 0), mode="wrap")
    low, high = pixels.min(axis=(0, 1)), pixels.max(axis=(0, 1))
    return Image.fromarray(np.uint8(255 * (pixels - low) / (high - low)))


def _canvas() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """White paper of twice the size: shrinking it later smooths the lines."""
    paper = Image.new("RGB", (2 * RESIZE, 2 * RESIZE), "white")
    return paper, ImageDraw.Draw(paper)


def _house() -> Image.Image:
    paper, draw = _canvas()
    draw.rectangle((0, 400, 512, 512), fill="#7CB55A")
    draw.rectangle((130, 230, 380, 430), fill="#F2D7A0", outline="black", width=6)
    draw.polygon([(100, 235), (255, 100), (410, 235)], fill="#B5422F", outline="black", width=6)
    draw.rectangle((220, 320, 290, 430), fill="#6B4A2B", outline="black", width=6)
    for left in (155, 310):
        draw.rectangle((left, 265, left + 45, 310), fill="#9CD3F0", outline="black", width=5)
    draw.ellipse((410, 50, 470, 110), fill="#FFD23F", outline="black", width=5)
    return paper


def _face() -> Image.Image:
    paper, draw = _canvas()
    draw.ellipse((86, 86, 426, 426), fill="#FFD23F", outline="black", width=10)
    for left in (180, 290):
        draw.ellipse((left, 180, left + 40, 240), fill="black")
    draw.arc((160, 190, 352, 360), 20, 160, fill="black", width=12)
    return paper


def _star() -> Image.Image:
    paper, draw = _canvas()
    radii = [190 if corner % 2 == 0 else 75 for corner in range(10)]
    corners = [
        (256 + radius * sin(corner * pi / 5), 266 - radius * cos(corner * pi / 5))
        for corner, radius in enumerate(radii)
    ]
    draw.polygon(corners, fill="#3E7CB1", outline="black", width=8)
    return paper


def _spiral() -> Image.Image:
    paper, draw = _canvas()
    angles = [step * pi / 60 for step in range(600)]
    points = [(256 + 6.5 * angle * cos(angle), 256 + 6.5 * angle * sin(angle)) for angle in angles]
    draw.line(points, fill="black", width=9, joint="curve")
    return paper


def _rings() -> Image.Image:
    paper, draw = _canvas()
    for left, top, colour in ((70, 150, "#0072B2"), (180, 150, "#D55E00"), (125, 235, "#009E73")):
        draw.ellipse((left, top, left + 200, top + 200), outline=colour, width=20)
    return paper
