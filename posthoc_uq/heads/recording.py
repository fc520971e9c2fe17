"""Records one pass of a model until the first use of a weight that changes.

A use of a weight is seen wherever it happens, by the identity of the tensor. Tensors that only replayed calls read are
not kept: a stand-in takes their place, which refuses to be read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode_temporarily,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from posthoc_uq.heads.interception import Intercepted, ReplayError, watched_by
from posthoc_uq.heads.replay import SINGLE_TENSOR, Call, Features
from posthoc_uq.heads.stand_ins import QUERIES, StandIn, form_of, writable_copy
from posthoc_uq.outputs import output_tensor

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
    memory = Counter(_memory(tensor) for _, tensor, _ in read)
    changed = [(call, tensor) for call, tensor, changed in read if changed]
    if any(memory[_memory(tensor)] > 1 for _, tensor in changed):
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


def _memory(tensor: Tensor) -> int:
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
