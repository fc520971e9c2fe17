"""The parameters that a training of some layers moves without giving them uncertainty."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from posthoc_uq.affine import affine_call
from posthoc_uq.attention import open_attention
from posthoc_uq.loaders import Batch
from posthoc_uq.randomness import isolated_random_state


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
