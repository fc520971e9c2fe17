"""Which weights are used where; activations and gradients caught, and checked against autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posthoc_uq.core.registry import names_of
from posthoc_uq.layers.calls import CallWatcher
from posthoc_uq.layers.capture import Capture
from posthoc_uq.layers.layer import RULES, Call, Layer, LayerRule, describe, fits
from posthoc_uq.layers.operands import Geometry, IdentityRows, OneHotRows, Operand, Patches, Rows, Unfolding
from posthoc_uq.layers.proof import prepare
from posthoc_uq.layers.rules import WEIGHTED_MODULES, AffineCall, affine_call, register

if TYPE_CHECKING:
    from posthoc_uq.layers.frozen import FrozenPart

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
    "describe",
    "fits",
    "prepare",
    "register",
]

OFFERED = {"frozen": "FrozenPart"}
"""By file, the names that come on first use."""

__getattr__ = names_of(__name__, OFFERED)
