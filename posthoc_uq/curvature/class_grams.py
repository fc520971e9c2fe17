"""Sums of the last layer's inputs by predicted class in a sweep, and their compression into what a posterior keeps.

While the Grams of all classes fit into memory they are summed exactly. Where they do not, every Gram is sketched,
``Y_c = G_c Omega``, beside its trace and the exact sum of all (Tropp, Yurtsever, Udell, Cevher 2017, "Fixed-rank
approximation of a positive-semidefinite matrix from streaming data"). All of these are sums over the samples, so that
they depend neither on the batches nor on the order, and those of several processes add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.curvature.features import FeatureSource, feature_rows
from posthoc_uq.distributed import add_up
from posthoc_uq.likelihoods import Bernoulli, Categorical, Likelihood
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.numerics import as_double, eigh_descending, nystrom, positive_part

MOST_NUMBERS = 2**20  # kept of all classes together, 4 MiB in float32
MOST_DIRECTIONS = 32  # kept of a class
FEW = 10  # samples; classes with fewer share one Gram
_WIDTHS = (8, 32)  # of a class's sketch, at least and at most


class ClassGrams:
    """Watches a sweep and sums ``phi phi^T`` by the class that the network predicts.

    There is one Gram a class for classification, one for each sign of the logit for a binary model, and one in all for
    any other likelihood.

    Args:
        source: of the features.
        likelihood: of the targets.
        device: of the model.
        budget: bytes that the sums may take.
    """

    def __init__(
        self, source: FeatureSource, likelihood: Likelihood, device: torch.device, budget: int
    ) -> None:
        self.source = source
        self._likelihood = likelihood
        size, classes = source.size, _classes(likelihood, source.outputs)
        zero = as_double(torch.zeros((), device=device))
        width = min(_WIDTHS[1], budget // (16 * classes * size))
        if classes * size**2 * 8 > budget and width < _WIDTHS[0]:
            classes = 1  # too many even for sketches
        self._test: Tensor | None = None
        self.sums = {"counts": zero.new_zeros(classes)}
        if classes == 1 or classes * size**2 * 8 <= budget:
            self.sums["grams"] = zero.new_zeros(classes, size, size)
        else:
            drawn = torch.randn(size, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            self._test = torch.linalg.qr(drawn).Q.to(zero)
            self.sums["sketches"] = zero.new_zeros(classes, size, width)
            self.sums["traces"] = zero.new_zeros(classes)
            self.sums["total"] = zero.new_zeros(size, size)

    def see(self, batch: Batch, keys: Tensor, recording: Recording) -> None:
        """Add a batch; see `Observer`."""
        rows = feature_rows(recording.watched, self.source.layer, keys.shape[0])
        self.add(rows, recording.outputs.detach())

    def add(self, features: Tensor, outputs: Tensor) -> None:
        """Add features ``(samples, features)`` of samples with these outputs."""
        phi, sums = as_double(features), self.sums
        labels = self._labels(outputs).to(phi.device)
        sums["counts"].index_add_(0, labels, torch.ones_like(phi[:, 0]))
        if self._test is None:
            for label in labels.unique().tolist():
                own = phi[labels == label]
                sums["grams"][label].addmm_(own.T, own)
            return
        products = phi.unsqueeze(2) * (phi @ self._test).unsqueeze(1)
        sums["sketches"].index_add_(0, labels, products)
        sums["traces"].index_add_(0, labels, phi.square().sum(1))
        sums["total"].addmm_(phi.T, phi)

    def _labels(self, outputs: Tensor) -> Tensor:
        samples = outputs.shape[0]
        if self.sums["counts"].shape[0] == 1:
            return torch.zeros(samples, dtype=torch.int64, device=outputs.device)
        if isinstance(self._likelihood, Categorical):
            return outputs.argmax(1)
        return (outputs.reshape(samples) > 0).long()

    def result(self, dtype: torch.dtype) -> FeatureGrams:
        """What is kept of all processes' samples, in `dtype`; every process takes part."""
        add_up(self.sums)
        sums, size = self.sums, self.source.size
        members = _sharing(sums["counts"])
        if self._test is None:
            grams: _Grams = _Exact((members @ sums["grams"].flatten(1)).reshape(-1, size, size))
            total = sums["grams"].sum(0)
        else:
            sketches = (members @ sums["sketches"].flatten(1)).reshape(len(members), size, -1)
            total = sums["total"]
            grams = _Sketched(sketches, self._test, members @ sums["traces"], total)
        tensors = compressed(grams, total)
        return FeatureGrams(
            self.source.layer,
            self.source.source,
            int(sums["counts"].sum()),
            {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        )


def _classes(likelihood: Likelihood, outputs: int) -> int:
    if isinstance(likelihood, Categorical):
        return outputs
    return 2 if isinstance(likelihood, Bernoulli) else 1


def _sharing(counts: Tensor) -> Tensor:
    """``(Grams, classes)``, 1 where a class belongs to a Gram: one each, and one for all that have few samples."""
    rare = (counts < FEW) & (counts > 0)
    own = torch.diag(torch.ones_like(counts))[counts >= FEW]
    return torch.cat([own, rare.to(own).unsqueeze(0)]) if bool(rare.any()) else own


class _Grams:
    """One positive semidefinite matrix a class, with its trace."""

    traces: Tensor

    def turned(self, part: slice, basis: Tensor) -> Tensor:
        """``U^T G_c U`` of some classes, ``(classes, width, width)``."""
        raise NotImplementedError


class _Exact(_Grams):
    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices
        self.traces = matrices.diagonal(dim1=1, dim2=2).sum(1)

    def turned(self, part: slice, basis: Tensor) -> Tensor:
        return basis.T @ self._matrices[part] @ basis


class _Sketched(_Grams):
    """Each by its leading directions, and what is left of its trace in the shape of what is left of all together."""

    def __init__(self, sketches: Tensor, test: Tensor, traces: Tensor, total: Tensor) -> None:
        self.traces = traces
        values, vectors = nystrom(sketches, test.expand(len(sketches), -1, -1))
        self._roots = vectors * values.sqrt().unsqueeze(1)
        self._left = (traces - values.sum(1)).clamp(min=0)
        rest = total.clone()
        for own in self._roots:
            rest.addmm_(own, own.T, alpha=-1)
        rest = positive_part(rest)
        self._shape = rest / rest.trace().clamp(min=torch.finfo(rest.dtype).tiny)

    def turned(self, part: slice, basis: Tensor) -> Tensor:
        roots = basis.T @ self._roots[part]
        rest = basis.T @ self._shape @ basis
        return roots @ roots.transpose(1, 2) + self._left[part, None, None] * rest


def compressed(grams: _Grams, total: Tensor, most: int = MOST_NUMBERS) -> dict[str, Tensor]:
    """The tensors of `FeatureGrams` in at most `most` numbers.

    The basis is that of the sum of all Grams, whole where it can be. In it every class keeps its diagonal, and of its
    correlations ``S^-1/2 U^T G_c U S^-1/2`` (S the diagonal) as many leading directions as there is room for, but at
    most `MOST_DIRECTIONS`; the diagonal stays exact.
    """
    classes, size = len(grams.traces), total.shape[0]
    width = max(1, min(size, most // (size + classes)))
    rank = max(0, min(width, MOST_DIRECTIONS, (most - width * (size + classes)) // (classes * width)))
    basis = eigh_descending(total.unsqueeze(0))[1][0][:, :width]
    diagonals, factors, residuals = [], [], []
    step = max(1, 2**22 // width**2)
    for start in range(0, classes, step):
        part = slice(start, start + step)
        scale = (grams.traces[part] / size)[:, None, None].clamp(min=torch.finfo(total.dtype).tiny)
        turned = grams.turned(part, basis) / scale
        diagonal = turned.diagonal(dim1=1, dim2=2).clamp(min=0)
        residuals.append(((size - diagonal.sum(1)) / max(1, size - width)).clamp(min=0) * (width < size))
        own = _leading(turned, diagonal, rank)
        factors.append(own)
        diagonals.append((diagonal - own.square().sum(2)).clamp(min=0))
    return {
        "basis": basis,
        "diagonal": torch.cat(diagonals),
        "factors": torch.cat(factors),
        "residual": torch.cat(residuals),
    }


def _leading(matrices: Tensor, diagonal: Tensor, rank: int) -> Tensor:
    """Factors ``(classes, width, rank)`` of the leading directions of the matrices' correlations."""
    if rank == 0:
        return matrices.new_zeros(*diagonal.shape, 0)
    deviations = diagonal.sqrt()
    floor = 1e-9 * deviations.amax(1, keepdim=True)
    inverse = torch.where(deviations > floor, 1 / deviations.clamp(min=1e-300), torch.zeros_like(deviations))
    values, vectors = eigh_descending(inverse.unsqueeze(2) * matrices * inverse.unsqueeze(1))
    leading = vectors[:, :, :rank] * values[:, :rank].sqrt().unsqueeze(1)
    return leading * deviations.unsqueeze(2)
