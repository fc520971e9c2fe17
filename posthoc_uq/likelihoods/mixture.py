"""Mixtures of the predictions of several networks, each with the same weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributions import Normal

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_probability
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.draws import mean_of, moments_of_mixture
from posthoc_uq.likelihoods.gaussian import RegressionPrediction
from posthoc_uq.likelihoods.positions import AtPositions
from posthoc_uq.likelihoods.prediction import (
    Prediction,
    Unread,
    interval_quality,
    sampling_generator,
)

_HALVINGS = 60  # of an interval that holds a quantile, in float64


_OF_ONE_NETWORK = ("novelty_ratio", "promises", "sample_keys", "before_retuning")


def mixture(predictions: Sequence[Prediction]) -> Prediction:
    """The mixture of several networks' predictions of the same inputs, with their novelty.

    Raises:
        PosthocUQError: they are of different kinds, or of outputs of different shapes.
    """
    kinds = sorted({type(prediction).__name__ for prediction in predictions})
    shapes = sorted({tuple(prediction.outputs_mean.shape[1:]) for prediction in predictions})
    if len(kinds) > 1 or len(shapes) > 1:
        what = f"the outputs {shapes}" if len(shapes) > 1 else f"predictions of the kinds {kinds}"
        raise PosthocUQError(
            f"The networks of an ensemble must predict the same targets, and these give {what} for an input; give "
            f"networks with the same classes or outputs."
        )
    parts: list[Any] = [prediction.changed(**dict.fromkeys(_OF_ONE_NETWORK)) for prediction in predictions]
    return _mixed(parts).with_novelty(_joined_novelty(predictions))


def _mixed(parts: Sequence[Any]) -> Prediction:
    kind = type(parts[0])
    if issubclass(kind, AtPositions):  # of every position
        return parts[0].changed(rows=_mixed([part.rows for part in parts]))
    of_gaussians = issubclass(kind, RegressionPrediction) and "mixed" not in vars(kind)
    found: Prediction = GaussianMixturePrediction.of(parts) if of_gaussians else kind.mixed(parts)
    return found.changed(missing=parts[0].missing) if parts[0].missing == "ignore" else found


def _joined_novelty(predictions: Sequence[Any]) -> Tensor | Unread | None:
    """The novelty of several networks as one: the mean over those that know theirs, None where none does.

    On ten networks of pictures and 15 kinds of foreign inputs the mean told more of them than the least or the largest,
    and as many as means of logarithms or of surprises.
    """
    known = [value for p in predictions if (value := vars(p)["novelty_ratio"]) is not None]
    if len(known) <= 1:
        return known[0] if known else None
    tensors = [value for value in known if isinstance(value, Tensor)]
    if len(tensors) == len(known):
        return mean_of(tensors)
    parts = [value.inputs.flatten(1) if isinstance(value, Unread) else value.unsqueeze(1) for value in known]
    if any(tensor.ndim > 1 for tensor in tensors) or len({part.dtype for part in parts}) > 1:
        return mean_of([v.compute(v.inputs) if isinstance(v, Unread) else v for v in known])

    def compute(inputs: Tensor) -> Tensor:
        found = list[Tensor]()
        for value, rows in zip(known, inputs.split([part.shape[1] for part in parts], 1), strict=True):
            unread = isinstance(value, Unread)
            found.append(value.compute(rows.unflatten(1, value.inputs.shape[1:])) if unread else rows[:, 0])
        return mean_of(found)

    return Unread(compute, torch.cat(parts, 1))


@dataclass(frozen=True, eq=False, repr=False)
class GaussianMixturePrediction(RegressionPrediction):
    """A mixture of several networks' Gaussians over each output. Mean and variance are the mixture's by the law of
    total variance: `epistemic_variance` has the variance between the networks, too. Quantiles, intervals, densities
    and samples are those of the mixture; promised intervals are ``mean -+ q standard_deviation``, as of one Gaussian.

    Attributes:
        means: (batch, networks, ...), of each network.
        deviations: of the same shape: standard deviations, observation noise included.
        functional: (batch, ...), the mean of the networks' outputs.
    """

    means: Annotated[Tensor, "batch networks *outputs"]
    deviations: Annotated[Tensor, "batch networks *outputs"]
    functional: Annotated[Tensor, "batch *functional"]

    _not_shown = ("functional",)

    @classmethod
    def of(cls, predictions: Sequence[RegressionPrediction]) -> GaussianMixturePrediction:
        """The mixture of predictions of the same inputs."""
        means = [prediction.mean for prediction in predictions]
        mean, epistemic = moments_of_mixture(means, [p.epistemic_variance for p in predictions])
        values: dict[str, Any] = {
            "mean": mean,
            "epistemic_variance": epistemic,
            "noise_variance": mean_of([prediction.noise_variance for prediction in predictions]),
            "means": torch.stack(means, 1),
            "deviations": torch.stack([prediction.standard_deviation for prediction in predictions], 1),
            "functional": mean_of([prediction.outputs_mean for prediction in predictions]),
            "support": predictions[0].support,
        }
        return cls(**values)

    @property
    def outputs_mean(self) -> Tensor:
        """The mean of the networks' outputs."""
        return self.functional

    def cdf(self, value: Tensor | float) -> Tensor:
        """Shape of `mean`: the probability that each output is at most `value`."""
        means, deviations = as_double(self.means), self._wide_deviations()
        values = torch.as_tensor(value, dtype=means.dtype, device=means.device).expand(self.mean.shape)
        return torch.special.ndtr((values.unsqueeze(1) - means) / deviations).mean(1).to(self.mean)

    def _wide_deviations(self) -> Tensor:
        wide = as_double(self.deviations)
        return wide.clamp(min=torch.finfo(wide.dtype).tiny)

    def quantile(self, q: float) -> Tensor:
        """Shape of `mean`: the value below which an observation falls with probability `q`, by bisection between the
        networks' own quantiles.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        upper = check_probability("q", q) > 0.5
        return self._quantile(1 - q if upper else q, upper)

    def _quantile(self, tail: float, upper: bool) -> Tensor:
        """The value beyond which the probability of the lower or the upper tail is `tail`, at most 1/2: near 1 shares
        have few digits left.
        """
        sign = -1.0 if upper else 1.0
        means, deviations = sign * as_double(self.means), self._wide_deviations()
        score = torch.special.ndtri(torch.tensor(tail, dtype=means.dtype, device="cpu"))
        own = means + deviations * score.to(means.device)
        low, high = own.amin(1), own.amax(1)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle.unsqueeze(1) - means) / deviations).mean(1) < tail
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return self._within((sign * (low + high) / 2).to(self.mean))

    def _own_interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Quantiles of the mixture, with as much probability below as above."""
        tail = (1 - check_probability("level", level)) / 2
        return self._quantile(tail, upper=False), self._quantile(tail, upper=True)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` observations of every output, (n, *shape of `mean`): all outputs of an input from one of the networks,
        which is drawn first, and otherwise independent of each other.

        Args:
            n: observations per output.
            generator: of the random numbers; without one they differ from call to call.

        Raises:
            PosthocUQError: `n` is below 1.
        """
        generator = sampling_generator(n, generator)
        batch, networks = self.means.shape[:2]
        place, shape = generator.device, (n, *self.mean.shape)
        drawn = torch.randint(networks, (n, batch), generator=generator, device=place).to(self.mean.device)
        normals = torch.randn(shape, generator=generator, device=place, dtype=self.mean.dtype)
        rows = torch.arange(batch, device=self.mean.device)
        return self._within(self.means[rows, drawn] + self.deviations[rows, drawn] * normals.to(self.mean))

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log density of the mixture; given a network outputs are independent.

        Args:
            targets: exactly the shape of `mean`, so that nothing broadcasts by accident.

        Raises:
            PosthocUQError: the shape differs, or a network's variance is not positive somewhere.
        """
        if targets.shape != self.mean.shape:
            raise PosthocUQError(
                f"log_prob needs targets of shape {tuple(self.mean.shape)}, not {tuple(targets.shape)}."
            )
        if not bool((self.deviations > 0).all()):
            raise PosthocUQError("log_prob needs a positive variance; give a noise_variance above 0.")
        values = targets.to(self.mean).unsqueeze(1)
        logs = Normal(self.means, self.deviations, validate_args=False).log_prob(values)
        if (there := self.there(values)) is not None:
            logs = logs.masked_fill(~there, 0.0)
        of_network = logs.flatten(2).sum(2) if logs.ndim > 2 else logs
        return torch.logsumexp(of_network, 1) - math.log(self.means.shape[1])

    def _crps(self, targets: Tensor) -> float:
        """Mean over inputs and outputs, in closed form (Grimit, Gneiting, Berrocal, Johnson, "The continuous ranked
        probability score for circular variables", 2006, equation 5).
        """
        means, variances = as_double(self.means), as_double(self.deviations).square()
        distance = _mean_distance(as_double(targets).unsqueeze(1) - means, variances).mean(1)
        networks, pairs = means.shape[1], torch.zeros_like(distance)
        for one in range(networks):
            others = means - means[:, one : one + 1], variances + variances[:, one : one + 1]
            pairs = pairs + _mean_distance(*others).mean(1) / networks
        return float((distance - pairs / 2).mean())

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """See `RegressionPrediction`."""
        if (there := self.there(targets)) is not None and not bool(there.all()):
            return super().quality(targets, bins)
        measures = {"rmse": metrics.rmse(self.mean, targets)}
        if bool((self.deviations > 0).all()):
            measures["log_density"] = float(as_double(self.log_prob(targets)).mean())
            measures["crps"] = self._crps(targets)
            measures |= interval_quality(self._own_interval, targets)
        return measures

    def _flat(self, there: Tensor) -> GaussianMixturePrediction:
        """See `RegressionPrediction`."""
        flat = super()._flat(there)
        known = {name: getattr(flat, name) for name in ("mean", "epistemic_variance", "noise_variance")}
        of_networks = (each.movedim(1, -1)[there] for each in (self.means, self.deviations))
        values: dict[str, Any] = dict(zip(("means", "deviations"), of_networks, strict=True))
        return GaussianMixturePrediction(**known, **values, functional=flat.mean, support=self.support)


def _mean_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """``E|x|`` for ``x ~ N(mean, variance)``."""
    deviation = variance.sqrt()
    z = mean / deviation.clamp(min=torch.finfo(mean.dtype).tiny)
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * pi)
    return 2 * deviation * density + mean * torch.special.erf(z / math.sqrt(2))
