"""Which of a posterior's layers a model uses, and which of them is its last."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.capture import Capture, Recording
from posthoc_uq.curvature.dryrun import count_samples, prepare
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.errors import PosteriorMismatchError
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.replica import model_device
from posthoc_uq.warned import warn_user


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
    return TrackedModel(capture, _find_last(capture, batch, dtype))


def _find_last(capture: Capture, batch: Batch, dtype: torch.dtype) -> str | None:
    """The layer whose outputs are the model's, or None: the numbers agree, and a gradient reaches it unchanged."""
    samples = count_samples(batch)
    batch, samples = batch.narrow(0, min(samples, 2), samples), min(samples, 2)
    recording = capture.run(batch, samples)
    outputs = recording.outputs.detach()
    with torch.autocast(outputs.device.type, enabled=False):
        for name in reversed(list(capture.tracked)):
            if output_layer(recording, capture, name, dtype) is not None:
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
                same = gradient.numel() == sent.numel()
                arrived.append(same and torch.allclose(gradient.reshape(sent.shape).to(sent), sent))

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
    weights = dict(capture.twin.named_parameters())
    bias = None if layer.bias is None else weights[layer.bias]
    matrix = layer.to_matrix(weights[layer.weight], bias)[0].to(dtype)
    recomputed = rows @ matrix.T
    # half precision rounds what it multiplies, float32 on a GPU may too
    narrow = torch.finfo(recording.outputs.dtype).eps > 1e-5 or outputs.device.type == "cuda"
    scale = recomputed.abs().amax().clamp(min=torch.finfo(dtype).tiny)
    same = (recomputed - model_outputs).abs().amax() <= (2e-2 if narrow else 1e-5) * scale
    return rows if bool(same) else None
