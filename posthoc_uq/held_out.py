"""The search for hyperparameters on held-out data, through a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite, log, log1p, log10
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc_uq.devices import as_double, host_double
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.heads.features import FeatureCache
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.inference.evidence import Trials, search_decades, warn_edges
from posthoc_uq.likelihoods.counted import labelled, mean_of_labels
from posthoc_uq.loaders import BatchReader, batches, check_reusable
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.settings import ABOUT, Hyperparameters
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.progress import Progress
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate
from posthoc_uq.warned import warn_user

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
