"""What counts of a batch: labels that are not ignored, weights that are not 0, tokens that are attended to."""

from __future__ import annotations

from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.likelihoods.base import Likelihood
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
        raise PosthocUQError("No held-out label counts: all are ignore_index; look at the labels.")
    return total / count


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
    have a weight that is not 0, and are attended to by the batch's attention mask.

    Raises:
        PosthocUQError: the weights do not fit the outputs.
    """
    sizes, (_, counted) = layout.positions(outputs), layout.labels(outputs, None)
    if batch.weights is not None:
        positive = (batch.weights > 0).to(counted.device)
        if positive.ndim == 1:
            positive = positive.unsqueeze(1).expand(counted.shape)
        elif tuple(positive.shape) != (len(outputs), *sizes):
            raise PosthocUQError(
                f"Labels or weights of shape {tuple(positive.shape)} do not fit outputs with the positions {sizes}."
            )
        counted = counted & layout.shifted(positive.reshape(counted.shape))
    attended = _attended(batch, (len(outputs), *sizes))
    if attended is not None:
        attended = attended.to(counted.device).reshape(counted.shape)
        counted = counted & attended & layout.shifted(attended)
    return counted


def _attended(batch: Batch, shape: tuple[int, ...]) -> Tensor | None:
    """The attention mask of the tokens that the outputs belong to, if the model is called with one."""
    decodes = any(name.startswith("decoder_") for name in batch.kwargs)
    mask = batch.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    return mask != 0 if isinstance(mask, Tensor) and tuple(mask.shape) == shape else None
