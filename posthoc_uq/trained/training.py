"""`Training`, the base of the methods that optimise: the loop, learned noise, early stopping and resuming.

What is trained is an `Objective`. All its randomness comes from the seed and the number of the step, and the order of
the data from the seed and the number of the epoch, so that a run that was killed goes on to the same result.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import ceil, cos, inf, isfinite, log, pi
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast

import torch
from annotated_types import Ge
from pydantic import AllowInfNan
from torch import Tensor, nn
from torch.optim import Optimizer

from posthoc_uq.core.batches import (
    LOADER,
    WITH_TARGETS,
    Batch,
    BatchReader,
    batches,
    count_samples,
    explained,
    known_length,
)
from posthoc_uq.core.devices import DeferredChecks, as_double, host_double
from posthoc_uq.core.distributed import world
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.model import model_device, replicate
from posthoc_uq.core.numerics import check_rows_finite, load_tensors
from posthoc_uq.core.options import Count, Magnitude, Natural, Positive, made_of
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.curvature.sweep import batch_hash, other_batches
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import SampleWeights, labelled, mean_of_labels, weighed_targets
from posthoc_uq.methods.checkpoint import Checkpoint, State
from posthoc_uq.methods.method import Method
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import Evidence, Hyperparameters, LayerPriors

Group = dict[str, Any]
"""A group of parameters for an optimiser, ``params`` among its entries."""

EPOCHS = 10  # where none are given
MIN_STEPS = 4000  # of a training on few data where no epochs are given
FEW_SAMPLES = 50_000  # below which these count

TRAINING = "training"  # the name of this part of a fit
_DATA, _STEP, _INITIALISATION = 101, 102, 201  # streams of random numbers from the seed


@dataclass(frozen=True)
class Step:
    """The seed of a training step, and its place in the training.

    Attributes:
        seed: of all random numbers of the step.
        epoch: number of the epoch, from 0.
        progress: the share of the training that is over, in [0, 1).
    """

    seed: int
    epoch: int = 0
    progress: float = 0.0


class Objective(ABC):
    """What is trained: tensors, and the loss of a batch.

    A subclass gives the tensors (`groups`), the loss (`loss`, or `backward` where it computes gradients itself), and
    one draw of the network's outputs (`outputs`), by which held-out data are scored.

    Args:
        network: the model, for this objective alone; run after a step failed, to tell whether it accepts the batch.
        likelihood: of the targets.
        samples: of the training data.
        learns_noise: whether the logarithm of the noise variance is trained with the rest.

    Raises:
        PosthocUQError: a noise is to be learned, and the likelihood has none.
    """

    def __init__(
        self, network: nn.Module, likelihood: Likelihood, samples: int, learns_noise: bool = False
    ) -> None:
        self.network, self.samples, self._likelihood = network, samples, likelihood
        self.learns_noise = learns_noise
        self._log_noise: Tensor | None = None
        if learns_noise:
            if likelihood.noise_variance is None:
                raise PosthocUQError(
                    f"A noise variance can be learned with likelihood='regression', and {likelihood.name!r} has none."
                )
            like = next(network.parameters())
            dtype = torch.promote_types(like.dtype, torch.float32)
            self._log_noise = likelihood.noise_variance.log().to(like.device, dtype).requires_grad_()

    @abstractmethod
    def groups(self) -> list[Group]:
        """What is trained, as groups of parameters for an optimiser: ``params`` (leaf tensors by name), ``lr`` and
        ``name``.
        """

    def loss(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        """The loss of a step (``"loss"``) and its parts, scalars, for the record. Values that the host must see go to
        `checks`, which run afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__} needs loss, or backward.")

    def backward(self, batch: Batch, step: Step, checks: DeferredChecks) -> dict[str, Tensor]:
        """Add the gradients of one step's loss to the tensors' ``grad``; returns what `loss` does."""
        terms = self.loss(batch, step, checks)
        terms["loss"].backward()
        return {name: term.detach() for name, term in terms.items()}

    def outputs(self, batch: Batch, draw: int) -> Tensor:
        """The network's outputs by the draw of this number, which is always the same."""
        raise NotImplementedError(f"{type(self).__name__} needs outputs, or log_predictive.")

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        """``log p(y | x)`` of held-out samples, ``(samples,)`` in nats, by as many draws."""
        targets, log_probs = cast(Tensor, batch.targets), list[Tensor]()
        for draw in range(draws):
            outputs = self.outputs(batch, draw)
            if draw == 0:
                self._likelihood.check(outputs, targets)
            log_probs.append(self.log_prob(outputs, targets))
        return torch.logsumexp(torch.stack(log_probs), dim=0) - log(draws)

    def trained_mean(self) -> dict[str, Tensor] | None:
        """The means by parameter, if they were trained and the blocks do not hold them."""
        return None

    def all_groups(self, noise_lr: float) -> list[Group]:
        """`groups`, and one for the logarithm of the noise variance if it is trained."""
        if self._log_noise is None:
            return self.groups()
        noise = {
            "params": {"log noise": self._log_noise},
            "lr": noise_lr,
            "name": "noise",
            "weight_decay": 0.0,
        }
        return [*self.groups(), noise]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is trained, by name."""
        return {name: tensor for group in self.all_groups(0.0) for name, tensor in group["params"].items()}

    def likelihood(self) -> Likelihood:
        """With the noise as it is now."""
        if self._log_noise is None:
            return self._likelihood
        return self._likelihood.with_noise(host_double(self._log_noise.detach().exp()))

    def likelihood_in_training(self) -> Likelihood:
        """With a noise that gradients reach, if it is trained."""
        if self._log_noise is None:
            return self._likelihood
        return self._likelihood.with_noise(self._log_noise.exp())

    def targets(
        self, batch: Batch, outputs: Tensor, checks: DeferredChecks | None
    ) -> tuple[Tensor, SampleWeights | None]:
        """The targets of a training batch, and the weights of its samples if they have some. Targets that do not fit
        the outputs are refused: wrong shapes now, wrong values when `checks` run.
        """
        outputs = outputs.detach()
        targets, weights = weighed_targets(
            self._likelihood, outputs, cast(Tensor, batch.targets), batch.weights
        )
        fault = None if checks is None else self._likelihood.validation_error(outputs, targets)
        if checks is not None and fault is not None:
            checks.add(
                fault, lambda faulty: self._likelihood.check(outputs, targets) if bool(faulty) else None
            )
        return targets, weights

    def log_prob(self, outputs: Tensor, targets: Tensor, weights: SampleWeights | None = None) -> Tensor:
        """The log-likelihood of every sample, times its weight if it has one."""
        likelihood = self.likelihood_in_training()
        if weights is None:
            return likelihood.log_prob(outputs, targets)
        return weights.log_prob(likelihood, outputs, targets)

    def generator(self, *words: int) -> torch.Generator:
        """A generator on the device of what is trained, seeded by some numbers."""
        device = next(iter(self.tensors().values())).device
        return torch.Generator(device).manual_seed(mixed_seed(*words))


Trained = TypeVar("Trained", bound=Objective)


@dataclass(frozen=True, kw_only=True)
class Training(Method, Generic[Trained]):
    """A method that optimises.

    A subclass gives what is trained (`begin`), and the blocks that come of it (`blocks`). The loop, learned noise,
    early stopping by held-out data, resuming and the record of the fit are written once, here.

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
        prior_precision: of the weights; 1 by default.
    """

    trains: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = True
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "noise_scale", "temperature"})
    default_prior: ClassVar[str] = "the default"
    """In words, for the report, which prior precision it takes where none is given."""

    epochs: Count | None = None
    lr: Positive = 1e-4
    log_variance_lr: Positive = 1e-3
    optimizer: Callable[[list[Group]], Optimizer] | None = None
    schedule: Callable[[float], float] | None = None
    clip: Positive | None = 1.0
    patience: Count | None = None
    val_draws: Count = 10
    prior_precision: Magnitude | None = None

    @property
    def precision(self) -> float:
        """The prior precision that is meant: the given one, or 1."""
        return 1.0 if self.prior_precision is None else self.prior_precision

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
        return max(EPOCHS, min(ceil(MIN_STEPS / max(1, batches)), most))

    def passes(self) -> int:
        return self.least_epochs + 2  # once to count the samples, once for what enters the last layer

    def optimiser_over(self, groups: list[Group]) -> Optimizer:
        """The optimiser of these groups: Adam with betas (0.9, 0.99), fused where the device has that."""
        if self.optimizer is not None:
            return self.optimizer(groups)
        return torch.optim.Adam(groups, betas=(0.9, 0.99), eps=1e-8, fused=fused(groups))

    def moved_by(self, steps: int, rate: float) -> float:
        """How far Adam can move a number in so many steps: by about its rate in each."""
        schedule = self.schedule or cosine
        return steps * rate * sum(schedule((i + 0.5) / 100) for i in range(100)) / 100

    @abstractmethod
    def begin(self, task: Task) -> Trained:
        """What is trained, at its start.

        Raises:
            PosthocUQError: options, data or model do not fit; the message says how to go on.
        """

    @abstractmethod
    def blocks(self, task: Task, trained: Trained) -> Mapping[str, Block]:
        """The blocks of the posterior after the training, by layer."""

    def prior_of(self, trained: Trained) -> float | LayerPriors:
        """The prior precision that the training used."""
        return self.precision

    def describe_fit(self, trained: Trained, blocks: Mapping[str, Any]) -> dict[str, Any]:
        """Lines of the report on how the posterior was fitted, as plain values."""
        return {}

    def check_steps(self, steps: int) -> None:
        """Warn where so many steps of the optimiser are too few."""

    def fit(self, task: Task) -> Posterior:
        if world() > 1:
            raise PosthocUQError(f"method={self.name!r} trains in one process.")
        plan, began = task.plan, time.perf_counter()
        trained = self.begin(task)
        samples, batches_an_epoch = trained.samples, task.batches_of(trained.samples)
        loop = Loop(
            trained,
            replace(self, epochs=self.epochs_over(samples, batches_an_epoch)),
            task.loader,
            plan.reader,
            seed=plan.seed,
            val_loader=plan.val_loader,
            checkpoint=task.checkpoint,
        )
        if loop.progress.length and not loop.progress.history:
            loop.progress.length = batches_an_epoch  # as counted
        history = loop.run(plan.progress)
        task.seconds["training"] = time.perf_counter() - began
        blocks = self.blocks(task, trained)
        self.check_steps(len(history) * batches_an_epoch)
        notes = {
            "samples": samples,
            "seed": plan.seed,
            "epochs": len(history),
            "epoch taken": best_epoch(history),
            **self.describe_fit(trained, blocks),
            **{name: [entry[name] for entry in history] for name in history[0] if name != "seconds"},
            **{f"seconds, {what}": value for what, value in task.seconds.items()},
        }
        posterior = task.posterior(
            self.name,
            blocks,
            # the variances do not follow a later change of the noise variance
            Evidence(samples, noise_power=0),
            notes,
            likelihood=trained.likelihood(),
            trained_mean=trained.trained_mean(),
            settings=Hyperparameters(float(samples), self.prior_of(trained)),
        )
        tuning = {"prior precision": self.default_prior if self.prior_precision is None else "given"}
        if trained.learns_noise:
            tuning["noise variance"] = "learned with the posterior"
        return posterior.noted(tuning=tuning)


def cosine(progress: float, floor: float = 0.05) -> float:
    """From 1 down to `floor` as `progress` goes from 0 to 1: the default schedule of learning rates."""
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * min(1.0, progress)))


def fused(groups: list[Group]) -> bool | None:
    """Whether the parameters' device has fused optimisers."""
    return True if groups[0]["params"][0].device.type in ("cpu", "cuda") else None


Measured = Annotated[float, AllowInfNan()]  # a validation NLL may be infinite


@dataclass
class _TrainingState:
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

    epoch: Natural = 0
    batch: Natural = 0
    step: Natural = 0
    length: Natural = 0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    samples: Natural = 0
    seconds: float = 0.0
    history: list[dict[str, Measured]] = field(default_factory=list[dict[str, float]])
    best: Annotated[int, Ge(-1)] = -1
    done: bool = False


def best_epoch(history: list[dict[str, float]]) -> int:
    """The number, from 1, of the epoch whose tensors a training ended with: that of the least validation NLL, or the
    last; what is not finite is never the least.
    """
    losses = [entry.get("validation NLL", inf) for entry in history]
    finite = [loss if isfinite(loss) else inf for loss in losses]
    return finite.index(min(finite)) + 1 if "validation NLL" in history[0] else len(history)


class Loop:
    """Trains an objective in place. With held-out data its tensors end as they were after the epoch with the least
    validation NLL, and the training stops after `patience` epochs without a better one.

    Args:
        objective: what is trained.
        options: of the training; its `least_epochs` is how many epochs there are.
        loader: the training data.
        reader: reads its batches.
        seed: of all random numbers.
        val_loader: held-out data.
        checkpoint: keeps the state of the training, or holds the one to go on from.
    """

    def __init__(
        self,
        objective: Objective,
        options: Training[Any],
        loader: Iterable[Any],
        reader: BatchReader,
        *,
        seed: int,
        val_loader: Iterable[Any] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._objective, self._loader, self._reader, self._options = objective, loader, reader, options
        self._seed, self._val_loader, self._checkpoint = seed, val_loader, checkpoint
        with isolated_random_state(seed):
            groups = objective.all_groups(options.log_variance_lr)
            groups = [{**group, "params": list(group["params"].values())} for group in groups]
            self._optimiser = options.optimiser_over(groups)
        for group in self._optimiser.param_groups:
            group["initial_lr"] = group["lr"]
        self._schedule = options.schedule or cosine
        self._best: dict[str, Tensor] = {}
        self._last: Batch | None = None  # of which a step was taken
        self._resumed = False  # and no step was taken since
        self._resumed_at = 0  # hash of the last batch before the checkpoint was written
        self.progress = _TrainingState(length=known_length(loader))

    def run(self, progress: bool) -> list[dict[str, float]]:
        """All epochs, with a bar if `progress` is set.

        Returns:
            One dictionary an epoch: the means of the loss and its parts over the epoch's samples, ``validation NLL``
            with held-out data, ``seconds``.

        Raises:
            NonFiniteError: a loss or a gradient is not finite (names the step), or a trained tensor is not.
            PosthocUQError: the loader yields no targets, or other data than those that the checkpoint was made from.
        """
        checkpoint = self._checkpoint
        saved = None if checkpoint is None else checkpoint.take_running(TRAINING)
        if checkpoint is not None and saved is not None:
            with checkpoint.reading("its state of the training is of another kind"):
                self.load_state_dict(saved)
        epochs = self._options.least_epochs
        with Progress("training", "samples", progress, epochs * self._objective.samples) as bar:
            bar.advance(self.progress.epoch * self._objective.samples)
            while not self.finished:
                self._epoch(bar)
        for name, tensor in self._objective.tensors().items():
            if name in self._best:
                tensor.detach().copy_(self._best[name])
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(
                    f"The training ended with '{name}' not finite; lower the learning rates."
                )
        return self.progress.history

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
        progress = made_of(_TrainingState, state["progress"])
        if not (progress.best < progress.epoch == len(progress.history) <= progress.step + 1):
            raise ValueError(f"epoch {progress.epoch} with {len(progress.history)} finished ones cannot be")
        if self._val_loader is not None and any("validation NLL" not in entry for entry in progress.history):
            raise ValueError("an epoch has no validation NLL")
        if bool(self._best) != (progress.best >= 0):
            raise ValueError(f"epoch {progress.best} is the best, and its tensors are not there")
        self.progress, self._resumed_at = progress, state["last batch"]
        self._resumed = True

    def _epoch(self, bar: Progress) -> None:
        """One epoch, or what is left of it."""
        progress, done, start = self.progress, self.progress.batch, time.perf_counter()
        seconds_before, seen = progress.seconds, 0
        name = f"epoch {progress.epoch + 1} of {self._options.least_epochs}"
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
                means = {name: f"{value / progress.samples:.4g}" for name, value in progress.sums.items()}
                bar.describe(name, means)
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
        if batch.targets is None:
            raise PosthocUQError(
                f"This method trains on targets, and the loader yields inputs alone; {WITH_TARGETS}"
            )
        # The gradient of this step, drawn with random numbers of its own.
        self._optimiser.zero_grad(set_to_none=True)
        checks, values = DeferredChecks(), dict[str, float]()
        part = min(progress.batch / progress.length, 1.0) if progress.length else 0.0
        done = (progress.epoch + part) / self._options.least_epochs
        step = Step(mixed_seed(self._seed, _STEP, progress.step), progress.epoch, done)
        what = f"batch {progress.batch} of the loader"
        with explained(lambda: self._objective.network, batch, what, LOADER):
            terms = self._objective.backward(batch, step, checks)
        # Loss and gradient are read by the host once, before anything is changed.
        trained = [t for group in self._optimiser.param_groups for t in group["params"]]
        gradients = [tensor.grad for tensor in trained if tensor.grad is not None]
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
                f"Step {progress.step} (epoch {progress.epoch + 1}, batch {progress.batch}): the "
                f"{' and the '.join(broken)} is not finite; lower the learning rates, or look at the data."
            )
        # The step.
        if self._options.clip is not None:
            torch.nn.utils.clip_grad_value_(trained, self._options.clip)
        factor = self._schedule(step.progress)
        for group in self._optimiser.param_groups:
            group["lr"] = group["initial_lr"] * factor
        # no optimiser looks at the names in a state that it was given before it takes a step
        resumed = self._checkpoint if self._resumed else None
        with (
            nullcontext()
            if resumed is None
            else resumed.reading("the state of its optimiser is of another kind")
        ):
            self._optimiser.step()
        self._resumed = False
        for name, value in values.items():
            progress.sums[name] = progress.sums.get(name, 0.0) + value * samples
        progress.samples += samples
        progress.step += 1

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
        patience = self._options.patience if self._val_loader is not None else None
        progress.done = patience is not None and waited >= patience
        progress.epoch, progress.batch, progress.length = progress.epoch + 1, 0, length
        progress.sums, progress.samples, progress.seconds = {}, 0, 0.0
        self._last = None  # its tensors are the loader's

    def _validate(self) -> float:
        """Mean negative log-likelihood of the held-out labels that count, in nats."""
        assert self._val_loader is not None
        total, count, reader = 0.0, 0, replace(self._reader, batch_to_weights=None)
        with torch.no_grad(), isolated_random_state(self._seed):
            for batch in batches(self._val_loader, reader):
                if batch.targets is None:
                    raise PosthocUQError("Early stopping needs targets; val_loader yields inputs alone.")
                with explained(lambda: self._objective.network, batch, "a batch of val_loader", LOADER):
                    log_probabilities = self._objective.log_predictive(batch, self._options.val_draws)
                total -= float(as_double(log_probabilities).sum())
                count += labelled(self._objective.likelihood(), batch.targets)
        if not isfinite(total):
            with torch.no_grad(), isolated_random_state(self._seed):
                held_out = batches(self._val_loader, reader)
                check_rows_finite(batch.copied().call(self._objective.network) for batch in held_out)
        return mean_of_labels(total, count)


def _restore(optimiser: Optimizer, state: State) -> None:
    """Give an optimiser over the same parameters this state.

    Raises:
        ValueError: it is of an optimiser with other options.
    """
    for own, saved in zip(optimiser.param_groups, state["param_groups"], strict=True):
        for name, value in own.items():
            number = isinstance(saved[name], float) or not isinstance(value, float)
            if not number or (name == "initial_lr" and saved[name] != value):
                raise ValueError(f"its {name} is {saved[name]!r:.80}, and that of this fit {value!r:.80}")
    optimiser.load_state_dict(state)
    # torch casts the state of a parameter to the parameter's precision, but not all of it has that precision
    for index, value in enumerate(t for group in optimiser.param_groups for t in group["params"]):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimiser.state[value][name]
            if isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimiser.state[value][name] = saved.to(loaded.device)


def check_trainable(method: str, parameters: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Refuse parameters of a number format that no optimiser moves by small steps.

    Args:
        method: its name.
        parameters: of the model.
        names: of those that are to be trained.

    Raises:
        PosthocUQError: one is of half precision.
    """
    half = [name for name in names if parameters[name].dtype not in (torch.float32, torch.float64)]
    if half:
        raise PosthocUQError(
            f"method={method!r} trains parameters in float32 or float64, and '{half[0]}' is of "
            f"{parameters[half[0]].dtype}; convert the model, for instance with model.float()."
        )


def initialised(model: nn.Module, trained: Mapping[str, Tensor], seed: int, option: str) -> dict[str, Tensor]:
    """Parameters and buffers of a new initialisation; batch normalisations lose the data's statistics.

    Args:
        model: whose modules say how they begin.
        trained: its parameters, which modules without ``reset_parameters`` keep, with a warning.
        seed: of the random numbers, which do not depend on the device.
        option: which was given for this, for the warning.
    """
    device = model_device(model)
    not_reset: list[str] = []
    with isolated_random_state(mixed_seed(seed, _INITIALISATION)):
        twin = replicate(model, {name: p.clone() for name, p in trained.items()})
        twin = twin.to("cpu")  # its random numbers do not depend on the device
        for prefix, module in twin.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.clone())
            reset: Any = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if callable(reset):
                reset()
            else:
                not_reset += [
                    f"{prefix}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)
                ]
    if not_reset:
        warn_user(
            f"{option} keeps {len(not_reset)} trained parameters whose modules have no reset_parameters(), "
            f"{not_reset[0]!r} among them."
        )
    tensors = {name: p.detach().to(device) for name, p in twin.named_parameters()}
    return tensors | {name: buffer.detach().to(device) for name, buffer in twin.named_buffers()}
