"""The data of message passing: one pass over the loader that keeps what enters the layers, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posthoc_uq.contexts.base import single_input
from posthoc_uq.curvature.capture import Capture, Recording
from posthoc_uq.curvature.features import feature_rows
from posthoc_uq.curvature.sweep import show
from posthoc_uq.devices import Checks, as_double, has_double, host_double
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Batch
from posthoc_uq.randomness import isolated_random_state


class Examples(NamedTuple):
    """All data.

    Attributes:
        inputs: features ``(N, I)`` without the bias's 1, or the model's inputs ``(N, ...)``.
        targets: values ``(N, J)`` in float64, or labels ``(N,)``.
        outputs: numbers that the model gives for a sample.
    """

    inputs: Tensor
    targets: Tensor
    outputs: int


class _Kept:
    """Watches a pass and keeps inputs and targets."""

    def __init__(self, likelihood: Likelihood, layer: Layer | None) -> None:
        self._likelihood, self._layer = likelihood, layer
        self.inputs: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.outputs = 0

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: Checks) -> None:
        """Keep a batch; see `posthoc_uq.curvature.sweep.Observer`."""
        index, outputs = len(self.inputs), recording.outputs.detach()
        if batch.targets is None:
            raise PosthocUQError(
                "method='message_passing' learns from the targets, and the loader gives none; pass a loader of "
                "(inputs, targets)."
            )
        targets = batch.targets
        checks.later(torch.isfinite(outputs).all(), lambda finite: _require(finite, index))
        try:
            fault = self._likelihood.fault(outputs, targets)
        except PosthocUQError as error:
            raise PosthocUQError(f"Batch {index}: {error}") from None
        if self._likelihood.softmax and targets.is_floating_point():
            raise PosthocUQError(
                f"method='message_passing' learns from labels that are class indices, and batch {index} has soft ones "
                f"of shape {tuple(targets.shape)}; take a Laplace method for them."
            )
        if fault is not None:
            checks.later(fault, lambda faulty: self._refuse(faulty, outputs, targets, index))
        samples, layer = keys.shape[0], self._layer
        if layer is None:
            rows = single_input(batch).detach().clone()
        else:
            rows = feature_rows(recording.watched, layer, samples)
            rows = rows if layer.bias is None else rows[:, :-1]
        self.outputs = outputs[0].numel()
        self.inputs.append(rows)
        self.targets.append(targets.detach().reshape(samples, -1))

    def _refuse(self, faulty: Tensor, outputs: Tensor, targets: Tensor, index: int) -> None:
        if bool(faulty):
            try:
                self._likelihood.check(outputs, targets)
            except PosthocUQError as error:
                raise PosthocUQError(f"Batch {index}: {error}") from None


def _require(finite: Tensor, index: int) -> None:
    if not bool(finite):
        raise NonFiniteError(
            f"Batch {index}: the model's outputs are not finite. Check the input data and the model's weights for NaN "
            f"or infinity."
        )


def examples_of(task: Task, layer: Layer | None) -> Examples:
    """All data of a fit, by one pass.

    Args:
        task: the fit.
        layer: whose inputs are kept; None for those of the model.

    Raises:
        PosthocUQError: there are no targets, or they do not fit the outputs.
        NonFiniteError: outputs are not finite.
    """
    settings, kept = task.settings, _Kept(task.settings.likelihood, layer)
    capture = Capture(task.model)
    capture.watched = layer
    with isolated_random_state(settings.seed):
        show(capture, task.loader, settings, [kept])
    targets = torch.cat(kept.targets)
    if settings.likelihood.noise_variance is None:
        targets = targets[:, 0].long()
    else:
        targets = as_double(targets)
    inputs = torch.cat(kept.inputs)
    if not has_double(inputs.device):  # all messages are in float64, and where they are their data must be
        inputs = inputs.cpu()
    targets = targets.to(inputs.device)
    if layer is not None and layer.bias is None:
        speaking = inputs.ne(0).any(1)  # without a bias, the output for an input of zeros is known
        if bool(speaking.any()):
            inputs, targets = inputs[speaking], targets[speaking]
    return Examples(inputs, targets, kept.outputs)


class Units:
    """Inputs and values of mean 0 and deviation 1, and messages to weights in these units as those to the weights.

    Attributes:
        shift: ``(I,)``, subtracted from the inputs.
        spread: ``(I,)``, by which they are divided.
        value_shift: ``(J,)``, subtracted from the targets of a regression.
        value_spread: ``(J,)``, by which they are divided.
    """

    def __init__(self, shift: Tensor, spread: Tensor, value_shift: Tensor, value_spread: Tensor) -> None:
        self.shift, self.spread = shift, spread
        self.value_shift, self.value_spread = value_shift, value_spread

    @classmethod
    def of(cls, examples: Examples, bias: bool, shift: Tensor | None = None) -> Units:
        """Those of some data.

        Args:
            examples: features and targets.
            bias: whether the layer has one, so that means can be subtracted.
            shift: to subtract from the inputs; their means if None.
        """
        total = as_double(examples.inputs.new_zeros(()))
        mean = torch.stack([as_double(part).sum(0) for part in examples.inputs.split(4096)]).sum(0)
        mean = mean / len(examples.inputs) if shift is None else shift.to(total)
        mean = mean if bias else torch.zeros_like(mean)
        squares = [(as_double(part) - mean).square().sum(0) for part in examples.inputs.split(4096)]
        variance = torch.stack(squares).sum(0) / len(examples.inputs)
        usual = variance.mean().clamp(min=1e-30)
        spread = variance.clamp(
            min=1e-6 * usual
        ).sqrt()  # an input that never changes is no reason for a division by 0
        center, scale = total.new_zeros(examples.outputs), total.new_ones(examples.outputs)
        if examples.targets.is_floating_point():
            center = examples.targets.mean(0) if bias else center
            width = (examples.targets - center).square().mean(0).sqrt()
            scale = torch.where(width > 0, width, torch.ones_like(width))
        return cls(mean, spread, center, scale)

    def inputs(self, rows: Tensor) -> Tensor:
        """In these units, in float64."""
        return (as_double(rows) - self.shift) / self.spread

    def targets(self, targets: Tensor) -> Tensor:
        """In these units; labels stay."""
        return (targets - self.value_shift) / self.value_spread if targets.is_floating_point() else targets

    def factors(self, bias: bool) -> Tensor:
        """By which weights in these units are multiplied to become those of the layer, ``(J, n)``."""
        own = self.value_spread.unsqueeze(1) / self.spread
        return torch.cat([own, self.value_spread.unsqueeze(1)], 1) if bias else own

    def offset(self, bias: bool) -> Tensor:
        """What is added to them then, ``(J, n)``."""
        zero = torch.zeros_like(self.factors(False))
        return torch.cat([zero, self.value_shift.unsqueeze(1)], 1) if bias else zero


class Batches(Sequence[tuple[Tensor, Tensor]]):
    """Examples in a random order as batches, each in float64 when it is asked for.

    Args:
        examples: the data.
        units: of the batches, or None to leave them as they are.
        size: of a batch.
        seed: of the order.
    """

    def __init__(self, examples: Examples, units: Units | None, size: int, seed: int) -> None:
        self._examples, self._units = examples, units
        generator = torch.Generator().manual_seed(seed % 2**63)
        order = torch.randperm(len(examples.inputs), generator=generator, device="cpu")
        self._parts = order.to(examples.inputs.device).split(size)

    @property
    def samples(self) -> int:
        """In all batches."""
        return len(self._examples.inputs)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = self._parts[index]
        inputs, targets = self._examples.inputs[part], self._examples.targets[part]
        if self._units is None:
            return as_double(inputs), targets
        return self._units.inputs(inputs), self._units.targets(targets)


def noise_of(likelihood: Likelihood, units: Units | None) -> Tensor:
    """The noise variance of a regression, ``(J,)`` or one number, in these units."""
    assert likelihood.noise_variance is not None
    noise = host_double(likelihood.noise_variance)
    return noise if units is None else noise.to(units.value_spread) / units.value_spread.square()
