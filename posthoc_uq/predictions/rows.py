"""The check that a likelihood's ``log_prob`` gives one number a sample, which depends on no other sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError

_SAMPLES = 32  # of a batch
_TOLERANCE = 1e-3  # relative above 1, absolute below


def check_rows(
    log_prob: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, name: str
) -> None:
    """Compare the log probability of a sample alone with its row among others, for the first and the last of a few.

    Targets ``(samples,)`` and outputs ``(samples, 1)`` broadcast to ``(samples, samples)``, and a sum over the second
    dimension then has the right shape and adds up the other samples' targets.

    Args:
        log_prob: of the likelihood.
        outputs: ``(samples, ...)``.
        targets: ``(samples, ...)``.
        name: of the likelihood.

    Raises:
        PosthocUQError: the result has another shape than ``(samples,)``, or depends on the other samples.
    """
    shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
    outputs, targets = outputs.detach()[:_SAMPLES], targets[:_SAMPLES]
    samples = len(outputs)
    way_out = (
        "give each sample's targets the shape of its outputs, in the data or at the start of log_prob "
        "(targets = targets.reshape(outputs.shape)), and let log_prob reduce every dimension but the first"
    )
    with torch.no_grad():
        together = log_prob(outputs, targets)
        if tuple(together.shape) != (samples,):
            raise PosthocUQError(
                f"log_prob of likelihood {name!r} gives {samples} samples the shape {tuple(together.shape)} and not "
                f"({samples},), one number a sample, for {shapes}; {way_out}."
            )
        for row in {0, samples - 1} if samples > 1 else ():
            alone = log_prob(outputs[row : row + 1], targets[row : row + 1])
            if alone.numel() != 1 or not _same(alone.reshape(()), together[row]):
                raise PosthocUQError(
                    f"log_prob of likelihood {name!r} gives a sample another value alone than among others, for "
                    f"{shapes}, which seem to broadcast against each other; {way_out}."
                )


def _same(one: Tensor, other: Tensor) -> bool:
    a, b = as_double(one), as_double(other)
    return bool(torch.isclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True))
