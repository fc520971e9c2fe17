"""The exact Fisher information of each layer from per-sample gradients, and errors against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap


class Errors(NamedTuple):
    """Normalised Frobenius errors, ``|I - J|_F / |I|_F``, of the diagonals and of what lies beside them."""

    diagonal: float
    off_diagonal: float


def exact_blocks(model: nn.Sequential, inputs: Tensor, noise: float, chunk: int = 2000) -> dict[str, Tensor]:
    """``I = 1/N sum_s J_s J_s^T / noise`` of every layer, with ``J_s`` the gradient of the output at sample s.

    For a Gaussian likelihood of fixed noise that is the Fisher information, the expectation over y in closed form.
    Rows and columns run over the layer's matrix (outputs x inputs, the bias as its last column), row after row.
    """
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, values, (x.unsqueeze(0),)).squeeze()

    per_sample = vmap(grad(output), in_dims=(None, 0))
    layers = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    sums: dict[str, Tensor] = {}
    for part in inputs.split(chunk):
        gradients = per_sample(parameters, part)
        for layer in layers:
            weight, bias = gradients[f"{layer}.weight"], gradients[f"{layer}.bias"]
            rows = torch.cat([weight, bias.unsqueeze(2)], dim=2).flatten(1)
            sums[layer] = sums[layer] + rows.T @ rows if layer in sums else rows.T @ rows
    return {layer: total / (len(inputs) * noise) for layer, total in sums.items()}


def errors(exact: Sequence[Tensor], approximations: Sequence[Tensor]) -> Errors:
    """Over the whole block-diagonal matrix, all layers together."""
    diagonal, off = [0.0, 0.0], [0.0, 0.0]
    for truth, other in zip(exact, approximations, strict=True):
        for index, matrix in enumerate((truth - other, truth)):
            on = float(matrix.diagonal().square().sum())
            diagonal[index] += on
            off[index] += float(matrix.square().sum()) - on
    return Errors((diagonal[0] / diagonal[1]) ** 0.5, (max(off[0], 0.0) / off[1]) ** 0.5)
