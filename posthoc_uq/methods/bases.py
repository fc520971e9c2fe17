"""The basis of each side of a layer, and algorithm 1 of the INF paper."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.numerics import eigh_descending, nystrom
from posthoc_uq.core.options import Count, check_option
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.curvature.statistics import GradientGram, InputGram, RangeSketch
from posthoc_uq.layers.layer import Layer
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.information import Correction, InformationBlock
from posthoc_uq.posteriors.posterior import Posterior

# Spectral sparsification (Lee et al. 2020, algorithm 1): keep the directions of the largest eigenvalues, as
# a grid.

Rank = Count | Annotated[float, Gt(0), Lt(1)]
"""Eigenvalues that are kept of a layer: their number, or a share of the layer's weights."""


def kept_entries(rank: int | float, shape: tuple[int, int, int]) -> int:
    """How many eigenvalues of a layer ``(groups, outputs, inputs)`` a rank keeps; a number in (0, 1) is a share of the
    layer's weights.

    Raises:
        PosthocUQError: the rank is neither a positive whole number nor a share.
    """
    size, number = prod(shape), check_option("rank", rank, Rank)
    return max(1, ceil(number * size)) if number < 1 else min(int(number), size)


def sparsify(
    input_basis: Tensor,
    output_basis: Tensor,
    eigenvalues: Tensor,
    diagonal: Tensor,
    rank: int | float,
    correction: Correction = "rescale",
) -> InformationBlock:
    """The information form of the largest eigenvalues of a Kronecker-factored eigenbasis and an exact diagonal.

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
    grid = eigenvalues.gather(1, index_g.unsqueeze(2).expand(-1, -1, eigenvalues.shape[2]))
    grid = grid.gather(2, index_a.unsqueeze(1).expand(-1, grid.shape[1], -1))
    return InformationBlock(
        input_basis=_columns(input_basis, index_a) * mask_a.unsqueeze(1),
        output_basis=_columns(output_basis, index_g) * mask_g.unsqueeze(1),
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


def _columns(basis: Tensor, index: Tensor) -> Tensor:
    return basis.gather(2, index.unsqueeze(1).expand(-1, basis.shape[1], -1))


# The bases of INF: eigenvectors of the Grams, or of what a sketch shows of them.
#
# A side of a layer (its inputs, its outputs) of size ``n`` is described by its Gram, ``n x n``, or by a
# sketch, ``n x l``, with ``l`` = directions wanted + oversampling. Accumulating costs ``n^2`` and ``2 n l``
# multiply-adds a position, and finding the basis takes ``O(n^3)`` and ``O(n l^2)``; docs/methods/fit_cost.md
# has the measured crossover.

BasisChoice = Literal["auto", "exact", "sketch"]
OVERSAMPLING = 10  # directions beyond those wanted (Halko, Martinsson, Tropp 2011)
BASIS_SAMPLES = 5_000  # samples that the bases come from with basis_fraction="auto"; see docs/methods
SKETCH_FACTOR = 2.5  # with basis="auto", a side is sketched from this many times the sketch's width on


@dataclass
class Side:
    """One side of a layer, and the statistics that its basis is computed from."""

    accumulator: InputGram | GradientGram | RangeSketch

    def basis(self, samples: float) -> Tensor:
        """Orthonormal leading directions ``(groups, size, width)``."""
        mean = self.accumulator.mean(samples)
        if isinstance(self.accumulator, RangeSketch):
            return nystrom(mean, self.accumulator.test_matrix)[1]
        return eigh_descending(mean, self.accumulator.rows)[1]


def sides(index: int, layer: Layer, task: Task, rank: int | float, basis: str) -> tuple[Side, Side]:
    """The input side and the output side of a layer; whether each is exact or sketched depends on its size.

    Args:
        index: number of the layer, which seeds its sketches.
        layer: the layer.
        task: the fit.
        rank: how many eigenvalues to keep, or which share.
        basis: a `BasisChoice`.
    """
    groups, outputs, inputs = layer.matrix_shape
    wanted = kept_entries(rank, layer.matrix_shape) + OVERSAMPLING
    dtype, device, budget = task.settings.dtype, task.device, task.memory_budget

    def sketch(side: str, size: int, word: int) -> Side | None:
        width = min(size, wanted)
        if not sketched(size, width, basis):
            return None
        generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, index, word))
        test_matrix = torch.randn(groups, size, width, generator=generator, dtype=dtype, device="cpu").to(
            device
        )
        return Side(RangeSketch(side, test_matrix, budget))

    return (
        sketch("inputs", inputs, 0) or Side(InputGram(groups, inputs, dtype, device, budget)),
        sketch("outputs", outputs, 1) or Side(GradientGram(groups, outputs, dtype, device, budget)),
    )


def basis_share(fraction: float | Literal["auto"], samples: int | None) -> float:
    """The share of the samples that the bases are computed from.

    Args:
        fraction: the share that was asked for, or ``"auto"``.
        samples: in all processes; None where the loader does not say, and all are taken.
    """
    if fraction != "auto":
        return fraction
    return 1.0 if samples is None else min(1.0, BASIS_SAMPLES / max(1, samples))


def sketched(size: int, width: int, basis: str) -> bool:
    """Whether a side of this size is sketched at this width; never where the sketch is as wide as the Gram."""
    if basis == "auto":
        return size >= SKETCH_FACTOR * width
    return basis == "sketch" and width < size


def kept_bases(posterior: Posterior, task: Task) -> dict[str, tuple[Tensor, Tensor]]:
    """The bases of the inputs and of the outputs that the posterior keeps of every layer, for a sweep of the task."""
    device, dtype = task.device, task.settings.dtype
    kept = {name: block.tensors() for name, block in posterior.blocks.items()}
    return {
        name: (tensors["input_basis"].to(device, dtype), tensors["output_basis"].to(device, dtype))
        for name, tensors in kept.items()
    }


def earlier_bases(posterior: Posterior, task: Task) -> dict[str, tuple[Tensor, Tensor]]:
    """The bases of an earlier posterior for the layers of a task.

    Raises:
        PosthocUQError: it keeps none, or not of these layers.
    """
    way_out = "leave bases= out, and they are computed from the data."
    kept = posterior.blocks
    if not all({"input_basis", "output_basis"} <= set(block.tensors()) for block in kept.values()):
        raise PosthocUQError(
            f"bases= takes a posterior by 'inf' or 'efb', and one by {posterior.method!r} has no eigenbases; {way_out}"
        )
    for name, layer in task.layers.items():
        if name not in kept:
            raise PosthocUQError(f"The posterior in bases= has no layer '{name}'; {way_out}")
        if posterior.layers[name].matrix_shape != layer.matrix_shape:
            raise PosthocUQError(
                f"Layer '{name}' has weights of {tuple(layer.matrix_shape)} (groups, outputs, inputs), and "
                f"{tuple(posterior.layers[name].matrix_shape)} in the posterior in bases=; {way_out}"
            )
    found = kept_bases(posterior, task)
    return {name: found[name] for name in task.layers}
