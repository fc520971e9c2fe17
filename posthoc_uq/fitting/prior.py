"""The prior precision by faithfulness: how far predictions on training inputs may be from the network's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf, isfinite, log10
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import POSITIVE
from posthoc_uq.core.progress import Progress, counted
from posthoc_uq.heads.features import FeatureCache
from posthoc_uq.heads.predictor import Predictor, divisor_of
from posthoc_uq.layers.proof import PROBE_SAMPLES, count_samples
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.prediction import at_least_float32, by_input
from posthoc_uq.likelihoods.weights import counted_positions, nothing_counts
from posthoc_uq.posteriors.evidence import Trials
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import ABOUT

# Where a divergence that falls with the prior precision meets its budget, in few evaluations.
#
# Near the trained weights a divergence grows at most as the square of the variances, so that its logarithm
# falls by at most 2 for each decade of the prior precision. A step that assumes this slope never passes the
# budget there; later steps take the slope that was seen.

TOLERANCE = 0.05  # decades of the prior precision
_SLOPES = (0.3, 2.0)  # decades of divergence for each decade of prior precision that a step may assume
_AIM = 0.4 * TOLERANCE  # decades by which a step ends above the place where the budget should be met
_LEAST_FACTOR = 1e-9  # nats below which a divergence may be rounding
_NEAR = 1.0  # decades: a slope seen across more says little of its end

Divergence = Callable[[float], float]


def widest_within(
    divergence: Divergence,
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

    Args:
        divergence: in nats, of a decade; it remembers its values.
        budget: the largest divergence allowed.
        start: the decade that is tried first; where it is outside the budget, those above it follow.
        low: the lowest decade that is tried.
        high: the decade at which the search upwards gives up, and which is returned although it is outside.
        slope: decades by which the divergence is known to fall for each decade, near `start`.
        upwards: the first step upwards, in decades; the following ones are longer.
    """

    def logarithm(decade: float) -> float:
        return log10(max(divergence(decade), min(_LEAST_FACTOR, budget / 10)) / budget)

    def between(below: float, above: float) -> float:
        """Decades by which the divergence falls for each decade; infinite where it is so below."""
        return (logarithm(below) - logarithm(above)) / (above - below) if isfinite(below) else inf

    flat, steep = (0.0, _SLOPES[1]) if slope is None else (slope, _usable(slope))
    inside, outside = start, -inf
    while not divergence(inside) <= budget:
        if inside >= high:
            return inside, slope
        step = max(upwards, min(logarithm(inside) / steep + _AIM, 1.0))
        inside, outside, upwards = min(high, inside + step), inside, 2 * upwards
    tried = 0
    while inside > low and inside - outside > TOLERANCE:
        left, across = -logarithm(inside), between(outside, inside)
        if left <= TOLERANCE * min(flat, across):
            break
        if not isfinite(outside):
            # where it hardly grows, a whole decade
            least = 1.0 if flat < _SLOPES[0] else TOLERANCE / 2
            point = max(low, inside - max(left / steep - _AIM, least))
        elif tried % 3 == 2:
            point = (inside + outside) / 2
        else:
            point = _crossing(left / across, outside, inside)
        if divergence(point) <= budget:
            flat, slope = between(point, inside), None
            steep = _usable(flat)
            if inside - point <= _NEAR:
                slope = flat
            inside = point
        else:
            outside = point
        tried += isfinite(outside)
    return inside, slope


def _usable(slope: float) -> float:
    """A slope that a step may assume."""
    return min(max(slope, _SLOPES[0]), _SLOPES[1])


def _crossing(step: float, outside: float, inside: float) -> float:
    """A point a step below `inside` and a little nearer to it, but not near either end; the middle without a step."""
    width = inside - outside
    if step <= 0:
        return (inside + outside) / 2
    return min(max(inside - step + _AIM, outside + 0.1 * width), inside - 0.1 * width)


# How far the predictions of a posterior are from the network's own, on given inputs.

TEMPERATURES = (0.3, 3.0)  # the interval in which a matched temperature is searched
_HALVINGS = 12  # of that interval
_FLAT = 0.05  # standard deviation of logits over inputs: predictions then differ by a thousandth of a nat
_POSITIONS, _OUTPUTS = 4096, 2**22  # in all, of inputs whose outputs have positions ...
_LEAST_INPUTS = 16  # ... but so many inputs in any case


class Comparison:
    """The network's outputs on some inputs, to be compared with predictions under many settings of its posterior.

    Args:
        posterior: its present temperature is the network's.
        inputs: batches, on the model's device.
        predictor: predicts them.
        seed: of the draws of a head that draws weights.
        matched: whether predictions have the temperature at which their mean entropy is the network's.
        predicted: is told how many inputs were predicted, as the work on them goes on.

    Attributes:
        samples: how many inputs there are.
        rows: how many predictions count: one for each input, or for each of its positions that counts.
        inputs: as given, or the first of them where outputs have many positions.
    """

    def __init__(
        self,
        posterior: Posterior,
        inputs: Sequence[Batch],
        predictor: Predictor,
        *,
        seed: int,
        matched: bool,
        predicted: Callable[[int], None],
    ) -> None:
        self._posterior, self._predictor, self._seed = posterior, predictor, seed
        self._predicted = predicted
        self._temperature, self._matched = posterior.temperature, matched
        with torch.no_grad():
            model = replicate(cast(Any, posterior.model), posterior.trained_mean)
            self.inputs = inputs = _enough(inputs, model, predictor)
            self._cache = FeatureCache(predictor, lambda: ((b, b) for b in inputs))
            pairs = self._cache.outputs(lambda batch: batch.copied().call(model))
            self._compared = [_compared(outputs, batch, posterior) for outputs, batch in pairs]
        self._rows = [own.rows for own in self._compared]
        self.rows = sum(self._rows)
        self.samples = sum(len(own.outputs) for own in self._compared)

    @property
    def runs_the_model(self) -> bool:
        """Whether a prediction of the inputs runs all of the model, and not only the part that has a posterior."""
        return self._cache.nbytes == 0

    @property
    def flat(self) -> bool:
        """Whether the network's logits hardly differ from input to input, so that its predictions say nothing."""
        if not self._posterior.likelihood.logits or self.samples < 2:
            return False
        spreads = [own.outputs for own in self._compared if own.layout is None]
        if not spreads or len({outputs.shape[1:] for outputs in spreads}) > 1:
            return False
        return float(as_double(torch.cat(spreads)).std(0).max()) < _FLAT

    def at_present(self) -> tuple[float, float]:
        """The mean divergence in nats at the posterior's present settings but the temperature, infinite where there is
        none; and the temperature, which the posterior has from then on.
        """
        self._posterior.temperature = temperature = self._temperature
        value = inf
        try:
            self._predictor.refresh(self._seed)
            with torch.no_grad():
                distributions, of_batches = list[Any](), self._cache.distributions()
                for own in self._compared:
                    with counted(len(own.outputs), self._predicted):
                        distributions.append(next(of_batches)[0])
                temperature = self._match(distributions) if self._matched else temperature
                self._posterior.temperature = temperature
                value = self._mean(distributions, self._posterior.observation.divergence)
        except NonFiniteError:  # draws of extreme weights, or a precision that cannot be factorised
            self._posterior.temperature = temperature
        return (value if isfinite(value) else inf), temperature

    def _mean(self, distributions: Sequence[Any], score: Callable[[Tensor, Any], Tensor]) -> float:
        """Mean of a score of outputs and predictions over all inputs, or positions that count."""
        total = 0.0
        for own, rows, distribution in zip(self._compared, self._rows, distributions, strict=True):
            if rows:
                total += rows * float(own.mean(score, self._predictor.prediction_of(distribution)))
        return total / self.rows

    def _match(self, distributions: Sequence[Any]) -> float:
        """The temperature at which the mean entropy is the network's, or the present one if there is none."""
        network_entropy = self._network_entropy()

        def excess(factor: float) -> float:
            self._posterior.temperature = self._temperature * factor
            return self._mean(distributions, lambda _, p: by_input(p.entropy())) - network_entropy

        low, high = (log10(bound) for bound in TEMPERATURES)
        if not (excess(10**low) <= 0.0 <= excess(10**high)):  # NaN included
            return self._temperature
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if excess(10**middle) > 0.0:
                high = middle
            else:
                low = middle
        return self._temperature * 10.0 ** ((low + high) / 2)

    def _network_entropy(self) -> float:
        entropy = self._posterior.likelihood.entropy
        pairs = [pair for pair in zip(self._compared, self._rows, strict=True) if pair[1]]
        total = sum(rows * float(own.mean(lambda outputs, _: entropy(outputs), None)) for own, rows in pairs)
        return total / self.rows


def _enough(inputs: Sequence[Batch], model: nn.Module, predictor: Predictor) -> Sequence[Batch]:
    """The first of the inputs, with some thousand positions in all that count: each position's prediction counts by
    itself, and all outputs are kept in memory and predicted many times. Without positions all inputs.
    """
    chosen: list[Batch] = []
    taken = positions = numbers = 0
    for batch in inputs:
        samples = count_samples(batch)
        probe = batch.narrow(0, min(samples, PROBE_SAMPLES), samples)
        with predictor.explaining(batch):
            outputs = probe.copied().call(model)
        layout = predictor.posterior.likelihood.positions_of(outputs)
        if layout is None:
            return inputs
        whole = outputs[:1].expand(samples, *outputs.shape[1:])
        sums = counted_positions(layout, whole, batch).sum(1).cumsum(0).cpu() + positions
        places = torch.arange(1, samples + 1, device="cpu")
        enough = (sums <= _POSITIONS) & (places * outputs[0].numel() + numbers <= _OUTPUTS)
        fitting = int((enough | (places + taken <= _LEAST_INPUTS)).sum())
        if fitting:
            chosen.append(batch if fitting == samples else batch.narrow(0, fitting, samples))
        if fitting < samples:
            break
        taken, positions, numbers = taken + samples, int(sums[-1]), numbers + samples * outputs[0].numel()
    return chosen


@dataclass(frozen=True)
class _Compared:
    """The network's outputs for one batch.

    Attributes:
        outputs: at least in float32, divided by the temperature.
        layout: where they have positions.
        counted: which of their rows count; None for all.
    """

    outputs: Tensor
    layout: Layout | None
    counted: Tensor | None

    @property
    def rows(self) -> int:
        """How many predictions count: the positions, or the samples."""
        if self.counted is not None:
            return int(self.counted.sum())
        return len(self.outputs if self.layout is None else self.layout.rows(self.outputs))

    def mean(self, score: Callable[[Tensor, Any], Tensor], prediction: Any) -> Tensor:
        """The mean of a score of outputs and predictions, over what counts."""
        outputs = self.outputs
        if self.counted is not None and self.layout is not None:
            outputs = self.layout.rows(outputs)[self.counted]
            prediction = None if prediction is None else prediction.rows.picked(self.counted)
        return as_double(score(outputs, prediction)).mean()


def _compared(outputs: Tensor, batch: Batch, posterior: Posterior) -> _Compared:
    outputs = at_least_float32(outputs.detach()) / divisor_of(posterior)
    layout = posterior.likelihood.positions_of(outputs)
    counted = None if layout is None else counted_positions(layout, outputs, batch).flatten()
    return _Compared(outputs, layout, None if counted is None or bool(counted.all()) else counted)


# The faithful prior: the widest posterior whose predictions on the training data stay near the network's.
#
#     tau* = inf {tau : D(tau') <= budget for every tau' >= tau},
#     D(tau) = mean over training inputs of KL(p_network(. | x) || p_posterior(. | x; tau)),
#
# where p_posterior is the prediction of the head that will be used. Where outputs have positions the mean is
# over all positions that count (`posthoc_uq.likelihoods.counted`). Neither labels nor held-out data are
# needed. Where no prior precision can be set (the variances of a training), the `scale` is set instead. With
# a matched temperature, every tau has the temperature at which the mean entropy over the same inputs is the
# network's own: confidence is kept on average, and moves from inputs where the weights disagree to inputs
# where they agree. Where every prediction runs the whole model, a few of the inputs say where the search on
# all of them begins.

DIVERGENCE = 0.002  # nats: the default budget
GUARDED = 0.02  # nats: where the likelihood of held-out data guards against harm
_ABOVE = 3  # decades above the weights' own precision at which a search begins
_BELOW = 2  # decades below it at which a search ends: weights of ten times their own size
_UP = 12  # decades above it at which a search gives up
_FEW = 8  # inputs on which a search begins where each prediction runs the whole model
# How many evaluations a search mostly takes, for what a bar shows: on all inputs without a look at a few, and with it.
_USUAL, _USUAL_AFTER_FEW, _USUAL_OF_FEW = 4, 2, 4
_ZERO = 1e-12  # mean square up to which weights count as zero


@dataclass(frozen=True)
class Faithful:
    """Ask `posthoc_uq.fit` for the widest posterior whose predictions stay near the network's own.

    Attributes:
        divergence: how far they may be, as a mean over a few hundred training inputs, in nats. None leaves the
            variances of a training as they are.
    """

    divergence: float | None = DIVERGENCE

    def __post_init__(self) -> None:
        if self.divergence is not None:
            budget = POSITIVE("divergence, a budget in nats,", self.divergence)
            object.__setattr__(self, "divergence", budget)


@dataclass
class Reached:
    """The result of a search for the faithful prior.

    Attributes:
        divergence: mean over the inputs, in nats, at the values that were set.
        budget: the largest divergence allowed, in nats.
        inputs: how many inputs it was measured on.
        evaluations: how often they were predicted.
        at_edge: whether the search ended at the widest prior it tries.
    """

    divergence: float
    budget: float
    inputs: int
    evaluations: int
    at_edge: bool = False

    def __str__(self) -> str:
        edge = "; the widest prior that is looked at" if self.at_edge else ""
        times = "once" if self.evaluations == 1 else f"{self.evaluations} times"
        return (
            f"divergence {self.divergence:.3g} of at most {self.budget:g} nats, on {self.inputs} training inputs "
            f"predicted {times}{edge}"
        )


class FaithfulSearch:
    """Finds the faithful prior of a posterior, and sets it.

    Args:
        posterior: its prior precision, or scale, is set; its present temperature is the network's.
        inputs: batches of training inputs, on the model's device.
        predictor: predicts them.
        seed: of the draws of a head that draws weights.
        matched: whether each prior precision has its own temperature.
        progress: whether a search shows a bar.
    """

    def __init__(
        self,
        posterior: Posterior,
        inputs: Sequence[Batch],
        predictor: Predictor,
        *,
        seed: int = 0,
        matched: bool = False,
        progress: bool = False,
    ) -> None:
        self.posterior, self.trials = posterior, Trials()
        self._evaluated = dict[float, tuple[float, float]]()
        self._progress = progress
        self._bar = Progress("faithful prior", "samples", False)
        self.name = widening(posterior)
        self._prior = posterior.prior_precision if posterior.takes_prior else None
        self._scale = posterior.scale
        matched = matched and posterior.likelihood.logits

        def comparison(some: Sequence[Batch]) -> Comparison:
            return Comparison(posterior, some, predictor, seed=seed, matched=matched, predicted=self._advance)

        self._all, self._few = comparison(inputs), None
        if not self._all.rows:
            raise nothing_counts()
        if self._all.runs_the_model and self._all.samples >= 4 * _FEW:
            few = comparison(_first(self._all.inputs, _FEW))
            self._few = few if few.rows else None

    def run(self, budget: float) -> Reached:
        """Set the widest posterior within the budget; if there is none, warn and set the narrowest tried."""
        decade = self.set_widest(budget)
        divergence, _ = self._evaluated[decade]
        self.trials.chosen = self.trials.trials[list(self._evaluated).index(decade)]
        if not divergence <= budget:
            warn_user(
                f"No {self._label} keeps the predictions within {budget:g} nats of the network's own: the narrowest "
                f"posterior that was tried is {divergence:.3g} nats from them, and is kept. A model that any change of "
                f"the weights breaks is better served by layers='last', or head='linearized'."
            )
        at_edge = self._prior is not None and decade <= self._weights_decade() - _BELOW
        if at_edge and self._all.flat:
            at_edge, decade = False, self._own_size()
            divergence, _ = self._evaluated[decade]
        if at_edge:
            self.trials.at_edge.append(f"{self._label} = 10^{decade:g}")
        return Reached(divergence, budget, self._all.samples, len(self._evaluated), at_edge)

    def _own_size(self) -> float:
        """Set weights of their own size, where nothing says how wide they may be, and warn."""
        decade = self._weights_decade()
        divergence = self._divergence(decade, self._all, self._evaluated)
        self._set(decade)
        self.posterior.temperature = self._evaluated[decade][1]
        self.trials.chosen = self.trials.trials[list(self._evaluated).index(decade)]
        warn_user(
            f"The model's outputs hardly depend on its inputs, so that even the widest {self._label} keeps the "
            f"predictions within the budget; it was set by the size of the trained weights ({divergence:.1g} nats from "
            f"the network's own). Check that the weights are the trained ones and that the inputs are scaled as in the "
            f"training, or give prior_precision a number."
        )
        return decade

    def set_widest(self, budget: float) -> float:
        """Set the widest posterior within the budget, or the narrowest tried, and return its decade."""
        total = self._expected(self._few or self._all, 0)
        with Progress("faithful prior", "samples", self._progress, total) as self._bar:
            decade = self._widest(budget)
        self._set(decade)
        self.posterior.temperature = self._evaluated[decade][1]
        return decade

    def _advance(self, inputs: int) -> None:
        self._bar.advance(inputs)

    def _expected(self, comparison: Comparison, evaluated: int) -> int:
        """How many predictions an evaluation on these inputs and those after it may take: the usual number of
        evaluations, but always one more than this.
        """
        of_all = _USUAL if self._few is None else _USUAL_AFTER_FEW
        if comparison is self._all:
            return (1 + max(1, of_all - evaluated - 1)) * self._all.samples
        of_few = 1 + max(1, _USUAL_OF_FEW - evaluated - 1)
        return of_few * comparison.samples + of_all * self._all.samples

    @property
    def _label(self) -> str:
        return ABOUT[self.name].label

    def _widest(self, budget: float) -> float:
        """Search downwards from where the divergence is about zero, or from what a few of the inputs say."""
        weights = self._weights_decade()
        # never wider than a training made it
        low, high = weights - (_BELOW if self._prior is not None else 0), weights + _UP
        start, slope, upwards = float(weights + _ABOVE), None, 1.0
        if self._few is not None:
            of_few = partial(self._divergence, comparison=self._few, evaluated={})
            start, slope = widest_within(of_few, budget, start, low, high)
            upwards = TOLERANCE
        self._evaluated, self.trials = {}, Trials()
        of_all = partial(self._divergence, comparison=self._all, evaluated=self._evaluated)
        return widest_within(of_all, budget, start, low, high, slope=slope, upwards=upwards)[0]

    def _weights_decade(self) -> float:
        """The decade of the inverse mean square of the trained weights; 0 for a scale, as the training left it."""
        if self._prior is None:
            return 0.0
        means = self.posterior.mean.values()
        mean_square = sum(float(as_double(m.detach()).square().sum()) for m in means)
        mean_square /= sum(m.numel() for m in means)
        return float(ceil(-log10(mean_square))) if mean_square > _ZERO else 0.0

    def _set(self, decade: float) -> None:
        """Set the prior precision (of several, the geometric mean) to ``10^decade``, or multiply the scale by it."""
        posterior, prior = self.posterior, self._prior
        if prior is None:
            posterior.scale = self._scale * 10.0**decade
        elif isinstance(prior, dict):
            shift = sum(log10(value) for value in prior.values()) / len(prior)
            posterior.prior_precision = {name: v * 10.0 ** (decade - shift) for name, v in prior.items()}
        else:
            posterior.prior_precision = 10.0**decade

    def _divergence(
        self, decade: float, comparison: Comparison, evaluated: dict[float, tuple[float, float]]
    ) -> float:
        """The divergence at a decade on some inputs; it and its temperature are remembered."""
        if decade not in evaluated:
            self._bar.expect(self._bar.done + self._expected(comparison, len(evaluated)))
            self._set(decade)
            evaluated[decade] = value, temperature = comparison.at_present()
            if comparison is self._all:
                present = getattr(self.posterior, self.name)
                self.trials.trials.append(
                    {self._label: present, "temperature": temperature, "divergence": value}
                )
        return evaluated[decade][0]


def _first(inputs: Sequence[Batch], number: int) -> list[Batch]:
    """The first so many of the inputs, or all."""
    chosen, taken = list[Batch](), 0
    for batch in inputs:
        samples = count_samples(batch)
        part = min(samples, number - taken)
        chosen.append(batch.narrow(0, part, samples))
        taken += part
        if taken == number:
            break
    return chosen


def widening(posterior: Posterior) -> str:
    """The hyperparameter by which a posterior is made wider or narrower: ``"prior_precision"`` or ``"scale"``.

    Raises:
        PosthocUQError: it has neither.
    """
    name = posterior.widening
    if name is None:
        instead = (
            "; held-out data can tune its temperature, by criterion='likelihood'"
            if posterior.likelihood.logits
            else ""
        )
        raise PosthocUQError(
            f"A posterior by method={posterior.method!r} has neither a prior precision nor a scale by which it could "
            f"be made wider or narrower{instead}."
        )
    return name
