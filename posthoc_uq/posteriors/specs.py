"""What a tensor must be: blocks declare it for theirs, and files and checkpoints are checked by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

LARGEST = 1e30
"""No number of a statistic, no hyperparameter and no inverse of one is larger: float32 can still compute with it."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be; its numbers are always finite.

    Attributes:
        shape: its sizes; None for a dimension of any size.
        non_negative: whether it has no negative number, as variances and eigenvalues.
        orthonormal: whether it has orthonormal columns, up to the rounding to bfloat16.
        padded: whether columns of zeros may stand among the orthonormal ones.
        symmetric: whether its matrices are symmetric, with a diagonal that is not negative.
        largest: no number is larger, whatever its sign.
        exact: whether a file keeps it in its own number format, also where it is saved in a narrower one: sums that
            data are to be taken out of again, and counts.
        bits: whether it holds bytes of packed bits (uint8), which are kept as they are, rather than numbers.
    """

    shape: tuple[int | None, ...]
    non_negative: bool = False
    orthonormal: bool = False
    padded: bool = False
    symmetric: bool = False
    largest: float = LARGEST
    bits: bool = False
    exact: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has the right one."""
        return len(shape) == len(self.shape) and all(
            wanted in (None, size) for size, wanted in zip(shape, self.shape, strict=True)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, where every dimension has a size."""
        return tuple(size for size in self.shape if size is not None)

    @property
    def numbers(self) -> int:
        """How many numbers such a tensor has, where every dimension has a size."""
        return prod(self.sizes)
