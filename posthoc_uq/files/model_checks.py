"""Whether a file belongs to a model: the names, the shapes and the numbers of its parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.core.model import check_not_meta, other_name, unwrap
from posthoc_uq.files import schema
from posthoc_uq.files.state import Specs
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.posterior import Posterior

_REMEDY = "Load it with the model that it was fitted on."


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by name, tied ones by all of their names, and all initialised."""
    parameters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise PosthocUQError(
                f"Parameter '{name}' is not initialised yet; run the model on a batch first."
            )
        parameters[name] = parameter.detach()
    return parameters


def check_model(
    layers: Mapping[str, Layer], certain: Specs, mean: Mapping[str, Tensor], path: str | os.PathLike[str]
) -> None:
    """Refuse a model without the parameters that a file names.

    Args:
        layers: of the file.
        certain: parameters of the file that no layer has.
        mean: of the model, by name.
        path: of the file.
    """
    for name, layer in layers.items():
        shapes = {layer.weight: layer.weight_shape}
        if layer.bias is not None:
            shapes[layer.bias] = (layer.groups * layer.outputs,)
        called = None if layer.weight in mean else other_name(layer.weight, mean)
        if called is not None:
            raise PosteriorMismatchError(
                f"'{path}' names a parameter '{layer.weight}' that the model calls '{called}': a part of the model is "
                f"wrapped, as torch.compile does it, and was not when the posterior was fitted, or the other way "
                f"round. Load it with the model as it was then, or fit again."
            )
        for parameter, shape in shapes.items():
            if parameter not in mean:
                raise PosteriorMismatchError(
                    f"'{path}' does not belong to this model: layer '{name}' has the parameter "
                    f"'{parameter}' of shape {shape}, which the model lacks (it has {list(mean)[:4]} ...). "
                    f"{_REMEDY}"
                )
            if tuple(mean[parameter].shape) != shape:
                raise PosteriorMismatchError(
                    f"'{path}' does not belong to this model: in layer '{name}' the parameter "
                    f"'{parameter}' has shape {shape} in the file and {tuple(mean[parameter].shape)} in "
                    f"the model. {_REMEDY}"
                )
    for parameter, spec in certain.items():
        shape = tuple(mean[parameter].shape) if parameter in mean else None
        if shape != spec.sizes:
            has = "lacks" if shape is None else f"has in shape {shape}"
            raise PosteriorMismatchError(
                f"'{path}' does not belong to this model: the training also changed the parameter '{parameter}' of "
                f"shape {spec.sizes}, which the model {has}. {_REMEDY}"
            )


def check_fingerprint(fingerprint: str, mean: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Refuse a model with other numbers than those of the fit."""
    if schema.fingerprint(mean) != fingerprint:
        raise PosteriorMismatchError(
            f"The model's parameters are not those that the posterior in '{path}' was fitted on: names and "
            f"shapes agree, the numbers or their dtype do not. Load those weights into the model first, or "
            f"fit again."
        )


def check_buffers(expected: str | None, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Refuse a model with other buffers than at the fit, where the file says which these were."""
    if expected is not None and schema.buffers_fingerprint(model) != expected:
        raise PosteriorMismatchError(
            f"The model's buffers, such as the running statistics of batch normalisation, are not those that the "
            f"posterior in '{path}' was fitted with. Load the whole state dict of that model first "
            f"(model.load_state_dict), or fit again."
        )


def check_match(model: nn.Module, posterior: Posterior) -> None:
    """Refuse a model whose parameters and buffers are not those the posterior was fitted on.

    Raises:
        PosteriorMismatchError: a parameter is missing, or has another shape or other values, or a buffer has.
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"wrap needs a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    schema.check_unchanged(posterior)
    check_not_meta(unwrap(model))
    parameters = dict(unwrap(model).named_parameters(remove_duplicate=False))  # tied ones by all names
    for name, mean in posterior.original.items():
        parameter = parameters.get(name)
        if parameter is None:
            other = other_name(name, parameters)
            if other is not None:
                raise PosteriorMismatchError(
                    f"The posterior covers parameter '{name}', which the model calls '{other}': a part is wrapped in "
                    f"one of them, as torch.compile does it, and not in the other; pass the model as it was fitted."
                )
            raise PosteriorMismatchError(
                f"The posterior covers parameter '{name}', which the model does not have; pass the model it "
                f"was fitted on."
            )
        if parameter.shape != mean.shape:
            raise PosteriorMismatchError(
                f"Parameter '{name}' has shape {tuple(parameter.shape)}, and the posterior was fitted on "
                f"{tuple(mean.shape)}; "
                f"pass the model it was fitted on."
            )
        same = parameter.data_ptr() == mean.data_ptr() and parameter.device == mean.device
        if not same and not torch.equal(parameter.detach().to(mean), mean):
            if parameter.dtype != mean.dtype:
                raise PosteriorMismatchError(
                    f"Parameter '{name}' is {parameter.dtype}, and the posterior was fitted on {mean.dtype}; wrap the "
                    f"model as it was then. head='sampling' runs it in half precision by itself, with "
                    f"dtype=torch.float16 or torch.bfloat16."
                )
            raise PosteriorMismatchError(
                f"The values of parameter '{name}' are not those the posterior was fitted on; fit again "
                f"after training."
            )
    schema.check_buffers(posterior, model)
