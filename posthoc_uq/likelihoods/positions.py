"""Outputs with positions (pixels, tokens): their likelihood, their prediction, and scores of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.core.devices import widest
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.randomness import uniforms
from posthoc_uq.likelihoods.class_prediction import ClassPrediction, TopK
from posthoc_uq.likelihoods.draws import ClassStatistics, Spread, classes_of_gaussian
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.likelihood import wide
from posthoc_uq.likelihoods.prediction import ClassTensors, Prediction, class_quality

# Predictions with positions: a class at every pixel or token, with maps of uncertainty and numbers of each
# input.

_NUMBERS = 2**17  # logits of one draw that are summed at once


@dataclass(frozen=True, eq=False, repr=False)
class PositionPrediction(Prediction):
    """Class probabilities at every position of a batch, and how far the weights disagree about them.

    What has one number a position is ``(batch, *positions)``; probabilities and logits are in the layout of the model's
    outputs. Numbers of each input, by which inputs are ranked or referred, are `per_input`.

    Attributes:
        rows: the positions of all inputs as one `ClassPrediction` of ``batch * positions`` inputs.
        positions: the sizes of the dimensions that count positions.
        layout: of the model's outputs and the labels.
        novelty_ratio: (batch, *positions), in (0, 1], the share of the prior's uncertainty that the data left; (batch,)
            where it is known of whole inputs alone; None where it was not asked for.
        mask: (batch, *positions), bool: which positions count in the numbers of an input; None for all, see `masked`.
    """

    kind: ClassVar[str] = "positions"

    rows: ClassPrediction
    positions: tuple[int, ...]
    layout: Layout
    novelty_ratio: Tensor | None = None
    mask: Tensor | None = None

    def __len__(self) -> int:
        """Number of inputs."""
        return len(self.rows) // prod(self.positions)

    def __repr__(self) -> str:
        return f"PositionPrediction(inputs={len(self)}, positions={self.positions}, classes={self.classes})"

    def _map(self, values: Tensor) -> Tensor:
        return self.layout.maps(values, self.positions)

    def _whole(self, values: Tensor) -> Tensor:
        return self.layout.whole(values, self.positions)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.rows.classes

    @property
    def probs(self) -> Tensor:
        """In the layout of the outputs: the predictive probabilities."""
        return self._whole(self.rows.probs)

    @property
    def outputs_mean(self) -> Tensor:
        """In the layout of the outputs: the mean of the logits over the weights."""
        return self._whole(self.rows.logits_mean)

    logits_mean = outputs_mean

    @property
    def logits_variance(self) -> Tensor:
        """In the layout of the outputs: the variance of the logits over the weights."""
        return self._whole(self.rows.logits_variance)

    @property
    def default_score(self) -> str:
        """The entropy."""
        return "entropy"

    def entropy(self) -> Tensor:
        """(batch, *positions), in nats; see `ClassPrediction`."""
        return self._map(self.rows.entropy())

    def expected_entropy(self) -> Tensor:
        """(batch, *positions), in nats; see `ClassPrediction`."""
        return self._map(self.rows.expected_entropy())

    def mutual_information(self) -> Tensor:
        """(batch, *positions), in nats; see `ClassPrediction`."""
        return self._map(self.rows.mutual_information())

    def variation_ratio(self) -> Tensor:
        """(batch, *positions), in [0, 1 - 1 / classes]; see `ClassPrediction`."""
        return self._map(self.rows.variation_ratio())

    def epistemic(self) -> Tensor:
        """(batch, *positions): the mean over classes of the variance of the logits."""
        return self._map(self.rows.epistemic())

    def max_probability(self) -> Tensor:
        """(batch, *positions): the probability of the predicted class."""
        return self._map(self.rows.max_probability())

    def predicted(self) -> Tensor:
        """(batch, *positions), int64: the most probable class."""
        return self._map(self.rows.predicted())

    def top_k(self, k: int) -> TopK:
        """The `k` most probable classes of every position, each tensor (batch, *positions, k)."""
        found = self.rows.top_k(k)
        return TopK(
            *(None if part is None else part.reshape(-1, *self.positions, k) for part in found)  # type: ignore[arg-type]
        )

    def scores_by_position(self) -> dict[str, Tensor]:
        """All known uncertainty scores by name, each (batch, *positions)."""
        scores = {name: self._map(score) for name, score in self.rows.scores().items()}
        if self.novelty_ratio is not None and self.novelty_ratio.ndim > 1:
            scores["novelty"] = self.novelty_ratio
        return scores

    def per_input(
        self,
        score: str | Tensor = "entropy",
        how: str = "mean",
        *,
        above: float | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """One number an input, (batch,), of a score of its positions.

        Args:
            score: a name in `scores_by_position`, or numbers (batch, *positions).
            how: ``"mean"``, or ``"largest"``.
            above: in place of these, the share of the positions whose score is above this value.
            mask: (batch, *positions), true where a position counts; that of `masked` by default. An input without any
                is NaN.

        Raises:
            PosthocUQError: an unknown score, another `how`, or a shape that does not fit.
        """
        mask = self.mask if mask is None else mask
        if isinstance(score, str):
            known = self.scores_by_position()
            if score not in known:
                raise PosthocUQError(
                    f"The scores of positions are {tuple(known)}, not {score!r}.{did_you_mean(score, known)}"
                )
            values = known[score]
        else:
            values = score
        shape = (len(self), *self.positions)
        for name, tensor in (("score", values), ("mask", mask)):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise PosthocUQError(
                    f"{name} has shape {tuple(tensor.shape)} where (batch, *positions), {shape}, is needed."
                )
        if how not in ("mean", "largest"):
            raise PosthocUQError(f"how must be 'mean' or 'largest', not {how!r}.")
        values = values.flatten(1)
        values = values if above is None else (values > above).to(self.rows.probs.dtype)
        counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.to(values.device)
        counted = counted.flatten(1).bool()
        if how == "largest" and above is None:
            largest = values.masked_fill(~counted, float("-inf")).amax(1)
            return largest.masked_fill(~counted.any(1), float("nan"))
        return values.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)

    def masked(self, mask: Tensor) -> PositionPrediction:
        """The same prediction, in whose numbers of an input the other positions, such as padding, do not count: in
        `per_input` and `scores`, and so in `posthoc_uq.Referral`.

        Args:
            mask: (batch, *positions), such as the attention mask: true or not 0 where a position counts.

        Raises:
            PosthocUQError: another shape.
        """
        shape = (len(self), *self.positions)
        if tuple(mask.shape) != shape:
            raise PosthocUQError(
                f"mask has shape {tuple(mask.shape)} where (batch, *positions), {shape}, is needed."
            )
        return replace(self, mask=mask.to(self.rows.probs.device).bool())

    def scores(self) -> dict[str, Tensor]:
        """See `Prediction`: the mean over an input's positions of each score, over those of `masked` if there are."""
        scores = {name: self.per_input(score) for name, score in self.scores_by_position().items()}
        if self.novelty_ratio is not None and "novelty" not in scores:
            scores["novelty"] = self.novelty_ratio
        return scores

    def _labels(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Labels and whether they count, each (batch * positions,).

        Raises:
            PosthocUQError: they do not fit.
        """
        outputs = self.rows.probs.new_empty(()).expand(
            (len(self), self.classes, *self.positions)
            if self.layout.class_dim == 1
            else (len(self), *self.positions, self.classes)
        )
        self.layout.check_labels(outputs, targets)
        if bool(self.layout.fault(outputs, targets)):
            raise PosthocUQError(self.layout.wrong_labels(targets, self.classes))
        labels, counted = self.layout.labels(outputs, targets)
        return labels.flatten(), counted.flatten()

    def log_prob_by_position(self, targets: Tensor) -> Tensor:
        """(batch, *positions), in nats: log of the probability of the given class at each position, 0 where it does
        not count. With `next_token` position t has that of the label at t + 1.

        Args:
            targets: (batch, *positions), as the loader gives them.
        """
        labels, counted = self._labels(targets)
        return self._map(self.rows.log_prob(labels).masked_fill(~counted, 0.0))

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: the sum of `log_prob_by_position`. Each position's probability is averaged over the
        weights by itself.
        """
        return self.log_prob_by_position(targets).flatten(1).sum(1)

    def labelled(self, targets: Tensor) -> Tensor:
        """(batch, *positions): whether a position has a label that counts. With `next_token` position t has the label
        at t + 1.
        """
        return self._map(self._labels(targets)[1])

    def perplexity(self, targets: Tensor) -> Tensor:
        """(batch,): ``exp(-log_prob / n)`` with the n positions of an input that count; NaN where none does."""
        counted = self.labelled(targets).flatten(1).sum(1)
        return (-self.log_prob(targets) / counted).exp()

    def fitting(self, targets: Tensor) -> Tensor:
        """The labels themselves, once they are checked."""
        self._labels(targets)
        return targets

    def counted(self, targets: Tensor) -> tuple[ClassPrediction, Tensor]:
        """The positions of all inputs that count, as one prediction of classes, with their labels ``(positions,)``."""
        labels, counted = self._labels(targets)
        return self.rows.picked(counted), labels[counted]

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """Accuracy, NLL, Brier score, calibration errors and mean entropy over all positions that count."""
        rows, labels = self.counted(targets)
        return class_quality(rows.probs, rows.log_prob, rows.entropy(), labels, bins)

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the share of an input's counted positions at which the predicted class is wrong."""
        labels, counted = self._labels(targets)
        wrong = ((self.rows.predicted() != labels) & counted).reshape(len(self), -1).double()
        return wrong.sum(1) / counted.reshape(len(self), -1).sum(1).clamp(min=1)

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """The mean accuracy of the inputs that are not referred."""
        losses = self.losses(targets)
        order = scores.argsort(stable=True).to(losses.device)
        kept = {rate: max(1, len(losses) - int(rate * len(losses))) for rate in rates}
        return {f"accuracy at {rate:g}": 1 - float(losses[order[:n]].mean()) for rate, n in kept.items()}

    def with_novelty(self, ratio: Tensor | None) -> PositionPrediction:
        """The same prediction with the novelty of its positions (batch, *positions), of a coarser grid, whose nearest
        value each position gets, or of its inputs (batch,).
        """
        if ratio is not None and ratio.ndim > 1 and tuple(ratio.shape[1:]) != self.positions:
            ratio = F.interpolate(ratio.unsqueeze(1), size=self.positions, mode="nearest").squeeze(1)
        return self if ratio is None else replace(self, novelty_ratio=ratio)

    def unshifted(self) -> PositionPrediction:
        """The same for single positions: labels are then those that belong to each, whatever `next_token` says."""
        return replace(self, layout=replace(self.layout, next_token=False))

    def of_one_network(self) -> PositionPrediction:
        """The same without the parts that need several sets of weights."""
        return replace(self, rows=self.rows.of_one_network())

    def numbers(self) -> dict[str, Tensor]:
        """See `Prediction`; those of the rows, as (batch, ...)."""
        values = {name: value.reshape(len(self), -1) for name, value in self.rows.numbers().items()}
        return values | ({} if self.novelty_ratio is None else {"novelty_ratio": self.novelty_ratio})

    def tensors(self) -> ClassTensors:
        """See `Prediction`; entropy and mutual information are maps."""
        parts = self.rows.tensors()
        return ClassTensors(
            *(self._whole(part) for part in parts[:3]), *(self._map(part) for part in parts[3:])
        )

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name; those of classes in the layout of the outputs, the others as maps."""
        values = {
            name: self._map(value) if value.ndim == 1 else self._whole(value)
            for name, value in self.rows.to_dict().items()
        }
        return values | ({} if self.novelty_ratio is None else {"novelty": self.novelty_ratio})

    def to(self, device: torch.device | str) -> PositionPrediction:
        """The same prediction with its tensors on `device`."""
        ratio = None if self.novelty_ratio is None else self.novelty_ratio.to(device)
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, rows=self.rows.to(device), novelty_ratio=ratio, mask=mask)

    @staticmethod
    def cat(predictions: Sequence[PositionPrediction]) -> PositionPrediction:
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
        first, ratios = predictions[0], [p.novelty_ratio for p in predictions]
        known = [ratio for ratio in ratios if ratio is not None]
        masks = [
            torch.ones(len(p), *p.positions, dtype=torch.bool, device=p.rows.probs.device)
            if p.mask is None
            else p.mask
            for p in predictions
        ]
        return replace(
            first,
            mask=torch.cat(masks) if any(p.mask is not None for p in predictions) else None,
            rows=ClassPrediction.cat([p.rows for p in predictions]),
            novelty_ratio=torch.cat(known) if len(known) == len(ratios) else None,
        )


def positions_of_draws(blocks: Iterable[Tensor], layout: Layout) -> PositionPrediction:
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
            split = rows.split(max(1, _NUMBERS // rows.shape[1]))
            parts = parts or [ClassStatistics() for _ in split]
            for statistics, part in zip(parts, split, strict=True):
                statistics.add(part.unsqueeze(0))
    if not parts:
        raise PosthocUQError("A prediction needs at least one weight sample.")
    predictions: list[ClassPrediction] = []
    while parts:  # each part's sums are freed before the next part's numbers are made
        predictions.append(parts.pop(0).prediction())
    return PositionPrediction(ClassPrediction.cat(predictions), positions, layout)


def positions_of_gaussian(
    mean: Tensor,
    variance: Tensor,
    covariance: Tensor | Spread | None,
    layout: Layout,
    link: str,
    n_draws: int,
) -> PositionPrediction:
    """The prediction of Gaussian logits with positions, each by itself; see `classes_of_gaussian`.

    Args:
        mean: logits in the layout of the outputs.
        variance: of the same shape.
        covariance: of rows, ``(samples * positions, classes, classes)``, or their `Spread`; None for independent
            logits.
        layout: of the outputs.
        link: see `classes_of_gaussian`.
        n_draws: of the logits.
    """
    layout.check(mean)
    rows = classes_of_gaussian(layout.rows(mean), layout.rows(variance), covariance, link, n_draws)
    return PositionPrediction(rows, layout.positions(mean), layout)


# Scores of whole sequences, from those of their tokens.


def sequence_scores(
    prediction: PositionPrediction, labels: Tensor | None = None, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """One number a sequence of everything that is known of its tokens, each ``(batch,)``.

    With labels: ``"log_probability"``, the sum over tokens of the log of each one's mean probability, in nats;
    ``"perplexity"``, ``exp(-log_probability / tokens)``; ``"tokens"``, how many count. Always, for every score of
    `PositionPrediction.scores_by_position` (``"entropy"``, ``"mutual_information"``, ``"novelty"`` ...), its mean over
    the tokens by its name, and the largest as ``"largest_entropy"`` and so on.

    Args:
        prediction: of outputs ``(batch, tokens, words)``.
        labels: (batch, tokens), as the loader gives them; tokens whose label is ignored do not count, and with
            ``next_token=True`` the outputs at a token belong to the label after it.
        mask: (batch, tokens), true where a token counts, such as the attention mask; in place of labels.

    Raises:
        PosthocUQError: the prediction has no positions, both are given, or shapes do not fit.
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


# The categorical likelihood of outputs with positions: pixels, tokens.
#
# Given the outputs, positions are independent. So the log-probability of a sample is the sum over its
# positions that count, and its Fisher ``sum_t J_t^T (diag(p_t) - p_t p_t^T) J_t``. Drawn labels need one
# backward pass for all positions together: with independent scores ``s_t`` of mean 0, ``E[(sum_t J_t^T
# s_t)(sum_t J_t^T s_t)^T] = sum_t J_t^T E[s_t s_t^T] J_t``.

_AT_ONCE = 2**19  # numbers that are worked on at once; more are not faster


def log_probs(
    outputs: Tensor,
    targets: Tensor,
    layout: Layout,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """``log p(labels | outputs)`` of every sample, ``(samples,)``: the sum over the positions that count, each times
    its weight ``(samples, positions)`` where there are weights.
    """
    labels, counted = layout.labels(outputs, targets)
    rows, labels = layout.rows(outputs), labels.flatten()
    step = max(1, _AT_ONCE // rows.shape[1])
    losses = torch.cat(
        [
            F.cross_entropy(wide(part), own, reduction="none", label_smoothing=label_smoothing)
            for part, own in zip(rows.split(step), labels.split(step), strict=True)
        ]
    )
    losses = losses.reshape(counted.shape).masked_fill(~counted, 0.0)
    return -(losses if weights is None else losses * weights.to(losses)).sum(1)


def scores(outputs: Tensor, targets: Tensor, layout: Layout, label_smoothing: float = 0.0) -> Tensor:
    """Gradient of minus that sum by the outputs, shaped like them: ``softmax - one_hot`` where a position counts, less
    the share of the label that is spread over all classes.
    """
    labels, counted = layout.labels(outputs, targets)
    rows = wide(layout.rows(outputs)).softmax(1)
    rows = rows - label_smoothing / rows.shape[1]
    shares = torch.full_like(rows[:, :1], label_smoothing - 1)
    rows = rows.scatter_add(1, labels.reshape(-1, 1), shares).masked_fill(~counted.reshape(-1, 1), 0.0)
    return layout.whole(rows, layout.positions(outputs))


def drawn(outputs: Tensor, keys: Tensor, draw: int, layout: Layout) -> Tensor:
    """One label a position drawn from the softmax, ``(samples, *positions)``: a function of outputs, keys and the
    number of the draw.
    """
    labels = _drawn_rows(outputs, keys, range(draw, draw + 1), layout)[1][:, 0]
    return layout.targets(labels.reshape(outputs.shape[0], -1), layout.positions(outputs))


def drawn_scores(
    outputs: Tensor, targets: Tensor | None, keys: Tensor, n_samples: int, layout: Layout
) -> Iterator[Tensor]:
    """`scores` of the labels of each of the first draws, divided by the root of their number; positions that the
    targets ignore do not count. The softmax is computed once.
    """
    probs, labels = _drawn_rows(outputs, keys, range(n_samples), layout)
    _, counted = layout.labels(outputs, targets)
    weight = counted.reshape(-1, 1).to(probs) * n_samples**-0.5
    probs *= weight
    for draw in range(n_samples):
        last = draw == n_samples - 1  # which writes into the probabilities
        rows = probs if last else probs.clone()
        yield layout.whole(
            rows.scatter_add_(1, labels[:, draw : draw + 1], -weight), layout.positions(outputs)
        )


def _drawn_rows(outputs: Tensor, keys: Tensor, draws: range, layout: Layout) -> tuple[Tensor, Tensor]:
    """Probabilities ``(samples * positions, classes)``, and the labels of these draws, ``(samples * positions,
    draws)``; a few positions at a time, since the sums of probabilities are in float64.
    """
    size = prod(layout.positions(outputs))
    u = uniforms(keys, draws.stop * size)[:, draws.start * size :].to(outputs.device, widest(outputs.device))
    places = u.reshape(-1, len(draws), size).transpose(1, 2).reshape(-1, len(draws))
    rows = wide(layout.rows(outputs))
    probs, labels = torch.empty_like(rows), list[Tensor]()
    step = max(1, _AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        torch.softmax(rows[part], 1, out=probs[part])
        sums = probs[part].to(places.dtype).cumsum(1)
        found = torch.searchsorted(sums, (places[part] * sums[:, -1:]).contiguous())
        labels.append(found.clamp_(max=rows.shape[1] - 1))
    return probs, torch.cat(labels)


def exact_factors(
    outputs: Tensor, targets: Tensor | None, layout: Layout, of_rows: Callable[[Tensor], Iterator[Tensor]]
) -> Iterator[Tensor]:
    """The factors of every position by itself, shaped like the outputs: a position's factors come after each other.

    Args:
        outputs: with positions.
        targets: say which positions count; None where all do.
        layout: of the outputs.
        of_rows: gives the factors of outputs without positions, ``(rows, classes)``.
    """
    positions = layout.positions(outputs)
    samples, size = outputs.shape[0], prod(positions)
    _, counted = layout.labels(outputs, targets)
    rows = layout.rows(outputs).reshape(samples, size, -1)
    for position in range(size):
        if bool(counted[:, position].any()):
            for factor in of_rows(rows[:, position]):
                whole = factor.new_zeros(samples, size, factor.shape[1])
                whole[:, position] = factor.masked_fill(~counted[:, position : position + 1], 0.0)
                yield layout.whole(whole, positions)


def by_sample(of_rows: Tensor, outputs: Tensor) -> Tensor:
    """The mean over a sample's positions of one number a row, ``(samples,)``."""
    return of_rows.reshape(outputs.shape[0], -1).mean(1)
