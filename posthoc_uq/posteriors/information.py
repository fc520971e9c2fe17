"""INF, the sparse information form (Lee, Humt, Feng, Triebel 2020): low rank, and an exact diagonal.

One layer keeps ``U_a`` (inputs x a), ``U_g`` (outputs x g), eigenvalues ``(g, a)`` and the Fisher's diagonal
``d``. With ``l = (U_g o U_g) Lambda (U_a o U_a)^T`` and ``L = a g``, its precision is

    P = V V^T + H^-1
    V = diag(vec s) (U_g x U_a) diag(sqrt(scale * lambda))
    H^-1 = scale * omega * D + tau

where ``D = max(d - l, 0)``. Under the correction ``"rescale"``, ``s = min(1, sqrt(d / l))``, so that the diagonal
is exact and the matrix positive semidefinite at every rank; ``"clamp"`` has ``s = 1``, ``"none"`` also ``D = 0``.
V is never formed: products with it are two small matrix products, and everything else goes through the
L x L system ``I + M``, ``M = V^T H V``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.numerics import CHUNK, cholesky, contracted_pairs, pair_index, pairs, solved_plus_one
from posthoc_uq.core.options import Natural
from posthoc_uq.core.records import Record
from posthoc_uq.posteriors.block import (
    GROUPS,
    INPUTS,
    OUTPUTS,
    Block,
    Factor,
    Settings,
    Shape,
    Size,
    Stored,
    Weights,
    combined,
    largest_of,
    log_sum,
    reached,
)
from posthoc_uq.posteriors.covariance import CovarianceForm, InformationRows, LowRank, RowCovariance

Correction = Literal["rescale", "clamp", "none"]

_STIFF = 1e4  # largest entry of I + M from which on draws are made in float64


class InformationFactor(Factor):
    """``P = V V^T + H^-1`` with the Cholesky factor ``R R^T = I + M``; shapes as in `InformationBlock`."""

    def __init__(
        self,
        input_basis: Tensor,
        output_basis: Tensor,
        roots: Tensor,
        shrink: Tensor | None,
        precision: Tensor,
    ) -> None:
        self._input_basis = input_basis
        self._output_basis = output_basis
        self._roots = roots  # sqrt(scale * lambda), (G, g, a)
        self._inverse = precision.reciprocal().to(input_basis)  # H, (G, m, n)
        self._log_diagonal = log_sum(precision)
        self._shrink = shrink  # s, or None for 1
        self._root = cholesky(self._identity_plus_m())

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self._shrink is None else tensor * self._shrink.to(tensor)

    def _project(self, matrices: Tensor) -> Tensor:
        """``V^T x`` for matrices ``(q, G, m, n)``: ``(q, G, L)``."""
        bases = self._output_basis.to(matrices).transpose(-1, -2), self._input_basis.to(matrices)
        return (bases[0] @ self._scaled(matrices) @ bases[1] * self._roots.to(matrices)).flatten(2)

    def _lift(self, cores: Tensor) -> Tensor:
        """``V y`` of cores ``(q, G, L)``: ``(q, G, m, n)``."""
        inner = cores.reshape(cores.shape[0], *self._roots.shape) * self._roots.to(cores)
        bases = self._output_basis.to(cores), self._input_basis.to(cores).transpose(-1, -2)
        lifted = bases[0] @ inner @ bases[1]
        return lifted if self._shrink is None else lifted.mul_(self._shrink.to(lifted))

    def _identity_plus_m(self) -> Tensor:
        """``I + V^T H V`` in float64, ``(G, L, L)``.

        ``S[i, aa'] = sum_j (s^2 H)_ij Ua[j a] Ua[j a']``, then ``M = sum_i Ug[i g] Ug[i g'] S[i, aa']``, over
        ``a <= a'`` and ``g <= g'``.
        """
        groups, width_g, width_a = self._roots.shape
        weights = as_double(self._inverse)
        if self._shrink is not None:
            weights = weights * as_double(self._shrink).square()
        first = contracted_pairs(weights, as_double(self._input_basis))
        # Unpacked on the small side, so that the loop below copies whole (a, a) blocks.
        first = first[..., pair_index(width_a, first.device).flatten()]
        packed = pairs(as_double(self._output_basis)).transpose(-1, -2) @ first
        packed = packed.reshape(groups, packed.shape[1], width_a, width_a)
        index, roots = pair_index(width_g, packed.device), as_double(self._roots)
        full = packed.new_empty(groups, width_g, width_a, width_g, width_a)
        for row in range(width_g):
            block = packed[:, index[row]] * roots.unsqueeze(-2) * roots[:, row].reshape(groups, 1, -1, 1)
            full[:, row] = block.transpose(1, 2)
        full = full.reshape(groups, width_g * width_a, width_g * width_a)
        full.diagonal(dim1=-2, dim2=-1).add_(1.0)
        return full

    def _columns(self, rows: Tensor) -> Tensor:
        """``(q, G, L)`` as columns ``(G, L, q)`` in the factor's precision and place."""
        return rows.permute(1, 2, 0).to(self._root)

    def transform(self, normals: Tensor) -> Tensor:
        # P^-1 = H^1/2 (I + W W^T)^-1 H^1/2 with W = H^1/2 V, and for K = R^-T (I + R)^-1
        # (I - W K W^T)(I - W K W^T)^T = (I + W W^T)^-1. Rounding errors of W^T e are relative to the stiffest
        # direction and reach all others, so that stiff layers are drawn in float64.
        diagonal = self._root.diagonal(dim1=-2, dim2=-1)
        stiff = diagonal.numel() > 0 and float(diagonal.max()) ** 2 > _STIFF
        wide = as_double(normals) if stiff else normals
        half = self._inverse.to(wide).sqrt()
        columns = self._columns(self._project(half * wide))
        columns = solved_plus_one(self._root, columns)
        columns = torch.linalg.solve_triangular(self._root.transpose(-1, -2), columns, upper=True)
        drawn = self._lift(columns.permute(2, 0, 1).to(wide))
        # half * (wide - half * drawn), in place: these are the largest temporaries when a prediction is set up
        return drawn.mul_(half).neg_().add_(wide).mul_(half).to(normals)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        # In float64, as M is: along stiff directions two large numbers cancel.
        wide, inverse = as_double(jacobians), as_double(self._inverse)
        weighted = wide * inverse
        columns = torch.linalg.solve_triangular(
            self._root, self._columns(self._project(weighted)), upper=False
        )
        reduction = torch.einsum("glq,glp->qp", columns, columns)
        return (wide.flatten(1) @ weighted.flatten(1).T - reduction).to(jacobians)

    def form(self) -> CovarianceForm:
        if self._root.numel() == 0:  # no direction was kept
            return CovarianceForm(self._inverse)
        low_rank = LowRank(
            self._input_basis, self._output_basis, self._roots, self._shrink, self._root, self._row_roots
        )
        return CovarianceForm(self._inverse, low_rank=low_rank)

    def log_determinant(self) -> Tensor:
        small = 2 * self._root.diagonal(dim1=-2, dim2=-1).log().sum()
        return small.to(self._log_diagonal) + self._log_diagonal

    def _inverse_columns(self) -> Tensor:
        """``R^-1 diag(sqrt(scale lambda))``, ``(G, L, g, a)``."""
        groups, width_g, width_a = self._roots.shape
        size = width_g * width_a
        eye = torch.eye(size, dtype=self._root.dtype, device=self._root.device).expand(groups, size, size)
        inverse = torch.linalg.solve_triangular(self._root, eye, upper=False)
        return (inverse * as_double(self._roots).flatten(1).unsqueeze(1)).reshape(
            groups, size, width_g, width_a
        )

    def _row_roots(self, inverse: Tensor | None = None) -> Tensor:
        """``T_o``, ``(G, m, a, a)``: row ``o``'s covariance is ``H_o - (s H)_o U_a T_o^T T_o U_a^T (s H)_o``.

        They are triangular factors of ``R^-1 diag(sqrt(scale lambda)) (U_g[o] x I)``. Their squares are accurate where
        an explicit inverse of ``I + M`` would suffer from cancellation.
        """
        inverse = self._inverse_columns() if inverse is None else inverse
        groups, size, _, width_a = inverse.shape
        basis = as_double(self._output_basis)
        roots: list[Tensor] = []
        by_output = inverse.transpose(1, 2).flatten(2)  # (G, g, L a): one product makes all rows of a chunk
        step = max(1, CHUNK // max(1, groups * size * width_a))
        for start in range(0, basis.shape[1], step):
            rows = (basis[:, start : start + step] @ by_output).unflatten(2, (size, width_a))
            roots.append(torch.linalg.qr(rows, mode="r").R)
        return torch.cat(roots, dim=1)

    def _rows(self, roots: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """``T_o U_a^T diag(s H)_o`` for chunks of rows: ``(G, rows, n, a)``."""
        basis = as_double(self._input_basis)
        scaled = self._scaled(as_double(self._inverse))
        step = max(1, CHUNK // max(1, scaled.shape[0] * scaled.shape[2] * basis.shape[-1]))
        for start in range(0, scaled.shape[1], step):
            rows = slice(start, start + step)
            lifted = basis.unsqueeze(1) @ roots[:, rows].transpose(-1, -2)
            yield rows, lifted * scaled[:, rows].unsqueeze(-1)

    def variance(self) -> Tensor:
        return self._variance(self._row_roots())

    def _variance(self, roots: Tensor) -> Tensor:
        inverse = as_double(self._inverse)
        variances = inverse.clone()
        for rows, lifted in self._rows(roots):
            variances[:, rows] -= lifted.square().sum(-1)
        # A diagonal entry of an inverse is at least the inverse of the diagonal entry.
        low_rank = as_double(self._output_basis).square() @ as_double(self._roots).square()
        low_rank = low_rank @ as_double(self._input_basis).square().transpose(-1, -2)
        floor = 1 / (1 / inverse + self._scaled(self._scaled(low_rank)))
        return torch.maximum(variances, floor).to(self._inverse)

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        columns = self._inverse_columns()
        roots = self._row_roots(columns)
        return InformationRows(
            self._variance(roots),
            self._inverse,
            self._scaled(as_double(self._inverse)),
            self._input_basis,
            self._output_basis,
            roots,
            columns,
        )

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._inverse, self._root))


class InformationFields(Record):
    """The correction, and how many directions are kept on each side."""

    correction: Correction
    input_directions: Natural
    output_directions: Natural


_INPUT_DIRECTIONS = Size("input_directions", 0, INPUTS)
_OUTPUT_DIRECTIONS = Size("output_directions", 0, OUTPUTS)


@dataclass(eq=False, repr=False)
class InformationBlock(Block):
    """What INF stores of one layer.

    Args:
        input_basis: ``U_a``, ``(G, n, a)``.
        output_basis: ``U_g``, ``(G, m, g)``.
        eigenvalues: ``(G, g, a)``; groups that keep fewer directions are padded with zeros.
        diagonal: ``d``, ``(G, m, n)``.
        correction: ``"rescale"``, ``"clamp"`` or ``"none"``.
    """

    kind = "inf"
    makes = InformationFactor
    per_weight_prior = True
    tunable: ClassVar[frozenset[str]] = Block.tunable | {"residual_weight"}
    fields: ClassVar[type[Record]] = InformationFields

    input_basis: Annotated[Tensor, Stored(GROUPS, INPUTS, _INPUT_DIRECTIONS, orthonormal=True, padded=True)]
    output_basis: Annotated[
        Tensor, Stored(GROUPS, OUTPUTS, _OUTPUT_DIRECTIONS, orthonormal=True, padded=True)
    ]
    eigenvalues: Annotated[Tensor, Stored(GROUPS, _OUTPUT_DIRECTIONS, _INPUT_DIRECTIONS, non_negative=True)]
    diagonal: Annotated[Tensor, Stored(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    correction: Correction

    def __post_init__(self) -> None:
        self._kept: tuple[Tensor | None, Tensor] | None = None

    def low_rank_diagonal(self) -> Tensor:
        """``l``, the diagonal of the low-rank part before any correction, ``(G, m, n)``, in float64.

        ``D`` is the difference of ``l`` and ``d``; its rounding error is multiplied by the scale.
        """
        inner = as_double(self.output_basis).square() @ as_double(self.eigenvalues)
        return inner @ as_double(self.input_basis).square().transpose(-1, -2)

    def shrink(self, low_rank: Tensor | None = None) -> Tensor | None:
        """``s``, ``(G, m, n)``, or None where it is 1 everywhere; `low_rank` is ``l`` where it is known."""
        if self.correction != "rescale":
            return None
        low_rank = self.low_rank_diagonal() if low_rank is None else low_rank
        ratio = as_double(self.diagonal) / low_rank.clamp(min=torch.finfo(low_rank.dtype).tiny)
        return torch.where(low_rank > 0, ratio.sqrt_().clamp_(max=1.0), 1.0).to(self.diagonal)

    def residual(self, low_rank: Tensor | None = None) -> Tensor:
        """``D``, ``(G, m, n)``, in float64; `low_rank` is ``l`` where it is known."""
        if self.correction == "none":
            return torch.zeros_like(as_double(self.diagonal))
        low_rank = self.low_rank_diagonal() if low_rank is None else low_rank
        return (as_double(self.diagonal) - low_rank).clamp_(min=0)

    def _parts(self) -> tuple[Tensor | None, Tensor]:
        """``s`` and ``D``, which no setting changes."""
        if self._kept is not None:
            return self._kept
        low_rank = None if self.correction == "none" else self.low_rank_diagonal()
        return self.shrink(low_rank), self.residual(low_rank)

    def kept_bytes(self) -> int:
        return self.diagonal.numel() * (8 + self.diagonal.element_size())

    @contextmanager
    def kept_parts(self) -> Generator[None]:
        self._kept = self._parts()
        try:
            yield
        finally:
            self._kept = None

    def factor(self, settings: Settings) -> InformationFactor:
        shrink, residual = self._parts()
        precision = settings.scale * (residual * settings.residual_weight) + settings.prior_precision
        roots = self.eigenvalues.sqrt() * settings.scale**0.5
        return InformationFactor(self.input_basis, self.output_basis, roots, shrink, precision)

    def fault(self) -> str | None:
        nonzero = self.eigenvalues != 0
        for name, basis, needed in (
            ("input_basis", self.input_basis, nonzero.any(-2)),
            ("output_basis", self.output_basis, nonzero.any(-1)),
        ):
            if bool((needed & (basis == 0).all(-2)).any()):
                return f"has an eigenvalue along a direction of '{name}' that is zero"
        return None

    def largest_value(self, settings: Settings) -> float:
        return reached(settings, largest_of(self.eigenvalues, self.diagonal))

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> InformationBlock:
        return InformationBlock(
            self.input_basis,
            self.output_basis,
            combined(self.eigenvalues, part["eigenvalues"], weights, "low rank"),
            combined(self.diagonal, part["diagonal"], weights, "diagonal"),
            self.correction,
        )

    def covered(self, part: Mapping[str, Tensor]) -> tuple[float, float] | None:
        return float(as_double(part["eigenvalues"]).sum()), float(as_double(part["diagonal"]).sum())

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        vectors = torch.einsum("gop,giq->goipq", self.output_basis, self.input_basis).flatten(3).flatten(1, 2)
        shrink = self.shrink()
        if shrink is not None:
            vectors = vectors * shrink.flatten(1).unsqueeze(-1)
        low_rank = (vectors * self.eigenvalues.flatten(1).unsqueeze(1)) @ vectors.transpose(-1, -2)
        residual = self.residual().to(low_rank).flatten(1)
        return scale * (low_rank + residual_weight * torch.diag_embed(residual))

    columns: ClassVar[Mapping[str, str]] = {
        "a, g, kept": "input and output directions of the low rank, and how many of its a times g eigenvalues are not "
        "zero",
        "corrected": "share of the weights whose information the low rank overstates, so that it is corrected",
        "change": "size of that correction, relative to the exact diagonal (Frobenius norms)",
    }

    def summary(self) -> dict[str, Any]:
        diagonal = as_double(self.diagonal)
        excess = (self.low_rank_diagonal() - diagonal).clamp(min=0)
        norm = torch.linalg.vector_norm(diagonal).clamp(min=torch.finfo(excess.dtype).tiny)
        return {
            "a": self.eigenvalues.shape[-1],
            "g": self.eigenvalues.shape[-2],
            "kept": int((self.eigenvalues > 0).sum()),
            "corrected": 0.0 if self.correction == "none" else float((excess > 0).float().mean()),
            "change": 0.0 if self.correction == "none" else float(torch.linalg.vector_norm(excess) / norm),
        }
