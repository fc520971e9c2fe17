"""The likelihoods, one file each; `Likelihood` is their base class."""

from posthoc_uq.likelihoods.base import Fisher, Likelihood
from posthoc_uq.likelihoods.bernoulli import Bernoulli
from posthoc_uq.likelihoods.categorical import Categorical
from posthoc_uq.likelihoods.gamma import Gamma
from posthoc_uq.likelihoods.gaussian import Gaussian
from posthoc_uq.likelihoods.heteroscedastic import Heteroscedastic
from posthoc_uq.likelihoods.multilabel import Multilabel
from posthoc_uq.likelihoods.negative_binomial import NegativeBinomial
from posthoc_uq.likelihoods.ordinal import Ordinal
from posthoc_uq.likelihoods.poisson import Poisson
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
