"""BackPACK's side of `capture`: an extension that hands activations and output gradients over. Imported by a pass that
needs it, so that nothing else loads BackPACK.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from backpack import backpack, extend
from backpack.context import CTX
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension
from torch import Tensor, nn

from posthoc_uq.layers.rules import WEIGHTED_MODULES

# BackPACK keeps its active extensions in a global variable, so fits in two threads take turns with backward passes.
_CONTEXT_LOCK = threading.RLock()


class _HandOver(FirstOrderModuleExtension):
    """Passes a module's input and output gradient on; stores nothing on the parameters."""

    def __call__(
        self, extension: Any, module: nn.Module, g_inp: tuple[Tensor, ...], g_out: tuple[Tensor, ...]
    ) -> None:
        extension.handler(module, module.input0, g_out[0])


class _ActivationsAndGradients(FirstOrderBackpropExtension):
    """Calls ``handler(module, input, output_gradient)`` for every extended weighted module, in backward
    order.
    """

    def __init__(self, handler: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
        super().__init__(
            savefield="posthoc_uq",
            module_exts={kind: _HandOver() for kind in WEIGHTED_MODULES},
            fail_mode="ERROR",
        )
        self.handler = handler


def watch(modules: Iterable[nn.Module]) -> None:
    """Let BackPACK see these modules."""
    with _CONTEXT_LOCK:
        # BackPACK keeps the handles of its hooks for good, also those of modules that are gone
        CTX.hook_handles = [handle for handle in CTX.hook_handles if handle.hooks_dict_ref() is not None]
        for module in modules:
            extend(module)


@contextmanager
def handing_over(
    handler: Callable[[nn.Module, Tensor, Tensor], None], *, last: bool
) -> Generator[None, None, None]:
    """Call ``handler(module, input, output_gradient)`` for every watched module that a backward pass within reaches;
    the graph is kept unless it is the `last` one.
    """
    with _CONTEXT_LOCK, backpack(_ActivationsAndGradients(handler), retain_graph=not last):
        yield
