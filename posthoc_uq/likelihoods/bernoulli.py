"""Binary classification: one logit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import pi
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.likelihoods.base import Likelihood
from posthoc_uq.likelihoods.categorical import AGREEMENT
from posthoc_uq.likelihoods.outputs import divergence_of_classes, entropy_of_logits, last_function, wide
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.links import DRAWS, classes_of_gaussian
from posthoc_uq.predictions.spread import Spread
from posthoc_uq.predictions.streaming import classes_of_draws


class Bernoulli(Likelihood):
    """One logit a sample: outputs ``(samples,)`` or ``(samples, 1)``, targets 0 or 1 of either shape."""

    name = "binary"
    logits: ClassVar[bool] = True
    joint: ClassVar[bool] = False

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Bernoulli.fault(self, outputs, targets)
        if fault is not None and bool(fault):
            raise PosthocUQError("Labels for likelihood='binary' must be 0 or 1.")

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.numel() != outputs.shape[0]:
            raise PosthocUQError(
                f"likelihood='binary' needs outputs of shape (samples,) or (samples, 1), and the model gives "
                f"{tuple(outputs.shape)}."
            )
        if targets is None:
            return None
        if targets.numel() != outputs.shape[0]:
            raise PosthocUQError(
                f"{outputs.shape[0]} samples need as many labels, not {tuple(targets.shape)}."
            )
        return ((targets != 0) & (targets != 1)).any()

    def takes(self, outputs: int) -> bool:
        return outputs == 1

    def seems_applied(self, outputs: Tensor) -> bool:
        """The outputs come out of a sigmoid."""
        return last_function(outputs).startswith("Sigmoid")

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = wide(outputs).flatten()
        return -F.binary_cross_entropy_with_logits(logits, targets.to(logits).flatten(), reduction="none")

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """By the probit approximation, ``sigmoid(m / sqrt(1 + pi v / 8))``; see `classes_of_gaussian`."""
        return self.log_prob(wide(mean) * (1 + pi / 8 * wide(variance)).rsqrt(), targets)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        logits = wide(outputs).reshape(-1, 1)
        return divergence_of_classes(torch.cat([F.logsigmoid(-logits), F.logsigmoid(logits)], 1), prediction)

    def entropy(self, outputs: Tensor) -> Tensor:
        logits = as_double(outputs.reshape(len(outputs), 1))
        return entropy_of_logits(torch.cat([torch.zeros_like(logits), logits], dim=1))

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """At least three quarters of the samples keep their more probable class."""
        same = (draws.sigmoid().mean(0) > 0.5) == (outputs > 0)
        return not bool(same.float().mean() < AGREEMENT)

    def classes(self, outputs: int) -> int:
        return 2

    def predicted_class(self, outputs: Tensor) -> Tensor:
        return (outputs.reshape(outputs.shape[0]) > 0).long()

    def from_draws(self, outputs: Tensor, noise: Tensor | None = None) -> ClassPrediction:
        return ClassPrediction.from_logits(outputs, binary=True)

    def from_blocks(self, blocks: Iterable[Tensor], noise: Tensor | None = None) -> ClassPrediction:
        return classes_of_draws(blocks, binary=True)

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor,
        *,
        covariance: Tensor | Spread | None = None,
        link: str = "mc",
        n_draws: int = DRAWS,
        noise: Tensor | None = None,
    ) -> ClassPrediction:
        """By one of three links; see `classes_of_gaussian`."""
        return classes_of_gaussian(mean, variance, None, link, n_draws, binary=True)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return wide(outputs).sigmoid() - targets.to(outputs.device).reshape(outputs.shape)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = self.uniforms(outputs, keys, draw).squeeze(1)
        return (u < wide(outputs).sigmoid().flatten()).long()

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        # E_y (p - y)^2 = p (1 - p)
        logits = wide(outputs)
        yield (logits.sigmoid() * (-logits).sigmoid()).sqrt()
