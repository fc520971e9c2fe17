"""The block protocol: what a posterior stores of one layer (`Block`), and that made ready for use at a scale and a
prior precision (`Factor`).

The first dimensions of all tensors are the layer's groups, outputs and inputs, ``(G, m, n)``; groups are independent.
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
from posthoc_uq.posteriors.capabilities import (
    DRAWS,
    FORM,
    INDEPENDENT,
    LOG_DETERMINANT,
    QUADRATIC,
    ROWS,
    SYMMETRY,
    VARIANCES,
)
from posthoc_uq.posteriors.combining import Weights
from posthoc_uq.posteriors.covariance_form import CovarianceForm
from posthoc_uq.posteriors.row_covariance import RowCovariance
from posthoc_uq.posteriors.specs import TensorSpec

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Settings:
    """What turns a Fisher information into a precision: ``P = scale * (low rank + residual_weight * D) +
    prior_precision``.

    Attributes:
        scale: by which the mean Fisher is multiplied, the number of samples unless tuned; a float or a scalar tensor.
        prior_precision: a float, or a tensor that broadcasts against ``(groups, outputs, inputs)``.
        residual_weight: omega of the information form; other families ignore it.
    """

    scale: float | Tensor
    prior_precision: float | Tensor
    residual_weight: float = 1.0


class Factor:
    """A block at given settings, ready for use; for a Gaussian, its factorised precision ``P``.

    The methods that a subclass overrides are what its posteriors can do; `capabilities` names them. A distribution that
    is not Gaussian overrides `draw`. A Gaussian overrides `transform`, from which its draws follow; the other methods
    are about deviations from the posterior's mean.
    """

    centred: ClassVar[bool] = True
    """Whether a draw is a deviation from the posterior's mean; otherwise it is the weights themselves."""
    shared: bool = False
    """Whether weights have something random in common, so that `independent` differs from draw to draw."""

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        """What such factors can do, by the names in `posthoc_uq.posteriors.capabilities`."""
        groups = [
            names
            for method, names in _CAPABILITIES.items()
            if getattr(cls, method) is not getattr(Factor, method)
        ]
        return frozenset(name for names in groups for name in names)

    def draw(self, generator: torch.Generator, like: Tensor) -> Tensor:
        """One draw of the block's weights, ``(G, m, n)``.

        Args:
            generator: on the CPU, so that every device gets the same random numbers.
            like: a tensor with the draw's shape, number format and device.
        """
        normals = torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)
        return self.transform(normals.unsqueeze(0))[0]

    def transform(self, normals: Tensor) -> Tensor:
        """Turn standard normals ``(draws, G, m, n)`` into draws from ``N(0, P^-1)``, by a linear map."""
        raise self._cannot("draws from normals")

    def independent(self, generator: torch.Generator) -> tuple[Tensor | None, Tensor]:
        """Mean and variance of the weights, ``(G, m, n)`` each, that are independent of each other once what they have
        in common is drawn; the mean of deviations, which is zero, as None.

        Args:
            generator: as in `draw`, of what they have in common.
        """
        raise self._cannot(INDEPENDENT)

    def variance(self) -> Tensor:
        """The variances of the weights, ``(G, m, n)``: the diagonal of ``P^-1``."""
        raise self._cannot(VARIANCES)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        """``J P^-1 J^T``, ``(q, q)``, of Jacobians ``(q, G, m, n)`` in any number format."""
        raise self._cannot(QUADRATIC)

    def whiten(self, jacobians: Tensor) -> Tensor:
        """Rows ``r`` in float64, ``(q, any)``, with ``r r^T = J P^-1 J^T`` of Jacobians ``(q, G, m, n)``."""
        values, vectors = torch.linalg.eigh(as_double(self.quadratic(jacobians)))
        return vectors * values.clamp(min=0).sqrt()

    def log_determinant(self) -> Tensor:
        """``log det P``, a scalar."""
        raise self._cannot(LOG_DETERMINANT)

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        """The covariance of one layer's rows, for the variance that its weights give to its outputs.

        Args:
            start: offset of the layer inside the block; 0 unless the block holds several layers.
            shape: ``(G, m, n)`` of the layer.
        """
        raise self._cannot(ROWS)

    def form(self) -> CovarianceForm | None:
        """The covariance as a diagonal minus a low-rank part, which contracts Jacobians without forming them; None if
        it has no such form.
        """
        return None

    def bytes(self) -> int:
        """Memory that the factor holds beyond its block."""
        return sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor))

    def _cannot(self, what: str) -> PosthocUQError:
        return PosthocUQError(f"A {type(self).__name__} has no {what.removeprefix('a ')}.")


_CAPABILITIES: dict[str, tuple[str, ...]] = {
    "draw": (DRAWS,),
    "transform": (DRAWS, SYMMETRY),
    "independent": (INDEPENDENT,),
    "variance": (VARIANCES,),
    "quadratic": (QUADRATIC,),
    "rows": (ROWS,),
    "log_determinant": (LOG_DETERMINANT,),
    "form": (FORM,),
}
"""The capabilities of a factor that overrides a method, by the method's name."""


BLOCKS: dict[str, type[Block]] = {}
"""Every class of blocks by its kind; a class that names its `kind` registers itself."""


class Block(ABC):
    """What is stored of one layer: statistics as plain tensors and plain attributes.

    A subclass that sets `kind` is known by it from then on: files of posteriors with such blocks can be written and
    read wherever the class is defined. An attribute ``samples`` is the number of training samples, which files check.
    """

    kind: ClassVar[str]
    """The name of the class in files; no two classes have the same."""
    makes: ClassVar[type[Factor]]
    """The class of the factors that `factor` makes; it determines what posteriors of such blocks can do."""
    fields: ClassVar[Mapping[str, Field]] = {}
    """What each of its `attributes` may be in a file."""
    optional_fields: ClassVar[Mapping[str, Field]] = {}
    """What those of its `attributes` may be that not every block of the kind has."""
    joint: ClassVar[bool] = False
    """Whether it may hold several layers, one after the other and each flattened: its shape is then (1, 1, weights)."""
    trained: ClassVar[bool] = False
    """Whether it comes from a training, which may have changed the mean as well."""
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "prior_precision"})
    """The hyperparameters of its weights that may be set (`posthoc_uq.posteriors.settings.ABOUT`); without a prior
    precision there is no marginal likelihood either."""
    own_priors: ClassVar[bool] = False
    """Whether every weight may have a prior precision of its own: `factor` then takes a tensor of its shape."""
    settled: ClassVar[frozenset[str]] = frozenset()
    """Those that were a part of what its method optimised: they are known, and cannot be set."""
    columns: ClassVar[Mapping[str, str]] = {}
    """What the columns of its `summary` mean; a key may name several, with commas between them."""
    heads_note: ClassVar[str] = ""
    """What a report says of the heads where they do not all mean the same for it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            if not hasattr(cls, "makes"):
                raise PosthocUQError(
                    f"{cls.__qualname__} must say in 'makes' which class its factors are of."
                )
            _register(cls)

    @abstractmethod
    def factor(self, settings: Settings) -> Factor:
        """The block at these settings, ready for use."""

    def kept_bytes(self) -> int:
        """Bytes that `kept_parts` keeps; 0 where it keeps nothing."""
        return 0

    @contextmanager
    def kept_parts(self) -> Generator[None]:
        """While this is open, `factor` may keep what does not depend on the settings: for trials of many settings."""
        yield

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The block's tensors by name: all that storage writes, with `attributes`."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """The block's plain values by name."""

    @classmethod
    @abstractmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """What the tensors must be for a block of ``(groups, outputs, inputs)`` with these attributes. Files are
        checked by it.

        Raises:
            CorruptPosteriorError: the attributes are out of range.
        """

    @classmethod
    def most_numbers(cls, shape: Shape) -> int:
        """The most numbers that a block of this shape can have; a larger file is not read. A class whose `specs` needs
        attributes must override it.
        """
        return sum(spec.numbers for spec in cls.specs(shape, {}).values())

    def own_mean(self) -> Tensor | None:
        """The mean of the weights, ``(G, m, n)``, of blocks that know it themselves; of all others it is the model's
        own, or the posterior's centre.
        """
        return None

    def uncertain(self) -> Tensor | None:
        """Which weights it is about, ``(G, m, n)`` of bool, where some are certain; None where all are uncertain."""
        return None

    def fault(self) -> str | None:
        """What is wrong with its tensors taken together, in words, or None; `specs` is about each tensor alone."""
        return None

    def reach(self, settings: Settings) -> float:
        """The largest precision at these settings, or the largest variance of a block that stores variances. Files that
        reach more than float32 can compute with are refused. 0 where the bounds in `specs` exclude that already.
        """
        return 0.0

    @classmethod
    @abstractmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Block:
        """The block that `tensors` and `attributes` described."""

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        """The Fisher approximation as dense matrices ``(G, m n, m n)`` in row-major order; for small layers.

        Raises:
            PosthocUQError: the block keeps none.
        """
        raise PosthocUQError(f"A block of the kind {self.kind!r} keeps no Fisher information.")

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> Block:
        """The block of this block's data and others together, or without some of its own.

        Args:
            part: means over the other data, by the name of the tensor; in this block's bases, if it has some.
            weights: of the two means.

        Raises:
            NotContainedError: data were to be taken out that cannot all have been in.
            PosthocUQError: such blocks cannot be added up.
        """
        raise PosthocUQError(f"Blocks of the kind {self.kind!r} cannot be added up.")

    def covered(self, part: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """How much of a Fisher's trace is inside of the block's bases, and the whole trace; None for a block that keeps
        all of it.

        Args:
            part: means by the name of the tensor, as for `combined`.
        """
        return None

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
        """Columns of the report; `columns` explains them."""
        return {}


def _register(cls: type[Block]) -> None:
    registered = BLOCKS.get(cls.kind)
    # the same name again is the same class: a reloaded module, or a notebook cell that ran again
    if registered is not None and (registered.__module__, registered.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise PosthocUQError(
            f"{cls.__qualname__} cannot be a block of the kind {cls.kind!r}, which {registered.__module__}."
            f"{registered.__qualname__} is already; give it another kind."
        )
    BLOCKS[cls.kind] = cls


@contextmanager
def kinds_restored() -> Generator[None]:
    """For temporary classes of blocks: at its end the registry is what it was before."""
    registered = dict(BLOCKS)
    try:
        yield
    finally:
        BLOCKS.clear()
        BLOCKS.update(registered)


def largest_of(*tensors: Tensor) -> float:
    """The largest absolute number of several tensors, 0 if they are empty."""
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
    """The sum of logarithms, in float64: the evidence is a small difference of such sums over millions of weights."""
    return as_double(values).log().sum()
