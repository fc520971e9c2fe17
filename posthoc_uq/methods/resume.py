"""The file from which a killed fit goes on, and what it may hold."""

from __future__ import annotations

import functools
import inspect
import json
import os
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from hashlib import sha256
from itertools import chain
from math import log
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.core.distributed import rank, world
from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.curvature.sweep import Summary
from posthoc_uq.files import atomic, fingerprint
from posthoc_uq.files.header import CHECKPOINT
from posthoc_uq.files.snapshot import read_snapshot, write_snapshot
from posthoc_uq.files.tensors import complaint, size_limit, tensors_of
from posthoc_uq.layers.layer import Layer
from posthoc_uq.methods.mean_field import LOG_VARIANCE
from posthoc_uq.posteriors.block import LARGEST, TensorSpec
from posthoc_uq.posteriors.posterior import Posterior

# What the stages of a fit compute, as its method declares it.
#
# A checkpoint keeps the result of every finished stage. These declarations say what it may hold, so the code
# that reads checkpoints need not change for a new method.


@dataclass(frozen=True)
class StageTensor:
    """A tensor that a stage computes.

    Attributes:
        sides: a letter for each side. ``G``, ``m`` and ``n`` are a layer's groups, outputs and inputs, ``N`` is the
            number of all weights together, ``*`` any size. Any other letter is one size, the same for all tensors of
            an owner in this stage and in those before it.
        non_negative: as in `TensorSpec`.
        orthonormal: as in `TensorSpec`.
        symmetric: as in `TensorSpec`.
        wide: whether it is in float64 where the device has that, whatever the statistics are in.
    """

    sides: str
    non_negative: bool = False
    orthonormal: bool = False
    symmetric: bool = False
    wide: bool = False

    def spec(self, sizes: Mapping[str, int]) -> TensorSpec:
        """What the tensor must be where the letters have these sizes; a letter without one stands for any size."""
        kinds: dict[str, Any] = {
            "non_negative": self.non_negative,
            "orthonormal": self.orthonormal,
            "symmetric": self.symmetric,
        }
        return TensorSpec(tuple(sizes.get(side) for side in self.sides), **kinds)


@dataclass(frozen=True)
class StageSpec:
    """What one stage computes.

    Attributes:
        tensors: by name; every layer has all of them.
        owner: None where every layer has these tensors; else the name under which the one set of them is kept.
        after: the stage that must be done before, if there is one.
    """

    tensors: Mapping[str, StageTensor] = field(default_factory=lambda: dict[str, StageTensor]())
    owner: str | None = None
    after: str | None = None


Stages = Mapping[str, StageSpec]
"""The stages of a method by name."""


# What a checkpoint may hold for the fit that goes on from it: names, shapes and numbers.
#
# The type of each value is checked when the file is read (``storage/table.py``); here the parts are compared
# with this fit, whose method declares its stages. A file that passes gives finite results, whoever made it.

StageTensors = Mapping[str, Mapping[str, Tensor]]

NOISE_STAGE = "noise"  # the observation noise: the one stage before all sweeps

_NOISE_STAGES: Stages = {
    NOISE_STAGE: StageSpec({"variance": StageTensor("*", non_negative=True)}, owner=NOISE_STAGE)
}


def check_stage(
    name: str,
    summary: Summary,
    stages: Mapping[str, StageTensors],
    declared: Stages,
    layers: Mapping[str, Layer],
    dtype: torch.dtype,
) -> None:
    """Refuse the result of a stage that this fit could not have.

    Args:
        name: of the stage.
        summary: what its sweep saw.
        stages: the results of all stages that the file holds, by layer and name.
        declared: the stages that the method declares.
        layers: of the fit.
        dtype: of its statistics.

    Raises:
        CorruptPosteriorError: says what is wrong.
    """
    if name != NOISE_STAGE:
        check_summary(summary)
    known = {**declared, **_NOISE_STAGES}
    if name not in known or (known[name].after or name) not in stages:
        raise CorruptPosteriorError(f"it has the part '{name}', which this fit has not, or not yet")
    spec, tensors = known[name], stages[name]
    if name == NOISE_STAGE and not tensors:
        return  # the loader gives no targets
    sizes = _sizes(spec, layers)
    expected = {owner: spec.tensors.keys() for owner in sizes}
    if {owner: by_name.keys() for owner, by_name in tensors.items()} != expected:
        raise CorruptPosteriorError(f"its part '{name}' has other tensors than this fit's")
    for owner, letters in sizes.items():
        for earlier in _stages_before(name, known):
            _note_sizes(letters, known[earlier], stages.get(earlier, {}).get(owner, {}))
        for tensor_name, tensor in tensors[owner].items():
            what = f"'{tensor_name}' of '{owner}' in '{name}'"
            allowed = {dtype, torch.float64} if spec.tensors[tensor_name].wide else {dtype}
            if name != NOISE_STAGE and tensor.dtype not in allowed:
                raise CorruptPosteriorError(f"{what} is not of {dtype}, as this fit's statistics are")
            _check_tensor(what, tensor, spec.tensors[tensor_name].spec(letters))
            _note_sizes(letters, spec, {tensor_name: tensor})


def _sizes(stage: StageSpec, layers: Mapping[str, Layer]) -> dict[str, dict[str, int]]:
    """The owners of a stage's tensors, each with the sizes that the letters stand for."""
    all_weights = {"N": sum(layer.parameters for layer in layers.values())}
    if stage.owner is not None:
        return {stage.owner: all_weights}
    return {
        name: all_weights | dict(zip("Gmn", layer.matrix_shape, strict=True))
        for name, layer in layers.items()
    }


def _stages_before(name: str, declared: Stages) -> list[str]:
    """The stages before this one, from the first on."""
    after = declared[name].after
    return [] if after is None else [*_stages_before(after, declared), after]


def _note_sizes(letters: dict[str, int], stage: StageSpec, tensors: Mapping[str, Tensor]) -> None:
    """Note the sizes of a stage's tensors for the letters that have none yet."""
    for name, tensor in tensors.items():
        sides = stage.tensors[name].sides if name in stage.tensors else ""
        if len(sides) == tensor.ndim:
            for side, size in zip(sides, tensor.shape, strict=True):
                if side != "*":
                    letters.setdefault(side, size)


def _check_tensor(what: str, tensor: Tensor, spec: TensorSpec) -> None:
    if not spec.fits(tensor.shape):
        raise CorruptPosteriorError(
            f"{what} has the shape {tuple(tensor.shape)}, which does not fit this fit"
        )
    fault = complaint(spec, tensor)
    if fault is not None:
        raise CorruptPosteriorError(f"{what} {fault}")


def check_summary(summary: Summary, *, finished: bool = True) -> None:
    """Refuse impossible counts of a sweep.

    Raises:
        CorruptPosteriorError: they contradict each other.
    """
    least = int(finished)  # an unfinished sweep may not have met any sample of its share yet
    possible = summary.batches >= 1 and summary.outputs >= least and least <= summary.samples <= summary.seen
    if not possible or len(summary.keys) > summary.seen:
        raise CorruptPosteriorError("what it says of the data seen so far contradicts itself")


def check_same(what: str, saved: StageTensors, wanted: StageTensors) -> None:
    """Refuse tensors with other names, shapes or number formats than `wanted`, both by owner and name.

    Raises:
        CorruptPosteriorError: names one.
    """
    first, second = (
        {(a, b): (tuple(t.shape), t.dtype) for a, group in part.items() for b, t in group.items()}
        for part in (saved, wanted)
    )
    if first != second:
        odd = next(iter(first.items() ^ second.items()))[0]
        raise CorruptPosteriorError(f"{what} do not fit this fit: {odd} is missing or of another kind")


def check_training(
    state: Mapping[str, Any], groups: StageTensors, tensors: Mapping[str, Tensor], epochs: int
) -> None:
    """Refuse a state that this training could not have.

    Args:
        state: counters and losses.
        groups: the tensors of the file.
        tensors: those that are trained, by name.
        epochs: of the whole training.

    Raises:
        CorruptPosteriorError: says what is wrong.
    """
    trained = {name: of_group for name, of_group in groups.items() if not name.startswith("optimiser/")}
    wanted = {"tensors": tensors} | ({"best": tensors} if state["best"] >= 0 else {})
    check_same("its trained tensors", trained, wanted)
    for of_group in trained.values():
        for name, tensor in of_group.items():
            most = log(LARGEST) if name.startswith(LOG_VARIANCE) else LARGEST
            if tensor.numel() and (float(tensor.max()) > most or float(tensor.min()) < -LARGEST):
                raise CorruptPosteriorError(f"its '{name}' is beyond {most:.3g}")
    history = state["history"]
    counted = len(history) == state["epoch"] <= epochs and state["best"] < state["epoch"]
    if not counted or any(entry.keys() != history[0].keys() for entry in history):
        raise CorruptPosteriorError("its counts of epochs contradict each other")


# Resuming a fit: its sums so far and the results of its finished parts, in one file.
#
# A fit is a sequence of *stages* (the noise variance; a sweep and what is computed from it). The file holds
# the exact tensors of every finished stage, and the sums of the unfinished sweep. The batches in those sums
# are read again and compared by their hashes, but not swept over. A method that trains keeps its state in the
# same file, in place of the stages that it began from.

Tensors = dict[str, dict[str, Tensor]]

_TRAINING = "training/"


@dataclass
class Stage:
    """A finished part of a fit: its tensors by layer and name, and what its sweep saw."""

    tensors: Tensors
    summary: Summary


class Checkpoint:
    """The file of one fit, or of one process's part of it.

    Args:
        path: the file; in a process group each rank has its own beside it (``fit.rank0of2.h5``).
        every: batches between two writes.
        identity: plain values that a fit must have in common with the one that wrote the file.
        budget: the memory budget of a fit that begins here.
        model: the fitted model.
        declared: the stages that the method declares.
        layers: the layers that get a posterior.
        dtype: of the statistics.

    Attributes:
        stages: finished stages by name.
        training: the state of a training: a plain description, and tensors by group and name; or None.
        every: batches between two writes.
        budget: the memory budget of the fit that wrote the file; it decides the order of sums, and so their rounding.

    Raises:
        PosthocUQError: the file belongs to another fit.
        CorruptPosteriorError: it is damaged, no checkpoint, or not of these layers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int,
        identity: Mapping[str, Any],
        budget: int,
        model: nn.Module,
        declared: Stages,
        layers: Mapping[str, Layer],
        dtype: torch.dtype,
    ) -> None:
        target = atomic.checked_target(path)
        if world() > 1:
            target = target.with_name(f"{target.stem}.rank{rank()}of{world()}{target.suffix}")
        self._target = target
        self.every = every
        self._declared = declared
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))  # as it comes out of a file
        self._partial: tuple[str, Summary, Tensors] | None = None
        self.stages: dict[str, Stage] = {}
        self.training: tuple[dict[str, Any], Tensors] | None = None
        self.budget = budget
        atomic.remove_leftovers(target)
        if target.exists():
            description, groups = read_snapshot(self._target, size_limit(CHECKPOINT, model))
            self._check_identity(description)
            with self.read_as_corrupt():
                self._take(description, groups, layers, dtype)

    @contextmanager
    def read_as_corrupt(self) -> Generator[None, None, None]:
        """Name the file in errors about its contents."""
        try:
            yield
        except CorruptPosteriorError as error:
            raise CorruptPosteriorError(
                f"'{self._target}' is no checkpoint that this fit could go on from: {error}. Delete it to begin anew."
            ) from None

    def _check_identity(self, description: Mapping[str, Any]) -> None:
        saved: dict[str, Any] = description["identity"]
        for name in {**self._identity, **saved}:
            value = self._identity.get(name)
            if saved.get(name) != value:
                raise PosthocUQError(
                    f"'{self._target}' is the checkpoint of another fit: its {name} was {saved.get(name)!r:.200}, and "
                    f"is {value!r:.200} now. Delete it to begin anew, or give another path."
                )

    def _take(
        self,
        description: Mapping[str, Any],
        groups: Tensors,
        layers: Mapping[str, Layer],
        dtype: torch.dtype,
    ) -> None:
        self.budget = description["memory_budget"]
        for name, summary in description["stages"].items():
            self.stages[name] = Stage(_group(groups, f"{name}/"), _summary(summary))
        done = {name: stage.tensors for name, stage in self.stages.items()}
        for name, stage in self.stages.items():
            check_stage(name, stage.summary, done, self._declared, layers, dtype)
        sweep, training = description["sweep"], description["training"]
        if (description["summary"] is None) != (sweep is None):
            raise CorruptPosteriorError("it has a sweep without what was seen, or the other way round")
        if sweep is not None:
            self._partial = sweep, _summary(description["summary"]), _group(groups, "/")
            check_summary(self._partial[1], finished=False)
        if training is not None:
            self.training = training, _group(groups, _TRAINING)
        prefixes = (*(f"{name}/" for name in self.stages), *(["/"] if sweep is not None else []))
        prefixes = (*prefixes, *([_TRAINING] if training is not None else []))
        stray = [name for name in groups if not name.startswith(prefixes)]
        if stray:
            raise CorruptPosteriorError(f"it has tensors of '{stray[0]}', which it does not describe")

    def interrupted(self, sweep: str) -> tuple[Summary, Tensors] | None:
        """What an interrupted sweep saw, and its sums; None if this sweep was not interrupted."""
        if self._partial is None or self._partial[0] != sweep:
            return None
        summary_and_sums = self._partial[1:]
        self._partial = None  # handed over, so that the sums are not in memory twice
        return summary_and_sums

    def after_batch(self, sweep: str, summary: Summary, sums: Tensors) -> None:
        """Write the sums so far, every so many batches."""
        if summary.batches % self.every == 0:
            self._write(sweep, summary, sums)

    def finish(self, name: str, stage: Stage) -> None:
        """Keep a stage's result.

        Raises:
            PosthocUQError: the method does not declare the stage, so no later fit could go on from it.
        """
        if name not in (*self._declared, NOISE_STAGE):
            raise PosthocUQError(
                f"The stage {name!r} of this fit cannot be kept: the class of the method must declare it in 'stages'."
            )
        self.stages[name] = stage
        self._partial = None
        self._write(None, None, {})

    def keep_training(self, description: dict[str, Any], tensors: Tensors) -> None:
        """Write the state of a training; drop the stages that it began from, all but the noise variance."""
        self.stages = {name: stage for name, stage in self.stages.items() if name == NOISE_STAGE}
        self._write(None, None, {}, (description, tensors))

    def remove(self) -> None:
        """Delete the file: the fit is done."""
        self._target.unlink(missing_ok=True)

    def _write(
        self,
        sweep: str | None,
        summary: Summary | None,
        sums: Tensors,
        training: tuple[dict[str, Any], Tensors] | None = None,
    ) -> None:
        groups = {f"/{layer}": tensors for layer, tensors in sums.items()}
        for name, stage in self.stages.items():
            groups |= {f"{name}/{layer}": tensors for layer, tensors in stage.tensors.items()}
        if training is not None:
            groups |= {f"{_TRAINING}{name}": tensors for name, tensors in training[1].items()}
        description = {
            "identity": self._identity,
            "stages": {name: _plain(stage.summary) for name, stage in self.stages.items()},
            "memory_budget": self.budget,
            "sweep": sweep,
            "summary": None if summary is None else _plain(summary),
            "training": None if training is None else training[0],
        }
        write_snapshot(self._target, description, groups)


def other_data() -> PosthocUQError:
    """The error of data that changed since a part of the fit was computed."""
    return PosthocUQError(
        "The data are not those that the checkpoint was made from: inputs, targets or weights of samples changed after "
        "they were read. Pass the same data, or delete the checkpoint to begin anew."
    )


def _group(groups: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensors for name, tensors in groups.items() if name.startswith(prefix)}


def _plain(summary: Summary) -> dict[str, Any]:
    return asdict(summary) | {"keys": sorted(summary.keys)}


def _summary(plain: Mapping[str, Any]) -> Summary:
    values: dict[str, Any] = {field.name: plain[field.name] for field in fields(Summary)}
    values["keys"] = set(values["keys"])
    return Summary(**values)


# Any value as plain values, which are the same in another process and after a round trip through JSON.

_DEPTH = 16  # levels of nested values that are looked at: a function may close over itself


def as_plain(value: Any, depth: int = _DEPTH) -> Any:
    """Numbers, strings, lists and dictionaries of these.

    A tensor or an array becomes a digest of its numbers; a function its name, its code, the globals it uses and the
    variables it closed over; any other object its class and attributes.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return ["array", str(array.dtype), list(array.shape), sha256(array.tobytes()).hexdigest()]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Tensor):
        return f"Tensor {fingerprint({'': value})}"
    if depth == 0:
        return _name(type(value))
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner, depth - 1) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(inner, depth - 1) for inner in cast(list[Any], value)]
    if callable(value) and not isinstance(value, nn.Module):
        return _callable(value, depth - 1)
    return [_name(type(value)), as_plain(_state_of(value), depth - 1)]


def _state_of(value: Any) -> Any:
    """The values in which an object differs from others of its class, as far as they are known."""
    if isinstance(value, nn.Module):
        return dict(chain(value.named_parameters(), value.named_buffers()))
    if callable(getattr(value, "identity", None)):  # a likelihood, a context
        return value.identity()
    if isinstance(value, Posterior):
        tensors = {slot.path: tensor for slot, tensor in tensors_of(value)}
        return {"tensors": tensors, "mean": value.mean, **value.settings.plain()}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: inner for name, inner in getattr(value, "__dict__", {}).items() if _may_differ(inner)}


def _may_differ(value: Any) -> bool:
    """Whether a value may distinguish two objects or functions: no module, and nothing that is running."""
    return not isinstance(value, (types.ModuleType, types.GeneratorType, torch.Generator))


def _callable(value: Callable[..., Any], depth: int) -> Any:
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return as_plain([partial.func, partial.args, partial.keywords], depth)
    if isinstance(value, types.MethodType):
        return as_plain([value.__self__, value.__func__], depth)
    if isinstance(value, types.FunctionType):
        closure = inspect.getclosurevars(value)
        read = {
            name: inner
            for name, inner in closure.globals.items()
            if _may_differ(inner) and not callable(inner)
        }
        variables = [dict(closure.nonlocals), read]
        return [
            _name(value),
            code_digest(value.__code__),
            as_plain([value.__defaults__, value.__kwdefaults__, variables], depth),
        ]
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return _name(value)
    return [_name(type(value)), as_plain(_state_of(value), depth)]


def code_digest(code: types.CodeType) -> str:
    """Equal for the same code in another process of the same version of Python."""
    return sha256(_code(code).encode()).hexdigest()


def _code(code: types.CodeType) -> str:
    constants = [_code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, constants))


def _constant(value: Any) -> str:
    # a set's order changes from process to process
    return (
        repr(sorted(map(repr, cast("frozenset[Any]", value))))
        if isinstance(value, frozenset)
        else repr(value)
    )


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
