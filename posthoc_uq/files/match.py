"""Whether a file or a posterior belongs to a model: the names, the shapes and the numbers of parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.core.model import (
    check_usable,
    fingerprint,
    other_name,
    statistics_of,
    unwrap,
    with_plain_weights,
)
from posthoc_uq.posteriors.posterior import Posterior


def buffers_fingerprint(model: nn.Module) -> str | None:
    """The `fingerprint` of the buffers that a model's predictions depend on; None where it has none."""
    buffers = statistics_of(unwrap(model))
    return fingerprint(buffers) if buffers else None


def others_fingerprint(parameters: Mapping[str, Tensor], covered: Collection[str]) -> str | None:
    """The `fingerprint` of the parameters that no posterior covers; None where it covers all."""
    others = {name: p for name, p in parameters.items() if name not in covered and p.is_floating_point()}
    return fingerprint(others) if others else None


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


def check_shapes(shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor], which: str) -> None:
    """Refuse a model without parameters of these names and shapes; `which` begins the error: the file, or posterior.

    Raises:
        PosteriorMismatchError: one is missing or has another shape.
    """
    for name, shape in shapes.items():
        parameter = parameters.get(name)
        called = other_name(name, parameters) if parameter is None else None
        if called is not None:
            raise PosteriorMismatchError(
                f"{which} covers a parameter '{name}', which the model calls '{called}': a part is wrapped in one of "
                f"them, as torch.compile does it, and not in the other. Pass the model as it was when it was fitted."
            )
        if parameter is None or tuple(parameter.shape) != shape:
            found = "lacks" if parameter is None else f"has in shape {tuple(parameter.shape)}"
            raise PosteriorMismatchError(
                f"{which} does not belong to this model: it covers a parameter '{name}' of shape {shape}, which the "
                f"model {found}. Pass the model that it was fitted on."
            )


def check_unchanged(posterior: Posterior) -> None:
    """Refuse a posterior whose model was trained further after the fit: ``posterior.original`` is the model's memory.

    Raises:
        PosteriorMismatchError: the parameters, or the buffers of its model, are not those of the fit.
    """
    if posterior.fingerprint is not None and fingerprint(posterior.original) != posterior.fingerprint:
        raise PosteriorMismatchError(
            "The model's parameters changed after the posterior was fitted or loaded; fit again, or give the model its "
            "parameters back."
        )
    if posterior.model is not None:
        check_buffers(posterior.buffers_fingerprint, posterior.model)


def check_buffers(expected: str | None, model: nn.Module) -> None:
    """Refuse a model with other buffers than that of the fit, whose fingerprint is `expected`, or None if it had none.

    Raises:
        PosteriorMismatchError: it has.
    """
    if expected is not None and buffers_fingerprint(model) != expected:
        raise PosteriorMismatchError(
            "The model's buffers, such as the running statistics of batch normalisation, are not those that the "
            "posterior was fitted on; load the whole state dict of that model (model.load_state_dict), or fit again."
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
    check_unchanged(posterior)
    check_usable(unwrap(model))
    model = with_plain_weights(unwrap(model))
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones by all names
    shapes = {name: tuple(mean.shape) for name, mean in posterior.original.items()}
    check_shapes(shapes, parameters, "The posterior")
    for name, mean in posterior.original.items():
        parameter = parameters[name]
        same = parameter.data_ptr() == mean.data_ptr() and parameter.device == mean.device
        if not same and not torch.equal(parameter.detach().to(mean), mean):
            if parameter.dtype != mean.dtype:
                raise PosteriorMismatchError(
                    f"Parameter '{name}' is {parameter.dtype}, and the posterior was fitted on {mean.dtype}; wrap the "
                    f"model as it was then."
                )
            raise PosteriorMismatchError(
                f"The values of parameter '{name}' are not those the posterior was fitted on; load the weights of "
                f"that model, or fit again if this one was trained since."
            )
    check_buffers(posterior.buffers_fingerprint, model)
