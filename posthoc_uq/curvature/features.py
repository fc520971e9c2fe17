"""Features, the inputs of a model's last layer: which layer that is, and its inputs as one row a sample. Stages, the
inputs of a few layers before it: which these are, and what of their positions makes one row a sample.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.devices import at_least_float32, without_autocast
from posthoc_uq.core.errors import PosthocUQError, check_refused
from posthoc_uq.core.model import replicate
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.capture import Capture, Recording, WatchedCalls, WatchedLayer
from posthoc_uq.layers.layer import Call, Layer
from posthoc_uq.layers.operands import CPU_TEMPORARY
from posthoc_uq.layers.proof import Prepared, first_samples
from posthoc_uq.layers.rules import LayerGradients, Linear, Product
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.labels import Layout

MAX_FEATURES = 8192  # numbers a sample; up to here their Gram is a small statistic
STAGES = {"row": 1, "mean": 1, "deviation": 2, "roughness": 3, "pixels": 1}
"""What is told of a stage, with the numbers for each of its channels: the row itself, where it has no positions; of
positions the mean; the mean and the deviation; these and the roughness, the root mean square of the differences of
neighbours; or, where every pixel has a novelty, the row of each."""
MAX_STAGES = 3  # of a network
_MAX_STAGE = 1024  # numbers of a stage
_MAX_ROW = 512  # of the row that enters a network without positions


def size_of(layer: Layer, source: str) -> int:
    """Features of a sample, by what is told of a layer's inputs; a 1 is among them, if not all layers have a bias."""
    if source in STAGES:
        return STAGES[source] * layer.groups * layer.channels + 1
    return layer.groups * layer.inputs


@dataclass(frozen=True)
class FeatureSource:
    """Where the features of a sample come from.

    Attributes:
        layer: the layer whose inputs are the features.
        source: ``"outputs"`` where the layer's outputs are the model's, ``"positions"`` where it gives every position
            its classes, ``"pooled"`` elsewhere; of a stage a key of `STAGES`.
        outputs: numbers that the model gives for one sample, or for one position.
        by_class: False where samples have no one class; None elsewhere.
        pointwise: whether the layer's outputs at a position are the model's at this position.
        stages: of the same samples, in the order of the pass.
    """

    layer: Layer
    source: str
    outputs: int
    by_class: bool | None = None
    pointwise: bool = False
    stages: tuple[FeatureSource, ...] = ()

    @property
    def size(self) -> int:
        """Features of a sample, the bias's 1 included."""
        return size_of(self.layer, self.source)

    @property
    def watched(self) -> tuple[WatchedLayer, ...]:
        """What a pass keeps for it."""
        return watched_for(self.layer, [(stage.layer, stage.source) for stage in self.stages])


def watched_for(layer: Layer, stages: Sequence[tuple[Layer, str]] = ()) -> tuple[WatchedLayer, ...]:
    """What a pass keeps for novelty: the inputs of the last layer, and what is told of those of the stages."""
    return WatchedLayer(layer), *(
        WatchedLayer(own, partial(stage_rows, own, source)) for own, source in stages
    )


def calls_of(calls: Sequence[Call], layer: Layer) -> list[Call]:
    """Of the calls of a pass those of a layer."""
    return [call for call in calls if call.layer.weight == layer.weight]


def rows_of_stage(calls: Sequence[Call], layer: Layer, samples: int) -> Tensor:
    """What a pass kept of a stage, as `stage_rows` gives it.

    Raises:
        PosthocUQError: the layer did not run exactly once.
    """
    own = calls_of(calls, layer)
    if len(own) != 1 or own[0].input.shape[0] != samples:
        raise PosthocUQError(
            f"The novelty of an input goes also by what enters layer '{layer.name}', which ran {len(own)} times for "
            f"these {samples} samples, and once in the fit; ask for predictor.novelty(..., of='class'), which goes by "
            f"the last layer alone, and wrap with novelty=False."
        )
    return own[0].input


def stage_rows(layer: Layer, source: str, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """What is told of the input of a layer as one row a sample, ``(samples, features)``, or a pixel, ``(samples,
    *positions, features)``, in float32 at least.

    Args:
        layer: of the stage.
        source: a key of `STAGES`.
        x: its input, ``(samples, channels, *positions)`` of a convolution, ``(samples, *positions, channels)``
            elsewhere.
        attention_mask: `Batch.attention_mask`; positions that it leaves out do not count.
    """
    with without_autocast(x.device.type):
        x = at_least_float32(x)
        x = x if layer.convolutional else layer.rule.features(x)
        if source == "pixels" and layer.convolutional:
            x = x.movedim(1, -1)
        if source in ("row", "pixels"):
            return F.pad(x, (0, 1), value=1.0)
        grid = tuple(x.shape[2:]) if layer.convolutional else tuple(x.shape[1:-1])
        shares = _shares_of_positions(attention_mask, x, grid)
        parts = _moments(x, layer.convolutional, source != "mean", shares)
        if source == "roughness":
            parts.append(_roughness(x, None if shares is None else shares.reshape(len(x), *grid)))
        return F.pad(torch.cat(parts, 1), (0, 1), value=1.0)


def _shares_of_positions(mask: Tensor | None, x: Tensor, grid: tuple[int, ...]) -> Tensor | None:
    """``(samples, positions)`` of sum 1, or None where all count alike."""
    if mask is None or tuple(mask.shape) != (x.shape[0], prod(grid)):
        return None
    attended = (mask != 0).to(x.device)
    attended = (attended | ~attended.any(1, keepdim=True)).to(x)
    return attended / attended.sum(1, keepdim=True)


def _moments(x: Tensor, channels_first: bool, deviation: bool, shares: Tensor | None) -> list[Tensor]:
    """Mean and deviation over positions, each ``(samples, channels)``. How fast a reduction is goes by the layout."""
    x, dim = (x.flatten(2), 2) if channels_first else (x.reshape(x.shape[0], -1, x.shape[-1]), 1)
    count = x.shape[dim]
    if shares is None:  # under a tracer a node named "mean" may have the name of an output
        means = x.sum(dim, keepdim=True) / count
    else:
        shares = shares.unsqueeze(1 if channels_first else 2)
        means = (x * shares).sum(dim, keepdim=True)
    found = [means.squeeze(dim)]
    if deviation:
        apart = x - means
        if shares is not None:
            found.append((apart.square() * shares).sum(dim).sqrt())
        elif channels_first:
            found.append(torch.linalg.vector_norm(apart, dim=2) / sqrt(count))
        else:
            found.append((apart.square_().sum(1) / count).sqrt())
    return found


def _roughness(x: Tensor, shares: Tensor | None) -> Tensor:
    """The root of the mean square of the differences of neighbours, ``(samples, channels)``, the mean of the squares
    over the directions of the positions ``(samples, channels, *positions)``.
    """
    positions, directions = list(range(2, x.ndim)), list[Tensor]()
    dims = [dim for dim in positions if x.shape[dim] > 1]
    if not dims:
        return torch.zeros_like(x.flatten(2)[:, :, 0])
    for dim in dims:
        apart = x.diff(dim=dim)
        if shares is None:
            root = torch.linalg.vector_norm(apart, dim=positions) / sqrt(prod(apart.shape[2:]) * len(dims))
        else:  # of pairs that count both
            size = shares.shape[dim - 1] - 1
            both = (shares.narrow(dim - 1, 1, size) * shares.narrow(dim - 1, 0, size)).flatten(1).unsqueeze(1)
            total = both.sum(2).clamp(min=torch.finfo(x.dtype).tiny) * len(dims)
            root = ((apart.flatten(2).square() * both).sum(2) / total).sqrt()
        directions.append(root)
    return torch.linalg.vector_norm(torch.stack(directions), dim=0)


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
        calls: of one pass, those of the layer among them.
        layer: the layer.
        samples: number of samples in the batch.
        by_position: whether every position has a row.
        attention_mask: `Batch.attention_mask`.

    Raises:
        PosthocUQError: the layer did not run exactly once.
        UnsupportedLayerError: the samples cannot be told apart in its input.
    """
    calls = calls_of(calls, layer)
    if len(calls) != 1:
        raise PosthocUQError(
            f"The novelty of an input goes by what enters layer '{layer.name}', which ran {len(calls)} times in this "
            f"pass and once in the fit; ask for predictor.novelty(..., of='top'), which goes by the posterior itself."
        )
    with without_autocast(calls[0].input.device.type):
        dtype = torch.promote_types(calls[0].input.dtype, torch.float32)
        operand = LayerGradients(layer, calls, samples, 0).activations(dtype)
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
def watching(
    model: nn.Module, watched: Sequence[WatchedLayer], attention_mask: Tensor | None = None
) -> Generator[list[Call]]:
    """Catch what layers get while the body runs `model`, with gradients or without.

    Raises:
        PosthocUQError: the model has no such weight.
    """
    try:
        seen = WatchedCalls(model, watched, attention_mask)
    except AttributeError:
        names = dict(model.named_parameters())
        layer = next(watch.layer for watch in watched if watch.layer.weight not in names)
        raise PosthocUQError(
            f"The novelty of an input goes by what enters layer '{layer.name}', and the model has no parameter "
            f"'{layer.weight}'; pass the model that the posterior was fitted on."
        ) from None
    with CallWatcher(seen.weights, lambda use, _: seen.note(use), anchored=False):
        yield seen.calls


def find_features(
    prepared: Prepared, batch: Batch, likelihood: Likelihood | None = None
) -> FeatureSource | None:
    """The last weighted layer before the outputs, if its input is one row a sample or can be pooled to one; else None.
    Of several it is the one that runs last of those of which that is so. Where outputs have positions, it is one row a
    position if the layer gives a position its classes: it is a linear layer or a pointwise convolution, on the grid of
    the outputs or a coarser one.

    Its stages are the first, the middle and the last of the layers before it whose inputs have positions, one for each
    tensor; of a network without positions what enters its first layer. Where every pixel has a row, they are of those
    layers that have no more pixels; tokens with a row each have no stages.

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
        # of two towers both have a last layer, and one may see no sample, such as the prompts of all classes
        for use in reversed(prepared.last):
            layer, found = use.layer, None
            # what enters a weight that is used in no layer's call is not seen
            if use.uses != 1 or layer.groups * layer.inputs > MAX_FEATURES:
                continue
            try:
                found = _found(prepared, pair, likelihood, layer)
            except (
                Exception
            ) as error:  # the batch has run before, but some models refuse two of its samples, or one
                check_refused(error, partial(_found, prepared, pair, likelihood, layer), plainly)
            if found is not None:
                return found
        return None
    finally:
        capture.watched = ()


def _found(
    prepared: Prepared, pair: Batch, likelihood: Likelihood | None, layer: Layer
) -> FeatureSource | None:
    capture, samples = prepared.capture, 1 if pair.whole else 2
    stages = [] if pair.whole else _stages(prepared, layer, pair.attention_mask)
    together, alone = _runs(capture, pair, samples, watched_for(layer, stages))
    outputs = together.outputs.detach()
    layout = None if likelihood is None else likelihood.positions_of(outputs)
    if layout is not None and layer.pointwise and layout.classes(outputs) == layer.groups * layer.outputs:
        source = _of_positions(capture.twin, layer, together, alone, layout)
        grid = grid_of(calls_of(together.watched, layer)[0])
        if source is not None and len(grid) > 1:
            stages = _stages(prepared, layer, pair.attention_mask, within=grid)
            runs = _runs(capture, pair, samples, watched_for(layer, stages))
            return replace(source, stages=_agreeing(source, stages, *runs))
        if source is not None:
            return source
    rows = feature_rows(together.watched, layer, samples)
    if not _agree(torch.cat([feature_rows(one.watched, layer, 1) for one in alone]), rows):
        return None
    of_layer, of_model = _applied(capture.twin, layer, rows), outputs.to(rows).reshape(samples, -1)
    same = of_layer.shape == of_model.shape and _agree(of_layer, of_model)
    by_class = None if layout is None else False
    found = FeatureSource(layer, "outputs" if same else "pooled", of_model.shape[1], by_class)
    return replace(found, stages=_agreeing(found, stages, together, alone))


def _runs(
    capture: Capture, pair: Batch, samples: int, watched: tuple[WatchedLayer, ...]
) -> tuple[Recording, list[Recording]]:
    """Two samples in one batch, and each of them alone."""
    capture.watched = watched
    together = capture.run(pair, samples)
    alone = [capture.run(pair.narrow(i, 1, samples), 1) for i in range(samples)]
    if any(one.outputs.shape[:1] != (1,) for one in alone) or together.outputs.shape[:1] != (samples,):
        raise PosthocUQError("The outputs do not count the samples.")
    return together, alone


def _agreeing(
    found: FeatureSource,
    stages: Sequence[tuple[Layer, str]],
    together: Recording,
    alone: Sequence[Recording],
) -> tuple[FeatureSource, ...]:
    """Those of the stages that run once, and give two samples of one batch the rows that they give each of them."""
    agreeing = list[FeatureSource]()
    for own, source in stages:
        calls = [calls_of(recording.watched, own) for recording in (together, *alone)]
        if any(len(each) != 1 for each in calls):
            continue
        rows, *others = (each[0].input for each in calls)
        # where positions come first there may be as many as samples
        by_sample = all(len(part) == 1 for part in others) and len(rows) == len(others)
        if by_sample and _agree(torch.cat(others), rows):
            agreeing.append(replace(found, layer=own, source=source))
    return tuple(agreeing)


def _stages(
    prepared: Prepared, last: Layer, mask: Tensor | None, within: tuple[int, ...] | None = None
) -> list[tuple[Layer, str]]:
    """Layers before the last one that may be stages, and what is told of their inputs. Where a mask leaves positions
    out, only those whose positions it is of: others would see how far a batch is padded. Where the last layer has a row
    for each pixel, only those with no more pixels than these, `within`.
    """
    weights = [tracked.layer.weight for tracked in prepared.found]
    before = [t for t in prepared.found[: weights.index(last.weight)] if t.layer.rule.matrices]
    # whose inputs are one tensor of channels at positions
    kinds = Linear.kind, Product.kind
    alone = [t for t in before if t.uses == 1 and (t.layer.convolutional or t.layer.kind in kinds)]
    several = list[Layer]()
    for tracked in alone:
        layer, shape = tracked.layer, tracked.input_shape
        grid = tuple(shape[2:] if layer.convolutional else shape[1:-1])
        positions = prod(grid)
        fits = len(shape) > 2 and positions > 1 and size_of(layer, "mean") <= _MAX_STAGE + 1
        fits = fits and (within is None or _is_within(grid, within))
        masked = mask is None or tuple(mask.shape[1:]) == (positions,)
        if fits and masked and tracked.input_of == layer.weight:
            several.append(layer)
    if several:
        found = list[tuple[Layer, str]]()
        for place in sorted({round(share * (len(several) - 1)) for share in (0, 0.5, 1)}):
            layer = several[place]
            told = ["roughness"] if place == 0 and layer.convolutional else []
            told = [*told, "deviation", "mean"] if within is None else ["pixels"]
            found.append((layer, next(each for each in told if size_of(layer, each) <= _MAX_STAGE + 1)))
        return found
    if within is None and alone and before[0] is alone[0] and len(alone[0].input_shape) == 2:
        layer = alone[0].layer
        if not layer.convolutional and size_of(layer, "row") <= _MAX_ROW + 1:
            return [(layer, "row")]
    return []


def _of_positions(
    twin: nn.Module, layer: Layer, together: Recording, alone: Sequence[Recording], layout: Layout
) -> FeatureSource | None:
    """The source for one row a position, or None where the layer does not give positions their classes."""
    outputs = together.outputs.detach()
    samples, positions = len(outputs), layout.positions(outputs)
    rows, grid = (
        feature_rows(together.watched, layer, samples, by_position=True),
        grid_of(calls_of(together.watched, layer)[0]),
    )
    if not _agree(torch.cat([feature_rows(one.watched, layer, 1, by_position=True) for one in alone]), rows):
        return None
    if len(rows) != samples * prod(grid):
        return None
    if grid == positions:
        fits = _agree(_applied(twin, layer, rows), layout.rows(outputs).to(rows))
    else:  # a coarser grid, as before an interpolation
        fits = _is_within(grid, positions)
    if not fits:
        return None
    return FeatureSource(layer, "positions", layout.classes(outputs), pointwise=grid == positions)


def _is_within(grid: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a grid has as many dimensions as another, and is nowhere finer."""
    return len(grid) == len(other) and all(a <= b for a, b in zip(grid, other, strict=True))


def _applied(twin: nn.Module, layer: Layer, rows: Tensor) -> Tensor:
    """The layer's outputs for these rows."""
    parameters = dict(twin.named_parameters())
    bias = None if layer.bias is None else parameters[layer.bias]
    matrix = layer.to_matrix(parameters[layer.weight], bias).detach().to(rows)
    return torch.einsum("goi,sgi->sgo", matrix, rows.reshape(len(rows), layer.groups, -1)).flatten(1)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree up to the rounding of half precision."""
    return bool((a - b).abs().amax() <= 2e-2 * b.abs().amax())
