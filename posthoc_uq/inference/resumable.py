"""What a checkpoint may hold for the fit that goes on from it: names, shapes and numbers.

The type of each value is checked when the file is read (``storage/table.py``); here the parts are compared with this
fit, whose method declares its stages. A file that passes gives finite results, whoever made it.
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

NOISE_STAGE = "noise"  # the observation noise: the one stage before all sweeps

_NOISE_STAGES: Stages = {
    NOISE_STAGE: StageSpec({"variance": StageTensor("*", non_negative=True)}, owner=NOISE_STAGE)
}


def check_stage(
    name: str,
    summary: Summary,
    stages: Mapping[str, Tensors],
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


def check_same(what: str, saved: Tensors, wanted: Tensors) -> None:
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
    state: Mapping[str, Any], groups: Tensors, tensors: Mapping[str, Tensor], epochs: int
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
