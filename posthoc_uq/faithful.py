"""The faithful prior: the widest posterior whose predictions on the training data stay near the network's.

    tau* = inf {tau : D(tau') <= budget for every tau' >= tau},
    D(tau) = mean over training inputs of KL(p_network(. | x) || p_posterior(. | x; tau)),

where p_posterior is the prediction of the head that will be used. Where outputs have positions the mean is over all
positions that count (`posthoc_uq.likelihoods.counted`). Neither labels nor held-out data are needed. Where no
prior precision can be set (the variances of a training), the `scale` is set instead. With a matched temperature, every
tau has the temperature at which the mean entropy over the same inputs is the network's own: confidence is kept on
average, and moves from inputs where the weights disagree to inputs where they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, log10
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.dryrun import PROBE_SAMPLES, count_samples
from posthoc_uq.devices import as_double
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.heads.features import FeatureCache
from posthoc_uq.heads.prediction import divisor_of
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.inference.evidence import Trials
from posthoc_uq.likelihoods.counted import counted_positions, nothing_counts
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.settings import ABOUT
from posthoc_uq.predictions.layout import Layout
from posthoc_uq.predictions.samples import at_least_float32, by_input
from posthoc_uq.replica import replicate
from posthoc_uq.values import POSITIVE
from posthoc_uq.warned import warn_user
from posthoc_uq.widest import widest

DIVERGENCE = 0.002  # nats: the default budget
GUARDED = 0.02  # nats: where the likelihood of held-out data guards against harm
TEMPERATURES = (0.3, 3.0)  # the interval in which a matched temperature is searched
_ABOVE = 3  # decades above the weights' own precision at which a search begins
_BELOW = 2  # decades below it at which a search ends: weights of ten times their own size
_UP = 12  # decades above it at which a search gives up
_ZERO = 1e-12  # mean square up to which weights count as zero
_POSITIONS, _OUTPUTS = 4096, 2**22  # in all, of inputs whose outputs have positions ...
_LEAST = 16  # ... but so many inputs in any case
_HALVINGS = 12  # of the interval of temperatures


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
        return (
            f"divergence {self.divergence:.3g} of at most {self.budget:g} nats, on {self.inputs} training inputs "
            f"predicted {self.evaluations} times{edge}"
        )


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
        fitting = int((enough | (places + taken <= _LEAST)).sum())
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


class FaithfulSearch:
    """Finds the faithful prior of a posterior, and sets it.

    Args:
        posterior: its prior precision, or scale, is set; its present temperature is the network's.
        inputs: batches of training inputs, on the model's device.
        predictor: predicts them.
        seed: of the draws of a head that draws weights.
        matched: whether each prior precision has its own temperature.
    """

    def __init__(
        self,
        posterior: Posterior,
        inputs: Sequence[Batch],
        predictor: Predictor,
        *,
        seed: int = 0,
        matched: bool = False,
    ) -> None:
        self.posterior, self.predictor, self.trials = posterior, predictor, Trials()
        self._temperature = posterior.temperature
        self.name = widening(posterior)
        self.matched = matched and posterior.likelihood.logits
        self._prior = posterior.prior_precision if posterior.takes_prior else None
        self._scale = posterior.scale
        with torch.no_grad():
            model = replicate(cast(Any, posterior.model), posterior.centre)
            inputs = _enough(inputs, model, predictor)
            self._cache, self._seed = FeatureCache(predictor, lambda: ((b, b) for b in inputs)), seed
            pairs = self._cache.outputs(lambda batch: batch.copied().call(model))
            self._compared = [_compared(outputs, batch, posterior) for outputs, batch in pairs]
        self._rows = [own.rows for own in self._compared]
        if not sum(self._rows):
            raise nothing_counts()
        self._samples = sum(len(own.outputs) for own in self._compared)

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
        if at_edge:
            self.trials.at_edge.append(f"{self._label} = 10^{decade:g}")
        return Reached(divergence, budget, self._samples, len(self._evaluated), at_edge)

    def set_widest(self, budget: float) -> float:
        """Set the widest posterior within the budget, or the narrowest tried, and return its decade."""
        decade = self._widest(budget)
        self._set(decade)
        self.posterior.temperature = self._evaluated[decade][1]
        return decade

    @property
    def _label(self) -> str:
        return ABOUT[self.name].label

    def _widest(self, budget: float) -> float:
        """Search downwards from where the divergence is about zero."""
        self._evaluated: dict[float, tuple[float, float]] = {}
        weights = self._weights_decade()
        # never wider than a training made it
        low = weights - (_BELOW if self._prior is not None else 0)
        return widest(self._divergence, budget, weights + _ABOVE, low, weights + _UP)

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

    def _divergence(self, decade: float) -> float:
        """The divergence at a decade and its temperature; both are remembered."""
        if decade in self._evaluated:
            return self._evaluated[decade][0]
        self._set(decade)
        self.posterior.temperature = self._temperature
        value, temperature = float("inf"), self._temperature
        try:
            self.predictor.refresh(self._seed)
            with torch.no_grad():
                distributions = [distribution for distribution, _ in self._cache.distributions()]
                temperature = self._match(distributions) if self.matched else temperature
                self.posterior.temperature = temperature
                value = self._mean(distributions, self.posterior.likelihood.divergence)
        except NonFiniteError:  # draws of extreme weights, or a precision that cannot be factorised
            pass
        value = value if isfinite(value) else float("inf")
        self._evaluated[decade] = value, temperature
        present = getattr(self.posterior, self.name)
        self.trials.trials.append({self._label: present, "temperature": temperature, "divergence": value})
        return value

    def _mean(self, distributions: Sequence[Any], score: Callable[[Tensor, Any], Tensor]) -> float:
        """Mean of a score of outputs and predictions over all inputs, or positions that count."""
        total = 0.0
        for own, rows, distribution in zip(self._compared, self._rows, distributions, strict=True):
            if rows:
                total += rows * float(own.mean(score, self.predictor.prediction_of(distribution)))
        return total / sum(self._rows)

    def _match(self, distributions: Sequence[Any]) -> float:
        """The temperature at which the mean entropy is the network's, or the present one if there is none."""
        network_entropy = self._network_entropy()

        def excess(factor: float) -> float:
            self.posterior.temperature = self._temperature * factor
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
        entropy = self.posterior.likelihood.entropy
        pairs = [pair for pair in zip(self._compared, self._rows, strict=True) if pair[1]]
        total = sum(rows * float(own.mean(lambda outputs, _: entropy(outputs), None)) for own, rows in pairs)
        return total / sum(self._rows)


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
