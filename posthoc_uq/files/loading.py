"""`load` and `inspect`: a file is checked as a whole before any of its numbers is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posthoc_uq.core.devices import has_double, usable_device
from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.core.interrupts import check, orderly
from posthoc_uq.core.model import apart, check_not_meta, model_device, unwrap
from posthoc_uq.core.outputs import Output, checked_output, choice_of, with_choice
from posthoc_uq.files import schema, userblock
from posthoc_uq.files.attributes import check_attributes
from posthoc_uq.files.consistency import checked_layers
from posthoc_uq.files.hdf5 import ImageReader, Structure
from posthoc_uq.files.model_checks import check_buffers, check_fingerprint, check_model, parameters_of
from posthoc_uq.files.numbers import check_blocks, check_features, complaint
from posthoc_uq.files.plain import read_plain
from posthoc_uq.files.sizes import size_limit
from posthoc_uq.files.state import (
    PRIOR_PRECISION,
    Specs,
    expected_blocks,
    expected_features,
    expected_prior,
    expected_trained_mean,
    posterior_from_state,
    state_blocks,
)
from posthoc_uq.files.summary import Inspection
from posthoc_uq.files.table import check_posterior
from posthoc_uq.files.untrusted import SandboxReader
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood, likelihood_from_attributes
from posthoc_uq.posteriors.block import TensorSpec
from posthoc_uq.posteriors.posterior import Posterior


@dataclass(frozen=True)
class _Expected:
    """What a file's tensors must be, by its description: of every block, of the trained mean, of the prior, of the
    part of the trained mean that no layer has, of the features.
    """

    blocks: dict[str, Specs]
    trained_mean: Specs
    prior: dict[str, Specs]
    certain: Specs
    features: Specs


@orderly
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    untrusted: bool = False,
    device: torch.device | str | None = None,
    likelihood: Likelihood | None = None,
    output: Output | None = None,
) -> Posterior:
    """Read a posterior for the model it was fitted on; it is centred on that model's parameters, or on those that the
    method trained.

    Args:
        path: a file that `save` wrote.
        model: the model, with the weights it had when the posterior was fitted.
        untrusted: parse the file in a child process with a time and memory limit. The digest in a file detects
            damage, but anybody can write a file with a correct digest; set this for a stranger's file.
        device: where the posterior shall live; the model's device if None.
        likelihood: of a posterior that was fitted with a likelihood of your own: an object of the same class with the
            same attributes. Nothing is imported because a file names it.
        output: of a posterior that was fitted with a function as ``output=``: the same function. A key or an index is
            in the file.

    Raises:
        PosthocUQError: the file is missing or cannot be read, there is no such device, the model's weights have no
            numbers, or the likelihood or the output's function is missing or
            another one.
        CorruptPosteriorError: it is damaged, incomplete, foreign, or of a format version that is not read.
        PosteriorMismatchError: it belongs to another model, to other values of the weights that have a posterior, or to
            other buffers, such as the running statistics of batch normalisation.
    """
    model = unwrap(model)
    check_not_meta(model)
    place = model_device(model)
    if device is not None:
        place = usable_device(
            device, f"device={str(device)!r}", "leave device out for the model's own, or use 'cpu'"
        )
    mean = parameters_of(model)
    data, header = _read(path, lambda kind: size_limit(kind, model))
    with _translated(path):
        source = SandboxReader(data) if untrusted else ImageReader(data)
        with source as reader:
            structure = reader.structure()
            state, layers, expected = _described(structure, header)
            check_model(layers, expected.certain, mean, path)
            names = {name for layer in layers.values() for name in layer.parameter_names}
            named = {name: mean[name] for name in names | set(expected.certain)}
            check_fingerprint(state["fingerprint"], named, path)
            check_buffers(state.get("buffers_fingerprint"), model, path)
            likelihood = _likelihood(state, likelihood, path)
            tensors: dict[str, Tensor] = {}
            for dataset, stored in structure.datasets.items():
                check()
                tensors[dataset] = torch.from_numpy(reader.array(dataset, stored))
        _fill(state, expected, tensors, mean)
        if state["features"] is not None:
            check_features(state["features"]["tensors"])
        check_blocks(
            state["attributes"], state_blocks(state, layers), state.get("prior", {}).get(PRIOR_PRECISION)
        )
    _place(state, mean, place)
    with _translated(path):
        posterior = posterior_from_state(state, mean, likelihood)
        own = apart(model, posterior.original)
        posterior.model = with_choice(own, choice_of(posterior.history.output, checked_output(output)))
        posterior.fingerprint = state["fingerprint"]
        posterior.buffers_fingerprint = state.get("buffers_fingerprint")
        return posterior


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """What a file holds, without a model and without its numbers; always parsed in a child process.

    Returns:
        A dictionary of plain values, which prints as a summary: ``format_version``, ``library_version``, ``bytes``,
        ``fingerprint``, ``buffers_fingerprint`` (None where the file has none), ``method``, ``likelihood``, ``scale``,
        ``prior_precision``, ``residual_weight``, ``noise_scale``, ``temperature``, ``evidence``, ``fit``, ``tuning``,
        ``deterministic``, ``head``, ``faithful``, ``calibration``, ``referral``,
        ``changes`` (of the data since the fit),
        ``output`` (the part of what the model returns), ``parameters``, ``trained_mean`` (names of
        parameters with a trained mean),
        ``features`` (what is kept of the last layer's inputs, or None), ``layers`` (name to kind and shapes) and
        ``blocks`` (name to kind, members, attributes such as ranks and correction, tensors with shape and dtype, and
        bytes).

    Raises:
        PosthocUQError: the file is missing or cannot be read.
        CorruptPosteriorError: it is damaged, incomplete, foreign, or of a format version that is not read.
    """
    data, header = _read(path, lambda _: sys.maxsize)
    with _translated(path):
        with SandboxReader(data) as reader:
            structure = reader.structure()
        state, layers, _ = _described(structure, header)
        attributes: dict[str, Any] = dict(state["attributes"])
        history: dict[str, Any] = attributes.pop("record")
        contents = {
            "format_version": header.version,
            "library_version": state["library_version"],
            "bytes": len(data),
            "fingerprint": state["fingerprint"],
            "buffers_fingerprint": state.get("buffers_fingerprint"),
            **attributes,
            **{key: history[key] for key in ("fit", "tuning", "deterministic")},
            **{
                key: history.get(key, {})
                for key in ("head", "faithful", "calibration", "referral", "changes", "output")
            },
            "parameters": sum(layer.parameters for layer in layers.values()),
            "trained_mean": list(state["trained_mean"]),
            "features": None if state["features"] is None else dict(state["features"]["attributes"]),
            "layers": {name: layer.attributes() for name, layer in layers.items()},
            "blocks": {name: _summary(name, block, structure) for name, block in state["blocks"].items()},
        }
    return Inspection(os.fsdecode(path), contents)


def _read(path: str | os.PathLike[str], limit: Callable[[str | None], int]) -> tuple[bytes, userblock.Header]:
    """The bytes and the header of a posterior's file; a checkpoint is refused by its user block alone."""

    def of_posterior(kind: str | None) -> int:
        if kind == schema.CHECKPOINT:
            with _translated(path):
                raise _checkpoint()
        return limit(kind)

    return userblock.read(path, of_posterior)


def _checkpoint() -> CorruptPosteriorError:
    return CorruptPosteriorError(
        "it is the checkpoint of an unfinished fit; pass it to fit as checkpoint=..."
    )


def _described(
    structure: Structure, header: userblock.Header
) -> tuple[dict[str, Any], dict[str, Layer], _Expected]:
    """A file's description, its layers, and what its tensors must be.

    Raises:
        CorruptPosteriorError: the description is not admissible, contradicts itself, or is not what the file holds.
    """
    state = read_plain(structure.state)
    if state.get("kind") == schema.CHECKPOINT:
        raise _checkpoint()
    state.setdefault("trained_mean", {})  # version 1 lacks it
    state.setdefault("certain", {})  # versions 1 to 4 lack it
    state.setdefault("features", None)  # versions 1 and 2 lack it
    check_posterior(state)
    if header.kind not in (None, state["attributes"]["method"]):
        raise CorruptPosteriorError(
            f"its user block says method={header.kind!r}, and its description {state['attributes']['method']!r}"
        )
    layers = checked_layers(state)
    trained_mean = expected_trained_mean(state, layers)
    certain = {name: trained_mean[name] for name in state["certain"]}
    prior = expected_prior(state, layers)
    expected = _Expected(
        expected_blocks(state, layers), trained_mean, prior, certain, expected_features(state)
    )
    _check_structure(state, expected, structure)
    check_attributes(state, structure)
    return state, layers, expected


def _fill(
    state: Mapping[str, Any],
    expected: _Expected,
    tensors: dict[str, Tensor],
    mean: Mapping[str, Tensor],
) -> None:
    """Check the numbers of a file's tensors, and put the tensors into its description."""
    for name, block in state["blocks"].items():
        specs = expected.blocks[name]
        block["tensors"] = {
            tensor_name: _restore(
                f"block '{name}'",
                tensor_name,
                specs[tensor_name],
                tensors.pop(schema.tensor_path(name, tensor_name)),
                dtype,
            )
            for tensor_name, dtype in block["dtypes"].items()
        }
    for name, dtype in state["trained_mean"].items():
        tensor = tensors.pop(schema.trained_mean_path(name))
        restored = _restore(
            "the trained mean", name, expected.trained_mean[name], tensor, dtype, mean[name].dtype
        )
        state["trained_mean"][name] = restored
    for group, specs in expected.prior.items():
        for name, spec in specs.items():
            tensor = tensors.pop(schema.prior_path(group, name))
            state["prior"][group][name] = _restore(
                "the prior", name, spec, tensor, state["prior"][group][name]
            )
    if state["features"] is not None:
        state["features"]["tensors"] = {
            name: _restore(
                "the features", name, expected.features[name], tensors.pop(schema.features_path(name)), dtype
            )
            for name, dtype in state["features"]["dtypes"].items()
        }


def _place(state: Mapping[str, Any], mean: Mapping[str, Tensor], place: torch.device) -> None:
    """Move the tensors of a description to the posterior's device; the trained mean to the model's."""
    for name, tensor in state["trained_mean"].items():
        state["trained_mean"][name] = _placed(tensor, mean[name].device)
    for group in set(schema.PRIOR_GROUPS) & state.get("prior", {}).keys():
        state["prior"][group] = {n: _placed(tensor, place) for n, tensor in state["prior"][group].items()}
    features = [] if state["features"] is None else [state["features"]]
    for owner in (*state["blocks"].values(), *features):
        owner["tensors"] = {
            tensor_name: _placed(tensor, place) for tensor_name, tensor in owner["tensors"].items()
        }


def _summary(name: str, block: Mapping[str, Any], structure: Structure) -> dict[str, Any]:
    datasets = {
        tensor_name: structure.datasets[schema.tensor_path(name, tensor_name)]
        for tensor_name in block["dtypes"]
    }
    return {
        "kind": block["kind"],
        "members": list(block["members"]),
        "attributes": dict(block["attributes"]),
        "tensors": {
            tensor_name: {"shape": list(stored.shape), "dtype": block["dtypes"][tensor_name]}
            for tensor_name, stored in datasets.items()
        },
        "bytes": sum(prod(stored.shape) * np.dtype(stored.dtype).itemsize for stored in datasets.values()),
    }


@contextmanager
def _translated(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Turn every error that a malformed description causes in Python into a `CorruptPosteriorError`."""
    try:
        yield
    except CorruptPosteriorError as error:
        raise CorruptPosteriorError(f"'{path}' cannot be loaded: {error}") from None
    except PosthocUQError:
        raise
    except MemoryError:
        raise PosthocUQError(f"'{path}' does not fit into memory.") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptPosteriorError(f"'{path}' cannot be loaded: {error or type(error).__name__}.") from error


def _likelihood(
    state: Mapping[str, Any], likelihood: Likelihood | None, path: str | os.PathLike[str]
) -> Likelihood:
    """The likelihood of a file; for a user's own class, the object that was passed, if it matches the file."""
    try:
        return likelihood_from_attributes(state["attributes"]["likelihood"], likelihood)
    except CorruptPosteriorError:
        raise
    except PosthocUQError as error:
        raise PosthocUQError(f"'{path}' cannot be loaded: {error}") from None


def _check_structure(state: Mapping[str, Any], expected: _Expected, structure: Structure) -> None:
    """The file must have exactly the groups and datasets that the description implies, with their shapes and dtypes."""
    groups = {
        "layers",
        "blocks",
        *map(schema.layer_path, state["layers"]),
        *map(schema.block_path, state["blocks"]),
        *([schema.TRAINED_MEAN] if expected.trained_mean else []),
        *([schema.FEATURES] if expected.features else []),
        *expected.prior,
    }
    if set(structure.groups) != groups:
        raise CorruptPosteriorError(
            f"its groups are not those described: {sorted(set(structure.groups) ^ groups)[:3]}"
        )
    wanted: dict[str, tuple[tuple[int, ...], str, str]] = {}
    for name, specs in expected.blocks.items():
        dtypes = state["blocks"][name]["dtypes"]
        if set(dtypes) != set(specs):
            raise CorruptPosteriorError(
                f"block '{name}' describes the tensors {sorted(dtypes)}, not {sorted(specs)}"
            )
        for tensor, spec in specs.items():
            stored_dtype = schema.DTYPES[dtypes[tensor]][1]
            wanted[schema.tensor_path(name, tensor)] = (spec.sizes, stored_dtype, f"block '{name}'")
    for name, spec in expected.trained_mean.items():
        stored_dtype = schema.DTYPES[state["trained_mean"][name]][1]
        wanted[schema.trained_mean_path(name)] = (spec.sizes, stored_dtype, "the trained mean")
    for group, specs in expected.prior.items():
        for name, spec in specs.items():
            stored_dtype = schema.DTYPES[state["prior"][group][name]][1]
            wanted[schema.prior_path(group, name)] = (spec.sizes, stored_dtype, "the prior")
    if expected.features and set(expected.features) != set(state["features"]["dtypes"]):
        raise CorruptPosteriorError("the features describe other tensors than they must have")
    for name, spec in expected.features.items():
        stored_dtype = schema.DTYPES[state["features"]["dtypes"][name]][1]
        wanted[schema.features_path(name)] = (spec.sizes, stored_dtype, "the features")
    for dataset, (shape, dtype, owner) in wanted.items():
        stored = structure.datasets.get(dataset)
        if stored is None:
            raise CorruptPosteriorError(f"{owner} lacks the dataset '{dataset}'")
        if stored.shape != shape or stored.dtype != dtype:
            raise CorruptPosteriorError(
                f"dataset '{dataset}' of {owner} has shape {stored.shape} and type {stored.dtype}, "
                f"and the file's description implies shape {shape} and type {dtype}"
            )
    extra = sorted(set(structure.datasets) - set(wanted))
    if extra:
        raise CorruptPosteriorError(f"it holds datasets that no block has: {extra[:3]}")


def _restore(
    owner: str,
    name: str,
    spec: TensorSpec,
    tensor: Tensor,
    stored_dtype: str,
    restored_dtype: torch.dtype | None = None,
) -> Tensor:
    """A dataset's numbers as the tensor that was saved: half formats as float32, or any format as `restored_dtype`."""
    if stored_dtype == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    if not spec.bits and (restored_dtype is not None or stored_dtype in ("bfloat16", "float16")):
        tensor = tensor.to(torch.float32 if restored_dtype is None else restored_dtype)
    fault = complaint(spec, tensor)
    if fault is not None:
        raise CorruptPosteriorError(f"'{name}' of {owner} {fault}")
    return tensor


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.dtype == torch.float64 and not has_double(device):
        tensor = tensor.float()
    return tensor.to(device)
