"""Gaussian targets: with one noise variance, or with a variance that the network predicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from math import log, pi
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from posthoc_uq.core.devices import host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import LARGEST, Magnitude
from posthoc_uq.core.randomness import uniforms
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods.draws import LINK_DRAWS, Moments, Spread, gathered, values_of_draws
from posthoc_uq.likelihoods.likelihood import Likelihood, gaussian_log_mean_exp, wide
from posthoc_uq.likelihoods.prediction import at_least_float32, mean_and_variance
from posthoc_uq.likelihoods.value_prediction import (
    HeteroscedasticPrediction,
    RegressionPrediction,
    placed_noise_variance,
)

# Regression: means with Gaussian observation noise.


class GaussianFields(Record):
    """One noise variance an output, or one for all."""

    noise_variance: Annotated[list[Magnitude], Field(min_length=1)]


class Gaussian(Likelihood):
    """Regression: outputs ``(samples,)`` or ``(samples, outputs)`` are means, the noise variance is one
    number an output.

    Attributes:
        noise_variance: ``(outputs,)``, in squared units of the targets, or one number for all.
    """

    name = "regression"
    joint: ClassVar[bool] = False
    fields: ClassVar[type[Record]] = GaussianFields
    noise_variance: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, noise_variance: Tensor | float = 1.0) -> None:
        try:
            if isinstance(noise_variance, bool):
                raise TypeError
            noise_variances = host_double(noise_variance).detach().flatten()
        except (TypeError, ValueError, RuntimeError):
            raise PosthocUQError(
                f"noise_variance must be a number, or one number an output, not a {type(noise_variance).__name__}; it "
                f"is the same for every input."
            ) from None
        if noise_variances.numel() == 0 or not bool(
            ((noise_variances >= 1 / LARGEST) & (noise_variances <= LARGEST)).all()
        ):
            raise PosthocUQError(
                f"noise_variance must be >= {1 / LARGEST:g} and <= {LARGEST:g}, not {noise_variances.tolist()}."
            )
        self.noise_variance = noise_variances  # pyright: ignore[reportIncompatibleVariableOverride]

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "noise_variance": self.noise_variance.tolist()}

    @classmethod
    def restore(cls, attributes: Mapping[str, Any]) -> Gaussian:
        return cls(host_double(attributes["noise_variance"]))

    def residual_sums(self, log_likelihood: float, samples: float, outputs: int) -> tuple[float, float]:
        noise_variance = self.noise_variance.expand(outputs)
        constant = float((noise_variance.log() + log(2 * pi)).sum()) * samples
        # The rest of the log likelihood; rounding can make it slightly negative.
        return max(0.0, -2 * log_likelihood - constant), samples * outputs

    def noise(self, outputs: Tensor) -> Tensor:
        """The noise variance, shaped to broadcast against outputs ``(..., outputs)``."""
        noise = self.noise_variance.to(device=outputs.device, dtype=wide(outputs).dtype)
        return noise.squeeze(0) if noise.numel() == 1 else noise

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Gaussian.fault(self, outputs, targets)
        if fault is not None and bool(fault):
            raise PosthocUQError("Some targets are not finite.")

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.ndim not in (1, 2):
            raise PosthocUQError(
                f"likelihood='regression' needs outputs of shape (samples,) or (samples, outputs), and the "
                f"model gives "
                f"{tuple(outputs.shape)}."
            )
        if self.noise_variance.numel() not in (1, outputs[0].numel()):
            raise PosthocUQError(
                f"noise_variance has {self.noise_variance.numel()} entries, but the model has "
                f"{outputs[0].numel()} outputs."
            )
        if targets is None:
            return None
        if targets.numel() != outputs.numel():
            raise PosthocUQError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}."
            )
        return ~torch.isfinite(targets).all()

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``outputs - targets``, shaped like the outputs."""
        return wide(outputs) - targets.to(device=outputs.device, dtype=wide(outputs).dtype).reshape(
            outputs.shape
        )

    def takes(self, outputs: int) -> bool:
        return self.noise_variance.numel() in (1, outputs)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        noise_variance = self.noise(outputs)
        terms = -0.5 * (
            self.residuals(outputs, targets) ** 2 / noise_variance + noise_variance.log() + log(2 * pi)
        )
        return terms.reshape(outputs.shape[0], -1).sum(1)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        # KL(N(f, s) || N(m, s + v)) of every output, with the prediction's noise variance s
        noise_variance, total = prediction.noise_variance, prediction.variance
        squares = (prediction.mean - wide(outputs)).square()
        terms = 0.5 * ((noise_variance + squares) / total - 1 + (total / noise_variance).log())
        return terms.reshape(outputs.shape[0], -1).mean(1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form: ``log p(y | mean) - variance / (2 noise)``, summed over outputs."""
        penalty = 0.5 * wide(variance) / self.noise(mean)
        return self.log_prob(mean, targets) - penalty.reshape(mean.shape[0], -1).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form: the log density of ``N(mean, variance + noise)``, summed over outputs."""
        total = wide(variance) + self.noise(mean)
        terms = -0.5 * (self.residuals(mean, targets) ** 2 / total + total.log() + log(2 * pi))
        return terms.reshape(mean.shape[0], -1).sum(1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def variance(self, outputs: Tensor) -> Tensor:
        return self.noise(outputs).expand(outputs.shape)

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """The mean of the draws is not further from the trained outputs, in mean square, than the noise variance."""
        squares = (draws.mean(0) - outputs).square().mean(0)
        return not bool((squares > self.noise(outputs)).any())

    def from_draws(self, outputs: Tensor, noise: Tensor | None = None) -> RegressionPrediction:
        variance = self.noise_variance if noise is None else noise
        return RegressionPrediction.from_samples(outputs, placed_noise_variance(variance, outputs.device))

    def from_blocks(self, blocks: Iterable[Tensor], noise: Tensor | None = None) -> RegressionPrediction:
        return values_of_draws(blocks, self.noise_variance if noise is None else noise)

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor,
        *,
        covariance: Tensor | Spread | None = None,
        link: str = "mc",
        n_draws: int = LINK_DRAWS,
        noise: Tensor | None = None,
    ) -> RegressionPrediction:
        """In closed form, whatever the link."""
        noise_variance = self.noise_variance if noise is None else noise
        return RegressionPrediction(mean, variance, placed_noise_variance(noise_variance, mean.device))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.residuals(outputs, targets) / self.noise(outputs)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        size = outputs[0].numel()
        u = uniforms(keys, (draw + 1) * size)[:, draw * size :]
        normals = torch.special.ndtri(u).reshape(outputs.shape)
        normals = normals.to(device=outputs.device, dtype=wide(outputs).dtype)
        return wide(outputs) + normals * self.noise(outputs).sqrt()

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        scale = self.noise(outputs).rsqrt().expand(outputs.shape)
        for index in range(outputs[0].numel()):
            factor = torch.zeros_like(scale.reshape(outputs.shape[0], -1))
            factor[:, index] = scale.reshape(outputs.shape[0], -1)[:, index]
            yield factor.reshape(outputs.shape)


# Regression with a noise that the network predicts beside the mean.


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
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form, with ``E[exp(-s)] = exp(-m_s + v_s / 2)`` for the log variance s."""
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._halves(variance)
        squares = (self._like(means, targets) - means).square() + spread
        return -0.5 * (squares * (log_spread / 2 - logs).exp() + logs + log(2 * pi)).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
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
        n_draws: int = LINK_DRAWS,
        noise: Tensor | None = None,
    ) -> HeteroscedasticPrediction:
        """In closed form, whatever the link: the mean noise variance is ``exp(m_s + v_s / 2)``."""
        logs, log_spread = self._means_and_logs(mean)[1], self._halves(variance)[1]
        return self._prediction(mean, variance, (logs + log_spread / 2).exp())

    def _prediction(self, mean: Tensor, variance: Tensor, noise: Tensor) -> HeteroscedasticPrediction:
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._halves(variance)
        return HeteroscedasticPrediction(means, spread, noise, logs, log_spread)
