"""What the predictions share: moments, entropies and votes over weight samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.errors import PosthocUQError

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
            "This prediction does not know its novelty: the predictor was made with novelty=False, or the posterior "
            "keeps nothing of the last layer's inputs, as those of older files (fit again) and of models whose last "
            "layer has no input of each sample's own; predictor.novelty(x, of='top') then goes by the posterior itself."
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
