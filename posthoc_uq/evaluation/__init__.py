"""How good predictions and their uncertainties are: `evaluate`, the object it returns, `metrics` and `plots`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from posthoc_uq.evaluation import metrics
from posthoc_uq.evaluation.evaluate import Evaluation, JointEvaluation, evaluate
from posthoc_uq.evaluation.groups import CoverageGroup, ExcessRisk, GroupedCoverage
from posthoc_uq.evaluation.measurements import title_of

__all__ = [
    "CoverageGroup",
    "Evaluation",
    "ExcessRisk",
    "GroupedCoverage",
    "JointEvaluation",
    "evaluate",
    "metrics",
    "title_of",
]


def __getattr__(name: str) -> Any:
    if name == "plots":  # with matplotlib, which takes a second to load
        return import_module("posthoc_uq.app.plots")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
