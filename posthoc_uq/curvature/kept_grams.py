"""Grams of the last layer's inputs that a posterior keeps, with those of other samples added or taken out.

What is kept of each Gram is exact on the diagonal of a basis and in its leading directions; so is the sum, in the
kept directions. It is compressed again as in a fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posthoc_uq.curvature.class_grams import FEW, ClassGrams, Grams, Summed
from posthoc_uq.devices import as_double
from posthoc_uq.posteriors.combining import NotContainedError, Weights, check_forgettable
from posthoc_uq.posteriors.features import ALL, FeatureGrams

_STRAY = 1e-3
"""The share of samples that rounding may put into another class, between two passes over them."""


def by_class(features: FeatureGrams) -> bool:
    """Whether the kept Grams are by class."""
    return _labels(features) != [ALL]


def changed(features: FeatureGrams, grams: ClassGrams, sign: int) -> FeatureGrams:
    """The statistics with those of other samples.

    Args:
        features: with `totals`.
        grams: of the other samples, by class where the kept ones are; every process must call this.
        sign: 1 where they come in, -1 where they go out.

    Raises:
        NotContainedError: more samples of a class would go out than there are.
        PosthocUQError: what is known would be lost beside the new samples.
        NonFiniteError: a number is not finite.
    """
    # classes that the posterior has no Gram of are among its rare ones
    fresh = grams.summed(_labels(features), FEW if sign > 0 else None)
    kept = _Kept(features, fresh.total.device)
    known, new = _labels(features), [int(label) for label in fresh.totals[:, 0].tolist()]
    labels = sorted({*known, *new}, key=lambda label: (label < 0, label))
    places = [[known.index(label) if label in known else -1 for label in labels]]
    places.append([new.index(label) if label in new else -1 for label in labels])
    parts = [(kept, places[0], 1), (fresh.grams, places[1], sign)]
    counts = _spread(kept.counts, places[0]) + sign * _spread(fresh.totals[:, 1], places[1])
    one = min(1.0, float(kept.counts.sum()) / max(1, features.samples))  # what a sample weighs, on average
    if bool((counts < -max(one, _STRAY * float(fresh.totals[:, 1].sum()))).any()):
        raise NotContainedError("number of samples of a class")
    if sign > 0:
        weights = Weights.of(float(kept.counts.sum()), float(fresh.totals[:, 1].sum()), 0.0)
        sizes = [
            _mean_trace(of_part)
            for of_part in ((kept.traces, kept.counts), (fresh.totals[:, 2], fresh.totals[:, 1]))
        ]
        precision = torch.finfo(features.basis.dtype).eps
        check_forgettable(sizes[0], sizes[1], weights, precision, f"the inputs of '{features.layer.name}'")
    joined = _Joined(parts)
    left = ((counts > 0.5 * one) & (joined.traces >= 0)).nonzero().flatten()
    if not len(left):
        raise NotContainedError("number of samples")
    chosen = left.tolist()
    remaining = _Joined([(part, [of_part[i] for i in chosen], weight) for part, of_part, weight in parts])
    numbers = torch.tensor([labels[i] for i in chosen], dtype=counts.dtype, device=counts.device)
    totals = torch.stack([numbers, counts[left], remaining.traces], dim=1)
    summed = Summed(remaining, kept.total() + sign * fresh.total, totals, kept.complete_basis())
    result = summed.compressed(features.layer, features.source, features.basis.dtype)
    result.smoothing = features.smoothing
    _rescale(result)
    return result.to(features.basis.device)


def _mean_trace(part: tuple[Tensor, Tensor]) -> float:
    """The trace of the Gram of a sample, on average over all classes."""
    traces, counts = part
    return float(traces.sum()) / max(1.0, float(counts.sum()))


def _rescale(features: FeatureGrams) -> None:
    """Give Grams the mean eigenvalue 1 where it is larger: where compression had made parts of them negative, which
    count as 0.
    """
    squares = as_double(features.factors).square().sum((1, 2))
    over = (as_double(features.diagonal).sum(1) + squares) / features.basis.shape[0]
    share = (1 / over.clamp(min=1)).to(features.diagonal)
    features.diagonal = features.diagonal * share.unsqueeze(1)
    features.factors = features.factors * share.sqrt().reshape(-1, 1, 1)


def _labels(features: FeatureGrams) -> list[int]:
    totals = features.totals
    return [] if totals is None else [int(label) for label in totals[:, 0].tolist()]


def _spread(numbers: Tensor, places: Sequence[int]) -> Tensor:
    """The numbers at these places, and 0 for -1."""
    index = torch.tensor(places, device=numbers.device)
    return torch.where(index >= 0, numbers[index.clamp(min=0)], torch.zeros_like(numbers[:1]))


class _Kept(Grams):
    """The Grams of a posterior, unscaled."""

    def __init__(self, features: FeatureGrams, device: torch.device) -> None:
        basis, triangle = torch.linalg.qr(as_double(features.basis).to(device))
        self._basis = basis * triangle.diagonal().sign()
        assert features.totals is not None
        totals = as_double(features.totals).to(device)
        self.counts, self.traces = totals[:, 1], totals[:, 2]
        scale = (self.traces / basis.shape[0]).unsqueeze(1)
        self._diagonal = as_double(features.diagonal).to(device) * scale
        self._residual = as_double(features.residual).to(device).unsqueeze(1) * scale
        self._factors = as_double(features.factors).to(device) * scale.sqrt().unsqueeze(2)

    def complete_basis(self) -> Tensor | None:
        """The basis, if it has every direction: kept, the diagonals in it stay exact however often they change."""
        return self._basis if self._basis.shape[1] == self._basis.shape[0] else None

    def _turned(self, basis: Tensor, part: Tensor | slice) -> tuple[Tensor, Tensor]:
        """``U'^T U``, and the factors of some classes in the other basis U'."""
        turn = basis.T @ self._basis
        return turn, turn @ self._factors[part]

    def rotated(self, part: Tensor, basis: Tensor) -> Tensor:
        turn, factors = self._turned(basis, part)
        inside = factors @ factors.transpose(1, 2) + (turn * self._diagonal[part].unsqueeze(1)) @ turn.T
        identity = torch.eye(len(turn), dtype=turn.dtype, device=turn.device)
        return inside + self._residual[part].unsqueeze(2) * (identity - turn @ turn.T)

    def diagonals(self, basis: Tensor) -> Tensor:
        turn, factors = self._turned(basis, slice(None))
        squares = turn.square()
        outside = (1 - squares.sum(1)).clamp(min=0)
        return factors.square().sum(2) + self._diagonal @ squares.T + self._residual * outside

    def total(self) -> Tensor:
        """The sum of all Grams, ``(features, features)``."""
        basis, flat = self._basis, self._factors.transpose(0, 1).flatten(1)
        inner = flat @ flat.T
        residual = self._residual.sum()
        inner.diagonal().add_(self._diagonal.sum(0) - residual)
        total = basis @ inner @ basis.T
        total.diagonal().add_(residual)
        return total


class _Joined(Grams):
    """Weighted sums of Grams: of each part, the place of every class in it (or -1), and its weight."""

    def __init__(self, parts: Sequence[tuple[Grams, Sequence[int], int]]) -> None:
        self._parts = parts
        self.traces = sum(
            (weight * _spread(grams.traces, places) for grams, places, weight in parts),
            start=torch.zeros_like(parts[0][0].traces[:1]),
        )

    def rotated(self, part: Tensor, basis: Tensor) -> Tensor:
        width = basis.shape[1]
        total = basis.new_zeros(len(part), width, width)
        for grams, places, weight in self._parts:
            index = torch.tensor(places, device=part.device)[part]
            known = index >= 0
            if bool(known.any()):
                total[known] += weight * grams.rotated(index[known], basis)
        return total

    def diagonals(self, basis: Tensor) -> Tensor:
        total = basis.new_zeros(len(self._parts[0][1]), basis.shape[1])
        for grams, places, weight in self._parts:
            index = torch.tensor(places, device=basis.device)
            known = index >= 0
            if bool(known.any()):
                total[known] += weight * grams.diagonals(basis)[index[known]]
        return total
