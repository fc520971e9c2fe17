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
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_variance: Tensor, logit: Tensor, z: Tensor | None, prior: SlabPrior
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            mean: ``mu``.
            log_variance: ``log v``, in its shape.
            logit: of the inclusion probability ``a``, in its shape.
            z: a factor on the means that broadcasts to them; None for 1.
            prior: of all weights.
        """
        slab = mean if z is None else mean * z
        inclusion, variance = torch.sigmoid(logit), log_variance.exp()
        excluded, wide = 1 - inclusion, widest(mean.device)
        ctx.prior = prior
        ctx.save_for_backward(mean, log_variance, logit, z, inclusion, variance)
        spread = (slab * slab).mul_(excluded).add_(variance).mul_(inclusion)
        gaussian = _gaussian_part(slab, log_variance, variance, prior)
        # log a and log(1 - a) = log a - logit, which keep their digits at both ends
        choice = F.logsigmoid(logit).addcmul_(excluded, logit, value=-1)
        constant = logit.numel() * -log(1 - prior.inclusion)
        priors = inclusion.sum(dtype=wide) * log(prior.inclusion / (1 - prior.inclusion))
        total = gaussian.mul_(inclusion).add_(choice).sum(dtype=wide) + constant - priors
        return inclusion * slab, spread, total.to(mean)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_mean, by_spread, by_total = gradients
        mean, log_variance, logit, z, inclusion, variance = ctx.saved_tensors
        prior: SlabPrior = ctx.prior
        slab = mean if z is None else mean * z
        precision = 1 / prior.deviation**2
        # by the inclusion probability, and through it by its logit
        total = _gaussian_part(slab, log_variance, variance, prior).add_(logit)
        total.sub_(log(prior.inclusion / (1 - prior.inclusion))).mul_(by_total)
        total.addcmul_(by_mean, slab)
        spread = (slab * slab).mul_(1 - 2 * inclusion).add_(variance)
        by_logit = total.addcmul_(by_spread, spread).mul_(inclusion).mul_(1 - inclusion)
        # by the logarithm of the slab's variance
        by_log = (by_spread + 0.5 * precision * by_total).mul_(variance).sub_(0.5 * by_total).mul_(inclusion)
        # by the slab's mean, and through it by mu and z
        by_slab = (slab - prior.mean).mul_(precision * by_total).add_(by_mean)
        by_slab.addcmul_(by_spread, (1 - inclusion).mul_(slab), value=2).mul_(inclusion)
        by_z = None if z is None else (by_slab * mean).sum_to_size(z.shape)
        return (by_slab if z is None else by_slab.mul_(z)), by_log, by_logit, by_z, None


def _gaussian_part(slab: Tensor, log_variance: Tensor, variance: Tensor, prior: SlabPrior) -> Tensor:
    """``KL(N(c, v) || N(m0, s0^2))`` of every slab."""
    squares = (slab - prior.mean).square_().add_(variance)
    squares.mul_(0.5 / prior.deviation**2).add_(log_variance, alpha=-0.5)
    return squares.add_(log(prior.deviation) - 0.5)


def gaussian_divergence(mean: Tensor, log_variance: Tensor, deviation: float) -> Tensor:
    """``KL(N(mean, exp(log_variance)) || N(0, deviation^2))``, summed."""
    ratio = (log_variance.exp() + mean.square()) / (2 * deviation**2)
    return (log(deviation) - 0.5 * log_variance - 0.5 + ratio).sum()
