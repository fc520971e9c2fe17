"""Predictions of values with Gaussian noise, of one variance or of one that the network predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double, has_double, moved
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.prediction import (
    Prediction,
    ValueTensors,
    at_least_float32,
    cat_known,
    interval_quality,
    mean_and_variance,
    retained_losses,
    shape_text,
    squared_errors,
)

# Regression means together with their uncertainty.
#
# A prediction keeps a few tensors per input and never the weight samples it came from, so predictions of many
# batches can be collected with `cat`. Numbers are kept in float32 at least, whatever the model ran in. A NaN
# from the model, under any of the draws, stays a NaN in mean and variance of its output, and so in its
# quantiles, intervals and samples and in the `log_prob` of its row; other outputs are not affected.


@dataclass(frozen=True, eq=False, repr=False, init=False)
class RegressionPrediction(Prediction):
    """A Gaussian over each output, its variance split into the part by the weights and that by observation noise.

    Attributes:
        mean: (batch,) or (batch, outputs), as the model gave it.
        epistemic_variance: same shape, in squared units of the output: variance over the weights.
        noise_variance: same shape once stored; a number, a tensor of shape (outputs,) or anything else that
            broadcasts to `mean` is accepted. Variance of the observation noise.
        novelty_ratio: (batch,), in (0, 1], the share of the prior's uncertainty that the data left; None where it was
            not asked for, or the posterior keeps nothing to tell it by.

    Raises:
        PosthocUQError: the shapes do not fit, or the noise variance is a negative number.
    """

    kind: ClassVar[str] = "values"

    mean: Tensor
    epistemic_variance: Tensor
    noise_variance: Tensor
    novelty_ratio: Tensor | None = None

    def __init__(
        self,
        mean: Tensor,
        epistemic_variance: Tensor,
        noise_variance: Tensor | float,
        novelty_ratio: Tensor | None = None,
    ) -> None:
        if mean.ndim not in (1, 2):
            raise PosthocUQError(f"mean must be (batch,) or (batch, outputs), not {shape_text(mean)}.")
        if epistemic_variance.shape != mean.shape:
            raise PosthocUQError(
                f"epistemic_variance has shape {shape_text(epistemic_variance)} but mean has {shape_text(mean)}."
            )
        if novelty_ratio is not None and novelty_ratio.shape != mean.shape[:1]:
            raise PosthocUQError(
                f"novelty_ratio has shape {shape_text(novelty_ratio)} where {tuple(mean.shape[:1])} is needed."
            )
        mean, epistemic_variance = at_least_float32(mean), at_least_float32(epistemic_variance)
        if not isinstance(noise_variance, Tensor) and not noise_variance >= 0:
            raise PosthocUQError(f"noise_variance must be at least 0, not {noise_variance}.")
        noise = torch.as_tensor(noise_variance, dtype=mean.dtype, device=mean.device)
        try:
            noise = noise.expand(mean.shape)
        except RuntimeError:
            raise PosthocUQError(
                f"noise_variance of shape {shape_text(noise)} does not broadcast to the mean's {shape_text(mean)}."
            ) from None
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "epistemic_variance", epistemic_variance)
        object.__setattr__(self, "noise_variance", noise)
        object.__setattr__(
            self, "novelty_ratio", None if novelty_ratio is None else at_least_float32(novelty_ratio)
        )

    @classmethod
    def from_samples(cls, outputs: Tensor, noise_variance: Tensor | float) -> RegressionPrediction:
        """Mean and unbiased variance over weight samples; with a single sample the variance is 0.

        Args:
            outputs: (samples, batch) or (samples, batch, outputs), of the model under each weight sample.
            noise_variance: see the class.

        Raises:
            PosthocUQError: wrong number of dimensions, no sample, or a noise variance that does not fit.
        """
        if outputs.ndim not in (2, 3):
            raise PosthocUQError(
                f"outputs must be (samples, batch) or (samples, batch, outputs), not {shape_text(outputs)}."
            )
        mean, variance = mean_and_variance(at_least_float32(outputs))
        return cls(mean, variance, noise_variance)

    def __len__(self) -> int:
        """Number of inputs."""
        return self.mean.shape[0]

    def __repr__(self) -> str:
        outputs = "" if self.mean.ndim == 1 else f", outputs={self.mean.shape[1]}"
        return f"RegressionPrediction(inputs={len(self)}{outputs})"

    @property
    def outputs_mean(self) -> Tensor:
        """The mean."""
        return self.mean

    @property
    def default_score(self) -> str:
        """The standard deviation."""
        return "standard_deviation"

    @property
    def variance(self) -> Tensor:
        """Shape of `mean`: total predictive variance, epistemic plus noise variance."""
        return self.epistemic_variance + self.noise_variance

    @property
    def standard_deviation(self) -> Tensor:
        """Shape of `mean`, in units of the output: square root of the total variance."""
        return self.variance.sqrt()

    def epistemic(self) -> Tensor:
        """(batch,): the mean over outputs of the epistemic variance."""
        return self.epistemic_variance if self.mean.ndim == 1 else self.epistemic_variance.mean(dim=-1)

    def quantile(self, q: float) -> Tensor:
        """Shape of `mean`: the value below which an observation falls with probability `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        if not 0 < q < 1:
            raise PosthocUQError(f"quantile needs a probability strictly between 0 and 1, not {q}.")
        return self.mean + NormalDist().inv_cdf(q) * self.standard_deviation

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds, shaped like `mean`, between which an observation falls with probability `level`.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1.
        """
        if not 0 < level < 1:
            raise PosthocUQError(f"interval needs a level strictly between 0 and 1, not {level}.")
        # by the lower tail, which is accurate even where (1 + level) / 2 rounds to 1
        half_width = -NormalDist().inv_cdf((1 - level) / 2) * self.standard_deviation
        return self.mean - half_width, self.mean + half_width

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` observations of every output, (n, *shape of `mean`), from the Gaussian with the total variance.

        Outputs are drawn independently of each other. Normals are drawn on the generator's device, so that every
        device gets the same; the global random state is not touched.

        Args:
            n: observations per output.
            generator: of the normals; without one they differ from call to call.

        Raises:
            PosthocUQError: `n` is below 1.
        """
        if n < 1:
            raise PosthocUQError(f"sample needs n of at least 1, not {n}.")
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        normals = torch.randn(
            n, *self.mean.shape, generator=generator, device=generator.device, dtype=self.mean.dtype
        )
        return self.mean + self.standard_deviation * normals.to(self.mean.device)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log density of the Gaussian with the total variance, summed over outputs.

        Args:
            targets: exactly the shape of `mean`, so that nothing broadcasts by accident.

        Raises:
            PosthocUQError: the shape differs, or the total variance is not positive somewhere.
        """
        if targets.shape != self.mean.shape:
            raise PosthocUQError(
                f"log_prob needs targets of shape {shape_text(self.mean)}, not {shape_text(targets)}."
            )
        variance = self.variance
        if bool((variance <= 0).any()):
            raise PosthocUQError("log_prob needs a positive variance; give a noise_variance above 0.")
        residual = targets.to(device=self.mean.device, dtype=self.mean.dtype) - self.mean
        density = -0.5 * (residual.square() / variance + variance.log() + math.log(2 * math.pi))
        return density if density.ndim == 1 else density.sum(dim=-1)

    def fitting(self, targets: Tensor) -> Tensor:
        """Values in the shape of `mean`, float64.

        Raises:
            PosthocUQError: there is another number of them.
        """
        if targets.numel() != self.mean.numel():
            raise PosthocUQError(
                f"The targets have shape {shape_text(targets)} and the predictions {shape_text(self.mean)}; "
                f"take them apart with batch_to_targets."
            )
        return as_double(targets.reshape(self.mean.shape))

    def scores(self) -> dict[str, Tensor]:
        """See `Prediction`: the scores of values."""
        deviation = self.standard_deviation
        novelty = {} if self.novelty_ratio is None else {"novelty": self.novelty_ratio}
        return {
            "standard_deviation": deviation if deviation.ndim == 1 else deviation.mean(dim=-1),
            "epistemic_variance": self.epistemic(),
        } | novelty

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """RMSE, and where all variances are positive log density, CRPS, coverage and sharpness of intervals."""
        measures = {"RMSE": metrics.rmse(self.mean, targets)}
        if bool((self.variance > 0).all()):
            measures["log density"] = metrics.gaussian_log_density(self.mean, self.variance, targets)
            measures["CRPS"] = metrics.crps_gaussian(self.mean, self.variance, targets)
            measures |= interval_quality(self.interval, targets)
        return measures

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the squared error, mean over outputs."""
        return squared_errors(self.mean, targets)

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """Root mean squared errors."""
        return retained_losses("RMSE", scores, self.losses(targets), rates, root=True)

    def tensors(self) -> ValueTensors:
        """See `Prediction`."""
        return ValueTensors(self.mean, self.variance, self.epistemic_variance)

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name, with the total variance, each in the shape of `mean`; and the novelty if it is known."""
        known = {} if self.novelty_ratio is None else {"novelty": self.novelty_ratio}
        return known | {
            "mean": self.mean,
            "epistemic_variance": self.epistemic_variance,
            "noise_variance": self.noise_variance,
            "variance": self.variance,
        }

    def to(self, device: torch.device | str) -> RegressionPrediction:
        """The same prediction with its tensors on `device`."""
        known = [self.mean, self.epistemic_variance, self.noise_variance]
        if self.novelty_ratio is not None:
            known.append(self.novelty_ratio)
        return RegressionPrediction(*moved(known, device))

    @staticmethod
    def cat(predictions: Sequence[RegressionPrediction]) -> RegressionPrediction:
        """Predictions of several batches as one, in order.

        Raises:
            PosthocUQError: nothing to join, or output shapes that differ.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        shapes = {tuple(p.mean.shape[1:]) for p in predictions}
        if len(shapes) > 1:
            raise PosthocUQError(f"cat got predictions of different output shapes: {sorted(shapes)}.")
        return RegressionPrediction(
            torch.cat([p.mean for p in predictions]),
            torch.cat([p.epistemic_variance for p in predictions]),
            torch.cat([p.noise_variance for p in predictions]),
            cat_known([p.novelty_ratio for p in predictions]),
        )


def placed_noise_variance(noise_variance: Tensor, device: torch.device) -> Tensor:
    """Noise variances ``(outputs,)`` on a device, in a precision that it has; a scalar where there is only one."""
    placed = noise_variance.to(device, noise_variance.dtype if has_double(device) else torch.float32)
    return placed.squeeze(0) if placed.numel() == 1 else placed


# Regression means with a noise that the network predicts, too.


@dataclass(frozen=True, eq=False, repr=False, init=False)
class HeteroscedasticPrediction(RegressionPrediction):
    """A `RegressionPrediction` whose noise differs between inputs, and how certain the weights are of that noise.

    Mean and variance are those of the mixture over the weights (law of total variance); quantiles, intervals and
    densities are those of the Gaussian with these two.

    Attributes:
        log_noise_mean: (batch, targets), mean over the weights of the logarithm of the noise variance.
        log_noise_variance: same shape, its variance over the weights.
    """

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
