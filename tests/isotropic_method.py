"""A method of fitting in a file of its own, as somebody who uses the package would write it; see `test_new_method`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import posthoc_uq as uq
from posthoc_uq.core import Positive
from posthoc_uq.layers import Layer
from posthoc_uq.methods import Basis, Laplace, Task, squares_of
from posthoc_uq.posteriors import Block, DiagonalBlock


@uq.register_method
@dataclass(frozen=True, kw_only=True)
class Isotropic(Laplace):
    """An isotropic Gaussian for every layer, fitted to the trace of the Fisher.

    ``I ~ share * tr(E[g g^T]) / size * 1``: one number a layer, in one sweep.

    Attributes:
        share: of the trace, positive.
    """

    name: ClassVar[str] = "isotropic"
    block_kinds: ClassVar[tuple[str, ...]] = ("diagonal",)

    share: Positive = 1.0

    def accumulators(self, layer: Layer, task: Task, basis: Basis | None) -> Sequence[Any]:
        return [squares_of(layer, task)]

    def block(self, layer: Layer, sums: Sequence[Any], samples: float, basis: Basis | None) -> Block:
        mean = self.share * sums[0].diagonal(samples).mean()
        return DiagonalBlock(mean.repeat(layer.matrix_shape))
