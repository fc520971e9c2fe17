"""Whether the likelihood that a fit is given treats every sample by itself."""

from __future__ import annotations

import torch
from torch import nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.loaders import Batch
from posthoc_uq.predictions.rows import check_rows
from posthoc_uq.predictions.samples import at_least_float32
from posthoc_uq.replica import replicate


def check_log_prob(model: nn.Module, batch: Batch, likelihood: Likelihood) -> None:
    """Check the `log_prob` of a user's likelihood on the first batch, where it has targets, by one forward pass.

    Args:
        model: a copy of it is run.
        batch: inputs and targets.
        likelihood: of the fit; those of this package are not checked.

    Raises:
        PosthocUQError: outputs and targets do not fit, or a sample's log probability depends on other samples.
    """
    if batch.targets is None or type(likelihood).log_prob.__module__.startswith("posthoc_uq."):
        return
    with torch.no_grad():
        outputs = at_least_float32(batch.copied().call(replicate(model)))
    if not bool(torch.isfinite(outputs).all()):
        return  # the fit says where this comes from
    try:
        likelihood.check(outputs, batch.targets)
        check_rows(likelihood.log_prob, outputs, batch.targets, likelihood.name)
    except PosthocUQError as error:
        raise PosthocUQError(f"Batch 0: {error}") from None
