"""Predictions of values and of several labels at positions: maps such as depth or a denoised image, sequences such as a
forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from posthoc_uq.core.batches import as_targets
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import one_of
from posthoc_uq.likelihoods.conformal import (
    FINE_SHARES,
    INTERVAL_WIDTH,
    SET_SIZE,
    ConformalScores,
    Coverage,
    SetScore,
    TargetScores,
    applying,
    scores_of_positions,
    without_by_class,
)
from posthoc_uq.likelihoods.positions import MAX_ENTRIES, AtPositions
from posthoc_uq.likelihoods.prediction import ClassTensors, ValueTensors

By = Literal["position", "image"]
"""What a promise of an interval counts: values, or images."""
_MAX_RATED = 2**14  # positions whose intervals are of drawn values


def _in_layout(name: str) -> Any:
    """A property of the rows' prediction, in the layout of the outputs."""

    def whole(self: AtPositions) -> Tensor:
        return self.whole(getattr(self.rows, name))

    whole.__doc__ = f"In the layout of the outputs: the `{name}` of the `rows`."
    return property(whole)


@dataclass(frozen=True, eq=False, repr=False)
class MapPrediction(AtPositions):
    """A distribution of every value at every position, its variance split into the part by the weights and that by
    observation noise.

    What has a number for each value is in the layout of the outputs, ``(batch, channels, *positions)`` or ``(batch,
    *positions, channels)``; scores, novelty among them, are ``(batch, *positions)``, means over the values of a
    position.

    Attributes:
        rows: the positions of all inputs as one `RegressionPrediction`, or `DrawnPrediction`, of ``batch * positions``
            inputs.
        positions: see `AtPositions`, as what follows.
        layout: of the outputs and targets.
    """

    default_score: ClassVar[str] = "standard_deviation"
    loss_name: ClassVar[str] = "rmse"
    _hidden: ClassVar[tuple[str, ...]] = ("classes", "means_by_input")

    mean = _in_layout("mean")
    variance = _in_layout("variance")
    standard_deviation = _in_layout("standard_deviation")
    epistemic_variance = _in_layout("epistemic_variance")
    noise_variance = _in_layout("noise_variance")

    def means_by_input(self, level: float) -> dict[str, Tensor]:
        """(batch, channels): what `value_columns` has, as means over an input's positions that count."""
        found, counting = self.value_columns(level), self.counting
        counted = (
            torch.ones(len(self), *self.positions, device=self.mean.device) if counting is None else counting
        )
        flat = as_double(counted.reshape(len(self), -1, 1))
        return {
            name: (as_double(self.layout.rows(values)).reshape(len(self), flat.shape[1], -1) * flat).sum(1)
            / flat.sum(1).clamp(min=1)
            for name, values in found.items()
        }

    def answers(
        self, *, top_k: int = 5, level: float = 0.9, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """See `Prediction`: means over an input's positions, one a channel, and the values themselves, nested lists in
        the layout of the outputs under ``maps``, where these are no more than 16,384 numbers; None at others.
        """
        means, columns = self.means_by_input(level), self.value_columns(level)
        few = self.mean[0].numel() <= MAX_ENTRIES
        return [
            {
                **{name: values[index].tolist() for name, values in means.items()},
                "level": level,
                "positions": list(self.positions),
                "maps": {name: values[index].tolist() for name, values in columns.items()} if few else None,
            }
            for index in range(len(self))
        ]

    def quantile(self, q: float) -> Tensor:
        """In the layout of the outputs: the value below which an observation falls with probability `q`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1.
        """
        return self.whole(self.rows.quantile(q))

    def interval(self, level: float = 0.95, by: By = "position") -> tuple[Tensor, Tensor]:
        """Bounds of every value, each in the layout of the outputs.

        Where the posterior has held-out scores that apply (`posthoc_uq.calibrate`), the bounds of each channel take all
        values whose score, the distance ``|y - m| / s`` from the mean in predictive deviations (or that of the
        distribution function from 1/2), is at most q:

        * ``by="position"``: the smallest q with which a mean share of ``(n + 1) level / n`` of an input's values is
          within the bounds, over n held-out inputs. So of the values of a new input like these at least the share
          `level` is expected to be (Angelopoulos, Bates, Fisch, Lei, Schuster, "Conformal risk control", 2024).
        * ``by="image"``: with a probability of at least `level` a new input has at least this share of each channel's
          values within the bounds, which are wider. Of the q that so large a share of each held-out input's values do
          not exceed it is the ``ceil((n + 1) level)``-th smallest.

        Inputs are exchangeable, and their positions need not be. Without held-out scores the bounds are those of the
        distribution of each value, and ``by="image"`` an error.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1, another `by`, ``by="image"`` of a single position,
                or too few held-out scores.
        """
        one_of("by", by, ("position", "image"))
        if by == "image" and self.layout.rows(self.mean).shape[0] == self.mean.shape[0] > 0:
            raise PosthocUQError(
                f"by='image' is over an input's positions, and outputs {tuple(self.mean.shape)} have one: where "
                f"channels come last, fit with likelihood=uq.Gaussian(channel_dim=-1); otherwise leave it out."
            )
        if isinstance(self.promises, ConformalScores) or by == "image":
            promises = applying(self.promises)  # a mask does not change which values belong to an interval
            found = promises.bounds if by == "position" else promises.bounds_by_input
            low, high = self.rows.within(found(promises.kind, level, self.layout.classes(self.mean)))
        else:
            low, high = self.rows.interval(level)
        return self.whole(low), self.whole(high)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` observations of every value, ``(n, *shape of `mean`)``; positions are drawn independently of each
        other.

        Args:
            n: observations per value.
            generator: of the random numbers; without one they differ from call to call.

        Raises:
            PosthocUQError: `n` is below 1.
        """
        return torch.stack([self.whole(drawn) for drawn in self.rows.sample(n, generator)])

    def _targets_of_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        targets, like = as_targets(targets), self.mean
        if targets.shape != like.shape:
            raise PosthocUQError(
                f"The targets have shape {tuple(targets.shape)} and the predictions {tuple(like.shape)}; take them "
                f"apart with batch_to_targets."
            )
        counted = self.layout.counts(like, targets).flatten()
        return self.rows.fitting(self.layout.rows(targets)), counted

    def fitting(self, targets: Tensor) -> Tensor:
        """The targets as they are, once they were found to fit."""
        self._targets_of_rows(targets)
        return as_targets(targets)

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores | None:
        """See `Prediction`: by channel, quantiles of the scores of an input's values."""
        found, counted = self._scores_of_rows(targets, sets)
        if found is None:
            return None
        return _of_inputs(found, counted, len(self))

    def _scores_of_rows(self, targets: Tensor, sets: SetScore) -> tuple[TargetScores | None, Tensor]:
        """The scores of every value, those of ``batch * positions`` samples, and which count, ``(batch * positions,
        channels)``.
        """
        own, counted = self._targets_of_rows(targets)
        found = self.rows.target_scores(own, sets, torch.zeros(len(own), dtype=torch.int64, device="cpu"))
        counted = counted.unsqueeze(1)
        return found, counted if found is None else counted & (found.groups > 0)

    def coverage(
        self, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
    ) -> Coverage:
        """See `Prediction`: for every input with positions that count the share of its values within the bounds."""
        found, counted = self._scores_of_rows(targets, "lac")
        assert found is not None  # there are promises of targets
        bounds = applying(self.promises).bounds(found.kind, level, found.scores.shape[1])
        within = as_double(found.scores <= bounds.to(found.scores.device))
        counts = counted.reshape(len(self), -1)
        some = counts.any(1)

        def mean_of(values: Tensor) -> Tensor:
            known = values.masked_fill(~counted, 0.0).reshape(counts.shape)
            return known.sum(1)[some] / as_double(counts.sum(1)[some])

        inputs, sizes = some.nonzero()[:, 0], within.new_empty(0)
        if widths:
            low, high = (as_double(self.layout.rows(each)) for each in self.interval(level))
            sizes = mean_of(high - low)
        return Coverage(mean_of(within), sizes, inputs, None, INTERVAL_WIDTH)

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the squared error, mean over the values of an input that count; 0 where none does."""
        own, counted = self._targets_of_rows(targets)
        squares = self.rows.losses(own).masked_fill(~counted, 0.0).reshape(len(self), -1)
        return squares.sum(1) / counted.reshape(len(self), -1).sum(1).clamp(min=1)

    def tensors(self) -> ValueTensors:
        """See `Prediction`; novelty is a map where it is known of positions."""
        novelty = self._novelty_like(self.mean.flatten(1)[:, 0])
        return ValueTensors(self.mean, self.variance, self.epistemic_variance, novelty)


@dataclass(frozen=True, eq=False, repr=False)
class DrawnMapPrediction(MapPrediction):
    """A `MapPrediction` of values that are no Gaussian's, such as counts, from draws of the outputs; see
    `DrawnPrediction`.
    """

    def probability(self, value: Tensor | float) -> Tensor:
        """In the layout of the outputs: the probability of a value, as of a count; a density where values are
        continuous.

        Args:
            value: one for all, or a tensor that broadcasts to the shape of `mean`.
        """
        return self.whole(self.rows.probability(self._of_rows(value)))

    def cdf(self, value: Tensor | float) -> Tensor:
        """In the layout of the outputs: the probability that each value is at most `value`; as `probability`."""
        return self.whole(self.rows.cdf(self._of_rows(value)))

    def _of_rows(self, value: Tensor | float) -> Tensor | float:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        return self.layout.rows(value.expand(self.mean.shape))

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Those of the `rows`, of 16,384 positions at most, evenly taken, since intervals are of drawn values."""
        rows, own = self.counted(targets)
        step = -(-len(rows) // _MAX_RATED)
        return rows.picked(slice(None, None, step)).quality(own[::step], bins)


@dataclass(frozen=True, eq=False, repr=False)
class LabelMapPrediction(AtPositions):
    """The probability of every label at every position, and how far the weights disagree about it.

    Probabilities and logits are in the layout of the outputs, ``(batch, labels, *positions)`` or ``(batch, *positions,
    labels)``; entropy and other scores are ``(batch, *positions)``, sums over the labels as of `MultilabelPrediction`.

    Attributes:
        rows: the positions of all inputs as one `MultilabelPrediction` of ``batch * positions`` inputs.
        positions: see `AtPositions`, as what follows.
        layout: of the outputs and labels.
    """

    default_score: ClassVar[str] = "entropy"
    loss_name: ClassVar[str] = "hamming_loss"

    probs = _in_layout("probs")
    logits_mean = _in_layout("logits_mean")
    logits_variance = _in_layout("logits_variance")
    epistemic_variance = _in_layout("epistemic_variance")

    @property
    def categories(self) -> int:
        """How many labels a position may have."""
        return self.rows.categories

    def shares(self) -> Tensor:
        """(batch, labels): at which share of an input's positions that count each label is predicted."""
        counting, found = (
            self.counting,
            as_double(self.rows.predicted()).reshape(len(self), -1, self.categories),
        )
        if counting is None:
            return found.mean(1)
        counted = as_double(counting.flatten(1)).unsqueeze(2)
        return (found * counted).sum(1) / counted.sum(1).clamp(min=1)

    def answers(
        self, *, top_k: int = 5, level: float = 0.9, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """See `Prediction`: the shares of an input's positions at which each label is predicted."""
        label, shares = self.naming(names), self.shares()
        orders = shares.argsort(dim=1, descending=True, stable=True)[:, :top_k].tolist()
        return [
            {
                "shares": [{"label": label(i), "index": i, "share": float(own[i])} for i in order],
                "positions": list(self.positions),
            }
            for order, own in zip(orders, shares, strict=True)
        ]

    def predicted(self, threshold: float = 0.5) -> Tensor:
        """In the layout of the outputs, boolean: the labels whose probability is above the threshold."""
        return self.whole(self.rows.predicted(threshold))

    def label_entropy(self) -> Tensor:
        """In the layout of the outputs, in nats: the entropy of every label's mean probability."""
        return self.whole(self.rows.label_entropy())

    def entropy(self) -> Tensor:
        """(batch, *positions), in nats: the sum of the labels' entropies."""
        return self._map(self.rows.entropy())

    def mutual_information(self) -> Tensor:
        """(batch, *positions), in nats: the information that the weights hold about each label, summed over labels."""
        return self._map(self.rows.mutual_information())

    def max_probability(self) -> Tensor:
        """(batch, *positions): the probability that all decisions of `predicted` at a position are right."""
        return self._map(self.rows.max_probability())

    @without_by_class
    def set(self, level: float = 0.9, *, allow_empty: bool = False, by: By = "position") -> Tensor:
        """In the layout of the outputs, boolean: the labels in the set of each position, by held-out scores
        (`posthoc_uq.calibrate`). Of a label's positions in a new input like the held-out ones at least the share
        `level` is expected to have it in their sets; with ``by="image"`` a new input has so large a share with this
        probability. See `MapPrediction.interval`.

        Args:
            level: in (0, 1).
            allow_empty: a set of labels always may be.
            by: see above.

        Raises:
            PosthocUQError: there are no held-out scores that apply, or too few.
        """
        one_of("by", by, ("position", "image"))
        promises = applying(self.promises)
        found = promises.bounds if by == "position" else promises.bounds_by_input
        return self.whole(self._chosen(found("label", level, self.categories)))

    def _chosen(self, bounds: Tensor) -> Tensor:
        return ~(1 - as_double(self.rows.probs) > bounds.to(self.rows.probs.device))

    def _targets_of_rows(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        targets, like = as_targets(targets), self.rows.probs.new_empty(()).expand(self.probs.shape)
        if targets.shape != like.shape:
            raise PosthocUQError(
                f"Labels must be shaped like the probabilities, {tuple(like.shape)}, not {tuple(targets.shape)}."
            )
        return self.rows.fitting(self.layout.rows(targets)), self.layout.counts(like, targets).flatten()

    def fitting(self, targets: Tensor) -> Tensor:
        """The labels as they are, once they were found to fit."""
        self._targets_of_rows(targets)
        return as_targets(targets)

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores:
        """See `Prediction`: by label, quantiles of the scores of an input's positions that have it.

        Raises:
            PosthocUQError: labels are soft.
        """
        own, counted = self._targets_of_rows(targets)
        found = self.rows.target_scores(own, sets, torch.zeros(len(own), dtype=torch.int64, device="cpu"))
        return _of_inputs(found, counted.unsqueeze(1) & (found.groups > 0), len(self))

    def coverage(
        self, targets: Tensor, level: float, *, allow_empty: bool = False, widths: bool = True
    ) -> Coverage:
        """See `Prediction`: for every input and label that has positions the share of these whose set holds it."""
        own, counted = self._targets_of_rows(targets)
        chosen = self._chosen(applying(self.promises).bounds("label", level, self.categories))
        has = (own > 0.5).to(chosen.device) & counted.unsqueeze(1)
        held, counts = (
            as_double(each.reshape(len(self), -1, self.categories).sum(1)) for each in (chosen & has, has)
        )
        inputs, labels = (counts > 0).nonzero(as_tuple=True)
        sizes = as_double(chosen.sum(1)).reshape(len(self), -1).mean(1)[inputs]
        return Coverage((held / counts)[inputs, labels], sizes, inputs, labels, SET_SIZE)

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the share of an input's labels that are decided wrongly, of positions that count."""
        own, counted = self._targets_of_rows(targets)
        wrong = self.rows.losses(own).masked_fill(~counted, 0.0).reshape(len(self), -1)
        return wrong.sum(1) / counted.reshape(len(self), -1).sum(1).clamp(min=1)

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


def _of_inputs(found: TargetScores, counted: Tensor, inputs: int) -> TargetScores:
    """By channel, quantiles of the scores of an input's values that count.

    Args:
        found: of all positions, ``(inputs * positions, channels)``.
        counted: of the same shape, bool.
        inputs: how many there are.
    """
    pairs = [
        (own.reshape(inputs, -1), there.reshape(inputs, -1))
        for own, there in zip(found.scores.unbind(1), counted.unbind(1), strict=True)
    ]
    quantiles = [scores_of_positions(own, there, FINE_SHARES) for own, there in pairs]
    groups = [there.any(1, keepdim=True).long().expand(-1, len(FINE_SHARES)) for _, there in pairs]
    return TargetScores(found.kind, torch.cat(quantiles, 1), torch.cat(groups, 1), channels=len(pairs))
