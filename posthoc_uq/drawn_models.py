"""Whether models drawn from a posterior still decide as the trained model does."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.progress import Progress, counted
from posthoc_uq.replica import replicate
from posthoc_uq.warned import warn_user


def warn_if_draws_differ(posterior: Posterior, batch: Batch, seed: int, *, progress: bool = False) -> None:
    """Warn where models drawn at the prior precision of the evidence no longer predict what the trained model does.

    Laplace's evidence relies on a linear approximation, which does not hold for weights drawn at its optimum where
    there are far more weights than data. With `progress` a bar is shown.
    """
    if not posterior.likelihood.defines("agrees"):
        return
    samples = count_samples(batch)
    # Fewer draws and inputs are less reliable, but draws of a large network take memory, and its passes time.
    large = sum(mean.numel() for mean in posterior.mean.values()) > 2_000_000
    draws, inputs = (5, 16) if large else (20, 64)
    few = batch.narrow(0, min(samples, inputs), samples)
    bar = Progress("drawn models", "models", progress, draws)
    with torch.no_grad(), bar, counted(draws, bar.advance):
        trained = few.call(replicate(cast(nn.Module, posterior.model)))
        drawn = SamplingPredictor(cast(nn.Module, posterior.model), posterior, draws, seed).outputs(
            *few.args, **few.kwargs
        )
    if not posterior.likelihood.agrees(trained, drawn):
        warn_user(
            "At the prior precision of the log marginal likelihood, models drawn from this posterior no longer predict "
            "what the trained one does: it has few data for its weights. Pass val_loader=..., restrict it with "
            "layers='last', leave prior_precision at its default ('faithful'), or predict with head='linearized'."
        )
