"""Hyperparameters of a fitted posterior: by faithfulness to the network, by the likelihood of held-out data, or by the
log marginal likelihood.

Changing them re-factors small systems and never needs the training data again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.faithful import DIVERGENCE, GUARDED, FaithfulSearch, widening
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.held_out import HYPERPARAMETER, HeldOutSearch, device_of, model_of, restored_on_error
from posthoc_uq.inference.evidence import Trials, maximise_evidence
from posthoc_uq.inference.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.loaders import Batch, BatchFunction, BatchReader, check_loader
from posthoc_uq.memory import default_budget
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.settings import ABOUT
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.values import COUNT, POSITIVE, SEED, flag, one_of, shown
from posthoc_uq.warned import warn_user
from posthoc_uq.wrapping import head_class, recorded_head, wrap

PARAMETERS = ("prior_precision", "residual_weight", "scale", "noise")
CRITERIA = ("faithful", "likelihood", "evidence")


def tune(
    posterior: Posterior,
    loader: Iterable[Any] | None = None,
    *,
    criterion: str | None = None,
    divergence: float | None = None,
    temperature: bool | None = None,
    per_layer: bool = False,
    noise: bool = False,
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
    """Choose the hyperparameters of `posterior`, in place, by one of three criteria.

    * ``"faithful"``: the widest posterior whose predictions stay within `divergence` nats of the network's own, mean
      over a few hundred inputs like those it was trained on, whose labels are not needed. It is the default of `fit`.
    * ``"likelihood"``, the default with a loader: the widest posterior, but none wider than the faithful one, whose
      negative log-likelihood of held-out data is at most 0.01 nats above the best; of classes, what is wider than the
      faithful posterior of a fit may also cost at most a tenth of the best. Held-out data of the training distribution
      cannot judge uncertainty about foreign inputs, so what they hardly mind is kept. Where outputs are logits every
      prior precision has the temperature that predicts best, under a log-normal prior around 1 that keeps a few samples
      from moving it far. `scale`, `residual_weight` and noise are searched where they are asked for, one after the
      other.
    * ``"evidence"``, the default without a loader: the prior precision of the largest log marginal likelihood. It is
      right for the linearised model of a network with many data, and far too wide for drawn weights of one with few.

    A posterior whose variances were optimised (``method="function_space"``) has its `scale` chosen in place of the
    prior precision, which is settled, and has no marginal likelihood.

    Args:
        posterior: from `fit` or `load`.
        loader: held-out batches with targets, read several times; for ``"faithful"`` training inputs, or others like
            them, read once.
        criterion: see above.
        divergence: the budget of the faithful prior, in nats; by default 0.002 for ``"faithful"``, and 0.02 for
            ``"likelihood"``, where held-out data guard against harm.
        temperature: with held-out data: whether a temperature on the logits is searched, by default where outputs are
            logits. Of ``"faithful"``: whether the mean entropy on the training inputs is brought back to the network's,
            by default not: it keeps a network's overconfidence on what it memorised.
        per_layer: one prior precision per layer (evidence only).
        noise: for regression, tune the noise too; without it the noise stays at the training residuals' variance.
        parameters: what to search on held-out data, out of ``"prior_precision"``, ``"residual_weight"``, ``"scale"``,
            ``"noise"``, and nothing (``()``) for the temperature alone. By default the prior precision, or the scale
            where that is settled.
        prior_precisions: the values to try on held-out data, in place of the search (of per-layer prior precisions:
            their geometric mean).
        head: through which inputs are predicted: ``"sampling"``, ``"linearized"`` or ``"moments"``; by default the one
            that the posterior's hyperparameters were found for. It is recorded, and `wrap` takes it by default.
        n_samples: weight draws of the sampling head.
        max_evaluations: evaluations per hyperparameter other than the prior precision.
        seed: of the draws.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: show a bar.
        **options: of the head, as in `wrap`.

    Referral thresholds belong to the hyperparameters that they were set for: where a search changes these, it warns
    that the thresholds no longer apply.

    Returns:
        What was tried; printed, it tells first what was chosen and what was given up against the best for a wider
        posterior, and also what ended at the edge of its interval (which is a warning, too).

    Raises:
        PosthocUQError: options that do not fit together, no targets, or a posterior without its model.
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"tune takes a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    asked = _Asked(
        _criterion(criterion, loader),
        None if divergence is None else POSITIVE("divergence, a budget in nats,", divergence),
        None if temperature is None else flag("temperature", temperature),
        flag("noise", noise),
        parameters,
        prior_precisions,
        COUNT("max_evaluations", max_evaluations),
        SEED("seed", seed),
        progress,
    )
    n_samples, per_layer = COUNT("n_samples", n_samples), flag("per_layer", per_layer)
    reader = BatchReader(device_of(posterior), batch_to_inputs, batch_to_targets)
    if asked.criterion == "evidence":
        if head is not None or options:
            raise PosthocUQError(
                "The evidence needs no head; head and its options are for held-out data, or criterion='faithful'."
            )
        with posterior.searching():
            return _by_evidence(posterior, loader, asked, per_layer)
    if per_layer:
        raise PosthocUQError(
            "per_layer=True is chosen by the log marginal likelihood; call tune without a loader."
        )
    if loader is None:
        raise PosthocUQError(
            f"criterion={asked.criterion!r} needs data: pass a loader of "
            + ("held-out data with targets." if asked.criterion == "likelihood" else "training inputs.")
        )
    check_loader(loader)
    with posterior.searching(), restored_on_error(posterior):
        name, own = _head(posterior, head, n_samples, asked.seed, options)
        _forget_calibration(posterior, name)
        posterior.warned_heads.add(name)
        fitted = _fitted_prior(posterior, name)
        predictor = wrap(model_of(posterior), posterior, name, **own)
        kept = plain_options(options or _recorded(posterior, name))
        posterior.record.head = {"name": name, "options": kept, "criterion": asked.criterion}
        if asked.criterion == "faithful":
            return _by_faithfulness(posterior, loader, predictor, reader, asked)
        return _by_likelihood(posterior, loader, predictor, reader, asked, fitted)


@dataclass(frozen=True)
class _Asked:
    """What a call of `tune` asks for, checked; see there."""

    criterion: str
    divergence: float | None
    temperature: bool | None
    noise: bool
    parameters: tuple[str, ...] | None
    grid: Sequence[float] | None
    max_evaluations: int
    seed: int
    progress: bool


def _by_evidence(
    posterior: Posterior, loader: Iterable[Any] | None, asked: _Asked, per_layer: bool
) -> Trials:
    if loader is not None or asked.temperature or asked.parameters is not None or asked.grid is not None:
        raise PosthocUQError(
            "The evidence needs no data and chooses the prior precision alone: leave loader, temperature, "
            "parameters and prior_precisions out, or take criterion='likelihood'."
        )
    trials = maximise_evidence(posterior, per_layer=per_layer, noise=asked.noise)
    posterior.record.head |= {"criterion": asked.criterion} if posterior.record.head else {}
    return trials


def _by_faithfulness(
    posterior: Posterior, loader: Iterable[Any], predictor: Predictor, reader: BatchReader, asked: _Asked
) -> Trials:
    _tempered(posterior, asked.temperature)
    if asked.parameters is not None or asked.grid is not None or asked.noise:
        raise PosthocUQError(
            "parameters, prior_precisions and noise are tuned by criterion='likelihood'; the faithful prior "
            "needs none of them."
        )
    inputs = kept_inputs(posterior, loader, reader, asked.seed, asked.progress)
    budget = DIVERGENCE if asked.divergence is None else asked.divergence
    return settle_faithful(
        posterior, inputs, predictor, budget, seed=asked.seed, matched=bool(asked.temperature)
    )


def settle_faithful(
    posterior: Posterior,
    inputs: Sequence[Batch],
    predictor: Predictor,
    divergence: float,
    *,
    seed: int = 0,
    matched: bool = False,
) -> Trials:
    """Set the faithful prior (or scale) and its temperature, and note how far the predictions moved.

    Args:
        posterior: with the head of the predictor on record.
        inputs: training inputs.
        predictor: through which they are predicted.
        divergence: the budget in nats.
        seed: of the draws.
        matched: whether each prior precision has a temperature of its own.
    """
    kept = posterior.record.faithful
    if kept and posterior.temperature == kept["temperature"]:  # matched before: the network's own is another
        posterior.temperature = kept["network_temperature"]
    before = posterior.temperature
    search = FaithfulSearch(posterior, inputs, predictor, seed=seed, matched=matched)
    reached = search.run(divergence)
    record, own = posterior.record, search.name
    record.tuning[ABOUT[own].label] = f"faithful through head={predictor.head!r}: {reached}"
    record.tuning.pop("temperature", None)
    if posterior.temperature != before:
        record.tuning["temperature"] = "the one at which the mean entropy on the same inputs is the network's"
    record.faithful = {
        "head": predictor.head,
        "value": posterior.settings.plain()[own],
        "temperature": posterior.temperature,
        "network_temperature": before,
        "divergence": reached.divergence,
        "budget": float(divergence),
        "settings": other_settings(posterior),
    }
    return search.trials


def other_settings(posterior: Posterior) -> dict[str, float]:
    """The hyperparameters that a faithful prior (or scale) belongs to."""
    names = [name for name, about in ABOUT.items() if about.of_weights and not about.by_layer]
    return {name: float(getattr(posterior, name)) for name in names if name != posterior.widening}


def kept_inputs(
    posterior: Posterior, loader: Iterable[Any], reader: BatchReader, seed: int, progress: bool
) -> list[Batch]:
    """A few hundred inputs of a loader, those with the smallest hashes."""
    kept = KeptInputs(default_budget(reader.device), inputs_to_keep(posterior.layers.values()))
    with isolated_random_state(seed):
        kept.read(loader, reader, seed, progress)
    return kept.batches(reader.device)


def _by_likelihood(
    posterior: Posterior,
    loader: Iterable[Any],
    predictor: Predictor,
    reader: BatchReader,
    asked: _Asked,
    fitted: Any,
) -> Trials:
    names, seed = _chosen(posterior, asked.parameters, asked.noise), asked.seed
    main, grid = posterior.widening, None if asked.grid is None else _checked_grid(names, asked.grid)
    search = HeldOutSearch(
        posterior,
        loader,
        predictor,
        seed=seed,
        reader=reader,
        temperature=_tempered(posterior, asked.temperature),
        progress=asked.progress,
    )
    if main in names:
        if grid is None:
            budget = GUARDED if asked.divergence is None else asked.divergence
            _return_to_faithful(posterior, loader, predictor, reader, budget, seed)

        def harmless() -> None:
            if fitted is not None:
                posterior.adjust(**{cast(str, posterior.widening): fitted})
                return
            inputs = kept_inputs(posterior, loader, reader, seed, False)
            FaithfulSearch(posterior, inputs, predictor, seed=seed).set_widest(DIVERGENCE)

        search.widest(grid, harmless)
    for name in names:
        if name != main:
            search.coordinate(name, asked.max_evaluations)
    if not names:
        search.only_temperature()
    return search.finish()


def _return_to_faithful(
    posterior: Posterior,
    loader: Iterable[Any],
    predictor: Predictor,
    reader: BatchReader,
    divergence: float,
    seed: int,
) -> None:
    """Set the faithful prior, from which a search on held-out data goes upwards: the one on record where it was found
    through the same head with the same budget and settings, or else by the held-out inputs.
    """
    kept = posterior.record.faithful
    same = kept and (kept["head"], kept["budget"], kept["settings"]) == (
        predictor.head,
        divergence,
        other_settings(posterior),
    )
    if same:
        posterior.adjust(**{cast(str, posterior.widening): kept["value"]})
        return
    settle_faithful(
        posterior, kept_inputs(posterior, loader, reader, seed, False), predictor, divergence, seed=seed
    )


def _fitted_prior(posterior: Posterior, head: str) -> Any:
    """The faithful prior precision (or scale) of a fit, or of a search by that criterion, through this head and with
    the present settings; None where the posterior has another one by now.
    """
    kept = posterior.record.faithful
    if not kept or posterior.record.head.get("criterion") != "faithful":
        return None
    same = (kept["head"], kept["settings"]) == (head, other_settings(posterior))
    return kept["value"] if same else None


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
    own = options or _recorded(posterior, name)
    return name, ({**own, "n_samples": n_samples, "seed": seed} if name == "sampling" else own)


def _recorded(posterior: Posterior, name: str) -> dict[str, Any]:
    recorded, options = recorded_head(posterior)
    return options if recorded == name else {}


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """What of a head's options can be kept in a file."""
    return {k: v for k, v in options.items() if isinstance(v, (bool, int, float, str))}


def _forget_calibration(posterior: Posterior, head: str) -> None:
    if head == "moments" and posterior.record.calibration:
        posterior.record.calibration = {}  # it belongs to other hyperparameters than those that are tried
        warn_user("tune leaves the moments head's calibration out; calibrate again.")


def _tempered(posterior: Posterior, temperature: bool | None) -> bool:
    logits = posterior.likelihood.logits
    if temperature and not logits:
        raise PosthocUQError(
            f"A temperature divides logits; likelihood {posterior.likelihood.name!r} has none."
        )
    return logits if temperature is None else temperature


def _checked_grid(names: list[str], grid: Sequence[float]) -> list[float]:
    if "prior_precision" not in names:
        raise PosthocUQError(f"prior_precisions are given, and parameters={names} leave them alone.")
    if (
        isinstance(cast(Any, grid), (str, Mapping))
        or not isinstance(cast(Any, grid), Iterable)
        or getattr(grid, "ndim", 1) != 1
        or len(grid) == 0
    ):
        raise PosthocUQError(f"prior_precisions must be a list of numbers, not {shown(grid)}.")
    return [POSITIVE("Each of prior_precisions", value) for value in grid]


def _chosen(posterior: Posterior, parameters: tuple[str, ...] | None, noise: bool) -> list[str]:
    noisy = posterior.noise_variance is not None
    available = [p for p in PARAMETERS if HYPERPARAMETER.get(p, p) in posterior.tunable]
    if parameters is None:
        main = widening(posterior)
        return [main, "noise"] if noise and noisy else [main]
    if isinstance(cast(Any, parameters), str) or not isinstance(cast(Any, parameters), (list, tuple, set)):
        raise PosthocUQError(f"parameters must be a tuple out of {available}, not {shown(parameters)}.")
    unknown = [p for p in parameters if p not in available]
    if unknown or (not parameters and not posterior.likelihood.logits):
        raise PosthocUQError(
            f"parameters must be among {available} for this posterior; not {list(parameters)}."
        )
    return list(parameters)
