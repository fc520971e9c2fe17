"""The third stage: the network alone and every posterior, on validation images that the search has not seen and on
foreign ones.

Processes share the images. One row is worked on at a time, and of each only what the table and the figures need is
kept, so that 50,000 predictions of 1,000 classes need not be held for all rows at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq import Evaluation
from posthoc_uq.app import TrainedModel
from posthoc_uq.core import gather, on_all_ranks, rank, world
from posthoc_uq.evaluation.measurements import FAMILIAR, title_of
from posthoc_uq.evaluation.metrics import calibration_bins
from posthoc_uq.files.atomic import checked_target, write
from recipes.imagenet.fitting import METHODS, loaded, posterior_file, say
from recipes.imagenet.folders import Images
from recipes.imagenet.search import best

NETWORK = "network"
FIGURE_BINS, FILLED = 20, 20
"""Bins of equal mass in figure 6, as in Maddox et al. (2019); fewer where a bin would hold fewer images than that."""
QUALITY = ("accuracy", "nll", "ece")
KEPT = ("probs", "logits_mean", "logits_variance", "sample_entropy", "log_probs")


def evaluate_all(
    source: TrainedModel,
    val: Images,
    indices: Sequence[int],
    foreign: Mapping[str, Images],
    options: argparse.Namespace,
) -> None:
    """Every row whose result is not there yet, or was of other settings."""
    options.evaluations.mkdir(parents=True, exist_ok=True)
    for row in (NETWORK, *options.methods):
        key, path = key_of(row, len(indices), foreign, options), options.evaluations / f"{row}.pt"
        found = result(path)
        gather(None, "looking for results")  # nobody writes before all have looked
        if found is not None and found["key"] == key:
            say(f"{METHODS.get(row, row)}: found again in {path}")
            continue
        with on_all_ranks("the evaluation"):
            _predict(source, row, val, indices, foreign, options)
        if rank() == 0:
            assert val.labels is not None
            targets = torch.tensor([val.labels[index] for index in indices])
            parts = [part_file(options.evaluations, row, number) for number in range(world())]
            new = summary(row, joined(parts), targets, options) | {"key": key}
            image = BytesIO()
            torch.save(new, image)
            write(checked_target(path), image)
            for part in parts:
                part.unlink()
            measures = new["measures"]["quality"][row]
            say(f"{METHODS.get(row, row)}: " + ", ".join(f"{title_of(m)} {measures[m]:.4f}" for m in QUALITY))


def key_of(row: str, images: int, foreign: Mapping[str, Images], options: argparse.Namespace) -> str:
    """All that a row's result depends on beside the settings of the output folder."""
    settings: dict[str, Any] = {
        "images": images,
        "foreign": {name: [one.dataset.files[0], len(one.dataset)] for name, one in foreign.items()},
    }
    if row != NETWORK:
        chosen = best(options.trials, row, options)
        settings |= {
            "scale": chosen.scale,
            "prior precision": chosen.prior_precision,
            "samples": options.samples,
        }
    return json.dumps(settings, sort_keys=True)


def result(path: Path) -> dict[str, Any] | None:
    """What is kept of a row, or None."""
    return torch.load(path, weights_only=True) if path.exists() else None


def _predict(
    source: TrainedModel,
    row: str,
    val: Images,
    indices: Sequence[int],
    foreign: Mapping[str, Images],
    options: argparse.Namespace,
) -> None:
    """This process's part of the predictions, to a file."""
    own = slice(rank(), None, world())
    compared: Any = source.model
    if row != NETWORK:
        posterior, chosen = loaded(source, options.posteriors, row), best(options.trials, row, options)
        compared = uq.wrap(
            source.model,
            posterior.with_settings(scale=chosen.scale, prior_precision=chosen.prior_precision),
            "sampling",
            n_samples=options.samples,
            seed=options.seed,
        )
    reading = (options.batch_size, options.workers)
    found = uq.evaluate(
        {row: compared},
        val.loader(indices[own], *reading),
        ood_loaders={
            name: images.loader(range(len(images.dataset))[own], *reading) for name, images in foreign.items()
        },
        n_examples=0,
        progress=options.progress and rank() == 0,
    )
    kept = {
        name: {field: getattr(prediction, field) for field in KEPT}
        for name, prediction in found.predictions[row].items()
    }
    torch.save(kept, part_file(options.evaluations, row, rank()))


def part_file(folder: Path, row: str, number: int) -> Path:
    """Where a process leaves its part of a row."""
    return folder / f"{row}.part{number}.pt"


def joined(files: Sequence[Path]) -> dict[str, uq.ClassPrediction]:
    """The predictions of several processes, process r having every image r, r + processes, ..., as one, in order."""
    parts: list[dict[str, dict[str, Any]]] = [torch.load(file, weights_only=True) for file in files]
    found: dict[str, uq.ClassPrediction] = {}
    for name in list(parts[0]):
        own = [uq.ClassPrediction(**part.pop(name)) for part in parts]
        size = sum(map(len, own))
        numbers = torch.cat([torch.arange(r, size, len(own)) for r in range(len(own))])
        whole, order = uq.ClassPrediction.cat(own), numbers.argsort()
        values: dict[str, Any] = {field: getattr(whole, field) for field in KEPT}
        found[name] = uq.ClassPrediction(**{k: None if v is None else v[order] for k, v in values.items()})
    return found


def summary(
    row: str, predictions: Mapping[str, uq.ClassPrediction], targets: Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """The measures of a row, its bins for figure 6 and its scores for figure 7."""
    found = Evaluation(
        {row: predictions},
        targets,
        galleries={},
        score=None,
        referral_rates=(0.05, 0.1, 0.2, 0.5),
        bins=options.bins,
    )
    test = predictions[FAMILIAR]
    bins = min(FIGURE_BINS, max(2, len(test) // FILLED))
    return {
        "measures": found.to_dict(),
        "bins": calibration_bins(test.probs, targets, bins, "equal_mass")._asdict(),
        "entropy": {name: one.scores()["entropy"] for name, one in predictions.items()},
    }


def numbers_and_bytes(folder: Path, method: str) -> tuple[int, int]:
    """How many numbers a posterior keeps beside the trained weights, and the bytes of its file (table 3)."""
    path = posterior_file(folder, method)
    blocks = uq.inspect(path)["blocks"].values()
    count = sum(
        torch.Size(tensor["shape"]).numel() for block in blocks for tensor in block["tensors"].values()
    )
    return count, path.stat().st_size
