"""Time and peak memory of every method's fit, in multiples of a plain pass over the same data.

The plain pass is a forward and a backward pass: ``model.eval()``, summed cross entropy and ``backward()``
    with gradients of all parameters,
in the same batches. Each fit is timed between two plain passes of its own, and the medians over repeats of
the ratio to their mean are printed, so that the rest of the machine weighs on both alike. Peak memory is that
of a fresh process that only fits, above one that only makes the plain pass.

    python benchmarks/fit_cost.py                       LeNet at 28 px, resnet18 at 32 px and at 224 px
    python benchmarks/fit_cost.py --cases lenet --repeats 5
    python benchmarks/fit_cost.py --smoke               LeNet on two batches; seconds

What grows with the data is in the column "sweeps"; what does not (the dry run on the first samples,
eigendecompositions, sparsification) weighs less the more data there are, and the evidence is what
``prior_precision="evidence"`` (the default) adds.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _common import machine, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.curvature import dryrun
from posthoc_uq.inference.evidence import maximise_evidence
from posthoc_uq.loaders import BatchReader
from posthoc_uq.posteriors.base import Posterior

Batches = list[tuple[Tensor, Tensor]]
METHODS: dict[str, dict[str, Any]] = {
    "diag": {"method": "diag"},
    "kfac": {"method": "kfac"},
    "efb": {"method": "efb"},
    "inf": {"method": "inf"},
    "inf, exact basis": {"method": "inf", "basis": "exact"},
    "inf, sketch": {"method": "inf", "basis": "sketch"},
    "inf, last layer": {"method": "inf", "layers": "last"},
    "full": {"method": "full"},
    "full, last layer": {"method": "full", "layers": "last"},
}
DENSE_LIMIT = 5_000
"""Parameters up to which the dense posterior is measured; it takes the square of their number."""
SWEEPS = ("bases", "eigenvalues and diagonal", "Kronecker factors", "eigenvalues", "diagonal", "Fisher")
FIXED = ("eigenbases", "sparsification")
"""Names under which a fit's record keeps its times."""


class Case(NamedTuple):
    """A network with random weights, and batches of structured images for it."""

    build: Callable[[], nn.Module]
    images: Callable[[int], Tensor]
    classes: int
    batch: int
    batches: int


def lenet() -> nn.Module:
    """LeNet-5 with ReLU for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def resnet18() -> nn.Module:
    """torchvision's ResNet-18 with random weights."""
    import torchvision

    return torchvision.models.resnet18(weights=None)


def _digits(count: int) -> Tensor:
    from sklearn.datasets import load_digits

    pixels = (
        torch.tensor(load_digits(return_X_y=True)[0][:count], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    )
    return nn.functional.interpolate(pixels, size=(28, 28), mode="bilinear")


def _photos(size: int) -> Callable[[int], Tensor]:
    def crops(count: int) -> Tensor:
        from posthoc_uq.demo.pictures import FIT_PHOTOS, photo, random_crops

        photos = [photo(name) for name in FIT_PHOTOS]
        parts: list[Tensor] = []
        for start in range(0, count, 16):  # few at a time: making the data must not be the peak of memory
            images = random_crops(photos, min(16, count - start), seed=start)
            if size != 224:
                images = nn.functional.interpolate(images, size=(size, size), mode="area")
            parts.append(images)
        return torch.cat(parts)

    return crops


CASES: dict[str, Case] = {
    "lenet": Case(lenet, _digits, 10, 64, 16),
    "resnet18-32": Case(resnet18, _photos(32), 1000, 64, 4),
    "resnet18-224": Case(resnet18, _photos(224), 1000, 8, 4),
}


def prepare(case: Case, batches: int | None = None) -> tuple[nn.Module, Batches]:
    """The network in eval mode and its batches, the same every time."""
    count = case.batch * (batches or case.batches)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.build().eval()
        labels = torch.randint(case.classes, (count,))
    images = case.images(count)
    return model, list(zip(images.split(case.batch), labels.split(case.batch), strict=True))


def plain_pass(model: nn.Module, batches: Batches) -> None:
    """Forward and backward over the data, with gradients of all parameters."""
    for images, labels in batches:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels, reduction="sum").backward()
    model.zero_grad(set_to_none=True)


def fitted(model: nn.Module, batches: Batches, method: str) -> Posterior:
    """A fit without the evidence."""
    return uq.fit(model, batches, prior_precision=1.0, progress=False, **METHODS[method])


def tuned(posterior: Posterior) -> None:
    """The evidence on top of a fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with random weights the optimum may lie at an edge
        maximise_evidence(posterior)


def dry(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """What every fit does once, on the first samples, to prove that no layer's gradient is missed."""
    dryrun.prepare(model, BatchReader(torch.device("cpu")).read(batch))


def methods_for(model: nn.Module, batches: Batches) -> list[str]:
    """The methods that make sense for a network: the dense posterior only where it is small."""
    with torch.no_grad():
        classes = model(batches[0][0][:1]).shape[1]
    weights = sum(p.numel() for p in model.parameters())
    last = next(p for p in reversed(list(model.parameters())) if p.ndim == 2).numel() + classes
    too_large = {"full"} if weights > DENSE_LIMIT else set[str]()
    too_large |= {"full, last layer"} if last > DENSE_LIMIT else set[str]()
    return [name for name in METHODS if name not in too_large]


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


class Trial(NamedTuple):
    """One repeat of one method, in seconds."""

    plain: float
    fit: float
    sweeps: float
    fixed: float
    evidence: float


def trial(model: nn.Module, batches: Batches, method: str, evidence: bool) -> Trial:
    """Time one fit between two plain passes."""
    before, _ = _seconds(lambda: plain_pass(model, batches))
    fit, posterior = _seconds(lambda: fitted(model, batches, method))
    after, _ = _seconds(lambda: plain_pass(model, batches))
    times = posterior.record.fit
    on_top = _seconds(lambda: tuned(posterior))[0] if evidence else float("nan")
    return Trial(
        (before + after) / 2,
        fit,
        sum(times.get(f"seconds, {name}", 0.0) for name in SWEEPS),
        sum(times.get(f"seconds, {name}", 0.0) for name in FIXED),
        on_top,
    )


def measure_times(
    name: str, methods: Sequence[str] | None, repeats: int, batches: int | None, evidence: bool
) -> list[dict[str, Any]]:
    """One line per method: multiples of the plain pass, medians over interleaved repeats."""
    model, data = prepare(CASES[name], batches)
    chosen = [method for method in methods_for(model, data) if methods is None or method in methods]
    plain_pass(
        model, data
    )  # the first pass and the first fit pay for allocations and imports that all others share
    fitted(model, data[:1], "diag")
    dry_run = median(_seconds(lambda: dry(model, data[0]))[0] for _ in range(repeats))
    trials: dict[str, list[Trial]] = {method: [] for method in chosen}
    for repeat in range(repeats):
        for method in chosen:
            trials[method].append(trial(model, data, method, evidence))
            print(
                f"{name}: {method}, repeat {repeat + 1} of {repeats}: {_brief(trials[method][-1])}",
                flush=True,
            )

    def ratio(own: list[Trial], part: Callable[[Trial], float]) -> float:
        return median(part(t) / t.plain for t in own)

    return [
        {
            "case": name,
            "method": method,
            "samples": sum(len(labels) for _, labels in data),
            "plain, s": median(t.plain for t in own),
            "fit": ratio(own, lambda t: t.fit),
            "sweeps": ratio(own, lambda t: t.sweeps),
            "eigen & sparsify": ratio(own, lambda t: t.fixed),
            "dry run & rest": ratio(own, lambda t: t.fit - t.sweeps - t.fixed),
            "dry run, s": dry_run,
            "evidence": ratio(own, lambda t: t.evidence) if evidence else None,
        }
        for method, own in trials.items()
    ]


def _brief(t: Trial) -> str:
    return f"plain {t.plain:.2f} s, fit {t.fit:.2f} s (sweeps {t.sweeps:.2f} s), evidence {t.evidence:.2f} s"


def peak_memory() -> int:
    """Most memory that this process has held so far, in bytes.

    ``ru_maxrss`` of a fresh process may start at what its parent held, so Linux is asked for its own
    high-water mark.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def forget_peak() -> None:
    """Begin the high-water mark anew at what the process holds now, where the system can (Linux)."""
    gc.collect()
    control = Path("/proc/self/clear_refs")
    if control.exists():
        with suppress(OSError):
            control.write_text("5")


def child(name: str, method: str, batches: int | None, evidence: bool) -> dict[str, int | None]:
    """What a fresh process measures: its peak after the plain pass or the fit, and after the evidence."""
    model, data = prepare(CASES[name], batches)
    forget_peak()
    if method == "plain":
        plain_pass(model, data)
        return {"peak": peak_memory(), "evidence": None}
    posterior = fitted(model, data, method)
    peak = peak_memory()
    if evidence:
        tuned(posterior)
    return {"peak": peak, "evidence": peak_memory() if evidence else None}


def measure_memory(
    name: str, methods: Sequence[str], batches: int | None, evidence: bool, repeats: int = 2
) -> dict[str, dict[str, Any]]:
    """Peak memory of every method above the plain pass, each in processes of its own.

    The least of some repeats is taken: now and then the allocator holds on to much more than is used.
    """

    def once(method: str) -> dict[str, int | None]:
        command = [
            sys.executable,
            __file__,
            "--child",
            name,
            method,
            *([] if evidence else ["--no-evidence"]),
        ]
        command += [] if batches is None else ["--batches", str(batches)]
        finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(finished.stdout.splitlines()[-1])

    def least(method: str) -> dict[str, int | None]:
        found = [once(method) for _ in range(repeats)]
        return min(found, key=lambda peaks: peaks["evidence"] or peaks["peak"] or 0)

    plain = least("plain")["peak"] or 0
    found: dict[str, dict[str, Any]] = {}
    for method in methods:
        peaks = least(method)
        tuned_peak = peaks["evidence"]
        found[method] = {
            "plain, MiB": round(plain / 2**20),
            "fit + MiB": round(((peaks["peak"] or 0) - plain) / 2**20),
            "with evidence + MiB": None if tuned_peak is None else round((tuned_peak - plain) / 2**20),
        }
        print(f"{name}: {method}: {found[method]}", flush=True)
    return found


def run(
    cases: Sequence[str],
    repeats: int,
    *,
    methods: Sequence[str] | None = None,
    batches: int | None = None,
    evidence: bool = True,
    memory: bool = True,
) -> list[dict[str, Any]]:
    """Measure times, then memory; one line per case and method."""
    rows: list[dict[str, Any]] = []
    for name in cases:
        lines = measure_times(name, methods, repeats, batches, evidence)
        if memory:
            peaks = measure_memory(name, [line["method"] for line in lines], batches, evidence)
            lines = [line | peaks[line["method"]] for line in lines]
        rows += lines
    return rows


def smoke() -> list[dict[str, Any]]:
    """LeNet on two batches: times of two methods, memory of one; seconds."""
    rows = run(["lenet"], 2, methods=["diag", "inf"], batches=2, memory=False)
    peaks = measure_memory("lenet", ["inf"], 2, evidence=True, repeats=1)
    return [row | peaks.get(row["method"], {}) for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--batches", type=int, help="batches of data; by default 16 for LeNet, 4 for resnet18"
    )
    parser.add_argument(
        "--no-evidence", action="store_true", help="leave out the search for the prior precision"
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the processes that measure memory"
    )
    parser.add_argument("--smoke", action="store_true", help="LeNet on two batches, a few methods")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(*options.child, options.batches, not options.no_evidence)))
        return
    about = machine()
    print(", ".join(f"{key}: {value}" for key, value in about.items()))
    rows = (
        smoke()
        if options.smoke
        else run(
            options.cases,
            options.repeats,
            methods=options.methods,
            batches=options.batches,
            evidence=not options.no_evidence,
            memory=not options.no_memory,
        )
    )
    print("\nTimes in multiples of one plain forward-backward pass over the same data\n")
    print(table(rows))
    print(f"\nload average at the end: {machine()['load average, 1 min']}")
    if options.json:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
