"""The trainer: fixed batches, one aggregated message a batch, and every example's evidence counted once.

The posterior is ``Q = prior * prod_b G_b``. To work on a batch, its old ``G_b`` is divided out; messages by example
begin at nothing, so that inside of the batch all its evidence is new; and ``Q`` takes the new ``G_b`` in the place of
the old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, exp
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from posthoc_uq.core import interrupts
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.methods.checkpoint import State
from posthoc_uq.methods.message_passing.gaussian import FLOOR
from posthoc_uq.methods.message_passing.groups import group_message
from posthoc_uq.methods.message_passing.network import (
    Belief,
    Stage,
    Weighted,
    combined,
    product,
    quotient,
    silent,
)
from posthoc_uq.methods.message_passing.passes import Forms, Memory, Pass
from posthoc_uq.methods.message_passing.targets import Signal

Data = Sequence[tuple[Tensor, Tensor]]
"""Batches: inputs ``(N, ...)`` in float64 and targets."""
Beliefs = dict[int, Belief]
"""By the place of the stage in the network."""

_GROWTH = 10.0  # times the error at the start, from which on messages diverge


class Diverged(Exception):
    """The messages of a visit diverge; the text says how."""


@dataclass(frozen=True)
class Schedule:
    """How often and in which portions batches are visited.

    Attributes:
        epochs: visits of every batch.
        iterations: in a visit; None for ``ceil(epoch / 2)``.
        chunk_size: examples that pass at the same time; 1 is the paper's schedule.
        message_damping: share of a new message to a weight; None for ``min(1, 2 / chunk_size)``.
        retries: times that a visit whose messages diverge begins anew with half of that share; then it is an error.
        shuffle: visit the batches in another order in every epoch.
        random: go through the examples of a batch in another order in every visit, else in that of the data.
    """

    epochs: int = 1
    iterations: int | None = None
    chunk_size: int = 1
    message_damping: float | None = None
    retries: int = 4
    shuffle: bool = False
    random: bool = True

    def iterations_of(self, epoch: int) -> int:
        """In the visits of an epoch, which are counted from 1."""
        return ceil(epoch / 2) if self.iterations is None else self.iterations

    def share(self) -> float:
        """The share of a new message to a weight, at the start."""
        return min(1.0, 2 / self.chunk_size) if self.message_damping is None else self.message_damping


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
        schedule: of the visits.
        forms: how messages are computed.
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
    prior: Beliefs
    data: Data
    signal: Signal
    schedule: Schedule = field(default_factory=Schedule)
    forms: Forms = field(default_factory=Forms)
    seed: int = 0
    evidence: list[Beliefs] = field(init=False)
    posterior: Beliefs = field(init=False)
    share: float = field(init=False)
    restarts: int = field(init=False, default=0)
    epoch: int = field(init=False, default=0)
    left: list[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        empty = {index: silent(belief) for index, belief in self.prior.items()}
        self.evidence = [empty for _ in self.data]
        self.posterior, self.share = self.prior, self.schedule.share()
        self._generator = torch.Generator().manual_seed(self.seed)
        self._start: Tensor | None = None  # the error of an example under the prior, (K,)

    def run(self, after_visit: Callable[[], None] | None = None) -> Beliefs:
        """The posterior after all epochs.

        Args:
            after_visit: called after every batch.

        Raises:
            PosthocUQError: messages diverge, with any damping.
        """
        while self.epoch < self.schedule.epochs:
            if self.left is None:
                self.left = list(range(len(self.data)))
                if self.schedule.shuffle:
                    order = torch.randperm(len(self.data), generator=self._generator, device="cpu")
                    self.left = order.tolist()
            while self.left:
                self.visit(self.left[0], self.epoch + 1)
                self.left = self.left[1:]
                if after_visit is not None:
                    after_visit()
            if self.schedule.epochs > 1:
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
            "evidence": tree_leaves(self.evidence) if self.schedule.epochs > 1 else [],
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
        if self.schedule.epochs > 1:
            self.evidence = _restored(self.evidence, state["evidence"])

    def assembled(self) -> Beliefs:
        """The prior times the aggregated messages of all batches."""
        total = self.prior
        for told in self.evidence:
            total = {index: product(total[index], told[index]) for index in total}
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
        if self.schedule.random:
            order = torch.randperm(len(targets), generator=self._generator, device="cpu").to(inputs.device)
            inputs, targets = inputs[order], targets[order]
        new = self._told(inputs, targets, cavity, epoch)
        share = batch_damping(epoch)
        told = {index: combined(old[index], new[index], share) for index in old}
        if self.schedule.epochs > 1:
            self.evidence[place] = told
        self.posterior = {index: product(cavity[index], told[index]) for index in old}

    def _told(self, inputs: Tensor, targets: Tensor, prior: Beliefs, epoch: int) -> Beliefs:
        iterations = self.schedule.iterations_of(epoch)
        if self.forms.grouped:
            return self._told_by_group(inputs, targets, prior, iterations)
        why: Exception = Diverged("no visit was made")
        for _ in range(self.schedule.retries + 1):
            try:
                return self._tell(inputs, targets, prior, iterations)
            except Diverged as reason:
                why = reason
                self.share, self.restarts = self.share / 2, self.restarts + 1
        raise PosthocUQError(
            f"The messages diverge: {why}, with message_damping={2 * self.share:.3g} and chunk_size="
            f"{self.schedule.chunk_size}. Lower chunk_size (1 is the paper's schedule), standardise the inputs, or "
            f"take posterior='full' for a last layer."
        )

    def _told_by_group(self, inputs: Tensor, targets: Tensor, prior: Beliefs, iterations: int) -> Beliefs:
        (index,) = prior
        told = group_message(inputs, targets, prior[index], self.signal, iterations)
        if not all(bool(message.finite.all()) for message in told):
            raise NonFiniteError(
                "The messages to the weights are not finite; bring the inputs to about unit size."
            )
        return {index: told}

    def _tell(self, inputs: Tensor, targets: Tensor, prior: Beliefs, iterations: int) -> Beliefs:
        """What a batch tells all weights, under the cavity without it.

        Raises:
            Diverged: numbers are not finite, a precision vanishes or the error grows tenfold.
        """
        networks = _networks(self.stages, prior)
        chunks = [
            _Chunk(x.unsqueeze(0).expand(networks, *x.shape), y)
            for x, y in zip(
                inputs.split(self.schedule.chunk_size), targets.split(self.schedule.chunk_size), strict=True
            )
        ]
        if self._start is None:
            errors = [self._error(chunk, prior, detailed=False)[0] for chunk in chunks]
            self._start = torch.stack(errors).sum(0) / len(targets)
        beliefs, told = prior, {index: silent(belief) for index, belief in prior.items()}
        for _ in range(iterations):
            seen: list[tuple[Tensor, Tensor]] = []
            for chunk in chunks:
                beliefs, *found = self._process(chunk, beliefs, detailed=iterations > 1)
                seen.append((found[0], found[1]))
            self._check(seen, targets)
            told = _total(chunks, prior)
            beliefs = {index: product(prior[index], told[index]) for index in prior}
        if self.schedule.chunk_size > 1:  # what many examples at once told last may have gone too far
            found = [self._error(chunk, beliefs, detailed=iterations > 1) for chunk in chunks]
            self._check(found, targets)
        return told

    def _check(self, seen: list[tuple[Tensor, Tensor]], targets: Tensor) -> None:
        """Compare the error with that under the prior, and the least precision of a cavity with 1e-8."""
        error = torch.stack([each for each, _ in seen]).sum(0) / len(targets)
        if not bool(torch.isfinite(error).all()):
            raise Diverged("outputs are not finite")
        assert self._start is not None
        start = self._start.clamp(min=self.signal.usual(targets))
        if bool((error > _GROWTH * start).any()):
            raise Diverged(f"the error grew from {float(start.max()):.3g} to {float(error.max()):.3g}")
        least = float(torch.stack([each for _, each in seen]).min())
        if not least >= FLOOR:
            raise Diverged(f"a cavity has the precision {least:.3g}")

    def _error(self, chunk: _Chunk, beliefs: Beliefs, *, detailed: bool) -> tuple[Tensor, Tensor]:
        """The error of a chunk under these marginals, and the least precision of a cavity. In a single iteration only
        the sum of what the chunk told is kept; without it the error would be that of the prior.
        """
        one = Pass(self.stages, beliefs, chunk.memory, self.forms, detailed=detailed)
        outputs = one.forward(chunk.inputs)
        assert one.least_precision is not None
        return self.signal.error(outputs, chunk.targets), one.least_precision

    def _process(self, chunk: _Chunk, beliefs: Beliefs, *, detailed: bool) -> tuple[Beliefs, Tensor, Tensor]:
        """One chunk forward and back: the new marginals, its error, and the least precision of a cavity."""
        one = Pass(self.stages, beliefs, chunk.memory, self.forms, detailed=detailed)
        outputs = one.forward(chunk.inputs)
        error = self.signal.error(outputs, chunk.targets)
        message = self.signal.message(outputs, chunk.targets)
        new = dict(beliefs)
        for index in reversed(range(len(self.stages))):
            before, told = one.backward(index, message)
            if told is not None:
                old = chunk.memory.told.get(index)
                kept = told.damped(old, self.share)
                chunk.memory.told[index] = kept
                changed = product(new[index], kept.total())
                new[index] = changed if old is None else quotient(changed, old.total())
            if before is None:
                break
            message = before
        assert one.least_precision is not None
        return new, error, one.least_precision


@dataclass
class _Chunk:
    inputs: Tensor
    targets: Tensor
    memory: Memory = field(default_factory=Memory)


def _networks(stages: Sequence[Stage], beliefs: Beliefs) -> int:
    index = min(beliefs)
    stage = stages[index]
    assert isinstance(stage, Weighted)
    return beliefs[index].weights.rho.shape[0] // stage.groups


def _restored(like: Any, saved: list[Tensor]) -> Any:
    """Saved tensors in the form of `like`, in the order in memory that they had."""
    own, form = tree_flatten(like)
    if [(t.shape, t.dtype) for t in own] != [(t.shape, t.dtype) for t in saved]:
        raise ValueError("it has messages of other shapes")
    return tree_unflatten([t.to(like.device) for t, like in zip(saved, own, strict=True)], form)


def _total(chunks: Sequence[_Chunk], like: Beliefs) -> Beliefs:
    total = {index: silent(belief) for index, belief in like.items()}
    for chunk in chunks:
        for index, told in chunk.memory.told.items():
            total[index] = product(total[index], told.total())
    return total
