"""The dense posterior: the full Fisher over all parameters of its layers, with the correlations between layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.devices import as_double, host_double
from posthoc_uq.errors import NonFiniteError
from posthoc_uq.posteriors.blocks import Block, Factor, Settings, Shape, largest_of, reached
from posthoc_uq.posteriors.combining import Weights, combined_matrices
from posthoc_uq.posteriors.numerics import cholesky, positive_part
from posthoc_uq.posteriors.row_covariance import DenseRows, RowCovariance
from posthoc_uq.posteriors.specs import TensorSpec

LARGEST_BYTES = 4 * 2**30  # the most that the Fisher may take in float64


class DenseFactor(Factor):
    """``P = R R^T`` over the parameters of all layers, flattened one after the other; tensors are ``(..., 1,
    1, parameters)``.
    """

    def __init__(self, root: Tensor, like: Tensor) -> None:
        self.root = root
        self._like = like

    def _solve(self, rows: Tensor) -> Tensor:
        """``R^-1`` applied to rows ``(q, parameters)``."""
        return torch.linalg.solve_triangular(self.root, rows.to(self.root).T, upper=False).T

    def whiten(self, jacobians: Tensor) -> Tensor:
        return self._solve(jacobians.flatten(1))

    def transform(self, normals: Tensor) -> Tensor:
        rows = normals.flatten(1).to(self.root)
        return (
            torch.linalg.solve_triangular(self.root.T, rows.T, upper=True)
            .T.to(normals)
            .reshape(normals.shape)
        )

    def covariance(self) -> Tensor:
        """``P^-1``, ``(parameters, parameters)``."""
        return torch.cholesky_inverse(self.root)

    def variance(self) -> Tensor:
        return self.covariance().diagonal().to(self._like).reshape(1, 1, -1)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        rows = self._solve(jacobians.flatten(1))
        return (rows @ rows.T).to(jacobians)

    def log_determinant(self) -> Tensor:
        return 2 * self.root.diagonal().log().sum()

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        groups, outputs, inputs = shape
        covariance = self.covariance()[
            start : start + groups * outputs * inputs, start : start + groups * outputs * inputs
        ]
        covariance = covariance.to(self._like)
        return DenseRows(covariance.diagonal().reshape(shape), covariance)

    def bytes(self) -> int:
        return self.root.numel() * self.root.element_size()


class DenseBlock(Block):
    """Keeps the Fisher ``(parameters, parameters)`` of all layers together."""

    kind = "dense"
    makes = DenseFactor
    own_priors = True
    joint = True

    def __init__(self, fisher: Tensor) -> None:
        self.fisher = fisher

    def factor(self, settings: Settings) -> DenseFactor:
        fisher = as_double(self.fisher)
        prior = host_double(settings.prior_precision).to(fisher.device)
        prior = prior.expand(1, 1, fisher.shape[0]).flatten()
        try:
            root = cholesky(settings.scale * fisher + prior.diag())
        except NonFiniteError:  # rounding of the summed Fisher left an eigenvalue below -prior_precision
            root = cholesky(settings.scale * positive_part(fisher) + prior.diag())
        return DenseFactor(root, self.fisher)

    def tensors(self) -> dict[str, Tensor]:
        return {"fisher": self.fisher}

    def attributes(self) -> dict[str, Any]:
        return {}

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return {"fisher": TensorSpec((shape[-1], shape[-1]), symmetric=True)}

    @classmethod
    def most_numbers(cls, shape: Shape) -> int:
        return min(shape[-1] ** 2, LARGEST_BYTES // 8)

    def reach(self, settings: Settings) -> float:
        return reached(settings, largest_of(self.fisher))

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DenseBlock:
        return cls(tensors["fisher"])

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> DenseBlock:
        return DenseBlock(combined_matrices(self.fisher, part["fisher"], weights, "matrix"))

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        return scale * self.fisher.unsqueeze(0)
