"""Hyperparameters by the likelihood of held-out labels: the widest posterior that they do not speak against."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import inf, isfinite, log10
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posthoc_uq.core.batches import WITH_TARGETS, Batch, BatchReader, batches, check_reusable, count_samples
from posthoc_uq.core.devices import TEMPORARY_BYTES, as_double, host_double
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.kept_inputs import joined
from posthoc_uq.fitting.class_scaling import ClassRows, ClassTable, Scaling, class_scaled
from posthoc_uq.fitting.faithful import (
    Score,
    backward_dominates,
    model_of,
    rows_named,
    scale_width,
    width_parameter_of,
)
from posthoc_uq.heads.ensemble import EnsemblePredictor
from posthoc_uq.heads.features import CACHE_BUDGETS
from posthoc_uq.heads.predictor import Predictor, scaled_logits
from posthoc_uq.likelihoods.draws import OutputGaussian
from posthoc_uq.likelihoods.weights import labelled, mean_of_labels
from posthoc_uq.posteriors.history import Trial, Trials
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import SearchBar, search_decades
from posthoc_uq.posteriors.settings import HYPERPARAMETERS, Hyperparameters, get_width

_COMPARED = 16  # inputs on which approximate variances are compared with exact ones
_MAX_COST = 0.003  # nats above the best NLL that a wider posterior may cost
_MAX_HARM = 0.01  # nats that a posterior may lose against that of the fit, with `_ERRORS` ...
_ERRORS = 2.0  # ... standard errors of that loss added
_MIN_EVIDENCE = 3.0  # nats over all labels by which a narrower posterior than that of the fit must be better
_DOUBT = 3e-4  # nats from its limit at which a decision by nearly right losses is made again by exact ones
_FIRST_STEP = 0.25  # decades of the prior precision; every following step is as long as all before it
_MAX_WIDER, _MAX_NARROWER = 1.0, 8.0  # decades from the prior precision of the fit
_USUAL_WIDTHS = 4  # that are tried, for what a bar shows
# Of the logarithm of a temperature, or of a noise scale; see `hyperprior_penalty`.
_PRIOR_SPREAD = 0.1
_HEAVY_SPREAD = 0.3  # of a temperature above 1, which 20 labels can move to 5
_SCALING_ROUNDS = 3  # of logits by class, from predictions at what the round before found ...
_SCALING_STEP = 0.01  # ... unless no shift moved by more
_MIN_GAIN = 1e-6  # nats: a smaller gain does not move a hyperparameter
_NOISES = (-8.0, 16.0)  # decades of the noise scale in which the best one of the network alone is sought
_TEMPERATURES = np.linspace(-1.0, 1.5, 11)  # decades of the temperature at which losses are computed


def hyperprior_penalty(factor: float, centre: float = 1.0, spread: float = _PRIOR_SPREAD) -> float:
    """Minus the logarithm of the prior density of a temperature, or of a noise scale, less that at its centre, in nats.

    Below 1, where predictions become more certain, the logarithm has a normal density with exponential tails: a few
    labels that are all predicted correctly ask for a temperature of zero. Above 1 it has a Cauchy density, since a
    network that has memorised its data needs a temperature of ten, and a noise of thousands of times its residuals.

    Args:
        factor: the temperature, or the noise scale.
        centre: the most probable one, at least 1: that of leave-one-out, where it was estimated.
        spread: of the Cauchy density.
    """
    return float(_penalties(np.array(factor), centre, spread))


def _penalties(factors: NDArray[np.float64], centre: float, spread: float) -> NDArray[np.float64]:
    """See `hyperprior_penalty`."""
    above = np.log(np.maximum(factors, 1.0) / max(centre, 1.0)) / spread
    below = np.log(np.minimum(factors, 1.0)) / _PRIOR_SPREAD
    return np.log1p(above**2) + np.where(below > -1, below**2 / 2, -below - 0.5)


def most_probable_factor(mean_square: float, count: int, noise_scale: float, centre: float) -> float:
    """The factor on all variances of a regression that is most probable by held-out targets, under the prior of
    `hyperprior_penalty` on the noise scale that it leads to.

    Args:
        mean_square: mean of the squared distances from the means, over the variances.
        count: how many distances.
        noise_scale: of the variances.
        centre: of its prior.
    """
    mean_square = max(mean_square, 10.0 ** _NOISES[0])
    least, most = (end(mean_square, 1 / noise_scale, centre / noise_scale) for end in (min, max))
    logs = np.linspace(np.log(least), np.log(most), 2001)
    factors = np.exp(logs)
    losses = 0.5 * count * (logs + mean_square / factors) + _penalties(
        noise_scale * factors, centre, _PRIOR_SPREAD
    )
    return float(factors[np.argmin(losses)])


def _most_probable(losses: Sequence[float], labels: int, centre: float) -> float:
    """The temperature of the least sum of losses and `hyperprior_penalty`.

    Args:
        losses: means over labels at `_TEMPERATURES`; between these they follow a spline, since they are smooth and the
            prior alone is not.
        labels: how many there are.
        centre: of the prior.
    """
    finite = np.isfinite(losses)
    if finite.sum() < 2:
        return centre
    known = _TEMPERATURES[finite]
    decades = np.linspace(known[0], known[-1], 1001)
    penalties = _penalties(10.0**decades, centre, _HEAVY_SPREAD) / max(1, labels)
    from scipy.interpolate import CubicSpline

    curve = CubicSpline(known, np.array(losses)[finite])
    return 10.0 ** float(decades[np.argmin(curve(decades) + penalties)])


def is_at_edge(temperature: float) -> bool:
    """Whether a temperature is a bound of the search, and perhaps no optimum."""
    low, high = (10.0 ** float(decade) for decade in _TEMPERATURES[[0, -1]])
    return not 1.05 * low < temperature < high / 1.05


def centre_of(posterior: Posterior, name: str) -> float:
    """The most probable temperature, or noise scale, before any held-out label is seen: that of leave-one-out, or 1."""
    left_out = posterior.history.left_out
    found = 1.0 if left_out is None else getattr(left_out, name)
    return min(found, 10.0 ** float(_TEMPERATURES[-1])) if name == "temperature" else found


def temperature_penalty(posterior: Posterior, temperature: float) -> float:
    """`hyperprior_penalty` of a posterior's temperature."""
    return hyperprior_penalty(temperature, centre_of(posterior, "temperature"), _HEAVY_SPREAD)


class TemperatureLosses:
    """The losses of held-out labels at `_TEMPERATURES`, from the distributions of their outputs, with few draws of
    these.

    Attributes:
        labels: how many count.
    """

    def __init__(self) -> None:
        self._total = torch.zeros(len(_TEMPERATURES), dtype=torch.float64, device="cpu")
        self.labels = 0

    def add(self, predictor: Predictor | EnsemblePredictor, distribution: Any, targets: Tensor) -> None:
        """Add those of a batch, whose outputs have this `distribution`."""
        temperatures: list[float] = (10.0**_TEMPERATURES).tolist()
        sums = list[Tensor]()
        for times, made in predictor.fast_predictions(distribution, temperatures):
            logs = made.log_prob(made.fitting(torch.cat([targets] * times)))
            sums.append(host_double(logs).reshape(times, -1).sum(1))
        self._total += torch.cat(sums)
        self.labels += labelled(predictor.observation, targets)

    def most_probable(self, centre: float) -> float:
        """The most probable temperature of all, under the prior of `hyperprior_penalty`."""
        losses: list[float] = (-self._total / max(1, self.labels)).tolist()
        return _most_probable(losses, self.labels, centre)


class Evaluated(NamedTuple):
    """What an evaluation of a `HeldOutLoss` was made of.

    Attributes:
        predictor: at its settings.
        data: all batches, and their targets.
        distributions: of the outputs of each.
    """

    predictor: Predictor
    data: Sequence[tuple[Batch, Tensor]]
    distributions: Sequence[OutputGaussian]


class HeldOutLoss(Score):
    """Mean negative log-likelihood of the held-out labels that count (one a sample, or one a position), in nats.

    Where the temperature is searched, every evaluation first finds the most probable one under the prior of
    `hyperprior_penalty`. It is sought with few draws of the outputs; the loss at it is the head's own.

    Args:
        loader: held-out batches with targets.
        predictor: predicts them.
        reader: takes batches apart.
        seed: of the draws.
        tempered: whether the temperature is searched.

    Attributes:
        labels: how many count, of the last evaluation.
        by_sample: the losses of the last evaluation, ``(samples,)`` float64: the sum over a sample's labels.
        untempered: those of the first evaluation, at the temperature that the posterior had.
        temperature: that of all evaluations to come, None to search it.
        doubt: in words, where `class_scaled` left the mean probability of a class far from its frequency.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        predictor: Predictor,
        reader: BatchReader,
        *,
        seed: int,
        tempered: bool,
    ) -> None:
        check_reusable(loader, 2)
        super().__init__(predictor, self._batches, seed, tempered)
        self._loader, self._reader = loader, reader
        self.labels = 0
        self.by_sample = torch.zeros(0, dtype=torch.float64, device="cpu")
        self.untempered: Tensor | None = None
        self.temperature: float | None = None
        self.doubt: str | None = None
        self._rows: ClassRows | None = None  # of the last mean, if they are wanted
        self._last: tuple[Hyperparameters, Trial] | None = None  # an evaluation that need not be made again
        self._at_every_prior: list[tuple[Any, Tensor]] | None = None
        self._correction = 1.0
        self._kept: list[tuple[Batch, Tensor]] | None = None  # all batches, where they are few
        self._evaluated: tuple[Predictor, list[Any]] | None = None  # of the last exact evaluation

    def evaluate(self, settings: Hyperparameters) -> Trial:
        """See `Score`."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] == settings else super().evaluate(settings)

    def class_scaled(self, settings: Hyperparameters, scaling: Scaling) -> Hyperparameters:
        """Settings with the shift, and scale, of each class that the labels ask for; see `class_scaling`. The next
        evaluation at what is returned finds its temperature; it costs nothing where nothing was changed.

        Raises:
            PosthocUQError: a shift is asked for, and outputs have positions.
        """
        likelihood, asked = self.posterior.likelihood, scaling in ("bias", "vector")
        penalty = partial(temperature_penalty, self.posterior)
        for step in range(_SCALING_ROUNDS if self._tempered and likelihood.class_logits else 0):
            self._rows = ClassRows()
            trial = self.evaluate(settings)
            table, self._rows = self._rows.table(), None
            self._last = (settings, trial)
            if table is None or not isfinite(trial.objective):
                if asked and isfinite(trial.objective):
                    raise PosthocUQError(
                        f"scaling={scaling!r} is for outputs without positions such as pixels or tokens; leave it out."
                    )
                break
            found = trial.settings
            if scaling != "temperature":
                found = class_scaled(table, trial.settings, scaling, penalty)
            if step == 0:
                self.doubt = doubt_of(table, scaling, moved=found is not trial.settings)
            if found is trial.settings:
                break
            moved = np.subtract(found.class_shift, settings.class_shift or 0.0)
            settings, self._last, self.untempered = found, None, None
            if np.abs(moved).max() <= _SCALING_STEP:
                break
        return settings

    @contextmanager
    def approximated(self, settings: Hyperparameters) -> Generator[bool]:
        """Evaluations within differ from these settings in the prior precision alone, and take one set of backward
        passes in all, by `Predictor.at_every_prior`; gives whether the head has that, it pays, and the labels fit into
        memory.
        """
        found, nbytes, predictor = list[tuple[Any, Tensor]](), 0, self._at(settings)
        for batch, targets in self._batches() if _trials_are_dear(self.posterior) else ():
            made = predictor.at_every_prior(batch)
            nbytes += 0 if made is None else made.nbytes
            if made is None or nbytes > CACHE_BUDGETS * TEMPORARY_BYTES:
                found.clear()
                break
            found.append((made, targets))
            if len(found) == 1:
                self._correction = _exact_share(predictor, batch, made)
        self._at_every_prior = found or None
        try:
            yield bool(found)
        finally:
            self._at_every_prior = None

    def _pairs(self, predictor: Predictor) -> Iterator[tuple[Any, Any]]:
        if self._at_every_prior is None:
            return self._exact_pairs(predictor)
        width = get_width(predictor.posterior.settings, "prior_precision")
        share = self._correction
        return ((made.at(width).times(share), targets) for made, targets in self._at_every_prior)

    def _exact_pairs(self, predictor: Predictor) -> Iterator[tuple[Any, Any]]:
        found, nbytes, settings = list[Any](), 0, predictor.posterior.settings
        known = self.evaluated()
        if known is not None and known.predictor.posterior.settings.of_weights() == settings.of_weights():
            targets = (targets for _, targets in known.data)
            yield from zip(known.distributions, targets, strict=True)
            return
        for distribution, targets in super()._pairs(predictor):
            nbytes += 8 * (distribution.numbers if isinstance(distribution, OutputGaussian) else inf)
            if nbytes <= TEMPORARY_BYTES:
                found.append(distribution)
            yield distribution, targets
        self._evaluated = (predictor, found) if nbytes <= TEMPORARY_BYTES else None

    def evaluated(self) -> Evaluated | None:
        """What the last exact evaluation was made of, where that is little."""
        if self._evaluated is None or self._kept is None:
            return None
        predictor, found = self._evaluated
        return Evaluated(predictor, self._kept, found)

    def _batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """All batches with targets, in the same order at every call; few of them are read from the loader once."""
        if self._kept is not None:
            yield from self._kept
            return
        kept, nbytes = list[tuple[Batch, Tensor]](), 0
        with isolated_random_state(self._seed):
            read = batches(self._loader, self._reader)
            for batch in read if backward_dominates(self.posterior) else joined(read):
                if batch.targets is None:
                    raise PosthocUQError(
                        "Tuning on held-out data needs targets, and loader (val_loader of a fit) yields inputs "
                        f"alone; {WITH_TARGETS}"
                    )
                yield batch, (targets := batch.targets.clone())  # which are kept beside features and outputs
                nbytes += sum(tensor.nbytes for tensor in (*batch.tensors, targets))
                if (
                    nbytes <= TEMPORARY_BYTES and not self._cache.nbytes
                ):  # else features are kept in their place
                    kept.append((batch.kept(), targets))
                else:
                    kept, nbytes = [], inf
        self._kept = kept or None

    def _check_network(self) -> None:
        with self._rows_named():
            super()._check_network()

    def require(self, score: float) -> None:
        """See `Score`."""
        with self._rows_named():
            super().require(score)

    def _rows_named(self) -> AbstractContextManager[None]:
        """Around a look at batches that may have been joined."""
        return rows_named(self.posterior, self._seed, lambda: batches(self._loader, self._reader))

    def _mean(self, predictor: Predictor, pairs: Iterable[tuple[Any, Any]]) -> float:
        losses, count, likelihood = list[Tensor](), 0, self.posterior.likelihood
        if self._rows is not None:
            self._rows = ClassRows()
        for distribution, targets in pairs:
            prediction = predictor.prediction_of(distribution)
            likelihood.check(prediction.outputs_mean, targets)
            fitting = prediction.fitting(targets)
            losses.append(-as_double(prediction.log_prob(fitting)).flatten().cpu())
            if self._rows is not None and prediction.kind != "positions":
                self._rows.add(prediction, fitting)
            count += labelled(likelihood, targets)
        self.labels, self.by_sample = count, torch.cat(losses) if losses else self.by_sample
        if self.untempered is None:
            self.untempered = self.by_sample
        return mean_of_labels(float(self.by_sample.sum()), count)

    def _best_temperature(self, predictor: Predictor, pairs: Sequence[tuple[Any, Any]]) -> float:
        if self.temperature is not None:
            return self.temperature
        if self.untempered is None:
            self._mean(predictor, pairs)
        losses = TemperatureLosses()
        for distribution, targets in pairs:
            losses.add(predictor, distribution, targets)
        return losses.most_probable(centre_of(self.posterior, "temperature"))

    def temperature_penalty(self, temperature: float) -> float:
        """What the prior of the temperature adds to the mean loss of the labels, where the temperature is searched."""
        if not self._tempered:
            return 0.0
        return temperature_penalty(self.posterior, temperature) / max(1, self.labels)

    def noise_reluctance(self, factor: float) -> float:
        """`hyperprior_penalty` of a noise scale. Where the likelihood has no estimate of its noise, 1 is a
        dispersion that was given, often by default, and a smaller one is as likely as a larger one.
        """
        estimated = self.posterior.likelihood.noise_variance is not None
        return hyperprior_penalty(
            factor if estimated else max(factor, 1 / factor), centre_of(self.posterior, "noise_scale")
        )

    def of_model_alone(self, noise_scale: float) -> float:
        """The loss of the model without a posterior."""
        if not self.posterior.trained_mean:
            return self._of_outputs(self._network_outputs(), noise_scale)
        network = replicate(model_of(self.posterior))  # another network than that at the posterior's mean
        with torch.no_grad():
            return self._of_outputs(((b.copied().call(network), y) for b, y in self._batches()), noise_scale)

    def of_network(self, settings: Hyperparameters) -> float:
        """The loss of the network at the posterior's mean, which an ever narrower posterior with these settings comes
        to, at its most probable temperature and with what the prior of that adds.
        """
        noise_scale, posterior = settings.noise_scale, self.posterior.at(settings)
        with torch.no_grad():
            pairs = list(self._network_outputs())
        if not self._tempered:
            return self._of_outputs(pairs, noise_scale)

        def at(temperature: float) -> float:
            scaled = ((scaled_logits(out, posterior, temperature=temperature), y) for out, y in pairs)
            return self._of_outputs(scaled, noise_scale)

        losses = [at(10.0 ** float(decade)) for decade in _TEMPERATURES]
        best = _most_probable(losses, self.labels, centre_of(self.posterior, "temperature"))
        return at(best) + self.temperature_penalty(best)

    def _of_outputs(self, pairs: Iterable[tuple[Tensor, Any]], noise_scale: float) -> float:
        """The loss of outputs without uncertainty."""
        likelihood = self.posterior.likelihood.at_noise_scale(noise_scale).for_scoring()
        total, count = 0.0, 0
        with torch.no_grad():
            for outputs, targets in pairs:
                total -= float(as_double(likelihood.log_prob(outputs, targets)).sum())
                count += labelled(self.posterior.likelihood, targets)
        return mean_of_labels(total, count)

    def noise_of_network(self, settings: Hyperparameters) -> float:
        """The noise scale at which the network alone predicts the held-out data best, under the prior of
        `hyperprior_penalty`: for Gaussian noise about that of their mean squared residual. There a search may begin
        that does not depend on what was found before.

        A posterior that was trained, and not laid around a network, may have learned a noise: it keeps that where it
        then predicts better.
        """
        posterior, likelihood = self.posterior, self.posterior.likelihood.for_scoring()
        with torch.no_grad():
            self._check_network()
            pairs = list(self._network_outputs())
        for outputs, targets in pairs:
            likelihood.check(outputs, targets)

        def loss(factor: float) -> float:
            noisy = likelihood.at_noise_scale(factor)
            total = sum(float(as_double(noisy.log_prob(out, targets)).sum()) for out, targets in pairs)
            return self.noise_reluctance(factor) - total if total == total else inf

        factor, _ = search_decades(loss, (-2.0, 2.0), _NOISES, max_evaluations=60)
        if posterior.has_free_prior_precision:
            return factor

        def evaluated(candidate: float) -> float:
            return self.evaluate(replace(settings, noise_scale=candidate)).objective

        return min((1.0, factor), key=evaluated)


def _trials_are_dear(posterior: Posterior) -> bool:
    """Whether an exact trial takes longer than one from what is kept for every prior precision."""
    subtracts = any(block.makes.cancels for block in posterior.blocks.values())
    forms_jacobians = any(layer.convolutional for layer in posterior.layers.values())
    return subtracts or forms_jacobians or backward_dominates(posterior)


def _exact_share(predictor: Predictor, batch: Batch, made: Any) -> float:
    """The exact variances of the first inputs, as a multiple of the approximate ones, on the mean."""
    samples = count_samples(batch)
    few = batch.narrow(0, min(samples, _COMPARED), samples)
    exact: Any = predictor.distribution(few)
    near = made.at(get_width(predictor.posterior.settings, "prior_precision")).variance[: len(exact.variance)]
    share = float(as_double(exact.variance).sum() / as_double(near).sum())
    return share if isfinite(share) and share > 0 else 1.0


def class_scaling_noted(posterior: Posterior, scaling: Scaling) -> Posterior:
    """A posterior whose history says how its shifts and scales of classes were chosen, or nothing where it has none."""
    history, has = posterior.history, dict[str, str]()
    if posterior.class_shift:
        clear = ", which clearly speak for one" if scaling == "auto" else ""
        has["class shift"] = f"the most probable one of each class by held-out labels{clear}"
    if posterior.class_scale:
        has["class scale"] = "the most probable one of each class by held-out labels"
    kept = {name: how for name, how in history.tuning.items() if name not in ("class shift", "class scale")}
    return posterior.replaced(history=replace(history, tuning=kept | has))


def doubt_of(table: ClassTable, scaling: Scaling, *, moved: bool) -> str | None:
    """What labels leave to be said of predictions without shifts, whose classes were `moved` or not; a sentence."""
    return (table.absence() if scaling == "auto" else None) or (None if moved else table.disagreement())


def warn_of_doubt(doubt: str | None) -> None:
    """Warn where predictions may have other class rates than new data."""
    if doubt is not None:
        warn_user(doubt)


class _Tried(NamedTuple):
    """A trial, and what is compared.

    Attributes:
        penalised: its loss, and what the priors of temperature and noise add to it.
        trial: the trial.
        losses: by sample.
    """

    penalised: float
    trial: Trial
    losses: Tensor


class _WidthSearch:
    """A search for the width, as `HeldOutSearch.set_width` says.

    Args:
        attempt: gives the trial of settings.
        loss: that it is of.
        base: the settings at which it begins.
        name: of the hyperparameter that is searched.
        scaling: whether logits get a shift, and a scale, of each class first.

    Attributes:
        base: with these.
        tried: by decades from the base.
        closest: how near a decision came to its limit, in nats.
    """

    def __init__(
        self,
        attempt: Callable[[Hyperparameters], _Tried],
        loss: HeldOutLoss,
        base: Hyperparameters,
        name: str,
        scaling: Scaling,
    ) -> None:
        self._attempt, self._loss, self.base, self._name = attempt, loss, base, name
        self._scaling: Scaling = scaling
        self.tried, self.closest = dict[float, _Tried](), inf
        self._network = self._allowed = 0.0

    @property
    def best(self) -> _Tried:
        """The one with the least loss."""
        return min(self.tried.values(), key=lambda each: each.penalised)

    def find(self) -> float:
        """The decade that is chosen."""
        loss, name, step = self._loss, self._name, _FIRST_STEP
        loss.untempered = None
        base = self.base = loss.class_scaled(self.base, self._scaling)
        self._at(0.0)
        self._network = loss.of_network(base)
        likelihood = loss.posterior.likelihood
        # of a density, certainty about a few labels is no reason
        evidence = max(_MAX_COST, _MIN_EVIDENCE / max(1, loss.labels))
        self._allowed = evidence if likelihood.logits else _MAX_HARM
        if self._accepts(0.0):
            # no wider than the evidence, which is wide, nor than a training found its variances
            widest = _MAX_WIDER if likelihood.has_divergence else 0.0
            widest = widest if name == "prior_precision" else min(widest, log10(get_width(base, name)))
            loss.temperature = self.tried[0.0].trial.settings.temperature
            while step <= widest and self._accepts(-step):
                step *= 2
            loss.temperature = None
        else:
            while not self._accepts(step) and step < _MAX_NARROWER:
                step *= 2
            refused = max(decade for decade in self.tried if decade < step)
            while step - refused > _FIRST_STEP:
                middle = (refused + step) / 2
                refused, step = (refused, middle) if self._accepts(middle) else (middle, step)
        return min(filter(self._accepts, self.tried), default=max(self.tried))

    def _at(self, decade: float) -> _Tried:
        if decade not in self.tried:
            self.tried[decade] = self._attempt(scale_width(self.base, self._name, 10.0**decade))
        return self.tried[decade]

    def _accepts(self, decade: float) -> bool:
        """Whether labels do not speak against a width."""
        excess = self._excess(decade)
        self.closest = min(self.closest, abs(excess))
        return excess <= 0

    def _excess(self, decade: float) -> float:
        """By how many nats a width goes beyond what is allowed."""
        best, found = self.best.penalised, self._at(decade)
        if decade >= 0:
            return found.penalised - min(best, self._network) - self._allowed
        return max(found.penalised - best - _MAX_COST, self._harm(found.losses) - _MAX_HARM)

    def _harm(self, losses: Tensor) -> float:
        """How much worse losses by sample are than those of the first trial, a label, with `_ERRORS` standard errors
        added.
        """
        reference = self._loss.untempered
        if reference is None or reference.shape != losses.shape:
            return inf
        harm, count = losses - reference, max(1, self._loss.labels)
        if not bool(harm.any()):  # the reference itself, also of a single sample
            return 0.0
        if len(harm) < 2:
            return inf
        return float(harm.sum()) / count + _ERRORS * len(harm) ** 0.5 * float(harm.std()) / count


class HeldOutSearch:
    """A search over one hyperparameter after the other, by the likelihood of held-out labels.

    Args:
        loss: of the labels.
        settings: at which the search begins.
        searched: the names of the hyperparameters, in the order of the search.
        tempered: whether every evaluation finds a temperature, too.
        retuned: whether the temperature is found again at the width that is chosen.
        scaling: whether logits get a shift, and a scale, of each class.
        max_evaluations: for each hyperparameter but the width.
        progress: whether to show a bar.

    Attributes:
        posterior: that of the loss, at the best settings found so far.
        trials: all that were evaluated.
        bar: of the evaluations; the searches belong into its `with`.
    """

    def __init__(
        self,
        loss: HeldOutLoss,
        settings: Hyperparameters,
        searched: Sequence[str],
        *,
        tempered: bool,
        retuned: bool,
        scaling: Scaling,
        max_evaluations: int,
        progress: bool,
    ) -> None:
        self._retuned = retuned
        self.posterior, self._loss, self._tempered = loss.posterior.at(settings), loss, tempered
        self._scaling: Scaling = scaling
        self._max_evaluations = max_evaluations
        self._best: Trial | None = None  # of the hyperparameters searched so far
        self.trials = Trials("likelihood", (*searched, "temperature") if tempered else tuple(searched))
        searches = [
            (_USUAL_WIDTHS if name == self.posterior.width_parameter else max_evaluations, 1)
            for name in searched
        ]
        self.bar = SearchBar("tuning", "evaluations", progress, searches or [(1, 1)])

    def set_width(self) -> None:
        """Find the smallest prior precision, or `scale`, that held-out labels do not speak against: its NLL is at most
        `_MAX_COST` above the best that was found, and its loss against the posterior of the fit, which is the present
        one, is at most `_MAX_HARM` with `_ERRORS` standard errors of that loss added.

        The search goes from the present posterior to wider ones, in steps that grow, until one is refused. They keep
        its temperature: one of their own would take back their doubts of familiar inputs and more of those of others,
        or leave to the width what a temperature above 1 does for shifted inputs too. It goes to narrower ones only
        where the network alone predicts the labels so much better as `_MIN_EVIDENCE` and `_MAX_COST` say: held-out data
        of the training distribution cannot judge the width for foreign inputs, and if a few labels are all predicted
        correctly, every narrower posterior predicts them better, down to certainty. The prior of the temperature counts
        too; else a width would be chosen for the large temperature that comes with it.

        Where the head gives outputs at every prior precision from one set of backward passes, all trials are made from
        these, nearly. What was chosen is then tried once more, exactly, and so is the first for its temperature. A
        search that came so near to one of its limits that the difference may have decided is made again, with exact
        trials alone.
        """
        name, base = width_parameter_of(self.posterior), self.posterior.settings
        self.bar.begin_search()
        found = self._nearly(base) if name == "prior_precision" else None
        if found is None:
            found = _WidthSearch(self._try, self._loss, base, name, self._scaling)
            self._keep(found.tried[found.find()].trial)
        if self._tempered:
            self.posterior = class_scaling_noted(self.posterior, self._scaling)
        self._note_width(HYPERPARAMETERS[name].label, found.best.trial.objective)

    def _nearly(self, base: Hyperparameters) -> _WidthSearch | None:
        """A search by trials that are nearly right, whose choice is tried exactly and kept; None where it leaves a
        doubt, or the head has no such trials.
        """
        with self._loss.approximated(base) as approximated:
            if not approximated:
                return None
            found = _WidthSearch(self._try, self._loss, base, "prior_precision", self._scaling)
            decade = found.find()
        nearly, trials = found.tried[decade], self.trials.trials
        begin = trials.index(found.tried[0.0].trial)
        if decade < 0 and self._tempered:  # at the temperature of the first, as all wider ones
            if not self._retuned:
                self._replace(found, 0.0, found.base)
            self._loss.temperature = found.tried[0.0].trial.settings.temperature
        self._replace(found, decade, nearly.trial.settings)
        self._loss.temperature = None
        if found.closest <= _DOUBT + abs(found.tried[decade].penalised - nearly.penalised):
            del trials[begin:]
            return None
        self._keep(found.tried[decade].trial)
        return found

    def _replace(self, found: _WidthSearch, decade: float, settings: Hyperparameters) -> None:
        """Put an exact trial in the place of one that was nearly right."""
        trials, nearly = self.trials.trials, found.tried[decade].trial
        found.tried[decade] = self._try(settings)
        trials[trials.index(nearly)] = trials.pop()

    def set_other(self, name: str) -> None:
        """Minimise the loss over ``"residual_weight"``, ``"scale"`` or ``"noise_scale"``, from the present values; keep
        the best values tried.
        """
        self.bar.begin_search()
        base = self._best
        if base is None or not isfinite(base.objective):
            base = self._try(self._scale_classes(self.posterior.settings)).trial
        start = base
        tried = [_Tried(base.objective + self._penalty(base.settings, name), base, self._loss.by_sample)]

        def objective(x: float) -> float:
            value = min(1.0, max(0.0, x)) if name == "residual_weight" else getattr(start.settings, name) * x
            tried.append(self._try(replace(start.settings, **{name: value}), name))
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
        label = HYPERPARAMETERS[name].label
        if improved.penalised < tried[0].penalised - _MIN_GAIN:
            base = improved.trial
            if edge:
                self.trials.at_edge.append(f"{label} = {getattr(base.settings, name):.3g}")
        self._keep(base)
        of_variance = name == "noise_scale" and self.posterior.noise_variance is not None
        self._note("noise variance" if of_variance else label, "validation NLL")

    def set_temperature(self) -> None:
        """Find the temperature alone."""
        self.bar.begin_search()
        self._keep(self._try(self._scale_classes(self.posterior.settings)).trial)
        self._note_temperature()

    def finish(self) -> Posterior:
        """The posterior at the best settings, with the trials in its history; warns of values at an edge, and if even
        the best predicts held-out data worse than the model.
        """
        trials, best = self.trials, self._best
        assert best is not None
        self._loss.require(best.objective)
        trials.chosen = best
        trials.warn_of_edges()
        trials.model_alone = self._loss.of_model_alone(best.settings.noise_scale)
        if best.objective > trials.model_alone + 2 * _MAX_HARM:
            advice = (
                "Train longer, with a smaller prior_precision, or with train_mean=False."
                if self.posterior.trained_mean
                else "Restrict the posterior (layers='last') or give it more data."
            )
            warn_user(
                f"The best validation NLL found, {best.objective:.4g}, is worse than the model's own, "
                f"{trials.model_alone:.4g}: the posterior does not serve this model. {advice}"
            )
        return self.posterior.replaced(history=replace(self.posterior.history, trials=trials))

    def _scale_classes(self, settings: Hyperparameters) -> Hyperparameters:
        """Settings with the shift, and scale, of each class."""
        settings = self._loss.class_scaled(settings, self._scaling)
        if self._tempered:
            self.posterior = class_scaling_noted(self.posterior.at(settings), self._scaling)
        return settings

    def _keep(self, trial: Trial) -> None:
        """Take a trial as the best."""
        self._best, self.posterior = trial, self.posterior.at(trial.settings)

    def _note(self, label: str, how: str) -> None:
        self.posterior = self.posterior.noted(tuning={label: how})

    def _try(self, settings: Hyperparameters, name: str = "") -> _Tried:
        """Evaluate the loss at these settings, in a search over `name`."""
        self.bar.begin_evaluation()
        trial = self._loss.evaluate(settings)
        self.bar.advance()
        self.trials.trials.append(trial)
        penalised = trial.objective + self._penalty(trial.settings, name)
        return _Tried(penalised, trial, self._loss.by_sample)

    def _penalty(self, settings: Hyperparameters, name: str) -> float:
        """What the priors add to the mean loss at these settings, where `name` is searched."""
        penalty = self._loss.temperature_penalty(settings.temperature)
        if name == "noise_scale":
            penalty += self._loss.noise_reluctance(settings.noise_scale) / max(1, self._loss.labels)
        return penalty

    def _note_width(self, label: str, best: float) -> None:
        assert self._best is not None
        given_up = max(0.0, self._best.objective - best)
        self._note(
            label,
            f"the widest that held-out labels do not speak against; validation NLL {given_up:.2g} above the best",
        )
        self.trials.nll_given_up_for_width = given_up
        if self._tempered:
            self._note_temperature()

    def _note_temperature(self) -> None:
        self._note("temperature", "validation NLL, and a prior around 1 with a heavy tail above it")
        if is_at_edge(self.posterior.temperature):
            self.trials.at_edge.append(f"temperature = {self.posterior.temperature:.3g}")
