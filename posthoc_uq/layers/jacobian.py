"""The Jacobian of a model's outputs by its weights as a tensor, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map

from posthoc_uq.core.batches import Batch, holds_samples
from posthoc_uq.core.errors import check_refused
from posthoc_uq.layers.calls import PlainAttention
from posthoc_uq.layers.frozen import called

NamedWeights = dict[str, Tensor]


def jacobians(model: nn.Module, weights: NamedWeights, batch: Batch, samples: int) -> NamedWeights:
    """The Jacobian of every sample's outputs by each parameter, ``(samples, outputs, *shape)``, with its graph back to
    the inputs: all samples in one `vmap`, or one by one for a model that cannot run in it.

    Args:
        model: in eval mode; nothing else may run it meanwhile.
        weights: at which it is linearised, by name.
        batch: the model's arguments.
        samples: in the batch.
    """

    def of_one(weights: NamedWeights, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
        return called(model, weights, Batch(args, None, dict(kwargs))).flatten()

    def one_by_one() -> NamedWeights:
        rows = [batch.narrow(row, 1, samples) for row in range(samples)]
        parts = [_by_autograd(lambda w, b=one: called(model, w, b).flatten(), weights) for one in rows]
        return {name: torch.stack([part[name] for part in parts]) for name in weights}

    def in_one_vmap() -> NamedWeights:
        dims = tree_map(
            lambda value: 0 if holds_samples(value, samples) else None, (batch.args, batch.kwargs)
        )

        def in_vmap(args: tuple[object, ...], kwargs: dict[str, object]) -> NamedWeights:
            places = tree_map(lambda v, d: v.unsqueeze(0) if d == 0 else v, (args, kwargs), dims)
            return jacrev(of_one)(weights, *places)

        return vmap(in_vmap, in_dims=dims)(batch.args, batch.kwargs)

    with PlainAttention():
        if batch.whole:
            return one_by_one()
        try:
            return in_one_vmap()
        except Exception as error:  # the model's code decides what vmap makes of it
            check_refused(error, in_one_vmap, one_by_one)
            return one_by_one()


def _by_autograd(run: Callable[[NamedWeights], Tensor], weights: NamedWeights) -> NamedWeights:
    """The Jacobian of ``run`` by the weights, one backward pass an output, with its graph."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    outputs = run(leaves)
    rows = [
        torch.autograd.grad(
            output, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
        for output in outputs
    ]
    return {name: torch.stack(parts) for name, parts in zip(leaves, zip(*rows, strict=True), strict=True)}
