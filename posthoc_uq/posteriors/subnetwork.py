"""A dense posterior over some single weights; all others are certain (Daxberger et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from posthoc_uq.devices import as_double, host_double
from posthoc_uq.errors import CorruptPosteriorError, NonFiniteError
from posthoc_uq.fields import Field, Whole
from posthoc_uq.posteriors.blocks import Block, Factor, Settings, Shape, bounded, largest_of, reached
from posthoc_uq.posteriors.combining import Weights, combined_matrices
from posthoc_uq.posteriors.dense import LARGEST_BYTES, DenseFactor
from posthoc_uq.posteriors.median_model import unpacked
from posthoc_uq.posteriors.numerics import cholesky, positive_part
from posthoc_uq.posteriors.specs import TensorSpec


class SubnetworkFactor(Factor):
    """``N(0, P^-1)`` over the chosen weights, and zero for the others; tensors are ``(..., 1, 1, weights)``."""

    def __init__(self, chosen: DenseFactor, index: Tensor, weights: int) -> None:
        self._chosen, self._index, self._weights = chosen, index, weights

    def _of_chosen(self, matrix: Tensor) -> Tensor:
        """The chosen columns of ``(q, 1, 1, weights)``, or of one layer's ``(q, G, m, n)``, ``(q, 1, 1, chosen)``."""
        return matrix.flatten(1)[:, self._index.to(matrix.device)].reshape(len(matrix), 1, 1, -1)

    def _spread(self, values: Tensor) -> Tensor:
        """Numbers of the chosen weights ``(..., 1, 1, chosen)`` among zeros."""
        whole = values.new_zeros(*values.shape[:-1], self._weights)
        return whole.index_copy(-1, self._index.to(values.device), values)

    def transform(self, normals: Tensor) -> Tensor:
        return self._spread(self._chosen.transform(self._of_chosen(normals))).reshape(normals.shape)

    def whiten(self, jacobians: Tensor) -> Tensor:
        return self._chosen.whiten(self._of_chosen(jacobians))

    def variance(self) -> Tensor:
        return self._spread(self._chosen.variance())

    def quadratic(self, jacobians: Tensor) -> Tensor:
        return self._chosen.quadratic(self._of_chosen(jacobians))

    def log_determinant(self) -> Tensor:
        """Over the chosen weights."""
        return self._chosen.log_determinant()

    def bytes(self) -> int:
        return self._chosen.bytes()


class SubnetworkBlock(Block):
    """Keeps the Fisher ``(chosen, chosen)`` of the chosen weights of all layers together, and which they are.

    Attributes:
        fisher: ``(chosen, chosen)``.
        kept: one bit for each weight of the layers, packed eight to a byte, the first the highest.
        weights: of the layers, chosen or not.
    """

    kind = "subnetwork"
    makes = SubnetworkFactor
    own_priors = True
    joint = True
    fields: ClassVar[Mapping[str, Field]] = {"chosen": Whole(1), "weights": Whole(1)}
    heads_note = "head='moments' takes the chosen weights as independent, with their exact variances"

    def __init__(self, fisher: Tensor, kept: Tensor, weights: int) -> None:
        self.fisher, self.kept, self.weights = fisher, kept, weights

    @cached_property
    def index(self) -> Tensor:
        """The places of the chosen weights, ascending, ``(chosen,)``."""
        return unpacked(self.kept, self.weights).nonzero().flatten()

    def factor(self, settings: Settings) -> SubnetworkFactor:
        fisher = as_double(self.fisher)
        prior = host_double(settings.prior_precision).expand(1, 1, self.weights).flatten()
        own = prior[self.index.cpu()].to(fisher.device).diag()
        try:
            root = cholesky(settings.scale * fisher + own)
        except (
            NonFiniteError
        ):  # as for the dense posterior: rounding left an eigenvalue below -prior_precision
            root = cholesky(settings.scale * positive_part(fisher) + own)
        return SubnetworkFactor(DenseFactor(root, self.fisher), self.index, self.weights)

    def tensors(self) -> dict[str, Tensor]:
        return {"fisher": self.fisher, "kept": self.kept}

    def attributes(self) -> dict[str, Any]:
        return {"chosen": len(self.fisher), "weights": self.weights}

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        weights = shape[-1]
        chosen = bounded(attributes, "chosen", 1, weights)
        if attributes.get("weights") != weights:
            raise CorruptPosteriorError(f"A subnetwork of {weights} weights is described by another number.")
        return {
            "fisher": TensorSpec((chosen, chosen), symmetric=True),
            "kept": TensorSpec((-(-weights // 8),), bits=True, largest=255.0),
        }

    @classmethod
    def most_numbers(cls, shape: Shape) -> int:
        return min(shape[-1] ** 2, LARGEST_BYTES // 8) + shape[-1]

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        whole = self.fisher.new_zeros(self.weights, self.weights)
        whole[self.index.unsqueeze(1), self.index] = scale * self.fisher
        return whole.unsqueeze(0)

    def uncertain(self) -> Tensor:
        return unpacked(self.kept, self.weights).reshape(1, 1, -1)

    def fault(self) -> str | None:
        counted = int(unpacked(self.kept, 8 * len(self.kept)).sum())
        return (
            None if counted == len(self.index) == len(self.fisher) else "has another number of chosen weights"
        )

    def reach(self, settings: Settings) -> float:
        return reached(settings, largest_of(self.fisher))

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SubnetworkBlock:
        block = cls(tensors["fisher"], tensors["kept"], int(attributes["weights"]))
        fault = block.fault()
        if fault is not None:
            raise CorruptPosteriorError(f"A subnetwork {fault}.")
        return block

    def combined(self, part: Mapping[str, Tensor], weights: Weights) -> SubnetworkBlock:
        fisher = combined_matrices(self.fisher, part["fisher"], weights, "matrix")
        return SubnetworkBlock(fisher, self.kept, self.weights)
