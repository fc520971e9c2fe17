"""What a checkpoint may hold for the fit that goes on from it: names, shapes and numbers.

That each value is of its kind is settled when the file is read (``storage/table.py``); here the parts are compared with
this fit. A file that passes gives finite results, whoever made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.curvature.sweep import Summary
from posthoc_uq.errors import CorruptPosteriorError
from posthoc_uq.inference.mean_field import LOG_VARIANCE
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.specs import LARGEST, TensorSpec
from posthoc_uq.storage.numbers import complaint

Tensors = Mapping[str, Mapping[str, Tensor]]

NOISE = "noise"  # the one stage that comes before all sweeps


@dataclass(frozen=True)
class _Part:
    """A tensor of one layer: its sides, as letters for the layer's groups, outputs and inputs or ``"*"`` for any size;
    and whether it is a basis. What is no basis has no negative number.
    """

    sides: str
    basis: bool = False

    def of(self, layer: Layer) -> TensorSpec:
        """What it must be for a layer."""
        sizes = dict(zip("Gmn", layer.matrix_shape, strict=True))
        shape = tuple(sizes.get(side) for side in self.sides)
        return TensorSpec(shape, non_negative=not self.basis, orthonormal=self.basis)


_BY_LAYER: dict[str, dict[str, _Part]] = {
    "diagonal": {"diagonal": _Part("Gmn")},
    "Kronecker factors": {
        "input_basis": _Part("Gnn", basis=True),
        "output_basis": _Part("Gmm", basis=True),
        "input_values": _Part("Gn"),
        "output_values": _Part("Gm"),
    },
    "eigenvalues": {"eigenvalues": _Part("Gmn")},
    "bases": {"inputs": _Part("Gn*", basis=True), "outputs": _Part("Gm*", basis=True)},
    "eigenvalues and diagonal": {"eigenvalues": _Part("G**"), "diagonal": _Part("Gmn")},
}
_AFTER = {"eigenvalues": "Kronecker factors", "eigenvalues and diagonal": "bases"}


def check_stage(
    name: str,
    summary: Summary,
    tensors: Tensors,
    stages: Mapping[str, Tensors],
    layers: Mapping[str, Layer],
    dtype: torch.dtype,
) -> None:
    """Refuse the result of a stage that is not one of these layers.

    Args:
        name: of the stage.
        summary: what its sweep saw.
        tensors: its result, by layer and name.
        stages: the results of all stages that the file holds.
        layers: of the fit.
        dtype: of its statistics.

    Raises:
        CorruptPosteriorError: says what is wrong.
    """
    if name != NOISE:
        check_summary(summary)
    if name not in (*_BY_LAYER, NOISE, "Fisher") or _AFTER.get(name, name) not in stages:
        raise CorruptPosteriorError(f"it has the part '{name}', which this fit has not, or not yet")
    specs = _specs(name, tensors, layers)
    for owner, own in specs.items():
        found = tensors.get(owner, {})
        if found.keys() != own.keys() or tensors.keys() != specs.keys():
            raise CorruptPosteriorError(f"its part '{name}' has other tensors than this fit's")
        for tensor_name, spec in own.items():
            what = f"'{tensor_name}' of '{owner}' in '{name}'"
            if name != NOISE and found[tensor_name].dtype != dtype:
                raise CorruptPosteriorError(f"{what} is not of {dtype}, as this fit's statistics are")
            _check_tensor(what, found[tensor_name], spec)
    if name == "eigenvalues and diagonal":
        for owner, own in tensors.items():
            bases = stages["bases"].get(owner, {})
            widths = tuple(bases[side].shape[-1] for side in ("outputs", "inputs") if side in bases)
            if tuple(own["eigenvalues"].shape[1:]) != widths:
                raise CorruptPosteriorError(f"the eigenvalues of layer '{owner}' are not in its bases")


def _specs(name: str, tensors: Tensors, layers: Mapping[str, Layer]) -> dict[str, dict[str, TensorSpec]]:
    """Owner and name of a tensor to what it must be."""
    if name == NOISE:  # nothing, where the loader gives no targets
        return {NOISE: {"variance": TensorSpec((None,), non_negative=True)}} if tensors else {}
    if name == "Fisher":
        size = sum(layer.parameters for layer in layers.values())
        return {"joint": {"fisher": TensorSpec((size, size), symmetric=True)}}
    return {
        owner: {tensor: part.of(layer) for tensor, part in _BY_LAYER[name].items()}
        for owner, layer in layers.items()
    }


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
