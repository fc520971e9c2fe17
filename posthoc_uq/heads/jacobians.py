"""Output covariances of a linearised model, from backward passes whose gradients are contracted block by block.

``Cov = sum_b J_b Sigma_b J_b^T`` over the posterior's blocks, with J of any functions of the outputs. One backward pass
gives the gradient of one function for every sample, as each layer's activations and output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import PosteriorMismatchError, warn_user
from posthoc_uq.core.model import model_device
from posthoc_uq.core.progress import in_parts, tell
from posthoc_uq.curvature.features import grid_of
from posthoc_uq.layers.capture import Capture, Recording
from posthoc_uq.layers.layer import Call, Layer
from posthoc_uq.layers.operands import Operand
from posthoc_uq.layers.proof import count_samples, prepare
from posthoc_uq.layers.rules import LayerGradients
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.posteriors import Posterior
from posthoc_uq.posteriors.covariance import (
    MIN_SHARE,
    Checked,
    Covariance,
    LayerRows,
    Mode,
    precise_values,
)

Gradient = Callable[[int], Tensor]


@dataclass
class Pulled:
    """One layer's activations, and gradients at its outputs of several functions of the model's outputs.

    Attributes:
        layer: the layer.
        activations: of the batch.
        gradients: by the place of the function, each ``(samples, G, T, m)``.
    """

    layer: Layer
    activations: Operand
    gradients: dict[int, Tensor] = field(default_factory=lambda: dict[int, Tensor]())

    def stacked(self, functions: int) -> Tensor:
        """All gradients, ``(samples, G, functions, m, T)``; zero where none came back."""
        like = next(iter(self.gradients.values()))
        if functions == 1:
            return like.transpose(2, 3).unsqueeze(2)
        gradients = [self.gradients.get(index, torch.zeros_like(like)) for index in range(functions)]
        if like.stride(3) == 1:  # a linear layer's: copied in the order of memory
            return torch.stack(gradients, dim=3).permute(0, 1, 3, 4, 2)
        return torch.stack([gradient.transpose(2, 3) for gradient in gradients], dim=2)

    def rows(self, functions: int) -> LayerRows:
        """As a covariance takes them."""
        return LayerRows(self.activations, self.stacked(functions))

    def part(self, samples: Tensor) -> Pulled:
        """The same for some samples, by their indices."""
        gradients = {place: gradient[samples] for place, gradient in self.gradients.items()}
        return Pulled(self.layer, self.activations.part(samples), gradients)


def pull(
    recording: Recording, gradient: Gradient, numbers: range, dtype: torch.dtype, last: bool
) -> list[Pulled]:
    """Backward passes of functions of the outputs: one entry for every layer that they reach.

    Args:
        recording: the forward pass.
        gradient: gives, by a function's number, its gradient by the outputs, shaped like them.
        numbers: of the functions.
        dtype: of activations and output gradients.
        last: whether these are the last backward passes through this recording.
    """
    layers: dict[str, Pulled] = {}
    for place, number in enumerate(in_parts(numbers)):

        def collect(layer_gradients: LayerGradients, place: int = place) -> None:
            name = layer_gradients.layer.name
            if name in layers:  # the activations are those of the first function
                gradients = layer_gradients.gradients(dtype)
            else:
                activations, gradients = layer_gradients.operands(dtype)
                layers[name] = Pulled(layer_gradients.layer, activations)
            layers[name].gradients[place] = gradients

        recording.pull_back(gradient(number), collect, last=last and place == len(numbers) - 1)
    return list(layers.values())


class WeightCovariance:
    """A posterior's covariance at its present settings, prepared once for Jacobians of many batches.

    Args:
        posterior: the posterior.
        dtype: of activations and output gradients.
        device: of activations and output gradients.
        limit: bytes that one temporary may take.
    """

    def __init__(self, posterior: Posterior, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self._dtype = dtype
        self._layout, self._of_layers = posterior.layout, dict[str, Covariance]()
        self._place = dtype, device, limit
        self._blocks = {name: posterior.covariance(name).prepared(*self._place) for name in posterior.members}
        self._members = {
            name: [posterior.layers[member] for member in members]
            for name, members in posterior.members.items()
        }
        self._home = {layer.name: name for name, layers in self._members.items() for layer in layers}

    def contract(self, pulled: list[Pulled], samples: int, functions: int, mode: Mode) -> Tensor:
        """``J Sigma J^T`` in the shapes of `gram`, in float64. `pulled` is emptied, to free memory."""
        parts: list[Checked] = []
        waiting: dict[str, dict[str, LayerRows]] = {}
        number = len(pulled)
        while pulled:
            layer = pulled.pop()
            block = self._home[layer.layer.name]
            rows = {layer.layer.name: layer.rows(functions)}
            if len(self._members[block]) == 1:
                parts.append(self._blocks[block].contract(self._members[block], rows, mode))
            else:
                waiting[block] = waiting.get(block, {}) | rows
            tell(1 - len(pulled) / number)
        for block, rows in waiting.items():
            parts.append(self._blocks[block].contract(self._members[block], rows, mode))
        if not parts:
            size = (samples, functions, functions) if mode == "covariance" else (samples, functions)
            size = (samples * functions,) * 2 if mode == "joint" else size
            return torch.zeros(size, dtype=torch.float64, device="cpu")
        total, *others = precise_values(parts)
        for part in others:
            total = total.to(part.device) + part
        return total

    def with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """``J_c Sigma J_c^T`` and, under independent weights with variance ``prior[layer]``, ``J_c Sigma_0 J_c^T``,
        ``sum_l prior_l |J_cl|^2``: summed over the functions c, ``(samples,)`` each in float64.

        J is formed once for both. Where the posterior's variance is less than a hundredth of the prior's, too much has
        cancelled for the activations' precision, and those samples are computed again in float64.
        """
        sums = self._with_prior(pulled, samples, functions, prior, False)
        if self._dtype == torch.float64 or not any(block.cancels for block in self._blocks.values()):
            return sums
        posterior_sums, prior_sums = (tensor.to(sums[0].device) for tensor in sums)
        imprecise = (posterior_sums < MIN_SHARE * prior_sums).nonzero().flatten()
        if imprecise.numel() == 0:
            return posterior_sums, prior_sums
        if imprecise.numel() < samples:
            pulled = [layer.part(imprecise) for layer in pulled]
        precise_pair = self._with_prior(pulled, imprecise.numel(), functions, prior, True)
        for total, precise_sums in zip((posterior_sums, prior_sums), precise_pair, strict=True):
            total[imprecise] = precise_sums.to(total)
        return posterior_sums, prior_sums

    def _with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float], double: bool
    ) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(2, samples, dtype=torch.float64, device="cpu")
        for block, layers in self._members.items():
            names = {layer.name for layer in layers}
            rows = {each.layer.name: each for each in pulled if each.layer.name in names}
            if rows:
                of_block = {name: each.rows(functions) for name, each in rows.items()}
                found = torch.stack(self._blocks[block].against_prior(layers, of_block, prior, double))
                sums = sums.to(found.device) + found
        return sums[0], sums[1]

    def of_layer(self, layer: str) -> Covariance:
        """The covariance of one layer's weights, for the layer's own outputs."""
        if layer not in self._of_layers:
            block, start = self._layout.home(layer)
            shape = next(own.matrix_shape for own in self._members[block] if own.name == layer)
            found = self._blocks[block].of_layer(start, shape, self._layout.shape(block))
            self._of_layers[layer] = found.prepared(*self._place)
        return self._of_layers[layer]


# Which of a posterior's layers a model uses, and which of them is its last.

_COMPARED_POSITIONS = 256  # positions at which a layer's outputs are compared with the model's


@dataclass(frozen=True)
class TrackedModel:
    """The posterior's layers as the first batch used them.

    Attributes:
        capture: of the posterior's layers, all by intercepted calls, which several threads can use at once.
        last: the layer whose outputs are the model's, if it is one of them.
    """

    capture: Capture
    last: str | None

    def within(self, rest: nn.Module) -> TrackedModel:
        """The same layers in a model that is the last part of this one, with parameters of the same names."""
        capture = Capture(rest)
        capture.track(list(self.capture.tracked.values()))
        capture.watched = self.capture.watched
        return TrackedModel(capture, self.last)


def track_layers(model: nn.Module, posterior: Posterior, batch: Batch, dtype: torch.dtype) -> TrackedModel:
    """Find the posterior's layers in a pass of the model, and check their caught gradients against autograd.

    Raises:
        PosteriorMismatchError: a layer is used in another way than in the fit.
        UnsupportedLayerError: a layer's caught gradient is not that of autograd.
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
            if output_rows(recording, capture, name, dtype, layout) is not None:
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


def output_rows(
    recording: Recording, capture: Capture, name: str, dtype: torch.dtype, layout: Layout | None
) -> Tensor | None:
    """The activations ``(rows, n)`` of a layer in this pass if its outputs are the model's, with a row for each sample
    or position; else None. That is decided by numbers: ``W a`` is recomputed from the layer's input and compared.
    """
    if layout is None:
        return _sample_rows(recording, capture, name, dtype)
    return _position_rows(recording, capture, name, dtype, layout)


def _sample_rows(recording: Recording, capture: Capture, name: str, dtype: torch.dtype) -> Tensor | None:
    """See `output_rows`."""
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


def _position_rows(
    recording: Recording, capture: Capture, name: str, dtype: torch.dtype, layout: Layout
) -> Tensor | None:
    """See `output_rows`: of a linear layer, or of a pointwise convolution, on the grid of the outputs."""
    calls, tracked = recording.calls.get(name, []), capture.tracked[name]
    outputs, layer = recording.outputs.detach(), tracked.layer
    if len(calls) != 1 or layer.groups != 1 or layer.outputs != layout.classes(outputs):
        return None
    if tracked.batch_axis != 0 or not layer.pointwise:
        return None
    if grid_of(calls[0]) != layout.positions(outputs) or calls[0].input.shape[0] != outputs.shape[0]:
        return None
    activations = LayerGradients(layer, calls, outputs.shape[0], tracked.batch_axis).activations(dtype)[0]
    if activations.positions != prod(layout.positions(outputs)):
        return None
    rows = activations.rows().flatten(0, 2)
    step = max(1, len(rows) // _COMPARED_POSITIONS)
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
