"""Hyperparameters of a fitted posterior: by faithfulness to the network, by the likelihood of held-out data, or by the
log marginal likelihood.

A change of them factorises small matrices again, and never needs the training data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.faithful import DIVERGENCE, GUARDED, FaithfulSearch
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.held_out import HeldOutSearch, model_of
from posthoc_uq.inference.evidence import Trials, maximise_evidence
from posthoc_uq.inference.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.interrupts import orderly
from posthoc_uq.loaders import Batch, BatchFunction, BatchReader, check_loader
from posthoc_uq.memory import default_budget
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.capabilities import LOG_DETERMINANT
from posthoc_uq.posteriors.settings import ABOUT
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.tuning_names import checked_grid, names_to_tune, nothing_to_tune, tunes_temperature
from posthoc_uq.values import COUNT, POSITIVE, SEED, flag, one_of
from posthoc_uq.warned import warn_user
from posthoc_uq.wrapping import head_class, recorded_head, wrap

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
    request = _Request(
        _criterion(criterion, loader),
        None if divergence is None else POSITIVE("divergence, a budget in nats,", divergence),
        None if temperature is None else flag("temperature", temperature),
        None if noise is None else flag("noise", noise),
        parameters,
        prior_precisions,
        COUNT("max_evaluations", max_evaluations),
        SEED("seed", seed),
        progress,
    )
    n_samples, per_layer = COUNT("n_samples", n_samples), flag("per_layer", per_layer)
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
    sample = KeptInputs(default_budget(reader.device), posterior.likelihood, wanted)
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
