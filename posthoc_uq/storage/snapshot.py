"""Named tensors and a plain description as one file of the same kind as a posterior's: what a checkpoint is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.storage import atomic, hdf5, userblock
from posthoc_uq.storage.saving import as_array
from posthoc_uq.storage.schema import CHECKPOINT

Groups = Mapping[str, Mapping[str, Tensor]]


def write_snapshot(target: Path, description: Mapping[str, Any], groups: Groups) -> None:
    """Write float32 or float64 tensors by group and name, with a description that JSON can hold.

    Raises:
        PosthocUQError: the file could not be written.
    """
    arrays: dict[str, Any] = {}
    index: list[list[str]] = []
    for number, (group, tensors) in enumerate(groups.items()):
        for name, tensor in tensors.items():
            index.append([group, name])
            arrays[f"{CHECKPOINT}/{number}/{hdf5.link_name(name)}"] = partial(as_array, tensor, tensor.dtype)
    state = {"kind": CHECKPOINT, "description": description, "index": index}
    try:
        image = hdf5.build_image(
            state, {"/": {"format": f"posthoc_uq {CHECKPOINT}"}}, arrays, userblock.SIZE, None
        )
    except hdf5.FormatError as error:
        raise PosthocUQError(str(error)) from None
    atomic.write(target, atomic.seal(image))


def read_snapshot(target: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What `write_snapshot` wrote.

    Raises:
        CorruptPosteriorError: the file is damaged, or no checkpoint.
    """
    data = userblock.read(target)
    try:
        with hdf5.ImageReader(data) as reader:
            structure = reader.structure()
            state = json.loads(structure.state)
            if not isinstance(state, dict) or state.get("kind") != CHECKPOINT:  # pyright: ignore[reportUnknownMemberType]
                raise CorruptPosteriorError(f"'{target}' is no checkpoint of a fit; give another path.")
            groups: dict[str, dict[str, Tensor]] = {}
            order: dict[str, int] = {}
            for group, name in state["index"]:
                path = f"{CHECKPOINT}/{order.setdefault(group, len(order))}/{hdf5.link_name(name)}"
                groups.setdefault(group, {})[name] = torch.from_numpy(
                    reader.array(path, structure.datasets[path])
                )
    except (hdf5.FormatError, KeyError, TypeError, ValueError) as error:
        raise CorruptPosteriorError(f"'{target}' cannot be read as a checkpoint: {error}.") from None
    return state["description"], groups
