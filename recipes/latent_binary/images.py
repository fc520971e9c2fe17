"""FashionMNIST with sparse networks: latent binary ones, from a trained network and from scratch, beside pruning.

    python recipes/latent_binary/images.py --networks dense --seeds 0     # as the README shows it
    python recipes/latent_binary/images.py --networks lenet --epochs 10
    python recipes/latent_binary/images.py --smoke

For every posterior three predictions: averaged over the full posterior, averaged over the median probability model (the
weights that are more likely on than off), and by that model's means, one sparse network. `entropy_<network>.png` maps
the predictive entropy over a plane of images through three classes. Magnitude pruning with
training on, `torch.nn.utils.prune`, keeps as many weights as the median model does.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import OUTPUT
from data import DEBIAN, Data, Labelled, load
from entropy_maps import Probabilities, figure
from networks import NETWORKS, Batches, new, pruned, train
from smoke import marked
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation.metrics import expected_calibration_error

SAMPLES = 20
"""Draws of the weights for a prediction."""

FITS: dict[str, dict[str, Any]] = {
    "LRT, post hoc": {},
    "flow, post hoc": {"flow": True},
    "LRT, from scratch": {"start": "random"},
    "flow, from scratch": {"start": "random", "flow": True},
}
"""The rows of the table, and the options of `posthoc_uq.LatentBinary` beside those of the command line."""


def scores(probabilities: Tensor, part: Labelled) -> dict[str, float]:
    """Accuracy in percent, NLL in nats, expected calibration error."""
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


def scored(predict: Probabilities, part: Labelled) -> dict[str, float]:
    """Of a prediction."""
    return scores(torch.cat([predict(x) for x in part.images.split(1000)]), part)


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
            print(f"{name}, seed {seed}: {key}: {_line(rows[key])}", flush=True)
    if seed == options.seeds[0]:
        options.output.mkdir(parents=True, exist_ok=True)
        page = figure(maps, data, *((7, 20) if options.smoke else (61, 500)))
        page.savefig(options.output / f"entropy_{name}.png", dpi=60 if options.smoke else 110)
    return rows


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in row.items() if value is not None)


def table(results: dict[str, list[dict[str, dict[str, Any]]]]) -> str:
    """Means over the seeds, as Markdown."""
    keys = ("accuracy", "NLL", "ECE", "density", "seconds")
    lines = [f"| network | posterior | {' | '.join(keys)} |", "| --- | --- |" + " --- |" * len(keys)]
    for name, seeds in results.items():
        for row in seeds[0]:
            cells: list[str] = []
            for key in keys:
                values = [one[row][key] for one in seeds if one.get(row, {}).get(key) is not None]
                cells.append(f"{sum(values) / len(values):.4g}" if values else "")
            lines.append(f"| {name} | {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Every network and seed, then the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help="torchvision's folder, or one with .gz files"
    )
    parser.add_argument(
        "--download", action="store_true", help="let torchvision fetch FashionMNIST to --data"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["dense", "lenet"])
    parser.add_argument("--rows", nargs="+", choices=list(FITS), help="by default all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--network-epochs", type=int, default=15, help="of the plain training")
    parser.add_argument("--epochs", type=int, default=20, help="from a trained network, and of pruned ones")
    parser.add_argument("--kl-weight", type=float, help="from a trained network; by default the method's")
    parser.add_argument("--scratch-epochs", type=int, default=30)
    parser.add_argument("--scratch-kl-weight", type=float, default=1.0)
    parser.add_argument("--images", type=int, help="to train on; by default all")
    parser.add_argument("--smoke", action="store_true", help="few images, one epoch")
    options = parser.parse_args()
    data = load(options.data, options.output / "data", download=options.download)
    if options.images is not None:
        data = data._replace(train=Labelled(*(tensor[: options.images] for tensor in data.train)))
    if options.smoke:
        few = {"train": 200, "validation": 50, "test": 60}
        data = data._replace(**{k: Labelled(*(t[:n] for t in getattr(data, k))) for k, n in few.items()})
        options.network_epochs = options.epochs = options.scratch_epochs = 1
    results = {
        name: [study(name, data, options, seed) for seed in options.seeds] for name in options.networks
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "images.json").write_text(json.dumps(results, indent=1))
    page = marked(table(results), options.smoke)
    (options.output / "images.md").write_text(page + "\n")
    print(page)


if __name__ == "__main__":
    main()
