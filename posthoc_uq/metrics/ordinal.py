"""Scores of the probabilities of classes that have an order."""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.metrics.checks import classified


def ranked_probability_score(probs: Tensor, labels: Tensor) -> float:
    """``1 / (C - 1) sum_k (P(class <= k) - 1[label <= k])^2``, mean over inputs, in [0, 1] (Epstein, "A Scoring System
    for Probability Forecasts of Ranked Categories", 1969).

    Args:
        probs: (inputs, classes).
        labels: (inputs,), integers.

    Raises:
        PosthocUQError: shapes, labels or probabilities that do not fit.
        NonFiniteError: a probability is NaN.
    """
    probs, labels = classified(probs, labels)
    reached = labels.unsqueeze(1) <= torch.arange(probs.shape[1], device="cpu")
    gaps = (probs.cumsum(1) - reached.double())[:, :-1]
    return gaps.square().mean().item()


def quadratic_kappa(predicted: Tensor, labels: Tensor, classes: int) -> float:
    """Cohen's kappa of predicted and right classes, with weights by the squared distance between classes: 1 where all
    are right, 0 for chance; NaN where either has one class alone.

    Args:
        predicted: (inputs,), integers.
        labels: (inputs,), integers.
        classes: how many there are.

    Raises:
        PosthocUQError: the shapes differ, or there is no input.
    """
    from torchmetrics.functional.classification import multiclass_cohen_kappa

    if predicted.shape != labels.shape or predicted.ndim != 1 or len(predicted) == 0:
        raise PosthocUQError(
            f"predicted and labels must be (inputs,) with at least one input, not {tuple(predicted.shape)} and "
            f"{tuple(labels.shape)}."
        )
    predicted, labels = predicted.cpu(), labels.cpu()
    return float(multiclass_cohen_kappa(predicted, labels, num_classes=classes, weights="quadratic"))
