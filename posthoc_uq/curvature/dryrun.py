"""The dry run: find the weighted layers on a few samples, and prove that what is caught is their whole
gradient.

For every layer the caught pairs must rebuild autograd's own gradient, of the batch and of one sample alone:
``sum_t g_st a_st^T`` to rounding. A layer that fails is named, never silently missed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posthoc_uq.arguments import NAMED, described, whole_mapping
from posthoc_uq.curvature.capture import Capture, TrackedLayer, owners
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.curvature.operands import CPU_TEMPORARY
from posthoc_uq.curvature.reference import HOLD_WEIGHTS, Reference
from posthoc_uq.curvature.selection import Selection, asked_by_name, no_such_layer, wanted_names
from posthoc_uq.curvature.uncovered import why_not_rebuilt, without_posterior
from posthoc_uq.errors import PosthocUQError, UnsupportedLayerError
from posthoc_uq.layers import BATCH_AXES, WEIGHTED_MODULES, Layer
from posthoc_uq.loaders import Batch
from posthoc_uq.replica import parameter_names

PROBE_SAMPLES = 2


@dataclass
class Prepared:
    """The layers that were asked for, a capture of their gradients that has proved itself, and what is left out.

    Attributes:
        capture: ready to run; it catches nothing where no proof was asked for.
        layers: those that get a posterior, by name.
        deterministic: parameters without a posterior, each with the reason.
        outputs: of the model for one sample.
        warning: one sentence on the matrices of weights that were asked for and get no posterior, if there are any.
    """

    capture: Capture
    layers: dict[str, Layer]
    deterministic: dict[str, str]
    outputs: int
    warning: str | None = None


def prepare(
    model: nn.Module,
    batch: Batch,
    selection: Selection = "all",
    *,
    unsupported: str = "raise",
    autocast: bool = False,
    prove: bool = True,
) -> Prepared:
    """Find and prove the layers of `model` that `selection` asks for, on the first samples of `batch`.

    Args:
        model: the user's; copies of it are run.
        batch: whose first samples are used.
        selection: of the layers.
        unsupported: ``"raise"`` an error for a layer whose gradient cannot be rebuilt, or ``"skip"`` it.
        autocast: whether the forward pass runs in mixed precision.
        prove: whether gradients are caught at all. Without it a layer whose weight meets a product of matrices in code
            of the user's own is left out: only its gradient would tell what it is.

    Raises:
        UnsupportedLayerError: a chosen layer's gradient cannot be rebuilt, and `unsupported` is not ``"skip"``.
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
    if prove:
        capture, broken = _settle(model, probe, chosen, reference, 0.1 if autocast else None)
        layers = {name: tracked.layer for name, tracked in capture.tracked.items()}
    else:
        capture, broken = Capture(model), [t for t in chosen if _is_loose(t)]
        layers = {t.layer.name: t.layer for t in chosen if not _is_loose(t)}
    failures |= {t.layer.name: why_not_rebuilt(t.layer.weight, t.holders, t.turned) for t in broken}
    # A parameter that meets a product may be anything; only its module's type, its ties or its name make it a layer.
    loose = {t.layer.name for t in broken if _is_loose(t) and (selection == "all" or callable(selection))}
    errors = {name: why for name, why in failures.items() if name not in loose}
    if errors and unsupported == "raise":
        listed = "; ".join(f"'{name}': {why}" for name, why in errors.items())
        raise UnsupportedLayerError(
            f"Unsupported layers: {listed}. Pass unsupported='skip' to leave them deterministic."
        )
    if not layers:
        raise PosthocUQError("No weighted layer is left to fit a posterior over.")
    covered = {name for layer in layers.values() for name in layer.parameter_names}
    warning = without_posterior(reference.parameters, reference.asked_for(selection), covered)
    deterministic = reference.deterministic(covered, failures)
    return Prepared(capture, layers, deterministic, reference.pull[0].numel(), warning)


def _is_loose(tracked: TrackedLayer) -> bool:
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


def select(found: list[TrackedLayer], selection: Selection, reference: Reference) -> list[TrackedLayer]:
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


def _probe(model: nn.Module, batch: Batch, samples: int) -> tuple[Batch, Reference]:
    """The samples to prove the layers on, and what autograd says of them.

    Two at least: one alone would not show which dimension of a layer's input counts the samples.
    """
    if samples == 1:
        two = batch.doubled()
        try:
            return two, Reference(model, two, 2)
        except PosthocUQError:
            raise
        except Exception:  # the model takes one sample at a time, or fails again below
            return batch, Reference(model, batch, 1)
    probe = batch.narrow(0, min(samples, PROBE_SAMPLES), samples)
    return probe, Reference(model, probe, min(samples, PROBE_SAMPLES))


def _settle(
    model: nn.Module, probe: Batch, chosen: list[TrackedLayer], reference: Reference, tolerance: float | None
) -> tuple[Capture, list[TrackedLayer]]:
    """A capture of the chosen layers that is proved, and the layers that no engine could serve."""

    def attempt(layers: list[TrackedLayer]) -> tuple[Capture, set[str]]:
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


def _failing(capture: Capture, probe: Batch, reference: Reference, tolerance: float | None) -> set[str]:
    """Layers whose caught pairs do not rebuild autograd's gradients."""
    failing = set(capture.tracked)
    recording = capture.run(probe, reference.samples)

    def compare(caught: LayerGradients) -> None:
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
