"""How the cost of a fit grows with samples, width, layers, outputs and rank.

Every number is a median over interleaved repeats, each fit between two plain forward-backward passes. Slopes are
those of straight lines through the logarithms, by least squares: 1 is linear growth, 2 quadratic. Small networks
have costs that do not grow, so "last" also gives the slope between the two largest values. "/ plain" is the
slope of the multiples of the plain pass, which the rest of the machine disturbs least.

    python benchmarks/scaling.py                              samples, width, layers, outputs and rank
    python benchmarks/scaling.py --studies samples --repeats 5
    python benchmarks/scaling.py --smoke                      two values each; seconds

* samples: LeNet and a small residual network at 32 px. Besides the times, the peak memory of fresh processes
  above what they held before the fit (network, data), which must not grow.
* width: a perceptron with two hidden layers of equal width.
* layers: a perceptron with more and more hidden layers of 256 units.
* outputs: a perceptron with more and more outputs.
* rank: the small residual network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Any

import torch
from _cases import Batches, digits, lenet, plain_pass, settle_batchnorm
from _fits import Options, Trial, fitted, trial
from _harness import (
    MIB,
    forget_peak,
    fresh_process,
    held_memory,
    least,
    machine,
    output_file,
    peak_memory,
    table,
    write_json,
)
from torch import Tensor, nn

Row = dict[str, Any]
CLASSES = 10
BATCH = 64


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.around(images))


def small_resnet(width: int = 16) -> nn.Module:
    """A residual network of ten layers for 32 x 32 colour images."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, width, 2),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


def perceptron(width: int) -> nn.Module:
    """Two hidden layers on digits of 7 x 7, so that nearly all of it grows with their width."""
    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(49, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def deep_perceptron(layers: int) -> nn.Module:
    """So many hidden layers of 256 units."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 256), nn.ReLU(), *hidden, nn.Linear(256, CLASSES)
    )


def many_outputs(outputs: int) -> nn.Module:
    """A hidden layer of 64 units and so many outputs."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 64), nn.ReLU(), nn.Linear(64, outputs))


def smooth_images(count: int) -> Tensor:
    """Random images at 32 px whose neighbouring pixels are alike, as in photographs, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(count, 3, 6, 6, generator=generator)
    images = nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic")
    return images.add_(0.1 * torch.randn(images.shape, generator=generator))


NETS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "LeNet": (lambda width: lenet(), digits),
    "small ResNet": (small_resnet, smooth_images),
    "perceptron": (perceptron, digits),
    "deep perceptron": (deep_perceptron, digits),
    "many outputs": (many_outputs, digits),
}
SIZES = ("width", "layers", "outputs")
"""What grows by the number that a network is built with."""
METHODS: dict[str, dict[str, Any]] = {
    "diag": {"method": "diag"},
    "kfac": {"method": "kfac"},
    "inf": {"method": "inf"},
    "inf, exact basis": {"method": "inf", "basis": "exact"},
    "inf, sketch": {"method": "inf", "basis": "sketch"},
}


@dataclass(frozen=True)
class Study:
    """One thing that grows, on one network."""

    grows: str
    net: str
    values: tuple[int, ...]
    methods: tuple[str, ...]
    width: int = 8
    samples: int = 512

    def at(self, value: int) -> tuple[int, int, dict[str, Any]]:
        """Width, samples and options where that which grows has a value."""
        return (
            value if self.grows in SIZES else self.width,
            value if self.grows == "samples" else self.samples,
            {"rank": value} if self.grows == "rank" else {},
        )

    def smaller(self) -> Study:
        """The same in seconds."""
        values = {"samples": (64, 128), "rank": (5, 10), "layers": (1, 2)}.get(self.grows, (16, 32))
        return Study(self.grows, self.net, values, self.methods[-2:], 8, 128)


SAMPLES = (1024, 2048, 4096, 8192, 16384)
STUDIES = (
    Study("samples", "LeNet", SAMPLES, ("diag", "kfac", "inf")),
    Study("samples", "small ResNet", SAMPLES, ("diag", "kfac", "inf")),
    Study(
        "width",
        "perceptron",
        (64, 128, 256, 512, 1024),
        ("diag", "kfac", "inf, exact basis", "inf, sketch"),
        samples=1024,
    ),
    Study("layers", "deep perceptron", (2, 4, 8, 16), ("diag", "kfac", "inf"), samples=2048),
    Study("outputs", "many outputs", (100, 300, 1000, 3000), ("diag", "inf"), samples=2048),
    Study("rank", "small ResNet", (10, 30, 100, 300), ("inf, exact basis", "inf, sketch"), 32, 256),
)


def prepare(net: str, width: int, samples: int) -> tuple[nn.Module, Batches]:
    """A network with random weights in eval mode and its batches, the same every time."""
    build, make = NETS[net]
    images = make(samples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(width)
    settle_batchnorm(model, images[:64])
    labels = torch.randint(CLASSES, (samples,), generator=torch.Generator().manual_seed(0))
    return model, list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def slope(values: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms, by least squares."""
    x, y = [log(value) for value in values], [log(cost) for cost in costs]
    centre, mean = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - centre) * (b - mean) for a, b in zip(x, y, strict=True))
    return across / sum((a - centre) ** 2 for a in x)


def measure_times(study: Study, repeats: int) -> list[Row]:
    """One line per method and value: medians over interleaved repeats."""
    points: dict[tuple[str, int], tuple[nn.Module, Batches, Options]] = {}
    for value in study.values:
        width, samples, options = study.at(value)
        model, batches = prepare(study.net, width, samples)
        for method in study.methods:
            points[method, value] = (model, batches, METHODS[method] | options)
        plain_pass(model, batches)
    model, batches, options = points[study.methods[-1], study.values[0]]
    fitted(model, batches, options)  # pays for the imports and allocations that all others share
    trials: dict[tuple[str, int], list[Trial]] = {point: [] for point in points}
    for repeat in range(repeats):
        for (method, value), point in points.items():
            trials[method, value].append(trial(*point))
            said = f"{study.net}, {study.grows} {value}: {method}, repeat {repeat + 1} of {repeats}"
            print(f"{said}: {trials[method, value][-1]}", flush=True)
    return [
        {
            "study": study.grows,
            "net": study.net,
            "method": method,
            "value": value,
            "plain, s": median(t.plain for t in own),
            "sweeps, s": median(t.sweeps for t in own),
            "fit, s": median(t.fit for t in own),
            "sweeps": median(t.sweeps / t.plain for t in own),
            "sweeps + sparsify": median((t.sweeps + t.fixed) / t.plain for t in own),
            "fit": median(t.fit / t.plain for t in own),
        }
        for method in study.methods
        for value in study.values
        for own in [trials[method, value]]
    ]


def child(net: str, method: str, width: int, samples: int) -> dict[str, int]:
    """Peak memory of a fit in a fresh process, above what it held before."""
    model, batches = prepare(net, width, samples)
    fitted(model, batches[:1], METHODS[method])  # libraries take their own memory when first used
    forget_peak()
    before = held_memory()
    fitted(model, batches, METHODS[method])
    return {"peak": peak_memory() - before}


def measure_memory(study: Study, methods: Sequence[str], repeats: int) -> dict[tuple[str, int], float]:
    """Peak memory in MiB by method and value, the least of some repeats."""
    found: dict[tuple[str, int], float] = {}
    for method in methods:
        for value in study.values:
            width, samples, _ = study.at(value)
            command = [sys.executable, __file__, "--child", study.net, method, str(width), str(samples)]
            measured = least(lambda command=command: fresh_process(command), "peak", repeats)
            found[method, value] = measured["peak"] / MIB
            print(f"{study.net}, {study.grows} {value}: {method}: {found[method, value]:.1f} MiB", flush=True)
    return found


def slopes(rows: Sequence[Row]) -> list[Row]:
    """One line per study and method: how times grow, and by how much the peak memory varies."""
    lines: list[Row] = []
    for study, net, method in dict.fromkeys((row["study"], row["net"], row["method"]) for row in rows):
        own = [row for row in rows if (row["study"], row["net"], row["method"]) == (study, net, method)]
        line: Row = {"study": study, "net": net, "method": method}
        line["values"] = f"{own[0]['value']} to {own[-1]['value']}"
        values = [row["value"] for row in own]
        for cost in ("plain", "sweeps", "fit"):
            times = [row[f"{cost}, s"] for row in own]
            line[cost] = slope(values, times)
            line[f"{cost}, last"] = slope(values[-2:], times[-2:])
        for cost in ("sweeps", "fit"):
            line[f"{cost} / plain"] = slope(values, [row[cost] for row in own])
        peaks = [row["peak + MiB"] for row in own if "peak + MiB" in row]
        line["largest / least peak"] = max(peaks) / max(min(peaks), 1.0) if peaks else None
        lines.append(line)
    return lines


def run(studies: Sequence[Study], repeats: int, memory: Mapping[str, int] | None = None) -> list[Row]:
    """Measure the times of every study, and the memory of those over samples.

    Args:
        memory: methods to repeats in fresh processes; every method twice if None.
    """
    rows: list[Row] = []
    for study in studies:
        lines = measure_times(study, repeats)
        if study.grows == "samples":
            chosen = dict.fromkeys(study.methods, 2) if memory is None else memory
            for method in (m for m in chosen if m in study.methods):
                peaks = measure_memory(study, [method], chosen[method])
                for line in (line for line in lines if line["method"] == method):
                    line["peak + MiB"] = peaks[method, line["value"]]
        rows += lines
    return rows


def smoke() -> list[Row]:
    """Two small values of each study but one, and the memory of one method."""
    studies = [
        study.smaller() for study in STUDIES if (study.grows, study.net) != ("samples", "small ResNet")
    ]
    return run(studies, 1, memory={"inf": 1})


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = list(dict.fromkeys(study.grows for study in STUDIES))
    parser.add_argument("--studies", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure it")
    parser.add_argument("--smoke", action="store_true", help="two small values of each")
    parser.add_argument("--json", type=output_file, help="write the tables to this file")
    parser.add_argument(
        "--child", nargs=4, metavar=("NET", "METHOD", "WIDTH", "SAMPLES"), help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    if options.child:
        net, method, width, samples = options.child
        print("\n" + json.dumps(child(net, method, int(width), int(samples))))
        return
    about = machine()
    print(", ".join(f"{key}: {value}" for key, value in about.items()))
    if options.smoke:
        rows = smoke()
    else:
        studies = [study for study in STUDIES if study.grows in options.studies]
        rows = run(studies, options.repeats, {} if options.no_memory else None)
    lines = slopes(rows)
    print("\nSeconds, and multiples of one plain forward-backward pass over the same data\n")
    print(table(rows))
    print("\nSlopes of the seconds' logarithms\n")
    print(table(lines))
    print(f"\nload average at the end: {machine()['load average, 1 min']}")
    if options.json:
        write_json(options.json, {"machine": about, "rows": rows, "slopes": lines})


if __name__ == "__main__":
    main()
