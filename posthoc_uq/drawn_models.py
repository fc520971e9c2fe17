"""Whether models drawn from a posterior still decide as the trained one does."""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.replica import replicate

_SAME_DECISIONS = 0.75  # share of the trained model's decisions that drawn models should make too


def warn_if_draws_differ(posterior: Posterior, batch: Batch, seed: int) -> None:
    """Warn where models drawn at the prior precision of the evidence no longer predict what the trained one does.

    Laplace's evidence trusts a linear approximation; where weights outnumber the data by far, weights drawn at its
    optimum lie outside of it.
    """
    if not isinstance(posterior.likelihood, (Categorical, Bernoulli, Gaussian)):
        return
    samples = count_samples(batch)
    few = batch.narrow(0, min(samples, 64), samples)
    # Fewer draws tell less, but those of a large network take memory.
    draws = 20 if sum(mean.numel() for mean in posterior.mean.values()) <= 2_000_000 else 5
    with torch.no_grad():
        trained = few.call(replicate(cast(nn.Module, posterior.model)))
        drawn = SamplingPredictor(cast(nn.Module, posterior.model), posterior, draws, seed).outputs(
            *few.args, **few.kwargs
        )
    if isinstance(posterior.likelihood, Gaussian):
        noise = posterior.likelihood.noise(trained)
        lost = bool(((drawn.mean(0) - trained).square().mean(0) > noise).any())
    elif isinstance(posterior.likelihood, Bernoulli):
        lost = bool((((drawn.sigmoid().mean(0) > 0.5) == (trained > 0)).float().mean()) < _SAME_DECISIONS)
    else:
        same = drawn.softmax(-1).mean(0).argmax(-1) == trained.argmax(-1)
        lost = bool(same.float().mean() < _SAME_DECISIONS)
    if lost:
        warnings.warn(
            "At the prior precision of the log marginal likelihood, models drawn from this posterior no longer predict "
            "what the trained one does: it has few data for its weights. Pass val_loader=..., restrict it with "
            "layers='last', leave prior_precision at its default ('faithful'), or predict with head='linearized'.",
            UserWarning,
            stacklevel=3,
        )
