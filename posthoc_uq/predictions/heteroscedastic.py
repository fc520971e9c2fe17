"""Regression means with a noise that the network predicts, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import moved
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.predictions.regression import RegressionPrediction
from posthoc_uq.predictions.samples import at_least_float32, cat_known, shape_text


@dataclass(frozen=True, eq=False, repr=False, init=False)
class HeteroscedasticPrediction(RegressionPrediction):
    """A `RegressionPrediction` whose noise differs between inputs, and how certain the weights are of that noise.

    Mean and variance are those of the mixture over the weights (law of total variance); quantiles, intervals and
    densities are those of the Gaussian with these two.

    Attributes:
        log_noise_mean: (batch, targets), mean over the weights of the logarithm of the noise variance.
        log_noise_variance: same shape, its variance over the weights.
    """

    of: ClassVar[str] = "likelihood='heteroscedastic'"

    log_noise_mean: Tensor
    log_noise_variance: Tensor

    def __init__(
        self,
        mean: Tensor,
        epistemic_variance: Tensor,
        noise_variance: Tensor,
        log_noise_mean: Tensor,
        log_noise_variance: Tensor,
        novelty_ratio: Tensor | None = None,
    ) -> None:
        super().__init__(mean, epistemic_variance, noise_variance, novelty_ratio)
        for name, tensor in (("log_noise_mean", log_noise_mean), ("log_noise_variance", log_noise_variance)):
            if tensor.shape != mean.shape:
                raise PosthocUQError(
                    f"{name} has shape {shape_text(tensor)} but mean has {shape_text(mean)}."
                )
            object.__setattr__(self, name, at_least_float32(tensor))

    def __repr__(self) -> str:
        return f"HeteroscedasticPrediction(inputs={len(self)}, targets={self.mean.shape[1]})"

    @property
    def outputs_mean(self) -> Tensor:
        """(batch, 2 targets): the means, and the means of the logarithms of noise variances."""
        return torch.cat([self.mean, self.log_noise_mean], dim=1)

    def to_dict(self) -> dict[str, Tensor]:
        """As of a `RegressionPrediction`, with mean and variance of the logarithm of the noise variance."""
        own = {"log_noise_mean": self.log_noise_mean, "log_noise_variance": self.log_noise_variance}
        return super().to_dict() | own

    def to(self, device: torch.device | str) -> HeteroscedasticPrediction:
        """The same prediction with its tensors on `device`."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return HeteroscedasticPrediction(**dict(zip(known, moved(known.values(), device), strict=True)))

    @staticmethod
    def cat(predictions: Sequence[Any]) -> HeteroscedasticPrediction:
        """Predictions of several batches as one, in order.

        Raises:
            PosthocUQError: nothing to join, or numbers of targets that differ.
        """
        joined = RegressionPrediction.cat(predictions)
        return HeteroscedasticPrediction(
            joined.mean,
            joined.epistemic_variance,
            joined.noise_variance,
            torch.cat([p.log_noise_mean for p in predictions]),
            torch.cat([p.log_noise_variance for p in predictions]),
            cat_known([p.novelty_ratio for p in predictions]),
        )
