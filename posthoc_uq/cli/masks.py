"""Images with masks of classes: a folder ``images`` beside a folder ``masks``, with files of the same names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from posthoc_uq.cli.images import Read, Trouble, image_files, opened_image, transformed
from posthoc_uq.cli.meaning import IGNORED, Meaning
from posthoc_uq.cli.models import Source, outputs_for
from posthoc_uq.cli.transforms import ImageTransform
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.likelihoods import Categorical

IMAGES, MASKS = "images", "masks"
UNLABELLED = 255
"""The value of a mask whose pixels count for nothing, where ``--ignore-index`` says nothing else."""
_MODES = ("1", "L", "P", "I", "I;16")


def has_masks(folder: str) -> bool:
    """Whether a folder has the folders ``images`` and ``masks``, and no other."""
    if not os.path.isdir(folder):
        return False
    with os.scandir(folder) as entries:
        names = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    return names == {IMAGES, MASKS}


class MaskedImages(Dataset[Any]):
    """Images, each with the class of every pixel.

    Attributes:
        files: of the images, relative to their folder.
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
        self._folder, self.files, self._masks = folder, files, masks
        self._transform, self._ignored, self._not_counted = transform, ignored, not_counted
        self._outputs: tuple[int, ...] | None = None

    def check_against(self, source: Source) -> None:
        """Learn from the first image that can be read how many classes the model has, and what it does to the size.

        Raises:
            PosthocUQError: no image can be read, or the model gives no classes of pixels.
        """
        last: Trouble | None = None
        for number in range(len(self.files)):
            item = self[number]
            if isinstance(item, Trouble):
                last = item
                continue
            outputs = outputs_for(source.model, item[0])
            if outputs.ndim != 4 or outputs.shape[2:] != item[1].shape:
                raise PosthocUQError(
                    f"'{self._folder}' has masks, and the model gives outputs of shape {tuple(outputs.shape)} for an "
                    f"image of {tuple(item[0].shape)}; classes of pixels are (samples, classes, height, width) in the "
                    f"size of the image."
                )
            self._outputs = tuple(outputs.shape)
            return
        raise PosthocUQError(f"None of the {len(self.files)} images can be read with its mask. {last}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Read | Trouble:
        path = os.path.join(self._folder, IMAGES, self.files[index])
        image = opened_image(path, self._transform.mode, self._transform.shorter)
        if isinstance(image, Trouble):
            return image
        mask_path = os.path.join(self._folder, MASKS, self._masks[index])
        mask = opened_image(mask_path, None, 0)  # as large as the image, or refused
        if isinstance(mask, Trouble):
            return mask
        if mask.mode not in _MODES:
            reason = f"it has colours (mode {mask.mode}); a mask has one channel, with the index of a class."
            return Trouble(mask_path, reason, readable=True)
        if mask.size != image.size:
            reason = f"its size is {_size(mask)}, and that of its image {_size(image)}."
            return Trouble(mask_path, reason, readable=True)
        item = transformed(image, None, index, path, self._transform)
        if isinstance(item, Trouble):
            return item
        classes = self._classes(mask, item[0], mask_path)
        return classes if isinstance(classes, Trouble) else (item[0], classes, index)

    def _classes(self, mask: Image.Image, image: Tensor, path: str) -> Tensor | Trouble:
        """The class of every pixel of the model's input, (height, width)."""
        # Pillow resizes 32-bit integers by their nearest values
        plain = Image.fromarray(np.asarray(mask).astype(np.int32))
        geometry = self._transform.geometry
        plain = plain if geometry is None else geometry(plain)
        values = torch.from_numpy(np.asarray(plain).astype(np.int64))
        if tuple(values.shape) != tuple(image.shape[-2:]):
            reason = (
                f"the transform makes {tuple(image.shape[-2:])} of an image of {_size(mask)}, and a mask cannot follow "
                f"one of your own; use one that keeps the size, or --image-size."
            )
            return Trouble(path, reason, readable=True)
        counted = values != self._ignored
        if self._outputs is not None and bool(((values >= self._outputs[1]) & counted).any()):
            wrong = int(values[counted].max())
            reason = (
                f"it has the class {wrong}, and the model the classes 0 to {self._outputs[1] - 1}; --ignore-index says "
                f"which value counts for nothing ({self._ignored} now)."
            )
            return Trouble(path, reason, readable=True)
        return values.masked_fill(~counted, self._not_counted)


def _size(image: Image.Image) -> str:
    return f"{image.height} x {image.width}"


def masked_images(folder: str, source: Source, options: Mapping[str, Any], meaning: Meaning) -> MaskedImages:
    """The images of a folder with their masks.

    Raises:
        PosthocUQError: an image without a mask, a mask without an image, or a model that gives no classes of pixels.
    """
    if meaning.likelihood.name != "classification":
        raise PosthocUQError(
            f"'{folder}' has masks, which are classes of pixels, and the likelihood is {meaning.likelihood.name!r}."
        )
    files, masks = image_files(os.path.join(folder, IMAGES)), image_files(os.path.join(folder, MASKS))
    by_stem = _by_stem(masks, folder)
    stems = _by_stem(files, folder)
    for kind, of, others in ((IMAGES, stems, by_stem), (MASKS, by_stem, stems)):
        alone = next((stem for stem in of if stem not in others), None)
        if alone is not None:
            other = MASKS if kind == IMAGES else IMAGES
            raise PosthocUQError(
                f"'{os.path.join(folder, kind, of[alone])}' has no counterpart in '{os.path.join(folder, other)}'; "
                f"an image and its mask have the same name up to its ending."
            )
    wrong = next((mask for mask in masks if not mask.lower().endswith(".png")), None)
    if wrong is not None:
        raise PosthocUQError(f"The mask '{os.path.join(folder, MASKS, wrong)}' is no PNG file.")
    if not files:
        raise PosthocUQError(f"There are no images in the folder '{os.path.join(folder, IMAGES)}'.")
    found = MaskedImages(
        folder,
        files,
        [by_stem[_stem(file)] for file in files],
        source.transform,
        ignored_value(options, meaning),
        cast(Categorical, meaning.likelihood).layout.ignore_index,
    )
    found.check_against(source)
    return found


def ignored_value(options: Mapping[str, Any], meaning: Meaning) -> int:
    """The value of a mask that counts for nothing: as given, else as in the fit, else 255."""
    given = options["ignore_index"]
    return int(meaning.kept.get(IGNORED, UNLABELLED)) if given is None else given


def _stem(file: str) -> str:
    return os.path.splitext(file)[0]


def _by_stem(files: Sequence[str], folder: str) -> dict[str, str]:
    """File by its name without the ending."""
    found: dict[str, str] = {}
    for file in files:
        other = found.setdefault(_stem(file), file)
        if other != file:
            raise PosthocUQError(f"'{other}' and '{file}' in '{folder}' have the same name up to its ending.")
    return found
