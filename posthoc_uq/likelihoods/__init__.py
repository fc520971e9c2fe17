"""What targets are (the likelihoods), what a prediction is, and how good it is; a family a file."""

from posthoc_uq.likelihoods.class_prediction import ClassPrediction, MultilabelPrediction, OrdinalPrediction
from posthoc_uq.likelihoods.classes import Bernoulli, Categorical, Multilabel
from posthoc_uq.likelihoods.counts import Gamma, NegativeBinomial, Poisson
from posthoc_uq.likelihoods.drawn_prediction import DrawnPrediction
from posthoc_uq.likelihoods.gaussian import Gaussian, Heteroscedastic
from posthoc_uq.likelihoods.likelihood import Fisher, Likelihood
from posthoc_uq.likelihoods.ordinal import Ordinal
from posthoc_uq.likelihoods.positions import PositionPrediction, sequence_scores
from posthoc_uq.likelihoods.prediction import SCORES, Prediction
from posthoc_uq.likelihoods.registry import (
    LIKELIHOODS,
    described,
    likelihood_from_attributes,
    resolve_likelihood,
)
from posthoc_uq.likelihoods.value_prediction import HeteroscedasticPrediction, RegressionPrediction

__all__ = [
    "LIKELIHOODS",
    "SCORES",
    "Bernoulli",
    "Categorical",
    "ClassPrediction",
    "DrawnPrediction",
    "Fisher",
    "Gamma",
    "Gaussian",
    "Heteroscedastic",
    "HeteroscedasticPrediction",
    "Likelihood",
    "Multilabel",
    "MultilabelPrediction",
    "NegativeBinomial",
    "Ordinal",
    "OrdinalPrediction",
    "Poisson",
    "PositionPrediction",
    "Prediction",
    "RegressionPrediction",
    "described",
    "likelihood_from_attributes",
    "resolve_likelihood",
    "sequence_scores",
]
