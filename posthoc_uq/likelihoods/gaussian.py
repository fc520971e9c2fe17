"""Regression: means with Gaussian observation noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import log, pi
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import host_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.fields import Field, Items, Number
from posthoc_uq.likelihoods.base import Likelihood
from posthoc_uq.likelihoods.outputs import wide
from posthoc_uq.predictions.links import DRAWS
from posthoc_uq.predictions.regression import RegressionPrediction, placed_noise_variance
from posthoc_uq.predictions.spread import Spread
from posthoc_uq.predictions.streaming import values_of_draws
from posthoc_uq.randomness import uniforms


class Gaussian(Likelihood):
    """Regression: outputs ``(samples,)`` or ``(samples, outputs)`` are means, the noise variance is one
    number an output.

    Attributes:
        noise_variance: ``(outputs,)``, in squared units of the targets, or one number for all.
    """

    name = "regression"
    joint: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, Field]] = {"noise_variance": Items(Number(1 / 1e30, 1e30), 1)}
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
            (torch.isfinite(noise_variances) & (noise_variances > 0)).all()
        ):
            raise PosthocUQError(
                f"noise_variance must be positive and finite, not {noise_variances.tolist()}."
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
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """In closed form: ``log p(y | mean) - variance / (2 noise)``, summed over outputs."""
        penalty = 0.5 * wide(variance) / self.noise(mean)
        return self.log_prob(mean, targets) - penalty.reshape(mean.shape[0], -1).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
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
        n_draws: int = DRAWS,
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
