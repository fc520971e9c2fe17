"""Accumulators of the Fisher's statistics (Lee et al. 2020, section 2; George et al. 2018).

Each takes activations ``(samples, groups, positions, inputs)`` and output gradients ``(samples, groups,
positions, outputs)`` of one layer, batch by batch, and keeps sums; `mean` divides by what was counted. Sums
of two accumulators over two parts of the data `merge` into that over both. Squares are those of exact
per-sample gradients ``G_s = sum_t g_st a_st^T``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

DEFAULT_BUDGET = 256 * 2**20  # bytes that a temporary of an accumulator may take

# Writing, squaring and summing one number costs about as much as this many multiply-adds of a matrix product.
_TOUCH_COST = 8


class Accumulator(Protocol):
    """What a sweep feeds."""

    def add(self, activations: Tensor, gradients: Tensor, first_pass: bool) -> None:
        """Take one backward pass; several passes over one batch share their activations, and only one is the
        first.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """The sums, by name."""
        ...

    def merge(self, state: dict[str, Tensor]) -> None:
        """Add the sums of another accumulator of the same kind."""
        ...


class _Sums:
    """Sums kept as named tensors."""

    def __init__(self, sums: dict[str, Tensor]) -> None:
        self._sums = sums

    def state(self) -> dict[str, Tensor]:
        return self._sums

    def merge(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self._sums[name] += value.to(self._sums[name])


class InputGram(_Sums):
    """``A = 1/N sum_{s,t} a a^T``, ``(groups, inputs, inputs)``."""

    def __init__(self, groups: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({"gram": torch.zeros(groups, inputs, inputs, dtype=dtype, device=device)})

    def add(self, activations: Tensor, gradients: Tensor, first_pass: bool) -> None:
        if first_pass:
            _add_gram(self._sums["gram"], activations)

    def mean(self, samples: int) -> Tensor:
        """The Gram over `samples`."""
        return self._sums["gram"] / samples


class GradientGram(_Sums):
    """``G = 1/(N T) sum_{s,t} g g^T``, ``(groups, outputs, outputs)``, with T positions a sample."""

    def __init__(self, groups: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(
            {
                "gram": torch.zeros(groups, outputs, outputs, dtype=dtype, device=device),
                "positions": torch.zeros((), dtype=torch.float64),
            }
        )

    def add(self, activations: Tensor, gradients: Tensor, first_pass: bool) -> None:
        _add_gram(self._sums["gram"], gradients)
        if first_pass:
            self._sums["positions"] += gradients.shape[0] * gradients.shape[2]

    def mean(self) -> Tensor:
        """The Gram over all positions."""
        return self._sums["gram"] / self._sums["positions"].clamp(min=1).item()


class RangeSketch(_Sums):
    """``Y = sum a (a^T Omega)``, ``(groups, size, width)``: the range of a Gram that is never formed.

    `side` tells whether activations or output gradients are sketched. See Halko, Martinsson, Tropp 2011.
    """

    def __init__(self, side: str, test_matrix: Tensor) -> None:
        super().__init__(
            {"sketch": torch.zeros_like(test_matrix), "positions": torch.zeros((), dtype=torch.float64)}
        )
        self.test_matrix = test_matrix
        self._side = side

    def add(self, activations: Tensor, gradients: Tensor, first_pass: bool) -> None:
        if self._side == "inputs" and not first_pass:
            return
        rows = _by_group(activations if self._side == "inputs" else gradients)
        self._sums["sketch"] += rows.transpose(1, 2) @ (rows @ self.test_matrix)
        if first_pass:
            self._sums["positions"] += rows.shape[1]

    def mean(self, samples: int) -> Tensor:
        """The sketch of ``A`` (over samples) or of ``G`` (over positions)."""
        count = samples if self._side == "inputs" else max(1.0, self._sums["positions"].item())
        return self._sums["sketch"] / count


class SquaredGradients(_Sums):
    """``d_ij = 1/N sum_s (G_s)_ij^2``, ``(groups, outputs, inputs)``: the exact diagonal of the Fisher.

    With bases ``(groups, inputs, a)`` and ``(groups, outputs, g)`` the gradients are first rotated, ``U_G^T
    G_s U_A``, and the result ``(groups, g, a)`` is the eigenvalue matrix of the Kronecker-factored eigenbasis
    (Lambda).
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        bases: tuple[Tensor, Tensor] | None = None,
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        if bases is not None:
            shape = (shape[0], bases[1].shape[-1], bases[0].shape[-1])
        super().__init__({"squares": torch.zeros(shape, dtype=dtype, device=device)})
        self._bases = bases
        self._budget = budget

    def add(self, activations: Tensor, gradients: Tensor, first_pass: bool) -> None:
        if self._bases is not None:
            activations, gradients = activations @ self._bases[0], gradients @ self._bases[1]
        add_squares(self._sums["squares"], activations, gradients, self._budget)

    def mean(self, samples: int) -> Tensor:
        """The mean square over `samples`."""
        # Cancellation between pairs of positions can leave a rounding error below zero.
        return (self._sums["squares"] / samples).clamp(min=0)


def add_squares(total: Tensor, activations: Tensor, gradients: Tensor, budget: int) -> None:
    """Add ``sum_s (sum_t g_st a_st^T)^2`` to `total` ``(groups, outputs, inputs)`` by the cheapest route.

    With few positions the square is itself a matrix product, over pairs of positions ``t <= t'``; with many,
    the per-sample gradients are formed in chunks of at most `budget` bytes.
    """
    samples, _, positions, _ = activations.shape
    pairs = positions * (positions + 1) // 2
    if pairs <= positions + _TOUCH_COST:
        first, second = torch.triu_indices(positions, positions, device=activations.device)
        # Off-diagonal pairs occur twice.
        twice = torch.where(first == second, 1.0, 2.0).to(gradients).unsqueeze(1)
        pairs_a = activations[:, :, first] * activations[:, :, second]
        pairs_g = gradients[:, :, first] * gradients[:, :, second] * twice
        total += _by_group(pairs_g).transpose(1, 2) @ _by_group(pairs_a)
        return
    chunk = max(1, min(samples, budget // (2 * total.numel() * total.element_size())))
    for start in range(0, samples, chunk):
        part = slice(start, start + chunk)
        per_sample = gradients[part].transpose(2, 3) @ activations[part]
        total += per_sample.square_().sum(0)


class JointFisher(_Sums):
    """The dense Fisher over all parameters of several layers, ``(parameters, parameters)``; for small nets.

    Fed once per backward pass with the per-sample gradients of all layers side by side.
    """

    def __init__(self, parameters: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({"fisher": torch.zeros(parameters, parameters, dtype=dtype, device=device)})

    def add_rows(self, gradients: Tensor) -> None:
        """Take ``(samples, parameters)`` per-sample gradients."""
        self._sums["fisher"] += gradients.T @ gradients

    def mean(self, samples: int) -> Tensor:
        """The Fisher over `samples`."""
        return self._sums["fisher"] / samples


def _by_group(rows: Tensor) -> Tensor:
    """``(samples, groups, positions, size)`` as ``(groups, samples * positions, size)``."""
    if rows.shape[1] == 1:
        return rows.reshape(1, -1, rows.shape[-1])
    return rows.transpose(0, 1).reshape(rows.shape[1], -1, rows.shape[-1])


def _add_gram(gram: Tensor, rows: Tensor) -> None:
    grouped = _by_group(rows)
    gram.baddbmm_(grouped.transpose(1, 2), grouped)
