"""How many weights of a latent binary network are on, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.devices import widest
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.replica import model_device
from posthoc_uq.sparsity.chain import BrokenChainError, active_weights, find_chain
from posthoc_uq.sparsity.median import latent_blocks
from posthoc_uq.tables import text_table

_UNDECIDED = (0.1, 0.9)
_COLUMNS = {
    "density": "share of the weights with an inclusion above 0.5, which the median model keeps; biases are not counted",
    "expected density": "mean inclusion",
    "undecided": "share of the inclusions between 0.1 and 0.9",
    "active density": "share of the weights that lie on a path of kept weights from an input to an output",
}


@dataclass(frozen=True)
class LayerDensity:
    """The row of one layer, or of all.

    Attributes:
        layer: its name, or ``"all"``.
        weights: without biases.
        kept: with an inclusion above 0.5.
        density: share of those.
        expected: mean inclusion.
        undecided: share of the inclusions between 0.1 and 0.9.
        active: how many weights lie on a path of kept weights from an input to an output; None where it is not known.
    """

    layer: str
    weights: int
    kept: int
    density: float
    expected: float
    undecided: float
    active: int | None = None

    @property
    def active_density(self) -> float | None:
        """Share of the active weights in all."""
        return None if self.active is None else self.active / self.weights


@dataclass(frozen=True)
class Density:
    """What `density` gives; prints as a table.

    Attributes:
        layers: by name.
        total: over all layers.
        without_paths: why there is no active density, as a sentence; empty where there is one.
    """

    layers: dict[str, LayerDensity]
    total: LayerDensity
    without_paths: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        rows = {
            name: asdict(row) | {"active_density": row.active_density} for name, row in self.layers.items()
        }
        total = asdict(self.total) | {"active_density": self.total.active_density}
        return {"layers": rows, "total": total, "without_paths": self.without_paths}

    def __str__(self) -> str:
        header = ["layer", "weights", "kept", "density", "expected density", "undecided", "active density"]
        rows = [
            [r.layer, r.weights, r.kept, r.density, r.expected, r.undecided, r.active_density]
            for r in (*self.layers.values(), self.total)
        ]
        if self.total.active is None:
            header, rows = header[:-1], [row[:-1] for row in rows]
        notes = [f"  {name}: {text}" for name, text in _COLUMNS.items() if name in header]
        return "\n".join([text_table(header, rows), *notes, *filter(None, [self.without_paths])])


def density(posterior: Posterior, inputs: Tensor | Sequence[Any] | None = None) -> Density:
    """How many weights are on, layer by layer and in all.

    With an example of the inputs, also how many of them do something: a kept weight into a unit that nothing leaves, or
    out of a unit that nothing enters (which is a constant), is not active. For that the layers must form a chain, which
    some twenty to forty short passes prove; a channel of a convolution counts as one unit, and all outputs of the last
    layer as needed.

    Args:
        posterior: by ``method="latent_binary"``.
        inputs: an example of the model's inputs, a tensor ``(samples, ...)`` or a tuple of its arguments; four of the
            samples are used.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    blocks = latent_blocks(posterior, "density")
    chances = {name: block.probabilities() for name, block in blocks.items()}
    active, reason = dict[str, int](), "Without inputs= there is no active density."
    if inputs is not None:
        active, reason = _active(posterior, chances, inputs)
    rows = {name: _row(name, chances[name].flatten(), active.get(name)) for name in posterior.layers}
    every = torch.cat([chances[name].flatten() for name in posterior.layers])
    total = _row("all", every, sum(active.values()) if active else None)
    return Density(rows, total, reason)


def _row(name: str, chances: Tensor, active: int | None) -> LayerDensity:
    weights, kept = chances.numel(), int((chances > 0.5).sum())
    undecided = int(((chances > _UNDECIDED[0]) & (chances < _UNDECIDED[1])).sum())
    expected = float(chances.sum(dtype=widest(chances.device))) / weights
    return LayerDensity(name, weights, kept, kept / weights, expected, undecided / weights, active)


def _active(posterior: Posterior, chances: dict[str, Tensor], inputs: Any) -> tuple[dict[str, int], str]:
    """Active weights by layer, or none and why."""
    arguments: tuple[Any, ...] = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not any(isinstance(value, Tensor) for value in arguments):
        raise PosthocUQError(
            "density takes an example of the model's inputs as a tensor, or as a tuple of tensors."
        )
    model = cast(nn.Module, posterior.model)
    batch = Batch(arguments).to(model_device(model))
    try:
        chain = find_chain(model, posterior.layers, batch)
    except BrokenChainError as error:
        return {}, f"There is no active density, since no chain of layers was found: {error}."
    return active_weights(chain, lambda layer: chances[layer.name] > 0.5), ""
