"""What targets are (the likelihoods), what a prediction is, and how good it is; a family a file, each on first use."""

from typing import TYPE_CHECKING

from posthoc_uq.core.registry import names_of

if TYPE_CHECKING:
    from posthoc_uq.likelihoods.bernoulli import Bernoulli, Multilabel, MultilabelPrediction
    from posthoc_uq.likelihoods.class_prediction import ClassPrediction
    from posthoc_uq.likelihoods.classes import Categorical
    from posthoc_uq.likelihoods.counts import Gamma, NegativeBinomial, Poisson
    from posthoc_uq.likelihoods.gaussian import (
        Gaussian,
        Heteroscedastic,
        HeteroscedasticPrediction,
        RegressionPrediction,
    )
    from posthoc_uq.likelihoods.joint import Joint, JointPrediction
    from posthoc_uq.likelihoods.likelihood import DrawnPrediction, Fisher, Likelihood
    from posthoc_uq.likelihoods.maps import DrawnMapPrediction, LabelMapPrediction, MapPrediction
    from posthoc_uq.likelihoods.mixture import GaussianMixturePrediction
    from posthoc_uq.likelihoods.ordinal import Ordinal, OrdinalPrediction
    from posthoc_uq.likelihoods.positions import PositionPrediction, sequence_scores
    from posthoc_uq.likelihoods.prediction import Prediction
    from posthoc_uq.likelihoods.quantiles import QuantilePrediction, Quantiles
    from posthoc_uq.likelihoods.registry import (
        LIKELIHOODS,
        likelihood_from_attributes,
        likelihood_to_attributes,
        resolve_likelihood,
    )
    from posthoc_uq.likelihoods.selective import SCORES
    from posthoc_uq.likelihoods.survival import Survival, SurvivalPrediction

__all__ = [
    "LIKELIHOODS",
    "SCORES",
    "Bernoulli",
    "Categorical",
    "ClassPrediction",
    "DrawnMapPrediction",
    "DrawnPrediction",
    "Fisher",
    "Gamma",
    "Gaussian",
    "GaussianMixturePrediction",
    "Heteroscedastic",
    "HeteroscedasticPrediction",
    "Joint",
    "JointPrediction",
    "LabelMapPrediction",
    "Likelihood",
    "MapPrediction",
    "Multilabel",
    "MultilabelPrediction",
    "NegativeBinomial",
    "Ordinal",
    "OrdinalPrediction",
    "Poisson",
    "PositionPrediction",
    "Prediction",
    "QuantilePrediction",
    "Quantiles",
    "RegressionPrediction",
    "Survival",
    "SurvivalPrediction",
    "likelihood_from_attributes",
    "likelihood_to_attributes",
    "resolve_likelihood",
    "sequence_scores",
]

OFFERED = {
    "bernoulli": "Bernoulli Multilabel MultilabelPrediction",
    "class_prediction": "ClassPrediction",
    "classes": "Categorical",
    "counts": "Gamma NegativeBinomial Poisson",
    "gaussian": "Gaussian Heteroscedastic HeteroscedasticPrediction RegressionPrediction",
    "joint": "Joint JointPrediction",
    "likelihood": "DrawnPrediction Fisher Likelihood",
    "ordinal": "Ordinal OrdinalPrediction",
    "quantiles": "QuantilePrediction Quantiles",
    "survival": "Survival SurvivalPrediction",
    "mixture": "GaussianMixturePrediction",
    "registry": "LIKELIHOODS likelihood_from_attributes likelihood_to_attributes resolve_likelihood",
    # predictions, and what an exported program gives of them
    "maps": "DrawnMapPrediction LabelMapPrediction MapPrediction",
    "positions": "PositionPrediction sequence_scores",
    "prediction": (
        "ClassTensors Prediction PromisedClassTensors PromisedValueTensors RankedClassTensors RankedValueTensors "
        "ValueTensors cat score_of"
    ),
    # promises, and who is handed on
    "conformal": (
        "ConformalScores HeldOutScores JOINT class_scores held_out_scores joint_score quantile set_of "
        "tuned_regularisation wrong_up_to"
    ),
    "selective": "SCORES tail_of",
    # outputs: drawn, of a known distribution, at positions
    "draws": "OutputCovariance OutputGaussian of_covariance of_product",
    "labels": "LabelLayout",
}
"""By file, the names that come on first use."""

__getattr__ = names_of(__name__, OFFERED)
