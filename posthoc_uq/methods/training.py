"""The training loop of variational methods, and its optimisers."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from math import ceil, cos, inf, isfinite, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posthoc_uq.core.batches import LOADER, Batch, BatchReader, batches, explained, known_length
from posthoc_uq.core.devices import DeferredChecks, as_double
from posthoc_uq.core.errors import CorruptPosteriorError, NonFiniteError, PosthocUQError
from posthoc_uq.core.options import Count, Natural, Options, Positive
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.curvature.sweep import Content, batch_hash
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import labelled, mean_of_labels
from posthoc_uq.methods.resume import Checkpoint, Tensors, check_training, other_data

# The default optimiser and its schedule; the state of any torch optimiser as plain tensors and values, no
# pickle.

_INTEGERS = {
    str(kind): kind for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}
_FLOATS = {str(kind): kind for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
_PLAIN = (bool, int, float, str, type(None))


def cosine(progress: float, floor: float = 0.05) -> float:
    """From 1 down to `floor` as `progress` goes from 0 to 1: the default schedule of learning rates."""
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * min(1.0, progress)))


def adam(groups: list[dict[str, Any]]) -> Optimizer:
    """The default optimiser: Adam with betas (0.9, 0.99), fused where the device has that."""
    device = groups[0]["params"][0].device.type
    return torch.optim.Adam(
        groups, betas=(0.9, 0.99), eps=1e-8, fused=True if device in ("cpu", "cuda") else None
    )


def optimiser_state(optimiser: Optimizer) -> tuple[dict[str, Any], Tensors]:
    """The part of an optimiser's state that JSON can hold, and its tensors by the number of their parameter.

    Raises:
        PosthocUQError: the optimiser keeps something other than numbers and tensors for a parameter.
    """
    state = optimiser.state_dict()
    plain: dict[str, Any] = {}
    tensors: Tensors = {}
    for index, of_parameter in state["state"].items():
        entries: dict[str, Any] = {}
        for name, value in of_parameter.items():
            if isinstance(value, Tensor) and str(value.dtype) in _FLOATS:
                wide = value.double() if value.dtype == torch.float64 else value.float()
                tensors.setdefault(str(index), {})[name] = wide.detach()
                entries[name] = {"dtype": str(value.dtype)}
            elif isinstance(value, Tensor) and str(value.dtype) in _INTEGERS:
                entries[name] = {"dtype": str(value.dtype), "numbers": value.tolist()}
            elif isinstance(value, _PLAIN):
                entries[name] = {"value": value}
            else:
                raise PosthocUQError(
                    f"{type(optimiser).__name__} keeps a {type(value).__name__} as '{name}', which no checkpoint "
                    f"holds; use another optimiser, or leave checkpoint out."
                )
        plain[str(index)] = entries
    groups = [
        {name: value for name, value in group.items() if isinstance(value, _PLAIN) and name != "params"}
        for group in state["param_groups"]
    ]
    return {"kind": type(optimiser).__name__, "state": plain, "groups": groups}, tensors


def restore_optimiser(optimiser: Optimizer, plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Give an optimiser over the same parameters the state that `optimiser_state` took.

    Raises:
        PosthocUQError: the state is that of another kind of optimiser.
        CorruptPosteriorError: an optimiser of this kind over these parameters could not have the state.
    """
    if plain["kind"] != type(optimiser).__name__:
        raise PosthocUQError(
            f"The checkpoint was made with the optimiser {plain['kind']}, and this is {type(optimiser).__name__}; "
            f"delete the checkpoint to begin anew."
        )
    values = [t for group in optimiser.param_groups for t in group["params"]]
    described = {(index, name) for index, entries in plain["state"].items() for name in entries}
    stray = {(index, name) for index, entries in tensors.items() for name in entries} - described
    if stray or not plain["state"].keys() <= {str(index) for index in range(len(values))}:
        raise CorruptPosteriorError("its optimiser has a state for parameters that are not trained")
    state, likes = optimiser.state_dict(), _after_a_step(optimiser)
    for index, entries in plain["state"].items():
        known = likes.get(int(index), {})
        if entries and not known.keys() <= entries.keys():
            raise CorruptPosteriorError("its optimiser lacks a part of its state")
        state["state"][int(index)] = {
            name: _value(name, entry, tensors.get(index, {}).get(name), known.get(name))
            for name, entry in entries.items()
        }
    if len(state["param_groups"]) != len(plain["groups"]):
        raise CorruptPosteriorError("its optimiser has another number of parameter groups")
    for group, saved in zip(state["param_groups"], plain["groups"], strict=True):
        _check_group(group, saved)
        group.update(saved)
    optimiser.load_state_dict(state)
    # torch casts the state of a parameter to the parameter's precision, but not all of the state has that precision.
    for index, value in enumerate(values):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimiser.state[value][name]
            if isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimiser.state[value][name] = saved.to(loaded.device)


def _check_group(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse saved settings that differ in more than numbers, which an optimiser may change, the rate among them."""
    for name, value in saved.items():
        current = group.get(name)
        numbers = type(current) in (int, float) and type(value) in (int, float) and name != "initial_lr"
        same = type(value) is type(current) and value == current
        if name not in group or not (same or (numbers and isfinite(value))):
            raise CorruptPosteriorError(f"its optimiser was set up in another way: '{name}' is {value!r:.60}")


def _after_a_step(optimiser: Optimizer) -> dict[int, dict[str, Any]]:
    """The state that an optimiser keeps for each parameter, by name, from a copy after a step with zero gradients."""
    with isolated_random_state():
        twin = copy.deepcopy(optimiser)
        for group in twin.param_groups:
            for tensor in group["params"]:
                tensor.grad = torch.zeros_like(tensor)
        twin.step()
        return twin.state_dict()["state"]


def _value(name: str, entry: Mapping[str, Any], tensor: Tensor | None, like: Any) -> Any:
    """One value of the state; `like` is the optimiser's own value of that name after a step, None if it has none."""
    restored, kind = entry.get("value"), entry.get("dtype")
    if "numbers" in entry and kind in _INTEGERS:
        with suppress(ValueError, TypeError, RuntimeError, OverflowError):
            restored = torch.tensor(entry["numbers"], dtype=_INTEGERS[kind], device="cpu")
    elif tensor is not None and kind in _FLOATS:
        restored = tensor.to(_FLOATS[kind])
    fits = isinstance(restored, Tensor) != ("value" in entry)
    if isinstance(like, Tensor):
        fits = (
            fits
            and isinstance(restored, Tensor)
            and (restored.shape, restored.dtype) == (like.shape, like.dtype)
        )
    elif like is not None:
        fits = fits and type(restored) is type(like)
    if not fits:
        raise CorruptPosteriorError(f"its optimiser's '{name}' is none that this optimiser keeps")
    return restored


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
    """What is trained: named tensors, and a loss whose stochastic gradients can be computed for a batch."""

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
    def likelihood(self) -> Likelihood:
        """With the noise as it is now."""

    @abstractmethod
    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        """``log p(y | x)`` of held-out samples, ``(samples,)`` in nats, by as many draws, always the same."""


@dataclass
class _State:
    """How far a training has come."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    digest: int = 0
    length: int = 0  # batches of an epoch; 0 while unknown
    sums: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    samples: int = 0
    content: int = 0  # hash of the data, whatever their order, from a pass before the training
    batches: int = 0  # in that pass
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=lambda: list[dict[str, float]]())
    best: int = -1  # number of the epoch whose tensors are kept
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
    content: Content | None = None,
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
        content: hash of the data in a pass that begins from the same random state in every attempt, as an epoch does
            not; needed with `checkpoint`.
        progress: whether to show a bar.

    Returns:
        One dictionary an epoch: the means of the loss and its parts over the epoch's samples, ``validation NLL`` with
        held-out data, ``seconds``.

    Raises:
        NonFiniteError: a loss or a gradient is not finite (names the step), or a trained tensor is not.
        PosthocUQError: the loader yields no targets, or other data than those that the checkpoint was made from.
    """
    run = _Run(objective, loader, reader, options, seed, val_loader, checkpoint, content or Content())
    with Progress("train", "samples", progress) as bar:
        run.resume()
        while run.state.epoch < options.least_epochs and not run.state.done:
            run.epoch(bar)
    run.take_best()
    broken = [name for name, tensor in objective.tensors().items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise NonFiniteError(f"The training ended with '{broken[0]}' not finite; lower the learning rates.")
    return run.state.history


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
        content: Content,
    ) -> None:
        self._objective, self._loader, self._reader, self._options = objective, loader, reader, options
        self._seed, self._val_loader, self._checkpoint = seed, val_loader, checkpoint
        with isolated_random_state(seed):
            groups = objective.groups()
            self._optimiser = (options.optimizer or adam)(groups)
        for group in self._optimiser.param_groups:
            group["initial_lr"] = group["lr"]
        self._schedule = options.schedule or cosine
        self._best: dict[str, Tensor] = {}
        self.state = _State(length=known_length(loader), content=content.total, batches=content.batches)

    def resume(self) -> None:
        """Go on from the checkpoint, if it holds a training."""
        if self._checkpoint is None or self._checkpoint.training is None:
            return
        description, groups = self._checkpoint.training
        if any(description["state"][name] != getattr(self.state, name) for name in ("content", "batches")):
            raise other_data()
        of_optimiser = {
            name.removeprefix("optimiser/"): g for name, g in groups.items() if name.startswith("optimiser/")
        }
        with self._checkpoint.read_as_corrupt():
            check_training(
                description["state"], groups, self._objective.tensors(), self._options.least_epochs
            )
            restore_optimiser(self._optimiser, description["optimiser"], of_optimiser)
        self.state = _State(**description["state"])
        for name, tensor in self._objective.tensors().items():
            tensor.detach().copy_(groups["tensors"][name])
        self._best = {name: tensor.to(self._reader.device) for name, tensor in groups.get("best", {}).items()}
        self._checkpoint.training = None  # handed over, so that the tensors are not in memory twice

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        plain, of_optimiser = optimiser_state(self._optimiser)
        groups: Tensors = {f"optimiser/{name}": tensors for name, tensors in of_optimiser.items()}
        groups["tensors"] = {name: tensor.detach() for name, tensor in self._objective.tensors().items()}
        if self._best:
            groups["best"] = self._best
        self._checkpoint.keep_training({"state": asdict(self.state), "optimiser": plain}, groups)

    def epoch(self, bar: Progress) -> None:
        """One epoch, or what is left of it."""
        state, batches_done, start = self.state, self.state.batch, time.perf_counter()
        seconds_before, digest = state.seconds, 0
        batches_seen = 0
        bar.restart(f"epoch {state.epoch + 1} of {self._options.least_epochs}")
        with isolated_random_state(mixed_seed(self._seed, _DATA, state.epoch)):
            for batch in batches(self._loader, self._reader):
                samples = count_samples(batch)
                if self._checkpoint is not None:
                    digest = mixed_seed(digest, batch_hash(batch))
                batches_seen += 1
                bar.advance(samples)
                if batches_seen <= batches_done:
                    if batches_seen == batches_done and digest != state.digest:
                        raise PosthocUQError(
                            "The loader does not begin with the batches that the checkpoint was made from, so the "
                            "training cannot go on from it; pass the same data in the same order, or delete the "
                            "checkpoint."
                        )
                    continue
                self._step(batch, samples)
                state.batch, state.digest = batches_seen, digest
                bar.note(self._shown())
                if self._checkpoint is not None and state.step % self._checkpoint.every == 0:
                    state.seconds = seconds_before + time.perf_counter() - start
                    self._save()
        if batches_seen < batches_done:
            raise PosthocUQError("The loader has fewer batches than when the checkpoint was made; delete it.")
        state.seconds = seconds_before + time.perf_counter() - start
        self._end_epoch(batches_seen)

    def _step(self, batch: Batch, samples: int) -> None:
        state = self.state
        where = f"Step {state.step} (epoch {state.epoch + 1}, batch {state.batch})"
        if batch.targets is None:
            raise PosthocUQError("This method trains on targets, and the loader yields inputs alone.")
        self._optimiser.zero_grad(set_to_none=True)
        checks, values = DeferredChecks(), dict[str, float]()
        with self._explained(batch, f"batch {state.batch} of the loader"):
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
        for group in self._optimiser.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self._optimiser.step()
        if state.sums and state.sums.keys() != values.keys():
            raise _other_losses()
        for name, value in values.items():
            state.sums[name] = state.sums.get(name, 0.0) + value * samples
        state.samples += samples
        state.step += 1

    def _explained(self, batch: Batch, what: str) -> AbstractContextManager[None]:
        return explained(lambda: self._objective.network, batch, what, LOADER)

    def _present_step(self) -> Step:
        state = self.state
        seed = mixed_seed(self._seed, _STEP, state.step)
        return Step(seed, state.epoch, state.batch, state.length, self._progress())

    def _progress(self) -> float:
        """How much of the training is over, in [0, 1)."""
        state = self.state
        part = min(state.batch / state.length, 1.0) if state.length else 0.0
        return (state.epoch + part) / self._options.least_epochs

    def _shown(self) -> dict[str, str]:
        return {name: f"{value / self.state.samples:.4g}" for name, value in self.state.sums.items()}

    def _end_epoch(self, length: int) -> None:
        state = self.state
        entry = {name: value / max(1, state.samples) for name, value in state.sums.items()}
        if self._val_loader is not None:
            entry["validation NLL"] = self._validate()
        if state.history and state.history[0].keys() != {*entry, "seconds"}:
            raise _other_losses()
        if self._val_loader is not None:
            losses = [past["validation NLL"] for past in state.history if isfinite(past["validation NLL"])]
            if state.best < 0 or entry["validation NLL"] < min(losses, default=inf):
                state.best = state.epoch
                self._best = {n: t.detach().clone() for n, t in self._objective.tensors().items()}
        entry["seconds"] = state.seconds
        state.history.append(entry)
        waited = state.epoch - state.best
        state.done = (
            self._val_loader is not None
            and self._options.patience is not None
            and waited >= self._options.patience
        )
        state.epoch, state.batch, state.digest, state.length = state.epoch + 1, 0, 0, length
        state.sums, state.samples, state.seconds = {}, 0, 0.0
        self._save()

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


def _other_losses() -> CorruptPosteriorError:
    return CorruptPosteriorError(
        "The checkpoint is of a training with other losses than this one has; delete it to begin anew."
    )
