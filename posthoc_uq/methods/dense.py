"""The full Fisher as one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posthoc_uq.curvature.statistics import JointFisher
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.stages import Stages, StageSpec, StageTensor
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.curvature import Curvature
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.dense import LARGEST_BYTES, DenseBlock

_JOINT = "joint"  # name of the block of all layers


@dataclass(frozen=True, kw_only=True)
class Dense(Curvature):
    """The full Fisher of all chosen weights together.

    ``I = E[g g^T]``, with nothing left out (MacKay 1992).

    One sweep, and a number for every pair of weights: for small models and last layers, and as a reference for other
    methods.
    """

    name: ClassVar[str] = "full"
    joint: ClassVar[bool] = True
    block_kinds: ClassVar[tuple[str, ...]] = ("dense",)
    stages: ClassVar[Stages] = {
        "Fisher": StageSpec({"fisher": StageTensor("NN", symmetric=True, wide=True)}, owner=_JOINT),
    }

    def passes(self) -> int:
        return 1

    def members(self, task: Task) -> dict[str, list[str]]:
        return {_JOINT: list(task.layers)}

    def blocks(self, task: Task) -> dict[str, Block]:
        parameters = sum(layer.parameters for layer in task.layers.values())
        if 8 * parameters**2 > LARGEST_BYTES:
            raise PosthocUQError(
                f"method='full' needs a dense {parameters} x {parameters} matrix "
                f"({8 * parameters**2 / 2**30:.0f} GiB); use method='inf', or layers='last'."
            )

        return {_JOINT: DenseBlock(_fisher(task)[_JOINT]["fisher"])}

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        return _fisher(task)


def _fisher(task: Task) -> Tensors:
    """The Fisher of all layers together, in one sweep."""
    parameters = sum(layer.parameters for layer in task.layers.values())

    def work() -> Tensors:
        joint = JointFisher(parameters, task.device)
        return {_JOINT: {"fisher": joint.mean(task.sweep({}, "Fisher", joint=joint))}}

    return task.stage("Fisher", work)
