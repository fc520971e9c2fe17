"""`MessagePassing`: Gaussian weight posteriors by messages, over a last layer or a whole sequential network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import log, log10
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

from posthoc_uq.core.devices import as_double, placed
from posthoc_uq.core.distributed import world
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError, warn_user
from posthoc_uq.core.options import Count, Magnitude
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.curvature.features import FeatureSource, find_features
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import Selection
from posthoc_uq.methods.message_passing import joint
from posthoc_uq.methods.message_passing.joint import Joint, as_layer_message, as_matrix
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
    Schedule,
    Trainer,
    Units,
    drawn_means,
    examples_of,
    noise_of,
    weight_variance,
)
from posthoc_uq.methods.method import Method
from posthoc_uq.methods.task import Task, features_of_rows
from posthoc_uq.posteriors.block import NotContainedError, Weights, check_resolved, largest_of
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.laplace import LARGEST_BYTES
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock, moved
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.prior import ONE_PRIOR
from posthoc_uq.posteriors.settings import Evidence, History, Hyperparameters, LayerPriors

LAST, ALL = "last", "all"
FULL = "full"
PRETRAINED = "pretrained"
LIKELIHOODS = ("classification", "binary", "regression")
"""The likelihoods of whose targets it knows what they say of the outputs."""

MANY = 20_000  # samples from which on a last layer's batches are visited once
_LAST_EPOCHS, _ALL_EPOCHS = 4, 18  # visits of every batch where none are given
_GROUP_SIZE = 64  # examples whose messages to a last layer are made together
_GROUP_ITERATIONS = 2
_PRETRAINED_FACTOR = 0.1  # on the prior variances where the means are pretrained
_PART = "messages"  # the name of this part of a fit
_PRIOR, _ORDER, _VISITS, _TEMPERATURE = 401, 402, 403, 404  # streams of the seed
_LOGISTIC = 1.702  # a standard normal distribution function is close to a logistic one of this slope
_MATCHED = "nearest to the network's predictions of the fit's data"


def signal_of(task: Task, options: MessagePassing, units: Units | None) -> Signal:
    """What the targets of a fit say of the outputs."""
    if task.settings.likelihood.noise_variance is not None:
        noise = noise_of(task.settings.likelihood, units)
        noise = placed(noise, task.device) if units is None else noise
        return Regression(noise if noise.numel() > 1 else float(noise))
    if options.signal == "argmax":
        return Argmax(regularize=options.regularize)
    return Softargmax()


def _trained(
    task: Task,
    stages: list[Stage],
    prior: ByStage,
    data: Batches,
    signal: Signal,
    schedule: Schedule,
    grouped: bool = False,
) -> Trainer:
    numbers = sum(part.rho.numel() for message in prior.values() for part in message)
    size = 16 * numbers * len(data)
    if schedule.epochs > 1 and size > LARGEST_BYTES:
        raise PosthocUQError(
            f"The messages of {len(data)} batches to {numbers:,} weights take {size / 2**30:.1f} GiB, more than "
            f"{LARGEST_BYTES / 2**30:.0f}; {'' if grouped else 'raise batch_size, or '}take epochs=1."
        )
    seed = mixed_seed(task.settings.seed, _VISITS) % 2**63
    trainer = Trainer(stages, prior, data, signal, schedule, grouped, seed)
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
    return trainer


def _visits(trainer: Trainer) -> dict[str, Any]:
    """Lines of the report."""
    return {
        "epochs": trainer.schedule.epochs,
        "batches": len(trainer.data),
        "share of a new message": trainer.share,
        "visits begun anew": trainer.restarts,
    }


# A whole sequential network


def whole_blocks(
    task: Task,
    options: MessagePassing,
    prior_precision: float | None,
    chain: Chain,
    examples: Examples,
) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
    counts = output_counts(chain.stages, tuple(examples.inputs.shape[1:]))
    prior = _prior_of_all(task, options, prior_precision, chain, counts)
    data = Batches(examples, None, options.batch_size, mixed_seed(task.settings.seed, _ORDER))
    schedule = Schedule(_ALL_EPOCHS if options.epochs is None else options.epochs, shuffle=True)
    trainer = _trained(task, chain.stages, prior, data, signal_of(task, options, None), schedule)
    blocks: dict[str, MessagesBlock] = {}
    for place, layer in chain.layers.items():
        factor, offset = unfolding(layer, chain.folds.get(place), task.device)
        own = _of_layer(prior[place], layer, factor, offset)
        whole = _of_layer(trainer.posterior[place], layer, factor, offset)
        parts = own.mean, own.rho, whole.tau - own.tau, (whole.rho - own.rho).clamp(min=0)
        mean, precision, field, said = (
            part.to(task.device, task.settings.dtype).contiguous() for part in parts
        )
        shift = mean.new_zeros(layer.inputs)
        blocks[layer.name] = MessagesBlock(mean, precision, field, said, shift, len(examples.inputs))
    return blocks, _visits(trainer)


def _of_layer(message: LayerMessage, layer: Layer, factor: Tensor, offset: Tensor) -> Message:
    """Messages to folded weights as those to the layer's, ``(G, m, n)``."""
    weights = Message(*(part.transpose(1, 2) for part in message.weights))
    weights = Message(weights.tau / factor, weights.rho / factor.square())
    if layer.bias is None:
        return weights
    scale = factor.squeeze(2)
    rho = message.bias.rho / scale.square()
    bias = Message(message.bias.tau / scale + offset * rho, rho)
    return Message(*(torch.cat([w, b.unsqueeze(2)], 2) for w, b in zip(weights, bias, strict=True)))


def _prior_of_all(
    task: Task,
    options: MessagePassing,
    prior_precision: float | None,
    chain: Chain,
    counts: Mapping[int, int],
) -> ByStage:
    generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _PRIOR) % 2**63)
    parameters, first = dict(task.model.named_parameters()), min(chain.layers)
    prior: ByStage = {}
    for place, layer in chain.layers.items():
        inputs, outputs = layer.inputs - (layer.bias is not None), counts[place]
        variance, bias_variance = weight_variance(inputs, outputs, first=place == first), BIAS_VARIANCE
        fold = chain.folds.get(place)
        trained, bias = folded_parameters(layer, fold, parameters)
        if options.means == PRETRAINED:
            variance, bias_variance = _PRETRAINED_FACTOR * variance, _PRETRAINED_FACTOR * bias_variance
            mean, bias_mean = trained, bias
        else:
            mean = drawn_means(tuple(trained.shape), inputs, outputs, generator, trained.device)
            bias_mean = None if bias is None else torch.zeros_like(bias)
        variances, bias_variances = torch.full_like(mean, variance), None
        if bias_mean is not None:
            bias_variances = torch.full_like(bias_mean, bias_variance)
        if prior_precision is not None:
            factor = unfolding(layer, fold, mean.device)[0].transpose(1, 2)
            variances = 1 / (prior_precision * factor.square()).expand(mean.shape)
            if bias_variances is not None:
                bias_variances = 1 / (prior_precision * factor.square()).expand(mean.shape)[:, 0]
        if bias_mean is None or bias_variances is None:
            empty = mean.new_zeros(layer.groups, 0)
            prior[place] = LayerMessage(from_moments(mean, variances), Message(empty, empty))
        else:
            prior[place] = LayerMessage(
                from_moments(mean, variances), from_moments(bias_mean, bias_variances)
            )
    return prior


# A last linear layer, over the inputs that the trained network gives it


def last_blocks(
    task: Task,
    options: MessagePassing,
    prior_precision: float | None,
    layer: Layer,
    examples: Examples,
) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
    bias = layer.bias is not None
    units = Units.of(examples, bias)
    prior = _prior_of_last(task, options, prior_precision, layer, units)
    signal = signal_of(task, options, units)
    if options.posterior == FULL:
        sites = _joint_sites(layer, units, examples, signal, prior)
        return {layer.name: joint_block(task, layer, units, prior, sites, len(examples.inputs))}, {}
    stages: list[Stage] = [Weighted(layer.name, layer.inputs - bias, layer.outputs, bias=bias)]
    mean, precision = prior
    start = as_layer_message(Message(mean * precision, precision), bias)
    data = Batches(examples, units, _GROUP_SIZE, mixed_seed(task.settings.seed, _ORDER))
    usual = 1 if data.samples >= MANY else _LAST_EPOCHS
    schedule = Schedule(options.epochs or usual, _GROUP_ITERATIONS, shuffle=True)
    trainer = _trained(task, stages, {0: start}, data, signal, schedule, grouped=True)
    message = as_matrix(quotient(trainer.posterior[0], start), bias)
    if isinstance(signal, Regression):
        rows, targets = joint_rows(layer, units, examples), units.targets(examples.targets)
        message = joint.with_exact_means(rows, targets, prior, message, signal)
    block = diagonal_block(task, layer, units, prior, message, len(examples.inputs))
    return {layer.name: block}, _visits(trainer)


def _prior_of_last(
    task: Task, options: MessagePassing, prior_precision: float | None, layer: Layer, units: Units
) -> tuple[Tensor, Tensor]:
    """Means and precisions ``(J, n)`` in the units of the data, of the weights with the moved bias."""
    bias = layer.bias is not None
    factors, inputs = units.factors(bias), layer.inputs - bias
    mean = torch.zeros_like(factors)
    variance = torch.full_like(factors, weight_variance(inputs, layer.outputs, first=True))
    if bias:
        variance[:, -1] = BIAS_VARIANCE
    if options.means == "spectral":
        generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _PRIOR) % 2**63)
        drawn = drawn_means((inputs, layer.outputs), inputs, layer.outputs, generator, mean.device)
        mean[:, :inputs] = drawn.T
    elif options.means == PRETRAINED:
        parameters = dict(task.model.named_parameters())
        weights, own = folded_parameters(layer, None, parameters)
        trained = weights[0].T
        if own is not None:
            trained = torch.cat([trained, (own[0] + trained @ units.shift).unsqueeze(1)], 1)
        mean = (trained.to(factors) - units.offset(bias)) / factors
        variance = _PRETRAINED_FACTOR * variance
    precision = variance.reciprocal()
    if prior_precision is not None:
        precision = prior_precision * factors.square()
    return mean, precision


def _joint_sites(
    layer: Layer,
    units: Units,
    examples: Examples,
    signal: Signal,
    prior: tuple[Tensor, Tensor],
) -> joint.Joint:
    """The messages of all targets to the weights, in the units of the data."""
    size = 16 * layer.outputs * layer.inputs**2
    if size > LARGEST_BYTES:
        raise PosthocUQError(
            f"posterior='full' of '{layer.name}' takes {size / 2**30:.1f} GiB ({layer.outputs} outputs, {layer.inputs} "
            f"inputs), more than {LARGEST_BYTES / 2**30:.0f}; take posterior='diagonal'."
        )
    rows = joint_rows(layer, units, examples)
    return joint.fit_sites(rows, units.targets(examples.targets), signal, joint.independent(*prior))[1]


def joint_rows(layer: Layer, units: Units, examples: Examples) -> Tensor:
    """Features ``(N, n)`` in the units of the data, with a 1 for the bias."""
    rows = units.inputs(examples.inputs)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if layer.bias is not None else rows


def joint_block(
    task: Task, layer: Layer, units: Units, prior: tuple[Tensor, Tensor], told: joint.Joint, samples: int
) -> JointMessagesBlock:
    """A block of the layer's weights from a prior and evidence in the units of the data."""
    bias = layer.bias is not None
    said = joint_evidence(units, told, bias)
    return _block(task, JointMessagesBlock, units, prior, said, samples, bias)


def joint_evidence(units: Units, told: joint.Joint, bias: bool) -> tuple[Tensor, Tensor]:
    """Field ``(J, n)`` and precision ``(J, n, n)`` of the layer's weights, from those in the units of the data."""
    factors, offset = units.factors(bias), units.offset(bias)
    precision = told.precision / (factors.unsqueeze(2) * factors.unsqueeze(1))
    return told.field / factors + torch.einsum("jab,jb->ja", precision, offset), precision


def diagonal_block(
    task: Task, layer: Layer, units: Units, prior: tuple[Tensor, Tensor], told: Message, samples: int
) -> MessagesBlock:
    """The same for independent weights."""
    bias = layer.bias is not None
    said = diagonal_evidence(units, told, bias)
    return _block(task, MessagesBlock, units, prior, said, samples, bias)


def diagonal_evidence(units: Units, told: Message, bias: bool) -> tuple[Tensor, Tensor]:
    """Field and precision ``(J, n)`` of the layer's weights, from those in the units of the data."""
    factors, offset = units.factors(bias), units.offset(bias)
    precision = told.rho / factors.square()
    return told.tau / factors + precision * offset, precision


def _block(
    task: Task,
    kind: type[Any],
    units: Units,
    prior: tuple[Tensor, Tensor],
    told: tuple[Tensor, Tensor],
    samples: int,
    bias: bool,
) -> Any:
    factors, offset = units.factors(bias), units.offset(bias)
    zero = torch.zeros_like(units.shift[:1])
    shift = torch.cat([units.shift, zero]) if bias else units.shift
    mean, precision = prior[0] * factors + offset, prior[1] / factors.square()
    kept = (
        tensor.unsqueeze(0).to(task.device, task.settings.dtype).contiguous()
        for tensor in (mean, precision, *told)
    )
    return kind(*kept, shift.to(task.device, task.settings.dtype), samples)


# The temperature and the width at which a last layer's posterior by message passing predicts as the network
# does.
#
# The means are not the trained ones: the prior draws them to its own, and the variances of the logits are
# those of independent messages. So at temperature 1 a posterior is far less sure than the network, although
# its order of classes is as good. A temperature sharpens means and variances alike: where the variances are
# too large for the means, no temperature gives the network's predictions, but a narrower posterior at another
# one does. No labels are needed for either, only the network's own outputs.

_DRAWS = 128  # of the logits
_SAMPLES = 512  # of the data, at most
_NUMBERS = 2**23  # logits drawn at most, but for one sample
_LOWEST = -1.5  # decade
_COARSE, _FINE = 0.25, 0.025
_WIDER = 0.005  # nats above the least divergence that a wider posterior may be
_SEARCH_SAMPLES = 128  # of the samples, by which the width is found
_NARROW = (-0.5, -1.0, -2.0)  # decades of the variances among which the least divergence is looked for
_HALVINGS = 4  # of the interval in which the widest posterior lies


class Matched(NamedTuple):
    """What was found.

    Attributes:
        temperature: of the logits.
        share: of the posterior's own variances.
    """

    temperature: float
    share: float


def matched(task: Task, layer: Layer, block: MessagesBlock, examples: Examples, highest: float) -> Matched:
    """The temperature of the least mean divergence ``KL(p_network || p_posterior)`` over up to 512 samples of a fit,
    for the largest share of the variances at which it is within 0.005 nats of the least of all.

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
    wanted = max(1, min(samples, _SAMPLES, _NUMBERS // (_DRAWS * outputs)))
    generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _TEMPERATURE) % 2**63)
    picked = torch.randperm(samples, generator=generator, device="cpu")[:wanted]
    rows = as_double(examples.inputs[picked.to(examples.inputs.device)])
    network = _with_zero(_network_outputs(task, layer, rows)).log_softmax(-1)
    mean, variance = _logits(block, layer, rows)
    normals = torch.randn(_DRAWS, 1, outputs, generator=generator, dtype=torch.float64, device="cpu")
    deviation = variance.sqrt() * normals.to(mean)
    top = log10(highest)

    def divergence(decade: float, width: float, few: int | None = None) -> float:
        drawn = _with_zero(mean[:few] + 10 ** (width / 2) * deviation[:, :few])
        posterior = (drawn / 10**decade).log_softmax(-1).logsumexp(0) - log(_DRAWS)
        return float((network[:few].exp() * (network[:few] - posterior)).sum(-1).mean())

    def least(width: float) -> float:
        """The least divergence at any temperature."""
        search = {"bounds": (_LOWEST, top), "method": "bounded", "options": {"xatol": _FINE}}
        found: Any = minimize_scalar(divergence, args=(width, _SEARCH_SAMPLES), **search)
        return min(float(found.fun), divergence(top, width, _SEARCH_SAMPLES))

    width = _widest(least)

    def at_width(decade: float) -> float:
        return divergence(decade, width)

    best = _least(at_width, _LOWEST, top, _COARSE)
    decade = _least(at_width, max(_LOWEST, best - _COARSE), min(top, best + _COARSE), _FINE)
    return Matched(10**decade, 10**width)


def _widest(least: Callable[[float], float]) -> float:
    """The largest decade of the variances at which the divergence is nearly the least; 0 is all of them."""
    divergences = {decade: least(decade) for decade in (0.0, *_NARROW)}
    narrow = min(divergences, key=divergences.__getitem__)
    budget, wide = divergences[narrow] + _WIDER, 0.0
    if divergences[wide] <= budget:
        return wide
    for _ in range(_HALVINGS):
        middle = (narrow + wide) / 2
        if least(middle) <= budget:
            narrow = middle
        else:
            wide = middle
    return narrow


def _least(score: Callable[[float], float], start: float, end: float, step: float) -> float:
    places = [end - step * index for index in range(int((end - start) / step + 1e-9) + 1)]
    return min(places, key=score)


def _with_zero(logits: Tensor) -> Tensor:
    """Of a single logit, whose probability is its sigmoid, the two of a softmax."""
    return logits if logits.shape[-1] > 1 else F.pad(logits, (1, 0))


def _network_outputs(task: Task, layer: Layer, rows: Tensor) -> Tensor:
    weights, bias = folded_parameters(layer, None, dict(task.model.named_parameters()))
    outputs = rows @ weights[0]
    return outputs if bias is None else outputs + bias[0]


def _logits(block: MessagesBlock, layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of the logits, ``(N, J)``."""
    if layer.bias is not None:
        rows = moved(torch.cat([rows, torch.ones_like(rows[:, :1])], 1), as_double(block.shift))
    mean, total = block.moved_mean()[0].to(rows), block.total()[0].to(rows)
    if not isinstance(block, JointMessagesBlock):
        return rows @ mean.T, rows.square() @ total.reciprocal().T
    known = joint.marginals(rows, Joint((total @ mean.unsqueeze(2)).squeeze(2), total))
    return known.mean, known.variance


# The fit


def fit_by_messages(task: Task, options: MessagePassing, prior_precision: float | None) -> Posterior:
    """Pass messages between the data and the weights.

    Args:
        task: the fit.
        options: of the method.
        prior_precision: of every weight and bias; None for the priors of the method.

    Raises:
        UnsupportedLayerError: the model has modules that messages cannot pass.
        PosthocUQError: options, data or model do not fit, or the messages diverge.
        NonFiniteError: outputs are not finite.
    """
    if world() > 1:
        raise PosthocUQError("method='message_passing' runs in one process.")
    _check_likelihood(task)
    chain = chain_of(task.model, task.layers) if options.layers == ALL else None
    source = None if chain is not None else last_layer(task)
    last = None if source is None else source.layer
    if options.means == PRETRAINED:
        warn_user(
            "With prior='pretrained' the data of the fit must not be those that the model was trained on: the trained "
            "weights hold what these say already, and would count it twice. Pass held-out data, or take prior='zero'."
        )
    examples = task.timed("reading the data", lambda: examples_of(task, last))
    began = time.perf_counter()
    if chain is not None:
        blocks, notes = whole_blocks(task, options, prior_precision, chain, examples)
    else:
        assert last is not None
        blocks, notes = last_blocks(task, options, prior_precision, last, examples)
    task.seconds["message passing"] = time.perf_counter() - began
    for name, block in blocks.items():
        if not all(
            bool(torch.isfinite(tensor).all()) for tensor in (*block.tensors().values(), block.stored_mean())
        ):
            raise NonFiniteError(
                f"The messages to '{name}' are not finite in {task.settings.dtype}; bring the inputs to about unit "
                f"size, or fit with dtype=torch.float64."
            )
    posterior = _posterior(task, options, blocks, len(examples.inputs), notes, prior_precision)
    if source is not None:
        posterior.features = _features(task, source, examples.inputs)
    if last is not None and task.settings.likelihood.noise_variance is None:
        with torch.no_grad():
            own, block = posterior.temperature, blocks[last.name]
            found = matched(task, last, block, examples, own)
            posterior.temperature, posterior.scale = found.temperature, posterior.scale / found.share
        if found.temperature < own:
            posterior.history.tuning["temperature"] = _MATCHED
        if found.share < 1:
            posterior.history.tuning["scale"] = _MATCHED
    return posterior


def _check_likelihood(task: Task) -> None:
    likelihood = task.settings.likelihood
    if likelihood.name not in LIKELIHOODS:
        raise PosthocUQError(
            f"method='message_passing' knows what the targets of 'classification', 'binary' and 'regression' say of "
            f"the outputs, not those of likelihood={likelihood.name!r}; take a Laplace method for it."
        )


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
    own = dict(task.model.named_parameters())
    weights = layer.to_matrix(own[layer.weight], None if layer.bias is None else own[layer.bias])[0]
    with torch.no_grad():
        return features_of_rows(task, source, rows, rows @ weights.to(rows).T)


def _posterior(
    task: Task,
    options: MessagePassing,
    blocks: Mapping[str, MessagesBlock],
    samples: int,
    notes: dict[str, Any],
    prior_precision: float | None,
) -> Posterior:
    likelihood = task.settings.likelihood
    known: float | LayerPriors
    if prior_precision is None:
        medians = {name: float(as_double(block.prior_precision).median()) for name, block in blocks.items()}
        known = LayerPriors(medians)
    else:
        known = prior_precision
    temperature = 1.0
    if likelihood.noise_variance is None and options.signal == "argmax":
        temperature = NOISE_VARIANCE**0.5 / _LOGISTIC  # a softmax then says what the noisy comparison says
    fit = {
        "samples": samples,
        "seed": task.settings.seed,
        "layers fitted": options.layers,
        "form": options.posterior,
        "signal": "regression"
        if likelihood.noise_variance is not None
        else options.signal.replace("auto", "softargmax"),
        ONE_PRIOR: True,
        "prior means": options.means,
        **({"regularize": True} if options.regularize else {}),
        **notes,
        **{f"seconds, {what}": value for what, value in task.seconds.items()},
    }
    posterior = Posterior(
        MessagePassing.name,
        task.layers,
        blocks,
        {name: [name] for name in task.layers},
        {name: parameter.detach() for name, parameter in task.model.named_parameters()},
        likelihood,
        Evidence(samples, noise_power=0),  # variances do not follow a later change of the noise
        History(fit, dict(task.prepared.deterministic)),
        settings=Hyperparameters(float(samples), known, temperature=temperature),
    )
    tuning = posterior.history.tuning
    tuning["prior precision"] = "median of the method's own" if prior_precision is None else "given"
    posterior.model = task.model
    return posterior


# Data that come into a last layer's joint posterior after its fit, and data that go out again.


def _changed(posterior: Posterior, task: Task, remove: bool) -> Posterior:
    """The posterior with the targets' sites of the task's data, or without them.

    Sites of data that come in are found under the posterior as their prior; those that go out are the ones under which
    it is in balance. For a regression both are exact.

    Raises:
        NotContainedError: the data cannot all have been in.
        PosthocUQError: no sample would be left, or what is known would be lost beside the new data.
    """
    ((name, layer),) = posterior.layers.items()
    block = cast(JointMessagesBlock, posterior.blocks[name])
    examples = examples_of(task, layer)
    place = as_double(block.field).device  # the posterior may lie on another device than the model
    examples = examples._replace(inputs=examples.inputs.to(place), targets=examples.targets.to(place))
    samples = block.samples + (-1 if remove else 1) * len(examples.inputs)
    if samples < 1:
        raise PosthocUQError(
            f"The posterior has {block.samples} samples and {len(examples.inputs)} are to go out, which leaves none."
        )
    options = MessagePassing(
        signal="argmax" if posterior.history.fit.get("signal") == "argmax" else "auto",
        regularize=bool(posterior.history.fit.get("regularize", False)),
    )
    task.settings = replace(task.settings, likelihood=posterior.likelihood)
    field, precision = _sites_of(block, layer, examples, partial(signal_of, task, options), remove)
    if remove:
        field, precision = -field, -precision
    else:
        weights = Weights.of(block.samples, len(examples.inputs), torch.finfo(block.field.dtype).eps)
        check_resolved(largest_of(block.total()), largest_of(precision), weights, 0.0, f"'{name}'")
    new = JointMessagesBlock(
        block.prior_mean,
        block.prior_precision,
        (as_double(block.field) + field).to(block.field),
        (as_double(block.precision) + precision).to(block.field),
        block.shift,
        samples,
    )
    least = float(new.precision.diagonal(dim1=-2, dim2=-1).min())
    if least < -1e-5 * largest_of(new.total()) or new.fault() is not None:  # more than rounding
        raise NotContainedError("precision of a weight")
    history = deepcopy(posterior.history)
    history.fit["samples"] = samples
    settings = replace(posterior.settings, scale=posterior.scale * samples / posterior.evidence.samples)
    evidence = Evidence(samples, noise_power=0)
    return posterior.with_blocks({name: new}, evidence=evidence, history=history, settings=settings)


def _sites_of(
    block: JointMessagesBlock,
    layer: Layer,
    examples: Examples,
    signal: Callable[[Units], Signal],
    remove: bool,
) -> tuple[Tensor, Tensor]:
    """What the targets say of the layer's weights: field ``(1, J, n)`` and precision ``(1, J, n, n)``.

    Args:
        block: the posterior, with these data where they are to go out.
        layer: its layer.
        examples: the data.
        signal: what targets in some units say.
        remove: whether the data go out.
    """
    bias = layer.bias is not None
    shift = as_double(block.shift)
    units = Units.of(examples, bias, shift[:-1] if bias else shift)
    factors, offset = units.factors(bias), units.offset(bias)
    mean = (block.moved_mean()[0].to(factors) - offset) / factors
    precision = block.total()[0].to(factors) * factors.unsqueeze(2) * factors.unsqueeze(1)
    known = Joint((precision @ mean.unsqueeze(2)).squeeze(2), precision)
    rows, targets = joint_rows(layer, units, examples), units.targets(examples.targets)
    if remove:
        messages = joint.site_to_weight_messages(
            rows, joint.sites_within(rows, targets, signal(units), known)
        )
    else:
        messages = joint.fit_sites(rows, targets, signal(units), known)[1]
    like = as_double(block.field)
    field, precision = (part.unsqueeze(0).to(like) for part in joint_evidence(units, messages, bias))
    return field, precision


# The method


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
        signal: what a label says of the logits: ``"softargmax"``, drawn by their softmax; ``"argmax"``, it is with
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
    likelihoods: ClassVar[tuple[str, ...] | None] = LIKELIHOODS

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
        if self.layers == ALL and self.posterior == FULL:
            raise PosthocUQError("posterior='full' is for the last layer; take layers='last'.")
        if self.layers == ALL and self.prior == "zero":
            raise PosthocUQError(
                "With prior='zero' the units of a hidden layer would stay alike for ever; take 'spectral' or "
                "'pretrained' with layers='all'."
            )
        if self.regularize and self.signal != "argmax":
            raise PosthocUQError("regularize=True is a part of signal='argmax'; give that too.")

    @property
    def means(self) -> str:
        """Of the prior, by name."""
        return self.prior or ("zero" if self.layers == LAST else "spectral")

    @property
    def trains(self) -> bool:
        return True

    @property
    def calibrates_prior(self) -> bool:
        return False  # the variances are those of a prior and the data, around a mean of their own

    @property
    def head(self) -> str:
        return "moments" if self.layers == ALL else "linearized"

    def selection(self, layers: Selection | None) -> Selection:
        if layers is None:
            return self.layers
        if isinstance(layers, str) and layers in (LAST, ALL) and layers != self.layers:
            raise PosthocUQError(
                f"The fit was asked for layers={layers!r} and the method for layers={self.layers!r}; leave layers= out "
                f"of the fit, or pass uq.MessagePassing(layers={layers!r})."
            )
        return layers

    def passes(self) -> int:
        # of a whole network, once more for the statistics of the novelty
        return 1 if self.layers == LAST else 2

    def fit(self, task: Task) -> Posterior:
        return fit_by_messages(task, self, self.prior_precision)

    def check_update(self, posterior: Posterior) -> None:
        if not all(isinstance(block, JointMessagesBlock) for block in posterior.blocks.values()):
            raise PosthocUQError(
                "Data come in and go out of posteriors by uq.MessagePassing(posterior='full') alone, whose sites are "
                "sums over the data; this one has independent weights. Fit again on the data that it is to hold."
            )

    def update(self, posterior: Posterior, task: Task, remove: bool) -> Posterior:
        return _changed(posterior, task, remove)
