"""One running fit: its passes over the data, shared by several processes and resumed after interruptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Bar, Batch, BatchReader, Readings, count_samples, known_length
from posthoc_uq.core.devices import full_precision
from posthoc_uq.core.distributed import all_reduce_sum, broadcast, gather, on_all_ranks, rank, world
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.numerics import all_finite
from posthoc_uq.core.outputs import Output
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.features import FeatureSource
from posthoc_uq.curvature.labels import FisherChoice, own_samples_of, resolve_fisher, samples_in_all
from posthoc_uq.curvature.statistics import Accumulator, JointFisher
from posthoc_uq.curvature.sweep import (
    WORD,
    DataHash,
    Observer,
    Sweep,
    SweepTotals,
    no_weight_error,
    own_batches,
    run_observers,
)
from posthoc_uq.layers.capture import Capture
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import Prepared, Selection
from posthoc_uq.layers.rules import Lookup
from posthoc_uq.likelihoods import Fisher, Likelihood
from posthoc_uq.methods.checkpoint import Checkpoint, State
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.features import FeatureStatistics
from posthoc_uq.posteriors.history import History
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Evidence, Hyperparameters

Tensors = dict[str, dict[str, Tensor]]
"""By the name of a layer or block, and by their own."""


LARGE_EMBEDDING = 4096
"""Rows of an embedding above which it has a diagonal posterior, whatever the method: a Kronecker factor would be too
large, and few of its rows occur in a batch."""


class NothingPickedError(PosthocUQError):
    """A share of the samples holds none of them.

    Attributes:
        seen: how many samples there were.
    """

    def __init__(self, share: float, seen: int) -> None:
        super().__init__(f"basis_fraction={share} picks none of the {seen} samples; give a larger one.")
        self.seen = seen


def wrong_length(claimed: int, seen: int, consequence: str) -> None:
    """Warn of a loader whose length is not the number of its batches, where something was chosen by it."""
    warn_user(
        f"The loader's length, len(loader), stands for about {claimed:,} samples, and it gave {seen:,}. {consequence} "
        f"Give it the number of its batches as length, or none."
    )


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """What a call asks of a model and its data, once it is checked.

    Attributes:
        model: the user's, out of its wrappers.
        loader: the data of this process.
        val_loader: held-out data, if there are any.
        reader: of the batches.
        likelihood: of the targets, with its noise variance, if known.
        by_name: whether it was given by its name alone, so that its parameters are its defaults, and the labels' shape
            says where classes are.
        layers: those that are to get a posterior.
        output: which part of what the model returns its outputs are; None to find it, or for that of a view.
        seed: of all random numbers.
        dtype: of the statistics.
        memory_budget: bytes that one temporary may take.
        progress: whether bars are shown.
    """

    model: nn.Module
    loader: Iterable[Any]
    val_loader: Readings | None = None
    reader: BatchReader
    likelihood: Likelihood
    by_name: bool = False
    layers: Selection
    output: Output | None = None
    seed: int
    dtype: torch.dtype
    memory_budget: int
    progress: bool


@dataclass
class Task:
    """What a method works with: the model, its data, how to sweep over them, and what a sweep reports besides the
    statistics.

    Attributes:
        plan: what was asked.
        model: the user's model with its outputs chosen; it is read, never changed.
        prepared: the layers that get a posterior, and the capture of their gradients where the method asked for it.
        loader: the data of this process, every reading of which is compared with the first.
        batch: the first batch of `loader`.
        likelihood: that of the plan, with what the data say of it: where its classes are, its noise variance.
        features: where the last layer's features come from, if it has any.
        fisher: which labels the Fisher of the sweeps is an expectation over; see `take_labels`.
        n_samples: labels drawn per sample, where they are drawn.
        checkpoint: the file from which the fit goes on after an interruption, if there is one.
        summary: what the last sweep saw.
        restored: whether that came from the checkpoint.
        seconds: how long each part took, by its description.
        observers: see all the data once, in the first sweep that goes over all of them.
        observed: whether they have.
        for_evidence: whether the evidence will be asked for.
    """

    plan: TaskPlan
    model: nn.Module
    prepared: Prepared
    loader: Readings
    batch: Batch
    likelihood: Likelihood
    features: FeatureSource | None
    fisher: Fisher = "mc"
    n_samples: int = 1
    checkpoint: Checkpoint | None = None
    summary: SweepTotals = field(default_factory=SweepTotals)
    restored: bool = False
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    observers: list[Observer] = field(default_factory=list[Observer])
    observed: bool = False
    for_evidence: bool = True
    _batches: int | None = None  # of one pass, once they were counted

    @property
    def device(self) -> torch.device:
        """Of the model and of all statistics."""
        return self.plan.reader.device

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers to fit."""
        return self.prepared.layers

    @property
    def factored(self) -> dict[str, Layer]:
        """Those of them that can have Kronecker factors: large embeddings have a diagonal alone."""
        return {
            name: layer
            for name, layer in self.layers.items()
            if layer.kind != Lookup.kind or layer.inputs <= LARGE_EMBEDDING
        }

    def take_labels(self, fisher: FisherChoice, n_samples: int, joint: bool = False) -> None:
        """Settle which labels the Fisher of the sweeps is an expectation over.

        Args:
            fisher: as the user asked; ``"auto"`` depends on the numbers of outputs and samples.
            n_samples: labels drawn per sample, where they are drawn.
            joint: whether the Fisher is that of all layers together.
        """
        samples, positions = None, 1 if joint else self._separate_positions()
        if fisher == "auto":
            samples = self.samples_in_all
        likelihood = self.likelihood
        has_targets = all(gather(self.batch.targets is not None, "looking for targets"))
        kind, labels = resolve_fisher(
            fisher,
            n_samples,
            self.prepared.outputs,
            samples,
            likelihood,
            has_targets,
            positions,
            self.for_evidence,
        )
        if fisher == "auto" and kind == "empirical":
            warn_user(
                f"Likelihood {likelihood.name!r} has neither draw nor exact_factors, so the Fisher takes the data's "
                f"own targets (fisher='empirical'), which is less accurate for a model far from its targets; give it a "
                f"method draw(outputs, keys, draw)."
            )
        self.fisher, self.n_samples = kind, labels

    @cached_property
    def samples_in_all(self) -> int | None:
        """How many samples the loaders of all processes hold; None where one of them does not say."""
        with on_all_ranks("counting the samples"):
            own = own_samples_of(self.loader, self.plan.reader, self.batch)
        return samples_in_all(own)

    def length_was_wrong(self, seen: int) -> bool:
        """Whether the number of samples by the loader's length is off by a batch or more, once so many were seen."""
        claimed = self.samples_in_all
        if claimed is None or self.batch.whole or self.plan.reader.skips_missing:
            return False
        return abs(claimed - seen) >= world() * count_samples(self.batch)

    @property
    def _by_position(self) -> str | None:
        """The layer whose outputs at a position are the model's there, if there is one; see `Sweep`."""
        return self.features.layer.name if self.features is not None and self.features.pointwise else None

    def _separate_positions(self) -> int:
        """Positions of a sample, where all layers to fit take each as a sample of its own; else 1."""
        if self.features is None or list(self.layers) != [self._by_position]:
            return 1
        return max(1, self.prepared.outputs // self.features.outputs)

    def part(self, name: str, work: Callable[[], tuple[Tensors, State]]) -> tuple[Tensors, State]:
        """The tensors and the plain values that a part of the fit computes in all processes: from the checkpoint of
        this rank, or of one that came further, or by doing the work.
        """
        checkpoint = self.checkpoint
        if checkpoint is None:
            return work()
        reading = f"looking for a checkpoint of {name}"
        with on_all_ranks(reading):
            saved = checkpoint.finished(name)
        values: list[State | None] = gather(None if saved is None else saved[1], reading)
        ranks = [number for number, found in enumerate(values) if found is not None]
        if ranks:
            here = None if saved is None else saved[0]
            tensors = broadcast(here, ranks[0], torch.device("cpu"), f"handing out {name}")
            result: tuple[Tensors, State] = tensors, values[ranks[0]] or {}
        else:
            result = work()
        if None in values:
            with on_all_ranks(f"writing the checkpoint after {name}"):  # also those with nothing to write
                if saved is None:
                    checkpoint.finish(name, *result)
        return result

    def sweep(
        self,
        accumulators: Mapping[str, Sequence[Accumulator]],
        description: str,
        *,
        joint: JointFisher | None = None,
        share: float = 1.0,
    ) -> float:
        """Sweep once; returns the sum of the weights of the samples swept over, in all processes: their number where
        they have no weights. Means over the samples are sums divided by it.

        Args:
            accumulators: by the name of their layer.
            description: what the sweep is for: its name in progress bars, reports and the checkpoint, which no other
                sweep of the fit has.
            joint: takes the gradients of all layers together.
            share: of the samples that are swept over, in (0, 1].

        Raises:
            PosthocUQError: the loader gave another number of samples than in the last sweep, or other data than those
                that the checkpoint was made from; none are of the share, or all weights are 0.
        """
        if description in self.seconds:  # a checkpoint would take the one for the other
            raise ValueError(
                f"Two sweeps of one fit are called {description!r}; give each a name of its own."
            )
        plan = self.plan
        sweep = Sweep(
            self.prepared.capture,
            accumulators,
            joint=joint,
            likelihood=self.likelihood,
            fisher=self.fisher,
            n_samples=self.n_samples,
            seed=plan.seed,
            dtype=plan.dtype,
            share=share,
            by_position=self._by_position,
            weighted=self.batch.weights is not None,
            compared=self.checkpoint is not None or world() > 1,
            observers=() if self.observed or share < 1 else self.observers,
        )
        with self.timed(description):
            if self.checkpoint is None:
                self._run_through(sweep, share, description)
            else:
                self._take_or_run(sweep, share, description, self.checkpoint)
        self.summary = sweep.summary
        return self.summary.weight

    def _take_or_run(self, sweep: Sweep, share: float, description: str, checkpoint: Checkpoint) -> None:
        """Take the results of a sweep from the checkpoint, or else run it."""

        def work() -> tuple[Tensors, State]:
            self._run_through(sweep, share, description)
            return sweep.sums, sweep.summary.state_dict()

        sums, summary = self.part(description, work)
        self.restored = sums is not sweep.sums
        if self.restored:
            with checkpoint.reading(f"its sums for {description} are of another kind"):
                sweep.restore({"sums": sums, "summary": summary})

    def _run_through(self, sweep: Sweep, share: float, description: str) -> None:
        """Show a sweep the data of this process, and add up what those of all processes saw."""
        plan, checkpoint = self.plan, self.checkpoint
        with on_all_ranks(f"the sweep for {description}"):
            state = None if checkpoint is None else checkpoint.take_running(description)
            if checkpoint is not None and state is not None:
                with checkpoint.reading(f"its state of the sweep for {description} is of another kind"):
                    sweep.resume(state)
            bar = Bar(
                self.loader, f"{description}, {len(self.prepared.capture.tracked)} layers", plan.progress
            )
            with isolated_random_state(plan.seed), full_precision(), bar:
                for batch, samples in own_batches(self.loader, plan.reader):
                    sweep.add(batch, samples)
                    bar.advance(samples)
                    if checkpoint is not None and sweep.resumable:
                        checkpoint.after_batch(description, sweep.state)
                sweep.finish()
        all_reduce_sum(
            {(a, b): tensor for a, group in sweep.sums.items() for b, tensor in group.items()},
            f"the sum for {description}",
        )
        drawn = self.fisher == "mc" and not self.summary.seen
        repetitive = drawn and all(gather(sweep.summary.repetitive, f"the sum for {description}"))
        sweep.summary = _merged(sweep.summary)
        self._check_seen(sweep.summary, share)
        if repetitive:
            warn_user(
                "Most inputs are copies of others. A drawn label (fisher='mc') belongs to its input, so that copies "
                "share one and the Fisher is noisier than the number of samples suggests; use fisher='exact'."
            )
        self.observed = self.observed or share == 1

    def _check_seen(self, summary: SweepTotals, share: float) -> None:
        """Refuse what a sweep saw of the data where it is not what the last one saw, or nothing."""
        if self.summary.seen and summary.seen != self.summary.seen:
            raise PosthocUQError(
                f"The loader gave {self.summary.seen} samples in the first sweep and {summary.seen} in the next; "
                f"it must give the same data every time."
            )
        if self.restored:
            self._check_content(summary.content)
        if summary.samples == 0:
            raise NothingPickedError(share, summary.seen)
        if summary.weight == 0:
            raise no_weight_error()

    def count(self, shown: Callable[[int, Batch], None] | None = None) -> int:
        """The samples of the data, by one pass without the model; the number and the arguments of every batch are shown
        to a function if there is one.

        Raises:
            PosthocUQError: all weights are 0.
        """
        samples, counted = 0, False
        bar = Bar(self.loader, "counting" if shown is None else "context", self.plan.progress)
        with isolated_random_state(self.plan.seed), bar:
            for index, (batch, count) in enumerate(own_batches(self.loader, self.plan.reader)):
                if shown is not None:
                    shown(index, batch)
                samples, self._batches = samples + count, index + 1
                counted = counted or batch.weights is None or bool((batch.weights > 0).any())
                bar.advance(count)
        if samples and not counted:
            raise no_weight_error()
        return samples

    def batches_of(self, samples: int) -> int:
        """The batches of one pass over so many samples, by the loader's length, or else by its first batch."""
        by_first = ceil(samples / max(1, count_samples(self.batch)))
        known = known_length(self.loader)
        if self._batches is not None and known and not self.batch.whole:
            return self._batches  # a length may be wrong
        return known or by_first

    def posterior(
        self,
        method: str,
        blocks: Mapping[str, Block],
        evidence: Evidence,
        notes: dict[str, Any],
        *,
        members: Mapping[str, list[str]] | None = None,
        likelihood: Likelihood | None = None,
        trained_mean: Mapping[str, Tensor] | None = None,
        settings: Hyperparameters | None = None,
    ) -> Posterior:
        """The posterior of a fit, which knows its model.

        Args:
            method: its name.
            blocks: by name.
            evidence: what was seen of the data.
            notes: lines of the report.
            members: the layers of every block; by default each is that of one layer.
            likelihood: with its parameters, where these are not those of the start.
            trained_mean: the means that were trained, by parameter.
            settings: hyperparameters, where they are not the usual ones at the start.
        """
        return Posterior(
            method,
            self.layers,
            blocks,
            {name: [name] for name in self.layers} if members is None else members,
            {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            likelihood or self.likelihood,
            evidence,
            History(notes, {use.name: use.reason for use in self.prepared.table if use.reason is not None}),
            trained_mean=trained_mean,
            settings=settings,
            model=self.model,
            proof=self.prepared.proof,
        )

    def observe(self) -> None:
        """Show the data to the observers in an extra pass, unless a sweep did so: a resumed fit may begin after its
        sweeps, and a training has none.
        """
        if self.observed or not self.observers:
            return
        content = DataHash()

        self.show(self.prepared.capture, [*self.observers, content], "looking at the data")
        total = sum(gather(content.total, "comparing the data")) % WORD
        if self.restored:
            self._check_content(total)
        self.observed = True

    def show(self, capture: Capture, observers: Sequence[Observer], doing: str) -> None:
        """Show all data of this process to observers, by a pass of its own."""
        plan = self.plan
        with on_all_ranks(doing), isolated_random_state(plan.seed):
            run_observers(
                capture, self.loader, plan.reader, observers, seed=plan.seed, progress=plan.progress
            )

    def _check_content(self, content: int) -> None:
        """Refuse data of all processes that are not those of the last sweep, which came from the checkpoint."""
        if content != self.summary.content:
            if self.checkpoint is not None:
                self.checkpoint.drop_running()  # sums of both data
            raise PosthocUQError(
                "The data are not those that the checkpoint was made from, so the fit cannot go on from it; pass the "
                "same data, or delete the checkpoint."
            )

    @contextmanager
    def timed(self, description: str) -> Generator[None]:
        """A context of a part of the fit, of which is noted how long it took."""
        start = time.perf_counter()
        yield
        self.seconds[description] = time.perf_counter() - start

    def distribute(self, work: Mapping[str, Callable[[], dict[str, Tensor]]], description: str) -> Tensors:
        """Results by name, each computed by one of the processes and handed to the others."""
        own_names, results = list(work)[rank() :: world()], Tensors()
        bar = Progress(description, "layers", self.plan.progress, len(own_names))
        with self.timed(description):
            with on_all_ranks(description), bar:
                for name in own_names:
                    # of one order in memory in all processes: it decides how products are rounded
                    results[name] = {key: tensor.contiguous() for key, tensor in work[name]().items()}
                    bar.advance()
            checked_finite(results, description)
            for index, name in enumerate(work):
                own_result = {name: results.pop(name)} if name in results else None
                results |= broadcast(own_result, index % world(), self.device, description)
        return results


def checked_finite(results: Tensors, part: str) -> Tensors:
    """The results of a part of the fit, by layer, once they are checked.

    Raises:
        NonFiniteError: a number is not finite; names the layer.
    """
    for layer, tensors in results.items():
        for name, tensor in tensors.items():
            if not all_finite(tensor):
                raise NonFiniteError(
                    f"The {name.replace('_', ' ')} of '{layer}' ({part}) is not finite: inputs or gradients are too "
                    f"large for {str(tensor.dtype).removeprefix('torch.')}. Bring the inputs to about unit size, or "
                    f"fit with dtype=torch.float64."
                )
    return results


def _merged(summary: SweepTotals) -> SweepTotals:
    """The summary of the sweeps of all processes.

    Raises:
        PosthocUQError: two of them saw the same data.
    """
    summaries: list[SweepTotals] = gather(summary, "comparing the data")
    if len(summaries) == 1:
        return replace(summary, keys=set[int](), digest=0)  # as that of several, which have no common order
    contents = [(part.content, part.seen) for part in summaries if part.seen]
    if len(set(contents)) < len(contents):
        raise PosthocUQError(
            "Several processes were given the same data, which would count them several times; give each a part of "
            "its own, for instance with torch.utils.data.DistributedSampler."
        )
    likelihoods = [part.log_likelihood for part in summaries]
    counts = [part.targets for part in summaries if part.targets is not None]
    return SweepTotals(
        batches=sum(part.batches for part in summaries),
        seen=sum(part.seen for part in summaries),
        samples=sum(part.samples for part in summaries),
        weight=sum(part.weight for part in summaries),
        log_likelihood=sum(v for v in likelihoods if v is not None) if None not in likelihoods else None,
        outputs=max(part.outputs for part in summaries),
        targets=[sum(own) for own in zip(*counts, strict=True)] or None,
        content=sum(part.content for part in summaries) % WORD,
    )


# The statistics of the last layer's inputs, by which novelty goes: from the first sweep of a fit, or from a pass at its
# end.

_NO_FEATURES = "by the posterior itself, top class: no layer with one row a sample comes last"


def watch_features(task: Task) -> FeatureStatistics | None:
    """Let the sweeps of a fit show the data to new feature statistics; None without a layer that has features."""
    source, sources = task.features, gather(task.features, "looking for features")
    if source is None or any(other != source for other in sources):
        return None
    task.prepared.capture.watched = source.watched
    statistics = FeatureStatistics(source, task.likelihood, task.device, task.plan.memory_budget)
    task.observers.append(statistics)
    return statistics


def with_features(task: Task, statistics: FeatureStatistics | None, posterior: Posterior) -> Posterior:
    """A Laplace posterior with the feature statistics of all data, by an extra pass where no sweep showed the data."""
    if statistics is None:
        return _without_features(posterior)
    task.observe()
    return posterior.replaced(features=statistics.result(task.plan.dtype))


def _without_features(posterior: Posterior) -> Posterior:
    history = replace(posterior.history.noted(fit={"novelty": _NO_FEATURES}), novelty="posterior")
    return posterior.replaced(history=history)


def with_trained_features(task: Task, posterior: Posterior, network: nn.Module) -> Posterior:
    """A trained posterior with the feature statistics of the network that it predicts with, by one pass over the data,
    unless its method has kept them.
    """
    source = task.features
    if posterior.features is not None:
        return posterior
    if source is None:
        return _without_features(posterior)
    statistics = FeatureStatistics(source, task.likelihood, task.device, task.plan.memory_budget)
    capture = Capture(network)
    capture.watched = source.watched
    task.show(capture, [statistics], "the novelty's statistics")
    return posterior.replaced(features=statistics.result(task.plan.dtype))
