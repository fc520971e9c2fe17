"""The sparse information form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from posthoc_uq.core.errors import warn_user
from posthoc_uq.core.options import Share, Unit
from posthoc_uq.layers.layer import Layer
from posthoc_uq.methods.bases import (
    BasisChoice,
    Rank,
    basis_share,
    earlier_bases,
    kept_bases,
    kept_entries,
    sides,
    sparsify,
)
from posthoc_uq.methods.laplace import Basis, Curvature, squares_of
from posthoc_uq.methods.task import Task, Tensors
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.information import Correction
from posthoc_uq.posteriors.posterior import Posterior

_GRID_LIMIT = 2 * 2**30  # bytes that the small linear system of one layer may take


@dataclass(frozen=True, kw_only=True)
class INF(Curvature):
    """The sparse information form: low rank and diagonal.

    ``I ~ V_K Lambda_K V_K^T + omega D``: the directions of the largest eigenvalues in a Kronecker-factored eigenbasis,
    and a diagonal ``D`` that adds what they leave out, so that the diagonal of the Fisher stays exact (Lee, Humt, Feng,
    Triebel 2020, "Estimating model uncertainty of neural networks in sparse information form").

    Two sweeps, the first for the bases, the second for eigenvalues and diagonal; then a small linear system for every
    layer. The default: nearly as small as the diagonal, with the directions that matter.

    Attributes:
        rank: eigenvalues kept of a layer, or their share of its weights, in (0, 1).
        basis: how the bases are found: ``"exact"`` eigendecompositions, a streaming ``"sketch"``, or ``"auto"`` by
            size.
        basis_fraction: the share of the samples, in (0, 1], that the bases are computed from, picked by a hash of each
            input; ``"auto"`` takes about 5,000 of them, and all where there are fewer or the loader does not say how
            many. Eigenvalues and diagonal always come from all samples.
        bases: a posterior by ``"inf"`` or ``"efb"`` of the same layers, whose bases are taken as they are: of an
            earlier fit after a little more training, say. The fit then reads the data once.
        correction: of weights whose low-rank part exceeds the exact diagonal: ``"rescale"``, ``"clamp"`` or ``"none"``.
        residual_weight: omega, in [0, 1]; it can be set on the posterior, too.
    """

    name: ClassVar[str] = "inf"
    block_kinds: ClassVar[tuple[str, ...]] = ("inf",)
    tunable: ClassVar[frozenset[str]] = Curvature.tunable | {"residual_weight"}
    description: ClassVar[str] = "eigenvalues and diagonal"

    rank: Rank = 100
    basis: BasisChoice = "auto"
    basis_fraction: Share | Literal["auto"] = "auto"
    bases: Posterior | None = None
    correction: Correction = "rescale"
    residual_weight: Unit = 1.0

    def passes(self) -> int:
        return 2 if self.bases is None else 1

    def described(self) -> dict[str, Any]:
        lines = {"rank": self.rank, "basis": self.basis, "correction": self.correction}
        if self.bases is not None:
            return lines | {"bases": f"of a posterior fitted with method={self.bases.method!r}"}
        return lines | ({} if self.basis_fraction in ("auto", 1) else {"basis fraction": self.basis_fraction})

    def fit(self, task: Task) -> Posterior:
        share = basis_share(self.basis_fraction, task.samples_in_all)
        posterior = Curvature.fit(replace(self, basis_fraction=share), task)
        posterior.residual_weight = self.residual_weight
        return posterior

    def find_bases(self, task: Task) -> dict[str, Basis]:
        """Of an earlier posterior, or found in one sweep."""
        if self.bases is not None:
            return earlier_bases(self.bases, task)
        sides_of = {
            name: sides(index, layer, task, self.rank, self.basis)
            for index, (name, layer) in enumerate(task.layers.items())
        }
        accumulators = {name: [side.accumulator for side in pair] for name, pair in sides_of.items()}
        share = basis_share(self.basis_fraction, task.samples_in_all)
        samples = task.sweep(accumulators, "bases", share=share)
        del accumulators

        def basis(name: str) -> dict[str, Tensor]:
            inputs, outputs = sides_of.pop(name)
            return {"inputs": inputs.basis(samples), "outputs": outputs.basis(samples)}

        found = task.divided({name: partial(basis, name) for name in task.layers}, "eigenbases")
        return {name: (directions["inputs"], directions["outputs"]) for name, directions in found.items()}

    def accumulators(self, layer: Layer, task: Task, basis: Basis | None) -> Sequence[Any]:
        return [squares_of(layer, task, basis)]

    def block(self, layer: Layer, sums: Sequence[Any], samples: float, basis: Basis | None) -> Block:
        """The rank is halved until the layer's small linear system fits into memory."""
        assert basis is not None
        eigenvalues, diagonal = sums[0].eigenvalues(samples), sums[0].diagonal(samples)
        rank = kept_entries(self.rank, (diagonal.shape[0], diagonal.shape[1], diagonal.shape[2]))
        wanted = rank
        while True:
            block = sparsify(*basis, eigenvalues, diagonal, rank, self.correction)
            groups, width_g, width_a = block.eigenvalues.shape
            if 8 * groups * (width_g * width_a) ** 2 <= _GRID_LIMIT:
                break
            rank = rank // 2
        if rank < wanted:
            warn_user(
                f"Layer '{layer.name}': rank {wanted} selects a grid whose small system would take more than "
                f"{_GRID_LIMIT / 2**30:.0f} GiB; rank {rank} is kept instead. Fit with a smaller rank."
            )
        return block

    def added(self, posterior: Posterior, task: Task) -> Tensors:
        sums, samples = self.sweep(task, kept_bases(posterior, task))
        return {
            name: {"eigenvalues": squares.eigenvalues(samples), "diagonal": squares.diagonal(samples)}
            for name, (squares,) in sums.items()
        }
