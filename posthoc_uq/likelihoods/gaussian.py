"""Gaussian targets: with one noise variance an output, or with a variance that the network predicts."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log, pi
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from posthoc_uq.core.batches import as_targets
from posthoc_uq.core.devices import as_double, at_least_float32, host_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import LARGEST, Magnitude, check_option, check_probability, shown
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.conformal import ConformalScores, SetScore, TargetScores
from posthoc_uq.likelihoods.draws import LINK_DRAWS, LINKS, Moments, OutputGaussian, gathered, moments_of
from posthoc_uq.likelihoods.likelihood import Faults, at_nodes
from posthoc_uq.likelihoods.positions import AtPositions, ChannelFields, Channelled
from posthoc_uq.likelihoods.prediction import (
    Missing,
    Prediction,
    Support,
    ValueTensors,
    by_input,
    interval_quality,
    sampling_generator,
)

_OF_SAMPLES = (
    "Deviations sd of samples are weights: noise_variance=1.0, batch_to_weights=lambda batch: 1 / sd**2."
)


Scaler = Tensor | float | Sequence[float] | Literal["data"] | None


class NormalFields(ChannelFields):
    """The mean and the standard deviation of targets in training, and which values they can have."""

    mean: Annotated[list[float], Field(min_length=1)] | None = None
    std: Annotated[list[Magnitude], Field(min_length=1)] | None = None
    support: Support = "real"


class _Normals(Channelled, ABC):
    """Targets that are normal given the outputs.

    Attributes:
        target_mean: ``(targets,)`` or ``(1,)`` float64: a mean of outputs is ``target_std * output + target_mean``, in
            the targets' own units; None for ``output``.
        target_std: likewise; None where `target_mean` is.
        support: ``"positive"`` for targets that are never below 0.
    """

    fields: ClassVar[type[Record]] = ChannelFields
    joint: ClassVar[bool] = False  # mean and variance of the target need no covariance of the outputs
    links: ClassVar[tuple[str, ...]] = LINKS  # one closed form for all
    target_mean: Tensor | None = None
    target_std: Tensor | None = None
    support: Support = "real"

    def __init__(
        self,
        *,
        mean: Scaler = None,
        std: Scaler = None,
        support: Support = "real",
        channel_dim: int = 1,
        missing: Missing = "error",
    ) -> None:
        self._set_channel_dim(channel_dim)
        self._take_missing(missing)
        if check_option("support", support, Support) != self.support:
            self.support = support
        asked = {"mean": mean, "std": std}
        if wanted := tuple(
            name for name, value in asked.items() if isinstance(value, str) and value == "data"
        ):
            self.scale_from_data = wanted
        if mean is not None or std is not None:
            self.target_mean = _numbers("mean", mean, 0.0)
            self.target_std = _numbers("std", std, 1.0)

    def attributes(self) -> dict[str, Any]:
        """See `Likelihood`; what is the default is left out."""
        values, own = super().attributes(), {}
        for name in ("target_mean", "target_std"):
            if (numbers := values.pop(name, None)) is not None:
                own[name.removeprefix("target_")] = numbers
        values.pop("scale_from_data", None)
        return values | own

    def with_scale(self: AnyNormals, mean: Tensor, std: Tensor) -> AnyNormals:
        """A copy with those of the mean and the standard deviation ``(targets,)`` that were to be found."""
        likelihood = copy.copy(self)
        for name, found in (("mean", mean), ("std", std)):
            if name in self.scale_from_data:
                setattr(likelihood, f"target_{name}", found)
        likelihood.scale_from_data = ()
        return likelihood

    def check_scale(self, targets: int) -> None:
        """Refuse another number of means or deviations than that of the targets.

        Raises:
            PosthocUQError: there is.
        """
        for name, values in (("mean", self.target_mean), ("std", self.target_std)):
            if values is not None and values.numel() not in (1, targets):
                raise PosthocUQError(
                    f"{name} has {values.numel()} entries, but there are {targets} targets; it is one number, or one a "
                    f"target."
                )

    def along(self, values: Tensor, outputs: Tensor) -> Tensor:
        """Numbers of targets, or of channels, shaped to broadcast against means ``(samples, ...)``."""
        values = values.to(device=outputs.device, dtype=at_least_float32(outputs).dtype)
        if values.numel() == 1:
            return values.reshape(())
        after = outputs.ndim - 2 if outputs.ndim > 2 and self.channel_dim == 1 else 0
        return values.reshape(-1, *[1] * after)

    def in_units(self, means: Tensor) -> Tensor:
        """Means of outputs in the targets' units."""
        means = at_least_float32(means)
        if self.target_mean is None or self.target_std is None:
            return means
        return means * self.along(self.target_std, means) + self.along(self.target_mean, means)

    def times_std(self, values: Tensor, power: int = 1) -> Tensor:
        """Values, shaped like means, times a power of the targets' standard deviation."""
        return values if self.target_std is None else values * self.along(self.target_std, values) ** power

    @abstractmethod
    def distribution(self, outputs: Tensor) -> Normal: ...

    def at_positions(self, rows: Any, positions: tuple[int, ...]) -> AtPositions:
        from posthoc_uq.likelihoods.maps import MapPrediction

        return MapPrediction(rows, positions, self.layout, missing=self.missing)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        normal = self.distribution(outputs)
        u = self.uniforms(outputs, keys, draw, normal.loc[0].numel())
        return normal.loc + normal.scale * torch.special.ndtri(u).reshape(normal.loc.shape).to(normal.loc)


AnyNormals = TypeVar("AnyNormals", bound=_Normals)


def _numbers(name: str, value: Scaler, default: float) -> Tensor:
    """A mean, or a standard deviation, as ``(targets,)`` or ``(1,)`` float64; the default until it is known.

    Raises:
        PosthocUQError: it is none.
    """
    given = default if value is None or value == "data" else value
    try:
        if isinstance(given, (bool, str)):
            raise TypeError
        found = host_double(given).detach().flatten()
    except (TypeError, ValueError, RuntimeError):
        raise PosthocUQError(
            f"{name} must be a number, one a target, or 'data' for that of the training data, not {shown(value)}."
        ) from None
    low = 1 / LARGEST if name == "std" else -LARGEST
    if found.numel() == 0 or not bool(((found >= low) & (found <= LARGEST)).all()):
        raise PosthocUQError(
            f"{name} must be {'above 0' if name == 'std' else 'finite'}, and not larger than {LARGEST:g}, not "
            f"{found.tolist()}."
        )
    return found


class GaussianFields(NormalFields):
    """One noise variance an output, or one for all."""

    noise_variance: Annotated[list[Magnitude], Field(min_length=1)]


class Gaussian(_Normals):
    """Regression: outputs ``(samples,)`` or ``(samples, outputs)`` are means, the noise variance is one
    number an output.

    Maps and sequences, such as depth, a denoised image or a forecast, have outputs ``(samples, channels, *positions)``
    and targets of the same shape, or ``(samples, *positions, channels)`` with ``channel_dim=-1``. The noise variance is
    then one number a channel.

    Attributes:
        noise_variance: ``(outputs,)``, in squared units of the targets, or one number for all. By default `fit` finds
            it, as for ``likelihood="regression"``; until then it is 1.
        finds_noise: whether `fit` is to find the noise variance.

    Args:
        noise_variance: see the attribute.
        channel_dim: the dimension of the channels where outputs have positions, 1 or -1.
        mean: of the targets, where the network was trained on standardised ones, ``(y - mean) / std``: a number, or one
            an output. Loaders give targets in their own units, and predictions have these. ``"data"``: that of the
            training data, which `fit` finds.
        std: their standard deviation, likewise; ``"data"`` is NumPy's and sklearn's, without Bessel's correction.
        support: ``"positive"`` where targets are never below 0: bounds of intervals, quantiles and draws are not
            either.
        missing: ``"ignore"`` leaves out targets that are NaN, of each output by itself.

    Raises:
        PosthocUQError: a number is out of range.

    Example:
        ```python
        likelihood = uq.Gaussian(noise_variance=0.01)  # by default from residuals
        data = regression_loader
        posterior = uq.fit(regressor, data, likelihood=likelihood)
        prediction = uq.wrap(regressor, posterior)(torch.zeros(3, 1))
        print(prediction.mean, prediction.interval(0.95))
        print(prediction.epistemic_variance)
        ```
    """

    name = "regression"
    fields: ClassVar[type[Record]] = GaussianFields
    noise_variance: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    _given = True  # the noise variance

    def __init__(
        self,
        noise_variance: Tensor | float | None = None,
        *,
        mean: Scaler = None,
        std: Scaler = None,
        support: Support = "real",
        channel_dim: int = 1,
        missing: Missing = "error",
    ) -> None:
        super().__init__(mean=mean, std=std, support=support, channel_dim=channel_dim, missing=missing)
        self._given = noise_variance is not None
        noise_variance = 1.0 if noise_variance is None else noise_variance
        try:
            if isinstance(noise_variance, bool):
                raise TypeError
            noise_variances = host_double(noise_variance).detach().flatten()
        except (TypeError, ValueError, RuntimeError):
            raise PosthocUQError(
                f"noise_variance must be a number, or one number an output, not a {type(noise_variance).__name__}; it "
                f"is the same for every input. {_OF_SAMPLES}"
            ) from None
        if noise_variances.numel() == 0 or not bool(
            ((noise_variances >= 1 / LARGEST) & (noise_variances <= LARGEST)).all()
        ):
            raise PosthocUQError(
                f"noise_variance must be >= {1 / LARGEST:g} and <= {LARGEST:g}, not {noise_variances.tolist()}."
            )
        self.noise_variance = noise_variances  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def finds_noise(self) -> bool:
        return not self._given

    def with_noise(self, noise_variance: Tensor) -> Gaussian:
        """See `Likelihood`."""
        likelihood = super().with_noise(noise_variance)
        likelihood._given = True
        return likelihood

    def residual_sums(
        self, log_likelihood: float, samples: float | Sequence[float], outputs: int
    ) -> tuple[float, float]:
        logs, counts = self.noise_variance.log() + log(2 * pi), host_double(samples)
        if counts.ndim == 0:  # every position has all channels
            total = float(counts) * outputs
            constant = total * float(logs.mean())
        else:
            total = float(counts.sum())
            constant = float(logs.expand(len(counts)) @ counts)
        # The rest of the log likelihood; rounding can make it slightly negative.
        return max(0.0, -2 * log_likelihood - constant), total

    def target_counts(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Whether each target is there, ``(samples, outputs)``, or ``(samples * positions, channels)``."""
        there, layout = self.there(targets), self.positions_of(outputs)
        if layout is not None:
            return as_double(layout.rows(torch.ones_like(targets) if there is None else there))
        return None if there is None else as_double(there.reshape(len(outputs), -1))

    def noise(self, outputs: Tensor) -> Tensor:
        """The noise variance, shaped to broadcast against outputs ``(..., outputs)``."""
        return self.along(self.noise_variance, outputs)

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        self.check_positions(outputs, targets)
        size = outputs.shape[self.channel_axis(outputs)] if outputs.ndim > 1 else 1
        if self.noise_variance.numel() not in (1, size):
            of = "channels" if outputs.ndim > 2 else "outputs"
            raise PosthocUQError(
                f"noise_variance has {self.noise_variance.numel()} entries, but the model has {size} {of}; it is one "
                f"number, or one for each of the {of}. {_OF_SAMPLES}"
            )
        if targets is not None and outputs.ndim == 2 and targets.numel() == len(outputs) < outputs.numel():
            raise PosthocUQError(
                f"The model has {outputs.shape[1]} outputs, and there is one target a sample; "
                f"{'' if targets.is_floating_point() else 'if the targets are classes, leave likelihood= out; '}if the "
                f"outputs are its quantiles, pass likelihood=uq.Quantiles([...]), and if one of them is its mean, name "
                f"it by output=."
            )
        self.check_scale(size)
        yield from super().faults(outputs, targets)

    def distribution(self, outputs: Tensor) -> Normal:
        means = self.in_units(outputs)
        return Normal(means, self.noise(means).sqrt().expand(means.shape), validate_args=False)

    def regression_targets(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """In the units of the outputs."""
        if outputs.ndim > 2:
            return None
        values = self.reshape_targets(outputs, targets)
        if self.target_mean is not None:
            values = self.times_std(values - self.along(self.target_mean, values), -1)
        return values.reshape(len(outputs), -1)

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Predicted means less targets, shaped like the outputs; 0 where a target is missing."""
        targets = self.reshape_targets(outputs, targets)
        return self.where_there(self.in_units(outputs) - targets, targets)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.times_std(self.residuals(outputs, targets) / self.noise(outputs))

    def fisher_root(self, outputs: Tensor) -> Tensor:
        return self.times_std(self.noise(outputs).rsqrt().expand(outputs.shape))

    def divergence_of_rows(self, outputs: Tensor, prediction: Any) -> Tensor:
        """In closed form, with the prediction's noise variance; the mean over outputs."""
        network = Normal(self.in_units(outputs), prediction.noise_variance.sqrt(), validate_args=False)
        return kl_divergence(network, prediction.normal).reshape(outputs.shape[0], -1).mean(1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form: ``log p(y | mean) - variance / (2 noise)``, summed over outputs."""
        values = self.reshape_targets(mean, targets)
        spread = self.times_std(at_least_float32(variance), 2)
        penalty = self.where_there(0.5 * spread / self.noise(mean), values)
        return self.log_prob(mean, values) - penalty.reshape(mean.shape[0], -1).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form: the log density of ``N(mean, variance + noise)``, summed over outputs."""
        total = (self.times_std(at_least_float32(variance), 2) + self.noise(mean)).sqrt()
        values = self.reshape_targets(mean, targets)
        logs = Normal(self.in_units(mean), total, validate_args=False).log_prob(self.in_support(values))
        return self.where_there(logs, values).reshape(mean.shape[0], -1).sum(1)

    def rows_from_blocks(self, blocks: Iterable[Tensor]) -> RegressionPrediction:
        return self._prediction(*moments_of(map(at_least_float32, blocks)))

    def rows_from_gaussian(self, outputs: OutputGaussian) -> RegressionPrediction:
        return self._prediction(outputs.mean, outputs.variance)

    def _prediction(self, mean: Tensor, variance: Tensor) -> RegressionPrediction:
        return RegressionPrediction(
            self.in_units(mean),
            self.times_std(variance, 2),
            self.noise(mean),
            missing=self.missing,
            support=self.support,
        )


class Heteroscedastic(_Normals):
    """Regression with a noise of each input (Nix, Weigend 1994; Kendall, Gal 2017): outputs ``(samples, 2 targets)``
    are the means of all targets and, after them, the logarithms of their noise variances. Targets are
    ``(samples, targets)``; of one target also ``(samples,)``.

    The network was trained with the negative log-likelihood (`torch.nn.GaussianNLLLoss` of the exponentials). The
    Fisher is exact in closed form: ``1 / noise variance`` for a mean and ``1 / 2`` for a log variance, nothing between
    them.

    Args:
        mean: of the targets, as of `Gaussian`. A log variance is that of the standardised targets.
        std: their standard deviation, likewise.
        support: as of `Gaussian`.
        channel_dim: the dimension of the channels where outputs have positions, 1 or -1.
        missing: ``"ignore"`` leaves out targets that are NaN, with their mean and their log variance.

    Raises:
        PosthocUQError: a number is out of range.

    Example:
        ```python
        net, x = nn.Linear(2, 2), torch.randn(30, 2)
        data = [(x, x[:, :1] + torch.randn(30, 1))]
        posterior = uq.fit(net, data, likelihood=uq.Heteroscedastic())
        prediction = uq.wrap(net, posterior)(x[:3])
        print(prediction.mean, prediction.noise_variance)
        ```
    """

    name = "heteroscedastic"
    _log_factor = 0.0  # of `at_noise_scale`

    def at_noise_scale(self, factor: float) -> Heteroscedastic:
        """With `factor` times every predicted noise variance."""
        if factor == 1.0:
            return self
        likelihood = copy.copy(self)
        likelihood._log_factor = self._log_factor + log(factor)
        return likelihood

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        size = outputs.shape[self.channel_axis(outputs)] if outputs.ndim > 1 else 0
        if size % 2 or size == 0:
            raise PosthocUQError(
                f"likelihood='heteroscedastic' needs outputs of shape (samples, 2 * targets), all means and after them "
                f"the logarithms of all noise variances, and the model gives {tuple(outputs.shape)}."
            )
        self.check_positions(outputs, targets)
        self.check_scale(size // 2)
        if targets is None:
            return
        if 2 * targets.numel() != outputs.numel() or targets.shape[:1] != outputs.shape[:1]:
            raise PosthocUQError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}, which "
                f"have a mean and a log variance for each of {outputs.shape[1] // 2} targets."
            )
        yield self._not_finite(targets), lambda: self._not_finite_in_words(targets)

    def by_output(self, of_targets: Tensor, outputs: Tensor) -> Tensor:
        """Of each target at its mean and at its log variance."""
        halves = of_targets if outputs.ndim > 2 else of_targets.reshape(len(outputs), -1)
        return torch.cat([halves, halves], dim=self.channel_axis(outputs))

    def shape_of_targets(self, outputs: Tensor) -> tuple[int, ...]:
        return tuple(self._halves(outputs)[0].shape)

    def _halves(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log variances, shaped like the targets each."""
        means, log_variances = at_least_float32(outputs).chunk(2, dim=self.channel_axis(outputs))
        return means, log_variances

    def _means_and_logs(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and logarithms of the noise variances at this noise scale, in the targets' units, shaped like
        the targets each.
        """
        means, log_variances = self._halves(outputs)
        if self.target_std is not None:
            log_variances = log_variances + 2 * self.along(self.target_std.log(), means)
        return self.in_units(means), log_variances + self._log_factor

    def _spreads(self, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Variances of the means, in the targets' squared units, and of the log variances."""
        spread, log_spread = self._halves(variance)
        return self.times_std(spread, 2), log_spread

    def reshape_targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The targets in the shape of the means and in their precision."""
        return super().reshape_targets(self._halves(outputs)[0], targets)

    def distribution(self, outputs: Tensor) -> Normal:
        means, logs = self._means_and_logs(outputs)
        return Normal(means, (logs / 2).exp(), validate_args=False)

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """By the logarithm of the noise variance, whose exponential may leave the range of float32."""
        means, logs = self._means_and_logs(outputs)
        return -0.5 * ((targets - means).square() * (-logs).exp() + logs + log(2 * pi))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        means, logs = self._means_and_logs(outputs)
        targets, precision = self.reshape_targets(outputs, targets), (-logs).exp()
        residuals = means - targets
        by_means = self.times_std(residuals * precision)
        by_logs = 0.5 * (1 - residuals.square() * precision)
        parts = [self.where_there(each, targets) for each in (by_means, by_logs)]
        return torch.cat(parts, dim=self.channel_axis(outputs))

    def fisher_root(self, outputs: Tensor) -> Tensor:
        _, logs = self._means_and_logs(outputs)
        parts = [self.times_std((-logs / 2).exp()), torch.full_like(logs, 0.5**0.5)]
        return torch.cat(parts, dim=self.channel_axis(outputs))

    def divergence_of_rows(self, outputs: Tensor, prediction: Any) -> Tensor:
        """Of the Gaussian with the prediction's mean and variance, in closed form; the mean over targets."""
        return kl_divergence(self.distribution(outputs), prediction.normal).mean(1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form, with ``E[exp(-s)] = exp(-m_s + v_s / 2)`` for the log variance s."""
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._spreads(variance)
        targets = self.reshape_targets(mean, targets)
        squares = (self.in_support(targets) - means).square() + spread
        terms = -0.5 * (squares * (log_spread / 2 - logs).exp() + logs + log(2 * pi))
        return self.where_there(terms, targets).flatten(1).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """In closed form over the means, by Gauss-Hermite quadrature over the log variances."""
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._spreads(variance)
        targets = self.reshape_targets(mean, targets)
        squares = (self.in_support(targets) - means).square()

        def log_density(log_variances: Tensor) -> Tensor:
            total = spread + log_variances.exp()
            return -0.5 * (squares / total + total.log() + log(2 * pi))

        densities, weights = at_nodes(log_density, logs, log_spread)
        logs_of_each = torch.logsumexp(densities + weights.log(), 0).reshape(targets.shape)
        return self.where_there(logs_of_each, targets).flatten(1).sum(1)

    def rows_from_blocks(self, blocks: Iterable[Tensor]) -> HeteroscedasticPrediction:
        outputs, noises, dtype = Moments(), Moments(), torch.float32
        for block in gathered(blocks):
            if block.ndim != 3 or block.shape[-1] % 2:
                raise PosthocUQError(
                    f"outputs must be (draws, batch, 2 * targets), not {tuple(block.shape)}."
                )
            block = at_least_float32(block)
            dtype = block.dtype
            outputs.add(block)
            noises.add(self.variance(block.flatten(0, 1)).reshape(*block.shape[:2], -1))
        mean, variance = (moment.to(dtype) for moment in outputs.result())
        return self._prediction(mean, variance, noises.result()[0].to(dtype))

    def rows_from_gaussian(self, outputs: OutputGaussian) -> HeteroscedasticPrediction:
        """In closed form: the mean noise variance is ``exp(m_s + v_s / 2)``."""
        logs, log_spread = self._means_and_logs(outputs.mean)[1], self._halves(outputs.variance)[1]
        return self._prediction(outputs.mean, outputs.variance, (logs + log_spread / 2).exp())

    def _prediction(self, mean: Tensor, variance: Tensor, noise: Tensor) -> HeteroscedasticPrediction:
        (means, logs), (spread, log_spread) = self._means_and_logs(mean), self._spreads(variance)
        return HeteroscedasticPrediction(
            means, spread, noise, logs, log_spread, missing=self.missing, support=self.support
        )


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(Prediction):
    """A Gaussian over each output, its variance split into the part by the weights and that by observation noise.

    Attributes:
        mean: (batch,) or (batch, outputs), as the model gave it.
        epistemic_variance: same shape, in squared units of the output: variance of the mean over the weights.
        noise_variance: same shape once stored; a number, a tensor of shape (outputs,) or anything else that
            broadcasts to `mean` is accepted. Variance of the observation noise.
        novelty_ratio: (batch,), see `Prediction`.
        support: ``"positive"`` where an observation is never below 0: it then is the Gaussian's, or 0 in place of
            anything below.

    Raises:
        PosthocUQError: the shapes do not fit, or the noise variance is a negative number.

    Example:
        ```python
        predictor = uq.wrap(regressor, regression_posterior)
        prediction = predictor(torch.zeros(3, 1))
        print(prediction.mean, prediction.interval(0.95))
        print(prediction.epistemic_variance, prediction.noise_variance)
        ```
    """

    kind: ClassVar[str] = "values"
    default_score: ClassVar[str] = "standard_deviation"
    loss_name: ClassVar[str] = "rmse"
    _computed: ClassVar[dict[str, tuple[str, ...]]] = {"variance": ()}

    mean: Annotated[Tensor, "batch *outputs"]
    epistemic_variance: Annotated[Tensor, "batch *outputs"]
    noise_variance: Annotated[Tensor, "batch *outputs"]
    support: Support = field(default="real", kw_only=True)

    if TYPE_CHECKING:  # the noise variance may be a number, and is a tensor then

        def __init__(
            self,
            mean: Tensor,
            epistemic_variance: Tensor,
            noise_variance: Tensor | float,
            *,
            novelty_ratio: Tensor | None = None,
            promises: ConformalScores | str | None = None,
            sample_keys: Tensor | None = None,
            missing: Missing = "error",
            support: Support = "real",
        ) -> None: ...

    def __post_init__(self) -> None:
        noise, mean = self.noise_variance, at_least_float32(self.mean)
        if mean.ndim not in (1, 2):
            raise PosthocUQError(f"mean must be (batch,) or (batch, outputs), not {tuple(mean.shape)}.")
        if not isinstance(noise, Tensor) and not noise >= 0:
            raise PosthocUQError(f"noise_variance must be at least 0, not {noise}.")
        noise = torch.as_tensor(noise, dtype=mean.dtype, device=mean.device)
        try:
            noise = noise.expand(mean.shape)
        except RuntimeError:
            raise PosthocUQError(
                f"noise_variance of shape {tuple(noise.shape)} does not broadcast to the mean's {tuple(mean.shape)}."
            ) from None
        object.__setattr__(self, "noise_variance", noise)
        super().__post_init__()

    @property
    def outputs_mean(self) -> Tensor:
        """The mean, in the units of the targets."""
        return self.mean

    @property
    def normal(self) -> Normal:
        """The Gaussian over each output, with the total variance."""
        return Normal(self.mean, self.standard_deviation, validate_args=False)

    @property
    def variance(self) -> Tensor:
        """Shape of `mean`: total predictive variance, epistemic plus noise variance."""
        return self.epistemic_variance + self.noise_variance

    @property
    def standard_deviation(self) -> Tensor:
        """Shape of `mean`, in units of the output: square root of the total variance."""
        return self.variance.sqrt()

    def quantile(self, q: float) -> Tensor:
        """Shape of `mean`: the value below which an observation falls with probability `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        return self._within(
            self.mean + NormalDist().inv_cdf(check_probability("q", q)) * self.standard_deviation
        )

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds, shaped like `mean`, between which an observation falls with probability `level`.

        Where the posterior has held-out scores that apply (`posthoc_uq.calibrate`), the bounds of each output are
        ``m(x) -+ q s(x)`` with the predictive deviation s and the ``ceil((n + 1) level)``-th smallest q of the held-out
        ``|y - m| / s``: they then cover with at least this probability, over inputs like those, whatever the model.
        Elsewhere they are the Gaussian's.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1, or there are too few held-out scores for it.
        """
        if isinstance(self.promises, ConformalScores):
            outputs = 1 if self.mean.ndim == 1 else self.mean.shape[1]
            return self.within(self.promises.bounds("deviation", level, outputs))
        return self._own_interval(level)

    def within(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of the values whose scores (`target_scores`) are at most these, one an output."""
        width = self.standard_deviation * scores.to(self.mean)
        return self._within(self.mean - width), self._within(self.mean + width)

    def _own_interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The bounds that the posterior gives by itself."""
        # by the lower tail, which is accurate even where (1 + level) / 2 rounds to 1
        below = NormalDist().inv_cdf((1 - check_probability("level", level)) / 2) * self.standard_deviation
        return self._within(self.mean + below), self._within(self.mean - below)

    def _within(self, values: Tensor) -> Tensor:
        """The values, none of them below 0 where an observation never is."""
        return values if self.support == "real" else values.clamp(min=0)

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
        generator = sampling_generator(n, generator)
        normals = torch.randn(
            n, *self.mean.shape, generator=generator, device=generator.device, dtype=self.mean.dtype
        )
        return self._within(self.mean + self.standard_deviation * normals.to(self.mean.device))

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log density of the Gaussian with the total variance, summed over outputs.

        Args:
            targets: exactly the shape of `mean`, so that nothing broadcasts by accident.

        Raises:
            PosthocUQError: the shape differs, or the total variance is not positive somewhere.
        """
        targets = as_targets(targets)
        if targets.shape != self.mean.shape:
            raise PosthocUQError(
                f"log_prob needs targets of shape {tuple(self.mean.shape)}, not {tuple(targets.shape)}."
            )
        if bool((self.variance <= 0).any()):
            raise PosthocUQError("log_prob needs a positive variance; give a noise_variance above 0.")
        density, there = self.normal.log_prob(targets.to(self.mean)), self.there(targets)
        density = density if there is None else density.masked_fill(~there.to(density.device), 0.0)
        return density if density.ndim == 1 else density.sum(dim=-1)

    def fitting(self, targets: Tensor) -> Tensor:
        """Values in the shape of `mean`, float64.

        Raises:
            PosthocUQError: there is another number of them.
            NonFiniteError: some are NaN, and that does not stand for a missing target.
        """
        targets = as_targets(targets)
        if targets.numel() != self.mean.numel():
            raise PosthocUQError(
                f"The targets have shape {tuple(targets.shape)} and the predictions {tuple(self.mean.shape)}; "
                f"take them apart with batch_to_targets."
            )
        values = as_double(targets.reshape(self.mean.shape))
        if self.missing == "error" and bool(values.isnan().any()):
            raise NonFiniteError(
                "Some targets are NaN. If that stands for a target that is not there, fit with "
                "likelihood=uq.Gaussian(missing='ignore')."
            )
        return values

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores:
        """See `Prediction`: distances from the mean in predictive standard deviations."""
        distances = (as_double(targets) - as_double(self.mean)).abs() / as_double(self.standard_deviation)
        return TargetScores.of_values("deviation", distances, self.there(targets))

    def scores(self) -> dict[str, Tensor]:
        """See `Prediction`: the scores of values."""
        novelty = {} if self.novelty_ratio is None else {"novelty": self.novelty_ratio}
        deviation = by_input(self.standard_deviation)
        return {
            "standard_deviation": deviation,
            "epistemic_variance": by_input(self.epistemic_variance),
        } | novelty

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """RMSE, and where all variances are positive log density, CRPS, coverage and sharpness of intervals; over all
        targets that are there.
        """
        if (there := self.there(targets)) is not None and not bool(there.all()):
            measures = self._flat(there).quality(targets[there], bins)
            if "log_density" in measures:  # a sum over an input's targets
                measures["log_density"] = float(as_double(self.log_prob(targets)).mean())
            return measures
        measures = {"rmse": metrics.rmse(self.mean, targets)}
        if bool((self.variance > 0).all()):
            measures["log_density"] = metrics.gaussian_log_density(self.mean, self.variance, targets)
            measures["crps"] = metrics.crps_gaussian(self.mean, self.variance, targets)
            measures |= interval_quality(self._own_interval, targets)
        return measures

    def _flat(self, there: Tensor) -> RegressionPrediction:
        """The predictions of single targets, those that are `there`, shaped like `mean`, as inputs of one output."""
        parts = self.mean, self.epistemic_variance, self.noise_variance
        return RegressionPrediction(*(part[there] for part in parts), support=self.support)

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the squared error, mean over outputs."""
        return self.mean_of_there((as_double(self.mean) - as_double(targets)).square(), targets)

    def tensors(self) -> ValueTensors:
        novelty = self._novelty_like(self.mean.reshape(self.mean.shape[0], -1)[:, 0])
        return ValueTensors(self.mean, self.variance, self.epistemic_variance, novelty)


@dataclass(frozen=True, eq=False, repr=False)
class HeteroscedasticPrediction(RegressionPrediction):
    """A `RegressionPrediction` whose noise differs between inputs, and how certain the weights are of that noise.

    Mean and variance are those of the mixture over the weights (law of total variance); quantiles, intervals and
    densities are those of the Gaussian with these two.

    Attributes:
        log_noise_mean: (batch, targets), mean over the weights of the logarithm of the noise variance.
        log_noise_variance: same shape, its variance over the weights.
    """

    log_noise_mean: Annotated[Tensor, "batch *outputs"]
    log_noise_variance: Annotated[Tensor, "batch *outputs"]

    @property
    def outputs_mean(self) -> Tensor:
        """(batch, 2 targets): the means, and the means of the logarithms of noise variances."""
        return torch.cat([self.mean, self.log_noise_mean], dim=1)
