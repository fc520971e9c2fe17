"""Quantile regression: a network whose outputs are quantiles of one target, trained with the pinball loss."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import log, pi
from statistics import NormalDist
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Lt
from pydantic import Field
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from posthoc_uq.core.devices import as_double, at_least_float32, host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option, check_probability
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.conformal import INTERVAL_WIDTH, ConformalScores, Coverage, SetScore, TargetScores
from posthoc_uq.likelihoods.draws import (
    LINK_DRAWS,
    LINKS,
    Moments,
    OutputGaussian,
    gathered,
    mean_of,
    moments_of_mixture,
)
from posthoc_uq.likelihoods.gaussian import RegressionPrediction
from posthoc_uq.likelihoods.likelihood import Faults, Fisher, Likelihood
from posthoc_uq.likelihoods.prediction import interval_quality, sampling_generator

Level = Annotated[float, Gt(0), Lt(1)]

MAX_LEVELS = 1000
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Of the intervals that `posthoc_uq.calibrate` corrects, beside those between two levels of the network."""
_MAX_PAIRS = 32  # of the network's levels whose intervals are corrected
_LEAST_SLOPE = 0.01  # of the mean one, for a distance between quantiles that coincide
_HALVINGS = 60  # of the range in which a quantile of a mixture is searched
_TINY = 1e-12  # the same where all coincide, in units of the target; float32 has the square of its inverse
_LEAST_VARIANCE = 1e-8  # of an output, in squared units of its scale, where formulas divide by its root


class QuantileFields(Record):
    """The levels of the outputs."""

    levels: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=MAX_LEVELS)]


@dataclass(frozen=True)
class _Normalised:
    """What follows from the levels alone, float64 on the CPU.

    Between two levels, and beyond the outer ones, the quantile function is linear in the quantile z of a standard
    normal: a Gaussian where all quantiles are those of one.

    Attributes:
        levels: (levels,).
        points: z of each, (levels,).
        densities: of a standard normal at them, (levels,).
        mean: the mean is this sum over the quantiles, (levels,).
        square: the mean square is this quadratic form in them, (levels, levels).
        information: the inverse of the covariance of ``1[y < quantile]``, (levels, levels).
        root: its lower Cholesky factor.
    """

    levels: Tensor
    points: Tensor
    densities: Tensor
    mean: Tensor
    square: Tensor
    information: Tensor
    root: Tensor

    @property
    def spread(self) -> Tensor:
        """The variance is this quadratic form in the quantiles."""
        return self.square - torch.outer(self.mean, self.mean)


@lru_cache(maxsize=32)
def _normalised(levels: tuple[float, ...]) -> _Normalised:
    normal, count = NormalDist(), len(levels)
    points = [normal.inv_cdf(level) for level in levels]
    mean, square = [0.0] * count, [[0.0] * count for _ in levels]
    for k in range(count - 1):
        # moments of z between the ends of a piece, and of its share t of the way from one quantile to the next
        first, last = k == 0, k == count - 2
        start, end = points[k], points[k + 1]
        at_start, at_end = (0.0 if first else normal.pdf(start)), (0.0 if last else normal.pdf(end))
        m0 = (1.0 if last else levels[k + 1]) - (0.0 if first else levels[k])
        m1 = at_start - at_end
        m2 = m0 + start * at_start - end * at_end
        width = end - start
        t1 = (m1 - start * m0) / width
        t2 = (m2 - 2 * start * m1 + start * start * m0) / width**2
        mean[k] += m0 - t1
        mean[k + 1] += t1
        square[k][k] += m0 - 2 * t1 + t2
        square[k + 1][k + 1] += t2
        square[k][k + 1] += t1 - t2
        square[k + 1][k] += t1 - t2
    with torch.inference_mode(False):
        own = host_double(levels)
        shares = torch.cat([own, own.new_ones(1)]).diff(prepend=own.new_zeros(1)).reciprocal()
        information = torch.diag(shares[:-1] + shares[1:])
        information -= torch.diag(shares[1:-1], 1) + torch.diag(shares[1:-1], -1)
        return _Normalised(
            own,
            host_double(points),
            host_double([normal.pdf(point) for point in points]),
            host_double(mean),
            host_double(square),
            information,
            torch.linalg.cholesky(information),
        )


def _ordered(levels: Sequence[float] | Tensor) -> tuple[float, ...]:
    """Levels of outputs.

    Raises:
        PosthocUQError: they are no such levels.
    """
    given: Any = levels
    given = given.tolist() if hasattr(given, "tolist") else given
    found = check_option("levels", list(given) if isinstance(given, tuple) else given, list[Level])
    if not 2 <= len(found) <= MAX_LEVELS or any(a >= b for a, b in pairwise(found)):
        raise PosthocUQError(
            f"levels must be 2 to {MAX_LEVELS} numbers in ascending order, one an output, such as [.05, .5, .95], not "
            f"{found[:8]}. Outputs in another order are put in order by output=lambda outputs: outputs[:, [...]]."
        )
    return tuple(found)


class Quantiles(Likelihood):
    """Quantile regression (Koenker, Bassett, "Regression quantiles", 1978): outputs ``(samples, levels)`` are the
    quantiles of one target at these levels, in ascending order, as the pinball loss trains them. Targets are
    ``(samples, 1)`` or ``(samples,)``.

    * The log-probability is the pinball loss as a likelihood, a sum over levels of asymmetric Laplace densities (Yu,
      Moyeed, "Bayesian quantile regression", 2001), each with the scale ``tau (1 - tau) / p``, for which the density at
      its mode is that of the targets there, p. The scale of an input is taken as given: gradients are those of the
      pinball loss.
    * That density is read off the distances between quantiles: the quantile function is taken to be linear in the
      quantile of a standard normal between two levels, which is exact for a Gaussian, and beyond the outer ones. So it
      follows the noise of each input.
    * The loss has no second derivative, and one target is no independent observation for each level. So the exact
      Fisher is the sandwich ``H S^-1 H`` of the expected curvature ``H = diag(p)`` and the covariance of the losses'
      gradients ``S_kl = min(tau_k, tau_l) - tau_k tau_l``, which is the inverse of the asymptotic covariance of
      regression quantiles (Koenker, Bassett, theorem 4.2), whatever weight each level's loss has. It takes as many
      backward passes as levels. Drawn labels are replaced by random signs of its factors; the empirical Fisher has
      ``H S^-1`` times the gradient of the pinball losses.

    Crossing quantiles are sorted (Chernozhukov, Fernandez-Val, Galichon, "Quantile and probability curves without
    crossing", 2010).

    Args:
        levels: of the outputs, ascending, between 0 and 1.

    Raises:
        PosthocUQError: levels that do not ascend, or fewer than two.

    Example:
        ```python
        net, x = nn.Linear(2, 3), torch.randn(30, 2)
        data = [(x, x[:, :1] + torch.randn(30, 1))]
        posterior = uq.fit(net, data, likelihood=uq.Quantiles([0.1, 0.5, 0.9]))
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.quantiles)
        ```
    """

    name = "quantiles"
    fields: ClassVar[type[Record]] = QuantileFields
    links: ClassVar[tuple[str, ...]] = LINKS  # one closed form for all

    def __init__(self, levels: Sequence[float] | Tensor = (0.05, 0.5, 0.95)) -> None:
        self.levels = _ordered(levels)

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        count = len(self.levels)
        if outputs.ndim != 2 or outputs.shape[1] != count:
            raise PosthocUQError(
                f"likelihood='quantiles' with {count} levels needs outputs of shape (samples, {count}), and the model "
                f"gives {tuple(outputs.shape)}; pass the levels of its outputs: likelihood=uq.Quantiles([...])."
            )
        if targets is None:
            return
        if targets.numel() != len(outputs) or targets.shape[:1] != outputs.shape[:1]:
            raise PosthocUQError(
                f"Targets for likelihood='quantiles' are one number a sample, ({len(outputs)}, 1), not "
                f"{tuple(targets.shape)}: its outputs are quantiles of one target."
            )
        yield ~torch.isfinite(targets).all(), lambda: "Some targets are not finite."

    def reshape_targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``(samples, 1)``, in the precision of the outputs."""
        return targets.to(device=outputs.device, dtype=at_least_float32(outputs).dtype).reshape(-1, 1)

    # The density

    def densities(self, outputs: Tensor) -> Tensor:
        """The density of the targets at each quantile, ``(..., levels)``, by the distances between outputs."""
        known, ordered = _normalised(self.levels), at_least_float32(outputs.detach()).sort(-1).values
        points = known.points.to(ordered)
        slopes = _slopes(ordered, points)
        across = (ordered[..., 2:] - ordered[..., :-2]) / (points[2:] - points[:-2])
        inner = torch.maximum(across, _least_slope(slopes))
        return known.densities.to(ordered) / torch.cat([slopes[..., :1], inner, slopes[..., -1:]], -1)

    def scales(self, outputs: Tensor) -> Tensor:
        """Of the asymmetric Laplace densities, ``(..., levels)``, in units of the targets."""
        densities = self.densities(outputs)
        levels = _normalised(self.levels).levels.to(densities)
        return levels * (1 - levels) / densities

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of each level, ``(..., levels)``, for targets ``(..., 1)``."""
        rest, scales = targets - at_least_float32(outputs), self.scales(outputs)
        levels = _normalised(self.levels).levels.to(scales)
        losses = torch.maximum(levels * rest, (levels - 1) * rest)
        return (levels * (1 - levels) / scales).log() - losses / scales

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form, with the scales of the mean outputs: ``E max(f - y, 0) = r Phi(r / s) + s phi(r / s)`` for
        ``r = E f - y`` and the deviation s.
        """
        levels, scales, rest, deviation = self._standardised(mean, variance, targets)
        ratio = -rest / deviation
        density = (-0.5 * (ratio.square() + log(2 * pi))).exp()
        losses = levels * rest + deviation * (ratio * torch.special.ndtr(ratio) + density)
        return ((levels * (1 - levels) / scales).log() - losses / scales).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form, with the scales of the mean outputs: an asymmetric Laplace density that is smoothed by a
        Gaussian.
        """
        levels, scales, rest, deviation = self._standardised(mean, variance, targets)
        ratio, width = rest / deviation, deviation / scales
        above = width * levels  # the slopes of the two sides, in units of the deviation
        below = width * (1 - levels)
        logs = torch.logaddexp(
            above.square() / 2 - above * ratio + torch.special.log_ndtr(ratio - above),
            below.square() / 2 + below * ratio + torch.special.log_ndtr(-ratio - below),
        )
        return ((levels * (1 - levels) / scales).log() + logs).sum(1)

    def _standardised(
        self, mean: Tensor, variance: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Levels, scales, targets less mean outputs, and deviations of the outputs, which are no 0."""
        mean = at_least_float32(mean)
        scales = self.scales(mean)
        deviation = torch.maximum(at_least_float32(variance), _LEAST_VARIANCE * scales.square()).sqrt()
        levels = _normalised(self.levels).levels.to(mean)
        return levels, scales, self.reshape_targets(mean, targets) - mean, deviation

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """From the distribution that has these quantiles, ``(samples, 1)``."""
        z = torch.special.ndtri(self.uniforms(outputs, keys, draw))
        ordered = at_least_float32(outputs).sort(-1).values
        return _at(ordered, z.to(ordered), _normalised(self.levels).points.to(ordered))

    # The Fisher

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Iterator[Tensor]:
        """One a level."""
        densities = self.densities(outputs)
        for column in _normalised(self.levels).root.to(densities).unbind(1):
            yield densities * column

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """See `Likelihood`, and `Quantiles` for what they are."""
        outputs = outputs.detach()
        if fisher == "exact" or (fisher == "empirical" and targets is None):
            yield from super().gradients(outputs, targets, keys, fisher, n_samples)
            return
        densities, known = self.densities(outputs), _normalised(self.levels)
        if targets is not None and fisher == "empirical":
            below = (self.reshape_targets(outputs, targets) < outputs).to(densities)
            yield densities * ((below - known.levels.to(densities)) @ known.information.to(densities))
            return
        for draw in range(n_samples):
            signs = (self.uniforms(outputs, keys, draw, len(self.levels)) - 0.5).sign().to(densities)
            yield densities * (signs @ known.root.to(densities).T) * n_samples**-0.5

    # The target

    def mean(self, outputs: Tensor) -> Tensor:
        """``(samples, 1)``."""
        ordered = at_least_float32(outputs).sort(-1).values
        return (ordered @ _normalised(self.levels).mean.to(ordered)).unsqueeze(-1)

    def variance(self, outputs: Tensor) -> Tensor:
        """``(samples, 1)``."""
        return _quadratic(at_least_float32(outputs).sort(-1).values, _normalised(self.levels).spread)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        """Of the Gaussians with the mean and the variance of either, in closed form."""
        least = torch.finfo(at_least_float32(outputs).dtype).tiny
        deviation = self.variance(outputs).clamp(min=least).sqrt()
        network = Normal(self.mean(outputs), deviation, validate_args=False)
        return kl_divergence(network, prediction.normal).squeeze(1)

    def from_blocks(self, blocks: Iterable[Tensor]) -> QuantilePrediction:
        outputs, means, noises, dtype = Moments(), Moments(), Moments(), torch.float32
        for block in gathered(blocks):
            if block.ndim != 3 or block.shape[-1] != len(self.levels):
                raise PosthocUQError(
                    f"outputs must be (draws, batch, {len(self.levels)}), not {tuple(block.shape)}."
                )
            block = at_least_float32(block).sort(-1).values
            dtype = block.dtype
            outputs.add(block)
            means.add(self.mean(block))
            noises.add(self.variance(block))
        mean, epistemic = (moment.to(dtype) for moment in means.result())
        quantiles, variance = (moment.to(dtype) for moment in outputs.result())
        noise = noises.result()[0].to(dtype)
        return QuantilePrediction(mean, epistemic, noise, quantiles, variance, self.levels)

    def from_gaussian(self, outputs: OutputGaussian) -> QuantilePrediction:
        """In closed form: mean and variance of the target are a sum over the quantiles and a quadratic form in them."""
        (ordered, order), known = outputs.mean.sort(-1), _normalised(self.levels)
        variance, covariance = outputs.variance.gather(1, order), outputs.covariance
        weights, spread = known.mean.to(ordered), known.spread.to(ordered)
        if isinstance(covariance, Tensor):
            rows = order.unsqueeze(2).expand(-1, -1, len(self.levels))
            own = covariance.to(ordered).gather(1, rows).gather(2, rows.transpose(1, 2))
            epistemic, more = torch.einsum("bkl,k,l->b", own, weights, weights), (own * spread).sum((1, 2))
        else:
            epistemic, more = variance @ weights.square(), variance @ spread.diagonal()
        epistemic, more = (each.clamp(min=0).unsqueeze(1) for each in (epistemic, more))
        noise = _quadratic(ordered, known.spread) + more
        return QuantilePrediction(self.mean(ordered), epistemic, noise, ordered, variance, self.levels)


def _quadratic(quantiles: Tensor, form: Tensor) -> Tensor:
    """``(..., 1)``, at least 0. By distances from the lowest, so that nothing cancels: a form of the variance is the
    same for all.
    """
    rest = quantiles - quantiles[..., :1]
    return ((rest @ form.to(rest)) * rest).sum(-1, keepdim=True).clamp(min=0)


def _least_slope(slopes: Tensor) -> Tensor:
    """Of the distances between neighbouring quantiles, ``(..., 1)``: of those that are all 0 a number that is not."""
    return (slopes.mean(-1, keepdim=True) * _LEAST_SLOPE).clamp(min=_TINY)


def _slopes(ordered: Tensor, points: Tensor) -> Tensor:
    """The slope of the quantile function in the quantile of a standard normal, between the levels, ``(..., levels -
    1)``.
    """
    slopes = ordered.diff(dim=-1) / points.diff()
    return torch.maximum(slopes, _least_slope(slopes))


def _at(ordered: Tensor, z: Tensor, points: Tensor) -> Tensor:
    """The quantile function at quantiles z of a standard normal, ``(batch, numbers)``.

    Args:
        ordered: quantiles, ``(batch, levels)``.
        z: ``(batch, numbers)``.
        points: ``(levels,)``.
    """
    piece = torch.bucketize(z.contiguous(), points[1:-1].contiguous())
    low, high = ordered.gather(1, piece), ordered.gather(1, piece + 1)
    share = (z - points[piece]) / (points[piece + 1] - points[piece])
    return low + share * (high - low)


@dataclass(frozen=True, eq=False, repr=False)
class QuantilePrediction(RegressionPrediction):
    """A `RegressionPrediction` by quantiles of the target.

    Mean and variance are those of the mixture over the weights (law of total variance) of distributions whose quantile
    function is linear in the quantile of a standard normal between two levels of the network and beyond the outer ones.
    Quantiles, intervals and densities are those of the mean quantiles, stretched about the mean to this variance.

    Attributes:
        quantiles_mean: (batch, levels), mean over the weights of the sorted quantiles.
        quantiles_variance: same shape, variance over the weights of each.
        levels: of the quantiles.
    """

    _computed: ClassVar[dict[str, tuple[str, ...]]] = {**RegressionPrediction._computed, "quantiles": ()}
    _hidden: ClassVar[tuple[str, ...]] = ("moved_interval", "quantiles_mean")

    quantiles_mean: Annotated[Tensor, "batch levels"]
    quantiles_variance: Annotated[Tensor, "batch levels"]
    levels: tuple[float, ...]

    @property
    def outputs_mean(self) -> Tensor:
        """(batch, levels): the mean quantiles, in ascending order."""
        return self.quantiles_mean

    @property
    def quantiles(self) -> Tensor:
        """(batch, levels): the quantiles of the target at the network's levels, with what the weights leave open: where
        the weights are certain those of the network.
        """
        own = _quadratic(self.quantiles_mean, _normalised(self.levels).spread)
        deviation = self.standard_deviation
        stretch = torch.where(own > 0, deviation / own.sqrt().clamp(min=torch.finfo(own.dtype).tiny), 1.0)
        return self.mean + stretch * (self.quantiles_mean - self.mean)

    def _at_levels(self, levels: Sequence[float]) -> Tensor:
        """(batch, numbers): the quantiles of these levels."""
        points, rows = _normalised(self.levels).points.tolist(), list[list[float]]()
        for level in levels:  # the shares of the two quantiles beside it
            z = NormalDist().inv_cdf(level)
            piece = bisect_left(points, z, 1, len(points) - 1) - 1
            share = (z - points[piece]) / (points[piece + 1] - points[piece])
            rows.append([0.0] * piece + [1 - share, share] + [0.0] * (len(points) - piece - 2))
        quantiles = self.quantiles
        return quantiles @ quantiles.new_tensor(rows).T

    def quantile(self, q: float) -> Tensor:
        """Shape of `mean`: the value below which an observation falls with probability `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        return self._at_levels([check_probability("q", q)])

    def median(self) -> Tensor:
        """Shape of `mean`: the value below which an observation falls with probability 1/2."""
        return self.quantile(0.5)

    def cdf(self, value: Tensor | float) -> Tensor:
        """Shape of `mean`: the probability that an observation is at most `value`, a number or as `mean`."""
        return torch.special.ndtr(self._standardised(self.quantiles, self._values(value))[0])

    def _values(self, value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, device=self.mean.device).to(self.mean).expand(self.mean.shape)

    def _standardised(self, quantiles: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Which quantiles of a standard normal values are, and the slopes of the values in them, (rows, numbers) each,
        for quantiles (rows, levels).
        """
        points = _normalised(self.levels).points.to(quantiles)
        piece = torch.searchsorted(quantiles[:, 1:-1].contiguous(), values.contiguous())
        slope = _slopes(quantiles, points).gather(1, piece)
        return points[piece] + (values - quantiles.gather(1, piece)) / slope, slope

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds, shaped like `mean`, between which an observation falls with probability `level`: quantiles.

        Where the posterior has held-out scores that apply (`posthoc_uq.calibrate`), by conformalised quantile
        regression (Romano, Patterson, Candes, 2019): the bounds are ``low(x) - q`` and ``high(x) + q`` with the
        ``ceil((n + 1) level)``-th smallest q of the held-out ``max(low - y, y - high)``, which may be negative. They
        then cover with at least this probability, over inputs like those, whatever the model. `low` and `high` are the
        quantiles of the nearest of the levels that were measured: those between two levels of the network, and `LEVELS`
        of this file.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1, or there are too few held-out scores for it.
        """
        if isinstance(self.promises, ConformalScores):
            return self.moved_interval(*self.promises.quantile_bound(level))
        return self._own_interval(level)

    def moved_interval(self, share: float, reach: float) -> tuple[Tensor, Tensor]:
        """The quantiles that have this share of targets between them, moved apart by as much on both sides, shaped like
        `mean`; those that would cross meet in the middle.
        """
        low, high = self._own_interval(share)
        moved = (low - high).clamp(min=2 * reach) / 2
        return low - moved, torch.maximum(high + moved, low - moved)

    def _own_interval(self, level: float) -> tuple[Tensor, Tensor]:
        share = (1 - check_probability("level", level)) / 2
        low, high = self._at_levels([share, 1 - share]).unsqueeze(2).unbind(1)
        return low, high

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """See `RegressionPrediction`."""
        return self._drawn(self.quantiles, n, generator).unsqueeze(2)

    def _drawn(self, quantiles: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Observations (n, rows) by quantiles (rows, levels)."""
        generator = sampling_generator(n, generator)
        shape = len(quantiles), n
        z = torch.randn(shape, generator=generator, device=generator.device, dtype=quantiles.dtype)
        points = _normalised(self.levels).points.to(quantiles)
        return _at(quantiles, z.to(quantiles.device), points).T

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log density of the distribution that has these quantiles.

        Args:
            targets: one an input.

        Raises:
            PosthocUQError: the shape differs.
        """
        z, slope = self._standardised(self.quantiles, self.fitting(targets).to(self.mean))
        return (-0.5 * (z.square() + log(2 * pi)) - slope.log()).squeeze(1)

    def _base_levels(self) -> list[float]:
        """Ascending, of the intervals whose scores are measured."""
        pairs = zip(self.levels, reversed(self.levels), strict=True)
        own = [high - low for low, high in pairs if low < high and abs(low + high - 1) < 1e-9]
        return sorted({round(level, 12) for level in (*LEVELS, *own[:_MAX_PAIRS])})

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores:
        """See `Prediction`: how far targets are outside of the intervals of some levels, or inside, as a negative
        number.
        """
        levels = self._base_levels()
        scores = torch.cat([self._outside(targets, level) for level in levels], 1)
        return TargetScores.of_values("quantiles", scores)._replace(shares=levels)

    def _outside(self, targets: Tensor, level: float) -> Tensor:
        values, (low, high) = as_double(targets), map(as_double, self._own_interval(level))
        return torch.maximum(low - values, values - high)

    def coverage(
        self, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
    ) -> Coverage:
        """See `Prediction`."""
        base, reach = self.known_promises().quantile_bound(level)
        covered = as_double(self._outside(targets, base) <= reach).squeeze(1)
        low, high = map(as_double, self.interval(level))
        inputs, sizes = torch.arange(len(self), device=covered.device), (high - low).squeeze(1)
        return Coverage(covered, sizes if widths else sizes[:0], inputs, None, INTERVAL_WIDTH)

    @classmethod
    def mixed(cls, predictions: Sequence[Any]) -> Any:
        """See `Prediction`: a `QuantileMixturePrediction`."""
        return QuantileMixturePrediction.of(predictions)

    def value_columns(self, level: float) -> dict[str, Tensor]:
        columns = super().value_columns(level)
        of_levels = zip(self.levels, self.quantiles.unsqueeze(2).unbind(1), strict=True)
        return columns | {f"quantile_{own:g}": values for own, values in of_levels}

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """RMSE of the mean, pinball loss (mean over levels), log density, coverage and sharpness of intervals."""
        return {
            "rmse": metrics.rmse(self.mean, targets),
            "pinball_loss": metrics.pinball_loss(self.quantiles, targets, self.levels),
            "log_density": float(as_double(self.log_prob(targets)).mean()),
            **interval_quality(self._own_interval, targets),
        }


@dataclass(frozen=True, eq=False, repr=False)
class QuantileMixturePrediction(QuantilePrediction):
    """A mixture of several networks' quantiles of the target. Mean and variance are the mixture's by the law of total
    variance, and its quantiles, density and samples those of the mixture of their distributions.

    Attributes:
        parts: (batch, networks, levels), the quantiles of each network, with what its weights leave open.
    """

    parts: Annotated[Tensor, "batch networks levels"]

    @classmethod
    def of(cls, predictions: Sequence[QuantilePrediction]) -> QuantileMixturePrediction:
        """The mixture of predictions of the same inputs."""
        quantiles, variance = moments_of_mixture(
            [p.quantiles_mean for p in predictions], [p.quantiles_variance for p in predictions]
        )
        mean, epistemic = moments_of_mixture(
            [p.mean for p in predictions], [p.epistemic_variance for p in predictions]
        )
        noise = mean_of([p.noise_variance for p in predictions])
        parts = torch.stack([p.quantiles for p in predictions], 1)
        return cls(mean, epistemic, noise, quantiles, variance, predictions[0].levels, parts)

    @property
    def quantiles(self) -> Tensor:
        """(batch, levels): the mixture's quantiles at the networks' levels."""
        return self._at_levels(self.levels)

    def _by_part(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """`_standardised` of values (batch, numbers) for each network, (batch, networks, numbers) each."""
        batch, networks = self.parts.shape[:2]
        rows = values.unsqueeze(1).expand(-1, networks, -1).flatten(0, 1)
        z, slope = self._standardised(self.parts.flatten(0, 1), rows)
        return z.unflatten(0, (batch, networks)), slope.unflatten(0, (batch, networks))

    def _at_levels(self, levels: Sequence[float]) -> Tensor:
        """By bisection between the networks' own quantiles."""
        flat = self.parts.flatten(0, 1)
        z = flat.new_tensor([NormalDist().inv_cdf(level) for level in levels])
        each = _at(flat, z.expand(len(flat), -1), _normalised(self.levels).points.to(flat))
        each = each.unflatten(0, self.parts.shape[:2])
        low, high, shares = each.amin(1), each.amax(1), flat.new_tensor(levels)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = torch.special.ndtr(self._by_part(middle)[0]).mean(1) < shares
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return (low + high) / 2

    def cdf(self, value: Tensor | float) -> Tensor:
        """See `QuantilePrediction`."""
        return torch.special.ndtr(self._by_part(self._values(value))[0]).mean(1)

    def log_prob(self, targets: Tensor) -> Tensor:
        """See `QuantilePrediction`: the log density of the mixture."""
        z, slope = self._by_part(self.fitting(targets).to(self.mean))
        logs = -0.5 * (z.square() + log(2 * pi)) - slope.log()
        return (logs.logsumexp(1) - log(self.parts.shape[1])).squeeze(1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """See `RegressionPrediction`: each observation is one of a network drawn at random."""
        batch, networks = self.parts.shape[:2]
        generator = sampling_generator(n, generator)
        drawn = self._drawn(self.parts.flatten(0, 1), n, generator).unflatten(1, (batch, networks))
        chosen = torch.randint(networks, (n, batch, 1), generator=generator, device=generator.device)
        return drawn.gather(2, chosen.to(drawn.device))
