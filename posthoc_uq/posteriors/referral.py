"""The plain values of a referral, by one score or by several.

By one score: ``score``, ``threshold``. By several: ``scores`` (name to ``threshold`` and ``quantiles`` of familiar
inputs, descending) and ``shares`` (for each quantile, the share of those inputs that are at least as large). Both have
``rate``, ``inputs``, ``head`` and ``posterior``: what the thresholds were set for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def thresholds_of(referral: Mapping[str, Any]) -> dict[str, float]:
    """The threshold of each score; an input with any score above its own is referred."""
    if "scores" in referral:
        return {name: settings["threshold"] for name, settings in referral["scores"].items()}
    return {referral["score"]: referral["threshold"]} if referral else {}


def rule_of(referral: Mapping[str, Any], digits: int = 6) -> str:
    """The rule in words: ``entropy above 0.3 or mutual_information above 0.02``."""
    return " or ".join(f"{name} above {value:.{digits}g}" for name, value in thresholds_of(referral).items())
