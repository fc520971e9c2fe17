"""The second stage: scale N and prior precision tau by random search on validation images.

Every trial draws both log-uniformly from a range; trial number i draws the same numbers for every method, whatever the
budget, so that a larger budget goes on where a smaller one ended. A trial's result is a file of its own.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm.auto import tqdm

import posthoc_uq as uq
from posthoc_uq import NonFiniteError, PosthocUQError
from posthoc_uq.app import ImageLoader, TrainedModel
from posthoc_uq.core import gather, on_all_ranks, rank, world
from posthoc_uq.evaluation import metrics
from posthoc_uq.files.atomic import checked_target, write
from recipes.imagenet.fitting import METHODS, loaded, posterior_file, say

EDGE = 0.05
"""A trial in the outer twentieth of a (logarithmic) range counts as being at its edge."""


@dataclass(frozen=True)
class Trial:
    """One configuration and what the validation images say of it; infinite where drawn models are not finite."""

    number: int
    scale: float
    prior_precision: float
    NLL: float
    ECE: float
    accuracy: float


def configuration(
    number: int, seed: int, scales: Sequence[float], priors: Sequence[float]
) -> tuple[float, float]:
    """Scale and prior precision of a trial, each log-uniform in its range."""
    shares = np.random.default_rng([seed, number]).random(2)
    found = [
        math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        for share, (low, high) in zip(shares, (scales, priors), strict=True)
    ]
    return found[0], found[1]


def search_all(
    source: TrainedModel, loader: ImageLoader, labels: Tensor, options: argparse.Namespace
) -> None:
    """Every trial that has no result yet, shared among the processes."""
    for method in options.methods:
        folder: Path = options.trials / method
        folder.mkdir(parents=True, exist_ok=True)
        missing: list[int] = gather(
            [number for number in range(options.budget) if not trial_file(folder, number).exists()],
            "looking for trials",
        )[0]
        say(f"{METHODS[method]}: {options.budget - len(missing)} of {options.budget} trials found again")
        own = missing[rank() :: world()]
        with on_all_ranks("the search"):
            _search(source, method, own, loader, labels, folder, options)
        chosen = best(options.trials, method, options)
        with on_all_ranks("keeping the best trial"):
            keep(source, method, chosen, options)
        say(f"{METHODS[method]}: {described(chosen, options)}")


def keep(source: TrainedModel, method: str, chosen: Trial, options: argparse.Namespace) -> None:
    """Write the best trial's hyperparameters into the posterior's file, for use elsewhere; by the first process."""
    if rank() > 0:
        return
    posterior = loaded(source, options.posteriors, method)
    if (posterior.scale, posterior.prior_precision) == (chosen.scale, chosen.prior_precision):
        return
    how = f"random search, {options.budget} trials, validation {options.select}"
    posterior = posterior.with_settings(scale=chosen.scale, prior_precision=chosen.prior_precision)
    posterior = posterior.noted(tuning={"scale": how, "prior precision": how})
    uq.save(posterior, posterior_file(options.posteriors, method))


def _search(
    source: TrainedModel,
    method: str,
    numbers: Sequence[int],
    loader: ImageLoader,
    labels: Tensor,
    folder: Path,
    options: argparse.Namespace,
) -> None:
    if not numbers:
        return
    posterior = loaded(source, options.posteriors, method)
    quiet = not options.progress or rank() > 0
    for number in tqdm(numbers, desc=METHODS[method], unit=" trials", leave=False, disable=quiet):
        found = tried(source, posterior, number, loader, labels, options)
        values = {k: v if math.isfinite(v) else None for k, v in asdict(found).items()}
        text = json.dumps(values, indent=1) + "\n"
        write(checked_target(trial_file(folder, number)), BytesIO(text.encode()))


def tried(
    source: TrainedModel,
    posterior: uq.Posterior,
    number: int,
    loader: ImageLoader,
    labels: Tensor,
    options: argparse.Namespace,
) -> Trial:
    """The quality of a trial's predictions; all trials draw their weights from the same random numbers."""
    scale, prior = configuration(number, options.seed, options.scales, options.priors)
    try:
        predictor = uq.wrap(
            source.model,
            posterior.with_settings(scale=scale, prior_precision=prior),
            "sampling",
            n_samples=options.search_samples,
            seed=options.seed,
        )
        prediction = predictor.predict(loader, progress=False)
        assert isinstance(prediction, uq.ClassPrediction)
        loss = -float(prediction.log_prob(labels).double().mean())
        if not math.isfinite(loss):
            raise NonFiniteError("The predictions are not finite.")
    except NonFiniteError:  # weights so wild that activations overflow
        return Trial(number, scale, prior, math.inf, math.inf, 0.0)
    error = metrics.expected_calibration_error(prediction.probs, labels, options.bins)
    return Trial(number, scale, prior, loss, error, metrics.accuracy(prediction.probs, labels))


def trial_file(folder: Path, number: int) -> Path:
    """Where the result of a trial lies."""
    return folder / f"{number:04d}.json"


def trials(folder: Path, method: str, budget: int) -> list[Trial]:
    """The finished trials of a method, those within the budget."""
    files = [trial_file(folder / method, number) for number in range(budget)]
    known: list[dict[str, Any]] = [json.loads(f.read_text()) for f in files if f.exists()]
    return [Trial(**{k: math.inf if v is None else v for k, v in values.items()}) for values in known]


def best(folder: Path, method: str, options: argparse.Namespace) -> Trial:
    """The finished trial with the lowest validation NLL or ECE, as ``--select`` says.

    Raises:
        PosthocUQError: there is none, or none whose drawn models are finite.
    """
    found = trials(folder, method, options.budget)
    if not found:
        raise PosthocUQError(f"There are no trials of {METHODS[method]} yet; run the stage search first.")
    chosen = min(found, key=lambda trial: (getattr(trial, options.select), trial.NLL))
    if not math.isfinite(chosen.NLL):
        raise PosthocUQError(
            f"Not one of {len(found)} trials of {METHODS[method]} predicts finite numbers; raise --priors."
        )
    return chosen


def at_edge(trial: Trial, options: argparse.Namespace) -> list[str]:
    """The hyperparameters of a trial that lie at an end of their range."""
    found: list[str] = []
    for name, value, (low, high) in (
        ("N", trial.scale, options.scales),
        ("tau", trial.prior_precision, options.priors),
    ):
        share = math.log(value / low) / math.log(high / low)
        if not EDGE < share < 1 - EDGE:
            found.append(name)
    return found


def described(trial: Trial, options: argparse.Namespace) -> str:
    """A trial in words."""
    edge = at_edge(trial, options)
    return (
        f"N = {trial.scale:.3g}, tau = {trial.prior_precision:.3g}: validation NLL {trial.NLL:.4f}, ECE {trial.ECE:.4f}"
        + (f" ({' and '.join(edge)} at the edge of the range)" if edge else "")
    )
