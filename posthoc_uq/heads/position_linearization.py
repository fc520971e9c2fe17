"""The linearisation of one batch whose outputs have positions: in closed form for the last layer, by backward passes of
single outputs at a few positions, or by draws of its function.

Positions and classes are as rows, see `Layout`; covariances are those of the classes of one position.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Recording
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.closed_form import variance_of_many
from posthoc_uq.heads.jacobians import Gradient, pull
from posthoc_uq.heads.linearization import Engine, last_layer_spread, other_variances
from posthoc_uq.heads.predictor import GaussianOutputs
from posthoc_uq.heads.tracking import position_rows
from posthoc_uq.layers import Call
from posthoc_uq.memory import default_budget
from posthoc_uq.predictions.layout import Layout
from posthoc_uq.predictions.spread import Spread, of_product
from posthoc_uq.progress import in_parts

MOST_BACKWARD = (
    256  # backward passes that `engine="auto"` takes for a batch; of more outputs it draws the function
)
_BYTES = 2**24  # of the temporaries of rows that are computed at once
_ROWS_PER_INPUT = (
    4  # with more rows than this for each of a layer's inputs, covariances are formed for the variances
)
_MOST_NUMBERS = 2**24  # of these covariances


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
        name, rows = self._last
        layer = self._weights.layers.get(name)
        directions = 0 if layer is None or layer.low_rank is None else rows.shape[1]
        limit = min(_BYTES, self._engine.budget or default_budget(self._outputs.device))
        yield from rows.split(max(1, limit // (8 * self._row_mean.shape[1] * (4 + directions))))

    def _closed_variance(self) -> Tensor:
        assert self._last is not None
        name, rows = self._last
        layer, (inputs, outputs) = self._weights.layers.get(name), (rows.shape[1], self._row_mean.shape[1])
        many = len(rows) > _ROWS_PER_INPUT * inputs and outputs * inputs**2 <= _MOST_NUMBERS
        if layer is not None and (many or layer.low_rank is None):
            return self._as_result(variance_of_many(layer, rows))
        parts = [self._weights.output_variance(name, part) for part in self._closed_parts()]
        return self._as_result(torch.cat([part.clamp(min=0) for part in parts]))

    def _closed_covariance(self) -> Tensor:
        assert self._last is not None
        return torch.cat(
            [
                self._as_result(self._weights.output_covariance(self._last[0], part, False))
                for part in self._closed_parts()
            ]
        )

    def _centred(self, variance: Tensor) -> Spread:
        """Variances of the centred logits as independent ones: all that the probit link takes."""
        assert self._last is not None
        classes, means = variance.shape[1], list[Tensor]()
        for part in self._closed_parts():
            ones = part.new_ones(len(part), classes, 1)
            means.append(self._as_result(self._weights.output_product(self._last[0], part)(ones)[:, :, 0]))
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
        number = indices.shape[1]
        top = self._contracted(place, indices, number + 1)
        variance, centred = other_variances(self._weights, None, mean, top)
        top_variance = top.diagonal(dim1=1, dim2=2)[:, :number].clamp(min=0)
        variance = variance.scatter(1, indices, top_variance)
        differences = top[:, :number] - top[:, number:]
        block = differences[:, :, :number] - differences[:, :, number:]
        centred = centred.scatter(1, indices, block.diagonal(dim1=1, dim2=2).clamp(min=0))

        def multiply(x: Tensor) -> Tensor:
            rows = indices.unsqueeze(-1).expand(-1, -1, x.shape[2])
            return (centred.unsqueeze(-1) * x).scatter(1, rows, block.to(x) @ x.gather(1, rows))

        return variance, of_product(mean.to(centred), centred, multiply)

    def covariance(self, joint: bool) -> Tensor:
        """Covariance of the classes that are used at each position, ``(samples, positions, classes, classes)``; with
        `joint` of all outputs of the batch, by input, position and class.
        """
        with torch.autocast(self._outputs.device.type, enabled=False):
            if self._last is not None and joint:
                return self._as_result(self._weights.output_covariance(*self._last, True))
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
