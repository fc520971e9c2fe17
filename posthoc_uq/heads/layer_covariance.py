"""The covariance of one layer's weights, prepared for products with Jacobians.

``Sigma = diag w - low rank`` in the posterior's bases, see `CovarianceForm`. The low rank is
``diag(s w) U D B^-1 D U^T diag(s w)`` with ``U = U_g x U_a`` and ``B = R R^T``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from posthoc_uq.devices import as_double, placed
from posthoc_uq.heads.cancellation import LEAST_SHARE, Checked, Contracted, precise
from posthoc_uq.heads.products import Mode, gram, marginal
from posthoc_uq.posteriors.covariance_form import CovarianceForm

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
