"""Posteriors by message passing: the prior and what the data said, apart from each other, as natural parameters.

The precision of a weight is ``prior_precision + precision`` and its mean ``(prior_precision * prior_mean + field) /
(prior_precision + precision)``. Where a layer has a bias, the bias may
belong to inputs from which a constant `shift` is subtracted, ``W (x - shift) + b'``; such weights are much less
correlated. The posterior is over ``W`` and ``b = b' - W shift`` all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError
from posthoc_uq.core.numerics import cholesky
from posthoc_uq.core.options import Count
from posthoc_uq.core.records import Record
from posthoc_uq.posteriors.block import (
    GROUPS,
    INPUTS,
    OUTPUTS,
    Block,
    Factor,
    Settings,
    Shape,
    Stored,
    largest_of,
    log_sum,
)
from posthoc_uq.posteriors.covariance import IndependentRows, RowCovariance
from posthoc_uq.posteriors.laplace import LARGEST_BYTES


def moved(inputs: Tensor, shift: Tensor) -> Tensor:
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


class MovedRows(RowCovariance):
    """The rows of weights with a moved bias."""

    shift: Tensor

    def __init__(self, marginal: Tensor, shift: Tensor, inner: RowCovariance) -> None:
        super().__init__(marginal)
        self.register_buffer("shift", shift)
        self.inner = inner

    def quadratic(self, mean: Tensor) -> Tensor:
        return self.inner.quadratic(moved(mean, self.shift))

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        return self.inner.covariance(
            moved(mean, self.shift), covariance
        )  # a bias is certain to be multiplied with 1


class FullRows(RowCovariance):
    """Independent rows, each with a covariance ``(G, m, n, n)``."""

    matrices: Tensor

    def __init__(self, matrices: Tensor) -> None:
        super().__init__(matrices.diagonal(dim1=-2, dim2=-1).contiguous())
        self.register_buffer("matrices", matrices)

    def quadratic(self, mean: Tensor) -> Tensor:
        wide = as_double(mean)
        return torch.einsum("rgi,goij,rgj->rgo", wide, as_double(self.matrices), wide).to(mean)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        matrices = self.matrices[0].to(mean)
        variances = torch.einsum("ri,oij,rj->ro", mean, matrices, mean)
        if covariance is not None:
            variances = variances + torch.einsum("oij,rij->ro", matrices, covariance)
        return torch.diag_embed(variances)


class MessageFactor(Factor):
    """Independent weights of variances ``(G, m, n)``, with a moved bias."""

    def __init__(self, variances: Tensor, shift: Tensor) -> None:
        self.variances, self._shift = variances, shift

    def transform(self, normals: Tensor) -> Tensor:
        return _returned(normals * self.variances.sqrt(), self._shift)

    def variance(self) -> Tensor:
        return _with_shift(self.variances, self._shift)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        rows = (moved(jacobians, self._shift) * self.variances.sqrt().to(jacobians)).flatten(1)
        return rows @ rows.T

    def log_determinant(self) -> Tensor:
        return -log_sum(self.variances)  # moving the bias has the determinant 1

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        return MovedRows(self.variance(), self._shift, IndependentRows(self.variances))


class JointFactor(Factor):
    """Rows with full precisions ``R R^T``, ``(G, m, n, n)`` in float64, with a moved bias."""

    def __init__(self, root: Tensor, shift: Tensor, like: Tensor) -> None:
        self.root = root
        self._shift, self._like = shift, like

    def transform(self, normals: Tensor) -> Tensor:
        columns = normals.to(self.root).unsqueeze(-1)
        drawn = torch.linalg.solve_triangular(self.root.transpose(-1, -2), columns, upper=True)
        return _returned(drawn.squeeze(-1), self._shift).to(normals)

    def _covariance(self) -> Tensor:
        return torch.cholesky_inverse(self.root)

    def variance(self) -> Tensor:
        """The diagonal of ``T S T^T``, where T gives the layer's weights from those with the moved bias."""
        covariance, shift = self._covariance(), self._shift.to(self.root)
        direction = -shift
        direction[-1] = 1.0
        bias = torch.einsum("i,goij,j->go", direction, covariance, direction)
        own = covariance.diagonal(dim1=-2, dim2=-1)
        return torch.cat([own[..., :-1], bias.unsqueeze(-1)], -1).to(self._like)

    def whiten(self, jacobians: Tensor) -> Tensor:
        columns = moved(jacobians.to(self.root), self._shift).permute(1, 2, 3, 0)
        return torch.linalg.solve_triangular(self.root, columns, upper=False).flatten(0, 2).T

    def quadratic(self, jacobians: Tensor) -> Tensor:
        rows = self.whiten(jacobians)
        return (rows @ rows.T).to(jacobians)

    def log_determinant(self) -> Tensor:
        return 2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum()

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        inner = FullRows(self._covariance().to(self._like))
        return MovedRows(self.variance(), self._shift, inner)


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
    makes = MessageFactor
    fields: ClassVar[type[Record]] = MessagesFields
    trained = True
    tunable: ClassVar[frozenset[str]] = frozenset({"scale"})
    settled: ClassVar[frozenset[str]] = frozenset({"prior_precision"})
    columns: ClassVar[Mapping[str, str]] = {
        "median sd, learned": "standard deviation of the weights; the median share of a weight's precision that is "
        "from the data"
    }

    prior_mean: Annotated[Tensor, Stored(GROUPS, OUTPUTS, INPUTS)]
    prior_precision: Annotated[Tensor, Stored(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    field: Annotated[Tensor, Stored(GROUPS, OUTPUTS, INPUTS)]
    precision: Annotated[Tensor, Stored(GROUPS, OUTPUTS, INPUTS, non_negative=True)]
    shift: Annotated[Tensor, Stored(INPUTS)]
    samples: int

    def _ratio(self, settings: Settings) -> float:
        return self.samples / float(settings.scale)

    def total(self) -> Tensor:
        """The precision of the posterior."""
        return as_double(self.prior_precision) + as_double(self.precision)

    def moved_mean(self) -> Tensor:
        """Of the weights with the moved bias, in float64."""
        pull = as_double(self.prior_precision) * as_double(self.prior_mean)
        return (pull + as_double(self.field)) / self.total()

    def factor(self, settings: Settings) -> Factor:
        return MessageFactor((self._ratio(settings) / self.total()).to(self.field), self.shift)

    @cached_property
    def _mean(self) -> Tensor:
        return _returned(self.moved_mean(), as_double(self.shift))

    def stored_mean(self) -> Tensor:
        return self._mean

    def largest_value(self, settings: Settings) -> float:
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
    makes = JointFactor

    precision: Annotated[
        Tensor, Stored(GROUPS, OUTPUTS, INPUTS, INPUTS, max_numbers=LARGEST_BYTES // 8, symmetric=True)
    ]

    def total(self) -> Tensor:
        return as_double(self.precision) + torch.diag_embed(as_double(self.prior_precision))

    def moved_mean(self) -> Tensor:
        pull = as_double(self.prior_precision) * as_double(self.prior_mean) + as_double(self.field)
        return torch.cholesky_solve(pull.unsqueeze(-1), cholesky(self.total())).squeeze(-1)

    def factor(self, settings: Settings) -> Factor:
        root = cholesky(self.total()) / self._ratio(settings) ** 0.5
        return JointFactor(root, self.shift, self.field)

    def largest_value(self, settings: Settings) -> float:
        precision = largest_of(self.precision) * float(settings.scale) / self.samples
        try:
            root = cholesky(self.total()) / self._ratio(settings) ** 0.5
        except NonFiniteError:
            return precision  # and `fault` says what is wrong
        wide = JointFactor(root, as_double(self.shift), root)
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
