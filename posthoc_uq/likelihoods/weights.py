"""Weights of samples and of positions; which of them count, and how many labels a batch has.

The log-likelihood of weighted data is ``sum_n w_n log p(y_n | f_n)``; with positions ``sum_n sum_t w_nt log p(y_nt |
f_nt)``. So the Fisher of the outputs counts w times: gradients by the outputs, of drawn labels, of the expectation or
of targets, are multiplied with the root of w before they are pulled back. A whole weight is as good as so many copies
of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.likelihood import Likelihood
from posthoc_uq.likelihoods.positions import AtPositions
from posthoc_uq.likelihoods.prediction import Prediction

if TYPE_CHECKING:
    from posthoc_uq.likelihoods.joint import JointPrediction


@dataclass(frozen=True)
class SampleWeights:
    """The weights of one batch.

    Attributes:
        samples: how often each sample counts where it counts as a whole, as its inputs do; ``(samples,)`` float64 on
            the CPU. Where weights are of positions, the mean of a sample's positive ones; 1 where it has none, as for a
            sample whose labels are all ignored.
        by_position: the weight of every position of the outputs, ``(samples, positions)`` float64 on the CPU; None
            where outputs have none, or where a sample's weight holds for all of its positions.
        layout: of outputs with positions.
        ignored: where labels do not count, in the shape of the targets; None for weights of samples.
    """

    samples: Tensor
    by_position: Tensor | None = None
    layout: Layout | None = None
    ignored: Tensor | None = None

    @property
    def total(self) -> float:
        """The sum of the samples' weights."""
        return float(self.samples.sum())

    def of_rows(self, rows: int) -> Tensor:
        """The weights of that many rows, the samples or their positions, ``(rows,)``."""
        if self.by_position is not None:
            return self.by_position.flatten()
        return self.samples.repeat_interleave(rows // len(self.samples))

    def targets(self, targets: Tensor | None) -> Tensor | None:
        """The targets, ignored where a position has the weight 0."""
        if targets is None or self.ignored is None or self.layout is None:
            return targets
        return self.layout.without(targets, self.ignored)

    def gradients(self, gradient: Tensor) -> Tensor:
        """Gradients by the outputs, shaped like them, times the roots of the weights."""
        if self.by_position is None or self.layout is None:
            roots = self.samples.sqrt().reshape(-1, *[1] * (gradient.ndim - 1))
        else:
            rows = self.by_position.sqrt().reshape(-1, 1)
            roots = self.layout.whole(rows, self.layout.positions(gradient))
        return gradient * roots.to(gradient)

    def log_prob(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
        """``w_n log p(y_n | f_n)`` of every sample, ``(samples,)``, in nats; differentiable.

        Raises:
            PosthocUQError: weights of positions, and the likelihood does not know the single positions.
        """
        if self.by_position is not None:
            return likelihood.weighted_log_prob(outputs, targets, self.by_position)
        return self.of_samples(likelihood.log_prob(outputs, targets))

    def of_samples(self, values: Tensor) -> Tensor:
        """One number a sample, ``(samples,)``, times its weight; 0 for the weight 0, whatever the number.

        Raises:
            PosthocUQError: the weights are of positions.
        """
        if self.by_position is not None:
            raise PosthocUQError(
                "This method takes one weight a sample, not one a position; weigh whole samples, or set the labels of "
                "positions that do not count to ignore_index."
            )
        weights = self.samples.to(values)
        return torch.where(weights > 0, values, torch.zeros_like(values)) * weights


def sample_weights(likelihood: Likelihood, outputs: Tensor, weights: Tensor | None) -> SampleWeights | None:
    """The weights of a batch for its outputs; None without weights.

    Args:
        likelihood: says whether outputs have positions.
        outputs: ``(samples, ...)``.
        weights: ``(samples,)``, or ``(samples, *positions)`` in the order in which labels come; float64 on the CPU,
            finite and not negative.

    Raises:
        PosthocUQError: they have another shape.
    """
    if weights is None:
        return None
    samples, layout = outputs.shape[0], likelihood.positions_of(outputs)
    if tuple(weights.shape) == (samples,):
        return SampleWeights(weights)
    wanted = f"({samples},), one a sample"
    if layout is not None:
        positions = layout.positions(outputs)
        if tuple(weights.shape) == (samples, *positions):
            flat = layout.shifted(weights.reshape(samples, -1))
            counted = (flat > 0).sum(1)
            mean = flat.sum(1) / counted.clamp(min=1)
            return SampleWeights(torch.where(counted > 0, mean, 1.0), flat, layout, weights == 0)
        wanted += f", or {(samples, *positions)}, one a position"
    several = tuple(weights.shape) == tuple(outputs.shape) and "missing" in likelihood.fields.model_fields
    way_out = (
        "a mask of targets is NaN where one is missing: batch_to_targets=lambda batch: batch[1].where(mask, nan), and "
        "missing='ignore' of the likelihood"
        if several
        else "look at what batch_to_weights gives"
    )
    raise PosthocUQError(
        f"The weights of a batch of {samples} samples must have the shape {wanted}, not {tuple(weights.shape)}; "
        f"{way_out}."
    )


def weighed_targets(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> tuple[Tensor, SampleWeights | None]:
    """The targets that count, and the weights, of one step of a training; see `sample_weights`."""
    found = sample_weights(likelihood, outputs, weights)
    kept = targets if found is None else found.targets(targets)
    assert kept is not None
    return kept, found


def labelled(likelihood: Likelihood, targets: Tensor) -> int:
    """By how many a log-probability of these targets is divided for a mean: their samples, or where these have
    positions all positions whose label counts.
    """
    layout = likelihood.layout_of_targets(targets)
    if layout is None:
        return len(targets)
    return int(layout.shifted(layout.counted(targets).flatten(1)).sum())


def mean_of_labels(total: float, count: int) -> float:
    """The mean over labels of a sum over them.

    Raises:
        PosthocUQError: there is no label.
    """
    if count == 0:
        raise nothing_counts()
    return total / count


def nothing_counts() -> PosthocUQError:
    """The error of data of which nothing counts."""
    return PosthocUQError(
        "No sample or position counts: all labels are ignore_index, or all weights are 0; look at the labels, and at "
        "the mask or the weights."
    )


def counts(likelihood: Likelihood, batch: Batch) -> Tensor | None:
    """Which samples count, ``(samples,)`` of booleans, or which of their positions, ``(samples, *positions)`` in the
    order in which labels come: by labels that are not ignored, and weights that are not 0. None where neither says so.
    """
    found, targets = None, batch.targets
    layout = None if targets is None else likelihood.layout_of_targets(targets)
    if targets is not None and layout is not None:
        found = layout.counted(targets)
    if batch.weights is None:
        return found
    positive = batch.weights > 0
    if found is None:
        return positive
    positive = positive.to(found.device)
    return found & (positive.reshape(-1, *[1] * (found.ndim - 1)) if positive.ndim == 1 else positive)


def counted_positions(layout: Layout, outputs: Tensor, batch: Batch) -> Tensor:
    """Which positions of a batch's outputs count, ``(samples, positions)`` of booleans: those that can have a label,
    whose label (where labels of the outputs' shape are given) is not ignored, that have a weight that is not 0, and
    that the batch's attention mask attends to.

    Raises:
        PosthocUQError: the weights do not fit the outputs.
    """
    sizes, targets = layout.positions(outputs), batch.targets
    counted = layout.counts(
        outputs, targets if targets is not None and layout.fits(outputs, targets) else None
    )
    if batch.weights is not None:
        positive = (batch.weights > 0).to(counted.device)
        if positive.ndim == 1:
            positive = positive.unsqueeze(1).expand(counted.shape)
        elif tuple(positive.shape) != (len(outputs), *sizes):
            raise PosthocUQError(
                f"Labels or weights of shape {tuple(positive.shape)} do not fit outputs with the positions {sizes}."
            )
        counted = counted & layout.shifted(positive.reshape(counted.shape))
    attended = _attended(layout, outputs, batch)
    if attended is not None:
        counted = counted & layout.shifted(attended.to(counted.device).reshape(counted.shape))
    return counted


def counting(prediction: Prediction, batch: Batch) -> Prediction:
    """The prediction, in whose numbers of an input only positions count that labels, weights and the attention mask
    leave in; of an input without any, all of them.
    """
    if prediction.kind == "heads":
        several = cast("JointPrediction", prediction)
        batches = {name: several.batch_of(name, batch) for name in several.parts}
        return several.changed(parts={n: counting(p, batches[n]) for n, p in several.parts.items()})
    if not isinstance(prediction, AtPositions) or prediction.mask is not None:
        return prediction
    counted = counted_positions(prediction.layout, prediction.outputs_mean, batch)
    counted = counted | ~counted.any(1, keepdim=True)
    if bool(counted.all()):
        return prediction
    return prediction.masked(counted.reshape(len(prediction), *prediction.positions))


def counted_alone(prediction: Prediction, batch: Batch) -> tuple[Prediction, Tensor] | None:
    """The prediction, in whose numbers of an input only the positions count that labels, weights and the attention mask
    leave in, and which inputs have any, ``(batch,)`` of booleans; None where it has no positions.
    """
    if not isinstance(prediction, AtPositions):
        return None
    counted = counted_positions(prediction.layout, prediction.outputs_mean, batch)
    return prediction.masked(counted.reshape(-1, *prediction.positions)), counted.any(1)


def attending(prediction: Prediction, batch: Batch) -> Prediction:
    """The prediction, in whose numbers of an input only positions count that the attention mask of its batch attends
    to; of an input without any, all of them.
    """
    if not isinstance(prediction, AtPositions):
        return prediction
    attended = _attended(prediction.layout, prediction.outputs_mean, batch)
    if attended is None:
        return prediction
    attended = prediction.layout.shifted(attended.flatten(1))
    attended = attended | ~attended.any(1, keepdim=True)
    attended = attended.reshape(len(prediction), *prediction.positions).to(prediction.outputs_mean.device)
    return replace(prediction, attended=attended)


def weights_of(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> SampleWeights | None:
    """The weights of a batch for its outputs. Where neither weights nor labels say which positions count, the attention
    mask does.
    """
    weights = batch.weights
    if weights is None and batch.targets is None and (layout := likelihood.positions_of(outputs)) is not None:
        attended = _attended(layout, outputs, batch)
        weights = None if attended is None else attended.cpu().double()
    return None if weights is None else sample_weights(likelihood, outputs, weights)


def _attended(layout: Layout, outputs: Tensor, batch: Batch) -> Tensor | None:
    """Which tokens count by the attention mask that the model is called with, ``(samples, tokens)`` of booleans in the
    order of labels; None without a mask of the outputs' tokens.
    """
    mask = batch.attention_mask
    if mask is None or tuple(mask.shape) != (len(outputs), *layout.positions(outputs)):
        return None
    return layout.attended(mask)
