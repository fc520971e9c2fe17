"""The record of a referral as plain values, stored with the posterior: see `posthoc_uq.Referral`.

``scores`` (name to ``threshold`` and ``quantiles`` of familiar inputs, descending), ``shares`` (for each quantile, the
share of those inputs that are at least as large), ``rate``, and what the thresholds were set for: the number of
``inputs``, the ``head`` and the hyperparameters of the ``posterior``. It is empty where no threshold was set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def thresholds_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The threshold of each score; an input with any score above its own is referred."""
    return {name: score["threshold"] for name, score in record.get("scores", {}).items()}


def rule_of(record: Mapping[str, Any], digits: int = 6) -> str:
    """The rule in words: ``entropy above 0.3 or mutual_information above 0.02``."""
    return " or ".join(f"{name} above {value:.{digits}g}" for name, value in thresholds_of(record).items())
