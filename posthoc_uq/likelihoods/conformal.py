"""Promises by split conformal prediction: what the ranks of held-out scores say about new inputs.

A score says how badly a target fits a prediction, or how strange an input is. If n held-out samples are exchangeable
with a new one, and chose nothing else, the new score is at most the k-th smallest of theirs with a probability of at
least ``k / (n + 1)``, whatever the model (Vovk, Gammerman, Shafer, "Algorithmic learning in a random world", 2005;
Angelopoulos and Bates, "A gentle introduction to conformal prediction", 2021). Sets, intervals and p-values follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.errors import NonFiniteError, PosthocUQError

MAX_KEPT = 4096
"""Scores that are kept at most, so that every level is met within 1/4096."""

SetScore = Literal["lac", "aps", "raps"]


class HeldOutScores(NamedTuple):
    """The scores of held-out samples in ascending order, thinned to `MAX_KEPT`.

    Attributes:
        values: (kept,), float64, ascending; the last is the largest of all.
        ranks: (kept,), int64: how many of all scores come at most at this place, ascending; the last is `samples`.
        samples: the number of all.
    """

    values: Tensor
    ranks: Tensor
    samples: int


def held_out_scores(scores: Tensor) -> HeldOutScores:
    """The scores of held-out samples ``(samples,)``, in the form that is kept.

    Raises:
        NonFiniteError: a score is NaN.
        PosthocUQError: there are none.
    """
    values = scores.detach().double().cpu().flatten().sort().values
    count = len(values)
    if count == 0:
        raise PosthocUQError("A promise needs held-out samples, and there are none.")
    if bool(values.isnan().any()):
        raise NonFiniteError("A held-out score is NaN; a promise needs predictions that are numbers.")
    ranks = _ranks(count)
    return HeldOutScores(values[ranks - 1], ranks, count)


def kept_scores(values: Sequence[float], count: int) -> HeldOutScores:
    """The scores of `count` samples again, from the values that were kept."""
    return HeldOutScores(torch.tensor(values, dtype=torch.float64, device="cpu"), _ranks(count), count)


def _ranks(count: int) -> Tensor:
    steps = torch.arange(1, min(count, MAX_KEPT) + 1, dtype=torch.int64, device="cpu")
    return (steps * count + len(steps) - 1) // len(steps)


def quantile(scores: HeldOutScores, level: float) -> float:
    """The ``ceil((n + 1) level)``-th smallest score, or of thinned scores the next larger one that was kept.

    Raises:
        PosthocUQError: the level is not in (0, 1), or more samples are needed for it.
    """
    if not 0 < level < 1:
        raise PosthocUQError(f"The level of a promise must be strictly between 0 and 1, not {level}.")
    rank = ceil((scores.samples + 1) * level - 1e-9)
    if rank > scores.samples:
        needed = ceil(level / (1 - level) - 1e-9)
        raise PosthocUQError(
            f"A level of {level:g} needs {needed:,} held-out samples, and {scores.samples:,} were kept for promises; "
            f"ask for at most {scores.samples / (scores.samples + 1):.4g}, or calibrate with more."
        )
    place = int(torch.searchsorted(scores.ranks, rank))
    return float(scores.values[place])


def p_values(scores: HeldOutScores, new: Tensor) -> Tensor:
    """``(1 + #{held-out scores >= s}) / (n + 1)`` of every new score s, float64 on the CPU; NaN where it is NaN.

    Of new inputs like the held-out ones at most a share a has a p-value of at most a. Of thinned scores the number is
    an upper bound, so that this holds.
    """
    wanted = new.detach().double().cpu()
    below = torch.searchsorted(scores.values, wanted.contiguous())  # kept scores that are smaller
    ranks = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), scores.ranks))
    at_least = scores.samples - ranks[below]
    return torch.where(wanted.isnan(), torch.nan, (1 + at_least).double() / (scores.samples + 1))


def class_scores(
    probs: Tensor,
    kind: SetScore = "lac",
    uniform: Tensor | None = None,
    penalty: float = 0.01,
    free_classes: int = 5,
) -> Tensor:
    """The score of every class as the label, ``(batch, classes)``; larger fits worse.

    * ``"lac"``: ``1 - p_y``, which gives the smallest sets (Sadinle, Lei, Wasserman, "Least ambiguous set-valued
      classifiers with bounded error levels", 2019).
    * ``"aps"``: the probability of all classes at least as probable, less ``u p_y``, which adapts the size to the input
      (Romano, Sesia, Candes, "Classification with valid and adaptive coverage", 2020).
    * ``"raps"``: the same and `penalty` for every rank above `free_classes` (Angelopoulos, Bates, Malik, Jordan,
      "Uncertainty sets for image classifiers using conformal prediction", 2021).

    Args:
        probs: ``(batch, classes)``.
        kind: see above.
        uniform: ``(batch,)``, u in [0, 1) of each sample; without it u is 0, and sets are larger than promised.
        penalty: of ``"raps"``.
        free_classes: of ``"raps"``.
    """
    if kind == "lac":
        return 1 - probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    total = ordered.cumsum(-1)
    if uniform is not None:
        total = total - uniform.to(probs).unsqueeze(-1) * ordered
    if kind == "raps":
        ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
        total = total + penalty * (ranks - free_classes).clamp(min=0).to(total)
    return torch.empty_like(total).scatter_(-1, order, total)


def set_of(probs: Tensor, scores: Tensor, thresholds: Tensor | float, allow_empty: bool = False) -> Tensor:
    """The classes whose score is at most the threshold, ``(batch, classes)`` of booleans.

    Args:
        probs: ``(batch, classes)``.
        scores: `class_scores` of them.
        thresholds: one, or one a class.
        allow_empty: whether a set may be empty; otherwise it then holds the most probable class.
    """
    chosen = scores <= thresholds
    if not allow_empty:
        empty = ~chosen.any(-1, keepdim=True)
        chosen = chosen | (
            empty & torch.zeros_like(chosen).scatter_(-1, probs.argmax(-1, keepdim=True), True)
        )
    return chosen
