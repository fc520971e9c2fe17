"""The mean-field posterior: independent weights with variances that were optimised, not derived from a Fisher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.fields import Field, Whole
from posthoc_uq.posteriors.blocks import Block, Factor, Settings, Shape, bounded, largest_of, log_sum
from posthoc_uq.posteriors.covariance_form import CovarianceForm
from posthoc_uq.posteriors.row_covariance import IndependentRows, RowCovariance
from posthoc_uq.posteriors.specs import TensorSpec


class MeanFieldFactor(Factor):
    """Independent variances ``(G, m, n)``; a weight whose variance is zero is certain."""

    def __init__(self, variances: Tensor) -> None:
        self.variances = variances

    def transform(self, normals: Tensor) -> Tensor:
        return normals * self.variances.sqrt()

    def independent(self, generator: torch.Generator) -> tuple[None, Tensor]:
        return None, self.variance()

    def variance(self) -> Tensor:
        return self.variances

    def quadratic(self, jacobians: Tensor) -> Tensor:
        rows = (jacobians * self.variances.sqrt()).flatten(1)
        return rows @ rows.T

    def form(self) -> CovarianceForm:
        return CovarianceForm(self.variances)

    def log_determinant(self) -> Tensor:
        return -log_sum(self.variances)

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        return IndependentRows(self.variances)


class MeanFieldBlock(Block):
    """Keeps the variances ``(G, m, n)`` of a variational posterior as they were found.

    There is no prior to add: it was a part of the objective. The one setting that enters is ``scale``, which begins at
    the number of samples N: variances are multiplied with ``N / scale``, so that a larger one gives a colder posterior
    (Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?").

    Attributes:
        variances: at ``scale = samples``.
        samples: N, the number of training samples.
    """

    kind = "mean_field"
    makes = MeanFieldFactor
    fields: ClassVar[Mapping[str, Field]] = {"samples": Whole(1)}
    trained = True
    tunable: ClassVar[frozenset[str]] = frozenset({"scale"})
    settled: ClassVar[frozenset[str]] = frozenset({"prior_precision"})
    columns: ClassVar[Mapping[str, str]] = {
        "median sd, largest sd": "standard deviations of the layer's weights"
    }

    def __init__(self, variances: Tensor, samples: int) -> None:
        self.variances = variances
        self.samples = samples

    def factor(self, settings: Settings) -> MeanFieldFactor:
        if settings.scale == self.samples:
            return MeanFieldFactor(self.variances)
        scaled = as_double(self.variances) * (self.samples / settings.scale)
        return MeanFieldFactor(scaled.to(self.variances))

    def tensors(self) -> dict[str, Tensor]:
        return {"variances": self.variances}

    def attributes(self) -> dict[str, Any]:
        return {"samples": self.samples}

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return {"variances": TensorSpec(shape, non_negative=True)}

    def reach(self, settings: Settings) -> float:
        return largest_of(self.variances) * self.samples / float(settings.scale)

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MeanFieldBlock:
        return cls(tensors["variances"], bounded(attributes, "samples", 1, 2**62))

    def dense(self, scale: float = 1.0, residual_weight: float = 1.0) -> Tensor:
        raise PosthocUQError(
            "A mean-field posterior keeps variances, not a Fisher information; see Posterior.variance()."
        )

    def summary(self) -> dict[str, Any]:
        deviations = self.variances.detach().sqrt().flatten()
        return {"median sd": float(torch.median(deviations)), "largest sd": float(deviations.max())}
