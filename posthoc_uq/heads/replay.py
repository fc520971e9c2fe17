"""Module calls that are recorded in one forward pass and replayed in others.

Until the first use of a weight that changes, passes of a model on the same inputs are the same. So one of them is
recorded, and in the others every module call that was complete by then returns what it returned. All other code runs
as it is: residual connections, functions between the modules, the modules that came to be called later.

Uses of a weight are seen wherever they happen, by the identity of the tensor. What no code outside of the replayed
calls reads is not kept: a stand-in takes its place, which refuses to be read.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode_temporarily,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.loaders import Batch, output_tensor

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ONE = tree_flatten(0)[1]  # the form of what is a tensor by itself
_INTERCEPTING = threading.Lock()
_ACTIVE = threading.local()  # the pass that this thread is in


class ReplayError(PosthocUQError):
    """A pass that cannot be recorded, or that went another way than the one that was recorded."""


def _query(name: str) -> Any:
    found = getattr(Tensor, name)
    return getattr(found, "__get__", found) if not callable(found) else found


_QUERIES = {
    _query(name)
    for name in "shape dtype device ndim layout requires_grad is_cuda is_cpu is_sparse is_nested is_quantized "
    "size dim ndimension numel nelement is_floating_point is_complex element_size __len__".split()
} | {torch.is_floating_point, torch.is_complex, torch.numel}
"""What asks for the form of a tensor and not for its numbers."""


Form = tuple[torch.Size, torch.dtype, torch.device]


class StandIn(Tensor):
    """The form of a tensor whose numbers were not kept."""

    @staticmethod
    def __new__(cls: type[StandIn], form: Form) -> StandIn:
        shape, dtype, device = form
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, form: Form) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "StandIn()"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUERIES:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **(kwargs or {}))
        raise _failed(f"{getattr(func, '__name__', func)} reads what no code had read before")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _failed(f"{func} reads what no code had read before")


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        name: of the module.
        leaves: of what it returned, or None where it runs in a replay too.
        form: puts them together.
    """

    name: str
    leaves: list[Any] | None = None
    form: TreeSpec | None = None

    def result(self) -> Any:
        """What the call returned, in tensors of the caller's own: later code may write into them."""
        assert self.leaves is not None and self.form is not None
        if self.form is _ONE:
            return own(self.leaves[0])
        return tree_unflatten([own(leaf) for leaf in self.leaves], self.form)


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
        """All that is kept for the replay."""
        leaves = tree_leaves((self.args, self.kwargs)) + [x for call in self.calls for x in call.leaves or ()]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, StandIn)]

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors, and of the outputs."""
        held = {id(tensor): tensor for tensor in self.tensors()}
        tensors = [*held.values(), *([] if self.outputs is None else [self.outputs])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes, types and devices of what is kept, for a dictionary."""
        return tuple((tuple(t.shape), t.dtype, t.device) for t in self.tensors())

    def call_any(self, model: Callable[..., Any]) -> Any:
        """Run the rest of an intercepted model; whatever it returns.

        Raises:
            ReplayError: it went another way than the pass that was recorded.
        """
        with self.replaying():
            args, kwargs = self.arguments()
            return model(*args, **kwargs)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, to be passed inside of `replaying`."""
        return tree_map(own, (self.args, self.kwargs))

    @contextmanager
    def replaying(self) -> Generator[None]:
        """One pass inside of this, in this thread, replays what was recorded.

        Raises:
            ReplayError: it went another way than the pass that was recorded.
        """
        replay = _Replay(self.calls)
        with _running(replay):
            try:
                yield
            except PosthocUQError as error:
                if replay.failure is not None and not isinstance(error, ReplayError):
                    raise ReplayError(replay.failure) from error
                raise
            except Exception as error:  # the whole model may have no such trouble
                raise ReplayError(replay.failure or f"{type(error).__name__}: {error}") from error
        replay.check_end()


class Rest(Batch):
    """Features in the place of their batch, for code that runs a model on batches."""

    def __init__(self, features: Features) -> None:
        super().__init__(features.args, None, features.kwargs)
        self.features = features

    def call_any(self, model: Callable[..., Any]) -> Any:
        """Whatever an intercepted model returns."""
        return self.features.call_any(model)

    def copied(self) -> Batch:
        """Itself: what a replay hands out are copies."""
        return self

    def narrow(self, start: int, length: int, samples: int) -> Batch:
        """Refused: only a model knows where the samples stand in its activations."""
        raise ReplayError("features cannot be cut into parts")


def own(value: Any) -> Any:
    """A copy of a tensor that may be written; anything else, and a stand-in, as it is."""
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, StandIn) else value


class _Pass(Protocol):
    failure: str | None

    def call(self, module: Intercepted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


@contextmanager
def _running(current: _Pass | None) -> Generator[None]:
    before = getattr(_ACTIVE, "current", None)
    _ACTIVE.current = current
    try:
        yield
    finally:
        _ACTIVE.current = before


def _failed(reason: str) -> ReplayError:
    """An error that the pass remembers, whatever the model's code does with it."""
    current: _Pass | None = getattr(_ACTIVE, "current", None)
    if current is not None:
        current.failure = reason
    return ReplayError(reason)


class Intercepted:
    """Stands in a module's place as its `forward`: as it was, but for a pass of this thread that is recorded or
    replayed.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.replaced = module.__dict__.get("forward")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current: _Pass | None = getattr(_ACTIVE, "current", None)
        return self.run(*args, **kwargs) if current is None else current.call(self, args, kwargs)


def intercept(model: nn.Module) -> nn.Module:
    """Make the module calls of a replica ones that can be recorded and replayed, its copies' too."""
    with _INTERCEPTING:
        for name, module in model.named_modules():
            known = isinstance(module.__dict__.get("forward"), Intercepted)
            if not known and not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["forward"] = Intercepted(module, name)
    return model


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
            raise _failed(f"module '{module.name}' is called where '{expected.name}' was")
        self._next += 1
        return module.run(*args, **kwargs) if expected.leaves is None else expected.result()

    def check_end(self) -> None:
        if self.failure is None and self._next < len(self._calls):
            self.failure = f"module '{self._calls[self._next].name}' is not called"
        if self.failure is not None:
            raise ReplayError(self.failure)


Seen = tuple[int, int]  # a tensor's identity, and how often it had been written


@dataclass
class _Made:
    """A complete call, and the tensors that it returned, which live no longer than the model's code keeps them."""

    name: str
    leaves: list[Any]
    form: TreeSpec
    seen: list[Seen | None]

    def read(self, used: Mapping[Seen, Tensor]) -> list[tuple[Any, Seen | None, Tensor | None]]:
        """What is held of each part, its identity, and the tensor itself where that is read later."""
        found: list[tuple[Any, Seen | None, Tensor | None]] = []
        for leaf, seen in zip(self.leaves, self.seen, strict=True):
            tensor = None if seen is None else used.get(seen)
            if isinstance(leaf, _Weak) and leaf.tensor() is not tensor:
                tensor = None  # another one, in the place of one that is gone
            found.append((leaf, seen, tensor))
        return found


class _Weak:
    """A tensor that is not kept alive, and its form."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.form = _form(tensor)


@dataclass
class _Frame:
    """A call under way: the calls inside of it, and which of their tensors its own code read and wrote."""

    name: str | None
    calls: list[_Made | str] = field(default_factory=lambda: list[_Made | str]())
    used: dict[Seen, Tensor] = field(default_factory=lambda: dict[Seen, Tensor]())
    written: set[Seen] = field(default_factory=lambda: set[Seen]())

    def join(self, inner: _Frame) -> None:
        if inner.name is not None:
            self.calls.append(inner.name)
        self.calls += inner.calls
        self.used |= inner.used
        self.written |= inner.written


class Recording(TorchFunctionMode):
    """Records one pass of an intercepted model.

    Args:
        changing: identities of the model's parameters that have other values in a replay.
        rewritten: names of modules whose outputs later code writes into, so that a copy is kept of them.
        known: names of modules that no use of such a parameter need be looked for in.
    """

    def __init__(
        self, changing: set[int], rewritten: Iterable[str] = (), known: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._changing = changing
        self._rewritten = set(rewritten)
        self._known = known
        self._frames = [_Frame(None)]
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self._touched = False
        self.failure: str | None = None

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Features:
        """The features of one batch.

        Raises:
            ReplayError: the pass cannot be replayed.
            RewrittenError: it could, with copies of more outputs.
        """
        given_args, given_kwargs = tree_map(own, (args, kwargs))
        leaves, form = tree_flatten((given_args, given_kwargs))
        inputs = _Made("", tree_leaves((args, kwargs)), form, [self._watch(leaf) for leaf in leaves])
        with _running(self), self:
            outputs = output_tensor(model(*given_args, **given_kwargs))
        complete = not self._touched
        self._touch()
        frame = self._frames[0]
        if self._watches(outputs):
            frame.used[_seen(outputs)] = outputs
        made = [call for call in frame.calls if isinstance(call, _Made)]
        _check(inputs, made, frame, self._rewritten)
        calls = [
            Call(call) if isinstance(call, str) else Call(call.name, _kept(call, frame.used), call.form)
            for call in frame.calls
        ]
        kept_args, kept_kwargs = tree_unflatten(_kept(inputs, frame.used), form)
        return Features(kept_args, kept_kwargs, calls, outputs.detach(), len(outputs), complete)

    def call(self, module: Intercepted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Intercepted`."""
        if self._touched:
            return module.run(*args, **kwargs)
        frame = _Frame(module.name)
        self._frames.append(frame)
        if module.name in self._known and _get_current_function_mode() is self:
            with _pop_mode_temporarily(), _running(None):
                result = module.run(*args, **kwargs)
        else:
            result = module.run(*args, **kwargs)
        if self._touched:
            return result
        self._frames.pop()
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            self._complete(frame, result)
        return result

    def _complete(self, frame: _Frame, result: Any) -> None:
        """Keep what a call returned, in place of the calls inside of it."""
        assert frame.name is not None
        leaves, form = ([result], _ONE) if type(result) is Tensor else tree_flatten(result)
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            self._frames[-1].join(frame)  # it runs again, and what is inside of it is replayed
            return
        seen = [self._watch(leaf) for leaf in leaves]
        hold = own if frame.name in self._rewritten else _weak
        self._frames[-1].calls.append(_Made(frame.name, [hold(leaf) for leaf in leaves], form, seen))

    def _watch(self, leaf: Any) -> Seen | None:
        if not isinstance(leaf, Tensor):
            return None
        self._watched[id(leaf)] = weakref.ref(leaf)
        return _seen(leaf)

    def _watches(self, tensor: Tensor) -> bool:
        found = self._watched.get(id(tensor))  # which may be that of a tensor that is gone
        return found is not None and found() is tensor

    def _touch(self) -> None:
        """A changing weight is used: what is not complete by now runs in every pass."""
        self._touched = True
        whole = self._frames[0]
        for frame in self._frames[1:]:
            whole.join(frame)
        self._frames = [whole]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUERIES:
            return func(*args, **kwargs)
        watched: list[tuple[Tensor, Seen]] = []
        for tensor in _tensors((*args, *kwargs.values())):
            if not self._touched and id(tensor) in self._changing:
                self._touch()
            if self._watches(tensor):
                watched.append((tensor, _seen(tensor)))
        frame = self._frames[-1]
        frame.used.update((seen, tensor) for tensor, seen in watched)
        result = func(*args, **kwargs)
        for tensor, seen in watched:
            if _seen(tensor) != seen:
                frame.written.add(_seen(tensor))
        return result


def _form(tensor: Tensor) -> Form:
    return tensor.shape, tensor.dtype, tensor.device


def _weak(leaf: Any) -> Any:
    return _Weak(leaf) if isinstance(leaf, Tensor) else leaf


def _check(inputs: _Made, made: list[_Made], frame: _Frame, rewritten: set[str]) -> None:
    """Whether the tensors that are handed out in a replay hold what was read in the pass.

    Raises:
        ReplayError: they do not, or not for certain.
        RewrittenError: they do where copies are made of some.
    """
    returned = {seen for call in (inputs, *made) for seen in call.seen}
    if any(seen not in returned and seen not in frame.written for seen in frame.used):
        raise ReplayError("a module that would be replayed writes into a tensor that is read elsewhere")
    read = [
        (call, tensor, _seen(tensor) != seen)
        for call in (inputs, *made)
        for _, seen, tensor in call.read(frame.used)
        if tensor is not None
    ]
    memory = Counter(_memory(tensor) for _, tensor, _ in read)
    changed = [(call, tensor) for call, tensor, changed in read if changed]
    if any(memory[_memory(tensor)] > 1 for _, tensor in changed):
        raise ReplayError("a tensor is changed in place that shares its memory with another one")
    names = {call.name for call, _ in changed if call is not inputs}
    if names - rewritten:
        raise RewrittenError(names)


class RewrittenError(ReplayError):
    """Later code writes into what these modules returned.

    Args:
        names: of the modules.
    """

    def __init__(self, names: set[str]) -> None:
        super().__init__(f"the outputs of {sorted(names)} are changed in place")
        self.names = names


def _kept(made: _Made, used: Mapping[Seen, Tensor]) -> list[Any]:
    """What a call returned, with stand-ins for what is not read of it."""
    kept: list[Any] = []
    for leaf, seen, tensor in made.read(used):
        if seen is None:
            kept.append(leaf)
        elif tensor is None:
            kept.append(StandIn(leaf.form if isinstance(leaf, _Weak) else _form(leaf)))
        elif _seen(tensor) == seen:
            # a small part of a large tensor would keep all of it
            large = tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
            kept.append(tensor.clone() if large else tensor)
        else:  # written since: a copy from before, or an input as the caller has it
            kept.append(leaf.clone())
    return kept


def _seen(tensor: Tensor) -> Seen:
    return id(tensor), -1 if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(cast("Iterable[Any]", value))
        elif isinstance(value, dict):
            found += _tensors(cast("dict[Any, Any]", value).values())
    return found
