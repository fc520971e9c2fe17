"""`fit`: a trained model and its data in, a posterior over the weights out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.dryrun import Prepared, Selection, count_samples, prepare
from posthoc_uq.curvature.sweep import SweepSettings
from posthoc_uq.distributed import is_divided, together, world
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.inference.checkpoint import Checkpoint
from posthoc_uq.inference.evidence import maximise_evidence
from posthoc_uq.inference.laplace import FAMILIES, laplace
from posthoc_uq.inference.noise import find_noise
from posthoc_uq.inference.run import LaplaceOptions, Run, check_common
from posthoc_uq.inference.sparsify import kept_entries
from posthoc_uq.likelihoods import Bernoulli, Categorical, Fisher, Gaussian, Likelihood, resolve_likelihood
from posthoc_uq.loaders import Batch, BatchFunction, BatchReader, check_loader, check_reusable
from posthoc_uq.memory import default_budget, return_freed_memory
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.information import CORRECTIONS, Correction
from posthoc_uq.randomness import isolated_random_state, sample_keys
from posthoc_uq.replica import model_device, replicate, statistics_dtype, unwrap
from posthoc_uq.storage.schema import fingerprint
from posthoc_uq.tuning import tune

# Options that only some methods take, with their defaults.
_OPTIONS: dict[str, dict[str, Any]] = {
    "inf": {"rank": 100, "basis": "auto", "basis_fraction": 1.0, "correction": "rescale"}
}
_AGREEMENT = 0.75  # share of the trained model's own decisions that drawn models should share
_BASES = ("auto", "exact", "sketch")


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    val_loader: Iterable[Any] | None = None,
    method: str = "inf",
    likelihood: str | Likelihood = "classification",
    layers: Selection = "all",
    rank: int | float | None = None,
    fisher: Fisher = "mc",
    n_samples: int = 1,
    basis: str | None = None,
    basis_fraction: float | None = None,
    correction: Correction | None = None,
    prior_precision: float | str = "evidence",
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
) -> Posterior:
    """Fit a Gaussian posterior over the weights of a trained model, around the trained weights.

    The model is not changed, and neither is the global random state. The result does not depend on the batch
    size or the order of the samples beyond rounding.

    In a process group of `torch.distributed` every process calls this with its own part of the data (a `DataLoader`
    with a `DistributedSampler`, whose padding is not counted; an iterable around one should have its ``sampler``), and
    all get the posterior of the whole.

    Args:
        model: trained; run in eval mode on a copy that shares its weights.
        loader: batches ``(inputs, targets)``, inputs alone, or mappings; read once or twice, by method.
        val_loader: held-out batches; the fit then ends with `tune(posterior, val_loader)`.
        method: ``"inf"`` (sparse information form), ``"efb"``, ``"kfac"``, ``"diag"`` or ``"full"``.
        likelihood: ``"classification"``, ``"binary"``, ``"regression"`` or a `Likelihood`.
        layers: ``"all"``, ``"last"``, names or prefixes of names, or a predicate ``(name, module) -> bool``.
        rank: eigenvalues that ``"inf"`` keeps of a layer, or their share in (0, 1); default 100.
        fisher: labels ``"mc"`` drawn from the model's predictive, ``"exact"`` expectation over them, or
            ``"empirical"`` targets.
        n_samples: labels drawn per sample with ``fisher="mc"``.
        basis: how ``"inf"`` finds its bases: ``"exact"`` eigendecompositions, a streaming ``"sketch"``, or
            ``"auto"`` by size.
        basis_fraction: of ``"inf"``: the share of the samples, in (0, 1], that its bases are found from, picked by a
            hash of each input; eigenvalues and diagonal always come from all.
        correction: of ``"inf"``: ``"rescale"`` (default), ``"clamp"`` or ``"none"``.
        prior_precision: tau, or ``"evidence"`` for the maximum of the log marginal likelihood.
        residual_weight: omega of ``"inf"``.
        noise_variance: for regression, in squared units of the targets, one number or one an output; by
            default the mean squared residual of the training data, which takes a forward pass over it.
        unsupported: ``"raise"`` an error for layers whose gradients cannot be caught, or ``"skip"`` them
            (they stay deterministic).
        seed: of drawn labels and sketches; a seed makes a fit bit-identical on one device.
        dtype: of the statistics: float32 (default) or float64.
        memory_budget: bytes that one temporary of the statistics may take; by default a share of what is free, at
            most 256 MiB.
        checkpoint: a file for the sums so far, from which the same call goes on after an interruption, with the same
            result to the last bit on one device if the loader gives the same batches in the same order (a shuffling
            `DataLoader` without a generator of its own does). Deleted when the fit is done.
        checkpoint_every: batches between two writes of it.
        batch_to_inputs: takes a batch to the model's inputs: a tensor, a tuple of arguments or a dict of
            named ones.
        batch_to_targets: takes a batch to its targets.
        progress: show a bar per sweep, on rank 0.

    Returns:
        The posterior; see its `report`.

    Raises:
        UnsupportedLayerError: a layer's gradients cannot be caught.
        NonFiniteError: outputs, activations or gradients are not finite.
        PosthocUQError: options, data or model do not fit; the message says how to go on.
    """
    options = _options(method, rank=rank, basis=basis, basis_fraction=basis_fraction, correction=correction)
    law = resolve_likelihood(likelihood, noise_variance)
    _check(fisher, n_samples, prior_precision)
    check_loader(loader)
    model = unwrap(model)
    device = model_device(model)
    budget = default_budget(device) if memory_budget is None else _checked_budget(memory_budget)
    options = replace(options, memory_budget=budget)
    reader = BatchReader(device, batch_to_inputs, batch_to_targets)
    finds_noise = isinstance(law, Gaussian) and likelihood == "regression" and noise_variance is None
    check_reusable(loader, FAMILIES[method][1] + finds_noise)
    settings = SweepSettings(reader, law, fisher, n_samples, seed, statistics_dtype(model, dtype), progress)
    if val_loader is not None and is_divided(val_loader):
        raise PosthocUQError(
            "Every process tunes by itself: give all of them the whole val_loader, not a part of it."
        )
    data = loader

    def begin() -> tuple[Iterable[Any], Batch, Prepared]:
        with isolated_random_state(seed):
            first, whole = _peek(data)
            batch = reader.read(first)
            autocast = torch.is_autocast_enabled(device.type)
            return whole, batch, prepare(model, batch, layers, unsupported=unsupported, autocast=autocast)

    loader, batch, prepared = together(begin, "the dry run")
    run = Run(prepared, loader, settings, options, device)
    if checkpoint is not None or world() > 1:
        identity = _identity(method, run, model) | {"noise": "estimated" if finds_noise else "given"}
        check_common(identity)
        identity["first batch"] = _hash(batch)
        if checkpoint is not None:
            file, every = checkpoint, _checked_every(checkpoint_every)
            run.checkpoint = together(
                lambda: Checkpoint(file, every, identity, budget), "opening the checkpoint"
            )
            run.options = replace(options, memory_budget=run.checkpoint.budget)
    noise_source = find_noise(run) if finds_noise else "given"
    posterior = laplace(method, run, model)
    del prepared, run.prepared
    if isinstance(law, Gaussian):
        posterior.record.tuning["noise variance"] = noise_source
    posterior.residual_weight = residual_weight
    if isinstance(prior_precision, str):
        maximise_evidence(posterior)
        if val_loader is None:
            _warn_of_noise(posterior, batch, seed)
    else:
        posterior.prior_precision = prior_precision
        posterior.record.tuning["prior precision"] = "given"
    if val_loader is not None:
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
    posterior.fingerprint = fingerprint(posterior.mean)
    return posterior


def _hash(batch: Batch) -> int:
    """Of the inputs and targets of a batch."""
    tensors = [*batch.tensors(), *([] if batch.targets is None else [batch.targets])]
    return int(sample_keys(tensors, count_samples(batch), 0).sum())


def _identity(method: str, run: Run, model: nn.Module) -> dict[str, Any]:
    """What two fits must have in common for one to go on where the other stopped."""
    settings, kind = run.settings, run.device.type
    options = asdict(run.options)
    del options["memory_budget"]
    return {
        "method": method,
        "likelihood": settings.likelihood.attributes(),
        "fisher": settings.fisher,
        "n_samples": settings.n_samples,
        "seed": settings.seed,
        "dtype": str(settings.dtype),
        "options": options,
        "layers": {name: list(layer.matrix_shape) for name, layer in run.layers.items()},
        "model": fingerprint({name: p for name, p in chain(model.named_parameters(), model.named_buffers())}),
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off",
        "processes": world(),
    }


def _warn_of_noise(posterior: Posterior, batch: Batch, seed: int) -> None:
    """Say so where models drawn at the evidence no longer predict what the trained one does.

    Laplace's evidence trusts a linear approximation; where weights outnumber the data by far, weights drawn at its
    optimum lie outside of it.
    """
    if not isinstance(posterior.likelihood, (Categorical, Bernoulli, Gaussian)):
        return
    samples = count_samples(batch)
    few = batch.narrow(0, min(samples, 64), samples)
    # Fewer draws tell less, but those of a large network take memory.
    draws = 20 if sum(mean.numel() for mean in posterior.mean.values()) <= 2_000_000 else 5
    with torch.no_grad():
        trained = few.call(replicate(cast(nn.Module, posterior.model)))
        drawn = SamplingPredictor(cast(nn.Module, posterior.model), posterior, draws, seed).outputs(
            *few.args, **few.kwargs
        )
    if isinstance(posterior.likelihood, Gaussian):
        noise = posterior.likelihood.noise(trained)
        lost = bool(((drawn.mean(0) - trained).square().mean(0) > noise).any())
    elif isinstance(posterior.likelihood, Bernoulli):
        lost = bool((((drawn.sigmoid().mean(0) > 0.5) == (trained > 0)).float().mean()) < _AGREEMENT)
    else:
        same = drawn.softmax(-1).mean(0).argmax(-1) == trained.argmax(-1)
        lost = bool(same.float().mean() < _AGREEMENT)
    if lost:
        warnings.warn(
            "At the prior precision of the log marginal likelihood, models drawn from this posterior no longer predict "
            "what the trained one does: it has few data for its weights. Pass val_loader=..., restrict it with "
            "layers='last', give prior_precision=... (1 / mean squared weight is a start), or predict with "
            "head='linearized'.",
            UserWarning,
            stacklevel=3,
        )


def _options(method: str, **given: Any) -> LaplaceOptions:
    if method not in FAMILIES:
        raise PosthocUQError(f"method must be one of {sorted(FAMILIES)}, not {method!r}.")
    own = _OPTIONS.get(method, {})
    stray = [name for name, value in given.items() if value is not None and name not in own]
    if stray:
        raise PosthocUQError(
            f"method={method!r} does not take {stray}; of these options it takes {sorted(own) or 'none'}."
        )
    chosen = own | {name: value for name, value in given.items() if value is not None}
    options = LaplaceOptions(**chosen)
    kept_entries(options.rank, (1, 1, 1))
    if options.basis not in _BASES:
        raise PosthocUQError(f"basis must be one of {_BASES}, not {options.basis!r}.")
    if not 0 < options.basis_fraction <= 1:
        raise PosthocUQError(f"basis_fraction must be in (0, 1], not {options.basis_fraction!r}.")
    if options.correction not in CORRECTIONS:
        raise PosthocUQError(f"correction must be one of {CORRECTIONS}, not {options.correction!r}.")
    return options


def _checked_budget(budget: int) -> int:
    if budget < 2**20:
        raise PosthocUQError(f"memory_budget must be at least {2**20} bytes, not {budget}.")
    return int(budget)


def _checked_every(every: int) -> int:
    if isinstance(every, bool) or every < 1:
        raise PosthocUQError(f"checkpoint_every is a number of batches, at least 1; not {every!r}.")
    return int(every)


def _check(fisher: str, n_samples: int, prior_precision: float | str) -> None:
    if fisher not in get_args(Fisher):
        raise PosthocUQError(f"fisher must be one of {get_args(Fisher)}, not {fisher!r}.")
    if n_samples < 1 or (n_samples > 1 and fisher != "mc"):
        raise PosthocUQError(
            f"n_samples is the number of labels drawn with fisher='mc', at least 1; not {n_samples} with "
            f"{fisher!r}."
        )
    if isinstance(prior_precision, str) and prior_precision != "evidence":
        raise PosthocUQError(
            f"prior_precision must be a positive number or 'evidence', not {prior_precision!r}."
        )
    if not isinstance(prior_precision, str) and not 0 < prior_precision < float("inf"):
        raise PosthocUQError(f"prior_precision must be positive and finite, not {prior_precision}.")


def _peek(loader: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """The first batch, and a loader that still yields all of them."""
    iterator = iter(loader)
    try:
        first = next(iterator)
    except StopIteration:
        raise PosthocUQError("The loader yields no batch; it needs at least one sample.") from None
    return first, (cast(Iterable[Any], chain([first], iterator)) if iterator is loader else loader)
