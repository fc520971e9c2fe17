"""The main facts of a posterior once more, as attributes that any HDF5 tool shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posthoc_uq.errors import CorruptPosteriorError
from posthoc_uq.storage import schema, userblock
from posthoc_uq.storage.hdf5 import Structure, stored_attributes


def attributes_of(described: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The attributes of every object by its path, of the root by ``"/"``.

    Args:
        described: what `load` reads.
    """
    plain: dict[str, Any] = described["attributes"]
    likelihood: dict[str, Any] = plain["likelihood"]
    prior = plain["prior_precision"]
    root = {
        **{key: value for key, value in plain.items() if key != "record"},
        "format": "posthoc_uq posterior",
        "format_version": userblock.FORMAT_VERSION,
        "library_version": described["library_version"],
        "fingerprint": described["fingerprint"],
        "prior_precision": "per layer" if isinstance(prior, Mapping) else prior,
        "likelihood": likelihood["name"],
        "likelihood_class": likelihood.get("class"),
        "noise_variance": likelihood.get("noise_variance"),
        "evidence": plain["evidence"],
        "fit": plain["record"]["fit"],
        "tuning": plain["record"]["tuning"],
    }
    found: dict[str, dict[str, Any]] = {"/": root, "layers": {}, "blocks": {}}
    for name, layer in described["layers"].items():
        own = {"prior_precision": prior[name]} if isinstance(prior, Mapping) else {}
        found[schema.layer_path(name)] = {"name": name, **layer, **own}
    for name, block in described["blocks"].items():
        own = {"name": name, "kind": block["kind"], "members": block["members"]}
        found[schema.block_path(name)] = {**own, **block["attributes"]}
        for tensor_name, number_format in block["dtypes"].items():
            found[schema.tensor_path(name, tensor_name)] = {"dtype": number_format}
    for name, number_format in described["centre"].items():
        found[schema.centre_path(name)] = {"name": name, "dtype": number_format}
    features = described["features"]
    if features is not None:
        found[schema.FEATURES] = dict(features["attributes"])
        for name, number_format in features["dtypes"].items():
            found[schema.features_path(name)] = {"dtype": number_format}
    return found


def check_attributes(described: Mapping[str, Any], structure: Structure) -> None:
    """Refuse attributes that `attributes_of` does not give.

    Raises:
        CorruptPosteriorError: there are some.
    """
    known = attributes_of(described)
    for path, names in structure.attributes.items():
        extra = sorted(set(names) - stored_attributes(known.get(path, {})).keys())
        if extra:
            raise CorruptPosteriorError(f"'{path}' has attributes that no posterior has: {extra[:3]}")
