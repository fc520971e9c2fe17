"""The cost of one forward pass, counted and not timed: decisions by it are the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posthoc_uq.attempts import check_refused


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """Torch's, loaded with the first count: they bring a compiler with them."""
    from torch.utils.flop_counter import flop_registry

    return cast("dict[Any, Callable[..., int]]", flop_registry)


class Cost(TorchDispatchMode):
    """Counts the operations inside of ``with Cost() as cost``, in this thread only.

    Attributes:
        operations: calls of torch's kernels, views included.
        flops: floating-point operations of products (matrices, convolutions, attention); a multiply-add counts two.
        largest: bytes of the largest tensor that an operation made; views do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.flops = 0
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations += 1
        formula = _formulas().get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for output, declared in zip(outputs, func._schema.returns, strict=False):
            if isinstance(output, Tensor) and declared.alias_info is None:
                self.largest = max(self.largest, output.numel() * output.element_size())
        return out


def cost_of(run: Callable[[], Any]) -> Cost | None:
    """The cost of `run` without gradients, or None where it cannot be counted; an error of `run` itself is raised.

    Inference mode is switched off meanwhile: in it, operations reach the counter undivided.
    """

    def counted() -> Cost:
        with Cost() as cost:
            run()
        return cost

    with torch.inference_mode(False), torch.no_grad():
        try:
            return counted()
        except Exception as error:
            check_refused(error, counted, run)  # returns where it was the counting that failed
            return None
