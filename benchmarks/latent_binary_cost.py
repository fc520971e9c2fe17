"""Cost of a step of a latent binary training, in multiples of a plain training step, and what memory it takes.

Timed as in `function_space_cost.py`: a plain step with Adam and one of the training in turn, on the same batch.

    python benchmarks/latent_binary_cost.py                  the paper's dense network, LeNet, ResNet-18 at 32 px
    python benchmarks/latent_binary_cost.py --cases resnet18-224 vit-tiny --steps 6
    python benchmarks/latent_binary_cost.py --smoke          LeNet, four steps; seconds

The dense network 784-400-600-10 with batches of 100 does 600 floating-point operations with every weight in a plain
step, and a convolution some hundred times as many. What a latent binary step does with each weight beside its two
products (exponentials, gradients of three tensors, Adam for three) is the same for both, so that dense networks with
small batches are dear in plain steps. Memory is the peak above that of plain steps with Adam, in copies of the weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _cases import digits, photos
from _common import machine, table, write_json
from _memory import forget_peak, fresh_process, least, peak_memory
from function_space_cost import SETTLING, Case, Interleaved, PlainSteps, Row, shared
from torch import Tensor, nn

import posthoc_uq as uq

VARIANTS: dict[str, dict[str, Any]] = {
    "LRT": {},
    "flow, 2 x 50 units": {"flow": True, "flow_units": 50},
    "flow, 2 x 250 units": {"flow": True, "flow_units": 250},
}


def dense(images: Tensor) -> nn.Module:
    """The dense network of the paper's tables."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = (784, 400, 600)
        layers = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(600, 10)).eval()


COSTS: dict[str, Case] = {
    "dense": Case(dense, digits, 10, 100),
    "lenet": shared("lenet", 100),
    "resnet18-32": shared("resnet18-32", 64),
    "resnet18-224": Case(shared("resnet18-224", 8).build, photos(224), 1000, 8),
    "vit-tiny": Case(shared("vit-tiny", 8).build, photos(224), 1000, 8),
}


def batch_of(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A case's network, and one batch."""
    case = COSTS[name]
    images = case.images(case.batch)
    labels = torch.randint(case.classes, (case.batch,), generator=torch.Generator().manual_seed(0))
    return case.build(images[:32]), (images, labels)


def fit(model: nn.Module, loader: Interleaved, variant: str) -> None:
    """One epoch."""
    uq.fit(model, loader, uq.LatentBinary(epochs=1, **VARIANTS[variant]), progress=False)


def measure(name: str, variants: Sequence[str], steps: int) -> list[Row]:
    """One line a variant."""
    model, batch = batch_of(name)
    rows: list[Row] = []
    for variant in variants:
        loader = Interleaved(batch, steps + SETTLING, PlainSteps(batch_of(name)[0]))
        fit(model, loader, variant)
        taken = zip(loader.plain, loader.fit, strict=False)  # later passes are no steps
        ratios = [b / a for a, b in taken][SETTLING : SETTLING + steps]
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


def child(name: str, variant: str) -> dict[str, int]:
    """What a fresh process measures: its peak over two steps."""
    model, batch = batch_of(name)
    forget_peak()
    if variant == "plain":
        plain = PlainSteps(model)
        for _ in range(2):
            plain.step(*batch)
    else:
        fit(model, Interleaved(batch, 2, None), variant)
    return {"peak": peak_memory(), "model": sum(4 * p.numel() for p in model.parameters())}


def measure_memory(name: str, variants: Sequence[str]) -> dict[str, float]:
    """Peaks above the plain step's, in copies of the model."""

    def of(variant: str) -> dict[str, int]:
        return least(
            lambda: fresh_process([sys.executable, __file__, "--child", name, variant], exact=True), "peak", 2
        )

    plain = of("plain")
    return {variant: (of(variant)["peak"] - plain["peak"]) / plain["model"] for variant in variants}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(COSTS), default=["dense", "lenet", "resnet18-32"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure it")
    parser.add_argument("--smoke", action="store_true", help="LeNet, four steps")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print("\n" + json.dumps(child(*options.child)))
        return
    about = machine()
    print(", ".join(f"{key}: {value}" for key, value in about.items()))
    rows: list[Row] = []
    for name in ["lenet"] if options.smoke else options.cases:
        lines = measure(
            name,
            list(VARIANTS)[:2] if options.smoke else options.variants,
            4 if options.smoke else options.steps,
        )
        memory = not options.no_memory and not options.smoke
        copies = measure_memory(name, options.variants) if memory else {}
        rows += [line | ({"copies above plain": copies[line["variant"]]} if memory else {}) for line in lines]
    print(f"\nA step in multiples of a plain training step\n\n{table(rows)}")
    if options.json:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
