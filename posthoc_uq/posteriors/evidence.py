"""Hyperparameters by the log marginal likelihood: the prior precision, and on request the noise variance.

``log p(D) = log p(D | theta) - (log det P - n log tau + tau |theta|^2) / 2`` (MacKay 1992). The first term
does not depend on the prior precision, so its search needs no labels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posthoc_uq.core.devices import default_budget
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.interrupts import check
from posthoc_uq.core.progress import Progress
from posthoc_uq.posteriors.block import LOG_DETERMINANT
from posthoc_uq.posteriors.posterior import Posterior

START = (-4.0, 6.0)  # decades of the prior precision that are searched first
LIMITS = (-10.0, 12.0)  # decades beyond which the search gives up
_BUDGETS = 2  # what blocks keep between trials may take so many memory budgets
TOLERANCE = 0.02  # decades: 5 %
_USUAL = 16  # trials of a search, for what a bar shows


@dataclass(repr=False)
class Trials:
    """All trials of a search; prints itself, the chosen trial first.

    Attributes:
        trials: one dictionary per evaluation: values and objective.
        chosen: the trial whose values the posterior has now. With held-out data that is the widest posterior that costs
            little, not always the best one. None where the trials belong to several searches.
        at_edge: the values at the edge of their search intervals.
        model_alone: validation NLL of the model without a posterior, where held-out data were given. A validation NLL
            is a mean over all labels that count, as in `posthoc_uq.evaluate`; with positions, one at each.
        given_up: validation NLL above the best that was tried, for a wider posterior.
    """

    trials: list[dict[str, Any]] = field(default_factory=lambda: list[dict[str, Any]]())
    chosen: dict[str, Any] | None = None
    at_edge: list[str] = field(default_factory=lambda: list[str]())
    model_alone: float | None = None
    given_up: float | None = None

    @property
    def best(self) -> dict[str, Any] | None:
        """The trial with the least validation NLL, or with the largest marginal likelihood.

        None without trials, where the goal is the widest posterior within a divergence, or where the trials belong to
        several searches (one a layer, say), each with its own best one.
        """
        if not self.trials or any(list(trial) != list(self.trials[0]) for trial in self.trials):
            return None
        goal = list(self.trials[0])[-1]
        if goal == "divergence":
            return None
        better = min if goal == "validation NLL" else max
        return better(self.trials, key=lambda trial: trial[goal])

    def __repr__(self) -> str:
        chosen = _line(self.chosen) if self.chosen else "one a search"
        given_up = "" if not self.given_up else f"; {self.given_up:.2g} nats given up against the best"
        return f"Trials({len(self.trials)} evaluations; chosen: {chosen}{given_up})"

    def __str__(self) -> str:
        lines: list[str] = []
        if self.chosen is not None:
            lines.append(f"chosen: {_line(self.chosen)}")
        if self.given_up is not None:
            lines.append(f"given up against the best, for a wider posterior: {self.given_up:.2g} nats")
        best = self.best
        if best is not None and best is not self.chosen:
            lines.append(f"best: {_line(best)}")
        if self.model_alone is not None:
            lines.append(f"the model alone: validation NLL={self.model_alone:.5g}")
        lines += [f"at the edge of the search: {name}" for name in self.at_edge]
        return "\n".join([*lines, f"all {len(self.trials)} evaluations:", *map(_line, self.trials)])


def _line(trial: dict[str, Any]) -> str:
    return "  ".join(f"{name}={_text(value)}" for name, value in trial.items())


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def search_decades(
    objective: Callable[[float], float],
    interval: tuple[float, float],
    limits: tuple[float, float],
    tolerance: float = TOLERANCE,
    max_evaluations: int = 30,
) -> tuple[float, bool]:
    """Minimise a function of a positive number over decades, by bounded Brent; the interval is widened while the
    optimum is at its edge.

    Returns:
        The minimiser, and whether it is at the edge of `limits`.
    """
    from scipy.optimize import minimize_scalar

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


class _Shown:
    """A bar of the blocks that are factorised, with the usual number of trials of each search.

    Args:
        progress: whether it is shown.
        searches: how many there are.
        blocks: of a trial.
    """

    def __init__(self, progress: bool, searches: int, blocks: int) -> None:
        self.bar = Progress("evidence", "blocks", progress, _USUAL * searches * blocks)
        self._left, self._trials = searches, 0

    def search(self) -> None:
        """Another search begins."""
        self._left, self._trials = self._left - 1, 0

    def begin(self, blocks: int) -> None:
        """A trial of so many blocks begins; at least one more may follow."""
        self._trials += 1
        following = max(1, _USUAL - self._trials) + max(0, self._left) * _USUAL
        self.bar.expect(self.bar.done + (1 + following) * blocks)

    def trial(self, blocks: Sequence[str]) -> Iterator[str]:
        """The blocks of a trial, each counted when it is done."""
        self.begin(len(blocks))
        for block in blocks:
            check()
            yield block
            self.bar.advance()


def maximise_evidence(
    posterior: Posterior, *, per_layer: bool = False, noise: bool = False, progress: bool = False
) -> Trials:
    """Set the prior precision (one, or one per layer) where the log marginal likelihood is largest, and with
    `noise` the noise variance too.

    At fixed weights this noise variance is known to come out too large; by default it stays the variance of the
    training residuals. With `progress` a bar is shown.

    Raises:
        PosthocUQError: `noise` is set, but the likelihood has no noise variance or the fit saw no labels.
    """
    if not posterior.has_free_prior_precision or LOG_DETERMINANT not in posterior.capabilities:
        posterior.log_marginal_likelihood()  # says why there is none
    if noise and posterior.noise_variance is None:
        raise PosthocUQError(
            f"The noise can be tuned for likelihood='regression' only, not for {posterior.likelihood.name!r}."
        )
    trials = Trials()
    apart = per_layer and all(block in posterior.layers for block in posterior.blocks)
    searches = len(posterior.layers) if apart else 1 + per_layer
    blocks = 1 if apart else len(posterior.blocks)
    shown = _Shown(progress, searches if not noise else 3 * searches + 2, blocks)
    with _kept_parts(posterior), shown.bar:
        prior_edges, noise_edges = _set_prior(posterior, per_layer, trials, shown), list[str]()
        if noise:
            for _ in range(2):  # noise variance and prior precision in turn
                noise_edges = _set_noise_scale(posterior, trials, shown)
                prior_edges = _set_prior(posterior, per_layer, trials, shown)
    if noise:
        posterior.history.tuning["noise variance"] = "by the log marginal likelihood"
    posterior.history.tuning["prior precision"] = "by the log marginal likelihood"
    trials.at_edge = noise_edges + prior_edges
    trials.chosen = trials.best
    warn_edges(trials)
    return trials


@contextmanager
def _kept_parts(posterior: Posterior) -> Generator[None]:
    """Blocks keep what no setting changes, as many of them as memory allows."""
    left = _BUDGETS * default_budget(posterior.device)
    with ExitStack() as stack:
        for block in posterior.blocks.values():
            needed = block.kept_bytes()
            if 0 < needed <= left:
                left -= needed
                stack.enter_context(block.kept_parts())
        yield


def warn_edges(trials: Trials) -> None:
    """Warn of values at the edge of their search intervals."""
    if trials.at_edge:
        warn_user(
            f"The search ended at the edge of its interval for {', '.join(trials.at_edge)}; the value is a "
            f"bound, not an optimum. "
            f"Set it yourself, or look at what was tried."
        )


def _set_prior(posterior: Posterior, per_layer: bool, trials: Trials, shown: _Shown) -> list[str]:
    """Set the prior precision, and return the values at an edge."""
    edges: list[str] = []
    if not per_layer:
        posterior.prior_precision = _search_prior(posterior, list(posterior.blocks), "", trials, edges, shown)
    elif all(block in posterior.layers for block in posterior.blocks):
        posterior.prior_precision = {
            name: _search_prior(posterior, [name], f" of '{name}'", trials, edges, shown)
            for name in posterior.layers
        }
    else:
        _search_jointly(posterior, trials, edges, shown)
    return edges


def _search_prior(
    posterior: Posterior, blocks: list[str], label: str, trials: Trials, edges: list[str], shown: _Shown
) -> float:
    shown.search()
    failure: NonFiniteError | None = None

    def objective(tau: float) -> float:
        nonlocal failure
        try:
            prior = _in_every_layer(posterior, tau)
            value = 0.5 * sum(float(posterior.occam_factor(name, prior)) for name in shown.trial(blocks))
        except NonFiniteError as error:  # no Cholesky factor: a value far from any optimum
            failure, value = error, float("inf")
        trials.trials.append(
            {"prior precision" + label: tau, "log marginal likelihood less log likelihood": -value}
        )
        return value

    tau, edge = search_decades(objective, START, LIMITS)
    if failure is not None and objective(tau) == float("inf"):
        raise NonFiniteError(
            "No prior precision gives a precision matrix that can be factorised; rescale the targets or inputs "
            "to about unit size, or give prior_precision=...."
        ) from failure
    if edge:
        edges.append(f"prior precision{label} = {tau:.3g}")
    return tau


def _in_every_layer(posterior: Posterior, tau: float) -> dict[str, float]:
    return dict.fromkeys(posterior.layers, tau)


def _search_jointly(posterior: Posterior, trials: Trials, edges: list[str], shown: _Shown) -> None:
    """One prior precision per layer inside one dense block, by gradient ascent from the best common one."""
    common = _search_prior(posterior, list(posterior.blocks), "", trials, edges, shown)
    names, blocks = list(posterior.layers), list(posterior.blocks)
    shown.search()

    def objective(decades: np.ndarray) -> tuple[float, np.ndarray]:
        logs = torch.tensor(decades, dtype=torch.float64, requires_grad=True, device="cpu")
        priors = dict(zip(names, (10.0**logs).unbind(), strict=True))
        value = 0.5 * torch.stack([posterior.occam_factor(b, priors) for b in shown.trial(blocks)]).sum()
        (gradient,) = torch.autograd.grad(value, logs)
        trials.trials.append(
            {
                "prior precisions": (10.0**decades).tolist(),
                "log marginal likelihood less log likelihood": -float(value),
            }
        )
        return float(value), gradient.numpy()

    from scipy.optimize import minimize

    start = np.full(len(names), np.log10(common))
    result: Any = minimize(
        objective, start, jac=True, method="L-BFGS-B", bounds=[LIMITS] * len(names), options={"maxiter": 100}
    )
    for name, decade in zip(names, result.x, strict=True):
        if min(decade - LIMITS[0], LIMITS[1] - decade) < TOLERANCE:
            edges.append(f"prior precision of '{name}' = {10.0**decade:.3g}")
    posterior.prior_precision = {
        name: float(10.0**decade) for name, decade in zip(names, result.x, strict=True)
    }


def _set_noise_scale(posterior: Posterior, trials: Trials, shown: _Shown) -> list[str]:
    """Set the scale of the noise variance, and return its value if at an edge."""
    shown.search()

    def objective(factor: float) -> float:
        shown.begin(len(posterior.blocks))
        value = -float(posterior.log_marginal_likelihood(noise_scale=factor))
        shown.bar.advance(len(posterior.blocks))
        trials.trials.append({"noise scale": factor, "log marginal likelihood": -value})
        return value

    factor, edge = search_decades(objective, (-2.0, 2.0), (-6.0, 6.0))
    posterior.noise_scale = factor
    return [f"noise scale = {factor:.3g}"] if edge else []
