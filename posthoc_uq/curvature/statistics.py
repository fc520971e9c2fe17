"""Accumulators of what a sweep catches: Grams, sketches, squares of per-sample gradients (Lee et al. 2020, section 2).

``d_ij = sum_s (G_s)_ij^2`` is the diagonal of the Fisher, and ``Lambda = sum_s (U_g^T G_s U_a)^2`` (elementwise) its
diagonal in a Kronecker-factored basis (George et al. 2018). With ``G_s = sum_t g_st a_st^T`` there are three routes:

* **pairs**: ``(sum_t g a^T)^2 = sum_{t,t'} (g_t o g_t') (a_t o a_t')^T``, a matrix product over the samples and the
  pairs ``t <= t'``, for few positions; with one position there are no pairs;
* **gradients**: form ``G_s``, a few samples at a time, and square it; for ``Lambda`` rotate it first;
* **rotated rows**: ``U_g^T G_s U_a = sum_t (U_g^T g) (U_a^T a)^T``, and either of the routes above with these rows.

The costs, in multiply-adds and numbers touched, are known beforehand, and the cheapest route is taken.

A batch has gradients for every label that its Fisher takes. Those of several labels come side by side, so that what
depends on the activations alone is formed once for all of them, and narrow products become wide ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, einsum, matmul, triu_indices, where

from posthoc_uq.core.devices import widest_dtype
from posthoc_uq.core.numerics import all_finite
from posthoc_uq.layers.operands import (
    TOUCH_COST,
    IdentityRows,
    OneHotRows,
    Operand,
    Rows,
    add_products,
    chunks,
    temporary_limit,
)
from posthoc_uq.likelihoods.weights import SampleWeights


@dataclass(frozen=True)
class Shape:
    """The sizes that the cost depends on: a layer's groups, outputs, inputs, positions, the widths of its bases, and
    the labels that come together.
    """

    groups: int
    outputs: int
    inputs: int
    positions: int
    width_g: int = 0
    width_a: int = 0
    labels: int = 1

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
    labels = shape.labels
    form = labels * m * n * (t + TOUCH_COST)
    pairs = shape.pairs * (m * n + TOUCH_COST * (labels * m + n) * (t > 1))
    rows = t * (n * a + labels * m * g) + min(shape.pairs * g * a, labels * g * a * (t + TOUCH_COST))
    rotate = min(g * m * n + g * n * a, m * n * a + g * m * a) + TOUCH_COST * (min(g * n, m * a) + g * a)
    rotate *= labels
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
        gradients: at the outputs, of one label or of several side by side, ``(samples, groups, positions, labels *
            outputs)``.
        budget: bytes that one temporary may take.
        diagonal: ``d``, ``(groups, outputs, inputs)``.
        rotated: ``Lambda``, ``(groups, g, a)``.
        bases: of the inputs ``(groups, inputs, a)`` and of the outputs ``(groups, outputs, g)``.
    """
    total = diagonal if diagonal is not None else rotated
    assert total is not None
    outputs = total.shape[1] if bases is None else bases[1].shape[1]
    groups, labels = gradients.shape[1], gradients.shape[3] // outputs
    inputs = total.shape[2] if bases is None else bases[0].shape[1]
    widths = (0, 0) if bases is None else (bases[1].shape[2], bases[0].shape[2])
    item_size, limit = gradients.element_size(), temporary_limit(budget, gradients.device)
    if labels > 1 and labels * groups * outputs * inputs * item_size > limit:
        for part in gradients.split(outputs, 3):  # large gradients gain nothing together
            add_squares(activations, part, budget, diagonal, rotated, bases)
        return
    shape = Shape(groups, outputs, inputs, gradients.shape[2], *widths, labels)
    fits = groups * outputs * inputs * item_size <= budget
    route = plan(shape, diagonal is not None, rotated is not None, fits)
    by_gradients = diagonal is not None and not route.diagonal_by_pairs
    if diagonal is not None and route.diagonal_by_pairs:
        numbers = groups * (shape.pairs + shape.positions) * (inputs + labels * outputs)
        for part in chunks(activations.samples, numbers, item_size, limit):
            _add_pairs(diagonal, activations.part(part).rows(), gradients[part])
    if rotated is not None and bases is not None and not route.rotate_gradients:
        numbers = groups * (shape.positions + min(shape.pairs, TOUCH_COST)) * (widths[1] + labels * widths[0])
        for part in chunks(activations.samples, numbers, item_size, limit):
            own = gradients[part]
            turned = Rows(own).project(bases[1]) if labels == 1 else _project_labels(own, bases[1])
            _add_rows(rotated, activations.part(part).project(bases[0]), turned, limit)
    if by_gradients or route.rotate_gradients:
        to_rotate = (rotated, bases) if route.rotate_gradients else (None, None)
        to_square = diagonal if by_gradients else None
        _add_gradients(activations, gradients, limit, (outputs, inputs), fits, to_square, *to_rotate)


def _project_labels(gradients: Tensor, basis: Tensor) -> Tensor:
    """``g^T U`` for the gradients of each label: ``(samples, groups, positions, labels * width)``."""
    labels = gradients.shape[3] // basis.shape[1]
    rows = Rows(label_rows(gradients, basis.shape[1])).project(basis)
    return rows.unflatten(2, (-1, labels)).flatten(3)


def _samples_of_labels(per_sample: Tensor, labels: int) -> Tensor:
    """Gradients of samples ``(samples, groups, labels * m, n)``, as ``(samples * labels, groups, m, n)``."""
    return per_sample.unflatten(2, (labels, -1)).transpose(1, 2).flatten(0, 1)


def _add_rows(total: Tensor, activations: Tensor, gradients: Tensor, limit: int) -> None:
    """Add ``(sum_t g a^T)^2`` of explicit rows."""
    samples, groups, positions, inputs = activations.shape
    labels = gradients.shape[3] // total.shape[1]
    shape = Shape(groups, total.shape[1], inputs, positions, labels=labels)
    if plan(shape, True, False).diagonal_by_pairs:
        _add_pairs(total, activations, gradients)
        return
    for part in chunks(samples, labels * total.numel(), total.element_size(), limit):
        of_labels = matmul(gradients[part].transpose(2, 3), activations[part])
        _add_squared(total, of_labels if labels == 1 else _samples_of_labels(of_labels, labels))


def _add_gradients(
    activations: Operand,
    gradients: Tensor,
    limit: int,
    size: tuple[int, int],
    fits: bool,
    diagonal: Tensor | None,
    rotated: Tensor | None,
    bases: tuple[Tensor, Tensor] | None,
) -> None:
    (outputs, inputs), groups = size, gradients.shape[1]
    item_size, labels = gradients.element_size(), gradients.shape[3] // outputs
    # Where one sample's gradient does not fit into the budget, some of its rows at a time do.
    rows = outputs if fits else max(1, limit // (groups * inputs * item_size))
    for part in chunks(activations.samples, labels * groups * rows * inputs, item_size, limit):
        operand = activations.part(part)
        for start in range(0, outputs, rows):
            block = slice(start, start + rows)
            wanted = gradients[part]
            if rows < outputs:
                wanted = wanted[..., block]  # of the only label
            per_sample = operand.gradients(wanted, limit)
            per_sample = per_sample if labels == 1 else _samples_of_labels(per_sample, labels)
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
    """``total += sum_s sum_{t <= t'} w (g_t o g_t') (a_t o a_t')^T`` with ``w`` = 1 for ``t = t'`` and 2 otherwise,
    where the first products are summed over the labels.
    """
    positions, labels = activations.shape[2], gradients.shape[3] // total.shape[1]
    if positions == 1:
        pairs_a, pairs_g = activations.square(), gradients.square()
    else:
        first, second = triu_indices(positions, positions, device=activations.device)
        twice = where(first == second, 1.0, 2.0).to(gradients).unsqueeze(1)
        pairs_a = activations[:, :, first] * activations[:, :, second]
        pairs_g = gradients[:, :, first] * gradients[:, :, second] * twice
    if labels > 1:
        pairs_g = pairs_g.unflatten(3, (labels, -1)).sum(3)
    if total.shape[0] == 1:
        total[0].addmm_(pairs_g.reshape(-1, total.shape[1]).T, pairs_a.reshape(-1, total.shape[2]))
    else:
        total += einsum("sgpo,sgpi->goi", pairs_g, pairs_a)


def add_factors(
    activations: Operand, gradients: Tensor, limit: int, of_inputs: Tensor, of_outputs: Tensor
) -> None:
    """Add ``sum_s G_s^T G_s`` and ``sum_s G_s G_s^T`` of one batch to their totals.

    With ``G_s = sum_t g_t a_t^T`` they are products of the gradients themselves, or, with few positions,
    ``sum_{t,t'} (g_t . g_t') a_t a_t'^T`` and ``sum_{t,t'} (a_t . a_t') g_t g_t'^T``; the cheaper of the two.

    Args:
        activations: of the batch.
        gradients: at the outputs, as in `add_squares`.
        limit: bytes that one temporary may take.
        of_inputs: total ``(groups, inputs, inputs)``.
        of_outputs: total ``(groups, outputs, outputs)``.
    """
    if isinstance(activations, OneHotRows):
        for part in activations.parts_by_use():  # few rows of an embedding occur in a batch
            places, rows = activations.part(part).used()
            total = of_inputs.new_zeros(1, len(places), len(places))
            _add_factors(rows, gradients[part], limit, total, of_outputs)
            of_inputs[0, places.unsqueeze(1), places] += total[0]
        return
    _add_factors(activations, gradients, limit, of_inputs, of_outputs)


def _add_factors(
    activations: Operand, gradients: Tensor, limit: int, of_inputs: Tensor, of_outputs: Tensor
) -> None:
    (samples, groups, t, _), n, item_size = gradients.shape, of_inputs.shape[2], gradients.element_size()
    m = of_outputs.shape[2]
    labels = gradients.shape[3] // m
    by_gradients = labels * m * n * (t + TOUCH_COST + m + n)
    by_pairs = t * (labels * m * m + n * n) + 2 * t * t * (labels * m + n)
    by_pairs += TOUCH_COST * t * (2 * t + labels * m + 2 * n)
    if isinstance(activations, IdentityRows) or by_gradients < by_pairs:
        if labels > 1 and labels * groups * m * n * item_size > limit:
            for each in gradients.split(m, 3):  # large gradients gain nothing together
                _add_factors(activations, each, limit, of_inputs, of_outputs)
            return
        for part in chunks(samples, groups * labels * m * n, item_size, limit):
            per_sample = activations.part(part).gradients(gradients[part], limit)
            Rows(per_sample).add_gram(of_inputs, limit)
            of_labels = per_sample if labels == 1 else _samples_of_labels(per_sample, labels)
            Rows(of_labels.transpose(2, 3)).add_gram(of_outputs, limit)
        return
    products = (labels * m * m + n * n) * (groups > 1)
    for part in chunks(samples, groups * (2 * t * (labels * m + n + t) + products), item_size, limit):
        a, g = activations.part(part).rows(), gradients[part]
        add_products(of_inputs, a, matmul(matmul(g, g.transpose(2, 3)), a))
        others = matmul(matmul(a, a.transpose(2, 3)), g)
        add_products(of_outputs, label_rows(g, m), label_rows(others, m))


def label_rows(gradients: Tensor, outputs: int) -> Tensor:
    """Gradients of several labels side by side, ``(samples, groups, positions, labels * outputs)``, as rows of one:
    ``(samples, groups, positions * labels, outputs)``.
    """
    if gradients.shape[3] == outputs:
        return gradients
    return gradients.unflatten(3, (-1, outputs)).flatten(2, 3)


class Accumulator(ABC):
    """Sums over the batches of one layer's activations and output gradients, of one label or of several side by side:
    ``(samples, groups, positions, labels * outputs)``.

    Its mean divides the sums by the number of samples (the sum of their weights) or of positions. Where samples have
    weights, output gradients come multiplied by their square roots, so that every square counts w times; activations
    come as they are, and `SampleWeights` has how often they count.

    Args:
        sums: by name; those over two parts of the data can be added.
        budget: bytes that one temporary may take.
    """

    def __init__(self, sums: dict[str, Tensor], budget: int) -> None:
        self._sums, self._budget = sums, budget
        self._limit = temporary_limit(budget, next(iter(sums.values())).device)

    @abstractmethod
    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        """Take one backward pass, or those of several labels at once. Passes over the same batch have the same
        activations; `first_pass` marks the first of them. The gradients have the roots of the samples' `weights` in
        them already.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """The sums themselves, into which a fit that goes on after an interruption writes."""
        return self._sums


MAX_ASYMMETRY = 0.01
"""Of a matrix that should be symmetric and its transpose, as a share of the largest entry."""
_ROUNDING = 1e-3  # below zero, as a share of the largest: cancellation between pairs of positions
_SKETCH, _MATRICES = "sketch", ("gram", "input_gram", "output_gram", "fisher")


def fault_of_sums(sums: Mapping[str, Tensor]) -> str | None:
    """What is wrong, in words, with an accumulator's sums that somebody else may have written; None if they can be."""
    for name, total in sums.items():
        if not all_finite(total):
            return f"its {name} is not finite"
        if name == _SKETCH or not total.numel():
            continue
        largest = total.abs().max()
        squares = total.diagonal(dim1=-2, dim2=-1) if name in _MATRICES else total
        if bool(squares.min() < -_ROUNDING * largest):
            return f"its {name} is negative, where squares or numbers of samples are summed"
        if name in _MATRICES and bool((total - total.mT).abs().max() > MAX_ASYMMETRY * largest):
            return f"its {name} is not symmetric"
    return None


def _known(
    activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None
) -> tuple[Operand, bool, Tensor | None]:
    """What a sum over the inputs of a layer takes: its activations, whether this pass counts, and the samples' weights.

    Where gradients ``J`` are all that is known of a layer, its inputs are taken to be the rows of every J, so that
    ``sum a a^T`` is ``sum J^T J``, beside ``sum g g^T = sum J J^T`` (Gupta, Koren, Singer 2018). They come with the
    roots of the weights, and differ from pass to pass.
    """
    if isinstance(activations, IdentityRows):
        return Rows(gradients.transpose(2, 3)), True, None
    return activations, first_pass, None if weights is None else weights.samples.to(gradients)


class _Gram(Accumulator):
    """A Gram ``(groups, size, size)``, and the number of rows in it."""

    def __init__(self, groups: int, size: int, dtype: torch.dtype, device: torch.device, budget: int) -> None:
        gram = torch.zeros(groups, size, size, dtype=dtype, device=device)
        super().__init__({"gram": gram, "rows": _count()}, budget)

    @property
    def rows(self) -> int:
        """How many rows were added, which bounds the rank."""
        return int(self._sums["rows"])


class InputGram(_Gram):
    """``A = 1/N sum_{s,t} a a^T``, ``(groups, inputs, inputs)``."""

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        rows, counts, weight = _known(activations, gradients, first_pass, weights)
        if counts:
            rows.add_gram(self._sums["gram"], self._limit, weight)
            self._sums["rows"] += rows.samples * rows.positions

    def mean(self, samples: float) -> Tensor:
        """The Gram over `samples`."""
        return self._sums["gram"] / samples


class GradientGram(_Gram):
    """``G = 1/(N T) sum_{s,t} g g^T``, ``(groups, outputs, outputs)``, with T positions a sample."""

    def __init__(
        self, groups: int, outputs: int, dtype: torch.dtype, device: torch.device, budget: int
    ) -> None:
        super().__init__(groups, outputs, dtype, device, budget)
        self._sums["positions"] = _count()

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        size = self._sums["gram"].shape[1]
        rows = Rows(gradients if gradients.shape[3] == size else label_rows(gradients, size))
        rows.add_gram(self._sums["gram"], self._limit)
        self._sums["rows"] += rows.samples * rows.positions
        if first_pass:
            samples = len(gradients) if weights is None else weights.total
            self._sums["positions"] += samples * gradients.shape[2]

    def mean(self, samples: float) -> Tensor:
        """The Gram over all positions."""
        return self._sums["gram"] / (self._sums["positions"].item() or 1.0)

    def positions(self, samples: float) -> Tensor:
        """The mean number of positions of a sample, a float64 scalar on the CPU."""
        return self._sums["positions"] / samples


class GradientFactors(Accumulator):
    """``A = n sum G_s^T G_s / tr``, ``(groups, inputs, inputs)``, and ``G = 1/(N n) sum G_s G_s^T``,
    ``(groups, outputs, outputs)``, of the gradients ``G_s`` of whole samples, with n inputs and the trace ``tr`` of the
    first sum: the trace of ``A (x) G`` is that of the Fisher.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, budget: int
    ) -> None:
        groups, outputs, inputs = shape
        sizes = {"input_gram": inputs, "output_gram": outputs}
        sums = {
            side: torch.zeros(groups, size, size, dtype=dtype, device=device) for side, size in sizes.items()
        }
        super().__init__({**sums, "rank": _count()}, budget)

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        inputs, outputs = self._sums["input_gram"], self._sums["output_gram"]
        add_factors(activations, gradients, self._limit, inputs, outputs)
        size = outputs.shape[1]
        self._sums["rank"] += len(gradients) * min(gradients.shape[2], size) * (gradients.shape[3] // size)

    @property
    def rank(self) -> int:
        """A bound on the rank of both."""
        return int(self._sums["rank"])

    def means(self, samples: float) -> dict[str, Tensor]:
        """Both over `samples`, and n, by which the second was divided, as a float64 scalar on the CPU."""
        # a sum by pairs of positions is symmetric up to rounding
        inputs, outputs = (
            (each + each.transpose(1, 2)) / 2
            for each in (self._sums["input_gram"], self._sums["output_gram"])
        )
        size = inputs.shape[1]
        trace = inputs.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(inputs.dtype).tiny)
        return {
            "input_gram": inputs / trace[:, None, None] * size,
            "output_gram": outputs / (samples * size),
            "positions": torch.full((), size, dtype=torch.float64, device="cpu"),
        }


class RangeSketch(Accumulator):
    """``Y = sum a (a^T Omega)``, ``(groups, size, width)``: the range of a Gram that is never formed.

    `side` is what is sketched: ``"inputs"``, or ``"outputs"`` for output gradients. See Halko, Martinsson, Tropp 2011.
    """

    def __init__(self, side: str, test_matrix: Tensor, budget: int) -> None:
        super().__init__({"sketch": torch.zeros_like(test_matrix), "positions": _count()}, budget)
        self.test_matrix = test_matrix
        self._side = side

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        sums, limit = self._sums["sketch"], self._limit
        if self._side == "inputs":
            rows, counts, weight = _known(activations, gradients, first_pass, weights)
            if counts:
                rows.add_sketch(sums, self.test_matrix, limit, weight)
        else:
            Rows(label_rows(gradients, sums.shape[1])).add_sketch(sums, self.test_matrix, limit)
        if first_pass:
            samples = len(gradients) if weights is None else weights.total
            self._sums["positions"] += samples * gradients.shape[2]

    def mean(self, samples: float) -> Tensor:
        """The sketch of ``A`` (over samples) or of ``G`` (over positions)."""
        count = samples if self._side == "inputs" else self._sums["positions"].item() or 1.0
        return self._sums["sketch"] / count


class SketchedGradientGram(RangeSketch):
    """The leading eigenvectors of ``G`` of `GradientGram`, which is never formed, and its trace.

    Args:
        test_matrix: ``Omega``, ``(groups, outputs, width)``.
        budget: bytes that one temporary may take.
    """

    def __init__(self, test_matrix: Tensor, budget: int) -> None:
        super().__init__("outputs", test_matrix, budget)
        device = test_matrix.device
        self._sums["trace"] = torch.zeros(len(test_matrix), dtype=widest_dtype(device), device=device)

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        super().add(activations, gradients, first_pass, weights)
        self._sums["trace"] += gradients.square().sum((0, 2, 3)).to(self._sums["trace"])

    def trace(self, samples: float) -> Tensor:
        """Of the mean over all positions, ``(groups,)``."""
        return self._sums["trace"] / (self._sums["positions"].item() or 1.0)

    def positions(self, samples: float) -> Tensor:
        """See `GradientGram`."""
        return self._sums["positions"] / samples


class SketchedGradientFactors(Accumulator):
    """The Grams of `GradientFactors`, of which the second is never formed: its sketch ``Y = sum G_s (G_s^T Omega)`` and
    its trace.

    Args:
        inputs: size of the first Gram.
        test_matrix: ``Omega``, ``(groups, outputs, width)``.
        budget: bytes that one temporary may take.
    """

    def __init__(self, inputs: int, test_matrix: Tensor, budget: int) -> None:
        groups, self.test_matrix = len(test_matrix), test_matrix
        sums = {
            "sketch": torch.zeros_like(test_matrix),
            "input_gram": test_matrix.new_zeros(groups, inputs, inputs),
            "rank": _count(),
        }
        super().__init__(sums, budget)

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        (samples, groups, positions, numbers), outputs = gradients.shape, self.test_matrix.shape[1]
        self._sums["rank"] += samples * min(positions, outputs) * (numbers // outputs)
        numbers = groups * 2 * positions * (positions + numbers + self._sums["input_gram"].shape[1])
        for part in chunks(samples, numbers, gradients.element_size(), self._limit):
            a, g = activations.part(part).rows(), gradients[part]
            of_inputs, of_outputs = matmul(a, a.transpose(2, 3)), matmul(g, g.transpose(2, 3))
            add_products(self._sums["input_gram"], a, matmul(of_outputs, a))
            sketched = matmul(of_inputs, _project_labels(g, self.test_matrix))
            width = self.test_matrix.shape[2]
            add_products(self._sums["sketch"], label_rows(g, outputs), label_rows(sketched, width))

    @property
    def rank(self) -> int:
        """A bound on the rank of both."""
        return int(self._sums["rank"])

    def means(self, samples: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `GradientFactors`: the first Gram, the sketch of the second, and its trace, ``(groups,)``."""
        inputs = (self._sums["input_gram"] + self._sums["input_gram"].transpose(1, 2)) / 2
        size, trace = inputs.shape[1], inputs.diagonal(dim1=1, dim2=2).sum(1)
        unit = trace.clamp(min=torch.finfo(inputs.dtype).tiny)[:, None, None]
        share = 1 / (samples * size)
        return inputs / unit * size, self._sums["sketch"] * share, trace * share


class RotatedColumns(Accumulator):
    """``sum_s |G_s u_j|^2`` for the columns of a basis of the inputs, ``(groups, inputs)``: the second moments of
    `SquaredGradients` in that basis, summed over any basis of the outputs.

    Args:
        basis: ``(groups, inputs, inputs)``.
        budget: bytes that one temporary may take.
    """

    def __init__(self, basis: Tensor, budget: int) -> None:
        super().__init__({"columns": torch.zeros_like(basis[:, 0])}, budget)
        self._basis = basis

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        samples, groups, positions, _ = gradients.shape
        numbers = groups * positions * (positions + 2 * self._basis.shape[1])
        for part in chunks(samples, numbers, gradients.element_size(), self._limit):
            rows, own = activations.part(part).project(self._basis), gradients[part]
            if positions == 1:
                found = rows.square() * own.square().sum(3, keepdim=True)
            else:
                found = rows * matmul(matmul(own, own.transpose(2, 3)), rows)
            self._sums["columns"] += found.sum((0, 2))

    def mean(self, samples: float) -> Tensor:
        """The mean over `samples`."""
        return _mean_squares(self._sums["columns"].clone(), samples)


class SquaredGradients(Accumulator):
    """The exact diagonal of the Fisher, the eigenvalues in a Kronecker-factored basis, or both.

    ``d_ij = 1/N sum_s (G_s)_ij^2``, ``(groups, outputs, inputs)``; with bases ``(groups, inputs, a)`` and
    ``(groups, outputs, g)``, ``Lambda = 1/N sum_s (U_g^T G_s U_a)^2``, ``(groups, g, a)``.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        budget: int,
        *,
        diagonal: bool = True,
        bases: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        sums: dict[str, Tensor] = {}
        if diagonal:
            sums["diagonal"] = torch.zeros(shape, dtype=dtype, device=device)
        if bases is not None:
            widths = bases[1].shape[-1], bases[0].shape[-1]
            sums["eigenvalues"] = torch.zeros(shape[0], *widths, dtype=dtype, device=device)
        super().__init__(sums, budget)
        self._bases = bases

    def add(
        self, activations: Operand, gradients: Tensor, first_pass: bool, weights: SampleWeights | None = None
    ) -> None:
        diagonal, eigenvalues = self._sums.get("diagonal"), self._sums.get("eigenvalues")
        if isinstance(activations, OneHotRows) and diagonal is not None and eigenvalues is None:
            for part in activations.parts_by_use():  # few rows of an embedding occur in a batch
                places, rows = activations.part(part).used()
                total = diagonal.new_zeros(*diagonal.shape[:2], len(places))
                add_squares(rows, gradients[part], self._budget, total)
                diagonal[..., places] += total
            return
        add_squares(activations, gradients, self._budget, diagonal, eigenvalues, self._bases)

    def diagonal(self, samples: float) -> Tensor:
        """The mean over `samples`. It can be taken only once, since it reuses the memory of the sum."""
        return _mean_squares(self._sums.pop("diagonal"), samples)

    def eigenvalues(self, samples: float) -> Tensor:
        """The mean over `samples`. It can be taken only once, since it reuses the memory of the sum.

        A gradient's part along a direction that no gradient has is its rounding, and the square of it no eigenvalue.
        """
        values = _mean_squares(self._sums.pop("eigenvalues"), samples)
        largest = values.amax((1, 2), keepdim=True)
        return values.masked_fill_(values < torch.finfo(values.dtype).eps ** 2 * largest, 0)


def _count() -> Tensor:
    """A number that counts, kept as a sum like the others."""
    return torch.zeros((), dtype=torch.float64, device="cpu")


def _mean_squares(total: Tensor, samples: float) -> Tensor:
    # Cancellation between pairs of positions can leave a rounding error below zero.
    return total.div_(samples).clamp_(min=0)


class JointFisher:
    """The dense Fisher over all parameters of several layers, ``(parameters, parameters)``; for small nets.

    Fed once per backward pass with the per-sample gradients of all layers side by side. Summed in float64 where the
    device has it: a small prior precision decides in the directions that no gradient has, and rounding errors of the
    products in float32 are larger than many.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        fisher = torch.zeros(parameters, parameters, dtype=widest_dtype(device), device=device)
        self._sums = {"fisher": fisher}

    def state_dict(self) -> dict[str, Tensor]:
        """See `Accumulator`."""
        return self._sums

    def add_rows(self, gradients: Tensor) -> None:
        """Take ``(samples, parameters)`` per-sample gradients."""
        wide = gradients.to(self._sums["fisher"])
        self._sums["fisher"] += wide.T @ wide

    def mean(self, samples: float) -> Tensor:
        """The Fisher over `samples`."""
        return self._sums["fisher"] / samples


class ChosenFisher(JointFisher):
    """The dense Fisher of some of these parameters, ``(chosen, chosen)``.

    Args:
        index: places of the chosen among all parameters, ``(chosen,)``.
        device: of the sums.
    """

    def __init__(self, index: Tensor, device: torch.device) -> None:
        super().__init__(len(index), device)
        self._index = index.to(device)

    def add_rows(self, gradients: Tensor) -> None:
        super().add_rows(gradients[:, self._index])
