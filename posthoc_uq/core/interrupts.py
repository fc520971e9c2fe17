"""A signal that raises, as Ctrl-C does, ends a call where nothing is half done.

Python runs the handler of a signal between any two instructions of the main thread. What the handler raises is printed
and lost in the callback of a weak reference or in a destructor; at the first instruction of a context manager's exit,
what the context changed stays: gradients switched off, torch's functions intercepted, a temporary file. So during a
call of this library the caller's handlers run as ever, and the first error that one of them raises is noted, and raised
at the next `check`. While the caller's loader is waited for, it is raised at once, and so is another one that comes
before the `check`. Where the call ends before that, in whatever way, it is raised then.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_SIGNALS = sorted(map(int, signal.valid_signals()))
# those of `signal` look up the names of signals and handlers, which takes longer than all the rest
_WITHOUT_NAMES: Any = import_module("_signal")
_handler_of: Callable[[int], Any] = _WITHOUT_NAMES.getsignal
_set_handler: Callable[[int, Any], Any] = _WITHOUT_NAMES.signal


class _Watch:
    """The handler, during a call, of all signals for which the caller has one in Python.

    Args:
        handlers: the caller's, by signal.

    Attributes:
        at_once: whether the next error need not wait for a `check`.
        ending: whether every further one must wait for the end of the call.
        over: whether the call is over; where code of the caller's still holds this handler, it hands on.
        noted: what the last handler raised.
        waits: whether that was not raised here so far.
    """

    def __init__(self, handlers: dict[int, Callable[..., Any]]) -> None:
        self.handlers, self.process = handlers, os.getpid()
        self.at_once = self.ending = self.over = self.waits = False
        self.noted: BaseException | None = None

    def __call__(self, number: int, frame: Any) -> None:
        handler = self.handlers[number]
        if self.over or os.getpid() != self.process:  # a forked child, as a loader's worker
            handler(number, frame)
            return
        try:
            handler(number, frame)
        except BaseException as raised:
            now = not self.ending and (self.at_once or self.waits)
            self.noted, self.at_once, self.waits = raised, False, not now
            if now:
                raise

    def deliver(self) -> None:
        """Raise the noted error."""
        assert self.noted is not None
        self.waits = False
        raise self.noted

    @property
    def here(self) -> bool:
        """Whether this is the thread and the process that signals reach."""
        return threading.current_thread() is threading.main_thread() and os.getpid() == self.process


_watch: _Watch | None = None


def defer_interrupts(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have errors of signals wait for a `check` during the calls of a function from the main thread."""

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
            _end(watch)
            if watch.noted is not None and error is not watch.noted:
                watch.deliver()  # it came after the last check, or something swallowed or replaced it
            error = watch.noted = None

    return watched


def _begun() -> _Watch | None:
    """A new watch; None inside another one, in other threads, and where no signal is Python's to handle."""
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        return None
    handlers = dict[int, Callable[..., Any]]()
    for number in _SIGNALS:
        if callable(handler := _handler_of(number)):
            handlers[number] = handler
    if not handlers:
        return None
    watch = _Watch(handlers)
    try:
        for number in handlers:
            _set_handler(number, watch)
        _watch = watch
    except ValueError:  # the main thread of an interpreter that is not the main one
        return None
    except BaseException:  # of a handler that was not watched yet
        _end(watch)
        raise
    return watch


def _end(watch: _Watch) -> None:
    global _watch
    watch.ending = True
    try:
        _put_back(watch)
    finally:
        _watch, watch.over = None, True


def _put_back(watch: _Watch) -> None:
    """Give the caller's handlers back, all of them also where one of these already raises."""
    try:
        for number, handler in watch.handlers.items():
            if _handler_of(number) is watch:  # the caller's code may have set another one meanwhile
                _set_handler(number, handler)
    except BaseException:
        _put_back(watch)
        raise


def check() -> None:
    """Raise a noted error; called where nothing is half done."""
    if _watch is not None and _watch.waits and _watch.here:
        _watch.deliver()


def interruptible(call: Callable[..., Result], *arguments: Any) -> Result:
    """Call code of the caller's that may wait for long, as its loader: errors of signals are raised inside of it."""
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
