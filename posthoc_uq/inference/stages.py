"""What the stages of a fit compute, as its method declares it.

A checkpoint keeps the result of every stage that is done. What it may hold follows from these declarations, so a new
method needs no change in the code that reads one.
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
            number of all weights together, ``*`` any size. Another letter is a size that the tensors of an owner have
            in common wherever it stands, in this stage and in those before it.
        non_negative: as in `TensorSpec`.
        orthonormal: as in `TensorSpec`.
        symmetric: as in `TensorSpec`.
    """

    sides: str
    non_negative: bool = False
    orthonormal: bool = False
    symmetric: bool = False

    def spec(self, sizes: Mapping[str, int]) -> TensorSpec:
        """What it must be where the letters have these sizes; a letter that has none stands for any."""
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
        owner: where there is one set of them instead of one for every layer: the name under which they are kept.
        after: the stage that must be done before, if there is one.
    """

    tensors: Mapping[str, StageTensor] = field(default_factory=lambda: dict[str, StageTensor]())
    owner: str | None = None
    after: str | None = None


Stages = Mapping[str, StageSpec]
"""The stages of a method by name."""
