"""The fixed part of a model, before the weights with a posterior: recorded once a batch and replayed."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import PosthocUQError, check_refused, out_of_memory
from posthoc_uq.core.model import replicate
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.core.randomness import device_generators, isolated_random_state
from posthoc_uq.curvature.features import watching
from posthoc_uq.layers.layer import Call as LayerCall
from posthoc_uq.layers.layer import Layer

# Module calls that can be recorded and replayed.
#
# A watched pass belongs to one thread: recording or replaying it does not affect other threads.

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


# Stand-ins for tensors whose numbers are not kept, and copies of tensors that are kept.

TensorForm = tuple[torch.Size, torch.dtype, torch.device]


def _query(name: str) -> Any:
    attribute = getattr(Tensor, name)
    return getattr(attribute, "__get__", attribute) if not callable(attribute) else attribute


QUERIES = {
    _query(name)
    for name in "shape dtype device ndim layout requires_grad is_cuda is_cpu is_sparse is_nested is_quantized "
    "size dim ndimension numel nelement is_floating_point is_complex element_size __len__".split()
} | {torch.is_floating_point, torch.is_complex, torch.numel}
"""Functions that ask for the form of a tensor and not for its numbers."""


class StandIn(Tensor):
    """The form of a tensor whose numbers were not kept."""

    @staticmethod
    def __new__(cls: type[StandIn], form: TensorForm) -> StandIn:
        shape, dtype, device = form
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, form: TensorForm) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "StandIn()"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUERIES:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **(kwargs or {}))
        raise failed(f"{getattr(func, '__name__', func)} reads what no code had read before")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise failed(f"{func} reads what no code had read before")


def form_of(tensor: Tensor) -> TensorForm:
    """Its shape, type and device."""
    return tensor.shape, tensor.dtype, tensor.device


def writable_copy(value: Any) -> Any:
    """A copy of a tensor that may be written; anything else, and a stand-in, as it is."""
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, StandIn) else value


# Passes of a model that begin with what an earlier pass on the same inputs returned.
#
# Until the first use of a weight that changes, all passes of a model on the same inputs are the same. So one
# pass is recorded (`posthoc_uq.heads.recording`), and in the others every module call that was complete by
# then returns what was recorded. All other code runs as it is: residual connections, functions between the
# modules, modules called later.

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


# Records one pass of a model until the first use of a weight that changes.
#
# A use of a weight is seen wherever it happens, by the identity of the tensor. Tensors that only replayed
# calls read are not kept: a stand-in takes their place, which refuses to be read.

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class RewrittenError(ReplayError):
    """Later code writes into what these modules returned.

    Args:
        names: of the modules.
    """

    def __init__(self, names: set[str]) -> None:
        super().__init__(f"the outputs of {sorted(names)} are changed in place")
        self.names = names


Version = tuple[int, int]
"""A tensor's identity, and how often it had been written."""
_Watched = tuple[Version, "weakref.ref[Tensor]"]


@dataclass
class _FinishedCall:
    """A complete call of a module.

    Attributes:
        name: of the module.
        leaves: the parts of what it returned: tensors by their form alone, so that they live no longer than the model's
            code keeps them, or as copies.
        form: how the parts go together.
        watched: the tensors among the parts, and their versions when the call was complete; None for other parts.
    """

    name: str
    leaves: list[Any]
    form: TreeSpec
    watched: list[_Watched | None]

    def parts(self, used: Mapping[Version, Tensor]) -> list[tuple[Any, Version | None, Tensor | None]]:
        """Each part as it is stored, its version, and the tensor itself where later code read it."""
        parts: list[tuple[Any, Version | None, Tensor | None]] = []
        for leaf, watched in zip(self.leaves, self.watched, strict=True):
            if watched is None:
                parts.append((leaf, None, None))
                continue
            version, reference = watched
            tensor = used.get(version)
            if tensor is not reference():
                tensor = None  # a new tensor with the identity of a deleted one
            parts.append((leaf, version, tensor))
        return parts


class _WeakTensor:
    """The form of a tensor that is not kept."""

    def __init__(self, tensor: Tensor) -> None:
        self.form = form_of(tensor)


@dataclass
class _RunningCall:
    """A call under way.

    Attributes:
        name: of the module; None for the whole pass.
        calls: the finished calls inside of it, or the names of those that run again in a replay.
        used: tensors returned by these calls that its own code read.
        written: versions of such tensors that its own code made by writing.
    """

    name: str | None
    calls: list[_FinishedCall | str] = field(default_factory=lambda: list[_FinishedCall | str]())
    used: dict[Version, Tensor] = field(default_factory=lambda: dict[Version, Tensor]())
    written: set[Version] = field(default_factory=lambda: set[Version]())

    def join(self, inner: _RunningCall) -> None:
        if inner.name is not None:
            self.calls.append(inner.name)
        self.calls += inner.calls
        self.used |= inner.used
        self.written |= inner.written


class FunctionRecorder(TorchFunctionMode):
    """Records one pass of an intercepted model.

    Args:
        changing: identities of the model's parameters that have other values in a replay.
        rewritten: names of modules whose outputs later code writes into, so that a copy is kept of them.
        known: names of modules known to use no such parameter.
    """

    def __init__(
        self, changing: set[int], rewritten: Iterable[str] = (), known: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._changing = changing
        self._rewritten = set(rewritten)
        self._known = known
        self._under_way = [_RunningCall(None)]
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self._weight_used = False
        self.failure: str | None = None

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Features:
        """The features of one batch.

        Raises:
            ReplayError: the pass cannot be replayed.
            RewrittenError: it can be replayed if copies of more outputs are kept.
        """
        copied_args, copied_kwargs = tree_map(writable_copy, (args, kwargs))
        leaves, form = tree_flatten((copied_args, copied_kwargs))
        inputs = _FinishedCall("", tree_leaves((args, kwargs)), form, [self._watch(leaf) for leaf in leaves])
        with watched_by(self), self:
            outputs = output_tensor(model(*copied_args, **copied_kwargs))
        complete = not self._weight_used
        self._enter_changing_part()
        whole_pass = self._under_way[0]
        if self._watches(outputs):
            whole_pass.used[_version_of(outputs)] = outputs
        finished = [call for call in whole_pass.calls if isinstance(call, _FinishedCall)]
        _check_same_numbers(inputs, finished, whole_pass, self._rewritten)
        calls = [
            Call(call)
            if isinstance(call, str)
            else Call(call.name, _replay_parts(call, whole_pass.used), call.form)
            for call in whole_pass.calls
        ]
        replay_args, replay_kwargs = tree_unflatten(_replay_parts(inputs, whole_pass.used), form)
        return Features(replay_args, replay_kwargs, calls, outputs.detach(), len(outputs), complete)

    def call(self, module: Intercepted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `WatchedPass`."""
        if self._weight_used:
            return module.run(*args, **kwargs)
        running = _RunningCall(module.name)
        self._under_way.append(running)
        if module.name in self._known and _get_current_function_mode() is self:
            with _pop_mode_temporarily(), watched_by(None):
                result = module.run(*args, **kwargs)
        else:
            result = module.run(*args, **kwargs)
        if self._weight_used:
            return result
        self._under_way.pop()
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            self._complete(running, result)
        return result

    def _complete(self, running: _RunningCall, result: Any) -> None:
        """Store what a call returned, in place of the calls inside of it."""
        assert running.name is not None
        leaves, form = ([result], SINGLE_TENSOR) if type(result) is Tensor else tree_flatten(result)
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            self._under_way[-1].join(running)  # it runs again, and the calls inside of it are replayed
            return
        watched = [self._watch(leaf) for leaf in leaves]
        stored = writable_copy if running.name in self._rewritten else _weakly
        self._under_way[-1].calls.append(
            _FinishedCall(running.name, [stored(leaf) for leaf in leaves], form, watched)
        )

    def _watch(self, leaf: Any) -> _Watched | None:
        if not isinstance(leaf, Tensor):
            return None
        reference = self._watched[id(leaf)] = weakref.ref(leaf)
        return _version_of(leaf), reference

    def _watches(self, tensor: Tensor) -> bool:
        reference = self._watched.get(id(tensor))  # may refer to a deleted tensor of the same identity
        return reference is not None and reference() is tensor

    def _enter_changing_part(self) -> None:
        """The first use of a changing weight: calls that are not complete by now run in every pass."""
        self._weight_used = True
        whole_pass = self._under_way[0]
        for running in self._under_way[1:]:
            whole_pass.join(running)
        self._under_way = [whole_pass]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUERIES:
            return func(*args, **kwargs)
        watched: list[tuple[Tensor, Version]] = []
        for tensor in _tensors_in((*args, *kwargs.values())):
            if not self._weight_used and id(tensor) in self._changing:
                self._enter_changing_part()
            if self._watches(tensor):
                watched.append((tensor, _version_of(tensor)))
        running = self._under_way[-1]
        running.used.update((version, tensor) for tensor, version in watched)
        result = func(*args, **kwargs)
        for tensor, version in watched:
            if _version_of(tensor) != version:
                running.written.add(_version_of(tensor))
        return result


def _weakly(leaf: Any) -> Any:
    return _WeakTensor(leaf) if isinstance(leaf, Tensor) else leaf


def _check_same_numbers(
    inputs: _FinishedCall, finished: list[_FinishedCall], whole_pass: _RunningCall, rewritten: set[str]
) -> None:
    """Check that the tensors a replay hands out hold the numbers that were read in the pass.

    Raises:
        ReplayError: they do not, or it is not certain.
        RewrittenError: they do if copies of some are kept.
    """
    parts = [(call, part) for call in (inputs, *finished) for part in call.parts(whole_pass.used)]
    returned = {version for _, (_, version, tensor) in parts if tensor is not None}
    if any(version not in returned and version not in whole_pass.written for version in whole_pass.used):
        raise ReplayError("a module that would be replayed writes into a tensor that is read elsewhere")
    read = [
        (call, tensor, _version_of(tensor) != version)
        for call, (_, version, tensor) in parts
        if tensor is not None
    ]
    memory = Counter(_memory_of_results(tensor) for _, tensor, _ in read)
    changed = [(call, tensor) for call, tensor, changed in read if changed]
    if any(memory[_memory_of_results(tensor)] > 1 for _, tensor in changed):
        raise ReplayError("a tensor is changed in place that shares its memory with another one")
    names = {call.name for call, _ in changed if call is not inputs}
    if names - rewritten:
        raise RewrittenError(names)


def _replay_parts(call: _FinishedCall, used: Mapping[Version, Tensor]) -> list[Any]:
    """The parts that a call returned, with stand-ins for tensors that are not read."""
    parts: list[Any] = []
    for leaf, version, tensor in call.parts(used):
        if version is None:
            parts.append(leaf)
        elif tensor is None:
            parts.append(StandIn(leaf.form if isinstance(leaf, _WeakTensor) else form_of(leaf)))
        elif _version_of(tensor) == version:
            # a small part of a large tensor would keep all of it
            large = tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
            parts.append(tensor.clone() if large else tensor)
        else:  # written since: an earlier copy, or an input as the caller has it
            parts.append(leaf.clone())
    return parts


def _version_of(tensor: Tensor) -> Version:
    return id(tensor), -1 if tensor.is_inference() else tensor._version


def _memory_of_results(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors_in(cast("Iterable[Any]", value))
        elif isinstance(value, dict):
            tensors += _tensors_in(cast("dict[Any, Any]", value).values())
    return tensors


# The cost of one forward pass, counted and not timed: decisions by it are the same in every run.


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """Torch's, loaded with the first count: they bring a compiler with them."""
    from torch.utils.flop_counter import flop_registry

    return cast("dict[Any, Callable[..., int]]", flop_registry)


class Cost(TorchDispatchMode):
    """Counts the operations inside of ``with Cost() as cost``, in this thread only.

    Attributes:
        operations: calls of torch's kernels, views included.
        flops: floating-point operations of products (matrices, convolutions, attention); a multiply-add counts two.
        largest: bytes of the largest tensor that an operation made; views do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.flops = 0
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations += 1
        formula = _formulas().get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for output, declared in zip(outputs, func._schema.returns, strict=False):
            if isinstance(output, Tensor) and declared.alias_info is None:
                self.largest = max(self.largest, output.numel() * output.element_size())
        return out


def cost_of(run: Callable[[], Any]) -> Cost | None:
    """The cost of `run` without gradients, or None where it cannot be counted; an error of `run` itself is raised.

    Inference mode is switched off meanwhile: in it, operations reach the counter undivided.
    """

    def counted() -> Cost:
        with Cost() as cost:
            run()
        return cost

    with torch.inference_mode(False), torch.no_grad():
        try:
            return counted()
        except Exception as error:
            check_refused(error, counted, run)  # returns where it was the counting that failed
            return None


# The fixed part of a model: what runs before the first weight with a posterior, once a batch however many
# weights are drawn.
#
# The model's structure is unknown, so the fixed part is found by running the model. On the first batch of
# each shape it is checked by numbers: with other weights in place, the replay must give what the whole model
# gives.

WORTH = 0.9  # features are kept where the changing part costs at most this share of a whole pass
_PROBE = 8  # samples that a fixed part is checked on
_OPERATION = 100_000  # FLOP that take about as long as the overhead of one operation
_SHAPES = 256  # input shapes that are remembered
_TRIES = 8  # recordings at most, to find the outputs that later code writes into
# How far outputs of two routes may differ, relative to the largest. CUDA's float32 products may be TF32.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_TF32 = 2e-2


class Saving(NamedTuple):
    """What a replay saves of a whole pass.

    Attributes:
        share: cost of the changing part in that of a whole pass; infinite where whole passes are to run.
        flops: of the fixed part.
        modules: names of those whose calls are replayed; none of them holds a parameter that changes.
    """

    share: float
    flops: float
    modules: frozenset[str] = frozenset()

    @property
    def worth(self) -> bool:
        """Whether it saves enough to keep features."""
        return self.share <= WORTH


_NONE = Saving(float("inf"), 0.0)


class FixedPart:
    """Records the part of a model that some of its weights do not influence, and runs the other part, which changes.

    Args:
        model: in eval mode; it is copied, and never written.
        covered: names of the parameters that change.

    Attributes:
        possible: whether any weight does not change; without one there is nothing to record.
        refused: why whole passes run although a part could have been recorded, or None.
    """

    def __init__(self, model: nn.Module, covered: Collection[str]) -> None:
        self._model, self._covered = model, frozenset(covered)
        parameters = model.named_parameters()
        self.possible = any(name not in self._covered and p.ndim > 1 for name, p in parameters)
        self._twins: deque[_Twin] = deque()
        self._savings: dict[Any, Saving] = {}
        self._rewritten: set[str] = set()
        self.refused: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # the decisions stay, so that a copy takes the same route
        return {**self.__dict__, "_twins": deque()}

    def features(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        wanted: Callable[[Saving], bool] = lambda saving: saving.worth,
    ) -> Features | None:
        """What enters the changing part of the model for these inputs; None where whole passes are to run.

        Where autograd is on, gradients with respect to the inputs flow through the features.

        Args:
            wanted: whether a saving is worth recording a pass.
        """
        if torch.compiler.is_compiling() or not self.possible:
            return None
        key = _situation(args, kwargs)
        saving = self._savings.get(key)
        if saving is None:
            saving = self._settle(args, kwargs)
            if len(self._savings) >= _SHAPES:
                self._savings.clear()
            self._savings[key] = saving
        if saving == _NONE or not wanted(saving):
            return None
        try:
            with _counting_versions(torch.is_grad_enabled()), self._lent() as twin:
                return self._record(twin, args, kwargs, saving.modules)
        except ReplayError as error:
            self.refuse(str(error))
            return None

    def refuse(self, reason: str) -> None:
        """Run whole passes from now on, for the shapes known so far."""
        self.refused = reason
        self._savings = dict.fromkeys(self._savings, _NONE)

    def run(self, features: Features, weights: Mapping[str, Tensor]) -> Tensor:
        """The outputs with these weights in place.

        Raises:
            ReplayError: the pass took another route than the recorded one.
        """
        with self._lent() as twin, twin.holding(weights):
            return output_tensor(features.call_any(twin.model))

    def calls_of(self, layer: Layer, features: Features) -> list[LayerCall]:
        """The calls of a layer in a replay with the model's own weights.

        Raises:
            ReplayError: the pass took another route than the recorded one.
        """
        with self._lent() as twin, watching(twin.model, layer) as calls:
            features.call_any(twin.model)
        return calls

    @contextmanager
    def _lent(self) -> Generator[_Twin]:
        """A replica that no other thread uses meanwhile."""
        try:
            twin = self._twins.pop()
        except IndexError:
            twin = None
        if twin is None or _memory(twin.model) != _memory(self._model):  # the model was moved
            twin = _Twin(self._model, self._covered)
        yield twin
        self._twins.append(twin)  # not after an error, which may leave it half written

    def _record(
        self, twin: _Twin, args: tuple[Any, ...], kwargs: dict[str, Any], known_modules: Collection[str] = ()
    ) -> Features:
        for _ in range(_TRIES):
            try:
                return FunctionRecorder(twin.changing, self._rewritten, known_modules).run(
                    twin.model, args, kwargs
                )
            except RewrittenError as error:
                self._rewritten = self._rewritten | error.names
        raise ReplayError("later code keeps writing into what modules returned")

    def _settle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Saving:
        """What a replay saves on inputs of this shape."""
        batch = Batch(args, None, kwargs)
        samples = next((t.shape[0] for t in batch.tensors() if t.ndim > 0), 0)
        trials = [batch.narrow(0, _PROBE, samples)] if samples > _PROBE else []

        def saving(trial: Batch) -> Saving:
            with isolated_random_state(), _counting_versions(False):
                return self._saving(trial)

        def plainly() -> None:
            with isolated_random_state(), torch.no_grad():
                batch.copied().call_any(replicate(self._model))

        reason = None
        for trial in [*trials, batch]:
            try:
                return saving(trial)
            except ReplayError as error:
                self.refused = str(error)
                return _NONE
            except Exception as error:  # of the model: it may need the full batch, or weights like its own
                check_refused(error, lambda trial=trial: saving(trial), plainly)
                reason = described(error)
        self.refused = reason
        return _NONE

    def _saving(self, batch: Batch) -> Saving:
        weights = {name: _moved(p) for name, p in self._model.named_parameters() if name in self._covered}
        member = replicate(self._model, weights)
        outputs: list[Tensor] = []

        def whole_pass() -> None:
            args, kwargs = tree_map(writable_copy, (batch.args, batch.kwargs))
            outputs.append(output_tensor(member(*args, **kwargs)))

        whole_cost = cost_of(whole_pass)
        expected = outputs[-1]
        try:
            features = self._proved(batch)
            if not any(call.leaves is not None for call in features.calls):
                return _NONE
            replay_cost = cost_of(lambda: outputs.append(self.run(features, weights)))
        except Exception as error:  # a model may raise anything
            cause = error.__cause__ if isinstance(error, ReplayError) else error
            if isinstance(cause, Exception):
                check_refused(cause, lambda: self.run(self._proved(batch), weights), whole_pass)
            if isinstance(error, ReplayError):
                raise
            raise ReplayError(described(error)) from error
        if not agree(outputs[-1], expected):
            raise ReplayError("its outputs differ from those of the whole model")
        replayed = {call.name for call in features.calls if call.leaves is not None}
        modules = frozenset(name for name in replayed if not self._holds(name))
        if whole_cost is None or replay_cost is None:
            return Saving(0.0, float("inf"), modules)
        share = _work(replay_cost) / _work(whole_cost)
        return Saving(share, whole_cost.flops - replay_cost.flops, modules)

    def _holds(self, name: str) -> bool:
        """Whether a module of this name holds a parameter that changes."""
        covered = {id(p) for key, p in self._model.named_parameters() if key in self._covered}
        return any(id(p) in covered for p in self._model.get_submodule(name).parameters())

    def _proved(self, batch: Batch) -> Features:
        """Features, once it is certain that the model draws no random numbers and keeps nothing of a pass."""
        with self._lent() as twin:
            state_before, random_before = _state(twin.model), _random_state()
            features = self._record(twin, batch.args, batch.kwargs)
            if random_before != _random_state():
                raise ReplayError("the model draws random numbers")
            state_after = _state(twin.model)
            if state_after != state_before:  # what a first pass makes and keeps does no harm
                features = self._record(twin, batch.args, batch.kwargs)
                _check_state(state_after, _state(twin.model))
            _disturb(twin.model, batch)
        return features


class _Twin:
    """A replica whose calls can be recorded and replayed.

    Attributes:
        model: the replica.
        changing: identities of its parameters that change.
    """

    def __init__(self, model: nn.Module, covered: Collection[str]) -> None:
        with isolated_random_state():  # copying a module may run its code
            self.model = intercept(replicate(model))
        self._trained = {name: p for name, p in self.model.named_parameters() if name in covered}
        self.changing = {id(parameter) for parameter in self._trained.values()}
        self._holders: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in self._trained}
        names = {id(parameter): name for name, parameter in self._trained.items()}
        for module in self.model.modules():
            parameters: dict[str, Any] = module.__dict__["_parameters"]
            for key, parameter in parameters.items():
                if id(parameter) in names:
                    self._holders[names[id(parameter)]].append((parameters, key))

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Generator[None]:
        """Put weights in place for as long as the context lasts, wherever a module holds them."""
        self._place(weights)
        yield
        self._place(self._trained)

    def _place(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            for parameters, key in self._holders[name]:
                parameters[key] = weight


def _disturb(model: nn.Module, batch: Batch) -> None:
    """Run a model on other inputs, so that whatever it keeps of a pass out of sight is not what the following replay
    needs: a replay that depends on it then differs.
    """

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        turned = value.detach().roll(1, 0).flip(-1)
        return -turned if turned.is_floating_point() else turned

    args, kwargs = tree_map(other, (batch.args, batch.kwargs))
    try:
        model(*args, **kwargs)
    except Exception as error:  # inputs that the model refuses change nothing
        if out_of_memory(error):
            raise


def _memory(model: nn.Module) -> int:
    return next(model.parameters()).data_ptr()


def _work(cost: Cost) -> float:
    return cost.flops + _OPERATION * cost.operations


def _moved(parameter: Tensor) -> Tensor:
    """Other values of similar size for a parameter, the same in every run."""
    steps = torch.arange(parameter.numel(), device=parameter.device, dtype=torch.float32)
    wave = torch.cos(steps * steps + 1.0).reshape(parameter.shape).to(parameter.dtype)
    return parameter.detach() + 0.1 * parameter.detach().abs().mean() * wave


@contextmanager
def _counting_versions(gradients: bool) -> Generator[None]:
    """Have tensors count how often they are written, which those of inference mode do not."""
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def _situation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that a model's route may depend on beside the numbers in its inputs, as a dictionary key."""
    leaves = list(enumerate(tree_leaves((args, kwargs))))
    tensors = tuple(
        (place, tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
        for place, leaf in leaves
        if isinstance(leaf, Tensor)
    )
    options = tuple((place, leaf) for place, leaf in leaves if isinstance(leaf, (bool, int, float, str)))
    kinds = {tensor[3].type for tensor in tensors} or {"cpu"}
    casts = tuple(
        (kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        for kind in sorted(kinds)
    )
    return tensors, options, casts, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _random_state() -> Any:
    states = [torch.get_rng_state()]
    states += [module.get_rng_state(*place) for module, place in device_generators()]
    numbers = cast("tuple[Any, ...]", np.random.get_state())
    return [state.tolist() for state in states], random.getstate(), [np.asarray(n).tolist() for n in numbers]


class _Held:
    """An object that is held, so that no later one has its identity; equal for the same object, not written since."""

    def __init__(self, value: Any) -> None:
        counted = isinstance(value, Tensor) and not value.is_inference()
        self.value, self.version = value, value._version if counted else -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


def _state(model: nn.Module) -> dict[str, Any]:
    """A fingerprint of what the modules hold, by which a change is seen."""
    return {
        f"{name}.{key}" if name else key: _fingerprint(value, 3)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in ("forward", "_modules")
    }


def _fingerprint(value: Any, depth: int) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if depth and isinstance(value, dict):
        return [(str(k), _fingerprint(v, depth - 1)) for k, v in cast("dict[Any, Any]", value).items()]
    if depth and isinstance(value, (list, tuple, deque)):
        return [_fingerprint(v, depth - 1) for v in cast("Collection[Any]", value)]
    return _Held(value)


def _check_state(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        raise ReplayError(f"the model keeps something of a pass, in {changed[:3]}")


def agree(outputs: Tensor, expected: Tensor) -> bool:
    """Whether two outputs are the same up to the rounding of their dtype, relative to the largest number."""
    if outputs.shape != expected.shape or outputs.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCES.get(expected.dtype, 0.0)
    if expected.is_cuda and expected.dtype == torch.float32:
        tolerance = _TF32
    size = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if expected.numel() else 0.0
    return torch.allclose(outputs, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def described(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
