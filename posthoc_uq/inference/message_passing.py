"""``method="message_passing"``: posteriors by message passing over the last layer's inputs, or over a whole network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.curvature.features import find_features
from posthoc_uq.devices import as_double
from posthoc_uq.distributed import world
from posthoc_uq.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError
from posthoc_uq.inference.message_data import Batches, Examples, Units, examples_of, noise_of
from posthoc_uq.inference.message_network import (
    Chain,
    chain_of,
    folded_parameters,
    output_counts,
    unfolding,
)
from posthoc_uq.inference.message_options import ALL, FULL, PRETRAINED, MessagePassingOptions
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing import joint, priors
from posthoc_uq.message_passing.gaussian import Message, from_moments
from posthoc_uq.message_passing.network import Belief, Stage, Weighted
from posthoc_uq.message_passing.passes import Forms
from posthoc_uq.message_passing.signals import NOISE_VARIANCE
from posthoc_uq.message_passing.targets import Argmax, Regression, Signal, Softargmax
from posthoc_uq.message_passing.trainer import Beliefs, Trainer
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.dense import LARGEST_BYTES
from posthoc_uq.posteriors.history import Evidence, History
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock
from posthoc_uq.posteriors.prior import ALL_WEIGHTS
from posthoc_uq.posteriors.settings import Hyperparameters, LayerPriors
from posthoc_uq.randomness import mixed_seed
from posthoc_uq.warned import warn_user

MESSAGE_PASSING = "message_passing"  # the method's name
_PRIOR, _ORDER, _VISITS = 401, 402, 403  # streams of the seed
_LOGISTIC = 1.702  # a standard normal distribution function is close to a logistic one of this slope
_TWICE = (
    "With prior='pretrained' the data of the fit must not be those that the model was trained on: the trained weights "
    "hold what these say already, and would count it twice. Pass held-out data, or take prior='zero'."
)


def fit_by_messages(task: Task, options: MessagePassingOptions, prior_precision: float | None) -> Posterior:
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
    last = None if chain is not None else last_layer(task)
    if options.means == PRETRAINED:
        warn_user(_TWICE)
    examples = task.timed("reading the data", lambda: examples_of(task, last))
    began = time.perf_counter()
    if chain is not None:
        blocks, notes = _whole(task, options, prior_precision, chain, examples)
    else:
        assert last is not None
        blocks, notes = _last(task, options, prior_precision, last, examples)
    task.seconds["message passing"] = time.perf_counter() - began
    for name, block in blocks.items():
        if not all(
            bool(torch.isfinite(tensor).all()) for tensor in (*block.tensors().values(), block.own_mean())
        ):
            raise NonFiniteError(
                f"The messages to '{name}' are not finite in {task.settings.dtype}; bring the inputs to about unit "
                f"size, or fit with dtype=torch.float64."
            )
    return _posterior(task, options, blocks, len(examples.inputs), notes, prior_precision)


def _check_likelihood(task: Task) -> None:
    likelihood = task.settings.likelihood
    if likelihood.name not in ("classification", "binary", "regression"):
        raise PosthocUQError(
            f"method='message_passing' knows what the targets of 'classification', 'binary' and 'regression' say of "
            f"the outputs, not those of likelihood={likelihood.name!r}; take a Laplace method for it."
        )


def last_layer(task: Task) -> Layer:
    """The layer whose outputs are the model's.

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
    return source.layer


def signal_of(task: Task, options: MessagePassingOptions, units: Units | None) -> Signal:
    """What the targets of a fit say of the outputs."""
    if task.settings.likelihood.noise_variance is not None:
        noise = noise_of(task.settings.likelihood, units)
        return Regression(noise.to(task.device) if noise.numel() > 1 else float(noise))
    if options.signal == "argmax":
        return Argmax(regularize=options.regularize)
    return Softargmax()


def _order_seed(task: Task) -> int:
    return mixed_seed(task.settings.seed, _ORDER)


# A last layer


def _last(
    task: Task,
    options: MessagePassingOptions,
    prior_precision: float | None,
    layer: Layer,
    examples: Examples,
) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
    bias = layer.bias is not None
    units = Units.of(examples, bias)
    prior = _prior_of_last(task, options, prior_precision, layer, units)
    signal = signal_of(task, options, units)
    if options.posterior == FULL:
        told = _joint_evidence(task, layer, units, examples, signal, prior)
        return {layer.name: joint_block(task, layer, units, prior, told, len(examples.inputs))}, {}
    stages: list[Stage] = [Weighted(layer.name, layer.inputs - bias, layer.outputs, bias=bias)]
    belief = _as_belief(*prior, bias)
    trainer = _trained(
        task,
        options,
        stages,
        {0: belief},
        Batches(examples, units, options.batch_size, _order_seed(task)),
        signal,
    )
    said = Belief(
        Message(*(a - b for a, b in zip(trainer.posterior[0].weights, belief.weights, strict=True))),
        Message(*(a - b for a, b in zip(trainer.posterior[0].bias, belief.bias, strict=True))),
    )
    told_matrix = tuple(_matrix(w[0].T, b[0], bias) for w, b in zip(said.weights, said.bias, strict=True))
    block = diagonal_block(task, layer, units, prior, Message(*told_matrix), len(examples.inputs))
    return {layer.name: block}, _visits(trainer)


def _matrix(weights: Tensor, bias: Tensor, has_bias: bool) -> Tensor:
    """``(J, n)`` from weights ``(J, I)`` and biases ``(J,)``."""
    return torch.cat([weights, bias.unsqueeze(1)], 1) if has_bias else weights


def _as_belief(mean: Tensor, precision: Tensor, bias: bool) -> Belief:
    """A prior ``(J, n)`` as messages to ``(1, I, J)`` and ``(1, J)``."""
    field, split = mean * precision, mean.shape[1] - bias
    weights = Message(*(part[:, :split].T.unsqueeze(0).contiguous() for part in (field, precision)))
    own = Message(*(part[:, split:].T.reshape(1, -1).contiguous() for part in (field, precision)))
    return Belief(weights, own)


def _prior_of_last(
    task: Task, options: MessagePassingOptions, prior_precision: float | None, layer: Layer, units: Units
) -> tuple[Tensor, Tensor]:
    """Means and precisions ``(J, n)`` in the units of the data, of the weights with the moved bias."""
    bias = layer.bias is not None
    factors, inputs = units.factors(bias), layer.inputs - bias
    mean = torch.zeros_like(factors)
    variance = torch.full_like(factors, priors.weight_variance(inputs, layer.outputs, first=True))
    if bias:
        variance[:, -1] = priors.BIAS_VARIANCE
    if options.means == "spectral":
        generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _PRIOR) % 2**63)
        drawn = priors.drawn_means((inputs, layer.outputs), inputs, layer.outputs, generator, mean.device)
        mean[:, :inputs] = drawn.T
    elif options.means == PRETRAINED:
        parameters = dict(task.model.named_parameters())
        weights, own = folded_parameters(layer, None, parameters)
        trained = weights[0].T
        if own is not None:
            trained = torch.cat([trained, (own[0] + trained @ units.shift).unsqueeze(1)], 1)
        mean = (trained.to(factors) - units.offset(bias)) / factors
        variance = options.prior_factor * variance
    precision = variance.reciprocal()
    if prior_precision is not None:
        precision = prior_precision * factors.square()
    return mean, precision


def _joint_evidence(
    task: Task,
    layer: Layer,
    units: Units,
    examples: Examples,
    signal: Signal,
    prior: tuple[Tensor, Tensor],
) -> joint.Joint:
    """What all targets say of the weights, in the units of the data."""
    _check_size(layer)
    rows = joint_rows(layer, units, examples)
    return joint.fit_sites(rows, units.targets(examples.targets), signal, joint.independent(*prior))[1]


def _check_size(layer: Layer) -> None:
    size = 16 * layer.outputs * layer.inputs**2
    if size > LARGEST_BYTES:
        raise PosthocUQError(
            f"posterior='full' of '{layer.name}' takes {size / 2**30:.1f} GiB ({layer.outputs} outputs, {layer.inputs} "
            f"inputs), more than {LARGEST_BYTES / 2**30:.0f}; take posterior='diagonal'."
        )


def joint_rows(layer: Layer, units: Units, examples: Examples) -> Tensor:
    """Features ``(N, n)`` in the units of the data, with a 1 for the bias."""
    rows = units.inputs(examples.inputs)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if layer.bias is not None else rows


def joint_block(
    task: Task, layer: Layer, units: Units, prior: tuple[Tensor, Tensor], told: joint.Joint, samples: int
) -> JointMessagesBlock:
    """A block of the layer's weights from a prior and evidence in the units of the data."""
    bias = layer.bias is not None
    factors, offset = units.factors(bias), units.offset(bias)
    precision = told.precision / (factors.unsqueeze(2) * factors.unsqueeze(1))
    field = told.field / factors + torch.einsum("jab,jb->ja", precision, offset)
    return _block(task, JointMessagesBlock, units, prior, (field, precision), samples, bias)


def diagonal_block(
    task: Task, layer: Layer, units: Units, prior: tuple[Tensor, Tensor], told: Message, samples: int
) -> MessagesBlock:
    """The same for independent weights."""
    bias = layer.bias is not None
    factors, offset = units.factors(bias), units.offset(bias)
    precision = told.rho / factors.square()
    return _block(
        task, MessagesBlock, units, prior, (told.tau / factors + precision * offset, precision), samples, bias
    )


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


# A whole network


def _whole(
    task: Task,
    options: MessagePassingOptions,
    prior_precision: float | None,
    chain: Chain,
    examples: Examples,
) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
    counts = output_counts(chain.stages, tuple(examples.inputs.shape[1:]))
    prior = _prior_of_all(task, options, prior_precision, chain, counts)
    data = Batches(examples, None, options.batch_size, _order_seed(task))
    trainer = _trained(task, options, chain.stages, prior, data, signal_of(task, options, None))
    blocks: dict[str, MessagesBlock] = {}
    for place, layer in chain.layers.items():
        factor, offset = unfolding(layer, chain.folds.get(place), task.device)
        own = _of_layer(prior[place], layer, factor, offset)
        whole = _of_layer(trainer.posterior[place], layer, factor, offset)
        parts = own.mean, own.rho, whole.tau - own.tau, (whole.rho - own.rho).clamp(min=0)
        kept = [part.to(task.device, task.settings.dtype).contiguous() for part in parts]
        blocks[layer.name] = MessagesBlock(*kept, kept[0].new_zeros(layer.inputs), len(examples.inputs))
    return blocks, _visits(trainer)


def _of_layer(belief: Belief, layer: Layer, factor: Tensor, offset: Tensor) -> Message:
    """Messages to folded weights as those to the layer's, ``(G, m, n)``."""
    weights = Message(*(part.transpose(1, 2) for part in belief.weights))
    weights = Message(weights.tau / factor, weights.rho / factor.square())
    if layer.bias is None:
        return weights
    scale = factor.squeeze(2)
    rho = belief.bias.rho / scale.square()
    bias = Message(belief.bias.tau / scale + offset * rho, rho)
    return Message(*(torch.cat([w, b.unsqueeze(2)], 2) for w, b in zip(weights, bias, strict=True)))


def _prior_of_all(
    task: Task,
    options: MessagePassingOptions,
    prior_precision: float | None,
    chain: Chain,
    counts: Mapping[int, int],
) -> Beliefs:
    generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, _PRIOR) % 2**63)
    parameters, first = dict(task.model.named_parameters()), min(chain.layers)
    prior: Beliefs = {}
    for place, layer in chain.layers.items():
        inputs, outputs = layer.inputs - (layer.bias is not None), counts[place]
        own = {"first": place == first, "consistent": options.consistent_prior}
        variance, bias_variance = priors.weight_variance(inputs, outputs, **own), priors.BIAS_VARIANCE
        fold = chain.folds.get(place)
        trained, bias = folded_parameters(layer, fold, parameters)
        if options.means == PRETRAINED:
            variance, bias_variance = options.prior_factor * variance, options.prior_factor * bias_variance
            mean, bias_mean = trained, bias
        else:
            mean = priors.drawn_means(tuple(trained.shape), inputs, outputs, generator, trained.device)
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
            prior[place] = Belief(from_moments(mean, variances), Message(empty, empty))
        else:
            prior[place] = Belief(from_moments(mean, variances), from_moments(bias_mean, bias_variances))
    return prior


# What both share


def _trained(
    task: Task,
    options: MessagePassingOptions,
    stages: list[Stage],
    prior: Beliefs,
    data: Batches,
    signal: Signal,
) -> Trainer:
    numbers = sum(part.rho.numel() for belief in prior.values() for part in belief)
    size = 16 * numbers * (len(data) + 1)
    if size > LARGEST_BYTES:
        raise PosthocUQError(
            f"The messages of {len(data)} batches to {numbers:,} weights take {size / 2**30:.1f} GiB, more than "
            f"{LARGEST_BYTES / 2**30:.0f}; raise batch_size."
        )
    forms = Forms(matmul=options.matmul, numbers=max(2**14, task.memory_budget // 64))
    seed = mixed_seed(task.settings.seed, _VISITS) % 2**63
    trainer = Trainer(stages, prior, data, signal, options.schedule(), forms, seed)
    with torch.no_grad():
        trainer.run()
    return trainer


def _visits(trainer: Trainer) -> dict[str, Any]:
    return {
        "epochs": trainer.schedule.epochs,
        "batches": len(trainer.data),
        "share of a new message": trainer.share,
        "visits begun anew": trainer.restarts,
    }


def _posterior(
    task: Task,
    options: MessagePassingOptions,
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
        temperature = (
            NOISE_VARIANCE**0.5 / _LOGISTIC
        )  # at which a softmax says what the noisy comparison says
    fit = {
        "samples": samples,
        "seed": task.settings.seed,
        "layers fitted": options.layers,
        "form": options.posterior,
        "signal": "regression"
        if likelihood.noise_variance is not None
        else options.signal.replace("auto", "softargmax"),
        "prior": ALL_WEIGHTS,
        "prior means": options.means,
        **notes,
        **{f"seconds, {what}": value for what, value in task.seconds.items()},
    }
    posterior = Posterior(
        MESSAGE_PASSING,
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
