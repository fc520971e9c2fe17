"""Whether a model gives probabilities where a likelihood takes logits."""

from __future__ import annotations

import torch
from torch import nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Batch
from posthoc_uq.replica import replicate

PROBABILITIES = (
    "The model's outputs look like probabilities: it seems to end in a softmax or a sigmoid. They are taken as logits, "
    "to which another one is applied, so the posterior and all predictions will be wrong. Pass the model without its "
    "last softmax or sigmoid, for example model[:-1] of an nn.Sequential; log_softmax outputs are fine."
)
_SAMPLES = 16  # of the first batch
_TOLERANCE = 1e-4  # of a probability


def gives_probabilities(model: nn.Module, batch: Batch, likelihood: Likelihood) -> bool:
    """Whether the outputs for some samples of a batch are probabilities, although the likelihood takes logits.

    For several classes, every row must be non-negative and sum to 1. If all rows are the same, or for a single logit,
    the outputs must also come from a softmax or a sigmoid.

    Args:
        model: a copy of it is run.
        batch: the inputs.
        likelihood: of the fit.
    """
    if not likelihood.logits:
        return False
    samples = count_samples(batch)
    some = batch.narrow(0, min(samples, _SAMPLES), samples).copied()
    try:
        with torch.enable_grad():
            outputs = some.call(replicate(model).requires_grad_(True))
    except Exception:  # a model that only takes the full batch
        return False
    values = outputs.detach().float()
    if bool(((values < 0) | (values > 1 + _TOLERANCE)).any()):
        return False
    return likelihood.seems_applied(outputs)
