"""Where a training begins, and what it moves without uncertainty."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from posthoc_uq.core.batches import Bar, Batch, BatchReader, known_length
from posthoc_uq.core.devices import DeferredChecks
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError, warn_user
from posthoc_uq.core.model import model_device, replicate
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed
from posthoc_uq.curvature.sweep import no_weight, own_batches
from posthoc_uq.layers.calls import open_attention
from posthoc_uq.layers.proof import count_samples
from posthoc_uq.layers.rules import affine_call
from posthoc_uq.methods.contexts import Context, single_input
from posthoc_uq.methods.task import Task

# The pass over the training data that shows them to a context.


def show_to_context(
    loader: Iterable[Any],
    reader: BatchReader,
    context: Context | None,
    seed: int,
    progress: bool,
) -> int:
    """One pass over the training data without the model: counts the inputs, and shows them to a context if there is
    one.

    Raises:
        NonFiniteError: inputs that the context is shown are not finite.
        PosthocUQError: the context does not work for this kind of inputs, or all weights are 0.
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed, 1))
    samples, counted = 0, False
    with (
        isolated_random_state(seed),
        Bar(loader, "counting" if context is None else "context", progress) as bar,
    ):
        for index, (batch, count) in enumerate(own_batches(loader, reader)):
            checks = DeferredChecks()
            if context is not None and context.needs_data:
                shown = single_input(batch)
                checks.add(torch.isfinite(shown).all(), partial(_require_finite, index))
                context.observe(shown, generator)
            checks.run()
            samples += count
            counted = counted or batch.weights is None or bool((batch.weights > 0).any())
            bar.advance(count)
    if samples and not counted:
        raise no_weight()
    return samples


def _require_finite(index: int, finite: Tensor) -> None:
    if not bool(finite):
        raise NonFiniteError(
            f"Batch {index}: the inputs are not finite. Check the input data for NaN or infinity."
        )


def check_trainable(method: str, parameters: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Refuse parameters of a number format that no optimiser moves by small steps.

    Args:
        method: its name.
        parameters: of the model.
        names: of those that are to be trained.

    Raises:
        PosthocUQError: one is of half precision.
    """
    narrow = [name for name in names if parameters[name].dtype not in (torch.float32, torch.float64)]
    if narrow:
        raise PosthocUQError(
            f"method={method!r} trains parameters in float32 or float64, and '{narrow[0]}' is of "
            f"{parameters[narrow[0]].dtype}; convert the model, for instance with model.float()."
        )


def count_data(task: Task) -> int:
    settings = task.settings
    return show_to_context(task.loader, settings.reader, None, settings.seed, settings.progress)


def batches_of(task: Task, samples: int) -> int:
    """The batches of one pass over the data, by the loader's length, or else by its first batch."""
    return known_length(task.loader) or ceil(samples / max(1, count_samples(task.batch)))


# A new initialisation of a trained model, by its modules' own ``reset_parameters``.

_INITIALISATION = 201  # stream of random numbers from the seed


def initialised(model: nn.Module, trained: Mapping[str, Tensor], seed: int, option: str) -> dict[str, Tensor]:
    """Parameters and buffers of a new initialisation; batch normalisations lose the data's statistics.

    Args:
        model: whose modules say how they begin.
        trained: its parameters, which modules without ``reset_parameters`` keep, with a warning.
        seed: of the random numbers, which do not depend on the device.
        option: which was given for this, for the warning.
    """
    device = model_device(model)
    not_reset: list[str] = []
    with isolated_random_state(mixed_seed(seed, _INITIALISATION)):
        twin = replicate(model, {name: p.clone() for name, p in trained.items()})
        twin = twin.to("cpu")  # its random numbers do not depend on the device
        for prefix, module in twin.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.clone())
            reset: Any = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if callable(reset):
                reset()
            else:
                not_reset += [
                    f"{prefix}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)
                ]
    if not_reset:
        warn_user(
            f"{option} keeps {len(not_reset)} trained parameters whose modules have no reset_parameters(), "
            f"{not_reset[0]!r} among them."
        )
    tensors = {name: p.detach().to(device) for name, p in twin.named_parameters()}
    return tensors | {name: buffer.detach().to(device) for name, buffer in twin.named_buffers()}


# The parameters that a training of some layers moves without giving them uncertainty.


class _Uses(TorchFunctionMode):
    """Notes the tensors that functions take after the first use of a chosen weight.

    Args:
        chosen: the identities of these weights.

    Attributes:
        later: the identities of the tensors.
        affine: those of the weights and biases of affine maps, chosen or not.
    """

    def __init__(self, chosen: Collection[int]) -> None:
        super().__init__()
        self._chosen, self._began = chosen, False
        self.later: set[int] = set()
        self.affine: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return open_attention(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._began:
            self.later |= {id(tensor) for tensor in tensors}
        call = affine_call(func, args, kwargs)
        if call is not None:
            self.affine |= {id(tensor) for tensor in (call.parameter, call.bias) if tensor is not None}
            self._began = self._began or id(call.parameter) in self._chosen
        return func(*args, **kwargs)


def certain_parameters(network: nn.Module, chosen: Collection[str], batch: Batch) -> list[str]:
    """What a network uses after the first of some weights and that no affine map owns: scales and shifts of
    normalisations, scales of activations. Other affine layers were left out by choice, and what comes before the first
    chosen one would cost a longer backward pass.

    Args:
        network: a replica in eval mode, which is run once.
        chosen: names of the parameters that are uncertain.
        batch: a few inputs.

    Returns:
        Names of parameters in float32 or float64.
    """
    held = dict(network.named_parameters())
    copied = batch.copied()
    with torch.no_grad(), isolated_random_state(), _Uses({id(held[name]) for name in chosen}) as uses:
        network(*copied.args, **copied.kwargs)
    return [
        name
        for name, parameter in held.items()
        if id(parameter) in uses.later - uses.affine
        and name not in chosen
        and parameter.dtype in (torch.float32, torch.float64)
    ]
