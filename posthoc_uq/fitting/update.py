"""`update` and `forget`: data that come in after the fit, and data that go out again.

A posterior whose statistics are sums needs none of the old data for that. What a method does is in its hooks
`Method.update` and `Method.forget`; here are the checks, the record, and what all methods share.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch

from posthoc_uq.core.batches import BatchFunction, BatchReader, check_loader, check_reusable
from posthoc_uq.core.distributed import gather, together
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError, warn_user
from posthoc_uq.core.interrupts import orderly
from posthoc_uq.core.model import check_differentiable
from posthoc_uq.core.options import flag
from posthoc_uq.curvature.sweep import WORD, Content
from posthoc_uq.files.saving import check_numbers
from posthoc_uq.files.schema import check_unchanged
from posthoc_uq.fitting.fit import prepared_task
from posthoc_uq.fitting.tune import model_of
from posthoc_uq.methods import Method, method_of
from posthoc_uq.methods.features import other_features, watch_other_features
from posthoc_uq.methods.method import Change
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.block import NotContainedError
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.referral import rule_of
from posthoc_uq.posteriors.settings import History

_EARLIER = ", before the data changed"  # ends what the history says of hyperparameters found on other data


@orderly
def update(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    batch_to_weights: BatchFunction | None = None,
    progress: bool = True,
) -> Posterior:
    """Add new data to a posterior, in place and without the old data.

    The statistics of ``"diag"`` and ``"full"``, and of ``"kfac"`` with ``uq.KFAC(keep_grams=True)``, are sums over the
    samples, so that the result is that of a fit on all data, to rounding. ``"efb"`` and ``"inf"`` keep their bases;
    what is computed in them is exact, too, and so is the diagonal of ``"inf"``. How much of the new data's Fisher is
    outside of these bases, `Posterior.report` says: of the trace for ``"inf"``; for ``"efb"``, whose bases are whole,
    of the squared Frobenius norm of the Kronecker factors, which is not on their diagonal there. Posteriors of a last
    layer by ``"message_passing"`` get new messages under what they know, so that they end near a fit on all data.

    The network, its weights and the bases are those of the fit, and so is every hyperparameter: only the scale follows
    the number of samples. The prior precision, the temperature and the noise variance of a regression stay; tune them
    again (`posthoc_uq.tune`) where the data have changed much. A referral threshold and the moments head's calibration
    belong to the posterior as it was: they are cleared, with a warning. Novelty knows the new inputs. Predictors
    follow, but for weights that are drawn already: `SamplingPredictor.redraw`.

    The posterior's history keeps counts and a digest of what came in and went out, none of the inputs. If anything
    fails, the posterior stays as it was; `save` it to keep the result.

    Data are refused whose statistics are so large that more than 1 % of what is known (of the largest number of a
    layer's) would be lost to rounding beside them, since `forget` could not give that back. In float32 that takes
    gradients or features some hundred times as large as before.

    Args:
        posterior: from `fit` or `load`.
        loader: batches as in `fit`, of new data only. In a process group of `torch.distributed` each process passes its
            own part, as in `fit`.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        batch_to_weights: as in `fit`.
        progress: show a bar.

    Returns:
        The posterior itself.

    Raises:
        NonFiniteError: outputs, activations or gradients are not finite.
        PosteriorMismatchError: the model's weights are no longer those of the fit, or it uses other layers.
        PosthocUQError: the method, or this posterior, cannot take in data; or the data do not fit, or could not be
            forgotten again; or another thread is
            changing this posterior.
    """
    functions = (batch_to_inputs, batch_to_targets, batch_to_weights)
    return _changed(posterior, loader, "update", functions, progress)


@orderly
def forget(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    batch_to_weights: BatchFunction | None = None,
    progress: bool = True,
) -> Posterior:
    """Take data out of a posterior again, in place and without those that stay.

    The data must have been in, at the fit or by an `update`, with the same bytes. A drawn label (``fisher="mc"``) is a
    function of an input's bytes and of the fit's seed, so that the same gradients go out as came in. The posterior does
    not keep its data, so it cannot recognise them. Data that would leave a negative statistic, more samples of a class
    than there are, or no sample, are refused, and the posterior stays as it was. By message passing, data that were
    never in can pass, and make predictions worse: look at them afterwards. Everything else is as in `update`.

    Args:
        posterior: from `fit` or `load`.
        loader: batches of the data that go out.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        batch_to_weights: as in `fit`; a sample that came in with the weight w goes out with it, or in part.
        progress: show a bar.

    Returns:
        The posterior itself.

    Raises:
        NonFiniteError: outputs, activations or gradients are not finite.
        PosteriorMismatchError: the model's weights are no longer those of the fit, or it uses other layers.
        PosthocUQError: the method, or this posterior, cannot forget data; the data cannot all have been in; or they do
            not fit; or another thread is changing this posterior.
    """
    functions = (batch_to_inputs, batch_to_targets, batch_to_weights)
    return _changed(posterior, loader, "forget", functions, progress)


def _changed(
    posterior: Posterior,
    loader: Iterable[Any],
    change: Change,
    functions: tuple[BatchFunction | None, BatchFunction | None, BatchFunction | None],
    progress: bool,
) -> Posterior:
    """Change the data of a posterior: everything is computed first, and then takes the place of the old at once.

    Raises:
        PosthocUQError: another thread is changing the posterior.
    """
    if not isinstance(cast(Any, posterior), Posterior):
        raise PosthocUQError(
            f"{change} takes a posterior from uq.fit or uq.load(path, model), not a {type(posterior).__name__}."
        )
    with posterior.changing(f"uq.{change}"):
        new, warnings = together(lambda: _computed(posterior, loader, change, functions, progress), change)
        posterior.replace_contents(new)
    for warning in warnings:
        warn_user(warning)
    return posterior


def _computed(
    posterior: Posterior,
    loader: Iterable[Any],
    change: Change,
    functions: tuple[BatchFunction | None, BatchFunction | None, BatchFunction | None],
    progress: bool,
) -> tuple[Posterior, list[str]]:
    """The posterior after a change, and what a user must know of it, in words; the given one stays as it is."""
    method = method_of(posterior.method)
    method.check_change(posterior, change)
    if functions[2] is not None:
        method.check_weights()
    progress = flag("progress", progress)
    _check_possible(posterior, loader)
    reader = BatchReader.of(model_of(posterior), *functions)
    sign = 1 if change == "update" else -1
    task = _prepared(posterior, loader, method, reader, progress)
    content = Content()
    task.observers.append(content)
    grams = watch_other_features(task, posterior)
    try:
        new = (method.update if sign > 0 else method.forget)(posterior, task)
        task.observe()
        new.features, new.weight_prior = posterior.features, posterior.weight_prior
        if grams is not None:
            new.features = other_features(task, grams, posterior, sign, model_of(posterior))
    except NotContainedError as error:
        raise PosthocUQError(
            f"These data cannot all be among those of the posterior: without them, the {error} would be negative. Pass "
            f"samples that were fitted or added, unchanged; the posterior stays as it is."
        ) from None
    check_numbers(new, factorised=True)
    parts = gather((content.samples, content.total), f"counting the samples of {change}")
    seen = _Seen(sum(samples for samples, _ in parts), sum(total for _, total in parts) % WORD)
    new.history = deepcopy(new.history)
    new.fingerprint, new.buffers_fingerprint = posterior.fingerprint, posterior.buffers_fingerprint
    _record(new.history, seen, sign)
    warnings = _cleared(new.history)
    if posterior.evidence.weight is not None and functions[2] is None:
        warnings.append(
            "The samples of this posterior have weights, and those of this call count once each; pass "
            "batch_to_weights= where they came in, or are to come in, with others."
        )
    if sign > 0 and posterior.history.changes.get("last") == seen.content:
        warnings.append(
            "These are the data of the last update, which now count twice; uq.forget takes them out again."
        )
    return new, warnings


def _check_possible(posterior: Posterior, loader: Iterable[Any]) -> None:
    """The checks that need no pass of the model."""
    if torch.is_inference_mode_enabled():
        raise PosthocUQError(
            "New data need gradients, which torch.inference_mode() does not allow; call this outside of it."
        )
    check_loader(loader)
    check_reusable(loader, 2 if posterior.centre else 1)
    check_unchanged(posterior)
    check_differentiable(model_of(posterior))


def _prepared(
    posterior: Posterior, loader: Iterable[Any], method: Method, reader: BatchReader, progress: bool
) -> Task:
    """The task of the data that come in or go out, over exactly the layers of the posterior."""
    kept = posterior.dtype
    task = prepared_task(
        model_of(posterior),
        loader,
        lambda name, _: name in posterior.layers,
        method=method,
        likelihood=posterior.likelihood,
        reader=reader,
        seed=int(posterior.history.fit.get("seed", 0)),
        dtype=kept if kept in (torch.float32, torch.float64) else torch.float32,
        progress=progress,
    )
    if task.layers != posterior.layers or list(task.layers) != list(posterior.layers):
        missing = [name for name, layer in posterior.layers.items() if task.layers.get(name) != layer]
        raise PosteriorMismatchError(
            f"On these data the model does not use the layers of the posterior as in the fit: {missing[:5]}; pass data "
            f"like those of the fit."
        )
    return task


@dataclass(frozen=True)
class _Seen:
    """What a change saw of the data: the number of samples, and the sum of their hashes modulo 2^64."""

    samples: int
    content: int


def _record(history: History, seen: _Seen, sign: int) -> None:
    """Count a change of the data in a history; the record has the same size after any number of them."""
    changes: dict[str, Any] = {
        "updates": 0,
        "added": 0,
        "removals": 0,
        "removed": 0,
        "digest": "",
        "balance": 0,
    }
    changes |= history.changes
    count, samples = ("updates", "added") if sign > 0 else ("removals", "removed")
    changes[count] += 1
    changes[samples] += seen.samples
    line = f"{changes['digest']} {'in' if sign > 0 else 'out'} {seen.samples} {seen.content:016x}"
    changes["digest"] = sha256(line.encode()).hexdigest()
    changes["balance"] = (changes["balance"] + sign * seen.content) % WORD
    changes["last"] = seen.content if sign > 0 else 0
    history.changes = changes


def _cleared(history: History) -> list[str]:
    """Clear what was found for the posterior as it was; what a user must know of it, in words."""
    warnings: list[str] = []
    if history.referral:
        warnings.append(
            f"The referral threshold ({rule_of(history.referral, 4)}) was set before the data changed, and is cleared; "
            f"set it again on held-out data, with uq.Referral(rate).fit(predictor, loader)."
        )
    if history.calibration:
        warnings.append(
            "The moments head was calibrated before the data changed, and its calibration is cleared; calibrate again."
        )
    history.referral, history.calibration, history.faithful = {}, {}, {}
    history.tuning = {
        name: how if how == "given" or how.endswith(_EARLIER) else how + _EARLIER
        for name, how in history.tuning.items()
    }
    return warnings
