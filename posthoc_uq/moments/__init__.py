"""Mean and variance through torch functions: a tensor that carries both, and the rules that move them on."""

from posthoc_uq.moments import rules
from posthoc_uq.moments.activations import ConditionalInverseCDF, InverseCDF

__all__ = ["ConditionalInverseCDF", "InverseCDF", "rules"]
