"""A method whose posteriors can be drawn from and nothing else, as somebody who uses the package would write it; see
`test_new_method` and `test_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.core.options import Share
from posthoc_uq.layers.layer import Layer
from posthoc_uq.methods import Laplace
from posthoc_uq.methods.laplace import Basis, squares_of
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.block import Block, Factor, Settings, Shape, TensorSpec


class SpikeFactor(Factor):
    """Weights that are zero with some probability, and else Gaussian: no Gaussian, and not symmetric."""

    centred = False

    def __init__(self, mean: Tensor, variances: Tensor, inclusion: Tensor) -> None:
        self.mean, self.variances, self.inclusion = mean, variances, inclusion

    def draw(self, generator: torch.Generator, like: Tensor) -> Tensor:
        kept = torch.rand(like.shape, generator=generator).to(like) < self.inclusion
        slab = self.mean + self.variances.sqrt() * torch.randn(like.shape, generator=generator).to(like)
        return torch.where(kept, slab, torch.zeros_like(slab))


class SpikeBlock(Block):
    """Means and variances of the slabs, and the probabilities of not being zero, ``(G, m, n)`` each."""

    kind = "spike_slab"
    makes = SpikeFactor
    tunable: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, mean: Tensor, variances: Tensor, inclusion: Tensor) -> None:
        self.mean, self.variances, self.inclusion = mean, variances, inclusion

    def factor(self, settings: Settings) -> SpikeFactor:
        return SpikeFactor(self.mean, self.variances, self.inclusion)

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "variances": self.variances, "inclusion": self.inclusion}

    def attributes(self) -> dict[str, Any]:
        return {}

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return {
            "mean": TensorSpec(shape),
            "variances": TensorSpec(shape, non_negative=True),
            "inclusion": TensorSpec(shape, non_negative=True, largest=1.0),
        }

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Block:
        return cls(tensors["mean"], tensors["variances"], tensors["inclusion"])

    def summary(self) -> dict[str, Any]:
        return {"included": float(self.inclusion.mean())}


@uq.register_method
@dataclass(frozen=True, kw_only=True)
class SpikeAndSlab(Laplace):
    """Every weight is zero with the same probability, and else a Gaussian around the trained one, ``N(w, 1 / (N F +
    1))`` with the diagonal of the Fisher.

    Attributes:
        kept: the probability of not being zero, above 0 and at most 1.
    """

    name: ClassVar[str] = "spike_slab"
    block_kinds: ClassVar[tuple[str, ...]] = ("spike_slab",)
    tunable: ClassVar[frozenset[str]] = frozenset({"noise_scale", "temperature"})

    kept: Share = 0.9

    @property
    def head(self) -> str:
        return "sampling"

    def blocks(self, task: Task) -> dict[str, Block]:
        parameters = {name: parameter.detach() for name, parameter in task.model.named_parameters()}
        sums, samples = self.sweep(task, {})
        made: dict[str, Block] = {}
        for name, layer in task.layers.items():
            fisher = sums[name][0].diagonal(samples)
            mean = layer.to_matrix(parameters[layer.weight], parameters[layer.bias] if layer.bias else None)
            variances = 1 / (task.summary.samples * fisher + 1)
            made[name] = SpikeBlock(mean.to(fisher), variances, torch.full_like(fisher, self.kept))
        return made

    def accumulators(self, layer: Layer, task: Task, basis: Basis | None) -> Sequence[Any]:
        return [squares_of(layer, task)]
