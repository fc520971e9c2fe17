"""Expectations over one Gaussian output by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.devices import host_double

NODES = 64  # exact for polynomials of degree 127 in the output


@lru_cache(maxsize=1)
def _rule() -> tuple[Tensor, Tensor]:
    """Nodes and weights ``(NODES,)`` for the standard normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    with torch.inference_mode(False):  # cached tensors must work with autograd too
        return host_double(nodes.tolist()), host_double((weights / weights.sum()).tolist())


def _at_nodes(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The function's values ``(NODES, ...)``, and the weights in a shape that fits."""
    nodes, weights = (numbers.to(mean.device, mean.dtype) for numbers in _rule())
    # the root of a variance of 0 has an infinite derivative
    deviation = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
    values = function(mean + deviation * nodes.reshape(-1, *[1] * mean.ndim))
    return values, weights.reshape(-1, *[1] * (values.ndim - 1))


def gaussian_mean(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """``E[function(f)]`` for every single output ``f ~ N(mean, variance)``.

    Args:
        function: from ``(NODES, ...)`` to the same shape, number by number.
        mean: of any shape, in float32 at least.
        variance: of the same shape.
    """
    values, weights = _at_nodes(function, mean, variance)
    return (values * weights).sum(0)


def gaussian_log_mean_exp(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """``log E[exp function(f)]``; see `gaussian_mean`."""
    values, weights = _at_nodes(function, mean, variance)
    return torch.logsumexp(values + weights.log(), 0)
