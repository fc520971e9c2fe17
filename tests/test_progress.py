"""Bars: what they show of a sweep and of a search, and that they wait for no other process."""

from __future__ import annotations

import gc
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from networks import batches, cnn, inputs_of, mlp, targets_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

import posthoc_uq as uq
from posthoc_uq.core import Bar, bars_shown, count_progress, progress, progress_span, split_progress


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the bars draw, which is every change."""
    file, bars = io.StringIO(), progress._bars()
    made: Any = partial(bars, mininterval=0, file=file, ncols=80)
    made.write = bars.write
    monkeypatch.setattr(progress, "_bars", cache(lambda: made))
    return file


@pytest.fixture
def shown(drawn: io.StringIO) -> Callable[[str], list[tuple[int, int]]]:
    """What the bars of a name have shown: how much is done, of how much."""

    def of(name: str) -> list[tuple[int, int]]:
        lines = [line for line in re.split(r"[\r\n]", drawn.getvalue()) if line.startswith(name)]
        found = [re.search(r"(\d+)/(\d+) \[", line) for line in lines]
        assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
        return [(int(match[1]), int(match[2])) for match in found if match]

    return of


def task(model: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return batches(x, targets_of(model, x, "classification"), 30)


@pytest.mark.parametrize(
    ("head", "layers"), [("linearized", None), ("linearized", "last"), ("sampling", None), ("moments", None)]
)
def test_the_search_for_the_faithful_prior_says_how_far_it_is(
    head: str, layers: str | None, shown: Callable[[str], list[tuple[int, int]]]
) -> None:
    model, x = cnn(), inputs_of(1, 4, 4, samples=120)
    data = task(model, x)
    posterior = uq.fit(model, data, "kfac", head=head, layers=layers, prior_precision=1.0, progress=False)
    posterior = uq.tune(posterior, data, criterion="faithful", progress=True)
    frames = shown("faithful prior")
    assert frames[0][0] == 0 and frames[0][1] > 120  # a total from the beginning
    assert all(done < total for done, total in frames)  # never at the end while more may come
    steps = [after[0] - before[0] for before, after in pairwise(frames)]
    assert min(steps) >= 0 and max(steps) <= 64  # inside of an evaluation of 120 inputs, too
    assert posterior.prior_precision > 0
    if head == "linearized" and layers is None:
        assert max(steps) < 60  # inside of a batch


@pytest.mark.parametrize("options", [{}, {"per_layer": True}, {"noise": True}], ids=str)
@pytest.mark.parametrize("method", ["kfac", "full"])
def test_the_search_for_the_evidence_says_how_far_it_is(
    method: str, options: dict[str, Any], shown: Callable[[str], list[tuple[int, int]]]
) -> None:
    model, x = mlp(), inputs_of(4, samples=60)
    y = targets_of(model, x, "regression")
    posterior = uq.fit(
        model, batches(x, y), method, likelihood="regression", prior_precision=1.0, progress=False
    )
    trials = uq.tune(posterior, criterion="evidence", progress=True, **options).history.trials
    frames = shown("evidence")
    assert trials is not None and len(frames) > len(trials.trials) and frames[0][1] >= 16
    assert all(done < total for done, total in frames)


def test_what_a_fit_and_a_tuning_search_by_the_way_is_shown(
    shown: Callable[[str], list[tuple[int, int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = mlp(), inputs_of(4, samples=60)
    posterior = uq.fit(model, task(model, x), "diag", prior_precision="evidence", progress=True)
    assert re.search(r"^fitted in [\d.]+ s: .*other [\d.]+$", capsys.readouterr().err, re.M)
    uq.tune(posterior, task(model, x), criterion="likelihood", progress=True)
    assert shown("faithful prior")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of promises that no longer hold
def test_a_call_says_that_it_returned_a_new_posterior(
    drawn: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once a call, for those who forget to take it; not for a search inside of a fit, nor without bars."""
    model, x = mlp(), inputs_of(4, samples=60)
    data = task(model, x)
    posterior = uq.fit(model, data, "diag", val_loader=data, progress=True)
    assert posterior.history.promises and "returned" not in capsys.readouterr().err
    calls: list[Callable[..., uq.Posterior]] = [
        partial(uq.tune, posterior, data),
        partial(uq.tune, posterior, data, criterion="faithful"),
        partial(uq.tune, posterior, data, criterion="leave_one_out"),
        partial(uq.tune, posterior, per_layer=True),
        partial(uq.calibrate, posterior, data),
        partial(uq.update, posterior, data),
    ]
    for call in calls:
        found = call(progress=True)
        (line,) = re.findall(r"^returned a new posterior: (.*)$", capsys.readouterr().err, re.M)
        prior, promises = found.prior_precision, found.history.promises
        shown = "per layer" if isinstance(prior, dict) else f"{prior:.4g}"
        assert f"prior precision {shown}, " in line and f"temperature {found.temperature:.4g}" in line
        assert f"scale {found.scale:.4g}, " in line
        assert line.endswith(", promises from 30 rows") == bool(promises)
        call(progress=False)
        assert capsys.readouterr().err == ""


@dataclass
class Stream:
    """A loader without a length, which may fail in one of its passes."""

    data: list[Any]
    fails_in: int = 0
    passes: int = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield self.data[0]
        if self.passes == self.fails_in:
            raise KeyboardInterrupt
        yield from self.data[1:]


Frames = list[tuple[int, int | None]]


def phases_of(drawn: io.StringIO) -> list[tuple[list[str], Frames]]:
    """The phases that were drawn, one after the other: the names of each, and what it has shown of how much."""
    phases: list[tuple[list[str], Frames]] = []
    assert "\n" not in drawn.getvalue()  # never two bars at once
    for phase in re.split(r"\r +\r", drawn.getvalue())[:-1]:
        found = [
            re.match(r"([^:]+): +(?:\d+%\|.*\| )?(\d+)(?:/(\d+))? ", line) for line in phase.split("\r")[1:]
        ]
        assert found and all(found), phase
        lines = [match.groups() for match in found if match]
        frames = [(int(done), None if total is None else int(total)) for _, done, total in lines]
        assert frames[0][0] == 0 and all(
            before[0] <= after[0] for before, after in pairwise(frames)
        )  # never back
        phases.append((list(dict.fromkeys(name.partition(",")[0] for name, *_ in lines)), frames))
    return phases


SWEEPS = ["bases", "eigenbases", "eigenvalues and diagonal", "blocks"]
SEARCHES = ["faithful prior", "evidence", "tuning"]
"""Whose numbers of evaluations are not known before."""


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("kfac", {"prior_precision": 1.0}, ["Kronecker factors", "eigenbases"]),
        ("inf", {}, [*SWEEPS, "untrained networks", "faithful prior"]),
        (
            "kfac",
            {"prior_precision": "evidence"},
            ["Kronecker factors", "eigenbases", "evidence", "drawn models"],
        ),
        ("inf", {"likelihood": "regression"}, ["noise", *SWEEPS, "untrained networks", "evidence"]),
        ("inf", {"val_loader": True}, [*SWEEPS, "faithful prior", "tuning", "calibrate"]),
        ("message_passing", {"epochs": 2}, ["looking at the data", "message passing"]),
        (
            "utvi",
            {"epochs": 2, "divergence": 0.1},
            ["counting", "training", *2 * ["looking at the data"], "faithful prior"],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "without a length"])
def test_a_fit_shows_one_phase_after_the_other(
    method: str, options: dict[str, Any], expected: list[str], sized: bool, drawn: io.StringIO
) -> None:
    model, x = mlp(), inputs_of(4, samples=60)
    kind = options.get("likelihood", "classification")
    data: Any = batches(x, targets_of(model, x, kind), 20)
    data = data if sized else Stream(data)
    given = options | ({"val_loader": data} if "val_loader" in options else {})
    uq.fit(model, data, method, progress=True, **given)
    phases = phases_of(drawn)
    assert [names[0] for names, _ in phases] == ["dry run", *expected]
    for names, frames in phases:
        if names[0] in SEARCHES:
            assert all(total is not None and done < total for done, total in frames)
        else:
            assert frames[-1][0] == (frames[-1][1] or 60)  # all of it, or all samples
        assert names == [names[0]] or names == ["training", "epoch 1 of 2", "epoch 2 of 2"]


@pytest.mark.parametrize("method", ["inf", "utvi"])
def test_the_bar_of_an_interrupted_fit_is_closed(
    method: str, drawn: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # bars of other tests close when they go
    model, x = mlp(), inputs_of(4, samples=60)
    data, closed, bars = task(model, x), list[float](), progress._bars().func
    close = bars.close
    monkeypatch.setattr(bars, "close", lambda bar: (closed.append(bar.n), close(bar))[1])
    with pytest.raises(KeyboardInterrupt):
        uq.fit(model, Stream(data, fails_in=2), method, progress=True)
    assert 30 in closed  # of the phase that was interrupted after a batch
    assert phases_of(drawn) and not bars._instances
    with Bar(data, "later", True) as bar:  # a bar of its own
        bar.advance(60)
    assert "later:" in drawn.getvalue()


def test_nothing_is_shown_without_progress(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = mlp(), inputs_of(4, samples=60)
    posterior = uq.fit(model, task(model, x), "diag", prior_precision="evidence", progress=False)
    uq.tune(posterior, task(model, x), progress=False)
    uq.tune(posterior, criterion="evidence", progress=False)
    assert capsys.readouterr().err == ""


def test_by_default_bars_are_shown_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp(), inputs_of(4, samples=60)

    def shown() -> list[bool]:
        posterior = uq.fit(model, task(model, x), "diag", prior_precision=1.0)
        predictor, found = uq.wrap(model, posterior, "moments"), [capsys.readouterr().err != ""]
        for call in (
            lambda: uq.tune(posterior, task(model, x)),
            lambda: uq.calibrate(posterior, task(model, x)),
            lambda: uq.update(posterior, task(model, x)),
            lambda: uq.evaluate(predictor, task(model, x)),
            lambda: predictor.predict([x]),
        ):
            call()
            found.append(capsys.readouterr().err != "")
        return found

    assert shown() == 6 * [False]  # captured, as in a pipe
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    assert shown() == 6 * [True]
    monkeypatch.setattr(sys, "stderr", None)
    assert not bars_shown(None)
    with pytest.raises(uq.PosthocUQError, match="progress must be"):
        uq.evaluate(model, task(model, x), progress="yes")  # type: ignore[arg-type]


def test_shares_of_shares_add_up() -> None:
    counts: list[int] = []
    with count_progress(100, counts.append):
        for _ in split_progress(range(2)):
            with progress_span(0, 0.5):
                for _ in split_progress("abc"):
                    pass
            assert list(split_progress("de")) == ["d", "e"]
    assert sum(counts) == 100 and len(counts) > 6 and min(counts) > 0
    with pytest.raises(ZeroDivisionError), count_progress(10, counts.append):
        for part in split_progress(range(2)):
            torch.tensor(1 // part)
    assert list(split_progress("fg")) == ["f", "g"] and sum(counts) == 100


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Counted:
    """A loader of two batches that counts how often it is started."""

    def __init__(self) -> None:
        self.starts = 0

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        self.starts += 1
        return iter([X, X])


@pytest.mark.parametrize(
    ("loader", "total"),
    [
        (Counted(), 8),  # so many batches, all as large as the first
        (DataLoader(TensorDataset(X, Y), batch_size=4), len(X)),  # the last batch is smaller
        ((x for x in [X]), None),
    ],
)
def test_a_sweep_shows_how_many_samples_are_done(
    loader: Any, total: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for visible in (True, False):
        with Bar(loader, "bases, 3 layers", visible) as bar:
            time.sleep(0.15)  # tqdm draws ten times a second at most
            bar.advance(4)
        shown = capsys.readouterr().err
        if not visible:
            assert shown == ""
            continue
        assert "bases, 3 layers" in shown and "samples/s" in shown
        assert (f"4/{total} [" in shown and "<" in shown) if total else "4 samples [" in shown


def test_no_bar_waits_for_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Held:
        """tqdm's own lock, as after the death of a process that held it."""

        def acquire(self, *_: Any) -> None:
            tried.append("acquire")
            raise AssertionError("this would wait for ever")

        __enter__ = acquire

        def __exit__(self, *_: object) -> None: ...

    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
    loader = [(X.float(), Y)]
    with tqdm(total=2, disable=False, leave=False) as own:
        monkeypatch.setattr(tqdm, "_lock", Held())
        for progress in (False, True):
            posterior = uq.fit(model, loader, method="utvi", epochs=1, progress=progress)
            uq.fit(model, loader, method="diag", progress=progress)
            uq.tune(posterior, loader, parameters=["scale"], criterion="likelihood", progress=progress)
        monkeypatch.undo()
        assert own.pos == 0 and tqdm.get_lock() is not None
    assert not tried


def test_bars_stand_below_those_of_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=2, leave=False), Bar([X], "inner", True) as bar:
        bar.advance(6)
    assert "\n" in capsys.readouterr().err.partition("inner")[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only a forked process inherits a lock")
def test_a_forked_process_has_a_lock_of_its_own() -> None:
    with Bar([X], "made", True):
        pass
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with progress._bars().get_lock():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if progress._bars().get_lock().acquire(blocking=False) else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
