"""The observation noise of a regression: the (weighted) mean squared residual of the training data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from posthoc_uq.curvature.content import WORD, Content
from posthoc_uq.curvature.residuals import squared_residuals
from posthoc_uq.curvature.sweep import no_weight
from posthoc_uq.devices import as_double
from posthoc_uq.distributed import add_up, gather, together
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.inference.checkpoint import Tensors
from posthoc_uq.inference.task import Task
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.capabilities import VARIANCES
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.warned import warn_user

# Effective parameters per training target above which training residuals are not believed, where that is not a half: a
# diagonal takes what correlated weights have in common for several parameters.
_FREE = {"diag": 1.0}


def set_observation_noise(task: Task) -> str:
    """Set the noise variance of each output by a forward pass over the data, and return in words where it came from.
    Without targets it is taken as 1, with a warning.

    Raises:
        PosthocUQError: the targets do not fit the outputs, or the model fits them without any error.
        NonFiniteError: the residuals are not finite.
    """

    content = Content() if task.checkpoint is not None else None

    def sweep() -> tuple[Tensor, float] | None:
        with isolated_random_state(task.settings.seed):
            return squared_residuals(task.prepared.capture, task.loader, task.settings, content)

    def work() -> Tensors:
        residuals = together(sweep, "the sweep for the noise variance")
        if not all(gather(residuals is not None, "looking for targets")):
            return {}
        assert residuals is not None
        count = torch.tensor(residuals[1], dtype=torch.float64, device="cpu")
        add_up({"total": residuals[0], "count": count}, "the sum for the noise variance")
        if not float(count):
            raise no_weight()
        task.summary.content = (
            sum(gather(0 if content is None else content.total, "comparing the data")) % WORD
        )
        return {"noise": {"variance": residuals[0] / count}}

    stage = task.stage("noise", work)
    if not stage:
        warn_user(
            "The loader gives no targets, so the noise variance of this regression is taken as 1, in squared units of "
            "the targets. Give it with noise_variance=..., a number or one for each output, or fit on a loader of "
            "(inputs, targets), whose mean squared residual is taken."
        )
        return "1, since the loader gives no targets"
    variance = as_double(stage["noise"]["variance"]).cpu()
    if not bool(torch.isfinite(variance).all()):
        raise NonFiniteError(
            "The residuals of the training data are not finite; check the data and the model's weights."
        )
    if not bool((variance > 0).all()):
        raise PosthocUQError(
            "The model reproduces its training targets without error; give noise_variance=... yourself."
        )
    task.settings = replace(task.settings, likelihood=task.settings.likelihood.with_noise(variance))
    return "mean squared residual of the training data"


def warn_if_memorised(posterior: Posterior) -> None:
    """Warn where the network has more than half as many effective parameters as training targets, so that the mean
    squared residual of the training data says too little of the noise.

    The effective number of parameters is ``sum_i (1 - tau r_i Sigma_ii)`` (MacKay 1992) at the weights' own precision,
    ``tau = 1 / mean(r w^2)``: how many directions the data settle. Residuals near zero make the noise small and the
    data strong, so that it grows with memorising, too.
    """
    targets = posterior.evidence.targets * posterior.evidence.total / posterior.evidence.samples
    if not targets or not posterior.takes_prior or VARIANCES not in posterior.capabilities:
        return
    ratios = posterior.weight_prior.precision
    squares = [_times(as_double(w.detach()).square(), ratios.get(name)) for name, w in posterior.mean.items()]
    total = float(sum(square.sum().cpu() for square in squares))
    if total == 0:
        return
    precision = sum(square.numel() for square in squares) / total
    at_own = posterior.snapshot(replace(posterior.settings, prior_precision=precision))
    effective = 0.0
    for name, variance in at_own.variance().items():
        wide = as_double(variance)
        settled = (1 - precision * _times(wide, ratios.get(name))).clamp(min=0)
        effective += float(settled[wide > 0].sum())  # without variance: no part of the posterior
    if effective > _FREE.get(posterior.method, 0.5) * targets:
        warn_user(
            f"The network has about {min(effective, targets):,.0f} effective parameters for {targets:,.0f} training "
            f"targets, so that their residuals say too little of the noise and intervals will be too narrow: tune the "
            f"noise on held-out data, uq.tune(posterior, val_loader) or fit(..., val_loader=...), or give it, "
            f"likelihood=uq.Gaussian(noise_variance=...)."
        )


def _times(values: Tensor, factor: Tensor | None) -> Tensor:
    return values if factor is None else values * as_double(factor).to(values.device)
