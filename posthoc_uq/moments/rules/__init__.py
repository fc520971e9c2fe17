"""The table of rules: importing this package fills it. One file a kind of function."""

from posthoc_uq.moments import fallback
from posthoc_uq.moments.rules import (
    affine,
    arithmetic,
    attention,
    elementwise,
    functions,
    normalisation,
    pooling,
    shape,
)
from posthoc_uq.moments.tensor import MomentTensor, Pass, Rules, WeightPosteriors

__all__ = [
    "MomentTensor",
    "Pass",
    "Rules",
    "WeightPosteriors",
    "affine",
    "arithmetic",
    "attention",
    "elementwise",
    "fallback",
    "functions",
    "normalisation",
    "pooling",
    "shape",
]
