"""The likelihoods, one file each; `Likelihood` is their base class."""

from posthoc_uq.likelihoods.base import Fisher, Likelihood
from posthoc_uq.likelihoods.bernoulli import Bernoulli
from posthoc_uq.likelihoods.categorical import Categorical
from posthoc_uq.likelihoods.gaussian import Gaussian
from posthoc_uq.likelihoods.registry import (
    LIKELIHOODS,
    described,
    likelihood_from_attributes,
    resolve_likelihood,
)

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Fisher",
    "Gaussian",
    "Likelihood",
    "described",
    "likelihood_from_attributes",
    "resolve_likelihood",
]
