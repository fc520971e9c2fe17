"""Counts: logarithms of rates."""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.likelihoods.log_mean import LogMean, count_quantile
from posthoc_uq.likelihoods.outputs import wide
from posthoc_uq.predictions.links import DRAWS


class Poisson(LogMean):
    """Counts: outputs ``(samples,)`` or ``(samples, outputs)`` are logarithms of rates, targets of the same shape are
    whole numbers from 0 on.
    """

    name = "poisson"

    @property
    def variance_terms(self) -> tuple[float, float]:
        return 1.0, 0.0

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets * outputs - outputs.exp() - torch.lgamma(targets + 1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """In closed form: ``y m - exp(m + v / 2) - log y!``, summed over outputs."""
        counts, mean = self.like(mean, targets), wide(mean)
        terms = counts * mean - (mean + wide(variance) / 2).exp() - torch.lgamma(counts + 1)
        return terms.reshape(mean.shape[0], -1).sum(1)

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _cdf(outputs.exp(), targets.floor())

    def quantile(self, mean: Tensor, u: Tensor) -> Tensor:
        return count_quantile(lambda counts: _cdf(mean, counts), mean, mean, u)

    def unit_deviance(self, mean: Tensor, targets: Tensor) -> float:
        from torchmetrics.functional.regression import tweedie_deviance_score

        return float(tweedie_deviance_score(mean.double().flatten(), targets.double().flatten(), power=1.0))


def _cdf(rates: Tensor, counts: Tensor) -> Tensor:
    values = torch.special.gammaincc(counts.clamp(min=0) + 1, rates)
    return torch.where(counts < 0, torch.zeros_like(values), values)
