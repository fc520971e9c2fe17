"""The categorical likelihood of outputs with positions: pixels, tokens.

Given the outputs, positions are independent. So the log-probability of a sample is the sum over its positions that
count, and its Fisher ``sum_t J_t^T (diag(p_t) - p_t p_t^T) J_t``. Drawn labels need one backward pass for all positions
together: with independent scores ``s_t`` of mean 0,
``E[(sum_t J_t^T s_t)(sum_t J_t^T s_t)^T] = sum_t J_t^T E[s_t s_t^T] J_t``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from posthoc_uq.devices import widest
from posthoc_uq.likelihoods.outputs import wide
from posthoc_uq.predictions.layout import Layout
from posthoc_uq.randomness import uniforms

_AT_ONCE = 2**22  # probabilities whose sums are formed at once, in float64


def log_probs(outputs: Tensor, targets: Tensor, layout: Layout) -> Tensor:
    """``log p(labels | outputs)`` of every sample, ``(samples,)``: the sum over the positions that count."""
    labels, counted = layout.labels(outputs, targets)
    losses = F.cross_entropy(wide(layout.rows(outputs)), labels.flatten(), reduction="none")
    return -losses.reshape(counted.shape).masked_fill(~counted, 0.0).sum(1)


def scores(outputs: Tensor, targets: Tensor, layout: Layout) -> Tensor:
    """Gradient of minus that sum by the outputs, shaped like them: ``softmax - one_hot`` where a position counts."""
    labels, counted = layout.labels(outputs, targets)
    rows = wide(layout.rows(outputs)).softmax(1)
    ones = torch.ones_like(rows[:, :1])
    rows = rows.scatter_add(1, labels.reshape(-1, 1), -ones).masked_fill(~counted.reshape(-1, 1), 0.0)
    return layout.whole(rows, layout.positions(outputs))


def drawn(outputs: Tensor, keys: Tensor, draw: int, layout: Layout) -> Tensor:
    """One label a position drawn from the softmax, ``(samples, *positions)``: a function of outputs, keys and the
    number of the draw.
    """
    positions = layout.positions(outputs)
    size = prod(positions)
    u = uniforms(keys, (draw + 1) * size)[:, draw * size :].to(outputs.device, widest(outputs.device))
    rows, places = layout.rows(outputs), u.reshape(-1, 1)
    step = max(1, _AT_ONCE // rows.shape[1])
    labels: list[Tensor] = []
    for part, place in zip(rows.split(step), places.split(step), strict=True):
        sums = wide(part).softmax(1).to(place.dtype).cumsum(1)
        labels.append(torch.searchsorted(sums, place * sums[:, -1:]).squeeze(1).clamp_(max=rows.shape[1] - 1))
    return layout.targets(torch.cat(labels).reshape(outputs.shape[0], size), positions)


def counted_alone(drawn_labels: Tensor, targets: Tensor | None, layout: Layout) -> Tensor:
    """Drawn labels, ignored wherever the data's own labels are."""
    if targets is None:
        return drawn_labels
    ignored = targets.to(drawn_labels.device) == layout.ignore_index
    return drawn_labels.masked_fill(ignored, layout.ignore_index)


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
