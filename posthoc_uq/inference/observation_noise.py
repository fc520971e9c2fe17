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
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.warned import warn_user


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
