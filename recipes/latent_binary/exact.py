"""The exact posterior of a logistic regression whose weights are on or off: probabilities of being on, by Gibbs
sampling.

Given Polya-Gamma variables, one for each response, weights are Gaussian (Polson, Scott, Windle 2013, "Bayesian
inference for logistic models using Polya-Gamma latent variables"), so that every weight is switched with all weights
integrated out. Needs the package `polyagamma`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Inclusions(NamedTuple):
    """Probabilities of being on, and their standard errors by the spread of the chains; (inputs,) each."""

    mean: Array
    error: Array


def inclusions(x: Array, y: Array, prior: float, sweeps: int, seed: int = 0, chains: int = 8) -> Inclusions:
    """For ``P(y = 1) = sigmoid(b + sum g w x)`` with ``g ~ Bernoulli(prior)`` and ``w, b ~ N(0, 1)``.

    Args:
        x: (samples, inputs).
        y: 0 or 1, (samples,).
        prior: probability of being on.
        sweeps: of each chain that count; a quarter as many before are left out.
        seed: of all random numbers.
        chains: that run side by side, each from weights drawn on or off.
    """
    from polyagamma import random_polyagamma

    generator = np.random.default_rng(seed)
    samples, inputs = x.shape
    design = np.column_stack([x, np.ones(samples)])
    upper = np.triu_indices(inputs + 1)
    products = design[:, upper[0]] * design[:, upper[1]]
    by_response = design.T @ (y - 0.5)
    on = generator.random((chains, inputs)) < generator.random((chains, 1))
    weights = np.zeros((chains, inputs + 1))
    total = np.zeros((chains, inputs))
    burn_in = sweeps // 4
    for sweep in range(burn_in + sweeps):
        curvature = random_polyagamma(1, weights @ design.T, random_state=generator) @ products
        tableau = np.zeros((chains, inputs + 2, inputs + 2))
        tableau[:, upper[0], upper[1]] = tableau[:, upper[1], upper[0]] = curvature
        tableau[:, range(inputs + 1), range(inputs + 1)] += 1  # the priors' precision
        tableau[:, -1, :-1] = tableau[:, :-1, -1] = by_response
        for input in range(inputs):
            _switch(tableau, input, on[:, input], on=True)
        _switch(tableau, inputs, np.ones(chains, bool), on=True)  # the bias
        for input in generator.permutation(inputs):
            chance = _chance(tableau, input, on[:, input], prior)
            drawn = generator.random(chains) < chance
            _switch(tableau, input, drawn & ~on[:, input], on=True)
            _switch(tableau, input, on[:, input] & ~drawn, on=False)
            on[:, input] = drawn
            if sweep >= burn_in:
                total[:, input] += chance / sweeps
        there = np.column_stack([on, np.ones(chains)])
        covariance = -tableau[:, :-1, :-1] * there[:, :, None] * there[:, None, :]
        covariance[:, range(inputs + 1), range(inputs + 1)] += 1 - there
        noise = np.linalg.cholesky(covariance) @ generator.standard_normal((chains, inputs + 1, 1))
        weights = (tableau[:, :-1, -1] + noise[..., 0]) * there
    return Inclusions(total.mean(0), total.std(0, ddof=1) / chains**0.5)


def _switch(tableau: Array, index: int, chosen: Array, on: bool) -> None:
    """Take a weight into the regression, or out of it, in the chosen chains: Gauss's sweep in place.

    With the precision ``A`` and ``A mean = c``, a tableau ``[[A, c], [c, 0]]`` swept on the weights that are on holds
    minus their covariance and their means, and elsewhere the complements of Schur.
    """
    part = tableau[chosen]
    pivot, row = part[:, index, index], part[:, index, :]
    scaled = row / pivot[:, None]
    part = part - scaled[:, :, None] * row[:, None, :]
    part[:, index, :] = part[:, :, index] = scaled if on else -scaled
    part[:, index, index] = -1 / pivot
    tableau[chosen] = part


def _chance(tableau: Array, index: int, on: Array, prior: float) -> Array:
    """The probability that a weight is on, given which others are: ``(chains,)``."""
    pivot, mean = np.abs(tableau[:, index, index]), tableau[:, index, -1]
    evidence = 0.5 * (mean**2 / pivot + np.where(on, 1, -1) * np.log(pivot))
    return 1 / (1 + (1 - prior) / prior * np.exp(-evidence))
