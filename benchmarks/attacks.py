"""Attacks on the library, counted: weights that change while a call reads them, signals that raise in its midst, files
that are damaged or made by a stranger, commands side by side, fits that are killed.

    python benchmarks/attacks.py
    python benchmarks/attacks.py --only signals --tries 1000

Every attack is a function that yields rows: what was attacked, how often, and how often it went badly.

* ``weights``: the loader writes to the model at a random batch, in one of several ways, some of which give the old
  numbers back. Bad is a call that does not refuse, one that ends with an error that is not the package's, and one that
  leaves something of its work in the posterior.
* ``signals``: a handler of SIGALRM raises an error at a random moment of a call. Bad is a call that swallows the error,
  and one after which gradients, torch's modes, number formats, the random states, the handlers or the model are not as
  they were.
* ``files``: bytes of a posterior's file are changed, or what it holds is, with a digest that fits. Bad is an error that
  is not the package's, numbers that are not finite, and a damaged file that is read.
* ``checkpoints``: likewise of a fit's checkpoint; bad is an error that is not the package's, and a damaged one that is
  gone on from. The note has from how many sealed ones another posterior came, which cannot be told.
* ``commands``: two updates of one file by the command line at the same time. Bad is one that is lost, or fails.
* ``kills``: fits are killed at random moments, and go on. Bad is a posterior that is not, bit for bit, that of a whole
  fit.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _harness import machine, table
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.methods import METHODS
from posthoc_uq.methods.checkpoint import write_snapshot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the generators that the tests have

import hostile_files
import resume_worker
from storage_helpers import mutations
from written_weights import WRITES, Writing

OPTIONS: dict[str, Any] = {"epochs": 1, "n_context": 3, "val_draws": 2, "rank": 6}  # that make a fit short


@dataclass
class Found:
    """How often an attack was tried, how often it went badly, and the ways in which it did."""

    attack: str
    target: str
    tries: int
    bad: int
    note: str = ""


def network(seed: int = 0) -> nn.Module:
    """A small classifier with statistics of batch normalisation."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    for _ in range(3):
        net(torch.randn(64, 5))
    return net.eval()


def loader_of(batches: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches of eight inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * batches, 5, generator=generator)
    y = torch.randint(0, 3, (8 * batches,), generator=generator)
    return list(zip(x.split(8), y.split(8), strict=True))


def fit(model: nn.Module, loader: Any, method: str, **options: Any) -> uq.Posterior:
    """A short fit."""
    own = {field.name for field in fields(METHODS[method])}
    short = {name: value for name, value in OPTIONS.items() if name in own}
    if not METHODS[method](**short).trains:
        short["prior_precision"] = 1.0
    return uq.fit(model, loader, method, progress=False, **short, **options)


Call = Callable[[nn.Module, uq.Posterior, Any], Any]


def calls() -> dict[str, Call]:
    """Everything that reads a model over a loader, by name."""

    def fitted(name: str) -> Call:
        return lambda model, posterior, loader: fit(model, loader, name)

    return {
        **{f"fit, {name}": fitted(name) for name in METHODS},
        "tune, faithful": lambda m, p, d: uq.tune(p, d, criterion="faithful", progress=False),
        "tune, likelihood": lambda m, p, d: uq.tune(p, d, head="linearized", progress=False),
        "calibrate": lambda m, p, d: uq.calibrate(p, d, head="linearized", progress=False),
        "leave-one-out": lambda m, p, d: uq.tune(p, d, criterion="leave_one_out", progress=False),
        "update": lambda m, p, d: uq.update(p, d, progress=False),
        "evaluate": lambda m, p, d: uq.evaluate(uq.wrap(m, p), d, progress=False),
        "evaluate, model": lambda m, p, d: uq.evaluate(m, d, progress=False),
        "predict": lambda m, p, d: uq.wrap(m, p).predict(d, progress=False),
        "moments, fit_scale": lambda m, p, d: uq.wrap(m, p, "moments").fit_scale(d, progress=False),
    }


def state_of(posterior: uq.Posterior) -> str:
    """What a call may have written into a posterior."""
    return repr((posterior.settings.plain(), posterior.history))


# Weights that change


def weights(tries: int, chosen: random.Random) -> Iterator[Found]:
    """Weights that are written while a call reads them."""
    for name, call in calls().items():
        faults = Counter[str]()
        for _ in range(tries):
            write, given_back = chosen.choice(list(WRITES)), chosen.random() < 0.5
            model = network()
            posterior = fit(model, loader_of(), "diag")
            before = state_of(posterior)
            try:
                call(model, posterior, Writing(model, loader_of(), write, chosen.randint(1, 5), given_back))
            except uq.PosteriorMismatchError:
                fault = "" if state_of(posterior) == before else "the posterior is changed"
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"[:100]
            else:
                fault = "not noticed"
            if fault:
                faults[f"{write}{', given back' if given_back else ''}: {fault}"] += 1
        yield _found("weights that change", name, tries, faults)


# Signals that raise


class Alarm(Exception):
    """What the handler of the signal raises."""


def _raise(number: int, frame: Any) -> None:
    raise Alarm


def global_state(model: nn.Module) -> dict[str, Any]:
    """What a call must leave as it was."""
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())
    tables = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    return {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "number formats": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "torch's random state": generators[0].numpy().tobytes(),
        "Python's random state": generators[1],
        "NumPy's random state": generators[2],
        "handlers": [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)],
        "hooks": sum(map(bool, tables)),
        "modes of the model": [module.training for module in model.modules()],
        "gradients of the model": [(p.requires_grad, p.grad) for p in model.parameters()],
        "weights": [tensor.tolist() for tensor in model.state_dict().values()],
    }


def signals(tries: int, chosen: random.Random) -> Iterator[Found]:
    """A signal whose handler raises, at a random moment of a call."""
    model = network()
    posterior = fit(model, loader_of(), "diag")
    heads = {head: uq.wrap(model, posterior, head) for head in ("linearized", "sampling", "moments")}
    x = loader_of()[0][0]
    known: dict[str, Callable[[], Any]] = {
        "fit, inf": lambda: fit(model, loader_of(), "inf"),
        "fit, message_passing": lambda: fit(model, loader_of(), "message_passing"),
        "fit, utvi": lambda: fit(model, loader_of(), "utvi"),
        "tune": lambda: uq.tune(posterior, loader_of(), criterion="faithful", progress=False),
        "evaluate": lambda: uq.evaluate(heads["linearized"], loader_of(), progress=False),
        "wrap": lambda: uq.wrap(model, posterior, "sampling"),
        **{f"predictor, {head}": lambda p=p: p(x) for head, p in heads.items()},
        **{
            f"predict, {head}": lambda p=p: p.predict(loader_of(), progress=False)
            for head, p in heads.items()
        },
        "functional_samples": lambda: heads["linearized"].functional_samples(x, n_samples=3),
        "novelty": lambda: heads["linearized"].novelty(x),
    }
    before_all = signal.signal(signal.SIGALRM, _raise)
    try:
        for name, call in known.items():
            call()
            start = time.perf_counter()
            call()
            taken, faults, raised = time.perf_counter() - start, Counter[str](), 0
            for _ in range(tries):
                before = global_state(model)
                error: BaseException | None = None
                fired = False
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(1e-6, chosen.random() * taken))
                    call()
                    fired = signal.setitimer(signal.ITIMER_REAL, 0)[0] == 0
                except BaseException as caught:
                    error = caught
                    raised += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                after = global_state(model)
                faults.update(key for key in before if before[key] != after[key])
                if error is None and fired:
                    faults["swallowed"] += 1
                elif error is not None and not isinstance(error, Alarm):
                    faults[f"{type(error).__name__}: {error}"[:100]] += 1
                _give_back()
            yield _found("signals that raise", name, raised, faults)
    finally:
        signal.signal(signal.SIGALRM, before_all)


def _give_back() -> None:
    """Undo what an attack left, so that it is counted once."""
    torch.set_grad_enabled(True)
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)


# Files


def files(tries: int, chosen: random.Random) -> Iterator[Found]:
    """Posterior files that are damaged, and such that a stranger made."""
    source = np.random.default_rng(chosen.getrandbits(32))
    for method in METHODS:
        with TemporaryDirectory() as folder:
            path, faults = Path(folder, "p.h5"), Counter[str]()
            uq.save(hostile_files.fit(method), path)
            model = hostile_files.model(hostile_files.METHODS[method]["likelihood"])
            for data in mutations(path.read_bytes(), tries, 0, source):
                path.write_bytes(data)
                faults.update(_outcome(lambda path=path, model=model: uq.load(path, model)))
        yield _found("damaged files", method, tries, faults)
    yield from _sealed("files of strangers", hostile_files.run, tries * len(METHODS), chosen)


def checkpoints(tries: int, chosen: random.Random) -> Iterator[Found]:
    """Checkpoints of fits that are damaged, and such that a stranger made."""
    source = np.random.default_rng(chosen.getrandbits(32))
    for method in METHODS:
        with TemporaryDirectory() as folder:
            path, faults = Path(folder, "c"), Counter[str]()
            write_snapshot(path, hostile_files.unfinished(method, path)[0])
            for data in mutations(path.read_bytes(), tries, 0, source):
                path.write_bytes(data)
                faults.update(
                    _outcome(lambda path=path, method=method: hostile_files.fit(method, checkpoint=path))
                )
        yield _found("damaged checkpoints", method, tries, faults)
    yield from _sealed(
        "checkpoints of strangers", hostile_files.run_checkpoints, tries * len(METHODS), chosen
    )


def _outcome(read: Callable[[], Any]) -> list[str]:
    """What went badly where a damaged file is read."""
    try:
        read()
    except uq.PosthocUQError:
        return []
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:100]]
    return ["read in silence"]


def _sealed(
    attack: str,
    tried: Callable[[int, int, Path], Counter[tuple[str, str]]],
    count: int,
    chosen: random.Random,
) -> Iterator[Found]:
    """What a generator of files with digests that fit found; it stops at the first that goes badly."""
    seed = chosen.getrandbits(16)
    with TemporaryDirectory() as folder:
        place = Path(folder, "files")
        place.mkdir()
        try:
            found = tried(count, seed, place)
        except Exception as error:
            yield Found(
                attack, "all methods", count, 1, f"seed {seed}, {type(error).__name__}: {error}"[:150]
            )
            return
    for name in METHODS:
        counts = {what: found[name, what] for what in ("refused", "read", "other") if found[name, what]}
        note = ", ".join(f"{what} {number}" for what, number in counts.items())
        yield Found(attack, name, sum(counts.values()), 0, note)


_NETS = """
import torch
from torch import nn


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
"""
_ROUNDS = 20  # tries for one round of processes, which takes seconds


def commands(tries: int, chosen: random.Random) -> Iterator[Found]:
    """Two updates of one file at the same time."""
    program, faults, rounds = [sys.executable, "-m", "posthoc_uq"], Counter[str](), ceil(tries / _ROUNDS)
    with TemporaryDirectory() as folder:
        place, sizes = Path(folder), {"data": 60, "first": 11, "second": 23}
        (place / "nets.py").write_text(_NETS)
        for name, rows in sizes.items():
            lines = [f"{','.join(f'{chosen.gauss(0, 1):.4f}' for _ in 'abc')},{i % 2}" for i in range(rows)]
            (place / f"{name}.csv").write_text("\n".join(["a,b,c,y", *lines, ""]))
        options = ["--model", "nets.py:mlp"]
        fitted = ["--target", "y", "-o", "p.h5", "--method", "diag", "--prior_precision", "1"]
        subprocess.run(
            [*program, "fit", "data.csv", *options, *fitted], cwd=place, check=True, capture_output=True
        )
        whole = (place / "p.h5").read_bytes()
        for _ in range(rounds):
            (place / "p.h5").write_bytes(whole)
            running = [
                subprocess.Popen(
                    [*program, "update", "p.h5", f"{name}.csv", *options],
                    cwd=place,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                for name in ("first", "second")
            ]
            codes = [process.wait() for process in running]
            samples = uq.inspect(place / "p.h5")["evidence"]["samples"]
            if codes != [0, 0] or samples != sum(sizes.values()):
                faults[f"codes {codes}, {samples} of {sum(sizes.values())} samples"] += 1
    yield _found("two commands on one file", "update", rounds, faults)


def kills(tries: int, chosen: random.Random) -> Iterator[Found]:
    """Fits that are killed three times at random moments, and then go on to their end."""
    rounds = ceil(tries / _ROUNDS)
    for method in ("kfac", "inf", "diag"):
        faults = Counter[str]()
        scenarios = [
            {"name": str(number), "options": {"method": method}, "random": chosen.randint(1, 2**30)}
            for number in range(rounds)
        ]
        with TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, resume_worker.__file__, folder, json.dumps(scenarios)],
                check=True,
                capture_output=True,
                text=True,
            )
            hits = sum(json.loads(line)["finished"][:-1].count(False) for line in done.stdout.splitlines())
            whole = resume_worker.fit(scenarios[0], None, None)
            for scenario in scenarios:
                resumed = uq.load(Path(folder, f"{scenario['name']}.h5"), resume_worker.model())
                if not hostile_files.same(resumed, whole):
                    faults["another posterior"] += 1
        row = _found("killed fits", method, rounds, faults)
        row.note = f"{hits} kills{'; ' if row.note else ''}{row.note}"
        yield row


ATTACKS: dict[str, Callable[[int, random.Random], Iterator[Found]]] = {
    "weights": weights,
    "signals": signals,
    "files": files,
    "checkpoints": checkpoints,
    "commands": commands,
    "kills": kills,
}
"""Each yields rows, and takes how often every target is attacked, and what chooses how."""


def _found(attack: str, target: str, tries: int, faults: Counter[str]) -> Found:
    note = "; ".join(f"{fault} ({count})" for fault, count in faults.most_common(3))
    return Found(attack, target, tries, sum(faults.values()), note)


def run(only: Sequence[str], tries: int, seed: int = 0) -> list[Found]:
    """All rows of the attacks of these names."""
    found: list[Found] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in only:
            found += ATTACKS[name](tries, random.Random(seed))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Attack, print the table, and return 1 where something went badly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--tries", type=int, default=100, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="few tries, for the tests")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    found = run(arguments.only, 2 if arguments.smoke else arguments.tries, arguments.seed)
    print(table([vars(row) for row in found]))
    return int(any(row.bad for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
