"""Priors over the weights of a layer: the size of the drawn means, and variances that keep the size of activations.

The constants are moments of a LeakyReLU with the slope 0.1 of ``z ~ N(mu, 2)``, ``mu ~ N(0, 1)``: the mean variance of
its output, and what the paper takes for its mean square.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

OUTPUT_VARIANCE = 0.8040586726631379
OUTPUT_SQUARE = 0.44958619556324186  # of the paper: s^2 (1 + m^2)
TRUE_SQUARE = 0.710938  # s^2 + m^2, the mean square itself
TARGET = 1.5  # variance of the sums in a layer
BIAS_VARIANCE = 0.5


def mean_deviation(inputs: int, outputs: int) -> float:
    """``l``, the standard deviation of the drawn means (a spectral parametrisation)."""
    return min(1.0, sqrt(outputs / inputs)) / sqrt(inputs)


def weight_variance(inputs: int, outputs: int, *, first: bool = False, consistent: bool = False) -> float:
    """The prior variance of a weight.

    Args:
        inputs: of the layer; of a convolution, those of a patch.
        outputs: of the layer; of a convolution, with all its positions.
        first: whether the inputs are constants.
        consistent: the formula with the true mean square of the activations and with the number of inputs in both
            terms; it keeps the variance of the sums where the paper's does not.
    """
    if first:
        return TARGET / inputs
    above = TARGET - OUTPUT_VARIANCE * min(1.0, outputs / inputs)
    if consistent:
        return above / ((OUTPUT_VARIANCE + TRUE_SQUARE) * inputs)
    return above / (OUTPUT_VARIANCE + OUTPUT_SQUARE * inputs)


def drawn_means(
    shape: tuple[int, ...], inputs: int, outputs: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Prior means of weights, drawn once, in float64. With all means 0 hidden units would stay alike for ever."""
    normals = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (normals * mean_deviation(inputs, outputs)).to(device)
