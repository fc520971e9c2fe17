"""A convolutional network trained by messages alone, without a gradient, on FashionMNIST.

    python recipes/message_passing/images.py             # 2,000 images; half an hour of one core
    python recipes/message_passing/images.py --smoke     # seconds

The paper's network for CIFAR-10, with fewer channels: two convolutions, max pooling, two convolutions,
max pooling, two linear layers, leaky ReLUs of slope 0.1, without padding. Labels are argmax signals with
regularisation, batches have 128 images, an epoch e makes ``ceil(e / 2)`` iterations, one image at a time, all as in the
paper. Beside it the same network trained by AdamW on the same images, for as many epochs as suit images held out.
Foreign inputs are MNIST digits, normalised as the clothes are. Writes a table and JSON to the output folder.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.evaluation.measurements import foreignness

RECIPES = Path(__file__).resolve().parents[1]
sys.path += [str(RECIPES), str(RECIPES / "fashion_mnist")]  # what all recipes share, and data

from data import DEBIAN, Data, Labelled, load  # noqa: E402
from smoke import marked  # noqa: E402

OUTPUT = RECIPES / "output" / "message_passing"
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


def by_gradients(model: nn.Module, part: Labelled, held_out: Labelled, epochs: int, seed: int) -> nn.Module:
    """The network after the epochs of AdamW that suit the held-out images best."""
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    best, kept = float("inf"), model
    for _ in range(epochs):
        for chosen in torch.randperm(len(part.labels), generator=generator).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(part.images[chosen]), part.labels[chosen]).backward()
            optimiser.step()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(held_out.images), held_out.labels))
        if loss < best:
            best, kept = loss, copy.deepcopy(model)
    return kept


def predicted(predictor: nn.Module, images: Tensor) -> uq.ClassPrediction:
    """Of a head, or of a plain network."""
    with torch.no_grad():
        parts = [predictor(part) for part in images.split(250)]
    if isinstance(parts[0], Tensor):
        return uq.ClassPrediction.from_logits(torch.cat(parts).unsqueeze(0))
    return uq.ClassPrediction.cat(parts)


def row(predictor: nn.Module, data: Data, seconds: float) -> dict[str, float]:
    """Scores of predictions, and how well digits are told by entropy."""
    inside, outside = (predicted(predictor, images) for images in (data.test.images, data.digits))
    measured = inside.quality(data.test.labels, bins=15)
    names = ("accuracy", "top-5 accuracy", "NLL", "ECE", "Brier")
    told = foreignness(inside, outside)["entropy"]["AUROC"]
    return {name: measured[name] for name in names} | {"AUROC, entropy": told, "seconds": seconds}


def study(data: Data, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The network by gradients, and by messages through the moments head and by drawn weights."""
    train = Labelled(data.train.images[: options.images], data.train.labels[: options.images])
    begun = time.perf_counter()
    plain = network(options.channels, options.seed)
    plain = by_gradients(plain, train, data.validation, options.network_epochs, options.seed)
    rows = {"AdamW": row(plain, data, time.perf_counter() - begun)}
    begun = time.perf_counter()
    model = network(options.channels, options.seed)
    method = uq.MessagePassing(
        layers="all", signal="argmax", regularize=True, epochs=options.epochs, batch_size=BATCH
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loader = DataLoader(TensorDataset(*train), batch_size=BATCH)
        posterior = uq.fit(model, loader, method, seed=options.seed, progress=False)
    seconds = time.perf_counter() - begun
    for name, head in (("moments", "moments"), ("drawn weights", "sampling")):
        rows[f"message passing, {name}"] = row(uq.wrap(model, posterior, head), data, seconds)
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    """As Markdown."""
    columns = list(next(iter(rows.values())))
    lines = [f"| trained by | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name, own in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{own[column]:.4g}' for column in columns)} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help="torchvision's folder, or one with .gz files"
    )
    parser.add_argument("--images", type=int, default=2000, help="to train on")
    parser.add_argument(
        "--channels", type=int, default=8, help="of the first two convolutions; the paper's 32"
    )
    parser.add_argument("--epochs", type=int, default=8, help="of messages; the paper's 25")
    parser.add_argument("--network-epochs", type=int, default=40, help="of AdamW, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--smoke", action="store_true", help="few images")
    options = parser.parse_args()
    data = load(options.data, options.output / "data")
    if options.smoke:
        options.images, options.channels, options.epochs, options.network_epochs = 20, 2, 1, 1
        few = (
            Labelled(part.images[:40], part.labels[:40]) for part in (data.train, data.validation, data.test)
        )
        data = Data(*few, data.digits[:40])
    options.output.mkdir(parents=True, exist_ok=True)
    rows = study(data, options)
    (options.output / "images.json").write_text(json.dumps(rows, indent=1) + "\n")
    page = marked(table(rows), options.smoke)
    (options.output / "images.md").write_text(page + "\n")
    print(page)


if __name__ == "__main__":
    main()
