"""A posterior that was fitted on a part of a model, such as the last layer on stored features, as one of the whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import fingerprint
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.outputs import Output, OutputChoice, with_choice
from posthoc_uq.files.match import buffers_fingerprint, others_fingerprint, parameters_of
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.history import History
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import WeightPrior

Value = TypeVar("Value")


def part_of(model: nn.Module, prefix: str) -> nn.Module:
    """The part of a model by its name.

    Raises:
        PosthocUQError: there is none.
    """
    parts = dict(model.named_modules())
    if not prefix or prefix not in parts:
        names = [name for name in parts if name]
        raise PosthocUQError(
            f"prefix must be the name of a part of the model, and {prefix!r} is none; there are {names[:6]}."
            f"{did_you_mean(prefix, names)}"
        )
    return parts[prefix]


def part_with(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], expected: str) -> str | None:
    """The name of the part of a model whose parameters of these names and shapes have the expected fingerprint."""
    for prefix, part in model.named_modules():
        own = {name: p.detach() for name, p in part.named_parameters(remove_duplicate=False)}
        fits = prefix and all(
            name in own and tuple(own[name].shape) == shape for name, shape in shapes.items()
        )
        if fits and fingerprint({name: own[name] for name in shapes}) == expected:
            return prefix
    return None


def of_whole(posterior: Posterior, model: nn.Module, prefix: str, output: Output | None) -> Posterior:
    """A posterior of the part of this name as one of the whole model, whose other parameters are certain. Nothing tells
    whether the model gives the part what it was given in the fit.

    Args:
        posterior: loaded for the part.
        model: the whole.
        prefix: the part's name.
        output: where the outputs are in what the whole returns, if that is no tensor.
    """
    layers = {name: _renamed(layer, prefix) for name, layer in posterior.layers.items()}
    names = {name: layer.name for name, layer in layers.items()}
    parameters = parameters_of(model)
    choice = None if output is None else OutputChoice.of_part(output)
    prior = posterior.weight_prior
    whole = Posterior(
        posterior.method,
        {layer.name: layer for layer in layers.values()},
        {names.get(name, name): block for name, block in posterior.blocks.items()},
        {names.get(name, name): [names[inner] for inner in of] for name, of in posterior.members.items()},
        parameters,
        posterior.likelihood,
        posterior.evidence,
        _history(posterior.history, prefix, names, choice),
        trained_mean=_under(posterior.trained_mean, prefix),
        settings=replace(
            posterior.settings, prior_precision=_by_layer(posterior.settings.prior_precision, names)
        ),
        model=with_choice(model, choice),
        features=None if posterior.features is None else _features(posterior.features, prefix),
        weight_prior=WeightPrior(
            _under(prior.precision, prefix),
            _under(prior.mean, prefix) if isinstance(prior.mean, Mapping) else prior.mean,
        ),
    )
    return whole.replaced(
        fingerprint=fingerprint(whole.original),
        buffers_fingerprint=buffers_fingerprint(model),
        others_fingerprint=others_fingerprint(parameters, whole.original),
    )


def _under(named: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    return {f"{prefix}.{name}": value for name, value in named.items()}


def _renamed(layer: Layer, prefix: str) -> Layer:
    """A layer of the part as one of the whole; where the part is the layer itself, it has the part's name."""
    name = prefix if layer.name == "weight" else f"{prefix}.{layer.name}"
    bias = None if layer.bias is None else f"{prefix}.{layer.bias}"
    return replace(layer, name=name, weight=f"{prefix}.{layer.weight}", bias=bias)


def _by_layer(prior: Any, names: Mapping[str, str]) -> Any:
    """A number, or numbers by the new names of layers."""
    return {names[name]: each for name, each in prior.items()} if isinstance(prior, dict) else prior


def _settings(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {
        key: _by_layer(value, names) if key == "prior_precision" else value for key, value in settings.items()
    }


def _features(features: FeatureGrams, prefix: str) -> FeatureGrams:
    renamed = copy.copy(features)
    renamed.layer = _renamed(features.layer, prefix)
    renamed.stages = tuple(_features(stage, prefix) for stage in features.stages)
    return renamed


def _history(history: History, prefix: str, names: Mapping[str, str], choice: OutputChoice | None) -> History:
    """Without the inputs of the part, which are not those of the whole."""
    fit, faithful, promises = dict[str, Any](history.fit), history.faithful, history.promises
    if "last layer" in fit:
        fit["last layer"] = names[fit["last layer"]]
    if "kappa" in fit:
        fit["kappa"] = _by_layer(fit["kappa"], names)
    if faithful is not None:
        faithful = faithful.changed(value=_by_layer(faithful.value, names))
    if promises is not None:
        promises = promises.changed(
            posterior=_settings(promises.posterior, names),
            retuned=promises.retuned and _settings(promises.retuned, names),
        )
    deterministic = _under(history.deterministic, prefix)
    return replace(
        history,
        fit=fit,
        deterministic=deterministic,
        faithful=faithful,
        promises=promises,
        output=choice,
        inputs={},
        trials=None,
    )
