"""Latent binary networks: which weights a network needs, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posthoc_uq.inference.latent_binary import LATENT_BINARY, train_latent_binary
from posthoc_uq.inference.latent_options import LatentBinaryOptions
from posthoc_uq.inference.task import Task
from posthoc_uq.methods.base import Method
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.values import POSITIVE, put_numbers


@dataclass(frozen=True, kw_only=True)
class LatentBinary(LatentBinaryOptions, Method):
    """A sparse network with uncertainty about its structure: every weight is on or off, and Gaussian where it is on.

    ``w = g (mu z + sd e)`` with ``g ~ Bernoulli(a)``, trained by the evidence lower bound with the outputs of every
    layer drawn by local reparametrisation; with ``flow=True`` the means of a layer have a random factor ``z`` in
    common, made by an inverse autoregressive flow ("Sparsifying Bayesian neural networks with latent binary variables
    and normalizing flows"). The formulas are in ``docs/methods/latent_binary.md``.

    A step costs 2.7 to 4.8 plain ones, with a flow 4 to 6.6 (most in dense networks with small batches), and memory for
    three numbers a weight, their gradients and the optimiser's. It is the one to take for a smaller network, or to ask
    which inputs and weights are needed: the posterior's median probability model (`posthoc_uq.sparse.median`) keeps the
    weights that are more likely on than off. Predictions are by drawn weights. The other heads take the mean and the
    variance of every weight, as if weights were independent. Layers that normalise stay as they are.

    Attributes:
        prior_precision: of a weight that is on; by default that of its layer's mean square, or 1 where the start is
            random.
    """

    name: ClassVar[str] = LATENT_BINARY
    block_kinds: ClassVar[tuple[str, ...]] = ("latent_binary", "median_model")
    tunable: ClassVar[frozenset[str]] = frozenset({"noise_scale", "temperature"})
    weighs_samples: ClassVar[bool] = True

    prior_precision: float | None = None

    def __post_init__(self) -> None:
        Method.__post_init__(self)  # first, so that what follows compares values of the right types
        LatentBinaryOptions.__post_init__(self)
        put_numbers(self, {"prior_precision": POSITIVE})

    @property
    def trains(self) -> bool:
        return True

    def passes(self) -> int:
        return self.least_epochs + 2  # once to count the samples, once for what enters the last layer

    def fit(self, task: Task) -> Posterior:
        return train_latent_binary(task, self, self.prior_precision)
