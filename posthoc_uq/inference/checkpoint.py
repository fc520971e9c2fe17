"""Resuming a fit: its sums so far and the results of its finished parts, in one file.

A fit is a sequence of *stages* (the noise variance; a sweep and what is computed from it). The file holds the exact
tensors of every finished stage, and the sums of the unfinished sweep. The batches in those sums are read again and
compared by their hashes, but not swept over. A method that trains keeps its state in the same file, in place of the
stages that it began from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.sweep import Summary
from posthoc_uq.distributed import rank, world
from posthoc_uq.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.inference.resumable import NOISE_STAGE, check_stage, check_summary
from posthoc_uq.inference.stages import Stages
from posthoc_uq.layers import Layer
from posthoc_uq.storage import atomic
from posthoc_uq.storage.schema import CHECKPOINT
from posthoc_uq.storage.sizes import size_limit
from posthoc_uq.storage.snapshot import read_snapshot, write_snapshot

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
