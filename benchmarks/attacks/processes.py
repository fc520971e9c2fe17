"""What happens to a program around a fit: killed children, Ctrl-C, and errors that come from the model.

    OMP_NUM_THREADS=1 python benchmarks/attacks/processes.py
    OMP_NUM_THREADS=1 python benchmarks/attacks/processes.py --only hang --tries 100

Every attack runs in a process of its own, which does one try after another and reports each. A process that says
nothing for `--limit` seconds hangs: it is killed, counted, and replaced by a new one. All data are made here.

* **hang, killed child**: a child that shows bars of its own is forked and killed, then the parent fits.
* **hang, forked among bars**: threads show the library's bars while a child is forked, and the child fits.
* **hang, killed worker**: a loader's worker process is killed in a fit, which must fail; the next fit must not.
* **interrupt**: SIGINT at any moment of a save, a load or a fit. It must end in KeyboardInterrupt, with the old file or
  the new one whole, no other file, and the model, the random state and torch's own state as they were.
* **error**: a model fails at one of its passes, once or from then on, with an error of its own or for want of memory.
  That must reach the caller, and predictions after it must be those of before; with drawn weights even where the failed
  pass left its copy of the model half written. Every pass is tried, so that `--tries` only says how many at most.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import posthoc_uq as uq
from posthoc_uq.core.batches import Bar

CPU = torch.device("cpu")


def network(seed: int = 0) -> nn.Module:
    """A small classifier."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def data(samples: int = 64, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Batches of random numbers and labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(3, (samples,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


# Each attack yields what was wrong with a try, "" where nothing was.


def fork(work: Callable[[], None]) -> int:
    """A child that does this and nothing else."""
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return child


def bars_for_ever() -> None:
    """What a killed child does: its lock is tqdm's own."""
    while True:
        tqdm(disable=True).close()


def killed_child(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
    """Children that show bars of their own are killed at any moment; then the parent fits."""
    model, loader = network(), data()
    tqdm(disable=True).close()  # the lock exists before the fork, as where the caller shows a bar
    for number in range(tries):
        child = fork(bars_for_ever)
        time.sleep(chance.uniform(0.001, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        uq.fit(model, loader, method="diag", prior_precision=1.0, progress=number % 2 == 0)
        yield ""


def forked_among_bars(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
    """Children are forked while threads show the library's bars, and fit."""
    stop = threading.Event()

    def show() -> None:
        while not stop.is_set():
            with Bar([1] * 10, "thread", True) as bar:
                bar.advance(1)

    threads = [threading.Thread(target=show, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(tries):
        time.sleep(chance.uniform(0.0, 0.005))
        child = fork(lambda: Bar([1], "child", True).__exit__())
        _, status = os.waitpid(child, 0)
        yield "" if status == 0 else f"the child ended with {status}"
    stop.set()


class Dying(Dataset[tuple[Tensor, int]]):
    """Its worker shows bars, and one item kills it meanwhile."""

    def __init__(self, fatal: int | None) -> None:
        self.fatal = fatal

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.fatal:
            threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
            bars_for_ever()
        return torch.ones(6) * index, index % 3


def killed_worker(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
    """A loader's worker process dies in a fit; the next fit goes on."""
    model = network()
    tqdm(disable=True).close()
    for _ in range(tries):
        dying = DataLoader(Dying(chance.randrange(32)), batch_size=8, num_workers=1)
        try:
            uq.fit(model, dying, method="diag", prior_precision=1.0, progress=False)
            wrong = "a fit without its worker ended well"
        except Exception:
            wrong = ""
        for _ in range(2):
            try:
                uq.fit(model, DataLoader(Dying(None), batch_size=8), prior_precision=1.0, progress=False)
                break
            except RuntimeError as error:  # torch reports a dead worker wherever the program is by then
                if "is killed by signal" not in str(error):
                    raise
        else:
            wrong = wrong or "no fit after it"
        yield wrong


def state_of(model: nn.Module) -> list[Any]:
    """All that a call must leave as it was."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, tensor.requires_grad, tensor._version, tensor.grad is None) for name, tensor in tensors],
        [tensor.detach().sum().item() for _, tensor in tensors],
        [
            (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for m in model.modules()
        ],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),
        torch._C._functorch.maybe_current_level(),
        torch.get_rng_state().sum().item(),
        random.getstate(),
        signal.getsignal(signal.SIGINT),
    ]


class Interrupted:
    """Calls with one SIGINT at a random moment of each."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.heard = chance, 0
        signal.signal(signal.SIGINT, self.hear)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))

    def hear(self, *_: Any) -> None:
        self.heard += 1
        raise KeyboardInterrupt

    def wrong(self, call: Callable[[], Any], seconds: float, model: nn.Module) -> str:
        """What was wrong with one call that takes about so many seconds."""
        self.heard, before, outcome = 0, state_of(model), "nothing"
        delay = self.chance.uniform(1e-4, seconds)
        heard_inside = False
        try:
            # No thread: an interrupt in the midst of starting one could leave its lock held.
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                call()
                heard_inside = self.heard > 0
                outcome = "returned"
            except KeyboardInterrupt:
                outcome = "interrupted"
            except BaseException as error:
                outcome = f"raised {type(error).__name__}"
            until = time.monotonic() + 5
            while not self.heard and time.monotonic() < until:
                pass
        except KeyboardInterrupt:
            pass
        if not self.heard:
            return "lost"
        if outcome == "returned" and heard_inside:
            return "swallowed"
        if outcome.startswith("raised"):
            return outcome
        changed = [place for place, (a, b) in enumerate(zip(before, state_of(model), strict=True)) if a != b]
        if changed:
            random.seed(0)
            torch.set_grad_enabled(True)
        return f"left state {changed} changed" if changed else ""


def timed(call: Callable[[], Any]) -> float:
    """The seconds that a call takes."""
    call()
    start = time.perf_counter()
    call()
    return 1.1 * (time.perf_counter() - start)


def interrupted_save(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
    """A save over an older file."""
    model, loader, target = network(), data(), folder / "posterior.h5"
    posteriors = [uq.fit(model, loader, prior_precision=tau, progress=False) for tau in (1.0, 2.0)]
    wholes: list[bytes] = []
    for posterior in posteriors:
        uq.save(posterior, target)
        wholes.append(target.read_bytes())
    seconds, attack = timed(lambda: uq.save(posteriors[0], target)), Interrupted(chance)
    for number in range(tries):
        wrong = attack.wrong(lambda number=number: uq.save(posteriors[number % 2], target), seconds, model)
        if not wrong and target.read_bytes() not in wholes:
            wrong = "damaged file"
        left = [path for path in folder.iterdir() if path != target]
        for path in left:
            path.unlink()
        yield wrong or ("temporary file" if left else "")


def interrupted_load(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
    """A load, in this process and with a child that parses."""
    model, target = network(), folder / "posterior.h5"
    uq.save(uq.fit(model, data(), prior_precision=1.0, progress=False), target)
    attack: Interrupted | None = None
    for untrusted, share in ((False, tries - tries // 10), (True, tries // 10)):
        seconds = timed(lambda untrusted=untrusted: uq.load(target, model, untrusted=untrusted))
        attack = attack or Interrupted(chance)
        for _ in range(share):
            yield attack.wrong(
                lambda untrusted=untrusted: uq.load(target, model, untrusted=untrusted), seconds, model
            )


def interrupted_fits(method: str, **options: Any) -> Callable[[int, random.Random, Path], Iterator[str]]:
    """Fits by one method."""

    def attack(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
        model, loader = network(), data()

        def fit() -> None:
            uq.fit(model, loader, method=method, progress=False, **options)

        seconds, interrupted = timed(fit), Interrupted(chance)
        for _ in range(tries):
            yield interrupted.wrong(fit, seconds, model)

    return attack


class Mine(Exception):
    """An error of the model's own."""


class Failing(nn.Module):
    """A model that keeps something during a pass, and fails in the middle of one.

    Attributes:
        passes: of all copies of the model.
        fatal: which of them fails; with `ever` those after it too.
        unseen: whether it failed on inputs that nobody gave, which the library makes to find out what a model keeps.
        untidy: whether a failed pass leaves it half written.
    """

    passes, fatal, ever, unseen, untidy = 0, 0, False, False, True
    error: Exception = Mine()

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
            self.head = nn.Linear(16, 3)
        self.depth = 0

    @classmethod
    def armed(cls, fatal: int, ever: bool, error: Exception) -> None:
        cls.passes, cls.fatal, cls.ever, cls.error, cls.unseen = 0, fatal, ever, error, False

    def forward(self, x: Tensor) -> Tensor:
        cls = type(self)
        self.depth += 1
        hidden = self.body(x)
        cls.passes += 1
        if cls.fatal and (cls.passes == cls.fatal or (cls.ever and cls.passes > cls.fatal)):
            frame: Any = sys._getframe()
            while frame is not None and frame.f_code.co_name != "_disturb":
                frame = frame.f_back
            cls.unseen = frame is not None
            self.depth -= not cls.untidy
            raise cls.error
        outputs = self.head(hidden) * self.depth
        self.depth -= 1
        return outputs


ERRORS: tuple[Exception, ...] = (
    Mine("its own"),
    torch.OutOfMemoryError("out of memory"),
    MemoryError("none left"),
)


def reached(error: BaseException | None, meant: Exception) -> bool:
    """Whether an error is the one that was meant, or says so."""
    while error is not None:
        if type(error) is type(meant):
            return True
        error = error.__cause__
    return False


def failing(call: Callable[[], Any], fatal: int, ever: bool, error: Exception) -> str:
    """What was wrong with a call in which a pass fails."""
    Failing.armed(fatal, ever, error)
    try:
        call()
        hit = Failing.passes >= fatal and not Failing.unseen
        return "swallowed" if hit else ""
    except Exception as raised:
        return "" if reached(raised, error) else f"became {type(raised).__name__}"
    finally:
        Failing.armed(0, False, error)


def failing_fits(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
    """A pass fails in a fit."""
    done = 0
    model, loader = Failing(), data()

    def fit() -> None:
        uq.fit(model, loader, layers="last", progress=False)

    Failing.armed(0, False, ERRORS[0])
    fit()
    for fatal in range(1, Failing.passes + 1):
        for error in ERRORS:
            for ever in (False, True):
                if done == tries:
                    return
                done += 1
                wrong = failing(fit, fatal, ever, error)
                yield wrong or ("model changed" if model.depth else "")


def failing_predictions(tries: int, chance: random.Random, folder: Path) -> Iterator[str]:
    """A pass fails in a prediction, of every head, over a last layer and over all layers."""
    done, x = 0, data()[0][0]
    options: list[dict[str, Any]] = [{"head": "linearized"}, {"head": "moments"}]
    options += [{"head": "sampling", "n_samples": 9, "batched": batched} for batched in (True, False, "auto")]
    for layers in ("last", "all"):
        Failing.armed(0, False, ERRORS[0])
        model = Failing()
        posterior = uq.fit(model, data(), "diag", layers=layers, prior_precision=5.0, progress=False)
        for option in options:
            # The other heads run one copy of the network, as the caller's program would.
            Failing.untidy = option["head"] == "sampling"
            expected = uq.wrap(model, posterior, **option)(x).probs
            Failing.armed(0, False, ERRORS[0])
            uq.wrap(model, posterior, **option)(x)
            for fatal in range(1, Failing.passes + 1):
                for error in ERRORS:
                    for ever in (False, True):
                        if done == tries:
                            return
                        done += 1
                        predictor = uq.wrap(model, posterior, **option)
                        wrong = failing(lambda predictor=predictor: predictor(x), fatal, ever, error)
                        after = [predictor(x).probs for _ in range(3)]
                        if not wrong and not all(torch.allclose(own, expected, atol=1e-5) for own in after):
                            wrong = "wrong prediction after it"
                        yield wrong


ATTACKS: dict[str, Callable[[int, random.Random, Path], Iterator[str]]] = {
    "hang, killed child": killed_child,
    "hang, forked among bars": forked_among_bars,
    "hang, killed worker": killed_worker,
    "error, fit": failing_fits,
    "error, predict": failing_predictions,
    "interrupt, save": interrupted_save,
    "interrupt, load": interrupted_load,
    "interrupt, fit subnetwork": interrupted_fits("subnetwork", n=20, prior_precision=1.0),
    "interrupt, fit inf, faithful": interrupted_fits("inf"),
    "interrupt, fit kfac, sampling": interrupted_fits("kfac", head="sampling"),
}


def victim(name: str, tries: int, seed: int) -> None:
    """Run tries of one attack, and say of each what was wrong."""
    out = os.fdopen(os.dup(1), "w")
    warnings.simplefilter("ignore")
    print(json.dumps("ready"), file=out, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for wrong in ATTACKS[name](tries, random.Random(seed), Path(folder)):
            print(json.dumps(wrong), file=out, flush=True)


def attacked(name: str, tries: int, limit: float) -> list[str]:
    """What was wrong with each try of an attack, in as many processes as it takes."""
    results: list[str] = []
    while len(results) < tries:
        command = [sys.executable, __file__, "--victim", name, "--seed", str(len(results))]
        process = subprocess.Popen(
            [*command, "--tries", str(tries - len(results))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()

        def read(process: Any = process, lines: queue.Queue[str | None] = lines) -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        wait = limit + 60.0  # the first try comes after all imports
        while len(results) < tries:
            try:
                line = lines.get(timeout=wait)
            except queue.Empty:
                results.append("hung")
                break
            wait = limit
            if line is not None and json.loads(line) == "ready":
                continue
            if line is None:
                if process.wait() == 0:  # no try is left
                    return results
                results.append(f"the process ended with {process.wait()}")
                break
            results.append(json.loads(line))
        process.kill()
        process.wait()
    return results


def run(names: list[str], tries: int, limit: float) -> int:
    """Print a table of all attacks; returns the number of bad outcomes."""
    print("| attack | tries | bad outcomes |")
    print("| --- | --- | --- |")
    total = 0
    for name in names:
        results = attacked(name, tries, limit)
        bad = [wrong for wrong in results if wrong]
        counts = ", ".join(f"{bad.count(kind)} {kind}" for kind in sorted(set(bad)))
        print(f"| {name} | {len(results)} | {len(bad)}{f' ({counts})' if counts else ''} |", flush=True)
        total += len(bad)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tries", type=int, default=100, help="of each attack")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a try hangs")
    parser.add_argument("--only", default="", help="attacks whose names begin so")
    parser.add_argument("--smoke", action="store_true", help="a few tries of each attack")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--victim", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.victim:
        victim(arguments.victim, arguments.tries, arguments.seed)
        return
    names = [name for name in ATTACKS if name.startswith(arguments.only)]
    sys.exit(1 if run(names, 3 if arguments.smoke else arguments.tries, arguments.limit) else 0)


if __name__ == "__main__":
    main()
