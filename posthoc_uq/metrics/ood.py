"""How well a score tells foreign (out-of-distribution) inputs from familiar ones.

Any score whose larger values mean stranger inputs can be used: only its order counts, so it may be infinite and
of any scale. The foreign inputs are always the positive class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.metrics.checks import plain


def ood_auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Probability that a foreign input scores higher than a familiar one, ties counting half.

    Args:
        scores_in: (inputs,), an uncertainty (higher is stranger) of inputs like the training data.
        scores_out: (foreign inputs,), the same score of out-of-distribution inputs.

    Raises:
        PosthocUQError: one of them is empty.
        NonFiniteError: a score is NaN.
    """
    from torchmetrics.functional.classification import binary_auroc

    return binary_auroc(*_ranked("ood_auroc", scores_in, scores_out)).item()


def ood_aupr(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the precision-recall curve of finding the foreign inputs: their average precision.

    `sum_k (recall_k - recall_(k-1)) precision_k` over the distinct scores as thresholds, in descending order
    (no interpolation). Its value for a useless score is the share of foreign inputs among all, so it compares
    scores on the same two data sets only (Davis and Goadrich, ICML 2006).

    Args, Raises: as `ood_auroc`.
    """
    from torchmetrics.functional.classification import binary_average_precision

    return binary_average_precision(*_ranked("ood_aupr", scores_in, scores_out)).item()


def ood_fpr(scores_in: Tensor, scores_out: Tensor, tpr: float = 0.95) -> float:
    """Share of familiar inputs flagged when the threshold is set to catch a share `tpr` of the foreign ones.

    An input is flagged where score >= threshold, and the threshold is the largest one that flags at least
    `tpr` of the foreign inputs; equal scores are flagged together. Smaller is better. Some of the
    literature (Hendrycks and Gimpel 2017; Liang et al. 2018) quotes as FPR95 the share of foreign inputs
    accepted when 95 % of the familiar ones are; to get that, swap the two and negate the scores.

    Args:
        scores_in: as in `ood_auroc`.
        scores_out: likewise.
        tpr: in (0, 1].

    Raises:
        PosthocUQError: one of them is empty, or `tpr` is outside (0, 1].
        NonFiniteError: a score is NaN.
    """
    scores_in, scores_out = _both("ood_fpr", scores_in, scores_out)
    if not 0 < tpr <= 1:
        raise PosthocUQError(f"ood_fpr needs a tpr above 0 and at most 1, not {tpr}.")
    # the subtraction undoes rounding such as 0.07 * 100 = 7.000000000000001
    caught = max(1, math.ceil(tpr * len(scores_out) - 1e-9))
    threshold = scores_out.sort(descending=True).values[caught - 1]
    return (scores_in >= threshold).double().mean().item()


def _both(name: str, scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    if scores_in.numel() == 0 or scores_out.numel() == 0:
        raise PosthocUQError(f"{name} needs at least one score on either side.")
    familiar, foreign = plain(scores_in).flatten(), plain(scores_out).flatten()
    if bool(familiar.isnan().any()) or bool(foreign.isnan().any()):
        raise NonFiniteError(f"{name} got scores that are NaN.")
    return familiar, foreign


def _ranked(name: str, scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks in (0, 1), and 1 for foreign: torchmetrics squeezes scores outside [0, 1] through a sigmoid, where
    large ones tie."""
    familiar, foreign = _both(name, scores_in, scores_out)
    scores = torch.cat([familiar, foreign])
    ranks = torch.unique(scores, return_inverse=True)[1].double() / scores.numel()
    return ranks, (torch.arange(scores.numel(), device="cpu") >= familiar.numel()).long()
