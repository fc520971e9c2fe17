"""How good predictions and their uncertainties are: `evaluate` and the object it returns."""

from posthoc_uq.evaluation.evaluate import evaluate
from posthoc_uq.evaluation.result import Evaluation

__all__ = ["Evaluation", "evaluate"]
