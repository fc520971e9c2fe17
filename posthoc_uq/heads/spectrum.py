"""Covariances of outputs at every prior precision, from one set of backward passes.

Where a layer's precision is ``scale U diag(lambda) U^T + tau`` with orthonormal directions ``u_k``,

    J Sigma J^T = sum_k c_k c_k^T / (scale lambda_k + tau) + (J J^T - sum_k c_k c_k^T) / tau,    c_k = J u_k,

in which no product depends on the prior precision ``tau``. They are summed up by the sizes ``x`` of ``scale lambda_k``
between the points of a grid with `_POINTS` for each decade, so that a sample needs a few small matrices, whatever the
number of weights. Each counts to the two points around it so that ``1 / (x + tau)`` is right for ``tau`` much smaller
or larger than ``x``, and at most `ROUNDING` too small between. Of a layer with one position, ``J = g a^T``, nothing is
summed before: with ``c_k = (U_g^T g)_i (U_a^T a)_j`` the sum over k is a product with the squares of ``U_a^T a``, and
then one with the ``U_g^T g``, at any ``tau``.

The directions are those of a block's `leading` eigenvalues. What else a block knows is left out: the residual and the
correction of INF, the small eigenvalues of KFAC and EFB. On networks that chose the defaults the divergence at a prior
precision is then within 13 % of the exact one, but up to 4 times it where INF keeps few of many input directions. A
search compares it with exact values and corrects it (`posthoc_uq.fitting.faithful`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double, on_device
from posthoc_uq.heads.jacobians import Pulled
from posthoc_uq.heads.predictor import KeyedCache
from posthoc_uq.layers.operands import TOUCH_COST, Rows, chunks, rotate_output_gradients
from posthoc_uq.posteriors import Posterior
from posthoc_uq.posteriors.covariance import LayerRows, gram, jacobian_gram

_POINTS = 10  # for each decade
ROUNDING = (log(10) / _POINTS) ** 2 / 16  # the largest relative error of a variance by the grid
_DECADES = (-3, 13)  # of information; what is less counts as none, and what is more as the most


@dataclass(frozen=True)
class _Directions:
    """The leading eigenvectors of one layer.

    Attributes:
        inputs: ``(G, n, a)``.
        outputs: ``(G, m, g)``.
        points: below each eigenvalue, ``(G g a,)``; -1 where it counts as none.
        shares: of each that count to this point, and not to the next, ``(G g a,)``.
        information: the eigenvalues times the scale, as the prior precision of the posterior counts, ``(G, a, g)``.
        prior: the layer's prior precision, relative to that of the posterior.
    """

    inputs: Tensor
    outputs: Tensor
    points: Tensor
    shares: Tensor
    information: Tensor
    prior: float

    @property
    def complete(self) -> bool:
        """Whether there is no other direction."""
        return all(basis.shape[1] == basis.shape[2] for basis in (self.inputs, self.outputs))


class _Grid(NamedTuple):
    """The eigenvalues of a layer by the points that they lie between.

    Attributes:
        order: that of the points below them, ``(G g a,)``.
        first: how many count as none.
        places: of the points that any counts to, among those of the spectrum.
        parts: for each of these, which count to it, and the share of each.
    """

    order: Tensor
    first: int
    places: Tensor
    parts: list[tuple[slice, Tensor]]


@dataclass
class Sums:
    """What the covariances of a batch at every prior precision are computed from.

    Attributes:
        points: ``sum_k c_k c_k^T`` of each point, ``(samples, points, functions, functions)``; None where all layers
            have one position.
        rest: that of all other directions, ``(samples, functions, functions)``.
        squares: of each layer with one position ``(U_a^T a)^2``, over the prior, ``(G, samples, a)``.
        columns: of all these layers ``U_g^T g``, side by side, ``(samples, functions, numbers)``.
    """

    points: Tensor | None
    rest: Tensor
    squares: dict[str, Tensor]
    columns: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        several = [self.rest, self.columns, *self.squares.values()]
        several += [] if self.points is None else [self.points]
        return sum(tensor.nbytes for tensor in several)


class Spectrum:
    """The leading eigenvectors of a posterior's information, and its eigenvalues by their size.

    Args:
        posterior: one for which `supports` is true.
        width: its prior precision; of several by layer the mean one, to which they keep their ratios.
        dtype: of activations and output gradients.
        device: of activations and output gradients.
        limit: bytes that one temporary may take.
    """

    def __init__(
        self, posterior: Posterior, width: float, dtype: torch.dtype, device: torch.device, limit: int
    ) -> None:
        self._layers, self._limit, self.dtype = dict[str, _Directions](), limit, dtype
        self._variances = KeyedCache[dict[str, Tensor]]()  # at the last prior precision
        self._grids = dict[str, _Grid]()
        first, last = _DECADES
        for block, (name,) in posterior.members.items():
            leading = posterior.blocks[block].leading()
            assert leading is not None
            inputs, outputs = (on_device(tensor, device).to(dtype) for tensor in leading[:2])
            settings, prior = posterior.block_settings(block), posterior.layer_prior(name) / width
            information = as_double(leading[2]) * float(settings.scale) / prior
            places = ((information.flatten().clamp(min=1e-300).log10() - first) * _POINTS).clamp(min=-1)
            points = places.floor().clamp(max=(last - first) * _POINTS)
            # 1 / x is the mean of its values at the two points, which sets the shares
            step = 10.0 ** (1 / _POINTS)
            shares = ((10.0 ** ((points - places) / _POINTS) * step - 1) / (step - 1)).clamp(0, 1)
            kept = (
                points.long().to(device),
                shares.to(dtype).to(device),
                on_device(information, device).mT.contiguous(),
            )
            self._layers[name] = _Directions(inputs, outputs, *kept, prior)
        found = torch.cat([layer.points for layer in self._layers.values()]).unique()
        found = found[found >= 0]
        self._points = torch.cat([found, found + 1]).unique()
        self.sizes = 10.0 ** (as_double(self._points) / _POINTS + first)

    @staticmethod
    def supports(posterior: Posterior) -> bool:
        """Whether a posterior has a prior precision, and leading eigenvalues in each of its layers."""
        return (
            posterior.width_parameter == "prior_precision"
            and not posterior.weight_prior.precision
            and all(len(layers) == 1 for layers in posterior.members.values())
            and all(block.leading() is not None for block in posterior.blocks.values())
        )

    def contract(self, pulled: list[Pulled], samples: int, functions: int) -> Sums:
        """The sums of a batch. `pulled` is emptied, to free memory."""
        dtype, device = self.dtype, self._points.device
        points: Tensor | None = None
        rest = torch.zeros(samples, functions, functions, dtype=dtype, device=device)
        squares, columns = dict[str, Tensor](), list[Tensor]()
        while pulled:
            layer = pulled.pop()
            name, rows = layer.layer.name, LayerRows(layer.activations, layer.gradients())
            own = self._layers[name]
            if layer.activations.positions > 1:
                if points is None:
                    points = rest.new_zeros(samples, len(self._points), functions, functions)
                self._add_layer(name, rows, points, rest)
                continue
            of_inputs = rows.activations.project(own.inputs).squeeze(2).square() / own.prior
            of_outputs = rotate_output_gradients(rows.gradients, own.outputs).squeeze(4)
            of_outputs = of_outputs.transpose(1, 2).flatten(2)
            if not own.complete:
                totals = of_inputs.sum(2).repeat_interleave(own.outputs.shape[2], 1)
                rest += self._in_all_directions(own, rows) - _weighted_gram(totals, of_outputs)
            squares[name] = of_inputs.transpose(0, 1)
            columns.append(of_outputs)
        side_by_side = torch.cat(columns, 2) if columns else rest[:, :, :0]
        return Sums(points, rest, squares, side_by_side)

    def _in_all_directions(self, layer: _Directions, rows: LayerRows) -> Tensor:
        """``J J^T``, over the prior."""
        return jacobian_gram(*rows, layer.inputs.shape[1], self._limit) / layer.prior

    def _add_layer(self, name: str, rows: LayerRows, points: Tensor, rest: Tensor) -> None:
        """Add a layer with several positions to the sums of each point, and of all other directions."""
        layer = self._layers[name]
        if not layer.points.numel():
            if not layer.complete:
                rest += self._in_all_directions(layer, rows)
            return
        if _by_jacobian(layer, rows):
            cores = self._rotated_jacobian(layer, rows, rest)
        else:
            if not layer.complete:
                rest += self._in_all_directions(layer, rows)
            inputs, functions = rows.activations.project(layer.inputs), rows.gradients.shape[2]
            outputs = rotate_output_gradients(rows.gradients, layer.outputs)
            # one product for all functions, which does not copy the inputs for each: (S, G, F g, a)
            cores = torch.matmul(outputs.flatten(2, 3), inputs).unflatten(2, (functions, -1))
        cores = cores.transpose(1, 2).flatten(2)
        grid = self._grids.get(name)
        if grid is None:
            self._grids[name] = grid = self._grid(layer)
        cores = cores[:, :, grid.order]
        columns = cores.transpose(1, 2) / layer.prior
        if grid.places.numel():
            near = torch.stack(
                [torch.matmul(cores[:, :, part] * weights, columns[:, part]) for part, weights in grid.parts],
                1,
            )
            points.index_add_(1, grid.places, near)
            if not layer.complete:
                rest -= near.sum(1)
        if layer.complete and grid.first:
            rest += torch.matmul(cores[:, :, : grid.first], columns[:, : grid.first])

    def _rotated_jacobian(self, layer: _Directions, rows: LayerRows, rest: Tensor) -> Tensor:
        """``U_g^T J U_a`` ``(S, G, F, g, a)`` from J, whose ``J J^T`` is added to the rest."""
        activations, gradients = rows
        samples, groups, functions, outputs, _ = gradients.shape
        numbers, found = groups * functions * outputs * layer.inputs.shape[1], list[Tensor]()
        for part in chunks(samples, numbers, gradients.element_size(), self._limit):
            stacked = gradients[part].flatten(2, 3).transpose(2, 3)
            jacobian = activations.part(part).gradients(stacked, self._limit)
            if not layer.complete:
                by_function = jacobian.unflatten(2, (functions, outputs)).transpose(1, 2).flatten(2)
                rest[part] += gram(by_function, "covariance") / layer.prior
            rotated = Rows(jacobian).project(layer.inputs).unflatten(2, (functions, outputs))
            found.append(rotate_output_gradients(rotated, layer.outputs))
        return torch.cat(found)

    def _grid(self, layer: _Directions) -> _Grid:
        """How the eigenvalues of a layer lie on the grid."""
        order = layer.points.argsort()
        present, counts = layer.points[order].unique_consecutive(return_counts=True)
        ends: list[int] = counts.cumsum(0).tolist()
        spans = dict(zip(present.tolist(), pairwise([0, *ends]), strict=True))
        first = spans.pop(-1, (0, 0))[1]
        shares, parts = layer.shares[order], dict[int, tuple[slice, Tensor]]()
        for point in sorted({*spans, *(point + 1 for point in spans)}):
            # those below the point and those above it lie side by side
            below, above = spans.get(point - 1), spans.get(point)
            weights = [1 - shares[slice(*below)]] if below else []
            weights += [shares[slice(*above)]] if above else []
            span = slice((below or above or (0, 0))[0], (above or below or (0, 0))[1])
            parts[point] = span, torch.cat(weights)
        places = torch.searchsorted(self._points, torch.tensor([*parts], device=order.device))
        return _Grid(order, first, places, [*parts.values()])

    def covariances(self, found: Sums, width: float) -> Tensor:
        """Covariances ``(samples, functions, functions)`` at a prior precision, of what `contract` gave."""
        total = found.rest / width
        if found.points is not None:
            weights = (1 / (self.sizes + width)).to(total)
            total += torch.einsum("b,sbij->sij", weights, found.points)
        if found.squares:
            variances = self._variances.get(width, lambda: self._variances_at(width))
            weighted = [
                torch.bmm(squares, variances[name]).transpose(0, 1).flatten(1)
                for name, squares in found.squares.items()
            ]
            total += _weighted_gram(torch.cat(weighted, 1), found.columns)
        return total

    def _variances_at(self, width: float) -> dict[str, Tensor]:
        """``1 / (x + tau)`` of each layer's directions, ``(G, a, g)``."""
        return {
            name: (layer.information + width).reciprocal().to(self._points.device, self.dtype)
            for name, layer in self._layers.items()
        }


def _by_jacobian(layer: _Directions, rows: LayerRows) -> bool:
    """Whether J is cheaper than rotated activations and gradients, and what ``J J^T`` takes beside them."""
    _, _, functions, outputs, positions = rows.gradients.shape
    (_, inputs, of_inputs), of_outputs = layer.inputs.shape, layer.outputs.shape[2]
    rotated = inputs * of_inputs + functions * of_outputs * (outputs + of_inputs)
    rotated = positions * (rotated + TOUCH_COST * (of_inputs + functions * of_outputs))
    jacobian = functions * outputs * inputs * (positions + TOUCH_COST)
    if not layer.complete:
        rotated += min(jacobian, positions**2 * (inputs + functions * outputs))
    return jacobian + functions * outputs * of_inputs * (inputs + of_outputs) < rotated


def _weighted_gram(weights: Tensor, columns: Tensor) -> Tensor:
    """``sum w c c^T``, ``(samples, functions, functions)``, for weights ``(samples, numbers)`` and columns ``(samples,
    functions, numbers)``.
    """
    return torch.bmm(columns * weights.unsqueeze(1), columns.transpose(1, 2))
