"""From Gaussian outputs to predictions: quasi-random draws, links, and sums over draws while they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import log, log1p, pi, sqrt
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.quasirandom import SobolEngine

from posthoc_uq.core.devices import as_double, widest
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, check_option, one_of
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.prediction import (
    at_least_float32,
    class_votes,
    entropy_from,
    log_probabilities,
    smallest_counts,
)
from posthoc_uq.likelihoods.value_prediction import RegressionPrediction, placed_noise_variance

# A Gaussian over logits as a few common directions and an independent rest, by which it is drawn from.
#
# Softmax does not change when all logits move by the same number. So covariances here are those of the
# centred logits ``f_c - mean_d f_d``: a variance that all classes share is removed before anything is
# approximated.

Product = Callable[[Tensor], Tensor]
"""A covariance by its products: ``(batch, classes, columns)`` to the same shape."""

DIRECTIONS = 8  # common directions, for more than DIRECTIONS + 2 classes
_FLOOR = 1.0  # weight shared equally by all classes, beside a weight of 1 by how undecided each class is
_ROUNDS = 2  # of subspace iteration
_RANK = 1e-12  # eigenvalues below this share of the largest count as zero


class Spread(NamedTuple):
    """Logits ``mean + root z + sqrt(rest) e`` with standard normal ``z`` and ``e``, up to a number common to all.

    Attributes:
        root: ``(batch, classes, directions)``; there may be no direction.
        rest: variances ``(batch, classes)`` of the part that is independent between classes.
    """

    root: Tensor
    rest: Tensor

    def variance(self) -> Tensor:
        """Variances of the logits, ``(batch, classes)``."""
        return self.root.square().sum(-1) + self.rest

    def over(self, temperature: float) -> Spread:
        """The same for logits divided by a temperature."""
        return Spread(self.root / temperature, self.rest / temperature**2)


def independent(variance: Tensor) -> Spread:
    """Logits ``(batch, classes)`` without correlations."""
    return Spread(variance.new_zeros(*variance.shape, 0), variance)


def of_covariance(mean: Tensor, covariance: Tensor) -> Spread:
    """From a covariance ``(batch, classes, classes)``: exact up to ``DIRECTIONS + 2`` classes; see `of_product`.

    With ``H = 1 - 1/C`` and the eigenvalues ``l_1 >= ... >= l_(C-1), 0`` of ``H Sigma H``, the directions have the
    variances ``l_k - l_(C-1)`` and the rest ``l_(C-1)`` for every class, since softmax cannot tell the multiple
    ``l_(C-1) H`` of the projection from that of the identity.
    """
    classes = mean.shape[1]
    wide = as_double(covariance)
    if classes > DIRECTIONS + 2:
        return of_product(mean, covariance.diagonal(dim1=1, dim2=2), lambda x: wide @ as_double(x))
    rows = wide - wide.mean(1, keepdim=True)
    centred, not_finite = _finite(rows - rows.mean(2, keepdim=True))
    values, vectors = torch.linalg.eigh(centred)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    least = values[:, classes - 2 : classes - 1]
    root = vectors[:, :, : classes - 2] * (values[:, : classes - 2] - least).sqrt().unsqueeze(1)
    return _spread(root, least.expand(-1, classes), not_finite, mean)


def of_product(mean: Tensor, variance: Tensor, product: Product) -> Spread:
    """From the products of a covariance whose diagonal is `variance`: `DIRECTIONS` directions ``L`` of
    ``S = H Sigma H``, and the rest of its diagonal as independent. `of_covariance` is used where it is exact, for few
    classes.

    The directions are ``S Y (Y^T S Y)^(-1/2)`` (Nystroem), so that ``S - L L^T`` is a covariance again, with ``Y`` by
    subspace iteration from the most undecided classes. Classes are weighted by how much a change of their logit
    moves the probabilities, ``p (1 - p)``, plus an equal share: the covariance is most accurate for the classes between
    which the prediction is undecided.

    Args:
        mean: ``(batch, classes)``.
        variance: of the same shape.
        product: of the covariance of the logits, not centred.
    """
    classes = mean.shape[1]
    if classes <= DIRECTIONS + 2:
        units = torch.eye(classes, dtype=mean.dtype, device=mean.device).expand(len(mean), -1, -1)
        return of_covariance(mean, product(units))
    sums = as_double(product(torch.ones_like(mean).unsqueeze(-1)))[:, :, 0] / classes
    diagonal = (as_double(variance) - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
    weights, not_finite = _finite(_weights(as_double(mean), diagonal))
    weights = weights.unsqueeze(-1)

    def weighted(x: Tensor) -> Tensor:
        x = weights * x
        image = as_double(product((x - x.mean(1, keepdim=True)).to(mean)))
        return weights * (image - image.mean(1, keepdim=True)).masked_fill(not_finite.unsqueeze(-1), 0.0)

    first = weights[:, :, 0].topk(min(DIRECTIONS, classes)).indices
    basis = torch.nn.functional.one_hot(first, classes).transpose(1, 2).to(weights)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(weighted(basis)).Q
    image = weighted(basis)
    inner = basis.transpose(1, 2) @ image
    values, vectors = torch.linalg.eigh((inner + inner.transpose(1, 2)) / 2)
    usable = values > _RANK * values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
    scale = torch.where(usable, values, torch.ones_like(values)).rsqrt() * usable
    root = image @ (vectors * scale.unsqueeze(1)) / weights.clamp(min=torch.finfo(values.dtype).tiny)
    # centring removed 1 / C of the independent part
    rest = (diagonal - root.square().sum(-1)).clamp(min=0) * (classes / (classes - 1))
    return _spread(root, rest, not_finite, mean)


def _weights(mean: Tensor, variance: Tensor) -> Tensor:
    """Square roots of the weights of classes, ``(batch, classes)``."""
    probs = (mean / (1 + pi * variance / 8).sqrt()).softmax(1)
    undecided = probs * (1 - probs)
    total = undecided.sum(1, keepdim=True).clamp(min=torch.finfo(mean.dtype).tiny)
    return (undecided / total + _FLOOR / mean.shape[1]).sqrt()


def _finite(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor with zeros for inputs that are not finite (eigensolvers refuse them), and which these are."""
    not_finite = ~torch.isfinite(tensor).flatten(1).all(1)
    return tensor.masked_fill(not_finite.reshape(-1, *[1] * (tensor.ndim - 1)), 0.0), not_finite.unsqueeze(1)


def _spread(root: Tensor, rest: Tensor, not_finite: Tensor, like: Tensor) -> Spread:
    """A `Spread` in the precision and on the device of `like`, NaN for inputs whose covariance is not finite."""
    nan = float("nan")
    root = root.masked_fill(not_finite.unsqueeze(-1), nan).to(like.device, like.dtype)
    return Spread(root, rest.masked_fill(not_finite, nan).to(like.device, like.dtype))


# Quasi-random draws of Gaussian outputs, the same for every input and call, and the class probabilities from
# them.

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


# From Gaussian logits to class probabilities, for the heads that know mean and variance rather than samples.

Link = Literal["probit", "mc", "bridge"]
LINKS: tuple[str, ...] = ("probit", "mc", "bridge")
LINK_DRAWS = 256  # default number of draws of the logits


def checked_link(link: str, n_draws: int) -> tuple[str, int]:
    """A link and its number of draws.

    Raises:
        PosthocUQError: the link is none of `LINKS`, or there would be no draw.
    """
    return one_of("link", link, LINKS), check_option("n_draws", n_draws, Count)


def classes_of_gaussian(
    mean: Tensor,
    variance: Tensor,
    covariance: Tensor | Spread | None = None,
    link: str = "mc",
    n_draws: int = LINK_DRAWS,
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


# Predictions from draws that come one after another and are not kept.
#
# Sums over draws are in float64 (float32 on MPS, which has no float64), so the order and the grouping of the
# draws make no difference beyond the rounding of the result. Memory is a few tensors of the size of one
# draw's outputs.

BLOCK_BYTES = 2**17  # outputs summed at once, so that they stay in the cache (a single draw may be larger)


class Moments:
    """Mean and unbiased variance over draws, from blocks ``(draws, ...)``.

    Sums of ``x - c`` and of its square with the first draw as ``c``, which avoids the cancellation of
    ``sum x^2 - (sum x)^2 / S`` (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance"). Minus
    infinity in any draw makes the mean minus infinity and the variance 0: a masked class is certain. A NaN stays
    in its element.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, block: Tensor) -> None:
        """Add a block ``(draws, ...)``."""
        masked = torch.isneginf(block)
        values = _wide(block).masked_fill(masked, 0.0)
        if self._parts is None:
            zeros = torch.zeros_like(values[0])
            # a copy: a view would keep the whole block alive
            self._parts = values[0].clone(), zeros, zeros, torch.zeros_like(masked[0])
        shift, total, squares, was_masked = self._parts
        centred = values - shift
        self._parts = (
            shift,
            total + centred.sum(dim=0),
            squares + centred.square().sum(dim=0),
            was_masked | masked.any(dim=0),
        )
        self.count += block.shape[0]

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, in the precision of the sums; variance 0 for a single draw.

        Raises:
            PosthocUQError: no draw was added.
        """
        if self._parts is None or self.count == 0:
            raise PosthocUQError("A prediction needs at least one weight sample.")
        shift, total, squares, masked = self._parts
        mean = shift + total / self.count
        variance = torch.zeros_like(mean)
        if self.count > 1:
            variance = ((squares - total.square() / self.count) / (self.count - 1)).clamp(min=0)
        masked = masked & ~mean.isnan()
        return mean.masked_fill(masked, -math.inf), variance.masked_fill(masked, 0.0)


class ClassStatistics:
    """The sums that a `ClassPrediction` needs of draws of the logits; same numbers as `ClassPrediction.from_logits`.

    Args:
        binary: the model has one Bernoulli logit.
    """

    def __init__(self, binary: bool = False) -> None:
        self._binary = binary
        self._logits, self._probs = Moments(), Moments()
        self._dtype = torch.float32
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, logits: Tensor) -> None:
        """Add logits ``(draws, batch, classes)``; with `binary` ``(draws, batch)`` or ``(draws, batch, 1)``.

        Raises:
            PosthocUQError: another number of dimensions, fewer than two classes, or no floating-point numbers.
        """
        logits, log_probs = log_probabilities(logits, self._binary)
        probs = log_probs.exp()
        self._dtype = probs.dtype
        self._logits.add(logits)
        self._probs.add(probs)
        log_sum = _wide(torch.logsumexp(log_probs, dim=0))
        entropy = _wide(entropy_from(probs, log_probs)).sum(dim=0)
        votes = class_votes(log_probs)
        if self._sums is not None:
            previous = self._sums
            log_sum, entropy = torch.logaddexp(previous[0], log_sum), previous[1] + entropy
            votes = previous[2] + votes
        self._sums = log_sum, entropy, votes

    def prediction(self) -> ClassPrediction:
        """The prediction of all draws so far.

        Raises:
            PosthocUQError: no draw was added.
        """
        mean, variance = self._logits.result()
        probs, probs_variance = self._probs.result()
        assert self._sums is not None
        log_sum, entropy, votes = self._sums
        count, dtype = self._logits.count, self._dtype
        return ClassPrediction(
            probs=probs.to(dtype),
            logits_mean=mean.to(dtype),
            logits_variance=variance.to(dtype),
            sample_entropy=(entropy / count).to(dtype),
            log_probs=(log_sum - math.log(count)).to(dtype),
            probs_variance=probs_variance.to(dtype),
            votes=smallest_counts(votes, count),
        )


def classes_of_draws(blocks: Iterable[Tensor], *, binary: bool = False) -> ClassPrediction:
    """The prediction from blocks ``(draws, batch, ...)`` of logits.

    Raises:
        PosthocUQError: there is no draw, or the logits do not fit.
    """
    classes = ClassStatistics(binary)
    for block in gathered(blocks):
        classes.add(block)
    return classes.prediction()


def values_of_draws(blocks: Iterable[Tensor], noise_variance: Tensor) -> RegressionPrediction:
    """The prediction from blocks ``(draws, batch, ...)`` of means.

    Raises:
        PosthocUQError: there is no draw, or the means or the noise variances do not fit.
    """
    values, dtype = Moments(), torch.float32
    for block in gathered(blocks):
        block = at_least_float32(block)
        dtype = block.dtype
        values.add(block)
    mean, variance = (moment.to(dtype) for moment in values.result())
    return RegressionPrediction(mean, variance, placed_noise_variance(noise_variance, mean.device))


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float64, where the device has it."""
    return tensor.to(widest(tensor.device))


def gathered(blocks: Iterable[Tensor], limit: int = BLOCK_BYTES) -> Iterator[Tensor]:
    """Small blocks ``(draws, ...)`` joined up to `limit` bytes, so that fewer, larger operations sum them."""
    waiting: list[Tensor] = []
    waiting_bytes = 0
    for block in blocks:
        size = block.numel() * block.element_size()
        if waiting and waiting_bytes + size > limit:
            yield torch.cat(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append(block)
        waiting_bytes += size
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
