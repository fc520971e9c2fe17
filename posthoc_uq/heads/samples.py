"""What the predictions share: moments over weight samples, and entropies."""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError


def at_least_float32(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise PosthocUQError(f"Expected floating-point numbers, got {tensor.dtype}.")
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def mean_and_variance(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over the leading dimension; variance 0 for a single sample."""
    if samples.shape[0] == 0:
        raise PosthocUQError("A prediction needs at least one weight sample.")
    if samples.shape[0] == 1:
        return samples[0], torch.zeros_like(samples[0])
    return samples.mean(dim=0), samples.var(dim=0, correction=1)


def entropy_of(probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension, with 0 log 0 = 0."""
    return -torch.special.xlogy(probs, probs).sum(dim=-1)


def shape_text(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
