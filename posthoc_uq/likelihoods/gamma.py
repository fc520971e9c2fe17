"""Positive values whose deviation grows with their mean: logarithms of means, one shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lgamma, log
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import as_double, host_double
from posthoc_uq.fields import Field
from posthoc_uq.fields import Number as NumberField
from posthoc_uq.likelihoods.log_mean import LogMean
from posthoc_uq.likelihoods.outputs import wide
from posthoc_uq.predictions.links import DRAWS
from posthoc_uq.values import Number

_SMALLEST, _LARGEST = 1e-6, 1e6
_SHAPE = Number("a number between 1e-6 and 1e6", least=_SMALLEST, most=_LARGEST)


class Gamma(LogMean):
    """Positive values: outputs ``(samples,)`` or ``(samples, outputs)`` are logarithms of means ``mu``, targets of the
    same shape are above 0, with the variance ``mu^2 / shape``.

    Attributes:
        shape: between 1e-6 and 1e6; 1 is the exponential distribution. Its inverse is the dispersion of a gamma
            regression.
    """

    name = "gamma"
    counts: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, Field]] = {"shape": NumberField(_SMALLEST, _LARGEST)}

    def __init__(self, shape: float = 1.0) -> None:
        self.shape = float(_SHAPE("shape", shape))

    @classmethod
    def restore(cls, attributes: Mapping[str, Any]) -> Gamma:
        return cls(attributes["shape"])

    @property
    def variance_terms(self) -> tuple[float, float]:
        return 0.0, 1 / self.shape

    @property
    def has_noise(self) -> bool:
        return True

    def at_noise_scale(self, factor: float) -> Gamma:
        """With `factor` times the dispersion, which is the inverse of the shape."""
        return self if factor == 1.0 else Gamma(min(max(self.shape / factor, _SMALLEST), _LARGEST))

    def by_moments(self, outputs: Tensor, targets: Tensor) -> tuple[str, float, float]:
        ratios = as_double(self.like(outputs, targets)) / as_double(outputs).exp()
        suggested = 1 / float((ratios - 1).square().mean().clamp(min=1e-6))
        return "shape", self.shape, suggested

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        k = self.shape
        constant = k * log(k) - lgamma(k)
        return constant + (k - 1) * targets.log() - k * outputs - k * targets * (-outputs).exp()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.shape * (1 - self.like(outputs, targets) * (-wide(outputs)).exp())

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        # the Fisher is the shape whatever the outputs, which no overflow of the mean may spoil
        yield from super().exact_factors(torch.zeros_like(outputs))

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """In closed form, with ``E[exp(-f)] = exp(-m + v / 2)``."""
        k, values, mean = self.shape, self.like(mean, targets), wide(mean)
        # E log p(y | f) is log p(y | m) with a larger last term
        more = k * values * (-mean).exp() * torch.expm1(wide(variance) / 2)
        return (self.log_terms(mean, values) - more).reshape(mean.shape[0], -1).sum(1)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        ratio = self.shape * targets.clamp(min=0) * (-outputs).exp()
        return torch.special.gammainc(torch.full_like(ratio, self.shape), ratio)

    def quantile(self, mean: Tensor, u: Tensor) -> Tensor:
        from scipy.special import gammaincinv

        units = host_double(gammaincinv(self.shape, as_double(u).cpu().numpy())).to(mean)
        # a small shape has quantiles that underflow, and zero has no density
        return (mean / self.shape * units).clamp(min=torch.finfo(torch.float32).tiny)

    def unit_deviance(self, mean: Tensor, targets: Tensor) -> float:
        from torchmetrics.functional.regression import tweedie_deviance_score

        return float(tweedie_deviance_score(mean.double().flatten(), targets.double().flatten(), power=2.0))
