"""The covariance of a layer's weights as the linearised head and as the moments head contract it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posthoc_uq.core.devices import as_double, placed

# The covariance of one layer's weights as a diagonal minus a low-rank part, with which Jacobians are
# contracted.


@dataclass(frozen=True)
class LowRank:
    """The part that is subtracted: ``diag(s w) U D B^-1 D U^T diag(s w)`` with ``U = U_g x U_a``, ``D = diag(roots)``
    and ``B = R R^T``.

    Attributes:
        input_basis: ``U_a``, ``(G, n, a)``.
        output_basis: ``U_g``, ``(G, m, g)``.
        roots: ``(G, g, a)``.
        shrink: ``s``, ``(G, m, n)``, or None for 1.
        root: ``R``, lower triangular, ``(G, g a, g a)`` in float64.
        row_roots: computes ``T``, ``(G, m, a, a)``: the part subtracted for the weights of output ``o`` is
            ``diag(s w)_o U_a T_o^T T_o U_a^T diag(s w)_o``.
    """

    input_basis: Tensor
    output_basis: Tensor
    roots: Tensor
    shrink: Tensor | None
    root: Tensor
    row_roots: Callable[[], Tensor]


@dataclass(frozen=True)
class CovarianceForm:
    """``Sigma = (Q_G x Q_A) (diag w - low rank) (Q_G x Q_A)^T`` of one layer.

    Attributes:
        weights: ``w``, ``(G, m, n)``.
        bases: orthogonal ``Q_A`` ``(G, n, n)`` and ``Q_G`` ``(G, m, m)``, or None for the identity.
        low_rank: or None; a form has either this or bases.
    """

    weights: Tensor
    bases: tuple[Tensor, Tensor] | None = None
    low_rank: LowRank | None = None


# Variance and covariance that a layer's weights give to its outputs ``y = W x``, by family of posteriors.
#
# Row ``o`` of W has the posterior covariance ``S_oo``. Inputs of mean ``m`` and variance ``v`` therefore give
# ``Var(y_o) = m^T S_oo m + sum_k v_k [S_oo]_kk``, and ``Cov(y_o, y_o') = tr(S_oo' (m m^T + C))`` across
# outputs. All that depends on the posterior alone is computed once and kept. The first dimension of all
# tensors is the layer's groups (G); inputs include the bias's column.

_CHUNK = 2**22  # numbers in a temporary of the contractions below
_PROBE = torch.float32  # a type that every device has


class RowCovariance(nn.Module):
    """Covariance of the rows of a layer's weight matrix."""

    marginal: Tensor  # (G, m, n)

    def __init__(self, marginal: Tensor) -> None:
        super().__init__()
        self.register_buffer("marginal", marginal)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowCovariance:
        """Move with the predictor, in the same precision; float64 goes to the CPU if the device does not have it."""
        return super()._apply(
            lambda tensor: placed(tensor, fn(tensor.new_empty(0, dtype=_PROBE)).device), recurse
        )

    def twin(self) -> RowCovariance:
        """Another module with the same tensors, which moves by itself."""
        twin = copy.copy(self)
        twin._buffers = dict(self._buffers)
        inner = {
            name: module.twin() for name, module in self._modules.items() if isinstance(module, RowCovariance)
        }
        twin._modules = {**self._modules, **inner}
        return twin

    def variances_only(self) -> RowCovariance:
        """This, without what `covariance` alone needs."""
        return self

    def bytes(self) -> int:
        """Memory that it holds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.buffers())

    @abstractmethod
    def quadratic(self, mean: Tensor) -> Tensor:
        """``m^T S_oo m``, ``(rows, G, m)``, of inputs ``(rows, G, n)``."""

    @abstractmethod
    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        """``tr(S_oo' (m m^T + C))``, ``(rows, m, m)``, for inputs ``(rows, n)`` with covariances ``(rows, n, n)``, or
        None for certain inputs; for layers of one group.
        """

    def variance(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """``(rows, G, m)`` for inputs ``(rows, G, n)`` with these variances; None for certain inputs."""
        from_mean = self.quadratic(mean)
        if variance is None:
            return from_mean
        return from_mean + torch.einsum("goi,rgi->rgo", self.marginal.to(variance), variance).to(from_mean)


class IndependentRows(RowCovariance):
    """Every weight independent of every other."""

    def quadratic(self, mean: Tensor) -> Tensor:
        return torch.einsum("goi,rgi->rgo", self.marginal.to(mean), mean.square())

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        second = mean.square()
        if covariance is not None:
            second = second + covariance.diagonal(dim1=1, dim2=2)
        return torch.diag_embed(second @ self.marginal[0].to(second).T)


class EigenbasisRows(RowCovariance):
    """``S = (U_G x U_A) diag(1 / P) (U_G x U_A)^T``: KFAC and EFB."""

    input_basis: Tensor
    output_basis: Tensor
    inverse: Tensor
    table: Tensor

    def __init__(self, marginal: Tensor, input_basis: Tensor, output_basis: Tensor, inverse: Tensor) -> None:
        super().__init__(marginal)
        self.register_buffer("input_basis", input_basis)
        self.register_buffer("output_basis", output_basis)
        self.register_buffer("inverse", inverse)
        self.register_buffer("table", output_basis.square() @ inverse)

    def quadratic(self, mean: Tensor) -> Tensor:
        squares = torch.einsum("rgi,gia->rga", mean, self.input_basis.to(mean)).square()
        return torch.einsum("goa,rga->rgo", self.table.to(mean), squares)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        basis, outer = self.input_basis[0].to(mean), self.output_basis[0].to(mean)
        squares = (mean @ basis).square()
        if covariance is not None:
            squares = squares + torch.einsum("ia,rij,ja->ra", basis, covariance, basis)
        directions = squares @ self.inverse[0].to(mean).T  # variance along each direction of the output basis
        return (outer * directions.unsqueeze(1)) @ outer.T


class InformationRows(RowCovariance):
    """``S_oo = H_o - (s H)_o U_a T_o^T T_o U_a^T (s H)_o``: INF, in float64, because along stiff directions two large
    numbers cancel.
    """

    inverse: Tensor
    shrunk: Tensor
    input_basis: Tensor
    row_roots: Tensor
    columns: Tensor
    output_basis: Tensor

    def __init__(
        self,
        marginal: Tensor,
        inverse: Tensor,
        shrunk: Tensor,
        input_basis: Tensor,
        output_basis: Tensor,
        row_roots: Tensor,
        columns: Tensor,
    ) -> None:
        """
        Args:
            inverse: H, ``(G, m, n)``.
            shrunk: s H, ``(G, m, n)``.
            input_basis: ``U_a``, ``(G, n, a)``.
            output_basis: ``U_g``, ``(G, m, g)``.
            row_roots: ``T_o``, ``(G, m, a, a)``.
            columns: ``R^-1 diag(sqrt(scale lambda))``, ``(G, L, g, a)``.
        """
        super().__init__(marginal)
        for name, tensor in (
            ("inverse", inverse),
            ("shrunk", shrunk),
            ("input_basis", input_basis),
            ("output_basis", output_basis),
            ("row_roots", row_roots),
            ("columns", columns),
        ):
            self.register_buffer(name, as_double(tensor))

    def variances_only(self) -> RowCovariance:
        """This, without the columns of the whole low rank, which are most of its memory."""
        twin = self.twin()
        twin._buffers["columns"] = self.columns.new_empty(0)
        return twin

    def quadratic(self, mean: Tensor) -> Tensor:
        wide = as_double(mean)
        diagonal = torch.einsum("goi,rgi->rgo", self.inverse, wide.square())
        groups, outputs, width, _ = self.row_roots.shape
        step = max(1, _CHUNK // max(1, groups * width * max(outputs, self.shrunk.shape[2])))
        # Under a tracer the number of rows is a symbol, and the rows are not split.
        split = wide.split(step) if isinstance(wide.shape[0], int) and wide.shape[0] > step else (wide,)
        parts: list[Tensor] = []
        for part in split:
            columns = (part.unsqueeze(3) * self.input_basis).permute(1, 2, 0, 3).flatten(2)  # (G, n, rows a)
            reached = (self.shrunk @ columns).reshape(
                groups, outputs, part.shape[0], width
            )  # (G, m, rows, a)
            parts.append((reached @ self.row_roots.transpose(-1, -2)).square().sum(-1))
        low_rank = torch.cat(parts, dim=2).permute(2, 0, 1)
        # Where the data leave no variance, rounding may give a little less than zero.
        return (diagonal - low_rank).clamp(min=0).to(mean)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        wide = as_double(mean)
        inverse, shrunk, basis = self.inverse[0], self.shrunk[0], self.input_basis[0]
        second = wide.square()
        if covariance is not None:
            second = second + as_double(covariance.diagonal(dim1=1, dim2=2))
        result = torch.diag_embed(second @ inverse.T)
        moment = wide.unsqueeze(2) * wide.unsqueeze(1)
        if covariance is not None:
            moment = moment + as_double(covariance)
        outputs, inputs = inverse.shape
        columns = self.columns[0]
        step = max(1, _CHUNK // max(1, outputs * inputs))
        for start in range(0, columns.shape[0], step):
            # Rows q_ol of the low-rank part: S_oo' has - sum_l q_ol q_o'l^T.
            mixed = torch.einsum("og,lga->loa", self.output_basis[0], columns[start : start + step])
            rows = (mixed @ basis.T) * shrunk
            if covariance is None:
                reached = torch.einsum("loi,ri->rlo", rows, wide)
                result = result - reached.transpose(1, 2) @ reached
            else:
                for row in rows:
                    result = result - row @ moment @ row.T
        return result.to(mean)


class DenseRows(RowCovariance):
    """Blocks of an explicit covariance, ``(G, m, G, m, n, n)`` by pairs of rows."""

    pairs: Tensor

    def __init__(self, marginal: Tensor, covariance: Tensor) -> None:
        """
        Args:
            covariance: ``(G m n, G m n)`` of this layer.
        """
        super().__init__(marginal)
        groups, outputs, inputs = marginal.shape
        pairs = covariance.reshape(groups * outputs, inputs, groups * outputs, inputs)
        self.register_buffer("pairs", pairs.permute(0, 2, 1, 3).contiguous())

    def quadratic(self, mean: Tensor) -> Tensor:
        groups, outputs, inputs = self.marginal.shape
        rows = self.pairs.diagonal(dim1=0, dim2=1).permute(2, 0, 1).to(mean)
        rows = rows.reshape(groups, outputs, inputs, inputs)
        return torch.einsum("rgi,goij,rgj->rgo", mean, rows, mean)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        moment = mean.unsqueeze(2) * mean.unsqueeze(1)
        if covariance is not None:
            moment = moment + covariance
        return torch.einsum("opij,rij->rop", self.pairs.to(mean), moment)
