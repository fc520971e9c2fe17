"""From Gaussian logits to class probabilities, for the heads that know mean and variance rather than samples."""

from __future__ import annotations

from functools import lru_cache
from math import log, log1p, pi
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.classification import ClassPrediction
from posthoc_uq.heads.prediction import Prediction, no_prediction, noise_of
from posthoc_uq.heads.regression import RegressionPrediction
from posthoc_uq.heads.samples import at_least_float32
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.numerics import as_double

Link = Literal["probit", "mc", "bridge"]
LINKS: tuple[str, ...] = ("probit", "mc", "bridge")


def check_link(link: str, n_draws: int) -> None:
    """Refuse an unknown link.

    Raises:
        PosthocUQError: the link is none of `LINKS`, or there would be no draw.
    """
    if link not in LINKS:
        raise PosthocUQError(f"link must be one of {LINKS}, not {link!r}.")
    if n_draws < 1:
        raise PosthocUQError(f"link='mc' needs at least one draw of the logits, not n_draws={n_draws}.")


def from_gaussian(
    mean: Tensor,
    variance: Tensor,
    posterior: Posterior,
    *,
    covariance: Tensor | None = None,
    link: str = "probit",
    n_draws: int = 100,
) -> Prediction:
    """The prediction of Gaussian outputs ``N(mean, variance)``.

    The posterior's temperature divides logits; its noise is added to the outputs of a regression. Links of a
    classification: ``"probit"`` is ``softmax(m / sqrt(1 + pi v / 8))`` (MacKay 1992; Spiegelhalter, Lauritzen
    1990); ``"mc"`` averages the softmax over `n_draws` draws of the logits, the same for every input, and alone
    gives an expected entropy; ``"bridge"`` is the mean of a Dirichlet by Laplace's approximation in the softmax
    basis (Hobbhahn, Kristiadi, Hennig 2022).

    Args:
        mean: outputs ``(batch, outputs)``, or ``(batch,)`` for one.
        variance: of the same shape, in squared units.
        posterior: gives likelihood, temperature and noise.
        covariance: ``(batch, outputs, outputs)`` where the head knows it; ``"mc"`` and ``"bridge"`` use it, and
            ``"probit"`` with two classes, whose logit difference has variance ``v_0 + v_1 - 2 c_01``.
        link: one of `LINKS`.
        n_draws: of the logits, for ``"mc"``.

    Raises:
        PosthocUQError: the likelihood is one that no prediction is defined for.
    """
    mean, variance = at_least_float32(mean), at_least_float32(variance).clamp(min=0)
    likelihood, temperature = posterior.likelihood, posterior.temperature
    if isinstance(likelihood, Gaussian):
        return RegressionPrediction(mean, variance, noise_of(posterior, mean.device))
    if temperature != 1.0:
        mean, variance = mean / temperature, variance / temperature**2
        covariance = None if covariance is None else covariance / temperature**2
    if isinstance(likelihood, Bernoulli):
        return _binary(mean.reshape(-1, 1), variance.reshape(-1, 1), link, n_draws)
    if isinstance(likelihood, Categorical):
        return _classes(mean, variance, covariance, link, n_draws)
    raise no_prediction(likelihood)


def _binary(mean: Tensor, variance: Tensor, link: str, n_draws: int) -> ClassPrediction:
    if link == "mc":
        drawn = ClassPrediction.from_logits(_draws(mean, variance, None, n_draws), binary=True)
        return ClassPrediction(drawn.probs, mean, variance, drawn.sample_entropy, drawn.log_probs)
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
    mean: Tensor, variance: Tensor, covariance: Tensor | None, link: str, n_draws: int
) -> ClassPrediction:
    if link == "mc":
        drawn = ClassPrediction.from_logits(_draws(mean, variance, covariance, n_draws))
        return ClassPrediction(drawn.probs, mean, variance, drawn.sample_entropy, drawn.log_probs)
    if link == "bridge":
        log_probs = _bridge(mean, torch.diag_embed(variance) if covariance is None else covariance).log()
    elif mean.shape[1] == 2 and covariance is not None:
        spread = (variance.sum(1, keepdim=True) - 2 * covariance[:, 0, 1:2]).clamp(min=0)
        scaled = (mean[:, 1:] - mean[:, :1]) / (1 + pi * spread / 8).sqrt()
        log_probs = torch.cat([F.logsigmoid(-scaled), F.logsigmoid(scaled)], dim=1)
    else:
        log_probs = (mean / (1 + pi * variance / 8).sqrt()).log_softmax(1)
    return ClassPrediction(log_probs.exp(), mean, variance, None, log_probs)


def _draws(mean: Tensor, variance: Tensor, covariance: Tensor | None, n_draws: int) -> Tensor:
    """Logits ``(n_draws, batch, classes)``, in antithetic pairs.

    Every input gets the same normals, so that a prediction depends neither on the batch it came in nor on a seed.
    """
    normals = _normals(n_draws, mean.shape[1]).to(mean)
    if covariance is None:
        return mean + variance.sqrt() * normals.unsqueeze(1)
    return mean + torch.einsum("bij,sj->sbi", _root(covariance).to(mean), normals)


@lru_cache(maxsize=8)
def _normals(n_draws: int, outputs: int) -> Tensor:
    """Standard normals ``(n_draws, outputs)`` in antithetic pairs, kept: a tracer must find them as constants."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn((n_draws + 1) // 2, outputs, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])[:n_draws]


def _root(covariance: Tensor) -> Tensor:
    """A square root ``(batch, classes, classes)``; a covariance of fewer directions than classes has one too."""
    values, vectors = torch.linalg.eigh(as_double(covariance))
    return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Dirichlet, ``(batch, classes)``; logits are first projected to the sum zero, on which softmax does
    not depend.

    ``alpha_c = (1 - 2 / C + exp(f_c) / C^2 sum_d exp(-f_d)) / v_c``.
    """
    classes = mean.shape[1]
    sums = covariance.sum(-1)
    total = sums.sum(-1, keepdim=True)
    # Logits that are certain of their sum are projected by taking off their mean.
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    known = total <= 100 * torch.finfo(mean.dtype).eps * trace
    total = torch.where(known, torch.ones_like(total), total)
    plain = mean - mean.mean(-1, keepdim=True)
    projected = torch.where(known, plain, mean - sums * mean.sum(-1, keepdim=True) / total)
    removed = torch.where(known, torch.zeros_like(sums), sums.square() / total)
    spread = covariance.diagonal(dim1=-2, dim2=-1) - removed
    exponent = projected + torch.logsumexp(-projected, -1, keepdim=True) - 2 * log(classes)
    share = exponent
    if classes > 2:
        share = torch.logaddexp(exponent, torch.full_like(exponent, log1p(-2 / classes)))
    smallest = torch.finfo(mean.dtype).tiny
    return (share - spread.clamp(min=smallest).log()).softmax(-1)
