"""``method="message_passing"``: posteriors by message passing over the last layer's inputs, or over a whole network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.curvature.features import FeatureSource, find_features
from posthoc_uq.devices import as_double
from posthoc_uq.distributed import world
from posthoc_uq.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError
from posthoc_uq.inference.features import features_of_rows
from posthoc_uq.inference.message_data import examples_of
from posthoc_uq.inference.message_last import last_blocks
from posthoc_uq.inference.message_network import (
    chain_of,
)
from posthoc_uq.inference.message_options import ALL, PRETRAINED, MessagePassingOptions
from posthoc_uq.inference.message_temperature import matched
from posthoc_uq.inference.message_whole import whole_blocks
from posthoc_uq.inference.task import Task
from posthoc_uq.message_passing.signals import NOISE_VARIANCE
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.history import Evidence, History
from posthoc_uq.posteriors.messages import MessagesBlock
from posthoc_uq.posteriors.prior import ALL_WEIGHTS
from posthoc_uq.posteriors.settings import Hyperparameters, LayerPriors
from posthoc_uq.warned import warn_user

LIKELIHOODS = ("classification", "binary", "regression")
"""The likelihoods of whose targets it knows what they say of the outputs."""
MESSAGE_PASSING = "message_passing"  # the method's name
_LOGISTIC = 1.702  # a standard normal distribution function is close to a logistic one of this slope
_TWICE = (
    "With prior='pretrained' the data of the fit must not be those that the model was trained on: the trained weights "
    "hold what these say already, and would count it twice. Pass held-out data, or take prior='zero'."
)

_MATCHED = "nearest to the network's predictions of the fit's data"


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
    source = None if chain is not None else last_layer(task)
    last = None if source is None else source.layer
    if options.means == PRETRAINED:
        warn_user(_TWICE)
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
            bool(torch.isfinite(tensor).all()) for tensor in (*block.tensors().values(), block.own_mean())
        ):
            raise NonFiniteError(
                f"The messages to '{name}' are not finite in {task.settings.dtype}; bring the inputs to about unit "
                f"size, or fit with dtype=torch.float64."
            )
    posterior = _posterior(task, options, blocks, len(examples.inputs), notes, prior_precision)
    if source is not None:
        posterior.features = _features(task, source, examples.inputs)
    if last is not None and options.matched_temperature and task.settings.likelihood.noise_variance is None:
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
        temperature = NOISE_VARIANCE**0.5 / _LOGISTIC  # a softmax then says what the noisy comparison says
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
        **({"regularize": True} if options.regularize else {}),
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
