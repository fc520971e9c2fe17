"""A network trained by messages alone, without a gradient, on FashionMNIST.

    python -m recipes.message_passing.images             # 2,000 images; an hour of one core; --images 1000: half
    python -m recipes.message_passing.images --network perceptron --images 500 --epochs 2 --batch-size 25 \\
        --network-epochs 20                              # ten minutes
    python -m recipes.message_passing.images --smoke     # seconds

The paper's network for CIFAR-10, with fewer channels: two convolutions, max pooling, two convolutions,
max pooling, two linear layers, leaky ReLUs of slope 0.1, without padding. Or a perceptron 784-2000-2000-10, which has
the 5.6 million weights of the largest that the paper speaks of without giving its layers. Labels are argmax signals
with regularisation, batches have 128 images (an image of a batch takes 90 MB in the perceptron, as does every batch),
an epoch e makes ``ceil(e / 2)`` iterations, one image at a time, all as in the paper. Beside it the same network
trained by AdamW on the same images, for as many epochs as suit images held out. Foreign inputs are MNIST digits,
normalised as the clothes are. Writes a table and JSON to the output folder.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation.measurements import foreignness, title_of
from recipes.common import (
    in_order,
    in_random_order,
    looked_at,
    parsed,
    parser,
    predicted,
    report,
    table,
    train,
)
from recipes.fashion_mnist.data import Data, Labelled, add_options, load
from recipes.fashion_mnist.methods import from_logits

BATCH = 128


def network(channels: int, seed: int) -> nn.Sequential:
    """With `channels` in the first two convolutions, and twice as many in the others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, channels, 3),
            nn.LeakyReLU(0.1),
            nn.Conv2d(channels, channels, 3),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3),
            nn.LeakyReLU(0.1),
            nn.Conv2d(2 * channels, 2 * channels, 3),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * channels, 64),
            nn.LeakyReLU(0.1),
            nn.Linear(64, 10),
        ).eval()


def perceptron(units: int, seed: int) -> nn.Sequential:
    """With two hidden layers of so many units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, units),
            nn.LeakyReLU(0.1),
            nn.Linear(units, units),
            nn.LeakyReLU(0.1),
            nn.Linear(units, 10),
        ).eval()


def by_gradients(model: nn.Module, part: Labelled, held_out: Labelled, epochs: int, seed: int) -> nn.Module:
    """The network after the epochs of AdamW that suit the held-out images best."""
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    best, kept = float("inf"), model
    for _ in range(epochs):
        train(model, in_random_order(*part, BATCH, generator), nn.functional.cross_entropy, optimiser)
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(held_out.images), held_out.labels))
        if loss < best:
            best, kept = loss, copy.deepcopy(model)
    return kept


def row(predict: Callable[[Tensor], uq.ClassPrediction], data: Data, seconds: float) -> dict[str, float]:
    """Scores of predictions, and how well digits are told by entropy."""
    inside, outside = (predicted(predict, images, 250) for images in (data.test.images, data.digits))
    measured = inside.quality(data.test.labels, bins=15)
    names = ("accuracy", "top5_accuracy", "nll", "ece", "brier")
    told = foreignness(inside, outside)["entropy"]["auroc"]
    return {title_of(name): measured[name] for name in names} | {"AUROC, entropy": told, "seconds": seconds}


def study(data: Data, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The network by gradients, and by messages through the moments head and by drawn weights."""
    part = data.train.first(options.images)
    begun = time.perf_counter()
    built = network if options.network == "convolutional" else perceptron
    size = options.channels if options.network == "convolutional" else options.units
    plain = built(size, options.seed)
    plain = by_gradients(plain, part, data.validation, options.network_epochs, options.seed)
    seconds = time.perf_counter() - begun
    rows = {"AdamW": row(lambda images: from_logits(plain(images).unsqueeze(0)), data, seconds)}
    print(rows, flush=True)
    begun = time.perf_counter()
    model = built(size, options.seed)
    method = uq.MessagePassing(
        layers="all", signal="argmax", regularize=True, epochs=options.epochs, batch_size=options.batch_size
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        posterior = uq.fit(model, in_order(*part, BATCH), method, seed=options.seed, progress=False)
    seconds = time.perf_counter() - begun
    heads = {"moments": "moments", "drawn weights": "sampling"}
    if (
        options.network == "perceptron"
    ):  # 30 draws of its weights for each test image take as long as the training
        del heads["drawn weights"]
    for name, head in heads.items():
        rows[f"message passing, {name}"] = row(uq.wrap(model, posterior, head), data, seconds)
        print(rows, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    command = parser(__doc__, "message_passing", "few images")
    add_options(command)
    add = command.add_argument
    add("--network", choices=("convolutional", "perceptron"), default="convolutional")
    add("--images", type=int, default=2000, help="to train on")
    add("--channels", type=int, default=8, help="of the first two convolutions; the paper's 32")
    add("--units", type=int, default=2000, help="of each hidden layer of the perceptron")
    add("--batch-size", type=int, default=BATCH, help="of messages")
    add("--epochs", type=int, default=8, help="of messages; the paper's 25")
    add("--network-epochs", type=int, default=40, help="of AdamW, at most")
    add("--seed", type=int, default=0)
    options = parsed(command, arguments, images=20, channels=2, units=20, epochs=1, network_epochs=1)
    with looked_at():
        data = load(options.data, download=options.download)
    if options.smoke:
        data = data.first(40, 40, 40, 40)
    rows = study(data, options)
    name = "images" if options.network == "convolutional" else "perceptron"
    report(options, name, table(rows, ".4g", corner="trained by"), rows)


if __name__ == "__main__":
    main()
