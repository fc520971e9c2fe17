"""Which weights are used where; activations and gradients caught, and checked against autograd."""

from posthoc_uq.layers.layer import RULES, Call, Layer, LayerRule, describe, fits
from posthoc_uq.layers.operands import Geometry
from posthoc_uq.layers.rules import WEIGHTED_MODULES, AffineCall, affine_call

__all__ = [
    "RULES",
    "WEIGHTED_MODULES",
    "AffineCall",
    "Call",
    "Geometry",
    "Layer",
    "LayerRule",
    "affine_call",
    "describe",
    "fits",
]
