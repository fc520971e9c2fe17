"""Batches of images from a folder or a data set; unreadable files are told apart from other faults."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from posthoc_uq.cli.transforms import ImageTransform
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.paths import (
    IMAGE_ENDINGS,
    IMAGE_FORMATS,
    folder_files,
    irregular,
    only_image_formats,
    too_long,
)

Read = tuple[Tensor, Any, int]


@dataclass(frozen=True)
class Trouble:
    """An item that gave no input; `readable` says that the file itself was in order."""

    name: str
    reason: str
    readable: bool = False

    def __str__(self) -> str:
        return f"{'The image' if self.readable else 'Unreadable image'} '{self.name}': {self.reason}"


def image_files(folder: str) -> list[str]:
    """Images in a folder and all folders in it, as paths relative to it, sorted; hidden ones are left out. Warns of
    links to folders that are not followed: see `posthoc_uq.core.paths.folder_files`.
    """
    left_out: list[str] = []
    paths = sorted(file for file in folder_files(folder, left_out) if file.lower().endswith(IMAGE_ENDINGS))
    if left_out:
        links = "the link" if len(left_out) == 1 else f"{len(left_out)} links, such as"
        warnings.warn(
            f"'{folder}': {links} '{min(left_out)}' to a folder that holds it, or that is read already, "
            f"{'was' if len(left_out) == 1 else 'were'} left out.",
            stacklevel=2,
        )
    return paths


class FolderImages(Dataset[Any]):
    """Image files with their labels, or without."""

    def __init__(
        self, folder: str, files: Sequence[str], labels: Sequence[int] | None, transform: ImageTransform
    ) -> None:
        self._folder, self.files, self._labels, self._transform = folder, files, labels, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Read | Trouble:
        path = os.path.join(self._folder, self.files[index])
        image = opened_image(path, self._transform.mode, self._transform.shorter)
        if isinstance(image, Trouble):
            return image
        label = None if self._labels is None else self._labels[index]
        return transformed(image, label, index, path, self._transform)


def opened_image(path: str, mode: str | None, shorter: int) -> Image.Image | Trouble:
    """The image in a file, in Pillow's mode `mode` if one is given. One that would become huge where its shorter side
    is resized to `shorter` is not decoded; Pillow's own limit is that for it, too.
    """
    if (kind := irregular(path)) is not None:
        return Trouble(path, f"it is {kind}, not a file.")
    try:
        with open(path, "rb") as file, Image.open(file, formats=IMAGE_FORMATS) as opened:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and (fault := too_long(opened.width, opened.height, shorter, limit)):
                return Trouble(path, f"it {fault}.")
            opened.load()
            return opened if mode in (None, opened.mode) else opened.convert(mode)
    except UnidentifiedImageError:
        return Trouble(path, f"not in an image format that is read: {', '.join(IMAGE_FORMATS)}.")
    except Exception as error:  # decoders raise many types for damaged files
        return Trouble(path, f"{_words(error)}.")


class WrappedImages(Dataset[Any]):
    """A data set of (image, label) through a transform."""

    def __init__(self, dataset: Any, labelled: bool, transform: ImageTransform) -> None:
        self._dataset, self._labelled, self._transform = dataset, labelled, transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Read | Trouble:
        name = f"number {index}"
        try:
            with only_image_formats():  # data sets open their files themselves
                item = self._dataset[index]
        except Exception as error:
            return Trouble(name, f"{_words(error)}.")
        image = item[0] if isinstance(item, (tuple, list)) else item
        return transformed(image, item[1] if self._labelled else None, index, name, self._transform)


def transformed(image: Any, label: Any, index: int, name: str, transform: ImageTransform) -> Read | Trouble:
    """An item: the image through the transform, its label and its number."""
    try:
        tensor: Any = transform(image)
    except Exception as error:
        return Trouble(name, f"the transform fails on it: {_words(error)}.", readable=True)
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        return Trouble(name, f"the transform gives a {kind}, not a tensor.", readable=True)
    return tensor, label, index


def _words(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@dataclass(frozen=True)
class Stacked:
    """A batch as a worker process makes it: stacked inputs and targets, the items' numbers, and items that failed."""

    inputs: Tensor | None
    targets: Tensor | None
    indices: Tensor
    troubles: list[Trouble]

    def pin_memory(self) -> Stacked:
        """For a `DataLoader` that pins."""
        return self if self.inputs is None else Stacked(self.inputs.pin_memory(), *self._rest())

    def _rest(self) -> tuple[Tensor | None, Tensor, list[Trouble]]:
        return self.targets, self.indices, self.troubles


def stack(items: list[Read | Trouble]) -> Stacked:
    """A batch of what could be read."""
    troubles = [item for item in items if isinstance(item, Trouble)]
    read = [item for item in items if not isinstance(item, Trouble)]
    if len(shapes := {tuple(tensor.shape) for tensor, _, _ in read}) > 1:
        first, second = sorted(shapes)[:2]
        reason = (
            f"images differ in size, {first} and {second} in one batch; give --image-size, or --batch-size 1."
        )
        return Stacked(
            None,
            None,
            torch.empty(0, device="cpu"),
            [*troubles, Trouble("of a batch", reason, readable=True)],
        )
    return Stacked(
        torch.stack([tensor for tensor, _, _ in read]) if read else None,
        _stacked_labels([label for _, label, _ in read]),
        torch.tensor([index for _, _, index in read], dtype=torch.int64, device="cpu"),
        troubles,
    )


def _stacked_labels(labels: list[Any]) -> Tensor | None:
    """Numbers, or masks, of a batch; None where there are none."""
    if not labels or labels[0] is None:
        return None
    return torch.stack(labels) if isinstance(labels[0], Tensor) else torch.as_tensor(labels, device="cpu")


class ImageLoader:
    """Batches of images: ``(inputs, targets)``, inputs alone, or with `indexed` ``(inputs, numbers of the items)``.

    Args:
        images: what to read.
        batch_size: images at once.
        workers: processes that read.
        sampler: for this process's part, or None for all in order.
        indexed: give the items' numbers in the place of targets.
        skip: leave unreadable images out, and keep them in `skipped`.
    """

    def __init__(
        self,
        images: FolderImages | WrappedImages | Any,
        batch_size: int,
        workers: int,
        sampler: Sampler[int] | None = None,
        *,
        indexed: bool = False,
        skip: bool = False,
    ) -> None:
        self._loader = DataLoader(
            images,
            batch_size,
            sampler=sampler,
            num_workers=workers,
            collate_fn=stack,
            prefetch_factor=4 if workers else None,
        )
        self._indexed, self._skip = indexed, skip
        self.skipped: list[Trouble] = []
        self.batch_size = batch_size
        self.sampler = self._loader.sampler  # tells what is padding

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self.skipped.clear()
        read = 0
        for batch in cast(Any, self._loader):
            for trouble in batch.troubles:
                if trouble.readable or not self._skip:
                    raise PosthocUQError(str(trouble))
                self.skipped.append(trouble)
            if batch.inputs is None:
                continue
            read += 1
            if self._indexed:
                yield batch.inputs, batch.indices
            else:
                yield batch.inputs if batch.targets is None else (batch.inputs, batch.targets)
        if self.skipped and not read:
            raise PosthocUQError(_none_read(self.skipped))


def _none_read(troubles: Sequence[Trouble]) -> str:
    first = troubles[0]
    if len(troubles) == 1:
        return f"The only image, '{first.name}', could not be read: {first.reason}"
    return f"None of the {len(troubles)} images could be read. The first, '{first.name}': {first.reason}"
