"""`tune`: hyperparameters by faithfulness to the network, by held-out labels, or by the log marginal likelihood.

A change of hyperparameters factorises the posterior's small matrices again; the training data are not needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, cast

from posthoc_uq.core.batches import Batch, BatchFunction, BatchReader, Readings, batches, check_loader
from posthoc_uq.core.devices import TEMPORARY_BYTES
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.options import (
    Count,
    Magnitude,
    Positive,
    Seed,
    check_names,
    check_option,
    did_you_mean,
    one_of,
    shown,
)
from posthoc_uq.core.progress import bars_shown
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.core.steady import steady
from posthoc_uq.curvature.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.curvature.labels import LABELS_IN_ALL
from posthoc_uq.files import check_unchanged
from posthoc_uq.fitting.faithful import (
    DIVERGENCE_WITH_NOISE,
    FaithfulSearch,
    model_of,
    other_settings,
    rows_named,
    set_faithful,
)
from posthoc_uq.fitting.held_out import HeldOutLoss, HeldOutSearch
from posthoc_uq.fitting.prior import DIVERGENCE
from posthoc_uq.fitting.wrap import head_class, options_of, recorded_head, wrap
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.posteriors.block import LOG_DETERMINANT
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import CRITERIA, Criterion, Trials, maximise_evidence
from posthoc_uq.posteriors.settings import HEADS, HYPERPARAMETERS

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
    progress: bool | None = None,
    **options: Any,
) -> Trials:
    """Choose the hyperparameters of `posterior`, and set them, by one of three criteria.

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
    * ``"evidence"``, the default without a loader: the prior precision of the largest log marginal likelihood. It is
      right for the linearised model of a network with many data, and far too wide for drawn weights of one with few.

    A posterior whose variances were optimised has a fixed prior precision and no marginal likelihood; its `scale` is
    chosen instead, or, where it has none, the temperature alone.

    Args:
        posterior: from `fit` or `load`.
        loader: held-out batches with targets, read several times; for ``"faithful"`` training inputs, or similar
            ones, read once.
        criterion: see above.
        divergence: the budget of the faithful prior, in nats, by default 0.002; for ``"likelihood"`` that of the
            posterior at which the search begins, by default the fit's.
        temperature: with held-out data: whether a temperature on the logits is searched, by default where outputs are
            logits. With ``"faithful"``: whether the mean entropy on the training inputs is brought back to the
            network's; by default not, since that keeps a network's overconfidence on what it memorised.
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
        prior_precisions: the values to try on held-out data, in place of the search (of per-layer prior precisions:
            their geometric mean).
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

    The search works on a copy: until it ends, and if it fails, other threads predict with the posterior as it was, and
    save that. Of two calls at the same time, the one that ends last decides.

    Returns:
        All trials. Printed, they begin with the chosen trial and the nats given up against the best for a wider
        posterior; values at the edge of their interval are listed, and warned of.

    Raises:
        PosteriorMismatchError: the model's weights changed after the fit, or during the search.
        PosthocUQError: options that do not fit together, no targets, or a posterior without its model.
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"tune takes a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    if criterion is None:
        criterion = "evidence" if loader is None else "likelihood"
    search_by = _SEARCHES[cast(Criterion, one_of("criterion", criterion, CRITERIA))]
    of_heads = sorted({option for name in HEADS for option in options_of(head_class(name))})
    check_names("tune", options, of_heads, signature(tune).parameters)
    search = search_by(
        posterior=posterior.trial(),
        loader=loader,
        reader=BatchReader.of(model_of(posterior), batch_to_inputs, batch_to_targets),
        divergence=check_option("divergence, a budget in nats,", divergence, Positive | None),
        temperature=check_option("temperature", temperature, bool | None),
        per_layer=check_option("per_layer", per_layer, bool),
        noise=check_option("noise", noise, bool | None),
        parameters=parameters,
        prior_precisions=prior_precisions,
        head=head,
        n_samples=check_option("n_samples", n_samples, Count),
        max_evaluations=check_option("max_evaluations", max_evaluations, Count),
        seed=check_option("seed", seed, Seed),
        progress=bars_shown(progress),
        options=options,
    )
    search.check()
    with steady(model_of(posterior), call="tune"):
        trials = search.run()
    posterior.adopt(search.posterior)
    posterior.warned_heads |= search.posterior.warned_heads
    return trials


@dataclass
class _Search(ABC):
    """A search by one criterion, with the arguments of `tune`; see there.

    A new criterion is a subclass here and in `_SEARCHES`, and a row of `posthoc_uq.posteriors.search.CRITERIA`.

    Attributes:
        criterion: its name.
        posterior: the copy whose settings are tried and records written.
        reader: takes batches apart.
    """

    criterion: ClassVar[Criterion]

    posterior: Posterior
    loader: Iterable[Any] | None
    reader: BatchReader
    divergence: float | None
    temperature: bool | None
    per_layer: bool
    noise: bool | None
    parameters: tuple[str, ...] | None
    prior_precisions: Sequence[float] | None
    head: str | None
    n_samples: int
    max_evaluations: int
    seed: int
    progress: bool
    options: dict[str, Any]

    @abstractmethod
    def check(self) -> None:
        """Refuse arguments that are not for this criterion, before any data are read."""

    @abstractmethod
    def run(self) -> Trials:
        """Set the hyperparameters of the copy."""

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
        trial, (recorded_name, recorded_options) = self.posterior, recorded_head(self.posterior)
        name = recorded_name if self.head is None else self.head
        chosen = self.options or (recorded_options if recorded_name == name else {})
        if name == "moments" and trial.history.calibration:
            trial.history.calibration = {}  # it does not belong to the hyperparameters that are tried
            warn_user("tune leaves the moments head's calibration out; calibrate again.")
        trial.warned_heads = {*trial.warned_heads, name}
        draws = {"n_samples": self.n_samples, "seed": self.seed} if name == "sampling" else {}
        predictor = wrap(model_of(trial), trial, name, **chosen | draws)
        kept = {key: value for key, value in chosen.items() if isinstance(value, (bool, int, float, str))}
        trial.history.head = {"name": name, "options": kept, "criterion": self.criterion}
        return predictor

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
        of_labels = self.parameters is not None or self.prior_precisions is not None
        if self.loader is not None or self.temperature or of_labels:
            raise PosthocUQError(
                "The evidence needs no data and chooses the prior precision alone: leave loader, temperature, "
                "parameters and prior_precisions out, or take criterion='likelihood'."
            )

    def run(self) -> Trials:
        check_unchanged(self.posterior)  # as `wrap` does it for the other criteria
        facts = self.posterior.history.fit
        one_label = facts.get("fisher chosen") and facts.get("labels drawn per sample") == 1
        if one_label and facts["samples"] < LABELS_IN_ALL:
            warn_user(
                "The fit drew one label a sample. That is enough for the faithful prior, and the evidence is more "
                "accurate with more: fit with prior_precision='evidence', or with fisher='exact'."
            )
        trials = maximise_evidence(
            self.posterior, per_layer=self.per_layer, noise=bool(self.noise), progress=self.progress
        )
        if self.posterior.history.head:
            self.posterior.history.head |= {"criterion": self.criterion}
        return trials


class _ByFaithfulness(_Search):
    criterion = "faithful"

    def check(self) -> None:
        self.check_data()
        if self.parameters is not None or self.prior_precisions is not None or self.noise:
            raise PosthocUQError(
                "parameters, prior_precisions and noise are tuned by criterion='likelihood'; the faithful prior "
                "needs none of them."
            )
        self.tempered()  # refuses a temperature where there is none

    def run(self) -> Trials:
        predictor = self.recorded_predictor()
        with self.rows_named():
            return set_faithful(
                self.posterior,
                self.sampled_inputs(),
                predictor,
                DIVERGENCE if self.divergence is None else self.divergence,
                seed=self.seed,
                matched=bool(self.temperature),
                progress=self.progress,
            )


class _ByHeldOutLabels(_Search):
    criterion = "likelihood"

    def check(self) -> None:
        self.check_data()
        if not self.names() and not self.tempered():
            raise nothing_to_tune(self.posterior)
        self.grid()

    def run(self) -> Trials:
        posterior, names, tempered, grid = self.posterior, self.names(), self.tempered(), self.grid()
        predictor, first = self.recorded_predictor(), posterior.width_parameter
        # The search begins at the posterior of the fit, also where an earlier call of `tune` moved it: labels that were
        # seen before find the same again.
        fitted, left_out = posterior.history.faithful, posterior.history.left_out
        if tempered:
            posterior.temperature = left_out.get("temperature", fitted.get("network_temperature", 1.0))
        assert self.loader is not None
        loss = HeldOutLoss(posterior, self.loader, predictor, self.reader, seed=self.seed, tempered=tempered)
        if "noise" in names:
            loss.set_noise_of_network()
        if first in names and grid is None:
            self._set_start(predictor)
        others = [PARAMETERS[name] for name in names if name != first]
        search = HeldOutSearch(
            loss,
            [first, *others] if first in names and first is not None else others,
            tempered=tempered,
            max_evaluations=self.max_evaluations,
            progress=self.progress,
        )
        with search.bar:
            if first in names:
                search.set_width(grid)
            for name in others:
                search.set_other(name)
            if not names:
                search.set_temperature()
        posterior.history.faithful = fitted
        return search.finish()

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

    def grid(self) -> list[float] | None:
        """The prior precisions to try, as numbers; None for a search."""
        grid, names = self.prior_precisions, self.names()
        if grid is None:
            return None
        if "prior_precision" not in names:
            raise PosthocUQError(f"prior_precisions are given, and parameters={names} leave them alone.")
        if (
            isinstance(cast(Any, grid), (str, Mapping))
            or not isinstance(cast(Any, grid), Iterable)
            or getattr(grid, "ndim", 1) != 1
            or len(grid) == 0
        ):
            raise PosthocUQError(f"prior_precisions must be a list of numbers, not {shown(grid)}.")
        return [check_option("Each of prior_precisions", value, Magnitude) for value in grid]

    def _set_start(self, predictor: Predictor) -> None:
        """Set the prior that a fit finds by itself: the faithful one, as recorded if it was found with the same head
        and settings, and with the budget if one is given, or else that of the held-out inputs. Where held-out residuals
        set the noise, its budget is larger. Where the likelihood measures no divergence, it is that of the evidence.
        """
        posterior, budget = self.posterior, self.divergence
        if budget is None and "noise" in self.names():
            budget = DIVERGENCE_WITH_NOISE
        if not posterior.likelihood.has_divergence:
            if self.divergence is not None:
                raise PosthocUQError(
                    f"Likelihood {posterior.likelihood.name!r} measures no divergence; leave divergence out, or give "
                    f"it a method divergence(outputs, prediction)."
                )
            self._set_by_evidence()
            return
        recorded, wanted = posterior.history.faithful, (predictor.head, other_settings(posterior))
        known = bool(recorded) and (recorded["head"], recorded["settings"]) == wanted
        if known and budget in (None, recorded["budget"]):
            posterior.adjust(**{cast(str, posterior.width_parameter): recorded["value"]})
            return
        with self.rows_named():
            search = FaithfulSearch(
                posterior, self.sampled_inputs(), predictor, seed=self.seed, progress=self.progress
            )
            search.set_widest(DIVERGENCE if budget is None else budget)

    def _set_by_evidence(self) -> None:
        """Set the prior precision by the evidence; a posterior without an evidence stays as it is."""
        if self.posterior.has_free_prior_precision and LOG_DETERMINANT in self.posterior.capabilities:
            maximise_evidence(self.posterior, progress=self.progress)


_SEARCHES = {search.criterion: search for search in (_ByFaithfulness, _ByHeldOutLabels, _ByEvidence)}


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
