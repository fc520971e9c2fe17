"""Products with a layer's activations, without forming the activations where that is expensive.

The activations are rows, the layer's inputs at each position: ``(samples, groups, positions, inputs)``. A linear
layer's input has this form already. A convolution's rows are its unfolded patches, ``prod(kernel)`` times as large as
its input; but products with patches are themselves convolutions, and so is the per-sample weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

# The C library maps a new block of memory larger than this page by page at every use; on a CPU that costs more than
# the arithmetic that fills it.
CPU_TEMPORARY = 16 * 2**20

COPIED = 4 * 2**20  # bytes up to which a copy stays in the cache


class Operand(Protocol):
    """Activations of one layer in one batch."""

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        ...

    @property
    def positions(self) -> int:
        """Positions of a sample."""
        ...

    def part(self, samples: slice | Tensor) -> Operand:
        """Some of the samples, by a slice or by their indices."""
        ...

    def rows(self) -> Tensor:
        """The activations themselves, ``(samples, groups, positions, inputs)``."""
        ...

    def project(self, basis: Tensor) -> Tensor:
        """``a^T U`` for ``U`` ``(groups, inputs, width)``: ``(samples, groups, positions, width)``."""
        ...

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        """``total += sum w a a^T``, ``(groups, inputs, inputs)``, with temporaries of at most `limit` bytes; with
        weights of the samples, ``(samples,)`` on the device, or 1.
        """
        ...

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        """``total += sum w a (a^T Omega)``, ``(groups, inputs, width)``."""
        ...

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        """Per-sample weight gradients ``sum_t g a^T``, ``(samples, groups, outputs, inputs)``, from output gradients
        ``(samples, groups, positions, outputs)``; temporaries beside them take at most `limit` bytes.
        """
        ...


def chunks(samples: int, numbers: int, element_size: int, limit: int) -> Iterator[slice]:
    """Slices of the samples, each of at most `limit` bytes at `numbers` numbers a sample, or of one sample."""
    step = max(1, min(samples, limit // max(1, numbers * element_size)))
    for start in range(0, samples, step):
        yield slice(start, min(samples, start + step))


def weighted(rows: Tensor, weights: Tensor | None, part: slice = slice(None)) -> Tensor:
    """Rows ``(samples, ...)`` times the weights of these samples, ``(samples,)``; as they are without weights."""
    if weights is None:
        return rows
    return rows * weights[part].to(rows).reshape(-1, *[1] * (rows.ndim - 1))


def temporary_limit(budget: int, device: torch.device) -> int:
    """Bytes that one temporary should take: `budget`, or on a CPU less, which is faster."""
    return min(budget, CPU_TEMPORARY) if device.type == "cpu" else budget


def add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += sum_{s,t} l r^T`` for rows ``(samples, groups, positions, size)``; total ``(groups, p, q)``."""
    groups, p, q = total.shape
    if groups > 1:
        total += torch.matmul(left.transpose(2, 3), right).sum(0)
    elif left.stride(3) == 1 and right.stride(3) == 1:
        total[0].addmm_(left.reshape(-1, p).T, right.reshape(-1, q))
    elif _copying_pays(left, p, q):
        total[0].addmm_(
            left[:, 0].permute(2, 0, 1).reshape(p, -1), right[:, 0].permute(2, 0, 1).reshape(q, -1).T
        )
    else:
        total[0].addbmm_(left[:, 0].transpose(1, 2), right[:, 0])


def _copying_pays(rows: Tensor, p: int, q: int) -> bool:
    """Whether to copy rows whose positions are the last dimension in memory, for one product over all samples.

    That pays if the copy stays in the cache, or if one product a sample would touch a large total too often.
    """
    samples, _, positions, _ = rows.shape
    copied = positions * (p + q)
    return samples * copied * rows.element_size() <= COPIED or 8 * copied < p * q


def positions_apart(rows: Tensor) -> Tensor:
    """Rows ``(samples, groups, positions, size)`` with every position as a sample,
    ``(samples * positions, groups, 1, size)``.
    """
    return rows.transpose(1, 2).flatten(0, 1).contiguous().unsqueeze(2)


class Rows:
    """Activations that have the form of rows already (linear layer, pointwise convolution), or output gradients."""

    def __init__(self, tensor: Tensor) -> None:
        self._rows = tensor

    @property
    def samples(self) -> int:
        return self._rows.shape[0]

    @property
    def positions(self) -> int:
        return self._rows.shape[2]

    def part(self, samples: slice | Tensor) -> Rows:
        return Rows(self._rows[samples])

    def rows(self) -> Tensor:
        return self._rows

    def project(self, basis: Tensor) -> Tensor:
        rows = self._rows
        if basis.shape[0] > 1:
            return torch.matmul(rows, basis)
        if rows.stride(3) == 1:
            samples, _, positions, size = rows.shape
            return (rows.reshape(-1, size) @ basis[0]).reshape(samples, 1, positions, -1)
        return torch.matmul(basis[0].T, rows[:, 0].transpose(1, 2)).transpose(1, 2).unsqueeze(1)

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        roots = None if weights is None else weights.sqrt()
        for part in chunks(self.samples, self._numbers(total), self._rows.element_size(), limit):
            rows = weighted(self._rows[part], roots, part)
            add_products(total, rows, rows)

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        width = test_matrix.shape[-1] * self.positions * test_matrix.shape[0]
        numbers = max(width, self._numbers(total))
        for part in chunks(self.samples, numbers, self._rows.element_size(), limit):
            chunk = self.part(part)
            add_products(total, chunk.rows(), weighted(chunk.project(test_matrix), weights, part))

    def _numbers(self, total: Tensor) -> int:
        """The most numbers a sample that `add_products` allocates."""
        return total.numel() if total.shape[0] > 1 else self._rows[0].numel()

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        return torch.matmul(output_gradients.transpose(2, 3), self._rows)


class Several:
    """Activations of a layer used several times; each use adds positions, whose gradients add up within a sample."""

    def __init__(self, operands: list[Operand]) -> None:
        self._operands = operands

    @property
    def samples(self) -> int:
        return self._operands[0].samples

    @property
    def positions(self) -> int:
        return sum(operand.positions for operand in self._operands)

    def part(self, samples: slice | Tensor) -> Several:
        return Several([operand.part(samples) for operand in self._operands])

    def rows(self) -> Tensor:
        return torch.cat([operand.rows() for operand in self._operands], dim=2)

    def project(self, basis: Tensor) -> Tensor:
        return torch.cat([operand.project(basis) for operand in self._operands], dim=2)

    def add_gram(self, total: Tensor, limit: int, weights: Tensor | None = None) -> None:
        for operand in self._operands:
            operand.add_gram(total, limit, weights)

    def add_sketch(
        self, total: Tensor, test_matrix: Tensor, limit: int, weights: Tensor | None = None
    ) -> None:
        for operand in self._operands:
            operand.add_sketch(total, test_matrix, limit, weights)

    def gradients(self, output_gradients: Tensor, limit: int) -> Tensor:
        parts = output_gradients.split([operand.positions for operand in self._operands], dim=2)
        total = self._operands[0].gradients(parts[0], limit)
        for operand, part in zip(self._operands[1:], parts[1:], strict=True):
            total += operand.gradients(part, limit)
        return total
