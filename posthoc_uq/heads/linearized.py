"""The linearised head: outputs linear in the weights, so that their covariance has a closed form."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import as_double, full_precision, temporary_bytes, without_autocast
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import check_differentiable, model_device, replicate, statistics_dtype, unwrap
from posthoc_uq.core.options import Count, check_option
from posthoc_uq.core.progress import progress_span, split_progress
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.features import watching
from posthoc_uq.heads.jacobians import (
    ONE_POSITION,
    Gradient,
    TrackedModel,
    WeightCovariance,
    check_shape,
    function_draws,
    jacobians,
    layout_of,
    output_rows,
    pull_back,
    track_layers,
    with_classes,
)
from posthoc_uq.heads.novelty import class_novelty, novelty_of_calls
from posthoc_uq.heads.predictor import GaussianPredictor, KeyedCache, check_finite, reading
from posthoc_uq.layers.frozen import Features, FrozenPart, called
from posthoc_uq.layers.layer import Call, Layer
from posthoc_uq.layers.operands import temporary_limit
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.layers.rules import LayerGradients
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.draws import (
    LINK_DRAWS,
    LogitCovariance,
    MatrixProduct,
    OutputGaussian,
    of_product,
)
from posthoc_uq.likelihoods.labels import Layout, novelty_at
from posthoc_uq.likelihoods.prediction import Prediction, at_least_float32
from posthoc_uq.posteriors import QUADRATIC, Posterior
from posthoc_uq.posteriors.covariance import Covariance, Mode
from posthoc_uq.posteriors.settings import get_width

if TYPE_CHECKING:
    from posthoc_uq.heads.spectrum import Spectrum

ALL_OUTPUTS = 20  # up to which `outputs="auto"` takes all of them
TOP = 10  # classes that "topk" takes
_COVARIANCE_CLASSES = 50  # up to which the link gets a covariance of all
_MAX_BACKWARD = (
    256  # passes for outputs with positions; `engine="auto"` draws the function where more are needed
)
_MAX_SPREAD = 2**16  # logits whose covariance is reduced to its leading directions at once
_MAX_ROW_BYTES = 2**24  # of the temporaries of rows that are computed at once
_STORED_BUDGETS = 4  # output gradients of more than this many memory budgets split the batch


@dataclass(frozen=True)
class ChosenOutputs:
    """The outputs that are used.

    Attributes:
        top: ``"all"``, ``"auto"``, or a number of classes.
        classes: whether outputs are logits of several classes.
        joint: whether the prediction needs the covariance of a sample's outputs.
        link: the name of the link from Gaussian logits to probabilities.
    """

    top: int | str
    classes: bool
    joint: bool
    link: str

    def number(self, size: int) -> int | None:
        """How many of `size` outputs are used, or None for all."""
        if self.top == "all":
            return None
        if isinstance(self.top, int):
            return None if self.top >= size else self.top
        return TOP if size > ALL_OUTPUTS and self.classes else None

    def indices(self, rows: Tensor) -> Tensor | None:
        """The outputs used of each row, ``(rows, k)``, the largest first; or None for all."""
        used = self.number(rows.shape[1])
        return None if used is None else rows.topk(used).indices

    def wants_covariance(self, size: int, many_rows: bool) -> bool:
        """Whether the link gets the full covariance of `size` outputs. Of many rows, such as an image's pixels, it
        would be large, and only the bridge cannot do without.
        """
        fits = self.joint and size <= _COVARIANCE_CLASSES and self.number(size) is None
        return fits and (not many_rows or self.link == "bridge")

    @property
    def wants_spread(self) -> bool:
        """Whether the link can use a `LogitCovariance`: an approximate covariance of many classes."""
        return self.classes and self.link != "bridge"


def checked_outputs(outputs: str | int) -> int | str:
    """``"all"``, ``"auto"``, or a number of classes.

    Raises:
        PosthocUQError: `outputs` is none of these.
    """
    if outputs in ("all", "auto"):
        return str(outputs)
    number: Any = outputs
    if outputs == "topk":
        number = TOP
    elif isinstance(outputs, str) and outputs.startswith("topk:") and outputs[5:].isdecimal():
        number = int(outputs[5:])
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PosthocUQError(
            f"outputs must be 'auto', 'all', 'topk', 'topk:K' or a positive number of classes, not {outputs!r}."
        )
    return number


class LinearizedOutputs(ABC):
    """The outputs of a batch as rows, one for each sample and position, and the covariance of every row. Outputs
    without positions (pixels, tokens) are those of one position.

    Attributes:
        mean: the outputs used, in the shape of the model's, the positions that were picked as one dimension.
        sizes: of the dimensions that count the model's positions.
        picked: the positions used, ``(k,)``, or None for all.
        watched: the calls of the layer whose inputs novelty is measured by.
    """

    def __init__(
        self,
        outputs: Tensor,
        samples: int,
        chosen: ChosenOutputs,
        layout: Layout,
        positions: Tensor | None,
        watched: Sequence[Call],
    ) -> None:
        """
        Args:
            outputs: of the model.
            samples: in the batch.
            chosen: the outputs that are used.
            layout: of the outputs.
            positions: those that are used, from `checked_positions`.
            watched: see above.
        """
        self.watched, self._single = list(watched), outputs.ndim == 1
        outputs = with_classes(outputs)
        self.sizes = layout.positions(outputs)
        self.picked = picked_positions(positions, self.sizes)
        self._chosen, self._layout, self._samples = chosen, layout, samples
        self._places = torch.arange(prod(self.sizes), device="cpu") if self.picked is None else self.picked
        self._rows = self._used(layout.rows(outputs))
        self.mean = self._whole(self._rows)

    def _used(self, rows: Tensor) -> Tensor:
        """Of rows of all positions, ``(samples * positions, ...)``, those of the positions that are used."""
        if self.picked is None:
            return rows
        chosen = rows.reshape(self._samples, -1, rows.shape[-1])[:, self.picked.to(rows.device)]
        return chosen.flatten(0, 1)

    def _whole(self, rows: Tensor) -> Tensor:
        """Rows in the shape of `mean`."""
        whole = self._layout.whole(rows, self.sizes if self.picked is None else (len(self.picked),))
        return whole.squeeze(1) if self._single else whole

    # What an engine gives, at all rows

    @abstractmethod
    def _variances(self) -> Tensor:
        """``(rows, classes)``."""

    @abstractmethod
    def _covariances(self, indices: Tensor | None) -> Tensor:
        """``(rows, k, k)``, of all classes or of those at `indices`, ``(rows, k)``."""

    @abstractmethod
    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        """``(rows * k, rows * k)``."""

    @abstractmethod
    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        """Variances, and what a link can use of a covariance of many classes."""

    @property
    def _many_rows(self) -> bool:
        """Whether there may be too many rows for a matrix each."""
        return bool(self.sizes)

    # What follows from it. Only the model itself runs under the caller's autocast.

    def gaussian(self) -> OutputGaussian:
        """Mean, variance, and as much of the covariance as the link can use."""
        with without_autocast(self.mean.device.type):
            covariance: Tensor | LogitCovariance | None = None
            if self._chosen.wants_covariance(self._rows.shape[1], self._many_rows):
                covariance = self._covariances(None)
                variance = covariance.diagonal(dim1=1, dim2=2)
            elif self._chosen.wants_spread:
                variance, covariance = self._spread()
            else:
                variance = self._variances()
            return OutputGaussian(self.mean, self._whole(variance), covariance)

    def variance(self) -> Tensor:
        """Variance of every output that is used, shaped like `mean`."""
        with without_autocast(self.mean.device.type):
            return self._whole(self._variances())

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the outputs that are used; see `LinearizedPredictor.functional_covariance`."""
        with without_autocast(self.mean.device.type):
            indices = self._chosen.indices(self._rows)
            if joint:
                return self._joint_covariance(indices)
            found = self._covariances(indices)
            return found.unflatten(0, (self._samples, len(self._places))) if self.sizes else found

    def trace(self, probes: int) -> Tensor:
        """The sum of the variances of all outputs that are used, ``(samples,)``.

        Args:
            probes: random vectors, if more outputs than this are to be estimated.
        """
        return self.variance().reshape(self._samples, -1).sum(1)


@dataclass(frozen=True)
class Engine:
    """What the linearisations of all batches share.

    Attributes:
        tracked: the posterior's layers in the model.
        weights: their covariance.
        closed: whether the closed form may be used: one layer has a posterior.
        chosen: the outputs that are used.
        layout: gives that of outputs of so many samples.
        positions: those that are used, from `checked_positions`.
        dtype: of activations and output gradients.
        budget: bytes that one temporary may take.
    """

    tracked: TrackedModel
    weights: WeightCovariance | Spectrum
    closed: bool
    chosen: ChosenOutputs
    layout: Callable[[Tensor, int], Layout]
    positions: Tensor | None
    dtype: torch.dtype
    budget: int


class Linearization(LinearizedOutputs):
    """One forward pass of a batch, and the backward passes for the covariance of its outputs; none where the last layer
    has a closed form.

    Attributes:
        engine: what all batches share.
        closed: the last layer, if the posterior covers no other and the engine may use it.
    """

    def __init__(self, engine: Engine, batch: Batch, samples: int) -> None:
        """
        Args:
            engine: see above.
            batch: the model's arguments.
            samples: in the batch.
        """
        self.engine, self._batch, self._weights = engine, batch, engine.weights
        self._recording = engine.tracked.capture.run(batch, samples)
        outputs = self._recording.outputs.detach()
        layout = engine.layout(outputs, samples)
        super().__init__(outputs, samples, engine.chosen, layout, engine.positions, self._recording.watched)
        self._autocast = torch.is_autocast_enabled(outputs.device.type)
        self.closed = self._last_layer if engine.closed else None

    @property
    def backward_passes(self) -> int:
        """How many the covariances of this batch take."""
        classes = self._rows.shape[1]
        return 0 if self.closed else len(self._places) * (self._chosen.number(classes) or classes)

    @property
    def _many_rows(self) -> bool:
        return self.closed is not None and super()._many_rows  # backward passes are for few positions

    @cached_property
    def _last_layer(self) -> _LastLayer | None:
        """The layer whose outputs are the model's, if the posterior covers it."""
        engine = self.engine
        name, capture = engine.tracked.last, engine.tracked.capture
        if name is None:
            return None
        with without_autocast(self.mean.device.type):
            rows = output_rows(self._recording, capture, name, engine.dtype, self._layout)
        if rows is None:
            return None
        assert isinstance(self._weights, WeightCovariance)
        return _LastLayer(self._weights.of_layer(name), self._used(rows), self._result, engine.budget)

    def _result(self, computed: Tensor) -> Tensor:
        """On the device and in the number format of results."""
        return computed.to(self.mean.device, self.engine.dtype)

    def _variances(self) -> Tensor:
        if self.closed:
            return self.closed.variances()
        indices = self._chosen.indices(self._rows)
        number = self._rows.shape[1] if indices is None else indices.shape[1]
        variance = self._result(self._variances_at_places(indices, number).clamp(min=0))
        if indices is None:
            return variance
        if self._last_layer is None:
            others = variance.mean(1, keepdim=True).expand(self._rows.shape)
        else:
            others = self._last_layer.variances()
        return others.scatter(1, indices, variance)

    def _variances_at_places(self, indices: Tensor | None, number: int) -> Tensor:
        parts = [
            self._variances_of(self._one_class(place, indices), number, place == len(self._places) - 1)
            for place in split_progress(range(len(self._places)))
        ]
        return torch.stack(parts, 1).flatten(0, 1)

    def _covariances(self, indices: Tensor | None) -> Tensor:
        # without positions, backward passes for a few of many classes are cheaper
        if self.closed and (indices is None or self.sizes):
            return _selected(self.closed.covariances(self._rows.shape[1]), indices, False)
        return self._contracted(indices)

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        """By sample, place and class."""
        if self.closed and (indices is None or self.sizes):
            return _selected(self.closed.joint_covariance(), indices, True)
        gradients = [self._one_class(place, indices) for place in range(len(self._places))]
        each = self._rows.shape[1] if indices is None else indices.shape[1]
        number = each * len(gradients)
        return self._of_functions(lambda n: gradients[n // each](n % each), number, "joint", last=True)

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        if self.closed:
            variance = self.closed.variances()
            return variance, self.closed.spread(self._rows, variance, self._chosen.link)
        indices, last = self._chosen.indices(self._rows), self._last_layer
        if indices is None:
            return self._variances(), None
        # with the mean of all logits, for the covariance of the centred ones
        return top_spread(self._rows, indices, self._contracted(indices, centre=True), last)

    def at_every_prior(self, spectrum: Spectrum) -> OutputsByPrior:
        """The outputs at every prior precision, from products with `spectrum`, which are those of the engine."""
        indices = self._chosen.indices(self._rows)
        with without_autocast(self.mean.device.type):
            sums = self._contracted(indices, centre=indices is not None)
        return OutputsByPrior(self.mean, self._rows, indices, sums, spectrum, self._chosen)

    def trace(self, probes: int) -> Tensor:
        """By random signs if the outputs outnumber `probes`."""
        classes = self._rows.shape[1]
        size = len(self._places) * classes
        if self.closed:
            return super().trace(probes)
        with without_autocast(self.mean.device.type):
            if size <= probes:
                total = self._variances_at_places(None, classes).reshape(self._samples, -1).sum(1)
            else:
                signs = self._random_signs(probes, torch.Generator().manual_seed(0))
                total = self._variances_of(signs, probes).sum(1) / probes
            return self._result(total)

    # Backward passes

    def _one_class(self, place: int, indices: Tensor | None) -> Gradient:
        """Gradients of single outputs at one place: number i is the i-th class, or with `indices` each row's
        ``indices[:, i]``; the number after the last is the mean of all classes.
        """
        rows, position, size = self._rows, int(self._places[place]), prod(self.sizes)
        classes = rows.shape[1]
        count = classes if indices is None else indices.shape[1]
        here = None if indices is None else indices.reshape(self._samples, -1, count)[:, place]

        def gradient(number: int) -> Tensor:
            unit = torch.zeros(self._samples, size, classes, dtype=rows.dtype, device=rows.device)
            if number == count:
                unit[:, position] = 1 / classes
            elif here is None:
                unit[:, position, number] = 1
            else:
                unit[:, position].scatter_(1, here[:, number : number + 1], 1)
            return self._layout.whole(unit.flatten(0, 1), self.sizes)

        return gradient

    def _random_signs(self, numbers: int, generator: torch.Generator) -> Gradient:
        """Gradients of sums of all outputs that are used with random signs, the same for every sample (Rademacher
        vectors).
        """
        shape = numbers, len(self._places), self._rows.shape[1]
        signs = torch.randint(0, 2, shape, generator=generator, device="cpu").to(self._rows) * 2 - 1

        def gradient(number: int) -> Tensor:
            unit = signs.new_zeros(self._samples, prod(self.sizes), shape[2])
            unit[:, self._places.to(unit.device)] = signs[number]
            return self._layout.whole(unit.flatten(0, 1), self.sizes)

        return gradient

    def _variances_of(self, gradient: Gradient, number: int, last_place: bool = True) -> Tensor:
        """Variances of functions of the outputs, ``(samples, functions)``, as many at once as memory allows."""
        step = max(1, self._passes_at_once)
        variances: list[Tensor] = []
        for start in split_progress(range(0, number, step)):
            numbers = range(start, min(number, start + step))
            last = numbers.stop == number and last_place
            with progress_span(0, 0.5):
                pulled = pull_back(self._recording, gradient, numbers, self.engine.dtype, last=last)
            with progress_span(0.5, 1):
                variances.append(self._weights.contract(pulled, self._samples, len(numbers), "variance"))
        return torch.cat(variances, dim=1)

    def _contracted(self, indices: Tensor | None, centre: bool = False) -> Tensor:
        """Covariances of all outputs, or of those at `indices`, at each place; with `centre` the mean of all outputs
        comes last, as one more. A batch whose output gradients take too much memory is split in two.
        """
        number = (self._rows.shape[1] if indices is None else indices.shape[1]) + centre
        places, samples = len(self._places), self._samples
        if samples == 1 or number <= self._passes_at_once:
            gradients = [self._one_class(place, indices) for place in range(places)]
            parts = [
                self._of_functions(gradients[place], number, "covariance", place == places - 1)
                for place in split_progress(range(places))
            ]
            return torch.stack(parts, 1).flatten(0, 1)
        del self._recording  # its graph is not needed any more
        halves: list[Tensor] = []
        for start, stop in split_progress(((0, samples // 2), (samples // 2, samples))):
            with torch.autocast(self.mean.device.type, enabled=self._autocast):
                half = Linearization(
                    self.engine, self._batch.narrow(start, stop - start, samples), stop - start
                )
            part = None if indices is None else indices[start * places : stop * places]
            halves.append(half._contracted(part, centre))
        return torch.cat(halves)

    def _of_functions(self, gradient: Gradient, number: int, mode: Mode, last: bool) -> Tensor:
        with progress_span(0, 0.5):
            pulled = pull_back(self._recording, gradient, range(number), self.engine.dtype, last=last)
        with progress_span(0.5, 1):
            return self._result(self._weights.contract(pulled, self._samples, number, mode))

    @property
    def _passes_at_once(self) -> int:
        """How many backward passes' output gradients fit into memory; none where not even one fits."""
        pass_bytes = self._recording.numbers * torch.finfo(self.engine.dtype).bits // 8
        return _STORED_BUDGETS * self.engine.budget // max(1, pass_bytes)


@dataclass(frozen=True)
class OutputsByPrior:
    """The outputs of one batch without positions at every prior precision, up to what a `Spectrum` leaves out.

    Attributes:
        mean: the outputs, in the shape of the model's.
        rows: the outputs, ``(samples, outputs)``.
        indices: of those with a backward pass, ``(samples, k)``; None for all.
        sums: from `Spectrum.contract`; of the outputs at `indices` with the mean of all outputs as one more.
        spectrum: see above.
        chosen: the outputs that are used.
    """

    mean: Tensor
    rows: Tensor
    indices: Tensor | None
    sums: Tensor
    spectrum: Spectrum
    chosen: ChosenOutputs

    def at(self, prior_precision: float) -> OutputGaussian:
        """As `LinearizedOutputs.gaussian`; other outputs than those at `indices` have their mean variance."""
        found = self.spectrum.covariances(self.sums, prior_precision)
        covariance: Tensor | LogitCovariance | None = None
        if self.indices is not None:
            variance, covariance = top_spread(self.rows, self.indices, found, None)
            covariance = covariance if self.chosen.wants_spread else None
        else:
            variance = found.diagonal(dim1=1, dim2=2).clamp(min=0)
            covariance = found if self.chosen.wants_covariance(self.rows.shape[1], False) else None
        return OutputGaussian(self.mean, variance.reshape(self.mean.shape), covariance)


class _LastLayer:
    """The layer whose outputs are the model's.

    Attributes:
        covariance: of its weights.
        rows: its activations, ``(rows, n)``.
    """

    def __init__(
        self, covariance: Covariance, rows: Tensor, result: Callable[[Tensor], Tensor], budget: int
    ) -> None:
        """
        Args:
            covariance: see above.
            rows: see above.
            result: gives a tensor the number format of results.
            budget: bytes that one temporary may take.
        """
        self.covariance, self.rows = covariance, rows
        self._result, self._budget = result, budget

    def _parts(self, classes: int) -> tuple[Tensor, ...]:
        """The activations, a few rows at a time."""
        if torch.compiler.is_compiling():  # under a tracer the number of rows is a symbol
            return (self.rows,)
        limit = min(_MAX_ROW_BYTES, self._budget)
        return self.rows.split(max(1, limit // (8 * classes * (4 + self.rows.shape[1]))))

    def variances(self) -> Tensor:
        """Of the outputs by its own weights."""
        if torch.compiler.is_compiling():
            found = self.covariance.output_variance(as_double(self.rows).unsqueeze(1)).squeeze(1)
        else:
            found = self.covariance.variances_of(self.rows)
        return self._result(found.clamp(min=0))

    def centred_variances(self, variance: Tensor) -> Tensor:
        """Of the outputs less their mean, for outputs of these variances."""
        classes = variance.shape[1]
        sums: list[Tensor] = []
        for part in self._parts(classes):
            ones = part.new_ones(part.shape[0], classes, 1)
            sums.append(self.covariance.output_product(part)(ones)[:, :, 0])
        means = self._result(torch.cat(sums)) / classes
        return (variance - 2 * means + means.mean(1, keepdim=True)).clamp(min=0)

    def covariances(self, classes: int) -> Tensor:
        """``(rows, m, m)``."""
        parts = self._parts(classes)
        return torch.cat([self._result(self.covariance.output_covariance(part)) for part in parts])

    def joint_covariance(self) -> Tensor:
        """``(rows * m, rows * m)``."""
        return self._result(self.covariance.output_covariance(self.rows, joint=True))

    def spread(self, mean: Tensor, variance: Tensor, link: str) -> LogitCovariance:
        """What a link takes of the covariance of outputs with this mean and these variances."""
        classes = variance.shape[1]
        if link == "probit":  # which takes the variances of the centred logits alone
            centred = self.centred_variances(variance)
            # as of independent logits; two classes go by their difference
            factor = 4.0 if classes == 2 else classes / (classes - 1)
            return LogitCovariance(centred.new_zeros(*centred.shape, 0), centred * factor)
        return spread_of(mean, variance, lambda part: self.covariance.output_product(self.rows[part]))


def _selected(covariance: Tensor, indices: Tensor | None, joint: bool) -> Tensor:
    """Rows' covariances ``(rows, classes, classes)``, or with `joint` the one of all of them, of the classes at
    `indices`, ``(rows, k)``.
    """
    if indices is None:
        return covariance
    if joint:
        classes = len(covariance) // len(indices)
        flat = (indices + torch.arange(len(indices), device=indices.device).unsqueeze(1) * classes).flatten()
        return covariance[flat][:, flat]
    rows = torch.arange(len(indices), device=indices.device)[:, None, None]
    return covariance[rows, indices.unsqueeze(2), indices.unsqueeze(1)]


def spread_of(mean: Tensor, variance: Tensor, product: Callable[[slice], MatrixProduct]) -> LogitCovariance:
    """`of_product` for a few rows at a time: products with a covariance of many classes are large.

    Args:
        mean: ``(rows, classes)``.
        variance: of the same shape.
        product: gives the multiplication by the covariance of some rows.
    """
    if torch.compiler.is_compiling():
        return of_product(mean.to(variance), variance, product(slice(None)))
    step = max(1, _MAX_SPREAD // mean.shape[1])
    slices = [slice(start, start + step) for start in range(0, len(mean), step)]
    parts = [of_product(mean[part].to(variance), variance[part], product(part)) for part in slices]
    return LogitCovariance.cat(parts)


def top_spread(
    mean: Tensor, indices: Tensor, top: Tensor, last: _LastLayer | None
) -> tuple[Tensor, LogitCovariance]:
    """Variances of all logits, and the covariance of the centred ones: exact between those at `indices`; the others
    count as independent, with the variances that the last layer's weights give them, or the mean of the exact ones.

    Args:
        mean: all logits.
        indices: of those with a backward pass, ``(rows, k)``.
        top: their covariance and, last, that with the mean of all logits.
        last: the last layer, if it has a posterior.
    """
    number = indices.shape[1]
    top_variance = top.diagonal(dim1=1, dim2=2)[:, :number].clamp(min=0)
    differences = top[:, :number] - top[:, number:]
    block = differences[:, :, :number] - differences[:, :, number:]
    top_centred = block.diagonal(dim1=1, dim2=2).clamp(min=0)
    if last is None:
        others, others_centred = (
            v.mean(1, keepdim=True).expand(mean.shape) for v in (top_variance, top_centred)
        )
    else:
        others = last.variances()
        others_centred = last.centred_variances(others)
    variance = others.scatter(1, indices, top_variance)
    centred = others_centred.scatter(1, indices, top_centred)

    def product(part: slice) -> MatrixProduct:
        def multiply(x: Tensor) -> Tensor:
            rows = indices[part].unsqueeze(-1).expand(-1, -1, x.shape[2])
            return (centred[part].unsqueeze(-1) * x).scatter(1, rows, block[part].to(x) @ x.gather(1, rows))

        return multiply

    return variance, spread_of(mean.to(centred), centred, product)


class LastLayerOutputs(LinearizedOutputs):
    """The outputs of one batch by the closed form of the last layer alone, in functions that a tracer follows."""

    def __init__(
        self,
        outputs: Tensor,
        samples: int,
        chosen: ChosenOutputs,
        layout: Layout,
        positions: Tensor | None,
        last: Callable[[Tensor], _LastLayer],
        rows: Tensor,
    ) -> None:
        """
        Args:
            outputs: of the model; see `LinearizedOutputs`, as what follows.
            samples: in the batch.
            chosen: the outputs that are used.
            layout: of the outputs.
            positions: those that are used.
            last: makes the last layer of its activations at the positions that are used.
            rows: its activations at all positions.
        """
        super().__init__(outputs, samples, chosen, layout, positions, ())
        self._last = last(self._used(rows))

    def _variances(self) -> Tensor:
        return self._last.variances()

    def _covariances(self, indices: Tensor | None) -> Tensor:
        return _selected(self._last.covariances(self._rows.shape[1]), indices, False)

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        return _selected(self._last.joint_covariance(), indices, True)

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        variance = self._last.variances()
        return variance, self._last.spread(self._rows, variance, self._chosen.link)


class ClosedForm:
    """Predictions by the closed form of the last layer, in functions that a tracer follows.

    Attributes:
        network: at the posterior's mean, in eval mode; nothing else may run it meanwhile.
    """

    def __init__(
        self,
        network: nn.Module,
        posterior: Posterior,
        layer: Layer,
        engine: Engine,
        prediction_of: Callable[[OutputGaussian], Prediction],
        novelty: bool,
    ) -> None:
        """
        Args:
            network: see above.
            posterior: its posterior.
            layer: whose outputs are the model's.
            engine: of the head, with the covariance of that layer's weights.
            prediction_of: what the head makes of Gaussian outputs.
            novelty: whether predictions know theirs.
        """
        self.network, self._posterior, self._layer, self._engine = network, posterior, layer, engine
        self._prediction_of, self._novelty = prediction_of, novelty
        assert isinstance(engine.weights, WeightCovariance)
        self._covariance = engine.weights.of_layer(layer.name).traceable(layer.matrix_shape)

    def __call__(self, *args: Any) -> Prediction:
        """The prediction of a batch."""
        engine, posterior, batch = self._engine, self._posterior, Batch(args)
        with watching(self.network, self._layer) as calls:
            outputs = batch.call(self.network)
        samples = outputs.shape[0]
        operand = LayerGradients(self._layer, calls, samples, 0).activations(engine.dtype)[0]
        found = LastLayerOutputs(
            outputs,
            samples,
            engine.chosen,
            engine.layout(outputs, samples),
            engine.positions,
            lambda rows: _LastLayer(
                self._covariance,
                rows,
                lambda computed: computed.to(outputs.device, engine.dtype),
                engine.budget,
            ),
            operand.rows().flatten(0, 2),
        )
        prediction = self._prediction_of(found.gaussian())
        if not self._novelty:
            return prediction
        assert posterior.features is not None
        if posterior.features.layer.weight == self._layer.weight:  # whose inputs are the features
            ratio = novelty_of_calls(posterior.features, calls, batch)
        else:
            ratio = class_novelty(self.network, posterior, batch)
        return prediction.with_novelty(novelty_at(ratio, found.sizes, found.picked))


class Probes(LinearizedOutputs):
    """The outputs of one batch by draws of its function, the engine ``"jvp"``."""

    def __init__(
        self,
        outputs: Tensor,
        deviations: Tensor,
        chosen: ChosenOutputs,
        layout: Layout,
        positions: Tensor | None,
        watched: Sequence[Call],
    ) -> None:
        """
        Args:
            outputs: of the model.
            deviations: draws of ``J (theta_r - theta)``, ``(draws, *outputs)``.
            chosen: see `LinearizedOutputs`, as what follows.
            layout: of the outputs.
            positions: those that are used.
            watched: calls.
        """
        super().__init__(outputs, deviations.shape[1], chosen, layout, positions, watched)
        rows = [self._used(layout.rows(with_classes(of_draw))) for of_draw in deviations]
        self._deviations = torch.stack(rows)

    def _variances(self) -> Tensor:
        return self._deviations.square().mean(0)

    def _covariances(self, indices: Tensor | None) -> Tensor:
        deviations = self._selected(indices)
        return torch.einsum("drc,dre->rce", deviations, deviations) / len(deviations)

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        flat = self._selected(indices).flatten(1)
        return flat.T @ flat / len(flat)

    def _selected(self, indices: Tensor | None) -> Tensor:
        if indices is None:
            return self._deviations
        return self._deviations.gather(2, indices.expand(len(self._deviations), -1, -1))

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        variance = self._variances()

        def product(part: slice) -> MatrixProduct:
            root = self._deviations[:, part].permute(1, 2, 0) / len(self._deviations) ** 0.5
            return lambda x: root.to(x) @ (root.to(x).transpose(1, 2) @ x)

        return variance, spread_of(self._rows, variance, product)


Positions = int | Sequence[int] | Tensor | None


def checked_positions(positions: Any) -> Tensor | None:
    """Positions as a tensor: booleans ``(*positions)``, or whole numbers ``(k,)`` or ``(k, dimensions)``.

    Raises:
        PosthocUQError: they are none of these.
    """
    if positions is None:
        return None
    try:
        tensor = torch.as_tensor(positions, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros((), device="cpu")
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        raise PosthocUQError(
            f"positions must be a whole number, several of them, a tensor of indices (k, dimensions) or a mask of "
            f"booleans, and not empty; not {positions!r:.100}."
        )
    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bool else torch.atleast_1d(tensor.long())


def picked_positions(chosen: Tensor | None, positions: tuple[int, ...]) -> Tensor | None:
    """The chosen positions as indices into a sample's rows, ``(k,)``; None for all.

    Args:
        chosen: from `checked_positions`.
        positions: the sizes of the dimensions that count positions.

    Raises:
        PosthocUQError: there are no such positions.
    """
    if chosen is None:
        return None
    numbers = torch.arange(prod(positions), device="cpu")
    if chosen.dtype == torch.bool:
        if tuple(chosen.shape) != positions:
            raise PosthocUQError(
                f"positions is a mask of shape {tuple(chosen.shape)}, and the outputs have the positions {positions}."
            )
        if not bool(chosen.any()):
            raise PosthocUQError("positions is a mask of no position; make at least one true.")
        return numbers[chosen.flatten()]
    if chosen.ndim > 1 and chosen.shape[1:] != (len(positions),):
        raise PosthocUQError(
            f"positions has {chosen.shape[-1]} numbers each, and the outputs have the positions {positions}."
        )
    try:
        return numbers[chosen] if chosen.ndim == 1 else numbers.reshape(positions)[tuple(chosen.T)]
    except IndexError as error:
        raise PosthocUQError(
            f"positions go beyond the outputs, which have the positions {positions}: {error}."
        ) from error


class OutputsWithGraph(LinearizedOutputs):
    """The outputs of one batch with their graphs back to the inputs: the Jacobian of every sample is a tensor. For
    acquisition functions, of a few inputs at a time.
    """

    def __init__(self, model: nn.Module, posterior: Posterior, batch: Batch, chosen: ChosenOutputs) -> None:
        """
        Args:
            model: at the posterior's mean, in eval mode; nothing else may run it meanwhile.
            posterior: its posterior.
            batch: the model's arguments.
            chosen: the outputs that are used.
        """
        names = {name for layer in posterior.layers.values() for name in layer.parameter_names}
        weights = {name: p.detach() for name, p in model.named_parameters() if name in names}
        samples, outputs = count_samples(batch), called(model, weights, batch)
        check_shape(outputs, samples)
        super().__init__(outputs, samples, chosen, ONE_POSITION, None, ())
        self._jacobians = partial(jacobians, model, weights, batch, samples)
        self._posterior = posterior

    def _by_layer(self) -> dict[str, Tensor]:
        """The Jacobian by each layer's matrix, ``(samples, outputs, G, m, n)``."""
        found = self._jacobians()
        return {
            name: layer.to_matrix(found[layer.weight], None if layer.bias is None else found[layer.bias])
            for name, layer in self._posterior.layers.items()
        }

    def _variances(self) -> Tensor:
        return self._covariances(None).diagonal(dim1=1, dim2=2)

    def _covariances(self, indices: Tensor | None) -> Tensor:
        by_layer = self._by_layer()
        rows = [{name: j[row] for name, j in by_layer.items()} for row in range(self._samples)]
        return torch.stack([self._posterior.quadratic(row) for row in rows])

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        return self._posterior.quadratic({name: j.flatten(0, 1) for name, j in self._by_layer().items()})

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        return self._variances(), None


class _NetworkCopy:
    """A copy of the network, and what is prepared for it and its first batch, whatever the posterior's settings.

    Attributes:
        twin: the copy.
        dtype: of activations and output gradients.
        frozen: the part of the network before the weights with a posterior.
        tracked: the posterior's layers in it.
        tracked_rest: those of the rest of it that takes features.
    """

    def __init__(self, twin: nn.Module, posterior: Posterior) -> None:
        self.twin, self.dtype = twin, statistics_dtype(twin, None)
        self.frozen = FrozenPart(twin, posterior.mean)
        self.tracked, self.tracked_rest = KeyedCache[TrackedModel](), KeyedCache[TrackedModel]()


def deviations_of(
    posterior: Posterior, draws: int, generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Draws of the weights' deviations from the trained ones, by parameter, ``(draws, *shape)``."""
    drawn = posterior.sample(draws, generator)
    return {name: (weights - posterior.mean[name]).to(device) for name, weights in drawn.items()}


EngineName = Literal["auto", "exact", "jvp", "last_layer"]


class LinearizedPredictor(GaussianPredictor):
    """Predicts with the network linearised in its weights: outputs ``N(f(x; theta), J(x) Sigma J(x)^T)``.

    For a Laplace posterior this is the predictive that the Gauss-Newton approximation stands for (Khan, Immer, Abedi,
    Korzepa 2019, "Approximate inference turns deep networks into Gaussian processes"; Immer, Korzepa, Bauer 2021,
    "Improving predictions of Bayesian neural nets via local linearization"). There is no Monte Carlo error, and the
    mean is the trained network's own output.

    Engines:

    * ``"exact"``: one forward pass, and one backward pass for every output used. ``J`` is contracted layer by layer;
      no tensor of (batch, outputs, parameters) exists.
    * ``"last_layer"``: where the posterior covers one layer and that layer's outputs are the model's. A closed form
      without a backward pass, for all outputs whatever `outputs` says.
    * ``"jvp"``: `n_probes` draws of the weights, kept, and one forward-mode pass for each: all outputs at once,
      unbiased, with a relative standard deviation of ``sqrt(2 / n_probes)`` of every variance.
    * ``"auto"``: the closed form where it holds, found by numbers on every batch, and ``"exact"`` elsewhere. Of outputs
      with positions, where ``"exact"`` would take more than 256 backward passes, it is ``"jvp"``.

    Outputs with positions (pixels, tokens) are predicted position by position, and `positions` restricts them. The
    closed form is that of a last linear layer or pointwise convolution.

    With many classes ``outputs="topk"`` takes backward passes only for the classes with the largest logits of each
    input. All other classes get the variance that the last layer's weights alone give them, which is too small. Where
    the posterior does not cover the last layer (or the model changes its outputs), their variance is unknown, and they
    get the mean variance of the top classes, so that they count neither as more nor as less certain.


    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        link: from Gaussian outputs to a prediction: ``"mc"``, of logits ``"probit"`` or ``"bridge"``, or another of
            the likelihood's `links`. It gets the covariance of all classes where all are used and there are at most 50.
            With more, ``"mc"`` and ``"probit"`` get that of a posterior of the
            last layer by its leading directions, or that of the top classes, with the others as independent;
            ``"bridge"``, and ``outputs="all"`` of several layers, the variances alone.
        n_draws: points of the outputs, for ``"mc"``, where more than three classes need them or a likelihood draws.
        outputs: ``"all"``, ``"topk"`` (10 classes), ``"topk:K"``, K, or ``"auto"``: all up to 20 outputs and all of a
            regression, otherwise ``"topk"``.
        engine: ``"auto"``, ``"exact"``, ``"jvp"`` or ``"last_layer"``; see above.
        n_probes: draws of ``"jvp"``, and random vectors of `functional_trace`.
        novelty: whether predictions know their novelty, if the posterior does.
        positions: of outputs with positions, those that are predicted: a number, or several, that count a sample's
            positions as rows (-1 is the last); indices ``(k, dimensions)``; or a mask ``(*positions)``. Outputs and
            predictions then have one dimension of k positions. See also `at`.
        memory_budget: bytes that one temporary may take; by default 256 MiB, on a CPU 32 MiB.
        backpropagate: whether predictions, and the mean, the variance and the covariance of the outputs, can be
            differentiated by the inputs, where gradients are enabled: for acquisition functions. The Jacobian of a
            batch then exists as a tensor, (batch, outputs, weights), and all outputs are used. Novelty has no gradient.

    Raises:
        PosthocUQError: an option is none of the above.
    """

    head = "linearized"
    needs = frozenset({QUADRATIC})

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        *,
        link: str = "mc",
        n_draws: Count = LINK_DRAWS,
        outputs: str | int = "auto",
        engine: EngineName = "auto",
        n_probes: Count = 32,
        memory_budget: Count | None = None,
        novelty: bool = True,
        backpropagate: bool = False,
        positions: Positions = None,
    ) -> None:
        super().__init__(model, posterior, novelty, link, n_draws)
        self._engine = check_option("engine", engine, EngineName)
        self._n_probes = check_option("n_probes", n_probes, Count)
        self._positions = checked_positions(positions)
        self._asked_budget = check_option("memory_budget", memory_budget, Count | None)
        likelihood = posterior.likelihood
        self._chosen = ChosenOutputs(checked_outputs(outputs), likelihood.softmax, likelihood.joint, link)
        if isinstance(self._chosen.top, int) and not likelihood.softmax:
            raise PosthocUQError(
                f"outputs={outputs!r} picks classes by their logits; use outputs='all' for likelihood "
                f"{likelihood.name!r}."
            )
        self._backpropagate = check_option("backpropagate", backpropagate, bool)
        if backpropagate and (engine not in ("auto", "exact") or isinstance(self._chosen.top, int)):
            raise PosthocUQError(
                f"backpropagate=True forms the Jacobian of all outputs, and engine={engine!r}, outputs={outputs!r} "
                f"forms less; leave these out."
            )
        check_differentiable(unwrap(model))
        with isolated_random_state():  # copying a module may run its code
            self._prepared = _NetworkCopy(replicate(self._model[0], posterior.trained_mean), posterior)
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Covariance and draws of the weights are made again when they are needed."""
        self._weights, self._deviations = KeyedCache[WeightCovariance](), KeyedCache[dict[str, Tensor]]()

    def with_posterior(self, posterior: Posterior, seed: int | None = None) -> LinearizedPredictor:
        """See `Predictor`."""
        other = super().with_posterior(posterior)
        if posterior.settings.of_weights() != self._posterior.settings.of_weights():
            other._forget_weights()
        return other

    def _apply(self, fn: Any, recurse: bool = True) -> LinearizedPredictor:
        """Move, or change the precision of, the network; all preparations are made anew."""
        super()._apply(fn, recurse)
        self._prepared = _NetworkCopy(self._prepared.twin._apply(fn), self._posterior)
        return self

    @property
    def _network(self) -> nn.Module:
        return self._prepared.twin

    def extra_repr(self) -> str:
        """The choices that change its predictions, and the engine."""
        draws = f", n_draws={self._n_draws}" if self._link == "mc" else ""
        return f"link={self._link!r}{draws}, outputs={self._chosen.top!r}, engine={self._engine!r}"

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        probes = {"n_probes": self._n_probes} if self._engine == "jvp" else {}
        return {**super().identity(), **probes, "outputs": str(self._chosen.top), "engine": self._engine}

    def _promises_here(self) -> ConformalScores | str | None:
        """See `Predictor`; held-out scores are of whole inputs."""
        if self._posterior.history.promises and self._positions is not None:
            return (
                "The held-out scores are of all positions of an input, and this predictor is asked for some of them; "
                "ask the one without positions= (or at)."
            )
        return super()._promises_here()

    def _functions(self, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `Predictor`."""
        with self._gradients(False):
            network = replicate(self._prepared.twin)
            deviations = deviations_of(self._posterior, n, generator, model_device(network))
            outputs, derivatives = function_draws(network, batch, deviations)
            return at_least_float32(outputs) + derivatives.to(at_least_float32(outputs))

    @property
    def _differentiated(self) -> bool:
        """Whether this call keeps the graph back to its inputs."""
        return self._backpropagate and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    @contextmanager
    def _gradients(self, kept: bool = True) -> Generator[None]:
        """Full precision; no inference mode and no gradients, whatever the caller's mode, since autograd is used
        inside; the caller's where this call keeps its graph.
        """
        if torch.compiler.is_compiling():  # a tracer makes a graph of its own of each mode
            yield
            return
        with full_precision():
            if kept and self._differentiated:
                yield
            else:
                with torch.inference_mode(False), torch.no_grad():
                    yield

    def _predict(self, batch: Batch) -> Prediction:
        with self._gradients():
            found = self._linearized(batch)
            outputs = found.gaussian()
        ratio = self._known_novelty(batch, found.watched)
        ratio = novelty_at(ratio, found.sizes, found.picked)
        return self.prediction_of(outputs).with_novelty(ratio)

    def _distribution(self, batch: Batch) -> OutputGaussian:
        with self._gradients():
            return self._linearized(batch).gaussian()

    def prediction_of(self, distribution: OutputGaussian) -> Prediction:
        """See `Predictor`."""
        with self._gradients():
            prediction = super().prediction_of(distribution)
        return prediction if self._positions is None else prediction.unshifted()

    def at(self, positions: Positions) -> LinearizedPredictor:
        """The same predictor for these positions of the outputs, as with the option `positions`; it shares all that was
        prepared.

        Raises:
            PosthocUQError: they are no positions.
        """
        other = copy.copy(self)
        other._positions, other._promises = checked_positions(positions), KeyedCache()
        return other

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`."""
        with self._gradients(False):
            prepared, batch = self._prepared, self._batch(args, kwargs)
            features = prepared.frozen.features(batch)
            if features is not None and self._engine != "jvp":
                self._tracked(prepared, batch, None)
            return features

    def distribution_from(self, features: Features) -> OutputGaussian:
        """See `Predictor`."""
        with self._gradients(False):
            self.check_weights()
            return self._linearized(features.batch, features).gaussian()

    def closed_form(self, *args: Any) -> ClosedForm | None:
        """The closed form of the last layer that predicts such inputs, for programs; None where there is none.

        Raises:
            PosthocUQError: its covariance would have to be formed, and is too large.
        """
        self.check_weights()
        posterior, batch = self._posterior, self._batch(args, {})
        with self._gradients(False), self.explaining(batch):
            found = self._linearized(batch)
            if not isinstance(found, Linearization) or found.closed is None:
                return None
            assert found.engine.tracked.last is not None
            return ClosedForm(
                replicate(self._network),
                posterior,
                posterior.layers[found.engine.tracked.last],
                found.engine,
                self.prediction_of,
                self.network_of_novelty is not None,
            )

    @reading
    def functional_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """``f(x; theta)``, the trained network's own outputs, at all positions."""
        self.check_weights()
        batch = self._batch(args, kwargs)
        with self._gradients(), self.explaining(batch):
            if self._differentiated:
                return self._linearized(batch).mean
            return batch.copied().call(self._prepared.twin)

    @reading
    def functional_variance(self, *args: Any, **kwargs: Any) -> Tensor:
        """Variance of every output by the weights, shaped like the outputs; logits are not divided by the temperature.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model.
        """
        return self._functional("variance", args, kwargs, lambda found: found.variance())

    @reading
    def functional_covariance(self, *args: Any, joint: bool = False, **kwargs: Any) -> Tensor:
        """Covariance of the outputs by the weights.

        Args:
            joint: also between the inputs of the batch.

        Returns:
            ``(batch, outputs, outputs)``, or with `joint` ``(batch * outputs, batch * outputs)`` with the outputs of
            one input side by side. Of outputs with positions ``(batch, positions, classes, classes)``, or with `joint`
            of all outputs by input, position and class. Where only the top classes are used, `outputs` are these, the
            largest logit first, as in ``functional_mean(...).topk(K).indices``.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model.
        """
        return self._functional("covariance", args, kwargs, lambda found: found.covariance(joint))

    @reading
    def functional_trace(self, *args: Any, n_probes: int | None = None, **kwargs: Any) -> Tensor:
        """The sum of all outputs' variances for every input, ``(batch,)``: one number for the uncertainty of a sample.

        With more outputs than `n_probes`, the exact engine estimates it by the mean of ``u^T J Sigma J^T u`` over
        random signs ``u``, the same for all inputs and calls (Hutchinson 1990): one backward pass each, whatever the
        number of outputs.

        Args:
            n_probes: random vectors; by default the predictor's.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model, or there is no probe.
        """
        probes = self._n_probes if n_probes is None else n_probes
        if probes < 1:
            raise PosthocUQError(f"n_probes must be at least 1, not {probes}.")
        return self._functional("trace", args, kwargs, lambda found: found.trace(probes))

    def _functional(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[LinearizedOutputs], Tensor],
    ) -> Tensor:
        """What is computed of the linearisation of a call's arguments, once its numbers are checked."""
        self.check_weights()
        batch = self._batch(args, kwargs)
        with self._gradients(), self.explaining(batch):
            computed = compute(self._linearized(batch))
            check_finite({name: computed}, f"functional {name}", self.head)
            return computed

    @reading
    def at_every_prior(self, *args: Any, **kwargs: Any) -> OutputsByPrior | None:
        """See `Predictor`."""
        self.check_weights()
        posterior, batch = self._posterior, self._batch(args, kwargs)
        by_backward_passes = self._engine == "exact" or (self._engine == "auto" and len(posterior.layers) > 1)
        if not by_backward_passes or self._backpropagate:
            return None
        from posthoc_uq.heads.spectrum import Spectrum

        if not Spectrum.supports(posterior):
            return None
        with self._gradients(False), self.explaining(batch):
            device = model_device(self._prepared.twin)
            width = get_width(posterior.settings, "prior_precision")
            limit = temporary_limit(self._budget, device)
            spectrum = Spectrum(posterior, width, self._prepared.dtype, device, limit)
            found = Linearization(self._engine_with(spectrum, batch, None), batch, count_samples(batch))
            return None if found.sizes else found.at_every_prior(spectrum)

    @property
    def _budget(self) -> int:
        """Bytes that one temporary may take."""
        return self._asked_budget or temporary_bytes(model_device(self._prepared.twin))

    def _linearized(self, batch: Batch, features: Features | None = None) -> LinearizedOutputs:
        """The linearisation of one batch, or from its features."""
        prepared, posterior = self._prepared, self._posterior
        if self._differentiated and features is None:
            return OutputsWithGraph(replicate(prepared.twin), posterior, batch, self._chosen)
        if self._engine == "jvp":
            return self._probed(prepared, batch, features)

        def covariance() -> WeightCovariance:
            device = model_device(prepared.twin)
            limit = temporary_limit(self._budget, device)
            return WeightCovariance(posterior, prepared.dtype, device, limit)

        engine = self._engine_with(self._weights.get(prepared, covariance), batch, features)
        samples = count_samples(batch) if features is None else features.samples
        found = Linearization(engine, batch if features is None else features.batch, samples)
        if self._engine == "last_layer" and found.closed is None:
            raise PosthocUQError(
                f"engine='last_layer' needs a posterior of one layer whose outputs are the model's, at every position; "
                f"this one has {len(posterior.layers)} layers ({list(posterior.layers)[-3:]}). Fit with "
                f"layers='last', or use engine='exact'."
            )
        if self._engine == "auto" and found.sizes and found.backward_passes > _MAX_BACKWARD:
            return self._probed(prepared, batch, features, found.watched)
        return found

    def _engine_with(
        self,
        weights: WeightCovariance | Spectrum,
        batch: Batch,
        features: Features | None,
    ) -> Engine:
        return Engine(
            self._tracked(self._prepared, batch, features),
            weights,
            self._engine != "exact" and len(self._posterior.layers) == 1,
            self._chosen,
            self._layout,
            self._positions,
            self._prepared.dtype,
            self._budget,
        )

    def _layout(self, outputs: Tensor, samples: int) -> Layout:
        """The layout of outputs.

        Raises:
            PosthocUQError: the outputs do not fit, or positions were asked for, and there are none.
        """
        layout = layout_of(self._posterior.likelihood, outputs, samples)
        if self._positions is not None and layout is ONE_POSITION:
            raise PosthocUQError(
                f"positions= picks positions of outputs that have some, such as pixels or tokens, and these outputs "
                f"are of shape {tuple(outputs.shape)}; leave it out."
            )
        return layout

    def _probed(
        self,
        prepared: _NetworkCopy,
        batch: Batch,
        features: Features | None,
        watched: Sequence[Call] = (),
    ) -> Probes:
        """The linearisation by draws of the function."""
        deviations = self._deviations.get(
            prepared,
            lambda: deviations_of(
                self._posterior, self._n_probes, torch.Generator().manual_seed(0), model_device(prepared.twin)
            ),
        )
        if features is None:
            features = prepared.frozen.features(batch)
        with prepared.frozen.twins(features).borrow() as twin:
            work = batch if features is None else features.batch
            outputs, draws = function_draws(twin, work, deviations)
        layout = self._layout(outputs, draws.shape[1])
        return Probes(outputs, draws.to(prepared.dtype), self._chosen, layout, self._positions, watched)

    def _tracked(self, prepared: _NetworkCopy, batch: Batch, features: Features | None) -> TrackedModel:
        """The layers with a posterior, found in a first batch, in the network or in the rest that takes features."""

        def track() -> TrackedModel:
            if features is not None:
                raise PosthocUQError("The features are those of another predictor.")
            tracked = track_layers(prepared.twin, self._posterior, batch.copied())
            if self._tells_novelty and self._posterior.features is not None:
                tracked.capture.watched = self._posterior.features.layer
            return tracked

        tracked = prepared.tracked.get(None, track)
        if features is None:
            return tracked
        rest = prepared.frozen.rest(features)
        return prepared.tracked_rest.get(rest, lambda: tracked.within(rest))
