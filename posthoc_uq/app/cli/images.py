"""Folders of images: with a folder for each class, with masks of classes, or without labels; and batches of them.

An image is a BMP, JPEG, PNG, PPM, TIFF or WebP file; no other format is opened, whatever a file is called. Hidden
files are left out. Links are followed, but not to folders that hold them or were read already, which a warning names.
A pipe or a device is an error.

Masks are PNG files of one channel (grey or a palette), of their image's name and size, whose values are indices of
classes; 255, or ``--ignore-index``, counts for nothing. ``--image-size`` resizes and crops them as their images, by
the nearest pixel; a transform of your own must keep the size. Images of different sizes need ``--image-size``, or
``--batch-size 1``. `evaluate` keeps all predictions in memory: about 50 bytes for each pixel and class.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from posthoc_uq.app.cli.labels import folder_labels
from posthoc_uq.app.cli.models import TrainedModel
from posthoc_uq.app.cli.options import Data
from posthoc_uq.app.cli.posterior_file import IGNORED, NAMES, DatasetInfo
from posthoc_uq.app.cli.transforms import ImageTransform
from posthoc_uq.app.paths import (
    IMAGE_ENDINGS,
    IMAGE_FORMATS,
    check_regular,
    folder_files,
    irregular,
    only_image_formats,
    too_long,
)
from posthoc_uq.core.errors import PosthocUQError, out_of_memory
from posthoc_uq.likelihoods import Categorical

IMAGES, MASKS = "images", "masks"
UNLABELLED = 255
"""The value of a mask whose pixels count for nothing, where ``--ignore-index`` says nothing else."""
_MASK_MODES = ("1", "L", "P", "I", "I;16")

Item = tuple[Tensor, Any, int]


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
    links to folders that are not followed: see `posthoc_uq.app.paths.folder_files`.
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


def opened_image(path: str, shorter: int) -> Image.Image | Trouble:
    """The image in a file. One that would become huge where its shorter side is resized to `shorter` is not decoded;
    Pillow's own limit is that for it, too.
    """
    if (kind := irregular(path)) is not None:
        return Trouble(path, f"it is {kind}, not a file.")
    try:
        with open(path, "rb") as file, Image.open(file, formats=IMAGE_FORMATS) as opened:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and (fault := too_long(opened.width, opened.height, shorter, limit)):
                return Trouble(path, f"it {fault}.")
            opened.load()
            return opened
    except UnidentifiedImageError:
        return Trouble(path, f"not in an image format that is read: {', '.join(IMAGE_FORMATS)}.")
    except Exception as error:  # decoders raise many types for damaged files
        if out_of_memory(error):
            raise
        return Trouble(path, f"{_words(error)}.")


def _transformed(image: Any, label: Any, index: int, name: str, transform: ImageTransform) -> Item | Trouble:
    """An item: the image through the transform, its label and its number."""
    try:
        tensor: Any = transform(image)
    except Exception as error:  # a user's transform may raise anything
        if out_of_memory(error):
            raise
        return Trouble(name, f"the transform fails on it: {_words(error)}.", readable=True)
    if not isinstance(tensor, Tensor):
        return Trouble(name, f"the transform gives a {type(tensor).__name__}, not a tensor.", readable=True)
    return tensor, label, index


def _words(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


class FolderImages(Dataset[Any]):
    """Image files with their labels, or without.

    Attributes:
        files: relative to the folder.
    """

    def __init__(
        self, folder: str, files: Sequence[str], labels: Sequence[int] | None, transform: ImageTransform
    ) -> None:
        self.folder, self.files, self.labels, self.transform = folder, files, labels, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item | Trouble:
        path = os.path.join(self.folder, self.files[index])
        image = opened_image(path, self.transform.shorter)
        if isinstance(image, Trouble):
            return image
        item = _transformed(
            image, None if self.labels is None else self.labels[index], index, path, self.transform
        )
        return item if isinstance(item, Trouble) else self._with_mask(item, image)

    def _with_mask(self, item: Item, image: Image.Image) -> Item | Trouble:
        """The item as it is; subclasses put a mask in the place of the label."""
        return item

    def first(self) -> Item:
        """The first item that can be read.

        Raises:
            PosthocUQError: there is none.
        """
        last: Any = None
        for number in range(len(self)):
            last = self[number]
            if not isinstance(last, Trouble):
                return last
        raise PosthocUQError(f"None of the {len(self)} images can be read. {last}")


class MaskedImages(FolderImages):
    """Images, each with the class of every pixel, in the folders ``images`` and ``masks``. A mask's value `ignored`
    counts for nothing, and becomes the label `not_counted`.
    """

    def __init__(
        self,
        folder: str,
        files: Sequence[str],
        masks: Sequence[str],
        transform: ImageTransform,
        ignored: int,
        not_counted: int,
    ) -> None:
        super().__init__(os.path.join(folder, IMAGES), files, None, transform)
        self._masks = [os.path.join(folder, MASKS, mask) for mask in masks]
        self._ignored, self._not_counted = ignored, not_counted
        self.classes: int | None = None

    def _with_mask(self, item: Item, image: Image.Image) -> Item | Trouble:
        inputs, _, index = item
        mask = opened_image(self._masks[index], 0)  # as large as the image, or refused
        if isinstance(mask, Trouble):
            return mask
        labels = self._labels(mask, image, inputs)
        return (
            Trouble(self._masks[index], labels, True) if isinstance(labels, str) else (inputs, labels, index)
        )

    def _labels(self, mask: Image.Image, image: Image.Image, inputs: Tensor) -> Tensor | str:
        """The class of every pixel of the model's input, (height, width); or what is wrong with the mask."""
        if mask.mode not in _MASK_MODES:
            return f"it has colours (mode {mask.mode}); a mask has one channel, with the index of a class."
        if mask.size != image.size:
            return f"its size is {_size(mask)}, and that of its image {_size(image)}."
        # Pillow resizes 32-bit integers by their nearest values
        plain: Any = Image.fromarray(np.asarray(mask).astype(np.int32))
        plain = plain if self.transform.geometry is None else self.transform.geometry(plain)
        values = torch.from_numpy(np.asarray(plain).astype(np.int64))
        if tuple(values.shape) != tuple(inputs.shape[-2:]):
            return (
                f"the transform makes {tuple(inputs.shape[-2:])} of an image of {_size(mask)}, and a mask cannot "
                f"follow one of your own; use one that keeps the size, or --image-size."
            )
        counted = values != self._ignored
        if self.classes is not None and bool(((values >= self.classes) & counted).any()):
            return (
                f"it has the class {int(values[counted].max())}, and the model the classes 0 to {self.classes - 1}; "
                f"--ignore-index says which value counts for nothing ({self._ignored} now)."
            )
        return values.masked_fill(~counted, self._not_counted)


def _size(image: Image.Image) -> str:
    return f"{image.height} x {image.width}"


class WrappedImages(Dataset[Any]):
    """A data set of (image, label) through a transform."""

    def __init__(self, dataset: Any, labelled: bool, transform: ImageTransform) -> None:
        self._dataset, self._labelled, self._transform = dataset, labelled, transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Item | Trouble:
        name = f"number {index}"
        try:
            with only_image_formats():  # data sets open their files themselves
                item = self._dataset[index]
        except Exception as error:  # decoders raise many types for damaged files
            if out_of_memory(error):
                raise
            return Trouble(name, f"{_words(error)}.")
        image = item[0] if isinstance(item, (tuple, list)) else item
        return _transformed(image, item[1] if self._labelled else None, index, name, self._transform)


def read_folder(
    folder: str, model: TrainedModel, labels: bool, reading: Data, part: str, info: DatasetInfo
) -> tuple[FolderImages, Mapping[str, Any]]:
    """The images in a folder, with labels if they are wanted and there, and facts for the posterior's file; `part` is
    the part of the data that the command is about.

    Raises:
        PosthocUQError: no images, or labels that do not fit the model.
    """
    check_regular(folder, "The data")
    if _has_masks(folder):
        if labels:
            given = reading.ignore_index
            ignored = info.kept.get(IGNORED, UNLABELLED) if given is None else given
            return _masked(folder, model, ignored, info), {IGNORED: ignored}
        folder = os.path.join(folder, IMAGES)
    if os.path.isfile(folder):
        folder, files = os.path.dirname(folder) or ".", [os.path.basename(folder)]
    else:
        files = image_files(folder)
    if not files:
        raise PosthocUQError(
            f"There are no images in the folder '{folder}' (.jpg, .png, .webp and the like)."
        )
    classes = sorted({file.split(os.sep)[0] for file in files if os.sep in file})
    images = FolderImages(folder, files, None, model.transform)
    if not classes or not labels:
        return images, {}
    stray = next((file for file in files if os.sep not in file), None)
    if stray is not None:
        raise PosthocUQError(
            f"'{folder}' has class folders, and images beside them that belong to none, such as '{stray}'; move them "
            f"away."
        )
    if reading.class_map is None and all(file.count(os.sep) > 1 for file in files):
        # likely the parts of a data set, one level above its classes
        likely = next((name for name in (part, "train") if name in classes), classes[0])
        warnings.warn(
            f"The class folders of '{folder}' hold no images themselves, only folders of them; each counts as one "
            f"class. Perhaps '{os.path.join(folder, likely)}' is meant?",
            stacklevel=2,
        )
    outputs = max(2, model.outputs(images.first()[0]).shape[-1])  # one logit stands for two classes
    index = folder_labels(classes, outputs, reading.class_map, folder)
    images.labels = [index[file.split(os.sep)[0]] for file in files]
    names = sorted(index, key=lambda name: index[name])
    complete = [index[name] for name in names] == list(range(outputs))
    return images, {NAMES: names} if complete else {}


def _has_masks(folder: str) -> bool:
    """Whether a folder has the folders ``images`` and ``masks``, and no other."""
    if not os.path.isdir(folder):
        return False
    with os.scandir(folder) as entries:
        names = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    return names == {IMAGES, MASKS}


def _masked(folder: str, model: TrainedModel, ignored: int, info: DatasetInfo) -> MaskedImages:
    """The images of a folder with their masks.

    Raises:
        PosthocUQError: an image without a mask, a mask without an image, or a model that gives no classes of pixels.
    """
    likelihood = info.likelihood
    if likelihood.name != "classification":
        raise PosthocUQError(
            f"'{folder}' has masks, which are classes of pixels, and the likelihood is {likelihood.name!r}."
        )
    places = {kind: os.path.join(folder, kind) for kind in (IMAGES, MASKS)}
    stems = {kind: _by_stem(image_files(place), folder) for kind, place in places.items()}
    for kind, other in ((IMAGES, MASKS), (MASKS, IMAGES)):
        alone = next((stem for stem in stems[kind] if stem not in stems[other]), None)
        if alone is not None:
            raise PosthocUQError(
                f"'{os.path.join(places[kind], stems[kind][alone])}' has no counterpart in '{places[other]}'; an image "
                f"and its mask have the same name up to its ending."
            )
    wrong = next((mask for mask in stems[MASKS].values() if not mask.lower().endswith(".png")), None)
    if wrong is not None:
        raise PosthocUQError(f"The mask '{os.path.join(places[MASKS], wrong)}' is no PNG file.")
    if not stems[IMAGES]:
        raise PosthocUQError(f"There are no images in the folder '{places[IMAGES]}'.")
    files = sorted(stems[IMAGES].values())
    masks = [stems[MASKS][os.path.splitext(file)[0]] for file in files]
    not_counted = cast(Categorical, likelihood).layout.ignore_index
    found = MaskedImages(folder, files, masks, model.transform, ignored, not_counted)
    inputs, labels, _ = found.first()
    outputs = model.outputs(inputs)
    if outputs.ndim != 4 or outputs.shape[2:] != labels.shape:
        raise PosthocUQError(
            f"'{folder}' has masks, and the model gives outputs of shape {tuple(outputs.shape)} for an image of "
            f"{tuple(inputs.shape)}; classes of pixels are (samples, classes, height, width) in the size of the image."
        )
    found.classes = outputs.shape[1]
    return found


def _by_stem(files: Sequence[str], folder: str) -> dict[str, str]:
    """File by its name without the ending."""
    found: dict[str, str] = {}
    for file in files:
        other = found.setdefault(os.path.splitext(file)[0], file)
        if other != file:
            raise PosthocUQError(f"'{other}' and '{file}' in '{folder}' have the same name up to its ending.")
    return found


def stack(items: list[Item | Trouble]) -> tuple[Tensor | None, Tensor | None, Tensor, list[Trouble]]:
    """A batch of what could be read: inputs, targets if there are labels, the items' numbers; and what failed."""
    troubles = [item for item in items if isinstance(item, Trouble)]
    read = [item for item in items if not isinstance(item, Trouble)]
    numbers = torch.tensor([index for _, _, index in read], dtype=torch.int64, device="cpu")
    if len(shapes := {tuple(tensor.shape) for tensor, _, _ in read}) > 1:
        first, second = sorted(shapes)[:2]
        reason = (
            f"images differ in size, {first} and {second} in one batch; give --image-size, or --batch-size 1."
        )
        return None, None, numbers, [*troubles, Trouble("of a batch", reason, readable=True)]
    if not read:
        return None, None, numbers, troubles
    labels = [label for _, label, _ in read]
    targets = None
    if labels[0] is not None:
        masks = isinstance(labels[0], Tensor)
        targets = torch.stack(labels) if masks else torch.as_tensor(labels, device="cpu")
    return torch.stack([tensor for tensor, _, _ in read]), targets, numbers, troubles


class ImageLoader:
    """Batches of images: ``(inputs, targets)``, inputs alone, or with `indexed` ``(inputs, numbers of the items)``.
    With `skip` unreadable images are left out, and kept in `skipped`.
    """

    def __init__(
        self,
        images: Dataset[Any],
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
        for inputs, targets, numbers, troubles in cast(Any, self._loader):
            for trouble in troubles:
                if trouble.readable or not self._skip:
                    raise PosthocUQError(str(trouble))
                self.skipped.append(trouble)
            if inputs is None:
                continue
            read += 1
            second = numbers if self._indexed else targets
            yield inputs if second is None else (inputs, second)
        if self.skipped and not read:
            raise PosthocUQError(f"None of the {len(self.skipped)} images can be read. {self.skipped[0]}")
