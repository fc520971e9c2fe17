"""Probabilities of classes that have an order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from posthoc_uq import metrics
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.samples import mean_and_variance


@dataclass(frozen=True, eq=False, repr=False)
class OrdinalPrediction(ClassPrediction):
    """A `ClassPrediction` of classes 0, 1, ... that have an order. `logits_mean` and `logits_variance` are of the
    model's own outputs: (batch, classes - 1), or (batch, 1) with thresholds.
    """

    of: ClassVar[str] = "likelihood='ordinal'"

    @classmethod
    def from_log_probs(
        cls, log_probs: Tensor, outputs: Tensor, functional: tuple[Tensor, Tensor] | None = None
    ) -> OrdinalPrediction:
        """Average over draws.

        Args:
            log_probs: (draws, batch, classes), of the classes under each draw.
            outputs: (draws, batch, outputs), from which they were computed.
            functional: mean and variance of the outputs, where they are known more accurately than from the draws.
        """
        drawn = ClassPrediction.from_logits(log_probs)  # whose softmax they are themselves
        mean, variance = mean_and_variance(outputs) if functional is None else functional
        known = vars(drawn) | {"logits_mean": mean, "logits_variance": variance}
        return cls(**known)

    def _logits_shape(self) -> tuple[int, ...]:
        inputs, classes = self.probs.shape
        return (inputs, 1) if self.logits_mean.shape == (inputs, 1) else (inputs, classes - 1)

    def __repr__(self) -> str:
        return f"OrdinalPrediction(inputs={len(self)}, classes={self.probs.shape[1]})"

    def cdf(self) -> Tensor:
        """(batch, classes): the probability that the class is at most each of them."""
        return self.probs.cumsum(-1).clamp(max=1)

    @property
    def mean(self) -> Tensor:
        """(batch,): the mean class, with classes counted 0, 1, ..."""
        ranks = torch.arange(self.probs.shape[1], device=self.probs.device)
        return (self.probs * ranks).sum(-1)

    @property
    def variance(self) -> Tensor:
        """(batch,): the variance of the class, with classes counted 0, 1, ..."""
        ranks = torch.arange(self.probs.shape[1], device=self.probs.device)
        return (self.probs * (ranks - self.mean.unsqueeze(-1)).square()).sum(-1)

    def quantile(self, q: float) -> Tensor:
        """(batch,), int64: the first class at which `cdf` reaches `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        if not 0 < q < 1:
            raise PosthocUQError(f"quantile needs a probability strictly between 0 and 1, not {q}.")
        return (self.cdf()[:, :-1] < q).sum(-1)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Classes (batch,) between which, both included, the class falls with probability `level` or more.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1.
        """
        if not 0 < level < 1:
            raise PosthocUQError(f"interval needs a level strictly between 0 and 1, not {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """The measures of classes; the ranked probability score, the mean absolute error of the median class, and
        Cohen's kappa with quadratic weights.
        """
        return super().quality(targets, bins) | {
            "RPS": metrics.ranked_probability_score(self.probs, targets),
            "MAE": float((self.quantile(0.5) - targets.to(self.probs.device)).abs().double().mean()),
            "quadratic kappa": metrics.quadratic_kappa(self.predicted(), targets, self.probs.shape[1]),
        }

    def to_dict(self) -> dict[str, Tensor]:
        """As of a `ClassPrediction`, with the mean class."""
        return super().to_dict() | {"mean": self.mean}

    def of_one_network(self) -> OrdinalPrediction:
        """The same without expected entropy, votes and the variance of the probabilities."""
        return replace(self, sample_entropy=None, probs_variance=None, votes=None)
