"""Honest uncertainty for trained PyTorch models, after the fact.

``fit`` a posterior over the weights, ``tune`` it, ``save`` and ``load`` it as one safe file, and ``wrap`` the
model so that every prediction comes with its uncertainty, which ``evaluate`` puts to the test.
"""

from posthoc_uq.core.errors import (
    CorruptPosteriorError,
    NonFiniteError,
    PosteriorMismatchError,
    PosthocUQError,
    UnsupportedLayerError,
)
from posthoc_uq.core.model import untied
from posthoc_uq.deployment.export import export, export_onnx, exportable
from posthoc_uq.evaluation import Evaluation, evaluate
from posthoc_uq.files import inspect, load, save
from posthoc_uq.fitting.fit import fit
from posthoc_uq.fitting.tune import tune
from posthoc_uq.fitting.update import update
from posthoc_uq.fitting.wrap import wrap
from posthoc_uq.heads.function_kl import function_space_kl
from posthoc_uq.heads.linearized import LinearizedPredictor
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import refer, referral_reasons, referral_tail, set_referral
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.likelihoods import (
    Bernoulli,
    Categorical,
    Gamma,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Multilabel,
    NegativeBinomial,
    Ordinal,
    Poisson,
)
from posthoc_uq.likelihoods.class_prediction import ClassPrediction, MultilabelPrediction, OrdinalPrediction
from posthoc_uq.likelihoods.drawn_prediction import DrawnPrediction
from posthoc_uq.likelihoods.positions import PositionPrediction, sequence_scores
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.likelihoods.value_prediction import HeteroscedasticPrediction, RegressionPrediction
from posthoc_uq.methods import (
    EFB,
    INF,
    KFAC,
    UTVI,
    Curvature,
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
from posthoc_uq.moments.activations import ConditionalInverseCDF, InverseCDF
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
    "ConditionalInverseCDF",
    "CorruptPosteriorError",
    "Curvature",
    "Dense",
    "Diagonal",
    "DrawnPrediction",
    "Evaluation",
    "FunctionSpace",
    "Gamma",
    "Gaussian",
    "Heteroscedastic",
    "HeteroscedasticPrediction",
    "InverseCDF",
    "LatentBinary",
    "Likelihood",
    "LinearizedPredictor",
    "MessagePassing",
    "Method",
    "MomentsPredictor",
    "Multilabel",
    "MultilabelPrediction",
    "NegativeBinomial",
    "NonFiniteError",
    "Ordinal",
    "OrdinalPrediction",
    "Poisson",
    "PositionPrediction",
    "Posterior",
    "PosteriorMismatchError",
    "PosthocUQError",
    "Prediction",
    "Predictor",
    "RegressionPrediction",
    "SamplingPredictor",
    "Subnetwork",
    "UnsupportedLayerError",
    "__version__",
    "contexts",
    "evaluate",
    "export",
    "export_onnx",
    "exportable",
    "fit",
    "function_space_kl",
    "inspect",
    "load",
    "refer",
    "referral_reasons",
    "referral_tail",
    "register_method",
    "save",
    "sequence_scores",
    "set_referral",
    "sparse",
    "tune",
    "untied",
    "update",
    "wrap",
]
