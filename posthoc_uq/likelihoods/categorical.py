"""Classification: logits of several classes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from math import pi
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.fields import Field, Number
from posthoc_uq.likelihoods.base import Fisher, Likelihood
from posthoc_uq.likelihoods.outputs import divergence_of_classes, entropy_of_logits, last_function, wide
from posthoc_uq.predictions.classification import ClassPrediction
from posthoc_uq.predictions.labels import are_probabilities, checked_soft, soft_log_prob
from posthoc_uq.predictions.links import DRAWS, classes_of_gaussian
from posthoc_uq.predictions.spread import Spread
from posthoc_uq.predictions.streaming import classes_of_draws
from posthoc_uq.values import Number as Setting

AGREEMENT = 0.75  # share of the trained model's own decisions that drawn models should share
_SMOOTHING = Setting("a number in [0, 1)", least=0, most=1 - 2**-53)
_TOLERANCE = 1e-4  # how far a sum of probabilities may be from 1; more in half precision


class Categorical(Likelihood):
    """Softmax classification: outputs ``(samples, classes)`` are logits, targets ``(samples,)`` are class
    indices, or ``(samples, classes)`` the probabilities of the classes (soft labels).

    Args:
        label_smoothing: of the training's loss, as in `torch.nn.CrossEntropyLoss`: that share of every label is spread
            evenly over all classes. It is a part of `log_prob`, and so of the evidence, and of the empirical Fisher.
            The Fisher over drawn or all labels is the Hessian of the loss by the logits, ``diag(p) - p p^T``, which no
            label is in. Held-out data are rated without it.

    Raises:
        PosthocUQError: `label_smoothing` is not in [0, 1).
    """

    name = "classification"
    logits: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    optional_fields: ClassVar[Mapping[str, Field]] = {"label_smoothing": Number(0.0, 1.0)}  # if not 0
    label_smoothing: float = 0.0  # of subclasses, too, whose constructor is their own

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = float(_SMOOTHING("label_smoothing", label_smoothing))

    def attributes(self) -> dict[str, Any]:
        smoothing = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}
        return {"name": self.name, **smoothing}

    def identity(self) -> dict[str, Any]:
        return self.attributes()

    @classmethod
    def restore(cls, attributes: Mapping[str, Any]) -> Categorical:
        return cls(**{name: attributes[name] for name in cls.optional_fields if name in attributes})

    def of_targets(self) -> Categorical:
        """Without the smoothing of labels."""
        plain = copy.copy(self)
        plain.label_smoothing = 0.0
        return plain

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Categorical.fault(self, outputs, targets)
        if targets is not None and fault is not None and bool(fault):
            if targets.is_floating_point():
                checked_soft(targets)
            raise PosthocUQError(
                f"Labels run from {int(targets.min())} to {int(targets.max())}, but the model has {outputs.shape[1]} "
                f"outputs; labels must lie in 0..{outputs.shape[1] - 1}."
            )

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise PosthocUQError(
                f"likelihood='classification' needs outputs of shape (samples, classes), and the model gives "
                f"{tuple(outputs.shape)}; use likelihood='binary' for one logit, 'regression' for means."
            )
        if targets is None:
            return None
        if targets.is_floating_point() and targets.shape == outputs.shape:
            return ~are_probabilities(targets)
        if targets.shape != outputs.shape[:1] or targets.is_floating_point():
            raise PosthocUQError(
                f"Labels must be integers of shape ({outputs.shape[0]},), or probabilities of shape "
                f"{tuple(outputs.shape)}, not {targets.dtype} of shape {tuple(targets.shape)}."
            )
        return ((targets < 0) | (targets >= outputs.shape[1])).any()

    @staticmethod
    def _indices(outputs: Tensor, targets: Tensor) -> Tensor:
        """The labels as indices, clamped: `fault` may not have been read yet, and on CUDA an index out of range
        ends the process.
        """
        return targets.long().clamp(0, outputs.shape[1] - 1)

    def _shares(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The labels as probabilities ``(samples, classes)``, smoothed."""
        classes = outputs.shape[1]
        soft = targets.is_floating_point()
        shares = targets if soft else F.one_hot(self._indices(outputs, targets), classes)
        shares = shares.to(device=outputs.device, dtype=wide(outputs).dtype)
        return (1 - self.label_smoothing) * shares + self.label_smoothing / classes

    def takes(self, outputs: int) -> bool:
        return outputs >= 2

    def seems_applied(self, outputs: Tensor) -> bool:
        """Every row is non-negative and sums to 1; where all rows are equal, the outputs must also come out
        of a softmax.
        """
        values = outputs.detach().float()
        if values.ndim != 2 or values.shape[1] < 2:
            return False
        tolerance = max(_TOLERANCE, torch.finfo(outputs.dtype).eps)
        if not bool(((values.sum(1) - 1).abs() <= tolerance).all()):
            return False
        return bool((values != values[0]).any()) or last_function(outputs).startswith("Softmax")

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or self.label_smoothing:
            return soft_log_prob(self._shares(outputs, targets), wide(outputs).log_softmax(1))
        return -F.cross_entropy(wide(outputs), self._indices(outputs, targets), reduction="none")

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """By the probit approximation, ``softmax(m / sqrt(1 + pi v / 8))``; see `classes_of_gaussian`."""
        return self.log_prob(wide(mean) * (1 + pi / 8 * wide(variance)).rsqrt(), targets)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        return divergence_of_classes(wide(outputs).log_softmax(1), prediction)

    def entropy(self, outputs: Tensor) -> Tensor:
        return entropy_of_logits(as_double(outputs.reshape(len(outputs), -1)))

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """At least three quarters of the samples keep their most probable class."""
        same = draws.softmax(-1).mean(0).argmax(-1) == outputs.argmax(-1)
        return not bool(same.float().mean() < AGREEMENT)

    def classes(self, outputs: int) -> int:
        return outputs

    def predicted_class(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)

    def from_draws(self, outputs: Tensor, noise: Tensor | None = None) -> ClassPrediction:
        return ClassPrediction.from_logits(outputs)

    def from_blocks(self, blocks: Iterable[Tensor], noise: Tensor | None = None) -> ClassPrediction:
        return classes_of_draws(blocks)

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
        return classes_of_gaussian(mean, variance, covariance, link, n_draws)

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """See `Likelihood`; drawn labels are not smoothed."""
        if fisher == "mc" and self.label_smoothing:
            yield from self.of_targets().gradients(outputs, targets, keys, fisher, n_samples)
        else:
            yield from super().gradients(outputs, targets, keys, fisher, n_samples)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return wide(outputs).softmax(1) - self._shares(outputs, targets)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        u = self.uniforms(outputs, keys, draw)
        cumulative = wide(outputs).softmax(1).to(u.dtype).cumsum(1)
        return (
            torch.searchsorted(cumulative, u * cumulative[:, -1:]).squeeze(1).clamp_(max=outputs.shape[1] - 1)
        )

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        # diag(p) - p p^T has rank classes - 1. Its Cholesky factor (Tanabe & Sagae 1992) has a column for each choice
        # between a class and all classes after it, given that no earlier class was chosen.
        logits = wide(outputs)
        log_total = log_remaining = logits.logsumexp(1, keepdim=True)
        for label in range(outputs.shape[1] - 1):
            later_logits = logits[:, label + 1 :]
            log_after = later_logits.logsumexp(1, keepdim=True)
            # The root of P(none earlier) P(this | none earlier) P(a later one | none earlier).
            weight = (0.5 * (logits[:, label : label + 1] + log_after - log_remaining - log_total)).exp()
            earlier = logits.new_zeros(logits.shape[0], label)
            yield torch.cat([earlier, weight, -weight * (later_logits - log_after).exp()], 1)
            log_remaining = log_after
