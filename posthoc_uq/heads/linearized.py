"""The linearised head: outputs linear in the weights, so that their covariance has a closed form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import TEMPORARY_BYTES, as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import check_differentiable, model_device, replicate, statistics_dtype, unwrap
from posthoc_uq.core.options import Count, check_option
from posthoc_uq.core.progress import in_parts, share
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.heads.functions import differentiable_outputs, function_draws
from posthoc_uq.heads.jacobians import (
    Gradient,
    TrackedModel,
    WeightCovariance,
    one_output,
    output_layer,
    position_rows,
    pull,
    random_signs,
    track_layers,
)
from posthoc_uq.heads.predictor import (
    GaussianOutputs,
    Predictor,
    check_finite,
    from_gaussian,
)
from posthoc_uq.layers.capture import Recording
from posthoc_uq.layers.frozen import Features, FrozenPart, Twins
from posthoc_uq.layers.layer import Call
from posthoc_uq.layers.operands import temporary_limit
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods.draws import LINK_DRAWS, Link, Spread, checked_link, of_product
from posthoc_uq.likelihoods.labels import Layout, novelty_at
from posthoc_uq.likelihoods.positions import PositionPrediction
from posthoc_uq.likelihoods.prediction import Prediction, at_least_float32
from posthoc_uq.posteriors.block import QUADRATIC
from posthoc_uq.posteriors.covariance import Mode
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Hyperparameters

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


# The linearisation of one batch by backward passes: the engines ``"exact"`` and ``"last_layer"``.

_AT_ONCE = 2**16  # logits whose covariance is reduced to its leading directions at once
_STORED = 4  # output gradients of more than this many memory budgets split the batch


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
        budget: bytes that one temporary may take, or None for the default.
    """

    name: str
    tracked: TrackedModel
    layers: tuple[str, ...]
    covariance: Callable[[torch.device], WeightCovariance]
    chosen: ChosenOutputs
    dtype: torch.dtype
    budget: int | None


class Linearization:
    """One forward pass of a batch, and the backward passes for the covariance of its outputs.

    Attributes:
        mean: outputs ``(samples, ...)``.
        watched: the calls of the layer whose inputs novelty is measured by.
    """

    def __init__(
        self, engine: Engine, batch: Batch, samples: int, recording: Recording | None = None
    ) -> None:
        self._engine, self._batch, self._samples = engine, batch, samples
        self._recording = engine.tracked.capture.run(batch, samples) if recording is None else recording
        self.mean = self._recording.outputs.detach()
        check_shape(self.mean, samples)
        self._device = self.mean.device
        self._weights = engine.covariance(self._device)
        self.watched: list[Call] = self._recording.watched

    def gaussian(self) -> GaussianOutputs:
        """Mean, variance, and as much of the covariance as the link can use."""
        mean, chosen = self.mean, self._engine.chosen
        if chosen.wants_covariance(mean):
            covariance = self._covariance(None, joint=False)
            return GaussianOutputs(mean, covariance.diagonal(dim1=1, dim2=2), covariance)
        if not chosen.wants_spread():
            return GaussianOutputs(mean, self.variance())
        with torch.autocast(self._device.type, enabled=False):
            last_layer = self._closed_form()
            if last_layer is not None:
                variance = self.variance()
                return GaussianOutputs(
                    mean, variance, last_layer_spread(self._weights, *last_layer, mean, variance)
                )
        indices = chosen.indices(mean)
        if indices is None:
            return GaussianOutputs(mean, self.variance())
        # with the mean of all logits, for the covariance of the centred ones
        return GaussianOutputs(mean, *self._top_spread(indices))

    def variance(self) -> Tensor:
        """Variance of every output, ``(samples, outputs)``."""
        outputs, samples = self.mean, self._samples
        with torch.autocast(self._device.type, enabled=False):
            only_layer = self._closed_form()
            if only_layer is not None:
                return self._as_result(_last_variance(self._weights, only_layer).clamp(min=0))
            indices, size = self._engine.chosen.indices(outputs), outputs[0].numel()
            number = size if indices is None else indices.shape[1]
            last = None if indices is None else self._last_layer()
            variance = self._as_result(self._variances(one_output(outputs, indices), number).clamp(min=0))
            if indices is None:
                return variance
            if last is None:
                other_variance = variance.mean(1, keepdim=True).expand(samples, size)
            else:
                other_variance = _last_variance(self._weights, last).clamp(min=0)
            return other_variance.to(variance).scatter(1, indices, variance)

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the outputs that are used; see `LinearizedPredictor.functional_covariance`."""
        return self._covariance(self._engine.chosen.indices(self.mean), joint)

    def trace(self, probes: int) -> Tensor:
        """The sum of all outputs' variances, ``(samples,)``; by random signs if outputs outnumber probes."""
        outputs, size = self.mean, self.mean[0].numel()
        with torch.autocast(self._device.type, enabled=False):
            last_layer = self._closed_form()
            if last_layer is not None:
                variances = _last_variance(self._weights, last_layer)
            elif size <= probes:
                variances = self._variances(one_output(outputs, None), size)
            else:
                signs = random_signs(outputs, probes, torch.Generator().manual_seed(0))
                variances = self._variances(signs, probes) / probes
            return self._as_result(variances.sum(1))

    def _as_result(self, computed: Tensor) -> Tensor:
        return computed.to(self._device, self._engine.dtype)

    def _top_spread(self, indices: Tensor) -> tuple[Tensor, Spread]:
        """Variances of all logits, and the covariance of the centred ones: exact between those at `indices`; the others
        count as independent.
        """
        top = self._covariance(indices, joint=False, centre=True)
        others = other_variances(self._weights, self._last_layer(), self.mean, top)
        return top_spread(self.mean, indices, top, *others)

    def _variances(self, gradient: Gradient, number: int) -> Tensor:
        """Variances of functions of the outputs, ``(samples, functions)``, as many at once as memory allows."""
        step = max(1, self._stored() // max(1, self._size()))
        variances: list[Tensor] = []
        for start in in_parts(range(0, number, step)):
            numbers = range(start, min(number, start + step))
            last = numbers.stop == number
            with share(0, 0.5):
                pulled = pull(self._recording, gradient, numbers, self._engine.dtype, last=last)
            with share(0.5, 1):
                variances.append(self._weights.contract(pulled, self._samples, len(numbers), "variance"))
        return torch.cat(variances, dim=1)

    def _covariance(self, indices: Tensor | None, joint: bool, centre: bool = False) -> Tensor:
        """Covariance of all outputs, or of those at `indices`; with `centre` the mean of all outputs comes last, as one
        more. A batch whose output gradients take too much memory is split in two.
        """
        number = (self.mean[0].numel() if indices is None else indices.shape[1]) + centre
        with torch.autocast(self._device.type, enabled=False):
            last_layer = self._closed_form()
            if last_layer is not None and indices is None:
                return self._as_result(
                    self._weights.of_layer(last_layer[0]).output_covariance(last_layer[1], joint=joint)
                )
        if not joint and self._samples > 1 and self._size() * number > self._stored():
            return self._in_halves(indices, centre)
        mode: Mode = "joint" if joint else "covariance"
        with torch.autocast(self._device.type, enabled=False):
            gradient = one_output(self.mean, indices)
            with share(0, 0.5):
                pulled = pull(self._recording, gradient, range(number), self._engine.dtype, last=True)
            with share(0.5, 1):
                return self._as_result(self._weights.contract(pulled, self._samples, number, mode))

    def _in_halves(self, indices: Tensor | None, centre: bool) -> Tensor:
        samples, parts = self._samples, list[Tensor]()
        del self._recording  # its graph is not needed any more
        for start, stop in in_parts(((0, samples // 2), (samples // 2, samples))):
            half = Linearization(self._engine, self._batch.narrow(start, stop - start, samples), stop - start)
            half_indices = None if indices is None else indices[start:stop]
            parts.append(half._covariance(half_indices, joint=False, centre=centre))
        return torch.cat(parts)

    def _closed_form(self) -> tuple[str, Tensor] | None:
        """Name and activations of the last layer, if the posterior covers no other and the engine may use it."""
        name, layers = self._engine.name, self._engine.layers
        if name == "exact":
            return None
        last_layer = self._last_layer() if len(layers) == 1 else None
        if last_layer is None and name == "last_layer":
            raise PosthocUQError(
                f"engine='last_layer' needs a posterior of one layer whose outputs are the model's; this one has "
                f"{len(layers)} layers ({list(layers)[-3:]}). Fit with layers='last', or use engine='exact'."
            )
        return last_layer

    def _last_layer(self) -> tuple[str, Tensor] | None:
        """Name and activations of the layer whose outputs are the model's, if the posterior covers it."""
        tracked = self._engine.tracked
        if tracked.last is None:
            return None
        with torch.autocast(self._device.type, enabled=False):
            rows = output_layer(self._recording, tracked.capture, tracked.last, self._engine.dtype)
        return None if rows is None else (tracked.last, rows)

    def _size(self) -> int:
        """Bytes of output gradients that one backward pass hands over."""
        return self._recording.numbers * torch.finfo(self._engine.dtype).bits // 8

    def _stored(self) -> int:
        budget = self._engine.budget
        return _STORED * (TEMPORARY_BYTES if budget is None else budget)


def _last_variance(weights: WeightCovariance, last: tuple[str, Tensor]) -> Tensor:
    """Variances of a layer's outputs by its own weights, in float64."""
    return as_double(weights.of_layer(last[0]).variances_of(last[1]))


def last_layer_spread(
    weights: WeightCovariance, layer: str, rows: Tensor, mean: Tensor, variance: Tensor
) -> Spread:
    """Spread of the last layer's outputs by its own weights, a few samples at a time: products with a covariance of
    many classes are large.
    """
    step = max(1, _AT_ONCE // max(1, mean[0].numel()))
    parts = [
        of_product(m.to(v.dtype), v, weights.of_layer(layer).output_product(a))
        for a, m, v in zip(rows.split(step), mean.split(step), variance.split(step), strict=True)
    ]
    return Spread(torch.cat([part.root for part in parts]), torch.cat([part.rest for part in parts]))


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
        variance = _last_variance(weights, last).clamp(min=0)
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


# The linearisation of one batch whose outputs have positions: in closed form for the last layer, by backward
# passes of single outputs at a few positions, or by draws of its function.
#
# Positions and classes are as rows, see `Layout`; covariances are those of the classes of one position.

MOST_BACKWARD = (
    256  # backward passes that `engine="auto"` takes for a batch; of more outputs it draws the function
)
_POSITION_BYTES = 2**24  # of the temporaries of rows that are computed at once


class _Rows:
    """Outputs as rows of the positions that are used, and what is made of their moments.

    Attributes:
        mean: the outputs used, in the layout of the model's, the positions that were picked as one dimension.
        sizes: of the dimensions that count the model's positions.
        picked: the positions used, ``(k,)``, or None for all.
    """

    def __init__(self, dtype: torch.dtype, outputs: Tensor, layout: Layout, picked: Tensor | None) -> None:
        self._dtype, self._layout = dtype, layout
        layout.check(outputs)
        self._outputs, self._samples = outputs, outputs.shape[0]
        self.sizes = layout.positions(outputs)
        self.picked = picked
        self._places = picked if picked is not None else torch.arange(prod(self.sizes), device="cpu")
        self._positions = self.sizes if picked is None else (len(picked),)
        self._row_mean = self._of_all_rows(layout.rows(outputs))
        self.mean = layout.whole(self._row_mean, self._positions)

    def _of_all_rows(self, rows: Tensor) -> Tensor:
        """Rows of all positions ``(samples * positions, ...)``, of those that are used."""
        if self.picked is None:
            return rows
        chosen = rows.reshape(self._samples, -1, rows.shape[-1])[:, self.picked.to(rows.device)]
        return chosen.flatten(0, 1)

    def _whole(self, rows: Tensor) -> Tensor:
        return self._layout.whole(rows, self._positions)

    def _as_result(self, computed: Tensor) -> Tensor:
        return computed.to(self._outputs.device, self._dtype)


class PositionLinearization(_Rows):
    """One forward pass of a batch, and what the covariance of its outputs at every position takes.

    Attributes:
        watched: the calls of the layer whose inputs novelty is measured by.
    """

    def __init__(self, engine: Engine, recording: Recording, layout: Layout, picked: Tensor | None) -> None:
        super().__init__(engine.dtype, recording.outputs.detach(), layout, picked)
        self._engine, self._recording = engine, recording
        self._weights = engine.covariance(self._outputs.device)
        self.watched: list[Call] = recording.watched
        self._last = self._find_last()

    def _find_last(self) -> tuple[str, Tensor] | None:
        """Name and activations ``(rows, n)`` of the layer that gives every position its outputs, if the posterior
        covers no other layer and the engine may use it.
        """
        name, tracked = self._engine.name, self._engine.tracked
        if name != "exact" and len(self._engine.layers) == 1 and tracked.last is not None:
            with torch.autocast(self._outputs.device.type, enabled=False):
                rows = position_rows(
                    self._recording, tracked.capture, tracked.last, self._dtype, self._layout
                )
            if rows is not None:
                return tracked.last, self._of_all_rows(rows)
        if name == "last_layer":
            raise PosthocUQError(
                f"engine='last_layer' needs a posterior of one layer that gives every position its outputs: a linear "
                f"layer or a pointwise convolution; this one has {list(self._engine.layers)[-3:]}. Fit with "
                f"layers='last', use engine='jvp', or engine='exact' with positions=."
            )
        return None

    @property
    def backward_passes(self) -> int:
        """How many the covariances of this batch take."""
        if self._last is not None:
            return 0
        return len(self._places) * (self._engine.chosen.number(self._row_mean) or self._row_mean.shape[1])

    def variance(self) -> Tensor:
        """Variance of every output that is used, shaped like `mean`."""
        with torch.autocast(self._outputs.device.type, enabled=False):
            if self._last is not None:
                return self._whole(self._closed_variance())
            parts = [self._one_position(place)[0] for place in in_parts(range(len(self._places)))]
            return self._whole(torch.stack(parts, 1).flatten(0, 1))

    def gaussian(self) -> GaussianOutputs:
        """Mean, variance, and as much of the rows' covariance as the link can use."""
        link, classes = self._engine.chosen.link, self._row_mean.shape[1]
        with torch.autocast(self._outputs.device.type, enabled=False):
            if self._last is None:
                parts = [self._one_position(place) for place in in_parts(range(len(self._places)))]
                variance = torch.stack([part[0] for part in parts], 1).flatten(0, 1)
                spreads = [part[1] for part in parts]
                covariance = Spread(
                    torch.stack([spread.root for spread in spreads], 1).flatten(0, 1),
                    torch.stack([spread.rest for spread in spreads], 1).flatten(0, 1),
                )
                return GaussianOutputs(self.mean, self._whole(variance), covariance)
            variance = self._closed_variance()
            if link == "probit":
                covariance = self._centred(variance)
            elif link == "mc":
                covariance = last_layer_spread(self._weights, *self._last, self._row_mean, variance)
            else:
                few = classes <= 50
                covariance = self._closed_covariance() if few else None
        return GaussianOutputs(self.mean, self._whole(variance), covariance)

    def _closed_parts(self) -> Iterator[Tensor]:
        """The last layer's activations, a few rows at a time."""
        assert self._last is not None
        rows = self._last[1]
        limit = min(_POSITION_BYTES, self._engine.budget or TEMPORARY_BYTES)
        yield from rows.split(max(1, limit // (8 * self._row_mean.shape[1] * (4 + rows.shape[1]))))

    def _closed_variance(self) -> Tensor:
        assert self._last is not None
        return self._as_result(_last_variance(self._weights, self._last).clamp(min=0))

    def _closed_covariance(self) -> Tensor:
        assert self._last is not None
        return torch.cat(
            [
                self._as_result(self._weights.of_layer(self._last[0]).output_covariance(part))
                for part in self._closed_parts()
            ]
        )

    def _centred(self, variance: Tensor) -> Spread:
        """Variances of the centred logits as independent ones: all that the probit link takes."""
        assert self._last is not None
        classes, means = variance.shape[1], list[Tensor]()
        for part in self._closed_parts():
            ones = part.new_ones(len(part), classes, 1)
            means.append(
                self._as_result(self._weights.of_layer(self._last[0]).output_product(part)(ones)[:, :, 0])
            )
        sums = torch.cat(means) / classes
        centred = (variance - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
        return Spread(centred.new_zeros(*centred.shape, 0), centred * _independent(classes))

    def _gradient(self, place: int, indices: Tensor | None) -> Gradient:
        """Gradients of single outputs of one position: number i is the i-th class, or with `indices` each sample's; the
        number after the last is the mean of all classes.
        """
        rows, position = self._row_mean, int(self._places[place])
        classes, size = rows.shape[1], prod(self.sizes)
        count = classes if indices is None else indices.shape[1]

        def gradient(number: int) -> Tensor:
            unit = torch.zeros(self._samples, size, classes, dtype=rows.dtype, device=rows.device)
            if number == count:
                unit[:, position] = 1 / classes
            elif indices is None:
                unit[:, position, number] = 1
            else:
                unit[:, position].scatter_(1, indices[:, number : number + 1], 1)
            return self._layout.whole(unit.flatten(0, 1), self.sizes)

        return gradient

    def _at(self, place: int) -> Tensor:
        """Mean of the logits at one place, ``(samples, classes)``."""
        return self._row_mean.reshape(self._samples, len(self._places), -1)[:, place]

    def _contracted(self, place: int, indices: Tensor | None, number: int) -> Tensor:
        """Covariance of functions of the outputs at one place, ``(samples, number, number)``."""
        last = False  # other places, or another call, may follow
        gradient = self._gradient(place, indices)
        pulled = pull(self._recording, gradient, range(number), self._dtype, last=last)
        return self._as_result(self._weights.contract(pulled, self._samples, number, "covariance"))

    def _one_position(self, place: int) -> tuple[Tensor, Spread]:
        """Variances of the logits at one place ``(samples, classes)``, and their `Spread`."""
        mean = self._at(place)
        indices = self._engine.chosen.indices(mean)
        if indices is None:
            covariance = self._contracted(place, None, mean.shape[1])
            variance = covariance.diagonal(dim1=1, dim2=2).clamp(min=0)
            return variance, of_product(mean.to(variance), variance, lambda x: covariance.to(x) @ x)
        top = self._contracted(place, indices, indices.shape[1] + 1)
        return top_spread(mean, indices, top, *other_variances(self._weights, None, mean, top))

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the classes that are used at each position, ``(samples, positions, classes, classes)``; with
        `joint` of all outputs of the batch, by input, position and class.
        """
        with torch.autocast(self._outputs.device.type, enabled=False):
            if self._last is not None and joint:
                return self._as_result(
                    self._weights.of_layer(self._last[0]).output_covariance(self._last[1], joint=True)
                )
            if joint:
                return self._joint()
            if self._last is not None:
                flat = self._closed_covariance()
                return flat.reshape(self._samples, len(self._places), *flat.shape[1:])
            parts: list[Tensor] = []
            for place in in_parts(range(len(self._places))):
                indices = self._engine.chosen.indices(self._at(place))
                number = self._row_mean.shape[1] if indices is None else indices.shape[1]
                parts.append(self._contracted(place, indices, number))
            return torch.stack(parts, 1)

    def _joint(self) -> Tensor:
        classes = self._row_mean.shape[1]
        gradients = [self._gradient(place, None) for place in range(len(self._places))]
        number = classes * len(gradients)
        pulled = pull(
            self._recording,
            lambda function: gradients[function // classes](function % classes),
            range(number),
            self._dtype,
            last=False,
        )
        return self._as_result(self._weights.contract(pulled, self._samples, number, "joint"))

    def trace(self, probes: int) -> Tensor:
        """The sum of the variances of all outputs that are used, ``(samples,)``."""
        return self.variance().reshape(self._samples, -1).sum(1)


class PositionProbes(_Rows):
    """The outputs of one batch with positions, and draws of their deviations ``J (theta_r - theta)``."""

    def __init__(
        self, dtype: torch.dtype, outputs: Tensor, deviations: Tensor, layout: Layout, picked: Tensor | None
    ) -> None:
        """
        Args:
            dtype: of the results.
            outputs: in the model's layout.
            deviations: ``(draws, samples, numbers)``, the outputs flattened.
            layout: of the outputs.
            picked: the positions that are used.
        """
        super().__init__(dtype, outputs, layout, picked)
        draws = [layout.rows(draw.reshape(outputs.shape)) for draw in deviations]
        self._deviations = torch.stack([self._of_all_rows(rows) for rows in draws])
        self.watched: list[Call] = []  # no layer is watched in these passes

    def variance(self) -> Tensor:
        """Variance of every output that is used, shaped like `mean`."""
        return self._whole(self._deviations.square().mean(0))

    def gaussian(self) -> GaussianOutputs:
        """Mean, variance, and the rows' covariance."""
        draws, rows, classes = self._deviations.shape
        variance, spreads = self._deviations.square().mean(0), list[Spread]()
        step = max(1, 2**20 // (draws * classes))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            root = self._deviations[:, part].permute(1, 2, 0) / draws**0.5
            spreads.append(
                of_product(
                    self._row_mean[part].to(root),
                    variance[part],
                    lambda x, root=root: root.to(x) @ (root.to(x).transpose(1, 2) @ x),
                )
            )
        spread = Spread(torch.cat([s.root for s in spreads]), torch.cat([s.rest for s in spreads]))
        return GaussianOutputs(self.mean, self._whole(variance), spread)

    def covariance(self, joint: bool) -> Tensor:
        """See `PositionLinearization.covariance`."""
        draws = len(self._deviations)
        if joint:
            flat = self._deviations.flatten(1)
            return flat.T @ flat / draws
        found = torch.einsum("drc,dre->rce", self._deviations, self._deviations) / draws
        return found.reshape(self._samples, len(self._places), *found.shape[1:])

    def trace(self, probes: int) -> Tensor:
        """The sum of the variances of all outputs that are used, ``(samples,)``."""
        return self.variance().reshape(self._samples, -1).sum(1)


def _independent(classes: int) -> float:
    """From the variance of a centred logit to that of independent logits; of two classes, to that of their difference,
    by which the probit link of two classes goes.
    """
    return 4.0 if classes == 2 else classes / (classes - 1)


# The linearisation of one batch by draws of its function: the engine ``"jvp"``.


class Probes:
    """The outputs of one batch, and draws of their deviations ``J (theta_r - theta)``.

    Attributes:
        mean: outputs ``(samples, ...)``.
    """

    def __init__(self, mean: Tensor, deviations: Tensor, chosen: ChosenOutputs) -> None:
        """
        Args:
            mean: outputs.
            deviations: ``(draws, samples, outputs)``.
            chosen: the outputs that are used.
        """
        check_shape(mean, deviations.shape[1])
        self.mean, self._deviations, self._chosen = mean, deviations, chosen
        self.watched: list[Call] = []  # no layer is watched in these passes

    def variance(self) -> Tensor:
        """Variance of every output, ``(samples, outputs)``."""
        return self._deviations.square().mean(0)

    def trace(self, probes: int) -> Tensor:
        """The sum of all outputs' variances, ``(samples,)``; from all draws, whatever `probes` says."""
        return self.variance().sum(1)

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the outputs that are used; see `LinearizedPredictor.functional_covariance`."""
        deviations, indices = self._deviations, self._chosen.indices(self.mean)
        if indices is not None:
            deviations = deviations.gather(2, indices.expand(len(deviations), -1, -1))
        if joint:
            flat = deviations.flatten(1)
            return flat.T @ flat / len(flat)
        return _products(deviations)

    def gaussian(self) -> GaussianOutputs:
        """Mean, variance, and as much of the covariance as the link can use."""
        deviations, variance = self._deviations, self.variance()
        if self._chosen.wants_covariance(self.mean):
            return GaussianOutputs(self.mean, variance, _products(deviations))
        if not self._chosen.wants_spread():
            return GaussianOutputs(self.mean, variance)
        root = deviations.permute(1, 2, 0) / len(deviations) ** 0.5
        spread = of_product(self.mean, variance, lambda x: root @ (root.transpose(1, 2) @ x))
        return GaussianOutputs(self.mean, variance, spread)


def _products(deviations: Tensor) -> Tensor:
    """Mean over the draws of all products of two outputs, ``(samples, outputs, outputs)``."""
    return torch.einsum("rsc,rsd->scd", deviations, deviations) / len(deviations)


# What the linearised head prepares and keeps: copies of the network, tracked layers, weights' covariance and
# draws.

Self = TypeVar("Self", bound="Linearizing")


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


class Linearizing(Predictor):
    """A predictor that linearises a network in its weights, batch by batch.

    Attributes:
        _engine: see `LinearizedPredictor`, and so the others.
        _n_probes: draws of the weights that the engine ``"jvp"`` keeps.
        _tells_novelty: whether the inputs of the last layer are watched.
        _positions: of outputs with positions, those that are used; None for all.
        _budget: bytes of a temporary; None for 256 MiB.
        _chosen: which outputs are used.
    """

    _engine: Any
    _n_probes: int
    _tells_novelty: bool
    _positions: Tensor | None
    _budget: int | None
    _chosen: ChosenOutputs

    def _copy_network(self, model: nn.Module) -> None:
        """Copy the network, once its options are set; nothing is prepared yet."""
        check_differentiable(unwrap(model))
        self._dtype = statistics_dtype(unwrap(model), None)
        with isolated_random_state():  # copying a module may run its code
            twin = replicate(self._model[0], self._posterior.trained_mean)
        self._networks = _Networks(twin, self._posterior)
        self._weights: tuple[Hyperparameters, WeightCovariance] | None = None
        self._drawn: tuple[Hyperparameters, dict[str, Tensor]] | None = None

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
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

    def _linearized(
        self, posterior: Posterior, batch: Batch, features: Features | None = None
    ) -> Linearization | Probes | PositionLinearization | PositionProbes:
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
        recording = engine.tracked.capture.run(batch, samples)
        layout = self._layout(recording.outputs)
        if layout is None:
            return Linearization(engine, batch, samples, recording)
        picked = picked_positions(self._positions, layout.positions(recording.outputs))
        linearization = PositionLinearization(engine, recording, layout, picked)
        if self._engine == "auto" and linearization.backward_passes > MOST_BACKWARD:
            return self._probed(networks, posterior, batch, features, recording.watched)
        return linearization

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
    ) -> Probes | PositionProbes:
        """The linearisation by draws of the function."""
        if features is None:
            features = networks.frozen.features(batch.args, batch.kwargs, self._n_probes)
        work = batch if features is None else features.batch
        with networks.twins(features).lent() as twin:
            outputs, deviations = function_draws(twin, work, self._deviations(posterior))
        deviations = deviations.to(self._dtype)
        deviations = deviations.flatten(2) if outputs.ndim > 1 else deviations.unsqueeze(2)
        layout = self._layout(outputs)
        if layout is None:
            return Probes(outputs, deviations, self._chosen)
        picked = picked_positions(self._positions, layout.positions(outputs))
        probes = PositionProbes(self._dtype, outputs, deviations, layout, picked)
        probes.watched = list(watched)
        return probes

    def _covariances(self, posterior: Posterior, device: torch.device) -> WeightCovariance:
        """The covariance of the weights, cached until settings or data change."""
        settings, cached = posterior.settings.of_weights(), self._weights
        if cached is None or cached[0] != settings:
            with self._lock:
                cached = self._weights
                if cached is None or cached[0] != settings:
                    budget = TEMPORARY_BYTES if self._budget is None else self._budget
                    limit = temporary_limit(budget, device)
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


@contextmanager
def without_gradients() -> Generator[None]:
    """No inference mode and no gradients, whatever the caller's mode: autograd is used inside."""
    with torch.inference_mode(False), torch.no_grad():
        yield


# The linearised head: the mean is the trained network's output, the covariance that of its linearisation.

EngineName = Literal["auto", "exact", "jvp", "last_layer"]


class LinearizedPredictor(Linearizing):
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
        link: from Gaussian logits to probabilities; see `from_gaussian`. It gets the covariance of all classes where
            all are used and there are at most 50. With more, ``"mc"`` and ``"probit"`` get that of a posterior of the
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
        link: Link = "mc",
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
        self._link, self._n_draws = checked_link(link, n_draws)
        self._engine = check_option("engine", engine, EngineName)
        self._n_probes = check_option("n_probes", n_probes, Count)
        self._positions = checked_positions(positions)
        self._budget: int | None = check_option("memory_budget", memory_budget, Count | None)
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
        self._copy_network(model)

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
            outputs, calls = _shaped(linearization.gaussian()), linearization.watched
        ratio = self._known_novelty(posterior, batch, calls)
        if isinstance(linearization, (PositionLinearization, PositionProbes)):
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
            return _shaped(self._linearized(posterior, batch).gaussian())

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
            return _shaped(self._linearized(self._snapshot(), features.batch, features).gaussian())

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
            linearization = self._linearized(self._snapshot(), batch)
            variance = linearization.variance().reshape(linearization.mean.shape)
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


def _shaped(outputs: GaussianOutputs) -> GaussianOutputs:
    return outputs._replace(variance=outputs.variance.reshape(outputs.mean.shape))
