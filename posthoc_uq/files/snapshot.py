"""Checkpoints: named tensors and a plain description in one file of the same kind as a posterior's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.files import atomic, hdf5, plain, userblock
from posthoc_uq.files.saving import as_array
from posthoc_uq.files.schema import CHECKPOINT
from posthoc_uq.files.table import check_checkpoint

_ATTRIBUTES = {"format": f"posthoc_uq {CHECKPOINT}"}

Groups = Mapping[str, Mapping[str, Tensor]]


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
    text = plain.written(state)
    image = hdf5.build_image(text, {"/": _ATTRIBUTES}, arrays, userblock.SIZE, None)
    atomic.write(target, atomic.seal(image, CHECKPOINT))


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

    def largest(kind: str | None) -> int:
        if kind not in (CHECKPOINT, None):
            raise foreign
        return limit

    data, _ = userblock.read(target, largest)
    try:
        with hdf5.ImageReader(data) as reader:
            structure = reader.structure()
            state = plain.read_plain(structure.state)
            if state.get("kind") != CHECKPOINT:
                raise foreign
            check_checkpoint(state)
            return state["description"], _read_tensors(reader, structure, state["index"])
    except (hdf5.FormatError, CorruptPosteriorError) as error:
        if error is foreign:
            raise
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
    extra = set(structure.attributes) - {"/"} or set(structure.attributes.get("/", [])) - _ATTRIBUTES.keys()
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
