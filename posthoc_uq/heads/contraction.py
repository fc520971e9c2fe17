"""``J Sigma J^T`` of one layer, from its activations and output gradients.

With ``J_c = sum_t g_ct a_t^T`` and ``Sigma = diag w - low rank`` in the posterior's bases (see `CovarianceForm`):

* one position: ``J_c = g_c a^T`` is never formed. The diagonal gives ``sum_o g_co g_do (sum_i w_oi a_i^2)``, and the
  low rank needs ``z_c = R^-1 D (U_g x U_a)^T (s w J_c) = R^-1 D sum_o g_co U_g[o] x h_o`` with
  ``h_o = U_a^T diag(s w)_o a``, which no output of the model enters;
* a few positions: the same with pairs of positions, ``sum_tu g_ct g_du (sum_i w_oi a_ti a_ui)``;
* more positions (weight sharing): ``J`` is formed for a few rows of a few samples at a time and summed away. The bases
  of KFAC and EFB turn the activations and output gradients beforehand, not ``J``.

Two large numbers cancel along stiff directions. Products are in the activations' precision. A sample of which less
than a hundredth of the diagonal's part is left is computed again in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.curvature.operands import Operand, Rows
from posthoc_uq.curvature.squares import TOUCH_COST
from posthoc_uq.devices import as_double
from posthoc_uq.heads.cancellation import Checked, Contracted, joined, precise
from posthoc_uq.heads.layer_covariance import LayerCovariance
from posthoc_uq.heads.products import Mode, gram, weighted_gram

_ROTATED = 8  # rotated activations may take this many times the memory limit of one temporary


def contract(covariance: LayerCovariance, activations: Operand, gradients: Tensor, mode: Mode) -> Checked:
    """``J Sigma J^T`` in the shapes of `gram`.

    Args:
        covariance: of the layer's weights.
        activations: of the batch.
        gradients: at the layer's outputs, of several functions of the outputs: ``(samples, G, functions, m, T)``.
        mode: see `gram`.
    """
    by_pairs = _pairs_are_cheaper(covariance, activations.positions, gradients.shape[2], mode)
    if covariance.bases is not None and not by_pairs:
        return precise(_rotated(covariance, activations, gradients, mode).value)
    if by_pairs:

        def work(part: slice, double: bool) -> Contracted:
            return _by_pairs_of_positions(
                covariance, activations.part(part).rows(), gradients[part], mode, double
            )
    else:

        def work(part: slice, double: bool) -> Contracted:
            return _by_jacobian(covariance, activations.part(part), gradients[part], mode, double)

    return covariance.checked(work, gradients.shape[0], mode)


def with_norms(
    covariance: LayerCovariance, activations: Operand, gradients: Tensor, double: bool
) -> tuple[Tensor, Tensor]:
    """Variances ``J_c Sigma J_c^T`` and squared norms ``|J_c|^2`` from the same J, ``(samples, functions)`` each.

    Nothing is computed again where much cancels: what is left of one layer may not matter in the sum over all layers.
    The caller judges that, and asks for float64 by `double`.
    """
    if _pairs_are_cheaper(covariance, activations.positions, gradients.shape[2], "variance"):
        sums = _by_pairs_of_positions(covariance, activations.rows(), gradients, "variance", double, True)
    elif covariance.bases is None:
        sums = _by_jacobian(covariance, activations, gradients, "variance", double, True)
    else:
        sums = _rotated(covariance, activations, gradients, "variance", True)
    assert sums.norms is not None
    return sums.value, as_double(sums.norms)


def _rotated(
    covariance: LayerCovariance, activations: Operand, gradients: Tensor, mode: Mode, norms: bool = False
) -> Contracted:
    """In the bases of KFAC and EFB: activations and gradients are rotated, many samples at once, since the bases are
    large and every product reads them.
    """
    assert covariance.bases is not None
    samples = gradients.shape[0]
    numbers = activations.positions * covariance.bases[0][..., 0].numel() * gradients.element_size()
    step = samples if mode == "joint" else max(1, _ROTATED * covariance.limit // numbers)
    parts: list[Contracted] = []
    for start in range(0, samples, step):
        part = slice(start, start + step)
        rotated = Rows(activations.part(part).project(covariance.bases[0]))
        rotated_gradients = torch.matmul(covariance.bases[1].transpose(-1, -2).unsqueeze(1), gradients[part])
        parts.append(_by_jacobian(covariance, rotated, rotated_gradients, mode, False, norms))
    return joined(parts)


def _pairs_are_cheaper(covariance: LayerCovariance, positions: int, functions: int, mode: Mode) -> bool:
    """Whether pairs of positions cost less than forming J, in multiply-adds per weight and sample."""
    if positions == 1 or mode == "joint":
        return positions == 1
    width = 0 if covariance.low_rank is None else covariance.low_rank.roots.shape[-1]
    inputs = covariance.weights.shape[2]
    pairs = positions * (positions + 1) / 2 + positions * width
    pairs += positions * width * functions * TOUCH_COST / inputs
    return pairs < functions * (positions + width + TOUCH_COST)


def _by_jacobian(
    covariance: LayerCovariance,
    activations: Operand,
    gradients: Tensor,
    mode: Mode,
    double: bool,
    norms: bool = False,
) -> Contracted:
    """For weights shared by many positions: J in chunks of samples (all at once for ``"joint"``) and of rows."""
    samples, groups, functions, outputs, _ = gradients.shape
    inputs = covariance.weights.shape[2]
    item = 8 if double else gradients.element_size()
    numbers = groups * functions * inputs
    step = samples if mode == "joint" else max(1, covariance.limit // max(1, numbers * outputs * item))
    parts: list[Contracted] = []
    for start in range(0, samples, step):
        part = slice(start, min(samples, start + step))
        part_activations, part_gradients = activations.part(part), gradients[part]
        diagonal: Tensor | None = None
        cores: Tensor | None = None
        lengths: Tensor | None = None
        for rows in covariance.row_chunks((part.stop - start) * numbers, item):
            jacobian = _jacobian(covariance, part_activations, part_gradients[:, :, :, rows])
            jacobian = as_double(jacobian) if double else jacobian
            row_lengths = _row_norms(jacobian, "variance") if norms else None
            lengths = row_lengths if lengths is None or row_lengths is None else lengths + row_lengths
            squares, core = _add_up_rows(covariance, jacobian, rows, mode, double, row_lengths)
            diagonal = squares if diagonal is None else diagonal + squares
            cores = core if cores is None or core is None else cores + core
        assert diagonal is not None
        parts.append(covariance.less_low_rank(diagonal, cores, mode, lengths))
    return joined(parts)


def _jacobian(covariance: LayerCovariance, activations: Operand, gradients: Tensor) -> Tensor:
    """Rows of J, ``(samples, G, functions, rows, n)``; functions are treated as further outputs of the layer."""
    samples, groups, functions, rows, _ = gradients.shape
    stacked = gradients.flatten(2, 3).transpose(2, 3)
    return activations.gradients(stacked, covariance.limit).reshape(samples, groups, functions, rows, -1)


def _add_up_rows(
    covariance: LayerCovariance,
    jacobian: Tensor,
    rows: slice,
    mode: Mode,
    double: bool,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The diagonal's part and the core of some rows of J, which is overwritten; `lengths` are the squared norms of
    these rows, or None.
    """
    if lengths is not None and covariance.equal_weight is not None:
        squares, factors = lengths * covariance.equal_weight, covariance.weight_rows(rows, double)[1]
    else:
        roots, factors = covariance.root_weight_rows(rows, double)
        jacobian.mul_(roots.unsqueeze(1))
        squares = _row_norms(jacobian, mode)
    if covariance.low_rank is None:
        return squares, None
    input_basis, output_basis = (basis.to(jacobian) for basis in covariance.low_rank_bases)
    jacobian.mul_(factors.unsqueeze(1))
    flat = jacobian.flatten(2, 3)
    if flat.shape[1] == 1:
        inner = flat.reshape(-1, flat.shape[-1]) @ input_basis[0]
    else:
        inner = torch.matmul(flat, input_basis)
    inner = inner.reshape(*jacobian.shape[:4], -1)
    return squares, torch.matmul(output_basis[:, rows].transpose(-1, -2).unsqueeze(1), inner)


def _by_pairs_of_positions(
    covariance: LayerCovariance,
    activations: Tensor,
    gradients: Tensor,
    mode: Mode,
    double: bool,
    norms: bool = False,
) -> Contracted:
    """Without J, from activations ``(samples, G, T, n)``; ``"joint"`` is for one position only."""
    if covariance.bases is not None:
        activations = torch.matmul(activations, covariance.bases[0])
        gradients = torch.matmul(covariance.bases[1].transpose(-1, -2).unsqueeze(1), gradients)
    if double:
        activations, gradients = as_double(activations), as_double(gradients)
    lengths = _squared_norms(activations, gradients) if norms else None
    by_norms = (
        None if lengths is None or covariance.equal_weight is None else lengths * covariance.equal_weight
    )
    diagonal: Tensor | None = by_norms
    cores: Tensor | None = None
    numbers = covariance.weights.shape[0] * covariance.weights.shape[2] if double else 0
    for rows in covariance.row_chunks(numbers, 8):
        weights, shrunk = covariance.weight_rows(rows, double)
        row_gradients = gradients[:, :, :, rows].transpose(-1, -2)  # (samples, G, functions, T, rows)
        if by_norms is None:
            squares = weighted_gram(activations, row_gradients, weights, mode, covariance.limit)
            diagonal = squares if diagonal is None else diagonal + squares
        if covariance.low_rank is not None:
            core = covariance.cores(covariance.directions(activations, shrunk), row_gradients, rows)
            cores = core if cores is None else cores + core
    assert diagonal is not None
    return covariance.less_low_rank(diagonal, cores, mode, lengths)


def _row_norms(jacobian: Tensor, mode: Mode) -> Tensor:
    """`gram` of Jacobians ``(samples, G, functions, rows, n)``."""
    return gram(jacobian.transpose(1, 2).flatten(2), mode)


def _squared_norms(activations: Tensor, gradients: Tensor) -> Tensor:
    """``|sum_t g_ct a_t^T|^2``, ``(samples, functions)``, by the Grams of positions: of activations
    ``(samples, G, T, n)`` and gradients ``(samples, G, functions, m, T)``.
    """
    if activations.shape[2] == 1:
        lengths = activations.square().sum((2, 3)).unsqueeze(2) * gradients.square().sum((3, 4))
        return lengths.sum(1)
    pairs = torch.matmul(activations, activations.transpose(-1, -2)).unsqueeze(2)
    return (torch.matmul(gradients.transpose(-1, -2), gradients) * pairs).sum((1, 3, 4))
