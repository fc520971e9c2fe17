"""Progress bars that wait for no other process, and that touch nothing where they are not shown."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar, cast
from weakref import WeakSet

from posthoc_uq.core import interrupts
from posthoc_uq.core.distributed import rank
from posthoc_uq.core.options import check_option

Part = TypeVar("Part")


def bars_shown(progress: bool | None) -> bool:
    """What a user's ``progress=`` says, where None, the default, shows bars on a terminal alone.

    Raises:
        PosthocUQError: it is neither of these.
    """
    chosen = check_option("progress", progress, bool | None)
    return chosen if chosen is not None else sys.stderr is not None and sys.stderr.isatty()


class Progress:
    """A progress bar on standard error, gone when its work is done; none at all if not `visible`, and on all ranks but
    the first. Without a `total` it is not known how much there is to do.

    Args:
        description: of the work, in words.
        unit: what is counted.
        visible: whether to show it.
        total: how many units there are.

    Attributes:
        done: how many units are done.
        total: how many there are; may be corrected.
        batches: so many, all as large as the first, are the total; 0 where that is known otherwise or not at all.
    """

    def __init__(self, description: str, unit: str, visible: bool, total: int | None = None) -> None:
        self.done: float = 0
        self.total, self.batches = total, 0
        self._bar: Any = None
        if not visible or rank() != 0 or cast(Any, sys.stderr) is None:  # a program may have none
            return
        # Every update looks at the clock, so that no second thread has to redraw a bar that became slow.
        self._bar = _bars()(total=total, desc=description, unit=f" {unit}", leave=False, miniters=0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, done: float = 1) -> None:
        """Add to what is done."""
        self.done += done
        if self._bar is None:
            return
        if self.batches:
            self.total, self.batches = round(self.batches * done), 0
        self._bar.total = self.total
        self._bar.update(done)

    def describe(self, description: str, values: dict[str, str]) -> None:
        """Say what is done now, and show values beside the bar, when it is drawn next."""
        if self._bar is not None:
            self._bar.set_description(description, refresh=False)
            self._bar.set_postfix(values, refresh=False)


def print_above(line: str, file: Any) -> bool:
    """Print a line above the bars that are shown; False, and nothing printed, where none ever was."""
    if file is None or not _bars.cache_info().currsize:
        return False
    _bars().write(line, file=file)
    return True


@cache
def _bars() -> Any:
    """tqdm's bars with a lock of this process alone.

    tqdm's own lock is shared with all forked processes. One that is killed while it holds the lock, as a loader's
    worker may be, never releases it, and every later bar of the parent waits. The caller's own bars keep that lock.
    """
    from tqdm import auto

    tqdm: Any = auto.tqdm

    class Bars(tqdm):
        monitor_interval = 0  # no thread of tqdm's

        @classmethod
        def _get_free_pos(cls, instance: Any = None) -> int:
            """A line of the screen that neither these bars nor the caller's have."""
            # Their references, copied in one step: another thread of the caller's may make a bar meanwhile.
            others = [reference() for reference in tuple(tqdm._instances.data)]
            shown = [bar for bar in (*cls._instances, *others) if bar is not instance]
            taken = {abs(bar.pos) for bar in shown if hasattr(bar, "pos")}
            return next(line for line in range(len(taken) + 1) if line not in taken)

    def begin() -> None:
        bars: Any = Bars
        bars._instances = WeakSet()
        bars.set_lock(threading.RLock())

    begin()
    if hasattr(os, "register_at_fork"):  # the lock may be held by a thread that a forked child does not have
        os.register_at_fork(after_in_child=begin)
    return Bars


_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)
"""Called with the share of the work under way that is done, in this thread."""


@contextmanager
def count_progress(number: int, advance: Callable[[int], Any]) -> Generator[None]:
    """Work on so many things at once: `advance` is called with parts of their number, as the loops inside report which
    share of the work is done (`split_progress`), and in the end with the rest.
    """
    done, outer = 0, _listener.get()

    def listener(share: float) -> None:
        nonlocal done
        more = min(number, int(share * number)) - done
        if more > 0:
            done += more
            advance(more)

    _listener.set(listener)
    try:
        yield
    finally:
        _listener.set(outer)
    listener(1.0)


@contextmanager
def progress_span(start: float, stop: float) -> Generator[None]:
    """Work that is a share of the work under way, from `start` to `stop`."""
    outer = _listener.get()
    if outer is None:
        yield
        return
    _listener.set(lambda inner: outer(start + inner * (stop - start)))
    try:
        yield
    finally:
        _listener.set(outer)
    outer(stop)


def split_progress(parts: Sequence[Part]) -> Iterator[Part]:
    """Parts of the work under way, about equally long; not to be left by `break`."""
    outer = _listener.get()
    for place, part in enumerate(parts):
        interrupts.check()
        if outer is not None:
            _listener.set(lambda inner, place=place: outer((place + inner) / len(parts)))
        yield part
        if outer is not None:
            outer((place + 1) / len(parts))
            _listener.set(outer)


def report_progress(done: float) -> None:
    """Report which share of the work under way is done."""
    interrupts.check()
    listener = _listener.get()
    if listener is not None:
        listener(done)
