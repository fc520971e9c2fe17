"""What all searches for hyperparameters share: the record of their trials, the bar, the search over decades."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scipy.optimize import minimize_scalar

from posthoc_uq.core.errors import warn_user
from posthoc_uq.core.progress import Progress
from posthoc_uq.posteriors.settings import ABOUT, Hyperparameters

Criterion = Literal["faithful", "likelihood", "evidence"]
"""By what `posthoc_uq.tune` may choose hyperparameters; `CRITERIA` has the facts about each."""


@dataclass(frozen=True)
class CriterionFacts:
    """The facts about a criterion that trials, files, `wrap` and the command line need; `posthoc_uq.fitting.tune` has
    its search.

    Attributes:
        objective: what the trials are compared by.
        best: which trial is the best: ``min`` or ``max`` of the objective; None where the goal is another one.
        data: what it needs, in words; empty for nothing.
        labels: whether these data need their targets.
        by_predictions: whether it chooses by the predictions of a head, to which the hyperparameters then belong.
    """

    objective: str
    best: Callable[..., Any] | None
    data: str
    labels: bool
    by_predictions: bool


CRITERIA: dict[Criterion, CriterionFacts] = {
    "faithful": CriterionFacts(
        "divergence", None, "training inputs", False, True
    ),  # the widest within a budget
    "likelihood": CriterionFacts("validation NLL", min, "held-out data with targets", True, True),
    "evidence": CriterionFacts("log marginal likelihood", max, "", False, False),
}


@dataclass(frozen=True)
class Trial:
    """One evaluation of a search.

    Attributes:
        settings: the hyperparameters that were tried; in a search for one layer's prior precision, that value alone.
        objective: ``"faithful"``: the divergence from the network in nats. ``"likelihood"``: the validation NLL, a mean
            over all labels that count, as in `posthoc_uq.evaluate`. ``"evidence"``: the log marginal likelihood; for a
            prior precision less the log likelihood, which does not depend on it.
    """

    settings: Hyperparameters
    objective: float


@dataclass(repr=False)
class Trials:
    """All trials of a search; prints itself, the chosen trial first.

    Attributes:
        criterion: of the search.
        searched: the names of the hyperparameters that it set.
        trials: one for each evaluation.
        chosen: the trial whose values the posterior has now. With held-out data that is the widest posterior that costs
            little, not always the best one. None where the trials belong to several searches.
        several: whether they do: one search a layer, or prior precision and noise in turn.
        at_edge: the values at the edge of their search intervals.
        model_alone: validation NLL of the model without a posterior, where held-out data were given.
        given_up: validation NLL above the best that was tried, for a wider posterior.
    """

    criterion: Criterion
    searched: tuple[str, ...]
    trials: list[Trial] = field(default_factory=lambda: list[Trial]())
    chosen: Trial | None = None
    several: bool = False
    at_edge: list[str] = field(default_factory=lambda: list[str]())
    model_alone: float | None = None
    given_up: float | None = None

    @property
    def best(self) -> Trial | None:
        """The trial with the least validation NLL, or with the largest marginal likelihood. None by ``"faithful"``,
        whose goal is the widest posterior within a budget, and where the trials belong to several searches.
        """
        best = CRITERIA[self.criterion].best
        if not self.trials or self.several or best is None:
            return None
        return best(self.trials, key=lambda trial: trial.objective)

    def __repr__(self) -> str:
        chosen = self._line(self.chosen) if self.chosen else "one a search"
        given_up = "" if not self.given_up else f"; {self.given_up:.2g} nats given up against the best"
        return f"Trials({len(self.trials)} evaluations; chosen: {chosen}{given_up})"

    def __str__(self) -> str:
        lines: list[str] = []
        if self.chosen is not None:
            lines.append(f"chosen: {self._line(self.chosen)}")
        if self.given_up is not None:
            lines.append(f"given up against the best, for a wider posterior: {self.given_up:.2g} nats")
        best = self.best
        if best is not None and best is not self.chosen:
            lines.append(f"best: {self._line(best)}")
        if self.model_alone is not None:
            lines.append(f"the model alone: validation NLL={self.model_alone:.5g}")
        lines += [f"at the edge of the search: {name}" for name in self.at_edge]
        return "\n".join([*lines, f"all {len(self.trials)} evaluations:", *map(self._line, self.trials)])

    def _line(self, trial: Trial) -> str:
        tried = {ABOUT[name].label: getattr(trial.settings, name) for name in self.searched}
        numbers = tried | {CRITERIA[self.criterion].objective: trial.objective}
        return "  ".join(
            f"{label}={value:.5g}" if isinstance(value, float) else f"{label}={value}"
            for label, value in numbers.items()
        )

    def warn_of_edges(self) -> None:
        if self.at_edge:
            warn_user(
                f"The search ended at the edge of its interval for {', '.join(self.at_edge)}, which is a bound and not "
                f"an optimum. Set the value yourself, or look at what was tried."
            )


class SearchBar(Progress):
    """A progress bar of searches whose numbers of evaluations are not known before: it expects the usual numbers, and
    always one evaluation more than were begun.

    Args:
        description: of the work, in words.
        unit: what is counted.
        visible: whether to show it.
        searches: for each search to come, the usual number of evaluations and the units of one evaluation.
    """

    def __init__(
        self, description: str, unit: str, visible: bool, searches: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(description, unit, visible, sum(usual * size for usual, size in searches))
        self._to_come, self._usual, self._size, self._begun = list(searches), 0, 0, 0

    def begin_search(self) -> None:
        self._usual, self._size = self._to_come.pop(0)
        self._begun = 0

    def begin_evaluation(self) -> None:
        self._begun += 1
        following = max(1, self._usual - self._begun)
        to_come = sum(usual * size for usual, size in self._to_come)
        self.expect(self.done + (1 + following) * self._size + to_come)


def search_decades(
    objective: Callable[[float], float],
    interval: tuple[float, float],
    limits: tuple[float, float],
    tolerance: float = 0.02,
    max_evaluations: int = 30,
) -> tuple[float, bool]:
    """Minimise a function of a positive number over decades, by bounded Brent; the interval is widened while the
    optimum is at its edge.

    Returns:
        The minimiser, and whether it is at the edge of `limits`.
    """
    low, high = interval
    while True:
        result: Any = minimize_scalar(
            lambda x: objective(10.0**x),
            bounds=(low, high),
            method="bounded",
            options={"xatol": tolerance, "maxiter": max_evaluations},
        )
        best = float(result.x)
        near = 4 * tolerance + 0.02 * (high - low)
        if best - low < near and low > limits[0]:
            low, high = max(limits[0], low - 4), min(high, low + 1)
        elif high - best < near and high < limits[1]:
            low, high = max(low, high - 1), min(limits[1], high + 4)
        else:
            return 10.0**best, best - low < near or high - best < near
