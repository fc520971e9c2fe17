"""Probabilities of several labels that an input may have together, with their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from posthoc_uq import metrics
from posthoc_uq.devices import moved
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.classification import ClassPrediction, TopK
from posthoc_uq.predictions.measures import retained_losses
from posthoc_uq.predictions.samples import at_least_float32, cat_known, shape_text
from posthoc_uq.predictions.tensors import ClassTensors


@dataclass(frozen=True, eq=False, repr=False)
class MultilabelPrediction(Prediction):
    """The probability of every label, and how far the weights disagree about it.

    Labels count as independent: what is said of all labels of an input together (`entropy`, `log_prob`) is the sum over
    labels, without what the weights make them have in common.

    Attributes:
        probs: (batch, labels), the predictive probabilities of having the label: means over the weights of
            sigmoid(logit).
        logits_mean: (batch, labels), mean of the logits over the weights.
        logits_variance: same shape, their variance.
        log_probs: (batch, labels, 2), logarithms of the probabilities of not having and of having the label.
        sample_entropy: (batch, labels), mean over the weights of the label's entropy in nats; None without draws.
        probs_variance: (batch, labels), variance over draws of sigmoid(logit); None without draws.
        novelty_ratio: (batch,), see `Prediction`.

    Raises:
        PosthocUQError: the shapes do not fit each other.
    """

    of: ClassVar[str] = "likelihood='multilabel'"
    kind: ClassVar[str] = "labels"

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    log_probs: Tensor
    sample_entropy: Tensor | None = None
    probs_variance: Tensor | None = None
    novelty_ratio: Tensor | None = None

    def __post_init__(self) -> None:
        if self.probs.ndim != 2:
            raise PosthocUQError(f"probs must be (batch, labels), not {shape_text(self.probs)}.")
        shape = tuple(self.probs.shape)
        for name in _FIELDS:
            value: Tensor | None = getattr(self, name)
            expected = {"log_probs": (*shape, 2), "novelty_ratio": shape[:1]}.get(name, shape)
            if value is None:
                continue
            if value.shape != expected:
                raise PosthocUQError(
                    f"{name} has shape {shape_text(value)} where {expected} is needed, because probs has "
                    f"{shape_text(self.probs)}."
                )
            object.__setattr__(self, name, at_least_float32(value))

    @classmethod
    def of_pairs(cls, binary: ClassPrediction, labels: int) -> MultilabelPrediction:
        """From the prediction of every label by itself.

        Args:
            binary: of ``batch * labels`` single logits, the labels of one input side by side.
            labels: how many an input has.
        """

        def shaped(column: Tensor | None) -> Tensor | None:
            return None if column is None else column.reshape(-1, labels)

        pairs = binary.probs.log() if binary.log_probs is None else binary.log_probs
        spread = binary.probs_variance
        return cls(
            binary.probs[:, 1].reshape(-1, labels),
            binary.logits_mean.reshape(-1, labels),
            binary.logits_variance.reshape(-1, labels),
            pairs.reshape(-1, labels, 2),
            shaped(binary.sample_entropy),
            None if spread is None else shaped(spread[:, 1]),
        )

    def __len__(self) -> int:
        """Number of inputs."""
        return self.probs.shape[0]

    def __repr__(self) -> str:
        return f"MultilabelPrediction(inputs={len(self)}, labels={self.probs.shape[1]})"

    @property
    def outputs_mean(self) -> Tensor:
        """The mean of the logits."""
        return self.logits_mean

    @property
    def default_score(self) -> str:
        """The entropy."""
        return "entropy"

    def label_entropy(self) -> Tensor:
        """(batch, labels), in nats: the entropy of every label's mean probability."""
        return -(self.log_probs.exp() * self.log_probs.clamp(min=torch.finfo(self.probs.dtype).min)).sum(-1)

    def entropy(self) -> Tensor:
        """(batch,), in nats: the sum of the labels' entropies."""
        return self.label_entropy().sum(-1)

    def expected_label_entropy(self) -> Tensor:
        """(batch, labels), in nats: the entropy of every label for known weights, mean over the weights.

        Raises:
            PosthocUQError: the prediction was made without draws.
        """
        if self.sample_entropy is None:
            raise PosthocUQError(
                'This prediction holds no expected entropy, because it was made without draws; use link="mc" (the '
                'default) or head="sampling" for expected entropy and mutual information.'
            )
        return self.sample_entropy

    def expected_entropy(self) -> Tensor:
        """(batch,), in nats: the sum over labels of `expected_label_entropy`."""
        return self.expected_label_entropy().sum(-1)

    def label_mutual_information(self) -> Tensor:
        """(batch, labels), in nats: the information that the weights hold about each label; never below 0.

        Raises:
            PosthocUQError: the prediction was made without draws.
        """
        return (self.label_entropy() - self.expected_label_entropy()).clamp(min=0)

    def mutual_information(self) -> Tensor:
        """(batch,), in nats: the sum over labels of `label_mutual_information`."""
        return self.label_mutual_information().sum(-1)

    def epistemic(self) -> Tensor:
        """(batch,): the mean over labels of the variance of the logits."""
        return self.logits_variance.mean(dim=-1)

    def max_probability(self) -> Tensor:
        """(batch,): the probability that all decisions of `predicted` are right, the product over labels."""
        return self.log_probs.amax(-1).sum(-1).exp()

    def predicted(self, threshold: float = 0.5) -> Tensor:
        """(batch, labels), boolean: the labels whose probability is above the threshold."""
        return self.probs > threshold

    def top_k(self, k: int) -> TopK:
        """The `k` most probable labels, most probable first, with the spread of their probabilities if known.

        Raises:
            PosthocUQError: `k` is below 1 or above the number of labels.
        """
        return TopK.of(self.probs, self.probs_variance, k, "labels")

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: the sum over labels of the log of the mean probability.

        Args:
            targets: (batch, labels), 0 or 1.

        Raises:
            PosthocUQError: wrong shape, or other values.
        """
        targets = self.fitting(targets).to(self.probs.device)
        return self.log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).sum(-1)

    def fitting(self, targets: Tensor) -> Tensor:
        """The labels as int64.

        Raises:
            PosthocUQError: wrong shape, or values other than 0 and 1.
        """
        if targets.shape != self.probs.shape:
            raise PosthocUQError(
                f"Labels must be shaped like the probabilities, {shape_text(self.probs)}, not {shape_text(targets)}."
            )
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise PosthocUQError("Labels must be 0 or 1.")
        return targets.long()

    def scores(self) -> dict[str, Tensor]:
        """See `Prediction`: those of classes, each a sum over labels, or for the variance a mean."""
        scores = {
            "entropy": self.entropy(),
            "mutual_information": None if self.sample_entropy is None else self.mutual_information(),
            "max_probability": 1 - self.max_probability(),
            "functional_variance": self.epistemic(),
            "novelty": self.novelty_ratio,
        }
        return {name: score for name, score in scores.items() if score is not None}

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Mean average precision, F1, Hamming loss, NLL (sum over labels), Brier score, ECE, mean entropy."""
        return {
            "mAP": metrics.mean_average_precision(self.probs, targets),
            "F1 (macro)": metrics.f1_score(self.probs, targets),
            "F1 (micro)": metrics.f1_score(self.probs, targets, "micro"),
            "Hamming loss": metrics.hamming_loss(self.probs, targets),
            "NLL": -float(self.log_prob(targets).double().mean()),
            "Brier": metrics.multilabel_brier_score(self.probs, targets),
            "ECE": metrics.multilabel_calibration_error(self.probs, targets, bins),
            "mean entropy": float(self.entropy().double().mean()),
        }

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the share of the labels that are decided wrongly."""
        return (self.predicted() != targets.bool()).double().mean(-1)

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """Hamming losses."""
        return retained_losses("Hamming loss", scores, self.losses(targets), rates)

    def of_one_network(self) -> MultilabelPrediction:
        """The same without expected entropy and the variance of the probabilities."""
        return replace(self, sample_entropy=None, probs_variance=None)

    def tensors(self) -> ClassTensors:
        """See `Prediction`; entropy and mutual information are sums over labels."""
        entropy = self.entropy()
        known = self.sample_entropy is not None
        information = self.mutual_information() if known else torch.full_like(entropy, float("nan"))
        return ClassTensors(self.probs, self.logits_mean, self.logits_variance, entropy, information)

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name, and the scores computed from them; unknown ones are left out."""
        values = {
            "probs": self.probs,
            "logits_mean": self.logits_mean,
            "logits_variance": self.logits_variance,
            "predicted": self.predicted(),
            "label_entropy": self.label_entropy(),
            "entropy": self.entropy(),
            "epistemic": self.epistemic(),
        }
        if self.sample_entropy is not None:
            values["label_mutual_information"] = self.label_mutual_information()
            values["mutual_information"] = self.mutual_information()
        for name, value in (("probs_variance", self.probs_variance), ("novelty", self.novelty_ratio)):
            if value is not None:
                values[name] = value
        return values

    def to(self, device: torch.device | str) -> MultilabelPrediction:
        """The same prediction with its tensors on `device`."""
        known = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}
        return replace(self, **dict(zip(known, moved(known.values(), device), strict=True)))

    @staticmethod
    def cat(predictions: Sequence[MultilabelPrediction]) -> MultilabelPrediction:
        """Predictions of several batches as one, in order; a field that one of them lacks is None in the result.

        Raises:
            PosthocUQError: nothing to join, or numbers of labels that differ.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        widths = {p.probs.shape[1] for p in predictions}
        if len(widths) > 1:
            raise PosthocUQError(f"cat got predictions of different numbers of labels: {sorted(widths)}.")
        joined = {name: cat_known([getattr(p, name) for p in predictions]) for name in _FIELDS}
        return replace(predictions[0], **joined)


_FIELDS = tuple(field.name for field in fields(MultilabelPrediction))
