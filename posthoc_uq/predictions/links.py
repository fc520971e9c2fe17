"""From Gaussian logits to class probabilities, for the heads that know mean and variance rather than samples."""

from __future__ import annotations

from dataclasses import replace
from math import log, log1p, pi
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.draws import from_draws
from posthoc_uq.predictions.spread import Spread, independent, of_covariance
from posthoc_uq.values import COUNT, one_of

Link = Literal["probit", "mc", "bridge"]
LINKS: tuple[str, ...] = ("probit", "mc", "bridge")
DRAWS = 256  # default number of draws of the logits


def checked_link(link: str, n_draws: int) -> tuple[str, int]:
    """A link and its number of draws.

    Raises:
        PosthocUQError: the link is none of `LINKS`, or there would be no draw.
    """
    return one_of("link", link, LINKS), COUNT("n_draws", n_draws)


def classes_of_gaussian(
    mean: Tensor,
    variance: Tensor,
    covariance: Tensor | Spread | None = None,
    link: str = "mc",
    n_draws: int = DRAWS,
    *,
    binary: bool = False,
) -> ClassPrediction:
    """The prediction of Gaussian logits ``N(mean, variance)``.

    * ``"mc"`` averages the softmax over `n_draws` quasi-random draws of the logits, the same for every input, and is
      the only link with expected entropy, votes and the variance of the probabilities; see `from_draws`.
    * ``"probit"`` is ``softmax(m / sqrt(1 + pi v / 8))`` (MacKay 1992; Spiegelhalter, Lauritzen 1990). Where the
      covariance is known, ``v`` is the variance of the centred logits, ``v_c = C / (C - 1) Var(f_c - mean_d f_d)``,
      which for independent logits of one variance is that variance. Without a covariance it is the logits' own
      variance. A part of it that all logits share, which softmax ignores, then makes the prediction too cautious.
    * ``"bridge"`` is the mean of a Dirichlet by Laplace's approximation in the softmax basis (Hobbhahn, Kristiadi,
      Hennig 2022).

    Args:
        mean: logits ``(batch, classes)``, in float32 at least; with `binary` ``(batch,)`` or ``(batch, 1)``.
        variance: of the same shape.
        covariance: ``(batch, classes, classes)`` where it is known, or the `Spread` of many classes. Without it logits
            count as independent. With two classes ``"probit"`` uses the variance of the logits' difference,
            ``v_0 + v_1 - 2 c_01``. ``"bridge"`` takes no `Spread`, and one logit has no covariance.
        link: one of `LINKS`.
        n_draws: of the logits, for ``"mc"``.
        binary: one Bernoulli logit.
    """
    if binary:
        return _binary(mean.reshape(-1, 1), variance.reshape(-1, 1), link, n_draws)
    return _classes(mean, variance, covariance, link, n_draws)


def _binary(mean: Tensor, variance: Tensor, link: str, n_draws: int) -> ClassPrediction:
    if link == "mc":
        # One logit is the difference of two independent ones of half its variance.
        pair = torch.cat([-mean, mean], dim=1) / 2
        drawn = from_draws(pair, variance.expand_as(pair), independent(variance.expand_as(pair) / 2), n_draws)
        return replace(drawn, logits_mean=mean, logits_variance=variance)
    if link == "bridge":
        # One logit is the difference of two whose sum is zero, z / 2 and -z / 2.
        pair = torch.cat([-mean, mean], dim=1) / 2
        sign = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=mean.dtype, device=mean.device) / 4
        log_probs = _bridge(pair, variance.unsqueeze(-1) * sign).log()
    else:
        scaled = mean / (1 + pi * variance / 8).sqrt()
        log_probs = torch.cat([F.logsigmoid(-scaled), F.logsigmoid(scaled)], dim=1)
    return ClassPrediction(log_probs.exp(), mean, variance, None, log_probs)


def _classes(
    mean: Tensor, variance: Tensor, covariance: Tensor | Spread | None, link: str, n_draws: int
) -> ClassPrediction:
    if link == "mc":
        if covariance is None:
            covariance = independent(variance)
        elif isinstance(covariance, Tensor):
            covariance = of_covariance(mean, covariance)
        return from_draws(mean, variance, covariance, n_draws)
    if link == "bridge":
        full = isinstance(covariance, Tensor)
        log_probs = _bridge(mean, covariance if full else torch.diag_embed(variance)).log()
    elif mean.shape[1] == 2 and isinstance(covariance, Tensor):
        spread = (variance.sum(1, keepdim=True) - 2 * covariance[:, 0, 1:2]).clamp(min=0)
        scaled = (mean[:, 1:] - mean[:, :1]) / (1 + pi * spread / 8).sqrt()
        log_probs = torch.cat([F.logsigmoid(-scaled), F.logsigmoid(scaled)], dim=1)
    else:
        centred = variance if covariance is None else _centred_variance(covariance)
        log_probs = (mean / (1 + pi * centred / 8).sqrt()).log_softmax(1)
    return ClassPrediction(log_probs.exp(), mean, variance, None, log_probs)


def _centred_variance(covariance: Tensor | Spread) -> Tensor:
    """``C / (C - 1) Var(f_c - mean_d f_d)``, ``(batch, classes)``."""
    if isinstance(covariance, Spread):  # `rest` already holds the variance of independent logits
        classes = covariance.rest.shape[1]
        return covariance.root.square().sum(-1) * (classes / (classes - 1)) + covariance.rest
    classes = covariance.shape[1]
    sums = covariance.mean(2)
    variance = covariance.diagonal(dim1=1, dim2=2) - 2 * sums + sums.mean(1, keepdim=True)
    return variance.clamp(min=0) * (classes / (classes - 1))


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Dirichlet, ``(batch, classes)``; logits are first projected to the sum zero, on which softmax does
    not depend.

    ``alpha_c = (1 - 2 / C + exp(f_c) / C^2 sum_d exp(-f_d)) / v_c``.
    """
    classes = mean.shape[1]
    sums = covariance.sum(-1)
    total = sums.sum(-1, keepdim=True)
    # Logits whose sum has no variance are projected by subtracting their mean.
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    certain_sum = total <= 100 * torch.finfo(mean.dtype).eps * trace
    total = torch.where(certain_sum, torch.ones_like(total), total)
    plain = mean - mean.mean(-1, keepdim=True)
    projected = torch.where(certain_sum, plain, mean - sums * mean.sum(-1, keepdim=True) / total)
    removed = torch.where(certain_sum, torch.zeros_like(sums), sums.square() / total)
    spread = covariance.diagonal(dim1=-2, dim2=-1) - removed
    exponent = projected + torch.logsumexp(-projected, -1, keepdim=True) - 2 * log(classes)
    share = exponent
    if classes > 2:
        share = torch.logaddexp(exponent, torch.full_like(exponent, log1p(-2 / classes)))
    smallest = torch.finfo(mean.dtype).tiny
    return (share - spread.clamp(min=smallest).log()).softmax(-1)
