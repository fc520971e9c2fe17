"""The faithful prior: smallest prior precision for which KL(network, predictive) on training inputs is within a budget.

There are two other criteria: the likelihood of held-out labels (`posthoc_uq.fitting.held_out`), and the log marginal
likelihood, which needs no predictions (`posthoc_uq.posteriors.search`). All three choose the posterior's
`width_parameter`: its prior precision, or the `scale` of one whose variances were trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, inf, isfinite, log10
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, count_samples, holds_samples
from posthoc_uq.core.devices import as_double, at_least_float32, full_precision, host_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.numerics import check_rows_finite, not_finite
from posthoc_uq.core.progress import count_progress
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.kept_inputs import MAX_KEPT, inputs_to_keep
from posthoc_uq.heads.features import FeatureCache
from posthoc_uq.heads.predictor import Predictor, scaled_logits
from posthoc_uq.layers.proof import PROBE_SAMPLES
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.prediction import by_input
from posthoc_uq.likelihoods.weights import counted_positions, nothing_counts
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.history import FaithfulRecord, Trial, Trials
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import SearchBar
from posthoc_uq.posteriors.settings import HYPERPARAMETERS, Hyperparameters, SettingsRecord, get_width


def model_of(posterior: Posterior) -> nn.Module:
    """The model of a posterior.

    Raises:
        PosthocUQError: it has none.
    """
    if posterior.model is None:
        raise PosthocUQError(
            "The posterior has no model; save it, and load it with the model that it was fitted on: "
            "uq.load(path, model)."
        )
    return posterior.model


def width_parameter_of(posterior: Posterior) -> str:
    """The hyperparameter by which a posterior is made wider or narrower.

    Raises:
        PosthocUQError: it has none.
    """
    name = posterior.width_parameter
    if name is None:
        instead = " Held-out data can tune its temperature, by criterion='likelihood'."
        raise PosthocUQError(
            f"A posterior by method={posterior.method!r} has neither a prior precision nor a scale by which it could "
            f"be made wider or narrower.{instead if posterior.likelihood.logits else ''}"
        )
    return name


def scale_width(settings: Hyperparameters, name: str, factor: float) -> Hyperparameters:
    """Settings whose width parameter, or each of its values by layer, is multiplied by a factor."""
    value: Any = getattr(settings, name)
    if isinstance(value, dict):
        return replace(settings, **{name: {layer: number * factor for layer, number in value.items()}})
    return replace(settings, **{name: value * factor})


def scaled_variances(settings: Hyperparameters, factor: float) -> Hyperparameters:
    """Settings of a regression with one noise variance an output at which all variances are multiplied by a factor:
    that of the noise, and of a linearised network those of the outputs.
    """
    changed = scale_width(settings, "prior_precision", 1 / factor)
    return replace(changed, noise_scale=settings.noise_scale * factor)


def floating_numbers(batch: Batch) -> Tensor:
    """All floating-point numbers of the inputs, ``(samples, ...)``."""
    samples = count_samples(batch)
    tensors = [t for t in batch.tensors if t.is_floating_point() and holds_samples(t, samples)]
    rows = [host_double(tensor).reshape(samples, -1) for tensor in tensors]
    return torch.cat(rows or [torch.zeros(samples, 1, device="cpu")], 1)


@contextmanager
def rows_named(posterior: Posterior, seed: int, of_loader: Callable[[], Iterable[Batch]]) -> Generator[None]:
    """Around work on a part of a loader's data, whose error of inputs that are not finite then names the loader's row.

    Args:
        posterior: whose network is run.
        seed: of what the loader draws.
        of_loader: gives the batches of all data; read once or twice more after such an error.
    """
    try:
        yield
    except NonFiniteError:
        network = replicate(model_of(posterior), posterior.trained_mean)
        with torch.no_grad(), isolated_random_state(seed):
            check_rows_finite(batch.copied().call(network) for batch in of_loader())
            check_rows_finite(map(floating_numbers, of_loader()), "the numbers")
        raise


class Score(ABC):
    """A score of predictions of the same batches, as a function of the posterior's settings.

    What comes before the posterior in the model runs once for each batch, and all evaluations draw with the same seed.

    Args:
        predictor: predicts the batches, under the posterior at the settings of each evaluation.
        read: gives the batches, in the same order at every call, each with what its prediction is compared with.
        seed: of the draws.
        tempered: whether every evaluation first finds the temperature.

    Attributes:
        posterior: the predictor's.
    """

    def __init__(
        self,
        predictor: Predictor,
        read: Callable[[], Iterator[tuple[Batch, Any]]],
        seed: int,
        tempered: bool,
    ) -> None:
        self.posterior, self._predictor = predictor.posterior, predictor
        self._seed, self._tempered = seed, tempered
        self._cache, self._read = FeatureCache(predictor, read), read
        self._sound = False  # the network's own outputs are known to be finite

    def evaluate(self, settings: Hyperparameters) -> Trial:
        """The score at these settings, infinite where there is none; at the best temperature, if that is searched.

        Raises:
            NonFiniteError: there is none because the network's own outputs are not finite.
        """
        found, value = settings, inf
        try:
            predictor = self._at(settings)
            with torch.no_grad():
                pairs: Iterable[tuple[Any, Any]] = self._pairs(predictor)
                if self._tempered:
                    pairs = list(pairs)
                    found = replace(settings, temperature=self._best_temperature(predictor, pairs))
                    predictor = self._at(found)
                value = self._mean(predictor, pairs)
        except NonFiniteError:  # draws of extreme weights, or a precision that cannot be factorised
            value = inf
        if isfinite(value):
            return Trial(found, value)
        if not self._sound:
            with torch.no_grad():
                self._check_network()
        return Trial(found, inf)

    def _at(self, settings: Hyperparameters) -> Predictor:
        """The predictor at these settings."""
        return self._predictor.with_posterior(self.posterior.at(settings), self._seed)

    def _check_network(self) -> None:
        """Refuse data for which the network itself has no finite outputs: no settings would give them a score.

        Raises:
            NonFiniteError: there are such data.
        """
        check_rows_finite(outputs for outputs, _ in self._network_outputs())
        self._sound = True

    def require(self, score: float) -> None:
        """Refuse inputs that are not finite, where `score`, which a search ends with, is not because of them.

        Raises:
            NonFiniteError: names the batch and the row.
        """
        if not isfinite(score):
            with torch.no_grad():
                check_rows_finite((floating_numbers(batch) for batch, _ in self._read()), "the numbers")

    def _pairs(self, predictor: Predictor) -> Iterator[tuple[Any, Any]]:
        """The distribution of the outputs of each batch, with what its prediction is compared with."""
        return self._cache.distributions(predictor)

    def _network_outputs(self) -> Iterator[tuple[Tensor, Any]]:
        """Outputs of the network at the posterior's mean for each batch, with what predictions are compared with."""
        network = replicate(model_of(self.posterior), self.posterior.trained_mean)
        return self._cache.outputs(lambda batch: batch.copied().call(network))

    @abstractmethod
    def _mean(self, predictor: Predictor, pairs: Iterable[tuple[Any, Any]]) -> float:
        """The score of these distributions, at the predictor's temperature."""

    @abstractmethod
    def _best_temperature(self, predictor: Predictor, pairs: Sequence[tuple[Any, Any]]) -> float: ...


TOLERANCE = 0.05  # decades of the prior precision
_SLOPES = (0.3, 2.0)  # decades of divergence for each decade of prior precision that a step may assume
_MARGIN = 0.4 * TOLERANCE  # decades by which a step ends above the place where the budget should be met
_ROUNDING_NATS = 1e-9  # nats below which a divergence may be rounding
_MAX_SLOPE_DISTANCE = 1.0  # decades: a slope seen across more may not hold at its end


def smallest_prior_within_budget(
    divergence: Callable[[float], float],
    budget: float,
    start: float,
    low: float,
    high: float,
    *,
    slope: float | None = None,
    upwards: float = 1.0,
) -> tuple[float, float | None]:
    """The lowest decade, to `TOLERANCE`, down to which the divergence stays within the budget; and the slope of the
    last step that ended within it, None where it was longer than a decade.

    Near the trained weights a divergence grows at most as the square of the variances, so that its logarithm falls by
    at most 2 for each decade of the prior precision. A step that assumes this slope never passes the budget there;
    later steps take the slope that was seen. Root finders for any function need about twice as many evaluations: they
    also close in on the root from the other side, and cannot use infinite values.

    Args:
        divergence: in nats, of a decade; it remembers its values.
        budget: the largest divergence allowed.
        start: the decade that is tried first; where it is outside the budget, those above it follow.
        low: the lowest decade that is tried.
        high: the decade at which the search upwards gives up, and which is returned although it is outside.
        slope: decades by which the divergence is known to fall for each decade, near `start`.
        upwards: the first step upwards, in decades; the following ones are longer.
    """

    def excess(decade: float) -> float:
        return log10(max(divergence(decade), min(_ROUNDING_NATS, budget / 10)) / budget)

    def slope_between(below: float, above: float) -> float:
        return (excess(below) - excess(above)) / (above - below) if isfinite(below) else inf

    def assumed(slope: float) -> float:
        return min(max(slope, _SLOPES[0]), _SLOPES[1])

    # `flat` is the slope last seen, for the question whether the end is near; `steep` the one that a step assumes
    flat, steep = (0.0, _SLOPES[1]) if slope is None else (slope, assumed(slope))
    inside, outside = start, -inf
    # Upwards, until the budget is met.
    while not divergence(inside) <= budget:
        if inside >= high:
            return inside, slope
        step = max(upwards, min(excess(inside) / steep + _MARGIN, 1.0))
        inside, outside, upwards = min(high, inside + step), inside, 2 * upwards
    # Downwards from there. While nothing outside is known, a step goes as far as the slope allows; between an inside
    # and an outside it is false position, and every third time a bisection.
    bracketed = 0
    while inside > low and inside - outside > TOLERANCE:
        left, across = -excess(inside), slope_between(outside, inside)
        if left <= TOLERANCE * min(flat, across):
            break  # what is left of the budget is worth less than the tolerance
        if not isfinite(outside):
            # where it hardly grows, a whole decade
            least = 1.0 if flat < _SLOPES[0] else TOLERANCE / 2
            point = max(low, inside - max(left / steep - _MARGIN, least))
        elif bracketed % 3 == 2 or left / across <= 0:  # also where it is infinite outside
            point = (inside + outside) / 2
        else:  # by the slope between both ends, but not near either of them
            tenth = 0.1 * (inside - outside)
            point = min(max(inside - left / across + _MARGIN, outside + tenth), inside - tenth)
        if divergence(point) <= budget:
            flat = slope_between(point, inside)
            steep, slope = assumed(flat), flat if inside - point <= _MAX_SLOPE_DISTANCE else None
            inside = point
        else:
            outside = point
        bracketed += isfinite(outside)
    return inside, slope


TEMPERATURES = (0.3, 3.0)  # the interval in which a matched temperature is searched, times the network's
_TEMPERATURE_TOLERANCE = 1e-4  # decades of a matched temperature
_MAX_FLAT_SPREAD = 0.05  # standard deviation of logits over inputs, worth a thousandth of a nat
_MAX_POSITIONS, _MAX_OUTPUTS = 4096, 2**22  # in all, of inputs whose outputs have positions ...
_MIN_INPUTS = 16  # ... but so many inputs in any case
_MAX_CLASSES, _MIN_OF_CLASSES = 2**16, 32  # outputs in all of inputs without positions, and the fewest inputs


class Divergence(Score):
    """The mean divergence of predictions from those of the network, on given inputs.

    Args:
        inputs: batches, on the model's device.
        predictor: predicts them; its posterior's temperature is the network's.
        seed: of the draws of a head that draws weights.
        matched: whether predictions have the temperature at which their mean entropy is the network's.
        advance: called with the numbers of inputs that were predicted, as the work on them goes on.
        known: the network's outputs for the inputs; they are computed where they are not given.

    Attributes:
        samples: how many inputs there are.
        rows: how many predictions count: one for each input, or for each of its positions that counts.
        inputs: as given, or the first of them where outputs have many positions.
    """

    def __init__(
        self,
        inputs: Sequence[Batch],
        predictor: Predictor,
        *,
        seed: int,
        matched: bool,
        advance: Callable[[int], None],
        known: Sequence[_NetworkOutputs] = (),
    ) -> None:
        posterior = predictor.posterior
        with torch.no_grad():
            if not known:
                network = replicate(model_of(posterior), posterior.trained_mean)
                inputs = _enough(inputs, network, predictor)
            self.inputs = inputs
            super().__init__(predictor, lambda: ((batch, batch) for batch in inputs), seed, matched)
            self._compared = list(known) or [
                _NetworkOutputs.of(outputs, batch, posterior) for outputs, batch in self._network_outputs()
            ]
            if not known:
                self._check_network()
        self._advance, self._temperature = advance, posterior.temperature
        self.rows = sum(network.rows for network in self._compared)
        self.samples = sum(len(network.outputs) for network in self._compared)

    def _check_network(self) -> None:
        """See `Score`; of the inputs in an order of their own, which has no row to name."""
        bad = sum(len(not_finite(network.outputs)) for network in self._compared)
        if bad:
            samples = sum(len(network.outputs) for network in self._compared)
            raise NonFiniteError(
                f"The model's own outputs for {bad} of {samples} inputs are not finite, so that no posterior is "
                f"faithful to them. Check the inputs for NaN or infinity, or leave them out."
            )
        self._sound = True

    def require(self, score: float) -> None:
        """See `Score`."""
        bad = 0 if isfinite(score) else sum(len(not_finite(floating_numbers(batch))) for batch in self.inputs)
        if bad:
            raise NonFiniteError(
                f"{bad} of {self.samples} inputs are not finite, so that no posterior is faithful to the network's "
                f"outputs for them. Check the inputs for NaN or infinity, or leave them out."
            )

    def first(self, number: int) -> tuple[list[Batch], list[_NetworkOutputs]]:
        """The first so many of the inputs, and the network's outputs for them."""
        inputs, known, taken = list[Batch](), list[_NetworkOutputs](), 0
        for batch, network in zip(self.inputs, self._compared, strict=True):
            samples = len(network.outputs)
            part = min(samples, number - taken)
            inputs.append(batch.narrow(0, part, samples))
            known.append(network.first(part))
            taken += part
            if taken == number:
                break
        return inputs, known

    @property
    def runs_the_model(self) -> bool:
        """Whether a prediction of the inputs runs all of the model, and not only the part that has a posterior."""
        return self._cache.nbytes == 0

    @property
    def flat(self) -> bool:
        """Whether the network's logits hardly differ from input to input, so that its predictions bound no prior."""
        if not self.posterior.likelihood.logits or self.samples < 2:
            return False
        logits = [network.outputs for network in self._compared if network.layout is None]
        if not logits or len({outputs.shape[1:] for outputs in logits}) > 1:
            return False
        return float(as_double(torch.cat(logits)).std(0).max()) < _MAX_FLAT_SPREAD

    def _pairs(self, predictor: Predictor) -> Iterator[tuple[Any, Any]]:
        of_batches = self._cache.distributions(predictor)
        for network in self._compared:
            with count_progress(len(network.outputs), self._advance):
                distribution, _ = next(of_batches)
            yield distribution, network

    def _mean(self, predictor: Predictor, pairs: Iterable[tuple[Any, Any]]) -> float:
        return self._mean_of(predictor.posterior.observation.divergence, predictor, pairs)

    def _mean_of(
        self,
        score: Callable[[Tensor, Any], Tensor],
        predictor: Predictor,
        pairs: Iterable[tuple[Any, Any]],
    ) -> float:
        """Mean of a score of outputs and predictions over all inputs, or positions that count."""
        total = 0.0
        for distribution, network in pairs:
            if network.rows:
                prediction = predictor.prediction_of(distribution)
                total += network.rows * float(network.mean(score, prediction))
        return total / self.rows

    def _best_temperature(self, predictor: Predictor, pairs: Sequence[tuple[Any, Any]]) -> float:
        """The temperature at which the mean entropy is the network's, or the network's temperature if there is none."""
        entropy = self.posterior.likelihood.entropy
        network_entropy = sum(
            network.rows * float(network.mean(lambda outputs, _: entropy(outputs), None))
            for network in self._compared
            if network.rows
        )

        @cache
        def excess(decade: float) -> float:
            settings = replace(predictor.posterior.settings, temperature=self._temperature * 10.0**decade)
            entropies = self._mean_of(lambda _, p: by_input(p.entropy()), self._at(settings), pairs)
            return entropies - network_entropy / self.rows

        low, high = (log10(bound) for bound in TEMPERATURES)
        if not (excess(low) <= 0.0 <= excess(high)):  # NaN included
            return self._temperature
        from scipy.optimize import brentq

        root: Any = brentq(excess, low, high, xtol=_TEMPERATURE_TOLERANCE)
        return self._temperature * 10.0 ** float(root)


def backward_dominates(posterior: Posterior) -> bool:
    """Whether backward passes are what a prediction costs; of a small network it is the calls around them, and what
    saves passes only adds to those.
    """
    return inputs_to_keep(posterior.layers.values()) < MAX_KEPT


class ApproximateDivergence(Divergence):
    """`Divergence` by `Predictor.at_every_prior`: the backward passes are run once, whatever the number of evaluations.

    Attributes:
        by_row: the mean divergence of each input at the last evaluation, ``(samples,)`` float64.
        fast: whether predictions take few draws of the outputs.
    """

    by_row: Tensor
    fast = True

    def differentiate(self, settings: Hyperparameters) -> bool:
        """Run the backward passes of the inputs, around these settings; false where the predictor cannot serve them."""
        self._at_every_prior, predictor = list[Any](), self._at(settings)
        for network, batch in zip(self._compared, self.inputs, strict=True):
            with count_progress(len(network.outputs), self._advance):
                found = predictor.at_every_prior(batch)
            if found is None:
                return False
            self._at_every_prior.append(found)
        return True

    def _pairs(self, predictor: Predictor) -> Iterator[tuple[Any, Any]]:
        width = get_width(predictor.posterior.settings, "prior_precision")
        for found, network in zip(self._at_every_prior, self._compared, strict=True):
            yield found.at(width), network

    def _mean(self, predictor: Predictor, pairs: Iterable[tuple[Any, Any]]) -> float:
        posterior, rows = predictor.posterior, list[Tensor]()
        for distribution, network in pairs:
            if self.fast:
                ((_, prediction),) = predictor.fast_predictions(distribution, (posterior.temperature,))
            else:
                prediction = predictor.prediction_of(distribution)
            rows.append(posterior.observation.divergence(network.outputs, prediction))
        self.by_row = as_double(torch.cat([row.reshape(len(row), -1).mean(1) for row in rows]))
        return float(self.by_row.mean())


AnyDivergence = TypeVar("AnyDivergence", bound=Divergence)


def _enough(inputs: Sequence[Batch], network: nn.Module, predictor: Predictor) -> Sequence[Batch]:
    """The first of the inputs, with some thousand positions in all that count: each position's prediction counts by
    itself, and all outputs are kept in memory and predicted many times. Without positions all inputs, or those of
    `_MAX_CLASSES` outputs: of many classes, whose predictions are dear, the mean over fewer inputs is near enough.
    """
    chosen: list[Batch] = []
    taken = positions = numbers = 0
    for batch in inputs:
        samples = count_samples(batch)
        probe = batch.narrow(0, min(samples, PROBE_SAMPLES), samples)
        with predictor.explaining(batch):
            outputs = probe.copied().call(network)
        layout = predictor.posterior.likelihood.positions_of(outputs)
        if layout is None:
            return _first_of(inputs, max(_MIN_OF_CLASSES, _MAX_CLASSES // max(1, outputs[0].numel())))
        whole = outputs[:1].expand(samples, *outputs.shape[1:])
        sums = counted_positions(layout, whole, batch).sum(1).cumsum(0).cpu() + positions
        places = torch.arange(1, samples + 1, device="cpu")
        enough = (sums <= _MAX_POSITIONS) & (places * outputs[0].numel() + numbers <= _MAX_OUTPUTS)
        fitting = int((enough | (places + taken <= _MIN_INPUTS)).sum())
        if fitting:
            chosen.append(batch if fitting == samples else batch.narrow(0, fitting, samples))
        if fitting < samples:
            break
        taken, positions, numbers = taken + samples, int(sums[-1]), numbers + samples * outputs[0].numel()
    return chosen


def _first_of(inputs: Sequence[Batch], number: int) -> Sequence[Batch]:
    """The first so many of the inputs."""
    chosen, left = list[Batch](), number
    for batch in inputs:
        samples = count_samples(batch)
        chosen.append(batch if samples <= left else batch.narrow(0, left, samples))
        left -= samples
        if left <= 0:
            break
    return chosen


@dataclass(frozen=True)
class _NetworkOutputs:
    """The network's outputs for one batch.

    Attributes:
        outputs: at least in float32, scaled as predictions scale logits.
        layout: where they have positions.
        counted: which of their rows count; None for all.
        rows: how many predictions count: the positions, or the samples.
    """

    outputs: Tensor
    layout: Layout | None
    counted: Tensor | None
    rows: int

    @classmethod
    def of(cls, outputs: Tensor, batch: Batch, posterior: Posterior) -> _NetworkOutputs:
        outputs = scaled_logits(at_least_float32(outputs.detach()), posterior)
        layout = posterior.likelihood.positions_of(outputs)
        if layout is None:
            return cls(outputs, None, None, len(outputs))
        counting = counted_positions(layout, outputs, batch).flatten()
        rows = int(counting.sum())
        return cls(outputs, layout, None if rows == len(counting) else counting, rows)

    def first(self, number: int) -> _NetworkOutputs:
        """Those of the first so many samples."""
        outputs, counted = self.outputs[:number], self.counted
        if counted is not None:
            counted = counted[: number * (len(counted) // len(self.outputs))]
        each = len(outputs) if self.layout is None else len(self.layout.rows(outputs))
        return _NetworkOutputs(outputs, self.layout, counted, each if counted is None else int(counted.sum()))

    def mean(self, score: Callable[[Tensor, Any], Tensor], prediction: Any) -> Tensor:
        """The mean of a score of outputs and predictions, over what counts."""
        outputs = self.outputs
        if self.counted is not None and self.layout is not None:
            outputs = self.layout.rows(outputs)[self.counted]
            prediction = None if prediction is None else prediction.rows.picked(self.counted)
        return as_double(score(outputs, prediction)).mean()


DIVERGENCE_WITH_NOISE = 0.02  # nats: that where held-out residuals set the noise
_START_ABOVE = 3  # decades above the precision of the weights' size at which a search begins
_END_BELOW = 2  # decades below it at which a search ends: weights of ten times their size
_GIVE_UP_ABOVE = 12  # decades above it at which a search gives up
_MANY_OUTPUTS = 1024  # of a layer, from which on a search begins with its variances alone
_FEW_INPUTS = 8  # on which a search begins where each prediction runs the whole model
_SOME_INPUTS = 16  # of a large network that may be enough ...
_MAX_ERROR = 0.25  # ... where the standard error of their mean divergence is at most this share of the budget
_CHECKED, _CHECKED_OF_LARGE = 16, 4  # inputs on which approximate divergences are compared with exact ones
_SAME_RATIO = 0.1  # decades within which the ratio of both is taken to be the same
_USUAL_EVALUATIONS, _USUAL_AFTER_OTHERS = 4, 2  # that a search takes mostly, for what a bar shows
_MAX_ZERO_SQUARE = 1e-12  # mean square up to which weights count as zero


class FaithfulSearch:
    """Finds the faithful prior of a posterior::

        tau* = inf {tau : D(tau') <= budget for every tau' >= tau},
        D(tau) = mean over training inputs of KL(p_network(. | x) || p_posterior(. | x; tau)),

    where p_posterior is the prediction of the head that will be used. Where outputs have positions the mean is over all
    positions that count. Neither labels nor held-out data are needed. Where there is no free prior precision (the
    variances of a training), the `scale` is sought instead. With a matched temperature, every tau has the temperature
    at which the mean entropy over the same inputs is the network's: confidence is kept on average, and moves from
    inputs where the weights disagree to inputs where they agree. Where every prediction runs the whole model, the
    search goes by `ApproximateDivergence`, times the ratio of the exact to the approximate one on some of the inputs;
    where the head has none, a few of the inputs determine where the search on all of them begins. Of many outputs whose
    covariances take long, the weights' variances alone do.

    Args:
        inputs: batches of training inputs, on the model's device.
        predictor: predicts them; its posterior's temperature is the network's.
        seed: of the draws of a head that draws weights.
        matched: whether each prior precision has a temperature that matches the entropy.
        progress: whether a search shows a bar.

    Attributes:
        posterior: the predictor's.
        parameter: the hyperparameter that is sought.
        samples: how many inputs the divergence is measured on.
        tried: the trial at every decade, on all inputs, of the last search.
    """

    def __init__(
        self,
        inputs: Sequence[Batch],
        predictor: Predictor,
        *,
        seed: int = 0,
        matched: bool = False,
        progress: bool = False,
    ) -> None:
        self.posterior = posterior = predictor.posterior
        self.tried, self._progress = dict[float, Trial](), progress
        self.parameter = width_parameter_of(posterior)
        self._of_prior = self.parameter == "prior_precision"
        # at decade 0: a prior precision of 1, or the scale as it is
        self._unit = posterior.settings
        if self._of_prior and isinstance(self._unit.prior_precision, float):
            self._unit = replace(self._unit, prior_precision=1.0)
        elif self._of_prior:
            self._unit = scale_width(self._unit, self.parameter, 1 / get_width(self._unit, self.parameter))
        self._bar: SearchBar
        self._measured: dict[str, Any] = {
            "predictor": predictor,
            "seed": seed,
            "matched": matched and posterior.likelihood.logits,
            "advance": lambda inputs: self._bar.advance(inputs),
        }
        self._all = Divergence(inputs, **self._measured)
        self.samples = self._all.samples
        if not self._all.rows:
            raise nothing_counts()
        self._large = backward_dominates(posterior)

    def _on_first(self, kind: type[AnyDivergence], number: int) -> AnyDivergence:
        """The divergence on the first so many of the inputs."""
        inputs, known = self._all.first(number)
        return kind(inputs, known=known, **self._measured)

    def _by_variances_alone(self) -> Divergence | None:
        """The divergence of independent weights, where covariances of these take far less; else None."""
        posterior, blocks = self.posterior, dict[str, Block]()
        for name, block in posterior.blocks.items():
            layer = posterior.layers.get(name)
            alone = block.independent() if layer is not None and layer.outputs > _MANY_OUTPUTS else None
            blocks[name] = block if alone is None else alone
        if all(blocks[name] is block for name, block in posterior.blocks.items()):
            return None
        predictor = self._measured["predictor"].with_posterior(posterior.replaced(blocks=blocks))
        inputs, known = self._all.first(self._all.samples)
        return Divergence(inputs, known=known, **self._measured | {"predictor": predictor})

    @property
    def label(self) -> str:
        return HYPERPARAMETERS[self.parameter].label

    def widest(self, budget: float) -> Trial:
        """The widest posterior within the budget, or the narrowest tried."""
        decade = self._widest(budget)  # which begins a new `tried`
        return self.tried[decade]

    def _widest(self, budget: float) -> float:
        """The decade of `widest`."""
        weights = self._weights_decade()
        # never wider than a training made it
        low, high = weights - (_END_BELOW if self._of_prior else 0), weights + _GIVE_UP_ABOVE
        start, slope, upwards = float(weights + _START_ABOVE), None, 1.0
        search = partial(smallest_prior_within_budget, budget=budget, low=low, high=high)
        self.tried = {}
        self._divergence_at = partial(self._divergence, on=self._all, tried=self.tried)
        searches = [(_USUAL_EVALUATIONS, self.samples)]
        cheaper: Callable[[float], float] | None = None
        self._bar = SearchBar("faithful prior", "samples", self._progress, searches)
        with self._bar:
            # Where every exact divergence runs the whole model, a cheaper one finds where the search on all begins.
            if self._all.runs_the_model and self._all.samples >= _SOME_INPUTS:
                approximate = self._approximate(partial(search, start=start), budget)
                if approximate is not None:  # one set of backward passes for every prior precision
                    start, slope = search(partial(self._divergence, on=approximate, tried={}), start=start)
                    approximate.fast = False  # beside exact ones
                    self._divergence_at = self._corrected(approximate)
                    self._bar.to_come, upwards = [(_USUAL_AFTER_OTHERS, self._checked)], TOLERANCE
                else:  # a few of the inputs
                    few = self._on_first(Divergence, _FEW_INPUTS)
                    cheaper = partial(self._divergence, on=few, tried={}) if few.rows else None
                    self._bar.to_come = [
                        (_USUAL_EVALUATIONS, _FEW_INPUTS),
                        (_USUAL_AFTER_OTHERS, self.samples),
                    ]
            elif (
                self._of_prior
                and max(map(attrgetter("outputs"), self.posterior.layers.values())) > _MANY_OUTPUTS
            ):
                independent = self._by_variances_alone()
                if independent is not None:
                    cheaper = partial(self._divergence, on=independent, tried={})
                    self._bar.to_come.append((_USUAL_AFTER_OTHERS, self.samples))
            self._bar.begin_search()
            if cheaper is not None:
                start, slope = search(cheaper, start=start)
                self._bar.begin_search()
                upwards = TOLERANCE
            decade, _ = search(self._divergence_at, start=start, slope=slope, upwards=upwards)
        self._all.require(self.tried[decade].objective)
        return decade

    def _approximate(
        self, search: Callable[[Callable[[float], float]], Any], budget: float
    ) -> ApproximateDivergence | None:
        """The divergence by one set of backward passes, where the head has that; of a large network on some inputs,
        where these are enough for the divergence at the prior precision that `search` finds.
        """
        if not self._of_prior:
            return None
        for number in sorted({_SOME_INPUTS if self._large else self._all.samples, self._all.samples}):
            self._bar.to_come.insert(0, (1, number))
            self._bar.begin_search()
            self._bar.begin_evaluation()
            found = self._on_first(ApproximateDivergence, number)
            if not found.differentiate(self._unit):
                return None
            if number < self._all.samples:
                decade, _ = search(partial(self._divergence, on=found, tried={}))
                self._divergence(decade, found, {})
                if not found.by_row.std() / number**0.5 <= _MAX_ERROR * budget:
                    continue
            self.samples = number
            return found
        return None

    @property
    def _checked(self) -> int:
        """How many inputs an approximate divergence is compared with the exact one on."""
        return min(_CHECKED_OF_LARGE if self._large else _CHECKED, self._all.samples)

    def _corrected(self, approximate: ApproximateDivergence) -> Callable[[float], float]:
        """The approximate divergence times the ratio of the exact to the approximate one on some of the inputs: where
        these are all inputs, the exact one.
        """
        some = self._all if self._checked == self._all.samples else self._on_first(Divergence, self._checked)
        exact = partial(self._divergence, on=some, tried=self.tried if some is self._all else {})
        if some is self._all:
            return exact

        ratios = dict[float, float]()

        def corrected(decade: float) -> float:
            if decade not in self.tried:
                of_all = self._try(decade, approximate, {})
                near = min(ratios, key=lambda other: abs(other - decade), default=inf)
                if abs(near - decade) > _SAME_RATIO:
                    near, divergence = decade, exact(decade)
                    of_some = float(approximate.by_row[: some.samples].mean())
                    if not isfinite(divergence) or of_some <= _ROUNDING_NATS:
                        self.tried[decade] = Trial(of_all.settings, divergence)
                        return divergence
                    ratios[decade] = divergence / of_some
                self.tried[decade] = Trial(of_all.settings, of_all.objective * ratios[near])
            return self.tried[decade].objective

        return corrected

    def run(self, budget: float) -> Trials:
        """The trials, of which the widest posterior within the budget is chosen; if there is none, it warns and chooses
        the narrowest tried.
        """
        decade = self._widest(budget)
        divergence, edges = self.tried[decade].objective, list[str]()
        if not divergence <= budget:
            warn_user(
                f"No {self.label} keeps the predictions within {budget:g} nats of the network's own: the narrowest "
                f"posterior that was tried is {divergence:.3g} nats from them, and is kept. Where any change of the "
                f"weights breaks a model, layers='last' or head='linearized' serves it better."
            )
        if self._of_prior and decade <= self._weights_decade() - _END_BELOW:
            if self._all.flat:
                decade = self._size_of_weights()
            else:
                edges.append(f"{self.label} = 10^{decade:g}")
        trials = Trials("faithful", (self.parameter, "temperature"), list(self.tried.values()), at_edge=edges)
        trials.chosen = self.tried[decade]
        return trials

    def _size_of_weights(self) -> float:
        """The decade of the weights' size, for where nothing bounds the prior; warns."""
        decade = self._weights_decade()
        divergence = self._divergence_at(decade)
        warn_user(
            f"The model's outputs hardly depend on its inputs, so that the size of the trained weights set the "
            f"{self.label} ({divergence:.1g} nats from the network's own predictions). Check that the weights are the "
            f"trained ones and that the inputs are scaled as in the training, or give prior_precision a number."
        )
        return decade

    def _weights_decade(self) -> float:
        """See `_decade_of_weights`; 0 for a scale, as the training left it."""
        return _decade_of_weights(self.posterior) if self._of_prior else 0.0

    def _divergence(self, decade: float, on: Divergence, tried: dict[float, Trial]) -> float:
        """The divergence at a decade on some inputs."""
        return self._try(decade, on, tried).objective

    def _try(self, decade: float, on: Divergence, tried: dict[float, Trial]) -> Trial:
        """The divergence at a decade on some inputs, at the network's temperature or the matched one; the trial is
        remembered.
        """
        if decade not in tried:
            self._bar.begin_evaluation()
            settings = scale_width(self._unit, self.parameter, 10.0**decade)
            trial = on.evaluate(settings)
            tried[decade] = trial if isfinite(trial.objective) else Trial(settings, inf)
        return tried[decade]


def _decade_of_weights(posterior: Posterior) -> float:
    """The decade of the inverse mean square of the trained weights."""
    means = posterior.mean.values()
    mean_square = sum(float(as_double(m.detach()).square().sum()) for m in means)
    mean_square /= sum(m.numel() for m in means)
    return float(ceil(-log10(mean_square))) if mean_square > _MAX_ZERO_SQUARE else 0.0


def widest_decade(posterior: Posterior) -> float:
    """The decade of the prior precision at which the search for a faithful one ends."""
    return _decade_of_weights(posterior) - _END_BELOW


@full_precision()
def set_faithful(
    inputs: Sequence[Batch],
    predictor: Predictor,
    budget: float,
    *,
    seed: int = 0,
    matched: bool = False,
    progress: bool = False,
) -> Posterior:
    """The predictor's posterior with the faithful prior (or scale) and its temperature, and a record of how far the
    predictions moved.

    Args:
        inputs: training inputs.
        predictor: predicts them; its posterior's record names its head.
        budget: the largest divergence, in nats.
        seed: of the draws.
        matched: whether each prior precision has a temperature that matches the entropy.
        progress: whether to show a bar.
    """
    posterior = predictor.posterior
    how, earlier = dict(posterior.history.tuning), posterior.history.faithful
    if earlier is not None and posterior.temperature == earlier.temperature != earlier.network_temperature:
        # that search set it: take it back
        posterior = posterior.at(replace(posterior.settings, temperature=earlier.network_temperature))
        predictor = predictor.with_posterior(posterior)
        how.pop("temperature", None)
    network_temperature = posterior.temperature
    search = FaithfulSearch(inputs, predictor, seed=seed, matched=matched, progress=progress)
    trials = search.run(budget)
    assert trials.chosen is not None
    divergence, evaluations = trials.chosen.objective, len(trials.trials)
    posterior = posterior.at(trials.chosen.settings)
    how[search.label] = (
        f"faithful through head={predictor.head!r}: divergence {divergence:.3g} of at most {budget:g} nats, on "
        f"{search.samples} training inputs predicted {'once' if evaluations == 1 else f'{evaluations} times'}"
        f"{'; the widest prior that is looked at' if trials.at_edge else ''}"
    )
    if posterior.temperature != network_temperature:
        how["temperature"] = "the one at which the mean entropy on the same inputs is the network's"
    record = FaithfulRecord(
        head=predictor.head,
        value=posterior.settings.plain()[search.parameter],
        temperature=posterior.temperature,
        network_temperature=network_temperature,
        divergence=divergence,
        budget=float(budget),
        settings=other_settings(posterior),
    )
    history = replace(posterior.history, tuning=how, faithful=record, trials=trials)
    return posterior.replaced(history=history)


def other_settings(posterior: Posterior) -> SettingsRecord:
    """The hyperparameters that a faithful prior (or scale) belongs to."""
    names = [name for name, about in HYPERPARAMETERS.items() if about.of_weights and not about.by_layer]
    return SettingsRecord.of(
        posterior.settings, [name for name in names if name != posterior.width_parameter]
    )
