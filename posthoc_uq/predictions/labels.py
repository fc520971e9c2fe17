"""Labels of classes in the forms that loaders give: indices, floats 0 and 1 of one logit, soft labels."""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError

_TOLERANCE = 1e-4  # how far a sum of probabilities may be from 1; more in half precision


def are_probabilities(rows: Tensor) -> Tensor:
    """A flag on the device, true where all rows ``(batch, classes)`` are probabilities of sum 1, up to rounding."""
    tolerance = max(_TOLERANCE, 4 * torch.finfo(rows.dtype).eps)
    sums = rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return ((rows >= 0).all(1) & ((sums - 1).abs() <= tolerance)).all()


def are_soft(targets: Tensor, probs: Tensor) -> bool:
    """Whether targets are probabilities of the classes, shaped like the predicted ones."""
    return targets.is_floating_point() and targets.shape == probs.shape


def hard_labels(targets: Tensor, probs: Tensor) -> Tensor:
    """Labels ``(batch,)``: of soft ones the most probable class."""
    return targets.argmax(-1) if are_soft(targets, probs) else targets


def soft_log_prob(targets: Tensor, log_probs: Tensor) -> Tensor:
    """``sum_c t_c log p_c``, ``(batch,)``; a class of share zero adds nothing."""
    shares = targets.to(log_probs)
    return torch.where(shares > 0, shares * log_probs, torch.zeros_like(log_probs)).sum(-1)


def in_whole_numbers(targets: Tensor) -> str:
    """Advice on labels that are refused, but are whole numbers of another type or shape; else nothing."""
    floats, column = targets.is_floating_point(), targets.ndim == 2 and targets.shape[1] == 1
    if (not floats and not column) or (floats and not bool((targets == targets.round()).all())):
        return ""
    change = f"{'.long()' if floats else ''}{'.squeeze(1)' if column else ''}"
    return f" They are whole numbers: pass y{change}, or batch_to_targets=lambda batch: batch[1]{change}."


def checked_soft(targets: Tensor) -> Tensor:
    """The soft labels.

    Raises:
        PosthocUQError: they are no probabilities.
    """
    if not bool(are_probabilities(targets)):
        raise PosthocUQError(
            "Soft labels must be probabilities: not negative, and of sum 1 in every row; some are not."
        )
    return targets


def binary_labels(targets: Tensor) -> Tensor:
    """Labels of one logit, without a second dimension of 1, as integers where they are whole numbers."""
    flat = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
    integral = flat.is_floating_point() and bool((flat == flat.round()).all())
    return flat.long() if integral else flat
