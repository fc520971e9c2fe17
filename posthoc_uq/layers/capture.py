"""Activations and output gradients of every layer, by BackPACK and by intercepted calls.

`Capture` owns a replica of the model. `layers_of` finds the weighted layers that a pass over the first samples used,
and chooses the engine for each: BackPACK (Dangel, Kunstner, Hennig 2020), which runs an extension on every extended
module during the backward pass, where that is sound; the interceptor where a module is called twice, an output is
changed in place, or under autocast. `proof.prepare` then proves that nothing was missed. Only weighted leaf modules are
extended, so the code between them may be anything. Of parameters whose uses cannot be caught the gradients of each
sample are computed beside that (`sample_gradients`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import UnsupportedLayerError
from posthoc_uq.core.model import EMBEDDINGS, owners, replicate
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.layer import Call, Layer, describe
from posthoc_uq.layers.operands import Geometry
from posthoc_uq.layers.rules import WEIGHTED_MODULES, AffineCall, LayerGradients, Lookup
from posthoc_uq.layers.sample_gradients import (
    MAX_DIMENSIONS,
    ROUTES,
    Route,
    is_matrix,
    sample_gradients,
)
from posthoc_uq.layers.uses import WatchedPass

# BackPACK keeps its active extensions in a global variable, so fits in two threads take turns with backward passes. It
# is imported where it is used: what only predicts need not wait for it.
_CONTEXT_LOCK = threading.RLock()


@cache
def _extension() -> Any:
    """The class of an extension of BackPACK that calls ``handler(module, input, output_gradient)`` for every extended
    weighted module, in backward order, and stores nothing on the parameters.
    """
    from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension

    class HandOver(FirstOrderModuleExtension):
        def __call__(
            self, extension: Any, module: nn.Module, g_inp: tuple[Tensor, ...], g_out: tuple[Tensor, ...]
        ) -> None:
            extension.handler(module, module.input0, g_out[0])

    class ActivationsAndGradients(FirstOrderBackpropExtension):
        def __init__(self, handler: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
            super().__init__("posthoc_uq", {kind: HandOver() for kind in WEIGHTED_MODULES}, "ERROR")
            self.handler = handler

    return ActivationsAndGradients


MAX_SIDE = 16384
"""Rows or columns of a matrix of which gradients are all that is known: more make too large a Kronecker factor."""


def _rows(weight: Tensor) -> int:
    """Of the matrix that a parameter is taken for."""
    return next(size for size in weight.shape if size > 1)


def is_lookup_of(use: AffineCall, layer: Layer) -> bool:
    """Whether an embedding looks up rows of a layer's weight, which it shares: no use of the layer."""
    return use.kind == Lookup.kind != layer.kind


CaptureEngine = Literal["backpack", "hooks"] | Route
Sink = Callable[[LayerGradients], None]


@dataclass
class TrackedLayer:
    """A layer as it was used on the first batch.

    Attributes:
        holders: names and types of the modules that hold the weight; several where it is tied.
        embeddings: the names of those of them that are embeddings, where others are not.
        own_weight: the weight's name in the module that the layer is named after.
        product: whether the weight was seen as a factor of a product of matrices.
        both_ways: whether it was used both as it is and transposed.
        several: whether a sample may give it several rows of inputs: positions, or calls.
        ends: whether the gradient at its outputs has the numbers of that at the model's: these may be its outputs.
        input_shape: of the first call's input, as the rule of the layer's kind takes it.
        input_of: the weight of the first layer that was given the same tensor, which may be its own.
    """

    layer: Layer
    module: nn.Module | None
    engine: CaptureEngine = "hooks"
    geometry: Geometry = field(default_factory=Geometry)
    uses: int = 0
    batch_axis: int = 0
    keep_input: bool = False  # copy the input, since the model changes it in place after the call
    holders: tuple[tuple[str, str], ...] = ()
    embeddings: tuple[str, ...] = ()
    own_weight: str = ""
    product: bool = False
    both_ways: bool = False
    several: bool = True
    ends: bool = False
    input_shape: tuple[int, ...] = ()
    input_of: str = ""

    @property
    def names(self) -> list[str]:
        """The names by which the layer may be asked for; those of embeddings that share its weight are not among
        them.
        """
        own = [self.layer.name, *(name for name, _ in self.holders)]
        return [name for name in own if name not in self.embeddings]

    def without_bias(self) -> TrackedLayer:
        """The layer with a posterior over its weight alone, of which it has the name."""
        layer = self.layer
        if layer.bias is None:
            return self
        return replace(self, layer=replace(layer, name=layer.weight, bias=None, inputs=layer.inputs - 1))

    @property
    def alone(self) -> list[str]:
        """The name of its weight, where that is all that it has."""
        return [self.layer.weight] if self.layer.bias is None else []


class WatchedLayer(NamedTuple):
    """A layer whose inputs a pass keeps.

    Attributes:
        layer: the layer, tracked or not.
        pool: makes of an input, and of the batch's mask of positions, what is kept; by default a copy of the input.
    """

    layer: Layer
    pool: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def call(self, x: Tensor, geometry: Geometry, mask: Tensor | None) -> Call:
        """A call of the layer with this input, as it is kept."""
        kept = x.detach().clone() if self.pool is None else self.pool(x.detach(), mask)
        return Call(self.layer, kept, geometry)


class WatchedCalls:
    """What a running model gives the layers that are watched.

    Args:
        model: that runs.
        watched: the layers.
        mask: `Batch.attention_mask` of what it runs on.

    Attributes:
        weights: the identities of their weights.
        calls: of these layers, in the order of the pass.

    Raises:
        AttributeError: the model has no such weight.
    """

    def __init__(self, model: nn.Module, watched: Sequence[WatchedLayer], mask: Tensor | None) -> None:
        self._by_weight = {id(model.get_parameter(watch.layer.weight)): watch for watch in watched}
        self._mask = mask
        self.weights, self.calls = set(self._by_weight), list[Call]()

    def note(self, use: AffineCall) -> None:
        """Keep a call, if it is of one of these layers."""
        watch = self._by_weight.get(id(use.parameter))
        if watch is not None and not is_lookup_of(use, watch.layer):
            self.calls.append(watch.call(use.input, use.geometry, self._mask))


class Capture:
    """Runs a copy of a model, and hands over each tracked layer's activations and output gradients.

    Attributes:
        twin: the copy.
        tracked: the layers by name.
        by_module: those of them that BackPACK serves. Without any, runs in several threads do not interfere: the
            interceptor keeps everything in the `Recording`.
        by_weight: those that the interceptor serves, by the identity of their weight in the copy.
        computed: those of which gradients are all that is known.
        watched: layers, tracked or not, of whose inputs every `Recording` keeps something.
    """

    def __init__(self, model: nn.Module) -> None:
        self.twin = replicate(model)
        self.tracked: dict[str, TrackedLayer] = {}
        self.watched: tuple[WatchedLayer, ...] = ()
        self.by_module: dict[nn.Module, TrackedLayer] = {}
        self.by_weight: dict[int, TrackedLayer] = {}
        self.computed: list[Layer] = []

    def unseen(self, names: Collection[str]) -> list[TrackedLayer]:
        """Parameters by name as layers of which gradients are all that is known; a layer's bias is part of it. Without
        a proof of how these are found.
        """
        parameters, held = dict(self.twin.named_parameters()), owners(self.twin)
        found = list[TrackedLayer]()
        for name in names:
            weight = parameters[name]
            if not (weight.is_floating_point() and weight.numel() and weight.ndim <= MAX_DIMENSIONS):
                continue
            if is_matrix(weight) and max(_rows(weight), weight.numel() // _rows(weight)) > MAX_SIDE:
                continue
            module_name, attribute, module = held[id(weight)][0]
            if any(getattr(module, option, None) for option in ("scale_grad_by_freq", "max_norm")):
                continue  # an embedding whose gradients depend on the batch, or that changes its weight
            own = attribute == "weight" and module_name
            bias_name = f"{module_name}.bias" if own and is_matrix(weight) else ""
            bias = parameters[bias_name] if bias_name in names else None
            if attribute == "bias" and f"{module_name}.weight" in names:
                other = parameters[f"{module_name}.weight"]
                if is_matrix(other) and weight.shape == (_rows(other),):
                    continue
            if bias is not None and bias.shape != (_rows(weight),):
                bias = None
            layer = describe(
                module_name if own else name,
                f"parameter{weight.ndim}d",
                (name, weight),
                None if bias is None else (bias_name, bias),
                1 if is_matrix(weight) else weight.numel(),
            )
            shown = tuple((holder, type(m).__name__) for holder, _, m in held[id(weight)])
            found.append(TrackedLayer(layer, module, "vmap", holders=shown, own_weight=name))
        return found

    def track(self, layers: list[TrackedLayer]) -> None:
        """Track these layers, of this model or of one like it, and let BackPACK see those that it serves."""
        self.tracked = {tracked.layer.name: tracked for tracked in layers}
        served = [t for t in layers if t.engine == "backpack"]  # each is the weight of one module
        self.by_module = {self.twin.get_submodule(t.holders[0][0]): t for t in served}
        hooked = [t for t in layers if t.engine == "hooks"]
        self.by_weight = {id(self.twin.get_parameter(t.layer.weight)): t for t in hooked}
        self.computed = [t.layer for t in layers if t.engine in ROUTES]
        if self.by_module:
            from backpack import extend
            from backpack.context import CTX

            with _CONTEXT_LOCK:
                # BackPACK keeps the handles of its hooks for good, also those of modules that are gone
                CTX.hook_handles = [h for h in CTX.hook_handles if h.hooks_dict_ref() is not None]
                for module in self.by_module:
                    extend(module)

    def run(self, batch: Batch, samples: int) -> Recording:
        """A forward pass, ready to be pulled back through."""
        return Recording(self, batch, samples)


def layers_of(watched: WatchedPass, autocast: bool) -> list[TrackedLayer]:
    """Every weighted layer that a pass used, in the order of their last calls."""
    all_holders, found = owners(watched.twin), list[TrackedLayer]()
    inputs = dict[int, str]()
    for key, uses in watched.seen.items():
        call = uses[0].call
        # where an embedding shares its weight with a layer, the layer comes first
        holders = sorted(all_holders[key], key=lambda owner: isinstance(owner[2], EMBEDDINGS))
        module_name, attribute, module = holders[0]
        weight_name = watched.names[key]
        bias_name = None if call.bias is None else watched.names.get(id(call.bias))
        bias = None if bias_name is None or call.bias is None else (bias_name, call.bias)
        name = module_name if attribute == "weight" and module_name else weight_name
        in_embeddings = [] if isinstance(module, EMBEDDINGS) else holders[1:]
        keep_input = any(use.call.input._version != use.input_version for use in uses)
        untouched = not keep_input and all(use.output._version == use.output_version for use in uses)
        plain = not autocast and len(uses) == 1 and untouched and len(holders) == 1 and is_plain(module)
        found.append(
            TrackedLayer(
                describe(name, call.kind, (weight_name, call.parameter), bias, call.groups),
                module,
                "backpack" if plain else "hooks",
                call.geometry,
                len(uses),
                keep_input=keep_input,
                holders=tuple((name, type(module).__name__) for name, _, module in holders),
                embeddings=tuple(name for name, _, each in in_embeddings if isinstance(each, EMBEDDINGS)),
                own_weight=f"{module_name}.{attribute}".lstrip("."),
                product=call.product,
                both_ways=len({use.call.kind for use in uses}) > 1,
                input_shape=tuple(call.input.shape),
                input_of=inputs.setdefault(id(call.input), weight_name),
            )
        )
    return found


def is_plain(module: nn.Module) -> bool:
    """Whether BackPACK knows the module's class and the module runs that class's own forward pass."""
    if type(module) not in WEIGHTED_MODULES:
        return False
    if type(module).forward is not getattr(module.forward, "__func__", None):  # replaced on this module
        return False
    return getattr(module, "padding_mode", "zeros") == "zeros"


class Recording:
    """One forward pass of the replica, through which gradients can be pulled back any number of times.

    Attributes:
        outputs: the model's outputs.
        calls: uses of the layers that the interceptor serves, by name.
        numbers: how many numbers these layers gave in this pass; a backward pass hands over as many, the gradients of
            `sample_gradients` among them.
        watched: the calls of `Capture.watched`, each with what is kept of the layer's input.
    """

    def __init__(self, capture: Capture, batch: Batch, samples: int) -> None:
        self._capture, self._batch, self._samples = capture, batch, samples
        # while `sample_gradients` runs, the copy of the model has other weights, for every thread
        self._alone: AbstractContextManager[Any] = _CONTEXT_LOCK if capture.computed else nullcontext()
        self.calls: dict[str, list[Call]] = {}
        self.numbers = samples * sum(layer.parameters for layer in capture.computed)
        self._sink: Sink | None = None
        self._watched = WatchedCalls(capture.twin, capture.watched, batch.attention_mask)
        self.watched, own = self._watched.calls, batch.copied()
        watcher = CallWatcher(set(capture.by_weight), self._note, watched=self._watched.weights)
        with self._alone, torch.enable_grad(), watcher:
            self.outputs = own.call(capture.twin)
        self._autocast = torch.is_autocast_enabled(self.outputs.device.type)

    def pull_back(self, gradient: Tensor, sink: Sink, *, last: bool) -> None:
        """Pull ``gradient``, shaped like the outputs, back; every tracked layer that it reaches goes to
        `sink` once. After the `last` one the graph is freed.
        """
        if self._capture.computed:
            self._compute(gradient, sink)
        if not self.outputs.requires_grad:
            return
        self._sink = sink
        # The user's autocast is for the forward pass; the statistics have their own precision.
        with torch.autocast(self.outputs.device.type, enabled=False):
            gradient = gradient.to(self.outputs.dtype)
            if self._capture.by_module:
                from backpack import backpack

                with _CONTEXT_LOCK, backpack(_extension()(self._from_backpack), retain_graph=not last):
                    self.outputs.backward(gradient, retain_graph=not last)
            else:
                self.outputs.backward(gradient, retain_graph=not last)
            for calls in self.calls.values():
                self._emit([call for call in calls if call.output_gradient is not None])
        self._sink = None

    def _compute(self, gradient: Tensor, sink: Sink) -> None:
        """Hand over the layers of which gradients are all that is known."""
        tracked = self._capture.tracked
        for route in ROUTES:
            layers = [layer for layer in self._capture.computed if tracked[layer.name].engine == route]
            if not layers:
                continue
            with self._alone, torch.autocast(self.outputs.device.type, enabled=self._autocast):
                found = sample_gradients(
                    self._capture.twin, layers, self._batch, self.outputs, gradient, route
                )
            if found is None:  # from now on
                for layer in layers:
                    tracked[layer.name].engine = "loop"
                continue
            with torch.autocast(self.outputs.device.type, enabled=False):
                for layer in layers:
                    of_layer = found.pop(layer.name)
                    sink(
                        LayerGradients(layer, [Call(layer, of_layer, Geometry(), of_layer)], self._samples, 0)
                    )

    def _note(self, use: AffineCall, output: Tensor) -> None:
        self._watched.note(use)
        tracked = self._capture.by_weight.get(id(use.parameter))
        if tracked is None or is_lookup_of(use, tracked.layer):
            return
        x = use.input.detach()
        call = Call(tracked.layer, x.clone() if tracked.keep_input else x, use.geometry)
        calls = self.calls.setdefault(tracked.layer.name, [])
        calls.append(call)
        self.numbers += output.numel()
        version = call.input._version
        # The graph refers to the hook, and this recording to the graph. The garbage collector cannot see such a circle
        # through autograd's memory, so the hook's reference to the recording must be weak.
        recording = weakref.ref(self)

        def receive(gradient: Tensor) -> None:
            if call.input._version != version:
                raise UnsupportedLayerError(
                    f"The input of layer '{tracked.layer.name}' was changed in place after the layer used "
                    f"it, and was not on the "
                    f"first batch; make that operation out of place, or leave the layer out with layers=...."
                )
            call.output_gradient = gradient
            alive = recording()
            if alive is not None and len(calls) == 1:
                alive._emit(calls)

        output.register_hook(receive)

    def _from_backpack(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        tracked = self._capture.by_module.get(module)
        if tracked is not None:
            self._emit([Call(tracked.layer, x, tracked.geometry, gradient)])

    def _emit(self, calls: list[Call]) -> None:
        if not calls or self._sink is None:
            return
        tracked = self._capture.tracked[calls[0].layer.name]
        self._sink(LayerGradients(tracked.layer, list(calls), self._samples, tracked.batch_axis))
        for call in calls:
            call.output_gradient = None
