"""Statistics of the last layer's inputs, one compressed Gram per class, and how novel other inputs are by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.devices import as_double, placed
from posthoc_uq.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.layers import Layer
from posthoc_uq.posteriors.blocks import bounded
from posthoc_uq.posteriors.specs import TensorSpec

SMOOTHING = 3e-4
SOURCES = ("outputs", "positions", "pooled")
RARE = -1  # in the place of a class: all classes with few samples together
ALL = -2  # in the place of a class: all samples, where Grams are not by class


class FeatureGrams:
    """The inputs ``phi`` of the last layer by predicted class, as Grams ``G_c = sum phi phi^T`` whose mean eigenvalue
    is scaled to 1, in the form

    ``G_c = U (F_c F_c^T + diag(d_c)) U^T + rho_c (1 - U U^T)``

    with a basis ``U`` that all classes share. In that basis the diagonal of each Gram is exact, and so are the leading
    directions of its other entries.

    Attributes:
        layer: whose inputs these are.
        source: ``"outputs"`` where the layer's outputs are the model's; ``"positions"`` where it gives every position
            its classes, and each position has a row; ``"pooled"`` where it is only the last layer, and the rows of a
            sample are averaged.
        samples: training inputs, or positions, that were seen.
        basis: U, ``(features, width)``, orthonormal; a bias counts as a feature that is always 1.
        diagonal: d, ``(classes, width)``.
        factors: F, ``(classes, width, rank)``.
        residual: rho, ``(classes,)``.
        totals: of each Gram before it was scaled, the number of its class (or `RARE`, `ALL`), its samples and its
            trace, ``(classes, 3)`` in float64; None in files of earlier releases. With them, data can come in and go
            out.
        smoothing: r, the ridge on every Gram as a share of its mean eigenvalue; may be set at any time.
    """

    def __init__(
        self,
        layer: Layer,
        source: str,
        samples: int,
        tensors: Mapping[str, Tensor],
        smoothing: float = SMOOTHING,
    ) -> None:
        self.layer, self.source, self.samples = layer, source, samples
        self.basis, self.diagonal = tensors["basis"], tensors["diagonal"]
        self.factors, self.residual = tensors["factors"], tensors["residual"]
        self.totals = tensors.get("totals")
        self.smoothing = smoothing
        self._ready: tuple[Any, tuple[Tensor, Tensor, Tensor]] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "smoothing":
            value = _checked_smoothing(value)
        super().__setattr__(name, value)

    @property
    def classes(self) -> int:
        """Number of Grams."""
        return self.diagonal.shape[0]

    def novelty(self, features: Tensor, smoothing: float | None = None) -> Tensor:
        """The share of the prior's variance that the data left, for the class that explains an input best:

        ``nu(x) = min_c phi^T (G_c + r)^-1 phi / (phi^T phi / r)``

        and 1 where ``phi`` is 0. A Bayesian linear model of class c has that share of its prior variance left.

        Args:
            features: phi, ``(samples, features)``.
            smoothing: r, in place of `smoothing`.

        Returns:
            ``(samples,)`` in (0, 1], float64; NaN where the features are no finite numbers.

        Raises:
            PosthocUQError: the features have another length, or the smoothing is not positive.
        """
        if features.ndim != 2 or features.shape[1] != self.basis.shape[0]:
            raise PosthocUQError(
                f"Layer '{self.layer.name}' has inputs of shape {tuple(features.shape)} (with the bias's 1) here, and "
                f"the fit saw {self.basis.shape[0]} numbers a sample; pass inputs like those of the fit."
            )
        ridge = self.smoothing if smoothing is None else _checked_smoothing(smoothing)
        basis, inverse, directions = self._prepared(ridge, features.device)
        phi = as_double(features)
        squares = phi.square().sum(1, keepdim=True)
        inside = phi @ basis
        remaining = inside.square() @ inverse[:, :-1].T
        if basis.shape[1] < basis.shape[0]:
            outside = (squares - inside.square().sum(1, keepdim=True)).clamp(min=0)
            remaining = remaining + outside * inverse[:, -1]
        if directions.shape[1]:
            explained = inside @ directions
            remaining = remaining - explained.square().reshape(len(phi), self.classes, -1).sum(2)
        share = ridge * remaining.amin(1, keepdim=True) / squares
        novelty = torch.where(squares == 0, torch.ones_like(share), share).squeeze(1)
        return novelty.clamp(torch.finfo(torch.float32).tiny, 1.0)

    def _prepared(self, ridge: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For one ridge: the basis; the inverse diagonals ``(classes, width + 1)``, the last for all that is outside of
        the basis; and the directions ``(width, classes * rank)`` that the factors subtract by the Woodbury identity.
        """
        key = (ridge, device)
        ready = self._ready
        if ready is None or ready[0] != key:
            # a basis that was stored in half precision is not quite orthonormal
            basis, triangle = torch.linalg.qr(as_double(self.basis.to(device)))
            basis = basis * triangle.diagonal().sign()
            residual = as_double(self.residual.to(device)).unsqueeze(1)
            inverse = 1 / (torch.cat([as_double(self.diagonal.to(device)), residual], dim=1) + ridge)
            factors = as_double(self.factors.to(device))
            scaled = factors * inverse[:, :-1].unsqueeze(2)
            core = (
                torch.eye(factors.shape[2], dtype=factors.dtype, device=factors.device)
                + factors.transpose(1, 2) @ scaled
            )
            root = torch.linalg.cholesky(core)
            directions = torch.linalg.solve_triangular(root, scaled.transpose(1, 2), upper=False)
            ready = key, (basis, inverse, directions.permute(2, 0, 1).flatten(1))
            self._ready = ready
        return ready[1]

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        tensors = {name: getattr(self, name) for name in ("basis", "diagonal", "factors", "residual")}
        return tensors | ({} if self.totals is None else {"totals": self.totals})

    def numbers(self) -> int:
        """Numbers stored."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    def bytes(self) -> int:
        """Bytes that these take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def attributes(self) -> dict[str, Any]:
        """Plain values from which, with the tensors, `restore` rebuilds it."""
        return {
            "layer": {"name": self.layer.name, **self.layer.attributes()},
            "source": self.source,
            "samples": self.samples,
            "smoothing": self.smoothing,
            "classes": self.classes,
            "width": self.basis.shape[1],
            "rank": self.factors.shape[2],
            **({} if self.totals is None else {"totals": True}),
        }

    @staticmethod
    def specs(attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """What each tensor must be, by the attributes alone.

        Raises:
            CorruptPosteriorError: an attribute is missing or out of range.
        """
        layer = _layer(attributes)
        features = layer.groups * layer.inputs
        classes = bounded(attributes, "classes", 1, 2**31)
        width = bounded(attributes, "width", 1, features)
        rank = bounded(attributes, "rank", 0, width)
        return {
            "basis": TensorSpec((features, width), orthonormal=True),
            "diagonal": TensorSpec((classes, width), non_negative=True),
            "factors": TensorSpec((classes, width, rank)),
            "residual": TensorSpec((classes,), non_negative=True),
            **({"totals": TensorSpec((classes, 3), exact=True)} if attributes.get("totals") else {}),
        }

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> FeatureGrams:
        """The statistics that these attributes and tensors describe.

        Raises:
            CorruptPosteriorError: they do not fit each other.
        """
        for name, spec in cls.specs(attributes).items():
            if name not in tensors or not spec.fits(tensors[name].shape):
                raise CorruptPosteriorError(f"The features' '{name}' must be a tensor of shape {spec.shape}.")
        source, smoothing = attributes.get("source"), attributes.get("smoothing")
        if source not in SOURCES or not isinstance(smoothing, float):
            raise CorruptPosteriorError(
                f"The features' source {source!r} or smoothing {smoothing!r} is none."
            )
        samples = bounded(attributes, "samples", 1, 2**62)
        try:
            return cls(_layer(attributes), source, samples, tensors, smoothing)
        except PosthocUQError as error:
            raise CorruptPosteriorError(f"The features' attributes are out of range: {error}") from None

    def to(self, device: torch.device) -> FeatureGrams:
        """The same on another device."""
        tensors = {name: placed(tensor, device) for name, tensor in self.tensors().items()}
        return FeatureGrams(self.layer, self.source, self.samples, tensors, self.smoothing)


def _layer(attributes: Mapping[str, Any]) -> Layer:
    try:
        described = attributes["layer"]
        layer = Layer.from_attributes(str(described["name"]), described)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptPosteriorError(f"The features' layer is incomplete: {error!r}.") from None
    if layer.groups < 1 or layer.inputs < 1:
        raise CorruptPosteriorError(f"The features' layer '{layer.name}' has no inputs.")
    return layer


def _checked_smoothing(value: Any) -> float:
    number = float(value)
    if not 1e-12 <= number <= 1e12:
        raise PosthocUQError(f"smoothing must lie between 1e-12 and 1e12, not {value}.")
    return number
