"""Folders of images as loaders: ImageNet's layout with a folder for each wnid, or foreign images without labels."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DistributedSampler, Subset

from posthoc_uq import PosthocUQError
from posthoc_uq.app import FolderImages, ImageLoader, TrainedModel, folder_labels, image_files
from posthoc_uq.core import rank, world

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


def classes_of(folder: Path, files: Sequence[str], listed: Path | None) -> list[str]:
    """The class of every image of a folder: the folder in it that the image is in, or what the list says of it.

    Raises:
        PosthocUQError: an image has no class, or the list cannot be read.
    """
    if listed is not None:
        return _listed(folder, files, listed)
    stray = [file for file in files if os.sep not in file]
    if stray:
        raise PosthocUQError(
            f"'{folder}' must have a folder for each class; '{stray[0]}' is in none. The flat folder of ImageNet's "
            f"validation images needs --val-labels FILE, their official list of labels."
        )
    return [file.split(os.sep)[0] for file in files]


def _listed(folder: Path, files: Sequence[str], path: Path) -> list[str]:
    """Classes by a list: ImageNet's ``ILSVRC2012_validation_ground_truth.txt`` with ``meta.mat`` beside it,
    ``LOC_val_solution.csv``, or one wnid a line, in the order of the images.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PosthocUQError(f"--val-labels: '{path}' cannot be read: {error}.") from None
    lines = [line.strip() for line in lines if line.strip()]
    if lines and lines[0].startswith("ImageId,"):
        by_name = {name: text.split()[0] for name, text in (line.split(",", 1) for line in lines[1:])}
        missing = [file for file in files if Path(file).stem not in by_name]
        if missing:
            raise PosthocUQError(f"--val-labels: '{path}' says nothing of '{missing[0]}'.")
        return [by_name[Path(file).stem] for file in files]
    if len(lines) != len(files):
        raise PosthocUQError(
            f"--val-labels: '{path}' has {len(lines)} labels, and '{folder}' {len(files)} images; it must have one for "
            f"each, in the order of their names."
        )
    if all(line.isdecimal() for line in lines):
        wnids = _wnids(path.with_name("meta.mat"))
        lines = [wnids.get(int(line), line) for line in lines]
    strange = [line for line in lines if not WNID.fullmatch(line)]
    if strange:
        raise PosthocUQError(f"--val-labels: '{path}' has the label '{strange[0]}', which is no wnid.")
    order = sorted(range(len(files)), key=lambda index: files[index])
    return [label for _, label in sorted(zip(order, lines, strict=True))]


def _wnids(path: Path) -> dict[int, str]:
    """The wnid of each number that ImageNet's development kit gives a class."""
    from scipy.io import loadmat

    try:
        synsets = loadmat(path, squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    except (OSError, KeyError, ValueError) as error:
        raise PosthocUQError(
            f"--val-labels: labels that are numbers need the development kit's '{path}', which cannot be read: {error}."
        ) from None


def labelled(
    folder: Path, source: TrainedModel, class_map: Path | None, listed: Path | None = None
) -> Images:
    """The images of class folders, or of a list.

    Args:
        folder: with a folder for each class.
        source: the model, whose outputs the classes must be.
        class_map: which output a folder is, as the option ``--class-map`` of the command line takes it.
        listed: the list of labels of a flat folder.

    Raises:
        PosthocUQError: no images, or classes that cannot be told to be an output.
    """
    files = existing(folder)
    classes = classes_of(folder, files, listed)
    first = FolderImages(str(folder), files, None, source.transform).first()
    outputs = source.outputs(first[0]).shape[-1]
    mapped = None if class_map is None else str(class_map)
    index = folder_labels(sorted(set(classes)), outputs, mapped, str(folder))
    labels = [index[name] for name in classes]
    return Images(FolderImages(str(folder), files, labels, source.transform), labels)


def unlabelled(folder: Path, source: TrainedModel) -> Images:
    """All images in a folder and the folders in it."""
    images = FolderImages(str(folder), existing(folder), None, source.transform)
    source.outputs(images.first()[0])  # one that the model does not take is told before the work
    return Images(images, None)


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


def imagenet_map(names: Collection[str], target: Path) -> Path | None:
    """Which output a wnid is in the order of ImageNet's 1,000 classes, written to `target`, one wnid a line; None
    where the classes are not all wnids.
    """
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
