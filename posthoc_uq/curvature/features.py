"""Features, the inputs of a model's last layer: which layer that is, and its inputs as one row a sample."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.capture import Capture
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.hooks import CallInterceptor, Use
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.curvature.operands import CPU_TEMPORARY
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.layers import Call, Layer
from posthoc_uq.loaders import Batch

MOST_FEATURES = 8192  # numbers a sample; up to here their Gram is a small statistic


@dataclass(frozen=True)
class FeatureSource:
    """Where the features of a sample come from.

    Attributes:
        layer: the layer whose inputs are the features.
        source: ``"outputs"`` where the layer's outputs are the model's, ``"pooled"`` elsewhere.
        outputs: numbers that the model gives for one sample.
    """

    layer: Layer
    source: str
    outputs: int

    @property
    def size(self) -> int:
        """Features of a sample, the bias's 1 included."""
        return self.layer.groups * self.layer.inputs


def feature_rows(calls: Sequence[Call], layer: Layer, samples: int) -> Tensor:
    """A layer's input as one row a sample, ``(samples, features)``, in float32 at least: the mean over its positions.

    Args:
        calls: of the layer, in one pass.
        layer: the layer.
        samples: number of samples in the batch.

    Raises:
        PosthocUQError: the layer did not run exactly once.
        UnsupportedLayerError: the samples cannot be told apart in its input.
    """
    if len(calls) != 1:
        raise PosthocUQError(
            f"The novelty of an input goes by what enters layer '{layer.name}', which ran {len(calls)} times in this "
            f"pass and once in the fit; ask for predictor.novelty(..., of='top'), which goes by the posterior itself."
        )
    with torch.autocast(calls[0].input.device.type, enabled=False), torch.no_grad():
        dtype = torch.promote_types(calls[0].input.dtype, torch.float32)
        operand = LayerGradients(layer, list(calls), samples, 0).activations(dtype)[0]
        numbers = operand.positions * layer.groups * layer.inputs * 8
        step = max(1, CPU_TEMPORARY // numbers)
        parts = [operand.part(slice(i, min(i + step, samples))) for i in range(0, samples, step)]
        return torch.cat([part.rows().mean(2).flatten(1) for part in parts])


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

    def note(use: Use, _: Tensor) -> None:
        calls.append(Call(layer, use.input.detach().clone(), use.geometry))

    with CallInterceptor({id(weight)}, note, anchored=False):
        yield calls


def find_features(model: nn.Module, batch: Batch, autocast: bool = False) -> FeatureSource | None:
    """The last weighted layer that runs, if its input is one row a sample or can be pooled to one; else None.

    The numbers decide: two samples in one batch must give the same rows as each of them alone.

    Args:
        model: a copy of it is run.
        batch: its first two samples are used.
        autocast: as in `Capture.discover`.
    """
    count = count_samples(batch)
    pair = batch.narrow(0, 2, count) if count > 1 else batch.doubled()
    try:
        capture = Capture(model)
        layers = capture.discover(pair, autocast)
        if not layers or layers[-1].uses != 1 or _features(layers[-1].layer) > MOST_FEATURES:
            return None
        layer = layers[-1].layer
        rows, outputs = _probe(capture.twin, layer, pair, 2)
        alone = [_probe(capture.twin, layer, pair.narrow(i, 1, 2), 1)[0] for i in range(2)]
    except Exception:  # the batch has run before, but some models refuse two of its samples, or one
        return None
    if not _agree(torch.cat(alone), rows):
        return None
    of_layer, of_model = _applied(capture.twin, layer, rows), outputs.to(rows).reshape(2, -1)
    same = of_layer.shape == of_model.shape and _agree(of_layer, of_model)
    return FeatureSource(layer, "outputs" if same else "pooled", of_model.shape[1])


def _features(layer: Layer) -> int:
    return layer.groups * layer.inputs


def _probe(twin: nn.Module, layer: Layer, batch: Batch, samples: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), watching(twin, layer) as calls:
        outputs = batch.call(twin)
    if outputs.ndim == 0 or outputs.shape[0] != samples:
        raise PosthocUQError("The outputs do not count the samples.")
    return feature_rows(calls, layer, samples), outputs


def _applied(twin: nn.Module, layer: Layer, rows: Tensor) -> Tensor:
    """The layer's outputs for these rows."""
    parameters = dict(twin.named_parameters())
    bias = None if layer.bias is None else parameters[layer.bias]
    matrix = layer.to_matrix(parameters[layer.weight], bias).detach().to(rows)
    return torch.einsum("goi,sgi->sgo", matrix, rows.reshape(len(rows), layer.groups, -1)).flatten(1)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree up to the rounding of half precision."""
    return bool((a - b).abs().amax() <= 2e-2 * b.abs().amax())
