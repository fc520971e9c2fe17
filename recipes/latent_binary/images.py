"""FashionMNIST with sparse networks: latent binary ones, from a trained network and from scratch, beside pruning.

    python -m recipes.latent_binary.images --networks dense --seeds 0 1 2 --rows "LRT, post hoc" "flow, post hoc"
    python -m recipes.latent_binary.images --networks dense --scratch-epochs 250 --rows "LRT, from scratch"
    python -m recipes.latent_binary.images --networks lenet --images 10000 --network-epochs 20
    python -m recipes.latent_binary.images --smoke

For every posterior three predictions: averaged over the full posterior, averaged over the median probability model (the
weights that are more likely on than off), and by that model's means, one sparse network. `entropy_<network>.png` maps
the predictive entropy over a plane of images through three classes. Magnitude pruning with
training on, `torch.nn.utils.prune`, keeps as many weights as the median model does.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import expected_calibration_error
from recipes.common import by_row, looked_at, parsed, parser, predicted, report, save_figure, table
from recipes.fashion_mnist.data import Data, Labelled, add_options, load
from recipes.latent_binary.entropy_maps import Probabilities, figure
from recipes.latent_binary.networks import NETWORKS, Batches, new, pruned, train

SAMPLES = 20
"""Draws of the weights for a prediction."""

FITS: dict[str, dict[str, Any]] = {
    "LRT, post hoc": {},
    "flow, post hoc": {"flow": True},
    "LRT, from scratch": {"start": "random"},
    "flow, from scratch": {"start": "random", "flow": True},
}
"""The rows of the table, and the options of `posthoc_uq.LatentBinary` beside those of the command line."""


def scored(predict: Probabilities, part: Labelled) -> dict[str, float]:
    """Accuracy in percent, NLL in nats, expected calibration error of a prediction."""
    probabilities = predicted(predict, part.images, 1000)
    right = (probabilities.argmax(-1) == part.labels).float().mean()
    chosen = probabilities.gather(1, part.labels.unsqueeze(1)).clamp(min=1e-12)
    error = expected_calibration_error(probabilities, part.labels)
    return {"accuracy": 100 * float(right), "NLL": -float(chosen.log().mean()), "ECE": error}


def by_itself(model: nn.Module) -> Probabilities:
    """The probabilities of a network."""

    def predict(images: Tensor) -> Tensor:
        with torch.no_grad():
            return model(images).softmax(-1)

    return predict


def drawn(model: nn.Module, posterior: uq.Posterior) -> Probabilities:
    """The probabilities by drawn weights."""
    predictor = uq.wrap(model, posterior, "sampling", n_samples=SAMPLES)
    return lambda images: predictor(images).probs  # type: ignore[union-attr]


def fitted(
    model: nn.Module, data: Data, row: str, options: argparse.Namespace, seed: int
) -> tuple[Any, float]:
    """The posterior, and the seconds that it took."""
    given: dict[str, Any] = {"epochs": options.epochs, **FITS[row]}
    if given.get("start") == "random":
        given |= {"epochs": options.scratch_epochs, "kl_weight": options.scratch_kl_weight}
    elif options.kl_weight is not None:
        given["kl_weight"] = options.kl_weight
    prior = {"prior_precision": 1.0} if given.get("start") == "random" else {}
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        method = uq.LatentBinary(**given)
        posterior = uq.fit(model, Batches(data.train, seed=seed), method, seed=seed, progress=False, **prior)
    return posterior, time.perf_counter() - begun


def rows_of(row: str, model: nn.Module, posterior: Any, part: Labelled, seconds: float) -> dict[str, Any]:
    """The three predictions of one posterior."""
    median, certain = uq.sparse.median(posterior), uq.sparse.median(posterior, certain=True)
    shared = {"density": uq.sparse.summary(posterior).density, "seconds": seconds}
    sparse = uq.sparse.model(model, certain, "masked")
    return {
        f"{row}: full average": scored(drawn(model, posterior), part) | {"density": 1.0, "seconds": seconds},
        f"{row}: median model": scored(drawn(model, median), part) | shared,
        f"{row}: its means": scored(by_itself(sparse), part) | shared,
    }


def study(name: str, data: Data, options: argparse.Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """All rows of one network and seed; of the first seed the entropy maps too."""
    model = new(name, seed)
    train(model, data.train, options.network_epochs, 1e-3, seed)
    rows: dict[str, dict[str, Any]] = {"network": scored(by_itself(model), data.test) | {"density": 1.0}}
    longer = pruned(model, 1.0, data.train, options.epochs, 1e-3, seed)
    rows["trained on"] = scored(by_itself(longer), data.test) | {"density": 1.0}
    maps = {"network": by_itself(model)}
    for row in options.rows or FITS:
        posterior, seconds = fitted(model, data, row, options, seed)
        own_rows = rows_of(row, model, posterior, data.test, seconds)
        density = own_rows[f"{row}: median model"]["density"]
        rows |= own_rows
        maps[f"{row}: full average"] = drawn(model, posterior)
        maps[f"{row}: median model"] = drawn(model, uq.sparse.median(posterior))
        if "post hoc" in row:
            twin = pruned(model, density, data.train, options.epochs, 1e-3, seed)
            rows[f"pruned as {row}"] = scored(by_itself(twin), data.test) | {"density": density}
        for key in own_rows:
            line = ", ".join(f"{measure} {value:.4g}" for measure, value in rows[key].items())
            print(f"{name}, seed {seed}: {key}: {line}", flush=True)
    if seed == options.seeds[0]:
        page = figure(maps, data, *((7, 20) if options.smoke else (61, 500)))
        save_figure(page, options.output / f"entropy_{name}.png", options.smoke)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Every network and seed, then the table."""
    command = parser(__doc__, "latent_binary", "few images, one epoch")
    add_options(command)
    add = command.add_argument
    add("--networks", nargs="+", choices=list(NETWORKS), default=["dense", "lenet"])
    add("--rows", nargs="+", choices=list(FITS), help="by default all")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--network-epochs", type=int, default=15, help="of the plain training")
    add("--epochs", type=int, default=20, help="from a trained network, and of pruned ones")
    add("--kl-weight", type=float, help="from a trained network; by default the method's")
    add("--scratch-epochs", type=int, default=30)
    add("--scratch-kl-weight", type=float, default=1.0)
    add("--images", type=int, help="to train on; by default all")
    options = parsed(command, arguments, network_epochs=1, epochs=1, scratch_epochs=1)
    with looked_at():
        data = load(options.data, download=options.download)
    data = data._replace(train=data.train.first(options.images))
    if options.smoke:
        data = data.first(200, 50, 60, None)
    results = {
        name: [study(name, data, options, seed) for seed in options.seeds] for name in options.networks
    }
    columns = ("accuracy", "NLL", "ECE", "density", "seconds")
    page = [table(by_row(seeds), ".4g", columns=columns, corner=name) for name, seeds in results.items()]
    report(options, "images", "\n\n".join(page), results)


if __name__ == "__main__":
    main()
