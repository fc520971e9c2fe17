"""`J Sigma J^T` layer by layer, from activations and output gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import as_double, on_host, placed
from posthoc_uq.core.errors import PosteriorMismatchError, warn_user
from posthoc_uq.core.model import model_device
from posthoc_uq.core.progress import in_parts, tell
from posthoc_uq.curvature.features import grid_of
from posthoc_uq.curvature.statistics import TOUCH_COST
from posthoc_uq.layers.capture import Capture, LayerGradients, Recording
from posthoc_uq.layers.layer import Call, Layer
from posthoc_uq.layers.operands import Operand, Rows, chunks
from posthoc_uq.layers.proof import count_samples, prepare
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.posteriors.block import Factor
from posthoc_uq.posteriors.covariance import CovarianceForm
from posthoc_uq.posteriors.laplace import DenseFactor
from posthoc_uq.posteriors.posterior import Posterior

# Contractions in float32 whose samples are computed again in float64 where two large numbers cancelled.

LEAST_SHARE = 1e-2
"""Share of the diagonal's part that must be left: below it float32 has lost too many digits."""

_MANY = 1000  # of more samples, all are repeated where a quarter is imprecise


class Contracted(NamedTuple):
    """One layer's contraction, in the shapes of `gram` and in float64.

    Attributes:
        value: ``J Sigma J^T``.
        diagonal: what the diagonal part of Sigma gives alone.
        norms: ``|J_c|^2``, ``(samples, functions)``, or None.
    """

    value: Tensor
    diagonal: Tensor
    norms: Tensor | None = None


class Checked(NamedTuple):
    """One layer's contraction, of which some samples may have to be computed again in float64.

    Attributes:
        value: in the shapes of `gram`, in float64.
        imprecise: which samples these are, booleans ``(samples,)``; None where no sample is.
        repeat: computes a slice of the samples again, in float64.
    """

    value: Tensor
    imprecise: Tensor | None
    repeat: Callable[[slice], Tensor]


def precise_values(layers: Sequence[Checked]) -> list[Tensor]:
    """The values of several layers, with imprecise samples computed again; the device is waited for once."""
    flags = iter(on_host(*(layer.imprecise for layer in layers if layer.imprecise is not None)))
    values: list[Tensor] = []
    for value, imprecise, repeat in layers:
        which: list[int] = [] if imprecise is None else next(flags).nonzero().flatten().tolist()
        if imprecise is not None and (
            len(which) == len(imprecise) or 4 * len(which) > len(imprecise) > _MANY
        ):
            value = repeat(slice(0, len(imprecise)))
        else:
            for part in _runs(which):
                value[part] = repeat(part)
        values.append(value)
    return values


def _runs(numbers: Sequence[int]) -> Iterator[slice]:
    """Increasing whole numbers as slices of those that follow each other."""
    start: int | None = None
    for place, number in enumerate(numbers):
        start = number if start is None else start
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield slice(start, number + 1)
            start = None


def precise(value: Tensor) -> Checked:
    """A value of which no sample is imprecise."""
    return Checked(value, None, lambda part: value[part])


def joined(parts: list[Contracted]) -> Contracted:
    """Contractions of successive parts of the samples as one."""
    if len(parts) == 1:
        return parts[0]
    norms = [part.norms for part in parts if part.norms is not None]
    return Contracted(
        torch.cat([part.value for part in parts]),
        torch.cat([part.diagonal for part in parts]),
        torch.cat(norms) if norms else None,
    )


# Inner products of Jacobian rows: of each function with itself, with all others, or also between samples.

Mode = Literal["variance", "covariance", "joint"]


def gram(rows: Tensor, mode: Mode) -> Tensor:
    """Inner products of rows ``(samples, functions, numbers)``: ``(samples, functions)`` for ``"variance"``, of all
    pairs of functions ``(samples, functions, functions)`` for ``"covariance"``, and of all pairs of samples and
    functions ``(samples * functions, samples * functions)`` for ``"joint"``.
    """
    if mode == "variance":
        return torch.linalg.vector_norm(rows, dim=-1).square()
    flat = rows.flatten(0, 1).unsqueeze(0) if mode == "joint" else rows
    products = torch.matmul(flat, flat.transpose(-1, -2))
    return products[0] if mode == "joint" else products


def marginal(products: Tensor, samples: int, mode: Mode) -> Tensor:
    """The variances ``(samples, functions)`` in a result of `gram`."""
    if mode == "variance":
        return products
    return products.diagonal(dim1=-2, dim2=-1).reshape(samples, -1)


def weighted_gram(activations: Tensor, gradients: Tensor, weights: Tensor, mode: Mode, limit: int) -> Tensor:
    """``sum_oi J_oi w_oi J'_oi`` of ``J = sum_t g_t a_t^T``, in the shapes of `gram`.

    Args:
        activations: ``(samples, G, T, n)``.
        gradients: ``(samples, G, functions, T, m)``.
        weights: ``w``, ``(G, m, n)``.
        mode: ``"joint"`` is for one position only.
        limit: bytes for the products of pairs of activations.
    """
    if mode == "joint":
        return _weighted_jointly(activations[:, :, 0], gradients[:, :, :, 0], weights, limit)
    if activations.shape[2] == 1:
        spread = torch.einsum("sgti,goi->sgto", activations.square(), weights).unsqueeze(2)
        weighted = gradients * spread
    else:
        positions = activations.shape[2]
        numbers = positions * activations[0].numel() * activations.element_size()
        step = max(1, limit // max(1, numbers))
        parts: list[Tensor] = []
        for part_activations, part_gradients in zip(
            activations.split(step), gradients.split(step), strict=True
        ):
            pairs = (part_activations.unsqueeze(2) * part_activations.unsqueeze(3)).flatten(2, 3)
            spread = torch.matmul(pairs, weights.transpose(-1, -2))
            spread = spread.reshape(*part_activations.shape[:2], positions, positions, -1)
            parts.append(torch.einsum("sgkto,sgtuo->sgkuo", part_gradients, spread))
        weighted = torch.cat(parts) if len(parts) > 1 else parts[0]
    if mode == "variance":
        return (gradients * weighted).sum((1, 3, 4))
    return torch.matmul(weighted.flatten(3), gradients.flatten(3).transpose(-1, -2)).sum(1)


def _weighted_jointly(activations: Tensor, gradients: Tensor, weights: Tensor, limit: int) -> Tensor:
    """`weighted_gram` of all samples: activations ``(samples, G, n)``, gradients ``(samples, G, functions, m)``."""
    samples, _, functions, _ = gradients.shape
    products = gradients.new_zeros(samples, functions, samples, functions)
    step = max(1, limit // max(1, samples * weights[:, 0].numel() * weights.element_size()))
    for start in range(0, samples, step):
        pairs = activations[start : start + step].unsqueeze(1) * activations
        spread = torch.einsum("stgi,goi->stgo", pairs, weights)
        for offset in range(spread.shape[0]):
            weighted = gradients * spread[offset].unsqueeze(2)  # (other samples, G, functions, m)
            sample_gradients = gradients[start + offset]
            products[start + offset] = torch.einsum("gko,tglo->ktl", sample_gradients, weighted)
    return products.reshape(samples * functions, samples * functions)


# The covariance of one layer's weights, prepared for products with Jacobians.
#
# ``Sigma = diag w - low rank`` in the posterior's bases, see `CovarianceForm`. The low rank is
# ``diag(s w) U D B^-1 D U^T diag(s w)`` with ``U = U_g x U_a`` and ``B = R R^T``.

_SMALL = 400  # directions up to which a product with R^-1 is 2 to 5 times faster than a solve
_ROOT_BLOCKS = 4  # of rows of a triangular root, of which each leaves out the columns that are 0


class LayerCovariance:
    """The covariance of one layer's weights, prepared once for Jacobians of many batches.

    Args:
        form: the covariance.
        dtype: of activations and output gradients.
        device: of activations and output gradients.
        limit: bytes that one temporary may take.
    """

    def __init__(self, form: CovarianceForm, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self.dtype, self.limit = dtype, limit
        self.low_rank = low = form.low_rank
        self.weights = form.weights.to(device)
        self.bases = None if form.bases is None else tuple(b.to(device, dtype) for b in form.bases)
        self.shrink = None if low is None or low.shrink is None else low.shrink.to(device)
        if low is not None:
            self.low_rank_bases = low.input_basis.to(device), low.output_basis.to(device)

    @cached_property
    def root_weights(self) -> Tensor:
        """``sqrt w``, which turns J into the rows of its diagonal part."""
        return self.weights.sqrt().to(self.dtype)

    @cached_property
    def shrunk_root_weights(self) -> Tensor:
        """``s sqrt w``, which turns those rows into ``s w J``."""
        return self.root_weights if self.shrink is None else self.root_weights * self.shrink.to(self.dtype)

    @cached_property
    def narrow_weights(self) -> Tensor:
        """``w`` in the activations' precision."""
        return self.weights.to(self.dtype)

    @cached_property
    def shrunk_weights(self) -> Tensor:
        """``s w`` in the activations' precision."""
        return (
            self.narrow_weights if self.shrink is None else self.narrow_weights * self.shrink.to(self.dtype)
        )

    @cached_property
    def equal_weight(self) -> float | None:
        """``w`` where it is the same for all weights, as in INF without a residual; the diagonal's part is then ``w``
        times the squared norm of J.
        """
        least, most = (float(extreme) for extreme in self.weights.aminmax())
        return most if least == most and self.bases is None else None

    @cached_property
    def narrow_root(self) -> Tensor:
        """``R`` in the activations' precision."""
        assert self.low_rank is not None
        return self.low_rank.root.to(self.dtype)

    @cached_property
    def narrow_reduction(self) -> Tensor:
        """``R^-1 D`` in the activations' precision, ``(G, L, L)``. A product with it has the error bound of a solve in
        this precision.
        """
        assert self.low_rank is not None
        roots = as_double(self.low_rank.roots).flatten(1)
        columns = torch.diag_embed(roots).to(self.low_rank.root)
        return torch.linalg.solve_triangular(self.low_rank.root, columns, upper=False).to(self.dtype)

    @cached_property
    def row_roots(self) -> Tensor:
        """``T``, see `LowRank`."""
        assert self.low_rank is not None
        return self.low_rank.row_roots()

    @cached_property
    def square_weights(self) -> Tensor:
        """The weights of squared activations, ``(m, n)``, that give the diagonal's part of each output's variance; with
        bases, of activations that are turned by the first.
        """
        weights = self.narrow_weights[0]
        return weights if self.bases is None else self.bases[1][0].square() @ weights

    @cached_property
    def subtracted_rows(self) -> Tensor:
        """``T_o U_a^T diag(s w)_o`` of all outputs of a layer of one group, one below the other, ``(m a, n)``: the
        squares of their products with activations are what the low rank takes from the outputs' variances.
        """
        return self._subtracted().flatten(0, 1).to(self.weights.device, self.dtype)

    def _subtracted(self) -> Tensor:
        """`subtracted_rows` in float64, ``(m, a, n)``."""
        shrunk = self.weight_rows(slice(None), True)[1][0]
        basis = as_double(self.low_rank_bases[0][0]).to(shrunk)
        return as_double(self.row_roots)[0].to(shrunk) @ (basis.T * shrunk.unsqueeze(1))

    @cached_property
    def variance_roots(self) -> list[Tensor]:
        """Triangular roots of the covariances of each output's weights, one below the other, in blocks of rows without
        the columns that are 0, ``(m height, n - start)``: the variances of the outputs of a layer with a low rank and
        one group are sums of squares of their products with activations, by little more than ``m n^2 / 2``
        multiply-adds for each row of activations. Worth it for many rows.
        """
        subtracted = self._subtracted()
        weights = self.weight_rows(slice(None), True)[0][0]
        covariances = torch.diag_embed(weights) - subtracted.transpose(1, 2) @ subtracted
        values, vectors = torch.linalg.eigh(covariances)
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        upper = torch.linalg.qr(roots.transpose(1, 2), mode="r").R
        size = upper.shape[1]
        height = -(-size // _ROOT_BLOCKS)
        return [
            upper[:, start : start + height, start:].flatten(0, 1).to(self.weights.device, self.dtype)
            for start in range(0, size, height)
        ]

    def root_weight_rows(self, rows: slice, double: bool) -> tuple[Tensor, Tensor]:
        """``sqrt w`` and ``s sqrt w`` of some rows, ``(G, rows, n)``; in float64 exactly the numbers that the
        low-rank part was computed with.
        """
        if not double:
            return self.root_weights[:, rows], self.shrunk_root_weights[:, rows]
        roots = as_double(self.weights[:, rows]).sqrt()
        return roots, (roots if self.shrink is None else roots * as_double(self.shrink[:, rows]))

    def weight_rows(self, rows: slice, double: bool) -> tuple[Tensor, Tensor]:
        """``w`` and ``s w`` of some rows, ``(G, rows, n)``."""
        if not double:
            return self.narrow_weights[:, rows], self.shrunk_weights[:, rows]
        weights = as_double(self.weights[:, rows])
        return weights, (weights if self.shrink is None else weights * as_double(self.shrink[:, rows]))

    @property
    def cancels(self) -> bool:
        """Whether a low-rank part is subtracted from the diagonal's part."""
        return self.low_rank is not None

    def checked(
        self, contract_part: Callable[[slice, bool], Contracted], samples: int, mode: Mode
    ) -> Checked:
        """Contract all samples; those where too much has cancelled are marked to be computed again in float64.

        Args:
            contract_part: contracts a slice of the samples, in float64 if its second argument is true.
            samples: in the batch.
            mode: see `gram`.
        """
        everything = slice(0, samples)
        if self.low_rank is None or self.dtype == torch.float64:
            return precise(contract_part(everything, False)[0])
        if mode == "joint":
            return precise(contract_part(everything, True)[0])
        value, diagonal, _ = contract_part(everything, False)
        imprecise = (marginal(value, samples, mode) < LEAST_SHARE * marginal(diagonal, samples, mode)).any(
            dim=1
        )
        return Checked(value, imprecise, lambda part: contract_part(part, True)[0])

    def row_chunks(self, numbers: int, item: int) -> Iterator[slice]:
        """Slices of the layer's rows, so small that `numbers` numbers of `item` bytes a row stay within the limit."""
        outputs = self.weights.shape[1]
        step = max(1, min(outputs, self.limit // max(1, numbers * item)))
        for start in range(0, outputs, step):
            yield slice(start, min(outputs, start + step))

    def directions(self, activations: Tensor, shrunk: Tensor) -> Tensor:
        """``h = U_a^T diag(s w)_o a`` for every row ``o`` of `shrunk`, which is ``s w``: ``(samples, G, T, a, rows)``
        for activations ``(samples, G, T, n)``; a few samples at a time.
        """
        # contiguous: otherwise every product below would have the transpose's layout and be copied
        basis = self.low_rank_bases[0].to(activations).transpose(-1, -2).contiguous().unsqueeze(1)
        columns = shrunk.transpose(-1, -2)
        numbers = activations.shape[2] * basis.numel() * basis.element_size()
        result: list[Tensor] = []
        for part in activations.split(max(1, self.limit // max(1, numbers))):
            spread = part.unsqueeze(3) * basis
            if spread.shape[1] == 1:  # one large product, not one for every sample
                result.append((spread.flatten(0, 3) @ columns[0]).reshape(*spread.shape[:4], -1))
            else:
                result.append(torch.matmul(spread.flatten(2, 3), columns).reshape(*spread.shape[:4], -1))
        return torch.cat(result) if len(result) > 1 else result[0]

    def cores(self, directions: Tensor, gradients: Tensor, rows: slice) -> Tensor:
        """``sum_o U_g[o] x (sum_t g_to h_to)``, ``(samples, G, functions, g, a)``, over some rows ``o``."""
        basis = self.low_rank_bases[1][:, rows].to(gradients)
        samples, groups, functions, positions, _ = gradients.shape
        width = directions.shape[3]
        numbers = functions * width * gradients[0, :, 0, 0].numel() * gradients.element_size()
        step = max(1, self.limit // max(1, numbers))
        result = gradients.new_empty(samples, groups, functions, width, basis.shape[-1])
        for start in range(0, samples, step):
            part_directions, part_gradients = (
                directions[start : start + step],
                gradients[start : start + step],
            )
            total = part_gradients[:, :, :, 0].unsqueeze(3) * part_directions[:, :, 0].unsqueeze(2)
            for t in range(1, positions):
                total.addcmul_(part_gradients[:, :, :, t].unsqueeze(3), part_directions[:, :, t].unsqueeze(2))
            if groups == 1:
                result[start : start + step] = (total.flatten(0, 3) @ basis[0]).reshape(*total.shape[:4], -1)
            else:
                result[start : start + step] = torch.matmul(total, basis.unsqueeze(1))
        return result.transpose(3, 4)

    def less_low_rank(
        self, diagonal: Tensor, cores: Tensor | None, mode: Mode, norms: Tensor | None
    ) -> Contracted:
        """The diagonal's part less the low rank's.

        Args:
            diagonal: what the diagonal gives, in the shapes of `gram`.
            cores: ``(U_g x U_a)^T (s w J)``, ``(samples, G, functions, g, a)``; None without a low rank.
            mode: see `gram`.
            norms: ``|J_c|^2``, which become part of the result, or None.
        """
        diagonal = as_double(diagonal)
        if cores is None:
            return Contracted(diagonal, diagonal, norms)
        return Contracted(diagonal - gram(self.reduced(cores), mode).to(diagonal), diagonal, norms)

    def reduced(self, cores: Tensor) -> Tensor:
        """``z = R^-1 D core``, ``(samples, functions, G g a)``, in the cores' precision: by a product where that is
        faster. D scales the rows of R, and a triangular solve is not less accurate for that.
        """
        assert self.low_rank is not None
        samples, groups, functions = cores.shape[:3]
        wide = cores.dtype == torch.float64
        if not wide and groups == 1 and self.low_rank.root.shape[-1] <= _SMALL:
            rows = cores.reshape(samples * functions, -1)
            return (rows @ self.narrow_reduction[0].T.to(rows)).reshape(samples, functions, -1)
        root = self.low_rank.root if wide else self.narrow_root
        scaled = cores.to(root) * self.low_rank.roots.to(root).unsqueeze(1)
        columns = scaled.flatten(3).permute(1, 3, 0, 2).reshape(groups, -1, samples * functions)
        solved = torch.linalg.solve_triangular(root, columns, upper=False)
        return solved.reshape(groups, -1, samples, functions).permute(2, 3, 0, 1).flatten(2)

    def solved(self, cores: Tensor) -> Tensor:
        """``D B^-1 D`` times cores ``(samples, k, g, a)`` of a layer of one group, in float64."""
        assert self.low_rank is not None
        root, roots = self.low_rank.root[0], as_double(self.low_rank.roots).to(self.low_rank.root)[0]
        columns = (cores.to(root) * roots).flatten(2).flatten(0, 1).T
        solved = torch.cholesky_solve(columns, root).T.reshape(cores.shape) * roots
        return placed(solved, cores.device)


# ``J Sigma J^T`` of one layer, from its activations and output gradients.
#
# With ``J_c = sum_t g_ct a_t^T`` and ``Sigma = diag w - low rank`` in the posterior's bases (see
# `CovarianceForm`):
#
# * one position: ``J_c = g_c a^T`` is never formed. The diagonal gives ``sum_o g_co g_do (sum_i w_oi a_i^2)``, and the
#   low rank needs ``z_c = R^-1 D (U_g x U_a)^T (s w J_c) = R^-1 D sum_o g_co U_g[o] x h_o`` with
#   ``h_o = U_a^T diag(s w)_o a``, which no output of the model enters;
# * a few positions: the same with pairs of positions, ``sum_tu g_ct g_du (sum_i w_oi a_ti a_ui)``;
# * more positions (weight sharing): ``J`` is formed for a few rows of a few samples at a time and summed away. The
#   bases of KFAC and EFB turn the activations and output gradients beforehand, not ``J``.
#
# Two large numbers cancel along stiff directions. Products are in the activations' precision. A sample of
# which less than a hundredth of the diagonal's part is left is computed again in float64.

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


# The covariance of a layer's outputs by its own weights, in closed form, for layers of one group with one
# input row a sample.
#
# An output needs the covariance of one row of weights, a pair of outputs that of two rows; there is no
# backward pass.

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


# Output covariances of a linearised model, from backward passes whose gradients are contracted layer by
# layer.
#
# ``Cov = sum_l J_l Sigma_l J_l^T`` over the posterior's blocks, with J of any functions of the outputs. One
# backward pass gives the gradient of one function for every sample, as each layer's activations and output
# gradients.

Gradient = Callable[[int], Tensor]


@dataclass
class Pulled:
    """One layer's activations, and gradients at its outputs of several functions of the model's outputs.

    Attributes:
        layer: the layer.
        activations: of the batch.
        gradients: by the place of the function, each ``(samples, G, T, m)``.
    """

    layer: Layer
    activations: Operand
    gradients: dict[int, Tensor] = field(default_factory=lambda: dict[int, Tensor]())

    def stacked(self, functions: int) -> Tensor:
        """All gradients, ``(samples, G, functions, m, T)``; zero where none came back."""
        like = next(iter(self.gradients.values()))
        if functions == 1:
            return like.transpose(2, 3).unsqueeze(2)
        gradients = [self.gradients.get(index, torch.zeros_like(like)) for index in range(functions)]
        if like.stride(3) == 1:  # a linear layer's: copied in the order of memory
            return torch.stack(gradients, dim=3).permute(0, 1, 3, 4, 2)
        return torch.stack([gradient.transpose(2, 3) for gradient in gradients], dim=2)

    def part(self, samples: Tensor) -> Pulled:
        """The same for some samples, by their indices."""
        gradients = {place: gradient[samples] for place, gradient in self.gradients.items()}
        return Pulled(self.layer, self.activations.part(samples), gradients)


def pull(
    recording: Recording, gradient: Gradient, numbers: range, dtype: torch.dtype, last: bool
) -> list[Pulled]:
    """Backward passes of functions of the outputs: one entry for every layer that they reach.

    Args:
        recording: the forward pass.
        gradient: gives, by a function's number, its gradient by the outputs, shaped like them.
        numbers: of the functions.
        dtype: of activations and output gradients.
        last: whether these are the last backward passes through this recording.
    """
    layers: dict[str, Pulled] = {}
    for place, number in enumerate(in_parts(numbers)):

        def collect(layer_gradients: LayerGradients, place: int = place) -> None:
            name = layer_gradients.layer.name
            if name in layers:  # the activations are those of the first function
                gradients = layer_gradients.gradients(dtype)
            else:
                activations, gradients = layer_gradients.operands(dtype)
                layers[name] = Pulled(layer_gradients.layer, activations)
            layers[name].gradients[place] = gradients

        recording.pull_back(gradient(number), collect, last=last and place == len(numbers) - 1)
    return list(layers.values())


class WeightCovariance:
    """A posterior's covariance at its present settings, prepared once for Jacobians of many batches.

    Args:
        posterior: the posterior.
        dtype: of activations and output gradients.
        device: of activations and output gradients.
        limit: bytes that one temporary may take.
    """

    def __init__(self, posterior: Posterior, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self.layers: dict[str, LayerCovariance] = {}
        self._dense: list[tuple[list[Layer], Factor]] = []
        self._dense_covariances: dict[str, Tensor] = {}
        self._limit, self._dtype = limit, dtype
        for name, members in posterior.members.items():
            factor = posterior.factor(name)
            form = factor.form()
            if form is not None:
                self.layers[name] = LayerCovariance(form, dtype, device, limit)
            else:
                self._dense.append(([posterior.layers[member] for member in members], factor))

    def contract(self, pulled: list[Pulled], samples: int, functions: int, mode: Mode) -> Tensor:
        """``J Sigma J^T`` in the shapes of `gram`, in float64. `pulled` is emptied, to free memory."""
        size = samples * functions
        shape = {
            "variance": (samples, functions),
            "covariance": (samples, functions, functions),
            "joint": (size, size),
        }
        parts: list[Checked] = []
        dense_layers: dict[str, Pulled] = {}
        number = len(pulled)
        while pulled:
            layer = pulled.pop()
            if layer.layer.name in self.layers:
                covariance = self.layers[layer.layer.name]
                parts.append(contract(covariance, layer.activations, layer.stacked(functions), mode))
            else:
                dense_layers[layer.layer.name] = layer
            tell(1 - len(pulled) / number)
        sums = precise_values(parts)
        for layers, factor in self._dense:
            if any(layer.name in dense_layers for layer in layers):
                sums.append(self._contract_dense(layers, factor, dense_layers, samples, functions, mode))
        if not sums:
            return torch.zeros(shape[mode], dtype=torch.float64, device="cpu")
        total = sums[0]
        for part in sums[1:]:
            total = total.to(part.device) + part
        return total

    def with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """``J_c Sigma J_c^T`` and, under independent weights with variance ``prior[layer]``, ``J_c Sigma_0 J_c^T``,
        ``sum_l prior_l |J_cl|^2``: summed over the functions c, ``(samples,)`` each in float64.

        J is formed once for both. Where the posterior's variance is less than a hundredth of the prior's, too much has
        cancelled for the activations' precision, and those samples are computed again in float64.
        """
        sums = self._with_prior(pulled, samples, functions, prior, False)
        if self._dtype == torch.float64 or not any(layer.cancels for layer in self.layers.values()):
            return sums
        posterior_sums, prior_sums = (tensor.to(sums[0].device) for tensor in sums)
        imprecise = (posterior_sums < LEAST_SHARE * prior_sums).nonzero().flatten()
        if imprecise.numel() == 0:
            return posterior_sums, prior_sums
        if imprecise.numel() < samples:
            pulled = [layer.part(imprecise) for layer in pulled]
        precise_pair = self._with_prior(pulled, imprecise.numel(), functions, prior, True)
        for total, precise_sums in zip((posterior_sums, prior_sums), precise_pair, strict=True):
            total[imprecise] = precise_sums.to(total)
        return posterior_sums, prior_sums

    def _with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float], double: bool
    ) -> tuple[Tensor, Tensor]:
        posterior_sums, prior_sums = torch.zeros(2, samples, dtype=torch.float64, device="cpu")
        dense_layers: dict[str, Pulled] = {}
        for layer in pulled:
            name = layer.layer.name
            if name not in self.layers:
                dense_layers[name] = layer
                continue
            gradients = layer.stacked(functions)
            variances, norms = with_norms(self.layers[name], layer.activations, gradients, double)
            posterior_sums = posterior_sums.to(variances.device) + variances.sum(1)
            prior_sums = prior_sums.to(norms.device) + norms.sum(1) * prior.get(name, 0.0)
        for layers, factor in self._dense:
            if not any(layer.name in dense_layers for layer in layers):
                continue
            priors = [
                torch.full((layer.parameters,), prior.get(layer.name, 0.0), device="cpu") for layer in layers
            ]
            for part, rows, whitened in self._dense_parts(layers, factor, dense_layers, samples, functions):
                weights = torch.cat(priors).to(rows)
                posterior_sums, prior_sums = posterior_sums.to(rows.device), prior_sums.to(rows.device)
                posterior_sums[part] += whitened.square().sum((1, 2))
                prior_sums[part] += (rows.square() @ weights).sum(1)
        return posterior_sums, prior_sums

    def output_variance(self, layer: str, activations: Tensor) -> Tensor:
        """Variance of the outputs of a layer of one group, ``(samples, m)``, for activations ``(samples, n)``."""
        if layer in self.layers:
            return variance(self.layers[layer], activations)
        rows = as_double(activations)
        weight_covariance = self._dense_covariance(layer)
        if weight_covariance is None:
            return self._by_quadratic_forms(layer, rows, False).diagonal(dim1=1, dim2=2)
        return torch.einsum(
            "ijo,si,sj->so", weight_covariance.diagonal(dim1=0, dim2=2).to(rows.device), rows, rows
        )

    def output_covariance(self, layer: str, activations: Tensor, joint: bool) -> Tensor:
        """Covariance of a layer's outputs, ``(samples, m, m)``, or ``(samples * m, samples * m)`` with `joint`."""
        if layer in self.layers:
            return covariance(self.layers[layer], activations, joint)
        rows = as_double(activations)
        weight_covariance = self._dense_covariance(layer)
        if weight_covariance is None:
            return self._by_quadratic_forms(layer, rows, joint)
        weight_covariance = weight_covariance.to(rows.device)
        if joint:
            size = rows.shape[0] * weight_covariance.shape[0]
            return torch.einsum("oipj,si,tj->sotp", weight_covariance, rows, rows).reshape(size, size)
        return torch.einsum("oipj,si,sj->sop", weight_covariance, rows, rows)

    def output_product(self, layer: str, activations: Tensor) -> Callable[[Tensor], Tensor]:
        """Multiplication of ``(samples, m, k)`` by the covariance of a layer's outputs, for activations
        ``(samples, n)``.
        """
        if layer in self.layers:
            return product(self.layers[layer], activations)
        covariance = self.output_covariance(layer, activations, False).to(activations)
        return lambda x: covariance @ x

    def _block_of(self, layer: str) -> tuple[list[Layer], Factor, slice]:
        """The block without a `CovarianceForm` that holds a layer, and the layer's place in it."""
        for layers, factor in self._dense:
            start = 0
            for spec in layers:
                if spec.name == layer:
                    return layers, factor, slice(start, start + spec.parameters)
                start += spec.parameters
        raise AssertionError(f"layer '{layer}' is in no block")

    def _dense_covariance(self, layer: str) -> Tensor | None:
        """Covariance of one layer's weights in a block of several, ``(m, n, m, n)``; None where the block gives only
        quadratic forms.
        """
        if layer not in self._dense_covariances:
            layers, factor, part = self._block_of(layer)
            if not isinstance(factor, DenseFactor):
                return None
            shape = next(spec.matrix_shape[1:] for spec in layers if spec.name == layer)
            self._dense_covariances[layer] = factor.covariance()[part, part].reshape(*shape, *shape)
        return self._dense_covariances[layer]

    def _by_quadratic_forms(self, layer: str, rows: Tensor, joint: bool) -> Tensor:
        """`output_covariance` by quadratic forms, for activations ``(samples, n)`` in float64."""
        layers, factor, part = self._block_of(layer)
        outputs = next(spec.outputs for spec in layers if spec.name == layer)
        size = sum(spec.parameters for spec in layers)
        eye = torch.eye(outputs, dtype=rows.dtype, device=rows.device)

        def covariance_of(activations: Tensor) -> Tensor:
            jacobians = rows.new_zeros(activations.shape[0] * outputs, size)
            jacobians[:, part] = torch.einsum("op,si->sopi", eye, activations).reshape(jacobians.shape[0], -1)
            return as_double(factor.quadratic(_as_block(layers, jacobians))).to(rows.device)

        return covariance_of(rows) if joint else torch.stack([covariance_of(row) for row in rows.split(1)])

    def _contract_dense(
        self,
        layers: list[Layer],
        factor: Factor,
        pulled: dict[str, Pulled],
        samples: int,
        functions: int,
        mode: Mode,
    ) -> Tensor:
        """``J Sigma J^T`` of a block whose layers are correlated; its Jacobian is formed, a few samples at a time."""
        parts = self._dense_parts(layers, factor, pulled, samples, functions, mode == "joint")
        grams = [gram(whitened, mode) for _, _, whitened in parts]
        return grams[0] if mode == "joint" else torch.cat(grams)

    def _dense_parts(
        self,
        layers: list[Layer],
        factor: Factor,
        pulled: dict[str, Pulled],
        samples: int,
        functions: int,
        in_one: bool = False,
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the samples, each with its Jacobian ``(samples, functions, parameters)`` and the whitened Jacobian;
        with `in_one`, one slice of all samples.
        """
        size = sum(layer.parameters for layer in layers)
        # other factors whiten by the quadratic forms of all pairs of rows
        is_dense = isinstance(factor, DenseFactor)
        most = max(1, self._limit // (8 * functions * size)) if is_dense else 1
        step = samples if in_one else most
        for start in range(0, samples, step):
            part = slice(start, min(samples, start + step))
            rows = self._rows(layers, pulled, part, functions)
            whitened = factor.whiten(_as_block(layers, rows.flatten(0, 1)))
            yield part, rows, whitened.reshape(*rows.shape[:2], -1)

    def _rows(self, layers: list[Layer], pulled: dict[str, Pulled], part: slice, functions: int) -> Tensor:
        """The layers' Jacobians side by side, ``(samples, functions, parameters)``; zero for unused layers."""
        columns: list[Tensor] = []
        like = next(iter(pulled.values())).stacked(functions)[part]
        for layer in layers:
            layer_pulled = pulled.get(layer.name)
            if layer_pulled is None:
                columns.append(like.new_zeros(like.shape[0], functions, layer.parameters))
                continue
            gradients = layer_pulled.stacked(functions)[part].flatten(2, 3).transpose(2, 3)
            jacobian = layer_pulled.activations.part(part).gradients(gradients, self._limit)
            jacobian = jacobian.reshape(like.shape[0], layer.groups, functions, layer.outputs, layer.inputs)
            columns.append(jacobian.transpose(1, 2).flatten(2))
        return as_double(torch.cat(columns, dim=2))


def _as_block(layers: list[Layer], jacobians: Tensor) -> Tensor:
    """Jacobians ``(q, parameters)`` in the shape of a block of these layers."""
    shape = layers[0].matrix_shape if len(layers) == 1 else (1, 1, jacobians.shape[1])
    return jacobians.reshape(-1, *shape)


def one_output(outputs: Tensor, indices: Tensor | None) -> Gradient:
    """Gradients of single outputs: number i is the i-th output, or with `indices` each sample's ``indices[:, i]``. The
    number after the last is the mean of all outputs.
    """
    samples, size = outputs.shape[0], outputs[0].numel()
    count = size if indices is None else indices.shape[1]

    def gradient(number: int) -> Tensor:
        unit = torch.zeros(samples, size, dtype=outputs.dtype, device=outputs.device)
        if number == count:
            unit.fill_(1 / size)
        elif indices is None:
            unit[:, number] = 1
        else:
            unit.scatter_(1, indices[:, number : number + 1], 1)
        return unit.reshape(outputs.shape)

    return gradient


def random_signs(outputs: Tensor, numbers: int, generator: torch.Generator) -> Gradient:
    """Gradients of sums of all outputs with random signs, the same for every sample (Rademacher vectors)."""
    shape = (numbers, *outputs.shape[1:])
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu").to(outputs) * 2 - 1

    def gradient(number: int) -> Tensor:
        return signs[number].expand(outputs.shape)

    return gradient


# Which of a posterior's layers a model uses, and which of them is its last.

_COMPARED = 256  # positions at which a layer's outputs are compared with the model's


@dataclass(frozen=True)
class TrackedModel:
    """The posterior's layers as the first batch used them.

    Attributes:
        capture: of the posterior's layers, all by intercepted calls, which several threads can use at once.
        last: the layer whose outputs are the model's, if it is one of them.
    """

    capture: Capture
    last: str | None

    def within(self, rest: nn.Module) -> TrackedModel:
        """The same layers in a model that is the last part of this one, with parameters of the same names."""
        capture = Capture(rest)
        capture.track(list(self.capture.tracked.values()))
        capture.watched = self.capture.watched
        return TrackedModel(capture, self.last)


def track_layers(model: nn.Module, posterior: Posterior, batch: Batch, dtype: torch.dtype) -> TrackedModel:
    """Find the posterior's layers in a pass of the model, and check their caught gradients against autograd.

    Raises:
        PosteriorMismatchError: a layer is used in another way than in the fit.
        UnsupportedLayerError: a layer's caught gradient is not that of autograd.
    """
    autocast = torch.is_autocast_enabled(model_device(model).type)
    chosen = prepare(
        model, batch, lambda name, _: name in posterior.layers, autocast=autocast
    ).capture.tracked
    for name, tracked in chosen.items():
        if tracked.layer != posterior.layers[name]:
            raise PosteriorMismatchError(
                f"Layer '{name}' is {tracked.layer} in the model, and the posterior was fitted on "
                f"{posterior.layers[name]}."
            )
    unused = [name for name in posterior.layers if name not in chosen]
    if unused:
        warn_user(
            f"The model does not use these layers of the posterior for such inputs, so they add no uncertainty: "
            f"{unused}."
        )
    capture = Capture(model)
    capture.track([replace(tracked, engine="hooks", module=None) for tracked in chosen.values()])
    return TrackedModel(capture, _find_last(capture, batch, dtype, posterior.likelihood))


def _find_last(capture: Capture, batch: Batch, dtype: torch.dtype, likelihood: Likelihood) -> str | None:
    """The layer whose outputs are the model's, or None: the numbers agree, and a gradient reaches it unchanged. Where
    outputs have positions, those of every position are the layer's at that position.
    """
    samples = count_samples(batch)
    batch, samples = batch.narrow(0, min(samples, 2), samples), min(samples, 2)
    recording = capture.run(batch, samples)
    outputs = recording.outputs.detach()
    layout = likelihood.positions_of(outputs)
    with torch.autocast(outputs.device.type, enabled=False):
        for name in reversed(list(capture.tracked)):
            if layout is not None and position_rows(recording, capture, name, dtype, layout) is not None:
                break
            if layout is None and output_layer(recording, capture, name, dtype) is not None:
                break
        else:
            return None
        sent = torch.cos(torch.arange(outputs.numel(), device=outputs.device) + 1.0).reshape(outputs.shape)
        sent = sent.to(outputs)
        arrived: list[bool] = []

        def compare(layer_gradients: LayerGradients) -> None:
            if layer_gradients.layer.name == name:
                gradient = layer_gradients.calls[0].output_gradient
                assert gradient is not None
                rows = sent.flatten() if layout is None else layout.rows(sent).flatten()
                if layout is not None and gradient.numel() == sent.numel():
                    gradient = layer_gradients.operands(dtype)[1]
                arrived.append(
                    gradient.numel() == rows.numel() and torch.allclose(gradient.flatten().to(rows), rows)
                )

        recording.pull_back(sent, compare, last=True)
    return name if arrived == [True] else None


def output_layer(recording: Recording, capture: Capture, name: str, dtype: torch.dtype) -> Tensor | None:
    """The activations ``(samples, n)`` of a layer in this pass if its outputs are the model's, else None.

    That is decided by numbers: ``W a`` is recomputed from the layer's input and compared with the model's outputs.
    """
    calls, tracked = recording.calls.get(name, []), capture.tracked[name]
    outputs, layer = recording.outputs.detach(), tracked.layer
    samples, size = outputs.shape[0], outputs[0].numel()
    if len(calls) != 1 or layer.groups != 1 or layer.outputs != size or tracked.batch_axis != 0:
        return None
    model_outputs = outputs.to(dtype).reshape(samples, size)
    if not layer.convolutional:
        if calls[0].input.numel() != samples * calls[0].input.shape[-1]:
            return None
    elif calls[0].input.shape[0] != samples:
        return None
    call = Call(layer, calls[0].input, calls[0].geometry, model_outputs)
    activations, _ = LayerGradients(layer, [call], samples, tracked.batch_axis).operands(dtype)
    if activations.positions != 1:
        return None
    rows = activations.rows()[:, 0, 0]
    return rows if _gives(layer, capture, rows, model_outputs, recording) else None


def position_rows(
    recording: Recording, capture: Capture, name: str, dtype: torch.dtype, layout: Layout
) -> Tensor | None:
    """The activations ``(samples * positions, n)`` of a layer in this pass if its outputs at every position are the
    model's: of a linear layer, or of a pointwise convolution, on the grid of the outputs. Else None.

    That is decided by numbers, as in `output_layer`, at up to `_COMPARED` positions.
    """
    calls, tracked = recording.calls.get(name, []), capture.tracked[name]
    outputs, layer = recording.outputs.detach(), tracked.layer
    if len(calls) != 1 or layer.groups != 1 or layer.outputs != layout.classes(outputs):
        return None
    if tracked.batch_axis != 0 or not layer.pointwise:
        return None
    if grid_of(calls[0]) != layout.positions(outputs) or calls[0].input.shape[0] != outputs.shape[0]:
        return None
    activations = LayerGradients(layer, calls, outputs.shape[0], tracked.batch_axis).activations(dtype)[0]
    if activations.positions != prod(layout.positions(outputs)):
        return None
    rows = activations.rows().flatten(0, 2)
    step = max(1, len(rows) // _COMPARED)
    compared = layout.rows(outputs)[::step].to(dtype)
    return rows if _gives(layer, capture, rows[::step], compared, recording) else None


def _gives(layer: Layer, capture: Capture, rows: Tensor, outputs: Tensor, recording: Recording) -> bool:
    """Whether a layer makes these outputs ``(rows, m)`` of activations ``(rows, n)``."""
    weights = dict(capture.twin.named_parameters())
    bias = None if layer.bias is None else weights[layer.bias]
    matrix = layer.to_matrix(weights[layer.weight], bias)[0].to(rows)
    recomputed = rows @ matrix.T
    # half precision rounds what it multiplies, float32 on a GPU may too
    narrow = torch.finfo(recording.outputs.dtype).eps > 1e-5 or outputs.device.type == "cuda"
    scale = recomputed.abs().amax().clamp(min=torch.finfo(rows.dtype).tiny)
    return bool((recomputed - outputs).abs().amax() <= (2e-2 if narrow else 1e-5) * scale)
