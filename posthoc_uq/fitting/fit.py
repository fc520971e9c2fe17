"""`fit`: checks the arguments, runs the dry run and the method, and sets the prior precision."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core import interrupts
from posthoc_uq.core.batches import (
    DECODER_INPUTS,
    LOADER,
    Batch,
    BatchFunction,
    BatchReader,
    check_loader,
    check_reusable,
    explained,
    items_of,
    lacks_decoder_inputs,
    no_sample,
)
from posthoc_uq.core.devices import as_double, default_budget, return_freed_memory
from posthoc_uq.core.distributed import add_up, gather, is_divided, together, world
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, check_refused, out_of_memory, warn_user
from posthoc_uq.core.interrupts import orderly
from posthoc_uq.core.model import check_differentiable, check_not_meta, replicate, statistics_dtype, unwrap
from posthoc_uq.core.options import POSITIVE, SEED
from posthoc_uq.core.outputs import Choice, Output, checked_output, chosen_in, guessed_choice, with_choice
from posthoc_uq.core.progress import Progress, counted
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.curvature.features import find_features
from posthoc_uq.curvature.kept_inputs import KeptInputs, inputs_to_keep
from posthoc_uq.curvature.sweep import WORD, Content, SweepSettings, batch_hash, no_weight, squared_residuals
from posthoc_uq.files.saving import check_numbers
from posthoc_uq.files.schema import buffers_fingerprint, fingerprint
from posthoc_uq.fitting.prior import Faithful
from posthoc_uq.fitting.resume import fit_identity
from posthoc_uq.fitting.tune import has_something_to_tune, nothing_to_tune, settle_faithful, tune
from posthoc_uq.fitting.wrap import head_class, wrap
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.layers.proof import PROBE_SAMPLES, Selection, check_selection, count_samples, prepare
from posthoc_uq.likelihoods import Likelihood, resolve_likelihood
from posthoc_uq.likelihoods.counts import LogMean
from posthoc_uq.likelihoods.prediction import at_least_float32, check_rows
from posthoc_uq.likelihoods.weights import layout_of
from posthoc_uq.methods import METHODS, Method, method_of
from posthoc_uq.methods.features import keep_features, trained_features, watch_features
from posthoc_uq.methods.resume import Checkpoint, Tensors, as_plain
from posthoc_uq.methods.task import Task, check_common
from posthoc_uq.posteriors.block import BLOCKS, VARIANCES
from posthoc_uq.posteriors.evidence import maximise_evidence
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import WeightPrior, checked_prior

# The arguments of a call of `fit`, checked before any work is done.

EVIDENCE = "evidence"


@dataclass(frozen=True)
class OwnPrior:
    """The prior of single weights that was asked for, still unchecked.

    Attributes:
        precision: by the name of a parameter, or None.
        mean: a number, by the name of a parameter, or None.
    """

    precision: Mapping[str, Any] | None = None
    mean: Any = None

    def described(self) -> dict[str, Any]:
        """Lines of the report."""
        lines = {} if self.precision is None else {"prior of each weight": "given, times the prior precision"}
        number = isinstance(self.mean, (int, float))
        return lines | ({} if self.mean is None else {"prior mean": float(self.mean) if number else "given"})


@dataclass(frozen=True)
class Request:
    """Method, likelihood and prior of a fit.

    Attributes:
        method: with its options.
        likelihood: with its noise variance, if known.
        finds_noise: whether the noise variance of a regression comes from the data.
        prior: a prior precision, ``"evidence"``, or how the faithful one is found; for a training always the last.
        head: the head by which a faithful prior is found and predictions are made.
        seed: of all random numbers.
        reader: of the batches.
        output: which part of what the model returns its outputs are, if the user said so.
        own_prior: of single weights.
        by_name: whether the likelihood was given by its name, so that its parameters are its defaults.
    """

    method: Method
    likelihood: Likelihood
    finds_noise: bool
    prior: float | str | Faithful
    head: str
    seed: int
    reader: BatchReader
    output: Output | None = None
    own_prior: OwnPrior = OwnPrior()
    by_name: bool = False

    @property
    def faithful(self) -> float | None:
        """The budget of the faithful prior in nats; None where no faithful prior is to be found."""
        prior = self.prior
        return prior.divergence if isinstance(prior, Faithful) and self.likelihood.has_divergence else None

    def identity(self) -> dict[str, Any]:
        """Plain values that must be the same for one fit to go on where another stopped."""
        noise = "found from the data" if self.finds_noise else "given"
        shared = {"likelihood": as_plain(self.likelihood), "noise": noise, "head": self.head}
        faithful = self.prior.divergence if isinstance(self.prior, Faithful) else None
        prior: Any = "faithful" if isinstance(self.prior, Faithful) else self.prior
        if self.own_prior.precision is not None:
            prior = as_plain(self.own_prior.precision)
        return (
            shared
            | {"seed": self.seed, "prior of the weights": prior, "divergence": faithful}
            | self.method.identity()
        )


def requested(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method,
    val_loader: Iterable[Any] | None,
    likelihood: str | Likelihood,
    layers: Selection | None,
    prior_precision: Any,
    head: str | None,
    options: Mapping[str, Any],
    **others: Any,
) -> Request:
    """The arguments of `fit`, after the checks that can be made before the model runs.

    Raises:
        PosthocUQError: a value is not valid, or two do not fit together; the message says how to go on.
    """
    own_names = [*(set(locals()) - {"others", "options"}), *others, "divergence", "noise_variance"]
    if torch.is_inference_mode_enabled():
        raise PosthocUQError(
            "A fit needs gradients, which torch.inference_mode() does not allow; call fit outside of it."
        )
    network = unwrap(model)
    check_not_meta(network)
    if layers is not None:
        check_selection(layers)
    seed = SEED("seed", others["seed"])
    method_options = dict(options)
    divergence = {name: method_options.pop(name) for name in ("divergence",) if name in method_options}
    noise_variance = method_options.pop("noise_variance", None)
    resolved = resolve_likelihood(likelihood, noise_variance)
    chosen, prior_mean = _chosen(method, method_options, layers, others["prior_mean"], own_names)
    own_prior = _own_prior(chosen, prior_precision, prior_mean)
    prior_precision = 1.0 if own_prior.precision is not None else prior_precision
    asked = bool(divergence) or (isinstance(prior_precision, str) and prior_precision == "faithful")
    faithful = Faithful(**divergence) if asked or chosen.narrowed else Faithful(None)
    if asked and faithful.divergence is not None and chosen.trains and "scale" not in chosen.tunable:
        raise PosthocUQError(
            f"method={chosen.name!r} keeps the variances of its training, which cannot be narrowed until predictions "
            f"are faithful; leave {'divergence' if divergence else 'prior_precision'} out of the fit."
        )
    if chosen.trains:
        chosen, prior = _of_training(chosen, prior_precision, faithful)
    else:
        of_method = getattr(chosen, "prior_precision", None)
        prior = _checked_prior(of_method if prior_precision is None else prior_precision, faithful)
    if prior_precision == "faithful" and not resolved.has_divergence:
        raise PosthocUQError(
            f"Likelihood {resolved.name!r} has no prediction that could be faithful to the network's; give "
            f"prior_precision a number or 'evidence'."
        )
    head_class(head or chosen.head)
    by_name = isinstance(likelihood, str)
    finds_noise = resolved.noise_variance is not None and by_name and noise_variance is None
    _check_loaders(loader, val_loader, chosen.passes() + finds_noise)
    reader = _reader(chosen, network, others)
    check_differentiable(network)
    output = checked_output(others["output"])
    head = head or chosen.head
    return Request(chosen, resolved, finds_noise, prior, head, seed, reader, output, own_prior, by_name)


def _reader(method: Method, network: nn.Module, others: Mapping[str, Any]) -> BatchReader:
    """What takes batches apart, for a method that may have no weights of samples."""
    functions = (others[name] for name in ("batch_to_inputs", "batch_to_targets", "batch_to_weights"))
    reader = BatchReader.of(network, *functions)
    if reader.batch_to_weights is not None:
        method.check_weights()
    return reader


def _check_loaders(loader: Iterable[Any], val_loader: Iterable[Any] | None, sweeps: int) -> None:
    check_loader(loader)
    check_reusable(loader, sweeps)
    if val_loader is not None:
        check_loader(val_loader, "val_loader")
        if is_divided(val_loader):
            raise PosthocUQError(
                "Every process tunes by itself: give all of them the whole val_loader, not a part of it."
            )


def takes_layers(method: str) -> bool:
    """Whether a method by this name has an option `layers`, which the fit's own stands for."""
    return _has_field(method, "layers")


def _has_field(method: str, name: str) -> bool:
    return any(field.name == name for field in fields(METHODS[method])) if method in METHODS else False


def _chosen(
    method: str | Method,
    options: dict[str, Any],
    layers: Selection | None,
    prior_mean: Any,
    own_names: list[str],
) -> tuple[Method, Any]:
    """The method, with those of the fit's own arguments that are its options, too; and the prior mean if it is not."""
    if isinstance(method, str):
        if takes_layers(method) and layers in ("last", "all"):
            options.setdefault("layers", layers)
        if prior_mean is not None and _has_field(method, "prior_mean"):
            return method_of(method, options | {"prior_mean": prior_mean}, own_names), None
    return method_of(method, options, own_names), prior_mean


def _own_prior(method: Method, precision: Any, mean: Any) -> OwnPrior:
    """The prior of single weights.

    Raises:
        PosthocUQError: posteriors of the method cannot have it.
    """
    kinds = [BLOCKS[kind] for kind in method.block_kinds if kind in BLOCKS]
    with_prior = all("prior_precision" in kind.tunable for kind in kinds) and not method.trains
    if mean is not None and not with_prior:
        raise PosthocUQError(
            f"prior_mean enters the log marginal likelihood of a Laplace posterior alone, and method={method.name!r} "
            f"has none; leave it out of the fit."
        )
    if not isinstance(precision, Mapping):
        return OwnPrior(None, mean)
    if not with_prior:
        raise PosthocUQError(
            f"method={method.name!r} takes one number as prior_precision, not one a weight; take method='diag', 'full' "
            f"or 'inf'."
        )
    if not all(kind.own_priors for kind in kinds) and not _by_layer(cast(Mapping[Any, Any], precision)):
        raise PosthocUQError(
            f"A prior precision of each weight is not diagonal in the Kronecker basis of method={method.name!r}; take "
            f"method='diag', 'full' or 'inf', or fit with one number and then set posterior.prior_precision = "
            f"{{layer: number, ...}}."
        )
    return OwnPrior(cast(Mapping[str, Any], precision), mean)


def _by_layer(precision: Mapping[Any, Any]) -> bool:
    """Whether a mapping gives plain numbers, as one by layer does; its names are looked at when layers are known."""
    return all(isinstance(value, (int, float)) for value in precision.values())


def _of_training(method: Method, prior_precision: Any, faithful: Faithful) -> tuple[Method, Faithful]:
    """A training method with the prior precision of the fit, and the budget to which its variances are narrowed."""
    if prior_precision == EVIDENCE:
        raise PosthocUQError(
            "A training has no log marginal likelihood to find the prior precision by; give prior_precision a number."
        )
    if isinstance(prior_precision, Faithful):
        return method, prior_precision
    if prior_precision is not None and prior_precision != "faithful":
        changed: dict[str, Any] = {"prior_precision": _checked_number(prior_precision)}
        if getattr(method, "prior_precision", 0.0) is not None:  # there is no such field, or it has a value
            raise PosthocUQError(
                f"prior_precision is given to the fit, and method={method.name!r} has one of its own or takes none; "
                f"leave it out of the fit."
            )
        method = replace(method, **changed)
    return method, faithful


def _checked_prior(prior_precision: Any, faithful: Faithful) -> float | str | Faithful:
    if isinstance(prior_precision, Faithful):
        prior = prior_precision
    elif prior_precision is None or prior_precision == "faithful":
        prior = faithful
    elif prior_precision == EVIDENCE:
        prior = EVIDENCE
    else:
        prior = _checked_number(prior_precision)
    if isinstance(prior, Faithful) and prior.divergence is None:
        raise PosthocUQError(
            "divergence=None leaves the variances that a training found as they are, and this method trains none; it "
            "has a prior precision instead: choose prior_precision='evidence' or a number."
        )
    return prior


def _checked_number(prior_precision: Any) -> float:
    if isinstance(prior_precision, str):
        raise PosthocUQError(
            f"prior_precision must be a positive number, 'faithful' or 'evidence', not {prior_precision!r}."
        )
    return POSITIVE("prior_precision", prior_precision)


# The dry run: from a model and a loader to a task whose layers are known.


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
        progress: whether sweeps show a bar.
        output: which part of what the model returns its outputs are; None to find it, or for that of a view.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        PosthocUQError: there is no sample, or the model cannot be run on the first ones.
    """
    device = reader.device
    autocast = torch.is_autocast_enabled(device.type)
    budget = default_budget(device) if method.memory_budget is None else method.memory_budget

    def dry_run() -> Task:
        with isolated_random_state(seed):
            first, all_batches = _first_batch(loader, reader)
            batch = first.copied()  # which is run several times
            with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
                view = with_choice(model, _choice(model, batch, output))
                prepared = prepare(
                    view,
                    batch,
                    method.selection(layers),
                    unsupported=method.unsupported,
                    autocast=autocast,
                    prove=method.proves_gradients,
                )
                features = find_features(prepared.model, batch, autocast, likelihood)
            pointwise = None if features is None or not features.pointwise else features.layer.name
            settings = SweepSettings(
                reader, likelihood, seed=seed, dtype=dtype, progress=progress, by_position=pointwise
            )
            return Task(prepared.model, prepared, all_batches, batch, settings, device, budget, features)

    return together(dry_run, "the dry run")


def _choice(model: nn.Module, batch: Batch, output: Output | None) -> Choice | None:
    """Which part of what the model returns its outputs are, by a run on the first samples where nobody says so.

    Raises:
        PosthocUQError: no part can be the outputs, or several can.
    """
    if chosen_in(model) is not None:
        return chosen_in(model)
    if output is not None:
        return Choice(output)
    samples = count_samples(batch)
    few = min(samples, PROBE_SAMPLES)

    def run(part: Batch) -> Any:
        with torch.no_grad():
            return part.copied().call_any(replicate(model))

    first = batch.narrow(0, few, samples)
    try:
        returned = run(first)
    except Exception as error:  # a model that takes whole batches only, or none: then that says more
        check_refused(error, lambda: run(first), lambda: run(batch))
        few, returned = samples, run(batch)
    return guessed_choice(returned, few)


def _first_batch(loader: Iterable[Any], reader: BatchReader) -> tuple[Batch, Iterable[Any]]:
    """The first batch with samples, and a loader that still yields all batches."""
    iterator = interrupts.at_once(iter, loader)
    for first in items_of(iterator):
        batch = reader.read(first)
        if not batch.empty:
            return batch, (chain([first], iterator) if iterator is loader else loader)
    raise no_sample()


# What a fit warns of after a look at the first batch: what would otherwise be another model, or another
# likelihood, than was meant.

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of such classes of transformers end
_SEQUENCES = "ForConditionalGeneration"  # and of those that turn one sequence into another
_ENOUGH = 20  # targets from which a dispersion can be told
_FACTOR = 1.5  # by which it must be off


def unshifted_labels(model: nn.Module, batch: Batch, likelihood: Likelihood) -> str | None:
    """What to warn of where the labels of a causal language model of transformers are its inputs, and the likelihood
    does not shift them; else None.

    Args:
        model: the user's, which is not run.
        batch: the first one.
        likelihood: of the fit.
    """
    targets = batch.targets
    layout = None if targets is None else layout_of(likelihood, targets)
    if targets is None or layout is None or layout.next_token or not _is_causal(model):
        return None
    counted = targets.long() != layout.ignore_index
    same = any(
        tensor.shape == targets.shape
        and not tensor.is_floating_point()
        and bool((tensor == targets.to(tensor.device))[counted.to(tensor.device)].all())
        for tensor in batch.tensors()
    )
    if not same or not bool(counted.any()):
        return None
    return (
        f"The labels are the inputs themselves, and {type(model).__name__} is a causal language model, whose outputs "
        f"predict the next token: pass likelihood=uq.Categorical(class_dim=-1, next_token=True), which shifts the "
        f"labels as the model's own loss does, or shift them yourself."
    )


def _is_causal(model: nn.Module) -> bool:
    """Whether a model is, or extends, a causal language model of transformers."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    names = [kind.__name__ for kind in type(model).__mro__]
    return any(name.endswith(_CAUSAL) for name in names) or getattr(config, "is_decoder", False) is True


def missing_decoder_inputs(model: nn.Module, batch: Batch) -> str | None:
    """What to warn of where a model of transformers with an encoder and a decoder is called without inputs of the
    decoder; else None. Some, such as BART, then take the encoder's inputs in their place without an error.

    Args:
        model: the user's, which is not run.
        batch: the first one.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if not lacks_decoder_inputs(model, batch) or not any(name.endswith(_SEQUENCES) for name in names):
        return None
    return (
        f"{type(model).__name__} is called without decoder_input_ids, so its decoder reads the encoder's inputs, and "
        f"not the labels: {DECODER_INPUTS}"
    )


def other_dispersion(model: nn.Module, batch: Batch, likelihood: Likelihood) -> str | None:
    """What to warn of where a likelihood was given by its name, and the targets vary by another dispersion, or shape,
    than the one that it then has; else None.

    Args:
        model: gives the outputs; it is run once.
        batch: the first one.
        likelihood: of the fit, with its default dispersion.
    """
    if not isinstance(likelihood, LogMean) or batch.targets is None or batch.targets.numel() < _ENOUGH:
        return None
    with torch.no_grad():
        outputs = batch.copied().call(model)
        likelihood.check(outputs, batch.targets)
        found = likelihood.by_moments(outputs, batch.targets)
    if found is None:
        return None
    name, assumed, estimate = found
    if max(assumed, estimate) <= _FACTOR * min(assumed, estimate):
        return None
    kind = f"uq.{type(likelihood).__name__}"
    return (
        f"likelihood={likelihood.name!r} stands for {kind}({name}={assumed:g}), and the residuals of the first batch "
        f"suggest {name}={estimate:.2g}; pass likelihood={kind}({name}=...)."
    )


# Whether the likelihood that a fit is given treats every sample by itself.


def check_log_prob(model: nn.Module, batch: Batch, likelihood: Likelihood) -> None:
    """Check the `log_prob` of a user's likelihood on the first batch, where it has targets, by one forward pass.

    Args:
        model: a copy of it is run.
        batch: inputs and targets.
        likelihood: of the fit; those of this package are not checked.

    Raises:
        PosthocUQError: outputs and targets do not fit, or a sample's log probability depends on other samples.
    """
    if batch.targets is None or type(likelihood).log_prob.__module__.startswith("posthoc_uq."):
        return
    with torch.no_grad():
        outputs = at_least_float32(batch.copied().call(replicate(model)))
    if not bool(torch.isfinite(outputs).all()):
        return  # the fit says where this comes from
    try:
        likelihood.check(outputs, batch.targets)
        check_rows(likelihood.log_prob, outputs, batch.targets, likelihood.name)
    except PosthocUQError as error:
        raise PosthocUQError(f"Batch 0: {error}") from None


# Whether a model gives probabilities where a likelihood takes logits.

PROBABILITIES_MEANT = (
    "The model's outputs are probabilities, and are taken as the logits of a softmax or sigmoid that comes after them, "
    "because the likelihood is given as an object. If the model was not trained like that, predictions will be wrong."
)
_SAMPLES = 16  # of the first batch
_TOLERANCE = 1e-4  # of a probability
_TRIALS = 2  # sets of other weights


def gives_probabilities(model: nn.Module, batch: Batch, likelihood: Likelihood) -> bool:
    """Whether a model's outputs are probabilities, although the likelihood takes logits.

    The outputs for some samples of a batch must look like probabilities (`Likelihood.seems_applied`), and still do with
    other weights. Logits may lie in [0, 1] and sum to 1 by how they were trained, but with other weights they do not;
    the outputs of a softmax or a sigmoid do with any.

    Args:
        model: copies of it are run.
        batch: the inputs.
        likelihood: of the fit.

    Raises:
        PosthocUQError: the model cannot be run on the batch.
    """
    if not likelihood.logits:
        return False
    samples = count_samples(batch)
    some = batch.narrow(0, min(samples, _SAMPLES), samples)
    try:
        outputs = _outputs(replicate(model), some)
    except Exception as error:  # a model that takes whole batches only; an error of its own comes again
        if out_of_memory(error):
            raise
        some = batch
        with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
            outputs = _outputs(replicate(model), some)
    return _look_applied(outputs, likelihood) and _stay_applied(model, some, likelihood)


def _stay_applied(model: nn.Module, batch: Batch, likelihood: Likelihood) -> bool:
    """Whether the outputs still look like probabilities with other weights: the model's own, each times a random
    positive number, whose mean square is 1 so that activations keep their size.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TRIALS):
        weights = {
            name: parameter.detach()
            * (torch.randn(parameter.shape, generator=generator, device="cpu") - 1).exp().to(parameter)
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        try:
            outputs = _outputs(replicate(model, weights), batch)
        except Exception as error:  # a model that checks its weights; nothing is known of it then
            if out_of_memory(error):
                raise
            return False
        if not _look_applied(outputs, likelihood):
            return False
    return True


def _outputs(network: nn.Module, batch: Batch) -> Tensor:
    """The outputs of a copy of the model, with their graph."""
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    with torch.enable_grad():
        return batch.copied().call(network)


def _look_applied(outputs: Tensor, likelihood: Likelihood) -> bool:
    values = outputs.detach().float()
    return bool(((values >= 0) & (values <= 1 + _TOLERANCE)).all()) and likelihood.seems_applied(outputs)


def refusal(likelihood: Likelihood) -> str:
    """The error of a model whose outputs are probabilities, for a likelihood that was given by its name."""
    return (
        f"The model's outputs are probabilities: it ends in a softmax or a sigmoid, and likelihood={likelihood.name!r} "
        f"takes logits, to which it applies one itself, so that predictions would be wrong. Pass the model without its "
        f"last softmax or sigmoid, for example model[:-1] of an nn.Sequential (log_softmax may stay); if it was "
        f"trained with these outputs as logits, say so with likelihood=uq.{type(likelihood).__name__}()."
    )


# Whether models drawn from a posterior still decide as the trained model does.


def warn_if_draws_differ(posterior: Posterior, batch: Batch, seed: int, *, progress: bool = False) -> None:
    """Warn where models drawn at the prior precision of the evidence no longer predict what the trained model does.

    Laplace's evidence relies on a linear approximation, which does not hold for weights drawn at its optimum where
    there are far more weights than data. With `progress` a bar is shown.
    """
    if not posterior.likelihood.defines("agrees"):
        return
    samples = count_samples(batch)
    # Fewer draws and inputs are less reliable, but draws of a large network take memory, and its passes time.
    large = sum(mean.numel() for mean in posterior.mean.values()) > 2_000_000
    draws, inputs = (5, 16) if large else (20, 64)
    few = batch.narrow(0, min(samples, inputs), samples)
    bar = Progress("drawn models", "models", progress, draws)
    with torch.no_grad(), bar, counted(draws, bar.advance):
        trained = few.call(replicate(cast(nn.Module, posterior.model)))
        drawn = SamplingPredictor(cast(nn.Module, posterior.model), posterior, draws, seed).outputs(
            *few.args, **few.kwargs
        )
    if not posterior.likelihood.agrees(trained, drawn):
        warn_user(
            "At the prior precision of the log marginal likelihood, models drawn from this posterior no longer predict "
            "what the trained one does: it has few data for its weights. Pass val_loader=..., restrict it with "
            "layers='last', leave prior_precision at its default ('faithful'), or predict with head='linearized'."
        )


# The observation noise of a regression: the (weighted) mean squared residual of the training data.

# Effective parameters per training target above which training residuals are not believed, where that is not a half: a
# diagonal takes what correlated weights have in common for several parameters.
_FREE = {"diag": 1.0}


def set_observation_noise(task: Task) -> str:
    """Set the noise variance of each output by a forward pass over the data, and return in words where it came from.
    Without targets it is taken as 1, with a warning.

    Raises:
        PosthocUQError: the targets do not fit the outputs, or the model fits them without any error.
        NonFiniteError: the residuals are not finite.
    """

    content = Content() if task.checkpoint is not None else None

    def sweep() -> tuple[Tensor, float] | None:
        with isolated_random_state(task.settings.seed):
            return squared_residuals(task.prepared.capture, task.loader, task.settings, content)

    def work() -> Tensors:
        residuals = together(sweep, "the sweep for the noise variance")
        if not all(gather(residuals is not None, "looking for targets")):
            return {}
        assert residuals is not None
        count = torch.tensor(residuals[1], dtype=torch.float64, device="cpu")
        add_up({"total": residuals[0], "count": count}, "the sum for the noise variance")
        if not float(count):
            raise no_weight()
        task.summary.content = (
            sum(gather(0 if content is None else content.total, "comparing the data")) % WORD
        )
        return {"noise": {"variance": residuals[0] / count}}

    stage = task.stage("noise", work)
    if not stage:
        warn_user(
            "The loader gives no targets, so the noise variance of this regression is taken as 1, in squared units of "
            "the targets. Give it with noise_variance=..., a number or one for each output, or fit on a loader of "
            "(inputs, targets), whose mean squared residual is taken."
        )
        return "1, since the loader gives no targets"
    variance = as_double(stage["noise"]["variance"]).cpu()
    if not bool(torch.isfinite(variance).all()):
        raise NonFiniteError(
            "The residuals of the training data are not finite; check the data and the model's weights."
        )
    if not bool((variance > 0).all()):
        raise PosthocUQError(
            "The model reproduces its training targets without error; give noise_variance=... yourself."
        )
    task.settings = replace(task.settings, likelihood=task.settings.likelihood.with_noise(variance))
    return "mean squared residual of the training data"


def warn_if_memorised(posterior: Posterior) -> None:
    """Warn where the network has more than half as many effective parameters as training targets, so that the mean
    squared residual of the training data says too little of the noise.

    The effective number of parameters is ``sum_i (1 - tau r_i Sigma_ii)`` (MacKay 1992) at the weights' own precision,
    ``tau = 1 / mean(r w^2)``: how many directions the data settle. Residuals near zero make the noise small and the
    data strong, so that it grows with memorising, too.
    """
    targets = posterior.evidence.targets * posterior.evidence.total / posterior.evidence.samples
    if not targets or not posterior.takes_prior or VARIANCES not in posterior.capabilities:
        return
    ratios = posterior.weight_prior.precision
    squares = [_times(as_double(w.detach()).square(), ratios.get(name)) for name, w in posterior.mean.items()]
    total = float(sum(square.sum().cpu() for square in squares))
    if total == 0:
        return
    precision = sum(square.numel() for square in squares) / total
    at_own = posterior.snapshot(replace(posterior.settings, prior_precision=precision))
    effective = 0.0
    for name, variance in at_own.variance().items():
        wide = as_double(variance)
        settled = (1 - precision * _times(wide, ratios.get(name))).clamp(min=0)
        effective += float(settled[wide > 0].sum())  # without variance: no part of the posterior
    if effective > _FREE.get(posterior.method, 0.5) * targets:
        warn_user(
            f"The network has about {min(effective, targets):,.0f} effective parameters for {targets:,.0f} training "
            f"targets, so that their residuals say too little of the noise and intervals will be too narrow: tune the "
            f"noise on held-out data, uq.tune(posterior, val_loader) or fit(..., val_loader=...), or give it, "
            f"likelihood=uq.Gaussian(noise_variance=...)."
        )


def _times(values: Tensor, factor: Tensor | None) -> Tensor:
    return values if factor is None else values * as_double(factor).to(values.device)


# `fit`: from a trained model and its data to a posterior over the weights.


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
        trained_features(task, task.features, posterior, replicate(task.model, posterior.trained_mean))
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
