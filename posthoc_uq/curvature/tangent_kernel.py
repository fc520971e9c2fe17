"""The tangent kernel of a network before its training: which inputs it could tell apart when it had seen no label.

The kernel of two inputs is the inner product of the network's gradients there (Jacot, Gabriel, Hongler, "Neural tangent
kernel", NeurIPS 2018). Kernel ridge regression with it stands for the training of the network, and its leave-one-out
predictions have a closed form: `posthoc_uq.fitting.leave_one_out`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch, count_samples, explained
from posthoc_uq.core.devices import as_double, full_precision
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, UnsupportedLayerError
from posthoc_uq.core.model import replicate
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.layers.capture import Capture, LayerGradients, TrackedLayer
from posthoc_uq.layers.operands import temporary_limit

MAX_GRADIENT_BYTES = (
    4 * 2**30
)  # of the gradients of all samples, in layers that are used at several positions

_ROWS = 128  # of a kernel that are summed at once


def untrained(model: nn.Module, batches: Sequence[Batch], seed: int) -> nn.Module:
    """A copy of a model with the weights that it could have had before its training.

    Every module that has `reset_parameters` is initialised anew. Parameters of other modules keep their values where
    they need no gradient, and so do all such parameters where others need one: they were frozen in the training, and
    had their values before it. Normalisation by batch statistics takes those of one pass over `batches`.

    Args:
        model: the trained model, which is not changed.
        batches: of its training data.
        seed: of the initial weights; the global random state is left as it is.

    Raises:
        PosthocUQError: a parameter was trained, and no `reset_parameters` sets it.
    """
    own_values = {name: p.detach() for name, p in model.named_parameters()}
    twin = replicate(model, {name: value.clone() for name, value in own_values.items()})
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with isolated_random_state(seed), torch.no_grad():
        # modules before those that hold them, as nn.Module.apply does
        for name, module in reversed(list(twin.named_modules())):
            own = [f"{name}.{each}".lstrip(".") for each, _ in module.named_parameters(recurse=False)]
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
            elif missed := [each for each in own if each in trained]:
                raise PosthocUQError(
                    f"'{missed[0]}' belongs to a {type(module).__name__} without reset_parameters, so that its value "
                    f"before the training is not known; pass the untrained network, initial=model_or_state_dict."
                )
        if trained:
            for name, parameter in twin.named_parameters():
                if name not in trained:
                    parameter.copy_(own_values[name])
        set_batch_statistics(twin, batches)
    return twin


def with_state(model: nn.Module, initial: nn.Module | Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model with the parameters and buffers of `initial`, a model or a state dict.

    Raises:
        PosthocUQError: they are not those of this model, or are the trained ones.
    """
    state = initial.state_dict() if isinstance(initial, nn.Module) else dict(initial)
    twin = replicate(model, {name: p.detach().clone() for name, p in model.named_parameters()})
    try:
        twin.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        message = " ".join(str(error).split())
        raise PosthocUQError(f"initial= does not fit the model: {message[:300]}") from None
    own = dict(model.named_parameters())
    if all(torch.equal(parameter, own[name]) for name, parameter in twin.named_parameters()):
        raise PosthocUQError(
            "initial= has the trained weights; pass those from before the training, as a copy "
            "(copy.deepcopy(model.state_dict())), since a state dict goes along with its model."
        )
    return twin


def set_batch_statistics(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Set the running means and variances of all normalisation layers to those of one pass, the mean over batches by
    their samples. Batches of one sample, which have no variance, are left out.

    Raises:
        PosthocUQError: all are of one sample.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # pyright: ignore[reportPrivateUsage]
    layers = [layer for layer in layers if layer.track_running_stats]
    if not layers:
        return
    several = [(batch, samples) for batch in batches if (samples := count_samples(batch)) > 1]
    if not several:
        raise PosthocUQError(
            "The untrained network's batch normalisation needs batches of more than one sample; give a larger "
            "batch_size."
        )
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    seen = 0
    for batch, samples in several:
        seen += samples
        for layer in layers:
            layer.momentum = samples / seen
        batch.copied().call(model)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


@full_precision()
def tangent_kernel(
    network: nn.Module,
    batches: Sequence[Batch],
    seed: int,
    layers: Iterable[TrackedLayer],
    weights: Collection[str] | None = None,
) -> Tensor:
    """The tangent kernel of a network along one random direction of its outputs, ``(samples, samples)`` in float64 on
    the CPU.

    With ``u ~ N(0, I / C)`` for C outputs and ``g_n`` the gradient of ``u^T f(x_n)`` with respect to all weights of
    linear layers and convolutions, ``K_nm = g_n^T g_m``: one backward pass a batch. A layer that is used at one
    position adds ``(a_n^T a_m) (b_n^T b_m)`` from its inputs a (with a 1 for the bias) and output gradients b, so that
    no gradient is formed. A layer with several positions adds the products of its gradients.

    Args:
        network: in eval mode; not changed.
        batches: all samples.
        seed: of the direction.
        layers: as a dry run of such a network proved them.
        weights: the names of those that count, such as those that were trained; None for all.

    Raises:
        NonFiniteError: the kernel is not finite, or zero.
        PosthocUQError: the outputs have positions, or the gradients take too much memory.
        UnsupportedLayerError: the gradients of no layer can be caught.
    """
    capture = Capture(network)
    capture.track(list(layers))
    generator = torch.Generator().manual_seed(seed)
    direction = torch.empty(0, dtype=torch.float64, device="cpu")
    rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
    gradients: dict[str, list[Tensor]] = {}
    kept = 0
    for index, batch in enumerate(batches):
        samples = count_samples(batch)
        with explained(lambda: capture.twin, batch, f"batch {index} of the loader"):
            recording = capture.run(batch, samples)
        outputs = recording.outputs
        if outputs.ndim > 2:
            raise PosthocUQError(
                f"Leave-one-out needs one row of outputs a sample, and these have shape {tuple(outputs.shape)}; use "
                f"held-out data, uq.calibrate(posterior, val_loader)."
            )
        if index == 0:
            count = outputs[0].numel()
            direction = torch.randn(outputs.shape[1:], generator=generator, dtype=torch.float64, device="cpu")
            direction = direction / count**0.5
        pulled = direction.to(outputs.device, outputs.dtype).expand_as(outputs)

        def keep(caught: LayerGradients) -> None:
            nonlocal kept
            if weights is not None and caught.layer.weight not in weights:
                return
            dtype = caught.calls[0].input.dtype
            output_gradients, activations = caught.gradients(dtype), caught.activations(dtype)
            name = caught.layer.name
            if activations.positions == 1 and name not in gradients:
                a, b = activations.rows().squeeze(2), output_gradients.squeeze(2)  # (samples, groups, width)
                rows.setdefault(name, []).append((a.cpu(), b.cpu()))
                return
            limit = temporary_limit(MAX_GRADIENT_BYTES, output_gradients.device)
            each = activations.gradients(output_gradients, limit).flatten(1)
            # of earlier batches that had one position, as sequences of other lengths have
            before = [torch.einsum("sgo,sgi->sgoi", b, a).flatten(1) for a, b in rows.pop(name, [])]
            gradients.setdefault(name, []).extend(before)
            kept += sum(part.numel() * part.element_size() for part in (*before, each))
            if kept > MAX_GRADIENT_BYTES:
                raise PosthocUQError(
                    f"The gradients of all samples take more than {MAX_GRADIENT_BYTES >> 30} GiB; pass a loader of "
                    f"fewer of them, or use held-out data, uq.calibrate(posterior, val_loader)."
                )
            gradients[name].append(each.cpu())

        recording.pull_back(pulled, keep, last=True)
    if not rows and not gradients:
        raise UnsupportedLayerError(
            "The gradients of no trained layer of the untrained network could be caught."
        )
    counts = [count_samples(batch) for batch in batches]
    kernel = torch.zeros(sum(counts), sum(counts), dtype=torch.float64, device="cpu")
    for pairs in rows.values():
        a, b = (as_double(torch.cat(parts)) for parts in zip(*pairs, strict=True))
        for group in range(a.shape[1]):
            of_inputs, of_outputs = a[:, group], b[:, group]
            for start in range(0, len(kernel), _ROWS):  # up to the diagonal, by blocks that stay in the cache
                part, upto = slice(start, start + _ROWS), slice(start + _ROWS)
                kernel[part, upto].addcmul_(
                    of_inputs[part] @ of_inputs[upto].T, of_outputs[part] @ of_outputs[upto].T
                )
    for start in range(0, len(kernel), _ROWS):
        kernel[:start, start : start + _ROWS] = kernel[start : start + _ROWS, :start].T
    for parts in gradients.values():
        every = torch.cat(parts)
        for columns in every.split(1 << 14, dim=1):
            wide = as_double(columns)
            kernel.addmm_(wide, wide.T)
    if not bool(kernel.sum().isfinite()):
        raise NonFiniteError("The tangent kernel of the untrained network is not finite.")
    if not bool(kernel.diagonal().any()):
        raise NonFiniteError(
            "All gradients of the untrained network are zero, so that its tangent kernel says nothing."
        )
    return kernel
