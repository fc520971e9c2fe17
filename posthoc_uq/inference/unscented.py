"""``method="utvi"``: mean-field variational inference by propagated moments (Schodt 2024)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from math import exp
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posthoc_uq.distributed import world
from posthoc_uq.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.inference.certain_parameters import certain_parameters
from posthoc_uq.inference.initialisation import initialised
from posthoc_uq.inference.mean_field import MeanField
from posthoc_uq.inference.moment_objective import MomentObjective
from posthoc_uq.inference.moment_options import MomentOptions
from posthoc_uq.inference.task import Task
from posthoc_uq.inference.trained import batches_of, check_trainable, count_data, train_on, trained_posterior
from posthoc_uq.inference.training import EPOCHS, Group, best_epoch
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.prior import ALL_WEIGHTS
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate

UTVI = "utvi"  # the method's name
PRIOR_PRECISION = 1.0  # the default
_NO_NOISE = 1e-10  # the noise of noise="none", as a share of the noise of the fit
_SHOWN = ("loss", "log likelihood", "KL", "validation NLL")


def train_by_moments(task: Task, options: MomentOptions, prior_precision: float | None) -> Posterior:
    """Train the variances, and the means unless they are frozen.

    Args:
        task: the fit.
        options: of the training.
        prior_precision: of the weights; None for 1.

    Raises:
        PosthocUQError: options, data or model do not fit; the message says how to go on.
        NonFiniteError: a loss is not finite.
    """
    settings = task.settings
    likelihood = _likelihood(settings.likelihood, options)
    began = time.perf_counter()
    with isolated_random_state(settings.seed):
        network = replicate(task.model)
    rest: list[str] = []
    if options.train_mean and options.train_rest:
        chosen = [name for layer in task.layers.values() for name in layer.parameter_names]
        rest = certain_parameters(network, chosen, task.batch)
    field = _field(task, options, rest)
    samples, content = count_data(task)
    precision = PRIOR_PRECISION if prior_precision is None else prior_precision
    trained = {name: parameter.detach() for name, parameter in task.model.named_parameters()}
    objective = MomentObjective(
        network,
        task.layers,
        field,
        trained if options.prior_mean == "trained" else {},
        precision,
        likelihood,
        samples,
        options,
        # many short epochs halve the divergence's weight as often as the usual number of epochs does
        1.0
        if options.epochs is not None
        else EPOCHS / options.epochs_over(samples, batches_of(task, samples)),
    )
    options = options if options.optimizer is not None else replace(options, optimizer=adamw)
    history = train_on(task, objective, options, samples, content)
    task.seconds["training"] = time.perf_counter() - began
    notes = _fit_notes(options, history, task, samples) | {"trained without uncertainty": rest}
    posterior = trained_posterior(UTVI, task, field, objective.likelihood(), notes, samples, precision)
    posterior.history.tuning["prior precision"] = "the default" if prior_precision is None else "given"
    if options.noise != "fixed":
        words = {"learned": "learned with the posterior", "none": "none: the propagated variance is all"}
        posterior.history.tuning["noise variance"] = words[options.noise]
    return posterior


def adamw(groups: list[Group]) -> Optimizer:
    """The default optimiser: AdamW with betas (0.9, 0.999), fused where the device has that."""
    device = groups[0]["params"][0].device.type
    return torch.optim.AdamW(
        groups, betas=(0.9, 0.999), eps=1e-8, fused=True if device in ("cpu", "cuda") else None
    )


def _likelihood(likelihood: Likelihood, options: MomentOptions) -> Likelihood:
    """The likelihood that the training begins with."""
    if world() > 1:
        raise PosthocUQError("method='utvi' trains in one process.")
    noise = likelihood.noise_variance
    if options.noise == "fixed":
        return likelihood
    if noise is None:
        raise PosthocUQError(
            f"noise={options.noise!r} is for likelihood='regression'; {likelihood.name!r} has no noise. Leave it at "
            f"'fixed'."
        )
    return likelihood.with_noise(noise * _NO_NOISE) if options.noise == "none" else likelihood


def _field(task: Task, options: MomentOptions, rest: list[str]) -> MeanField:
    """The means and variances that the training begins with; the parameters of `rest` have means alone."""
    parameters = dict(task.model.named_parameters())
    names = [name for layer in task.layers.values() for name in layer.parameter_names]
    check_trainable(UTVI, parameters, names)
    trained = {name: parameters[name].detach() for name in names}
    begin: Mapping[str, Tensor] = trained
    if options.start == "random":
        every = {name: parameter.detach() for name, parameter in parameters.items()}
        begin = initialised(task.model, every, task.settings.seed, "start='random'")
    elif options.initial is not None:
        _check_initial(options.initial, trained, options.train_mean)
        begin = options.initial.mean
    trained |= {name: parameters[name].detach() for name in rest}
    means = {name: begin.get(name, own).to(own) for name, own in trained.items()}
    if options.train_mean:
        means = {name: mean.clone() for name, mean in means.items()}
    if options.initial is None:
        logs = {name: torch.full_like(means[name], options.initial_log_variance) for name in names}
    else:
        variances = options.initial.variance()
        logs = {name: variances[name].to(means[name]).clamp(min=exp(-80.0)).log() for name in names}
    return MeanField(means, logs, options.train_mean)


def _check_initial(initial: Posterior, trained: Mapping[str, Tensor], train_mean: bool) -> None:
    if initial.centre and not train_mean:
        raise PosthocUQError(
            "A posterior with a mean of its own cannot begin a training with train_mean=False."
        )
    for name, own in trained.items():
        original = initial.original.get(name)
        if original is None or original.shape != own.shape or not torch.equal(original.to(own), own):
            raise PosteriorMismatchError(
                f"initial= is no posterior of this model's '{name}': fit it on the same model, with the same layers."
            )


def _fit_notes(
    options: MomentOptions, history: list[dict[str, float]], task: Task, samples: int
) -> dict[str, Any]:
    return {
        "samples": samples,
        "seed": task.settings.seed,
        "epochs": len(history),
        "epoch taken": best_epoch(history),
        "start": "a posterior" if options.initial is not None else options.start,
        "mean": "trained" if options.train_mean else "frozen",
        "objective": options.objective,
        "noise": options.noise,
        "prior": ALL_WEIGHTS,
        "prior mean": options.prior_mean,
        "first KL weight": options.first_kl_weight,
        "least KL weight": options.first_kl_weight * options.kl_floor,
        "relu": options.relu,
        **(
            {name: [entry[name] for entry in history] for name in _SHOWN if name in history[0]}
            if history
            else {}
        ),
        **{f"seconds, {what}": value for what, value in task.seconds.items()},
    }
