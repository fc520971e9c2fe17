"""`fit`: from a trained model and its data to a posterior over the weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from posthoc_uq.curvature.content import batch_hash
from posthoc_uq.curvature.selection import Selection
from posthoc_uq.distributed import together, world
from posthoc_uq.drawn_models import warn_if_draws_differ
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.faithful import Faithful
from posthoc_uq.inference.checkpoint import Checkpoint
from posthoc_uq.inference.evidence import maximise_evidence
from posthoc_uq.inference.features import keep_features, trained_features, watch_features
from posthoc_uq.inference.first_batch import missing_decoder_inputs, other_dispersion, unshifted_labels
from posthoc_uq.inference.identity import fit_identity
from posthoc_uq.inference.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.inference.observation_noise import set_observation_noise, warn_if_memorised
from posthoc_uq.inference.probabilities import PROBABILITIES_MEANT, gives_probabilities, refusal
from posthoc_uq.inference.row_check import check_log_prob
from posthoc_uq.inference.task import Task, check_common
from posthoc_uq.interrupts import orderly
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import BatchFunction
from posthoc_uq.memory import return_freed_memory
from posthoc_uq.methods import Method
from posthoc_uq.outputs import Output, chosen_in
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.weight_prior import WeightPrior, checked_prior
from posthoc_uq.preparing import prepared_task
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate, statistics_dtype, unwrap
from posthoc_uq.request import Request, requested
from posthoc_uq.storage.saving import check_numbers
from posthoc_uq.storage.schema import buffers_fingerprint, fingerprint
from posthoc_uq.tuning import settle_faithful, tune
from posthoc_uq.tuning_names import has_something_to_tune, nothing_to_tune
from posthoc_uq.warned import warn_user
from posthoc_uq.wrapping import wrap


@orderly
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method = "inf",
    *,
    val_loader: Iterable[Any] | None = None,
    likelihood: str | Likelihood = "classification",
    layers: Selection | None = None,
    prior_precision: float | str | Faithful | Mapping[str, Any] | None = None,
    prior_mean: float | str | Mapping[str, Any] | None = None,
    head: str | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    batch_to_weights: BatchFunction | None = None,
    output: Output | None = None,
    progress: bool = True,
    **options: Any,
) -> Posterior:
    """Fit a posterior over the weights of a trained model. The model is not changed, nor is the global random state.

    In a process group of `torch.distributed` every process calls this with its own part of the data (a `DataLoader`
    with a `DistributedSampler`) and gets the posterior of all data; a training runs in one process only.

    Args:
        model: the trained model; a copy that shares its weights runs in eval mode.
        loader: batches ``(inputs, targets)``, inputs alone, or mappings; how often it is read depends on the method.
        method: an object with its options (``uq.INF(rank=50)``), or its name (``"inf"``) with the options as further
            arguments. The names are the keys of `posthoc_uq.methods.METHODS`.
        val_loader: held-out batches; the fit then ends with `tune(posterior, val_loader)`, or a training with the
            weights of the epoch that predicts them best.
        likelihood: ``"classification"``, ``"binary"``, ``"multilabel"``, ``"ordinal"``, ``"regression"``,
            ``"heteroscedastic"``, ``"poisson"``, ``"negative_binomial"``, ``"gamma"``, or a `Likelihood`.
        layers: ``"all"``, ``"last"``, names, prefixes of names or shell patterns (``"*lora_*"``), or a predicate
            ``(name, module) -> bool``. By default those that the method is for: the last one for message passing, all
            for the others.
        prior_precision: a number; ``"faithful"`` (the default) or a `Faithful`, for the widest posterior whose
            predictions stay near the network's; or ``"evidence"``, for the maximum of the log marginal likelihood.
            Or a tensor by the name of every parameter of the layers, for ``"diag"``, ``"full"``, ``"subnetwork"`` and
            ``"inf"``: a prior precision of each weight. The posterior's `prior_precision`, then 1, is a factor on them,
            by which all are tuned together.
            For a training a number is the method's own prior precision, and the variances are then narrowed until they
            are faithful; by default not with ``"message_passing"``, and never with ``"latent_binary"``.
        prior_mean: of the weights, a number or tensors by the names of parameters (0 for those without one). The
            posterior stays where the training ended, so this enters the log marginal likelihood alone, and prior
            precisions that are found by it. Not for trainings, some of which have an option of this name.
        head: the head by which the faithful prior is found and `wrap` predicts: ``"linearized"``, ``"sampling"`` or
            ``"moments"``; by default the method's.
        seed: of all random numbers; a seed makes a fit bit-identical on one device.
        checkpoint: a file from which the same call goes on after an interruption, with the same result to the last bit
            on one device if the loader gives the same batches in the same order. Deleted when the fit is done.
        batch_to_inputs: takes a batch to the model's inputs: a tensor, a tuple of arguments or a dict of named ones.
        batch_to_targets: takes a batch to its targets.
        batch_to_weights: takes a batch to the weights of its samples, ``(samples,)``, or of their positions,
            ``(samples, *positions)``: numbers of at least 0, or a mask of bools. The log-likelihood is
            ``sum_n w_n log p(y_n | f_n)``, so that a whole weight is as good as so many copies of the sample, and 0
            leaves it out; the weight 0 of a position is an `ignore_index`. The noise variance of a regression, the
            evidence and the novelty's statistics are weighted too; a training weighs its loss by samples, and held-out
            data have no weights. Not for ``"message_passing"``.
        output: where the outputs are in what the model returns, if that is no tensor: a key or the name of an attribute
            (``"out"``), an index, or a function of what is returned, which no file can keep. By default the part with a
            known name (``logits``, ``out``, ``sample``), or the only tensor with a row a sample.
        progress: show a bar for each sweep and for the search of the prior precision, on rank 0.
        **options: the method's fields, if it is given by name (``rank=50``); ``divergence``, the budget of a
            `Faithful`, in nats; ``noise_variance`` of a regression, in squared units of the targets, one number or one
            an output, by default the mean squared residual of the training data (1 without targets, with a warning).

    Returns:
        The posterior; see its `report`.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        NonFiniteError: outputs, activations, gradients or a loss are not finite.
        PosthocUQError: options, data or model do not fit; the message says how to go on.
    """
    arguments = dict(locals())
    posterior, task = together(lambda: _fitted_as_asked(arguments), "the fit")
    if task.checkpoint is not None:
        task.checkpoint.remove()
    return posterior


def _fitted_as_asked(arguments: Mapping[str, Any]) -> tuple[Posterior, Task]:
    """The posterior that a call of `fit` asks for, and the task behind it."""
    model, loader, val_loader = arguments["model"], arguments["loader"], arguments["val_loader"]
    progress: bool = arguments["progress"]
    request = together(lambda: requested(**arguments), "checking the options")
    model = unwrap(model)
    task = _prepared_task(model, loader, arguments["layers"], request, progress)
    weight_prior = together(lambda: _weight_prior(request, task), "checking the prior")
    task.val_loader = val_loader
    _open_checkpoint(task, request, arguments["checkpoint"], arguments)
    kept_inputs = KeptInputs(task.memory_budget, request.likelihood, inputs_to_keep(task.layers.values()))
    task.observers += [kept_inputs] if request.faithful is not None else []
    noise_origin = set_observation_noise(task) if request.finds_noise else "given"
    posterior = _fitted(task, request.method)
    posterior.weight_prior = weight_prior
    check_numbers(posterior, factorised=False)
    posterior.history.fit |= request.own_prior.described()
    task.observe()
    del task.prepared
    if posterior.likelihood.noise_variance is not None:
        posterior.history.tuning.setdefault("noise variance", noise_origin)
    posterior.history.head = {"name": request.head, "options": {}}
    choice = chosen_in(task.model)
    posterior.history.output = {} if choice is None else choice.plain()
    if request.finds_noise and val_loader is None:
        warn_if_memorised(posterior)
    _set_prior(posterior, request, task, kept_inputs)
    if val_loader is not None and not request.method.trains:
        readers = {name: arguments[name] for name in ("batch_to_inputs", "batch_to_targets")}
        if has_something_to_tune(posterior):
            tune(posterior, val_loader, seed=request.seed, progress=progress, **readers)
        else:
            warn_user(f"val_loader was not used. {nothing_to_tune(posterior)}")
    # again, with the hyperparameters that were found; a faithful prior was found by predictions
    check_numbers(posterior, factorised=posterior.history.head["criterion"] != "faithful")
    return_freed_memory()
    posterior.fingerprint = fingerprint(posterior.original)
    posterior.buffers_fingerprint = buffers_fingerprint(model)
    return posterior, task


def _prepared_task(
    model: nn.Module,
    loader: Iterable[Any],
    layers: Selection | None,
    request: Request,
    progress: bool,
) -> Task:
    """The task of a fit, after a dry run on the first batch."""
    method, likelihood, seed = request.method, request.likelihood, request.seed
    task = prepared_task(
        model,
        loader,
        layers,
        method=method,
        likelihood=likelihood,
        reader=request.reader,
        seed=seed,
        dtype=together(lambda: statistics_dtype(model, method.dtype), "checking dtype"),
        progress=progress,
        output=request.output,
    )

    def look() -> list[str | None]:
        with isolated_random_state(seed):
            check_log_prob(task.model, task.batch, likelihood)
            seen = [unshifted_labels(unwrap(model), task.batch, likelihood)]
            seen += [missing_decoder_inputs(unwrap(model), task.batch)]
            seen += [other_dispersion(task.model, task.batch, likelihood)] if request.by_name else []
            if gives_probabilities(task.model, task.batch, likelihood):
                if request.by_name:
                    raise PosthocUQError(refusal(likelihood))
                seen += [PROBABILITIES_MEANT]
            return seen

    seen = together(look, "the dry run")
    for warning in (task.prepared.warning, *seen):
        if warning is not None:
            warn_user(warning)
    return task


def _weight_prior(request: Request, task: Task) -> WeightPrior:
    """The prior of single weights."""
    own, parameters = request.own_prior, dict(task.model.named_parameters())
    return checked_prior(task.layers, parameters, own.precision, own.mean)


def _open_checkpoint(
    task: Task, request: Request, file: str | os.PathLike[str] | None, arguments: Mapping[str, Any]
) -> None:
    """Check that all processes do the same fit, and read the checkpoint of an interrupted one."""
    if file is None and world() == 1:
        return
    method = request.method
    identity = fit_identity(arguments, request.identity(), task, request.method.trains)
    check_common(identity | {"checkpoint": "none" if file is None else "given"})
    identity["first batch"] = batch_hash(task.batch)
    if file is not None:
        task.checkpoint = together(
            lambda: Checkpoint(
                file,
                method.checkpoint_every,
                identity,
                task.memory_budget,
                task.model,
                method.stages,
                task.layers,
                task.settings.dtype,
            ),
            "opening the checkpoint",
        )
        task.memory_budget = task.checkpoint.budget


def _fitted(task: Task, method: Method) -> Posterior:
    """The method's posterior, with the statistics of the last layer's inputs."""
    if method.trains:
        posterior = method.fit(task)
        trained_features(task, task.features, posterior, replicate(task.model, posterior.centre))
        return posterior
    grams = watch_features(task, task.features)
    posterior = method.fit(task)
    keep_features(task, grams, posterior)
    return posterior


def _set_prior(posterior: Posterior, request: Request, task: Task, kept_inputs: KeptInputs) -> None:
    """Set the prior precision that was asked for, or the scale of a training."""
    head, prior, seed = posterior.history.head, request.prior, task.settings.seed
    if posterior.widening is None:  # it has no prior precision or scale to set
        head["criterion"] = "given"
    elif request.faithful is not None:
        head["criterion"] = "faithful"
        inputs, predictor = kept_inputs.batches(task.device), wrap(task.model, posterior)
        began = time.perf_counter()
        progress = task.settings.progress
        settle_faithful(posterior, inputs, predictor, request.faithful, seed=seed, progress=progress)
        posterior.history.fit["seconds, faithful prior"] = time.perf_counter() - began
    elif not posterior.takes_prior:
        head["criterion"] = "given"
    elif isinstance(prior, float):
        head["criterion"] = "given"
        posterior.prior_precision = prior
        posterior.history.tuning["prior precision"] = "given"
    else:
        head["criterion"] = "evidence"
        maximise_evidence(posterior, progress=task.settings.progress)
        if task.val_loader is None:
            warn_if_draws_differ(posterior, task.batch, seed, progress=task.settings.progress)
