"""The main facts of a posterior, repeated as HDF5 attributes, which any HDF5 tool shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posthoc_uq.core.errors import CorruptPosteriorError
from posthoc_uq.files import schema, userblock
from posthoc_uq.files.hdf5 import Structure, stored_attributes


def attributes_of(described: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The attributes of every group and dataset by its path; the root's is ``"/"``.

    Args:
        described: the JSON description, which `load` reads.
    """
    hyperparameters: dict[str, Any] = described["attributes"]
    likelihood: dict[str, Any] = hyperparameters["likelihood"]
    prior = hyperparameters["prior_precision"]
    root = {
        **{key: value for key, value in hyperparameters.items() if key != "record"},
        "format": "posthoc_uq posterior",
        "format_version": userblock.FORMAT_VERSION,
        "library_version": described["library_version"],
        "fingerprint": described["fingerprint"],
        "buffers_fingerprint": described.get("buffers_fingerprint"),
        "prior_precision": "per layer" if isinstance(prior, Mapping) else prior,
        "likelihood": likelihood["name"],
        "likelihood_class": likelihood.get("class"),
        "noise_variance": likelihood.get("noise_variance"),
        "evidence": hyperparameters["evidence"],
        "fit": hyperparameters["record"]["fit"],
        "tuning": hyperparameters["record"]["tuning"],
    }
    by_path: dict[str, dict[str, Any]] = {"/": root, "layers": {}, "blocks": {}}
    for name, layer in described["layers"].items():
        facts = {"prior_precision": prior[name]} if isinstance(prior, Mapping) else {}
        by_path[schema.layer_path(name)] = {"name": name, **layer, **facts}
    for name, block in described["blocks"].items():
        facts = {"name": name, "kind": block["kind"], "members": block["members"]}
        by_path[schema.block_path(name)] = {**facts, **block["attributes"]}
        for tensor_name, number_format in block["dtypes"].items():
            by_path[schema.tensor_path(name, tensor_name)] = {"dtype": number_format}
    for name, number_format in described["trained_mean"].items():
        by_path[schema.trained_mean_path(name)] = {"name": name, "dtype": number_format}
    for group in schema.PRIOR_GROUPS:
        for name, number_format in described.get("prior", {}).get(group, {}).items():
            by_path[schema.prior_path(group, name)] = {"name": name, "dtype": number_format}
    features = described["features"]
    if features is not None:
        by_path[schema.FEATURES] = dict(features["attributes"])
        for name, number_format in features["dtypes"].items():
            by_path[schema.features_path(name)] = {"dtype": number_format}
    return by_path


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
