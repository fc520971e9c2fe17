"""Stand-ins for tensors whose numbers are not kept, and copies of tensors that are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posthoc_uq.heads.interception import failed

TensorForm = tuple[torch.Size, torch.dtype, torch.device]


def _query(name: str) -> Any:
    attribute = getattr(Tensor, name)
    return getattr(attribute, "__get__", attribute) if not callable(attribute) else attribute


QUERIES = {
    _query(name)
    for name in "shape dtype device ndim layout requires_grad is_cuda is_cpu is_sparse is_nested is_quantized "
    "size dim ndimension numel nelement is_floating_point is_complex element_size __len__".split()
} | {torch.is_floating_point, torch.is_complex, torch.numel}
"""Functions that ask for the form of a tensor and not for its numbers."""


class StandIn(Tensor):
    """The form of a tensor whose numbers were not kept."""

    @staticmethod
    def __new__(cls: type[StandIn], form: TensorForm) -> StandIn:
        shape, dtype, device = form
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, form: TensorForm) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "StandIn()"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUERIES:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **(kwargs or {}))
        raise failed(f"{getattr(func, '__name__', func)} reads what no code had read before")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise failed(f"{func} reads what no code had read before")


def form_of(tensor: Tensor) -> TensorForm:
    """Its shape, type and device."""
    return tensor.shape, tensor.dtype, tensor.device


def writable_copy(value: Any) -> Any:
    """A copy of a tensor that may be written; anything else, and a stand-in, as it is."""
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, StandIn) else value
