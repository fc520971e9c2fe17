"""The training loop of variational methods, and its optimisers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import ceil, cos, inf, isfinite, pi
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posthoc_uq.core.batches import LOADER, Batch, BatchReader, batches, explained, known_length
from posthoc_uq.core.devices import DeferredChecks, as_double, host_double
from posthoc_uq.core.distributed import world
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.options import Count, Natural, Options, Positive
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.curvature.sweep import batch_hash, other_batches
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import labelled, mean_of_labels
from posthoc_uq.methods.checkpoint import Checkpoint, State, load_tensors
from posthoc_uq.methods.method import Method
from posthoc_uq.methods.task import Task
from posthoc_uq.methods.trained import batches_of
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Evidence, History, Hyperparameters, LayerPriors

# The default optimiser and its schedule.


def cosine(progress: float, floor: float = 0.05) -> float:
    """From 1 down to `floor` as `progress` goes from 0 to 1: the default schedule of learning rates."""
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * min(1.0, progress)))


def adam(groups: list[dict[str, Any]]) -> Optimizer:
    """The default optimiser: Adam with betas (0.9, 0.99), fused where the device has that."""
    device = groups[0]["params"][0].device.type
    return torch.optim.Adam(
        groups, betas=(0.9, 0.99), eps=1e-8, fused=True if device in ("cpu", "cuda") else None
    )


# The training loop of the variational methods: any torch optimiser, progress, checkpoints, early stopping.
#
# What is trained is an `Objective`. All its randomness comes from the seed and the number of the step, and
# the order of the data from the seed and the number of the epoch, so that a run that was killed goes on to
# the same result.

Group = dict[str, Any]
OptimizerFactory = Callable[[list[Group]], Optimizer]

EPOCHS = 10  # where none are given
LEAST_STEPS = 4000  # of a training on few data where no epochs are given
FEW_SAMPLES = 50_000  # below which these count

TRAINING = "training"  # the name of this part of a fit
_DATA, _STEP = 101, 102  # streams of random numbers from the seed


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """The options that all training methods have in common.

    Attributes:
        epochs: passes over the data; by default 10, and below 50,000 samples as many more as 4,000 steps take, but no
            more than show half a million samples.
        lr: learning rate of the means.
        log_variance_lr: learning rate of the log variances.
        optimizer: a callable from parameter groups to a torch optimiser; Adam by default.
        schedule: a callable from progress in [0, 1) to a factor on the rates; a cosine down to 0.05 by default.
        clip: largest size of a gradient's entries; None for no limit.
        patience: epochs without a better validation NLL after which to stop.
        val_draws: draws of the weights for that NLL.
    """

    epochs: Natural | None = None
    lr: Positive = 1e-4
    log_variance_lr: Positive = 1e-3
    optimizer: OptimizerFactory | None = None
    schedule: Callable[[float], float] | None = None
    clip: Positive | None = 1.0
    patience: Count | None = None
    val_draws: Count = 10

    def optimiser_over(self, groups: list[Group]) -> Optimizer:
        """The optimiser of these groups, by default Adam."""
        return (self.optimizer or adam)(groups)

    def reach(self, steps: int, rate: float) -> float:
        """How far Adam can move a number in so many steps: by about its rate in each."""
        schedule = self.schedule or cosine
        return steps * rate * sum(schedule((i + 0.5) / 100) for i in range(100)) / 100

    @property
    def least_epochs(self) -> int:
        """The epochs that are given, or the fewest that are taken without."""
        return EPOCHS if self.epochs is None else self.epochs

    def epochs_over(self, samples: int, batches: int) -> int:
        """The epochs of a training on these data.

        The optimiser moves a number by about its rate a step, so it is steps that a training needs, not epochs.

        Args:
            samples: of the data.
            batches: of one epoch.
        """
        if self.epochs is not None:
            return self.epochs
        most = ceil(EPOCHS * FEW_SAMPLES / max(1, samples))  # no more passes of samples than large data take
        return max(EPOCHS, min(ceil(LEAST_STEPS / max(1, batches)), most))


@dataclass(frozen=True)
class Step:
    """The seed of a training step, and its place in the training.

    Attributes:
        seed: of all random numbers of the step.
        epoch: number of the epoch, from 0.
        batch: number of the batch in the epoch, from 0.
        batches: batches of an epoch; 0 while unknown.
        progress: the share of the training that is over, in [0, 1).
    """

    seed: int
    epoch: int = 0
    batch: int = 0
    batches: int = 0
    progress: float = 0.0


class Objective(ABC):
    """What is trained: named tensors, and a loss whose stochastic gradients can be computed for a batch.

    Args:
        likelihood: of the targets.
        samples: of the training data.
        noise_like: None for a noise variance that stays what it is; to train its logarithm with the rest, a tensor on
            the device and in the number format that it is to have.

    Raises:
        PosthocUQError: a noise is to be learned, and the likelihood has none.
    """

    def __init__(self, likelihood: Likelihood, samples: int, noise_like: Tensor | None = None) -> None:
        self.samples, self._likelihood = samples, likelihood
        self._log_noise: Tensor | None = None
        if noise_like is not None:
            if likelihood.noise_variance is None:
                raise PosthocUQError(
                    f"A noise variance can be learned with likelihood='regression', and {likelihood.name!r} has none."
                )
            self._log_noise = likelihood.noise_variance.log().to(noise_like.detach()).requires_grad_()

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The model; run alone after a step failed, to tell whether it accepts the batch at all."""

    @abstractmethod
    def groups(self) -> list[Group]:
        """The optimiser's parameter groups: ``params`` (leaf tensors), ``lr``, ``name``."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is trained, by name."""

    @abstractmethod
    def backward(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        """Add the gradients of one step's loss to the tensors' ``grad``; return the loss (``"loss"``) and its parts,
        scalars, for the record. Values that the host must see go to `checks`, which are looked at afterwards.
        """

    @abstractmethod
    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        """``log p(y | x)`` of held-out samples, ``(samples,)`` in nats, by as many draws, always the same."""

    def trained_mean(self) -> dict[str, Tensor] | None:
        """The means by parameter, if they were trained."""
        return None

    @property
    def learns_noise(self) -> bool:
        """Whether the noise variance is trained with the rest."""
        return self._log_noise is not None

    def noise(self) -> dict[str, Tensor]:
        """The logarithm of the noise variance by its name, if it is trained; a part of `tensors` and `groups`."""
        return {} if self._log_noise is None else {"log noise": self._log_noise}

    def likelihood(self) -> Likelihood:
        """With the noise as it is now."""
        if self._log_noise is None:
            return self._likelihood
        return self._likelihood.with_noise(host_double(self._log_noise.detach().exp()))

    def likelihood_in_training(self) -> Likelihood:
        """With a noise that gradients reach, if it is trained."""
        return (
            self._likelihood
            if self._log_noise is None
            else self._likelihood.with_noise(self._log_noise.exp())
        )

    def check_targets(self, outputs: Tensor, targets: Tensor, checks: DeferredChecks) -> None:
        """Refuse targets that do not fit the outputs: wrong shapes now, wrong values when `checks` are looked at."""
        fault = self._likelihood.fault(outputs, targets)
        if fault is not None:
            checks.add(
                fault, lambda faulty: self._likelihood.check(outputs, targets) if bool(faulty) else None
            )


@dataclass
class _Progress:
    """How far a training has come.

    Attributes:
        epoch: epochs that are finished.
        batch: batches of the present epoch that are done.
        step: steps that were taken.
        length: batches of an epoch; 0 while unknown.
        sums: of the losses over the samples of the present epoch, by name.
        samples: of the present epoch.
        seconds: that the present epoch took so far.
        history: one dictionary an epoch.
        best: number of the epoch whose tensors are kept; -1 without one.
        done: whether to stop before the last epoch.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    length: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    samples: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=lambda: list[dict[str, float]]())
    best: int = -1
    done: bool = False


def best_epoch(history: list[dict[str, float]]) -> int:
    """The number, from 1, of the epoch whose tensors a training ended with: that of the least validation NLL, or the
    last; what is not finite is never the least.
    """
    losses = [entry.get("validation NLL", inf) for entry in history]
    finite = [loss if isfinite(loss) else inf for loss in losses]
    return finite.index(min(finite)) + 1 if "validation NLL" in history[0] else len(history)


def train(
    objective: Objective,
    loader: Iterable[Any],
    reader: BatchReader,
    options: TrainingOptions,
    *,
    seed: int,
    val_loader: Iterable[Any] | None = None,
    checkpoint: Checkpoint | None = None,
    progress: bool = True,
) -> list[dict[str, float]]:
    """Train `objective` in place.

    With `val_loader` the tensors end as they were after the epoch with the least validation NLL, and the training stops
    after `patience` epochs without a better one.

    Args:
        objective: what is trained.
        loader: the training data.
        reader: reads its batches.
        options: of the training; `TrainingOptions.least_epochs` is how many epochs there are.
        seed: of all random numbers.
        val_loader: held-out data.
        checkpoint: keeps the state of the training, or holds the one to go on from.
        progress: whether to show a bar.

    Returns:
        One dictionary an epoch: the means of the loss and its parts over the epoch's samples, ``validation NLL`` with
        held-out data, ``seconds``.

    Raises:
        NonFiniteError: a loss or a gradient is not finite (names the step), or a trained tensor is not.
        PosthocUQError: the loader yields no targets, or other data than those that the checkpoint was made from.
    """
    run = _Run(objective, loader, reader, options, seed, val_loader, checkpoint)
    saved = None if checkpoint is None else checkpoint.take_running(TRAINING)
    if checkpoint is not None and saved is not None:
        with checkpoint.reading("its state of the training is of another kind"):
            run.load_state_dict(saved)
    with Progress("train", "samples", progress) as bar:
        while not run.finished:
            run.epoch(bar)
    run.take_best()
    broken = [name for name, tensor in objective.tensors().items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise NonFiniteError(f"The training ended with '{broken[0]}' not finite; lower the learning rates.")
    return run.progress.history


class _Run:
    def __init__(
        self,
        objective: Objective,
        loader: Iterable[Any],
        reader: BatchReader,
        options: TrainingOptions,
        seed: int,
        val_loader: Iterable[Any] | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._objective, self._loader, self._reader, self._options = objective, loader, reader, options
        self._seed, self._val_loader, self._checkpoint = seed, val_loader, checkpoint
        with isolated_random_state(seed):
            groups = objective.groups()
            self._optimiser = options.optimiser_over(groups)
        for group in self._optimiser.param_groups:
            group["initial_lr"] = group["lr"]
        self._schedule = options.schedule or cosine
        self._best: dict[str, Tensor] = {}
        self._last: Batch | None = None  # of which a step was taken
        self._resumed = False  # and no step was taken since
        self._resumed_at = 0  # hash of the last batch before the checkpoint was written
        self.progress = _Progress(length=known_length(loader))

    @property
    def finished(self) -> bool:
        return self.progress.done or self.progress.epoch >= self._options.least_epochs

    def state_dict(self) -> State:
        """All that the training goes on from; random numbers follow from the seed and the number of the step."""
        return {
            "progress": asdict(self.progress),
            "last batch": 0 if self._last is None else batch_hash(self._last),
            "tensors": self._objective.tensors(),
            "best": self._best,
            "optimiser": (type(self._optimiser).__name__, self._optimiser.state_dict()),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there.

        Raises:
            ValueError: the state is that of another training.
        """
        tensors = self._objective.tensors()
        load_tensors(tensors, state["tensors"])
        if state["best"]:
            self._best = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            load_tensors(self._best, state["best"])
        kind, of_optimiser = state["optimiser"]
        if kind != type(self._optimiser).__name__:
            raise ValueError(
                f"its optimiser is {kind}, and that of this fit {type(self._optimiser).__name__}"
            )
        _restore(self._optimiser, of_optimiser)
        self.progress, self._resumed_at = _Progress(**state["progress"]), state["last batch"]
        self._resumed = True

    def epoch(self, bar: Progress) -> None:
        """One epoch, or what is left of it."""
        progress, done, start = self.progress, self.progress.batch, time.perf_counter()
        seconds_before, seen = progress.seconds, 0
        bar.restart(f"epoch {progress.epoch + 1} of {self._options.least_epochs}")
        with isolated_random_state(mixed_seed(self._seed, _DATA, progress.epoch)):
            for batch in batches(self._loader, self._reader):
                samples = count_samples(batch)
                seen += 1
                bar.advance(samples)
                if seen <= done:
                    if seen == done and batch_hash(batch) != self._resumed_at:
                        raise other_batches()
                    continue
                self._step(batch, samples)
                progress.batch, self._last = seen, batch
                progress.seconds = seconds_before + time.perf_counter() - start
                bar.note(self._shown())
                if self._checkpoint is not None:
                    self._checkpoint.after_batch(TRAINING, self.state_dict)
        if seen < done:
            raise other_batches()
        progress.seconds = seconds_before + time.perf_counter() - start
        self._end_epoch(seen)
        if self.finished and self._checkpoint is not None:
            self._checkpoint.save(TRAINING, self.state_dict())

    def _step(self, batch: Batch, samples: int) -> None:
        progress = self.progress
        where = f"Step {progress.step} (epoch {progress.epoch + 1}, batch {progress.batch})"
        if batch.targets is None:
            raise PosthocUQError("This method trains on targets, and the loader yields inputs alone.")
        self._optimiser.zero_grad(set_to_none=True)
        checks, values = DeferredChecks(), dict[str, float]()
        with self._explained(batch, f"batch {progress.batch} of the loader"):
            terms = self._objective.backward(batch, self._present_step(), checks)
        gradients = [
            t.grad for group in self._optimiser.param_groups for t in group["params"] if t.grad is not None
        ]
        terms = terms | {"gradient": torch.stack([g.sum() for g in gradients]).sum()}
        for name, term in terms.items():
            checks.add(term, lambda value, name=name: values.update({name: float(value)}))
        checks.run()
        broken = [name for name, value in values.items() if not isfinite(value)]
        del values["gradient"]
        if len(broken) > 1 and "gradient" in broken:
            broken.remove("gradient")  # it only follows from a loss that is not finite
        if broken:
            raise NonFiniteError(
                f"{where}: the {' and the '.join(broken)} is not finite; lower the learning rates, or look at the data "
                f"and the starting variances."
            )
        if self._options.clip is not None:
            torch.nn.utils.clip_grad_value_(
                (t for group in self._optimiser.param_groups for t in group["params"]), self._options.clip
            )
        factor = self._schedule(self._progress())
        with self._reading_the_state():
            for group in self._optimiser.param_groups:
                group["lr"] = group["initial_lr"] * factor
            self._optimiser.step()
        self._resumed = False
        for name, value in values.items():
            progress.sums[name] = progress.sums.get(name, 0.0) + value * samples
        progress.samples += samples
        progress.step += 1

    def _reading_the_state(self) -> AbstractContextManager[None]:
        """For the first step after a resume: no optimiser looks at the names in its state before."""
        if self._checkpoint is None or not self._resumed:
            return nullcontext()
        return self._checkpoint.reading("the state of its optimiser is of another kind")

    def _explained(self, batch: Batch, what: str) -> AbstractContextManager[None]:
        return explained(lambda: self._objective.network, batch, what, LOADER)

    def _present_step(self) -> Step:
        progress = self.progress
        seed = mixed_seed(self._seed, _STEP, progress.step)
        return Step(seed, progress.epoch, progress.batch, progress.length, self._progress())

    def _progress(self) -> float:
        """How much of the training is over, in [0, 1)."""
        progress = self.progress
        part = min(progress.batch / progress.length, 1.0) if progress.length else 0.0
        return (progress.epoch + part) / self._options.least_epochs

    def _shown(self) -> dict[str, str]:
        return {name: f"{value / self.progress.samples:.4g}" for name, value in self.progress.sums.items()}

    def _end_epoch(self, length: int) -> None:
        progress = self.progress
        entry = {name: value / max(1, progress.samples) for name, value in progress.sums.items()}
        if self._val_loader is not None:
            entry["validation NLL"] = self._validate()
            losses = [past["validation NLL"] for past in progress.history if isfinite(past["validation NLL"])]
            if progress.best < 0 or entry["validation NLL"] < min(losses, default=inf):
                progress.best = progress.epoch
                self._best = {n: t.detach().clone() for n, t in self._objective.tensors().items()}
        entry["seconds"] = progress.seconds
        progress.history.append(entry)
        waited = progress.epoch - progress.best
        progress.done = (
            self._val_loader is not None
            and self._options.patience is not None
            and waited >= self._options.patience
        )
        progress.epoch, progress.batch, progress.length = progress.epoch + 1, 0, length
        progress.sums, progress.samples, progress.seconds = {}, 0, 0.0

    def _validate(self) -> float:
        """Mean negative log-likelihood of the held-out labels that count, in nats."""
        assert self._val_loader is not None
        total, count = 0.0, 0
        with torch.no_grad(), isolated_random_state(self._seed):
            for batch in batches(self._val_loader, replace(self._reader, batch_to_weights=None)):
                if batch.targets is None:
                    raise PosthocUQError("Early stopping needs targets; val_loader yields inputs alone.")
                with self._explained(batch, "a batch of val_loader"):
                    log_probabilities = self._objective.log_predictive(batch, self._options.val_draws)
                total -= float(as_double(log_probabilities).sum())
                count += labelled(self._objective.likelihood(), batch.targets)
        return mean_of_labels(total, count)

    def take_best(self) -> None:
        """Put the tensors of the best epoch back."""
        for name, tensor in self._objective.tensors().items():
            if name in self._best:
                tensor.detach().copy_(self._best[name])


def _restore(optimiser: Optimizer, state: State) -> None:
    """Give an optimiser over the same parameters this state."""
    optimiser.load_state_dict(state)
    # torch casts the state of a parameter to the parameter's precision, but not all of it has that precision
    for index, value in enumerate(t for group in optimiser.param_groups for t in group["params"]):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimiser.state[value][name]
            if isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimiser.state[value][name] = saved.to(loaded.device)


# The base of the methods that train.

Trained = TypeVar("Trained", bound=Objective)


@dataclass(frozen=True, kw_only=True)
class Training(TrainingOptions, Method, Generic[Trained]):
    """A method that optimises. The loop, learned noise, early stopping by held-out data, resuming and what a posterior
    says of its fit are written once, here.

    A subclass says what is trained (`begin`), and the blocks that come of it (`blocks`).

    Attributes:
        prior_precision: of the weights; None for the method's own.
    """

    weighs_samples: ClassVar[bool] = True
    default_prior: ClassVar[str] = "the default"
    """In words, for the report, which prior precision it takes where none is given."""

    prior_precision: float | None = None

    @property
    def trains(self) -> bool:
        return True

    @abstractmethod
    def begin(self, task: Task) -> Trained:
        """What is trained, at its start.

        Raises:
            PosthocUQError: options, data or model do not fit; the message says how to go on.
        """

    @abstractmethod
    def blocks(self, task: Task, trained: Trained) -> Mapping[str, Block]:
        """The blocks of the posterior after the training, by layer."""

    @abstractmethod
    def prior_of(self, trained: Trained) -> float | LayerPriors:
        """The prior precision that the training used."""

    def described(self, trained: Trained, blocks: Mapping[str, Any]) -> dict[str, Any]:
        """Lines of the report on how the posterior was fitted, as plain values."""
        return {}

    def check_steps(self, steps: int) -> None:
        """Warn where so many steps of the optimiser are too few."""

    def fit(self, task: Task) -> Posterior:
        if world() > 1:
            raise PosthocUQError(f"method={self.name!r} trains in one process.")
        settings, began = task.settings, time.perf_counter()
        trained = self.begin(task)
        samples, batches_an_epoch = trained.samples, batches_of(task, trained.samples)
        history = train(
            trained,
            task.loader,
            settings.reader,
            replace(self, epochs=self.epochs_over(samples, batches_an_epoch)),
            seed=settings.seed,
            val_loader=task.val_loader,
            checkpoint=task.checkpoint,
            progress=settings.progress,
        )
        task.seconds["training"] = time.perf_counter() - began
        blocks = self.blocks(task, trained)
        _check_finite(blocks)
        self.check_steps(len(history) * batches_an_epoch)
        notes = {
            "samples": samples,
            "seed": settings.seed,
            "epochs": len(history),
            "epoch taken": best_epoch(history),
            **self.described(trained, blocks),
            **{name: [entry[name] for entry in history] for name in history[0] if name != "seconds"},
            **{f"seconds, {what}": value for what, value in task.seconds.items()},
        }
        posterior = Posterior(
            self.name,
            task.layers,
            blocks,
            {name: [name] for name in task.layers},
            {name: parameter.detach() for name, parameter in task.model.named_parameters()},
            trained.likelihood(),
            Evidence(
                samples, noise_power=0
            ),  # the variances do not follow a later change of the noise variance
            History(notes, dict(task.prepared.deterministic)),
            trained_mean=trained.trained_mean(),
            settings=Hyperparameters(float(samples), self.prior_of(trained)),
        )
        posterior.model = task.model
        tuning = posterior.history.tuning
        tuning["prior precision"] = self.default_prior if self.prior_precision is None else "given"
        if trained.learns_noise:
            tuning["noise variance"] = "learned with the posterior"
        return posterior


def _check_finite(blocks: Mapping[str, Block]) -> None:
    for name, block in blocks.items():
        if not all(bool(torch.isfinite(tensor).all()) for tensor in block.tensors().values()):
            raise NonFiniteError(
                f"The training ended with means or variances of '{name}' that are not finite; lower the learning "
                f"rates, or bring the inputs to about unit size."
            )
