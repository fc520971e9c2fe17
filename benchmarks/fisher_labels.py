"""What the labels of the Fisher cost, and what they buy: drawn from the model's predictive, or the exact expectation.

For small networks and numbers of training samples, each posterior is fitted with 1, 3, 10 and 100 drawn labels a sample
and with ``fisher="exact"``. Cost is the fit's CPU time in multiples of a plain forward-backward pass over the same
batches. What it buys is the test NLL in nats through the linearised head with ``link="mc"``, at the prior precision of
the evidence and at the faithful one: the smallest at which the mean KL divergence of the prediction from the network's
own, on 200 training inputs, is at most 0.03 nats. Drawn labels are the mean over several seeds.

    python benchmarks/fisher_labels.py                      all networks; about twenty minutes on one core
    python benchmarks/fisher_labels.py --nets digits --json labels.json
    python benchmarks/fisher_labels.py --smoke              the digits MLP, few labels; seconds

Pairs of digits are two digits side by side, with 100 classes; their dense last layer is left out. FashionMNIST is read
from a folder with the four ``.gz`` files (``--fashion``, by default where Debian's package dataset-fashion-mnist puts
them) and left out where that is missing.
"""

from __future__ import annotations

import argparse
import gzip
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from _cases import Batches, plain_pass
from _common import machine, table, write_json
from _fits import fitted, tuned
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.posteriors.posterior import Posterior

BUDGET = 0.03
"""Nats per training input that the faithful prior may cost."""

LABELS: dict[str, dict[str, Any]] = {
    "1 drawn": {"fisher": "mc"},
    "3 drawn": {"fisher": "mc", "n_samples": 3},
    "10 drawn": {"fisher": "mc", "n_samples": 10},
    "100 drawn": {"fisher": "mc", "n_samples": 100},
    "exact": {"fisher": "exact"},
}
POSTERIORS: dict[str, dict[str, Any]] = {
    "inf": {"method": "inf"},
    "full, last layer": {"method": "full", "layers": "last"},
}
SHOWN = ("1 drawn", "3 drawn", "10 drawn", "exact")
FASHION = Path("/usr/share/datasets/fashion-mnist")


class Task(NamedTuple):
    """A trained network, its training batches, and held-out data."""

    model: nn.Module
    batches: Batches
    test: tuple[Tensor, Tensor]


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.tensor(pixels[order] / 16, dtype=torch.float32), torch.tensor(labels[order])


def _pairs(count: int, digits: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    (pixels, labels), size = digits, len(digits[1])
    left, right = (torch.randint(size, (count,), generator=generator) for _ in range(2))
    return torch.cat([pixels[left], pixels[right]], 1), 10 * labels[left] + labels[right]


def _mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def _resnet() -> nn.Module:
    stem = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(stem, nn.BatchNorm2d(8), nn.ReLU(), _Block(8, 16), _Block(16, 32), *pooled)


def trained(
    build: Callable[[], nn.Module], data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], epochs: int
) -> Task:
    """Train by Adam in batches of 64; the same network every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        optimiser = torch.optim.Adam(model.parameters(), 2e-3)
        for _ in range(epochs):
            for part in torch.randperm(len(data[1])).split(64):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(data[0][part]), data[1][part]).backward()
                optimiser.step()
    batches = list(zip(data[0].split(64), data[1].split(64), strict=True))
    return Task(model.eval(), batches, test)


def digits_task(samples: int) -> Task:
    """The digits of scikit-learn, and an MLP of two hidden layers of 32 units."""
    pixels, labels = _digits()
    return trained(
        lambda: _mlp(64, 32, 10), (pixels[:samples], labels[:samples]), (pixels[1200:], labels[1200:]), 60
    )


def pairs_task(samples: int) -> Task:
    """Pairs of digits with 100 classes, and an MLP of two hidden layers of 64 units."""
    pixels, labels = _digits()
    generator = torch.Generator().manual_seed(0)
    data = _pairs(samples, (pixels[:1200], labels[:1200]), generator)
    test = _pairs(300, (pixels[1200:], labels[1200:]), generator)
    return trained(lambda: _mlp(128, 64, 100), data, test, max(5, 80_000 // samples))


def fashion_task(
    samples: int, folder: Path, build: Callable[[], nn.Module] = _cnn, epochs: int | None = None
) -> Task:
    """Some images of FashionMNIST, and a small CNN or ResNet."""

    def read(part: str, count: int) -> tuple[Tensor, Tensor]:
        images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
        pixels = np.frombuffer(images, np.uint8).reshape(-1, 1, 28, 28)[:count]
        return torch.tensor(pixels / 255, dtype=torch.float32), torch.tensor(list(labels[:count]))

    return trained(build, read("train", samples), read("t10k", 500), epochs or max(5, 40_000 // samples))


def tasks(folder: Path) -> dict[str, Callable[[], Task]]:
    """By name: network, and number of training samples."""
    found: dict[str, Callable[[], Task]] = {
        "digits MLP, 300": lambda: digits_task(300),
        "digits MLP, 1200": lambda: digits_task(1200),
        "pairs MLP, 2000": lambda: pairs_task(2000),
        "pairs MLP, 16000": lambda: pairs_task(16_000),
    }
    if folder.exists():
        found |= {
            "fashion CNN, 1000": lambda: fashion_task(1000, folder),
            "fashion CNN, 4000": lambda: fashion_task(4000, folder),
            "fashion CNN, 16000": lambda: fashion_task(16_000, folder),
            "fashion ResNet, 2000": lambda: fashion_task(2000, folder, _resnet),
        }
    return found


def probabilities(task: Task, posterior: Posterior, inputs: Tensor) -> Tensor:
    """Of the linearised head with the Monte Carlo link."""
    predictor = uq.wrap(task.model, posterior, head="linearized", link="mc", n_draws=300)
    return torch.cat([predictor(part).probs for part in inputs.split(100)])


def faithful(task: Task, posterior: Posterior) -> float:
    """The smallest prior precision whose divergence on training inputs keeps to `BUDGET`: decades, then bisection."""
    inputs = torch.cat([x for x, _ in task.batches])[:200]
    with torch.no_grad():
        own = task.model(inputs).log_softmax(1)

    def keeps(exponent: float) -> bool:
        posterior.prior_precision = 10**exponent
        found = probabilities(task, posterior, inputs).clamp_min(1e-30).log()
        return float((own.exp() * (own - found)).sum(1).mean()) <= BUDGET

    high = next((e + 1 for e in range(6, -7, -1) if not keeps(e)), -6)
    low = high - 1.0
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return 10**high


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time, which other processes weigh on less, and the result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def quality(task: Task, posterior: Posterior) -> tuple[float, float]:
    """Test NLL in nats, and accuracy."""
    probs = probabilities(task, posterior, task.test[0])
    truth = probs.gather(1, task.test[1].unsqueeze(1)).clamp_min(1e-30)
    return float(-truth.log().mean()), float((probs.argmax(1) == task.test[1]).double().mean())


def measure(
    name: str, task: Task, posteriors: Sequence[str], labels: Sequence[str], seeds: int
) -> list[dict[str, Any]]:
    """One row per posterior and choice of labels."""
    with torch.no_grad():
        logits = task.model(task.test[0])
    plain = float(nn.functional.cross_entropy(logits, task.test[1]))
    accuracy = float((logits.argmax(1) == task.test[1]).double().mean())
    unit = median(cpu_seconds(lambda: plain_pass(task.model, task.batches))[0] for _ in range(5))
    rows: list[dict[str, Any]] = []
    for kind in posteriors if logits.shape[1] <= 10 else [own for own in posteriors if own == "inf"]:
        for choice in labels:
            found: list[dict[str, float]] = []
            for seed in range(1 if choice == "exact" else seeds):
                options = {**POSTERIORS[kind], **LABELS[choice], "seed": seed}
                spent, posterior = cpu_seconds(lambda o=options: fitted(task.model, task.batches, o))
                tuned(posterior)
                nll, right = quality(task, posterior)
                own = {"fit": spent / unit, "evidence NLL": nll, "evidence accuracy": right}
                own["evidence tau"] = float(posterior.prior_precision)
                posterior.prior_precision = own["faithful tau"] = faithful(task, posterior)
                own["faithful NLL"], own["faithful accuracy"] = quality(task, posterior)
                found.append(own)
            means = {key: sum(own[key] for own in found) / len(found) for key in found[0]}
            spread = max(own["evidence NLL"] for own in found) - min(own["evidence NLL"] for own in found)
            rows.append(
                {"network": name, "posterior": kind, "labels": choice}
                | {"plain NLL": plain, "plain accuracy": accuracy}
                | means
                | {"evidence NLL, range": spread}
            )
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", help="beginnings of names; all by default")
    parser.add_argument("--posteriors", nargs="+", choices=list(POSTERIORS), default=list(POSTERIORS))
    parser.add_argument("--labels", nargs="+", choices=list(LABELS), default=SHOWN)
    parser.add_argument("--seeds", type=int, default=3, help="of drawn labels")
    parser.add_argument("--fashion", type=Path, default=FASHION, help="folder of FashionMNIST's .gz files")
    parser.add_argument("--smoke", action="store_true", help="the smallest network, few labels")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.nets, options.labels, options.seeds = ["digits MLP, 300"], ["1 drawn", "exact"], 1
        options.posteriors = ["full, last layer"]
    about = machine()
    print(", ".join(f"{key}: {value}" for key, value in about.items()))
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # priors at an edge of the search are part of what is shown
        for name, make in tasks(options.fashion).items():
            if options.nets is None or any(name.startswith(own) for own in options.nets):
                rows += measure(name, make(), options.posteriors, options.labels, options.seeds)
                if options.json:
                    write_json(options.json, {"machine": about, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
