"""Quasi-random draws of Gaussian outputs, the same for every input and call, and the class probabilities from them."""

from __future__ import annotations

from functools import lru_cache
from math import log, sqrt

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from posthoc_uq.devices import as_double
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.samples import smallest_counts
from posthoc_uq.predictions.spread import Spread, independent

_AT_ONCE = 2**18  # numbers of the draws computed at once, so that they stay in the cache
_UNDERFLOW = -1e4  # a logit this far below the largest has probability zero
# Constants of `log_logistic_normal`, fitted to quadrature for variances up to 400.
_LOGISTIC, _PROBIT, _TURN, _POWER = 0.03632, 3.5463, 0.1193, 3.175


def from_draws(mean: Tensor, variance: Tensor, spread: Spread, n_draws: int) -> ClassPrediction:
    """The prediction of Gaussian logits, by draws of them.

    The logits are ``f = mean + root z + sqrt(rest) e``. Each draw's probability of class ``c`` is integrated over its
    own ``e_c``, with ``g_c = mean_c + (root z)_c`` (Rao-Blackwell):

    ``E[softmax(f)_c | z, e_d for d != c] = E[sigmoid(N(g_c - log sum_(d != c) exp f_d, rest_c))]``

    Expected entropy, votes and the variance of the probabilities are those of the draws themselves. Draws are points
    of a scrambled Sobol sequence (Owen 1998), the directions of `root` first.

    Args:
        mean: logits ``(batch, classes)``.
        variance: of the logits, for the prediction's `logits_variance`; of the same shape.
        spread: the distribution that is drawn from.
        n_draws: points of the sequence.
    """
    directions = spread.root.shape[2]
    width = directions + mean.shape[1]
    if torch.compiler.is_compiling():
        return _from_points(mean, variance, spread, normals(n_draws, width).to(mean))
    points = placed_normals(n_draws, width, mean.dtype, mean.device)
    rows = max(1, _AT_ONCE // (n_draws * mean.shape[1]))
    tensors = (mean, variance, spread.root, spread.rest)
    parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return ClassPrediction.cat([_from_points(m, v, Spread(root, rest), points) for m, v, root, rest in parts])


@lru_cache(maxsize=8)
def normals(n_draws: int, width: int) -> Tensor:
    """Standard normals ``(n_draws, width)``, cached, since a tracer needs them as constants. Columns beyond the
    dimensions of the sequence are pseudo-random.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):  # cached tensors must work with autograd too
        engine = SobolEngine(min(width, SobolEngine.MAXDIM), scramble=True, seed=0)
        uniform = engine.draw(n_draws, dtype=torch.float64)
        edge = 0.5 / 2**30  # the engine's points are multiples of 2^-30, zero among them
        quasi_random = torch.special.ndtri(uniform.clamp(edge, 1 - edge))
        more = width - quasi_random.shape[1]
        return torch.cat(
            [
                quasi_random,
                torch.randn(n_draws, more, generator=generator, dtype=torch.float64, device="cpu"),
            ],
            1,
        )


@lru_cache(maxsize=8)
def placed_normals(n_draws: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`normals` in a given precision and on a given device."""
    with torch.inference_mode(False):
        return normals(n_draws, width).to(device, dtype)


def output_draws(mean: Tensor, variance: Tensor, covariance: Tensor | Spread | None, n_draws: int) -> Tensor:
    """Draws ``(n_draws, batch, ...)`` of Gaussian outputs, by the same points as `from_draws`.

    Args:
        mean: ``(batch, ...)``.
        variance: of the same shape.
        covariance: ``(batch, outputs, outputs)``, or the `Spread` of many; None for independent outputs.
        n_draws: how many.
    """
    flat = mean.reshape(mean.shape[0], -1)  # not `len`, which would be a constant in an exported program
    if covariance is None:
        spread = independent(variance.reshape(flat.shape))
    elif isinstance(covariance, Spread):
        spread = covariance
    else:
        spread = Spread(symmetric_root(covariance).to(flat), torch.zeros_like(flat))
    directions = spread.root.shape[2]
    width = directions + flat.shape[1]
    if torch.compiler.is_compiling():
        points = normals(n_draws, width).to(flat)
    else:
        points = placed_normals(n_draws, width, flat.dtype, flat.device)
    # the root of a variance of 0 has an infinite derivative
    deviations = spread.rest.clamp(min=torch.finfo(spread.rest.dtype).tiny).sqrt()
    draws = flat + deviations * points[:, directions:].unsqueeze(1)
    if directions:
        draws = draws + torch.einsum("bkr,sr->sbk", spread.root, points[:, :directions])
    return draws.reshape(n_draws, *mean.shape)


def symmetric_root(covariance: Tensor) -> Tensor:
    """The symmetric root of each matrix, which changes little when the matrix does; NaN where that is not finite."""
    wide = as_double(covariance)
    not_finite = ~torch.isfinite(wide).flatten(1).all(1)[:, None, None]
    values, vectors = torch.linalg.eigh(wide.masked_fill(not_finite, 0.0))
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.transpose(1, 2)
    return root.masked_fill(not_finite, float("nan"))


def _from_points(mean: Tensor, variance: Tensor, spread: Spread, points: Tensor) -> ClassPrediction:
    directions = spread.root.shape[2]
    common = mean
    if directions > 0:
        common = mean + torch.einsum("bcr,sr->sbc", spread.root, points[:, :directions])
    logits = common + spread.rest.sqrt() * points[:, directions:].unsqueeze(1)
    # Relative to the largest, which is left out of the sum: it is 1, and subtracting it from the total would cancel.
    largest, winner = logits.max(-1, keepdim=True)
    shifted = (logits - largest).scatter(-1, winner, float("-inf"))
    scaled = shifted.exp()
    runners = scaled.sum(-1, keepdim=True)
    total = 1 + runners
    others = (total - scaled).scatter(-1, winner, runners.clamp(min=torch.finfo(mean.dtype).tiny)).log()
    log_probs = log_logistic_normal(common - largest - others, spread.rest)
    log_probs = (torch.logsumexp(log_probs, 0) - log(len(points))).log_softmax(-1)
    # 0 * -inf would be NaN
    weighted_logits = (scaled * shifted.clamp(min=_UNDERFLOW)).sum(-1, keepdim=True)
    probs = (scaled / total).scatter(-1, winner, 1 / total)
    return ClassPrediction(
        probs=log_probs.exp(),
        logits_mean=mean,
        logits_variance=variance,
        sample_entropy=(total.log() - weighted_logits / total).mean(0).squeeze(-1),
        log_probs=log_probs,
        # `Tensor.var` over the first dimension takes several times as long
        probs_variance=(probs - probs.mean(0)).square().sum(0) / max(1, len(points) - 1),
        votes=_counts(winner.squeeze(-1), mean.shape[1]),
    )


def _counts(winners: Tensor, classes: int) -> Tensor:
    """How often each class wins, ``(batch, classes)``, from the winners ``(draws, batch)``."""
    draws, inputs = winners.shape
    rows = torch.arange(inputs, device=winners.device).expand(draws, inputs)
    # by `index_put`, whose sums have a deterministic form on every device
    counts = torch.zeros(inputs, classes, dtype=torch.int64, device=winners.device)
    counts = counts.index_put((rows, winners), torch.ones_like(winners), accumulate=True)
    return smallest_counts(counts, draws)


def log_logistic_normal(mean: Tensor, variance: Tensor) -> Tensor:
    """``log E[sigmoid(x)]`` for ``x ~ N(mean, variance)``, to 0.008 for any mean and variance, exact at variance 0.

    ``E[sigmoid(x)] = exp(m + v / 2) E[sigmoid(y)]`` with ``y ~ N(-m - v, v)`` is exact, and leaves means of at least
    ``-v / 2``. For these it is a mixture of the two limits, a logistic curve and a normal one, whose weight and widths
    depend on the variance (the widths as in MacKay 1992, the constants fitted to quadrature).

    Args:
        mean: of any shape.
        variance: not negative, of a shape that fits.
    """
    steep = (variance / (variance + _TURN)) ** _POWER
    logistic = (1 + _LOGISTIC * variance).rsqrt()
    probit = (variance + _PROBIT).rsqrt() / sqrt(2)
    moved = mean + variance / 2
    inner = moved.abs() - variance / 2
    mixture = (1 - steep) * torch.sigmoid(logistic * inner) + steep / 2 * torch.erfc(-probit * inner)
    return moved.clamp(max=0) + mixture.clamp(min=torch.finfo(mean.dtype).tiny).log()
