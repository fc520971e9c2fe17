"""What trainings of weights share: the check of the parameters that they train, and the posterior that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.curvature.content import Content
from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.context_pass import show_to_context
from posthoc_uq.inference.mean_field import MeanField
from posthoc_uq.inference.task import Task
from posthoc_uq.inference.training import Objective, TrainingOptions, train
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import known_length
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.history import Evidence, History
from posthoc_uq.posteriors.settings import Hyperparameters


def check_trainable(method: str, parameters: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Refuse parameters of a number format that no optimiser moves by small steps.

    Args:
        method: its name.
        parameters: of the model.
        names: of those that are to be trained.

    Raises:
        PosthocUQError: one is of half precision.
    """
    narrow = [name for name in names if parameters[name].dtype not in (torch.float32, torch.float64)]
    if narrow:
        raise PosthocUQError(
            f"method={method!r} trains parameters in float32 or float64, and '{narrow[0]}' is of "
            f"{parameters[narrow[0]].dtype}; convert the model, for instance with model.float()."
        )


def count_data(task: Task) -> tuple[int, Content | None]:
    """The number of samples and, with a checkpoint, what tells these data from others."""
    settings, content = task.settings, None if task.checkpoint is None else Content()
    samples = show_to_context(task.loader, settings.reader, None, settings.seed, settings.progress, content)
    if content is not None:
        task.check_content(content.total)
    return samples, content


def batches_of(task: Task, samples: int) -> int:
    """The batches of one pass over the data, by the loader's length, or else by its first batch."""
    return known_length(task.loader) or ceil(samples / max(1, count_samples(task.batch)))


def train_on(
    task: Task, objective: Objective, options: TrainingOptions, samples: int, content: Content | None
) -> list[dict[str, float]]:
    """`train` on the data of a fit, with its seed, held-out data and checkpoint.

    Args:
        task: the fit.
        objective: what is trained.
        options: of the training.
        samples: of the data.
        content: of the data, for a checkpoint.
    """
    settings = task.settings
    return train(
        objective,
        task.loader,
        settings.reader,
        replace(options, epochs=options.epochs_over(samples, batches_of(task, samples))),
        seed=settings.seed,
        val_loader=task.val_loader,
        checkpoint=task.checkpoint,
        content=content,
        progress=settings.progress,
    )


def trained_posterior(
    method: str,
    task: Task,
    field: MeanField,
    likelihood: Likelihood,
    notes: dict[str, Any],
    samples: int,
    prior_precision: float,
) -> Posterior:
    """The posterior of a training of independent weights.

    Args:
        method: its name.
        task: the fit.
        field: what was trained.
        likelihood: with the noise that the training ended with.
        notes: of the fit, as plain values.
        samples: of the training data.
        prior_precision: that the training used.
    """
    posterior = Posterior(
        method,
        task.layers,
        field.blocks(task.layers, samples),
        {name: [name] for name in task.layers},
        {name: parameter.detach() for name, parameter in task.model.named_parameters()},
        likelihood,
        Evidence(samples, noise_power=0),  # the variances do not follow a later change of the noise variance
        History(notes, dict(task.prepared.deterministic)),
        centre={name: mean.detach() for name, mean in field.means.items()} if field.train_mean else None,
        settings=Hyperparameters(float(samples), prior_precision),
    )
    posterior.model = task.model
    return posterior
