"""The linearised head: outputs linear in the weights, so that their covariance has a closed form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import TEMPORARY_BYTES
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import check_differentiable, model_device, replicate, statistics_dtype, unwrap
from posthoc_uq.core.options import Count, check_option, one_of
from posthoc_uq.core.progress import in_parts, share
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.heads.functions import differentiable_outputs, function_draws
from posthoc_uq.heads.jacobians import (
    Gradient,
    TrackedModel,
    WeightCovariance,
    output_rows,
    pull,
    track_layers,
)
from posthoc_uq.heads.predictor import (
    GaussianOutputs,
    Predictor,
    check_finite,
    from_gaussian,
)
from posthoc_uq.layers.frozen import Features, FrozenPart, Twins
from posthoc_uq.layers.layer import Call
from posthoc_uq.layers.operands import temporary_limit
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods.draws import LINK_DRAWS, Spread, of_product
from posthoc_uq.likelihoods.labels import Layout, novelty_at
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction, at_least_float32
from posthoc_uq.posteriors import QUADRATIC, Hyperparameters, Posterior
from posthoc_uq.posteriors.covariance import Mode

# Which of a model's outputs the linearised head uses, and how much of their covariance its link gets.

ALL_OUTPUTS = 20  # up to which `outputs="auto"` takes all of them
TOP = 10  # classes that "topk" takes
_COVARIANCE_CLASSES = 50  # up to which the link gets a covariance of all


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

    def number(self, outputs: Tensor) -> int | None:
        """How many of a sample's outputs are used, or None for all."""
        size = outputs[0].numel()
        if self.top == "all":
            return None
        if isinstance(self.top, int):
            return None if self.top >= size else self.top
        return TOP if size > ALL_OUTPUTS and self.classes else None

    def indices(self, outputs: Tensor) -> Tensor | None:
        """The outputs used, ``(samples, k)``, the largest first; or None for all."""
        used = self.number(outputs)
        return None if used is None else outputs.flatten(1).topk(used).indices

    def wants_covariance(self, mean: Tensor) -> bool:
        """Whether the link gets the full covariance of the outputs."""
        return self.joint and mean[0].numel() <= _COVARIANCE_CLASSES and self.number(mean) is None

    def wants_spread(self) -> bool:
        """Whether the link can use a `Spread`: an approximate covariance of many classes."""
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


def check_shape(outputs: Tensor, samples: int) -> None:
    """Refuse outputs of more dimensions than the linearised head can serve.

    Raises:
        PosthocUQError: they are not ``(batch,)`` or ``(batch, outputs)``.
    """
    if outputs.ndim not in (1, 2) or outputs.shape[0] != samples:
        raise PosthocUQError(
            f"The linearised head needs outputs of shape (batch,) or (batch, outputs), and {samples} inputs gave "
            f"{tuple(outputs.shape)}."
        )


# The linearisation of one batch. Outputs without positions (pixels, tokens) are those of one position.

_MAX_BACKWARD = (
    256  # passes that `engine="auto"` takes for outputs with positions; of more it draws the function
)
_MAX_SPREAD = 2**16  # logits whose covariance is reduced to its leading directions at once
_MAX_PROBED = 2**20  # numbers of draws that are reduced to leading directions at once
_MAX_ROW_BYTES = 2**24  # of the temporaries of rows that are computed at once
_STORED_BUDGETS = 4  # output gradients of more than this many memory budgets split the batch


@dataclass(frozen=True)
class Engine:
    """What the linearisations of all batches share.

    Attributes:
        name: ``"auto"``, ``"exact"`` or ``"last_layer"``.
        tracked: the posterior's layers in the model.
        layers: their names.
        covariance: gives that of the weights on a device.
        chosen: the outputs that are used.
        dtype: of activations and output gradients.
        budget: bytes that one temporary may take.
    """

    name: str
    tracked: TrackedModel
    layers: tuple[str, ...]
    covariance: Callable[[torch.device], WeightCovariance]
    chosen: ChosenOutputs
    dtype: torch.dtype
    budget: int


class _Outputs:
    """The outputs of a batch as rows, one for each sample and place: the positions that are used, or the one place of
    outputs without positions.

    Attributes:
        mean: the outputs used, in the shape of the model's, the positions that were picked as one dimension.
        layout: of outputs with positions; None without.
        sizes: of the dimensions that count the model's positions.
        picked: the positions used, ``(k,)``, or None for all.
        watched: the calls of the layer whose inputs novelty is measured by.
    """

    def __init__(
        self, outputs: Tensor, samples: int, layout: Layout | None, chosen_positions: Tensor | None
    ) -> None:
        self.layout, self._outputs, self._samples = layout, outputs, samples
        self.watched: list[Call] = []
        self.sizes: tuple[int, ...] = ()
        if layout is None:
            check_shape(outputs, samples)
        else:
            layout.check(outputs)
            self.sizes = layout.positions(outputs)
        self.picked = picked_positions(chosen_positions, self.sizes)
        self._places = torch.arange(prod(self.sizes), device="cpu") if self.picked is None else self.picked
        self._rows = self._used(outputs.reshape(samples, -1) if layout is None else layout.rows(outputs))
        self.mean = self._whole(self._rows)

    def _used(self, rows: Tensor) -> Tensor:
        """Rows of all positions ``(samples * positions, ...)``, of those that are used."""
        if self.picked is None:
            return rows
        chosen = rows.reshape(self._samples, -1, rows.shape[-1])[:, self.picked.to(rows.device)]
        return chosen.flatten(0, 1)

    def _whole(self, rows: Tensor) -> Tensor:
        """Rows in the shape of `mean`."""
        if self.layout is None:
            return rows.reshape(self._outputs.shape)
        return self.layout.whole(rows, self.sizes if self.picked is None else (len(self.picked),))

    def _by_place(self, covariances: Tensor) -> Tensor:
        """Covariances of rows, ``(samples * places, ...)``, as `functional_covariance` gives them."""
        if self.layout is None:
            return covariances
        return covariances.reshape(self._samples, len(self._places), *covariances.shape[1:])


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


class Linearization(_Outputs):
    """One forward pass of a batch, and the backward passes for the covariance of its outputs; none where the last layer
    has a closed form.
    """

    def __init__(
        self,
        engine: Engine,
        batch: Batch,
        samples: int,
        layout: Callable[[Tensor], Layout | None],
        positions: Tensor | None,
    ) -> None:
        """
        Args:
            engine: what all batches share.
            batch: the model's arguments.
            samples: in the batch.
            layout: gives that of outputs with positions.
            positions: those that are used.
        """
        self._engine, self._batch, self._given = engine, batch, (layout, positions)
        self._recording = engine.tracked.capture.run(batch, samples)
        outputs = self._recording.outputs.detach()
        super().__init__(outputs, samples, layout(outputs), positions)
        self.watched = self._recording.watched
        self._device = outputs.device
        self._weights = engine.covariance(self._device)
        self._closed = self._closed_form()

    @property
    def backward_passes(self) -> int:
        """How many the covariances of this batch take."""
        if self._closed is not None:
            return 0
        return len(self._places) * (self._engine.chosen.number(self._rows) or self._rows.shape[1])

    def gaussian(self) -> GaussianOutputs:
        """Mean, variance, and as much of the covariance as the link can use."""
        chosen = self._engine.chosen
        covariance: Tensor | Spread | None = None
        if self._closed is not None:
            with torch.autocast(self._device.type, enabled=False):
                if chosen.wants_covariance(self._rows) and (self.layout is None or chosen.link == "bridge"):
                    covariance = self._closed_covariance()  # of many positions it would be large
                    variance = covariance.diagonal(dim1=1, dim2=2)
                else:
                    variance = self._closed_variance()
                    covariance = self._closed_spread(variance) if chosen.wants_spread() else None
                return GaussianOutputs(self.mean, self._whole(variance), covariance)
        parts = [self._gaussian_at(place) for place in in_parts(range(len(self._places)))]
        variance = torch.stack([variance for variance, _ in parts], 1).flatten(0, 1)
        spreads = [spread for _, spread in parts if isinstance(spread, Spread)]
        covariances = [covariance for _, covariance in parts if isinstance(covariance, Tensor)]
        if spreads:
            covariance = Spread(*(torch.stack(each, 1).flatten(0, 1) for each in zip(*spreads, strict=True)))
        elif covariances:
            covariance = torch.stack(covariances, 1).flatten(0, 1)
        return GaussianOutputs(self.mean, self._whole(variance), covariance)

    def variance(self) -> Tensor:
        """Variance of every output that is used, shaped like `mean`."""
        if self._closed is not None:
            with torch.autocast(self._device.type, enabled=False):
                return self._whole(self._closed_variance())
        parts = [self._variance_at(place) for place in in_parts(range(len(self._places)))]
        return self._whole(torch.stack(parts, 1).flatten(0, 1))

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the outputs that are used; see `LinearizedPredictor.functional_covariance`."""
        indices = self._engine.chosen.indices(self._rows)
        if self._closed is not None and (indices is None or self.layout is not None):
            with torch.autocast(self._device.type, enabled=False):
                if joint:
                    name, rows = self._closed
                    found = self._weights.of_layer(name).output_covariance(rows, joint=True)
                    return self._as_result(_selected(found, indices, True))
                return self._by_place(_selected(self._closed_covariance(), indices, False))
        if joint:
            return self._joint()
        parts: list[Tensor] = []
        for place in in_parts(range(len(self._places))):
            parts.append(self._contracted(place, self._engine.chosen.indices(self._at(place))))
        return self._by_place(torch.stack(parts, 1).flatten(0, 1))

    def trace(self, probes: int) -> Tensor:
        """The sum of the variances of all outputs that are used, ``(samples,)``; by random signs if these outnumber
        probes.
        """
        size = len(self._places) * self._rows.shape[1]
        if self._closed is not None or (size <= probes and self.layout is not None):
            return self.variance().reshape(self._samples, -1).sum(1)
        with torch.autocast(self._device.type, enabled=False):
            if size <= probes:
                return self._as_result(self._variances(self._one_class(0, None), size).sum(1))
            signs = self._random_signs(probes, torch.Generator().manual_seed(0))
            return self._as_result(self._variances(signs, probes).sum(1) / probes)

    def _as_result(self, computed: Tensor) -> Tensor:
        return computed.to(self._device, self._engine.dtype)

    # The closed form

    def _closed_form(self) -> tuple[str, Tensor] | None:
        """Name and activations ``(rows, n)`` of the last layer, if the posterior covers no other and the engine may use
        it.
        """
        name, layers = self._engine.name, self._engine.layers
        if name == "exact":
            return None
        last = self._last_layer if len(layers) == 1 else None
        if last is None and name == "last_layer":
            what = (
                "whose outputs are the model's"
                if self.layout is None
                else "that gives every position its outputs"
            )
            raise PosthocUQError(
                f"engine='last_layer' needs a posterior of one layer {what}; this one has {len(layers)} layers "
                f"({list(layers)[-3:]}). Fit with layers='last', or use engine='exact'."
            )
        return last

    @cached_property
    def _last_layer(self) -> tuple[str, Tensor] | None:
        """Name and activations of the layer whose outputs are the model's, if the posterior covers it."""
        tracked = self._engine.tracked
        if tracked.last is None:
            return None
        with torch.autocast(self._device.type, enabled=False):
            rows = output_rows(
                self._recording, tracked.capture, tracked.last, self._engine.dtype, self.layout
            )
        return None if rows is None else (tracked.last, self._used(rows))

    def _closed_parts(self) -> Iterator[Tensor]:
        """The last layer's activations, a few rows at a time."""
        assert self._closed is not None
        rows = self._closed[1]
        limit = min(_MAX_ROW_BYTES, self._engine.budget)
        yield from rows.split(max(1, limit // (8 * self._rows.shape[1] * (4 + rows.shape[1]))))

    def _closed_variance(self) -> Tensor:
        assert self._closed is not None
        return self._as_result(last_variance(self._weights, self._closed))

    def _closed_covariance(self) -> Tensor:
        assert self._closed is not None
        layer = self._weights.of_layer(self._closed[0])
        return torch.cat([self._as_result(layer.output_covariance(part)) for part in self._closed_parts()])

    def _closed_spread(self, variance: Tensor) -> Spread:
        """What the link takes of the covariance of rows with these variances."""
        assert self._closed is not None
        (name, activations), classes = self._closed, variance.shape[1]
        layer = self._weights.of_layer(name)
        if self._engine.chosen.link == "probit":  # which takes the variances of the centred logits alone
            means: list[Tensor] = []
            for part in self._closed_parts():
                ones = part.new_ones(len(part), classes, 1)
                means.append(self._as_result(layer.output_product(part)(ones)[:, :, 0]))
            sums = torch.cat(means) / classes
            centred = (variance - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
            return Spread(centred.new_zeros(*centred.shape, 0), centred * _independent(classes))
        # a few samples at a time: products with a covariance of many classes are large
        step = max(1, _MAX_SPREAD // classes)
        parts = [
            of_product(m.to(v.dtype), v, layer.output_product(a))
            for a, m, v in zip(
                activations.split(step), self._rows.split(step), variance.split(step), strict=True
            )
        ]
        return Spread(torch.cat([part.root for part in parts]), torch.cat([part.rest for part in parts]))

    # Backward passes

    def _at(self, place: int) -> Tensor:
        """The outputs at one place, ``(samples, classes)``."""
        return self._rows.reshape(self._samples, len(self._places), -1)[:, place]

    def _one_class(self, place: int, indices: Tensor | None) -> Gradient:
        """Gradients of single outputs at one place: number i is the i-th class, or with `indices` each sample's
        ``indices[:, i]``; the number after the last is the mean of all classes.
        """
        rows, position, size = self._rows, int(self._places[place]), prod(self.sizes)
        classes = rows.shape[1]
        count = classes if indices is None else indices.shape[1]

        def gradient(number: int) -> Tensor:
            unit = torch.zeros(self._samples, size, classes, dtype=rows.dtype, device=rows.device)
            if number == count:
                unit[:, position] = 1 / classes
            elif indices is None:
                unit[:, position, number] = 1
            else:
                unit[:, position].scatter_(1, indices[:, number : number + 1], 1)
            return self._of_all_places(unit)

        return gradient

    def _of_all_places(self, values: Tensor) -> Tensor:
        """Numbers ``(samples, positions, classes)`` in the shape of the model's outputs."""
        if self.layout is None:
            return values.reshape(self._outputs.shape)
        return self.layout.whole(values.flatten(0, 1), self.sizes)

    def _random_signs(self, numbers: int, generator: torch.Generator) -> Gradient:
        """Gradients of sums of all outputs that are used with random signs, the same for every sample (Rademacher
        vectors).
        """
        shape = numbers, len(self._places), self._rows.shape[1]
        signs = torch.randint(0, 2, shape, generator=generator, device="cpu").to(self._rows) * 2 - 1

        def gradient(number: int) -> Tensor:
            whole = signs.new_zeros(self._samples, prod(self.sizes), shape[2])
            whole[:, self._places.to(whole.device)] = signs[number]
            return self._of_all_places(whole)

        return gradient

    def _gaussian_at(self, place: int) -> tuple[Tensor, Tensor | Spread | None]:
        """Variances of the outputs at one place, ``(samples, classes)``, and what the link uses of their covariance."""
        mean, chosen = self._at(place), self._engine.chosen
        if chosen.wants_covariance(mean):
            covariance = self._contracted(place, None)
            return covariance.diagonal(dim1=1, dim2=2), covariance
        indices = chosen.indices(mean)
        if indices is None or not chosen.wants_spread():
            return self._variance_at(place), None
        last = self._last_at(place)
        # with the mean of all logits, for the covariance of the centred ones
        top = self._contracted(place, indices, centre=True)
        with torch.autocast(self._device.type, enabled=False):
            return top_spread(mean, indices, top, *other_variances(self._weights, last, mean, top))

    def _last_at(self, place: int) -> tuple[str, Tensor] | None:
        """`_last_layer` at one place."""
        if self._last_layer is None:
            return None
        name, rows = self._last_layer
        return name, rows.reshape(self._samples, len(self._places), -1)[:, place]

    def _variance_at(self, place: int) -> Tensor:
        """Variances of the outputs at one place, ``(samples, classes)``."""
        mean = self._at(place)
        indices, last = self._engine.chosen.indices(mean), None
        with torch.autocast(self._device.type, enabled=False):
            if indices is not None:
                last = self._last_at(place)
            number = mean.shape[1] if indices is None else indices.shape[1]
            gradient = self._one_class(place, indices)
            variance = self._as_result(self._variances(gradient, number, place).clamp(min=0))
            if indices is None:
                return variance
            if last is None:
                others = variance.mean(1, keepdim=True).expand(mean.shape)
            else:
                others = last_variance(self._weights, last).to(variance)
            return others.scatter(1, indices, variance)

    def _variances(self, gradient: Gradient, number: int, place: int = -1) -> Tensor:
        """Variances of functions of the outputs, ``(samples, functions)``, as many at once as memory allows."""
        step = max(1, self._stored() // max(1, self._size()))
        variances: list[Tensor] = []
        for start in in_parts(range(0, number, step)):
            numbers = range(start, min(number, start + step))
            last = numbers.stop == number and self._is_last(place)
            with share(0, 0.5):
                pulled = pull(self._recording, gradient, numbers, self._engine.dtype, last=last)
            with share(0.5, 1):
                variances.append(self._weights.contract(pulled, self._samples, len(numbers), "variance"))
        return torch.cat(variances, dim=1)

    def _contracted(self, place: int, indices: Tensor | None, centre: bool = False) -> Tensor:
        """Covariance of all outputs at one place, or of those at `indices`; with `centre` the mean of all outputs comes
        last, as one more. A batch whose output gradients take too much memory is split in two.
        """
        number = (self._rows.shape[1] if indices is None else indices.shape[1]) + centre
        if self._samples > 1 and self._size() * number > self._stored():
            return self._in_halves(place, indices, centre)
        gradient = self._one_class(place, indices)
        return self._of_functions(gradient, number, "covariance", self._is_last(place))

    def _of_functions(self, gradient: Gradient, number: int, mode: Mode, last: bool) -> Tensor:
        with torch.autocast(self._device.type, enabled=False):
            with share(0, 0.5):
                pulled = pull(self._recording, gradient, range(number), self._engine.dtype, last=last)
            with share(0.5, 1):
                return self._as_result(self._weights.contract(pulled, self._samples, number, mode))

    def _is_last(self, place: int) -> bool:
        """Whether no other place follows; -1 is the last one."""
        return place in (-1, len(self._places) - 1)

    def _in_halves(self, place: int, indices: Tensor | None, centre: bool) -> Tensor:
        samples, parts = self._samples, list[Tensor]()
        if self._is_last(place):
            del self._recording  # its graph is not needed any more
        for start, stop in in_parts(((0, samples // 2), (samples // 2, samples))):
            part = self._batch.narrow(start, stop - start, samples)
            half = Linearization(self._engine, part, stop - start, *self._given)
            half_indices = None if indices is None else indices[start:stop]
            parts.append(half._contracted(place, half_indices, centre))
        return torch.cat(parts)

    def _joint(self) -> Tensor:
        """Covariance of all outputs that are used, by sample, place and class."""
        gradients: list[Gradient] = []
        for place in range(len(self._places)):
            indices = self._engine.chosen.indices(self._at(place))
            gradients.append(self._one_class(place, indices))
        each = self._engine.chosen.number(self._rows) or self._rows.shape[1]
        number = each * len(gradients)
        return self._of_functions(lambda n: gradients[n // each](n % each), number, "joint", True)

    def _size(self) -> int:
        """Bytes of output gradients that one backward pass hands over."""
        return self._recording.numbers * torch.finfo(self._engine.dtype).bits // 8

    def _stored(self) -> int:
        return _STORED_BUDGETS * self._engine.budget


def last_variance(weights: WeightCovariance, last: tuple[str, Tensor]) -> Tensor:
    """Variances of a layer's outputs by its own weights, by its name and activations."""
    return weights.of_layer(last[0]).variances_of(last[1]).clamp(min=0)


def other_variances(
    weights: WeightCovariance, last: tuple[str, Tensor] | None, mean: Tensor, top: Tensor
) -> tuple[Tensor, Tensor]:
    """Variances of the logits without a backward pass, and of the same logits centred, each ``(samples, outputs)``: by
    the last layer's weights, or the mean over the logits that had one.

    Args:
        weights: the covariance of the weights.
        last: name and activations of the last layer, or None.
        mean: all logits.
        top: covariance of the logits with a backward pass and, last, of the mean of all logits.
    """
    size = mean[0].numel()
    if last is not None:
        variance = last_variance(weights, last)
        ones = torch.ones(*variance.shape, 1, dtype=last[1].dtype, device=last[1].device)
        sums = weights.of_layer(last[0]).output_product(last[1])(ones)[:, :, 0].to(variance) / size
        return variance, (variance - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
    diagonal = top.diagonal(dim1=1, dim2=2)
    centred = diagonal[:, :-1] - 2 * top[:, :-1, -1] + diagonal[:, -1:]
    return tuple(v.clamp(min=0).mean(1, keepdim=True).expand(-1, size) for v in (diagonal[:, :-1], centred))  # type: ignore[return-value]


def top_spread(
    mean: Tensor, indices: Tensor, top: Tensor, variance: Tensor, centred: Tensor
) -> tuple[Tensor, Spread]:
    """Variances of all logits, and the covariance of the centred ones: exact between those at `indices`; the others
    count as independent.

    Args:
        mean: all logits.
        indices: of those with a backward pass, ``(samples, k)``.
        top: their covariance and, last, that with the mean of all logits.
        variance: of all logits without a backward pass.
        centred: of the centred logits without one.
    """
    number = indices.shape[1]
    top_variance = top.diagonal(dim1=1, dim2=2)[:, :number].clamp(min=0)
    variance = variance.to(top_variance).scatter(1, indices, top_variance)
    differences = top[:, :number] - top[:, number:]
    block = differences[:, :, :number] - differences[:, :, number:]
    centred = centred.to(top_variance).scatter(1, indices, block.diagonal(dim1=1, dim2=2).clamp(min=0))

    def multiply(x: Tensor) -> Tensor:
        rows = indices.unsqueeze(-1).expand(-1, -1, x.shape[2])
        return (centred.unsqueeze(-1) * x).scatter(1, rows, block.to(x) @ x.gather(1, rows))

    return variance, of_product(mean.to(centred), centred, multiply)


# Which positions of its outputs the linearised head uses.

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
    return (
        tensor
        if tensor.dtype == torch.bool
        else tensor.long().reshape(-1)
        if tensor.ndim < 2
        else tensor.long()
    )


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
    if chosen.dtype == torch.bool:
        if tuple(chosen.shape) != positions:
            raise PosthocUQError(
                f"positions is a mask of shape {tuple(chosen.shape)}, and the outputs have the positions {positions}."
            )
        found = chosen.flatten().nonzero().flatten()
        if not len(found):
            raise PosthocUQError("positions is a mask of no position; make at least one true.")
        return found
    sizes = torch.tensor(positions if chosen.ndim == 2 else (prod(positions),), device="cpu")
    indices = chosen if chosen.ndim == 2 else chosen.unsqueeze(1)
    if indices.shape[1] != len(sizes):
        raise PosthocUQError(
            f"positions has {indices.shape[1]} numbers each, and the outputs have the positions {positions}."
        )
    if bool(((indices < -sizes) | (indices >= sizes)).any()):
        raise PosthocUQError(
            f"positions go beyond the outputs, which have the positions {positions}: "
            f"{indices[((indices < -sizes) | (indices >= sizes)).any(1)][0].tolist()} is none of them."
        )
    indices = torch.where(indices < 0, indices + sizes, indices)
    strides = torch.tensor([prod(sizes[place + 1 :].tolist()) for place in range(len(sizes))], device="cpu")
    return (indices * strides).sum(1)


def _independent(classes: int) -> float:
    """From the variance of a centred logit to that of independent logits; of two classes, to that of their difference,
    by which the probit link of two classes goes.
    """
    return 4.0 if classes == 2 else classes / (classes - 1)


# The linearisation of one batch by draws of its function: the engine ``"jvp"``.


class Probes(_Outputs):
    """The outputs of one batch, and draws of their deviations ``J (theta_r - theta)``."""

    def __init__(
        self,
        outputs: Tensor,
        deviations: Tensor,
        chosen: ChosenOutputs,
        layout: Layout | None,
        positions: Tensor | None,
    ) -> None:
        """
        Args:
            outputs: of the model.
            deviations: ``(draws, *outputs)``.
            chosen: the outputs that are used.
            layout: of outputs with positions.
            positions: those that are used.
        """
        super().__init__(outputs, deviations.shape[1], layout, positions)
        rows = [d.reshape(len(d), -1) if layout is None else layout.rows(d) for d in deviations]
        self._deviations, self._chosen = torch.stack([self._used(of_draw) for of_draw in rows]), chosen

    def variance(self) -> Tensor:
        """Variance of every output that is used, shaped like `mean`."""
        return self._whole(self._deviations.square().mean(0))

    def trace(self, probes: int) -> Tensor:
        """The sum of the variances of all outputs that are used, ``(samples,)``, from all draws."""
        return self.variance().reshape(self._samples, -1).sum(1)

    def covariance(self, joint: bool) -> Tensor:
        """See `Linearization.covariance`."""
        deviations, indices = self._deviations, self._chosen.indices(self._rows)
        if indices is not None:
            deviations = deviations.gather(2, indices.expand(len(deviations), -1, -1))
        if joint:
            flat = deviations.flatten(1)
            return flat.T @ flat / len(flat)
        return self._by_place(_products(deviations))

    def gaussian(self) -> GaussianOutputs:
        """Mean, variance, and as much of the covariance as the link can use; of many positions not the matrices."""
        draws, rows, classes = self._deviations.shape
        variance, spreads = self._deviations.square().mean(0), list[Spread]()
        whole = self.layout is None or self._chosen.link == "bridge"  # which needs the matrices
        if whole and self._chosen.wants_covariance(self._rows):
            return GaussianOutputs(self.mean, self._whole(variance), _products(self._deviations))
        if not self._chosen.wants_spread():
            return GaussianOutputs(self.mean, self._whole(variance))
        step = max(1, _MAX_PROBED // (draws * classes))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            root = self._deviations[:, part].permute(1, 2, 0) / draws**0.5
            spreads.append(
                of_product(
                    self._rows[part].to(root),
                    variance[part],
                    lambda x, root=root: root.to(x) @ (root.to(x).transpose(1, 2) @ x),
                )
            )
        spread = Spread(torch.cat([s.root for s in spreads]), torch.cat([s.rest for s in spreads]))
        return GaussianOutputs(self.mean, self._whole(variance), spread)


def _products(deviations: Tensor) -> Tensor:
    """Mean over the draws of all products of two outputs, ``(rows, outputs, outputs)``."""
    return torch.einsum("drc,dre->rce", deviations, deviations) / len(deviations)


class _Networks:
    """Copies of the network at one mean.

    Attributes:
        twin: the copy.
        frozen: the part of the network before the weights with a posterior.
        ready: the copy whose layers are tracked, once the first batch is there.
    """

    def __init__(self, twin: nn.Module, posterior: Posterior) -> None:
        self.twin = twin
        self.frozen = FrozenPart(twin, posterior.mean)
        self.ready: TrackedModel | None = None
        self._whole = Twins(twin)
        self._rest: tuple[nn.Module, TrackedModel | None, Twins] | None = None

    def tracked(self, features: Features | None) -> TrackedModel:
        """The layers as the network uses them, or the rest of it that takes features."""
        assert self.ready is not None
        if features is None:
            return self.ready
        tracked = self._of_rest(features)[1]
        assert tracked is not None
        return tracked

    def twins(self, features: Features | None) -> Twins:
        """Copies for functional calls: of the network, or of the rest of it."""
        return self._whole if features is None else self._of_rest(features)[2]

    def _of_rest(self, features: Features) -> tuple[nn.Module, TrackedModel | None, Twins]:
        rest, kept = self.frozen.rest(features), self._rest
        if kept is None or kept[0] is not rest or (kept[1] is None and self.ready is not None):
            tracked = None if self.ready is None else self.ready.within(rest)
            self._rest = kept = rest, tracked, Twins(rest)
        return kept


@contextmanager
def without_gradients() -> Generator[None]:
    """No inference mode and no gradients, whatever the caller's mode: autograd is used inside."""
    with torch.inference_mode(False), torch.no_grad():
        yield


# The linearised head: the mean is the trained network's output, the covariance that of its linearisation.

EngineName = Literal["auto", "exact", "jvp", "last_layer"]


class LinearizedPredictor(Predictor):
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

    The posterior's settings are read on every call, and when they change the head prepares itself anew.

    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        link: from Gaussian outputs to a prediction: ``"mc"``, of logits ``"probit"`` or ``"bridge"``, or another of
            the likelihood's `links`. It gets the covariance of all classes where all are used and there are at most 50.
            With more, ``"mc"`` and ``"probit"`` get that of a posterior of the
            last layer by its leading directions, or that of the top classes, with the others as independent;
            ``"bridge"``, and ``outputs="all"`` of several layers, the variances alone.
        n_draws: of the logits, for ``"mc"``.
        outputs: ``"all"``, ``"topk"`` (10 classes), ``"topk:K"``, K, or ``"auto"``: all up to 20 outputs and all of a
            regression, otherwise ``"topk"``.
        engine: ``"auto"``, ``"exact"``, ``"jvp"`` or ``"last_layer"``; see above.
        n_probes: draws of ``"jvp"``, and random vectors of `functional_trace`.
        novelty: whether predictions know their novelty, if the posterior does.
        positions: of outputs with positions, those that are predicted: a number, or several, that count a sample's
            positions as rows (-1 is the last); indices ``(k, dimensions)``; or a mask ``(*positions)``. Outputs and
            predictions then have one dimension of k positions. See also `at`.
        memory_budget: bytes that one temporary may take; by default 256 MiB.
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
        super().__init__(model, posterior)
        self._tells_novelty = check_option("novelty", novelty, bool)
        self._link = one_of("link", link, posterior.likelihood.links)
        self._n_draws = check_option("n_draws", n_draws, Count)
        self._engine = check_option("engine", engine, EngineName)
        self._n_probes = check_option("n_probes", n_probes, Count)
        self._positions = checked_positions(positions)
        budget = check_option("memory_budget", memory_budget, Count | None)
        self._budget: int = TEMPORARY_BYTES if budget is None else budget
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
        self._dtype = statistics_dtype(unwrap(model), None)
        with isolated_random_state():  # copying a module may run its code
            twin = replicate(self._model[0], posterior.trained_mean)
        # prepared for the first batch, and for the settings and the data of the posterior
        self._networks = _Networks(twin, posterior)
        self._weights: tuple[Hyperparameters, WeightCovariance] | None = None
        self._drawn: tuple[Hyperparameters, dict[str, Tensor]] | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> LinearizedPredictor:
        """Move, or change the precision of, the network; all preparations are made anew."""
        super()._apply(fn, recurse)
        twin = self._networks.twin._apply(fn)
        self._networks = _Networks(twin, self._posterior)
        self._dtype = statistics_dtype(twin, None)
        self._weights = self._drawn = None
        return self

    @property
    def device(self) -> torch.device:
        """Where it predicts."""
        return model_device(self._networks.twin)

    def extra_repr(self) -> str:
        """The choices that change its predictions, and the engine."""
        draws = f", n_draws={self._n_draws}" if self._link == "mc" else ""
        return f"link={self._link!r}{draws}, outputs={self._chosen.top!r}, engine={self._engine!r}"

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        options: dict[str, Any] = {"head": self.head, "link": self._link}
        options |= {"n_draws": self._n_draws} if self._link == "mc" else {}
        options |= {"n_probes": self._n_probes} if self._engine == "jvp" else {}
        return options | {"outputs": str(self._chosen.top), "engine": self._engine}

    def _functions(self, posterior: Posterior, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `Predictor`."""
        with without_gradients():
            drawn = posterior.sample(n, generator)
            network = replicate(self._networks.twin)
            place = model_device(network)
            deviations = {name: (d - posterior.mean[name]).to(place) for name, d in drawn.items()}
            outputs, derivatives = function_draws(network, batch, deviations)
            return at_least_float32(outputs) + derivatives.to(at_least_float32(outputs))

    @property
    def _differentiated(self) -> bool:
        """Whether this call keeps the graph back to its inputs."""
        return self._backpropagate and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _with_graph(self, posterior: Posterior, batch: Batch, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Outputs and their covariance, differentiable in the inputs."""
        samples = count_samples(batch)
        mean, covariance = differentiable_outputs(
            replicate(self._networks.twin), posterior, batch, samples, joint
        )
        check_shape(mean, samples)
        return mean, covariance

    def _predict(self, posterior: Posterior, batch: Batch) -> Prediction:
        if self._differentiated:
            ratio = self._known_novelty(posterior, batch)
            return self._prediction_of(posterior, self._distribution(posterior, batch)).with_novelty(ratio)
        with without_gradients():
            linearization = self._linearized(posterior, batch)
            outputs, calls = linearization.gaussian(), linearization.watched
        ratio = self._known_novelty(posterior, batch, calls)
        if linearization.layout is not None:
            ratio = novelty_at(ratio, linearization.sizes, linearization.picked)
        return self._prediction_of(posterior, outputs).with_novelty(ratio)

    def _distribution(self, posterior: Posterior, batch: Batch) -> GaussianOutputs:
        if self._differentiated:
            mean, covariance = self._with_graph(posterior, batch)
            variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
            return GaussianOutputs(
                mean, variance, covariance if self._chosen.wants_covariance(mean) else None
            )
        with without_gradients():
            return self._linearized(posterior, batch).gaussian()

    def _prediction_of(self, posterior: Posterior, distribution: GaussianOutputs) -> Prediction:
        with nullcontext() if self._differentiated else without_gradients():
            prediction = from_gaussian(
                distribution.mean,
                distribution.variance,
                posterior,
                covariance=distribution.covariance,
                link=self._link,
                n_draws=self._n_draws,
            )
        if self._positions is not None and isinstance(prediction, PositionPrediction):
            return prediction.unshifted()
        return prediction

    def at(self, positions: Positions) -> LinearizedPredictor:
        """The same predictor for these positions of the outputs, as with the option `positions`; it shares all that was
        prepared.

        Raises:
            PosthocUQError: they are no positions.
        """
        other = copy.copy(self)
        other._positions = checked_positions(positions)
        return other

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`."""
        with without_gradients():
            networks = self._networks
            features = networks.frozen.features(args, kwargs)
            if features is not None and self._engine != "jvp":
                self._prepare(networks, Batch(args, None, kwargs))
            return features

    def distribution_from(self, features: Features) -> GaussianOutputs:
        """See `Predictor`."""
        with without_gradients():
            return self._linearized(self._snapshot(), features.batch, features).gaussian()

    def functional_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """``f(x; theta)``, the trained network's own outputs, at all positions."""
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            if self._differentiated:
                return self._with_graph(self._snapshot(), batch)[0]
            networks = self._networks
            with without_gradients():
                return batch.copied().call(networks.twin)

    def functional_variance(self, *args: Any, **kwargs: Any) -> Tensor:
        """Variance of every output by the weights, shaped like the outputs; logits are not divided by the temperature.

        Raises:
            NonFiniteError: it is not finite.
            PosthocUQError: the engine cannot serve this model.
        """
        batch = self._batch(args, kwargs)
        if self._differentiated:
            with self.explaining(batch):
                return self._distribution(self._snapshot(), batch).variance
        with without_gradients(), self.explaining(batch):
            variance = self._linearized(self._snapshot(), batch).variance()
            check_finite({"variance": variance}, "functional variance", self.head)
            return variance

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
        batch = self._batch(args, kwargs)
        if self._differentiated:
            with self.explaining(batch):
                return self._with_graph(self._snapshot(), batch, joint)[1]
        with without_gradients(), self.explaining(batch):
            covariance = self._linearized(self._snapshot(), batch).covariance(joint)
            check_finite({"covariance": covariance}, "functional covariance", self.head)
            return covariance

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
        batch = self._batch(args, kwargs)
        with without_gradients(), self.explaining(batch):
            trace = self._linearized(self._snapshot(), batch).trace(probes)
            check_finite({"trace": trace}, "functional trace", self.head)
            return trace

    def _linearized(
        self, posterior: Posterior, batch: Batch, features: Features | None = None
    ) -> Linearization | Probes:
        """The linearisation of one batch under a posterior's settings, or from features, with `batch` theirs."""
        samples = count_samples(batch) if features is None else features.samples
        networks = self._networks
        if self._engine == "jvp":
            return self._probed(networks, posterior, batch, features)
        self._prepare(networks, batch, features)
        engine = Engine(
            self._engine,
            networks.tracked(features),
            tuple(posterior.layers),
            lambda device: self._covariances(posterior, device),
            self._chosen,
            self._dtype,
            self._budget,
        )
        found = Linearization(engine, batch, samples, self._layout, self._positions)
        if self._engine == "auto" and found.layout is not None and found.backward_passes > _MAX_BACKWARD:
            return self._probed(networks, posterior, batch, features, found.watched)
        return found

    def _layout(self, outputs: Tensor) -> Layout | None:
        """The layout of outputs with positions, or None.

        Raises:
            PosthocUQError: positions were asked for, and there are none.
        """
        layout = self._posterior.likelihood.positions_of(outputs)
        if layout is None and self._positions is not None:
            raise PosthocUQError(
                f"positions= picks positions of outputs that have some, such as pixels or tokens, and these outputs "
                f"are of shape {tuple(outputs.shape)}; leave it out."
            )
        return layout

    def _probed(
        self,
        networks: _Networks,
        posterior: Posterior,
        batch: Batch,
        features: Features | None,
        watched: Sequence[Call] = (),
    ) -> Probes:
        """The linearisation by draws of the function."""
        if features is None:
            features = networks.frozen.features(batch.args, batch.kwargs, self._n_probes)
        work = batch if features is None else features.batch
        with networks.twins(features).lent() as twin:
            outputs, deviations = function_draws(twin, work, self._deviations(posterior))
        layout, deviations = self._layout(outputs), deviations.to(self._dtype)
        probes = Probes(outputs, deviations, self._chosen, layout, self._positions)
        probes.watched = list(watched)
        return probes

    def _covariances(self, posterior: Posterior, device: torch.device) -> WeightCovariance:
        """The covariance of the weights, cached until settings or data change."""
        settings, cached = posterior.settings.of_weights(), self._weights
        if cached is None or cached[0] != settings:
            with self._lock:
                cached = self._weights
                if cached is None or cached[0] != settings:
                    limit = temporary_limit(self._budget, device)
                    covariance = WeightCovariance(posterior, self._dtype, device, limit)
                    self._weights = cached = (settings, covariance)
        return cached[1]

    def _deviations(self, posterior: Posterior) -> dict[str, Tensor]:
        """Draws of the weights' deviation from the trained ones, by parameter, kept until settings or data change."""
        settings, cached = posterior.settings.of_weights(), self._drawn
        if cached is None or cached[0] != settings:
            with self._lock:
                cached = self._drawn
                if cached is None or cached[0] != settings:
                    draws = posterior.sample(self._n_probes, torch.Generator().manual_seed(0))
                    device = model_device(self._networks.twin)
                    deviations = {
                        name: (drawn - posterior.mean[name]).to(device) for name, drawn in draws.items()
                    }
                    self._drawn = cached = (settings, deviations)
        return cached[1]

    def _prepare(self, networks: _Networks, batch: Batch, features: Features | None = None) -> None:
        """Find the layers in a first batch, which features cannot be."""
        if networks.ready is not None:
            return
        if features is not None:
            raise PosthocUQError("The features are those of another predictor.")
        with self._lock, isolated_random_state():
            if networks.ready is None:
                ready = track_layers(networks.twin, self._posterior, batch.copied(), self._dtype)
                if self._tells_novelty and self._posterior.features is not None:
                    ready.capture.watched = self._posterior.features.layer
                networks.ready = ready
