"""Passes of a model that begin with what an earlier pass on the same inputs returned.

Until the first use of a weight that changes, all passes of a model on the same inputs are the same. So one pass is
recorded (`posthoc_uq.heads.recording`), and in the others every module call that was complete by then returns what was
recorded. All other code runs as it is: residual connections, functions between the modules, modules called later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from posthoc_uq.attempts import check_refused, out_of_memory
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.interception import Intercepted, ReplayError, failed, watched_by
from posthoc_uq.heads.stand_ins import StandIn, writable_copy
from posthoc_uq.loaders import Batch

SINGLE_TENSOR = tree_flatten(0)[1]
"""The form of a result that is a single tensor."""


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        name: of the module.
        leaves: the parts of what it returned, or None where it runs in a replay too.
        form: how the parts go together.
    """

    name: str
    leaves: list[Any] | None = None
    form: TreeSpec | None = None

    def result(self) -> Any:
        """What the call returned, as copies that later code may write into."""
        assert self.leaves is not None and self.form is not None
        if self.form is SINGLE_TENSOR:
            return writable_copy(self.leaves[0])
        return tree_unflatten([writable_copy(leaf) for leaf in self.leaves], self.form)


@dataclass(repr=False)
class Features:
    """What enters the part of a model whose weights change, for one batch.

    Attributes:
        args: positional arguments of the model, with stand-ins for what that part does not read.
        kwargs: named arguments, likewise.
        calls: the module calls up to the first use of a changing weight, in the order in which they began.
        outputs: the model's outputs at the posterior's mean, or None where the pass was in another precision.
        samples: in the batch.
        complete: whether no weight was used that changes.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: list[Call]
    outputs: Tensor | None
    samples: int
    complete: bool

    def __repr__(self) -> str:
        return f"Features({self.nbytes:,} bytes)"

    def tensors(self) -> list[Tensor]:
        """All tensors that are kept for the replay."""
        leaves = tree_leaves((self.args, self.kwargs)) + [x for call in self.calls for x in call.leaves or ()]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, StandIn)]

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors, and of the outputs."""
        by_identity = {id(tensor): tensor for tensor in self.tensors()}
        tensors = [*by_identity.values(), *([] if self.outputs is None else [self.outputs])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes, types and devices of these tensors, as a dictionary key."""
        return tuple((tuple(t.shape), t.dtype, t.device) for t in self.tensors())

    def call_any(self, model: Callable[..., Any]) -> Any:
        """Run an intercepted model, replaying the recorded calls; returns what the model returns.

        Raises:
            ReplayError: the pass took another route than the recorded one.
        """
        with self.replaying():
            args, kwargs = self.arguments()
            return model(*args, **kwargs)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, to be passed inside of `replaying`."""
        return tree_map(writable_copy, (self.args, self.kwargs))

    @contextmanager
    def replaying(self) -> Generator[None]:
        """A context for one pass in this thread, which replays the recorded calls.

        Raises:
            ReplayError: the pass took another route than the recorded one.
        """
        replay = _Replay(self.calls)
        with watched_by(replay):
            try:
                yield
            except PosthocUQError as error:
                if replay.failure is not None and not isinstance(error, ReplayError):
                    raise ReplayError(replay.failure) from error
                raise
            except Exception as error:  # a whole pass may not raise it
                if out_of_memory(error):
                    raise
                raise ReplayError(replay.failure or f"{type(error).__name__}: {error}") from error
        replay.check_end()


def check_refused_replay(error: ReplayError, again: Callable[[], Any]) -> None:
    """Return if a model cannot be replayed; where it can after all, the model's own error is raised.

    Args:
        error: of the replay.
        again: replays once more.
    """
    if isinstance(error.__cause__, Exception):
        check_refused(error.__cause__, again, lambda: None)


class FeatureBatch(Batch):
    """Features in the place of their batch, for code that runs a model on batches."""

    def __init__(self, features: Features) -> None:
        super().__init__(features.args, None, features.kwargs)
        self.features = features

    def call_any(self, model: Callable[..., Any]) -> Any:
        """What an intercepted model returns."""
        return self.features.call_any(model)

    def copied(self) -> Batch:
        """Itself: a replay hands out copies anyway."""
        return self

    def narrow(self, start: int, length: int, samples: int) -> Batch:
        """Refused: which dimension of an activation holds the samples is unknown."""
        raise ReplayError("features cannot be cut into parts")


class _Replay:
    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._next = 0
        self.failure: str | None = None

    def call(self, module: Intercepted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._next == len(self._calls):
            return module.run(*args, **kwargs)
        expected = self._calls[self._next]
        if expected.name != module.name:
            raise failed(f"module '{module.name}' is called where '{expected.name}' was")
        self._next += 1
        return module.run(*args, **kwargs) if expected.leaves is None else expected.result()

    def check_end(self) -> None:
        if self.failure is None and self._next < len(self._calls):
            self.failure = f"module '{self._calls[self._next].name}' is not called"
        if self.failure is not None:
            raise ReplayError(self.failure)
