"""Spike-and-slab posteriors of latent binary networks: weights that are off with some probability, and else Gaussian.

``w = g (mu z + sd e)`` with ``g ~ Bernoulli(inclusion)``. The factor ``z`` is 1, or a random vector from a flow that
all weights of an input (linear layers), or of an output channel (convolutions), have in common.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from posthoc_uq.fields import Field
from posthoc_uq.posteriors.blocks import Block, Factor, Settings, Shape, largest_of
from posthoc_uq.posteriors.covariance_form import CovarianceForm
from posthoc_uq.posteriors.random_scale import (
    SCALE_FIELDS,
    WITHOUT,
    RandomScale,
    most_of_scale,
    restored_scale,
    scale_specs,
)
from posthoc_uq.posteriors.row_covariance import IndependentRows, RowCovariance
from posthoc_uq.posteriors.specs import TensorSpec


class SpikeFactor(Factor):
    """Independent inclusions and slabs, and what is random in common."""

    centred = False

    def __init__(self, mean: Tensor, variances: Tensor, inclusion: Tensor, scale: RandomScale | None) -> None:
        self._mean, self._variances, self._inclusion, self._scale = mean, variances, inclusion, scale
        self.shared = scale is not None

    def _slab(self, generator: torch.Generator) -> Tensor:
        """The means where the weights are on, for a draw of ``z``."""
        if self._scale is None:
            return self._mean
        z = self._scale.draws(generator, 1)[0]
        return self._mean * self._scale.matrix(z, cast(Shape, tuple(self._mean.shape)), 1.0)

    def draw(self, generator: torch.Generator, like: Tensor) -> Tensor:
        options: dict[str, Any] = {"generator": generator, "dtype": like.dtype}
        slab = self._slab(generator)
        slab = slab + self._variances.sqrt() * torch.randn(like.shape, device="cpu", **options).to(
            like.device
        )
        chosen = torch.rand(like.shape, device="cpu", **options).to(like.device) < self._inclusion
        return torch.where(chosen, slab, torch.zeros_like(slab))

    def independent(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``a c`` and ``a (v + (1 - a) c^2)`` with ``c = mu z``."""
        slab = self._slab(generator)
        spread = self._variances + (1 - self._inclusion) * slab.square()
        return self._inclusion * slab, self._inclusion * spread

    def mean(self) -> Tensor:
        """``E w``, ``(G, m, n)``."""
        mean = self._inclusion * self._mean
        return mean if self._scale is None else mean * self._over("z_mean", 1.0)

    def variance(self) -> Tensor:
        """``a (v + (1 - a) mu^2 E[z]^2 + mu^2 Var z)``."""
        slab = self._mean if self._scale is None else self._mean * self._over("z_mean", 1.0)
        inside = self._variances + (1 - self._inclusion) * slab.square()
        if self._scale is not None:
            inside = inside + self._mean.square() * self._over("z_variance", 0.0)
        return self._inclusion * inside

    def _over(self, name: str, rest: float) -> Tensor:
        assert self._scale is not None
        return self._scale.matrix(self._scale.tensors[name], cast(Shape, tuple(self._mean.shape)), rest)

    def quadratic(self, jacobians: Tensor) -> Tensor:
        rows = (jacobians * self.variance().sqrt()).flatten(1)
        return rows @ rows.T

    def form(self) -> CovarianceForm:
        return CovarianceForm(self.variance())

    def rows(self, start: int, shape: Shape) -> RowCovariance:
        return IndependentRows(self.variance())


class LatentBlock(Block):
    """What both kinds have in common: a mean of their own, no hyperparameter that could be set, perhaps a flow.

    Attributes:
        bias: whether the last column holds biases, which are always on.
        scale: the factor ``z`` of the means, or None.
    """

    columns: ClassVar[Mapping[str, str]] = {
        "density, mean inclusion": "share of the weights that are more likely on than off; mean probability of being on"
    }
    heads_note: ClassVar[str] = (
        "drawn weights are exact; the moments and the linearised head match the mean and the variance of every weight"
    )

    makes = SpikeFactor
    trained = True
    tunable: ClassVar[frozenset[str]] = frozenset()
    settled: ClassVar[frozenset[str]] = frozenset({"prior_precision"})
    bias: bool
    scale: RandomScale | None

    @abstractmethod
    def slabs(self) -> tuple[Tensor, Tensor]:
        """Means, without ``z``, and variances of the weights where they are on, ``(G, m, n)``."""

    @abstractmethod
    def inclusions(self) -> Tensor:
        """Probabilities of being on, ``(G, m, n)``; those of biases are 1."""

    def probabilities(self) -> Tensor:
        """Of being on, ``(G, m, n)``; without the column of biases."""
        inclusion = self.inclusions()
        return inclusion[..., : inclusion.shape[-1] - self.bias]

    def factor(self, settings: Settings) -> SpikeFactor:
        return SpikeFactor(*self.slabs(), self.inclusions(), self.scale)

    def own_mean(self) -> Tensor:
        return self.factor(Settings(1.0, 1.0)).mean()

    def summary(self) -> dict[str, Any]:
        chances = self.probabilities()
        return {"density": float((chances > 0.5).float().mean()), "mean inclusion": float(chances.mean())}

    def attributes(self) -> dict[str, Any]:
        return {"bias": self.bias} | (WITHOUT if self.scale is None else self.scale.attributes())

    def scale_tensors(self) -> dict[str, Tensor]:
        """Those of the factor ``z``."""
        return {} if self.scale is None else dict(self.scale.tensors)


class LatentBinaryBlock(LatentBlock):
    """Means, variances and inclusion probabilities of all weights, ``(G, m, n)``; those of biases are 1.

    Attributes:
        means: ``mu``.
        variances: of the slabs.
        inclusion: in [0, 1].
    """

    kind = "latent_binary"
    fields: ClassVar[Mapping[str, Field]] = SCALE_FIELDS

    def __init__(
        self,
        means: Tensor,
        variances: Tensor,
        inclusion: Tensor,
        bias: bool,
        scale: RandomScale | None = None,
    ) -> None:
        self.means, self.variances, self.inclusion = means, variances, inclusion
        self.bias, self.scale = bias, scale

    def slabs(self) -> tuple[Tensor, Tensor]:
        return self.means, self.variances

    def inclusions(self) -> Tensor:
        return self.inclusion

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"means": self.means, "variances": self.variances, "inclusion": self.inclusion}
        return tensors | self.scale_tensors()

    @classmethod
    def specs(cls, shape: Shape, attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        specs = {
            "means": TensorSpec(shape),
            "variances": TensorSpec(shape, non_negative=True),
            "inclusion": TensorSpec(shape, non_negative=True, largest=1.0),
        }
        return specs | scale_specs(shape, attributes)

    @classmethod
    def most_numbers(cls, shape: Shape) -> int:
        return super().most_numbers(shape) + most_of_scale(shape)

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LatentBinaryBlock:
        means = tensors["means"]
        scale = restored_scale(cast(Shape, tuple(means.shape)), attributes, tensors)
        return cls(means, tensors["variances"], tensors["inclusion"], bool(attributes["bias"]), scale)

    def reach(self, settings: Settings) -> float:
        return max(largest_of(self.variances), largest_of(self.means) ** 2)
