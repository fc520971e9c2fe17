"""The diagonal posterior: ``P = scale * d + prior_precision`` with the exact diagonal ``d`` of the Fisher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.posteriors.blocks import Block, Factor, Settings, Shape, largest_of, log_sum, reached
from posthoc_uq.posteriors.combining import Weights, combined
from posthoc_uq.posteriors.covariance_form import CovarianceForm
from posthoc_uq.posteriors.row_covariance import IndependentRows, RowCovariance
from posthoc_uq.posteriors.specs import TensorSpec


class DiagonalFactor(Factor):
    """A diagonal precision ``(G, m, n)``."""

    def __init__(self, precision: Tensor, like: Tensor) -> None:
        self.precision = precision.to(like)
        self._log_determinant = log_sum(precision)

    def transform(self, normals: Tensor) -> Tensor:
        return normals * self.precision.rsqrt()

    def independent(self, generator: torch.Generator) -> tuple[None, Tensor]:
        return None, self.variance()

    def variance(self) -> Tensor:
        return self.precision.reciprocal()

    def quadratic(self, jacobians: Tensor) -> Tensor:
        rows = (jacobians * self.precision.rsqrt()).flatten(1)
        return rows @ rows.T

    def form(self) -> CovarianceForm:
        return CovarianceForm(self.precision.reciprocal())

    def log_determinant(self) -> Tensor:
        return self._log_determinant

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        return IndependentRows(self.variance())


class DiagonalBlock(Block):
    """Keeps ``d``, the mean square of the per-sample gradients, ``(G, m, n)``."""

    kind = "diagonal"
    makes = DiagonalFactor
    own_priors = True

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal = diagonal

    def factor(self, settings: Settings) -> DiagonalFactor:
        precision = settings.scale * as_double(self.diagonal) + settings.prior_precision
        return DiagonalFactor(precision, self.diagonal)

    def tensors(self) -> dict[str, Tensor]:
        return {"diagonal": self.diagonal}

    def attributes(self) -> dict[str, Any]:
        return {}

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return {"diagonal": TensorSpec(shape, non_negative=True)}

    def reach(self, settings: Settings) -> float:
        return reached(settings, largest_of(self.diagonal))

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DiagonalBlock:
        return cls(tensors["diagonal"])

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> DiagonalBlock:
        return DiagonalBlock(combined(self.diagonal, part["diagonal"], weights, "diagonal"))

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        return scale * torch.diag_embed(self.diagonal.flatten(1))
