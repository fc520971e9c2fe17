"""``method="latent_binary"``: a trained network made a latent binary one, and the posterior that comes of it."""

from __future__ import annotations

import time
from typing import Any

import torch

from posthoc_uq.distributed import world
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.inference.latent_layers import LatentLayer
from posthoc_uq.inference.latent_objective import LatentObjective
from posthoc_uq.inference.latent_options import HIGH, LatentBinaryOptions
from posthoc_uq.inference.latent_start import HIGH_LOGIT, begin
from posthoc_uq.inference.optimisers import cosine
from posthoc_uq.inference.task import Task
from posthoc_uq.inference.trained import batches_of, check_trainable, count_data, train_on
from posthoc_uq.inference.training import best_epoch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.history import Evidence, History
from posthoc_uq.posteriors.latent_binary import LatentBinaryBlock
from posthoc_uq.posteriors.prior import ALL_WEIGHTS
from posthoc_uq.posteriors.random_scale import RandomScale
from posthoc_uq.posteriors.settings import Hyperparameters, LayerPriors
from posthoc_uq.randomness import isolated_random_state, mixed_seed
from posthoc_uq.replica import replicate
from posthoc_uq.warned import warn_user

LATENT_BINARY = "latent_binary"  # the method's name
_SHOWN = ("loss", "log likelihood", "KL", "mean inclusion", "validation NLL")
_MOMENTS = 302  # stream of the seed


def train_latent_binary(task: Task, options: LatentBinaryOptions, prior_precision: float | None) -> Posterior:
    """Train the means, the variances and the inclusion probabilities of all layers.

    Args:
        task: the fit.
        options: of the training.
        prior_precision: of a weight that is on; None for one by layer, from the size of the trained weights.

    Raises:
        PosthocUQError: options, data or model do not fit; the message says how to go on.
        NonFiniteError: a loss is not finite.
    """
    settings, model = task.settings, task.model
    _check_possible(task, options)
    began = time.perf_counter()
    with isolated_random_state(settings.seed):
        twin = replicate(model)
    layers = _layers(task, options, prior_precision)
    samples, content = count_data(task)
    objective = LatentObjective(twin, layers, settings.likelihood, samples, options)
    history = train_on(task, objective, options, samples, content)
    task.seconds["training"] = time.perf_counter() - began
    blocks = {
        name: _block(layer, mixed_seed(settings.seed, _MOMENTS, index))
        for index, (name, layer) in enumerate(layers.items())
    }
    _check_trained(blocks)
    _warn_of_few_steps(options, len(history) * batches_of(task, samples))
    posterior = Posterior(
        LATENT_BINARY,
        task.layers,
        blocks,
        {name: [name] for name in task.layers},
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        objective.likelihood(),
        Evidence(samples, noise_power=0),  # variances do not follow a later change of the noise
        History(_fit_notes(options, history, task, samples, blocks), dict(task.prepared.deterministic)),
        settings=Hyperparameters(float(samples), _priors(layers, prior_precision)),
    )
    tuning = posterior.history.tuning
    tuning["prior precision"] = "by the size of each layer's weights" if prior_precision is None else "given"
    if options.learn_noise:
        tuning["noise variance"] = "learned with the posterior"
    posterior.model = model
    return posterior


def _check_possible(task: Task, options: LatentBinaryOptions) -> None:
    likelihood = task.settings.likelihood
    if world() > 1:
        raise PosthocUQError("method='latent_binary' trains in one process.")
    if options.learn_noise and likelihood.noise_variance is None:
        raise PosthocUQError(
            f"learn_noise=True is for likelihood='regression'; {likelihood.name!r} has no noise."
        )
    for name, tracked in task.prepared.capture.tracked.items():
        if tracked.uses > 1:
            raise PosthocUQError(
                f"Layer '{name}' is used {tracked.uses} times in one pass, and method='latent_binary' draws the "
                f"outputs of every use anew, as if its weights were others each time. Give each use a layer of its own "
                f"with uq.untied(model, '{name}'), or leave the layer out with layers=."
            )


def _layers(
    task: Task, options: LatentBinaryOptions, prior_precision: float | None
) -> dict[str, LatentLayer]:
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}
    names = [name for layer in task.layers.values() for name in layer.parameter_names]
    check_trainable(LATENT_BINARY, parameters, names)
    deviation = None if prior_precision is None else prior_precision**-0.5
    seed = task.settings.seed
    return {
        name: begin(
            layer,
            index,
            parameters[layer.weight],
            None if layer.bias is None else parameters[layer.bias],
            options,
            deviation,
            seed,
        )
        for index, (name, layer) in enumerate(task.layers.items())
    }


def _priors(layers: dict[str, LatentLayer], prior_precision: float | None) -> float | LayerPriors:
    if prior_precision is not None:
        return prior_precision
    return LayerPriors({name: layer.prior.deviation**-2 for name, layer in layers.items()})


def _block(trained: LatentLayer, seed: int) -> LatentBinaryBlock:
    layer, tensors = trained.layer, {role: t.detach() for role, t in trained.tensors.items()}
    bias = layer.bias is not None
    means = layer.to_matrix(tensors["mean"], tensors.get("bias mean"))
    logs = layer.to_matrix(tensors["log variance"], tensors.get("bias log variance"))
    sure = torch.ones_like(tensors["bias mean"]) if bias else None
    inclusion = layer.to_matrix(tensors["logit"].sigmoid(), sure)
    scale = None
    if trained.flow is not None:
        along = "outputs" if layer.convolutional else "inputs"
        kept = {name: tensor.detach() for name, tensor in trained.flow_tensors().items()}
        scale = RandomScale.of(along, bias, trained.flow, kept, seed)
    return LatentBinaryBlock(means.contiguous(), logs.exp().contiguous(), inclusion.contiguous(), bias, scale)


def _warn_of_few_steps(options: LatentBinaryOptions, steps: int) -> None:
    """Adam moves a number by its rate a step, so that few steps cannot take a weight from on to off."""
    schedule = options.schedule or cosine
    share = sum(schedule((i + 0.5) / 100) for i in range(100)) / 100
    reach = share * steps * options.inclusion_lr
    high = options.start == "trained" and options.initial_inclusion in (None, HIGH)
    if options.optimizer is None and high and reach < 1.5 * HIGH_LOGIT:
        end = "hardly a weight is found to be off" if reach < HIGH_LOGIT else "many weights stay undecided"
        warn_user(
            f"{steps} steps at inclusion_lr={options.inclusion_lr:g} move the logit of an inclusion probability by "
            f"{reach:.2g} at most, and all begin at {HIGH_LOGIT:g}, so {end}; raise inclusion_lr or epochs."
        )


def _check_trained(blocks: dict[str, LatentBinaryBlock]) -> None:
    for name, block in blocks.items():
        if not all(bool(torch.isfinite(tensor).all()) for tensor in block.tensors().values()):
            raise NonFiniteError(
                f"The training ended with means or variances of '{name}' that are not finite; lower the learning "
                f"rates, or bring the inputs to about unit size."
            )


def _fit_notes(
    options: LatentBinaryOptions,
    history: list[dict[str, float]],
    task: Task,
    samples: int,
    blocks: dict[str, LatentBinaryBlock],
) -> dict[str, Any]:
    chances = torch.cat([block.probabilities().flatten() for block in blocks.values()])
    undecided = ((chances > 0.1) & (chances < 0.9)).float().mean()
    return {
        "samples": samples,
        "seed": task.settings.seed,
        "epochs": len(history),
        "epoch taken": best_epoch(history),
        "start": options.start,
        "flow": f"{options.flow_form}, {options.flow_steps} steps" if options.flow else "none",
        "prior": ALL_WEIGHTS,
        "prior inclusion": options.prior_inclusion,
        "weight of the divergence": options.divergence_weight,
        "density of the median model": float((chances > 0.5).float().mean()),
        "inclusions between 0.1 and 0.9": float(undecided),
        **{name: [entry[name] for entry in history] for name in _SHOWN if name in history[0]},
        **{f"seconds, {what}": value for what, value in task.seconds.items()},
    }
