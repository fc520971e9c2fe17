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
