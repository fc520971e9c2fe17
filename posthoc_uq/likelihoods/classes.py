"""Classification: one of several classes a sample, or at every position (pixel, token) of a sample."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from math import pi, prod
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor

from posthoc_uq.core.devices import as_double, at_least_float32, widest_dtype
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.options import check_option
from posthoc_uq.core.randomness import uniforms
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods.class_prediction import (
    ClassPrediction,
    classes_of_draws,
    classes_of_gaussian,
    divergence_of_classes,
    entropy_of,
)
from posthoc_uq.likelihoods.draws import LINK_DRAWS, LINKS, OutputGaussian
from posthoc_uq.likelihoods.labels import (
    MAX_SUM_ERROR,
    NOT_SOFT,
    LabelLayout,
    are_probabilities,
    are_soft,
    from_one,
    in_whole_numbers,
    outside,
    soft_log_prob,
)
from posthoc_uq.likelihoods.likelihood import Faults, Fisher, Likelihood, last_function
from posthoc_uq.likelihoods.positions import PositionPrediction, positions_of_draws

_MAX_NUMBERS = 2**19  # that are worked on at once; more are not faster

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
    indices, or ``(samples, classes)`` the probabilities of the classes (soft labels), floats in the shape of the
    outputs as for `torch.nn.CrossEntropyLoss`.

    Outputs of more dimensions have positions, such as pixels or tokens: ``(samples, classes, *positions)``, or
    ``(samples, *positions, classes)`` with ``class_dim=-1``. Targets are then ``(samples, *positions)``, or soft
    labels in the shape of the outputs, of which a position with zeros alone does not count. A sample's positions count
    together: its log-probability is their sum. Divergences and entropies of a sample, by which a prior
    or a temperature is found, are means over its positions.

    Soft labels t, as of a teacher, of mixup or of several annotators, have the log-likelihood ``sum_c t_c log p_c``: in
    the evidence, in `posthoc_uq.tune`, in the NLL and in the empirical Fisher; the Fisher over drawn or all labels has
    no target in it. The Brier score is the squared distance to t, and calibration errors compare a probability with the
    mean of t. Decisions (accuracy, referral, coverage of promises) go by the most probable class, and leave-one-out
    regresses on the probabilities. `posthoc_uq.calibrate` refuses soft labels; one-hot floats are labels.

    Given the outputs, positions are independent, and an output without positions is one. So the log-probability of a
    sample is the sum over its positions that count, and its Fisher ``sum_t J_t^T (diag(p_t) - p_t p_t^T) J_t``. Drawn
    labels need one backward pass for all positions together: with independent scores ``s_t`` of mean 0,
    ``E[(sum_t J_t^T s_t)(sum_t J_t^T s_t)^T] = sum_t J_t^T E[s_t s_t^T] J_t``.

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

    Example:
        ```python
        likelihood = uq.Categorical(label_smoothing=0.1)  # as in training
        posterior = uq.fit(model, train_loader, likelihood=likelihood)
        prediction = uq.wrap(model, posterior)(images)
        print(prediction.predicted(), prediction.entropy())
        ```
    """

    name = "classification"
    logits: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    class_logits: ClassVar[bool] = True
    links: ClassVar[tuple[str, ...]] = LINKS
    fields: ClassVar[type[Record]] = CategoricalFields
    label_smoothing: float = 0.0  # of subclasses, too, whose constructor is their own
    layout: LabelLayout = LabelLayout()

    def __init__(
        self,
        class_dim: int = 1,
        ignore_index: int = -100,
        next_token: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        class_dim = check_option("class_dim", class_dim, Literal[1, -1])
        ignored = check_option("ignore_index", ignore_index, IgnoreIndex)
        self.layout = LabelLayout(class_dim, ignored, check_option("next_token", next_token, bool))
        self.label_smoothing = check_option("label_smoothing", label_smoothing, LabelSmoothing)

    def attributes(self) -> dict[str, Any]:
        options = {name: getattr(self.layout, name) for name in ("class_dim", "ignore_index", "next_token")}
        options["label_smoothing"] = self.label_smoothing
        defaults = {name: field.default for name, field in CategoricalFields.model_fields.items()}
        return {"name": self.name} | {name: v for name, v in options.items() if v != defaults[name]}

    def for_scoring(self) -> Categorical:
        """Without the smoothing of labels."""
        plain = copy.copy(self)
        plain.label_smoothing = 0.0
        return plain

    def regression_targets(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        if outputs.ndim != 2:
            return None
        if are_soft(targets, outputs):
            return targets
        return F.one_hot(targets.reshape(len(outputs)).long(), outputs.shape[1])

    def positions_of(self, outputs: Tensor) -> LabelLayout | None:
        """The layout of outputs that have positions, else None."""
        return self.layout if outputs.ndim > 2 else None

    def layout_of_targets(self, targets: Tensor) -> LabelLayout | None:
        return self.positions_of(targets if targets.is_floating_point() else targets.unsqueeze(1))

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        layout = self.positions_of(outputs)
        if layout is not None:
            layout.check(outputs)
            if targets is None:
                return
            layout.check_labels(outputs, targets)
            classes = layout.classes(outputs)
            yield layout.fault(outputs, targets), lambda: layout.wrong_labels(targets, classes)
            return
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
            return
        if are_soft(targets, outputs):
            yield ~are_probabilities(targets), lambda: NOT_SOFT
            return
        if targets.shape != outputs.shape[:1] or targets.is_floating_point():
            raise PosthocUQError(
                f"Labels must be integers of shape ({outputs.shape[0]},), or probabilities of shape "
                f"{tuple(outputs.shape)}, not {targets.dtype} of shape {tuple(targets.shape)}."
                f"{in_whole_numbers(targets)}"
            )
        classes = outputs.shape[1]
        without = (
            " Leave samples without a label out of the loader: ignore_index= is for outputs with positions."
        )
        yield (
            outside(targets, classes).any(),
            lambda: (
                f"Labels run from {int(targets.min())} to {int(targets.max())}, but the model has {classes} outputs; "
                f"they must lie in 0..{classes - 1}.{from_one(targets, classes) or without}"
            ),
        )

    def accepts_output_count(self, outputs: int) -> bool:
        return outputs >= 2

    def looks_like_probabilities(self, outputs: Tensor) -> bool:
        """Every row is non-negative and sums to 1; where all rows are equal, the outputs must also come out
        of a softmax.
        """
        if outputs.ndim < 2 or self.layout.classes(outputs) < 2:
            return False
        rows = self.layout.rows(outputs.detach().float())
        tolerance = max(MAX_SUM_ERROR, torch.finfo(outputs.dtype).eps)
        if not bool(((rows.sum(1) - 1).abs() <= tolerance).all()):
            return False
        return bool((rows != rows[0]).any()) or last_function(outputs).startswith("Softmax")

    # The density

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._by_position(outputs, targets).sum(1)

    def weighted_log_prob(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        if outputs.ndim == 2 or type(self).log_prob is not Categorical.log_prob:
            return super().weighted_log_prob(outputs, targets, weights)
        logs = self._by_position(outputs, targets)
        return (logs * weights.to(logs)).sum(1)

    def _by_position(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities ``(samples, positions)`` of labels; 0 where a position does not count."""
        labels, counted = self.layout.labels(outputs, targets)
        rows, smoothing = self.layout.rows(outputs), self.label_smoothing
        if are_soft(targets, outputs):
            logs = at_least_float32(rows).log_softmax(1)
            return soft_log_prob(self._shares(targets), logs).reshape(counted.shape)
        step = max(1, _MAX_NUMBERS // rows.shape[1])
        parts = zip(rows.split(step), labels.flatten().split(step), strict=True)
        losses = [
            F.cross_entropy(
                at_least_float32(part), labels_of_part, reduction="none", label_smoothing=smoothing
            )
            for part, labels_of_part in parts
        ]
        return -torch.cat(losses).reshape(counted.shape).masked_fill(~counted, 0.0)

    def _shares(self, targets: Tensor) -> Tensor:
        """Soft labels as rows ``(samples * positions, classes)``, smoothed; a position of zeros keeps them."""
        rows = self.layout.rows(targets)
        share = self.label_smoothing / rows.shape[1]
        return (1 - self.label_smoothing) * rows + share * rows.any(1, keepdim=True)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """By the probit approximation, ``softmax(m / sqrt(1 + pi v / 8))``; see `classes_of_gaussian`."""
        return self.log_prob(
            at_least_float32(mean) * (1 + pi / 8 * at_least_float32(variance)).rsqrt(), targets
        )

    def of_shapes(self, outputs: Tensor, targets: Tensor) -> Categorical:
        """The same with its classes in the other dimension, where these targets fit only that one: soft labels by their
        sums.
        """
        other, shape = replace(self.layout, class_dim=-self.layout.class_dim), tuple(targets.shape)
        if (
            shape == self.layout.shape_of_labels(outputs) == other.shape_of_labels(outputs)
            and outputs.ndim > 2
        ):
            warn_user(
                f"Outputs of shape {tuple(outputs.shape)} and labels of shape {shape} fit classes in dimension "
                f"{self.layout.class_dim} and in dimension {other.class_dim}; the former is taken. Say which by "
                f"likelihood=uq.Categorical(class_dim=...)."
            )
        if are_soft(targets, outputs):
            keeps = outputs.ndim == 2 or not bool(self.layout.fault(outputs, targets))
            keeps = keeps or bool(other.fault(outputs, targets))
        else:
            keeps = shape == self.layout.shape_of_labels(outputs) or shape != other.shape_of_labels(outputs)
        if keeps:
            return self
        return Categorical(other.class_dim, other.ignore_index, label_smoothing=self.label_smoothing)

    # Gradients, for the Fisher

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``softmax - one_hot`` where a position counts, less the label's share that is spread over all classes."""
        labels, counted = self.layout.labels(outputs, targets)
        rows = at_least_float32(self.layout.rows(outputs)).softmax(1)
        if are_soft(targets, outputs):
            rows = rows.masked_fill(~counted.reshape(-1, 1), 0.0) - self._shares(targets.to(rows))
            return self.layout.whole(rows, self.layout.positions(outputs))
        rows = rows - self.label_smoothing / rows.shape[1]
        shares = torch.full_like(rows[:, :1], self.label_smoothing - 1)
        rows = rows.scatter_add(1, labels.reshape(-1, 1), shares).masked_fill(~counted.reshape(-1, 1), 0.0)
        return self.layout.whole(rows, self.layout.positions(outputs))

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """See `Likelihood`; positions that the targets ignore are left out of drawn and exact labels, too. Drawn labels
        are not smoothed.
        """
        outputs, plain = outputs.detach(), outputs.ndim == 2
        ours = type(self).score is Categorical.score and type(self).draw is Categorical.draw
        if fisher == "empirical" or (plain and (fisher == "exact" or not ours)):
            yield from super().gradients(outputs, targets, keys, fisher, n_samples)
        elif fisher == "exact":
            yield from self._factors(outputs, targets)
        else:
            yield from self._drawn_scores(outputs, None if plain else targets, keys, n_samples)

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """One label a position, ``(samples, *positions)``."""
        labels = self._drawn_rows(outputs, keys, range(draw, draw + 1))[1][:, 0]
        return self.layout.targets(labels.reshape(outputs.shape[0], -1), self.layout.positions(outputs))

    def _drawn_scores(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, n_samples: int
    ) -> Iterator[Tensor]:
        """`score` of the labels of each of the first draws, divided by the root of their number. The softmax is
        computed once.
        """
        layout, (probs, labels) = self.layout, self._drawn_rows(outputs, keys, range(n_samples))
        _, counted = layout.labels(outputs, targets)
        weight = counted.reshape(-1, 1).to(probs) * n_samples**-0.5
        probs *= weight
        for draw in range(n_samples):
            last = draw == n_samples - 1  # which writes into the probabilities
            rows = probs if last else probs.clone()
            rows = rows.scatter_add_(1, labels[:, draw : draw + 1], -weight)
            yield layout.whole(rows, layout.positions(outputs))

    def _drawn_rows(self, outputs: Tensor, keys: Tensor, draws: range) -> tuple[Tensor, Tensor]:
        """Probabilities ``(samples * positions, classes)``, and the labels of these draws, ``(samples * positions,
        draws)``; a few positions at a time, since the sums of probabilities are in float64.
        """
        size = prod(self.layout.positions(outputs))
        u = uniforms(keys, draws.stop * size)[:, draws.start * size :].to(
            outputs.device, widest_dtype(outputs.device)
        )
        places = u.reshape(-1, len(draws), size).transpose(1, 2).reshape(-1, len(draws))
        rows = at_least_float32(self.layout.rows(outputs))
        probs, labels = torch.empty_like(rows), list[Tensor]()
        step = max(1, _MAX_NUMBERS // rows.shape[1])
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            torch.softmax(rows[part], 1, out=probs[part])
            sums = probs[part].to(places.dtype).cumsum(1)
            found = torch.searchsorted(sums, (places[part] * sums[:, -1:]).contiguous())
            labels.append(found.clamp_(max=rows.shape[1] - 1))
        return probs, torch.cat(labels)

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Iterator[Tensor]:
        return self._factors(outputs, None)

    def _factors(self, outputs: Tensor, targets: Tensor | None) -> Iterator[Tensor]:
        """The factors of every position that counts by itself, shaped like the outputs, one after the other."""
        layout, samples = self.layout, outputs.shape[0]
        positions = layout.positions(outputs)
        _, counted = layout.labels(outputs, targets)
        rows = at_least_float32(layout.rows(outputs)).reshape(samples, counted.shape[1], -1)
        # one look at the device, and none for a single position
        used = counted.any(0).tolist() if counted.shape[1] > 1 else [True]
        for position, any_counts in enumerate(used):
            if any_counts:
                for factor in _softmax_factors(rows[:, position]):
                    whole = factor.new_zeros(rows.shape)
                    whole[:, position] = factor.masked_fill(~counted[:, position : position + 1], 0.0)
                    yield layout.whole(whole.flatten(0, 1), positions)

    # Predictions

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        logs = at_least_float32(self.layout.rows(outputs)).log_softmax(1)
        return divergence_of_classes(logs, prediction.rows.log_probs).reshape(len(outputs), -1).mean(1)

    def entropy(self, outputs: Tensor) -> Tensor:
        logs = as_double(self.layout.rows(outputs)).log_softmax(1)
        return entropy_of(logs).reshape(len(outputs), -1).mean(1)

    def classes(self, outputs: int) -> int:
        return outputs

    def predicted_class(self, outputs: Tensor) -> Tensor:
        """The class of every sample; of outputs with positions, of every position, ``(samples * positions,)``."""
        return self.layout.rows(outputs).argmax(1)

    def top_probability(self, outputs: Tensor) -> Tensor | None:
        return at_least_float32(outputs).softmax(1).amax(1) if outputs.ndim == 2 else None

    def from_blocks(self, blocks: Iterable[Tensor]) -> ClassPrediction | PositionPrediction:
        remaining = iter(blocks)
        first = next(remaining, None)
        if first is None or first.ndim <= 3:
            return classes_of_draws(remaining if first is None else chain([first], remaining))
        return positions_of_draws(chain([first], remaining), self.layout)

    def from_gaussian(self, outputs: OutputGaussian) -> ClassPrediction | PositionPrediction:
        """With positions a covariance is one of rows of classes, ``(samples * positions, classes, classes)``, or the
        `LogitCovariance` of rows.
        """
        if outputs.mean.ndim == 2:
            return classes_of_gaussian(outputs)
        layout, mean = self.layout, outputs.mean
        layout.check(mean)
        rows = outputs._replace(mean=layout.rows(mean), variance=layout.rows(outputs.variance))
        return PositionPrediction(classes_of_gaussian(rows), layout.positions(mean), layout)


def _softmax_factors(logits: Tensor) -> Iterator[Tensor]:
    """Columns ``(samples, classes)`` of a root of ``diag(p) - p p^T``, which has the rank ``classes - 1``.

    It is the Cholesky factor (Tanabe & Sagae 1992), with a column for each choice between a class and all classes after
    it, given that no earlier class was chosen.
    """
    log_total = log_remaining = logits.logsumexp(1, keepdim=True)
    for label in range(logits.shape[1] - 1):
        later_logits = logits[:, label + 1 :]
        log_after = later_logits.logsumexp(1, keepdim=True)
        # The root of P(none earlier) P(this | none earlier) P(a later one | none earlier).
        weight = (0.5 * (logits[:, label : label + 1] + log_after - log_remaining - log_total)).exp()
        earlier = logits.new_zeros(logits.shape[0], label)
        yield torch.cat([earlier, weight, -weight * (later_logits - log_after).exp()], 1)
        log_remaining = log_after
