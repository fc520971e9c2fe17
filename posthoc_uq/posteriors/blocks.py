"""The block protocol: what a posterior keeps of one layer, and that block made ready for a scale and a prior
precision.

All tensors lead with the groups of the layer, ``(groups, outputs, inputs)`` = G, m, n, and groups are
independent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import CorruptPosteriorError
from posthoc_uq.posteriors.forms import Form
from posthoc_uq.posteriors.rows import Rows

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Settings:
    """What turns a Fisher information into a precision: ``P = scale * (low rank + residual_weight * D) +
    prior_precision``.

    Attributes:
        scale: number of samples, or what stands for it; a float or a scalar tensor.
        prior_precision: a float, or a tensor that broadcasts against ``(groups, outputs, inputs)``.
        residual_weight: omega of the information form; other families ignore it.
    """

    scale: float | Tensor
    prior_precision: float | Tensor
    residual_weight: float = 1.0


class Factor(ABC):
    """A block's precision ``P``, factorised."""

    @abstractmethod
    def transform(self, noise: Tensor) -> Tensor:
        """Standard normals ``(draws, G, m, n)`` into draws from ``N(0, P^-1)``, by a linear map."""

    @abstractmethod
    def variance(self) -> Tensor:
        """The diagonal of ``P^-1``, ``(G, m, n)``."""

    @abstractmethod
    def quadratic(self, jacobians: Tensor) -> Tensor:
        """``J P^-1 J^T``, ``(q, q)``, of Jacobians ``(q, G, m, n)``."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """``log det P``, a scalar."""

    @abstractmethod
    def rows(self, start: int, shape: Shape) -> Rows:
        """What one layer's weights contribute to the variance of its outputs.

        Args:
            start: offset of the layer inside the block (only a block of several layers has one).
            shape: ``(G, m, n)`` of the layer.
        """

    def form(self) -> Form | None:
        """The covariance as a diagonal less a low-rank part, by which Jacobians are contracted without being formed;
        None where it has no such form.
        """
        return None

    def bytes(self) -> int:
        """Memory that the factor holds beyond its block."""
        return sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor))


class Block(ABC):
    """What is stored of one layer: statistics as plain tensors and plain attributes."""

    kind: ClassVar[str]
    takes_prior: ClassVar[bool] = True
    """Whether the prior precision enters the precision; where it does not, there is no marginal likelihood either."""

    @abstractmethod
    def factor(self, settings: Settings) -> Factor:
        """The precision for these settings, ready to use."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The block's tensors by name: all that storage writes, with `attributes`."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """The block's plain values by name."""

    @classmethod
    @abstractmethod
    def shapes(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes that the tensors must have for a block of ``(groups, outputs, inputs)`` with these
        attributes.

        Raises:
            CorruptPosteriorError: the attributes are out of range.
        """

    @classmethod
    @abstractmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Block:
        """The block that `tensors` and `attributes` described."""

    @abstractmethod
    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        """The Fisher approximation as dense matrices ``(G, m n, m n)`` in row-major order; for small layers."""

    def numbers(self) -> int:
        """Numbers stored."""
        return sum(t.numel() for t in self.tensors().values())

    def bytes(self) -> int:
        """Bytes stored."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device: torch.device | str) -> Block:
        """The block on another device."""
        return self.restore(self.attributes(), {name: t.to(device) for name, t in self.tensors().items()})

    def summary(self) -> dict[str, Any]:
        """Columns of the report."""
        return {}


def bounded(attributes: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """An integer attribute that must lie in a range.

    Raises:
        CorruptPosteriorError: it is missing, no integer, or out of range.
    """
    try:
        value = int(attributes[name])
    except (KeyError, TypeError, ValueError):
        raise CorruptPosteriorError(f"A block has no valid attribute '{name}'.") from None
    if not low <= value <= high:
        raise CorruptPosteriorError(f"A block's attribute '{name}' is {value}, outside {low}..{high}.")
    return value


def log_sum(values: Tensor) -> Tensor:
    """Sum of logarithms, in float64: the evidence is a small difference of such sums over millions of weights."""
    return as_double(values).log().sum()
