"""A posterior as plain tensors and plain values, and back: all that a store writes.

The state is a dictionary: ``attributes`` (plain values), ``layers`` (name to plain values), ``blocks`` (name to
``kind``, ``members``, ``attributes`` and ``tensors``), ``centre`` (parameter name to tensor, where the mean is not the
model's own), ``features`` (``attributes`` and ``tensors`` of the last layer's inputs, or None). Plain values are
strings, numbers, booleans, lists of those, and dictionaries of those by string.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite, isnan
from typing import Any

from torch import Tensor

from posthoc_uq.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Likelihood, described, likelihood_from_attributes
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import BLOCKS, Block
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.record import HEAD_CRITERIA, HEADS, Evidence, Record
from posthoc_uq.posteriors.referral import checked_referral
from posthoc_uq.posteriors.settings import ABOUT, Hyperparameters
from posthoc_uq.posteriors.specs import TensorSpec

Specs = dict[str, TensorSpec]


def posterior_state(posterior: Posterior) -> dict[str, Any]:
    """The state of a posterior; tensors are its own, not copies."""
    evidence = posterior.evidence
    return {
        "attributes": {
            "method": posterior.method,
            **posterior.settings.plain(),
            "likelihood": described(posterior.likelihood),
            "evidence": {
                "samples": evidence.samples,
                "squared_residuals": evidence.squared_residuals,
                "targets": evidence.targets,
                "noise_power": evidence.noise_power,
                **({} if evidence.log_likelihood is None else {"log_likelihood": evidence.log_likelihood}),
            },
            "record": {
                "fit": dict(posterior.record.fit),
                "deterministic": dict(posterior.record.deterministic),
                "tuning": dict(posterior.record.tuning),
                "head": dict(posterior.record.head),
                "faithful": _plain_faithful(posterior.record.faithful),
                "calibration": dict(posterior.record.calibration),
                "referral": dict(posterior.record.referral),
                "novelty": posterior.record.novelty,
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
        "centre": _own_centre(posterior),
        "features": None
        if posterior.features is None
        else {"attributes": posterior.features.attributes(), "tensors": posterior.features.tensors()},
    }


def _own_centre(posterior: Posterior) -> dict[str, Tensor]:
    """The part of the centre that no block knows itself."""
    known = {
        parameter
        for name, block in posterior.blocks.items()
        if block.own_mean() is not None
        for layer in posterior.members[name]
        for parameter in posterior.layers[layer].parameter_names
    }
    return {name: tensor for name, tensor in posterior.centre.items() if name not in known}


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
    """Block name to tensor name to what it must be; needs no tensor, so that a store can check before it reads.

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


def expected_centre(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> Specs:
    """Parameter name to what a centre's tensor must be; needs no tensor.

    Raises:
        CorruptPosteriorError: a parameter belongs to none of the layers.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers.values():
        shapes[layer.weight] = layer.weight_shape
        if layer.bias is not None:
            shapes[layer.bias] = (layer.groups * layer.outputs,)
    named = [str(name) for name in state.get("centre", {})]
    stray = [name for name in named if name not in shapes]
    if stray:
        raise CorruptPosteriorError(f"The centre has parameters that no layer has: {stray[:5]}.")
    return {name: TensorSpec(shapes[name]) for name in named}


def expected_features(state: Mapping[str, Any]) -> Specs:
    """Name to what a tensor of the features must be, nothing where there are none; needs no tensor.

    Raises:
        CorruptPosteriorError: an attribute is missing or out of range.
    """
    kept = state.get("features")
    if kept is None:
        return {}
    if not isinstance(kept, Mapping) or not isinstance(kept.get("attributes"), Mapping):  # pyright: ignore[reportUnknownMemberType]
        raise CorruptPosteriorError("The features are not described by attributes.")
    return FeatureGrams.specs(kept["attributes"])  # pyright: ignore[reportUnknownArgumentType]


def _head(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A head's name, options and criterion, all there and of their kinds, or none at all."""
    if not kept:
        return {}
    name, criterion, options = kept["name"], kept["criterion"], dict(kept["options"])
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


def _plain_faithful(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a faithful prior without an infinite divergence, for which JSON has no number."""
    return {name: value for name, value in kept.items() if name != "divergence" or _is_finite(value)}


def _faithful(kept: Mapping[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """The faithful prior as plain values, all there, positive and finite, or none at all."""
    if not kept:
        return {}
    value = kept["value"]
    values = dict(value) if isinstance(value, Mapping) else {"": value}
    values = {str(name): float(number) for name, number in values.items()}
    if isinstance(value, Mapping) and values.keys() != set(layers):
        raise ValueError(f"a faithful prior by layer must name every layer once, not {list(values)[:5]}")
    numbers = {name: float(kept[name]) for name in ("temperature", "network_temperature")}
    budget = float(kept["budget"])
    positive = [*values.values(), *numbers.values(), budget]
    if not all(0.0 < number < float("inf") for number in positive):
        raise ValueError(f"a faithful prior's numbers must be positive and finite, not {positive}")
    divergence = float(kept.get("divergence", "inf"))
    if kept["head"] not in HEADS or isnan(divergence):
        raise ValueError(
            f"a faithful prior has a head and a divergence, not {kept['head']!r} and {divergence}"
        )
    whole = values if isinstance(value, Mapping) else values[""]
    settings = {str(name): float(number) for name, number in dict(kept.get("settings", {})).items()}
    others = {name for name, about in ABOUT.items() if about.of_weights and not about.by_layer}
    if not settings.keys() <= others or not all(0.0 <= number < float("inf") for number in settings.values()):
        raise ValueError(f"a faithful prior's settings are hyperparameters, not {settings}")
    found = {"head": kept["head"], "value": whole, **numbers, "divergence": divergence, "budget": budget}
    return {**found, "settings": settings}


def _calibration(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A calibration's plain values, all there and of their kinds, or none at all."""
    if not kept:
        return {}
    numbers: dict[str, Any] = {name: float(kept[name]) for name in ("alpha", "beta", "residual", "before")}
    settings = {name: dict(kept[name]) for name in ("head", "posterior")}
    return {**numbers, "n_mc": int(kept["n_mc"]), **settings}


def _checked_centre(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, spec in expected_centre(state, layers).items():
        tensor = state["centre"][name]
        if not isinstance(tensor, Tensor) or not spec.fits(tensor.shape):
            raise CorruptPosteriorError(f"The centre's '{name}' must be a tensor of shape {spec.shape}.")
        found[name] = tensor
    return found


def posterior_from_state(
    state: Mapping[str, Any], mean: Mapping[str, Tensor], likelihood: Likelihood | None = None
) -> Posterior:
    """The posterior that a state describes, for a model with the parameters `mean`, by name; centred on them, or on the
    centre of the state. The likelihood is the one given, or made anew.

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
            _record(attributes["record"], layers),
            centre=_checked_centre(state, layers),
            settings=Hyperparameters(**{name: attributes[name] for name in ABOUT}),
        )
        kept = state.get("features")
        if kept is not None:
            posterior.features = FeatureGrams.restore(kept["attributes"], kept["tensors"])
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
        for tensor, spec in specs.items():
            found = described["tensors"].get(tensor)
            if found is None or not spec.fits(found.shape):
                raise CorruptPosteriorError(
                    f"Block '{name}': tensor '{tensor}' must have shape {spec.shape}, not "
                    f"{None if found is None else tuple(found.shape)}."
                )
        blocks[name] = BLOCKS[described["kind"]].restore(described["attributes"], described["tensors"])
    return blocks


def _evidence(kept: Mapping[str, Any]) -> Evidence:
    log_likelihood = kept.get("log_likelihood")
    return Evidence(
        int(kept["samples"]),
        None if log_likelihood is None else float(log_likelihood),
        float(kept["squared_residuals"]),
        int(kept["targets"]),
        int(kept["noise_power"]),
    )


def _record(kept: Mapping[str, Any], layers: Collection[str]) -> Record:
    return Record(
        dict(kept["fit"]),
        dict(kept["deterministic"]),
        dict(kept["tuning"]),
        _head(kept.get("head", {})),
        _faithful(kept.get("faithful", {}), layers),
        _calibration(kept.get("calibration", {})),
        checked_referral(kept.get("referral", {})),
        # older files say it in words alone
        str(kept.get("novelty", "posterior" if "novelty" in kept["fit"] else "")),
    )
