"""`MessagePassing`: Gaussian weight posteriors by messages, over a last layer or a whole sequential network."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, log10, prod
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.devices import DeferredChecks, as_double, has_double, host_double, on_device
from posthoc_uq.core.distributed import world
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError, warn_user
from posthoc_uq.core.options import Count, Magnitude
from posthoc_uq.core.progress import Progress
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.curvature.features import FeatureSource, calls_of, feature_rows, watched_for
from posthoc_uq.curvature.sweep import check_targets, require_outputs
from posthoc_uq.layers.capture import Capture, Recording
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import Selection
from posthoc_uq.likelihoods import Gaussian, Likelihood
from posthoc_uq.likelihoods.labels import are_whole
from posthoc_uq.methods.method import Method
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.block import NotContainedError, Weights, check_resolved, largest_of
from posthoc_uq.posteriors.features import FeatureStatistics
from posthoc_uq.posteriors.laplace import LARGEST_BYTES
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import ONE_PRIOR, Evidence, Hyperparameters, LayerPriors
from posthoc_uq.trained.message_passing.messages import (
    NOISE_VARIANCE,
    Argmax,
    Message,
    Regression,
    Signal,
    Softargmax,
    divide,
)
from posthoc_uq.trained.message_passing.network import BatchNormStage, ByStage, Stages, Weighted, stages_of
from posthoc_uq.trained.message_passing.train import (
    BIAS_VARIANCE,
    Trainer,
    drawn_means,
    fit_sites,
    marginals,
    site_to_weight_messages,
    sites_within,
    weight_variance,
    with_exact_means,
)
from posthoc_uq.trained.messages import JointMessagesBlock, MessagesBlock, shift_inputs

_LARGE_DATA = 20_000  # samples from which on a last layer's batches are visited once
_LAST_EPOCHS, _ALL_EPOCHS = 4, 18  # visits of every batch where none are given
_GROUP_SIZE = 64  # examples whose messages to a last layer are made together
_GROUP_ITERATIONS = 2
_PRETRAINED_FACTOR = 0.1  # on the prior variances where the means are pretrained
_PART = "messages"  # the name of this part of a fit
_PRIOR, _ORDER, _VISITS, _TEMPERATURE = 401, 402, 403, 404  # streams of the seed
_LOGISTIC = 1.702  # a standard normal distribution function is close to a logistic one of this slope
_MATCHED = "nearest to the network's predictions of the fit's data"


# The data of a fit, and the units in which a last layer sees them.


class Examples(NamedTuple):
    """All data.

    Attributes:
        inputs: of the first layer that gets a posterior: rows ``(N, I)`` with the bias's 1 for a last layer, or
            ``(N, ...)`` as they come in.
        targets: values ``(N, J)`` in float64, or labels ``(N,)``.
    """

    inputs: Tensor
    targets: Tensor


class Batches(Sequence[tuple[Tensor, Tensor]]):
    """Examples in a random order as batches, each in float64 when it is asked for."""

    def __init__(self, examples: Examples, size: int, seed: int) -> None:
        self._examples, generator = examples, torch.Generator().manual_seed(mixed_seed(seed, _ORDER) % 2**63)
        order = torch.randperm(len(examples.inputs), generator=generator, device="cpu")
        self._parts = order.to(examples.inputs.device).split(size)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        part = self._parts[index]
        return as_double(self._examples.inputs[part]), self._examples.targets[part]


class _ExampleCollector:
    """Watches a pass and keeps what enters a layer, and the targets."""

    def __init__(self, likelihood: Likelihood, layer: Layer, as_rows: bool) -> None:
        self._likelihood, self._layer, self._as_rows = likelihood, layer, as_rows
        self.inputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: DeferredChecks) -> None:
        """Keep a batch; see `posthoc_uq.curvature.sweep.Observer`."""
        place, outputs, targets = str(len(self.inputs)), recording.outputs.detach(), batch.targets
        samples = len(keys)
        if targets is None:
            raise PosthocUQError(
                "method='message_passing' learns from the targets, and the loader gives none; pass a loader of "
                "(inputs, targets)."
            )
        checks.add(outputs.sum(), lambda total: require_outputs(total, outputs, place))
        check_targets(self._likelihood, outputs, targets, place, checks)
        if self._likelihood.missing == "ignore" and bool(targets.isnan().any()):
            raise PosthocUQError(
                f"method='message_passing' learns from all targets of a sample, and in batch {place} some are missing; "
                f"take a Laplace method for them."
            )
        if self._likelihood.logits and not (are_whole(targets) and targets.numel() == samples):
            raise PosthocUQError(
                f"method='message_passing' learns from labels that are class indices, and batch {place} has soft ones "
                f"of shape {tuple(targets.shape)}; take a Laplace method for them."
            )
        calls = recording.watched
        whole = calls_of(calls, self._layer)[0].input
        self.inputs.append(feature_rows(calls, self._layer, samples) if self._as_rows else whole)
        self.targets.append(targets.detach().reshape(samples, -1).clone())


def examples_of(
    task: Task, layer: Layer, as_rows: bool, statistics: FeatureStatistics | None = None
) -> Examples:
    """All data of a fit, by one pass.

    Args:
        task: the fit.
        layer: whose inputs are kept.
        as_rows: as one row a sample.
        statistics: for novelty, which the same pass is shown to.

    Raises:
        PosthocUQError: there are no targets, or they do not fit the outputs.
        NonFiniteError: outputs are not finite.
    """
    kept, capture = _ExampleCollector(task.likelihood, layer, as_rows), Capture(task.model)
    capture.watched = watched_for(layer) if statistics is None else statistics.source.watched
    task.show(capture, [kept] if statistics is None else [kept, statistics], "reading the data")
    targets = torch.cat(kept.targets)
    if task.likelihood.noise_variance is None:
        targets = targets[:, 0].long()
    else:
        targets = as_double(targets)
    inputs = torch.cat(kept.inputs)
    if not has_double(inputs.device):  # all messages are in float64, and where they are their data must be
        inputs = inputs.cpu()
    targets = targets.to(inputs.device)
    if as_rows and layer.bias is None:
        informative = inputs.ne(0).any(1)  # without a bias, the output for an input of zeros is known
        if bool(informative.any()):
            inputs, targets = inputs[informative], targets[informative]
    return Examples(inputs, targets)


class Units:
    """Inputs and values of mean 0 and deviation 1, and messages to weights in these units as those to a last layer's.

    Args:
        examples: features, with the bias's 1, and targets.
        layer: of the model, the last; without a bias no means are subtracted.
        shift: ``(I,)``, what to subtract from the inputs; their means if None.

    Attributes:
        shift: subtracted from the inputs, ``(I,)``; 0 for the bias.
        value_spread: ``(J,)``, by which the targets of a regression are divided.
        factors: by which weights in these units are multiplied to become those of the layer, ``(J, I)``.
        offset: what is added to them then, ``(J, I)``.
    """

    def __init__(self, examples: Examples, layer: Layer, shift: Tensor | None = None) -> None:
        inputs, targets = examples
        bias, samples = layer.bias is not None, len(inputs)
        total = as_double(inputs.new_zeros(()))
        if shift is None:
            shift = torch.stack([as_double(part).sum(0) for part in inputs.split(4096)]).sum(0) / samples
            shift = F.pad(shift[:-1], (0, 1)) if bias else torch.zeros_like(shift)
        self.shift = shift.to(total)
        squares = [(as_double(part) - self.shift).square().sum(0) for part in inputs.split(4096)]
        variance = torch.stack(squares).sum(0)[: layer.inputs - bias] / samples
        # the mean of a constant is rounded, and an input that never changes must divide nothing by what that leaves
        changing = variance > 1e-12 * (variance.mean() + self.shift[: len(variance)].square())
        usual = variance[changing].mean() if bool(changing.any()) else torch.ones_like(total)
        spread = torch.where(changing, variance.clamp(min=1e-6 * usual), usual).sqrt()
        self._spread = F.pad(spread, (0, int(bias)), value=1.0)
        self._value_shift = total.new_zeros(layer.outputs)
        self.value_spread = total.new_ones(layer.outputs)
        if targets.is_floating_point():
            self._value_shift = targets.mean(0) if bias else self._value_shift
            width = (targets - self._value_shift).square().mean(0).sqrt()
            self.value_spread = torch.where(width > 0, width, self.value_spread)
        self.factors = self.value_spread.unsqueeze(1) / self._spread
        self.offset = torch.zeros_like(self.factors)
        if bias:
            self.offset[:, -1] = self._value_shift

    def of(self, examples: Examples) -> Examples:
        """Rows and values in these units, in float64; labels stay."""
        inputs, targets = (as_double(examples.inputs) - self.shift) / self._spread, examples.targets
        if targets.is_floating_point():
            targets = (targets - self._value_shift) / self.value_spread
        return Examples(inputs, targets)

    def of_layer(self, message: Message) -> Message:
        """Messages to the layer's weights from those in these units: a precision ``(J, I)``, or ``(J, I, I)`` where the
        weights of an output correlate.
        """
        factors, offset = self.factors, self.offset
        if message.rho.ndim == 3:
            rho = message.rho / (factors.unsqueeze(2) * factors.unsqueeze(1))
            return Message(message.tau / factors + torch.einsum("jab,jb->ja", rho, offset), rho)
        rho = message.rho / factors.square()
        return Message(message.tau / factors + rho * offset, rho)


# The method.


@dataclass(frozen=True, kw_only=True)
class MessagePassing(Method):
    """Gaussian weight posteriors by message passing on the network's factor graph, without gradients.

    Every factor of the network (a product, a sum, an activation, a target) sends its neighbours Gaussian messages that
    match moments; the posterior of a weight is its prior times one message a batch, so that no example is counted twice
    ("Scalable approximate message passing for Bayesian neural networks"). The formulas are in
    ``docs/methods/message_passing.md``.

    With ``layers="last"`` the model runs once over the data and only its last linear layer gets a posterior, with means
    of its own. A posterior over classes then takes the temperature, and where that is not enough the scale, at which it
    predicts the data of the fit as the network does, where its own are far less sure. With ``layers="all"`` a
    `torch.nn.Sequential` is trained anew by messages; that costs hundreds of plain epochs, and is for small networks.

    Attributes:
        layers: the ``"last"`` linear layer, over the inputs that the trained network gives it, or ``"all"`` layers of a
            sequential network: linear ones, convolutions, transposed or not, and every other kind that the library
            knows.
        posterior: ``"diagonal"``, with independent weights; or ``"full"``, for a last layer: one Gaussian with all
            correlations for every output, which is exact for a regression and costs ``N n^2`` a sweep and output for n
            inputs.
        signal: how a label enters: ``"softargmax"``, drawn by their softmax; ``"argmax"``, it is with
            noise the largest; ``"auto"`` is the first. A regression has the noise of its likelihood.
        prior: of the weights' means: ``"zero"`` (the default for a last layer), ``"spectral"`` (drawn once; the default
            for all layers), or ``"pretrained"``, the trained weights, for data that were not used to train them.
        prior_precision: of every weight and bias; by default that of the method's prior, which goes by the size of the
            inputs.
        epochs: visits of every batch; by default 18 for all layers; for a last layer 4, or 1 from 20,000 samples on.
        batch_size: examples of a batch with ``layers="all"``; their messages are kept during a visit, and after it only
            the sum.
        regularize: pull the label's logit towards 1 and the others towards -1 as well, for the signal ``"argmax"``.

    Example:
        ```python
        method = uq.MessagePassing(epochs=1)  # of the last layer
        posterior = uq.fit(model, train_loader, method)
        prediction = uq.wrap(model, posterior)(images)
        ```
    """

    trains: ClassVar[bool] = True
    name: ClassVar[str] = "message_passing"
    block_kinds: ClassVar[tuple[str, ...]] = ("messages", "joint_messages")
    tunable: ClassVar[frozenset[str]] = frozenset({"scale", "noise_scale", "temperature"})
    likelihoods: ClassVar[tuple[str, ...] | None] = ("classification", "binary", "regression")

    layers: Literal["last", "all"] = "last"
    posterior: Literal["diagonal", "full"] = "diagonal"
    signal: Literal["auto", "softargmax", "argmax"] = "auto"
    prior: Literal["zero", "spectral", "pretrained"] | None = None
    prior_precision: Magnitude | None = None
    epochs: Count | None = None
    batch_size: Count = 320
    regularize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers == "all" and self.posterior == "full":
            raise PosthocUQError("posterior='full' is for the last layer; take layers='last'.")
        if self.layers == "all" and self.prior == "zero":
            raise PosthocUQError(
                "With prior='zero' the units of a hidden layer would stay alike for ever; take 'spectral' or "
                "'pretrained' with layers='all'."
            )
        if self.regularize and self.signal != "argmax":
            raise PosthocUQError("regularize=True is a part of signal='argmax'; give that too.")

    @property
    def means(self) -> str:
        """Of the prior, by name."""
        return self.prior or ("zero" if self.layers == "last" else "spectral")

    @property
    def calibrates_prior(self) -> bool:
        return False  # the variances are those of a prior and the data, around a mean of their own

    @property
    def head(self) -> str:
        return "moments" if self.layers == "all" else "linearized"

    def selection(self, layers: Selection | None) -> Selection:
        if layers is None:
            return self.layers
        if isinstance(layers, str) and layers in ("last", "all") and layers != self.layers:
            raise PosthocUQError(
                f"The fit was asked for layers={layers!r} and the method for layers={self.layers!r}; leave layers= out "
                f"of the fit, or pass uq.MessagePassing(layers={layers!r})."
            )
        return layers

    def passes(self) -> int:
        # of a whole network, once more for the statistics of the novelty
        return 1 if self.layers == "last" else 2

    def fit(self, task: Task) -> Posterior:
        likelihood = task.likelihood
        if world() > 1:
            raise PosthocUQError("method='message_passing' runs in one process.")
        if likelihood.name not in (self.likelihoods or ()):
            raise PosthocUQError(
                f"method='message_passing' knows what the targets of 'classification', 'binary' and 'regression' say "
                f"of the outputs, not those of likelihood={likelihood.name!r}; take a Laplace method for it."
            )
        if isinstance(likelihood, Gaussian) and likelihood.target_std is not None:
            raise PosthocUQError(
                "method='message_passing' learns from targets in the units of the network's outputs, which mean= and "
                "std= of uq.Gaussian are not; pass standardised targets, batch_to_targets=lambda batch: (batch[1] - "
                "mean) / std, or take a Laplace method."
            )
        source: FeatureSource | None = None
        stages: Stages = ()
        if self.layers == "last":
            source = last_layer(task)
            first = source.layer
        else:
            example = task.batch.narrow(0, 1, count_samples(task.batch)).copied()
            stages = example.call_any(lambda input: stages_of(task.model, task.layers, input))
            first = next(stage.layer for stage in stages if isinstance(stage, Weighted))
        if self.means == "pretrained":
            warn_user(
                "With prior='pretrained' the data of the fit must not be those that the model was trained on: the "
                "trained weights hold what these say already, and would count it twice. Pass held-out data, or take "
                "prior='zero'."
            )
        statistics: FeatureStatistics | None = None
        if source is not None:
            statistics = FeatureStatistics(source, likelihood, task.device, task.plan.memory_budget)
        with task.timed("reading the data"):
            examples = examples_of(task, first, source is not None, statistics)
        began = time.perf_counter()
        if source is None:
            blocks, notes = self._whole_network(task, stages, examples)
        else:
            block, notes = self._last_layer(task, first, examples)
            blocks = {first.name: block}
        task.seconds["message passing"] = time.perf_counter() - began
        for name, block in blocks.items():
            if not all(
                bool(torch.isfinite(tensor).all())
                for tensor in (*block.tensors().values(), block.stored_mean())
            ):
                raise NonFiniteError(
                    f"The messages to '{name}' are not finite in {task.plan.dtype}; bring the inputs to about unit "
                    f"size, or fit with dtype=torch.float64."
                )
        posterior = self._posterior(task, blocks, len(examples.inputs), notes)
        if statistics is None:
            return posterior
        # with the trained network's classes, which no change of the data moves
        posterior = posterior.replaced(features=statistics.result(task.plan.dtype))
        if likelihood.noise_variance is None:
            highest, settings = posterior.temperature, posterior.settings
            with torch.no_grad():
                temperature, share = _matched(task, first, blocks[first.name], examples.inputs, highest)
            posterior = posterior.at(replace(settings, temperature=temperature, scale=settings.scale / share))
            tuning = {"temperature": _MATCHED} if temperature < highest else {}
            posterior = posterior.noted(tuning=tuning | ({"scale": _MATCHED} if share < 1 else {}))
        return posterior

    def _posterior(
        self, task: Task, blocks: Mapping[str, MessagesBlock], samples: int, notes: dict[str, Any]
    ) -> Posterior:
        regression = task.likelihood.noise_variance is not None
        precision: float | LayerPriors | None = self.prior_precision
        if precision is None:
            precision = LayerPriors(
                {name: float(as_double(block.prior_precision).median()) for name, block in blocks.items()}
            )
        temperature = 1.0
        if not regression and self.signal == "argmax":  # a softmax then says what the noisy comparison says
            temperature = NOISE_VARIANCE**0.5 / _LOGISTIC
        fit = {
            "samples": samples,
            "seed": task.plan.seed,
            "layers fitted": self.layers,
            "form": self.posterior,
            "signal": "regression" if regression else self.signal.replace("auto", "softargmax"),
            ONE_PRIOR: True,
            "prior means": self.means,
            **({"regularize": True} if self.regularize else {}),
            **notes,
            **{f"seconds, {what}": value for what, value in task.seconds.items()},
        }
        posterior = task.posterior(
            self.name,
            blocks,
            Evidence(samples, noise_power=0),  # variances do not follow a later change of the noise
            fit,
            settings=Hyperparameters(float(samples), precision, temperature=temperature),
        )
        given = self.prior_precision is not None
        return posterior.noted(tuning={"prior precision": "given" if given else "median of the method's own"})

    def _signal(self, task: Task, units: Units | None) -> Signal:
        """How the targets of a fit enter, in these units."""
        noise = task.likelihood.noise_variance
        if noise is None:
            return Argmax(regularize=self.regularize) if self.signal == "argmax" else Softargmax()
        noise = on_device(host_double(noise), task.device)
        if units is not None:
            noise = noise.to(units.value_spread) / units.value_spread.square()
        return Regression(noise if noise.numel() > 1 else float(noise))

    def _trained(
        self,
        task: Task,
        stages: Stages | None,
        prior: ByStage,
        data: Batches,
        signal: Signal,
        usual_epochs: int,
    ) -> tuple[Trainer, dict[str, Any]]:
        """A trainer that has run, and lines of the report."""
        epochs = self.epochs or usual_epochs
        numbers = sum(message.rho.numel() for message in prior.values())
        size = 16 * numbers * len(data)
        if epochs > 1 and size > LARGEST_BYTES:
            raise PosthocUQError(
                f"The messages of {len(data)} batches to {numbers:,} weights take {size / 2**30:.1f} GiB, more than "
                f"{LARGEST_BYTES / 2**30:.0f}; {'' if stages is None else 'raise batch_size, or '}take epochs=1."
            )
        trainer = Trainer(
            stages,
            prior,
            data,
            signal,
            epochs=epochs,
            iterations=_GROUP_ITERATIONS if stages is None else None,
            seed=mixed_seed(task.plan.seed, _VISITS) % 2**63,
        )
        checkpoint = task.checkpoint
        saved = None if checkpoint is None else checkpoint.take_running(_PART)
        if checkpoint is not None and saved is not None:
            with checkpoint.reading("its messages are of another kind"):
                trainer.load_state_dict(saved)

        visits = (epochs - trainer.epoch) * len(data)
        bar = Progress("message passing", "batches", task.plan.progress, visits)

        def after_visit() -> None:
            bar.advance()
            if checkpoint is not None:
                checkpoint.after_batch(_PART, trainer.state_dict)

        with torch.no_grad(), bar:
            trainer.run(after_visit)
        if checkpoint is not None:
            checkpoint.save(_PART, trainer.state_dict())
        return trainer, {
            "epochs": epochs,
            "batches": len(data),
            "share of a new message": trainer.share,
            "visits begun anew": trainer.restarts,
        }

    def _whole_network(
        self, task: Task, stages: Stages, examples: Examples
    ) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
        generator, signal = self._generator(task), self._signal(task, None)
        layers = {place: stage for place, stage in enumerate(stages) if isinstance(stage, Weighted)}
        priors, start = dict[int, tuple[Tensor, Tensor]](), ByStage()
        for place, stage in layers.items():
            layer, after = stage.layer, stages[place + 1] if place + 1 < len(stages) else None
            factors = as_double(torch.ones(layer.matrix_shape, device=examples.targets.device))
            offset = torch.zeros_like(factors)
            if isinstance(after, BatchNormStage):  # the prior is of the layer and its BatchNorm together
                factors = factors / after.factor.reshape(layer.groups, layer.outputs, 1)
                if layer.bias is not None:
                    offset[..., -1] = -(after.offset / after.factor).reshape(layer.groups, layer.outputs)
            outputs = prod(stage.outputs) // layer.groups
            mean, precision = self._prior(task, layer, outputs, not priors, factors, offset, generator)
            priors[place] = mean, precision
            start[place] = Message((mean * precision).unsqueeze(0), precision.unsqueeze(0))
        data = Batches(examples, self.batch_size, task.plan.seed)
        trainer, notes = self._trained(task, stages, start, data, signal, _ALL_EPOCHS)
        blocks: dict[str, MessagesBlock] = {}
        for place, stage in layers.items():
            found = divide(trainer.posterior[place], start[place])
            message = Message(found.tau[0], found.rho[0].clamp(min=0))
            shift = message.tau.new_zeros(stage.layer.inputs)
            blocks[stage.layer.name] = _block(task, MessagesBlock, priors[place], message, shift, examples)
        return blocks, notes

    def _last_layer(
        self, task: Task, layer: Layer, examples: Examples
    ) -> tuple[MessagesBlock, dict[str, Any]]:
        """A last linear layer, over the inputs that the trained network gives it."""
        units, notes = Units(examples, layer), dict[str, Any]()
        factors, offset = units.factors.unsqueeze(0), units.offset.unsqueeze(0)
        generator = self._generator(task)
        prior = self._prior(task, layer, layer.outputs, True, factors, offset, generator, units.shift)
        mean, precision = (prior[0][0] - units.offset) / units.factors, prior[1][0] * units.factors.square()
        start, signal, data = (
            Message(mean * precision, precision),
            self._signal(task, units),
            units.of(examples),
        )
        if self.posterior == "full":
            size = 16 * layer.outputs * layer.inputs**2
            if size > LARGEST_BYTES:
                raise PosthocUQError(
                    f"posterior='full' of '{layer.name}' takes {size / 2**30:.1f} GiB ({layer.outputs} outputs, "
                    f"{layer.inputs} inputs), more than {LARGEST_BYTES / 2**30:.0f}; take posterior='diagonal'."
                )
            kind, joint = JointMessagesBlock, Message(start.tau, torch.diag_embed(precision))
            message = fit_sites(*data, signal, joint)[1]
        else:
            kind, batches = MessagesBlock, Batches(data, _GROUP_SIZE, task.plan.seed)
            usual = 1 if len(data.inputs) >= _LARGE_DATA else _LAST_EPOCHS
            trainer, notes = self._trained(task, None, {0: start}, batches, signal, usual)
            message = divide(trainer.posterior[0], start)
            if isinstance(signal, Regression):
                message = with_exact_means(*data, (mean, precision), message, signal)
        message = Message(*(part.unsqueeze(0) for part in units.of_layer(message)))
        return _block(task, kind, prior, message, units.shift, examples), notes

    def _generator(self, task: Task) -> torch.Generator:
        """Of the drawn means."""
        return torch.Generator().manual_seed(mixed_seed(task.plan.seed, _PRIOR) % 2**63)

    def _prior(
        self,
        task: Task,
        layer: Layer,
        outputs: int,
        first: bool,
        factors: Tensor,
        offset: Tensor,
        generator: torch.Generator,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Means and precisions ``(G, J, I)`` of a layer's weights, in float64.

        Args:
            task: the fit.
            layer: the layer.
            outputs: of a group, with all their positions.
            first: whether its inputs are constants.
            factors: by which weights that have the usual prior are multiplied to become the layer's.
            offset: what is added to them then.
            generator: of the drawn means.
            shift: subtracted from the inputs, ``(I,)``, which changes the bias; None for none.
        """
        inputs = layer.inputs - (layer.bias is not None)
        variance = torch.full_like(factors, weight_variance(inputs, outputs, first=first))
        variance[..., inputs:] = BIAS_VARIANCE
        if self.means == "pretrained":
            variance, mean = (
                _PRETRAINED_FACTOR * variance,
                _trained_matrix(task, layer).to(factors, copy=True),
            )
            if layer.bias is not None and shift is not None:
                mean[..., -1] += mean @ shift
        else:
            mean = torch.zeros_like(factors)
            if self.means == "spectral":
                groups, units = factors.shape[:2]
                mean[..., :inputs] = drawn_means(groups, units, inputs, outputs, generator, mean.device)
            mean = mean * factors + offset
        if self.prior_precision is not None:
            return mean, torch.full_like(mean, self.prior_precision)
        return mean, (variance * factors.square()).reciprocal()

    def check_update(self, posterior: Posterior) -> None:
        if not all(isinstance(block, JointMessagesBlock) for block in posterior.blocks.values()):
            raise PosthocUQError(
                "Data come in and go out of posteriors by uq.MessagePassing(posterior='full') alone, whose sites are "
                "sums over the data; this one has independent weights. Fit again on the data that it is to hold."
            )

    def update(self, posterior: Posterior, task: Task, remove: bool) -> Posterior:
        """Sites of data that come in are found under the posterior as their prior; those that go out are the ones
        under which it is in balance. For a regression both are exact.
        """
        ((name, layer),) = posterior.layers.items()
        block = cast(JointMessagesBlock, posterior.blocks[name])
        place = as_double(block.field).device  # the posterior may lie on another device than the model
        examples = Examples(*(part.to(place) for part in examples_of(task, layer, True)))
        samples = block.samples + (-1 if remove else 1) * len(examples.inputs)
        if samples < 1:
            raise PosthocUQError(
                f"The posterior has {block.samples} samples and {len(examples.inputs)} are to go out, which leaves "
                f"none."
            )
        fitted_by = MessagePassing(
            signal="argmax" if posterior.history.fit.get("signal") == "argmax" else "auto",
            regularize=bool(posterior.history.fit.get("regularize", False)),
        )
        units = Units(examples, layer, as_double(block.shift))
        signal, factors, data = fitted_by._signal(task, units), units.factors, units.of(examples)
        mean = (block.moved_mean()[0].to(factors) - units.offset) / factors
        precision = block.total()[0].to(factors) * factors.unsqueeze(2) * factors.unsqueeze(1)
        present = Message((precision @ mean.unsqueeze(2)).squeeze(2), precision)
        if remove:
            messages = site_to_weight_messages(data.inputs, sites_within(*data, signal, present))
        else:
            messages = fit_sites(*data, signal, present)[1]
        like = as_double(block.field)
        field, precision = (part.unsqueeze(0).to(like) for part in units.of_layer(messages))
        if remove:
            field, precision = -field, -precision
        else:
            weights = Weights.of(block.samples, len(examples.inputs), torch.finfo(block.field.dtype).eps)
            check_resolved(largest_of(block.total()), largest_of(precision), weights, 0.0, f"'{name}'")
        field, precision = like + field, as_double(block.precision) + precision
        own = precision.diagonal(dim1=-2, dim2=-1)
        below = float((own / block.total().diagonal(dim1=-2, dim2=-1)).min())
        empty = own < 0  # a feature that only the samples that went out had; rounding is left
        precision.masked_fill_(empty.unsqueeze(-1) | empty.unsqueeze(-2), 0.0)
        field.masked_fill_(empty, 0.0)
        new = JointMessagesBlock(
            block.prior_mean,
            block.prior_precision,
            field.to(block.field),
            precision.to(block.field),
            block.shift,
            samples,
        )
        if below < -1e-5 or new.fault() is not None:  # more than rounding
            raise NotContainedError("precision of a weight")
        history = posterior.history.noted(fit={"samples": samples})
        settings = replace(posterior.settings, scale=posterior.scale * samples / posterior.evidence.samples)
        evidence = Evidence(samples, noise_power=0)
        return posterior.with_blocks({name: new}, evidence=evidence, history=history, settings=settings)


def _trained_matrix(task: Task, layer: Layer) -> Tensor:
    """The trained weights with the biases as the last column, ``(G, J, I)`` in float64."""
    held = dict(task.model.named_parameters())
    weight, bias = held[layer.weight].detach(), None if layer.bias is None else held[layer.bias].detach()
    return as_double(layer.to_matrix(weight, bias))


def _block(
    task: Task,
    kind: type[MessagesBlock],
    prior: tuple[Tensor, Tensor],
    message: Message,
    shift: Tensor,
    examples: Examples,
) -> MessagesBlock:
    """The block of means and precisions before the data, and of the data's messages."""
    mean, precision, field, evidence, shift = (
        part.to(task.device, task.plan.dtype).contiguous() for part in (*prior, *message, shift)
    )
    return kind(mean, precision, field, evidence, shift, len(examples.inputs))


def last_layer(task: Task) -> FeatureSource:
    """The layer whose outputs are the model's, as the source of features.

    Raises:
        UnsupportedLayerError: there is none, or the selected layers are others.
    """
    source = task.features
    if source is None or source.source != "outputs" or source.layer.groups != 1:
        raise UnsupportedLayerError(
            "method='message_passing' with layers='last' needs a model whose outputs are those of its last linear "
            "layer, over one row of features a sample; let the model return what that layer gives."
        )
    if set(task.layers) != {source.layer.name}:
        raise UnsupportedLayerError(
            f"method='message_passing' with layers='last' is for '{source.layer.name}', whose outputs are the model's, "
            f"and {sorted(task.layers)[:5]} were selected; leave layers= out of the fit."
        )
    return source


# The temperature and the width at which a last layer's posterior predicts as the network does.
#
# The means are not the trained ones: the prior draws them to its own, and the variances of the logits are those of
# independent messages. So at temperature 1 a posterior is far less sure than the network, although its order of classes
# is as good. A temperature sharpens means and variances alike: where the variances are too large for the means, no
# temperature gives the network's predictions, but a narrower posterior at another one does. No labels are needed for
# either, only the network's own outputs.

_DRAWS = 128  # of the logits
_SAMPLES = 512  # of the data, at most
_MAX_LOGITS = 2**23  # that are drawn, but for one sample
_LOWEST = -1.5  # decade of the temperature
_COARSE, _FINE = 0.25, 0.025  # steps between decades
_SLACK = 0.005  # nats above the least divergence that a wider posterior may be
_SEARCH_SAMPLES = 128  # of the samples, by which the width is found
_NARROW = (-0.5, -1.0, -2.0)  # decades of the variances among which the least divergence is looked for
_HALVINGS = 4  # of the interval in which the widest posterior lies


def _matched(
    task: Task, layer: Layer, block: MessagesBlock, inputs: Tensor, highest: float
) -> tuple[float, float]:
    """The temperature of the least mean divergence ``KL(p_network || p_posterior)`` over up to 512 samples of a fit,
    for the largest share of the posterior's variances at which it is within 0.005 nats of the least of all; and that
    share.

    A network that knows less than the posterior, as one whose last layer is not trained, is no measure: then it is
    `highest`, and all of the variances.

    Args:
        task: the fit.
        layer: the model's last.
        block: its posterior.
        inputs: of the layer, ``(N, I)`` with the bias's 1.
        highest: the temperature of the posterior's own.
    """
    samples, outputs = len(inputs), layer.outputs
    wanted = max(1, min(samples, _SAMPLES, _MAX_LOGITS // (_DRAWS * outputs)))
    generator = torch.Generator().manual_seed(mixed_seed(task.plan.seed, _TEMPERATURE) % 2**63)
    picked = torch.randperm(samples, generator=generator, device="cpu")[:wanted]
    rows = as_double(inputs[picked.to(inputs.device)])
    network = _with_zero(rows @ _trained_matrix(task, layer)[0].to(rows).T).log_softmax(-1)
    mean, variance = _logits(block, shift_inputs(rows, as_double(block.shift)))
    normals = torch.randn(_DRAWS, 1, outputs, generator=generator, dtype=torch.float64, device="cpu")
    deviation = variance.sqrt() * normals.to(mean)
    top = log10(highest)

    def divergence(decade: float, width: float, few: int | None = None) -> float:
        drawn = _with_zero(mean[:few] + 10 ** (width / 2) * deviation[:, :few])
        posterior = (drawn / 10**decade).log_softmax(-1).logsumexp(0) - log(_DRAWS)
        return float((network[:few].exp() * (network[:few] - posterior)).sum(-1).mean())

    from scipy.optimize import minimize_scalar

    def at_any_temperature(width: float) -> float:
        """The least divergence."""
        search = {"bounds": (_LOWEST, top), "method": "bounded", "options": {"xatol": _FINE}}
        found: Any = minimize_scalar(divergence, args=(width, _SEARCH_SAMPLES), **search)
        return min(float(found.fun), divergence(top, width, _SEARCH_SAMPLES))

    def nearest(start: float, end: float, step: float) -> float:
        """The decade of the least divergence on a grid, at the width that was found."""
        places = [end - step * index for index in range(int((end - start) / step + 1e-9) + 1)]
        return min(places, key=lambda decade: divergence(decade, width))

    divergences = {decade: at_any_temperature(decade) for decade in (0.0, *_NARROW)}
    narrow = min(divergences, key=divergences.__getitem__)
    budget, width = divergences[narrow] + _SLACK, 0.0  # 0 is all of the variances
    if divergences[width] > budget:
        for _ in range(_HALVINGS):
            middle = (narrow + width) / 2
            if at_any_temperature(middle) <= budget:
                narrow = middle
            else:
                width = middle
        width = narrow
    coarse = nearest(_LOWEST, top, _COARSE)
    decade = nearest(max(_LOWEST, coarse - _COARSE), min(top, coarse + _COARSE), _FINE)
    return 10**decade, 10**width


def _with_zero(logits: Tensor) -> Tensor:
    """Of a single logit, whose probability is its sigmoid, the two of a softmax."""
    return logits if logits.shape[-1] > 1 else F.pad(logits, (1, 0))


def _logits(block: MessagesBlock, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of the logits, ``(N, J)``, of rows for the weights with the moved bias."""
    mean, total = block.moved_mean()[0].to(rows), block.total()[0].to(rows)
    if not isinstance(block, JointMessagesBlock):
        return rows @ mean.T, rows.square() @ total.reciprocal().T
    found = marginals(rows, Message((total @ mean.unsqueeze(2)).squeeze(2), total))
    return found.mean, found.variance
