"""Hyperparameters by the likelihood of held-out labels: the widest posterior whose loss is hardly above the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite, log, log1p, log10
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.batches import Batch, BatchReader, batches, check_reusable
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.fitting.faithful import Score, model_of, width_of, width_parameter_of, with_width
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods.weights import labelled, mean_of_labels
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import SearchBar, Trial, Trials, search_decades
from posthoc_uq.posteriors.settings import ABOUT, Hyperparameters

_MAX_COST = 0.01  # nats of held-out likelihood that a wider posterior may cost
_MAX_TOTAL_COST = 3.0  # nats over all labels that one no wider than a fit's may cost, where that is more
_MAX_COST_SHARE = 0.1  # of the best NLL that one wider than a fit's may cost, where that is less
_MIN_GAIN_ERRORS = 1.25  # standard errors by which another width must beat the untuned posterior
_PRIOR_SPREAD = 0.1  # of the prior of the logarithm of a temperature, or of a noise scale; see `reluctance`
_MIN_GAIN = 1e-6  # nats: a smaller gain does not move a hyperparameter
_MIN_CHANGE = 1e-3  # nats: after a smaller change over a decade the search ends
_MAX_DECADES = 8  # of the prior precision that are searched upwards
_WIDTH_TOLERANCE = 0.1  # decades of the prior precision
_NOISES = (-8.0, 16.0)  # decades of the noise scale in which the best one of the network alone is sought
_TEMPERATURES = (-1.0, 1.5)  # decades of the temperature
_GRID_STEP = 0.25  # decades between the temperatures from which the search for the best one goes on


def reluctance(factor: float) -> float:
    """Minus the logarithm of the prior density of a temperature, or of a noise scale, less that at 1, in nats.

    Below 1, where predictions become more certain, the logarithm has a normal density with exponential tails: a few
    labels that are all predicted correctly ask for a temperature of zero. Above 1 it has a Cauchy density, since a
    network that has memorised its data needs a temperature of ten, and a noise of thousands of times its residuals.
    """
    x = log(factor) / _PRIOR_SPREAD
    if x >= 0:
        return log1p(x**2)
    return x**2 / 2 if x > -1 else -x - 0.5


class HeldOutLoss(Score):
    """Mean negative log-likelihood of the held-out labels that count (one a sample, or one a position), in nats.

    Where the temperature is searched, every evaluation first sets the most probable one under the prior of
    `reluctance`.

    Args:
        posterior: its hyperparameters are set.
        loader: held-out batches with targets.
        predictor: predicts them.
        reader: takes batches apart.
        seed: of the draws.
        tempered: whether the temperature is searched.
    """

    def __init__(
        self,
        posterior: Posterior,
        loader: Iterable[Any],
        predictor: Predictor,
        reader: BatchReader,
        *,
        seed: int,
        tempered: bool,
    ) -> None:
        check_reusable(loader, 2)
        super().__init__(posterior, predictor, self._batches, seed, tempered)
        self._loader, self._reader = loader, reader
        self.labels = 0  # that count, of the last evaluation

    def _batches(self) -> Iterator[tuple[Batch, Tensor]]:
        with isolated_random_state(self._seed):
            for batch in batches(self._loader, self._reader):
                if batch.targets is None:
                    raise PosthocUQError(
                        "Tuning on held-out data needs targets, and loader (val_loader of a fit) yields inputs alone."
                    )
                yield batch, batch.targets

    def _mean(self, pairs: Iterable[tuple[Any, Any]]) -> float:
        total, count, likelihood = 0.0, 0, self.posterior.likelihood
        for distribution, targets in pairs:
            prediction = self._predictor.prediction_of(distribution)
            likelihood.check(prediction.outputs_mean, targets)
            total += float(as_double(prediction.log_prob(prediction.fitting(targets))).sum())
            count += labelled(likelihood, targets)
        self.labels = count
        return mean_of_labels(-total, count)

    def _best_temperature(self, pairs: Sequence[tuple[Any, Any]]) -> float:
        """The prior may leave the loss a minimum near 1 and another far above, so that a coarse grid comes first."""
        tried = dict[float, float]()

        def at(decade: float) -> float:
            self.posterior.temperature = 10.0**decade
            tried[decade] = self._mean(pairs) + self.temperature_penalty()
            return tried[decade]

        low, high = _TEMPERATURES
        steps = round((high - low) / _GRID_STEP)
        best = min((low + step * _GRID_STEP for step in range(steps + 1)), key=at)
        bounds = max(low, best - _GRID_STEP), min(high, best + _GRID_STEP)
        from scipy.optimize import minimize_scalar

        minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 0.005, "maxiter": 25})
        return 10.0 ** min(tried, key=lambda decade: tried[decade])

    def temperature_penalty(self) -> float:
        """What the prior of the temperature adds to the mean loss of the labels, where the temperature is searched."""
        return reluctance(self.posterior.temperature) / max(1, self.labels) if self._tempered else 0.0

    def noise_reluctance(self, factor: float) -> float:
        """`reluctance` of a noise scale. Where the likelihood has no estimate of its noise, 1 is a dispersion that was
        given, often by default, and a smaller one is as likely as a larger one.
        """
        estimated = self.posterior.likelihood.noise_variance is not None
        return reluctance(factor if estimated else max(factor, 1 / factor))

    def of_labels(self, settings: Hyperparameters) -> Tensor:
        """Negative log-likelihoods of all labels at these settings, which are set; zeros of those that do not count."""
        self.posterior.settings = settings
        self._predictor.refresh(self._seed)
        with torch.no_grad():
            pairs = [(self._predictor.prediction_of(d), targets) for d, targets in self._pairs()]
            losses = [-as_double(p.log_prob(p.fitting(targets))).flatten().cpu() for p, targets in pairs]
            return torch.cat(losses)

    def of_model_alone(self) -> float:
        """The loss of the model without a posterior."""
        network, total, count = replicate(model_of(self.posterior)), 0.0, 0
        likelihood = self.posterior.observation.of_targets()
        with torch.no_grad():
            outputs_of_batches = (  # where the mean was trained, the model alone is another network
                ((batch.copied().call(network), targets) for batch, targets in self._batches())
                if self.posterior.trained_mean
                else self._network_outputs()
            )
            for outputs, targets in outputs_of_batches:
                total -= float(likelihood.log_prob(outputs, targets).sum())
                count += labelled(self.posterior.likelihood, targets)
        return mean_of_labels(total, count)

    def set_noise_of_network(self) -> None:
        """Set the noise scale at which the network alone predicts the held-out data best, under the prior of
        `reluctance`: for Gaussian noise about that of their mean squared residual. There a search may begin that does
        not depend on what was found before.

        A posterior that was trained, and not laid around a network, may have learned a noise: it keeps that where it
        then predicts better.
        """
        posterior, likelihood = self.posterior, self.posterior.likelihood.of_targets()
        with torch.no_grad():
            pairs = list(self._network_outputs())
        for outputs, targets in pairs:
            likelihood.check(outputs, targets)

        def loss(factor: float) -> float:
            noisy = likelihood.at_noise_scale(factor)
            total = sum(float(as_double(noisy.log_prob(out, targets)).sum()) for out, targets in pairs)
            return self.noise_reluctance(factor) - total if total == total else inf

        factor, _ = search_decades(loss, (-2.0, 2.0), _NOISES, max_evaluations=60)
        if posterior.has_free_prior_precision:
            posterior.noise_scale = factor
            return
        losses = dict[float, float]()
        for candidate in (1.0, factor):
            posterior.noise_scale = candidate
            losses[candidate] = self.evaluate()
        posterior.noise_scale = min(losses, key=lambda candidate: losses[candidate])


class _Tried(NamedTuple):
    """A trial, and what is compared: its loss, and what the priors of temperature and noise add to it."""

    penalised: float
    trial: Trial


class HeldOutSearch:
    """A search over one hyperparameter after the other, by the likelihood of held-out labels.

    Args:
        loss: of the labels, at the posterior's settings.
        searched: the names of the hyperparameters, in the order of the search.
        tempered: whether every evaluation sets the temperature, too.
        max_evaluations: for each hyperparameter but the width.
        progress: whether to show a bar.

    Attributes:
        trials: all that were evaluated.
        bar: of the evaluations; the searches belong into its `with`.
    """

    def __init__(
        self,
        loss: HeldOutLoss,
        searched: Sequence[str],
        *,
        tempered: bool,
        max_evaluations: int,
        progress: bool,
    ) -> None:
        self.posterior, self._loss, self._tempered = loss.posterior, loss, tempered
        self._max_evaluations = max_evaluations
        self._best: Trial | None = None  # of the hyperparameters searched so far
        self.trials = Trials("likelihood", (*searched, "temperature") if tempered else tuple(searched))
        searches = [
            (_MAX_DECADES if name == self.posterior.width_parameter else max_evaluations, 1)
            for name in searched
        ]
        self.bar = SearchBar("tuning", "evaluations", progress, searches or [(1, 1)])

    def set_width(self, grid: Sequence[float] | None, set_as_fitted: Callable[[], None]) -> None:
        """Set the smallest prior precision, not below the present one, whose held-out NLL is hardly above the best: by
        at most `_MAX_COST`. For classes, a posterior wider than that of `set_as_fitted` must also stay within
        `_MAX_COST_SHARE` of the best NLL, and one no wider may cost `_MAX_TOTAL_COST` over all labels. Another width
        than that of `set_as_fitted` gives way to it, at the temperature found for it, unless it predicts the labels
        better than the untuned posterior by the standard error of the gain. For a posterior without a free prior
        precision, set the `scale` in the same way.

        The present prior is the faithful one. A posterior no wider is harmless on familiar data, and held-out data of
        the training distribution cannot judge it for foreign inputs. If a few labels are all predicted correctly, every
        narrower posterior predicts them better, down to certainty; so they narrow nothing unless they are many. The
        prior of the temperature counts too; else a width would be chosen for the large temperature that comes with it.

        Args:
            grid: the prior precisions to try; None for decades and bisection.
            set_as_fitted: sets the posterior that a fit makes by itself; called for classes.
        """
        name, base = width_parameter_of(self.posterior), self.posterior.settings
        tried = dict[float, _Tried]()
        self.bar.begin_search()

        def at(decade: float) -> float:
            if decade not in tried:
                tried[decade] = self._try(with_width(base, name, 10.0**decade))
            return tried[decade].penalised

        def smallest_accepted(cost: Callable[[float, float], float]) -> float:
            """The smallest decade that costs no more than is allowed, which depends on it and on the best objective.
            The best may change as decades are tried, and the cost need not grow with the width, so that this halves
            intervals and does not look for a root.
            """
            while True:
                best = min(each.penalised for each in tried.values())
                accepted = [decade for decade in tried if at(decade) <= best + cost(decade, best)]
                inside = min(accepted) if isfinite(best) else max(accepted)
                below = [decade for decade in tried if decade < inside]
                if not below or grid is not None or inside - max(below) <= _WIDTH_TOLERANCE:
                    return inside
                at((inside + max(below)) / 2)

        if grid is not None:
            for value in grid:
                at(log10(value / width_of(base, name)))
        else:
            for decade in range(_MAX_DECADES):
                at(float(decade))
                if decade > 1 and abs(at(float(decade)) - at(decade - 1.0)) < _MIN_CHANGE:
                    break
        if not self.posterior.likelihood.logits:
            inside = smallest_accepted(lambda decade, best: _MAX_COST)
        else:
            self.posterior.settings = base
            set_as_fitted()
            fitted = log10(width_of(self.posterior.settings, name) / width_of(base, name))
            if grid is None:  # the widest of all where held-out inputs lie far from those of the training
                at(fitted)
            narrower = max(_MAX_COST, _MAX_TOTAL_COST / max(1, self._loss.labels))
            inside = smallest_accepted(
                lambda decade, best: narrower if decade >= fitted else self._share_of(best)
            )
            moved = grid is None and inside != fitted
            if moved and not self._gains(tried[inside].trial.settings, tried[fitted].trial.settings):
                inside = fitted
        self._best = tried[inside].trial
        self.posterior.settings = self._best.settings
        self._note_width(ABOUT[name].label, min(each.trial.objective for each in tried.values()))

    def set_other(self, name: str) -> None:
        """Minimise the loss over ``"residual_weight"``, ``"scale"`` or ``"noise_scale"``, from the present values; keep
        the best values tried.
        """
        self.bar.begin_search()
        if self._best is None or not isfinite(self._best.objective):
            self._best = self._try(self.posterior.settings).trial
        base = self._best
        tried = [_Tried(base.objective + self._penalty(name), base)]

        def objective(x: float) -> float:
            value = min(1.0, max(0.0, x)) if name == "residual_weight" else getattr(base.settings, name) * x
            tried.append(self._try(replace(base.settings, **{name: value}), name))
            return tried[-1].penalised

        edge = False
        if name == "residual_weight":  # [0, 1] is its full domain, so its ends are no edges of a search
            options = {"xatol": 0.03, "maxiter": self._max_evaluations}
            from scipy.optimize import minimize_scalar

            minimize_scalar(objective, bounds=(0.0, 1.0), method="bounded", options=options)
            objective(0.0)
            objective(1.0)
        else:
            _, edge = search_decades(objective, (-2.0, 2.0), (-2.0, 2.0), 0.05, self._max_evaluations)
        improved = min(tried, key=lambda each: each.penalised)
        label = ABOUT[name].label
        if improved.penalised < tried[0].penalised - _MIN_GAIN:
            self._best = improved.trial
            if edge:
                self.trials.at_edge.append(f"{label} = {getattr(self._best.settings, name):.3g}")
        self.posterior.settings = self._best.settings
        of_variance = name == "noise_scale" and self.posterior.noise_variance is not None
        self.posterior.history.tuning["noise variance" if of_variance else label] = "validation NLL"

    def set_temperature(self) -> None:
        """Set the temperature alone."""
        self.bar.begin_search()
        self._best = self._try(self.posterior.settings).trial
        self._note_temperature()

    def finish(self) -> Trials:
        """The trials; warns of values at an edge, and if even the best predicts held-out data worse than the model."""
        trials, best = self.trials, self._best
        assert best is not None
        trials.chosen = best
        trials.warn_of_edges()
        trials.model_alone = self._loss.of_model_alone()
        if best.objective > trials.model_alone + 2 * _MAX_COST:
            advice = (
                "Train longer, with a smaller prior_precision, or with train_mean=False."
                if self.posterior.trained_mean
                else "Restrict the posterior (layers='last') or give it more data."
            )
            warn_user(
                f"The best validation NLL found, {best.objective:.4g}, is worse than the model's own, "
                f"{trials.model_alone:.4g}: the posterior does not serve this model. {advice}"
            )
        return trials

    def _try(self, settings: Hyperparameters, name: str = "") -> _Tried:
        """Evaluate the loss at these settings, in a search over `name`."""
        self.bar.begin_evaluation()
        self.posterior.settings = settings
        loss = self._loss.evaluate()
        self.bar.advance()
        trial = Trial(self.posterior.settings, loss)
        self.trials.trials.append(trial)
        return _Tried(loss + self._penalty(name), trial)

    def _penalty(self, name: str) -> float:
        """What the priors add to the mean loss at the present settings, where `name` is searched."""
        penalty = self._loss.temperature_penalty()
        if name == "noise_scale":
            penalty += self._loss.noise_reluctance(self.posterior.noise_scale) / max(1, self._loss.labels)
        return penalty

    def _gains(self, found: Hyperparameters, fitted: Hyperparameters) -> bool:
        """Whether `found` predicts the labels better than the posterior of a fit, `fitted` at a temperature of 1, by
        `_MIN_GAIN_ERRORS` times the standard error of the mean gain. A gain by one label alone is 1 such error, and
        does not generalise to other inputs.
        """
        untuned = replace(fitted, temperature=1.0) if self._tempered else fitted
        gains = self._loss.of_labels(untuned) - self._loss.of_labels(found)
        count = max(2, self._loss.labels)
        gain = float(gains.sum()) / count
        variance = max(0.0, float(gains.square().sum()) / count - gain**2) * count / (count - 1)
        return gain > _MIN_GAIN_ERRORS * (variance / count) ** 0.5

    def _share_of(self, best: float) -> float:
        """Nats above the best NLL that a posterior wider than that of a fit may cost. The share does not apply to the
        NLL of a density, which depends on the unit of the targets.
        """
        return min(_MAX_COST, _MAX_COST_SHARE * best) if self.posterior.likelihood.logits else _MAX_COST

    def _note_width(self, label: str, best: float) -> None:
        assert self._best is not None
        given_up = self._best.objective - best
        allowed = next((slack for slack in (self._share_of(best), _MAX_COST) if given_up <= slack), None)
        words = (
            "the widest that held-out labels do not clearly speak against"
            if allowed is None
            else f"the widest with a validation NLL of at most {allowed:.2g} above the best"
        )
        self.posterior.history.tuning[label] = f"{words}; {given_up:.2g} given up"
        self.trials.given_up = max(0.0, given_up)
        if self._tempered:
            self._note_temperature()

    def _note_temperature(self) -> None:
        self.posterior.history.tuning["temperature"] = (
            "validation NLL, and a prior around 1 with a heavy tail above it"
        )
        low, high = (10.0**decade for decade in _TEMPERATURES)
        if not 1.05 * low < self.posterior.temperature < high / 1.05:
            self.trials.at_edge.append(f"temperature = {self.posterior.temperature:.3g}")
