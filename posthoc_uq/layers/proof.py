"""The dry run: finds the weighted layers on two samples and checks the caught gradients against autograd.

For every layer the caught pairs must rebuild autograd's gradient, of the batch and of one sample alone, up to rounding:
``sum_t g_st a_st^T``. A layer that fails is named, never silently missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from inspect import getattr_static
from itertools import accumulate
from math import prod
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, count_samples
from posthoc_uq.core.devices import TEMPORARY_BYTES, full_precision
from posthoc_uq.core.errors import (
    NonFiniteError,
    PosthocUQError,
    UnsupportedLayerError,
    check_refused,
    in_one_line,
    out_of_memory,
)
from posthoc_uq.core.model import owners, replicate, with_separate_embedding_weight
from posthoc_uq.core.options import did_you_mean, shown
from posthoc_uq.layers.capture import Capture, TrackedLayer, layers_of
from posthoc_uq.layers.layer import BATCH_AXES, Layer
from posthoc_uq.layers.operands import CPU_TEMPORARY
from posthoc_uq.layers.rules import WEIGHTED_MODULES, LayerGradients
from posthoc_uq.layers.sample_gradients import Route, is_matrix, numbers_of
from posthoc_uq.layers.uses import Uses, WatchedPass, uses_of

_MAX_NAMED = 5  # parameters that a message names


def why_not_rebuilt(parameter: str, holders: Sequence[tuple[str, str]], both_ways: bool) -> str:
    """Why the caught parts do not add up to a layer's gradient, and what to do about it.

    Args:
        parameter: the layer's weight.
        holders: names and types of the modules that hold the weight, the layer's own first.
        both_ways: whether the weight is used both as it is and transposed.
    """
    if len(holders) < 2 and both_ways:
        return (
            f"its weight '{parameter}' is used both as it is and transposed, as in x @ W and h @ W.T, and a posterior "
            f"follows one of these alone; give one of the uses a parameter of its own, "
            f"torch.nn.Parameter(W.detach().clone()), or leave the layer out with layers=[...]"
        )
    if len(holders) < 2:
        return "what was caught does not rebuild its gradient"
    layer, shared = holders[0][0], " and ".join(f"'{name}' ({kind})" for name, kind in holders)
    return (
        f"its weight '{parameter}' is tied: {shared} share it, and not all of these uses can be followed; for a "
        f"posterior of the uses in '{layer}' alone, fit and wrap posthoc_uq.untied(model, '{layer}')"
    )


def without_posterior(
    asked: Sequence[ParameterUse], parameters: Mapping[str, Tensor], others: str
) -> str | None:
    """A message on weight matrices without a posterior, with their share of all weights; None if there are none.

    Args:
        asked: the parameters that are used and asked for.
        parameters: all of the model, by name.
        others: a sentence on how they could have one.
    """
    floating = {name: p for name, p in parameters.items() if p.is_floating_point()}
    missing = [u for u in asked if u.layer is None and u.name in floating and is_matrix(floating[u.name])]
    if not missing:
        return None
    total = sum(p.numel() for p in floating.values())
    missing.sort(key=lambda use: -use.numbers)
    shown = [f"'{use.name}' ({use.kind}, {_percent(use.numbers / total)})" for use in missing[:_MAX_NAMED]]
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return (
        f"Weights without a posterior, {_percent(sum(use.numbers for use in missing) / total)} of all weights: "
        f"{', '.join(shown)}{more}. Predictions take them for certain. {others} Choosing layers by layers=[...] leaves "
        f"out what is not to have one."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.{2 if share < 0.995 else 3}g}%"


def cost_of_gradients(layers: Sequence[Layer], weights: int, passes: float) -> str:
    """A message on layers of which gradients are all that is known, before their cost is paid.

    Args:
        layers: these.
        weights: of the model, their number.
        passes: plain ones that take as long as one with these gradients.
    """
    names = ", ".join(f"'{layer.name}'" for layer in layers[:_MAX_NAMED])
    more = f" and {len(layers) - _MAX_NAMED} more" if len(layers) > _MAX_NAMED else ""
    share = _percent(numbers_of(layers) / weights)
    return (
        f"The uses of {share} of all weights cannot be caught, as of weights that are computed anew in every pass "
        f"({names}{more}), so that their gradients are formed for each sample: a pass over data takes about "
        f"{max(2, passes):.0f} plain passes. layers=[...] leaves out what is not worth it."
    )


Selection = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""The layers that a user asks for: ``"all"`` whose weights are matrices, ``"everything"`` with the scales of
normalisations, embeddings and all other parameters, ``"trainable"`` that require gradients, ``"last"``, names, prefixes
or shell patterns of layers, names or patterns of parameters, or a function."""

LAYER_WORDS = ("all", "everything", "trainable", "last")
"""Those of them that are words."""


@dataclass(frozen=True)
class Exactly:
    """A selection of these layers by their names, whatever their kind; each is found as it was."""

    layers: Mapping[str, Layer]

    def __call__(self, name: str, module: nn.Module) -> bool:
        return name in self.layers

    @property
    def without_bias(self) -> set[str]:
        """The weights that have a posterior without the bias of their layer."""
        return {
            layer.weight for name, layer in self.layers.items() if name == layer.weight and not layer.bias
        }

    @property
    def unseen(self) -> set[str]:
        """The parameters of those of which gradients are all that is known."""
        layers = [layer for layer in self.layers.values() if layer.rule.by_gradients]
        return {name for layer in layers for name in layer.parameter_names}


def check_selection(selection: Selection) -> None:
    """Refuse a value that cannot select layers.

    Raises:
        PosthocUQError: it is neither a string, nor several strings, nor a function.
    """
    value: Any = selection
    several = isinstance(value, Collection) and not isinstance(value, Tensor)
    if not callable(value) and not (several and all(isinstance(name, str) for name in value)):
        raise PosthocUQError(
            f"layers must be 'all', 'last', 'trainable', a list of names or patterns, or a function "
            f"(name, module) -> bool; not {shown(selection)}."
        )


def matches(want: str, name: str) -> bool:
    """Whether a dotted name, or one of its leading parts, equals `want` or fits it as a shell pattern."""
    parts = accumulate(name.split("."), lambda prefix, part: f"{prefix}.{part}")
    return any(part == want or fnmatchcase(part, want) for part in parts)


def wanted_names(selection: Selection) -> list[str] | None:
    """The names and patterns of a selection; None for words as ``"all"`` and functions."""
    if callable(selection) or selection in LAYER_WORDS:
        return None
    return [selection] if isinstance(selection, str) else list(selection)


def named_parameters_of(
    wanted: Iterable[str], layers: Sequence[TrackedLayer], parameters: Iterable[str]
) -> set[str]:
    """The parameters whose whole names are wanted, or fit a pattern; what is the name of a layer means that layer."""
    own = [want for want in wanted if not any(asked_by_name([want], t.names) for t in layers)]
    return {name for name in parameters if any(want == name or fnmatchcase(name, want) for want in own)}


def asked_by_name(wanted: Iterable[str], names: Iterable[str]) -> bool:
    """Whether any of several names of one thing matches any of those wanted."""
    known = list(names)
    return any(matches(want, name) for want in wanted for name in known)


# Types of modules that are weighted layers, those whose uses cannot be followed included.
HOLD_WEIGHTS = (
    *WEIGHTED_MODULES,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Bilinear,
    nn.MultiheadAttention,
)


@dataclass
class ParameterUse:
    """What a dry run sees of one parameter.

    Attributes:
        name: its name.
        module: the name of the module that it belongs to; with a parametrization of the one whose weight is computed
            from it. Its own name where it belongs to the model itself.
        home: that module.
        shared: the names of all modules that hold it.
        numbers: how many it has.
        trainable: whether it requires a gradient in the user's model.
        used: whether the outputs have a gradient by it.
        seen: whether calls of a layer were seen whose weight it is.
        layer: the layer with a posterior that it is the weight or the bias of.
        reason: why it has no posterior.
    """

    name: str
    module: str
    home: nn.Module
    shared: tuple[str, ...]
    numbers: int
    trainable: bool
    used: bool = False
    seen: bool = False
    layer: Layer | None = None
    reason: str | None = None

    @property
    def kind(self) -> str:
        """The type of its module."""
        return type(self.home).__name__

    def asked_by(self, selection: Selection, *names: str) -> bool:
        """Whether a selection takes it, which may ask for it by these names."""
        if callable(selection):
            return selection(self.module, self.home)
        wanted = wanted_names(selection)
        if wanted is not None:
            return asked_by_name(wanted, names)
        return selection in ("all", "everything") or (selection == "trainable" and self.trainable)

    def why_not_caught(self) -> str:
        """Why no use of a layer's weight was seen, and what to do about it."""
        if isinstance(self.home, nn.RNNBase):
            return (
                "its steps cannot be followed; call the module itself, with padded or packed sequences of several "
                "samples"
            )
        if ".parametrizations." in f".{self.name}":
            return (
                f"its weight is computed from '{self.name}' in every pass, and a posterior belongs on the weight "
                f"itself; torch.nn.utils.parametrize.remove_parametrizations makes it a parameter"
            )
        return f"its weight '{self.name}' is used in a way that cannot be caught"

    def why_certain(self, failures: Mapping[str, str], selection: Selection) -> str:
        """Why it has no posterior.

        Args:
            failures: reasons by the names of layers, or of parameters.
            selection: of the layers.
        """
        if not self.used:
            return "not used for the outputs, or without gradients (torch.no_grad, detach)"
        if not self.numbers:
            return "has no numbers"
        if failing := next((n for n in (self.module, self.name, *self.shared) if n in failures), None):
            return f"skipped: {failures[failing]}"
        if selection == "trainable" and not self.trainable:
            return "frozen (requires_grad=False)"
        if isinstance(self.home, WEIGHTED_MODULES):
            return "not among the chosen layers"
        return f"{self.kind} is kept deterministic"


class Reference:
    """Outputs and gradients of a probe batch by autograd alone, without any capture, and a table of the parameters.

    Attributes:
        model: the user's, which is not run.
        twin: the copy of it that is, also for what is compared with this run.
        probe: the batch.
        samples: in it.
        tolerance: by how much numbers may differ, relatively; None for that of their format.
        form: of the model and the batch, from `_form_of`.
        outputs: for the probe batch.
        pull: what was pulled back, in the shape of the outputs.
        total: gradients of all samples by parameter; None for one that is not used.
        last: those of the last sample.
        saving: a context for passes with gradients, in which what a model changes in place is saved before.
        parameters: of the model, by name.
        trainable: the names of those that require gradients in it.
        table: what is known of each of them, in their order.
        named: those of them that a selection asks for by their own names.
        find_uses: finds where the weights enter a pass, once.
    """

    find_uses: Callable[[], Uses]

    def __init__(self, model: nn.Module, probe: Batch, samples: int, tolerance: float | None) -> None:
        self.model, self.probe, self.samples, self.tolerance = model, probe, samples, tolerance
        self.twin = twin = replicate(model).requires_grad_(True)
        self.form = _form_of(twin, probe)
        self.parameters, holders = dict(twin.named_parameters()), owners(twin)
        self.trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        self.table, self.named = list[ParameterUse](), set[str]()
        for name, parameter in self.parameters.items():
            shared = tuple(holder for holder, _, _ in holders[id(parameter)])
            parent, parametrized, _ = f".{shared[0]}".rpartition(".parametrizations.")
            module = parent[1:] if parametrized else shared[0]
            home, numbers = twin.get_submodule(module), parameter.numel()
            self.table.append(
                ParameterUse(name, module or name, home, shared, numbers, name in self.trainable)
            )
        self.saving: Callable[[], AbstractContextManager[Any]] = nullcontext
        try:
            self._differentiate()
        except RuntimeError as error:
            if "Inference tensors cannot be saved" in str(error):
                raise PosthocUQError(
                    "A part of the model's forward pass runs under torch.inference_mode(), and no gradient can be "
                    "taken after it; let it run under torch.no_grad()."
                ) from error
            if "modified by an inplace operation" not in str(error):
                raise
            # The model changes the input of a frozen layer in place: fine for its user, who never asks for that
            # layer's gradient.
            self.saving = partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, lambda saved: saved)
            self._differentiate()
        for use in self.table:
            use.used = self.total[use.name] is not None

    def _differentiate(self) -> None:
        with torch.enable_grad(), self.saving():
            outputs = self.probe.copied().call(self.twin)
            if outputs.ndim == 0 or outputs.shape[0] != self.samples:
                raise PosthocUQError(
                    f"The model gives outputs of shape {tuple(outputs.shape)} for {self.samples} samples; the "
                    f"first dimension must "
                    f"count the samples."
                )
            if not bool(torch.isfinite(outputs).all()):
                raise NonFiniteError("Batch 0: the model's outputs are not finite.")
            if not outputs.requires_grad:
                raise PosthocUQError(
                    "No gradient leads from the model's outputs to its weights: its forward pass runs under "
                    "torch.no_grad() or torch.inference_mode(), detaches what it returns, or computes it outside of "
                    "torch; take that out of forward, and call the model under torch.no_grad() instead."
                )
            self.outputs, self.pull = outputs.detach(), _cotangent(outputs)
            last = torch.zeros_like(self.pull)
            last[-1] = self.pull[-1]
            weights = list(self.parameters.values())
            total = torch.autograd.grad(outputs, weights, self.pull, retain_graph=True, allow_unused=True)
            of_last = torch.autograd.grad(outputs, weights, last, allow_unused=True)
        self.total = dict(zip(self.parameters, total, strict=True))
        self.last = dict(zip(self.parameters, of_last, strict=True))

    def missed(
        self, reached: Collection[str], selection: Selection, zero: bool = False
    ) -> list[ParameterUse]:
        """The weights of layers that are asked for and have a gradient, or one that is `zero`, but are not among those
        reached; of the last ones all that are not.
        """
        if selection == "last":
            last = self.find_uses().last
            return [use for use in self.table if use.name in last and use.name not in reached]
        found = list[ParameterUse]()
        for use in self.table:
            gradient = self.total[use.name]
            if (
                gradient is not None
                and gradient.ndim > 1
                and (is_matrix(gradient) or use.name.endswith("weight"))
                and use.name not in reached
                and isinstance(use.home, HOLD_WEIGHTS)
                and use.asked_by(selection, use.module)
                and (zero or bool((gradient != 0).any()))
            ):
                found.append(use)
        return found

    def unseen(self, reached: Collection[str], selection: Selection) -> list[str]:
        """Parameters with a gradient that are asked for and not among those reached: those of weighted layers, or also
        the others where the selection is ``"everything"``, or ``"trainable"`` and they are, or has their name.
        """
        if isinstance(selection, Exactly):
            asked = selection.unseen
        elif selection == "trainable":
            asked = self.trainable
        elif selection == "everything":
            asked = {*self.parameters}
        else:
            # a branch that begins with a gain of 0 has no gradient yet
            asked = {use.name for use in self.missed(reached, selection, zero=True)}
            asked |= self.find_uses().factors if selection == "all" else set()
            asked |= {f"{use.module}.bias" for use in self.table if use.name in asked}
            asked |= self.named
        left = [(name, g) for name, g in self.total.items() if name in asked and name not in reached]
        return [name for name, gradient in left if gradient is not None and not gradient.is_sparse]


def _cotangent(outputs: Tensor) -> Tensor:
    """Fixed irregular numbers in the shape of the outputs; the same for every sample."""
    size = outputs[0].numel()
    row = torch.cos(1.0 + torch.arange(size, dtype=torch.float64, device="cpu") ** 2).to(outputs.dtype)
    return row.to(outputs.device).expand(outputs.shape[0], size).reshape(outputs.shape).clone()


PROBE_SAMPLES = 2
COMPANY = 64  # samples of the first batch beside which the probe's are run once more
_OF_ALL = "layers='everything' covers embeddings and all other parameters, too."
_OF_CALLS = (
    "This method follows weights that go as they are into torch.nn.functional.linear, a convolution or a product "
    "x @ weight; a Laplace method with layers='everything' covers all others, too."
)
_OF_NONE = "They are too large, or no way to their gradients was proved."
_ROUNDINGS = 32  # epsilons by which outputs may differ beside their relative tolerance
_UNIT_TOLERANCE = 1e-4
_COMPARED_ROWS = 4096  # of a gradient, at once
_NO_LAYER = "The model has no Linear or convolution layer, so there are no weights to fit a posterior over."
_TIED = "Embedding is kept deterministic; '{}' shares its weight and has a posterior of its own use"


@dataclass(frozen=True)
class Proof:
    """How a model uses the layers with a posterior, as a dry run proved it: later passes on inputs of the same form
    need no other one.

    Attributes:
        tracked: these layers, by name.
        complete: whether they are all that ``layers="all"`` takes.
        form: of the model and the inputs, from `_form_of`.
    """

    tracked: Mapping[str, TrackedLayer]
    complete: bool
    form: int

    def holds(self, twin: nn.Module, batch: Batch) -> bool:
        """Whether it is one of such a model, of which `twin` is a replica, and of such inputs, however many samples."""
        samples = count_samples(batch)
        return self.form == _form_of(twin, first_samples(batch, samples))


def _form_of(twin: nn.Module, probe: Batch) -> int:
    """A hash of all that decides how a model runs, beside numbers: its modules with their code, flags and hooks, the
    names and shapes of its parameters, the form of its inputs.
    """
    modules = tuple(
        (name, type(module), getattr_static(type(module), "forward", None), _plain(vars(module)))
        for name, module in twin.named_modules()
    )
    parameters = tuple((name, p.shape, p.dtype, p.device) for name, p in twin.named_parameters())
    return hash((modules, parameters, probe.form()))


def _plain(value: Any, depth: int = 4) -> Any:
    """What an attribute of a module is compared by: flags and functions, in tables and objects, too; of all else the
    type.
    """
    kind = type(value)
    if kind in _COMPARED or isinstance(value, (int, float, str)):
        return kind, value
    if kind in (FunctionType, MethodType):
        return getattr(value, "__func__", value)
    if depth and isinstance(value, dict):  # the keys of hooks count them
        table = cast(dict[Any, Any], value).items()
        return tuple((key if isinstance(key, str) else "", _plain(each, depth - 1)) for key, each in table)
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return kind, *(_plain(each, depth - 1) for each in cast(Collection[Any], value))
    if depth and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)):
        return kind, _plain(vars(value), depth - 1)
    return kind


_COMPARED = {type(None), bool, int, float, str, torch.dtype, torch.device}


@dataclass
class Prepared:
    """The layers that were asked for, a capture that was proved to catch their gradients, and what is left out.

    Attributes:
        model: the user's, or a replica in which the layers that share their weight with an embedding have one of
            their own.
        capture: ready to run.
        proof: for later passes of this model.
        layers: the layers that get a posterior, by name.
        table: what was seen of every parameter: its layer with a posterior, or the reason why it has none.
        outputs: of the model for one sample.
        in_unit: whether those for the first samples lie in [0, 1], as probabilities do.
        found: all layers that the model uses, chosen or not, in the order of their last calls.
        find_uses: as of `Reference`.
        warning: one sentence on the matrices of weights that were asked for and get no posterior, if there are any.
        cost: one on layers whose gradients are formed for each sample, where they were not asked for by name.
    """

    model: nn.Module
    capture: Capture
    proof: Proof
    layers: dict[str, Layer]
    table: Sequence[ParameterUse]
    outputs: int
    in_unit: bool
    found: Sequence[TrackedLayer]
    find_uses: Callable[[], Uses]
    warning: str | None = None
    cost: str | None = None

    @property
    def last(self) -> list[TrackedLayer]:
        """Of all layers those whose use no other follows on the way to the outputs, in the order of their calls; none
        where a weight that is used in no layer's call is among them.
        """
        names = self.find_uses().last
        last = [t for t in self.found if t.layer.rule.matrices and t.layer.weight in names]
        return last if len(last) == len(names) else []


@full_precision()
def prepare(
    model: nn.Module,
    batch: Batch,
    selection: Selection = "all",
    *,
    unsupported: str = "raise",
    autocast: bool = False,
    by_gradients: bool = True,
    independent: bool = False,
) -> Prepared:
    """Find and prove the layers of `model` that `selection` asks for, on the first samples of `batch`.

    Args:
        model: the user's model; copies of it are run.
        batch: its first samples are used.
        selection: of the layers.
        unsupported: ``"raise"`` an error for a layer whose gradient cannot be rebuilt, or ``"skip"`` it, if it was not
            asked for by its name or as the last one.
        autocast: whether the forward pass runs in mixed precision.
        by_gradients: whether parameters whose uses cannot be caught are taken by the gradients of each sample.
        independent: whether the outputs for a sample are known not to depend on the others, as of a model that was
            fitted; else that is checked.

    Raises:
        UnsupportedLayerError: a chosen layer's gradient cannot be rebuilt, and it may not be skipped, or no other layer
            is left; or outputs depend on other samples, or on chance.
        PosthocUQError: the selection names no weighted layer, or the model none at all.
    """
    samples = count_samples(batch)
    # of quantised modules, numbers are rounded by the largest of their batch
    rough = autocast or any("quantized" in type(module).__module__.split(".") for module in model.modules())
    reference = _reference(model, batch, samples, 0.1 if rough else None)
    if not independent:
        check_independent(reference, batch, samples)
    probe = reference.probe
    watched = WatchedPass(reference.twin, probe.copied())
    found, shown = layers_of(watched, autocast), watched.uses() if watched.complete else None
    del watched  # its graph
    find_uses = reference.find_uses = cache(lambda: shown or uses_of(model, probe))  # keeps no gradients
    discovered = [
        t
        for t in found
        if reference.total[t.layer.weight] is not None and reference.parameters[t.layer.weight].numel()
    ]
    if isinstance(selection, Exactly):
        discovered = [t for t in discovered if t.layer.weight not in selection.unseen]
        alone = selection.without_bias
    else:
        factors = reference.find_uses().factors if by_gradients else ()
        discovered = [t for t in discovered if t.layer.weight not in factors]
        alone, wanted = set[str](), wanted_names(selection)
        if by_gradients and (wanted or selection == "trainable"):  # a method that trains takes a layer whole
            if wanted:
                reference.named = named_parameters_of(wanted, discovered, reference.parameters)
            taken = reference.named if wanted else reference.trainable
            alone = {
                t.layer.weight
                for t in discovered
                if t.layer.weight in taken
                and t.layer.bias not in taken
                and not asked_by_name(wanted or (), t.names)
            }
    discovered = [t.without_bias() if t.layer.weight in alone else t for t in discovered]
    if selection == "trainable" and not reference.trainable:
        raise PosthocUQError(
            "No parameter of the model requires gradients, so layers='trainable' takes none; set requires_grad for "
            "those that were trained, or choose other layers."
        )
    chosen = select(discovered, selection, reference, by_gradients)
    if tied := [t for t in chosen if t.embeddings]:
        own = with_separate_embedding_weight(model, [t.own_weight for t in tied])
        del reference, discovered, chosen  # gradients as large as a vocabulary's weights
        prepared = prepare(
            own,
            batch,
            selection,
            unsupported=unsupported,
            autocast=autocast,
            by_gradients=by_gradients,
            independent=True,
        )
        reasons = {f"{t.embeddings[0]}.weight": _TIED.format(t.layer.name) for t in tied}
        for use in prepared.table:
            if use.layer is None:
                use.reason = reasons.get(use.name, use.reason)
        return prepared
    capture, broken = _caught(reference, discovered, chosen, selection, by_gradients)
    layers = {name: tracked.layer for name, tracked in capture.tracked.items()}
    weights = {t.layer.weight for t in discovered}
    of_layers = {name: layer for layer in layers.values() for name in layer.parameter_names}
    for use in reference.table:
        use.seen, use.layer = use.name in weights, of_layers.get(use.name)
    reached = {use.name for use in reference.table if use.seen or use.layer}
    failures = {use.module: use.why_not_caught() for use in reference.missed(reached, selection)}
    for use in reference.table:
        if use.name in reference.named and use.used and use.layer is None:
            failures[use.name] = use.why_not_caught()
    failures |= {t.layer.name: why_not_rebuilt(t.layer.weight, t.holders, t.both_ways) for t in broken}
    # A parameter in a matrix product may be anything; its module's type, its ties or its name make it a layer.
    unnamed = selection in ("all", "everything", "trainable") or callable(selection)
    undecided = {t.layer.name for t in broken if unnamed and _may_be_no_layer(t)}
    errors = {name: reason for name, reason in failures.items() if name not in undecided}
    listed = "; ".join(f"'{name}': {reason}" for name, reason in errors.items())
    if errors and (unsupported == "raise" or not unnamed or not layers):
        advice = ""
        if not unnamed:
            advice = " layers='all' leaves out what cannot have a posterior."
        elif layers:
            advice = " Pass unsupported='skip' to leave them deterministic."
        raise UnsupportedLayerError(f"Unsupported layers: {listed}.{advice}")
    if not layers:
        raise PosthocUQError("No weighted layer is left to fit a posterior over.")
    for use in reference.table:
        use.reason = None if use.layer else use.why_certain(failures, selection)
    several = selection in ("everything", "trainable")
    others = _OF_CALLS if not by_gradients else _OF_NONE if several else _OF_ALL
    asked = (
        [] if callable(selection) else [u for u in reference.table if u.asked_by(selection, u.module, u.name)]
    )
    warning = without_posterior([use for use in asked if use.used], reference.parameters, others)
    if errors:
        name, reason = next(iter(errors.items()))
        more = (
            f" Nor: {', '.join(map(repr, list(errors)[1:]))}; the report says why." if len(errors) > 1 else ""
        )
        warning = f"{warning or 'Some weights get no posterior.'} Not caught: '{name}': {reason}.{more}"
    formed = [layer for layer in layers.values() if layer.rule.by_gradients]
    cost = None
    if formed and wanted_names(selection) is None and not isinstance(selection, Exactly):
        passes = _passes_with_gradients(reference, capture, batch, samples, formed)
        cost = cost_of_gradients(formed, sum(use.numbers for use in reference.table), passes)
    tracked = {name: replace(t, module=None) for name, t in capture.tracked.items()}
    proof = Proof(tracked, selection == "all" and by_gradients, reference.form)
    return Prepared(
        model,
        capture,
        proof,
        layers,
        reference.table,
        reference.pull[0].numel(),
        in_unit_interval(reference.outputs),
        found,
        find_uses,
        warning,
        cost,
    )


def in_unit_interval(outputs: Tensor) -> bool:
    """Whether all outputs lie in [0, 1], up to rounding."""
    values = outputs.detach().float()
    return bool(((values >= 0) & (values <= 1 + _UNIT_TOLERANCE)).all())


def _passes_with_gradients(
    reference: Reference, capture: Capture, batch: Batch, samples: int, formed: Sequence[Layer]
) -> float:
    """How many plain passes, forward and backward, take as long as one with the gradients of each sample: measured on
    as much of the first batch as memory takes at once, in seconds of this process alone, whatever else runs.
    """
    fitting = max(1, TEMPORARY_BYTES // (4 * max(1, numbers_of(formed))))
    if not batch.whole and fitting < samples:
        batch, samples = batch.narrow(0, fitting, samples), fitting
    twin, seconds = reference.twin, list[float]()
    pull = torch.empty(0, device="cpu")
    for _ in range(2):  # the first one sets memory up
        begun = time.process_time()
        with torch.enable_grad(), reference.saving():
            outputs = batch.copied().call(twin)
            pull = _cotangent(outputs)
            torch.autograd.grad(outputs, list(twin.parameters()), pull, allow_unused=True)
        seconds.append(time.process_time() - begun)
    begun = time.process_time()
    capture.run(batch, samples).pull_back(pull, lambda _: None, last=True)
    return (time.process_time() - begun) / max(min(seconds), 1e-6)


def _may_be_no_layer(tracked: TrackedLayer) -> bool:
    """Whether the weight is only a factor of matrix products, in a module that is no layer by its type or ties."""
    return tracked.product and len(tracked.holders) < 2 and not isinstance(tracked.module, HOLD_WEIGHTS)


def select(
    discovered: list[TrackedLayer], selection: Selection, reference: Reference, by_gradients: bool
) -> list[TrackedLayer]:
    """The layers that the user asked for, in the order of their calls: all, the last, by name, prefix or pattern, or by
    predicate; other parameters may be asked for by their names if `by_gradients`.

    Raises:
        PosthocUQError: the selection names no weighted layer, or the model has none at all.
    """
    names = wanted_names(selection)
    of_any_kind = selection in ("everything", "trainable") or isinstance(selection, Exactly) or names
    able = discovered if of_any_kind else [t for t in discovered if t.layer.rule.matrices]
    if not (able or (by_gradients and (of_any_kind or reference.find_uses().factors))) and not any(
        isinstance(module, WEIGHTED_MODULES) for module in reference.model.modules()
    ):
        raise PosthocUQError(_NO_LAYER)
    if callable(selection):
        return [t for t in able if t.module is not None and selection(t.layer.name, t.module)]
    if selection == "trainable":
        return [t for t in able if t.layer.weight in reference.trainable]
    if selection == "last":
        return [t for t in able if t.layer.weight in reference.find_uses().last]
    if names is None:
        return able
    for name in names:
        known = any(asked_by_name([name], t.names) or name in t.alone for t in discovered)
        known = known or any(fnmatchcase(parameter, name) for parameter in reference.named)
        matrices = {t.layer.weight for t in discovered if t.layer.rule.matrices}
        known = known or (by_gradients and name not in matrices and reference.total.get(name) is not None)
        sharing = next((t for t in discovered if asked_by_name([name], t.embeddings)), None)
        if not known and sharing is not None:
            raise UnsupportedLayerError(
                f"'{name}' is an embedding, and stays certain; '{sharing.layer.name}', which shares its weight, "
                f"can have a posterior: layers=['{sharing.layer.name}']."
            )
        if not known and not reference.missed((), [name]):
            known_names = [t.layer.name for t in discovered]
            parameters = reference.parameters if by_gradients else ()
            raise PosthocUQError(
                f"There is no weighted layer '{name}' in the forward pass; there are {known_names[:5]}"
                f"{', ...' if len(known_names) > 5 else ''}."
                f"{did_you_mean(name, [*known_names, *LAYER_WORDS, *parameters])}"
            )
    return [
        t
        for t in discovered
        if (asked_by_name(names, t.names) if t.layer.rule.matrices else t.layer.name in names)
        or any(name in t.alone for name in names)
        or t.layer.weight in reference.named
    ]


def _reference(model: nn.Module, batch: Batch, samples: int, tolerance: float | None) -> Reference:
    """Autograd's results for the samples to prove the layers on.

    At least two samples: one alone would not show which dimension of a layer's input counts the samples.
    """
    if batch.whole:
        return Reference(model, batch, 1, tolerance)
    probe = first_samples(batch, samples)
    try:
        return Reference(model, probe, PROBE_SAMPLES, tolerance)
    except PosthocUQError:
        raise
    except Exception as error:
        refer = partial(Reference, model, probe, PROBE_SAMPLES, tolerance)
        if samples == 1:  # the model takes one sample at a time, or fails with it too
            check_refused(error, refer, lambda: Reference(model, batch, 1, tolerance))
            return Reference(model, batch, 1, tolerance)
        check_refused(
            error, refer, lambda: _run(replicate(model), batch)
        )  # the model takes the whole batch alone, or fails, too
        raise UnsupportedLayerError(
            f"The model runs on the first batch of {samples} samples, and not on {PROBE_SAMPLES} of them "
            f"({in_one_line(error)}): its batch size is fixed, as by x.view({samples}, ...) in its forward pass. A fit "
            f"and predictions need any number of samples; write x.shape[0] or -1 there."
        ) from error


def first_samples(batch: Batch, samples: int) -> Batch:
    """Those that a dry run takes of a batch: two, or one twice; all where they cannot be cut."""
    if batch.whole:
        return batch
    return batch.repeated(PROBE_SAMPLES) if samples == 1 else batch.narrow(0, PROBE_SAMPLES, samples)


def _run(twin: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return batch.copied().call(twin)


def check_independent(reference: Reference, batch: Batch, samples: int) -> None:
    """Refuse a model whose outputs for a sample depend on the other samples of its batch, or on chance: what a fit
    finds and predictions say would then depend on the batches. Each sample is run once by itself, and all of them once
    among more: some models change samples only in a larger batch (capacities of experts), or when they differ.

    Args:
        reference: of several samples.
        batch: whose first samples these are.
        samples: in that batch.

    Raises:
        UnsupportedLayerError: it does, with the cause as far as that is known.
    """
    twin, probe, number = reference.twin, reference.probe, reference.samples
    if probe.whole or number < PROBE_SAMPLES:
        return
    company = None  # where the model cannot run more samples, the fit itself says so better
    if samples > number:
        company = _if_taken(twin, batch.narrow(0, min(samples, COMPANY), samples), probe)
    limits = _rounding(reference)
    for place, (expected, limit) in enumerate(zip(reference.outputs, limits, strict=True)):
        others = [_alone(twin, probe, place, number)]
        if company is not None and company.ndim and len(company) >= number:
            others.append(company[place])
        changes = [
            float(torch.linalg.vector_norm(other.reshape(-1) - expected.reshape(-1)))
            for other in others
            if other is not None and other.numel() == expected.numel()
        ]
        if all(change <= limit for change in changes):
            continue
        again = (_run(twin, probe) - reference.outputs).reshape(number, -1)
        if bool((torch.linalg.vector_norm(again, dim=1).cpu() > torch.tensor(limits, device="cpu")).any()):
            raise UnsupportedLayerError(
                "The model's outputs for the same inputs differ from run to run, also in eval mode: dropout or noise "
                "is never off, as F.dropout(x, p, training=True) or torch.randn in its forward pass, or it keeps "
                "something of a run. A posterior belongs to one function; write training=self.training there, and add "
                "noise in training mode alone."
            )
        raise UnsupportedLayerError(
            f"The model's outputs for one sample depend on the other samples of its batch: {_by_batch(twin)} A fit "
            f"and its predictions would depend on how the data are cut into batches."
        )


def _alone(twin: nn.Module, probe: Batch, place: int, samples: int) -> Tensor | None:
    """The outputs for one sample of a batch, run without the others; None where the model takes no such batch."""
    first = probe.narrow(place, 1, samples)
    outputs = _if_taken(twin, first, probe)
    if outputs is None:  # some models take no batch of one sample, and squeeze its dimension
        outputs = _if_taken(twin, first.repeated(3), probe)
        return outputs[0] if outputs is not None and outputs.ndim and len(outputs) == 3 else None
    return outputs


def _if_taken(twin: nn.Module, batch: Batch, probe: Batch) -> Tensor | None:
    """The outputs for a batch; None where the model takes the probe, and not this one."""
    try:
        return _run(twin, batch)
    except Exception as error:  # of the user's code or data
        check_refused(error, lambda: _run(twin, batch), lambda: _run(twin, probe))
        return None


def _rounding(reference: Reference) -> list[float]:
    """By how much the outputs of each sample of the probe may differ because numbers are rounded.

    A rounding of every weight by a relative epsilon changes the outputs by at most epsilon times the sum of weights
    times gradients, which is much where the outputs are small differences of large numbers.
    """
    outputs, sums = reference.outputs, 0.0
    relative = reference.tolerance or {torch.float64: 1e-6, torch.float32: 2e-3}.get(outputs.dtype, 0.1)
    for name, gradient in reference.last.items():
        if gradient is not None:
            weight_norm = float(torch.linalg.vector_norm(reference.parameters[name].detach()))
            sums += weight_norm * float(torch.linalg.vector_norm(gradient.to_dense()))
    roundings = torch.finfo(outputs.dtype).eps * sums / float(torch.linalg.vector_norm(reference.pull[-1]))
    norms = torch.linalg.vector_norm(outputs.reshape(len(outputs), -1), dim=1).tolist()
    return [
        relative * norm + (_ROUNDINGS if outputs.dtype.itemsize >= 4 else 1) * roundings for norm in norms
    ]


def _by_batch(model: nn.Module) -> str:
    """By what outputs depend on the batch, as far as modules tell, and the way out."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:  # pyright: ignore
            return (
                f"'{name}' ({type(module).__name__}) has no running statistics and takes those of the batch; make it "
                f"with track_running_stats=True, and run the training data through it once in training mode."
            )
    return (
        "as statistics of the batch, attention or recurrence along the samples (batch_first=False), or a maximum over "
        "all of them make them; let each sample go its own way, or give what belongs together as one sample."
    )


def _caught(
    reference: Reference,
    discovered: list[TrackedLayer],
    chosen: list[TrackedLayer],
    selection: Selection,
    by_gradients: bool,
) -> tuple[Capture, list[TrackedLayer]]:
    """A proved capture of the chosen layers and, if `by_gradients`, of the parameters whose uses nothing caught; and
    the layers that no route could serve.
    """
    if not by_gradients:
        return _proved_capture(reference, chosen)
    reached = {t.layer.weight for t in discovered if t.layer.rule.matrices}
    reached |= {name for t in chosen for name in t.layer.parameter_names}
    computed = _by_gradients(reference, reference.unseen(reached, selection))
    capture, broken = _proved_capture(reference, [*chosen, *computed])
    named = wanted_names(selection) is not None or selection in ("everything", "trainable")
    again = [t for t in broken if named or not _may_be_no_layer(t)]
    more = _by_gradients(reference, [name for t in again for name in t.layer.parameter_names])
    if not more:
        return capture, broken
    failing = {t.layer.name for t in broken}
    rest = [t for t in [*chosen, *computed] if t.layer.name not in failing]
    capture, _ = _proved_capture(reference, [*rest, *more])
    found = {t.layer.weight for t in more}
    return capture, [t for t in broken if t.layer.weight not in found]


def _proved_capture(reference: Reference, chosen: list[TrackedLayer]) -> tuple[Capture, list[TrackedLayer]]:
    """A proved capture of the chosen layers, which are in the order of their calls, and the layers that no engine could
    serve.
    """

    def attempt(layers: list[TrackedLayer]) -> tuple[Capture, set[str]]:
        capture = Capture(reference.model)
        capture.track(layers)
        return capture, _failing(capture, reference)

    # Nothing before the first layer needs a gradient, without which BackPACK hands over nothing.
    layers = [replace(t, engine="hooks") if t.engine == "backpack" else t for t in chosen[:1]] + chosen[1:]
    places = {use.name: place for place, use in enumerate(reference.table)}
    layers.sort(key=lambda t: places[t.layer.weight])
    try:
        capture, failing = attempt(layers)
    except UnsupportedLayerError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError) as error:
        # BackPACK cannot run some module after all: the interceptor serves every layer.
        mixed, layers = layers, [replace(t, engine="hooks") if t.engine == "backpack" else t for t in layers]
        check_refused(error, lambda: attempt(mixed), lambda: attempt(layers))
        capture, failing = attempt(layers)
    if failing:
        layers = [replace(t, engine="hooks") if t.layer.name in failing else t for t in layers]
        capture, failing = attempt(layers)
    for axis in BATCH_AXES[1:]:
        if not failing:
            break
        layers = [
            replace(t, batch_axis=axis) if t.layer.name in failing and not t.layer.convolutional else t
            for t in layers
        ]
        capture, failing = attempt(layers)
    broken = [t for t in layers if t.layer.name in failing]
    if broken:  # proved anew: without the first layer, another one is the first
        capture, more = _proved_capture(reference, [t for t in chosen if t.layer.name not in failing])
        broken += more
    return capture, sorted(broken, key=lambda t: t.layer.name)


def _by_gradients(reference: Reference, names: Sequence[str]) -> list[TrackedLayer]:
    """Parameters of which gradients are all that is known, each with a route that was proved to give them."""
    if not names:
        return []
    left, proved = Capture(reference.model).unseen(names), list[TrackedLayer]()
    single = reference.probe.whole or reference.samples == 1
    routes: tuple[Route, ...] = ("loop",) if single else ("vmap", "loop")
    for route in routes:
        if not left:
            break
        capture = Capture(reference.model)
        capture.track([replace(t, engine=route) for t in left])
        try:
            failing = _failing(capture, reference)
        except Exception as error:  # the model's code decides what vmap makes of it
            if out_of_memory(error):
                raise
            continue
        proved += [t for name, t in capture.tracked.items() if name not in failing]
        left = [t for t in left if t.layer.name in failing]
    return proved


def _failing(capture: Capture, reference: Reference) -> set[str]:
    """Layers whose caught pairs do not rebuild autograd's gradients."""
    failing = set(capture.tracked)
    recording = capture.run(reference.probe, reference.samples)

    def compare(layer_gradients: LayerGradients) -> None:
        layer = layer_gradients.layer
        dtype = torch.promote_types(torch.float32, recording.outputs.dtype)
        try:
            gradients, activations = layer_gradients.gradients(dtype), layer_gradients.activations(dtype)
        except UnsupportedLayerError:
            return
        tracked = capture.tracked[layer.name]
        tracked.several = layer_gradients.several(activations)
        if not layer.rule.by_gradients and gradients[-1].numel() == reference.pull[-1].numel():
            arrived, sent = gradients[-1].flatten().sort()[0], reference.pull[-1].flatten().sort()[0]
            tracked.ends = torch.allclose(
                arrived, sent.to(arrived)
            )  # in whatever order of classes and positions
        per_sample = activations.gradients(gradients, CPU_TEMPORARY)
        # Terms may cancel in the sum, but rounding is relative to the terms.
        terms_bound = float(torch.linalg.vector_norm(gradients)) * _norm_bound(layer_gradients)
        if not _agrees(layer, per_sample[-1], reference.last, terms_bound, reference.tolerance):
            return
        of_batch = per_sample[0]
        for of_sample in per_sample[1:]:  # in place: a vocabulary's gradient is large
            of_batch += of_sample
        if _agrees(layer, of_batch, reference.total, terms_bound, reference.tolerance):
            failing.discard(layer.name)

    recording.pull_back(reference.pull, compare, last=True)
    for name in list(failing):  # a layer that the backward pass does not reach has no gradient to miss
        layer = capture.tracked[name].layer
        if all(reference.total[p] is None for p in layer.parameter_names):
            failing.discard(name)
    return failing


def _norm_bound(of_layer: LayerGradients) -> float:
    """An upper bound of the norm of all activations: an input is in at most ``prod(kernel)`` patches."""
    layer, squares, ones = of_layer.layer, 0.0, 0
    for call in of_layer.calls:
        assert call.output_gradient is not None
        squares += layer.rule.input_norm(call.input.detach()) ** 2
        ones += call.output_gradient.numel() // layer.outputs
    return (prod(layer.kernel) * squares + ones * (layer.bias is not None)) ** 0.5


def _agrees(
    layer: Layer,
    rebuilt: Tensor,
    truth: Mapping[str, Tensor | None],
    terms_bound: float,
    tolerance: float | None,
) -> bool:
    if rebuilt.dtype == torch.float64:
        relative, absolute = 1e-6, 1e-12
    else:
        relative, absolute = 2e-3, 1e-6
    relative, absolute = tolerance or relative, absolute * terms_bound
    weight = truth[layer.weight]
    bias = truth[layer.bias] if layer.bias is not None else None
    if weight is None or (layer.bias is not None and bias is None):
        return False
    # a sparse one is an embedding's with `sparse=True`
    expected = layer.to_matrix(weight.to_dense(), bias).to(rebuilt)
    parts = zip(rebuilt.split(_COMPARED_ROWS, -2), expected.split(_COMPARED_ROWS, -2), strict=True)
    error = torch.stack([torch.linalg.vector_norm(one - other) for one, other in parts]).norm()
    return bool(error <= relative * torch.linalg.vector_norm(expected) + absolute)
