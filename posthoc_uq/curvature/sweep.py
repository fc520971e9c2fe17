"""One pass over a loader, feeding accumulators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.curvature.capture import Capture, Recording
from posthoc_uq.curvature.content import WORD, contents, frame
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.curvature.operands import CPU_TEMPORARY
from posthoc_uq.curvature.statistics import Accumulator, JointFisher
from posthoc_uq.devices import Checks
from posthoc_uq.distributed import check_items, own_samples
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import Fisher, Likelihood
from posthoc_uq.loaders import Bar, Batch, BatchReader, batches
from posthoc_uq.randomness import mixed_seed, sample_keys, share_of

KEYS_KEPT = 65536  # inputs whose hashes are remembered, to tell a data set of copies


@dataclass(frozen=True)
class SweepSettings:
    """What every sweep of a fit has in common."""

    reader: BatchReader
    likelihood: Likelihood
    fisher: Fisher = "mc"
    n_samples: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float32
    progress: bool = False


@dataclass
class Summary:
    """What a sweep saw besides the statistics, and where in the loader it stands.

    Attributes:
        batches: batches read.
        seen: samples read.
        samples: samples swept over, fewer than seen where the sweep takes a share of them.
        log_likelihood: sum of ``log p(y | x)`` at the trained weights, or None where labels were missing.
        outputs: outputs of one sample.
        keys: hashes of the first inputs.
        digest: hash of all batches in their order.
        content: hash of all samples, with their targets, in any order.
    """

    batches: int = 0
    seen: int = 0
    samples: int = 0
    log_likelihood: float | None = 0.0
    outputs: int = 0
    keys: set[int] = field(default_factory=lambda: set[int]())
    digest: int = 0
    content: int = 0

    @property
    def repetitive(self) -> bool:
        """Whether most of the first inputs are copies of others, as far as they were looked at."""
        looked_at = min(self.seen, KEYS_KEPT)
        return looked_at >= 100 and 2 * len(self.keys) < looked_at

    def note(self, keys: Tensor, content: Tensor, shared: Tensor) -> None:
        """Count a batch by the hashes of its inputs, the sum of those of its samples, and that of what they share; all
        are on the CPU.
        """
        found: list[int] = keys.tolist()
        if self.seen < KEYS_KEPT:
            self.keys.update(found[: KEYS_KEPT - self.seen])
        self.digest = mixed_seed(self.digest, int(content) % WORD, len(found), int(shared) % WORD)
        self.content = (self.content + int(content)) % WORD
        self.batches += 1
        self.seen += len(found)

    def add_log_likelihood(self, log_probs: Tensor) -> None:
        """Add that of some samples."""
        if self.log_likelihood is not None:
            self.log_likelihood += float(log_probs.double().sum())


class Observer(Protocol):
    """Something beside the curvature that a sweep shows the data to."""

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: Checks) -> None:
        """Look at a batch.

        Args:
            batch: this process's own samples, without another's padding.
            keys: hashes of the samples' inputs, ``(samples,)`` int64.
            recording: its forward pass; not pulled back yet.
            checks: takes what is wanted on the host.
        """
        ...


def sweep(
    capture: Capture,
    loader: Iterable[Any],
    settings: SweepSettings,
    accumulators: Mapping[str, Sequence[Accumulator]],
    *,
    joint: JointFisher | None = None,
    share: float = 1.0,
    description: str = "",
    done: Summary | None = None,
    after_batch: Callable[[Summary], None] | None = None,
    observers: Sequence[Observer] = (),
) -> Summary:
    """Feed every accumulator of every layer with the whole loader, or a share of its samples.

    Args:
        accumulators: by layer name.
        joint: takes the per-sample gradients of all layers together.
        share: of the samples that are swept over, picked by a hash of their inputs.
        done: where an interrupted sweep stood, whose sums the accumulators hold; its batches are read, but not
            swept over again.
        after_batch: called after every batch that was not done already.
        observers: are shown every batch that is swept over, those that were done already included.

    Raises:
        NonFiniteError: outputs or gradients are not finite; names the batch and the layer.
        PosthocUQError: labels do not fit the likelihood, the loader is empty or does not begin with the batches
            that were done.
    """
    summary, skipped = Summary(), 0 if done is None else done.batches
    with Bar(loader, f"{description}, {len(capture.tracked)} layers", settings.progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, settings.reader)):
            keys = sample_keys(batch.tensors(), samples, settings.seed)
            checks = _noting(summary, batch, keys)
            bar.advance(samples)
            if done is not None and index < skipped:
                if observers:
                    _show(observers, batch, keys, _run(capture, batch, samples, index), checks)
                checks.look()
                if index == skipped - 1:
                    summary = _taken_up(summary, done)
                continue
            if share < 1:
                picked = share_of(keys, share).nonzero().flatten()
                batch, keys = batch.select(picked, samples), keys[picked]
            if keys.shape[0]:
                _sweep_batch(
                    capture, batch, keys, index, settings, accumulators, joint, summary, observers, checks
                )
            checks.look()
            if after_batch is not None:
                after_batch(summary)
    if done is not None and summary.batches < skipped:
        raise _other_data()
    return summary


def show(
    capture: Capture, loader: Iterable[Any], settings: SweepSettings, observers: Sequence[Observer]
) -> None:
    """One pass of forward passes alone, for observers that no sweep over all the data was shown to."""
    with Bar(loader, "looking at the data", settings.progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, settings.reader)):
            keys = sample_keys(batch.tensors(), samples, settings.seed)
            checks = Checks()
            _show(observers, batch, keys, _run(capture, batch, samples, index), checks)
            checks.look()
            bar.advance(samples)


def _run(capture: Capture, batch: Batch, samples: int, index: int) -> Recording:
    """The recorded forward pass of a batch; an error of the model's own says what it was called with."""
    with explained(lambda: capture.twin, batch, f"batch {index} of the loader", LOADER):
        return capture.run(batch, samples)


def _show(
    observers: Sequence[Observer], batch: Batch, keys: Tensor, recording: Recording, checks: Checks
) -> None:
    for observer in observers:
        observer.see(batch, keys, recording, checks)


def _noting(summary: Summary, batch: Batch, keys: Tensor) -> Checks:
    """Checks of a batch that count it first."""
    checks, known = Checks(), list[Tensor]()
    checks.later(keys, known.append)
    checks.later(contents(batch, keys).sum(), known.append)
    checks.later(frame(batch, keys.shape[0]), lambda shared: summary.note(known[0], known[1], shared))
    return checks


def own_batches(loader: Iterable[Any], reader: BatchReader) -> Iterator[tuple[Batch, int]]:
    """Batches and their numbers of samples, without the padding of a `DistributedSampler`, which belongs to others."""
    own, seen = own_samples(loader), 0
    for batch in batches(loader, reader):
        samples = count_samples(batch)
        check_items(loader, own, samples)
        if own is not None and seen + samples > own:
            batch, samples = batch.narrow(0, own - seen, samples), own - seen
        if samples:
            seen += samples
            yield batch, samples


def _taken_up(found: Summary, done: Summary) -> Summary:
    for name in ("digest", "content", "batches", "seen", "keys"):
        if getattr(found, name) != getattr(done, name):
            raise _other_data()
    return done


def _other_data() -> PosthocUQError:
    return PosthocUQError(
        "The loader does not begin with the batches that the checkpoint was made from, so the fit cannot go on from "
        "it; pass the same data in the same order, or delete the checkpoint."
    )


def _sweep_batch(
    capture: Capture,
    batch: Batch,
    keys: Tensor,
    index: int,
    settings: SweepSettings,
    accumulators: Mapping[str, Sequence[Accumulator]],
    joint: JointFisher | None,
    summary: Summary,
    observers: Sequence[Observer],
    checks: Checks,
) -> None:
    likelihood, samples = settings.likelihood, keys.shape[0]
    recording = _run(capture, batch, samples, index)
    outputs = recording.outputs.detach()
    checks.later(torch.isfinite(outputs).all(), lambda finite: _require_outputs(finite, index))
    if outputs.ndim == 0 or outputs.shape[0] != samples:
        raise PosthocUQError(
            f"Batch {index}: {samples} inputs gave outputs of shape {tuple(outputs.shape)}; the first dimension must "
            f"count the samples."
        )
    _check_targets(likelihood, outputs, batch.targets, index, checks)
    _show(observers, batch, keys, recording, checks)
    gradients = likelihood.gradients(outputs, batch.targets, keys, settings.fisher, settings.n_samples)
    sums: dict[str, Tensor] = {}
    first, gradient = True, next(gradients, None)
    while gradient is not None:
        following = next(
            gradients, None
        )  # one ahead, to know the last, and no more: there may be one a class
        rows: dict[str, Tensor] = {}
        sink = _feed(accumulators, settings.dtype, sums, first, rows if joint is not None else None)
        recording.pull_back(gradient, sink, last=following is None)
        if joint is not None:
            with torch.autocast(outputs.device.type, enabled=False):
                joint.add_rows(_side_by_side(capture, rows, samples))
        first, gradient = False, following
    if sums:
        names = list(sums)
        checks.later(torch.stack(list(sums.values())), lambda found: _require_finite(names, found, index))
    summary.samples += samples
    summary.outputs = outputs[0].numel()
    if batch.targets is None or summary.log_likelihood is None:
        summary.log_likelihood = None
    else:
        checks.later(likelihood.log_prob(outputs, batch.targets), summary.add_log_likelihood)


def _check_targets(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, index: int, checks: Checks
) -> None:
    """Refuse what does not fit: shapes and types now, the range when the checks are looked at."""

    def named(check: Callable[[Tensor, Tensor | None], Any]) -> Any:
        try:
            return check(outputs, targets)
        except PosthocUQError as error:
            raise PosthocUQError(f"Batch {index}: {error}") from None

    fault = named(likelihood.fault)
    if fault is not None:
        checks.later(fault, lambda found: named(likelihood.check) if bool(found) else None)


def _feed(
    accumulators: Mapping[str, Sequence[Accumulator]],
    dtype: torch.dtype,
    sums: dict[str, Tensor],
    first_pass: bool,
    rows: dict[str, Tensor] | None,
) -> Callable[[LayerGradients], None]:
    def sink(caught: LayerGradients) -> None:
        name = caught.layer.name
        activations, gradients = caught.operands(dtype)
        check = gradients.sum()
        if first_pass:
            check = check + sum(call.input.detach().sum(dtype=dtype) for call in caught.calls)
        sums[name] = check if name not in sums else sums[name] + check
        for accumulator in accumulators.get(name, ()):
            accumulator.add(activations, gradients, first_pass)
        if rows is not None:
            rows[name] = activations.gradients(gradients, CPU_TEMPORARY).flatten(1)

    return sink


def _require_outputs(finite: Tensor, index: int) -> None:
    if not bool(finite):
        raise _not_finite(f"Batch {index}: the model's outputs are not finite.")


def _require_finite(names: Sequence[str], sums: Tensor, index: int) -> None:
    # A backward pass goes from the last layer to the first, so the first one found is where it began.
    for name, finite in zip(names, torch.isfinite(sums).tolist(), strict=True):
        if not finite:
            raise _not_finite(f"Batch {index}: layer '{name}' has non-finite activations or gradients.")


def _side_by_side(capture: Capture, rows: dict[str, Tensor], samples: int) -> Tensor:
    columns: list[Tensor] = []
    reference = next(iter(rows.values()))
    for name, tracked in capture.tracked.items():
        columns.append(rows[name] if name in rows else reference.new_zeros(samples, tracked.layer.parameters))
    return torch.cat(columns, dim=1)


def _not_finite(message: str) -> NonFiniteError:
    return NonFiniteError(message + " Check the input data and the model's weights for NaN or infinity.")
