"""Where layers are in the blocks of a posterior: a block of one layer has its shape, one of several layers is a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.devices import as_double, host_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.blocks import Block
from posthoc_uq.posteriors.weight_prior import WeightPrior, layer_matrix


class Layout:
    """Converts between the matrices of blocks and those of layers, all ``(groups, outputs, inputs)``.

    Args:
        layers: by name.
        members: block name to the names of its layers; a block of one layer has its name.
    """

    def __init__(self, layers: Mapping[str, Layer], members: Mapping[str, list[str]]) -> None:
        self._layers, self._members = layers, members

    def shape(self, block: str) -> tuple[int, int, int]:
        """The shape of a block's matrix."""
        if block in self._layers:
            return self._layers[block].matrix_shape
        return 1, 1, sum(self._layers[name].parameters for name in self._members[block])

    def home(self, layer: str) -> tuple[str, int]:
        """The block of a layer, and where the layer starts in it.

        Raises:
            PosthocUQError: there is no such layer.
        """
        if layer in self._layers and layer in self._members:
            return layer, 0
        for block, inner in self._members.items():
            if layer in inner:
                return block, sum(self._layers[name].parameters for name in inner[: inner.index(layer)])
        raise PosthocUQError(f"The posterior has no layer '{layer}'; it has {list(self._layers)[:8]}.")

    def prior(self, block: str, prior: Any, weight_prior: WeightPrior) -> Any:
        """The prior precision of a block's weights, from one number for all layers or one by layer, and from factors of
        single weights.
        """
        inner = self._members[block]
        precision = prior
        if isinstance(prior, Mapping):
            by_layer = cast(Mapping[str, Any], prior)
            parts = [host_double(by_layer[name]).expand(self._layers[name].parameters) for name in inner]
            precision = by_layer[inner[0]] if len(inner) == 1 else torch.cat(parts).reshape(1, 1, -1)
        if not weight_prior.precision:
            return precision
        own = as_double(self._matrix(block, weight_prior.precision))
        return own * (precision.to(own) if isinstance(precision, Tensor) else precision)

    def _matrix(self, block: str, parameters: Mapping[str, Tensor]) -> Tensor:
        """Parameters by name as a block's matrix ``(G, m, n)``."""
        parts = [layer_matrix(self._layers[name], parameters) for name in self._members[block]]
        return (
            parts[0] if block in self._layers else torch.cat([p.flatten() for p in parts]).reshape(1, 1, -1)
        )

    def means(self, blocks: Mapping[str, Block], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What blocks know themselves that their weights are on average, by parameter name.

        Args:
            blocks: by name; as a rule they know nothing of it.
            like: parameters of the same number format and device.
        """
        means: dict[str, Tensor] = {}
        for name, block in blocks.items():
            mean = block.own_mean()
            for layer, matrix in [] if mean is None else self.split(name, mean):
                for parameter, tensor in layer.to_parameters(matrix).items():
                    means[parameter] = tensor.to(like[parameter])
        return means

    def prior_terms(
        self,
        block: str,
        uncertain: Tensor | None,
        mean: Mapping[str, Tensor],
        weight_prior: WeightPrior,
        prior: Any,
    ) -> Any:
        """``sum tau r_i (theta_i - mu_i)^2 - sum log(tau r_i)`` over the uncertain weights of a block.

        Args:
            block: its name.
            uncertain: which weights are, ``(G, m, n)``; None for all.
            mean: theta, parameters by name.
            weight_prior: r and mu.
            prior: tau, one number or one by layer, differentiable where it is a tensor.
        """
        layers = [self._layers[name] for name in self._members[block]]
        chosen = (
            [None] * len(layers) if uncertain is None else [mask for _, mask in self.split(block, uncertain)]
        )
        total: Any = 0.0
        for layer, mask in zip(layers, chosen, strict=True):
            count, logs, squares = weight_prior.occam(layer, mean, mask)
            tau = cast(Any, prior[layer.name] if isinstance(prior, Mapping) else prior)
            logarithm = tau.log() if isinstance(tau, Tensor) else log(tau)
            total = total - count * logarithm - logs + tau * squares
        return total

    def split(self, block: str, matrix: Tensor) -> Iterator[tuple[Layer, Tensor]]:
        """A block's matrix ``(*lead, G, m, n)`` as its layers' matrices."""
        if block in self._layers:
            yield self._layers[block], matrix
            return
        start = 0
        for name in self._members[block]:
            layer = self._layers[name]
            part = matrix[..., 0, 0, start : start + layer.parameters]
            start += layer.parameters
            yield layer, part.reshape(*matrix.shape[:-3], *layer.matrix_shape)

    def join(self, block: str, matrices: Mapping[str, Tensor]) -> Tensor:
        """Layers' matrices ``(q, G, m, n)`` as the block's; absent layers are zero."""
        if block in self._layers:
            return matrices[block]
        like = next(iter(matrices.values()))
        parts = [
            matrices[name].flatten(1)
            if name in matrices
            else like.new_zeros(like.shape[0], self._layers[name].parameters)
            for name in self._members[block]
        ]
        return torch.cat(parts, dim=1).reshape(like.shape[0], 1, 1, -1)
