"""The exact diagonal of the Fisher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.stages import Stages, StageSpec, StageTensor
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.curvature import Curvature, squares_of
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.diagonal import DiagonalBlock


@dataclass(frozen=True, kw_only=True)
class Diagonal(Curvature):
    """The diagonal of the Fisher: independent weights.

    ``I ~ diag(E[g^2])``, with ``g`` a sample's gradient of its negative log-likelihood.

    The smallest posterior, one number a weight, in one sweep. It ignores how weights compensate each other, so take it
    where memory decides and the last layer alone would be too little.
    """

    name: ClassVar[str] = "diag"
    block_kinds: ClassVar[tuple[str, ...]] = ("diagonal",)
    stages: ClassVar[Stages] = {
        "diagonal": StageSpec({"diagonal": StageTensor("Gmn", non_negative=True)}),
    }

    def passes(self) -> int:
        return 1

    def blocks(self, task: Task) -> dict[str, Block]:
        return {name: DiagonalBlock(means["diagonal"]) for name, means in _diagonals(task).items()}

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        return _diagonals(task)


def _diagonals(task: Task) -> Tensors:
    """The exact diagonal of every layer, in one sweep."""

    def work() -> Tensors:
        squares = {name: squares_of(layer, task) for name, layer in task.layers.items()}
        samples = task.sweep({name: [s] for name, s in squares.items()}, "diagonal")
        return {name: {"diagonal": s.diagonal(samples)} for name, s in squares.items()}

    return task.stage("diagonal", work)
