"""The pass over the training data that shows them to a context."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from posthoc_uq.contexts import Context
from posthoc_uq.contexts.base import single_input
from posthoc_uq.curvature.content import Content
from posthoc_uq.curvature.sweep import own_batches
from posthoc_uq.loaders import Bar, BatchReader
from posthoc_uq.randomness import isolated_random_state, mixed_seed, sample_keys


def survey(
    loader: Iterable[Any],
    reader: BatchReader,
    context: Context,
    seed: int,
    progress: bool,
    content: Content | None = None,
) -> int:
    """One pass over the training data without the model: shows a context the inputs, and counts them.

    Args:
        content: is shown every batch, where one is given.

    Raises:
        PosthocUQError: the inputs are not of the kind that the context is for.
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed, 1))
    samples = 0
    with isolated_random_state(seed), Bar(loader, "context", progress) as bar:
        for batch, count in own_batches(loader, reader):
            if context.needs_data:
                context.observe(single_input(batch), generator)
            if content is not None:
                content.see(batch, sample_keys(batch.tensors(), count, seed))
            samples += count
            bar.advance(count)
    return samples
