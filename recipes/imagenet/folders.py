"""Folders of images as loaders: ImageNet's layout with a folder for each wnid, or foreign images without labels."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DistributedSampler, Subset

from posthoc_uq.cli.images import FolderImages, ImageLoader, image_files
from posthoc_uq.cli.labels import folder_labels
from posthoc_uq.cli.models import TrainedModel
from posthoc_uq.core.distributed import rank, world
from posthoc_uq.core.errors import PosthocUQError

WNID = re.compile(r"n\d{8}")


class Images(NamedTuple):
    """The images of a folder, and their labels where it has class folders."""

    dataset: FolderImages
    labels: Sequence[int] | None

    def loader(
        self, indices: Sequence[int], batch_size: int, workers: int, *, divided: bool = False
    ) -> ImageLoader:
        """Batches of the images of these numbers; `divided`: of this process's part, as `uq.fit` wants it."""
        picked = Subset(self.dataset, indices)
        sampler = DistributedSampler(picked, shuffle=False) if divided and world() > 1 else None
        return ImageLoader(picked, batch_size, workers, sampler)


def labelled(folder: Path, source: TrainedModel, class_map: Path | None) -> Images:
    """The images of class folders.

    Args:
        folder: with a folder for each class.
        source: the model, whose outputs the classes must be.
        class_map: which output a folder is, as the option ``--class-map`` of the command line takes it.

    Raises:
        PosthocUQError: no images, or folders that cannot be told to be an output.
    """
    files = existing(folder)
    stray = [file for file in files if os.sep not in file]
    if stray:
        raise PosthocUQError(f"'{folder}' must have a folder for each class; '{stray[0]}' is in none.")
    classes = sorted({file.split(os.sep)[0] for file in files})
    first = FolderImages(str(folder), files, None, source.transform).first()
    outputs = source.outputs(first[0]).shape[-1]
    index = folder_labels(classes, outputs, None if class_map is None else str(class_map), str(folder))
    labels = [index[file.split(os.sep)[0]] for file in files]
    return Images(FolderImages(str(folder), files, labels, source.transform), labels)


def unlabelled(folder: Path, source: TrainedModel) -> Images:
    """All images in a folder and the folders in it."""
    return Images(FolderImages(str(folder), existing(folder), None, source.transform), None)


def existing(folder: Path) -> list[str]:
    """The image files of a folder.

    Raises:
        PosthocUQError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise PosthocUQError(f"There is no folder '{folder}'.")
    files = image_files(str(folder))
    if not files:
        raise PosthocUQError(f"There are no images in the folder '{folder}'.")
    return files


def imagenet_map(folder: Path, target: Path) -> Path | None:
    """Which output a wnid is in the order of ImageNet's 1,000 classes, written to `target`, one wnid a line; None
    where the folders are not all wnids.
    """
    names = [item.name for item in folder.iterdir() if item.is_dir()] if folder.is_dir() else []
    if not names or not all(WNID.fullmatch(name) for name in names):
        return None
    from timm.data.imagenet_info import ImageNetInfo

    if rank() == 0:
        target.write_text("\n".join(ImageNetInfo().label_names()) + "\n")
    return target


def some(size: int, count: int | None, seed: int) -> list[int]:
    """`count` of the numbers below `size`, drawn at random without regard to order, ascending; all without `count`."""
    if count is None or count >= size:
        return list(range(size))
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(size, generator=generator)[:count].tolist())


def parted(size: int, count: int, limit: int | None, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the validation images in two disjoint parts: `count` for the search, the rest (at most `limit`) for
    the evaluation.

    Raises:
        PosthocUQError: nothing would be left to evaluate on.
    """
    if not 0 < count < size:
        raise PosthocUQError(
            f"--search-images {count} of {size} validation images leaves none to evaluate on; take fewer."
        )
    search = some(size, count, seed)
    taken = set(search)
    rest = [number for number in range(size) if number not in taken]
    return search, [rest[i] for i in some(len(rest), limit, seed + 1)]
