"""What outputs with positions cost: a segmentation network whose last layer has a posterior, through every head.

    OMP_NUM_THREADS=1 python benchmarks/positions_cost.py            256 x 256 pixels, 21 classes; a minute
    OMP_NUM_THREADS=1 python benchmarks/positions_cost.py --size 512 --only sampling --draws 30
    OMP_NUM_THREADS=1 python benchmarks/positions_cost.py --smoke    small images; seconds

For one image, in multiples of the plain forward passes before and after it: the time of a prediction, and of the
functional variance alone (before the link). Memory is the peak above what the process held before, in multiples of one
draw's outputs in float32 (classes times pixels times four bytes); a plain pass is the first row. The fits, of the last
layer and of all layers, are in multiples of a forward and backward pass over one image: what every further image costs,
and what a fit costs beside that.
Weights are random: they have no influence on time or memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import Row, machine, single_threaded, table, write_json
from _memory import forget_peak, held_memory, peak_memory
from torch import nn

import posthoc_uq as uq

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling": ("sampling", {}),
    "linearized, probit": ("linearized", {"link": "probit"}),
    "moments, probit": ("moments", {"link": "probit"}),
    "linearized, 100 positions": ("linearized", {"positions": list(range(100))}),
}
"""Name in the table to head and options."""


def network(classes: int) -> nn.Sequential:
    """A body of convolutions at full resolution, and a pointwise convolution as its last layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths = (3, 32, 64, 64)
        body: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            body += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*body, nn.Conv2d(widths[-1], classes, 1)).eval()


def peak(work: Callable[[], Any], unit: float) -> float:
    """The peak of memory of some work above what was held, in units of so many bytes."""
    work()  # the first call settles what is kept
    forget_peak()
    held = held_memory()
    work()
    return (peak_memory() - held) / unit


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of some work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(work: Callable[[], Any], plain: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Processor time of some work, and the same over that of the plain passes before and after it; medians."""
    times = [(seconds(plain), seconds(work), seconds(plain)) for _ in range(repeats)]
    return median(own for _, own, _ in times), median(
        2 * own / (before + after) for before, own, after in times
    )


def rows(size: int, classes: int, draws: int, method: str, only: str | None, repeats: int) -> list[Row]:
    """One line a head."""
    model, image = network(classes), torch.rand(1, 3, size, size)
    unit = 4.0 * classes * size**2
    labels = torch.randint(0, classes, (1, size, size))

    def plain() -> None:
        with torch.no_grad():
            model(image)

    memory = peak(plain, unit)
    found: list[Row] = [
        {
            "what": "plain pass",
            "seconds": interleaved(plain, plain, repeats)[0],
            "passes": 1.0,
            "memory": memory,
        }
    ]
    posterior = uq.fit(model, [(image, labels)], method, layers="last", prior_precision=100.0, progress=False)
    for name, (head, options) in HEADS.items():
        if only is not None and head != only:
            continue
        options = options | ({"n_samples": draws} if head == "sampling" else {})
        predictor: Any = uq.wrap(model, posterior, head, **options)
        works: dict[str, Callable[[], Any]] = {"": lambda p=predictor: p(image)}
        if hasattr(predictor, "functional_variance"):
            works["variance, "] = lambda p=predictor: p.functional_variance(image)
        line: dict[str, Any] = {"what": name}
        with torch.no_grad():
            for what, work in works.items():
                memory = peak(work, unit)
                taken, passes = interleaved(work, plain, repeats)
                line |= {f"{what}seconds": taken, f"{what}passes": passes, f"{what}memory": memory}
        found.append(line)
        print(found[-1], flush=True)
    return found


def fits(size: int, classes: int, method: str, images: int) -> list[Row]:
    """One line for the last layer, and one for all layers."""
    model = network(classes)
    data = [(torch.rand(1, 3, size, size), torch.randint(0, classes, (1, size, size))) for _ in range(images)]

    def plain() -> None:
        for image, labels in data:
            model.zero_grad()
            nn.functional.cross_entropy(model(image), labels).backward()
        model.zero_grad()

    plain()
    found: list[Row] = []
    for layers in ("last", "all"):

        def fit(part: list[tuple[torch.Tensor, torch.Tensor]], layers: str = layers) -> None:
            uq.fit(model, part, method, layers=layers, prior_precision=100.0, progress=False)

        before = seconds(plain)
        first, all_of_them = seconds(lambda: fit(data[:1])), seconds(lambda: fit(data))
        unit = (before + seconds(plain)) / 2 / images
        further = (all_of_them - first) / (images - 1)
        found.append(
            {
                "fit": f"{method}, layers={layers!r}",
                "seconds a plain pass": unit,
                "passes a further image": further / unit,
                "passes beside": (first - further) / unit,
            }
        )
        print(found[-1], flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--classes", type=int, default=21)
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--method", default="inf")
    parser.add_argument("--only", help="one head")
    parser.add_argument("--repeats", type=int, default=5, help="of which medians are taken")
    parser.add_argument("--smoke", action="store_true", help="small images")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    size = 24 if options.smoke else options.size
    with single_threaded():
        found = rows(
            size,
            options.classes,
            options.draws,
            options.method,
            options.only,
            1 if options.smoke else options.repeats,
        )
        fitted = fits(size, options.classes, options.method, 3 if options.smoke else 6)
    print(table(found))
    print(table(fitted))
    if options.json is not None:
        write_json(options.json, {"machine": machine(), "rows": found, "fits": fitted})


if __name__ == "__main__":
    main()
