"""Whether fits and predictions became dearer: what they cost at two commits of this repository, in one run.

    python benchmarks/between_commits.py OLD            OLD against the files as they are; some minutes
    python benchmarks/between_commits.py OLD NEW        two commits
    python benchmarks/between_commits.py OLD --cases mlp --rounds 7
    python benchmarks/between_commits.py --smoke        HEAD against the files as they are, a perceptron, one round

Each commit is checked out into a temporary folder. Fresh processes take turns, OLD and NEW and in the next round NEW
and OLD; each measures the processor time of every fit in multiples of a plain forward and backward pass over the same
data, and of every prediction in multiples of a plain forward pass of the same batch, both between plain passes of their
own and on one thread, so that other work on the machine weighs little. The table gives
the medians over the rounds, and the ratio NEW / OLD of each round as its median, least and largest. "sweeps" are fits
with a given prior precision, so that nothing is searched. This file alone is run at both commits, and calls nothing but
what `posthoc_uq` exports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _harness import fresh_process, machine, output_file, single_threaded, table, write_json
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
CLASSES = 10


class Case(NamedTuple):
    """A network with random weights, the shape of its inputs, samples to fit on and those of a prediction."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    batch: int


def mlp() -> nn.Module:
    """Two hidden layers of 256 units on 784 inputs."""
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    )


def cnn() -> nn.Module:
    """Two convolutions with pooling on 28 x 28 grey pixels, 128 hidden units."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def resnet18() -> nn.Module:
    """torchvision's, with ten outputs."""
    from torchvision.models import resnet18

    return resnet18(weights=None, num_classes=CLASSES)


CASES = {
    "mlp": Case(mlp, (784,), 256, 64),
    "cnn": Case(cnn, (1, 28, 28), 128, 32),
    "resnet18": Case(resnet18, (3, 32, 32), 64, 8),
}
FITS: dict[str, dict[str, Any]] = {
    "fit": {},
    "sweeps, inf": {"method": "inf", "prior_precision": 1.0},
    "sweeps, kfac": {"method": "kfac", "prior_precision": 1.0},
    "sweeps, diag": {"method": "diag", "prior_precision": 1.0},
}
HEADS: dict[str, dict[str, Any]] = {"linearized": {}, "sampling": {"n_samples": 10}, "moments": {}}


def multiple(unit: Callable[[], Any], run: Callable[[], Any], repeats: int) -> float:
    """The processor time of some work in units of other work, which is done before and after it; the median."""

    def taken(work: Callable[[], Any], least: float = 0.0) -> float:
        start, calls = time.process_time(), 0
        while calls == 0 or time.process_time() - start < least:
            work()
            calls += 1
        return (time.process_time() - start) / calls

    unit(), run()  # the first calls pay for allocations and for what is prepared once
    found: list[float] = []
    for _ in range(repeats):
        before, own, after = taken(unit, 0.05), taken(run), taken(unit, 0.05)
        found.append(2 * own / (before + after))
    return median(found)


def measure(name: str) -> dict[str, float]:
    """What fits and predictions cost in this process, by what was done; what fails is left out and said."""
    import posthoc_uq as uq

    case = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.build().eval()
        inputs = torch.randn(case.samples, *case.shape)
        labels = torch.randint(CLASSES, (case.samples,))
    batches = list(zip(inputs.split(64), labels.split(64), strict=True))
    few = inputs[: case.batch]

    def plain_pass() -> None:
        for x, y in batches:
            model.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()

    def forward(predict: Callable[[Tensor], Any] = model) -> None:
        with torch.no_grad():
            predict(few.clone())  # what was predicted before is not kept for it

    def fit(**options: Any) -> Any:
        return uq.fit(model, batches, progress=False, **options)

    posterior = fit(method="inf", prior_precision=1e4)
    work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        what: (plain_pass, lambda options=options: fit(**options)) for what, options in FITS.items()
    }
    for head, options in HEADS.items():
        predictor = uq.wrap(model, posterior, head=head, **options)
        work[head] = (forward, lambda predictor=predictor: forward(predictor))
    found: dict[str, float] = {}
    for what, (unit, run) in work.items():
        try:
            found[what] = multiple(unit, run, 1 if what in FITS else 5)
        except Exception as error:
            print(f"{name}, {what}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


@contextmanager
def checked_out(commit: str | None, folder: Path) -> Iterator[Path]:
    """The repository as it was at a commit, below `folder`; as it is where none is given."""
    if commit is None:
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compared(old: Sequence[Mapping[str, float]], new: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """A line for all that was measured in every round at both commits."""
    lines: list[dict[str, Any]] = []
    for what in old[0]:
        if all(what in found for found in (*old, *new)):
            ratios = sorted(b[what] / a[what] for a, b in zip(old, new, strict=True))
            costs = {"old": median(a[what] for a in old), "new": median(b[what] for b in new)}
            spread = {"new / old": median(ratios), "least": ratios[0], "largest": ratios[-1]}
            lines.append({"what": what, **costs, **spread})
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", nargs="?", default="HEAD", metavar="OLD", help="a commit; by default HEAD")
    parser.add_argument("new", nargs="?", metavar="NEW", help="a commit; by default the files as they are")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=output_file, help="write the table to this file")
    parser.add_argument("--smoke", action="store_true", help="a perceptron, one round")
    parser.add_argument("--child", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        with single_threaded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print("\n" + json.dumps(measure(options.child)))
        return
    if options.smoke:
        options.cases, options.rounds = ["mlp"], 1
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        checked_out(options.old, Path(folder) / "old") as old,
        checked_out(options.new, Path(folder) / "new") as new,
    ):
        for name in options.cases:
            command = [sys.executable, __file__, "--child", name]
            found: dict[Path, list[dict[str, float]]] = {old: [], new: []}
            for number in range(options.rounds):
                for source in (old, new) if number % 2 == 0 else (new, old):
                    found[source].append(fresh_process(command, PYTHONPATH=str(source)))
                print(f"{name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            rows += [{"case": name, **line} for line in compared(found[old], found[new])]
    about = machine()
    print("Multiples of a plain forward and backward pass (fits) or of a plain forward pass (predictions)\n")
    print(f"{table(rows)}\n\n{about}")
    if options.json is not None:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
