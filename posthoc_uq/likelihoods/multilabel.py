"""Several labels that an input may have together: one logit for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.likelihoods.categorical import AGREEMENT
from posthoc_uq.likelihoods.outputs import last_function, wide
from posthoc_uq.likelihoods.separate import SeparateOutputs
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.links import DRAWS, classes_of_gaussian
from posthoc_uq.predictions.multilabel import MultilabelPrediction
from posthoc_uq.predictions.spread import Spread
from posthoc_uq.predictions.streaming import classes_of_draws


class Multilabel(SeparateOutputs):
    """Independent Bernoulli labels: outputs ``(samples, labels)`` are logits, targets 0 or 1 of the same shape."""

    name = "multilabel"
    logits: ClassVar[bool] = True
    joint: ClassVar[bool] = False

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Multilabel.fault(self, outputs, targets)
        if fault is not None and bool(fault):
            raise PosthocUQError("Labels for likelihood='multilabel' must be 0 or 1.")

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.ndim != 2:
            raise PosthocUQError(
                f"likelihood='multilabel' needs outputs of shape (samples, labels), and the model gives "
                f"{tuple(outputs.shape)}."
            )
        if targets is None:
            return None
        if targets.shape != outputs.shape:
            raise PosthocUQError(
                f"Labels must be 0 or 1 for each of {outputs.shape[1]} labels, shaped {tuple(outputs.shape)} like the "
                f"outputs, not {tuple(targets.shape)}; one class an input is likelihood='classification'."
            )
        return ((targets != 0) & (targets != 1)).any()

    def takes(self, outputs: int) -> bool:
        return outputs >= 1

    def seems_applied(self, outputs: Tensor) -> bool:
        """The outputs come out of a sigmoid."""
        return last_function(outputs).startswith("Sigmoid")

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = wide(outputs)
        return -F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs).expand(outputs.shape), reduction="none"
        )

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        """In closed form; the mean over labels, so that a budget does not depend on their number."""
        logits = wide(outputs)
        logs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)
        terms = torch.where(logs.isneginf(), 0.0, logs.exp() * (logs - prediction.log_probs))
        return terms.sum(-1).mean(1)

    def entropy(self, outputs: Tensor) -> Tensor:
        logits = as_double(outputs)
        # the logarithms of both probabilities, weighted with them
        return -(F.logsigmoid(logits) * logits.sigmoid() + F.logsigmoid(-logits) * (-logits).sigmoid()).sum(1)

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """At least three quarters of all decisions, label by label, stay."""
        same = (draws.sigmoid().mean(0) > 0.5) == (outputs > 0)
        return not bool(same.float().mean() < AGREEMENT)

    def from_draws(self, outputs: Tensor, noise: Tensor | None = None) -> MultilabelPrediction:
        """By the draws' means."""
        if outputs.ndim != 3:
            raise PosthocUQError(f"logits must be (draws, batch, labels), not {tuple(outputs.shape)}.")
        pairs = ClassPrediction.from_logits(outputs.flatten(1), binary=True)
        return MultilabelPrediction.of_pairs(pairs, outputs.shape[2])

    def from_blocks(self, blocks: Iterable[Tensor], noise: Tensor | None = None) -> MultilabelPrediction:
        widths: list[int] = []

        def flat() -> Iterator[Tensor]:
            for block in blocks:
                widths.append(block.shape[2])
                yield block.flatten(1)

        pairs = classes_of_draws(flat(), binary=True)
        return MultilabelPrediction.of_pairs(pairs, widths[0])

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor,
        *,
        covariance: Tensor | Spread | None = None,
        link: str = "mc",
        n_draws: int = DRAWS,
        noise: Tensor | None = None,
    ) -> MultilabelPrediction:
        """Every label by itself, by one of three links; see `classes_of_gaussian`."""
        pairs = classes_of_gaussian(mean.reshape(-1), variance.reshape(-1), None, link, n_draws, binary=True)
        return MultilabelPrediction.of_pairs(pairs, mean.shape[1])

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return wide(outputs).sigmoid() - targets.to(outputs.device)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = self.uniforms(outputs, keys, draw, outputs.shape[1])
        return (u < wide(outputs).sigmoid()).long()

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        # labels are independent, and E (p - y)^2 = p (1 - p)
        logits = wide(outputs)
        roots = (logits.sigmoid() * (-logits).sigmoid()).sqrt()
        for index in range(roots.shape[1]):
            factor = torch.zeros_like(roots)
            factor[:, index] = roots[:, index]
            yield factor
