"""Spectral sparsification (Lee et al. 2020, algorithm 1): keep the directions of the largest eigenvalues, as
a grid.
"""

from __future__ import annotations

from math import ceil, prod

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.posteriors.information import Correction, InformationBlock
from posthoc_uq.values import Number

_RANK = Number("a positive integer or a share in (0, 1)", above=0)


def checked_rank(rank: int | float) -> int | float:
    """A rank as a plain number: an int, or a share.

    Raises:
        PosthocUQError: it is neither a positive whole number nor a share.
    """
    number: float = _RANK("rank", rank)
    if number < 1:
        return number
    if not number.is_integer():
        raise PosthocUQError(f"rank must be {_RANK.text}, not {rank}.")
    return int(number)


def kept_entries(rank: int | float, shape: tuple[int, int, int]) -> int:
    """How many eigenvalues of a layer ``(groups, outputs, inputs)`` a rank keeps; a number in (0, 1) is a share of the
    layer's weights.

    Raises:
        PosthocUQError: the rank is neither a positive whole number nor a share.
    """
    size, number = prod(shape), checked_rank(rank)
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
