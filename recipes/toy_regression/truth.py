"""The posterior itself, by the No-U-Turn sampler (Hoffman and Gelman 2014) of NumPyro."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import torch
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from torch import Tensor

from recipes.toy_regression.problem import HIDDEN, Problem, outputs


class Truth(NamedTuple):
    """Draws of the network's function.

    Attributes:
        functions: (draws, points), all chains, in the network's units.
        r_hat: largest split potential scale reduction over the points.
        effective: smallest effective number of draws over the points.
        divergences: transitions that diverged, all chains.
    """

    functions: Tensor
    r_hat: float
    effective: float
    divergences: int


def jax_potential(weights: jax.Array, task: Problem) -> jax.Array:
    """`problem.potential` once more, in the language that the sampler compiles."""
    first, bias, second, last = jnp.split(weights, [HIDDEN, 2 * HIDDEN, 3 * HIDDEN])
    found = jnp.tanh(task.inputs.numpy() * first + bias) @ second + last
    residuals = found - task.targets.squeeze(1).numpy()
    return (residuals**2).sum() / (2 * task.noise) + task.prior_precision / 2 * (weights**2).sum()


def nuts(
    task: Problem, starts: Sequence[Tensor], grid: Tensor, draws: int, warmup: int, seed: int, depth: int = 10
) -> Truth:
    """One chain from every start; diagnostics are of the function, since the weights' signs and order do not matter.

    Args:
        task: data, noise and prior.
        starts: flat weights, one of a chain.
        grid: (points, 1) in the network's units.
        draws: per chain, after `warmup` draws that adapt step size and masses.
        warmup: see `draws`.
        seed: of the sampler.
        depth: a transition takes at most ``2^depth - 1`` steps.
    """
    numpyro.enable_x64()
    first = jnp.asarray(np.stack([start.numpy() for start in starts]))
    kernel = NUTS(
        potential_fn=lambda weights: jax_potential(weights, task),
        target_accept_prob=0.9,
        max_tree_depth=depth,
        dense_mass=True,
    )
    run = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=len(starts),
        chain_method="sequential",
        progress_bar=False,
    )
    run.run(
        jax.random.key(seed),
        init_params=first if len(starts) > 1 else first[0],  # one chain's has no leading dimension
        extra_fields=("diverging",),
    )
    weights = np.array(run.get_samples(group_by_chain=True))
    divergences = int(np.asarray(run.get_extra_fields()["diverging"]).sum())
    chains = outputs(torch.from_numpy(weights), grid)
    return Truth(
        chains.flatten(0, 1),
        float(split_gelman_rubin(chains.numpy()).max()),
        float(effective_sample_size(chains.numpy()).min()),
        divergences,
    )
