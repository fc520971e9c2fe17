"""Cost of a linearised prediction, in multiples of a plain forward pass over the same batch.

INF at rank 100 is fitted once; every repeat then times the head between two plain passes, and medians of the ratios
are shown. "pulled" is how many backward passes the head makes: none for a posterior of the last layer, whose variances
of all classes have a closed form. "bar" is what the project set out to stay below: 1.3 for the last layer, and 3 passes
for each output and the mean.

    python benchmarks/linearized_cost.py                        resnet18 and vit-tiny at 224 px, batch 8
    python benchmarks/linearized_cost.py --cases resnet18-32 --methods inf kfac diag
    python benchmarks/linearized_cost.py --smoke                LeNet alone, for the tests
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _cases import prepare, seconds, write_data
from _common import machine, table, write_json
from _fits import fitted

from posthoc_uq.heads.linearized import LinearizedPredictor
from posthoc_uq.posteriors.posterior import Posterior

RANK = 100
PRIOR = 100.0
LAST_BAR, PASS_BAR = 1.3, 3.0


def measure(
    name: str, batch: int, repeats: int, methods: Sequence[str], batches: int, top: int, probes: int
) -> list[dict[str, Any]]:
    """The lines of one network."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        write_data(name, data, batches)
        model, loaded = prepare(name, data)
    images = loaded[0][0][:batch]
    with torch.no_grad():
        classes = model(images).shape[1]
    rows: list[dict[str, Any]] = []

    def line(what: str, method: str, posterior: Posterior, pulled: int | None, **options: Any) -> None:
        predictor = LinearizedPredictor(model, posterior, **options)
        first, _ = seconds(lambda: predictor(images))
        ratios, plain = interleaved(lambda: predictor(images), lambda: forward(model, images), repeats)
        rows.append(
            {
                "case": name,
                "batch": len(images),
                "classes": classes,
                "method": method,
                "head": what,
                "pulled": pulled,
                "plain pass, s": plain,
                "first call, s": first,
                "passes": median(ratios),
                "bar": bar(what, pulled),
            }
        )
        print(rows[-1], flush=True)

    for method in methods:
        options = {"method": method} | ({"rank": RANK} if method == "inf" else {})
        last = fitted(model, loaded, {**options, "layers": "last"})
        last.prior_precision = PRIOR
        line("last layer", method, last, None)
        everywhere = fitted(model, loaded, options)
        everywhere.prior_precision = PRIOR
        used = min(top, classes)
        line("all layers", method, everywhere, used, outputs=used)
        line(f"all layers, {probes} jvp", method, everywhere, None, engine="jvp", n_probes=probes)
    return rows


def bar(what: str, pulled: int | None) -> float | None:
    """What the cost should stay below."""
    if what == "last layer":
        return LAST_BAR
    return None if pulled is None else PASS_BAR * (pulled + 1)


def forward(model: torch.nn.Module, images: torch.Tensor) -> None:
    """A plain pass."""
    with torch.no_grad():
        model(images)


def interleaved(work: Callable[[], Any], plain: Callable[[], Any], repeats: int) -> tuple[list[float], float]:
    """Times of some work over the mean of the plain passes before and after it; and the median plain pass."""
    plain()
    ratios: list[float] = []
    passes: list[float] = []
    for _ in range(repeats):
        before, _ = seconds(plain)
        own, _ = seconds(work)
        after, _ = seconds(plain)
        passes += [before, after]
        ratios.append(2 * own / (before + after))
    return ratios, median(passes)


def smoke() -> list[dict[str, Any]]:
    """LeNet alone, once."""
    return measure("lenet", 4, 1, ["inf"], 1, 3, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["resnet18-224", "vit-tiny"])
    parser.add_argument("--methods", nargs="+", default=["inf"], choices=["inf", "efb", "kfac", "diag"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=2, help="that the posterior is fitted on")
    parser.add_argument("--top", type=int, default=10, help="classes that are pulled back")
    parser.add_argument("--probes", type=int, default=4, help="of the jvp engine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="LeNet alone, for the tests")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    if options.smoke:
        rows = smoke()
    else:
        rows = [
            row
            for name in options.cases
            for row in measure(
                name,
                options.batch,
                options.repeats,
                options.methods,
                options.batches,
                options.top,
                options.probes,
            )
        ]
    print(table(rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
