"""Statistics of what enters the last layer, and of the stages before it: how novel other inputs are by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks, as_double
from posthoc_uq.core.distributed import all_reduce_sum
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.numerics import eigh_descending, nystrom
from posthoc_uq.core.randomness import mix
from posthoc_uq.curvature.features import (
    STAGES,
    FeatureSource,
    calls_of,
    feature_rows,
    grid_of,
    rows_of_stage,
    size_of,
    watched_for,
)
from posthoc_uq.layers.capture import Recording, WatchedLayer
from posthoc_uq.layers.layer import Call, Layer
from posthoc_uq.layers.operands import weighted
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import SampleWeights, nothing_counts, weights_of
from posthoc_uq.posteriors.block import TensorSpec, check_bounds
from posthoc_uq.posteriors.stages import SCALE_NUMBERS, KeptRows, joined, scale_of

SMOOTHING = 3e-4
SOURCES = ("outputs", "positions", "pooled")
MAX_LOG_ODDS = 1e3
"""Of ratios in float64 they stay below."""
_TENSORS = ("basis", "diagonal", "factors", "residual")


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
            sample are averaged. Of a stage a key of `posthoc_uq.curvature.features.STAGES`.
        samples: training inputs, or positions, that were seen.
        basis: U, ``(features, width)``, orthonormal; a bias counts as a feature that is always 1.
        diagonal: d, ``(classes, width)``.
        factors: F, ``(classes, width, rank)``.
        residual: rho, ``(classes,)``.
        smoothing: r, the ridge on every Gram as a share of its mean eigenvalue; may be set at any time. What stages
            are compared with is that of the fit.
        stages: the same of what enters a few layers before, in the order of the pass.
        scale: by which surprises of this layer and of others are compared, ``(20,)``, where there are stages, and of
            each of them (`posthoc_uq.posteriors.stages`); else None.
    """

    def __init__(
        self,
        layer: Layer,
        source: str,
        samples: int,
        tensors: Mapping[str, Tensor],
        smoothing: float = SMOOTHING,
        stages: Sequence[FeatureGrams] = (),
    ) -> None:
        self.layer, self.source, self.samples = layer, source, samples
        self.stages, self.scale = tuple(stages), tensors.get("scale")
        self.basis, self.diagonal = tensors["basis"], tensors["diagonal"]
        self.factors, self.residual = tensors["factors"], tensors["residual"]
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

    @property
    def watched(self) -> tuple[WatchedLayer, ...]:
        """What a pass keeps for it."""
        return watched_for(self.layer, [(stage.layer, stage.source) for stage in self.stages])

    @property
    def columns(self) -> list[int]:
        """Features of the last layer and of each stage."""
        return [self.basis.shape[0], *(stage.basis.shape[0] for stage in self.stages)]

    def over_layers(self, rows: Tensor) -> Tensor:
        """The novelty that is as surprising at the last layer as the input is to all layers together: never less than
        `novelty`, and equal to it where no stage is surprised.

        Args:
            rows: features of the last layer and of the stages side by side, ``(samples, sum(columns))``.

        Returns:
            ``(samples,)`` in (0, 1], float64; NaN where a feature is no finite number.
        """
        last, *others = rows.split(self.columns, dim=1)
        ratios = [stage.novelty(part) for stage, part in zip(self.stages, others, strict=True)]
        return self.joined([self.novelty(last, SMOOTHING), *ratios])

    def joined(self, ratios: Sequence[Tensor]) -> Tensor:
        """The same of the ratios of the last layer, at the fit's smoothing, and of each stage, each ``(samples,)``."""
        scales = [layer.scale for layer in (self, *self.stages) if layer.scale is not None]
        return joined(torch.stack(list(ratios)), as_double(torch.stack(scales).to(ratios[0].device)))

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
        ridge = self.ridge_for(features, smoothing)
        shares, squares = self._shares(features, ridge)
        return _ratio(ridge * shares.amin(1), squares)

    def left_out(self, features: Tensor, own: Tensor, weights: Tensor | None, traces: Tensor) -> Tensor:
        """The novelty of training rows, each left out of the Gram that it was summed into.

        Args:
            features: ``(samples, features)``.
            own: the Gram of each, ``(samples,)``.
            weights: how often it counted there; None for once.
            traces: of the Grams before they were scaled, ``(classes,)``.
        """
        shares, squares = self._shares(features, self.smoothing)
        mine = shares.gather(1, own.unsqueeze(1))
        leverage = mine * (features.shape[1] / traces[own]).to(mine).unsqueeze(1)
        if weights is not None:
            leverage = leverage * weights.to(leverage).unsqueeze(1)
        rest = mine / (1 - leverage).clamp(min=_LEAST_REST)
        return _ratio(self.smoothing * shares.scatter(1, own.unsqueeze(1), rest).amin(1), squares)

    def _shares(self, features: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """``phi^T (G_c + r)^-1 phi``, ``(samples, classes)``, and ``phi^T phi``, ``(samples,)``."""
        basis, inverse, directions = self._prepared(ridge, features.device)
        phi = as_double(features)
        squares = phi.square().sum(1)
        inside = phi @ basis
        remaining = inside.square() @ inverse[:, :-1].T
        if basis.shape[1] < basis.shape[0]:
            outside = (squares - inside.square().sum(1)).clamp(min=0)
            remaining = remaining + outside.unsqueeze(1) * inverse[:, -1]
        if directions.shape[1]:
            explained = inside @ directions
            remaining = remaining - explained.square().unflatten(1, (self.classes, -1)).sum(2)
        return remaining, squares

    def ridge_for(self, features: Tensor, smoothing: float | None = None) -> float:
        """The ridge of `novelty`, which has these arguments, too; it raises what that does."""
        if features.ndim != 2 or features.shape[1] != self.basis.shape[0]:
            raise PosthocUQError(
                f"Layer '{self.layer.name}' has inputs of shape {tuple(features.shape)} (with the bias's 1) here, and "
                f"the fit saw {self.basis.shape[0]} numbers a sample; pass inputs like those of the fit."
            )
        return self.smoothing if smoothing is None else _checked_smoothing(smoothing)

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
        """What is stored, by name; of stages with their number before it."""
        found = {name: getattr(self, name) for name in _TENSORS}
        if self.scale is not None:
            found["scale"] = self.scale
        for number, stage in enumerate(self.stages):
            found |= {_of_stage(number, name): tensor for name, tensor in stage.tensors().items()}
        return found

    def bytes(self) -> int:
        """Bytes that these take."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

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
        } | ({"stages": [stage.attributes() for stage in self.stages]} if self.stages else {})

    @staticmethod
    def specs(attributes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """What each tensor must be, by the attributes alone.

        Raises:
            CorruptPosteriorError: an attribute is out of range.
        """
        layer = Layer.from_attributes(attributes["layer"]["name"], attributes["layer"])
        features, stages = size_of(layer, attributes["source"]), attributes.get("stages", ())
        classes = attributes["classes"]
        width = check_bounds(attributes, "width", 1, features)
        rank = check_bounds(attributes, "rank", 0, width)
        specs = {
            "basis": TensorSpec((features, width), orthonormal=True),
            "diagonal": TensorSpec((classes, width), non_negative=True),
            "factors": TensorSpec((classes, width, rank)),
            "residual": TensorSpec((classes,), non_negative=True),
        }
        if stages or attributes["source"] in STAGES:
            specs["scale"] = TensorSpec((SCALE_NUMBERS,), largest=MAX_LOG_ODDS, exact=True)
        for number, stage in enumerate(stages):
            specs |= {_of_stage(number, name): spec for name, spec in FeatureGrams.specs(stage).items()}
        return specs

    @classmethod
    def restore(cls, attributes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> FeatureGrams:
        """The statistics that these attributes and tensors describe."""
        layer = Layer.from_attributes(attributes["layer"]["name"], attributes["layer"])
        source, samples, smoothing = (attributes[name] for name in ("source", "samples", "smoothing"))
        stages = [
            cls.restore(own, {name: tensors[_of_stage(number, name)] for name in cls.specs(own)})
            for number, own in enumerate(attributes.get("stages", ()))
        ]
        return cls(layer, source, samples, tensors, smoothing, stages)


def _of_stage(number: int, name: str) -> str:
    """The name of a tensor of a stage."""
    return f"stage{number}_{name}"


def _ratio(remaining: Tensor, squares: Tensor) -> Tensor:
    """What is left of the prior's variance, ``(samples,)`` in (0, 1]: 1 where the features are 0."""
    share = torch.where(squares == 0, torch.ones_like(remaining), remaining / squares)
    return share.clamp(torch.finfo(torch.float32).tiny, 1.0)


def _checked_smoothing(value: Any) -> float:
    number = float(value)
    if not 1e-12 <= number <= 1e12:
        raise PosthocUQError(f"smoothing must lie between 1e-12 and 1e12, not {value}.")
    return number


# Grams of the last layer's inputs by predicted class, summed in a sweep and compressed for the posterior.
#
# The Grams of all classes are summed exactly if they fit into memory. Otherwise every Gram is sketched, ``Y_c
# = G_c Omega``, with its exact trace and the exact sum of all Grams (Tropp, Yurtsever, Udell, Cevher 2017,
# "Fixed-rank approximation of a positive-semidefinite matrix from streaming data"). All of these are sums
# over the samples: they depend neither on the batches nor on the order, and several processes can add up
# theirs. Where samples have weights, each counts w times, as so many copies of it would.

_MAX_NUMBERS = 2**20  # kept for all classes together, 4 MiB in float32
_MAX_DIRECTIONS = 32  # kept for one class
_MIN_SAMPLES = 10  # of a class; those with fewer share one Gram
_ROUNDING_VARIANCE = 1e-9  # variances up to this are rounding, where the mean variance is 1
_SKETCH_WIDTHS = (8, 16)  # of a class's sketch, at least and at most
_LEAST_REST = 1e-9  # of a row's own share of its Gram that is not its own


class ClassGrams:
    """Sums ``phi phi^T`` by the class that the network predicts.

    There is one Gram a class for classification, one for each sign of the logit for a binary model, and a single one
    for a likelihood without classes.

    Args:
        source: where the features come from.
        likelihood: of the targets.
        device: of the model.
        budget: bytes that the sums may take.

    Attributes:
        places: after `result`, the Gram of each class, ``(classes,)``.
        traces: of these Grams before they were scaled.
    """

    places: Tensor
    traces: Tensor

    def __init__(
        self,
        source: FeatureSource,
        likelihood: Likelihood,
        device: torch.device,
        budget: int,
    ) -> None:
        self.source = source
        self._likelihood = likelihood
        by_class = source.by_class
        size, classes = source.size, 1 if by_class is False else likelihood.classes(source.outputs)
        zero = as_double(torch.zeros((), device=device))
        width = min(_SKETCH_WIDTHS[1], budget // (16 * classes * size))
        if by_class is None:
            by_class = classes * size**2 * 8 <= budget or width >= _SKETCH_WIDTHS[0]
        if source.source in STAGES:
            by_class = by_class and classes * size**2 <= _MAX_NUMBERS
        classes = classes if by_class else 1  # too many classes even for sketches
        width = max(width, _SKETCH_WIDTHS[0])
        self._test: Tensor | None = None
        self.sums = {"counts": zero.new_zeros(classes), "rows": zero.clone()}
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

    def add(self, features: Tensor, outputs: Tensor) -> None:
        """Add features ``(samples, features)`` of samples with these outputs."""
        checks = DeferredChecks()
        self.add_rows(features, self.labels(outputs), None, checks)
        checks.run()

    def add_positions(
        self,
        rows: Tensor,
        grid: tuple[int, ...],
        outputs: Tensor,
        targets: Tensor | None,
        weights: SampleWeights | None,
        checks: DeferredChecks,
    ) -> tuple[Tensor, list[Tensor]]:
        """Add the features of every position of a batch, ``(samples * positions, features)`` on this grid.

        Returns:
            Which of these rows were added, and what was: features, classes, and how often each, but for once each.
        """
        places, labels, counts = self._of_positions(outputs, targets, grid, weights)
        rows = rows[places.to(rows.device)]
        self.add_rows(rows, labels, counts, checks)
        return places, [rows, labels] if counts is None else [rows, labels, counts]

    def _of_positions(
        self,
        outputs: Tensor,
        targets: Tensor | None,
        grid: tuple[int, ...],
        weights: SampleWeights | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Which rows of features count for which class, and how often, each ``(rows,)``; None for once each.

        On a coarser grid than that of the outputs every position has the features of the nearest one, and a feature
        position counts by the share of its positions that count, for the class that each of them is predicted to have.
        """
        layout = self._likelihood.positions_of(outputs)
        assert layout is not None
        positions, samples = layout.positions(outputs), outputs.shape[0]
        labels, counts = self.labels(outputs), as_double(layout.counts(outputs, targets))
        if weights is not None:
            own = weights.samples.unsqueeze(1) if weights.by_position is None else weights.by_position
            counts = counts * own.to(counts)
        counted = counts.flatten().nonzero().squeeze(1)
        if grid == positions:
            return counted, labels[counted], None if weights is None else counts.flatten()[counted]
        numbers = torch.arange(prod(grid), dtype=torch.float32, device="cpu").reshape(1, 1, *grid)
        nearest = F.interpolate(numbers, size=positions, mode="nearest").long().flatten().to(counts.device)
        shares = (1 / nearest.bincount().to(counts))[nearest]
        places = prod(grid) * torch.arange(samples, device=counts.device).unsqueeze(1) + nearest
        classes = self.sums["counts"].shape[0]
        pairs = places.flatten()[counted] * classes + labels[counted]
        found, place = pairs.unique(return_inverse=True)
        of_found = counts.new_zeros(len(found)).index_add_(0, place, (counts * shares).flatten()[counted])
        return found // classes, found % classes, of_found

    def add_rows(
        self, features: Tensor, labels: Tensor, weights: Tensor | None, checks: DeferredChecks
    ) -> None:
        """Add features of these classes, each as often as its weight says."""
        phi, sums = as_double(features), self.sums
        labels = labels.to(phi.device)
        ones = torch.ones_like(phi[:, 0])
        sums["counts"].index_add_(0, labels, ones if weights is None else weights.to(phi))
        sums["rows"] += len(phi)
        phi = weighted(phi, None if weights is None else weights.sqrt())
        if self._test is None:
            ordered = phi[labels.argsort(stable=True)]
            rows = torch.zeros_like(sums["counts"]).index_add_(0, labels, ones)
            checks.add(rows, lambda host_rows: self._add_classes(ordered, host_rows))
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

    def labels(self, outputs: Tensor) -> Tensor:
        """The Grams that samples, or positions, with these outputs belong to."""
        if self.sums["counts"].shape[0] == 1:
            by_position = self.source.source in ("positions", "pixels")
            several = self._likelihood.positions_of(outputs) if by_position else None
            rows = outputs if several is None else several.rows(outputs)
            return torch.zeros(len(rows), dtype=torch.int64, device=outputs.device)
        return self._likelihood.predicted_class(outputs)

    def result(self, dtype: torch.dtype) -> FeatureGrams:
        """The compressed statistics of the samples of all processes, in `dtype`; every process must call this, and only
        once. Classes with few samples share one Gram.

        Raises:
            NonFiniteError: a number is not finite in this dtype.
        """
        all_reduce_sum(self.sums, "the sum for the novelty")
        if not all(bool(torch.isfinite(each).all()) for each in self.sums.values()):
            raise NonFiniteError(
                f"The second moments of what enters layer '{self.source.layer.name}' are not finite: bring the inputs "
                f"to about unit size."
            )
        counts: list[float] = self.sums["counts"].tolist()
        if not any(counts):
            raise nothing_counts()
        frequent = [c for c, count in enumerate(counts) if count >= _MIN_SAMPLES] if len(counts) > 1 else [0]
        rare = [c for c, count in enumerate(counts) if count and c not in frequent]
        device = self.sums["counts"].device
        places = torch.tensor([*range(len(frequent)), *[len(frequent)] * len(rare)], device=device)

        def grouped(sums: Tensor) -> Tensor:
            start = sums.new_zeros(len(frequent) + bool(rare), *sums.shape[1:])
            return start.index_add_(0, places, sums[[*frequent, *rare]])

        if self._test is None:
            grams: _Exact | _Sketched = _Exact(grouped(self.sums["grams"]))
            total = self.sums["grams"].sum(0)
        else:
            total = self.sums["total"]
            grams = _Sketched(grouped(self.sums["sketches"]), self._test, grouped(self.sums["traces"]), total)
        self.places = torch.zeros(len(counts), dtype=torch.int64, device=device)
        self.places[[*frequent, *rare]] = places
        self.traces = grams.traces
        layer, rows = self.source.layer, int(self.sums["rows"])
        tensors = {name: t.to(dtype).contiguous() for name, t in compressed(grams, total, rows).items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise NonFiniteError(
                f"The second moments of what enters layer '{layer.name}' are not finite in {dtype}: bring the inputs "
                f"to about unit size, or fit with dtype=torch.float64."
            )
        return FeatureGrams(layer, self.source.source, max(1, round(sum(counts))), tensors)


class FeatureStatistics:
    """Watches a sweep for `FeatureGrams`: sums of the last layer and of each stage, and a few rows of all of them.

    Args:
        source: where the features come from.
        likelihood: of the targets.
        device: of the model.
        budget: bytes that the sums of one layer, and the rows, may take.

    Attributes:
        source: the same.
    """

    def __init__(
        self, source: FeatureSource, likelihood: Likelihood, device: torch.device, budget: int
    ) -> None:
        self.source, self._likelihood = source, likelihood
        self._last = ClassGrams(source, likelihood, device, budget)
        self._stages = [ClassGrams(stage, likelihood, device, budget) for stage in source.stages]
        sizes = [source.size, *(stage.size for stage in source.stages)]
        if source.source != "positions":  # else each layer has pixels of its own
            sizes = [sum(sizes)]
        self._kept = [KeptRows(size, budget) for size in sizes] if source.stages else []

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: DeferredChecks) -> None:
        """Add a batch; see `Observer`."""
        source, outputs, calls = self.source, recording.outputs.detach(), recording.watched
        weights = weights_of(self._likelihood, outputs, batch)
        samples, counts = keys.shape[0], None if weights is None else weights.samples
        if source.source == "positions":
            self._see_positions(batch, keys, recording, weights, checks)
            return
        parts = [feature_rows(calls, source.layer, samples, attention_mask=batch.attention_mask)]
        for stage in source.stages:
            rows = _rows_if_once(calls, stage.layer, samples)
            # it ran once for the first batch alone: sums that are no numbers leave it out
            none = torch.full((samples, stage.size), torch.nan, device=parts[0].device)
            parts.append(none if rows is None else rows)
        labels = list[Tensor]()
        for grams, rows in zip((self._last, *self._stages), parts, strict=True):
            labels.append(grams.labels(outputs))
            grams.add_rows(rows, labels[-1], counts, checks)
        if self._stages:
            weighing = [] if counts is None else [counts]
            self._kept[0].add(keys, [*parts, *labels, *weighing], counts, checks)

    def _see_positions(
        self,
        batch: Batch,
        keys: Tensor,
        recording: Recording,
        weights: SampleWeights | None,
        checks: DeferredChecks,
    ) -> None:
        outputs, calls, samples = recording.outputs.detach(), recording.watched, keys.shape[0]
        layer = self.source.layer
        grid = grid_of(calls_of(calls, layer)[0])
        last = feature_rows(calls, layer, samples, by_position=True)
        layers = [(self._last, last, grid)]
        for stage in self._stages:
            rows = _rows_if_once(calls, stage.source.layer, samples)
            if rows is None:
                rows = torch.full((samples, *grid, stage.source.size), torch.nan, device=last.device)
            layers.append((stage, rows.flatten(0, -2), tuple(rows.shape[1:-1])))
        for number, (grams, rows, own) in enumerate(layers):
            places, added = grams.add_positions(rows, own, outputs, batch.targets, weights, checks)
            if self._kept:
                places = places.to(keys.device)
                mixed = mix(keys[places // prod(own)] + mix(places % prod(own)))
                counts = added[2] if len(added) > 2 else None
                self._kept[number].add(mixed, added, counts, checks)

    def result(self, dtype: torch.dtype) -> FeatureGrams:
        """The statistics of the samples of all processes, in `dtype`; every process must call this, and only once.
        Stages whose numbers do not fit into this format are left out.

        Raises:
            NonFiniteError: those of the last layer do not.
        """
        found, kept = self._last.result(dtype), [each.result() for each in self._kept]
        if len(kept) == 1:
            (rows,), count = kept, 1 + len(self._stages)
            kept = [[*rows[number : 2 * count : count], *rows[2 * count :]] for number in range(count)]
        if kept:
            found.scale = _scale_of(found, self._last, *kept[0])
        stages = list[FeatureGrams]()
        for number, grams in enumerate(self._stages, 1):
            try:
                stage = grams.result(dtype)
            except NonFiniteError:
                continue
            stage.scale = _scale_of(stage, grams, *kept[number])
            stages.append(stage)
        found.stages = tuple(stages)
        if not stages:
            found.scale = None
        return found


def _rows_if_once(calls: Sequence[Call], layer: Layer, samples: int) -> Tensor | None:
    """`rows_of_stage`, or None where the layer did not run just once."""
    try:
        return rows_of_stage(calls, layer, samples)
    except PosthocUQError:
        return None


def _scale_of(
    found: FeatureGrams, grams: ClassGrams, rows: Tensor, labels: Tensor, weights: Tensor | None = None
) -> Tensor:
    own = grams.places[labels.to(grams.places.device)]
    return scale_of(found.left_out(rows, own, weights, grams.traces)).float().to(rows.device)


class _Exact:
    """One positive semidefinite matrix a class, with its trace."""

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices
        self.traces = matrices.diagonal(dim1=1, dim2=2).sum(1)

    def rotated(self, part: Tensor, basis: Tensor) -> Tensor:
        """``U^T G_c U`` of some classes, by their numbers, ``(classes, width, width)``."""
        return basis.T @ self._matrices[part] @ basis

    def diagonals(self, basis: Tensor) -> Tensor:
        """The diagonals of ``U^T G_c U`` of all classes, ``(classes, width)``."""
        return torch.stack([((matrix @ basis) * basis).sum(0) for matrix in self._matrices])


class _Sketched:
    """The same of sketches: each Gram by its leading directions; the rest of its trace is spread like that of the total
    Gram.
    """

    def __init__(self, sketches: Tensor, test: Tensor, traces: Tensor, total: Tensor) -> None:
        self.traces = traces
        values, vectors = nystrom(sketches, test.expand(len(sketches), -1, -1))
        self._roots = vectors * values.sqrt().unsqueeze(1)
        self._remaining_traces = (traces - values.sum(1)).clamp(min=0)
        flat = self._roots.transpose(0, 1).flatten(1)
        # positive semidefinite: no Nystrom approximation is above its Gram
        remainder = total - flat @ flat.T
        self._remainder = remainder / remainder.trace().clamp(min=torch.finfo(remainder.dtype).tiny)

    def rotated(self, part: Tensor, basis: Tensor) -> Tensor:
        roots = basis.T @ self._roots[part]
        remainder = basis.T @ self._remainder @ basis
        return roots @ roots.transpose(1, 2) + self._remaining_traces[part, None, None] * remainder

    def diagonals(self, basis: Tensor) -> Tensor:
        remainder = ((self._remainder @ basis) * basis).sum(0)
        of_roots = torch.stack([(basis.T @ root).square().sum(1) for root in self._roots])
        return of_roots + self._remaining_traces.unsqueeze(1) * remainder


def room(classes: int, size: int) -> tuple[int, int]:
    """The width of the shared basis and the directions of each class that fit into `_MAX_NUMBERS` numbers."""
    most = _MAX_NUMBERS - 4 * classes  # residuals, with some room
    width = max(1, min(size, most // (size + classes)))
    left = most - width * (size + classes)
    return width, max(0, min(width, _MAX_DIRECTIONS, left // (classes * width)))


def compressed(grams: _Exact | _Sketched, total: Tensor, rows: int) -> dict[str, Tensor]:
    """The tensors of `FeatureGrams` in at most `_MAX_NUMBERS` numbers.

    The basis is the eigenbasis of the sum of all Grams, as wide as there is room for. In it every class keeps its exact
    diagonal S and the leading directions of its correlations ``S^-1/2 U^T G_c U S^-1/2``: as many as there is room for,
    but at most `_MAX_DIRECTIONS`.

    Args:
        grams: of the classes.
        total: their sum, ``(size, size)``.
        rows: of features that it sums; no more of its eigenvalues are positive.
    """
    classes, size = len(grams.traces), total.shape[0]
    width, rank = room(classes, size)
    basis = eigh_descending(total.unsqueeze(0), rows)[1][0][:, :width]
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
    varies = diagonal > _ROUNDING_VARIANCE
    deviations = torch.where(varies, diagonal, torch.zeros_like(diagonal)).sqrt()
    inverse = torch.where(varies, diagonal.clamp(min=_ROUNDING_VARIANCE).rsqrt(), torch.zeros_like(diagonal))
    values, vectors = eigh_descending(inverse.unsqueeze(2) * matrices * inverse.unsqueeze(1))
    dimensions = varies.sum(1)
    mean = (dimensions - values[:, :rank].sum(1)).clamp(min=0) / (dimensions - rank).clamp(min=1)
    excess = (values[:, :rank] - mean.unsqueeze(1)).clamp(min=0)
    leading = vectors[:, :, :rank] * excess.sqrt().unsqueeze(1)
    return leading * deviations.unsqueeze(2)
