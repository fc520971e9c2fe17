"""`MessagePassing`: Gaussian weight posteriors by messages, over a last layer or a whole sequential network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import log, log10
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

from posthoc_uq.core.devices import as_double, host_double, placed
from posthoc_uq.core.distributed import world
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError, warn_user
from posthoc_uq.core.options import Count, Magnitude
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.curvature.features import FeatureSource, find_features
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import Selection
from posthoc_uq.methods.message_passing.joint import (
    Joint,
    as_layer_message,
    as_matrix,
    fit_sites,
    independent,
    marginals,
    site_to_weight_messages,
    sites_within,
    with_exact_means,
)
from posthoc_uq.methods.message_passing.messages import (
    NOISE_VARIANCE,
    Argmax,
    Message,
    Regression,
    Signal,
    Softargmax,
    from_moments,
)
from posthoc_uq.methods.message_passing.network import (
    Chain,
    LayerMessage,
    Stage,
    Weighted,
    chain_of,
    folded_parameters,
    output_counts,
    quotient,
    unfolding,
)
from posthoc_uq.methods.message_passing.train import (
    BIAS_VARIANCE,
    Batches,
    ByStage,
    Examples,
    Trainer,
    Units,
    drawn_means,
    examples_of,
    weight_variance,
)
from posthoc_uq.methods.method import Method
from posthoc_uq.methods.task import Task, features_of_rows
from posthoc_uq.posteriors.block import NotContainedError, Weights, check_resolved, largest_of
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.laplace import LARGEST_BYTES
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock, moved
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import ONE_PRIOR, Evidence, Hyperparameters, LayerPriors

_LARGE_DATA = 20_000  # samples from which on a last layer's batches are visited once
_LAST_EPOCHS, _ALL_EPOCHS = 4, 18  # visits of every batch where none are given
_GROUP_SIZE = 64  # examples whose messages to a last layer are made together
_GROUP_ITERATIONS = 2
_PRETRAINED_FACTOR = 0.1  # on the prior variances where the means are pretrained
_PART = "messages"  # the name of this part of a fit
_PRIOR, _ORDER, _VISITS, _TEMPERATURE = 401, 402, 403, 404  # streams of the seed
_LOGISTIC = 1.702  # a standard normal distribution function is close to a logistic one of this slope
_MATCHED = "nearest to the network's predictions of the fit's data"


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
            sequential network.
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
    """

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
    def trains(self) -> bool:
        return True

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
        likelihood = task.settings.likelihood
        if world() > 1:
            raise PosthocUQError("method='message_passing' runs in one process.")
        if likelihood.name not in (self.likelihoods or ()):
            raise PosthocUQError(
                f"method='message_passing' knows what the targets of 'classification', 'binary' and 'regression' say "
                f"of the outputs, not those of likelihood={likelihood.name!r}; take a Laplace method for it."
            )
        chain = chain_of(task.model, task.layers) if self.layers == "all" else None
        source = None if chain is not None else last_layer(task)
        if self.means == "pretrained":
            warn_user(
                "With prior='pretrained' the data of the fit must not be those that the model was trained on: the "
                "trained weights hold what these say already, and would count it twice. Pass held-out data, or take "
                "prior='zero'."
            )
        layer = None if source is None else source.layer
        examples = task.timed("reading the data", lambda: examples_of(task, layer))
        began = time.perf_counter()
        if chain is not None:
            blocks, notes = self._whole_network(task, chain, examples)
        else:
            assert layer is not None
            block, notes = self._last_layer(task, layer, examples)
            blocks = {layer.name: block}
        task.seconds["message passing"] = time.perf_counter() - began
        for name, block in blocks.items():
            if not all(
                bool(torch.isfinite(tensor).all())
                for tensor in (*block.tensors().values(), block.stored_mean())
            ):
                raise NonFiniteError(
                    f"The messages to '{name}' are not finite in {task.settings.dtype}; bring the inputs to about unit "
                    f"size, or fit with dtype=torch.float64."
                )
        posterior = self._posterior(task, blocks, len(examples.inputs), notes)
        if source is not None:
            posterior.features = _features(task, source, examples.inputs)
        if layer is not None and likelihood.noise_variance is None:
            highest, tuning = posterior.temperature, posterior.history.tuning
            with torch.no_grad():
                temperature, share = _matched(task, layer, blocks[layer.name], examples, highest)
            posterior.temperature, posterior.scale = temperature, posterior.scale / share
            tuning |= {"temperature": _MATCHED} if temperature < highest else {}
            tuning |= {"scale": _MATCHED} if share < 1 else {}
        return posterior

    def _posterior(
        self, task: Task, blocks: Mapping[str, MessagesBlock], samples: int, notes: dict[str, Any]
    ) -> Posterior:
        regression = task.settings.likelihood.noise_variance is not None
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
            "seed": task.settings.seed,
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
        posterior.history.tuning["prior precision"] = "given" if given else "median of the method's own"
        return posterior

    def _signal(self, task: Task, units: Units | None) -> Signal:
        """How the targets of a fit enter, in these units."""
        noise = task.settings.likelihood.noise_variance
        if noise is None:
            return Argmax(regularize=self.regularize) if self.signal == "argmax" else Softargmax()
        noise = host_double(noise)
        if units is None:
            noise = placed(noise, task.device)
        else:
            noise = noise.to(units.value_spread) / units.value_spread.square()
        return Regression(noise if noise.numel() > 1 else float(noise))

    def _trained(
        self,
        task: Task,
        stages: list[Stage],
        prior: ByStage,
        data: Batches,
        signal: Signal,
        usual_epochs: int,
        grouped: bool = False,
    ) -> tuple[Trainer, dict[str, Any]]:
        """A trainer that has run, and lines of the report."""
        epochs = self.epochs or usual_epochs
        numbers = sum(part.rho.numel() for message in prior.values() for part in message)
        size = 16 * numbers * len(data)
        if epochs > 1 and size > LARGEST_BYTES:
            raise PosthocUQError(
                f"The messages of {len(data)} batches to {numbers:,} weights take {size / 2**30:.1f} GiB, more than "
                f"{LARGEST_BYTES / 2**30:.0f}; {'' if grouped else 'raise batch_size, or '}take epochs=1."
            )
        trainer = Trainer(
            stages,
            prior,
            data,
            signal,
            epochs=epochs,
            iterations=_GROUP_ITERATIONS if grouped else None,
            grouped=grouped,
            seed=mixed_seed(task.settings.seed, _VISITS) % 2**63,
        )
        checkpoint = task.checkpoint
        saved = None if checkpoint is None else checkpoint.take_running(_PART)
        if checkpoint is not None and saved is not None:
            with checkpoint.reading("its messages are of another kind"):
                trainer.load_state_dict(saved)

        def after_visit() -> None:
            if checkpoint is not None:
                checkpoint.after_batch(_PART, trainer.state_dict)

        with torch.no_grad():
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
        self, task: Task, chain: Chain, examples: Examples
    ) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
        prior = self._prior_of_all(task, chain, tuple(examples.inputs.shape[1:]))
        data = Batches(examples, None, self.batch_size, mixed_seed(task.settings.seed, _ORDER))
        signal = self._signal(task, None)
        trainer, notes = self._trained(task, chain.stages, prior, data, signal, _ALL_EPOCHS)
        blocks: dict[str, MessagesBlock] = {}
        for place, layer in chain.layers.items():
            factor, offset = unfolding(layer, chain.folds.get(place), task.device)
            before = _unfolded(prior[place], layer, factor, offset)
            after = _unfolded(trainer.posterior[place], layer, factor, offset)
            parts = before.mean, before.rho, after.tau - before.tau, (after.rho - before.rho).clamp(min=0)
            mean, precision, field, evidence = (
                part.to(task.device, task.settings.dtype).contiguous() for part in parts
            )
            shift = mean.new_zeros(layer.inputs)
            samples = len(examples.inputs)
            blocks[layer.name] = MessagesBlock(mean, precision, field, evidence, shift, samples)
        return blocks, notes

    def _prior_of_all(self, task: Task, chain: Chain, shape: tuple[int, ...]) -> ByStage:
        """Of all weights, for inputs of this shape."""
        generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _PRIOR) % 2**63)
        parameters, first = dict(task.model.named_parameters()), min(chain.layers)
        counts, prior = output_counts(chain.stages, shape), ByStage()
        for place, layer in chain.layers.items():
            inputs, outputs = layer.inputs - (layer.bias is not None), counts[place]
            variance, bias_variance = weight_variance(inputs, outputs, first=place == first), BIAS_VARIANCE
            fold = chain.folds.get(place)
            mean, bias_mean = folded_parameters(layer, fold, parameters)
            if self.means == "pretrained":
                variance, bias_variance = _PRETRAINED_FACTOR * variance, _PRETRAINED_FACTOR * bias_variance
            else:
                mean = drawn_means(tuple(mean.shape), inputs, outputs, generator, mean.device)
                bias_mean = None if bias_mean is None else torch.zeros_like(bias_mean)
            if bias_mean is None:
                bias_mean = mean.new_zeros(layer.groups, 0)
            variances = torch.full_like(mean, variance)
            bias_variances = torch.full_like(bias_mean, bias_variance)
            if self.prior_precision is not None:
                factor = unfolding(layer, fold, mean.device)[0].transpose(1, 2)
                variances = 1 / (self.prior_precision * factor.square()).expand(mean.shape)
                bias_variances = variances[:, 0, : bias_mean.shape[1]]
            prior[place] = LayerMessage(
                from_moments(mean, variances), from_moments(bias_mean, bias_variances)
            )
        return prior

    def _last_layer(
        self, task: Task, layer: Layer, examples: Examples
    ) -> tuple[MessagesBlock, dict[str, Any]]:
        """A last linear layer, over the inputs that the trained network gives it."""
        units = Units.of(examples, layer.bias is not None)
        prior, signal, notes = self._prior_of_last(task, layer, units), self._signal(task, units), {}
        mean, precision = prior
        rows, targets = units.rows(examples.inputs), units.targets(examples.targets)
        if self.posterior == "full":
            size = 16 * layer.outputs * layer.inputs**2
            if size > LARGEST_BYTES:
                raise PosthocUQError(
                    f"posterior='full' of '{layer.name}' takes {size / 2**30:.1f} GiB ({layer.outputs} outputs, "
                    f"{layer.inputs} inputs), more than {LARGEST_BYTES / 2**30:.0f}; take posterior='diagonal'."
                )
            kind, (field, evidence) = (
                JointMessagesBlock,
                fit_sites(rows, targets, signal, independent(*prior))[1],
            )
        else:
            inputs = layer.inputs - units.bias
            stages: list[Stage] = [Weighted(layer.name, inputs, layer.outputs, bias=units.bias)]
            start = as_layer_message(Message(mean * precision, precision), units.bias)
            data = Batches(examples, units, _GROUP_SIZE, mixed_seed(task.settings.seed, _ORDER))
            usual = 1 if len(rows) >= _LARGE_DATA else _LAST_EPOCHS
            trainer, notes = self._trained(task, stages, {0: start}, data, signal, usual, grouped=True)
            message = as_matrix(quotient(trainer.posterior[0], start), units.bias)
            if isinstance(signal, Regression):
                message = with_exact_means(rows, targets, prior, message, signal)
            kind, (field, evidence) = MessagesBlock, message
        of_layer = mean * units.factors + units.offset, precision / units.factors.square()
        prior_mean, prior_precision, field, evidence = (
            part.unsqueeze(0).to(task.device, task.settings.dtype).contiguous()
            for part in (*of_layer, *units.of_layer(field, evidence))
        )
        shift = F.pad(units.shift, (0, int(units.bias))).to(task.device, task.settings.dtype)
        return kind(prior_mean, prior_precision, field, evidence, shift, len(rows)), notes

    def _prior_of_last(self, task: Task, layer: Layer, units: Units) -> tuple[Tensor, Tensor]:
        """Means and precisions ``(J, n)`` in the units of the data, of the weights with the moved bias."""
        factors, inputs = units.factors, layer.inputs - units.bias
        mean = torch.zeros_like(factors)
        variance = torch.full_like(factors, weight_variance(inputs, layer.outputs, first=True))
        if units.bias:
            variance[:, -1] = BIAS_VARIANCE
        if self.means == "spectral":
            generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _PRIOR) % 2**63)
            drawn = drawn_means((inputs, layer.outputs), inputs, layer.outputs, generator, mean.device)
            mean[:, :inputs] = drawn.T
        elif self.means == "pretrained":
            weights, bias = folded_parameters(layer, None, dict(task.model.named_parameters()))
            trained = weights[0].T
            if bias is not None:
                trained = torch.cat([trained, (bias[0] + trained @ units.shift).unsqueeze(1)], 1)
            mean = (trained.to(factors) - units.offset) / factors
            variance = _PRETRAINED_FACTOR * variance
        if self.prior_precision is not None:
            return mean, self.prior_precision * factors.square()
        return mean, variance.reciprocal()

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
        examples = examples_of(task, layer)
        place = as_double(block.field).device  # the posterior may lie on another device than the model
        examples = examples._replace(inputs=examples.inputs.to(place), targets=examples.targets.to(place))
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
        task.settings = replace(task.settings, likelihood=posterior.likelihood)
        bias, shift = layer.bias is not None, as_double(block.shift)
        units = Units.of(examples, bias, shift[:-1] if bias else shift)
        signal, factors = fitted_by._signal(task, units), units.factors
        mean = (block.moved_mean()[0].to(factors) - units.offset) / factors
        precision = block.total()[0].to(factors) * factors.unsqueeze(2) * factors.unsqueeze(1)
        present = Joint((precision @ mean.unsqueeze(2)).squeeze(2), precision)
        rows, targets = units.rows(examples.inputs), units.targets(examples.targets)
        if remove:
            messages = site_to_weight_messages(rows, sites_within(rows, targets, signal, present))
        else:
            messages = fit_sites(rows, targets, signal, present)[1]
        like = as_double(block.field)
        field, precision = (part.unsqueeze(0).to(like) for part in units.of_layer(*messages))
        if remove:
            field, precision = -field, -precision
        else:
            weights = Weights.of(block.samples, len(examples.inputs), torch.finfo(block.field.dtype).eps)
            check_resolved(largest_of(block.total()), largest_of(precision), weights, 0.0, f"'{name}'")
        new = JointMessagesBlock(
            block.prior_mean,
            block.prior_precision,
            (like + field).to(block.field),
            (as_double(block.precision) + precision).to(block.field),
            block.shift,
            samples,
        )
        smallest = float(new.precision.diagonal(dim1=-2, dim2=-1).min())
        if smallest < -1e-5 * largest_of(new.total()) or new.fault() is not None:  # more than rounding
            raise NotContainedError("precision of a weight")
        history = deepcopy(posterior.history)
        history.fit["samples"] = samples
        settings = replace(posterior.settings, scale=posterior.scale * samples / posterior.evidence.samples)
        evidence = Evidence(samples, noise_power=0)
        return posterior.with_blocks({name: new}, evidence=evidence, history=history, settings=settings)


def _unfolded(message: LayerMessage, layer: Layer, factor: Tensor, offset: Tensor) -> Message:
    """Messages to folded weights as those to the layer's, ``(G, m, n)``."""
    weights = Message(*(part.transpose(1, 2) for part in message.weights))
    weights = Message(weights.tau / factor, weights.rho / factor.square())
    if layer.bias is None:
        return weights
    scale = factor.squeeze(2)
    rho = message.bias.rho / scale.square()
    bias = Message(message.bias.tau / scale + offset * rho, rho)
    return Message(*(torch.cat([w, b.unsqueeze(2)], 2) for w, b in zip(weights, bias, strict=True)))


def last_layer(task: Task) -> FeatureSource:
    """The layer whose outputs are the model's, as the source of features.

    Raises:
        UnsupportedLayerError: there is none, or the selected layers are others.
    """
    autocast = torch.is_autocast_enabled(task.device.type)
    source = find_features(task.model, task.batch, autocast)
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


def _features(task: Task, source: FeatureSource, rows: Tensor) -> FeatureGrams:
    """What entered the last layer, with the trained network's classes, which no change of the data moves: the pass that
    kept it is enough.
    """
    layer = source.layer
    rows = rows if layer.bias is None else torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    held = dict(task.model.named_parameters())
    weights = layer.to_matrix(held[layer.weight], None if layer.bias is None else held[layer.bias])[0]
    with torch.no_grad():
        return features_of_rows(task, source, rows, rows @ weights.to(rows).T)


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
    task: Task, layer: Layer, block: MessagesBlock, examples: Examples, highest: float
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
        examples: the data.
        highest: the temperature of the posterior's own.
    """
    samples, outputs = len(examples.inputs), layer.outputs
    wanted = max(1, min(samples, _SAMPLES, _MAX_LOGITS // (_DRAWS * outputs)))
    generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _TEMPERATURE) % 2**63)
    picked = torch.randperm(samples, generator=generator, device="cpu")[:wanted]
    rows = as_double(examples.inputs[picked.to(examples.inputs.device)])
    weights, bias = folded_parameters(layer, None, dict(task.model.named_parameters()))
    trained = rows @ weights[0] if bias is None else rows @ weights[0] + bias[0]
    network = _with_zero(trained).log_softmax(-1)
    mean, variance = _logits(block, layer, rows)
    normals = torch.randn(_DRAWS, 1, outputs, generator=generator, dtype=torch.float64, device="cpu")
    deviation = variance.sqrt() * normals.to(mean)
    top = log10(highest)

    def divergence(decade: float, width: float, few: int | None = None) -> float:
        drawn = _with_zero(mean[:few] + 10 ** (width / 2) * deviation[:, :few])
        posterior = (drawn / 10**decade).log_softmax(-1).logsumexp(0) - log(_DRAWS)
        return float((network[:few].exp() * (network[:few] - posterior)).sum(-1).mean())

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


def _logits(block: MessagesBlock, layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of the logits, ``(N, J)``."""
    if layer.bias is not None:
        rows = moved(torch.cat([rows, torch.ones_like(rows[:, :1])], 1), as_double(block.shift))
    mean, total = block.moved_mean()[0].to(rows), block.total()[0].to(rows)
    if not isinstance(block, JointMessagesBlock):
        return rows @ mean.T, rows.square() @ total.reciprocal().T
    found = marginals(rows, Joint((total @ mean.unsqueeze(2)).squeeze(2), total))
    return found.mean, found.variance
