"""The residuals of the training data, whose variance is a regression's noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.curvature.capture import Capture
from posthoc_uq.curvature.sweep import SweepSettings, own_batches
from posthoc_uq.devices import as_double
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.loaders import Bar


def squared_residuals(
    capture: Capture, loader: Iterable[Any], settings: SweepSettings
) -> tuple[Tensor, int] | None:
    """Sums of squared residuals of each output, ``(outputs,)`` in float64 on the CPU, and the number of samples, from
    a forward pass over the data; None without labels.

    Raises:
        PosthocUQError: the targets do not fit the outputs.
    """
    total: Tensor | None = None
    seen = 0
    unit = Gaussian(1.0)
    with torch.no_grad(), Bar(loader, "noise", settings.progress) as bar:
        for batch, samples in own_batches(loader, settings.reader):
            if batch.targets is None:
                return None
            outputs = batch.call(capture.twin)
            unit.check(outputs, batch.targets)
            residuals = as_double(unit.residuals(outputs, batch.targets))
            squares = residuals.square().reshape(outputs.shape[0], -1).sum(0).cpu()
            total = squares if total is None else total + squares
            seen += samples
            bar.advance(samples)
    return None if total is None else (total, seen)
