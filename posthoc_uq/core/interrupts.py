"""Ctrl-C ends a call where nothing is half done.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. In the callback of a weak reference,
or in a destructor, it is printed and lost; at the first instruction of a context manager's exit, what the context
changed stays: gradients switched off, torch's functions intercepted, a temporary file. So during a call of this library
the first interrupt is noted, and raised at the next `check`. While the caller's loader is waited for, and at the second
interrupt, it is raised at once. Where the call ends before that, in whatever way, it is raised then.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Watch:
    """The handler of interrupts during a call; the caller's handler decides what an interrupt does.

    Attributes:
        handler: the caller's.
        at_once: whether the next interrupt need not wait for a `check`.
        ending: whether every further one must wait for the end of the call.
        noted: what the handler was called with, until the caller's handler has had it and returned.
        raised: what the caller's handler raised.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler, self.process = handler, os.getpid()
        self.at_once = self.ending = False
        self.noted: tuple[Any, ...] | None = None
        self.raised: BaseException | None = None

    def __call__(self, *arguments: Any) -> None:
        if os.getpid() != self.process:  # a forked child, as a loader's worker
            self.handler(*arguments)
            return
        now = not self.ending and (self.at_once or self.noted is not None)
        self.noted, self.at_once = arguments, False
        if now:
            self.deliver()

    def deliver(self) -> None:
        """Hand the noted interrupt to the caller's handler, which mostly raises."""
        assert self.noted is not None
        try:
            self.handler(*self.noted)
        except BaseException as raised:
            self.raised = raised
            raise
        self.noted = None

    @property
    def here(self) -> bool:
        """Whether this is the thread and the process that interrupts reach."""
        return threading.current_thread() is threading.main_thread() and os.getpid() == self.process


_watch: _Watch | None = None


def orderly(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have interrupts wait for a `check` during the calls of a function from the main thread."""

    @wraps(call)
    def watched(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        watch = _begun()
        if watch is None:
            return call(*args, **kwargs)
        error: BaseException | None = None
        try:
            return call(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            watch.ending = True
            _end(watch)
            if watch.noted is not None and (watch.raised is None or error is not watch.raised):
                watch.deliver()  # it came after the last check, or something swallowed or replaced it
            error = watch.raised = None

    return watched


def _begun() -> _Watch | None:
    """A new watch; None inside another one, in other threads, and where an interrupt is not Python's to handle."""
    global _watch
    handler: Any = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _watch is not None or not callable(handler) or not in_main_thread:
        return None
    watch = _Watch(handler)
    try:
        signal.signal(signal.SIGINT, watch)
    except ValueError:  # the main thread of an interpreter that is not the main one
        return None
    _watch = watch
    return watch


def _end(watch: _Watch) -> None:
    global _watch
    _watch = None
    if signal.getsignal(signal.SIGINT) is watch:  # the caller's code may have set another one meanwhile
        signal.signal(signal.SIGINT, watch.handler)


def check() -> None:
    """Raise a noted interrupt; called where nothing is half done."""
    if _watch is not None and _watch.noted is not None and _watch.here:
        _watch.deliver()


def at_once(call: Callable[..., Result], *arguments: Any) -> Result:
    """Call code of the caller's that may wait for long, as its loader: an interrupt is raised inside of it."""
    watch = _watch
    if watch is None or not watch.here:
        return call(*arguments)
    watch.at_once = True
    try:
        check()
        result = call(*arguments)
    finally:
        watch.at_once = False
    check()
    return result
