"""The Fisher's statistics by definition: one sample at a time, plain autograd, patches cut out by loops.

Nothing here uses the package; the tests compare it with this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Site = tuple[nn.Module, nn.Module]  # where a weight's input enters and where its output leaves


@dataclass
class Watched:
    """One weight and how to watch it.

    Attributes:
        weight: ``(outputs, inputs / groups, *kernel)``.
        bias: or None.
        sites: the modules whose input and output are the weight's, one pair a use.
        conv: the convolution whose geometry applies, or None for a linear use.
    """

    weight: Tensor
    bias: Tensor | None
    sites: Sequence[Site]
    conv: nn.Module | None = None

    @property
    def groups(self) -> int:
        return self.conv.groups if self.conv is not None else 1


def watch(module: nn.Module) -> Watched:
    """A module that is its own only site."""
    return Watched(
        module.weight, module.bias, [(module, module)], None if isinstance(module, nn.Linear) else module
    )


@dataclass
class PerSample:
    """What every sample and every term of the expectation gives; groups g, positions t.

    Attributes:
        activations: by sample, ``(g, t, n)``.
        output_gradients: by sample and term, ``(g, t, m)``.
        gradients: ``(samples, terms, g, m, n)``, autograd's own.
    """

    activations: list[Tensor]
    output_gradients: list[list[Tensor]]
    gradients: Tensor

    def input_gram(self) -> Tensor:
        return sum(torch.stack([rows.T @ rows for rows in a]) for a in self.activations) / len(
            self.activations
        )

    def gradient_gram(self, weights: Tensor) -> Tensor:
        total, positions = 0.0, 0
        for s, terms in enumerate(self.output_gradients):
            positions += terms[0].shape[1]
            for k, g in enumerate(terms):
                total = total + weights[s, k] * torch.stack([rows.T @ rows for rows in g])
        return total / positions

    def gradient_factors(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """``n E[J^T J] / tr`` and ``E[J J^T] / n`` of the gradients J of samples."""
        samples, size = len(self.activations), self.gradients.shape[-1]
        inputs = torch.einsum("sk,skgmn,skgmp->gnp", weights, self.gradients, self.gradients) / samples
        outputs = torch.einsum("sk,skgmn,skgpn->gmp", weights, self.gradients, self.gradients) / samples
        trace = torch.stack([gram.trace() for gram in inputs])[:, None, None]
        return size * inputs / trace, outputs / size

    def diagonal(self, weights: Tensor) -> Tensor:
        return torch.einsum("sk,skgmn->gmn", weights, self.gradients**2) / len(self.activations)

    def eigenvalues(self, weights: Tensor, input_basis: Tensor, output_basis: Tensor) -> Tensor:
        total = torch.zeros(
            input_basis.shape[0], output_basis.shape[-1], input_basis.shape[-1], dtype=torch.float64
        )
        for s, k, g in product(*(range(size) for size in self.gradients.shape[:3])):
            total[g] += weights[s, k] * (output_basis[g].T @ self.gradients[s, k, g] @ input_basis[g]) ** 2
        return total / len(self.activations)

    def rows(self) -> Tensor:
        return self.gradients.flatten(2)


def patches(x: Tensor, watched: Watched) -> Tensor:
    """``(g, t, n)`` of one sample, cut out one output position at a time."""
    conv = watched.conv
    if conv is None:
        rows = x.reshape(1, -1, x.shape[-1])
        return rows if watched.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)
    kernel, dims = conv.kernel_size, len(conv.kernel_size)
    if conv.padding == "same":
        sides = [
            ((d * (k - 1)) // 2, d * (k - 1) - (d * (k - 1)) // 2)
            for k, d in zip(kernel, conv.dilation, strict=True)
        ]
    elif conv.padding == "valid":
        sides = [(0, 0)] * dims
    else:
        sides = [(p, p) for p in conv.padding]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, [p for side in reversed(sides) for p in side], mode=mode)[0]
    size = [
        (x.shape[1 + i] - conv.dilation[i] * (kernel[i] - 1) - 1) // conv.stride[i] + 1 for i in range(dims)
    ]
    channels = x.shape[0] // conv.groups
    groups = []
    for g in range(conv.groups):
        rows = []
        for position in product(*(range(s) for s in size)):
            window = tuple(
                slice(p * stride, p * stride + d * (k - 1) + 1, d)
                for p, k, stride, d in zip(position, kernel, conv.stride, conv.dilation, strict=True)
            )
            entries = x[(slice(g * channels, (g + 1) * channels), *window)].flatten()
            rows.append(torch.cat([entries, entries.new_ones(1)]) if watched.bias is not None else entries)
        groups.append(torch.stack(rows))
    return torch.stack(groups)


def matrix(watched: Watched, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``(g, m, n)``, the bias in the last column."""
    outputs = weight.shape[0] // watched.groups
    blocks = []
    for g in range(watched.groups):
        part = slice(g * outputs, (g + 1) * outputs)
        block = weight[part].reshape(outputs, -1)
        blocks.append(block if bias is None else torch.cat([block, bias[part].reshape(-1, 1)], dim=1))
    return torch.stack(blocks)


def per_sample(
    model: nn.Module, watched: Watched, inputs: Tensor, losses: Callable[[Tensor, int], Sequence[Tensor]]
) -> PerSample:
    """Run every sample alone and pull every one of its ``losses(outputs, sample)`` back with autograd."""
    activations, output_gradients, gradients = [], [], []
    for s in range(inputs.shape[0]):
        seen_inputs: list[Tensor] = []
        seen_outputs: list[Tensor] = []
        hooks = []
        for inner, outer in dict.fromkeys(watched.sites):
            hooks.append(
                inner.register_forward_pre_hook(
                    lambda _, args, seen=seen_inputs: seen.append(args[0].detach().clone())
                )
            )
            hooks.append(outer.register_forward_hook(lambda _m, _a, out, seen=seen_outputs: seen.append(out)))
        with torch.enable_grad():
            terms = losses(model(inputs[s : s + 1]), s)
        for hook in hooks:
            hook.remove()
        activations.append(torch.cat([patches(x, watched) for x in seen_inputs], dim=1))
        wanted = [watched.weight] + ([] if watched.bias is None else [watched.bias])
        pulled, whole = [], []
        for term in terms:
            found = torch.autograd.grad(term, [*seen_outputs, *wanted], retain_graph=True)
            rows = [_rows(g, watched) for g in found[: len(seen_outputs)]]
            pulled.append(torch.cat(rows, dim=1))
            own = found[len(seen_outputs) :]
            whole.append(matrix(watched, own[0], own[1] if watched.bias is not None else None))
        output_gradients.append(pulled)
        gradients.append(torch.stack(whole))
    return PerSample(activations, output_gradients, torch.stack(gradients).double())


def _rows(gradient: Tensor, watched: Watched) -> Tensor:
    """Output gradients of one use as ``(g, t, m)``."""
    if watched.conv is None:
        return gradient.reshape(1, -1, gradient.shape[-1])
    outputs = watched.weight.shape[0] // watched.groups
    channels = gradient[0].flatten(1)
    return torch.stack([channels[g * outputs : (g + 1) * outputs].T for g in range(watched.groups)])


def class_losses(outputs: Tensor, _: int) -> list[Tensor]:
    """Minus the log probability of every label."""
    logs = torch.log(torch.exp(outputs[0]) / torch.exp(outputs[0]).sum())
    return [-log for log in logs]


def class_probabilities(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        powers = model(inputs).exp()
    return powers / powers.sum(1, keepdim=True)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    return (labels.unsqueeze(1) == torch.arange(classes)).double()
