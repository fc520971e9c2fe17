"""Covariances of outputs at every prior precision, from one set of backward passes.

Where a layer's precision is ``scale U diag(lambda) U^T + tau`` with orthonormal directions ``u_k``,

    J Sigma J^T = sum_k c_k c_k^T / (scale lambda_k + tau) + (J J^T - sum_k c_k c_k^T) / tau,    c_k = J u_k,

in which no product depends on the prior precision ``tau``. They are summed up by the sizes ``x`` of ``scale lambda_k``
between the points of a grid with `_POINTS` for each decade, so that a sample needs a few small matrices, whatever the
number of weights. Each counts to the two points around it so that ``1 / (x + tau)`` is right for ``tau`` much smaller
or larger than ``x``, and at most `ROUNDING` too small between.

The directions are those of a block's `leading` eigenvalues. What else a block knows is left out: the residual and the
correction of INF, the small eigenvalues of KFAC and EFB. On networks that chose the defaults the divergence at a prior
precision is then within 13 % of the exact one, but up to 4 times it where INF keeps few of many input directions. A
search compares it with exact values and corrects it (`posthoc_uq.fitting.faithful`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double, on_device
from posthoc_uq.heads.jacobians import Pulled
from posthoc_uq.layers.operands import rotate_output_gradients
from posthoc_uq.posteriors import Posterior
from posthoc_uq.posteriors.covariance import LayerRows, Mode, jacobian_gram

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
        prior: the layer's prior precision, relative to that of the posterior.
    """

    inputs: Tensor
    outputs: Tensor
    points: Tensor
    shares: Tensor
    prior: float


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
            kept = points.long().to(device), shares.to(dtype).to(device)
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

    def contract(self, pulled: list[Pulled], samples: int, functions: int, mode: Mode) -> Tensor:
        """``sum_k c_k c_k^T`` of each point, and last that of all other directions, ``(samples, points + 1, functions,
        functions)``. `pulled` is emptied, to free memory.
        """
        assert mode == "covariance"
        total: Tensor | None = None
        while pulled:
            layer = pulled.pop()
            sums = self._of_layer(self._layers[layer.layer.name], layer.rows(functions))
            total = sums if total is None else total.add_(sums)
        if total is None:
            return torch.zeros(
                samples, len(self._points) + 1, functions, functions, device=self._points.device
            )
        return total

    def _of_layer(self, layer: _Directions, rows: LayerRows) -> Tensor:
        activations, gradients = rows
        samples, _, functions = gradients.shape[:3]
        sums = gradients.new_zeros(samples, len(self._points) + 1, functions, functions)
        sums[:, -1] = jacobian_gram(activations, gradients, layer.inputs.shape[1], self._limit) / layer.prior
        if not layer.points.numel():
            return sums
        inputs = activations.project(layer.inputs).unsqueeze(2)
        cores = torch.matmul(rotate_output_gradients(gradients, layer.outputs), inputs)  # (S, G, F, g, a)
        cores = cores.transpose(1, 2).flatten(2)
        order = layer.points.argsort()
        present, counts = layer.points[order].unique_consecutive(return_counts=True)
        parts = zip(
            present.tolist(),
            torch.searchsorted(self._points, present).tolist(),
            cores[:, :, order].split(counts.tolist(), dim=2),
            layer.shares[order].split(counts.tolist()),
            strict=True,
        )
        for point, place, part, shares in parts:
            if point >= 0:
                columns = part.transpose(1, 2) / layer.prior
                below = torch.matmul(part * shares, columns)
                sums[:, place] += below
                sums[:, place + 1] += torch.matmul(part, columns) - below
        sums[:, -1] -= sums[:, :-1].sum(1)
        return sums

    def covariances(self, sums: Tensor, width: float) -> Tensor:
        """Covariances ``(samples, functions, functions)`` at a prior precision, of sums that `contract` gave."""
        weights = torch.cat([1 / (self.sizes + width), self.sizes.new_tensor([1 / width])])
        return torch.einsum("b,sbij->sij", weights.to(sums), sums)
