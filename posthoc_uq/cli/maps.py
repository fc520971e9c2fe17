"""Predictions with positions as files: PNG maps of an image's classes and uncertainties."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from posthoc_uq.cli.overwriting import check_files
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.files.atomic import replacing
from posthoc_uq.likelihoods.positions import PositionPrediction

CLASS = "class"
SCORES = ("entropy", "mutual_information", "novelty")
_FULL = 65535  # the largest value of 16 bits
_CLASSES = 256  # that 8 bits hold


def make_folder(folder: str, files: Sequence[str] | None, parameters: Mapping[str, Any]) -> None:
    """The folders for maps, made if they are not there.

    Args:
        folder: that holds them.
        files: the images.
        parameters: of the command, by name.

    Raises:
        PosthocUQError: they cannot be made, two images would have maps of the same name, or a map would be written over
            an input, or without ``--force`` over another file.
    """
    if files is None:
        raise PosthocUQError(
            "--maps needs images with names of their own, and these data have none; give a folder of images."
        )
    taken: dict[str, str] = {}
    for file in files:
        other = taken.setdefault(_name(file), file)
        if other != file:
            raise PosthocUQError(
                f"The maps of '{other}' and '{file}' would have the same name; rename one of the images."
            )
    places = [Path(folder, kind, name) for kind in (CLASS, *SCORES) for name in taken]
    check_files("--maps", [place for place in places if place.exists()], parameters)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise PosthocUQError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from None


def write_maps(folder: str, files: Sequence[str], prediction: PositionPrediction) -> None:
    """The maps of a batch: ``class/NAME.png``, the index of each pixel's class in 8 bits (16 above 256 classes), and
    ``SCORE/NAME.png`` for every score, in 16 bits.

    Entropy and mutual information are shares of their largest value, the logarithm of the number of classes; the
    novelty is its value. 65535 is 1.

    Raises:
        PosthocUQError: the positions are not pixels, or a file cannot be written.
    """
    if len(prediction.positions) != 2:
        raise PosthocUQError(
            f"--maps is for predictions of pixels, and this model's have positions {prediction.positions}."
        )
    small = prediction.classes <= _CLASSES
    _write(folder, CLASS, files, prediction.predicted().numpy().astype(np.uint8 if small else np.uint16))
    for name, score in _shares(prediction).items():
        values = (score.double().clamp(0, 1) * _FULL).round()
        _write(folder, name, files, values.numpy().astype(np.uint16))


def _shares(prediction: PositionPrediction) -> Mapping[str, Tensor]:
    """The scores that the prediction knows, each in [0, 1]."""
    known = prediction.scores_by_position()
    largest = math.log(prediction.classes)
    return {name: known[name] / (1 if name == "novelty" else largest) for name in SCORES if name in known}


def _write(folder: str, kind: str, files: Sequence[str], maps: np.ndarray) -> None:  # pyright: ignore[reportMissingTypeArgument]
    for file, pixels in zip(files, maps, strict=True):
        target = Path(folder, kind, _name(file))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as opened:
                Image.fromarray(pixels).save(opened, format="PNG")
        except OSError as error:
            raise PosthocUQError(f"'{target}' could not be written: {error.strerror or error}.") from error


def _name(file: str) -> str:
    return os.path.splitext(file)[0] + ".png"
