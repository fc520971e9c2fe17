"""Ctrl-C during a call: never lost, and nothing is half done."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import batches, inputs_of, mlp, targets_of
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import defer_interrupts, interrupts
from posthoc_uq.files import save_load


@pytest.fixture(autouse=True)
def handler() -> Generator[Any]:
    """The handler of before is there again."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """What Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


class Interrupting(nn.Module):
    """A model with an interrupt in one of its passes."""

    def __init__(self, layers: nn.Module, number: int) -> None:
        super().__init__()
        self.layers, self.left = layers, number

    def forward(self, x: Tensor) -> Tensor:
        # not an attribute, so that copies of the model count together
        COUNT[0] += 1
        if COUNT[0] == self.left:
            interrupt()
        return self.layers(x)


COUNT = [0]


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    class Thing: ...

    done: list[str] = []

    @defer_interrupts
    def call() -> None:
        thing = Thing()
        reference = weakref.ref(thing, lambda _: interrupt())
        del thing
        assert reference() is None
        done.append("before the check")
        interrupts.check()
        done.append("after it")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["before the check"]


def test_an_interrupt_is_raised_at_the_end_at_the_latest() -> None:
    @defer_interrupts
    def call(error: Exception | None) -> None:
        interrupt()
        if error is not None:
            raise error

    with pytest.raises(KeyboardInterrupt):
        call(None)
    with pytest.raises(KeyboardInterrupt) as raised:
        call(ValueError("made of it"))
    assert isinstance(raised.value.__context__, ValueError)


def test_the_second_interrupt_does_not_wait() -> None:
    reached: list[int] = []

    @defer_interrupts
    def call() -> None:
        interrupt()
        reached.append(1)
        interrupt()
        reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert reached == [1]


def test_the_callers_own_handler_decides() -> None:
    heard: list[int] = []
    x = inputs_of(4)
    model = mlp()

    def loader() -> Iterator[Any]:
        interrupt()
        yield x, targets_of(model, x, "classification")

    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    posterior = uq.fit(model, list(loader()), method="diag", prior_precision=1.0, progress=False)
    uq.update(posterior, loader(), progress=False)
    assert heard == [signal.SIGINT] * 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uq.update(posterior, loader(), progress=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_loader_that_is_waited_for_is_interrupted_at_once() -> None:
    reached: list[str] = []

    def loader() -> Iterator[Any]:
        interrupt()
        reached.append("went on")
        yield inputs_of(4)

    with pytest.raises(KeyboardInterrupt):
        uq.fit(mlp(), loader(), method="diag", prior_precision=1.0, progress=False)
    assert not reached


@pytest.mark.parametrize("place", ["as_array", "_image"])
def test_an_interrupted_save_leaves_the_old_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model = inputs_of(4), mlp()
    loader = batches(x, targets_of(model, x, "classification"))
    target = tmp_path / "posterior.h5"
    uq.save(uq.fit(model, loader, method="diag", prior_precision=1.0, progress=False), target)
    old = target.read_bytes()
    posterior = uq.fit(model, loader, method="diag", prior_precision=2.0, progress=False)
    own = getattr(save_load, place)

    def interrupted(*arguments: Any) -> Any:
        interrupt()
        return own(*arguments)

    monkeypatch.setattr(save_load, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        uq.save(posterior, target)
    monkeypatch.undo()
    assert target.read_bytes() == old and list(tmp_path.iterdir()) == [target]
    uq.save(posterior, target)
    assert target.read_bytes() != old
    uq.load(target, model)


@pytest.mark.parametrize("method", ["subnetwork", "inf"])
def test_an_interrupted_fit_leaves_everything_as_it_was(method: str) -> None:
    x = inputs_of(4)
    network = mlp()
    y = targets_of(network, x, "classification")
    passes, state = 0, torch.get_rng_state()
    while True:
        COUNT[0], passes = 0, passes + 1
        model = Interrupting(network, passes)
        try:
            uq.fit(model, batches(x, y), method=method, prior_precision=1.0, progress=False)
        except KeyboardInterrupt:
            assert COUNT[0] >= passes
        else:
            assert passes > COUNT[0] > 3  # no pass was left to be interrupted
            break
        assert torch.is_grad_enabled() and all(p.requires_grad for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert torch._C._len_torch_function_stack() == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_at_the_exit_of_a_context_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = inputs_of(4), mlp()
    loader = batches(x, targets_of(model, x, "classification"))
    leave = torch.no_grad.__exit__
    left = [0]

    def interrupted(self: Any, *arguments: Any) -> None:
        left[0] += 1
        if left[0] == 2:
            interrupt()  # before the context has done anything
        leave(self, *arguments)

    monkeypatch.setattr(torch.no_grad, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uq.fit(model, loader, method="subnetwork", n=5, prior_precision=1.0, progress=False)
    assert left[0] >= 2 and torch.is_grad_enabled()


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no such signal")
def test_what_other_signals_raise_waits_too() -> None:
    heard: list[int] = []

    def raising(number: int, frame: Any) -> None:
        heard.append(number)
        raise TimeoutError("too long")

    @defer_interrupts
    def call() -> None:
        signal.raise_signal(signal.SIGALRM)
        heard.append(0)
        signal.raise_signal(signal.SIGUSR1)  # whose handler does not raise, and runs at once
        heard.append(0)
        interrupts.check()
        heard.append(-1)

    numbers = (signal.SIGALRM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    own = [raising, lambda number, frame: heard.append(number)]
    try:
        for number, handler in zip(numbers, own, strict=True):
            signal.signal(number, handler)
        with pytest.raises(TimeoutError, match="too long"):
            call()
        assert heard == [signal.SIGALRM, 0, signal.SIGUSR1, 0]
        assert [signal.getsignal(number) for number in numbers] == own
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no such signal")
def test_all_handlers_are_given_back_where_one_raises_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, raising)
    given_back = interrupts._set_handler

    def interrupted(number: int, handler: Any) -> Any:
        found = given_back(number, handler)
        if handler is signal.default_int_handler:
            signal.raise_signal(signal.SIGALRM)
        return found

    monkeypatch.setattr(interrupts, "_set_handler", interrupted)
    try:
        with pytest.raises(TimeoutError):
            defer_interrupts(lambda: None)()
        assert signal.getsignal(signal.SIGALRM) is raising
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("head", ["linearized", "sampling", "moments"])
@pytest.mark.filterwarnings("ignore:The posterior's prior precision was found")
def test_an_interrupted_prediction_leaves_no_mode_behind(head: str) -> None:
    x, network = inputs_of(4), mlp()
    model = Interrupting(network, 1000)
    COUNT[0] = 1000
    loader = batches(x, targets_of(network, x, "classification"))
    predictor = uq.wrap(model, uq.fit(model, loader, "diag", prior_precision=1.0, progress=False), head)
    state = torch.get_rng_state()
    COUNT[0] = 999
    with pytest.raises(KeyboardInterrupt):
        predictor(x)
    assert torch.is_grad_enabled() and torch._C._len_torch_function_stack() == 0
    assert torch.equal(torch.get_rng_state(), state)
