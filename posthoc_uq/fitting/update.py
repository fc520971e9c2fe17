"""`update`: a posterior with more data, or with some taken out again.

A posterior whose statistics are sums needs none of the data that stay. What a method does is in its hook
`Method.update`; here are the checks, the record, and what all methods share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Any, cast

import torch

from posthoc_uq.core.batches import BatchFunction, BatchReader, check_loader, check_reusable
from posthoc_uq.core.devices import TEMPORARY_BYTES
from posthoc_uq.core.distributed import gather, on_all_ranks
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError, warn_user
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.model import check_differentiable
from posthoc_uq.core.options import check_option, known_arguments
from posthoc_uq.core.progress import bars_shown
from posthoc_uq.core.steady import steady
from posthoc_uq.curvature.sweep import WORD, DataHash
from posthoc_uq.files import check_numbers, check_settings, check_unchanged
from posthoc_uq.fitting.fit import proved_task
from posthoc_uq.fitting.moved_mean import MeanGradient, check_exact
from posthoc_uq.fitting.tune import model_of, tell_returned
from posthoc_uq.layers.proof import Exactly
from posthoc_uq.methods import Method, method_of
from posthoc_uq.methods.task import Task, TaskPlan
from posthoc_uq.posteriors.block import NotContainedError
from posthoc_uq.posteriors.history import NO_CHANGES, History
from posthoc_uq.posteriors.posterior import Posterior

_GIVEN = "given"  # in the record of how a hyperparameter was found: by the user
_BEFORE = "found before the data changed"


@defer_interrupts
@known_arguments
def update(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    remove: bool = False,
    mean: bool = False,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    batch_to_weights: BatchFunction | None = None,
    progress: bool | None = None,
) -> Posterior:
    """A new posterior with the data of `loader` added, or taken out; the given one stays as it is.

    None of the other data are needed. The result is that of a fit on all data (or on those left), to rounding, for
    ``"diag"``, ``"full"``, ``"subnetwork"``, ``"kfac"`` with ``uq.KFAC(keep_grams=True)``, and a regression by
    ``uq.MessagePassing(posterior="full")``, which for classes comes near to it. ``"efb"`` and ``"inf"`` keep their
    bases: what they store in them is exact, and `Posterior.report` says how much of the new data is outside. All
    other posteriors are refused.

    The mean stays: it is the network's weights, so that predictions keep their mean and only their variances change.
    Train the network on and fit again where they must move; or pass `mean`, where a step of training is not needed.
    (`MessagePassing` has a mean of its own, which moves.)

    Model, bases and hyperparameters stay; only the scale follows the number of samples. Tune again where data changed
    much. Promises and the moments head's calibration are cleared, with a warning. The new posterior has no novelty by
    class, which is no sum over the data: ``predictor.novelty(x, of="top")`` asks the posterior itself.
    `history.changes` counts what came and went, with a digest; its balance is zero when all that came in went out.

    Args:
        posterior: from `fit` or `load`.
        loader: batches as in `fit`; in a process group, each process passes its part.
        remove: take the data out: the posterior is the one before to 1e-8 of the precision's norm, with the same
            batches to 1e-15. They must have been in, with the same bytes; a posterior cannot recognise its data,
            but refuses those that would leave a negative statistic or no sample.
        mean: move the mean, too: of a regression by ``"full"`` or ``uq.KFAC(keep_grams=True)`` over the last layer
            alone, whose features stay. By Bayes' rule the result is exact: that of all data in closed form, where the
            layer was trained to the maximum of its posterior. The new posterior has this mean, as
            `Posterior.trained_mean`, and its predictors use it, after saving and loading, too; the model keeps its
            weights.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        batch_to_weights: as in `fit`; a sample that came in with a weight goes out with it, or in part.
        progress: show a bar; by default on a terminal.

    Raises:
        NonFiniteError: outputs, activations or gradients are not finite.
        PosteriorMismatchError: the model's weights are no longer those of the fit, or change meanwhile; or it uses
            other layers.
        PosthocUQError: the method cannot add data up; or the data do not fit, or cannot all have been in, or are so
            large that what is known would be lost to rounding; or `mean` is set and would not be exact.

    Example:
        ```python
        larger = uq.update(posterior, val_loader)  # with more data
        smaller = uq.update(larger, val_loader, remove=True)
        print(larger.scale, smaller.scale)
        ```
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"update takes a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    remove, progress = check_option("remove", remove, bool), bars_shown(progress)
    mean = check_option("mean", mean, bool)
    reader = BatchReader.of(
        model_of(posterior),
        batch_to_inputs,
        batch_to_targets,
        batch_to_weights,
        skips_missing=posterior.likelihood.missing == "ignore",
    )

    with on_all_ranks("update"), steady(model_of(posterior), call="update"):
        new, warnings = _updated(posterior, loader, remove, mean, reader, progress)
    if posterior.evidence.weight is not None and batch_to_weights is None:
        warnings.append(
            "The samples of this posterior have weights, and those of this call count once each; pass "
            "batch_to_weights= if they have others."
        )
    for warning in warnings:
        warn_user(warning)
    tell_returned(new, progress)
    return new


def _updated(
    posterior: Posterior, loader: Iterable[Any], remove: bool, mean: bool, reader: BatchReader, progress: bool
) -> tuple[Posterior, list[str]]:
    """The new posterior, and what to warn of."""
    method = method_of(posterior.method)
    method.check_update(posterior)
    if reader.batch_to_weights is not None:
        method.check_weights()
    moves_itself = method.trains
    if mean and not moves_itself:
        check_exact(posterior)
    _check_possible(posterior, loader, method)
    task = _prepared(posterior, loader, method, reader, progress)
    gradient = MeanGradient(posterior, task) if mean and not moves_itself else None
    content = DataHash()
    task.observers.append(content)
    try:
        new = method.update(posterior, task, remove)
    except NotContainedError as error:
        raise PosthocUQError(
            f"These data cannot all be among those of the posterior: without them, the {error} would be negative. Pass "
            f"samples that were fitted or added, unchanged."
        ) from None
    task.observe()
    if gradient is not None:
        new = gradient.moved(new, remove)
    check_numbers(new)
    check_settings(new, factorised=True)
    parts = gather((content.samples, content.total), "counting the samples of update")
    samples, total = sum(part[0] for part in parts), sum(part[1] for part in parts) % WORD
    new = new.replaced(history=_cleared(_recorded(new.history, samples, total, remove, mean or moves_itself)))
    warnings = _warnings_of_cleared(posterior.history)
    if posterior.features is not None and new.features is None:
        warnings.append(
            "The new posterior has no novelty by class, which is no sum over the data; for it, fit again on all data."
        )
    before = posterior.history.changes
    if not remove and before is not None and before.last == total:
        warnings.append(
            "These are the data of the last update, which now count twice; remove them if that is not meant."
        )
    return new, warnings


def _check_possible(posterior: Posterior, loader: Iterable[Any], method: Method) -> None:
    """The checks that need no pass of the model."""
    if torch.is_inference_mode_enabled():
        raise PosthocUQError(
            "New data need gradients, which torch.inference_mode() does not allow; call this outside of it."
        )
    check_loader(loader)
    check_reusable(loader, 2 if method.trains else 1)
    check_unchanged(posterior)
    check_differentiable(model_of(posterior))


def _prepared(
    posterior: Posterior, loader: Iterable[Any], method: Method, reader: BatchReader, progress: bool
) -> Task:
    """The task of the data that come in or go out, over exactly the layers of the posterior."""
    kept, budget = posterior.dtype, method.memory_budget
    plan = TaskPlan(
        model=model_of(posterior),
        loader=loader,
        reader=reader,
        likelihood=posterior.likelihood,
        layers=Exactly(posterior.layers),
        seed=int(posterior.history.fit.get("seed", 0)),
        dtype=kept if kept in (torch.float32, torch.float64) else torch.float32,
        memory_budget=TEMPORARY_BYTES if budget is None else budget,
        progress=progress,
    )
    task = proved_task(plan, method)
    if task.layers != posterior.layers or list(task.layers) != list(posterior.layers):
        missing = [name for name, layer in posterior.layers.items() if task.layers.get(name) != layer]
        raise PosteriorMismatchError(
            f"On these data the model does not use the layers of the posterior as in the fit: {missing[:5]}; pass data "
            f"like those of the fit."
        )
    return task


def _recorded(history: History, samples: int, content: int, remove: bool, moved: bool) -> History:
    """The history with one more change of the data; the record has the same size after any number of them. `content` is
    the sum of the hashes of the samples modulo 2^64, `moved` whether the mean moved.
    """
    before = history.changes or NO_CHANGES
    if remove:
        counts = {"removals": before.removals + 1, "removed": before.removed + samples}
    else:
        counts = {"updates": before.updates + 1, "added": before.added + samples}
    line = f"{before.digest} {'out' if remove else 'in'} {samples} {content:016x}"
    changes = before.changed(
        **counts,
        digest=sha256(line.encode()).hexdigest(),
        balance=(before.balance + (-content if remove else content)) % WORD,
        last=0 if remove else content,
        moved=before.moved + moved,
    )
    return replace(history, changes=changes)


def _cleared(history: History) -> History:
    """The history without what was found for the posterior as it was."""
    tuning = {name: how if how == _GIVEN else _BEFORE for name, how in history.tuning.items()}
    return replace(history, promises=None, calibration=None, faithful=None, tuning=tuning, trials=None)


def _warnings_of_cleared(history: History) -> list[str]:
    """What to warn of where the history is cleared."""
    warnings: list[str] = []
    if history.calibration:
        warnings.append(
            "The scale of the moments head was fitted before the data changed, and is cleared; fit it again: "
            "predictor = predictor.fit_scale(loader)."
        )
    if history.promises:
        warnings.append(
            "The held-out scores were measured before the data changed, and are cleared; calibrate again: "
            "posterior = uq.calibrate(posterior, val_loader)."
        )
    return warnings
