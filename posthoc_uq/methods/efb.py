"""The eigenvalue-corrected Kronecker basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.inference.bases import kept_bases
from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.stages import Stages, StageSpec, StageTensor
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.curvature import Curvature, grams_of, squares_of
from posthoc_uq.methods.kfac import KFAC, kronecker_factors
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.kronecker import EigenvalueCorrectedBlock


@dataclass(frozen=True, kw_only=True)
class EFB(Curvature):
    """The eigenvectors of the Kronecker factors with corrected eigenvalues.

    ``I ~ (U_A (x) U_G) Lambda (U_A (x) U_G)^T``, with ``Lambda`` the second moments of the gradients in that basis
    (George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis").

    Two sweeps; nearer to the Fisher than `KFAC`, for one more number a weight.
    """

    name: ClassVar[str] = "efb"
    block_kinds: ClassVar[tuple[str, ...]] = ("efb",)
    stages: ClassVar[Stages] = {
        **KFAC.stages,
        "eigenvalues": StageSpec(
            {"eigenvalues": StageTensor("Gmn", non_negative=True)}, after="Kronecker factors"
        ),
    }

    def passes(self) -> int:
        return 2

    def blocks(self, task: Task) -> dict[str, Block]:
        factors = kronecker_factors(task)
        bases = {name: (sides["input_basis"], sides["output_basis"]) for name, sides in factors.items()}

        def work() -> Tensors:
            squares = {
                name: squares_of(layer, task, bases[name], diagonal=False)
                for name, layer in task.layers.items()
            }
            samples = task.sweep({name: [s] for name, s in squares.items()}, "eigenvalues")
            return {name: {"eigenvalues": s.eigenvalues(samples)} for name, s in squares.items()}

        moments = task.stage("eigenvalues", work)
        return {
            name: EigenvalueCorrectedBlock(*bases[name], tensors["eigenvalues"])
            for name, tensors in moments.items()
        }

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        bases = kept_bases(posterior, task)
        squares = {
            name: squares_of(layer, task, bases[name], diagonal=False) for name, layer in task.layers.items()
        }
        grams = {name: grams_of(layer, task) for name, layer in task.layers.items()}
        samples = task.sweep({name: [s, *grams[name]] for name, s in squares.items()}, "eigenvalues")
        return {
            name: {
                "eigenvalues": s.eigenvalues(samples),
                "inside": _on_diagonal(grams[name][0].mean(samples), bases[name][0])
                * _on_diagonal(grams[name][1].mean(samples), bases[name][1]),
            }
            for name, s in squares.items()
        }


def _on_diagonal(gram: Tensor, basis: Tensor) -> Tensor:
    """The share of a Gram's squared Frobenius norm that is on its diagonal in an orthonormal basis; a scalar."""
    wide = as_double(basis)
    rotated = wide.transpose(-1, -2) @ as_double(gram) @ wide
    whole = rotated.square().sum()
    inside = rotated.diagonal(dim1=-2, dim2=-1).square().sum()
    return (inside / whole.clamp(min=1e-300)).clamp(max=1) if bool(whole > 0) else whole + 1
