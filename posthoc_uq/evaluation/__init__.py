"""How good predictions and their uncertainties are: `evaluate` and the object it returns."""

from posthoc_uq.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
