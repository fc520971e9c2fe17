"""What a command writes: never over something that it reads, over another file only with ``--force``; and predictions
as a table or as maps.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO, cast, get_args, get_origin

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from posthoc_uq.cli.options import Checks, Choice, Data
from posthoc_uq.cli.parser import Option, options_of
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.paths import IMAGE_ENDINGS, folder_files
from posthoc_uq.core.tables import csv_text
from posthoc_uq.files.atomic import checked_target, remove_leftovers, replacing
from posthoc_uq.likelihoods.bernoulli import MultilabelPrediction
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.gaussian import RegressionPrediction
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.posteriors.referral import thresholds_of

_Identity = tuple[int, int]


def role_of(hint: Any) -> str | None:
    """What the file of an option is for, as the option's type says: see `posthoc_uq.cli.options.Read` and others."""
    if get_origin(hint) is Annotated:
        return next((word for word in get_args(hint)[1:] if isinstance(word, str)), None)
    return next((role for part in get_args(hint) if (role := role_of(part)) is not None), None)


class Outputs:
    """The files that a command reads and writes.

    Args:
        options: of the command.
        call: its arguments.
        configurations: the files that some of these stand in.
    """

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
        self._files.setdefault(role, []).extend((f"--{option.name}", item) for item in values)

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


# Predictions as rows of a table.


class Flags(NamedTuple):
    """For each input, the scores that refer it, and how extreme it is among familiar ones."""

    reasons: list[list[str]]
    tails: list[float]


class PredictionTable:
    """The columns of one kind of prediction.

    Args:
        prediction: the first one.
        referral: what the posterior's file says of thresholds.
        names: of the outputs.
        top_k: classes to name.
        level: of intervals.
    """

    def __init__(
        self,
        prediction: Prediction,
        referral: Mapping[str, Any],
        names: Sequence[str] | None,
        top_k: int,
        level: float,
    ) -> None:
        self._names, self._level, self._several = names, level, len(thresholds_of(referral)) > 1
        self._largest: list[str] = []
        multilabel = isinstance(prediction, MultilabelPrediction)
        classes = prediction.probs.shape[1] if multilabel else prediction.classes
        if classes is None:
            mean = cast(RegressionPrediction, prediction).mean
            outputs = 1 if mean.ndim == 1 else mean.shape[1]
            kinds = ("mean", "standard_deviation", "epistemic_sd", "lower", "upper")
            columns = [
                kind if outputs == 1 else f"{kind}_{i}" for i in range(1, outputs + 1) for kind in kinds
            ]
            self._scores: list[str] = []
        else:
            if names is not None and len(names) != classes:
                raise PosthocUQError(
                    f"There are {len(names)} class names, and the model has {classes} outputs."
                )
            self._k = min(top_k, classes)
            number = "share" if isinstance(prediction, PositionPrediction) else "probability"
            columns = [f"{what}_{i}" for i in range(1, self._k + 1) for what in ("label", number)]
            # the scores that decide the flag are shown
            self._scores = list(dict.fromkeys(("entropy", "mutual_information", *thresholds_of(referral))))
        if prediction.novelty_ratio is not None and "novelty" not in self._scores:
            self._scores.append("novelty")
        if isinstance(prediction, PositionPrediction):
            known = prediction.scores_by_position()
            self._largest = [name for name in self._scores if name in known]
        columns += [*self._scores, *(f"largest_{name}" for name in self._largest)]
        self.header = ["file", *columns, "flag", *(["reason", "tail"] if self._several else [])]

    def rows(self, prediction: Prediction, files: Sequence[str], flags: Flags | None) -> Iterator[list[str]]:
        """The rows of one batch."""
        if isinstance(prediction, PositionPrediction):
            middle = self._maps(prediction)
        elif isinstance(prediction, (ClassPrediction, MultilabelPrediction)):
            top = prediction.top_k(self._k)
            middle = self._ranked(top.labels, top.probabilities, self._known(prediction.scores()))
        else:
            middle = self._values(cast(RegressionPrediction, prediction))
        for i, (file, cells) in enumerate(zip(files, middle, strict=True)):
            yield [csv_text(file), *cells, *self._end(flags, i)]

    def _end(self, flags: Flags | None, i: int) -> list[str]:
        """The last columns: flag, and with several scores reason and tail."""
        if flags is None:
            return ["", "", ""] if self._several else [""]
        flag = [str(int(bool(flags.reasons[i])))]
        return [*flag, "+".join(flags.reasons[i]), f"{flags.tails[i]:.6g}"] if self._several else flag

    def _maps(self, prediction: PositionPrediction) -> list[list[str]]:
        """The classes that most positions of an input have, with their shares; means of the scores, and the largest."""
        predicted = prediction.predicted().flatten(1)
        counts = torch.stack([row.bincount(minlength=prediction.classes) for row in predicted])
        shares, labels = (counts / counts.sum(1, keepdim=True)).topk(self._k)
        largest = [prediction.per_input(name, "largest").tolist() for name in self._largest]
        return self._ranked(labels, shares, [*self._known(prediction.scores()), *largest])

    def _known(self, scores: Mapping[str, Tensor]) -> list[list[float] | None]:
        """The columns of scores; None where the head does not know one."""
        return [scores[name].tolist() if name in scores else None for name in self._scores]

    def _ranked(
        self, labels: Tensor, values: Tensor, scores: Sequence[Sequence[float] | None]
    ) -> list[list[str]]:
        """A row an input: its labels (inputs, k) with their values, and its scores."""
        rows: list[list[str]] = []
        for i, (own_labels, own_values) in enumerate(zip(labels.tolist(), values.tolist(), strict=True)):
            row: list[str] = []
            for label, value in zip(own_labels, own_values, strict=True):
                name = str(label) if self._names is None else csv_text(str(self._names[label]))
                row += [name, f"{value:.6g}"]
            rows.append(row + ["" if score is None else f"{score[i]:.6g}" for score in scores])
        return rows

    def _values(self, prediction: RegressionPrediction) -> list[list[str]]:
        lower, upper = prediction.interval(self._level)
        spread = prediction.epistemic_variance.sqrt()
        columns = torch.stack([prediction.mean, prediction.standard_deviation, spread, lower, upper], dim=-1)
        columns = columns.reshape(len(prediction), -1)
        if prediction.novelty_ratio is not None:
            columns = torch.cat([columns, prediction.novelty_ratio.to(columns).unsqueeze(1)], dim=1)
        return [[f"{value:.6g}" for value in row] for row in columns.tolist()]


# Predictions of pixels as PNG files.

_CLASS = "class"
_SCORES = ("entropy", "mutual_information", "novelty")
_FULL = 65535  # the largest value of 16 bits
_CLASSES = 256  # that 8 bits hold


@dataclass(frozen=True)
class Maps:
    """PNG maps in a folder: ``class/NAME.png``, the index of each pixel's class in 8 bits (16 above 256 classes), and
    ``SCORE/NAME.png`` for every score, in 16 bits. Entropy and mutual information are shares of their largest value,
    the logarithm of the number of classes; the novelty is its value. 65535 is 1.
    """

    folder: str

    def prepare(self, files: Sequence[str] | None, outputs: Checks) -> None:
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
        if not isinstance(prediction, PositionPrediction):
            raise PosthocUQError(
                "--maps is for models that predict the class of every pixel, and this one does not."
            )
        if len(prediction.positions) != 2:
            raise PosthocUQError(
                f"--maps is for predictions of pixels, and this model's have positions {prediction.positions}."
            )
        kind = np.uint8 if prediction.classes <= _CLASSES else np.uint16
        self._save(_CLASS, files, prediction.predicted().numpy().astype(kind))
        known = prediction.scores_by_position()
        for name in (name for name in _SCORES if name in known):
            shares = known[name].double() / (1 if name == "novelty" else math.log(prediction.classes))
            self._save(name, files, (shares.clamp(0, 1) * _FULL).round().numpy().astype(np.uint16))

    def _save(self, kind: str, files: Sequence[str], maps: np.ndarray[Any, Any]) -> None:
        for file, pixels in zip(files, maps, strict=True):
            target = Path(self.folder, kind, _png(file))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target) as opened:
                    Image.fromarray(pixels).save(opened, format="PNG")
            except OSError as error:
                raise PosthocUQError(
                    f"'{target}' could not be written: {error.strerror or error}."
                ) from error


def _png(file: str) -> str:
    return os.path.splitext(file)[0] + ".png"
