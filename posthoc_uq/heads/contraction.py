"""``J Sigma J^T`` of one layer, from its activations and output gradients.

With ``J_c = sum_t g_ct a_t^T`` and ``Sigma = diag w - low rank`` in the posterior's bases (see `Form`):

* one position: ``J_c = g_c a^T`` is never formed. The diagonal gives ``sum_o g_co g_do (sum_i w_oi a_i^2)``, and the
  low rank needs ``z_c = R^-1 D (U_g x U_a)^T (s w J_c) = R^-1 D sum_o g_co U_g[o] x h_o`` with
  ``h_o = U_a^T diag(s w)_o a``, which no output of the model enters;
* a few positions: the same with pairs of positions, ``sum_tu g_ct g_du (sum_i w_oi a_ti a_ui)``;
* more positions (weight sharing): ``J`` is formed for a few rows of a few samples at a time and summed away. The bases
  of KFAC and EFB turn the activations and output gradients beforehand, not ``J``.

Two large numbers cancel along stiff directions. Products are in the activations' precision, and where less than a
hundredth is left of the diagonal's part, that sample is done again in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.curvature.operands import Operand, Rows
from posthoc_uq.curvature.squares import TOUCH_COST
from posthoc_uq.devices import as_double, on_host, placed
from posthoc_uq.heads.products import Mode, gram, marginal, weighted_gram
from posthoc_uq.posteriors.forms import Form

_ROTATED = 8  # limits that turned activations may take
LEFT = 1e-2  # share of the diagonal's part below which float32 has lost too much


class Sums(NamedTuple):
    """What one layer gives, in the shapes of `gram` and in float64.

    Attributes:
        found: ``J Sigma J^T``.
        diagonal: of it, what the diagonal part gives alone.
        norms: ``|J_c|^2``, ``(samples, functions)``, where they were asked for.
    """

    found: Tensor
    diagonal: Tensor
    norms: Tensor | None = None


class Unsettled(NamedTuple):
    """What one layer gives, of which some samples may have to be done again in float64.

    Attributes:
        found: in the shapes of `gram`, in float64.
        poor: which samples these are, ``(samples,)``; None where there is none.
        again: does some samples again.
    """

    found: Tensor
    poor: Tensor | None
    again: Callable[[slice], Tensor]


def settled(layers: Sequence[Unsettled]) -> list[Tensor]:
    """What several layers give, after one look at the samples that are to be done again."""
    flags = iter(on_host(*(layer.poor for layer in layers if layer.poor is not None)))
    found: list[Tensor] = []
    for own, poor, again in layers:
        which: list[int] = [] if poor is None else next(flags).nonzero().flatten().tolist()
        if poor is not None and len(which) == len(poor):
            own = again(slice(0, len(poor)))
        else:
            for sample in which:
                own[sample : sample + 1] = again(slice(sample, sample + 1))
        found.append(own)
    return found


class LayerCovariance:
    """The covariance of one layer's weights, made ready once for Jacobians of many batches.

    Results are in float64, on the CPU where the device has none.

    Args:
        form: the covariance.
        dtype: of activations and output gradients.
        device: likewise.
        limit: bytes that one temporary may take.
    """

    def __init__(self, form: Form, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self._dtype, self._limit = dtype, limit
        self._low_rank = low = form.low_rank
        self._weights = form.weights.to(device)
        self._bases = None if form.bases is None else tuple(b.to(device, dtype) for b in form.bases)
        if low is not None:
            self._shrink = None if low.shrink is None else low.shrink.to(device)
            self._kept = low.input_basis.to(device), low.output_basis.to(device)

    @cached_property
    def _half(self) -> Tensor:
        """``sqrt w``, which turns J into the rows of its diagonal part."""
        return self._weights.sqrt().to(self._dtype)

    @cached_property
    def _mixed(self) -> Tensor:
        """``s sqrt w``, which turns those rows into ``s w J``."""
        return self._half if self._shrink is None else self._half * self._shrink.to(self._dtype)

    @cached_property
    def _plain(self) -> Tensor:
        """``w`` in the activations' precision."""
        return self._weights.to(self._dtype)

    @cached_property
    def _product(self) -> Tensor:
        """``s w``."""
        return self._plain if self._shrink is None else self._plain * self._shrink.to(self._dtype)

    @cached_property
    def _common(self) -> float | None:
        """``w`` where it is the same for all weights, as INF's is without a residual: then the diagonal's part is it
        times the squared norm of J.
        """
        least, most = (float(extreme) for extreme in self._weights.aminmax())
        return most if least == most and self._bases is None else None

    @cached_property
    def _narrow_root(self) -> Tensor:
        """``R`` in the activations' precision."""
        assert self._low_rank is not None
        return self._low_rank.root.to(self._dtype)

    @cached_property
    def _row_roots(self) -> Tensor:
        assert self._low_rank is not None
        return self._low_rank.row_roots()

    def _halves(self, rows: slice, wide: bool) -> tuple[Tensor, Tensor]:
        """``sqrt w`` and ``s sqrt w`` of some rows, ``(G, rows, n)``; in float64 they are exactly what the low-rank
        part was computed with.
        """
        if not wide:
            return self._half[:, rows], (self._mixed if self._low_rank is not None else self._half)[:, rows]
        half = as_double(self._weights[:, rows]).sqrt()
        if self._low_rank is None or self._shrink is None:
            return half, half
        return half, half * as_double(self._shrink[:, rows])

    def _products(self, rows: slice, wide: bool) -> tuple[Tensor, Tensor]:
        """``w`` and ``s w`` of some rows, ``(G, rows, n)``."""
        if not wide:
            return self._plain[:, rows], (self._product if self._low_rank is not None else self._plain)[
                :, rows
            ]
        plain = as_double(self._weights[:, rows])
        if self._low_rank is None or self._shrink is None:
            return plain, plain
        return plain, plain * as_double(self._shrink[:, rows])

    def contract(self, activations: Operand, gradients: Tensor, mode: Mode) -> Unsettled:
        """``J Sigma J^T`` in the shapes of `gram`.

        Args:
            activations: of the batch.
            gradients: at the layer's outputs, of several functions of the outputs: ``(samples, G, functions, m, T)``.
            mode: see `gram`.
        """
        if self._are_few(activations.positions, gradients.shape[2], mode):

            def work(part: slice, wide: bool) -> Sums:
                return self._few_positions(activations.part(part).rows(), gradients[part], mode, wide)
        else:

            def work(part: slice, wide: bool) -> Sums:
                return self._positions(activations.part(part), gradients[part], mode, wide)

        if self._bases is None or self._are_few(activations.positions, gradients.shape[2], mode):
            return self._checked(work, gradients.shape[0], mode)
        return _sure(self._rotated(activations, gradients, mode).found)

    def with_norms(self, activations: Operand, gradients: Tensor, wide: bool) -> tuple[Tensor, Tensor]:
        """Variances ``J_c Sigma J_c^T`` and squared norms ``|J_c|^2`` from the same J, ``(samples, functions)`` each.

        Nothing is done again where much cancels, since what is left of one layer may not matter in the sum of all:
        that is the caller's to judge, with `wide`, in float64.
        """
        if self._are_few(activations.positions, gradients.shape[2], "variance"):
            found = self._few_positions(activations.rows(), gradients, "variance", wide, True)
        elif self._bases is None:
            found = self._positions(activations, gradients, "variance", wide, True)
        else:
            found = self._rotated(activations, gradients, "variance", True)
        assert found.norms is not None
        return found.found, as_double(found.norms)

    @property
    def cancels(self) -> bool:
        """Whether something is taken off the diagonal's part."""
        return self._low_rank is not None

    def _rotated(self, activations: Operand, gradients: Tensor, mode: Mode, norms: bool = False) -> Sums:
        """In the bases of KFAC and EFB: activations and gradients are turned, many samples at once, since the bases are
        large and are read for every product.
        """
        assert self._bases is not None
        samples = gradients.shape[0]
        numbers = activations.positions * self._bases[0][..., 0].numel() * gradients.element_size()
        step = samples if mode == "joint" else max(1, _ROTATED * self._limit // numbers)
        found: list[Sums] = []
        for start in range(0, samples, step):
            part = slice(start, start + step)
            turned = Rows(activations.part(part).project(self._bases[0]))
            pulled = torch.matmul(self._bases[1].transpose(-1, -2).unsqueeze(1), gradients[part])
            found.append(self._positions(turned, pulled, mode, False, norms))
        return _joined(found)

    def _are_few(self, positions: int, functions: int, mode: Mode) -> bool:
        """Whether pairs of positions cost less than forming J, in multiply-adds for a weight of a sample."""
        if positions == 1 or mode == "joint":
            return positions == 1
        width = 0 if self._low_rank is None else self._low_rank.roots.shape[-1]
        inputs = self._weights.shape[2]
        pairs = positions * (positions + 1) / 2 + positions * width
        pairs += positions * width * functions * TOUCH_COST / inputs
        return pairs < functions * (positions + width + TOUCH_COST)

    def _checked(self, work: Callable[[slice, bool], Sums], samples: int, mode: Mode) -> Unsettled:
        """Do some work for all samples; where too much has cancelled, it is to be done again in float64."""
        everything = slice(0, samples)
        if self._low_rank is None or self._dtype == torch.float64:
            return _sure(work(everything, False)[0])
        if mode == "joint":
            return _sure(work(everything, True)[0])
        found, diagonal, _ = work(everything, False)
        poor = (marginal(found, samples, mode) < LEFT * marginal(diagonal, samples, mode)).any(dim=1)
        return Unsettled(found, poor, lambda part: work(part, True)[0])

    def _row_chunks(self, numbers: int, item: int) -> Iterator[slice]:
        """Rows of the layer, so few that `numbers` numbers a row stay within the limit."""
        outputs = self._weights.shape[1]
        step = max(1, min(outputs, self._limit // max(1, numbers * item)))
        for start in range(0, outputs, step):
            yield slice(start, min(outputs, start + step))

    def _finish(self, diagonal: Tensor, cores: Tensor | None, mode: Mode, norms: Tensor | None) -> Sums:
        """Take the low rank's part off: cores are ``(U_g x U_a)^T (s w J)``, ``(samples, G, functions, g, a)``."""
        diagonal = as_double(diagonal)
        if cores is None:
            return Sums(diagonal, diagonal, norms)
        narrow = norms is not None and cores.dtype != torch.float64
        return Sums(diagonal - gram(self._reduced(cores, narrow), mode).to(diagonal), diagonal, norms)

    def _reduced(self, cores: Tensor, narrow: bool = False) -> Tensor:
        """``z = R^-1 D core``, ``(samples, functions, G g a)``, in float64 or with `narrow` in the cores' precision:
        D scales the rows of R, and such a scaling does no harm to a triangular solve.
        """
        assert self._low_rank is not None
        root = self._narrow_root if narrow else self._low_rank.root
        samples, groups, functions = cores.shape[:3]
        scaled = cores.to(root) * self._low_rank.roots.to(root).unsqueeze(1)
        columns = scaled.flatten(3).permute(1, 3, 0, 2).reshape(groups, -1, samples * functions)
        solved = torch.linalg.solve_triangular(root, columns, upper=False)
        return solved.reshape(groups, -1, samples, functions).permute(2, 3, 0, 1).flatten(2)

    def _positions(
        self, activations: Operand, gradients: Tensor, mode: Mode, wide: bool, norms: bool = False
    ) -> Sums:
        """With weight sharing: J in chunks of samples (all at once for ``"joint"``) and of rows."""
        samples, groups, functions, outputs, _ = gradients.shape
        inputs = self._weights.shape[2]
        item = 8 if wide else gradients.element_size()
        numbers = groups * functions * inputs
        step = samples if mode == "joint" else max(1, self._limit // max(1, numbers * outputs * item))
        parts: list[Sums] = []
        for start in range(0, samples, step):
            part = slice(start, min(samples, start + step))
            own, pulled = activations.part(part), gradients[part]
            diagonal: Tensor | None = None
            cores: Tensor | None = None
            lengths: Tensor | None = None
            for rows in self._row_chunks((part.stop - start) * numbers, item):
                jacobian = self._jacobian(own, pulled[:, :, :, rows])
                jacobian = as_double(jacobian) if wide else jacobian
                length = _row_norms(jacobian, "variance") if norms else None
                lengths = length if lengths is None or length is None else lengths + length
                squares, core = self._row_sums(jacobian, rows, mode, wide, length)
                diagonal = squares if diagonal is None else diagonal + squares
                cores = core if cores is None or core is None else cores + core
            assert diagonal is not None
            parts.append(self._finish(diagonal, cores, mode, lengths))
        return _joined(parts)

    def _jacobian(self, activations: Operand, gradients: Tensor) -> Tensor:
        """Rows of J, ``(samples, G, functions, rows, n)``; the functions are further outputs of the layer."""
        samples, groups, functions, rows, _ = gradients.shape
        stacked = gradients.flatten(2, 3).transpose(2, 3)
        return activations.gradients(stacked, self._limit).reshape(samples, groups, functions, rows, -1)

    def _row_sums(
        self, jacobian: Tensor, rows: slice, mode: Mode, wide: bool, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The diagonal's part and the core of some rows of J, which is overwritten; `lengths` are its squared norms,
        where they are known.
        """
        if lengths is not None and self._common is not None:
            squares, last = lengths * self._common, self._products(rows, wide)[1]
        else:
            half, last = self._halves(rows, wide)
            jacobian.mul_(half.unsqueeze(1))
            squares = _row_norms(jacobian, mode)
        if self._low_rank is None:
            return squares, None
        input_basis, output_basis = (basis.to(jacobian) for basis in self._kept)
        jacobian.mul_(last.unsqueeze(1))
        flat = jacobian.flatten(2, 3)
        if flat.shape[1] == 1:
            inner = flat.reshape(-1, flat.shape[-1]) @ input_basis[0]
        else:
            inner = torch.matmul(flat, input_basis)
        inner = inner.reshape(*jacobian.shape[:4], -1)
        return squares, torch.matmul(output_basis[:, rows].transpose(-1, -2).unsqueeze(1), inner)

    def _few_positions(
        self, activations: Tensor, gradients: Tensor, mode: Mode, wide: bool, norms: bool = False
    ) -> Sums:
        """Without J, from activations ``(samples, G, T, n)``; ``"joint"`` for one position alone."""
        if self._bases is not None:
            activations = torch.matmul(activations, self._bases[0])
            gradients = torch.matmul(self._bases[1].transpose(-1, -2).unsqueeze(1), gradients)
        if wide:
            activations, gradients = as_double(activations), as_double(gradients)
        lengths = _squared_norms(activations, gradients) if norms else None
        known = None if lengths is None or self._common is None else lengths * self._common
        diagonal: Tensor | None = known
        cores: Tensor | None = None
        numbers = self._weights.shape[0] * self._weights.shape[2] if wide else 0
        for rows in self._row_chunks(numbers, 8):
            plain, product = self._products(rows, wide)
            pulled = gradients[:, :, :, rows].transpose(-1, -2)  # (samples, G, functions, T, rows)
            if known is None:
                squares = weighted_gram(activations, pulled, plain, mode, self._limit)
                diagonal = squares if diagonal is None else diagonal + squares
            if self._low_rank is not None:
                core = self._cores(self._directions(activations, product), pulled, rows)
                cores = core if cores is None else cores + core
        assert diagonal is not None
        return self._finish(diagonal, cores, mode, lengths)

    def _cores(self, directions: Tensor, gradients: Tensor, rows: slice) -> Tensor:
        """``sum_o U_g[o] x (sum_t g_to h_to)``, ``(samples, G, functions, g, a)``, of some rows ``o``."""
        basis = self._kept[1][:, rows].to(gradients)
        samples, groups, functions, positions, _ = gradients.shape
        width = directions.shape[3]
        numbers = functions * width * gradients[0, :, 0, 0].numel() * gradients.element_size()
        step = max(1, self._limit // max(1, numbers))
        found = gradients.new_empty(samples, groups, functions, width, basis.shape[-1])
        for start in range(0, samples, step):
            own, pulled = directions[start : start + step], gradients[start : start + step]
            total = pulled[:, :, :, 0].unsqueeze(3) * own[:, :, 0].unsqueeze(2)
            for t in range(1, positions):
                total.addcmul_(pulled[:, :, :, t].unsqueeze(3), own[:, :, t].unsqueeze(2))
            if groups == 1:
                found[start : start + step] = (total.flatten(0, 3) @ basis[0]).reshape(*total.shape[:4], -1)
            else:
                found[start : start + step] = torch.matmul(total, basis.unsqueeze(1))
        return found.transpose(3, 4)

    def _directions(self, activations: Tensor, product: Tensor) -> Tensor:
        """``h = U_a^T diag(s w)_o a`` for every row ``o``: of activations ``(samples, G, T, n)`` it is
        ``(samples, G, T, a, rows)``, a few samples at a time.
        """
        # contiguous, or every product below would be laid out like the transpose and copied
        basis = self._kept[0].to(activations).transpose(-1, -2).contiguous().unsqueeze(1)
        columns = product.transpose(-1, -2)
        numbers = activations.shape[2] * basis.numel() * basis.element_size()
        found: list[Tensor] = []
        for part in activations.split(max(1, self._limit // max(1, numbers))):
            spread = part.unsqueeze(3) * basis
            if spread.shape[1] == 1:  # one large product, not one for every sample
                found.append((spread.flatten(0, 3) @ columns[0]).reshape(*spread.shape[:4], -1))
            else:
                found.append(torch.matmul(spread.flatten(2, 3), columns).reshape(*spread.shape[:4], -1))
        return torch.cat(found) if len(found) > 1 else found[0]

    def own_variance(self, activations: Tensor) -> Tensor:
        """Variance of the layer's own outputs, ``(samples, m)``, for activations ``(samples, n)`` of a layer of one
        group: each output needs its own row's covariance alone.
        """

        def work(part: slice, wide: bool) -> Sums:
            rows = activations[part]
            if self._bases is not None:
                squares = (rows @ self._bases[0][0]).square() @ self._plain[0].T
                found = as_double(squares @ self._bases[1][0].square().T)
                return Sums(found, found)
            rows = as_double(rows) if wide else rows
            plain, product = self._products(slice(None), wide)
            diagonal = as_double(rows.square() @ plain[0].T)
            if self._low_rank is None:
                return Sums(diagonal, diagonal)
            directions = as_double(self._directions(rows[:, None, None], product)[:, 0, 0])  # (samples, a, m)
            taken = torch.matmul(as_double(self._row_roots)[0].to(directions), directions.permute(2, 1, 0))
            return Sums(diagonal - taken.square().sum(1).T, diagonal)

        return settled([self._checked(work, activations.shape[0], "variance")])[0]

    def own_product(self, activations: Tensor) -> Callable[[Tensor], Tensor]:
        """Multiplication by the covariance of the layer's own outputs: of ``(samples, m, k)``, to the same shape, for
        activations ``(samples, n)`` of a layer of one group. No ``(m, m)`` matrix is formed.
        """
        if self._bases is not None:
            input_basis, output_basis = (basis[0] for basis in self._bases)
            turned = ((activations @ input_basis).square() @ self._plain[0].T).unsqueeze(-1)
            return lambda x: output_basis @ (turned * (output_basis.T @ x))
        plain, product = self._products(slice(None), False)
        diagonal = (activations.square() @ plain[0].T).unsqueeze(-1)
        if self._low_rank is None:
            return lambda x: diagonal * x
        directions = self._directions(activations[:, None, None], product)[:, 0, 0]  # (samples, a, m)
        basis = self._kept[1][0].to(directions)

        def multiply(x: Tensor) -> Tensor:
            columns = x.transpose(1, 2).unsqueeze(2)  # (samples, k, 1, m)
            core = torch.matmul(columns * directions.unsqueeze(1), basis).transpose(
                2, 3
            )  # (samples, k, g, a)
            back = torch.matmul(basis, self._solved(core).to(core))  # (samples, k, m, a)
            taken = (back * directions.transpose(1, 2).unsqueeze(1)).sum(-1)
            return diagonal * x - taken.transpose(1, 2)

        return multiply

    def _solved(self, cores: Tensor) -> Tensor:
        """``D B^-1 D`` of cores ``(samples, k, g, a)`` of a layer of one group, in float64."""
        assert self._low_rank is not None
        root, roots = self._low_rank.root[0], as_double(self._low_rank.roots).to(self._low_rank.root)[0]
        columns = (cores.to(root) * roots).flatten(2).flatten(0, 1).T
        solved = torch.cholesky_solve(columns, root).T.reshape(cores.shape) * roots
        return placed(solved, cores.device)

    def own_covariance(self, activations: Tensor, joint: bool) -> Tensor:
        """Covariance of the layer's own outputs ``(samples, m, m)``, or with `joint` ``(samples * m, samples * m)``,
        for activations ``(samples, n)`` of a layer of one group; in float64.
        """
        rows = as_double(activations)
        if self._bases is not None:
            rows = rows @ as_double(self._bases[0][0])
        plain, product = self._products(slice(None), True)
        samples, outputs = rows.shape[0], plain.shape[1]
        pairs = rows.unsqueeze(1) * rows if joint else rows.square()
        spread = pairs @ plain[0].T  # (samples, samples, m) or (samples, m)
        if self._bases is not None:
            basis = as_double(self._bases[1][0])
            found = (basis * spread.unsqueeze(-2)) @ basis.T
        else:
            found = torch.diag_embed(spread)
        if joint:
            found = found.transpose(1, 2).reshape(samples * outputs, samples * outputs)
        if self._low_rank is None:
            return found
        directions = self._directions(rows[:, None, None], product)[:, 0, 0].transpose(
            1, 2
        )  # (samples, m, a)
        basis = self._kept[1][0].to(rows)
        cores = basis.unsqueeze(-1) * directions.unsqueeze(2)  # (samples, m, g, a)
        return found - gram(self._reduced(cores.unsqueeze(1)), "joint" if joint else "covariance").to(found)


def _sure(found: Tensor) -> Unsettled:
    """Of which nothing is to be done again."""
    return Unsettled(found, None, lambda part: found[part])


def _joined(parts: list[Sums]) -> Sums:
    """Those of all samples."""
    if len(parts) == 1:
        return parts[0]
    norms = [part.norms for part in parts if part.norms is not None]
    found, diagonal = (torch.cat([part[i] for part in parts]) for i in range(2))  # type: ignore[misc]
    return Sums(found, diagonal, torch.cat(norms) if norms else None)


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
    own = torch.matmul(activations, activations.transpose(-1, -2)).unsqueeze(2)
    return (torch.matmul(gradients.transpose(-1, -2), gradients) * own).sum((1, 3, 4))
