"""`save`: a posterior into one HDF5 file, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from math import inf
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.core.distributed import rank
from posthoc_uq.core.errors import CorruptPosteriorError, NonFiniteError, PosthocUQError
from posthoc_uq.core.interrupts import check, orderly
from posthoc_uq.files import atomic, hdf5, plain, schema, userblock
from posthoc_uq.files.attributes import attributes_of
from posthoc_uq.files.consistency import checked_layers
from posthoc_uq.files.numbers import check_blocks, check_features, complaint
from posthoc_uq.files.state import (
    expected_blocks,
    expected_features,
    expected_prior,
    numeric_attributes,
    posterior_state,
)
from posthoc_uq.files.table import check_posterior, check_values
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import likelihood_from_attributes
from posthoc_uq.posteriors.block import LOG_DETERMINANT, TensorSpec
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.version import __version__

_WIDER = "save with dtype=torch.bfloat16 or torch.float32"
_LOST = 0.01  # share of a tensor's absolute sum that a narrower number format may lose


@orderly
def save(
    posterior: Posterior,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    compression: Literal["gzip"] | None = None,
) -> None:
    """Write a posterior to one HDF5 file (``docs/format.md``), without the model.

    The file appears under its name only when it is complete; an older file of that name stays if anything fails. The
    same posterior gives the same bytes. In a process group of `torch.distributed` only rank 0 writes, and the others
    return at once.

    Args:
        posterior: what `fit` or `load` gave.
        path: the file; its folder must exist.
        dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`; the posterior's own if None. Half
            formats are read back as float32. A trained mean keeps its own precision.
        compression: ``"gzip"`` (with HDF5's byte shuffle) or None.

    Raises:
        PosthocUQError: the numbers do not fit the format, or the file cannot be written.
        NonFiniteError: the posterior holds NaN or infinity.
    """
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise PosthocUQError(
            f"dtype must be torch.float32, torch.float16, torch.bfloat16 or None, not {dtype}."
        )
    if compression not in (None, "gzip"):
        raise PosthocUQError(f"compression must be 'gzip' or None, not {compression!r}.")
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"save takes the posterior first and the path second; the first is a {type(posterior).__name__}."
        )
    schema.check_unchanged(posterior)
    if rank() == 0:
        target = atomic.checked_target(path)
        atomic.remove_leftovers(target)
        atomic.write(target, _image(posterior.snapshot(), dtype, compression))


def check_numbers(posterior: Posterior, *, factorised: bool) -> None:
    """Refuse a posterior with numbers that no file may hold, or with a precision that cannot be factorised: it could
    not be saved, or not predict. What else a file cannot keep, such as a likelihood of the user's, `save` says.

    Args:
        posterior: any.
        factorised: whether to factorise its precision, at the present hyperparameters.

    Raises:
        NonFiniteError: a number is not finite, or too large, or a precision is not positive definite.
    """
    posterior = posterior.snapshot()
    try:
        attributes = numeric_attributes(posterior)
        check_values(attributes)
        for owner, name, spec, tensor in _tensors(posterior):
            fault = complaint(spec, tensor)
            if fault is not None:
                raise CorruptPosteriorError(f"'{name}' of {owner} {fault}")
        if posterior.features is not None:
            check_features(posterior.features.tensors())
        check_blocks(attributes, posterior.blocks, posterior.weight_prior.precision)
        known = factorised and LOG_DETERMINANT in posterior.capabilities
        # of weights that are certain it is infinite
        if known and not float(posterior.log_determinant()) > -inf:
            raise CorruptPosteriorError("the determinant of its precision is not a number")
    except (CorruptPosteriorError, NonFiniteError) as error:
        raise NonFiniteError(
            f"These data, or the weights of the model, lead to numbers that no posterior can be made of: "
            f"{str(error).rstrip('.')}. Look for inputs or targets that are out of range or constant, and scale them."
        ) from error


def _tensors(posterior: Posterior) -> Iterator[tuple[str, str, TensorSpec, Tensor]]:
    """Every tensor that a file keeps: whose it is, its name, what it must be."""
    for name, block in posterior.blocks.items():
        specs = type(block).specs(posterior.block_shape(name), block.attributes())
        for key, tensor in block.tensors().items():
            yield f"'{name}'", key, specs[key], tensor
    for name, tensor in posterior.trained_mean.items():
        yield "the mean", name, TensorSpec(tuple(tensor.shape)), tensor
    if posterior.features is not None:
        specs = FeatureGrams.specs(posterior.features.attributes())
        for key, tensor in posterior.features.tensors().items():
            yield "the features", key, specs[key], tensor


def _image(posterior: Posterior, dtype: torch.dtype | None, compression: str | None) -> BytesIO:
    """The whole file in memory."""
    posterior = posterior.snapshot()  # of one moment, whatever another thread changes meanwhile
    state = posterior_state(posterior)
    blocks: dict[str, Any] = {}
    arrays: dict[str, Callable[[], np.ndarray[Any, Any]]] = {}
    specs = expected_blocks(state, posterior.layers)
    for name, block in state["blocks"].items():
        formats: dict[str, str] = {}
        for tensor_name, tensor in block["tensors"].items():
            spec = specs[name][tensor_name]
            wanted = tensor.dtype if spec.bits or spec.exact else dtype or tensor.dtype
            _check(name, tensor_name, spec, tensor, wanted)
            formats[tensor_name] = schema.dtype_name(wanted)
            arrays[schema.tensor_path(name, tensor_name)] = partial(as_array, tensor, wanted)
        blocks[name] = {key: value for key, value in block.items() if key != "tensors"} | {"dtypes": formats}
    trained_mean: dict[str, str] = {}
    for name, tensor in state["trained_mean"].items():  # in its own precision: the network predicts with it
        _check("trained_mean", f"mean of '{name}'", TensorSpec(tuple(tensor.shape)), tensor, None)
        trained_mean[name] = schema.dtype_name(tensor.dtype)
        arrays[schema.trained_mean_path(name)] = partial(as_array, tensor, tensor.dtype)
    prior = _prior(state, posterior.layers, arrays)
    features: dict[str, Any] | None = None
    if state["features"] is not None:
        formats, feature_specs = dict[str, str](), expected_features(state)
        for name, tensor in state["features"]["tensors"].items():
            # scaled to fit any number format; numbers that become zero are below the smoothing
            _check("features", name, feature_specs[name], tensor, None)
            wanted = tensor.dtype if feature_specs[name].exact else dtype or tensor.dtype
            formats[name] = schema.dtype_name(wanted)
            arrays[schema.features_path(name)] = partial(as_array, tensor, wanted)
        features = {"attributes": state["features"]["attributes"], "dtypes": formats}
    buffers = posterior.buffers_fingerprint
    described = {
        "library_version": __version__,
        "fingerprint": schema.fingerprint(posterior.original),
        **({} if buffers is None else {"buffers_fingerprint": buffers}),
        "attributes": state["attributes"],
        "layers": state["layers"],
        "blocks": blocks,
        "trained_mean": trained_mean,
        "certain": state["certain"],
        **({"prior": prior} if prior else {}),
        "features": features,
    }
    try:
        if "class" not in state["attributes"]["likelihood"]:
            likelihood_from_attributes(state["attributes"]["likelihood"])
        text = plain.written(described)
        reread = plain.read_plain(text)  # as `load` will read it
        check_posterior(reread)
        checked_layers(reread)
        if state["features"] is not None:
            check_features(state["features"]["tensors"])
        check_blocks(reread["attributes"], posterior.blocks, posterior.weight_prior.precision)
        image = hdf5.build_image(text, attributes_of(described), arrays, userblock.SIZE, compression)
    except (PosthocUQError, TypeError, ValueError, KeyError) as error:
        raise PosthocUQError(f"The posterior holds a value that no file can keep: {error}") from error
    return atomic.seal(image, posterior.method)


def _prior(
    state: Mapping[str, Any],
    layers: Mapping[str, Layer],
    arrays: dict[str, Callable[[], np.ndarray[Any, Any]]],
) -> dict[str, Any]:
    """The description of the prior of single weights; its tensors go to `arrays`, in their own precision."""
    prior: dict[str, Any] = dict(state["prior"])
    for group, specs in expected_prior(state, layers).items():
        prior[group] = {}
        for name, spec in specs.items():
            tensor = state["prior"][group][name]
            _check("prior", name, spec, tensor, None)
            prior[group][name] = schema.dtype_name(tensor.dtype)
            arrays[schema.prior_path(group, name)] = partial(as_array, tensor, tensor.dtype)
    return prior


def _check(block: str, name: str, spec: TensorSpec, tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Refuse a tensor that cannot be stored and read back."""
    check()
    if schema.dtype_name(tensor.dtype) not in schema.DTYPES:
        raise PosthocUQError(f"Layer '{block}': '{name}' is of {tensor.dtype}, which a file does not hold.")
    fault = complaint(spec, tensor)
    if fault is not None:
        kind = NonFiniteError if "NaN" in fault else PosthocUQError
        raise kind(
            f"Layer '{block}': '{name}' of shape {tuple(tensor.shape)} {fault}; fit again before saving."
        )
    if dtype is None or dtype == tensor.dtype:
        return
    stored = tensor.detach().to(dtype)
    limit, largest = torch.finfo(dtype).max, float(tensor.abs().max()) if tensor.numel() else 0.0
    if not bool(torch.isfinite(stored).all()):
        raise PosthocUQError(
            f"Layer '{block}': '{name}' reaches {largest:.3g}, more than {dtype} holds ({limit:.3g}); "
            f"{_WIDER}."
        )
    lost = float((tensor - stored.to(tensor.dtype)).abs().sum())
    total = float(tensor.abs().sum())
    if lost > _LOST * total:
        raise PosthocUQError(
            f"Layer '{block}': '{name}' (at most {largest:.3g}) would lose {lost / total:.0%} of its sum to "
            f"{dtype}, whose smallest number is {torch.finfo(dtype).smallest_normal:.3g}; {_WIDER}."
        )


def as_array(tensor: Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """A tensor's numbers as the file holds them."""
    tensor = tensor.detach().to(dtype).cpu().contiguous()
    stored = schema.DTYPES[schema.dtype_name(dtype)][1]
    if dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(stored)
    return tensor.numpy().astype(stored, copy=False)
