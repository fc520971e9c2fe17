"""Covariances of a linearised network's outputs by differentiation: backward passes, forward mode, or Jacobians."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from posthoc_uq.core.batches import Batch, count_samples, holds_samples
from posthoc_uq.core.devices import without_autocast
from posthoc_uq.core.model import jvp
from posthoc_uq.core.progress import progress_span, split_progress
from posthoc_uq.heads.jacobians import Gradient, Pulled, WeightCovariance, check_shape, pull_back
from posthoc_uq.heads.linearized_outputs import (
    ONE_POSITION,
    ChosenOutputs,
    LastLayer,
    LastLayerOutputs,
    LinearizedOutputs,
    spread_of,
)
from posthoc_uq.heads.spectrum import Spectrum, Sums
from posthoc_uq.layers.calls import PlainAttention
from posthoc_uq.layers.capture import Capture
from posthoc_uq.layers.frozen import called
from posthoc_uq.layers.jacobian import jacobians
from posthoc_uq.layers.layer import Call
from posthoc_uq.likelihoods.draws import LogitCovariance, OutputCovariance, OutputGaussian
from posthoc_uq.posteriors import Posterior
from posthoc_uq.posteriors.covariance import Mode

_MAX_COPIES = 20  # of one sample, for as many functions of its outputs
# Of numbers that layers give for a sample, up to which copies are no slower: so many, or this share of the weights.
# ResNet-18 with ten outputs and copies takes .5 to .6 of the time at .005 to .04, 1.2 at .07 and 1.8 at .2 (224 px), a
# ViT .8 at .065, a MobileNet 1 at .08 and 1.6 at .3, a LeNet with 6,500 numbers .8.
_MAX_GIVEN, _MAX_SHARE = 2**16, 0.07
_STORED_BUDGETS = 4  # output gradients of more than this many memory budgets split the batch


class Linearization(LinearizedOutputs):
    """One forward pass of a batch, and the backward passes for the covariance of its outputs."""

    rows_may_be_many = False  # backward passes are for few positions

    def __init__(
        self,
        chosen: ChosenOutputs,
        capture: Capture,
        last: LastLayer | None,
        weights: WeightCovariance | Spectrum,
        budget: int,
        batch: Batch,
        samples: int,
    ) -> None:
        """
        Args:
            chosen: the outputs that are used.
            capture: of the posterior's layers.
            last: the one of them whose outputs may be the model's.
            weights: their covariance.
            budget: bytes that one temporary may take.
            batch: the arguments of the network.
            samples: in the batch.
        """
        self._capture, self._last, self._weights, self._budget = capture, last, weights, budget
        self._batch, self._recording = batch, capture.run(batch, samples)
        outputs = self._recording.outputs.detach()
        super().__init__(chosen, chosen.layout(outputs, samples), outputs, samples, self._recording.watched)
        self._outputs, self._dtype = outputs, weights.dtype
        self._autocast = torch.is_autocast_enabled(outputs.device.type)

    @property
    def backward_passes(self) -> int:
        """How many the covariances of this batch take."""
        classes = self._rows.shape[1]
        return len(self._places) * (self._chosen.number(classes) or classes)

    @cached_property
    def by_last_layer(self) -> LastLayerOutputs | None:
        """The same by the weights of the last layer alone, if the posterior covers it, in closed form."""
        if self._last is None:
            return None
        assert isinstance(self._weights, WeightCovariance)
        calls = self._recording.calls.get(self._last.layer.name, [])
        return self._last.outputs(
            self._chosen, self._outputs, calls, self._samples, self._weights, self.watched
        )

    def _result(self, computed: Tensor) -> Tensor:
        """On the device and in the number format of results."""
        return computed.to(self.mean.device, self._dtype)

    def row_variances(self) -> Tensor:
        indices = self._chosen.indices(self._rows)
        number = self._rows.shape[1] if indices is None else indices.shape[1]
        of_last = None if indices is None else self.by_last_layer  # before backward passes in parts
        variance = self._result(self._variances_at_places(indices, number).clamp(min=0))
        if indices is None:
            return variance
        if of_last is None:
            others = variance.mean(1, keepdim=True).expand(self._rows.shape)
        else:
            others = of_last.row_variances()
        return others.scatter(1, indices, variance)

    def _variances_at_places(self, indices: Tensor | None, number: int) -> Tensor:
        parts = [
            self._variances_of(self._one_class(place, indices), number, place == len(self._places) - 1)
            for place in split_progress(range(len(self._places)))
        ]
        return torch.stack(parts, 1).flatten(0, 1)

    def _covariances(self, indices: Tensor | None) -> Tensor:
        return self._contracted(indices)

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        """By sample, place and class."""
        gradients = [self._one_class(place, indices) for place in range(len(self._places))]
        each = self._rows.shape[1] if indices is None else indices.shape[1]
        number = each * len(gradients)
        return self._of_functions(lambda n: gradients[n // each](n % each), number, "joint", last=True)

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        indices = self._chosen.indices(self._rows)
        if indices is None:
            return self.row_variances(), None
        others = self.by_last_layer  # before backward passes in parts, which let go of this pass
        # with the mean of all logits, for the covariance of the centred ones
        return top_spread(self._rows, indices, self._contracted(indices, centre=True), others)

    def at_every_prior(self, spectrum: Spectrum) -> OutputsByPrior:
        """The outputs at every prior precision, from products with `spectrum`, which are those of the engine."""
        indices = self._chosen.indices(self._rows)
        parts = list[Sums]()
        with without_autocast(self.mean.device.type):
            for part, used in self._parts(indices, centre=indices is not None):
                number = part._functions(used, indices is not None)
                gradient = part._one_class(0, used)
                pulled = part._pulled(gradient, range(number), last=True)
                parts.append(spectrum.contract(pulled, part._samples, number))
        return OutputsByPrior(self.mean, self._rows, indices, parts, spectrum, self._chosen)

    # Backward passes

    def _one_class(self, place: int, indices: Tensor | None) -> Gradient:
        """Gradients of single outputs at one place: number i is the i-th class, or with `indices` each row's
        ``indices[:, i]``; the number after the last is the mean of all classes.
        """
        rows, position, size = self._rows, int(self._places[place]), prod(self.sizes)
        classes = rows.shape[1]
        count = classes if indices is None else indices.shape[1]
        here = None if indices is None else indices.reshape(self._samples, -1, count)[:, place]

        if here is None and size == 1:  # one tensor for all classes
            units = torch.eye(classes, dtype=rows.dtype, device=rows.device)
            return lambda number: self._layout.whole(units[number].expand(self._samples, -1), self.sizes)

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

    def _pulled(self, gradient: Gradient, numbers: range, last: bool) -> list[Pulled]:
        """As `pull_back`. The functions of one sample's outputs have one backward pass, of as many copies of it, which
        takes half of the time if the network is large and the sample small: products of one row are then bound by the
        weights that they read.
        """
        copies = len(numbers)
        if self._samples > 1 or not 1 < copies <= _MAX_COPIES or not self._worth_copying():
            return pull_back(self._recording, gradient, numbers, self._dtype, last=last)
        with torch.autocast(self.mean.device.type, enabled=self._autocast):
            recording = self._capture.run(self._batch.repeated(copies), copies)
        rows = torch.cat([gradient(number).reshape(self._outputs.shape) for number in numbers])
        of_copies = pull_back(recording, lambda _: rows, range(1), self._dtype, last=True)
        return [
            Pulled(
                each.layer,
                each.activations.part(slice(0, 1)),
                lambda each=each: each.gradients().transpose(0, 2),
            )
            for each in of_copies
        ]

    def _worth_copying(self) -> bool:
        """Whether the one sample is a single tensor, and so small that copies of it are faster."""
        tensors = [value for value in (*self._batch.args, *self._batch.kwargs.values()) if value is not None]
        # of several arguments one may be the same for all samples, with one row by chance
        alone = len(tensors) == 1 and isinstance(tensors[0], Tensor) and holds_samples(tensors[0], 1)
        weights = sum(tracked.layer.parameters for tracked in self._capture.tracked.values())
        few = self._recording.numbers <= max(_MAX_GIVEN, _MAX_SHARE * weights)
        return alone and few and not self._batch.whole

    def _variances_of(self, gradient: Gradient, number: int, last_place: bool = True) -> Tensor:
        """Variances of functions of the outputs, ``(samples, functions)``, as many at once as memory allows."""
        assert isinstance(self._weights, WeightCovariance)
        step = max(1, _STORED_BUDGETS * self._budget // max(1, self._pass_bytes))
        variances: list[Tensor] = []
        for start in split_progress(range(0, number, step)):
            numbers = range(start, min(number, start + step))
            last = numbers.stop == number and last_place
            with progress_span(0, 0.5):
                pulled = self._pulled(gradient, numbers, last)
            with progress_span(0.5, 1):
                variances.append(self._weights.contract(pulled, self._samples, len(numbers), "variance"))
        return torch.cat(variances, dim=1)

    def _contracted(self, indices: Tensor | None, centre: bool = False) -> Tensor:
        """Covariances of all outputs, or of those at `indices`, at each place; with `centre` the mean of all outputs
        comes last, as one more.
        """
        places, found = len(self._places), list[Tensor]()
        for part, used in self._parts(indices, centre):
            number = part._functions(used, centre)
            gradients = [part._one_class(place, used) for place in range(places)]
            at_places = [
                part._of_functions(gradients[place], number, "covariance", place == places - 1)
                for place in split_progress(range(places))
            ]
            found.append(torch.stack(at_places, 1).flatten(0, 1))
        return torch.cat(found)

    def _functions(self, indices: Tensor | None, centre: bool) -> int:
        """How many functions of the outputs have a backward pass."""
        return (self._rows.shape[1] if indices is None else indices.shape[1]) + centre

    def _parts(self, indices: Tensor | None, centre: bool) -> Iterator[tuple[Linearization, Tensor | None]]:
        """This batch, or where its output gradients take too much memory, parts of it that take less; each with its
        part of `indices`. Backward passes of one are to be run before the next is asked for.
        """
        samples, places = self._samples, len(self._places)
        needed = self._functions(indices, centre) * self._pass_bytes
        count = -(-samples // max(1, _STORED_BUDGETS * self._budget * samples // max(1, needed)))
        if count == 1:
            yield self, indices
            return
        del self._recording  # its graph is not needed any more
        bounds = [samples * place // count for place in range(count + 1)]
        for start, stop in split_progress(list(pairwise(bounds))):
            with torch.autocast(self.mean.device.type, enabled=self._autocast):
                part = Linearization(
                    self._chosen,
                    self._capture,
                    self._last,
                    self._weights,
                    self._budget,
                    self._batch.narrow(start, stop - start, samples),
                    stop - start,
                )
            yield part, None if indices is None else indices[start * places : stop * places]

    def _of_functions(self, gradient: Gradient, number: int, mode: Mode, last: bool) -> Tensor:
        assert isinstance(self._weights, WeightCovariance)
        with progress_span(0, 0.5):
            pulled = self._pulled(gradient, range(number), last)
        with progress_span(0.5, 1):
            return self._result(self._weights.contract(pulled, self._samples, number, mode))

    @property
    def _pass_bytes(self) -> int:
        """What the output gradients of one backward pass take."""
        return self._recording.numbers * torch.finfo(self._dtype).bits // 8


@dataclass(frozen=True)
class OutputsByPrior:
    """The outputs of one batch without positions at every prior precision, up to what a `Spectrum` leaves out.

    Attributes:
        mean: the outputs, in the shape of the model's.
        rows: the outputs, ``(samples, outputs)``.
        indices: of those with a backward pass, ``(samples, k)``; None for all.
        sums: from `Spectrum.contract`, by parts of the batch; of the outputs at `indices` with the mean of all outputs
            as one more.
        spectrum: see above.
        chosen: the outputs that are used.
    """

    mean: Tensor
    rows: Tensor
    indices: Tensor | None
    sums: list[Sums]
    spectrum: Spectrum
    chosen: ChosenOutputs

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(part.nbytes for part in self.sums)

    def at(self, prior_precision: float) -> OutputGaussian:
        """As `LinearizedOutputs.gaussian`; other outputs than those at `indices` have their mean variance."""
        parts = [self.spectrum.covariances(part, prior_precision) for part in self.sums]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        covariance: Tensor | LogitCovariance | None = None
        if self.indices is not None:
            variance, covariance = top_spread(self.rows, self.indices, found, None)
            covariance = covariance if self.chosen.wants_spread else None
        else:
            variance = found.diagonal(dim1=1, dim2=2).clamp(min=0)
            covariance = found if self.chosen.wants_covariance(self.rows.shape[1], False) else None
        return OutputGaussian(self.mean, variance.reshape(self.mean.shape), covariance)


def top_spread(
    mean: Tensor, indices: Tensor, top: Tensor, last: LastLayerOutputs | None
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
        others = last.row_variances()
        others_centred = last.centred_variances(others)
    variance = others.scatter(1, indices, top_variance)
    centred = others_centred.scatter(1, indices, top_centred)

    def covariance(part: slice) -> OutputCovariance:
        def multiplied(x: Tensor) -> Tensor:
            places = indices[part].unsqueeze(1).expand(-1, x.shape[1], -1)
            of_top = x.gather(2, places) @ block[part].to(x)
            return (centred[part].unsqueeze(1) * x).scatter(2, places, of_top)

        return OutputCovariance(multiplied)

    return variance, spread_of(mean.to(centred), centred, covariance)


class Probes(LinearizedOutputs):
    """The outputs of one batch by draws of its function, the engine ``"jvp"``."""

    def __init__(
        self, chosen: ChosenOutputs, outputs: Tensor, deviations: Tensor, watched: Sequence[Call] = ()
    ) -> None:
        """
        Args:
            chosen: the outputs that are used.
            outputs: of the model.
            deviations: draws of ``J (theta_r - theta)``, ``(draws, *outputs)``.
            watched: see `LinearizedOutputs`.
        """
        super().__init__(chosen, chosen.layout(outputs, len(outputs)), outputs, len(outputs), watched)
        if self._single:
            deviations = deviations.unsqueeze(2)
        rows = [self._used(self._layout.rows(of_draw)) for of_draw in deviations]
        self._deviations = torch.stack(rows)

    def row_variances(self) -> Tensor:
        return self._deviations.square().mean(0)

    def _covariances(self, indices: Tensor | None) -> Tensor:
        deviations = self.selected(indices)
        return torch.einsum("drc,dre->rce", deviations, deviations) / len(deviations)

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        flat = self.selected(indices).flatten(1)
        return flat.T @ flat / len(flat)

    def selected(self, indices: Tensor | None) -> Tensor:
        if indices is None:
            return self._deviations
        return self._deviations.gather(2, indices.expand(len(self._deviations), -1, -1))

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        variance = self.row_variances()

        def covariance(part: slice) -> OutputCovariance:
            root = self._deviations[:, part].transpose(0, 1) / len(self._deviations) ** 0.5
            return OutputCovariance(lambda x: (x @ root.to(x).transpose(1, 2)) @ root.to(x))

        return variance, spread_of(self._rows, variance, covariance)


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
        super().__init__(replace(chosen, positions=None), ONE_POSITION, outputs, samples)
        self._jacobians = partial(jacobians, model, weights, batch, samples)
        self._posterior = posterior

    def _by_layer(self) -> dict[str, Tensor]:
        """The Jacobian by each layer's matrix, ``(samples, outputs, G, m, n)``."""
        found = self._jacobians()
        return {
            name: layer.to_matrix(found[layer.weight], None if layer.bias is None else found[layer.bias])
            for name, layer in self._posterior.layers.items()
        }

    def row_variances(self) -> Tensor:
        return self._covariances(None).diagonal(dim1=1, dim2=2)

    def _covariances(self, indices: Tensor | None) -> Tensor:
        by_layer = self._by_layer()
        rows = [{name: j[row] for name, j in by_layer.items()} for row in range(self._samples)]
        return torch.stack([self._posterior.quadratic(row) for row in rows])

    def _joint_covariance(self, indices: Tensor | None) -> Tensor:
        return self._posterior.quadratic({name: j.flatten(0, 1) for name, j in self._by_layer().items()})

    def _spread(self) -> tuple[Tensor, LogitCovariance | None]:
        return self.row_variances(), None


def function_draws(model: nn.Module, batch: Batch, deviations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs, and their derivatives ``J (theta_r - theta)`` along deviations of the weights, by forward mode.

    Args:
        model: in eval mode; nothing else may run it meanwhile.
        batch: its inputs.
        deviations: parameter name to ``(draws, *shape)``.

    Returns:
        Outputs ``(samples, ...)`` and derivatives ``(draws, samples, ...)``.

    Raises:
        PosthocUQError: some operation of the model has no forward derivative.
    """
    parameters = dict(model.named_parameters())
    centre = {name: parameters[name].detach() for name in deviations}
    draws = len(next(iter(deviations.values())))

    def run(weights: dict[str, Tensor]) -> Tensor:
        own = batch.copied()
        return own.outputs_of(functional_call(model, weights, own.args, own.kwargs))

    outputs, derivatives = None, list[Tensor]()
    with torch.no_grad(), PlainAttention():
        for draw in split_progress(range(draws)):
            tangent = {name: deviation[draw] for name, deviation in deviations.items()}
            outputs, derivative = jvp(
                run,
                (centre,),
                (tangent,),
                needed_by="engine='jvp', and draws of functions, need",
                way_out="use engine='exact', and draw functions with head='sampling'",
            )
            derivatives.append(derivative)
    assert outputs is not None
    return outputs, torch.stack(derivatives)
