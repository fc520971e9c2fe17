"""The prior of a fit: what a user may ask for, and the prior precision that comes of it.

`with_prior` takes a given number, the faithful one (`posthoc_uq.fitting.faithful`), or that of the largest marginal
likelihood (`posthoc_uq.posteriors.search`). What it means for every weight is in
`posthoc_uq.posteriors.posterior`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import Magnitude, Positive, check_option
from posthoc_uq.core.progress import Progress, count_progress
from posthoc_uq.curvature.kept_inputs import KeptInputs
from posthoc_uq.fitting.wrap import wrap
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.methods import Method
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.block import BLOCKS, LOG_DETERMINANT
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import maximise_evidence

Prior = float | Literal["faithful", "evidence"]

DIVERGENCE = 0.002
"""The default budget of the faithful prior, in nats."""

UNSURE = 0.04
"""How far below its accuracy on training data a network's mean confidence is for its mean entropy to be kept: the
doubts of a posterior would make it less sure still."""

_LARGE_NETWORK = 2_000_000  # weights, from which fewer models are drawn to look at


def check_weight_prior(method: Method, precision: Any, mean: Any) -> None:
    """Refuse a prior of single weights that posteriors of the method cannot have."""
    kinds = [BLOCKS[kind] for kind in method.block_kinds if kind in BLOCKS]
    with_prior = all("prior_precision" in kind.tunable for kind in kinds) and not method.trains
    if mean is not None and not with_prior:
        raise PosthocUQError(
            f"prior_mean enters the log marginal likelihood of a Laplace posterior alone, and method={method.name!r} "
            f"has none; leave it out of the fit."
        )
    if not isinstance(precision, Mapping):
        return
    if not with_prior:
        raise PosthocUQError(
            f"method={method.name!r} takes one number as prior_precision, not one a weight; take method='diag', 'full' "
            f"or 'inf'."
        )
    numbers: Any = cast(Mapping[Any, Any], precision).values()
    by_layer = all(isinstance(value, (int, float)) for value in numbers)  # refused when the layers are known
    if not by_layer and not all(kind.per_weight_prior for kind in kinds):
        raise PosthocUQError(
            f"A prior precision of each weight is not diagonal in the Kronecker basis of method={method.name!r}. Take "
            f"method='diag', 'full' or 'inf', or fit with one number, and then take posterior.with_settings("
            f"prior_precision={{layer: number, ...}})."
        )


def prior_and_budget(
    method: Method, likelihood: Likelihood, prior_precision: Any, divergence: Any
) -> tuple[Method, Prior, float | None]:
    """The method, with its prior precision if it is a training; the prior precision of other methods, or how it is
    found; and the budget of a faithful prior, None where none is to be found.
    """
    prior = _checked_prior(prior_precision)
    if isinstance(divergence, str) and divergence == "auto":
        given, budget = False, DIVERGENCE if method.calibrates_prior or prior == "faithful" else None
    else:
        given, budget = True, divergence
        if budget is not None:
            budget = check_option("divergence, a budget in nats,", divergence, Positive)
    if prior == "faithful" and not likelihood.has_divergence:
        raise PosthocUQError(
            f"Likelihood {likelihood.name!r} has no prediction that could be faithful to the network's; give "
            f"prior_precision a number or 'evidence'."
        )
    if method.trains:
        asked = given or prior == "faithful"
        if asked and budget is not None and "scale" not in method.tunable:
            raise PosthocUQError(
                f"method={method.name!r} keeps the variances of its training, which cannot be narrowed until "
                f"predictions are faithful; leave {'divergence' if given else 'prior_precision'} out of the fit."
            )
        method, prior = _with_prior(method, prior), "faithful"
    elif prior is None:
        prior = _checked_prior(getattr(method, "prior_precision", None)) or "faithful"
    if prior == "faithful" and budget is None and not method.trains:
        raise PosthocUQError(
            "divergence=None leaves the variances that a training found as they are, and this method trains none; "
            "choose prior_precision='evidence' or a number."
        )
    return method, prior, budget if prior == "faithful" and likelihood.has_divergence else None


def _checked_prior(prior_precision: Any) -> Prior | None:
    if prior_precision is None:
        return None
    if isinstance(prior_precision, str):
        if prior_precision in ("faithful", "evidence"):
            return prior_precision
        raise PosthocUQError(
            f"prior_precision must be a positive number, 'faithful' or 'evidence', not {prior_precision!r}."
        )
    return check_option("prior_precision", prior_precision, Magnitude)


def _with_prior(method: Method, prior: Prior | None) -> Method:
    """A training method with the prior precision that is given to the fit, if it is a number."""
    if prior == "evidence":
        raise PosthocUQError(
            "A training has no log marginal likelihood to find the prior precision by; give prior_precision a number."
        )
    if not isinstance(prior, float):
        return method
    if getattr(method, "prior_precision", 0.0) is not None:  # there is no such field, or it has a value
        raise PosthocUQError(
            f"prior_precision is given to the fit, and method={method.name!r} has one of its own or takes none; leave "
            f"it out of the fit."
        )
    changed: dict[str, Any] = {"prior_precision": prior}
    return replace(method, **changed)


def with_prior(
    posterior: Posterior,
    prior: Prior,
    divergence: float | None,
    task: Task,
    kept_inputs: KeptInputs | None,
    gap: float | None,
    *,
    tuned_after: bool,
) -> Posterior:
    """The posterior with the prior precision that was asked for, or the scale of a training.

    Args:
        posterior: of the fit; its record names the head that predicts.
        prior: a number, or how it is found.
        divergence: the budget of the faithful prior in nats; None where none is to be found.
        task: of the fit.
        kept_inputs: training inputs, where a faithful prior is to be found.
        gap: accuracy on the training data less the network's mean confidence there, if that is to count.
        tuned_after: whether held-out data follow, so that predictions at the prior of the evidence are not looked at.
    """
    seed, progress = task.plan.seed, task.plan.progress
    if posterior.width_parameter is not None and divergence is not None and kept_inputs is not None:
        from posthoc_uq.fitting.faithful import set_faithful

        posterior = posterior.noted(head={"criterion": "faithful"})
        inputs, predictor = kept_inputs.batches(task.device), wrap(task.model, posterior)
        began = time.perf_counter()
        if knows_noise(posterior):
            from posthoc_uq.fitting.regression_prior import set_by_known_noise

            posterior = set_by_known_noise(inputs, predictor, divergence, seed=seed, progress=progress)
        else:
            unsure = gap is not None and gap > UNSURE and posterior.temperature == 1
            posterior = set_faithful(
                inputs, predictor, divergence, seed=seed, matched=unsure, progress=progress
            )
            if unsure and posterior.temperature != 1:
                how = f"the network's mean entropy is kept, since its confidence is {gap:.2f} below its accuracy"
                posterior = posterior.noted(tuning={"temperature": how})
        return posterior.noted(fit={"seconds, faithful prior": time.perf_counter() - began})
    if not posterior.has_free_prior_precision:
        return posterior.noted(head={"criterion": "given"})
    if isinstance(prior, float):
        posterior = posterior.at(replace(posterior.settings, prior_precision=prior))
        return posterior.noted(head={"criterion": "given"}, tuning={"prior precision": "given"})
    # also where the likelihood measures no divergence
    posterior = maximise_evidence(posterior.noted(head={"criterion": "evidence"}), progress=progress)
    if not tuned_after:
        _warn_if_draws_differ(posterior, task.batch, seed, progress)
    return posterior


def knows_noise(posterior: Posterior) -> bool:
    """Whether leave-one-out found the noise of a regression, by which a prior precision can be set."""
    found = posterior.history.leave_one_out
    by_evidence = posterior.has_free_prior_precision and LOG_DETERMINANT in posterior.capabilities
    linear = posterior.history.head is not None and posterior.history.head.name == "linearized"
    return found is not None and found.noise_scale is not None and by_evidence and linear


def _warn_if_draws_differ(posterior: Posterior, batch: Batch, seed: int, progress: bool) -> None:
    """Warn where models drawn at the prior precision of the evidence no longer predict what the trained model does.

    Laplace's evidence relies on a linear approximation, which does not hold for weights drawn at its optimum where
    there are far more weights than data. With `progress` a bar is shown.
    """
    from posthoc_uq.heads.sampling import SamplingPredictor

    samples = count_samples(batch)
    # Fewer draws and inputs are less reliable, but draws of a large network take memory, and its passes time.
    large = sum(mean.numel() for mean in posterior.mean.values()) > _LARGE_NETWORK
    draws, inputs = (5, 16) if large else (20, 64)
    few = batch.narrow(0, min(samples, inputs), samples)
    bar = Progress("drawn models", "models", progress, draws)
    with torch.no_grad(), bar, count_progress(draws, bar.advance):
        trained = few.call(replicate(cast(nn.Module, posterior.model)))
        drawn = SamplingPredictor(cast(nn.Module, posterior.model), posterior, draws, seed).outputs(few)
    if not posterior.likelihood.decisions_agree(trained, drawn):
        warn_user(
            "At the prior precision of the log marginal likelihood, models drawn from this posterior no longer predict "
            "what the trained one does: it has few data for its weights. Leave prior_precision at its default "
            "('faithful'), pass val_loader=..., or predict with head='linearized'."
        )
