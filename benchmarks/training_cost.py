"""Cost of a step of the methods that train, in multiples of a plain training step, and what memory it takes.

The plain step is what training takes: forward, backward and Adam over all parameters, on the same batch, in eval mode.
Both are timed in turn within one run: the loader that a fit reads makes a plain step before every batch it hands
over, so that the rest of the machine weighs on both alike. Medians over the steps, the first few left out.

    python benchmarks/training_cost.py --method function_space      CNN, LeNet, ResNet-18 at 32 px, ViT
    python benchmarks/training_cost.py --method utvi --cases resnet18-224 --steps 5
    python benchmarks/training_cost.py --method latent_binary --cases dense lenet resnet18-32
    python benchmarks/training_cost.py --method utvi --smoke        LeNet, a few steps; seconds

Of function space, "n_context" is a quarter of the batch, as 32 points for 128 samples, or ``--n-context``. Memory is
the peak of a fresh process above one that only makes plain steps with Adam, in copies of the model's parameters: such a
step holds four copies itself (parameters, gradients, two moments), one with SGD two.

The dense network 784-400-600-10 with batches of 100 does 600 floating-point operations with every weight in a plain
step, and a convolution some hundred times as many. What a latent binary step does with each weight beside its two
products (exponentials, gradients of three tensors, Adam for three) is the same for both, so that dense networks with
small batches are dear in plain steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _cases import CASES, digits, network, photos, settle_batchnorm
from _common import machine, table, write_json
from _memory import forget_peak, fresh_process, least, peak_memory
from torch import Tensor, nn

import posthoc_uq as uq

Row = dict[str, Any]
SETTLING = 3
"""Steps that are not counted: they pay for allocations that all others share."""

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "function_space": {
        "all layers": {},
        "last layer": {"layers": "last"},
        "all layers, SGD": {"optimizer": torch.optim.SGD},
        "frozen mean": {"train_mean": False},
        "body sampled": {"body": "sample"},
        "body certain": {"body": "certain"},
        "body certain, independent prior": {"body": "certain", "prior": "independent"},
    },
    "utvi": {
        "predictive": {"objective": "predictive"},
        "expected": {"objective": "expected"},
        "predictive, argmax pooling": {"objective": "predictive", "max_pool": "argmax"},
        "predictive, exact ReLU": {"objective": "predictive", "relu": "exact"},
        "predictive, frozen mean": {"objective": "predictive", "train_mean": False},
    },
    "latent_binary": {
        "LRT": {},
        "flow, 2 x 100 units": {"flow": True},
        "flow, 2 x 250 units": {"flow": True, "flow_units": 250},
    },
}
"""By method: the options of `posthoc_uq.fit` by the name of the row."""


class Case(NamedTuple):
    """A network and its images."""

    build: Callable[[Tensor], nn.Module]
    images: Callable[[int], Tensor]
    classes: int
    batch: int


def _seeded(build: Callable[[], nn.Module], images: Tensor) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    settle_batchnorm(model, images)
    return model


def cnn(images: Tensor) -> nn.Module:
    """The network of Rudner et al. (2022), appendix D.2, for 28 x 28 grey images."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(3136, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    return _seeded(build, images)


def dense(images: Tensor) -> nn.Module:
    """784-400-600-10, the dense network of the latent binary paper."""

    def build() -> nn.Module:
        hidden = [m for a, b in pairwise((784, 400, 600)) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(600, 10))

    return _seeded(build, images)


def shared(name: str, batch: int) -> Case:
    """A case of all benchmarks, at a batch size of its own."""
    case = CASES[name]
    return Case(lambda images: network(name, images), case.images, case.classes, batch)


COSTS: dict[str, Case] = {
    "cnn": Case(cnn, digits, 10, 128),
    "dense": Case(dense, digits, 10, 100),
    "lenet": shared("lenet", 128),
    "resnet18-32": shared("resnet18-32", 64),
    "resnet18-224": Case(shared("resnet18-224", 8).build, photos(224), 1000, 8),
    "vit-tiny": Case(shared("vit-tiny", 16).build, photos(224), 1000, 16),
}


class PlainSteps:
    """A model in training by Adam, one step at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimiser = torch.optim.Adam(model.parameters(), 1e-9, fused=True)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Forward, backward, update."""
        self.optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.model(images), labels).backward()
        self.optimiser.step()


class Interleaved:
    """A loader of one batch again and again, that times what its reader does with each, and a plain step in between.

    The dry run and the pass that counts the samples read it too; the third pass are the steps of the training.
    """

    def __init__(self, batch: tuple[Tensor, Tensor], steps: int, plain: PlainSteps | None) -> None:
        self._batch, self._steps, self._plain = batch, steps, plain
        self._passes = 0
        self.plain: list[float] = []
        self.fit: list[float] = []

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._passes += 1
        training = self._passes == 3
        for _ in range(self._steps if training else 1):
            if training and self._plain is not None:
                start = time.perf_counter()
                self._plain.step(*self._batch)
                self.plain.append(time.perf_counter() - start)
            start = time.perf_counter()
            yield self._batch
            if training:
                self.fit.append(time.perf_counter() - start)


def batch_of(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A case's network, and one batch."""
    case = COSTS[name]
    images = case.images(case.batch)
    labels = torch.randint(case.classes, (case.batch,), generator=torch.Generator().manual_seed(0))
    return case.build(images[:32]), (images, labels)


def fit(model: nn.Module, loader: Interleaved, options: argparse.Namespace, variant: str, batch: int) -> None:
    """One epoch, without the search for a faithful scale after it."""
    given = dict(VARIANTS[options.method][variant])
    if options.method == "function_space":
        given["n_context"] = options.n_context or max(1, batch // 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of few steps, of more points than features
        uq.fit(model, loader, options.method, epochs=1, progress=False, divergence=None, **given)


def measure(name: str, variants: Sequence[str], steps: int, options: argparse.Namespace) -> list[Row]:
    """One line a variant."""
    model, batch = batch_of(name)
    rows: list[Row] = []
    for variant in variants:
        loader = Interleaved(batch, steps + SETTLING, PlainSteps(batch_of(name)[0]))
        fit(model, loader, options, variant, COSTS[name].batch)
        ratios = [b / a for a, b in zip(loader.plain, loader.fit, strict=True)][SETTLING:]
        rows.append(
            {
                "case": name,
                "variant": variant,
                "batch": COSTS[name].batch,
                "plain step, ms": 1e3 * median(loader.plain[SETTLING:]),
                "step": median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
        print(f"{name}: {variant}: {rows[-1]['step']:.2f} plain steps", flush=True)
    return rows


def child(name: str, variant: str, options: argparse.Namespace) -> dict[str, int]:
    """What a fresh process measures: its peak over two steps."""
    model, batch = batch_of(name)
    forget_peak()
    if variant == "plain":
        plain = PlainSteps(model)
        for _ in range(2):
            plain.step(*batch)
    else:
        fit(model, Interleaved(batch, 2, None), options, variant, COSTS[name].batch)
    return {"peak": peak_memory(), "model": sum(4 * p.numel() for p in model.parameters())}


def measure_memory(name: str, variants: Sequence[str], options: argparse.Namespace) -> dict[str, Row]:
    """Peaks above the plain step's in copies of the model, and as multiples of the plain step's."""

    def of(variant: str) -> dict[str, int]:
        command = [sys.executable, __file__, "--method", options.method, "--child", name, variant]
        command += [] if options.n_context is None else ["--n-context", str(options.n_context)]
        return least(lambda: fresh_process(command, exact=True), "peak", 2)

    plain = of("plain")
    peaks = {variant: of(variant)["peak"] for variant in variants}
    return {
        variant: {
            "copies above plain": (peak - plain["peak"]) / plain["model"],
            "peak / plain": peak / plain["peak"],
        }
        for variant, peak in peaks.items()
    }


def run(options: argparse.Namespace) -> list[Row]:
    """Times, then memory."""
    variants, cases, steps = options.variants or list(VARIANTS[options.method]), options.cases, options.steps
    if options.smoke:
        variants, cases, steps = list(VARIANTS[options.method])[:2], ["lenet"], 4
    rows: list[Row] = []
    for name in cases:
        lines = measure(name, variants, steps, options)
        memory = not (options.no_memory or options.smoke)
        taken = measure_memory(name, variants, options) if memory else {}
        rows += [line | taken.get(line["variant"], {}) for line in lines]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=list(VARIANTS), default="function_space")
    parser.add_argument(
        "--cases", nargs="+", choices=list(COSTS), default=["cnn", "lenet", "resnet18-32", "vit-tiny"]
    )
    parser.add_argument("--variants", nargs="+", help="by default all of the method")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--n-context", type=int, help="of function space; a quarter of the batch by default")
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure it")
    parser.add_argument("--smoke", action="store_true", help="LeNet, four steps")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    stray = [name for name in options.variants or () if name not in VARIANTS[options.method]]
    if stray:
        parser.error(f"--variants of {options.method} are {list(VARIANTS[options.method])}, not {stray}")
    if options.child:
        print("\n" + json.dumps(child(*options.child, options)))
        return
    about = machine()
    print(", ".join(f"{key}: {value}" for key, value in about.items()))
    rows = run(options)
    print(f"\nA step in multiples of a plain training step\n\n{table(rows)}")
    if options.json:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
