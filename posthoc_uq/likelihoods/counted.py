"""What counts of a batch: labels that are not ignored, weights that are not 0, tokens that are attended to."""

from __future__ import annotations

from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.likelihoods.base import Likelihood
from posthoc_uq.likelihoods.weights import SampleWeights, sample_weights
from posthoc_uq.loaders import Batch
from posthoc_uq.predictions.layout import Layout


def layout_of(likelihood: Likelihood, targets: Tensor) -> Layout | None:
    """The layout of the outputs that these targets are of, or None where they have no positions."""
    return None if targets.is_floating_point() else likelihood.positions_of(targets.unsqueeze(1))


def labelled(likelihood: Likelihood, targets: Tensor) -> int:
    """By how many a log-probability of these targets is divided for a mean: their samples, or where these have
    positions all positions whose label counts.
    """
    layout = layout_of(likelihood, targets)
    if layout is None:
        return len(targets)
    return int(layout.shifted((targets.long() != layout.ignore_index).flatten(1)).sum())


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
    layout = None if targets is None else layout_of(likelihood, targets)
    if targets is not None and layout is not None:
        found = targets.long() != layout.ignore_index
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
    labels = targets is not None and tuple(targets.shape) == (len(outputs), *sizes)
    _, counted = layout.labels(outputs, targets if labels else None)
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


def weights_of(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> SampleWeights | None:
    """The weights of a batch for its outputs. Where neither weights nor labels say which positions count, the attention
    mask does.
    """
    weights, layout = batch.weights, likelihood.positions_of(outputs)
    if weights is None and batch.targets is None and layout is not None:
        attended = _attended(layout, outputs, batch)
        weights = None if attended is None else attended.cpu().double()
    return sample_weights(likelihood, outputs, weights)


def _attended(layout: Layout, outputs: Tensor, batch: Batch) -> Tensor | None:
    """Which tokens count by the attention mask that the model is called with, ``(samples, tokens)`` of booleans in the
    order of labels; None without a mask of the outputs' tokens. Of outputs for the next token both must be attended.
    """
    decodes = any(name.startswith("decoder_") for name in batch.kwargs)
    mask = batch.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (len(outputs), *layout.positions(outputs)):
        return None
    attended = mask != 0
    return attended & attended.roll(1, 1) if layout.next_token else attended
