"""The first stage: one posterior for each method, over one or several processes."""

from __future__ import annotations

import argparse
from pathlib import Path

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.app import ImageLoader, TrainedModel
from posthoc_uq.core import gather, on_all_ranks, rank

METHODS = {"diag": "Diag", "kfac": "KFAC", "efb": "EFB", "inf": "INF"}
"""Names of `uq.fit`, and the paper's."""


def fit_all(source: TrainedModel, loader: ImageLoader, options: argparse.Namespace) -> None:
    """Fit what is not there yet; an interrupted fit goes on from its checkpoint.

    The prior precision is left at 1: the search chooses it, and the scale.
    """
    options.posteriors.mkdir(parents=True, exist_ok=True)
    for method in options.methods:
        path = posterior_file(options.posteriors, method)
        if gather(path.exists(), "looking for posteriors")[0]:
            say(f"{METHODS[method]}: found again in {path}")
            continue
        posterior = uq.fit(
            source.model,
            loader,
            method=method,
            layers=options.layers,
            **({"rank": options.rank} if method == "inf" else {}),
            fisher="mc",
            prior_precision=1.0,
            head="sampling",
            seed=options.seed,
            checkpoint=options.posteriors / f"{method}.checkpoint",
            checkpoint_every=options.checkpoint_every,
            progress=options.progress,
        )
        posterior = posterior.noted(fit={"model": source.spec, "images": source.transform.text})
        with on_all_ranks(f"writing {path}"):
            uq.save(posterior, path)
        say(f"{METHODS[method]}: {path.stat().st_size / 2**20:.1f} MiB")


def posterior_file(folder: Path, method: str) -> Path:
    """Where the posterior of a method lies."""
    return folder / f"{method}.h5"


def loaded(source: TrainedModel, folder: Path, method: str) -> uq.Posterior:
    """The posterior of a method.

    Raises:
        PosthocUQError: it has not been fitted, or for another model.
    """
    path = posterior_file(folder, method)
    if not path.exists():
        raise PosthocUQError(f"There is no posterior '{path}' yet; run the stage fit first.")
    return uq.load(path, source.model)


def say(text: str) -> None:
    """A line from the first process."""
    if rank() == 0:
        print(text, flush=True)
