"""Honest uncertainty for trained PyTorch models, after the fact.

``fit`` a posterior over the weights, ``tune`` or ``calibrate`` it, ``save`` and ``load`` it as one safe file, and
``wrap`` the model so that every prediction comes with its uncertainty, which ``evaluate`` puts to the test.

What fewer users need is imported from its room: `posthoc_uq.evaluation` (metrics and plots), `posthoc_uq.likelihoods`
(all kinds of predictions), `posthoc_uq.heads`, `posthoc_uq.methods`, `posthoc_uq.fitting`, `posthoc_uq.deployment`.
"""

from posthoc_uq.core.errors import (
    CorruptPosteriorError,
    NonFiniteError,
    PosteriorMismatchError,
    PosthocUQError,
    UnsupportedLayerError,
)
from posthoc_uq.core.model import untied
from posthoc_uq.deployment import export
from posthoc_uq.evaluation import Evaluation, evaluate
from posthoc_uq.files import inspect, load, save
from posthoc_uq.fitting import calibrate, fit, tune, update, wrap
from posthoc_uq.heads import Predictor, Referral
from posthoc_uq.likelihoods import (
    Bernoulli,
    Categorical,
    ClassPrediction,
    Gamma,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Multilabel,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Prediction,
    RegressionPrediction,
    sequence_scores,
)
from posthoc_uq.methods import (
    EFB,
    INF,
    KFAC,
    UTVI,
    Dense,
    Diagonal,
    FunctionSpace,
    LatentBinary,
    MessagePassing,
    Method,
    Subnetwork,
    contexts,
    register_method,
    sparse,
)
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.version import __version__

__all__ = [
    "EFB",
    "INF",
    "KFAC",
    "UTVI",
    "Bernoulli",
    "Categorical",
    "ClassPrediction",
    "CorruptPosteriorError",
    "Dense",
    "Diagonal",
    "Evaluation",
    "FunctionSpace",
    "Gamma",
    "Gaussian",
    "Heteroscedastic",
    "LatentBinary",
    "Likelihood",
    "MessagePassing",
    "Method",
    "Multilabel",
    "NegativeBinomial",
    "NonFiniteError",
    "Ordinal",
    "Poisson",
    "Posterior",
    "PosteriorMismatchError",
    "PosthocUQError",
    "Prediction",
    "Predictor",
    "Referral",
    "RegressionPrediction",
    "Subnetwork",
    "UnsupportedLayerError",
    "__version__",
    "calibrate",
    "contexts",
    "evaluate",
    "export",
    "fit",
    "inspect",
    "load",
    "register_method",
    "save",
    "sequence_scores",
    "sparse",
    "tune",
    "untied",
    "update",
    "wrap",
]
