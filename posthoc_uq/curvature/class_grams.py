"""Grams of the last layer's inputs by predicted class, summed in a sweep and compressed for the posterior.

The Grams of all classes are summed exactly if they fit into memory. Otherwise every Gram is sketched,
``Y_c = G_c Omega``, with its exact trace and the exact sum of all Grams (Tropp, Yurtsever, Udell, Cevher 2017,
"Fixed-rank approximation of a positive-semidefinite matrix from streaming data"). All of these are sums over the
samples: they depend neither on the batches nor on the order, and several processes can add up theirs. Where samples
have weights, each counts w times, as so many copies of it would.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.curvature.features import FeatureSource, feature_rows, grid_of
from posthoc_uq.curvature.operands import weighted
from posthoc_uq.devices import Checks, as_double
from posthoc_uq.distributed import add_up
from posthoc_uq.errors import NonFiniteError
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.counted import nothing_counts, weights_of
from posthoc_uq.likelihoods.weights import SampleWeights
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.features import ALL, RARE, FeatureGrams
from posthoc_uq.posteriors.numerics import eigh_descending, nystrom, positive_part

MOST_NUMBERS = 2**20  # kept for all classes together, 4 MiB in float32
MOST_DIRECTIONS = 32  # kept for one class
FEW = 10  # classes with fewer samples share one Gram
_ROUNDING = 1e-9  # variances up to this are rounding, where the mean variance is 1
_WIDTHS = (8, 16)  # of a class's sketch, at least and at most


class ClassGrams:
    """Watches a sweep and sums ``phi phi^T`` by the class that the network predicts.

    There is one Gram a class for classification, one for each sign of the logit for a binary model, and a single one
    for a likelihood without classes.

    Args:
        source: where the features come from.
        likelihood: of the targets.
        device: of the model.
        budget: bytes that the sums may take.
        by_class: whether there is one Gram a class; None decides by the budget.
    """

    def __init__(
        self,
        source: FeatureSource,
        likelihood: Likelihood,
        device: torch.device,
        budget: int,
        by_class: bool | None = None,
    ) -> None:
        self.source = source
        self._likelihood = likelihood
        by_class = source.by_class if by_class is None else by_class
        size, classes = source.size, 1 if by_class is False else likelihood.classes(source.outputs)
        zero = as_double(torch.zeros((), device=device))
        width = min(_WIDTHS[1], budget // (16 * classes * size))
        if by_class is None:
            by_class = classes * size**2 * 8 <= budget or width >= _WIDTHS[0]
        classes = classes if by_class else 1  # too many classes even for sketches
        width = max(width, _WIDTHS[0])
        self._test: Tensor | None = None
        self.sums = {"counts": zero.new_zeros(classes)}
        if classes == 1 or classes * size**2 * 8 <= budget:
            self.sums["grams"] = zero.new_zeros(classes, size, size)
        else:
            drawn = torch.randn(
                size, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu"
            )
            self._test = torch.linalg.qr(drawn).Q.to(zero)
            self.sums["sketches"] = zero.new_zeros(classes, size, width)
            self.sums["traces"] = zero.new_zeros(classes)
            self.sums["total"] = zero.new_zeros(size, size)

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: Checks) -> None:
        """Add a batch; see `Observer`."""
        by_position = self.source.source == "positions"
        rows = feature_rows(recording.watched, self.source.layer, keys.shape[0], by_position)
        outputs = recording.outputs.detach()
        weights = weights_of(self._likelihood, outputs, batch)
        if by_position:
            grid = grid_of(recording.watched[0])
            labels, counts = self._of_positions(outputs, batch.targets, grid, weights)
            counted = counts > 0
            of_rows = None if weights is None else counts[counted]
            self._add(rows[counted.to(rows.device)], labels[counted], of_rows, checks)
        else:
            self._add(rows, self._labels(outputs), None if weights is None else weights.samples, checks)

    def add(self, features: Tensor, outputs: Tensor) -> None:
        """Add features ``(samples, features)`` of samples with these outputs."""
        checks = Checks()
        self._add(features, self._labels(outputs), None, checks)
        checks.look()

    def _of_positions(
        self,
        outputs: Tensor,
        targets: Tensor | None,
        grid: tuple[int, ...],
        weights: SampleWeights | None,
    ) -> tuple[Tensor, Tensor]:
        """The predicted class of every position of a grid and how often its label counts, ``(samples * positions,)``;
        of a coarser grid than that of the outputs, those of the nearest position.
        """
        layout = self._likelihood.positions_of(outputs)
        assert layout is not None
        positions, samples = layout.positions(outputs), outputs.shape[0]
        counts = as_double(layout.labels(outputs, targets)[1])
        if weights is not None:
            own = weights.samples.unsqueeze(1) if weights.by_position is None else weights.by_position
            counts = counts * own.to(counts)
        maps = torch.stack([self._labels(outputs).to(counts), counts.flatten()])
        if grid != positions:
            maps = F.interpolate(maps.reshape(2 * samples, 1, *positions), size=grid, mode="nearest")
        labels, counts = maps.reshape(2, -1)
        return labels.long(), counts

    def _add(self, features: Tensor, labels: Tensor, weights: Tensor | None, checks: Checks) -> None:
        """Add features of these classes, each as often as its weight says."""
        phi, sums = as_double(features), self.sums
        labels = labels.to(phi.device)
        ones = torch.ones_like(phi[:, 0])
        sums["counts"].index_add_(0, labels, ones if weights is None else weights.to(phi))
        phi = weighted(phi, None if weights is None else weights.sqrt())
        if self._test is None:
            ordered = phi[labels.argsort(stable=True)]
            rows = torch.zeros_like(sums["counts"]).index_add_(0, labels, ones)
            checks.later(rows, lambda host_rows: self._add_classes(ordered, host_rows))
            return
        products = phi.unsqueeze(2) * (phi @ self._test).unsqueeze(1)
        sums["sketches"].index_add_(0, labels, products)
        sums["traces"].index_add_(0, labels, phi.square().sum(1))
        sums["total"].addmm_(phi.T, phi)

    def _add_classes(self, ordered: Tensor, counts: Tensor) -> None:
        """Add features sorted by class; `counts` are the rows of each class."""
        for gram, rows in zip(self.sums["grams"], ordered.split(counts.long().tolist()), strict=True):
            if len(rows):
                gram.addmm_(rows.T, rows)

    def _labels(self, outputs: Tensor) -> Tensor:
        if self.sums["counts"].shape[0] == 1:
            several = self._likelihood.positions_of(outputs) if self.source.source == "positions" else None
            rows = outputs if several is None else several.rows(outputs)
            return torch.zeros(len(rows), dtype=torch.int64, device=outputs.device)
        return self._likelihood.predicted_class(outputs)

    def summed(self, own: Collection[int] = (), least: int | None = FEW) -> Summed:
        """The Grams of the samples of all processes; every process must call this, and only once.

        Args:
            own: classes that have a Gram of their own whatever their number of samples.
            least: samples (the sum of their weights) from which on every other class has one, too; None for never.
        """
        add_up(self.sums, "the sum for the novelty")
        counts: list[float] = self.sums["counts"].tolist()
        if not any(counts):
            raise nothing_counts()
        if len(counts) == 1:
            places, labels = {0: 0}, [ALL]
        else:
            enough = max(counts) + 1 if least is None else least
            labels = [c for c, count in enumerate(counts) if count >= enough or (count and c in own)]
            places = {c: place for place, c in enumerate(labels)}
            rare = [c for c, count in enumerate(counts) if count and c not in places]
            places |= dict.fromkeys(rare, len(labels))
            labels += [RARE] if rare else []
        present, groups = list(places), list(places.values())

        def grouped(sums: Tensor) -> Tensor:
            index = torch.tensor(groups, device=sums.device)
            return sums.new_zeros(len(labels), *sums.shape[1:]).index_add_(0, index, sums[present])

        if self._test is None:
            grams: Grams = _Exact(grouped(self.sums["grams"]))
            total = self.sums["grams"].sum(0)
        else:
            total = self.sums["total"]
            grams = _Sketched(grouped(self.sums["sketches"]), self._test, grouped(self.sums["traces"]), total)
        numbers = torch.tensor(labels, dtype=total.dtype, device=total.device)
        totals = torch.stack([numbers, grouped(self.sums["counts"]), grams.traces], dim=1)
        return Summed(grams, total, totals)

    def result(self, dtype: torch.dtype) -> FeatureGrams:
        """The compressed statistics of the samples of all processes, in `dtype`; every process must call this.

        Raises:
            NonFiniteError: a number is not finite in this dtype.
        """
        return self.summed().compressed(self.source.layer, self.source.source, dtype)


@dataclass(frozen=True)
class Summed:
    """The Grams of some samples, by class.

    Attributes:
        grams: one a class, or one for several.
        total: their sum, ``(features, features)``.
        basis: a complete one that is to be kept as long as there is room for all of it, or None.
        totals: of each, its class (or `ALL`, `RARE`), samples and trace, ``(classes, 3)``.
    """

    grams: Grams
    total: Tensor
    totals: Tensor
    basis: Tensor | None = None

    def compressed(self, layer: Layer, source: str, dtype: torch.dtype) -> FeatureGrams:
        """The statistics for a posterior.

        Args:
            layer: whose inputs these are.
            source: see `FeatureGrams`.
            dtype: of all tensors but the totals.

        Raises:
            NonFiniteError: a number is not finite in this dtype.
        """
        found = compressed(self.grams, self.total, basis=self.basis)
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in found.items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise NonFiniteError(
                f"The second moments of what enters layer '{layer.name}' are not finite in {dtype}: bring the inputs "
                f"to about unit size, or fit with dtype=torch.float64."
            )
        samples = max(1, round(float(self.totals[:, 1].sum())))
        return FeatureGrams(layer, source, samples, {**tensors, "totals": self.totals})


class Grams:
    """One positive semidefinite matrix a class, with its trace."""

    traces: Tensor

    def rotated(self, part: Tensor, basis: Tensor) -> Tensor:
        """``U^T G_c U`` of some classes, by their numbers, ``(classes, width, width)``."""
        raise NotImplementedError

    def diagonals(self, basis: Tensor) -> Tensor:
        """The diagonals of ``U^T G_c U`` of all classes, ``(classes, width)``."""
        raise NotImplementedError


class _Exact(Grams):
    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices
        self.traces = matrices.diagonal(dim1=1, dim2=2).sum(1)

    def rotated(self, part: Tensor, basis: Tensor) -> Tensor:
        return basis.T @ self._matrices[part] @ basis

    def diagonals(self, basis: Tensor) -> Tensor:
        return torch.stack([((matrix @ basis) * basis).sum(0) for matrix in self._matrices])


class _Sketched(Grams):
    """Each Gram by its leading directions; the rest of its trace is spread like the rest of the total Gram."""

    def __init__(self, sketches: Tensor, test: Tensor, traces: Tensor, total: Tensor) -> None:
        self.traces = traces
        values, vectors = nystrom(sketches, test.expand(len(sketches), -1, -1))
        self._roots = vectors * values.sqrt().unsqueeze(1)
        self._remaining_traces = (traces - values.sum(1)).clamp(min=0)
        flat = self._roots.transpose(0, 1).flatten(1)
        remainder = positive_part(total - flat @ flat.T)
        self._remainder = remainder / remainder.trace().clamp(min=torch.finfo(remainder.dtype).tiny)

    def rotated(self, part: Tensor, basis: Tensor) -> Tensor:
        roots = basis.T @ self._roots[part]
        remainder = basis.T @ self._remainder @ basis
        return roots @ roots.transpose(1, 2) + self._remaining_traces[part, None, None] * remainder

    def diagonals(self, basis: Tensor) -> Tensor:
        remainder = ((self._remainder @ basis) * basis).sum(0)
        of_roots = torch.stack([(basis.T @ root).square().sum(1) for root in self._roots])
        return of_roots + self._remaining_traces.unsqueeze(1) * remainder


def room(classes: int, size: int, most: int = MOST_NUMBERS) -> tuple[int, int]:
    """The width of the shared basis and the directions of each class that fit into `most` numbers."""
    most -= 4 * classes  # residuals and totals
    width = max(1, min(size, most // (size + classes)))
    left = most - width * (size + classes)
    return width, max(0, min(width, MOST_DIRECTIONS, left // (classes * width)))


def compressed(
    grams: Grams, total: Tensor, most: int = MOST_NUMBERS, *, basis: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of `FeatureGrams` in at most `most` numbers.

    The basis is the eigenbasis of the sum of all Grams, as wide as there is room for, or a complete one that is given.
    In it every class keeps its exact diagonal S and the leading directions of its correlations
    ``S^-1/2 U^T G_c U S^-1/2``: as many as there is room for, but at most `MOST_DIRECTIONS`.
    """
    classes, size = len(grams.traces), total.shape[0]
    width, rank = room(classes, size, most)
    if basis is None or basis.shape[1] != width:
        basis = eigh_descending(total.unsqueeze(0))[1][0][:, :width]
    scale = (grams.traces / size).unsqueeze(1).clamp(min=torch.finfo(total.dtype).tiny)
    diagonal = grams.diagonals(basis).clamp(min=0) / scale
    residual = ((size - diagonal.sum(1)) / max(1, size - width)).clamp(min=0)
    factors = diagonal.new_zeros(classes, width, rank)
    if rank:
        step = max(1, 2**22 // width**2)
        for part in torch.arange(classes, device=total.device).split(step):
            rotated = grams.rotated(part, basis) / scale[part].unsqueeze(2)
            factors[part] = _leading(rotated, diagonal[part], rank)
    left = (diagonal - factors.square().sum(2)).clamp(min=0)
    return {
        "basis": basis,
        "diagonal": left if rank < width else torch.zeros_like(left),
        "factors": factors,
        "residual": residual if width < size else torch.zeros_like(residual),
    }


def _leading(matrices: Tensor, diagonal: Tensor, rank: int) -> Tensor:
    """Factors ``(classes, width, rank)`` of the leading directions of the matrices' correlations. Each is weighted by
    the excess of its eigenvalue over the mean of all others (as in probabilistic principal components, Tipping, Bishop
    1999), so that without correlations all are zero.
    """
    varies = diagonal > _ROUNDING
    deviations = torch.where(varies, diagonal, torch.zeros_like(diagonal)).sqrt()
    inverse = torch.where(varies, diagonal.clamp(min=_ROUNDING).rsqrt(), torch.zeros_like(diagonal))
    values, vectors = eigh_descending(inverse.unsqueeze(2) * matrices * inverse.unsqueeze(1))
    dimensions = varies.sum(1)
    mean = (dimensions - values[:, :rank].sum(1)).clamp(min=0) / (dimensions - rank).clamp(min=1)
    excess = (values[:, :rank] - mean.unsqueeze(1)).clamp(min=0)
    leading = vectors[:, :, :rank] * excess.sqrt().unsqueeze(1)
    return leading * deviations.unsqueeze(2)
