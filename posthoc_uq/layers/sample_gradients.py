"""Gradients of every sample by weights whose uses cannot be caught: what a model's own code makes of a parameter.

A layer's gradient is the product of what goes into it and the gradient at its outputs, which `Capture` catches. Where a
model computes a weight anew in every pass, as with weight standardisation, indexes a parameter, or takes sums over
several of its dimensions, there is no such pair. The gradient itself is there for every parameter, and all methods of
`methods.laplace` can be had from it (Gupta, Koren, Singer 2018; George et al. 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from posthoc_uq.core.batches import Batch, holds_samples
from posthoc_uq.core.errors import out_of_memory
from posthoc_uq.layers.calls import PlainAttention
from posthoc_uq.layers.layer import Layer, LayerRule
from posthoc_uq.layers.operands import Geometry, IdentityRows, Operand
from posthoc_uq.layers.rules import register

Route = Literal["vmap", "loop"]
"""All samples in one pass with weights of their own, or one backward pass a sample."""

ROUTES: tuple[Route, ...] = get_args(Route)
"""The second follows where the first fails."""

MAX_DIMENSIONS = 6
"""Of a parameter; one of more has no posterior."""


class ByGradients(LayerRule):
    """A parameter of any shape, of which the gradients of each sample are all that is known. It is a matrix ``(first
    dimension, all others)``, dimensions of size 1 aside; of a vector each number is a group of its own.
    """

    matrices: ClassVar[bool] = False
    by_gradients: ClassVar[bool] = True

    def __init__(self, dimensions: int) -> None:
        self.kind, self.dimensions = f"parameter{dimensions}d", dimensions
        self.functions: Mapping[Any, Mapping[str, str]] = {}

    def groups(self, weight: Tensor, options: Mapping[str, Any]) -> int:
        return 1 if is_matrix(weight) else weight.numel()

    def to_matrix(self, weight: Tensor, groups: int) -> Tensor:
        lead, own = (
            weight.shape[: weight.ndim - self.dimensions],
            weight.shape[weight.ndim - self.dimensions :],
        )
        rows = next((size for size in own if size > 1), 1)
        return weight.reshape(*lead, groups, rows if groups == 1 else 1, -1)

    def input_norm(self, input: Tensor) -> float:
        return 1.0  # the gradients are on the outputs' side

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        raise NotImplementedError("No call is known that applies such a weight.")

    def activations(self, x: Tensor, layer: Layer, geometry: Geometry) -> Operand:
        """Of gradients ``(samples, groups, outputs, inputs)``."""
        return IdentityRows(len(x), layer.groups, layer.inputs, x)

    def output_rows(self, outputs: Tensor, layer: Layer) -> Tensor:
        """Of gradients, as above: those of a matrix are its columns."""
        return outputs.transpose(2, 3)


for _dimensions in range(MAX_DIMENSIONS + 1):
    register(ByGradients(_dimensions))


def is_matrix(weight: Tensor) -> bool:
    """Whether at least two dimensions of a weight are larger than 1."""
    return sum(size > 1 for size in weight.shape) > 1


def sample_gradients(
    model: nn.Module, layers: Sequence[Layer], batch: Batch, outputs: Tensor, pull: Tensor, route: Route
) -> dict[str, Tensor] | None:
    """Every sample's gradients by layers' weights, ``(samples, groups, outputs, inputs)`` by layer; None where they
    cannot be had in one pass, by an operation that has no such form, or an argument that belongs to all samples and has
    as many rows.

    Args:
        model: in eval mode; nothing else may run it meanwhile.
        layers: of the weights.
        batch: the model's arguments.
        outputs: of the model, ``(samples, ...)``.
        pull: what is pulled back, in the shape of the outputs.
        route: how.
    """
    own = dict(model.named_parameters())
    weights = {name: own[name].detach() for layer in layers for name in layer.parameter_names}
    with torch.enable_grad(), PlainAttention():
        of_names = (_in_one_pass if route == "vmap" else _one_by_one)(model, weights, batch, outputs, pull)
    if of_names is None:
        return None
    return {
        layer.name: layer.to_matrix(
            of_names[layer.weight], None if layer.bias is None else of_names[layer.bias]
        )
        for layer in layers
    }


def _in_one_pass(
    model: nn.Module, weights: Mapping[str, Tensor], batch: Batch, expected: Tensor, pull: Tensor
) -> dict[str, Tensor] | None:
    samples = len(expected)
    copies = {
        name: weight.expand(samples, *weight.shape).requires_grad_() for name, weight in weights.items()
    }
    given = batch.copied()
    dims = tree_map(lambda value: 0 if holds_samples(value, samples) else None, (given.args, given.kwargs))

    def of_one(weights: dict[str, Tensor], args: Any, kwargs: Any) -> Tensor:
        args, kwargs = tree_map(lambda v, d: v.unsqueeze(0) if d == 0 else v, (args, kwargs), dims)
        return given.outputs_of(functional_call(model, weights, args, kwargs)).squeeze(0)

    try:
        outputs = vmap(of_one, in_dims=(0, *dims))(copies, given.args, given.kwargs)
    except Exception as error:  # the model's code decides what vmap makes of it
        if out_of_memory(error):
            raise
        return None
    if outputs.shape != expected.shape or not _alike(outputs.detach(), expected.detach()):
        return None
    return _gradients(outputs, copies, pull)


def _alike(outputs: Tensor, expected: Tensor) -> bool:
    narrow = torch.finfo(outputs.dtype).eps > 1e-5
    scale = expected.abs().amax().clamp(min=torch.finfo(outputs.dtype).tiny)
    return bool((outputs - expected).abs().amax() <= (5e-2 if narrow else 1e-3) * scale)


def _one_by_one(
    model: nn.Module, weights: Mapping[str, Tensor], batch: Batch, expected: Tensor, pull: Tensor
) -> dict[str, Tensor]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    given = batch.copied()
    outputs = given.outputs_of(functional_call(model, leaves, given.args, given.kwargs))
    samples = len(expected)
    parts: list[dict[str, Tensor]] = []
    for sample in range(samples):
        of_one = torch.zeros_like(pull)
        of_one[sample] = pull[sample]
        parts.append(_gradients(outputs, leaves, of_one, retain=sample < samples - 1))
    return {name: torch.stack([part[name] for part in parts]) for name in weights}


def _gradients(
    outputs: Tensor, leaves: Mapping[str, Tensor], pull: Tensor, retain: bool = False
) -> dict[str, Tensor]:
    found = torch.autograd.grad(
        outputs,
        list(leaves.values()),
        pull.to(outputs.dtype).reshape(outputs.shape),
        retain_graph=retain,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True))


def numbers_of(layers: Sequence[Layer]) -> int:
    """How many numbers a sample's gradients by these layers have."""
    return sum(prod(layer.matrix_shape) for layer in layers)
