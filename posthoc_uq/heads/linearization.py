"""The linearisation of one batch by backward passes: the engines ``"exact"`` and ``"last_layer"``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.chosen_outputs import ChosenOutputs, check_shape
from posthoc_uq.heads.jacobians import Gradient, WeightCovariance, one_output, pull, random_signs
from posthoc_uq.heads.predictor import GaussianOutputs
from posthoc_uq.heads.products import Mode
from posthoc_uq.heads.tracking import TrackedModel, output_layer
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import default_budget
from posthoc_uq.predictions.spread import Spread, of_product
from posthoc_uq.progress import in_parts, share

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
                return self._as_result(self._weights.output_variance(*only_layer).clamp(min=0))
            indices, size = self._engine.chosen.indices(outputs), outputs[0].numel()
            number = size if indices is None else indices.shape[1]
            last = None if indices is None else self._last_layer()
            variance = self._as_result(self._variances(one_output(outputs, indices), number).clamp(min=0))
            if indices is None:
                return variance
            if last is None:
                other_variance = variance.mean(1, keepdim=True).expand(samples, size)
            else:
                other_variance = self._weights.output_variance(*last).clamp(min=0)
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
                variances = self._weights.output_variance(*last_layer)
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
        last, mean = self._last_layer(), self.mean
        top = self._covariance(indices, joint=False, centre=True)
        number = indices.shape[1]
        variance, centred = other_variances(self._weights, last, mean, top)
        top_variance = top.diagonal(dim1=1, dim2=2)[:, :number].clamp(min=0)
        variance = variance.to(top_variance).scatter(1, indices, top_variance)
        differences = top[:, :number] - top[:, number:]
        block = differences[:, :, :number] - differences[:, :, number:]
        centred = centred.to(top_variance).scatter(1, indices, block.diagonal(dim1=1, dim2=2).clamp(min=0))

        def multiply(x: Tensor) -> Tensor:
            rows = indices.unsqueeze(-1).expand(-1, -1, x.shape[2])
            return (centred.unsqueeze(-1) * x).scatter(1, rows, block.to(x) @ x.gather(1, rows))

        return variance, of_product(mean.to(self._engine.dtype), centred, multiply)

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
                return self._as_result(self._weights.output_covariance(*last_layer, joint))
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
        return _STORED * (default_budget(self._device) if budget is None else budget)


def last_layer_spread(
    weights: WeightCovariance, layer: str, rows: Tensor, mean: Tensor, variance: Tensor
) -> Spread:
    """Spread of the last layer's outputs by its own weights, a few samples at a time: products with a covariance of
    many classes are large.
    """
    step = max(1, _AT_ONCE // max(1, mean[0].numel()))
    parts = [
        of_product(m.to(v.dtype), v, weights.output_product(layer, a))
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
        variance = weights.output_variance(*last).clamp(min=0)
        ones = torch.ones(*variance.shape, 1, dtype=last[1].dtype, device=last[1].device)
        sums = weights.output_product(*last)(ones)[:, :, 0].to(variance) / size
        return variance, (variance - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
    diagonal = top.diagonal(dim1=1, dim2=2)
    centred = diagonal[:, :-1] - 2 * top[:, :-1, -1] + diagonal[:, -1:]
    return tuple(v.clamp(min=0).mean(1, keepdim=True).expand(-1, size) for v in (diagonal[:, :-1], centred))  # type: ignore[return-value]
