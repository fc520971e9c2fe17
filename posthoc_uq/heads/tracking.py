"""Which of a posterior's layers a model uses, and which of them is its last."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.capture import Capture, Recording
from posthoc_uq.curvature.dryrun import count_samples, prepare
from posthoc_uq.curvature.features import grid_of
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.errors import PosteriorMismatchError
from posthoc_uq.layers import Call, Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.predictions.layout import Layout
from posthoc_uq.replica import model_device
from posthoc_uq.warned import warn_user

_COMPARED = 256  # positions at which a layer's outputs are compared with the model's


@dataclass(frozen=True)
class TrackedModel:
    """The posterior's layers as the first batch used them.

    Attributes:
        capture: of the posterior's layers, all by intercepted calls, which several threads can use at once.
        last: the layer whose outputs are the model's, if it is one of them.
    """

    capture: Capture
    last: str | None


def track_layers(model: nn.Module, posterior: Posterior, batch: Batch, dtype: torch.dtype) -> TrackedModel:
    """Find the posterior's layers in a pass of the model, and prove that their gradients are layer_gradients.

    Raises:
        PosteriorMismatchError: a layer is used in another way than in the fit.
        UnsupportedLayerError: a layer's gradient cannot be layer_gradients.
    """
    autocast = torch.is_autocast_enabled(model_device(model).type)
    chosen = prepare(
        model, batch, lambda name, _: name in posterior.layers, autocast=autocast
    ).capture.tracked
    for name, tracked in chosen.items():
        if tracked.layer != posterior.layers[name]:
            raise PosteriorMismatchError(
                f"Layer '{name}' is {tracked.layer} in the model, and the posterior was fitted on "
                f"{posterior.layers[name]}."
            )
    unused = [name for name in posterior.layers if name not in chosen]
    if unused:
        warn_user(
            f"The model does not use these layers of the posterior for such inputs, so they add no uncertainty: "
            f"{unused}."
        )
    capture = Capture(model)
    capture.track([replace(tracked, engine="hooks", module=None) for tracked in chosen.values()])
    return TrackedModel(capture, _find_last(capture, batch, dtype, posterior.likelihood))


def _find_last(capture: Capture, batch: Batch, dtype: torch.dtype, likelihood: Likelihood) -> str | None:
    """The layer whose outputs are the model's, or None: the numbers agree, and a gradient reaches it unchanged. Where
    outputs have positions, those of every position are the layer's at that position.
    """
    samples = count_samples(batch)
    batch, samples = batch.narrow(0, min(samples, 2), samples), min(samples, 2)
    recording = capture.run(batch, samples)
    outputs = recording.outputs.detach()
    layout = likelihood.positions_of(outputs)
    with torch.autocast(outputs.device.type, enabled=False):
        for name in reversed(list(capture.tracked)):
            if layout is not None and position_rows(recording, capture, name, dtype, layout) is not None:
                break
            if layout is None and output_layer(recording, capture, name, dtype) is not None:
                break
        else:
            return None
        sent = torch.cos(torch.arange(outputs.numel(), device=outputs.device) + 1.0).reshape(outputs.shape)
        sent = sent.to(outputs)
        arrived: list[bool] = []

        def compare(layer_gradients: LayerGradients) -> None:
            if layer_gradients.layer.name == name:
                gradient = layer_gradients.calls[0].output_gradient
                assert gradient is not None
                rows = sent.flatten() if layout is None else layout.rows(sent).flatten()
                if layout is not None and gradient.numel() == sent.numel():
                    gradient = layer_gradients.operands(dtype)[1]
                arrived.append(
                    gradient.numel() == rows.numel() and torch.allclose(gradient.flatten().to(rows), rows)
                )

        recording.pull_back(sent, compare, last=True)
    return name if arrived == [True] else None


def output_layer(recording: Recording, capture: Capture, name: str, dtype: torch.dtype) -> Tensor | None:
    """The activations ``(samples, n)`` of a layer in this pass if its outputs are the model's, else None.

    That is decided by numbers: ``W a`` is recomputed from the layer's input and compared with the model's outputs.
    """
    calls, tracked = recording.calls.get(name, []), capture.tracked[name]
    outputs, layer = recording.outputs.detach(), tracked.layer
    samples, size = outputs.shape[0], outputs[0].numel()
    if len(calls) != 1 or layer.groups != 1 or layer.outputs != size or tracked.batch_axis != 0:
        return None
    model_outputs = outputs.to(dtype).reshape(samples, size)
    if not layer.convolutional:
        if calls[0].input.numel() != samples * calls[0].input.shape[-1]:
            return None
    elif calls[0].input.shape[0] != samples:
        return None
    call = Call(layer, calls[0].input, calls[0].geometry, model_outputs)
    activations, _ = LayerGradients(layer, [call], samples, tracked.batch_axis).operands(dtype)
    if activations.positions != 1:
        return None
    rows = activations.rows()[:, 0, 0]
    return rows if _gives(layer, capture, rows, model_outputs, recording) else None


def position_rows(
    recording: Recording, capture: Capture, name: str, dtype: torch.dtype, layout: Layout
) -> Tensor | None:
    """The activations ``(samples * positions, n)`` of a layer in this pass if its outputs at every position are the
    model's: of a linear layer, or of a pointwise convolution, on the grid of the outputs. Else None.

    That is decided by numbers, as in `output_layer`, at up to `_COMPARED` positions.
    """
    calls, tracked = recording.calls.get(name, []), capture.tracked[name]
    outputs, layer = recording.outputs.detach(), tracked.layer
    if len(calls) != 1 or layer.groups != 1 or layer.outputs != layout.classes(outputs):
        return None
    if tracked.batch_axis != 0 or any(size != 1 for size in layer.weight_shape[2:]):
        return None
    if grid_of(calls[0]) != layout.positions(outputs) or calls[0].input.shape[0] != outputs.shape[0]:
        return None
    activations = LayerGradients(layer, calls, outputs.shape[0], tracked.batch_axis).activations(dtype)[0]
    if activations.positions != prod(layout.positions(outputs)):
        return None
    rows = activations.rows().flatten(0, 2)
    step = max(1, len(rows) // _COMPARED)
    compared = layout.rows(outputs)[::step].to(dtype)
    return rows if _gives(layer, capture, rows[::step], compared, recording) else None


def _gives(layer: Layer, capture: Capture, rows: Tensor, outputs: Tensor, recording: Recording) -> bool:
    """Whether a layer makes these outputs ``(rows, m)`` of activations ``(rows, n)``."""
    weights = dict(capture.twin.named_parameters())
    bias = None if layer.bias is None else weights[layer.bias]
    matrix = layer.to_matrix(weights[layer.weight], bias)[0].to(rows)
    recomputed = rows @ matrix.T
    # half precision rounds what it multiplies, float32 on a GPU may too
    narrow = torch.finfo(recording.outputs.dtype).eps > 1e-5 or outputs.device.type == "cuda"
    scale = recomputed.abs().amax().clamp(min=torch.finfo(rows.dtype).tiny)
    return bool((recomputed - outputs).abs().amax() <= (2e-2 if narrow else 1e-5) * scale)
