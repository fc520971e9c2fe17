"""One fit under way: its sweeps and the stages that follow from them, over several processes and interruptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.content import WORD, Content
from posthoc_uq.curvature.dryrun import Prepared
from posthoc_uq.curvature.statistics import Accumulator, JointFisher
from posthoc_uq.curvature.sweep import Observer, Summary, SweepSettings, show, sweep
from posthoc_uq.devices import placed
from posthoc_uq.distributed import add_up, gather, hand_out, rank, together, world
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.inference.checkpoint import Checkpoint, Stage, Tensors, other_data
from posthoc_uq.inference.labels import FisherChoice, of_all, own_samples_of, resolve_fisher
from posthoc_uq.inference.resumable import check_same
from posthoc_uq.layers import Layer
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import return_freed_memory
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.warned import warn_user


@dataclass
class Task:
    """What a method is given: the model and its data, how to sweep over them, and what the sweeps gave besides the
    statistics.

    Attributes:
        model: the user's; it is read, never changed.
        prepared: the layers that get a posterior, and the capture of their gradients where the method asked for it.
        loader: the training data of this process.
        batch: the first of it.
        settings: of every sweep: how batches are read, the likelihood, the labels of the Fisher, the seed.
        device: of the model and of all statistics.
        memory_budget: bytes that one temporary may take.
        val_loader: held-out batches, if there are any.
        checkpoint: where a stage's result is kept, if that was asked for.
        summary: what the last sweep saw.
        seconds: that each part took, by its description.
        observers: are shown all the data once, by the first sweep that goes over all of them.
        observed: whether they were.
        known: the hash of all samples, with their targets, as the stages saw them that were not computed here but taken
            from a checkpoint; None without these.
    """

    model: nn.Module
    prepared: Prepared
    loader: Iterable[Any]
    batch: Batch
    settings: SweepSettings
    device: torch.device
    memory_budget: int
    val_loader: Iterable[Any] | None = None
    checkpoint: Checkpoint | None = None
    summary: Summary = field(default_factory=Summary)
    seconds: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    observers: list[Observer] = field(default_factory=lambda: list[Observer]())
    observed: bool = False
    known: int | None = None

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers to fit."""
        return self.prepared.layers

    def take_labels(self, fisher: FisherChoice, n_samples: int) -> None:
        """Settle which labels the Fisher of the sweeps is an expectation over.

        Args:
            fisher: as a method was asked for; ``"auto"`` goes by the numbers of outputs and samples.
            n_samples: labels drawn per sample, where they are drawn.
        """
        samples = None
        if fisher == "auto":
            reader, batch = self.settings.reader, self.batch
            samples = of_all(
                together(lambda: own_samples_of(self.loader, reader, batch), "counting the samples")
            )
        kind, labels = resolve_fisher(
            fisher, n_samples, self.prepared.outputs, samples, self.settings.likelihood
        )
        self.settings = replace(self.settings, fisher=kind, n_samples=labels)

    def stage(self, name: str, work: Callable[[], Tensors]) -> Tensors:
        """Do a part of the fit, or take its result from where it was done already: the checkpoint, or that of another
        rank which came further.
        """
        own = self.checkpoint.stages.get(name) if self.checkpoint is not None else None
        done = gather(None if own is None else own.summary)
        ahead = [number for number, summary in enumerate(done) if summary is not None]
        if ahead:
            tensors = hand_out(None if own is None else own.tensors, ahead[0], torch.device("cpu"))
            tensors = {
                a: {b: placed(t, self.device) for b, t in group.items()} for a, group in tensors.items()
            }
            self.summary = done[ahead[0]]
            self.known = self.summary.content or self.known
        else:
            # The order in memory decides how products are rounded, so it must be as it comes out of a file.
            found = together(lambda: _finite(work(), name), name)
            tensors = {a: {b: t.contiguous() for b, t in group.items()} for a, group in found.items()}
        if (
            self.checkpoint is not None and None in done
        ):  # every rank takes part, whether it has something to write
            checkpoint, stage = self.checkpoint, Stage(tensors, self.summary)
            write = (lambda: checkpoint.finish(name, stage)) if own is None else (lambda: None)
            together(write, f"writing the checkpoint after {name}")
        return tensors

    def sweep(
        self,
        accumulators: Mapping[str, Sequence[Accumulator]],
        description: str,
        *,
        joint: JointFisher | None = None,
        share: float = 1.0,
    ) -> int:
        """Sweep once; returns the number of samples swept over, in all processes.

        Raises:
            PosthocUQError: the loader gave another number of samples than in the sweep before, other samples than
                those that the checkpoint was made from, or none of the share.
        """
        start = time.perf_counter()
        sums = {
            f"{name}/{index}": accumulator.state()
            for name, own in accumulators.items()
            for index, accumulator in enumerate(own)
        }
        if joint is not None:
            sums["joint/0"] = joint.state()
        return_freed_memory()  # of the dry run, of the sweep before
        summary = together(
            lambda: self._sweep(accumulators, joint, share, description, sums), f"the sweep for {description}"
        )
        add_up({(a, b): tensor for a, group in sums.items() for b, tensor in group.items()})
        repetitive = all(gather(summary.repetitive))
        summary = _merged(summary)
        if self.summary.seen and summary.seen != self.summary.seen:
            raise PosthocUQError(
                f"The loader gave {self.summary.seen} samples in the first sweep and {summary.seen} in the next; "
                f"it must give the same data every time."
            )
        self.check_content(summary.content)
        if summary.samples == 0:
            raise PosthocUQError(
                f"basis_fraction={share} picks none of the {summary.seen} samples; give a larger one."
            )
        if self.settings.fisher == "mc" and repetitive and not self.summary.seen:
            warn_user(
                "Most inputs are copies of others. A drawn label (fisher='mc') belongs to its input, so that copies "
                "share one and the Fisher is noisier than the number of samples suggests; use fisher='exact'."
            )
        self.summary = summary
        self.observed = self.observed or share == 1
        self.seconds[description] = time.perf_counter() - start
        return summary.samples

    def _sweep(
        self,
        accumulators: Mapping[str, Sequence[Accumulator]],
        joint: JointFisher | None,
        share: float,
        description: str,
        sums: Tensors,
    ) -> Summary:
        checkpoint, done = self.checkpoint, None
        left = checkpoint.interrupted(description) if checkpoint is not None else None
        if checkpoint is not None and left is not None:
            done = left[0]
            with checkpoint.read_as_corrupt():
                check_same("its sums", left[1], sums)
            for name, group in sums.items():
                for inner, tensor in group.items():
                    tensor.copy_(left[1][name][inner])

        def after_batch(summary: Summary) -> None:
            if checkpoint is not None:
                checkpoint.after_batch(description, summary, sums)

        with isolated_random_state(self.settings.seed):
            return sweep(
                self.prepared.capture,
                self.loader,
                self.settings,
                accumulators,
                joint=joint,
                share=share,
                description=description,
                done=done,
                after_batch=after_batch,
                observers=() if self.observed or share < 1 else self.observers,
            )

    def check_content(self, content: int) -> None:
        """Refuse data that are not those of the stages which were taken from a checkpoint.

        Args:
            content: the hash of all samples, of all processes, with their targets.

        Raises:
            PosthocUQError: they are not.
        """
        if self.known not in (None, content):
            raise other_data()

    def observe(self) -> None:
        """Show the data to the observers in a pass of its own, where no sweep of this process went over all of them: a
        resumed fit begins after its sweeps, and a training has none.
        """
        if self.observed or not self.observers:
            return

        content = Content()

        def work() -> None:
            with isolated_random_state(self.settings.seed):
                show(self.prepared.capture, self.loader, self.settings, [*self.observers, content])

        together(work, "looking at the data")
        self.check_content(sum(gather(content.total)) % WORD)
        self.observed = True

    def timed(self, description: str, work: Callable[[], Any]) -> Any:
        """Do the work and note how long it took."""
        start = time.perf_counter()
        result = work()
        self.seconds[description] = time.perf_counter() - start
        return result

    def divided(self, work: Mapping[str, Callable[[], dict[str, Tensor]]], description: str) -> Tensors:
        """Results by name, each computed by one of the processes and handed to the others."""

        def compute() -> Tensors:
            mine = [name for index, name in enumerate(work) if index % world() == rank()]
            found = together(lambda: {name: work[name]() for name in mine}, description)
            for index, name in enumerate(work):
                source = index % world()
                own = {name: found[name]} if name in found else None
                found[name] = hand_out(own, source, self.device)[name]
            return {name: found[name] for name in work}

        return self.timed(description, compute)


def _finite(found: Tensors, stage: str) -> Tensors:
    """What a stage computed.

    Raises:
        NonFiniteError: some of it is not finite; names the layer.
    """
    for layer, tensors in found.items():
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(
                    f"The {name.replace('_', ' ')} of '{layer}' ({stage}) is not finite: inputs or gradients are too "
                    f"large for {str(tensor.dtype).removeprefix('torch.')}. Bring the inputs to about unit size, or "
                    f"fit with dtype=torch.float64."
                )
    return found


def check_common(identity: Mapping[str, Any]) -> None:
    """Make sure that all processes do the same fit.

    Raises:
        PosthocUQError: they do not; names what differs.
    """
    found = gather(dict(identity))
    for number, other in enumerate(found):
        for name, value in found[0].items():
            if other[name] != value:
                raise PosthocUQError(
                    f"Rank {number} has another {name} than rank 0 ({other[name]!r:.200}, and {value!r:.200}); all "
                    f"processes must hold the same model and ask for the same fit."
                )


def _merged(summary: Summary) -> Summary:
    """What the sweeps of all processes saw.

    Raises:
        PosthocUQError: two of them saw the same data.
    """
    found: list[Summary] = gather(summary)
    contents = [(one.content, one.seen) for one in found if one.seen]
    if len(set(contents)) < len(contents):
        raise PosthocUQError(
            "Several processes were given the same data, which would count them several times; give each a part of "
            "its own, for instance with torch.utils.data.DistributedSampler."
        )
    likelihoods = [one.log_likelihood for one in found]
    return Summary(
        batches=sum(one.batches for one in found),
        seen=sum(one.seen for one in found),
        samples=sum(one.samples for one in found),
        log_likelihood=sum(v for v in likelihoods if v is not None) if None not in likelihoods else None,
        outputs=max(one.outputs for one in found),
        content=sum(one.content for one in found) % WORD,
    )
