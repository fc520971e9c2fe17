"""Which prior over functions, which weight of the divergence, which context points: trials on FashionMNIST.

python -m recipes.function_space.objectives --trials "*" --seeds 0    choose by letters; 3 minutes a setting
python -m recipes.function_space.objectives --digits --seeds 0 1 2    report the chosen one by digits too
python -m recipes.function_space.objectives --digits --full           the same with the CNN of recipes/fashion_mnist
python -m recipes.function_space.objectives --smoke                   seconds

A small CNN (16 and 32 filters) on 30,000 images, eight epochs around it, unless `--full` is given. Settings
are chosen by letters and held-out images alone; `--digits` measures test images, digits and letters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import posthoc_uq as uq
from posthoc_uq.evaluation.measurements import foreignness
from posthoc_uq.evaluation.metrics import ood_auroc
from recipes.common import (
    OUTPUT,
    by_row,
    existing,
    looked_at,
    matching,
    parsed,
    parser,
    predicted,
    report,
    table,
)
from recipes.fashion_mnist.data import Data, Labelled, add_options, load, normalised
from recipes.fashion_mnist.methods import loader, plain, quality
from recipes.fashion_mnist.network import check_kept, trained
from recipes.fashion_mnist.variational import CORRUPTED, INDEPENDENT, OPTIONS, PUBLISHED, shuffled
from recipes.function_space import foreign

MONOCHROME = [(2, "batch"), (14, "monochrome")]

TRIALS: dict[str, dict[str, Any]] = {
    "features, monochrome": OPTIONS | {"context": [(16, "batch"), (16, "monochrome")]},
    "features, corrupted": {"body": "certain", "context": [(16, "batch"), (16, "corrupted")]},
    "features, minibatch": {"divergence_weight": "minibatch", "body": "certain", "context": CORRUPTED},
    "features, minibatch, noise 0.1": {
        "divergence_weight": "minibatch",
        "function_noise": 0.1,
        "body": "certain",
        "context": CORRUPTED,
    },
    "independent, weight 1": PUBLISHED | {"divergence_weight": 1.0, "context": CORRUPTED},
    "independent, monochrome": PUBLISHED | {"context": MONOCHROME},
    "independent, corrupted": PUBLISHED | {"context": CORRUPTED},
    "independent, corrupted, variance 30": PUBLISHED | {"context": CORRUPTED, "prior_variance": 30.0},
    "independent, corrupted, faster variances": INDEPENDENT,
    "independent, corrupted, start at -8": PUBLISHED | {"context": CORRUPTED, "initial_log_variance": -8.0},
    "independent, corrupted, all random": PUBLISHED
    | {"body": "linearized", "initial_body_log_variance": -8.0, "context": CORRUPTED},
    "independent, corrupted, last layer alone": {
        "prior": "independent",
        "layers": "last",
        "context": CORRUPTED,
    },
}
"""Options of `uq.fit` by name; the rates and the number of epochs are the same for all."""

SHARED: dict[str, Any] = {"lr": 1e-3, "log_variance_lr": 1e-3, "divergence": None}
CHOSEN = ("independent, corrupted, faster variances",)
SCORES = {"entropy": "entropy", "mutual_information": "mutual information"}
RATE, NETWORK_EPOCHS = 0.01, 15


def fitted(
    model: torch.nn.Module, train: Labelled, name: str, folder: Path, seed: int, epochs: int
) -> uq.Posterior:
    """The posterior of a trial, around a trained network; kept in the folder."""
    path = folder / f"objectives-{name.replace(',', '').replace(' ', '-')}-{epochs}-seed{seed}.h5"
    if path.exists():
        return uq.load(path, model)
    options = SHARED | TRIALS[name]
    batches = shuffled(*train, seed=seed)
    posterior = uq.fit(model, batches, method="function_space", epochs=epochs, seed=seed, **options)
    uq.save(posterior, path)
    return posterior


def measured(
    predict: Any, images: Labelled, others: dict[str, Tensor], novelty: Any = None
) -> dict[str, float]:
    """Quality on images of the data, and AUROC of the others by every score, `novelty` among them if it is given."""
    inside = predict(images.images)
    found = quality(inside, images.labels)
    for kind, inputs in others.items():
        told = foreignness(inside, predict(inputs))
        found |= {f"{kind}, {words}": told[s]["auroc"] for s, words in SCORES.items() if s in told}
        if novelty is not None:
            found[f"{kind}, novelty"] = ood_auroc(novelty(images.images), novelty(inputs))
    return found


def training_images(data: Data, options: argparse.Namespace) -> Labelled:
    """All, or the first ones."""
    return data.train if options.full else data.train.first(options.images)


def folder_of(data: Data, options: argparse.Namespace) -> Path:
    """Where networks of these settings are kept."""
    small, number = "" if options.full else "small-", len(training_images(data, options).labels)
    return options.networks / f"{small}{number}-{options.network_epochs}-{RATE:g}"


def one_seed(
    data: Data,
    letters: Tensor,
    seed: int,
    names: list[str],
    folder: Path,
    filters: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """By row: what was measured."""
    train = training_images(data, options)
    model = trained(train, seed, folder, options.network_epochs, RATE, filters)
    held_out = data.validation.first(options.tuned)
    images, others = data.validation, {"letters": letters}
    if options.digits:
        images, others = data.test, {"digits": data.digits, "letters": letters}
    results = {"network": measured(plain(model).predict, images, others)}
    for name in names:
        start = time.perf_counter()
        posterior = fitted(model, train, name, folder, seed, options.epochs)
        minutes = (time.perf_counter() - start) / 60
        rows = [name]
        if options.tuned:
            rows.append(f"{name}, tuned")
        for row in rows:
            if row != name:
                posterior = uq.tune(posterior, loader(held_out), n_samples=options.draws, progress=False)
            predictor = uq.wrap(model, posterior, n_samples=options.draws)
            results[row] = measured(
                partial(predicted, predictor, size=100),
                images,
                others,
                partial(predicted, predictor.novelty, size=500),
            )
            print(f"seed {seed}, {row}, {minutes:.1f} minutes: {results[row]}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "function_space", "a few images, one epoch")
    add_options(command)
    add = command.add_argument
    add("--trials", nargs="+", default=list(CHOSEN), help="patterns of their names")
    add("--digits", action="store_true", help="measure test images and digits: to report")
    add("--tuned", type=int, default=0, help="held-out images for a row after uq.tune; none by default")
    add("--full", action="store_true", help="the CNN of recipes/fashion_mnist, all images")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--epochs", type=int, default=8, help="around the trained network")
    add("--draws", type=int, default=10, help="of weights, for every prediction")
    add("--networks", type=existing, default=OUTPUT / "fashion_mnist", help="output of recipes/fashion_mnist")
    command.set_defaults(network_epochs=NETWORK_EPOCHS, images=30_000, foreign_images=5000)
    smoke = {"seeds": [0], "epochs": 1, "draws": 3, "network_epochs": 1, "foreign_images": 100}
    options = parsed(command, arguments, **smoke)
    with looked_at():
        names = matching(TRIALS, options.trials)
        data = load(options.data, download=options.download)
        if options.smoke:
            data = data.first(140, 40, 40, 40)
        folder, filters = folder_of(data, options), 32 if options.full else 16
        check_kept(folder, options.seeds, filters)
        letters = normalised(foreign.letters(options.foreign_images, seed=1))
    results = [one_seed(data, letters, seed, names, folder, filters, options) for seed in options.seeds]
    report(options, "objectives", table(by_row(results), ".4g", columns=list(results[0][names[0]])), results)


if __name__ == "__main__":
    main()
