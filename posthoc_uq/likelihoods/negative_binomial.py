"""Counts that vary more than those of a Poisson distribution: logarithms of means, one dispersion."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.devices import as_double, host_double
from posthoc_uq.fields import Field
from posthoc_uq.fields import Number as NumberField
from posthoc_uq.likelihoods.log_mean import LogMean, count_quantile
from posthoc_uq.values import Number

_SMALLEST, _LARGEST = 1e-6, 1e6
_DISPERSION = Number("a number between 1e-6 and 1e6", least=_SMALLEST, most=_LARGEST)


class NegativeBinomial(LogMean):
    """Counts: outputs ``(samples,)`` or ``(samples, outputs)`` are logarithms of means ``mu``, targets of the same
    shape are whole numbers from 0 on, with the variance ``mu + dispersion mu^2`` (NB2 of Cameron, Trivedi, "Regression
    Analysis of Count Data", 1998; the dispersion is statsmodels' ``alpha``, its inverse is R's ``theta``).

    Attributes:
        dispersion: between 1e-6 and 1e6; towards 0 the distribution becomes Poisson's.
    """

    name = "negative_binomial"
    fields: ClassVar[Mapping[str, Field]] = {"dispersion": NumberField(_SMALLEST, _LARGEST)}

    def __init__(self, dispersion: float = 1.0) -> None:
        self.dispersion = float(_DISPERSION("dispersion", dispersion))

    @classmethod
    def restore(cls, attributes: Mapping[str, Any]) -> NegativeBinomial:
        return cls(attributes["dispersion"])

    @property
    def variance_terms(self) -> tuple[float, float]:
        return 1.0, self.dispersion

    @property
    def has_noise(self) -> bool:
        return True

    def at_noise_scale(self, factor: float) -> NegativeBinomial:
        """With `factor` times the dispersion."""
        if factor == 1.0:
            return self
        return NegativeBinomial(min(max(self.dispersion * factor, _SMALLEST), _LARGEST))

    def by_moments(self, outputs: Tensor, targets: Tensor) -> tuple[str, float, float]:
        mean = as_double(outputs).exp()
        excess = (as_double(self.like(outputs, targets)) - mean).square() - mean
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
        return count_quantile(lambda counts: self._cdf(mean, counts), mean, variance, u)

    def unit_deviance(self, mean: Tensor, targets: Tensor) -> float:
        """``2 (y log(y / mu) - (y + 1 / alpha) log((1 + alpha y) / (1 + alpha mu)))``, mean over targets."""
        mean, counts = as_double(mean).flatten(), as_double(targets).flatten()
        alpha = self.dispersion
        first = torch.special.xlogy(counts, counts / mean)
        second = (counts + 1 / alpha) * (torch.log1p(alpha * counts) - torch.log1p(alpha * mean))
        return float(2 * (first - second).mean())
