"""The block protocol: what is stored of a layer, what its tensors must be, what it can do, and how two add up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import torch
import torch.nn.functional as F
from annotated_types import Ge
from pydantic import create_model
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.core.options import LARGEST
from posthoc_uq.core.records import Record
from posthoc_uq.core.registry import Registry
from posthoc_uq.posteriors.covariance import Covariance

MatrixShape = tuple[int, int, int]
"""Groups, outputs and inputs of a layer, or ``(1, 1, weights)`` of several."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be; its numbers are always finite.

    Attributes:
        shape: its sizes.
        non_negative: whether it has no negative number, as variances and eigenvalues.
        orthonormal: whether it has orthonormal columns, up to the rounding to bfloat16.
        padded: whether columns of zeros may stand among the orthonormal ones.
        symmetric: whether its matrices are symmetric, with a diagonal that is not negative.
        largest: no number is larger, whatever its sign.
        exact: whether a file keeps it in its own number format, also where it is saved in a narrower one: sums that
            data are to be taken out of again, and counts.
        bits: whether it holds bytes of packed bits (uint8), which are kept as they are, rather than numbers.
    """

    shape: tuple[int, ...]
    non_negative: bool = False
    orthonormal: bool = False
    padded: bool = False
    symmetric: bool = False
    largest: float = LARGEST
    bits: bool = False
    exact: bool = False


GROUPS, OUTPUTS, INPUTS, WEIGHTS = "groups", "outputs", "inputs", "weights"
"""Sizes of a layer's matrix, and their product."""
BITS = "bits"
"""The bytes that one bit for each weight takes."""


@dataclass(frozen=True)
class Size:
    """A size that differs from block to block; a file has it among the block's attributes.

    Attributes:
        name: of the attribute.
        low: the smallest.
        most: the largest, as one of the sizes of a layer's matrix.
    """

    name: str
    low: int
    most: str


class TensorField:
    """In the annotation of a block's field: it is a tensor, and what that must be.

    Args:
        *sizes: `GROUPS`, `OUTPUTS`, `INPUTS`, `WEIGHTS`, `BITS`, or a `Size`.
        optional: an attribute of a file that is true where the block has this tensor; else the tensor is None.
        mean_of: the statistic in words, where it is a mean over the samples that other data can come into; it is then
            non-negative, or symmetric and positive semidefinite.
        max_numbers: that it may have, whatever its sizes.
        **properties: those of `TensorSpec`.
    """

    def __init__(
        self,
        *sizes: str | Size,
        optional: str | None = None,
        mean_of: str = "",
        max_numbers: int | None = None,
        **properties: Any,
    ) -> None:
        self.sizes, self.optional, self.mean_of, self.max_numbers = sizes, optional, mean_of, max_numbers
        self.properties = properties


def layer_sizes(shape: MatrixShape) -> dict[str, int]:
    """The sizes of a layer's matrix by name."""
    weights = prod(shape)
    return dict(zip((GROUPS, OUTPUTS, INPUTS), shape, strict=True)) | {
        WEIGHTS: weights,
        BITS: -(-weights // 8),
    }


# What a posterior's blocks can do, by name: heads and searches ask for that, never for a method.
#
# All blocks can draw. The other capabilities belong to posteriors that lie around a mean, as Gaussians do.

DRAWS = "draws"
SYMMETRY = "symmetric draws"  # mean - deviation is as likely as mean + deviation
VARIANCES = "variances"  # of every weight
QUADRATIC = "quadratic forms"  # J Sigma J^T of Jacobians
ROWS = "row covariances"  # for the variance that a layer's weights give to its outputs
LOG_DETERMINANT = "a log-determinant"  # of the precision
PRECISION = "a precision"  # in products with weights
INDEPENDENT = "moments of independent weights"  # once what they have in common is drawn
GIVEN = "outputs without a model"  # which no block has, and a posterior over no weights


# Statistics of two parts of the data added up, or those of one part taken out again.
#
# Blocks keep means over the samples. With N samples before and n that come in or go out, the new mean is
# ``N / (N + n) kept + n / (N + n) part``, or ``N / (N - n) kept - n / (N - n) part``; both are weighted sums.

_ROUNDING_UNITS = 1e3
"""Rounding errors of a sum over a data set, in units of its number format's precision, relative to its size."""


_MAX_LOST_SHARE = 1e-2
"""The share of what was known before that rounding may take when data come in, relative to its largest number."""


def check_resolved(kept: float, part: float, weights: Weights, precision: float, what: str) -> None:
    """Refuse data beside which what is known already would be lost to rounding: taken out again, they would leave
    numbers that mean nothing.

    Args:
        kept: the largest number of a mean over all data so far; nothing is lost of a zero.
        part: the same of the data that come in.
        weights: of the two means.
        precision: of the numbers, relative.
        what: whose statistic it is, in words.

    Raises:
        PosthocUQError: more than 1 % of `kept` would be lost.
    """
    share = min(1.0, weights.part / weights.kept)
    if kept > 0 and not max(precision, weights.precision) * share * part <= _MAX_LOST_SHARE * kept:
        raise PosthocUQError(
            f"These data cannot come in: what they say of {what} is {part / kept:.2g} times as large as what all data "
            f"before said, which would be lost to rounding. Look for inputs or targets that are out of range, or fit "
            f"again on all data."
        )


class NotContainedError(PosthocUQError):
    """Data were to be taken out that cannot all have been in; its text is the statistic that shows it."""


@dataclass(frozen=True)
class Weights:
    """The weights of a sum of means.

    Attributes:
        kept: of the mean that is kept.
        part: of the mean of the data that come in, or go out: then it is negative.
        precision: the relative precision in which gradients were computed, however wide the sums are: two passes over
            the same sample agree to it.
    """

    kept: float
    part: float
    precision: float

    @staticmethod
    def of(samples: float, change: float, precision: float) -> Weights:
        """For `samples` before, the sum of their weights, and a `change` of it: negative for those that go out."""
        return Weights(samples / (samples + change), change / (samples + change), precision)


def combined(kept: Tensor, part: Tensor, weights: Weights, what: str) -> Tensor:
    """The weighted sum of two means that have no negative number, in the number format of `kept`.

    Args:
        kept: the mean over all data so far.
        part: over those that come in or go out; of the same shape.
        weights: of the two.
        what: the statistic in words, for the error.

    Raises:
        NotContainedError: a number would become negative by more than rounding.
    """
    before = as_double(kept)
    total = weights.kept * before + weights.part * as_double(part).to(before.device)
    if (
        weights.part < 0
        and total.numel()
        and bool(total.min() < -_rounding(kept, float(kept.abs().max()), weights))
    ):
        raise NotContainedError(what)
    return total.clamp(min=0).to(kept)


def combined_matrices(kept: Tensor, part: Tensor, weights: Weights, what: str) -> Tensor:
    """The weighted sum of two means ``(..., n, n)`` that are positive semidefinite; otherwise as `combined`.

    Raises:
        NotContainedError: an eigenvalue would become negative by more than rounding.
    """
    before = as_double(kept)
    total = weights.kept * before + weights.part * as_double(part).to(before.device)
    total = (total + total.transpose(-1, -2)) / 2
    if weights.part < 0 and total.numel():
        norm = float(before.abs().sum(-1).max())  # at least the largest eigenvalue
        shifted = total.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(_rounding(kept, norm, weights))
        if bool(torch.linalg.cholesky_ex(shifted).info.any()):
            raise NotContainedError(what)
        total.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
    return total.to(kept)


def _rounding(kept: Tensor, size: float, weights: Weights) -> float:
    """What may be rounding in a weighted sum, for a `kept` of this size: more where nearly all data go out, since it
    then counts many times.
    """
    smallest = torch.finfo(torch.float64).tiny  # so that an empty statistic stays one
    precision = max(weights.precision, torch.finfo(kept.dtype).eps)
    return _ROUNDING_UNITS * precision * weights.kept * size + smallest


@dataclass(frozen=True)
class PrecisionSettings:
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

    def precision(self, information: Tensor) -> Tensor:
        """``scale * information + prior_precision``, in float64, for an information that is diagonal in some basis."""
        return self.scale * as_double(information) + self.prior_precision

    def largest_precision(self, information: float) -> float:
        """The same for the largest number of an information."""
        prior = self.prior_precision
        return float(self.scale) * information + (float(prior.max()) if isinstance(prior, Tensor) else prior)


_CAPABILITIES: dict[str, tuple[str, ...]] = {
    "draw": (DRAWS,),
    "transform": (DRAWS, SYMMETRY),
    "independent": (INDEPENDENT,),
    "variance": (VARIANCES,),
    "quadratic": (QUADRATIC,),
    "whiten": (QUADRATIC,),
    "of_layer": (ROWS,),
    "log_determinant": (LOG_DETERMINANT,),
    "times_precision": (PRECISION,),
}
"""The capabilities of a covariance that overrides a method, by the method's name."""


AnyBlock = TypeVar("AnyBlock", bound="Block")

BLOCKS: Registry[type[Block]] = Registry()
"""Every class of blocks by its kind; a class that names its `kind` registers itself."""


@dataclass(eq=False, repr=False)
class Block(ABC):
    """What is stored of one layer: statistics as plain tensors and plain attributes.

    A subclass is a dataclass: its fields annotated as `TensorField` are the tensors, all others are the attributes,
    whose types check those of files; metadata ``absent`` is the value of one that older files lack. What is written,
    checked, read, added up and counted follows from them. A class that sets `kind` is known by it from then on: files
    of posteriors with such blocks can be written and read wherever it is defined. An attribute ``samples`` is the
    number of training samples, which files check.
    """

    kind: ClassVar[str]
    """The name of the class in files; no two classes have the same."""
    makes: ClassVar[type[Covariance]]
    """The class of what `covariance` makes; it determines what posteriors of such blocks can do."""
    factorises: ClassVar[bool] = True
    """Whether `covariance` may fail by rounding: it factorises matrices, or is a user's."""
    fields: ClassVar[type[Record]] = Record
    """What is in a file's attributes beside the plain fields and the sizes of tensors, for a class that writes more."""
    joint: ClassVar[bool] = False
    """Whether it may hold several layers, one after the other and each flattened: its shape is then (1, 1, weights)."""
    trained: ClassVar[bool] = False
    """Whether it comes from a training, which may have changed the mean as well."""
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "prior_precision"})
    """The hyperparameters of its weights that may be set (`posteriors.settings.HYPERPARAMETERS`); without a prior
    precision there is no marginal likelihood either."""
    per_weight_prior: ClassVar[bool] = False
    """Whether every weight may have a prior precision of its own: `covariance` then takes a tensor of its shape."""
    fixed_by_training: ClassVar[frozenset[str]] = frozenset()
    """Those that were a part of what its method optimised: they are known, and cannot be set."""
    columns: ClassVar[Mapping[str, str]] = {}
    """What the columns of its `summary` mean; a key may name several, with commas between them."""
    heads_note: ClassVar[str] = ""
    """What a report says of the heads where they do not all mean the same for it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" not in vars(cls):
            return
        if not hasattr(cls, "makes"):
            raise PosthocUQError(
                f"{cls.__qualname__} must say in 'makes' which class its covariances are of."
            )
        registered = BLOCKS.add(cls.kind, cls)
        # the same name again is the same class: a reloaded module, or a notebook cell that ran again
        if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
            raise PosthocUQError(
                f"{cls.__qualname__} cannot be a block of the kind {cls.kind!r}, which {registered.__module__}."
                f"{registered.__qualname__} is already; give it another kind."
            )
        BLOCKS[cls.kind] = cls

    def leading(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The leading eigenvectors of the block's information, as bases of the inputs ``(G, n, a)`` and of the outputs
        ``(G, m, g)``, and their eigenvalues ``(G, g, a)``; None where it is not known by such.
        """
        return None

    def independent(self) -> Block | None:
        """A block with the same diagonal and nothing else, where covariances of that take far less; else None."""
        return None

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        """What posteriors of such blocks can do, by the names above."""
        able = set[str]()
        for method, names in _CAPABILITIES.items():
            if getattr(cls.makes, method) is not getattr(Covariance, method):
                able.update(names)
        return frozenset(able)

    @abstractmethod
    def covariance(self, settings: PrecisionSettings) -> Covariance:
        """The block at these settings, ready for use."""

    def kept_bytes(self) -> int:
        """Bytes that `kept_parts` keeps; 0 where it keeps nothing."""
        return 0

    @contextmanager
    def kept_parts(self) -> Generator[None]:
        """While this is open, `covariance` may keep what does not depend on the settings: for many trials."""
        yield

    @classmethod
    @cache
    def _stored(cls) -> dict[str, TensorField]:
        """The fields that are tensors."""
        hints = get_type_hints(cls, include_extras=True)
        found = {each.name: getattr(hints[each.name], "__metadata__", (None,))[0] for each in fields(cls)}
        return {name: own for name, own in found.items() if isinstance(own, TensorField)}

    @classmethod
    @cache
    def _plain(cls) -> list[str]:
        """The fields that are attributes, without those that a class writes itself (metadata ``in_file=False``)."""
        others = [each for each in fields(cls) if each.name not in cls._stored()]
        return [each.name for each in others if each.metadata.get("in_file", True)]

    @classmethod
    @cache
    def _absent(cls) -> dict[str, Any]:
        """What attributes are that a file does not have."""
        return {each.name: each.metadata["absent"] for each in fields(cls) if "absent" in each.metadata}

    @classmethod
    @cache
    def record(cls) -> type[Record]:
        """What `attributes` may be in a file."""
        hints = get_type_hints(cls, include_extras=True)
        absent = cls._absent()
        declared: dict[str, Any] = {name: (hints[name], absent.get(name, ...)) for name in cls._plain()}
        for tensor in cls._stored().values():
            sizes = [size for size in tensor.sizes if isinstance(size, Size)]
            declared |= {size.name: (Annotated[int, Ge(size.low)], ...) for size in sizes}
            declared |= {} if tensor.optional is None else {tensor.optional: (bool, False)}
        new = {name: kind for name, kind in declared.items() if name not in cls.fields.model_fields}
        return create_model(f"{cls.__name__}Attributes", __base__=cls.fields, **new)

    def tensors(self) -> dict[str, Tensor]:
        """The block's tensors by name: all that storage writes, with `attributes`."""
        tensors: dict[str, Tensor | None] = {name: getattr(self, name) for name in self._stored()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def attributes(self) -> dict[str, Any]:
        """The block's plain values by name, and the sizes of its tensors that the layer does not determine."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self._plain()}
        for name, tensor in self.tensors().items():
            declared = self._stored().get(name)
            if declared is not None:
                own = zip(declared.sizes, tensor.shape, strict=True)
                values |= {size.name: number for size, number in own if isinstance(size, Size)}
                values |= {} if declared.optional is None else {declared.optional: True}
        return values

    @classmethod
    def specs(cls, shape: MatrixShape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """What the tensors must be for a block of ``(groups, outputs, inputs)`` with these attributes. Files are
        checked by it.

        Raises:
            CorruptPosteriorError: the attributes are out of range.
        """
        of_layer, specs = layer_sizes(shape), dict[str, TensorSpec]()
        for name, declared in cls._stored().items():
            if declared.optional is None or attributes.get(declared.optional):
                sizes = list[int]()
                for size in declared.sizes:
                    if isinstance(size, Size):
                        sizes.append(check_bounds(attributes, size.name, size.low, of_layer[size.most]))
                    else:
                        sizes.append(of_layer[size])
                specs[name] = TensorSpec(tuple(sizes), **declared.properties)
        return specs

    @classmethod
    def most_numbers(cls, shape: MatrixShape) -> int:
        """The most numbers that a block of this shape can have; a larger file is not read."""
        of_layer, total = layer_sizes(shape), 0
        for declared in cls._stored().values():
            numbers = prod(of_layer[size if isinstance(size, str) else size.most] for size in declared.sizes)
            total += numbers if declared.max_numbers is None else min(numbers, declared.max_numbers)
        return total

    def stored_mean(self) -> Tensor | None:
        """The mean of the weights, ``(G, m, n)``, of blocks that know it themselves; of all others it is the model's
        own, or the posterior's `trained_mean`.
        """
        return None

    def uncertain(self) -> Tensor | None:
        """Which weights it is about, ``(G, m, n)`` of bool, where some are certain; None where all are uncertain."""
        return None

    def fault(self) -> str | None:
        """What is wrong with its tensors taken together, in words, or None; `specs` is about each tensor alone."""
        return None

    def largest_value(self, settings: PrecisionSettings) -> float:
        """The largest precision at these settings, or the largest variance of a block that stores variances. Files that
        reach more than float32 can compute with are refused. 0 where the bounds in `specs` exclude that already.
        """
        means = [getattr(self, name) for name, declared in self._stored().items() if declared.mean_of]
        return settings.largest_precision(largest_of(*means)) if means else 0.0

    @classmethod
    def restore(
        cls: type[AnyBlock], attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> AnyBlock:
        """The block that `tensors` and `attributes` described."""
        given = {**cls._absent(), **attributes}
        plain = {name: given[name] for name in cls._plain()}
        return cls(**{name: tensors[name] for name in cls._stored() if name in tensors}, **plain)

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
        means = {name: declared for name, declared in self._stored().items() if declared.mean_of}
        if not means:
            raise PosthocUQError(f"Blocks of the kind {self.kind!r} cannot be added up.")
        changed: dict[str, Tensor] = {}
        for name, declared in means.items():
            add = combined_matrices if declared.properties.get("symmetric") else combined
            changed[name] = add(getattr(self, name), part[name], weights, declared.mean_of)
        return replace(self, **changed)

    def trace_in_basis(self, part: Mapping[str, Tensor]) -> tuple[float, float] | None:
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
        return sum(t.nbytes for t in self.tensors().values())

    def summary(self) -> dict[str, Any]:
        """Columns of the report; `columns` explains them."""
        return {}


def largest_of(*tensors: Tensor) -> float:
    """The largest absolute number of several tensors, 0 if they are empty."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def check_bounds(attributes: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """A whole number among the attributes that must lie in a range which depends on the layer.

    Raises:
        CorruptPosteriorError: it is out of range.
    """
    value: int = attributes[name]
    if not low <= value <= high:
        raise CorruptPosteriorError(f"the attribute '{name}' is {value}, outside {low}..{high}")
    return value


OUTPUTS_ALONE = "outputs"  # in place of a method's name, of a posterior over no weights
FAMILIES: Registry[tuple[str, ...]] = Registry(hidden={OUTPUTS_ALONE: ()})
"""The kinds of blocks that the posteriors of a method are made of, by the method's name. Files need it, and `methods`,
which stands above them, fills it."""


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
