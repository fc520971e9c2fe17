"""`tune`: hyperparameters by faithfulness, by held-out labels, or by evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from math import inf, isfinite, log, log1p, log10
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, BatchFunction, BatchReader, batches, check_loader, check_reusable
from posthoc_uq.core.devices import TEMPORARY_BYTES, as_double, host_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.interrupts import orderly
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import (
    Count,
    Positive,
    Seed,
    check_names,
    check_option,
    did_you_mean,
    one_of,
    shown,
)
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.fitting.prior import DIVERGENCE, GUARDED, FaithfulSearch
from posthoc_uq.fitting.wrap import head_class, options_of, recorded_head, wrap
from posthoc_uq.heads.features import FeatureCache
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.likelihoods.weights import labelled, mean_of_labels
from posthoc_uq.posteriors.block import LOG_DETERMINANT
from posthoc_uq.posteriors.evidence import Trials, maximise_evidence, search_decades, warn_edges
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import ABOUT, HEADS, Hyperparameters

# The search for hyperparameters on held-out data, through a head.

HYPERPARAMETER = {"noise": "noise_scale"}  # hyperparameters that have another name in `tune`
SLACK = 0.01  # nats of held-out likelihood that a wider posterior may cost at most
NATS = (
    3.0  # over all labels, that a posterior no wider than a fit's own may cost where that is more than SLACK
)
SURE = (
    1.25  # standard errors by which another width must predict the labels better than the untuned posterior
)
SHARE = 0.1  # of the best NLL, which a posterior wider than a fit's own may cost at most, if that is less than SLACK
_INDIFFERENT = 1e-6  # nats: a smaller gain does not move a hyperparameter
_LEVEL = 1e-3  # nats: after a smaller change over a decade the search ends
_DECADES = 8  # of the prior precision that are searched upwards
_TOLERANCE = 0.1  # decades of the prior precision
_NOISES = (-8.0, 16.0)  # decades of the noise scale in which the network's own best one is sought
_TEMPERATURES = (-1.0, 1.5)  # decades of the temperature
_COARSE = 0.25  # decades between the temperatures from which the search for the best one goes on
SPREAD = 0.1  # of the prior of the logarithm of a temperature, or of a noise scale; see `reluctance`


def model_of(posterior: Posterior) -> nn.Module:
    """The model of a posterior.

    Raises:
        PosthocUQError: it has none.
    """
    if posterior.model is None:
        raise PosthocUQError(
            "The posterior has lost its model; set posterior.model to the model it was fitted on."
        )
    return posterior.model


def reluctance(factor: float) -> float:
    """Minus the logarithm of the prior density of a temperature, or of a noise scale, less that at 1, in nats.

    Below 1, where predictions become more certain, the logarithm has a normal density with exponential tails: a few
    labels that are all predicted correctly ask for a temperature of zero. Above 1 it has a Cauchy density, since a
    network that has memorised its data needs a temperature of ten, and a noise of thousands of times its residuals.
    """
    x = log(factor) / SPREAD
    if x >= 0:
        return log1p(x**2)
    return x**2 / 2 if x > -1 else -x - 0.5


class _Tried(NamedTuple):
    """A prior precision that was tried.

    Attributes:
        objective: what is compared: the loss, and what the prior of the temperature adds to it.
        loss: mean negative log-likelihood of the labels.
        settings: the hyperparameters, with the temperature found.
    """

    objective: float
    loss: float
    settings: Hyperparameters


class HeldOutSearch:
    """A search over one hyperparameter after the other; every evaluation draws with the same seed.

    Args:
        posterior: its hyperparameters are set.
        loader: held-out batches with targets.
        predictor: predicts them.
        seed: of the draws.
        reader: takes batches apart.
        temperature: whether every evaluation first sets the temperature that predicts best.
        progress: whether to show a bar.
    """

    def __init__(
        self,
        posterior: Posterior,
        loader: Iterable[Any],
        predictor: Predictor,
        *,
        seed: int,
        reader: BatchReader,
        temperature: bool,
        progress: bool,
    ) -> None:
        check_reusable(loader, 2)
        self.posterior = posterior
        self.trials = Trials()
        self._bar = Progress("tuning", "evaluations", progress)
        self._loader, self._reader = loader, reader
        self._predictor, self._seed = predictor, seed
        self._cache = FeatureCache(predictor, self._batches)
        self._tempered = temperature
        self._best_loss, self._best = float("inf"), posterior.settings
        self._labels = 0  # that count, of the last evaluation

    def _network(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs of the network at the posterior's centre, and targets, batch by batch."""
        twin = replicate(model_of(self.posterior), self.posterior.centre)
        return self._cache.outputs(lambda batch: batch.copied().call(twin))

    def start_noise(self) -> None:
        """Set the noise scale at which the network alone predicts the held-out data best, under the prior of
        `reluctance`: for Gaussian noise about that of their mean squared residual. There a search may begin that does
        not depend on what was found before.

        A posterior that was trained, and not laid around a network, may know a noise of its own: it keeps that of the
        training where it then predicts better.
        """
        posterior, likelihood = self.posterior, self.posterior.likelihood.of_targets()
        with torch.no_grad():
            pairs = list(self._network())
        for outputs, targets in pairs:
            likelihood.check(outputs, targets)

        def loss(factor: float) -> float:
            noisy = likelihood.at_noise_scale(factor)
            total = sum(
                float(as_double(noisy.log_prob(outputs, targets)).sum()) for outputs, targets in pairs
            )
            return self._noise_reluctance(factor) - total if total == total else inf

        factor, _ = search_decades(loss, (-2.0, 2.0), _NOISES, max_evaluations=60)
        if posterior.takes_prior:
            posterior.noise_scale = factor
            return
        losses = dict[float, float]()
        for candidate in (1.0, factor):
            posterior.noise_scale = candidate
            losses[candidate] = self._finite_loss()
        posterior.noise_scale = min(losses, key=lambda candidate: losses[candidate])

    def _batches(self) -> Iterator[tuple[Any, Tensor]]:
        with isolated_random_state(self._seed):
            for batch in batches(self._loader, self._reader):
                if batch.targets is None:
                    raise PosthocUQError(
                        "Tuning on held-out data needs targets, and loader (val_loader of a fit) yields inputs alone."
                    )
                yield batch, batch.targets

    def loss(self) -> float:
        """Mean negative log-likelihood of the held-out labels that count (one a sample, or one a position), in nats, at
        the present hyperparameters; sets the temperature first if that is searched too.

        The temperature is the most probable one under the prior of `reluctance`.
        """
        self._predictor.refresh(self._seed)
        with torch.no_grad():
            predicted = self._cache.distributions()
            if not self._tempered:
                return self._mean(predicted)
            distributions = list(predicted)

            def at(temperature: float) -> float:
                self.posterior.temperature = temperature
                return self._mean(distributions) + self._penalty()

            self.posterior.temperature = _best_temperature(at)
            return self._mean(distributions)

    def _mean(self, distributions: Iterable[tuple[Any, Tensor]]) -> float:
        total, count = 0.0, 0
        for distribution, targets in distributions:
            prediction = self._predictor.prediction_of(distribution)
            total += self._log_prob(prediction, targets)
            count += labelled(self.posterior.likelihood, targets)
        self._labels = count
        return mean_of_labels(-total, count)

    def _penalty(self) -> float:
        """What the prior of the temperature adds to the mean loss of the labels, where the temperature is searched."""
        return reluctance(self.posterior.temperature) / max(1, self._labels) if self._tempered else 0.0

    def _log_prob(self, prediction: Prediction, targets: Tensor) -> float:
        self.posterior.likelihood.check(prediction.outputs_mean, targets)
        return float(as_double(prediction.log_prob(prediction.fitting(targets))).sum())

    def _finite_loss(self) -> float:
        """`loss`, infinite where there is none: for draws of extreme weights."""
        try:
            value = self.loss()
        except NonFiniteError:
            return inf
        return value if value == value else inf

    def _evaluate(self) -> float:
        posterior, value = self.posterior, self._finite_loss()
        self._bar.advance()
        tried = posterior.settings.labelled()
        first = {label: tried.pop(label) for label in ("prior precision", "residual weight")}
        self.trials.trials.append({**first, **tried, "validation NLL": value})
        return value

    def widest(self, grid: Sequence[float] | None, set_faithful: Callable[[], None]) -> None:
        """Set the smallest prior precision, not below the present one, whose held-out NLL is hardly above the best: by
        at most `SLACK`. For classes, a posterior wider than that of `set_faithful` must also stay within `SHARE` of
        the best NLL, and one no wider may cost `NATS` over all labels. Another width than that of `set_faithful` gives
        way to it, at the temperature found for it, unless it predicts the labels better than the untuned posterior by
        the standard error of the gain. For a posterior that takes no prior, set the `scale` in the same way.

        The present prior is the faithful one. A posterior no wider is harmless on familiar data, and held-out data of
        the training distribution cannot judge it for foreign inputs. If a few labels are all predicted correctly, every
        narrower posterior predicts them better, down to certainty; so they narrow nothing unless they are many. The
        prior of the temperature counts too; else a width would be chosen for the large temperature that comes with it.

        Args:
            grid: the prior precisions to try; None for decades and bisection.
            set_faithful: sets the posterior that a fit makes by itself; called for classes.
        """
        base, tried = self.posterior.settings, dict[float, _Tried]()

        def at(decade: float) -> float:
            if decade not in tried:
                self.posterior.settings = base
                self._widen(base, 10.0**decade)
                loss = self._evaluate()
                tried[decade] = _Tried(loss + self._penalty(), loss, self.posterior.settings)
            return tried[decade].objective

        def smallest_accepted(accepted: Callable[[float, float], bool]) -> float:
            """The smallest decade that is accepted against the best objective."""
            while True:
                best = min(each.objective for each in tried.values())
                good = [decade for decade in tried if accepted(decade, best)]
                inside = min(good) if isfinite(best) else max(good)
                below = [decade for decade in tried if decade < inside]
                if not below or grid is not None or inside - max(below) <= _TOLERANCE:
                    return inside
                at((inside + max(below)) / 2)

        if grid is not None:
            for value in grid:
                at(log10(value / _geometric_mean(base.prior_precision)))
        else:
            for decade in range(_DECADES):
                at(float(decade))
                if decade > 1 and abs(at(float(decade)) - at(decade - 1.0)) < _LEVEL:
                    break
        if not self.posterior.likelihood.logits:
            inside = smallest_accepted(lambda decade, best: at(decade) <= best + SLACK)
            self.posterior.settings = tried[inside].settings
        else:
            self.posterior.settings = base
            set_faithful()
            fitted_decade = self._decade_from(base)
            if grid is None:
                at(
                    fitted_decade
                )  # the widest of all where held-out inputs lie far from those of the training
            own = max(SLACK, NATS / max(1, self._labels))
            inside = smallest_accepted(
                lambda decade, best: (
                    at(decade) <= best + (own if decade >= fitted_decade else self._share_of(best))
                )
            )
            moved = grid is None and inside != fitted_decade
            if moved and not self._gains(tried[inside].settings, tried[fitted_decade].settings):
                inside = fitted_decade
            self.posterior.settings = tried[inside].settings
        self._best_loss, self._best = tried[inside].loss, tried[inside].settings
        self._note(self._best_loss, min(each.loss for each in tried.values()))

    def _gains(self, found: Hyperparameters, fitted: Hyperparameters) -> bool:
        """Whether `found` predicts the labels better than the posterior of a fit, `fitted` at a temperature of 1, by
        `SURE` times the standard error of the mean gain. A gain by one label alone, which is 1 such error, says nothing
        of other inputs.
        """
        gains = self._label_losses(replace(fitted, temperature=1.0) if self._tempered else fitted)
        gains -= self._label_losses(found)
        count = max(2, self._labels)
        gain = float(gains.sum()) / count
        variance = max(0.0, float(gains.square().sum()) / count - gain**2) * count / (count - 1)
        return gain > SURE * (variance / count) ** 0.5

    def _label_losses(self, settings: Hyperparameters) -> Tensor:
        """Negative log-likelihoods of all labels at these settings, which are set; zeros of those that do not count."""
        self.posterior.settings = settings
        self._predictor.refresh(self._seed)
        with torch.no_grad():
            pairs = [
                (self._predictor.prediction_of(distribution), targets)
                for distribution, targets in self._cache.distributions()
            ]
            return torch.cat(
                [-as_double(p.log_prob(p.fitting(targets))).flatten().cpu() for p, targets in pairs]
            )

    def _share_of(self, best: float) -> float:
        """Nats above the best NLL that a posterior wider than a fit's own may cost. The share does not apply to the NLL
        of a density, which depends on the unit of the targets.
        """
        return min(SLACK, SHARE * best) if self.posterior.likelihood.logits else SLACK

    def _decade_from(self, base: Hyperparameters) -> float:
        """How far the present prior precision, or scale, is above that of `base`, in decades."""
        if not self.posterior.takes_prior:
            return log10(self.posterior.scale / base.scale)
        return log10(_geometric_mean(self.posterior.prior_precision) / _geometric_mean(base.prior_precision))

    def _note(self, loss: float, best: float) -> None:
        name = ABOUT[self.posterior.widening or "scale"].label
        self.trials.given_up = max(0.0, loss - best)
        reached = next((slack for slack in (self._share_of(best), SLACK) if loss <= best + slack), None)
        words = (
            "the widest that held-out labels do not clearly speak against"
            if reached is None
            else f"the widest with a validation NLL of at most {reached:.2g} above the best"
        )
        self.posterior.history.tuning[name] = f"{words}; {loss - best:.2g} given up"
        if self._tempered:
            self._note_temperature()

    def _note_temperature(self) -> None:
        self.posterior.history.tuning["temperature"] = (
            "validation NLL, and a prior around 1 with a heavy tail above it"
        )
        low, high = (10.0**decade for decade in _TEMPERATURES)
        if not 1.05 * low < self.posterior.temperature < high / 1.05:
            self.trials.at_edge.append(f"temperature = {self.posterior.temperature:.3g}")

    def _widen(self, base: Hyperparameters, factor: float) -> None:
        prior = base.prior_precision
        if not self.posterior.takes_prior:
            self.posterior.scale = base.scale * factor
        elif isinstance(prior, dict):
            self.posterior.prior_precision = {k: v * factor for k, v in prior.items()}
        else:
            self.posterior.prior_precision = prior * factor

    def coordinate(self, name: str, max_evaluations: int) -> None:
        """Minimise the loss over one of ``"residual_weight"``, ``"scale"``, ``"noise"``, from the present values; keep
        the best values tried.
        """
        if self._best_loss == float("inf"):
            self._best_loss, self._best = self._evaluate(), self.posterior.settings
        base, hyperparameter = self._best, HYPERPARAMETER.get(name, name)
        tried = [(self._best_loss + self._prior_of(name), self._best_loss, base)]

        def objective(x: float) -> float:
            value = min(1.0, max(0.0, x)) if name == "residual_weight" else getattr(base, hyperparameter) * x
            self.posterior.settings = replace(base, **{hyperparameter: value})
            loss = self._evaluate()
            tried.append((loss + self._prior_of(name), loss, self.posterior.settings))
            return tried[-1][0]

        edge = False
        if name == "residual_weight":  # [0, 1] is its full domain, so its ends are no edges of a search
            from scipy.optimize import minimize_scalar

            options = {"xatol": 0.03, "maxiter": max_evaluations}
            minimize_scalar(objective, bounds=(0.0, 1.0), method="bounded", options=options)
            objective(0.0)
            objective(1.0)
        else:
            _, edge = search_decades(objective, (-2.0, 2.0), (-2.0, 2.0), 0.05, max_evaluations)
        improved = min(tried, key=lambda each: each[0])
        if improved[0] < tried[0][0] - _INDIFFERENT:
            _, self._best_loss, self._best = improved
            if edge:
                shown = getattr(self._best, hyperparameter)
                self.trials.at_edge.append(f"{name.replace('_', ' ')} = {shown:.3g}")
        self.posterior.settings = self._best
        label = ABOUT[hyperparameter].label
        if name == "noise" and self.posterior.noise_variance is not None:
            label = "noise variance"
        self.posterior.history.tuning[label] = "validation NLL"

    def _prior_of(self, name: str) -> float:
        """What the priors add to the mean loss of the present settings, where `name` is searched."""
        if name != "noise":
            return self._penalty()
        return self._penalty() + self._noise_reluctance(self.posterior.noise_scale) / max(1, self._labels)

    def _noise_reluctance(self, factor: float) -> float:
        """`reluctance` of a noise scale. Where the likelihood has no estimate of its noise, 1 is a dispersion that was
        given, often by default, and a smaller one is as likely as a larger one.
        """
        estimated = self.posterior.likelihood.noise_variance is not None
        return reluctance(factor if estimated else max(factor, 1 / factor))

    def only_temperature(self) -> None:
        """Set the temperature alone."""
        self._best_loss = self._evaluate()
        self._best = self.posterior.settings
        self._note_temperature()

    def finish(self) -> Trials:
        """The trials; warns of values at an edge, and if even the best predicts held-out data worse than the model."""
        self._bar.close()
        self.trials.chosen = self._trial_in_place()
        warn_edges(self.trials)
        twin, total, count = replicate(model_of(self.posterior)), 0.0, 0
        likelihood = self.posterior.observation.of_targets()
        with torch.no_grad():
            alone = (  # where the mean was trained, the model alone is another network
                ((batch.copied().call(twin), targets) for batch, targets in self._batches())
                if self.posterior.centre
                else self._cache.outputs(lambda batch: batch.copied().call(twin))
            )
            for outputs, targets in alone:
                total -= float(likelihood.log_prob(outputs, targets).sum())
                count += labelled(self.posterior.likelihood, targets)
        self.trials.model_alone = mean_of_labels(total, count)
        if self._best_loss > self.trials.model_alone + 2 * SLACK:
            advice = (
                "Train longer, with a smaller prior_precision, or with train_mean=False."
                if self.posterior.centre
                else "Restrict the posterior (layers='last') or give it more data."
            )
            warn_user(
                f"The best validation NLL found, {self._best_loss:.4g}, is worse than the model's own, "
                f"{self.trials.model_alone:.4g}: the posterior does not serve this model. {advice}"
            )
        return self.trials

    def _trial_in_place(self) -> dict[str, Any]:
        """The trial with the values that were set."""
        present = self.posterior.settings.plain()
        return next(
            trial
            for trial in reversed(self.trials.trials)
            if all(trial[name.replace("_", " ")] == value for name, value in present.items())
        )


def _best_temperature(objective: Callable[[float], float]) -> float:
    """Where the objective is least: the prior may leave it a minimum near 1 and another far above, so that a coarse
    grid comes first.
    """
    from scipy.optimize import minimize_scalar

    tried = dict[float, float]()

    def at(decade: float) -> float:
        tried[decade] = objective(10.0**decade)
        return tried[decade]

    low, high = _TEMPERATURES
    steps = round((high - low) / _COARSE)
    best = min((low + step * _COARSE for step in range(steps + 1)), key=at)
    bounds = max(low, best - _COARSE), min(high, best + _COARSE)
    minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 0.005, "maxiter": 25})
    return 10.0 ** min(tried, key=lambda decade: tried[decade])


def _geometric_mean(prior: Any) -> float:
    values = host_double(list(prior.values()) if isinstance(prior, dict) else [prior])
    return float(values.log().mean().exp())


# What a call of `posthoc_uq.tune` searches on held-out data.

PARAMETERS = ("prior_precision", "residual_weight", "scale", "noise")


def tunes_temperature(posterior: Posterior, temperature: bool | None) -> bool:
    """Whether the temperature is searched, by default where outputs are logits."""
    logits = posterior.likelihood.logits
    if temperature and not logits:
        raise PosthocUQError(
            f"A temperature divides logits; likelihood {posterior.likelihood.name!r} has none."
        )
    return logits if temperature is None else temperature


def has_something_to_tune(posterior: Posterior) -> bool:
    """Whether a search on held-out data, with nothing named, has something to search."""
    return posterior.widening is not None or posterior.likelihood.logits or posterior.likelihood.has_noise


def nothing_to_tune(posterior: Posterior) -> PosthocUQError:
    """The error for a search on held-out data that has nothing to search."""
    name, available = posterior.widening, _available(posterior)
    if name is None:
        reason = f"a posterior by method={posterior.method!r} has neither a prior precision nor a scale"
    else:
        reason = f"parameters=() leaves the {ABOUT[name].label} as it is"
    logits = posterior.likelihood.logits
    temperature = (
        "temperature=False leaves the temperature"
        if logits
        else f"likelihood {posterior.likelihood.name!r} has no temperature"
    )
    named = f"; what can be searched is named in parameters, out of {available}" if available else ""
    return PosthocUQError(f"There is nothing to tune: {reason}, and {temperature}{named}.")


def _available(posterior: Posterior) -> list[str]:
    """The names in `PARAMETERS` of what this posterior has."""
    return [name for name in PARAMETERS if HYPERPARAMETER.get(name, name) in posterior.tunable]


def checked_grid(names: list[str], grid: Sequence[float]) -> list[float]:
    """The prior precisions to try, as numbers."""
    if "prior_precision" not in names:
        raise PosthocUQError(f"prior_precisions are given, and parameters={names} leave them alone.")
    if (
        isinstance(cast(Any, grid), (str, Mapping))
        or not isinstance(cast(Any, grid), Iterable)
        or getattr(grid, "ndim", 1) != 1
        or len(grid) == 0
    ):
        raise PosthocUQError(f"prior_precisions must be a list of numbers, not {shown(grid)}.")
    return [check_option("Each of prior_precisions", value, Positive) for value in grid]


def names_to_tune(posterior: Posterior, parameters: tuple[str, ...] | None, noise: bool | None) -> list[str]:
    """The names of what is searched one after the other, which may be none."""
    has_noise = posterior.likelihood.has_noise
    available = _available(posterior)
    if noise and not has_noise:
        raise PosthocUQError(
            f"noise=True tunes the noise variance, or dispersion, of a regression, and likelihood "
            f"{posterior.likelihood.name!r} has none; leave it out."
        )
    if parameters is None:
        first = [] if posterior.widening is None else [posterior.widening]
        return [*first, "noise"] if has_noise and noise is not False else first
    if isinstance(cast(Any, parameters), str) or not isinstance(cast(Any, parameters), (list, tuple, set)):
        raise PosthocUQError(f"parameters must be a tuple out of {available}, not {shown(parameters)}.")
    unknown = [p for p in parameters if p not in available]
    if unknown:
        allowed = f"among {available}" if available else "left out"
        close = did_you_mean(unknown, available)
        raise PosthocUQError(
            f"parameters must be {allowed} for this posterior; not {list(parameters)}.{close}"
        )
    if noise is False and "noise" in parameters:
        raise PosthocUQError("parameters name the noise, and noise=False keeps it; leave one of them out.")
    return [*parameters, "noise"] if noise and "noise" not in parameters else list(parameters)


# Hyperparameters of a fitted posterior: by faithfulness to the network, by the likelihood of held-out data,
# or by the log marginal likelihood.
#
# A change of them factorises small matrices again, and never needs the training data.

CRITERIA = ("faithful", "likelihood", "evidence")


@orderly
def tune(
    posterior: Posterior,
    loader: Iterable[Any] | None = None,
    *,
    criterion: str | None = None,
    divergence: float | None = None,
    temperature: bool | None = None,
    per_layer: bool = False,
    noise: bool | None = None,
    parameters: tuple[str, ...] | None = None,
    prior_precisions: Sequence[float] | None = None,
    head: str | None = None,
    n_samples: int = 30,
    max_evaluations: int = 12,
    seed: int = 0,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    progress: bool = True,
    **options: Any,
) -> Trials:
    """Choose the hyperparameters of `posterior`, and set them, by one of three criteria.

    * ``"faithful"``: the widest posterior whose predictions stay within `divergence` nats of the network's own, as a
      mean over a few hundred inputs like the training inputs. Needs no labels. It is the default of `fit`.
    * ``"likelihood"``, the default with a loader: the widest posterior, but none wider than the faithful one and that
      of a fit (by the evidence, where the likelihood measures no divergence), whose negative log-likelihood
      of held-out data (the mean over labels; of outputs with positions, over those whose label counts) is at most 0.01
      nats above the best; of classes, what is wider than the faithful posterior of a
      fit may also cost at most a tenth of the best, and another width than that of a fit must predict the labels better
      than the untuned posterior, by the standard error of the gain. Held-out data of the training distribution
      cannot judge uncertainty about foreign inputs, so the widest posterior that they allow is taken. Where outputs
      are logits every prior precision has the temperature that predicts best, under a prior that is firm below 1, so
      that a few labels sharpen nothing, and has a heavy tail above it; what that prior costs counts for the width too.
      The observation noise of a regression is searched after it. `scale` and `residual_weight` are searched if asked
      for, one after the other.
    * ``"evidence"``, the default without a loader: the prior precision of the largest log marginal likelihood. It is
      right for the linearised model of a network with many data, and far too wide for drawn weights of one with few.

    A posterior whose variances were optimised has a fixed prior precision and no marginal likelihood; its `scale` is
    chosen instead, or, where it has none, the temperature alone.

    Args:
        posterior: from `fit` or `load`.
        loader: held-out batches with targets, read several times; for ``"faithful"`` training inputs, or similar
            ones, read once.
        criterion: see above.
        divergence: the budget of the faithful prior, in nats; by default 0.002 for ``"faithful"``, and 0.02 for
            ``"likelihood"``, where held-out data guard against harm.
        temperature: with held-out data: whether a temperature on the logits is searched, by default where outputs are
            logits. With ``"faithful"``: whether the mean entropy on the training inputs is brought back to the
            network's; by default not, since that keeps a network's overconfidence on what it memorised.
        per_layer: one prior precision per layer (evidence only).
        noise: tune a common factor on the observation noise of a regression: the noise variance, the variances that a
            heteroscedastic network predicts, the dispersion of ``"negative_binomial"`` and of ``"gamma"`` (the inverse
            of its shape). By default on held-out data, unless `parameters` leave it out, also where it was given to the
            fit: training residuals say too little of a network that overfits. The prior precision is then chosen at
            the noise at which the network alone predicts them best, and the noise after it. False keeps the noise. By
            the evidence the noise variance is tuned only with True.
        parameters: all that is to be searched on held-out data, out of ``"prior_precision"``, ``"residual_weight"``,
            ``"scale"``, ``"noise"``, or nothing (``()``) for the temperature alone. By default the prior precision, or
            the scale where that is fixed, or nothing where there is neither, and the noise if there is one.
        prior_precisions: the values to try on held-out data, in place of the search (of per-layer prior precisions:
            their geometric mean).
        head: the head that predicts: ``"sampling"``, ``"linearized"`` or ``"moments"``; by default the one that the
            posterior's hyperparameters were found for. It is recorded, and `wrap` takes it by default.
        n_samples: weight draws of the sampling head.
        max_evaluations: evaluations per hyperparameter other than the prior precision.
        seed: of the draws.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: show a bar.
        **options: of the head, as in `wrap`.

    Referral thresholds belong to the hyperparameters they were set for; a search that changes these warns of it.

    The search works on a copy: until it ends, and if it fails, other threads predict with the posterior as it was, and
    save that. One call at a time may change a posterior.

    Returns:
        All trials. Printed, they begin with the chosen trial and the nats given up against the best for a wider
        posterior; values at the edge of their interval are listed, and warned of.

    Raises:
        PosthocUQError: options that do not fit together, no targets, or a posterior without its model.
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"tune takes a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    of_heads = sorted({option for name in HEADS for option in options_of(head_class(name))})
    check_names("tune", options, of_heads, signature(tune).parameters)
    request = _Request(
        _criterion(criterion, loader),
        None if divergence is None else check_option("divergence, a budget in nats,", divergence, Positive),
        None if temperature is None else check_option("temperature", temperature, bool),
        None if noise is None else check_option("noise", noise, bool),
        parameters,
        prior_precisions,
        check_option("max_evaluations", max_evaluations, Count),
        check_option("seed", seed, Seed),
        progress,
    )
    n_samples = check_option("n_samples", n_samples, Count)
    per_layer = check_option("per_layer", per_layer, bool)
    reader = BatchReader.of(model_of(posterior), batch_to_inputs, batch_to_targets)
    if request.criterion == "evidence":
        if head is not None or options:
            raise PosthocUQError(
                "The evidence needs no head; head and its options are for held-out data, or criterion='faithful'."
            )
        with posterior.changing("uq.tune"):
            trial = posterior.trial()
            trials = _by_evidence(trial, loader, request, per_layer)
            posterior.adopt(trial)
        return trials
    if per_layer:
        raise PosthocUQError(
            "per_layer=True is chosen by the log marginal likelihood; call tune without a loader."
        )
    if loader is None:
        raise PosthocUQError(
            f"criterion={request.criterion!r} needs data: pass a loader of "
            + ("held-out data with targets." if request.criterion == "likelihood" else "training inputs.")
        )
    check_loader(loader)
    with posterior.changing("uq.tune"):
        trial = posterior.trial()
        name, head_options = _head(trial, head, n_samples, request.seed, options)
        _forget_calibration(trial, name)
        trial.warned_heads = {*posterior.warned_heads, name}
        faithful_value = _recorded_faithful_value(trial, name)
        predictor = wrap(model_of(trial), trial, name, **head_options)
        recorded_options = plain_options(options or _recorded_options(trial, name))
        trial.history.head = {"name": name, "options": recorded_options, "criterion": request.criterion}
        if request.criterion == "faithful":
            trials = _by_faithfulness(trial, loader, predictor, reader, request)
        else:
            trials = _by_likelihood(trial, loader, predictor, reader, request, faithful_value)
        posterior.adopt(trial)
        posterior.warned_heads.add(name)
    return trials


@dataclass(frozen=True)
class _Request:
    """The checked arguments of a call of `tune`; see there."""

    criterion: str
    divergence: float | None
    temperature: bool | None
    noise: bool | None
    parameters: tuple[str, ...] | None
    grid: Sequence[float] | None
    max_evaluations: int
    seed: int
    progress: bool


def _by_evidence(
    posterior: Posterior, loader: Iterable[Any] | None, request: _Request, per_layer: bool
) -> Trials:
    other_goals = request.parameters is not None or request.grid is not None
    if loader is not None or request.temperature or other_goals:
        raise PosthocUQError(
            "The evidence needs no data and chooses the prior precision alone: leave loader, temperature, "
            "parameters and prior_precisions out, or take criterion='likelihood'."
        )
    trials = maximise_evidence(
        posterior, per_layer=per_layer, noise=bool(request.noise), progress=request.progress
    )
    posterior.history.head |= {"criterion": request.criterion} if posterior.history.head else {}
    return trials


def _by_faithfulness(
    posterior: Posterior, loader: Iterable[Any], predictor: Predictor, reader: BatchReader, request: _Request
) -> Trials:
    tunes_temperature(posterior, request.temperature)
    if request.parameters is not None or request.grid is not None or request.noise:
        raise PosthocUQError(
            "parameters, prior_precisions and noise are tuned by criterion='likelihood'; the faithful prior "
            "needs none of them."
        )
    inputs = sampled_inputs(posterior, loader, reader, request.seed, request.progress)
    budget = DIVERGENCE if request.divergence is None else request.divergence
    return settle_faithful(
        posterior,
        inputs,
        predictor,
        budget,
        seed=request.seed,
        matched=bool(request.temperature),
        progress=request.progress,
    )


def settle_faithful(
    posterior: Posterior,
    inputs: Sequence[Batch],
    predictor: Predictor,
    divergence: float,
    *,
    seed: int = 0,
    matched: bool = False,
    progress: bool = False,
) -> Trials:
    """Set the faithful prior (or scale) and its temperature, and record how far the predictions moved.

    Args:
        posterior: its record names the head of the predictor.
        inputs: training inputs.
        predictor: predicts them.
        divergence: the budget in nats.
        seed: of the draws.
        matched: whether each prior precision has its own temperature.
        progress: whether to show a bar.
    """
    earlier = posterior.history.faithful
    if earlier and posterior.temperature == earlier["temperature"]:  # matched by that search: take it back
        posterior.temperature = earlier["network_temperature"]
    network_temperature = posterior.temperature
    search = FaithfulSearch(posterior, inputs, predictor, seed=seed, matched=matched, progress=progress)
    reached = search.run(divergence)
    history, name = posterior.history, search.name
    history.tuning[ABOUT[name].label] = f"faithful through head={predictor.head!r}: {reached}"
    history.tuning.pop("temperature", None)
    if posterior.temperature != network_temperature:
        history.tuning["temperature"] = (
            "the one at which the mean entropy on the same inputs is the network's"
        )
    history.faithful = {
        "head": predictor.head,
        "value": posterior.settings.plain()[name],
        "temperature": posterior.temperature,
        "network_temperature": network_temperature,
        "divergence": reached.divergence,
        "budget": float(divergence),
        "settings": other_settings(posterior),
    }
    return search.trials


def other_settings(posterior: Posterior) -> dict[str, float]:
    """The hyperparameters that a faithful prior (or scale) belongs to."""
    names = [name for name, about in ABOUT.items() if about.of_weights and not about.by_layer]
    return {name: float(getattr(posterior, name)) for name in names if name != posterior.widening}


def sampled_inputs(
    posterior: Posterior, loader: Iterable[Any], reader: BatchReader, seed: int, progress: bool
) -> list[Batch]:
    """A few hundred inputs of a loader, those with the smallest hashes."""
    wanted = inputs_to_keep(posterior.layers.values())
    sample = KeptInputs(TEMPORARY_BYTES, posterior.likelihood, wanted)
    with isolated_random_state(seed):
        sample.read(loader, reader, seed, progress)
    return sample.batches(reader.device)


def _by_likelihood(
    posterior: Posterior,
    loader: Iterable[Any],
    predictor: Predictor,
    reader: BatchReader,
    request: _Request,
    faithful_value: Any,
) -> Trials:
    names, seed = names_to_tune(posterior, request.parameters, request.noise), request.seed
    tempered = tunes_temperature(posterior, request.temperature)
    if not names and not tempered:
        raise nothing_to_tune(posterior)
    first, grid = posterior.widening, None if request.grid is None else checked_grid(names, request.grid)
    # The search begins at the fit's own posterior, also where an earlier call of `tune` moved it: labels that were seen
    # before find the same again.
    fitted = posterior.history.faithful
    if tempered:
        posterior.temperature = fitted.get("network_temperature", 1.0)
    search = HeldOutSearch(
        posterior,
        loader,
        predictor,
        seed=seed,
        reader=reader,
        temperature=tempered,
        progress=request.progress,
    )
    if "noise" in names:
        search.start_noise()
    if first in names:
        if grid is None and posterior.likelihood.has_divergence:
            budget = GUARDED if request.divergence is None else request.divergence
            _return_to_faithful(posterior, loader, predictor, reader, budget, seed, request.progress)
        elif grid is None:
            if request.divergence is not None:
                raise PosthocUQError(
                    f"Likelihood {posterior.likelihood.name!r} measures no divergence; leave divergence out, or give "
                    f"it a method divergence(outputs, prediction)."
                )
            _return_to_evidence(posterior, request.progress)

        def set_as_fitted() -> None:
            if request.divergence is not None and request.divergence <= DIVERGENCE:
                return  # nothing wider than what was asked for
            if not posterior.likelihood.has_divergence:
                _return_to_evidence(posterior, request.progress)
            elif faithful_value is not None:
                posterior.adjust(**{cast(str, posterior.widening): faithful_value})
            else:
                inputs = sampled_inputs(posterior, loader, reader, seed, request.progress)
                again = FaithfulSearch(posterior, inputs, predictor, seed=seed, progress=request.progress)
                again.set_widest(DIVERGENCE)

        search.widest(grid, set_as_fitted)
    for name in names:
        if name != first:
            search.coordinate(name, request.max_evaluations)
    if not names:
        search.only_temperature()
    posterior.history.faithful = fitted
    return search.finish()


def _return_to_faithful(
    posterior: Posterior,
    loader: Iterable[Any],
    predictor: Predictor,
    reader: BatchReader,
    divergence: float,
    seed: int,
    progress: bool,
) -> None:
    """Set the faithful prior, from which a search on held-out data goes upwards: the recorded one if it was found with
    the same head, budget and settings, or else that of the held-out inputs.
    """
    recorded = posterior.history.faithful
    same = recorded and (recorded["head"], recorded["budget"], recorded["settings"]) == (
        predictor.head,
        divergence,
        other_settings(posterior),
    )
    if same:
        posterior.adjust(**{cast(str, posterior.widening): recorded["value"]})
        return
    inputs = sampled_inputs(posterior, loader, reader, seed, progress)
    settle_faithful(posterior, inputs, predictor, divergence, seed=seed, progress=progress)


def _return_to_evidence(posterior: Posterior, progress: bool) -> None:
    """Set the prior precision by the evidence, as a fit does where the likelihood has no faithful prior: from there a
    search on held-out data goes upwards. A posterior without an evidence stays as it is.
    """
    if posterior.takes_prior and LOG_DETERMINANT in posterior.capabilities:
        maximise_evidence(posterior, progress=progress)


def _recorded_faithful_value(posterior: Posterior, head: str) -> Any:
    """The recorded faithful prior precision (or scale), if it belongs to this head and the present settings; None
    otherwise.
    """
    recorded = posterior.history.faithful
    if not recorded:
        return None
    same = (recorded["head"], recorded["settings"]) == (head, other_settings(posterior))
    return recorded["value"] if same else None


def _criterion(criterion: str | None, loader: Iterable[Any] | None) -> str:
    if criterion is None:
        return "evidence" if loader is None else "likelihood"
    return one_of("criterion", criterion, CRITERIA)


def _head(
    posterior: Posterior, head: str | None, n_samples: int, seed: int, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The head to tune through, and its options."""
    name = recorded_head(posterior)[0] if head is None else head
    head_class(name)
    chosen = options or _recorded_options(posterior, name)
    return name, ({**chosen, "n_samples": n_samples, "seed": seed} if name == "sampling" else chosen)


def _recorded_options(posterior: Posterior, name: str) -> dict[str, Any]:
    recorded, options = recorded_head(posterior)
    return options if recorded == name else {}


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a head that can be kept in a file."""
    return {k: v for k, v in options.items() if isinstance(v, (bool, int, float, str))}


def _forget_calibration(posterior: Posterior, head: str) -> None:
    if head == "moments" and posterior.history.calibration:
        posterior.history.calibration = {}  # it does not belong to the hyperparameters that are tried
        warn_user("tune leaves the moments head's calibration out; calibrate again.")
