"""A posterior as plain tensors and plain values, and back; this is what `posthoc_uq.files` writes.

The state is a dictionary: ``attributes`` (plain values), ``layers`` (name to plain values), ``blocks`` (name to
``kind``, ``members``, ``attributes`` and ``tensors``), ``trained_mean`` (parameter name to tensor, where the mean is
not the model's own), ``prior`` (of single weights, what is not the default), ``features`` (``attributes`` and
``tensors`` of the last layer's inputs, or None). Plain values are strings, numbers, booleans, lists of those, and
dictionaries of those by string.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite, isnan
from typing import Any

from torch import Tensor

from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import LIKELIHOODS, Likelihood, described, likelihood_from_attributes
from posthoc_uq.posteriors.block import BLOCKS, LARGEST, Block, TensorSpec
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.referral import checked_referral
from posthoc_uq.posteriors.settings import (
    ABOUT,
    HEAD_CRITERIA,
    HEADS,
    Evidence,
    History,
    Hyperparameters,
    WeightPrior,
)

Specs = dict[str, TensorSpec]

PRIOR_MEAN, PRIOR_PRECISION = "prior_mean", "prior_precision"  # what a file keeps of single weights' priors


def posterior_state(posterior: Posterior) -> dict[str, Any]:
    """The state of a posterior; its tensors are not copied."""
    return {
        "attributes": {
            "method": posterior.method,
            **posterior.settings.plain(),
            "likelihood": described(posterior.likelihood),
            "evidence": _evidence_state(posterior.evidence),
            "record": {
                "fit": dict(posterior.history.fit),
                "deterministic": dict(posterior.history.deterministic),
                "tuning": dict(posterior.history.tuning),
                "head": dict(posterior.history.head),
                "faithful": _plain_faithful(posterior.history.faithful),
                "calibration": dict(posterior.history.calibration),
                "referral": dict(posterior.history.referral),
                "novelty": posterior.history.novelty,
                "changes": dict(posterior.history.changes),
                "output": dict(posterior.history.output),
            },
        },
        "layers": {name: layer.attributes() for name, layer in posterior.layers.items()},
        "blocks": {
            name: {
                "kind": block.kind,
                "members": list(posterior.members[name]),
                "attributes": block.attributes(),
                "tensors": block.tensors(),
            }
            for name, block in posterior.blocks.items()
        },
        "trained_mean": _unblocked_trained_mean(posterior),
        "certain": _certain(posterior),
        "prior": prior_state(posterior.weight_prior),
        "features": None
        if posterior.features is None
        else {"attributes": posterior.features.attributes(), "tensors": posterior.features.tensors()},
    }


def numeric_attributes(posterior: Posterior) -> dict[str, Any]:
    """The attributes of a state that follow from the data: hyperparameters, evidence, and what the package's own
    likelihoods found.
    """
    kind = type(posterior.likelihood)
    own = {"likelihood": described(posterior.likelihood)} if LIKELIHOODS.get(kind.name) is kind else {}
    return {**posterior.settings.plain(), "evidence": _evidence_state(posterior.evidence), **own}


def _evidence_state(evidence: Evidence) -> dict[str, Any]:
    return {
        "samples": evidence.samples,
        "squared_residuals": evidence.squared_residuals,
        "targets": evidence.targets,
        "noise_power": evidence.noise_power,
        **({} if evidence.log_likelihood is None else {"log_likelihood": evidence.log_likelihood}),
        **({} if evidence.weight is None else {"weight": evidence.weight}),
    }


def _unblocked_trained_mean(posterior: Posterior) -> dict[str, Tensor]:
    """The part of the trained mean that no block knows itself."""
    known = {
        parameter
        for name, block in posterior.blocks.items()
        if block.own_mean() is not None
        for layer in posterior.members[name]
        for parameter in posterior.layers[layer].parameter_names
    }
    return {name: tensor for name, tensor in posterior.trained_mean.items() if name not in known}


def _certain(posterior: Posterior) -> dict[str, list[int]]:
    """The shapes of the trained mean's parameters that no layer has."""
    covered = {name for layer in posterior.layers.values() for name in layer.parameter_names}
    return {
        name: list(tensor.shape) for name, tensor in posterior.trained_mean.items() if name not in covered
    }


def state_layers(state: Mapping[str, Any]) -> dict[str, Layer]:
    """The layers of a state.

    Raises:
        CorruptPosteriorError: a layer's description is incomplete.
    """
    try:
        return {
            str(name): Layer.from_attributes(str(name), attributes)
            for name, attributes in state["layers"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptPosteriorError(f"The description of a layer is incomplete: {error!r}.") from None


def expected_blocks(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Specs]:
    """What each tensor must be, by block name and tensor name; needs no tensor, so a file is checked before it is read.

    Raises:
        CorruptPosteriorError: a block is of an unknown kind, or its attributes or members do not fit.
    """
    specs: dict[str, Specs] = {}
    placed: list[str] = []
    for name, block in state["blocks"].items():
        kind, members = BLOCKS.get(block.get("kind")), list(block.get("members", []))
        if kind is None:
            raise CorruptPosteriorError(f"Block '{name}' is of the unknown kind {block.get('kind')!r}.")
        if not members or any(member not in layers for member in members):
            raise CorruptPosteriorError(f"Block '{name}' has layers that are not described: {members[:5]}.")
        placed += members
        if kind.joint:
            shape = (1, 1, sum(layers[member].parameters for member in members))
        elif members == [name]:
            shape = layers[name].matrix_shape
        else:
            raise CorruptPosteriorError(
                f"Block '{name}' must hold the layer of that name alone, not {members[:5]}."
            )
        specs[name] = kind.specs(shape, block.get("attributes", {}))
    if sorted(placed) != sorted(layers):
        raise CorruptPosteriorError("The blocks do not hold every layer once.")
    return specs


def expected_trained_mean(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> Specs:
    """What each tensor of the trained mean must be, by parameter name; needs no tensor.

    Raises:
        CorruptPosteriorError: a parameter belongs to none of the layers, and is not described as certain either.
    """
    shapes = _shapes(layers)
    named, certain = [str(name) for name in state.get("trained_mean", {})], dict(state.get("certain", {}))
    odd = [name for name in certain if name in shapes or name not in named]
    if odd:
        raise CorruptPosteriorError(
            f"Certain parameters must be of the trained mean and of no layer, unlike {odd[:5]}."
        )
    shapes |= {str(name): tuple(int(side) for side in shape) for name, shape in certain.items()}
    stray = [name for name in named if name not in shapes]
    if stray:
        raise CorruptPosteriorError(f"The trained mean has parameters that no layer has: {stray[:5]}.")
    return {name: TensorSpec(shapes[name]) for name in named}


def prior_state(prior: WeightPrior) -> dict[str, Any]:
    """What is not the default of a prior of single weights."""
    state: dict[str, Any] = {PRIOR_PRECISION: dict(prior.precision)} if prior.precision else {}
    if isinstance(prior.mean, Mapping):
        return state | {PRIOR_MEAN: dict(prior.mean)}
    return state | ({"mean": prior.mean} if prior.mean else {})


def expected_prior(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Specs]:
    """What each tensor of the prior must be, by group and parameter; empty without any; needs no tensor.

    Raises:
        CorruptPosteriorError: it does not name every parameter of the layers once, or the blocks have no such prior.
    """
    prior, shapes = state.get("prior", {}), _shapes(layers)
    kinds = [BLOCKS[block["kind"]] for block in state["blocks"].values()]
    if prior and not all("prior_precision" in kind.tunable for kind in kinds):
        raise CorruptPosteriorError("It has a prior of single weights, and its blocks have no prior.")
    if PRIOR_PRECISION in prior and not all(kind.own_priors for kind in kinds):
        raise CorruptPosteriorError(
            "It has prior precisions of single weights, which its blocks cannot have."
        )
    if "mean" in prior and PRIOR_MEAN in prior:
        raise CorruptPosteriorError("It has two means of its prior.")
    expected: dict[str, Specs] = {}
    for group in (PRIOR_MEAN, PRIOR_PRECISION):
        if group in prior:
            if set(prior[group]) != set(shapes):
                raise CorruptPosteriorError("Its prior does not name every parameter of its layers once.")
            expected[group] = {name: TensorSpec(shape) for name, shape in shapes.items()}
    return expected


def _prior(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> WeightPrior:
    prior = state.get("prior", {})
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, specs in expected_prior(state, layers).items():
        tensors[group] = dict(prior[group])
        for name, spec in specs.items():
            tensor = tensors[group][name]
            if not spec.fits(tensor.shape) or not bool((tensor.abs() <= LARGEST).all()):
                raise CorruptPosteriorError(f"The prior's '{name}' is of another shape, or out of range.")
            if group == PRIOR_PRECISION and not bool((tensor >= 1 / LARGEST).all()):
                raise CorruptPosteriorError(f"The prior precision of '{name}' is not positive everywhere.")
    return WeightPrior(
        tensors.get(PRIOR_PRECISION, {}), tensors.get(PRIOR_MEAN, float(prior.get("mean", 0.0)))
    )


def _shapes(layers: Mapping[str, Layer]) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers.values():
        shapes[layer.weight] = layer.weight_shape
        if layer.bias is not None:
            shapes[layer.bias] = (layer.groups * layer.outputs,)
    return shapes


def expected_features(state: Mapping[str, Any]) -> Specs:
    """What each tensor of the features must be, by name; empty without features; needs no tensor.

    Raises:
        CorruptPosteriorError: an attribute is missing or out of range.
    """
    features = state.get("features")
    if features is None:
        return {}
    if not isinstance(features, Mapping) or not isinstance(features.get("attributes"), Mapping):  # pyright: ignore[reportUnknownMemberType]
        raise CorruptPosteriorError("The features are not described by attributes.")
    return FeatureGrams.specs(features["attributes"])  # pyright: ignore[reportUnknownArgumentType]


def _head(head: Mapping[str, Any]) -> dict[str, Any]:
    """A head's name, options and criterion, complete and of the right types, or none at all."""
    if not head:
        return {}
    name, criterion, options = head["name"], head["criterion"], dict(head["options"])
    if name not in HEADS or criterion not in HEAD_CRITERIA:
        raise ValueError(
            f"a head is one of {HEADS}, found by one of {HEAD_CRITERIA}, not {name!r}, {criterion!r}"
        )
    for option, value in options.items():
        if not isinstance(value, (bool, int, float, str)) or not _is_finite(value):
            raise ValueError(f"the head's option {option!r} must be a finite number or a text, not {value!r}")
    return {"name": name, "options": options, "criterion": criterion}


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)


def _plain_faithful(faithful: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about a faithful prior, without an infinite divergence, for which JSON has no number."""
    return {name: value for name, value in faithful.items() if name != "divergence" or _is_finite(value)}


def _faithful(faithful: Mapping[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """The faithful prior as plain values, complete, positive and finite, or none at all."""
    if not faithful:
        return {}
    value = faithful["value"]
    values = dict(value) if isinstance(value, Mapping) else {"": value}
    values = {str(name): float(number) for name, number in values.items()}
    if isinstance(value, Mapping) and values.keys() != set(layers):
        raise ValueError(f"a faithful prior by layer must name every layer once, not {list(values)[:5]}")
    numbers = {name: float(faithful[name]) for name in ("temperature", "network_temperature")}
    budget = float(faithful["budget"])
    positive = [*values.values(), *numbers.values(), budget]
    if not all(0.0 < number < float("inf") for number in positive):
        raise ValueError(f"a faithful prior's numbers must be positive and finite, not {positive}")
    divergence = float(faithful.get("divergence", "inf"))
    if faithful["head"] not in HEADS or isnan(divergence):
        raise ValueError(
            f"a faithful prior has a head and a divergence, not {faithful['head']!r} and {divergence}"
        )
    plain_value = values if isinstance(value, Mapping) else values[""]
    settings = {str(name): float(number) for name, number in dict(faithful.get("settings", {})).items()}
    others = {name for name, about in ABOUT.items() if about.of_weights and not about.by_layer}
    if not settings.keys() <= others or not all(0.0 <= number < float("inf") for number in settings.values()):
        raise ValueError(f"a faithful prior's settings are hyperparameters, not {settings}")
    facts = {
        "head": faithful["head"],
        "value": plain_value,
        **numbers,
        "divergence": divergence,
        "budget": budget,
    }
    return {**facts, "settings": settings}


def _calibration(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """A calibration's plain values, complete and of the right types, or none at all."""
    if not calibration:
        return {}
    numbers: dict[str, Any] = {
        name: float(calibration[name]) for name in ("alpha", "beta", "residual", "before")
    }
    settings = {name: dict(calibration[name]) for name in ("head", "posterior")}
    return {**numbers, "n_mc": int(calibration["n_mc"]), **settings}


def _checked_trained_mean(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    trained_mean: dict[str, Tensor] = {}
    for name, spec in expected_trained_mean(state, layers).items():
        tensor = state["trained_mean"][name]
        if not isinstance(tensor, Tensor) or not spec.fits(tensor.shape):
            raise CorruptPosteriorError(
                f"The trained mean's '{name}' must be a tensor of shape {spec.shape}."
            )
        trained_mean[name] = tensor
    return trained_mean


def posterior_from_state(
    state: Mapping[str, Any], mean: Mapping[str, Tensor], likelihood: Likelihood | None = None
) -> Posterior:
    """The posterior that a state describes, for a model with the parameters `mean`, by name. It is centred on them, or
    on the trained mean of the state. Without `likelihood`, that is made from the state.

    Raises:
        CorruptPosteriorError: the state is incomplete or out of range.
    """
    layers = state_layers(state)
    blocks = state_blocks(state, layers)
    attributes = state["attributes"]
    try:
        posterior = Posterior(
            str(attributes["method"]),
            layers,
            blocks,
            {name: list(block["members"]) for name, block in state["blocks"].items()},
            mean,
            likelihood or likelihood_from_attributes(attributes["likelihood"]),
            _evidence(attributes["evidence"]),
            _history(attributes["record"], layers),
            trained_mean=_checked_trained_mean(state, layers),
            settings=Hyperparameters(**{name: attributes[name] for name in ABOUT}),
        )
        posterior.weight_prior = _prior(state, layers)
        features = state.get("features")
        if features is not None:
            posterior.features = FeatureGrams.restore(features["attributes"], features["tensors"])
    except CorruptPosteriorError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, PosthocUQError) as error:
        raise CorruptPosteriorError(
            f"The posterior's attributes are incomplete or out of range: {error!r}."
        ) from None
    return posterior


def state_blocks(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Block]:
    """The blocks of a state, by name.

    Raises:
        CorruptPosteriorError: a tensor is missing or of another shape, or an attribute is out of range.
    """
    blocks: dict[str, Block] = {}
    for name, specs in expected_blocks(state, layers).items():
        described = state["blocks"][name]
        for tensor_name, spec in specs.items():
            tensor = described["tensors"].get(tensor_name)
            if tensor is None or not spec.fits(tensor.shape):
                raise CorruptPosteriorError(
                    f"Block '{name}': tensor '{tensor_name}' must have shape {spec.shape}, not "
                    f"{None if tensor is None else tuple(tensor.shape)}."
                )
        blocks[name] = BLOCKS[described["kind"]].restore(described["attributes"], described["tensors"])
    return blocks


def _evidence(evidence: Mapping[str, Any]) -> Evidence:
    log_likelihood, weight = evidence.get("log_likelihood"), evidence.get("weight")
    return Evidence(
        int(evidence["samples"]),
        None if log_likelihood is None else float(log_likelihood),
        float(evidence["squared_residuals"]),
        int(evidence["targets"]),
        int(evidence["noise_power"]),
        None if weight is None else float(weight),
    )


def _history(history: Mapping[str, Any], layers: Collection[str]) -> History:
    return History(
        dict(history["fit"]),
        dict(history["deterministic"]),
        dict(history["tuning"]),
        _head(history.get("head", {})),
        _faithful(history.get("faithful", {}), layers),
        _calibration(history.get("calibration", {})),
        checked_referral(history.get("referral", {})),
        # older files only have it in words, in the fit's facts
        str(history.get("novelty", "posterior" if "novelty" in history["fit"] else "")),
        dict(history.get("changes", {})),
        dict(history.get("output", {})),
    )
