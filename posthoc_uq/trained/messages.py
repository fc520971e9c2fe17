"""Posteriors by message passing: the prior and what the data said, apart from each other, as natural parameters.

The precision of a weight is ``prior_precision + precision`` and its mean ``(prior_precision * prior_mean + field) /
(prior_precision + precision)``. Where a layer has a bias, the bias may
belong to inputs from which a constant `shift` is subtracted, ``W (x - shift) + b'``; such weights are much less
correlated. The posterior is over ``W`` and ``b = b' - W shift`` all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError
from posthoc_uq.core.numerics import cholesky, constant
from posthoc_uq.core.options import Count
from posthoc_uq.core.records import Record
from posthoc_uq.posteriors.block import (
    GROUPS,
    INPUTS,
    OUTPUTS,
    Block,
    MatrixShape,
    PrecisionSettings,
    TensorField,
    largest_of,
)
from posthoc_uq.posteriors.covariance import Covariance, DenseLayer, DenseRows, Variances
from posthoc_uq.posteriors.laplace import LARGEST_BYTES


def shift_inputs(inputs: Tensor, shift: Tensor) -> Tensor:
    """Inputs ``(..., n)``, the last of them the bias's, as those of the weights that `shift` ``(n,)`` belongs to; of
    Jacobians likewise.
    """
    return inputs - inputs[..., -1:] * shift.to(inputs)


def _returned(deviations: Tensor, shift: Tensor) -> Tensor:
    """Weights with a moved bias, ``(..., n)``, as those of the layer: ``b = b' - W shift``."""
    bias = deviations[..., -1] - (deviations * shift.to(deviations)).sum(-1)
    return torch.cat([deviations[..., :-1], bias.unsqueeze(-1)], -1)


def _with_shift(variances: Tensor, shift: Tensor) -> Tensor:
    """Variances of independent weights with a moved bias as those of the layer's weights."""
    bias = variances[..., -1] + (variances * shift.square()).sum(-1)
    return torch.cat([variances[..., :-1], bias.unsqueeze(-1)], -1)


class Moved(Covariance):
    """The covariance of weights with a moved bias, as that of the layer's weights.

    Args:
        inner: of the weights with the moved bias.
        shift: ``(n,)``.
    """

    def __init__(self, inner: Covariance, shift: Tensor) -> None:
        self._inner, self._shift = inner, shift

    def transform(self, normals: Tensor) -> Tensor:
        return _returned(self._inner.transform(normals), self._shift)

    def variance(self) -> Tensor:
        return _with_shift(self._inner.variance(), self._shift)

    def times_precision(self, matrices: Tensor) -> Tensor:
        # the moved bias is b + W shift, and the map back its transpose
        back, moved = -as_double(self._shift), matrices[..., -1] + (matrices * as_double(self._shift)).sum(-1)
        inner = torch.cat([matrices[..., :-1], moved.unsqueeze(-1)], -1)
        return shift_inputs(self._inner.times_precision(inner), back)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        return self._inner.quadratic(shift_inputs(jacobians, self._shift))

    def whiten(self, jacobians: Tensor) -> Tensor:
        return self._inner.whiten(shift_inputs(jacobians, self._shift))

    def log_determinant(self) -> Tensor:
        return self._inner.log_determinant()  # moving the bias has the determinant 1

    def of_layer(self, start: int, shape: MatrixShape, whole: MatrixShape) -> Covariance:
        outputs = copy.copy(self)
        outputs._inner = self._inner.of_layer(start, shape, whole)
        return outputs

    def traceable(self, shape: MatrixShape, covariances: bool) -> Covariance:
        outputs = copy.copy(self)
        outputs._inner = self._inner.traceable(shape, covariances)
        return outputs

    @constant
    def _marginal(self) -> Tensor:
        return self.variance()

    # A bias is certain to be multiplied with 1, so that moving it leaves the inputs' variances.

    def output_variance(self, mean: Tensor, variance: Tensor | None = None) -> Tensor:
        result = self._inner.output_variance(shift_inputs(mean, self._shift))
        if variance is None:
            return result
        return result + torch.einsum("goi,rgi->rgo", self._marginal.to(variance), variance)

    def output_covariance(
        self, mean: Tensor, covariance: Tensor | None = None, *, joint: bool = False
    ) -> Tensor:
        return self._inner.output_covariance(shift_inputs(mean, self._shift), covariance, joint=joint)


class MovedRows(Moved):
    """The same of rows with full covariances, `DenseRows`."""

    def variance(self) -> Tensor:
        """The diagonal of ``T S T^T``, where T gives the layer's weights from those with the moved bias."""
        matrices, shift = self._matrices(), as_double(self._shift)
        direction = -shift
        direction[-1] = 1.0
        bias = torch.einsum("i,goij,j->go", direction, matrices, direction)
        own = matrices.diagonal(dim1=-2, dim2=-1)
        return torch.cat([own[..., :-1], bias.unsqueeze(-1)], -1).to(self._shift)

    def _matrices(self) -> Tensor:
        return (
            self._inner.rows
            if isinstance(self._inner, DenseLayer)
            else cast(DenseRows, self._inner).matrices()
        )


class MessagesFields(Record):
    """The number of training samples."""

    samples: Count


@dataclass(eq=False, repr=False)
class MessagesBlock(Block):
    """Independent weights: all tensors ``(G, m, n)``, but for `shift`.

    ``scale`` begins at the number of samples N; variances are multiplied with ``N / scale``, and means stay.

    Attributes:
        prior_mean: of the weights with the moved bias.
        prior_precision: likewise.
        field: what the data say of the mean: precision times mean.
        precision: what the data say.
        shift: ``(n,)``, subtracted from the inputs; 0 for the bias, and where there is none.
        samples: N, of the data that are in it.
    """

    kind = "messages"
    makes = Moved
    fields: ClassVar[type[Record]] = MessagesFields
    trained = True
    tunable: ClassVar[frozenset[str]] = frozenset({"scale"})
    fixed_by_training: ClassVar[frozenset[str]] = frozenset({"prior_precision"})
    columns: ClassVar[Mapping[str, str]] = {
        "median sd, learned": "standard deviation of the weights; the median share of a weight's precision that is "
        "from the data"
    }

    prior_mean: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS)]
    prior_precision: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    field: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS)]
    precision: Annotated[Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    shift: Annotated[Tensor, TensorField(INPUTS)]
    samples: int

    def _ratio(self, settings: PrecisionSettings) -> float:
        return self.samples / float(settings.scale)

    def total(self) -> Tensor:
        """The precision of the posterior."""
        return as_double(self.prior_precision) + as_double(self.precision)

    def moved_mean(self) -> Tensor:
        """Of the weights with the moved bias, in float64."""
        pull = as_double(self.prior_precision) * as_double(self.prior_mean)
        return (pull + as_double(self.field)) / self.total()

    def covariance(self, settings: PrecisionSettings) -> Moved:
        return Moved(Variances((self._ratio(settings) / self.total()).to(self.field)), self.shift)

    @constant
    def _mean(self) -> Tensor:
        return _returned(self.moved_mean(), as_double(self.shift))

    def stored_mean(self) -> Tensor:
        return self._mean

    def largest_value(self, settings: PrecisionSettings) -> float:
        total = self.total()
        if not float(total.min()) > 0:
            return float("inf")
        return largest_of(
            _with_shift(self._ratio(settings) / total, as_double(self.shift)), self.stored_mean()
        )

    def summary(self) -> dict[str, Any]:
        deviations = self.total().rsqrt().flatten()
        learned = (as_double(self.precision) / self.total()).flatten()
        return {"median sd": float(deviations.median()), "learned": float(learned.median())}


@dataclass(eq=False, repr=False)
class JointMessagesBlock(MessagesBlock):
    """One full Gaussian an output: as `MessagesBlock`, with a `precision` of ``(G, m, n, n)``."""

    kind = "joint_messages"
    makes = MovedRows

    precision: Annotated[
        Tensor, TensorField(GROUPS, OUTPUTS, INPUTS, INPUTS, max_numbers=LARGEST_BYTES // 8, symmetric=True)
    ]

    def total(self) -> Tensor:
        return as_double(self.precision) + torch.diag_embed(as_double(self.prior_precision))

    def moved_mean(self) -> Tensor:
        pull = as_double(self.prior_precision) * as_double(self.prior_mean) + as_double(self.field)
        return torch.cholesky_solve(pull.unsqueeze(-1), cholesky(self.total())).squeeze(-1)

    def covariance(self, settings: PrecisionSettings) -> MovedRows:
        root = cholesky(self.total()) / self._ratio(settings) ** 0.5
        return MovedRows(DenseRows(root, self.field), self.shift)

    def largest_value(self, settings: PrecisionSettings) -> float:
        precision = largest_of(self.precision) * float(settings.scale) / self.samples
        try:
            root = cholesky(self.total()) / self._ratio(settings) ** 0.5
        except NonFiniteError:
            return precision  # and `fault` says what is wrong
        wide = MovedRows(DenseRows(root, root), as_double(self.shift))
        return max(precision, largest_of(wide.variance(), self.stored_mean()))

    def fault(self) -> str | None:
        try:
            cholesky(self.total())
        except NonFiniteError:
            return "has a precision that is not positive definite"
        return None

    def summary(self) -> dict[str, Any]:
        variances = torch.cholesky_inverse(cholesky(self.total())).diagonal(dim1=-2, dim2=-1)
        learned = 1 - as_double(self.prior_precision) * variances
        return {"median sd": float(variances.sqrt().median()), "learned": float(learned.median())}
