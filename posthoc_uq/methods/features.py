"""The statistics of the last layer's inputs (features) of a fit: from its first sweep, or from a pass at its end."""

from __future__ import annotations

from torch import Tensor, nn

from posthoc_uq.core.distributed import gather, together
from posthoc_uq.core.errors import warn_user
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.features import FeatureSource
from posthoc_uq.curvature.sweep import show
from posthoc_uq.layers.capture import Capture
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.features import ClassGrams, FeatureGrams, by_class, changed
from posthoc_uq.posteriors.posterior import Posterior

_STALE = (
    "This posterior's statistics of the last layer's inputs are from a file of an older release, which says too little "
    "to change them: novelty stays as it was. Fit again with this release."
)
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


def watch_other_features(task: Task, posterior: Posterior) -> ClassGrams | None:
    """Let the sweeps over data that come in or go out show them to feature statistics like those of the posterior;
    None, with a warning, where the posterior's cannot change, or where it has none.
    """
    features = posterior.features
    if features is None:
        return None
    if features.totals is None:
        warn_user(_STALE)
        return None
    layer = features.layer
    outputs = layer.groups * layer.outputs if features.source == "positions" else task.prepared.outputs
    source = FeatureSource(layer, features.source, outputs)
    likelihood, budget = task.settings.likelihood, task.memory_budget
    grams = ClassGrams(source, likelihood, task.device, budget, by_class(features))
    if not posterior.trained_mean:
        task.prepared.capture.watched = features.layer
        task.observers.append(grams)
    return grams


def other_features(
    task: Task, grams: ClassGrams, posterior: Posterior, sign: int, network: nn.Module
) -> FeatureGrams:
    """The posterior's feature statistics with those of the task's data, by an extra pass where no sweep showed the
    data, or where the mean was trained.

    Args:
        task: of the data that come in or go out.
        grams: from `watch_other_features`.
        posterior: whose statistics they are added to.
        sign: 1 where they come in, -1 where they go out.
        network: the trained model, whose classes sort the samples; a mean that the data move would sort them anew.

    Raises:
        NotContainedError: the data cannot all be among those of the posterior.
    """
    if posterior.trained_mean:
        _show(task, grams, network)
    else:
        task.observe()
    assert posterior.features is not None
    return changed(posterior.features, grams, sign)


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

    together(work, "the novelty's statistics")
