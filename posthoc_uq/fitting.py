"""`fit`: a trained model and its data in, a posterior over the weights out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.curvature.dryrun import Prepared, prepare
from posthoc_uq.curvature.features import FeatureSource, find_features
from posthoc_uq.curvature.selection import Selection
from posthoc_uq.curvature.sweep import SweepSettings
from posthoc_uq.distributed import is_divided, together, world
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.faithful import DIVERGENCE
from posthoc_uq.inference.agreement import warn_of_noise
from posthoc_uq.inference.checkpoint import Checkpoint
from posthoc_uq.inference.evidence import maximise_evidence
from posthoc_uq.inference.features import keep_features, trained_features, watch_features
from posthoc_uq.inference.function_space import fit_function_space, from_curvature
from posthoc_uq.inference.identity import batch_hash, identity
from posthoc_uq.inference.kept import KeptInputs, wanted_for
from posthoc_uq.inference.labels import FisherChoice, of_all, own_samples_of, resolve_fisher
from posthoc_uq.inference.laplace import FAMILIES, laplace
from posthoc_uq.inference.noise import find_noise
from posthoc_uq.inference.options import FunctionSpaceOptions, method_options
from posthoc_uq.inference.probabilities import PROBABILITIES, gives_probabilities
from posthoc_uq.inference.run import LaplaceOptions, Run, check_common
from posthoc_uq.likelihoods import Likelihood, resolve_likelihood
from posthoc_uq.loaders import Batch, BatchFunction, BatchReader, check_loader, check_reusable, no_sample
from posthoc_uq.memory import default_budget, return_freed_memory
from posthoc_uq.numbers import positive_number
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import model_device, replicate, statistics_dtype, unwrap
from posthoc_uq.storage.schema import fingerprint
from posthoc_uq.tuning import settle_faithful, tune
from posthoc_uq.wrapping import head_class, wrap


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    val_loader: Iterable[Any] | None = None,
    method: str = "inf",
    likelihood: str | Likelihood = "classification",
    layers: Selection = "all",
    fisher: FisherChoice = "auto",
    n_samples: int = 1,
    prior_precision: float | Tensor | str | None = None,
    divergence: float | None = DIVERGENCE,
    head: str | None = None,
    residual_weight: float = 1.0,
    noise_variance: Tensor | float | None = None,
    unsupported: str = "raise",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    progress: bool = True,
    **options: Any,
) -> Posterior:
    """Fit a Gaussian posterior over the weights of a trained model, around the trained weights or, with
    ``method="function_space"``, around weights trained on from them.

    The model is not changed, and neither is the global random state. The result of the curvature methods does not
    depend on the batch size or the order of the samples beyond rounding.

    In a process group of `torch.distributed` every process calls this with its own part of the data (a `DataLoader`
    with a `DistributedSampler`, whose padding is not counted; an iterable around one should have its ``sampler``), and
    all get the posterior of the whole. Training runs in one process only.

    Options of ``method="inf"``:

    * ``rank`` (100): eigenvalues kept of a layer, or their share in (0, 1).
    * ``basis`` (``"auto"``): how its bases are found: ``"exact"`` eigendecompositions, a streaming ``"sketch"``, or
      ``"auto"`` by size.
    * ``basis_fraction`` (1): the share of the samples, in (0, 1], that its bases are found from, picked by a hash of
      each input; eigenvalues and diagonal always come from all.
    * ``correction`` (``"rescale"``): or ``"clamp"``, ``"none"``.

    Options of ``method="function_space"`` (Rudner et al. 2022), whose formulas are in ``docs/methods.md``:

    * ``epochs`` (10): passes over the data; with 0 the posterior is that of the curvature named by ``initial``, for the
      linearised head.
    * ``context``: where the network is to be uncertain: ``"monochrome"`` images, a ``"uniform"`` box, the training
      ``"batch"``, a loader or a tensor of unlabelled inputs, a callable ``(n, generator)``, a list of pairs ``(share,
      context)``, or one of `posthoc_uq.contexts`. Default: half batch, half monochrome for images, the box for vectors.
    * ``n_context`` (32, or the last layer's dimensions where these are fewer): context points a step. ``n_sets`` (1):
      sets of them; the one that differs most counts.
    * ``n_draws`` (1): draws of the weights a step.
    * ``train_mean`` (True): False moves the variances only, and predictions at the mean stay what they were to the bit.
    * ``initial`` (``"constant"``): starting variances: constant, by ``"diag"``, ``"kfac"``, ``"efb"`` or ``"inf"`` at
      the prior precision of the evidence, or those of a fitted posterior. ``initial_log_variance`` (-5) and
      ``initial_body_log_variance`` (-20): of the last layer and all others.
    * ``prior_mean`` (``"zero"``): of the functions; or ``"pretrained"``, ``"random_init"``.
      ``prior_body_variance`` (0): prior variance of all weights but the last layer's. ``function_noise`` (1e-6): a
      variance of function values, as a share of the prior's.
    * ``body`` (``"linearized"``): how a draw of all layers but the last enters the divergence; ``"sample"`` runs the
      network with it.
    * ``learn_noise`` (False): train the noise variance of a regression, from its value at the start.
    * ``lr`` (1e-4) and ``log_variance_lr`` (1e-3): of the means and the log variances; ``optimizer``: a callable from
      parameter groups to a torch optimiser, Adam by default; ``schedule``: a callable from progress in [0, 1) to a
      factor on the rates, a cosine down to 0.05 by default; ``clip`` (1): largest size of a gradient's entries.
    * ``patience``: epochs without a better validation NLL after which to stop. ``val_draws`` (10): draws for that NLL.

    Args:
        model: trained; run in eval mode on a copy that shares its weights.
        loader: batches ``(inputs, targets)``, inputs alone, or mappings; read once or twice by method, or every epoch.
        val_loader: held-out batches; the fit then ends with `tune(posterior, val_loader)`, or a training with the
            weights of the epoch that predicts them best.
        method: ``"inf"`` (sparse information form), ``"efb"``, ``"kfac"``, ``"diag"``, ``"full"`` or
            ``"function_space"``.
        likelihood: ``"classification"``, ``"binary"``, ``"regression"`` or a `Likelihood`.
        layers: ``"all"``, ``"last"``, names, prefixes of names or shell patterns (``"*lora_*"``), or a predicate
            ``(name, module) -> bool``.
        fisher: labels ``"mc"`` drawn from the model's predictive, ``"exact"`` expectation over them,
            ``"empirical"`` targets, or ``"auto"`` (the default): exact where outputs and samples are few, else
            drawn, up to three a sample (`posthoc_uq.inference.labels.resolve_fisher`); the report says what was used.
        n_samples: labels drawn per sample with ``fisher="mc"``; more than 1 with ``"auto"`` draws as many.
        prior_precision: tau; ``"faithful"`` (the default) for the widest posterior that still says what the network
            says (see `divergence`); or ``"evidence"`` for the maximum of the log marginal likelihood. Of a training:
            the precision of the last layer's weights in the prior over functions, by default 1; its variances are then
            narrowed as far as a faithful posterior needs.
        divergence: how far a faithful posterior's predictions may be from the network's own, mean over a few hundred
            of the training inputs, in nats. None leaves the variances of a training as they are.
        head: through which the faithful prior is found and by which `wrap` predicts: ``"linearized"`` (the default),
            ``"sampling"`` (that of a training) or ``"moments"``.
        residual_weight: omega of ``"inf"``.
        noise_variance: for regression, in squared units of the targets, one number or one an output; by
            default the mean squared residual of the training data, which takes a forward pass over it.
        unsupported: ``"raise"`` an error for layers whose gradients cannot be caught, or ``"skip"`` them
            (they stay deterministic).
        seed: of all that is drawn; a seed makes a fit bit-identical on one device.
        dtype: of the statistics: float32 (default) or float64.
        memory_budget: bytes that one temporary of the statistics may take; by default a share of what is free, at
            most 256 MiB.
        checkpoint: a file for the sums or the training so far, from which the same call goes on after an interruption,
            with the same result to the last bit on one device if the loader gives the same batches in the same order (a
            shuffling `DataLoader` without a generator of its own does). Deleted when the fit is done.
        checkpoint_every: batches between two writes of it.
        batch_to_inputs: takes a batch to the model's inputs: a tensor, a tuple of arguments or a dict of
            named ones.
        batch_to_targets: takes a batch to its targets.
        progress: show a bar per sweep, on rank 0.
        **options: of the method, see above; one that it does not take is an error that names those it does.

    Returns:
        The posterior; see its `report`.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        NonFiniteError: outputs, activations, gradients or a loss are not finite.
        PosthocUQError: options, data or model do not fit; the message says how to go on.
    """
    asked = dict(locals())  # all of the arguments, for the identity of a checkpoint

    def settle() -> tuple[LaplaceOptions, FunctionSpaceOptions | None, Likelihood]:
        """The options, once all of them have been checked that need no data."""
        sweeping, training = method_options(method, options)
        trains = training is not None and training.epochs > 0
        law = resolve_likelihood(likelihood, noise_variance)
        _check(fisher, n_samples, prior_precision, trains)
        _check_faithful(divergence, head, training is not None)
        if trains and residual_weight != 1.0:
            raise PosthocUQError("residual_weight belongs to method='inf'; a training does not take it.")
        if training is not None and not training.needs_curvature and (fisher, n_samples) != ("auto", 1):
            raise PosthocUQError(
                "fisher and n_samples are about the curvature of the data, which this training has none of; leave them "
                "out, or begin with a curvature's variances: initial='inf'."
            )
        if prior_precision == "faithful" and not law.has_divergence:
            raise PosthocUQError(
                f"Likelihood {law.name!r} has no prediction that could be faithful to the network's; give "
                f"prior_precision a number or 'evidence'."
            )
        check_loader(loader)
        if val_loader is not None:
            check_loader(val_loader, "val_loader")
        device = model_device(unwrap(model))
        budget = default_budget(device) if memory_budget is None else _checked_budget(memory_budget)
        _check_every(checkpoint_every)
        finds_noise = _finds_noise(law, likelihood, noise_variance)
        check_reusable(loader, _reads(method, training) + finds_noise)
        if val_loader is not None and is_divided(val_loader):
            raise PosthocUQError(
                "Every process tunes by itself: give all of them the whole val_loader, not a part of it."
            )
        return replace(sweeping, memory_budget=budget), training, law

    sweeping, training, law = together(settle, "checking the options")
    trains = training is not None and training.epochs > 0
    if prior_precision is not None and not isinstance(prior_precision, str):
        prior_precision = asked["prior_precision"] = float(prior_precision)
    finds_noise = _finds_noise(law, likelihood, noise_variance)
    model = unwrap(model)
    device, budget = model_device(model), sweeping.memory_budget
    reader = BatchReader(device, batch_to_inputs, batch_to_targets)
    data, statistics = loader, together(lambda: statistics_dtype(model, dtype), "checking dtype")

    def begin() -> tuple[Iterable[Any], Batch, Prepared, FeatureSource | None, int | None, bool]:
        with isolated_random_state(seed):
            first, whole = _peek(data, reader)
            batch = first.copied()  # the dry run runs it several times
            samples = own_samples_of(whole, reader, batch) if fisher == "auto" else None
            autocast = torch.is_autocast_enabled(device.type)
            with explained(lambda: replicate(model), batch, "the first batch of the loader", LOADER):
                prepared = prepare(model, batch, layers, unsupported=unsupported, autocast=autocast)
            features = find_features(model, batch, autocast)
            return whole, batch, prepared, features, samples, gives_probabilities(model, batch, law)

    loader, batch, prepared, features, samples, probabilities = together(begin, "the dry run")
    if prepared.warning is not None:
        warnings.warn(prepared.warning, UserWarning, stacklevel=2)
    if probabilities:
        warnings.warn(PROBABILITIES, UserWarning, stacklevel=2)
    kind, labels = resolve_fisher(fisher, n_samples, prepared.outputs, of_all(samples), law)
    settings = SweepSettings(reader, law, kind, labels, seed, statistics, progress)
    run = Run(prepared, loader, settings, sweeping, device)
    faithful = law.has_divergence and (trains or prior_precision in (None, "faithful"))
    faithful = faithful and divergence is not None
    kept = KeptInputs(budget, wanted_for(run.layers.values()))
    run.observers += [kept] if faithful else []
    if checkpoint is not None or world() > 1:
        own = identity(asked, run, model, training)
        check_common(own | {"checkpoint": "none" if checkpoint is None else "given"})
        own["first batch"] = batch_hash(batch)
        if checkpoint is not None:
            file, every = checkpoint, int(checkpoint_every)
            run.checkpoint = together(
                lambda: Checkpoint(file, every, own, budget, model, run.layers, statistics),
                "opening the checkpoint",
            )
            run.options = replace(sweeping, memory_budget=run.checkpoint.budget)
    noise_source = find_noise(run) if finds_noise else "given"
    grams = None if trains else watch_features(run, features)
    if training is not None and trains:
        precision = prior_precision if isinstance(prior_precision, (int, float)) else None
        posterior = fit_function_space(run, model, training, batch, precision, val_loader)
        trained_features(run, features, posterior, replicate(model, posterior.centre))
    elif training is not None:
        posterior = from_curvature(cast(str, training.initial), run, model)
    else:
        posterior = laplace(method, run, model)
    if not trains:
        keep_features(run, grams, posterior)
    run.observe()
    del prepared, run.prepared, grams
    if fisher == "auto" and "fisher" in posterior.record.fit:
        posterior.record.fit["fisher chosen"] = "auto"
    if law.noise_variance is not None:
        posterior.record.tuning.setdefault("noise variance", noise_source)
    posterior.record.head = {"name": head or ("sampling" if trains else "linearized"), "options": {}}
    if not trains:
        posterior.residual_weight = residual_weight
    if faithful:
        inputs = kept.batches(device)
        posterior.record.head["criterion"] = "faithful"
        settle_faithful(posterior, inputs, wrap(model, posterior), cast(float, divergence), seed=seed)
    else:
        _settle_prior(posterior, None if trains else prior_precision)
        if posterior.record.head["criterion"] == "evidence" and val_loader is None:
            warn_of_noise(posterior, batch, seed)
    if val_loader is not None and not trains:
        tune(
            posterior,
            val_loader,
            seed=seed,
            batch_to_inputs=batch_to_inputs,
            batch_to_targets=batch_to_targets,
            progress=progress,
        )
    if run.checkpoint is not None:
        run.checkpoint.remove()
    return_freed_memory()
    posterior.fingerprint = fingerprint(posterior.original)
    return posterior


def _finds_noise(
    law: Likelihood, likelihood: str | Likelihood, noise_variance: Tensor | float | None
) -> bool:
    """Whether the noise of a regression is to be found from the data."""
    return law.noise_variance is not None and isinstance(likelihood, str) and noise_variance is None


def _reads(method: str, training: FunctionSpaceOptions | None) -> int:
    """How often a fit reads the loader, beside the noise."""
    if training is None:
        return FAMILIES[method][1]
    initial = training.initial
    first = FAMILIES[initial][1] if isinstance(initial, str) and initial in FAMILIES else 0
    # once for the context, once for what enters the last layer
    return first + training.epochs + 2 * (training.epochs > 0)


def _settle_prior(posterior: Posterior, prior_precision: float | str | None) -> None:
    """A prior precision that is given, or that of the evidence where nothing can be said about faithfulness."""
    given = not posterior.takes_prior or isinstance(prior_precision, (int, float))
    posterior.record.head["criterion"] = "given" if given else "evidence"
    if not given:
        maximise_evidence(posterior)
    elif posterior.takes_prior:
        posterior.prior_precision = cast(float, prior_precision)
        posterior.record.tuning["prior precision"] = "given"


def _check_faithful(divergence: float | None, head: str | None, optimised: bool) -> None:
    if divergence is None and not optimised:
        raise PosthocUQError(
            "divergence=None leaves the variances that method='function_space' found as they are, and this method "
            "has a prior precision instead: choose prior_precision='evidence' or a number."
        )
    if divergence is not None and (isinstance(divergence, bool) or not 0 < divergence < float("inf")):
        raise PosthocUQError(f"divergence is a budget in nats, positive and finite; not {divergence!r}.")
    if head is not None:
        head_class(head)


def _checked_budget(budget: int) -> int:
    if budget < 2**20:
        raise PosthocUQError(f"memory_budget must be at least {2**20} bytes, not {budget}.")
    return int(budget)


def _check_every(every: int) -> None:
    if isinstance(every, bool) or every < 1:
        raise PosthocUQError(f"checkpoint_every is a number of batches, at least 1; not {every!r}.")


def _check(fisher: str, n_samples: int, prior_precision: Any, trains: bool) -> None:
    if torch.is_inference_mode_enabled():
        raise PosthocUQError(
            "A fit needs gradients, which torch.inference_mode() does not allow; call fit outside of it."
        )
    if fisher not in get_args(FisherChoice):
        raise PosthocUQError(f"fisher must be one of {get_args(FisherChoice)}, not {fisher!r}.")
    if n_samples < 1 or (n_samples > 1 and fisher not in ("auto", "mc")):
        raise PosthocUQError(
            f"n_samples is the number of labels drawn with fisher='mc', at least 1; not {n_samples} with "
            f"{fisher!r}."
        )
    if prior_precision is None:
        return
    if isinstance(prior_precision, str) and prior_precision not in ("evidence", "faithful"):
        raise PosthocUQError(
            f"prior_precision must be a positive number, 'faithful' or 'evidence', not {prior_precision!r}."
        )
    if trains and prior_precision == "evidence":
        raise PosthocUQError(
            "A training has no log marginal likelihood to find the prior precision by; give prior_precision a number."
        )
    if isinstance(prior_precision, Mapping):
        raise PosthocUQError(
            "prior_precision of a fit is one number for all layers, not a mapping. For one a layer, fit with "
            "prior_precision=1.0 and then set posterior.prior_precision = {layer: number, ...}, which takes no new fit."
        )
    if not isinstance(prior_precision, str):
        positive_number("prior_precision", prior_precision)


def _peek(loader: Iterable[Any], reader: BatchReader) -> tuple[Batch, Iterable[Any]]:
    """The first batch that holds a sample, and a loader that still yields all batches."""
    iterator = iter(loader)
    for first in iterator:
        batch = reader.read(first)
        if not batch.empty:
            return batch, (cast(Iterable[Any], chain([first], iterator)) if iterator is loader else loader)
    raise no_sample()
