"""KFAC and EFB: precisions that are diagonal in a Kronecker-factored eigenbasis.

``P = (U_G x U_A) diag(scale * lambda + prior_precision) (U_G x U_A)^T``. KFAC (Martens, Grosse 2015; Ritter,
Botev, Barber 2018) takes ``lambda = s_G s_A^T`` from the eigenvalues of the two Grams; EFB (George et al.
2018) takes the exact second moments in that basis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.fields import Field, Flag
from posthoc_uq.posteriors.blocks import Block, Factor, Settings, Shape, largest_of, log_sum, reached
from posthoc_uq.posteriors.combining import Weights, combined, combined_matrices
from posthoc_uq.posteriors.covariance_form import CovarianceForm
from posthoc_uq.posteriors.numerics import eigh_descending
from posthoc_uq.posteriors.row_covariance import EigenbasisRows, RowCovariance
from posthoc_uq.posteriors.specs import TensorSpec


class KroneckerFactor(Factor):
    """A precision with eigenvalues ``(G, m, n)`` in the basis ``output_basis x input_basis``."""

    def __init__(self, input_basis: Tensor, output_basis: Tensor, precision: Tensor) -> None:
        self._input_basis = input_basis
        self._output_basis = output_basis
        self.precision = precision.to(input_basis)
        self._log_determinant = log_sum(precision)

    def transform(self, normals: Tensor) -> Tensor:
        return self._output_basis @ (normals * self.precision.rsqrt()) @ self._input_basis.transpose(-1, -2)

    def variance(self) -> Tensor:
        inner = self._output_basis.square() @ self.precision.reciprocal()
        return inner @ self._input_basis.square().transpose(-1, -2)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        rotated = self._output_basis.transpose(-1, -2) @ jacobians @ self._input_basis
        rows = (rotated * self.precision.rsqrt()).flatten(1)
        return rows @ rows.T

    def form(self) -> CovarianceForm:
        return CovarianceForm(self.precision.reciprocal(), (self._input_basis, self._output_basis))

    def log_determinant(self) -> Tensor:
        return self._log_determinant

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        return EigenbasisRows(
            self.variance(), self._input_basis, self._output_basis, self.precision.reciprocal()
        )

    def bytes(self) -> int:
        return self.precision.numel() * self.precision.element_size()


class _EigenbasisBlock(Block):
    """Shared by KFAC and EFB: full eigenbases of both Grams."""

    makes = KroneckerFactor

    def __init__(self, input_basis: Tensor, output_basis: Tensor) -> None:
        self.input_basis = input_basis
        self.output_basis = output_basis

    def eigenvalues_matrix(self) -> Tensor:
        """Eigenvalues of the Fisher approximation, ``(G, m, n)``."""
        raise AssertionError("each family defines its own eigenvalues")

    def factor(self, settings: Settings) -> KroneckerFactor:
        precision = settings.scale * as_double(self.eigenvalues_matrix()) + settings.prior_precision
        return KroneckerFactor(self.input_basis, self.output_basis, precision)

    def attributes(self) -> dict[str, Any]:
        return {}

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        vectors = torch.einsum("gop,giq->goipq", self.output_basis, self.input_basis)
        vectors = vectors.flatten(3).flatten(1, 2)
        return (
            scale * (vectors * self.eigenvalues_matrix().flatten(1).unsqueeze(1)) @ vectors.transpose(-1, -2)
        )


def _bases(shape: Shape) -> dict[str, TensorSpec]:
    groups, outputs, inputs = shape
    return {
        "input_basis": TensorSpec((groups, inputs, inputs), orthonormal=True),
        "output_basis": TensorSpec((groups, outputs, outputs), orthonormal=True),
    }


_GRAMS = ("input_gram", "output_gram", "positions")
_TINY = torch.finfo(torch.float64).tiny


class KroneckerBlock(_EigenbasisBlock):
    """KFAC: eigenvectors and eigenvalues of the input Gram ``A`` and of the gradient Gram ``G``.

    Args:
        input_basis: ``(G, n, n)``.
        output_basis: ``(G, m, m)``.
        input_values: ``(G, n)``.
        output_values: ``(G, m)``.
        grams: None, or ``input_gram`` (G, n, n), ``output_gram`` (G, m, m) and ``positions``, the mean number of
            positions of a sample, over which the second one is a mean; by these data can come in and go out.
    """

    kind: ClassVar[str] = "kfac"
    optional_fields: ClassVar[Mapping[str, Field]] = {"grams": Flag()}

    def __init__(
        self,
        input_basis: Tensor,
        output_basis: Tensor,
        input_values: Tensor,
        output_values: Tensor,
        grams: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(input_basis, output_basis)
        self.input_values = input_values
        self.output_values = output_values
        self.grams = None if grams is None else {name: grams[name] for name in _GRAMS}

    def eigenvalues_matrix(self) -> Tensor:
        return self.output_values.unsqueeze(-1) * self.input_values.unsqueeze(-2)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "input_basis": self.input_basis,
            "output_basis": self.output_basis,
            "input_eigenvalues": self.input_values,
            "output_eigenvalues": self.output_values,
            **(self.grams or {}),
        }

    def attributes(self) -> dict[str, Any]:
        return {} if self.grams is None else {"grams": True}

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        groups, outputs, inputs = shape
        grams = {
            "input_gram": TensorSpec((groups, inputs, inputs), symmetric=True, exact=True),
            "output_gram": TensorSpec((groups, outputs, outputs), symmetric=True, exact=True),
            "positions": TensorSpec((), non_negative=True, exact=True),
        }
        return {
            **_bases(shape),
            "input_eigenvalues": TensorSpec((groups, inputs), non_negative=True),
            "output_eigenvalues": TensorSpec((groups, outputs), non_negative=True),
            **(grams if attributes.get("grams") else {}),
        }

    @classmethod
    def most_numbers(cls, shape: Shape) -> int:
        return sum(spec.numbers for spec in cls.specs(shape, {"grams": True}).values())

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> KroneckerBlock:
        return cls(
            tensors["input_basis"],
            tensors["output_basis"],
            tensors["input_eigenvalues"],
            tensors["output_eigenvalues"],
            tensors if attributes.get("grams") else None,
        )

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> KroneckerBlock:
        kept = self.grams
        if kept is None:
            return super().combined(part, weights)  # type: ignore[return-value]
        positions = combined(kept["positions"], part["positions"], weights, "number of positions")
        whole = as_double(positions).clamp(min=_TINY)
        by_positions = Weights(  # the second Gram is a mean over positions
            weights.kept * float(as_double(kept["positions"]) / whole),
            weights.part * float(as_double(part["positions"]) / whole),
            weights.precision,
        )
        grams = {
            "input_gram": combined_matrices(
                kept["input_gram"], part["input_gram"], weights, "Gram of the inputs"
            ),
            "output_gram": combined_matrices(
                kept["output_gram"],
                part["output_gram"],
                by_positions,
                "Gram of the output gradients",
            ),
            "positions": positions,
        }
        input_values, input_basis = eigh_descending(grams["input_gram"])
        output_values, output_basis = eigh_descending(grams["output_gram"])
        return KroneckerBlock(input_basis, output_basis, input_values, output_values, grams)

    def reach(self, settings: Settings) -> float:
        largest = largest_of(self.input_values) * largest_of(self.output_values)
        return reached(settings, largest)


class EigenvalueCorrectedBlock(_EigenbasisBlock):
    """EFB: the Kronecker-factored eigenbasis with exact second moments ``(G, m, n)``."""

    kind: ClassVar[str] = "efb"

    def __init__(self, input_basis: Tensor, output_basis: Tensor, eigenvalues: Tensor) -> None:
        super().__init__(input_basis, output_basis)
        self.eigenvalues = eigenvalues

    def eigenvalues_matrix(self) -> Tensor:
        return self.eigenvalues

    def tensors(self) -> dict[str, Tensor]:
        return {
            "input_basis": self.input_basis,
            "output_basis": self.output_basis,
            "eigenvalues": self.eigenvalues,
        }

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return {**_bases(shape), "eigenvalues": TensorSpec(shape, non_negative=True)}

    @classmethod
    def restore(
        cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> EigenvalueCorrectedBlock:
        return cls(tensors["input_basis"], tensors["output_basis"], tensors["eigenvalues"])

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> EigenvalueCorrectedBlock:
        eigenvalues = combined(self.eigenvalues, part["eigenvalues"], weights, "eigenvalues")
        return EigenvalueCorrectedBlock(self.input_basis, self.output_basis, eigenvalues)

    def covered(self, part: Mapping[str, Tensor]) -> tuple[float, float] | None:
        if "inside" not in part:
            return None
        whole = float(as_double(part["eigenvalues"]).sum())
        return whole * float(part["inside"]), whole

    def reach(self, settings: Settings) -> float:
        return reached(settings, largest_of(self.eigenvalues))
