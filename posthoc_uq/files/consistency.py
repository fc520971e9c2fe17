"""Whether the fields of a posterior's description agree with each other; ``table`` checks each field alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.layers.layer import KINDS, Layer, matrix_sides
from posthoc_uq.likelihoods import likelihood_from_attributes
from posthoc_uq.posteriors.block import BLOCKS, FAMILIES
from posthoc_uq.posteriors.referral import checked_referral


def checked_layers(state: Mapping[str, Any]) -> dict[str, Layer]:
    """The layers of a description that the table admits, after a check that its fields agree.

    Raises:
        CorruptPosteriorError: two of its fields contradict each other; says which.
    """
    layers = {name: Layer.from_attributes(name, attributes) for name, attributes in state["layers"].items()}
    if not layers:
        raise CorruptPosteriorError("it holds no layer")
    for layer in layers.values():
        _check_layer(layer)
    weights = [layer.weight for layer in layers.values()]
    if len(set(weights)) < len(weights):
        raise CorruptPosteriorError("two of its layers have the same weight")
    _check_method(state)
    _check_by_layer(state, layers)
    _check_outputs(state, layers)
    checked_referral(state["attributes"]["record"].get("referral", {}))
    return layers


def _check_layer(layer: Layer) -> None:
    shape = layer.weight_shape
    sides = layer.groups * layer.outputs, layer.inputs - (layer.bias is not None)
    if len(shape) != KINDS[layer.kind] or sides != matrix_sides(layer.kind, shape):
        raise CorruptPosteriorError(
            f"layer '{layer.name}' of kind {layer.kind!r} has a weight of shape {shape}, which is not {layer.groups} "
            f"matrices of ({layer.outputs}, {layer.inputs})"
        )


def _check_method(state: Mapping[str, Any]) -> None:
    method = state["attributes"]["method"]
    kinds = {block["kind"] for block in state["blocks"].values()}
    if len(kinds) != 1 or not kinds <= set(FAMILIES[method]):
        raise CorruptPosteriorError(
            f"its method is {method!r}, and its blocks are of the kinds {sorted(kinds)}"
        )
    samples = state["attributes"]["evidence"]["samples"]
    if any(block["attributes"].get("samples", samples) != samples for block in state["blocks"].values()):
        raise CorruptPosteriorError("its variances are of another number of samples than the fit saw")
    if state["trained_mean"] and not all(BLOCKS[kind].trained for kind in kinds):
        raise CorruptPosteriorError(f"it has a trained mean, which method={method!r} does not give")


def _check_by_layer(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> None:
    """Values given by layer must name every layer once."""
    attributes = state["attributes"]
    history = attributes["record"]
    places = {
        "prior_precision": attributes["prior_precision"],
        "faithful prior": history.get("faithful", {}).get("value"),
    }
    for place, value in places.items():
        if isinstance(value, dict) and value.keys() != layers.keys():
            raise CorruptPosteriorError(f"its {place} does not name every layer once")


def _check_outputs(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> None:
    """The likelihood must fit the number of outputs, where that is known: from the targets of the fit, or from the last
    layer if its outputs are the model's.
    """
    attributes = state["attributes"]
    evidence, outputs, classes = attributes["evidence"], _outputs_of_last(state, layers), None
    if "class" in attributes["likelihood"]:
        return  # a user's own likelihood, about which the file says too little
    likelihood = likelihood_from_attributes(attributes["likelihood"])
    name = likelihood.name
    if likelihood.noise_variance is None and (evidence["targets"] or evidence["squared_residuals"]):
        raise CorruptPosteriorError(f"its likelihood is {name!r}, and its evidence is a regression's")
    if evidence["targets"]:
        targets_per_sample, remainder = divmod(evidence["targets"], evidence["samples"])
        if remainder or outputs not in (None, targets_per_sample):
            raise CorruptPosteriorError(
                f"its evidence has {evidence['targets']} targets of {evidence['samples']} samples, which is no number "
                f"of its outputs"
            )
        outputs = targets_per_sample
    if outputs is not None:
        if not likelihood.takes(outputs):
            raise CorruptPosteriorError(f"its likelihood {name!r} contradicts its {outputs} outputs")
        classes = likelihood.classes(outputs)
    features = state["features"]
    if features is not None and classes is not None and features["attributes"]["classes"] > classes:
        raise CorruptPosteriorError(f"its features are of more classes than the {classes} that there are")


def _outputs_of_last(state: Mapping[str, Any], layers: Mapping[str, Layer]) -> int | None:
    if state["features"] is None:
        return None
    attributes = state["features"]["attributes"]
    described = attributes["layer"]
    last = Layer.from_attributes(described["name"], described)
    _check_layer(last)
    if layers.get(last.name, last) != last:
        raise CorruptPosteriorError(f"its features are of a layer '{last.name}' that is another one")
    return last.groups * last.outputs if attributes["source"] != "pooled" else None
