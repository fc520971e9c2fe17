"""The dry run: find the weighted layers on a few samples, and prove that what is caught is their whole
gradient.

For every layer the caught pairs must rebuild autograd's own gradient, of the batch and of one sample alone:
``sum_t g_st a_st^T`` to rounding. A layer that fails is named, never silently missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posthoc_uq.arguments import described
from posthoc_uq.curvature.capture import Capture, Owner, Tracked, owners
from posthoc_uq.curvature.caught import Caught
from posthoc_uq.curvature.operands import CPU_TEMPORARY
from posthoc_uq.curvature.selection import Selection, asked_by_name, no_such_layer, wanted_names
from posthoc_uq.curvature.uncovered import home_of, why_not_caught, why_not_rebuilt, without_posterior
from posthoc_uq.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError
from posthoc_uq.layers import BATCH_AXES, WEIGHTED_MODULES, Layer
from posthoc_uq.loaders import Batch
from posthoc_uq.replica import parameter_names, replicate

PROBE_SAMPLES = 2
_HOLD_WEIGHTS = (
    *WEIGHTED_MODULES,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Bilinear,
    nn.MultiheadAttention,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass
class Prepared:
    """A capture that has proved itself, and what it leaves out.

    Attributes:
        capture: ready to run.
        deterministic: parameters without a posterior, each with the reason.
        outputs: of the model for one sample.
        warning: one sentence on the matrices of weights that were asked for and get no posterior, if there are any.
    """

    capture: Capture
    deterministic: dict[str, str]
    outputs: int
    warning: str | None = None

    @property
    def layers(self) -> dict[str, Layer]:
        """The tracked layers by name."""
        return {name: tracked.layer for name, tracked in self.capture.tracked.items()}


def prepare(
    model: nn.Module,
    batch: Batch,
    selection: Selection = "all",
    *,
    unsupported: str = "raise",
    autocast: bool = False,
) -> Prepared:
    """Find and prove the layers of `model` that `selection` asks for, on the first samples of `batch`.

    Raises:
        UnsupportedLayerError: a chosen layer's gradient cannot be rebuilt, and `unsupported` is not
            ``"skip"``.
        PosthocUQError: the selection names no weighted layer, or the model none at all.
    """
    if unsupported not in ("raise", "skip"):
        raise PosthocUQError(f"unsupported must be 'raise' or 'skip', not {unsupported!r}.")
    samples = count_samples(batch)
    probe, reference = _probe(model, batch, samples)
    found = Capture(model).discover(probe, autocast)
    if not found and not any(isinstance(module, WEIGHTED_MODULES) for module in model.modules()):
        raise PosthocUQError(
            "The model has no Linear or convolution layer, so there are no weights to fit a posterior over."
        )
    chosen = select(found, selection, reference)
    failures: dict[str, str] = {}
    names = {t.layer.weight for t in found}
    for name, parameter_name in reference.missed_weights(names, selection):
        failures[name] = reference.why_not_caught(parameter_name)
    capture, broken = _settle(model, probe, chosen, reference, 0.1 if autocast else None)
    failures |= {t.layer.name: why_not_rebuilt(t.layer.weight, t.holders) for t in broken}
    # A parameter that meets a product may be anything; only its module's type, its ties or its name make it a layer.
    loose = {t.layer.name for t in broken if _is_loose(t) and (selection == "all" or callable(selection))}
    errors = {name: why for name, why in failures.items() if name not in loose}
    if errors and unsupported == "raise":
        listed = "; ".join(f"'{name}': {why}" for name, why in errors.items())
        raise UnsupportedLayerError(
            f"Unsupported layers: {listed}. Pass unsupported='skip' to leave them deterministic."
        )
    if not capture.tracked:
        raise PosthocUQError("No weighted layer is left to fit a posterior over.")
    covered = {name for t in capture.tracked.values() for name in t.layer.parameter_names}
    warning = without_posterior(reference.parameters, reference.asked_for(selection), covered)
    return Prepared(capture, reference.deterministic(covered, failures), reference.pull[0].numel(), warning)


def _is_loose(tracked: Tracked) -> bool:
    return tracked.product and len(tracked.holders) < 2 and not isinstance(tracked.module, _HOLD_WEIGHTS)


def count_samples(batch: Batch) -> int:
    """Samples in a batch: the first dimension of its first input tensor.

    Raises:
        PosthocUQError: there is no such tensor, or it is empty.
    """
    for tensor in batch.tensors():
        if tensor.ndim > 0 and tensor.shape[0] > 0:
            return tensor.shape[0]
    advice = "" if batch.tensors() else "; torch.as_tensor(x) makes a tensor of an array or a list"
    raise PosthocUQError(
        f"A batch needs an input tensor with at least one sample along its first dimension, and holds "
        f"{described(batch)}{advice}."
    )


def select(found: list[Tracked], selection: Selection, reference: _Reference) -> list[Tracked]:
    """The layers that the user asked for: all, the last, by name, prefix or pattern, or by predicate."""
    if callable(selection):
        chosen = [t for t in found if t.module is not None and selection(t.layer.name, t.module)]
    elif selection == "all":
        chosen = found
    elif selection == "last":
        chosen = found[-1:]
    else:
        wanted = wanted_names(selection) or []
        for want in wanted:
            known = any(asked_by_name([want], t.names) for t in found)
            if not known and not reference.holds_missed(want):
                raise no_such_layer(want, [t.layer.name for t in found])
        chosen = [t for t in found if asked_by_name(wanted, t.names)]
    return sorted(chosen, key=lambda t: reference.order[t.layer.weight])


def _probe(model: nn.Module, batch: Batch, samples: int) -> tuple[Batch, _Reference]:
    """The samples to prove the layers on, and what autograd says of them.

    Two at least: one alone would not show which dimension of a layer's input counts the samples.
    """
    if samples == 1:
        two = batch.doubled()
        try:
            return two, _Reference(model, two, 2)
        except PosthocUQError:
            raise
        except Exception:  # the model takes one sample at a time, or fails again below
            return batch, _Reference(model, batch, 1)
    probe = batch.narrow(0, min(samples, PROBE_SAMPLES), samples)
    return probe, _Reference(model, probe, min(samples, PROBE_SAMPLES))


class _Reference:
    """What autograd says: outputs and gradients of a probe batch, computed without any capture."""

    def __init__(self, model: nn.Module, probe: Batch, samples: int) -> None:
        self.samples = samples
        twin = replicate(model).requires_grad_(True)
        self.names = parameter_names(twin)
        self.order = {name: index for index, name in enumerate(self.names.values())}
        self.parameters = dict(twin.named_parameters())
        self._owners = owners(twin)
        self._modules = dict(twin.named_modules())
        try:
            self._differentiate(twin, probe)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            # The model changes the input of a frozen layer: fine for its user, who never asks for that
            # layer's gradient.
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
                self._differentiate(twin, probe)

    def _differentiate(self, twin: nn.Module, probe: Batch) -> None:
        samples, parameters = self.samples, list(twin.parameters())
        with torch.enable_grad():
            outputs = probe.call(twin)
            if outputs.ndim == 0 or outputs.shape[0] != samples:
                raise PosthocUQError(
                    f"The model gives outputs of shape {tuple(outputs.shape)} for {samples} samples; the "
                    f"first dimension must "
                    f"count the samples."
                )
            if not bool(torch.isfinite(outputs).all()):
                raise NonFiniteError("Batch 0: the model's outputs are not finite.")
            self.pull = self.cotangent(outputs)
            last = torch.zeros_like(self.pull)
            last[-1] = self.pull[-1]
            self.total = self._gradients(outputs, parameters, self.pull, retain=True)
            self.last = self._gradients(outputs, parameters, last, retain=False)

    @staticmethod
    def cotangent(outputs: Tensor) -> Tensor:
        """Fixed numbers without structure, shaped like the outputs; the same for every sample."""
        size = outputs[0].numel()
        row = torch.cos(1.0 + torch.arange(size, dtype=torch.float64, device="cpu") ** 2).to(outputs.dtype)
        return row.to(outputs.device).expand(outputs.shape[0], size).reshape(outputs.shape).clone()

    def _gradients(
        self, outputs: Tensor, parameters: Sequence[Tensor], pull: Tensor, retain: bool
    ) -> dict[str, Tensor | None]:
        found = torch.autograd.grad(outputs, parameters, pull, retain_graph=retain, allow_unused=True)
        return {self.names[id(p)]: g for p, g in zip(parameters, found, strict=True)}

    def _owner(self, parameter: str) -> Owner:
        return self._owners[id(self.parameters[parameter])][0]

    def _home(self, parameter: str) -> tuple[str, nn.Module]:
        return home_of(self._owner(parameter), self._modules)

    def _names_of(self, parameter: str) -> list[str]:
        """The modules that hold a parameter."""
        return [name for name, _, _ in self._owners[id(self.parameters[parameter])]]

    def why_not_caught(self, parameter: str) -> str:
        """See `uncovered.why_not_caught`."""
        return why_not_caught(parameter, self._owner(parameter), self._modules)

    def _used(self, name: str) -> bool:
        gradient = self.total[name]
        return gradient is not None and bool((gradient != 0).any())

    def _missed(self, caught: set[str]) -> list[tuple[str, str]]:
        missed: list[tuple[str, str]] = []
        for name, gradient in self.total.items():
            module_name, module = self._home(name)
            if (
                gradient is None
                or gradient.ndim < 2
                or name in caught
                or not isinstance(module, _HOLD_WEIGHTS)
            ):
                continue
            if self._used(name):
                missed.append((module_name or name, name))
        return missed

    def missed_weights(self, caught: set[str], selection: Selection) -> list[tuple[str, str]]:
        """Modules that hold weights which have a gradient but were not seen in use, among those asked for."""
        missed = self._missed(caught)
        if selection == "all":
            return missed
        if selection == "last":  # one that comes after all that was caught would be it
            end = max((self.order[name] for name in caught), default=-1)
            return [
                (module, name)
                for module, name in missed
                if self.order[name] > end and isinstance(self._home(name)[1], WEIGHTED_MODULES)
            ]
        if callable(selection):
            return [(module, name) for module, name in missed if selection(module, self._home(name)[1])]
        wanted = wanted_names(selection) or []
        return [(module, name) for module, name in missed if asked_by_name(wanted, [module])]

    def holds_missed(self, want: str) -> bool:
        """Whether a module of that name, prefix or pattern holds weights that no use was seen of."""
        return any(asked_by_name([want], [module]) for module, _ in self._missed(set()))

    def asked_for(self, selection: Selection) -> dict[str, str]:
        """Parameters that took part and that all layers, or the names given, cover; with their module's type."""
        wanted = wanted_names(selection)
        found: dict[str, str] = {}
        for name, gradient in self.total.items():
            module_name, module = self._home(name)
            asked = selection == "all" if wanted is None else asked_by_name(wanted, [module_name, name])
            if asked and gradient is not None:
                found[name] = type(module).__name__
        return found

    def deterministic(self, covered: set[str], failures: dict[str, str]) -> dict[str, str]:
        """Every parameter without a posterior, with the reason."""
        reasons: dict[str, str] = {}
        for name, gradient in self.total.items():
            if name in covered:
                continue
            module_name, module = self._home(name)
            if gradient is None:
                reasons[name] = "not used in the forward pass"
            elif failing := next(
                (n for n in (module_name, name, *self._names_of(name)) if n in failures), None
            ):
                reasons[name] = f"skipped: {failures[failing]}"
            elif isinstance(module, WEIGHTED_MODULES):
                reasons[name] = "not among the chosen layers"
            else:
                reasons[name] = f"{type(module).__name__} is kept deterministic"
        return reasons


def _settle(
    model: nn.Module, probe: Batch, chosen: list[Tracked], reference: _Reference, tolerance: float | None
) -> tuple[Capture, list[Tracked]]:
    """A capture of the chosen layers that is proved, and the layers that no engine could serve."""

    def attempt(layers: list[Tracked]) -> tuple[Capture, set[str]]:
        capture = Capture(model)
        modules = dict(capture.twin.named_modules())
        owned = owners(capture.twin)
        by_weight = {name: owned[key][0] for key, name in parameter_names(capture.twin).items()}
        fresh = [replace(t, module=modules[by_weight[t.layer.weight][0]]) for t in layers]
        capture.track(fresh)
        return capture, _failing(capture, probe, reference, tolerance)

    layers = chosen
    try:
        capture, bad = attempt(layers)
    except UnsupportedLayerError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError):
        # BackPACK could not be run on some module after all: serve every layer by the interceptor.
        layers = [replace(t, engine="hooks") for t in layers]
        capture, bad = attempt(layers)
    if bad:
        layers = [replace(t, engine="hooks") if t.layer.name in bad else t for t in layers]
        capture, bad = attempt(layers)
    for axis in BATCH_AXES[1:]:
        if not bad:
            break
        layers = [
            replace(t, batch_axis=axis) if t.layer.name in bad and not t.layer.convolutional else t
            for t in layers
        ]
        capture, bad = attempt(layers)
    broken = sorted((t for t in layers if t.layer.name in bad), key=lambda t: t.layer.name)
    if broken:
        capture, _ = attempt([t for t in layers if t.layer.name not in bad])
    return capture, broken


def _failing(capture: Capture, probe: Batch, reference: _Reference, tolerance: float | None) -> set[str]:
    """Layers whose caught pairs do not rebuild autograd's gradients."""
    failing = set(capture.tracked)
    recording = capture.run(probe, reference.samples)

    def compare(caught: Caught) -> None:
        layer = caught.layer
        dtype = torch.promote_types(torch.float32, recording.outputs.dtype)
        try:
            activations, gradients = caught.operands(dtype)
        except UnsupportedLayerError:
            return
        per_sample = activations.gradients(gradients, CPU_TEMPORARY)
        whole, single = per_sample.sum(0), per_sample[-1]
        # Terms may cancel in the sum; rounding is relative to what was summed.
        summed = float(torch.linalg.vector_norm(gradients)) * caught.norm_bound()
        if _agrees(layer, whole, reference.total, summed, tolerance) and _agrees(
            layer, single, reference.last, summed, tolerance
        ):
            failing.discard(layer.name)

    recording.pull_back(reference.pull, compare, last=True)
    for name in list(failing):  # a layer that nothing pulled back to has no gradient to miss
        layer = capture.tracked[name].layer
        if all(reference.total[p] is None for p in layer.parameter_names):
            failing.discard(name)
    return failing


def _agrees(
    layer: Layer, rebuilt: Tensor, truth: dict[str, Tensor | None], summed: float, tolerance: float | None
) -> bool:
    if rebuilt.dtype == torch.float64:
        relative, absolute = 1e-6, 1e-12
    elif rebuilt.is_cuda:  # autograd's convolutions may round their factors to 10 bits there (TF32)
        relative, absolute = 1e-2, 2e-4
    else:
        relative, absolute = 2e-3, 1e-6
    relative, absolute = tolerance or relative, absolute * summed
    weight = truth[layer.weight]
    bias = truth[layer.bias] if layer.bias is not None else None
    if weight is None or (layer.bias is not None and bias is None):
        return False
    expected = layer.to_matrix(weight, bias).to(rebuilt)
    error = torch.linalg.vector_norm(rebuilt - expected)
    return bool(error <= relative * torch.linalg.vector_norm(expected) + absolute)
