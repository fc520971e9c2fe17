"""Coordinate ascent for a logistic regression whose weights are on or off: probabilities of being on.

The weights of a fit are independent, each on with its probability and Gaussian where it is on, as without a flow; the
likelihood is replaced by the quadratic bound of Jaakkola and Jordan (2000), "Bayesian parameter estimation via
variational methods". So every update is in closed form (Carbonetto and Stephens 2012, "Scalable variational inference
for Bayesian variable selection in regression").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Fits(NamedTuple):
    """Several fits, of inputs (runs, inputs) and of the bias (runs,).

    Attributes:
        chance: of being on.
        mean: of a weight that is on.
        variance: likewise.
        bias: its mean.
        bias_variance: its variance.
        spread: of the bound, for every response (runs, samples).
    """

    chance: Array
    mean: Array
    variance: Array
    bias: Array
    bias_variance: Array
    spread: Array


def ascended(
    x: Array, y: Array, prior: float, runs: int, seed: int = 0, sweeps: int = 2000, close: float = 1e-5
) -> Fits:
    """For ``P(y = 1) = sigmoid(b + sum g w x)`` with ``g ~ Bernoulli(prior)`` and ``w, b ~ N(0, 1)``.

    Args:
        x: (samples, inputs).
        y: 0 or 1, (samples,).
        prior: probability of being on.
        runs: from other chances and means, both drawn.
        seed: of what is drawn.
        sweeps: over all inputs, at most.
        close: a sweep that changes no chance by more is the last one.
    """
    generator = np.random.default_rng(seed)
    samples, inputs = x.shape
    chance = generator.random((runs, inputs))
    mean, variance = generator.standard_normal((runs, inputs)), np.ones((runs, inputs))
    bias, bias_variance = np.zeros(runs), np.ones(runs)
    logits, spread = (chance * mean) @ x.T, np.ones((runs, samples))
    signed, squares = y - 0.5, x**2
    for _ in range(sweeps):
        before = chance.copy()
        curvature = np.tanh(spread / 2) / (2 * spread)  # of the bound, sigmoid(s) - 1/2 over s
        for j in range(inputs):
            others = logits - np.outer(chance[:, j] * mean[:, j], x[:, j])
            variance[:, j] = 1 / (1 + curvature @ squares[:, j])
            mean[:, j] = variance[:, j] * ((signed - curvature * others) @ x[:, j])
            odds = np.log(prior / (1 - prior) * variance[:, j] ** 0.5) + mean[:, j] ** 2 / (
                2 * variance[:, j]
            )
            chance[:, j] = (1 + np.tanh(odds / 2)) / 2
            logits = others + np.outer(chance[:, j] * mean[:, j], x[:, j])
        others = logits - bias[:, None]
        bias_variance = 1 / (1 + curvature.sum(1))
        bias = bias_variance * (signed - curvature * others).sum(1)
        logits = others + bias[:, None]
        of_weights = chance * (variance + mean**2) - (chance * mean) ** 2
        spread = np.sqrt(logits**2 + of_weights @ squares.T + bias_variance[:, None])
        if np.abs(chance - before).max() < close:
            break
    return Fits(chance, mean, variance, bias, bias_variance, spread)
