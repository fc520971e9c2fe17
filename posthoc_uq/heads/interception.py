"""Module calls that can be recorded and replayed.

A watched pass belongs to one thread: recording or replaying it does not affect other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from posthoc_uq.errors import PosthocUQError

_INTERCEPTING = threading.Lock()
_ACTIVE = threading.local()  # the watched pass that this thread is in


class ReplayError(PosthocUQError):
    """A pass that cannot be recorded, or that took another route than the recorded one."""


class WatchedPass(Protocol):
    """A pass that is recorded or replayed.

    Attributes:
        failure: why it cannot be recorded or replayed, or None.
    """

    failure: str | None

    def call(self, module: Intercepted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of a module returns in this pass."""
        ...


@contextmanager
def watched_by(current: WatchedPass | None) -> Generator[None]:
    """Route this thread's module calls to a watched pass, or to none."""
    previous = getattr(_ACTIVE, "current", None)
    _ACTIVE.current = current
    try:
        yield
    finally:
        _ACTIVE.current = previous


def failed(reason: str) -> ReplayError:
    """An error that the watched pass remembers, even if the model's code catches it."""
    current: WatchedPass | None = getattr(_ACTIVE, "current", None)
    if current is not None:
        current.failure = reason
    return ReplayError(reason)


class Intercepted:
    """Replaces a module's `forward`; it does the same unless a pass of this thread is being recorded or replayed."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.replaced = module.__dict__.get("forward")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current: WatchedPass | None = getattr(_ACTIVE, "current", None)
        return self.run(*args, **kwargs) if current is None else current.call(self, args, kwargs)


def intercept(model: nn.Module) -> nn.Module:
    """Make the module calls of a replica, and of its copies, ones that can be recorded and replayed."""
    with _INTERCEPTING:
        for name, module in model.named_modules():
            intercepted = isinstance(module.__dict__.get("forward"), Intercepted)
            if not intercepted and not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["forward"] = Intercepted(module, name)
    return model
