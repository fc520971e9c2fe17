"""Features, the inputs of a model's last layer: which layer that is, and its inputs as one row a sample."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.devices import without_autocast
from posthoc_uq.core.errors import PosthocUQError, check_refused
from posthoc_uq.core.model import replicate
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.capture import Recording, is_lookup_of
from posthoc_uq.layers.layer import Call, Layer
from posthoc_uq.layers.operands import CPU_TEMPORARY
from posthoc_uq.layers.proof import Prepared, first_samples
from posthoc_uq.layers.rules import AffineCall, LayerGradients
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.labels import Layout

MAX_FEATURES = 8192  # numbers a sample; up to here their Gram is a small statistic


@dataclass(frozen=True)
class FeatureSource:
    """Where the features of a sample come from.

    Attributes:
        layer: the layer whose inputs are the features.
        source: ``"outputs"`` where the layer's outputs are the model's, ``"positions"`` where it gives every position
            its classes, ``"pooled"`` elsewhere.
        outputs: numbers that the model gives for one sample, or for one position.
        by_class: False where samples have no one class; None elsewhere.
        pointwise: whether the layer's outputs at a position are the model's at this position.
    """

    layer: Layer
    source: str
    outputs: int
    by_class: bool | None = None
    pointwise: bool = False

    @property
    def size(self) -> int:
        """Features of a sample, the bias's 1 included."""
        return self.layer.groups * self.layer.inputs


def feature_rows(
    calls: Sequence[Call],
    layer: Layer,
    samples: int,
    by_position: bool = False,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """A layer's input as one row a sample, ``(samples, features)``, in float32 at least: the mean over its positions,
    over those that a mask of them attends to. With `by_position` as one row a position, ``(samples * positions,
    features)``.

    Args:
        calls: of the layer, in one pass.
        layer: the layer.
        samples: number of samples in the batch.
        by_position: whether every position has a row.
        attention_mask: `Batch.attention_mask`.

    Raises:
        PosthocUQError: the layer did not run exactly once.
        UnsupportedLayerError: the samples cannot be told apart in its input.
    """
    if len(calls) != 1:
        raise PosthocUQError(
            f"The novelty of an input goes by what enters layer '{layer.name}', which ran {len(calls)} times in this "
            f"pass and once in the fit; ask for predictor.novelty(..., of='top'), which goes by the posterior itself."
        )
    with without_autocast(calls[0].input.device.type):
        dtype = torch.promote_types(calls[0].input.dtype, torch.float32)
        operand = LayerGradients(layer, list(calls), samples, 0).activations(dtype)[0]
        numbers = operand.positions * layer.groups * layer.inputs * 8
        step = max(1, CPU_TEMPORARY // numbers)
        parts = [operand]
        if not torch.compiler.is_compiling():  # under a tracer the number of samples is a symbol
            parts = [operand.part(slice(i, min(i + step, samples))) for i in range(0, samples, step)]
        if by_position:
            return torch.cat([part.rows().transpose(1, 2).flatten(2).flatten(0, 1) for part in parts])
        if attention_mask is None or tuple(attention_mask.shape) != (samples, operand.positions):
            if torch.compiler.is_compiling():  # a node named "mean" may have the name of an output
                return (operand.rows().sum(2) / operand.positions).flatten(1)
            return torch.cat([part.rows().mean(2).flatten(1) for part in parts])
        attended = (attention_mask != 0).to(calls[0].input.device)
        attended = (attended | ~attended.any(1, keepdim=True)).to(dtype)
        of_positions = attended / attended.sum(1, keepdim=True)
        shares = [of_positions] if torch.compiler.is_compiling() else of_positions.split(step)
        means = [torch.einsum("sgti,st->sgi", p.rows(), s) for p, s in zip(parts, shares, strict=True)]
        return torch.cat(means).flatten(1)


def grid_of(call: Call) -> tuple[int, ...]:
    """The positions of a linear layer's or a pointwise convolution's input, by its dimensions."""
    shape, strides = tuple(call.input.shape), tuple(call.geometry.stride) if call.layer.convolutional else ()
    if not call.layer.convolutional:
        return shape[1:-1]
    return tuple(-(-size // stride) for size, stride in zip(shape[2:], strides, strict=True))


@contextmanager
def watching(model: nn.Module, layer: Layer) -> Generator[list[Call]]:
    """Catch a layer's inputs while the body runs `model`, with gradients or without.

    Raises:
        PosthocUQError: the model has no such weight.
    """
    weight = dict(model.named_parameters()).get(layer.weight)
    if weight is None:
        raise PosthocUQError(
            f"The novelty of an input goes by what enters layer '{layer.name}', and the model has no parameter "
            f"'{layer.weight}'; pass the model that the posterior was fitted on."
        )
    calls: list[Call] = []

    def note(use: AffineCall, _: Tensor) -> None:
        if not is_lookup_of(use, layer):
            calls.append(Call(layer, use.input.detach().clone(), use.geometry))

    with CallWatcher({id(weight)}, note, anchored=False):
        yield calls


def find_features(
    prepared: Prepared, batch: Batch, likelihood: Likelihood | None = None
) -> FeatureSource | None:
    """The last weighted layer before the outputs (of several the one that runs last), if its input is one row a sample
    or can be pooled to one; else None. Where outputs have positions, it is one row a position if the layer gives a
    position its classes: it is a linear layer or a pointwise convolution, on the grid of the outputs or a coarser one.

    The numbers decide: two samples in one batch must give the same rows as each of them alone. A graph, or what else is
    not cut, is always alone.

    Args:
        prepared: copies of its model are run.
        batch: its first two samples are used.
        likelihood: says whether outputs have positions.
    """
    capture, pair = prepared.capture, first_samples(batch, count_samples(batch))

    def plainly() -> None:
        with torch.no_grad():
            batch.copied().call_any(replicate(prepared.model))

    try:
        return _found(prepared, pair, likelihood)
    except Exception as error:  # the batch has run before, but some models refuse two of its samples, or one
        check_refused(error, lambda: _found(prepared, pair, likelihood), plainly)
        return None
    finally:
        capture.watched = None


def _found(prepared: Prepared, pair: Batch, likelihood: Likelihood | None) -> FeatureSource | None:
    # what enters a weight that is used in no layer's call is not seen
    last = prepared.last[-1:]
    if not last or last[0].uses != 1 or last[0].layer.groups * last[0].layer.inputs > MAX_FEATURES:
        return None
    capture, layer, samples = prepared.capture, last[0].layer, 1 if pair.whole else 2
    capture.watched = layer
    together = capture.run(pair, samples)
    alone = [capture.run(pair.narrow(i, 1, samples), 1) for i in range(samples)]
    if any(one.outputs.shape[:1] != (1,) for one in alone) or together.outputs.shape[:1] != (samples,):
        raise PosthocUQError("The outputs do not count the samples.")
    outputs = together.outputs.detach()
    layout = None if likelihood is None else likelihood.positions_of(outputs)
    if layout is not None and layer.pointwise and layout.classes(outputs) == layer.groups * layer.outputs:
        source = _of_positions(capture.twin, layer, together, alone, layout)
        if source is not None:
            return source
    rows = feature_rows(together.watched, layer, samples)
    if not _agree(torch.cat([feature_rows(one.watched, layer, 1) for one in alone]), rows):
        return None
    of_layer, of_model = _applied(capture.twin, layer, rows), outputs.to(rows).reshape(samples, -1)
    same = of_layer.shape == of_model.shape and _agree(of_layer, of_model)
    by_class = None if layout is None else False
    return FeatureSource(layer, "outputs" if same else "pooled", of_model.shape[1], by_class)


def _of_positions(
    twin: nn.Module, layer: Layer, together: Recording, alone: Sequence[Recording], layout: Layout
) -> FeatureSource | None:
    """The source for one row a position, or None where the layer does not give positions their classes."""
    outputs = together.outputs.detach()
    samples, positions = len(outputs), layout.positions(outputs)
    rows, grid = (
        feature_rows(together.watched, layer, samples, by_position=True),
        grid_of(together.watched[0]),
    )
    if not _agree(torch.cat([feature_rows(one.watched, layer, 1, by_position=True) for one in alone]), rows):
        return None
    if len(rows) != samples * prod(grid):
        return None
    if grid == positions:
        fits = _agree(_applied(twin, layer, rows), layout.rows(outputs).to(rows))
    else:  # a coarser grid, as before an interpolation
        fits = len(grid) == len(positions) and all(a <= b for a, b in zip(grid, positions, strict=True))
    if not fits:
        return None
    return FeatureSource(layer, "positions", layout.classes(outputs), pointwise=grid == positions)


def _applied(twin: nn.Module, layer: Layer, rows: Tensor) -> Tensor:
    """The layer's outputs for these rows."""
    parameters = dict(twin.named_parameters())
    bias = None if layer.bias is None else parameters[layer.bias]
    matrix = layer.to_matrix(parameters[layer.weight], bias).detach().to(rows)
    return torch.einsum("goi,sgi->sgo", matrix, rows.reshape(len(rows), layer.groups, -1)).flatten(1)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree up to the rounding of half precision."""
    return bool((a - b).abs().amax() <= 2e-2 * b.abs().amax())
