"""`tune`: hyperparameters by faithfulness to the network, by held-out labels, by leave-one-out predictions, or by the
log marginal likelihood.

A change of hyperparameters factorises the posterior's small matrices again; the training data are not needed.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, ClassVar, cast

from posthoc_uq.core.batches import Batch, BatchFunction, BatchReader, Readings, batches, check_loader
from posthoc_uq.core.devices import TEMPORARY_BYTES
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.interrupts import defer_interrupts
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
from posthoc_uq.core.progress import bars_shown, print_above
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.core.steady import steady
from posthoc_uq.curvature.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.curvature.labels import LABELS_IN_ALL
from posthoc_uq.files import check_unchanged
from posthoc_uq.fitting.class_scaling import Scaling
from posthoc_uq.fitting.faithful import (
    DIVERGENCE_WITH_NOISE,
    FaithfulSearch,
    model_of,
    other_settings,
    rows_named,
    set_faithful,
)
from posthoc_uq.fitting.held_out import Evaluated, HeldOutLoss, HeldOutSearch, warn_of_doubt
from posthoc_uq.fitting.leave_one_out import INITIALISATIONS, Groups, Initial, set_by_leave_one_out
from posthoc_uq.fitting.prior import DIVERGENCE, knows_noise
from posthoc_uq.fitting.seen_rows import warn_of_little_noise
from posthoc_uq.fitting.wrap import head_class, options_of, recorded_head, wrap
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.likelihoods.likelihood import Likelihood
from posthoc_uq.posteriors.block import LOG_DETERMINANT
from posthoc_uq.posteriors.history import CRITERIA, Criterion, HeadRecord, recordable
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.report import described_by_class
from posthoc_uq.posteriors.search import maximise_evidence
from posthoc_uq.posteriors.settings import HEADS, HYPERPARAMETERS, Hyperparameters

PARAMETERS = {
    "prior_precision": "prior_precision",
    "residual_weight": "residual_weight",
    "scale": "scale",
    "noise": "noise_scale",
}
"""The hyperparameter that each name in the argument `parameters` stands for."""


@defer_interrupts
def tune(
    posterior: Posterior,
    loader: Iterable[Any] | None = None,
    *,
    criterion: str | None = None,
    divergence: float | None = None,
    temperature: bool | None = None,
    scaling: Scaling | None = None,
    per_layer: bool = False,
    noise: bool | None = None,
    parameters: tuple[str, ...] | None = None,
    initial: Initial | Sequence[Initial] | None = None,
    groups: Groups | None = None,
    initialisations: int = INITIALISATIONS,
    head: str | None = None,
    n_samples: int = 30,
    max_evaluations: int = 12,
    seed: int = 0,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Posterior:
    """The posterior with the hyperparameters that one of four criteria chooses; the given one stays as it is.

    * ``"faithful"``: the smallest prior precision for which the mean KL divergence of predictions from those of the
      network, over a few hundred inputs like the training inputs, is within `divergence` nats. Needs no labels. It is
      the default of `fit`.
    * ``"likelihood"``, the default with a loader: the widest posterior that held-out labels do not speak against. Its
      negative log-likelihood (the mean over labels; of outputs with positions, over those whose label counts) is at
      most 0.003 nats above the best that was tried, and what it loses against the posterior of the fit is at most 0.01
      nats with two standard errors of that loss added. Held-out data of the training distribution cannot judge
      uncertainty about foreign inputs, so wider is better where labels leave the choice; few labels leave little, and
      the fit's width mostly stays. It becomes narrower only where labels speak for that by 3 nats in all. Where outputs
      are logits the posterior of the fit first gets the temperature that predicts best, under a prior that falls fast
      below 1, so that a few labels do not sharpen predictions, and slowly above it; wider ones keep it.
      The observation noise of a regression is searched after it. `scale` and `residual_weight` are searched if asked
      for, one after the other.
    * ``"leave_one_out"`` takes the training data, where none are held out: the temperature of classes, or the noise of
      a regression, follows from leave-one-out predictions by the tangent kernel of the untrained network
      (`posthoc_uq.fitting.leave_one_out`), and a faithful prior is then found again. It is for networks that were
      trained from scratch on these data (of a fine-tuned one pass `initial`), and was found right for perceptrons;
      convolutional networks learn features that this kernel lacks.
    * ``"evidence"``, the default without a loader: the prior precision of the largest log marginal likelihood. It is
      right for the linearised model of a network with many data, and far too wide for drawn weights of one with few.

    A posterior whose variances were optimised has a fixed prior precision and no marginal likelihood; its `scale` is
    chosen instead, or, where it has none, the temperature alone.

    Args:
        posterior: from `fit` or `load`.
        loader: held-out batches with targets, read several times; for ``"faithful"`` training inputs, or similar
            ones, read once; for ``"leave_one_out"`` the training data.
        criterion: see above.
        divergence: the budget of the faithful prior, in nats, by default 0.002; for ``"likelihood"`` that of the
            posterior at which the search begins, by default the fit's.
        temperature: with held-out data: whether a temperature on the logits is searched, by default where outputs are
            logits. With ``"faithful"``: whether the mean entropy on the training inputs is brought back to the
            network's; by default not, since that keeps a network's overconfidence on what it memorised.
        scaling: with held-out data, of outputs that are logits of classes or labels: ``"temperature"`` alone;
            ``"bias"``, a shift of each class with it, for a network that was trained at other class rates;
            ``"vector"``, a scale of each class, too; or ``"auto"``, the default: the shift where labels clearly speak
            for it. Outputs with positions have a temperature alone.
        per_layer: one prior precision per layer (evidence only).
        noise: tune a common factor on the observation noise of a regression: the noise variance, the variances that a
            heteroscedastic network predicts, the dispersion of ``"negative_binomial"`` and of ``"gamma"`` (the inverse
            of its shape). By default on held-out data, unless `parameters` leave it out, also where it was given to the
            fit: training residuals underestimate the noise of a network that overfits. The prior precision is then
            chosen at the noise at which the network alone predicts them best, and the noise after it. False keeps the
            noise. By the evidence the noise variance is tuned only with True.
        parameters: all that is to be searched on held-out data, out of ``"prior_precision"``, ``"residual_weight"``,
            ``"scale"``, ``"noise"``, or nothing (``()``) for the temperature alone. By default the prior precision, or
            the scale where that is fixed, or nothing where there is neither, and the noise if there is one.
        initial: of leave-one-out: the network before its training as a model or a state dict, or several. Without it
            every module is initialised anew by its `reset_parameters`.
        groups: of leave-one-out: which samples are left out together, in the order of the loader, or a function of a
            batch.
        initialisations: of leave-one-out: untrained networks to average.
        head: the head that predicts: ``"sampling"``, ``"linearized"`` or ``"moments"``; by default the one that the
            posterior's hyperparameters were found for. It is recorded, and `wrap` takes it by default.
        n_samples: weight draws of the sampling head.
        max_evaluations: evaluations per hyperparameter other than the prior precision.
        seed: of the draws.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: show a bar; by default on a terminal.
        **options: of the head, as in `wrap`.

    Promises belong to the hyperparameters they were measured with; a search that changes these warns of it.

    Returns:
        A new posterior. Its ``history.trials`` are all trials of the search: printed, they begin with the chosen trial
        and the nats given up against the best for a wider posterior; values at the edge of their interval are listed,
        and warned of. Of leave-one-out ``history.leave_one_out`` is what was estimated.

    Raises:
        PosteriorMismatchError: the model's weights changed after the fit, or during the search.
        PosthocUQError: options that do not fit together, no targets, or a posterior without its model.

    Example:
        ```python
        tuned = uq.tune(posterior, val_loader)
        print(tuned.prior_precision, tuned.temperature)
        print(tuned.history.trials)  # all that was tried
        ```
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"tune takes a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    if criterion is None:
        criterion = "evidence" if loader is None else "likelihood"
    search_by = _SEARCHES[cast(Criterion, one_of("criterion", criterion, CRITERIA))]
    if gone := {"prior_precision", "prior_precisions", "temperatures"}.intersection(options):
        name = min(gone)
        raise PosthocUQError(
            f"tune searches and takes no {name}; to set one value: posterior = posterior.with_settings("
            f"{'temperature' if name == 'temperatures' else 'prior_precision'}=...)."
        )
    of_heads = sorted({option for name in HEADS for option in options_of(head_class(name))})
    check_names("tune", options, of_heads, signature(tune).parameters)
    search = search_by(
        posterior=posterior,
        loader=loader,
        reader=BatchReader.of(
            model_of(posterior),
            batch_to_inputs,
            batch_to_targets,
            skips_missing=posterior.likelihood.missing == "ignore",
        ),
        divergence=check_option("divergence, a budget in nats,", divergence, Positive | None),
        temperature=check_option("temperature", temperature, bool | None),
        scaling=check_option("scaling", scaling, Scaling | None),
        per_layer=check_option("per_layer", per_layer, bool),
        noise=check_option("noise", noise, bool | None),
        parameters=parameters,
        initial=initial,
        groups=groups,
        initialisations=check_option("initialisations", initialisations, Count),
        head=head,
        n_samples=check_option("n_samples", n_samples, Count),
        max_evaluations=check_option("max_evaluations", max_evaluations, Count),
        seed=check_option("seed", seed, Seed),
        progress=bars_shown(progress),
        options=options,
    )
    tuned = search.tuned()
    tuned.warn_if_void(posterior)
    tell_returned(tuned, search.progress)
    return tuned


def tuned_by_labels(
    posterior: Posterior,
    loader: Iterable[Any],
    reader: BatchReader,
    *,
    scaling: Scaling | None,
    head: str | None,
    seed: int,
    retuned: bool,
    progress: bool,
    options: dict[str, Any],
) -> tuple[Posterior, Evaluated | None]:
    """`tune` by held-out labels with all else at its default, and what its last exact evaluation was made of.

    Args:
        retuned: whether the temperature is found again at the width that is chosen; that says of class rates, then.
    """
    search = _ByHeldOutLabels(
        posterior,
        loader,
        reader,
        scaling=scaling,
        head=head,
        seed=seed,
        progress=progress,
        options=options,
        retuned=retuned,
    )
    return search.tuned(), search.evaluated


def tell_returned(posterior: Posterior, progress: bool) -> None:
    """Print that a new posterior was returned, where bars are shown, for a user who forgot to take it."""
    if progress:
        shown, noise = posterior.reported(), posterior.noise_variance
        if noise is not None:
            shown = {**shown, "noise variance": float(noise[0]) if len(noise) == 1 else "by output"}
        by_class = described_by_class(shown, posterior.likelihood.name)
        shown = {label: value for label, value in shown.items() if label not in by_class}
        values = ", ".join(
            f"{label} {value:.4g}" if isinstance(value, float) else f"{label} {value}"
            for label, value in shown.items()
        )
        promises = posterior.history.promises
        promised = f", promises from {promises.samples:,} rows" if promises is not None else ""
        print_above(f"returned a new posterior: {values}{promised}", sys.stderr)
        for label, told in by_class.items():
            how = posterior.history.tuning.get(label, "as it was given")
            print_above(f"predictions moved by a {label}: {told}; {how}", sys.stderr)


@dataclass
class _Search(ABC):
    """A search by one criterion, with the arguments of `tune`; see there.

    A new criterion is a subclass here and in `_SEARCHES`, and a row of `posthoc_uq.posteriors.history.CRITERIA`.

    Attributes:
        criterion: its name.
        posterior: where the search begins.
        reader: takes batches apart.
    """

    criterion: ClassVar[Criterion]

    posterior: Posterior
    loader: Iterable[Any] | None
    reader: BatchReader
    divergence: float | None = None
    temperature: bool | None = None
    scaling: Scaling | None = None
    per_layer: bool = False
    noise: bool | None = None
    parameters: tuple[str, ...] | None = None
    initial: Initial | Sequence[Initial] | None = None
    groups: Groups | None = None
    initialisations: int = INITIALISATIONS
    head: str | None = None
    n_samples: int = 30
    max_evaluations: int = 12
    seed: int = 0
    progress: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def tuned(self) -> Posterior:
        """The posterior at the hyperparameters that are chosen."""
        if self.criterion != "leave_one_out":
            given = (
                self.initial is not None,
                self.groups is not None,
                self.initialisations != INITIALISATIONS,
            )
            if any(given):
                raise PosthocUQError(
                    "initial, groups and initialisations are for criterion='leave_one_out'; leave them out."
                )
        if self.criterion != "likelihood" and self.scaling is not None:
            raise PosthocUQError(
                "scaling is chosen by held-out labels, criterion='likelihood'; leave it out."
            )
        self.check()
        with steady(model_of(self.posterior), call="tune"):
            return self.run()

    @abstractmethod
    def check(self) -> None:
        """Refuse arguments that are not for this criterion, before any data are read."""

    @abstractmethod
    def run(self) -> Posterior:
        """The posterior at the hyperparameters that are chosen."""

    def check_data(self) -> None:
        """Refuse a search by predictions without data, or for each layer."""
        if self.per_layer:
            raise PosthocUQError(
                "per_layer=True is chosen by the log marginal likelihood; call tune without a loader."
            )
        if self.loader is None:
            needed = CRITERIA[self.criterion].data
            raise PosthocUQError(f"criterion={self.criterion!r} needs data: pass a loader of {needed}.")
        check_loader(self.loader)
        if not isinstance(getattr(self.loader, "loader", None), Readings):  # whose parts are compared already
            self.loader = Readings.of(self.loader)

    def tempered(self) -> bool:
        """Whether the temperature is searched, by default where outputs are logits."""
        logits = self.posterior.likelihood.logits
        if self.temperature and not logits:
            raise PosthocUQError(
                f"A temperature divides logits; likelihood {self.posterior.likelihood.name!r} has none."
            )
        return logits if self.temperature is None else self.temperature

    def recorded_predictor(self) -> Predictor:
        """The predictor to tune through, which is recorded; options that are not given are those recorded for the
        head.
        """
        posterior, (recorded_name, recorded_options) = self.posterior, recorded_head(self.posterior)
        name = recorded_name if self.head is None else self.head
        head_class(name)  # refuses another name
        chosen = self.options or (recorded_options if recorded_name == name else {})
        record = HeadRecord(name=name, options=recordable(chosen), criterion=self.criterion)
        history = replace(posterior.history, head=record)
        if name == "moments" and history.calibration:
            history = replace(history, calibration=None)  # it does not belong to what is tried
            warn_user(
                "tune leaves the scale of the moments head out; fit it again: predictor = predictor.fit_scale(loader)."
            )
        draws = {"n_samples": self.n_samples, "seed": self.seed} if name == "sampling" else {}
        return wrap(model_of(posterior), posterior.replaced(history=history), name, **chosen | draws)

    def sampled_inputs(self) -> list[Batch]:
        """A few hundred inputs of the loader, those with the smallest hashes."""
        assert self.loader is not None
        wanted = inputs_to_keep(self.posterior.layers.values())
        kept = KeptInputs(TEMPORARY_BYTES, self.posterior.likelihood, wanted)
        with isolated_random_state(self.seed):
            kept.read(self.loader, self.reader, self.seed, self.progress)
        return kept.batches(self.reader.device)

    def rows_named(self) -> AbstractContextManager[None]:
        """Around work on `sampled_inputs`."""
        loader = self.loader
        assert loader is not None
        return rows_named(self.posterior, self.seed, lambda: batches(loader, self.reader))


class _ByEvidence(_Search):
    criterion = "evidence"

    def check(self) -> None:
        if self.head is not None or self.options:
            raise PosthocUQError(
                "The evidence needs no head; head and its options are for held-out data, or criterion='faithful'."
            )
        if self.loader is not None or self.temperature or self.parameters is not None:
            raise PosthocUQError(
                "The evidence needs no data and chooses the prior precision alone: leave loader, temperature and "
                "parameters out, or take criterion='likelihood'."
            )

    def run(self) -> Posterior:
        check_unchanged(self.posterior)  # as `wrap` does it for the other criteria
        facts = self.posterior.history.fit
        one_label = facts.get("fisher chosen") and facts.get("labels drawn per sample") == 1
        if one_label and facts["samples"] < LABELS_IN_ALL:
            warn_user(
                "The fit drew one label a sample. That is enough for the faithful prior, and the evidence is more "
                "accurate with more: fit with prior_precision='evidence', or with fisher='exact'."
            )
        found = maximise_evidence(
            self.posterior, per_layer=self.per_layer, noise=bool(self.noise), progress=self.progress
        )
        return found.noted(head={"criterion": self.criterion}) if found.history.head else found


class _ByLeaveOneOut(_Search):
    criterion = "leave_one_out"

    def check(self) -> None:
        said = {
            "head": self.head is not None,
            "divergence": self.divergence is not None,
            "temperature": self.temperature is not None,
            "per_layer": self.per_layer,
            "noise": self.noise is not None,
            "parameters": self.parameters is not None,
        }
        if given := [name for name, is_said in said.items() if is_said] + list(self.options):
            raise PosthocUQError(
                f"Leave-one-out needs no head, and finds the temperature or the noise alone; leave {', '.join(given)} "
                f"out."
            )
        self.check_data()

    def run(self) -> Posterior:
        check_unchanged(self.posterior)
        loader = self.loader
        assert loader is not None
        once = isinstance(getattr(loader, "loader", loader), Iterator)
        found = set_by_leave_one_out(
            self.posterior,
            loader,
            self.reader,
            initial=self.initial,
            groups=self.groups,
            initialisations=self.initialisations,
            seed=self.seed,
            progress=self.progress,
        )
        if not found.history.faithful or once:
            return found
        # at the new noise or temperature
        again = _ByKnownNoise if knows_noise(found) else _ByFaithfulness
        return again(found, loader, self.reader, seed=self.seed, progress=self.progress).tuned()


class _ByFaithfulness(_Search):
    criterion = "faithful"

    def check(self) -> None:
        self.check_data()
        if self.parameters is not None or self.noise:
            raise PosthocUQError(
                "parameters and noise are tuned by criterion='likelihood'; the faithful prior needs neither."
            )
        self.tempered()  # refuses a temperature where there is none

    def run(self) -> Posterior:
        predictor = self.recorded_predictor()
        with self.rows_named():
            return set_faithful(
                self.sampled_inputs(),
                predictor,
                DIVERGENCE if self.divergence is None else self.divergence,
                seed=self.seed,
                matched=bool(self.temperature),
                progress=self.progress,
            )


class _ByKnownNoise(_ByFaithfulness):
    def run(self) -> Posterior:
        from posthoc_uq.fitting.regression_prior import set_by_known_noise

        predictor = self.recorded_predictor()
        with self.rows_named():
            return set_by_known_noise(
                self.sampled_inputs(), predictor, DIVERGENCE, seed=self.seed, progress=self.progress
            )


@dataclass
class _ByHeldOutLabels(_Search):
    criterion = "likelihood"

    retuned: bool = False
    evaluated: Evaluated | None = None

    def check(self) -> None:
        self.check_data()
        checked_scaling(self.posterior.likelihood, self.scaling, kept=self.temperature is False)
        if not self.names() and not self.tempered():
            raise nothing_to_tune(self.posterior)

    def run(self) -> Posterior:
        names, tempered = self.names(), self.tempered()
        predictor, settings = self.recorded_predictor(), self.posterior.settings
        first = self.posterior.width_parameter
        # The search begins at the posterior of the fit, also where an earlier call of `tune` moved it: labels that were
        # seen before find the same again.
        fitted, left_out = self.posterior.history.faithful, self.posterior.history.left_out
        if tempered:
            found = 1.0 if fitted is None else fitted.network_temperature
            at = found if left_out is None else left_out.temperature
            settings = replace(settings, temperature=at, class_shift=(), class_scale=())
        assert self.loader is not None
        loss = HeldOutLoss(self.loader, predictor, self.reader, seed=self.seed, tempered=tempered)
        if "noise" in names:
            known = self._known_noise()
            settings = replace(
                settings, noise_scale=loss.noise_of_network(settings) if known is None else known
            )
        if first in names:
            settings = self._start(predictor.with_posterior(predictor.posterior.at(settings)))
        others = [PARAMETERS[name] for name in names if name != first]
        search = HeldOutSearch(
            loss,
            settings,
            [first, *others] if first in names and first is not None else others,
            tempered=tempered,
            retuned=self.retuned,
            scaling=self.scaling or "auto",
            max_evaluations=self.max_evaluations,
            progress=self.progress,
        )
        with search.bar:
            if first in names:
                search.set_width()
            for name in others:
                search.set_other(name)
            if not names:
                search.set_temperature()
        self.evaluated = loss.evaluated()
        if not self.retuned:
            warn_of_doubt(loss.doubt)
        found = search.finish()
        if "noise" in names:
            warn_of_little_noise(found, loss.labels)
        return found

    def names(self) -> list[str]:
        """The names of what is searched, one after the other; there may be none."""
        likelihood, available = self.posterior.likelihood, _available(self.posterior)
        if self.noise and not likelihood.has_noise:
            raise PosthocUQError(
                f"noise=True tunes the noise variance, or dispersion, of a regression, and likelihood "
                f"{likelihood.name!r} has none; leave it out."
            )
        names = self.parameters
        if names is None:
            width = self.posterior.width_parameter
            first = [] if width is None else [width]
            return [*first, "noise"] if likelihood.has_noise and self.noise is not False else first
        if isinstance(cast(Any, names), str) or not isinstance(cast(Any, names), (list, tuple, set)):
            raise PosthocUQError(f"parameters must be a tuple out of {available}, not {shown(names)}.")
        unknown = [name for name in names if name not in available]
        if unknown:
            allowed = f"among {available}" if available else "left out"
            raise PosthocUQError(
                f"parameters must be {allowed} for this posterior; not {list(names)}.{did_you_mean(unknown, available)}"
            )
        if self.noise is False and "noise" in names:
            raise PosthocUQError(
                "parameters name the noise, and noise=False keeps it; leave one of them out."
            )
        return [*names, "noise"] if self.noise and "noise" not in names else list(names)

    def _known_noise(self) -> float | None:
        """The noise scale where leave-one-out found the noise, and with it the width. Few labels know less of both, so
        that a search begins at these.
        """
        left_out = self.posterior.history.left_out
        return left_out.noise_scale if left_out is not None and self.posterior.likelihood.has_noise else None

    def _start(self, predictor: Predictor) -> Hyperparameters:
        """The predictor's settings with the prior that a fit finds by itself: the faithful one, as recorded if it was
        found with the same head and settings, and with the budget if one is given, or else that of the held-out inputs.
        Where held-out residuals set the noise, its budget is larger. Where the likelihood measures no divergence, it is
        that of the evidence.
        """
        posterior, budget = predictor.posterior, self.divergence
        if budget is None and "noise" in self.names() and self._known_noise() is None:
            budget = DIVERGENCE_WITH_NOISE
        if not posterior.likelihood.has_divergence:
            if self.divergence is not None:
                raise PosthocUQError(
                    f"Likelihood {posterior.likelihood.name!r} measures no divergence; leave divergence out, or give "
                    f"it a method divergence(outputs, prediction)."
                )
            has_evidence = posterior.has_free_prior_precision and LOG_DETERMINANT in posterior.capabilities
            return (
                maximise_evidence(posterior, progress=self.progress) if has_evidence else posterior
            ).settings
        recorded, wanted = posterior.history.faithful, (predictor.head, other_settings(posterior))
        known = recorded is not None and (recorded.head, recorded.settings) == wanted
        if recorded is not None and known and budget in (None, recorded.budget):
            return replace(posterior.settings, **{cast(str, posterior.width_parameter): recorded.value})
        with self.rows_named():
            search = FaithfulSearch(self.sampled_inputs(), predictor, seed=self.seed, progress=self.progress)
            return search.widest(DIVERGENCE if budget is None else budget).settings


_SEARCHES = {
    search.criterion: search for search in (_ByFaithfulness, _ByHeldOutLabels, _ByLeaveOneOut, _ByEvidence)
}


def checked_scaling(likelihood: Likelihood, scaling: Scaling | None, *, kept: bool = False) -> None:
    """Refuse a scaling of logits where there are none, or which is `kept` as it is."""
    if scaling is None:
        return
    if not likelihood.logits:
        raise PosthocUQError(
            f"scaling is of logits, and likelihood {likelihood.name!r} has none; leave it out."
        )
    if kept:
        raise PosthocUQError("temperature=False keeps how logits are scaled; leave it out, or scaling.")
    if scaling in ("bias", "vector") and not likelihood.class_logits:
        raise PosthocUQError(
            f"scaling={scaling!r} gives each class's logit a shift, and likelihood {likelihood.name!r} has no logit of "
            f"each class; leave it out."
        )


def has_something_to_tune(posterior: Posterior) -> bool:
    """Whether a search on held-out data, with nothing named, has something to search."""
    likelihood = posterior.likelihood
    return posterior.width_parameter is not None or likelihood.logits or likelihood.has_noise


def nothing_to_tune(posterior: Posterior) -> PosthocUQError:
    """The error for a search on held-out data that has nothing to search."""
    name, available = posterior.width_parameter, _available(posterior)
    if name is None:
        reason = f"a posterior by method={posterior.method!r} has neither a prior precision nor a scale"
    else:
        reason = f"parameters=() leaves the {HYPERPARAMETERS[name].label} as it is"
    temperature = (
        "temperature=False leaves the temperature"
        if posterior.likelihood.logits
        else f"likelihood {posterior.likelihood.name!r} has no temperature"
    )
    named = f"; what can be searched is named in parameters, out of {available}" if available else ""
    return PosthocUQError(f"There is nothing to tune: {reason}, and {temperature}{named}.")


def _available(posterior: Posterior) -> list[str]:
    """The names in `PARAMETERS` of what this posterior has."""
    return [name for name, of in PARAMETERS.items() if of in posterior.tunable]
