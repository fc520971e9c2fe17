"""Whether fits and predictions became dearer: what they cost at two commits of this repository, in one run.

    python benchmarks/between_commits.py OLD            OLD against the files as they are; some minutes
    python benchmarks/between_commits.py OLD NEW        two commits
    python benchmarks/between_commits.py OLD --cases mlp --rounds 7
    python benchmarks/between_commits.py --smoke        HEAD against the files as they are, a perceptron, one round
    python benchmarks/between_commits.py 68ecbc37 --table --csv docs/tables/costs.csv    the table of costs; an hour
    python benchmarks/between_commits.py --table --smoke                                 two rows of it, one round

Each commit is checked out into a temporary folder. Fresh processes take turns, OLD and NEW and in the next round NEW
and OLD; each measures the processor time of every fit in multiples of a plain forward and backward pass over the same
data, and of every prediction in multiples of a plain forward pass of the same batch, both between plain passes of their
own and on one thread, so that other work on the machine weighs little. The table gives the medians over the rounds, and
the ratio NEW / OLD of each round as its median, least and largest. "sweeps" are fits with a given prior precision, so
that nothing is searched. The benchmarks as they are here run at both commits, and call nothing but what `posthoc_uq`
exports.

The table of costs (`_cost_rows.py` has its rows) is measured by one process for each commit, which take turns; its
lines have goals, in the units that they name. `--table` takes the names of some rows, in place of all. A line that a
commit cannot measure, or not within its time, has no number there. Rows beside laplace-torch need `--python` with an
interpreter that has it, and what this library needs (``python benchmarks/peers.py --install .venv-peers`` makes such an
environment); other rows of the same call run there too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, NamedTuple

import torch
from _cost_rows import ROWS, SMOKE
from _harness import (
    fresh_process,
    machine,
    multiple,
    output_file,
    single_threaded,
    table,
    write_csv,
    write_json,
)
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


def table_lines(found: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> list[dict[str, Any]]:
    """The lines of a row of the table of costs, from what its rounds gave at ``"old"`` and ``"new"``."""
    row, lines = ROWS[name], list[dict[str, Any]]()
    for what in dict.fromkeys(what for rounds in found.values() for one in rounds for what in one):
        line: dict[str, Any] = {"what": what, "unit": row.unit}
        for side, rounds in found.items():
            numbers = sorted(one[what] for one in rounds if what in one)
            least_most = f"{numbers[0]:.3g} to {numbers[-1]:.3g}" if numbers else ""
            line |= {side: median(numbers) if numbers else None, f"{side}, least to largest": least_most}
        pairs = zip(found["old"], found["new"], strict=True)
        ratios = sorted(new[what] / old[what] for old, new in pairs if what in old and what in new)
        spread = f"{ratios[0]:.3g} to {ratios[-1]:.3g}" if ratios else ""
        line |= {"new / old": median(ratios) if ratios else None, "ratio, least to largest": spread}
        lines.append(line | {"goal": row.goals.get(what), "rounds": len(found["new"])})
    return lines


class Worker:
    """A process at a commit that measures rows of the table of costs; begun when it is asked, and again where it ended.

    Args:
        python: the interpreter.
        source: the repository at the commit.
    """

    def __init__(self, python: str, source: Path) -> None:
        self._command = [python, __file__, "--worker"]
        self._environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[str] | None = None

    def measure(self, name: str, limit: float) -> dict[str, float]:
        """What a row gives; nothing where it fails, which the process prints, or does not end in so many seconds."""
        pipe = subprocess.PIPE
        process = self._process or subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, env=self._environment
        )
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(limit, process.kill)
        timer.start()
        print(name, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        timer.cancel()
        if not answer:
            process.wait()
            self._process = None
        return json.loads(answer) if answer else {}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def answer_rows() -> None:
    """Measure the rows that the standard input names, each in a line, and print a line for each."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        found: dict[str, float] = {}
        try:
            found = ROWS[line.strip()].measure()
        except Exception as error:
            print(f"{line.strip()}: {type(error).__name__}: {error}", file=sys.stderr)
        print(json.dumps(found), file=answers, flush=True)


def measure_table(
    old: Path, new: Path, names: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The table of costs, round by round; written after every row, since it takes long."""
    workers = {side: Worker(options.python, source) for side, source in (("old", old), ("new", new))}
    found = {name: {side: list[dict[str, float]]() for side in workers} for name in names}
    lines: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for name in (name for name in names if number < ROWS[name].rounds):
            for side in workers if number % 2 == 0 else reversed(workers):
                given_up = number > 0 and not any(found[name][side])
                once = {} if given_up else workers[side].measure(name, ROWS[name].limit)
                found[name][side].append(once)
            print(f"round {number + 1}, {name}: {found[name]}", file=sys.stderr, flush=True)
            lines = [line for each in names for line in table_lines(found[each], each)]
            if options.csv is not None:
                write_csv(options.csv, lines, ".4g")
    for worker in workers.values():
        worker.close()
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
    parser.add_argument("--table", nargs="*", choices=list(ROWS), metavar="ROW", help="the table of costs")
    parser.add_argument("--csv", type=output_file, help="write the table of costs to this file")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that measures that table")
    parser.add_argument("--child", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        with single_threaded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print("\n" + json.dumps(measure(options.child)))
        return
    if options.worker:
        with single_threaded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return answer_rows()
    if options.smoke:
        options.cases, options.rounds = ["mlp"], 1
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        checked_out(options.old, Path(folder) / "old") as old,
        checked_out(options.new, Path(folder) / "new") as new,
    ):
        if options.table is not None:
            names = options.table or (SMOKE if options.smoke else list(ROWS))
            rows = measure_table(old, new, names, options)
        for name in options.cases if options.table is None else ():
            command = [sys.executable, __file__, "--child", name]
            found: dict[Path, list[dict[str, float]]] = {old: [], new: []}
            for number in range(options.rounds):
                for source in (old, new) if number % 2 == 0 else (new, old):
                    found[source].append(fresh_process(command, PYTHONPATH=str(source)))
                print(f"{name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            rows += [{"case": name, **line} for line in compared(found[old], found[new])]
    about = machine()
    if options.table is None:
        print(
            "Multiples of a plain forward and backward pass (fits) or of a plain forward pass (predictions)\n"
        )
    print(f"{table(rows)}\n\n{about}")
    if options.json is not None:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
