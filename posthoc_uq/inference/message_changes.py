"""Data that come into a last layer's posterior by message passing after its fit, and data that go out again."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.message_data import Examples, Units, examples_of
from posthoc_uq.inference.message_grams import Remembered, gram_of, in_units, kept_gram, units_of
from posthoc_uq.inference.message_last import (
    diagonal_evidence,
    joint_evidence,
    joint_rows,
)
from posthoc_uq.inference.message_options import LAST, MessagePassingOptions
from posthoc_uq.inference.message_shared import signal_of
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing import joint
from posthoc_uq.message_passing.gaussian import Message
from posthoc_uq.message_passing.targets import Signal
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.blocks import largest_of
from posthoc_uq.posteriors.combining import Weights, check_forgettable
from posthoc_uq.posteriors.history import Evidence
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock

Signals = Callable[[Units], Signal]  # what targets in some units say


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
    place = as_double(block.field).device  # the posterior may lie on another device than the model
    examples = examples._replace(inputs=examples.inputs.to(place), targets=examples.targets.to(place))
    samples = block.samples + sign * len(examples.inputs)
    if samples < 1:
        raise PosthocUQError(
            f"The posterior holds {block.samples} samples, and {len(examples.inputs)} cannot go out; at least one must "
            f"be left."
        )
    options = MessagePassingOptions(
        signal="argmax" if posterior.history.fit.get("signal") == "argmax" else "auto",
        regularize=bool(posterior.history.fit.get("regularize", False)),
    )
    task.settings = replace(task.settings, likelihood=posterior.likelihood)
    work = _joint if isinstance(block, JointMessagesBlock) else _diagonal
    field, precision, gram = work(block, layer, examples, partial(signal_of, task, options), sign)
    if sign > 0:
        weights = Weights.of(block.samples, len(examples.inputs), torch.finfo(block.field.dtype).eps)
        check_forgettable(largest_of(block.total()), largest_of(precision), weights, 0.0, f"'{name}'")
    kept = [as_double(block.field) + sign * field, as_double(block.precision) + sign * precision]
    new = type(block)(
        block.prior_mean,
        block.prior_precision,
        kept[0].to(block.field),
        kept[1].to(block.field),
        block.shift,
        samples,
        gram,
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
    new.model, new.features = posterior.model, posterior.features
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


def _shift(block: MessagesBlock, bias: bool) -> Tensor:
    shift = as_double(block.shift)
    return shift[:-1] if bias else shift


def _joint(
    block: MessagesBlock,
    layer: Layer,
    examples: Examples,
    likelihood: Signals,
    sign: int,
) -> tuple[Tensor, Tensor, None]:
    """Field ``(1, J, n)`` and precision ``(1, J, n, n)`` of the data, which are all that is kept of them."""
    units = Units.of(examples, layer.bias is not None, _shift(block, layer.bias is not None))
    signal = likelihood(units)
    known = cast(joint.Joint, _natural(block, units, layer.bias is not None))
    rows, targets = joint_rows(layer, units, examples), units.targets(examples.targets)
    if sign > 0:
        told = joint.fit_sites(rows, targets, signal, known)[1]
    else:
        told = joint.evidence_of(rows, joint.sites_within(rows, targets, signal, known))
    return *_placed(joint_evidence(units, told, layer.bias is not None), block), None


def _diagonal(
    block: MessagesBlock,
    layer: Layer,
    examples: Examples,
    likelihood: Signals,
    sign: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Field and precision ``(1, J, n)`` of the data, and the Gram of all inputs after the change."""
    bias = layer.bias is not None
    shift = _shift(block, bias)
    gram, own = kept_gram(block, layer), gram_of(examples.inputs, shift, bias)
    assert own is not None  # of the size of the other
    units = units_of(gram, block.samples, shift, examples, bias)
    signal = likelihood(units)
    known = cast(Message, _natural(block, units, bias))
    prior = as_double(block.prior_precision)[0] * units.factors(bias).square()
    old = Remembered(prior, known, in_units(gram, units), signal)
    rows, targets = joint_rows(layer, units, examples), units.targets(examples.targets)
    change = old.with_data if sign > 0 else old.without
    mean, precision = change(rows, in_units(own, units), targets, signal)
    said = Message(sign * (mean * precision - known.tau), sign * (precision - known.rho))
    return *_placed(diagonal_evidence(units, said, bias), block), gram + sign * own


def _placed(parts: Any, block: MessagesBlock) -> tuple[Tensor, Tensor]:
    like = as_double(block.field)
    field, precision = (part.unsqueeze(0).to(like) for part in parts)
    return field, precision
