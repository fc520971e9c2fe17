"""One pass over a loader, feeding accumulators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.curvature.capture import Capture, Recording
from posthoc_uq.curvature.content import WORD, sample_hashes, shared_hash
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.curvature.operands import CPU_TEMPORARY, Rows, positions_apart
from posthoc_uq.curvature.picked import Picked
from posthoc_uq.curvature.statistics import Accumulator, JointFisher
from posthoc_uq.devices import Checks
from posthoc_uq.distributed import check_items, own_samples
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.likelihoods import Fisher, Likelihood
from posthoc_uq.likelihoods.counted import weights_of
from posthoc_uq.likelihoods.weights import SampleWeights
from posthoc_uq.loaders import Bar, Batch, BatchReader, batches
from posthoc_uq.randomness import mixed_seed, sample_keys

KEYS_KEPT = 65536  # inputs whose hashes are remembered, to recognise data that are mostly copies


@dataclass(frozen=True)
class SweepSettings:
    """The settings that all sweeps of a fit share.

    Attributes:
        by_position: a layer whose outputs at a position are the model's there. With drawn labels, which are independent
            between positions, each position of it counts as a sample of its own, but in a dense Fisher: products of the
            scores of two positions have mean 0; without them there is less noise, and no gradient of a whole sample.
    """

    reader: BatchReader
    likelihood: Likelihood
    fisher: Fisher = "mc"
    n_samples: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float32
    progress: bool = False
    by_position: str | None = None


@dataclass
class Summary:
    """What a sweep counted beside the statistics, and how far into the loader it is.

    Attributes:
        batches: batches read.
        seen: samples read.
        samples: samples swept over, fewer than seen where the sweep takes a share of them.
        weight: the sum of their weights; their number where they have none.
        log_likelihood: weighted sum of ``log p(y | x)`` at the trained weights, in nats; None where labels were
            missing.
        outputs: outputs of one sample.
        keys: hashes of the first inputs.
        digest: hash of all batches in their order.
        content: hash of all samples with their targets, whatever their order.
    """

    batches: int = 0
    seen: int = 0
    samples: int = 0
    weight: float = 0.0
    log_likelihood: float | None = 0.0
    outputs: int = 0
    keys: set[int] = field(default_factory=lambda: set[int]())
    digest: int = 0
    content: int = 0

    @property
    def repetitive(self) -> bool:
        """Whether most of the inputs whose hashes were remembered are copies of others."""
        looked_at = min(self.seen, KEYS_KEPT)
        return looked_at >= 100 and 2 * len(self.keys) < looked_at

    def note(self, keys: Tensor, content: Tensor, shared: Tensor) -> None:
        """Count a batch. All arguments are hashes on the CPU: of its inputs, of its samples (summed), and of what its
        samples share.
        """
        hashes: list[int] = keys.tolist()
        if self.seen < KEYS_KEPT:
            self.keys.update(hashes[: KEYS_KEPT - self.seen])
        self.digest = mixed_seed(self.digest, int(content) % WORD, len(hashes), int(shared) % WORD)
        self.content = (self.content + int(content)) % WORD
        self.batches += 1
        self.seen += len(hashes)

    def add_log_likelihood(self, log_probs: Tensor) -> None:
        """Add the log-probabilities of some samples."""
        if self.log_likelihood is not None:
            self.log_likelihood += float(log_probs.double().sum())


class Observer(Protocol):
    """Sees the data of a sweep beside the accumulators."""

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: Checks) -> None:
        """Look at a batch.

        Args:
            batch: samples of this process, without padding.
            keys: hashes of the samples' inputs, ``(samples,)`` int64.
            recording: its forward pass, before any backward pass.
            checks: takes the values that the host must see.
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
    """Feed every accumulator of every layer with all samples of the loader, or a share of them.

    Args:
        accumulators: by layer name.
        joint: takes the per-sample gradients of all layers together.
        share: of the samples that are swept over, picked by a hash of their inputs, in batches no larger than the
            loader's.
        done: the summary of an interrupted sweep whose sums the accumulators hold; its batches are read, but not
            swept over again.
        after_batch: called whenever all that is to be swept over of the batches read so far has been.
        observers: see every batch that is swept over, and those of `done`.

    Raises:
        NonFiniteError: outputs or gradients are not finite; names the batch and the layer.
        PosthocUQError: labels do not fit the likelihood, the loader is empty, or it does not begin with the batches of
            `done`.
    """
    summary, skipped = Summary(), 0 if done is None else done.batches
    picked, checks = Picked(share), Checks()

    def sweep_over(batch: Batch, keys: Tensor, place: str) -> None:
        _sweep_batch(capture, batch, keys, place, settings, accumulators, joint, summary, observers, checks)

    with Bar(loader, f"{description}, {len(capture.tracked)} layers", settings.progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, settings.reader)):
            keys = sample_keys(batch.tensors(), samples, settings.seed)
            checks = _checks_that_count(summary, batch, keys)
            bar.advance(samples)
            if done is not None and index < skipped:
                if observers:
                    _show(observers, batch, keys, _run(capture, batch, samples, str(index)), checks)
                checks.look()
                if index == skipped - 1:
                    summary = _resumed(summary, done)
                continue
            for part in picked.add(batch, keys, index):
                sweep_over(*part)
            checks.look()
            if after_batch is not None and not picked.waiting:
                after_batch(summary)
        for part in picked.rest():
            sweep_over(*part)
        checks.look()
    if done is not None and summary.batches < skipped:
        raise _other_data()
    return summary


def show(
    capture: Capture, loader: Iterable[Any], settings: SweepSettings, observers: Sequence[Observer]
) -> None:
    """Show all data to observers by forward passes alone, where no sweep goes over all of them."""
    with Bar(loader, "looking at the data", settings.progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, settings.reader)):
            keys = sample_keys(batch.tensors(), samples, settings.seed)
            checks = Checks()
            _show(observers, batch, keys, _run(capture, batch, samples, str(index)), checks)
            checks.look()
            bar.advance(samples)


def _run(capture: Capture, batch: Batch, samples: int, place: str) -> Recording:
    """The recorded forward pass of a batch; an error inside the model says what the model was called with."""
    with explained(lambda: capture.twin, batch, f"batch {place} of the loader", LOADER):
        return capture.run(batch, samples)


def _show(
    observers: Sequence[Observer], batch: Batch, keys: Tensor, recording: Recording, checks: Checks
) -> None:
    for observer in observers:
        observer.see(batch, keys, recording, checks)


def _checks_that_count(summary: Summary, batch: Batch, keys: Tensor) -> Checks:
    """Checks of a batch whose first entries count the batch in the summary."""
    checks, hashes = Checks(), list[Tensor]()
    checks.later(keys, hashes.append)
    checks.later(sample_hashes(batch, keys).sum(), hashes.append)
    checks.later(shared_hash(batch, keys.shape[0]), lambda shared: summary.note(hashes[0], hashes[1], shared))
    return checks


def own_batches(loader: Iterable[Any], reader: BatchReader) -> Iterator[tuple[Batch, int]]:
    """Batches and their numbers of samples, without the padding that a `DistributedSampler` adds at the end."""
    own_count, so_far = own_samples(loader), 0
    for batch in batches(loader, reader):
        samples = count_samples(batch)
        check_items(loader, own_count, samples)
        if own_count is not None and so_far + samples > own_count:
            batch, samples = batch.narrow(0, own_count - so_far, samples), own_count - so_far
        if samples:
            so_far += samples
            yield batch, samples


def _resumed(repeated: Summary, done: Summary) -> Summary:
    """The summary to go on from, once the batches that were read again are those of `done`."""
    for name in ("digest", "content", "batches", "seen", "keys"):
        if getattr(repeated, name) != getattr(done, name):
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
    place: str,
    settings: SweepSettings,
    accumulators: Mapping[str, Sequence[Accumulator]],
    joint: JointFisher | None,
    summary: Summary,
    observers: Sequence[Observer],
    checks: Checks,
) -> None:
    likelihood, samples = settings.likelihood, keys.shape[0]
    recording = _run(capture, batch, samples, place)
    outputs = recording.outputs.detach()
    # a sum is read once, and has no temporary; one that overflows is looked at again
    total = outputs.sum(dtype=torch.promote_types(outputs.dtype, torch.float32))
    checks.later(total, lambda host_total: _require_outputs(host_total, outputs, place))
    if outputs.ndim == 0 or outputs.shape[0] != samples:
        raise PosthocUQError(
            f"Batch {place}: {samples} inputs gave outputs of shape {tuple(outputs.shape)}; the first dimension must "
            f"count the samples."
        )
    weights = batch_weights(likelihood, outputs, batch, place)
    targets = batch.targets if weights is None else weights.targets(batch.targets)
    _check_targets(likelihood, outputs, targets, place, checks)
    _show(observers, batch, keys, recording, checks)
    gradients = likelihood.gradients(outputs, targets, keys, settings.fisher, settings.n_samples)
    if weights is not None:
        gradients = map(weights.gradients, gradients)
    sums: dict[str, Tensor] = {}
    first, gradient = True, next(gradients, None)
    while gradient is not None:
        # one ahead, to know the last; no more, since there may be one for every class
        following = next(gradients, None)
        rows: dict[str, Tensor] = {}
        sink = _feed(accumulators, settings, sums, first, rows if joint is not None else None, weights)
        recording.pull_back(gradient, sink, last=following is None)
        if joint is not None:
            with torch.autocast(outputs.device.type, enabled=False):
                joint.add_rows(_side_by_side(capture, rows, samples))
        first, gradient = False, following
    if sums:
        names = list(sums)
        checks.later(torch.stack(list(sums.values())), lambda totals: _require_finite(names, totals, place))
    summary.samples += samples
    summary.weight += samples if weights is None else weights.total
    summary.outputs = outputs[0].numel()
    if targets is None or summary.log_likelihood is None:
        summary.log_likelihood = None
    elif weights is None:
        checks.later(likelihood.log_prob(outputs, targets), summary.add_log_likelihood)
    else:
        checks.later(weights.log_prob(likelihood, outputs, targets), summary.add_log_likelihood)


def batch_weights(likelihood: Likelihood, outputs: Tensor, batch: Batch, place: str) -> SampleWeights | None:
    """The weights of a batch of the loader, the error of a wrong shape with the batch's number."""
    try:
        return weights_of(likelihood, outputs, batch)
    except PosthocUQError as error:
        raise PosthocUQError(f"Batch {place}: {error}") from None


def no_weight() -> PosthocUQError:
    """The error of data that count nothing."""
    return PosthocUQError(
        "The weights of all samples are 0, so that no data are left; give some a positive one."
    )


def _check_targets(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, place: str, checks: Checks
) -> None:
    """Refuse targets that do not fit: wrong shapes and types now, wrong values when the checks are looked at."""

    def named(check: Callable[[Tensor, Tensor | None], Any]) -> Any:
        try:
            return check(outputs, targets)
        except PosthocUQError as error:
            raise PosthocUQError(f"Batch {place}: {error}") from None

    fault = named(likelihood.fault)
    if fault is not None:
        checks.later(fault, lambda faulty: named(likelihood.check) if bool(faulty) else None)


def _feed(
    accumulators: Mapping[str, Sequence[Accumulator]],
    settings: SweepSettings,
    sums: dict[str, Tensor],
    first_pass: bool,
    rows: dict[str, Tensor] | None,
    weights: SampleWeights | None,
) -> Callable[[LayerGradients], None]:
    dtype = settings.dtype
    apart = settings.by_position if settings.fisher == "mc" and rows is None else None

    def sink(layer_gradients: LayerGradients) -> None:
        name = layer_gradients.layer.name
        activations, gradients = layer_gradients.operands(dtype)
        check = gradients.sum()
        if first_pass:
            check = check + sum(call.input.detach().sum(dtype=dtype) for call in layer_gradients.calls)
        counts = weights
        if name == apart:
            counts = None if weights is None else weights.repeated(activations.positions)
            activations, gradients = Rows(positions_apart(activations.rows())), positions_apart(gradients)
        sums[name] = check if name not in sums else sums[name] + check
        for accumulator in accumulators.get(name, ()):
            accumulator.add(activations, gradients, first_pass, counts)
        if rows is not None:
            rows[name] = activations.gradients(gradients, CPU_TEMPORARY).flatten(1)

    return sink


def _require_outputs(total: Tensor, outputs: Tensor, place: str) -> None:
    if not bool(torch.isfinite(total)) and not bool(torch.isfinite(outputs).all()):
        raise _not_finite(f"Batch {place}: the model's outputs are not finite.")


def _require_finite(names: Sequence[str], sums: Tensor, place: str) -> None:
    # A backward pass goes from the last layer to the first, so the first layer that is not finite is the cause.
    for name, finite in zip(names, torch.isfinite(sums).tolist(), strict=True):
        if not finite:
            raise _not_finite(f"Batch {place}: layer '{name}' has non-finite activations or gradients.")


def _side_by_side(capture: Capture, rows: dict[str, Tensor], samples: int) -> Tensor:
    columns: list[Tensor] = []
    reference = next(iter(rows.values()))
    for name, tracked in capture.tracked.items():
        columns.append(rows[name] if name in rows else reference.new_zeros(samples, tracked.layer.parameters))
    return torch.cat(columns, dim=1)


def _not_finite(message: str) -> NonFiniteError:
    return NonFiniteError(message + " Check the input data and the model's weights for NaN or infinity.")
