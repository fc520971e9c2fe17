"""Time and peak memory of every method's fit, and of other libraries', in multiples of a plain pass.

The plain pass is a forward and a backward pass over the same data in the same batches: ``model.eval()``,
summed cross entropy and ``backward()`` with gradients of all parameters. Each fit is timed between two plain
passes of its own, and the medians over interleaved repeats of the ratio to their mean are printed, so that the
rest of the machine weighs on all alike. Peak memory is that of a fresh process that only fits, above one that
only makes the plain pass.

    python benchmarks/fit_cost.py                       LeNet, ResNet-18 at 32 px and 224 px, ResNet-50, ViT
    python benchmarks/fit_cost.py --cases lenet --repeats 5
    python benchmarks/fit_cost.py --smoke               LeNet on two batches, no peers; seconds

laplace-torch and curvlinops are measured beside ours where ``python benchmarks/peers.py --install .venv-peers``
has made an environment for them. A peer that fails is listed with its error.

"sweeps" is what grows with the data, "eigen & sparsify" the linear algebra that does not, and "dry run & rest"
what remains, above all the dry run on the first samples. "saved" is the posterior's numbers in float32, and "allowed"
three times that and the memory budget, which "fit +" should not pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _cases import CASES, plain_pass, prepare, write_data
from _fits import METHODS, Trial, dry, fitted, methods_for, saved_bytes, trial
from _harness import (
    MIB,
    available_memory,
    forget_peak,
    fresh_process,
    least,
    machine,
    output_file,
    peak_memory,
    seconds,
    table,
    write_json,
)
from _peer_client import PeerWorker
from peers import PEERS, described, python_of

Row = dict[str, Any]
PEERS_FOLDER = Path(__file__).resolve().parents[1] / ".venv-peers"
BUDGET = 256 * MIB
"""Bytes that one temporary of our statistics may take."""
LIMIT, LONG = 300.0, 100.0
"""Seconds that a peer's fit may take; those from which on a fit, of ours or of a peer, is not repeated."""


@dataclass
class Plan:
    """What is measured, and how.

    Attributes:
        methods: of ours; all that make sense for a network if None.
        peers: names in `peers.PEERS`; all if None.
        batches: of data; each case's own number if None.
        worker: the peers' process, or None to leave them out.
    """

    repeats: int = 3
    methods: Sequence[str] | None = None
    peers: Sequence[str] | None = None
    batches: int | None = None
    memory: bool = True
    worker: PeerWorker | None = None


def measure_times(name: str, data: Path, plan: Plan) -> list[Row]:
    """One line per method and peer: multiples of the plain pass, medians over interleaved repeats."""
    model, batches = prepare(name, data)
    own = {m: list[Trial]() for m in methods_for(model, batches) if plan.methods is None or m in plan.methods}
    peers: dict[str, list[Row]] = {}
    if plan.worker is not None:
        plan.worker.prepare(name, data)
        peers = {peer: [] for peer in plan.peers or PEERS}
    failed: dict[str, str] = {}
    long: set[str] = set()
    # The first pass and the first fit pay for allocations and imports that all others share.
    plain_pass(model, batches)
    fitted(model, batches[:1], METHODS["diag"])
    dry_run = median(seconds(lambda: dry(model, batches))[0] for _ in range(plan.repeats))
    plain = seconds(lambda: plain_pass(model, batches))[0]

    def one_of_ours(method: str) -> str:
        try:
            own[method].append(trial(model, batches, METHODS[method]))
        except Exception as error:
            failed[method] = described(error)
            return failed[method]
        if own[method][-1].fit > LONG:
            long.add(method)
        return str(own[method][-1])

    def one_of_peers(peer: str) -> str:
        assert plan.worker is not None
        found = plan.worker.fit(peer, LIMIT, plain)
        if found["error"] is not None:
            failed[peer] = found["error"]
            return failed[peer]
        peers[peer].append(found)
        if found["seconds"] > LONG:
            long.add(peer)
        return f"plain {found['plain']:.2f} s, fit {found['seconds']:.2f} s"

    for repeat in range(plan.repeats):
        for entry in (*own, *peers):
            if entry not in failed and entry not in long:
                said = one_of_ours(entry) if entry in own else one_of_peers(entry)
                print(f"{name}: {entry}, repeat {repeat + 1} of {plan.repeats}: {said}", flush=True)
    common = {"samples": sum(len(labels) for _, labels in batches)}
    rows = [
        {"case": name, "method": m, **common, **our_columns(trials, dry_run), "note": failed.get(m)}
        for m, trials in own.items()
    ]
    rows += [
        {"case": name, "method": peer, **common, **peer_columns(answers, failed.get(peer))}
        for peer, answers in peers.items()
    ]
    return rows


def our_columns(trials: Sequence[Trial], dry_run: float) -> Row:
    """A method's times; nothing where it failed."""
    if not trials:
        return {"fit": None}

    def ratio(part: Callable[[Trial], float]) -> float:
        return median(part(t) / t.plain for t in trials)

    return {
        "plain, s": median(t.plain for t in trials),
        "fit": ratio(lambda t: t.fit),
        "sweeps": ratio(lambda t: t.sweeps),
        "eigen & sparsify": ratio(lambda t: t.fixed),
        "sweeps + sparsify": ratio(lambda t: t.sweeps + t.fixed),
        "dry run & rest": ratio(lambda t: t.fit - t.sweeps - t.fixed),
        "dry run, s": dry_run,
        "fits": [t.fit / t.plain for t in trials],
    }


def peer_columns(answers: Sequence[Row], error: str | None) -> Row:
    """A peer's times; the error where it has none."""
    if not answers:
        return {"fit": None, "note": error}
    ratios = [answer["seconds"] / answer["plain"] for answer in answers]
    return {
        "plain, s": median(answer["plain"] for answer in answers),
        "fit": median(ratios),
        "fits": ratios,
        "note": error or answers[-1]["note"],
    }


def child(name: str, method: str, data: Path) -> dict[str, int | None]:
    """What a fresh process measures: its peak after the plain pass or the fit."""
    model, batches = prepare(name, data)
    forget_peak()
    if method == "plain":
        plain_pass(model, batches)
        return {"peak": peak_memory()}
    posterior = fitted(model, batches, METHODS[method])
    return {"peak": peak_memory(), "saved": saved_bytes(posterior)}


def measure_memory(name: str, methods: Sequence[str], data: Path, repeats: int = 2) -> dict[str, Row]:
    """Peak memory of every method above the plain pass, each in processes of its own."""

    def of(method: str) -> Row:
        command = [sys.executable, __file__, "--child", name, method, str(data)]
        return least(lambda: fresh_process(command), "peak", repeats)

    plain = of("plain")["peak"]
    found: dict[str, Row] = {}
    for method in methods:
        peaks = of(method)
        above, allowed = peaks["peak"] - plain, 3 * peaks["saved"] + BUDGET
        found[method] = {
            "plain, MiB": round(plain / MIB),
            "fit + MiB": round(above / MIB),
            "saved, MiB": round(peaks["saved"] / MIB, 2),
            "allowed, MiB": round(allowed / MIB),
            "within": above <= allowed,
        }
        print(f"{name}: {method}: {found[method]}", flush=True)
    return found


def run(cases: Sequence[str], plan: Plan, keep: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """Measure times, then memory; one line per case, method and peer.

    Args:
        keep: given all lines so far after every case, so that a long run need not be lost.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in cases:
            data = Path(folder) / f"{name}.npz"
            write_data(name, data, plan.batches)
            lines = measure_times(name, data, plan)
            if plan.memory:
                ran = [line["method"] for line in lines if line["fit"] is not None]
                peaks = measure_memory(name, [method for method in ran if method in METHODS], data)
                lines = [line | peaks.get(line["method"], {}) for line in lines]
            rows += lines
            keep(rows)
            data.unlink()
    return rows


def smoke() -> list[Row]:
    """LeNet on two batches: times of two methods, memory of one; seconds."""
    plan = Plan(repeats=2, methods=["diag", "inf"], batches=2, memory=False)
    rows = run(["lenet"], plan)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "lenet.npz"
        write_data("lenet", data, 2)
        peaks = measure_memory("lenet", ["inf"], data, repeats=1)
    return [row | peaks.get(row["method"], {}) for row in rows]


def printed(rows: Sequence[Row]) -> str:
    """The table: without the repeats one by one, and with notes cut short and at the end."""
    lines: list[Row] = []
    for row in rows:
        line = {key: value for key, value in row.items() if not isinstance(value, list) and key != "note"}
        lines.append(line | {"note": row.get("note") and row["note"][:40]})
    columns = dict.fromkeys(key for line in lines for key in line if key != "note")
    last = ["note"] if any(line["note"] for line in lines) else []
    return table([{key: line.get(key) for key in [*columns, *last]} for line in lines])


def peers_worker(folder: Path, memory: float | None) -> PeerWorker | None:
    """The peers' process where they are installed; says so where they are not."""
    python = python_of(folder)
    if not python.exists():
        print(
            f"No peers: '{folder}' is missing (python benchmarks/peers.py --install {folder.name} makes it)."
        )
        return None
    available = available_memory()
    limit = memory * 2**30 if memory is not None else available and 0.8 * available
    print(f"Peers of {folder}" + (f", each within {limit / 2**30:.1f} GiB" if limit else ""))
    return PeerWorker(python, int(limit) if limit else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="ours; all by default")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="all by default")
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    parser.add_argument("--peers-folder", type=Path, default=PEERS_FOLDER, help="their environment")
    parser.add_argument("--peer-memory", type=float, metavar="GIB", help="by default 0.8 of what is free")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, help="batches of data, in place of each case's own number")
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure it")
    parser.add_argument("--smoke", action="store_true", help="LeNet on two batches, a few methods")
    parser.add_argument("--json", type=output_file, help="write the table to this file")
    parser.add_argument("--child", nargs=3, metavar=("CASE", "METHOD", "DATA"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        name, method, data = options.child
        print("\n" + json.dumps(child(name, method, Path(data))))
        return
    plan = Plan(options.repeats, options.methods, options.peers, options.batches, not options.no_memory)
    about = machine()
    print(", ".join(f"{key}: {value}" for key, value in about.items()))

    def keep(rows: list[Row]) -> None:
        if plan.worker is not None:
            about["peers"] = plan.worker.versions
        if options.json:
            write_json(options.json, {"machine": about, "rows": rows})

    if options.smoke:
        rows = smoke()
    else:
        if not options.no_peers:
            plan.worker = peers_worker(options.peers_folder, options.peer_memory)
        try:
            rows = run(options.cases or list(CASES), plan, keep)
        finally:
            if plan.worker is not None:
                plan.worker.close()
        print("\nTimes in multiples of one plain forward-backward pass over the same data")
    print(f"\n{printed(rows)}")
    print(f"\nload average at the end: {machine()['load average, 1 min']}")
    keep(rows)


if __name__ == "__main__":
    main()
