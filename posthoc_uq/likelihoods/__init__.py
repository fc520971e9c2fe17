"""The likelihoods, one file each; `Likelihood` is their base class."""

from posthoc_uq.likelihoods.classes import Bernoulli, Categorical, Multilabel
from posthoc_uq.likelihoods.counts import Gamma, NegativeBinomial, Poisson
from posthoc_uq.likelihoods.gaussian import Gaussian, Heteroscedastic
from posthoc_uq.likelihoods.likelihood import Fisher, Likelihood
from posthoc_uq.likelihoods.ordinal import Ordinal
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
    "Gamma",
    "Gaussian",
    "Heteroscedastic",
    "Likelihood",
    "Multilabel",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "described",
    "likelihood_from_attributes",
    "resolve_likelihood",
]
