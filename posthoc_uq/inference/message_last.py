"""Message passing to a last linear layer, over the inputs that the trained network gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.message_data import Batches, Examples, Units
from posthoc_uq.inference.message_grams import gram_of, in_units, settled_means
from posthoc_uq.inference.message_network import (
    folded_parameters,
)
from posthoc_uq.inference.message_options import FULL, PRETRAINED, MessagePassingOptions
from posthoc_uq.inference.message_shared import PRIOR, order_seed, signal_of, trained, visits
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing import joint, priors
from posthoc_uq.message_passing.gaussian import Message
from posthoc_uq.message_passing.network import Belief, Stage, Weighted, quotient
from posthoc_uq.message_passing.targets import Regression, Signal
from posthoc_uq.posteriors.dense import LARGEST_BYTES
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock
from posthoc_uq.randomness import mixed_seed


def last_blocks(
    task: Task,
    options: MessagePassingOptions,
    prior_precision: float | None,
    layer: Layer,
    examples: Examples,
) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
    bias = layer.bias is not None
    units = Units.of(examples, bias)
    prior = _prior_of_last(task, options, prior_precision, layer, units)
    signal = signal_of(task, options, units)
    if options.posterior == FULL:
        told = _told_jointly(task, layer, units, examples, signal, prior)
        return {layer.name: joint_block(task, layer, units, prior, told, len(examples.inputs))}, {}
    stages: list[Stage] = [Weighted(layer.name, layer.inputs - bias, layer.outputs, bias=bias)]
    belief = as_belief(*prior, bias)
    size = options.group_size if options.grouped else options.batch_size
    data = Batches(examples, units, size, order_seed(task))
    trainer = trained(task, options, stages, {0: belief}, data, signal)
    said = as_matrix(quotient(trainer.posterior[0], belief), bias)
    gram = gram_of(examples.inputs, units.shift, bias)
    if isinstance(signal, Regression) and gram is not None:
        rows, targets = joint_rows(layer, units, examples), units.targets(examples.targets)
        said = settled_means(prior, in_units(gram, units), rows, targets, said, signal)
    block = diagonal_block(task, layer, units, prior, said, len(examples.inputs))
    block.gram = gram
    return {layer.name: block}, visits(trainer)


def as_matrix(belief: Belief, bias: bool) -> Message:
    """Messages ``(1, I, J)`` and ``(1, J)`` as ``(J, n)``, the inverse of `as_belief` in natural parameters."""
    parts = (
        torch.cat([w[0].T, b[0].unsqueeze(1)], 1) if bias else w[0].T
        for w, b in zip(belief.weights, belief.bias, strict=True)
    )
    return Message(*parts)


def as_belief(mean: Tensor, precision: Tensor, bias: bool) -> Belief:
    """A prior ``(J, n)`` as messages to ``(1, I, J)`` and ``(1, J)``."""
    field, split = mean * precision, mean.shape[1] - bias
    weights = Message(*(part[:, :split].T.unsqueeze(0).contiguous() for part in (field, precision)))
    own = Message(*(part[:, split:].T.reshape(1, -1).contiguous() for part in (field, precision)))
    return Belief(weights, own)


def _prior_of_last(
    task: Task, options: MessagePassingOptions, prior_precision: float | None, layer: Layer, units: Units
) -> tuple[Tensor, Tensor]:
    """Means and precisions ``(J, n)`` in the units of the data, of the weights with the moved bias."""
    bias = layer.bias is not None
    factors, inputs = units.factors(bias), layer.inputs - bias
    mean = torch.zeros_like(factors)
    variance = torch.full_like(factors, priors.weight_variance(inputs, layer.outputs, first=True))
    if bias:
        variance[:, -1] = priors.BIAS_VARIANCE
    if options.means == "spectral":
        generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, PRIOR) % 2**63)
        drawn = priors.drawn_means((inputs, layer.outputs), inputs, layer.outputs, generator, mean.device)
        mean[:, :inputs] = drawn.T
    elif options.means == PRETRAINED:
        parameters = dict(task.model.named_parameters())
        weights, own = folded_parameters(layer, None, parameters)
        trained = weights[0].T
        if own is not None:
            trained = torch.cat([trained, (own[0] + trained @ units.shift).unsqueeze(1)], 1)
        mean = (trained.to(factors) - units.offset(bias)) / factors
        variance = options.prior_factor * variance
    precision = variance.reciprocal()
    if prior_precision is not None:
        precision = prior_precision * factors.square()
    return mean, precision


def _told_jointly(
    task: Task,
    layer: Layer,
    units: Units,
    examples: Examples,
    signal: Signal,
    prior: tuple[Tensor, Tensor],
) -> joint.Joint:
    """What all targets say of the weights, in the units of the data."""
    _check_size(layer)
    rows = joint_rows(layer, units, examples)
    return joint.fit_sites(rows, units.targets(examples.targets), signal, joint.independent(*prior))[1]


def _check_size(layer: Layer) -> None:
    size = 16 * layer.outputs * layer.inputs**2
    if size > LARGEST_BYTES:
        raise PosthocUQError(
            f"posterior='full' of '{layer.name}' takes {size / 2**30:.1f} GiB ({layer.outputs} outputs, {layer.inputs} "
            f"inputs), more than {LARGEST_BYTES / 2**30:.0f}; take posterior='diagonal'."
        )


def joint_rows(layer: Layer, units: Units, examples: Examples) -> Tensor:
    """Features ``(N, n)`` in the units of the data, with a 1 for the bias."""
    rows = units.inputs(examples.inputs)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if layer.bias is not None else rows


def joint_block(
    task: Task, layer: Layer, units: Units, prior: tuple[Tensor, Tensor], told: joint.Joint, samples: int
) -> JointMessagesBlock:
    """A block of the layer's weights from a prior and evidence in the units of the data."""
    bias = layer.bias is not None
    said = joint_evidence(units, told, bias)
    return _block(task, JointMessagesBlock, units, prior, said, samples, bias)


def joint_evidence(units: Units, told: joint.Joint, bias: bool) -> tuple[Tensor, Tensor]:
    """Field ``(J, n)`` and precision ``(J, n, n)`` of the layer's weights, from those in the units of the data."""
    factors, offset = units.factors(bias), units.offset(bias)
    precision = told.precision / (factors.unsqueeze(2) * factors.unsqueeze(1))
    return told.field / factors + torch.einsum("jab,jb->ja", precision, offset), precision


def diagonal_block(
    task: Task, layer: Layer, units: Units, prior: tuple[Tensor, Tensor], told: Message, samples: int
) -> MessagesBlock:
    """The same for independent weights."""
    bias = layer.bias is not None
    said = diagonal_evidence(units, told, bias)
    return _block(task, MessagesBlock, units, prior, said, samples, bias)


def diagonal_evidence(units: Units, told: Message, bias: bool) -> tuple[Tensor, Tensor]:
    """Field and precision ``(J, n)`` of the layer's weights, from those in the units of the data."""
    factors, offset = units.factors(bias), units.offset(bias)
    precision = told.rho / factors.square()
    return told.tau / factors + precision * offset, precision


def _block(
    task: Task,
    kind: type[Any],
    units: Units,
    prior: tuple[Tensor, Tensor],
    told: tuple[Tensor, Tensor],
    samples: int,
    bias: bool,
) -> Any:
    factors, offset = units.factors(bias), units.offset(bias)
    zero = torch.zeros_like(units.shift[:1])
    shift = torch.cat([units.shift, zero]) if bias else units.shift
    mean, precision = prior[0] * factors + offset, prior[1] / factors.square()
    kept = (
        tensor.unsqueeze(0).to(task.device, task.settings.dtype).contiguous()
        for tensor in (mean, precision, *told)
    )
    return kind(*kept, shift.to(task.device, task.settings.dtype), samples)
