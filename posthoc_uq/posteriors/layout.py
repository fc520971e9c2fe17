"""Where layers are in the blocks of a posterior: a block of one layer has its shape, one of several layers is a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.devices import as_double, host_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.blocks import Block


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

    def prior(self, block: str, prior: Any) -> Any:
        """The prior precision of a block's weights, from one number for all layers or one by layer."""
        if not isinstance(prior, Mapping):
            return prior
        by_layer, inner = cast(Mapping[str, Any], prior), self._members[block]
        if len(inner) == 1:
            return by_layer[inner[0]]
        parts = [host_double(by_layer[name]).expand(self._layers[name].parameters) for name in inner]
        return torch.cat(parts).reshape(1, 1, -1)

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

    def norms(self, name: str, block: Block, mean: Mapping[str, Tensor]) -> Iterator[tuple[str, int, float]]:
        """Of each layer of a block: its name, how many of its weights are uncertain, and the square of their norm.

        Args:
            name: of the block.
            block: which says what is uncertain.
            mean: parameters by name.
        """
        uncertain = block.uncertain()
        if uncertain is None:
            for layer in (self._layers[inner] for inner in self._members[name]):
                norm = sum(float(as_double(mean[p]).square().sum()) for p in layer.parameter_names)
                yield layer.name, layer.parameters, norm
            return
        for layer, mask in self.split(name, uncertain):
            matrix = layer.to_matrix(mean[layer.weight], None if layer.bias is None else mean[layer.bias])
            own = as_double(matrix.detach()[mask.to(matrix.device)])
            yield layer.name, int(mask.sum()), float(own.square().sum())

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
