"""A Gaussian over logits as a few common directions and an independent rest, by which it is drawn from.

Softmax does not change when all logits move by the same number. So covariances here are those of the centred logits
``f_c - mean_d f_d``: a variance that all classes share is removed before anything is approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.devices import as_double

Product = Callable[[Tensor], Tensor]
"""A covariance by its products: ``(batch, classes, columns)`` to the same shape."""

DIRECTIONS = 8  # common directions, for more than DIRECTIONS + 2 classes
_FLOOR = 1.0  # weight shared equally by all classes, beside a weight of 1 by how undecided each class is
_ROUNDS = 2  # of subspace iteration
_RANK = 1e-12  # eigenvalues below this share of the largest count as zero


class Spread(NamedTuple):
    """Logits ``mean + root z + sqrt(rest) e`` with standard normal ``z`` and ``e``, up to a number common to all.

    Attributes:
        root: ``(batch, classes, directions)``; there may be no direction.
        rest: variances ``(batch, classes)`` of the part that is independent between classes.
    """

    root: Tensor
    rest: Tensor

    def variance(self) -> Tensor:
        """Variances of the logits, ``(batch, classes)``."""
        return self.root.square().sum(-1) + self.rest

    def over(self, temperature: float) -> Spread:
        """The same for logits divided by a temperature."""
        return Spread(self.root / temperature, self.rest / temperature**2)


def independent(variance: Tensor) -> Spread:
    """Logits ``(batch, classes)`` without correlations."""
    return Spread(variance.new_zeros(*variance.shape, 0), variance)


def of_covariance(mean: Tensor, covariance: Tensor) -> Spread:
    """From a covariance ``(batch, classes, classes)``: exact up to ``DIRECTIONS + 2`` classes; see `of_product`.

    With ``H = 1 - 1/C`` and the eigenvalues ``l_1 >= ... >= l_(C-1), 0`` of ``H Sigma H``, the directions have the
    variances ``l_k - l_(C-1)`` and the rest ``l_(C-1)`` for every class, since softmax cannot tell the multiple
    ``l_(C-1) H`` of the projection from that of the identity.
    """
    classes = mean.shape[1]
    wide = as_double(covariance)
    if classes > DIRECTIONS + 2:
        return of_product(mean, covariance.diagonal(dim1=1, dim2=2), lambda x: wide @ as_double(x))
    rows = wide - wide.mean(1, keepdim=True)
    centred, not_finite = _finite(rows - rows.mean(2, keepdim=True))
    values, vectors = torch.linalg.eigh(centred)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    least = values[:, classes - 2 : classes - 1]
    root = vectors[:, :, : classes - 2] * (values[:, : classes - 2] - least).sqrt().unsqueeze(1)
    return _spread(root, least.expand(-1, classes), not_finite, mean)


def of_product(mean: Tensor, variance: Tensor, product: Product) -> Spread:
    """From the products of a covariance whose diagonal is `variance`: `DIRECTIONS` directions ``L`` of
    ``S = H Sigma H``, and the rest of its diagonal as independent. `of_covariance` is used where it is exact, for few
    classes.

    The directions are ``S Y (Y^T S Y)^(-1/2)`` (Nystroem), so that ``S - L L^T`` is a covariance again, with ``Y`` by
    subspace iteration from the most undecided classes. Classes are weighted by how much a change of their logit
    moves the probabilities, ``p (1 - p)``, plus an equal share: the covariance is most accurate for the classes between
    which the prediction is undecided.

    Args:
        mean: ``(batch, classes)``.
        variance: of the same shape.
        product: of the covariance of the logits, not centred.
    """
    classes = mean.shape[1]
    if classes <= DIRECTIONS + 2:
        units = torch.eye(classes, dtype=mean.dtype, device=mean.device).expand(len(mean), -1, -1)
        return of_covariance(mean, product(units))
    sums = as_double(product(torch.ones_like(mean).unsqueeze(-1)))[:, :, 0] / classes
    diagonal = (as_double(variance) - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
    weights, not_finite = _finite(_weights(as_double(mean), diagonal))
    weights = weights.unsqueeze(-1)

    def weighted(x: Tensor) -> Tensor:
        x = weights * x
        image = as_double(product((x - x.mean(1, keepdim=True)).to(mean)))
        return weights * (image - image.mean(1, keepdim=True)).masked_fill(not_finite.unsqueeze(-1), 0.0)

    first = weights[:, :, 0].topk(min(DIRECTIONS, classes)).indices
    basis = torch.nn.functional.one_hot(first, classes).transpose(1, 2).to(weights)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(weighted(basis)).Q
    image = weighted(basis)
    inner = basis.transpose(1, 2) @ image
    values, vectors = torch.linalg.eigh((inner + inner.transpose(1, 2)) / 2)
    usable = values > _RANK * values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
    scale = torch.where(usable, values, torch.ones_like(values)).rsqrt() * usable
    root = image @ (vectors * scale.unsqueeze(1)) / weights.clamp(min=torch.finfo(values.dtype).tiny)
    # centring removed 1 / C of the independent part
    rest = (diagonal - root.square().sum(-1)).clamp(min=0) * (classes / (classes - 1))
    return _spread(root, rest, not_finite, mean)


def _weights(mean: Tensor, variance: Tensor) -> Tensor:
    """Square roots of the weights of classes, ``(batch, classes)``."""
    probs = (mean / (1 + pi * variance / 8).sqrt()).softmax(1)
    undecided = probs * (1 - probs)
    total = undecided.sum(1, keepdim=True).clamp(min=torch.finfo(mean.dtype).tiny)
    return (undecided / total + _FLOOR / mean.shape[1]).sqrt()


def _finite(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor with zeros for inputs that are not finite (eigensolvers refuse them), and which these are."""
    not_finite = ~torch.isfinite(tensor).flatten(1).all(1)
    return tensor.masked_fill(not_finite.reshape(-1, *[1] * (tensor.ndim - 1)), 0.0), not_finite.unsqueeze(1)


def _spread(root: Tensor, rest: Tensor, not_finite: Tensor, like: Tensor) -> Spread:
    """A `Spread` in the precision and on the device of `like`, NaN for inputs whose covariance is not finite."""
    nan = float("nan")
    root = root.masked_fill(not_finite.unsqueeze(-1), nan).to(like.device, like.dtype)
    return Spread(root, rest.masked_fill(not_finite, nan).to(like.device, like.dtype))
