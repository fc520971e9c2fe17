"""BackPACK's own extensions beside this library's sweep, for the same diagonal and Kronecker sums.

    python benchmarks/backpack_engine.py              four networks; two minutes
    python benchmarks/backpack_engine.py --csv FILE   also writes the rows

Each row is the processor time of one thread in plain passes (forward, backward, the same batches): median, least and
most of interleaved repeats. One label is drawn a sample. "ours" is a whole fit with a given prior precision, with its
dry run and decompositions. "BackPACK" is the backward pass with the extension and nothing more: a fit by it would take
longer. Convolutions have different Kronecker factors: ours are of whole gradients, BackPACK's of positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _harness import output_file, processor_seconds, single_threaded, table, write_csv
from backpack import backpack, disable, extend
from backpack.extensions import KFAC, DiagGGNMC, SumGradSquared
from torch import Tensor, nn

import posthoc_uq as uq

CLASSES = 10
COMPARED: dict[str, tuple[uq.Method, Callable[[], Any]]] = {
    "diagonal of targets": (uq.Diagonal(fisher="empirical"), SumGradSquared),
    "diagonal of drawn labels": (uq.Diagonal(fisher="mc"), DiagGGNMC),
    "Kronecker factors of drawn labels": (uq.KFAC(fisher="mc"), KFAC),
}
"""Our method and BackPACK's extension."""


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "perceptron": (perceptron, (64,), 4_096),
    "LeNet, 28 px": (lenet, (1, 28, 28), 512),
    "CNN of three convolutions, 32 px": (small_cnn, (3, 32, 32), 256),
    "resnet18, 32 px": (resnet18, (3, 32, 32), 32),
}
"""The network, the shape of an input, and how many inputs."""


def batches(shape: tuple[int, ...], samples: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *shape, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    size = min(samples, 128)
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def run(network: nn.Module, data: list[tuple[Tensor, Tensor]], *extensions: Any) -> None:
    """Forward and backward passes over the data, with BackPACK's extensions where some are given."""
    loss = nn.CrossEntropyLoss(reduction="sum")
    with backpack(*extensions) if extensions else disable():
        if extensions:
            loss = extend(loss)
        for inputs, labels in data:
            network.zero_grad()
            loss(network(inputs), labels).backward()


def passes(work: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """The time of some work in that of plain passes before and after it."""
    before, taken, after = map(processor_seconds, (plain, work, plain))
    return 2 * taken / (before + after)


def row(name: str, sums: str, repeats: int) -> dict[str, Any]:
    (make, shape, samples), (method, extension) = NETWORKS[name], COMPARED[sums]
    torch.manual_seed(0)
    network, theirs, data = make().eval(), make().eval(), batches(shape, samples)
    works: dict[str, Callable[[], Any]] = {
        "ours": partial(uq.fit, network, data, method, prior_precision=1.0, progress=False)
    }
    refused = ""
    try:
        theirs = extend(theirs, use_converter=name.startswith("resnet"))
        run(theirs, data, extension())
        works["BackPACK"] = lambda: run(theirs, data, extension())
    except NotImplementedError as error:
        refused = str(error).splitlines()[0]
    works["ours"]()  # what is prepared once
    plain = partial(run, network, data)
    found: dict[str, list[float]] = {key: [] for key in works}
    for _ in range(repeats):
        for key, work in works.items():
            found[key].append(passes(work, plain))
    result: dict[str, Any] = {"network": name, "samples": samples, "sums": sums}
    for key in ("ours", "BackPACK"):
        taken = found.get(key)
        result[key] = round(median(taken), 2) if taken else None
        result[f"{key}, least"] = round(min(taken), 2) if taken else None
        result[f"{key}, most"] = round(max(taken), 2) if taken else None
    return result | {"refused": refused}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--csv", type=output_file, help="also write the rows there")
    arguments = parser.parse_args()
    with single_threaded():
        found = [row(name, sums, arguments.repeats) for name in NETWORKS for sums in COMPARED]
    print(table(found))
    if path := arguments.csv:
        write_csv(Path(path), found)


if __name__ == "__main__":
    main()
