"""Data that come into a last layer's posterior by message passing after its fit, and data that go out again."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.inference.message_data import Batches, Examples, Units, examples_of
from posthoc_uq.inference.message_last import (
    as_belief,
    as_matrix,
    diagonal_evidence,
    joint_evidence,
    joint_rows,
)
from posthoc_uq.inference.message_options import LAST, MANY, MessagePassingOptions
from posthoc_uq.inference.message_shared import signal_of
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing import joint
from posthoc_uq.message_passing.gaussian import FLOOR, Message
from posthoc_uq.message_passing.groups import group_message
from posthoc_uq.message_passing.network import Belief, combined, product, quotient, silent
from posthoc_uq.message_passing.targets import Signal
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.dense import LARGEST_BYTES
from posthoc_uq.posteriors.history import Evidence
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock

_GROUP, _ITERATIONS = 64, 2
_VISITS = 100  # of new data, at most
_ROUNDS = 200  # in which the messages of data that go out settle
_TOLERANCE = 1e-6
_SHARE = 0.7  # of a new message in such a round


def check_last(posterior: Posterior) -> None:
    """Refuse a posterior of a whole network.

    Raises:
        PosthocUQError: it is one.
    """
    if posterior.history.fit.get("layers fitted") != LAST:
        raise PosthocUQError(
            "Data come in and go out of posteriors of a last layer, by method='message_passing' with layers='last'; "
            "this one is of a whole network. Fit again on the data that it is to hold."
        )


def changed(posterior: Posterior, task: Task, sign: int) -> Posterior:
    """The posterior with the data of a task, or without them.

    Args:
        posterior: of a last layer; it stays as it is.
        task: of the data.
        sign: 1 for data that come in, -1 for data that go out.

    Raises:
        PosthocUQError: the data cannot all have been in, or would leave none.
    """
    check_last(posterior)
    ((name, layer),) = posterior.layers.items()
    block = cast(MessagesBlock, posterior.blocks[name])
    examples = examples_of(task, layer)
    samples = block.samples + sign * len(examples.inputs)
    if samples < 1:
        raise PosthocUQError(
            f"The posterior holds {block.samples} samples, and {len(examples.inputs)} cannot go out; at least one must "
            f"be left."
        )
    bias = layer.bias is not None
    shift = as_double(block.shift)
    units = Units.of(examples, bias, shift[:-1] if bias else shift)
    options = MessagePassingOptions(
        signal="argmax" if posterior.history.fit.get("signal") == "argmax" else "auto",
        regularize=bool(posterior.history.fit.get("regularize", False)),
    )
    task.settings = replace(task.settings, likelihood=posterior.likelihood)
    signal = signal_of(task, options, units)
    work = _joint if isinstance(block, JointMessagesBlock) else _diagonal
    field, precision = work(block, layer, units, examples, signal, sign)
    kept = [as_double(block.field) + sign * field, as_double(block.precision) + sign * precision]
    new = type(block)(
        block.prior_mean,
        block.prior_precision,
        kept[0].to(block.field),
        kept[1].to(block.field),
        block.shift,
        samples,
    )
    _check_left(new)
    return _with_block(posterior, name, new, samples)


def _check_left(block: MessagesBlock) -> None:
    diagonal = block.precision
    if isinstance(block, JointMessagesBlock):
        diagonal = diagonal.diagonal(dim1=-2, dim2=-1)
    rounding = 1e-5 * float(block.total().abs().max())
    fault = block.fault()
    if bool((diagonal < -rounding).any()) or fault is not None:
        raise PosthocUQError(
            "These data cannot all be among those of the posterior: without them a precision would be negative. Pass "
            "samples that were fitted or added, unchanged; the posterior stays as it is."
        )
    if not isinstance(block, JointMessagesBlock):
        block.precision = block.precision.clamp(min=0)


def _with_block(posterior: Posterior, name: str, block: MessagesBlock, samples: int) -> Posterior:
    settings = replace(posterior.settings, scale=posterior.scale * samples / posterior.evidence.samples)
    new = Posterior(
        posterior.method,
        posterior.layers,
        {name: block},
        posterior.members,
        posterior.original,
        posterior.likelihood,
        Evidence(samples, noise_power=0),
        deepcopy(posterior.history),
        settings=settings,
    )
    new.model, new.features, new.fingerprint = posterior.model, posterior.features, posterior.fingerprint
    new.history.fit["samples"] = samples
    return new


def _natural(block: MessagesBlock, units: Units, bias: bool) -> joint.Joint | Message:
    """The posterior of a block in the units of some data, as natural parameters."""
    factors, offset = units.factors(bias), units.offset(bias)
    mean = (block.moved_mean()[0].to(factors) - offset) / factors
    total = block.total()[0].to(factors)
    if isinstance(block, JointMessagesBlock):
        precision = total * factors.unsqueeze(2) * factors.unsqueeze(1)
        return joint.Joint((precision @ mean.unsqueeze(2)).squeeze(2), precision)
    precision = total * factors.square()
    return Message(mean * precision, precision)


def _joint(
    block: MessagesBlock, layer: Layer, units: Units, examples: Examples, signal: Signal, sign: int
) -> tuple[Tensor, Tensor]:
    """Field ``(1, J, n)`` and precision ``(1, J, n, n)`` of the data."""
    known = cast(joint.Joint, _natural(block, units, layer.bias is not None))
    rows, targets = joint_rows(layer, units, examples), units.targets(examples.targets)
    if sign > 0:
        told = joint.fit_sites(rows, targets, signal, known)[1]
    else:
        told = joint.sites_within(rows, targets, signal, known)
    return _placed(joint_evidence(units, told, layer.bias is not None), block)


def _diagonal(
    block: MessagesBlock, layer: Layer, units: Units, examples: Examples, signal: Signal, sign: int
) -> tuple[Tensor, Tensor]:
    """Field and precision ``(1, J, n)`` of the data."""
    bias = layer.bias is not None
    known = cast(Message, _natural(block, units, bias))
    belief = as_belief(known.mean, known.rho, bias)
    total = silent(belief)
    batches = Batches(examples, units, _GROUP, 0)
    if sign > 0:
        total = _came_in(belief, batches, signal)
    else:
        for inputs, targets in batches:

            def told(cavity: Belief, inputs: Tensor = inputs, targets: Tensor = targets) -> Belief:
                return group_message(inputs, targets, cavity, signal, _ITERATIONS)

            total = product(total, _within(belief, told))
    said = as_matrix(total, bias)
    return _placed(diagonal_evidence(units, said, bias), block)


def _came_in(belief: Belief, batches: Batches, signal: Signal) -> Belief:
    """The messages of all groups of new data, visited until they settle: so the same groups can go out again. As in a
    fit, one visit must do for many data.
    """
    numbers = sum(part.rho.numel() for part in belief)
    many = batches.samples >= MANY or 16 * numbers * len(batches) > LARGEST_BYTES
    kept, total = dict[int, Belief](), silent(belief)
    for _ in range(1 if many else _VISITS):
        before = total
        for index, (inputs, targets) in enumerate(batches):
            others = quotient(total, kept[index]) if index in kept else total
            new = group_message(inputs, targets, product(belief, others), signal, _ITERATIONS)
            total = product(others, new)
            if not many:
                kept[index] = new
        if _change(before, total) <= _TOLERANCE:
            break
    return total


def _change(old: Belief, new: Belief) -> float:
    """The largest difference of a message, relative to the largest message."""
    return max(
        float((b - a).abs().max() / b.abs().max().clamp(min=1e-30))
        for before, after in zip(old, new, strict=True)
        for a, b in zip(before, after, strict=True)
        if b.numel()
    )


def _within(belief: Belief, told: Callable[[Belief], Belief]) -> Belief:
    """The message of a group that `belief` holds already: the one that it sends under the cavity without it."""
    own = silent(belief)
    for _ in range(_ROUNDS):
        cavity = quotient(belief, own)
        if min(float(part.rho.min()) for part in cavity if part.rho.numel()) < FLOOR:
            raise PosthocUQError(
                "These data cannot all be among those of the posterior: without them a precision would be negative. "
                "Pass samples that were fitted or added, unchanged; the posterior stays as it is."
            )
        new = told(cavity)
        change = _change(own, new)
        if not change < torch.inf:
            raise NonFiniteError("The messages of these data are not finite.")
        own = combined(own, new, _SHARE)
        if change <= _TOLERANCE:
            break
    return own


def _placed(parts: Any, block: MessagesBlock) -> tuple[Tensor, Tensor]:
    like = as_double(block.field)
    field, precision = (part.unsqueeze(0).to(like) for part in parts)
    return field, precision
