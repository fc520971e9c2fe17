"""One pass over a loader, feeding accumulators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Capture, Recording
from posthoc_uq.curvature.caught import Caught
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.operands import CPU_TEMPORARY
from posthoc_uq.curvature.statistics import Accumulator, JointFisher
from posthoc_uq.distributed import check_items, own_samples
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import Fisher, Likelihood
from posthoc_uq.loaders import Bar, Batch, BatchReader, batches
from posthoc_uq.posteriors.numerics import as_double
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
        digest: hash of all inputs in their order.
        content: hash of all inputs in any order.
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

    def note(self, keys: Tensor, targets: Tensor) -> None:
        """Count a batch by the hashes of its inputs and of its targets."""
        found: list[int] = keys.tolist()
        if self.seen < KEYS_KEPT:
            self.keys.update(found[: KEYS_KEPT - self.seen])
        total = sum(found) % (1 << 64)
        self.digest = mixed_seed(self.digest, total, len(found), int(targets.sum()) % (1 << 64))
        self.content = (self.content + total) % (1 << 64)
        self.batches += 1
        self.seen += len(found)


class Observer(Protocol):
    """Something beside the curvature that a sweep shows the data to."""

    def see(self, batch: Batch, keys: Tensor, recording: Recording) -> None:
        """Look at a batch.

        Args:
            batch: this process's own samples, without another's padding.
            keys: hashes of the samples' inputs, ``(samples,)`` int64.
            recording: its forward pass; not pulled back yet.
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
            summary.note(keys, sample_keys([] if batch.targets is None else [batch.targets], samples, 0))
            bar.advance(samples)
            if done is not None and index < skipped:
                if index == skipped - 1:
                    summary = _taken_up(summary, done)
                if observers:
                    _show(observers, batch, keys, capture.run(batch, samples))
                continue
            if share < 1:
                picked = share_of(keys, share)
                batch, keys = batch.select(picked, samples), keys[picked]
            if keys.shape[0]:
                _sweep_batch(capture, batch, keys, index, settings, accumulators, joint, summary, observers)
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
        for batch, samples in own_batches(loader, settings.reader):
            keys = sample_keys(batch.tensors(), samples, settings.seed)
            _show(observers, batch, keys, capture.run(batch, samples))
            bar.advance(samples)


def _show(observers: Sequence[Observer], batch: Batch, keys: Tensor, recording: Recording) -> None:
    for observer in observers:
        observer.see(batch, keys, recording)


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
) -> None:
    likelihood, samples = settings.likelihood, keys.shape[0]
    recording = capture.run(batch, samples)
    outputs = recording.outputs.detach()
    if not bool(torch.isfinite(outputs).all()):
        raise _not_finite(f"Batch {index}: the model's outputs are not finite.")
    if outputs.ndim == 0 or outputs.shape[0] != samples:
        raise PosthocUQError(
            f"Batch {index}: {samples} inputs gave outputs of shape {tuple(outputs.shape)}; the first dimension must "
            f"count the samples."
        )
    try:
        likelihood.check(outputs, batch.targets)
    except PosthocUQError as error:
        raise PosthocUQError(f"Batch {index}: {error}") from None
    _show(observers, batch, keys, recording)
    gradients = likelihood.gradients(outputs, batch.targets, keys, settings.fisher, settings.n_samples)
    checks: dict[str, Tensor] = {}
    first, gradient = True, next(gradients, None)
    while gradient is not None:
        following = next(
            gradients, None
        )  # one ahead, to know the last, and no more: there may be one a class
        rows: dict[str, Tensor] = {}
        sink = _feed(accumulators, settings.dtype, checks, first, rows if joint is not None else None)
        recording.pull_back(gradient, sink, last=following is None)
        if joint is not None:
            with torch.autocast(outputs.device.type, enabled=False):
                joint.add_rows(_side_by_side(capture, rows, samples))
        first, gradient = False, following
    _require_finite(checks, index)
    summary.samples += samples
    summary.outputs = outputs[0].numel()
    if batch.targets is None or summary.log_likelihood is None:
        summary.log_likelihood = None
    else:
        summary.log_likelihood += float(as_double(likelihood.log_prob(outputs, batch.targets)).sum())


def _feed(
    accumulators: Mapping[str, Sequence[Accumulator]],
    dtype: torch.dtype,
    checks: dict[str, Tensor],
    first_pass: bool,
    rows: dict[str, Tensor] | None,
) -> Callable[[Caught], None]:
    def sink(caught: Caught) -> None:
        name = caught.layer.name
        activations, gradients = caught.operands(dtype)
        # Looked at after the batch, so that the device need not wait for the host at every layer.
        check = gradients.sum()
        if first_pass:
            check = check + sum(call.input.detach().sum(dtype=dtype) for call in caught.calls)
        checks[name] = check if name not in checks else checks[name] + check
        for accumulator in accumulators.get(name, ()):
            accumulator.add(activations, gradients, first_pass)
        if rows is not None:
            rows[name] = activations.gradients(gradients, CPU_TEMPORARY).flatten(1)

    return sink


def _require_finite(checks: Mapping[str, Tensor], index: int) -> None:
    if not checks or bool(torch.isfinite(torch.stack(list(checks.values()))).all()):
        return
    # A backward pass goes from the last layer to the first, so the first one found is where it began.
    name = next(name for name, check in checks.items() if not bool(torch.isfinite(check)))
    raise _not_finite(f"Batch {index}: layer '{name}' has non-finite activations or gradients.")


def _side_by_side(capture: Capture, rows: dict[str, Tensor], samples: int) -> Tensor:
    columns: list[Tensor] = []
    reference = next(iter(rows.values()))
    for name, tracked in capture.tracked.items():
        columns.append(rows[name] if name in rows else reference.new_zeros(samples, tracked.layer.parameters))
    return torch.cat(columns, dim=1)


def _not_finite(message: str) -> NonFiniteError:
    return NonFiniteError(message + " Check the input data and the model's weights for NaN or infinity.")
