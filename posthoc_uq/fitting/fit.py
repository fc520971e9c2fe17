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
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, Literal, cast

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
    count_samples,
    described_inputs,
    explained,
)
from posthoc_uq.core.devices import TEMPORARY_BYTES, as_double
from posthoc_uq.core.distributed import (
    all_reduce_sum,
    gather,
    is_divided,
    on_all_ranks,
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
from posthoc_uq.core.options import LARGEST, Seed, check_option, one_of
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
from posthoc_uq.curvature.sweep import (
    ConfidenceGap,
    TargetMoments,
    no_weight_error,
    sums_of_residuals,
    target_moments,
)
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
    with_prior,
)
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import PROBE_SAMPLES, Selection, check_selection, prepare
from posthoc_uq.likelihoods import Categorical, Gaussian, Likelihood, resolve_likelihood
from posthoc_uq.methods import METHODS, Dense, Method, method_of
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
    TaskPlan,
    Tensors,
    watch_features,
    with_features,
    with_trained_features,
)
from posthoc_uq.posteriors.block import VARIANCES
from posthoc_uq.posteriors.history import HeadRecord
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import HEADS

if TYPE_CHECKING:
    from posthoc_uq.likelihoods.joint import Joint

# Effective parameters for each training target, beyond which its residual means little, where that is not a half: a
# diagonal takes what correlated weights have in common for several parameters.
_MAX_PARAMETERS_PER_TARGET = {"diag": 1.0}
_USUAL = "inf"  # the method where nobody names one
_SHIFTED = 0.5  # of the mean squared residual: beyond it the squared mean residual says that the units differ
_ENOUGH_TARGETS = 20  # for that; of unequal weights as many as count
FEW_WEIGHTS, ENOUGH_ROWS = 700, 60  # up to and from which "full" is the method of a regression


@defer_interrupts
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method | None = None,
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

    With nothing given but the method and the likelihood, the fit of a perceptron ends like
    `tune(posterior, loader, criterion="leave_one_out")`, since such networks memorise their data: a regression
    gets the noise variance of new data, and classes the temperature that new data need. Data of more than 2,048 samples
    are read once more for that. The prior of the regression is then that of the log marginal likelihood
    (`posthoc_uq.fitting.regression_prior`). This assumes training from scratch on these data, as the report says;
    ``posterior.with_settings(noise_scale=1)``, or ``temperature=1``, takes noise and temperature back.

    A classifier whose mean confidence on these data is more than .04 below its accuracy, as of training with wrong
    labels, keeps its mean entropy: each faithful prior gets the temperature at which that is the network's.

    In a process group of `torch.distributed` every process calls this with its part of the data (a `DataLoader`
    with a `DistributedSampler`) and gets the posterior of all data; a training runs in one process only.

    Args:
        model: the trained model; a copy that shares its weights runs in eval mode.
        loader: batches ``(inputs, targets)``, inputs alone, or mappings; how often it is read depends on the method.
        method: an object with its options (``uq.INF(rank=50)``), or its name (``"inf"``) with the options as further
            arguments. The names are the keys of `posthoc_uq.methods.METHODS`. By default ``"inf"``; but where nothing
            else is given for a regression by a perceptron of at most 700 weights, on 60 samples or more, ``"full"``:
            a covariance of all weights together widens more outside of the data. The report says so.
        val_loader: held-out batches; the fit then ends with `calibrate(posterior, val_loader)`, or a training with the
            weights of the epoch that predicts them best.
        likelihood: ``"classification"``, ``"binary"``, ``"multilabel"``, ``"ordinal"``, ``"regression"``,
            ``"heteroscedastic"``, ``"quantiles"``, ``"poisson"``, ``"negative_binomial"``, ``"gamma"``, ``"survival"``,
            or a `Likelihood`; of several heads `uq.Joint`.
        noise_variance: of a regression, in squared units of the targets, one number or one an output; by default the
            mean squared residual of the training data (1 without targets, with a warning).
        layers: ``"all"``, ``"last"``, names, prefixes of names or shell patterns (``"*lora_*"``), or a predicate
            ``(name, module) -> bool``; these are layers whose weights are matrices. The last ones are those that no
            other follows on a way to the outputs, as of several heads all. ``"everything"`` adds the scales and offsets
            of normalisations, embeddings and all other parameters; ``"trainable"`` takes those of all these that
            require gradients. Where no layer has a name or fits a pattern, parameters that do are taken alone:
            ``["0.weight"]``, ``"*.bias"``. By default those that a named method is for: the last one
            for message passing, all for the others. Where no method is named either, a perceptron (linear layers on
            rows) and a regression get all, and any other network the last: over all layers its predictions cost a
            backward pass for each output, some twenty forward passes for ten classes where the last layer's take one
            to two, the fit four times as much, and they are no better (docs/defaults.md). The report says which
            were chosen, and what the other choice costs.
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
            known name (``logits``, ``out``, ``sample``), or the only tensor with a row a sample. Gradients go through a
            function; ``"function_space"`` and ``"message_passing"`` need outputs that a linear layer gives. Layers that
            do not reach the part get no posterior.
        progress: show the phases and how far each is, on rank 0; by default where standard error is a terminal.
        **options: the method's fields, if it is given by name (``rank=50``).

    Returns:
        The posterior; see its `report`.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        NonFiniteError: outputs, activations, gradients or a loss are not finite.
        PosteriorMismatchError: the model's weights, or buffers that predictions depend on, changed during the fit.
        PosthocUQError: options, data or model do not fit.

    Example:
        ```python
        posterior = uq.fit(model, train_loader)  # usable as it is
        posterior = uq.fit(model, train_loader, "kfac", layers="last")
        print(posterior.report())
        ```
    """

    began = time.perf_counter()
    # gradients also within the caller's torch.no_grad()
    with torch.enable_grad(), on_all_ranks("the fit"), steady(model, call="the fit"):
        with on_all_ranks("checking the options"):
            plan = _plan(
                model,
                loader,
                method,
                options,
                val_loader=val_loader,
                likelihood=likelihood,
                noise_variance=noise_variance,
                layers=layers,
                prior_precision=prior_precision,
                prior_mean=prior_mean,
                divergence=divergence,
                head=head,
                seed=seed,
                checkpoint=checkpoint,
                batch_functions=(batch_to_inputs, batch_to_targets, batch_to_weights),
                output=output,
                progress=progress,
            )
        task = _prove(plan)
        if plan.chooses_method and plan.finds_noise:
            plan = _with_dense_covariance(plan, task)
        posterior, kept_inputs, gap = _sweep(plan, task)
        posterior = _choose(posterior, plan, task, kept_inputs, gap)
        posterior = _with_fingerprints(posterior, plan)
        if plan.progress:
            _tell_seconds(posterior, time.perf_counter() - began)
    if task.checkpoint is not None:
        task.checkpoint.remove()
    return posterior


@dataclass(frozen=True, kw_only=True)
class FitPlan(TaskPlan):
    """What a call of `fit` asks for, once it is checked.

    Attributes:
        method: with its options.
        chooses_method: whether nobody named it, nor its options, nor layers.
        chooses_layers: whether nobody named them, nor a method, nor priors of single weights.
        finds_noise: whether the noise variance of a regression comes from the data.
        prior: a prior precision, or how it is found; ``"faithful"`` for a training, where it counts only with a
            `divergence`.
        divergence: the budget of the faithful prior in nats; None where no faithful prior is to be found.
        weight_precisions: by the name of a parameter, still unchecked; or None.
        weight_mean: a number, or by the name of a parameter, still unchecked; or None.
        head: by which a faithful prior is found and predictions are made.
        checkpoint: the file of an interrupted fit, or for one.
    """

    method: Method
    chooses_method: bool
    chooses_layers: bool
    finds_noise: bool
    prior: Prior
    divergence: float | None
    weight_precisions: Mapping[str, Any] | None
    weight_mean: Any
    head: str
    checkpoint: str | os.PathLike[str] | None

    def arguments(self, likelihood: Likelihood) -> dict[str, Any]:
        """What must be the same, besides method, model and data, for one fit to go on where another stopped; with the
        likelihood that the dry run found.
        """
        return {
            "likelihood": likelihood,
            "noise": "found from the data" if self.finds_noise else "given",
            "head": self.head,
            "seed": self.seed,
            "prior of the weights": self.prior if self.weight_precisions is None else self.weight_precisions,
            "prior_mean": self.weight_mean,
            "divergence": self.divergence,
            "output": self.output,
        }


def _plan(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method | None,
    options: Mapping[str, Any],
    *,
    val_loader: Iterable[Any] | None,
    likelihood: str | Likelihood,
    noise_variance: Any,
    layers: Selection | None,
    prior_precision: float | str | Mapping[str, Any] | None,
    prior_mean: float | str | Mapping[str, Any] | None,
    divergence: float | Literal["auto"] | None,
    head: str | None,
    seed: int,
    checkpoint: str | os.PathLike[str] | None,
    batch_functions: tuple[BatchFunction | None, BatchFunction | None, BatchFunction | None],
    output: Output | None,
    progress: bool | None,
) -> FitPlan:
    """What `fit` is asked for, checked as far as that goes before the model runs. The arguments are its own, those of
    the method as `options`.
    """
    if torch.is_inference_mode_enabled():
        raise PosthocUQError(
            "A fit needs gradients, which torch.inference_mode() does not allow; call fit outside of it."
        )
    network = with_plain_weights(unwrap(model))
    check_usable(network)
    if layers is not None:
        check_selection(layers)
    resolved, by_name = resolve_likelihood(likelihood, noise_variance), isinstance(likelihood, str)
    finds_noise = isinstance(resolved, Gaussian) and resolved.finds_noise
    heads = tuple(resolved.head_likelihoods)
    if heads:
        finds_noise = bool(cast("Joint", resolved).finds_noise)
    free = method is None and not options and layers is None
    chosen, weight_mean = _method_with_options(
        _USUAL if method is None else method, options, layers, prior_mean, resolved
    )
    check_weight_prior(chosen, prior_precision, weight_mean)
    of_weights = prior_precision if isinstance(prior_precision, Mapping) else None
    chosen, prior, budget = prior_and_budget(
        chosen, resolved, prior_precision if of_weights is None else 1.0, divergence
    )
    head = one_of("head", head or chosen.head, HEADS)
    check_loader(loader)
    check_reusable(loader, chosen.passes() + finds_noise + bool(resolved.scale_from_data))
    if val_loader is not None:
        check_loader(val_loader, "val_loader")
        if is_divided(val_loader):
            raise PosthocUQError(
                "Every process tunes by itself: give all of them the whole val_loader, not a part of it."
            )
    output = checked_output(output)
    reader = BatchReader.of(
        network, *batch_functions, output=output, skips_missing=resolved.missing == "ignore"
    )
    reader = replace(reader, heads=heads) if heads else reader
    if reader.batch_to_weights is not None:
        chosen.check_weights()
    check_differentiable(network)
    return FitPlan(
        model=network,
        loader=loader,
        val_loader=None if val_loader is None else Readings(val_loader),
        reader=reader,
        likelihood=resolved,
        by_name=by_name,
        layers=chosen.selection(layers),
        output=output,
        seed=check_option("seed", seed, Seed),
        dtype=statistics_dtype(network, chosen.dtype),
        memory_budget=TEMPORARY_BYTES if chosen.memory_budget is None else chosen.memory_budget,
        progress=bars_shown(progress),
        method=chosen,
        chooses_method=free,
        chooses_layers=method is None and layers is None and of_weights is None,
        finds_noise=finds_noise,
        prior=prior,
        divergence=budget,
        weight_precisions=of_weights,
        weight_mean=weight_mean,
        head=head,
        checkpoint=checkpoint,
    )


def has_option(method: str, name: str) -> bool:
    """Whether a method by this name has an option of that name."""
    return method in METHODS and any(field.name == name for field in fields(METHODS[method]))


def _method_with_options(
    method: str | Method,
    options: Mapping[str, Any],
    layers: Selection | None,
    prior_mean: Any,
    likelihood: Likelihood,
) -> tuple[Method, Any]:
    """The method, with those arguments of `fit` that are its options, too; and the prior mean if it is not.

    Raises:
        PosthocUQError: the method does not take an option or its value; an option is the likelihood's.
    """
    of_method = dict(options)
    kind = type(likelihood)
    unknown = [name for name in options if not (isinstance(method, str) and has_option(method, name))]
    foreign = [name for name in unknown if name in inspect.signature(kind).parameters]
    if foreign:
        written = ", ".join(f"{name}=..." for name in foreign)
        raise PosthocUQError(
            f"fit does not take {foreign}, which belong to the likelihood: likelihood=uq.{kind.__name__}({written})."
        )
    if isinstance(method, str):
        if layers in ("last", "all") and has_option(method, "layers"):
            of_method.setdefault("layers", layers)
        if prior_mean is not None and has_option(method, "prior_mean"):
            of_method["prior_mean"], prior_mean = prior_mean, None
    return method_of(method, of_method, others=_names_of_arguments()), prior_mean


@cache
def _names_of_arguments() -> list[str]:
    """Of `fit`, one of which may have been meant by an option that a method does not take."""
    return [name for name in inspect.signature(fit).parameters if name != "options"]


def _prove(plan: FitPlan) -> Task:
    """The task of a fit, after a dry run on the first batch and a look at what it gives."""
    began = time.perf_counter()
    with Progress("dry run", "batches", plan.progress, 1) as bar:
        task = proved_task(plan, plan.method)
        with on_all_ranks("the dry run"), isolated_random_state(plan.seed):
            warnings = check_first_batch(plan.model, task.prepared, task.batch, task.likelihood, plan.by_name)
        bar.advance()
    for warning in (task.prepared.warning, task.prepared.cost, _frozen_in_words(task), *warnings):
        if warning is not None:
            warn_user(warning)
    if plan.progress and (price := _price_of_layers(plan, task)):
        print_above(price, sys.stderr)
    task.seconds["dry run"] = time.perf_counter() - began
    return task


def _price_of_layers(plan: FitPlan, task: Task) -> str | None:
    """What predictions over the layers cost beside those over others, before the fit begins; None where there is no
    choice, or another head predicts.
    """
    names, used = set(task.layers), [t.layer.name for t in task.prepared.found if t.layer.rule.matrices]
    if plan.method.trains or plan.head != "linearized" or len(used) < 2:
        return None
    if plan.likelihood.head_likelihoods and len(names) <= len(plan.likelihood.head_likelihoods):
        return None  # their last layers, whose backward passes are short
    from posthoc_uq.heads.linearized_outputs import ALL_OUTPUTS, TOP

    outputs = task.prepared.outputs
    every = f"some {1 + 2 * (outputs if outputs <= ALL_OUTPUTS else TOP)} forward passes or more"
    if len(names) > 1:
        kind = " of a perceptron" if plan.likelihood.logits else " of a regression"
        kind = kind if plan.chooses_layers else ""
        return (
            f"{len(names)} layers{kind}: a prediction takes {every}, over the last one (layers='last') 1 to 2"
        )
    better = ", and is no better" if plan.chooses_layers else ""
    return (
        f"the last of {len(used)} layers: a prediction takes 1 to 2 forward passes, over all (layers='all') {every}"
        f"{better}"
    )


def _with_dense_covariance(plan: FitPlan, task: Task) -> FitPlan:
    """The plan, with a dense covariance as its method for a regression of few weights whose noise leave-one-out will
    find, where nobody chose another.
    """
    weights = sum(layer.parameters for layer in task.layers.values())
    if weights > FEW_WEIGHTS or plan.head != "linearized" or task.batch.targets is None:
        return plan
    if not _leaves_out_unasked(plan, task):
        return plan
    if (task.samples_in_all or 0) < ENOUGH_ROWS:
        return plan
    task.plan = plan = replace(plan, method=Dense())
    return plan


def _frozen(model: nn.Module, layers: Mapping[str, Layer]) -> tuple[int, int]:
    """The number of weights of these layers that are frozen in the user's model, and of all of them."""
    parameters, frozen, covered = dict(model.named_parameters()), 0, 0
    for layer in layers.values():
        for name in layer.parameter_names:
            covered += parameters[name].numel()
            frozen += 0 if parameters[name].requires_grad else parameters[name].numel()
    return frozen, covered


def _frozen_in_words(task: Task) -> str | None:
    frozen, covered = _frozen(task.model, task.layers)
    if not frozen:
        return None
    choice = any(p.requires_grad for p in task.model.parameters()) and task.plan.layers != "trainable"
    return (
        f"{frozen:,} of the {covered:,} weights with a posterior are frozen (requires_grad=False). They are uncertain "
        f"like all others, as if these data had trained them{_TRAINABLE if choice else '.'}"
    )


_TRAINABLE = "; layers='trainable' takes what requires gradients alone."


def proved_task(plan: TaskPlan, method: Method) -> Task:
    """The task of a method, after a dry run on the first batch.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        PosthocUQError: there is no sample, or the model cannot be run on the first ones.
    """
    model, reader, likelihood = plan.model, plan.reader, plan.likelihood
    with on_all_ranks("the dry run"), isolated_random_state(plan.seed):
        readings = Readings(plan.loader, contents=not method.trains)
        batch = readings.first(reader).kept()  # which is run several times
        with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
            if likelihood.head_likelihoods and chosen_in(model) is None:
                choice, likelihood = _heads(model, batch, cast("Joint", likelihood), plan.output)
            else:
                choice = _choice(model, batch, plan.output)
            view = with_choice(model, choice)
            chooses = isinstance(plan, FitPlan) and plan.chooses_layers
            prepared = prepare(
                view,
                batch,
                _chosen_layers(view, batch, plan) if chooses else plan.layers,
                unsupported=method.unsupported,
                autocast=torch.is_autocast_enabled(reader.device.type),
                by_gradients=method.takes_gradients,
            )
            likelihood = _of_shapes(view, batch, likelihood) if plan.by_name else likelihood
            features = find_features(prepared, batch, likelihood)
        return Task(plan, prepared.model, prepared, readings, batch, likelihood, features)


def _chosen_layers(model: nn.Module, batch: Batch, plan: TaskPlan) -> Selection:
    """All layers of a perceptron and of a regression. Of another classifier the last, since predictions over all cost
    far more there and are no better (docs/defaults.md), and of values at positions, of which there are many.
    """
    from posthoc_uq.fitting.leave_one_out import is_perceptron

    likelihood, targets = plan.likelihood, batch.targets
    dear = likelihood.logits or (targets is not None and likelihood.layout_of_targets(targets) is not None)
    return "last" if dear and not is_perceptron(model, batch, plan.seed) else "all"


def _choice(model: nn.Module, batch: Batch, output: Output | None) -> OutputChoice | None:
    """Which part of what the model returns its outputs are, by a run on the first samples where nobody named it.

    Raises:
        PosthocUQError: no part can be the outputs, or several can.
    """
    if chosen_in(model) is not None:
        return chosen_in(model)
    if output is not None:
        return OutputChoice.of_part(output)

    def run(part: Batch) -> Any:
        with torch.no_grad():
            return part.copied().call_any(replicate(model))

    part, returned = on_few_samples(run, batch, PROBE_SAMPLES)
    return guessed_choice(returned, count_samples(part))


def _heads(
    model: nn.Module, batch: Batch, likelihood: Joint, output: Output | None
) -> tuple[OutputChoice, Likelihood]:
    """Where the outputs of several heads are in what the model returns, and their likelihood, which knows their shapes.

    Raises:
        PosthocUQError: a head is not there, or does not fit.
    """
    choice = OutputChoice.of_part(output, heads=[*likelihood.head_likelihoods])

    def run(part: Batch) -> dict[str, Tensor]:
        twin = replicate(model)
        for parameter in twin.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        with torch.enable_grad():
            return choice.by_head(part.copied().call_any(twin))

    part, outputs = on_few_samples(run, batch, PROBE_SAMPLES)
    return choice, likelihood.of_outputs(outputs, part.targets)


def _of_shapes(model: nn.Module, batch: Batch, likelihood: Likelihood) -> Likelihood:
    """A likelihood of classes with these in the dimension in which labels of several positions fit the outputs."""
    if type(likelihood) is not Categorical or batch.targets is None or batch.targets.ndim < 2:
        return likelihood

    def run(part: Batch) -> Tensor:
        with torch.no_grad():
            return part.copied().call(replicate(model))

    part, outputs = on_few_samples(run, batch, PROBE_SAMPLES)
    return likelihood if part.targets is None else likelihood.of_shapes(outputs, part.targets)


def _sweep(plan: FitPlan, task: Task) -> tuple[Posterior, KeptInputs | None, float | None]:
    """The posterior by the method's passes over the data, with the statistics of the last layer's inputs and the record
    of how it was fitted; its hyperparameters are those at the start. And training inputs where a faithful prior is
    to be found, with how much less sure than right a network is of its classes there, if that is to count.
    """
    method, weight_prior = plan.method, None
    if plan.weight_precisions is not None or plan.weight_mean is not None:
        from posthoc_uq.posteriors.weight_prior import weight_prior_of

        parameters = dict(task.model.named_parameters())
        with on_all_ranks("checking the prior"):
            weight_prior = weight_prior_of(task.layers, parameters, plan.weight_precisions, plan.weight_mean)
    task.for_evidence = plan.divergence is None
    if plan.checkpoint is not None or world() > 1:
        _open_checkpoint(plan, task)
    kept_inputs = gap = None
    if plan.divergence is not None:
        kept_inputs = KeptInputs(plan.memory_budget, task.likelihood, inputs_to_keep(task.layers.values()))
        task.observers.append(kept_inputs)
        # held-out labels choose the temperature themselves
        if task.likelihood.logits and not method.trains and plan.val_loader is None:
            gap = ConfidenceGap(task.likelihood)
            task.observers.append(gap)
    if task.likelihood.scale_from_data:
        _set_target_scale(task)
    noise_origin = _set_observation_noise(task) if plan.finds_noise else "given"
    if method.trains:
        posterior = method.fit(task)
        posterior = with_trained_features(task, posterior, replicate(task.model, posterior.trained_mean))
    else:
        grams = watch_features(task)
        posterior = with_features(task, grams, method.fit(task))
    if weight_prior is not None:
        posterior = posterior.replaced(weight_prior=weight_prior)
    check_numbers(posterior)
    task.observe()
    posterior = _recorded(posterior, plan, task, noise_origin)
    del task.prepared  # its copy of the model and its hooks
    return posterior, kept_inputs, gap and gap.of_all()


def _open_checkpoint(plan: FitPlan, task: Task) -> None:
    """Check that all processes do the same fit, and read the checkpoint of an interrupted one."""
    file, held_out = plan.checkpoint, plan.val_loader
    compared: Any = held_out is not None
    if held_out is not None and plan.method.trains:  # it chooses the epoch
        compared = data_identity(held_out, replace(plan.reader, batch_to_weights=None), plan.seed)
    arguments = plan.arguments(task.likelihood) | {"held-out data": compared}
    identity = fit_identity(arguments, plan.method, task.model, task.layers)
    check_common(identity | {"checkpoint": "none" if file is None else "given"})
    if file is None:
        return
    data = identified(data_identity(task.loader, plan.reader, plan.seed, task.batch))
    with on_all_ranks("opening the checkpoint"):
        task.checkpoint = Checkpoint(file, plan.method.checkpoint_every, identity | data)


def _set_target_scale(task: Task) -> None:
    """Set the mean and the standard deviation of the training targets by a pass over the loader, without the model.

    Raises:
        PosthocUQError: there are no targets, or all of one output are the same.
    """
    likelihood = cast(Gaussian, task.likelihood)
    found, _ = task.part("targets", lambda: _scale_of_targets(task))
    what = "its mean and deviation of the targets are of another kind"
    with nullcontext() if task.checkpoint is None else task.checkpoint.reading(what):
        mean, std = (as_double(found["targets"][name]).cpu() for name in ("mean", "std"))
        if mean.ndim != 1 or mean.shape != std.shape:
            raise ValueError(f"of the shapes {tuple(mean.shape)} and {tuple(std.shape)}")
    if bool((std < 1 / LARGEST).any()):
        output = int((std < 1 / LARGEST).nonzero()[0])
        raise PosthocUQError(
            f"All training targets of output {output} are the same, so that std='data' is 0; give std=... yourself."
        )
    task.likelihood = likelihood.with_scale(mean, std)


def _scale_of_targets(task: Task) -> tuple[Tensors, State]:
    """The mean and the standard deviation of the targets of all processes, as the state of a part of the fit."""
    plan = task.plan
    with on_all_ranks("the pass for the targets"), isolated_random_state(plan.seed):
        own = target_moments(task.likelihood, task.loader, plan.reader, plan.progress)
    parts: list[TargetMoments | None] = gather(own, "looking for targets")
    moments = None if None in parts else reduce(TargetMoments.joined, cast("list[TargetMoments]", parts))
    if moments is None or not bool((moments.weight > 0).all()):
        raise PosthocUQError(
            "mean='data' and std='data' need training targets of every output, and some have none; give numbers."
        )
    std = (moments.squares / moments.weight).sqrt()
    return {"targets": {"mean": moments.mean, "std": std}}, {}


def _set_observation_noise(task: Task) -> str:
    """Set the noise variance of each output, or channel, by a forward pass over the data, and return in words where it
    came from.
    Without targets it is taken as 1, with a warning.

    Raises:
        PosthocUQError: the targets do not fit the outputs, or the model fits them without any error.
        NonFiniteError: the residuals are not finite.
    """
    found, _ = task.part("noise", lambda: _mean_squared_residuals(task))
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
        # of outputs with positions one for each channel
        if variance.ndim != 1 or task.prepared.outputs % max(1, len(variance)):
            raise ValueError(f"of shape {tuple(variance.shape)}, for {task.prepared.outputs} outputs")
    if not bool(torch.isfinite(variance).all()):
        raise NonFiniteError(
            "The residuals of the training data are not finite; check the data and the model's weights."
        )
    if not bool((variance >= 1 / LARGEST).all()):
        raise PosthocUQError(
            "The model reproduces its training targets without error; give noise_variance=... yourself."
        )
    task.likelihood = task.likelihood.with_noise(variance)
    return "mean squared residual of the training data"


def _mean_squared_residuals(task: Task) -> tuple[Tensors, State]:
    """Of each output, over the data of all processes, as the state of a part of the fit; empty without targets."""
    plan, sums = task.plan, None
    with on_all_ranks("the sweep for the noise variance"), isolated_random_state(plan.seed):
        if task.batch.targets is not None:  # else known without a reading, which a stream would not give back
            likelihood = cast("Gaussian | Joint", task.likelihood)
            sums = sums_of_residuals(
                likelihood, task.prepared.capture, task.loader, plan.reader, plan.progress
            )
    if not all(gather(sums is not None, "looking for targets")):
        return {}, {}
    assert sums is not None
    all_reduce_sum(sums, "the sums for the noise variance")
    count = sums["count"]
    if not float(count.sum()):
        raise no_weight_error()
    if bool((count == 0).any()):
        output = int((count == 0).nonzero()[0])
        raise PosthocUQError(
            f"All targets of output {output} are missing, so that nothing is known of its noise; pass "
            f"uq.Gaussian(noise_variance=..., missing='ignore'), or a model without this output."
        )
    variance, shift = sums["squares"] / count, sums["residuals"] / count
    effective = count.square() / sums["squared weights"]  # the number of targets, if all weigh the same
    shifted = (effective >= _ENOUGH_TARGETS) & (shift.square() > _SHIFTED * variance)
    if isinstance(task.likelihood, Gaussian) and bool(shifted.any()):
        output = int(shifted.nonzero()[0])
        spread = float((variance - shift.square())[output].clamp(min=0).sqrt())
        warn_user(
            f"Output {output} of the network lies {abs(float(shift[output])):.3g} "
            f"{'below' if shift[output] < 0 else 'above'} its targets on the mean, and the residuals vary by "
            f"{spread:.3g}. If the network was trained on standardised targets, pass likelihood=uq.Gaussian(mean=..., "
            f"std=...) with the numbers of that scaler."
        )
    return {"noise": {"variance": variance}}, {}


def _recorded(posterior: Posterior, plan: FitPlan, task: Task, noise_origin: str) -> Posterior:
    """The posterior with a record of how it was fitted."""
    history, mean = posterior.history, plan.weight_mean
    facts, tuning = dict(history.fit), dict(history.tuning)
    frozen, covered = _frozen(task.model, posterior.layers)
    if frozen:
        facts["frozen"] = f"{frozen:,} of {covered:,} weights with a posterior (requires_grad=False)"
    for option in fields(plan.method):
        value = getattr(plan.method, option.name)
        if isinstance(value, (bool, int, float, str)) and value != option.default:
            facts.setdefault(option.name.replace("_", " "), value)
    if plan.chooses_method and plan.method.name != _USUAL:
        facts["method chosen"] = (
            f"'{plan.method.name}', for {covered:,} weights and {posterior.evidence.samples:,} samples of a regression"
        )
    if plan.chooses_layers and (price := _price_of_layers(plan, task)):
        facts["layers chosen"] = price
    if plan.weight_precisions is not None:
        facts["prior of each weight"] = "given, times the prior precision"
    if mean is not None:
        facts["prior mean"] = float(mean) if isinstance(mean, (int, float)) else "given"
    if posterior.likelihood.noise_variance is not None or plan.finds_noise:
        tuning.setdefault("noise variance", noise_origin)
    choice = chosen_in(task.model)
    history = replace(
        history,
        fit=facts,
        tuning=tuning,
        head=HeadRecord(name=plan.head, options={}, criterion="given"),
        output=choice,
        inputs=described_inputs(task.batch, plan.reader.names),
    )
    return posterior.replaced(history=history)


def _choose(
    posterior: Posterior, plan: FitPlan, task: Task, kept_inputs: KeptInputs | None, gap: float | None
) -> Posterior:
    """The posterior with its hyperparameters: by leave-one-out where nobody has to ask for it, the prior precision that
    was asked for or follows from that, and by held-out data where there are any.
    """
    if plan.val_loader is None or plan.finds_noise:  # `calibrate` keeps the width of a regression
        left_out = _by_leave_one_out(posterior, plan, task) if _leaves_out_unasked(plan, task) else None
        if left_out is None and plan.finds_noise and plan.val_loader is None:
            _warn_if_memorised(posterior)
        posterior = left_out or posterior
    posterior = with_prior(
        posterior,
        plan.prior,
        plan.divergence,
        task,
        kept_inputs,
        gap,
        tuned_after=plan.val_loader is not None,
    )
    if plan.val_loader is not None and not plan.method.trains:
        from posthoc_uq.fitting.calibrate import calibrated

        reader = replace(plan.reader, batch_to_weights=None)
        posterior = calibrated(
            posterior, plan.val_loader, reader, seed=plan.seed, progress=plan.progress, options={}
        )
    head = posterior.history.head
    assert head is not None  # as `_recorded` made it
    # a faithful prior was found by predictions, which factorised the precision
    check_settings(posterior, factorised=head.criterion != "faithful")
    return posterior


def _by_leave_one_out(posterior: Posterior, plan: FitPlan, task: Task) -> Posterior | None:
    """The posterior with the temperature, or the noise of a regression, by leave-one-out; None where data or likelihood
    are such that it is not for them. See docs/defaults.md.
    """
    if posterior.evidence.log_likelihood is None:
        return None
    from posthoc_uq.fitting.leave_one_out import set_by_leave_one_out

    try:
        return set_by_leave_one_out(
            posterior, task.loader, plan.reader, seed=plan.seed, progress=plan.progress
        )
    except PosthocUQError:  # data or likelihood that it is not for
        return None


def _leaves_out_unasked(plan: FitPlan, task: Task) -> bool:
    """Whether nothing was chosen that leave-one-out would find, and the network is one that it is for."""
    default = (
        (plan.by_name or plan.finds_noise) and plan.prior == "faithful" and plan.divergence == DIVERGENCE
    )
    default = default and plan.weight_precisions is None and plan.reader.batch_to_weights is None
    given = plan.likelihood.noise_variance is not None and not plan.finds_noise
    given = given or bool(plan.likelihood.head_likelihoods)  # it is of one head
    once = isinstance(plan.loader, Iterator)
    if plan.method.trains or not default or given or once or world() > 1:
        return False
    from posthoc_uq.fitting.leave_one_out import is_perceptron

    return is_perceptron(task.model, task.batch, plan.seed)


def _warn_if_memorised(posterior: Posterior) -> None:
    """Warn where the network has more than half as many effective parameters as training targets, so that the mean
    squared residual of the training data underestimates the noise.

    The effective number of parameters is ``sum_i (1 - tau r_i Sigma_ii)`` (MacKay 1992) at the precision of the
    weights, ``tau = 1 / mean(r w^2)``: how many directions the data settle. Residuals near zero make the noise small
    and the data strong, so that it grows with memorising, too.
    """
    targets = posterior.evidence.total_targets
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


def _with_fingerprints(posterior: Posterior, plan: FitPlan) -> Posterior:
    """The posterior with the numbers by which the model that it belongs to is recognised."""
    return posterior.replaced(
        fingerprint=fingerprint(posterior.original),
        buffers_fingerprint=buffers_fingerprint(plan.model),
        others_fingerprint=others_fingerprint(parameters_of(plan.model), posterior.original),
    )


_SHOWN_SHARE = 0.05  # of a fit's time, from which a part is named


def _tell_seconds(posterior: Posterior, total: float) -> None:
    """One line above the bars: where the time of a fit went."""
    from posthoc_uq.posteriors.report import timings

    parts = timings(posterior.history.fit)
    large = {name: seconds for name, seconds in parts.items() if seconds >= _SHOWN_SHARE * total}
    large["other"] = total - sum(large.values())
    told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in large.items())
    print_above(f"fitted in {total:.1f} s: {told}", sys.stderr)
