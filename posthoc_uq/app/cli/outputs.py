"""What a command writes: never over something that it reads, over another file only with ``--force``; and predictions
as a table or as maps.

A file that a command reads is never written over, under whatever name: data, masks, the posterior, weights, code,
lists of names, configuration. Modules that your code imports in its turn are not known. Two options that name the same
file are an error. `tune`, `calibrate` and `update` change the posterior in FILE, and need no ``--force``. A file
appears under its name when it is complete; if a command fails, an old one stays.

The CSV of `predict` is UTF-8, with a header and one row for each image or row of a table; ``file`` is relative to
DATA, or a number. Of several outputs columns are numbered. Texts that a spreadsheet would compute as formulas have an
apostrophe in front. An unreadable image ends the command, unless ``--skip-unreadable`` leaves it out (exit code 3).

``--maps DIR`` writes for each image ``DIR/class/NAME.png``, the predicted class of every pixel (8 bits, 16 above 256
classes), and ``DIR/entropy``, ``DIR/mutual_information`` and ``DIR/novelty`` in 16 bits, where 65535 is the largest
value: the logarithm of the number of classes, 1 for the novelty. Maps have the size of the model's input.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Annotated, Any, TextIO, cast, get_args, get_origin

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from posthoc_uq.app.cli.help import dashed
from posthoc_uq.app.cli.options import Choice, Data
from posthoc_uq.app.cli.parser import Option, options_of
from posthoc_uq.app.paths import IMAGE_ENDINGS, folder_files
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.tables import csv_text
from posthoc_uq.files.atomic import checked_target, remove_leftovers, replacing
from posthoc_uq.heads.referral import Referral
from posthoc_uq.likelihoods.bernoulli import MultilabelPrediction
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.maps import LabelMapPrediction, MapPrediction
from posthoc_uq.likelihoods.positions import AtPositions, PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction

_Identity = tuple[int, int]


def role_of(hint: Any) -> str | None:
    """What the file of an option is for, as the option's type says: `posthoc_uq.app.cli.options.Read` and others."""
    if get_origin(hint) is Annotated:
        return next((word for word in get_args(hint)[1:] if isinstance(word, str)), None)
    return next((role for part in get_args(hint) if (role := role_of(part)) is not None), None)


class Outputs:
    """The files that a command reads and writes; in some, the configurations, its arguments stand."""

    def __init__(
        self, options: Sequence[Option], call: Mapping[str, Any], configurations: Sequence[str] = ()
    ) -> None:
        self._files = {"read": [("--config", path) for path in configurations]}
        self._force = bool(call.get("force"))
        self._data_root = "data"
        for option in options:
            value = call[option.name]
            if isinstance(value, Data):
                self._data_root = value.data_root
            if is_dataclass(option.kind) and option.kind is not Choice:
                for own in options_of(cast(Any, option.kind)):
                    self._note(own, getattr(value, own.name))
            else:
                self._note(option, value)

    def _note(self, option: Option, value: Any) -> None:
        role = role_of(option.hint)
        if role is None or value is None:
            return
        values: list[str] = value if isinstance(value, list) else [value]
        if isinstance(value, list):  # of foreign data, NAME=DATA
            values = [item.partition("=")[2] for item in values]
        self._files.setdefault(role, []).extend((dashed(f"--{option.name}"), item) for item in values)

    def check(self, more: Iterable[tuple[str, str | os.PathLike[str]]] = ()) -> None:
        """Refuse a command that would write over one of its inputs, twice into one file, or without ``--force`` over a
        file that is there. A posterior that a command changes is no output: it is written again where no other file is
        named.

        Args:
            more: further files that it writes, each with the option that they follow from.

        Raises:
            PosthocUQError: it would, or a file cannot be written.
        """
        kept = self._files.get("kept", [])
        written = [*self._files.get("written", []), *kept, *((flag, os.fspath(path)) for flag, path in more)]
        names: dict[str, str] = {}
        there: dict[_Identity, tuple[str, str]] = {}
        for flag, path in written:
            target = checked_target(path)
            # Names that differ in capital letters alone are one file on some systems, which cannot be asked about a
            # file that is not there yet.
            owners = {names.setdefault(str(target).casefold(), flag)}
            identity = _identity(target)
            if identity is not None:
                owners.add(there.setdefault(identity, (flag, path))[0])
            if owners != {flag}:
                raise PosthocUQError(
                    f"{' and '.join(sorted({*owners, flag}))} name the same file, '{path}'; give them different names."
                )
        for place, spec in self._inputs() if there else ():
            identity = _identity(place)
            if identity in there:
                flag, path = there[identity]
                raise PosthocUQError(
                    f"{flag}: '{path}' is an input of this command ('{spec}'), and no command writes over its inputs; "
                    f"give another name."
                )
        for flag, path in there.values():
            if not self._force and flag not in (flag for flag, _ in kept):
                raise PosthocUQError(
                    f"{flag}: '{path}' is there already; give another name, or --force to write over it."
                )

    def _inputs(self) -> Iterator[tuple[str, str]]:
        """Every file that the command reads, with what the user called it."""
        data = self._files.get("data", [])
        for _, spec in [*self._files.get("read", []), *data]:
            if os.path.isdir(spec):
                yield from ((path, spec) for path in _files_in(spec, IMAGE_ENDINGS))
            elif spec.startswith("torchvision:"):
                yield from ((path, self._data_root) for path in _files_in(self._data_root))
            else:
                yield spec, spec
        for _, spec in [*self._files.get("code", []), *data]:
            module, colon, _ = spec.rpartition(":")
            if colon:
                yield from ((path, spec) for path in _code_files(module))


def _identity(path: str | os.PathLike[str]) -> _Identity | None:
    """Which file a path leads to, under whatever name: as `os.path.samefile` compares them; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _files_in(folder: str, endings: tuple[str, ...] = ("",)) -> Iterator[str]:
    return (os.path.join(folder, file) for file in folder_files(folder) if file.lower().endswith(endings))


def _code_files(module: str) -> Iterator[str]:
    """The files that importing a module reads: its own, and those of the packages that it is in."""
    if module.endswith(".py"):
        yield module
        return
    parts = module.split(".")
    for folder in (os.getcwd(), *sys.path):
        for length in range(1, len(parts) + 1):
            place = os.path.join(folder, *parts[:length])
            yield from (f"{place}.py", os.path.join(place, "__init__.py"))


@contextmanager
def text_file(path: str) -> Generator[TextIO]:
    """Write to a temporary file in the same folder, which takes the name at the end of the block; where the block
    fails it is deleted, and a file that stood there before stays.

    Raises:
        PosthocUQError: it cannot be written.
    """
    target = checked_target(path)
    remove_leftovers(target)
    with replacing(target) as file:
        text = TextIOWrapper(file, newline="", encoding="utf-8", errors="surrogateescape")
        yield text
        text.detach()


@dataclass(frozen=True)
class PredictionTable:
    """Predictions as columns of a table.

    Attributes:
        referral: flags inputs; None where no held-out scores allow it.
        names: of the outputs.
        top_k: classes to name.
        level: of intervals and sets.
        sets: whether sets of this level are promised.
    """

    referral: Referral | None
    names: Sequence[str] | None
    top_k: int
    level: float
    sets: bool

    def columns(self, prediction: Prediction, files: Sequence[str]) -> dict[str, Sequence[str]]:
        """The columns of one batch by their names, the same for every batch.

        Raises:
            PosthocUQError: there are more or fewer names than outputs.
        """
        classes = prediction.categories
        columns: dict[str, Sequence[str]] = {"file": [csv_text(file) for file in files]}
        if classes is None:
            columns |= self._values(prediction)
        else:
            columns |= self._ranked(prediction, classes)
        columns |= dict.fromkeys(("flag", "reason", "tail"), [""] * len(files))
        if self.referral is None:
            return columns
        columns["tail"] = _numbers(self.referral.tail(prediction).tolist())
        return columns if self.referral.exactly else columns | _flags(self.referral.reasons(prediction))

    def ranked(
        self, waiting: Sequence[tuple[Mapping[str, Sequence[str]], Mapping[str, Tensor]]]
    ) -> Iterator[dict[str, Sequence[str]]]:
        """The columns of all batches of an exact referral, flagged by the ranks of all rows.

        Args:
            waiting: the columns of each batch, and the numbers by which its inputs are ranked.
        """
        if self.referral is None or not waiting:
            return
        numbers = {name: torch.cat([ranked[name] for _, ranked in waiting]) for name in waiting[0][1]}
        reasons, start = self.referral.highest(numbers), 0
        for columns, _ in waiting:
            rows = slice(start, start + len(columns["file"]))
            start = rows.stop
            yield {**columns, **_flags({name: flags[rows] for name, flags in reasons.items()})}

    def _ranked(self, prediction: Prediction, classes: int) -> dict[str, Sequence[str]]:
        """The classes of an input, the most probable or the most frequent first, and its scores."""
        label, pixels = prediction.naming(self.names), prediction.kind == "positions"
        if pixels:  # the classes that most positions have, with their shares
            shares = cast(PositionPrediction | LabelMapPrediction, prediction).shares()
            labels = shares.argsort(dim=1, descending=True, stable=True)[:, : self.top_k]
            values = shares.gather(1, labels)
        else:
            top = cast(ClassPrediction, prediction).top_k(min(self.top_k, classes))
            labels, values = top.labels, top.probabilities
        columns: dict[str, Sequence[str]] = {}
        for i, (own, numbers) in enumerate(zip(labels.T.tolist(), values.T.tolist(), strict=True), start=1):
            columns[f"label_{i}"] = [csv_text(label(index)) for index in own]
            columns[f"{'share' if pixels else 'probability'}_{i}"] = _numbers(numbers)
        scores = prediction.scores()
        shown = ["entropy", "mutual_information"]
        for name in shown:
            columns[name] = _numbers(scores[name].tolist()) if name in scores else [""] * len(prediction)
        if prediction.novelty_ratio is not None:
            shown.append("novelty")
            columns |= _novelty(prediction)
        if pixels:
            maps = cast(AtPositions, prediction)
            known = maps.scores_by_position()
            for name in (name for name in shown if name in known):
                columns[f"largest_{name}"] = _numbers(maps.per_input(name, "largest").tolist())
        else:
            columns["set"] = self._sets(cast(ClassPrediction, prediction))
        return columns

    def _sets(self, prediction: ClassPrediction | MultilabelPrediction) -> list[str]:
        """The names of the classes in each input's set, by ``;``."""
        if not self.sets:
            return [""] * len(prediction)
        names = self.names or range(prediction.probs.shape[1])
        return [
            csv_text(";".join(str(name) for name, held in zip(names, row, strict=True) if held))
            for row in prediction.set(self.level).tolist()
        ]

    def _values(self, prediction: Prediction) -> dict[str, Sequence[str]]:
        maps = prediction if isinstance(prediction, MapPrediction) else None
        found = prediction.value_columns(self.level) if maps is None else maps.means_by_input(self.level)
        outputs = next(iter(found.values()))[0].numel()
        columns: dict[str, Sequence[str]] = {
            name if outputs == 1 else f"{name}_{i + 1}": _numbers(values.reshape(-1, outputs)[:, i].tolist())
            for i in range(outputs)
            for name, values in found.items()
        }
        if prediction.novelty_ratio is not None:
            columns |= _novelty(prediction)
        if maps is not None:
            for name in (
                name for name in ("standard_deviation", "novelty") if name in maps.scores_by_position()
            ):
                columns[f"largest_{name}"] = _numbers(maps.per_input(name, "largest").tolist())
        return columns


def _novelty(prediction: Prediction) -> dict[str, Sequence[str]]:
    """The novelty of each input, and its familiarity, which is empty without held-out novelties."""
    promises = prediction.promises
    known = isinstance(promises, ConformalScores) and "novelty" in promises.inputs
    return {
        "novelty": _numbers(prediction.scores()["novelty"].tolist()),
        "familiarity": _numbers(prediction.familiarity().tolist()) if known else [""] * len(prediction),
    }


def _flags(by_score: Mapping[str, Tensor]) -> dict[str, Sequence[str]]:
    """The columns of which inputs are referred, and by which scores."""
    flags = {name: each.tolist() for name, each in by_score.items()}
    inputs = len(next(iter(flags.values())))
    reasons = [[name for name in flags if flags[name][i]] for i in range(inputs)]
    return {
        "flag": [str(int(bool(names))) for names in reasons],
        "reason": ["+".join(names) for names in reasons],
    }


def _numbers(values: Iterable[float]) -> list[str]:
    return [f"{value:.6g}" for value in values]


_CLASS = "class"
_SCORES = ("entropy", "mutual_information", "novelty")
_VALUES = ("mean", "standard_deviation", "epistemic_variance", "lower", "upper", "probability", "novelty")
_FULL = 65535  # the largest value of 16 bits
_CLASSES = 256  # that 8 bits hold


@dataclass(frozen=True)
class Maps:
    """PNG maps in a folder: ``class/NAME.png``, the index of each pixel's class in 8 bits (16 above 256 classes), and
    ``SCORE/NAME.png`` for every score, in 16 bits. Entropy and mutual information are shares of their largest value,
    the logarithm of the number of classes; the novelty is its value. 65535 is 1. Of values NumPy arrays in the layout
    of the model's outputs, ``mean/NAME.npy`` and so on for every column of values, and of several labels
    ``probability/NAME.npy``.
    """

    folder: str
    level: float = 0.95

    def prepare(self, files: Sequence[str] | None, outputs: Outputs) -> None:
        """Make the folder for the maps of these images.

        Raises:
            PosthocUQError: it cannot be made, two images would have maps of the same name, or a map would be written
                over an input, or without ``--force`` over another file.
        """
        if files is None:
            raise PosthocUQError(
                "--maps needs images with names of their own, and these data have none; give a folder of images."
            )
        taken: dict[str, str] = {}
        for file in files:
            other = taken.setdefault(_png(file), file)
            if other != file:
                raise PosthocUQError(
                    f"The maps of '{other}' and '{file}' would have the same name; rename one of the images."
                )
        places = [Path(self.folder, kind, name) for kind in (_CLASS, *_SCORES) for name in taken]
        places += [Path(self.folder, kind, _npy(name)) for kind in _VALUES for name in taken]
        outputs.check(("--maps", place) for place in places if place.exists())
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise PosthocUQError(
                f"The folder '{self.folder}' cannot be made: {error.strerror or error}."
            ) from None

    def write(self, files: Sequence[str], prediction: Prediction) -> None:
        """The maps of a batch.

        Raises:
            PosthocUQError: the prediction is not one of pixels, or a file cannot be written.
        """
        if not isinstance(prediction, AtPositions):
            raise PosthocUQError(
                "--maps is for models that predict a class or a value at every pixel, and this one does not."
            )
        if len(prediction.positions) != 2:
            raise PosthocUQError(
                f"--maps is for predictions of pixels, and this model's have positions {prediction.positions}."
            )
        if not isinstance(prediction, PositionPrediction):
            of_labels = isinstance(prediction, LabelMapPrediction)
            found = {"probability": prediction.probs} if of_labels else prediction.value_columns(self.level)
            ratio = prediction.novelty_ratio
            found |= {"novelty": ratio} if ratio is not None and ratio.ndim > 1 else {}
            for name, values in found.items():
                for file, array in zip(files, values.float().numpy(), strict=True):
                    self._put(Path(self.folder, name, _npy(file)), partial(np.save, arr=array))
            return
        kind = np.uint8 if prediction.classes <= _CLASSES else np.uint16
        self._save(_CLASS, files, prediction.predicted().numpy().astype(kind))
        known = prediction.scores_by_position()
        for name in (name for name in _SCORES if name in known):
            shares = known[name].double() / (1 if name == "novelty" else math.log(prediction.classes))
            self._save(name, files, (shares.clamp(0, 1) * _FULL).round().numpy().astype(np.uint16))

    def _save(self, kind: str, files: Sequence[str], maps: np.ndarray[Any, Any]) -> None:
        for file, pixels in zip(files, maps, strict=True):
            image = Image.fromarray(pixels)
            self._put(Path(self.folder, kind, _png(file)), partial(image.save, format="PNG"))

    @staticmethod
    def _put(target: Path, write: Callable[[IO[bytes]], Any]) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PosthocUQError(f"'{target}' could not be written: {error.strerror or error}.") from error
        with replacing(target) as opened:
            write(opened)


def _png(file: str) -> str:
    return os.path.splitext(file)[0] + ".png"


def _npy(file: str) -> str:
    return os.path.splitext(file)[0] + ".npy"
