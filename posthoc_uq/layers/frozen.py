"""What enters the layers with a posterior: computed once for a batch, where these layers are all that follows.

Up to the first layer with a posterior all passes of a model on the same inputs are the same, whatever weights are
drawn. Where the layers with a posterior are the last modules of a model, one after the other, what enters the first
of them is cached, and the rest of the model is these modules alone. That the modules before make the features and
the modules after make nothing but the outputs is looked at in every pass that computes features; that the rest gives
the outputs is proved by numbers, on the first batch of every shape and with other weights in place. A model for
which any of this fails runs as a whole.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import check_refused, in_one_line
from posthoc_uq.core.model import replicate
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.core.randomness import device_generators, isolated_random_state
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.capture import WatchedCalls, WatchedLayer
from posthoc_uq.layers.layer import Call

MAX_SHAPES = 256  # input shapes whose proof is remembered
PROVED_SAMPLES = 8  # that a proof runs on
# How far outputs of two routes may differ, relative to the largest. CUDA's float32 products may be TF32.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
TF32_TOLERANCE = 2e-2


@dataclass(frozen=True)
class LastModules:
    """The modules that come last.

    Attributes:
        names: of the modules, in the order in which they run.
        dimensions: of what the model's code makes of each one's output by a change of its form: 2 where it is flattened
            from the second dimension on, 1 where the last dimension, of size 1, is dropped; None elsewhere.
    """

    names: tuple[str, ...]
    dimensions: tuple[int | None, ...]

    def of(self, model: nn.Module) -> nn.Module:
        """A replica of a model whose forward pass is that of these modules alone."""
        rest = replicate(model)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):  # of the whole model's call
            vars(rest)[hooks] = type(vars(rest)[hooks])()
        vars(rest)["forward"] = _Chain([rest.get_submodule(name) for name in self.names], self.dimensions)
        return rest


class _Chain:
    """Runs modules one after the other; the first takes all arguments."""

    def __init__(self, modules: list[nn.Module], dimensions: tuple[int | None, ...]) -> None:
        self._modules, self._dimensions = modules, dimensions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = None
        for place, (module, dimensions) in enumerate(zip(self._modules, self._dimensions, strict=True)):
            result = module(*args, **kwargs) if place == 0 else module(result)
            result = _reformed(result, dimensions)
        return result


def _reformed(tensor: Tensor, dimensions: int | None) -> Tensor:
    return tensor if dimensions is None else tensor.flatten(1) if dimensions == 2 else tensor.squeeze(-1)


@dataclass(frozen=True, repr=False)
class Features:
    """What enters the rest of a model, for one batch.

    Attributes:
        batch: the arguments of the rest.
        outputs: of the whole model, with its own weights.
        tail: what the rest is.
        watched: the calls of layers that were watched in the pass of the whole model.
    """

    batch: Batch
    outputs: Tensor
    tail: LastModules
    watched: Sequence[Call] = ()

    @property
    def samples(self) -> int:
        """The number of samples in the batch."""
        return len(self.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.batch.tensors, self.outputs))


class FrozenPart:
    """The part of a model, in eval mode, that runs before the first of the parameters that are changing.

    Attributes:
        refused: why whole passes run although modules without changing weights come first, or None.
    """

    def __init__(self, model: nn.Module, changing: Collection[str]) -> None:
        self._model, self._changing = model, frozenset(changing)
        self._candidates = _tails(model, self._changing)
        self._tail: LastModules | None = None
        self._usable: dict[Any, bool] = {}
        self._twins = ReplicaPool(model)
        self._rest: tuple[LastModules, ReplicaPool] | None = None
        self.refused: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rest": None}  # made anew from the model

    def rest(self, features: Features) -> nn.Module:
        """The rest of the model: a replica on the same weights, under the same names, that takes features."""
        return self.twins(features).model

    def twins(self, features: Features | None) -> ReplicaPool:
        """Copies for functional calls, of the whole model or of the rest of it that takes features."""
        if features is None:
            return self._twins
        rest = self._rest
        if rest is None or rest[0] != features.tail:
            with isolated_random_state():  # copying a module may run its code
                self._rest = rest = features.tail, ReplicaPool(features.tail.of(self._model))
        return rest[1]

    def features(self, batch: Batch, watched: Sequence[WatchedLayer] = ()) -> Features | None:
        """What enters the rest of the model for these inputs; None where whole passes are to run.

        Where autograd is on, gradients with respect to the inputs flow through the features.

        Args:
            batch: the inputs.
            watched: layers whose calls are kept, too.
        """
        if torch.compiler.is_compiling() or not self._candidates or batch.whole:
            return None
        key = (batch.form(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if key not in self._usable:
            usable = self._find_tail(batch)
            if len(self._usable) >= MAX_SHAPES:
                self._usable.clear()
            self._usable[key] = usable
        tail = self._tail
        if tail is None or not self._usable.get(key):
            return None
        gradients = torch.is_grad_enabled()
        # tensors of inference mode do not count how often they are written
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), self._twins.borrow() as twin:
            found = _record(twin, tail.names, batch, watched)
        return found if found is not None and found.tail == tail else None

    def _find_tail(self, batch: Batch) -> bool:
        """Whether the rest can run alone for inputs like these."""
        samples = batch.rows or 0
        few = batch.repeated(2) if samples == 1 else batch.narrow(0, min(samples, PROVED_SAMPLES), samples)

        def plainly() -> None:
            with isolated_random_state(), torch.no_grad():
                batch.copied().call_any(replicate(self._model))

        for names in self._candidates if self._tail is None else [self._tail.names]:

            def attempt(names: tuple[str, ...] = names) -> LastModules | str:
                with isolated_random_state(), torch.inference_mode(False), torch.no_grad():
                    return self._proof(names, few)

            try:
                found = attempt()
            except Exception as error:  # of the model, which may take no part of its batch
                check_refused(error, attempt, plainly)
                found = in_one_line(error)
            if not isinstance(found, str) and self._tail in (None, found):
                self._tail, self.refused = found, None
                return True
            self.refused = found if isinstance(found, str) else "other inputs take another way through it"
        return False

    def _proof(self, names: tuple[str, ...], batch: Batch) -> LastModules | str:
        """How these modules run alone, or why they cannot."""
        samples, random_before = batch.rows or 0, _random_state()
        twin = replicate(self._model)
        found, again = _record(twin, names, batch), _record(twin, names, batch)
        if _random_state() != random_before:
            return "the model draws random numbers"
        if found is None or again is None:
            return "the layers with a posterior are not all that follows"
        features, tail = found.batch, found.tail
        if not _same_inputs(features, again.batch):
            return "the model keeps something of a pass"
        half = _record(twin, names, batch.narrow(0, samples // 2, samples))
        if half is None or not _same_inputs(features.narrow(0, samples // 2, samples), half.batch):
            return "what enters the layers with a posterior cannot be told apart by samples"
        weights = {n: _moved(p) for n, p in self._model.named_parameters() if n in self._changing}
        expected, rest = batch.copied().call(replicate(self._model, weights)), tail.of(self._model)
        half.batch.copied().call_any(rest)  # a rest that keeps something of a pass differs in the next one
        if not agree(called(rest, weights, features), expected):
            return "the layers with a posterior alone give other outputs than the whole model"
        return tail


class ReplicaPool:
    """Copies of a model for functional calls, which write into the module that they run: each thread borrows one.

    Attributes:
        model: what they are copies of; never written.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._free: deque[nn.Module] = deque()
        by_identity: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            by_identity.setdefault(id(parameter), []).append(name)
        self._names = {name: names for names in by_identity.values() for name in names}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_free": deque()}

    def call(self, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The outputs with other weights, as `called`; the names of tied weights are looked up once, which takes longer
        than the call of a last layer.
        """
        everywhere = {name: weight for key, weight in weights.items() for name in self._names[key]}
        with self.borrow() as twin:
            return called(twin, everywhere, batch, tied=False)

    @contextmanager
    def borrow(self) -> Generator[nn.Module]:
        """A copy that no other thread uses meanwhile."""
        try:
            twin = self._free.pop()
        except IndexError:
            with isolated_random_state():  # copying a module may run its code
                twin = replicate(self.model)
        yield twin
        self._free.append(twin)  # not after an error, which may leave it half written


def called(model: nn.Module, weights: Mapping[str, Tensor], batch: Batch, *, tied: bool = True) -> Tensor:
    """The outputs of a model with other weights; nothing else may run it meanwhile. If `tied`, a weight with several
    names is given by one of them.
    """
    call = batch.fresh()
    return call.outputs_of(
        torch.func.functional_call(model, dict(weights), call.args, call.kwargs, tie_weights=tied)
    )


def _tails(model: nn.Module, changing: frozenset[str]) -> list[tuple[str, ...]]:
    """Modules by name that hold all changing parameters and may come last, one after the other: the fewest first.

    They are the parts of the model, in the order of its attributes, from the first one on that holds such a parameter;
    and of this part, in turn, its own parts from there on.
    """
    identities = {id(parameter) for name, parameter in model.named_parameters() if name in changing}
    found: list[tuple[str, ...]] = []
    module, path, after = model, "", tuple[str, ...]()
    while not any(id(parameter) in identities for parameter in module.parameters(recurse=False)):
        parts = [(f"{path}.{name}".lstrip("."), part) for name, part in module.named_children()]
        holding = [
            place
            for place, (_, part) in enumerate(parts)
            if any(id(parameter) in identities for parameter in part.parameters())
        ]
        if not holding:
            break
        if isinstance(module, nn.Sequential) or len(holding) > 1:
            after = (*(name for name, _ in parts[holding[0] + 1 :]), *after)
        path, module = parts[holding[0]]
        inside = {id(p) for name in (path, *after) for p in model.get_submodule(name).parameters()}
        # Only a weight that is multiplied before these modules is worth leaving out. What has one row alone, as a token
        # or the embedding of positions, is added.
        if any(id(p) not in inside and p.ndim > 1 and len(p) > 1 for p in model.parameters()):
            found.insert(0, (path, *after))
    return found


def _getter(name: str) -> Any:
    attribute = getattr(Tensor, name)
    return attribute if callable(attribute) else attribute.__get__


FORM_QUERIES = {
    _getter(name)
    for name in "shape dtype device ndim layout requires_grad is_cuda is_cpu is_sparse is_nested is_quantized "
    "size dim ndimension numel nelement is_floating_point is_complex element_size __len__".split()
} | {torch.is_floating_point, torch.is_complex, torch.numel}
"""Functions that ask for the form of a tensor and not for its numbers."""


class _TailRecorder:
    """Watches a pass in which modules should run one after the other.

    Attributes:
        inputs: copies of the first one's arguments.
        intact: whether each got nothing but what the one before returned, which no other code read or changed.
        dimensions: see `LastModules`.
    """

    def __init__(self, modules: int) -> None:
        self.inputs: Batch | None = None
        self.intact = True
        self.dimensions: list[int | None] = []
        self._modules, self._running = modules, False
        self._returned: Tensor | None = None
        self._version = 0

    def enter(self, place: int) -> Callable[..., None]:
        """The hook before a module runs."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running = True
            if place == 0 and self.inputs is None:
                self.inputs = Batch(args, None, kwargs).fresh()
            elif place == 0 or place != len(self.dimensions) + 1 or len(args) != 1 or kwargs:
                self.intact = False
            else:
                self._take(args[0])

        return hook

    def leave(self, place: int) -> Callable[..., None]:
        """The hook after it."""

        def hook(module: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
            if place != len(self.dimensions) or not isinstance(returned, Tensor):
                self.intact = False
            else:
                self._returned, self._version = returned, _version_of(returned)
            self._running = False

        return hook

    def end(self, outputs: Tensor) -> bool:
        """Whether all modules ran, and nothing but them; `outputs` are the model's."""
        self._take(outputs)
        return self.intact and len(self.dimensions) == self._modules

    def _take(self, tensor: Any) -> None:
        """Note what was made of the last module's output."""
        last = self._returned
        if last is None or not isinstance(tensor, Tensor) or _version_of(tensor) != self._version:
            self.intact = False
            return
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            dimensions = None if tensor is last else tensor.ndim
            same = tensor is last or (
                tensor.data_ptr() == last.data_ptr()
                and last.ndim > tensor.ndim
                and dimensions in (1, 2)
                and tensor.is_contiguous()
                and last.is_contiguous()
                and _reformed(last, dimensions).shape == tensor.shape
            )
        self.intact = self.intact and same
        self.dimensions.append(dimensions)

    def see(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Look at a call of torch's functions."""
        last = self._returned
        if last is not None and not self._running and func not in FORM_QUERIES:
            read = any(_share_memory(x, last) for x in tree_leaves((args, kwargs)))
            if read and not _share_memory(result, last):
                self.intact = False


def _record(
    twin: nn.Module, names: tuple[str, ...], batch: Batch, watched: Sequence[WatchedLayer] = ()
) -> Features | None:
    """The features of a batch by a pass of `twin`; None where more than these modules follows them."""
    walk, handles = _TailRecorder(len(names)), list[Any]()
    seen = WatchedCalls(twin, watched, batch.attention_mask)
    try:
        for place, name in enumerate(names):
            module = twin.get_submodule(name)
            handles.append(
                module.register_forward_pre_hook(walk.enter(place), prepend=True, with_kwargs=True)
            )
            handles.append(module.register_forward_hook(walk.leave(place)))
        note = (lambda use, _: seen.note(use)) if watched else None
        with CallWatcher(seen.weights, note, every=walk.see, anchored=False):
            returned = batch.fresh().call_any(twin)
    finally:
        for handle in handles:
            handle.remove()
    outputs = output_tensor(returned)
    if not walk.end(outputs) or walk.inputs is None:
        return None
    tail = LastModules(names, tuple(walk.dimensions))
    if walk.inputs.rows != len(outputs):
        return None
    return Features(walk.inputs, outputs.detach(), tail, seen.calls)


def _version_of(tensor: Any) -> int:
    """How often it was written; tensors of inference mode do not count it."""
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else -1


def _share_memory(value: Any, tensor: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    )


def _same_inputs(first: Batch, second: Batch) -> bool:
    tensors, others = first.tensors, second.tensors
    return len(tensors) == len(others) and all(map(agree, tensors, others))


def _moved(parameter: Tensor) -> Tensor:
    """Other values of similar size for a parameter, the same in every run."""
    steps = torch.arange(parameter.numel(), device=parameter.device, dtype=torch.float32)
    wave = torch.cos(steps * steps + 1.0).reshape(parameter.shape).to(parameter.dtype)
    return parameter.detach() + 0.1 * parameter.detach().abs().mean() * wave


def _random_state() -> Any:
    states = [torch.get_rng_state()]
    states += [module.get_rng_state(*place) for module, place in device_generators()]
    numbers = cast("tuple[Any, ...]", np.random.get_state())
    return [state.tolist() for state in states], random.getstate(), [np.asarray(n).tolist() for n in numbers]


def agree(outputs: Tensor, expected: Tensor) -> bool:
    """Whether two outputs are the same up to the rounding of their dtype, relative to the largest number."""
    if outputs.shape != expected.shape or outputs.dtype != expected.dtype:
        return False
    tolerance = TOLERANCES.get(expected.dtype, 0.0)
    if expected.is_cuda and expected.dtype == torch.float32:
        tolerance = TF32_TOLERANCE
    size = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if expected.numel() else 0.0
    return torch.allclose(outputs, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)
