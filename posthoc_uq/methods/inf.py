"""`INF`: the sparse information form, low rank and diagonal (Lee et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.numerics import eigh_descending, nystrom
from posthoc_uq.core.options import Count, Share, Unit
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.curvature.statistics import GradientGram, InputGram, RangeSketch
from posthoc_uq.layers.layer import Layer
from posthoc_uq.methods.laplace import Basis, Laplace, kept_bases, squares_of
from posthoc_uq.methods.task import NothingPickedError, Task, Tensors, wrong_length
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.information import Correction, InformationBlock
from posthoc_uq.posteriors.posterior import Posterior

Rank = Count | Annotated[float, Gt(0), Lt(1)]
"""Eigenvalues that are kept of a layer: their number, or a share of the layer's weights."""

# The share of the samples that the bases come from with basis_fraction="auto", but at least and at most so many
# samples; see docs/methods/fit_cost.md.
BASIS_SHARE, FEWEST_BASIS_SAMPLES, MOST_BASIS_SAMPLES = 0.1, 300, 5_000
_OVERSAMPLING = 10  # directions of a sketch beyond those wanted (Halko, Martinsson, Tropp 2011)
_SKETCH_FACTOR = 2.5  # with basis="auto", a side is sketched from this many times the sketch's width on
_GRID_LIMIT = 2 * 2**30  # bytes that the small linear system of one layer may take

_Side = InputGram | GradientGram | RangeSketch


@dataclass(frozen=True, kw_only=True)
class INF(Laplace):
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
        basis_fraction: the share of the samples, in (0, 1], that the bases come from, picked by a hash of each input;
            ``"auto"`` is a tenth, at least 300 and at most 5,000 samples, and all where the loader does not know their
            number. Eigenvalues and diagonal come from all.
        bases: a posterior by ``"inf"`` or ``"efb"`` of the same layers, whose bases are taken as they are: of an
            earlier fit after a little more training, say. The fit then reads the data once.
        correction: of weights whose low-rank part exceeds the exact diagonal: ``"rescale"``, ``"clamp"`` or ``"none"``.
        residual_weight: omega, in [0, 1]; it can be set on the posterior, too.

    Example:
        ```python
        posterior = uq.fit(model, train_loader, uq.INF(rank=20))
        prediction = uq.wrap(model, posterior)(images)
        print(prediction.probs, prediction.epistemic_variance)
        ```
    """

    name: ClassVar[str] = "inf"
    block_kinds: ClassVar[tuple[str, ...]] = ("inf", "diagonal")
    tunable: ClassVar[frozenset[str]] = Laplace.tunable | {"residual_weight"}
    description: ClassVar[str] = "eigenvalues and diagonal"

    rank: Rank = 100
    basis: Literal["auto", "exact", "sketch"] = "auto"
    basis_fraction: Share | Literal["auto"] = "auto"
    bases: Posterior | None = None
    correction: Correction = "rescale"
    residual_weight: Unit = 1.0

    def passes(self) -> int:
        return 2 if self.bases is None else 1

    def describe_fit(self) -> dict[str, Any]:
        lines = {"rank": self.rank, "basis": self.basis, "correction": self.correction}
        if self.bases is not None:
            return lines | {"bases": f"of a posterior fitted with method={self.bases.method!r}"}
        return lines | ({} if self.basis_fraction in ("auto", 1) else {"basis fraction": self.basis_fraction})

    def fit(self, task: Task) -> Posterior:
        posterior = Laplace.fit(self, task)
        if self.basis_fraction == "auto" and self.bases is None:
            share = basis_share(task.samples_in_all)
            posterior = posterior if share == 1 else posterior.noted(fit={"basis fraction": share})
        return posterior.at(replace(posterior.settings, residual_weight=self.residual_weight))

    def find_bases(self, task: Task) -> dict[str, Basis]:
        """Of an earlier posterior, or found in one sweep."""
        if self.bases is not None:
            return _earlier_bases(self.bases, task)
        factored, auto = task.factored, self.basis_fraction == "auto"
        claimed = task.samples_in_all
        share = basis_share(claimed) if auto else cast(float, self.basis_fraction)

        def sides() -> dict[str, list[_Side]]:
            return {n: self._sides(index, task) for index, n in enumerate(task.layers) if n in factored}

        sums, samples = sides(), 0.0
        try:
            samples = task.sweep(sums, "bases", share=share)
            seen = task.summary.seen
        except NothingPickedError as error:
            if not auto:
                raise
            seen = error.seen
        if claimed is not None and claimed > seen and task.length_was_wrong(seen):
            labels = task.fisher, task.n_samples
            task.samples_in_all = seen
            task.take_labels(self.fisher, self.n_samples, self.joint)
            right = basis_share(seen) if auto else share
            if right > share or labels != (task.fisher, task.n_samples):
                wrong_length(claimed, seen, "The bases were taken for fewer, and are taken again.")
                sums, share = sides(), right
                samples = task.sweep(sums, "bases, again", share=share)

        def basis(name: str) -> dict[str, Tensor]:
            inputs, outputs = sums.pop(name)
            return {"inputs": _directions(inputs, samples), "outputs": _directions(outputs, samples)}

        found = task.distribute({name: partial(basis, name) for name in factored}, "eigenbases")
        return {name: (directions["inputs"], directions["outputs"]) for name, directions in found.items()}

    def _sides(self, index: int, task: Task) -> list[_Side]:
        """What sums up the inputs and the output gradients of the layer of this number, which seeds its sketches.

        A side of size ``n`` is described by its Gram, ``n x n``, or by a sketch, ``n x l``, with ``l`` the directions
        wanted and some more. Summing costs ``n^2`` and ``2 n l`` multiply-adds a position, and finding the basis
        ``O(n^3)`` and ``O(n l^2)``; docs/methods/fit_cost.md has where they cross.
        """
        layer, plan = list(task.layers.values())[index], task.plan
        groups, outputs, inputs = layer.matrix_shape
        wanted = kept_entries(self.rank, layer.matrix_shape) + _OVERSAMPLING
        sides: list[_Side] = []
        for side, size, gram in (("inputs", inputs, InputGram), ("outputs", outputs, GradientGram)):
            width = min(size, wanted)
            if self.basis == "auto":
                sketched = size >= _SKETCH_FACTOR * width
            else:
                sketched = self.basis == "sketch" and width < size
            if sketched:
                generator = torch.Generator().manual_seed(mixed_seed(plan.seed, index, len(sides)))
                normals = torch.randn(
                    groups, size, width, generator=generator, dtype=plan.dtype, device="cpu"
                )
                sides.append(RangeSketch(side, normals.to(task.device), plan.memory_budget))
            else:
                sides.append(gram(groups, size, plan.dtype, task.device, plan.memory_budget))
        return sides

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
            name: {
                **({"eigenvalues": squares.eigenvalues(samples)} if name in task.factored else {}),
                "diagonal": squares.diagonal(samples),
            }
            for name, (squares,) in sums.items()
        }


def _directions(side: _Side, samples: float) -> Tensor:
    """Orthonormal leading directions of one side of a layer, ``(groups, size, width)``."""
    mean = side.mean(samples)
    return (
        nystrom(mean, side.test_matrix)[1]
        if isinstance(side, RangeSketch)
        else eigh_descending(mean, side.rows)[1]
    )


def basis_share(samples: int | None) -> float:
    """The share of so many samples that bases come from by default."""
    if not samples:
        return 1.0
    wanted = min(max(BASIS_SHARE * samples, FEWEST_BASIS_SAMPLES), MOST_BASIS_SAMPLES)
    return min(1.0, wanted / samples)


def _earlier_bases(posterior: Posterior, task: Task) -> dict[str, Basis]:
    """The bases of an earlier posterior for the layers of a task.

    Raises:
        PosthocUQError: it keeps none, or not of these layers.
    """
    way_out = "leave bases= out, and they are computed from the data."
    kept, factored = posterior.blocks, task.factored
    of_layers = [block for name, block in kept.items() if name in factored]
    if not all({"input_basis", "output_basis"} <= set(block.tensors()) for block in of_layers):
        raise PosthocUQError(
            f"bases= takes a posterior by 'inf' or 'efb', and one by {posterior.method!r} has no eigenbases; {way_out}"
        )
    for name, layer in factored.items():
        if name not in kept:
            raise PosthocUQError(f"The posterior in bases= has no layer '{name}'; {way_out}")
        if posterior.layers[name].matrix_shape != layer.matrix_shape:
            raise PosthocUQError(
                f"Layer '{name}' has weights of {tuple(layer.matrix_shape)} (groups, outputs, inputs), and "
                f"{tuple(posterior.layers[name].matrix_shape)} in the posterior in bases=; {way_out}"
            )
    found = kept_bases(posterior, task)
    return {name: found[name] for name in factored}


def kept_entries(rank: int | float, shape: tuple[int, int, int]) -> int:
    """How many eigenvalues of a layer ``(groups, outputs, inputs)`` a rank keeps; a number in (0, 1) is a share of the
    layer's weights.
    """
    size = prod(shape)
    return max(1, ceil(rank * size)) if rank < 1 else min(int(rank), size)


def sparsify(
    input_basis: Tensor,
    output_basis: Tensor,
    eigenvalues: Tensor,
    diagonal: Tensor,
    rank: int | float,
    correction: Correction = "rescale",
) -> InformationBlock:
    """The information form of the largest eigenvalues in a Kronecker-factored eigenbasis and an exact diagonal
    (algorithm 1 of the paper).

    Each of the ``K`` largest eigenvalues belongs to one input and one output direction. The full grid of these
    directions is kept, so that the eigenvectors stay a Kronecker product. A grouped convolution shares ``K`` between
    its groups, and groups that keep fewer directions are padded with zeros. Eigenvalues that are zero up to rounding
    do not count: their directions are arbitrary.

    Args:
        input_basis: ``(G, n, p)``, orthonormal columns.
        output_basis: ``(G, m, q)``, orthonormal columns.
        eigenvalues: ``Lambda`` in these bases, ``(G, q, p)``.
        diagonal: exact diagonal of the Fisher, ``(G, m, n)``.
        rank: ``K``, or a share in (0, 1) of the layer's weights.
        correction: what to do where the low-rank part exceeds the diagonal; see `InformationBlock`.
    """
    shape = (diagonal.shape[0], diagonal.shape[1], diagonal.shape[2])
    count = min(kept_entries(rank, shape), eigenvalues.numel())
    values, order = eigenvalues.flatten().topk(count)
    floor = torch.finfo(eigenvalues.dtype).eps * values[:1]
    selected = torch.zeros(eigenvalues.numel(), dtype=torch.bool, device=eigenvalues.device)
    selected[order[values > floor]] = True
    selected = selected.reshape(eigenvalues.shape)
    inputs, outputs = selected.any(dim=1), selected.any(dim=2)
    index_a, mask_a = _front(inputs)
    index_g, mask_g = _front(outputs)
    columns_a, columns_g = index_a.unsqueeze(1), index_g.unsqueeze(1)
    grid = torch.take_along_dim(eigenvalues, index_g.unsqueeze(2), 1)
    grid = torch.take_along_dim(grid, columns_a, 2)
    return InformationBlock(
        input_basis=torch.take_along_dim(input_basis, columns_a, 2) * mask_a.unsqueeze(1),
        output_basis=torch.take_along_dim(output_basis, columns_g, 2) * mask_g.unsqueeze(1),
        eigenvalues=(grid * mask_g.unsqueeze(2) * mask_a.unsqueeze(1)).contiguous(),
        diagonal=diagonal,
        correction=correction,
    )


def _front(selected: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of each group's selected columns, moved to the front in their order; and a mask that is False for
    padding.
    """
    width = int(selected.sum(dim=1).max())
    index = torch.argsort((~selected).to(torch.uint8), dim=1, stable=True)[:, :width]
    return index, selected.gather(1, index)
