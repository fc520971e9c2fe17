"""What the stages of a fit compute, as its method declares it.

A checkpoint keeps the result of every finished stage. These declarations say what it may hold, so the code that reads
checkpoints need not change for a new method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posthoc_uq.posteriors.specs import TensorSpec


@dataclass(frozen=True)
class StageTensor:
    """A tensor that a stage computes.

    Attributes:
        sides: a letter for each side. ``G``, ``m`` and ``n`` are a layer's groups, outputs and inputs, ``N`` is the
            number of all weights together, ``*`` any size. Any other letter is one size, the same for all tensors of
            an owner in this stage and in those before it.
        non_negative: as in `TensorSpec`.
        orthonormal: as in `TensorSpec`.
        symmetric: as in `TensorSpec`.
        wide: whether it is in float64 where the device has that, whatever the statistics are in.
    """

    sides: str
    non_negative: bool = False
    orthonormal: bool = False
    symmetric: bool = False
    wide: bool = False

    def spec(self, sizes: Mapping[str, int]) -> TensorSpec:
        """What the tensor must be where the letters have these sizes; a letter without one stands for any size."""
        kinds: dict[str, Any] = {
            "non_negative": self.non_negative,
            "orthonormal": self.orthonormal,
            "symmetric": self.symmetric,
        }
        return TensorSpec(tuple(sizes.get(side) for side in self.sides), **kinds)


@dataclass(frozen=True)
class StageSpec:
    """What one stage computes.

    Attributes:
        tensors: by name; every layer has all of them.
        owner: None where every layer has these tensors; else the name under which the one set of them is kept.
        after: the stage that must be done before, if there is one.
    """

    tensors: Mapping[str, StageTensor] = field(default_factory=lambda: dict[str, StageTensor]())
    owner: str | None = None
    after: str | None = None


Stages = Mapping[str, StageSpec]
"""The stages of a method by name."""
