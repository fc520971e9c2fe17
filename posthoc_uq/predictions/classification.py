"""Class probabilities together with their uncertainty.

A prediction keeps a few tensors per input and never the weight samples it came from, so predictions of many
batches can be collected with `cat`. Numbers are kept in float32 at least, whatever the model ran in. A NaN from the
model stays a NaN in its row and does not affect other rows: every score of such a row is NaN; only `predicted` and the
labels of `top_k` still name some class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posthoc_uq.devices import moved
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.labels import are_soft, binary_labels, checked_soft, hard_labels, soft_log_prob
from posthoc_uq.predictions.measures import class_quality, retained_classes
from posthoc_uq.predictions.samples import (
    at_least_float32,
    cat_known,
    class_votes,
    entropy_from,
    entropy_of,
    log_probabilities,
    mean_and_variance,
    shape_text,
    smallest_counts,
)
from posthoc_uq.predictions.tensors import ClassTensors


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

    of: ClassVar[str] = "likelihood='classification' or 'binary'"
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
        for name in _FIELDS:
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
        return {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}

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


_FIELDS = tuple(field.name for field in fields(ClassPrediction))
