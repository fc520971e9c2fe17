"""The covariance of a layer's outputs by its own weights, in closed form, for layers of one group with one input row a
sample.

An output needs the covariance of one row of weights, a pair of outputs that of two rows; there is no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from posthoc_uq.curvature.operands import chunks
from posthoc_uq.devices import as_double
from posthoc_uq.heads.cancellation import LEAST_SHARE, Contracted, precise_values
from posthoc_uq.heads.layer_covariance import LayerCovariance
from posthoc_uq.heads.products import gram

_CACHED = (
    2**20
)  # bytes of the products of many rows that are computed at once: they stay in a processor's cache


def variance(layer: LayerCovariance, activations: Tensor) -> Tensor:
    """Variance of the layer's outputs, ``(samples, m)``, for activations ``(samples, n)``."""

    def work(part: slice, double: bool) -> Contracted:
        rows = activations[part]
        if layer.bases is not None:
            squares = (rows @ layer.bases[0][0]).square() @ layer.narrow_weights[0].T
            variances = as_double(squares @ layer.bases[1][0].square().T)
            return Contracted(variances, variances)
        rows = as_double(rows) if double else rows
        weights, shrunk = layer.weight_rows(slice(None), double)
        diagonal = as_double(rows.square() @ weights[0].T)
        if layer.low_rank is None:
            return Contracted(diagonal, diagonal)
        directions = as_double(layer.directions(rows[:, None, None], shrunk)[:, 0, 0])  # (samples, a, m)
        reduction = torch.matmul(as_double(layer.row_roots)[0].to(directions), directions.permute(2, 1, 0))
        return Contracted(diagonal - reduction.square().sum(1).T, diagonal)

    return precise_values([layer.checked(work, activations.shape[0], "variance")])[0]


def variance_of_many(layer: LayerCovariance, activations: Tensor) -> Tensor:
    """`variance` of many rows: what it takes is formed once, and the rows pass a few at a time.

    What is left of less than a hundredth of the diagonal's part is computed again by triangular roots, in which nothing
    cancels; these are taken at once where they cost less.
    """
    columns = activations.T
    if layer.low_rank is not None and 2 * layer.low_rank.roots.shape[-1] > columns.shape[0]:
        return _by_roots(layer, columns).T
    result = columns.new_empty(layer.weights.shape[1], columns.shape[1])
    short = torch.zeros_like(result[0], dtype=torch.bool)
    subtracted = None if layer.low_rank is None else layer.subtracted_rows
    for part in _parts(layer, columns, columns.shape[0] if subtracted is None else len(subtracted)):
        chunk, own = columns[:, part], result[:, part]
        squares = chunk.square() if layer.bases is None else (layer.bases[0][0].T @ chunk).square_()
        torch.mm(layer.square_weights, squares, out=own)
        if subtracted is not None:
            least = LEAST_SHARE * own
            own -= _sums_of_squares(subtracted @ chunk, len(own))
            short[part] = (own < least).any(0)
    again = short.nonzero().flatten() if layer.cancels else ()
    if len(again):
        result[:, again] = _by_roots(layer, columns[:, again])
    return result.T


def _by_roots(layer: LayerCovariance, columns: Tensor) -> Tensor:
    """Variances ``(m, rows)`` as sums of squares, for activations ``(n, rows)``."""
    result = columns.new_zeros(layer.weights.shape[1], columns.shape[1])
    for part in _parts(layer, columns, len(layer.variance_roots[0])):
        for block in layer.variance_roots:
            inside = block @ columns[-block.shape[1] :, part]
            result[:, part] += _sums_of_squares(inside, len(result))
    return result


def _sums_of_squares(products: Tensor, outputs: int) -> Tensor:
    """Sums of squares ``(m, rows)`` of products ``(m k, rows)``, which are overwritten."""
    return products.square_().reshape(outputs, -1, products.shape[1]).sum(1)


def _parts(layer: LayerCovariance, columns: Tensor, numbers: int) -> Iterator[slice]:
    """Slices of the columns, with so many numbers for each."""
    limit = min(layer.limit, _CACHED) if columns.device.type == "cpu" else layer.limit
    return chunks(columns.shape[1], numbers, columns.element_size(), limit)


def product(layer: LayerCovariance, activations: Tensor) -> Callable[[Tensor], Tensor]:
    """Multiplication of ``(samples, m, k)`` by the covariance of the layer's outputs, for activations ``(samples, n)``.
    No ``(m, m)`` matrix is formed.
    """
    if layer.bases is not None:
        input_basis, output_basis = (basis[0] for basis in layer.bases)
        rotated_variance = ((activations @ input_basis).square() @ layer.narrow_weights[0].T).unsqueeze(-1)
        return lambda x: output_basis @ (rotated_variance * (output_basis.T @ x))
    weights, shrunk = layer.weight_rows(slice(None), False)
    diagonal = (activations.square() @ weights[0].T).unsqueeze(-1)
    if layer.low_rank is None:
        return lambda x: diagonal * x
    directions = layer.directions(activations[:, None, None], shrunk)[:, 0, 0]  # (samples, a, m)
    basis = layer.low_rank_bases[1][0].to(directions)

    def multiply(x: Tensor) -> Tensor:
        columns = x.transpose(1, 2).unsqueeze(2)  # (samples, k, 1, m)
        core = torch.matmul(columns * directions.unsqueeze(1), basis).transpose(2, 3)  # (samples, k, g, a)
        expanded = torch.matmul(basis, layer.solved(core).to(core))  # (samples, k, m, a)
        reduction = (expanded * directions.transpose(1, 2).unsqueeze(1)).sum(-1)
        return diagonal * x - reduction.transpose(1, 2)

    return multiply


def covariance(layer: LayerCovariance, activations: Tensor, joint: bool) -> Tensor:
    """Covariance of the layer's outputs ``(samples, m, m)``, or with `joint` ``(samples * m, samples * m)``, for
    activations ``(samples, n)``; in float64.
    """
    rows = as_double(activations)
    if layer.bases is not None:
        rows = rows @ as_double(layer.bases[0][0])
    weights, shrunk = layer.weight_rows(slice(None), True)
    samples, outputs = rows.shape[0], weights.shape[1]
    pairs = rows.unsqueeze(1) * rows if joint else rows.square()
    diagonal = pairs @ weights[0].T  # (samples, samples, m) or (samples, m)
    if layer.bases is not None:
        basis = as_double(layer.bases[1][0])
        result = (basis * diagonal.unsqueeze(-2)) @ basis.T
    else:
        result = torch.diag_embed(diagonal)
    if joint:
        result = result.transpose(1, 2).reshape(samples * outputs, samples * outputs)
    if layer.low_rank is None:
        return result
    directions = layer.directions(rows[:, None, None], shrunk)[:, 0, 0].transpose(1, 2)  # (samples, m, a)
    basis = layer.low_rank_bases[1][0].to(rows)
    cores = basis.unsqueeze(-1) * directions.unsqueeze(2)  # (samples, m, g, a)
    return result - gram(layer.reduced(cores.unsqueeze(1)), "joint" if joint else "covariance").to(result)
