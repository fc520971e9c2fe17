"""The statistics of the last layer's inputs (features) of a fit: from its first sweep, or from a pass at its end."""

from __future__ import annotations

from torch import Tensor, nn

from posthoc_uq.core.distributed import gather, run_on_all_ranks
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.features import FeatureSource
from posthoc_uq.curvature.sweep import show
from posthoc_uq.layers.capture import Capture
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.features import ClassGrams, FeatureGrams
from posthoc_uq.posteriors.posterior import Posterior

_ROWS = 4096  # at a time
_NONE = "by the posterior itself, top class: no layer with one row a sample comes last"


def watch_features(task: Task, source: FeatureSource | None) -> ClassGrams | None:
    """Let the sweeps of a fit show the data to new feature statistics; None without a layer that has features."""
    sources = gather(source, "looking for features")
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
    if posterior.features is not None:
        return  # the method has kept them
    if source is None:
        posterior.history.fit["novelty"], posterior.history.novelty = _NONE, "posterior"
        return
    settings = task.settings
    grams = ClassGrams(source, settings.likelihood, task.device, task.memory_budget)
    _show(task, grams, network)
    posterior.features = grams.result(settings.dtype)


def features_of_rows(task: Task, source: FeatureSource, rows: Tensor, outputs: Tensor) -> FeatureGrams:
    """The feature statistics of data whose features are at hand.

    Args:
        task: the fit.
        source: where the features come from.
        rows: ``(samples, features)``, the 1 of a bias among them.
        outputs: of the network that the posterior predicts with, ``(samples, outputs)``.
    """
    settings = task.settings
    grams = ClassGrams(source, settings.likelihood, task.device, task.memory_budget)
    for features, given in zip(rows.split(_ROWS), outputs.split(_ROWS), strict=True):
        grams.add(features.to(task.device), given.to(task.device))
    return grams.result(settings.dtype)


def _show(task: Task, grams: ClassGrams, network: nn.Module) -> None:
    """Show the task's data to feature statistics, by a pass of a network of its own."""
    capture = Capture(network)
    capture.watched = grams.source.layer

    def work() -> None:
        with isolated_random_state(task.settings.seed):
            show(capture, task.loader, task.settings, [grams])

    run_on_all_ranks(work, "the novelty's statistics")
