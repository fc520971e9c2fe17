"""Targets whose mean is the exponential of an output: Poisson, negative binomial, gamma."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from math import lgamma, log
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from posthoc_uq.core.devices import as_double, at_least_float32, host_double
from posthoc_uq.core.options import check_option
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods.draws import LINK_DRAWS, OutputGaussian
from posthoc_uq.likelihoods.likelihood import DrawnPrediction, Faults
from posthoc_uq.likelihoods.positions import AtPositions, ChannelFields, Channelled
from posthoc_uq.likelihoods.prediction import Missing

_SMALLEST, _LARGEST = 1e-6, 1e6  # dispersion of a negative binomial, shape of a gamma distribution
_LARGEST_MEAN = 1e15  # up to which targets are drawn: above it float64 does not hold all whole numbers


class LogMean(Channelled, ABC):
    """Outputs ``f``, ``(samples,)`` or ``(samples, outputs)``, are logarithms of means ``mu = exp f``; targets have the
    variance ``V(mu) = a mu + b mu^2`` and are independent given the outputs. With positions, such as counts in the
    cells of a map, outputs and targets are ``(samples, channels, *positions)``; see `channel_dim` of `Gaussian`.

    The densities are exponential families with a fixed dispersion, so that the gradient of ``-log p`` by an output is
    ``(mu - y) mu / V(mu)``, and the Fisher ``mu^2 / V(mu)`` (McCullagh, Nelder, "Generalized Linear Models", 1989).

    The predicted mean ``exp(m + v / 2)`` of a wide Gaussian output can be far above the network's, so the faithful
    prior compares whole distributions of the targets, by `divergence`.

    Attributes:
        counts: targets are whole numbers from 0 on, else numbers above 0.
        missing: ``"ignore"`` leaves out targets that are NaN, of each output by itself.
    """

    counts: ClassVar[bool] = True
    fields: ClassVar[type[Record]] = ChannelFields
    _variance_terms: tuple[float, float] = (1.0, 0.0)  # a and b

    @abstractmethod
    def quantile(self, mean: Tensor, u: Tensor) -> Tensor:
        """The smallest target whose `cdf` is at least `u`; all float64, of one shape."""

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        self.check_positions(outputs, targets)
        yield from super().faults(outputs, targets)
        if targets is None:
            return
        allowed = "whole numbers of at least 0" if self.counts else "finite numbers above 0"
        wrong = targets < 0 if self.counts else targets <= 0
        if self.counts and targets.is_floating_point():
            wrong = wrong | ((targets != targets.round()) & ~targets.isnan())
        yield (
            wrong.any(),
            lambda: (
                f"Targets for likelihood={self.name!r} must be {allowed}; these run from {float(targets.min()):g} to "
                f"{float(targets.max()):g}."
            ),
        )

    def at_positions(self, rows: Any, positions: tuple[int, ...]) -> AtPositions:
        from posthoc_uq.likelihoods.maps import DrawnMapPrediction

        return DrawnMapPrediction(rows, positions, self.layout, missing=self.missing)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """By the inverse of the distribution function; a mean above 1e15 counts as 1e15."""
        u = as_double(self.uniforms(outputs, keys, draw, outputs[0].numel()).reshape(outputs.shape))
        mean = as_double(outputs).to(u.device).exp().clamp(max=_LARGEST_MEAN)
        return self.quantile(mean, u).to(at_least_float32(outputs))

    def _by_mean(self, outputs: Tensor) -> Tensor:
        """``mu / V(mu)``."""
        outputs, (a, b) = at_least_float32(outputs), self._variance_terms
        return (-outputs).exp() / b if a == 0 else 1 / (a + b * outputs.exp())

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.reshape_targets(outputs, targets)
        return self.where_there((self.mean(outputs) - targets) * self._by_mean(outputs), targets)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """The root of ``mu^2 / V(mu)``."""
        return (self.mean(outputs) * self._by_mean(outputs)).sqrt()

    def mean(self, outputs: Tensor) -> Tensor:
        return at_least_float32(outputs).exp()

    def variance(self, outputs: Tensor) -> Tensor:
        a, b = self._variance_terms
        mean = at_least_float32(outputs).exp()
        return a * mean + b * mean.square()

    def measures(self, mean: Tensor, targets: Tensor) -> dict[str, float]:
        """The mean unit deviance, beside the RMSE: twice the log-likelihood ratio of each target's best mean, itself,
        and `mean`; per dispersion.
        """
        from torchmetrics.functional.regression import tweedie_deviance_score

        power = 1.0 if self.counts else 2.0
        deviance = tweedie_deviance_score(
            as_double(mean).flatten(), as_double(targets).flatten(), power=power
        )
        return {"mean_deviance": float(deviance)}

    def divergence_of_rows(self, outputs: Tensor, prediction: DrawnPrediction) -> Tensor:
        """By drawn targets; the mean over outputs."""
        return self.drawn_divergence(outputs, prediction) / outputs[0].numel()

    def rows_from_gaussian(self, outputs: OutputGaussian) -> DrawnPrediction:
        """Mean and variance of the target in closed form, ``E mu = exp(m + v / 2)`` and ``E mu^2 = exp(2 m + 2 v)``;
        all else by quasi-random draws of the outputs.
        """
        drawn, mean, variance = super().rows_from_gaussian(outputs), outputs.mean, outputs.variance
        assert isinstance(drawn, DrawnPrediction)
        a, b = self._variance_terms
        rate = (mean + variance / 2).exp()
        return replace(
            drawn,
            mean=rate,
            epistemic_variance=rate.square() * torch.expm1(variance),
            noise_variance=a * rate + b * rate.square() * variance.exp(),
        )


def _count_quantile(cdf: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, u: Tensor) -> Tensor:
    """The smallest whole number whose distribution function is at least `u`, by bisection.

    Args:
        cdf: of whole numbers, float64, of the shape of `u`.
        mean: of the counts.
        variance: of the counts, from which the search begins.
        u: in (0, 1), float64.
    """
    low = torch.full_like(u, -1.0)
    high = (mean + 8 * variance.sqrt() + 8).ceil()
    while bool((short := cdf(high) < u).any()):
        low = torch.where(short, high, low)
        high = torch.where(short, 2 * high, high)
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        reached = cdf(middle) >= u
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


class Poisson(LogMean):
    """Counts: outputs ``(samples,)`` or ``(samples, outputs)`` are logarithms of rates, targets of the same shape are
    whole numbers from 0 on.

    Args:
        channel_dim: the dimension of the channels where outputs have positions, 1 or -1.
        missing: ``"ignore"`` leaves out targets that are NaN, of each output by itself.

    Example:
        ```python
        net, x = nn.Linear(2, 1), torch.randn(30, 2)
        data = [(x, torch.poisson(x[:, :1].exp()))]
        posterior = uq.fit(net, data, likelihood=uq.Poisson())
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.mean, prediction.probability(0))
        ```
    """

    name = "poisson"

    def __init__(self, *, channel_dim: int = 1, missing: Missing = "error") -> None:
        self._set_channel_dim(channel_dim)
        self._take_missing(missing)

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets * outputs - outputs.exp() - torch.lgamma(targets + 1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form: ``y m - exp(m + v / 2) - log y!``, summed over outputs."""
        targets, mean = self.reshape_targets(mean, targets), at_least_float32(mean)
        counts = self.in_support(targets)
        terms = counts * mean - (mean + at_least_float32(variance) / 2).exp() - torch.lgamma(counts + 1)
        return self.where_there(terms, targets).reshape(mean.shape[0], -1).sum(1)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _cdf(outputs.exp(), targets.floor())

    def quantile(self, mean: Tensor, u: Tensor) -> Tensor:
        return _count_quantile(lambda counts: _cdf(mean, counts), mean, mean, u)


def _cdf(rates: Tensor, counts: Tensor) -> Tensor:
    values = torch.special.gammaincc(counts.clamp(min=0) + 1, rates)
    return torch.where(counts < 0, torch.zeros_like(values), values)


Dispersion = Annotated[float, Ge(_SMALLEST), Le(_LARGEST)]


class NegativeBinomialFields(ChannelFields):
    """The dispersion."""

    dispersion: Dispersion


class NegativeBinomial(LogMean):
    """Counts: outputs ``(samples,)`` or ``(samples, outputs)`` are logarithms of means ``mu``, targets of the same
    shape are whole numbers from 0 on, with the variance ``mu + dispersion mu^2`` (NB2 of Cameron, Trivedi, "Regression
    Analysis of Count Data", 1998; the dispersion is statsmodels' ``alpha``, its inverse is R's ``theta``).

    Args:
        dispersion: between 1e-6 and 1e6; towards 0 the distribution becomes Poisson's. `fit` does not estimate it: take
            it from training residuals. ``likelihood="negative_binomial"`` takes 1, and warns with an estimate where the
            residuals of the first batch suggest another.
        channel_dim: the dimension of the channels where outputs have positions, 1 or -1.
        missing: ``"ignore"`` leaves out targets that are NaN, of each output by itself.

    Example:
        ```python
        net, x = nn.Linear(2, 1), torch.randn(30, 2)
        data = [(x, torch.poisson(x[:, :1].exp()))]
        posterior = uq.fit(net, data, likelihood=uq.NegativeBinomial(0.5))
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.mean, prediction.interval(0.9))
        ```
    """

    name = "negative_binomial"
    fields: ClassVar[type[Record]] = NegativeBinomialFields

    def __init__(self, dispersion: float = 1.0, *, channel_dim: int = 1, missing: Missing = "error") -> None:
        self._set_channel_dim(channel_dim)
        self._take_missing(missing)
        self.dispersion = check_option("dispersion", dispersion, Dispersion)
        self._variance_terms = 1.0, self.dispersion

    def at_noise_scale(self, factor: float) -> NegativeBinomial:
        """With `factor` times the dispersion."""
        if factor == 1.0:
            return self
        dispersion = min(max(self.dispersion * factor, _SMALLEST), _LARGEST)
        return NegativeBinomial(dispersion, channel_dim=self.channel_dim, missing=self.missing)

    def by_moments(self, outputs: Tensor, targets: Tensor) -> tuple[str, float, float]:
        mean = as_double(outputs).exp()
        excess = (as_double(self.reshape_targets(outputs, targets)) - mean).square() - mean
        suggested = float((excess.sum() / mean.square().sum()).clamp(min=1e-6))
        return "dispersion", self.dispersion, suggested

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        size = 1 / self.dispersion
        counts = as_double(targets)
        # in float64: the first two cancel where the size is large
        constant = torch.lgamma(counts + size) - torch.lgamma(host_double(size)) - torch.lgamma(counts + 1)
        logits = outputs + log(self.dispersion)  # of the probability dispersion mu / (1 + dispersion mu)
        return constant.to(outputs) + targets * logits - (targets + size) * F.softplus(logits)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._cdf(outputs.exp(), targets.floor())

    def _cdf(self, mean: Tensor, counts: Tensor) -> Tensor:
        from scipy.special import betainc

        mean, whole = as_double(mean).cpu(), as_double(counts).cpu().clamp(min=0)
        share = 1 / (1 + self.dispersion * mean)
        values = host_double(betainc(1 / self.dispersion, (whole + 1).numpy(), share.numpy())).to(counts)
        return torch.where(counts < 0, torch.zeros_like(values), values)

    def quantile(self, mean: Tensor, u: Tensor) -> Tensor:
        variance = mean + self.dispersion * mean.square()
        return _count_quantile(lambda counts: self._cdf(mean, counts), mean, variance, u)

    def measures(self, mean: Tensor, targets: Tensor) -> dict[str, float]:
        """``2 (y log(y / mu) - (y + 1 / alpha) log((1 + alpha y) / (1 + alpha mu)))``, mean over targets."""
        mean, counts, alpha = as_double(mean).flatten(), as_double(targets).flatten(), self.dispersion
        first = torch.special.xlogy(counts, counts / mean)
        second = (counts + 1 / alpha) * (torch.log1p(alpha * counts) - torch.log1p(alpha * mean))
        return {"mean_deviance": float(2 * (first - second).mean())}


ShapeParameter = Annotated[float, Ge(_SMALLEST), Le(_LARGEST)]


class GammaFields(ChannelFields):
    """The shape."""

    shape: ShapeParameter


class Gamma(LogMean):
    """Positive values: outputs ``(samples,)`` or ``(samples, outputs)`` are logarithms of means ``mu``, targets of the
    same shape are above 0, with the variance ``mu^2 / shape``.

    Args:
        shape: between 1e-6 and 1e6; 1 is the exponential distribution. Its inverse is the dispersion of a gamma
            regression. `fit` does not estimate it: ``likelihood="gamma"`` takes 1, and warns as of a dispersion.
        channel_dim: the dimension of the channels where outputs have positions, 1 or -1.
        missing: ``"ignore"`` leaves out targets that are NaN, of each output by itself.

    Example:
        ```python
        net, x = nn.Linear(2, 1), torch.randn(30, 2)
        data = [(x, x[:, :1].exp() * (0.1 + torch.rand(30, 1)))]
        posterior = uq.fit(net, data, likelihood=uq.Gamma(2.0))
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.mean, prediction.interval(0.9))
        ```
    """

    name = "gamma"
    counts: ClassVar[bool] = False
    fields: ClassVar[type[Record]] = GammaFields

    def __init__(self, shape: float = 1.0, *, channel_dim: int = 1, missing: Missing = "error") -> None:
        self._set_channel_dim(channel_dim)
        self._take_missing(missing)
        self.shape = check_option("shape", shape, ShapeParameter)
        self._variance_terms = 0.0, 1 / self.shape

    def at_noise_scale(self, factor: float) -> Gamma:
        """With `factor` times the dispersion, which is the inverse of the shape."""
        if factor == 1.0:
            return self
        shape = min(max(self.shape / factor, _SMALLEST), _LARGEST)
        return Gamma(shape, channel_dim=self.channel_dim, missing=self.missing)

    def by_moments(self, outputs: Tensor, targets: Tensor) -> tuple[str, float, float]:
        ratios = as_double(self.reshape_targets(outputs, targets)) / as_double(outputs).exp()
        suggested = 1 / float((ratios - 1).square().mean().clamp(min=1e-6))
        return "shape", self.shape, suggested

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        k = self.shape
        constant = k * log(k) - lgamma(k)
        return constant + (k - 1) * targets.log() - k * outputs - k * targets * (-outputs).exp()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.reshape_targets(outputs, targets)
        return self.where_there(self.shape * (1 - targets * (-at_least_float32(outputs)).exp()), targets)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """The root of the shape, whatever the outputs, which no overflow of the mean may spoil."""
        return torch.full_like(at_least_float32(outputs), self.shape**0.5)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form, with ``E[exp(-f)] = exp(-m + v / 2)``."""
        k, targets, mean = self.shape, self.reshape_targets(mean, targets), at_least_float32(mean)
        values = self.in_support(targets)
        # E log p(y | f) is log p(y | m) with a larger last term
        more = k * values * (-mean).exp() * torch.expm1(at_least_float32(variance) / 2)
        terms = self.where_there(self.log_terms(mean, values) - more, targets)
        return terms.reshape(mean.shape[0], -1).sum(1)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        ratio = self.shape * targets.clamp(min=0) * (-outputs).exp()
        return torch.special.gammainc(torch.full_like(ratio, self.shape), ratio)

    def quantile(self, mean: Tensor, u: Tensor) -> Tensor:
        from scipy.special import gammaincinv

        units = host_double(gammaincinv(self.shape, as_double(u).cpu().numpy())).to(mean)
        # a small shape has quantiles that underflow, and zero has no density
        return (mean / self.shape * units).clamp(min=torch.finfo(torch.float32).tiny)
