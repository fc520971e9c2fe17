"""How posteriors predict: one file a head, novelty, referral, and functions drawn from a posterior.

A head of your own is a subclass of `Predictor` that `register_head` makes known by its name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.registry import names_of
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.posteriors.settings import HEADS

if TYPE_CHECKING:
    from posthoc_uq.heads.ensemble import EnsemblePredictor
    from posthoc_uq.heads.linearized import LinearizedPredictor
    from posthoc_uq.heads.moments import MomentsPredictor
    from posthoc_uq.heads.outputs import OutputsPredictor
    from posthoc_uq.heads.referral import Referral
    from posthoc_uq.heads.sampling import SamplingPredictor

__all__ = [
    "HEADS",
    "EnsemblePredictor",
    "LinearizedPredictor",
    "MomentsPredictor",
    "OutputsPredictor",
    "Predictor",
    "Referral",
    "SamplingPredictor",
    "register_head",
]

AnyHead = TypeVar("AnyHead", bound=type[Predictor])

# on first use: moments and draws have rooms of their own
OFFERED = {
    "sampling": "SamplingPredictor",
    "outputs": "OutputsPredictor",
    "moments": "MomentsPredictor",
    "linearized": "LinearizedPredictor",
    "referral": "Referral",
    "ensemble": "EnsemblePredictor",
    "predictor": "scaled_logits",
    "features": "FeatureCache",
}
"""By file, the names that come on first use."""

__getattr__ = names_of(__name__, OFFERED)


def register_head(kind: AnyHead) -> AnyHead:
    """Make a head known by its name, to `posthoc_uq.wrap`, files and the command line; a decorator.

    Raises:
        PosthocUQError: another head has the name, or a file cannot hold the name.

    Example:
        ```python
        @uq.register_head
        class Mean(uq.Predictor):  # the guide on heads has a whole one
            head = "mean"
        ```
    """
    if re.fullmatch(r"[a-z0-9_]{1,16}", kind.head) is None:
        raise PosthocUQError(
            f"A head's name has 1 to 16 small letters, digits and underscores; not {kind.head!r}."
        )
    known = HEADS.get(kind.head)
    # the same name again is the same class: a reloaded module, or a notebook cell that ran again
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise PosthocUQError(
            f"There is a head {kind.head!r} already, {known.__module__}.{known.__qualname__}."
        )
    HEADS[kind.head] = kind
    return kind
