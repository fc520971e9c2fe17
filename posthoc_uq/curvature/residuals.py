"""The residuals of the training data; their mean square is the noise variance of a regression."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.arguments import LOADER, explained
from posthoc_uq.curvature.capture import Capture
from posthoc_uq.curvature.content import Content
from posthoc_uq.curvature.operands import weighted
from posthoc_uq.curvature.sweep import SweepSettings, batch_weights, own_batches
from posthoc_uq.devices import as_double, on_host
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.loaders import Bar
from posthoc_uq.randomness import sample_keys


def squared_residuals(
    capture: Capture, loader: Iterable[Any], settings: SweepSettings, content: Content | None = None
) -> tuple[Tensor, float] | None:
    """The weighted sum of squared residuals of each output, ``(outputs,)`` in float64 on the CPU, and the sum of the
    weights (the number of samples where they have none), by a forward pass over the data; None without targets.

    Args:
        content: hashes every batch, if given.

    Raises:
        PosthocUQError: the targets do not fit the outputs.
    """
    total: Tensor | None = None
    count = 0.0
    unit = Gaussian(1.0)
    with torch.no_grad(), Bar(loader, "noise", settings.progress) as bar:
        for index, (batch, samples) in enumerate(own_batches(loader, settings.reader)):
            if batch.targets is None:
                return None
            if content is not None:
                content.see(batch, sample_keys(batch.tensors(), samples, settings.seed))
            with explained(lambda: capture.twin, batch, f"batch {index} of the loader", LOADER):
                outputs = batch.call(capture.twin)
            fault = unit.fault(outputs, batch.targets)
            weights = batch_weights(unit, outputs, batch, str(index))
            squares = as_double(unit.residuals(outputs, batch.targets)).square().reshape(outputs.shape[0], -1)
            squares = weighted(squares, None if weights is None else weights.samples).sum(0)
            sums, *faults = on_host(squares, *([] if fault is None else [fault]))
            if any(faults):
                unit.check(outputs, batch.targets)
            total = sums if total is None else total + sums
            count += samples if weights is None else weights.total
            bar.advance(samples)
    return None if total is None else (total, count)
