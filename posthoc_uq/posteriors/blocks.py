"""The block protocol: what a posterior keeps of one layer, and that block made ready for a scale and a prior
precision.

All tensors lead with the groups of the layer, ``(groups, outputs, inputs)`` = G, m, n, and groups are
independent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.fields import Field
from posthoc_uq.posteriors.forms import Form
from posthoc_uq.posteriors.rows import Rows
from posthoc_uq.posteriors.specs import TensorSpec

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


BLOCKS: dict[str, type[Block]] = {}
"""Every class of blocks by its kind; a class that names its `kind` registers itself."""


class Block(ABC):
    """What is stored of one layer: statistics as plain tensors and plain attributes.

    A subclass that sets `kind` is known by it from then on: files of posteriors with such blocks can be written and
    read wherever the class is defined. An attribute ``samples`` is the number of training samples, which files check.
    """

    kind: ClassVar[str]
    """By which files name it; no two classes have the same."""
    fields: ClassVar[Mapping[str, Field]] = {}
    """What each of its `attributes` may be in a file."""
    joint: ClassVar[bool] = False
    """Whether it may hold several layers, one after the other and each flattened: its shape is then (1, 1, weights)."""
    trained: ClassVar[bool] = False
    """Whether it comes of a training, which may have moved the mean as well."""
    takes_prior: ClassVar[bool] = True
    """Whether the prior precision enters the precision; where it does not, there is no marginal likelihood either."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            _register(cls)

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
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """What the tensors must be for a block of ``(groups, outputs, inputs)`` with these attributes. Files and their
        checks follow from it.

        Raises:
            CorruptPosteriorError: the attributes are out of range.
        """

    @classmethod
    def most_numbers(cls, shape: Shape) -> int:
        """How many numbers a block of this shape has at most, so that a file that is too large is not read. To be
        overridden where `specs` needs attributes.
        """
        return sum(spec.numbers for spec in cls.specs(shape, {}).values())

    def fault(self) -> str | None:
        """What is wrong with its tensors taken together, in words; what each must be by itself is in `specs`."""
        return None

    def reach(self, settings: Settings) -> float:
        """The largest precision that it comes to at these settings, or variance where it keeps these, for files to
        refuse what float32 cannot compute with; 0 where that cannot happen within the bounds of its `specs`.
        """
        return 0.0

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


def _register(cls: type[Block]) -> None:
    known = BLOCKS.get(cls.kind)
    # the same name again is the same class: a module that was reloaded, a cell of a notebook that ran again
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise PosthocUQError(
            f"{cls.__qualname__} cannot be a block of the kind {cls.kind!r}, which {known.__module__}."
            f"{known.__qualname__} is already; give it another kind."
        )
    BLOCKS[cls.kind] = cls


@contextmanager
def kinds_restored() -> Generator[None]:
    """Within it, classes of blocks may be defined that are not to stay: afterwards the registry is what it was."""
    before = dict(BLOCKS)
    try:
        yield
    finally:
        BLOCKS.clear()
        BLOCKS.update(before)


def largest_of(*tensors: Tensor) -> float:
    """The largest absolute number of several tensors, 0 of empty ones."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def reached(settings: Settings, information: float) -> float:
    """The largest precision ``scale * I + prior_precision`` for the largest number of ``I``."""
    prior = settings.prior_precision
    return float(settings.scale) * information + (float(prior.max()) if isinstance(prior, Tensor) else prior)


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
