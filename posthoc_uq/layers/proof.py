"""The dry run: finds the weighted layers on two samples and checks the caught gradients against autograd.

For every layer the caught pairs must rebuild autograd's gradient, of the batch and of one sample alone, up to rounding:
``sum_t g_st a_st^T``. A layer that fails is named, never silently missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import accumulate
from math import prod
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import NAMED, Batch, described, whole_mapping
from posthoc_uq.core.devices import TEMPORARY_BYTES, full_precision
from posthoc_uq.core.errors import (
    NonFiniteError,
    PosthocUQError,
    UnsupportedLayerError,
    check_refused,
    in_one_line,
    out_of_memory,
)
from posthoc_uq.core.model import owners, parameter_names, replicate, with_separate_embedding_weight
from posthoc_uq.core.options import did_you_mean, shown
from posthoc_uq.layers.capture import Capture, TrackedLayer
from posthoc_uq.layers.frozen import form_of_inputs
from posthoc_uq.layers.layer import BATCH_AXES, Layer
from posthoc_uq.layers.operands import CPU_TEMPORARY
from posthoc_uq.layers.rules import WEIGHTED_MODULES, LayerGradients
from posthoc_uq.layers.sample_gradients import Route, is_matrix, numbers_of
from posthoc_uq.layers.uses import Uses, uses_of

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
    parameters: Mapping[str, Tensor], kinds: Mapping[str, str], covered: Collection[str], others: str
) -> str | None:
    """A message on the used weight matrices without a posterior, with their share of all weights; None if there are
    none.

    Args:
        parameters: all parameters of the model, by name.
        kinds: parameters that were used in the forward pass and asked for, with the type of their module.
        covered: parameters with a posterior.
        others: a sentence on how they could have one.
    """
    matrices = {name for name, p in parameters.items() if sum(size > 1 for size in p.shape) >= 2}
    numbers = {name: p.numel() for name, p in parameters.items() if p.is_floating_point()}
    missing = [name for name in kinds if name in matrices & numbers.keys() and name not in covered]
    if not missing:
        return None

    def share(*names: str) -> str:
        part, total = sum(numbers[name] for name in names), sum(numbers.values())
        return _percent(part / total)

    missing.sort(key=lambda name: -numbers[name])
    shown = [f"'{name}' ({kinds[name]}, {share(name)})" for name in missing[:_MAX_NAMED]]
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return (
        f"Weights without a posterior, {share(*missing)} of all weights: {', '.join(shown)}{more}. Predictions take "
        f"them for certain. {others} Choosing layers by layers=[...] leaves out what is not to have one."
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
or shell patterns, or a function."""

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


class Reference:
    """Outputs and gradients of a probe batch by autograd alone, without any capture.

    Attributes:
        samples: of the probe batch.
        form: of the model and the batch, from `_form_of`.
        outputs: for the probe batch.
        pull: what was pulled back, in the shape of the outputs.
        total: gradients of all samples by parameter; None for one that is not used.
        last: those of the last sample.
        find_uses: finds where the weights enter a pass, by one more pass, once.
        trainable: the parameters that require gradients in the model.
        seconds: of the processor, that one forward and two backward passes took.
    """

    def __init__(self, model: nn.Module, probe: Batch, samples: int) -> None:
        self.samples = samples
        self.find_uses = cache(partial(uses_of, model, probe))
        self.trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        twin = replicate(model).requires_grad_(True)
        self.form = _form_of(twin, probe)
        self.names = parameter_names(twin)
        self.order = {name: index for index, name in enumerate(self.names.values())}
        self.parameters = dict(twin.named_parameters())
        self._owners = owners(twin)
        modules = dict(twin.named_modules())
        # by parameter, the module that it belongs to; with a parametrization the one whose weight is computed from it
        self._home: dict[str, tuple[str, nn.Module]] = {}
        for name, parameter in self.parameters.items():
            holder, _, module = self._owners[id(parameter)][0]
            parent, parametrized, _ = f".{holder}".rpartition(".parametrizations.")
            self._home[name] = (parent[1:], modules[parent[1:]]) if parametrized else (holder, module)
        try:
            self._differentiate(twin, probe)
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
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
                self._differentiate(twin, probe)

    def _differentiate(self, twin: nn.Module, probe: Batch) -> None:
        begun = time.process_time()  # of this process alone, whatever else runs
        samples, parameters = self.samples, list(twin.parameters())
        with torch.enable_grad():
            outputs = probe.copied().call(twin)
            if outputs.ndim == 0 or outputs.shape[0] != samples:
                raise PosthocUQError(
                    f"The model gives outputs of shape {tuple(outputs.shape)} for {samples} samples; the "
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
            self.outputs = outputs.detach()
            self.pull = self.cotangent(outputs)
            last = torch.zeros_like(self.pull)
            last[-1] = self.pull[-1]
            self.total = self._gradients(outputs, parameters, self.pull, retain=True)
            self.last = self._gradients(outputs, parameters, last, retain=False)
        self.seconds = time.process_time() - begun

    @staticmethod
    def cotangent(outputs: Tensor) -> Tensor:
        """Fixed irregular numbers in the shape of the outputs; the same for every sample."""
        size = outputs[0].numel()
        row = torch.cos(1.0 + torch.arange(size, dtype=torch.float64, device="cpu") ** 2).to(outputs.dtype)
        return row.to(outputs.device).expand(outputs.shape[0], size).reshape(outputs.shape).clone()

    def _gradients(
        self, outputs: Tensor, parameters: Sequence[Tensor], pull: Tensor, retain: bool
    ) -> dict[str, Tensor | None]:
        gradients = torch.autograd.grad(outputs, parameters, pull, retain_graph=retain, allow_unused=True)
        return {self.names[id(p)]: g for p, g in zip(parameters, gradients, strict=True)}

    def why_not_caught(self, parameter: str) -> str:
        """Why no use of a layer's weight was seen, and what to do about it."""
        module = self._home[parameter][1]
        if isinstance(module, nn.RNNBase):
            return (
                "its steps cannot be followed; call the module itself, with padded or packed sequences of several "
                "samples"
            )
        if ".parametrizations." in f".{parameter}":
            return (
                f"its weight is computed from '{parameter}' in every pass, and a posterior belongs on the weight "
                f"itself; torch.nn.utils.parametrize.remove_parametrizations makes it a parameter"
            )
        return f"its weight '{parameter}' is used in a way that cannot be caught"

    def missed(self, reached: Collection[str] = (), zero: bool = False) -> list[tuple[str, str]]:
        """The weights that have a gradient, or one that is `zero`, but are not among those seen in use, each after its
        module's name.
        """
        found: list[tuple[str, str]] = []
        for name, gradient in self.total.items():
            module_name, module = self._home[name]
            if (
                gradient is None
                or gradient.ndim < 2
                or not (is_matrix(gradient) or name.endswith("weight"))
                or name in reached
                or not isinstance(module, HOLD_WEIGHTS)
            ):
                continue
            if zero or bool((gradient != 0).any()):
                found.append((module_name or name, name))
        return found

    def missed_weights(
        self, reached: set[str], selection: Selection, zero: bool = False
    ) -> list[tuple[str, str]]:
        """Those of `missed` that are asked for; of the last ones all that are not seen."""
        missed = self.missed(reached, zero)
        if selection in ("all", "everything"):
            return missed
        if selection == "trainable":
            return [(module, name) for module, name in missed if name in self.trainable]
        if selection == "last":
            last = sorted(self.find_uses().last.difference(reached), key=self.order.__getitem__)
            return [(self._home[name][0] or name, name) for name in last]
        if callable(selection):
            return [(module, name) for module, name in missed if selection(module, self._home[name][1])]
        names = wanted_names(selection) or []
        return [(module, name) for module, name in missed if asked_by_name(names, [module])]

    def unseen(self, reached: Collection[str], selection: Selection) -> list[str]:
        """Parameters with a gradient that are asked for and not among those seen in use: those of weighted layers, or
        also the others where the selection is ``"everything"``, or ``"trainable"`` and they are, or has their name.
        """
        # a branch that begins with a gain of 0 has no gradient yet
        of_layers = {name for _, name in self.missed_weights({*reached}, selection, zero=True)}
        of_layers |= self.find_uses().factors if selection == "all" else set()
        modules = {self._home[name][0] for name in of_layers}
        names = wanted_names(selection) or []
        found: list[str] = []
        for name, gradient in self.total.items():
            if gradient is None or name in reached or gradient.is_sparse:
                continue
            module_name = self._home[name][0]
            if isinstance(selection, Exactly):
                own = name in selection.unseen
            elif selection == "trainable":
                own = name in self.trainable
            else:
                own = name in of_layers or selection == "everything" or name in names
                own = own or (name == f"{module_name}.bias" and module_name in modules)
            if own:
                found.append(name)
        return found

    def asked_for(self, selection: Selection) -> dict[str, str]:
        """The used parameters that the selection covers (for ``"all"`` and names), with the types of their modules."""
        wanted = wanted_names(selection)
        kinds: dict[str, str] = {}
        for name, gradient in self.total.items():
            module_name, module = self._home[name]
            every = selection in ("all", "everything") or (
                selection == "trainable" and name in self.trainable
            )
            selected = every if wanted is None else asked_by_name(wanted, [module_name, name])
            if selected and gradient is not None:
                kinds[name] = type(module).__name__
        return kinds

    def deterministic(
        self, covered: set[str], failures: dict[str, str], selection: Selection
    ) -> dict[str, str]:
        """Every parameter without a posterior, with the reason."""
        reasons: dict[str, str] = {}
        for name, gradient in self.total.items():
            if name in covered:
                continue
            module_name, module = self._home[name]
            holders = [holder for holder, _, _ in self._owners[id(self.parameters[name])]]
            if gradient is None:
                reasons[name] = _UNUSED
            elif not gradient.numel():
                reasons[name] = "has no numbers"
            elif failing := next((n for n in (module_name, name, *holders) if n in failures), None):
                reasons[name] = f"skipped: {failures[failing]}"
            elif selection == "trainable" and name not in self.trainable:
                reasons[name] = "frozen (requires_grad=False)"
            elif isinstance(module, WEIGHTED_MODULES):
                reasons[name] = "not among the chosen layers"
            else:
                reasons[name] = f"{type(module).__name__} is kept deterministic"
        return reasons


PROBE_SAMPLES = 2
COMPANY = 64  # samples of the first batch beside which the probe's are run once more
_OF_ALL = "layers='everything' covers embeddings and all other parameters, too."
_OF_CALLS = (
    "This method follows weights that go as they are into torch.nn.functional.linear, a convolution or a product "
    "x @ weight; a Laplace method with layers='everything' covers all others, too."
)
_OF_NONE = "They are too large, or no way to their gradients was proved."
_UNUSED = "not used for the outputs, or without gradients (torch.no_grad, detach)"
_ROUNDINGS = 32  # epsilons by which outputs may differ beside their relative tolerance
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
        return self.form == _form_of(twin, _first_samples(batch, samples))


def _form_of(twin: nn.Module, probe: Batch) -> int:
    """A hash of all that decides how a model runs, beside numbers: its modules with their code, flags and hooks, the
    names and shapes of its parameters, the form of its inputs.
    """
    modules = tuple(
        (name, type(module), type(module).forward, _plain(vars(module)))
        for name, module in twin.named_modules()
    )
    parameters = tuple((name, p.shape, p.dtype, p.device) for name, p in twin.named_parameters())
    return hash((modules, parameters, form_of_inputs(probe)))


def _plain(value: Any, depth: int = 4) -> Any:
    """What an attribute of a module is compared by: flags and functions, in tables and objects, too; of all else the
    type.
    """
    function = getattr(value, "__func__", value)
    if isinstance(function, FunctionType):
        return function
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value
    if depth and isinstance(value, Mapping):  # the keys of hooks count them
        table = cast(Mapping[Any, Any], value).items()
        return tuple((key if isinstance(key, str) else "", _plain(each, depth - 1)) for key, each in table)
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return type(value), *(_plain(each, depth - 1) for each in cast(Collection[Any], value))
    if depth and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)):
        return type(value), _plain(vars(value), depth - 1)
    return type(value)


@dataclass
class Prepared:
    """The layers that were asked for, a capture that was proved to catch their gradients, and what is left out.

    Attributes:
        model: the user's, or a replica in which the layers that share their weight with an embedding have one of
            their own.
        capture: ready to run.
        proof: for later passes of this model.
        layers: the layers that get a posterior, by name.
        deterministic: parameters without a posterior, each with the reason.
        outputs: of the model for one sample.
        found: all layers that the model uses, chosen or not, in the order of their last calls.
        find_uses: as of `Reference`.
        warning: one sentence on the matrices of weights that were asked for and get no posterior, if there are any.
        cost: one on layers whose gradients are formed for each sample, where they were not asked for by name.
    """

    model: nn.Module
    capture: Capture
    proof: Proof
    layers: dict[str, Layer]
    deterministic: dict[str, str]
    outputs: int
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
    probe, reference = _probe(model, batch, samples)
    tolerance = 0.1 if autocast else None
    if not independent:
        check_independent(model, probe, reference, tolerance, batch, samples)
    found = Capture(model).discover(probe, autocast)
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
        frozen = selection == "trainable" and by_gradients  # a method that trains takes a layer whole
        alone = {t.layer.weight for t in discovered if frozen and t.layer.bias not in reference.trainable}
    discovered = [t.without_bias() if t.layer.weight in alone else t for t in discovered]
    if selection == "trainable" and not reference.trainable:
        raise PosthocUQError(
            "No parameter of the model requires gradients, so layers='trainable' takes none; set requires_grad for "
            "those that were trained, or choose other layers."
        )
    several = selection in ("everything", "trainable")
    of_any_kind = by_gradients and (several or wanted_names(selection) is not None)
    weighted = possible(discovered, selection) or (by_gradients and reference.find_uses().factors)
    if not (of_any_kind or weighted) and not any(
        isinstance(module, WEIGHTED_MODULES) for module in model.modules()
    ):
        raise PosthocUQError(_NO_LAYER)
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
        prepared.deterministic |= {
            f"{t.embeddings[0]}.weight": _TIED.format(t.layer.name)
            for t in tied
            if t.embeddings[0] not in prepared.layers
        }
        return prepared
    failures = dict[str, str]()
    capture, broken = _caught(model, probe, discovered, chosen, selection, reference, tolerance, by_gradients)
    layers = {name: tracked.layer for name, tracked in capture.tracked.items()}
    covered = {name for layer in layers.values() for name in layer.parameter_names}
    for name, parameter_name in reference.missed_weights(
        {t.layer.weight for t in discovered} | covered, selection
    ):
        failures[name] = reference.why_not_caught(parameter_name)
    for name in wanted_names(selection) or []:
        if by_gradients and reference.total.get(name) is not None and name not in covered:
            failures[name] = reference.why_not_caught(name)
    failures |= {t.layer.name: why_not_rebuilt(t.layer.weight, t.holders, t.both_ways) for t in broken}
    # A parameter in a matrix product may be anything; its module's type, its ties or its name make it a layer.
    unnamed = selection in ("all", "everything", "trainable") or callable(selection)
    undecided = {t.layer.name for t in broken if unnamed and _may_be_no_layer(t)}
    errors = {name: reason for name, reason in failures.items() if name not in undecided}
    listed = "; ".join(f"'{name}': {reason}" for name, reason in errors.items())
    if errors and (unsupported == "raise" or not unnamed or not layers):
        advice = ""
        if not unnamed:
            advice = " layers='all', the default, leaves out what cannot have a posterior."
        elif layers:
            advice = " Pass unsupported='skip' to leave them deterministic."
        raise UnsupportedLayerError(f"Unsupported layers: {listed}.{advice}")
    if not layers:
        raise PosthocUQError("No weighted layer is left to fit a posterior over.")
    others = _OF_CALLS if not by_gradients else _OF_NONE if several else _OF_ALL
    warning = without_posterior(reference.parameters, reference.asked_for(selection), covered, others)
    if errors:
        name, reason = next(iter(errors.items()))
        more = (
            f" Nor: {', '.join(map(repr, list(errors)[1:]))}; the report says why." if len(errors) > 1 else ""
        )
        warning = f"{warning or 'Some weights get no posterior.'} Not caught: '{name}': {reason}.{more}"
    deterministic = reference.deterministic(covered, failures, selection)
    formed = [layer for layer in layers.values() if layer.rule.by_gradients]
    cost = None
    if formed and wanted_names(selection) is None and not isinstance(selection, Exactly):
        weights = sum(p.numel() for p in reference.parameters.values())
        cost = cost_of_gradients(
            formed, weights, _passes_with_gradients(model, capture, batch, samples, formed)
        )
    outputs, find_uses = reference.pull[0].numel(), reference.find_uses
    tracked = {name: replace(t, module=None) for name, t in capture.tracked.items()}
    proof = Proof(tracked, selection == "all" and by_gradients, reference.form)
    return Prepared(model, capture, proof, layers, deterministic, outputs, found, find_uses, warning, cost)


def _passes_with_gradients(
    model: nn.Module, capture: Capture, batch: Batch, samples: int, formed: Sequence[Layer]
) -> float:
    """How many plain passes, forward and backward, take as long as one with the gradients of each sample: measured on
    as much of the first batch as memory takes at once.
    """
    fitting = max(1, TEMPORARY_BYTES // (4 * max(1, numbers_of(formed))))
    if not batch.whole and fitting < samples:
        batch, samples = batch.narrow(0, fitting, samples), fitting
    plain = Reference(model, batch, samples)
    seconds = min(plain.seconds, Reference(model, batch, samples).seconds)  # the first one sets memory up
    begun = time.process_time()
    capture.run(batch, samples).pull_back(plain.pull, lambda _: None, last=True)
    return (time.process_time() - begun) / max(seconds * 2 / 3, 1e-6)


def _may_be_no_layer(tracked: TrackedLayer) -> bool:
    """Whether the weight is only a factor of matrix products, in a module that is no layer by its type or ties."""
    return tracked.product and len(tracked.holders) < 2 and not isinstance(tracked.module, HOLD_WEIGHTS)


def count_samples(batch: Batch) -> int:
    """Samples in a batch: the first dimension of its first input tensor.

    Raises:
        PosthocUQError: there is no such tensor, or it is empty.
    """
    for tensor in batch.tensors():
        if tensor.ndim > 0 and tensor.shape[0] > 0:
            return tensor.shape[0]
    makes = (
        "torch.as_tensor(x) makes a tensor of an array or a list, torch.stack(x) one of tensors of one shape"
    )
    if whole_mapping(batch):
        raise PosthocUQError(f"The model was given a mapping as its argument. {NAMED}")
    advice = "" if batch.tensors() else f"; {makes}"
    raise PosthocUQError(
        f"A batch needs an input tensor with at least one sample along its first dimension, and holds "
        f"{described(batch)}{advice}."
    )


def possible(discovered: list[TrackedLayer], selection: Selection) -> list[TrackedLayer]:
    """Those that a selection may take: layers whose weights are matrices, or all of them where it says so."""
    words = selection in ("everything", "trainable")
    whatever = words or isinstance(selection, Exactly) or wanted_names(selection)
    return discovered if whatever else [t for t in discovered if t.layer.rule.matrices]


def select(
    discovered: list[TrackedLayer], selection: Selection, reference: Reference, by_gradients: bool
) -> list[TrackedLayer]:
    """The layers that the user asked for: all, the last, by name, prefix or pattern, or by predicate; other parameters
    may be asked for by their names if `by_gradients`.
    """
    able = possible(discovered, selection)
    if callable(selection):
        chosen = [t for t in able if t.module is not None and selection(t.layer.name, t.module)]
    elif selection in ("all", "everything"):
        chosen = able
    elif selection == "trainable":
        chosen = [t for t in able if t.layer.weight in reference.trainable]
    elif selection == "last":
        chosen = [t for t in able if t.layer.weight in reference.find_uses().last]
    else:
        names = wanted_names(selection) or []
        for name in names:
            known = any(asked_by_name([name], t.names) or name in t.alone for t in discovered)
            matrices = {t.layer.weight for t in discovered if t.layer.rule.matrices}
            known = known or (by_gradients and name not in matrices and reference.total.get(name) is not None)
            sharing = next((t for t in discovered if asked_by_name([name], t.embeddings)), None)
            if not known and sharing is not None:
                raise UnsupportedLayerError(
                    f"'{name}' is an embedding, and stays certain; '{sharing.layer.name}', which shares its weight, "
                    f"can have a posterior: layers=['{sharing.layer.name}']."
                )
            if not known and not any(asked_by_name([name], [module]) for module, _ in reference.missed()):
                known_names = [t.layer.name for t in discovered]
                raise PosthocUQError(
                    f"There is no weighted layer '{name}' in the forward pass; there are {known_names[:5]}"
                    f"{', ...' if len(known_names) > 5 else ''}.{did_you_mean(name, [*known_names, *LAYER_WORDS])}"
                )
        chosen = [
            t
            for t in discovered
            if (asked_by_name(names, t.names) if t.layer.rule.matrices else t.layer.name in names)
            or any(name in t.alone for name in names)
        ]
    return sorted(chosen, key=lambda t: reference.order[t.layer.weight])


def _probe(model: nn.Module, batch: Batch, samples: int) -> tuple[Batch, Reference]:
    """The samples to prove the layers on, and autograd's results for them.

    At least two samples: one alone would not show which dimension of a layer's input counts the samples.
    """
    if batch.whole:
        return batch, Reference(model, batch, 1)
    if samples == 1:
        two = _first_samples(batch, samples)
        try:
            return two, Reference(model, two, 2)
        except PosthocUQError:
            raise
        except Exception as error:  # the model takes one sample at a time, or fails with it too
            check_refused(error, lambda: Reference(model, two, 2), lambda: Reference(model, batch, 1))
            return batch, Reference(model, batch, 1)
    probe = _first_samples(batch, samples)

    def refer() -> Reference:
        return Reference(model, probe, PROBE_SAMPLES)

    try:
        return probe, refer()
    except PosthocUQError:
        raise
    except Exception as error:  # the model takes the whole batch alone, or fails with it too
        check_refused(error, refer, lambda: _run(model, batch))
        raise UnsupportedLayerError(
            f"The model runs on the first batch of {samples} samples, and not on {PROBE_SAMPLES} of them "
            f"({in_one_line(error)}): its batch size is fixed, as by x.view({samples}, ...) in its forward pass. A fit "
            f"and predictions need any number of samples; write x.shape[0] or -1 there."
        ) from error


def _first_samples(batch: Batch, samples: int) -> Batch:
    """Those that a dry run takes of a batch: two, or one twice; all where they cannot be cut."""
    if batch.whole:
        return batch
    return batch.repeated(PROBE_SAMPLES) if samples == 1 else batch.narrow(0, PROBE_SAMPLES, samples)


def _run(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return batch.copied().call(replicate(model))


def check_independent(
    model: nn.Module, probe: Batch, reference: Reference, tolerance: float | None, batch: Batch, samples: int
) -> None:
    """Refuse a model whose outputs for a sample depend on the other samples of its batch, or on chance: what a fit
    finds and predictions say would then depend on the batches. Each sample is run once by itself, and all of them once
    among more: some models change samples only in a larger batch (capacities of experts), or when they differ.

    Args:
        model: copies of it are run.
        probe: several samples.
        reference: of these.
        tolerance: of the outputs, relative; None for that of their number format.
        batch: whose first samples these are.
        samples: in that batch.

    Raises:
        UnsupportedLayerError: it does, with the cause as far as that is known.
    """
    if probe.whole or reference.samples < PROBE_SAMPLES:
        return
    limits, several = _rounding(reference, tolerance), _among(model, batch, samples, probe, reference)
    for place, (expected, limit) in enumerate(zip(reference.outputs, limits, strict=True)):
        others = [_alone(model, probe, place, reference.samples), None if several is None else several[place]]
        changes = [
            float(torch.linalg.vector_norm(other.reshape(-1) - expected.reshape(-1)))
            for other in others
            if other is not None and other.numel() == expected.numel()
        ]
        if all(change <= limit for change in changes):
            continue
        change = _run(model, probe) - reference.outputs
        if bool((_norms(change) > torch.tensor(limits, device="cpu")).any()):
            raise UnsupportedLayerError(
                "The model's outputs for the same inputs differ from run to run, also in eval mode: dropout or noise "
                "is never off, as F.dropout(x, p, training=True) or torch.randn in its forward pass, or it keeps "
                "something of a run. A posterior belongs to one function; write training=self.training there, and add "
                "noise in training mode alone."
            )
        raise UnsupportedLayerError(
            f"The model's outputs for one sample depend on the other samples of its batch: {_by_batch(model)} A fit "
            f"and its predictions would depend on how the data are cut into batches."
        )


def _alone(model: nn.Module, probe: Batch, place: int, samples: int) -> Tensor | None:
    """The outputs for one sample of a batch, run without the others; None where the model takes no such batch."""
    first = probe.narrow(place, 1, samples)
    for copies in (1, 3):  # some models take no batch of one sample, and squeeze its dimension
        outputs = _if_taken(model, first if copies == 1 else first.repeated(copies), probe)
        if outputs is not None and copies == 1:
            return outputs
        if outputs is not None and outputs.ndim and outputs.shape[0] == copies:
            return outputs[0]
    return None


def _if_taken(model: nn.Module, batch: Batch, probe: Batch) -> Tensor | None:
    """The outputs for a batch; None where the model takes the probe, and not this one."""

    def run() -> Tensor:
        return _run(model, batch)

    try:
        return run()
    except Exception as error:  # of the user's code or data
        check_refused(error, run, lambda: _run(model, probe))
        return None


def _among(model: nn.Module, batch: Batch, samples: int, probe: Batch, reference: Reference) -> Tensor | None:
    """The outputs for the samples of the probe, run among more of the first batch; None where there are no more, or
    where the model cannot run them, which the fit itself says better.
    """
    if samples <= reference.samples:
        return None
    outputs = _if_taken(model, batch.narrow(0, min(samples, COMPANY), samples), probe)
    if outputs is None or outputs.ndim == 0 or len(outputs) < reference.samples:
        return None
    return outputs[: reference.samples]


def _rounding(reference: Reference, tolerance: float | None) -> list[float]:
    """By how much the outputs of each sample of the probe may differ because numbers are rounded.

    A rounding of every weight by a relative epsilon changes the outputs by at most epsilon times the sum of weights
    times gradients, which is much where the outputs are small differences of large numbers.
    """
    dtype = reference.outputs.dtype
    relative = tolerance or {torch.float64: 1e-6, torch.float32: 2e-3}.get(dtype, 0.1)
    sums = sum(
        float(torch.linalg.vector_norm(reference.parameters[name].detach()))
        * float(torch.linalg.vector_norm(g.to_dense()))
        for name, g in reference.last.items()
        if g is not None
    )
    roundings = torch.finfo(dtype).eps * sums / float(torch.linalg.vector_norm(reference.pull[-1]))
    norms = _norms(reference.outputs).tolist()
    return [relative * norm + (_ROUNDINGS if dtype.itemsize >= 4 else 1) * roundings for norm in norms]


def _norms(outputs: Tensor) -> Tensor:
    """Of each sample's outputs, on the CPU."""
    return torch.linalg.vector_norm(outputs.reshape(len(outputs), -1), dim=1).cpu()


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
    model: nn.Module,
    probe: Batch,
    discovered: list[TrackedLayer],
    chosen: list[TrackedLayer],
    selection: Selection,
    reference: Reference,
    tolerance: float | None,
    by_gradients: bool,
) -> tuple[Capture, list[TrackedLayer]]:
    """A proved capture of the chosen layers and, if `by_gradients`, of the parameters whose uses nothing caught; and
    the layers that no route could serve.
    """
    if not by_gradients:
        return _proved_capture(model, probe, chosen, reference, tolerance)
    seen = {t.layer.weight for t in discovered if t.layer.rule.matrices}
    seen |= {name for t in chosen for name in t.layer.parameter_names}
    computed = _by_gradients(model, probe, reference.unseen(seen, selection), reference, tolerance)
    capture, broken = _proved_capture(model, probe, [*chosen, *computed], reference, tolerance)
    named = wanted_names(selection) is not None or selection in ("everything", "trainable")
    again = [t for t in broken if named or not _may_be_no_layer(t)]
    names = [name for t in again for name in t.layer.parameter_names]
    more = _by_gradients(model, probe, names, reference, tolerance)
    if not more:
        return capture, broken
    failing = {t.layer.name for t in broken}
    caught = [t for t in [*chosen, *computed] if t.layer.name not in failing]
    capture, _ = _proved_capture(model, probe, [*caught, *more], reference, tolerance)
    found = {t.layer.weight for t in more}
    return capture, [t for t in broken if t.layer.weight not in found]


def _proved_capture(
    model: nn.Module, probe: Batch, chosen: list[TrackedLayer], reference: Reference, tolerance: float | None
) -> tuple[Capture, list[TrackedLayer]]:
    """A proved capture of the chosen layers, and the layers that no engine could serve."""

    def attempt(layers: list[TrackedLayer]) -> tuple[Capture, set[str]]:
        capture = Capture(model)
        capture.track(layers)
        return capture, _failing(capture, probe, reference, tolerance)

    layers = chosen = sorted(chosen, key=lambda t: reference.order[t.layer.weight])
    try:
        capture, failing = attempt(layers)
    except UnsupportedLayerError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError) as error:
        # BackPACK cannot run some module after all: the interceptor serves every layer.
        layers = [replace(t, engine="hooks") if t.engine == "backpack" else t for t in layers]
        check_refused(error, lambda: attempt(chosen), lambda: attempt(layers))
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
    broken = sorted((t for t in layers if t.layer.name in failing), key=lambda t: t.layer.name)
    if broken:
        capture, _ = attempt([t for t in layers if t.layer.name not in failing])
    return capture, broken


def _by_gradients(
    model: nn.Module, probe: Batch, names: Sequence[str], reference: Reference, tolerance: float | None
) -> list[TrackedLayer]:
    """Parameters of which gradients are all that is known, each with a route that was proved to give them."""
    left, proved = Capture(model).unseen(names) if names else [], list[TrackedLayer]()
    routes: tuple[Route, ...] = ("loop",) if probe.whole or reference.samples == 1 else ("vmap", "loop")
    for route in routes:
        if not left:
            break
        capture = Capture(model)
        capture.track([replace(t, engine=route) for t in left])
        try:
            failing = _failing(capture, probe, reference, tolerance)
        except Exception as error:  # the model's code decides what vmap makes of it
            if out_of_memory(error):
                raise
            continue
        proved += [t for name, t in capture.tracked.items() if name not in failing]
        left = [t for t in left if t.layer.name in failing]
    return proved


def _failing(capture: Capture, probe: Batch, reference: Reference, tolerance: float | None) -> set[str]:
    """Layers whose caught pairs do not rebuild autograd's gradients."""
    failing = set(capture.tracked)
    recording = capture.run(probe, reference.samples)

    def compare(layer_gradients: LayerGradients) -> None:
        layer = layer_gradients.layer
        dtype = torch.promote_types(torch.float32, recording.outputs.dtype)
        try:
            activations, gradients = layer_gradients.operands(dtype)
        except UnsupportedLayerError:
            return
        capture.tracked[layer.name].several = layer_gradients.several(activations)
        per_sample = activations.gradients(gradients, CPU_TEMPORARY)
        # Terms may cancel in the sum, but rounding is relative to the terms.
        terms_bound = float(torch.linalg.vector_norm(gradients)) * _norm_bound(layer_gradients)
        if not _agrees(layer, per_sample[-1], reference.last, terms_bound, tolerance):
            return
        of_batch = per_sample[0]
        for of_sample in per_sample[1:]:  # in place: a vocabulary's gradient is large
            of_batch += of_sample
        if _agrees(layer, of_batch, reference.total, terms_bound, tolerance):
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
    truth: dict[str, Tensor | None],
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
