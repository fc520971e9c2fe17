"""`Prediction`, the base class: moments, votes and scores over draws, and how good a prediction is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.likelihoods import metrics, selective

# What the predictions share: moments, entropies and votes over weight samples.

AT_ONCE = 2**18  # numbers that a likelihood gets in one call


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it is of half precision, itself otherwise.

    Raises:
        PosthocUQError: the numbers are no real floating-point ones.
    """
    if not tensor.is_floating_point():
        raise PosthocUQError(f"Expected floating-point numbers, got {tensor.dtype}.")
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def mean_and_variance(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over the leading dimension; variance 0 for a single sample.

    Raises:
        PosthocUQError: there is no sample.
    """
    if samples.shape[0] == 0:
        raise PosthocUQError("A prediction needs at least one weight sample.")
    if samples.shape[0] == 1:
        return samples[0], torch.zeros_like(samples[0])
    return samples.mean(dim=0), samples.var(dim=0, correction=1)


def entropy_of(probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension, with 0 log 0 = 0."""
    return -torch.special.xlogy(probs, probs).sum(dim=-1)


def entropy_from(probs: Tensor, log_probs: Tensor) -> Tensor:
    """The same from probabilities and their logarithms, which saves computing these again."""
    # 0 * -inf would be NaN
    return -(probs * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(dim=-1)


def class_votes(scores: Tensor) -> Tensor:
    """How many samples put each class first: ``(samples, batch, classes)`` to int64 ``(batch, classes)``.

    Where classes tie, the first gets the vote.
    """
    winners = scores.argmax(dim=-1, keepdim=True)
    # by comparison: adding at an index has no deterministic form on some devices
    return (winners == torch.arange(scores.shape[-1], device=scores.device)).sum(dim=0)


def smallest_counts(votes: Tensor, samples: int) -> Tensor:
    """Counts up to `samples` in the smallest integer type, since predictions are kept for whole data sets."""
    fits = next(kind for kind in (torch.int16, torch.int32, torch.int64) if samples <= torch.iinfo(kind).max)
    return votes.to(fits)


def log_probabilities(logits: Tensor, binary: bool) -> tuple[Tensor, Tensor]:
    """Logits of several samples, at least float32 and with their class dimension, and the log-probabilities.

    Args:
        logits: (samples, batch, classes); with `binary` (samples, batch) or (samples, batch, 1).
        binary: one Bernoulli logit, whose classes are 0 and 1.

    Raises:
        PosthocUQError: wrong number of dimensions, fewer than two classes, integer logits.
    """
    logits = at_least_float32(logits)
    if not binary:
        if logits.ndim != 3 or logits.shape[-1] < 2:
            raise PosthocUQError(
                "logits must be (samples, batch, classes) with at least 2 classes, not "
                f"{shape_text(logits)}; for one Bernoulli logit pass binary=True."
            )
        return logits, torch.log_softmax(logits, dim=-1)
    if logits.ndim == 2:
        logits = logits.unsqueeze(-1)
    if logits.ndim != 3 or logits.shape[-1] != 1:
        raise PosthocUQError(
            f"binary logits must be (samples, batch) or (samples, batch, 1), not {shape_text(logits)}."
        )
    return logits, torch.cat([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)


def shape_text(tensor: Tensor) -> str:
    """The shape as a tuple, for messages."""
    return str(tuple(tensor.shape))


def cat_known(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors of several predictions as one, or None where one of them lacks it."""
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(known) if len(known) == len(tensors) else None


def known_novelty(ratio: Tensor | None) -> Tensor:
    """A prediction's novelty.

    Raises:
        PosthocUQError: it has none.
    """
    if ratio is None:
        raise PosthocUQError(
            "This prediction has no novelty: the predictor was made with novelty=False, or the posterior has no "
            "statistics of the last layer's inputs. Fit again, or ask for predictor.novelty(x, of='top')."
        )
    return ratio


def by_draw(function: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """A function of outputs ``(batch, ...)``, applied to each of ``(draws, batch, ...)``: ``(draws, batch, ...)``."""
    draws, batch = outputs.shape[:2]
    step = draws
    if not torch.compiler.is_compiling():
        step = max(1, AT_ONCE // max(1, outputs[0].numel()))
    blocks: list[Tensor] = []
    for part in outputs.split(step):
        values = function(part.flatten(0, 1))
        if values.ndim == 0 or values.shape[0] != part.shape[0] * batch:
            raise PosthocUQError(
                f"A likelihood gives a row for each of {part.shape[0] * batch} rows of outputs, not the shape "
                f"{shape_text(values)}."
            )
        blocks.append(values.reshape(part.shape[0], batch, *values.shape[1:]))
    return torch.cat(blocks)


def by_input(values: Tensor) -> Tensor:
    """One number an input, ``(batch,)``: the mean over all other dimensions."""
    return values if values.ndim == 1 else values.flatten(1).mean(dim=-1)


# The methods and attributes that all predictions share.

Self = TypeVar("Self", bound="Prediction")


class Prediction(ABC):
    """The predictive distribution of a batch's targets. Subclasses are frozen dataclasses of tensors whose first
    dimension counts the inputs.

    Attributes:
        kind: ``"classes"``, ``"values"`` or ``"draws"``: which of the subclasses it is.
        novelty_ratio: (batch,), in (0, 1], the share of the prior's uncertainty that the data left; None where it was
            not asked for, or the posterior keeps nothing to tell it by.
    """

    kind: ClassVar[str]
    novelty_ratio: Tensor | None

    @abstractmethod
    def __len__(self) -> int:
        """Number of inputs."""

    @property
    def classes(self) -> int | None:
        """How many classes have a probability; None where no classes are predicted."""
        return None

    @property
    @abstractmethod
    def outputs_mean(self) -> Tensor:
        """(batch, ...), mean of the model's outputs over the weights, in the units and the shape of the outputs."""

    @property
    @abstractmethod
    def default_score(self) -> str:
        """The name of the score used where none is named."""

    @abstractmethod
    def epistemic(self) -> Tensor:
        """(batch,): the epistemic uncertainty, a variance over the weights; the mean over outputs."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log of the predictive probability, or density, of the given targets."""

    @abstractmethod
    def fitting(self, targets: Tensor) -> Tensor:
        """Targets as a loader gives them, in the shape and type that `log_prob` and the measures take.

        Raises:
            PosthocUQError: they do not fit this prediction.
        """

    @abstractmethod
    def scores(self) -> dict[str, Tensor]:
        """All known uncertainty scores by name, each (batch,), larger where the prediction is less certain; see
        `posthoc_uq.likelihoods.prediction.SCORES`.
        """

    @abstractmethod
    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Measures of how good the prediction is for these targets (as `fitting` gives them), by name.

        Args:
            targets: of all inputs.
            bins: of calibration errors.
        """

    @abstractmethod
    def losses(self, targets: Tensor) -> Tensor:
        """(batch,), float64: the loss of each input's prediction, by which selective prediction is judged."""

    @abstractmethod
    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """The quality on the remaining inputs when those with the largest scores are referred, by name.

        Args:
            scores: (batch,).
            targets: of all inputs.
            rates: shares of the inputs that are referred.
        """

    @abstractmethod
    def tensors(self) -> NamedTuple:
        """The main tensors as a named tuple, the form in which an exported program gives them."""

    @abstractmethod
    def to_dict(self) -> dict[str, Tensor]:
        """Tensors by name, and the scores computed from them; unknown ones are left out."""

    @abstractmethod
    def to(self: Self, device: torch.device | str) -> Self:
        """The same prediction with its tensors on `device`."""

    @staticmethod
    @abstractmethod
    def cat(predictions: Sequence[Any]) -> Any:
        """Predictions of several batches as one, in order.

        Raises:
            PosthocUQError: nothing to join, or predictions that do not belong together.
        """

    def entropy(self) -> Tensor:
        """(batch,), in nats: the entropy of the target.

        Raises:
            PosthocUQError: this kind of prediction has no entropy.
        """
        raise PosthocUQError(
            f"A {type(self).__name__} has no entropy; its scores are {tuple(self.scores())}."
        )

    def novelty(self) -> Tensor:
        """(batch,), in (0, 1]: how much of the prior's uncertainty the data left at an input; larger for inputs unlike
        those of the training. See `Predictor.novelty`.

        Raises:
            PosthocUQError: the prediction does not know it.
        """
        return known_novelty(self.novelty_ratio)

    def with_novelty(self: Self, ratio: Tensor | None) -> Self:
        """The same prediction with its novelty (batch,), or itself where that is None."""
        return self if ratio is None else replace(cast(Any, self), novelty_ratio=ratio)

    def numbers(self) -> dict[str, Tensor]:
        """The tensors that it keeps, by name, (batch, ...) each."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and value.ndim and len(value) == len(self)
        }

    def of_one_network(self: Self) -> Self:
        """The same without the parts that need several sets of weights."""
        return self


def cat(predictions: Sequence[Prediction]) -> Prediction:
    """Predictions of several batches as one, in order.

    Raises:
        PosthocUQError: nothing to join, or predictions that do not belong together.
    """
    if not predictions:
        raise PosthocUQError("cat needs at least one prediction.")
    kinds = {prediction.kind for prediction in predictions}
    if len(kinds) > 1:
        raise PosthocUQError(
            f"cat got predictions of {' and of '.join(sorted(kinds))}; they cannot be one prediction."
        )
    return predictions[0].cat(predictions)


# One number an input that says how far to trust a prediction: the scores by name, higher meaning less
# certain.

CLASS_SCORES = (
    "entropy",
    "mutual_information",
    "max_probability",
    "functional_variance",
    "variation_ratio",
    "novelty",
)
VALUE_SCORES = ("standard_deviation", "epistemic_variance", "novelty")
SCORES = tuple(dict.fromkeys((*CLASS_SCORES, *VALUE_SCORES)))
"""Every score. Of classes: the entropy of the mean probabilities, mutual information (both in nats), 1 - the largest
probability, the mean over classes of the logits' variance, the share of draws that vote otherwise. Of values: the
total standard deviation (mean over outputs, in the outputs' units) and the variance that the weights contribute. Of
both: the novelty, the share of the prior's uncertainty that the data left (`Predictor.novelty`). Of a likelihood of
the user's: those of values, and the mean over outputs of the outputs' variance (``"functional_variance"``)."""


def score_of(prediction: Prediction, name: str) -> Tensor:
    """One score ``(batch,)`` of a prediction.

    Raises:
        PosthocUQError: there is no such score, or this prediction does not know it.
    """
    known = prediction.scores()
    if name in known:
        return known[name]
    if name not in SCORES:
        raise PosthocUQError(f"A score is one of {SCORES}, not {name!r}.{did_you_mean(name, SCORES)}")
    raise PosthocUQError(
        f"This prediction does not know the score {name!r}; it knows {tuple(known)}. Mutual information and the "
        f"variation ratio need head='sampling' or link='mc', novelty a posterior that keeps what it takes, and a head "
        f"without novelty=False."
    )


# Measures of how good predictions are, by name: `Prediction.quality` and `retained_quality`, from plain
# tensors.


def class_quality(
    probs: Tensor, log_prob: Callable[[Tensor], Tensor], entropy: Tensor, targets: Tensor, bins: int
) -> dict[str, float]:
    """Measures of class probabilities ``(batch, classes)``.

    Args:
        probs: of the classes.
        log_prob: from targets to their log probabilities, ``(batch,)``.
        entropy: of the predictions, ``(batch,)``, in nats.
        targets: labels ``(batch,)``.
        bins: of the calibration errors.
    """
    measures = {"accuracy": metrics.accuracy(probs, targets)}
    if probs.shape[1] > 5:
        measures["top-5 accuracy"] = metrics.top_k_accuracy(probs, targets, 5)
    measures["NLL"] = -float(log_prob(targets).double().mean())
    measures["Brier"] = metrics.brier_score(probs, targets)
    measures["ECE"] = metrics.expected_calibration_error(probs, targets, bins)
    measures["ECE (equal mass)"] = metrics.expected_calibration_error(
        probs, targets, bins, binning="equal_mass"
    )
    measures["classwise ECE"] = metrics.classwise_calibration_error(probs, targets, bins)
    measures["mean entropy"] = float(entropy.double().mean())
    return measures


LEVELS = (0.5, 0.9, 0.95)
"""Of the intervals whose coverage is measured."""


def interval_quality(interval: Callable[[float], tuple[Tensor, Tensor]], targets: Tensor) -> dict[str, float]:
    """Measures of prediction intervals: how often they contain the target, and how wide they are.

    Args:
        interval: from a level, one of `LEVELS`, to lower and upper bounds.
        targets: of the shape of the bounds.
    """
    bounds = {level: interval(level) for level in LEVELS}
    coverages = {
        f"coverage of {100 * level:g} %": metrics.interval_coverage(*pair, targets)
        for level, pair in bounds.items()
    }
    return coverages | {
        f"sharpness of {100 * LEVELS[-1]:g} %": metrics.interval_sharpness(*bounds[LEVELS[-1]])
    }


def retained_classes(
    scores: Tensor, probs: Tensor, targets: Tensor, rates: Sequence[float]
) -> dict[str, float]:
    """The accuracy, and for two classes the area under the ROC curve, on inputs that are not referred."""
    accuracies = selective.selective_accuracy(scores, probs, targets, rates)
    measures = {f"accuracy at {rate:g}": float(a) for rate, a in zip(rates, accuracies, strict=True)}
    if probs.shape[1] == 2:
        areas = selective.selective_auc(scores, probs, targets, rates)
        measures |= {f"AUC at {rate:g}": float(a) for rate, a in zip(rates, areas, strict=True)}
    return measures


def retained_losses(
    name: str, scores: Tensor, losses: Tensor, rates: Sequence[float], *, root: bool = False
) -> dict[str, float]:
    """The mean loss, or its square root, on inputs that are not referred."""
    risk = selective.risk_coverage(scores, losses).risk
    counts = selective.retained(rates, len(losses))
    risks = {rate: risk[count - 1] for rate, count in zip(rates, counts, strict=True)}
    return {
        f"{name} at {rate:g}": float(mean_loss.sqrt() if root else mean_loss)
        for rate, mean_loss in risks.items()
    }


def squared_errors(mean: Tensor, targets: Tensor) -> Tensor:
    """``(batch,)``, float64: the squared error, mean over outputs."""
    squares = (mean.double() - targets.double()).square()
    return squares if squares.ndim == 1 else squares.flatten(1).mean(dim=-1)


# Predictions at the boundary of an exported program: named tuples of tensors.


class ClassTensors(NamedTuple):
    """A classification at the boundary of an exported program; see `ClassPrediction`.

    Attributes:
        probs: (batch, classes).
        logits_mean: (batch, classes), or (batch, 1) for one logit.
        logits_variance: of the same shape.
        entropy: (batch,), in nats.
        mutual_information: (batch,), in nats; NaN with ``link="probit"`` or ``"bridge"``, which do not know it.
    """

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    entropy: Tensor
    mutual_information: Tensor


class ValueTensors(NamedTuple):
    """A regression at the boundary of an exported program; see `RegressionPrediction`.

    Attributes:
        mean: (batch,) or (batch, outputs).
        variance: of the same shape: total, by weights and observation noise.
        epistemic_variance: of the same shape: the weights' part.
    """

    mean: Tensor
    variance: Tensor
    epistemic_variance: Tensor


for _kind in (ClassTensors, ValueTensors):  # so that an exported program can name its outputs in a file
    pytree._register_namedtuple(  # pyright: ignore[reportPrivateUsage]
        _kind, serialized_type_name=f"posthoc_uq.{_kind.__name__}"
    )


# The check that a likelihood's ``log_prob`` gives one number a sample, which depends on no other sample.

_SAMPLES = 32  # of a batch
_TOLERANCE = 1e-3  # relative above 1, absolute below


def check_rows(
    log_prob: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, name: str
) -> None:
    """Compare the log probability of a sample alone with its row among others, for the first and the last of a few.

    Targets ``(samples,)`` and outputs ``(samples, 1)`` broadcast to ``(samples, samples)``, and a sum over the second
    dimension then has the right shape and adds up the other samples' targets.

    Args:
        log_prob: of the likelihood.
        outputs: ``(samples, ...)``.
        targets: ``(samples, ...)``.
        name: of the likelihood.

    Raises:
        PosthocUQError: the result has another shape than ``(samples,)``, or depends on the other samples.
    """
    shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
    outputs, targets = outputs.detach()[:_SAMPLES], targets[:_SAMPLES]
    samples = len(outputs)
    way_out = (
        "give each sample's targets the shape of its outputs, in the data or at the start of log_prob "
        "(targets = targets.reshape(outputs.shape)), and let log_prob reduce every dimension but the first"
    )
    with torch.no_grad():
        together = log_prob(outputs, targets)
        if tuple(together.shape) != (samples,):
            raise PosthocUQError(
                f"log_prob of likelihood {name!r} gives {samples} samples the shape {tuple(together.shape)} and not "
                f"({samples},), one number a sample, for {shapes}; {way_out}."
            )
        for row in {0, samples - 1} if samples > 1 else ():
            alone = log_prob(outputs[row : row + 1], targets[row : row + 1])
            if alone.numel() != 1 or not _same(alone.reshape(()), together[row]):
                raise PosthocUQError(
                    f"log_prob of likelihood {name!r} gives a sample another value alone than among others, for "
                    f"{shapes}, which seem to broadcast against each other; {way_out}."
                )


def _same(one: Tensor, other: Tensor) -> bool:
    a, b = as_double(one), as_double(other)
    return bool(torch.isclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True))
