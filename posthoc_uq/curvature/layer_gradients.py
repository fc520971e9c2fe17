"""A layer's activations and output gradients in one backward pass, as operands of the statistics."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.curvature.operands import Operand, Rows, Several
from posthoc_uq.curvature.patches import Patches
from posthoc_uq.errors import UnsupportedLayerError
from posthoc_uq.layers import INTERLEAVED, Call, Layer


@dataclass
class LayerGradients:
    """All uses of one layer in one backward pass."""

    layer: Layer
    calls: list[Call]
    samples: int
    batch_axis: int

    def operands(self, dtype: torch.dtype) -> tuple[Operand, Tensor]:
        """Activations, and output gradients ``(samples, groups, positions, outputs)``, in `dtype`.

        Further calls of a layer count as further positions: their weight gradients add up within a sample.

        Raises:
            UnsupportedLayerError: the samples cannot be told apart in the layer's input.
        """
        activations = self.activations(dtype)
        return activations[0] if len(activations) == 1 else Several(activations), self.gradients(dtype)

    def gradients(self, dtype: torch.dtype) -> Tensor:
        """The output gradients of `operands` alone.

        Raises:
            UnsupportedLayerError: the calls do not fit together.
        """
        gradients = [self._gradients(call, dtype) for call in self.calls]
        if len(gradients) == 1:
            return gradients[0]
        if any(g.shape[1::2] != gradients[0].shape[1::2] for g in gradients):
            raise UnsupportedLayerError(
                f"Layer '{self.layer.name}' uses its weight both as it is and transposed."
            )
        return torch.cat(gradients, dim=2)

    def activations(self, dtype: torch.dtype) -> list[Operand]:
        """Activations in `dtype`, one operand a call.

        Raises:
            UnsupportedLayerError: the samples cannot be told apart in the layer's input.
        """
        return [self._activations(call, dtype) for call in self.calls]

    def norm_bound(self) -> float:
        """An upper bound of the norm of all activations: an input is in at most ``prod(kernel)`` patches."""
        kernel = prod(self.layer.weight_shape[2:])
        squares = [
            kernel * float(torch.linalg.vector_norm(call.input.detach().float())) ** 2 for call in self.calls
        ]
        ones = sum(
            g.numel() // self.layer.outputs for call in self.calls if (g := call.output_gradient) is not None
        )
        return (sum(squares) + ones * (self.layer.bias is not None)) ** 0.5

    def _activations(self, call: Call, dtype: torch.dtype) -> Operand:
        layer, x = call.layer, call.input.detach()
        if not layer.convolutional:
            rows = self._rows(x).to(dtype)
            return Rows((F.pad(rows, (0, 1), value=1.0) if layer.bias is not None else rows).unsqueeze(1))
        if x.shape[0] != self.samples:
            raise UnsupportedLayerError(
                f"Layer '{layer.name}' got an input of shape {tuple(x.shape)} for a batch of {self.samples} "
                f"samples; leave it out with layers=... or unsupported='skip'."
            )
        x, padding = x.to(dtype), call.geometry.padding
        pointwise = all(size == 1 for size in layer.weight_shape[2:])
        if not pointwise or not (isinstance(padding, str) or not any(padding)):
            return Patches(x, layer, call.geometry)
        for axis, stride in enumerate(call.geometry.stride):
            if stride > 1:
                x = x[(slice(None),) * (axis + 2) + (slice(None, None, stride),)]
        columns = x.reshape(self.samples, layer.groups, x.shape[1] // layer.groups, -1)
        if layer.bias is not None:
            ones = columns.new_ones(1, 1, 1, 1).expand(*columns.shape[:2], 1, columns.shape[3])
            columns = torch.cat((columns, ones), 2)
        return Rows(columns.transpose(2, 3))

    def _gradients(self, call: Call, dtype: torch.dtype) -> Tensor:
        layer, gradient = call.layer, call.output_gradient
        assert gradient is not None
        gradient = gradient.detach().to(dtype)
        if not layer.convolutional:
            return self._rows(gradient).unsqueeze(1)
        return gradient.reshape(self.samples, layer.groups, layer.outputs, -1).transpose(2, 3)

    def _rows(self, tensor: Tensor) -> Tensor:
        """A linear layer's ``(..., features)`` tensor as ``(samples, positions, features)``."""
        features, axis, samples = tensor.shape[-1], self.batch_axis, self.samples
        if (
            tensor.ndim > 1
            and axis in (0, INTERLEAVED)
            and tensor.shape[0]
            and tensor.shape[0] % samples == 0
        ):
            if axis == 0:
                return tensor.reshape(samples, -1, features)
            return tensor.reshape(-1, samples, *tensor.shape[1:]).movedim(1, 0).reshape(samples, -1, features)
        if 0 < axis < tensor.ndim - 1 and tensor.shape[axis] == samples:
            return tensor.movedim(axis, 0).reshape(samples, -1, features)
        raise UnsupportedLayerError(
            f"Layer '{self.layer.name}' got an input of shape {tuple(tensor.shape)}, in which the {samples} "
            f"samples of the batch cannot be told apart; leave it out with layers=... or unsupported='skip'."
        )
