"""Moments and divergence of spike-and-slab weights, with gradients written by hand.

A weight is ``w = g s`` with ``g ~ Bernoulli(a)`` and a slab ``s ~ N(c, v)``, ``c = mu z``. Autograd would keep some
twenty tensors of the layer's size for what follows, and make as many passes over memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.devices import widest


@dataclass(frozen=True)
class SlabPrior:
    """``p(g = 1) = inclusion``, ``s ~ N(mean, deviation^2)``."""

    inclusion: float
    mean: float = 0.0
    deviation: float = 1.0


class SpikeMoments(torch.autograd.Function):
    """Mean and variance of every weight, and the sum of their divergences from the prior, for a given ``z``:

    ``E w = a c``, ``Var w = a (v + (1 - a) c^2)``, and
    ``KL = a (log(s0 / sd) - 1/2 + (v + (c - m0)^2) / (2 s0^2) + log(a / p)) + (1 - a) log((1 - a) / (1 - p))``.

    Both passes go over the weights piece by piece, so that what they compute on the way stays in the processor's cache,
    and nothing is kept for the gradients but the arguments.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_variance: Tensor, logit: Tensor, z: Tensor | None, prior: SlabPrior
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Args:
            mean: ``mu``.
            log_variance: ``log v``, in its shape.
            logit: of the inclusion probability ``a``, in its shape.
            z: a factor on the means that broadcasts to them; None for 1.
            prior: of all weights.

        Returns:
            Mean and variance in the shape of `mean`, the divergence and the sum of the inclusion probabilities.
        """
        ctx.prior = prior
        ctx.save_for_backward(mean, log_variance, logit, z)
        means, spreads = torch.empty_like(mean), torch.empty_like(mean)
        totals: list[Tensor] = []
        for piece in _pieces(mean):
            parts = mean[piece], log_variance[piece], logit[piece], _part(z, piece)
            totals.append(_moments(*parts, prior, means[piece], spreads[piece]))
        divergence, included = torch.stack(totals).sum(0, dtype=widest(mean.device))
        divergence = divergence - logit.numel() * log(1 - prior.inclusion) - included * _logit(prior)
        included = included.to(mean)
        ctx.mark_non_differentiable(included)
        return means, spreads, divergence.to(mean), included

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, log_variance, logit, z = ctx.saved_tensors
        by_mean, by_log, by_logit = (torch.empty_like(mean) for _ in range(3))
        by_z: Tensor | None = None if z is None else torch.zeros_like(z)
        for piece in _pieces(mean):
            parts = mean[piece], log_variance[piece], logit[piece], _part(z, piece)
            incoming = gradients[0][piece], gradients[1][piece], gradients[2]
            by_slab = by_mean[piece]
            _gradients(*parts, incoming, ctx.prior, (by_slab, by_log[piece], by_logit[piece]))
            scale = _part(z, piece)
            if by_z is not None and scale is not None:
                of_piece = _part(by_z, piece)
                assert of_piece is not None
                of_piece.add_((by_slab * mean[piece]).sum_to_size(scale.shape))
                by_slab.mul_(scale)
        return by_mean, by_log, by_logit, by_z, None


_PIECE = 2**16  # numbers, of which a core's cache holds some


def _pieces(tensor: Tensor) -> list[slice]:
    """Slices along the first side; all of it on devices that compute in parallel."""
    rows = tensor.shape[0]
    step = max(1, _PIECE // max(1, tensor[0].numel())) if tensor.device.type == "cpu" else rows
    return [slice(start, start + step) for start in range(0, rows, step)]


def _part(z: Tensor | None, piece: slice) -> Tensor | None:
    """What of ``z`` belongs to a piece of the weights."""
    return z if z is None or z.shape[0] == 1 else z[piece]


def _moments(
    mean: Tensor,
    log_variance: Tensor,
    logit: Tensor,
    z: Tensor | None,
    prior: SlabPrior,
    means: Tensor,
    spreads: Tensor,
) -> Tensor:
    """Writes mean and variance of some weights; gives two sums: of the divergences, but for the part by which they
    depend on the prior inclusion, and of the inclusion probabilities.
    """
    slab = mean if z is None else mean * z
    inclusion, variance = torch.sigmoid(logit), log_variance.exp()
    excluded = torch.sigmoid(-logit)  # 1 - inclusion has no digits left where the inclusion is near 1
    torch.mul(inclusion, slab, out=means)
    torch.mul(slab, slab, out=spreads).mul_(excluded).add_(variance).mul_(inclusion)
    squares = _squares(slab, variance, prior).mul_(0.5 / prior.deviation**2)
    gaussian = squares.add_(log_variance, alpha=-0.5).add_(log(prior.deviation) - 0.5).mul_(inclusion)
    # log a and log(1 - a) = log a - logit, which keep their digits at both ends
    gaussian.add_(F.logsigmoid(logit)).addcmul_(excluded, logit, value=-1)
    return torch.stack([gaussian.sum(), inclusion.sum()])


def _gradients(
    mean: Tensor,
    log_variance: Tensor,
    logit: Tensor,
    z: Tensor | None,
    incoming: tuple[Tensor, Tensor, Tensor],
    prior: SlabPrior,
    outgoing: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes the gradients by the slab's mean, the logarithm of its variance and the logit of the inclusion, of some
    weights, from those by the mean, the variance and the divergence.
    """
    by_mean, by_spread, by_total = incoming
    by_slab, by_log, by_logit = outgoing
    slab = mean if z is None else mean * z
    inclusion, variance = torch.sigmoid(logit), log_variance.exp()
    excluded, precision = torch.sigmoid(-logit), 1 / prior.deviation**2
    # by the inclusion probability, and through it by its logit
    torch.add(logit, log_variance, alpha=-0.5, out=by_logit)
    by_logit.add_(_squares(slab, variance, prior), alpha=0.5 * precision)
    by_logit.add_(log(prior.deviation) - 0.5 - _logit(prior)).mul_(by_total).addcmul_(by_mean, slab)
    spread = torch.addcmul(variance, slab * slab, excluded - inclusion)
    by_logit.addcmul_(by_spread, spread).mul_(inclusion).mul_(excluded)
    # by the logarithm of the slab's variance
    torch.add(by_spread, 0.5 * precision * by_total, out=by_log)
    by_log.mul_(variance).sub_(0.5 * by_total).mul_(inclusion)
    # by the slab's mean
    torch.mul(slab, precision * by_total, out=by_slab).add_(by_mean)
    if prior.mean:
        by_slab.sub_(prior.mean * precision * by_total)
    by_slab.addcmul_(by_spread, excluded.mul_(slab), value=2).mul_(inclusion)


def _logit(prior: SlabPrior) -> float:
    return log(prior.inclusion / (1 - prior.inclusion))


def _squares(slab: Tensor, variance: Tensor, prior: SlabPrior) -> Tensor:
    """``v + (c - m0)^2``."""
    centred = slab - prior.mean if prior.mean else slab
    return torch.addcmul(variance, centred, centred)


def gaussian_divergence(mean: Tensor, log_variance: Tensor, deviation: float) -> Tensor:
    """``KL(N(mean, exp(log_variance)) || N(0, deviation^2))``, summed."""
    ratio = (log_variance.exp() + mean.square()) / (2 * deviation**2)
    return (log(deviation) - 0.5 * log_variance - 0.5 + ratio).sum()
