"""Sums of squares of per-sample gradients, by the cheapest of several routes.

``d_ij = sum_s (G_s)_ij^2`` is the diagonal of the Fisher, and ``Lambda = sum_s (U_g^T G_s U_a)^2`` (elementwise)
its diagonal in a Kronecker-factored basis (George et al. 2018). With ``G_s = sum_t g_st a_st^T`` there are three
routes:

* **pairs**: ``(sum_t g a^T)^2 = sum_{t,t'} (g_t o g_t') (a_t o a_t')^T``, a matrix product over the samples and the
  pairs ``t <= t'``, for few positions; with one position there are no pairs;
* **gradients**: form ``G_s``, a few samples at a time, and square it; for ``Lambda`` rotate it first;
* **rotated rows**: ``U_g^T G_s U_a = sum_t (U_g^T g) (U_a^T a)^T``, and either of the routes above with these rows.

The costs, in multiply-adds and numbers touched, are known beforehand, and the cheapest route is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, einsum, matmul, triu_indices, where

from posthoc_uq.curvature.operands import Operand, Rows, chunks, temporary_limit

# Writing, squaring and summing one number takes about as long as this many multiply-adds of a matrix product.
TOUCH_COST = 40


@dataclass(frozen=True)
class Shape:
    """The sizes that the cost depends on: a layer's groups, outputs, inputs, positions, and the widths of its bases."""

    groups: int
    outputs: int
    inputs: int
    positions: int
    width_g: int = 0
    width_a: int = 0

    @property
    def pairs(self) -> int:
        """Pairs of positions ``t <= t'``."""
        return self.positions * (self.positions + 1) // 2


class Plan(NamedTuple):
    """The route for one batch.

    Attributes:
        diagonal_by_pairs: the diagonal from pairs of positions; otherwise from the gradients.
        rotate_gradients: Lambda from rotated gradients; otherwise from rotated rows.
        cost: multiply-adds a sample.
    """

    diagonal_by_pairs: bool
    rotate_gradients: bool
    cost: float


def plan(shape: Shape, diagonal: bool, rotated: bool, fits: bool = True) -> Plan:
    """The cheapest route to the diagonal, Lambda, or both.

    Args:
        shape: of the layer.
        diagonal: whether the diagonal is wanted.
        rotated: whether Lambda is wanted.
        fits: whether one sample's gradient fits into memory at once, as rotating it needs.
    """
    m, n, t, g, a = shape.outputs, shape.inputs, shape.positions, shape.width_g, shape.width_a
    form = m * n * (t + TOUCH_COST)
    pairs = shape.pairs * m * n
    rows = t * (n * a + m * g) + min(shape.pairs * g * a, g * a * (t + TOUCH_COST))
    rotate = min(g * m * n + g * n * a, m * n * a + g * m * a) + TOUCH_COST * (min(g * n, m * a) + g * a)
    best: Plan | None = None
    for by_pairs in (True, False) if diagonal else (True,):
        for gradients in (True, False) if rotated and fits else (False,):
            needs_gradients = gradients or (diagonal and not by_pairs)
            cost = form * needs_gradients + pairs * (diagonal and by_pairs)
            cost += (rotate if gradients else rows) * rotated
            if best is None or cost < best.cost:
                best = Plan(by_pairs, gradients, cost)
    assert best is not None
    return best


def add_squares(
    activations: Operand,
    gradients: Tensor,
    budget: int,
    diagonal: Tensor | None,
    rotated: Tensor | None = None,
    bases: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add one batch to ``d`` and to ``Lambda``, to each that is not None.

    Args:
        activations: of the batch.
        gradients: at the outputs, ``(samples, groups, positions, outputs)``.
        budget: bytes that one temporary may take.
        diagonal: ``d``, ``(groups, outputs, inputs)``.
        rotated: ``Lambda``, ``(groups, g, a)``.
        bases: of the inputs ``(groups, inputs, a)`` and of the outputs ``(groups, outputs, g)``.
    """
    total = diagonal if diagonal is not None else rotated
    assert total is not None
    groups, outputs = gradients.shape[1], gradients.shape[3]
    inputs = total.shape[2] if bases is None else bases[0].shape[1]
    widths = (0, 0) if bases is None else (bases[1].shape[2], bases[0].shape[2])
    shape = Shape(groups, outputs, inputs, gradients.shape[2], *widths)
    item_size, limit = gradients.element_size(), temporary_limit(budget, gradients.device)
    fits = groups * outputs * inputs * item_size <= budget
    route = plan(shape, diagonal is not None, rotated is not None, fits)
    by_gradients = diagonal is not None and not route.diagonal_by_pairs
    if diagonal is not None and route.diagonal_by_pairs:
        numbers = groups * (shape.pairs + shape.positions) * (inputs + outputs)
        for part in chunks(activations.samples, numbers, item_size, limit):
            _add_pairs(diagonal, activations.part(part).rows(), gradients[part])
    if rotated is not None and bases is not None and not route.rotate_gradients:
        numbers = groups * (shape.positions + min(shape.pairs, TOUCH_COST)) * sum(widths)
        for part in chunks(activations.samples, numbers, item_size, limit):
            rows = activations.part(part).project(bases[0]), Rows(gradients[part]).project(bases[1])
            _add_rows(rotated, *rows, limit)
    if by_gradients or route.rotate_gradients:
        to_rotate = (rotated, bases) if route.rotate_gradients else (None, None)
        to_square = diagonal if by_gradients else None
        _add_gradients(activations, gradients, limit, inputs, fits, to_square, *to_rotate)


def _add_rows(total: Tensor, activations: Tensor, gradients: Tensor, limit: int) -> None:
    """Add ``(sum_t g a^T)^2`` of explicit rows."""
    samples, groups, positions, inputs = activations.shape
    shape = Shape(groups, gradients.shape[3], inputs, positions)
    if plan(shape, True, False).diagonal_by_pairs:
        _add_pairs(total, activations, gradients)
        return
    for part in chunks(samples, total.numel(), total.element_size(), limit):
        _add_squared(total, matmul(gradients[part].transpose(2, 3), activations[part]))


def _add_gradients(
    activations: Operand,
    gradients: Tensor,
    limit: int,
    inputs: int,
    fits: bool,
    diagonal: Tensor | None,
    rotated: Tensor | None,
    bases: tuple[Tensor, Tensor] | None,
) -> None:
    groups, outputs = gradients.shape[1], gradients.shape[3]
    item_size = gradients.element_size()
    # Where one sample's gradient does not fit into the budget, some of its rows at a time do.
    rows = outputs if fits else max(1, limit // (groups * inputs * item_size))
    for part in chunks(activations.samples, groups * rows * inputs, item_size, limit):
        operand = activations.part(part)
        for start in range(0, outputs, rows):
            block = slice(start, start + rows)
            per_sample = operand.gradients(gradients[part][..., block], limit)
            if rotated is not None and bases is not None:
                _add_squared(rotated, _rotate(per_sample, *bases))
            if diagonal is not None:
                _add_squared(diagonal[:, block], per_sample)


def _rotate(per_sample: Tensor, input_basis: Tensor, output_basis: Tensor) -> Tensor:
    """``U_g^T G_s U_a``, in the cheaper order."""
    (_, n, a), (_, m, g) = input_basis.shape, output_basis.shape
    if g * m * n + g * n * a < m * n * a + g * m * a:
        return matmul(matmul(output_basis.transpose(1, 2), per_sample), input_basis)
    return matmul(output_basis.transpose(1, 2), matmul(per_sample, input_basis))


def _add_squared(total: Tensor, per_sample: Tensor) -> None:
    """``total += sum_s G_s^2``; overwrites the gradients."""
    if per_sample.shape[0] == 1:
        total.addcmul_(per_sample[0], per_sample[0])
    else:
        total += per_sample.square_().sum(0)


def _add_pairs(total: Tensor, activations: Tensor, gradients: Tensor) -> None:
    """``total += sum_s sum_{t <= t'} w (g_t o g_t') (a_t o a_t')^T`` with ``w`` = 1 for ``t = t'`` and 2 otherwise."""
    positions = activations.shape[2]
    if positions == 1:
        pairs_a, pairs_g = activations.square(), gradients.square()
    else:
        first, second = triu_indices(positions, positions, device=activations.device)
        twice = where(first == second, 1.0, 2.0).to(gradients).unsqueeze(1)
        pairs_a = activations[:, :, first] * activations[:, :, second]
        pairs_g = gradients[:, :, first] * gradients[:, :, second] * twice
    if total.shape[0] == 1:
        total[0].addmm_(pairs_g.reshape(-1, total.shape[1]).T, pairs_a.reshape(-1, total.shape[2]))
    else:
        total += einsum("sgpo,sgpi->goi", pairs_g, pairs_a)
