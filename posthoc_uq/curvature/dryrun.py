"""The dry run: find the weighted layers on a few samples, and prove that their full gradients are layer_gradients.

For every layer the caught pairs must rebuild autograd's gradient, of the batch and of one sample alone, up to rounding:
``sum_t g_st a_st^T``. A layer that fails is named, never silently missed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posthoc_uq.arguments import NAMED, described, whole_mapping
from posthoc_uq.attempts import check_refused
from posthoc_uq.curvature.capture import Capture, TrackedLayer, owners
from posthoc_uq.curvature.layer_gradients import LayerGradients
from posthoc_uq.curvature.operands import CPU_TEMPORARY
from posthoc_uq.curvature.reference import HOLD_WEIGHTS, Reference
from posthoc_uq.curvature.selection import Selection, asked_by_name, no_such_layer, wanted_names
from posthoc_uq.curvature.uncovered import why_not_rebuilt, without_posterior
from posthoc_uq.errors import PosthocUQError, UnsupportedLayerError
from posthoc_uq.layers import BATCH_AXES, WEIGHTED_MODULES, Layer
from posthoc_uq.loaders import Batch
from posthoc_uq.replica import apart, parameter_names

PROBE_SAMPLES = 2
_NO_LAYER = "The model has no Linear or convolution layer, so there are no weights to fit a posterior over."
_TIED = "Embedding is kept deterministic; '{}' shares its weight and has a posterior of its own use"


@dataclass
class Prepared:
    """The layers that were asked for, a capture that was proved to catch their gradients, and what is left out.

    Attributes:
        model: the user's, or a replica in which the layers that share their weight with an embedding have one of
            their own.
        capture: ready to run; without a proof it catches nothing.
        layers: the layers that get a posterior, by name.
        deterministic: parameters without a posterior, each with the reason.
        outputs: of the model for one sample.
        warning: one sentence on the matrices of weights that were asked for and get no posterior, if there are any.
    """

    model: nn.Module
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
        model: the user's model; copies of it are run.
        batch: its first samples are used.
        selection: of the layers.
        unsupported: ``"raise"`` an error for a layer whose gradient cannot be rebuilt, or ``"skip"`` it.
        autocast: whether the forward pass runs in mixed precision.
        prove: whether gradients are caught at all. Without it a weight that is only used in matrix products of the
            user's own code is left out: without a gradient nothing shows that it is a layer.

    Raises:
        UnsupportedLayerError: a chosen layer's gradient cannot be rebuilt, and `unsupported` is not ``"skip"``.
        PosthocUQError: the selection names no weighted layer, or the model none at all.
    """
    if unsupported not in ("raise", "skip"):
        raise PosthocUQError(f"unsupported must be 'raise' or 'skip', not {unsupported!r}.")
    samples = count_samples(batch)
    probe, reference = _probe(model, batch, samples)
    discovered = Capture(model).discover(probe, autocast)
    if not discovered and not any(isinstance(module, WEIGHTED_MODULES) for module in model.modules()):
        raise PosthocUQError(_NO_LAYER)
    chosen = select(discovered, selection, reference)
    if tied := [t for t in chosen if t.embeddings]:
        own = apart(model, [t.own_weight for t in tied])
        prepared = prepare(own, batch, selection, unsupported=unsupported, autocast=autocast, prove=prove)
        prepared.deterministic |= {f"{t.embeddings[0]}.weight": _TIED.format(t.layer.name) for t in tied}
        return prepared
    failures: dict[str, str] = {}
    discovered_weights = {t.layer.weight for t in discovered}
    for name, parameter_name in reference.missed_weights(discovered_weights, selection):
        failures[name] = reference.why_not_caught(parameter_name)
    if prove:
        capture, broken = _proved_capture(model, probe, chosen, reference, 0.1 if autocast else None)
        layers = {name: tracked.layer for name, tracked in capture.tracked.items()}
    else:
        capture, broken = Capture(model), [t for t in chosen if _may_be_no_layer(t)]
        layers = {t.layer.name: t.layer for t in chosen if not _may_be_no_layer(t)}
    failures |= {t.layer.name: why_not_rebuilt(t.layer.weight, t.holders, t.both_ways) for t in broken}
    # A parameter in a matrix product may be anything; its module's type, its ties or its name make it a layer.
    unnamed = selection == "all" or callable(selection)
    undecided = {t.layer.name for t in broken if unnamed and _may_be_no_layer(t)}
    errors = {name: reason for name, reason in failures.items() if name not in undecided}
    if errors and unsupported == "raise":
        raise _unsupported(errors)
    if not layers:
        raise PosthocUQError("No weighted layer is left to fit a posterior over.")
    covered = {name for layer in layers.values() for name in layer.parameter_names}
    warning = without_posterior(reference.parameters, reference.asked_for(selection), covered)
    deterministic = reference.deterministic(covered, failures)
    return Prepared(model, capture, layers, deterministic, reference.pull[0].numel(), warning)


def _unsupported(errors: dict[str, str]) -> UnsupportedLayerError:
    listed = "; ".join(f"'{name}': {reason}" for name, reason in errors.items())
    return UnsupportedLayerError(
        f"Unsupported layers: {listed}. Pass unsupported='skip' to leave them deterministic."
    )


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


def select(discovered: list[TrackedLayer], selection: Selection, reference: Reference) -> list[TrackedLayer]:
    """The layers that the user asked for: all, the last, by name, prefix or pattern, or by predicate."""
    if callable(selection):
        chosen = [t for t in discovered if t.module is not None and selection(t.layer.name, t.module)]
    elif selection == "all":
        chosen = discovered
    elif selection == "last":
        chosen = discovered[-1:]
    else:
        names = wanted_names(selection) or []
        for name in names:
            known = any(asked_by_name([name], t.names) for t in discovered)
            sharing = next((t for t in discovered if asked_by_name([name], t.embeddings)), None)
            if not known and sharing is not None:
                raise UnsupportedLayerError(
                    f"'{name}' is an embedding, and stays certain; '{sharing.layer.name}', which shares its weight, "
                    f"can have a posterior: layers=['{sharing.layer.name}']."
                )
            if not known and not reference.holds_missed(name):
                raise no_such_layer(name, [t.layer.name for t in discovered])
        chosen = [t for t in discovered if asked_by_name(names, t.names)]
    return sorted(chosen, key=lambda t: reference.order[t.layer.weight])


def _probe(model: nn.Module, batch: Batch, samples: int) -> tuple[Batch, Reference]:
    """The samples to prove the layers on, and autograd's results for them.

    At least two samples: one alone would not show which dimension of a layer's input counts the samples.
    """
    if samples == 1:
        two = batch.doubled()
        try:
            return two, Reference(model, two, 2)
        except PosthocUQError:
            raise
        except Exception as error:  # the model takes one sample at a time, or fails with it too
            check_refused(error, lambda: Reference(model, two, 2), lambda: Reference(model, batch, 1))
            return batch, Reference(model, batch, 1)
    probe = batch.narrow(0, min(samples, PROBE_SAMPLES), samples)
    return probe, Reference(model, probe, min(samples, PROBE_SAMPLES))


def _proved_capture(
    model: nn.Module, probe: Batch, chosen: list[TrackedLayer], reference: Reference, tolerance: float | None
) -> tuple[Capture, list[TrackedLayer]]:
    """A proved capture of the chosen layers, and the layers that no engine could serve."""

    def attempt(layers: list[TrackedLayer]) -> tuple[Capture, set[str]]:
        capture = Capture(model)
        modules = dict(capture.twin.named_modules())
        owned = owners(capture.twin)
        by_weight = {name: owned[key][0] for key, name in parameter_names(capture.twin).items()}
        of_twin = [replace(t, module=modules[by_weight[t.layer.weight][0]]) for t in layers]
        capture.track(of_twin)
        return capture, _failing(capture, probe, reference, tolerance)

    layers = chosen
    try:
        capture, failing = attempt(layers)
    except UnsupportedLayerError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError, AttributeError) as error:
        # BackPACK cannot run some module after all: the interceptor serves every layer.
        layers = [replace(t, engine="hooks") for t in layers]
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
        per_sample = activations.gradients(gradients, CPU_TEMPORARY)
        of_batch, of_last = per_sample.sum(0), per_sample[-1]
        # Terms may cancel in the sum, but rounding is relative to the terms.
        terms_bound = float(torch.linalg.vector_norm(gradients)) * layer_gradients.norm_bound()
        if _agrees(layer, of_batch, reference.total, terms_bound, tolerance) and _agrees(
            layer, of_last, reference.last, terms_bound, tolerance
        ):
            failing.discard(layer.name)

    recording.pull_back(reference.pull, compare, last=True)
    for name in list(failing):  # a layer that the backward pass does not reach has no gradient to miss
        layer = capture.tracked[name].layer
        if all(reference.total[p] is None for p in layer.parameter_names):
            failing.discard(name)
    return failing


def _agrees(
    layer: Layer,
    rebuilt: Tensor,
    truth: dict[str, Tensor | None],
    terms_bound: float,
    tolerance: float | None,
) -> bool:
    if rebuilt.dtype == torch.float64:
        relative, absolute = 1e-6, 1e-12
    elif rebuilt.is_cuda:  # autograd's convolutions may round their factors to 10 bits there (TF32)
        relative, absolute = 1e-2, 2e-4
    else:
        relative, absolute = 2e-3, 1e-6
    relative, absolute = tolerance or relative, absolute * terms_bound
    weight = truth[layer.weight]
    bias = truth[layer.bias] if layer.bias is not None else None
    if weight is None or (layer.bias is not None and bias is None):
        return False
    expected = layer.to_matrix(weight, bias).to(rebuilt)
    error = torch.linalg.vector_norm(rebuilt - expected)
    return bool(error <= relative * torch.linalg.vector_norm(expected) + absolute)
