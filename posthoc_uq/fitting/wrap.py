"""`wrap`: a model and its posterior as one module whose predictions carry their uncertainty."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from torch import nn

from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.options import check_names, one_of
from posthoc_uq.core.outputs import choice_of
from posthoc_uq.core.steady import steady
from posthoc_uq.files import check_match
from posthoc_uq.heads import HEADS, Predictor
from posthoc_uq.likelihoods import Likelihood, likelihood_to_attributes, resolve_likelihood
from posthoc_uq.posteriors.history import CRITERIA
from posthoc_uq.posteriors.posterior import Posterior

if TYPE_CHECKING:
    from posthoc_uq.files.ensembles import StoredEnsemble
    from posthoc_uq.heads import EnsemblePredictor, LinearizedPredictor, MomentsPredictor, SamplingPredictor


@overload
def wrap(
    model: nn.Module, posterior: Posterior, head: Literal["sampling"], **options: Any
) -> SamplingPredictor: ...


@overload
def wrap(
    model: nn.Module, posterior: Posterior, head: Literal["moments"], **options: Any
) -> MomentsPredictor: ...


@overload
def wrap(
    model: nn.Module, posterior: Posterior, head: Literal["linearized"], **options: Any
) -> LinearizedPredictor: ...


@overload
def wrap(model: nn.Module, posterior: Posterior, head: str | None = None, **options: Any) -> Predictor: ...


@overload
def wrap(
    model: Sequence[nn.Module],
    posterior: Sequence[Posterior | None] | None,
    head: str | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    **options: Any,
) -> EnsemblePredictor: ...


@defer_interrupts
def wrap(model: Any, posterior: Any, head: str | None = None, **options: Any) -> Any:
    """Give `model` the uncertainty of `posterior`, or several networks theirs as one predictor: a deep ensemble.

    * ``"linearized"`` takes the model to be linear in its weights, as a Laplace posterior does: no Monte Carlo error,
      one backward pass for every output used, and a closed form for a posterior of the last layer.
    * ``"moments"`` propagates mean and variance through the layers in one pass, and needs
      ``predictor = predictor.fit_scale(loader)`` for the scale of deep networks.
    * ``"sampling"`` runs the model once per drawn set of weights.

    Of a list of models and a list of their posteriors it is a `posthoc_uq.heads.EnsemblePredictor`, whose predictions
    are mixtures of the networks', each with the same weight. None in place of a posterior is a network by itself.

    Args:
        model: the model the posterior was fitted on, or a copy with the same parameters on any device; or a list.
        posterior: from `fit` or `load`; or a list with one or None for each model.
        head: how to predict. By default the head, with its options, that the posterior's hyperparameters were found
            for (``"linearized"`` after a `fit` without a choice of its own, ``"sampling"`` after a training), or, if
            that does not take the options given, another one that does and that the posterior can serve. A head that
            the hyperparameters were not found for is warned of.
        **options: the arguments of the head's class: `LinearizedPredictor`, `MomentsPredictor` or `SamplingPredictor`.
            An unknown one is an error that names those that the head takes. Of a list ``likelihood=``, which the
            networks without a posterior have: by default that of the first posterior, or classification.

    Returns:
        A module whose call takes what the model takes and returns a `Prediction`, such as `ClassPrediction` or
        `RegressionPrediction`; its `predict` takes a loader.

    Raises:
        PosteriorMismatchError: the model's parameters or buffers are not those the posterior was fitted on.
        PosthocUQError: the head is unknown, needs what the posterior's blocks cannot do, or does not take an option or
            its value; networks of a list do not belong together.

    Example:
        ```python
        predictor = uq.wrap(model, posterior)
        prediction = predictor(images)
        print(prediction.probs, prediction.entropy())
        draws = uq.wrap(model, posterior, "sampling", n_samples=20)
        ```
    """
    if isinstance(model, (list, tuple, nn.ModuleList)):
        return _wrapped_list(list(cast(Iterable[nn.Module], model)), posterior, head, options)
    with steady(model, call="wrap"):
        return _wrapped(model, posterior, head, options)


def _wrapped(model: nn.Module, posterior: Posterior, head: str | None, options: dict[str, Any]) -> Predictor:
    check_match(model, posterior)
    asked = head
    if head is None:
        head, options = _fitting_head(posterior, options)
    kind = head_class(head)
    _check_served(posterior, kind)
    if any(name not in options_of(kind) for name in options):
        possible = _possible_heads(posterior) if asked is None else [head]
        others = (name for other in possible for name in options_of(HEADS[other]))
        check_names(f"head={head!r}", options, options_of(kind), others)
    _warn_of_another_head(posterior, head)
    return kind(model, posterior, **options)


def _wrapped_list(
    models: list[nn.Module], posteriors: Any, head: str | None, options: dict[str, Any]
) -> EnsemblePredictor:
    """Several networks as one predictor."""
    from posthoc_uq.heads.ensemble import EnsemblePredictor, PlainNetwork

    given: Any = [None] * len(models) if posteriors is None else posteriors
    if not isinstance(given, (list, tuple)) or not models or len(cast(list[Any], given)) != len(models):
        raise PosthocUQError(
            f"A list of {len(models)} models needs a list of as many posteriors, None for a network without one; give "
            f"uq.wrap([first, second], [first_posterior, None])."
        )
    all_of = cast("list[Posterior | None]", list(cast(list[Any], given)))
    known = [posterior for posterior in all_of if posterior is not None]
    if strange := [type(each).__name__ for each in known if not isinstance(cast(Any, each), Posterior)]:
        raise PosthocUQError(
            f"wrap needs posteriors from uq.fit or uq.load(path, model), or None, not a {strange[0]}."
        )
    likelihood = options.pop("likelihood", None)
    members = list[Predictor | PlainNetwork]()
    plain = _likelihood_of_plain(known, likelihood)
    with steady(*models, call="wrap"):
        for model, posterior in zip(models, all_of, strict=True):
            if posterior is None:
                choice = choice_of(known[0].history.output) if known else None
                members.append(PlainNetwork(model, plain, choice))
            else:
                members.append(_wrapped(model, posterior, head, options))
    return EnsemblePredictor(members, (head, options))


def ensemble_of(stored: StoredEnsemble) -> EnsemblePredictor:
    """The predictor of several networks, as it was saved."""
    options: dict[str, Any] = {**stored.options, "likelihood": stored.likelihood}
    predictor = _wrapped_list([*stored.models], [*stored.posteriors], stored.head, options)
    if stored.temperature != 1.0:
        predictor = predictor.at_temperature(stored.temperature)
    return predictor.with_promises(stored.promises)


def _likelihood_of_plain(known: Sequence[Posterior], given: str | Likelihood | None) -> Likelihood:
    """The likelihood of networks without a posterior.

    Raises:
        PosthocUQError: the posteriors have different ones.
    """
    for other in known[1:]:
        first, second = (_told(likelihood) for likelihood in (known[0].observation, other.observation))
        if first != second:
            raise PosthocUQError(
                f"The networks of an ensemble must have the same likelihood, and the posteriors have {first} and "
                f"{second}; fit them with the same likelihood=."
            )
    if given is None and known:
        return known[0].observation
    likelihood = resolve_likelihood("classification" if given is None else given)
    if known and _told(likelihood) != _told(known[0].observation):
        raise PosthocUQError(
            f"likelihood= is {_told(likelihood)}, and the posteriors have {_told(known[0].observation)}; leave it out."
        )
    return likelihood


def _told(likelihood: Likelihood) -> dict[str, Any]:
    """What the networks' likelihoods must have in common: all but the noise variance of a regression."""
    return _without_noise(likelihood_to_attributes(likelihood))


def _without_noise(attributes: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in attributes.items() if name != "noise_variance"}
    heads: Mapping[str, Any] = found.get("heads", {}) if "shapes" in found else {}  # of several heads
    return found | ({"heads": {name: _without_noise(head) for name, head in heads.items()}} if heads else {})


def head_class(head: str) -> type[Predictor]:
    """The class of a head by its name.

    Raises:
        PosthocUQError: there is no head of this name.
    """
    known = (
        isinstance(cast(Any, head), str) and head in HEADS
    )  # that of outputs alone, too, which is not listed
    return HEADS[head if known else one_of("head", head, HEADS)]


def options_of(kind: type[Predictor]) -> list[str]:
    """The names of the options that a head's class takes beside model and posterior."""
    return [name for name in inspect.signature(kind).parameters if name not in ("model", "posterior")]


def recorded_head(posterior: Posterior) -> tuple[str, dict[str, Any]]:
    """Name and options of the head that a posterior's hyperparameters were found for, by default ``"sampling"``; if the
    posterior cannot serve it, the first head that it can.
    """
    record = posterior.history.head
    name, options = ("sampling", {}) if record is None else (record.name, dict(record.options))
    if HEADS[name].needs <= posterior.capabilities:
        return name, options
    possible = _possible_heads(posterior)
    return (possible[0], {}) if possible else (name, options)


def _fitting_head(posterior: Posterior, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The recorded head with its options and those given; if it does not take these, the first head that does."""
    recorded, recorded_options = recorded_head(posterior)
    if set(options) <= set(options_of(HEADS[recorded])):
        return recorded, {**recorded_options, **options}
    takers = [name for name in _possible_heads(posterior) if set(options) <= set(options_of(HEADS[name]))]
    return (takers[0], options) if takers else (recorded, {**recorded_options, **options})


def _possible_heads(posterior: Posterior) -> list[str]:
    """The heads that need nothing which the posterior's blocks lack."""
    return [name for name, kind in HEADS.items() if kind.needs <= posterior.capabilities]


def _check_served(posterior: Posterior, kind: type[Predictor]) -> None:
    """Refuse a head that needs what the posterior's blocks cannot do, and name the possible ones."""
    if kind.needs <= posterior.capabilities:
        return
    others = " and ".join(f"head={name!r}" for name in _possible_heads(posterior))
    way_out = f"{others} {'do' if ' and ' in others else 'does'} not" if others else "no head does without"
    posterior.require(kind.needs, f"head={kind.head!r}", way_out)


def _warn_of_another_head(posterior: Posterior, head: str) -> None:
    """Warn that the hyperparameters were found for another head."""
    record = posterior.history.head
    if record is None or record.name == head or record.criterion == "given":
        return
    if not CRITERIA[record.criterion].by_predictions:
        return
    warn_user(
        f"The posterior's prior precision was found for head={record.name!r}, and head={head!r} may need another. Find "
        f"it from inputs like those of the training: posterior = uq.tune(posterior, loader, criterion='faithful', "
        f"head={head!r})."
    )
