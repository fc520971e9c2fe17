"""Scenes: figures with textures over photographs, the class of every pixel, and what the network never saw.

Classes are the background (a crop of a photograph of scikit-image), discs, squares and triangles; each kind has a range
of hues of its own, with stripes and noise. Foreign are, in other scenes over the same photographs, stars of another
hue, and discs cut out of photographs that no scene has.
"""

from __future__ import annotations

import colorsys
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from skimage import data
from skimage.draw import disk, polygon
from torch import Tensor

CLASSES = ("background", "disc", "square", "triangle")
FOREIGN = ("star", "photograph")
SIZE = 64

_HUES = {"disc": 0.0, "square": 0.33, "triangle": 0.62, "star": 0.14}
_NEAR = 0.05  # how far a figure's hue may be from its kind's
_FAMILIAR = ("astronaut", "coffee", "gravel", "grass")
_UNFAMILIAR = ("chelsea", "brick", "rocket")

Array = np.ndarray[Any, Any]


class Scenes(NamedTuple):
    """Images (scenes, 3, size, size) in [0, 1], classes (scenes, size, size), and where they are foreign.

    Attributes:
        foreign: true where a pixel belongs to a foreign figure; its class is that of the background.
    """

    images: Tensor
    classes: Tensor
    foreign: Tensor


@cache
def _photograph(name: str) -> Array:
    """A photograph (height, width, 3) in [0, 1], at half its size."""
    pixels = np.asarray(getattr(data, name)()).astype(np.float32) / 255
    pixels = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)
    return pixels[::2, ::2, :3]


def _crop(names: tuple[str, ...], size: int, random: np.random.Generator) -> Array:
    photograph = _photograph(names[random.integers(len(names))])
    top, left = (int(random.integers(0, edge - size + 1)) for edge in photograph.shape[:2])
    return photograph[top : top + size, left : left + size].copy()


def _mask(kind: str, size: int, random: np.random.Generator) -> Array:
    """Where a figure of some kind lies, (size, size)."""
    radius = random.uniform(0.11, 0.2) * size
    centre = random.uniform(radius, size - radius, 2)
    found = np.zeros((size, size), dtype=bool)
    if kind in ("disc", "photograph"):
        found[disk(tuple(centre), radius, shape=found.shape)] = True
        return found
    corners = {"square": 4, "triangle": 3, "star": 10}[kind]
    angles = random.uniform(0, 2 * np.pi) + 2 * np.pi * np.arange(corners) / corners
    radii = (
        np.where(np.arange(corners) % 2 == 0, radius, 0.45 * radius)
        if kind == "star"
        else np.full(corners, radius)
    )
    found[polygon(centre[0] + radii * np.sin(angles), centre[1] + radii * np.cos(angles), found.shape)] = True
    return found


def _surface(kind: str, size: int, random: np.random.Generator) -> Array:
    """The colours of a figure: a hue of its kind with stripes and noise."""
    if kind == "photograph":
        return _crop(_UNFAMILIAR, size, random)
    hue = (_HUES[kind] + random.uniform(-_NEAR, _NEAR)) % 1
    colour = np.array(colorsys.hsv_to_rgb(hue, random.uniform(0.5, 0.9), random.uniform(0.5, 0.9)))
    rows, columns = np.mgrid[:size, :size]
    angle, period = random.uniform(0, np.pi), random.uniform(3, 8)
    stripes = 0.12 * np.sin(2 * np.pi * (rows * np.sin(angle) + columns * np.cos(angle)) / period)
    return colour + stripes[..., None] + random.normal(0, 0.05, (size, size, 3))


def scenes(count: int, seed: int, foreign: str | None = None, size: int = SIZE) -> Scenes:
    """Scenes of two to four figures, which may lie over each other; with `foreign` one more of that kind on top.

    Args:
        count: how many.
        seed: of all that is random.
        foreign: one of `FOREIGN`, or None.
        size: height and width.
    """
    random = np.random.default_rng(seed)
    images = np.empty((count, size, size, 3), np.float32)
    classes, strange = np.zeros((count, size, size), np.int64), np.zeros((count, size, size), bool)
    for number in range(count):
        image = _crop(_FAMILIAR, size, random)
        for _ in range(int(random.integers(2, 5))):
            label = int(random.integers(1, len(CLASSES)))
            where = _mask(CLASSES[label], size, random)
            image[where] = _surface(CLASSES[label], size, random)[where]
            classes[number][where] = label
        if foreign is not None:
            where = _mask(foreign, size, random)
            image[where] = _surface(foreign, size, random)[where]
            classes[number][where], strange[number] = 0, where
        images[number] = np.clip(image + random.normal(0, 0.02, image.shape), 0, 1)
    return Scenes(
        torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
        torch.from_numpy(classes),
        torch.from_numpy(strange),
    )
