"""Regression with a noise that the network predicts beside the mean."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from math import log, pi
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.likelihoods.base import Likelihood
from posthoc_uq.likelihoods.outputs import wide
from posthoc_uq.likelihoods.quadrature import gaussian_log_mean_exp
from posthoc_uq.predictions.heteroscedastic import HeteroscedasticPrediction
from posthoc_uq.predictions.links import DRAWS
from posthoc_uq.predictions.samples import at_least_float32, mean_and_variance
from posthoc_uq.predictions.spread import Spread
from posthoc_uq.predictions.streaming import Moments, gathered


class Heteroscedastic(Likelihood):
    """Regression with a noise of each input (Nix, Weigend 1994; Kendall, Gal 2017): outputs ``(samples, 2 targets)``
    are the means of all targets and, after them, the logarithms of their noise variances. Targets are
    ``(samples, targets)``; of one target also ``(samples,)``.

    The network was trained with the negative log-likelihood (`torch.nn.GaussianNLLLoss` of the exponentials). The
    Fisher is exact in closed form: ``1 / noise variance`` for a mean and ``1 / 2`` for a log variance, nothing between
    them.
    """

    name = "heteroscedastic"
    joint: ClassVar[bool] = False  # mean and variance of the target need no covariance of the outputs
    _log_factor = 0.0  # of `at_noise_scale`

    @property
    def has_noise(self) -> bool:
        return True

    def at_noise_scale(self, factor: float) -> Heteroscedastic:
        """With `factor` times every predicted noise variance."""
        if factor == 1.0:
            return self
        likelihood = copy.copy(self)
        likelihood._log_factor = self._log_factor + log(factor)
        return likelihood

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Heteroscedastic.fault(self, outputs, targets)
        if fault is not None and bool(fault):
            raise PosthocUQError("Some targets are not finite.")

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.ndim != 2 or outputs.shape[1] % 2 or outputs.shape[1] == 0:
            raise PosthocUQError(
                f"likelihood='heteroscedastic' needs outputs of shape (samples, 2 * targets), all means and after them "
                f"the logarithms of all noise variances, and the model gives {tuple(outputs.shape)}."
            )
        if targets is None:
            return None
        if 2 * targets.numel() != outputs.numel() or targets.shape[:1] != outputs.shape[:1]:
            raise PosthocUQError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}, which "
                f"have a mean and a log variance for each of {outputs.shape[1] // 2} targets."
            )
        return ~torch.isfinite(targets).all()

    def takes(self, outputs: int) -> bool:
        return outputs % 2 == 0

    @staticmethod
    def _halves(outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log variances, ``(..., targets)`` each."""
        means, log_variances = wide(outputs).chunk(2, dim=-1)
        return means, log_variances

    def _means_and_logs(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and logarithms of the noise variances at this noise scale, ``(..., targets)`` each."""
        means, log_variances = self._halves(outputs)
        return means, log_variances + self._log_factor

    @staticmethod
    def _like(means: Tensor, targets: Tensor) -> Tensor:
        return targets.to(device=means.device, dtype=means.dtype).reshape(means.shape)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        means, logs = self._means_and_logs(outputs)
        squares = (self._like(means, targets) - means).square()
        return -0.5 * (squares * (-logs).exp() + logs + log(2 * pi)).sum(1)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        means, logs = self._means_and_logs(outputs)
        residuals, precision = means - self._like(means, targets), (-logs).exp()
        return torch.cat([residuals * precision, 0.5 * (1 - residuals.square() * precision)], dim=1)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        means, logs = self._means_and_logs(outputs)
        normals = torch.special.ndtri(self.uniforms(outputs, keys, draw, means.shape[1])).to(means)
        return means + (logs / 2).exp() * normals

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        _, logs = self._means_and_logs(outputs)
        roots = torch.cat([(-logs / 2).exp(), torch.full_like(logs, 0.5**0.5)], dim=1)
        for index in range(roots.shape[1]):
            factor = torch.zeros_like(roots)
            factor[:, index] = roots[:, index]
            yield factor

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        """Of the Gaussian with the prediction's mean and variance, in closed form; the mean over targets."""
        means, logs = self._means_and_logs(outputs)
        squares, total = (prediction.mean - means).square(), prediction.variance
        return (0.5 * ((logs.exp() + squares) / total - 1 + total.log() - logs)).mean(1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """In closed form, with ``E[exp(-s)] = exp(-m_s + v_s / 2)`` for the log variance s."""
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._halves(variance)
        squares = (self._like(means, targets) - means).square() + spread
        return -0.5 * (squares * (log_spread / 2 - logs).exp() + logs + log(2 * pi)).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """In closed form over the means, by Gauss-Hermite quadrature over the log variances."""
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._halves(variance)
        squares = (self._like(means, targets) - means).square()

        def log_density(log_variances: Tensor) -> Tensor:
            total = spread + log_variances.exp()
            return -0.5 * (squares / total + total.log() + log(2 * pi))

        return gaussian_log_mean_exp(log_density, logs, log_spread).sum(1)

    def mean(self, outputs: Tensor) -> Tensor:
        return self._halves(outputs)[0]

    def variance(self, outputs: Tensor) -> Tensor:
        return self._means_and_logs(outputs)[1].exp()

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """The mean of the draws is not further from the trained means, in mean square, than the mean noise variance."""
        means, logs = self._means_and_logs(outputs)
        squares = (self._halves(draws)[0].mean(0) - means).square().mean(0)
        return not bool((squares > logs.exp().mean(0)).any())

    def from_draws(self, outputs: Tensor, noise: Tensor | None = None) -> HeteroscedasticPrediction:
        """By the draws' moments."""
        if outputs.ndim != 3 or outputs.shape[-1] % 2:
            raise PosthocUQError(f"outputs must be (draws, batch, 2 * targets), not {tuple(outputs.shape)}.")
        outputs = at_least_float32(outputs)
        moments = mean_and_variance(outputs)
        return self._prediction(*moments, self.variance(outputs).mean(0))

    def from_blocks(self, blocks: Iterable[Tensor], noise: Tensor | None = None) -> HeteroscedasticPrediction:
        outputs, noises, dtype = Moments(), Moments(), torch.float32
        for block in gathered(blocks):
            block = at_least_float32(block)
            dtype = block.dtype
            outputs.add(block)
            noises.add(self.variance(block))
        mean, variance = (moment.to(dtype) for moment in outputs.result())
        return self._prediction(mean, variance, noises.result()[0].to(dtype))

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor,
        *,
        covariance: Tensor | Spread | None = None,
        link: str = "mc",
        n_draws: int = DRAWS,
        noise: Tensor | None = None,
    ) -> HeteroscedasticPrediction:
        """In closed form, whatever the link: the mean noise variance is ``exp(m_s + v_s / 2)``."""
        logs, log_spread = self._means_and_logs(mean)[1], self._halves(variance)[1]
        return self._prediction(mean, variance, (logs + log_spread / 2).exp())

    def _prediction(self, mean: Tensor, variance: Tensor, noise: Tensor) -> HeteroscedasticPrediction:
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._halves(variance)
        return HeteroscedasticPrediction(means, spread, noise, logs, log_spread)
