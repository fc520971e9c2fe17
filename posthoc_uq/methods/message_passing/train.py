"""The data of message passing, its priors, and the trainer that counts every example once.

The posterior is ``Q = prior * prod_b G_b`` with one aggregated message a batch. To work on a batch, its old ``G_b`` is
divided out; the messages of its examples begin without information, so that inside of the batch all evidence is new;
and ``Q`` takes the new ``G_b`` in the place of the old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, sqrt
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from posthoc_uq.core import interrupts
from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks, as_double, has_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.features import feature_rows
from posthoc_uq.curvature.sweep import show
from posthoc_uq.layers.capture import Capture, Recording
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.methods.checkpoint import State
from posthoc_uq.methods.contexts import single_input
from posthoc_uq.methods.message_passing.joint import group_message
from posthoc_uq.methods.message_passing.messages import MIN_PRECISION, Signal
from posthoc_uq.methods.message_passing.network import (
    LayerMessage,
    Memory,
    Pass,
    Stage,
    damped_message,
    networks_of,
    product,
    quotient,
    uniform_message,
)
from posthoc_uq.methods.task import Task


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

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: DeferredChecks) -> None:
        """Keep a batch; see `posthoc_uq.curvature.sweep.Observer`."""
        index, outputs = len(self.inputs), recording.outputs.detach()
        if batch.targets is None:
            raise PosthocUQError(
                "method='message_passing' learns from the targets, and the loader gives none; pass a loader of "
                "(inputs, targets)."
            )
        targets = batch.targets
        checks.add(torch.isfinite(outputs).all(), lambda finite: _require(finite, index))
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
            checks.add(fault, lambda faulty: self._refuse(faulty, outputs, targets, index))
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
        informative = inputs.ne(0).any(1)  # without a bias, the output for an input of zeros is known
        if bool(informative.any()):
            inputs, targets = inputs[informative], targets[informative]
    return Examples(inputs, targets, kept.outputs)


class Units:
    """Inputs and values of mean 0 and deviation 1, and messages to weights in these units as those to a last layer's.

    Attributes:
        bias: whether the layer has one, so that means can be subtracted.
        shift: ``(I,)``, subtracted from the inputs.
        spread: ``(I,)``, by which they are divided.
        value_shift: ``(J,)``, subtracted from the targets of a regression.
        value_spread: ``(J,)``, by which they are divided.
        factors: by which weights in these units are multiplied to become those of the layer, ``(J, n)``.
        offset: what is added to them then, ``(J, n)``.
    """

    def __init__(
        self, bias: bool, shift: Tensor, spread: Tensor, value_shift: Tensor, value_spread: Tensor
    ) -> None:
        self.bias, self.shift, self.spread = bias, shift, spread
        self.value_shift, self.value_spread = value_shift, value_spread
        factors = value_spread.unsqueeze(1) / spread
        zero = torch.zeros_like(factors)
        self.factors = torch.cat([factors, value_spread.unsqueeze(1)], 1) if bias else factors
        self.offset = torch.cat([zero, value_shift.unsqueeze(1)], 1) if bias else zero

    @classmethod
    def of(cls, examples: Examples, bias: bool, shift: Tensor | None = None) -> Units:
        """Those of some data.

        Args:
            examples: features and targets.
            bias: of the layer.
            shift: to subtract from the inputs; their means if None.
        """
        total = as_double(examples.inputs.new_zeros(()))
        mean = torch.stack([as_double(part).sum(0) for part in examples.inputs.split(4096)]).sum(0)
        mean = mean / len(examples.inputs) if shift is None else shift.to(total)
        mean = mean if bias else torch.zeros_like(mean)
        squares = [(as_double(part) - mean).square().sum(0) for part in examples.inputs.split(4096)]
        variance = torch.stack(squares).sum(0) / len(examples.inputs)
        usual = variance.mean().clamp(min=1e-30)
        spread = variance.clamp(min=1e-6 * usual).sqrt()  # an input that never changes divides nothing by 0
        center, scale = total.new_zeros(examples.outputs), total.new_ones(examples.outputs)
        if examples.targets.is_floating_point():
            center = examples.targets.mean(0) if bias else center
            width = (examples.targets - center).square().mean(0).sqrt()
            scale = torch.where(width > 0, width, torch.ones_like(width))
        return cls(bias, mean, spread, center, scale)

    def inputs(self, rows: Tensor) -> Tensor:
        """In these units, in float64."""
        return (as_double(rows) - self.shift) / self.spread

    def rows(self, rows: Tensor) -> Tensor:
        """Inputs in these units, with a 1 for the bias, ``(N, n)``."""
        rows = self.inputs(rows)
        return torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if self.bias else rows

    def targets(self, targets: Tensor) -> Tensor:
        """In these units; labels stay."""
        return (targets - self.value_shift) / self.value_spread if targets.is_floating_point() else targets

    def of_layer(self, field: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        """Field and precision of the layer's weights from those in these units: ``(J, n)``, the precision ``(J, n,
        n)`` where the weights of an output correlate.
        """
        factors, offset = self.factors, self.offset
        if precision.ndim == 3:
            precision = precision / (factors.unsqueeze(2) * factors.unsqueeze(1))
            return field / factors + torch.einsum("jab,jb->ja", precision, offset), precision
        precision = precision / factors.square()
        return field / factors + precision * offset, precision


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


# Priors over the weights of a layer: the size of the drawn means, and variances that keep the size of activations. The
# constants are moments of a LeakyReLU with the slope 0.1 of ``z ~ N(mu, 2)``, ``mu ~ N(0, 1)``: the mean variance of
# its output, and what the paper takes for its mean square, ``s^2 (1 + m^2)``.

OUTPUT_VARIANCE = 0.8040586726631379
OUTPUT_SQUARE = 0.44958619556324186
SUM_VARIANCE = 1.5  # of the sums in a layer
BIAS_VARIANCE = 0.5


def mean_deviation(inputs: int, outputs: int) -> float:
    """``l``, the standard deviation of the drawn means (a spectral parametrisation)."""
    return min(1.0, sqrt(outputs / inputs)) / sqrt(inputs)


def weight_variance(inputs: int, outputs: int, *, first: bool = False) -> float:
    """The prior variance of a weight.

    Args:
        inputs: of the layer; of a convolution, those of a patch.
        outputs: of the layer; of a convolution, with all its positions.
        first: whether the inputs are constants.
    """
    if first:
        return SUM_VARIANCE / inputs
    above = SUM_VARIANCE - OUTPUT_VARIANCE * min(1.0, outputs / inputs)
    return above / (OUTPUT_VARIANCE + OUTPUT_SQUARE * inputs)


def drawn_means(
    shape: tuple[int, ...], inputs: int, outputs: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Prior means of weights, drawn once, in float64. With all means 0 hidden units would stay alike for ever."""
    normals = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (normals * mean_deviation(inputs, outputs)).to(device)


# The trainer

Data = Sequence[tuple[Tensor, Tensor]]
"""Batches: inputs ``(N, ...)`` in float64 and targets."""
ByStage = dict[int, LayerMessage]
"""By the place of the stage in the network."""

_MAX_GROWTH = 10.0  # times the error at the start, from which on messages diverge
_MAX_RETRIES = 4  # of a visit whose messages diverge, each with half of the share of a new message


class Diverged(Exception):
    """The messages of a visit diverge; the text says how."""


def batch_damping(epoch: int) -> float:
    """The share of a batch's new message in epoch 1, 2, ...: from 1 down to 0.9."""
    return 0.9 + 0.1 * exp(-0.3 * (epoch - 1))


@dataclass
class Trainer:
    """Trains K networks that share the data.

    Attributes:
        stages: of the network.
        prior: of its weights, by stage.
        data: the batches.
        signal: of the targets.
        epochs: visits of every batch.
        iterations: in a visit; None for ``ceil(epoch / 2)``.
        grouped: make the messages of a batch together, for a network of one linear layer (`group_message`); else one
            example after the other.
        seed: of all orders.
        evidence: the aggregated message of every batch, ``G_b``; in a single epoch nothing divides it out again, and
            it is not kept.
        posterior: ``Q``.
        share: of a new message to a weight at present.
        restarts: visits that began anew.
        epoch: epochs that are finished.
        left: batches that are still to be visited in the present epoch, in their order; None before it begins.
    """

    stages: Sequence[Stage]
    prior: ByStage
    data: Data
    signal: Signal
    epochs: int = 1
    iterations: int | None = None
    grouped: bool = False
    seed: int = 0
    evidence: list[ByStage] = field(init=False)
    posterior: ByStage = field(init=False)
    share: float = field(init=False, default=1.0)
    restarts: int = field(init=False, default=0)
    epoch: int = field(init=False, default=0)
    left: list[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        empty = {index: uniform_message(like) for index, like in self.prior.items()}
        self.evidence = [empty for _ in self.data]
        self.posterior = self.prior
        self._generator = torch.Generator().manual_seed(self.seed)
        self._start: Tensor | None = None  # the error of an example under the prior, (K,)

    def run(self, after_visit: Callable[[], None] | None = None) -> ByStage:
        """The posterior after all epochs.

        Args:
            after_visit: called after every batch.

        Raises:
            PosthocUQError: messages diverge, with any damping.
        """
        while self.epoch < self.epochs:
            if self.left is None:
                order = torch.randperm(len(self.data), generator=self._generator, device="cpu")
                self.left = cast("list[int]", order.tolist())
            while self.left:
                self.visit(self.left[0], self.epoch + 1)
                self.left = self.left[1:]
                if after_visit is not None:
                    after_visit()
            if self.epochs > 1:
                self.posterior = self.assembled()
            self.epoch, self.left = self.epoch + 1, None
        return self.posterior

    def state_dict(self) -> State:
        """All that the training goes on from after a visit."""
        return {
            "epoch": self.epoch,
            "left": self.left,
            "share": self.share,
            "restarts": self.restarts,
            "start": self._start,
            "generator": self._generator.get_state(),
            "posterior": tree_leaves(self.posterior),
            "evidence": tree_leaves(self.evidence) if self.epochs > 1 else [],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there.

        Raises:
            ValueError: the state is that of another network or other batches.
        """
        self.epoch, self.left = state["epoch"], state["left"]
        self.share, self.restarts = state["share"], state["restarts"]
        device = min(self.prior.items())[1].weights.rho.device
        self._start = None if state["start"] is None else state["start"].to(device)
        self._generator.set_state(state["generator"])
        self.posterior = _restored(self.posterior, state["posterior"])
        if self.epochs > 1:
            self.evidence = _restored(self.evidence, state["evidence"])

    def assembled(self) -> ByStage:
        """The prior times the aggregated messages of all batches."""
        total = self.prior
        for message in self.evidence:
            total = {index: product(total[index], message[index]) for index in total}
        return total

    def visit(self, place: int, epoch: int) -> None:
        """Work on one batch, and put its new message in the place of the old one.

        Raises:
            PosthocUQError: messages diverge, with any damping.
        """
        interrupts.check()
        old = self.evidence[place]
        cavity = {index: quotient(self.posterior[index], old[index]) for index in old}
        inputs, targets = self.data[place]
        order = torch.randperm(len(targets), generator=self._generator, device="cpu").to(inputs.device)
        iterations = ceil(epoch / 2) if self.iterations is None else self.iterations
        new = self._batch_message(inputs[order], targets[order], cavity, iterations)
        share = batch_damping(epoch)
        message = {index: damped_message(old[index], new[index], share) for index in old}
        if self.epochs > 1:
            self.evidence[place] = message
        self.posterior = {index: product(cavity[index], message[index]) for index in old}

    def _batch_message(self, inputs: Tensor, targets: Tensor, prior: ByStage, iterations: int) -> ByStage:
        if self.grouped:
            (index,) = prior
            message = group_message(inputs, targets, prior[index], self.signal, iterations)
            if not all(bool(part.finite.all()) for part in message):
                raise NonFiniteError(
                    "The messages to the weights are not finite; bring the inputs to about unit size."
                )
            return {index: message}
        why: Exception = Diverged("no visit was made")
        for _ in range(_MAX_RETRIES + 1):
            try:
                return self._one_by_one(inputs, targets, prior, iterations)
            except Diverged as reason:
                why = reason
                self.share, self.restarts = self.share / 2, self.restarts + 1
        raise PosthocUQError(
            f"The messages diverge: {why}, with {2 * self.share:.3g} as the share of a new message. Standardise the "
            f"inputs, or take layers='last'."
        )

    def _one_by_one(self, inputs: Tensor, targets: Tensor, prior: ByStage, iterations: int) -> ByStage:
        """The message of a batch to all weights, under the cavity without it.

        Raises:
            Diverged: numbers are not finite, a precision vanishes or the error grows tenfold.
        """
        networks = networks_of(self.stages, prior)
        examples = [
            (x.unsqueeze(0).expand(networks, *x.shape), y, Memory())
            for x, y in zip(inputs.split(1), targets.split(1), strict=True)
        ]
        if self._start is None:
            outputs = [(Pass(self.stages, prior, Memory()).forward(x), y) for x, y, _ in examples]
            self._start = torch.stack([self.signal.error(*each) for each in outputs]).sum(0) / len(targets)
        marginals, message = prior, {index: uniform_message(like) for index, like in prior.items()}
        for _ in range(iterations):
            seen: list[tuple[Tensor, Tensor]] = []
            for x, y, memory in examples:
                marginals, error, least = self._example(x, y, memory, marginals)
                seen.append((error, least))
            self._check(seen, targets)
            message = {index: uniform_message(part) for index, part in prior.items()}
            for _, _, memory in examples:
                message = {index: product(message[index], part) for index, part in memory.weights.items()}
            marginals = {index: product(prior[index], message[index]) for index in prior}
        return message

    def _example(
        self, inputs: Tensor, targets: Tensor, memory: Memory, marginals: ByStage
    ) -> tuple[ByStage, Tensor, Tensor]:
        """One example forward and back: the new marginals, its error, and the least precision of a cavity."""
        one = Pass(self.stages, marginals, memory)
        outputs = one.forward(inputs)
        error, message = self.signal.error(outputs, targets), self.signal.message(outputs, targets)
        new = dict(marginals)
        for index in reversed(range(len(self.stages))):
            before, to_weights = one.backward(index, message)
            if to_weights is not None:
                old = memory.weights.get(index, uniform_message(to_weights))
                memory.weights[index] = damped_message(old, to_weights, self.share)
                new[index] = quotient(product(new[index], memory.weights[index]), old)
            if before is None:
                break
            message = before
        assert one.least_precision is not None
        return new, error, one.least_precision

    def _check(self, seen: list[tuple[Tensor, Tensor]], targets: Tensor) -> None:
        """Compare the error with that under the prior, and the least precision of a cavity with 1e-8."""
        error = torch.stack([each for each, _ in seen]).sum(0) / len(targets)
        if not bool(torch.isfinite(error).all()):
            raise Diverged("outputs are not finite")
        assert self._start is not None
        start = self._start.clamp(min=self.signal.uninformed_error(targets))
        if bool((error > _MAX_GROWTH * start).any()):
            raise Diverged(f"the error grew from {float(start.max()):.3g} to {float(error.max()):.3g}")
        least = float(torch.stack([each for _, each in seen]).min())
        if not least >= MIN_PRECISION:
            raise Diverged(f"a cavity has the precision {least:.3g}")


def _restored(like: Any, saved: list[Tensor]) -> Any:
    """Saved tensors in the form of `like`, in the order in memory that they had."""
    present, form = tree_flatten(like)
    if [(t.shape, t.dtype) for t in present] != [(t.shape, t.dtype) for t in saved]:
        raise ValueError("it has messages of other shapes")
    return tree_unflatten([t.to(like.device) for t, like in zip(saved, present, strict=True)], form)
