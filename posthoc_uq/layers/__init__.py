"""Which weights are used where; activations and gradients caught, and checked against autograd."""

from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.capture import Capture
from posthoc_uq.layers.frozen import FrozenPart
from posthoc_uq.layers.layer import RULES, Call, Layer, LayerRule, describe, fits
from posthoc_uq.layers.operands import Geometry, IdentityRows, OneHotRows, Operand, Patches, Rows, Unfolding
from posthoc_uq.layers.proof import count_samples, prepare
from posthoc_uq.layers.rules import WEIGHTED_MODULES, AffineCall, affine_call, register

__all__ = [
    "RULES",
    "WEIGHTED_MODULES",
    "AffineCall",
    "Call",
    "CallWatcher",
    "Capture",
    "FrozenPart",
    "Geometry",
    "IdentityRows",
    "Layer",
    "LayerRule",
    "OneHotRows",
    "Operand",
    "Patches",
    "Rows",
    "Unfolding",
    "affine_call",
    "count_samples",
    "describe",
    "fits",
    "prepare",
    "register",
]
