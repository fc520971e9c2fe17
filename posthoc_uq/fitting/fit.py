"""`fit`: check the arguments, dry run, run the method, set the prior precision, tune.

The functions below `fit` stand in the order in which it calls them.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import (
    LOADER,
    Batch,
    BatchFunction,
    BatchReader,
    Readings,
    check_loader,
    check_reusable,
    described_inputs,
    explained,
)
from posthoc_uq.core.devices import TEMPORARY_BYTES, as_double
from posthoc_uq.core.distributed import (
    all_reduce_sum,
    gather,
    is_divided,
    run_on_all_ranks,
    world,
)
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.model import (
    check_differentiable,
    check_usable,
    replicate,
    statistics_dtype,
    unwrap,
    with_plain_weights,
)
from posthoc_uq.core.options import LARGEST, Seed, check_option
from posthoc_uq.core.outputs import (
    Output,
    OutputChoice,
    checked_output,
    chosen_in,
    guessed_choice,
    with_choice,
)
from posthoc_uq.core.progress import Progress, bars_shown, print_above
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.core.steady import steady
from posthoc_uq.curvature.features import find_features
from posthoc_uq.curvature.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.curvature.sweep import SweepSettings, no_weight_error, squared_residuals
from posthoc_uq.files import (
    buffers_fingerprint,
    check_numbers,
    check_settings,
    fingerprint,
    others_fingerprint,
    parameters_of,
)
from posthoc_uq.fitting.first_batch import check_first_batch, on_few_samples
from posthoc_uq.fitting.prior import (
    DIVERGENCE,
    Prior,
    check_weight_prior,
    prior_and_budget,
    weight_prior_of,
    with_prior,
)
from posthoc_uq.fitting.wrap import head_class
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import PROBE_SAMPLES, Selection, check_selection, count_samples, prepare
from posthoc_uq.likelihoods import Categorical, Likelihood, resolve_likelihood
from posthoc_uq.methods import METHODS, Method, method_of
from posthoc_uq.methods.checkpoint import (
    Checkpoint,
    State,
    check_common,
    data_identity,
    fit_identity,
    identified,
)
from posthoc_uq.methods.task import (
    Task,
    Tensors,
    watch_features,
    with_features,
    with_trained_features,
)
from posthoc_uq.posteriors.block import VARIANCES
from posthoc_uq.posteriors.posterior import Posterior

# Effective parameters for each training target, beyond which its residual means little, where that is not a half: a
# diagonal takes what correlated weights have in common for several parameters.
_MAX_PARAMETERS_PER_TARGET = {"diag": 1.0}


@defer_interrupts
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method = "inf",
    *,
    val_loader: Iterable[Any] | None = None,
    likelihood: str | Likelihood = "classification",
    noise_variance: Any = None,
    layers: Selection | None = None,
    prior_precision: float | str | Mapping[str, Any] | None = None,
    prior_mean: float | str | Mapping[str, Any] | None = None,
    divergence: float | Literal["auto"] | None = "auto",
    head: str | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    batch_to_weights: BatchFunction | None = None,
    output: Output | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Posterior:
    """Fit a posterior over the weights of a trained model. The model is not changed, nor is the global random state.

    With nothing given but the method, the likelihood and at most 2,048 samples, the fit of a perceptron ends like
    `tune(posterior, loader, criterion="leave_one_out")`, since such networks memorise their data: a regression
    gets the noise variance of new data, and classes a temperature where the network's confidence exceeds the accuracy
    that is likely at most by more than 0.1. This assumes training from scratch on these data, as the report says;
    ``posterior.with_settings(noise_scale=1)``, or ``temperature=1``, takes it back.

    In a process group of `torch.distributed` every process calls this with its part of the data (a `DataLoader`
    with a `DistributedSampler`) and gets the posterior of all data; a training runs in one process only.

    Args:
        model: the trained model; a copy that shares its weights runs in eval mode.
        loader: batches ``(inputs, targets)``, inputs alone, or mappings; how often it is read depends on the method.
        method: an object with its options (``uq.INF(rank=50)``), or its name (``"inf"``) with the options as further
            arguments. The names are the keys of `posthoc_uq.methods.METHODS`.
        val_loader: held-out batches; the fit then ends with `calibrate(posterior, val_loader)`, or a training with the
            weights of the epoch that predicts them best.
        likelihood: ``"classification"``, ``"binary"``, ``"multilabel"``, ``"ordinal"``, ``"regression"``,
            ``"heteroscedastic"``, ``"poisson"``, ``"negative_binomial"``, ``"gamma"``, or a `Likelihood`.
        noise_variance: of a regression, in squared units of the targets, one number or one an output; by default the
            mean squared residual of the training data (1 without targets, with a warning).
        layers: ``"all"``, ``"last"``, names, prefixes of names or shell patterns (``"*lora_*"``), or a predicate
            ``(name, module) -> bool``; these are layers whose weights are matrices. The last ones are those that no
            other follows on a way to the outputs, as of several heads all. ``"everything"`` adds the scales and offsets
            of normalisations, embeddings and all other parameters, each of which can also be named; ``"trainable"``
            takes those of all these that require gradients. By default those that the method is for: the last one for
            message passing, all for the others.
        prior_precision: a number; ``"faithful"`` (the default), for the smallest one for which predictions on training
            inputs stay within `divergence` of the network's; or ``"evidence"``, for the maximum of the log marginal
            likelihood. Or a tensor by the name of every parameter of the layers, for ``"diag"``, ``"full"``,
            ``"subnetwork"`` and ``"inf"``: a prior precision of each weight. The posterior's `prior_precision`, then 1,
            is a factor on them, by which all are tuned together.
            For a training a number is the prior precision of the method, and the variances are then narrowed until they
            are faithful; by default not with ``"message_passing"``, and never with ``"latent_binary"``.
        prior_mean: of the weights, a number or tensors by the names of parameters (0 for those without one). The
            posterior stays where the training ended, so this enters the log marginal likelihood alone, and prior
            precisions that are found by it. Not for trainings, some of which have an option of this name.
        divergence: the budget of the faithful prior: the largest mean KL divergence of predictions from the network's,
            over a few hundred training inputs, in nats; by default 0.002. None leaves the variances of a training as
            they are.
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
            data have no weights: ignore labels there, or give `calibrate` a mask. Not for ``"message_passing"``.
        output: where the outputs are in what the model returns, if that is no tensor: a key or the name of an attribute
            (``"out"``), an index, or a function of what is returned, which no file can keep. By default the part with a
            known name (``logits``, ``out``, ``sample``), or the only tensor with a row a sample.
        progress: show the phases and how far each is, on rank 0; by default where standard error is a terminal.
        **options: the method's fields, if it is given by name (``rank=50``).

    Returns:
        The posterior; see its `report`.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        NonFiniteError: outputs, activations, gradients or a loss are not finite.
        PosteriorMismatchError: the model's weights, or buffers that predictions depend on, changed during the fit.
        PosthocUQError: options, data or model do not fit.
    """

    def check() -> _FitRequest:  # all that can be checked before the model runs
        if torch.is_inference_mode_enabled():
            raise PosthocUQError(
                "A fit needs gradients, which torch.inference_mode() does not allow; call fit outside of it."
            )
        network = with_plain_weights(unwrap(model))
        check_usable(network)
        if layers is not None:
            check_selection(layers)
        resolved, by_name = resolve_likelihood(likelihood, noise_variance), isinstance(likelihood, str)
        finds_noise = resolved.noise_variance is not None and by_name and noise_variance is None
        chosen, weight_mean = _method_with_options(method, options, layers, prior_mean)
        check_weight_prior(chosen, prior_precision, weight_mean)
        of_weights = prior_precision if isinstance(prior_precision, Mapping) else None
        chosen, prior, budget = prior_and_budget(
            chosen, resolved, prior_precision if of_weights is None else 1.0, divergence
        )
        head_class(head or chosen.head)
        check_loader(loader)
        check_reusable(loader, chosen.passes() + finds_noise)
        if val_loader is not None:
            check_loader(val_loader, "val_loader")
            if is_divided(val_loader):
                raise PosthocUQError(
                    "Every process tunes by itself: give all of them the whole val_loader, not a part of it."
                )
        reader = BatchReader.of(
            network, batch_to_inputs, batch_to_targets, batch_to_weights, output=checked_output(output)
        )
        if batch_to_weights is not None:
            chosen.check_weights()
        check_differentiable(network)
        return _FitRequest(
            model=network,
            loader=loader,
            val_loader=None if val_loader is None else Readings(val_loader),
            method=chosen,
            likelihood=resolved,
            by_name=by_name,
            finds_noise=finds_noise,
            layers=layers,
            prior=prior,
            divergence=budget,
            weight_precisions=of_weights,
            weight_mean=weight_mean,
            head=head or chosen.head,
            seed=check_option("seed", seed, Seed),
            reader=reader,
            output=checked_output(output),
            progress=bars_shown(progress),
        )

    def run(request: _FitRequest) -> tuple[Posterior, Task]:
        began = time.perf_counter()
        with Progress("dry run", "batches", request.progress, 1) as bar:
            task = _dry_run(request)
            bar.advance()
        request = replace(request, likelihood=task.settings.likelihood)
        task.seconds["dry run"] = time.perf_counter() - began
        parameters = dict(task.model.named_parameters())
        weight_prior = run_on_all_ranks(
            lambda: weight_prior_of(task.layers, parameters, request.weight_precisions, request.weight_mean),
            "checking the prior",
        )
        task.for_evidence = request.divergence is None
        _open_checkpoint(task, request, checkpoint)
        kept_inputs = KeptInputs(task.memory_budget, request.likelihood, inputs_to_keep(task.layers.values()))
        task.observers += [kept_inputs] if request.divergence is not None else []
        noise_origin = _set_observation_noise(task) if request.finds_noise else "given"
        posterior = _run_method(task, request).replaced(weight_prior=weight_prior)
        check_numbers(posterior)
        task.observe()
        del task.prepared  # its copy of the model and its hooks
        posterior = _recorded(posterior, request, task, noise_origin)
        if val_loader is None:
            left_out = _by_leave_one_out(posterior, request, task)
            if left_out is None and request.finds_noise:
                _warn_if_memorised(posterior)
            posterior = left_out or posterior
        posterior = with_prior(
            posterior,
            request.prior,
            request.divergence,
            task,
            kept_inputs,
            tuned_after=val_loader is not None,
        )
        if val_loader is not None and not request.method.trains:
            from posthoc_uq.fitting.calibrate import calibrated

            held_out = request.val_loader
            assert held_out is not None
            reader = replace(request.reader, batch_to_weights=None)
            posterior = calibrated(
                posterior, held_out, reader, seed=request.seed, progress=request.progress, options={}
            )
        # a faithful prior was found by predictions, which factorised the precision
        check_settings(posterior, factorised=posterior.history.head["criterion"] != "faithful")
        parameters = parameters_of(unwrap(request.model))
        posterior = posterior.replaced(
            fingerprint=fingerprint(posterior.original),
            buffers_fingerprint=buffers_fingerprint(request.model),
            others_fingerprint=others_fingerprint(parameters, posterior.original),
        )
        return posterior, task

    def run_steadily() -> tuple[Posterior, Task]:
        began = time.perf_counter()
        with steady(model, call="the fit"):
            request = run_on_all_ranks(check, "checking the options")
            posterior, task = run(request)
            if request.progress:
                _tell_seconds(posterior, time.perf_counter() - began)
            return posterior, task

    with torch.enable_grad():  # also within the caller's torch.no_grad()
        posterior, task = run_on_all_ranks(run_steadily, "the fit")
    if task.checkpoint is not None:
        task.checkpoint.remove()
    return posterior


_SHOWN_SHARE = 0.05  # of a fit's time, from which a part is named


def _tell_seconds(posterior: Posterior, total: float) -> None:
    """One line above the bars: where the time of a fit went."""
    from posthoc_uq.posteriors.report import timings

    parts = timings(posterior.history.fit)
    large = {name: seconds for name, seconds in parts.items() if seconds >= _SHOWN_SHARE * total}
    large["other"] = total - sum(large.values())
    told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in large.items())
    print_above(f"fitted in {total:.1f} s: {told}", sys.stderr)


@dataclass(frozen=True)
class _FitRequest:
    """What a call of `fit` asks for, once it is checked.

    Attributes:
        model: the user's, out of its wrappers.
        loader: the training data of this process.
        val_loader: held-out data, if there are any.
        method: with its options.
        likelihood: with its noise variance, if known.
        by_name: whether the likelihood was given by its name, so that its parameters are its defaults.
        finds_noise: whether the noise variance of a regression comes from the data.
        layers: which were asked for; None for those that the method is for.
        prior: a prior precision, or how it is found; ``"faithful"`` for a training, where it counts only with a
            `divergence`.
        divergence: the budget of the faithful prior in nats; None where no faithful prior is to be found.
        weight_precisions: by the name of a parameter, still unchecked; or None.
        weight_mean: a number, or by the name of a parameter, still unchecked; or None.
        head: by which a faithful prior is found and predictions are made.
        seed: of all random numbers.
        reader: of the batches.
        output: which part of what the model returns its outputs are, if the user named it.
        progress: whether bars are shown.
    """

    model: nn.Module
    loader: Iterable[Any]
    val_loader: Iterable[Any] | None
    method: Method
    likelihood: Likelihood
    by_name: bool
    finds_noise: bool
    layers: Selection | None
    prior: Prior
    divergence: float | None
    weight_precisions: Mapping[str, Any] | None
    weight_mean: Any
    head: str
    seed: int
    reader: BatchReader
    output: Output | None
    progress: bool

    def arguments(self) -> dict[str, Any]:
        """What must be the same, besides method, model and data, for one fit to go on where another stopped."""
        return {
            "likelihood": self.likelihood,
            "noise": "found from the data" if self.finds_noise else "given",
            "head": self.head,
            "seed": self.seed,
            "prior of the weights": self.prior if self.weight_precisions is None else self.weight_precisions,
            "prior_mean": self.weight_mean,
            "divergence": self.divergence,
            "output": self.output,
        }


def takes_layers(method: str) -> bool:
    """Whether a method by this name has an option `layers`, which the argument of `fit` sets."""
    return _has_option(method, "layers")


def _has_option(method: str, name: str) -> bool:
    return method in METHODS and any(field.name == name for field in fields(METHODS[method]))


def _method_with_options(
    method: str | Method, options: Mapping[str, Any], layers: Selection | None, prior_mean: Any
) -> tuple[Method, Any]:
    """The method, with those arguments of `fit` that are its options, too; and the prior mean if it is not."""
    of_method = dict(options)
    if isinstance(method, str):
        if layers in ("last", "all") and takes_layers(method):
            of_method.setdefault("layers", layers)
        if prior_mean is not None and _has_option(method, "prior_mean"):
            of_method["prior_mean"], prior_mean = prior_mean, None
    arguments = [name for name in inspect.signature(fit).parameters if name != "options"]
    return method_of(method, of_method, arguments), prior_mean


def _dry_run(request: _FitRequest) -> Task:
    """The task of a fit, after a dry run on the first batch and a look at what it gives."""
    model, method, likelihood, seed = request.model, request.method, request.likelihood, request.seed
    task = prepared_task(
        model,
        request.loader,
        request.layers,
        method=method,
        likelihood=likelihood,
        reader=request.reader,
        seed=seed,
        dtype=run_on_all_ranks(lambda: statistics_dtype(model, method.dtype), "checking dtype"),
        progress=request.progress,
        output=request.output,
        by_name=request.by_name,
    )
    task.val_loader = request.val_loader

    def look() -> list[str]:
        with isolated_random_state(seed):
            return check_first_batch(model, task.model, task.batch, task.settings.likelihood, request.by_name)

    warnings = run_on_all_ranks(look, "the dry run")
    for warning in (
        task.prepared.warning,
        task.prepared.cost,
        _frozen_in_words(task, request.layers),
        *warnings,
    ):
        if warning is not None:
            warn_user(warning)
    return task


def _frozen(model: nn.Module, layers: Mapping[str, Layer]) -> tuple[int, int]:
    """The number of weights of these layers that are frozen in the user's model, and of all of them."""
    parameters = dict(model.named_parameters())
    covered = [parameters[name] for layer in layers.values() for name in layer.parameter_names]
    return sum(p.numel() for p in covered if not p.requires_grad), sum(p.numel() for p in covered)


def _frozen_in_words(task: Task, layers: Selection | None) -> str | None:
    frozen, covered = _frozen(task.model, task.layers)
    if not frozen:
        return None
    choice = any(p.requires_grad for p in task.model.parameters()) and layers != "trainable"
    return (
        f"{frozen:,} of the {covered:,} weights with a posterior are frozen (requires_grad=False). They are uncertain "
        f"like all others, as if these data had trained them{_TRAINABLE if choice else '.'}"
    )


_TRAINABLE = "; layers='trainable' takes what requires gradients alone."


def prepared_task(
    model: nn.Module,
    loader: Iterable[Any],
    layers: Selection | None,
    *,
    method: Method,
    likelihood: Likelihood,
    reader: BatchReader,
    seed: int,
    dtype: torch.dtype,
    progress: bool,
    output: Output | None = None,
    by_name: bool = False,
) -> Task:
    """The task of a method, after a dry run on the first batch.

    Args:
        model: the user's model.
        loader: the data of this process.
        layers: which layers are asked for; None for those that the method is for.
        method: whose work it will be.
        likelihood: of the targets.
        reader: of the batches.
        seed: of all random numbers.
        dtype: of the statistics.
        progress: whether a bar is shown.
        output: which part of what the model returns its outputs are; None to find it, or for that of a view.
        by_name: whether the likelihood was given by its name alone; then the labels' shape says where classes are.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        PosthocUQError: there is no sample, or the model cannot be run on the first ones.
    """
    device = reader.device
    autocast = torch.is_autocast_enabled(device.type)
    budget = TEMPORARY_BYTES if method.memory_budget is None else method.memory_budget

    def dry_run() -> Task:
        with isolated_random_state(seed):
            readings = Readings(loader, contents=not method.trains)
            batch = readings.first(reader).kept()  # which is run several times
            with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
                view = with_choice(model, _choice(model, batch, output))
                prepared = prepare(
                    view,
                    batch,
                    method.selection(layers),
                    unsupported=method.unsupported,
                    autocast=autocast,
                    by_gradients=method.takes_gradients,
                )
                observed = _of_shapes(view, batch, likelihood) if by_name else likelihood
                features = find_features(prepared, batch, observed)
            pointwise = None if features is None or not features.pointwise else features.layer.name
            settings = SweepSettings(
                reader, observed, seed=seed, dtype=dtype, progress=progress, by_position=pointwise
            )
            return Task(prepared.model, prepared, readings, batch, settings, device, budget, features)

    return run_on_all_ranks(dry_run, "the dry run")


def _choice(model: nn.Module, batch: Batch, output: Output | None) -> OutputChoice | None:
    """Which part of what the model returns its outputs are, by a run on the first samples where nobody named it.

    Raises:
        PosthocUQError: no part can be the outputs, or several can.
    """
    if chosen_in(model) is not None:
        return chosen_in(model)
    if output is not None:
        return OutputChoice(output)

    def run(part: Batch) -> Any:
        with torch.no_grad():
            return part.copied().call_any(replicate(model))

    part, returned = on_few_samples(run, batch, PROBE_SAMPLES)
    return guessed_choice(returned, count_samples(part))


def _of_shapes(model: nn.Module, batch: Batch, likelihood: Likelihood) -> Likelihood:
    """A likelihood of classes with these in the dimension in which labels of several positions fit the outputs."""
    if type(likelihood) is not Categorical or batch.targets is None or batch.targets.ndim < 2:
        return likelihood

    def run(part: Batch) -> Tensor:
        with torch.no_grad():
            return part.copied().call(replicate(model))

    part, outputs = on_few_samples(run, batch, PROBE_SAMPLES)
    return likelihood if part.targets is None else likelihood.of_shapes(outputs, part.targets)


def _open_checkpoint(task: Task, request: _FitRequest, file: str | os.PathLike[str] | None) -> None:
    """Check that all processes do the same fit, and read the checkpoint of an interrupted one."""
    if file is None and world() == 1:
        return
    reader, seed, held_out = task.settings.reader, task.settings.seed, task.val_loader
    compared: Any = held_out is not None
    if held_out is not None and request.method.trains:  # it chooses the epoch
        compared = data_identity(held_out, replace(reader, batch_to_weights=None), seed)
    arguments = request.arguments() | {"held-out data": compared}
    identity = fit_identity(arguments, request.method, task.model, task.layers)
    check_common(identity | {"checkpoint": "none" if file is None else "given"})
    if file is None:
        return
    data = identified(data_identity(task.loader, reader, seed, task.batch))
    task.checkpoint = run_on_all_ranks(
        lambda: Checkpoint(file, request.method.checkpoint_every, identity | data),
        "opening the checkpoint",
    )


def _set_observation_noise(task: Task) -> str:
    """Set the noise variance of each output by a forward pass over the data, and return in words where it came from.
    Without targets it is taken as 1, with a warning.

    Raises:
        PosthocUQError: the targets do not fit the outputs, or the model fits them without any error.
        NonFiniteError: the residuals are not finite.
    """

    def sweep() -> tuple[Tensor, float] | None:
        if task.batch.targets is None:  # known without a reading, which a stream would not give back
            return None
        with isolated_random_state(task.settings.seed):
            return squared_residuals(task.prepared.capture, task.loader, task.settings)

    def work() -> tuple[Tensors, State]:
        residuals = run_on_all_ranks(sweep, "the sweep for the noise variance")
        if not all(gather(residuals is not None, "looking for targets")):
            return {}, {}
        assert residuals is not None
        count = torch.tensor(residuals[1], dtype=torch.float64, device="cpu")
        all_reduce_sum({"total": residuals[0], "count": count}, "the sum for the noise variance")
        if not float(count):
            raise no_weight_error()
        return {"noise": {"variance": residuals[0] / count}}, {}

    found, _ = task.part("noise", work)
    if not found:
        warn_user(
            "The loader gives no targets, so the noise variance of this regression is taken as 1, in squared units of "
            "the targets. Give it with noise_variance=..., or fit on a loader of (inputs, targets)."
        )
        return "1, since the loader gives no targets"
    # what a checkpoint holds may be anybody's
    what = "its noise variance is of another kind"
    with nullcontext() if task.checkpoint is None else task.checkpoint.reading(what):
        variance = as_double(found["noise"]["variance"]).cpu()
        if variance.shape != (task.prepared.outputs,):
            raise ValueError(f"of shape {tuple(variance.shape)}, for {task.prepared.outputs} outputs")
    if not bool(torch.isfinite(variance).all()):
        raise NonFiniteError(
            "The residuals of the training data are not finite; check the data and the model's weights."
        )
    if not bool((variance >= 1 / LARGEST).all()):
        raise PosthocUQError(
            "The model reproduces its training targets without error; give noise_variance=... yourself."
        )
    task.settings = replace(task.settings, likelihood=task.settings.likelihood.with_noise(variance))
    return "mean squared residual of the training data"


def _run_method(task: Task, request: _FitRequest) -> Posterior:
    """The method's posterior, with the statistics of the last layer's inputs."""
    if request.method.trains:
        posterior = request.method.fit(task)
        return with_trained_features(task, posterior, replicate(task.model, posterior.trained_mean))
    grams = watch_features(task)
    return with_features(task, grams, request.method.fit(task))


def _recorded(posterior: Posterior, request: _FitRequest, task: Task, noise_origin: str) -> Posterior:
    """The posterior with a record of how it was fitted."""
    history, mean = posterior.history, request.weight_mean
    facts, tuning = dict(history.fit), dict(history.tuning)
    frozen, covered = _frozen(task.model, posterior.layers)
    if frozen:
        facts["frozen"] = f"{frozen:,} of {covered:,} weights with a posterior (requires_grad=False)"
    for option in fields(request.method):
        value = getattr(request.method, option.name)
        if isinstance(value, (bool, int, float, str)) and value != option.default:
            facts.setdefault(option.name.replace("_", " "), value)
    if request.weight_precisions is not None:
        facts["prior of each weight"] = "given, times the prior precision"
    if mean is not None:
        facts["prior mean"] = float(mean) if isinstance(mean, (int, float)) else "given"
    if posterior.likelihood.noise_variance is not None:
        tuning.setdefault("noise variance", noise_origin)
    choice = chosen_in(task.model)
    history = replace(
        history,
        fit=facts,
        tuning=tuning,
        head={"name": request.head, "options": {}},
        output={} if choice is None else choice.plain(),
        inputs=described_inputs(task.batch, request.reader.names),
    )
    return posterior.replaced(history=history)


def _by_leave_one_out(posterior: Posterior, request: _FitRequest, task: Task) -> Posterior | None:
    """The posterior with the temperature, or the noise of a regression, by leave-one-out, where nobody has to ask for
    it; see docs/defaults.md. None elsewhere.
    """
    default = request.by_name and request.prior == "faithful" and request.divergence == DIVERGENCE
    default = default and request.weight_precisions is None
    given = posterior.likelihood.noise_variance is not None and not request.finds_noise
    once = isinstance(request.loader, Iterator)
    if request.method.trains or not default or given or once or world() > 1:
        return None
    from posthoc_uq.fitting.leave_one_out import (
        FEW_SAMPLES,
        UNASKED_GAP,
        is_perceptron,
        set_by_leave_one_out,
    )

    few = posterior.evidence.samples <= FEW_SAMPLES and posterior.evidence.log_likelihood is not None
    if not few or request.reader.batch_to_weights is not None:
        return None
    if not is_perceptron(task.model, task.batch, request.seed):
        return None
    try:
        return set_by_leave_one_out(
            posterior,
            task.loader,
            request.reader,
            seed=request.seed,
            progress=request.progress,
            least_gap=UNASKED_GAP,
        )
    except PosthocUQError:  # data or likelihood that it is not for
        return None


def _warn_if_memorised(posterior: Posterior) -> None:
    """Warn where the network has more than half as many effective parameters as training targets, so that the mean
    squared residual of the training data underestimates the noise.

    The effective number of parameters is ``sum_i (1 - tau r_i Sigma_ii)`` (MacKay 1992) at the precision of the
    weights, ``tau = 1 / mean(r w^2)``: how many directions the data settle. Residuals near zero make the noise small
    and the data strong, so that it grows with memorising, too.
    """
    targets = posterior.evidence.targets * posterior.evidence.total / posterior.evidence.samples
    if not targets or not posterior.has_free_prior_precision or VARIANCES not in posterior.capabilities:
        return
    ratios = posterior.weight_prior.precision
    squares = [_times(as_double(w.detach()).square(), ratios.get(name)) for name, w in posterior.mean.items()]
    total = float(sum(square.sum().cpu() for square in squares))
    if total == 0:
        return
    precision = sum(square.numel() for square in squares) / total
    at_precision = posterior.at(replace(posterior.settings, prior_precision=precision))
    effective = 0.0
    for name, variance in at_precision.variance().items():
        wide = as_double(variance)
        settled = (1 - precision * _times(wide, ratios.get(name))).clamp(min=0)
        effective += float(settled[wide > 0].sum())  # without variance: no part of the posterior
    if effective > _MAX_PARAMETERS_PER_TARGET.get(posterior.method, 0.5) * targets:
        warn_user(
            f"The network has about {min(effective, targets):,.0f} effective parameters for {targets:,.0f} training "
            f"targets, so that their residuals underestimate the noise and intervals will be too narrow. Pass held-out "
            f"data, posterior = uq.calibrate(posterior, val_loader), or the noise, noise_variance=...."
        )


def _times(values: Tensor, factor: Tensor | None) -> Tensor:
    return values if factor is None else values * as_double(factor).to(values.device)
