"""Progress bars that wait for no other process, and that touch nothing where they are not shown."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar, TypeVar, cast
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
    """A progress bar on standard error; none at all if not `visible`, and on all ranks but the first. Inside of
    `Phases` it is a phase of their bar instead. Without a `total` it is not known how much there is to do.

    Args:
        description: of the work, in words.
        unit: what is counted.
        visible: whether to show it.
        total: how many units there are.
        cost: of a unit, in passes of samples, about; says how much of `Phases` it takes. None where that is not known:
            then it takes most of what is planned.

    Attributes:
        done: how many units are done.
        total: how many there are; may be corrected.
        batches: so many, all as large as the first, are the total; 0 where that is known otherwise or not at all.
    """

    _drawing: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, description: str, unit: str, visible: bool, total: int | None = None, cost: float | None = 1
    ) -> None:
        self.done: float = 0
        self.total, self.batches = total, 0
        self._bar: Any = None
        if not visible or rank() != 0 or cast(Any, sys.stderr) is None:  # a program may have none
            return
        phases = _phases.get()
        if phases is not None:
            self._bar = _Phase(phases, phases._bar, description, total, cost)
        else:
            # Every update looks at the clock, so that no second thread has to redraw a bar that became slow.
            more = {"unit": f" {unit}", "leave": False, "miniters": 0, **self._drawing}
            self._bar = _bars()(total=total, desc=description, **more)

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


class Phases(Progress):
    """One bar, in per cent, over all work inside of its `with`. Every `Progress` there is a phase, and takes that share
    of what is left which its work has in the work to come. So the bar never goes back, whatever a phase turns out to
    cost; a phase that ends early is a jump.

    Attributes:
        to_come: the work that is planned from the next phase on, in passes of samples, about.
        after: that of it which follows the passes over the data.
        samples: of one pass over the data; None while that is not known.
    """

    _drawing: ClassVar[dict[str, Any]] = {
        "bar_format": "{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
        "smoothing": 0,  # phases differ in speed: the time left goes by the mean of all
    }
    to_come: float = 0.0
    after: float = 0.0
    samples: int | None = None

    def __enter__(self) -> Phases:
        self._outer = _phases.set(None if self._bar is None else self)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _phases.reset(self._outer)
        if self._bar is not None:
            if kind is None:
                self.reach(100.0)
            self._bar.close()

    def reach(self, done: float) -> None:
        """Go forward to there; never back."""
        if done > self.done:
            self.advance(done - self.done)


_phases: ContextVar[Phases | None] = ContextVar("phases", default=None)
GUESSED_SAMPLES = 10_000  # of data of unknown length, until a pass is over
_MOST = 0.8  # of the plan, for a phase of unknown cost
_LEAST_LEFT = 0.05  # of a phase's work is left at least for what the plan did not foresee


class _Phase:
    """A phase of `Phases`, in the place of a bar of tqdm's."""

    def __init__(
        self, phases: Phases, bar: Any, description: str, total: int | None, cost: float | None
    ) -> None:
        self._phases, self.total, self._done = phases, total, 0.0
        work = _MOST * max(1.0, phases.to_come)
        if cost is not None:
            work = cost * (total or phases.samples or GUESSED_SAMPLES)
        phases.to_come = max(phases.to_come - work, 0.0)
        left = max(phases.to_come, _LEAST_LEFT * work)
        self._start, self._width = phases.done, (100.0 - phases.done) * work / (work + left)
        self.set_description, self.set_postfix = bar.set_description, bar.set_postfix
        self.set_postfix(refresh=False)
        self.set_description(description)

    def update(self, done: float) -> None:
        self._done += done
        total = self.total or self._phases.samples or self._done + GUESSED_SAMPLES
        self._phases.reach(self._start + self._width * min(1.0, self._done / total))

    def close(self) -> None:
        if not self.total and self._phases.samples is None and self._done:  # now it is known
            self._phases.samples = round(self._done)
            of_data = max(0.0, self._phases.to_come - self._phases.after)
            self._phases.to_come += of_data * (self._done / GUESSED_SAMPLES - 1)
        self._phases.reach(self._start + self._width)


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
