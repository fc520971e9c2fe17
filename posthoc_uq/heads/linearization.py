"""A linearised batch by backward passes: the engines ``"exact"`` and ``"last_layer"``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.chosen import ChosenOutputs, check_shape
from posthoc_uq.heads.jacobians import Gradient, WeightCovariance, one_output, pull, random_signs
from posthoc_uq.heads.predictor import GaussianOutputs
from posthoc_uq.heads.products import Mode
from posthoc_uq.heads.tracking import TrackedLayers, output_layer
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import default_budget
from posthoc_uq.predictions.spread import Spread, of_product

_AT_ONCE = 2**16  # logits whose covariance is put into its directions at once
_STORED = 4  # memory budgets that output gradients may take before the batch is cut


@dataclass(frozen=True)
class Engine:
    """What all batches have in common.

    Attributes:
        name: ``"auto"``, ``"exact"`` or ``"last_layer"``.
        tracked: the posterior's layers in the model.
        layers: their names.
        covariance: of the weights, for a device.
        chosen: the outputs looked at.
        dtype: of activations and output gradients.
        budget: bytes that one temporary may take, or None for the default.
    """

    name: str
    tracked: TrackedLayers
    layers: tuple[str, ...]
    covariance: Callable[[torch.device], WeightCovariance]
    chosen: ChosenOutputs
    dtype: torch.dtype
    budget: int | None


class Linearization:
    """One forward pass of a batch, pulled back for the covariance of its outputs.

    Attributes:
        mean: outputs ``(samples, ...)``.
        watched: the calls of the layer by which novelty goes.
    """

    def __init__(self, engine: Engine, batch: Batch, samples: int) -> None:
        self._engine, self._batch, self._samples = engine, batch, samples
        self._recording: Recording = engine.tracked.capture.run(batch, samples)
        self.mean = self._recording.outputs.detach()
        check_shape(self.mean, samples)
        self._device = self.mean.device
        self._weights = engine.covariance(self._device)
        self.watched: list[Call] = self._recording.watched

    def gaussian(self) -> GaussianOutputs:
        """With what the link is told of the covariance."""
        mean, chosen = self.mean, self._engine.chosen
        if chosen.wants_covariance(mean):
            covariance = self._covariance(None, joint=False)
            return GaussianOutputs(mean, covariance.diagonal(dim1=1, dim2=2), covariance)
        if not chosen.wants_spread():
            return GaussianOutputs(mean, self.variance())
        with torch.autocast(self._device.type, enabled=False):
            closed = self._closed_form()
            if closed is not None:
                variance = self.variance()
                return GaussianOutputs(mean, variance, _own_spread(self._weights, *closed, mean, variance))
        indices = chosen.indices(mean)
        if indices is None:
            return GaussianOutputs(mean, self.variance())
        # with the mean of all logits, for the covariance of the centred ones
        return GaussianOutputs(mean, *self._top_spread(indices))

    def variance(self) -> Tensor:
        """Of every output, ``(samples, outputs)``."""
        outputs, samples = self.mean, self._samples
        with torch.autocast(self._device.type, enabled=False):
            closed = self._closed_form()
            if closed is not None:
                return self._own_dtype(self._weights.own_variance(*closed).clamp(min=0))
            indices, size = self._engine.chosen.indices(outputs), outputs[0].numel()
            number = size if indices is None else indices.shape[1]
            last = None if indices is None else self._last_layer()
            found = self._own_dtype(self._variances(one_output(outputs, indices), number).clamp(min=0))
            if indices is None:
                return found
            if last is None:
                others = found.mean(1, keepdim=True).expand(samples, size)
            else:
                others = self._weights.own_variance(*last).clamp(min=0)
            return others.to(found).scatter(1, indices, found)

    def covariance(self, joint: bool) -> Tensor:
        """Of the outputs looked at; see `LinearizedPredictor.functional_covariance`."""
        return self._covariance(self._engine.chosen.indices(self.mean), joint)

    def trace(self, probes: int) -> Tensor:
        """The sum of all outputs' variances, ``(samples,)``, by random signs where there are more outputs."""
        outputs, size = self.mean, self.mean[0].numel()
        with torch.autocast(self._device.type, enabled=False):
            closed = self._closed_form()
            if closed is not None:
                found = self._weights.own_variance(*closed)
            elif size <= probes:
                found = self._variances(one_output(outputs, None), size)
            else:
                signs = random_signs(outputs, probes, torch.Generator().manual_seed(0))
                found = self._variances(signs, probes) / probes
            return self._own_dtype(found.sum(1))

    def _own_dtype(self, found: Tensor) -> Tensor:
        return found.to(self._device, self._engine.dtype)

    def _top_spread(self, indices: Tensor) -> tuple[Tensor, Spread]:
        """Variances of all logits, and their covariance: of the centred logits at `indices` as it is, of the others as
        if they were independent.
        """
        last, mean = self._last_layer(), self.mean
        top = self._covariance(indices, joint=False, centre=True)
        number = indices.shape[1]
        variance, centred = _others(self._weights, last, mean, top)
        own = top.diagonal(dim1=1, dim2=2)[:, :number].clamp(min=0)
        variance = variance.to(own).scatter(1, indices, own)
        differences = top[:, :number] - top[:, number:]
        block = differences[:, :, :number] - differences[:, :, number:]
        centred = centred.to(own).scatter(1, indices, block.diagonal(dim1=1, dim2=2).clamp(min=0))

        def multiply(x: Tensor) -> Tensor:
            rows = indices.unsqueeze(-1).expand(-1, -1, x.shape[2])
            return (centred.unsqueeze(-1) * x).scatter(1, rows, block.to(x) @ x.gather(1, rows))

        return variance, of_product(mean.to(self._engine.dtype), centred, multiply)

    def _variances(self, gradient: Gradient, number: int) -> Tensor:
        """Of some functions of the outputs, ``(samples, functions)``, as many at once as memory allows."""
        step = max(1, self._stored() // max(1, self._size()))
        found: list[Tensor] = []
        for start in range(0, number, step):
            numbers = range(start, min(number, start + step))
            last = numbers.stop == number
            pulled = pull(self._recording, gradient, numbers, self._engine.dtype, last=last)
            found.append(self._weights.contract(pulled, self._samples, len(numbers), "variance"))
        return torch.cat(found, dim=1)

    def _covariance(self, indices: Tensor | None, joint: bool, centre: bool = False) -> Tensor:
        """Of all outputs, or of those at `indices`, with `centre` and of the mean of all outputs after them; a batch
        whose output gradients are too many is cut in two.
        """
        number = (self.mean[0].numel() if indices is None else indices.shape[1]) + centre
        with torch.autocast(self._device.type, enabled=False):
            closed = self._closed_form()
            if closed is not None and indices is None:
                return self._own_dtype(self._weights.own_covariance(*closed, joint))
        if not joint and self._samples > 1 and self._size() * number > self._stored():
            return self._in_halves(indices, centre)
        mode: Mode = "joint" if joint else "covariance"
        with torch.autocast(self._device.type, enabled=False):
            gradient = one_output(self.mean, indices)
            pulled = pull(self._recording, gradient, range(number), self._engine.dtype, last=True)
            return self._own_dtype(self._weights.contract(pulled, self._samples, number, mode))

    def _in_halves(self, indices: Tensor | None, centre: bool) -> Tensor:
        samples, parts = self._samples, list[Tensor]()
        del self._recording  # whose graph is of no use any more
        for start, stop in ((0, samples // 2), (samples // 2, samples)):
            half = Linearization(self._engine, self._batch.narrow(start, stop - start, samples), stop - start)
            own = None if indices is None else indices[start:stop]
            parts.append(half._covariance(own, joint=False, centre=centre))
        return torch.cat(parts)

    def _closed_form(self) -> tuple[str, Tensor] | None:
        """Name and activations of the last layer, if the posterior covers no other and the engine may use it."""
        name, layers = self._engine.name, self._engine.layers
        if name == "exact":
            return None
        found = self._last_layer() if len(layers) == 1 else None
        if found is None and name == "last_layer":
            raise PosthocUQError(
                f"engine='last_layer' needs a posterior of one layer whose outputs are the model's; this one has "
                f"{len(layers)} layers ({list(layers)[-3:]}). Fit with layers='last', or use engine='exact'."
            )
        return found

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


def _own_spread(
    weights: WeightCovariance, layer: str, rows: Tensor, mean: Tensor, variance: Tensor
) -> Spread:
    """Of the outputs of the last layer alone, a few samples at a time: products with a covariance of many classes are
    large.
    """
    step = max(1, _AT_ONCE // max(1, mean[0].numel()))
    parts = [
        of_product(m.to(v.dtype), v, weights.own_product(layer, a))
        for a, m, v in zip(rows.split(step), mean.split(step), variance.split(step), strict=True)
    ]
    return Spread(torch.cat([part.root for part in parts]), torch.cat([part.rest for part in parts]))


def _others(
    weights: WeightCovariance, last: tuple[str, Tensor] | None, mean: Tensor, top: Tensor
) -> tuple[Tensor, Tensor]:
    """Variances of the logits that were not pulled back, and of the same logits centred, each ``(samples, outputs)``:
    by the last layer's weights, or the mean over those that were.

    Args:
        top: covariance of the logits that were, and of the mean of all after them.
    """
    size = mean[0].numel()
    if last is not None:
        variance = weights.own_variance(*last).clamp(min=0)
        ones = torch.ones(*variance.shape, 1, dtype=last[1].dtype, device=last[1].device)
        sums = weights.own_product(*last)(ones)[:, :, 0].to(variance) / size
        return variance, (variance - 2 * sums + sums.mean(1, keepdim=True)).clamp(min=0)
    own = top.diagonal(dim1=1, dim2=2)
    centred = own[:, :-1] - 2 * top[:, :-1, -1] + own[:, -1:]
    return tuple(v.clamp(min=0).mean(1, keepdim=True).expand(-1, size) for v in (own[:, :-1], centred))  # type: ignore[return-value]
