"""Honest uncertainty for trained PyTorch models, after the fact.

``fit`` a posterior over the weights, ``tune`` or ``calibrate`` it, ``save`` and ``load`` it as one safe file, and
``wrap`` the model so that every prediction comes with its uncertainty, which ``evaluate`` puts to the test.

What fewer users need is imported from its room: `posthoc_uq.evaluation` (metrics and plots), `posthoc_uq.likelihoods`
(all kinds of predictions), `posthoc_uq.heads`, `posthoc_uq.methods`, `posthoc_uq.fitting`, `posthoc_uq.deployment`.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from posthoc_uq.version import __version__ as __version__

if TYPE_CHECKING:
    from posthoc_uq.api import *  # noqa: F403
else:
    # The names of `posthoc_uq.api` come on first use: torch takes seconds, and help or a version need none of it.

    def __getattr__(name: str) -> object:
        unknown = AttributeError(f"module '{__name__}' has no attribute '{name}'")
        if name.startswith("__") and name != "__all__":  # Python asks for many of those that there are not
            raise unknown
        api, here = _import_module("posthoc_uq.api"), globals()
        if name not in here:  # rooms are, once they are imported
            if name != "__all__" and name not in api.__all__:
                raise unknown
            here[name] = getattr(api, name)
        return here[name]

    def __dir__() -> list[str]:
        return sorted({*_import_module("posthoc_uq.api").__all__, *globals()})
