"""The prior of single weights: ``N(mu_i, 1 / (tau r_i))``, with the posterior's prior precision tau.

``r`` is 1 and ``mu`` is 0 unless a fit was given others. The covariance of a Laplace posterior depends on ``tau r``
alone, and its log marginal likelihood on ``mu``, too (MacKay 1992).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.specs import LARGEST
from posthoc_uq.values import Number

_MEAN = Number("a finite number", least=-LARGEST, most=LARGEST)


@dataclass(frozen=True, eq=False)
class WeightPrior:
    """What a posterior's prior says of single weights.

    Attributes:
        precision: ``r`` of every parameter of the layers by name, positive; empty where all are 1.
        mean: ``mu``: one number, or a tensor of every parameter of the layers by name.
    """

    precision: Mapping[str, Tensor] = field(default_factory=lambda: dict[str, Tensor]())
    mean: float | Mapping[str, Tensor] = 0.0

    def occam(
        self, layer: Layer, weights: Mapping[str, Tensor], chosen: Tensor | None
    ) -> tuple[int, float, float]:
        """How many weights a layer has, ``sum log r_i``, and ``sum r_i (theta_i - mu_i)^2``.

        Args:
            layer: whose weights.
            weights: parameters by name.
            chosen: which are uncertain, ``(groups, outputs, inputs)``; None for all.
        """
        parts = {name: self._of(name, weights[name]) for name in layer.parameter_names}
        pairs = list(parts.values())
        if chosen is not None:
            moved = layer_matrix(layer, {name: part[0] for name, part in parts.items()})
            precision = layer_matrix(layer, {name: part[1] for name, part in parts.items()})
            mask = chosen.to(moved.device)
            pairs = [(moved[mask], precision[mask])]
        count, logs, squares = 0, 0.0, 0.0
        for moved, precision in pairs:
            count += moved.numel()
            squares += float((precision * moved.square()).sum())
            logs += float(precision.log().sum()) if self.precision else 0.0
        return count, logs, squares

    def _of(self, name: str, weights: Tensor) -> tuple[Tensor, Tensor]:
        """``theta - mu`` and ``r`` of one parameter, in float64."""
        own = as_double(weights.detach())
        mean = self.mean[name].to(own) if isinstance(self.mean, Mapping) else self.mean
        precision = self.precision[name].to(own) if self.precision else own.new_ones(()).expand_as(own)
        return own - mean, precision


def layer_matrix(layer: Layer, parameters: Mapping[str, Tensor]) -> Tensor:
    """A layer's parameters by name as its matrix ``(groups, outputs, inputs)``, detached."""
    bias = None if layer.bias is None else parameters[layer.bias].detach()
    return layer.to_matrix(parameters[layer.weight].detach(), bias)


def checked_prior(
    layers: Mapping[str, Layer], parameters: Mapping[str, Tensor], precision: Any, mean: Any
) -> WeightPrior:
    """The prior that a user asked for.

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
                "number a layer, fit with prior_precision=1.0 and then set posterior.prior_precision = {layer: number, "
                "...}, which takes no new fit."
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
        named = _tensors("prior_mean", cast(Mapping[str, Any], mean), shapes)
        means = {
            name: named[name] if name in named else torch.zeros_like(own, dtype=_wide(own))
            for name, own in shapes.items()
        }
    elif mean is not None:
        means = float(_MEAN("prior_mean", mean))
    return WeightPrior(precisions, means)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _tensors(what: str, given: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors or numbers by name as tensors of the parameters' shapes, on their devices."""
    _check_names(what, given, like)
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        own = like[name]
        try:
            tensor = torch.as_tensor(value, dtype=_wide(own), device=own.device).detach()
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


def _check_names(what: str, given: Collection[str], known: Collection[str]) -> None:
    odd = [name for name in given if name not in known]
    if odd:
        raise PosthocUQError(
            f"{what} names {odd[:5]}, no parameters of the posterior's layers; those are {list(known)[:6]}."
        )
