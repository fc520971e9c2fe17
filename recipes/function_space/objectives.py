"""Which prior over functions, which weight of the divergence, which context points: trials on FashionMNIST.

python recipes/function_space/objectives.py --trials "*" --seeds 0    choose by letters; 3 minutes a setting
python recipes/function_space/objectives.py --digits --seeds 0 1 2    report the chosen one by digits too
python recipes/function_space/objectives.py --digits --full           the same with the CNN of recipes/fashion_mnist
python recipes/function_space/objectives.py --smoke                   seconds

A small CNN (16 and 32 filters) on 30,000 images, eight epochs around it, unless `--full` is given. Settings
are chosen by letters and held-out images alone; `--digits` measures test images, digits and letters.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import foreign
import torch
from common import OUTPUT, spread
from data import DEBIAN, Data, Labelled, load, normalised
from methods import in_batches, plain
from methods import loader as batched
from network import cnn, small_cnn, trained
from run import OUTPUT as NETWORKS
from run import smaller
from torch import Tensor
from variational import CORRUPTED, INDEPENDENT, OPTIONS, PUBLISHED, shuffled

import posthoc_uq as uq
from posthoc_uq.evaluation.measurements import foreignness
from posthoc_uq.evaluation.metrics import ood_auroc

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all recipes share

from smoke import marked

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
    loader = shuffled(*train, seed=seed)
    posterior = uq.fit(model, loader, method="function_space", epochs=epochs, seed=seed, **options)
    uq.save(posterior, path)
    return posterior


def measured(
    predict: Any, images: Labelled, others: dict[str, Tensor], novelty: Any = None
) -> dict[str, float]:
    """Quality on images of the data, and AUROC of the others by every score, `novelty` among them if it is given."""
    inside = predict(images.images)
    quality = inside.quality(images.labels, bins=15)
    found = {"accuracy": quality["accuracy"] * 100, "NLL": quality["NLL"], "ECE": quality["ECE"]}
    for kind, inputs in others.items():
        told = foreignness(inside, predict(inputs))
        found |= {f"{kind}, {words}": told[s]["AUROC"] for s, words in SCORES.items() if s in told}
        if novelty is not None:
            found[f"{kind}, novelty"] = ood_auroc(novelty(images.images), novelty(inputs))
    return found


def novelty(predictor: uq.Predictor, images: Tensor) -> Tensor:
    """Of many images."""
    return torch.cat([predictor.novelty(batch) for batch in images.split(500)])


def one_seed(data: Data, seed: int, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """By row: what was measured."""
    train = data.train
    if not options.full:
        train = Labelled(*(part[: options.images] for part in data.train))
    build = cnn if options.full else small_cnn
    folder = (
        options.networks
        / f"{'' if options.full else 'small-'}{len(train.labels)}-{options.network_epochs}-{RATE:g}"
    )
    model = trained(train, seed, folder, options.network_epochs, RATE, build)
    held_out = Labelled(*(part[: options.tuned] for part in data.validation))
    letters = normalised(foreign.letters(options.foreign_images, seed=1))
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
                uq.tune(posterior, batched(held_out), n_samples=options.draws, progress=False)
            predictor = uq.wrap(model, posterior, n_samples=options.draws)
            results[row] = measured(
                lambda x, p=predictor: in_batches(p, x), images, others, partial(novelty, predictor)
            )
            print(f"seed {seed}, {row}, {minutes:.1f} minutes: {results[row]}", flush=True)
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a few images, one epoch")
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help="torchvision's folder, or one with .gz files"
    )
    parser.add_argument("--trials", nargs="+", default=list(CHOSEN), help="patterns of their names")
    parser.add_argument("--digits", action="store_true", help="measure test images and digits: to report")
    parser.add_argument(
        "--tuned", type=int, default=0, help="held-out images for a row after uq.tune; none by default"
    )
    parser.add_argument("--full", action="store_true", help="the CNN of recipes/fashion_mnist, all images")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=8, help="around the trained network")
    parser.add_argument("--draws", type=int, default=10, help="of weights, for every prediction")
    parser.add_argument("--networks", type=Path, default=NETWORKS, help="output of recipes/fashion_mnist")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    options.network_epochs, options.images, options.foreign_images = NETWORK_EPOCHS, 30_000, 5000
    data = load(options.data, options.networks)
    if options.smoke:
        data = smaller(data)
        options.seeds, options.epochs, options.draws = [0], 1, 3
        options.network_epochs, options.foreign_images = 1, 100
    options.output.mkdir(parents=True, exist_ok=True)
    names = [name for name in TRIALS if any(fnmatch(name, pattern) for pattern in options.trials)]
    results = [one_seed(data, seed, names, options) for seed in options.seeds]
    (options.output / "objectives.json").write_text(json.dumps(results, indent=1) + "\n")
    columns = list(results[0][names[0]])
    print(f"\n{marked(spread(results, columns, '.4g'), options.smoke)}")


if __name__ == "__main__":
    main()
