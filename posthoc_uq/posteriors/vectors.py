"""All weights of a posterior side by side, as users give them and take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosthocUQError


def as_parameters(weights: Any, means: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], torch.Size]:
    """Weights by the names of parameters, each ``(sets, *shape)``, and the dimensions that they had before those of
    one set.

    Args:
        weights: a vector ``(..., weights)`` in the order of `means`, tensors ``(..., *shape)`` by name, or a model;
            names that `means` does not have are left out.
        means: of the parameters by name, which give the shapes.

    Raises:
        PosthocUQError: a parameter is missing, or of another shape, or it is none of these.
    """
    if isinstance(weights, nn.Module):
        weights = dict(weights.named_parameters(remove_duplicate=False))
    if isinstance(weights, Tensor):
        sizes = [mean.numel() for mean in means.values()]
        if not weights.ndim or weights.shape[-1] != sum(sizes):
            raise PosthocUQError(
                f"The weights are of shape {tuple(weights.shape)}, and the posterior has {sum(sizes)}; give them in "
                f"the order of posterior.parameter_names, a state dict, or the model."
            )
        parts = zip(means, weights.split(sizes, -1), strict=True)
        weights = {name: part.unflatten(-1, means[name].shape or (1,)) for name, part in parts}
        weights = {name: part if means[name].ndim else part.squeeze(-1) for name, part in weights.items()}
    if not isinstance(weights, Mapping):
        raise PosthocUQError(
            f"The weights must be a vector, a state dict or a model, not a {type(weights).__name__}."
        )
    given, leads = cast(Mapping[str, Any], weights), set[torch.Size]()
    found = dict[str, Tensor]()
    for name, mean in means.items():
        value, place = given.get(name), len(mean.shape)
        if not isinstance(value, Tensor) or value.shape[value.ndim - place :] != mean.shape:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "not there"
            raise PosthocUQError(
                f"The posterior has weights '{name}' of shape {tuple(mean.shape)}, and those given are {what}."
            )
        leads.add(value.shape[: value.ndim - place])
        found[name] = value.reshape(-1, *mean.shape)
    if len(leads) > 1:
        raise PosthocUQError(
            f"The weights are several sets of different numbers: {sorted(map(tuple, leads))}."
        )
    return found, leads.pop()
