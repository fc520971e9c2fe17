"""Checkpoints: named tensors and a plain description in one file of the same kind as a posterior's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.core.records import Name, Natural, Record, checked
from posthoc_uq.files import atomic, hdf5, header
from posthoc_uq.files.header import CHECKPOINT
from posthoc_uq.files.records import Hash, NotNegative, Sum
from posthoc_uq.files.tensors import as_array

_ATTRIBUTES = {"format": f"posthoc_uq {CHECKPOINT}"}

Groups = Mapping[str, Mapping[str, Tensor]]


class _Summary(Record):
    batches: Natural
    seen: Natural
    samples: Natural
    weight: NotNegative
    log_likelihood: Sum | None
    outputs: Natural
    keys: list[Annotated[int, Field(ge=-(2**63), le=2**63)]]
    digest: Hash
    content: Hash


class _Entry(Record):
    """A value of an optimiser's state: itself, or the format of a tensor, perhaps with its numbers."""

    value: Any = None
    dtype: Name = ""
    numbers: Any = None

    @model_validator(mode="after")
    def _check_one(self) -> _Entry:
        if self.model_fields_set not in ({"value"}, {"dtype"}, {"dtype", "numbers"}):
            raise ValueError("is no entry of an optimiser's state")
        return self


class _TrainingState(Record):
    epoch: Natural
    batch: Natural
    step: Natural
    length: Natural
    samples: Natural
    batches: Natural
    digest: Hash
    content: Hash
    sums: dict[Name, Sum]
    seconds: NotNegative
    history: list[dict[Name, Annotated[float, Field(allow_inf_nan=True)]]]
    best: Annotated[int, Field(ge=-1)]
    done: bool


class _Optimiser(Record):
    kind: Name
    state: dict[Name, dict[Name, _Entry]]
    groups: list[dict[Name, Any]]


class _Training(Record):
    state: _TrainingState
    optimiser: _Optimiser


class _Description(Record):
    identity: dict[Name, Any]
    memory_budget: Annotated[int, Field(ge=2**20)]
    stages: dict[Name, _Summary]
    sweep: Name | None
    summary: _Summary | None
    training: _Training | None


class _CheckpointRecord(Record):
    kind: Literal["checkpoint"]
    description: _Description
    index: list[Annotated[list[Name], Field(min_length=2, max_length=2)]]


def write_snapshot(target: Path, description: Mapping[str, Any], groups: Groups) -> None:
    """Write float32 or float64 tensors by group and name, with a description that JSON can hold.

    Raises:
        PosthocUQError: the description is too long, or the file could not be written.
    """
    arrays: dict[str, Any] = {}
    index: list[list[str]] = []
    filled = [(group, tensors) for group, tensors in groups.items() if tensors]
    for number, (group, tensors) in enumerate(filled):
        for name, tensor in tensors.items():
            index.append([group, name])
            arrays[f"{CHECKPOINT}/{number}/{hdf5.link_name(name)}"] = partial(as_array, tensor, tensor.dtype)
    state = {"kind": CHECKPOINT, "description": description, "index": index}
    image = hdf5.build_image(hdf5.state_text(state), _ATTRIBUTES, arrays, header.SIZE, None)
    atomic.write(target, header.seal(image, CHECKPOINT))


def read_snapshot(target: Path, limit: int) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What `write_snapshot` wrote.

    Args:
        target: the file.
        limit: most bytes that it may have.

    Raises:
        PosteriorMismatchError: it is larger than `limit`.
        CorruptPosteriorError: the file is damaged, or no checkpoint, or holds what none may hold.
    """
    foreign = CorruptPosteriorError(f"'{target}' is no checkpoint of a fit; give another path.")

    def largest(kind: str) -> int:
        if kind != CHECKPOINT:
            raise foreign
        return limit

    data, _ = header.read(target, largest)
    try:
        with hdf5.ImageReader(data) as reader:
            structure = reader.structure()
            state = hdf5.state_values(structure.state)
            checked(_CheckpointRecord, state, "its description")
            return state["description"], _read_tensors(reader, structure, state["index"])
    except (hdf5.FormatError, CorruptPosteriorError) as error:
        raise CorruptPosteriorError(f"'{target}' cannot be read as a checkpoint: {error}.") from None
    except MemoryError:
        raise PosthocUQError(f"'{target}' does not fit into memory.") from None


def _read_tensors(
    reader: hdf5.ImageReader, structure: hdf5.Structure, index: list[list[str]]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of an index, which must name every dataset once; all of them must be finite."""
    by_group: dict[str, dict[str, Tensor]] = {}
    order: dict[str, int] = {}
    paths = [
        (group, name, f"{CHECKPOINT}/{order.setdefault(group, len(order))}/{hdf5.link_name(name)}")
        for group, name in index
    ]
    groups = {CHECKPOINT, *(f"{CHECKPOINT}/{number}" for number in order.values())} if paths else set[str]()
    extra = set(structure.attributes) - _ATTRIBUTES.keys()
    if set(structure.groups) != groups or extra:
        raise CorruptPosteriorError("it has other groups or attributes than a checkpoint has")
    if len(set(paths)) < len(paths) or {path for *_, path in paths} != structure.datasets.keys():
        raise CorruptPosteriorError("its datasets are not those of its index")
    for group, name, path in paths:
        stored = structure.datasets[path]
        if stored.dtype not in ("<f4", "<f8"):
            raise CorruptPosteriorError(f"'{path}' is of another number format than checkpoints have")
        tensor = torch.from_numpy(reader.array(path, stored))
        if not bool(torch.isfinite(tensor).all()):
            raise CorruptPosteriorError(f"'{name}' of '{group}' holds NaN or infinity")
        by_group.setdefault(group, {})[name] = tensor
    return by_group
