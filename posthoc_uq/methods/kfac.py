"""Kronecker factors of the Fisher."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.stages import Stages, StageSpec, StageTensor
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.curvature import Curvature, grams_of
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.kronecker import KroneckerBlock
from posthoc_uq.posteriors.numerics import eigh_descending


@dataclass(frozen=True, kw_only=True)
class KFAC(Curvature):
    """Kronecker factors of every layer.

    ``I ~ E[a a^T] (x) E[g g^T]`` of inputs ``a`` and output gradients ``g``
    (Martens, Grosse 2015, "Optimizing neural networks with Kronecker-factored approximate curvature"; as a posterior:
    Ritter, Botev, Barber 2018, "A scalable Laplace approximation for neural networks").

    One sweep; keeps the eigenvectors and eigenvalues of both factors of every layer. The most common choice elsewhere,
    so the one to take for a comparison.
    """

    name: ClassVar[str] = "kfac"
    block_kinds: ClassVar[tuple[str, ...]] = ("kfac",)
    stages: ClassVar[Stages] = {
        "Kronecker factors": StageSpec(
            {
                "input_basis": StageTensor("Gnn", orthonormal=True),
                "output_basis": StageTensor("Gmm", orthonormal=True),
                "input_values": StageTensor("Gn", non_negative=True),
                "output_values": StageTensor("Gm", non_negative=True),
            }
        ),
    }

    def passes(self) -> int:
        return 1

    def blocks(self, task: Task) -> dict[str, Block]:
        return {name: KroneckerBlock(**factors) for name, factors in kronecker_factors(task).items()}


def kronecker_factors(task: Task) -> Tensors:
    """Eigenvectors and eigenvalues of both Grams, in one sweep."""

    def work() -> Tensors:
        grams = {name: grams_of(layer, task) for name, layer in task.layers.items()}
        samples = task.sweep({name: list(pair) for name, pair in grams.items()}, "Kronecker factors")

        def decompose(name: str) -> dict[str, Tensor]:
            inputs, outputs = grams.pop(name)
            input_values, input_basis = eigh_descending(inputs.mean(samples))
            output_values, output_basis = eigh_descending(outputs.mean(samples))
            return {
                "input_basis": input_basis,
                "output_basis": output_basis,
                "input_values": input_values,
                "output_values": output_values,
            }

        return task.divided({name: partial(decompose, name) for name in task.layers}, "eigenbases")

    return task.stage("Kronecker factors", work)
