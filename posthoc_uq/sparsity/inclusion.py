"""With which probability weights, inputs and outputs of layers are on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.latent_binary import LatentBlock
from posthoc_uq.sparsity.median import latent_blocks
from posthoc_uq.tables import text_table


@dataclass(frozen=True)
class LayerInclusion:
    """The inclusion probabilities of one layer; biases have none.

    Inputs and outputs are units: numbers of a linear layer, channels of a convolution. A unit is on if at least one of
    its weights is, ``1 - prod(1 - a)``. That grows with the number of weights: of 400 weights that are on with
    probability 0.01 each, one is with 0.98. So it selects inputs where a layer has few outputs, as a regression has;
    of a wide layer, see `kept_inputs` too.

    Attributes:
        layer: its name.
        parameter: the name of its weight.
        weights: the probability of every weight, in its shape.
        inputs: of every input unit, ``(inputs,)``, float64.
        outputs: of every output unit, ``(outputs,)``, float64.
        positions: of every position of what a filter sees, ``(input channels, *kernel)``, that some filter uses it; of
            a linear layer, `inputs`.
        kept_inputs: which input units have a weight in the median model, ``(inputs,)``.
    """

    layer: str
    parameter: str
    weights: Tensor
    inputs: Tensor
    outputs: Tensor
    positions: Tensor
    kept_inputs: Tensor

    @property
    def selected(self) -> Tensor:
        """Which input units are more likely on than off, ``(inputs,)``."""
        return self.inputs > 0.5


@dataclass(frozen=True)
class Inclusion:
    """The inclusion probabilities of a posterior; prints as a table.

    Attributes:
        layers: by name, in the model's order.
    """

    layers: dict[str, LayerInclusion]

    @property
    def first(self) -> LayerInclusion:
        """The first layer: which of its inputs the network needs."""
        return next(iter(self.layers.values()))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The probability of every weight by the names and in the shapes of the parameters."""
        return {layer.parameter: layer.weights for layer in self.layers.values()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON: of inputs and outputs of every layer, not of every weight."""
        return {
            name: {
                "parameter": layer.parameter,
                "inputs": layer.inputs.tolist(),
                "selected": layer.selected.tolist(),
                "kept inputs": layer.kept_inputs.tolist(),
                "outputs": layer.outputs.tolist(),
            }
            for name, layer in self.layers.items()
        }

    def __str__(self) -> str:
        columns = ["layer", "inputs", "selected inputs", "kept inputs", "outputs", "selected outputs"]
        rows = [
            [
                name,
                len(layer.inputs),
                int(layer.selected.sum()),
                int(layer.kept_inputs.sum()),
                len(layer.outputs),
                int((layer.outputs > 0.5).sum()),
            ]
            for name, layer in self.layers.items()
        ]
        notes = (
            "  selected: at least one of the unit's weights is on with probability above 0.5",
            "  kept inputs: with a weight in the median model",
        )
        return "\n".join([text_table(columns, rows), *notes])


def inclusion(posterior: Posterior) -> Inclusion:
    """With which posterior probability weights, inputs and filters are on.

    ``uq.inclusion(posterior).first`` answers which inputs the network needs: ``.inputs`` has their posterior
    probabilities, and ``.selected`` those above 0.5. An input of a wide layer is nearly always selected, since one of
    its many weights is probably on; ``.kept_inputs`` are those with a weight that is.

    Args:
        posterior: by ``method="latent_binary"``; of a median model all probabilities are 0 or 1.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    blocks = latent_blocks(posterior, "inclusion")
    return Inclusion({name: _of_layer(layer, blocks[name]) for name, layer in posterior.layers.items()})


def _of_layer(layer: Layer, block: LatentBlock) -> LayerInclusion:
    chances = unit_matrix(layer, block.probabilities())
    groups, _, inputs, _ = chances.shape
    kernel = layer.weight_shape[2:] if layer.convolutional else ()
    weights = layer.to_parameters(block.inclusions())[layer.weight].clone()
    return LayerInclusion(
        layer.name,
        layer.weight,
        weights,
        any_of(chances, (1, 3)).flatten(),
        any_of(chances, (2, 3)).flatten(),
        any_of(chances, (1,)).reshape(groups * inputs, *kernel),
        (chances > 0.5).any(3).any(1).flatten(),
    )


def unit_matrix(layer: Layer, matrix: Tensor) -> Tensor:
    """A layer's matrix ``(G, m, n)`` without its bias column, by output and input units of a group:
    ``(G, m, input units, positions of the kernel)``.
    """
    units = layer.weight_shape[1] if layer.convolutional else matrix.shape[-1]
    return matrix.reshape(*matrix.shape[:2], units, -1)


def any_of(chances: Tensor, sides: tuple[int, ...]) -> Tensor:
    """The probability that at least one of several independent events happens, ``1 - prod(1 - a)``, float64.

    Args:
        chances: their probabilities.
        sides: the dimensions that count together.
    """
    return -torch.expm1(torch.log1p(-as_double(chances)).sum(sides))
