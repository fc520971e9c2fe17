"""What a user gives as the prior of single weights, checked: by the names of parameters, or side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor

from posthoc_uq.core.devices import host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import LARGEST, check_option, did_you_mean
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.settings import WeightPrior


def weight_prior_of(
    layers: Mapping[str, Layer], parameters: Mapping[str, Tensor], precision: Any, mean: Any
) -> WeightPrior:
    """The prior of single weights that a user asked for.

    Args:
        layers: of the posterior.
        parameters: of the model, by name.
        precision: a tensor or a number by the name of every parameter of the layers; None for 1.
        mean: a number, or tensors or numbers by name, 0 for parameters without one; None for 0.

    Raises:
        PosthocUQError: a name, a shape or a number is not valid.
    """
    shapes = {name: parameters[name] for layer in layers.values() for name in layer.parameter_names}
    precisions: dict[str, Tensor] = {}
    if precision is not None:
        given = cast(Mapping[str, Any], precision)
        if given and set(given) <= set(layers) - set(shapes):
            raise PosthocUQError(
                "prior_precision of a fit is one number for all layers, or tensors by the names of parameters. For one "
                "number a layer, fit with prior_precision=1.0, and then take posterior.with_settings(prior_precision="
                "{layer: number, ...}), which takes no new fit."
            )
        missing = [name for name in shapes if name not in given]
        if missing:
            raise PosthocUQError(
                f"A prior precision of single weights must be given for every parameter of the layers; there is none "
                f"for {missing[:5]}."
            )
        precisions = _tensors("prior_precision", given, shapes)
        for name, tensor in precisions.items():
            if not bool((tensor > 1 / LARGEST).all()):
                raise PosthocUQError(f"prior_precision of '{name}' must be positive everywhere.")
    means: float | dict[str, Tensor] = 0.0
    if isinstance(mean, Mapping):
        means = _tensors("prior_mean", dict.fromkeys(shapes, 0.0) | cast(dict[str, Any], mean), shapes)
    elif mean is not None:
        means = check_option("prior_mean", mean, Annotated[float, Ge(-LARGEST), Le(LARGEST)])
    return WeightPrior(precisions, means)


def _tensors(what: str, given: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors or numbers by name as tensors of the parameters' shapes, on their devices."""
    odd = [name for name in given if name not in like]
    if odd:
        raise PosthocUQError(
            f"{what} names {odd[:5]}, no parameters of the posterior's layers; those are {list(like)[:6]}."
            f"{did_you_mean(odd, like)}"
        )
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        own = like[name]
        wide = torch.promote_types(own.dtype, torch.float32)
        try:
            tensor = torch.as_tensor(value, dtype=wide, device=own.device).detach()
        except (TypeError, ValueError, RuntimeError):
            raise PosthocUQError(
                f"{what} of '{name}' must be a tensor or a number, not a {type(value).__name__}."
            ) from None
        if tensor.ndim and tensor.shape != own.shape:
            raise PosthocUQError(
                f"{what} of '{name}' must have the shape {tuple(own.shape)}, not {tuple(tensor.shape)}."
            )
        if not bool((tensor.abs() <= LARGEST).all()):
            raise PosthocUQError(f"{what} of '{name}' must be finite and at most {LARGEST:g} in size.")
        tensors[name] = tensor.expand(own.shape).clone()
    return tensors


def read_precisions(
    given: Any, layers: Mapping[str, Layer], means: Mapping[str, Tensor], blocks: Iterable[Block]
) -> float | dict[str, Any] | WeightPrior:
    """The prior precisions of a vector, or of a mapping: one number, numbers by layer, or a prior of single weights.

    Args:
        given: a vector with one number, one a layer, or one a weight, in the order of the next two; or a mapping from
            layers, or from parameters.
        layers: of the posterior.
        means: of their parameters, by name.
        blocks: whose weights these are.

    Raises:
        PosthocUQError: it is none of these, or the blocks take no prior of single weights.
    """
    if isinstance(given, Mapping):
        by_name = cast("dict[str, Any]", dict(given))
        if by_name.keys() == layers.keys() and all(_is_number(value) for value in by_name.values()):
            return by_name
        if not by_name.keys() & means.keys():
            return by_name  # whose names are then those of layers, or refused
    else:
        vector = _vector(given)
        if len(vector) == 1:
            return float(vector)
        if len(vector) == len(layers):
            return dict(zip(layers, vector.tolist(), strict=True))
        sizes = [mean.numel() for mean in means.values()]
        if len(vector) != sum(sizes):
            raise PosthocUQError(
                f"prior_precision has {len(vector)} numbers; give one, {len(layers)} for the layers, or {sum(sizes)} "
                f"for the weights, in the order of posterior.parameter_names."
            )
        parts = zip(means, vector.split(sizes), strict=True)
        by_name = {name: part.reshape(means[name].shape) for name, part in parts}
    refused = sorted({block.kind for block in blocks if not block.per_weight_prior})
    if refused:
        raise PosthocUQError(
            f"A prior precision of each weight cannot enter blocks of the kind {refused[0]!r}; give one number a "
            f"layer, posterior.with_settings(prior_precision={{layer: number, ...}}), or fit with method='diag', "
            f"'full' or 'inf'."
        )
    return weight_prior_of(layers, means, by_name, None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def _vector(given: Any) -> Tensor:
    try:
        return host_double(given).detach().flatten()
    except (TypeError, ValueError, RuntimeError):
        raise PosthocUQError(
            f"prior_precision must be a number, a vector of numbers, or numbers by layer or by parameter, not a "
            f"{type(given).__name__}."
        ) from None
