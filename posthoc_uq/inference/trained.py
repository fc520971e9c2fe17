"""Trained means and variances as a posterior of the model that a fit was given."""

from __future__ import annotations

from typing import Any

from posthoc_uq.inference.mean_field import MeanField
from posthoc_uq.inference.task import Task
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.history import Evidence, History
from posthoc_uq.posteriors.settings import Hyperparameters


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
