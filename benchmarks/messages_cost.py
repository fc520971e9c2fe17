"""Cost of a last layer's posterior by message passing, in passes of the network over the same data.

    OMP_NUM_THREADS=1 python benchmarks/messages_cost.py           # ResNet-18 at 32 px, 60,000 images; minutes
    OMP_NUM_THREADS=1 python benchmarks/messages_cost.py --smoke   # 300 images

A fit runs the network once over the data, for the 512 features that enter its last layer, and then passes messages
between these and the weights of ten classes. "messages" is the second part, "fit" is all, the dry run too; both in
forward passes of the network over the same batches, which are timed batch by batch between those of the fit. Memory is
the peak of the process above what it held before the fit, beside the size of the features in float64. Weights are
random, labels those that the network finds most probable: they have no influence on the time.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _cases import network
from _common import Row, machine, single_threaded, table, write_json
from _memory import forget_peak, held_memory, peak_memory
from torch import Tensor, nn

import posthoc_uq as uq

FEATURES, CLASSES, BATCH = 512, 10, 100
METHODS: dict[str, dict[str, Any]] = {
    "diagonal": {},
    "diagonal, argmax": {"signal": "argmax"},
    "full": {"posterior": "full"},
}


class Interleaved:
    """Random images, made batch by batch, with a plain pass before every one that is handed over in the last sweep."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        self._model, self._batches = model, samples // BATCH
        self.sampler = range(samples)  # says how many they are
        self.plain = self.between = 0.0
        self.sweeps = 0

    def __len__(self) -> int:
        return self._batches

    def _batch(self, index: int) -> Tensor:
        return torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(index))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.plain = 0.0
        for index in range(self._batches):
            begun = time.perf_counter()
            images = self._batch(index)
            made = time.perf_counter()
            with torch.no_grad():
                labels = self._model(images).argmax(1)
            self.plain += time.perf_counter() - made
            self.between += time.perf_counter() - begun
            yield images, labels
        self.sweeps += 1


def measure(name: str, samples: int) -> Row:
    """One fit."""
    model = network("resnet18-32", torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    model.fc = nn.Linear(FEATURES, CLASSES)
    loader = Interleaved(model, samples)
    forget_peak()
    held, begun = held_memory(), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        posterior = uq.fit(model, loader, uq.MessagePassing(**METHODS[name]), progress=False)
    seconds = time.perf_counter() - begun - loader.between
    messages = posterior.history.fit["seconds, message passing"]
    return {
        "posterior": name,
        "samples": samples // BATCH * BATCH,
        "plain pass, s": loader.plain,
        "messages / pass": messages / loader.plain,
        "sweeps": loader.sweeps,
        "fit / pass": seconds / loader.plain,
        "peak, MB": (peak_memory() - held) / 1e6,
        "features, MB": 8 * FEATURES * (samples // BATCH * BATCH) / 1e6,
    }


def run(options: argparse.Namespace) -> list[Row]:
    """One line a posterior."""
    rows: list[Row] = []
    with single_threaded():
        for name in options.posteriors:
            rows.append(measure(name, 300 if options.smoke else options.samples))
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--posteriors", nargs="+", choices=list(METHODS), default=["diagonal"])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--smoke", action="store_true", help="300 images")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "output" / "messages_cost.json"
    )
    options = parser.parse_args(arguments)
    rows = run(options)
    print(table(rows))
    write_json(options.output, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
