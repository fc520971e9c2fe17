"""A folder of images: with a folder for each class, with masks of classes, or without labels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posthoc_uq.cli.images import FolderImages, Trouble, image_files
from posthoc_uq.cli.labels import folder_labels
from posthoc_uq.cli.masks import IMAGES, MaskedImages, has_masks, ignored_value, masked_images
from posthoc_uq.cli.meaning import IGNORED, NAMES, Meaning
from posthoc_uq.cli.models import Source, count_outputs
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.paths import check_regular

_SHOWN = 5  # class folders that a warning names


@dataclass(frozen=True)
class Folder:
    """What a folder holds.

    Attributes:
        images: with labels or without.
        labelled: whether they have labels.
        names: of the outputs, where each has a class folder.
        kept: facts for the posterior's file.
    """

    images: FolderImages | MaskedImages
    labelled: bool = False
    names: Sequence[str] | None = None
    kept: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())


def read_folder(
    folder: str, source: Source, labels: bool, options: Mapping[str, Any], part: str, meaning: Meaning
) -> Folder:
    """What a folder holds; `part` is the part of the data that the command is about.

    Raises:
        PosthocUQError: no images, or labels that do not fit the model.
    """
    check_regular(folder, "The data")
    if has_masks(folder):
        if labels:
            kept = {IGNORED: ignored_value(options, meaning)}
            return Folder(masked_images(folder, source, options, meaning), True, kept=kept)
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
    unlabelled = FolderImages(folder, files, None, source.transform)
    if not classes or not labels:
        return Folder(unlabelled)
    stray = [file for file in files if os.sep not in file]
    if stray:
        raise PosthocUQError(
            f"'{folder}' has class folders, and images beside them that belong to none, such as '{stray[0]}'; move "
            f"them away."
        )
    if options["class_map"] is None and all(file.count(os.sep) > 1 for file in files):
        _warn_of_level(folder, classes, part)
    outputs = _outputs(unlabelled, source)
    index = folder_labels(classes, outputs, options["class_map"], folder)
    numbers = [index[file.split(os.sep)[0]] for file in files]
    names = sorted(index, key=lambda name: index[name])
    complete = [index[name] for name in names] == list(range(outputs))
    images = FolderImages(folder, files, numbers, source.transform)
    return Folder(images, True, names, {NAMES: names}) if complete else Folder(images, True)


def _warn_of_level(folder: str, classes: Sequence[str], part: str) -> None:
    """Warn of class folders that hold only folders: they are likely the parts of a data set, one level above its
    classes.
    """
    likely = next((name for name in (part, "train") if name in classes), classes[0])
    more = ", ..." if len(classes) > _SHOWN else ""
    warnings.warn(
        f"The class folders of '{folder}' ({', '.join(classes[:_SHOWN])}{more}) hold no images themselves, only "
        f"folders of them; each counts as one class. Perhaps '{os.path.join(folder, likely)}' is meant?",
        stacklevel=2,
    )


def _outputs(images: FolderImages, source: Source) -> int:
    """How many outputs the model has for the first image that can be read; 2 where one logit stands for two classes."""
    last: Trouble | None = None
    for number in range(len(images)):
        item = images[number]
        if not isinstance(item, Trouble):
            return max(2, count_outputs(source.model, item[0]))
        last = item
    raise PosthocUQError(f"None of the {len(images)} images can be read. {last}")
