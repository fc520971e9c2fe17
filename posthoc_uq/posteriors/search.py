"""Searches for hyperparameters: what all share, and the one by the log marginal likelihood, which needs no predictions.

``log p(D) = log p(D | theta) - (log det P - n log tau + tau |theta|^2) / 2`` (MacKay 1992). The first term does not
depend on the prior precision, so its search needs no labels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.core.devices import TEMPORARY_BYTES
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.interrupts import check
from posthoc_uq.core.progress import Progress
from posthoc_uq.posteriors.block import LOG_DETERMINANT
from posthoc_uq.posteriors.history import Trial, Trials
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import LayerPriors


class SearchBar(Progress):
    """A progress bar of searches whose numbers of evaluations are not known before: it expects the usual numbers, and
    always one evaluation more than were begun.

    Args:
        description: of the work, in words.
        unit: what is counted.
        visible: whether to show it.
        searches: for each search to come, the usual number of evaluations and the units of one evaluation.

    Attributes:
        to_come: the searches that are not begun; may be corrected.
    """

    def __init__(
        self,
        description: str,
        unit: str,
        visible: bool,
        searches: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(description, unit, visible, sum(usual * size for usual, size in searches))
        self.to_come, self._usual, self._size, self._begun = list(searches), 0, 0, 0

    def begin_search(self) -> None:
        self._usual, self._size = self.to_come.pop(0)
        self._begun = 0

    def begin_evaluation(self) -> None:
        self._begun += 1
        following = max(1, self._usual - self._begun)
        to_come = sum(usual * size for usual, size in self.to_come)
        self.total = round(self.done) + (1 + following) * self._size + to_come


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


_START_DECADES = (-4.0, 6.0)  # decades of the prior precision that are searched first
_LIMIT_DECADES = (-10.0, 12.0)  # decades beyond which the search gives up
_NOISE_START, _NOISE_LIMITS = (-2.0, 2.0), (-6.0, 6.0)  # the same for the noise scale
_EDGE_DECADES = 0.02  # decades from a limit at which a prior precision is at the edge
_USUAL_EVALUATIONS = 16  # evaluations of a search, for what a bar shows
_KEPT_BUDGETS = 2  # what blocks keep between evaluations may take so many memory budgets


def maximise_evidence(
    posterior: Posterior, *, per_layer: bool = False, noise: bool = False, progress: bool = False
) -> Posterior:
    """`find_evidence`, with a warning of values at an edge of the search."""
    found = find_evidence(posterior, per_layer=per_layer, noise=noise, progress=progress)
    assert found.history.trials is not None
    found.history.trials.warn_of_edges()
    return found


def find_evidence(
    posterior: Posterior, *, per_layer: bool = False, noise: bool = False, progress: bool = False
) -> Posterior:
    """The posterior with the prior precision (one, or one per layer) of the largest log marginal likelihood, and with
    `noise` the noise variance too; its history has the trials.

    At fixed weights this noise variance is known to come out too large; by default it stays the variance of the
    training residuals. With `progress` a bar is shown.

    Raises:
        PosthocUQError: `noise` is set, but the likelihood has no noise variance or the fit saw no labels.
    """
    if not posterior.has_free_prior_precision or LOG_DETERMINANT not in posterior.capabilities:
        posterior.log_marginal_likelihood()  # raises the error that gives the reason
    if noise and posterior.noise_variance is None:
        raise PosthocUQError(
            f"The noise can be tuned for likelihood='regression' only, not for {posterior.likelihood.name!r}."
        )
    search = _EvidenceSearch(posterior, per_layer, noise, progress)
    with _kept_parts(posterior), search.bar:
        edges = search.set_prior()
        if noise:
            for _ in range(2):  # noise variance and prior precision in turn
                edges = search.set_noise() + search.set_prior()
    trials = search.trials
    trials.at_edge, trials.chosen = edges, trials.best
    found = "by the log marginal likelihood"
    how = {"prior precision": found} | ({"noise variance": found} if noise else {})
    return search.posterior.replaced(history=replace(posterior.history.noted(tuning=how), trials=trials))


class _EvidenceSearch:
    """The searches of `maximise_evidence`, which see; each returns the values that ended at an edge.

    Attributes:
        posterior: at the best settings found so far.
        trials: all that were tried.
        bar: of the evaluations.
    """

    def __init__(self, posterior: Posterior, per_layer: bool, noise: bool, progress: bool) -> None:
        self.posterior, self._per_layer = posterior, per_layer
        # Where every block is one layer, the evidence is a sum over layers, and each has a search of its own.
        self._apart = per_layer and all(block in posterior.layers for block in posterior.blocks)
        whole = (_USUAL_EVALUATIONS, len(posterior.blocks))
        searches = (
            [(_USUAL_EVALUATIONS, 1)] * len(posterior.layers) if self._apart else [whole] * (1 + per_layer)
        )
        several = noise or (per_layer and len(searches) > 1)
        self.trials = Trials(
            "evidence", ("prior_precision", "noise_scale") if noise else ("prior_precision",), several=several
        )
        every = searches + 2 * [whole, *searches] if noise else searches
        self.bar = SearchBar("evidence", "blocks", progress, every)

    def set_prior(self) -> list[str]:
        edges = list[str]()
        if not self._per_layer:
            prior: Any = self._best_prior(None, edges)
        elif self._apart:
            prior = {name: self._best_prior(name, edges) for name in self.posterior.layers}
        else:
            prior = self._best_joint_priors(edges)
        self.posterior = self.posterior.at(replace(self.posterior.settings, prior_precision=prior))
        return edges

    def set_noise(self) -> list[str]:
        posterior = self.posterior
        self.bar.begin_search()

        def objective(factor: float) -> float:
            self.bar.begin_evaluation()
            value = float(posterior.log_marginal_likelihood(noise_scale=factor))
            self.bar.advance(len(posterior.blocks))
            self.trials.trials.append(Trial(replace(posterior.settings, noise_scale=factor), value))
            return -value

        factor, edge = search_decades(objective, _NOISE_START, _NOISE_LIMITS)
        self.posterior = posterior.at(replace(posterior.settings, noise_scale=factor))
        return [f"noise scale = {factor:.3g}"] if edge else []

    def _occam_factors(self, blocks: Sequence[str], priors: Mapping[str, Any]) -> list[Tensor]:
        self.bar.begin_evaluation()
        factors: list[Tensor] = []
        for block in blocks:
            check()
            factors.append(self.posterior.occam_factor(block, priors))
            self.bar.advance()
        return factors

    def _best_prior(self, layer: str | None, edges: list[str]) -> float:
        """The best prior precision of one layer, or of all by default."""
        posterior, failure = self.posterior, None
        blocks = list(posterior.blocks) if layer is None else [layer]
        self.bar.begin_search()

        def objective(tau: float) -> float:
            nonlocal failure
            try:
                factors = self._occam_factors(blocks, dict.fromkeys(posterior.layers, tau))
                value = 0.5 * sum(map(float, factors))
            except NonFiniteError as error:  # no Cholesky factor: a value far from any optimum
                failure, value = error, float("inf")
            tried = tau if layer is None else LayerPriors({layer: tau})
            self.trials.trials.append(Trial(replace(posterior.settings, prior_precision=tried), -value))
            return value

        tau, edge = search_decades(objective, _START_DECADES, _LIMIT_DECADES)
        if failure is not None and objective(tau) == float("inf"):
            raise NonFiniteError(
                "No prior precision gives a precision matrix that can be factorised; rescale the targets or inputs "
                "to about unit size, or give prior_precision=...."
            ) from failure
        if edge:
            edges.append(f"prior precision{'' if layer is None else f' of {layer!r}'} = {tau:.3g}")
        return tau

    def _best_joint_priors(self, edges: list[str]) -> dict[str, float]:
        """One prior precision per layer inside one dense block, by gradient ascent from the best common one."""
        posterior, common = self.posterior, self._best_prior(None, edges)
        names, blocks = list(posterior.layers), list(posterior.blocks)
        self.bar.begin_search()

        def objective(decades: np.ndarray) -> tuple[float, np.ndarray]:
            logs = torch.tensor(decades, dtype=torch.float64, requires_grad=True, device="cpu")
            factors = self._occam_factors(blocks, dict(zip(names, (10.0**logs).unbind(), strict=True)))
            value = 0.5 * torch.stack(factors).sum()
            (gradient,) = torch.autograd.grad(value, logs)
            priors = LayerPriors(zip(names, (10.0**decades).tolist(), strict=True))
            tried = replace(posterior.settings, prior_precision=priors)
            self.trials.trials.append(Trial(tried, -value.item()))
            return value.item(), gradient.numpy()

        from scipy.optimize import minimize

        result: Any = minimize(
            objective,
            np.full(len(names), np.log10(common)),
            jac=True,
            method="L-BFGS-B",
            bounds=[_LIMIT_DECADES] * len(names),
            options={"maxiter": 100},
        )
        found = dict(zip(names, map(float, result.x), strict=True))
        for name, decade in found.items():
            if min(decade - _LIMIT_DECADES[0], _LIMIT_DECADES[1] - decade) < _EDGE_DECADES:
                edges.append(f"prior precision of {name!r} = {10.0**decade:.3g}")
        return {name: 10.0**decade for name, decade in found.items()}


@contextmanager
def _kept_parts(posterior: Posterior) -> Generator[None]:
    """Blocks keep what no setting changes, as many of them as memory allows."""
    left = _KEPT_BUDGETS * TEMPORARY_BYTES
    with ExitStack() as stack:
        for block in posterior.blocks.values():
            needed = block.kept_bytes()
            if 0 < needed <= left:
                left -= needed
                stack.enter_context(block.kept_parts())
        yield
