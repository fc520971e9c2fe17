"""Threads that predict with a posterior and save it while `uq.tune` searches, and searches at once.

Every answer must be that of the posterior before the search or after it, and so must every file; several searches at
once end where one does; a search that fails changes nothing.

    python benchmarks/attacks/threads_tune.py            about a minute
    python benchmarks/attacks/threads_tune.py --smoke    seconds
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import posthoc_uq as uq

CLOSE = 1e-5
"""Probabilities that are nearer than this are the same."""
LONGEST = 120.0
"""Seconds after which a thread ends by itself."""


def made(seed: int) -> tuple[nn.Module, list[Any], list[Any], torch.Tensor]:
    """A network that is too sure of itself, its data, held-out data, and inputs to predict."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(260, 4)
        y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
        y = torch.where(torch.rand(260) < 0.2, torch.randint(0, 3, (260,)), y)
        model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[:80]), y[:80]).backward()
            optimiser.step()
    return model.eval(), [(x[:80], y[:80])], [(x[80:], y[80:])], x[80:100]


def running(work: Callable[[], None], threads: int, during: Callable[[], Any]) -> None:
    """`work` again and again in some threads, until `during` returns."""
    stop, failures = threading.Event(), list[BaseException]()
    timer = threading.Timer(LONGEST, stop.set)

    def loop() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # shown at the end
            failures.append(error)

    workers = [threading.Thread(target=loop, daemon=True) for _ in range(threads)]
    timer.start()
    for worker in workers:
        worker.start()
    try:
        during()
    finally:
        stop.set()
        timer.cancel()
        for worker in workers:
            worker.join()
    if failures:
        raise failures[0]


def predicting(seed: int, threads: int) -> tuple[int, int]:
    """Answers, and those that are neither the posterior's before the search nor its own after it."""
    model, train, held_out, x = made(seed)
    posterior = uq.fit(model, train, prior_precision=0.5, progress=False)
    predictor, answers = uq.wrap(model, posterior), list[torch.Tensor]()
    before = predictor(x).probs

    def answer() -> None:
        with torch.no_grad():
            answers.append(predictor(x).probs)

    running(answer, threads, lambda: uq.tune(posterior, held_out, progress=False))
    after = predictor(x).probs
    distances = [min(float((found - end).abs().max()) for end in (before, after)) for found in answers]
    return len(distances), sum(distance > CLOSE for distance in distances)


def saving(seed: int, folder: Path) -> tuple[int, int]:
    """Files saved during a search, and those with other settings or records than before or after it."""
    model, train, held_out, _ = made(seed)
    posterior = uq.fit(model, train, prior_precision=0.5, progress=False)
    files = list[Path]()

    def facts(loaded: uq.Posterior) -> str:
        history = loaded.history
        return str((loaded.settings.plain(), history.tuning, history.head, history.faithful))

    def save() -> None:
        path = folder / f"{seed}-{len(files)}.h5"
        uq.save(posterior, path)
        files.append(path)

    def stored() -> str:
        path = folder / "end.h5"
        uq.save(posterior, path)
        return facts(uq.load(path, model))

    ends = {stored()}
    running(save, 1, lambda: uq.tune(posterior, held_out, progress=False))
    ends.add(stored())
    found = [facts(uq.load(path, model)) for path in files]
    for path in files:
        path.unlink()
    return len(found), sum(fact not in ends for fact in found)


def searching(seed: int) -> tuple[int, int]:
    """Two searches at once: bad where one fails, or where the end is not that of one search alone."""
    model, train, held_out, _ = made(seed)
    alone, shared = (uq.fit(model, train, prior_precision=0.5, progress=False) for _ in range(2))
    uq.tune(alone, held_out, progress=False)
    barrier, errors = threading.Barrier(2), list[BaseException]()

    def search() -> None:
        barrier.wait(LONGEST)
        try:
            uq.tune(shared, held_out, progress=False)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=search, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    same = abs(shared.prior_precision / alone.prior_precision - 1) < 1e-3
    return 1, int(bool(errors) or not same)


def failing(seed: int, threads: int) -> tuple[int, int]:
    """Answers during and after a search whose data break off, and those that are not the posterior's before it."""
    model, train, held_out, x = made(seed)
    posterior = uq.fit(model, train, prior_precision=0.5, progress=False)
    predictor, answers = uq.wrap(model, posterior), list[torch.Tensor]()
    before, history = predictor(x).probs, str(posterior.history)

    class Breaks(list[Any]):
        reads = 0

        def __iter__(self) -> Any:
            self.reads += 1
            if self.reads > 3:
                raise OSError("the disk is gone")
            return super().__iter__()

    def search() -> None:
        with contextlib.suppress(OSError):
            uq.tune(posterior, Breaks(held_out), progress=False)

    def answer() -> None:
        with torch.no_grad():
            answers.append(predictor(x).probs)

    running(answer, threads, search)
    answers.append(predictor(x).probs)
    bad = sum(float((found - before).abs().max()) > CLOSE for found in answers)
    return len(answers) + 1, bad + int(str(posterior.history) != history)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if there was a bad outcome."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each attack is repeated")
    parser.add_argument("--threads", type=int, default=20, help="threads that predict")
    parser.add_argument("--smoke", action="store_true", help="one round of four threads")
    options = parser.parse_args(arguments)
    rounds, threads = (1, 4) if options.smoke else (options.rounds, options.threads)
    torch.set_num_threads(1)
    bad_in_all = 0
    print("| attack | tries | bad outcomes |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attacks: dict[str, Callable[[int], tuple[int, int]]] = {
            "predict during a search": lambda seed: predicting(seed, threads),
            "save during a search": lambda seed: saving(seed, Path(folder)),
            "two searches at once": searching,
            "predict during a search that fails": lambda seed: failing(seed, threads),
        }
        for name, attack in attacks.items():
            counts = [attack(seed) for seed in range(rounds)]
            tries, bad = sum(count[0] for count in counts), sum(count[1] for count in counts)
            bad_in_all += bad
            print(f"| {name} | {tries:,} | {bad:,} |", flush=True)
    return int(bad_in_all > 0)


if __name__ == "__main__":
    sys.exit(main())
