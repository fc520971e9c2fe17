"""Cost of a step of function-space inference, in multiples of a plain training step, and what memory it takes.

The plain step is what training takes: forward, backward and Adam over all parameters, on the same batch, in eval mode.
Both are timed in turn within one run: the loader that a fit reads makes a plain step before every batch it hands
over, so that the rest of the machine weighs on both alike. Medians over the steps, the first few left out.

    python benchmarks/function_space_cost.py                     CNN, LeNet, ResNet-18 at 32 px, ViT
    python benchmarks/function_space_cost.py --cases cnn --steps 30
    python benchmarks/function_space_cost.py --smoke             LeNet, a few steps; seconds

"n_context" is a quarter of the batch, as 32 points for 128 samples, or ``--n-context``. Memory is the peak of a fresh
process above one that only makes plain steps with Adam, in copies of the model's parameters: such a step holds four
copies itself (parameters, gradients, two moments), one with SGD two.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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

VARIANTS: dict[str, dict[str, Any]] = {
    "all layers": {},
    "all layers, SGD": {"optimizer": torch.optim.SGD},
    "frozen mean": {"train_mean": False},
    "body sampled": {"body": "sample"},
    "body certain": {"body": "certain"},
    "body certain, independent prior": {"body": "certain", "prior": "independent"},
    "last layer": {"layers": "last"},
}


class Case(NamedTuple):
    """A network and its images."""

    build: Callable[[Tensor], nn.Module]
    images: Callable[[int], Tensor]
    classes: int
    batch: int


def cnn(images: Tensor) -> nn.Module:
    """The network of Rudner et al. (2022), appendix D.2, for 28 x 28 grey images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
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
    settle_batchnorm(model, images)
    return model


def shared(name: str, batch: int) -> Case:
    """A case of all benchmarks, at a batch size of its own."""
    own = CASES[name]
    return Case(lambda images: network(name, images), own.images, own.classes, batch)


COSTS: dict[str, Case] = {
    "cnn": Case(cnn, digits, 10, 128),
    "lenet": shared("lenet", 128),
    "resnet18-32": shared("resnet18-32", 64),
    "resnet18-32, few": shared("resnet18-32", 8),  # images: its memory is that of the weights
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

    The dry run and the pass for the context read it too; only whole passes after these are steps.
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
        training = self._passes > 2
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


def fit(model: nn.Module, loader: Interleaved, variant: str, n_context: int) -> None:
    """One epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of more points than features, for a small network
        uq.fit(
            model,
            loader,
            method="function_space",
            epochs=1,
            n_context=n_context,
            progress=False,
            divergence=None,  # the training alone, not the search for a faithful scale after it
            **VARIANTS[variant],
        )


def measure(name: str, variants: Sequence[str], steps: int, n_context: int | None) -> list[Row]:
    """One line a variant."""
    model, batch = batch_of(name)
    points = n_context or max(1, COSTS[name].batch // 4)
    rows: list[Row] = []
    for variant in variants:
        plain = PlainSteps(batch_of(name)[0])
        loader = Interleaved(batch, steps + SETTLING, plain)
        fit(model, loader, variant, points)
        ratios = [b / a for a, b in zip(loader.plain, loader.fit, strict=True)][SETTLING:]
        rows.append(
            {
                "case": name,
                "variant": variant,
                "batch": COSTS[name].batch,
                "n_context": points,
                "plain step, ms": 1e3 * median(loader.plain[SETTLING:]),
                "step": median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
        print(f"{name}: {variant}: {rows[-1]['step']:.2f} plain steps", flush=True)
    return rows


def child(name: str, variant: str, n_context: int | None) -> dict[str, int]:
    """What a fresh process measures: its peak over two steps."""
    model, batch = batch_of(name)
    forget_peak()
    if variant == "plain":
        plain = PlainSteps(model)
        for _ in range(2):
            plain.step(*batch)
    else:
        points = n_context or max(1, COSTS[name].batch // 4)
        fit(model, Interleaved(batch, 2, None), variant, points)
    return {"peak": peak_memory(), "model": sum(4 * p.numel() for p in model.parameters())}


def measure_memory(name: str, variants: Sequence[str], n_context: int | None) -> dict[str, float]:
    """Peaks above the plain step's, in copies of the model."""

    def of(variant: str) -> dict[str, int]:
        command = [sys.executable, __file__, "--child", name, variant]
        command += [] if n_context is None else ["--n-context", str(n_context)]
        return least(lambda: fresh_process(command, exact=True), "peak", 2)

    plain = of("plain")
    return {variant: (of(variant)["peak"] - plain["peak"]) / plain["model"] for variant in variants}


def run(
    cases: Sequence[str], variants: Sequence[str], steps: int, n_context: int | None, memory: bool
) -> list[Row]:
    """Times, then memory."""
    rows: list[Row] = []
    for name in cases:
        lines = measure(name, variants, steps, n_context)
        copies = measure_memory(name, variants, n_context) if memory else {}
        rows += [line | ({"copies above plain": copies[line["variant"]]} if memory else {}) for line in lines]
    return rows


def smoke() -> list[Row]:
    """LeNet, four steps."""
    return run(["lenet"], ["all layers", "last layer"], 4, None, False)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(COSTS), default=list(COSTS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--n-context", type=int, help="context points a step; a quarter of the batch by default"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure it")
    parser.add_argument("--smoke", action="store_true", help="LeNet, four steps")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print("\n" + json.dumps(child(*options.child, options.n_context)))
        return
    about = machine()
    print(", ".join(f"{key}: {value}" for key, value in about.items()))
    if options.smoke:
        rows = smoke()
    else:
        rows = run(options.cases, options.variants, options.steps, options.n_context, not options.no_memory)
    print(f"\nA step in multiples of a plain training step\n\n{table(rows)}")
    if options.json:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
