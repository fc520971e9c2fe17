"""The prediction for a likelihood without a class of predictions: draws of the outputs, evaluated by the likelihood.

The predictive is the mixture ``1/S sum_s p(y | f_s)`` over draws ``f_s`` of the model's outputs. Its density needs all
draws, so this prediction, unlike others, keeps them: ``draws`` times the memory of the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double, moved
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.randomness import mix
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.draws import Spread, output_draws
from posthoc_uq.likelihoods.prediction import (
    AT_ONCE,
    LEVELS,
    Prediction,
    ValueTensors,
    at_least_float32,
    by_draw,
    by_input,
    cat_known,
    check_rows,
    interval_quality,
    mean_and_variance,
    retained_losses,
    squared_errors,
)

_OBSERVATIONS = 1000  # targets drawn for each input, at least, for an interval
_FEWER = 250  # where the intervals of many inputs are only counted
_IN_ALL = 2_000_000  # targets drawn for counted intervals, as long as each input has `_FEWER`


class Observed(Protocol):
    """The methods of a likelihood used here; see `posthoc_uq.likelihoods.Likelihood`."""

    name: str

    def defines(self, *methods: str) -> bool: ...
    def check(self, outputs: Tensor, targets: Tensor | None) -> None: ...
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor: ...
    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def measures(self, mean: Tensor, targets: Tensor) -> dict[str, float]: ...
    def mean(self, outputs: Tensor) -> Tensor: ...
    def variance(self, outputs: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False, repr=False)
class DrawnPrediction(Prediction):
    """Draws of a batch's outputs under the posterior, and the likelihood of the targets.

    Attributes:
        outputs: (batch, draws, ...), of the model under each draw.
        likelihood: of the targets given the outputs.
        functional_mean: (batch, ...), mean of the outputs over the weights.
        functional_variance: same shape, their variance.
        mean: (batch, ...), of the target; None where the likelihood has no ``mean``.
        epistemic_variance: same shape, variance over the weights of the target's mean, in squared units of the target;
            None without ``mean``.
        noise_variance: same shape, mean over the weights of the target's own variance; None where the likelihood has
            no ``variance``. Its sum with `epistemic_variance` is the total (law of total variance).
        novelty_ratio: (batch,), see `Prediction`.
    """

    kind: ClassVar[str] = "draws"

    outputs: Tensor
    likelihood: Observed
    functional_mean: Tensor
    functional_variance: Tensor
    mean: Tensor | None = None
    epistemic_variance: Tensor | None = None
    noise_variance: Tensor | None = None
    novelty_ratio: Tensor | None = None

    @classmethod
    def from_draws(
        cls, outputs: Tensor, likelihood: Observed, functional: tuple[Tensor, Tensor] | None = None
    ) -> DrawnPrediction:
        """From outputs under several draws of the weights.

        Args:
            outputs: (draws, batch, ...).
            likelihood: of the targets.
            functional: mean and variance of the outputs, where they are known more accurately than from the draws.

        Raises:
            PosthocUQError: there is no draw, or the outputs are no floating-point numbers.
        """
        outputs = at_least_float32(outputs)
        functional_moments = mean_and_variance(outputs) if functional is None else functional
        mean = epistemic = noise_variance = None
        if likelihood.defines("mean"):
            mean, epistemic = mean_and_variance(by_draw(likelihood.mean, outputs))
            if likelihood.defines("variance"):
                noise_variance = by_draw(likelihood.variance, outputs).mean(0)
        return cls(outputs.transpose(0, 1), likelihood, *functional_moments, mean, epistemic, noise_variance)

    @classmethod
    def from_gaussian(
        cls,
        mean: Tensor,
        variance: Tensor,
        likelihood: Observed,
        covariance: Tensor | Spread | None,
        n_draws: int,
    ) -> DrawnPrediction:
        """From Gaussian outputs, by quasi-random draws of them, the same for every input and call (`output_draws`)."""
        outputs = output_draws(mean, variance, covariance, n_draws)
        return cls.from_draws(outputs, likelihood, (mean, variance))

    def __len__(self) -> int:
        """Number of inputs."""
        return self.outputs.shape[0]

    def __repr__(self) -> str:
        shape = "" if self.outputs.ndim == 2 else f", outputs={tuple(self.outputs.shape[2:])}"
        return (
            f"DrawnPrediction(inputs={len(self)}{shape}, draws={self.outputs.shape[1]}, "
            f"likelihood={self.likelihood.name!r})"
        )

    @property
    def outputs_mean(self) -> Tensor:
        """The functional mean."""
        return self.functional_mean

    @property
    def default_score(self) -> str:
        """The standard deviation where it is known, else the functional variance."""
        return "functional_variance" if self.noise_variance is None else "standard_deviation"

    @property
    def variance(self) -> Tensor:
        """Shape of `mean`: total variance of the target, in its squared units.

        Raises:
            PosthocUQError: the likelihood has no ``mean`` or no ``variance``.
        """
        if self.epistemic_variance is None or self.noise_variance is None:
            raise PosthocUQError(
                f"Likelihood {self.likelihood.name!r} does not say what mean and variance the target has; give it the "
                f"methods mean(outputs) and variance(outputs)."
            )
        return self.epistemic_variance + self.noise_variance

    @property
    def standard_deviation(self) -> Tensor:
        """Shape of `mean`, in units of the target: square root of the total variance."""
        return self.variance.sqrt()

    def epistemic(self) -> Tensor:
        """(batch,): the epistemic variance where it is known, else the functional one, mean over outputs."""
        variance = self.epistemic_variance
        return by_input(self.functional_variance if variance is None else variance)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log of the mean over the draws of the likelihood of the targets.

        Args:
            targets: as the likelihood takes them.

        Raises:
            PosthocUQError: the likelihood refuses them.
        """
        self.likelihood.check(self.functional_mean, targets)
        outputs = self.outputs.transpose(0, 1)
        targets = targets.to(outputs.device)
        if targets.shape != outputs.shape[1:] and not torch.compiler.is_compiling():  # they could broadcast
            check_rows(self.likelihood.log_prob, outputs[0], targets, self.likelihood.name)

        def of_part(flat: Tensor) -> Tensor:
            copies = targets.unsqueeze(0).expand(len(flat) // max(1, len(targets)), *targets.shape)
            return self.likelihood.log_prob(flat, copies.flatten(0, 1))

        return torch.logsumexp(by_draw(of_part, outputs), dim=0) - math.log(outputs.shape[0])

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` targets of every input, (n, batch, ...), each from the likelihood of one of the draws, chosen evenly.

        Args:
            n: targets per input.
            generator: of the random numbers; without one they differ from call to call.

        Raises:
            PosthocUQError: `n` is below 1, or the likelihood draws no targets.
        """
        if n < 1:
            raise PosthocUQError(f"sample needs n of at least 1, not {n}.")
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        draws, device = self.outputs.shape[1], generator.device
        keys = torch.randint(-(2**63), 2**63 - 1, (draws, len(self)), generator=generator, device=device)
        targets = self._observations(keys.to(self.outputs.device), -(-n // draws))
        return targets[
            torch.randperm(len(targets), generator=generator, device=device)[:n].to(targets.device)
        ]

    def _observations(self, keys: Tensor, rounds: int) -> Tensor:
        """Targets ``(rounds * draws, batch, ...)`` by keys ``(draws, batch)``."""
        flat = self.outputs.transpose(0, 1).flatten(0, 1)
        drawn = [self.likelihood.draw(flat, keys.flatten(), number) for number in range(rounds)]
        return torch.cat([targets.unflatten(0, tuple(keys.shape)) for targets in drawn])

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds, shaped like the target, between which it falls with probability `level` or a little more: quantiles
        of at least a thousand drawn targets, with the same random numbers for every input and call.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1, or the likelihood draws no targets.
        """
        if not 0 < level < 1:
            raise PosthocUQError(f"interval needs a level strictly between 0 and 1, not {level}.")
        return self._intervals((level,), _OBSERVATIONS)[level]

    def quantile(self, q: float) -> Tensor:
        """Shaped like the target: the value below which it falls with probability `q`, a quantile of at least a
        thousand drawn targets, as for `interval`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1, or the likelihood draws no targets.
        """
        if not 0 < q < 1:
            raise PosthocUQError(f"quantile needs a probability strictly between 0 and 1, not {q}.")
        level = abs(2 * q - 1)
        return self._intervals((level,), _OBSERVATIONS)[level][int(q > 0.5)]

    def probability(self, value: Tensor | float) -> Tensor:
        """Shaped like the outputs: the probability of a value of each output, as of a count; a density where targets
        are continuous. The mean over the draws.

        Args:
            value: one for all outputs, or a tensor that broadcasts to ``(batch, ...)``.

        Raises:
            PosthocUQError: the likelihood has no density of single outputs.
        """
        return self._over_draws(
            lambda outputs, values: self.likelihood.log_terms(outputs, values).exp(), value
        )

    def cdf(self, value: Tensor | float) -> Tensor:
        """Shaped like the outputs: the probability that each is at most `value`; as `probability`.

        Raises:
            PosthocUQError: the likelihood has no distribution function.
        """
        return self._over_draws(self.likelihood.cdf, value)

    def _over_draws(self, function: Callable[[Tensor, Tensor], Tensor], value: Tensor | float) -> Tensor:
        outputs = self.outputs.transpose(0, 1)
        values = torch.as_tensor(value, device=outputs.device).to(outputs.dtype).expand(outputs.shape[1:])

        def of_part(flat: Tensor) -> Tensor:
            copies = values.unsqueeze(0).expand(len(flat) // max(1, len(values)), *values.shape)
            return function(flat, copies.flatten(0, 1))

        return by_draw(of_part, outputs).mean(0)

    def _intervals(self, levels: Sequence[float], targets: int) -> dict[float, tuple[Tensor, Tensor]]:
        """The bounds by level, all from the same drawn targets, at least so many an input."""
        draws, device = self.outputs.shape[1], self.outputs.device
        rounds = -(-targets // draws)
        keys = mix(torch.arange(1, draws + 1, device=device)).unsqueeze(1)
        rows = max(1, AT_ONCE // (rounds * draws * max(1, math.prod(self.outputs.shape[2:]))))
        shares = [share for level in levels for share in ((1 - level) / 2, (1 + level) / 2)]
        index = torch.tensor(
            [max(0, math.ceil(share * rounds * draws) - 1) for share in shares], device=device
        )
        parts = [self._rows(slice(start, start + rows)) for start in range(0, max(1, len(self)), rows)]
        quantiles = [
            part._observations(keys.expand(-1, len(part)), rounds).to(part.outputs).sort(0).values[index]
            for part in parts
        ]
        bounds = torch.cat(quantiles, 1).unbind()
        return {level: (bounds[2 * i], bounds[2 * i + 1]) for i, level in enumerate(levels)}

    def _rows(self, part: slice) -> DrawnPrediction:
        rows = {name: None if value is None else value[part] for name, value in self._tensors().items()}
        return replace(self, **cast(Any, rows))

    def _tensors(self) -> dict[str, Tensor | None]:
        return {name: value for name, value in vars(self).items() if name != "likelihood"}

    def fitting(self, targets: Tensor) -> Tensor:
        """The targets as they are, once the likelihood has checked them."""
        self.likelihood.check(self.functional_mean, targets)
        return targets

    def scores(self) -> dict[str, Tensor]:
        """See `Prediction`: the scores of values that are known, and the functional variance."""
        scores: dict[str, Tensor] = {}
        if self.noise_variance is not None:
            scores["standard_deviation"] = by_input(self.standard_deviation)
        if self.epistemic_variance is not None:
            scores["epistemic_variance"] = by_input(self.epistemic_variance)
        scores["functional_variance"] = by_input(self.functional_variance)
        return scores | ({} if self.novelty_ratio is None else {"novelty": self.novelty_ratio})

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """NLL; RMSE where the mean is known; coverage and sharpness of intervals where targets can be drawn. More than
        2,000 inputs have intervals from fewer drawn targets each, at least 250.
        """
        measures: dict[str, float] = {}
        if self._like_mean(targets) is not None:
            mean, values = cast(Tensor, self.mean), cast(Tensor, self._like_mean(targets))
            measures |= {"RMSE": metrics.rmse(mean, values), **self.likelihood.measures(mean, values)}
        measures["NLL"] = -float(self.log_prob(targets).double().mean())
        if self.likelihood.defines("draw"):
            drawn = min(_OBSERVATIONS, max(_FEWER, _IN_ALL // max(1, len(self))))
            bounds = self._intervals(LEVELS, drawn)
            shape = bounds[LEVELS[0]][0].shape
            if shape.numel() == targets.numel():
                measures |= interval_quality(bounds.__getitem__, targets.reshape(shape).double())
        return measures

    def _like_mean(self, targets: Tensor) -> Tensor | None:
        """Targets in the shape of the mean, where there is one and they fit it."""
        if self.mean is None or targets.numel() != self.mean.numel():
            return None
        return as_double(targets.reshape(self.mean.shape))

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the squared error, mean over outputs; without a mean the negative log-likelihood."""
        values = self._like_mean(targets)
        if values is None:
            return -self.log_prob(targets).double()
        return squared_errors(cast(Tensor, self.mean), values)

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """Root mean squared errors; without a mean negative log-likelihoods."""
        values = self._like_mean(targets) is not None
        return retained_losses("RMSE" if values else "NLL", scores, self.losses(targets), rates, root=values)

    def tensors(self) -> ValueTensors:
        """See `Prediction`.

        Raises:
            PosthocUQError: the likelihood has no ``mean`` or no ``variance``.
        """
        variance = self.variance
        return ValueTensors(cast(Tensor, self.mean), variance, cast(Tensor, self.epistemic_variance))

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name, with the total variance, and the novelty if it is known; without the draws."""
        values = {name: value for name, value in self._tensors().items() if name != "outputs"}
        values["novelty"] = values.pop("novelty_ratio")
        if self.noise_variance is not None:
            values["variance"] = self.variance
        return {name: value for name, value in values.items() if value is not None}

    def to(self, device: torch.device | str) -> DrawnPrediction:
        """The same prediction with its tensors on `device`."""
        known = {name: value for name, value in self._tensors().items() if value is not None}
        return replace(self, **cast(Any, dict(zip(known, moved(known.values(), device), strict=True))))

    @staticmethod
    def cat(predictions: Sequence[DrawnPrediction]) -> DrawnPrediction:
        """Predictions of several batches as one, in order; a field that one of them lacks is None in the result.

        Raises:
            PosthocUQError: nothing to join, or draws or outputs of different number or shape.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        shapes = {tuple(p.outputs.shape[1:]) for p in predictions}
        if len(shapes) > 1:
            raise PosthocUQError(f"cat got predictions of different (draws, outputs): {sorted(shapes)}.")
        parts = [p._tensors() for p in predictions]
        joined = {name: cat_known([part[name] for part in parts]) for name in parts[0]}
        return replace(predictions[0], **cast(Any, joined))
