"""Mean and variance through torch functions: a tensor that carries both, and the rules that move them on."""

from posthoc_uq.moments import rules
from posthoc_uq.moments.activations import ConditionalInverseCDF, InverseCDF
from posthoc_uq.moments.propagation import propagate
from posthoc_uq.moments.tensor import MomentTensor, Pass, Rules, moments_of

__all__ = [
    "ConditionalInverseCDF",
    "InverseCDF",
    "MomentTensor",
    "Pass",
    "Rules",
    "moments_of",
    "propagate",
    "rules",
]
