"""Predictions of a network whose weights have Gaussian marginals: messages forward alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from posthoc_uq.message_passing.network import Belief, Stage
from posthoc_uq.message_passing.passes import Forms, Memory, Pass


def outputs_of(
    stages: Sequence[Stage], posterior: Mapping[int, Belief], inputs: Tensor, *, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs, ``(K, N, J)``, for inputs ``(N, ...)``.

    Args:
        stages: of the network.
        posterior: of the weights, by stage.
        inputs: in float64.
        chunk: examples that pass at the same time.
    """
    networks = 1
    means: list[Tensor] = []
    variances: list[Tensor] = []
    first = min(posterior)
    groups = getattr(stages[first], "groups", 1)
    networks = posterior[first].weights.rho.shape[0] // groups
    for part in inputs.split(chunk):
        own = part.unsqueeze(0).expand(networks, -1, *part.shape[1:])
        message = Pass(stages, dict(posterior), Memory(), Forms(), detailed=False).forward(own)
        means.append(message.mean)
        variances.append(message.variance)
    return torch.cat(means, 1), torch.cat(variances, 1)
