"""Bars: what they show of a sweep and of a search, and that they wait for no other process."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from networks import batches, cnn, inputs_of, mlp, targets_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

import posthoc_uq as uq
from posthoc_uq.core import progress
from posthoc_uq.core.batches import Bar, Batch
from posthoc_uq.core.progress import _bars, counted, in_parts, share
from posthoc_uq.fitting.first_batch import pass_seconds


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[int, int]]]:
    """What the bars of a name have shown: how much is done, of how much."""
    file, bars = io.StringIO(), progress._bars()
    made: Any = partial(bars, mininterval=0, file=file, ncols=80)
    made.write = bars.write
    monkeypatch.setattr(progress, "_bars", cache(lambda: made))

    def of(name: str) -> list[tuple[int, int]]:
        lines = [line for line in re.split(r"[\r\n]", file.getvalue()) if line.startswith(name)]
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
    posterior = uq.fit(model, task(model, x), "kfac", head=head, layers=layers, progress=True)
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
    trials = uq.tune(posterior, criterion="evidence", progress=True, **options)
    frames = shown("evidence")
    assert len(frames) > len(trials.trials) and frames[0][1] >= 16
    assert all(done < total for done, total in frames)


def test_what_a_fit_and_a_tuning_search_by_the_way_is_shown(
    shown: Callable[[str], list[tuple[int, int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = mlp(), inputs_of(4, samples=60)
    posterior = uq.fit(model, task(model, x), "diag", prior_precision="evidence", progress=True)
    assert shown("evidence") and shown("drawn models")[-1] == (20, 20)
    assert not shown("faithful prior")
    assert re.search(r"^fitted in [\d.]+ s: .*other [\d.]+$", capsys.readouterr().err, re.M)
    uq.tune(posterior, task(model, x), criterion="likelihood", progress=True)
    assert shown("faithful prior")


def test_a_long_fit_says_beforehand_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x, fit_module = mlp(), inputs_of(4, samples=60), import_module("posthoc_uq.fitting.fit")
    state = torch.get_rng_state()
    uq.fit(model, task(model, x), "diag", prior_precision=1.0, progress=True)
    assert "will take" not in capsys.readouterr().err
    monkeypatch.setattr(fit_module, "_LONG", 0.0)
    monkeypatch.setattr(fit_module, "pass_seconds", lambda model, batch: (1.0, 3.0))
    uq.fit(model, task(model, x), "kfac", prior_precision=1.0, progress=True)
    line = "this fit will take about 4 minutes for 60 samples on cpu; with layers='last' about 1 minute"
    assert line in capsys.readouterr().err.splitlines()
    monkeypatch.undo()
    forward, whole = pass_seconds(model, Batch((x,)))
    assert forward > 0 and whole > 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


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
    assert not progress.bars_shown(None)
    with pytest.raises(uq.PosthocUQError, match="progress must be"):
        uq.evaluate(model, task(model, x), progress="yes")  # type: ignore[arg-type]


def test_shares_of_shares_add_up() -> None:
    counts: list[int] = []
    with counted(100, counts.append):
        for _ in in_parts(range(2)):
            with share(0, 0.5):
                for _ in in_parts("abc"):
                    pass
            assert list(in_parts("de")) == ["d", "e"]
    assert sum(counts) == 100 and len(counts) > 6 and min(counts) > 0
    with pytest.raises(ZeroDivisionError), counted(10, counts.append):
        for part in in_parts(range(2)):
            torch.tensor(1 // part)
    assert list(in_parts("fg")) == ["f", "g"] and sum(counts) == 100


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
        with _bars().get_lock():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if _bars().get_lock().acquire(blocking=False) else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
