"""Jacobians of a model's outputs by its weights, in products with a posterior's covariance.

* ``Cov = sum_b J_b Sigma_b J_b^T`` over the posterior's blocks, with J of any functions of the outputs. One backward
  pass gives the gradient of one function for every sample, as each layer's activations and output gradients
  (`pull_back`), which `WeightCovariance` contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError, warn_user
from posthoc_uq.core.model import model_device
from posthoc_uq.core.progress import report_progress, split_progress
from posthoc_uq.layers.capture import Capture, Recording
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.operands import Operand
from posthoc_uq.layers.proof import Exactly, prepare
from posthoc_uq.layers.rules import LayerGradients
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
NamedWeights = dict[str, Tensor]


@dataclass(frozen=True)
class Pulled:
    """One layer's activations, and gradients at its outputs of several functions of the model's outputs.

    Attributes:
        layer: the layer.
        activations: of the batch.
        gradients: makes all gradients ``(samples, G, functions, m, T)``.
    """

    layer: Layer
    activations: Operand
    gradients: Callable[[], Tensor]

    def part(self, samples: Tensor) -> Pulled:
        """The same for some samples, by their indices."""
        return Pulled(self.layer, self.activations.part(samples), lambda: self.gradients()[samples])


def pull_back(
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
    layers, places = dict[str, Pulled](), dict[str, list[tuple[Tensor, ...]]]()
    for place, number in enumerate(split_progress(numbers)):
        targets, sources = list[Tensor](), list[Tensor]()

        def collect(
            found: LayerGradients,
            place: int = place,
            targets: list[Tensor] = targets,
            sources: list[Tensor] = sources,
        ) -> None:
            name = found.layer.name
            if name not in layers:  # the activations are those of the first function
                room, places[name] = found.room(len(numbers), dtype)
                layers[name] = Pulled(found.layer, found.activations(dtype), partial(found.stacked, room))
            gradients = (call.output_gradient for call in found.calls)
            sources.extend(gradient for gradient in gradients if gradient is not None)
            targets.extend(of_call[place] for of_call in places[name])

        of_outputs, shape = gradient(number), recording.outputs.shape
        if of_outputs.shape != shape:
            of_outputs = of_outputs.reshape(shape)
        recording.pull_back(of_outputs, collect, last=last and place == len(numbers) - 1)
        # at once, so that each function's gradients are freed before the next pass: memory stays in one piece
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return list(layers.values())


class WeightCovariance:
    """A posterior's covariance at its present settings, prepared once for Jacobians of many batches.

    Args:
        posterior: the posterior.
        dtype: of activations and output gradients.
        device: of activations and output gradients.
        limit: bytes that one temporary may take.

    Attributes:
        dtype: see above.
        limit: see above.
    """

    def __init__(self, posterior: Posterior, dtype: torch.dtype, device: torch.device, limit: int) -> None:
        self.dtype, self.limit = dtype, limit
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
            rows = {layer.layer.name: LayerRows(layer.activations, layer.gradients())}
            if len(self._members[block]) == 1:
                parts.append(self._blocks[block].contract(self._members[block], rows, mode))
            else:
                waiting[block] = waiting.get(block, {}) | rows
            report_progress(1 - len(pulled) / number)
        for block, rows in waiting.items():
            parts.append(self._blocks[block].contract(self._members[block], rows, mode))
        if not parts:
            size = (samples, functions, functions) if mode == "covariance" else (samples, functions)
            size = (samples * functions,) * 2 if mode == "joint" else size
            return torch.zeros(size, dtype=torch.float64, device="cpu")
        return precise_values(parts).sum(0)

    def with_prior(
        self, pulled: list[Pulled], samples: int, functions: int, prior: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """``J_c Sigma J_c^T`` and, under independent weights with variance ``prior[layer]``, ``J_c Sigma_0 J_c^T``,
        ``sum_l prior_l |J_cl|^2``: summed over the functions c, ``(samples,)`` each in float64.

        J is formed once for both. Where the posterior's variance is less than a hundredth of the prior's, too much has
        cancelled for the activations' precision, and those samples are computed again in float64.
        """
        sums = self._with_prior(pulled, samples, functions, prior, False)
        if self.dtype == torch.float64 or not any(block.cancels for block in self._blocks.values()):
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
                of_block = {
                    name: LayerRows(each.activations, each.gradients()) for name, each in rows.items()
                }
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


def track_layers(model: nn.Module, posterior: Posterior, batch: Batch) -> Capture:
    """The posterior's layers as the fit proved them, or, of another model or other inputs, as they are found in a pass,
    with their caught gradients checked against autograd: all by intercepted calls, which several threads can use at
    once.

    Raises:
        PosteriorMismatchError: a layer is used in another way than in the fit.
        UnsupportedLayerError: a layer's caught gradient is not that of autograd.
    """
    proof = posterior.proof
    if proof is None or not proof.holds(model, batch):
        autocast = torch.is_autocast_enabled(model_device(model).type)
        proof = prepare(model, batch, Exactly(posterior.layers), autocast=autocast, independent=True).proof
    chosen = proof.tracked
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
    capture.track(
        [replace(t, engine="hooks" if t.engine == "backpack" else t.engine) for t in chosen.values()]
    )
    return capture


def check_shape(outputs: Tensor, samples: int) -> None:
    """Refuse outputs that are not ``(batch,)`` or ``(batch, outputs)``."""
    if outputs.ndim not in (1, 2) or outputs.shape[0] != samples:
        raise PosthocUQError(
            f"The linearised model needs outputs of shape (batch,) or (batch, outputs), and {samples} inputs gave "
            f"{tuple(outputs.shape)}."
        )
