"""Message passing over a whole sequential network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.inference.message_data import Batches, Examples
from posthoc_uq.inference.message_network import (
    Chain,
    folded_parameters,
    output_counts,
    unfolding,
)
from posthoc_uq.inference.message_options import PRETRAINED, MessagePassingOptions
from posthoc_uq.inference.message_shared import PRIOR, order_seed, signal_of, trained, visits
from posthoc_uq.inference.task import Task
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing import priors
from posthoc_uq.message_passing.gaussian import Message, from_moments
from posthoc_uq.message_passing.network import Belief
from posthoc_uq.message_passing.trainer import Beliefs
from posthoc_uq.posteriors.messages import MessagesBlock
from posthoc_uq.randomness import mixed_seed


def whole_blocks(
    task: Task,
    options: MessagePassingOptions,
    prior_precision: float | None,
    chain: Chain,
    examples: Examples,
) -> tuple[dict[str, MessagesBlock], dict[str, Any]]:
    counts = output_counts(chain.stages, tuple(examples.inputs.shape[1:]))
    prior = _prior_of_all(task, options, prior_precision, chain, counts)
    data = Batches(examples, None, options.batch_size, order_seed(task))
    trainer = trained(task, options, chain.stages, prior, data, signal_of(task, options, None))
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
    return blocks, visits(trainer)


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
    generator = torch.Generator().manual_seed(mixed_seed(task.settings.seed, PRIOR) % 2**63)
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
