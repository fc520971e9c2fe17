"""Predictions of classes: one of several, several at once, and classes with an order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.core.devices import moved
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.labels import are_soft, binary_labels, checked_soft, hard_labels, soft_log_prob
from posthoc_uq.likelihoods.prediction import (
    ClassTensors,
    Prediction,
    at_least_float32,
    cat_known,
    class_quality,
    class_votes,
    entropy_from,
    entropy_of,
    log_probabilities,
    mean_and_variance,
    retained_classes,
    retained_losses,
    shape_text,
    smallest_counts,
)

# Class probabilities together with their uncertainty.
#
# A prediction keeps a few tensors per input and never the weight samples it came from, so predictions of many
# batches can be collected with `cat`. Numbers are kept in float32 at least, whatever the model ran in. A NaN
# from the model stays a NaN in its row and does not affect other rows: every score of such a row is NaN; only
# `predicted` and the labels of `top_k` still name some class.


class TopK(NamedTuple):
    """The `k` most probable classes per input, most probable first; every tensor is (batch, k).

    Attributes:
        probabilities: of the classes.
        labels: their indices, int64.
        standard_deviations: of the classes' probabilities over the weights; None from a head or link that does not
            know them.
    """

    probabilities: Tensor
    labels: Tensor
    standard_deviations: Tensor | None = None

    @classmethod
    def of(cls, probs: Tensor, variance: Tensor | None, k: int, what: str) -> TopK:
        """From (batch, n) probabilities and their variances; `what` names them in the error of a `k` that is none."""
        if not 1 <= k <= probs.shape[1]:
            raise PosthocUQError(f"top_k needs k between 1 and the {probs.shape[1]} {what}, not {k}.")
        highest, labels = probs.topk(k, dim=1)
        return cls(highest, labels, None if variance is None else variance.gather(1, labels).sqrt())


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(Prediction):
    """Class probabilities of a batch and how far the weights disagree about them.

    Attributes:
        probs: (batch, classes), the predictive probabilities: the mean over the weights of softmax(logits).
        logits_mean: (batch, classes), mean of the logits over the weights; (batch, 1) for a binary model,
            which has a single logit.
        logits_variance: same shape, the functional variance of the logits.
        sample_entropy: (batch,), mean over the weights of the entropy in nats, or None from a head or link that
            makes no draws.
        log_probs: (batch, classes), log of `probs` where a head computes it more accurately than from float32
            probabilities (which underflow below 1e-45); None means log(probs).
        probs_variance: (batch, classes), unbiased variance over draws of the probabilities softmax(logits): draws of
            the weights, or of the logits where a head knows their distribution (``link="mc"``); None without draws.
        votes: (batch, classes), integer: how many draws put each class first; None without draws.
        novelty_ratio: (batch,), in (0, 1], the share of the prior's uncertainty that the data left; None where it was
            not asked for, or the posterior keeps nothing to tell it by.

    Raises:
        PosthocUQError: the shapes do not fit each other, or votes that are no integers.
    """

    kind: ClassVar[str] = "classes"

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    sample_entropy: Tensor | None = None
    log_probs: Tensor | None = None
    probs_variance: Tensor | None = None
    votes: Tensor | None = None
    novelty_ratio: Tensor | None = None

    def __post_init__(self) -> None:
        if self.probs.ndim != 2 or self.probs.shape[1] < 2:
            raise PosthocUQError(
                f"probs must be (batch, classes) with at least 2 classes, not {shape_text(self.probs)}; "
                "a binary model has the columns 1 - p and p."
            )
        inputs, classes = self.probs.shape
        logits_shape = self._logits_shape()
        for name, tensor, expected in (
            ("logits_mean", self.logits_mean, logits_shape),
            ("logits_variance", self.logits_variance, logits_shape),
            ("sample_entropy", self.sample_entropy, (inputs,)),
            ("log_probs", self.log_probs, (inputs, classes)),
            ("probs_variance", self.probs_variance, (inputs, classes)),
            ("votes", self.votes, (inputs, classes)),
            ("novelty_ratio", self.novelty_ratio, (inputs,)),
        ):
            if tensor is not None and tensor.shape != expected:
                raise PosthocUQError(
                    f"{name} has shape {shape_text(tensor)} where {expected} is needed, "
                    f"because probs has {shape_text(self.probs)}."
                )
        if self.votes is not None and (self.votes.is_floating_point() or self.votes.is_complex()):
            raise PosthocUQError(f"votes must be integers, not {self.votes.dtype}.")
        for name in _CLASS_FIELDS:
            value: Tensor | None = getattr(self, name)
            if value is not None and name != "votes":
                object.__setattr__(self, name, at_least_float32(value))

    def _logits_shape(self) -> tuple[int, ...]:
        """The shape that the logits must have."""
        inputs, classes = self.probs.shape
        binary = classes == 2 and self.logits_mean.shape == (inputs, 1)
        return (inputs, 1) if binary else (inputs, classes)

    @classmethod
    def from_logits(cls, logits: Tensor, *, binary: bool = False) -> ClassPrediction:
        """Average over weight samples (Monte Carlo estimate of the predictive distribution).

        `probs = 1/S sum_s softmax(logits_s)`. The variance of the logits is the unbiased estimate (divided
        by S - 1); with a single sample it is 0.

        Args:
            logits: (samples, batch, classes); with `binary` (samples, batch) or (samples, batch, 1), the
                log odds of class 1. A logit of minus infinity (a masked class) has probability 0 and counts
                as certain: variance 0.
            binary: the model has one Bernoulli logit; the prediction then has the two classes 0 and 1.

        Raises:
            PosthocUQError: wrong number of dimensions, no sample, fewer than two classes, integer logits.
        """
        logits, log_probs = log_probabilities(logits, binary)
        mean, variance = mean_and_variance(logits)
        probs = log_probs.exp()
        probs_mean, probs_variance = mean_and_variance(probs)
        samples = logits.shape[0]
        return cls(
            probs=probs_mean,
            logits_mean=mean,
            # minus infinity in every sample gives the NaN of inf - inf
            logits_variance=torch.where(torch.isneginf(mean), torch.zeros_like(variance), variance),
            sample_entropy=entropy_from(probs, log_probs).mean(dim=0),
            log_probs=torch.logsumexp(log_probs, dim=0) - math.log(samples),
            probs_variance=probs_variance,
            votes=smallest_counts(class_votes(log_probs), samples),
        )

    def __len__(self) -> int:
        """Number of inputs."""
        return self.probs.shape[0]

    def __repr__(self) -> str:
        return f"ClassPrediction(inputs={len(self)}, classes={self.probs.shape[1]})"

    @property
    def classes(self) -> int:
        """The number of classes; 2 for a binary model."""
        return self.probs.shape[1]

    @property
    def outputs_mean(self) -> Tensor:
        """The mean of the logits."""
        return self.logits_mean

    @property
    def default_score(self) -> str:
        """The entropy."""
        return "entropy"

    def entropy(self) -> Tensor:
        """(batch,), in nats: total uncertainty, the entropy of the mean probabilities, -sum_c p_c log p_c."""
        return entropy_of(self.probs)

    def expected_entropy(self) -> Tensor:
        """(batch,), in nats: the uncertainty of the label for known weights, E_w[H(p(y | x, w))].

        Raises:
            PosthocUQError: the head that made this prediction does not give it.
        """
        if self.sample_entropy is None:
            raise PosthocUQError(
                'This prediction holds no expected entropy, because it was made without draws; use link="mc" (the '
                'default) or head="sampling" for expected entropy and mutual information.'
            )
        return self.sample_entropy

    def mutual_information(self) -> Tensor:
        """(batch,), in nats: the information that the weights hold about the label, I[y; w | x].

        The difference of `entropy` and `expected_entropy`, never below 0 (Houlsby et al., "Bayesian Active
        Learning for Classification and Preference Learning", 2011; there called BALD).

        Raises:
            PosthocUQError: the head that made this prediction gives no expected entropy.
        """
        return (self.entropy() - self.expected_entropy()).clamp(min=0)

    def variation_ratio(self) -> Tensor:
        """(batch,), in [0, 1 - 1 / classes]: the share of draws whose most probable class is not the majority's.

        `1 - max_c votes_c / sum_c votes_c` (Freeman, "Elementary Applied Statistics", 1965), where every draw
        votes for its most probable class. NaN where the probabilities are.

        Raises:
            PosthocUQError: this prediction was made without draws.
        """
        if self.votes is None:
            raise PosthocUQError(
                'This prediction holds no votes, because it was made without draws; use link="mc" (the default) or '
                'head="sampling" for the variation ratio.'
            )
        votes = self.votes.to(self.probs.dtype)
        ratio = 1 - votes.amax(dim=-1) / votes.sum(dim=-1)
        return ratio.masked_fill(self.probs.isnan().any(dim=-1), math.nan)

    def epistemic(self) -> Tensor:
        """(batch,): epistemic uncertainty, the mean over classes of the variance of the logits."""
        return self.logits_variance.mean(dim=-1)

    def max_probability(self) -> Tensor:
        """(batch,): the probability of the predicted class, the usual confidence."""
        return self.probs.amax(dim=-1)

    def predicted(self) -> Tensor:
        """(batch,), int64: the most probable class."""
        return self.probs.argmax(dim=-1)

    def top_k(self, k: int) -> TopK:
        """The `k` most probable classes, most probable first, with the spread of their probabilities if known.

        Raises:
            PosthocUQError: `k` is below 1 or above the number of classes.
        """
        return TopK.of(self.probs, self.probs_variance, k, "classes")

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log of the mean probability of the given classes.

        Args:
            targets: (batch,), integer labels; of a binary model also (batch, 1), and floats 0 and 1, as `fit` takes
                them. Of soft labels, probabilities (batch, classes), the mean over them.

        Raises:
            PosthocUQError: wrong shape, labels that are not integers or out of range.
        """
        inputs, classes = self.probs.shape
        log_probs = self.probs.log() if self.log_probs is None else self.log_probs
        if are_soft(targets, self.probs):
            return soft_log_prob(targets, log_probs)
        if self.logits_mean.shape[1] == 1:
            targets = binary_labels(targets)
        if targets.shape != (inputs,) or targets.is_floating_point() or targets.is_complex():
            raise PosthocUQError(
                f"log_prob needs {inputs} integer labels of shape ({inputs},), not {targets.dtype} of shape "
                f"{shape_text(targets)}."
            )
        # checked here: an index out of range makes a GPU unusable for the rest of the process
        if inputs and not bool(((targets >= 0) & (targets < classes)).all()):
            raise PosthocUQError(f"log_prob needs labels between 0 and {classes - 1}.")
        index = targets.to(device=log_probs.device, dtype=torch.int64).unsqueeze(-1)
        return log_probs.gather(-1, index).squeeze(-1)

    def fitting(self, targets: Tensor) -> Tensor:
        """Labels (batch,), int64, of labels with more dimensions or in another type; soft labels as they are.

        Raises:
            PosthocUQError: they are neither one whole number an input nor its probabilities.
        """
        if are_soft(targets, self.probs):
            return checked_soft(targets)
        labels = targets.flatten()
        integral = not labels.is_floating_point() or bool((labels == labels.round()).all())
        if len(labels) != len(self) or not integral:
            raise PosthocUQError(
                f"Classification needs one label an input; there are {len(self)} inputs and targets of shape "
                f"{shape_text(targets)}."
            )
        return labels.long()

    def labels(self, targets: Tensor) -> Tensor:
        """Labels (batch,) of targets as `fitting` gives them: of soft labels the most probable class."""
        return hard_labels(targets, self.probs)

    def scores(self) -> dict[str, Tensor]:
        """See `Prediction`: the scores of classes."""
        scores = {
            "entropy": self.entropy(),
            "mutual_information": None if self.sample_entropy is None else self.mutual_information(),
            "max_probability": 1 - self.max_probability(),
            "functional_variance": self.epistemic(),
            "variation_ratio": None if self.votes is None else self.variation_ratio(),
            "novelty": self.novelty_ratio,
        }
        return {name: score for name, score in scores.items() if score is not None}

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Accuracy, NLL, Brier score, calibration errors and the mean entropy; but for the NLL, of soft labels those of
        the most probable class.
        """
        labels = self.labels(targets)
        return class_quality(self.probs, lambda _: self.log_prob(targets), self.entropy(), labels, bins)

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): 1 where the predicted class is wrong."""
        return (self.predicted() != self.labels(targets)).double()

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """Accuracies, and for two classes areas under the ROC curve."""
        return retained_classes(scores, self.probs, self.labels(targets), rates)

    def of_one_network(self) -> ClassPrediction:
        """The same without expected entropy, votes and the variance of the probabilities."""
        return replace(self, sample_entropy=None, probs_variance=None, votes=None)

    def tensors(self) -> ClassTensors:
        """See `Prediction`."""
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
            "entropy": self.entropy(),
            "epistemic": self.epistemic(),
        }
        if self.sample_entropy is not None:
            values["expected_entropy"] = self.sample_entropy
            values["mutual_information"] = self.mutual_information()
        if self.probs_variance is not None:
            values["probs_variance"] = self.probs_variance
        if self.votes is not None:
            values["votes"] = self.votes
            values["variation_ratio"] = self.variation_ratio()
        if self.novelty_ratio is not None:
            values["novelty"] = self.novelty_ratio
        return values

    def to(self, device: torch.device | str) -> ClassPrediction:
        """The same prediction with its tensors on `device`."""
        known = self._known()
        return replace(self, **dict(zip(known, moved(known.values(), device), strict=True)))

    def picked(self, chosen: Tensor) -> ClassPrediction:
        """The inputs where `chosen` (batch,) is true."""
        return replace(self, **{name: value[chosen] for name, value in self._known().items()})

    def _known(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _CLASS_FIELDS if getattr(self, name) is not None}

    @staticmethod
    def cat(predictions: Sequence[ClassPrediction]) -> ClassPrediction:
        """Predictions of several batches as one, in order; a field that one of them lacks is None in the result.

        Raises:
            PosthocUQError: nothing to join, or numbers of classes or of logits that differ.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        widths = {(p.probs.shape[1], p.logits_mean.shape[1]) for p in predictions}
        if len(widths) > 1:
            raise PosthocUQError(f"cat got predictions of different (classes, logits): {sorted(widths)}.")
        exact = any(p.log_probs is not None for p in predictions)
        log_probs = [p.probs.log() if p.log_probs is None else p.log_probs for p in predictions]
        return type(predictions[0])(
            torch.cat([p.probs for p in predictions]),
            torch.cat([p.logits_mean for p in predictions]),
            torch.cat([p.logits_variance for p in predictions]),
            cat_known([p.sample_entropy for p in predictions]),
            torch.cat(log_probs) if exact else None,
            cat_known([p.probs_variance for p in predictions]),
            cat_known([p.votes for p in predictions]),
            cat_known([p.novelty_ratio for p in predictions]),
        )


_CLASS_FIELDS = tuple(field.name for field in fields(ClassPrediction))


# Probabilities of several labels that an input may have together, with their uncertainty.


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
        for name in _MULTILABEL_FIELDS:
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
        known = {name: getattr(self, name) for name in _MULTILABEL_FIELDS if getattr(self, name) is not None}
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
        joined = {name: cat_known([getattr(p, name) for p in predictions]) for name in _MULTILABEL_FIELDS}
        return replace(predictions[0], **joined)


_MULTILABEL_FIELDS = tuple(field.name for field in fields(MultilabelPrediction))


# Probabilities of classes that have an order.


@dataclass(frozen=True, eq=False, repr=False)
class OrdinalPrediction(ClassPrediction):
    """A `ClassPrediction` of classes 0, 1, ... that have an order. `logits_mean` and `logits_variance` are of the
    model's own outputs: (batch, classes - 1), or (batch, 1) with thresholds.
    """

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
