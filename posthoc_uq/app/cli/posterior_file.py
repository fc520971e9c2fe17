"""What a posterior's file says of its model and of the data that it was fitted on, and how commands on it take that.

`fit` writes ``--model``, ``--num-classes`` and ``--weights``; other commands take them where their options say
nothing, and say so on stderr. The file may be a stranger's. So a model is made only if timm or torchvision has it
under that name (not ``hf-hub:...``, which fetches), and weights are read only from the folder of the posterior's file
or below, links followed: move both together. Code is imported, or weights fetched by ``--pretrained``, only if you say
so. With the same ``--model`` of your own code ``--weights`` may be left out.

The second of `tune`, `calibrate` and `update` on one file waits for the end of the first, and then changes what that
one wrote. The lock is the operating system's, on the file itself, so a killed command leaves none. Where there are no
locks (Windows, some network folders; a warning says so), or other code writes the file meanwhile, the command notices
it before it writes, leaves the new file and ends with an error. `uq.load` and `uq.save` in Python ask for no lock.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePath, PurePosixPath
from typing import Any

import torch

from posthoc_uq.app.cli.labels import read_names
from posthoc_uq.app.cli.models import TrainedModel, trained_model
from posthoc_uq.app.cli.options import ModelSource
from posthoc_uq.app.cli.transforms import transform_of
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.files import atomic, inspect, load, save
from posthoc_uq.files.header import open_regular
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.posteriors.posterior import Posterior

# Facts that a fit keeps, by their names in the file.
MODEL, WEIGHTS, PREFIX, MODEL_CLASSES = "model", "model weights", "model weights prefix", "model classes"
COLUMNS, TARGETS, CLASSES = "table columns", "table targets", "table classes"
IGNORED = "mask value ignored"
NAMES = "class names"
_PREPARED = {
    "image size": "image_size",
    "image mean": "mean",
    "image std": "std",
}  # and the options that they are

_OF_DATA = (COLUMNS, TARGETS, CLASSES, IGNORED, NAMES)
_LIBRARIES = ("timm", "torchvision")
_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
_MAX_NAME = 200  # characters of the name of a model
_LONGEST_PATH = 1024
_MAX_SHOWN = 80
_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class DatasetInfo:
    """What targets and outputs mean.

    Attributes:
        likelihood: of the model's outputs.
        kept: facts of the data that the posterior was fitted on.
    """

    likelihood: Likelihood
    kept: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def labels(self) -> bool:
        """Whether a target is one class an input, as class folders and label columns give it."""
        return self.likelihood.classes(2) > 1  # of two outputs, likelihoods of classes have several


def dataset_info(posterior: Posterior) -> DatasetInfo:
    """What a posterior's file says of its data.

    Raises:
        PosthocUQError: there are several heads.
    """
    if heads := [*posterior.likelihood.head_likelihoods]:
        raise PosthocUQError(
            f"The posterior has the heads {heads}, and commands read the targets of one; use it in Python, as "
            f"uq.wrap(model, posterior) and uq.evaluate(predictor, loader)."
        )
    facts = posterior.history.fit
    return DatasetInfo(posterior.likelihood, {name: facts[name] for name in _OF_DATA if name in facts})


# Written by a fit.


def facts_of(source: ModelSource, output: str) -> dict[str, Any]:
    """What the posterior's file `output` says of its model."""
    weights = None if source.weights is None else _seen_from(output, source.weights)
    given = {WEIGHTS: weights, PREFIX: source.weights_prefix, MODEL_CLASSES: source.num_classes}
    return {MODEL: _named(source.model or "", output)} | {k: v for k, v in given.items() if v is not None}


def image_facts(source: ModelSource, model: TrainedModel) -> dict[str, Any]:
    """What it says of how images were prepared, so that other commands prepare them in the same way."""
    given = {fact: getattr(source, option) for fact, option in _PREPARED.items()}
    return {"images": model.transform.text} | {k: v for k, v in given.items() if v is not None}


def _named(spec: str, output: str) -> str:
    """A model as a posterior's file names it: a file of code by its path from there, or by its name alone."""
    place, colon, name = spec.rpartition(":")
    if not place.endswith(".py"):
        return spec
    return f"{_seen_from(output, place) or PurePath(place).name}{colon}{name}"


def _seen_from(output: str, path: str) -> str | None:
    """A path relative to the folder of a file, with `/`; None if it does not lie in that folder."""
    try:
        relative = PurePath(os.path.realpath(path)).relative_to(os.path.dirname(os.path.realpath(output)))
    except ValueError:
        return None
    return relative.as_posix() if _is_inside(relative.as_posix()) else None


def _is_inside(name: str) -> bool:
    """Whether a text is a path that stays in its folder: relative, without `..`, and a path on every system."""
    return (
        0 < len(name) <= _LONGEST_PATH
        and name.isprintable()
        and not set(name) & set('\\:*?"<>|')
        and not PurePosixPath(name).is_absolute()
        and ".." not in PurePosixPath(name).parts
    )


# Taken by the other commands.


def taken_from(path: str, source: ModelSource) -> tuple[ModelSource, str | None]:
    """The options with what they leave out of the model from a posterior's file, and a sentence that says what that is;
    options always win.

    Raises:
        PosthocUQError: the options name no model, and the file none that is made without the user's asking; or the file
            names weights that are not in its folder.
    """
    no_weights = source.weights is None and not source.pretrained
    if not os.path.isfile(path) or (source.model is not None and not no_weights):
        return source, None
    facts: Mapping[str, Any] = inspect(path)["fit"]
    taken: list[str] = []
    if source.model is None:
        source = replace(source, model=_library_model(path, facts.get(MODEL, "")))
        taken.append(f"the model {source.model}")
    elif _named(source.model, path) != facts.get(MODEL):
        return source, None  # another model, with weights of its own
    if no_weights and WEIGHTS in facts:
        prefix = facts.get(PREFIX) if source.weights_prefix is None else source.weights_prefix
        source = replace(source, weights=_beside(path, facts[WEIGHTS]), weights_prefix=prefix)
        taken.append(f"the weights '{source.weights}'")
    if source.num_classes is None and (source.model or "").partition(":")[0] in _LIBRARIES:
        source = replace(source, num_classes=facts.get(MODEL_CLASSES))
    return source, f"From '{path}': {' with '.join(taken)}." if taken else None


def _library_model(path: str, spec: str) -> str:
    """The name of a model of timm or torchvision."""
    if not spec:
        raise PosthocUQError(f"'{path}' names no model; give --model MODEL.")
    library, _, name = spec.partition(":")
    shown = spec if len(spec) <= _MAX_SHOWN else spec[:_MAX_SHOWN] + "..."
    if library not in _LIBRARIES:
        raise PosthocUQError(
            f"'{path}' names the model '{shown}', which is code, and code is run only if you name it yourself; give "
            f"--model PLACE:FUNCTION."
        )
    if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
        raise PosthocUQError(
            f"'{path}' names the model '{shown}', which {library} has not; give --model MODEL."
        )
    return spec


def _beside(path: str, name: str) -> str:
    """The path of weights in the folder of a posterior's file, or below."""
    folder = os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path)
    place = os.path.join(folder, name) if _is_inside(name) else ""
    if not place or _seen_from(path, place) is None:  # a link in the folder may lead out of it
        raise PosthocUQError(
            f"'{path}' names weights that are not in its own folder, and they are not read; give --weights FILE."
        )
    if not os.path.isfile(place):
        raise PosthocUQError(
            f"'{path}' names the weights '{name}', and its folder has no such file; give --weights FILE."
        )
    return place


def opened(path: str, source: ModelSource) -> tuple[TrainedModel, Posterior]:
    """The model that the options name and the posterior in a file. Images are prepared as for the fit, but for what the
    options say; warns if that differs.

    Raises:
        PosthocUQError: there is no such file or model, or they do not belong together.
    """
    open_regular(path).close()  # there must be one, before the model is made
    model = trained_model(source)
    try:
        posterior = load(path, model.model)
    except PosteriorMismatchError as error:
        given = source.weights is not None or source.pretrained
        advice = "are the --weights the right ones?" if given else "give --weights FILE with them."
        raise PosteriorMismatchError(f"{error} From the shell: {advice}") from error
    facts = posterior.history.fit
    kept = {option: facts[fact] for fact, option in _PREPARED.items() if fact in facts}
    if kept and source.transform is None:
        given = {name: value for name in _PREPARED.values() if (value := getattr(source, name)) is not None}
        model = replace(model, transform=transform_of(model.model, replace(source, **(kept | given))))
    preparation = facts.get("images")
    if preparation is not None and preparation != model.transform.text:
        warnings.warn(
            f"'{path}' was fitted on images prepared as [{preparation}], and these are prepared as "
            f"[{model.transform.text}].",
            stacklevel=2,
        )
    return model, posterior


@contextmanager
def changing(path: str, output: str | None) -> Generator[Rewrite]:
    """Have a posterior's file to oneself where a command writes it again. A second such command waits, and then changes
    what the first one wrote.

    Raises:
        PosthocUQError: there is no such file, or torchrun started several processes, which would do the work once each.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        raise PosthocUQError(
            "Of the commands only fit is shared by processes; run this one without torchrun."
        )
    open_regular(path).close()
    if output is not None:
        yield Rewrite(path, output)
        return

    def wait() -> None:
        warnings.warn(f"'{path}' is being changed by another command; waiting for its end.", stacklevel=2)

    with atomic.changing(path, wait) as check:
        yield Rewrite(path, None, check)


@dataclass(frozen=True)
class Rewrite:
    """Saves a posterior over its file, or as `output`, which then names the model of this command.

    Attributes:
        path: the posterior's file.
        output: another one to write.
        check: raises where `path` is no longer what was read.
    """

    path: str
    output: str | None
    check: Callable[[], None] = lambda: None

    def __call__(self, posterior: Posterior, source: ModelSource, dtype: torch.dtype | None = None) -> None:
        if self.output is not None:
            facts = {
                k: v for k, v in posterior.history.fit.items() if k not in (WEIGHTS, PREFIX, MODEL_CLASSES)
            }
            history = replace(posterior.history, fit=facts | facts_of(source, self.output))
            posterior = posterior.replaced(history=history)
        self.check()
        save(posterior, self.output or self.path, dtype=dtype)


def stored_dtype(path: str) -> torch.dtype | None:
    """The half format of a file's numbers, or None."""
    formats = {
        tensor["dtype"] for block in inspect(path)["blocks"].values() for tensor in block["tensors"].values()
    }
    half = formats & _HALF.keys()  # some tensors keep their own format
    return _HALF[half.pop()] if len(half) == 1 else None


def output_names(
    model: TrainedModel, posterior: Posterior, path: str | None, of_data: Sequence[str] | None = None
) -> Sequence[str] | None:
    """Names of the outputs: from a file, from the class folders or the table, from those of the fit, or from pretrained
    weights.
    """
    if path is not None:
        return read_names(path)
    facts = posterior.history.fit
    return of_data or facts.get(NAMES, facts.get(CLASSES)) or model.categories
