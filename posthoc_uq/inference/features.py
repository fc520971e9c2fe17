"""The statistics of the last layer's inputs (features) of a fit: from its first sweep, or from a pass at its end."""

from __future__ import annotations

from torch import nn

from posthoc_uq.curvature.capture import Capture
from posthoc_uq.curvature.class_grams import ClassGrams
from posthoc_uq.curvature.features import FeatureSource
from posthoc_uq.curvature.sweep import show
from posthoc_uq.distributed import gather, together
from posthoc_uq.inference.task import Task
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.randomness import isolated_random_state

_NONE = "by the posterior itself, top class: no layer with one row a sample comes last"


def watch_features(task: Task, source: FeatureSource | None) -> ClassGrams | None:
    """Let the sweeps of a fit show the data to new feature statistics; None without a layer that has features."""
    sources = gather(source)
    if source is None or any(other != source for other in sources):
        return None
    task.prepared.capture.watched = source.layer
    grams = ClassGrams(source, task.settings.likelihood, task.device, task.memory_budget)
    task.observers.append(grams)
    return grams


def keep_features(task: Task, grams: ClassGrams | None, posterior: Posterior) -> None:
    """Give a Laplace posterior the feature statistics of all data, by an extra pass where no sweep showed the data."""
    if grams is None:
        posterior.history.fit["novelty"], posterior.history.novelty = _NONE, "posterior"
        return
    task.observe()
    posterior.features = grams.result(task.settings.dtype)


def trained_features(
    task: Task, source: FeatureSource | None, posterior: Posterior, network: nn.Module
) -> None:
    """Give a trained posterior the feature statistics of the network it predicts with, by one pass over the data.

    Args:
        task: the fit.
        source: where the features come from.
        posterior: takes the statistics.
        network: the model at the posterior's mean.
    """
    if source is None:
        posterior.history.fit["novelty"], posterior.history.novelty = _NONE, "posterior"
        return
    settings = task.settings
    grams = ClassGrams(source, settings.likelihood, task.device, task.memory_budget)
    capture = Capture(network)
    capture.watched = source.layer

    def work() -> None:
        with isolated_random_state(settings.seed):
            show(capture, task.loader, settings, [grams])

    together(work, "the novelty's statistics")
    posterior.features = grams.result(settings.dtype)
