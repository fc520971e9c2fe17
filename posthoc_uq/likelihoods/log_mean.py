"""What regressions have in common whose outputs are the logarithms of the targets' means: counts, positive values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.likelihoods.outputs import wide
from posthoc_uq.likelihoods.separate import SeparateOutputs
from posthoc_uq.predictions.drawn import DrawnPrediction
from posthoc_uq.predictions.links import DRAWS
from posthoc_uq.predictions.spread import Spread

_LARGEST = 1e15  # mean up to which targets are drawn: above it float64 does not hold all whole numbers


class LogMean(SeparateOutputs):
    """Outputs ``f``, ``(samples,)`` or ``(samples, outputs)``, are logarithms of means ``mu = exp f``; targets have the
    variance ``V(mu) = a mu + b mu^2`` and are independent given the outputs.

    The densities are exponential families with a fixed dispersion, so that the gradient of ``-log p`` by an output is
    ``(mu - y) mu / V(mu)``, and the Fisher ``mu^2 / V(mu)`` (McCullagh, Nelder, "Generalized Linear Models", 1989).

    Attributes:
        counts: targets are whole numbers from 0 on, else numbers above 0.
    """

    counts: ClassVar[bool] = True

    @property
    @abstractmethod
    def variance_terms(self) -> tuple[float, float]:
        """``a`` and ``b``."""

    @abstractmethod
    def quantile(self, mean: Tensor, u: Tensor) -> Tensor:
        """The smallest target whose `cdf` is at least `u`; all float64, of one shape."""

    def by_moments(self, outputs: Tensor, targets: Tensor) -> tuple[str, float, float] | None:
        """The name of the parameter of the variance, its value, and the value that the targets suggest, by their
        squared residuals; None without such a parameter.
        """
        return None

    @abstractmethod
    def unit_deviance(self, mean: Tensor, targets: Tensor) -> float:
        """Twice the log-likelihood ratio of the best mean of each target and `mean`, per dispersion; the mean."""

    # Checks

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = LogMean.fault(self, outputs, targets)
        if fault is not None and targets is not None and bool(fault):
            values = "whole numbers of at least 0" if self.counts else "finite numbers above 0"
            raise PosthocUQError(
                f"Targets for likelihood={self.name!r} must be {values}; these run from {float(targets.min()):g} to "
                f"{float(targets.max()):g}."
            )

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.ndim not in (1, 2):
            raise PosthocUQError(
                f"likelihood={self.name!r} needs outputs of shape (samples,) or (samples, outputs), logarithms of "
                f"means, and the model gives {tuple(outputs.shape)}."
            )
        if targets is None:
            return None
        if targets.numel() != outputs.numel() or targets.shape[:1] != outputs.shape[:1]:
            raise PosthocUQError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}."
            )
        if self.counts:
            wrong = (
                (targets < 0) | (targets != targets.round()) if targets.is_floating_point() else targets < 0
            )
            return (wrong | ~torch.isfinite(targets)).any()
        return ((targets <= 0) | ~torch.isfinite(targets)).any()

    # The density and its gradients

    def _by_mean(self, outputs: Tensor) -> Tensor:
        """``mu / V(mu)``."""
        a, b = self.variance_terms
        return (-wide(outputs)).exp() / b if a == 0 else 1 / (a + b * wide(outputs).exp())

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (wide(outputs).exp() - self.like(outputs, targets)) * self._by_mean(outputs)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """By the inverse of the distribution function; a mean above 1e15 counts as 1e15."""
        u = as_double(self.uniforms(outputs, keys, draw, outputs[0].numel()).reshape(outputs.shape))
        mean = as_double(outputs).to(u.device).exp().clamp(max=_LARGEST)
        return self.quantile(mean, u).to(wide(outputs))

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        root = (wide(outputs).exp() * self._by_mean(outputs)).sqrt().reshape(outputs.shape[0], -1)
        for index in range(root.shape[1]):
            factor = torch.zeros_like(root)
            factor[:, index] = root[:, index]
            yield factor.reshape(outputs.shape)

    # The target

    def mean(self, outputs: Tensor) -> Tensor:
        return wide(outputs).exp()

    def variance(self, outputs: Tensor) -> Tensor:
        a, b = self.variance_terms
        mean = wide(outputs).exp()
        return a * mean + b * mean.square()

    def measures(self, mean: Tensor, targets: Tensor) -> dict[str, float]:
        """The mean unit deviance, beside the RMSE."""
        return {"mean deviance": self.unit_deviance(mean, targets)}

    # Predictions

    def divergence(self, outputs: Tensor, prediction: DrawnPrediction) -> Tensor:
        """By drawn targets; the mean over outputs."""
        return self.drawn_divergence(outputs, prediction) / outputs[0].numel()

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """The mean target over draws is not further from the trained one, in mean square, than its variance."""
        squares = (draws.exp().mean(0) - outputs.exp()).square().mean(0)
        return not bool((squares > self.variance(outputs).mean(0)).any())

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor,
        *,
        covariance: Tensor | Spread | None = None,
        link: str = "mc",
        n_draws: int = DRAWS,
        noise: Tensor | None = None,
    ) -> DrawnPrediction:
        """Mean and variance of the target in closed form, ``E mu = exp(m + v / 2)`` and ``E mu^2 = exp(2 m + 2 v)``;
        all else by quasi-random draws of the outputs.
        """
        drawn = super().from_gaussian(mean, variance, covariance=covariance, link=link, n_draws=n_draws)
        assert isinstance(drawn, DrawnPrediction)
        a, b = self.variance_terms
        rate = (mean + variance / 2).exp()
        return replace(
            drawn,
            mean=rate,
            epistemic_variance=rate.square() * torch.expm1(variance),
            noise_variance=a * rate + b * rate.square() * variance.exp(),
        )


def count_quantile(cdf: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, u: Tensor) -> Tensor:
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
