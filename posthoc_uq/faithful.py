"""The faithful prior: the widest posterior whose predictions on the training data stay near the network's.

    tau* = inf {tau : D(tau') <= budget for every tau' >= tau},
    D(tau) = mean over training inputs of KL(p_network(. | x) || p_posterior(. | x; tau)),

where p_posterior is the prediction of the head that will be used. Where outputs have positions the mean is over all
positions that count (`posthoc_uq.likelihoods.counted`). Neither labels nor held-out data are needed. Where no
prior precision can be set (the variances of a training), the `scale` is set instead. With a matched temperature, every
tau has the temperature at which the mean entropy over the same inputs is the network's own: confidence is kept on
average, and moves from inputs where the weights disagree to inputs where they agree. Where every prediction runs the
whole model, a few of the inputs say where the search on all of them begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, log10

from posthoc_uq.comparison import Comparison
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.inference.evidence import Trials
from posthoc_uq.likelihoods.counted import nothing_counts
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.settings import ABOUT
from posthoc_uq.progress import Progress
from posthoc_uq.values import POSITIVE
from posthoc_uq.warned import warn_user
from posthoc_uq.widest import TOLERANCE, widest_within

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
