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

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.devices import as_double, on_device
from posthoc_uq.core.numerics import cholesky, constant
from posthoc_uq.layers.operands import TOUCH_COST, Operand, chunks
from posthoc_uq.likelihoods.draws import OutputCovariance
from posthoc_uq.posteriors.block import (
    GROUPS,
    INPUTS,
    OUTPUTS,
    Block,
    PrecisionSettings,
    Size,
    TensorField,
)
from posthoc_uq.posteriors.covariance import (
    MIN_SHARE,
    Checked,
    Contracted,
    Covariance,
    Independent,
    Mode,
    gram,
    is_all,
    joined,
    joined_rows,
    pairs_of,
    precise,
    precise_values,
    variances_in,
)

Correction = Literal["rescale", "clamp", "none"]

_MIN_STIFF = 1e4  # largest entry of I + M from which on draws are made in float64
_MAX_FLOAT32 = (
    4.0  # largest eigenvalue of M for which a float32 factor of I + M has no error beside float32 products
)
_MAX_PRODUCT = 400  # directions up to which a product with R^-1 is 2 to 5 times faster than a solve
_ROOT_BLOCKS = 4  # of rows of a triangular root, of which each leaves out the columns that are 0
# with more rows than this for each of a layer's inputs, covariances are formed for the variances, if ...
_MIN_ROWS_PER_INPUT = 4
_BATCHES = 8  # of one posterior, for which what is formed for them has to pay
_MAX_PAIRS = 2**20  # numbers of the covariance of a layer that is formed for rows of one position
_MAX_NUMBERS = 2**24  # ... they have at most so many numbers
_MAX_ROW_BYTES = 2**24  # of the temporaries of rows that are computed at once
_CHUNK = 2**20  # numbers in a temporary of a contraction
_CACHED = 2**18  # numbers of a product that stay in the cache
_SOLVED_ROWS = 256  # in one step of `_solved_plus_one`


class _Narrow(NamedTuple):
    """What a contraction in the activations' precision takes of the low rank.

    Attributes:
        inputs: ``U_a^T``, ``(G, a, n)``.
        outputs: ``U_g^T``, ``(G, g, m)``.
        kept: places of the entries in the grid of these directions, or None for all.
        root: ``R`` of these entries.
        roots: ``D`` of them, ``(G, L)``.
        product: ``(R^-1 D)^T`` of a layer of one group, where a product with it is faster than a solve.
    """

    inputs: Tensor
    outputs: Tensor
    kept: Tensor | None
    root: Tensor
    roots: Tensor
    product: Tensor | None


class LowRankDiagonal(Independent):
    """``P = V V^T + H^-1`` with the Cholesky factor ``R R^T = I + M``; shapes as in `InformationBlock`.

    Its inverse is a diagonal less a low rank, ``Sigma = diag w - diag(s w) U D B^-1 D U^T diag(s w)`` with ``w = H``,
    ``U = U_g x U_a``, ``D = diag sqrt(scale * lambda)`` and ``B = I + M``. For an output gradient ``g`` and an
    activation ``a`` the low rank needs ``z = R^-1 D (U_g x U_a)^T (s w g a^T) = R^-1 D sum_o g_o U_g[o] x h_o`` with
    ``h_o = U_a^T diag(s w)_o a``, which no output of the model enters.

    Two large numbers cancel along stiff directions. Products are in the activations' precision. A sample of which less
    than a hundredth of the diagonal's part is left is computed again in float64.
    """

    correlated = True
    cancels = True

    def __init__(
        self,
        input_basis: Tensor,
        output_basis: Tensor,
        roots: Tensor,
        shrink: Tensor | None,
        precision: Tensor,
    ) -> None:
        super().__init__(precision, input_basis)  # its weights are H, (G, m, n)
        self._input_basis, self._output_basis = input_basis, output_basis
        self._roots = roots  # sqrt(scale * lambda), (G, g, a)
        self._shrink = shrink  # s, or None for 1
        self.width = roots.shape[-1] if roots.numel() else 0

    def _scaled(self, tensor: Tensor, rows: slice = slice(None)) -> Tensor:
        """Some rows ``(..., rows, n)`` times ``s``."""
        if self._shrink is None:
            return tensor
        shrink = self._shrink if is_all(rows, self._shrink.shape[1]) else self._shrink[:, rows]
        return tensor * shrink.to(tensor)

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

    @constant
    def _root(self) -> Tensor:
        """``R``, ``(G, L, L)``."""
        return cholesky(self._identity_plus_m())

    @property
    def computed_bytes(self) -> int:
        return 8 * self._roots.shape[0] * self._roots[0].numel() ** 2

    def _identity_plus_m(self, entries: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """``I + V^T H V``, ``(G, L, L)``, or of a layer of one group the rows and columns of some entries.

        ``S[i, aa'] = sum_j (s^2 H)_ij Ua[j a] Ua[j a']``, then ``M = sum_i Ug[i g] Ug[i g'] S[i, aa']``, or the sums in
        the other order, over ``a <= a'`` and ``g <= g'``.
        """
        groups, width_g, width_a = self._roots.shape
        inputs, outputs = as_double(self._input_basis).to(dtype), as_double(self._output_basis).to(dtype)
        pairs_g, pairs_a = width_g * (width_g + 1) // 2, width_a * (width_a + 1) // 2
        size_g, size_a = outputs.shape[1], inputs.shape[1]
        # of many outputs with few inputs, sums over the outputs come first: fewer numbers are then summed over
        outputs_first = pairs_g * size_a * (size_g + pairs_a) < pairs_a * size_g * (size_a + pairs_g)
        packed = inputs.new_zeros(groups, pairs_g, size_a if outputs_first else pairs_a)
        step = max(1, _CHUNK // max(1, groups * (pairs_g + packed.shape[2])))
        for start in range(0, size_g, step):  # rows may be the words of a vocabulary
            rows = slice(start, start + step)
            weights = as_double(self.weights[:, rows]).to(dtype)
            if self._shrink is not None:
                weights = weights * as_double(self._shrink[:, rows]).to(dtype).square()
            weights = weights if outputs_first else _contracted_pairs(weights, inputs)
            packed += _pairs(outputs[:, rows]).transpose(-1, -2) @ weights
        packed = _contracted_pairs(packed, inputs) if outputs_first else packed
        unpacked = _pair_index(width_a, packed.device).flatten()
        index, roots = _pair_index(width_g, packed.device), as_double(self._roots).to(dtype)
        if entries is not None:
            of_outputs, of_inputs = entries // width_a, entries % width_a
            # whole rows of places are picked, which is faster than single ones
            places = (index * packed.shape[2])[:, of_outputs][of_outputs]
            places += unpacked.view(width_a, width_a)[:, of_inputs][of_inputs]
            chosen = packed.flatten(1).index_select(1, places.flatten()).view(1, *places.shape)
            own = roots.flatten(1)[:, entries]
            chosen.mul_(own.unsqueeze(1)).mul_(own.unsqueeze(2)).diagonal(dim1=1, dim2=2).add_(1.0)
            return chosen
        full = packed.new_empty(groups, width_g, width_a, width_g, width_a)
        for row in range(width_g):
            block = packed[:, index[row]].index_select(2, unpacked).unflatten(2, (width_a, width_a))
            block.mul_(roots.unsqueeze(-2)).mul_(roots[:, row].reshape(groups, 1, -1, 1))
            full[:, row] = block.transpose(1, 2)
        full = full.reshape(groups, width_g * width_a, width_g * width_a)
        full.diagonal(dim1=-2, dim2=-1).add_(1.0)
        return full

    def _as_columns(self, rows: Tensor) -> Tensor:
        """``(q, G, L)`` as columns ``(G, L, q)`` in the factor's precision and place."""
        return rows.permute(1, 2, 0).to(self._root)

    def transform(self, normals: Tensor) -> Tensor:
        # P^-1 = H^1/2 (I + W W^T)^-1 H^1/2 with W = H^1/2 V, and for K = R^-T (I + R)^-1
        # (I - W K W^T)(I - W K W^T)^T = (I + W W^T)^-1. Rounding errors of W^T e are relative to the stiffest
        # direction and reach all others, so that stiff layers are drawn in float64.
        wide = as_double(normals) if self._stiff else normals
        half = self.weights.to(wide).sqrt()
        columns = self._as_columns(self._project(half * wide))
        columns = _solved_plus_one(self._root, columns)
        columns = torch.linalg.solve_triangular(self._root.transpose(-1, -2), columns, upper=True)
        drawn = self._lift(columns.permute(2, 0, 1).to(wide))
        # half * (wide - half * drawn), in place: these are the largest temporaries when a prediction is set up
        return drawn.mul_(half).neg_().add_(wide).mul_(half).to(normals)

    def times_precision(self, matrices: Tensor) -> Tensor:
        return self._lift(self._project(matrices)) + matrices / as_double(self.weights)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        # In float64, as M is: along stiff directions two large numbers cancel.
        wide, inverse = as_double(jacobians), as_double(self.weights)
        weighted = wide * inverse
        columns = torch.linalg.solve_triangular(
            self._root, self._as_columns(self._project(weighted)), upper=False
        )
        reduction = torch.einsum("glq,glp->qp", columns, columns)
        return (wide.flatten(1) @ weighted.flatten(1).T - reduction).to(jacobians)

    def log_determinant(self) -> Tensor:
        small = 2 * self._root.diagonal(dim1=-2, dim2=-1).log().sum()
        return small.to(self._log_determinant) + self._log_determinant

    def _inverse_columns(self) -> Tensor:
        """``R^-1 diag(sqrt(scale lambda))``, ``(G, L, g, a)``."""
        groups, width_g, width_a = self._roots.shape
        size = width_g * width_a
        eye = torch.eye(size, dtype=self._root.dtype, device=self._root.device).expand(groups, size, size)
        inverse = torch.linalg.solve_triangular(self._root, eye, upper=False)
        return (inverse * as_double(self._roots).flatten(1).unsqueeze(1)).reshape(
            groups, size, width_g, width_a
        )

    @constant
    def _stiff(self) -> bool:
        """Whether some direction is so much stiffer than the others that squares would lose what it leaves."""
        diagonal = self._root.diagonal(dim1=-2, dim2=-1)
        return diagonal.numel() > 0 and float(diagonal.max()) ** 2 > _MIN_STIFF

    @constant
    def row_roots(self) -> Tensor:
        """``T_o``, ``(G, m, a, a)``: row ``o``'s covariance is ``H_o - (s H)_o U_a T_o^T T_o U_a^T (s H)_o``.

        They are triangular factors of ``R^-1 diag(sqrt(scale lambda)) (U_g[o] x I)``, or, in a fraction of the time, of
        its squares ``sum_gg' U_g[o g] U_g[o g'] N_gg'`` with the blocks of ``N = D B^-1 D``, where these do not suffer
        from cancellation.
        """
        inverse, basis = self._inverse_columns(), as_double(self._output_basis)
        groups, size, width_g, width_a = inverse.shape
        if not self._stiff:
            # by squares: the blocks of N once, then one small product for each output
            columns = inverse.reshape(groups, size, size)
            blocks = (columns.transpose(1, 2) @ columns).reshape(groups, width_g, width_a, width_g, width_a)
            blocks = _packed(blocks.permute(0, 2, 4, 1, 3))
            first, second = torch.triu_indices(width_a, width_a, device=blocks.device)
            halves = (blocks[:, first, second] + blocks[:, second, first]) / 2
            squares = _pairs(basis) @ halves.transpose(1, 2)  # of a <= a'
            squares = squares[..., _pair_index(width_a, blocks.device)]
            # as much as rounding may have taken from them
            rounding = squares.diagonal(dim1=2, dim2=3).sum(2) * 4 * torch.finfo(squares.dtype).eps
            squares.diagonal(dim1=2, dim2=3).add_(
                rounding.clamp(min=torch.finfo(squares.dtype).tiny).unsqueeze(2)
            )
            return cholesky(squares).transpose(2, 3)
        # Squares would lose half of the digits: the factors themselves, by a QR decomposition for each output.
        roots: list[Tensor] = []
        by_output = inverse.transpose(1, 2).flatten(2)  # (G, g, L a): one product makes all rows of a chunk
        step = max(1, _CHUNK // max(1, groups * size * width_a))
        for part in basis.split(step, 1):
            rows = (part @ by_output).unflatten(2, (size, width_a))
            roots.append(torch.linalg.qr(rows, mode="r").R)
        return torch.cat(roots, dim=1)

    def variance(self) -> Tensor:
        return self._variances

    @constant
    def _variances(self) -> Tensor:
        inverse, roots = as_double(self.weights), self.row_roots
        variances, basis, scaled = inverse.clone(), as_double(self._input_basis), self._scaled(inverse)
        step = max(1, _CHUNK // max(1, scaled.shape[0] * scaled.shape[2] * basis.shape[-1]))
        for start in range(0, scaled.shape[1], step):
            rows = slice(start, start + step)
            lifted = basis.unsqueeze(1) @ roots[:, rows].transpose(-1, -2)  # T_o U_a^T, (G, rows, n, a)
            variances[:, rows] -= (lifted * scaled[:, rows].unsqueeze(-1)).square().sum(-1)
        # A diagonal entry of an inverse is at least the inverse of the diagonal entry.
        low_rank = as_double(self._output_basis).square() @ as_double(self._roots).square()
        low_rank = low_rank @ as_double(self._input_basis).square().transpose(-1, -2)
        floor = 1 / (1 / inverse + self._scaled(self._scaled(low_rank)))
        return torch.maximum(variances, floor).to(self.weights)

    # What is prepared once

    @constant
    def _wide(self) -> tuple[Tensor, Tensor]:
        """``w`` and ``s w`` in float64."""
        weights = as_double(self.weights)
        return weights, self._scaled(weights)

    @constant
    def narrow(self) -> _Narrow:
        """For contractions in the activations' precision.

        Without some of its entries the low rank gives a larger covariance, but every variance by at most the share
        ``scale lambda max(s^2 w)`` with the largest eigenvalue that is left out. Those that change no digit of that
        precision are.
        """
        groups = self._roots.shape[0]
        largest = as_double(self._scaled(self._scaled(self.weights))).amax()
        bounds = as_double(self._roots).square() * largest  # the largest is one of M's eigenvalues
        kept = bounds > 2 * torch.finfo(self.dtype).eps
        wide = self.dtype == torch.float64 or float(bounds.max()) > _MAX_FLOAT32
        dtype = torch.float64 if wide else torch.float32
        # R is not kept here: it takes more memory than all else, and few samples are computed again with it
        root = vars(self).pop("_root", None)
        root = root if wide else None  # what was computed before changes no prediction
        roots, places = as_double(self._roots).flatten(1), None
        inputs, outputs = self._input_basis.transpose(1, 2), self._output_basis.transpose(1, 2)
        if groups == 1 and not bool(kept.all()):
            of_inputs, of_outputs = kept[0].any(0), kept[0].any(1)
            places = kept[0][of_outputs][:, of_inputs].flatten().nonzero().flatten().to(self.device)
            inputs, outputs = (
                inputs[:, of_inputs.to(inputs.device)],
                outputs[:, of_outputs.to(outputs.device)],
            )
            places = None if len(places) == inputs.shape[1] * outputs.shape[1] else places
            whole = kept.flatten().nonzero().flatten()
            roots = roots[:, whole]
            if root is None:
                matrix = self._identity_plus_m(whole, dtype)  # most of all entries are zero
            else:
                matrix = root[:, whole.to(root.device)]
                matrix = matrix @ matrix.transpose(1, 2)
            root = cholesky(matrix)
        elif root is None:
            root = cholesky(self._identity_plus_m(None, dtype))
        roots = roots.to(root)
        product = None
        # a product has the error bound of a solve in this precision; D scales the rows of R
        if groups == 1 and root.shape[-1] <= _MAX_PRODUCT:
            columns = torch.diag_embed(roots)
            product = torch.linalg.solve_triangular(root, columns, upper=False)[0].T
        narrow = [
            tensor.to(self.device, self.dtype).contiguous()
            for tensor in (inputs, outputs, *((root, roots) if product is None else (product,)))
        ]
        if product is None:
            return _Narrow(narrow[0], narrow[1], places, narrow[2], narrow[3], None)
        return _Narrow(narrow[0], narrow[1], places, root, roots, narrow[2])

    @constant
    def wide_reduction(self) -> Tensor:
        """``R^-1 D`` in float64, ``(G, L, L)``, for a tracer: not every program has triangular solves."""
        return self._inverse_columns().flatten(2)

    def traceable(self, shape: tuple[int, int, int], covariances: bool) -> Covariance:
        if self.width:
            _ = self.wide_reduction
        return super().traceable(shape, covariances)

    @constant
    def wide_rows(self) -> tuple[Tensor, Tensor]:
        """Of a layer of one group in float64 ``diag(s w)_o U_a`` of all outputs, side by side ``(n, m a)``, and
        ``R^-1 D (U_g[o] x 1)``, ``(m, a, L)``: what the low rank takes from the covariance of two outputs is the
        product of what these make of activations.
        """
        basis, outputs = as_double(self._input_basis[0]), as_double(self._output_basis[0])
        turned = (self._wide[1][0].T.unsqueeze(2) * basis.unsqueeze(1)).flatten(1)
        return turned, torch.einsum("og,lga->oal", outputs, self._inverse_columns()[0]).contiguous()

    @constant
    def subtracted_rows(self) -> Tensor:
        """``T_o U_a^T diag(s w)_o`` of all outputs of a layer of one group, one below the other, ``(m a, n)``: the
        squares of their products with activations are what the low rank takes from the outputs' variances.
        """
        return self._subtracted().flatten(0, 1).to(self.device, self.dtype)

    def _subtracted(self) -> Tensor:
        """`subtracted_rows` in float64, ``(m, a, n)``."""
        shrunk = self._scaled(self.weight_rows(slice(None), True))[0]
        basis = as_double(self._input_basis[0]).to(shrunk)
        return self.row_roots[0].to(shrunk) @ (basis.T * shrunk.unsqueeze(1))

    @constant
    def variance_roots(self) -> list[Tensor]:
        """Triangular roots of the covariances of each output's weights, one below the other, in blocks of rows without
        the columns that are 0, ``(m height, n - start)``: the variances of the outputs of a layer of one group are sums
        of squares of their products with activations, by little more than ``m n^2 / 2`` multiply-adds for each row of
        activations. Worth it for many rows.
        """
        subtracted = self._subtracted()
        weights = self.weight_rows(slice(None), True)[0]
        covariances = torch.diag_embed(weights) - subtracted.transpose(1, 2) @ subtracted
        values, vectors = torch.linalg.eigh(covariances)
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        upper = torch.linalg.qr(roots.transpose(1, 2), mode="r").R
        size = upper.shape[1]
        height = -(-size // _ROOT_BLOCKS)
        return [
            upper[:, start : start + height, start:].flatten(0, 1).to(self.device, self.dtype)
            for start in range(0, size, height)
        ]

    # Jacobians

    whiten = Covariance.whiten

    def _checked(
        self, work: Callable[[slice | Tensor, bool], Contracted], samples: int, mode: Mode
    ) -> Checked:
        everything = slice(0, samples)
        if not self.width or self.dtype == torch.float64:
            return precise(work(everything, False).value)
        if mode == "joint":
            return precise(work(everything, True).value)
        value, diagonal, _ = work(everything, False)
        return Checked(value, variances_in(diagonal), lambda part: work(part, True).value)

    def core_width(self, double: bool) -> int:
        if not self.width:
            return 0
        return self.width if double else self.narrow.inputs.shape[1]

    def _bases(self, double: bool) -> tuple[Tensor, Tensor]:
        """``U_a^T`` and ``U_g^T``, ``(G, a, n)`` and ``(G, g, m)``, of the directions that a contraction takes."""
        if not double:
            return self.narrow.inputs, self.narrow.outputs
        inputs, outputs = (
            as_double(basis).transpose(1, 2) for basis in (self._input_basis, self._output_basis)
        )
        return inputs.contiguous(), outputs.contiguous()

    def _core_of_jacobian(self, jacobian: Tensor, rows: slice, double: bool, scaled: bool) -> Tensor | None:
        if not self.core_width(double):
            return None
        inputs, outputs = self._bases(double)
        weights = self.root_weight_rows(rows, double) if scaled else self.weight_rows(rows, double)
        jacobian.mul_(self._scaled(weights, rows).unsqueeze(1))
        flat = jacobian.flatten(2, 3)
        if flat.shape[1] == 1:
            inner = flat.reshape(-1, flat.shape[-1]) @ inputs[0].T
        else:
            inner = torch.matmul(flat, inputs.transpose(1, 2))
        inner = inner.reshape(*jacobian.shape[:4], -1)
        return torch.matmul(outputs[:, :, rows].unsqueeze(1), inner)

    def _core_weights(self, rows: slice, double: bool) -> Tensor:
        return self._scaled(self.weight_rows(rows, double), rows)

    @constant
    def row_covariances(self) -> tuple[Tensor, Tensor] | None:
        """Of a small layer of one group: the covariances between the weights of its outputs, for products of two of a
        row's activations ``(n (n + 1) / 2, m (m + 1) / 2)``, and the place of every pair of outputs among them; None
        of a larger layer. With ``y = W a`` and ``J = g a^T``, ``J Sigma J^T`` is ``g Cov(y) g^T``, in which there is no
        low rank that may have as many directions as there are weights.
        """
        groups, outputs, inputs = self.weights.shape
        pairs = outputs * (outputs + 1) // 2, inputs * (inputs + 1) // 2
        if groups > 1 or pairs[0] * pairs[1] > _MAX_PAIRS:
            return None
        basis = as_double(self._output_basis[0]), as_double(self._input_basis[0])
        lifted = basis[0] @ self._inverse_columns()[0] @ basis[1].T  # (L, m, n)
        rows = (lifted * self._wide[1][0].to(lifted)).flatten(1)
        whole = torch.diag_embed(self._wide[0][0].to(rows).flatten()) - rows.T @ rows
        first, second, places = pairs_of(outputs, whole.device)
        by_pair = whole.reshape(outputs, inputs, outputs, inputs)[first, :, second]  # (pairs, n, n)
        return _packed(by_pair).T.to(self.device, self.dtype).contiguous(), on_device(places, self.device)

    def _contracted(
        self, activations: Operand, gradients: Tensor, mode: Mode, double: bool, norms: bool
    ) -> Contracted:
        formed = None
        if not (double or norms or mode == "joint") and self._forming_pays(gradients.shape):
            formed = self.row_covariances
        if formed is None:
            return super()._contracted(activations, gradients, mode, double, norms)
        samples, _, functions, outputs, _ = gradients.shape
        inputs, own = activations.rows()[:, 0, 0], gradients[:, 0, :, :, 0]
        numbers = sum(formed[0].shape) + outputs**2 + 2 * functions * outputs
        parts = [
            self._of_formed(inputs[part], own[part], mode, *formed)
            for part in chunks(samples, numbers, own.element_size(), self.limit)
        ]
        return joined(parts)

    def _of_formed(
        self, inputs: Tensor, gradients: Tensor, mode: Mode, covariances: Tensor, places: Tensor
    ) -> Contracted:
        """Of activations ``(samples, n)`` and gradients ``(samples, functions, m)``, by `row_covariances`."""
        outputs = gradients.shape[2]
        first, second, _ = pairs_of(inputs.shape[1], inputs.device)
        packed = inputs.index_select(1, first).mul_(inputs.index_select(1, second)) @ covariances
        pulled = torch.bmm(gradients, packed.index_select(1, places).view(-1, outputs, outputs))
        if mode == "variance":
            value = (pulled * gradients).sum(2)
        else:
            value = torch.bmm(pulled, gradients.transpose(1, 2))
        spread = torch.mm(inputs.square(), self.narrow_weights[0].T).unsqueeze(2)
        diagonal = torch.bmm(gradients.square(), spread).squeeze(2)
        return Contracted(as_double(value), as_double(diagonal))

    def _forming_pays(self, shape: Sequence[int]) -> bool:
        """Whether `row_covariances` are formed and used in less time than the low rank takes for some batches of
        gradients of this shape, in multiply-adds.
        """
        samples, groups, functions, outputs, positions = shape
        inputs, width = self.weights.shape[2], self.core_width(False)
        if not width or groups * positions > 1:
            return False
        pairs = outputs * (outputs + 1) // 2, inputs * (inputs + 1) // 2
        used = pairs[0] * pairs[1] + functions * outputs * (outputs + functions)
        used += TOUCH_COST * (sum(pairs) + outputs**2 + functions * outputs)
        kept, width_g = self.narrow.root.shape[-1], self.narrow.outputs.shape[1]
        low = width * outputs * (inputs + functions * width_g) + functions * kept * (kept + functions)
        low += TOUCH_COST * (width * (inputs + functions * outputs) + 2 * functions * kept)
        forming = 2 * kept * (outputs * inputs) ** 2  # in float64
        return forming < _BATCHES * samples * (low - used)

    def _core_of_products(
        self, inputs: Tensor, gradients: Tensor, weights: Tensor, rows: slice, double: bool
    ) -> Tensor | None:
        # h_o = U_a^T diag(s w)_o a for all rows o at once, then sum_o g_co h_o U_g[o]
        width = self.core_width(double)
        if not width:
            return None
        of_inputs, of_outputs = self._bases(double)
        spread = (inputs.unsqueeze(1) * of_inputs[0]).flatten(0, 1)
        directions = torch.mm(spread, weights.T).view(len(inputs), 1, width, -1)  # (samples, 1, a, rows)
        pulled = gradients.unsqueeze(2) * directions
        basis = of_outputs[0] if is_all(rows, of_outputs.shape[2]) else of_outputs[0, :, rows]
        cores = torch.mm(pulled.flatten(0, 2), basis.T).view(*pulled.shape[:3], -1)
        return cores.transpose(2, 3).unsqueeze(1)

    def _core_of_positions(
        self, activations: Tensor, gradients: Tensor, weights: Tensor, rows: slice, double: bool
    ) -> Tensor | None:
        # h_to = U_a^T diag(s w)_o a_t for all rows o at once, then U_g^T sum_t g_cto h_to
        width = self.core_width(double)
        if not width:
            return None
        inputs, outputs = self._bases(double)
        groups, height, samples, functions, positions = gradients.shape
        outputs = outputs if is_all(rows, outputs.shape[2]) else outputs[:, :, rows]
        # (G, samples * T, a, n)
        spread = activations.view(groups, samples * positions, 1, -1) * inputs.unsqueeze(1)
        directions = torch.bmm(weights, spread.flatten(1, 2).transpose(1, 2))  # (G, rows, samples * T * a)
        if positions == 1:
            pulled = gradients * directions.view(groups, height, samples, 1, width)
        else:
            pulled = torch.bmm(
                gradients.view(-1, functions, positions), directions.view(-1, positions, width)
            )
        cores = torch.bmm(outputs, pulled.view(groups, height, -1))
        return cores.view(groups, -1, samples, functions, width).permute(2, 0, 3, 1, 4)

    def _directions(self, activations: Tensor, shrunk: Tensor) -> Tensor:
        """``h = U_a^T diag(s w)_o a`` for every row ``o`` of `shrunk`, which is ``s w``: ``(samples, G, T, a, rows)``
        for activations ``(samples, G, T, n)``; a few samples at a time.
        """
        # contiguous: otherwise every product below would have the transpose's layout and be copied
        basis = self._input_basis.to(activations).transpose(-1, -2).contiguous().unsqueeze(1)
        columns = shrunk.transpose(-1, -2)
        numbers = activations.shape[2] * basis.numel() * basis.element_size()
        step = max(1, self.limit // max(1, numbers))
        # under a tracer the number of samples is a symbol, and they are not split
        split = isinstance(activations.shape[0], int) and activations.shape[0] > step
        result: list[Tensor] = []
        for part in activations.split(step) if split else (activations,):
            spread = part.unsqueeze(3) * basis
            if spread.shape[1] == 1:  # one large product, not one for every sample
                result.append((spread.flatten(0, 3) @ columns[0]).reshape(*spread.shape[:4], -1))
            else:
                result.append(torch.matmul(spread.flatten(2, 3), columns).reshape(*spread.shape[:4], -1))
        return torch.cat(result) if len(result) > 1 else result[0]

    def _less_low_rank(
        self, diagonal: Tensor, cores: Tensor | None, mode: Mode, double: bool, norms: Tensor | None
    ) -> Contracted:
        if cores is None:
            return super()._less_low_rank(diagonal, cores, mode, double, norms)
        wide = as_double(diagonal)
        return Contracted(wide - gram(self._reduced(cores, double), mode).to(wide), wide, norms)

    def _reduced(self, cores: Tensor, wide: bool) -> Tensor:
        """``z = R^-1 D core``, ``(samples, functions, G g a)``, in float64 of all directions if `wide`, or of those of
        `narrow`. D scales the rows of R, and a triangular solve is not less accurate for that.
        """
        samples, groups, functions = cores.shape[:3]
        rows = cores.flatten(3)  # (samples, G, functions, L)
        if wide:
            root, roots = self._root, as_double(self._roots).to(self._root).flatten(1)
        else:
            root, roots, kept, product = (
                self.narrow.root,
                self.narrow.roots,
                self.narrow.kept,
                self.narrow.product,
            )
            rows = rows if kept is None else rows.index_select(3, kept)
            if product is not None:
                return (rows.reshape(samples * functions, -1) @ product).reshape(samples, functions, -1)
        scaled = rows.to(root) * roots.unsqueeze(1)
        columns = scaled.permute(1, 3, 0, 2).reshape(groups, -1, samples * functions)
        solved = torch.linalg.solve_triangular(root, columns, upper=False)
        return solved.reshape(groups, -1, samples, functions).permute(2, 3, 0, 1).flatten(2)

    # Outputs

    def output_variance(self, mean: Tensor, variance: Tensor | None = None) -> Tensor:
        # where the data leave no variance, rounding may give a little less than zero
        result = self._certain_variance(mean, True).value.clamp(min=0).to(mean)
        if variance is None:
            return result
        return result + torch.einsum("goi,rgi->rgo", self.marginal.to(variance), variance)

    def _certain_variance(self, inputs: Tensor, double: bool) -> Contracted:
        """Variances of outputs ``(rows, G, m)`` for certain inputs ``(rows, G, n)``."""
        weights, shrunk = self._wide if double else (self.narrow_weights, self._scaled(self.narrow_weights))
        inputs = as_double(inputs) if double else inputs
        diagonal = as_double(torch.einsum("goi,rgi->rgo", weights, inputs.square()))
        if not self.width:
            return Contracted(diagonal, diagonal)
        directions = as_double(self._directions(inputs.unsqueeze(2), shrunk)[:, :, 0])  # (rows, G, a, m)
        # in one memory: a product of each output's matrices copies them one by one otherwise
        columns = directions.permute(1, 3, 2, 0).contiguous()
        reduction = torch.matmul(self.row_roots.to(directions), columns)
        return Contracted(diagonal - reduction.square().sum(2).permute(2, 0, 1), diagonal)

    def variances_of(self, activations: Tensor) -> Tensor:
        outputs, inputs = self.weights.shape[1:]
        if not self.width:
            return super().variances_of(activations)
        if len(activations) > _MIN_ROWS_PER_INPUT * inputs and outputs * inputs**2 <= _MAX_NUMBERS:
            return self._of_many(activations.T).T

        def of_rows(rows: Tensor) -> Tensor:
            def work(part: slice | Tensor, double: bool) -> Contracted:
                found = self._certain_variance(rows[part].unsqueeze(1), double)
                return Contracted(found.value.squeeze(1), found.diagonal.squeeze(1))

            return precise_values([self._checked(work, len(rows), "variance")])[0]

        step = max(1, _MAX_ROW_BYTES // (8 * outputs * (4 + self.width)))
        return torch.cat([of_rows(rows) for rows in activations.split(step)])

    def _of_many(self, columns: Tensor) -> Tensor:
        """Variances ``(m, rows)`` for many inputs ``(n, rows)``: what it takes is formed once, and the rows pass a few
        at a time. What is left of less than a hundredth of the diagonal's part is computed again by triangular roots,
        in which nothing cancels; these are taken at once where they cost less.
        """
        if 2 * self.width > columns.shape[0]:
            return self._by_roots(columns)
        result = columns.new_empty(self.weights.shape[1], columns.shape[1])
        short = torch.zeros_like(result[0], dtype=torch.bool)
        for part in self._column_parts(columns, len(self.subtracted_rows)):
            chunk, found = columns[:, part], result[:, part]
            torch.mm(self.square_weights[0], chunk.square(), out=found)
            least = MIN_SHARE * found
            found -= _sums_of_squares(self.subtracted_rows @ chunk, len(found))
            short[part] = (found < least).any(0)
        again = short.nonzero().flatten()
        if len(again):
            result[:, again] = self._by_roots(columns[:, again])
        return result

    def _by_roots(self, columns: Tensor) -> Tensor:
        """Variances ``(m, rows)`` as sums of squares, for activations ``(n, rows)``."""
        result = columns.new_zeros(self.weights.shape[1], columns.shape[1])
        for part in self._column_parts(columns, len(self.variance_roots[0])):
            for block in self.variance_roots:
                inside = block @ columns[-block.shape[1] :, part]
                result[:, part] += _sums_of_squares(inside, len(result))
        return result

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        inputs = as_double(mean)
        diagonal = torch.diag_embed(self._second_moments(inputs, covariance, joint) @ self.wide_columns)
        if not self.width:
            return joined_rows(diagonal, joint)
        if covariance is None:
            turned, cores = self.wide_rows
            directions = (inputs @ turned).unflatten(1, cores.shape[:2]).transpose(0, 1)  # (m, rows, a)
            reduced = torch.bmm(directions, cores).transpose(0, 1)  # (rows, m, L)
            if joint:
                return joined_rows(diagonal, joint) - gram(reduced, "joint")
            return torch.baddbmm(diagonal, reduced, reduced.transpose(1, 2), alpha=-1)
        result, shrunk, basis = diagonal, self._wide[1], as_double(self._output_basis[0])
        moments = inputs.unsqueeze(2) * inputs.unsqueeze(1) + as_double(covariance)
        columns, input_basis = self._inverse_columns()[0], as_double(self._input_basis[0])
        step = max(1, _CHUNK // max(1, shrunk[0].numel()))
        for start in range(0, columns.shape[0], step):
            # Rows q_ol of the low-rank part: S_oo' has - sum_l q_ol q_o'l^T.
            mixed = torch.einsum("og,lga->loa", basis, columns[start : start + step])
            for row in (mixed @ input_basis.T) * shrunk[0]:
                result = result - row @ moments @ row.T
        return result

    def output_products(self, activations: Tensor) -> OutputCovariance:
        if not self.width:
            return super().output_products(activations)
        weights = self.weight_rows(slice(None), False)
        diagonal = (activations.square() @ weights[0].T).unsqueeze(1)
        directions = self._directions(activations[:, None, None], self._scaled(weights))[
            :, 0, 0
        ]  # (rows, a, m)
        basis = self._output_basis[0].to(directions)

        return _LowRankProducts(diagonal, directions, basis, self._solved)

    def _solved(self, cores: Tensor) -> Tensor:
        """``D B^-1 D`` times cores ``(samples, k, g, a)`` of a layer of one group, in float64."""
        if torch.compiler.is_compiling():
            reduction = self.wide_reduction[0]
            flat = as_double(cores).flatten(2)
            return (flat @ reduction.T @ reduction).reshape(cores.shape)
        root, roots = self._root[0], as_double(self._roots).to(self._root)[0]
        columns = (cores.to(root) * roots).flatten(2).flatten(0, 1).T
        solved = torch.cholesky_solve(columns, root).T.reshape(cores.shape) * roots
        return on_device(solved, cores.device)


class _LowRankProducts(OutputCovariance):
    """``diag(d) - sum_a h_a (U_g (B_a . (h^T U_g)))`` with ``B = D (I + M)^-1 D``, ``h`` the directions.

    Args:
        diagonal: ``d``, ``(samples, 1, m)``.
        directions: ``h``, ``(samples, a, m)``.
        basis: ``U_g``, ``(m, g)``.
        solved: products of ``B`` with cores ``(samples, k, g, a)``.
    """

    def __init__(
        self, diagonal: Tensor, directions: Tensor, basis: Tensor, solved: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(self._multiplied)
        self._diagonal, self._directions, self._basis, self._solved = diagonal, directions, basis, solved
        self._parts = [slice(None)]
        if not torch.compiler.is_compiling():  # under a tracer the number of samples is a symbol
            step = max(1, _CACHED // directions[0].numel())
            self._parts = [slice(start, start + step) for start in range(0, len(directions), step)]
        self._of_all: Tensor | None = None  # the core of a vector of ones

    def with_centred(self, chosen: Tensor, like: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().with_centred(chosen, like)
        classes, samples = like.shape[1], torch.arange(len(like), device=like.device).unsqueeze(1)
        if self._of_all is None:
            self._of_all = self._directions @ self._basis  # (samples, a, g)
        core = torch.einsum(
            "ska,skg->skag", self._directions.transpose(1, 2)[samples, chosen], self._basis[chosen]
        )
        core = core - self._of_all.unsqueeze(1) / classes
        units = F.one_hot(chosen, classes).to(like) - 1 / classes
        return self._from_core(core, units)

    def _multiplied(self, vectors: Tensor) -> Tensor:
        columns, turned = vectors.unsqueeze(2), self._directions.unsqueeze(1)
        core = torch.cat([(columns[part] * turned[part]) @ self._basis for part in self._parts])
        return self._from_core(core, vectors)

    def _from_core(self, core: Tensor, vectors: Tensor) -> Tensor:
        """The products, from the cores ``(samples, k, a, g)`` of vectors ``(samples, k, m)``."""
        turned, of_basis = self._directions.unsqueeze(1), self._basis.T
        solved = self._solved(core.transpose(2, 3)).transpose(2, 3).to(core).contiguous()
        found = torch.cat([((solved[part] @ of_basis) * turned[part]).sum(2) for part in self._parts])
        return self._diagonal * vectors - found


def _sums_of_squares(products: Tensor, outputs: int) -> Tensor:
    """Sums of squares ``(m, rows)`` of products ``(m k, rows)``, which are overwritten."""
    return products.square_().reshape(outputs, -1, products.shape[1]).sum(1)


def _solved_plus_one(root: Tensor, columns: Tensor) -> Tensor:
    """``(I + R)^-1 c`` for lower triangular R, ``(G, L, L)``, and columns ``(G, L, q)``, block by block: the sum takes
    longer than the solve, and as much memory as R.
    """
    solved = torch.empty_like(columns)
    for start in range(0, columns.shape[1], _SOLVED_ROWS):
        part = slice(start, start + _SOLVED_ROWS)
        block = root[:, part, part].clone()
        block.diagonal(dim1=-2, dim2=-1).add_(1.0)
        left = columns[:, part] - root[:, part, :start] @ solved[:, :start]
        solved[:, part] = torch.linalg.solve_triangular(block, left, upper=False)
    return solved


def _pairs(basis: Tensor) -> Tensor:
    """Products ``U[j a] U[j a']`` over ``a <= a'``: ``(G, n, a)`` to ``(G, n, a (a + 1) / 2)``, outside of autograd."""
    width = basis.shape[-1]
    products = basis.new_empty(*basis.shape[:-1], width * (width + 1) // 2)
    start = 0
    for first in range(width):
        stop = start + width - first
        torch.mul(basis[..., first : first + 1], basis[..., first:], out=products[..., start:stop])
        start = stop
    return products


def _pair_index(width: int, device: torch.device) -> Tensor:
    """Where the pair of two directions stands in the packed order, ``(width, width)``."""
    first, second = torch.triu_indices(width, width, device=device)
    index = torch.empty(width, width, dtype=torch.long, device=device)
    order = torch.arange(first.shape[0], device=device)
    index[first, second] = order
    index[second, first] = order
    return index


def _contracted_pairs(weights: Tensor, basis: Tensor) -> Tensor:
    """``sum_j weights[i, j] U[j a] U[j a']`` over ``a <= a'``: ``(G, m, a (a + 1) / 2)``, in chunks of
    inputs.
    """
    width = basis.shape[-1] * (basis.shape[-1] + 1) // 2
    step = max(1, _CHUNK // max(1, basis.shape[0] * width))
    total = weights.new_zeros(*weights.shape[:2], width)
    for start in range(0, basis.shape[1], step):
        part = slice(start, start + step)
        total = total + weights[:, :, part] @ _pairs(basis[:, part])
    return total


def _packed(matrices: Tensor) -> Tensor:
    """``(..., k, k)`` to ``(..., k (k + 1) / 2)``, the sum of an entry and its mirror image, so that products with
    `_pairs` are quadratic forms.
    """
    first, second = torch.triu_indices(*matrices.shape[-2:], device=matrices.device)
    both = matrices[..., first, second] + matrices[..., second, first]
    return torch.where(first == second, both / 2, both)


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
    makes = LowRankDiagonal
    per_weight_prior = True
    tunable: ClassVar[frozenset[str]] = Block.tunable | {"residual_weight"}

    input_basis: Annotated[
        Tensor, TensorField(GROUPS, INPUTS, _INPUT_DIRECTIONS, orthonormal=True, padded=True)
    ]
    output_basis: Annotated[
        Tensor, TensorField(GROUPS, OUTPUTS, _OUTPUT_DIRECTIONS, orthonormal=True, padded=True)
    ]
    eigenvalues: Annotated[
        Tensor,
        TensorField(GROUPS, _OUTPUT_DIRECTIONS, _INPUT_DIRECTIONS, mean_of="low rank", non_negative=True),
    ]
    diagonal: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, mean_of="diagonal", non_negative=True)]
    correction: Correction

    def __post_init__(self) -> None:
        self._kept: tuple[Tensor | None, Tensor] | None = None

    def leading(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input_basis, self.output_basis, self.eigenvalues

    def independent(self) -> InformationBlock:
        none = self.input_basis[..., :0], self.output_basis[..., :0], self.eigenvalues[:, :0, :0]
        return InformationBlock(*none, self.diagonal, "clamp")

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

    def covariance(self, settings: PrecisionSettings) -> LowRankDiagonal:
        shrink, residual = self._parts()
        precision = settings.precision(residual * settings.residual_weight)
        roots = self.eigenvalues.sqrt() * settings.scale**0.5
        return LowRankDiagonal(self.input_basis, self.output_basis, roots, shrink, precision)

    def fault(self) -> str | None:
        nonzero = self.eigenvalues != 0
        for name, basis, needed in (
            ("input_basis", self.input_basis, nonzero.any(-2)),
            ("output_basis", self.output_basis, nonzero.any(-1)),
        ):
            if bool((needed & (basis == 0).all(-2)).any()):
                return f"has an eigenvalue along a direction of '{name}' that is zero"
        return None

    def trace_in_basis(self, part: Mapping[str, Tensor]) -> tuple[float, float] | None:
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
