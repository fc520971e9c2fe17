"""Classes: one of several, one of two, and several at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from math import pi
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods import positions
from posthoc_uq.likelihoods.class_prediction import ClassPrediction, MultilabelPrediction
from posthoc_uq.likelihoods.draws import LINK_DRAWS, Spread, classes_of_draws, classes_of_gaussian
from posthoc_uq.likelihoods.labels import (
    Layout,
    are_probabilities,
    checked_soft,
    in_whole_numbers,
    soft_log_prob,
)
from posthoc_uq.likelihoods.likelihood import (
    Fisher,
    Likelihood,
    SeparateOutputs,
    divergence_of_classes,
    entropy_of_logits,
    last_function,
    wide,
)
from posthoc_uq.likelihoods.positions import PositionPrediction, positions_of_draws, positions_of_gaussian

# Classification: logits of several classes.

AGREEMENT = 0.75  # share of the trained model's own decisions that drawn models should share
_TOLERANCE = 1e-4  # how far a sum of probabilities may be from 1; more in half precision


IgnoreIndex = Annotated[int, Ge(-(2**31)), Lt(2**31)]
LabelSmoothing = Annotated[float, Ge(0), Lt(1)]


class CategoricalFields(Record):
    """The options; a file holds those that are not the default."""

    class_dim: Literal[1, -1] = 1
    ignore_index: IgnoreIndex = -100
    next_token: bool = False
    label_smoothing: LabelSmoothing = 0.0


class Categorical(Likelihood):
    """Softmax classification: outputs ``(samples, classes)`` are logits, targets ``(samples,)`` are class
    indices, or ``(samples, classes)`` the probabilities of the classes (soft labels).

    Outputs of more dimensions have positions, such as pixels or tokens: ``(samples, classes, *positions)``, or
    ``(samples, *positions, classes)`` with ``class_dim=-1``. Targets are then ``(samples, *positions)``, and a sample's
    positions count together: its log-probability is their sum. Divergences and entropies of a sample, by which a prior
    or a temperature is found, are means over its positions. See `posthoc_uq.likelihoods.positions`.

    Args:
        class_dim: the dimension of the classes where outputs have positions, 1 or -1.
        ignore_index: the label of a position that does not count, such as padding or an outline (255 in many masks); of
            outputs with positions. A class that is ignored counts nowhere.
        next_token: for causal language models: the outputs at position t predict the label at t + 1, as their own
            loss shifts them, and those at the last position count for nothing.
        label_smoothing: of the training's loss, as in `torch.nn.CrossEntropyLoss`: that share of every label is spread
            evenly over all classes. It is a part of `log_prob`, and so of the evidence, and of the empirical Fisher.
            The Fisher over drawn or all labels is the Hessian of the loss by the logits, ``diag(p) - p p^T``, which no
            label is in. Held-out data are rated without it.

    Raises:
        PosthocUQError: another `class_dim`, an `ignore_index` that is no whole number, or a `label_smoothing` that is
            not in [0, 1).
    """

    name = "classification"
    logits: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    fields: ClassVar[type[Record]] = CategoricalFields
    label_smoothing: float = 0.0  # of subclasses, too, whose constructor is their own
    layout: Layout = Layout()

    def __init__(
        self,
        class_dim: int = 1,
        ignore_index: int = -100,
        next_token: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        class_dim = check_option("class_dim", class_dim, Literal[1, -1])
        ignored = check_option("ignore_index", ignore_index, IgnoreIndex)
        self.layout = Layout(class_dim, ignored, check_option("next_token", next_token, bool))
        self.label_smoothing = check_option("label_smoothing", label_smoothing, LabelSmoothing)

    def attributes(self) -> dict[str, Any]:
        return {"name": self.name, **self._options()}

    def _options(self) -> dict[str, Any]:
        """The options that are not the defaults."""
        plain = Layout()
        smoothing = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}
        return smoothing | {
            name: getattr(self.layout, name)
            for name in ("class_dim", "ignore_index", "next_token")
            if getattr(self.layout, name) != getattr(plain, name)
        }

    def identity(self) -> dict[str, Any]:
        return self.attributes()

    @classmethod
    def restore(cls, attributes: Mapping[str, Any]) -> Categorical:
        return cls(**{name: attributes[name] for name in cls.fields.model_fields if name in attributes})

    def of_targets(self) -> Categorical:
        """Without the smoothing of labels."""
        plain = copy.copy(self)
        plain.label_smoothing = 0.0
        return plain

    def positions_of(self, outputs: Tensor) -> Layout | None:
        """The layout of outputs that have positions, else None."""
        return self.layout if outputs.ndim > 2 else None

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        fault = Categorical.fault(self, outputs, targets)
        if targets is not None and fault is not None and bool(fault):
            if targets.is_floating_point():
                checked_soft(targets)
            layout = self.positions_of(outputs)
            if layout is not None:
                raise PosthocUQError(layout.wrong_labels(targets, layout.classes(outputs)))
            classes = outputs.shape[1]
            raise PosthocUQError(
                f"Labels run from {int(targets.min())} to {int(targets.max())}, but the model has {classes} "
                f"outputs; they must lie in 0..{classes - 1}. Leave samples without a label out of the loader: "
                f"ignore_index= is for outputs with positions."
            )

    def fault(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        layout = self.positions_of(outputs)
        if layout is not None:
            layout.check(outputs)
            if targets is None:
                return None
            layout.check_labels(outputs, targets)
            return layout.fault(outputs, targets)
        if self.layout.next_token:
            raise PosthocUQError(
                f"next_token=True needs outputs with one dimension of tokens, and the model gives "
                f"{tuple(outputs.shape)}."
            )
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
                f"{in_whole_numbers(targets)}"
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
        layout = self.positions_of(outputs)
        values = outputs.detach().float()
        values = values if layout is None else layout.rows(values)
        if values.ndim != 2 or values.shape[1] < 2:
            return False
        tolerance = max(_TOLERANCE, torch.finfo(outputs.dtype).eps)
        if not bool(((values.sum(1) - 1).abs() <= tolerance).all()):
            return False
        return bool((values != values[0]).any()) or last_function(outputs).startswith("Softmax")

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is not None:
            return positions.log_probs(outputs, targets, layout, self.label_smoothing)
        if targets.is_floating_point() or self.label_smoothing:
            return soft_log_prob(self._shares(outputs, targets), wide(outputs).log_softmax(1))
        return -F.cross_entropy(wide(outputs), self._indices(outputs, targets), reduction="none")

    def weighted_log_prob(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is None or type(self).log_prob is not Categorical.log_prob:
            return super().weighted_log_prob(outputs, targets, weights)
        return positions.log_probs(outputs, targets, layout, self.label_smoothing, weights)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """By the probit approximation, ``softmax(m / sqrt(1 + pi v / 8))``; see `classes_of_gaussian`."""
        return self.log_prob(wide(mean) * (1 + pi / 8 * wide(variance)).rsqrt(), targets)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is not None:
            rows = divergence_of_classes(wide(layout.rows(outputs)).log_softmax(1), prediction.rows)
            return positions.by_sample(rows, outputs)
        return divergence_of_classes(wide(outputs).log_softmax(1), prediction)

    def entropy(self, outputs: Tensor) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is not None:
            return positions.by_sample(entropy_of_logits(as_double(layout.rows(outputs))), outputs)
        return entropy_of_logits(as_double(outputs.reshape(len(outputs), -1)))

    def agrees(self, outputs: Tensor, draws: Tensor) -> bool:
        """At least three quarters of the samples, or positions, keep their most probable class."""
        layout = self.positions_of(outputs)
        if layout is not None:
            outputs, draws = layout.rows(outputs), torch.stack([layout.rows(draw) for draw in draws])
        same = draws.softmax(-1).mean(0).argmax(-1) == outputs.argmax(-1)
        return not bool(same.float().mean() < AGREEMENT)

    def classes(self, outputs: int) -> int:
        return outputs

    def predicted_class(self, outputs: Tensor) -> Tensor:
        """The class of every sample; of outputs with positions, of every position, ``(samples * positions,)``."""
        layout = self.positions_of(outputs)
        return outputs.argmax(1) if layout is None else layout.rows(outputs).argmax(1)

    def from_draws(
        self, outputs: Tensor, noise: Tensor | None = None
    ) -> ClassPrediction | PositionPrediction:
        return self.from_blocks(iter([outputs])) if outputs.ndim > 3 else ClassPrediction.from_logits(outputs)

    def from_blocks(
        self, blocks: Iterable[Tensor], noise: Tensor | None = None
    ) -> ClassPrediction | PositionPrediction:
        remaining = iter(blocks)
        first = list(islice(remaining, 1))
        if first and first[0].ndim > 3:
            return positions_of_draws(chain(first, remaining), self.layout)
        return classes_of_draws(chain(first, remaining))

    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor,
        *,
        covariance: Tensor | Spread | None = None,
        link: str = "mc",
        n_draws: int = LINK_DRAWS,
        noise: Tensor | None = None,
    ) -> ClassPrediction | PositionPrediction:
        """By one of three links; see `classes_of_gaussian`. With positions a covariance is one of rows of classes,
        ``(samples * positions, classes, classes)``, or the `Spread` of rows.
        """
        layout = self.positions_of(mean)
        if layout is not None:
            return positions_of_gaussian(mean, variance, covariance, layout, link, n_draws)
        return classes_of_gaussian(mean, variance, covariance, link, n_draws)

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """See `Likelihood`; positions that the targets ignore are left out of drawn and exact labels, too."""
        layout = self.positions_of(outputs)
        if fisher == "mc" and self.label_smoothing:  # drawn labels are not smoothed
            yield from self.of_targets().gradients(outputs, targets, keys, fisher, n_samples)
        elif layout is None or fisher == "empirical":
            yield from super().gradients(outputs, targets, keys, fisher, n_samples)
        elif fisher == "exact":
            yield from positions.exact_factors(outputs.detach(), targets, layout, self.exact_factors)
        else:
            yield from positions.drawn_scores(outputs.detach(), targets, keys, n_samples, layout)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is not None:
            return positions.scores(outputs, targets, layout, self.label_smoothing)
        return wide(outputs).softmax(1) - self._shares(outputs, targets)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is not None:
            return positions.drawn(outputs, keys, draw, layout)
        u = self.uniforms(outputs, keys, draw)
        cumulative = wide(outputs).softmax(1).to(u.dtype).cumsum(1)
        return (
            torch.searchsorted(cumulative, u * cumulative[:, -1:]).squeeze(1).clamp_(max=outputs.shape[1] - 1)
        )

    def exact_factors(self, outputs: Tensor) -> Iterator[Tensor]:
        layout = self.positions_of(outputs)
        if layout is not None:
            yield from positions.exact_factors(outputs, None, layout, self.exact_factors)
            return
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


# Binary classification: one logit.


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
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
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
        n_draws: int = LINK_DRAWS,
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


# Several labels that an input may have together: one logit for each.


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
        n_draws: int = LINK_DRAWS,
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
