"""Cost of a step of variational inference by propagated moments, in multiples of a plain training step, and its memory.

Timed and measured as in `function_space_cost.py`: in turns with plain steps by Adam, in one run; memory is the peak of
a fresh process above one that makes plain steps, in copies of the model's parameters.

    python benchmarks/utvi_cost.py                         CNN, LeNet, ResNet-18 at 32 px and at 224 px
    python benchmarks/utvi_cost.py --cases resnet18 --steps 5
    python benchmarks/utvi_cost.py --smoke                 LeNet, a few steps; seconds
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torchvision
from _cases import photos, settle_batchnorm
from _common import machine, table, write_json
from _memory import forget_peak, fresh_process, least, peak_memory
from function_space_cost import COSTS, SETTLING, Case, Interleaved, PlainSteps
from torch import Tensor, nn

import posthoc_uq as uq

Row = dict[str, Any]

VARIANTS: dict[str, dict[str, Any]] = {
    "predictive": {"objective": "predictive"},
    "expected": {"objective": "expected"},
    "predictive, argmax pooling": {"objective": "predictive", "max_pool": "argmax"},
    "predictive, exact ReLU": {"objective": "predictive", "relu": "exact"},
    "predictive, frozen mean": {"objective": "predictive", "train_mean": False},
}


def resnet18(images: Tensor) -> nn.Module:
    """torchvision's, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torchvision.models.resnet18()
    settle_batchnorm(model, images)
    return model


CASES: dict[str, Case] = {
    **{name: COSTS[name] for name in ("cnn", "lenet", "resnet18-32")},
    "resnet18": Case(resnet18, photos(224), 1000, 8),
}


def batch_of(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A case's network, and one batch."""
    case = CASES[name]
    images = case.images(case.batch)
    labels = torch.randint(case.classes, (case.batch,), generator=torch.Generator().manual_seed(0))
    return case.build(images[:32]), (images, labels)


def fit(model: nn.Module, loader: Interleaved, variant: str) -> None:
    """One epoch."""
    uq.fit(model, loader, uq.UTVI(epochs=1, **VARIANTS[variant]), divergence=None, progress=False)


def measure(name: str, variants: Sequence[str], steps: int) -> list[Row]:
    """One line a variant."""
    model, batch = batch_of(name)
    rows: list[Row] = []
    for variant in variants:
        plain = PlainSteps(batch_of(name)[0])
        loader = Interleaved(batch, steps + SETTLING, plain)
        fit(model, loader, variant)
        ratios = [b / a for a, b in zip(loader.plain, loader.fit, strict=True)][SETTLING : SETTLING + steps]
        rows.append(
            {
                "case": name,
                "variant": variant,
                "batch": CASES[name].batch,
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


def measure_memory(name: str, variants: Sequence[str]) -> dict[str, dict[str, float]]:
    """Peaks above the plain step's in copies of the model, and as a multiple of the plain step's."""

    def of(variant: str) -> dict[str, int]:
        command = [sys.executable, __file__, "--child", name, variant]
        return least(lambda: fresh_process(command, exact=True), "peak", 1)

    plain = of("plain")
    peaks = {variant: of(variant)["peak"] for variant in variants}
    return {
        variant: {
            "copies above plain": (peak - plain["peak"]) / plain["model"],
            "peak / plain": peak / plain["peak"],
        }
        for variant, peak in peaks.items()
    }


def run(cases: Sequence[str], variants: Sequence[str], steps: int, memory: bool) -> list[Row]:
    """Times, then memory."""
    rows: list[Row] = []
    for name in cases:
        lines = measure(name, variants, steps)
        taken = measure_memory(name, variants) if memory else {}
        rows += [line | taken.get(line["variant"], {}) for line in lines]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=10)
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
    if options.smoke:
        rows = run(["lenet"], ["predictive", "expected"], 4, False)
    else:
        rows = run(options.cases, options.variants, options.steps, not options.no_memory)
    print(f"\nA step in multiples of a plain training step\n\n{table(rows)}")
    if options.json:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
