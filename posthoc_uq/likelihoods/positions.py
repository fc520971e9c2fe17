"""Predictions at positions (pixels, tokens), and scores of whole sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import chain
from math import prod
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.batches import as_targets
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option, did_you_mean
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods.class_prediction import ClassPrediction, ClassStatistics, no_interval_error
from posthoc_uq.likelihoods.conformal import (
    SET_SIZE,
    SHARES,
    ConformalScores,
    Coverage,
    SetScore,
    TargetScores,
    applying,
    scores_of_positions,
    without_by_class,
)
from posthoc_uq.likelihoods.draws import OutputGaussian
from posthoc_uq.likelihoods.labels import LabelLayout, Layout, refuse_soft
from posthoc_uq.likelihoods.likelihood import Likelihood
from posthoc_uq.likelihoods.prediction import ClassTensors, Missing, Prediction, ScoresWhenRead, Unread

AnyAtPositions = TypeVar("AnyAtPositions", bound="AtPositions")

_MAX_LOGITS = 2**17  # of one draw that are summed at once
MAX_ENTRIES = 2**14  # names in an answer


def _by_position(of_rows: Callable[[ClassPrediction], Tensor]) -> Callable[..., Tensor]:
    """A method of `ClassPrediction` that gives one number an input, as one that gives it ``(batch, *positions)``."""

    @wraps(of_rows)
    def by_position(self: PositionPrediction) -> Tensor:
        return of_rows(self.rows).reshape(-1, *self.positions)

    return by_position


@dataclass(frozen=True, eq=False, repr=False)
class AtPositions(Prediction, ABC):
    """A prediction at every position (pixel, token, time) of a batch.

    What has one number a position is ``(batch, *positions)``. Numbers of each input, by which inputs are ranked or
    referred, are `per_input`.

    Attributes:
        rows: the positions of all inputs as one prediction of ``batch * positions`` inputs.
        positions: the sizes of the dimensions that count positions.
        layout: of the model's outputs and the targets.
        novelty_ratio: (batch, *positions), in (0, 1], the share of the prior's uncertainty that the data left; (batch,)
            where it is known of whole inputs alone; None where it was not asked for.
        mask: (batch, *positions), bool: which positions count in the numbers of an input, where `masked` said so.
        attended: of the same shape: which ones count elsewhere, by the attention mask that the model was called with;
            None for all.
    """

    kind: ClassVar[str] = "positions"
    _hidden: ClassVar[tuple[str, ...]] = ("counted", "counting", "whole")

    rows: Any
    positions: tuple[int, ...]
    layout: Layout
    mask: Annotated[Tensor | None, "batch *positions", int] = None
    attended: Annotated[Tensor | None, "batch *positions", int] = None

    def __len__(self) -> int:
        """Number of inputs."""
        return len(self.rows) // prod(self.positions)

    def __repr__(self) -> str:
        what = "values" if self.classes is None else "classes"
        size = self.layout.classes(self.outputs_mean) if self.classes is None else self.classes
        return f"{type(self).__name__}(inputs={len(self)}, positions={self.positions}, {what}={size})"

    def _map(self, values: Tensor) -> Tensor:
        return values.reshape(-1, *self.positions)

    def whole(self, values: Tensor) -> Tensor:
        """Numbers of the `rows` in the layout of the outputs."""
        return self.layout.whole(values, self.positions)

    @abstractmethod
    def _targets_of_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as those of the `rows`, and which of these count, ``(batch * positions,)``.

        Raises:
            PosthocUQError: they do not fit.
        """

    @property
    def outputs_mean(self) -> Tensor:
        """In the layout of the outputs: their mean over the weights."""
        return self.whole(self.rows.outputs_mean)

    def scores_by_position(self) -> ScoresWhenRead:
        """All known uncertainty scores by name, each (batch, *positions), computed when it is read."""
        of_rows = self.rows.scores()
        compute: dict[str, Callable[[], Tensor]] = {
            name: lambda name=name: self._map(of_rows[name]) for name in of_rows
        }
        if self.novelty_ratio is not None and self.novelty_ratio.ndim > 1:
            compute["novelty"] = self.novelty
        return ScoresWhenRead(compute)

    def per_input(
        self,
        score: str | Tensor | None = None,
        how: str = "mean",
        *,
        above: float | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """One number an input, (batch,), of a score of its positions.

        Args:
            score: a name in `scores_by_position`, by default `default_score`; or numbers (batch, *positions).
            how: ``"mean"``, or ``"largest"``.
            above: in place of these, the share of the positions whose score is above this value.
            mask: (batch, *positions), true where a position counts; by default that of `masked`, or the model's
                attention mask. An input without any is NaN.

        Raises:
            PosthocUQError: an unknown score, another `how`, or a shape that does not fit.
        """
        mask = self.counting if mask is None else mask
        score = self.default_score if score is None else score
        if isinstance(score, str):
            known = self.scores_by_position()
            if score not in known:
                raise PosthocUQError(
                    f"The scores of positions are {tuple(known)}, not {score!r}.{did_you_mean(score, known)}"
                )
            values = known[score]
        else:
            values = score
        self._check_shape("score", values)
        if mask is not None:
            self._check_shape("mask", mask)
        if how not in ("mean", "largest"):
            raise PosthocUQError(f"how must be 'mean' or 'largest', not {how!r}.")
        values = values.flatten(1)
        values = values if above is None else (values > above).to(self.rows.outputs_mean.dtype)
        counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.to(values.device)
        counted = counted.flatten(1).bool()
        if how == "largest" and above is None:
            largest = values.masked_fill(~counted, float("-inf")).amax(1)
            return largest.masked_fill(~counted.any(1), float("nan"))
        return values.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        shape = (len(self), *self.positions)
        if tuple(tensor.shape) != shape:
            raise PosthocUQError(
                f"{name} has shape {tuple(tensor.shape)} where (batch, *positions), {shape}, is needed."
            )

    @property
    def counting(self) -> Tensor | None:
        """(batch, *positions), bool: which positions count in the numbers of an input; None for all."""
        return self.attended if self.mask is None else self.mask

    def masked(self: AnyAtPositions, mask: Tensor) -> AnyAtPositions:
        """The same prediction, in whose numbers of an input the other positions, such as padding, do not count: in
        `per_input` and `scores`, and so in `familiarity` and `posthoc_uq.Referral`. Its p-values are those among the
        held-out inputs by the positions that counted when `posthoc_uq.calibrate` saw them, so the mask must leave out
        what labels or weights left out there.

        The attention mask that a model is called with need not be given: it holds for a prediction without a mask.

        Args:
            mask: (batch, *positions): true or not 0 where a position counts.

        Raises:
            PosthocUQError: another shape.
        """
        self._check_shape("mask", mask)
        mask = mask.to(self.rows.outputs_mean.device).bool()
        known = self.attended is not None and torch.equal(mask, self.attended)
        return replace(self, mask=None if known else mask)

    def known_promises(self) -> ConformalScores:
        """See `Prediction`; of a prediction with a mask by the positions of the held-out inputs that counted."""
        promises = super().known_promises()
        some = self.mask is not None or (self.attended is not None and not bool(self.attended.all()))
        if some and promises.counted is None:
            raise PosthocUQError(
                "The held-out scores are means over all positions of an input, and in this prediction some do not "
                "count; calibrate again: uq.calibrate(posterior, val_loader)."
            )
        return promises if self.mask is None else promises.of_counted()

    def scores(self) -> ScoresWhenRead:
        """See `Prediction`: the mean of each score over an input's positions that count."""
        compute: dict[str, Callable[[], Tensor]] = {
            name: partial(self.per_input, name) for name in self.scores_by_position()
        }
        if self.novelty_ratio is not None and "novelty" not in compute:
            compute["novelty"] = self.novelty
        return ScoresWhenRead(compute)

    def log_prob_by_position(self, targets: Tensor) -> Tensor:
        """(batch, *positions), in nats: log of the probability, or density, of the target at each position, 0 where it
        does not count; of soft labels the mean over them. With `next_token` position t has that of the label at t + 1.

        Args:
            targets: as the loader gives them.
        """
        own, counted = self._targets_of_rows(targets)
        return self._map(self.rows.log_prob(own).masked_fill(~counted, 0.0))

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: the sum of `log_prob_by_position`. Each position's probability is averaged over the
        weights by itself.
        """
        return self.log_prob_by_position(targets).flatten(1).sum(1)

    def counted(self, targets: Tensor) -> tuple[Any, Tensor]:
        """The positions of all inputs that count, as one prediction of rows, with their targets."""
        own, counted = self._targets_of_rows(targets)
        return self.rows.picked(counted), own[counted]

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Those of the `rows` at all positions that count."""
        rows, own = self.counted(targets)
        return rows.quality(own, bins)

    def with_novelty(self: AnyAtPositions, ratio: Tensor | Unread | None) -> AnyAtPositions:
        """The same prediction with the novelty of its positions (batch, *positions), of a coarser grid, whose nearest
        value each position gets, or of its inputs (batch,).
        """
        if isinstance(ratio, Tensor) and ratio.ndim > 1 and tuple(ratio.shape[1:]) != self.positions:
            ratio = F.interpolate(ratio.unsqueeze(1), size=self.positions, mode="nearest").squeeze(1)
        return super().with_novelty(ratio)

    def of_one_network(self: AnyAtPositions) -> AnyAtPositions:
        """The same without the parts that need several sets of weights."""
        return replace(self, rows=self.rows.of_one_network())

    def numbers(self) -> dict[str, Tensor]:
        """Those of the rows, as (batch, ...)."""
        values = {name: value.reshape(len(self), -1) for name, value in self.rows.numbers().items()}
        return values | self._stored()

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name; those with a number for each class or value in the layout of the outputs, the others as
        maps.
        """
        values = {
            name: self._map(value) if value.ndim == 1 else self.whole(value)
            for name, value in self.rows.to_dict().items()
            if value.ndim < 3
        }
        return values | ({} if self.novelty_ratio is None else {"novelty": self.novelty_ratio})

    def completed(self: AnyAtPositions) -> AnyAtPositions:
        """See `Prediction`."""
        return replace(self, rows=self.rows.completed())

    def to(self: AnyAtPositions, device: torch.device | str) -> AnyAtPositions:
        """The same prediction with its tensors on `device`."""
        return replace(super().to(device), rows=self.rows.to(device))

    def picked(self: AnyAtPositions, chosen: Tensor | slice) -> AnyAtPositions:
        """The inputs where `chosen` (batch,) is true, or those of a slice."""
        places = torch.arange(len(self.rows), device=self.rows.outputs_mean.device).reshape(len(self), -1)
        return replace(super().picked(chosen), rows=self.rows.picked(places[chosen].flatten()))

    @staticmethod
    def cat(predictions: Sequence[Any]) -> Any:
        """Predictions of several batches as one, in order.

        Raises:
            PosthocUQError: nothing to join, or batches of different positions.
        """
        if not predictions:
            raise PosthocUQError("cat needs at least one prediction.")
        sizes = sorted({prediction.positions for prediction in predictions})
        if len(sizes) > 1:
            raise PosthocUQError(
                f"Predictions with positions {sizes} cannot be one; pad all inputs to one size, or predict batch by "
                f"batch: [predictor(batch) for batch in loader]."
            )
        if any(p.attended is not None for p in predictions):
            predictions = [replace(p, attended=_or_all(p, p.attended)) for p in predictions]
        if any(p.mask is not None for p in predictions):
            predictions = [replace(p, mask=_or_all(p, p.counting)) for p in predictions]
        rows = type(predictions[0].rows).cat([p.rows for p in predictions])
        return replace(Prediction.cat(predictions), rows=rows)


@dataclass(frozen=True, eq=False, repr=False)
class PositionPrediction(AtPositions):
    """Class probabilities at every position of a batch, and how far the weights disagree about them.

    What has one number a position is ``(batch, *positions)``; probabilities and logits are in the layout of the model's
    outputs. See `AtPositions` for its attributes.
    """

    default_score: ClassVar[str] = "entropy"
    loss_name: ClassVar[str] = "accuracy"
    _hidden: ClassVar[tuple[str, ...]] = ("labels_of_rows",)

    rows: ClassPrediction
    layout: LabelLayout

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.rows.classes

    @property
    def probs(self) -> Tensor:
        """In the layout of the outputs: the predictive probabilities."""
        return self.whole(self.rows.probs)

    @property
    def logits_mean(self) -> Tensor:
        """In the layout of the outputs: the mean of the logits over the weights."""
        return self.outputs_mean

    @property
    def logits_variance(self) -> Tensor:
        """In the layout of the outputs: the variance of the logits over the weights."""
        return self.whole(self.rows.logits_variance)

    @property
    def epistemic_variance(self) -> Tensor:
        """The `logits_variance`; see `ClassPrediction`."""
        return self.logits_variance

    # each (batch, *positions); see `ClassPrediction`
    entropy = _by_position(ClassPrediction.entropy)
    expected_entropy = _by_position(ClassPrediction.expected_entropy)
    mutual_information = _by_position(ClassPrediction.mutual_information)
    variation_ratio = _by_position(ClassPrediction.variation_ratio)
    max_probability = _by_position(ClassPrediction.max_probability)
    predicted = _by_position(ClassPrediction.predicted)

    def shares(self) -> Tensor:
        """(batch, classes): at which share of an input's positions that count each class is the most probable one."""
        counting = self.counting
        counts = torch.stack(
            [
                torch.bincount(
                    labels.flatten() if counting is None else labels[counting[i]], minlength=self.classes
                )
                for i, labels in enumerate(self.predicted())
            ]
        )
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def answers(
        self, *, top_k: int = 5, level: float = 0.9, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """See `Prediction`: the shares of classes at the positions of an input that count, and position by position
        what was predicted, and the sets, where that is no more than 16,384 classes; None at the others.
        """
        label, answers = self.naming(names), list[dict[str, Any]]()
        shares = self.shares()
        orders = shares.argsort(dim=1, descending=True, stable=True)[:, :top_k].tolist()
        for index, order in enumerate(orders):
            one = self.picked(slice(index, index + 1))
            classes, counting = one.predicted().flatten(), one.counting
            counted = torch.ones_like(classes).bool() if counting is None else counting.flatten()
            places = counted.tolist()
            answers.append(
                {
                    "shares": [
                        {"label": label(i), "index": i, "share": float(shares[index, i])} for i in order
                    ],
                    "positions": list(self.positions),
                }
            )
            if len(places) <= MAX_ENTRIES:
                answers[-1]["prediction"] = self._nested([label(i) for i in classes.tolist()], places)
            if isinstance(self.promises, ConformalScores):
                held = one.layout.rows(one.set(level)) & counted.unsqueeze(1)
                answers[-1] |= {"level": level, "set_size": float(held.sum()) / max(1, int(counted.sum()))}
                if max(len(held), int(held.sum())) <= MAX_ENTRIES:
                    sets: list[list[str]] = [[] for _ in places]
                    for position, own in held.nonzero().tolist():
                        sets[position].append(label(own))
                    answers[-1]["set"] = self._nested(sets, places)
        return answers

    def _nested(self, values: Sequence[Any], counted: Sequence[bool]) -> list[Any]:
        """One value a position as nested lists; None where a position does not count."""
        found: list[Any] = [value if counts else None for value, counts in zip(values, counted, strict=True)]
        for size in self.positions[:0:-1]:
            found = [found[start : start + size] for start in range(0, len(found), size)]
        return found

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Of predictions of values: bounds of them with a promised probability."""
        raise no_interval_error()

    @without_by_class
    def set(self, level: float = 0.9, *, allow_empty: bool = False) -> Tensor:
        """The classes that a set holds at every position, so that an input like the held-out ones has with a
        probability of at least `level` at least this share of its labels in the sets of their positions.

        A threshold of ``1 - p`` is common to all positions: of each held-out input the smallest that so large a share
        of its labels do not exceed, and of these the ``ceil((n + 1) level)``-th smallest. Inputs are exchangeable,
        and their positions are not.

        Args:
            level: in (0, 1).
            allow_empty: whether a set may be empty; otherwise it then holds the most probable class.

        Returns:
            bool, in the layout of the outputs.

        Raises:
            PosthocUQError: the posterior has no held-out scores for this head and these hyperparameters, or too few for
                the level.
        """
        promises = applying(self.promises)  # a mask does not change which labels belong to a set
        return self.whole(promises.sets_at_positions(self.rows.probs, level, allow_empty))

    def labels_of_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Labels, of soft ones the most probable, and whether they count, each (batch * positions,).

        Raises:
            PosthocUQError: they do not fit.
        """
        outputs = self.rows.probs.new_empty(()).expand(
            (len(self), self.classes, *self.positions)
            if self.layout.class_dim == 1
            else (len(self), *self.positions, self.classes)
        )
        targets = as_targets(targets)
        self.layout.check_labels(outputs, targets)
        if bool(self.layout.fault(outputs, targets)):
            raise PosthocUQError(self.layout.wrong_labels(targets, self.classes))
        labels, counted = self.layout.labels(outputs, targets)
        return labels.flatten(), counted.flatten()

    def _targets_of_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`labels_of_rows`, but soft labels ``(batch * positions, classes)`` as they are."""
        labels, counted = self.labels_of_rows(targets)
        soft = self.layout.soft_rows(self.outputs_mean, as_targets(targets))
        return (labels if soft is None else soft.to(labels.device)), counted

    def labelled(self, targets: Tensor) -> Tensor:
        """(batch, *positions): whether a position has a label that counts. With `next_token` position t has the label
        at t + 1.
        """
        return self._map(self.labels_of_rows(targets)[1])

    def perplexity(self, targets: Tensor) -> Tensor:
        """(batch,): ``exp(-log_prob / n)`` with the n positions of an input that count; NaN where none does."""
        counted = self.labelled(targets).flatten(1).sum(1)
        return (-self.log_prob(targets) / counted).exp()

    def fitting(self, targets: Tensor) -> Tensor:
        self.labels_of_rows(targets)
        return targets

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores:
        """See `Prediction`: quantiles of the scores of an input's labels.

        Raises:
            PosthocUQError: the score is none of positions, or the labels do not fit, or are soft.
        """
        if sets != "lac":
            raise PosthocUQError(f"Sets of positions are by 'lac'; sets={sets!r} is for one label an input.")
        given = as_targets(targets)
        refuse_soft(given[~given.isnan()])
        labels, counted = (each.reshape(len(self), -1) for each in self.labels_of_rows(targets))
        own = as_double(self.rows.probs).gather(1, labels.reshape(-1, 1))
        scores = scores_of_positions(1 - own.reshape(labels.shape), counted)
        groups = counted.any(1, keepdim=True).long().expand_as(scores)
        return TargetScores("positions", scores, groups, SHARES)

    def coverage(
        self, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
    ) -> Coverage:
        """See `Prediction`: an entry for every input with positions that count."""
        chosen = self.layout.rows(self.set(level, allow_empty=allow_empty))
        labels, counted = self.labels_of_rows(targets)
        held = (chosen.gather(1, labels[:, None])[:, 0] & counted).reshape(len(self), -1)
        sizes = (chosen.sum(1) * counted).reshape(held.shape)
        counts = counted.reshape(held.shape).sum(1)
        some = counts > 0
        shares, sizes = (as_double(part.sum(1)[some]) / as_double(counts[some]) for part in (held, sizes))
        inputs = some.nonzero()[:, 0]
        return Coverage(as_double(shares >= level - 1e-9), sizes, inputs, None, SET_SIZE)

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the share of an input's counted positions at which the predicted class is wrong."""
        labels, counted = self.labels_of_rows(targets)
        wrong, counts = (
            as_double(each).reshape(len(self), -1).sum(1)
            for each in ((self.rows.predicted() != labels) & counted, counted)
        )
        return wrong / counts.clamp(min=1)

    def unshifted(self) -> PositionPrediction:
        """The same for single positions: labels are then those that belong to each, whatever `next_token` says."""
        return replace(self, layout=replace(self.layout, next_token=False))

    def tensors(self) -> ClassTensors:
        """See `Prediction`; entropy, mutual information and novelty are maps."""
        parts = self.rows.tensors()
        entropy = self._map(parts.entropy)
        return ClassTensors(
            self.probs,
            self.logits_mean,
            self.logits_variance,
            entropy,
            self._map(parts.mutual_information),
            self._novelty_like(entropy),
        )


def _or_all(prediction: AtPositions, mask: Tensor | None) -> Tensor:
    """The mask, or one of all positions."""
    if mask is not None:
        return mask
    device = prediction.rows.outputs_mean.device
    return torch.ones(len(prediction), *prediction.positions, dtype=torch.bool, device=device)


def positions_of_draws(blocks: Iterable[Tensor], layout: LabelLayout) -> PositionPrediction:
    """The prediction from blocks ``(draws, batch, ...)`` of logits with positions, each used once.

    Beside the blocks it takes at most 24 times the memory of one draw's outputs in float32, however many draws there
    are: sums in float64 of logits, of probabilities and of their squares.

    Raises:
        PosthocUQError: there is no draw, or the logits do not fit.
    """
    parts: list[ClassStatistics] = []
    positions: tuple[int, ...] = ()
    for block in blocks:
        layout.check(block[0])
        positions = layout.positions(block[0])
        for outputs in block:
            rows = layout.rows(outputs)
            split = rows.split(max(1, _MAX_LOGITS // rows.shape[1]))
            parts = parts or [ClassStatistics() for _ in split]
            for statistics, part in zip(parts, split, strict=True):
                statistics.add(part.unsqueeze(0))
    if not parts:
        raise PosthocUQError("A prediction needs at least one weight sample.")
    predictions: list[ClassPrediction] = []
    while parts:  # each part's sums are freed before the next part's numbers are made
        predictions.append(parts.pop(0).prediction())
    return PositionPrediction(ClassPrediction.cat(predictions), positions, layout)


ChannelDim = Literal[1, -1]


class ChannelFields(Record):
    """The dimension of the channels, and what NaN among the targets is; a file holds what is not the default."""

    channel_dim: ChannelDim = 1
    missing: Missing = "error"


class Channelled(Likelihood, ABC):
    """Targets of which each belongs to one output, or a few, of the same position, where outputs have positions:
    ``(samples, channels, *positions)``, or ``(samples, *positions, channels)`` with ``channel_dim=-1``. Given the
    outputs, positions are independent, and an output ``(samples, channels)`` is one.

    A subclass gives the predictions of rows ``(samples, channels)``. Divergences of a sample, by which a prior is
    found, are means over its positions.
    """

    channel_dim: int = 1  # an attribute of the object where it is another, so that files have it

    def _set_channel_dim(self, channel_dim: int) -> None:
        """Take the argument of the constructor.

        Raises:
            PosthocUQError: it is neither 1 nor -1.
        """
        if check_option("channel_dim", channel_dim, ChannelDim) != 1:
            self.channel_dim = channel_dim

    @property
    def layout(self) -> Layout:
        """Of outputs and targets."""
        return Layout(self.channel_dim)

    def positions_of(self, outputs: Tensor) -> Layout | None:
        return self.layout if outputs.ndim > 2 else None

    def layout_of_targets(self, targets: Tensor) -> Layout | None:
        return self.positions_of(targets)

    def channel_axis(self, outputs: Tensor) -> int:
        """The dimension of the channels of outputs ``(samples, ...)``; the last where they have no positions."""
        return self.channel_dim if outputs.ndim > 2 else -1

    def check_positions(self, outputs: Tensor, targets: Tensor | None) -> None:
        """Refuse outputs with positions, or targets for them, of a shape that does not fit.

        Raises:
            PosthocUQError: targets have another shape than `mean`, or there is nothing.
        """
        layout = self.positions_of(outputs)
        if layout is None:
            return
        layout.check(outputs)
        wanted = self.shape_of_targets(outputs)
        if targets is None or tuple(targets.shape) == wanted:
            return
        missing = tuple(targets.shape) == tuple(
            n for at, n in enumerate(wanted) if at != self.channel_dim % len(wanted)
        )
        dim = self.channel_dim
        advice = (
            f" Give them their dimension of 1: y.unsqueeze({dim}), or batch_to_targets=lambda batch: "
            f"batch[1].unsqueeze({dim})."
            if missing and wanted[dim] == 1
            else f" Outputs are taken as (samples, channels, *positions); where channels come last, pass "
            f"likelihood=uq.{type(self).__name__}(..., channel_dim=-1)."
            if dim == 1
            else ""
        )
        raise PosthocUQError(
            f"Outputs of shape {tuple(outputs.shape)} need targets of shape {wanted}, not {tuple(targets.shape)}."
            f"{advice}"
        )

    def shape_of_targets(self, outputs: Tensor) -> tuple[int, ...]:
        """The shape of targets for outputs with positions."""
        return tuple(outputs.shape)

    def accepts_output_count(self, outputs: int) -> bool:
        """Whether a model may have so many outputs a sample, at one position or at several."""
        return any(super(Channelled, self).accepts_output_count(part) for part in _divisors(outputs))

    def weighted_log_prob(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        layout = self.layout
        logs = self.log_prob(layout.rows(outputs), layout.rows(targets)).reshape(weights.shape)
        weights = weights.to(logs)
        return (torch.where(weights > 0, logs, torch.zeros_like(logs)) * weights).sum(1)

    @abstractmethod
    def divergence_of_rows(self, outputs: Tensor, prediction: Any) -> Tensor:
        """`divergence` without positions."""

    def rows_from_blocks(self, blocks: Iterable[Tensor]) -> Prediction:
        """`from_blocks` without positions."""
        return super().from_blocks(blocks)

    def rows_from_gaussian(self, outputs: OutputGaussian) -> Prediction:
        """`from_gaussian` without positions."""
        return super().from_gaussian(outputs)

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        layout = self.positions_of(outputs)
        if layout is None:
            return self.divergence_of_rows(outputs, prediction)
        found = self.divergence_of_rows(layout.rows(outputs), prediction.rows)
        return found.reshape(len(outputs), -1).mean(1)

    def from_blocks(self, blocks: Iterable[Tensor]) -> Prediction:
        remaining = iter(blocks)
        first = next(remaining, None)
        if first is None or first.ndim <= 3:
            return self.rows_from_blocks(remaining if first is None else chain([first], remaining))
        layout = self.layout
        layout.check(first[0])
        of_rows = (torch.stack(list(map(layout.rows, block))) for block in chain([first], remaining))
        return self.at_positions(self.rows_from_blocks(of_rows), layout.positions(first[0]))

    def from_gaussian(self, outputs: OutputGaussian) -> Prediction:
        layout = self.positions_of(outputs.mean)
        if layout is None:
            return self.rows_from_gaussian(outputs)
        rows = outputs._replace(mean=layout.rows(outputs.mean), variance=layout.rows(outputs.variance))
        return self.at_positions(self.rows_from_gaussian(rows), layout.positions(outputs.mean))

    @abstractmethod
    def at_positions(self, rows: Any, positions: tuple[int, ...]) -> AtPositions:
        """The prediction of all positions, from that of rows."""


def _divisors(number: int) -> Iterator[int]:
    return (part for part in range(1, number + 1) if number % part == 0)


def sequence_scores(
    prediction: PositionPrediction, labels: Tensor | None = None, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """One number a sequence of everything that is known of its tokens, each ``(batch,)``.

    With labels: ``"log_probability"``, the sum over tokens of the log of each one's mean probability, in nats;
    ``"perplexity"``, ``exp(-log_probability / tokens)``; ``"tokens"``, how many count. Always, for every score of
    `PositionPrediction.scores_by_position` (``"entropy"``, ``"mutual_information"``, ``"novelty"`` ...), its mean over
    the tokens by its name, and the largest as ``"largest_entropy"`` and so on.

    The joint log-probability of a sequence is another number: the logarithm of the mean over draws of its probability
    under each one. ``likelihood.log_prob(outputs, labels)`` is that of one draw, for each ``outputs`` of the sampling
    head's ``predictor.outputs(...)``; see the example.

    Args:
        prediction: of outputs ``(batch, tokens, words)``.
        labels: (batch, tokens), as the loader gives them; tokens whose label is ignored do not count, and with
            ``next_token=True`` the outputs at a token belong to the label after it.
        mask: (batch, tokens), true where a token counts, such as the attention mask; in place of labels.

    Raises:
        PosthocUQError: the prediction has no positions, both are given, or shapes do not fit.

    Example:
        ```python
        causal = uq.Categorical(class_dim=-1, next_token=True)
        logits = torch.randn(10, 2, 7, 5)  # draws, sequences, tokens, words
        labels = torch.randint(5, (2, 7))
        scores = uq.sequence_scores(causal.from_draws(logits), labels)
        print(scores["log_probability"])  # tokens one by one
        draws = torch.stack([causal.log_prob(own, labels) for own in logits])
        print(draws.logsumexp(0) - torch.tensor(10.0).log())  # whole
        ```
    """
    if not isinstance(cast(Any, prediction), PositionPrediction):
        raise PosthocUQError(
            f"sequence_scores needs a PositionPrediction, which likelihood=uq.Categorical(class_dim=-1) gives for "
            f"outputs (batch, tokens, words), not a {type(prediction).__name__}."
        )
    if labels is not None and mask is not None:
        raise PosthocUQError("Labels say which tokens count; give labels or mask, not both.")
    found: dict[str, Tensor] = {}
    if labels is not None:
        mask = prediction.labelled(labels)
        found["log_probability"] = prediction.log_prob(labels)
        found["perplexity"] = prediction.perplexity(labels)
        found["tokens"] = mask.flatten(1).sum(1)
    for name, score in prediction.scores_by_position().items():
        found[name] = prediction.per_input(score, mask=mask)
        found[f"largest_{name}"] = prediction.per_input(score, "largest", mask=mask)
    return found


def novelty_at(
    ratio: Tensor | Unread | None, sizes: tuple[int, ...], picked: Tensor
) -> Tensor | Unread | None:
    """The novelty of some positions, ``(batch, k)``, from that of all, of a coarser grid or of inputs.

    Args:
        ratio: ``(batch, *grid)``, or ``(batch,)``, read or not, which stays as it is; or None.
        sizes: of the dimensions that count positions.
        picked: indices into a sample's rows.
    """
    if not isinstance(ratio, Tensor) or ratio.ndim == 1:
        return ratio
    if tuple(ratio.shape[1:]) != sizes:
        ratio = F.interpolate(ratio.unsqueeze(1), size=sizes, mode="nearest").squeeze(1)
    return ratio.flatten(1)[:, picked.to(ratio.device)]
