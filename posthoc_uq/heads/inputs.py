"""The arguments of one call, for several models that run on them in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from posthoc_uq.outputs import output_tensor


class Inputs:
    """One call's arguments. Every draw gets them unchanged, even if a model writes into its inputs.

    Args:
        args: positional arguments.
        kwargs: named arguments.
        dtype: what floating-point tensors among them are cast to, or None.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> None:
        def cast(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floating and dtype is not None else value

        self._args, self._kwargs = tree_map(cast, (args, kwargs))
        self._copy: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._versions: list[int] | None = None

    def anew(self) -> Inputs:
        """The same arguments with copies of their own, for trials without gradients."""
        return Inputs(self._args, self._kwargs, None)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments themselves."""
        return self._args, self._kwargs

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes, types and devices of the tensors, as a dictionary key."""
        leaves = enumerate(tree_leaves((self._args, self._kwargs)))
        return tuple((k, tuple(v.shape), v.dtype, v.device) for k, v in leaves if isinstance(v, Tensor))

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy of the arguments that no model has written into."""
        copy = self._copy
        if copy is None or self._versions is None or self._versions != _versions(copy):
            copy = tree_map(_clone, (self._args, self._kwargs))
            self._copy, self._versions = copy, _versions(copy)
        return copy

    def run(self, model: nn.Module) -> Tensor:
        """The output tensor of `model`."""
        args, kwargs = self.fresh()
        return output_tensor(model(*args, **kwargs))


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _versions(call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[int] | None:
    """How often each tensor was written, or None where one does not count (those of inference mode)."""
    tensors = [value for value in tree_leaves(call) if isinstance(value, Tensor)]
    return None if any(t.is_inference() for t in tensors) else [t._version for t in tensors]
