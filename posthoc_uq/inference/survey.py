"""The pass over the training data that shows them to a context."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from posthoc_uq.contexts import Context
from posthoc_uq.contexts.base import single_input
from posthoc_uq.loaders import Bar, BatchReader, batches
from posthoc_uq.randomness import isolated_random_state, mixed_seed


def survey(loader: Iterable[Any], reader: BatchReader, context: Context, seed: int, progress: bool) -> int:
    """One pass over the training data without the model: shows a context the inputs, and counts them.

    Raises:
        PosthocUQError: the inputs are not of the kind that the context is for.
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed, 1))
    samples = 0
    with isolated_random_state(seed), Bar(loader, "context", progress) as bar:
        for batch in batches(loader, reader):
            if context.needs_data:
                context.observe(single_input(batch), generator)
            count = next((t.shape[0] for t in batch.tensors() if t.ndim > 0), 0)
            samples += count
            bar.advance(count)
    return samples
