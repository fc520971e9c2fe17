"""The pass over the training data that shows them to a context."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.contexts import Context
from posthoc_uq.contexts.base import single_input
from posthoc_uq.curvature.content import Content
from posthoc_uq.curvature.sweep import no_weight, own_batches
from posthoc_uq.devices import Checks
from posthoc_uq.errors import NonFiniteError
from posthoc_uq.loaders import Bar, BatchReader
from posthoc_uq.randomness import isolated_random_state, mixed_seed, sample_keys


def show_to_context(
    loader: Iterable[Any],
    reader: BatchReader,
    context: Context | None,
    seed: int,
    progress: bool,
    content: Content | None = None,
) -> int:
    """One pass over the training data without the model: counts the inputs, and shows them to a context if there is
    one.

    Args:
        content: hashes every batch, if given.

    Raises:
        NonFiniteError: inputs that the context is shown are not finite.
        PosthocUQError: the context does not work for this kind of inputs, or all weights are 0.
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed, 1))
    samples, counted = 0, False
    with (
        isolated_random_state(seed),
        Bar(loader, "counting" if context is None else "context", progress) as bar,
    ):
        for index, (batch, count) in enumerate(own_batches(loader, reader)):
            checks = Checks()
            if context is not None and context.needs_data:
                shown = single_input(batch)
                checks.later(torch.isfinite(shown).all(), partial(_require_finite, index))
                context.observe(shown, generator)
            if content is not None:
                content.see(batch, sample_keys(batch.tensors(), count, seed), checks=checks)
            checks.look()
            samples += count
            counted = counted or batch.weights is None or bool((batch.weights > 0).any())
            bar.advance(count)
    if samples and not counted:
        raise no_weight()
    return samples


def _require_finite(index: int, finite: Tensor) -> None:
    if not bool(finite):
        raise NonFiniteError(
            f"Batch {index}: the inputs are not finite. Check the input data for NaN or infinity."
        )
