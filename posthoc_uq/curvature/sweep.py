"""One pass over a loader that feeds accumulators, and one for the residuals of a regression."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from posthoc_uq.core.batches import (
    LOADER,
    Bar,
    Batch,
    BatchReader,
    batches,
    count_samples,
    explained,
    holds_samples,
    with_targets,
)
from posthoc_uq.core.devices import TEMPORARY_BYTES, DeferredChecks, as_double, on_host
from posthoc_uq.core.distributed import check_items, gather, own_samples
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.numerics import load_tensors
from posthoc_uq.core.options import Natural, NotNegative, made_of
from posthoc_uq.core.randomness import mix, mixed_seed, sample_keys
from posthoc_uq.curvature.kept_inputs import Part, Picked
from posthoc_uq.curvature.statistics import Accumulator, JointFisher, fault_of_sums
from posthoc_uq.layers.capture import Capture, Recording
from posthoc_uq.layers.layer import Call
from posthoc_uq.layers.operands import (
    CPU_TEMPORARY,
    Operand,
    Rows,
    chunks,
    separate_positions,
    weighted,
)
from posthoc_uq.layers.rules import LayerGradients
from posthoc_uq.layers.sample_gradients import numbers_of
from posthoc_uq.likelihoods import Fisher, Gaussian, Likelihood
from posthoc_uq.likelihoods.weights import SampleWeights, weights_of

if TYPE_CHECKING:
    from posthoc_uq.likelihoods.joint import Joint

WORD = 1 << 64
Word = Annotated[int, Ge(0), Lt(WORD)]
_STACK_BYTES = 2**26  # of output gradients of all layers that wait for those of other labels
_PLAIN_TYPES = (bool, int, float, complex, str, type(None))


def sample_hashes(batch: Batch, keys: Tensor) -> Tensor:
    """A hash of each sample: inputs, target and weight together, ``(samples,)`` int64.

    The sum of the hashes does not depend on the batches or the order of the samples.

    Args:
        batch: the samples.
        keys: hashes of their inputs, ``(samples,)`` int64.
    """
    samples = keys.shape[0]
    parts, covered = [keys], set(map(id, batch.tensors))  # by the keys
    for leaf in tree_leaves((batch.args, batch.kwargs)):
        if id(leaf) not in covered and holds_samples(leaf, samples):  # it is inside of another value
            parts.append(sample_keys([leaf], samples, 0))
    if batch.targets is not None and holds_samples(batch.targets, samples):
        parts.append(sample_keys([batch.targets], samples, 0))
    if batch.weights is not None and holds_samples(batch.weights, samples):
        parts.append(sample_keys([batch.weights], samples, 1))
    hashes = parts[0]
    for part in parts[1:]:
        hashes = mix(hashes * 31 + part.to(hashes.device))
    return hashes


def shared_hash(batch: Batch, samples: int) -> Tensor:
    """A hash of all else in a batch, an int64 scalar: shapes, number formats, and values that its samples share."""
    weights = () if batch.weights is None else (batch.weights,)
    leaves, form = tree_flatten((batch.args, batch.kwargs, batch.targets, *weights))
    digest = sha256(repr((str(form), samples, list(map(_described, leaves)))).encode()).digest()
    shared = torch.tensor(int.from_bytes(digest[:7], "little"), dtype=torch.int64, device="cpu")
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not holds_samples(leaf, samples) and leaf.numel():
            shared = mix(shared.to(leaf.device) * 31 + sample_keys([leaf.reshape(1, -1)], 1, 0)[0])
    return shared


def batch_hash(batch: Batch) -> int:
    """A hash of all that a batch holds, whatever the order of its samples."""
    samples = count_samples(batch)
    total = sample_hashes(batch, sample_keys(batch.tensors, samples, 0)).sum()
    return mixed_seed(int(total) % WORD, int(shared_hash(batch, samples)) % WORD)


class DataHash:
    """The sum of the hashes of all samples of a pass, whatever their order. An `Observer` of a sweep.

    Attributes:
        total: the sum, modulo 2^64.
        samples: their number.
    """

    def __init__(self) -> None:
        self.total = 0
        self.samples = 0

    def see(
        self,
        batch: Batch,
        keys: Tensor,
        recording: Recording | None = None,
        checks: DeferredChecks | None = None,
    ) -> None:
        """See `Observer`; without `checks` the batch is looked at straight away."""
        pending = DeferredChecks() if checks is None else checks
        self.samples += keys.shape[0]
        pending.add(sample_hashes(batch, keys).sum(), self._add)
        if checks is None:
            pending.run()

    def _add(self, total: Tensor) -> None:
        self.total = (self.total + int(total)) % WORD


class ConfidenceGap:
    """Accuracy on the data of a sweep less the mean probability of the predicted class. An `Observer`.

    Args:
        likelihood: says what is predicted, and how surely.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood = likelihood
        self._known, self._total, self._samples = True, 0.0, 0

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: DeferredChecks) -> None:
        """See `Observer`."""
        outputs, targets = recording.outputs.detach(), batch.targets
        top = self._likelihood.top_probability(outputs) if self._known else None
        # without one class a sample, or with weights, nothing is known
        if top is None or targets is None or targets.numel() != len(top) or batch.weights is not None:
            self._known = False
            return
        labels = targets.reshape(-1)
        right = (self._likelihood.predicted_class(outputs) == labels).to(top)
        # soft labels of one logit: looked at with the sum, since a look waits for the device
        right = right.masked_fill(labels != labels.round(), nan) if labels.is_floating_point() else right
        checks.add((right - top).sum(), self._add)
        self._samples += len(top)

    def _add(self, excess: Tensor) -> None:
        self._total += float(excess)

    def of_all(self) -> float | None:
        """The gap over the data of all processes; None where targets are no classes, are soft, or have weights."""
        known, totals, samples = zip(
            *gather((self._known, self._total, self._samples), "comparing confidence and accuracy"),
            strict=True,
        )
        found = sum(totals) / sum(samples) if all(known) and sum(samples) else nan
        return None if isnan(found) else found


def _described(leaf: Any) -> Any:
    """What is known of a value without a wait for the device; equal in every process."""
    if isinstance(leaf, Tensor):
        return str(leaf.dtype), tuple(leaf.shape)
    return leaf if isinstance(leaf, _PLAIN_TYPES) else type(leaf).__qualname__


MAX_KEYS = 65536  # inputs whose hashes are remembered, to recognise data that are mostly copies


@dataclass
class SweepTotals:
    """What a sweep counted beside the statistics, and how far into the loader it is.

    Attributes:
        batches: batches read.
        seen: samples read.
        samples: samples swept over, fewer than seen where the sweep takes a share of them.
        weight: the sum of their weights; their number where they have none.
        log_likelihood: weighted sum of ``log p(y | x)`` at the trained weights, in nats; None where labels were
            missing.
        outputs: outputs of one sample.
        targets: weighted numbers of the targets that are there, of each noise variance; None where none is missing.
        keys: hashes of the first inputs.
        digest: hash of all batches in their order; 0 where a sweep is compared with no other.
        content: hash of all samples with their targets, whatever their order; likewise.
    """

    batches: Natural = 0
    seen: Natural = 0
    samples: Natural = 0
    weight: NotNegative = 0.0
    log_likelihood: float | None = 0.0
    outputs: Natural = 0
    targets: list[NotNegative] | None = None
    keys: set[int] = field(default_factory=set[int])
    digest: Word = 0
    content: Word = 0

    @property
    def repetitive(self) -> bool:
        """Whether most of the inputs whose hashes were remembered are copies of others."""
        looked_at = min(self.seen, MAX_KEYS)
        return looked_at >= 100 and 2 * len(self.keys) < looked_at

    def state_dict(self) -> dict[str, Any]:
        """Its values, from which `restored` makes an equal one."""
        return {**vars(self), "keys": sorted(self.keys)}

    @classmethod
    def restored(cls, state: Mapping[str, Any], weighted: bool, share: float) -> SweepTotals:
        """The summary of a state that somebody else may have written.

        Args:
            state: what `state_dict` gave.
            weighted: whether the samples have weights.
            share: of the samples that the sweep takes.

        Raises:
            PosthocUQError, ValueError: no sweep over such data counts this.
        """
        found = made_of(cls, {**state, "keys": set(state["keys"])})
        if not found.batches <= found.seen or len(found.keys) > min(found.seen, MAX_KEYS):
            raise ValueError(f"{found.seen} samples seen in {found.batches} batches cannot be")
        if found.samples > found.seen or (share == 1 and found.samples < found.seen):
            raise ValueError(f"{found.samples} of {found.seen} samples cannot be")
        if not weighted and found.weight != found.samples:
            raise ValueError(f"{found.samples} samples without weights cannot weigh {found.weight:g}")
        return found

    def note(self, keys: Tensor) -> None:
        """Count a batch, by the hashes of its inputs on the CPU."""
        hashes: list[int] = keys.tolist()
        if self.seen < MAX_KEYS:
            self.keys.update(hashes[: MAX_KEYS - self.seen])
        self.batches += 1
        self.seen += len(hashes)

    def note_content(self, content: Tensor, shared: Tensor, samples: int) -> None:
        """Take in what a batch of so many samples holds, by hashes on the CPU: of its samples (summed), and of what
        they share.
        """
        self.digest = mixed_seed(self.digest, int(content) % WORD, samples, int(shared) % WORD)
        self.content = (self.content + int(content)) % WORD

    def add_targets(self, counts: Tensor) -> None:
        """Add numbers of targets, ``(noise variances,)``."""
        before = self.targets or [0.0] * len(counts)
        self.targets = [own + more for own, more in zip(before, counts.tolist(), strict=True)]

    def add_log_likelihood(self, log_probs: Tensor) -> None:
        """Add the log-probabilities of some samples."""
        if self.log_likelihood is not None:
            self.log_likelihood += float(log_probs.double().sum())


class LabelStack:
    """Output gradients of a layer for several labels of a batch, side by side. Their places in memory depend on the
    batch alone, and with them the last bits of sums.

    Args:
        like: those of one label, ``(samples, groups, positions, outputs)``.
        memory: numbers of their kind, for at least two labels.
    """

    def __init__(self, like: Tensor, memory: Tensor) -> None:
        samples, groups, positions, outputs = like.shape
        self._capacity, self._number = len(memory) // max(1, like.numel()), 0
        # in the order of memory of each
        self._positions_last = like.stride(3) != 1
        sizes = (outputs, positions) if self._positions_last else (positions, self._capacity, outputs)
        sizes = (self._capacity, *sizes) if self._positions_last else sizes
        self._gradients = memory[: self._capacity * like.numel()].view(samples, groups, *sizes)

    @property
    def full(self) -> bool:
        """Whether it holds no more."""
        return self._number == self._capacity

    def add(self, gradients: Tensor) -> None:
        """Take those of the next label."""
        if self._positions_last:
            self._gradients[:, :, self._number] = gradients.transpose(2, 3)
        else:
            self._gradients[:, :, :, self._number] = gradients
        self._number += 1

    def take(self) -> Tensor:
        """All that it held, ``(samples, groups, positions, labels * outputs)``, until more is added."""
        number, self._number = self._number, 0
        if self._positions_last:
            return self._gradients[:, :, :number].flatten(2, 3).transpose(2, 3)
        return self._gradients[:, :, :, :number].flatten(3)


class Observer(Protocol):
    """Sees the data of a sweep beside the accumulators."""

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: DeferredChecks) -> None:
        """Look at a batch.

        Args:
            batch: samples of this process, without padding.
            keys: hashes of the samples' inputs, ``(samples,)`` int64.
            recording: its forward pass, before any backward pass.
            checks: takes the values that the host must see.
        """
        ...


class Sweep:
    """One pass over the data: every accumulator of every layer gets all samples, or a share of them.

    Args:
        capture: of the layers, proved.
        accumulators: by layer name.
        joint: takes the per-sample gradients of all layers together.
        likelihood: of the targets.
        fisher: which labels the expectation is over.
        n_samples: labels drawn per sample, where they are drawn.
        seed: of the drawn labels, and of the hashes of inputs.
        dtype: of the statistics.
        share: of the samples that are swept over, picked by a hash of their inputs, in batches no larger than the
            loader's.
        by_position: a layer whose outputs at a position are the model's there. With drawn labels, which are independent
            between positions, each position of it counts as a sample of its own, but in a dense Fisher: products of the
            scores of two positions have mean 0; without them there is less noise, and no gradient of a whole sample.
        weighted: whether the samples have weights.
        compared: whether the data are compared with those of another sweep, so that their hashes are summed: of a
            checkpoint, or of another process.
        observers: see every batch that is swept over.

    Attributes:
        sums: the state of every accumulator, in which it goes on summing.
        summary: what was counted.
    """

    def __init__(
        self,
        capture: Capture,
        accumulators: Mapping[str, Sequence[Accumulator]],
        *,
        joint: JointFisher | None,
        likelihood: Likelihood,
        fisher: Fisher,
        n_samples: int,
        seed: int,
        dtype: torch.dtype,
        share: float,
        by_position: str | None,
        weighted: bool,
        compared: bool,
        observers: Sequence[Observer],
    ) -> None:
        self._capture, self._accumulators, self._joint = capture, accumulators, joint
        self._likelihood, self._n_samples = likelihood, n_samples
        self._fisher: Fisher = fisher
        self._seed, self._dtype, self._share = seed, dtype, share
        self._by_position = by_position if fisher == "mc" and joint is None else None
        self._weighted, self._compared, self._observers = weighted, compared, observers
        self._picked = Picked(share) if share < 1 else None
        self._stacks = dict[str, Tensor]()
        self.sums = dict[str, dict[str, Tensor]]()
        for name, of_layer in accumulators.items():
            for index, accumulator in enumerate(of_layer):
                self.sums[f"{name}/{index}"] = accumulator.state_dict()
        if joint is not None:
            self.sums["joint/0"] = joint.state_dict()
        self.summary = SweepTotals()
        self._interrupted: SweepTotals | None = None  # until all of its batches were read again

    def state(self) -> dict[str, Any]:
        """All that `resume` goes on from."""
        return {"sums": self.sums, "summary": self.summary.state_dict()}

    @property
    def resumable(self) -> bool:
        """Whether `state` holds all batches that were added: none waits for others, or is to be read again."""
        return self._interrupted is None and (self._picked is None or not self._picked.waiting)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take a state that somebody else may have written.

        Raises:
            PosthocUQError, ValueError: it is that of no sweep over such data.
        """
        load_tensors(self.sums, state["sums"])
        for name, of_one in self.sums.items():
            fault = fault_of_sums(of_one)
            if fault is not None:
                raise ValueError(f"of '{name.rpartition('/')[0]}' {fault}")
        self.summary = SweepTotals.restored(state["summary"], self._weighted, self._share)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of an interrupted sweep, as `restore`. Its batches are to be added again; they are shown
        to the observers, but not swept over.
        """
        self.restore(state)
        if self.summary.batches:
            self._interrupted, self.summary = self.summary, SweepTotals()

    def add(self, batch: Batch, samples: int) -> None:
        """Take the next batch of the loader, of so many samples.

        Raises:
            NonFiniteError: outputs or gradients are not finite; names the batch and the layer.
            PosthocUQError: labels do not fit the likelihood, or an interrupted sweep saw other batches.
        """
        keys, index = sample_keys(batch.tensors, samples, self._seed), self.summary.batches
        checks, summary, hashes = DeferredChecks(), self.summary, list[Tensor]()
        checks.add(keys, summary.note)
        if self._compared:
            checks.add(sample_hashes(batch, keys).sum(), hashes.append)
            checks.add(
                shared_hash(batch, samples), lambda shared: summary.note_content(hashes[0], shared, samples)
            )
        if self._interrupted is None:
            picked = self._picked
            for part in [(batch, keys, str(index))] if picked is None else picked.add(batch, keys, index):
                self._take(part, checks)
        elif self._observers:
            _show(self._capture, batch, keys, str(index), self._observers, checks)
        checks.run()
        before = self._interrupted
        if before is not None and self.summary.batches == before.batches:
            if (self.summary.digest, self.summary.seen) != (before.digest, before.seen):
                raise other_batches()
            self.summary, self._interrupted = before, None

    def finish(self) -> None:
        """Take the samples that still wait, after the last batch.

        Raises:
            PosthocUQError: an interrupted sweep saw more batches.
        """
        if self._interrupted is not None:
            raise other_batches()
        if self._picked is not None:
            checks = DeferredChecks()
            for part in self._picked.rest():
                self._take(part, checks)
            checks.run()

    def _take(self, part: Part, checks: DeferredChecks) -> None:
        for batch, keys, place in _pieces(self._capture, *part):
            recording, outputs = self._forward(batch, keys.shape[0], place, checks)
            with in_batch(place):
                weights = weights_of(self._likelihood, outputs, batch)
                targets = batch.targets if weights is None else weights.targets(batch.targets)
            check_targets(self._likelihood, outputs, targets, place, checks)
            for observer in self._observers:
                observer.see(batch, keys, recording, checks)
            self._backward(recording, outputs, targets, keys, weights, place, checks)
            self._sum_up(outputs, targets, weights, checks)

    def _forward(
        self, batch: Batch, samples: int, place: str, checks: DeferredChecks
    ) -> tuple[Recording, Tensor]:
        recording = _run(self._capture, batch, samples, place)
        outputs = recording.outputs.detach()
        # a sum is read once, and has no temporary; one that overflows is looked at again
        total = outputs.sum(dtype=torch.promote_types(outputs.dtype, torch.float32))
        checks.add(total, lambda host_total: require_outputs(host_total, outputs, place))
        if outputs.ndim == 0 or outputs.shape[0] != samples:
            raise PosthocUQError(
                f"Batch {place}: {samples} inputs gave outputs of shape {tuple(outputs.shape)}; the first dimension "
                f"must count the samples."
            )
        return recording, outputs

    def _backward(
        self,
        recording: Recording,
        outputs: Tensor,
        targets: Tensor | None,
        keys: Tensor,
        weights: SampleWeights | None,
        place: str,
        checks: DeferredChecks,
    ) -> None:
        """A backward pass for each label of the Fisher; what it gives goes to the accumulators, layer by layer, and of
        as many labels together as memory allows.
        """
        sums, rows = dict[str, Tensor](), dict[str, Tensor]()
        several, counted = False, set[str]()
        waiting = dict[str, tuple[list[Call], Operand, LabelStack]]()

        def sink(of_layer: LayerGradients) -> None:
            name, gradients = of_layer.layer.name, of_layer.gradients(self._dtype)
            if name not in waiting:
                calls, activations = of_layer.calls, of_layer.activations(self._dtype)
                stack = self._stack(name, gradients) if several else None
                if stack is None:
                    take(name, calls, activations, gradients)
                    return
                waiting[name] = calls, activations, stack
            calls, activations, stack = waiting[name]
            stack.add(gradients)
            if stack.full:
                del waiting[name]
                take(name, calls, activations, stack.take())

        def take(name: str, calls: list[Call], activations: Operand, gradients: Tensor) -> None:
            first, check, counts = name not in counted, gradients.sum(), weights
            if first:
                check = check + sum(call.input.detach().sum(dtype=self._dtype) for call in calls)
                counted.add(name)
            sums[name] = check if name not in sums else sums[name] + check
            if name == self._by_position:
                if weights is not None:  # positions count as samples of their own
                    counts = SampleWeights(weights.samples.repeat_interleave(activations.positions))
                activations = Rows(separate_positions(activations.rows()))
                gradients = separate_positions(gradients)
            for accumulator in self._accumulators.get(name, ()):
                accumulator.add(activations, gradients, first, counts)
            if self._joint is not None:
                rows[name] = activations.gradients(gradients, CPU_TEMPORARY).flatten(1)

        pulled = self._likelihood.gradients(outputs, targets, keys, self._fisher, self._n_samples)
        if weights is not None:
            pulled = map(weights.gradients, pulled)
        gradient = next(pulled, None)
        while gradient is not None:
            # one ahead, to know the last; no more, since there may be one for every class
            following = next(pulled, None)
            several = self._joint is None and (bool(waiting) or following is not None)
            recording.pull_back(gradient, sink, last=following is None)
            if self._joint is not None:
                with torch.autocast(outputs.device.type, enabled=False):
                    self._joint.add_rows(_side_by_side(self._capture, rows, keys.shape[0]))
                rows.clear()
            gradient = following
        with torch.autocast(outputs.device.type, enabled=False):
            for name, (calls, activations, stack) in waiting.items():
                take(name, calls, activations, stack.take())
        if sums:
            names = list(sums)
            checks.add(torch.stack(list(sums.values())), lambda totals: _require_finite(names, totals, place))

    def _stack(self, layer: str, gradients: Tensor) -> LabelStack | None:
        """An empty stack for a layer's output gradients of this batch, in the memory of the last one; None where it
        would hold no two of them.
        """
        limit = _STACK_BYTES // len(self._capture.tracked)
        if 2 * gradients.nbytes > limit:
            return None
        memory = self._stacks.get(layer)
        if memory is None:
            self._stacks[layer] = memory = gradients.new_empty(limit // gradients.element_size())
        return LabelStack(gradients, memory)

    def _sum_up(
        self, outputs: Tensor, targets: Tensor | None, weights: SampleWeights | None, checks: DeferredChecks
    ) -> None:
        summary, likelihood = self.summary, self._likelihood
        summary.samples += len(outputs)
        summary.weight += len(outputs) if weights is None else weights.total
        summary.outputs = outputs[0].numel()
        if targets is None or summary.log_likelihood is None:
            summary.log_likelihood = None
        elif weights is None:
            checks.add(likelihood.log_prob(outputs, targets), summary.add_log_likelihood)
        else:
            checks.add(weights.log_prob(likelihood, outputs, targets), summary.add_log_likelihood)
        by_position = weights is not None and weights.by_position is not None
        if targets is not None and (by_position or likelihood.missing == "ignore"):
            counts = likelihood.target_counts(outputs, targets)
            if counts is not None:
                of_rows = None if weights is None else weights.of_rows(len(counts))
                checks.add(weighted(counts, of_rows).sum(0), summary.add_targets)


def _pieces(capture: Capture, batch: Batch, keys: Tensor, place: str) -> Iterator[Part]:
    """A batch in pieces whose samples' gradients fit into memory, where the capture has any of `sample_gradients`."""
    samples = keys.shape[0]
    if not capture.computed or samples == 1:
        yield batch, keys, place
        return
    for part in chunks(samples, numbers_of(capture.computed), 4, TEMPORARY_BYTES):
        yield batch.narrow(part.start, part.stop - part.start, samples), keys[part], place


def run_observers(
    capture: Capture,
    loader: Iterable[Any],
    reader: BatchReader,
    observers: Sequence[Observer],
    *,
    seed: int,
    progress: bool,
) -> None:
    """Show all data to observers by forward passes alone, where no sweep goes over all of them."""
    with Bar(loader, "looking at the data", progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, reader)):
            keys = sample_keys(batch.tensors, samples, seed)
            checks = DeferredChecks()
            _show(capture, batch, keys, str(index), observers, checks)
            checks.run()
            bar.advance(samples)


def _run(capture: Capture, batch: Batch, samples: int, place: str) -> Recording:
    """The recorded forward pass of a batch; an error inside the model says what the model was called with."""
    with explained(lambda: capture.twin, batch, f"batch {place} of the loader", LOADER):
        return capture.run(batch, samples)


def _show(
    capture: Capture,
    batch: Batch,
    keys: Tensor,
    place: str,
    observers: Sequence[Observer],
    checks: DeferredChecks,
) -> None:
    """Show a batch to observers by a forward pass alone."""
    recording = _run(capture, batch, keys.shape[0], place)
    for observer in observers:
        observer.see(batch, keys, recording, checks)


def own_batches(loader: Iterable[Any], reader: BatchReader) -> Iterator[tuple[Batch, int]]:
    """Batches and their numbers of samples, without the padding that a `DistributedSampler` adds at the end."""
    own_count, so_far = own_samples(loader), 0
    skips = reader.skips_missing and own_count is not None  # padding is known by the number of all rows
    for batch in batches(loader, replace(reader, skips_missing=False) if skips else reader):
        samples = count_samples(batch)
        if own_count is not None:
            check_items(loader, samples)
            if so_far + samples > own_count:
                batch, samples = batch.narrow(0, own_count - so_far, samples), own_count - so_far
        if samples:
            so_far += samples
            if skips:
                batch = with_targets(batch)
                if not (samples := batch.rows or 0):
                    continue
            yield batch, samples


def other_batches() -> PosthocUQError:
    """The error of a loader that begins otherwise than when the checkpoint was made."""
    return PosthocUQError(
        "The loader does not begin with the batches that the checkpoint was made from, so the fit cannot go on from "
        "it; pass the same data in the same order, or delete the checkpoint."
    )


@contextmanager
def in_batch(place: str) -> Generator[None]:
    """A context of a look at a batch of the loader, whose number then begins the error."""
    try:
        yield
    except PosthocUQError as error:
        raise PosthocUQError(f"Batch {place}: {error}") from None


def no_weight_error() -> PosthocUQError:
    """The error of data that count nothing."""
    return PosthocUQError(
        "The weights of all samples are 0, so that no data are left; give some a positive one."
    )


def check_targets(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, place: str, checks: DeferredChecks
) -> None:
    """Refuse targets that do not fit: wrong shapes and types now, wrong values when the checks are looked at."""
    with in_batch(place):
        fault = likelihood.validation_error(outputs, targets)

    def look(faulty: Tensor) -> None:
        if bool(faulty):
            with in_batch(place):
                likelihood.check(outputs, targets)

    if fault is not None:
        checks.add(fault, look)


_NOT_FINITE = "Check the input data and the model's weights for NaN or infinity."


def require_outputs(total: Tensor, outputs: Tensor, place: str) -> None:
    """Refuse outputs that are not finite, where their sum `total` on the host is not."""
    if not isfinite(float(total)) and not bool(torch.isfinite(outputs).all()):
        raise NonFiniteError(f"Batch {place}: the model's outputs are not finite. {_NOT_FINITE}")


def _require_finite(names: Sequence[str], sums: Tensor, place: str) -> None:
    # A backward pass goes from the last layer to the first, so the first layer that is not finite is the cause.
    for name, total in zip(names, sums.tolist(), strict=True):
        if not isfinite(total):
            raise NonFiniteError(
                f"Batch {place}: layer '{name}' has non-finite activations or gradients. {_NOT_FINITE}"
            )


def _side_by_side(capture: Capture, rows: dict[str, Tensor], samples: int) -> Tensor:
    columns: list[Tensor] = []
    reference = next(iter(rows.values()))
    for name, tracked in capture.tracked.items():
        columns.append(rows[name] if name in rows else reference.new_zeros(samples, tracked.layer.parameters))
    return torch.cat(columns, dim=1)


class TargetMoments(NamedTuple):
    """Of each target, or channel, ``(targets,)``, float64 on the CPU: the sum of the weights of those that are there,
    their mean, and the weighted sum of squared distances from it.
    """

    weight: Tensor
    mean: Tensor
    squares: Tensor

    def joined(self, other: TargetMoments) -> TargetMoments:
        """Those of both data."""
        weight, step = self.weight + other.weight, other.mean - self.mean
        share = other.weight / weight.clamp(min=1e-300)
        squares = self.squares + other.squares + step.square() * self.weight * share
        return TargetMoments(weight, self.mean + step * share, squares)


def target_moments(
    likelihood: Likelihood, loader: Iterable[Any], reader: BatchReader, progress: bool
) -> TargetMoments | None:
    """The moments of the targets of a loader, which the model does not see; None without targets.

    Raises:
        PosthocUQError: batches have other numbers of targets, or targets are not finite.
    """
    found: TargetMoments | None = None
    with torch.no_grad(), Bar(loader, "targets", progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, reader)):
            if batch.targets is None:
                return None
            layout, targets = likelihood.positions_of(batch.targets), as_double(batch.targets).cpu()
            values = targets.reshape(samples, -1) if layout is None else layout.rows(targets)
            there = ~values.isnan() if likelihood.missing == "ignore" else torch.ones_like(values).bool()
            if not bool(torch.isfinite(values[there]).all()):
                raise PosthocUQError(f"Batch {index}: some targets are not finite.")
            weights = as_double(there)
            if batch.weights is not None:
                own = batch.weights.cpu().reshape(samples, -1)
                weights = weights * own.expand(samples, max(own.shape[1], len(values) // samples)).reshape(
                    -1, 1
                )
            weight = weights.sum(0)
            values = values.masked_fill(~there, 0.0)
            mean = (weights * values).sum(0) / weight.clamp(min=1e-300)
            own = TargetMoments(weight, mean, (weights * (values - mean).square()).sum(0))
            if found is not None and len(found.mean) != len(mean):
                raise PosthocUQError(
                    f"Batch {index} has {len(mean)} targets a sample, and those before {len(found.mean)}."
                )
            found = own if found is None else found.joined(own)
            bar.advance(samples)
    return found


def sums_of_residuals(
    likelihood: Gaussian | Joint,
    capture: Capture,
    loader: Iterable[Any],
    reader: BatchReader,
    progress: bool,
) -> dict[str, Tensor] | None:
    """Over the data, by a forward pass: of each output, ``(outputs,)`` in float64 on the CPU, the weighted sum of the
    ``"squares"`` of its residuals, the ``"count"`` of its targets (the sum of their weights, if they have some), the
    weighted sum of the ``"residuals"`` themselves, and the sum of the ``"squared weights"``; None without targets. Of
    outputs with positions those of each channel, where every position is a sample.

    Args:
        likelihood: a regression, or several heads of which some are one.
        capture: of the model.
        loader: of the data.
        reader: of its batches.
        progress: whether to show a bar.

    Raises:
        PosthocUQError: the targets do not fit the outputs.
    """
    total: Tensor | None = None
    with torch.no_grad(), Bar(loader, "noise", progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, reader)):
            if batch.targets is None:
                return None
            with explained(lambda: capture.twin, batch, f"batch {index} of the loader", LOADER):
                outputs = batch.copied().call(capture.twin)
            fault = likelihood.validation_error(outputs, batch.targets)
            with in_batch(str(index)):
                weights = weights_of(likelihood, outputs, batch)
            residuals = as_double(likelihood.residuals(outputs, batch.targets))
            layout = likelihood.positions_of(outputs)
            residuals = residuals.reshape(samples, -1) if layout is None else layout.rows(residuals)
            known = likelihood.target_counts(outputs, batch.targets)
            known = torch.ones_like(residuals) if known is None else known
            of_rows = None if weights is None else weights.of_rows(len(residuals))
            squares = weighted(known.square(), of_rows)  # once more below
            sums, *faults = on_host(
                weighted(torch.stack([residuals.square(), known, residuals, squares], 1), of_rows).sum(0),
                *([] if fault is None else [fault]),
            )
            if any(faults):
                likelihood.check(outputs, batch.targets)
            total = sums if total is None else total + sums
            bar.advance(samples)
    names = ("squares", "count", "residuals", "squared weights")
    return None if total is None else dict(zip(names, total, strict=True))
