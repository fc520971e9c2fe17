"""The median probability model: the weights of a spike-and-slab posterior whose inclusion is above one half, kept by
these alone (Barbieri, Berger 2004, "Optimal predictive model selection").
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.errors import CorruptPosteriorError
from posthoc_uq.fields import Field, Flag, Items, Whole
from posthoc_uq.posteriors.blocks import Settings, Shape, bounded, largest_of
from posthoc_uq.posteriors.latent_binary import LatentBlock
from posthoc_uq.posteriors.random_scale import (
    SCALE_FIELDS,
    RandomScale,
    most_of_scale,
    restored_scale,
    scale_specs,
)
from posthoc_uq.posteriors.specs import TensorSpec


class MedianBlock(LatentBlock):
    """The median probability model: means and variances of the weights that are kept, and which they are.

    Attributes:
        means: ``(kept,)``, in row-major order.
        variances: ``(kept,)``, or ``(0,)`` where the weights are certain.
        kept: one bit for each weight of the matrix ``(G, m, n)``, packed eight to a byte, the first the highest.
        shape: ``(G, m, n)``.
    """

    kind = "median_model"
    fields: ClassVar[Mapping[str, Field]] = SCALE_FIELDS | {
        "shape": Items(Whole(1, 2**40), 3, 3),
        "kept": Whole(0),
        "certain": Flag(),
    }

    def __init__(
        self,
        means: Tensor,
        variances: Tensor,
        kept: Tensor,
        bias: bool,
        scale: RandomScale | None,
        shape: tuple[int, ...],
    ) -> None:
        self.means, self.variances, self.kept = means, variances, kept
        self.bias, self.scale, self.shape = bias, scale, cast(Shape, shape)

    def mask(self) -> Tensor:
        """Which weights are kept, ``(G, m, n)``."""
        return unpacked(self.kept, prod(self.shape)).reshape(self.shape)

    def _spread(self, values: Tensor) -> Tensor:
        """Numbers of the kept weights, and zeros for the others."""
        return values.new_zeros(self.shape).masked_scatter_(self.mask(), values)

    def slabs(self) -> tuple[Tensor, Tensor]:
        means = self._spread(self.means)
        return means, self._spread(self.variances) if len(self.variances) else torch.zeros_like(means)

    def inclusions(self) -> Tensor:
        return self.mask().to(self.means)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"means": self.means, "variances": self.variances, "kept": self.kept}
        return tensors | self.scale_tensors()

    def attributes(self) -> dict[str, Any]:
        attributes = {"shape": list(self.shape), "kept": len(self.means), "certain": not len(self.variances)}
        return super().attributes() | attributes

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        kept = bounded(attributes, "kept", 0, prod(shape))
        if tuple(attributes.get("shape", ())) != tuple(shape):
            raise CorruptPosteriorError(f"A median model of shape {shape} is described by another shape.")
        specs = {
            "means": TensorSpec((kept,)),
            "variances": TensorSpec((0 if attributes.get("certain") else kept,), non_negative=True),
            "kept": TensorSpec((-(-prod(shape) // 8),), bits=True, largest=255.0),
        }
        return specs | scale_specs(shape, attributes)

    @classmethod
    def most_numbers(cls, shape: Shape) -> int:
        return 3 * prod(shape) + most_of_scale(shape)

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MedianBlock:
        shape, bias = cast(Shape, tuple(attributes["shape"])), bool(attributes["bias"])
        scale = restored_scale(shape, attributes, tensors)
        block = cls(tensors["means"], tensors["variances"], tensors["kept"], bias, scale, shape)
        fault = block.fault()
        if fault is not None:  # before anything spreads its numbers over the matrix
            raise CorruptPosteriorError(f"A median model {fault}.")
        return block

    def fault(self) -> str | None:
        counted, mask = int(unpacked(self.kept, 8 * len(self.kept)).sum()), self.mask()
        if not counted == int(mask.sum()) == len(self.means):
            return "keeps another number of weights than it says"
        return "leaves out biases, which are always on" if self.bias and not mask[..., -1].all() else None

    def reach(self, settings: Settings) -> float:
        return max(largest_of(self.variances), largest_of(self.means) ** 2)


def median_of(block: LatentBlock, *, certain: bool = False) -> MedianBlock:
    """The weights of inclusion above one half, which are on for certain.

    Args:
        block: of either kind; the median model of a median model is itself.
        certain: leave the variances out and fold the mean of ``z`` in: one network, at its means.
    """
    (means, variances), kept = block.slabs(), block.inclusions() > 0.5
    if certain and block.scale is not None:
        shape = cast(Shape, tuple(means.shape))
        means = means * block.scale.matrix(block.scale.tensors["z_mean"], shape, 1.0)
    kept_variances = variances.new_zeros(0) if certain else variances[kept]
    scale = None if certain else block.scale
    return MedianBlock(means[kept], kept_variances, packed(kept), block.bias, scale, tuple(means.shape))


def packed(mask: Tensor) -> Tensor:
    """A mask as bytes of eight bits, the first the highest; zeros fill the last byte."""
    bits = mask.flatten().to(torch.uint8)
    bits = F.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)
    return (bits << _places(bits)).sum(1, dtype=torch.uint8)


def unpacked(kept: Tensor, count: int) -> Tensor:
    """The first `count` bits of packed bytes, as a mask."""
    return ((kept.unsqueeze(1) >> _places(kept)) & 1).flatten()[:count].bool()


def _places(like: Tensor) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=like.device)
