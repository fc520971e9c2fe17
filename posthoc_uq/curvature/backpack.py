"""The BackPACK first-order extension that hands over activations and output gradients.

BackPACK (Dangel, Kunstner, Hennig 2020) runs an extension on every extended module during the backward pass. Only
weighted leaf modules are extended, so the code between them may be anything. Where that is not sound (a module called
twice, an output changed in place, autocast), `hooks` is used instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from backpack import backpack, extend
from backpack.context import CTX
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension
from torch import Tensor, nn

from posthoc_uq.layers import WEIGHTED_MODULES

Handler = Callable[[nn.Module, Tensor, Tensor], None]

# BackPACK keeps its active extensions in a global variable, so fits in two threads take turns with backward passes.
_CONTEXT_LOCK = threading.RLock()


class _HandOver(FirstOrderModuleExtension):
    """Passes a module's input and output gradient on; stores nothing on the parameters."""

    def __call__(
        self, extension: Any, module: nn.Module, g_inp: tuple[Tensor, ...], g_out: tuple[Tensor, ...]
    ) -> None:
        extension.handler(module, module.input0, g_out[0])


class ActivationsAndGradients(FirstOrderBackpropExtension):
    """Calls ``handler(module, input, output_gradient)`` for every extended weighted module, in backward
    order.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__(
            savefield="posthoc_uq",
            module_exts={kind: _HandOver() for kind in WEIGHTED_MODULES},
            fail_mode="ERROR",
        )
        self.handler = handler


def extend_modules(modules: list[nn.Module]) -> None:
    """Let BackPACK see these leaf modules. They must be a replica's, since BackPACK leaves hooks and attributes."""
    with _CONTEXT_LOCK:
        # BackPACK keeps the handles of its hooks for good, also those of modules that are gone
        CTX.hook_handles = [handle for handle in CTX.hook_handles if handle.hooks_dict_ref() is not None]
        for module in modules:
            extend(module)


def backward(outputs: Tensor, gradient: Tensor, handler: Handler, retain_graph: bool) -> None:
    """Pull `gradient` back from `outputs`; every extended module's input and output gradient go to `handler`."""
    with _CONTEXT_LOCK, backpack(ActivationsAndGradients(handler), retain_graph=retain_graph):
        outputs.backward(gradient, retain_graph=retain_graph)
