"""Multi-head attention whose inner calls a function mode can see: projections, products, a softmax."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F


def _opened() -> Callable[..., Any]:
    """`F.multi_head_attention_forward` with visible inner calls.

    Torch's own function would show itself to a function mode as one opaque call, again and again.
    """
    function = F.multi_head_attention_forward
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    opened = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


open_attention: Callable[..., Any] = _opened()
