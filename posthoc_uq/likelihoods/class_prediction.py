"""Class probabilities with their uncertainty, from draws of the logits and from Gaussian logits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm, log, log1p, pi
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.batches import as_targets
from posthoc_uq.core.devices import as_double, at_least_float32, widest_dtype
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.randomness import uniforms
from posthoc_uq.likelihoods import metrics, selective
from posthoc_uq.likelihoods.conformal import (
    SET_SIZE,
    ConformalScores,
    Coverage,
    SetScore,
    TargetScores,
    class_scores,
    without_by_class,
)
from posthoc_uq.likelihoods.draws import (
    EXACT,
    LogitCovariance,
    Moments,
    OutputGaussian,
    gathered,
    independent,
    mean_of,
    moments_of_mixture,
    of_covariance,
)
from posthoc_uq.likelihoods.labels import (
    are_soft,
    binary_labels,
    checked_soft,
    outside,
    refuse_soft,
    soft_log_prob,
)
from posthoc_uq.likelihoods.logits import GaussianLogits, smallest
from posthoc_uq.likelihoods.logits import votes as votes_of
from posthoc_uq.likelihoods.prediction import (
    ClassTensors,
    OnDemand,
    Prediction,
    ScoresWhenRead,
    with_percent,
)


def entropy_of(log_probs: Tensor, probs: Tensor | None = None) -> Tensor:
    """Entropy in nats over the last dimension, from logarithms of probabilities; a probability of 0 adds nothing.

    Args:
        log_probs: of any shape.
        probs: their exponentials, where these are there already.
    """
    # 0 * -inf would be NaN
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    return -((log_probs.exp() if probs is None else probs) * finite).sum(dim=-1)


def divergence_of_classes(log_probs: Tensor, predicted: Tensor) -> Tensor:
    """``sum_c p_c (log p_c - log q_c)`` over the last dimension, from logarithms of the network's probabilities and of
    the predicted ones; a class that the network gives probability zero adds nothing.
    """
    probs = log_probs.exp()
    terms = torch.where(probs > 0, probs * (log_probs - predicted), torch.zeros_like(probs))
    return terms.sum(-1)


class TopK(NamedTuple):
    """The `k` most probable classes per input, most probable first; every tensor is (batch, k).

    Attributes:
        probabilities: of the classes.
        labels: their indices, int64.
        standard_deviations: of the classes' probabilities over the weights; None without draws.
    """

    probabilities: Tensor
    labels: Tensor
    standard_deviations: Tensor | None = None


def no_interval_error() -> PosthocUQError:
    """The error of an interval of classes that have no order."""
    return PosthocUQError(
        "Classes have no intervals; prediction.set(level) has those that hold the right one."
    )


class MixedLogits(NamedTuple):
    """What a mixture of predictions of classes or labels computes of its parts when it is read, in place of
    `GaussianLogits`. A part that knows no expected entropy, as with ``link="probit"``,
    counts as certain of its weights.

    Attributes:
        parts: predictions of the same inputs.
    """

    parts: tuple[Any, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What batches that are joined have in common."""
        return tuple(None if part.logits is None else part.logits.kind for part in self.parts)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> MixedLogits:
        """The same with every tensor changed."""
        return MixedLogits(tuple(_mapped(part, change) for part in self.parts))

    @staticmethod
    def cat(mixtures: Sequence[MixedLogits]) -> MixedLogits:
        """Several batches of one `kind`."""
        by_part = zip(*(mixture.parts for mixture in mixtures), strict=True)
        return MixedLogits(tuple(type(parts[0]).cat(parts) for parts in by_part))

    def entropy(self) -> Tensor:
        """The mean of the expected entropies, ``(batch,)``, or of labels ``(batch, labels)``."""
        own = [part.sample_entropy for part in self.parts]
        return mean_of(
            [
                entropy_of(part.log_probs) if known is None else known
                for part, known in zip(self.parts, own, strict=True)
            ]
        )

    def entropy_and_variance(self) -> tuple[Tensor, Tensor]:
        """`entropy`, and the variances of the probabilities, in their shape."""
        probs = [part.probs for part in self.parts]
        within = [
            torch.zeros_like(part.probs) if part.probs_variance is None else part.probs_variance
            for part in self.parts
        ]
        return self.entropy(), moments_of_mixture(probs, within)[1]

    def votes(self) -> Tensor:
        """How many draws put each class first, ``(batch, classes)``, as if all parts had equally many."""
        votes = list[Tensor]()
        for part in self.parts:
            found = part.votes
            votes.append(votes_of(part.predicted().unsqueeze(0), part.classes) if found is None else found)
        counts = [int(each[0].sum()) if len(each) else 1 for each in votes]
        common = lcm(*counts)
        total = torch.stack([each.long() * (common // n) for each, n in zip(votes, counts, strict=True)]).sum(
            0
        )
        return smallest(total, common * len(votes))


def _mapped(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    known, logits = vars(part), part.logits
    values = {name: change(known[name]) for name in part._dims if known[name] is not None}
    return part.changed(**values, logits=None if logits is None else logits.mapped(change))


AnyLogits = TypeVar("AnyLogits", bound="LogitsPrediction")


@dataclass(frozen=True, eq=False, repr=False)
class LogitsPrediction(Prediction):
    """What predictions of one of several classes, and of several labels at once, have in common; see there."""

    default_score: ClassVar[str] = "entropy"
    _tuples: ClassVar[tuple[str, ...]] = ("logits",)
    _over_draws: ClassVar[tuple[str, ...]] = ("sample_entropy", "probs_variance", "logits")
    _not_shown: ClassVar[tuple[str, ...]] = ("sample_entropy", "log_probs")
    _hidden: ClassVar[tuple[str, ...]] = ("counted", "labels", "logits", "of_pairs", "rows", "whole")
    _computed: ClassVar[dict[str, tuple[str, ...]]] = {
        "predicted": (),
        "entropy": (),
        "mutual_information": ("sample_entropy",),
    }

    probs: Annotated[Tensor, "batch classes"]
    logits_mean: Annotated[Tensor, "batch logits"]
    logits_variance: Annotated[Tensor, "batch logits"]
    sample_entropy: Annotated[Tensor | None, "batch"] = OnDemand()  # type: ignore[assignment]  # noqa: RUF009
    log_probs: Annotated[Tensor, "batch classes"] = None  # type: ignore[assignment]  # log(probs)
    probs_variance: Annotated[Tensor | None, "batch classes"] = OnDemand()  # type: ignore[assignment]  # noqa: RUF009
    logits: GaussianLogits | MixedLogits | None = field(default=None, kw_only=True)

    def __dir__(self) -> list[str]:
        ordered = type(self).interval is not ClassPrediction.interval  # other classes have no intervals
        return [name for name in super().__dir__() if name != "interval" or ordered]

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Of predictions of values: bounds of them with a promised probability."""
        raise no_interval_error()

    @classmethod
    def mixed(cls, predictions: Sequence[Any]) -> Any:
        """See `Prediction`: the mean of the probabilities. The expected entropy is the mean over networks and their
        weights, so that `mutual_information` has what the networks disagree about, too.
        """
        means, variances = [p.logits_mean for p in predictions], [p.logits_variance for p in predictions]
        mean, variance = moments_of_mixture(means, variances)
        return cls(
            mean_of([p.probs for p in predictions]),
            mean,
            variance,
            log_probs=torch.stack([p.log_probs for p in predictions]).logsumexp(0) - log(len(predictions)),
            logits=MixedLogits(tuple(predictions)),
        )

    def _computed_later(self, name: str) -> dict[str, Tensor]:
        if self.logits is None or name not in self._over_draws:
            return {}
        if torch.compiler.is_compiling() and name == "sample_entropy":  # a program does not use the variance
            return {name: self.logits.entropy()}
        return dict(
            zip(("sample_entropy", "probs_variance"), self.logits.entropy_and_variance(), strict=True)
        )

    @property
    def outputs_mean(self) -> Tensor:
        """The mean of the logits."""
        return self.logits_mean

    def expected_entropy(self) -> Tensor:
        """(batch,), in nats: the uncertainty of the label for known weights, E_w[H(p(y | x, w))].

        Raises:
            PosthocUQError: the prediction was made without draws.
        """
        found = self._known_sample_entropy()
        return found if found.ndim == 1 else found.sum(-1)

    def _known_sample_entropy(self) -> Tensor:
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
            PosthocUQError: the prediction was made without draws.
        """
        return (self.entropy() - self.expected_entropy()).clamp(min=0)

    @property
    def epistemic_variance(self) -> Tensor:
        """Of the logits: their variance over the weights, `logits_variance`. Predictions of all kinds have this name
        for the variance of their mean; the score is its mean over the logits.
        """
        return self.logits_variance

    def max_probability(self) -> Tensor:
        """(batch,): the probability of what is predicted, the usual confidence."""
        return self.probs.amax(dim=-1)

    def predicted(self) -> Tensor:
        """(batch,), int64: the most probable class."""
        return self.probs.argmax(dim=-1)

    def top_k(self, k: int) -> TopK:
        """The `k` most probable classes, most probable first, with the spread of their probabilities if known.

        Raises:
            PosthocUQError: `k` is below 1 or above the number of classes.
        """
        if not 1 <= k <= self.probs.shape[1]:
            raise PosthocUQError(
                f"top_k needs k between 1 and the {self.probs.shape[1]} {self.kind}, not {k}."
            )
        highest, labels = self.probs.topk(k, dim=1)
        variance = self.probs_variance
        return TopK(highest, labels, None if variance is None else variance.gather(1, labels).sqrt())

    @property
    def rows(self: AnyLogits) -> AnyLogits:
        """All probabilities as rows of classes or labels: itself, and of positions one prediction of all of them."""
        return self

    def whole(self, values: Tensor) -> Tensor:
        """Numbers of the `rows` in the layout of the outputs."""
        return values

    @abstractmethod
    def _decided(self, label: Callable[[int], str], tops: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """By input what `answers` begin with, from the most probable classes or labels of each."""

    def answers(
        self, *, top_k: int = 5, level: float = 0.9, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """See `Prediction`."""
        label, found = self.naming(names), self.top_k(min(top_k, self.probs.shape[1]))
        tops = [
            [{"label": label(i), "index": i, "probability": p} for i, p in zip(indices, values, strict=True)]
            for indices, values in zip(found.labels.tolist(), found.probabilities.tolist(), strict=True)
        ]
        answers = [own | {"top": top} for own, top in zip(self._decided(label, tops), tops, strict=True)]
        if isinstance(self.promises, ConformalScores):
            for answer, row in zip(answers, self.set(level).tolist(), strict=True):
                answer |= {"set": [label(i) for i, held in enumerate(row) if held], "level": level}
        return answers

    @without_by_class
    def set(self, level: float = 0.9, *, allow_empty: bool = False) -> Tensor:
        """The classes that a set holds which contains the label with a probability of at least `level`, over inputs
        like the held-out ones: those whose score is at most the ``ceil((n + 1) level)``-th smallest of the held-out
        labels' scores. See `posthoc_uq.calibrate`; of a likelihood of several labels, each label that applies is in the
        set with that probability.

        Args:
            level: in (0, 1).
            allow_empty: whether a set may be empty; otherwise it then holds the most probable class. A set of several
                labels always may.

        Returns:
            (batch, classes), bool.

        Raises:
            PosthocUQError: the posterior has no held-out scores for this head and these hyperparameters, or too few for
                the level.
        """
        probs = self.at_promises().probs
        return self.known_promises().sets(probs, level, allow_empty, self.sample_keys)

    def scores(self) -> ScoresWhenRead:
        """See `Prediction`: entropy, mutual information, 1 - `max_probability`, the logits' variance, novelty."""
        known, of_draws = vars(self), () if self.logits is None else self._over_draws
        return ScoresWhenRead(
            {
                name: compute
                for name, (needed, compute) in self._score_fields().items()
                if needed in of_draws or known[needed] is not None
            }
        )

    def _score_fields(self) -> dict[str, tuple[str, Callable[[], Tensor]]]:
        """Of each score the field that it needs, and what computes it."""
        return {
            "entropy": ("probs", self.entropy),
            "mutual_information": ("sample_entropy", self.mutual_information),
            "max_probability": ("probs", lambda: 1 - self.max_probability()),
            "epistemic_variance": ("probs", lambda: self.epistemic_variance.mean(dim=-1)),
            "novelty": ("novelty_ratio", self.novelty),
        }

    def tensors(self) -> ClassTensors:
        entropy = self.entropy()
        known = self.sample_entropy is not None
        information = self.mutual_information() if known else torch.full_like(entropy, float("nan"))
        return ClassTensors(
            self.probs,
            self.logits_mean,
            self.logits_variance,
            entropy,
            information,
            self._novelty_like(entropy),
        )


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(LogitsPrediction):
    """Class probabilities of a batch and how far the weights disagree about them.

    Attributes:
        probs: (batch, classes), the predictive probabilities: the mean over the weights of softmax(logits).
        logits_mean: (batch, classes), mean of the logits over the weights; (batch, 1) for a binary model,
            which has a single logit.
        logits_variance: same shape, their variance over the weights; also called `epistemic_variance`.
        sample_entropy: (batch,), mean over the weights of the entropy in nats, or None without draws.
        log_probs: (batch, classes), log of `probs`, where a head computes it more accurately than from float32
            probabilities (which underflow below 1e-45).
        probs_variance: (batch, classes), unbiased variance over draws of the probabilities softmax(logits): draws of
            the weights, or of the logits where a head knows their distribution (``link="mc"``); None without draws.
        votes: (batch, classes), integer: how many draws put each class first; None without draws.
        logits: where a head knows their distribution, that one; the other parts with draws are then computed when they
            are first read. None elsewhere.
        novelty_ratio: (batch,), see `Prediction`.

    Raises:
        PosthocUQError: the shapes do not fit each other, or votes that are no integers.

    Example:
        ```python
        print(prediction.probs, prediction.predicted())
        print(prediction.entropy(), prediction.mutual_information())
        logits = torch.randn(10, 4, 3)  # draws, inputs, classes
        other = uq.ClassPrediction.from_logits(logits)
        ```
    """

    kind: ClassVar[str] = "classes"
    loss_name: ClassVar[str] = "accuracy"
    _over_draws: ClassVar[tuple[str, ...]] = (*LogitsPrediction._over_draws, "votes")
    _computed: ClassVar[dict[str, tuple[str, ...]]] = {
        **LogitsPrediction._computed,
        "expected_entropy": ("sample_entropy",),
        "variation_ratio": ("votes",),
    }

    votes: Annotated[Tensor | None, "batch classes", int] = OnDemand()  # type: ignore[assignment]  # noqa: RUF009

    def __post_init__(self) -> None:
        if self.log_probs is None:
            object.__setattr__(self, "log_probs", at_least_float32(self.probs).log())
        super().__post_init__()
        classes, logits = self.probs.shape[1], self.logits_mean.shape[1]
        if classes < 2:
            raise PosthocUQError(
                f"probs must be (batch, classes) with at least 2 classes, not {tuple(self.probs.shape)}; "
                "a binary model has the columns 1 - p and p."
            )
        if not self._fits(logits, classes):
            raise PosthocUQError(
                f"logits_mean has {logits} logits an input, which do not fit {classes} classes."
            )

    def _computed_later(self, name: str) -> dict[str, Tensor]:
        if name != "votes" or self.logits is None:
            return super()._computed_later(name)
        return {"votes": self.logits.votes()}

    def _fits(self, logits: int, classes: int) -> bool:
        return logits == classes or (logits == 1 and classes == 2)

    @staticmethod
    def from_logits(logits: Tensor, *, binary: bool = False) -> ClassPrediction:
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
        return classes_of_draws([logits], binary=binary)

    @property
    def classes(self) -> int:
        """The number of classes; 2 for a binary model."""
        return self.probs.shape[1]

    def entropy(self) -> Tensor:
        """(batch,), in nats: total uncertainty, the entropy of the mean probabilities, -sum_c p_c log p_c."""
        return entropy_of(self.log_probs)

    def _decided(self, label: Callable[[int], str], tops: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [{"prediction": top[0]["label"], "index": top[0]["index"]} for top in tops]

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

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log of the mean probability of the given classes.

        Args:
            targets: (batch,), integer labels; of a binary model also (batch, 1), and floats 0 and 1, as `fit` takes
                them. Of soft labels, probabilities (batch, classes), or of one logit (batch,), the mean over them.

        Raises:
            PosthocUQError: wrong shape, labels that are not integers or out of range, or soft ones that are no
                probabilities.
        """
        inputs, classes = self.probs.shape
        targets = self._of_one_logit(as_targets(targets))
        if are_soft(targets, self.probs):
            checked_soft(targets[(targets != 0).any(1)])  # zeros alone: a position that does not count
            return soft_log_prob(targets, self.log_probs)
        if targets.shape != (inputs,) or targets.is_floating_point():
            raise PosthocUQError(
                f"log_prob needs {inputs} integer labels of shape ({inputs},), not {targets.dtype} of shape "
                f"{tuple(targets.shape)}."
            )
        # checked here: an index out of range makes a GPU unusable for the rest of the process
        if inputs and bool(outside(targets, classes).any()):
            raise PosthocUQError(f"log_prob needs labels between 0 and {classes - 1}.")
        index = targets.to(device=self.log_probs.device, dtype=torch.int64).unsqueeze(-1)
        return self.log_probs.gather(-1, index).squeeze(-1)

    def _of_one_logit(self, targets: Tensor) -> Tensor:
        """`binary_labels` of a binary model."""
        return binary_labels(targets) if self.logits_mean.shape[1] == 1 else targets

    def fitting(self, targets: Tensor) -> Tensor:
        """Labels (batch,), int64, of labels with more dimensions or in another type; soft labels as probabilities
        (batch, classes).

        Raises:
            PosthocUQError: they are neither one whole number an input nor its probabilities.
        """
        targets = self._of_one_logit(as_targets(targets))
        if are_soft(targets, self.probs):
            return checked_soft(targets)
        labels = targets.flatten()
        if len(labels) != len(self):
            raise PosthocUQError(
                f"Classification needs one label an input; there are {len(self)} inputs and targets of shape "
                f"{tuple(targets.shape)}."
            )
        if labels.is_floating_point() and not bool((labels == labels.round()).all()):
            raise PosthocUQError(
                f"Labels must be whole numbers, the indices of classes, or probabilities of shape "
                f"{tuple(self.probs.shape)}; some of these {targets.dtype} are neither."
            )
        return labels.long()

    def labels(self, targets: Tensor) -> Tensor:
        """Labels (batch,) of targets as `fitting` gives them: of soft labels the most probable class."""
        return targets.argmax(-1) if are_soft(targets, self.probs) else targets

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores:
        """See `Prediction`: the score of each input's class.

        Raises:
            PosthocUQError: labels are out of range, or soft.
        """
        refuse_soft(targets)
        self.log_prob(targets)  # refuses labels out of range
        labels = self.labels(targets).unsqueeze(-1)
        scores = class_scores(as_double(self.probs), sets, uniforms(keys, 1).squeeze(1))
        return TargetScores(sets, scores.gather(-1, labels), labels)

    def coverage(
        self, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
    ) -> Coverage:
        """See `Prediction`."""
        chosen, labels = self.set(level, allow_empty=allow_empty), self.labels(targets)
        covered = chosen.gather(1, labels[:, None])[:, 0]
        inputs = torch.arange(len(self), device=labels.device)
        return Coverage(as_double(covered), as_double(chosen.sum(1)), inputs, labels, SET_SIZE)

    def mistakes(self, targets: Tensor) -> Tensor:
        """(batch,), bool: which predicted classes are wrong."""
        return self.predicted() != self.labels(targets)

    def counted(self, targets: Tensor) -> tuple[ClassPrediction, Tensor]:
        """All that is one class, as one prediction, and its labels or soft labels: itself, and the targets."""
        return self, targets

    def _score_fields(self) -> dict[str, tuple[str, Callable[[], Tensor]]]:
        return super()._score_fields() | {"variation_ratio": ("votes", self.variation_ratio)}

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Accuracy, NLL, Brier score, calibration errors and the mean entropy. Of soft labels accuracy is how often the
        most probable class is predicted; the others go by the probabilities.
        """
        probs, labels = self.probs, self.labels(targets)
        measures = {"accuracy": metrics.accuracy(probs, labels)}
        if probs.shape[1] > 5:
            measures["top5_accuracy"] = metrics.top_k_accuracy(probs, labels, 5)
        return measures | {
            "nll": -float(as_double(self.log_prob(targets)).mean()),
            "brier": metrics.brier_score(probs, targets),
            "ece": metrics.expected_calibration_error(probs, targets, bins),
            "ece_equal_mass": metrics.expected_calibration_error(probs, targets, bins, binning="equal_mass"),
            "ece_classwise": metrics.classwise_calibration_error(probs, targets, bins),
            "mean_entropy": float(as_double(self.entropy()).mean()),
        }

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): 1 where the predicted class is wrong."""
        return as_double(self.mistakes(targets))

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """Accuracies, and for two classes areas under the ROC curve."""
        measures = super().retained_quality(scores, targets, rates)
        if self.classes == 2:
            areas = selective.selective_auc(scores, self.probs, self.labels(targets), rates)
            measures |= {
                with_percent("auc_referred", rate): float(a) for rate, a in zip(rates, areas, strict=True)
            }
        return measures


# From draws of the logits


class ClassStatistics:
    """The sums that a `ClassPrediction` needs of draws of the logits, in float64 where the device has it."""

    def __init__(self) -> None:
        self._logits, self._probs = Moments(), Moments()
        self._dtype = torch.float32
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, logits: Tensor, log_probs: Tensor | None = None) -> None:
        """Add logits ``(draws, batch, classes)``; or others, with the logarithms of the probabilities.

        Raises:
            PosthocUQError: another number of dimensions, fewer than two classes, or no floating-point numbers.
        """
        if log_probs is None:
            logits = at_least_float32(logits)
            if logits.ndim != 3 or logits.shape[-1] < 2:
                raise PosthocUQError(
                    f"logits must be (samples, batch, classes) with at least 2 classes, not {tuple(logits.shape)}; for "
                    f"one Bernoulli logit pass binary=True."
                )
            log_probs = logits.log_softmax(-1)
        if logits.shape[0] == 0:
            return
        self._dtype = logits.dtype
        self._logits.add(logits)
        probs = log_probs.exp()
        self._probs.add(probs)
        wide = widest_dtype(logits.device)
        log_sum = torch.logsumexp(log_probs, dim=0).to(wide)
        entropy = entropy_of(log_probs, probs).to(wide).sum(dim=0)
        votes = votes_of(log_probs.argmax(dim=-1), log_probs.shape[-1])
        if self._sums is not None:
            previous = self._sums
            log_sum, entropy = torch.logaddexp(previous[0], log_sum), previous[1] + entropy
            votes = previous[2] + votes
        self._sums = log_sum, entropy, votes

    def prediction(self) -> ClassPrediction:
        """The prediction of all draws so far.

        Raises:
            PosthocUQError: no draw was added.
        """
        mean, variance = self._logits.result()
        probs, probs_variance = self._probs.result()
        assert self._sums is not None
        log_sum, entropy, votes = self._sums
        count, dtype = self._logits.count, self._dtype
        return ClassPrediction(
            probs=probs.to(dtype),
            logits_mean=mean.to(dtype),
            logits_variance=variance.to(dtype),
            sample_entropy=(entropy / count).to(dtype),
            log_probs=(log_sum - log(count)).to(dtype),
            probs_variance=probs_variance.to(dtype),
            votes=smallest(votes, count),
        )


def classes_of_draws(blocks: Iterable[Tensor], *, binary: bool = False) -> ClassPrediction:
    """The prediction from blocks ``(draws, batch, classes)`` of logits; with `binary` ``(draws, batch)`` or ``(draws,
    batch, 1)``.

    Raises:
        PosthocUQError: there is no draw, or the logits do not fit.
    """
    statistics = ClassStatistics()
    for block in gathered(blocks):
        if not binary:
            statistics.add(block)
            continue
        logits = at_least_float32(block.unsqueeze(-1) if block.ndim == 2 else block)
        if logits.ndim != 3 or logits.shape[-1] != 1:
            raise PosthocUQError(
                f"binary logits must be (samples, batch) or (samples, batch, 1), not {tuple(logits.shape)}."
            )
        statistics.add(logits, torch.cat([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1))
    return statistics.prediction()


# From Gaussian logits


def classes_of_gaussian(outputs: OutputGaussian, *, binary: bool = False) -> ClassPrediction:
    """The prediction of Gaussian logits, by the link of `outputs`.

    * ``"mc"`` averages the softmax over points of the logits, the same for every input: few of them for two and three
      classes, `n_draws` quasi-random ones for more; see `GaussianLogits.log_probs`. It is the only link with expected
      entropy, votes and the variance of the probabilities, which are computed when they are first read.
    * ``"probit"`` is ``softmax(m / sqrt(1 + pi v / 8))`` (MacKay 1992; Spiegelhalter, Lauritzen 1990). Where the
      covariance is known, ``v`` is the variance of the centred logits, ``v_c = C / (C - 1) Var(f_c - mean_d f_d)``,
      which for independent logits of one variance is that variance. Without a covariance it is the logits' own
      variance. A part of it that all logits share, which softmax ignores, then makes the prediction too cautious.
    * ``"bridge"`` is the mean of a Dirichlet by Laplace's approximation in the softmax basis (Hobbhahn, Kristiadi,
      Hennig 2022).

    Args:
        outputs: logits ``(batch, classes)``, in float32 at least; with `binary` ``(batch,)`` or ``(batch, 1)``. Without
            a covariance they count as independent. With two classes ``"probit"`` uses the variance of the logits'
            difference, ``v_0 + v_1 - 2 c_01``. ``"bridge"`` takes no `LogitCovariance`, and one logit has no
            covariance.
        binary: one Bernoulli logit.
    """
    mean, variance, covariance, link, n_draws = outputs
    if binary:  # one logit z is the difference of two whose sum is zero, -z / 2 and z / 2
        mean, variance = mean.reshape(-1, 1), variance.reshape(-1, 1)
        pair = torch.cat([-mean, mean], dim=1) / 2
        sign = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=mean.dtype, device=mean.device) / 4
        matrix = variance.unsqueeze(-1) * sign
        of_pair = outputs._replace(mean=pair, variance=variance.expand_as(pair) / 4, covariance=matrix)
        return classes_of_gaussian(of_pair).changed(logits_mean=mean, logits_variance=variance)
    if link == "mc":
        if covariance is None and mean.shape[1] > EXACT:
            covariance = independent(variance)
        elif not isinstance(covariance, LogitCovariance):
            covariance = of_covariance(mean, torch.diag_embed(variance) if covariance is None else covariance)
        logits = GaussianLogits(mean, covariance, n_draws)
        log_probs = logits.log_probs()
        return ClassPrediction(log_probs.exp(), mean, variance, log_probs=log_probs, logits=logits)
    full = isinstance(covariance, Tensor)
    if link == "bridge":
        log_probs = _bridge(mean, covariance if full else torch.diag_embed(variance)).log()
    elif mean.shape[1] == 2 and full:
        spread = (variance.sum(1, keepdim=True) - 2 * covariance[:, 0, 1:2]).clamp(min=0)
        scaled = (mean[:, 1:] - mean[:, :1]) / (1 + pi * spread / 8).sqrt()
        log_probs = torch.cat([F.logsigmoid(-scaled), F.logsigmoid(scaled)], dim=1)
    else:
        centred = variance if covariance is None else _centred_variance(covariance)
        log_probs = (mean / (1 + pi * centred / 8).sqrt()).log_softmax(1)
    return ClassPrediction(log_probs.exp(), mean, variance, None, log_probs)


def _centred_variance(covariance: Tensor | LogitCovariance) -> Tensor:
    """``C / (C - 1) Var(f_c - mean_d f_d)``, ``(batch, classes)``."""
    if isinstance(covariance, LogitCovariance):
        classes = covariance.rest.shape[1]
        common = covariance.root.square().sum(-1) * (classes / (classes - 1))
        # `rest` already holds the variance of independent logits
        return common + covariance.rest if covariance.given is None else common
    classes = covariance.shape[1]
    sums = covariance.mean(2)
    variance = covariance.diagonal(dim1=1, dim2=2) - 2 * sums + sums.mean(1, keepdim=True)
    return variance.clamp(min=0) * (classes / (classes - 1))


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Dirichlet, ``(batch, classes)``; logits are first projected to the sum zero, on which softmax does
    not depend.

    ``alpha_c = (1 - 2 / C + exp(f_c) / C^2 sum_d exp(-f_d)) / v_c``.
    """
    classes = mean.shape[1]
    sums = covariance.sum(-1)
    total = sums.sum(-1, keepdim=True)
    # Logits whose sum has no variance are projected by subtracting their mean.
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    certain_sum = total <= 100 * torch.finfo(mean.dtype).eps * trace
    total = torch.where(certain_sum, torch.ones_like(total), total)
    plain = mean - mean.mean(-1, keepdim=True)
    projected = torch.where(certain_sum, plain, mean - sums * mean.sum(-1, keepdim=True) / total)
    removed = torch.where(certain_sum, torch.zeros_like(sums), sums.square() / total)
    spread = covariance.diagonal(dim1=-2, dim2=-1) - removed
    exponent = projected + torch.logsumexp(-projected, -1, keepdim=True) - 2 * log(classes)
    share = exponent
    if classes > 2:
        share = torch.logaddexp(exponent, torch.full_like(exponent, log1p(-2 / classes)))
    smallest = torch.finfo(mean.dtype).tiny
    return (share - spread.clamp(min=smallest).log()).softmax(-1)
