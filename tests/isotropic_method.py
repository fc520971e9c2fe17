"""A method of fitting in a file of its own, as somebody who uses the package would write it; see `test_new_method`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import posthoc_uq as uq
from posthoc_uq.methods import Curvature
from posthoc_uq.methods.laplace import squares_of
from posthoc_uq.methods.resume import Stages, StageSpec, StageTensor
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.laplace import DiagonalBlock


@uq.register_method
@dataclass(frozen=True, kw_only=True)
class Isotropic(Curvature):
    """An isotropic Gaussian for every layer, fitted to the trace of the Fisher.

    ``I ~ share * tr(E[g g^T]) / size * 1``: one number a layer, in one sweep.

    Attributes:
        share: of the trace, positive.
    """

    name: ClassVar[str] = "isotropic"
    block_kinds: ClassVar[tuple[str, ...]] = ("diagonal",)
    stages: ClassVar[Stages] = {"trace": StageSpec({"mean": StageTensor("", non_negative=True)})}

    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share <= 0:
            raise uq.PosthocUQError(f"share must be positive, not {self.share}.")

    def passes(self) -> int:
        return 1

    def blocks(self, task: Task) -> dict[str, Block]:
        def work() -> dict[str, dict[str, torch.Tensor]]:
            squares = {name: squares_of(layer, task) for name, layer in task.layers.items()}
            samples = task.sweep({name: [own] for name, own in squares.items()}, "trace")
            return {
                name: {"mean": self.share * own.diagonal(samples).mean()} for name, own in squares.items()
            }

        means = {name: own["mean"] for name, own in task.stage("trace", work).items()}
        return {
            name: DiagonalBlock(mean.repeat(task.layers[name].matrix_shape)) for name, mean in means.items()
        }
