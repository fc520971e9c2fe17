"""What a checkpoint may hold for the fit that goes on from it: names, shapes and numbers.

That each value is of its kind is settled when the file is read (``storage/table.py``); here the parts are compared with
this fit, whose method declares its stages. A file that passes gives finite results, whoever made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.curvature.sweep import Summary
from posthoc_uq.errors import CorruptPosteriorError
from posthoc_uq.inference.mean_field import LOG_VARIANCE
from posthoc_uq.inference.stages import Stages, StageSpec, StageTensor
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.specs import LARGEST, TensorSpec
from posthoc_uq.storage.numbers import complaint

Tensors = Mapping[str, Mapping[str, Tensor]]

NOISE = "noise"  # the one stage that comes before all sweeps


_NOISE: Stages = {NOISE: StageSpec({"variance": StageTensor("*", non_negative=True)}, owner=NOISE)}


def check_stage(
    name: str,
    summary: Summary,
    stages: Mapping[str, Tensors],
    declared: Stages,
    layers: Mapping[str, Layer],
    dtype: torch.dtype,
) -> None:
    """Refuse the result of a stage that is not one of this fit.

    Args:
        name: of the stage.
        summary: what its sweep saw.
        stages: the results of all stages that the file holds, by layer and name.
        declared: what the method says of its stages.
        layers: of the fit.
        dtype: of its statistics.

    Raises:
        CorruptPosteriorError: says what is wrong.
    """
    if name != NOISE:
        check_summary(summary)
    known = {**declared, **_NOISE}
    if name not in known or (known[name].after or name) not in stages:
        raise CorruptPosteriorError(f"it has the part '{name}', which this fit has not, or not yet")
    own, tensors = known[name], stages[name]
    if name == NOISE and not tensors:
        return  # the loader gives no targets
    sizes = _sizes(own, layers)
    expected = {owner: own.tensors.keys() for owner in sizes}
    if {owner: found.keys() for owner, found in tensors.items()} != expected:
        raise CorruptPosteriorError(f"its part '{name}' has other tensors than this fit's")
    for owner, letters in sizes.items():
        for earlier in _before(name, known):
            _note_sizes(letters, known[earlier], stages.get(earlier, {}).get(owner, {}))
        for tensor_name, tensor in tensors[owner].items():
            what = f"'{tensor_name}' of '{owner}' in '{name}'"
            if name != NOISE and tensor.dtype != dtype:
                raise CorruptPosteriorError(f"{what} is not of {dtype}, as this fit's statistics are")
            _check_tensor(what, tensor, own.tensors[tensor_name].spec(letters))
            _note_sizes(letters, own, {tensor_name: tensor})


def _sizes(stage: StageSpec, layers: Mapping[str, Layer]) -> dict[str, dict[str, int]]:
    """The owners of a stage's tensors, each with the sizes that its letters stand for."""
    every = {"N": sum(layer.parameters for layer in layers.values())}
    if stage.owner is not None:
        return {stage.owner: every}
    return {name: every | dict(zip("Gmn", layer.matrix_shape, strict=True)) for name, layer in layers.items()}


def _before(name: str, declared: Stages) -> list[str]:
    """The stages that come before one, the first of them first."""
    after = declared[name].after
    return [] if after is None else [*_before(after, declared), after]


def _note_sizes(letters: dict[str, int], stage: StageSpec, tensors: Mapping[str, Tensor]) -> None:
    """Give the letters that have no size yet those of a stage's tensors."""
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
    """Refuse the counts of a sweep that cannot be.

    Raises:
        CorruptPosteriorError: they contradict each other.
    """
    least = int(finished)  # none of the share that a sweep takes may have come yet
    possible = summary.batches >= 1 and summary.outputs >= least and least <= summary.samples <= summary.seen
    if not possible or len(summary.keys) > summary.seen:
        raise CorruptPosteriorError("what it says of the data seen so far contradicts itself")


def check_same(what: str, found: Tensors, wanted: Tensors) -> None:
    """Refuse tensors with other names, shapes or number formats than `wanted`, both by owner and name.

    Raises:
        CorruptPosteriorError: names one.
    """
    first, second = (
        {(a, b): (tuple(t.shape), t.dtype) for a, own in part.items() for b, t in own.items()}
        for part in (found, wanted)
    )
    if first != second:
        odd = next(iter(first.items() ^ second.items()))[0]
        raise CorruptPosteriorError(f"{what} do not fit this fit: {odd} is missing or of another kind")


def check_training(
    state: Mapping[str, Any], groups: Tensors, tensors: Mapping[str, Tensor], epochs: int
) -> None:
    """Refuse where a training stands that is none of this one.

    Args:
        state: counters and losses.
        groups: the tensors of the file.
        tensors: those that are trained, by name.
        epochs: of the whole training.

    Raises:
        CorruptPosteriorError: says what is wrong.
    """
    kept = {name: own for name, own in groups.items() if not name.startswith("optimiser/")}
    wanted = {"tensors": tensors} | ({"best": tensors} if state["best"] >= 0 else {})
    check_same("its trained tensors", kept, wanted)
    for own in kept.values():
        for name, tensor in own.items():
            most = log(LARGEST) if name.startswith(LOG_VARIANCE) else LARGEST
            if tensor.numel() and (float(tensor.max()) > most or float(tensor.min()) < -LARGEST):
                raise CorruptPosteriorError(f"its '{name}' is beyond {most:.3g}")
    history = state["history"]
    counted = len(history) == state["epoch"] <= epochs and state["best"] < state["epoch"]
    if not counted or any(entry.keys() != history[0].keys() for entry in history):
        raise CorruptPosteriorError("its counts of epochs contradict each other")
