"""The model and the weights that a posterior's file names: `fit` writes the names, other commands take them where their
options say nothing.

The file may be a stranger's. So a model is made only if timm or torchvision has it under that name, weights are read
only from the file's own folder, and code is imported, or weights fetched, only if the user says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePath, PurePosixPath
from typing import Any

from posthoc_uq.core.errors import PosthocUQError

MODEL, WEIGHTS = "model", "model weights"
"""Facts that a fit keeps: ``--model``, and the path of ``--weights``, seen from the folder of the posterior's file."""

CLASSES = "model classes"
"""The fact that a fit keeps where it was given: ``--num-classes``."""

_LIBRARIES = ("timm", "torchvision")
_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
_LONGEST = 200  # characters of the name of a model
_LONGEST_PATH = 1024
_MOST_CLASSES = 100_000  # a stranger's file shall not fill the memory
_SHOWN = 80


def names_of(options: Mapping[str, Any], output: str) -> dict[str, Any]:
    """What a posterior's file says of its model.

    Args:
        options: of the command, by name.
        output: the posterior's file.
    """
    weights = None if options["weights"] is None else _seen_from(output, options["weights"])
    given = {WEIGHTS: weights, CLASSES: options["num_classes"]}
    return {MODEL: _named(options["model"], output)} | {
        fact: value for fact, value in given.items() if value is not None
    }


def _named(spec: str, output: str) -> str:
    """A model as a posterior's file names it: a file of code by its path from there, or by its name alone."""
    place, colon, name = spec.rpartition(":")
    if not place.endswith(".py"):
        return spec
    return f"{_seen_from(output, place) or PurePath(place).name}{colon}{name}"


def rename(facts: Mapping[str, Any], options: Mapping[str, Any], output: str) -> dict[str, Any]:
    """Facts of a fit for a file elsewhere, by a command with these options."""
    stay = {fact: value for fact, value in facts.items() if fact not in (WEIGHTS, CLASSES)}
    return stay | names_of(options, output)


def _seen_from(output: str, path: str) -> str | None:
    """A path relative to the folder of a file, with `/`; None if it does not lie in that folder."""
    try:
        relative = PurePath(os.path.realpath(path)).relative_to(os.path.dirname(os.path.realpath(output)))
    except ValueError:
        return None
    return relative.as_posix() if _is_inside(relative.as_posix()) else None


def _is_inside(name: Any) -> bool:
    """Whether a value is a path that stays in its folder: relative, without `..`, and a path on every system."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _LONGEST_PATH
        and name.isprintable()
        and not set(name) & set('\\:*?"<>|')
        and not PurePosixPath(name).is_absolute()
        and ".." not in PurePosixPath(name).parts
    )


def fill_in(parameters: dict[str, Any]) -> str | None:
    """Take from a posterior's file what the options of a command do not say of its model; options always win.

    Args:
        parameters: of the command, by name; changed.

    Returns:
        What was taken, in a sentence, or None.

    Raises:
        PosthocUQError: the options name no model, and the file none that is made without the user's asking; or the file
            names weights that are not in its folder.
    """
    if not {"file", "model"} <= parameters.keys() or not os.path.isfile(parameters["file"]):
        return None
    spec, no_weights = parameters["model"], parameters["weights"] is None and not parameters["pretrained"]
    if spec is not None and not no_weights:
        return None
    from posthoc_uq.files import inspect

    path: str = parameters["file"]
    facts: Mapping[str, Any] = inspect(path)["fit"]
    if spec is None:
        parameters["model"] = _library_model(path, facts.get(MODEL))
    elif _named(spec, path) != facts.get(MODEL):
        return None  # another model, with weights of its own
    taken = [] if spec is not None else [f"the model {parameters['model']}"]
    if no_weights and WEIGHTS in facts:
        parameters["weights"] = _beside(path, facts[WEIGHTS])
        taken.append(f"the weights '{parameters['weights']}'")
    if parameters["num_classes"] is None and parameters["model"].partition(":")[0] in _LIBRARIES:
        parameters["num_classes"] = _classes(path, facts.get(CLASSES))
    return f"From '{path}': {' with '.join(taken)}." if taken else None


def _library_model(path: str, spec: Any) -> str:
    """The name of a model of timm or torchvision."""
    if not isinstance(spec, str) or not spec:
        raise PosthocUQError(f"'{path}' names no model; give --model MODEL.")
    library, _, name = spec.partition(":")
    shown = spec if len(spec) <= _SHOWN else spec[:_SHOWN] + "..."
    if library not in _LIBRARIES:
        raise PosthocUQError(
            f"'{path}' names the model '{shown}', which is code, and code is run only if you name it yourself; give "
            f"--model PLACE:FUNCTION."
        )
    if len(name) > _LONGEST or _NAME.fullmatch(name) is None:
        raise PosthocUQError(
            f"'{path}' names the model '{shown}', which {library} has not; give --model MODEL."
        )
    return spec


def _classes(path: str, classes: Any) -> int | None:
    """A number of outputs."""
    if classes is None or (type(classes) is int and 1 <= classes <= _MOST_CLASSES):
        return classes
    raise PosthocUQError(f"'{path}' names no possible number of classes for its model; give --num-classes N.")


def _beside(path: str, name: Any) -> str:
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
