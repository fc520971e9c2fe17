"""Accuracy and proper scores of class probabilities.

`probs` is always (inputs, classes) and `labels` (inputs,), integers; what does not fit raises `PosthocUQError`,
a NaN among the probabilities `NonFiniteError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.metrics.checks import classified


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of inputs whose most probable class is the label.

    Args:
        probs: (inputs, classes).
        labels: (inputs,), integers.

    Raises:
        PosthocUQError: shapes, labels or probabilities that do not fit (so do all functions of probs and
            labels here).
        NonFiniteError: a probability is NaN (likewise).
    """
    from torchmetrics.functional.classification import multiclass_accuracy

    probs, labels = classified(probs, labels)
    with probs.device:  # torchmetrics before 1.9 makes a tensor on torch's default device
        return multiclass_accuracy(
            probs.argmax(dim=-1), labels, num_classes=probs.shape[1], average="micro"
        ).item()


def top_k_accuracy(probs: Tensor, labels: Tensor, k: int = 5) -> float:
    """Share of inputs whose label is among the `k` most probable classes.

    Of classes with equal probabilities the lower index comes first, as in `argmax`, so that `k = 1` is
    `accuracy`.

    Raises:
        PosthocUQError: `k` is below 1 or above the number of classes.
    """
    probs, labels = classified(probs, labels)
    if not 1 <= k <= probs.shape[1]:
        raise PosthocUQError(f"top_k_accuracy needs k between 1 and the {probs.shape[1]} classes, not {k}.")
    # not torchmetrics: among equal probabilities (often zeros) its choice is up to torch.topk
    of_label = probs.gather(-1, labels.unsqueeze(-1))
    earlier = torch.arange(probs.shape[1], device="cpu") < labels.unsqueeze(-1)
    ahead = ((probs > of_label) | ((probs == of_label) & earlier)).sum(dim=-1)
    return (ahead < k).double().mean().item()


def negative_log_likelihood(probs: Tensor, labels: Tensor) -> float:
    """Mean of -log p(label) in nats; infinite as soon as one label has probability 0.

    Where probabilities underflow, the `log_prob` of a prediction object stays finite.
    """
    probs, labels = classified(probs, labels)
    return -probs.gather(-1, labels.unsqueeze(-1)).log().mean().item()


def brier_score(probs: Tensor, labels: Tensor) -> float:
    """Squared distance of the probabilities to the one-hot label, summed over classes, mean over inputs.

    This is Brier's original convention ("Verification of forecasts expressed in terms of probability",
    Monthly Weather Review, 1950): between 0 and 2, and for two classes twice the one-column version.
    """
    probs, labels = classified(probs, labels)
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return (probs - one_hot).square().sum(dim=-1).mean().item()
