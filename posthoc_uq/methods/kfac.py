"""Kronecker factors of the Fisher."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from posthoc_uq.curvature.statistics import GradientGram, InputGram
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.stages import Stages, StageSpec, StageTensor
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.base import Change
from posthoc_uq.methods.curvature import Curvature, grams_of
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.kronecker import KroneckerBlock
from posthoc_uq.posteriors.numerics import eigh_descending

_FACTORS, _WITH_GRAMS = "Kronecker factors", "Kronecker factors and Grams"
_OF_FACTORS = {
    "input_basis": StageTensor("Gnn", orthonormal=True),
    "output_basis": StageTensor("Gmm", orthonormal=True),
    "input_values": StageTensor("Gn", non_negative=True),
    "output_values": StageTensor("Gm", non_negative=True),
}


@dataclass(frozen=True, kw_only=True)
class KFAC(Curvature):
    """Kronecker factors of every layer.

    ``I ~ E[a a^T] (x) E[g g^T]`` of inputs ``a`` and output gradients ``g``
    (Martens, Grosse 2015, "Optimizing neural networks with Kronecker-factored approximate curvature"; as a posterior:
    Ritter, Botev, Barber 2018, "A scalable Laplace approximation for neural networks").

    One sweep; keeps the eigenvectors and eigenvalues of both factors of every layer. The most common choice elsewhere,
    so the one to take for a comparison.

    Attributes:
        keep_grams: keep both Grams of every layer as well, in the file too, so that data can come in and go out later
            (`posthoc_uq.update`, `posthoc_uq.forget`); it doubles the size.
    """

    name: ClassVar[str] = "kfac"
    block_kinds: ClassVar[tuple[str, ...]] = ("kfac",)
    stages: ClassVar[Stages] = {
        _FACTORS: StageSpec(_OF_FACTORS),
        _WITH_GRAMS: StageSpec(
            {
                **_OF_FACTORS,
                "input_gram": StageTensor("Gnn", symmetric=True),
                "output_gram": StageTensor("Gmm", symmetric=True),
                "positions": StageTensor("", non_negative=True),
            }
        ),
    }

    keep_grams: bool = False

    def passes(self) -> int:
        return 1

    def blocks(self, task: Task) -> dict[str, Block]:
        return {
            name: KroneckerBlock(
                **{part: factors[part] for part in _OF_FACTORS}, grams=factors if self.keep_grams else None
            )
            for name, factors in kronecker_factors(task, self.keep_grams).items()
        }

    def check_change(self, posterior: Posterior, change: Change) -> None:
        super().check_change(posterior, change)
        if any(
            isinstance(block, KroneckerBlock) and block.grams is None for block in posterior.blocks.values()
        ):
            raise PosthocUQError(
                "This posterior keeps the eigenvectors of its Grams alone, so that data cannot come in or go out; fit "
                "with uq.KFAC(keep_grams=True), or by another method."
            )

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        grams = {name: grams_of(layer, task) for name, layer in task.layers.items()}
        samples = task.sweep({name: list(pair) for name, pair in grams.items()}, _FACTORS)
        return {name: _means(*pair, samples) for name, pair in grams.items()}


def _means(inputs: InputGram, outputs: GradientGram, samples: float) -> dict[str, Tensor]:
    """Both Grams of a layer, and how many positions a sample has."""
    grams = {"input_gram": inputs.mean(samples), "output_gram": outputs.mean(samples)}
    return {**grams, "positions": outputs.positions(samples).to(grams["input_gram"])}


def kronecker_factors(task: Task, keep_grams: bool = False) -> Tensors:
    """Eigenvectors and eigenvalues of both Grams, in one sweep; the Grams as well if they are to be kept."""

    def work() -> Tensors:
        grams = {name: grams_of(layer, task) for name, layer in task.layers.items()}
        samples = task.sweep({name: list(pair) for name, pair in grams.items()}, _FACTORS)

        def decompose(name: str) -> dict[str, Tensor]:
            inputs, outputs = grams.pop(name)
            means = _means(inputs, outputs, samples)
            input_values, input_basis = eigh_descending(means["input_gram"], inputs.rows)
            output_values, output_basis = eigh_descending(means["output_gram"], outputs.rows)
            return {
                **(means if keep_grams else {}),
                "input_basis": input_basis,
                "output_basis": output_basis,
                "input_values": input_values,
                "output_values": output_values,
            }

        return task.divided({name: partial(decompose, name) for name in task.layers}, "eigenbases")

    return task.stage(_WITH_GRAMS if keep_grams else _FACTORS, work)
